//! The contact with a node's agent: polls and heartbeats, and what a node does in time without one.

use super::{
    AgentContact, ContactKind, HoldAuthor, Node, NodeHealth, Phase, Rejection, RepairPhase, RepairStep, Reply,
    ReportedInventory, ResetStep, StateCode, StateReason, TaskEnd, TaskSubject, ValidationOrder,
};
use crate::audit::{AuditAction, AuditRecord};
use crate::event::Event;
use crate::id::AllocationId;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Effect, Timestamp, Transition, TransitionContext};
use crate::task_type::{StaleTaskAction, TaskType};
use crate::validation::ValidationLevel;
use serde_json::json;

impl Node {
    pub(super) fn poll(&self, serial: &str, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        self.check_certificate(serial, ctx)?;
        if let Some(allocation_id) = self.tenancy.fenced_by.first() {
            return Err(Rejection::Fenced { allocation_id: *allocation_id });
        }
        let reply = Reply::Work { orders: self.pending_tasks(ctx.now) };
        let Some(seen) = &self.agent.contact else { return Ok(Transition::stay(reply)) };
        let mut next = self.clone();
        next.record_contact(seen.clone(), ContactKind::Poll, ctx);
        next.machine.learn_expected_hardware(ctx);
        next.identity.shown = Some(serial.to_owned());
        Ok(self.after_contact(next, reply, ctx))
    }

    /// The pending tasks of types that the agent supports, oldest first.
    fn pending_tasks(&self, now: Timestamp) -> Vec<super::AgentTask> {
        let sku = &self.machine.registration.sku.name;
        let mut tasks = self.tenancy.tasks(sku, self.lifecycle.phase.is_in_service(), now);
        tasks.extend(self.tasks.open());
        tasks.retain(|task| self.agent.lacks_task_type(task.what.task_type()).is_none());
        tasks.sort_by_key(|task| (task.work.ordered_at, task.work.task_id));
        tasks
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
        let restarted = self.agent.restarted(&from.boot_id, self.tenancy.holds.keys(), ctx);
        let mut sessions = self.identity.sessions.clone();
        // A heartbeat without one is of an agent of an earlier release, or reached a replica of one.
        if let Some(session) = from.session {
            sessions.note(&session.to_string());
        }
        let mut step = self.apply_heartbeat(from, inventory, health, ctx);
        if self.identity.shown.as_deref() != Some(serial) || self.identity.sessions != sessions {
            if step.next.is_none() {
                step.why = "the agent shows another certificate or session".to_owned();
            }
            let identity = &mut step.next.get_or_insert_with(|| self.clone()).identity;
            (identity.shown, identity.sessions) = (Some(serial.to_owned()), sessions);
        }
        Ok(self.without_a_copy(step, ctx).with(None, restarted))
    }

    /// Quarantines the node where two agents take turns with its identity.
    fn without_a_copy(&self, step: Transition<Self>, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let is_new = |next: &Self| {
            let phase = &next.lifecycle.phase;
            next.identity.sessions.run_beside_each_other()
                && !phase.is_gone()
                && !next.lifecycle.is_held_by(HoldAuthor::Clone)
        };
        let Some(mut next) = step.next.clone().filter(is_new) else { return step };
        let message = "Two agents use this node's identity at the same time: find the copy of the machine or of its state, reissue its enrollment, then \
                       release the quarantine.";
        let event = next.lifecycle.enter_quarantine(StateCode::CloneSuspected, message, ctx);
        let audit = self.audit(AuditAction::NodesCloneSuspected, json!({ "boot_id": next.agent.boot_id() }));
        Transition { next: Some(next), why: message.to_owned(), ..step }.with(event, [audit])
    }

    /// In the order that the head of `node.rs` gives: what is reported, the holds, the evacuations, the repair.
    fn apply_heartbeat(
        &self,
        from: AgentContact,
        inventory: ReportedInventory,
        health: NodeHealth,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let offline_after = ctx.policy.int(PolicyKey::NodeOfflineAfter, &Scopes::global(), ctx.now);
        let next_heartbeat_seconds = u32::try_from(offline_after / 3).unwrap_or(30).max(1);
        let mut next = self.clone();
        // An agent names its session where it knows that the control plane reads all that it reports.
        let is_whole = from.session.is_some();
        // A heartbeat without a session tells nothing of it, as above.
        let is_other_session =
            from.session.is_some_and(|session| !self.identity.sessions.is_present(&session.to_string()));
        let is_restarted = |seen: &AgentContact| seen.boot_id != from.boot_id || is_other_session;
        // What made a clean-up fail may be over.
        let is_retried =
            self.agent.contact.as_ref().is_some_and(is_restarted) && next.tenancy.end_clean_up_pauses(|_| true);
        next.record_contact(from, ContactKind::Heartbeat, ctx);
        next.machine.report(inventory, is_whole);
        next.machine.learn_expected_hardware(ctx);
        if let Some(report) = &health.report {
            next.tenancy.note_proved_gpus(report);
        }
        let last_seen_at = self.agent.contact.as_ref().map_or(self.machine.registered_at, |seen| seen.last_seen_at);
        next.health.report(health, last_seen_at, ctx);
        let accepted = next.health.accepted_findings();
        let reply = Reply::HeartbeatAccepted { next_heartbeat_seconds, accepted };
        let (mut events, mut audits) = next.take_back_recovered_holds(ctx);
        if let Some(drift) = next.mismatch() {
            next.lifecycle.explain_hold(HoldAuthor::Drift, &drift);
        }
        if let Some(altered) = next.health.integrity_fault() {
            next.lifecycle.explain_hold(HoldAuthor::Integrity, &altered);
        }
        let faults = next.new_faults(self, ctx);
        let mut why = (!audits.is_empty()).then(|| "the cause of the quarantine is over".to_owned());
        if let Some((code, message)) = next.new_quarantine() {
            events.extend(next.lifecycle.enter_quarantine(code.clone(), &message, ctx));
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
        let wake = (is_retried || !repair.is_empty()).then_some(Effect::WakeNode(self.id));
        audits.extend(repair);
        events.extend(faults);
        events.extend(evacuations);
        let step = match why {
            Some(why) => Transition::to(next, reply, why).with(events, audits),
            None => self.after_contact(next, reply, ctx),
        };
        wake.into_iter().fold(step, Transition::effect)
    }

    fn record_contact(&mut self, contact: AgentContact, kind: ContactKind, ctx: &TransitionContext<'_>) {
        self.agent.record_contact(contact, kind, self.lifecycle.phase == Phase::Offline, ctx);
    }

    /// The hold that its health or its inventory adds, with the reason.
    fn new_quarantine(&self) -> Option<(StateCode, String)> {
        let is_held = |author| self.lifecycle.is_held_by(author);
        if self.health.is_machine_critical() && !self.lifecycle.phase.is_gone() && !is_held(HoldAuthor::Health) {
            let message = "The agent reports critical health; repair the machine, then release the quarantine.";
            return Some((StateCode::HealthCritical, message.to_owned()));
        }
        let is_in_service = self.lifecycle.phase.underlying().is_in_service();
        let drift = self.mismatch().filter(|_| is_in_service && !is_held(HoldAuthor::Drift));
        let altered = || self.health.integrity_fault().filter(|_| is_in_service && !is_held(HoldAuthor::Integrity));
        let drift = drift.map(|drift| (StateCode::InventoryDrift, drift));
        drift.or_else(|| altered().map(|altered| (StateCode::IntegrityFinding, altered)))
    }

    /// Tenants of a machine with a critical fault do not pay for it, nor does a tenant whose GPU has failed or is gone: since the fault, or
    /// since the last contact with the machine. The event is published when the fault is detected, and not with every heartbeat.
    fn new_faults(&self, before: &Self, ctx: &TransitionContext<'_>) -> Vec<Event> {
        let was_offline = before.lifecycle.phase == Phase::Offline;
        let last_seen_at = before.agent.contact.as_ref().filter(|_| was_offline).map(|seen| seen.last_seen_at);
        let known: Vec<_> = before.faulted().into_iter().map(|(id, reason, _)| (id, reason)).collect();
        let new = self.faulted().into_iter().filter(|(id, reason, _)| !known.contains(&(*id, *reason)));
        let fault = |(allocation_id, reason, at): (AllocationId, &'static str, Option<_>)| Event::TenantFaulted {
            node_id: self.id,
            allocation_id,
            at: at.or(last_seen_at).unwrap_or(ctx.now),
            reason: reason.to_owned(),
        };
        new.map(fault).collect()
    }

    /// Takes over what has become of the resets of GPUs so far.
    fn end_gpu_resets(&mut self, ctx: &TransitionContext<'_>) -> Vec<AuditRecord> {
        let tasks = &self.tasks;
        let view = super::RepairView {
            findings: &self.health.findings,
            listed: self.machine.gpus().map(|gpu| gpu.uuid.as_str()).collect(),
            is_critical: self.health.is_machine_critical(),
            can_reset: self.agent.lacks_task_type(TaskType::NodeGpuReset).is_none(),
        };
        let steps = self.repair.next_reset_steps(&view, |task_id| tasks.end_of(task_id), ctx.now);
        let enter = |(uuid, step): (String, ResetStep)| {
            let phase = match step {
                ResetStep::Enter(phase) => phase,
                ResetStep::Validate { is_reset } => {
                    let validation = Some(ValidationOrder::new(ValidationLevel::Quick, ctx));
                    let subject = TaskSubject { validation, gpu_uuid: Some(&uuid), ..TaskSubject::default() };
                    let task_id = self.add_task(TaskType::NodeValidate, subject, ctx)?;
                    if is_reset {
                        self.health.end_events_of_reset_gpu(&uuid, ctx.now);
                    }
                    super::GpuResetPhase::Validating { task_id }
                }
            };
            self.repair.enter_reset_phase(&uuid, phase, ctx)
        };
        steps.into_iter().filter_map(enter).collect()
    }

    /// The next step of the machine's repair, with its audit record.
    fn advance_repair(&mut self, ctx: &TransitionContext<'_>) -> Option<AuditRecord> {
        let end: Option<TaskEnd> = self.repair.pending_task().and_then(|task_id| self.tasks.end_of(task_id));
        let is_held = self.lifecycle.is_held_by(HoldAuthor::Validation);
        let step = self.repair.next_step(&self.repair_view(), end, (self.may_be_rebooted(), is_held), ctx)?;
        match step {
            RepairStep::Reboot => {
                let task_id = self.add_task(TaskType::NodeReboot, TaskSubject::default(), ctx)?;
                let finding = self.repair.repairable(&self.repair_view());
                Some(self.repair.begin(task_id, finding.as_deref(), ctx))
            }
            RepairStep::Validate => {
                let task_id = self.add_validation(self.required_level(), ctx)?;
                self.repair.enter(RepairPhase::Validating { task_id }, ctx)
            }
            RepairStep::Succeed => self.repair.enter(RepairPhase::Succeeded, ctx),
            RepairStep::GiveUp => {
                let audit = self.repair.enter(RepairPhase::AwaitsOperator { since: ctx.now }, ctx);
                let deadline = self.repair.deadline(&self.repair_view());
                if let Some(deadline) = deadline {
                    self.lifecycle.explain_hold(HoldAuthor::Health, &deadline.reason);
                }
                audit
            }
            RepairStep::Forget => Some(self.repair.forget(ctx)),
        }
    }

    /// True where no tenant and no other task is in the way. Holds of any author are not: they are not lifted either.
    fn may_be_rebooted(&self) -> bool {
        let excluding = [TaskType::NodeReboot, TaskType::NodeValidate, TaskType::NodeGpuReset];
        *self.lifecycle.phase.underlying() == Phase::Active
            && self.tenancy.holds.is_empty()
            && self.repair.gpus_in_reset().next().is_none()
            && self.tasks.unended(&excluding).is_none()
            && self.agent.lacks_task_type(TaskType::NodeReboot).is_none()
    }

    /// Begins the reset of a GPU that no tenant holds, where one is wanted and nothing is in the way.
    fn begin_gpu_reset(&mut self, ctx: &TransitionContext<'_>) -> Option<AuditRecord> {
        let most = ctx.policy.int(PolicyKey::NodeRepairAttempts, &Scopes::global(), ctx.now);
        if *self.lifecycle.phase.underlying() != Phase::Active || most == 0 || self.obstacle_to_reset().is_some() {
            return None;
        }
        let isolates = self.machine.isolates_devices();
        let has_tenant = |uuid: &str| self.tenancy.in_the_way_of_reset(uuid, isolates).is_some();
        let uuid = self.repair.gpu_to_reset(&self.repair_view(), has_tenant, ctx)?.to_owned();
        let subject = TaskSubject { gpu_uuid: Some(&uuid), ..TaskSubject::default() };
        let task_id = self.add_task(TaskType::NodeGpuReset, subject, ctx)?;
        self.repair.begin_reset(&uuid, task_id, ctx.now);
        self.repair.reset_record(&uuid, ctx)
    }

    /// A contact is committed where it changes what others see of the node, or where the last written one is old.
    fn after_contact(&self, mut next: Self, reply: Reply, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match (&self.lifecycle.phase, next.mismatch()) {
            (Phase::Enrolling { .. }, None) if next.lacks_first_validation(ctx) => {
                self.begin_first_validation(next, reply, ctx)
            }
            (Phase::Enrolling { .. }, None) => {
                let message = "The agent polls and the inventory matches.";
                let event = next.lifecycle.enter(Phase::Active, StateCode::FirstPoll, message, ctx);
                let audit = self.audit(AuditAction::NodesActivate, json!({}));
                Transition::to(next, reply, "the agent polled with its certificate").event(event).audit(audit)
            }
            (Phase::Enrolling { .. }, Some(why)) if self.lifecycle.reason.message != why => {
                next.lifecycle.reason = StateReason::new(StateCode::InventoryMismatch, why.clone());
                Transition::to(next, reply, why)
            }
            (Phase::Offline, _) => {
                let (code, message) = if self.agent.boot_id() == next.agent.boot_id() {
                    (StateCode::ContactRestored, "The agent is in contact again.")
                } else {
                    (StateCode::Restarted, "The machine was restarted; its allocations stay.")
                };
                let audit = self.audit(AuditAction::NodesFind, json!({ "code": code }));
                let event = next.lifecycle.enter(Phase::Active, code, message, ctx);
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
            ) => self.recorded_contact(next, reply),
        }
    }

    fn recorded_contact(&self, next: Self, reply: Reply) -> Transition<Self> {
        if next == *self { Transition::stay(reply) } else { Transition::to(next, reply, "the agent was in contact") }
    }

    /// Orders the first validation of an enrolled node that is in contact, unless it is open.
    fn begin_first_validation(&self, mut next: Self, reply: Reply, ctx: &TransitionContext<'_>) -> Transition<Self> {
        const MESSAGE: &str = "The machine is validated before it takes tenants.";
        let level = next.required_level();
        if !next.tasks.has_open_validation() && next.add_validation(level, ctx).is_some() {
            next.lifecycle.phase = Self::enrolling_with_load(&next.lifecycle.phase, level, ctx);
            next.lifecycle.reason = StateReason::new(StateCode::CertificateIssued, MESSAGE);
            return Transition::to(next, reply, "its first validation was ordered").effect(Effect::WakeNode(self.id));
        }
        self.recorded_contact(next, reply)
    }

    /// What is due at this moment: first of its state, then its tenants, its own tasks, and its machine at the provider.
    pub(super) fn tick(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut step = self.tick_lifecycle(ctx);
        step = self.after_tenancy_of(step, |node| node.tenancy.confirm_holds(ctx));
        step = self.after_tenancy_of(step, |node| node.tenancy.retry_clean_ups(ctx));
        step = self.expire_stale_tasks(step, ctx);
        step = self.after_tenancy_of(step, |node| node.tenancy.retry_stale_ssh_keys(ctx));
        step = self.advance_evacuations(step, ctx);
        step = self.after_tenancy_of(step, |node| node.tenancy.fail_stale_terminals(ctx));
        self.check_machine(step, ctx)
    }

    fn after_tenancy_of(
        &self,
        step: Transition<Self>,
        due: impl FnOnce(&Self) -> super::outcome::Outcome<super::Tenancy>,
    ) -> Transition<Self> {
        let outcome = due(step.next.as_ref().unwrap_or(self));
        self.after_tenancy(step, outcome)
    }

    fn tick_lifecycle(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match &self.lifecycle.phase {
            Phase::BootstrapIssued { until } | Phase::Enrolling { until } if ctx.now >= *until => {
                self.expire_enrollment(ctx)
            }
            Phase::Active if self.agent.silent_since(ctx.now).is_some() => self
                .change_phase(Phase::Offline, StateCode::Silent, "The agent is silent; its allocations stay.", ctx)
                .audit(self.audit(AuditAction::NodesLose, json!({}))),
            Phase::Removing { until } if ctx.now >= *until && !self.machine.is_held_at_provider() => {
                let mut next = self.clone();
                let event = next.enter_removed(ctx);
                Transition::to(next, Reply::Done, "its connections are closed").event(event)
            }
            Phase::Draining { .. } if self.tenancy.in_use().is_none() => self.drained(ctx),
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

    /// Handles overdue tasks as their type says, as part of this transition.
    fn expire_stale_tasks(&self, step: Transition<Self>, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = step.next.clone().unwrap_or_else(|| self.clone());
        let agent = &next.agent;
        let stale = next.tasks.expire_stale(|task_type| agent.lacks_task_type(task_type), ctx);
        if stale.is_empty() {
            return step;
        }
        let stalled = stale.iter().filter(|task| task.action == StaleTaskAction::AwaitOperator);
        let of_rollouts: Vec<_> = stalled.filter_map(|task| next.stall_rollout_update(task.task_id)).collect();
        let why = if step.next.is_some() { step.why.clone() } else { "tasks were not reported on in time".to_owned() };
        let step = Transition { next: Some(next), why, ..step }.with(of_rollouts, None);
        stale.into_iter().fold(step, |step, task| match task.action {
            StaleTaskAction::Requeue => step.effect(Effect::WakeNode(self.id)),
            StaleTaskAction::AwaitOperator => step.audit(task.audit(ctx)),
            StaleTaskAction::Expire => step,
        })
    }

    /// As [`Node::update_evacuations`], as part of this transition.
    fn advance_evacuations(&self, step: Transition<Self>, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = step.next.clone().unwrap_or_else(|| self.clone());
        let events = next.update_evacuations(ctx);
        if events.is_empty() {
            return step;
        }
        let why = if step.next.is_some() {
            step.why.clone()
        } else {
            "the time of tenants to leave has begun or ended".to_owned()
        };
        Transition { next: Some(next), why, ..step }.with(events, None)
    }
}
