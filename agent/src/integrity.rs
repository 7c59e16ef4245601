//! Watches the integrity of the machine: the files of the agent's package, and what gives rights on the machine against its baseline, the
//! state after the last clean-up proof (decision 0057).
//!
//! A thread of its own compares, with the lowest priority: file systems may be slow, and a search of them is long. What it finds are
//! conditions among the health findings; heartbeats wait for none of it.
//!
//! | module | what |
//! | --- | --- |
//! | `checker`, `baseline` | the comparison; the state that it compares with |
//! | `package_files` | the files of the agent's package |
//! | `accounts`, `groups`, `sudo_rules`, `privileges`, `setuid`, `startup_files`, `listeners` | what gives rights on the machine |
//! | `recorded_tenants`, `bounded_file` | who is a tenant; reads of files of an intruder |

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use agent_package::update::Installation;
use rustix::process::setpriority_process;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::finding_log::{Condition, READING};

pub mod accounts;
pub mod baseline;
pub mod bounded_file;
pub mod checker;
pub mod groups;
pub mod listeners;
pub mod package_files;
pub mod privileges;
pub mod recorded_tenants;
pub mod setuid;
pub mod startup_files;
pub mod sudo_rules;
#[cfg(test)]
mod tests;

pub use checker::PrivilegeSettings;
use checker::{Depth, PrivilegeChecker};
use package_files::PackageFiles;

/// Everything is compared, file systems searched and files hashed, after so many intervals.
const FULL_EVERY: u32 = 60;
/// How soon the thread ends when the agent does.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// A comparison that makes no progress for this long hangs. A search reports progress after some entries, and hashes no more than a part of
/// a file.
const PROGRESS_WITHIN: Duration = Duration::from_secs(5 * 60);
/// The kernel derives the priority of its reads from it.
const LOWEST_PRIORITY: i32 = 19;

/// What is watched, and how often.
#[derive(Debug, Clone)]
pub struct IntegritySettings {
    /// `None`: the machine is not the tenants' alone.
    pub privileges: Option<PrivilegeSettings>,
    pub interval: Duration,
}

/// The integrity of the machine, as of the last comparison.
pub struct IntegrityMonitor {
    shared: Mutex<Shared>,
    ordered: Condvar,
}

#[derive(Default)]
struct Shared {
    /// `None` before the first comparison.
    conditions: Option<Vec<Condition>>,
    orders: Orders,
    /// The last progress of the comparison that is in progress.
    progress_at: Option<Instant>,
}

#[derive(Default)]
struct Orders {
    /// A clean-up was proved.
    renews: bool,
    /// Code and state of what an operator has accepted.
    accepted: Vec<(String, String)>,
}

impl Orders {
    const fn is_empty(&self) -> bool {
        !self.renews && self.accepted.is_empty()
    }
}

impl IntegrityMonitor {
    /// Starts the thread. `on_change` is called when it finds something else than before. `None`: there is nothing to watch, or the thread
    /// cannot be started.
    pub fn start(
        settings: IntegritySettings,
        package: Option<Installation>,
        stop: CancellationToken,
        on_change: impl Fn() + Send + 'static,
    ) -> Option<Arc<Self>> {
        if settings.privileges.is_none() && package.is_none() {
            return None;
        }
        let monitor = Arc::new(Self { shared: Mutex::default(), ordered: Condvar::new() });
        let (watching, interval) = (Arc::clone(&monitor), settings.interval);
        let watched = Watched {
            privileges: settings.privileges.map(PrivilegeChecker::open),
            package: package.map(PackageFiles::of),
        };
        let started = std::thread::Builder::new().name("integrity".to_owned()).spawn(move || {
            // Of this thread alone.
            let _ = setpriority_process(None, LOWEST_PRIORITY);
            watching.watch(watched, interval, &stop, &on_change);
        });
        match started {
            Ok(_) => Some(monitor),
            Err(error) => {
                warn!(error_code = "integrity", %error, "the integrity of the machine cannot be watched");
                None
            }
        }
    }

    /// What was found; `None` before the first comparison has ended.
    #[must_use]
    pub fn conditions(&self) -> Option<Vec<Condition>> {
        self.shared().conditions.clone()
    }

    /// The condition that the comparison does not go on: what was found before may not be so any more, and what is new is not found.
    #[must_use]
    pub fn late(&self) -> Option<Condition> {
        let hangs = self.shared().progress_at.is_some_and(|at| at.elapsed() >= PROGRESS_WITHIN);
        let detail = || {
            let minutes = PROGRESS_WITHIN.as_secs() / 60;
            format!("no progress for more than {minutes} min: a file system that is compared does not answer")
        };
        hangs.then(|| Condition::of_machine(READING, "integrity", detail()))
    }

    fn note_progress(&self) {
        self.shared().progress_at = Some(Instant::now());
    }

    /// A tenant is gone, which was proved: the state of the machine becomes the baseline where nothing differs from the one before.
    pub fn renew(&self) {
        self.shared().orders.renews = true;
        self.ordered.notify_one();
    }

    /// An operator has accepted a finding in this state.
    pub fn accept(&self, code: &str, state: &str) {
        let order = (code.to_owned(), state.to_owned());
        let mut shared = self.shared();
        if !shared.orders.accepted.contains(&order) {
            shared.orders.accepted.push(order);
        }
        drop(shared);
        self.ordered.notify_one();
    }

    /// What a comparison found, for tests; none is made.
    #[cfg(test)]
    pub(crate) fn with_conditions(conditions: Option<Vec<Condition>>) -> Arc<Self> {
        Arc::new(Self { shared: Mutex::new(Shared { conditions, ..Shared::default() }), ordered: Condvar::new() })
    }

    /// Codes and states that are to be accepted at the next comparison, for tests.
    #[cfg(test)]
    pub(crate) fn accepted(&self) -> Vec<(String, String)> {
        self.shared().orders.accepted.clone()
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self, mut watched: Watched, interval: Duration, stop: &CancellationToken, on_change: &impl Fn()) {
        let mut full_at = Instant::now();
        while !stop.is_cancelled() {
            let orders = std::mem::take(&mut self.shared().orders);
            let is_due = Instant::now() >= full_at;
            if is_due {
                full_at = Instant::now() + interval * FULL_EVERY;
            }
            let depth = if is_due || orders.renews { Depth::Full } else { Depth::Quick };
            self.note_progress();
            let goes_on = || {
                self.note_progress();
                !stop.is_cancelled()
            };
            let Some(found) = watched.compare(&orders, depth, goes_on) else { return };
            let before = {
                let mut shared = self.shared();
                shared.progress_at = None;
                shared.conditions.replace(found.clone())
            };
            if before.as_ref() != Some(&found) && !(before.is_none() && found.is_empty()) {
                on_change();
            }
            self.wait(interval, stop);
        }
    }

    /// Until the next comparison is due, or something is ordered.
    fn wait(&self, interval: Duration, stop: &CancellationToken) {
        let until = Instant::now() + interval;
        let mut shared = self.shared();
        while shared.orders.is_empty() && !stop.is_cancelled() && Instant::now() < until {
            shared = self.ordered.wait_timeout(shared, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

struct Watched {
    privileges: Option<PrivilegeChecker>,
    package: Option<PackageFiles>,
}

impl Watched {
    /// `None` where it was ended.
    fn compare(&mut self, orders: &Orders, depth: Depth, goes_on: impl Fn() -> bool) -> Option<Vec<Condition>> {
        let mut found: Vec<Condition> =
            self.package.iter_mut().filter_map(|it| it.check(depth == Depth::Full)).collect();
        if let Some(privileges) = &mut self.privileges {
            // Before anything else is observed: it is the state of then that was accepted.
            orders.accepted.iter().for_each(|(code, state)| privileges.accept(code, state));
            if !privileges.check(depth, goes_on) {
                return None;
            }
            if privileges.has_unrecorded() && depth == Depth::Full {
                privileges.record_first();
            }
            if orders.renews {
                privileges.renew();
            }
            found.extend(privileges.conditions());
        }
        Some(found)
    }
}
