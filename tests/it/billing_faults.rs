//! Faults that must not change any charge by a millionth: wrong clocks, crashes at each step of accrual, a worker that was down for
//! a day, a balance that is depleted by many allocations, and values that change meanwhile. Each test ends with the ledger verified.

use crate::billing::{BALANCE, cost, count_events, expect_exact, expected_cost, expensive_sku, micro, short_windows};
use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};
use sqlx::{PgPool, Row};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tests::cluster::db_lock::{DbLock, StatementFate, WRITES};
use tests::cluster::resource_handles::AllocationHandle;
use tests::cluster::{CURRENCY, TestCluster, WAIT_TIMEOUT};
use uuid::Uuid;

/// The price of one GPU of the expensive SKU in minor units an hour, and in millionths a second.
const DEAR: i64 = 36_000;
const DEAR_A_SECOND: i64 = 10_000_000;

/// The charges of an allocation by window, from the database: the API is not used, since clients and service may not
/// agree about the time.
async fn windows(pool: &PgPool, allocation: Uuid) -> Vec<(DateTime<Utc>, DateTime<Utc>, i64)> {
    let statement =
        "SELECT used_from, used_until, amount FROM ledger WHERE allocation = $1 AND kind = 'usage' ORDER BY number";
    let rows = sqlx::query(statement).bind(allocation).fetch_all(pool).await.expect("the ledger can be read");
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect()
}

/// The windows once none was charged for a second, where one is charged each second: what was begun before is committed.
async fn settled_windows(pool: &PgPool, allocation: Uuid) -> Vec<(DateTime<Utc>, DateTime<Utc>, i64)> {
    let end = Instant::now() + WAIT_TIMEOUT;
    loop {
        let before = windows(pool, allocation).await;
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        if windows(pool, allocation).await == before {
            return before;
        }
        assert!(Instant::now() < end, "it is charged all the time: {:?}", before.last());
    }
}

async fn billed_until(pool: &PgPool, allocation: Uuid) -> DateTime<Utc> {
    windows(pool, allocation).await.last().expect("it was charged").1
}

async fn wait_until<F: Future<Output = bool>>(what: &str, holds: impl Fn() -> F) {
    let end = Instant::now() + WAIT_TIMEOUT;
    while !holds().await {
        assert!(Instant::now() < end, "not within {WAIT_TIMEOUT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn wait_until_charged_beyond(cluster: &TestCluster, allocation: Uuid, instant: DateTime<Utc>) {
    let pool = cluster.pool.clone();
    wait_until("it is charged", || async {
        windows(&pool, allocation).await.last().is_some_and(|last| last.1 > instant)
    })
    .await;
}

/// A cluster in which a GPU of the expensive SKU is rented and charged.
async fn start_with_allocation(mut cluster: TestCluster) -> (TestCluster, AllocationHandle) {
    expensive_sku(&mut cluster).await;
    cluster.node("dear").await;
    cluster.credit("user", 90_000).await;
    let rented = cluster.rent_active("dear", 1).await;
    wait_until_charged_beyond(&cluster, rented.id, DateTime::UNIX_EPOCH).await;
    (cluster, rented)
}

/// Releases the allocation and asserts that it has cost exactly what its time costs, by the service's own view of it.
async fn expect_paid_exactly(cluster: &TestCluster, rented: &AllocationHandle) -> Vec<Value> {
    rented.release().await;
    let released = rented.expect_state("released").await;
    cluster.user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    let all = expect_exact(&cluster.user).await;
    assert_eq!(cost(&all, rented.id), (expected_cost(&released, DEAR), 0), "{released}");
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn charges_are_exact_after_replica_clocks_were_an_hour_ahead_and_behind() {
    let (cluster, rented) = start_with_allocation(short_windows().service_clock().start().await).await;
    let clock = cluster.service_clock.as_ref().unwrap();
    let began = Utc::now();
    clock.set_offset(TimeDelta::hours(1));
    wait_until_charged_beyond(&cluster, rented.id, began + TimeDelta::minutes(59)).await;
    let hour: i64 = windows(&cluster.pool, rented.id).await.iter().map(|window| window.2).sum();
    assert!(hour >= 59 * 60 * DEAR_A_SECOND, "it believes that an hour has passed: {hour}");

    // The clock is set back: nothing is charged until it has caught up.
    for ahead in [TimeDelta::zero(), TimeDelta::minutes(-59)] {
        clock.set_offset(ahead);
        let before = settled_windows(&cluster.pool, rented.id).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(windows(&cluster.pool, rented.id).await, before, "time does not run backwards");
    }
    clock.set_offset(TimeDelta::zero());
    let all = expect_paid_exactly(&cluster, &rented).await;
    let given_back = all.iter().find(|it| it["kind"] == "usage_credit").expect("what did not accrue is given back");
    assert!(micro(&given_back["amount_micro"]) > 55 * 60 * DEAR_A_SECOND, "{given_back}");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_clock_an_hour_ahead_and_behind_changes_no_amount() {
    let (mut cluster, rented) = start_with_allocation(short_windows().replicas(2).postgres_clock().start().await).await;
    let clock = cluster.postgres_clock.as_ref().unwrap();
    for ahead in [TimeDelta::hours(1), TimeDelta::zero(), TimeDelta::hours(-1), TimeDelta::zero()] {
        clock.set_offset(ahead);
        let database_time: DateTime<Utc> =
            sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&cluster.pool).await.expect("it tells the time");
        assert!(
            (database_time - Utc::now() - ahead).abs() < TimeDelta::minutes(2),
            "it does believe so: {database_time}"
        );
        wait_until_charged_beyond(&cluster, rented.id, Utc::now() + TimeDelta::seconds(2)).await;
        let last = billed_until(&cluster.pool, rented.id).await;
        assert!(last < Utc::now() + TimeDelta::seconds(2), "and charges by the service's clock: {last}");
    }
    // A crash after all this is detected as usual.
    let account = cluster.credit("user", 1).await;
    let owner = cluster.owner_of("billing_account", account).await;
    cluster.kill9_replica(owner);
    wait_until_charged_beyond(&cluster, rented.id, Utc::now() + TimeDelta::seconds(2)).await;
    cluster.restart_replica(owner).await;
    expect_paid_exactly(&cluster, &rented).await;
    cluster.shutdown().await;
}

/// A step of accrual at which a replica can be stopped, by a lock on what the step needs.
#[derive(Clone, Copy, Debug)]
struct CrashPoint {
    lock: LockTarget,
    /// The beginning of the statement that is blocked.
    blocked_statement: &'static str,
    fate: StatementFate,
}

#[derive(Clone, Copy, Debug)]
enum LockTarget {
    /// The table is locked against reads.
    Table(&'static str),
    /// The row of the account is locked.
    Account,
}

const DUE_DEADLINES_QUERY: &str = "SELECT entity, kind, shard, wake_at%";
const LOAD_QUERY: &str = "SELECT found.id, found.kind, found.version%";

const CRASH_POINTS: [CrashPoint; 4] = [
    CrashPoint {
        lock: LockTarget::Table("deadline"),
        blocked_statement: DUE_DEADLINES_QUERY,
        fate: StatementFate::ReadOnly,
    },
    CrashPoint { lock: LockTarget::Table("entity"), blocked_statement: LOAD_QUERY, fate: StatementFate::ReadOnly },
    CrashPoint { lock: LockTarget::Account, blocked_statement: WRITES, fate: StatementFate::RolledBack },
    CrashPoint { lock: LockTarget::Account, blocked_statement: WRITES, fate: StatementFate::Committed },
];

#[tokio::test(flavor = "multi_thread")]
async fn crash_at_any_step_of_accrual_charges_each_window_once() {
    let (mut cluster, rented) = start_with_allocation(short_windows().start().await).await;
    let pool = cluster.pool.clone();
    let account: Uuid = sqlx::query_scalar("SELECT account FROM ledger WHERE allocation = $1 LIMIT 1")
        .bind(rented.id)
        .fetch_one(&pool)
        .await
        .expect("it was charged");
    for step in CRASH_POINTS {
        let mut attempts = 0;
        while !crash_at(&mut cluster, &rented, account, step).await {
            attempts += 1;
            assert!(attempts < 10, "no charge was committed without a response: {step:?}");
        }
    }
    expect_paid_exactly(&cluster, &rented).await;
    cluster.shutdown().await;
}

/// Kills the replica at this step. False where the blocked write was no charge, or was given up before the lock was released.
async fn crash_at(cluster: &mut TestCluster, rented: &AllocationHandle, account: Uuid, step: CrashPoint) -> bool {
    let pool = cluster.pool.clone();
    wait_until_charged_beyond(cluster, rented.id, Utc::now() - TimeDelta::seconds(1)).await;
    let mut held = match step.lock {
        LockTarget::Table(name) => cluster.lock_table(name).await,
        LockTarget::Account => cluster.lock_entity(account).await,
    };
    held.expect_blocked(step.blocked_statement).await;
    let before = count_windows_under_lock(&mut held, rented.id, step).await;
    cluster.kill9_replica(0);
    held.unlock_after_crash(step.blocked_statement, step.fate).await;
    let after = windows(&pool, rented.id).await.len();
    cluster.restart_replica(0).await;
    // At most one window was in flight when the lock was taken.
    assert!(after == before || after == before + 1, "{before} windows, and then {after}: {step:?}");
    match step.fate {
        StatementFate::ReadOnly => true,
        StatementFate::RolledBack => {
            assert_eq!(after, before, "what was cut off was not written");
            true
        }
        StatementFate::Committed => after > before,
    }
}

/// The number of charged windows, read by the connection with the lock.
async fn count_windows_under_lock(held: &mut DbLock, allocation: Uuid, step: CrashPoint) -> usize {
    let count: i64 = sqlx::query_scalar("SELECT count(*) FROM ledger WHERE allocation = $1 AND kind = 'usage'")
        .bind(allocation)
        .fetch_one(held.connection())
        .await
        .unwrap_or_else(|error| panic!("{step:?}: {error}"));
    usize::try_from(count).unwrap()
}

/// After a day without accrual, one window has the cost of the day.
#[tokio::test(flavor = "multi_thread")]
async fn worker_that_was_down_for_a_day_charges_it_as_one_window() {
    // The node's certificate is valid for longer than the day.
    let month = 30 * 86_400;
    let mut cluster = short_windows().policy("node.certificate_ttl_seconds", month).service_clock().start().await;
    cluster.node("h100").await;
    cluster.credit("user", 100_000).await;
    let rented = cluster.rent_active("h100", 4).await;
    wait_until_charged_beyond(&cluster, rented.id, DateTime::UNIX_EPOCH).await;
    cluster.kill9_replica(0);
    let before = windows(&cluster.pool, rented.id).await;
    let clock = cluster.service_clock.as_ref().unwrap();
    clock.set_offset(TimeDelta::days(1));
    cluster.replicas[0].start_again().await.expect("it starts a day later");
    wait_until_charged_beyond(&cluster, rented.id, Utc::now() + TimeDelta::hours(23)).await;
    let all = windows(&cluster.pool, rented.id).await;
    // A window that was charged at the end of the replica may be committed after this test has read them.
    let later = &all[before.len()..];
    let long = later.iter().position(|(from, to, _)| *to - *from > TimeDelta::hours(23));
    let long = long.filter(|long| *long <= 1).unwrap_or_else(|| panic!("the day is not one window: {later:?}"));
    let (from, to, amount) = later[long];
    assert_eq!(from, all[before.len() + long - 1].1, "from where it had stopped");
    // Four GPUs at 250 an hour; a window carries the remainder of the previous one.
    let exactly = 1_000 * (to - from).num_microseconds().unwrap() / 3600;
    assert!((amount - exactly).abs() <= 1, "{amount} for {exactly}");

    // The clock is set back by the day, and the allocation ends.
    clock.set_offset(TimeDelta::zero());
    rented.release().await;
    let released = rented.expect_state("released").await;
    cluster.user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    assert_eq!(cost(&expect_exact(&cluster.user).await, rented.id), (expected_cost(&released, 1_000), 0), "{released}");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_allocations_that_deplete_the_balance_notify_once_and_the_rest_is_written_off() {
    const RUNNING: usize = 20;
    const GRACE: i64 = 2;
    let mut cluster = short_windows().policy("billing.depletion_grace_seconds", GRACE).start().await;
    expensive_sku(&mut cluster).await;
    // A node without isolation takes one tenant at a time.
    let mut nodes = Vec::new();
    for _ in 0..RUNNING {
        let node = cluster.register("dear").await;
        let bundle = cluster.bundle(&node).await;
        cluster.start_agent(&node.name, &bundle);
        nodes.push(node);
    }
    for node in &nodes {
        node.expect_state("active").await;
    }
    let account = cluster.credit("user", 100_000).await;
    let mut running = Vec::new();
    for _ in 0..RUNNING {
        running.push(cluster.rent("dear", 1).await);
    }
    for rented in &running {
        rented.expect_state("active").await;
    }
    let user = cluster.user.clone();
    user.wait_until(BALANCE, "all are charged", |it| it["running"] == RUNNING).await;
    let path = format!("/api/v1/admin/billing/accounts/{account}/adjustments");
    loop {
        let balance = user.get(BALANCE).await.ok()["balance_minor"].as_i64().unwrap();
        let left = json!({ "amount_minor": 1_500 - balance, "currency": CURRENCY, "reason": "a test needs it" });
        let adjusted = cluster.admin.post(&path, &left).await;
        // More was charged meanwhile than is to be left.
        if adjusted.code() != "insufficient_balance" {
            adjusted.created();
            break;
        }
    }

    user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    let all = expect_exact(&user).await;
    let a_second = DEAR_A_SECOND * i64::try_from(RUNNING).unwrap();
    let lowest = all.iter().map(|it| micro(&it["balance_micro"])).min().unwrap();
    assert!(lowest >= -a_second * (1 + GRACE), "by one window and the grace at most, and it was {lowest}");
    assert!(lowest < 0, "the grace was used: {lowest}");
    for rented in &running {
        let released = rented.expect_state("released").await;
        let (paid, lost) = cost(&all, rented.id);
        assert_eq!(paid + lost, expected_cost(&released, DEAR), "every microsecond, once: {released}");
        // The release is requested when the grace period ends, and takes a moment more.
        assert!(lost > 0, "what it ran on beyond the grace is written off: {released}");
    }
    assert_eq!(count_events(&cluster, "billing.balance_depleted").await, 1, "notified once, however many run");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn price_and_window_length_may_change_while_an_allocation_runs() {
    let (mut cluster, first) = start_with_allocation(short_windows().start().await).await;
    cluster.node("dear").await;
    let sku = cluster.offer_sku("dear", 8).await;
    let doubled = json!({ "price": { "currency": CURRENCY, "amount_minor_per_gpu_hour": 2 * DEAR } });
    cluster
        .admin
        .request_until_final(reqwest::Method::PATCH, &format!("/api/v1/admin/skus/{sku}"), Some(&doubled))
        .await
        .ok();
    let second = cluster.rent_active("dear", 1).await;
    for seconds in [3, 1, 2] {
        cluster.set_policy("billing.window_seconds", seconds).await;
        let (pool, of) = (cluster.pool.clone(), first.id);
        let changed = Utc::now();
        wait_until("a window is as long as that", || async {
            let long = |window: &(DateTime<Utc>, DateTime<Utc>, i64)| {
                window.0 >= changed - TimeDelta::seconds(4) && window.1 - window.0 == TimeDelta::seconds(seconds)
            };
            windows(&pool, of).await.iter().any(long)
        })
        .await;
    }
    let mut released = BTreeMap::new();
    for (rented, price) in [(&first, DEAR), (&second, 2 * DEAR)] {
        rented.release().await;
        released.insert(rented.id, (rented.expect_state("released").await, price));
    }
    cluster.user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    let all = expect_exact(&cluster.user).await;
    for (id, (released, price)) in released {
        assert_eq!(cost(&all, id), (expected_cost(&released, price), 0), "at the price that it began with: {released}");
    }
    // The next allocation starts at the current price.
    let estimate = cluster.user.get("/api/v1/billing/estimate?sku=dear&gpu_count=1").await.ok();
    assert!(micro(&estimate["needed_micro"]) == 2 * 2 * DEAR_A_SECOND, "two seconds of it: {estimate}");
    cluster.shutdown().await;
}
