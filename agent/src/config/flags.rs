//! The agent's command line. A flag that names a variable is read from there where it is not given.

use std::path::PathBuf;

use clap::Parser;
use uuid::Uuid;

use crate::gpu_reset;
use crate::health::kernel_log;
use crate::integrity::listeners::PortRange;
use crate::simulated_faults::SimulatedFailure;
use crate::validation::DEFAULT_PROGRAMS;

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
    /// How tenants are isolated: `system` makes Linux users and needs root, `sandbox` enforces nothing
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

/// The form of the result.
#[derive(Debug, Clone, clap::Args)]
pub struct AgentDoctorArgs {
    #[arg(long, value_enum, default_value_t)]
    pub output: FindingsOutput,
}

/// How findings are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum FindingsOutput {
    #[default]
    Text,
    Json,
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
