//! The common part of the tests and benchmarks of the whole service.

pub mod bench;
pub mod cluster;
pub mod faulty_registry;
#[path = "../../agent/tests/overlay_machine/mod.rs"]
#[allow(clippy::unwrap_used)]
pub mod overlay_machine;
pub mod package_registry;
#[path = "../../agent/tests/skipped_tests/mod.rs"]
pub mod skipped_tests;
pub mod systemd_container;
