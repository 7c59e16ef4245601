//! Mutexes that outlive a panic of their holder.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks the mutex, also where a holder has panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
