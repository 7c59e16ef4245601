//! Limits of what callers may use: rates, connections, and memory for bodies.

pub(crate) mod body_admission;
pub mod connection_quota;
pub mod rate_limit;
