//! Telemetry that all our processes share: the trace context of work, log lines, and diagnoses.

pub mod diagnosis;
mod host;
mod log_lines;
mod trace;

pub use host::{HostFields, UnknownHostRole};
pub use log_lines::LogLines;
pub use trace::{Sampling, SpanContext};
