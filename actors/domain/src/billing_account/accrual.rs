//! Time becomes money: windows, the end of the balance, and what is posted of both.

use super::{BillingAccount, Depletion, Reply};
use crate::event::Event;
use crate::id::AllocationId;
use crate::ledger::{Posting, PostingKind, Source, Usage};
use crate::machine::{Ctx, Step, Timestamp};
use crate::money::Micro;
use crate::policy::Key;
use chrono::{SubsecRound, TimeDelta};
use serde::{Deserialize, Serialize};

use super::meter::Run;

/// Of an account, all of whose meters are charged together when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    pub began_at: Timestamp,
    pub ends_at: Timestamp,
}

/// What was said of an allocation may come again so long after its end, and so many ends are remembered. The ledger refuses what is
/// charged twice all the same.
const REMEMBERED_FOR: TimeDelta = TimeDelta::hours(1);
const REMEMBERED: usize = 256;

/// The next state of an account, as it comes to be, with what is said and posted of it.
#[derive(Clone, Debug)]
pub(super) struct Draft {
    pub(super) account: BillingAccount,
    postings: Vec<Posting>,
    events: Vec<Event>,
}

impl Draft {
    pub(super) fn of(account: &BillingAccount) -> Self {
        Self { account: account.clone(), postings: Vec::new(), events: Vec::new() }
    }

    pub(super) fn step(self, why: impl Into<String>, ctx: &Ctx<'_>) -> Step<BillingAccount> {
        self.into_step(why, ctx, |_| Reply::Done)
    }

    /// The same, answered with the account as it is then.
    pub(super) fn step_shown(self, why: impl Into<String>, ctx: &Ctx<'_>) -> Step<BillingAccount> {
        self.into_step(why, ctx, |account| Reply::Account { account: Box::new(account.clone()) })
    }

    fn into_step(
        mut self,
        why: impl Into<String>,
        ctx: &Ctx<'_>,
        reply: impl FnOnce(&BillingAccount) -> Reply,
    ) -> Step<BillingAccount> {
        self.watch_the_threshold(ctx);
        let reply = reply(&self.account);
        let step = self.events.into_iter().fold(Step::to(self.account, reply, why), Step::event);
        self.postings.into_iter().fold(step, Step::posting)
    }

    pub(super) fn say(&mut self, event: Event) {
        self.events.push(event);
    }

    pub(super) fn post(&mut self, kind: PostingKind, amount: Micro, usage: Option<Usage>, reason: Option<String>) {
        self.write(kind, amount, usage, None, reason);
    }

    pub(super) fn write(
        &mut self,
        kind: PostingKind,
        amount: Micro,
        usage: Option<Usage>,
        source: Option<Source>,
        reason: Option<String>,
    ) {
        if amount == Micro::ZERO {
            return;
        }
        let account = &mut self.account;
        account.postings += 1;
        let mut posting = Posting {
            number: account.postings,
            kind,
            amount,
            currency: account.currency.clone(),
            balance: Micro::ZERO,
            usage,
            source,
            reason,
        };
        account.balance = account.balance.plus(posting.effect());
        posting.balance = account.balance;
        self.postings.push(posting);
    }

    /// The allocation is active since `from`.
    pub(super) fn begin(&mut self, id: AllocationId, from: Timestamp, ctx: &Ctx<'_>) {
        let from = from.trunc_subsecs(6);
        let Some(meter) = self.account.meters.get_mut(&id).filter(|meter| meter.run.is_none()) else { return };
        let held = std::mem::take(&mut meter.held);
        let paid_until = meter.rate.paid_until(from, held);
        meter.run = Some(Run::begins(from));
        self.shorten_the_window(from, paid_until, ctx);
        self.cut_where_it_begins_uncovered(id, from, held);
    }

    /// The next charge comes before what was held for an allocation is used up, however long windows were when the hold was taken, and when
    /// the running window began. A window that begins before the running one was not known in time: it is gone through again, which
    /// charges what is new alone.
    fn shorten_the_window(&mut self, from: Timestamp, paid_until: Option<Timestamp>, ctx: &Ctx<'_>) {
        let running = self.account.window;
        let ends_at = [paid_until, running.map(|window| window.ends_at)].into_iter().flatten().min();
        let ends_at = ends_at.map_or(from + self.length(ctx), |at| at.min(from + self.length(ctx)));
        let began_at = running.map_or(from, |window| window.began_at.min(from));
        self.account.window = Some(Window { began_at, ends_at });
    }

    /// What was held for it may be gone, since money went out: then it is released at once. In a grace it ends with the others; where its
    /// use was not known when the grace began, it costs no more than what was held for it and the grace.
    fn cut_where_it_begins_uncovered(&mut self, id: AllocationId, from: Timestamp, held: Micro) {
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

    /// By the clock that ended it, it ran beyond the window that is covered: the account pays what it has for that, and the rest is ours.
    fn cut_what_ran_beyond_the_window(&mut self, id: AllocationId, until: Timestamp) {
        let account = &mut self.account;
        let Some(window) = account.window.filter(|window| window.ends_at < until) else { return };
        let others = account.meters.iter().filter(|(other, _)| **other != id);
        let reserved: Micro = others.map(|(_, meter)| meter.reserved(window.ends_at)).sum();
        let left = account.balance.minus(reserved).max(Micro::ZERO);
        let Some(meter) = account.meters.get_mut(&id).filter(|meter| meter.accrues()) else { return };
        let Some(run) = meter.run.as_mut() else { return };
        let paid_until = meter.rate.paid_until(run.from, run.charged.plus(left));
        run.cut_at = paid_until.filter(|at| *at < until).map(|at| at.max(run.billed_until));
    }

    /// The allocation was active until then and no longer: the rest of its window is charged, or what was charged beyond is given back.
    pub(super) fn end(&mut self, id: AllocationId, until: Timestamp, ctx: &Ctx<'_>) {
        let until = until.trunc_subsecs(6);
        self.cut_what_ran_beyond_the_window(id, until);
        self.charge(id, until);
        let Some(meter) = self.account.meters.remove(&id) else { return };
        if let Some(run) = meter.run {
            let owed = meter.rate.over(run.from, run.ours_from(until));
            let lost = meter.rate.over(run.from, until).minus(owed);
            let usage = Some(Usage { allocation_id: id, from: until, until, cost: owed });
            self.post(PostingKind::WriteOffReversal, run.written_off.minus(lost), usage, None);
            // What an operator gave back already is not given back again.
            let credit = run.charged.minus(owed).min(self.not_refunded(id, run.charged));
            self.post(PostingKind::UsageCredit, credit, usage, None);
            self.ended_refunded(id, ctx);
            self.remember(id, ctx);
        }
        self.after_an_end(ctx);
    }

    pub(super) fn drop_hold(&mut self, id: AllocationId, ctx: &Ctx<'_>) {
        self.account.meters.remove(&id);
        self.after_an_end(ctx);
    }

    /// The others may be covered by what is left, and what was given back.
    fn after_an_end(&mut self, ctx: &Ctx<'_>) {
        self.spare_what_is_covered(ctx);
        let account = &mut self.account;
        if account.running().next().is_none() {
            account.window = None;
        }
        account.again = account.again.filter(|_| !account.meters.is_empty());
    }

    fn remember(&mut self, id: AllocationId, ctx: &Ctx<'_>) {
        let ended = &mut self.account.ended;
        ended.retain(|_, at| ctx.now < *at + REMEMBERED_FOR);
        if ended.len() >= REMEMBERED
            && let Some(oldest) = ended.iter().min_by_key(|(_, at)| **at).map(|(id, _)| *id)
        {
            ended.remove(&oldest);
        }
        ended.insert(id, ctx.now);
    }

    /// Charges every window that has ended, and does what follows from it.
    pub(super) fn settle(&mut self, ctx: &Ctx<'_>) {
        self.settle_until(ctx.now, ctx);
    }

    /// After an outage the windows that were missed are charged as one, up to where the balance ends: whatever was missed, this is
    /// the same work. A clock that was put back charges nothing until it has caught up.
    pub(super) fn settle_until(&mut self, now: Timestamp, ctx: &Ctx<'_>) {
        if let Some(window) = self.account.window.filter(|window| window.ends_at <= now) {
            let length = self.length(ctx);
            let more = (now - window.ends_at).num_seconds() / length.num_seconds().max(1);
            let ends = |n: i64| window.ends_at + length * i32::try_from(n).unwrap_or(i32::MAX);
            if let Some(at) = self.first_uncovered(more, length, ends) {
                self.charge_all(at);
                self.deplete(at, ctx);
            }
            let last = ends(more);
            self.charge_all(last);
            self.account.window = Some(Window { began_at: last, ends_at: last + length });
        }
        self.end_the_grace(now);
    }

    /// The first of the windows' ends from which on the next window is not covered.
    fn first_uncovered(&self, more: i64, length: TimeDelta, ends: impl Fn(i64) -> Timestamp) -> Option<Timestamp> {
        let account = &self.account;
        account.meters.values().find(|meter| meter.accrues())?;
        let uncovered = |n: i64| account.balance < account.reserved(ends(n) + length);
        if !uncovered(more) {
            return None;
        }
        // What is needed only grows: the first one lies between one that is covered and one that is not.
        let (mut covered, mut not) = (-1, more);
        while not - covered > 1 {
            let middle = covered + (not - covered) / 2;
            if uncovered(middle) { not = middle } else { covered = middle }
        }
        Some(ends(not))
    }

    /// The balance is used up. That is said once, until money comes in.
    fn deplete(&mut self, at: Timestamp, ctx: &Ctx<'_>) {
        let grace = ctx.policy.seconds(Key::BillingDepletionGrace, &self.account.holder.scopes(), ctx.now);
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
            // What is charged stays charged.
            run.cut_at.get_or_insert(depletion.release_at.max(run.billed_until));
        }
    }

    fn end_the_grace(&mut self, now: Timestamp) {
        let Some(depletion) = self.account.depletion.as_mut() else { return };
        if depletion.is_over || now < depletion.release_at {
            return;
        }
        depletion.is_over = true;
        self.release_what_is_cut(now);
    }

    fn release_what_is_cut(&mut self, now: Timestamp) {
        let account = &self.account;
        let is_cut = |run: Option<Run>| run.and_then(|run| run.cut_at).is_some_and(|cut_at| cut_at <= now);
        let cut = account.meters.iter().filter(|(_, meter)| is_cut(meter.run));
        self.events
            .extend(cut.map(|(id, _)| Event::AllocationUncovered { account_id: account.id, allocation_id: *id }));
    }

    /// Money that was there is gone: what is not covered any more ends now, without a grace.
    pub(super) fn money_went_out(&mut self, ctx: &Ctx<'_>) {
        let next = self.account.window.map_or(ctx.now, |window| window.ends_at);
        let needed = self.account.reserved(next);
        if self.account.running().next().is_none() || needed <= self.account.balance {
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
        self.release_what_is_cut(ctx.now);
    }

    pub(super) fn money_came_in(&mut self, ctx: &Ctx<'_>) {
        let account = &mut self.account;
        match account.depletion {
            Some(Depletion { is_over: true, .. }) if account.balance > Micro::ZERO => account.depletion = None,
            Some(_) | None => self.spare_what_is_covered(ctx),
        }
    }

    /// What runs may run on, where its next window is covered again and the grace is not over. That can change where money comes in and
    /// where something ends, and nowhere else: what runs costs the same in each window.
    fn spare_what_is_covered(&mut self, ctx: &Ctx<'_>) {
        let account = &mut self.account;
        let Some(depletion) = account.depletion.filter(|depletion| !depletion.is_over) else { return };
        let mut uncut = account.clone();
        uncut.meters.values_mut().filter_map(|meter| meter.run.as_mut()).for_each(|run| run.spare(depletion));
        let next = account.window.map_or(ctx.now, |window| window.ends_at);
        if uncut.reserved(next) <= account.balance {
            *account = BillingAccount { depletion: None, ..uncut };
            self.release_what_is_cut(ctx.now);
        }
    }

    /// Says once that the balance has fallen below the threshold.
    fn watch_the_threshold(&mut self, ctx: &Ctx<'_>) {
        let account = &mut self.account;
        let threshold = ctx.policy.int(Key::BillingLowBalanceThreshold, &account.holder.scopes(), ctx.now);
        let is_low = Micro::of_minor(threshold).is_some_and(|threshold| account.balance < threshold);
        if is_low && !account.is_low {
            self.events.push(Event::BalanceLow { account_id: account.id, holder: account.holder.clone() });
        }
        account.is_low = is_low;
    }

    /// What was said may have been lost, here and there: whoever is metered is asked how they stand, and who was to be released is
    /// released again.
    pub(super) fn ask_again(&mut self, ctx: &Ctx<'_>) {
        let Some(again) = self.account.again.filter(|again| again.is_due(ctx.now)) else { return };
        self.account.again = Some(again.next(ctx.now));
        let account = &self.account;
        self.events.extend(account.meters.iter().map(|(id, meter)| Event::AllocationMetered {
            account_id: account.id,
            allocation_id: *id,
            is_running: meter.run.is_some(),
        }));
        self.release_what_is_cut(ctx.now);
    }

    fn charge_all(&mut self, until: Timestamp) {
        let running: Vec<_> = self.account.meters.keys().copied().collect();
        for id in running {
            self.charge(id, until);
        }
    }

    /// Posts what one allocation has cost since it was charged last: to the account, and what is past its cut to ourselves.
    fn charge(&mut self, id: AllocationId, until: Timestamp) {
        let Some(meter) = self.account.meters.get_mut(&id) else { return };
        let Some(run) = meter.run.as_mut().filter(|run| run.billed_until < until) else { return };
        let (due, lost, ours_from) = (run.due(meter.rate, until), run.lost(meter.rate, until), run.ours_from(until));
        let from = run.billed_until;
        run.billed_until = until;
        run.charged = run.charged.plus(due);
        run.written_off = run.written_off.plus(lost);
        let cost = run.charged;
        let usage = |from, until| Some(Usage { allocation_id: id, from, until, cost });
        self.post(PostingKind::Usage, due, usage(from, ours_from), None);
        self.post(PostingKind::WriteOff, lost, usage(from.max(ours_from), until), None);
    }

    fn length(&self, ctx: &Ctx<'_>) -> TimeDelta {
        ctx.policy.seconds(Key::BillingWindow, &self.account.holder.scopes(), ctx.now)
    }
}

impl Run {
    /// The cut that this depletion meant does not come. One that was passed stays: what is written off is not charged after all.
    fn spare(&mut self, depletion: Depletion) {
        self.cut_at = self.cut_at.filter(|cut_at| *cut_at < depletion.at || *cut_at < self.billed_until);
    }
}
