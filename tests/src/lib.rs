//! What the tests and benchmarks of the whole service share.

pub mod bench;
pub mod booted;
#[path = "../../agent/tests/not_run/mod.rs"]
pub mod not_run;
#[path = "../../agent/tests/machine/mod.rs"]
#[allow(clippy::unwrap_used)]
pub mod overlay;
pub mod world;
