//! A tool of the machine as a child process: with low priority, and bounded in time and output.
//!
//! The tool is in a process group of its own, which is killed at the deadline, and it gets a signal to end with the agent: a load never
//! outlives the validation that began it, and a hanging driver or service manager delays no task past its deadline.

use std::ffi::OsString;
use std::io::{ErrorKind, Read, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

/// The most bytes of a tool's output that are read.
const MAX_OUTPUT: u64 = 256 * 1024;
/// The most characters of its error output in a message.
const MAX_MESSAGE: usize = 300;
/// Of the tool itself, and of the agent where it has none.
const DEFAULT_PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
const POLL: Duration = Duration::from_millis(10);
/// What is killed ends at once, unless it hangs in the kernel.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the rest of an ended tool's output is awaited: what has left its process group may hold the pipe open.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(10);
/// What starts the tool: its programs are in every Debian, and replace one another in the same process.
const LOW_PRIORITY: [&str; 9] =
    ["/usr/bin/setpriv", "--pdeathsig", "KILL", "/usr/bin/nice", "-n", "5", "/usr/bin/ionice", "-n", "7"];

/// Why a tool gave no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ToolError {
    /// The test was not made, which is no fault of the machine.
    #[error("{0}")]
    NotTested(String),
    #[error("{tool} did not end within {seconds} s and was killed")]
    Hung { tool: String, seconds: u64 },
    #[error("{tool} ended with {status}: {message}")]
    Ended { tool: String, status: String, message: String },
    #[error("{tool} wrote more than {MAX_OUTPUT} bytes and was killed")]
    TooMuchOutput { tool: String },
    #[error("the output of {tool} is not as expected: {why}")]
    Garbage { tool: String, why: String },
    #[error("{tool} cannot be run: {why}")]
    NotRun { tool: String, why: String },
}

/// Runs a program of this folder until it ends, or for `limit`. Returns its standard output.
///
/// # Errors
/// [`ToolError`]
pub(crate) fn run(folder: &Path, tool: &str, args: &[OsString], limit: Duration) -> Result<String, ToolError> {
    run_to_end(folder, tool, args, limit)?.into_result(tool)
}

/// What a tool that ended by itself has left.
#[derive(Debug)]
pub(crate) struct EndedTool {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl EndedTool {
    /// Its standard output, where it has succeeded.
    fn into_result(self, tool: &str) -> Result<String, ToolError> {
        if self.status.success() {
            return Ok(self.stdout);
        }
        let message = shortened(&self.stderr, &self.stdout);
        Err(ToolError::Ended { tool: tool.to_owned(), status: described(self.status), message })
    }
}

/// The same for a program that is found as a shell finds it, with this on its standard input.
///
/// # Errors
/// [`ToolError`].
pub(crate) fn run_of_path(tool: &str, args: &[&str], input: &[u8], limit: Duration) -> Result<String, ToolError> {
    let args: Vec<OsString> = args.iter().map(OsString::from).collect();
    let ended = run_with_input(&folder_of(tool), tool, &args, input, limit)?;
    ended.into_result(tool)
}

/// The first folder of the search path with this program.
fn folder_of(tool: &str) -> PathBuf {
    let folders = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
    let found = std::env::split_paths(&folders).find(|folder| folder.is_absolute() && folder.join(tool).is_file());
    found.unwrap_or_else(|| PathBuf::from("/usr/bin"))
}

/// Runs a program of this folder until it ends, or for `limit`, whatever its status is.
///
/// # Errors
/// [`ToolError`], where it did not end by itself.
pub(crate) fn run_to_end(
    folder: &Path,
    tool: &str,
    args: &[OsString],
    limit: Duration,
) -> Result<EndedTool, ToolError> {
    run_with_input(folder, tool, args, &[], limit)
}

fn run_with_input(
    folder: &Path,
    tool: &str,
    args: &[OsString],
    input: &[u8],
    limit: Duration,
) -> Result<EndedTool, ToolError> {
    let program = folder.join(tool);
    if !program.is_file() {
        return Err(ToolError::NotTested(format!("{tool} is not installed in {}", folder.display())));
    }
    let not_run = |why: &dyn std::fmt::Display| ToolError::NotRun { tool: tool.to_owned(), why: why.to_string() };
    let [first, wrappers @ ..] = LOW_PRIORITY;
    let mut child = Command::new(first)
        .args(wrappers)
        .arg(program)
        .args(args)
        .env_clear()
        .envs([("PATH", DEFAULT_PATH), ("LC_ALL", "C")])
        .stdin(if input.is_empty() { Stdio::null() } else { Stdio::piped() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|error| not_run(&error))?;
    let deadline = Instant::now() + limit;
    let (stdout, stderr) = (reader(child.stdout.take()), reader(child.stderr.take()));
    if let Some(mut stdin) = child.stdin.take() {
        let input = input.to_owned();
        // A tool that reads nothing fills the pipe. One that ends before it has read everything says why on its standard error.
        std::thread::spawn(move || stdin.write_all(&input));
    }
    let waited = wait(&child, &stdout, deadline);
    // Also what the tool has started and left behind: it would hold the pipes open. The tool is not reaped yet, so that its id is no other's.
    end_group(&child);
    let hung = || ToolError::Hung { tool: tool.to_owned(), seconds: limit.as_secs() };
    let status = reap(child, END_TIMEOUT).map_err(|error| not_run(&error))?.ok_or_else(hung)?;
    match waited {
        Waited::Ended => Ok(EndedTool { status, stdout: stdout.text(), stderr: stderr.text() }),
        Waited::TooMuchOutput => Err(ToolError::TooMuchOutput { tool: tool.to_owned() }),
        Waited::TimedOut => Err(hung()),
    }
}

enum Waited {
    Ended,
    TooMuchOutput,
    TimedOut,
}

fn wait(child: &Child, stdout: &Output, deadline: Instant) -> Waited {
    loop {
        if stdout.is_too_long() {
            return Waited::TooMuchOutput;
        }
        if has_ended(child) {
            return Waited::Ended;
        }
        if Instant::now() >= deadline {
            return Waited::TimedOut;
        }
        std::thread::sleep(POLL);
    }
}

/// Whether it can be reaped. It is not reaped here.
fn has_ended(child: &Child) -> bool {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    !matches!(waitid(Id::Pid(process_id(child)), flags), Ok(WaitStatus::StillAlive) | Err(Errno::EINTR))
}

fn end_group(child: &Child) {
    let _ = killpg(process_id(child), Signal::SIGKILL);
}

/// The status of a tool that has ended or was killed. `None` where it cannot end, as in a call of a disk that hangs: it is left to itself, so
/// that the agent goes on.
fn reap(mut child: Child, timeout: Duration) -> std::io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            std::thread::spawn(move || child.wait());
            return Ok(None);
        }
        std::thread::sleep(POLL);
    }
}

fn process_id(child: &Child) -> Pid {
    Pid::from_raw(child.id().cast_signed())
}

/// What is read of a pipe, up to the bound.
struct Output {
    text: Receiver<Vec<u8>>,
    is_too_long: Arc<AtomicBool>,
}

impl Output {
    fn is_too_long(&self) -> bool {
        self.is_too_long.load(Ordering::Relaxed)
    }

    fn text(&self) -> String {
        let bytes = self.text.recv_timeout(OUTPUT_TIMEOUT).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn reader(pipe: Option<impl Read + Send + 'static>) -> Output {
    let (sender, text) = channel();
    let is_too_long = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&is_too_long);
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(pipe) = pipe {
            let mut pipe = pipe.take(MAX_OUTPUT);
            while let Err(error) = pipe.read_to_end(&mut bytes) {
                if error.kind() != ErrorKind::Interrupted {
                    break;
                }
            }
            let is_full = u64::try_from(bytes.len()).is_ok_and(|length| length >= MAX_OUTPUT);
            flag.store(is_full, Ordering::Relaxed);
            let _ = sender.send(bytes);
            // The tool may go on writing; it is killed for that, or ends.
            let _ = std::io::copy(&mut pipe.into_inner(), &mut std::io::sink());
        }
    });
    Output { text, is_too_long }
}

fn described(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "no status".to_owned(),
    }
}

/// The end of what the tool wrote, where it says why it failed.
fn shortened(stderr: &str, stdout: &str) -> String {
    let text = if stderr.trim().is_empty() { stdout } else { stderr };
    let text: Vec<char> = text.split_whitespace().collect::<Vec<_>>().join(" ").chars().collect();
    text[text.len().saturating_sub(MAX_MESSAGE)..].iter().collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(300);
    /// Longer than anything takes here that does not wait for a limit, or for the end of a `sleep`.
    const HANGS_AFTER: Duration = Duration::from_secs(90);

    /// A tool that is this shell script.
    fn scripted(script: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("tool");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        folder
    }

    fn ran(script: &str, limit: Duration) -> Result<String, ToolError> {
        run(scripted(script).path(), "tool", &["one".into()], limit)
    }

    /// The child of which the tool has written the number.
    fn child_of(folder: &tempfile::TempDir) -> Option<u32> {
        std::fs::read_to_string(folder.path().join("child")).ok()?.trim().parse().ok()
    }

    /// What is killed ends a moment later.
    fn expect_end_of(pid: u32) {
        let begun = Instant::now();
        loop {
            let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            if state.is_empty() || state.contains(") Z ") {
                return;
            }
            assert!(begun.elapsed() < HANGS_AFTER, "its child is left: {state}");
            std::thread::sleep(POLL);
        }
    }

    #[test]
    fn output_of_a_tool_is_returned_and_its_priority_is_low() {
        let output = ran("echo $1; nice; ionice; env", LIMIT).unwrap();
        let lines: Vec<_> = output.lines().collect();
        // The test may have a low priority itself.
        let nice: i32 = lines[1].parse().unwrap();
        assert!(lines[0] == "one" && nice >= 5 && lines[2] == "best-effort: prio 7", "{output}");
        assert!(!output.contains("CARGO"), "the tool gets an environment of its own: {output}");
    }

    #[test]
    fn tool_of_the_search_path_reads_its_input_to_the_end() {
        let input = "x".repeat(1 << 17);
        assert_eq!(run_of_path("cat", &[], input.as_bytes(), LIMIT).unwrap(), input);
        // One that reads none of it ends all the same.
        assert_eq!(run_of_path("true", &[], input.as_bytes(), LIMIT).unwrap(), "");
        let missing = run_of_path("a-tool-of-no-package", &[], &[], LIMIT).unwrap_err();
        assert!(matches!(missing, ToolError::NotTested(_)), "{missing}");
    }

    #[test]
    fn tool_that_is_not_installed_is_not_tested() {
        let folder = tempfile::tempdir().unwrap();
        let error = run(folder.path(), "tool", &[], LIMIT).unwrap_err();
        assert!(matches!(&error, ToolError::NotTested(why) if why.contains("tool is not installed in")), "{error}");
    }

    #[test]
    fn tool_that_hangs_is_killed_with_its_children_at_the_deadline() {
        let folder = scripted(r#"sleep 1000 & echo $! >"$(dirname "$0")/child"; sleep 1000"#);
        // On a busy machine the first limits are over before the tool has started its child.
        let child = [500, 5_000, 60_000].into_iter().map(Duration::from_millis).find_map(|limit| {
            let begun = Instant::now();
            let error = run(folder.path(), "tool", &[], limit).unwrap_err();
            assert!(matches!(error, ToolError::Hung { .. }), "{error}");
            assert!(begun.elapsed() < limit + HANGS_AFTER, "{:?}", begun.elapsed());
            child_of(&folder)
        });
        expect_end_of(child.expect("the tool starts its child within a minute"));
    }

    #[test]
    fn child_that_a_tool_leaves_behind_is_killed_and_not_waited_for() {
        let folder = scripted(r#"sleep 1000 & echo $! >"$(dirname "$0")/child"; echo done"#);
        let begun = Instant::now();
        assert_eq!(run(folder.path(), "tool", &[], LIMIT).unwrap(), "done\n");
        assert!(begun.elapsed() < HANGS_AFTER, "{:?}", begun.elapsed());
        expect_end_of(child_of(&folder).unwrap());
    }

    #[test]
    fn huge_output_ends_a_tool() {
        let begun = Instant::now();
        let error = ran("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done", LIMIT).unwrap_err();
        assert!(matches!(error, ToolError::TooMuchOutput { .. }), "{error}");
        assert!(begun.elapsed() < HANGS_AFTER, "{:?}", begun.elapsed());
    }

    #[test]
    fn failure_says_what_the_tool_wrote_last() {
        let error = ran("echo fine; echo 'no   space left' >&2; exit 3", LIMIT).unwrap_err();
        assert_eq!(error.to_string(), "tool ended with status 3: no space left");
    }

    #[test]
    fn tool_that_cannot_end_is_left_to_itself() {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let id = process_id(&child);
        assert_eq!(reap(child, Duration::from_millis(50)).unwrap(), None);
        nix::sys::signal::kill(id, Signal::SIGKILL).unwrap();
    }
}
