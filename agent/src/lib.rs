//! The node agent: the part of the control plane that runs on a node.
//!
//! It gets an identity with a single-use token, long-polls for signed tasks, decides what to do with each, journals what it is about to do
//! and did, and does it through one trait over the machine.
//!
//! | module | what |
//! | --- | --- |
//! | [`daemon`] | ties the others together: the loops of a running agent |
//! | [`config`], [`logging`], [`diagnostics`], [`doctor`] | flags and settings; log lines; what an operator sees of the machine; `gpuaas-agent doctor` |
//! | [`identity`], [`node_api_client`], [`server_clock`] | keys and certificate; the client of the node API; the control plane's time |
//! | [`task_plan`], [`task_journal`] | what to do with a task, by its record (pure); the records, across crashes |
//! | [`executor`], [`sandbox`], [`system_executor`] | the trait over the machine; tenants as folders; tenants as Linux users |
//! | [`task_outcome`], [`cleanup_checks`] | what a task comes to; the checks of a release that every executor makes |
//! | [`allocation_records`], [`unproved_gpus`], [`ssh`], [`terminal`] | of tenants: which GPUs they hold, which are not proved free of them, their logins, their shells |
//! | [`gpus`], [`gpu_probe`], [`gpu_reset`], [`simulated_faults`] | GPUs, the driver's library in a process of its own, the reset of one; faults of simulated ones |
//! | [`finding_log`], [`health`], [`integrity`], [`inventory`], [`storage`], [`validation`] | of the machine: findings and where they come from, changes of what gives rights, hardware and load, disks, tests under load |
//! | [`agent_update`], [`agent_user`], [`service_manager`], [`stop_signals`] | the agent as a program: its update, its user, systemd, signals |
//! | [`log_collector`], [`telemetry_edge`] | the other programs of a node: `gpuaas-log-collector`, `gpuaas-telemetry-edge` |
//! | [`bounded_reading`], [`bounded_tool`], [`process_attributes`] | what does not return in time: readings, programs; what those programs must not inherit |
//! | [`atomic_file`], [`full_jitter`], [`repeated_failures`] | files that survive a power failure whole; pauses after failures; failures that last, in the log |

pub mod agent_update;
pub mod agent_user;
pub mod allocation_records;
pub mod atomic_file;
pub mod bounded_reading;
pub mod bounded_tool;
pub mod cleanup_checks;
pub mod config;
pub mod daemon;
pub mod diagnostics;
pub mod doctor;
pub mod executor;
pub mod finding_log;
pub mod full_jitter;
pub mod gpu_probe;
pub mod gpu_reset;
pub mod gpus;
pub mod health;
pub mod identity;
pub mod integrity;
pub mod inventory;
pub mod log_collector;
pub mod logging;
pub mod node_api_client;
pub mod process_attributes;
pub mod repeated_failures;
pub mod sandbox;
pub mod server_clock;
pub mod service_manager;
pub mod simulated_faults;
pub mod ssh;
pub mod stop_signals;
pub mod storage;
pub mod system_executor;
pub mod task_journal;
pub mod task_outcome;
pub mod task_plan;
pub mod telemetry_edge;
pub mod terminal;
pub mod unproved_gpus;
pub mod validation;

pub use failures::chain;
