//! The contact with a node's agent: polls, heartbeats, inventory, and silence.

use super::{FindingReport, HoldAuthor, Node, Phase, Rejection, Reply, StateCode, StateReason};
use crate::audit::{AuditAction, AuditRecord};
use crate::event::{Event, GpuDevice};
use crate::id::AllocationId;
use crate::package_digest::PackageDigest;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Deadline, Effect, Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeSet;

/// The last contact, and the agent's versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentContact {
    pub boot_id: String,
    pub agent_version: String,
    pub protocol: u16,
    /// Not every contact is written: this lags by up to a third of policy `node.offline_after_seconds`.
    pub last_seen_at: Timestamp,
    /// When the node becomes offline without another contact.
    pub silent_at: Timestamp,
    /// The names of the task types that the agent supports, as it reports. Where it reports none, its protocol determines them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task_types: Option<BTreeSet<String>>,
    /// Of the package that the agent is of, as it reports; `None` where no package installed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package_digest: Option<PackageDigest>,
    /// `None` in what an earlier release has stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_heartbeat: Option<LastHeartbeat>,
}

/// The last heartbeat of the agent, or its enrollment where it has sent none since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastHeartbeat {
    /// Not every heartbeat is written: this lags by up to a third of policy `node.offline_after_seconds`.
    pub at: Timestamp,
    /// From here on the agent has certainly sent none for as long as `node.offline_after_seconds`, in which it was in contact.
    pub overdue_at: Timestamp,
}

/// The kind of a contact. Both show that the agent runs; only a heartbeat shows that it monitors its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContactKind {
    Heartbeat,
    Poll,
}

/// The machine's inventory as the agent reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedInventory {
    pub gpus: Vec<ReportedGpu>,
    /// The source of the GPU data: `nvml`, `simulated` or `none`.
    pub gpu_source: String,
    /// `sandbox` or `system`.
    pub executor: String,
    /// True where the node isolates its tenants' GPUs by enforcement. Where it does not, it takes one tenant at a time (decisions 4).
    pub isolates_devices: bool,
    /// `None` where the agent cannot read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_model: Option<String>,
    /// These three are 0 where the agent cannot read them.
    pub cpu_cores: u32,
    pub memory_mib: u64,
    pub storage_gib: u64,
    /// Of the GPUs' driver; `None` where the agent does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    /// The host key that tenants see when they connect by SSH, in OpenSSH's `SHA256:` form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_fingerprint: Option<String>,
    /// What distinguishes its installation from another; `None` where the agent does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<ReportedSystem>,
    /// The device nodes beside those of GPUs that each tenant may open, as the operator of the machine has set them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tenant_devices: Vec<String>,
}

/// The installed system of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedSystem {
    /// Of `/etc/machine-id`, which each installation makes for itself.
    pub machine_id: Option<String>,
    /// The digest of the image, where the image carries it.
    pub image_digest: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedGpu {
    pub index: u32,
    pub uuid: String,
    pub model: String,
    pub memory_mib: u64,
}

/// The machine's health as the agent reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeHealth {
    pub status: NodeHealthStatus,
    /// Of an older agent, which judges its machine itself.
    pub alerts: Vec<serde_json::Value>,
    /// True where the agent reports findings.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reports_findings: bool,
    /// The findings of a heartbeat, in its command alone: the node stores them beside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<FindingReport>,
}

impl AgentContact {
    /// The contact of an agent at its enrollment or recovery, which says no more.
    pub(super) fn new(boot_id: &str, agent_version: &str, protocol: u16, now: Timestamp) -> Self {
        Self {
            boot_id: boot_id.to_owned(),
            agent_version: agent_version.to_owned(),
            protocol,
            last_seen_at: now,
            silent_at: now,
            task_types: None,
            package_digest: None,
            last_heartbeat: None,
        }
    }
}

impl NodeHealth {
    pub(super) fn is_of_class(alert: &serde_json::Value, class: &str) -> bool {
        let classes = alert.get("classifications").and_then(serde_json::Value::as_array);
        classes.into_iter().flatten().any(|it| it == class)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeHealthStatus {
    /// No report yet.
    #[default]
    Unknown,
    Ok,
    Warning,
    Critical,
}

impl Node {
    /// The last contact, where the agent has been silent for longer than policy `node.offline_after_seconds`, whatever the node's state.
    #[must_use]
    pub fn silent_since(&self, now: Timestamp) -> Option<Timestamp> {
        self.seen.as_ref().filter(|seen| now >= seen.silent_at).map(|seen| seen.last_seen_at)
    }

    /// The last heartbeat of an agent that has polled for tasks for longer than policy `node.offline_after_seconds` after it: its monitoring
    /// hangs, and faults of the machine are unknown.
    #[must_use]
    pub fn unmonitored_since(&self) -> Option<Timestamp> {
        let seen = self.seen.as_ref()?;
        seen.last_heartbeat.filter(|heartbeat| seen.last_seen_at >= heartbeat.overdue_at).map(|heartbeat| heartbeat.at)
    }

    /// The same, in a sentence for an operator.
    pub(super) fn unmonitored(&self) -> Option<String> {
        let since = self.unmonitored_since()?.format("%Y-%m-%dT%H:%M:%SZ");
        Some(format!(
            "its agent polls and has sent no heartbeat since {since}: its monitoring hangs; look for a file system that does not answer, then restart the agent"
        ))
    }

    /// Since when an operator has to look at a machine that is not monitored.
    pub(super) fn monitoring_deadline(&self) -> Option<Deadline> {
        match self.life {
            Phase::Active | Phase::Draining { .. } | Phase::Quarantined { .. } => {
                let overdue_at = self.seen.as_ref()?.last_heartbeat?.overdue_at;
                Some(Deadline::new(overdue_at, self.unmonitored()?))
            }
            // Without an identity, silent, or out of service: nothing is expected of its agent, or its state says so.
            Phase::Registered
            | Phase::BootstrapIssued { .. }
            | Phase::Enrolling { .. }
            | Phase::Offline
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => None,
        }
    }

    /// The messages for a tenant who has had these GPUs since this time. What is about a GPU of another tenant is not among them.
    #[must_use]
    pub fn tenant_messages(&self, gpus: &[GpuDevice], since: Timestamp) -> Vec<String> {
        if self.health.reports_findings {
            return self.tenant_messages_of_findings(gpus, since);
        }
        let is_foreign = |target: &str| {
            let reported = self.inventory.iter().flat_map(|inventory| &inventory.gpus);
            reported.into_iter().any(|gpu| gpu.uuid == target) && gpus.iter().all(|gpu| gpu.uuid != target)
        };
        let mut messages: Vec<String> = Vec::new();
        for alert in &self.health.alerts {
            let text = |field: &str| alert.get(field).and_then(serde_json::Value::as_str).unwrap_or_default();
            let (target, message) = (text("target"), text("tenant_message"));
            if !message.is_empty() && !is_foreign(target) && !messages.iter().any(|known| known == message) {
                messages.push(message.to_owned());
            }
        }
        messages
    }

    pub(super) fn poll(&self, serial: &str, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        self.check_certificate(serial, ctx)?;
        if let Some(allocation_id) = self.fenced_by.first() {
            return Err(Rejection::Fenced { allocation_id: *allocation_id });
        }
        let reply = Reply::Work { orders: self.pending_tasks() };
        let Some(seen) = &self.seen else { return Ok(Transition::stay(reply)) };
        let mut next = self.clone();
        next.record_contact(seen.clone(), ContactKind::Poll, ctx);
        next.learn_expected_hardware(ctx);
        next.identity.shown = Some(serial.to_owned());
        Ok(self.after_contact(next, reply, ctx))
    }

    pub(super) fn heartbeat(
        &self,
        serial: &str,
        from: AgentContact,
        inventory: ReportedInventory,
        health: NodeHealth,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        self.check_certificate(serial, ctx)?;
        let restarted = self.restarted(&from.boot_id);
        let mut step = self.apply_heartbeat(&from, inventory, health, ctx);
        if self.identity.shown.as_deref() != Some(serial) {
            if step.next.is_none() {
                step.why = "the agent shows another certificate".to_owned();
            }
            step.next.get_or_insert_with(|| self.clone()).identity.shown = Some(serial.to_owned());
        }
        Ok(restarted.into_iter().fold(step, Transition::audit))
    }

    /// The audit record of a machine that reports another boot than before. Its allocations stay: their files, logins and devices survive
    /// a restart, their processes do not.
    pub(super) fn restarted(&self, boot_id: &str) -> Option<AuditRecord> {
        let was = &self.seen.as_ref().filter(|seen| seen.boot_id != boot_id)?.boot_id;
        let allocations: Vec<_> = self.holds.keys().collect();
        let metadata = json!({ "old_boot_id": was, "new_boot_id": boot_id, "allocations": allocations });
        Some(self.audit(AuditAction::NodesRestart, metadata))
    }

    fn apply_heartbeat(
        &self,
        from: &AgentContact,
        inventory: ReportedInventory,
        health: NodeHealth,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let offline_after = ctx.policy.int(PolicyKey::NodeOfflineAfter, &Scopes::global(), ctx.now);
        let next_heartbeat_seconds = u32::try_from(offline_after / 3).unwrap_or(30).max(1);
        let mut next = self.clone();
        next.record_contact(from.clone(), ContactKind::Heartbeat, ctx);
        next.inventory = Some(inventory);
        next.learn_expected_hardware(ctx);
        self.apply_health(&mut next, health, ctx);
        let reply = Reply::HeartbeatAccepted { next_heartbeat_seconds, accepted: next.accepted_findings() };
        let (mut events, mut audits) = next.take_back_recovered_holds(ctx);
        if let Some(drift) = next.mismatch() {
            next.explain_hold(HoldAuthor::Drift, &drift);
        }
        if let Some(altered) = next.integrity_fault() {
            next.explain_hold(HoldAuthor::Integrity, &altered);
        }
        let faults = next.faults(self, ctx);
        let mut why = (!audits.is_empty()).then(|| "the cause of the quarantine is over".to_owned());
        if let Some((code, message)) = next.new_quarantine() {
            events.extend(next.enter_quarantine(code.clone(), &message, ctx));
            audits.push(self.audit(AuditAction::NodesQuarantine, json!({ "code": code })));
            why = Some(if code == StateCode::HealthCritical { "critical health".to_owned() } else { message });
        } else if !faults.is_empty() && why.is_none() {
            why = Some("the machine has a critical fault".to_owned());
        }
        let evacuations = next.update_evacuations(ctx);
        if !evacuations.is_empty() && why.is_none() {
            why = Some("the tenants that are asked to leave have changed".to_owned());
        }
        let mut repair = next.end_gpu_resets(ctx);
        repair.extend(next.advance_repair(ctx));
        repair.extend(next.begin_gpu_reset(ctx));
        if !repair.is_empty() && why.is_none() {
            why = Some("the repair of a health finding goes on".to_owned());
        }
        let wake = (!repair.is_empty()).then_some(Effect::WakeNode(self.id));
        audits.extend(repair);
        events.extend(faults);
        events.extend(evacuations);
        let Some(why) = why else { return self.after_contact(next, reply, ctx) };
        let step = events.into_iter().fold(Transition::to(next, reply, why), Transition::event);
        let step = audits.into_iter().fold(step, Transition::audit);
        wake.into_iter().fold(step, Transition::effect)
    }

    /// The health of a heartbeat. An agent that reports findings leaves the judgement to the table of findings.
    fn apply_health(&self, next: &mut Self, health: NodeHealth, ctx: &TransitionContext<'_>) {
        let NodeHealth { status, alerts, report, .. } = health;
        match report {
            Some(report) => {
                next.health =
                    NodeHealth { reports_findings: true, status: self.health.status, ..NodeHealth::default() };
                next.note_findings(report, self.seen.as_ref().map(|seen| seen.last_seen_at), ctx);
            }
            None => next.health = NodeHealth { status, alerts, ..NodeHealth::default() },
        }
    }

    /// Takes back the holds of what is over, where the agent reports findings. What an older agent reports says less: its holds are an
    /// operator's to release.
    pub(super) fn take_back_recovered_holds(&mut self, ctx: &TransitionContext<'_>) -> (Vec<Event>, Vec<AuditRecord>) {
        let mut over = Vec::new();
        if self.health.reports_findings && !self.is_machine_critical() {
            over.push(HoldAuthor::Health);
        }
        if self.health.reports_findings && self.mismatch().is_none() {
            over.push(HoldAuthor::Drift);
        }
        if self.health.reports_findings && self.integrity_fault().is_none() {
            over.push(HoldAuthor::Integrity);
        }
        match self.take_back_holds(&over, ctx) {
            Some((events, audit)) => (events, vec![audit]),
            None => (Vec::new(), Vec::new()),
        }
    }

    /// The hold that its health or its inventory adds, with the reason.
    fn new_quarantine(&self) -> Option<(StateCode, String)> {
        if self.is_machine_critical() && self.may_be_quarantined() && !self.is_held_by(HoldAuthor::Health) {
            let message = "The agent reports critical health; repair the machine, then release the quarantine.";
            return Some((StateCode::HealthCritical, message.to_owned()));
        }
        let life = if let Phase::Quarantined { was } = &self.life { was } else { &self.life };
        let is_in_service = matches!(life, Phase::Active | Phase::Offline | Phase::Draining { .. });
        let drift = self.mismatch().filter(|_| is_in_service && !self.is_held_by(HoldAuthor::Drift));
        let altered = || self.integrity_fault().filter(|_| is_in_service && !self.is_held_by(HoldAuthor::Integrity));
        let drift = drift.map(|drift| (StateCode::InventoryDrift, drift));
        drift.or_else(|| altered().map(|altered| (StateCode::IntegrityFinding, altered)))
    }

    /// Tenants of a machine with a critical fault do not pay for it, nor does a tenant whose GPU has failed or is gone: since the fault, or
    /// since the last contact with the machine. The event is published when the fault is detected, and not with every heartbeat.
    fn faults(&self, before: &Self, ctx: &TransitionContext<'_>) -> Vec<Event> {
        let last_heard = before.seen.as_ref().filter(|_| before.life == Phase::Offline).map(|seen| seen.last_seen_at);
        let known: Vec<_> = before.faulted().into_iter().map(|(id, reason, _)| (id, reason)).collect();
        let new = self.faulted().into_iter().filter(|(id, reason, _)| !known.contains(&(*id, *reason)));
        let fault =
            |(allocation_id, reason, at): (AllocationId, &'static str, Option<Timestamp>)| Event::TenantFaulted {
                node_id: self.id,
                allocation_id,
                at: at.or(last_heard).unwrap_or(ctx.now),
                reason: reason.to_owned(),
            };
        new.map(fault).collect()
    }

    /// The fault of the machine that concerns this allocation, if any.
    pub(super) fn fault_of(&self, allocation_id: AllocationId) -> Option<&'static str> {
        self.faulted().into_iter().find(|(id, ..)| *id == allocation_id).map(|(_, reason, _)| reason)
    }

    /// The allocations that a fault of the machine concerns, with the fault, and its time where it is known.
    fn faulted(&self) -> Vec<(AllocationId, &'static str, Option<Timestamp>)> {
        let by_findings = if self.health.reports_findings { self.faulted_by_findings() } else { Vec::new() };
        let is_critical = !self.health.reports_findings && self.is_machine_critical();
        let found: BTreeSet<&str> =
            self.inventory.iter().flat_map(|inventory| &inventory.gpus).map(|gpu| gpu.uuid.as_str()).collect();
        let faults = self.holds.iter().filter_map(|(id, hold)| {
            if let Some((_, reason, at)) = by_findings.iter().find(|(faulted, ..)| faulted == id) {
                return Some((*id, *reason, Some(*at)));
            }
            let has_all = hold.placed.devices.iter().all(|device| found.contains(device.uuid.as_str()));
            match (is_critical, has_all) {
                (true, _) => Some((*id, "health_critical", None)),
                (false, false) => Some((*id, "gpu_lost", None)),
                (false, true) => None,
            }
        });
        faults.collect()
    }

    /// A contact is committed where it changes what others see of the node, or where the last written one is old.
    fn after_contact(&self, mut next: Self, reply: Reply, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match (&self.life, next.mismatch()) {
            (Phase::Enrolling { .. }, None) if next.lacks_first_validation(ctx) => {
                self.begin_first_validation(next, reply, ctx)
            }
            (Phase::Enrolling { .. }, None) => {
                let event =
                    next.enter(Phase::Active, StateCode::FirstPoll, "The agent polls and the inventory matches.", ctx);
                let audit = self.audit(AuditAction::NodesActivate, json!({}));
                Transition::to(next, reply, "the agent polled with its certificate").event(event).audit(audit)
            }
            (Phase::Enrolling { .. }, Some(why)) if self.reason.message != why => {
                next.reason = StateReason::new(StateCode::InventoryMismatch, why.clone());
                Transition::to(next, reply, why)
            }
            (Phase::Offline, _) => {
                let boot_of = |node: &Self| node.seen.as_ref().map(|seen| seen.boot_id.clone());
                let (code, message) = if boot_of(self) == boot_of(&next) {
                    (StateCode::HeardAgain, "The agent is in contact again.")
                } else {
                    (StateCode::Restarted, "The machine was restarted; its allocations stay.")
                };
                let audit = self.audit(AuditAction::NodesFind, json!({ "code": code }));
                let event = next.enter(Phase::Active, code, message, ctx);
                Transition::to(next, reply, message).event(event).audit(audit)
            }
            (
                Phase::Registered
                | Phase::BootstrapIssued { .. }
                | Phase::Enrolling { .. }
                | Phase::Active
                | Phase::Draining { .. }
                | Phase::Quarantined { .. }
                | Phase::Retired
                | Phase::Removing { .. }
                | Phase::Removed,
                _,
            ) => {
                if next == *self {
                    Transition::stay(reply)
                } else {
                    Transition::to(next, reply, "the agent was in contact")
                }
            }
        }
    }

    /// Records a contact, unless the last recorded one is recent and from the same agent. Its times are set here.
    pub(super) fn record_contact(&mut self, contact: AgentContact, kind: ContactKind, ctx: &TransitionContext<'_>) {
        let offline_after = ctx.policy.seconds(PolicyKey::NodeOfflineAfter, &Scopes::global(), ctx.now);
        let lag = offline_after / 3;
        let is_recent = |at: Timestamp| at <= ctx.now && ctx.now < at + lag;
        let recent = self.seen.as_ref().is_some_and(|seen| {
            let is_the_same = AgentContact {
                last_seen_at: seen.last_seen_at,
                silent_at: seen.silent_at,
                last_heartbeat: seen.last_heartbeat,
                ..contact.clone()
            } == *seen;
            let shows_nothing_new = match kind {
                ContactKind::Heartbeat => seen.last_heartbeat.is_some_and(|heartbeat| is_recent(heartbeat.at)),
                // The first poll that shows a heartbeat to be overdue.
                ContactKind::Poll => seen.last_heartbeat.is_some_and(|heartbeat| {
                    ctx.now < heartbeat.overdue_at || seen.last_seen_at >= heartbeat.overdue_at
                }),
            };
            is_the_same && shows_nothing_new && is_recent(seen.last_seen_at)
        });
        // The contact of an offline node is recorded at once, or its next tick would find it silent again.
        if !recent || self.life == Phase::Offline {
            let heartbeat_at = |at: Timestamp| LastHeartbeat { at, overdue_at: at + offline_after + lag };
            let last_heartbeat = match (kind, &self.seen) {
                (ContactKind::Heartbeat, _) | (ContactKind::Poll, None) => heartbeat_at(ctx.now),
                (ContactKind::Poll, Some(seen)) => {
                    // An earlier release has stored when the agent was last seen alone: no heartbeat is known since.
                    let known = seen.last_heartbeat.unwrap_or_else(|| heartbeat_at(seen.last_seen_at));
                    // None was expected while it was silent, or the control plane down.
                    let was_silent = ctx.now >= seen.silent_at;
                    let overdue_at = if was_silent { heartbeat_at(ctx.now).overdue_at } else { known.overdue_at };
                    LastHeartbeat { overdue_at, ..known }
                }
            };
            let (last_seen_at, silent_at) = (ctx.now, ctx.now + offline_after);
            self.seen = Some(AgentContact { last_seen_at, silent_at, last_heartbeat: Some(last_heartbeat), ..contact });
        }
    }

    /// The difference of the inventory from the SKU's promise, in a sentence for an operator.
    #[must_use]
    pub fn mismatch(&self) -> Option<String> {
        let promise = &self.registration.sku;
        let Some(inventory) = &self.inventory else { return Some("No inventory was reported.".to_owned()) };
        let found = u32::try_from(inventory.gpus.len()).unwrap_or(u32::MAX);
        if found.saturating_add(self.gpus_found_missing()) != promise.gpu_count {
            let promised = promise.gpu_count;
            return Some(format!("The SKU {} has {promised} GPUs, the machine reports {found}.", promise.name));
        }
        for gpu in &inventory.gpus {
            let (index, model, memory) = (gpu.index, &gpu.model, gpu.memory_mib);
            if !model.trim().eq_ignore_ascii_case(promise.gpu_model.trim()) {
                return Some(format!("GPU {index} is a {model}, the SKU promises {}.", promise.gpu_model));
            }
            // Drivers reserve a part of the memory.
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
        self.machine_mismatch()
    }

    pub(super) fn tick(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match &self.life {
            Phase::BootstrapIssued { until } | Phase::Enrolling { until } if ctx.now >= *until => {
                self.expire_enrollment(ctx)
            }
            Phase::Active if self.seen.as_ref().is_some_and(|seen| ctx.now >= seen.silent_at) => self
                .change_phase(Phase::Offline, StateCode::Silent, "The agent is silent; its allocations stay.", ctx)
                .audit(self.audit(AuditAction::NodesLose, json!({}))),
            Phase::Removing { until } if ctx.now >= *until && !self.has_machine() => {
                let mut next = self.clone();
                let event = next.enter_removed(ctx);
                Transition::to(next, Reply::Done, "its connections are closed").event(event)
            }
            Phase::Draining { .. } if self.in_use().is_none() => self.drained(ctx),
            Phase::Registered
            | Phase::BootstrapIssued { .. }
            | Phase::Enrolling { .. }
            | Phase::Active
            | Phase::Offline
            | Phase::Draining { .. }
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => Transition::stay(Reply::Done),
        }
    }
}
