//! How many requests a minute: the generic cell rate algorithm (ITU-T I.371), which admits a whole minute's quota at once and then one
//! request whenever its share of the minute has passed.
//!
//! It is kept as a level that drains, in whole numbers: a request raises it by one minute of nanoseconds, and each nanosecond lowers it
//! by the limit. So nothing is rounded, whatever the limit, and a limit that changes finds its cell as it is.

use std::time::Duration;

/// What a limit counts.
pub const WINDOW: Duration = Duration::from_secs(60);
const WINDOW_NS: u64 = 60_000_000_000;

/// The highest limit: the level of a full cell is within 64 bits.
pub const MOST: u32 = 1_000_000;

/// One caller's standing in one group of routes. Empty at first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    level: u64,
    /// When the level was so, in nanoseconds of its keeper's clock.
    at: u64,
}

/// A cell on its way from one keeper to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handed {
    pub level: u64,
    /// Nanoseconds since the level was so.
    pub age: u64,
}

/// What became of a request, and what the caller may hope for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub admitted: bool,
    /// Requests that would be admitted at this moment.
    pub remaining: u32,
    /// Until the whole quota is there again.
    pub full_after: Duration,
    /// Until the next request is admitted; zero where there is quota left.
    pub retry_after: Duration,
}

impl Cell {
    /// Takes one request of `limit` a minute at `now`.
    #[must_use]
    pub fn take(&mut self, limit: u32, now: u64) -> Verdict {
        let limit = u64::from(limit.clamp(1, MOST));
        let capacity = limit * WINDOW_NS;
        let drained = now.saturating_sub(self.at).saturating_mul(limit);
        // A cell that was filled under a higher limit is full, and not overfull.
        let level = self.level.saturating_sub(drained).min(capacity);
        let admitted = level + WINDOW_NS <= capacity;
        self.level = if admitted { level + WINDOW_NS } else { level };
        self.at = self.at.max(now);
        let missing = (self.level + WINDOW_NS).saturating_sub(capacity);
        Verdict {
            admitted,
            remaining: u32::try_from((capacity - self.level) / WINDOW_NS).unwrap_or(MOST),
            full_after: Duration::from_nanos(self.level.div_ceil(limit)),
            retry_after: Duration::from_nanos(missing.div_ceil(limit)),
        }
    }

    /// The cell as it goes to another keeper, whose clock is another one; `None` where it says nothing.
    #[must_use]
    pub const fn handed(&self, now: u64) -> Option<Handed> {
        if self.is_idle(now) { None } else { Some(Handed { level: self.level, age: now.saturating_sub(self.at) }) }
    }

    /// Goes on from where another keeper was, unless more was taken here. What was taken elsewhere comes once or twice or late; it is
    /// never counted twice.
    pub fn go_on_from(&mut self, handed: Handed, now: u64) {
        if handed.level > self.level {
            *self = Self { level: handed.level, at: now.saturating_sub(handed.age) };
        }
    }

    /// True where the cell says no more than a new one would.
    #[must_use]
    pub const fn is_idle(&self, now: u64) -> bool {
        now.saturating_sub(self.at) >= WINDOW_NS
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;

    fn admitted(cell: &mut Cell, limit: u32, at: impl IntoIterator<Item = u64>) -> u64 {
        at.into_iter().map(|now| u64::from(cell.take(limit, now).admitted)).sum()
    }

    #[test]
    fn a_caller_has_the_burst_and_then_the_rate() {
        let mut cell = Cell::default();
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
    fn another_keeper_goes_on_where_the_one_before_was_and_counts_nothing_twice() {
        let (mut first, mut next) = (Cell::default(), Cell::default());
        assert_eq!(admitted(&mut first, 60, [1000 * SECOND; 50]), 50);
        // Four seconds later, by clocks that began at other times.
        let handed = first.handed(1004 * SECOND).unwrap();
        next.go_on_from(handed, 70 * SECOND);
        next.go_on_from(handed, 70 * SECOND);
        assert_eq!(admitted(&mut next, 60, [70 * SECOND; 50]), 14, "ten of the burst, four of the time");
        next.go_on_from(handed, 71 * SECOND);
        assert_eq!(admitted(&mut next, 60, [71 * SECOND; 50]), 1, "what comes late changes nothing");
        assert_eq!(first.handed(1061 * SECOND), None, "an idle cell is not worth a word");
        next.go_on_from(Handed { level: u64::MAX, age: u64::MAX }, 71 * SECOND);
        let (full, again) = (next.take(60, 200 * SECOND), next.take(60, 201 * SECOND));
        assert!(!full.admitted && again.admitted, "nonsense is a full cell, and no more than that");
    }

    #[test]
    fn a_new_limit_holds_at_once_and_a_lower_one_locks_nobody_out() {
        let mut cell = Cell::default();
        assert_eq!(admitted(&mut cell, MOST, [0; 1000]), 1000);
        let lowered = cell.take(60, 0);
        assert_eq!((lowered.admitted, lowered.retry_after), (false, Duration::from_secs(1)));
        assert_eq!(admitted(&mut cell, 120, [0; 100]), 60, "what the higher limit adds is there");
    }

    #[test]
    fn a_clock_that_goes_back_gives_nothing_away() {
        let mut cell = Cell::default();
        assert_eq!(admitted(&mut cell, 10, [5 * SECOND; 10]), 10);
        assert!(!cell.take(10, 0).admitted);
        assert!(cell.take(10, 11 * SECOND).admitted);
    }

    proptest! {
        /// Whoever always asks gets burst + rate × time, to the request.
        #[test]
        fn under_a_steady_load_it_admits_exactly_burst_and_rate_times_time(
            limit in prop_oneof![1u32..2000, Just(999_983), Just(MOST)], millis in 0u64..3000
        ) {
            let mut cell = Cell::default();
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
            let (mut cell, mut now, mut taken) = (Cell::default(), 0, Vec::new());
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
            let mut cell = Cell::default();
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
