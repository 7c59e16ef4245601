//! A billing account: prepaid money, and the meters of what it is spent on (decisions 6; the design is in deploy/decisions/0025).
//!
//! It belongs to a user, or to the org that the user's token names. The allocation's saga asks it before anything else to hold what
//! a first window costs; from then on it hears of the allocation by [`Command::Usage`] alone, which says all that is known each time, so
//! that it may come late, twice and in any order. A meter counts from its allocation's beginning; what is due is the difference to what was
//! charged before (`Rate::over`), so that nothing is lost and nothing is charged twice, however long the windows are and however late they
//! are worked on.
//!
//! ```text
//! open ──next window not covered──▶ grace ──its end: what runs is released──▶ depleted
//!   ▲──money comes in, or less runs───┘                                          │
//!   └──────────────────────money comes in, or something cheaper is covered───────┘
//! ```

mod accrual;
mod meter;
mod payments;
#[cfg(test)]
mod tests;

use crate::again::Again;
use crate::audit::{Audit, AuditAction};
use crate::authz::Action;
use crate::id::{AllocationId, BillingAccountId, EntityRef, Kind, PaymentId, RefundId};
use crate::ledger::PostingKind;
use crate::machine::{self, Ctx, Deadline, Keys, Machine, Step, Timestamp};
use crate::money::{Currency, HIGHEST_BALANCE_MINOR, Micro, Price, Rate};
use crate::policy::{Key, Scopes};
use accrual::Draft;
use payments::Spent;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt;

pub use accrual::Window;
pub use meter::{Meter, Run};
pub use payments::{How, Moved, Refunded};

/// Whose an account is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Holder {
    User(String),
    Org(String),
}

impl Holder {
    /// Who pays for what this user rents: the org, where their token names one.
    #[must_use]
    pub fn paying_for(user_id: &str, org_id: Option<&str>) -> Self {
        org_id.map_or_else(|| Self::User(user_id.to_owned()), |org| Self::Org(org.to_owned()))
    }

    fn is_user(&self, user_id: &str) -> bool {
        matches!(self, Self::User(id) if id == user_id)
    }

    /// The org whose it is.
    #[must_use]
    pub fn org_id(&self) -> Option<&str> {
        match self {
            Self::User(_) => None,
            Self::Org(id) => Some(id),
        }
    }

    /// The scopes in which the account's own policies are resolved.
    #[must_use]
    pub fn scopes(&self) -> Scopes {
        match self {
            Self::User(id) => Scopes { user_id: Some(id.clone()), ..Scopes::default() },
            Self::Org(id) => Scopes { org_id: Some(id.clone()), ..Scopes::default() },
        }
    }
}

/// The holder's one name, from which the account's id follows: `user:ann`, `org:acme`.
impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(id) => write!(f, "user:{id}"),
            Self::Org(id) => write!(f, "org:{id}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BillingAccount {
    pub id: BillingAccountId,
    pub holder: Holder,
    pub currency: Currency,
    /// What is in the ledger's `prepaid` for it: the sum of its entries.
    pub balance: Micro,
    /// How many postings it has.
    pub postings: i64,
    pub meters: BTreeMap<AllocationId, Meter>,
    /// Allocations that were billed to their end lately: what is said of them late is not billed again.
    pub ended: BTreeMap<AllocationId, Timestamp>,
    /// The window that is running, while something is metered.
    pub window: Option<Window>,
    /// The balance is below the threshold, and that was said, or it was never above.
    pub is_low: bool,
    pub depletion: Option<Depletion>,
    /// When it asks again how its allocations stand.
    pub again: Option<Again>,
    /// What payments moved lately: said again, it is answered again and not posted again.
    #[serde(default)]
    pub moved: BTreeMap<String, Moved>,
    /// What was given back of allocations' costs.
    #[serde(default)]
    pub refunded: BTreeMap<AllocationId, Refunded>,
    pub opened_at: Timestamp,
}

/// The next window is not covered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Depletion {
    /// The end of the last window that was covered.
    pub at: Timestamp,
    /// The grace is over: what runs is released, and what accrues from then on is ours to bear.
    pub release_at: Timestamp,
    /// It has come to that.
    pub is_over: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    Open {
        holder: Holder,
        currency: Currency,
    },
    /// Sets aside what a first window of the allocation costs, if that is there.
    Hold {
        holder: Holder,
        allocation_id: AllocationId,
        user_id: String,
        price: Price,
        gpu_count: u32,
    },
    /// All that is known of when the allocation was and is used. Without a beginning and with an end: it never will be.
    Usage {
        allocation_id: AllocationId,
        from: Option<Timestamp>,
        until: Option<Timestamp>,
    },
    /// An operator gives, or with a negative amount takes.
    Adjust {
        amount_minor: i64,
        currency: Currency,
        reason: String,
    },
    /// A payment is there. It opens the account, where there is none.
    Deposit {
        payment_id: PaymentId,
        holder: Holder,
        currency: Currency,
        amount_minor: i64,
    },
    /// Sets aside what a payer asks back, if that is there; where it is not exact, less will do.
    TakeRefund {
        refund_id: RefundId,
        payment_id: PaymentId,
        amount_minor: i64,
        is_exact: bool,
    },
    /// The processor has not paid it.
    GiveBackRefund {
        refund_id: RefundId,
        payment_id: PaymentId,
        amount_minor: i64,
    },
    /// Of a payment something was taken back at the processor.
    Reverse {
        reversal_id: String,
        payment_id: PaymentId,
        is_dispute: bool,
        amount_minor: i64,
    },
    /// And is there again.
    UndoReversal {
        reversal_id: String,
        payment_id: PaymentId,
        is_dispute: bool,
        amount_minor: i64,
    },
    /// An operator gives back of what an allocation has cost: so much, or all that is left of it.
    RefundAllocation {
        refund_id: RefundId,
        allocation_id: AllocationId,
        /// What it has cost, by the ledger, where it is not metered any more.
        cost: Option<Micro>,
        /// When it ended.
        ended_at: Option<Timestamp>,
        amount_minor: Option<i64>,
        reason: String,
    },
    Tick,
}

impl machine::Command for Command {
    fn name(&self) -> &'static str {
        match self {
            Self::Open { .. } => "open",
            Self::Hold { .. } => "hold",
            Self::Usage { .. } => "usage",
            Self::Adjust { .. } => "adjust",
            Self::Deposit { .. } => "deposit",
            Self::TakeRefund { .. } => "take_refund",
            Self::GiveBackRefund { .. } => "give_back_refund",
            Self::Reverse { .. } => "reverse",
            Self::UndoReversal { .. } => "undo_reversal",
            Self::RefundAllocation { .. } => "refund_allocation",
            Self::Tick => "tick",
        }
    }

    fn action(&self) -> Action {
        match self {
            Self::Open { .. } | Self::Adjust { .. } | Self::RefundAllocation { .. } => Action::AdjustBilling,
            Self::Hold { .. }
            | Self::Usage { .. }
            | Self::Deposit { .. }
            | Self::TakeRefund { .. }
            | Self::GiveBackRefund { .. }
            | Self::Reverse { .. }
            | Self::UndoReversal { .. }
            | Self::Tick => Action::Advance,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    Account { account: Box<BillingAccount> },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("there is no such billing account")]
    NotFound,
    #[error("{needed} minor units are needed, and {available} are available")]
    InsufficientBalance { needed: Micro, available: Micro },
    #[error("the account is in {account}, and this is in {given}")]
    CurrencyDiffers { account: String, given: String },
    #[error("an adjustment is at most {max} minor units, and not zero")]
    Amount { max: i64 },
    #[error("an account holds at most {HIGHEST_BALANCE_MINOR} minor units")]
    Full,
    #[error("of what the allocation has cost {left} minor units are left")]
    MoreThanCost { left: Micro },
    #[error("the allocation ended longer than {days} days ago")]
    TooLate { days: i64 },
    #[error("so much was given back of the allocation in too many pieces")]
    TooManyRefunds,
    #[error("the allocation has just ended or begun")]
    Moved,
}

impl Machine for BillingAccount {
    const KIND: Kind = Kind::BillingAccount;
    /// A meter for each allocation of the quota (10,000 at most), and what is remembered of payments and refunds.
    const SNAPSHOT_MOST: usize = 4096 * 1024;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(state: Option<&Self>, command: Command, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match (state, command) {
            (None, Command::Open { holder, currency }) => {
                let account = Self::opened(holder, currency, ctx);
                let audit = account.audit(AuditAction::BillingOpen, json!({ "currency": account.currency.as_str() }));
                Ok(Draft::of(&account).step_shown("opened by an operator", ctx).audit(audit))
            }
            // What costs nothing needs no money, and yet a meter.
            (None, Command::Hold { holder, allocation_id, user_id, price, gpu_count }) => {
                let account = Self::opened(holder, price.currency.clone(), ctx);
                account.hold(allocation_id, user_id, &price, gpu_count, ctx)
            }
            (None, Command::Deposit { payment_id, holder, currency, amount_minor }) => {
                let account = Self::opened(holder, currency.clone(), ctx);
                account.deposit(payment_id, &currency, amount_minor, ctx)
            }
            (None, Command::Usage { .. } | Command::Tick) => Ok(Step::stay(Reply::Done)),
            (
                None,
                Command::Adjust { .. }
                | Command::TakeRefund { .. }
                | Command::GiveBackRefund { .. }
                | Command::Reverse { .. }
                | Command::UndoReversal { .. }
                | Command::RefundAllocation { .. },
            ) => Err(Rejection::NotFound),
            (Some(account), Command::Open { currency, .. }) => account.open_again(&currency),
            (Some(account), Command::Hold { holder: _, allocation_id, user_id, price, gpu_count }) => {
                account.hold(allocation_id, user_id, &price, gpu_count, ctx)
            }
            (Some(account), Command::Usage { allocation_id, from, until }) => {
                Ok(account.usage(allocation_id, from, until, ctx))
            }
            (Some(account), Command::Adjust { amount_minor, currency, reason }) => {
                account.adjust(amount_minor, &currency, reason, ctx)
            }
            (Some(account), Command::Deposit { payment_id, holder: _, currency, amount_minor }) => {
                account.deposit(payment_id, &currency, amount_minor, ctx)
            }
            (Some(account), Command::TakeRefund { refund_id, payment_id, amount_minor, is_exact }) => {
                account.take_refund(refund_id, payment_id, amount_minor, is_exact, ctx)
            }
            (Some(account), Command::GiveBackRefund { refund_id, payment_id, amount_minor }) => {
                account.give_back_refund(refund_id, payment_id, amount_minor, ctx)
            }
            (Some(account), Command::Reverse { reversal_id, payment_id, is_dispute, amount_minor }) => {
                account.reverse(reversal_id, payment_id, is_dispute, amount_minor, ctx)
            }
            (Some(account), Command::UndoReversal { reversal_id, payment_id, is_dispute, amount_minor }) => {
                account.undo_reversal(reversal_id, payment_id, is_dispute, amount_minor, ctx)
            }
            (
                Some(account),
                Command::RefundAllocation { refund_id, allocation_id, cost, ended_at, amount_minor, reason },
            ) => {
                account.refund_allocation(refund_id, allocation_id, Spent { cost, ended_at }, amount_minor, reason, ctx)
            }
            (Some(account), Command::Tick) => Ok(account.tick(ctx)),
        }
    }

    fn state(&self) -> &'static str {
        match self.depletion {
            None => "open",
            Some(Depletion { is_over: false, .. }) => "grace",
            Some(Depletion { is_over: true, .. }) => "depleted",
        }
    }

    fn deadline(&self) -> Option<Deadline> {
        let depletion = self.depletion.filter(|depletion| !depletion.is_over)?;
        Some(Deadline::new(
            depletion.release_at,
            "the next window is not covered: waiting for money, or to release what runs",
        ))
    }

    fn timer(&self) -> Option<Timestamp> {
        let window = self.window.map(|window| window.ends_at);
        let release = self.deadline().map(|deadline| deadline.at);
        [window, release, self.again.map(|again| again.at)].into_iter().flatten().min()
    }

    fn keys(&self) -> Keys {
        match &self.holder {
            Holder::User(user_id) => Keys { owner: Some(user_id.clone()), ..Keys::default() },
            Holder::Org(_) => Keys::default(),
        }
    }

    fn tick() -> Command {
        Command::Tick
    }
}

impl BillingAccount {
    fn opened(holder: Holder, currency: Currency, ctx: &Ctx<'_>) -> Self {
        Self {
            id: BillingAccountId(ctx.id),
            holder,
            currency,
            balance: Micro::ZERO,
            postings: 0,
            meters: BTreeMap::new(),
            ended: BTreeMap::new(),
            window: None,
            // An account that begins with nothing has not fallen below anything.
            is_low: true,
            depletion: None,
            again: None,
            moved: BTreeMap::new(),
            refunded: BTreeMap::new(),
            opened_at: ctx.now,
        }
    }

    fn open_again(&self, currency: &Currency) -> Result<Step<Self>, Rejection> {
        self.in_currency(currency)?;
        Ok(Step::stay(Reply::Account { account: Box::new(self.clone()) }))
    }

    fn in_currency(&self, given: &Currency) -> Result<(), Rejection> {
        if self.currency == *given {
            return Ok(());
        }
        let (account, given) = (self.currency.as_str().to_owned(), given.as_str().to_owned());
        Err(Rejection::CurrencyDiffers { account, given })
    }

    /// What could be held for something new: the balance without what is held, and without what runs may cost for a window from `now`. The
    /// running window may end later than that, where windows were longer when it began: it is covered to its end.
    #[must_use]
    pub fn available(&self, now: Timestamp, window: chrono::TimeDelta) -> Micro {
        let until = self.window.map_or(now + window, |running| running.ends_at.max(now + window));
        self.balance.minus(self.reserved(until))
    }

    /// What must be there for all that is held and runs, where the next charge is at `until`.
    fn reserved(&self, until: Timestamp) -> Micro {
        self.meters.values().map(|meter| meter.reserved(until)).sum()
    }

    /// True where the balance covers what can accrue until the next charge. In the grace after a depletion, and after it, each
    /// allocation has an end of its own instead (`Run::cut_at`).
    #[must_use]
    pub fn is_covered_until_the_next_charge(&self) -> bool {
        let in_grace = self.depletion.is_some_and(|depletion| !depletion.is_over);
        !self.meters.values().any(Meter::accrues) || !in_grace && self.runs_are_covered()
    }

    /// The balance is enough for what runs, not counting what is held for others.
    fn runs_are_covered(&self) -> bool {
        self.window.is_some_and(|window| {
            let running = self.meters.values().filter(|meter| meter.run.is_some());
            running.map(|meter| meter.reserved(window.ends_at)).sum::<Micro>() <= self.balance
        })
    }

    /// What is set aside for what is not active yet.
    #[must_use]
    pub fn held(&self) -> Micro {
        self.meters.values().filter(|meter| meter.run.is_none()).map(|meter| meter.held).sum()
    }

    /// What runs costs an hour, in minor units.
    #[must_use]
    pub fn burn_minor_per_hour(&self) -> i64 {
        self.running().map(|(meter, _)| meter.rate.minor_per_hour()).fold(0, i64::saturating_add)
    }

    /// What accrued until `now` and is not posted.
    #[must_use]
    pub fn accrued(&self, now: Timestamp) -> Micro {
        self.running().map(|(meter, run)| run.due(meter.rate, now)).sum()
    }

    /// Who rents what is metered.
    #[must_use]
    pub fn renter<'a>(&'a self, meter: &'a Meter) -> &'a str {
        let (Holder::User(holder) | Holder::Org(holder)) = &self.holder;
        meter.user_id.as_deref().unwrap_or(holder)
    }

    /// Those whose allocation is active.
    pub fn running(&self) -> impl Iterator<Item = (&Meter, &Run)> {
        self.meters.values().filter_map(|meter| meter.run.as_ref().map(|run| (meter, run)))
    }

    fn hold(
        &self,
        allocation_id: AllocationId,
        user_id: String,
        price: &Price,
        gpu_count: u32,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        if self.meters.contains_key(&allocation_id) || self.ended.contains_key(&allocation_id) {
            return Ok(Step::stay(Reply::Done));
        }
        let rate = Rate::of(price, gpu_count);
        let mut draft = Draft::of(self);
        draft.settle(ctx);
        let window = ctx.policy.seconds(Key::BillingWindow, &self.holder.scopes(), ctx.now);
        let needed = rate.over(ctx.now, ctx.now + window);
        if rate.minor_per_hour() > 0 {
            self.in_currency(&price.currency)?;
            let available = draft.account.available(ctx.now, window);
            if available < needed || available <= Micro::ZERO {
                return Err(Rejection::InsufficientBalance { needed, available });
            }
            // It goes on with what is left.
            draft.account.depletion = draft.account.depletion.filter(|depletion| !depletion.is_over);
        }
        let user_id = Some(user_id).filter(|user_id| !self.holder.is_user(user_id));
        let meter = Meter { user_id, rate, held: needed, run: None };
        draft.account.meters.insert(allocation_id, meter);
        draft.account.again = Some(Again::first(ctx.now));
        Ok(draft.step(format!("a window of allocation {allocation_id} is held"), ctx))
    }

    fn usage(
        &self,
        allocation_id: AllocationId,
        from: Option<Timestamp>,
        until: Option<Timestamp>,
        ctx: &Ctx<'_>,
    ) -> Step<Self> {
        let Some(meter) = self.meters.get(&allocation_id) else { return Step::stay(Reply::Done) };
        if meter.run.is_some() && until.is_none() {
            return Step::stay(Reply::Done);
        }
        let mut draft = Draft::of(self);
        match (from, until) {
            (None, None) => return Step::stay(Reply::Done),
            (None, Some(_)) if meter.run.is_none() => draft.drop_hold(allocation_id, ctx),
            // Said by somebody who did not know more: it did begin.
            (None, Some(_)) => return Step::stay(Reply::Done),
            (Some(from), until) => {
                draft.settle_until(from.min(ctx.now), ctx);
                draft.begin(allocation_id, from, ctx);
                if let Some(until) = until {
                    draft.settle_until(until.min(ctx.now), ctx);
                    draft.end(allocation_id, until, ctx);
                }
            }
        }
        draft.settle(ctx);
        let since = if until.is_none() { "metered" } else { "metered no more" };
        draft.step(format!("allocation {allocation_id} is {since}"), ctx)
    }

    fn adjust(
        &self,
        amount_minor: i64,
        currency: &Currency,
        reason: String,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        let max = ctx.policy.int(Key::BillingAdjustmentMax, &self.holder.scopes(), ctx.now);
        let amount =
            Micro::of_minor(amount_minor).filter(|_| amount_minor != 0 && (-max..=max).contains(&amount_minor));
        let amount = amount.ok_or(Rejection::Amount { max })?;
        self.in_currency(currency)?;
        let mut draft = Draft::of(self);
        draft.settle(ctx);
        let audit = self.audit(
            AuditAction::BillingAdjust,
            json!({ "amount_minor": amount_minor, "currency": currency.as_str(), "reason": reason }),
        );
        if amount_minor > 0 {
            if draft.account.balance.plus(amount).minor() > HIGHEST_BALANCE_MINOR {
                return Err(Rejection::Full);
            }
            draft.post(PostingKind::Credit, amount, None, Some(reason));
            draft.money_came_in(ctx);
        } else {
            let window = ctx.policy.seconds(Key::BillingWindow, &self.holder.scopes(), ctx.now);
            let (needed, available) = (Micro::ZERO.minus(amount), draft.account.available(ctx.now, window));
            if available < needed {
                return Err(Rejection::InsufficientBalance { needed, available });
            }
            draft.post(PostingKind::Debit, needed, None, Some(reason));
        }
        Ok(draft.step_shown("adjusted by an operator", ctx).audit(audit))
    }

    fn tick(&self, ctx: &Ctx<'_>) -> Step<Self> {
        let mut draft = Draft::of(self);
        draft.ask_again(ctx);
        draft.settle(ctx);
        if draft.account == *self { Step::stay(Reply::Done) } else { draft.step("what was due is done", ctx) }
    }

    fn audit(&self, action: AuditAction, mut metadata: serde_json::Value) -> Audit {
        if let Some(fields) = metadata.as_object_mut() {
            fields.insert("holder".to_owned(), json!(self.holder.to_string()));
        }
        Audit::new(action, EntityRef { kind: Kind::BillingAccount, id: self.id.0 }, metadata)
    }
}
