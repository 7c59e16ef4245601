//! What passes from one process of the agent to the next one, so that a restart ends no session and loses no byte.
//!
//! Each session has four descriptors in the service manager's store ([`crate::service_manager`]), under one name: its terminal, a pipe, a
//! file in memory, and a socket to the process that holds its program ([`holder`]). The file has the session's [`record`] and its output
//! ([`output_log`]). Both are up to date at every moment: an agent that is killed leaves the same as one that is stopped.

mod holder;
mod output_log;
mod record;
mod stored_session;

pub use holder::{FLAG, hold};
pub(super) use holder::{HeldProgram, KILL_GRACE};
pub(super) use output_log::{OutputLog, OutputTail};
pub(super) use record::{CommitPoint, RecordFile, RecordingPoint, RecordingState};
pub(super) use stored_session::{Adopted, SessionStore};
