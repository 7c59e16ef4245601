//! The service manager that started `gpuaas serve` (systemd.service(5), `Type=notify`): it is notified when the process serves and when it
//! stops, and restarts a process whose runtime makes no progress (`WatchdogSec=`).
//!
//! Without `NOTIFY_SOCKET` there is none, and nothing is sent.

use sd_notify::NotifyState;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

/// The longest pause between two notifications that the runtime makes progress.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Until when each of them lets the start take. A migration of a large database exceeds every fixed limit.
const START_EXTENSION: Duration = Duration::from_secs(60);

/// How long a process that cannot serve yet is waited for. The start of a replica must not depend on NATS and on the other members: the
/// program that starts it, such as the installation of a package, waits for its end.
const READY_WITHIN: Duration = Duration::from_secs(30);

const READINESS_INTERVAL: Duration = Duration::from_millis(100);

/// The service manager, if there is one.
#[derive(Clone, Debug)]
pub struct SystemdNotifier {
    is_present: bool,
    has_started: Arc<AtomicBool>,
}

impl SystemdNotifier {
    #[must_use]
    pub fn from_environment() -> Self {
        Self { is_present: std::env::var_os("NOTIFY_SOCKET").is_some(), has_started: Arc::default() }
    }

    /// Notifies it from now on that the runtime makes progress: an ordinary task, which runs no more where all threads of the runtime are
    /// blocked. The shutdown is observed in the same way.
    pub fn spawn_keep_alive(&self) {
        if self.is_present {
            let watchdog = sd_notify::watchdog_enabled();
            let has_started = Arc::clone(&self.has_started);
            tokio::spawn(keep_alive(watchdog, move || has_started.load(Ordering::Relaxed), notify));
        }
    }

    /// Notifies it that the process serves, as soon as `is_ready` or after [`READY_WITHIN`].
    pub fn spawn_ready_notification<F>(&self, is_ready: impl Fn() -> F + Send + 'static)
    where
        F: Future<Output = bool> + Send + 'static,
    {
        if self.is_present {
            let has_started = Arc::clone(&self.has_started);
            tokio::spawn(async move {
                wait_until_ready(is_ready).await;
                has_started.store(true, Ordering::Relaxed);
                notify(&[NotifyState::Ready]);
            });
        }
    }

    /// Sets the line that `systemctl status` shows.
    pub fn notify_status(&self, status: &str) {
        if self.is_present {
            notify(&[NotifyState::Status(status)]);
        }
    }

    pub fn notify_stopping(&self) {
        if self.is_present {
            notify(&[NotifyState::Stopping]);
        }
    }
}

fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "the service manager cannot be notified");
    }
}

/// Notifies the watchdog three times in each of its periods. Until the process has started it also extends the time that this may take.
async fn keep_alive(
    watchdog: Option<Duration>,
    has_started: impl Fn() -> bool,
    notify: impl Fn(&[NotifyState<'static>]),
) {
    let pause = watchdog.map_or(LONGEST_PAUSE, |period| period / 3).clamp(Duration::from_millis(1), LONGEST_PAUSE);
    let extension = u32::try_from(START_EXTENSION.as_micros()).unwrap_or(u32::MAX);
    let mut ticker = interval(pause);
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticker.tick().await;
        let is_starting = !has_started();
        if is_starting {
            notify(&[NotifyState::ExtendTimeoutUsec(extension)]);
        }
        if watchdog.is_some() {
            notify(&[NotifyState::Watchdog]);
        } else if !is_starting {
            return;
        }
    }
}

async fn wait_until_ready<F: Future<Output = bool>>(is_ready: impl Fn() -> F) {
    let until = Instant::now() + READY_WITHIN;
    while !is_ready().await {
        if Instant::now() >= until {
            tracing::warn!("not ready yet; the service manager regards the process as started");
            return;
        }
        sleep(READINESS_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::AtomicUsize;

    /// Runs `keep_alive` in the background. The result counts the notifications that begin with a prefix.
    fn notifications_of(watchdog: Option<Duration>, has_started: &Arc<AtomicBool>) -> impl Fn(&str) -> usize + use<> {
        let sent = Arc::<Mutex<Vec<String>>>::default();
        let (log, has_started) = (Arc::clone(&sent), Arc::clone(has_started));
        let record = move |states: &[NotifyState<'static>]| {
            log.lock().unwrap().extend(states.iter().map(ToString::to_string));
        };
        tokio::spawn(keep_alive(watchdog, move || has_started.load(Ordering::Relaxed), record));
        move |prefix| sent.lock().unwrap().iter().filter(|state| state.starts_with(prefix)).count()
    }

    #[tokio::test(start_paused = true)]
    async fn watchdog_is_fed_within_each_third_of_its_period() {
        let count = notifications_of(Some(Duration::from_secs(6)), &Arc::new(true.into()));
        sleep(Duration::from_secs(61)).await;
        assert_eq!((count("WATCHDOG=1"), count("EXTEND_TIMEOUT")), (31, 0));
    }

    #[tokio::test]
    async fn blocked_runtime_does_not_feed_the_watchdog() {
        let count = notifications_of(Some(Duration::from_millis(60)), &Arc::new(true.into()));
        sleep(Duration::from_millis(100)).await;
        let before = count("WATCHDOG=1");
        assert!(before > 0);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(count("WATCHDOG=1"), before);
        sleep(Duration::from_millis(50)).await;
        assert!(count("WATCHDOG=1") > before);
    }

    #[tokio::test(start_paused = true)]
    async fn start_may_take_longer_while_the_runtime_makes_progress() {
        let has_started = Arc::new(AtomicBool::new(false));
        let count = notifications_of(None, &has_started);
        sleep(Duration::from_secs(601)).await;
        assert_eq!(count("EXTEND_TIMEOUT_USEC=60000000"), 61);
        has_started.store(true, Ordering::Relaxed);
        sleep(Duration::from_secs(60)).await;
        assert_eq!((count("EXTEND_TIMEOUT"), count("WATCHDOG")), (61, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn process_that_is_not_ready_counts_as_started_after_half_a_minute() {
        let begin = Instant::now();
        wait_until_ready(async || false).await;
        assert!((READY_WITHIN..READY_WITHIN + Duration::from_secs(1)).contains(&begin.elapsed()));
        let asked = AtomicUsize::new(0);
        wait_until_ready(async || asked.fetch_add(1, Ordering::Relaxed) == 3).await;
        assert_eq!(asked.into_inner(), 4);
    }
}
