//! The service manager that started the agent (systemd.service(5), `Type=notify`): it is notified of the start, and keeps descriptors that
//! the next process of the agent gets back (`FileDescriptorStoreMax=`, sd_pid_notify_with_fds(3)). It restarts an agent whose runtime makes
//! no progress (`WatchdogSec=`).
//!
//! Without `NOTIFY_SOCKET` there is none: nothing is sent, nothing is stored.

use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::sync::OnceCell;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

use crate::bounded_tool::Tool;

/// The descriptors that the agent's unit has the service manager keep (`FileDescriptorStoreMax=`). Their names must fit into one variable of
/// the environment, and their numbers below a process's usual limit of 1,024.
pub const MAX_DESCRIPTORS: usize = 512;

const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";
/// The store's descriptors are not polled: systemd would drop a terminal as soon as its last program has closed it, with output in it.
const NOT_POLLED: NotifyState<'static> = NotifyState::Custom("FDPOLL=0");
/// How long the list of systemd's jobs is waited for.
const JOBS_TIMEOUT: Duration = Duration::from_secs(2);

/// The variables of the protocol, which are not for the agent's children.
pub const VARIABLES: [&str; 6] =
    [NOTIFY_SOCKET, "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID", "WATCHDOG_USEC"];

/// A descriptor that an earlier process of the agent stored, with its name.
#[derive(Debug)]
pub struct StoredDescriptor {
    pub name: String,
    pub descriptor: OwnedFd,
}

/// The service manager, if there is one.
#[derive(Debug, Default)]
pub struct ServiceManager {
    is_present: bool,
    stored: Mutex<Vec<StoredDescriptor>>,
    /// Whether it starts the agent again after the stop that is in progress.
    starts_again: OnceCell<bool>,
}

impl ServiceManager {
    /// Takes the stored descriptors over. To be called once, before there is a second thread: until then children inherit them.
    #[must_use]
    pub fn from_environment() -> Self {
        let is_present = std::env::var_os(NOTIFY_SOCKET).is_some();
        Self { is_present, stored: Mutex::new(inherited_descriptors()), ..Self::default() }
    }

    /// The descriptors that an earlier process of the agent stored, once.
    #[must_use]
    pub fn take_stored(&self) -> Vec<StoredDescriptor> {
        std::mem::take(&mut *self.stored.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether it keeps descriptors, as far as its settings allow.
    #[must_use]
    pub const fn keeps_descriptors(&self) -> bool {
        self.is_present
    }

    /// The agent has read its state and works; whether it reaches the control plane is not part of its start.
    pub fn notify_ready(&self) {
        self.notify(&[NotifyState::Ready], &[]);
    }

    pub fn notify_stopping(&self) {
        self.notify(&[NotifyState::Stopping], &[]);
    }

    /// Notifies the watchdog three times in each of its periods: by an ordinary task of the runtime, which runs no more where all its
    /// threads are blocked.
    pub fn spawn_watchdog(self: &Arc<Self>) {
        let Some(period) = sd_notify::watchdog_enabled().filter(|_| self.is_present) else { return };
        let manager = Arc::clone(self);
        tokio::spawn(async move {
            let mut ticker = interval((period / 3).max(Duration::from_millis(1)));
            ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticker.tick().await;
                manager.notify(&[NotifyState::Watchdog], &[]);
            }
        });
    }

    /// Stores descriptors under a name, until they are removed or the service is stopped. What exceeds the store's size is closed by the
    /// service manager, which does not report it.
    pub fn store(&self, name: &str, descriptors: &[BorrowedFd<'_>]) {
        self.notify(&[NotifyState::FdStore, NotifyState::FdName(name), NOT_POLLED], descriptors);
    }

    /// Removes all descriptors of that name.
    pub fn remove(&self, name: &str) {
        self.notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)], &[]);
    }

    fn notify(&self, state: &[NotifyState<'_>], descriptors: &[BorrowedFd<'_>]) {
        if !self.is_present {
            return;
        }
        let sent = if descriptors.is_empty() {
            sd_notify::notify(state)
        } else {
            sd_notify::notify_with_fds(state, descriptors)
        };
        if let Err(error) = sent {
            warn!(error_code = "service_manager", error = %error, "the service manager cannot be notified");
        }
    }

    /// The agent ends with an exit status after which it is not started again.
    pub fn ends_for_good(&self) {
        // Fails only if the decision is made already.
        let _ = self.starts_again.set(false);
    }

    /// Whether the agent is started again after the stop that is in progress, so that what it stored reaches the next process. If that
    /// cannot be found out, it is assumed: systemd drops the store of a service that stays stopped.
    pub async fn starts_again(&self) -> bool {
        if !self.is_present {
            return false;
        }
        let decide = || async {
            let starts_again = !has_stop_job().await.unwrap_or_else(|why| {
                warn!(error_code = "service_manager", why, "systemd's jobs are unknown; a restart is assumed");
                false
            });
            info!(starts_again, "the agent is stopped");
            starts_again
        };
        *self.starts_again.get_or_init(decide).await
    }
}

#[allow(unsafe_code)]
fn inherited_descriptors() -> Vec<StoredDescriptor> {
    let Ok(listed) = sd_notify::listen_fds_with_names() else {
        // The variables are inconsistent: without names the descriptors cannot be distinguished.
        return Vec::new();
    };
    // SAFETY: the service manager passes these descriptors to this process for its own use (sd_listen_fds(3)), `LISTEN_PID` is this
    // process, and nothing else in the process takes them.
    let owned = |(raw, name)| StoredDescriptor { name, descriptor: unsafe { OwnedFd::from_raw_fd(raw) } };
    listed.map(owned).collect()
}

/// Whether systemd executes a job that stops the agent's unit, and does not start it again.
async fn has_stop_job() -> Result<bool, String> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
    let unit = unit_of(&groups).ok_or("the agent runs in no unit of systemd")?;
    let list = Tool::new("systemctl").args(["list-jobs", "--no-legend", "--plain", "--full"]);
    let listed = tokio::task::spawn_blocking(move || list.run(JOBS_TIMEOUT)).await;
    let jobs = listed.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    Ok(stops(&jobs, unit))
}

/// The service in a process's list of control groups.
fn unit_of(groups: &str) -> Option<&str> {
    let names = groups.lines().flat_map(|line| line.rsplit('/'));
    names.into_iter().find(|name| name.ends_with(".service"))
}

/// Whether a list of jobs (id, unit, type, state) stops the unit.
fn stops(jobs: &str, unit: &str) -> bool {
    jobs.lines().any(|line| {
        let mut columns = line.split_whitespace().skip(1);
        columns.next() == Some(unit) && columns.next() == Some("stop")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_is_found_in_either_hierarchy_of_control_groups() {
        assert_eq!(unit_of("0::/system.slice/gpuaas-agent.service\n"), Some("gpuaas-agent.service"));
        assert_eq!(unit_of("1:name=systemd:/system.slice/a.service/payload\n0::/\n"), Some("a.service"));
        assert_eq!(unit_of("0::/user.slice/user-0.slice/session-1.scope\n"), None);
    }

    #[test]
    fn only_a_stop_job_of_the_unit_itself_stops_it() {
        let unit = "gpuaas-agent.service";
        assert!(stops("2101 gpuaas-agent.service stop running\n", unit));
        assert!(stops("1 poweroff.target start waiting\n2 gpuaas-agent.service stop running\n", unit));
        assert!(!stops("2101 gpuaas-agent.service restart running\n", unit));
        assert!(!stops("2101 gpuaas-agent.service start waiting\n", unit));
        assert!(!stops("2102 other.service stop running\n", unit));
        assert!(!stops("", unit));
    }
}
