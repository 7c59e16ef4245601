//! What separates tenants of one machine from each other beside the owners of their files and devices, and what of it this machine lacks.

use std::collections::BTreeSet;
use std::sync::PoisonError;

use serde_json::{Value, json};
use tracing::warn;

use super::System;
use super::accounts::TenantAccount;
use super::bus_policy;
use super::disk_quotas::{self, UnboundedDisk};
use super::loopback_guard::UnguardedLoopback;
use super::tenant_limits::UnboundedTenants;
use crate::chain;
use crate::finding_log::{self, Condition};
use crate::gpu_probe::GpuSurvey;
use crate::task_outcome::TaskFailure;

/// The probe and the codes of findings about bounds of tenants.
const LIMITS: &str = "limits";
const NOT_BOUNDED: &str = "not_taken";
const NO_QUOTA: &str = "no_quota";

/// A bound of a tenant that the kernel has not taken.
pub(super) struct TenantFault {
    code: &'static str,
    why: String,
}

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
        match self.check_disk() {
            Ok(()) | Err(UnboundedDisk::Off) => {}
            Err(why) => warn!(
                error_code = "disk_unbounded",
                error = chain(&why),
                "one tenant can fill the disk of its neighbours; mount the file system with usrquota"
            ),
        }
    }

    /// What tenants own lies in their homes, and below the agent's state in folders of their own in place of `/tmp` and `/var/tmp`.
    fn check_disk(&self) -> Result<(), UnboundedDisk> {
        disk_quotas::check(&self.settings.limits, &[&self.settings.homes, &self.state_dir])
    }

    /// Without systemd there is no bus that shows processes.
    fn close_bus(&self) -> Result<(), bus_policy::OpenBus> {
        if self.guard.slices.is_some() { bus_policy::install() } else { Ok(()) }
    }

    /// A reload of the machine's own firewall removes the rules.
    pub(super) fn restore_loopback_guard(&self) {
        log_unguarded(self.loopback.restore());
    }

    /// Writes the tenant's share of the machine, which has so many GPUs. Returns whether systemd has to read it, which the guard of its devices has it do.
    pub(super) fn limit(&self, account: &TenantAccount, held: usize, gpus: usize) -> Result<bool, TaskFailure> {
        if self.limits.check().is_err() {
            return Ok(false);
        }
        self.limits.write(account, held, gpus)
    }

    /// Sets the tenant's share of the disks, and reads back what the kernel bounds of its share of memory and processes. What it did not take
    /// is logged and is a finding; the tenant is set up all the same.
    pub(super) fn bound(&self, account: &TenantAccount, held: usize, gpus: usize) {
        let mut faults = Vec::new();
        if let Err(why) = self.limits.check_taken(account, held, gpus) {
            faults.push(TenantFault { code: NOT_BOUNDED, why: chain(&why) });
        }
        if let Err(why) = disk_quotas::set(account, &self.settings.limits, held, gpus) {
            faults.push(TenantFault { code: NO_QUOTA, why: chain(&why) });
        }
        for TenantFault { code, why } in &faults {
            warn!(
                error_code = code,
                error = why,
                user_name = account.name,
                uid = account.uid,
                "the kernel does not enforce a bound of a tenant; correct what the error names, and restart the agent"
            );
        }
        let mut known = self.unbounded.lock().unwrap_or_else(PoisonError::into_inner);
        known.remove(&account.uid);
        if !faults.is_empty() {
            known.insert(account.uid, faults);
        }
    }

    /// The same for tenants that an earlier agent has set up, with other settings perhaps. For all at once: each may wait for systemd, and the
    /// first heartbeat comes after them.
    pub(super) fn bound_present_tenants(&self) {
        let (tenants, gpus) = (self.present_tenants(), self.count_gpus());
        std::thread::scope(|scope| {
            for (held, account) in &tenants {
                scope.spawn(move || self.bound_present_tenant(account, held.devices.len(), gpus));
            }
        });
    }

    fn bound_present_tenant(&self, account: &TenantAccount, held: usize, gpus: usize) {
        let renewed = self.limit(account, held, gpus).and_then(|it| self.guard.renew_slice(account, it));
        if let Err(failure) = renewed {
            let (error_code, error) = (failure.code, failure.message);
            warn!(
                error_code,
                error,
                user_name = account.name,
                "the bounds of a tenant cannot be written, and its previous ones stay; correct what the error names, and restart the agent"
            );
        }
        self.bound(account, held, gpus);
    }

    pub(super) fn forget_bounds(&self, account: &TenantAccount) {
        self.unbounded.lock().unwrap_or_else(PoisonError::into_inner).remove(&account.uid);
        disk_quotas::remove(account);
    }

    /// The bounds that the kernel has not taken, one finding for each kind.
    pub(super) fn bound_conditions(&self) -> Vec<Condition> {
        let known = self.unbounded.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |code: &'static str| {
            let faults = known.iter().flat_map(|(uid, faults)| faults.iter().map(move |fault| (uid, fault)));
            let whys: Vec<String> =
                faults.filter(|(_, it)| it.code == code).map(|(uid, it)| format!("uid {uid}: {}", it.why)).collect();
            let why = whys.join("; ");
            (!why.is_empty()).then(|| Condition::of_machine(LIMITS, code, why.clone()).with_state(why))
        };
        [NOT_BOUNDED, NO_QUOTA].into_iter().filter_map(of).collect()
    }

    fn has_unbounded(&self, code: &str) -> bool {
        let known = self.unbounded.lock().unwrap_or_else(PoisonError::into_inner);
        known.values().flatten().any(|fault| fault.code == code)
    }

    /// The GPUs that share the machine: also those that the driver does not read at this moment, so that the shares of all tenants never add
    /// up to more than the machine.
    pub(super) fn count_gpus(&self) -> usize {
        let held = self.allocations.all().into_iter().flat_map(|held| held.devices).map(|device| device.uuid);
        let stored = finding_log::stored_gpus(&self.state_dir).into_iter().map(|gpu| gpu.uuid);
        let unproved = self.allocations.unproved().all().into_keys();
        count_known(self.gpus.survey(false).unwrap_or_default(), held.chain(stored).chain(unproved))
    }

    /// What neighbours cannot see, reach and take of each other.
    pub(super) fn separated(&self) -> Value {
        json!({
            "processes": self.private.hides_processes() && self.close_bus().is_ok(),
            "loopback": self.loopback.is_installed(),
            "resources": self.limits.check().is_ok() && !self.has_unbounded(NOT_BOUNDED),
            "disk": self.check_disk().is_ok() && !self.has_unbounded(NO_QUOTA),
        })
    }
}

/// The GPUs of the machine: those that the driver lists, and these of which others know. Of one that it cannot read, the driver does not say
/// which it is.
fn count_known(survey: GpuSurvey, known: impl Iterator<Item = String>) -> usize {
    let unread = survey.unreadable.len().saturating_add(usize::try_from(survey.lost).unwrap_or(usize::MAX));
    let mut all: BTreeSet<String> = survey.gpus.into_iter().map(|gpu| gpu.info.uuid).collect();
    let at_least = all.len().saturating_add(unread);
    all.extend(known);
    all.len().max(at_least)
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

#[cfg(test)]
mod tests {
    use wire::inventory::{GpuInfo, GpuTopology};

    use super::*;
    use crate::gpu_probe::{GpuCondition, SurveyedGpu, UnreadableGpu};

    fn survey(uuids: &[&str]) -> GpuSurvey {
        let gpu = |uuid: &&str| {
            let (vendor, model) = ("NVIDIA".into(), "H100".into());
            let info = GpuInfo {
                index: 0,
                uuid: (*uuid).into(),
                vendor,
                model,
                memory_mib: 1,
                topology: GpuTopology::default(),
            };
            SurveyedGpu { info, pci_address: None, load: None, condition: GpuCondition::default() }
        };
        GpuSurvey { gpus: uuids.iter().map(gpu).collect(), ..GpuSurvey::default() }
    }

    #[test]
    fn gpu_that_the_driver_does_not_read_counts_among_those_that_share_the_machine() {
        let count = |survey: GpuSurvey, known: &[&str]| count_known(survey, known.iter().map(|uuid| (*uuid).into()));
        assert_eq!(count(survey(&["a", "b"]), &[]), 2);
        assert_eq!(count(survey(&["a", "b"]), &["b", "c", "c"]), 3, "one is held or stored, and not listed");
        assert_eq!(count(GpuSurvey { lost: 1, ..survey(&["a", "b"]) }, &[]), 3, "lost since the agent is installed");
        let unreadable = vec![UnreadableGpu { index: 2, pci_address: None, why: "999".into() }];
        let unread = GpuSurvey { unreadable, lost: 1, ..survey(&["a", "b"]) };
        assert_eq!(count(unread, &["c", "d"]), 4, "they are the same ones");
        assert_eq!(count(GpuSurvey::default(), &["a", "b"]), 2, "the driver does not answer");
    }
}
