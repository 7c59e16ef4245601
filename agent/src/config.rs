//! The agent's configuration: flags, environment, and the bootstrap bundle's environment file.
//!
//! A flag wins over the environment, the environment over the file. Secrets have no flag, since every user of a machine can read the
//! flags of its processes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use uuid::Uuid;
use wire::bundle::{EnvFileError, Variables, fingerprint, names};
use wire::verifier_set::SetError;
use wire::{SecretToken, VerifierSet};

use crate::agent_user::RunAsError;
use crate::atomic_file::{self, FileError};
use crate::doctor::AgentDoctorArgs;
use crate::gpu_reset;
use crate::gpus::GpuSimulation;
use crate::health::kernel_log;
use crate::integrity::listeners::PortRange;
use crate::integrity::{IntegritySettings, PrivilegeSettings};
use crate::simulated_faults::{SimulatedFailure, SimulatedFaults};
use crate::system_executor::Settings;
use crate::system_executor::sudoers::SudoCommand;
use crate::system_executor::tenant_limits::LimitSettings;
use crate::validation::DEFAULT_PROGRAMS;

const STATE_DIR: &str = "SVC_NODE_AGENT_STATE_DIR";
const DEFAULT_STATE_DIR: &str = "/var/lib/gpuaas-agent";

/// Agent of a GPU node: enrolls with the node's bootstrap bundle, polls for signed tasks and executes them.
///
/// Each SVC_ variable may be set in the environment or in the environment file of the bundle. The enrollment token
/// (SVC_ENROLLMENT_TOKEN) is read from there alone.
#[derive(Debug, Default, Parser)]
#[command(name = "gpuaas-agent", version)]
pub struct Flags {
    #[command(subcommand)]
    pub command: Option<AgentCommand>,
    /// Environment file of the bootstrap bundle [SVC_NODE_AGENT_ENV_FILE]
    #[arg(long, global = true)]
    pub env_file: Option<PathBuf>,
    /// Node id [SVC_NODE_ID]
    #[arg(long)]
    pub node_id: Option<Uuid>,
    /// Base URL of the node-facing API, https [SVC_API_URL]
    #[arg(long)]
    pub api_url: Option<String>,
    /// Trust anchor for the API; written from the bundle when it is missing [SVC_CA_BUNDLE_PATH]
    #[arg(long)]
    pub ca_bundle_path: Option<PathBuf>,
    /// Where the issuers of the node's certificate are written [SVC_NODE_CERT_CA_BUNDLE_PATH]
    #[arg(long)]
    pub node_cert_ca_bundle_path: Option<PathBuf>,
    /// The node's certificate [SVC_CERT_PATH]
    #[arg(long)]
    pub cert_path: Option<PathBuf>,
    /// The node's private key [SVC_KEY_PATH]
    #[arg(long)]
    pub key_path: Option<PathBuf>,
    /// Public keys of task signatures: [key_id:][status:]base64, separated by commas [SVC_TASK_SIGNING_PUBKEYS]
    #[arg(long)]
    pub task_signing_pubkeys: Option<String>,
    /// Folder of the journal, the identity and the allocations [SVC_NODE_AGENT_STATE_DIR, default /var/lib/gpuaas-agent]
    #[arg(long)]
    pub state_dir: Option<PathBuf>,
    /// How tenants are kept apart: `system` makes Linux users and needs root, `sandbox` enforces nothing
    #[arg(long, env = "SVC_NODE_AGENT_EXECUTOR", default_value = "sandbox", global = true)]
    pub executor: ExecutorChoice,
    /// The user that the agent becomes where root starts it with the executor `sandbox` [SVC_NODE_AGENT_USER]
    #[arg(long, env = "SVC_NODE_AGENT_USER")]
    pub user: Option<String>,
    /// Tasks executed at once
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub max_concurrent_tasks: u16,
    /// Disk for recordings of terminals that the control plane does not have yet, in MiB; one session gets an eighth of it
    #[arg(long, env = "SVC_NODE_AGENT_RECORDING_SPOOL_MIB", default_value_t = 512, value_parser = clap::value_parser!(u32).range(8..=1_048_576))]
    pub recording_spool_mib: u32,
    /// Whether changes of privileges and of the agent's package are reported; such findings take the machine out of rent
    #[arg(long, env = "SVC_NODE_AGENT_INTEGRITY_CHECKS", default_value = "on")]
    pub integrity_checks: IntegrityChecks,
    /// Ports whose listeners are not compared, such as 32768-60999, separated by commas
    #[arg(long, env = "SVC_NODE_AGENT_IGNORED_PORTS", value_delimiter = ',')]
    pub ignored_ports: Vec<PortRange>,
    /// Seconds between two comparisons of privileges; the file systems are searched after sixty of them
    #[arg(long, hide = true, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub integrity_interval_seconds: u64,
    /// Folder of stress-ng and fio, which `node.validate` runs where they are installed [SVC_NODE_AGENT_VALIDATION_TOOLS]
    #[arg(long, env = "SVC_NODE_AGENT_VALIDATION_TOOLS", default_value = DEFAULT_PROGRAMS)]
    pub validation_tools: PathBuf,
    /// Folder in which `node.validate` tests the disk, of root alone [SVC_NODE_AGENT_VALIDATION_FOLDER, default the state's]
    #[arg(long, env = "SVC_NODE_AGENT_VALIDATION_FOLDER")]
    pub validation_folder: Option<PathBuf>,
    /// Folder of nvidia-smi, which `node.gpu_reset` runs [SVC_NODE_AGENT_DRIVER_TOOLS]
    #[arg(long, env = "SVC_NODE_AGENT_DRIVER_TOOLS", default_value = gpu_reset::DEFAULT_PROGRAMS)]
    pub driver_tools: PathBuf,
    /// Filter of log events, in the syntax of RUST_LOG
    #[arg(long, env = "RUST_LOG", default_value = "info")]
    pub log: String,
    /// Simulate this many GPUs
    #[arg(long)]
    pub simulate_gpus: Option<u32>,
    /// Model of the simulated GPUs
    #[arg(long, default_value = "H100", requires = "simulate_gpus")]
    pub gpu_model: String,
    /// Memory of each simulated GPU
    #[arg(long, default_value_t = 81_920, requires = "simulate_gpus")]
    pub gpu_memory_mib: u64,
    /// Simulated hardware that takes this long to provision
    #[arg(long, default_value_t = 0, requires = "simulate_gpus")]
    pub simulate_provision_delay_ms: u64,
    /// Simulated hardware that fails one kind of task
    #[arg(long, requires = "simulate_gpus")]
    pub simulate_failure: Option<SimulatedFailure>,
    /// Remove every tenant from this machine, which leaves the service, and end. No agent may run on it
    #[arg(long)]
    pub clean_up: bool,
    /// Answers requests on standard input with calls of NVIDIA's management library: the agent runs this as a process of its own
    #[arg(long, hide = true)]
    pub gpu_probe: bool,
    /// Seconds after which NVIDIA's driver counts as hung
    #[arg(long, hide = true, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=60))]
    pub gpu_deadline_seconds: u64,
    /// The kernel's log, one record for each read
    #[arg(long, hide = true, default_value = kernel_log::DEVICE)]
    pub kernel_log: PathBuf,
    /// Revokes the keyrings of the current user, and exits: the agent runs this as a tenant that it removes
    #[arg(long, hide = true)]
    pub forget_keyrings: bool,
    /// Holds the program of a terminal session: the agent runs this for each session that is to outlive it
    #[arg(long, hide = true)]
    pub hold_terminal: bool,
}

/// What the program does in place of the agent's work.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum AgentCommand {
    /// Looks at everything that the agent needs (settings, certificates, control plane, clock, driver, cgroups, disks), and says what to do
    /// about what is wrong. Changes nothing. Exits with 0 where nothing is wrong, with 1 for warnings, with 2 for errors
    Doctor(AgentDoctorArgs),
}

/// How the agent isolates tenants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ExecutorChoice {
    #[default]
    Sandbox,
    System,
}

/// Whether the integrity of the machine is watched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum IntegrityChecks {
    #[default]
    On,
    Off,
}

/// A complete configuration.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    pub node_id: Uuid,
    /// Required until the node is enrolled.
    pub enrollment_token: Option<SecretToken>,
    /// Without a trailing slash.
    pub api_url: String,
    /// Trust anchors for the API's server certificate; no other root counts.
    pub ca_bundle_pem: String,
    /// The environment file of the bundle, where the configuration came from one.
    pub env_file: Option<PathBuf>,
    pub node_cert_ca_bundle_path: PathBuf,
    pub cert_path: PathBuf,
    pub key_path: PathBuf,
    /// The bundle's verifier keys, version 0.
    pub verifier_set: VerifierSet,
    pub state_dir: PathBuf,
    /// Folder of `nvidia-smi`.
    pub driver_tools: PathBuf,
    /// Folder of the tools of `node.validate`.
    pub validation_tools: PathBuf,
    /// Where it tests the disk.
    pub validation_folder: PathBuf,
    pub max_concurrent_tasks: usize,
    pub recording_spool_bytes: u64,
    /// Settings of the `system` executor; `None` for `sandbox`.
    pub system: Option<Settings>,
    pub simulated_gpus: Option<GpuSimulation>,
    pub simulated_faults: SimulatedFaults,
    /// After this time without an answer, the GPU driver counts as hung.
    pub gpu_deadline: Duration,
    pub kernel_log: PathBuf,
    /// `None`: the integrity of the machine is not watched.
    pub integrity: Option<IntegritySettings>,
}

/// Why the agent cannot start, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum AgentConfigError {
    #[error("the environment file {} is not there; write the bootstrap bundle to it, or name another with --env-file", .0.display())]
    NoEnvFile(PathBuf),
    #[error("the environment file {} cannot be used", path.display())]
    EnvFile {
        path: PathBuf,
        #[source]
        source: EnvFileError,
    },
    #[error(
        "{name} is not set; take it from the node's bootstrap bundle (ask an administrator to reissue it if it is lost)"
    )]
    Missing { name: &'static str },
    #[error("{name} is not {expected}")]
    Value { name: &'static str, expected: &'static str },
    #[error("SVC_TASK_SIGNING_PUBKEYS cannot be used; take it from the node's bootstrap bundle")]
    Verifiers(#[from] SetError),
    #[error(
        "the CA bundle {} is not there and the environment has no SVC_CA_BUNDLE_PEM to write it from; install the bootstrap \
         bundle again",
        .0.display()
    )]
    NoCaBundle(PathBuf),
    #[error(
        "the CA bundle has fingerprint {found}, the bootstrap bundle says {expected}; if the bootstrap bundle is the newer one, \
         remove {} to have it written again",
        path.display()
    )]
    Fingerprint { path: PathBuf, found: String, expected: String },
    #[error(transparent)]
    User(#[from] RunAsError),
    /// Two or more, so that an operator corrects them in one pass.
    #[error("{} problems: {}", .0.len(), listed(.0))]
    Several(Vec<Self>),
    #[error(transparent)]
    Store(#[from] FileError),
}

fn listed(problems: &[AgentConfigError]) -> String {
    problems.iter().map(|problem| crate::chain(problem)).collect::<Vec<_>>().join("; ")
}

/// Collected configuration errors.
#[derive(Default)]
struct Problems(Vec<AgentConfigError>);

impl Problems {
    fn note<T>(&mut self, result: Result<T, AgentConfigError>) -> Option<T> {
        result.map_err(|problem| self.0.push(problem)).ok()
    }

    /// Requires at least one problem.
    fn into_error(mut self) -> AgentConfigError {
        match self.0.pop() {
            Some(only) if self.0.is_empty() => only,
            Some(last) => {
                self.0.push(last);
                AgentConfigError::Several(self.0)
            }
            None => AgentConfigError::Several(self.0),
        }
    }
}

impl AgentConfig {
    /// Assembles the configuration and writes the CA bundle's file if it is missing.
    ///
    /// # Errors
    /// [`AgentConfigError`] lists everything that is missing or wrong, and what to do.
    pub fn gather(flags: &Flags, environment: impl Fn(&str) -> Option<String>) -> Result<Self, AgentConfigError> {
        Self::assemble(flags, &environment, true)
    }

    /// The same, and nothing is written.
    ///
    /// # Errors
    /// As [`Self::gather`].
    pub fn peek(flags: &Flags, environment: impl Fn(&str) -> Option<String>) -> Result<Self, AgentConfigError> {
        Self::assemble(flags, &environment, false)
    }

    fn assemble(
        flags: &Flags,
        environment: &dyn Fn(&str) -> Option<String>,
        writes: bool,
    ) -> Result<Self, AgentConfigError> {
        let sources = Sources::open(flags, environment)?;
        let state_dir = flags
            .state_dir
            .clone()
            .or_else(|| sources.get(STATE_DIR).map(PathBuf::from))
            .unwrap_or_else(|| PathBuf::from(DEFAULT_STATE_DIR));
        let mut problems = Problems::default();
        let node_id = problems.note(node_id(flags, &sources));
        let api_url = problems.note(api_url(flags, &sources));
        let keys = sources.flag_or(flags.task_signing_pubkeys.as_ref(), names::TASK_SIGNING_PUBKEYS);
        let keys = keys.and_then(|keys| Ok(VerifierSet::from_env_value(&keys)?));
        let verifier_set = problems.note(keys);
        let path = |flag: &Option<PathBuf>, name: &str, default: &str| {
            flag.clone().or_else(|| sources.get(name).map(PathBuf::from)).unwrap_or_else(|| state_dir.join(default))
        };
        let ca_bundle_path = path(&flags.ca_bundle_path, names::CA_BUNDLE_PATH, "ca.pem");
        let (pem, expected) = (sources.get(names::CA_BUNDLE_PEM), sources.get(names::CA_BUNDLE_FINGERPRINT));
        let ca_bundle_pem = problems.note(ca_bundle(&ca_bundle_path, pem, expected, writes));
        let system = match flags.executor {
            ExecutorChoice::Sandbox => Some(None),
            ExecutorChoice::System => system_settings(&sources, &mut problems).map(Some),
        };
        let (Some(node_id), Some(api_url), Some(verifier_set), Some(ca_bundle_pem), Some(system)) =
            (node_id, api_url, verifier_set, ca_bundle_pem, system)
        else {
            return Err(problems.into_error());
        };
        let integrity = integrity_settings(flags, system.as_ref(), &state_dir);
        Ok(Self {
            node_id,
            enrollment_token: sources.get(names::ENROLLMENT_TOKEN).map(SecretToken::new),
            api_url,
            ca_bundle_pem,
            env_file: sources.env_file.clone(),
            node_cert_ca_bundle_path: path(
                &flags.node_cert_ca_bundle_path,
                names::NODE_CERT_CA_BUNDLE_PATH,
                "node-ca.pem",
            ),
            cert_path: path(&flags.cert_path, names::CERT_PATH, "node.pem"),
            key_path: path(&flags.key_path, names::KEY_PATH, "node.key"),
            verifier_set,
            max_concurrent_tasks: usize::from(flags.max_concurrent_tasks),
            recording_spool_bytes: u64::from(flags.recording_spool_mib) * 1024 * 1024,
            system,
            simulated_gpus: flags.simulate_gpus.map(|count| GpuSimulation {
                count,
                model: flags.gpu_model.clone(),
                memory_mib: flags.gpu_memory_mib,
            }),
            simulated_faults: SimulatedFaults {
                provision_delay: Duration::from_millis(flags.simulate_provision_delay_ms),
                failure: flags.simulate_failure,
            },
            gpu_deadline: Duration::from_secs(flags.gpu_deadline_seconds),
            kernel_log: flags.kernel_log.clone(),
            integrity,
            driver_tools: flags.driver_tools.clone(),
            validation_tools: flags.validation_tools.clone(),
            validation_folder: flags.validation_folder.clone().unwrap_or_else(|| state_dir.clone()),
            state_dir,
        })
    }
}

/// Privileges are compared on machines that are tenants' alone.
fn integrity_settings(flags: &Flags, system: Option<&Settings>, state_dir: &Path) -> Option<IntegritySettings> {
    let privileges = system.map(|system| PrivilegeSettings {
        root: PathBuf::from("/"),
        state_dir: state_dir.to_owned(),
        homes: system.homes.clone(),
        keys: system.keys.clone(),
        ssh_listen: system.ssh_listen,
        ignored_ports: flags.ignored_ports.clone(),
    });
    let interval = Duration::from_secs(flags.integrity_interval_seconds);
    (flags.integrity_checks == IntegrityChecks::On).then_some(IntegritySettings { privileges, interval })
}

fn node_id(flags: &Flags, sources: &Sources<'_>) -> Result<Uuid, AgentConfigError> {
    match flags.node_id {
        Some(node_id) => Ok(node_id),
        None => sources
            .require(names::NODE_ID)?
            .parse()
            .map_err(|_| AgentConfigError::Value { name: names::NODE_ID, expected: "a UUID" }),
    }
}

/// Without a trailing slash.
fn api_url(flags: &Flags, sources: &Sources<'_>) -> Result<String, AgentConfigError> {
    let api_url = sources.flag_or(flags.api_url.as_ref(), names::API_URL)?;
    let is_https = reqwest::Url::parse(&api_url).is_ok_and(|url| url.scheme() == "https" && url.has_host());
    if !is_https {
        return Err(AgentConfigError::Value { name: names::API_URL, expected: "an https URL" });
    }
    Ok(api_url.trim_end_matches('/').to_owned())
}

/// The environment, then the environment file. An empty value counts as missing.
pub(crate) struct Sources<'a> {
    environment: &'a dyn Fn(&str) -> Option<String>,
    env_file: Option<PathBuf>,
    file: Variables,
}

impl<'a> Sources<'a> {
    pub(crate) fn open(
        flags: &Flags,
        environment: &'a dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, AgentConfigError> {
        let named = flags.env_file.clone().or_else(|| environment(names::ENV_FILE).map(PathBuf::from));
        let Some(path) = named else {
            return Ok(Self { environment, env_file: None, file: Variables::default() });
        };
        let text = atomic_file::read_if_there(&path)?.ok_or_else(|| AgentConfigError::NoEnvFile(path.clone()))?;
        let file =
            Variables::parse(&text).map_err(|source| AgentConfigError::EnvFile { path: path.clone(), source })?;
        Ok(Self { environment, env_file: Some(path), file })
    }

    pub(crate) fn get(&self, name: &str) -> Option<String> {
        let from_file = || self.file.get(name).map(str::to_owned);
        (self.environment)(name).filter(|value| !value.is_empty()).or_else(from_file).filter(|value| !value.is_empty())
    }

    fn require(&self, name: &'static str) -> Result<String, AgentConfigError> {
        self.get(name).ok_or(AgentConfigError::Missing { name })
    }

    fn flag_or(&self, flag: Option<&String>, name: &'static str) -> Result<String, AgentConfigError> {
        flag.map_or_else(|| self.require(name), |value| Ok(value.clone()))
    }
}

const UIDS: &str = "SVC_NODE_AGENT_UIDS";
const HOMES: &str = "SVC_NODE_AGENT_HOMES";
const KEYS: &str = "SVC_NODE_AGENT_AUTHORIZED_KEYS";
const SUDO_COMMANDS: &str = "SVC_NODE_AGENT_SUDO_COMMANDS";
const SHARED: &str = "SVC_NODE_AGENT_SHARED_FOLDERS";
const DEVICES: &str = "SVC_NODE_AGENT_DEVICES";
const TENANT_DEVICES: &str = "SVC_NODE_AGENT_TENANT_DEVICES";
const SSH_LISTEN: &str = "SVC_NODE_AGENT_SSH_LISTEN";
const LOOPBACK_GUARD: &str = "SVC_NODE_AGENT_LOOPBACK_GUARD";
const TENANT_LIMITS: &str = "SVC_NODE_AGENT_TENANT_LIMITS";
const RESERVED_MEMORY: &str = "SVC_NODE_AGENT_RESERVED_MEMORY_MIB";
const TASKS_PER_GPU: &str = "SVC_NODE_AGENT_TASKS_PER_GPU";
/// The fewest processes with which a tenant's login and a program of CUDA begin.
const FEWEST_TASKS: u64 = 256;

const MAX_TENANT_DEVICES: usize = 32;

/// The variables that are no flags and not of the bundle.
pub(crate) const OWN_VARIABLES: [&str; 13] = [
    STATE_DIR,
    UIDS,
    HOMES,
    KEYS,
    SUDO_COMMANDS,
    SHARED,
    DEVICES,
    TENANT_DEVICES,
    SSH_LISTEN,
    LOOPBACK_GUARD,
    TENANT_LIMITS,
    RESERVED_MEMORY,
    TASKS_PER_GPU,
];

/// The settings of tenants' accounts from the environment; the rest is as in [`Settings::default`]. `None` if something is wrong, which
/// is noted.
fn system_settings(sources: &Sources<'_>, problems: &mut Problems) -> Option<Settings> {
    let defaults = Settings::default();
    let folder = |name: &'static str, default: PathBuf| match sources.get(name).map(PathBuf::from) {
        Some(path) if path.is_absolute() && is_plain(&path) => Ok(path),
        Some(_) => Err(AgentConfigError::Value {
            name,
            expected: "an absolute path without quotes, %, \\ and control characters",
        }),
        None => Ok(default),
    };
    let uids = match sources.get(UIDS) {
        Some(text) => uid_range(&text)
            .ok_or(AgentConfigError::Value { name: UIDS, expected: "a range of uids from 1000 on, as 70000-99999" }),
        None => Ok(defaults.uids),
    };
    let (uids, sudo_commands) = (problems.note(uids), problems.note(sudo_commands(sources)));
    let (shared, ssh_listen) = (problems.note(shared_folders(sources)), problems.note(ssh_listen(sources)));
    let homes = problems.note(folder(HOMES, defaults.homes));
    let keys = problems.note(folder(KEYS, defaults.keys));
    let devices = problems.note(folder(DEVICES, defaults.devices));
    let tenant_devices = problems.note(tenant_devices(sources));
    let loopback_guard = problems.note(switch(sources, LOOPBACK_GUARD, defaults.loopback_guard));
    let limits = limit_settings(sources, defaults.limits, problems);
    Some(Settings {
        uids: uids?,
        homes: homes?,
        keys: keys?,
        sudo_commands: sudo_commands?,
        shared: shared?,
        devices: devices?,
        tenant_devices: tenant_devices?,
        program: defaults.program,
        ssh_listen: ssh_listen?,
        loopback_guard: loopback_guard?,
        limits: limits?,
    })
}

/// `None` if something is wrong, which is noted.
fn limit_settings(sources: &Sources<'_>, defaults: LimitSettings, problems: &mut Problems) -> Option<LimitSettings> {
    let number = |name: &'static str, least: u64, expected: &'static str| match sources.get(name) {
        Some(text) => match text.trim().parse::<u64>() {
            Ok(number) if number >= least => Ok(Some(number)),
            Ok(_) | Err(_) => Err(AgentConfigError::Value { name, expected }),
        },
        None => Ok(None),
    };
    let is_on = problems.note(switch(sources, TENANT_LIMITS, defaults.is_on));
    let reserved = problems.note(number(RESERVED_MEMORY, 0, "a number of MiB"));
    let tasks = problems.note(number(TASKS_PER_GPU, FEWEST_TASKS, "a number of processes from 256 on"));
    Some(LimitSettings {
        is_on: is_on?,
        reserved_memory_mib: reserved?.or(defaults.reserved_memory_mib),
        tasks_per_gpu: tasks?.unwrap_or(defaults.tasks_per_gpu),
    })
}

fn switch(sources: &Sources<'_>, name: &'static str, default: bool) -> Result<bool, AgentConfigError> {
    match sources.get(name).as_deref() {
        None => Ok(default),
        Some("on") => Ok(true),
        Some("off") => Ok(false),
        Some(_) => Err(AgentConfigError::Value { name, expected: "on or off" }),
    }
}

fn sudo_commands(sources: &Sources<'_>) -> Result<Vec<SudoCommand>, AgentConfigError> {
    let commands = sources.get(SUDO_COMMANDS).unwrap_or_default();
    let commands = commands.split(',').map(str::trim).filter(|command| !command.is_empty());
    commands
        .map(str::parse)
        .collect::<Result<_, _>>()
        .map_err(|_| AgentConfigError::Value { name: SUDO_COMMANDS, expected: "absolute paths of programs, by commas" })
}

/// systemd reads them in the slice of each tenant.
fn tenant_devices(sources: &Sources<'_>) -> Result<Vec<PathBuf>, AgentConfigError> {
    let devices = sources.get(TENANT_DEVICES).unwrap_or_default();
    let devices = devices.split(',').map(str::trim).filter(|path| !path.is_empty()).map(PathBuf::from);
    let devices: Vec<PathBuf> = devices.collect();
    let is_device = |path: &PathBuf| {
        let is_whole = path.components().all(|part| !matches!(part, std::path::Component::ParentDir));
        let is_word = path.to_str().is_some_and(|text| !text.contains(char::is_whitespace));
        path.starts_with("/dev") && path.parent() != Some(Path::new("/")) && is_whole && is_word && is_plain(path)
    };
    if devices.len() <= MAX_TENANT_DEVICES && devices.iter().all(is_device) {
        return Ok(devices);
    }
    Err(AgentConfigError::Value {
        name: TENANT_DEVICES,
        expected: "32 device nodes below /dev at most, by commas, as /dev/fuse,/dev/infiniband/uverbs0",
    })
}

fn shared_folders(sources: &Sources<'_>) -> Result<Vec<PathBuf>, AgentConfigError> {
    let shared = sources.get(SHARED).unwrap_or_default();
    let shared = shared.split(',').map(str::trim).filter(|path| !path.is_empty()).map(PathBuf::from);
    let shared: Vec<PathBuf> = shared.collect();
    if shared.iter().all(|path| path.is_absolute() && path.parent().is_some()) {
        return Ok(shared);
    }
    Err(AgentConfigError::Value { name: SHARED, expected: "absolute paths of folders, by commas" })
}

fn ssh_listen(sources: &Sources<'_>) -> Result<Option<std::net::SocketAddr>, AgentConfigError> {
    let Some(text) = sources.get(SSH_LISTEN) else { return Ok(None) };
    let parsed = text.parse().map(Some);
    parsed
        .map_err(|_| AgentConfigError::Value { name: SSH_LISTEN, expected: "an address with a port, as 0.0.0.0:2222" })
}

/// Whether a path can be written into a file of sshd or systemd without escaping.
fn is_plain(path: &Path) -> bool {
    let means_more = |c: char| c.is_control() || matches!(c, '"' | '\'' | '%' | '\\');
    path.to_str().is_some_and(|text| !text.chars().any(means_more))
}

fn uid_range(text: &str) -> Option<std::ops::RangeInclusive<u32>> {
    let (first, last) = text.split_once('-')?;
    let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    // Uids below 1000 are the system's own; the last two mean "nobody" and "no change".
    (first >= 1000 && first <= last && last < u32::MAX - 1).then_some(first..=last)
}

fn ca_bundle(
    path: &Path,
    pem: Option<String>,
    expected: Option<String>,
    writes: bool,
) -> Result<String, AgentConfigError> {
    let (found, is_new) = match atomic_file::read_if_there(path)? {
        Some(text) => (text, false),
        None => (pem.ok_or_else(|| AgentConfigError::NoCaBundle(path.to_owned()))?, true),
    };
    if let Some(expected) = expected
        && fingerprint(&found) != expected
    {
        return Err(AgentConfigError::Fingerprint { path: path.to_owned(), found: fingerprint(&found), expected });
    }
    if is_new && writes {
        atomic_file::write_atomically(path, found.as_bytes(), atomic_file::PUBLIC)?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use wire::bundle::BootstrapBundle;
    use wire::verifier_set::PublicKey;

    use super::*;

    const CA: &str = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";

    fn bundle(folder: &Path) -> BootstrapBundle {
        let key = ed25519_dalek::SigningKey::from_bytes(&[1; 32]);
        let at = |name: &str| folder.join(name).to_str().unwrap().to_owned();
        BootstrapBundle {
            node_id: Uuid::from_u128(5),
            enrollment_token: SecretToken::new("hunter2"),
            api_url: "https://nodes.example.com/".into(),
            task_signing_pubkeys: PublicKey::from(&key).to_string(),
            ca_bundle_path: at("etc/ca.pem"),
            node_cert_ca_bundle_path: at("etc/node-ca.pem"),
            cert_path: at("etc/node.pem"),
            key_path: at("etc/node.key"),
            ca_bundle_pem: CA.into(),
            ca_bundle_fingerprint: fingerprint(CA),
            package: Default::default(),
        }
    }

    fn gather(folder: &Path, text: &str) -> Result<AgentConfig, AgentConfigError> {
        let path = folder.join("agent.env");
        std::fs::write(&path, text).unwrap();
        let state_dir = Some(folder.join("state"));
        AgentConfig::gather(
            &Flags { env_file: Some(path), state_dir, max_concurrent_tasks: 1, ..Flags::default() },
            |_| None,
        )
    }

    #[test]
    fn the_flags_are_consistent() {
        Flags::command().debug_assert();
        for lonely in ["--simulate-provision-delay-ms=5", "--simulate-failure=release"] {
            assert!(Flags::try_parse_from(["gpuaas-agent", lonely]).is_err(), "{lonely} without --simulate-gpus");
            assert!(Flags::try_parse_from(["gpuaas-agent", lonely, "--simulate-gpus=1"]).is_ok());
        }
    }

    #[test]
    fn bundle_environment_file_is_sufficient_and_its_ca_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let config = gather(folder.path(), &bundle(folder.path()).to_env_file().unwrap()).unwrap();
        assert_eq!(config.node_id, Uuid::from_u128(5));
        assert_eq!(config.api_url, "https://nodes.example.com");
        assert_eq!(config.ca_bundle_pem, CA);
        assert_eq!(std::fs::read_to_string(folder.path().join("etc/ca.pem")).unwrap(), CA);
        assert!(!format!("{config:?}").contains("hunter2"));
    }

    #[test]
    fn account_settings_are_accepted_or_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let whole = bundle(folder.path()).to_env_file().unwrap();
        let path = folder.path().join("agent.env");
        std::fs::write(&path, whole).unwrap();
        let gather = |name: &'static str, value: &'static str| {
            let flags = Flags { env_file: Some(path.clone()), executor: ExecutorChoice::System, ..Flags::default() };
            AgentConfig::gather(&flags, |asked| (asked == name).then(|| value.to_owned()))
        };
        let settings = |name, value| gather(name, value).unwrap().system.unwrap();
        assert_eq!(settings("NONE", ""), Settings::default());
        assert_eq!(settings(UIDS, "5000-5009").uids, 5000..=5009);
        assert_eq!(settings(SUDO_COMMANDS, "/bin/a, /bin/b").sudo_commands.len(), 2);
        let further = settings(TENANT_DEVICES, "/dev/fuse, /dev/infiniband/uverbs0,").tenant_devices;
        assert_eq!(further, ["/dev/fuse", "/dev/infiniband/uverbs0"].map(PathBuf::from));
        assert_eq!(settings(SHARED, "/scratch, /data/all").shared, ["/scratch", "/data/all"].map(PathBuf::from));
        for (name, value) in [
            (UIDS, "0-5"),
            (UIDS, "5000"),
            (UIDS, "6000-5000"),
            (UIDS, "5000-4294967295"),
            (SUDO_COMMANDS, "ALL"),
            (SUDO_COMMANDS, "/bin/sh *"),
            (SHARED, "/scratch, data"),
            (SHARED, "/"),
            (HOMES, "home"),
            (DEVICES, "../dev"),
            (TENANT_DEVICES, "fuse"),
            (TENANT_DEVICES, "/dev"),
            (TENANT_DEVICES, "/dev/../etc/shadow"),
            (TENANT_DEVICES, "/dev/x rw"),
        ] {
            assert!(
                matches!(gather(name, value), Err(AgentConfigError::Value { name: found, .. }) if found == name),
                "{value}"
            );
        }
    }

    #[test]
    fn a_flag_wins_over_the_environment_and_the_environment_over_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.env");
        std::fs::write(&path, bundle(folder.path()).to_env_file().unwrap()).unwrap();
        let environment = |name: &str| match name {
            "SVC_NODE_AGENT_ENV_FILE" => Some(path.to_str().unwrap().to_owned()),
            "SVC_NODE_ID" => Some(Uuid::from_u128(6).to_string()),
            "SVC_API_URL" => Some("https://environment".to_owned()),
            _ => None,
        };
        let flags = Flags { api_url: Some("https://flag".to_owned()), ..Flags::default() };
        let config = AgentConfig::gather(&flags, environment).unwrap();
        assert_eq!((config.node_id, config.api_url.as_str()), (Uuid::from_u128(6), "https://flag"));
    }

    #[test]
    fn ca_file_that_differs_from_the_bundle_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let text = bundle(folder.path()).to_env_file().unwrap();
        let altered = BootstrapBundle { ca_bundle_pem: "other".into(), ..bundle(folder.path()) };
        let refused = gather(folder.path(), &altered.to_env_file().unwrap());
        assert!(matches!(refused, Err(AgentConfigError::Fingerprint { .. })));
        assert!(!folder.path().join("etc/ca.pem").exists());
        std::fs::create_dir(folder.path().join("etc")).unwrap();
        std::fs::write(folder.path().join("etc/ca.pem"), "stale").unwrap();
        assert!(matches!(gather(folder.path(), &text), Err(AgentConfigError::Fingerprint { .. })));
    }

    #[test]
    fn all_configuration_problems_are_reported_together() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.env");
        std::fs::write(&path, "SVC_NODE_ID=node-1\n").unwrap();
        let flags = Flags { env_file: Some(path), executor: ExecutorChoice::System, ..Flags::default() };
        let environment = |name: &str| match name {
            UIDS => Some("0-5".to_owned()),
            SSH_LISTEN => Some("2222".to_owned()),
            _ => None,
        };
        let error = AgentConfig::gather(&flags, environment).unwrap_err().to_string();
        for name in ["SVC_NODE_ID", "SVC_API_URL", "SVC_TASK_SIGNING_PUBKEYS", "SVC_CA_BUNDLE_PEM", UIDS, SSH_LISTEN] {
            assert_eq!(error.matches(name).count(), 1, "{name}: {error}");
        }
        assert!(error.starts_with("6 problems: "), "{error}");
    }

    #[test]
    fn missing_or_invalid_settings_are_reported_with_the_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let whole = bundle(folder.path()).to_env_file().unwrap();
        let without = |name: &str| {
            let stored: Vec<&str> = whole.lines().filter(|line| !line.starts_with(&format!("{name}="))).collect();
            stored.join("\n")
        };
        for name in ["SVC_NODE_ID", "SVC_API_URL", "SVC_TASK_SIGNING_PUBKEYS"] {
            let error = gather(folder.path(), &without(name)).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("bundle"), "{error}");
        }
        let plain = whole.replace("https://", "http://");
        assert!(matches!(gather(folder.path(), &plain), Err(AgentConfigError::Value { name: "SVC_API_URL", .. })));
        assert!(matches!(gather(folder.path(), "A=$(b)"), Err(AgentConfigError::EnvFile { .. })));
        let flags = Flags { env_file: Some(folder.path().join("absent")), ..Flags::default() };
        assert!(matches!(AgentConfig::gather(&flags, |_| None), Err(AgentConfigError::NoEnvFile(_))));
    }
}
