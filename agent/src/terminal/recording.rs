//! The recording of a session, from the program's words to the control plane.
//!
//! What the program says is written to a spool on this machine before anybody sees it ([`recorder`]), in chunks that are counted
//! ([`spool`]), and each chunk is sent until the control plane has it ([`upload`]). So neither a control plane that is away nor an agent that
//! is killed costs a byte that was shown; the next agent sends what is left.

mod recorder;
mod spool;
mod upload;

pub(super) use recorder::{Came, Recorder};
pub use spool::Spools;
pub(super) use upload::Upload;
