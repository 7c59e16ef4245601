//! The common part of the tests and benchmarks of the whole service.

pub mod bench;
pub mod cluster;
pub mod faulty_registry;
#[path = "../../agent/tests/overlay/mod.rs"]
#[allow(clippy::unwrap_used)]
pub mod overlay;
pub mod package_registry;
#[path = "../../agent/tests/skipped/mod.rs"]
pub mod skipped;
pub mod systemd_container;
