//! The one shell that hosts every machine.
//!
//! [`shell`] is the protocol (load, decide, commit, its outcomes, dispatch, sleep) as a synchronous machine; [`entity`] is the ractor
//! actor that hosts it; [`host`] keeps the entities of the shards that this process owns, with a bound in front of every mailbox; and
//! [`directory`] finds an entity wherever it lives. What the shell needs of the world stands in [`ports`].

pub mod ask;
pub mod cells;
pub mod directory;
mod entity;
pub mod host;
pub mod place;
pub mod places;
pub mod ports;
pub mod shell;
#[cfg(test)]
mod testing;
mod watch;

pub use ask::{Answer, Answered, AskError, Asked, CommandKey};
pub use directory::Directory;
pub use host::{Host, HostConfig};
pub use watch::Watch;
