//! The representation of payments in the API. It has neither the redirect addresses, which are the payer's alone, nor the secret of the
//! processor's page, which is never stored.

use chrono::{DateTime, Utc};
use domain::RefundId;
use domain::payment::{Payment, Phase, Refund, RefundDebit, RefundStatus, Reversal, ReversalOrigin};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// Money that a user pays in.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Payment)]
pub(in crate::api) struct PaymentView {
    id: Uuid,
    /// Into which it goes.
    account_id: Uuid,
    /// The payer, who alone may request a refund.
    payer: String,
    /// In minor units.
    amount_minor: i64,
    currency: String,
    /// `created`: not known to the processor; `open`: it can be paid; `paid`: the processor has it; `deposited`: it is in the account;
    /// `refused`: the account cannot have it, being in another currency, and it goes back to its payer; `under_review`: the processor was paid
    /// in another amount or currency than was ordered, and an operator decides about it; `canceled`, `expired`.
    state: StateName,
    /// Until when it can be paid; null once it is closed.
    pay_until: Option<DateTime<Utc>>,
    paid_at: Option<DateTime<Utc>>,
    deposited_at: Option<DateTime<Utc>>,
    /// Why the last attempt to pay was declined, why the account cannot have it, what is under review, or why it came to nothing.
    reason: Option<String>,
    /// What waits for an operator's decision: the processor's id of what was paid, its amount in minor units and its currency, separated by colons
    /// (`pi_1:4200:GBP`); null where nothing does. The decision names it.
    review: Option<String>,
    /// What its payer saw and paid, where the processor has converted the amount into another currency; null where it has not.
    presented: Option<PresentedAmountView>,
    /// The part that was not refunded and is not being refunded, in minor units.
    left_minor: i64,
    /// Refunds that its payer requested, and those because the account cannot have it.
    refunds: Vec<RefundView>,
    /// Money that the processor took back without a refund here.
    reversals: Vec<ReversalView>,
    created_at: DateTime<Utc>,
}

/// The states of a payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[schema(as = PaymentState)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum StateName {
    Created,
    Open,
    Paid,
    Deposited,
    Refused,
    UnderReview,
    Canceled,
    Expired,
}

/// What the payer saw and paid.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = PresentedAmount)]
pub(in crate::api) struct PresentedAmountView {
    /// In minor units.
    amount_minor: i64,
    currency: String,
}

/// Money that goes back.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Refund)]
pub(in crate::api) struct RefundView {
    pub(in crate::api) id: Uuid,
    /// The payment that it goes back to; null where it is of an allocation's cost.
    pub(in crate::api) payment_id: Option<Uuid>,
    /// The allocation whose cost is given back; null where it is of a payment.
    pub(in crate::api) allocation_id: Option<Uuid>,
    /// In minor units, rounded down.
    pub(in crate::api) amount_minor: i64,
    /// The same in millionths of a minor unit.
    pub(in crate::api) amount_micro: i64,
    pub(in crate::api) currency: String,
    pub(in crate::api) state: RefundState,
    /// Why it was asked for.
    pub(in crate::api) reason: String,
    /// Why the account did not give it.
    pub(in crate::api) refused_because: Option<String>,
    pub(in crate::api) requested_at: DateTime<Utc>,
}

/// The state of a refund: `requested` from the account; taken from it and `pending` at the processor; `succeeded`: with the payer, or for
/// an allocation's cost in the account; `refused` by the account; `failed` at the processor, and then `returned` to the account that had
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum RefundState {
    Requested,
    Pending,
    Succeeded,
    Refused,
    Failed,
    Returned,
}

/// Money that the processor took back.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Reversal)]
pub(in crate::api) struct ReversalView {
    /// The processor's id for it.
    id: String,
    kind: ReversalKind,
    /// In minor units.
    amount_minor: i64,
    /// True where the money is there again: the dispute was won, or the refund failed.
    is_undone: bool,
    #[serde(rename = "heard_at")]
    reported_at: DateTime<Utc>,
}

/// A refund that was made at the processor, or a dispute by the payer's bank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum ReversalKind {
    Refund,
    Dispute,
}

impl StateName {
    pub(in crate::api) const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl PaymentView {
    pub(super) fn of(it: &Payment, account_id: Uuid) -> Self {
        let under_review = it.review_reason();
        let (state, pay_until, deposited_at, ended) = match &it.phase {
            Phase::Created { until } => (StateName::Created, Some(*until), None, None),
            Phase::Open { until } => (StateName::Open, Some(*until), None, None),
            Phase::Paid { .. } => (StateName::Paid, None, None, None),
            Phase::Deposited { at, .. } => (StateName::Deposited, None, Some(*at), None),
            Phase::Refused { why, .. } => (StateName::Refused, None, None, Some(why)),
            Phase::UnderReview { .. } => (StateName::UnderReview, None, None, under_review.as_ref()),
            Phase::Canceled { why, .. } => (StateName::Canceled, None, None, Some(why)),
            Phase::Expired { why, .. } => (StateName::Expired, None, None, Some(why)),
        };
        Self {
            id: it.id.0,
            account_id,
            payer: it.payer.to_string(),
            amount_minor: it.amount_minor,
            currency: it.currency.as_str().to_owned(),
            state,
            pay_until,
            paid_at: it.paid_at(),
            deposited_at,
            reason: ended.or(it.declined.as_ref()).cloned(),
            review: it.review().map(|review| review.to_string()),
            presented: it.presented.as_ref().map(|presented| PresentedAmountView {
                amount_minor: presented.amount_minor,
                currency: presented.currency.as_str().to_owned(),
            }),
            left_minor: it.left_minor(),
            refunds: it.refunds.iter().map(|(id, refund)| RefundView::of_payment(it, *id, refund)).collect(),
            reversals: it.reversals.iter().map(|(id, reversal)| ReversalView::of(id, reversal)).collect(),
            created_at: it.created_at,
        }
    }
}

impl RefundView {
    pub(in crate::api) fn of_payment(payment: &Payment, id: RefundId, it: &Refund) -> Self {
        let status = it.at_processor.as_ref().map(|known| known.status);
        let (amount_minor, state, refused_because) = match (&it.taking, status) {
            (RefundDebit::Asked { most_minor, .. }, _) => (*most_minor, RefundState::Requested, None),
            (RefundDebit::Taken { amount_minor }, None | Some(RefundStatus::Pending)) => {
                (*amount_minor, RefundState::Pending, None)
            }
            (RefundDebit::Taken { amount_minor }, Some(RefundStatus::Succeeded)) => {
                (*amount_minor, RefundState::Succeeded, None)
            }
            (RefundDebit::Taken { amount_minor }, Some(RefundStatus::Failed)) => {
                (*amount_minor, RefundState::Failed, None)
            }
            (RefundDebit::Refused { why }, _) => (0, RefundState::Refused, Some(why.clone())),
            (RefundDebit::GivenBack { amount_minor }, _) => (*amount_minor, RefundState::Returned, None),
        };
        Self {
            id: id.0,
            payment_id: Some(payment.id.0),
            allocation_id: None,
            amount_minor,
            amount_micro: amount_minor.saturating_mul(domain::money::MICRO_PER_MINOR),
            currency: payment.currency.as_str().to_owned(),
            state,
            reason: it.reason.clone(),
            refused_because,
            requested_at: it.asked_at,
        }
    }
}

impl ReversalView {
    fn of(id: &str, it: &Reversal) -> Self {
        let kind = match it.made {
            ReversalOrigin::Refund => ReversalKind::Refund,
            ReversalOrigin::Dispute => ReversalKind::Dispute,
        };
        let (amount_minor, is_undone, reported_at) = (it.amount_minor, it.is_undone, it.reported_at);
        Self { id: id.to_owned(), kind, amount_minor, is_undone, reported_at }
    }
}
