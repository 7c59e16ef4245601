//! A billing account: prepaid money, and the meters of what it is spent on (decisions 6; the design is in deploy/decisions/0022).
//!
//! It belongs to a user, or to the organization that the user's token names. The allocation's saga first asks it to hold the cost of a
//! first window; after that it learns of the allocation by [`Instruction::MeterUsage`] alone, which carries all that is known each time, so
//! that it may arrive late, twice and in any order. A meter counts from its allocation's start; what is due is the difference to what was
//! charged before (`HourlyRate::over`), so that nothing is lost and nothing is charged twice, however long the windows are and however late
//! they are processed.
//!
//! ```text
//! open ──next window not covered──▶ grace ──its end: what runs is released──▶ depleted
//!   ▲──money comes in, or less runs───┘                                          │
//!   └──────────────────────money comes in, or something cheaper is covered───────┘
//! ```

mod accrual;
mod credit;
mod holder_plan;
mod instruction;
mod meter;
mod payments;
mod refunded_cost;
mod request;
#[cfg(test)]
mod tests;

use crate::audit::{AuditAction, AuditRecord};
use crate::explanation::{Explanation, RejectionCode};
use crate::history::{HistoryEntry, Invariant};
use crate::id::{AllocationId, BillingAccountId, EntityKind, EntityRef, UserId};
use crate::ledger::PostingKind;
use crate::money::{Currency, HIGHEST_BALANCE_MINOR, HourlyRate, MicroAmount, Price, minor_in_currency};
use crate::policy::{PolicyKey, Scopes};
use crate::resend_timer::ResendTimer;
use crate::state_machine::{self, Deadline, IndexKeys, Machine, TickOnly, Timestamp, Transition, TransitionContext};
use crate::summand::{Amounts, SumGroup, Summand};
use accrual::AccountUpdate;
use payments::AllocationCost;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;

pub use crate::account_holder::Holder;
pub use accrual::Window;
pub use holder_plan::{HolderPlan, PlanClaim};
pub use instruction::Instruction;
pub use meter::{MeterRun, UsageMeter};
pub use payments::{PostingRecord, PostingResult};
pub use refunded_cost::RefundedCost;
pub use request::Request;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BillingAccount {
    pub id: BillingAccountId,
    pub holder: Holder,
    /// The plan in which its policies are resolved.
    #[serde(default, skip_serializing_if = "HolderPlan::is_unnamed")]
    pub plan: HolderPlan,
    pub currency: Currency,
    /// Its balance in the ledger's `prepaid` account: the sum of its entries.
    pub balance: MicroAmount,
    /// Credit by operators that is not spent. No payment is refunded from it.
    #[serde(default, skip_serializing_if = "MicroAmount::is_zero")]
    pub credit_left: MicroAmount,
    /// Credit by operators that usage has spent.
    #[serde(default, skip_serializing_if = "MicroAmount::is_zero")]
    pub credit_spent: MicroAmount,
    /// How many postings it has.
    pub postings: i64,
    pub meters: BTreeMap<AllocationId, UsageMeter>,
    /// Allocations that ended lately and were billed to their end: late usage of them is not billed again.
    pub ended: BTreeMap<AllocationId, Timestamp>,
    /// The current window, while any allocation is metered.
    pub window: Option<Window>,
    /// The balance is below the threshold and the event was published, or it was never above.
    pub is_low: bool,
    pub depletion: Option<Depletion>,
    /// When it asks its allocations for their state again.
    pub again: Option<ResendTimer>,
    /// The recent postings of payments: a repeated command is answered again and not posted again.
    #[serde(default)]
    pub moved: BTreeMap<String, PostingRecord>,
    /// The refunds of allocations' costs.
    #[serde(default)]
    pub refunded: BTreeMap<AllocationId, RefundedCost>,
    pub opened_at: Timestamp,
}

/// The next window is not covered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Depletion {
    /// The end of the last window that was covered.
    pub at: Timestamp,
    /// The end of the grace period: running allocations are released, and what accrues from then on is written off.
    pub release_at: Timestamp,
    /// The grace period has ended.
    pub is_over: bool,
}

/// The commands of a billing account.
pub type Command = state_machine::AnyCommand<Request, Instruction>;

state_machine::impl_command_from!(Request, Instruction);

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
    #[error("{} are needed, and {} are available", text_of(*.needed, .currency.as_ref()), text_of(*.available, .currency.as_ref()))]
    InsufficientBalance {
        needed: MicroAmount,
        available: MicroAmount,
        /// The account's; `None` from a member of an earlier release.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        currency: Option<Currency>,
    },
    #[error("the account is in {account}, and this is in {given}")]
    CurrencyDiffers { account: String, given: String },
    #[error("an adjustment is at most {}, and not zero", minor_in_currency(*.max, .currency.as_ref()))]
    Amount {
        max: i64,
        /// The account's; `None` from a member of an earlier release.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        currency: Option<Currency>,
    },
    #[error("an account holds at most {}", minor_in_currency(HIGHEST_BALANCE_MINOR, .currency.as_ref()))]
    Full {
        /// The account's; `None` from a member of an earlier release.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        currency: Option<Currency>,
    },
    #[error("{} of the allocation's cost can be credited", text_of(*.left, .currency.as_ref()))]
    MoreThanCost {
        left: MicroAmount,
        /// The account's; `None` from a member of an earlier release.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        currency: Option<Currency>,
    },
    #[error("the allocation ended longer than {days} days ago")]
    TooLate { days: i64 },
    #[error("the allocation has too many credits; credit no further part of it")]
    TooManyRefunds,
    #[error("the allocation has just ended or begun")]
    Moved,
}

/// The amount for people: in the currency, where that is known.
fn text_of(amount: MicroAmount, currency: Option<&Currency>) -> String {
    currency.map_or_else(|| format!("{amount} minor units"), |currency| amount.in_currency(currency))
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotFound => Explanation::not_found("billing account"),
            Self::InsufficientBalance { needed, available, currency } => Explanation::new(
                RejectionCode::InsufficientBalance,
                format!(
                    "{} are more than the {} that are available; take less, or pay in first.",
                    text_of(needed, currency.as_ref()),
                    text_of(available, currency.as_ref())
                ),
            )
            .detail("needed_micro", needed.get())
            .detail("available_micro", available.get()),
            Self::CurrencyDiffers { account, given } => Explanation::conflict(format!(
                "The account is in {account}, and not in {given}; an account keeps its currency."
            ))
            .detail("field", "currency")
            .detail("currency", account),
            Self::Amount { max, currency } => Explanation::invalid(
                format!(
                    "An adjustment is from {} to {}, and not zero, as policy `billing.adjustment_max_minor` says.",
                    minor_in_currency(-max, currency.as_ref()),
                    minor_in_currency(max, currency.as_ref())
                ),
                "amount_minor",
            )
            .limited_by(PolicyKey::BillingAdjustmentMax, max),
            Self::Full { currency } => {
                let most = minor_in_currency(HIGHEST_BALANCE_MINOR, currency.as_ref());
                Explanation::conflict(format!("No account holds more than {most}; give less."))
            }
            Self::MoreThanCost { left, currency } => Explanation::conflict(format!(
                "Of what the allocation has cost {} are left that were not given back; leave `amount_minor` out for all of it.",
                text_of(left, currency.as_ref())
            ))
            .detail("field", "amount_minor")
            .detail("left_micro", left.get()),
            Self::TooLate { days } => Explanation::conflict(format!(
                "The allocation ended longer than {days} days ago; policy \
                 `allocation.refund_window_days` lets nothing be refunded then."
            ))
            .limited_by(PolicyKey::AllocationRefundWindow, days),
            Self::TooManyRefunds => Explanation::conflict(
                "Too many pieces of the allocation's cost were given back; give the rest by an \
                 adjustment.",
            ),
            Self::Moved => Explanation::temporary("The allocation begins or ends at this moment; ask again."),
        }
    }
}

impl Machine for BillingAccount {
    const KIND: EntityKind = EntityKind::BillingAccount;
    /// A meter for each allocation of the quota (10,000 at most), and what is remembered of postings and refunds.
    const SNAPSHOT_MOST: usize = 4096 * 1024;
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
            (Some(account), Command::Request(request)) => account.execute(request, ctx),
            (Some(account), Command::Instruction(instruction)) => account.follow(instruction, ctx),
            (Some(account), Command::Maintenance(TickOnly::Tick)) => Ok(account.tick(ctx)),
            (None, Command::Request(request)) => Self::open_by_request(request, ctx),
            (None, Command::Instruction(instruction)) => Self::open_by_instruction(instruction, ctx),
            (None, Command::Maintenance(TickOnly::Tick)) => Ok(Transition::stay(Reply::Done)),
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

    fn keys(&self) -> IndexKeys {
        match &self.holder {
            Holder::User(user_id) => IndexKeys { owner: Some(user_id.to_string()), ..IndexKeys::default() },
            Holder::Org(_) => IndexKeys::default(),
        }
    }

    fn summand(&self) -> Option<Summand> {
        let group = SumGroup::Money { currency: self.currency.as_str().to_owned(), state: self.state().to_owned() };
        Some(Summand { group, amounts: Amounts { entities: 1, balance: self.balance.get(), ..Amounts::default() } })
    }

    fn is_transient(&self) -> bool {
        matches!(self.depletion, Some(Depletion { is_over: false, .. }))
    }

    fn violations(&self, _: &[HistoryEntry]) -> Vec<Invariant> {
        Invariant::violated([
            (Invariant::I3, self.is_covered_until_the_next_charge()),
            (Invariant::I8, self.has_deadline_where_transient()),
        ])
    }
}

impl BillingAccount {
    fn opened(holder: Holder, currency: Currency, ctx: &TransitionContext<'_>) -> Self {
        Self {
            id: BillingAccountId(ctx.id),
            holder,
            plan: HolderPlan::default(),
            currency,
            balance: MicroAmount::ZERO,
            credit_left: MicroAmount::ZERO,
            credit_spent: MicroAmount::ZERO,
            postings: 0,
            meters: BTreeMap::new(),
            ended: BTreeMap::new(),
            window: None,
            // An empty account is low from the start: its balance did not fall below the threshold.
            is_low: true,
            depletion: None,
            again: None,
            moved: BTreeMap::new(),
            refunded: BTreeMap::new(),
            opened_at: ctx.now,
        }
    }

    /// The scopes in which its policies are resolved (decisions 3, *Which scopes a key has*).
    #[must_use]
    pub fn scopes(&self) -> Scopes {
        self.holder.scopes(self.plan.in_force())
    }

    fn reopen(&self, currency: &Currency) -> Result<Transition<Self>, Rejection> {
        self.in_currency(currency)?;
        Ok(Transition::stay(Reply::Account { account: Box::new(self.clone()) }))
    }

    fn insufficient_balance(&self, needed: MicroAmount, available: MicroAmount) -> Rejection {
        Rejection::InsufficientBalance { needed, available, currency: Some(self.currency.clone()) }
    }

    fn in_currency(&self, given: &Currency) -> Result<(), Rejection> {
        if self.currency == *given {
            return Ok(());
        }
        let (account, given) = (self.currency.as_str().to_owned(), given.as_str().to_owned());
        Err(Rejection::CurrencyDiffers { account, given })
    }

    /// The amount that could be held for a new allocation: the balance without what is held, and without what running allocations may cost
    /// for a window from `now`. The current window may end later than that, where windows were longer when it began: it is covered to its
    /// end.
    #[must_use]
    pub fn available(&self, now: Timestamp, window: chrono::TimeDelta) -> MicroAmount {
        let until = self.window.map_or(now + window, |running| running.ends_at.max(now + window));
        self.balance.minus(self.reserved(until))
    }

    /// The amount that covers everything held and running, where the next charge is at `until`.
    fn reserved(&self, until: Timestamp) -> MicroAmount {
        self.meters.values().map(|meter| meter.reserved(until)).sum()
    }

    /// I3: true where the balance covers what can accrue until the next charge. In the grace period after a depletion, and after it, each
    /// allocation has a cut-off time of its own instead (`MeterRun::cut_at`).
    #[must_use]
    pub fn is_covered_until_the_next_charge(&self) -> bool {
        let in_grace = self.depletion.is_some_and(|depletion| !depletion.is_over);
        !self.meters.values().any(UsageMeter::accrues) || !in_grace && self.runs_are_covered()
    }

    /// The balance covers the running allocations, without the holds of others.
    fn runs_are_covered(&self) -> bool {
        self.window.is_some_and(|window| {
            let running = self.meters.values().filter(|meter| meter.run.is_some());
            running.map(|meter| meter.reserved(window.ends_at)).sum::<MicroAmount>() <= self.balance
        })
    }

    /// The sum of the holds for allocations that are not active yet.
    #[must_use]
    pub fn held(&self) -> MicroAmount {
        self.meters.values().filter(|meter| meter.run.is_none()).map(|meter| meter.held).sum()
    }

    /// The part of the balance that running allocations may use until the next charge, and for a window from `now`. With what is held and
    /// what is available it is the whole balance.
    #[must_use]
    pub fn reserved_for_running(&self, now: Timestamp, window: chrono::TimeDelta) -> MicroAmount {
        self.balance.minus(self.available(now, window)).minus(self.held())
    }

    /// The cost of the running allocations per hour, in minor units.
    #[must_use]
    pub fn burn_minor_per_hour(&self) -> i64 {
        self.running().map(|(meter, _)| meter.rate.minor_per_hour()).fold(0, i64::saturating_add)
    }

    /// The amount that accrued until `now` and is not posted.
    #[must_use]
    pub fn accrued(&self, now: Timestamp) -> MicroAmount {
        self.running().map(|(meter, run)| run.due(meter.rate, now)).sum()
    }

    /// The user who rents the metered allocation.
    #[must_use]
    pub fn renter<'a>(&'a self, meter: &'a UsageMeter) -> &'a str {
        match (&meter.user_id, &self.holder) {
            (Some(user), _) | (None, Holder::User(user)) => user.as_str(),
            (None, Holder::Org(org)) => org.as_str(),
        }
    }

    /// The meters of active allocations.
    pub fn running(&self) -> impl Iterator<Item = (&UsageMeter, &MeterRun)> {
        self.meters.values().filter_map(|meter| meter.run.as_ref().map(|run| (meter, run)))
    }

    fn hold(
        &self,
        allocation_id: AllocationId,
        user_id: UserId,
        price: &Price,
        gpu_count: u32,
        claim: Option<PlanClaim>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if self.meters.contains_key(&allocation_id) || self.ended.contains_key(&allocation_id) {
            return Ok(Transition::stay(Reply::Done));
        }
        let rate = HourlyRate::of(price, gpu_count);
        let mut draft = AccountUpdate::of(self);
        draft.settle(ctx);
        let audit = draft.name_plan(claim);
        let window = ctx.policy.seconds(PolicyKey::BillingWindow, &draft.account.scopes(), ctx.now);
        let needed = rate.over(ctx.now, ctx.now + window);
        if rate.minor_per_hour() > 0 {
            self.in_currency(&price.currency)?;
            let available = draft.account.available(ctx.now, window);
            if available < needed || available <= MicroAmount::ZERO {
                return Err(self.insufficient_balance(needed, available));
            }
            // The account is open again with its remaining balance.
            draft.account.depletion = draft.account.depletion.filter(|depletion| !depletion.is_over);
        }
        let user_id = Some(user_id).filter(|user_id| !self.holder.is_user(user_id));
        let meter = UsageMeter { user_id, rate, held: needed, run: None };
        draft.account.meters.insert(allocation_id, meter);
        draft.account.again = Some(ResendTimer::first(ctx.now));
        Ok(draft.transition(format!("a window of allocation {allocation_id} is held"), ctx).with(None, audit))
    }

    fn usage(
        &self,
        allocation_id: AllocationId,
        from: Option<Timestamp>,
        until: Option<Timestamp>,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let Some(meter) = self.meters.get(&allocation_id) else { return Transition::stay(Reply::Done) };
        if meter.run.is_some() && until.is_none() {
            return Transition::stay(Reply::Done);
        }
        let mut draft = AccountUpdate::of(self);
        match (from, until) {
            (None, None) => return Transition::stay(Reply::Done),
            (None, Some(_)) if meter.run.is_none() => draft.drop_hold(allocation_id, ctx),
            // From a sender that knew less: it did start.
            (None, Some(_)) => return Transition::stay(Reply::Done),
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
        draft.transition(format!("allocation {allocation_id} is {since}"), ctx)
    }

    fn adjust(
        &self,
        amount_minor: i64,
        currency: &Currency,
        reason: String,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let max = ctx.policy.int(PolicyKey::BillingAdjustmentMax, &self.scopes(), ctx.now);
        let amount =
            MicroAmount::of_minor(amount_minor).filter(|_| amount_minor != 0 && (-max..=max).contains(&amount_minor));
        let amount = amount.ok_or_else(|| Rejection::Amount { max, currency: Some(self.currency.clone()) })?;
        self.in_currency(currency)?;
        let mut draft = AccountUpdate::of(self);
        draft.settle(ctx);
        let audit = self.audit(
            AuditAction::BillingAdjust,
            json!({ "amount_minor": amount_minor, "currency": currency.as_str(), "reason": reason }),
        );
        if amount_minor > 0 {
            if draft.account.balance.plus(amount).minor() > HIGHEST_BALANCE_MINOR {
                return Err(Rejection::Full { currency: Some(self.currency.clone()) });
            }
            draft.post(PostingKind::Credit, amount, None, Some(reason));
            draft.after_credit(ctx);
        } else {
            let window = ctx.policy.seconds(PolicyKey::BillingWindow, &draft.account.scopes(), ctx.now);
            let (needed, available) = (MicroAmount::ZERO.minus(amount), draft.account.available(ctx.now, window));
            if available < needed {
                return Err(self.insufficient_balance(needed, available));
            }
            draft.post(PostingKind::Debit, needed, None, Some(reason));
        }
        Ok(draft.transition_with_account("adjusted by an operator", ctx).audit(audit))
    }

    fn tick(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut draft = AccountUpdate::of(self);
        draft.resend_unanswered(ctx);
        draft.settle(ctx);
        if draft.account == *self {
            Transition::stay(Reply::Done)
        } else {
            draft.transition("what was due is done", ctx)
        }
    }

    fn audit(&self, action: AuditAction, mut metadata: serde_json::Value) -> AuditRecord {
        if let Some(fields) = metadata.as_object_mut() {
            fields.insert("holder".to_owned(), json!(self.holder.to_string()));
        }
        AuditRecord::new(action, EntityRef { kind: EntityKind::BillingAccount, id: self.id.0 }, metadata)
    }
}
