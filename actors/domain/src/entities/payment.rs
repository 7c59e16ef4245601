//! A payment: money that a user pays in through the payment processor, and its refunds and reversals (decisions 6; the design is in
//! deploy/decisions/0023).
//!
//! ```text
//! created ──the processor has it──▶ open ──paid──▶ paid ──the account has it──▶ deposited
//!    └────────not opened────────────┼──canceled, expired──▶ canceled, expired    └─the account cannot have it──▶ refused
//!                                   └──paid otherwise──▶ under_review ──an operator decides──▶ canceled
//! ```
//!
//! Money that arrives after an end counts as any other. Messages of the processor arrive late, twice, in any order or never; each fact is
//! stored under the processor's own id and only ever advances (asked, taken, succeeded, failed; posted, undone), so that the sum does not
//! depend on the order. What is still owed, to the account or the processor, is derived from the whole state (`processor_calls`) and
//! resent until it is answered.
//!
//! `request` and `fact` define the commands. `checkout` has the way to the money, `presentment` what a payer saw in another currency, `review` a
//! payment of another amount than was ordered, `refund` and `reversal` the ways back, which are stored as `refund_record` and `reversal_record`.

mod checkout;
mod fact;
mod presentment;
mod processor_calls;
mod refund;
mod refund_record;
mod request;
mod reversal;
mod reversal_record;
mod review;
#[cfg(test)]
mod tests;

use crate::account_holder::Holder;
use crate::audit::{AuditAction, AuditRecord};
use crate::explanation::Explanation;
use crate::history::{HistoryEntry, Invariant};
use crate::id::{EntityKind, EntityRef, PaymentId, RefundId, UserId};
use crate::money::{Currency, HIGHEST_BALANCE_MINOR, minor_in_currency};
use crate::policy::PolicyKey;
use crate::resend_timer::ResendTimer;
use crate::state_machine::{self, Deadline, IndexKeys, Machine, TickOnly, Timestamp, Transition, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;

pub use checkout::PaymentFailure;
pub use fact::Fact;
pub use presentment::Presentment;
pub use processor_calls::ProcessorCall;
pub use refund::NEVER_MADE;
pub use refund_record::{ProcessorRefund, Refund, RefundDebit, RefundStatus};
pub use request::Request;
pub use reversal_record::{Reversal, ReversalOrigin, ReversalStep};
pub use review::{EndedReview, ReviewDecision, ReviewId};

/// The time to pay. After that the payment is canceled at the processor.
pub const OPEN_FOR: TimeDelta = TimeDelta::hours(24);
/// What follows inside the control plane takes milliseconds; after this time an operator should look.
const OVERDUE_AFTER: TimeDelta = TimeDelta::hours(1);
/// The bound of refunds of one payment, and of reversals.
const MAX_REFUNDS: usize = 100;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Payment {
    pub id: PaymentId,
    /// The holder of the account that it is paid into.
    pub holder: Holder,
    /// The user who pays, and may request a refund.
    pub payer: UserId,
    pub amount_minor: i64,
    pub currency: Currency,
    /// Where the payer's browser is sent after payment, and after cancellation.
    pub success_url: String,
    pub cancel_url: String,
    pub phase: Phase,
    /// The processor's id: of what was opened, and once it is paid of what was paid.
    pub processor_id: Option<String>,
    pub charge_id: Option<String>,
    /// Why the last attempt to pay was declined.
    pub declined: Option<String>,
    /// The refunds that were requested here, and the refund of a deposit that no account can have.
    pub refunds: BTreeMap<RefundId, Refund>,
    /// The reversals at the processor, by the processor's ids.
    pub reversals: BTreeMap<String, Reversal>,
    /// What the payer saw and paid, where the processor has converted the amount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub presented: Option<Presentment>,
    /// Its reviews that have ended, in their order: their money is never credited by itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reviews: Vec<EndedReview>,
    /// When outstanding requests are resent.
    pub again: Option<ResendTimer>,
    pub created_at: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::EnumDiscriminants)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[strum_discriminants(
    name(PhaseName),
    doc = "The name of a payment's state.",
    derive(Serialize, Deserialize, strum::Display, strum::IntoStaticStr),
    strum(serialize_all = "snake_case", const_into_str),
    serde(rename_all = "snake_case")
)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Phase {
    /// It is not known whether the processor has it.
    Created {
        until: Timestamp,
    },
    /// The payer can pay.
    Open {
        until: Timestamp,
    },
    /// The processor has the money.
    Paid {
        at: Timestamp,
    },
    /// It is credited to the account.
    Deposited {
        paid_at: Timestamp,
        at: Timestamp,
    },
    /// No account can have it: it is refunded to its payer.
    Refused {
        paid_at: Timestamp,
        at: Timestamp,
        why: String,
    },
    /// The processor was paid in another amount or currency than was ordered: an operator decides about it.
    UnderReview {
        at: Timestamp,
        /// The processor's id of what was paid.
        processor_id: String,
        amount_minor: i64,
        currency: Currency,
    },
    Canceled {
        at: Timestamp,
        why: String,
    },
    Expired {
        at: Timestamp,
        why: String,
    },
}

/// The commands of a payment.
pub type Command = state_machine::AnyCommand<Request, state_machine::NoCommand, Fact>;

state_machine::impl_command_from!(Request, Fact);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    Payment { payment: Box<Payment> },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("there is no such payment")]
    NotFound,
    #[error("there is another payment of this id")]
    Exists,
    #[error("a deposit is between {} and {}", minor_in_currency(*.min, .currency.as_ref()), minor_in_currency(*.max, .currency.as_ref()))]
    Amount {
        min: i64,
        max: i64,
        /// The payment's; `None` from a member of an earlier release.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        currency: Option<Currency>,
    },
    #[error("a payment that is {state} cannot be opened")]
    Over { state: PhaseName },
    #[error("the payment is about {expected}, and this is about {given}")]
    Differs { expected: String, given: String },
    #[error("it was paid as {as_of}, and {again} was paid too")]
    PaidTwice { as_of: String, again: String },
    #[error("a payment that is {state} cannot be canceled")]
    AlreadyPaid { state: PhaseName },
    #[error("a checkout of the payment is open that was not closed")]
    StillOpen,
    #[error("nothing of the payment can be refunded: it is {state}")]
    NotPaid { state: PhaseName },
    #[error("it was paid longer than {days} days ago")]
    TooLate { days: i64 },
    #[error("{} of the payment can be refunded", minor_in_currency(*.left, .currency.as_ref()))]
    MoreThanLeft {
        left: i64,
        /// The payment's; `None` from a member of an earlier release.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        currency: Option<Currency>,
    },
    #[error("the payment has {MAX_REFUNDS} refunds, which is the most")]
    TooManyRefunds,
    #[error("the payment has no such refund, or nothing was taken for it")]
    RefundUnknown,
    #[error("{} are the least that can be refunded in {}", minor_in_currency(*.least, .paid.as_ref()), .currency.as_str())]
    LessThanCharged {
        least: i64,
        /// In which it was charged.
        currency: Currency,
        /// The payment's; `None` from a member of an earlier release.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        paid: Option<Currency>,
    },
    #[error("the review of {processor_id} has ended ({decision}), and this report contradicts that")]
    Reviewed { processor_id: String, decision: ReviewDecision },
    #[error("a payment that is {state} is not under review")]
    NotUnderReview { state: PhaseName },
    #[error("the review has ended: {decision}")]
    ReviewEnded { decision: ReviewDecision },
    #[error("what waits for an operator is {current}")]
    OtherReview { current: ReviewId },
    #[error("the payment had {} reviews, which is the most", review::MAX_REVIEWS)]
    TooManyReviews,
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotFound => Explanation::not_found("payment"),
            Self::Exists => Explanation::conflict("The payment exists already."),
            // The caller, who knows the amount, reports which of the two applies.
            Self::Amount { min, max, currency } => Explanation::invalid(
                format!(
                    "A payment is from {} to {}, as policies `billing.minimum_deposit_minor` and `billing.maximum_deposit_minor` say; pay in an \
                     amount between them: `gpuctl billing top-up --amount AMOUNT`.",
                    minor_in_currency(min, currency.as_ref()),
                    minor_in_currency(max, currency.as_ref())
                ),
                "amount_minor",
            )
            .limited_by(PolicyKey::BillingMaximumDeposit, max)
            .detail("minimum", min),
            Self::Over { state: state @ PhaseName::UnderReview } => Explanation::conflict(
                "The payment processor was paid in another amount or currency than was ordered, and an operator decides about it. Do not pay \
                 again; GET /api/v1/billing/payments/{id} shows what becomes of it.",
            )
            .detail("state", state.into_str()),
            Self::AlreadyPaid { state: state @ PhaseName::UnderReview } => Explanation::conflict(
                "The payment was paid in another amount or currency than was ordered: an operator decides about it, and it cannot be canceled.",
            )
            .detail("state", state.into_str()),
            Self::Over { state } => {
                Explanation::conflict(format!("The payment is {state}; begin another one, with a new Idempotency-Key."))
                    .detail("state", state.into_str())
            }
            Self::AlreadyPaid { state } => Explanation::conflict(format!(
                "The payment is {state} and cannot be canceled. POST /api/v1/billing/refunds gives back what is in your account."
            ))
            .detail("state", state.into_str()),
            Self::StillOpen => Explanation::conflict(
                "Another request opened the payment a moment ago, so it can be paid; cancel it again, \
                 with a new Idempotency-Key.",
            ),
            Self::NotPaid { state } => Explanation::conflict(format!(
                "The payment is {state}: nothing of it is in your account that could be given back. \
                 GET /api/v1/billing/payments/{{id}} shows what becomes of it."
            ))
            .detail("state", state.into_str()),
            Self::TooLate { days } => Explanation::conflict(format!(
                "It was paid longer than {days} days ago; policy `allocation.refund_window_days` \
                 lets nothing be refunded then."
            ))
            .limited_by(PolicyKey::AllocationRefundWindow, days),
            Self::MoreThanLeft { left: ..=0, .. } => Explanation::conflict(
                "Nothing is left of the payment: all of it was given back, or is on its way back.",
            ),
            Self::MoreThanLeft { left, currency } => Explanation::invalid(
                format!(
                    "Of the payment {} are left; give back no more, and more than nothing, or leave `amount_minor` out for all of it.",
                    minor_in_currency(left, currency.as_ref())
                ),
                "amount_minor",
            )
            .detail("left_minor", left),
            Self::TooManyRefunds => Explanation::conflict(
                "So many refunds were asked of this payment already; ask an administrator for more.",
            ),
            Self::LessThanCharged { least, currency, paid } => Explanation::invalid(
                format!(
                    "At least {} can be given back: the payment was charged in {}, and less is not a whole amount there. Give back more, or \
                     leave `amount_minor` out for all of it.",
                    minor_in_currency(least, paid.as_ref()),
                    currency.as_str()
                ),
                "amount_minor",
            )
            .detail("minimum", least),
            Self::NotUnderReview { state } => Explanation::conflict(format!(
                "The payment is {state}: only one that is under_review, or refused and not refunded, waits for an operator's decision."
            ))
            .detail("state", state.into_str()),
            Self::ReviewEnded { decision } => Explanation::conflict(format!(
                "The review has ended already, and its money was {decision}. To correct that, adjust the account: \
                 POST /api/v1/admin/billing/accounts/{{id}}/adjustments."
            ))
            .detail("decision", decision.into_str()),
            Self::OtherReview { current } => Explanation::conflict(format!(
                "The request is not about what waits for a decision now, which is {current}. Nothing was decided. Look at the payment again, GET \
                 /api/v1/billing/payments/{{id}}, and name its `review`."
            ))
            .detail("review", current.to_string()),
            rejection @ (Self::Differs { .. }
            | Self::PaidTwice { .. }
            | Self::RefundUnknown
            | Self::Reviewed { .. }
            | Self::TooManyReviews) => Explanation::unexpected(&rejection),
        }
    }
}

impl Machine for Payment {
    const KIND: EntityKind = EntityKind::Payment;
    /// A hundred refunds and a hundred reversals.
    const SNAPSHOT_MOST: usize = 384 * 1024;
    const INVARIANTS: &'static [Invariant] = &[Invariant::I3, Invariant::I8];
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match (state, command) {
            (Some(payment), Command::Request(request)) => payment.execute(request, ctx),
            (Some(payment), Command::Fact(fact)) => payment.apply(fact, ctx),
            (Some(payment), Command::Maintenance(TickOnly::Tick)) => Ok(payment.tick(ctx)),
            (None, Command::Request(request)) => Self::begin(request, ctx),
            (None, Command::Fact(_)) => Err(Rejection::NotFound),
            (None, Command::Maintenance(TickOnly::Tick)) => Ok(Transition::stay(Reply::Done)),
        }
    }

    fn state(&self) -> &'static str {
        self.phase.into_str()
    }

    fn deadline(&self) -> Option<Deadline> {
        match self.phase {
            Phase::Created { until } => Some(Deadline::new(until, "the payment is to be opened at the processor")),
            Phase::Open { until } => Some(Deadline::new(until, "the payer is to pay")),
            Phase::Paid { at } => Some(Deadline::new(at + OVERDUE_AFTER, "what was paid is to be in the account")),
            Phase::Deposited { .. } => {
                let refunds = self.refunds.values().filter_map(Refund::deadline);
                refunds.chain(self.reversals.values().filter_map(Reversal::deadline)).min_by_key(|deadline| deadline.at)
            }
            Phase::Refused { at, .. } => self.deadline_of_refused(at),
            // Overdue from its start on: nothing follows by itself.
            Phase::UnderReview { at, .. } => {
                Some(Deadline::new(at, "an operator is to settle what was paid in another amount or currency"))
            }
            // A reversal of an unpaid payment waits for the payment, which has its own deadline.
            Phase::Canceled { .. } | Phase::Expired { .. } => None,
        }
    }

    fn timer(&self) -> Option<Timestamp> {
        // The end of the time to pay is handled at the next status check, which is within the hour.
        self.again.map(|again| again.at)
    }

    fn keys(&self) -> IndexKeys {
        // All users of the account see its payments.
        IndexKeys { owner: Some(self.holder.to_string()), ..IndexKeys::default() }
    }

    /// A refund or a reversal of it may be in a transient state too.
    fn is_transient(&self) -> bool {
        match self.phase {
            Phase::Created { .. } | Phase::Open { .. } | Phase::Paid { .. } | Phase::UnderReview { .. } => true,
            Phase::Deposited { .. } | Phase::Refused { .. } => !self.is_settled(),
            Phase::Canceled { .. } | Phase::Expired { .. } => false,
        }
    }

    fn violations(&self, _: &[HistoryEntry]) -> Vec<Invariant> {
        Invariant::violated([
            (Invariant::I3, self.refunds_no_more_than_was_paid()),
            (Invariant::I8, self.has_deadline_where_transient()),
        ])
    }
}

impl Payment {
    /// The transition to `next`: new outstanding requests are published at once, and all of them are resent until they are answered.
    fn transition(&self, mut next: Self, why: &str, ctx: &TransitionContext<'_>) -> Transition<Self> {
        // Money that the account does not have cannot be taken from it.
        if matches!(next.phase, Phase::Deposited { .. }) {
            next.reversals.values_mut().for_each(|it| it.is_posting_requested |= !it.is_undone);
        }
        let (before, owed) = (self.outstanding_events(), next.outstanding_events());
        let news: Vec<_> = owed.iter().filter(|event| !before.contains(event)).cloned().collect();
        let waits = !owed.is_empty() || !next.status_checks(ctx.now).is_empty();
        // A new wait starts with the shortest pause.
        let begins = !news.is_empty() || self.phase != next.phase;
        let again = match self.again {
            Some(again) if waits && !begins => Some(again),
            Some(_) | None => waits.then(|| ResendTimer::first(ctx.now)),
        };
        let next = Self { again, ..next };
        let reply = next.shown();
        Transition::to(next, reply, why).with(news, None)
    }

    fn begin(request: Request, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match request {
            Request::Create { account_id, holder, payer, amount_minor, currency, success_url, cancel_url } => {
                let payment = Self {
                    id: PaymentId(ctx.id),
                    holder,
                    payer,
                    amount_minor,
                    currency,
                    success_url,
                    cancel_url,
                    phase: Phase::Created { until: ctx.now + OPEN_FOR },
                    processor_id: None,
                    charge_id: None,
                    declined: None,
                    refunds: BTreeMap::new(),
                    reversals: BTreeMap::new(),
                    presented: None,
                    reviews: Vec::new(),
                    again: Some(ResendTimer::first(ctx.now)),
                    created_at: ctx.now,
                };
                payment.create(account_id, ctx)
            }
            Request::Cancel { .. }
            | Request::Refund { .. }
            | Request::SettleReview { .. }
            | Request::DismissReview { .. } => Err(Rejection::NotFound),
        }
    }

    /// I3: refunds on request never exceed what was paid, and together with what was taken back at the processor they leave at least
    /// nothing.
    #[must_use]
    pub fn refunds_no_more_than_was_paid(&self) -> bool {
        let asked = self.refunds.values().map(Refund::gone_minor).fold(0, i64::saturating_add);
        // What a reversal returned beyond what it took is there again.
        let returned = self.reversals.values().map(|it| it.gone_minor().min(0)).fold(0, i64::saturating_add);
        asked.saturating_add(returned) <= self.amount_minor && (0..=self.amount_minor).contains(&self.left_minor())
    }

    fn paid(
        &self,
        processor_id: String,
        amount_minor: i64,
        currency: &Currency,
        charge_id: Option<String>,
        presented: Option<Presentment>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let is_own = self.paid_as() == Some(&processor_id);
        if let Some(ended) = self.ended_review(&processor_id).filter(|_| !is_own) {
            // What was charged in another currency is the same money in the terms of the order.
            let charged = presented.as_ref().filter(|it| it.is_charged);
            let (amount, paid_in) = charged.map_or((amount_minor, currency), |it| (it.amount_minor, &it.currency));
            if self.is_reviewed_as(&processor_id, amount, paid_in) {
                return Ok(Transition::stay(Reply::Done));
            }
            // In other terms it may be an error of the decision, or of the processor.
            return Err(Rejection::Reviewed { processor_id, decision: ended.decision });
        }
        if !self.was_charged_as(amount_minor, currency) {
            self.check_amount(self.amount_minor, amount_minor, currency)?;
        }
        if self.paid_at().is_some() {
            return self.paid_again(processor_id, charge_id, ctx);
        }
        self.check_no_other_review(&processor_id)?;
        let next = Self {
            phase: Phase::Paid { at: ctx.now },
            processor_id: Some(processor_id),
            charge_id,
            presented,
            declined: None,
            ..self.clone()
        };
        Ok(self.transition(next, "paid", ctx))
    }

    fn paid_again(
        &self,
        processor_id: String,
        charge_id: Option<String>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if let Some(paid) = self.processor_id.as_ref().filter(|paid| **paid != processor_id) {
            return Err(Rejection::PaidTwice { as_of: paid.clone(), again: processor_id });
        }
        if self.charge_id.is_some() || charge_id.is_none() {
            return Ok(Transition::stay(Reply::Done));
        }
        Ok(self.transition(Self { charge_id, ..self.clone() }, "the charge is known", ctx))
    }

    fn deposited(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let Phase::Paid { at: paid_at } = self.phase else { return Transition::stay(Reply::Done) };
        let next = Self { phase: Phase::Deposited { paid_at, at: ctx.now }, ..self.clone() };
        self.transition(next, "the account has it", ctx)
    }

    /// What is left of it is refunded to its payer, without a request.
    fn deposit_refused(&self, why: String, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let Phase::Paid { at: paid_at } = self.phase else { return Transition::stay(Reply::Done) };
        let mut next = self.clone();
        let left = self.left_minor();
        if left > 0 {
            let refund = Refund::of_refused_deposit(left, self.charged_for(left), &why, ctx);
            next.refunds.insert(self.refused_deposit_refund_id(), refund);
        }
        next.phase = Phase::Refused { paid_at, at: ctx.now, why };
        self.transition(next, "no account can have it", ctx)
    }

    /// When the processor received the money.
    #[must_use]
    pub const fn paid_at(&self) -> Option<Timestamp> {
        match self.phase {
            Phase::Paid { at } | Phase::Deposited { paid_at: at, .. } | Phase::Refused { paid_at: at, .. } => Some(at),
            Phase::Created { .. }
            | Phase::Open { .. }
            | Phase::UnderReview { .. }
            | Phase::Canceled { .. }
            | Phase::Expired { .. } => None,
        }
    }

    /// What is left of it after refunds and reversals, with those in progress.
    #[must_use]
    pub fn left_minor(&self) -> i64 {
        let gone = self.refunds.values().map(Refund::gone_minor);
        let gone = gone.chain(self.reversals.values().map(Reversal::gone_minor)).fold(0, i64::saturating_add);
        if self.paid_at().is_some() { self.amount_minor.saturating_sub(gone).max(0) } else { 0 }
    }

    fn check_amount(&self, expected: i64, amount_minor: i64, currency: &Currency) -> Result<(), Rejection> {
        if (expected, &self.currency) == (amount_minor, currency) {
            return Ok(());
        }
        Err(differs(expected, &self.currency, amount_minor, currency))
    }

    fn shown(&self) -> Reply {
        Reply::Payment { payment: Box::new(self.clone()) }
    }

    fn audit(&self, action: AuditAction, mut metadata: serde_json::Value) -> AuditRecord {
        if let Some(fields) = metadata.as_object_mut() {
            fields.insert("holder".to_owned(), json!(self.holder.to_string()));
            fields.insert("payer".to_owned(), json!(self.payer));
        }
        AuditRecord::new(action, EntityRef { kind: EntityKind::Payment, id: self.id.0 }, metadata)
    }
}

/// True of a valid amount in minor units.
fn differs(expected: i64, expected_in: &Currency, given: i64, given_in: &Currency) -> Rejection {
    let described = |amount: i64, currency: &Currency| minor_in_currency(amount, Some(currency));
    Rejection::Differs { expected: described(expected, expected_in), given: described(given, given_in) }
}

const fn is_an_amount(minor: i64) -> bool {
    minor > 0 && minor <= HIGHEST_BALANCE_MINOR
}
