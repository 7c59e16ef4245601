//! The pause after a failure: exponential, saturating, with full jitter.

use std::time::Duration;

/// Counts consecutive failures and turns them into pauses. The `n`-th pause is uniform between 0 and `base * 2^n`, never over `max`
/// ("full jitter"), so that agents that failed together do not retry together.
#[derive(Debug, Clone)]
pub struct Backoff {
    base: Duration,
    max: Duration,
    failures: u32,
}

impl Backoff {
    /// A backoff that starts at `base` and saturates at `max`.
    #[must_use]
    pub fn new(base: Duration, max: Duration) -> Self {
        Self { base, max, failures: 0 }
    }

    /// Changes the upper bound, as the control plane sets it.
    pub fn saturate_at(&mut self, max: Duration) {
        self.max = max;
    }

    /// The next failure starts from `base` again.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// The pause after one more failure. `chance` is uniform in `0.0..1.0`. A server's `Retry-After` is the lower bound, with jitter
    /// added.
    pub fn next(&mut self, chance: f64, retry_after: Option<Duration>) -> Duration {
        let ceiling = self.base.saturating_mul(1_u32.checked_shl(self.failures).unwrap_or(u32::MAX)).min(self.max);
        self.failures = self.failures.saturating_add(1);
        let jitter = ceiling.mul_f64(chance.clamp(0.0, 1.0));
        retry_after.map_or(jitter, |least| least.saturating_add(jitter))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BASE: Duration = Duration::from_millis(500);
    const MAX: Duration = Duration::from_secs(30);

    #[test]
    fn the_ceiling_doubles_and_then_stays() {
        let mut backoff = Backoff::new(BASE, MAX);
        let ceilings: Vec<u128> = (0..8).map(|_| backoff.next(1.0, None).as_millis()).collect();
        assert_eq!(ceilings, [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000]);
        backoff.reset();
        assert_eq!(backoff.next(1.0, None), BASE);
    }

    proptest! {
        #[test]
        fn no_number_of_failures_overflows(failures in any::<u32>(), chance in 0.0..1.0_f64) {
            let mut backoff = Backoff { failures, ..Backoff::new(BASE, MAX) };
            prop_assert!(backoff.next(chance, None) <= MAX);
            prop_assert!(backoff.next(chance, None) <= MAX);
        }

        #[test]
        fn pause_is_never_shorter_than_retry_after(chance in 0.0..1.0_f64, seconds in 0..3600_u64) {
            let least = Duration::from_secs(seconds);
            prop_assert!(Backoff::new(BASE, MAX).next(chance, Some(least)) >= least);
        }
    }
}
