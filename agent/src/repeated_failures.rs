//! A failure that lasts: it is logged when it begins and when its reason changes, and then once an hour.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often a failure that lasts is logged.
const LOG_INTERVAL: Duration = Duration::from_secs(3600);

/// The failures that last, by what fails.
#[derive(Debug)]
pub struct RepeatedFailures<K>(Mutex<BTreeMap<K, LoggedFailure>>);

#[derive(Debug)]
struct LoggedFailure {
    reason: String,
    logged_at: Instant,
}

impl<K> Default for RepeatedFailures<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Ord> RepeatedFailures<K> {
    /// Notes a failure. Returns whether it is to be logged.
    pub fn is_to_be_logged(&self, what: K, reason: &str) -> bool {
        self.is_to_be_logged_at(Instant::now(), what, reason)
    }

    fn is_to_be_logged_at(&self, now: Instant, what: K, reason: &str) -> bool {
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = |known: &LoggedFailure| {
            known.reason == reason && now.saturating_duration_since(known.logged_at) < LOG_INTERVAL
        };
        if failures.get(&what).is_some_and(is_known) {
            return false;
        }
        failures.insert(what, LoggedFailure { reason: reason.to_owned(), logged_at: now });
        true
    }

    /// Forgets the failures but those of what fails.
    pub fn retain(&self, fails: impl Fn(&K) -> bool) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|what, _| fails(what));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_is_logged_when_it_begins_when_its_reason_changes_and_once_an_hour() {
        let (failures, begun) = (RepeatedFailures::default(), Instant::now());
        let is_logged =
            |minutes: u64, reason| failures.is_to_be_logged_at(begun + Duration::from_secs(60 * minutes), "a", reason);
        assert!(is_logged(0, "lost") && !is_logged(1, "lost") && !is_logged(59, "lost"));
        assert!(is_logged(60, "lost") && !is_logged(61, "lost"));
        assert!(is_logged(62, "hung") && is_logged(63, "lost"));
        assert!(failures.is_to_be_logged_at(begun, "b", "lost"), "another one");
        failures.retain(|what| *what != "a");
        assert!(is_logged(64, "lost") && !failures.is_to_be_logged_at(begun, "b", "lost"));
    }
}
