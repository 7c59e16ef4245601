//! The results of tasks that the agent reports, and what follows from them.

use super::{
    AgentUpdate, Node, NodeTask, ProofGap, Rejection, Reply, StateCode, TaskOutcome, TenantReport, Validation,
    reason_code,
};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::TaskId;
use crate::state_machine::{Transition, TransitionContext};
use crate::task_type::TaskType;
use serde_json::{Value, json};

impl Node {
    pub(super) fn report(
        &self,
        serial: &str,
        (task_id, attempt): (TaskId, u32),
        verdict: TaskOutcome,
        (output, unproved): (Option<Value>, Option<&ProofGap>),
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        self.check_certificate(serial, ctx)?;
        if let Some(of_a_terminal) = self.tenancy.terminal_reported(task_id, attempt, &verdict, ctx) {
            return Ok(self.with_tenancy(of_a_terminal?));
        }
        if let Some(of_logins) = self.tenancy.ssh_keys_reported(task_id, attempt, &verdict, ctx) {
            return Ok(self.with_tenancy(of_logins?));
        }
        if self.tasks.by_id.contains_key(&task_id) {
            return self.task_reported(task_id, attempt, verdict, output, ctx);
        }
        let fault_of = |allocation_id| self.fault_of(allocation_id);
        Ok(match self.tenancy.tenant_reported((task_id, attempt), &verdict, fault_of, ctx)? {
            TenantReport::Changed(outcome) => self.with_tenancy(outcome),
            TenantReport::Proved { allocation_id, attempt } => {
                self.proved_clean((allocation_id, attempt), unproved, ctx)
            }
        })
    }

    /// The result of a task of the node itself.
    fn task_reported(
        &self,
        task_id: TaskId,
        attempt: u32,
        verdict: TaskOutcome,
        output: Option<Value>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let task = self.tasks.reported(task_id, attempt)?;
        let task_type = task.task_type;
        let (failed, minimums) = (self.failed_level(), self.minimums(ctx));
        let (verdict, validation) = Validation::judge(task, (verdict, output.as_ref()), minimums, failed, ctx.now);
        let why = match &verdict {
            TaskOutcome::Succeeded { .. } => format!("the agent did {task_type}"),
            TaskOutcome::Failed { code, message } => format!("{task_type} failed ({code}): {message}"),
        };
        let of_update = self.update_event(task, &verdict);
        let is_validated = Validation::is_passed_by(task, &verdict, minimums, failed);
        let mut next = self.clone();
        if is_validated && task.validation.is_some() {
            next.repair.forget_unfit_gpus();
        }
        if let Some(validation) = validation {
            next.validation.note(validation, failed);
        }
        let unfit = match (&verdict, task_type) {
            (TaskOutcome::Failed { message, .. }, TaskType::NodeValidate)
                if task.gpu_uuid.is_none() && !self.lifecycle.phase.is_gone() =>
            {
                Some(message.clone())
            }
            _ => None,
        };
        next.end_rollout_update(task_id, &verdict);
        next.tasks.end(task_id, verdict, output, ctx.now);
        let Some(unfit) = unfit else {
            let (events, audits) = if is_validated { next.follow_validation(ctx) } else { (Vec::new(), Vec::new()) };
            return Ok(Transition::to(next, Reply::Done, why).with(of_update.into_iter().chain(events), audits));
        };
        let message = next.validation.unfit_message(&unfit);
        let event = next.lifecycle.enter_quarantine(StateCode::ValidationFailed, &message, ctx);
        let audit = self.audit(AuditAction::NodesQuarantine, json!({ "code": StateCode::ValidationFailed }));
        Ok(Transition::to(next, Reply::Done, why).with(event, [audit]))
    }

    /// What follows from the result of an update.
    fn update_event(&self, task: &NodeTask, verdict: &TaskOutcome) -> Option<Event> {
        let AgentUpdate { digest, rollout_id, .. } = task.update.clone()?;
        let node_id = self.id;
        Some(match verdict {
            TaskOutcome::Succeeded { .. } => Event::AgentUpdated { node_id, digest, rollout_id },
            TaskOutcome::Failed { code, .. } => {
                Event::AgentUpdateFailed { node_id, digest, reason: reason_code(code), rollout_id }
            }
        })
    }
}
