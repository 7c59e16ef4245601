//! Telemetry that all our processes share: the trace context of work, and log lines.

mod host;
mod log_lines;
mod trace;

pub use host::{HostFields, UnknownHostRole};
pub use log_lines::LogLines;
pub use trace::{Sampling, SpanContext};
