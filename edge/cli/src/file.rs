//! An answer that is kept in a file, whole or not at all.

use crate::api::Api;
use crate::failure::{Ended, Failure, chain};
use reqwest::Response;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

/// Whoever says nothing for so long in the middle of a file is gone.
const SILENT_AFTER: Duration = Duration::from_secs(30);

/// Keeps what the path answers with in a file that is not there yet, readable by its owner alone; `-` is standard output.
pub(crate) async fn keep(api: &Api, path: &str, media_type: &str, what: &str, to: &Path) -> Result<(), Failure> {
    let mut answer = api.open(path, media_type).await?;
    if to.as_os_str() == "-" {
        return copied(&mut answer, what, &mut io::stdout().lock()).await.map(drop);
    }
    let unkept = |error: io::Error| Failure::usage(format!("{}: {error}", to.display()));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to).map_err(unkept)?;
    match copied(&mut answer, what, &mut file).await {
        Ok(bytes) => {
            let kept = serde_json::json!({ "file": to, "bytes": bytes });
            api.out.done(&kept, &format!("{} has {bytes} bytes.", to.display()))
        }
        Err(failure) => {
            // Half of it looks like all of it.
            let _ = std::fs::remove_file(to);
            Err(failure)
        }
    }
}

/// Writes on what is answered, and says how many bytes that were.
pub(crate) async fn copied(answer: &mut Response, what: &str, into: &mut impl Write) -> Result<u64, Failure> {
    let cut = |why: String| Failure::new(Ended::Network, format!("{what} was cut off: {why}"));
    let failed = |error: io::Error| Failure::new(Ended::Failed, format!("{what} cannot be written: {error}"));
    let mut bytes = 0;
    loop {
        let chunk = tokio::time::timeout(SILENT_AFTER, answer.chunk()).await;
        let chunk = chunk.map_err(|_| cut("nothing more comes".to_owned()))?;
        let Some(chunk) = chunk.map_err(|error| cut(chain(&error)))? else { break };
        into.write_all(&chunk).map_err(failed)?;
        bytes += chunk.len() as u64;
    }
    into.flush().map_err(failed)?;
    Ok(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::login::Session;
    use crate::out::{Format, Out};
    use axum::Router;
    use axum::body::Body;
    use axum::routing::get;
    use futures::stream;

    async fn api(routes: Router) -> Api {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = crate::web::address(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        tokio::spawn(async move { axum::serve(listener, routes).await });
        let session = Session::Given("a-token".to_owned().into());
        Api::new(server, None, session, None, Out { format: Format::Json, quiet: true }).unwrap()
    }

    #[tokio::test]
    async fn a_file_is_kept_whole_and_never_written_over() {
        let parts = |last: io::Result<&'static str>| async move {
            Body::from_stream(stream::iter([Ok("one,"), Ok("two,"), last]))
        };
        let routes = Router::new()
            .route("/whole", get(move || parts(Ok("three"))))
            .route("/cut", get(move || parts(Err(io::Error::other("gone")))));
        let api = api(routes).await;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("it.csv");
        let cut = keep(&api, "/cut", "text/csv", "the statement", &file).await.unwrap_err();
        assert_eq!(cut.ended, Ended::Network);
        assert!(!file.exists(), "half a file is none");
        keep(&api, "/whole", "text/csv", "the statement", &file).await.unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "one,two,three");
        let again = keep(&api, "/whole", "text/csv", "the statement", &file).await.unwrap_err();
        assert_eq!(again.ended, Ended::Usage, "what is there stays");
        let nothing = keep(&api, "/nothing", "text/csv", "the statement", &folder.path().join("no")).await;
        assert!(nothing.is_err() && !folder.path().join("no").exists());
    }
}
