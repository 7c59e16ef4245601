//! The plan of an account's holder, in which the policies of the account are resolved (decisions 3, *Which scopes a key has*).

use super::AccountUpdate;
use crate::audit::{AuditAction, AuditRecord};
use crate::state_machine::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The plan that a token named with a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanClaim {
    /// `None`: the token named no plan.
    pub plan: Option<String>,
    /// When the request with the token was accepted.
    pub seen_at: Timestamp,
}

/// The plan of an account's holder. A running window ends by the plan with which it began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderPlan {
    /// Since the current window began.
    current: Option<String>,
    /// By the last token; in force from the next window.
    named: Option<PlanClaim>,
}

impl HolderPlan {
    /// True where no token was seen.
    #[must_use]
    pub const fn is_unnamed(&self) -> bool {
        self.named.is_none()
    }

    /// The plan in which policies are resolved.
    #[must_use]
    pub fn in_force(&self) -> Option<&str> {
        self.current.as_deref()
    }

    /// A window begins, or none runs.
    pub(super) fn adopt(&mut self) {
        if let Some(named) = &self.named {
            self.current.clone_from(&named.plan);
        }
    }
}

impl AccountUpdate {
    /// Stores the plan of a token, unless a later token was seen: a request may have waited for capacity. Returns the audit record where the
    /// plan is another one.
    pub(super) fn name_plan(&mut self, claim: Option<PlanClaim>) -> Option<AuditRecord> {
        let claim = claim?;
        let account = &mut self.account;
        if account.plan.named.as_ref().is_some_and(|known| claim.seen_at <= known.seen_at) {
            return None;
        }
        let former = account.plan.named.replace(claim.clone()).and_then(|known| known.plan);
        if account.window.is_none() {
            account.plan.adopt();
        }
        let metadata = json!({ "old_plan": former, "new_plan": claim.plan });
        (former != claim.plan).then(|| account.audit(AuditAction::BillingPlan, metadata))
    }
}
