//! What the tests and benchmarks of the whole service share.

pub mod bench;
pub mod world;
