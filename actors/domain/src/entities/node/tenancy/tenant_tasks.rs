//! The tasks that set tenants up and clean them up, and the agent's results.

use super::{AgentTask, Hold, HoldPhase, PendingTask, TaskKind, TaskOutcome, TenantSlot, reason_code};
use crate::entities::node::{Node, ProofGap, Rejection, Reply};
use crate::event::Event;
use crate::id::{AllocationId, TaskId};
use crate::state_machine::{Effect, Timestamp, Transition, TransitionContext};
use serde_json::Value;

/// Why a tenant that the agent has set up is not admitted.
const CRITICAL_FAULT: &str = "the machine has a critical fault";

impl Node {
    pub(in crate::entities::node) fn provision(
        &self,
        allocation_id: AllocationId,
        deadline_at: Timestamp,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let failed = |reason: &str, detail: &str| {
            Transition::to(self.clone(), Reply::Done, detail).event(Event::TenantFailed {
                node_id: self.id,
                allocation_id,
                reason: reason_code(reason),
            })
        };
        match self.holds.get(&allocation_id).map(|hold| &hold.phase) {
            Some(HoldPhase::Reserved) if self.in_service() => {
                let work = PendingTask {
                    task_id: TaskId(ctx.new_id(0)),
                    attempt: 1,
                    ordered_at: ctx.now,
                    deadline_at,
                    origin: Some(ctx.origin()),
                };
                self.with_phase(allocation_id, HoldPhase::Provisioning { work }, "the tenant is to be set up")
                    .effect(Effect::WakeNode(self.id))
            }
            Some(HoldPhase::Reserved) => failed("node_not_available", "the node is not in service any more"),
            // An allocation that requests it is not active yet, and must not become active on a machine with a fault.
            Some(HoldPhase::Ready) if let Some(fault) = self.fault_of(allocation_id) => failed(fault, CRITICAL_FAULT),
            Some(HoldPhase::Ready) => Transition::to(self.clone(), Reply::Done, "the tenant is set up already")
                .event(Event::TenantReady { node_id: self.id, allocation_id }),
            Some(HoldPhase::SetupFailed { reason, detail }) => failed(reason, detail),
            Some(HoldPhase::Provisioning { .. }) => Transition::stay(Reply::Done).effect(Effect::WakeNode(self.id)),
            Some(HoldPhase::Releasing { .. } | HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }) => {
                Transition::stay(Reply::Done)
            }
            None => failed("reservation_lost", "the node holds no devices for the allocation"),
        }
    }

    /// The pending tasks of types that the agent supports, oldest first.
    pub(in crate::entities::node) fn pending_tasks(&self) -> Vec<AgentTask> {
        let of_tenants = self.holds.iter().filter_map(|(id, hold)| self.tenant_task(*id, hold));
        let mut orders: Vec<_> = of_tenants.chain(self.ssh_keys_tasks()).chain(self.node_tasks()).collect();
        if self.in_service() {
            orders.extend(self.terminal_tasks());
        }
        orders.retain(|order| self.lacks_task_type(order.what.task_type()).is_none());
        orders.sort_by_key(|order| (order.work.ordered_at, order.work.task_id));
        orders
    }

    fn tenant_task(&self, allocation_id: AllocationId, hold: &Hold) -> Option<AgentTask> {
        let place =
            || TenantSlot { allocation_id, placed: hold.placed.clone(), sku: self.registration.sku.name.clone() };
        let (work, what) = match &hold.phase {
            // A node that is out of service, or waits for a clean-up proof, gets every task but this one.
            HoldPhase::Provisioning { work } if self.in_service() && !self.has_unproven() => {
                (work, TaskKind::Provision { place: place(), keys: hold.keys.clone() })
            }
            HoldPhase::Releasing { work } | HoldPhase::Abandoned { work } => {
                (work, TaskKind::Release { place: place() })
            }
            HoldPhase::Provisioning { .. }
            | HoldPhase::Reserved
            | HoldPhase::Ready
            | HoldPhase::SetupFailed { .. }
            | HoldPhase::ReleaseFailed { .. } => return None,
        };
        Some(AgentTask { work: work.clone(), what })
    }

    pub(in crate::entities::node) fn report(
        &self,
        serial: &str,
        (task_id, attempt): (TaskId, u32),
        verdict: TaskOutcome,
        (output, unproved): (Option<Value>, Option<&ProofGap>),
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        self.check_certificate(serial, ctx)?;
        if let Some(of_a_terminal) = self.terminal_reported(task_id, attempt, &verdict) {
            return of_a_terminal;
        }
        if let Some(of_logins) = self.ssh_keys_reported(task_id, attempt, &verdict, ctx) {
            return of_logins;
        }
        if self.tasks.contains_key(&task_id) {
            return self.task_reported(task_id, attempt, verdict, output, ctx);
        }
        let found = self.holds.iter().find_map(|(id, hold)| match &hold.phase {
            HoldPhase::Provisioning { work }
            | HoldPhase::Releasing { work }
            | HoldPhase::ReleaseFailed { work }
            | HoldPhase::Abandoned { work }
                if work.task_id == task_id =>
            {
                Some((*id, hold, work.attempt))
            }
            HoldPhase::Provisioning { .. }
            | HoldPhase::Releasing { .. }
            | HoldPhase::ReleaseFailed { .. }
            | HoldPhase::Abandoned { .. }
            | HoldPhase::Reserved
            | HoldPhase::SetupFailed { .. }
            | HoldPhase::Ready => None,
        });
        let Some((allocation_id, hold, current)) = found else { return Err(Rejection::TaskUnknown) };
        let proves = verdict == (TaskOutcome::Succeeded { proof: Some(allocation_id) });
        match &hold.phase {
            HoldPhase::Provisioning { .. } if attempt == current => Ok(self.tenant_reported(allocation_id, &verdict)),
            // A proof of an earlier attempt is as good as any.
            HoldPhase::Releasing { .. } | HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }
                if proves && attempt <= current =>
            {
                let gone = Event::TenantGone { node_id: self.id, allocation_id, attempt };
                let mut node = self.clone();
                if let Some(gap) = unproved {
                    node.withhold_unproved(allocation_id, gap, ctx.now);
                }
                Ok(node.release_hold(allocation_id, "the agent proved the clean-up", ctx).event(gone))
            }
            HoldPhase::Releasing { .. } | HoldPhase::Abandoned { .. } if attempt == current => {
                Ok(self.clean_up_failed(allocation_id, attempt, &verdict))
            }
            // The allocation gave the attempt up before this result, and has reacted to that.
            HoldPhase::ReleaseFailed { .. } if attempt == current => Ok(Transition::stay(Reply::Done)),
            HoldPhase::Provisioning { .. }
            | HoldPhase::Releasing { .. }
            | HoldPhase::ReleaseFailed { .. }
            | HoldPhase::Abandoned { .. }
            | HoldPhase::Reserved
            | HoldPhase::SetupFailed { .. }
            | HoldPhase::Ready => Err(Rejection::StaleAttempt { given: attempt, current }),
        }
    }

    fn tenant_reported(&self, allocation_id: AllocationId, verdict: &TaskOutcome) -> Transition<Self> {
        match verdict {
            // The fault was published once, when it was detected, and the allocation may not have received its reservation by then.
            TaskOutcome::Succeeded { .. } if let Some(fault) = self.fault_of(allocation_id) => {
                let phase = HoldPhase::SetupFailed { reason: fault.to_owned(), detail: CRITICAL_FAULT.to_owned() };
                let failed = Event::TenantFailed { node_id: self.id, allocation_id, reason: fault.to_owned() };
                self.with_phase(allocation_id, phase, CRITICAL_FAULT).event(failed)
            }
            TaskOutcome::Succeeded { .. } => {
                let step = self
                    .with_phase(allocation_id, HoldPhase::Ready, "the agent set the tenant up")
                    .event(Event::TenantReady { node_id: self.id, allocation_id });
                self.ssh_keys_of_setup(step, allocation_id)
            }
            // Devices stay held: what was set up must be cleaned up, and the allocation has to request that.
            TaskOutcome::Failed { code, message } => self
                .with_phase(
                    allocation_id,
                    HoldPhase::SetupFailed { reason: code.clone(), detail: message.clone() },
                    format!("the agent could not set the tenant up: {message}"),
                )
                .event(Event::TenantFailed { node_id: self.id, allocation_id, reason: reason_code(code) }),
        }
    }

    fn clean_up_failed(&self, allocation_id: AllocationId, attempt: u32, verdict: &TaskOutcome) -> Transition<Self> {
        let (reason, detail) = match verdict {
            TaskOutcome::Succeeded { .. } => {
                ("proof_missing".to_owned(), "the agent gave no valid clean-up proof".to_owned())
            }
            TaskOutcome::Failed { code, message } => (code.clone(), message.clone()),
        };
        let mut next = self.clone();
        if let Some(hold) = next.holds.get_mut(&allocation_id) {
            hold.remains = Some(detail.clone());
            hold.phase = match &hold.phase {
                HoldPhase::Releasing { work } => HoldPhase::ReleaseFailed { work: work.clone() },
                // No allocation will retry: it is dispatched again.
                HoldPhase::Abandoned { work } => HoldPhase::Abandoned {
                    work: PendingTask { attempt: work.attempt.saturating_add(1), ..work.clone() },
                },
                other @ (HoldPhase::Reserved
                | HoldPhase::Provisioning { .. }
                | HoldPhase::Ready
                | HoldPhase::SetupFailed { .. }
                | HoldPhase::ReleaseFailed { .. }) => other.clone(),
            };
        }
        let why = format!("clean-up attempt {attempt} failed: {detail}");
        let reason = reason_code(&reason);
        let remains = Event::TenantRemains { node_id: self.id, allocation_id, attempt, reason, detail };
        Transition::to(next, Reply::Done, why).event(remains)
    }
}
