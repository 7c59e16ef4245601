//! Two people decide on a SKU's status: one in role `platform_operations`, one in role `inventory_owner` (decisions 3, *SKU*; 7).
//!
//! Each says so once; the second within policy `sku.approval_ttl_seconds`. What waits is withdrawn by whoever asks for the status that
//! there is, replaced by an approval of another change, and void where what was approved is revised or the first one's role is revoked.

use super::{Approval, Change, Pending, Rejection, Sku};
use crate::audit::AuditAction;
use crate::authz::{Grant, PlatformRole, Principal};
use crate::machine::{Ctx, Deadline, Step};
use crate::policy::{Key, Scopes};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The roles that have to agree.
const ROLES: [PlatformRole; 2] = [PlatformRole::PlatformOperations, PlatformRole::InventoryOwner];

/// One person's approval, and what was seen when it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Approve {
    pub change: Change,
    pub reason: String,
    /// Which of two roles that the approver holds. Otherwise the one that they hold, or that is missing.
    pub role: Option<PlatformRole>,
    pub impact_review: Option<String>,
    pub rollback_plan: Option<String>,
    pub seen: Seen,
}

/// What a SKU cannot know of itself, as the edge found it in Postgres.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Of the SKU, when it was looked at: [`Seen::first`] is about what waits in that version.
    pub version: i64,
    pub in_use: InUse,
    /// The platform roles of the one who approved first. If those change before the commit, the commit fails.
    pub first: Option<Grant>,
}

/// Who refers to the SKU. A node or allocation that comes after the look is not counted: it goes on in any case, and only the texts
/// may be missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InUse {
    /// Not removed.
    pub nodes: u64,
    /// Not released.
    pub allocations: u64,
}

impl InUse {
    const fn is_free(self) -> bool {
        self.nodes == 0 && self.allocations == 0
    }
}

impl Pending {
    pub(super) fn deadline(&self) -> Deadline {
        let missing = ROLES.into_iter().find(|role| *role != self.first.role).map_or("", PlatformRole::name);
        let change = self.first.change.name();
        Deadline::new(self.until, format!("to {change} it, a second person in role {missing} has to approve"))
    }
}

impl Sku {
    pub(super) fn approve(&self, given: Approve, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let role = self.role_of(&given, ctx)?;
        if given.seen.version != ctx.version {
            return Err(Rejection::Moved);
        }
        let waits = self.pending.as_ref().filter(|pending| ctx.now < pending.until);
        // The status that there is, or for a draft the one before the first: what waits against it is not wanted.
        if given.change.to() == self.status || waits.is_some() && !given.change.may_follow(self.status) {
            return Ok(self.withdraw(&given, ctx));
        }
        if !given.change.may_follow(self.status) {
            let (status, command) = (self.status.name().to_owned(), given.change.name().to_owned());
            return Err(Rejection::WrongStatus { status, command });
        }
        let first = waits.map(|pending| &pending.first).filter(|first| first.change == given.change);
        // Of one whose role was revoked since, the approval does not count.
        let stands = |first: &&Approval| given.seen.first.as_ref().is_some_and(|now| now.roles.contains(&first.role));
        let first = first.filter(stands).zip(given.seen.first.as_ref().map(|now| now.from));
        reviewed(&given, first.map(|(first, _)| first))?;
        let approval = approval(given, role, ctx)?;
        Ok(match first {
            None => self.begun(approval, ctx),
            Some((first, _)) if first.user_id == approval.user_id || first.role == role => {
                Step::stay(Box::new(self.clone()))
            }
            Some((first, footing)) => self.decided(first.clone(), approval).resting_on(footing),
        })
    }

    /// The role in which the approval is given.
    fn role_of(&self, given: &Approve, ctx: &Ctx<'_>) -> Result<PlatformRole, Rejection> {
        if let Some(role) = given.role {
            let held = ROLES.contains(&role) && ctx.by.holds(role);
            return if held { Ok(role) } else { Err(Rejection::RoleNotHeld { role: Some(role) }) };
        }
        let taken = self.pending.as_ref().map(|pending| &pending.first).filter(|first| first.change == given.change);
        let taken = taken.map(|first| first.role);
        let held = || ROLES.into_iter().filter(|role| ctx.by.holds(*role));
        let missing = held().find(|role| taken != Some(*role));
        missing.or_else(|| held().next()).ok_or(Rejection::RoleNotHeld { role: None })
    }

    fn begun(&self, first: Approval, ctx: &Ctx<'_>) -> Step<Self> {
        let ttl = ctx.policy.seconds(Key::SkuApprovalTtl, &Scopes::global(), ctx.now);
        let why = format!("{} approved it to {}: {}", first.role, first.change.name(), first.reason);
        let replaced = self.pending.as_ref().map(|pending| &pending.first);
        let audit = self.audit(AuditAction::SkusApprove, json!({ "approval": first, "replaced": replaced }));
        let next = Self { pending: Some(Pending { first, until: ctx.now + ttl }), ..self.clone() };
        let reply = Box::new(next.clone());
        Step::to(next, reply, why).audit(audit)
    }

    fn decided(&self, first: Approval, second: Approval) -> Step<Self> {
        let (change, from) = (second.change, self.status.name().to_owned());
        let approved = self.audit(AuditAction::SkusApprove, json!({ "approval": second }));
        let done = self.audit(
            change.audited_as(),
            json!({ "reason": second.reason, "approved_by": [approver(&first), approver(&second)] }),
        );
        let why = format!("both approved it to {}: {}", change.name(), second.reason);
        let next = Self { status: change.to(), approvals: vec![first, second], pending: None, ..self.clone() };
        next.said(Some(from), &why).audit(approved).audit(done)
    }

    fn withdraw(&self, given: &Approve, ctx: &Ctx<'_>) -> Step<Self> {
        let Some(pending) = &self.pending else { return Step::stay(Box::new(self.clone())) };
        let metadata = json!({ "withdrawn": pending.first, "by": ctx.by.to_string(), "reason": given.reason });
        let audit = self.audit(AuditAction::SkusWithdrawApproval, metadata);
        self.without_pending(format!("asked to {}: {}", given.change.name(), given.reason)).audit(audit)
    }

    pub(super) fn expire(&self, ctx: &Ctx<'_>) -> Step<Self> {
        match &self.pending {
            Some(pending) if pending.until <= ctx.now => {
                let audit = self.audit(AuditAction::SkusExpireApproval, json!({ "expired": pending.first }));
                self.without_pending("nobody else approved in time".to_owned()).audit(audit)
            }
            Some(_) | None => Step::stay(Box::new(self.clone())),
        }
    }

    fn without_pending(&self, why: String) -> Step<Self> {
        let next = Self { pending: None, ..self.clone() };
        let reply = Box::new(next.clone());
        Step::to(next, reply, why)
    }
}

/// A SKU in use is deactivated only with both texts, from either of the two.
fn reviewed(given: &Approve, first: Option<&Approval>) -> Result<(), Rejection> {
    if given.change != Change::Deactivate || given.seen.in_use.is_free() {
        return Ok(());
    }
    let texts = [
        ("impact_review", &given.impact_review, first.map(|first| &first.impact_review)),
        ("rollback_plan", &given.rollback_plan, first.map(|first| &first.rollback_plan)),
    ];
    let missing = texts.iter().find(|(_, own, before)| own.is_none() && before.is_none_or(Option::is_none));
    missing.map_or(Ok(()), |(field, ..)| Err(Rejection::ReviewMissing { field: (*field).to_owned() }))
}

fn approval(given: Approve, role: PlatformRole, ctx: &Ctx<'_>) -> Result<Approval, Rejection> {
    // Platform roles are people's; the table of permissions lets nobody else come so far.
    let Principal::Caller(caller) = ctx.by else { return Err(Rejection::RoleNotHeld { role: Some(role) }) };
    let Approve { change, reason, role: _, impact_review, rollback_plan, seen: Seen { in_use, .. } } = given;
    let user_id = caller.user_id.clone();
    Ok(Approval { change, role, user_id, at: ctx.now, reason, impact_review, rollback_plan, in_use })
}

fn approver(approval: &Approval) -> serde_json::Value {
    json!({ "role": approval.role, "user_id": approval.user_id })
}
