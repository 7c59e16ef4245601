//! The recording of a session, from the program's output to the control plane.
//!
//! Output is written to a spool on this machine before it is shown to the user ([`recorder`]), in numbered chunks ([`spool`]), and each
//! chunk is resent until the control plane has it ([`upload`]). So neither an unavailable control plane nor an agent that is killed loses
//! a byte that was shown; the next agent uploads what is left.

#[cfg(test)]
mod kill_tests;
mod recorder;
mod spool;
mod upload;

pub(super) use recorder::{Recorder, RecorderEvent};
pub use spool::Spools;
pub(super) use upload::Upload;
