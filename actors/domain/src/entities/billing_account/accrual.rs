//! Accrual: windows, depletion, and the postings of both.

use super::{BillingAccount, Depletion, RefundedCost, Reply};
use crate::event::Event;
use crate::id::AllocationId;
use crate::ledger::{Posting, PostingKind, PostingSource, UsagePeriod};
use crate::money::MicroAmount;
use crate::policy::PolicyKey;
use crate::state_machine::{Timestamp, Transition, TransitionContext};
use chrono::{SubsecRound, TimeDelta};
use serde::{Deserialize, Serialize};

use super::meter::MeterRun;

/// A billing window of an account: all of its meters are charged together at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    pub began_at: Timestamp,
    pub ends_at: Timestamp,
}

/// For how long, and for how many allocations, an end is remembered, because usage may arrive again after it. The ledger refuses a double
/// charge in any case.
const ENDED_RETENTION: TimeDelta = TimeDelta::hours(1);
const MAX_ENDED_REMEMBERED: usize = 128;

/// The next state of an account while a transition builds it, with its events and postings.
#[derive(Clone, Debug)]
pub(super) struct AccountUpdate {
    pub(super) account: BillingAccount,
    postings: Vec<Posting>,
    events: Vec<Event>,
}

impl AccountUpdate {
    pub(super) fn of(account: &BillingAccount) -> Self {
        Self { account: account.clone(), postings: Vec::new(), events: Vec::new() }
    }

    pub(super) fn transition(self, why: impl Into<String>, ctx: &TransitionContext<'_>) -> Transition<BillingAccount> {
        self.into_transition(why, ctx, |_| Reply::Done)
    }

    /// The same, with the account after the transition as its reply.
    pub(super) fn transition_with_account(
        self,
        why: impl Into<String>,
        ctx: &TransitionContext<'_>,
    ) -> Transition<BillingAccount> {
        self.into_transition(why, ctx, |account| Reply::Account { account: Box::new(account.clone()) })
    }

    fn into_transition(
        mut self,
        why: impl Into<String>,
        ctx: &TransitionContext<'_>,
        reply: impl FnOnce(&BillingAccount) -> Reply,
    ) -> Transition<BillingAccount> {
        self.check_low_balance(ctx);
        let reply = reply(&self.account);
        let step = Transition::to(self.account, reply, why).with(self.events, None);
        self.postings.into_iter().fold(step, Transition::posting)
    }

    pub(super) fn publish(&mut self, event: Event) {
        self.events.push(event);
    }

    pub(super) fn post(
        &mut self,
        kind: PostingKind,
        amount: MicroAmount,
        usage: Option<UsagePeriod>,
        reason: Option<String>,
    ) {
        self.write(kind, amount, usage, None, reason);
    }

    pub(super) fn write(
        &mut self,
        kind: PostingKind,
        amount: MicroAmount,
        usage: Option<UsagePeriod>,
        source: Option<PostingSource>,
        reason: Option<String>,
    ) {
        if amount == MicroAmount::ZERO {
            return;
        }
        let account = &mut self.account;
        account.postings += 1;
        let mut posting = Posting {
            number: account.postings,
            kind,
            amount,
            currency: account.currency.clone(),
            balance: MicroAmount::ZERO,
            usage,
            source,
            reason,
        };
        account.balance = account.balance.plus(posting.effect());
        account.track_credit(kind, amount);
        posting.balance = account.balance;
        self.postings.push(posting);
    }

    /// Starts the meter of an allocation that is active since `from`.
    pub(super) fn begin(&mut self, id: AllocationId, from: Timestamp, ctx: &TransitionContext<'_>) {
        let from = from.trunc_subsecs(6);
        let Some(meter) = self.account.meters.get_mut(&id).filter(|meter| meter.run.is_none()) else { return };
        let held = std::mem::take(&mut meter.held);
        let paid_until = meter.rate.paid_until(from, held);
        meter.run = Some(MeterRun::begins(from));
        self.shorten_window(from, paid_until, ctx);
        self.cut_off_if_uncovered(id, from, held);
    }

    /// The next charge comes before an allocation's hold is used up, however long windows were when the hold was taken, and when the
    /// current window began. A window that begins before the current one was not known in time: it is charged again, which charges only
    /// the difference.
    fn shorten_window(&mut self, from: Timestamp, paid_until: Option<Timestamp>, ctx: &TransitionContext<'_>) {
        let running = self.account.window;
        let ends_at = [paid_until, running.map(|window| window.ends_at)].into_iter().flatten().min();
        let ends_at = ends_at.map_or(from + self.length(ctx), |at| at.min(from + self.length(ctx)));
        let began_at = running.map_or(from, |window| window.began_at.min(from));
        self.account.window = Some(Window { began_at, ends_at });
    }

    /// The hold may be gone after a debit: then the allocation is released at once. In a grace period it ends with the others; where its
    /// usage was not known when the grace period began, it costs no more than its hold and the grace period.
    fn cut_off_if_uncovered(&mut self, id: AllocationId, from: Timestamp, held: MicroAmount) {
        let account = &mut self.account;
        let grace = account.depletion.filter(|depletion| !depletion.is_over);
        let is_covered = account.runs_are_covered();
        let Some(meter) = account.meters.get_mut(&id) else { return };
        let rate = meter.rate;
        let costs_nothing = rate.minor_per_hour() == 0;
        let Some(run) = meter.run.as_mut() else { return };
        if let Some(Depletion { at, release_at, .. }) = grace {
            let most = held.plus(rate.over(from.max(at), release_at));
            let paid_until = rate.paid_until(from, most).map_or(release_at, |at| at.min(release_at));
            run.cut_at = Some(paid_until.max(from));
        } else if !is_covered && !costs_nothing {
            run.cut_at = Some(from);
            self.events.push(Event::AllocationUncovered { account_id: account.id, allocation_id: id });
        }
    }

    /// By the clock that ended it, it ran beyond the covered window: the account pays what it has, and the rest is written off.
    fn cut_off_beyond_window(&mut self, id: AllocationId, until: Timestamp) {
        let account = &mut self.account;
        let Some(window) = account.window.filter(|window| window.ends_at < until) else { return };
        let others = account.meters.iter().filter(|(other, _)| **other != id);
        let reserved: MicroAmount = others.map(|(_, meter)| meter.reserved(window.ends_at)).sum();
        let left = account.balance.minus(reserved).max(MicroAmount::ZERO);
        let Some(meter) = account.meters.get_mut(&id).filter(|meter| meter.accrues()) else { return };
        let Some(run) = meter.run.as_mut() else { return };
        let paid_until = meter.rate.paid_until(run.from, run.charged.plus(left));
        run.cut_at = paid_until.filter(|at| *at < until).map(|at| at.max(run.billed_until));
    }

    /// The allocation was active until `until`: the rest of its window is charged, or what was charged beyond is credited.
    pub(super) fn end(&mut self, id: AllocationId, until: Timestamp, ctx: &TransitionContext<'_>) {
        let until = until.trunc_subsecs(6);
        self.cut_off_beyond_window(id, until);
        self.charge(id, until);
        let Some(meter) = self.account.meters.remove(&id) else { return };
        if let Some(run) = meter.run {
            let owed = meter.rate.over(run.from, run.written_off_from(until));
            let lost = meter.rate.over(run.from, until).minus(owed);
            let usage = Some(UsagePeriod { allocation_id: id, from: until, until, cost: owed });
            self.post(PostingKind::WriteOffReversal, run.written_off.minus(lost), usage, None);
            // What an operator has refunded already is not credited again.
            let credit = run.charged.minus(owed).min(self.refundable(id, run.charged));
            self.post(PostingKind::UsageCredit, credit, usage, None);
            self.mark_refunds_ended(id, ctx);
            self.remember(id, ctx);
        }
        self.after_end(ctx);
    }

    /// The part of a cost that no operator has refunded.
    pub(super) fn refundable(&self, allocation_id: AllocationId, cost: MicroAmount) -> MicroAmount {
        let refunded = self.account.refunded.get(&allocation_id).map_or(MicroAmount::ZERO, RefundedCost::amount);
        cost.minus(refunded).max(MicroAmount::ZERO)
    }

    /// The refunds of an allocation are remembered for the refund window after its end.
    fn mark_refunds_ended(&mut self, allocation_id: AllocationId, ctx: &TransitionContext<'_>) {
        if let Some(refunded) = self.account.refunded.get_mut(&allocation_id) {
            refunded.at = ctx.now;
        }
    }

    pub(super) fn drop_hold(&mut self, id: AllocationId, ctx: &TransitionContext<'_>) {
        self.account.meters.remove(&id);
        self.after_end(ctx);
    }

    /// The remaining balance and credits may cover the others again.
    fn after_end(&mut self, ctx: &TransitionContext<'_>) {
        self.lift_covered_cut_offs(ctx);
        let account = &mut self.account;
        if account.running().next().is_none() {
            account.window = None;
            account.plan.adopt();
        }
        account.again = account.again.filter(|_| !account.meters.is_empty());
    }

    fn remember(&mut self, id: AllocationId, ctx: &TransitionContext<'_>) {
        let ended = &mut self.account.ended;
        ended.retain(|_, at| ctx.now < *at + ENDED_RETENTION);
        if ended.len() >= MAX_ENDED_REMEMBERED
            && let Some(oldest) = ended.iter().min_by_key(|(_, at)| **at).map(|(id, _)| *id)
        {
            ended.remove(&oldest);
        }
        ended.insert(id, ctx.now);
    }

    /// Charges every window that has ended, and applies the consequences.
    pub(super) fn settle(&mut self, ctx: &TransitionContext<'_>) {
        self.settle_until(ctx.now, ctx);
    }

    /// After an outage the missed windows are charged as one, up to the point where the balance ends: the work does not depend on how many
    /// were missed. After a clock was set back nothing is charged until it has caught up.
    pub(super) fn settle_until(&mut self, now: Timestamp, ctx: &TransitionContext<'_>) {
        if let Some(window) = self.account.window.filter(|window| window.ends_at <= now) {
            // Before its length is read: the next window is covered as long as it will be.
            self.account.plan.adopt();
            let length = self.length(ctx);
            let more = (now - window.ends_at).num_seconds() / length.num_seconds().max(1);
            let ends = |n: i64| window.ends_at + length * i32::try_from(n).unwrap_or(i32::MAX);
            if let Some(at) = self.first_uncovered_end(more, length, ends) {
                self.charge_all(at);
                self.deplete(at, ctx);
            }
            let last = ends(more);
            self.charge_all(last);
            self.account.window = Some(Window { began_at: last, ends_at: last + length });
        }
        self.end_grace_period(now);
    }

    /// The first end of a window after which the next window is not covered.
    fn first_uncovered_end(&self, more: i64, length: TimeDelta, ends: impl Fn(i64) -> Timestamp) -> Option<Timestamp> {
        let account = &self.account;
        account.meters.values().find(|meter| meter.accrues())?;
        let uncovered = |n: i64| account.balance < account.reserved(ends(n) + length);
        if !uncovered(more) {
            return None;
        }
        // The needed amount only grows: the first uncovered end lies between one that is covered and one that is not.
        let (mut covered, mut not) = (-1, more);
        while not - covered > 1 {
            let middle = covered + (not - covered) / 2;
            if uncovered(middle) { not = middle } else { covered = middle }
        }
        Some(ends(not))
    }

    /// The balance is used up. The event is published once, until money comes in.
    fn deplete(&mut self, at: Timestamp, ctx: &TransitionContext<'_>) {
        let grace = ctx.policy.seconds(PolicyKey::BillingDepletionGrace, &self.account.scopes(), ctx.now);
        let account = &mut self.account;
        let fresh = Depletion { at, release_at: at + grace, is_over: false };
        let depletion = account.depletion.filter(|depletion| !depletion.is_over).unwrap_or(fresh);
        if account.depletion.is_none() {
            self.events.push(Event::BalanceDepleted {
                account_id: account.id,
                holder: account.holder.clone(),
                release_at: depletion.release_at,
            });
        }
        account.depletion = Some(depletion);
        for run in account.meters.values_mut().filter_map(|meter| meter.run.as_mut()) {
            // Charges are not reverted.
            run.cut_at.get_or_insert(depletion.release_at.max(run.billed_until));
        }
    }

    fn end_grace_period(&mut self, now: Timestamp) {
        let Some(depletion) = self.account.depletion.as_mut() else { return };
        if depletion.is_over || now < depletion.release_at {
            return;
        }
        depletion.is_over = true;
        self.release_uncovered(now);
    }

    fn release_uncovered(&mut self, now: Timestamp) {
        let account = &self.account;
        let is_cut = |run: Option<MeterRun>| run.and_then(|run| run.cut_at).is_some_and(|cut_at| cut_at <= now);
        let cut = account.meters.iter().filter(|(_, meter)| is_cut(meter.run));
        self.events
            .extend(cut.map(|(id, _)| Event::AllocationUncovered { account_id: account.id, allocation_id: *id }));
    }

    /// After a debit of money that was available: running allocations that are not covered any more end now, without a grace period. A hold
    /// that is not covered ends none of them: it is looked at when its allocation begins, and at the end of the window.
    pub(super) fn after_debit(&mut self, ctx: &TransitionContext<'_>) {
        if self.account.running().next().is_none() || self.account.runs_are_covered() {
            return;
        }
        if self.account.depletion.is_none_or(|depletion| !depletion.is_over) {
            self.deplete(ctx.now, ctx);
        }
        if let Some(depletion) = self.account.depletion.as_mut() {
            *depletion = Depletion { release_at: depletion.release_at.min(ctx.now), is_over: true, ..*depletion };
        }
        for run in self.account.meters.values_mut().filter_map(|meter| meter.run.as_mut()) {
            let cut_at = ctx.now.max(run.billed_until);
            run.cut_at = Some(run.cut_at.map_or(cut_at, |earlier| earlier.min(cut_at)));
        }
        self.release_uncovered(ctx.now);
    }

    pub(super) fn after_credit(&mut self, ctx: &TransitionContext<'_>) {
        let account = &mut self.account;
        match account.depletion {
            Some(Depletion { is_over: true, .. }) if account.balance > MicroAmount::ZERO => account.depletion = None,
            Some(_) | None => self.lift_covered_cut_offs(ctx),
        }
    }

    /// Running allocations continue, where their next window is covered again and the grace period has not ended. That can change after a
    /// credit and after an end, and nowhere else: a running allocation costs the same in each window.
    fn lift_covered_cut_offs(&mut self, ctx: &TransitionContext<'_>) {
        let account = &mut self.account;
        let Some(depletion) = account.depletion.filter(|depletion| !depletion.is_over) else { return };
        let mut uncut = account.clone();
        uncut.meters.values_mut().filter_map(|meter| meter.run.as_mut()).for_each(|run| run.lift_cut_off(depletion));
        let next = account.window.map_or(ctx.now, |window| window.ends_at);
        if uncut.reserved(next) <= account.balance {
            *account = BillingAccount { depletion: None, ..uncut };
            self.release_uncovered(ctx.now);
        }
    }

    /// Publishes once that the balance has fallen below the threshold.
    fn check_low_balance(&mut self, ctx: &TransitionContext<'_>) {
        let account = &mut self.account;
        let threshold = ctx.policy.int(PolicyKey::BillingLowBalanceThreshold, &account.scopes(), ctx.now);
        let is_low = MicroAmount::of_minor(threshold).is_some_and(|threshold| account.balance < threshold);
        if is_low && !account.is_low {
            self.events.push(Event::BalanceLow { account_id: account.id, holder: account.holder.clone() });
        }
        account.is_low = is_low;
    }

    /// Events may have been lost in both directions: metered allocations are asked for their state, and those that were to be released are
    /// released again.
    pub(super) fn resend_unanswered(&mut self, ctx: &TransitionContext<'_>) {
        let Some(again) = self.account.again.filter(|again| again.is_due(ctx.now)) else { return };
        self.account.again = Some(again.next(ctx.now));
        let account = &self.account;
        self.events.extend(account.meters.iter().map(|(id, meter)| Event::AllocationMetered {
            account_id: account.id,
            allocation_id: *id,
            is_running: meter.run.is_some(),
        }));
        self.release_uncovered(ctx.now);
    }

    fn charge_all(&mut self, until: Timestamp) {
        let running: Vec<_> = self.account.meters.keys().copied().collect();
        for id in running {
            self.charge(id, until);
        }
    }

    /// Posts the cost of one allocation since the last charge: to the account, and after its cut-off to the write-off account.
    fn charge(&mut self, id: AllocationId, until: Timestamp) {
        let Some(meter) = self.account.meters.get_mut(&id) else { return };
        let Some(run) = meter.run.as_mut().filter(|run| run.billed_until < until) else { return };
        let (due, lost, ours_from) =
            (run.due(meter.rate, until), run.lost(meter.rate, until), run.written_off_from(until));
        let from = run.billed_until;
        run.billed_until = until;
        run.charged = run.charged.plus(due);
        run.written_off = run.written_off.plus(lost);
        let cost = run.charged;
        let usage = |from, until| Some(UsagePeriod { allocation_id: id, from, until, cost });
        self.post(PostingKind::Usage, due, usage(from, ours_from), None);
        self.post(PostingKind::WriteOff, lost, usage(from.max(ours_from), until), None);
    }

    fn length(&self, ctx: &TransitionContext<'_>) -> TimeDelta {
        ctx.policy.seconds(PolicyKey::BillingWindow, &self.account.scopes(), ctx.now)
    }
}

impl MeterRun {
    /// Removes the cut-off that this depletion set. A cut-off that has passed stays: what is written off is not charged later.
    fn lift_cut_off(&mut self, depletion: Depletion) {
        self.cut_at = self.cut_at.filter(|cut_at| *cut_at < depletion.at || *cut_at < self.billed_until);
    }
}
