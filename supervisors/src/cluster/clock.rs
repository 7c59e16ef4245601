//! This member's clock, compared with Postgres' at every heartbeat, and the shared time that follows from it.

use chrono::{TimeDelta, Utc};
use domain::Timestamp;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// The offset above which the operator is warned. Deadlines, token lifetimes and accrual windows are counted by these clocks.
pub const MAX_OFFSET: Duration = Duration::from_secs(2);

/// A measurement with a slower round trip replaces an earlier one only where that is stale.
const PRECISE_ROUND_TRIP: Duration = Duration::from_millis(500);
const STALE_AFTER: Duration = Duration::from_secs(30);

/// How often the warning is repeated while the clock is off.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// The measured offset of this member's clock from Postgres'.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockOffset {
    /// By how much this member's clock is ahead of Postgres'.
    pub ahead: TimeDelta,
    /// Half of the round trip: the true offset is at most this far from the measured one.
    pub within: Duration,
}

impl ClockOffset {
    /// Whether the clock is certainly off by more than [`MAX_OFFSET`].
    #[must_use]
    pub fn exceeds_tolerance(self) -> bool {
        self.ahead.abs().to_std().unwrap_or_default().saturating_sub(self.within) > MAX_OFFSET
    }
}

#[derive(Clone, Copy, Debug)]
struct Measurement {
    offset: ClockOffset,
    /// Postgres' time at `at`.
    shared: Timestamp,
    at: Instant,
}

/// The clock of one member. The shared time advances with the monotonic clock: setting the machine's clock does not change it.
#[derive(Debug, Default)]
pub struct MemberClock {
    measured: Mutex<Option<Measurement>>,
    first_measured: Notify,
    warned_at: Mutex<Option<Instant>>,
}

impl MemberClock {
    /// Records that Postgres read its clock as `postgres` between `sent` and now.
    pub fn measure(&self, sent: Instant, postgres: Timestamp) {
        self.measure_at(sent, Instant::now(), Utc::now(), postgres);
    }

    fn measure_at(&self, sent: Instant, received: Instant, local: Timestamp, postgres: Timestamp) {
        let within = received.duration_since(sent) / 2;
        let offset = ClockOffset { ahead: local - within - postgres, within };
        let mut measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        let better = |before: Measurement| {
            within * 2 <= PRECISE_ROUND_TRIP || within <= before.offset.within || before.at.elapsed() > STALE_AFTER
        };
        if measured.is_none_or(better) {
            *measured = Some(Measurement { offset, shared: postgres + within, at: received });
            self.first_measured.notify_waiters();
        }
    }

    /// Waits for the first heartbeat, from which on the shared time is known.
    pub async fn first_measurement(&self) {
        let first = self.first_measured.notified();
        if self.shared().is_none() {
            first.await;
        }
    }

    /// `None` before the first heartbeat.
    #[must_use]
    pub fn offset(&self) -> Option<ClockOffset> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner).map(|measured| measured.offset)
    }

    /// The time that all members share: Postgres' clock, as last measured. `None` before the first heartbeat.
    #[must_use]
    pub fn shared(&self) -> Option<Timestamp> {
        let measured = (*self.measured.lock().unwrap_or_else(PoisonError::into_inner))?;
        Some(measured.shared + measured.at.elapsed())
    }

    /// Warns of a clock that is too far off, at most once a minute.
    pub fn warn(&self) {
        let Some(offset) = self.offset().filter(|offset| offset.exceeds_tolerance()) else { return };
        let mut warned_at = self.warned_at.lock().unwrap_or_else(PoisonError::into_inner);
        if warned_at.is_none_or(|at| at.elapsed() >= WARN_INTERVAL) {
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
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    const ROUND_TRIP: Duration = Duration::from_secs(4);

    #[test]
    fn round_trip_is_subtracted_from_the_offset_and_bounds_its_error() {
        let (clock, sent) = (MemberClock::default(), Instant::now());
        // Postgres reads its clock in the middle of the round trip.
        clock.measure_at(sent, sent + ROUND_TRIP, at(34), at(2));
        let offset = clock.offset().unwrap();
        assert_eq!((offset.ahead, offset.within), (TimeDelta::seconds(30), ROUND_TRIP / 2));
        assert!(offset.exceeds_tolerance());
        let slow = ClockOffset { ahead: TimeDelta::seconds(3), within: ROUND_TRIP / 2 };
        assert!(!slow.exceeds_tolerance(), "the round trip alone may explain it");
        assert!(ClockOffset { ahead: TimeDelta::milliseconds(-2001), within: Duration::ZERO }.exceeds_tolerance());
    }

    #[test]
    fn slow_round_trip_does_not_replace_a_precise_measurement() {
        let (clock, sent) = (MemberClock::default(), Instant::now());
        clock.measure_at(sent, sent, at(1), at(1));
        clock.measure_at(sent, sent + ROUND_TRIP, at(9), at(1));
        assert_eq!(clock.offset().unwrap().ahead, TimeDelta::zero());
    }

    #[tokio::test]
    async fn first_measurement_ends_the_wait_for_the_shared_time() {
        let (clock, sent) = (MemberClock::default(), Instant::now());
        let (waited, ()) =
            tokio::join!(tokio::time::timeout(Duration::from_secs(60), clock.first_measurement()), async {
                clock.measure_at(sent, sent, at(1), at(1));
            });
        waited.unwrap();
        clock.first_measurement().await;
    }

    #[test]
    fn shared_time_follows_postgres_and_not_the_local_clock() {
        let (clock, now) = (MemberClock::default(), Instant::now());
        assert_eq!(clock.shared(), None);
        clock.measure_at(now, now, at(3600), at(0));
        let shared = clock.shared().unwrap();
        assert!(shared >= at(0) && shared < at(60), "{shared}");
    }
}
