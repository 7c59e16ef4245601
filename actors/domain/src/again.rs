//! When a wait speaks up again. What was said may have been lost on its way; it is said again long before the end that the state must
//! not outlive, and more and more seldom, so that a long wait costs little. Whoever hears it twice does nothing twice.

use crate::machine::Timestamp;
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};

/// The first time. What was not lost has long had its effect by then.
pub const FIRST: TimeDelta = TimeDelta::seconds(10);

/// Never more seldom than that.
pub const LONGEST: TimeDelta = TimeDelta::hours(1);

/// The next time that something is said again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Again {
    since: Timestamp,
    pub at: Timestamp,
}

impl Again {
    /// The wait begins.
    #[must_use]
    pub fn first(now: Timestamp) -> Self {
        Self { since: now, at: now + FIRST }
    }

    /// It was said again: next when the wait has lasted as long once more.
    #[must_use]
    pub fn next(self, now: Timestamp) -> Self {
        Self { at: now + (now - self.since).clamp(FIRST, LONGEST), ..self }
    }

    #[must_use]
    pub fn is_due(self, now: Timestamp) -> bool {
        now >= self.at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pauses_double_up_to_the_longest() {
        let begin = Timestamp::UNIX_EPOCH;
        let mut again = Again::first(begin);
        let mut said = Vec::new();
        for _ in 0..11 {
            said.push((again.at - begin).num_seconds());
            again = again.next(again.at);
        }
        assert_eq!(said, [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 8720]);
    }
}
