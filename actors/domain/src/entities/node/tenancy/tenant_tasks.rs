//! The tasks that set tenants up and clean them up, and the agent's results.

use super::{Hold, HoldPhase, Tenancy};
use crate::entities::node::outcome::{self, Outcome};
use crate::entities::node::{AgentTask, PendingTask, Rejection, TaskKind, TaskOutcome, reason_code};
use crate::event::Event;
use crate::id::{AllocationId, TaskId};
use crate::state_machine::{Timestamp, TransitionContext};

/// Why a tenant that the agent has set up is not admitted.
const CRITICAL_FAULT: &str = "the machine has a critical fault";

/// What the result of a tenant's task leads to.
pub(in crate::entities::node) enum TenantReport {
    Changed(Outcome<Tenancy>),
    /// The agent has proved this clean-up attempt: the hold ends.
    Proved {
        allocation_id: AllocationId,
        attempt: u32,
    },
}

impl Tenancy {
    /// The node serves its tenants where `in_service`; `fault` is the one of the machine that concerns the allocation.
    pub(in crate::entities::node) fn provision(
        &self,
        (allocation_id, deadline_at): (AllocationId, Timestamp),
        in_service: bool,
        fault: Option<&str>,
        ctx: &TransitionContext<'_>,
    ) -> Outcome<Self> {
        let failed = |reason: &str, detail: &str| {
            Outcome::to(self.clone(), detail).event(Event::TenantFailed {
                node_id: outcome::node_id(ctx),
                allocation_id,
                reason: reason_code(reason),
            })
        };
        match self.holds.get(&allocation_id).map(|hold| &hold.phase) {
            Some(HoldPhase::Reserved) if in_service => {
                let work = PendingTask {
                    task_id: TaskId(ctx.new_id(0)),
                    attempt: 1,
                    ordered_at: ctx.now,
                    deadline_at,
                    origin: Some(ctx.origin()),
                };
                self.with_phase(allocation_id, HoldPhase::Provisioning { work }, "the tenant is to be set up")
                    .wake_agent()
            }
            Some(HoldPhase::Reserved) => failed("node_not_available", "the node is not in service any more"),
            // An allocation that requests it is not active yet, and must not become active on a machine with a fault.
            Some(HoldPhase::Ready) if let Some(fault) = fault => failed(fault, CRITICAL_FAULT),
            Some(HoldPhase::Ready) => Outcome::to(self.clone(), "the tenant is set up already")
                .event(Event::TenantReady { node_id: outcome::node_id(ctx), allocation_id }),
            Some(HoldPhase::SetupFailed { reason, detail }) => failed(reason, detail),
            Some(HoldPhase::Provisioning { .. }) => Outcome::stay().wake_agent(),
            Some(HoldPhase::Releasing { .. } | HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }) => {
                Outcome::stay()
            }
            None => failed("reservation_lost", "the node holds no devices for the allocation"),
        }
    }

    /// The tasks for the agent, on a node of this SKU.
    pub(in crate::entities::node) fn tasks(&self, sku: &str, in_service: bool, now: Timestamp) -> Vec<AgentTask> {
        let of_tenants = self.holds.iter().filter_map(|(id, hold)| self.tenant_task(*id, hold, sku, in_service, now));
        let mut tasks: Vec<_> = of_tenants.chain(self.ssh_keys_tasks(sku)).collect();
        if in_service {
            tasks.extend(self.terminal_tasks(sku));
        }
        tasks
    }

    fn tenant_task(
        &self,
        allocation_id: AllocationId,
        hold: &Hold,
        sku: &str,
        in_service: bool,
        now: Timestamp,
    ) -> Option<AgentTask> {
        let place = || Self::slot(allocation_id, hold, sku);
        let (work, what) = match &hold.phase {
            // A node that is out of service, or waits for a clean-up proof, gets every task but this one.
            HoldPhase::Provisioning { work } if in_service && !self.has_unproven() => {
                (work, TaskKind::Provision { place: place(), keys: hold.keys.clone() })
            }
            // The pause after a failed attempt. A member of the release before stores no timer that would end it.
            HoldPhase::Abandoned { .. } if hold.again.is_some_and(|again| !again.is_due(now)) => return None,
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

    /// The result of a tenant's task. `fault_of` says which fault of the machine concerns an allocation.
    pub(in crate::entities::node) fn tenant_reported(
        &self,
        (task_id, attempt): (TaskId, u32),
        verdict: &TaskOutcome,
        fault_of: impl Fn(AllocationId) -> Option<&'static str>,
        ctx: &TransitionContext<'_>,
    ) -> Result<TenantReport, Rejection> {
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
        let proves = *verdict == (TaskOutcome::Succeeded { proof: Some(allocation_id) });
        match &hold.phase {
            HoldPhase::Provisioning { .. } if attempt == current => {
                let fault = fault_of(allocation_id);
                Ok(TenantReport::Changed(self.set_up_reported(allocation_id, verdict, fault, ctx)))
            }
            // A proof of an earlier attempt is as good as any.
            HoldPhase::Releasing { .. } | HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }
                if proves && attempt <= current =>
            {
                Ok(TenantReport::Proved { allocation_id, attempt })
            }
            HoldPhase::Releasing { .. } | HoldPhase::Abandoned { .. } if attempt == current => {
                Ok(TenantReport::Changed(self.clean_up_failed(allocation_id, attempt, verdict, ctx)))
            }
            // The allocation gave the attempt up before this result, and has reacted to that.
            HoldPhase::ReleaseFailed { .. } if attempt == current => Ok(TenantReport::Changed(Outcome::stay())),
            HoldPhase::Provisioning { .. }
            | HoldPhase::Releasing { .. }
            | HoldPhase::ReleaseFailed { .. }
            | HoldPhase::Abandoned { .. }
            | HoldPhase::Reserved
            | HoldPhase::SetupFailed { .. }
            | HoldPhase::Ready => Err(Rejection::StaleAttempt { given: attempt, current }),
        }
    }

    fn set_up_reported(
        &self,
        allocation_id: AllocationId,
        verdict: &TaskOutcome,
        fault: Option<&str>,
        ctx: &TransitionContext<'_>,
    ) -> Outcome<Self> {
        match verdict {
            // The fault was published once, when it was detected, and the allocation may not have received its reservation by then.
            TaskOutcome::Succeeded { .. } if let Some(fault) = fault => {
                let phase = HoldPhase::SetupFailed { reason: fault.to_owned(), detail: CRITICAL_FAULT.to_owned() };
                let failed =
                    Event::TenantFailed { node_id: outcome::node_id(ctx), allocation_id, reason: fault.to_owned() };
                self.with_phase(allocation_id, phase, CRITICAL_FAULT).event(failed)
            }
            TaskOutcome::Succeeded { .. } => {
                let step = self
                    .with_phase(allocation_id, HoldPhase::Ready, "the agent set the tenant up")
                    .event(Event::TenantReady { node_id: outcome::node_id(ctx), allocation_id });
                Self::ssh_keys_of_setup(step, allocation_id, ctx)
            }
            // Devices stay held: what was set up must be cleaned up, and the allocation has to request that.
            TaskOutcome::Failed { code, message } => self
                .with_phase(
                    allocation_id,
                    HoldPhase::SetupFailed { reason: code.clone(), detail: message.clone() },
                    format!("the agent could not set the tenant up: {message}"),
                )
                .event(Event::TenantFailed {
                    node_id: outcome::node_id(ctx),
                    allocation_id,
                    reason: reason_code(code),
                }),
        }
    }

    fn clean_up_failed(
        &self,
        allocation_id: AllocationId,
        attempt: u32,
        verdict: &TaskOutcome,
        ctx: &TransitionContext<'_>,
    ) -> Outcome<Self> {
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
                // No allocation will retry: it is dispatched again after a pause.
                HoldPhase::Abandoned { work } => {
                    hold.again = Some(Self::pause_of_clean_up(work, ctx.now));
                    HoldPhase::Abandoned {
                        work: PendingTask { attempt: work.attempt.saturating_add(1), ..work.clone() },
                    }
                }
                other @ (HoldPhase::Reserved
                | HoldPhase::Provisioning { .. }
                | HoldPhase::Ready
                | HoldPhase::SetupFailed { .. }
                | HoldPhase::ReleaseFailed { .. }) => other.clone(),
            };
        }
        let why = format!("clean-up attempt {attempt} failed: {detail}");
        let reason = reason_code(&reason);
        let remains = Event::TenantRemains { node_id: outcome::node_id(ctx), allocation_id, attempt, reason, detail };
        Outcome::to(next, why).event(remains)
    }
}
