//! What payments move: deposits, refunds, and what is taken back at the processor. Each is posted once, however often it is said; and each
//! time it is said it is answered, since the answer may have been lost.

use super::accrual::Draft;
use super::{BillingAccount, Rejection};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::{AllocationId, PaymentId, RefundId};
use crate::ledger::{PostingKind, Source, Usage};
use crate::machine::{Ctx, Step, Timestamp};
use crate::money::{Currency, HIGHEST_BALANCE_MINOR, Micro};
use crate::policy::Key;
use chrono::{SubsecRound, TimeDelta};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;

/// A payment says again what is not answered for as long as it takes, an hour apart at most; so long after it was said last nobody does. The
/// ledger refuses what is posted twice all the same.
const REMEMBERED_FOR: TimeDelta = TimeDelta::days(30);
const REMEMBERED: usize = 1024;
/// Of one allocation's cost.
const MOST_REFUNDS: usize = 100;

/// What became of something that a payment said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// When it was said last.
    pub at: Timestamp,
    pub how: How,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    Posted { amount_minor: i64 },
    Refused { why: String },
}

/// What was given back of an allocation's cost.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refunded {
    /// How much by each refund.
    pub refunds: BTreeMap<RefundId, Micro>,
    /// The last refund, or the allocation's end.
    pub at: Timestamp,
}

impl Refunded {
    #[must_use]
    pub fn amount(&self) -> Micro {
        self.refunds.values().copied().sum()
    }
}

/// What an allocation has cost, as whoever asks has read it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spent {
    pub(super) cost: Option<Micro>,
    pub(super) ended_at: Option<Timestamp>,
}

impl BillingAccount {
    /// Nothing was posted, and what it pays for costs nothing: its currency is that of whoever comes first with money.
    fn is_of_no_currency(&self) -> bool {
        self.postings == 0 && self.meters.values().all(|meter| meter.rate.minor_per_hour() == 0)
    }

    pub(super) fn deposit(
        &self,
        payment_id: PaymentId,
        currency: &Currency,
        amount_minor: i64,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        let mut draft = Draft::of(self);
        let amount = counted(amount_minor)?;
        let account_id = self.id;
        let name = Draft::name_of(PostingKind::Deposit, &payment_id.to_string());
        let known = self.moved.get(&name).map(|known| known.how.clone());
        let is_again = known.is_some();
        // Once refused is refused: its payer may have it back.
        let how = match known {
            Some(how) => how,
            None => draft.put_in(payment_id, currency, amount, ctx),
        };
        draft.remember_move(name, how.clone(), ctx);
        draft.say(match how {
            How::Posted { .. } => Event::PaymentDeposited { payment_id, account_id, is_again },
            How::Refused { why } => Event::DepositRefused { payment_id, account_id, reason: why, is_again },
        });
        Ok(draft.step("a payment came in", ctx))
    }

    /// Taken before the processor is asked: so it cannot be spent while it is on its way.
    pub(super) fn take_refund(
        &self,
        refund_id: RefundId,
        payment_id: PaymentId,
        amount_minor: i64,
        is_exact: bool,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        counted(amount_minor)?;
        let mut draft = Draft::of(self);
        draft.settle(ctx);
        let name = Draft::name_of(PostingKind::Refund, &refund_id.to_string());
        let known = draft.account.moved.get(&name).map(|known| known.how.clone());
        let is_again = known.is_some();
        let how = match known {
            Some(how) => how,
            None => draft.take_if_there(refund_id, payment_id, amount_minor, is_exact, ctx),
        };
        draft.remember_move(name, how.clone(), ctx);
        let account_id = self.id;
        draft.say(match how {
            How::Posted { amount_minor } => Event::RefundTaken { payment_id, refund_id, account_id, amount_minor },
            How::Refused { why } => Event::RefundRefused { payment_id, refund_id, account_id, reason: why, is_again },
        });
        Ok(draft.step("a payer wants money back", ctx))
    }

    pub(super) fn give_back_refund(
        &self,
        refund_id: RefundId,
        payment_id: PaymentId,
        amount_minor: i64,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        let amount = counted(amount_minor)?;
        let mut draft = Draft::of(self);
        let is_again = !draft.is_news(PostingKind::RefundReturned, &refund_id.to_string(), amount_minor, ctx);
        if !is_again {
            draft.settle(ctx);
            draft.move_money(PostingKind::RefundReturned, payment_id, refund_id.to_string(), amount);
            draft.money_came_in(ctx);
        }
        draft.say(Event::RefundGivenBack { payment_id, refund_id, account_id: self.id, is_again });
        Ok(draft.step("a refund failed", ctx))
    }

    /// In full, whatever is there.
    pub(super) fn reverse(
        &self,
        reversal_id: String,
        payment_id: PaymentId,
        is_dispute: bool,
        amount_minor: i64,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        let amount = counted(amount_minor)?;
        let kind = if is_dispute { PostingKind::Dispute } else { PostingKind::Reversal };
        let mut draft = Draft::of(self);
        let is_again = !draft.is_news(kind, &reversal_id, amount_minor, ctx);
        if !is_again {
            draft.settle(ctx);
            draft.move_money(kind, payment_id, reversal_id.clone(), amount);
            draft.money_went_out(ctx);
        }
        let account_id = self.id;
        draft.say(Event::ReversalPosted { payment_id, reversal_id, account_id, is_undone: false, is_again });
        Ok(draft.step("of a payment something was taken back at the processor", ctx))
    }

    pub(super) fn undo_reversal(
        &self,
        reversal_id: String,
        payment_id: PaymentId,
        is_dispute: bool,
        amount_minor: i64,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        let amount = counted(amount_minor)?;
        let kind = if is_dispute { PostingKind::DisputeWon } else { PostingKind::ReversalUndone };
        let mut draft = Draft::of(self);
        let is_again = !draft.is_news(kind, &reversal_id, amount_minor, ctx);
        if !is_again {
            draft.settle(ctx);
            draft.move_money(kind, payment_id, reversal_id.clone(), amount);
            draft.money_came_in(ctx);
        }
        let account_id = self.id;
        draft.say(Event::ReversalPosted { payment_id, reversal_id, account_id, is_undone: true, is_again });
        Ok(draft.step("what was taken back is there again", ctx))
    }

    pub(super) fn refund_allocation(
        &self,
        refund_id: RefundId,
        allocation_id: AllocationId,
        spent: Spent,
        amount_minor: Option<i64>,
        reason: String,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        let mut draft = Draft::of(self);
        if self.refunded.get(&allocation_id).is_some_and(|refunded| refunded.refunds.contains_key(&refund_id)) {
            return Ok(Step::stay(super::Reply::Account { account: Box::new(self.clone()) }));
        }
        if self.refunded.get(&allocation_id).is_some_and(|refunded| refunded.refunds.len() >= MOST_REFUNDS) {
            return Err(Rejection::TooManyRefunds);
        }
        let days = ctx.policy.int(Key::AllocationRefundWindow, &self.holder.scopes(), ctx.now);
        if spent.ended_at.unwrap_or(ctx.now) < ctx.now - TimeDelta::days(days) || days == 0 {
            return Err(Rejection::TooLate { days });
        }
        draft.settle(ctx);
        let run = draft.account.meters.get(&allocation_id).map(|meter| meter.run);
        let cost = match (run, spent.cost) {
            (Some(run), None) => run.map_or(Micro::ZERO, |run| run.charged),
            (None, Some(cost)) => cost,
            // What was read of it was about another time.
            (Some(_), Some(_)) | (None, None) => return Err(Rejection::Moved),
        };
        let left = draft.not_refunded(allocation_id, cost);
        let amount = amount_minor.map_or(Some(left), Micro::of_minor);
        let amount = amount.filter(|amount| *amount > Micro::ZERO && *amount <= left);
        let amount = amount.ok_or(Rejection::MoreThanCost { left })?;
        let audit = self.audit(
            AuditAction::BillingRefundAllocation,
            json!({
                "refund_id": refund_id, "allocation_id": allocation_id, "amount_micro": amount.get(), "reason": reason,
            }),
        );
        let now = ctx.now.trunc_subsecs(6);
        let usage = Some(Usage { allocation_id, from: now, until: now, cost });
        let source = Some(Source { payment_id: None, reference: refund_id.to_string() });
        draft.write(PostingKind::AllocationRefund, amount, usage, source, Some(reason));
        draft.remember_refund(allocation_id, refund_id, amount, ctx);
        draft.money_came_in(ctx);
        Ok(draft.step_shown("an operator gave back of an allocation's cost", ctx).audit(audit))
    }
}

impl Draft {
    fn name_of(kind: PostingKind, reference: &str) -> String {
        format!("{} {reference}", kind.name())
    }

    /// True where it was not posted before. It is remembered in any case.
    fn is_news(&mut self, kind: PostingKind, reference: &str, amount_minor: i64, ctx: &Ctx<'_>) -> bool {
        let name = Self::name_of(kind, reference);
        let is_news = !self.account.moved.contains_key(&name);
        self.remember_move(name, How::Posted { amount_minor }, ctx);
        is_news
    }

    fn remember_move(&mut self, name: String, how: How, ctx: &Ctx<'_>) {
        let moved = &mut self.account.moved;
        moved.retain(|_, it| ctx.now < it.at + REMEMBERED_FOR);
        moved.insert(name, Moved { at: ctx.now, how });
        while moved.len() > REMEMBERED {
            let Some(oldest) = moved.iter().min_by_key(|(_, it)| it.at).map(|(name, _)| name.clone()) else { break };
            moved.remove(&oldest);
        }
    }

    fn move_money(&mut self, kind: PostingKind, payment_id: PaymentId, reference: String, amount: Micro) {
        self.write(kind, amount, None, Some(Source { payment_id: Some(payment_id), reference }), None);
    }

    /// Where nobody can say what it is worth in the account's money, it stays out.
    fn put_in(&mut self, payment_id: PaymentId, currency: &Currency, amount: Micro, ctx: &Ctx<'_>) -> How {
        if self.account.is_of_no_currency() {
            self.account.currency = currency.clone();
        }
        if let Err(rejection) = self.account.in_currency(currency) {
            return How::Refused { why: rejection.to_string() };
        }
        self.settle(ctx);
        self.move_money(PostingKind::Deposit, payment_id, payment_id.to_string(), amount);
        self.money_came_in(ctx);
        How::Posted { amount_minor: amount.minor() }
    }

    fn take_if_there(
        &mut self,
        refund_id: RefundId,
        payment_id: PaymentId,
        amount_minor: i64,
        is_exact: bool,
        ctx: &Ctx<'_>,
    ) -> How {
        let window = ctx.policy.seconds(Key::BillingWindow, &self.account.holder.scopes(), ctx.now);
        let there = self.account.available(ctx.now, window).minor();
        let takes = if is_exact { amount_minor } else { amount_minor.min(there) };
        match counted(takes) {
            Ok(amount) if takes <= there => {
                self.move_money(PostingKind::Refund, payment_id, refund_id.to_string(), amount);
                How::Posted { amount_minor: takes }
            }
            Ok(_) | Err(_) => How::Refused { why: format!("{} minor units are not spent or held", there.max(0)) },
        }
    }

    /// What of a cost was not given back by an operator.
    pub(super) fn not_refunded(&self, allocation_id: AllocationId, cost: Micro) -> Micro {
        let refunded = self.account.refunded.get(&allocation_id).map_or(Micro::ZERO, Refunded::amount);
        cost.minus(refunded).max(Micro::ZERO)
    }

    fn remember_refund(&mut self, allocation_id: AllocationId, refund_id: RefundId, amount: Micro, ctx: &Ctx<'_>) {
        let account = &mut self.account;
        let longest = TimeDelta::days(Key::AllocationRefundWindow.most());
        let meters = &account.meters;
        account.refunded.retain(|id, it| meters.contains_key(id) || ctx.now < it.at + longest);
        let refunded = account.refunded.entry(allocation_id).or_default();
        refunded.refunds.insert(refund_id, amount);
        refunded.at = ctx.now;
    }

    /// What was given back of it can be asked for again until so long after its end.
    pub(super) fn ended_refunded(&mut self, allocation_id: AllocationId, ctx: &Ctx<'_>) {
        if let Some(refunded) = self.account.refunded.get_mut(&allocation_id) {
            refunded.at = ctx.now;
        }
    }
}

fn counted(minor: i64) -> Result<Micro, Rejection> {
    let amount = Micro::of_minor(minor).filter(|_| (1..=HIGHEST_BALANCE_MINOR).contains(&minor));
    amount.ok_or(Rejection::Amount { max: HIGHEST_BALANCE_MINOR })
}
