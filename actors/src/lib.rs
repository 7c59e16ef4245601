//! The shell that hosts every state machine.
//!
//! | module | what |
//! | --- | --- |
//! | [`entity_shell`] | the protocol as a synchronous state machine: load, decide, commit, outcomes, dispatch, passivation |
//! | `entity` | the ractor actor that hosts it |
//! | [`entity_host`] | the entities of the shards that this process owns, with a bound in front of every mailbox |
//! | [`directory`] | finds an entity on any member |
//! | [`command_context`] | who asks, until when, and what is answered |
//! | [`shell_dependencies`] | what the shell requires of its environment, as traits |
//! | [`sharding`] | the shard of an id, and ids that derive from names |
//! | [`connection_quota`], [`rate_cells`] | quotas of callers, in memory, at the owner of their shard |
//! | `entity_watch`, `recent_changes`, `changed_nodes` | wakes for those who read what has changed |

mod changed_nodes;
pub mod command_context;
pub mod connection_quota;
pub mod directory;
mod entity;
pub mod entity_host;
pub mod entity_shell;
mod entity_watch;
pub mod rate_cells;
mod recent_changes;
pub mod sharding;
pub mod shell_dependencies;
#[cfg(test)]
mod testing;

pub use changed_nodes::{ChangedNodeSet, ChangedNodes};
pub use command_context::{AskError, AskResult, CommandContext, CommandKey, CommandReply};
pub use directory::Directory;
pub use entity_host::{Host, HostConfig};
pub use entity_watch::EntityWatch;
pub use recent_changes::{ChangedEntities, RecentChanges};
