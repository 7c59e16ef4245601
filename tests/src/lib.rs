//! The common part of the tests and benchmarks of the whole service.

pub mod bench;
pub mod cluster;
#[path = "../../agent/tests/overlay/mod.rs"]
#[allow(clippy::unwrap_used)]
pub mod overlay;
#[path = "../../agent/tests/skipped/mod.rs"]
pub mod skipped;
pub mod systemd_container;
