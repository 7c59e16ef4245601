//! The node agent: the part of the control plane that runs on a node.
//!
//! It gets an identity with a single-use token ([`identity`]), long-polls for signed tasks, decides what to do with each ([`task_plan`],
//! pure), journals what it is about to do and did ([`task_journal`]), and does it through one trait over the machine ([`executor`]).
//! [`daemon`] ties these together; its configuration is in [`config`].

pub mod agent_update;
pub mod agent_user;
pub mod allocation_records;
pub mod atomic_file;
pub mod bounded_reading;
pub mod bounded_tool;
pub mod config;
pub mod daemon;
pub mod diagnostics;
pub mod doctor;
pub mod executor;
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
pub mod task_plan;
pub mod telemetry_edge;
pub mod terminal;
pub mod unproved_gpus;
pub mod validation;

pub use failures::chain;
