//! Saving a response to a file, completely or not at all.

use crate::api::Api;
use crate::failure::{ExitStatus, Failure, chain};
use reqwest::Response;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The timeout between two chunks of a file.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);

/// Saves the response of the path to a new file that its owner alone can read; `-` is standard output.
pub(crate) async fn save(api: &Api, path: &str, media_type: &str, what: &str, to: &Path) -> Result<(), Failure> {
    if to.as_os_str() == "-" {
        let mut answer = api.open(path, media_type).await?;
        return copy(&mut answer, what, &mut StandardOutput).await.map(drop);
    }
    let mut file = UnfinishedFile::create(to)?;
    let mut answer = api.open(path, media_type).await?;
    let bytes = copy(&mut answer, what, &mut file.file).await?;
    file.keep();
    let saved = serde_json::json!({ "file": to, "bytes": bytes });
    api.out.done(&saved, &format!("{} has {bytes} bytes.", to.display()))
}

/// Standard output. A reader that has closed it, as `head` does, has what it wanted.
struct StandardOutput;

impl Write for StandardOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::stdout().lock().write(bytes).inspect_err(end_without_reader)
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().lock().flush().inspect_err(end_without_reader)
    }
}

fn end_without_reader(error: &io::Error) {
    if error.kind() == io::ErrorKind::BrokenPipe {
        std::process::exit(0);
    }
}

/// A new file that its owner alone can read. It is made before there is anything to write, and removed unless it is kept: a truncated one
/// would look complete.
pub(crate) struct UnfinishedFile {
    pub(crate) file: File,
    path: PathBuf,
    is_complete: bool,
}

impl UnfinishedFile {
    pub(crate) fn create(path: &Path) -> Result<Self, Failure> {
        let shown = path.display();
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
            Ok(file) => Ok(Self { file, path: path.to_owned(), is_complete: false }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(Failure::usage(format!("{shown} is there already")).next("Name another file, or remove that one."))
            }
            Err(error) => Err(Failure::usage(format!("{shown} cannot be made: {error}"))
                .next("Name a file in a folder that you can write to.")),
        }
    }

    pub(crate) fn keep(mut self) {
        self.is_complete = true;
    }
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        if !self.is_complete {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Copies the response's body, and returns its length.
pub(crate) async fn copy(answer: &mut Response, what: &str, into: &mut impl Write) -> Result<u64, Failure> {
    let cut = |why: String| Failure::new(ExitStatus::Network, format!("{what} was cut off: {why}"));
    let failed = |error: io::Error| Failure::new(ExitStatus::Failed, format!("{what} cannot be written: {error}"));
    let mut bytes = 0;
    loop {
        let chunk = tokio::time::timeout(SILENCE_TIMEOUT, answer.chunk()).await;
        let chunk = chunk.map_err(|_| cut("nothing more comes".to_owned()))?;
        let Some(chunk) = chunk.map_err(|error| cut(chain(&error)))? else { break };
        into.write_all(&chunk).map_err(failed)?;
        bytes += chunk.len() as u64;
    }
    into.flush().map_err(failed)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::login::Session;
    use crate::output::{Output, OutputFormat};
    use axum::Router;
    use axum::body::Body;
    use axum::routing::get;
    use futures::stream;

    async fn api(routes: Router) -> Api {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = crate::http_client::address(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        tokio::spawn(async move { axum::serve(listener, routes).await });
        let session = Session::AccessToken("a-token".to_owned().into());
        Api::new(server, None, session, None, Output { format: OutputFormat::Json, quiet: true }).unwrap()
    }

    #[tokio::test]
    async fn file_is_saved_completely_and_never_overwritten() {
        let parts = |last: io::Result<&'static str>| async move {
            Body::from_stream(stream::iter([Ok("one,"), Ok("two,"), last]))
        };
        let routes = Router::new()
            .route("/whole", get(move || parts(Ok("three"))))
            .route("/cut", get(move || parts(Err(io::Error::other("gone")))));
        let api = api(routes).await;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("it.csv");
        let cut = save(&api, "/cut", "text/csv", "the statement", &file).await.unwrap_err();
        assert_eq!(cut.exit_status, ExitStatus::Network);
        assert!(!file.exists(), "half a file is none");
        save(&api, "/whole", "text/csv", "the statement", &file).await.unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "one,two,three");
        let repeated = save(&api, "/whole", "text/csv", "the statement", &file).await.unwrap_err();
        assert_eq!(repeated.exit_status, ExitStatus::Usage, "what is there stays");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "one,two,three");
        // It is found before anything is asked for.
        let nowhere =
            save(&api, "/cut", "text/csv", "the statement", &folder.path().join("no/it.csv")).await.unwrap_err();
        assert!(nowhere.exit_status == ExitStatus::Usage && nowhere.next.is_some(), "{nowhere}");
        let nothing = save(&api, "/nothing", "text/csv", "the statement", &folder.path().join("no")).await;
        assert!(nothing.is_err() && !folder.path().join("no").exists());
    }
}
