//! Telemetry that all our processes share: the trace context of work, and log lines.

mod host;
mod lines;
mod trace;

pub use host::{HostFields, UnknownHostRole};
pub use lines::LogLines;
pub use trace::{Sampling, SpanContext};
