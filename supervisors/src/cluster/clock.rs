//! This member's clock, compared with Postgres' at every heartbeat, and the time that all members share by that.

use chrono::{TimeDelta, Utc};
use domain::Timestamp;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// An operator is warned of a clock that is further off. Deadlines, token lifetimes and windows of use are counted by these clocks.
pub const TOLERATED: Duration = Duration::from_secs(2);

/// A measurement through a slower round trip replaces an earlier one only where that is old.
const PRECISE: Duration = Duration::from_millis(500);
const OLD: Duration = Duration::from_secs(30);

/// How often the warning is repeated while the clock is off.
const WARNS_EVERY: Duration = Duration::from_secs(60);

/// A comparison of this member's clock with Postgres'.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offset {
    /// By how much this member's clock is ahead of Postgres'.
    pub ahead: TimeDelta,
    /// Half of the round trip: the true offset is at most this far from the measured one.
    pub within: Duration,
}

impl Offset {
    /// Whether the clock is certainly further off than [`TOLERATED`].
    #[must_use]
    pub fn is_too_far(self) -> bool {
        self.ahead.abs().to_std().unwrap_or_default().saturating_sub(self.within) > TOLERATED
    }
}

#[derive(Clone, Copy, Debug)]
struct Measured {
    offset: Offset,
    /// Postgres' time at `at`.
    shared: Timestamp,
    at: Instant,
}

/// The clock of one member. The shared time goes on by the monotonic clock: setting the machine's clock does not change it.
#[derive(Debug, Default)]
pub struct Clock {
    measured: Mutex<Option<Measured>>,
    warned_at: Mutex<Option<Instant>>,
}

impl Clock {
    /// Takes in that Postgres read its clock as `postgres` between `sent` and now.
    pub fn measure(&self, sent: Instant, postgres: Timestamp) {
        self.measure_at(sent, Instant::now(), Utc::now(), postgres);
    }

    fn measure_at(&self, sent: Instant, received: Instant, here: Timestamp, postgres: Timestamp) {
        let within = received.duration_since(sent) / 2;
        let offset = Offset { ahead: here - within - postgres, within };
        let mut measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        let better =
            |before: Measured| within * 2 <= PRECISE || within <= before.offset.within || before.at.elapsed() > OLD;
        if measured.is_none_or(better) {
            *measured = Some(Measured { offset, shared: postgres + within, at: received });
        }
    }

    /// `None` before the first heartbeat.
    #[must_use]
    pub fn offset(&self) -> Option<Offset> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner).map(|measured| measured.offset)
    }

    /// The time that all members share: Postgres', as it was measured last. `None` before the first heartbeat.
    #[must_use]
    pub fn shared(&self) -> Option<Timestamp> {
        let measured = (*self.measured.lock().unwrap_or_else(PoisonError::into_inner))?;
        Some(measured.shared + measured.at.elapsed())
    }

    /// Warns of a clock that is too far off, now and then.
    pub fn warn(&self) {
        let Some(offset) = self.offset().filter(|offset| offset.is_too_far()) else { return };
        let mut warned_at = self.warned_at.lock().unwrap_or_else(PoisonError::into_inner);
        if warned_at.is_none_or(|at| at.elapsed() >= WARNS_EVERY) {
            *warned_at = Some(Instant::now());
            tracing::warn!(
                offset_ms = offset.ahead.num_milliseconds(),
                "this member's clock is {:.1} s off Postgres' clock: check the time service of both machines",
                offset.ahead.as_seconds_f64()
            );
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    const ROUND_TRIP: Duration = Duration::from_secs(4);

    #[test]
    fn round_trip_is_taken_out_of_the_offset_and_bounds_its_error() {
        let (clock, sent) = (Clock::default(), Instant::now());
        // Postgres reads its clock in the middle of the round trip.
        clock.measure_at(sent, sent + ROUND_TRIP, at(34), at(2));
        let offset = clock.offset().unwrap();
        assert_eq!((offset.ahead, offset.within), (TimeDelta::seconds(30), ROUND_TRIP / 2));
        assert!(offset.is_too_far());
        let slow = Offset { ahead: TimeDelta::seconds(3), within: ROUND_TRIP / 2 };
        assert!(!slow.is_too_far(), "the round trip alone may explain it");
        assert!(Offset { ahead: TimeDelta::milliseconds(-2001), within: Duration::ZERO }.is_too_far());
    }

    #[test]
    fn slow_round_trip_does_not_replace_a_precise_measurement() {
        let (clock, sent) = (Clock::default(), Instant::now());
        clock.measure_at(sent, sent, at(1), at(1));
        clock.measure_at(sent, sent + ROUND_TRIP, at(9), at(1));
        assert_eq!(clock.offset().unwrap().ahead, TimeDelta::zero());
    }

    #[test]
    fn shared_time_follows_postgres_whatever_the_clock_here_shows() {
        let (clock, now) = (Clock::default(), Instant::now());
        assert_eq!(clock.shared(), None);
        clock.measure_at(now, now, at(3600), at(0));
        let shared = clock.shared().unwrap();
        assert!(shared >= at(0) && shared < at(60), "{shared}");
    }
}
