//! Node agents: `gpuaas-agent` as child processes with simulated GPUs, each with a folder of its own.
//!
//! Where this process is root an agent can make Linux users of its tenants ([`SystemAgent`]). They are users of this very machine, so each
//! agent has uids, keys, device nodes and an sshd of its own, and whoever ends an agent for good has it clean up ([`clean_up`]).

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::unistd::{Uid, User};
use wire::bundle::{BootstrapBundle, Variables};

use super::files;
use super::process::{ChildProcess, Launch};

const STOPS_WITHIN: Duration = Duration::from_secs(10);

/// The GPUs that an agent makes up.
#[derive(Debug, Clone)]
pub struct SimulatedGpus {
    pub count: u32,
    pub model: String,
    pub memory_mib: u64,
}

/// What all agents of one environment share.
#[derive(Debug, Clone)]
pub struct AgentSettings {
    /// The `gpuaas-agent` program.
    pub executable: PathBuf,
    /// Each agent's state lies in a folder here that bears its name.
    pub folder: PathBuf,
    /// Where the logs go.
    pub logs: PathBuf,
    pub gpus: SimulatedGpus,
    /// Further flags.
    pub flags: Vec<String>,
    /// How the agent makes users of its tenants; `None`: they are kept in folders.
    pub system: Option<SystemAgent>,
}

/// What an agent that makes users has for itself on a machine that it shares with others.
#[derive(Debug, Clone)]
pub struct SystemAgent {
    /// Root's, and passable for everybody: tenants' keys lie below it.
    pub folder: PathBuf,
    pub first_uid: u32,
    /// Where its sshd listens on this machine; `None` where none is installed.
    pub ssh_port: Option<u16>,
}

/// Uids of one agent.
const UIDS: u32 = 1000;
/// The first agent's first uid: beyond those that distributions give out.
const FIRST_UID: u32 = 200_000;
const TOOLS: [&str; 6] = ["useradd", "userdel", "groupadd", "groupdel", "chattr", "ipcrm"];
const CLEANS_UP_WITHIN: &str = "60";
/// Whom an agent runs as that makes no users, where this process is root.
const NOBODY: &str = "nobody";

impl SystemAgent {
    /// The `number`th agent, with everything below `folder`.
    pub fn new(folder: &Path, number: u32) -> anyhow::Result<Self> {
        Ok(Self {
            folder: folder.join(number.to_string()),
            first_uid: FIRST_UID + number * UIDS,
            ssh_port: if has_sshd() { Some(super::process::free_port()?) } else { None },
        })
    }

    fn variables(&self) -> Vec<(&'static str, String)> {
        let at = |name: &str| self.folder.join(name).display().to_string();
        let mut variables = vec![
            ("SVC_NODE_AGENT_UIDS", format!("{}-{}", self.first_uid, self.first_uid + UIDS - 1)),
            ("SVC_NODE_AGENT_AUTHORIZED_KEYS", at("keys")),
            // Simulated GPUs have no device nodes, and those of this machine are not for tenants.
            ("SVC_NODE_AGENT_DEVICES", at("devices")),
        ];
        variables.extend(self.ssh_port.map(|port| ("SVC_NODE_AGENT_SSH_LISTEN", format!("127.0.0.1:{port}"))));
        variables
    }
}

/// Whether agents can let tenants in by SSH here.
pub fn has_sshd() -> bool {
    Path::new("/usr/sbin/sshd").is_file() && User::from_name("sshd").is_ok_and(|user| user.is_some())
}

/// Why agents cannot make users of this machine, if they cannot. `folder` is for a try.
pub fn why_no_users(folder: &Path) -> Option<String> {
    if !Uid::effective().is_root() {
        return Some("this is not root".to_owned());
    }
    if let Some(missing) = TOOLS.iter().find(|tool| files::find_programs(tool).is_empty()) {
        return Some(format!("{missing} is not installed"));
    }
    if std::fs::OpenOptions::new().append(true).open("/etc/passwd").is_err() {
        return Some("/etc/passwd cannot be written".to_owned());
    }
    let mut mount = Command::new("unshare");
    mount.args(["--mount", "--propagation", "private", "sh", "-c", "mount -t tmpfs tmpfs \"$0\""]).arg(folder);
    let mounts = mount.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    (!mounts.is_ok_and(|status| status.success())).then(|| "this root may not mount".to_owned())
}

/// Removes the tenants of every agent whose state lies in a folder below `agents`, and that agent's folder outside of it. None may run.
pub fn clean_up(executable: &Path, agents: &Path) -> anyhow::Result<()> {
    let Ok(entries) = std::fs::read_dir(agents) else { return Ok(()) };
    for folder in entries.flatten().map(|entry| entry.path()) {
        let text = std::fs::read_to_string(folder.join("agent.env")).unwrap_or_default();
        let Ok(variables) = Variables::parse(&text) else { continue };
        let Some(keys) = variables.get("SVC_NODE_AGENT_AUTHORIZED_KEYS") else { continue };
        let mut command = Command::new("timeout");
        command.arg(CLEANS_UP_WITHIN).arg(executable);
        for (flag, file) in FILES {
            command.arg(flag).arg(folder.join(file));
        }
        command.args(["--executor", "system", "--simulate-gpus", "1", "--clean-up"]);
        let ran = command.stdin(Stdio::null()).output().context("the agent cannot be run to clean up")?;
        if !ran.status.success() {
            let said = String::from_utf8_lossy(&ran.stderr).into_owned() + &String::from_utf8_lossy(&ran.stdout);
            bail!("tenants of {} are left on this machine ({}): {said}", folder.display(), ran.status);
        }
        // What the agent had for itself lies beside its keys.
        if let Some(own) = Path::new(keys).parent() {
            files::remove_folder(own)?;
        }
    }
    Ok(())
}

/// One agent. Dropping it stops it; its state stays.
pub struct AgentProcess {
    name: String,
    settings: AgentSettings,
    process: ChildProcess,
}

impl AgentProcess {
    /// Writes the bundle's environment file and starts the agent with it.
    pub fn start(name: &str, settings: &AgentSettings, bundle: &BootstrapBundle) -> anyhow::Result<Self> {
        let folder = settings.folder.join(name);
        files::passable_folder(&settings.folder)?;
        files::private_folder(&folder)?;
        let mut environment = bundle.to_env_file()?;
        if let Some(system) = &settings.system {
            files::passable_folder(&system.folder)?;
            let variables = system.variables();
            let variables: Variables = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
            environment.push_str(&variables.render()?);
        }
        files::write_private(&folder.join("agent.env"), environment.as_bytes())?;
        let process = launch(name, settings)?.spawn()?;
        Ok(Self { name: name.to_owned(), settings: settings.clone(), process })
    }

    /// Starts a stopped or killed agent on the state that it had.
    pub fn start_again(&mut self) -> anyhow::Result<()> {
        if !self.is_running() {
            self.process = launch(&self.name, &self.settings)?.spawn()?;
        }
        Ok(())
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Environment file, identity, journal and allocations.
    pub fn folder(&self) -> PathBuf {
        self.settings.folder.join(&self.name)
    }

    pub fn log(&self) -> &Path {
        self.process.log()
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub fn is_running(&mut self) -> bool {
        self.process.is_running()
    }

    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.process.exit_status()
    }

    /// SIGKILL to the agent alone: what it runs for tenants lives on.
    pub fn kill9(&mut self) {
        self.process.kill9();
    }

    /// An orderly end.
    pub async fn stop(&mut self) {
        self.process.stop(STOPS_WITHIN).await;
    }
}

/// The bundle's paths are those of a machine with one agent; here each agent keeps everything in its folder.
const FILES: [(&str, &str); 6] = [
    ("--env-file", "agent.env"),
    ("--ca-bundle-path", "ca.pem"),
    ("--node-cert-ca-bundle-path", "node-ca.pem"),
    ("--cert-path", "node.pem"),
    ("--key-path", "node.key"),
    ("--state-dir", "state"),
];

/// Whom it has to become, and owns everything in its folder by then: no tenant's process ever runs as root.
fn user_of(folder: &Path, settings: &AgentSettings) -> anyhow::Result<Option<&'static str>> {
    if settings.system.is_some() || !Uid::effective().is_root() {
        return Ok(None);
    }
    let nobody = User::from_name(NOBODY)?.with_context(|| format!("this machine has no user {NOBODY}"))?;
    give_away(folder, &nobody).with_context(|| format!("{} cannot be given to {NOBODY}", folder.display()))?;
    Ok(Some(NOBODY))
}

fn give_away(path: &Path, user: &User) -> std::io::Result<()> {
    std::os::unix::fs::lchown(path, Some(user.uid.as_raw()), Some(user.gid.as_raw()))?;
    if path.symlink_metadata()?.is_dir() {
        for entry in std::fs::read_dir(path)? {
            give_away(&entry?.path(), user)?;
        }
    }
    Ok(())
}

fn launch(name: &str, settings: &AgentSettings) -> anyhow::Result<Launch> {
    let folder = settings.folder.join(name);
    let log = settings.logs.join(format!("{name}.log"));
    let mut launch = Launch::new(name, &settings.executable, log);
    for (flag, file) in FILES {
        launch = launch.argument(flag).argument(folder.join(file));
    }
    if settings.system.is_some() {
        launch = launch.argument("--executor").argument("system");
    }
    if let Some(user) = user_of(&folder, settings)? {
        launch = launch.argument("--user").argument(user);
    }
    let gpus = &settings.gpus;
    Ok(launch
        .argument("--simulate-gpus")
        .argument(gpus.count.to_string())
        .argument("--gpu-model")
        .argument(&gpus.model)
        .argument("--gpu-memory-mib")
        .argument(gpus.memory_mib.to_string())
        .arguments(&settings.flags)
        .variable("RUST_LOG", std::env::var_os("RUST_LOG").unwrap_or_else(|| "info".into())))
}
