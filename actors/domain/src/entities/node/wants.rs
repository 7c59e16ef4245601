//! What one part wants of the others, as a part of a transition: each function here changes the parts that it names, in its order, and
//! returns the events and audit records. The commands in the other files of the node are made of them.

use super::outcome::{self, Outcome};
use super::{
    CommandName, HoldAuthor, Node, Phase, PhaseName, Rejection, Reply, StateCode, TaskOutcome, TaskSubject, Tasks,
    Tenancy, ValidationOrder,
};
use crate::audit::{AuditAction, AuditRecord};
use crate::event::Event;
use crate::id::{AllocationId, EntityKind, EntityRef, TaskId};
use crate::policy::{PolicyKey, Scopes};
use crate::rollout_outcome::{RolloutOutcome, failure};
use crate::state_machine::{Effect, Timestamp, Transition, TransitionContext};
use crate::task_type::TaskType;
use crate::validation::ValidationLevel;
use serde_json::json;

impl Node {
    /// The transition to this node, with the node as its reply.
    pub(super) fn transition_with_node(self, why: impl Into<String>) -> Transition<Self> {
        let reply = Reply::Node { node: Box::new(self.clone()) };
        Transition::to(self, reply, why)
    }

    /// Nothing changes; the reply is the node.
    pub(super) fn stay_with_node(&self) -> Transition<Self> {
        Transition::stay(Reply::Node { node: Box::new(self.clone()) })
    }

    /// The transition to this node, with its task as the reply.
    pub(super) fn task_transition(self, task_id: TaskId, why: String) -> Transition<Self> {
        let wake = Effect::WakeNode(self.id);
        let reply = Reply::Task { task_id, node: Box::new(self.clone()) };
        Transition::to(self, reply, why).effect(wake)
    }

    pub(super) fn wrong_state(&self, command: CommandName) -> Rejection {
        Rejection::WrongState { state: PhaseName::from(&self.lifecycle.phase), command }
    }

    /// Refuses a command that is for nodes with an identity.
    pub(super) fn check_has_identity(&self, command: CommandName) -> Result<(), Rejection> {
        let phase = &self.lifecycle.phase;
        if phase.has_no_identity() || phase.is_gone() { Err(self.wrong_state(command)) } else { Ok(()) }
    }

    pub(super) fn audit(&self, action: AuditAction, metadata: serde_json::Value) -> AuditRecord {
        AuditRecord::new(action, EntityRef { kind: EntityKind::Node, id: self.id.0 }, metadata)
    }

    /// The node in another state, with the reason and the event of the change.
    pub(super) fn change_phase(
        &self,
        phase: Phase,
        code: StateCode,
        message: &str,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let mut next = self.clone();
        let event = next.lifecycle.enter(phase, code, message, ctx);
        next.transition_with_node(message).event(event)
    }

    /// The transition of a command to the tenancy.
    pub(super) fn with_tenancy(&self, outcome: Outcome<Tenancy>) -> Transition<Self> {
        self.after_tenancy(Transition::stay(Reply::Done), outcome)
    }

    /// The transition, and after it what the tenancy does.
    pub(super) fn after_tenancy(&self, step: Transition<Self>, outcome: Outcome<Tenancy>) -> Transition<Self> {
        let Outcome { next, events, audits, wakes_agent, why } = outcome;
        let mut step = step;
        if let Some(tenancy) = next {
            if step.next.is_none() {
                step.why = why;
            }
            step.next.get_or_insert_with(|| self.clone()).tenancy = tenancy;
        }
        let step = step.with(events, audits);
        if wakes_agent { step.effect(Effect::WakeNode(self.id)) } else { step }
    }

    /// Adds a task for the agent; `None` where too many have no result.
    pub(super) fn add_task(
        &mut self,
        task_type: TaskType,
        subject: TaskSubject<'_>,
        ctx: &TransitionContext<'_>,
    ) -> Option<TaskId> {
        self.tasks.add(task_type, subject, self.agent.boot_id(), ctx)
    }

    /// Adds a validation with load; `None` where too many tasks have no result.
    pub(super) fn add_validation(&mut self, level: ValidationLevel, ctx: &TransitionContext<'_>) -> Option<TaskId> {
        let validation = Some(ValidationOrder::new(level, ctx));
        self.add_task(TaskType::NodeValidate, TaskSubject { validation, ..TaskSubject::default() }, ctx)
    }

    /// Takes back the holds of these authors. A node that has none left returns to its state; one that is drained is retired.
    pub(super) fn take_back_holds(
        &mut self,
        authors: &[HoldAuthor],
        ctx: &TransitionContext<'_>,
    ) -> Option<(Vec<Event>, AuditRecord)> {
        let (returned, audit) = self.lifecycle.take_back_holds(authors, ctx)?;
        let retired = returned.is_some().then(|| self.retire_if_drained(ctx)).flatten();
        Some((returned.into_iter().chain(retired).collect(), audit))
    }

    /// Takes back the holds of what is over, where the agent reports findings. What an older agent reports says less: its holds are an
    /// operator's to release.
    pub(super) fn take_back_recovered_holds(&mut self, ctx: &TransitionContext<'_>) -> (Vec<Event>, Vec<AuditRecord>) {
        if !self.health.reported.reports_findings {
            return (Vec::new(), Vec::new());
        }
        let over = [
            (HoldAuthor::Health, !self.health.is_machine_critical()),
            (HoldAuthor::Drift, self.mismatch().is_none()),
            (HoldAuthor::Integrity, self.health.integrity_fault().is_none()),
        ];
        let over: Vec<_> = over.into_iter().filter(|(_, is_over)| *is_over).map(|(author, _)| author).collect();
        match self.take_back_holds(&over, ctx) {
            Some((events, audit)) => (events, vec![audit]),
            None => (Vec::new(), Vec::new()),
        }
    }

    /// Begins, ends and completes evacuations as the open findings require.
    pub(super) fn update_evacuations(&mut self, ctx: &TransitionContext<'_>) -> Vec<Event> {
        let health = &self.health;
        self.tenancy.update_evacuations(|gpus| health.evacuation_reason(gpus), ctx)
    }

    /// A draining node whose last allocation has ended is retired.
    pub(super) fn retire_if_drained(&mut self, ctx: &TransitionContext<'_>) -> Option<Event> {
        let is_drained = matches!(self.lifecycle.phase, Phase::Draining { .. }) && self.tenancy.in_use().is_none();
        let message = "The last allocation ended; the node is retired.";
        is_drained.then(|| self.lifecycle.enter(Phase::Retired, StateCode::Drained, message, ctx))
    }

    /// The last allocation of a draining node has ended.
    pub(super) fn drained(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        self.change_phase(Phase::Retired, StateCode::Drained, "The last allocation ended; the node is retired.", ctx)
            .audit(self.audit(AuditAction::NodesDrained, json!({})))
    }

    /// The hold of a tenant ends: the machine is reinstalled after it, or the node is retired where it was the last one of a drain.
    pub(super) fn end_hold(
        &self,
        allocation_id: AllocationId,
        why: &str,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let mut next = self.clone();
        let why = format!("allocation {allocation_id}: {why}");
        if next.tenancy.end_hold(allocation_id) && next.machine.provided.is_some() {
            let (events, audit) = next.begin_reimage(&format!("allocation {allocation_id} has ended"), ctx);
            let step = Transition::to(next, Reply::Done, why).with(events, [audit]);
            return step.effect(Effect::CloseNode(self.id));
        }
        let retired = next.retire_if_drained(ctx);
        let audit = retired.is_some().then(|| self.audit(AuditAction::NodesDrained, json!({})));
        Transition::to(next, Reply::Done, why).with(retired, audit)
    }

    /// The old system's identity is void, and the provider erases and installs the machine. A node that never was active begins again as a
    /// registered one; any other is held in quarantine until the new system has proved itself.
    pub(super) fn begin_reimage(&mut self, reason: &str, ctx: &TransitionContext<'_>) -> (Vec<Event>, AuditRecord) {
        let audit = self.audit(AuditAction::NodesReimage, json!({ "reason": reason }));
        self.identity.revoke();
        let message = format!("The machine is being reinstalled: {reason}");
        let event = match self.lifecycle.phase {
            Phase::Registered | Phase::BootstrapIssued { .. } | Phase::Enrolling { .. } => {
                Some(self.lifecycle.enter(Phase::Registered, StateCode::Reimaging, &message, ctx))
            }
            Phase::Active
            | Phase::Offline
            | Phase::Draining { .. }
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => {
                self.machine.begin_reimage(ctx);
                self.lifecycle.enter_quarantine(StateCode::Reimaging, &message, ctx)
            }
        };
        let due = self.release_machine(true, ctx);
        (event.into_iter().chain(due).collect(), audit)
    }

    /// The node's machine is to be released with its disks erased, as part of this transition.
    pub(super) fn release_machine(&mut self, then_deploy: bool, ctx: &TransitionContext<'_>) -> Option<Event> {
        self.machine.begin_release(then_deploy, ctx).then(|| self.machine_due())
    }

    pub(super) fn machine_due(&self) -> Event {
        Event::MachineDue { node_id: self.id }
    }

    pub(super) fn enter_removed(&mut self, ctx: &TransitionContext<'_>) -> Event {
        let message = "Removed; the machine can come back as a new node.";
        self.lifecycle.enter(Phase::Removed, StateCode::Removed, message, ctx)
    }

    /// The enrolled node waits for its agent's first poll.
    pub(super) fn expect_first_poll(&mut self, until: Timestamp, ctx: &TransitionContext<'_>) -> Event {
        self.validation.forget_machine(self.failed_level());
        let message = "The agent has its certificate; waiting for its first poll.";
        self.lifecycle.enter(Phase::Enrolling { until }, StateCode::CertificateIssued, message, ctx)
    }

    /// Its phase, with time for a validation of this level where it is enrolling.
    pub(super) fn enrolling_with_load(phase: &Phase, level: ValidationLevel, ctx: &TransitionContext<'_>) -> Phase {
        let Phase::Enrolling { until } = phase else { return phase.clone() };
        let time = ctx.policy.seconds(PolicyKey::NodeTaskTimeout, &Scopes::global(), ctx.now);
        let load = ValidationOrder::new(level, ctx).load_time();
        Phase::Enrolling { until: (ctx.now + time + load).max(*until) }
    }

    /// The machine has passed its validation: what waited for that goes on. First its reimage ends, then its hold, then its enrollment.
    pub(super) fn follow_validation(&mut self, ctx: &TransitionContext<'_>) -> (Vec<Event>, Vec<AuditRecord>) {
        let (mut events, mut audits) = (Vec::new(), Vec::new());
        let is_as_promised = self.mismatch().is_none();
        let reimaged = is_as_promised.then(|| self.machine.end_reimage(ctx)).flatten();
        let over = reimaged.iter().map(|_| HoldAuthor::Reimage).chain([HoldAuthor::Validation]).collect::<Vec<_>>();
        audits.extend(reimaged);
        for author in over {
            if let Some((released, audit)) = self.take_back_holds(&[author], ctx) {
                events.extend(released);
                audits.push(audit);
            }
        }
        if matches!(self.lifecycle.phase, Phase::Enrolling { .. })
            && self.mismatch().is_none()
            && !self.lacks_first_validation(ctx)
        {
            let message = "The agent polls, the inventory matches, and the machine passed its validation.";
            events.push(self.lifecycle.enter(Phase::Active, StateCode::FirstPoll, message, ctx));
            audits.push(outcome::audit(AuditAction::NodesActivate, json!({}), ctx));
        }
        (events, audits)
    }

    /// The error where too many tasks have no result.
    pub(super) const fn too_many_tasks() -> Rejection {
        Tasks::too_many()
    }

    /// Remembers the result of a task where a rollout has ordered it.
    pub(super) fn end_rollout_update(&mut self, task_id: TaskId, verdict: &TaskOutcome) {
        let Some(rollout_id) = self.tasks.rollout_of(task_id) else { return };
        let outcome = match verdict {
            TaskOutcome::Succeeded { .. } => RolloutOutcome::Updated,
            TaskOutcome::Failed { code, .. } => RolloutOutcome::of_failure(code),
        };
        self.agent.record_rollout(rollout_id, Some(outcome));
    }

    /// A task has no result in time: its rollout counts it as failed.
    pub(super) fn stall_rollout_update(&mut self, task_id: TaskId) -> Option<Event> {
        let rollout_id = self.tasks.rollout_of(task_id)?;
        let outcome = RolloutOutcome::Failed { reason: failure::NO_RESULT.to_owned() };
        self.agent.record_rollout(rollout_id, Some(outcome.clone()));
        Some(Event::RolloutNodeEnded { node_id: self.id, rollout_id, outcome })
    }

    /// What has to end before any GPU is reset; `None` where nothing has.
    pub(super) fn obstacle_to_reset(&self) -> Option<String> {
        let excluding = [TaskType::NodeReboot, TaskType::NodeValidate, TaskType::NodeGpuReset, TaskType::AgentUpdate];
        self.repair.obstacle_to_reset(self.tasks.unended(&excluding), self.machine.reimage.is_some())
    }
}
