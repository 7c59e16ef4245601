//! One process of the control plane: the supervision tree, the cluster, the workers, and the commands of `gpuaas`.
//!
//! | module | what |
//! | --- | --- |
//! | [`serve`], [`startup`], [`restore_gate`], [`shutdown`] | `gpuaas serve` from its configuration to its end: the stages of its start, the gate before a restored database, the ordered shutdown |
//! | [`supervisor`], [`workers`] | runs the rows of the supervision tree; the tree itself, and a file for each worker |
//! | [`cluster`], [`cluster_keys`], [`cluster_runtime`] | who owns which shard, and messages between members; the keys that all of them share; what operators see of them |
//! | [`entity_environment`], [`entity_store`], [`effect_broadcast`] | what this process gives its entities: clock and policy, the store, the effects of commits here and at other members |
//! | [`config`], [`settings_files`], [`process_roles`] | settings: from the environment, from files, and which parts run in this process |
//! | [`logging`], [`metrics`], [`traces`] | log lines, metrics, spans |
//! | [`service_manager`], [`reload`], [`exit_status`] | systemd: notifications, `reload`, exit statuses |
//! | [`audit_command`], [`begin_incarnation_command`], [`config_command`], [`key_ring_command`], [`ledger_command`], [`migrate_command`], [`node_ca_command`], [`recover_report`], [`retention_command`], [`snapshot_seal_command`] | a command of `gpuaas` each |
//! | [`dev`], [`doctor`], [`support_bundle`], `as_the_service` | `gpuaas dev`, `doctor`, `support-bundle`; a command as the service's own user |
//! | `mutex` | mutexes that outlive a panic of their holder |

mod as_the_service;
pub mod audit_command;
pub mod begin_incarnation_command;
pub mod cluster;
pub mod cluster_keys;
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
pub mod workers;
