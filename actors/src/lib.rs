//! The shell that hosts every state machine.
//!
//! [`shell`] is the protocol (load, decide, commit, outcomes, dispatch, passivation) as a synchronous state machine. [`entity`] is the
//! ractor actor that hosts it. [`host`] holds the entities of the shards that this process owns, with a bound in front of every
//! mailbox. [`directory`] finds an entity on any member. What the shell requires of its environment are the traits of [`ports`].

pub mod ask;
pub mod connection_quota;
pub mod directory;
mod entity;
pub mod host;
pub mod ports;
pub mod rate_cells;
pub mod sharding;
pub mod shell;
#[cfg(test)]
mod testing;
mod watch;

pub use ask::{AskError, AskResult, CommandContext, CommandKey, CommandReply};
pub use directory::Directory;
pub use host::{Host, HostConfig};
pub use watch::EntityWatch;
