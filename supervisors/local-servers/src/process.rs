//! A child process that never outlives the process that started it.
//!
//! The program is started through `sh`, which leaves a watcher behind and then *becomes* the program, so that the pid, the
//! signals and the exit status are the program's own. The watcher holds the reading end of a pipe whose writing end only this
//! process has: when this process ends, however it ends, the watcher reads the end of the file and stops the program.
//! `PR_SET_PDEATHSIG` is not used: it fires when the *thread* that forked ends, and an async runtime's threads come and go.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

/// `$0` is the signal that asks the program to end, `$@` the program. A line on the pipe means that the program was waited
/// for, so that its pid may be reused: the watcher then ends and kills no process. It runs under a second fork, so
/// that the program never sees a child that it did not make.
const WATCHED: &str = r#"
exec 3<&0 </dev/null
(
  (
    if read -r _ <&3; then exit 0; fi
    kill -s "$0" $$ || exit 0
    waited=0
    while kill -0 $$ && [ $waited -lt 80 ]; do sleep 0.1; waited=$((waited + 1)); done
    kill -s KILL $$
  ) >/dev/null 2>&1 &
)
exec 3<&- "$@"
"#;

/// As [`WATCHED`], without a watcher.
const DETACHED: &str = r#"exec </dev/null "$@""#;

/// Waits for the end of the process `$1`, stops the process `$2` by SIGQUIT and removes the folder `$3`.
const STOP_WITH_OWNER: &str = r#"
while [ -d "/proc/$1" ]; do sleep 0.5; done
kill -s QUIT "$2"
waited=0
while kill -0 "$2" && [ $waited -lt 80 ]; do sleep 0.1; waited=$((waited + 1)); done
rm -rf "$3"
"#;

/// How often an ending process is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// A user that has no rights of root, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunAsAccount {
    pub uid: u32,
    pub gid: u32,
}

/// A program to start, with its environment and its user.
#[derive(Debug)]
pub struct Launch {
    name: String,
    program: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    account: Option<RunAsAccount>,
    stop_signal: Signal,
    log: PathBuf,
    is_detached: bool,
}

impl Launch {
    /// `name` is for messages; standard output and error are appended to `log`.
    pub fn new(name: impl Into<String>, program: impl Into<PathBuf>, log: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            program: program.into(),
            arguments: Vec::new(),
            environment: Vec::new(),
            account: None,
            stop_signal: Signal::SIGTERM,
            log: log.into(),
            is_detached: false,
        }
    }

    #[must_use]
    pub fn argument(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    #[must_use]
    pub fn arguments<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(mut self, arguments: I) -> Self {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// The program sees these variables and `PATH`, and nothing else of this process's environment.
    #[must_use]
    pub fn variable(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    #[must_use]
    pub fn account(mut self, account: Option<RunAsAccount>) -> Self {
        self.account = account;
        self
    }

    /// The signal that requests an orderly end; SIGTERM by default.
    #[must_use]
    pub fn stop_signal(mut self, signal: Signal) -> Self {
        self.stop_signal = signal;
        self
    }

    /// The program may outlive this process: no watcher stops it ([`ChildProcess::detach`]).
    #[must_use]
    pub fn detached(mut self) -> Self {
        self.is_detached = true;
        self
    }

    /// Starts the program in a process group of its own, with `/` as its working directory and no standard input.
    pub fn spawn(self) -> anyhow::Result<ChildProcess> {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&self.log)
            .with_context(|| format!("cannot open the log {}", self.log.display()))?;
        let signal = self.stop_signal.as_str().trim_start_matches("SIG");
        let mut command = Command::new("/bin/sh");
        command
            .arg("-c")
            .arg(if self.is_detached { DETACHED } else { WATCHED })
            .arg(signal)
            .arg(&self.program)
            .args(&self.arguments)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log);
        as_account(&mut command, self.account);
        let mut child =
            command.spawn().with_context(|| format!("cannot start {} ({})", self.name, self.program.display()))?;
        let leash = child.stdin.take();
        Ok(ChildProcess { name: self.name, child, leash, stop_signal: self.stop_signal, log: self.log })
    }
}

/// Makes `command` run as `account`. Supplementary groups are dropped with the user id.
pub fn as_account(command: &mut Command, account: Option<RunAsAccount>) {
    if let Some(RunAsAccount { uid, gid }) = account {
        command.uid(uid).gid(gid);
    }
}

/// A running program. Dropping it stops it: first by its stop signal, after some seconds by SIGKILL.
#[derive(Debug)]
pub struct ChildProcess {
    name: String,
    child: Child,
    leash: Option<ChildStdin>,
    stop_signal: Signal,
    log: PathBuf,
}

impl ChildProcess {
    /// How long a program may take to end when asked to by a drop.
    const STOP_TIMEOUT: Duration = Duration::from_secs(5);
    /// The kernel alone ends a program that is killed: at once, but for a disk that is busy.
    const KILL_TIMEOUT: Duration = Duration::from_secs(60);

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> &Path {
        &self.log
    }

    /// `None` while the program runs.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().ok().flatten();
        if status.is_some()
            && let Some(mut leash) = self.leash.take()
        {
            // An error means that the watcher is gone already.
            let _ = leash.write_all(b"\n");
        }
        status
    }

    pub fn is_running(&mut self) -> bool {
        self.exit_status().is_none()
    }

    /// Sends `signal` to the program alone, not to what it started.
    pub fn signal(&mut self, signal: Signal) {
        if self.is_running() {
            let _ = kill(self.group(), signal);
        }
    }

    /// SIGKILL, as a crash: the program's own children keep running. Returns when the program is gone.
    pub fn kill9(&mut self) {
        self.signal(Signal::SIGKILL);
        self.wait_until(Instant::now() + Self::KILL_TIMEOUT);
    }

    /// Asks the program to end, and kills its process group when it has not within `patience`.
    pub async fn stop(&mut self, patience: Duration) {
        self.signal(self.stop_signal);
        let until = Instant::now() + patience;
        while self.is_running() && Instant::now() < until {
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
        self.stop_now();
    }

    /// Lets the program run until the process `owner` ends; `folder` is removed then. The program was started [detached](Launch::detached).
    pub fn detach(self, owner: u32, folder: &Path) -> anyhow::Result<()> {
        let watcher = Command::new("/bin/sh")
            .args(["-c", STOP_WITH_OWNER, "sh", &owner.to_string(), &self.pid().to_string()])
            .arg(folder)
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot watch {}", self.name))?;
        // Both outlive this process; the drop would stop the program.
        let _ = std::mem::ManuallyDrop::new((watcher, self));
        Ok(())
    }

    /// The last lines of the program's log, for an error message.
    pub fn log_tail(&self) -> String {
        tail(&self.log, 20)
    }

    fn stop_now(&mut self) {
        if self.is_running() {
            let _ = killpg(self.group(), Signal::SIGKILL);
            self.wait_until(Instant::now() + Self::KILL_TIMEOUT);
        }
    }

    fn wait_until(&mut self, until: Instant) {
        while self.is_running() && Instant::now() < until {
            std::thread::sleep(CHECK_INTERVAL);
        }
    }

    fn group(&self) -> Pid {
        // A pid always fits: the kernel's own type is a signed 32-bit integer.
        Pid::from_raw(self.child.id().cast_signed())
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.signal(self.stop_signal);
        self.wait_until(Instant::now() + Self::STOP_TIMEOUT);
        self.stop_now();
    }
}

/// The last `lines` lines of a text file, of its last 16 KiB at most.
pub fn tail(path: &Path, lines: usize) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(16 * 1024)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_else(|error| format!("(its log {} cannot be read: {error})", path.display()));
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper(dir: &Path) -> ChildProcess {
        Launch::new("sleeper", "/bin/sleep", dir.join("log")).argument("600").spawn().unwrap()
    }

    fn runs(pid: u32) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.contains("State:") && !status.contains("State:\tZ")
    }

    fn eventually(what: &str, holds: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        while !holds() {
            assert!(Instant::now() < until, "not within 60 s: {what}");
            std::thread::sleep(CHECK_INTERVAL);
        }
    }

    #[test]
    fn dropped_process_is_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let process = sleeper(dir.path());
        let pid = process.pid();
        eventually("sleep runs", || std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm == b"sleep\n"));
        drop(process);
        assert!(!runs(pid));
    }

    #[test]
    fn process_is_stopped_when_its_starter_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let mut process = sleeper(dir.path());
        let pid = process.pid();
        eventually("sleep runs", || std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm == b"sleep\n"));
        // What the kernel does to the pipe when the starter is killed.
        drop(process.leash.take());
        eventually("sleep is gone", || !runs(pid));
        assert!(!process.exit_status().unwrap().success());
    }

    #[test]
    fn process_that_ignores_the_stop_signal_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let mut process = Launch::new("deaf", "/bin/sh", dir.path().join("log"))
            .arguments(["-c", "trap '' TERM; echo deaf; while :; do sleep 1; done"])
            .spawn()
            .unwrap();
        eventually("it is deaf", || tail(&dir.path().join("log"), 1) == "deaf");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(process.stop(Duration::from_millis(100)));
        assert!(!runs(process.pid()));
    }

    #[test]
    fn process_does_not_inherit_the_starters_environment() {
        let dir = tempfile::tempdir().unwrap();
        let mut process = Launch::new("env", "/usr/bin/env", dir.path().join("log"))
            .variable("SVC_SEEN", "a 'b' $c")
            .spawn()
            .unwrap();
        eventually("env has ended", || !runs(process.pid()));
        assert!(process.exit_status().unwrap().success());
        let seen = tail(&dir.path().join("log"), 20);
        assert!(seen.contains("SVC_SEEN=a 'b' $c"), "{seen}");
        assert!(!seen.contains("CARGO"), "{seen}");
    }
}
