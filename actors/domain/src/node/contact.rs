//! What is heard of a node: polls, heartbeats, what the machine consists of, and silence.

use super::{INVENTORY_MISMATCH, Life, Node, Rejection, Reply};
use crate::audit::{Audit, AuditAction};
use crate::event::{Device, Event};
use crate::id::AllocationId;
use crate::machine::{Ctx, Step, Timestamp};
use crate::policy::{Key, Scopes};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeSet;

/// When and from what agent the node was heard last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    pub boot_id: String,
    pub agent_version: String,
    pub protocol: u16,
    /// Not every contact is written: this lags by up to a third of policy `node.offline_after_seconds`.
    pub last_seen_at: Timestamp,
    /// When the node counts as offline unless it is heard.
    pub silent_at: Timestamp,
    /// The names of the types of task that the agent does, as it says itself. Where it does not, its protocol says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task_types: Option<BTreeSet<String>>,
}

/// What the agent found in the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    pub gpus: Vec<Gpu>,
    /// Where the GPUs come from: `nvml`, `simulated` or `none`.
    pub gpu_source: String,
    /// `sandbox` or `system`.
    pub executor: String,
    /// True where the node keeps its tenants' GPUs apart by something that enforces it. Where it does not, it takes one tenant at
    /// a time (decisions 4).
    pub isolates_devices: bool,
    pub cpu_cores: u32,
    pub memory_mib: u64,
    pub storage_gib: u64,
    /// The host key that tenants meet when they come in by SSH, in OpenSSH's `SHA256:` form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_fingerprint: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    pub index: u32,
    pub uuid: String,
    pub model: String,
    pub memory_mib: u64,
}

/// What the agent says of the machine's health.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    pub status: HealthStatus,
    pub alerts: Vec<serde_json::Value>,
}

impl Health {
    pub(super) fn is_of_class(alert: &serde_json::Value, class: &str) -> bool {
        let classes = alert.get("classifications").and_then(serde_json::Value::as_array);
        classes.into_iter().flatten().any(|it| it == class)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthStatus {
    /// Nothing was reported yet.
    #[default]
    Unknown,
    Ok,
    Warning,
    Critical,
}

impl Node {
    /// What the machine's alerts say to a tenant of these GPUs. An alert about a GPU of another tenant is not among it.
    #[must_use]
    pub fn tenant_messages(&self, gpus: &[Device]) -> Vec<&str> {
        let is_foreign = |target: &str| {
            let reported = self.inventory.iter().flat_map(|inventory| &inventory.gpus);
            reported.into_iter().any(|gpu| gpu.uuid == target) && gpus.iter().all(|gpu| gpu.uuid != target)
        };
        let mut messages: Vec<&str> = Vec::new();
        for alert in &self.health.alerts {
            let text = |field: &str| alert.get(field).and_then(serde_json::Value::as_str).unwrap_or_default();
            let (target, message) = (text("target"), text("tenant_message"));
            if !message.is_empty() && !is_foreign(target) && !messages.contains(&message) {
                messages.push(message);
            }
        }
        messages
    }

    pub(super) fn poll(&self, serial: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        self.known(serial, ctx)?;
        if let Some(allocation_id) = self.fenced_by.first() {
            return Err(Rejection::Fenced { allocation_id: *allocation_id });
        }
        let reply = Reply::Work { orders: self.orders() };
        let Some(seen) = &self.seen else { return Ok(Step::stay(reply)) };
        let mut next = self.clone();
        next.see(&seen.boot_id, &seen.agent_version, seen.protocol, seen.task_types.as_ref(), ctx);
        next.identity.shown = Some(serial.to_owned());
        Ok(self.after_contact(next, reply, ctx))
    }

    pub(super) fn heartbeat(
        &self,
        serial: &str,
        from: Seen,
        inventory: Inventory,
        health: Health,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        self.known(serial, ctx)?;
        let restarted = self.restarted(&from.boot_id);
        let mut step = self.heard(&from, inventory, health, ctx);
        if self.identity.shown.as_deref() != Some(serial) {
            if step.next.is_none() {
                step.why = "the agent shows another certificate".to_owned();
            }
            step.next.get_or_insert_with(|| self.clone()).identity.shown = Some(serial.to_owned());
        }
        Ok(restarted.into_iter().fold(step, Step::audit))
    }

    /// The audit row of a machine that speaks from another boot than before. Its allocations are kept: their files, logins and devices
    /// outlive a restart, their processes do not.
    pub(super) fn restarted(&self, boot_id: &str) -> Option<Audit> {
        let was = &self.seen.as_ref().filter(|seen| seen.boot_id != boot_id)?.boot_id;
        let allocations: Vec<_> = self.holds.keys().collect();
        let metadata = json!({ "boot_id": boot_id, "boot_id_before": was, "allocations": allocations });
        Some(self.audit(AuditAction::NodesRestart, metadata))
    }

    fn heard(&self, from: &Seen, inventory: Inventory, health: Health, ctx: &Ctx<'_>) -> Step<Self> {
        let offline_after = ctx.policy.int(Key::NodeOfflineAfter, &Scopes::global(), ctx.now);
        let reply = Reply::Heard { next_heartbeat_seconds: u32::try_from(offline_after / 3).unwrap_or(30).max(1) };
        let mut next = self.clone();
        next.see(&from.boot_id, &from.agent_version, from.protocol, from.task_types.as_ref(), ctx);
        next.inventory = Some(inventory);
        next.health = health;
        let faults = next.faults(self, ctx);
        if next.health.status == HealthStatus::Critical && next.may_be_quarantined() {
            let was = Box::new(next.life.clone());
            let event = next.enter(
                Life::Quarantined { was },
                "health_critical",
                "The agent reports critical health; repair the machine, then release the quarantine.",
                ctx,
            );
            let audit = self.audit(AuditAction::NodesQuarantine, json!({ "reason": "health_critical" }));
            let step = Step::to(next, reply, "critical health").event(event).audit(audit);
            return faults.into_iter().fold(step, Step::event);
        }
        if let (Life::Active | Life::Offline | Life::Draining { .. }, Some(why)) = (&next.life, next.mismatch()) {
            let was = Box::new(next.life.clone());
            let event = next.enter(Life::Quarantined { was }, "inventory_drift", &why, ctx);
            let audit = self.audit(AuditAction::NodesQuarantine, json!({ "reason": "inventory_drift" }));
            let step = Step::to(next, reply, why).event(event).audit(audit);
            return faults.into_iter().fold(step, Step::event);
        }
        if !faults.is_empty() {
            return faults.into_iter().fold(Step::to(next, reply, "the machine has a critical fault"), Step::event);
        }
        self.after_contact(next, reply, ctx)
    }

    /// Whoever is on a machine with a critical fault does not pay for it, nor whose GPU is gone: since now, or since the machine was
    /// heard last. Said when it is noticed, and not with every heartbeat.
    fn faults(&self, before: &Self, ctx: &Ctx<'_>) -> Vec<Event> {
        let last_heard = before.seen.as_ref().filter(|_| before.life == Life::Offline).map(|seen| seen.last_seen_at);
        let at = last_heard.unwrap_or(ctx.now);
        let fault = |(id, reason): (&AllocationId, &'static str)| Event::TenantFaulted {
            node_id: self.id,
            allocation_id: *id,
            at,
            reason: reason.to_owned(),
        };
        let known: Vec<_> = before.faulted().collect();
        self.faulted().filter(|found| !known.contains(found)).map(fault).collect()
    }

    /// What is wrong with the machine for this allocation, if anything is.
    pub(super) fn fault_of(&self, allocation_id: AllocationId) -> Option<&'static str> {
        self.faulted().find(|(id, _)| **id == allocation_id).map(|(_, reason)| reason)
    }

    /// The allocations that a fault of the machine concerns, and which.
    fn faulted(&self) -> impl Iterator<Item = (&AllocationId, &'static str)> {
        let is_critical = self.health.status == HealthStatus::Critical;
        let found: BTreeSet<&str> =
            self.inventory.iter().flat_map(|inventory| &inventory.gpus).map(|gpu| gpu.uuid.as_str()).collect();
        self.holds.iter().filter_map(move |(id, hold)| {
            let has_all = hold.placed.devices.iter().all(|device| found.contains(device.uuid.as_str()));
            match (is_critical, has_all) {
                (true, _) => Some((id, "health_critical")),
                (false, false) => Some((id, "gpu_lost")),
                (false, true) => None,
            }
        })
    }

    /// A contact is worth a commit where it changes what others see of the node, or where the last written one grows old.
    fn after_contact(&self, mut next: Self, reply: Reply, ctx: &Ctx<'_>) -> Step<Self> {
        match (&self.life, next.mismatch()) {
            (Life::Enrolling { .. }, None) => {
                let event = next.enter(Life::Active, "first_poll", "The agent polls and the inventory matches.", ctx);
                let audit = self.audit(AuditAction::NodesActivate, json!({}));
                Step::to(next, reply, "the agent polled with its certificate").event(event).audit(audit)
            }
            (Life::Enrolling { .. }, Some(why)) if self.reason.message != why => {
                next.reason = super::Reason { code: INVENTORY_MISMATCH.to_owned(), message: why.clone() };
                Step::to(next, reply, why)
            }
            (Life::Offline, _) => {
                let boot_of = |node: &Self| node.seen.as_ref().map(|seen| seen.boot_id.clone());
                let (code, message) = if boot_of(self) == boot_of(&next) {
                    ("heard_again", "The agent was heard again.")
                } else {
                    ("restarted", "The machine was started anew; its allocations are kept.")
                };
                let event = next.enter(Life::Active, code, message, ctx);
                let audit = self.audit(AuditAction::NodesFind, json!({ "code": code }));
                Step::to(next, reply, message).event(event).audit(audit)
            }
            (
                Life::Registered
                | Life::BootstrapIssued { .. }
                | Life::Enrolling { .. }
                | Life::Active
                | Life::Draining { .. }
                | Life::Quarantined { .. }
                | Life::Retired
                | Life::Removing { .. }
                | Life::Removed,
                _,
            ) => {
                if next == *self {
                    Step::stay(reply)
                } else {
                    Step::to(next, reply, "heard of the agent")
                }
            }
        }
    }

    /// Notes a contact, unless the last noted one is recent and from the same agent.
    pub(super) fn see(
        &mut self,
        boot_id: &str,
        agent_version: &str,
        protocol: u16,
        task_types: Option<&BTreeSet<String>>,
        ctx: &Ctx<'_>,
    ) {
        let offline_after = ctx.policy.seconds(Key::NodeOfflineAfter, &Scopes::global(), ctx.now);
        let recent = self.seen.as_ref().is_some_and(|seen| {
            seen.boot_id == boot_id
                && seen.agent_version == agent_version
                && seen.protocol == protocol
                && seen.task_types.as_ref() == task_types
                && ctx.now < seen.last_seen_at + offline_after / 3
                && ctx.now >= seen.last_seen_at
        });
        // A node that counts as offline is noted at once, or its next tick would find it silent again.
        if !recent || self.life == Life::Offline {
            self.seen = Some(Seen {
                boot_id: boot_id.to_owned(),
                agent_version: agent_version.to_owned(),
                protocol,
                last_seen_at: ctx.now,
                silent_at: ctx.now + offline_after,
                task_types: task_types.cloned(),
            });
        }
    }

    /// What of the inventory is not as the SKU promises, in a sentence for an operator.
    #[must_use]
    pub fn mismatch(&self) -> Option<String> {
        let promise = &self.registration.sku;
        let Some(inventory) = &self.inventory else { return Some("No inventory was reported.".to_owned()) };
        let found = u32::try_from(inventory.gpus.len()).unwrap_or(u32::MAX);
        if found != promise.gpu_count {
            let promised = promise.gpu_count;
            return Some(format!("The SKU {} has {promised} GPUs, the machine reports {found}.", promise.name));
        }
        for gpu in &inventory.gpus {
            let (index, model, memory) = (gpu.index, &gpu.model, gpu.memory_mib);
            if !model.trim().eq_ignore_ascii_case(promise.gpu_model.trim()) {
                return Some(format!("GPU {index} is a {model}, the SKU promises {}.", promise.gpu_model));
            }
            // Drivers keep a part of the memory for themselves.
            if memory.saturating_mul(100) < promise.gpu_memory_mib.saturating_mul(95) {
                let promised = promise.gpu_memory_mib;
                return Some(format!("GPU {index} has {memory} MiB of memory, the SKU promises {promised}."));
            }
        }
        let mut uuids: Vec<_> = inventory.gpus.iter().map(|gpu| &gpu.uuid).collect();
        uuids.sort();
        uuids.dedup();
        if uuids.len() != inventory.gpus.len() {
            return Some("Two of the GPUs report the same UUID.".to_owned());
        }
        None
    }

    pub(super) fn tick(&self, ctx: &Ctx<'_>) -> Step<Self> {
        match &self.life {
            Life::BootstrapIssued { until } | Life::Enrolling { until } if ctx.now >= *until => {
                self.expire_enrollment(ctx)
            }
            Life::Active if self.seen.as_ref().is_some_and(|seen| ctx.now >= seen.silent_at) => self
                .moved(Life::Offline, "silent", "The agent was not heard; its allocations are kept.", ctx)
                .audit(self.audit(AuditAction::NodesLose, json!({}))),
            Life::Removing { until } if ctx.now >= *until => {
                self.moved(Life::Removed, "removed", "Removed; the machine can come back as a new node.", ctx)
            }
            Life::Draining { .. } if self.in_use().is_none() => self.drained(ctx),
            Life::Registered
            | Life::BootstrapIssued { .. }
            | Life::Enrolling { .. }
            | Life::Active
            | Life::Offline
            | Life::Draining { .. }
            | Life::Quarantined { .. }
            | Life::Retired
            | Life::Removing { .. }
            | Life::Removed => Step::stay(Reply::Done),
        }
    }
}
