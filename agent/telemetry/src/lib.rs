//! What every process of ours says of itself in the same way: the trace that work belongs to, and lines of log.

mod host;
mod lines;
mod trace;

pub use host::{HostFields, UnknownHostRole};
pub use lines::Lines;
pub use trace::{Sampling, Trace};
