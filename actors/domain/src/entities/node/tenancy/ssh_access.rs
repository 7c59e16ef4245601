//! The SSH keys of the tenants: the keys of a tenant that is set up are changed by the agent's task `ssh_keys.reconcile`.
//!
//! The last change wins. A newer one replaces one without a result, as a higher attempt of the same task: the agent executes a tenant's
//! tasks one after the other, and a result of an earlier attempt is rejected. An attempt that failed, or has no result in time, is retried
//! after a pause, for as long as the tenant exists.

use super::{Hold, HoldPhase, Tenancy};
use crate::audit::AuditAction;
use crate::entities::node::outcome::{self, Outcome};
use crate::entities::node::{AgentTask, PendingTask, Rejection, TaskKind, TaskOutcome, reason_code};
use crate::event::Event;
use crate::id::{AllocationId, TaskId};
use crate::policy::{PolicyKey, Scopes};
use crate::resend_timer;
use crate::ssh_key::{self, AuthorizedKey};
use crate::state_machine::{Deadline, Timestamp, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The revision of a tenant's keys on the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldSshAccess {
    pub revision: u64,
    /// The revision that the agent has written.
    pub written: u64,
    /// The pending task of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<SshKeysTask>,
}

/// A task to write the keys of a hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshKeysTask {
    pub work: PendingTask,
    /// Since when the written keys differ from the wanted ones.
    pub since: Timestamp,
    /// The deadline for the agent.
    pub due_at: Timestamp,
    /// Where the last attempt failed: the end of the pause before the next one.
    pub rests_until: Option<Timestamp>,
}

impl HoldSshAccess {
    pub(super) const fn initial(revision: u64) -> Self {
        Self { revision, written: 0, order: None }
    }
}

impl Hold {
    /// The pending task, where the tenant is set up.
    fn pending_ssh_keys_task(&self) -> Option<&SshKeysTask> {
        self.logins.order.as_ref().filter(|_| matches!(self.phase, HoldPhase::Ready))
    }
}

impl Tenancy {
    pub(in crate::entities::node) fn reconcile_logins(
        &self,
        allocation_id: AllocationId,
        revision: u64,
        keys: Vec<AuthorizedKey>,
        ctx: &TransitionContext<'_>,
    ) -> Outcome<Self> {
        let Some(hold) = self.holds.get(&allocation_id) else { return Outcome::stay() };
        let is_set_up = match hold.phase {
            // The keys are part of the set-up task.
            HoldPhase::Reserved => false,
            // The set-up task may carry earlier keys.
            HoldPhase::Provisioning { .. } | HoldPhase::Ready => true,
            // No user logs in any more.
            HoldPhase::SetupFailed { .. }
            | HoldPhase::Releasing { .. }
            | HoldPhase::ReleaseFailed { .. }
            | HoldPhase::Abandoned { .. } => return Outcome::stay(),
        };
        let known = &hold.logins;
        if revision <= known.revision {
            return match known.written == revision {
                true => Outcome::to(self.clone(), "the applied keys were requested again")
                    .event(Event::LoginsWritten { node_id: outcome::node_id(ctx), allocation_id, revision }),
                false => Outcome::stay().wake_agent(),
            };
        }
        let mut next = self.clone();
        if let Some(hold) = next.holds.get_mut(&allocation_id) {
            hold.keys = ssh_key::within_bound(keys);
            hold.logins.revision = revision;
            if is_set_up {
                hold.logins.order = Some(replacement_task(hold.logins.order.as_ref(), ctx));
            }
        }
        Outcome::to(next, format!("allocation {allocation_id}: its SSH keys have changed (revision {revision})"))
            .wake_agent()
    }

    /// The set-up has written the last revision, unless there is a task for another one.
    pub(super) fn ssh_keys_of_setup(
        mut step: Outcome<Self>,
        allocation_id: AllocationId,
        ctx: &TransitionContext<'_>,
    ) -> Outcome<Self> {
        let hold = step.next.as_mut().and_then(|next| next.holds.get_mut(&allocation_id));
        let Some(hold) = hold.filter(|hold| hold.logins.order.is_none() && hold.logins.revision > 0) else {
            return step;
        };
        let revision = hold.logins.revision;
        hold.logins.written = revision;
        step.event(Event::LoginsWritten { node_id: outcome::node_id(ctx), allocation_id, revision })
    }

    pub(super) fn ssh_keys_tasks(&self, sku: &str) -> impl Iterator<Item = AgentTask> {
        self.holds.iter().filter_map(move |(allocation_id, hold)| {
            let order = hold.pending_ssh_keys_task().filter(|order| order.rests_until.is_none())?;
            let place = Self::slot(*allocation_id, hold, sku);
            Some(AgentTask {
                work: order.work.clone(),
                what: TaskKind::ReconcileLogins { place, keys: hold.keys.clone() },
            })
        })
    }

    /// The result of such a task; `None` where the task is of another type.
    pub(in crate::entities::node) fn ssh_keys_reported(
        &self,
        task_id: TaskId,
        attempt: u32,
        verdict: &TaskOutcome,
        ctx: &TransitionContext<'_>,
    ) -> Option<Result<Outcome<Self>, Rejection>> {
        let of_task = |hold: &Hold| hold.logins.order.clone().filter(|order| order.work.task_id == task_id);
        let (allocation_id, order) = self.holds.iter().find_map(|(id, hold)| Some((*id, of_task(hold)?)))?;
        let current = order.work.attempt;
        if attempt != current || order.rests_until.is_some() {
            return Some(Err(Rejection::StaleAttempt { given: attempt, current }));
        }
        let mut next = self.clone();
        let hold = next.holds.get_mut(&allocation_id)?;
        let revision = hold.logins.revision;
        let is_written = matches!(verdict, TaskOutcome::Succeeded { .. });
        let (result, code, why) = match verdict {
            TaskOutcome::Succeeded { .. } => {
                hold.logins.written = revision;
                hold.logins.order = None;
                (
                    "ok",
                    None,
                    format!("allocation {allocation_id}: the agent applied its SSH keys (revision {revision})"),
                )
            }
            TaskOutcome::Failed { code, message } => {
                hold.logins.order = Some(order.backed_off(ctx.now));
                let why = format!("allocation {allocation_id}: the agent could not apply its SSH keys: {message}");
                ("failed", Some(reason_code(code)), why)
            }
        };
        let fingerprints: Vec<_> = hold.keys.iter().map(|key| key.fingerprint.clone()).collect();
        let metadata = json!({
            "allocation_id": allocation_id, "revision": revision, "fingerprints": fingerprints, "result": result, "code": code,
        });
        let written = Event::LoginsWritten { node_id: outcome::node_id(ctx), allocation_id, revision };
        let step = Outcome::to(next, why).audit(outcome::audit(AuditAction::SshKeysReconcile, metadata, ctx));
        Some(Ok(if is_written { step.event(written) } else { step }))
    }

    /// When a task is dispatched again.
    pub(in crate::entities::node) fn ssh_keys_due_at(&self) -> Option<Timestamp> {
        self.holds.values().filter_map(Hold::pending_ssh_keys_task).map(SshKeysTask::retry_at).min()
    }

    /// An operator has to see, after some time, that a removed key still opens the tenant. `lacks` says why the agent writes none.
    pub(in crate::entities::node) fn ssh_keys_deadline(&self, lacks: Option<String>) -> Option<Deadline> {
        let waits = self.holds.iter().filter_map(|(id, hold)| Some((id, hold.pending_ssh_keys_task()?.due_at)));
        let first = waits.min_by_key(|(_, due_at)| *due_at);
        let of_the_agent = lacks.map(|why| format!("; {why}")).unwrap_or_default();
        first.map(|(id, due_at)| {
            Deadline::new(due_at, format!("the keys of allocation {id} are not written yet{of_the_agent}"))
        })
    }

    /// Retries what has paused, or has no result in time.
    pub(in crate::entities::node) fn retry_stale_ssh_keys(&self, ctx: &TransitionContext<'_>) -> Outcome<Self> {
        let mut next = self.clone();
        let mut again = false;
        for hold in next.holds.values_mut() {
            let due = hold.pending_ssh_keys_task().filter(|order| order.retry_at() <= ctx.now).cloned();
            if let Some(order) = due {
                hold.logins.order = Some(order.retried(ctx));
                again = true;
            }
        }
        if !again {
            return Outcome::stay();
        }
        Outcome::to(next, "keys that are not written are offered again").wake_agent()
    }
}

impl SshKeysTask {
    fn retry_at(&self) -> Timestamp {
        self.rests_until.unwrap_or(self.work.deadline_at)
    }

    fn retried(&self, ctx: &TransitionContext<'_>) -> Self {
        let work = PendingTask {
            attempt: self.work.attempt.saturating_add(1),
            ordered_at: ctx.now,
            deadline_at: ctx.now + ctx.policy.seconds(PolicyKey::NodeTaskTimeout, &Scopes::global(), ctx.now),
            ..self.work.clone()
        };
        Self { work, rests_until: None, ..self.clone() }
    }

    /// The longer it has failed, the longer it pauses.
    fn backed_off(&self, now: Timestamp) -> Self {
        let pause = (now - self.since).clamp(resend_timer::FIRST, resend_timer::LONGEST);
        Self { rests_until: Some(now + pause), ..self.clone() }
    }
}

/// A task for a new revision, which replaces one without a result.
fn replacement_task(before: Option<&SshKeysTask>, ctx: &TransitionContext<'_>) -> SshKeysTask {
    let deadline_at = ctx.now + ctx.policy.seconds(PolicyKey::NodeTaskTimeout, &Scopes::global(), ctx.now);
    let (task_id, attempt) = match before {
        Some(before) => (before.work.task_id, before.work.attempt.saturating_add(1)),
        None => (TaskId(ctx.new_id(0)), 1),
    };
    let work = PendingTask { task_id, attempt, ordered_at: ctx.now, deadline_at, origin: Some(ctx.origin()) };
    let since = before.map_or(ctx.now, |before| before.since);
    SshKeysTask { work, since, due_at: before.map_or(deadline_at, |before| before.due_at), rests_until: None }
}
