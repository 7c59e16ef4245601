//! The primitives of the hand-over. `shuttle_tests.rs` has those of shuttle under the same names.

pub(super) use dashmap::{DashMap as Map, Entry};
pub(super) use std::sync::Arc;
pub(super) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
