//! `gpuaas migrate` beside running replicas, and which schema a replica starts on.

#![allow(clippy::print_stdout, reason = "figures, for a run with --no-capture")]

use local_servers::private_files;
use local_servers::test_database::TestDatabase;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use persistence::migrate::{MigrationScope, Migrations, SchemaError, SchemaMigration};
use secrecy::ExposeSecret as _;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tests::cluster::{TestCluster, WAIT_TIMEOUT};
use tokio::io::{AsyncBufReadExt as _, BufReader};

const LATER: &str = "-- migration: expand\nALTER TABLE entity ADD COLUMN later text;\n";
const NO_LATER: &str = "-- migration: contract\nALTER TABLE entity DROP COLUMN later;\n";
const HALF: &str = "-- migration: expand\nALTER TABLE entity ADD COLUMN half text;\nSELECT 1 / 0;\n";
/// The last migration before those that the tests leave to the program.
const BEFORE: i64 = 37;

fn migrate(db: &TestDatabase, arguments: &[&str]) -> Command {
    let program = private_files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas").unwrap();
    let mut command = Command::new(program);
    command.arg("migrate").args(arguments).env_clear();
    command.env("SVC_DATABASE_URL", db.url().expose_secret()).env("SVC_DATABASE_CA_PATH", db.ca_path());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

async fn finished(mut command: Command) -> (Option<i32>, String) {
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let Output { status, stdout, stderr } = output;
    (status.code(), format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr)))
}

/// A `gpuaas migrate` in progress.
struct MigratingProcess {
    child: tokio::process::Child,
    output: tokio::io::Lines<BufReader<tokio::process::ChildStdout>>,
    printed: String,
}

impl MigratingProcess {
    fn start(db: &TestDatabase) -> Self {
        let mut command = tokio::process::Command::from(migrate(db, &[]));
        let mut child = command.stderr(Stdio::inherit()).kill_on_drop(true).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, output, printed: String::new() }
    }

    /// The next line; `None` at the end.
    async fn read_line(&mut self) -> Option<()> {
        let read = tokio::time::timeout(WAIT_TIMEOUT, self.output.next_line()).await;
        let line = read.unwrap_or_else(|_| panic!("it prints nothing more: {}", self.printed)).unwrap()?;
        self.printed.extend([line.as_str(), "\n"]);
        Some(())
    }

    async fn expect_printed(&mut self, text: &str) {
        while !self.printed.contains(text) {
            assert!(self.read_line().await.is_some(), "it ends without {text:?}: {}", self.printed);
        }
    }

    /// Waits until it ends well, and returns all that it has printed.
    async fn end(mut self) -> String {
        while self.read_line().await.is_some() {}
        let status = self.child.wait().await.unwrap();
        assert!(status.success(), "{status}: {}", self.printed);
        self.printed
    }
}

/// A database as an earlier release has left it.
async fn earlier_database() -> TestDatabase {
    let db = TestDatabase::fresh().await;
    sqlx::raw_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public").execute(&db.pool).await.unwrap();
    Migrations::embedded().up_to(BEFORE).apply(&db.pool, MigrationScope::All, &mut |_| {}).await.unwrap();
    db
}

/// Waits until `gpuaas migrate` waits for a lock in the database.
async fn wait_until_blocked(db: &TestDatabase) {
    let blocked = "SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname = current_database()
                   AND application_name = 'gpuaas migrate' AND wait_event_type = 'Lock')";
    let until = Instant::now() + WAIT_TIMEOUT;
    while !sqlx::query_scalar::<_, bool>(blocked).fetch_one(&db.pool).await.unwrap() {
        assert!(Instant::now() < until, "it does not wait");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A million entities, each with a transition.
const MILLION: &str = "
    INSERT INTO entity (id, kind, shard, version, state, body, created_at, updated_at)
    SELECT gen_random_uuid(), 'sku', n % 256, 1, 'draft', jsonb_build_object('number', n), now(), now() FROM generate_series(1, 1000000) AS n;
    INSERT INTO history (entity, version, kind, shard, epoch, seq, command, to_state, why, actor, correlation_id, at)
    SELECT id, 1, kind, shard, 1, 1, 'create', state, '', 'user:a', '', now() FROM entity";

/// Commits transitions until it is stopped, and returns when each began and ended.
async fn commit_transitions(pool: sqlx::PgPool, stopped: Arc<AtomicBool>) -> Vec<(Instant, Instant)> {
    let ids: Vec<uuid::Uuid> = sqlx::query_scalar("SELECT id FROM entity LIMIT 1000").fetch_all(&pool).await.unwrap();
    let mut commits = Vec::new();
    for id in ids.iter().cycle() {
        if stopped.load(Ordering::Relaxed) {
            break;
        }
        let began = Instant::now();
        let mut transaction = pool.begin().await.unwrap();
        let update = "UPDATE entity SET version = version + 1 WHERE id = $1 RETURNING version";
        let version: i64 = sqlx::query_scalar(update).bind(id).fetch_one(&mut *transaction).await.unwrap();
        let insert = "INSERT INTO history (entity, version, kind, shard, epoch, seq, command, to_state, why, actor, correlation_id, at)
                      VALUES ($1, $2, 'sku', 1, 1, 1, 'change', 'draft', '', 'user:a', '', now())";
        sqlx::query(insert).bind(id).bind(version).execute(&mut *transaction).await.unwrap();
        transaction.commit().await.unwrap();
        commits.push((began, Instant::now()));
    }
    commits
}

async fn has_lease_epoch(db: &TestDatabase) -> bool {
    let relation = "SELECT to_regclass('lease_epoch') IS NOT NULL";
    sqlx::query_scalar(relation).fetch_one(&db.pool).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn plan_changes_nothing_and_migrate_prints_each_migration_with_its_time() {
    let db = earlier_database().await;
    let (code, plan) = finished(migrate(&db, &["--plan"])).await;
    assert_eq!(code, Some(0), "{plan}");
    assert!(plan.contains("0041  expand") && plan.contains("would be applied"), "{plan}");
    assert!(!has_lease_epoch(&db).await);
    let (code, applied) = finished(migrate(&db, &[])).await;
    assert_eq!(code, Some(0), "{applied}");
    assert!(applied.contains("0041  expand") && applied.contains("applied in 0."), "{applied}");
    assert!(has_lease_epoch(&db).await);
    let (code, again) = finished(migrate(&db, &[])).await;
    assert_eq!((code, again.lines().count()), (Some(0), 1), "{again}");
}

#[tokio::test(flavor = "multi_thread")]
async fn commits_go_on_while_a_million_rows_are_expanded() {
    let db = earlier_database().await;
    sqlx::raw_sql(MILLION).execute(&db.pool).await.unwrap();
    let stopped = Arc::new(AtomicBool::new(false));
    let committing = tokio::spawn(commit_transitions(db.pool.clone(), Arc::clone(&stopped)));
    // A report that reads the whole table, which each alteration of it has to wait for.
    let reading = tokio::spawn({
        let pool = db.pool.clone();
        async move { sqlx::query_scalar::<_, i64>("SELECT count(*) FROM entity, pg_sleep(3)").fetch_one(&pool).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let began = Instant::now();
    let next = Migrations::embedded().and(SchemaMigration::new(9001, "later column", LATER));
    let report = next.apply(&db.pool, MigrationScope::Expand, &mut |_| {}).await.unwrap();
    let ended = Instant::now();
    stopped.store(true, Ordering::Relaxed);
    let commits = committing.await.unwrap();
    assert_eq!(reading.await.unwrap().unwrap(), 1_000_000);
    assert!(report.missing.is_empty(), "{report:?}");
    let meanwhile = commits.iter().filter(|(from, to)| began <= *from && *to <= ended).count();
    assert!(meanwhile > 0, "no commit began and ended during the migrations: {} in all", commits.len());
    let longest = commits.iter().map(|(from, to)| *to - *from).max().unwrap_or_default();
    let took = ended - began;
    println!(
        "expanded beside a million rows in {took:.1?}; {meanwhile} commits meanwhile; the longest took {longest:.2?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_migrate_leaves_no_half_and_the_next_one_completes() {
    let db = earlier_database().await;
    // It has made the sequence of this file, and waits to alter the table.
    let mut reader = db.pool.begin().await.unwrap();
    sqlx::raw_sql("SELECT count(*) FROM turn").execute(&mut *reader).await.unwrap();
    let mut child = migrate(&db, &[]).spawn().unwrap();
    wait_until_blocked(&db).await;
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGKILL).unwrap();
    child.wait().unwrap();
    assert!(!has_lease_epoch(&db).await, "nothing of the file is there");
    Migrations::embedded().up_to(BEFORE).check(&db.pool).await.expect("the release before runs");
    reader.rollback().await.unwrap();
    let (code, printed) = finished(migrate(&db, &[])).await;
    assert_eq!(code, Some(0), "{printed}");
    Migrations::embedded().check(&db.pool).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_migrates_at_once_one_waits_and_finds_nothing_to_do() {
    let db = earlier_database().await;
    let mut reader = db.pool.begin().await.unwrap();
    sqlx::raw_sql("SELECT count(*) FROM turn").execute(&mut *reader).await.unwrap();
    let mut first = MigratingProcess::start(&db);
    first.expect_printed("waits for a lock").await;
    let mut second = MigratingProcess::start(&db);
    second.expect_printed("another process migrates this database").await;
    reader.rollback().await.unwrap();
    let (first, second) = (first.end().await, second.end().await);
    assert!(first.contains("0041  expand"), "{first}");
    assert!(second.starts_with("another process migrates this database"), "{second}");
    assert!(!second.contains("applied in"), "{second}");
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_refuses_a_contract_while_a_replica_needs_what_it_removes() {
    let db = TestDatabase::fresh().await;
    // As if the contract of this release were not applied yet.
    let earlier = "DELETE FROM _sqlx_migrations WHERE version = 6; DELETE FROM contract_migration;
         CREATE TABLE policy_value ();
         INSERT INTO member (id, name, started_at, beat_at, details)
         VALUES (gen_random_uuid(), 'replica-9', now(), now(), '{\"version\": \"0.0.9\", \"schema\": 5}')";
    sqlx::raw_sql(earlier).execute(&db.pool).await.unwrap();
    let (code, plan) = finished(migrate(&db, &["--plan"])).await;
    assert!(code == Some(0) && plan.contains("would wait for replica-9 (0.0.9)"), "{plan}");
    let (code, refused) = finished(migrate(&db, &[])).await;
    assert_eq!(code, Some(75), "{refused}");
    assert!(refused.contains("0006  contract") && refused.contains("replica-9 (0.0.9)"), "{refused}");
    let (code, left_out) = finished(migrate(&db, &["--expand"])).await;
    assert!(code == Some(0) && left_out.contains("is left out"), "{left_out}");
    sqlx::raw_sql("DELETE FROM member").execute(&db.pool).await.unwrap();
    let (code, applied) = finished(migrate(&db, &[])).await;
    assert!(code == Some(0) && applied.contains("0006  contract"), "{applied}");
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_runs_on_an_expanded_schema_and_starts_on_none_that_it_does_not_suit() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.node("h100").await;
    let next = Migrations::embedded().and(SchemaMigration::new(9001, "later column", LATER));
    let after_next = next.clone().and(SchemaMigration::new(9002, "no later column", NO_LATER));

    // Expanded under it, and then a migration fails in the middle of its file: it serves, and starts.
    let report = next.apply(&cluster.pool, MigrationScope::All, &mut |_| {}).await.unwrap();
    assert!(report.missing.is_empty());
    let failing = next.clone().and(SchemaMigration::new(9002, "half", HALF));
    let failed = failing.apply(&cluster.pool, MigrationScope::All, &mut |_| {}).await.unwrap_err();
    assert!(matches!(&failed, SchemaError::Failed { version: 9002, .. }), "{failed}");
    let half = "SELECT count(*) FROM information_schema.columns WHERE table_name = 'entity' AND column_name = 'half'";
    assert_eq!(sqlx::query_scalar::<_, i64>(half).fetch_one(&cluster.pool).await.unwrap(), 0);
    let allocation = cluster.rent_active("h100", 1).await;
    cluster.replicas[0].stop().await;
    cluster.restart_replica(0).await;
    let later = "the schema was expanded by a later release";
    assert!(cluster.replica_lines(0).iter().any(|line| line.to_string().contains(later)));
    allocation.release_fully().await;

    // It lives, and needs what the contract removes.
    let report = after_next.apply(&cluster.pool, MigrationScope::All, &mut |_| {}).await.unwrap();
    let [waiting] = report.waiting.as_slice() else { panic!("{report:?}") };
    assert_eq!(waiting.needed_by, [format!("replica-1 ({})", env!("CARGO_PKG_VERSION"))]);

    // Not any more; and it refuses the schema then.
    cluster.replicas[0].stop().await;
    let report = after_next.apply(&cluster.pool, MigrationScope::All, &mut |_| {}).await.unwrap();
    assert!(report.waiting.is_empty(), "{report:?}");
    cluster.allow_error("gpuaas: the database does not suit this release");
    let refused = cluster.replicas[0].start_again().await.unwrap_err().to_string();
    assert!(refused.contains("exit status: 78") && refused.contains("9002"), "{refused}");

    // A schema that lacks something: it changes nothing by itself, and says what to do.
    let back = "DELETE FROM contract_migration WHERE version > 9000; DELETE FROM _sqlx_migrations WHERE version > 9000 OR version = 28;
                DROP INDEX ledger_beside_usage";
    sqlx::raw_sql(back).execute(&cluster.pool).await.unwrap();
    let refused = cluster.replicas[0].start_again().await.unwrap_err().to_string();
    assert!(refused.contains("exit status: 78") && refused.contains("run `gpuaas migrate`"), "{refused}");
    let missing = Migrations::embedded().check(&cluster.pool).await;
    assert!(matches!(missing, Err(SchemaError::Behind { .. })), "{missing:?}");
    let (code, printed) = finished(migrate(&cluster.postgres, &[])).await;
    assert!(code == Some(0) && printed.contains("0028  expand"), "{printed}");
    cluster.restart_replica(0).await;
    node.expect_state("active").await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_that_may_migrate_expands_the_schema_at_its_start() {
    let mut cluster = TestCluster::builder().variable("SVC_MIGRATE_ON_START", "true").start().await;
    cluster.replicas[0].stop().await;
    let back = "DELETE FROM _sqlx_migrations WHERE version IN (6, 28); DELETE FROM contract_migration;
                DROP INDEX ledger_beside_usage; CREATE TABLE policy_value ()";
    sqlx::raw_sql(back).execute(&cluster.pool).await.unwrap();
    cluster.restart_replica(0).await;
    let report = Migrations::embedded().check(&cluster.pool).await.unwrap();
    let missing: Vec<i64> = report.missing.iter().map(|migration| migration.version).collect();
    assert_eq!(missing, [6], "contracts are for `gpuaas migrate`");
    cluster.shutdown().await;
}
