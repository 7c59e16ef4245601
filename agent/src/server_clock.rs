//! The control plane's time, as this node knows it.
//!
//! Certificates, tasks, sessions and tokens are valid by the control plane's time, not by the machine's clock, which may be wrong by years and
//! may be set while the agent runs. Each answer of the control plane has a time; between answers the kernel's clock since boot counts on, which
//! no program can set and which counts suspended time.
//!
//! ```text
//! an answer ----> known ----> stored in the state folder: known again when the agent is restarted in the same boot
//! another boot, no answer yet ----> unknown: the machine's clock, or the last stored time if that is later
//! ```

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use rustix::time::{ClockId, clock_gettime};
use rustls::pki_types::UnixTime;
use rustls::time_provider::TimeProvider;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::{info, warn};
use uuid::Uuid;

use crate::atomic_file::{self, FileError};
use crate::bounded_reading::{BoundedReading, WAIT};
use crate::chain;

/// A machine's clock that differs more is wrong.
const TOLERANCE: TimeDelta = TimeDelta::seconds(10);
/// By how much the kernel's clock since boot may gain or lose in a day.
const DRIFT_PER_DAY: TimeDelta = TimeDelta::seconds(10);
/// The time stands still for this long rather than going back.
const LONGEST_PAUSE: TimeDelta = TimeDelta::seconds(5);
/// How often the time is stored. Another boot begins with it.
const STORE_INTERVAL: Duration = Duration::from_secs(3600);
/// How often a waiting task looks at the time: it does not count suspended time.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);
const FILE: &str = "server_time.json";

/// A moment by the two clocks of the machine.
#[derive(Debug, Clone, Copy)]
pub struct ClockReading {
    /// Which anybody may have set.
    pub local: DateTime<Utc>,
    /// Suspended time included.
    pub since_boot: Duration,
}

impl ClockReading {
    /// The clocks at this moment.
    #[must_use]
    pub fn take() -> Self {
        Self { local: Utc::now(), since_boot: since_boot() }
    }
}

/// The time since the machine was booted, suspended time included.
#[must_use]
pub fn since_boot() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Bounds of the control plane's time at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeBounds {
    pub earliest: DateTime<Utc>,
    pub latest: DateTime<Utc>,
}

impl TimeBounds {
    /// At the arrival of an answer that has the time `sent` in steps of `step`: it was read during the round trip.
    #[must_use]
    pub fn at_arrival(sent: DateTime<Utc>, step: Duration, round_trip: Duration) -> Self {
        Self { earliest: sent, latest: later(sent, step.saturating_add(round_trip)) }
    }

    fn middle(self) -> DateTime<Utc> {
        self.earliest + (self.latest - self.earliest) / 2
    }

    /// So much later, with the drift of that time.
    fn after(self, passed: Duration) -> Self {
        let drift = DRIFT_PER_DAY.as_seconds_f64() / 86_400.0 * passed.as_secs_f64();
        let drift = Duration::try_from_secs_f64(drift).unwrap_or_default();
        Self {
            earliest: later(self.earliest, passed.saturating_sub(drift)),
            latest: later(self.latest, passed + drift),
        }
    }

    /// What both allow; `None` if they contradict each other.
    fn intersection(self, other: Self) -> Option<Self> {
        let (earliest, latest) = (self.earliest.max(other.earliest), self.latest.min(other.latest));
        (earliest <= latest).then_some(Self { earliest, latest })
    }
}

fn later(time: DateTime<Utc>, by: Duration) -> DateTime<Utc> {
    TimeDelta::from_std(by).ok().and_then(|by| time.checked_add_signed(by)).unwrap_or(DateTime::<Utc>::MAX_UTC)
}

/// Where a time of the control plane comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TimeSource {
    /// The header `Date`, which a proxy in between may have written by its own clock.
    Header,
    /// The control plane's message.
    Message,
}

/// The control plane's time as a function of the machine's clocks. Pure.
#[derive(Debug, Clone, Default)]
struct ServerTime {
    /// The bounds at a time since boot.
    known: Option<(TimeBounds, Duration)>,
    has_message: bool,
    /// The last time of an earlier boot or of this one's beginning; the time is not earlier.
    earliest: Option<DateTime<Utc>>,
}

impl ServerTime {
    fn bounds(&self, at: Duration) -> Option<TimeBounds> {
        self.known.map(|(bounds, since)| bounds.after(at.saturating_sub(since)))
    }

    fn now(&self, at: ClockReading) -> DateTime<Utc> {
        match self.bounds(at.since_boot) {
            Some(bounds) => bounds.middle(),
            None => self.earliest.map_or(at.local, |earliest| earliest.max(at.local)),
        }
    }

    /// Takes an answer's time over. Bounds that contradict the earlier ones replace them: the control plane's clock was set, or its replicas
    /// differ. A `Date` counts until there is a message.
    fn learn(&mut self, bounds: TimeBounds, source: TimeSource, at: Duration) {
        if source == TimeSource::Header && self.has_message {
            return;
        }
        // A proxy's time says nothing about that of a message.
        let before = if source == TimeSource::Message && !self.has_message { None } else { self.bounds(at) };
        self.has_message = source == TimeSource::Message;
        self.known = Some((before.and_then(|before| before.intersection(bounds)).unwrap_or(bounds), at));
    }

    /// Replaces what is known.
    fn adopt(&mut self, bounds: TimeBounds, at: Duration) {
        (self.known, self.has_message) = (Some((bounds, at)), false);
    }

    /// How far the machine's clock is ahead, if that is certainly more than `tolerance`.
    fn offset(&self, at: ClockReading, tolerance: TimeDelta) -> Option<TimeDelta> {
        let bounds = self.bounds(at.since_boot)?;
        let certain = (at.local - bounds.latest).max(bounds.earliest - at.local);
        (certain > tolerance).then(|| at.local - bounds.middle())
    }
}

/// As stored.
#[derive(Debug, Serialize, Deserialize)]
struct StoredTime {
    /// The bounds at that time since boot.
    earliest: DateTime<Utc>,
    latest: DateTime<Utc>,
    boot_id: Uuid,
    since_boot_ms: u64,
}

/// The control plane's time, shared by all parts of a process. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ServerClock(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// `None`: nothing is stored.
    file: Option<(PathBuf, Uuid)>,
    state: Mutex<State>,
    /// The state folder may not answer.
    storing: Mutex<BoundedReading<()>>,
    is_known: watch::Sender<bool>,
    correcting: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct State {
    time: ServerTime,
    /// The last time that was read.
    last: Option<DateTime<Utc>>,
    /// When the last answer was, since boot.
    learned_at: Option<Duration>,
    /// When the time was stored, since boot, and whether it was a message's.
    stored: Option<(Duration, bool)>,
    is_off: bool,
}

impl State {
    fn is_store_due(&self, at: Duration) -> bool {
        self.stored.is_none_or(|(stored_at, was_message)| {
            at.saturating_sub(stored_at) >= STORE_INTERVAL || (self.time.has_message && !was_message)
        })
    }
}

impl ServerClock {
    /// The clock of the node's agent, which stores the time in its state folder.
    #[must_use]
    pub fn open(state_dir: &Path, node_id: Uuid, boot_id: Uuid) -> Self {
        let path = state_dir.join(FILE);
        Self::of(read(&path, node_id, Some(boot_id)), Some((path, boot_id)))
    }

    /// The clock of another process of the node, which stores nothing.
    #[must_use]
    pub fn peek(state_dir: &Path, node_id: Uuid) -> Self {
        Self::of(read(&state_dir.join(FILE), node_id, boot_id().ok()), None)
    }

    /// A clock without a stored time.
    #[must_use]
    pub fn unknown() -> Self {
        Self::of(ServerTime::default(), None)
    }

    fn of(time: ServerTime, file: Option<(PathBuf, Uuid)>) -> Self {
        let is_known = watch::Sender::new(time.known.is_some());
        let state = State { time, last: None, learned_at: None, stored: None, is_off: false };
        let storing = Mutex::new(BoundedReading::of("the stored time of the control plane"));
        let correcting = tokio::sync::Mutex::default();
        Self(Arc::new(Shared { file, state: Mutex::new(state), storing, is_known, correcting }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time by the control plane; an estimate until it is known.
    #[must_use]
    pub fn now(&self) -> DateTime<Utc> {
        let mut state = self.state();
        let now = state.time.now(ClockReading::take());
        // A better measurement takes the time back by a moment; events stay in their order.
        let now = state.last.filter(|last| *last > now && *last - now <= LONGEST_PAUSE).unwrap_or(now);
        state.last = Some(now);
        now
    }

    /// The time by the control plane, once it is known.
    #[must_use]
    pub fn known_now(&self) -> Option<DateTime<Utc>> {
        self.is_known().then(|| self.now())
    }

    /// Whether the control plane has answered in this boot.
    #[must_use]
    pub fn is_known(&self) -> bool {
        *self.0.is_known.borrow()
    }

    /// Resolves once the time is known.
    pub async fn wait_until_known(&self) {
        if self.0.is_known.subscribe().wait_for(|is_known| *is_known).await.is_err() {
            // The sender lives as long as `self`.
            std::future::pending::<()>().await;
        }
    }

    /// Resolves at that time by the control plane.
    pub async fn sleep_until(&self, at: DateTime<Utc>) {
        self.wait_until_known().await;
        while let Some(left) = (at - self.now()).to_std().ok().filter(|left| !left.is_zero()) {
            tokio::time::sleep(left.min(LOOK_INTERVAL)).await;
        }
    }

    /// How far the machine's clock is ahead of the control plane's, if it is wrong.
    #[must_use]
    pub fn offset(&self) -> Option<TimeDelta> {
        let state = self.state();
        state.is_off.then(|| state.time.offset(ClockReading::take(), TimeDelta::zero())).flatten()
    }

    /// Takes over the time in a message of the control plane. `requested_at` is the [`since_boot`] of the request.
    pub fn learn(&self, server_time: DateTime<Utc>, requested_at: Duration) {
        let at = ClockReading::take();
        let bounds = TimeBounds::at_arrival(server_time, Duration::ZERO, at.since_boot.saturating_sub(requested_at));
        self.update(at, |time| time.learn(bounds, TimeSource::Message, at.since_boot));
    }

    /// Takes over the time in the header `Date` of an answer.
    pub(crate) fn learn_date(&self, bounds: TimeBounds) {
        let at = ClockReading::take();
        self.update(at, |time| time.learn(bounds, TimeSource::Header, at.since_boot));
    }

    /// Replaces a time by which the control plane's certificate was not valid.
    pub(crate) fn adopt(&self, bounds: TimeBounds, at: ClockReading) {
        self.update(at, |time| time.adopt(bounds, at.since_boot));
    }

    /// The time that no answer of an expired certificate may be before: an old key of the control plane cannot set this node back.
    pub(crate) fn earliest(&self) -> Option<DateTime<Utc>> {
        let state = self.state();
        state.time.bounds(since_boot()).map(|bounds| bounds.earliest).or(state.time.earliest)
    }

    /// Whether an answer has come since then.
    pub(crate) fn has_learned_since(&self, since_boot: Duration) -> bool {
        self.state().learned_at.is_some_and(|at| at > since_boot)
    }

    /// Held by the one request that corrects the clock.
    pub(crate) async fn correction(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.0.correcting.lock().await
    }

    fn update(&self, at: ClockReading, change: impl FnOnce(&mut ServerTime)) {
        let mut state = self.state();
        let before = state.time.bounds(at.since_boot).map(TimeBounds::middle);
        change(&mut state.time);
        let was_set = before.is_some_and(|before| (state.time.now(at) - before).abs() > TOLERANCE);
        state.learned_at = Some(at.since_boot);
        if before.is_none() {
            state.last = None;
        }
        log_offset(&mut state, at);
        let stored = if was_set || state.is_store_due(at.since_boot) { state.time.known } else { None };
        if stored.is_some() {
            state.stored = Some((at.since_boot, state.time.has_message));
        }
        drop(state);
        if let (Some((bounds, since_boot)), Some((path, boot_id))) = (stored, self.0.file.clone()) {
            let mut storing = self.0.storing.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = storing.read_within(WAIT, move || store(&path, boot_id, bounds, since_boot));
        }
        self.0.is_known.send_if_modified(|is_known| !std::mem::replace(is_known, true));
    }
}

/// The time that TLS verifies certificates by.
impl TimeProvider for ServerClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(unix_time(self.now()))
    }
}

/// One time, for a verification at that time.
#[derive(Debug)]
pub(crate) struct FixedTime(pub(crate) DateTime<Utc>);

impl TimeProvider for FixedTime {
    fn current_time(&self) -> Option<UnixTime> {
        Some(unix_time(self.0))
    }
}

fn unix_time(time: DateTime<Utc>) -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(u64::try_from(time.timestamp()).unwrap_or(0)))
}

/// Logs once when the machine's clock goes wrong, and once when it is right again.
fn log_offset(state: &mut State, at: ClockReading) {
    let tolerance = if state.is_off { TOLERANCE / 2 } else { TOLERANCE };
    let offset = state.time.offset(at, tolerance);
    if state.is_off == offset.is_some() {
        return;
    }
    state.is_off = offset.is_some();
    match offset {
        Some(offset) => warn!(
            error_code = "clock_skew",
            seconds = offset.num_seconds(),
            "this machine's clock is {} the control plane's, whose time the agent goes by; start a time service (chrony or \
             systemd-timesyncd)",
            describe_offset(offset)
        ),
        None => info!("this machine's clock agrees with the control plane's"),
    }
}

/// As in "90000 s (25 hours) ahead of".
#[must_use]
pub fn describe_offset(offset: TimeDelta) -> String {
    let direction = if offset < TimeDelta::zero() { "behind" } else { "ahead of" };
    let offset = offset.abs();
    let rounded = match (offset.num_days(), offset.num_hours()) {
        (days, _) if days >= 2 => format!(" ({days} days)"),
        (_, hours) if hours >= 2 => format!(" ({hours} hours)"),
        _ => String::new(),
    };
    format!("{} s{rounded} {direction}", offset.num_seconds())
}

/// What is known from the file, and from the node's id, which has the time of the node's registration by the control plane (RFC 9562,
/// section 5.7).
fn read(path: &Path, node_id: Uuid, boot_id: Option<Uuid>) -> ServerTime {
    let registered = node_id.get_timestamp().filter(|_| node_id.get_version_num() == 7).and_then(|timestamp| {
        let (seconds, nanoseconds) = timestamp.to_unix();
        DateTime::from_timestamp(i64::try_from(seconds).ok()?, nanoseconds)
    });
    let text = atomic_file::read_if_there(path).ok().flatten();
    let stored: Option<StoredTime> = text.and_then(|text| match serde_json::from_str(&text) {
        Ok(stored) => Some(stored),
        Err(error) => {
            let path = path.display().to_string();
            warn!(error_code = "node_storage", path, error = chain(&error), "the stored time is not understood");
            None
        }
    });
    let Some(stored) = stored.filter(|stored| stored.earliest <= stored.latest) else {
        return ServerTime { earliest: registered, ..ServerTime::default() };
    };
    let since = Duration::from_millis(stored.since_boot_ms);
    let is_of_this_boot = Some(stored.boot_id) == boot_id && since <= since_boot();
    let bounds = TimeBounds { earliest: stored.earliest, latest: stored.latest };
    ServerTime {
        known: is_of_this_boot.then_some((bounds, since)),
        has_message: false,
        earliest: Some(registered.map_or(stored.earliest, |registered| registered.max(stored.earliest))),
    }
}

/// A time that cannot be stored costs an estimate after the next boot.
fn store(path: &Path, boot_id: Uuid, bounds: TimeBounds, since_boot: Duration) {
    let since_boot_ms = u64::try_from(since_boot.as_millis()).unwrap_or(u64::MAX);
    let stored = StoredTime { earliest: bounds.earliest, latest: bounds.latest, boot_id, since_boot_ms };
    let Ok(text) = serde_json::to_vec(&stored) else { return };
    if let Err(error) = atomic_file::write_atomically(path, &text, atomic_file::PRIVATE) {
        warn!(error_code = "node_storage", error = chain(&error), "the control plane's time cannot be stored");
    }
}

/// The kernel's boot id.
///
/// # Errors
/// [`FileError`] when the kernel does not provide it.
pub fn boot_id() -> Result<Uuid, FileError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let text = atomic_file::read_if_there(path)?.unwrap_or_default();
    text.trim().parse().map_err(|error| FileError::at("read", path)(std::io::Error::other(error)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEN_YEARS: i64 = 3650 * 86_400;
    /// What a real clock gains or loses in a day at most.
    const REAL_DRIFT: f64 = 5.0 / 86_400.0;

    fn start() -> DateTime<Utc> {
        DateTime::from_timestamp(1_790_000_000, 0).unwrap()
    }

    /// The machine's clocks so long after the start, of which the local one is off by some seconds.
    fn reading(offset: i64, passed: Duration) -> ClockReading {
        ClockReading {
            local: later(start(), passed) + TimeDelta::seconds(offset),
            since_boot: Duration::from_secs(60) + passed,
        }
    }

    fn exactly(time: DateTime<Utc>) -> TimeBounds {
        TimeBounds { earliest: time, latest: time }
    }

    /// But for the rounding of this test.
    fn contains(bounds: TimeBounds, time: DateTime<Utc>) -> bool {
        let rounding = TimeDelta::milliseconds(1);
        bounds.earliest - rounding <= time && time <= bounds.latest + rounding
    }

    proptest! {
        #[test]
        fn time_is_the_control_planes_whatever_the_local_clock_says(
            offsets in proptest::collection::vec((-TEN_YEARS..=TEN_YEARS, 0_u64..100_000, 0_u64..60_000, any::<bool>()), 1..20),
            drift in -REAL_DRIFT..=REAL_DRIFT,
        ) {
            let (mut time, mut passed, mut real) = (ServerTime::default(), Duration::ZERO, 0.0);
            for (offset, pause_ms, round_trip_ms, is_message) in offsets {
                let pause = Duration::from_millis(pause_ms);
                passed += pause;
                real += pause.as_secs_f64() * (1.0 + drift);
                let server = start() + TimeDelta::microseconds((real * 1e6) as i64);
                let before = time.bounds(reading(offset, passed).since_boot);
                prop_assert!(before.is_none_or(|before| contains(before, server)), "{before:?} {server}");
                // The server read its clock at some time in the round trip; a `Date` is cut to seconds.
                let sent = server - TimeDelta::milliseconds((round_trip_ms / 3) as i64);
                let (sent, step) = if is_message {
                    (sent, Duration::ZERO)
                } else {
                    (DateTime::from_timestamp(sent.timestamp(), 0).unwrap(), Duration::from_secs(1))
                };
                let bounds = TimeBounds::at_arrival(sent, step, Duration::from_millis(round_trip_ms));
                let source = if is_message { TimeSource::Message } else { TimeSource::Header };
                let at = reading(offset, passed);
                time.learn(bounds, source, at.since_boot);
                let known = time.bounds(at.since_boot).unwrap();
                prop_assert!(contains(known, server), "{known:?} {server}");
                let now = time.now(at);
                prop_assert!((now - server).abs() <= TimeDelta::seconds(62));
                // The machine's clock alone decides nothing.
                prop_assert_eq!(now, time.now(ClockReading { local: start(), ..at }));
                let found = time.offset(at, TOLERANCE);
                let is_off = (at.local - server).abs();
                prop_assert!(found.is_none() || is_off > TOLERANCE, "{found:?} {is_off}");
                prop_assert!(found.is_some() || is_off <= TOLERANCE + TimeDelta::seconds(62), "{found:?} {is_off}");
            }
        }

        #[test]
        fn estimate_is_neither_before_the_stored_time_nor_before_the_local_one(
            offset in -TEN_YEARS..=TEN_YEARS,
            stored in proptest::option::of(-TEN_YEARS..=TEN_YEARS),
        ) {
            let earliest = stored.map(|stored| start() + TimeDelta::seconds(stored));
            let time = ServerTime { earliest, ..ServerTime::default() };
            let at = reading(offset, Duration::ZERO);
            let now = time.now(at);
            prop_assert!(now >= at.local && earliest.is_none_or(|earliest| now >= earliest));
            prop_assert!(now == at.local || Some(now) == earliest);
            prop_assert_eq!(time.offset(at, TOLERANCE), None, "nothing proves which of them is wrong");
        }
    }

    #[test]
    fn message_counts_for_more_than_the_header_of_a_proxy() {
        let mut time = ServerTime::default();
        let at = reading(0, Duration::ZERO);
        let of_proxy = exactly(start() + TimeDelta::hours(1));
        time.learn(of_proxy, TimeSource::Header, at.since_boot);
        assert_eq!(time.now(at), of_proxy.earliest);
        time.learn(exactly(start()), TimeSource::Message, at.since_boot);
        time.learn(of_proxy, TimeSource::Header, at.since_boot);
        assert_eq!(time.now(at), start());
    }

    #[test]
    fn time_of_a_control_plane_whose_clock_is_set_is_followed_both_ways() {
        let mut time = ServerTime::default();
        let at = reading(0, Duration::ZERO);
        for hours in [0, 30, -30, 0] {
            let server = start() + TimeDelta::hours(hours);
            time.learn(exactly(server), TimeSource::Message, at.since_boot);
            assert_eq!(time.now(at), server);
        }
    }

    #[test]
    fn stored_time_is_known_in_the_same_boot_and_the_earliest_in_another() {
        let folder = tempfile::tempdir().unwrap();
        let (node_id, boot_id) = (Uuid::new_v4(), Uuid::from_u128(1));
        let server = Utc::now() - TimeDelta::days(3650);
        let clock = ServerClock::open(folder.path(), node_id, boot_id);
        assert!(!clock.is_known());
        clock.learn(server, since_boot());
        let near = |time: DateTime<Utc>| (time - server).abs() < TimeDelta::minutes(5);
        let same_boot = ServerClock::open(folder.path(), node_id, boot_id);
        assert!(same_boot.known_now().is_some_and(near), "{same_boot:?}");
        let next_boot = ServerClock::open(folder.path(), node_id, Uuid::from_u128(2));
        assert!(!next_boot.is_known() && next_boot.earliest().is_some_and(near), "{next_boot:?}");
        assert!(!near(next_boot.now()), "the machine's clock is later");
        std::fs::write(folder.path().join(FILE), "{").unwrap();
        assert!(!ServerClock::open(folder.path(), node_id, boot_id).is_known(), "a damaged file is none");
    }

    #[test]
    fn node_of_which_nothing_is_stored_was_registered_before_now() {
        let folder = tempfile::tempdir().unwrap();
        let registered = Utc::now() + TimeDelta::days(3650);
        let seconds = u64::try_from(registered.timestamp()).unwrap();
        let node_id = Uuid::new_v7(uuid::Timestamp::from_unix_time(seconds, 0, 0, 0));
        let clock = ServerClock::open(folder.path(), node_id, Uuid::from_u128(1));
        assert_eq!(clock.earliest().map(|time| time.timestamp()), Some(registered.timestamp()));
        assert_eq!(clock.now().timestamp(), registered.timestamp());
    }

    #[test]
    fn small_correction_does_not_take_the_time_back() {
        let clock = ServerClock::unknown();
        let server = Utc::now();
        clock.learn(server + TimeDelta::seconds(2), since_boot());
        let before = clock.now();
        clock.learn(server, since_boot());
        assert_eq!(clock.now(), before);
        clock.learn(server - TimeDelta::hours(1), since_boot());
        assert!(clock.now() < before - TimeDelta::minutes(50), "the control plane's clock was set");
    }

    #[test]
    fn offset_is_described_in_seconds_and_in_a_larger_unit() {
        let described = |seconds| describe_offset(TimeDelta::seconds(seconds));
        assert_eq!(described(42), "42 s ahead of");
        assert_eq!(described(-86_400), "86400 s (24 hours) behind");
        assert_eq!(described(TEN_YEARS), "315360000 s (3650 days) ahead of");
    }
}
