//! The representation of accounts and ledgers in the API. Amounts are in minor units, rounded down; where fractions matter, in millionths
//! of one.

use chrono::{DateTime, TimeDelta, Utc};
use domain::billing_account::{BillingAccount, Holder};
use domain::money::{HourlyRate, MICRO_PER_MINOR, MicroAmount, Price};
use domain::{Machine as _, Timestamp};
use persistence::queries::LedgerRow;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

/// Prepaid money, and how long it lasts.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = BillingAccount)]
pub(in crate::api) struct AccountView {
    id: Uuid,
    /// Its user; null where it is an organisation's.
    user_id: Option<String>,
    /// The organisation that it belongs to; null where it is a user's.
    org_id: Option<String>,
    /// Null where nothing was ever paid in.
    currency: Option<String>,
    /// `open`; `grace`: the next window is not covered, and what runs is released at `release_at`; `depleted`: that has happened.
    state: &'static str,
    /// The posted balance, in minor units.
    balance_minor: i64,
    /// The same in millionths of a minor unit.
    balance_micro: i64,
    /// The amount that has accrued since the last window and is not posted yet.
    accrued_minor: i64,
    /// The amount held for allocations that are not active yet, in minor units, rounded down.
    held_minor: i64,
    /// The amount that running allocations may use until the next charge and for a window from now, in millionths of a minor unit. With
    /// what is held and what is available it is the balance.
    next_window_micro: i64,
    /// The amount that a new allocation can use: the balance without holds and without the next window of running allocations.
    available_minor: i64,
    /// True where it is below the threshold of the warning.
    is_low: bool,
    /// The cost of all running allocations per hour.
    burn_minor_per_hour: i64,
    /// When it is used up if nothing changes; null where nothing is spent.
    lasts_until: Option<DateTime<Utc>>,
    /// When what runs is released; null where it is covered.
    release_at: Option<DateTime<Utc>>,
    /// How many allocations are paid from it.
    running: u32,
    as_of: DateTime<Utc>,
}

/// An account, and what it pays for.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = MeteredBillingAccount)]
pub(in crate::api) struct MeteredView {
    account: AccountView,
    meters: Vec<MeterView>,
    opened_at: DateTime<Utc>,
}

/// The cost of one allocation.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Meter)]
pub(in crate::api) struct MeterView {
    allocation_id: Uuid,
    user_id: String,
    minor_per_hour: i64,
    /// The amount held until it is active, in millionths of a minor unit.
    held_micro: i64,
    /// Null until it is active.
    from: Option<DateTime<Utc>>,
    billed_until: Option<DateTime<Utc>>,
    charged_micro: i64,
    /// What it cost after the account was depleted; it is written off.
    written_off_micro: i64,
}

/// One posting.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LedgerPosting)]
pub(in crate::api) struct LedgerView {
    /// An account's postings are numbered without a gap.
    number: i64,
    at: DateTime<Utc>,
    /// As in the filter: `usage`, `deposit`, `refund` and so on.
    kind: String,
    currency: String,
    /// How it changed the balance, in millionths of a minor unit; 0 for what was written off.
    change_micro: i64,
    /// The amount that was moved, in millionths of a minor unit.
    amount_micro: i64,
    /// The balance after it, in minor units.
    balance_minor: i64,
    /// The same in millionths of a minor unit.
    balance_micro: i64,
    /// The allocation that was used.
    allocation_id: Option<Uuid>,
    /// From when; null where something was given back.
    used_from: Option<DateTime<Utc>>,
    used_until: Option<DateTime<Utc>>,
    /// The payment that brought it in, or from which it went back.
    payment_id: Option<Uuid>,
    /// Why an operator gave or took.
    reason: Option<String>,
}

/// The estimated cost of an allocation.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = BillingEstimate)]
pub(in crate::api) struct EstimateView {
    currency: String,
    amount_minor_per_gpu_hour: i64,
    /// All GPUs together.
    minor_per_hour: i64,
    /// The cost for the requested seconds, in millionths of a minor unit; null where none were requested.
    cost_micro: Option<i64>,
    /// The amount that is required to begin, in millionths of a minor unit: its first window.
    needed_micro: i64,
    /// The available amount, in millionths of a minor unit.
    available_micro: i64,
    /// True where the account covers the first window. GET /api/v1/capacity says whether GPUs are free.
    is_covered: bool,
    /// How long what is available would last for it alone; null where it costs nothing.
    lasts_seconds: Option<i64>,
}

impl AccountView {
    pub(super) fn of(it: &BillingAccount, now: Timestamp, window: TimeDelta) -> Self {
        let (user_id, org_id) = named(&it.holder);
        let left = it.balance.minus(it.accrued(now)).get().max(0);
        Self {
            id: it.id.0,
            user_id,
            org_id,
            currency: Some(it.currency.as_str().to_owned()),
            state: it.state(),
            balance_minor: it.balance.minor(),
            balance_micro: it.balance.get(),
            accrued_minor: it.accrued(now).minor(),
            held_minor: it.held().minor(),
            next_window_micro: it.reserved_for_running(now, window).get(),
            available_minor: it.available(now, window).minor(),
            is_low: it.is_low,
            burn_minor_per_hour: it.burn_minor_per_hour(),
            lasts_until: lasts(left, it.burn_minor_per_hour()).and_then(|time| now.checked_add_signed(time)),
            release_at: it.deadline().map(|deadline| deadline.at),
            running: u32::try_from(it.running().count()).unwrap_or(u32::MAX),
            as_of: now,
        }
    }

    /// The account of a holder who has none yet.
    pub(super) fn empty(id: Uuid, holder: &Holder, now: Timestamp) -> Self {
        let (user_id, org_id) = named(holder);
        Self {
            id,
            user_id,
            org_id,
            currency: None,
            state: "open",
            balance_minor: 0,
            balance_micro: 0,
            accrued_minor: 0,
            held_minor: 0,
            next_window_micro: 0,
            available_minor: 0,
            is_low: true,
            burn_minor_per_hour: 0,
            lasts_until: None,
            release_at: None,
            running: 0,
            as_of: now,
        }
    }
}

impl MeteredView {
    pub(super) fn of(it: &BillingAccount, now: Timestamp, window: TimeDelta) -> Self {
        let meters = it.meters.iter().map(|(id, meter)| MeterView {
            allocation_id: id.0,
            user_id: it.renter(meter).to_owned(),
            minor_per_hour: meter.rate.minor_per_hour(),
            held_micro: meter.held.get(),
            from: meter.run.map(|run| run.from),
            billed_until: meter.run.map(|run| run.billed_until),
            charged_micro: meter.run.map_or(0, |run| run.charged.get()),
            written_off_micro: meter.run.map_or(0, |run| run.written_off.get()),
        });
        Self { account: AccountView::of(it, now, window), meters: meters.collect(), opened_at: it.opened_at }
    }
}

impl EstimateView {
    pub(super) fn of(
        price: &Price,
        rate: HourlyRate,
        seconds: Option<u32>,
        account: Option<&BillingAccount>,
        now: Timestamp,
        window: TimeDelta,
    ) -> Self {
        let needed = rate.over(now, now + window);
        let same_money = account.filter(|account| account.currency == price.currency);
        let available = same_money.map_or(MicroAmount::ZERO, |account| account.available(now, window));
        let is_free = rate.minor_per_hour() == 0;
        Self {
            currency: price.currency.as_str().to_owned(),
            amount_minor_per_gpu_hour: price.amount_minor_per_gpu_hour,
            minor_per_hour: rate.minor_per_hour(),
            cost_micro: seconds.map(|seconds| rate.over(now, now + TimeDelta::seconds(seconds.into())).get()),
            needed_micro: needed.get(),
            available_micro: available.get(),
            is_covered: is_free || (available >= needed && available > MicroAmount::ZERO),
            lasts_seconds: lasts(available.get().max(0), rate.minor_per_hour()).map(|time| time.num_seconds()),
        }
    }
}

impl From<LedgerRow> for LedgerView {
    fn from(row: LedgerRow) -> Self {
        Self {
            number: row.number,
            at: row.at,
            kind: row.kind,
            currency: row.currency,
            change_micro: row.effect.get(),
            amount_micro: row.amount.get(),
            balance_minor: row.balance.minor(),
            balance_micro: row.balance.get(),
            allocation_id: row.allocation.map(|id| id.0),
            used_from: row.used_from,
            used_until: row.used_until,
            payment_id: row.payment.map(|id| id.0),
            reason: row.reason,
        }
    }
}

pub(in crate::api) fn named(holder: &Holder) -> (Option<String>, Option<String>) {
    match holder {
        Holder::User(id) => (Some(id.to_string()), None),
        Holder::Org(id) => (None, Some(id.to_string())),
    }
}

/// How long an amount lasts at this rate.
fn lasts(micro: i64, minor_per_hour: i64) -> Option<TimeDelta> {
    if minor_per_hour <= 0 {
        return None;
    }
    let seconds = i128::from(micro) * 3600 / (i128::from(minor_per_hour) * i128::from(MICRO_PER_MINOR));
    // Bounded at a century.
    TimeDelta::try_seconds(i64::try_from(seconds).ok()?.min(3_155_760_000))
}
