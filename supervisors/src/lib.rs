//! One process of the control plane: the supervision tree, the cluster, the workers, and the commands of `gpuaas`.

pub mod audit_command;
pub mod cluster;
pub mod config;
#[cfg(feature = "dev")]
pub mod dev;
pub mod exit;
pub mod ledger_command;
pub mod logging;
pub mod metrics;
pub mod node_ca_command;
pub mod process_environment;
pub mod runtime;
pub mod seal_command;
pub mod serve;
pub mod supervisor;
pub mod traces;
pub mod tree;
pub mod trust;
pub mod workers;
