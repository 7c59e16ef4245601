//! Two people decide on a SKU's status: one in role `platform_operations`, one in role `inventory_owner` (decisions 3, *SKU*; 7).
//!
//! Each approves once; the second within policy `sku.approval_ttl_seconds`. A pending approval is withdrawn by a request for the current
//! status, replaced by an approval of another change, and void where the entry is revised or the first approver's role is revoked.

use super::{Approval, PendingChange, Rejection, Sku, StatusChange};
use crate::audit::AuditAction;
use crate::authz::{Grant, PlatformRole, Principal};
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Deadline, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The roles that have to approve.
const ROLES: [PlatformRole; 2] = [PlatformRole::PlatformOperations, PlatformRole::InventoryOwner];

/// One person's approval, and its context at the time of the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApprovalRequest {
    pub change: StatusChange,
    pub reason: String,
    /// The role, where the approver holds both. Otherwise the one that they hold, or that is missing.
    pub role: Option<PlatformRole>,
    pub impact_review: Option<String>,
    pub rollback_plan: Option<String>,
    pub seen: ApprovalContext,
}

/// The context that the edge has read from Postgres.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApprovalContext {
    /// The version of the SKU when the context was read: [`ApprovalContext::first`] is about the pending change of that version.
    pub version: i64,
    pub in_use: SkuUsage,
    /// The platform roles of the first approver. If they change before the commit, the commit fails.
    pub first: Option<Grant>,
}

/// The usage of the SKU. A node or allocation that comes after the read is not counted: it continues in any case, and only the texts may
/// be missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkuUsage {
    /// Not removed.
    pub nodes: u64,
    /// Not released.
    pub allocations: u64,
}

/// A text that the deactivation of a SKU in use requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum ReviewText {
    ImpactReview,
    RollbackPlan,
}

impl SkuUsage {
    const fn is_free(self) -> bool {
        self.nodes == 0 && self.allocations == 0
    }
}

impl PendingChange {
    pub(super) fn deadline(&self) -> Deadline {
        let (missing, change) = (missing_role(&self.first).name(), self.first.change.name());
        Deadline::new(self.until, format!("to {change} it, a second person in role {missing} has to approve"))
    }
}

impl Sku {
    pub(super) fn approve(
        &self,
        given: ApprovalRequest,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let role = self.role_of(&given, ctx)?;
        if given.seen.version != ctx.version {
            return Err(Rejection::Moved);
        }
        let waits = self.pending.as_ref().filter(|pending| ctx.now < pending.until);
        // A request for the current status, or for a draft the one before the first, withdraws a pending change.
        if given.change.to() == self.status || waits.is_some() && !given.change.may_change_from(self.status) {
            return Ok(self.withdraw(&given, ctx));
        }
        if !given.change.may_change_from(self.status) {
            return Err(Rejection::WrongStatus { status: self.status, command: given.change });
        }
        let first = waits.map(|pending| &pending.first).filter(|first| first.change == given.change);
        // The approval does not count where the approver's role was revoked since.
        let stands = |first: &&Approval| given.seen.first.as_ref().is_some_and(|now| now.roles.contains(&first.role));
        let first = first.filter(stands).zip(given.seen.first.as_ref().map(|now| now.from));
        reviewed(&given, first.map(|(first, _)| first))?;
        let approval = approval(given, role, ctx)?;
        Ok(match first {
            None => self.first_approval(approval, ctx),
            Some((first, _)) if first.user_id == approval.user_id || first.role == role => {
                return Err(Rejection::ApprovedBefore { change: first.change, missing: missing_role(first) });
            }
            Some((first, precondition)) => self.approved(first.clone(), approval).precondition(precondition),
        })
    }

    /// The role in which the approval is given.
    fn role_of(&self, given: &ApprovalRequest, ctx: &TransitionContext<'_>) -> Result<PlatformRole, Rejection> {
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

    fn first_approval(&self, first: Approval, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let ttl = ctx.policy.seconds(PolicyKey::SkuApprovalTtl, &Scopes::global(), ctx.now);
        let why = format!("{} approved it to {}: {}", first.role, first.change.name(), first.reason);
        let replaced = self.pending.as_ref().map(|pending| &pending.first);
        let audit = self.audit(AuditAction::SkusApprove, json!({ "approval": first, "replaced": replaced }));
        let next = Self { pending: Some(PendingChange { first, until: ctx.now + ttl }), ..self.clone() };
        let reply = Box::new(next.clone());
        Transition::to(next, reply, why).audit(audit)
    }

    fn approved(&self, first: Approval, second: Approval) -> Transition<Self> {
        let (change, from) = (second.change, self.status.name().to_owned());
        let approved = self.audit(AuditAction::SkusApprove, json!({ "approval": second }));
        let done = self.audit(
            change.audited_as(),
            json!({ "reason": second.reason, "approved_by": [approver(&first), approver(&second)] }),
        );
        let why = format!("both approved it to {}: {}", change.name(), second.reason);
        let next = Self { status: change.to(), approvals: vec![first, second], pending: None, ..self.clone() };
        next.status_changed(Some(from), &why).audit(approved).audit(done)
    }

    fn withdraw(&self, given: &ApprovalRequest, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let Some(pending) = &self.pending else { return Transition::stay(Box::new(self.clone())) };
        let metadata = json!({ "withdrawn": pending.first, "by": ctx.by.to_string(), "reason": given.reason });
        let audit = self.audit(AuditAction::SkusWithdrawApproval, metadata);
        self.without_pending(format!("asked to {}: {}", given.change.name(), given.reason)).audit(audit)
    }

    pub(super) fn expire(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match &self.pending {
            Some(pending) if pending.until <= ctx.now => {
                let audit = self.audit(AuditAction::SkusExpireApproval, json!({ "expired": pending.first }));
                self.without_pending("no second approval arrived in time".to_owned()).audit(audit)
            }
            Some(_) | None => Transition::stay(Box::new(self.clone())),
        }
    }

    fn without_pending(&self, why: String) -> Transition<Self> {
        let next = Self { pending: None, ..self.clone() };
        let reply = Box::new(next.clone());
        Transition::to(next, reply, why)
    }
}

/// The role of the second person.
fn missing_role(first: &Approval) -> PlatformRole {
    match first.role {
        PlatformRole::InventoryOwner => PlatformRole::PlatformOperations,
        PlatformRole::PlatformOperations | PlatformRole::BillingOperations | PlatformRole::Auditor => {
            PlatformRole::InventoryOwner
        }
    }
}

/// Checks that a SKU in use is deactivated only with both texts, from either of the two.
fn reviewed(given: &ApprovalRequest, first: Option<&Approval>) -> Result<(), Rejection> {
    if given.change != StatusChange::Deactivate || given.seen.in_use.is_free() {
        return Ok(());
    }
    let texts = [
        (ReviewText::ImpactReview, &given.impact_review, first.map(|first| &first.impact_review)),
        (ReviewText::RollbackPlan, &given.rollback_plan, first.map(|first| &first.rollback_plan)),
    ];
    let missing = texts.iter().find(|(_, own, before)| own.is_none() && before.is_none_or(Option::is_none));
    missing.map_or(Ok(()), |(field, ..)| Err(Rejection::ReviewMissing { field: *field }))
}

fn approval(given: ApprovalRequest, role: PlatformRole, ctx: &TransitionContext<'_>) -> Result<Approval, Rejection> {
    // Platform roles are for people; the permissions exclude all other principals.
    let Principal::Caller(caller) = ctx.by else { return Err(Rejection::RoleNotHeld { role: Some(role) }) };
    let ApprovalRequest { change, reason, role: _, impact_review, rollback_plan, seen: ApprovalContext { in_use, .. } } =
        given;
    let user_id = caller.user_id.clone();
    Ok(Approval { change, role, user_id, at: ctx.now, reason, impact_review, rollback_plan, in_use })
}

fn approver(approval: &Approval) -> serde_json::Value {
    json!({ "role": approval.role, "user_id": approval.user_id })
}
