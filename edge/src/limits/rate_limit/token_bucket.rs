//! Token buckets by key, stored as the time at which each is full (the generic cell rate algorithm, ITU-T I.371). The number of stored keys
//! is bounded.

use dashmap::DashMap;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The least time between two searches for keys that need not be remembered.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// A rate: a burst after a pause, and one per interval in the long run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    pub(crate) burst: u32,
    pub(crate) interval: Duration,
}

/// See the module.
pub(crate) struct TokenBuckets<K> {
    rate: Rate,
    full_at: DashMap<K, Instant>,
    /// One bucket that is shared by the keys over the capacity.
    others_full_at: Mutex<Instant>,
    swept_at: Mutex<Instant>,
    capacity: usize,
}

impl<K: Eq + Hash> TokenBuckets<K> {
    pub(crate) fn new(rate: Rate, capacity: usize, now: Instant) -> Self {
        Self { rate, full_at: DashMap::new(), others_full_at: Mutex::new(now), swept_at: Mutex::new(now), capacity }
    }

    /// Takes one token for `key`.
    ///
    /// # Errors
    /// How long the key has to wait.
    pub(crate) fn take(&self, key: K, now: Instant) -> Result<(), Duration> {
        if let Some(mut full_at) = self.full_at.get_mut(&key) {
            return self.rate.take(&mut full_at, now);
        }
        if self.full_at.len() >= self.capacity {
            self.sweep(now);
        }
        if self.full_at.len() >= self.capacity {
            return self.rate.take(&mut self.others_full_at.lock().unwrap_or_else(PoisonError::into_inner), now);
        }
        self.rate.take(&mut self.full_at.entry(key).or_insert(now), now)
    }

    /// A full bucket holds no information that a new one would not.
    fn sweep(&self, now: Instant) {
        let Ok(mut swept_at) = self.swept_at.try_lock() else { return };
        if now.saturating_duration_since(*swept_at) >= SWEEP_INTERVAL {
            *swept_at = now;
            self.full_at.retain(|_, full_at| *full_at > now);
        }
    }
}

impl Rate {
    fn take(self, full_at: &mut Instant, now: Instant) -> Result<(), Duration> {
        let after = (*full_at).max(now) + self.interval;
        let empty_for = after.saturating_duration_since(now).saturating_sub(self.interval * self.burst);
        if empty_for.is_zero() {
            *full_at = after;
            Ok(())
        } else {
            Err(empty_for)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { burst: 240, interval: Duration::from_millis(50) };

    #[test]
    fn key_gets_its_burst_then_its_rate_independently_of_others() {
        let now = Instant::now();
        let buckets = TokenBuckets::new(RATE, 10, now);
        for _ in 0..RATE.burst {
            buckets.take(1, now).unwrap();
        }
        assert_eq!(buckets.take(1, now), Err(RATE.interval));
        buckets.take(2, now).unwrap();
        buckets.take(1, now + RATE.interval).unwrap();
        assert!(buckets.take(1, now + RATE.interval).is_err());
        let later = now + RATE.interval * (RATE.burst + 1);
        for _ in 0..RATE.burst {
            buckets.take(1, later).unwrap();
        }
    }

    #[test]
    fn keys_over_the_capacity_share_one_bucket() {
        let now = Instant::now();
        let buckets = TokenBuckets::new(RATE, 10, now);
        let admitted = (0..10_000).filter(|n| buckets.take(*n, now).is_ok()).count();
        assert_eq!(admitted, 10 + RATE.burst as usize);
        assert_eq!(buckets.full_at.len(), 10);
        let later = now + SWEEP_INTERVAL;
        buckets.take(70_000, later).unwrap();
        assert_eq!(buckets.full_at.len(), 1, "those that are idle were forgotten");
    }
}
