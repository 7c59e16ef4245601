//! When a message without an acknowledgement is resent. A message may be lost, so it is resent long before the deadline of the state that
//! waits for it. The pauses double, so that a long wait costs little. The receiver handles a repeated message once.

use crate::time::Timestamp;
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};

/// The first pause. A message that was not lost has long had its effect by then.
pub const FIRST: TimeDelta = TimeDelta::seconds(10);

/// The longest pause.
pub const LONGEST: TimeDelta = TimeDelta::hours(1);

/// When a message is resent next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResendTimer {
    since: Timestamp,
    pub at: Timestamp,
}

impl ResendTimer {
    /// The timer of a new wait.
    #[must_use]
    pub fn first(now: Timestamp) -> Self {
        Self { since: now, at: now + FIRST }
    }

    /// The timer after a resend: it is due again when the wait has lasted as long once more.
    #[must_use]
    pub fn next(self, now: Timestamp) -> Self {
        Self { at: now + (now - self.since).clamp(FIRST, LONGEST), ..self }
    }

    /// When the wait began.
    #[must_use]
    pub const fn since(self) -> Timestamp {
        self.since
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
        let mut again = ResendTimer::first(begin);
        let mut published = Vec::new();
        for _ in 0..11 {
            published.push((again.at - begin).num_seconds());
            again = again.next(again.at);
        }
        assert_eq!(published, [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 8720]);
    }
}
