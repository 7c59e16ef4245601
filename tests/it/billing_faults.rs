//! What must cost nobody a millionth and give nobody one: clocks that are wrong, deaths at each step of accrual, a worker that was away for
//! a day, an end of the money with much running, and values that change meanwhile. Each world ends with its ledger verified.

use crate::billing::{BALANCE, cost, dear_sku, expect_exact, micro, owed, said, short_windows};
use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};
use sqlx::{PgPool, Row};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tests::world::held::{Held, Then, WRITES};
use tests::world::tenants::Rented;
use tests::world::{CURRENCY, PATIENCE, World};
use uuid::Uuid;

/// Minor units an hour of one GPU of the dear kind, and millionths a second.
const DEAR: i64 = 36_000;
const DEAR_A_SECOND: i64 = 10_000_000;

/// What was charged for an allocation, window by window, as it stands in the database: no API is asked, since callers and service may not
/// agree about the time.
async fn windows(pool: &PgPool, allocation: Uuid) -> Vec<(DateTime<Utc>, DateTime<Utc>, i64)> {
    let statement =
        "SELECT used_from, used_until, amount FROM ledger WHERE allocation = $1 AND kind = 'usage' ORDER BY number";
    let rows = sqlx::query(statement).bind(allocation).fetch_all(pool).await.expect("the ledger can be read");
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect()
}

async fn billed_until(pool: &PgPool, allocation: Uuid) -> DateTime<Utc> {
    windows(pool, allocation).await.last().expect("it was charged").1
}

async fn until<F: Future<Output = bool>>(what: &str, holds: impl Fn() -> F) {
    let end = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn charged_beyond(world: &World, allocation: Uuid, instant: DateTime<Utc>) {
    let pool = world.pool.clone();
    until("it is charged", || async { windows(&pool, allocation).await.last().is_some_and(|last| last.1 > instant) })
        .await;
}

/// A world in which a GPU of the dear kind is rented and charged.
async fn renting(mut world: World) -> (World, Rented) {
    dear_sku(&mut world).await;
    world.node("dear").await;
    world.credit("user", 90_000).await;
    let rented = world.rent("dear", 1).await;
    rented.expect_state("active").await;
    charged_beyond(&world, rented.id, DateTime::UNIX_EPOCH).await;
    (world, rented)
}

/// Its end: it has cost what its time costs, by the service's own view of it, and nothing was lost.
async fn expect_paid_exactly(world: &World, rented: &Rented) -> Vec<Value> {
    rented.release().await;
    let released = rented.expect_state("released").await;
    world.user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    let all = expect_exact(&world.user).await;
    assert_eq!(cost(&all, rented.id), (owed(&released, DEAR), 0), "{released}");
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_whose_clock_is_an_hour_ahead_and_then_behind_is_put_right_to_the_millionth() {
    let (world, rented) = renting(short_windows().service_clock().start().await).await;
    let clock = world.service_clock.as_ref().unwrap();
    let began = Utc::now();
    clock.put(TimeDelta::hours(1));
    charged_beyond(&world, rented.id, began + TimeDelta::minutes(59)).await;
    let hour: i64 = windows(&world.pool, rented.id).await.iter().map(|window| window.2).sum();
    assert!(hour >= 59 * 60 * DEAR_A_SECOND, "it believes that an hour has passed: {hour}");

    // It goes back: nothing is charged until it has caught up, however far back it is.
    for ahead in [TimeDelta::zero(), TimeDelta::minutes(-59)] {
        clock.put(ahead);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let before = windows(&world.pool, rented.id).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(windows(&world.pool, rented.id).await, before, "time does not run backwards");
    }
    clock.put(TimeDelta::zero());
    let all = expect_paid_exactly(&world, &rented).await;
    let given_back = all.iter().find(|it| it["kind"] == "usage_credit").expect("what did not accrue is given back");
    assert!(micro(&given_back["amount_micro"]) > 55 * 60 * DEAR_A_SECOND, "{given_back}");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_whose_clock_is_an_hour_ahead_and_then_behind_changes_no_amount() {
    let (mut world, rented) = renting(short_windows().replicas(2).postgres_clock().start().await).await;
    let clock = world.postgres_clock.as_ref().unwrap();
    for ahead in [TimeDelta::hours(1), TimeDelta::zero(), TimeDelta::hours(-1), TimeDelta::zero()] {
        clock.put(ahead);
        let told: DateTime<Utc> =
            sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&world.pool).await.expect("it tells the time");
        assert!((told - Utc::now() - ahead).abs() < TimeDelta::seconds(10), "it does believe so: {told}");
        charged_beyond(&world, rented.id, Utc::now() + TimeDelta::seconds(2)).await;
        let last = billed_until(&world.pool, rented.id).await;
        assert!(last < Utc::now() + TimeDelta::seconds(2), "and charges by the service's clock: {last}");
    }
    // Who dies after it all is noticed as ever.
    let account = world.credit("user", 1).await;
    let owner = world.owner_of("billing_account", account).await;
    world.kill9_replica(owner);
    charged_beyond(&world, rented.id, Utc::now() + TimeDelta::seconds(2)).await;
    world.restart_replica(owner).await;
    expect_paid_exactly(&world, &rented).await;
    world.end().await;
}

/// A step of accrual at which a replica can be held, by a lock on what it needs for it.
#[derive(Clone, Copy, Debug)]
struct Step {
    lock: Lock,
    /// The statement that waits then, as it begins.
    waits: &'static str,
    then: Then,
}

#[derive(Clone, Copy, Debug)]
enum Lock {
    /// Nobody reads the table.
    Table(&'static str),
    /// Nobody changes the account, and what does not concern it goes on.
    Account,
}

const LOOKS: &str = "SELECT entity, kind, shard, wake_at%";
const LOADS: &str = "SELECT found.id, found.kind, found.version%";

const STEPS: [Step; 4] = [
    Step { lock: Lock::Table("deadline"), waits: LOOKS, then: Then::Nothing },
    Step { lock: Lock::Table("entity"), waits: LOADS, then: Then::Nothing },
    Step { lock: Lock::Account, waits: WRITES, then: Then::CutOff },
    Step { lock: Lock::Account, waits: WRITES, then: Then::Written },
];

#[tokio::test(flavor = "multi_thread")]
async fn a_death_at_any_step_of_accrual_charges_each_window_once() {
    let (mut world, rented) = renting(short_windows().start().await).await;
    let pool = world.pool.clone();
    let account: Uuid = sqlx::query_scalar("SELECT account FROM ledger WHERE allocation = $1 LIMIT 1")
        .bind(rented.id)
        .fetch_one(&pool)
        .await
        .expect("it was charged");
    for step in STEPS {
        charged_beyond(&world, rented.id, Utc::now() - TimeDelta::seconds(1)).await;
        let mut held = match step.lock {
            Lock::Table(name) => world.hold_table(name).await,
            Lock::Account => world.hold(account).await,
        };
        held.expect_waiting(step.waits).await;
        let before = windows_held(&mut held, rented.id, step).await;
        world.kill9_replica(0);
        held.give_back(step.waits, step.then).await;
        let after = windows(&pool, rented.id).await.len();
        match step.then {
            // A window that was on its way as the table was locked, at most.
            Then::Nothing => assert!(after <= before + 1, "{before} windows, and then {after}: {step:?}"),
            Then::CutOff => assert_eq!(after, before, "what was cut off was not written"),
            Then::Written => assert_eq!(after, before + 1, "it was written, and nobody was told"),
        }
        world.restart_replica(0).await;
    }
    expect_paid_exactly(&world, &rented).await;
    world.end().await;
}

/// How many windows were charged, read by who holds the lock.
async fn windows_held(held: &mut Held, allocation: Uuid, step: Step) -> usize {
    let count: i64 = sqlx::query_scalar("SELECT count(*) FROM ledger WHERE allocation = $1 AND kind = 'usage'")
        .bind(allocation)
        .fetch_one(held.reader())
        .await
        .unwrap_or_else(|error| panic!("{step:?}: {error}"));
    usize::try_from(count).unwrap()
}

/// Nobody charged for a day. Then it is one window, and costs what a day costs.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_was_away_for_a_day_charges_it_as_one_window() {
    // The node's certificate outlives the day.
    let month = 30 * 86_400;
    let mut world = short_windows().policy("node.certificate_ttl_seconds", month).service_clock().start().await;
    world.node("h100").await;
    world.credit("user", 100_000).await;
    let rented = world.rent("h100", 4).await;
    rented.expect_state("active").await;
    charged_beyond(&world, rented.id, DateTime::UNIX_EPOCH).await;
    world.kill9_replica(0);
    let before = windows(&world.pool, rented.id).await;
    let clock = world.service_clock.as_ref().unwrap();
    clock.put(TimeDelta::days(1));
    world.replicas[0].start_again().await.expect("it starts a day later");
    charged_beyond(&world, rented.id, Utc::now() + TimeDelta::hours(23)).await;
    let all = windows(&world.pool, rented.id).await;
    let (from, to, amount) = all[before.len()];
    assert_eq!(from, before.last().unwrap().1, "from where it had stopped");
    assert!(to - from > TimeDelta::hours(23), "in one: {from} to {to}");
    // Four GPUs at 250 an hour; a window carries the rest of the one before.
    let exactly = 1_000 * (to - from).num_microseconds().unwrap() / 3600;
    assert!((amount - exactly).abs() <= 1, "{amount} for {exactly}");

    // The day is taken back with the clock, and the allocation ends today.
    clock.put(TimeDelta::zero());
    rented.release().await;
    let released = rented.expect_state("released").await;
    world.user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    assert_eq!(cost(&expect_exact(&world.user).await, rented.id), (owed(&released, 1_000), 0), "{released}");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_that_run_into_the_end_of_the_balance_are_told_of_once_and_the_rest_is_written_off() {
    const RUNNING: usize = 20;
    const GRACE: i64 = 2;
    let mut world = short_windows().policy("billing.depletion_grace_seconds", GRACE).start().await;
    dear_sku(&mut world).await;
    // A node that enforces nothing takes one tenant at a time.
    let mut nodes = Vec::new();
    for _ in 0..RUNNING {
        let node = world.register("dear").await;
        let bundle = world.bundle(&node).await;
        world.start_agent(&node.name, &bundle);
        nodes.push(node);
    }
    for node in &nodes {
        node.expect_state("active").await;
    }
    let account = world.credit("user", 100_000).await;
    let mut running = Vec::new();
    for _ in 0..RUNNING {
        running.push(world.rent("dear", 1).await);
    }
    for rented in &running {
        rented.expect_state("active").await;
    }
    let user = world.user.clone();
    let all_run = user.wait_until(BALANCE, "all are charged", |it| it["running"] == RUNNING).await;
    let left = json!({
        "amount_minor": 1_500 - all_run["balance_minor"].as_i64().unwrap(), "currency": CURRENCY, "reason": "a test needs it"
    });
    world.admin.post(&format!("/api/v1/admin/billing/accounts/{account}/adjustments"), &left).await.created();

    user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    let all = expect_exact(&user).await;
    let a_second = DEAR_A_SECOND * i64::try_from(RUNNING).unwrap();
    let lowest = all.iter().map(|it| micro(&it["balance_micro"])).min().unwrap();
    assert!(lowest >= -a_second * (1 + GRACE), "by one window and the grace at most, and it was {lowest}");
    assert!(lowest < 0, "the grace was used: {lowest}");
    for rented in &running {
        let released = rented.expect_state("released").await;
        let (paid, lost) = cost(&all, rented.id);
        assert_eq!(paid + lost, owed(&released, DEAR), "every microsecond, once: {released}");
        // Its end is asked for when the grace is over, and takes a moment more.
        assert!(lost > 0, "what it ran on beyond the grace is written off: {released}");
    }
    assert_eq!(said(&world, "billing.balance_depleted").await, 1, "said once, however many run");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_price_and_a_windows_length_may_change_while_it_runs() {
    let (mut world, first) = renting(short_windows().start().await).await;
    world.node("dear").await;
    let sku = world.offer("dear", 8).await;
    let doubled = json!({ "price": { "currency": CURRENCY, "amount_minor_per_gpu_hour": 2 * DEAR } });
    world.admin.insist(reqwest::Method::PATCH, &format!("/api/v1/admin/skus/{sku}"), Some(&doubled)).await.ok();
    let second = world.rent("dear", 1).await;
    second.expect_state("active").await;
    for seconds in [3, 1, 2] {
        world.set_policy("billing.window_seconds", seconds).await;
        let (pool, of) = (world.pool.clone(), first.id);
        let changed = Utc::now();
        until("a window is as long as that", || async {
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
    world.user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    let all = expect_exact(&world.user).await;
    for (id, (released, price)) in released {
        assert_eq!(cost(&all, id), (owed(&released, price), 0), "at the price that it began with: {released}");
    }
    // And the next begins at the price that is in force.
    let estimate = world.user.get("/api/v1/billing/estimate?sku=dear&gpu_count=1").await.ok();
    assert!(micro(&estimate["needed_micro"]) == 2 * 2 * DEAR_A_SECOND, "two seconds of it: {estimate}");
    world.end().await;
}
