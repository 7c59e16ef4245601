//! Exponential backoff: the pause after a first failure doubles with each further one in a row, up to a longest pause. It has no jitter;
//! callers whose peers fail together add their own.

use chrono::TimeDelta;
use std::time::Duration;

/// A pause doubles this often at most, whatever the longest one is, so that no number of failures overflows.
const MAX_DOUBLINGS: u32 = 16;

/// The pause after this many failures in a row, in a process.
#[must_use]
pub fn pause(first: Duration, failures: u32, longest: Duration) -> Duration {
    first.saturating_mul(1_u32 << doublings(failures)).min(longest)
}

/// The pause after this many failures in a row, in the state of a machine.
#[must_use]
pub fn delay(first: TimeDelta, failures: u32, longest: TimeDelta) -> TimeDelta {
    first.checked_mul(1_i32 << doublings(failures)).unwrap_or(longest).min(longest)
}

fn doublings(failures: u32) -> u32 {
    failures.saturating_sub(1).min(MAX_DOUBLINGS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_doubles_with_each_failure_up_to_the_longest() {
        let (first, longest) = (Duration::from_millis(500), Duration::from_secs(10));
        let pauses = (1..=7).map(|failures| pause(first, failures, longest).as_millis());
        assert_eq!(pauses.collect::<Vec<_>>(), [500, 1000, 2000, 4000, 8000, 10_000, 10_000]);
        let (first, longest) = (TimeDelta::seconds(5), TimeDelta::seconds(900));
        let delays = (1..=9).map(|failures| delay(first, failures, longest).num_seconds());
        assert_eq!(delays.collect::<Vec<_>>(), [5, 10, 20, 40, 80, 160, 320, 640, 900]);
    }

    #[test]
    fn no_number_of_failures_overflows_and_none_is_the_first() {
        for failures in [17, 31, 32, 64, u32::MAX] {
            assert_eq!(pause(Duration::from_secs(1), failures, Duration::MAX), Duration::from_secs(65_536));
            assert_eq!(pause(Duration::MAX, failures, Duration::MAX), Duration::MAX);
            assert_eq!(delay(TimeDelta::seconds(1), failures, TimeDelta::MAX), TimeDelta::seconds(65_536));
            assert_eq!(delay(TimeDelta::MAX, failures, TimeDelta::days(1)), TimeDelta::days(1));
        }
        assert_eq!(pause(Duration::from_secs(1), 0, Duration::MAX), Duration::from_secs(1));
        assert_eq!(delay(TimeDelta::seconds(1), 0, TimeDelta::MAX), TimeDelta::seconds(1));
    }
}
