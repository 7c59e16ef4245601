//! One process of the control plane: the supervision tree, the cluster, the workers, and the commands of `gpuaas`.

mod as_the_service;
pub mod audit_command;
pub mod begin_incarnation_command;
pub mod cluster;
pub mod cluster_runtime;
pub mod config;
pub mod config_command;
#[cfg(feature = "dev")]
pub mod dev;
pub mod doctor;
pub mod effect_broadcast;
pub mod entity_environment;
pub mod entity_store;
pub mod exit_status;
pub mod key_ring_command;
pub mod ledger_command;
pub mod logging;
pub mod metrics;
pub mod migrate_command;
mod mutex;
pub mod node_ca_command;
pub mod process_roles;
pub mod recover_report;
pub mod reload;
pub mod restore_gate;
pub mod retention_command;
pub mod serve;
pub mod service_manager;
pub mod settings_files;
pub mod shutdown;
pub mod snapshot_seal_command;
pub mod startup;
pub mod supervisor;
pub mod support_bundle;
pub mod traces;

pub mod cluster_keys;
pub mod workers;
