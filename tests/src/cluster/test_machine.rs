//! A disposable machine of a node in namespaces: its files lie over the host's, its processes, IPC objects and mounts are its own, its
//! network is the host's. An agent on it is root and creates Linux users, and nothing of that reaches the host.

use super::TestCluster;
use crate::overlay_machine::{FileRecord, MAKE, NAMESPACES, UPPER, View};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// The machine's init process: it reaps orphaned processes.
const INIT: &str = "while :; do sleep 3600 & wait $!; done";
const STARTS_WITHIN: Duration = Duration::from_secs(60);

/// A running machine. Dropping it ends everything on it.
pub struct TestMachine {
    unshare: Child,
    init: i32,
    agent: Option<Child>,
    executable: PathBuf,
    log: PathBuf,
    _folder: tempfile::TempDir,
}

/// A snapshot of the machine's files, to be compared with a later one.
pub type FileSnapshot = BTreeMap<String, FileRecord>;

impl TestCluster {
    /// A machine for the agent of this name. `None` where this process is not root, which is reported as a test not run.
    pub fn machine(&self, agent: &str) -> Option<TestMachine> {
        if !Uid::effective().is_root() {
            crate::skipped_tests::report_skipped("it needs root, to make Linux users in namespaces of its own");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder can be made");
        let unshare = Command::new("unshare")
            .args(NAMESPACES)
            .args(["sh", "-c", MAKE, "sh"])
            .arg(folder.path())
            .args(["sh", "-c", INIT])
            .stdin(Stdio::null())
            .spawn()
            .expect("unshare can be run");
        let mut machine = TestMachine {
            unshare,
            init: 0,
            agent: None,
            executable: self.agent_settings.executable.clone(),
            log: self.logs.join(format!("{agent}.log")),
            _folder: folder,
        };
        let until = Instant::now() + STARTS_WITHIN;
        while !machine.is_up() {
            assert!(Instant::now() < until, "the machine does not come up: {:?}", machine.unshare.try_wait());
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(machine)
    }
}

impl TestMachine {
    fn is_up(&mut self) -> bool {
        let Some(init) = child_of(self.unshare.id().cast_signed()) else { return false };
        self.init = init;
        // The shell that set up the machine has become its init process, and sees no more of the host than the machine does.
        let command = fs::read(format!("/proc/{init}/cmdline")).unwrap_or_default();
        let sees = |path: &str| self.view().at(path).exists();
        command == format!("sh\0-c\0{INIT}\0").as_bytes() && sees(UPPER) && sees("/proc/1")
    }

    /// The machine's files, as seen from the host.
    #[must_use]
    pub fn view(&self) -> View {
        View::of(format!("/proc/{}/root", self.init))
    }

    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg("--target").arg(self.init.to_string()).args(["--mount", "--pid", "--ipc", "--root", "--wd", "--"]);
        command.arg(program).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default()).stdin(Stdio::null());
        command
    }

    /// Runs a script on the machine as root.
    #[must_use]
    pub fn try_run(&self, script: &str) -> Output {
        let mut command = self.command("sh");
        let mut child = command
            .arg("-s")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("nsenter can be run");
        child.stdin.take().expect("it reads").write_all(script.as_bytes()).expect("it takes the script");
        child.wait_with_output().expect("it ends")
    }

    /// Runs a script on the machine as root, which has to succeed. Returns its output.
    pub fn run(&self, script: &str) -> String {
        let ran = self.try_run(script);
        assert!(ran.status.success(), "{script}: {}{}", text(&ran.stdout), text(&ran.stderr));
        text(&ran.stdout)
    }

    /// Whether this script succeeds as a user of the machine, without a terminal and in a session of its own.
    #[must_use]
    pub fn can(&self, user: &str, script: &str) -> bool {
        self.as_user(user, script).stdout(Stdio::null()).stderr(Stdio::null()).status().expect("it runs").success()
    }

    /// Starts a script as a user of the machine, and does not wait for it.
    pub fn spawn_as(&self, user: &str, script: &str) {
        let mut child =
            self.as_user(user, script).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it can be started");
        std::thread::spawn(move || child.wait());
    }

    fn as_user(&self, user: &str, script: &str) -> Command {
        let mut command = self.command("setsid");
        command.args([
            "setpriv",
            "--reuid",
            user,
            "--regid",
            user,
            "--clear-groups",
            "--reset-env",
            "sh",
            "-c",
            script,
        ]);
        command
    }

    /// A snapshot of everything on the machine that can change, except in these folders.
    #[must_use]
    pub fn snapshot(&self, except: &[&str]) -> FileSnapshot {
        let except: Vec<&Path> = except.iter().map(Path::new).collect();
        self.view().snapshot(&except, |listing| self.run(&format!("cat {listing} 2>/dev/null || true")))
    }

    /// Starts the agent as root, with the environment file that a bootstrap script wrote.
    pub fn start_agent(&mut self, flags: &[&str], variables: &[(&str, &str)]) {
        let log = fs::OpenOptions::new().create(true).append(true).open(&self.log).expect("the log can be opened");
        let mut command = self.command(&self.executable);
        command.args(["--env-file", "/etc/gpuaas/agent.env", "--executor", "system"]).args(flags);
        // Its files and its network are the host's too, where other tests run.
        command.env("SVC_NODE_AGENT_INTEGRITY_CHECKS", "off").env("SVC_NODE_AGENT_LOOPBACK_GUARD", "off");
        command.envs(variables.iter().copied()).env("RUST_LOG", "info");
        command.stdout(log.try_clone().expect("the log can be shared")).stderr(log);
        self.agent = Some(command.spawn().expect("the agent can be started"));
    }

    fn signal_agent(&self, signal: Signal) {
        // nsenter waits for the agent, which is in the machine's PID namespace.
        let agent = self.agent.as_ref().and_then(|nsenter| child_of(nsenter.id().cast_signed()));
        if let Some(agent) = agent {
            let _ = kill(Pid::from_raw(agent), signal);
        }
    }

    /// Kills the agent with SIGKILL. The processes of tenants continue.
    pub fn kill9_agent(&mut self) {
        self.signal_agent(Signal::SIGKILL);
        let _ = self.wait_for_agent();
    }

    /// Stops the agent in order.
    pub fn stop_agent(&mut self) -> Option<ExitStatus> {
        self.signal_agent(Signal::SIGTERM);
        self.wait_for_agent()
    }

    fn wait_for_agent(&mut self) -> Option<ExitStatus> {
        let mut agent = self.agent.take()?;
        let until = Instant::now() + STARTS_WITHIN;
        while Instant::now() < until {
            if let Ok(Some(status)) = agent.try_wait() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = agent.kill();
        let _ = agent.wait();
        None
    }
}

impl Drop for TestMachine {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.init), Signal::SIGKILL);
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
        if let Some(agent) = &mut self.agent {
            let _ = agent.kill();
            let _ = agent.wait();
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The only child of a process.
fn child_of(pid: i32) -> Option<i32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}
