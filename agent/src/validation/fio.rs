//! The disk by fio: one file that is written and read in order, past the page cache. Its result is read from the JSON that it writes.

use std::ffi::OsString;
use std::fs;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::statvfs::statvfs;
use serde::Deserialize;

use super::{Budget, MIB, Tools};
use crate::bounded_tool::{self, ToolError};

const TOOL: &str = "fio";
/// What it needs in addition to its run time.
const MARGIN: Duration = Duration::from_secs(20);
/// The file system keeps this much for others.
const SPARED_BYTES: u64 = 256 * MIB;

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Write,
    Read,
}

/// Writes the file, for the time of the budget at most.
///
/// # Errors
/// [`ToolError`]
pub(super) fn write(tools: &Tools<'_>, budget: &Budget) -> Result<u64, ToolError> {
    let wanted = budget.disk_bytes;
    let free = statvfs(tools.folder).map(|it| it.blocks_available() * it.fragment_size());
    match free {
        Ok(free) if free >= wanted + SPARED_BYTES => transfer(tools, Direction::Write, wanted, budget.disk),
        Ok(free) => Err(ToolError::NotTested(format!(
            "the disk of {} has {} MiB free, and the test needs {}",
            tools.folder.display(),
            free / MIB,
            (wanted + SPARED_BYTES) / MIB
        ))),
        Err(error) => Err(ToolError::NotTested(format!("{}: {error}", tools.folder.display()))),
    }
}

/// Reads what was written.
///
/// # Errors
/// [`ToolError`]
pub(super) fn read(tools: &Tools<'_>, budget: &Budget) -> Result<u64, ToolError> {
    // Not more than was written in time: fio would write the rest first, for as long as it takes.
    let written = fs::metadata(tools.data_file()).map_or(0, |it| it.len()) / MIB * MIB;
    if written == 0 {
        return Err(ToolError::NotTested("nothing was written that could be read".to_owned()));
    }
    transfer(tools, Direction::Read, written, budget.disk)
}

fn transfer(tools: &Tools<'_>, direction: Direction, bytes: u64, time: Duration) -> Result<u64, ToolError> {
    let rw = match direction {
        Direction::Write => "write",
        Direction::Read => "read",
    };
    let (seconds, size) = (time.as_secs().max(1), bytes.to_string());
    // No preallocated file: blocks that were never written are read without the disk.
    let options = [
        format!("--name={rw}"),
        format!("--rw={rw}"),
        format!("--size={size}"),
        format!("--runtime={seconds}"),
        "--time_based=1".to_owned(),
        "--bs=1M".to_owned(),
        "--direct=1".to_owned(),
        "--ioengine=psync".to_owned(),
        "--fallocate=none".to_owned(),
        "--thread=1".to_owned(),
        "--output-format=json".to_owned(),
    ];
    let mut args: Vec<OsString> = options.into_iter().map(OsString::from).collect();
    let mut file = OsString::from("--filename=");
    file.push(tools.data_file());
    args.push(file);
    let output = bounded_tool::run(tools.programs, TOOL, &args, time + MARGIN)?;
    bandwidth(&output, direction)
}

#[derive(Deserialize)]
struct Report {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    error: i32,
    read: Transfer,
    write: Transfer,
}

#[derive(Deserialize)]
struct Transfer {
    io_bytes: u64,
    bw_bytes: u64,
}

/// In MiB per second.
fn bandwidth(output: &str, direction: Direction) -> Result<u64, ToolError> {
    let garbage = |why: String| ToolError::Garbage { tool: TOOL.to_owned(), why };
    // Its notes come before the document.
    let begin = if output.starts_with('{') { Some(0) } else { output.find("\n{") };
    let begin = begin.ok_or_else(|| garbage("it has no JSON document".to_owned()))?;
    let report: Report = strict_json::from_str(&output[begin..]).map_err(|error| garbage(error.to_string()))?;
    let [job] = &report.jobs[..] else {
        return Err(garbage(format!("it has {} jobs", report.jobs.len())));
    };
    if job.error != 0 {
        let (status, message) = ("an error".to_owned(), Errno::from_raw(job.error).to_string());
        return Err(ToolError::Ended { tool: TOOL.to_owned(), status, message });
    }
    let done = match direction {
        Direction::Write => &job.write,
        Direction::Read => &job.read,
    };
    if done.io_bytes == 0 {
        return Err(garbage("nothing was transferred".to_owned()));
    }
    Ok(done.bw_bytes / MIB)
}

/// Writes so much without looking at the space that there is.
#[cfg(test)]
pub(super) fn fill(tools: &Tools<'_>, bytes: u64) -> Result<u64, ToolError> {
    transfer(tools, Direction::Write, bytes, Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(error: i32, written: u64) -> String {
        let transfer = |bytes| serde_json::json!({ "io_bytes": bytes, "bw_bytes": bytes * 10, "iops": 0.5 });
        let job = serde_json::json!({ "error": error, "read": transfer(0), "write": transfer(written) });
        serde_json::json!({ "fio version": "fio-3.33", "jobs": [job] }).to_string()
    }

    #[test]
    fn bandwidth_is_read_from_the_tools_json() {
        assert_eq!(bandwidth(&document(0, 64 * MIB), Direction::Write), Ok(640));
        assert_eq!(bandwidth(&format!("note: a line\n{}", document(0, MIB)), Direction::Write), Ok(10));
    }

    #[test]
    fn everything_else_is_refused() {
        let wrong = |text: &str| bandwidth(text, Direction::Write).unwrap_err().to_string();
        for text in ["", "fio: error", "{}", r#"{"jobs":[]}"#, "{\"jobs\": [", &document(0, 0)] {
            assert!(wrong(text).starts_with("the output of fio is not as expected"), "{text}: {}", wrong(text));
        }
        assert!(wrong(&document(28, 0)).contains("No space left"), "{}", wrong(&document(28, 0)));
        assert!(bandwidth(&document(0, MIB), Direction::Read).is_err(), "nothing was read");
    }
}
