//! One process of the control plane: the supervision tree, the cluster, the workers, and the commands of `gpuaas`.

pub mod audit_command;
pub mod cluster;
pub mod cluster_runtime;
pub mod commit_effects;
pub mod config;
#[cfg(feature = "dev")]
pub mod dev;
pub mod entity_store;
pub mod exit_status;
pub mod ledger_command;
pub mod logging;
pub mod metrics;
pub mod node_ca_command;
pub mod process_environment;
pub mod process_roles;
pub mod serve;
pub mod shutdown;
pub mod snapshot_seal_command;
pub mod startup;
pub mod supervisor;
pub mod traces;

pub mod cluster_keys;
pub mod workers;
