//! Who may log in to the tenants: the keys of a tenant that is set up are changed by a task of the agent's, `ssh_keys.reconcile`.
//!
//! The last wish wins. A newer one takes the place of one that the agent has not reported on, as a higher attempt of the same task: the
//! agent does a tenant's tasks one after the other, and what it reports of the attempt before is refused. An attempt that failed, or was
//! not reported on in time, is made again after a while, for as long as the tenant is there.

use super::{Hold, HoldPhase, Node, Order, Place, Rejection, Reply, Verdict, What, Work};
use crate::again;
use crate::allocation::AuthorizedKey;
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::{AllocationId, TaskId};
use crate::machine::{Ctx, Deadline, Effect, Step, Timestamp};
use crate::policy::{Key, Scopes};
use crate::task_type::TaskType;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Which change of a tenant's keys the node has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldLogins {
    pub revision: u64,
    /// The one that the agent has written.
    pub written: u64,
    /// What the agent is to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<LoginOrder>,
}

/// The agent is to write the keys of the hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoginOrder {
    pub work: Work,
    /// Since when the agent has not written what is wished.
    pub since: Timestamp,
    /// By then it should have.
    pub due_at: Timestamp,
    /// Where the last attempt failed: until when the next one waits.
    pub rests_until: Option<Timestamp>,
}

impl HeldLogins {
    pub(super) const fn asked_with(revision: u64) -> Self {
        Self { revision, written: 0, order: None }
    }
}

impl Hold {
    /// What the agent is to write, where the tenant is set up.
    fn login_order(&self) -> Option<&LoginOrder> {
        self.logins.order.as_ref().filter(|_| matches!(self.phase, HoldPhase::Ready))
    }
}

impl Node {
    pub(super) fn reconcile_logins(
        &self,
        allocation_id: AllocationId,
        revision: u64,
        keys: Vec<AuthorizedKey>,
        ctx: &Ctx<'_>,
    ) -> Step<Self> {
        let Some(hold) = self.holds.get(&allocation_id) else { return Step::stay(Reply::Done) };
        let is_set_up = match hold.phase {
            // It is told with the rest.
            HoldPhase::Reserved => false,
            // The agent may have been told the keys of before.
            HoldPhase::Provisioning { .. } | HoldPhase::Ready => true,
            // Nobody logs in any more.
            HoldPhase::SetupFailed { .. }
            | HoldPhase::Releasing { .. }
            | HoldPhase::ReleaseFailed { .. }
            | HoldPhase::Abandoned { .. } => return Step::stay(Reply::Done),
        };
        let known = &hold.logins;
        if revision <= known.revision {
            return match known.written == revision {
                true => Step::to(self.clone(), Reply::Done, "asked again for keys that are written")
                    .event(Event::LoginsWritten { node_id: self.id, allocation_id, revision }),
                false => Step::stay(Reply::Done).effect(Effect::WakeNode(self.id)),
            };
        }
        let mut next = self.clone();
        if let Some(hold) = next.holds.get_mut(&allocation_id) {
            hold.keys = keys;
            hold.logins.revision = revision;
            if is_set_up {
                hold.logins.order = Some(wished(hold.logins.order.as_ref(), ctx));
            }
        }
        Step::to(
            next,
            Reply::Done,
            format!("allocation {allocation_id}: who may log in has changed (revision {revision})"),
        )
        .effect(Effect::WakeNode(self.id))
    }

    /// What was set up has the keys of the last change, unless there is an order for another.
    pub(super) fn logins_of_setup(&self, mut step: Step<Self>, allocation_id: AllocationId) -> Step<Self> {
        let hold = step.next.as_mut().and_then(|next| next.holds.get_mut(&allocation_id));
        let Some(hold) = hold.filter(|hold| hold.logins.order.is_none() && hold.logins.revision > 0) else {
            return step;
        };
        let revision = hold.logins.revision;
        hold.logins.written = revision;
        step.event(Event::LoginsWritten { node_id: self.id, allocation_id, revision })
    }

    pub(super) fn login_orders(&self) -> impl Iterator<Item = Order> + '_ {
        self.holds.iter().filter_map(|(allocation_id, hold)| {
            let order = hold.login_order().filter(|order| order.rests_until.is_none())?;
            let place = Place {
                allocation_id: *allocation_id,
                placed: hold.placed.clone(),
                sku: self.registration.sku.name.clone(),
            };
            Some(Order { work: order.work.clone(), what: What::ReconcileLogins { place, keys: hold.keys.clone() } })
        })
    }

    /// What the agent says of such a task; `None` where the task is none.
    pub(super) fn logins_reported(
        &self,
        task_id: TaskId,
        attempt: u32,
        verdict: &Verdict,
        ctx: &Ctx<'_>,
    ) -> Option<Result<Step<Self>, Rejection>> {
        let of_task = |hold: &Hold| hold.logins.order.clone().filter(|order| order.work.task_id == task_id);
        let (allocation_id, order) = self.holds.iter().find_map(|(id, hold)| Some((*id, of_task(hold)?)))?;
        let current = order.work.attempt;
        if attempt != current || order.rests_until.is_some() {
            return Some(Err(Rejection::StaleAttempt { given: attempt, current }));
        }
        let mut next = self.clone();
        let hold = next.holds.get_mut(&allocation_id)?;
        let revision = hold.logins.revision;
        let (result, code, why) = match verdict {
            Verdict::Succeeded { .. } => {
                hold.logins.written = revision;
                hold.logins.order = None;
                (
                    "ok",
                    None,
                    format!("allocation {allocation_id}: the agent wrote who may log in (revision {revision})"),
                )
            }
            Verdict::Failed { code, message } => {
                hold.logins.order = Some(order.resting(ctx.now));
                let why = format!("allocation {allocation_id}: the agent could not write who may log in: {message}");
                ("failed", Some(super::tenancy::reason_code(code)), why)
            }
        };
        let fingerprints: Vec<_> = hold.keys.iter().map(|key| key.fingerprint.clone()).collect();
        let metadata = json!({
            "allocation_id": allocation_id, "revision": revision, "fingerprints": fingerprints, "result": result, "cause": code,
        });
        let written = Event::LoginsWritten { node_id: self.id, allocation_id, revision };
        let step = Step::to(next, Reply::Done, why).audit(self.audit(AuditAction::SshKeysReconcile, metadata));
        Some(Ok(if result == "ok" { step.event(written) } else { step }))
    }

    /// When something is to be offered again.
    pub(super) fn logins_are_due_at(&self) -> Option<Timestamp> {
        self.holds.values().filter_map(Hold::login_order).map(LoginOrder::again_at).min()
    }

    /// A key that was taken away and still opens is an operator's matter, sooner or later.
    pub(super) fn logins_deadline(&self) -> Option<Deadline> {
        let waits = self.holds.iter().filter_map(|(id, hold)| Some((id, hold.login_order()?.due_at)));
        let first = waits.min_by_key(|(_, due_at)| *due_at);
        let of_the_agent = self.withholds(TaskType::SshKeysReconcile).map(|why| format!("; {why}")).unwrap_or_default();
        first.map(|(id, due_at)| {
            Deadline::new(due_at, format!("the keys of allocation {id} are not written yet{of_the_agent}"))
        })
    }

    /// What has rested, or was not reported on in time, is offered again, as part of this step.
    pub(super) fn stale_logins(&self, step: Step<Self>, ctx: &Ctx<'_>) -> Step<Self> {
        let mut next = step.next.clone().unwrap_or_else(|| self.clone());
        let mut again = false;
        for hold in next.holds.values_mut() {
            let due = hold.login_order().filter(|order| order.again_at() <= ctx.now).cloned();
            if let Some(order) = due {
                hold.logins.order = Some(order.again(ctx));
                again = true;
            }
        }
        if !again {
            return step;
        }
        let why = if step.next.is_some() {
            step.why.clone()
        } else {
            "keys that are not written are offered again".to_owned()
        };
        Step { next: Some(next), why, ..step }.effect(Effect::WakeNode(self.id))
    }
}

impl LoginOrder {
    fn again_at(&self) -> Timestamp {
        self.rests_until.unwrap_or(self.work.deadline_at)
    }

    fn again(&self, ctx: &Ctx<'_>) -> Self {
        let work = Work {
            attempt: self.work.attempt.saturating_add(1),
            ordered_at: ctx.now,
            deadline_at: ctx.now + ctx.policy.seconds(Key::NodeTaskTimeout, &Scopes::global(), ctx.now),
            ..self.work.clone()
        };
        Self { work, rests_until: None, ..self.clone() }
    }

    /// The longer it has failed, the longer it waits.
    fn resting(&self, now: Timestamp) -> Self {
        let pause = (now - self.since).clamp(again::FIRST, again::LONGEST);
        Self { rests_until: Some(now + pause), ..self.clone() }
    }
}

/// A new wish, in the place of one that was not reported on.
fn wished(before: Option<&LoginOrder>, ctx: &Ctx<'_>) -> LoginOrder {
    let deadline_at = ctx.now + ctx.policy.seconds(Key::NodeTaskTimeout, &Scopes::global(), ctx.now);
    let (task_id, attempt) = match before {
        Some(before) => (before.work.task_id, before.work.attempt.saturating_add(1)),
        None => (TaskId(ctx.new_id(0)), 1),
    };
    let work = Work { task_id, attempt, ordered_at: ctx.now, deadline_at, origin: Some(ctx.origin()) };
    let since = before.map_or(ctx.now, |before| before.since);
    LoginOrder { work, since, due_at: before.map_or(deadline_at, |before| before.due_at), rests_until: None }
}
