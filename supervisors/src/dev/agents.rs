//! Node agents: `gpuaas-agent` as child processes with simulated GPUs, each with a folder of its own.
//!
//! Where this process is root an agent can create Linux users for its tenants ([`SystemAgent`]). They are users of this very machine, so
//! each agent has uids, keys, device nodes and an sshd of its own, and must clean up before it ends for good ([`clean_up`]).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::{Uid, User};
use wire::bundle::{BootstrapBundle, Variables};

use local_servers::private_files;
use local_servers::process::{ChildProcess, Launch};

/// Longer than an agent waits for its tasks in progress before it ends.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// The simulated GPUs of an agent.
#[derive(Debug, Clone)]
pub struct SimulatedGpus {
    pub count: u32,
    pub model: String,
    pub memory_mib: u64,
}

/// The settings that all agents of one environment share.
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
    /// How the agent creates users for its tenants; `None`: they are kept in folders.
    pub system: Option<SystemAgent>,
}

/// The resources of its own of an agent that creates users on a machine that it shares with others.
#[derive(Debug, Clone)]
pub struct SystemAgent {
    /// Owned by root, and traversable for all users: tenants' keys lie below it.
    pub folder: PathBuf,
    pub first_uid: u32,
    /// Where its sshd listens on this machine; `None` where none is installed.
    pub ssh_port: Option<u16>,
}

/// Uids of one agent.
const UIDS_PER_AGENT: u32 = 1000;
/// Uids of one environment: of more agents than it can have.
const UIDS_PER_ENVIRONMENT: u32 = 100 * UIDS_PER_AGENT;
/// Environments that a machine has room for.
const MAX_ENVIRONMENTS: u32 = 100;
/// The folder for root's environments of what must not lie in a checkout, which other users may not be able to traverse. It outlives a
/// restart of the machine, since tenants do.
const ENVIRONMENTS_FOLDER: &str = "/var/lib/gpuaas-dev";

/// An environment's own folder and numbers on a machine that it shares with other environments.
#[derive(Debug, Clone)]
pub struct AgentDirectories {
    pub folder: PathBuf,
    number: u32,
}

impl AgentDirectories {
    /// The directories of the environment in this folder: those that it had, or the first free ones.
    pub fn claim(environment: &Path) -> anyhow::Result<Self> {
        Self::claim_in(Path::new(ENVIRONMENTS_FOLDER), environment)
    }

    fn claim_in(places: &Path, environment: &Path) -> anyhow::Result<Self> {
        private_files::traversable_folder(places)?;
        let lock = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(places.join("lock"))?;
        let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, error)| error)?;
        let (owner, folder) =
            (|number: u32| places.join(format!("{number}.of")), |number: u32| places.join(number.to_string()));
        let name = environment.as_os_str().as_encoded_bytes();
        let had = (0..MAX_ENVIRONMENTS).find(|number| std::fs::read(owner(*number)).is_ok_and(|of| of == name));
        let free = || {
            (0..MAX_ENVIRONMENTS).find(|number| match std::fs::read(owner(*number)) {
                Ok(of) => !Path::new(OsStr::from_bytes(&of)).exists() && !has_users(&folder(*number)),
                Err(_) => true,
            })
        };
        let number = had.or_else(free).with_context(|| {
            format!(
                "{MAX_ENVIRONMENTS} environments have a place below {}: remove those that are gone",
                places.display()
            )
        })?;
        if had.is_none() {
            private_files::remove_folder(&folder(number))?;
            private_files::write_private(&owner(number), name)?;
        }
        Ok(Self { folder: places.join(number.to_string()), number })
    }
}
/// The first agent's first uid: beyond those that distributions give out.
const FIRST_UID: u32 = 200_000;
const TOOLS: [&str; 6] = ["useradd", "userdel", "groupadd", "groupdel", "chattr", "ipcrm"];
const CLEANUP_TIMEOUT_SECONDS: &str = "60";
/// The user of an agent that creates no users, where this process is root.
const UNPRIVILEGED_USER: &str = "nobody";

impl SystemAgent {
    /// The `number`th agent of the environment with these directories.
    pub fn new(directories: &AgentDirectories, number: u32) -> anyhow::Result<Self> {
        Ok(Self {
            folder: directories.folder.join(number.to_string()),
            first_uid: FIRST_UID + directories.number * UIDS_PER_ENVIRONMENT + number * UIDS_PER_AGENT,
            ssh_port: if has_sshd() { Some(local_servers::ports::free_port()?) } else { None },
        })
    }

    fn variables(&self) -> Vec<(&'static str, String)> {
        let at = |name: &str| self.folder.join(name).display().to_string();
        let mut variables = vec![
            ("SVC_NODE_AGENT_UIDS", format!("{}-{}", self.first_uid, self.first_uid + UIDS_PER_AGENT - 1)),
            ("SVC_NODE_AGENT_AUTHORIZED_KEYS", at("keys")),
            // Simulated GPUs have no device nodes, and those of this machine are not for tenants.
            ("SVC_NODE_AGENT_DEVICES", at("devices")),
            // The network is this machine's, and an environment that ends leaves no rules in it.
            ("SVC_NODE_AGENT_LOOPBACK_GUARD", "off".to_owned()),
        ];
        variables.extend(self.ssh_port.map(|port| ("SVC_NODE_AGENT_SSH_LISTEN", format!("127.0.0.1:{port}"))));
        variables
    }
}

/// Whether agents with these directories have created users: the uids stay theirs, also when their environment's folder is gone.
fn has_users(directories: &Path) -> bool {
    (0..MAX_ENVIRONMENTS).any(|number| directories.join(number.to_string()).exists())
}

/// Whether agents can let tenants in by SSH here.
pub fn has_sshd() -> bool {
    Path::new("/usr/sbin/sshd").is_file() && User::from_name("sshd").is_ok_and(|user| user.is_some())
}

/// Why agents cannot create users on this machine, if they cannot. `folder` is for a trial.
pub fn why_no_users(folder: &Path) -> Option<String> {
    if !Uid::effective().is_root() {
        return Some("this is not root".to_owned());
    }
    if let Some(missing) = TOOLS.iter().find(|tool| private_files::find_programs(tool).is_empty()) {
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
        command.arg(CLEANUP_TIMEOUT_SECONDS).arg(executable);
        for (flag, file) in FILES {
            command.arg(flag).arg(folder.join(file));
        }
        command.args(["--executor", "system", "--simulate-gpus", "1", "--clean-up"]);
        let ran = command.stdin(Stdio::null()).output().context("the agent cannot be run to clean up")?;
        if !ran.status.success() {
            let output = String::from_utf8_lossy(&ran.stderr).into_owned() + &String::from_utf8_lossy(&ran.stdout);
            bail!("tenants of {} are left on this machine ({}): {output}", folder.display(), ran.status);
        }
        // The agent's own resources lie beside its keys.
        if let Some(own) = Path::new(keys).parent() {
            private_files::remove_folder(own)?;
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
        private_files::traversable_folder(&settings.folder)?;
        private_files::private_folder(&folder)?;
        let mut environment = bundle.to_env_file()?;
        if let Some(system) = &settings.system {
            private_files::traversable_folder(&system.folder)?;
            let variables = system.variables();
            let variables: Variables = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
            environment.push_str(&variables.render()?);
        }
        private_files::write_private(&folder.join("agent.env"), environment.as_bytes())?;
        let process = launch(name, settings)?.spawn()?;
        Ok(Self { name: name.to_owned(), settings: settings.clone(), process })
    }

    /// Starts the agent of an earlier start of the environment, on the state that it left.
    pub fn restore(name: &str, settings: &AgentSettings) -> anyhow::Result<Self> {
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

    /// SIGKILL to the agent alone: tenants' processes keep running.
    pub fn kill9(&mut self) {
        self.process.kill9();
    }

    /// An orderly end.
    pub async fn stop(&mut self) {
        self.process.stop(STOP_TIMEOUT).await;
    }
}

/// The bundle's paths are those of a machine with one agent; here each agent keeps everything in its folder.
pub const FILES: [(&str, &str); 6] = [
    ("--env-file", "agent.env"),
    ("--ca-bundle-path", "ca.pem"),
    ("--node-cert-ca-bundle-path", "node-ca.pem"),
    ("--cert-path", "node.pem"),
    ("--key-path", "node.key"),
    ("--state-dir", "state"),
];

/// The user that it becomes, and that owns its whole folder: no tenant's process ever runs as root.
fn user_of(folder: &Path, settings: &AgentSettings) -> anyhow::Result<Option<&'static str>> {
    if settings.system.is_some() || !Uid::effective().is_root() {
        return Ok(None);
    }
    let nobody =
        User::from_name(UNPRIVILEGED_USER)?.with_context(|| format!("this machine has no user {UNPRIVILEGED_USER}"))?;
    change_owner(folder, &nobody)
        .with_context(|| format!("{} cannot be given to {UNPRIVILEGED_USER}", folder.display()))?;
    Ok(Some(UNPRIVILEGED_USER))
}

fn change_owner(path: &Path, user: &User) -> std::io::Result<()> {
    std::os::unix::fs::lchown(path, Some(user.uid.as_raw()), Some(user.gid.as_raw()))?;
    if path.symlink_metadata()?.is_dir() {
        for entry in std::fs::read_dir(path)? {
            change_owner(&entry?.path(), user)?;
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
        // A developer's machine is not the tenants' alone.
        launch = launch.argument("--integrity-checks").argument("off");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environments_on_one_machine_have_distinct_folders_and_uids() {
        let dir = tempfile::tempdir().unwrap();
        let places = dir.path().join("places");
        let environment = |name: &str| dir.path().join(name);
        for name in ["one", "two"] {
            std::fs::create_dir(environment(name)).unwrap();
        }
        let directories = |name: &str| AgentDirectories::claim_in(&places, &environment(name)).unwrap();
        let (one, two) = (directories("one"), directories("two"));
        assert_ne!(one.folder, two.folder);
        let uids = |directories: &AgentDirectories, number| SystemAgent::new(directories, number).unwrap().first_uid;
        assert!(uids(&one, 63) + UIDS_PER_AGENT <= uids(&two, 0));
        let repeated = directories("one");
        assert_eq!((&repeated.folder, repeated.number), (&one.folder, one.number));

        // The uids of remaining users are not reused; directories without them are.
        std::fs::create_dir_all(two.folder.join("0")).unwrap();
        for name in ["one", "two"] {
            std::fs::remove_dir(environment(name)).unwrap();
        }
        assert_eq!(directories("three").number, one.number);
        assert_ne!(directories("four").number, two.number);
    }
}
