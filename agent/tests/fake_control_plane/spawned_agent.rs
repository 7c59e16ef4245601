//! The agent as a process of its own, as a service manager starts it.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;
use uuid::Uuid;
use wire::bundle::BootstrapBundle;

use super::{FakeControlPlane, eventually};

/// The agent as a process, over a folder that outlives it.
pub struct SpawnedAgent {
    child: Child,
    pub log: PathBuf,
}

impl SpawnedAgent {
    /// Starts an agent in `folder` with the bundle's environment file.
    pub fn start(folder: &Path, bundle: &BootstrapBundle, more: &[&str]) -> Self {
        let args = [&["--simulate-gpus", "2"], more].concat();
        Self::start_with(folder, bundle, &args, &[])
    }

    /// As [`start`](Self::start), without simulated GPUs and in this environment.
    pub fn start_with(folder: &Path, bundle: &BootstrapBundle, args: &[&str], environment: &[(&str, String)]) -> Self {
        let mut agent = Command::new(env!("CARGO_BIN_EXE_gpuaas-agent"));
        agent.env_clear().envs(environment.iter().map(|(name, value)| (name, value)));
        Self::start_by(agent, folder, bundle, args)
    }

    /// Starts it by a command, to which the agent's flags are added.
    pub fn start_by(mut command: Command, folder: &Path, bundle: &BootstrapBundle, args: &[&str]) -> Self {
        let env_file = folder.join("agent.env");
        std::fs::write(&env_file, bundle.to_env_file().unwrap()).unwrap();
        let log = folder.join(format!("{}.log", Uuid::now_v7()));
        // The sandbox executor does not run as root.
        let user = sandbox_user();
        let as_user: &[&str] = if user.is_some() { &["--user", "nobody"] } else { &[] };
        if let Some(user) = user {
            give_away(folder, &user);
        }
        let child = command
            .arg("--env-file")
            .arg(&env_file)
            .arg("--state-dir")
            .arg(folder.join("state"))
            .args(as_user)
            .args(args)
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        Self { child, log }
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// Kills it as a power failure would.
    pub fn kill_9(mut self) {
        self.end_at_once();
    }

    /// The same for an agent that another one replaces.
    pub fn end_at_once(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Its status, where it has ended.
    #[allow(dead_code)]
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    pub async fn exit(&mut self) -> ExitStatus {
        eventually(|| self.child.try_wait().unwrap()).await
    }

    /// Lines so far; each has to be JSON.
    pub fn lines(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.log).unwrap();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}"))).collect()
    }

    pub fn count(&self, message: &str) -> usize {
        self.lines().iter().filter(|line| line["message"] == message).count()
    }

    pub fn has_code(&self, error_code: &str) -> bool {
        self.lines().iter().any(|line| line["error_code"] == error_code)
    }

    #[track_caller]
    pub fn wait_for_message(&self, message: &str) -> impl Future<Output = ()> {
        eventually(move || (self.count(message) > 0).then_some(()))
    }

    #[track_caller]
    pub fn wait_for_error_code(&self, error_code: &str) -> impl Future<Output = ()> {
        eventually(move || self.has_code(error_code).then_some(()))
    }
}

impl Drop for SpawnedAgent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(&self.log).unwrap_or_default());
        }
    }
}

/// A control plane, and an agent that has enrolled and sent a heartbeat.
pub async fn enrolled(more: &[&str]) -> (FakeControlPlane, TempDir, SpawnedAgent) {
    enrolled_at(FakeControlPlane::start().await, more).await
}

/// As [`enrolled`], at this control plane.
pub async fn enrolled_at(fake: FakeControlPlane, more: &[&str]) -> (FakeControlPlane, TempDir, SpawnedAgent) {
    let folder = tempfile::tempdir().unwrap();
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), more);
    eventually(|| (!fake.calls().heartbeats.is_empty()).then_some(())).await;
    (fake, folder, agent)
}

/// A control plane, and a node that has enrolled there. Its agent was killed.
pub async fn enrolled_and_killed() -> (FakeControlPlane, TempDir, BootstrapBundle) {
    let fake = FakeControlPlane::start().await;
    let (folder, bundle) = enrolled_and_killed_at(&fake).await;
    (fake, folder, bundle)
}

/// As [`enrolled_and_killed`], at this control plane.
pub async fn enrolled_and_killed_at(fake: &FakeControlPlane) -> (TempDir, BootstrapBundle) {
    let folder = tempfile::tempdir().unwrap();
    let bundle = fake.bundle(folder.path());
    enroll_and_kill(folder.path(), &bundle).await;
    (folder, bundle)
}

/// Enrolls the node with its files in this folder.
pub async fn enroll_and_kill(folder: &Path, bundle: &BootstrapBundle) {
    let agent = SpawnedAgent::start(folder, bundle, &[]);
    agent.wait_for_message("enrolled").await;
    agent.kill_9();
}

/// The user of an agent that root starts, and of the tenants of its sandbox.
pub fn sandbox_user() -> Option<nix::unistd::User> {
    nix::unistd::User::from_name("nobody").unwrap().filter(|_| nix::unistd::Uid::effective().is_root())
}

fn give_away(path: &Path, user: &nix::unistd::User) {
    let (uid, gid) = (user.uid.as_raw(), user.gid.as_raw());
    let owned = path.symlink_metadata().unwrap();
    // What is its own already may be on a disk that cannot be written.
    if (owned.uid(), owned.gid()) != (uid, gid) {
        std::os::unix::fs::lchown(path, Some(uid), Some(gid)).unwrap();
    }
    if path.is_dir() && !path.is_symlink() {
        std::fs::read_dir(path).unwrap().for_each(|entry| give_away(&entry.unwrap().path(), user));
    }
}
