//! What the machine says: versions, memory, load, and the service's log.

use super::SupportBundleArgs;
use super::archive::LONGEST_ITEM;
use super::items::{Collecting, pretty};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::process::Stdio;
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;

/// What is read of each small file.
const FACT_BYTES: u64 = 16 * 1024;
const FACTS: [(&str, &str); 7] = [
    ("kernel", "/proc/version"),
    ("system", "/etc/os-release"),
    ("uptime", "/proc/uptime"),
    ("load", "/proc/loadavg"),
    ("memory", "/proc/meminfo"),
    ("pressure_of_memory", "/proc/pressure/memory"),
    ("pressure_of_io", "/proc/pressure/io"),
];

pub(super) fn facts() -> Collecting {
    Box::pin(async {
        let mut facts = Map::new();
        for (name, path) in FACTS {
            let mut text = String::new();
            let read = std::fs::File::open(path).and_then(|file| file.take(FACT_BYTES).read_to_string(&mut text));
            facts.insert(name.to_owned(), read.map_or(Value::Null, |_| Value::String(text)));
        }
        Ok(pretty(&json!({
            "gpuaas": env!("CARGO_PKG_VERSION"),
            "schema": persistence::migrate::known(),
            "processors": std::thread::available_parallelism().map_or(0, usize::from),
            "machine": facts,
        })))
    })
}

/// The end of a file, or of the unit's journal.
pub(super) fn log(args: &SupportBundleArgs) -> Collecting {
    match args.log_file.clone() {
        Some(file) => Box::pin(async move {
            let read = tokio::task::spawn_blocking(move || end_of(&file)).await;
            read.unwrap_or_else(|error| Err(error.to_string()))
        }),
        None => Box::pin(journal(args.unit.clone(), args.log_hours)),
    }
}

fn end_of(path: &Path) -> Result<Vec<u8>, String> {
    let failed = |error: std::io::Error| format!("{} cannot be read: {error}", path.display());
    let mut file = std::fs::File::open(path).map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    let begin = length.saturating_sub(LONGEST_ITEM as u64);
    file.seek(SeekFrom::Start(begin)).map_err(failed)?;
    let mut content = Vec::new();
    file.take(LONGEST_ITEM as u64).read_to_end(&mut content).map_err(failed)?;
    Ok(if begin == 0 { content } else { after_first_line(content) })
}

/// A line that begins before the content is left out.
fn after_first_line(mut content: Vec<u8>) -> Vec<u8> {
    let begin = content.iter().position(|byte| *byte == b'\n').map_or(content.len(), |at| at + 1);
    content.drain(..begin);
    content
}

async fn journal(unit: String, hours: u32) -> Result<Vec<u8>, String> {
    // Of root alone: nothing in the folder of a caller is run.
    let program = ["/usr/bin/journalctl", "/bin/journalctl"].into_iter().find(|program| Path::new(program).exists());
    let program = program.ok_or("there is no journalctl; name the service's log with --log-file")?;
    let mut command = Command::new(program);
    command.args(["--no-pager", "--quiet", "--output", "cat", "--unit", &unit, "--since", &format!("-{hours}h")]);
    command.env("LC_ALL", "C").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().map_err(|error| format!("{program}: {error}"))?;
    let (mut out, errors) = (child.stdout.take().ok_or("no output")?, child.stderr.take().ok_or("no output")?);
    let mut messages = String::new();
    let reading_errors = async {
        let _ = errors.take(FACT_BYTES).read_to_string(&mut messages).await;
    };
    let (content, ()) = tokio::join!(end_of_stream(&mut out), reading_errors);
    let content = content.map_err(|error| error.to_string())?;
    let status = child.wait().await.map_err(|error| error.to_string())?;
    match (status.success(), content.is_empty()) {
        (false, _) => Err(format!("{program} ended with {status}: {}", messages.trim())),
        (true, true) => Err(format!(
            "the journal has nothing of {unit} in these hours, or this user may not read it: run as root, or name --log-file {}",
            messages.trim()
        )),
        (true, false) => Ok(content),
    }
}

/// The end of a stream of any length, in bounded memory.
async fn end_of_stream(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> std::io::Result<Vec<u8>> {
    let (mut end, mut is_cut, mut buffer) = (VecDeque::new(), false, vec![0; 64 * 1024]);
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            break;
        }
        end.extend(&buffer[..count]);
        let over = end.len().saturating_sub(LONGEST_ITEM);
        is_cut |= over > 0;
        end.drain(..over);
    }
    let end = Vec::from(end);
    Ok(if is_cut { after_first_line(end) } else { end })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn of_a_long_log_whole_lines_of_its_end_are_taken() {
        let line = "x".repeat(1023) + "\n";
        let text = line.repeat(LONGEST_ITEM / 1024 + 100) + "the last line\n";
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        std::fs::write(&path, &text).unwrap();
        let streamed = end_of_stream(&mut text.as_bytes()).await.unwrap();
        for end in [end_of(&path).unwrap(), streamed] {
            assert!(end.len() <= LONGEST_ITEM && end.len() > LONGEST_ITEM - 2048, "{}", end.len());
            assert!(end.starts_with(b"x") && end.ends_with(b"the last line\n"));
            assert_eq!(end.iter().position(|byte| *byte == b'\n'), Some(1023), "the first line is whole");
        }
        std::fs::write(&path, "one\ntwo\n").unwrap();
        assert_eq!(end_of(&path).unwrap(), b"one\ntwo\n");
    }
}
