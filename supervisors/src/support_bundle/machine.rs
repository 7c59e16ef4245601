//! What the machine says: versions, memory, load, and the service's log.

use super::archive::LONGEST_ITEM;
use super::items::{Collecting, pretty};
use super::{STANDARD_STREAM, SupportBundleArgs};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;
use tokio::time::{Instant, timeout_at};

/// How long a log is read; less than the limit of its item, so that what was read by then is taken.
const READ_WITHIN: Duration = Duration::from_secs(15);

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

/// The end of a file or of standard input, or of the unit's journal.
pub(super) fn log(args: &SupportBundleArgs) -> Collecting {
    match args.log_file.clone() {
        Some(file) if file == Path::new(STANDARD_STREAM) => Box::pin(async {
            let read = end_of_stream(&mut standard_input(), Instant::now() + READ_WITHIN).await;
            read.map_err(|error| format!("standard input: {error}"))
        }),
        Some(file) => Box::pin(async move {
            let read = tokio::task::spawn_blocking(move || end_of(&file)).await;
            read.unwrap_or_else(|error| Err(error.to_string()))
        }),
        None => Box::pin(journal(args.unit.clone(), args.log_hours)),
    }
}

/// Read by a thread of its own, which is left behind where the stream does not end.
fn standard_input() -> tokio::io::DuplexStream {
    const CHUNK: usize = 64 * 1024;
    let (mut writing, reading) = tokio::io::duplex(CHUNK);
    let runtime = tokio::runtime::Handle::current();
    std::thread::spawn(move || {
        let mut buffer = vec![0; CHUNK];
        while let Ok(count @ 1..) = std::io::stdin().read(&mut buffer) {
            if runtime.block_on(writing.write_all(&buffer[..count])).is_err() {
                break;
            }
        }
    });
    reading
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
    // The newest line first: of a journal that is longer than what is taken, or slow, the end is there.
    command.args(["--no-pager", "--quiet", "--reverse", "--output", "cat", "--unit", &unit]);
    command.args(["--since", &format!("-{hours}h")]);
    command.env("LC_ALL", "C").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().map_err(|error| format!("{program}: {error}"))?;
    let (mut out, errors) = (child.stdout.take().ok_or("no output")?, child.stderr.take().ok_or("no output")?);
    let until = Instant::now() + READ_WITHIN;
    let mut messages = String::new();
    let reading_errors = async {
        let _ = timeout_at(until, errors.take(FACT_BYTES).read_to_string(&mut messages)).await;
    };
    let (read, ()) = tokio::join!(begin_of_reversed(&mut out, until), reading_errors);
    let (content, is_whole) = read.map_err(|error| error.to_string())?;
    if !content.is_empty() {
        // One that is longer is not read to its end.
        return Ok(content);
    }
    if !is_whole {
        return Err(format!("{program} printed nothing within {} s", READ_WITHIN.as_secs()));
    }
    let status = child.wait().await.map_err(|error| error.to_string())?;
    Err(match status.success() {
        false => format!("{program} ended with {status}: {}", messages.trim()),
        true => format!(
            "the journal has nothing of {unit} in these hours, or this user may not read it: run as root, or name --log-file {}",
            messages.trim()
        ),
    })
}

/// The whole lines that are read by `until` and fit, oldest first, from a stream that begins with its newest line. The flag is true where
/// that is the whole stream.
async fn begin_of_reversed(stream: &mut (impl AsyncRead + Unpin), until: Instant) -> std::io::Result<(Vec<u8>, bool)> {
    let mut reversed = Vec::new();
    let mut stream = stream.take(LONGEST_ITEM as u64);
    // What was read before is there.
    let ended = match timeout_at(until, stream.read_to_end(&mut reversed)).await {
        Ok(read) => read.map(|_| true)?,
        Err(_) => false,
    };
    let is_whole = ended && reversed.len() < LONGEST_ITEM;
    let whole_lines = match is_whole {
        true => reversed.len(),
        false => reversed.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1),
    };
    let lines = reversed[..whole_lines].split_inclusive(|byte| *byte == b'\n');
    Ok((lines.rev().flatten().copied().collect(), is_whole))
}

/// The end of a stream of any length, in bounded memory; of one that does not end in time, the end of what was read.
async fn end_of_stream(stream: &mut (impl AsyncRead + Unpin), until: Instant) -> std::io::Result<Vec<u8>> {
    let (mut end, mut is_cut, mut buffer) = (VecDeque::new(), false, vec![0; 64 * 1024]);
    loop {
        let count = match timeout_at(until, stream.read(&mut buffer)).await {
            Ok(read) => read?,
            Err(_) => 0,
        };
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
        let until = Instant::now() + READ_WITHIN;
        let streamed = end_of_stream(&mut text.as_bytes(), until).await.unwrap();
        for end in [end_of(&path).unwrap(), streamed] {
            assert!(end.len() <= LONGEST_ITEM && end.len() > LONGEST_ITEM - 2048, "{}", end.len());
            assert!(end.starts_with(b"x") && end.ends_with(b"the last line\n"));
            assert_eq!(end.iter().position(|byte| *byte == b'\n'), Some(1023), "the first line is whole");
        }
        std::fs::write(&path, "one\ntwo\n").unwrap();
        assert_eq!(end_of(&path).unwrap(), b"one\ntwo\n");
    }

    #[tokio::test]
    async fn newest_whole_lines_of_a_long_or_slow_journal_are_taken() {
        let until = Instant::now() + READ_WITHIN;
        let whole = begin_of_reversed(&mut &b"three\ntwo\none\n"[..], until).await.unwrap();
        assert_eq!(whole, (b"one\ntwo\nthree\n".to_vec(), true));
        let long = format!("the last line\n{}", ("x".repeat(1023) + "\n").repeat(LONGEST_ITEM / 1024 + 100));
        let (content, is_whole) = begin_of_reversed(&mut long.as_bytes(), until).await.unwrap();
        assert!(!is_whole && content.ends_with(b"x\nthe last line\n"));
        assert_eq!(content.iter().position(|byte| *byte == b'\n'), Some(1023), "the first line is whole");

        // A program that prints the newest lines and hangs.
        let (mut writing, mut reading) = tokio::io::duplex(64);
        writing.write_all(b"two\none\nhal").await.unwrap();
        let soon = || Instant::now() + std::time::Duration::from_millis(50);
        let slow = begin_of_reversed(&mut reading, soon()).await.unwrap();
        assert_eq!(slow, (b"one\ntwo\n".to_vec(), false));
        writing.write_all(b"one\ntwo\n").await.unwrap();
        assert_eq!(end_of_stream(&mut reading, soon()).await.unwrap(), b"one\ntwo\n");
    }
}
