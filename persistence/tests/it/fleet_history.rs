//! The fleet hour by hour: each hour once, exact money, gaps in place of zeros.

use chrono::TimeDelta;
use domain::id::SkuId;
use domain::money::MicroAmount;
use domain::state_machine::Timestamp;
use local_servers::test_database::TestDatabase;
use persistence::fleet_history::{HourlyGpus, RentalCounts};
use persistence::queries::{CurrencyRevenue, FleetFilter, FleetHour, TooManyRows};
use persistence::{FleetHistory, Reads};
use uuid::Uuid;

/// The beginning of the `n`th hour of the tests.
fn hour(n: i64) -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000 + n * 3600, 0).unwrap()
}

fn sku(n: u128) -> Uuid {
    Uuid::from_u128(0x5C00 + n)
}

fn sample(n: u128, region: &str, total: u64) -> HourlyGpus {
    let (sku_id, name) = (SkuId(sku(n)), format!("sku-{n}"));
    HourlyGpus { sku_id, sku: name, region_code: region.to_owned(), total, held: 3, free: 2 }
}

struct Fleet {
    db: TestDatabase,
    history: FleetHistory,
}

impl Fleet {
    async fn new() -> Self {
        let db = TestDatabase::fresh().await;
        let fleet = Self { history: FleetHistory::new(db.pool.clone()), db };
        for (n, region) in [(0, "eu"), (1, "us")] {
            let body = serde_json::json!({ "registration": { "region_code": region } });
            fleet.entity(node(n), "node", None, body, hour(0)).await;
        }
        fleet
    }

    async fn entity(&self, id: Uuid, kind: &str, sku: Option<Uuid>, body: serde_json::Value, at: Timestamp) {
        let insert = "INSERT INTO entity (id, kind, shard, version, state, body, sku, created_at, updated_at)
                      VALUES ($1, $2, 0, 1, 'active', $3, $4, $5, $5)";
        let query = sqlx::query(insert).bind(id).bind(kind).bind(body).bind(sku).bind(at);
        query.execute(&self.db.pool).await.unwrap();
    }

    /// A rental that became active at `active_at`, `seconds` after its request.
    async fn rental(&self, n: u128, of: Uuid, on: u128, active_at: Timestamp, seconds: i64) {
        let requested_at = active_at - TimeDelta::seconds(seconds);
        let body = serde_json::json!({
            "requested_at": requested_at, "active_at": active_at, "phase": { "state": "active", "node_id": node(on) },
        });
        self.entity(allocation(n), "allocation", Some(of), body, requested_at).await;
    }

    async fn posting(&self, number: i64, (debit, credit): (&str, &str), of: Option<u128>, amount: i64, at: Timestamp) {
        let insert = "INSERT INTO ledger (account, number, version, kind, debit, credit, amount, currency, balance, allocation, at)
                      VALUES ($1, $2, $2, 'usage', $3, $4, $5, 'EUR', 0, $6, $7)";
        let query = sqlx::query(insert).bind(Uuid::from_u128(1)).bind(number).bind(debit).bind(credit).bind(amount);
        query.bind(of.map(allocation)).bind(at).execute(&self.db.pool).await.unwrap();
    }

    fn reads(&self) -> Reads {
        Reads::new(self.db.pool.clone())
    }

    async fn hours(&self, filter: &FleetFilter) -> Vec<FleetHour> {
        self.reads().fleet_hours(hour(-100), hour(100), filter, 1000).await.unwrap().unwrap()
    }

    async fn only_hour(&self, filter: &FleetFilter) -> FleetHour {
        let mut hours = self.hours(filter).await;
        assert_eq!(hours.len(), 1, "{hours:?}");
        hours.remove(0)
    }
}

fn node(n: u128) -> Uuid {
    Uuid::from_u128(0x0DE0_0000 + n)
}

fn allocation(n: u128) -> Uuid {
    Uuid::from_u128(0xA110_C000 + n)
}

fn eur(amount: i64) -> Vec<CurrencyRevenue> {
    vec![CurrencyRevenue { currency: "EUR".to_owned(), amount: MicroAmount::of(amount) }]
}

fn of(sku: Option<Uuid>, region: Option<&str>) -> FleetFilter {
    FleetFilter { sku, region: region.map(str::to_owned) }
}

const CHARGED: (&str, &str) = ("prepaid", "revenue");
const GIVEN_BACK: (&str, &str) = ("revenue", "prepaid");

#[tokio::test]
async fn gpus_of_an_hour_are_stored_by_the_first_of_several_members() {
    let fleet = Fleet::new().await;
    assert!(!fleet.history.has_gpus(hour(0)).await.unwrap());
    let first = [sample(0, "eu", 8), sample(1, "us", 16)];
    assert!(fleet.history.store_gpus(hour(0), hour(0), &first).await.unwrap());
    assert!(fleet.history.has_gpus(hour(0)).await.unwrap());
    let later = [sample(0, "eu", 99)];
    assert!(!fleet.history.store_gpus(hour(0), hour(1), &later).await.unwrap());
    assert_eq!(fleet.only_hour(&FleetFilter::default()).await.gpus.unwrap(), first);

    // At once: one stores, none fails.
    let racing = (0..8).map(|n| {
        let gpus = [sample(0, "eu", n), sample(1, "us", n)];
        let history = fleet.history.clone();
        async move { history.store_gpus(hour(1), hour(1), &gpus).await.unwrap() }
    });
    let stored = futures::future::join_all(racing).await;
    assert_eq!(stored.iter().filter(|stored| **stored).count(), 1);
    let raced = fleet.hours(&FleetFilter::default()).await.remove(1).gpus.unwrap();
    assert_eq!((raced.len(), raced[0].total), (2, raced[1].total), "both rows are of one member");
}

#[tokio::test]
async fn revenue_of_an_hour_is_the_sum_of_its_postings() {
    let fleet = Fleet::new().await;
    fleet.rental(0, sku(0), 0, hour(-5), 10).await;
    fleet.rental(1, sku(1), 1, hour(-5), 10).await;
    let last = hour(1) - TimeDelta::microseconds(1);
    fleet.posting(1, CHARGED, Some(0), 1000, hour(0) - TimeDelta::microseconds(1)).await;
    fleet.posting(2, CHARGED, Some(0), 7, hour(0)).await;
    fleet.posting(3, CHARGED, Some(1), 50, last).await;
    fleet.posting(4, GIVEN_BACK, Some(1), 20, last).await;
    // Of an allocation that is not stored, and of none: they count in the whole alone.
    fleet.posting(5, CHARGED, Some(77), 100, last).await;
    fleet.posting(6, CHARGED, None, 200, last).await;
    fleet.posting(7, ("processor_clearing", "prepaid"), None, 5000, last).await;
    fleet.posting(8, CHARGED, Some(0), 1000, hour(1)).await;

    assert!(fleet.history.add_up(hour(0), hour(2)).await.unwrap());
    let cases = [
        (of(None, None), eur(7 + 30 + 300)),
        (of(Some(sku(0)), None), eur(7)),
        (of(None, Some("us")), eur(30)),
        (of(Some(sku(1)), Some("us")), eur(30)),
        (of(Some(sku(1)), Some("eu")), vec![]),
    ];
    for (filter, expected) in cases {
        assert_eq!(fleet.only_hour(&filter).await.revenue.unwrap(), expected, "{filter:?}");
    }

    // A second member, or the same one after it was killed, adds nothing.
    assert!(!fleet.history.add_up(hour(0), hour(3)).await.unwrap());
    assert_eq!(fleet.only_hour(&FleetFilter::default()).await.revenue.unwrap(), eur(337));
}

#[tokio::test]
async fn rentals_count_in_the_hour_in_which_they_became_active() {
    let fleet = Fleet::new().await;
    fleet.rental(0, sku(0), 0, hour(0), 10).await;
    fleet.rental(1, sku(0), 0, hour(1) - TimeDelta::microseconds(1), 30).await;
    fleet.rental(2, sku(1), 1, hour(0) + TimeDelta::minutes(1), 100).await;
    // It waited for capacity for a week.
    fleet.rental(3, sku(1), 1, hour(0) + TimeDelta::minutes(2), 604_800).await;
    fleet.rental(4, sku(0), 0, hour(1), 10).await;
    fleet.rental(5, sku(0), 0, hour(0) - TimeDelta::microseconds(1), 10).await;
    // Altered past the service: left out, whichever field it is.
    for (n, body) in [
        serde_json::json!({ "requested_at": "yesterday", "active_at": hour(0) }),
        serde_json::json!({ "active_at": hour(0), "phase": { "node_id": "------------------------------------" } }),
        serde_json::json!({ "requested_at": hour(0), "active_at": [] }),
    ]
    .into_iter()
    .enumerate()
    {
        fleet.entity(allocation(100 + n as u128), "allocation", Some(sku(0)), body, hour(0)).await;
    }

    assert!(fleet.history.add_up(hour(0), hour(2)).await.unwrap());
    let counts = |begun, p50_seconds, p95_seconds| Some(RentalCounts { begun, p50_seconds, p95_seconds });
    let cases = [
        (of(None, None), counts(4, 30.0, 604_800.0)),
        (of(Some(sku(0)), None), counts(2, 10.0, 30.0)),
        (of(None, Some("us")), counts(2, 100.0, 604_800.0)),
        (of(Some(sku(0)), Some("us")), None),
    ];
    for (filter, expected) in cases {
        assert_eq!(fleet.only_hour(&filter).await.rentals.unwrap(), expected, "{filter:?}");
    }
}

#[tokio::test]
async fn hour_that_was_not_measured_is_a_gap_and_a_quiet_one_is_zero() {
    let fleet = Fleet::new().await;
    fleet.history.store_gpus(hour(0), hour(0), &[]).await.unwrap();
    fleet.history.add_up(hour(1), hour(2)).await.unwrap();
    let expected = [
        FleetHour { hour: hour(0), gpus: Some(vec![]), rentals: None, revenue: None },
        FleetHour { hour: hour(1), gpus: None, rentals: Some(None), revenue: Some(vec![]) },
    ];
    assert_eq!(fleet.hours(&FleetFilter::default()).await, expected);
    let missing = async |from, until, postponed: &[Timestamp], most| {
        fleet.history.hours_to_add_up(from, until, postponed, most).await.unwrap()
    };
    assert_eq!(missing(hour(0), hour(4), &[], 10).await, [hour(0), hour(2), hour(3)]);
    assert_eq!(missing(hour(0), hour(4), &[], 2).await, [hour(0), hour(2)]);
    assert_eq!(missing(hour(0), hour(4), &[hour(0), hour(3)], 2).await, [hour(2)]);
    assert_eq!(missing(hour(1), hour(2), &[], 10).await, Vec::<Timestamp>::new());
}

#[tokio::test]
async fn more_rows_than_the_bound_are_refused() {
    let fleet = Fleet::new().await;
    for n in 0..3 {
        fleet.history.store_gpus(hour(n), hour(n), &[sample(0, "eu", 8), sample(1, "us", 8)]).await.unwrap();
    }
    let read =
        async |filter: &FleetFilter, most| fleet.reads().fleet_hours(hour(0), hour(3), filter, most).await.unwrap();
    let all = FleetFilter::default();
    assert_eq!(read(&all, 5).await, Err(TooManyRows));
    assert_eq!(read(&all, 6).await.unwrap().len(), 3);
    assert_eq!(read(&of(Some(sku(0)), None), 3).await.unwrap().len(), 3);
}

#[tokio::test]
async fn old_hours_are_deleted_with_their_rows_and_younger_ones_stay() {
    let fleet = Fleet::new().await;
    fleet.rental(0, sku(0), 0, hour(0), 10).await;
    fleet.posting(1, CHARGED, Some(0), 7, hour(0)).await;
    for n in 0..2 {
        fleet.history.store_gpus(hour(n), hour(n), &[sample(0, "eu", 8)]).await.unwrap();
        fleet.history.add_up(hour(n), hour(n + 1)).await.unwrap();
    }
    assert_eq!(fleet.history.delete_before(hour(1)).await.unwrap(), 1);
    assert_eq!(fleet.history.delete_before(hour(1)).await.unwrap(), 0);
    for table in ["fleet_hour", "fleet_hour_gpus", "fleet_hour_rentals", "fleet_hour_revenue"] {
        let hours = format!("SELECT DISTINCT hour FROM {table}");
        let left: Vec<Timestamp> =
            sqlx::query_scalar(sqlx::AssertSqlSafe(hours)).fetch_all(&fleet.db.pool).await.unwrap();
        let expected: &[Timestamp] = if table.ends_with("hour") || table.ends_with("gpus") { &[hour(1)] } else { &[] };
        assert_eq!(left, expected, "{table}");
    }
}
