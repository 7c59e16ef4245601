//! What separates tenants of one machine from each other beside the owners of their files and devices, and what of it this machine lacks.

use serde_json::{Value, json};
use tracing::warn;

use super::System;
use super::accounts::TenantAccount;
use super::bus_policy;
use super::loopback_guard::UnguardedLoopback;
use super::tenant_limits::UnboundedTenants;
use crate::chain;
use crate::executor::TaskFailure;

impl System {
    /// Separates neighbours as far as this machine can, and logs what it cannot.
    pub(super) fn separate_neighbours(&self) {
        if !self.settings.loopback_guard {
            // Rules of a time when the setting was on.
            self.loopback.remove();
        }
        log_unguarded(self.loopback.install());
        if let Err(why) = self.close_bus() {
            warn!(
                error_code = "bus_shows_processes",
                error = chain(&why),
                "systemd shows tenants the command lines of each other's processes"
            );
        }
        match self.limits.check() {
            Ok(()) | Err(UnboundedTenants::Off) => {}
            Err(why) => warn!(
                error_code = "tenants_unbounded",
                error = chain(&why),
                "one tenant can take all memory and processes of the machine"
            ),
        }
    }

    /// Without systemd there is no bus that shows processes.
    fn close_bus(&self) -> Result<(), bus_policy::OpenBus> {
        if self.guard.slices.is_some() { bus_policy::install() } else { Ok(()) }
    }

    /// A reload of the machine's own firewall removes the rules.
    pub(super) fn restore_loopback_guard(&self) {
        log_unguarded(self.loopback.restore());
    }

    /// Writes the tenant's share of the machine; the guard of its devices has systemd read it.
    pub(super) fn limit(&self, account: &TenantAccount, held: usize) -> Result<(), TaskFailure> {
        if self.limits.check().is_err() {
            return Ok(());
        }
        let gpus = self.gpus.list().map_err(|error| TaskFailure::new("gpu_driver", error.to_string()))?;
        self.limits.write(account, held, gpus.len())
    }

    /// What neighbours cannot see, reach and take of each other.
    pub(super) fn separated(&self) -> Value {
        json!({
            "processes": self.private.hides_processes() && self.close_bus().is_ok(),
            "loopback": self.loopback.is_installed(),
            "resources": self.limits.check().is_ok(),
        })
    }
}

fn log_unguarded(guarded: Result<(), UnguardedLoopback>) {
    match guarded {
        Ok(()) | Err(UnguardedLoopback::Off) => {}
        Err(why) => warn!(
            error_code = "loopback_unguarded",
            error = chain(&why),
            "tenants reach what their neighbours listen on at 127.0.0.1 and ::1"
        ),
    }
}
