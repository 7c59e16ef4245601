//! The tasks that administrators order for a node, and the findings that they clear.

use super::{AgentUpdate, CommandName, Node, Rejection, Reply, TaskSubject};
use crate::audit::AuditAction;
use crate::id::{FindingId, TaskId};
use crate::package_digest::PackageDigest;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Transition, TransitionContext};
use crate::task_type::TaskType;
use crate::validation::ValidationLevel;
use serde_json::json;

impl Node {
    pub(super) fn order_task(
        &self,
        task_type: TaskType,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        self.check_has_identity(CommandName::OrderTask)?;
        if !TaskType::ORDERED.contains(&task_type) {
            return Err(Rejection::NotOrdered { task_type });
        }
        let mut next = self.clone();
        let task_id = next.add_task(task_type, TaskSubject::default(), ctx).ok_or(Self::too_many_tasks())?;
        let metadata = json!({ "task_id": task_id, "task_type": task_type, "reason": reason });
        let audit = self.audit(AuditAction::NodesOrderTask, metadata);
        Ok(next.task_transition(task_id, format!("{task_type} was ordered: {reason}")).audit(audit))
    }

    pub(super) fn resume_task(
        &self,
        task_id: TaskId,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let mut next = self.clone();
        let task_type = next.tasks.resume(task_id, ctx)?;
        let metadata = json!({ "task_id": task_id, "task_type": task_type, "reason": reason });
        let audit = self.audit(AuditAction::NodesResumeTask, metadata);
        Ok(next.task_transition(task_id, format!("an operator resumed {task_type}: {reason}")).audit(audit))
    }

    /// An administrator's order, on a node without tenants: the load would disturb them, and they the measurements.
    pub(super) fn order_validation(
        &self,
        level: ValidationLevel,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        self.check_has_identity(CommandName::Validate)?;
        if let Some(allocation_id) = self.tenancy.holds.keys().next() {
            return Err(Rejection::InUse { allocation_id: *allocation_id });
        }
        let mut next = self.clone();
        let task_id = next.add_validation(level, ctx).ok_or(Self::too_many_tasks())?;
        let metadata = json!({ "task_id": task_id, "level": level, "reason": reason });
        let audit = self.audit(AuditAction::NodesValidate, metadata);
        Ok(next.task_transition(task_id, format!("a {} validation was ordered: {reason}", level.name())).audit(audit))
    }

    pub(super) fn order_update(
        &self,
        digest: PackageDigest,
        force: bool,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        self.check_has_identity(CommandName::UpdateAgent)?;
        if let Some(task) = self.tasks.latest_update().filter(|task| !task.has_ended()) {
            return Err(Rejection::UpdateInProgress { task_id: task.work.task_id });
        }
        let commit = ctx.policy.int(PolicyKey::NodeUpdateCommit, &Scopes::global(), ctx.now);
        let commit_seconds = u32::try_from(commit).unwrap_or(u32::MAX);
        let update = Some(AgentUpdate { digest: digest.clone(), force, commit_seconds, rollout_id: None });
        let mut next = self.clone();
        let subject = TaskSubject { update, ..TaskSubject::default() };
        let task_id = next.add_task(TaskType::AgentUpdate, subject, ctx).ok_or(Self::too_many_tasks())?;
        let metadata = json!({ "task_id": task_id, "digest": digest, "forced": force, "reason": reason });
        let audit = self.audit(AuditAction::NodesUpdateAgent, metadata);
        Ok(next.task_transition(task_id, format!("the update of its agent was ordered: {reason}")).audit(audit))
    }

    /// A reset of the GPU that is open is the one that is wanted.
    pub(super) fn order_gpu_reset(
        &self,
        uuid: &str,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        self.check_has_identity(CommandName::ResetGpu)?;
        let gpu_uuid = uuid.to_owned();
        if !self.machine.lists_gpu(uuid) {
            let reported = self.machine.gpus().map(|gpu| gpu.uuid.clone()).collect();
            return Err(Rejection::GpuUnknown { gpu_uuid, reported });
        }
        let open = self.repair.open_reset(uuid);
        if let Some(task_id) = open.filter(|task_id| self.tasks.by_id.contains_key(task_id)) {
            return Ok(Transition::stay(Reply::Task { task_id, node: Box::new(self.clone()) }));
        }
        if let Some(allocation_id) = self.tenancy.in_the_way_of_reset(uuid, self.machine.isolates_devices()) {
            return Err(Rejection::InUse { allocation_id });
        }
        if let Some(why) = self.obstacle_to_ordered_reset() {
            return Err(Rejection::GpuNotReset { gpu_uuid, why });
        }
        let mut next = self.clone();
        let subject = TaskSubject { gpu_uuid: Some(uuid), ..TaskSubject::default() };
        let task_id = next.add_task(TaskType::NodeGpuReset, subject, ctx).ok_or(Self::too_many_tasks())?;
        next.repair.begin_reset(uuid, task_id, ctx.now);
        let metadata = json!({ "task_id": task_id, "gpu_uuid": uuid, "reason": reason });
        let audit = self.audit(AuditAction::NodesResetGpu, metadata);
        Ok(next.task_transition(task_id, format!("the reset of {uuid} was ordered: {reason}")).audit(audit))
    }

    /// Why no GPU is reset on an administrator's order; `None` where one can be.
    fn obstacle_to_ordered_reset(&self) -> Option<String> {
        if let Some(why) = self.agent.lacks_task_type(TaskType::NodeGpuReset) {
            return Some(why);
        }
        if self.health.is_machine_critical() {
            let why = "the machine has a critical fault, which may hang the reset as well; reboot the machine";
            return Some(why.to_owned());
        }
        self.obstacle_to_reset()
    }

    /// An administrator looked at the machine: the finding has no consequence until it occurs again.
    pub(super) fn clear_finding(
        &self,
        finding_id: FindingId,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let mut next = self.clone();
        let Some(audit) = next.health.clear(finding_id, reason, ctx)? else { return Ok(self.stay_with_node()) };
        let (mut events, lifted) = next.take_back_recovered_holds(ctx);
        events.extend(next.update_evacuations(ctx));
        let step = next.transition_with_node(format!("finding {finding_id} was cleared: {reason}")).audit(audit);
        Ok(step.with(events, lifted))
    }
}
