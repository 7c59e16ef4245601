//! Removal by age: months of the logs, and ended entities.

use crate::test_store::{TestStore, bare, create, next};
use chrono::{DateTime, Months, TimeDelta, Utc};
use domain::commit::{Commit, CommitOutcome, Epoch};
use domain::id::{EntityKind, EntityRef, Shard};
use domain::invariants::i1_nothing_acknowledged_is_lost;
use ed25519_dalek::SigningKey;
use persistence::audit::{AuditKey, AuditKeys, AuditVerification, Sealer, verify};
use persistence::month_removal::remove_month;
use persistence::retention::{
    Month, MonthPartition, MonthRemoval, MonthlyLog, RetentionCutoffs, RetentionMonths, count_ended, delete_ended,
    delete_stray_history, detach_month, earlier_clock, expired, lag_of_ended, lag_of_log, partitions,
};
use persistence::table_sizes::{daily_growth, store_sample, table_sizes};
use std::time::{Duration, Instant};

const MONTHS: RetentionMonths = RetentionMonths { history: 13, audit: 13, ended_entities: 13 };

/// Longer than anything takes that does not hang.
const HANGS_AFTER: Duration = Duration::from_secs(60);

fn key() -> AuditKey {
    AuditKey::new(SigningKey::from_bytes(&[42; 32]))
}

async fn execute(store: &TestStore, statement: &str) {
    sqlx::raw_sql(sqlx::AssertSqlSafe(statement.to_owned())).execute(store.pool()).await.unwrap();
}

/// The tables of a month that is past, as they were made when it was ahead.
async fn make_month(store: &TestStore, month: Month) {
    let (from, end) = (format!("{month}-01"), month.end().unwrap().format("%Y-%m-%d"));
    for log in MonthlyLog::ALL.map(MonthlyLog::name) {
        let name = format!("{log}_{}", month.suffix());
        execute(
            store,
            &format!(
                "CREATE TABLE IF NOT EXISTS {name} PARTITION OF {log} FOR VALUES FROM ('{from} UTC') TO ('{end} UTC')"
            ),
        )
        .await;
    }
    execute(store, &format!("SELECT guard_partition('audit_{}')", month.suffix())).await;
}

fn month(text: &str) -> Month {
    Month::parse(text).unwrap()
}

fn at(text: &str) -> DateTime<Utc> {
    text.parse().unwrap()
}

async fn seal(store: &TestStore) {
    let terms: Vec<_> = Shard::all().map(|shard| (shard, Epoch(1))).collect();
    let mut sealer = Sealer::new(store.pool().clone(), store.me, key());
    // A run seals a bounded number of rows.
    for _ in 0..50 {
        assert_eq!(sealer.run(&terms, Utc::now()).await.unwrap().broken, []);
        if store.count("audit").await == store.count("audit_seal").await {
            return;
        }
    }
}

async fn verifies(store: &TestStore) {
    let what = AuditVerification {
        shards: Shard::all().collect(),
        keys: AuditKeys::of(&key()),
        heads: Vec::new(),
        unsealed_after: TimeDelta::minutes(5),
        now: Utc::now(),
    };
    assert_eq!(verify(store.pool(), &what).await.unwrap().findings, []);
}

/// Every transition of an entity that ends as soon as it is made.
async fn rentals(store: &TestStore, numbers: std::ops::Range<u32>, at: DateTime<Utc>) {
    let begun: Vec<_> = numbers
        .map(|n| {
            let commit = create(n);
            let entity = EntityRef { kind: EntityKind::Allocation, ..commit.entity };
            Commit { entity, at, to_state: "requested", timer: None, command: None, outbox: Vec::new(), ..commit }
        })
        .collect();
    let ended: Vec<_> = begun
        .iter()
        .map(|commit| Commit { to_state: "released", command: None, outbox: Vec::new(), ..next(commit) })
        .collect();
    for commits in [begun, ended] {
        let outcomes = store.commit_all(&commits).await;
        assert!(outcomes.iter().all(|outcome| *outcome == CommitOutcome::Applied), "{outcomes:?}");
    }
}

async fn month_of(store: &TestStore, log: MonthlyLog, of: Month) -> MonthPartition {
    let found = partitions(store.pool()).await.unwrap();
    found.into_iter().find(|it| it.log == log && it.month == of).expect("the month has a table")
}

async fn remove(store: &TestStore, log: MonthlyLog, of: Month) -> MonthRemoval {
    let partition = month_of(store, log, of).await;
    remove_month(store.pool(), &key(), partition, Utc::now()).await.unwrap()
}

/// What the worker does in one run.
async fn run(store: &TestStore, now: DateTime<Utc>) {
    let cutoffs = RetentionCutoffs::of(MONTHS, now);
    for partition in expired(&partitions(store.pool()).await.unwrap(), &cutoffs) {
        let removal = remove_month(store.pool(), &key(), partition, now).await.unwrap();
        assert_eq!(removal, MonthRemoval::Removed, "{partition:?}");
    }
    while delete_ended(store.pool(), EntityKind::Allocation, cutoffs.ended_entities).await.unwrap() > 0 {}
}

#[tokio::test]
async fn size_levels_off_over_25_months_and_the_audit_chains_verify() {
    const PER_MONTH: u32 = 150;
    let store = TestStore::new().await;
    let first = Utc::now() - Months::new(25);
    let mut sizes = Vec::new();
    for n in 0..25 {
        let now = first + Months::new(n);
        make_month(&store, Month::of(now)).await;
        rentals(&store, n * PER_MONTH..(n + 1) * PER_MONTH, now - TimeDelta::minutes(1)).await;
        seal(&store).await;
        run(&store, now).await;
        // What autovacuum does meanwhile.
        for table in ["entity", "audit_seal", "audit_head", "audit_checkpoint", "entity_count"] {
            execute(&store, &format!("VACUUM {table}")).await;
        }
        let tables = table_sizes(store.pool()).await.unwrap();
        let of = |name: &str| (tables[name].bytes, tables[name].partitions);
        sizes.push(["history", "audit", "audit_seal", "entity"].map(of));
    }
    let (then, last) = (sizes[13], sizes[24]);
    for (name, (then, last)) in ["history", "audit", "audit_seal", "entity"].into_iter().zip(then.into_iter().zip(last))
    {
        eprintln!("{name}: (bytes, partitions) after month 14 {then:?}, after month 25 {last:?}");
        // Autovacuum, which comes when it comes, accounts for up to two fifths. Without removals the size would grow to 25/14, by four fifths.
        assert!(last.0 * 2 <= then.0 * 3 && last.1 <= then.1, "{name} does not level off: {then:?}, {last:?}");
    }
    assert!(store.count("history").await < i64::from(2 * 16 * PER_MONTH));
    verifies(&store).await;
}

#[tokio::test]
async fn months_that_are_not_older_than_their_policy_stay() {
    let store = TestStore::new().await;
    for name in ["2024-01", "2024-02", "2024-03"] {
        make_month(&store, month(name)).await;
    }
    let found = partitions(store.pool()).await.unwrap();
    let names = |months: RetentionMonths, now: &str| -> Vec<String> {
        let cutoffs = RetentionCutoffs::of(months, at(now));
        expired(&found, &cutoffs).iter().map(|it| format!("{} {}", it.log.name(), it.month)).collect()
    };
    let months = RetentionMonths { history: 2, audit: 3, ended_entities: 13 };
    assert!(names(months, "2024-03-31T23:59:59Z").is_empty());
    assert_eq!(names(months, "2024-04-01T00:00:00Z"), ["history 2024-01"]);
    assert_eq!(names(months, "2024-05-01T00:00:00Z"), ["history 2024-01", "audit 2024-01", "history 2024-02"]);
    assert!(
        names(RetentionMonths { history: 1200, audit: 1200, ended_entities: 1200 }, "2099-01-01T00:00:00Z").is_empty()
    );

    let cutoffs = RetentionCutoffs::of(months, at("2024-04-11T00:00:00Z"));
    assert_eq!(lag_of_log(&found, &cutoffs, MonthlyLog::History), TimeDelta::days(10));
    assert_eq!(lag_of_log(&found, &cutoffs, MonthlyLog::Audit), TimeDelta::zero());
}

#[tokio::test]
async fn clock_that_is_ahead_removes_nothing() {
    let store = TestStore::new().await;
    let ahead = Utc::now() + Months::new(1200);
    let now = earlier_clock(store.pool(), ahead).await.unwrap();
    let found = partitions(store.pool()).await.unwrap();
    assert_eq!(expired(&found, &RetentionCutoffs::of(MONTHS, now)), []);
    assert!(!expired(&found, &RetentionCutoffs::of(MONTHS, ahead)).is_empty(), "by that clock they would be old");
    let behind = Utc::now() - TimeDelta::days(1);
    assert!(earlier_clock(store.pool(), behind).await.unwrap() <= behind);
}

/// A trigger that fails stands for a process that is killed between the two transactions.
#[tokio::test]
async fn month_that_was_detached_by_a_killed_process_is_dropped_by_the_next_run() {
    let store = TestStore::new().await;
    let old = month("2024-01");
    make_month(&store, old).await;
    rentals(&store, 0..3, at("2024-01-10T00:00:00Z")).await;
    seal(&store).await;
    execute(
        &store,
        "CREATE FUNCTION dies() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'killed'; END $$;
         CREATE EVENT TRIGGER dies ON ddl_command_start WHEN TAG IN ('DROP TABLE') EXECUTE FUNCTION dies()",
    )
    .await;
    for log in MonthlyLog::ALL {
        let partition = month_of(&store, log, old).await;
        remove_month(store.pool(), &key(), partition, Utc::now()).await.unwrap_err();
        assert!(!month_of(&store, log, old).await.is_attached, "{log:?}");
        assert_eq!(store.count(log.name()).await, 0);
    }
    // Chains verify in between, too.
    verifies(&store).await;
    execute(&store, "DROP EVENT TRIGGER dies").await;
    for log in MonthlyLog::ALL {
        assert_eq!(remove(&store, log, old).await, MonthRemoval::Removed);
    }
    assert!(partitions(store.pool()).await.unwrap().iter().all(|it| it.month != old));
    verifies(&store).await;
}

#[tokio::test]
async fn month_that_an_operator_detached_is_left_alone() {
    let store = TestStore::new().await;
    make_month(&store, month("2024-01")).await;
    execute(&store, "ALTER TABLE history DETACH PARTITION history_2024_01").await;
    let found = partitions(store.pool()).await.unwrap();
    assert!(found.iter().all(|it| (it.log, it.month) != (MonthlyLog::History, month("2024-01"))), "{found:?}");
    run(&store, Utc::now()).await;
    assert_eq!(store.count("history_2024_01").await, 0, "the table is still there");
}

/// A dump, or a report that runs for hours.
#[tokio::test]
async fn open_reader_delays_the_removal_of_a_month_and_no_commit() {
    let store = TestStore::new().await;
    let old = month("2024-01");
    make_month(&store, old).await;
    rentals(&store, 0..3, at("2024-01-10T00:00:00Z")).await;
    seal(&store).await;
    let mut n = 10;
    for log in MonthlyLog::ALL {
        for table in [log.name().to_owned(), format!("{}_2024_01", log.name())] {
            let mut reader = store.pool().begin().await.unwrap();
            let read = format!("SELECT count(*) FROM {table}");
            sqlx::query(sqlx::AssertSqlSafe(read)).execute(&mut *reader).await.unwrap();
            n += 1;
            let commit = create(n);
            let both = async { tokio::join!(remove(&store, log, old), store.commit(&commit)) };
            let (removal, outcome) =
                tokio::time::timeout(HANGS_AFTER, both).await.expect("nothing waits for the reader");
            assert_eq!((removal, outcome), (MonthRemoval::InUse, CommitOutcome::Applied), "{table}");
            reader.rollback().await.unwrap();
        }
        assert_eq!(remove(&store, log, old).await, MonthRemoval::Removed);
    }
    seal(&store).await;
    verifies(&store).await;
}

/// Printed, and not judged, since it is a time of this machine: how long commits take while a month of 200,000 rows leaves. What they
/// wait for is judged by the tests beside this one.
#[tokio::test]
async fn commits_go_on_while_a_month_leaves() {
    let store = TestStore::new().await;
    make_month(&store, month("2024-01")).await;
    execute(
        &store,
        "INSERT INTO history SELECT gen_random_uuid(), 1, 'sku', n % 256, 1, n, 'create', NULL, NULL, 'draft', 'x', 'user:ann', 'c',
             '2024-01-10T00:00:00Z' FROM generate_series(1, 200000) AS n",
    )
    .await;
    let removal = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let began = Instant::now();
        let removal = remove(&store, MonthlyLog::History, month("2024-01")).await;
        (removal, began.elapsed())
    };
    let mut removal = std::pin::pin!(removal);
    let (mut took, mut n) = (Vec::new(), 0);
    let (removal, lasted) = loop {
        let began = Instant::now();
        n += 1;
        let commit = bare(create(n));
        tokio::select! {
            biased;
            outcome = store.commit(&commit) => {
                assert_eq!(outcome, CommitOutcome::Applied);
                took.push(began.elapsed());
            }
            done = &mut removal => break done,
        }
    };
    assert_eq!((removal, store.count("history_default").await), (MonthRemoval::Removed, 0));
    let slowest = took.iter().max().unwrap();
    eprintln!("{} commits while a month left in {lasted:?}: the slowest took {slowest:?}", took.len());
}

/// Removing the file of a large table takes time. The drop is stopped here until commits have gone on beside it: the month was detached
/// in a transaction before, so that the drop locks the month alone.
#[tokio::test]
async fn commits_do_not_wait_while_a_detached_month_is_dropped() {
    let store = TestStore::new().await;
    make_month(&store, month("2024-01")).await;
    execute(
        &store,
        "CREATE TABLE drop_gate AS SELECT true AS is_closed;
         CREATE FUNCTION waits() RETURNS event_trigger LANGUAGE plpgsql AS
             $$ BEGIN WHILE EXISTS (SELECT FROM drop_gate) LOOP PERFORM pg_sleep(0.01); END LOOP; END $$;
         CREATE EVENT TRIGGER waits ON ddl_command_start WHEN TAG IN ('DROP TABLE') EXECUTE FUNCTION waits()",
    )
    .await;
    let commits = async {
        let is_dropping = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()
                           AND query LIKE 'DROP TABLE%' AND wait_event = 'PgSleep')";
        while !sqlx::query_scalar::<_, bool>(is_dropping).fetch_one(store.pool()).await.unwrap() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        for n in 0..5 {
            assert_eq!(store.commit(&bare(create(n))).await, CommitOutcome::Applied);
        }
        execute(&store, "DELETE FROM drop_gate").await;
    };
    let both = async { tokio::join!(remove(&store, MonthlyLog::History, month("2024-01")), commits) };
    let (removal, ()) = tokio::time::timeout(HANGS_AFTER, both).await.expect("no commit waits for the drop");
    assert_eq!(removal, MonthRemoval::Removed);
    let left = partitions(store.pool()).await.unwrap();
    assert!(left.iter().all(|it| (it.log, it.month) != (MonthlyLog::History, month("2024-01"))), "{left:?}");
}

#[tokio::test]
async fn ended_entities_are_removed_and_those_that_are_not_done_stay() {
    let store = TestStore::new().await;
    let (old, cutoff) = (at("2024-01-10T00:00:00Z"), at("2025-01-01T00:00:00Z"));
    rentals(&store, 0..7, old).await;
    rentals(&store, 7..8, Utc::now()).await;
    let id = |n: u32| create(n).entity.id;
    for statement in [
        format!("UPDATE entity SET state = 'active' WHERE id = '{}'", id(1)),
        format!("INSERT INTO deadline VALUES ('{}', 'allocation', 2, now(), NULL, 'a timer')", id(2)),
        format!("INSERT INTO parked VALUES ('{}', 'allocation', 3, 'it failed')", id(3)),
        format!(
            "INSERT INTO recording (session_id, owner, allocation_id, node_id, key_id, key_enc)
             VALUES ('{}', 'ann', gen_random_uuid(), gen_random_uuid(), 'k', '')",
            id(4)
        ),
        format!("UPDATE entity SET updated_at = now() WHERE id = '{}'", id(5)),
        format!("INSERT INTO term SELECT id, 'label' FROM entity WHERE id IN ('{}', '{}')", id(0), id(2)),
        format!("UPDATE entity SET kind = 'payment' WHERE id = '{}'", id(6)),
    ] {
        execute(&store, &statement).await;
    }
    persistence::table_maintenance::correct_counts(store.pool()).await.unwrap();
    assert_eq!(count_ended(store.pool(), EntityKind::Allocation, cutoff).await.unwrap(), 1);
    assert_eq!(lag_of_ended(store.pool(), cutoff).await.unwrap(), cutoff - old);
    let counted = |store: &TestStore| {
        let pool = store.pool().clone();
        async move {
            let sum = "SELECT coalesce(sum(change), 0)::bigint FROM entity_count WHERE kind = 'allocation' AND state = 'released'";
            sqlx::query_scalar::<_, i64>(sum).fetch_one(&pool).await.unwrap()
        }
    };
    let before = counted(&store).await;
    for kind in EntityKind::ALL {
        let expected = u64::from(*kind == EntityKind::Allocation);
        assert_eq!(delete_ended(store.pool(), *kind, cutoff).await.unwrap(), expected, "{kind}");
    }
    assert_eq!(counted(&store).await, before - 1);
    assert_eq!(lag_of_ended(store.pool(), cutoff).await.unwrap(), TimeDelta::zero());
    let left: Vec<uuid::Uuid> =
        sqlx::query_scalar("SELECT id FROM entity ORDER BY id").fetch_all(store.pool()).await.unwrap();
    assert_eq!(left, (1..8).map(id).collect::<Vec<_>>());
    assert_eq!(store.count("term").await, 1);
    // A command that comes late finds no entity: it changes nothing.
    let late = Commit {
        entity: EntityRef { kind: EntityKind::Allocation, ..create(0).entity },
        expected_version: 2,
        ..bare(create(0))
    };
    assert!(matches!(store.commit(&late).await, CommitOutcome::Conflict));
}

/// An owner's commit has the row while it is looked at.
#[tokio::test]
async fn ended_entity_that_changes_meanwhile_is_not_removed() {
    let store = TestStore::new().await;
    rentals(&store, 0..2, at("2024-01-10T00:00:00Z")).await;
    let mut commit = store.pool().begin().await.unwrap();
    sqlx::query("UPDATE entity SET version = version + 1, updated_at = now() WHERE id = $1")
        .bind(create(0).entity.id)
        .execute(&mut *commit)
        .await
        .unwrap();
    let removal = delete_ended(store.pool(), EntityKind::Allocation, at("2025-01-01T00:00:00Z"));
    assert_eq!(tokio::time::timeout(HANGS_AFTER, removal).await.expect("it waits for no commit").unwrap(), 1);
    commit.commit().await.unwrap();
    assert_eq!(delete_ended(store.pool(), EntityKind::Allocation, at("2025-01-01T00:00:00Z")).await.unwrap(), 0);
    assert_eq!(store.count("entity").await, 1);
}

#[tokio::test]
async fn entity_whose_history_was_removed_breaks_no_invariant_and_goes_on() {
    let store = TestStore::new().await;
    make_month(&store, month("2024-01")).await;
    let made = Commit { at: at("2024-01-10T00:00:00Z"), ..bare(create(1)) };
    assert_eq!(store.commit(&made).await, CommitOutcome::Applied);
    assert_eq!(remove(&store, MonthlyLog::History, month("2024-01")).await, MonthRemoval::Removed);
    let mut inspection = store.reads().inspect().await.unwrap();
    let shards: Vec<_> = Shard::all().collect();
    let found = inspection.entities(EntityKind::Sku, &shards, None, 10).await.unwrap().items.remove(0);
    let versions: Vec<_> = found.recorded.iter().map(|step| step.version).collect();
    assert!(versions.is_empty() && i1_nothing_acknowledged_is_lost(&versions, found.version));
    drop(inspection);
    assert_eq!(store.commit(&bare(next(&made))).await, CommitOutcome::Applied);
    let history = store.reads().history(made.entity.id, None, 10).await.unwrap();
    assert_eq!(history.items.iter().map(|row| row.version).collect::<Vec<_>>(), [2]);
}

#[tokio::test]
async fn old_rows_of_the_default_partition_are_deleted_in_batches() {
    let store = TestStore::new().await;
    let commits: Vec<_> = (0..3).map(|n| Commit { at: at("2020-01-10T00:00:00Z"), ..bare(create(n)) }).collect();
    store.commit_all(&commits).await;
    let later = Commit { at: Utc::now() + TimeDelta::days(400), ..bare(create(3)) };
    assert_eq!(store.commit(&later).await, CommitOutcome::Applied);
    assert_eq!(store.count("history_default").await, 4);
    assert_eq!(delete_stray_history(store.pool(), at("2024-01-01T00:00:00Z")).await.unwrap(), 3);
    assert_eq!(delete_stray_history(store.pool(), at("2024-01-01T00:00:00Z")).await.unwrap(), 0);
    assert_eq!(store.count("history_default").await, 1);
}

#[tokio::test]
async fn growth_follows_from_the_oldest_sample_of_the_last_month() {
    let store = TestStore::new().await;
    let sizes = table_sizes(store.pool()).await.unwrap();
    assert_eq!(sizes["ledger"].partitions, 1);
    assert!(sizes["history"].partitions >= 4 && sizes.keys().all(|name| !name.starts_with("history_")), "{sizes:?}");
    let now = Utc::now();
    assert_eq!(daily_growth(store.pool(), &sizes, now).await.unwrap().database, None);
    for (days, is_stored) in [(100, true), (10, true), (9, true), (9, false)] {
        assert_eq!(store_sample(store.pool(), &sizes, now - TimeDelta::days(days)).await.unwrap(), is_stored, "{days}");
    }
    let mut larger = sizes.clone();
    larger.get_mut("history").unwrap().bytes += 10 * 8192;
    let growth = daily_growth(store.pool(), &larger, now).await.unwrap();
    assert_eq!((growth.tables["history"], growth.tables["ledger"]), (8192, 0));
    assert!(growth.database.is_some());
    // A month later the first sample is gone.
    store_sample(store.pool(), &sizes, now).await.unwrap();
    let oldest: DateTime<Utc> =
        sqlx::query_scalar("SELECT min(measured_at) FROM table_size").fetch_one(store.pool()).await.unwrap();
    assert!(oldest > now - TimeDelta::days(11), "{oldest}");
}

#[tokio::test]
async fn detaching_twice_or_a_month_without_a_table_is_an_error_that_changes_nothing() {
    let store = TestStore::new().await;
    assert!(detach_month(store.pool(), month("2019-01")).await.is_err());
    make_month(&store, month("2024-01")).await;
    assert_eq!(detach_month(store.pool(), month("2024-01")).await.unwrap(), MonthRemoval::Removed);
    assert!(detach_month(store.pool(), month("2024-01")).await.is_err());
    assert_eq!(remove(&store, MonthlyLog::History, month("2024-01")).await, MonthRemoval::Removed);
}
