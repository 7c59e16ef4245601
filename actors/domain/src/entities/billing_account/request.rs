//! What operators ask of a billing account.

use super::{AccountUpdate, AllocationCost, BillingAccount, Holder, Rejection};
use crate::audit::AuditAction;
use crate::authz::{Action, ResourceOwner};
use crate::id::{AllocationId, RefundId};
use crate::money::{Currency, MicroAmount};
use crate::state_machine::{self, Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// What operators ask of a billing account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Request {
    Open {
        holder: Holder,
        currency: Currency,
    },
    /// An operator credits the account, or debits it with a negative amount.
    Adjust {
        amount_minor: i64,
        currency: Currency,
        reason: String,
    },
    /// An operator refunds an amount of an allocation's cost, or all that is left of it.
    RefundAllocation {
        refund_id: RefundId,
        allocation_id: AllocationId,
        /// Its cost by the ledger, where it is not metered any more.
        cost: Option<MicroAmount>,
        /// When it ended.
        ended_at: Option<Timestamp>,
        /// Its renter: the refund window is theirs. `None` from a member of an earlier release.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        renter: Option<ResourceOwner>,
        amount_minor: Option<i64>,
        reason: String,
    },
}

impl state_machine::Request for Request {
    fn action(&self) -> Action {
        match self {
            Self::Open { .. } | Self::Adjust { .. } | Self::RefundAllocation { .. } => Action::AdjustBilling,
        }
    }
}

impl BillingAccount {
    /// The first request, where there is no account.
    pub(super) fn open_by_request(
        request: Request,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match request {
            Request::Open { holder, currency } => {
                let account = Self::opened(holder, currency, ctx);
                let audit = account.audit(AuditAction::BillingOpen, json!({ "currency": account.currency.as_str() }));
                Ok(AccountUpdate::of(&account).transition_with_account("opened by an operator", ctx).audit(audit))
            }
            Request::Adjust { .. } | Request::RefundAllocation { .. } => Err(Rejection::NotFound),
        }
    }

    pub(super) fn execute(&self, request: Request, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match request {
            Request::Open { currency, .. } => self.reopen(&currency),
            Request::Adjust { amount_minor, currency, reason } => self.adjust(amount_minor, &currency, reason, ctx),
            Request::RefundAllocation { refund_id, allocation_id, cost, ended_at, renter, amount_minor, reason } => {
                let cost = AllocationCost { cost, ended_at, renter: renter.as_ref() };
                self.refund_allocation(refund_id, allocation_id, cost, amount_minor, reason, ctx)
            }
        }
    }
}
