//! The postings of payments: deposits, refunds, and reversals at the processor. Each is posted once, however often the command arrives;
//! and each command is answered, since the answer may have been lost.

use super::accrual::AccountUpdate;
use super::{BillingAccount, Rejection};
use crate::audit::AuditAction;
use crate::authz::ResourceOwner;
use crate::event::Event;
use crate::id::{AllocationId, PaymentId, RefundId};
use crate::ledger::{PostingKind, PostingSource, UsagePeriod};
use crate::money::{Currency, HIGHEST_BALANCE_MINOR, MicroAmount};
use crate::policy::{PolicyKey, Scopes};
use crate::resend_timer;
use crate::state_machine::{Timestamp, Transition, TransitionContext};
use chrono::{SubsecRound, TimeDelta};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// For how long postings are remembered after their last command: a payment resends for as long as it is not answered, at most an hour
/// apart, so that no command arrives after this time. The ledger refuses a double posting in any case.
const POSTING_RETENTION: TimeDelta = TimeDelta::days(30);
const MAX_POSTINGS_REMEMBERED: usize = 1024;
/// What was posted is in the ledger: of it only the last ones are remembered, and those whose payment may not have been answered yet, so
/// that the snapshot does not grow with the number of payments. A refusal is in no ledger, and is remembered for [`POSTING_RETENTION`]; so is
/// a refund that was taken, since the account may not have its amount any more: it would refuse a resent command for what it has taken.
const MAX_POSTED_REMEMBERED: usize = 48;
const POSTED_RETENTION: TimeDelta = TimeDelta::hours(3);
const _: () = assert!(POSTED_RETENTION.num_seconds() > 2 * resend_timer::LONGEST.num_seconds());
/// The bound of refunds of one allocation's cost.
const MAX_REFUNDS: usize = 100;

/// The result of a payment's command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostingRecord {
    /// When the command arrived last.
    pub at: Timestamp,
    pub how: PostingResult,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PostingResult {
    Posted { amount_minor: i64 },
    Refused { why: String },
}

/// An allocation's cost, as the caller has read it.
#[derive(Clone, Copy, Debug)]
pub(super) struct AllocationCost<'a> {
    pub(super) cost: Option<MicroAmount>,
    pub(super) ended_at: Option<Timestamp>,
    /// `None` from a member of an earlier release.
    pub(super) renter: Option<&'a ResourceOwner>,
}

impl BillingAccount {
    /// True where nothing was posted and nothing that it pays for has a price: the first money sets its currency.
    fn has_no_currency_yet(&self) -> bool {
        self.postings == 0 && self.meters.values().all(|meter| meter.rate.minor_per_hour() == 0)
    }

    pub(super) fn deposit(
        &self,
        payment_id: PaymentId,
        currency: &Currency,
        amount_minor: i64,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let mut draft = AccountUpdate::of(self);
        let amount = checked_amount(amount_minor)?;
        let account_id = self.id;
        let name = AccountUpdate::posting_name(PostingKind::Deposit, &payment_id.to_string());
        let known = self.moved.get(&name).map(|known| known.how.clone());
        let is_again = known.is_some();
        // A refusal is final: the payer may have the money back by now.
        let how = match known {
            Some(how) => how,
            None => draft.credit_deposit(payment_id, currency, amount, ctx),
        };
        draft.remember_posting(name, how.clone(), ctx);
        draft.publish(match how {
            PostingResult::Posted { .. } => Event::PaymentDeposited { payment_id, account_id, is_again },
            PostingResult::Refused { why } => Event::DepositRefused { payment_id, account_id, reason: why, is_again },
        });
        Ok(draft.transition("a payment was received", ctx))
    }

    /// Debited before the processor is called: so it cannot be spent in the meantime.
    pub(super) fn take_refund(
        &self,
        refund_id: RefundId,
        payment_id: PaymentId,
        amount_minor: i64,
        is_exact: bool,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        checked_amount(amount_minor)?;
        let mut draft = AccountUpdate::of(self);
        draft.settle(ctx);
        let name = AccountUpdate::posting_name(PostingKind::Refund, &refund_id.to_string());
        let known = draft.account.moved.get(&name).map(|known| known.how.clone());
        let is_again = known.is_some();
        let how = match known {
            Some(how) => how,
            None => draft.debit_refund(refund_id, payment_id, amount_minor, is_exact, ctx),
        };
        draft.remember_posting(name, how.clone(), ctx);
        let account_id = self.id;
        draft.publish(match how {
            PostingResult::Posted { amount_minor } => {
                Event::RefundTaken { payment_id, refund_id, account_id, amount_minor }
            }
            PostingResult::Refused { why } => {
                Event::RefundRefused { payment_id, refund_id, account_id, reason: why, is_again }
            }
        });
        Ok(draft.transition("a payer requested a refund", ctx))
    }

    pub(super) fn give_back_refund(
        &self,
        refund_id: RefundId,
        payment_id: PaymentId,
        amount_minor: i64,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let amount = checked_amount(amount_minor)?;
        let mut draft = AccountUpdate::of(self);
        let is_again = !draft.is_first_posting(PostingKind::RefundReturned, &refund_id.to_string(), amount_minor, ctx);
        if !is_again {
            draft.settle(ctx);
            draft.move_money(PostingKind::RefundReturned, payment_id, refund_id.to_string(), amount);
            draft.after_credit(ctx);
        }
        draft.publish(Event::RefundGivenBack { payment_id, refund_id, account_id: self.id, is_again });
        Ok(draft.transition("a refund failed", ctx))
    }

    /// Debited in full, whatever the balance is.
    pub(super) fn reverse(
        &self,
        reversal_id: String,
        payment_id: PaymentId,
        is_dispute: bool,
        amount_minor: i64,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let amount = checked_amount(amount_minor)?;
        let kind = if is_dispute { PostingKind::Dispute } else { PostingKind::Reversal };
        let mut draft = AccountUpdate::of(self);
        let is_again = !draft.is_first_posting(kind, &reversal_id, amount_minor, ctx);
        if !is_again {
            draft.settle(ctx);
            draft.move_money(kind, payment_id, reversal_id.clone(), amount);
            draft.after_debit(ctx);
        }
        let account_id = self.id;
        draft.publish(Event::ReversalPosted { payment_id, reversal_id, account_id, is_undone: false, is_again });
        Ok(draft.transition("the payment processor took a payment back, in whole or in part", ctx))
    }

    pub(super) fn undo_reversal(
        &self,
        reversal_id: String,
        payment_id: PaymentId,
        is_dispute: bool,
        amount_minor: i64,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let amount = checked_amount(amount_minor)?;
        let kind = if is_dispute { PostingKind::DisputeWon } else { PostingKind::ReversalUndone };
        let mut draft = AccountUpdate::of(self);
        let is_again = !draft.is_first_posting(kind, &reversal_id, amount_minor, ctx);
        if !is_again {
            draft.settle(ctx);
            draft.move_money(kind, payment_id, reversal_id.clone(), amount);
            draft.after_credit(ctx);
        }
        let account_id = self.id;
        draft.publish(Event::ReversalPosted { payment_id, reversal_id, account_id, is_undone: true, is_again });
        Ok(draft.transition("the payment processor returned what it had taken back", ctx))
    }

    pub(super) fn refund_allocation(
        &self,
        refund_id: RefundId,
        allocation_id: AllocationId,
        spent: AllocationCost<'_>,
        amount_minor: Option<i64>,
        reason: String,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let mut draft = AccountUpdate::of(self);
        if self.refunded.get(&allocation_id).is_some_and(|refunded| refunded.refunds.contains_key(&refund_id)) {
            return Ok(Transition::stay(super::Reply::Account { account: Box::new(self.clone()) }));
        }
        if self.refunded.get(&allocation_id).is_some_and(|refunded| refunded.refunds.len() >= MAX_REFUNDS) {
            return Err(Rejection::TooManyRefunds);
        }
        let scopes = spent.renter.map_or_else(|| self.scopes(), Scopes::from);
        let days = ctx.policy.int(PolicyKey::AllocationRefundWindow, &scopes, ctx.now);
        if spent.ended_at.unwrap_or(ctx.now) < ctx.now - TimeDelta::days(days) || days == 0 {
            return Err(Rejection::TooLate { days });
        }
        draft.settle(ctx);
        let run = draft.account.meters.get(&allocation_id).map(|meter| meter.run);
        let cost = match (run, spent.cost) {
            (Some(run), None) => run.map_or(MicroAmount::ZERO, |run| run.charged),
            (None, Some(cost)) => cost,
            // The caller read it before it started or ended.
            (Some(_), Some(_)) | (None, None) => return Err(Rejection::Moved),
        };
        let left = draft.refundable(allocation_id, cost);
        let amount = amount_minor.map_or(Some(left), MicroAmount::of_minor);
        let amount = amount.filter(|amount| *amount > MicroAmount::ZERO && *amount <= left);
        let amount = amount.ok_or_else(|| Rejection::MoreThanCost { left, currency: Some(self.currency.clone()) })?;
        let audit = self.audit(
            AuditAction::BillingRefundAllocation,
            json!({
                "refund_id": refund_id, "allocation_id": allocation_id, "amount_micro": amount.get(), "reason": reason,
            }),
        );
        let now = ctx.now.trunc_subsecs(6);
        let usage = Some(UsagePeriod { allocation_id, from: now, until: now, cost });
        let source = Some(PostingSource { payment_id: None, reference: refund_id.to_string() });
        draft.write(PostingKind::AllocationRefund, amount, usage, source, Some(reason));
        draft.remember_refund(allocation_id, refund_id, amount, ctx);
        draft.after_credit(ctx);
        Ok(draft.transition_with_account("an operator credited a part of an allocation's cost", ctx).audit(audit))
    }
}

impl AccountUpdate {
    fn posting_name(kind: PostingKind, reference: &str) -> String {
        format!("{} {reference}", kind.name())
    }

    /// True where it was not posted before. The posting is remembered in any case.
    fn is_first_posting(
        &mut self,
        kind: PostingKind,
        reference: &str,
        amount_minor: i64,
        ctx: &TransitionContext<'_>,
    ) -> bool {
        let name = Self::posting_name(kind, reference);
        let is_news = !self.account.moved.contains_key(&name);
        self.remember_posting(name, PostingResult::Posted { amount_minor }, ctx);
        is_news
    }

    fn remember_posting(&mut self, name: String, how: PostingResult, ctx: &TransitionContext<'_>) {
        let moved = &mut self.account.moved;
        moved.retain(|_, it| ctx.now < it.at + POSTING_RETENTION);
        moved.insert(name, PostingRecord { at: ctx.now, how });
        let refunds = Self::posting_name(PostingKind::Refund, "");
        let may_be_forgotten = |name: &str, it: &PostingRecord| {
            matches!(it.how, PostingResult::Posted { .. }) && !name.starts_with(&refunds)
        };
        let posted = moved.iter().filter(|(name, it)| may_be_forgotten(name, it));
        let mut posted: Vec<_> = posted.map(|(name, it)| (it.at, name.clone())).collect();
        posted.sort_unstable();
        let surplus = posted.len().saturating_sub(MAX_POSTED_REMEMBERED);
        for (_, name) in posted.into_iter().take(surplus).filter(|(at, _)| *at + POSTED_RETENTION <= ctx.now) {
            moved.remove(&name);
        }
        while moved.len() > MAX_POSTINGS_REMEMBERED {
            let Some(oldest) = moved.iter().min_by_key(|(_, it)| it.at).map(|(name, _)| name.clone()) else { break };
            moved.remove(&oldest);
        }
    }

    fn move_money(&mut self, kind: PostingKind, payment_id: PaymentId, reference: String, amount: MicroAmount) {
        self.write(kind, amount, None, Some(PostingSource { payment_id: Some(payment_id), reference }), None);
    }

    /// A deposit in another currency is refused: there is no exchange rate.
    fn credit_deposit(
        &mut self,
        payment_id: PaymentId,
        currency: &Currency,
        amount: MicroAmount,
        ctx: &TransitionContext<'_>,
    ) -> PostingResult {
        if self.account.has_no_currency_yet() {
            self.account.currency = currency.clone();
        }
        if let Err(rejection) = self.account.in_currency(currency) {
            return PostingResult::Refused { why: rejection.to_string() };
        }
        self.settle(ctx);
        self.move_money(PostingKind::Deposit, payment_id, payment_id.to_string(), amount);
        self.after_credit(ctx);
        PostingResult::Posted { amount_minor: amount.minor() }
    }

    fn debit_refund(
        &mut self,
        refund_id: RefundId,
        payment_id: PaymentId,
        amount_minor: i64,
        is_exact: bool,
        ctx: &TransitionContext<'_>,
    ) -> PostingResult {
        let window = ctx.policy.seconds(PolicyKey::BillingWindow, &self.account.scopes(), ctx.now);
        let (available, paid) = (self.account.available(ctx.now, window), self.account.paid());
        let there = available.min(paid).minor();
        let most = amount_minor.min(there);
        let takes = if is_exact { amount_minor } else { most - most % self.account.currency.payment_step_minor() };
        match checked_amount(takes) {
            Ok(amount) if takes <= there => {
                self.move_money(PostingKind::Refund, payment_id, refund_id.to_string(), amount);
                PostingResult::Posted { amount_minor: takes }
            }
            Ok(_) | Err(_) => {
                let there = MicroAmount::of_minor(there.max(0)).unwrap_or_default();
                let there = there.in_currency(&self.account.currency);
                let why = match paid < available {
                    true => {
                        format!("{there} were paid in and are not spent; the rest is credit, which is not paid out")
                    }
                    false => format!("{there} are not spent or held"),
                };
                PostingResult::Refused { why }
            }
        }
    }

    fn remember_refund(
        &mut self,
        allocation_id: AllocationId,
        refund_id: RefundId,
        amount: MicroAmount,
        ctx: &TransitionContext<'_>,
    ) {
        let account = &mut self.account;
        let longest = TimeDelta::days(PolicyKey::AllocationRefundWindow.most());
        let meters = &account.meters;
        account.refunded.retain(|id, it| meters.contains_key(id) || ctx.now < it.at + longest);
        let refunded = account.refunded.entry(allocation_id).or_default();
        refunded.refunds.insert(refund_id, amount);
        refunded.at = ctx.now;
    }
}

fn checked_amount(minor: i64) -> Result<MicroAmount, Rejection> {
    let amount = MicroAmount::of_minor(minor).filter(|_| (1..=HIGHEST_BALANCE_MINOR).contains(&minor));
    amount.ok_or(Rejection::Amount { max: HIGHEST_BALANCE_MINOR, currency: None })
}
