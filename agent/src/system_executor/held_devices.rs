//! The devices of present tenants: device nodes and slices belong to the kernel and systemd, and a reboot resets them. What is not open is
//! opened as soon as the driver reports its node, and nothing is opened for a tenant whose release has begun.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use tracing::{info, warn};
use uuid::Uuid;
use wire::inventory::DeviceRef;

use super::System;
use super::accounts::TenantAccount;
use crate::allocation_records::AllocationRecord;
use crate::repeated_failures::RepeatedFailures;
use crate::task_outcome::TaskFailure;

/// What the agent remembers of the devices of tenants.
#[derive(Default)]
pub(super) struct HeldDevices {
    /// When device nodes were last made or removed, at the last look at them.
    nodes_changed_at: Mutex<Vec<Option<SystemTime>>>,
    /// The allocations with a device that could not be opened.
    unopened: RepeatedFailures<Uuid>,
}

impl System {
    /// Opens the devices of tenants that are not open. A tenant whose GPU the driver does not report waits for it, and no other waits with
    /// it.
    pub(super) fn open_held_devices(&self) {
        let mut unopened = BTreeSet::new();
        for (held, account) in self.present_tenants() {
            let opened = if self.guard.opened(&account) == held.devices.len() {
                self.guard.renew_slice(&account, false)
            } else {
                self.open_each(&held, &account)
            };
            let Err(failure) = opened else { continue };
            let (error_code, allocation_id) = (failure.code, held.allocation_id);
            unopened.insert(allocation_id);
            if self.held_devices.unopened.is_to_be_logged(allocation_id, &failure.message) {
                warn!(
                    error_code,
                    error = failure.message,
                    %allocation_id,
                    "a device of a tenant is not open; it is tried again every few seconds"
                );
            }
        }
        self.held_devices.unopened.retain(|allocation_id| {
            let fails = unopened.contains(allocation_id);
            if !fails && self.allocations.contains(*allocation_id) {
                info!(%allocation_id, "the tenant's devices are open");
            }
            fails
        });
    }

    /// The same, where a device node was made or removed since the last time.
    pub(super) fn follow_nodes(&self) {
        let changed_at = self.guard.changed_at();
        {
            let mut known = self.held_devices.nodes_changed_at.lock().unwrap_or_else(PoisonError::into_inner);
            if *known == changed_at {
                return;
            }
            // A node that appears while the others are looked at is looked at the next time.
            *known = changed_at;
        }
        self.open_held_devices();
    }

    /// Opens those devices that the driver reports. Returns the first failure.
    fn open_each(&self, held: &AllocationRecord, account: &TenantAccount) -> Result<(), TaskFailure> {
        // systemd reads both with the slice.
        let limited = self.limit(account, held.devices.len(), self.count_gpus());
        let has_changed = *limited.as_ref().unwrap_or(&false);
        let open = |device: &DeviceRef| {
            let Some(node) = self.guard.node(&self.gpus, device)? else { return Ok(()) };
            self.allocations.open_device(held.allocation_id, || self.guard.open_node(&node, account))
        };
        let opened = held.devices.iter().map(open).fold(limited.map(drop), Result::and);
        self.guard.renew_slice(account, has_changed)?;
        opened
    }
}
