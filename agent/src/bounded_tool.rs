//! A tool of the machine as a child process, bounded in time and output. It is the only way in which the agent runs a program that it waits for:
//! a hanging driver, service manager or program of a tenant delays no task past its deadline.
//!
//! The tool is in a process group of its own, which is killed at the deadline. A test of the hardware has a low priority, too, and gets a signal
//! to end with the agent: a load never outlives the validation that began it. A tool that changes the machine's files has neither.

use std::ffi::{OsStr, OsString};
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

/// The most bytes of a tool's output that are read, where it is not known to write more.
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

/// How long a tool may take that does one thing to one object: it waits for nothing but a disk.
pub(crate) const SHORT_LIMIT: Duration = Duration::from_secs(10);

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
    #[error("{tool} wrote more than {bytes} bytes and was killed")]
    TooMuchOutput { tool: String, bytes: u64 },
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

/// A program of this machine that is about to be run.
pub(crate) struct Tool {
    name: String,
    command: Command,
    input: Vec<u8>,
    max_output: u64,
    is_silent: bool,
}

impl Tool {
    /// By its path, or by a name that is found as a shell finds it. Its environment has nothing of the agent's.
    pub(crate) fn new(program: impl AsRef<OsStr>) -> Self {
        let program = Path::new(program.as_ref());
        let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
        let is_name = program.components().count() == 1 && !program.is_absolute();
        let path = if is_name { folder_of(&name).join(&name) } else { program.to_owned() };
        Self::of(name, Command::new(path))
    }

    fn of(name: String, mut command: Command) -> Self {
        command.env_clear().envs([("PATH", DEFAULT_PATH), ("LC_ALL", "C")]);
        Self { name, command, input: Vec::new(), max_output: MAX_OUTPUT, is_silent: false }
    }

    pub(crate) fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.command.arg(argument);
        self
    }

    pub(crate) fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.command.args(arguments);
        self
    }

    /// The name under which the program is started, and named in errors.
    pub(crate) fn named(mut self, name: &str) -> Self {
        self.command.arg0(name);
        name.clone_into(&mut self.name);
        self
    }

    /// What it reads on its standard input.
    pub(crate) fn input(mut self, input: &[u8]) -> Self {
        self.input = input.to_owned();
        self
    }

    pub(crate) const fn max_output(mut self, bytes: u64) -> Self {
        self.max_output = bytes;
        self
    }

    /// Run by a tenant, whose own programs may stop it: they get no descriptor of the agent's, and what it writes is not read.
    pub(crate) fn by_tenant(mut self, uid: u32) -> Self {
        self.command.uid(uid).gid(uid).current_dir("/");
        self.is_silent = true;
        self
    }

    /// Runs it until it ends, or for `limit`, whatever its status is.
    ///
    /// # Errors
    /// [`ToolError`], where it did not end by itself.
    pub(crate) fn run_to_end(self, limit: Duration) -> Result<EndedTool, ToolError> {
        let Self { name, mut command, input, max_output, is_silent } = self;
        let not_run = |why: &dyn std::fmt::Display| ToolError::NotRun { tool: name.clone(), why: why.to_string() };
        let output = || if is_silent { Stdio::null() } else { Stdio::piped() };
        let mut child = command
            .stdin(if input.is_empty() { Stdio::null() } else { Stdio::piped() })
            .stdout(output())
            .stderr(output())
            .process_group(0)
            .spawn()
            .map_err(|error| not_run(&error))?;
        let deadline = Instant::now() + limit;
        let (stdout, stderr) = (reader(child.stdout.take(), max_output), reader(child.stderr.take(), MAX_OUTPUT));
        if let Some(mut stdin) = child.stdin.take() {
            // A tool that reads nothing fills the pipe. One that ends before it has read everything says why on its standard error.
            std::thread::spawn(move || stdin.write_all(&input));
        }
        let waited = wait(&child, &stdout, deadline);
        // Also what the tool has started and left behind: it would hold the pipes open. The tool is not reaped yet, so that its id is no
        // other's.
        end_group(&child);
        let hung = || ToolError::Hung { tool: name.clone(), seconds: limit.as_secs() };
        let status = reap(child, END_TIMEOUT).map_err(|error| not_run(&error))?.ok_or_else(hung)?;
        match waited {
            Waited::Ended => Ok(EndedTool { status, stdout: stdout.text(), stderr: stderr.text() }),
            Waited::TooMuchOutput => Err(ToolError::TooMuchOutput { tool: name.clone(), bytes: max_output }),
            Waited::TimedOut => Err(hung()),
        }
    }

    /// The same. Returns its standard output, where it has succeeded.
    ///
    /// # Errors
    /// [`ToolError`].
    pub(crate) fn run(self, limit: Duration) -> Result<String, ToolError> {
        let name = self.name.clone();
        self.run_to_end(limit)?.into_result(&name)
    }
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
    with_low_priority(&folder_of(tool), tool, &args)?.input(input).run(limit)
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
    with_low_priority(folder, tool, args)?.run_to_end(limit)
}

/// A tool that disturbs tenants and the agent as little as possible, and ends with the agent.
fn with_low_priority(folder: &Path, tool: &str, args: &[OsString]) -> Result<Tool, ToolError> {
    let program = folder.join(tool);
    if !program.is_file() {
        return Err(ToolError::NotTested(format!("{tool} is not installed in {}", folder.display())));
    }
    let [first, wrappers @ ..] = LOW_PRIORITY;
    let mut command = Command::new(first);
    command.args(wrappers).arg(program).args(args);
    Ok(Tool::of(tool.to_owned(), command))
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

fn reader(pipe: Option<impl Read + Send + 'static>, max_output: u64) -> Output {
    let (sender, text) = channel();
    let is_too_long = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&is_too_long);
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(pipe) = pipe {
            let mut pipe = pipe.take(max_output);
            while let Err(error) = pipe.read_to_end(&mut bytes) {
                if error.kind() != ErrorKind::Interrupted {
                    break;
                }
            }
            let is_full = u64::try_from(bytes.len()).is_ok_and(|length| length >= max_output);
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
    fn tool_that_may_write_more_is_read_to_a_bound_of_its_own_and_gets_no_variable_of_the_agents() {
        let zeros = || Tool::new("head").args(["-c", "400000", "/dev/zero"]);
        assert_eq!(zeros().max_output(1 << 20).run(LIMIT).unwrap().len(), 400_000);
        let error = zeros().run(LIMIT).unwrap_err();
        assert_eq!(error, ToolError::TooMuchOutput { tool: "head".into(), bytes: MAX_OUTPUT });
        let variables = Tool::new("/usr/bin/env").run(LIMIT).unwrap();
        assert_eq!(variables.lines().collect::<Vec<_>>(), ["LC_ALL=C", &format!("PATH={DEFAULT_PATH}")]);
        let missing = Tool::new("/a/tool").named("a tool").run(LIMIT).unwrap_err();
        assert!(matches!(&missing, ToolError::NotRun { tool, .. } if tool == "a tool"), "{missing}");
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
