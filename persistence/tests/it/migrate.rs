//! How a database is brought to a release's schema, and which releases run on which schema.

use chrono::Utc;
use domain::MemberId;
use local_servers::test_database::TestDatabase;
use persistence::Cluster;
use persistence::membership::Member;
use persistence::migrate::{
    self, MigrationKind, MigrationScope, Migrations, Progress, SchemaError, SchemaMigration, SchemaReport,
    StartingMember,
};
use serde_json::{Value, json};
use sqlx::PgPool;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use uuid::Uuid;

const EXPAND: &str = "-- migration: expand\nALTER TABLE entity ADD COLUMN later text;\n";
const CONTRACT: &str = "-- migration: contract\nALTER TABLE entity DROP COLUMN later;\n";

fn expand() -> SchemaMigration {
    SchemaMigration::new(9001, "later column", EXPAND)
}

fn contract() -> SchemaMigration {
    SchemaMigration::new(9002, "no later column", CONTRACT)
}

/// This release, and the two after it.
fn releases() -> (Migrations, Migrations, Migrations) {
    let this = Migrations::embedded();
    let next = this.clone().and(expand());
    (this, next.clone(), next.and(contract()))
}

async fn apply(release: &Migrations, pool: &PgPool) -> Result<SchemaReport, SchemaError> {
    release.apply(pool, MigrationScope::All, &mut |_| {}).await
}

async fn empty_database() -> TestDatabase {
    let db = TestDatabase::fresh().await;
    sqlx::raw_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public").execute(&db.pool).await.unwrap();
    db
}

async fn exists(pool: &PgPool, relation: &str) -> bool {
    sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL").bind(relation).fetch_one(pool).await.unwrap()
}

async fn has_later_column(pool: &PgPool) -> bool {
    let columns = "SELECT EXISTS (SELECT 1 FROM information_schema.columns
                   WHERE table_name = 'entity' AND column_name = 'later')";
    sqlx::query_scalar(columns).fetch_one(pool).await.unwrap()
}

/// Waits until a statement with this text is executed.
async fn until_running(pool: &PgPool, text: &str) {
    let running = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active'
                   AND position($1 in query) > 0 AND pid <> pg_backend_pid()";
    let until = Instant::now() + Duration::from_secs(60);
    while sqlx::query_scalar::<_, i64>(running).bind(text).fetch_one(pool).await.unwrap() == 0 {
        assert!(Instant::now() < until, "the statement does not begin");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn member(name: &str, details: Value) -> Member {
    Member { id: MemberId(Uuid::new_v4()), name: name.to_owned(), started_at: Utc::now(), details }
}

#[tokio::test(flavor = "multi_thread")]
async fn members_that_start_together_migrate_once() {
    let db = empty_database().await;
    let runs = futures::future::join_all((0..4).map(|_| migrate::run(&db.pool))).await;
    assert!(runs.iter().all(Result::is_ok), "{runs:?}");
    let report = Migrations::embedded().check(&db.pool).await.unwrap();
    assert!(report.missing.is_empty() && report.later.is_empty(), "{report:?}");
}

#[tokio::test]
async fn empty_database_gets_contracts_too_and_is_behind_before() {
    let db = empty_database().await;
    let (.., release) = releases();
    let Err(SchemaError::Behind { missing }) = release.check(&db.pool).await else { panic!("it has nothing") };
    assert!(missing.contains(&1) && missing.contains(&9001) && !missing.contains(&9002), "{missing:?}");
    assert!(!exists(&db.pool, "_sqlx_migrations").await, "a check changes nothing");
    let report = release.apply(&db.pool, MigrationScope::Expand, &mut |_| {}).await.unwrap();
    assert!(report.missing.is_empty() && report.waiting.is_empty(), "{report:?}");
    assert!(!has_later_column(&db.pool).await);
}

#[tokio::test]
async fn release_runs_on_a_later_expansion_and_refuses_a_later_contract() {
    let db = TestDatabase::fresh().await;
    let (this, next, after_next) = releases();
    let plan = next.plan(&db.pool).await.unwrap();
    assert_eq!(
        plan.missing.iter().map(|it| (it.version, it.kind)).collect::<Vec<_>>(),
        [(9001, MigrationKind::Expand)]
    );
    assert!(!has_later_column(&db.pool).await, "a plan changes nothing");
    apply(&next, &db.pool).await.unwrap();
    assert_eq!(this.check(&db.pool).await.unwrap().later, [9001]);
    assert!(apply(&this, &db.pool).await.unwrap().missing.is_empty(), "it has nothing to do");

    // Left out on request: the way back stays open, and the release itself runs.
    let report = after_next.apply(&db.pool, MigrationScope::Expand, &mut |_| {}).await.unwrap();
    assert_eq!(report.waiting.iter().map(|it| (it.version, it.needed_by.len())).collect::<Vec<_>>(), [(9002, 0)]);
    after_next.check(&db.pool).await.unwrap();
    this.check(&db.pool).await.unwrap();

    apply(&after_next, &db.pool).await.unwrap();
    after_next.check(&db.pool).await.unwrap();
    for earlier in [this, next] {
        for refused in [earlier.check(&db.pool).await, apply(&earlier, &db.pool).await] {
            let error = refused.unwrap_err();
            assert!(matches!(error, SchemaError::Newer { found: 9002, known } if known == earlier.known()), "{error}");
        }
    }
}

#[tokio::test]
async fn unknown_migration_of_a_release_without_marks_counts_as_a_contract() {
    let db = TestDatabase::fresh().await;
    let (this, next, _) = releases();
    apply(&next, &db.pool).await.unwrap();
    sqlx::raw_sql("DROP TABLE contract_migration").execute(&db.pool).await.unwrap();
    assert!(matches!(this.check(&db.pool).await, Err(SchemaError::Newer { found: 9001, .. })));
}

#[tokio::test]
async fn contract_is_refused_while_a_member_of_an_earlier_release_lives() {
    let db = TestDatabase::fresh().await;
    let (cluster, (.., release)) = (Cluster::new(db.pool.clone()), releases());
    let without_schema = member("old-1", json!({ "version": "0.1.0" }));
    let of_next = member("old-2", json!({ "version": "0.2.0", "schema": 9001 }));
    let of_this = member("new-1", json!({ "version": "0.3.0", "schema": 9002 }));
    for member in [&without_schema, &of_next, &of_this] {
        cluster.heartbeat(member).await.unwrap();
    }
    let plan = release.plan(&db.pool).await.unwrap();
    assert_eq!(plan.waiting[0].needed_by, ["old-1 (0.1.0)", "old-2 (0.2.0)"]);
    let report = apply(&release, &db.pool).await.unwrap();
    assert_eq!(report.waiting, plan.waiting);
    assert!(has_later_column(&db.pool).await, "what is before it was applied, and it was not");

    // One ends in order, the other has been silent for longer than any failure detector waits.
    cluster.remove(without_schema.id).await.unwrap();
    assert_eq!(apply(&release, &db.pool).await.unwrap().waiting[0].needed_by, ["old-2 (0.2.0)"]);
    let silent = "UPDATE member SET beat_at = beat_at - interval '61 s' WHERE name = 'old-2'";
    sqlx::raw_sql(silent).execute(&db.pool).await.unwrap();
    assert!(apply(&release, &db.pool).await.unwrap().waiting.is_empty());
    assert!(!has_later_column(&db.pool).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn contract_and_a_member_that_starts_wait_for_each_other() {
    let db = TestDatabase::fresh().await;
    let (this, _, release) = releases();
    let old = member("old", json!({ "version": "0.1.0", "schema": this.known() }));
    let starting = StartingMember::begin(&db.pool).await.unwrap();
    this.check(&db.pool).await.unwrap();
    let joined = tokio::spawn(starting.hold_until_joined(old.id));
    let migrating = tokio::spawn({
        let (release, pool) = (release.clone(), db.pool.clone());
        async move { apply(&release, &pool).await }
    });
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!migrating.is_finished(), "it waits for the member's row");
    Cluster::new(db.pool.clone()).heartbeat(&old).await.unwrap();
    let report = migrating.await.unwrap().unwrap();
    assert_eq!(report.waiting[0].needed_by, ["old (0.1.0)"]);
    joined.await.unwrap();

    // The other way round: the contract is in progress when a member starts.
    Cluster::new(db.pool.clone()).remove(old.id).await.unwrap();
    let slow = SchemaMigration::new(9002, "slow", "-- migration: contract\nSELECT pg_sleep(2);\n");
    let slow = this.clone().and(expand()).and(slow);
    let migrating = tokio::spawn({
        let pool = db.pool.clone();
        async move { apply(&slow, &pool).await }
    });
    until_running(&db.pool, "pg_sleep(2)").await;
    let _starting = StartingMember::begin(&db.pool).await.unwrap();
    let refused = this.check(&db.pool).await;
    assert!(matches!(refused, Err(SchemaError::Newer { found: 9002, .. })), "{refused:?}");
    assert!(migrating.await.unwrap().unwrap().waiting.is_empty());
}

#[tokio::test]
async fn migration_that_fails_leaves_the_database_as_before_that_file() {
    let db = TestDatabase::fresh().await;
    let (this, next, _) = releases();
    let half = "-- migration: expand\nCREATE TABLE half ();\nSELECT 1 / 0;\n";
    let release = next.clone().and(SchemaMigration::new(9002, "half", half));
    let release = release.and(SchemaMigration::new(9003, "last", "-- migration: expand\nCREATE TABLE last ();\n"));
    let error = apply(&release, &db.pool).await.unwrap_err();
    assert!(matches!(&error, SchemaError::Failed { version: 9002, .. }), "{error}");
    assert!(!exists(&db.pool, "half").await && !exists(&db.pool, "last").await);
    assert_eq!(this.check(&db.pool).await.unwrap().later, [9001], "the release before runs");

    let whole = "-- migration: expand\nCREATE TABLE half ();\n";
    apply(&next.and(SchemaMigration::new(9002, "half", whole)), &db.pool).await.unwrap();
    assert!(exists(&db.pool, "half").await, "the corrected file is applied");
}

#[tokio::test]
async fn changed_file_is_refused() {
    let db = TestDatabase::fresh().await;
    let (this, next, _) = releases();
    apply(&next, &db.pool).await.unwrap();
    let changed = "-- migration: expand\nALTER TABLE entity ADD COLUMN later bigint;\n";
    let changed = this.and(SchemaMigration::new(9001, "later column", changed));
    for refused in [changed.check(&db.pool).await, apply(&changed, &db.pool).await] {
        assert!(matches!(refused, Err(SchemaError::Changed { version: 9001 })), "{refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn process_that_dies_in_a_long_statement_does_not_block_the_next_one() {
    let db = TestDatabase::fresh().await;
    let (this, next, _) = releases();
    let long = "-- migration: expand\nCREATE TABLE half ();\nSELECT pg_sleep(600);\n";
    let long = this.and(SchemaMigration::new(9001, "long", long));
    let pool = db.pool.clone();
    let dies = tokio::spawn(async move { apply(&long, &pool).await });
    until_running(&db.pool, "pg_sleep(600)").await;
    dies.abort();
    let next = apply(&next, &db.pool);
    tokio::time::timeout(Duration::from_secs(120), next).await.expect("the server has noticed its end").unwrap();
    assert!(!exists(&db.pool, "half").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn migration_that_waits_for_another_process_says_so() {
    let db = TestDatabase::fresh().await;
    let (_, next, _) = releases();
    let mut other = db.pool.acquire().await.unwrap().detach();
    sqlx::migrate::Migrate::lock(&mut other).await.unwrap();
    let pool = db.pool.clone();
    let (reported, mut progress) = mpsc::channel(8);
    let migrating = tokio::spawn(async move {
        let mut report = |progress: Progress<'_>| {
            let _ = reported.try_send(matches!(progress, Progress::Waits));
        };
        next.apply(&pool, MigrationScope::All, &mut report).await
    });
    assert_eq!(progress.recv().await, Some(true));
    assert!(!has_later_column(&db.pool).await);
    sqlx::migrate::Migrate::unlock(&mut other).await.unwrap();
    migrating.await.unwrap().unwrap();
    assert!(has_later_column(&db.pool).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn commits_do_not_wait_behind_a_migration_that_waits_for_a_lock() {
    let db = TestDatabase::fresh().await;
    let (_, next, _) = releases();
    let mut reader = db.pool.begin().await.unwrap();
    sqlx::raw_sql("SELECT count(*) FROM entity").execute(&mut *reader).await.unwrap();
    let pool = db.pool.clone();
    let (locked, mut is_locked) = mpsc::channel(8);
    let migrating = tokio::spawn(async move {
        let mut report = |progress: Progress<'_>| {
            let _ = locked.try_send(matches!(progress, Progress::Locked(_)));
        };
        next.apply(&pool, MigrationScope::All, &mut report).await
    });
    // Past several of its attempts. A commit that queued behind a waiting migration would wait for the reader, who does not end.
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        let update = sqlx::raw_sql("UPDATE entity SET version = version").execute(&db.pool);
        tokio::time::timeout(Duration::from_secs(60), update).await.expect("a commit waits for a migration").unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(is_locked.recv().await, Some(true), "the progress reports the lock");
    assert!(!migrating.is_finished());
    reader.rollback().await.unwrap();
    migrating.await.unwrap().unwrap();
    assert!(has_later_column(&db.pool).await);
}

#[tokio::test]
async fn contracts_applied_late_lead_to_the_same_schema() {
    let (in_order, late) = (empty_database().await, empty_database().await);
    let release = Migrations::embedded();
    migrate::run(&in_order.pool).await.unwrap();
    // As an operator who never leaves the way back: all expansions first.
    release.clone().up_to(1).apply(&late.pool, MigrationScope::All, &mut |_| {}).await.unwrap();
    let report = release.apply(&late.pool, MigrationScope::Expand, &mut |_| {}).await.unwrap();
    assert!(!report.waiting.is_empty());
    apply(&release, &late.pool).await.unwrap();
    let columns = "SELECT string_agg(concat_ws(' ', table_name, column_name, data_type, is_nullable), ', '
                   ORDER BY table_name, column_name) FROM information_schema.columns WHERE table_schema = 'public'";
    let of = async |db: &TestDatabase| sqlx::query_scalar::<_, String>(columns).fetch_one(&db.pool).await.unwrap();
    assert_eq!(of(&in_order).await, of(&late).await);
}
