//! Rate limits: the generic cell rate algorithm (ITU-T I.371), which admits a whole minute's quota at once and then one request whenever
//! its share of the minute has passed.
//!
//! The state is a level that drains, in integers: a request raises it by one minute of nanoseconds, and each nanosecond lowers it by the
//! limit. So nothing is rounded, whatever the limit, and after a change of the limit the cell stays valid.

use std::time::Duration;

/// The period of a limit.
pub const WINDOW: Duration = Duration::from_secs(60);
const WINDOW_NS: u64 = 60_000_000_000;

/// The highest limit: the level of a full cell is within 64 bits.
pub const MOST: u32 = 1_000_000;

/// The state of one caller's limit in one group of routes. Empty at first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateCell {
    level: u64,
    /// The time of the level, in nanoseconds of the owner's clock.
    at: u64,
}

/// A cell in transit from one owner to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellHandover {
    pub level: u64,
    /// The age of the level in nanoseconds.
    pub age: u64,
}

/// The decision on a request, and the remaining quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateDecision {
    pub admitted: bool,
    /// The number of requests that would be admitted at this moment.
    pub remaining: u32,
    /// The time until the whole quota is available.
    pub full_after: Duration,
    /// The time until the next request is admitted; zero where there is quota left.
    pub retry_after: Duration,
}

impl RateCell {
    /// Takes one request of `limit` a minute at `now`.
    #[must_use]
    pub fn take(&mut self, limit: u32, now: u64) -> RateDecision {
        let limit = u64::from(limit.clamp(1, MOST));
        let capacity = limit * WINDOW_NS;
        let drained = now.saturating_sub(self.at).saturating_mul(limit);
        // A cell that was filled under a higher limit is full, and not overfull.
        let level = self.level.saturating_sub(drained).min(capacity);
        let admitted = level + WINDOW_NS <= capacity;
        self.level = if admitted { level + WINDOW_NS } else { level };
        self.at = self.at.max(now);
        let missing = (self.level + WINDOW_NS).saturating_sub(capacity);
        RateDecision {
            admitted,
            remaining: u32::try_from((capacity - self.level) / WINDOW_NS).unwrap_or(MOST),
            full_after: Duration::from_nanos(self.level.div_ceil(limit)),
            retry_after: Duration::from_nanos(missing.div_ceil(limit)),
        }
    }

    /// The cell for another owner, whose clock differs; `None` where it is idle.
    #[must_use]
    pub const fn handover(&self, now: u64) -> Option<CellHandover> {
        if self.is_idle(now) {
            None
        } else {
            Some(CellHandover { level: self.level, age: now.saturating_sub(self.at) })
        }
    }

    /// Merges the state of another owner, unless more was taken here. A handover may arrive once, twice or late; no request is counted
    /// twice.
    pub fn merge(&mut self, handed: CellHandover, now: u64) {
        if handed.level > self.level {
            *self = Self { level: handed.level, at: now.saturating_sub(handed.age) };
        }
    }

    /// True where the cell equals a new one.
    #[must_use]
    pub const fn is_idle(&self, now: u64) -> bool {
        now.saturating_sub(self.at) >= WINDOW_NS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;

    fn admitted(cell: &mut RateCell, limit: u32, at: impl IntoIterator<Item = u64>) -> u64 {
        at.into_iter().map(|now| u64::from(cell.take(limit, now).admitted)).sum()
    }

    #[test]
    fn a_caller_has_the_burst_and_then_the_rate() {
        let mut cell = RateCell::default();
        assert_eq!(admitted(&mut cell, 120, [0; 200]), 120);
        let refused = cell.take(120, 0);
        assert_eq!((refused.admitted, refused.remaining), (false, 0));
        assert_eq!((refused.retry_after, refused.full_after), (Duration::from_millis(500), WINDOW));
        assert!(!cell.take(120, SECOND / 2 - 1).admitted);
        assert!(cell.take(120, SECOND / 2).admitted);
        // Five times the limit for ten seconds: two a second.
        assert_eq!(admitted(&mut cell, 120, (0..100).map(|n| SECOND / 2 + (n + 1) * SECOND / 10)), 20);
    }

    #[test]
    fn next_owner_merges_the_cell_and_counts_no_request_twice() {
        let (mut first, mut next) = (RateCell::default(), RateCell::default());
        assert_eq!(admitted(&mut first, 60, [1000 * SECOND; 50]), 50);
        // Four seconds later, by clocks that began at other times.
        let handed = first.handover(1004 * SECOND).unwrap();
        next.merge(handed, 70 * SECOND);
        next.merge(handed, 70 * SECOND);
        assert_eq!(admitted(&mut next, 60, [70 * SECOND; 50]), 14, "ten of the burst, four of the time");
        next.merge(handed, 71 * SECOND);
        assert_eq!(admitted(&mut next, 60, [71 * SECOND; 50]), 1, "what comes late changes nothing");
        assert_eq!(first.handover(1061 * SECOND), None, "an idle cell is not worth a word");
        next.merge(CellHandover { level: u64::MAX, age: u64::MAX }, 71 * SECOND);
        let (full, again) = (next.take(60, 200 * SECOND), next.take(60, 201 * SECOND));
        assert!(!full.admitted && again.admitted, "nonsense is a full cell, and no more than that");
    }

    #[test]
    fn changed_limit_applies_at_once_and_a_lower_one_still_admits() {
        let mut cell = RateCell::default();
        assert_eq!(admitted(&mut cell, MOST, [0; 1000]), 1000);
        let lowered = cell.take(60, 0);
        assert_eq!((lowered.admitted, lowered.retry_after), (false, Duration::from_secs(1)));
        assert_eq!(admitted(&mut cell, 120, [0; 100]), 60, "what the higher limit adds is there");
    }

    #[test]
    fn clock_set_back_admits_no_extra_requests() {
        let mut cell = RateCell::default();
        assert_eq!(admitted(&mut cell, 10, [5 * SECOND; 10]), 10);
        assert!(!cell.take(10, 0).admitted);
        assert!(cell.take(10, 11 * SECOND).admitted);
    }

    proptest! {
        /// A caller that always asks gets exactly burst + rate × time.
        #[test]
        fn under_a_steady_load_it_admits_exactly_burst_and_rate_times_time(
            limit in prop_oneof![1u32..2000, Just(999_983), Just(MOST)], millis in 0u64..3000
        ) {
            let mut cell = RateCell::default();
            let burst = admitted(&mut cell, limit, std::iter::repeat_n(0, limit as usize + 1));
            prop_assert_eq!(burst, u64::from(limit));
            let end = millis * 1_000_000;
            // At the very instants at which one more is due, and once more at the end.
            let due = (1..=end * u64::from(limit) / WINDOW_NS).map(|n| (n * WINDOW_NS).div_ceil(u64::from(limit)));
            let expected = end * u64::from(limit) / WINDOW_NS;
            prop_assert_eq!(admitted(&mut cell, limit, due), expected);
            prop_assert!(!cell.take(limit, end).admitted);
        }

        #[test]
        fn no_stretch_of_time_admits_more_than_burst_and_rate(
            limit in 1u32..50, pauses in prop::collection::vec(0u64..3 * SECOND, 1..300)
        ) {
            let (mut cell, mut now, mut taken) = (RateCell::default(), 0, Vec::new());
            for pause in pauses {
                now += pause;
                let verdict = cell.take(limit, now);
                prop_assert_eq!(verdict.admitted || verdict.retry_after > Duration::ZERO, true);
                if verdict.admitted {
                    taken.push(now);
                }
            }
            for (n, from) in taken.iter().enumerate() {
                for (m, until) in taken.iter().enumerate().skip(n) {
                    let admitted = (m - n + 1) as u64;
                    prop_assert!((admitted - 1) * WINDOW_NS <= u64::from(limit) * WINDOW_NS + (until - from) * u64::from(limit));
                }
            }
        }

        #[test]
        fn retry_after_is_when_the_next_is_admitted_and_not_before(limit in 1u32..1000, asked in 1usize..3000, at in 0u64..SECOND) {
            let mut cell = RateCell::default();
            admitted(&mut cell, limit, std::iter::repeat_n(at, asked));
            let mut probe = cell;
            let verdict = probe.take(limit, at);
            if !verdict.admitted {
                let wait = u64::try_from(verdict.retry_after.as_nanos()).unwrap();
                let (mut early, mut due) = (probe, probe);
                prop_assert!(!early.take(limit, at + wait - 1).admitted);
                prop_assert!(due.take(limit, at + wait).admitted);
            }
        }
    }
}
