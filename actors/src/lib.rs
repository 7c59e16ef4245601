//! The shell that hosts every state machine.
//!
//! [`entity_shell`] is the protocol (load, decide, commit, outcomes, dispatch, passivation) as a synchronous state machine. [`entity`] is the
//! ractor actor that hosts it. [`entity_host`] holds the entities of the shards that this process owns, with a bound in front of every
//! mailbox. [`directory`] finds an entity on any member. What the shell requires of its environment are the traits of [`shell_dependencies`].

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
