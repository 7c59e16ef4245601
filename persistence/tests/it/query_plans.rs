//! Query plans: no statement of this crate reads a large table from one end to the other, or costs more because tables have grown.
//!
//! The test executes every statement (`workload.rs`) on few generated rows and on many, on a server that logs the plan of each
//! (`auto_explain`), and compares the planner's costs. Which statements there are it reads from the sources: one that is not executed fails it.

mod generated_rows;
mod recorded_plans;
mod sources;
mod workload;

use crate::test_store::TestStore;
use generated_rows::{insert, insert_first, large_tables, tables_without_rows};
use local_servers::postgres::PostgresOptions;
use local_servers::test_database::TestDatabase;
use recorded_plans::{RecordedPlans, position};
use sources::SourceText;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use std::collections::BTreeSet;

/// A statement may cost so many times as much on a hundred times the rows: trees are deeper, and rows of one page lie further apart.
const GROWTH_MAX: f64 = 5.0;
/// In units of the planner, about that many pages read one after the other: what costs less on many rows is a look-up of single rows.
const NEGLIGIBLE_COST: f64 = 200.0;

/// So many rows make a table large. Of fewer, a scan is often the cheapest plan.
const MIN_ROWS_OF_A_LARGE_TABLE: u32 = 5_000;

/// Reviewed: statements that may scan a table or grow with it, each named by a part of its text, and why that does no harm.
const EXCEPTIONS: &[(&str, &str)] = &[
    (
        "FROM outbox WHERE shard = ANY ($1)",
        "what is not settled: empty but for an outage, whose length the number of rows is",
    ),
    (
        "coalesce(sum(bytes), 0)::bigint FROM recording",
        "recordings of the days that a policy retains; the sum is cached",
    ),
    ("AND command = $2 AND version < $3", "the retained history of one entity"),
    ("AND kind = $2 AND kind <> 'usage'", "postings of one account beside its usage"),
    (
        "sum(abs((entity.body->>'balance')::bigint",
        "compares each account of a member's shards, once a minute: a balance that was altered shows at accounts without new postings, too",
    ),
    ("AND owner = $2 AND sku = $3", "the allocations of one owner"),
    ("AND state = $2 AND sku = $3", "until a page is full; the rarer one of the two is found by its index"),
    (
        "WHERE outbox.shard = owned.shard AND written_at <",
        "at most the limit of each shard; among few rows there are fewer",
    ),
    ("WHERE outbox.shard = owned.shard AND (outbox.epoch, outbox.seq) >", "as above"),
    ("WHERE audit.shard = term.shard", "at most 65 rows of each shard; among few rows there are fewer"),
    ("WHERE audit.shard = head.shard", "as above"),
    ("SELECT min(written_at) FROM outbox", "what is not settled, for `gpuaas retention`"),
    ("WHERE key_id <> $1 AND session_id > $2", "rotation of a key reads every recording"),
    ("AS month WHERE NOT EXISTS", "the month that is removed"),
    ("AND (epoch, seq) <= ($2, $3)", "rows before a checkpoint, as a month is removed or the log is verified"),
    ("FULL JOIN (SELECT shard", "`gpuaas audit verify` reads every row"),
    ("AS wanted (kind) CROSS JOIN LATERAL", "at most a page of each kind; among few rows there are fewer"),
    (
        "SELECT id, shard, body::text FROM entity WHERE kind = $1",
        "the auditor compares each node and account with the sums",
    ),
    ("SELECT id, state FROM entity WHERE kind = 'node'", "the states of all nodes of the fleet, for its load"),
    (
        "SELECT finding.value #>> '{reported,probe}' AS probe",
        "the nodes of a member's shards, for metrics, once a minute: an index that looks into bodies would have every commit of any entity write \
         all indexes again (no HOT updates)",
    ),
    ("FROM jsonb_each(body #> '{identity,certificates}') AS certificate ) AS last", "as above"),
    (
        "SELECT id, version FROM entity WHERE kind = 'node' AND sku = $1",
        "the versions of a SKU's nodes, a check of the index of placement",
    ),
    ("FROM entity AS node CROSS JOIN LATERAL", "the nodes of a SKU, before its removal"),
    ("live.by_this_alone", "an operator's question before an authority is retired"),
    ("FROM ledger ), run AS (", "`gpuaas ledger verify` reads every posting"),
    ("FROM ledger_entry GROUP BY currency, book", "`gpuaas ledger verify` reads every posting"),
    ("count(*) FROM ledger WHERE account = $1", "the auditor adds up one account"),
    (
        "SELECT DISTINCT ON (shard) shard, epoch, seq, at FROM history",
        "`gpuaas recover-report` reads the transitions since a time",
    ),
    ("SELECT key_id, count(*) AS count FROM (", "sealed values by key, before a key leaves the ring"),
    (
        "SELECT kind, state, count(*) AS entities FROM entity GROUP BY",
        "the auditor compares the counts with the entities",
    ),
    (
        "allocation.body ->> 'requested_at' AS requested_at",
        "the allocations of the days in which the rentals of one hour were requested",
    ),
    ("INSERT INTO fleet_hour_revenue (hour, currency", "the postings of one hour"),
    ("FROM fleet_hour_rentals WHERE hour >= $1", "the hours of a month: a table of few rows has fewer pages than they"),
    ("FROM fleet_hour_revenue WHERE hour >= $1", "as above"),
    ("FROM fleet_hour_gpus WHERE hour >= $1", "as above"),
];

/// Statements that this test does not execute on generated rows, by file or by their beginning, and why.
const NOT_EXECUTED: &[(&str, &str)] = &[
    ("migrate", "a row for each migration and member"),
    (
        "SELECT bool_and(pg_terminate_backend(activity.pid, 2000))",
        "sessions of the server, after a connection was lost",
    ),
    ("SELECT pg_logical_emit_message(", "no table"),
    ("pool/", "the position, the settings and the sessions of the server"),
    (
        "SELECT id, version FROM entity WHERE id = ANY ($1)",
        "after a failover that has lost commits; by the primary key",
    ),
];

/// A store on a server of its own, which logs the plans.
async fn recording_store() -> TestStore {
    let options = PostgresOptions { settings: recorded_plans::settings(), ..PostgresOptions::default() };
    TestStore::with(TestDatabase::with_options(options).await, |_| {}).await
}

/// A pool of new connections: no plan of theirs was made for fewer rows.
fn fresh_pool(store: &TestStore) -> PgPool {
    PgPoolOptions::new().max_connections(4).connect_lazy_with((*store.pool().connect_options()).clone())
}

/// The plans of the workload.
async fn plans(store: &TestStore) -> RecordedPlans {
    let (pool, since) = (fresh_pool(store), position(store.db.log()));
    workload::run(store, &pool).await;
    pool.close().await;
    recorded_plans::read(store.db.log(), since)
}

/// What is wrong with the plans on many rows, compared with those on few: what scans a large table, or costs more than so many times as much.
fn findings(few: &RecordedPlans, many: &RecordedPlans, large: &[String], growth: f64) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (statement, plan) in many {
        let scanned: Vec<_> = plan.scanned.iter().filter(|table| large.contains(table)).cloned().collect();
        let before = few.get(statement).map_or(0.0, |plan| plan.cost);
        let is_growing = plan.cost > growth * before.max(NEGLIGIBLE_COST);
        if !scanned.is_empty() || is_growing {
            let why =
                format!("scans {scanned:?}, costs {before} on few rows and {} on many\n{}", plan.cost, plan.outline);
            found.push((statement.clone(), why));
        }
    }
    found
}

/// The findings that no exception covers, as text.
fn unexpected(found: &[(String, String)]) -> Vec<String> {
    let covered = |statement: &str| EXCEPTIONS.iter().any(|(part, _)| statement.contains(part));
    let unexpected = found.iter().filter(|(statement, _)| !covered(statement));
    unexpected.map(|(statement, why)| format!("{statement}\n{why}")).collect()
}

/// The exceptions that cover none of the findings.
fn unused_exceptions(found: &[(String, String)]) -> Vec<&'static str> {
    let unused = EXCEPTIONS.iter().map(|(part, _)| *part);
    unused.filter(|part| !found.iter().any(|(statement, _)| statement.contains(part))).collect()
}

/// The statements of the sources that were not executed.
fn not_executed(executed: &RecordedPlans) -> Vec<SourceText> {
    let is_excepted = |source: &SourceText| {
        let (file, text) = (source.file.to_string_lossy(), source.pieces.join(" "));
        NOT_EXECUTED.iter().any(|(beginning, _)| file.starts_with(beginning) || text.starts_with(beginning))
    };
    let is_executed = |source: &SourceText| executed.keys().any(|statement| source.is_in(statement));
    sources::statements().into_iter().filter(|source| !is_executed(source) && !is_excepted(source)).collect()
}

/// Runs the workload on few rows and on many.
async fn plans_on(few_rows: u32, many_rows: u32) -> (TestStore, RecordedPlans, RecordedPlans) {
    let store = recording_store().await;
    insert_first(&store.db).await;
    insert(&store.db, 1, few_rows).await;
    let few = plans(&store).await;
    insert(&store.db, few_rows + 1, many_rows).await;
    let many = plans(&store).await;
    (store, few, many)
}

async fn check(few_rows: u32, many_rows: u32) {
    let (store, few, mut many) = plans_on(few_rows, many_rows).await;
    let (pool, since) = (fresh_pool(&store), position(store.db.log()));
    workload::run_last(&pool).await;
    let large = large_tables(&pool, (many_rows / 20).max(MIN_ROWS_OF_A_LARGE_TABLE)).await;
    assert_eq!(
        tables_without_rows(&pool, many_rows / 20).await,
        Vec::<String>::new(),
        "generate rows for these tables, or say why they stay small"
    );
    pool.close().await;
    many.extend(recorded_plans::read(store.db.log(), since));

    assert_eq!(not_executed(&many), [], "execute these statements in workload.rs");
    let unexpected = unexpected(&findings(&few, &many, &large, GROWTH_MAX));
    assert!(
        unexpected.is_empty(),
        "{} statements grow with a table: give them an index, or an exception with its reason\n\n{}",
        unexpected.len(),
        unexpected.join("\n")
    );
    // On fewer rows some of them cover nothing. A statement near the bound may be on either side of it.
    let unused = unused_exceptions(&findings(&few, &many, &large, GROWTH_MAX / 2.0));
    assert!(unused.is_empty() || many_rows < 100_000, "these exceptions cover nothing: {unused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_cost_the_same_on_ten_thousand_rows_as_on_five_hundred() {
    check(500, 10_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_cost_the_same_on_a_hundred_thousand_rows_as_on_a_thousand() {
    check(1_000, 100_000).await;
}

/// Indexes whose loss the planner's costs may not show. An owner's states are unlike those of others, which the planner does not know: one
/// with a long history has little that runs.
const NOT_FOUND: [&str; 1] = ["entity_by_owner_and_state"];

/// Each index is needed, and a statement that loses its index is found.
#[tokio::test(flavor = "multi_thread")]
async fn statement_whose_index_is_dropped_is_found() {
    let (store, few, many) = plans_on(1_000, 40_000).await;
    let large = large_tables(store.pool(), 2_000).await;
    let texts = |plans: &RecordedPlans, growth: f64| -> BTreeSet<String> {
        findings(&few, plans, &large, growth).into_iter().map(|(statement, _)| statement).collect()
    };
    // Of tables that stay small none is needed. Unique indexes are constraints as well.
    let indexes: Vec<(String, String)> = sqlx::query_as(sqlx::AssertSqlSafe(format!(
        "SELECT {} indexrelid::regclass::text, replace(pg_get_indexdef(indexrelid), ' ON ONLY ', ' ON ')
         FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
         WHERE NOT indisunique AND relnamespace = 'public'::regnamespace AND NOT relispartition
           AND (indrelid::regclass::text = ANY ($1) OR indrelid::regclass::text IN ('history', 'audit')) ORDER BY 1",
        generated_rows::MARK
    )))
    .bind(&large)
    .fetch_all(store.pool())
    .await
    .unwrap();
    let mut needless = Vec::new();
    for (name, definition) in indexes {
        store.db.execute_raw(&format!("{} DROP INDEX {name}", generated_rows::MARK)).await;
        let without = plans(&store).await;
        // The rows are fewer than those of the other test: half of the growth is a finding, too.
        let is_found = [GROWTH_MAX, GROWTH_MAX / 2.0]
            .iter()
            .any(|growth| !texts(&without, *growth).is_subset(&texts(&many, *growth)));
        if !is_found && !NOT_FOUND.contains(&name.as_str()) {
            needless.push(name);
        }
        store.db.execute_raw(&format!("{} {definition}", generated_rows::MARK)).await;
    }
    assert_eq!(needless, Vec::<String>::new(), "no statement needs these indexes, or the rows do not show it");
}
