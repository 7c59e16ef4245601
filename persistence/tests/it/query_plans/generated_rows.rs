//! Generated rows: every table that grows gets as many as the test asks for, in the proportions of a fleet that has been in use for months.
//!
//! Of states and labels that are rare, the share is constant, so that a statement that looks for one by reading the others costs more the
//! more there are. What is due is as much on every size.

use local_servers::test_database::TestDatabase;
use sqlx::PgPool;
use uuid::Uuid;

/// The mark of the test's own statements, which are not judged.
pub(super) const MARK: &str = "/* generated rows */";

/// Tables that do not grow with the fleet or its history, with the reason.
pub(super) const SMALL_TABLES: [(&str, &str); 16] = [
    ("_sqlx_migrations", "a row for each migration"),
    ("audit_checkpoint", "a row for each shard and removed month"),
    ("backup_record", "the backups that the repository has"),
    ("cluster", "one row"),
    ("compared", "a row for each set of books"),
    ("contract_migration", "a row for each contract"),
    ("counted_shard", "256 rows"),
    ("entity_count", "compacted to a row for each kind and state"),
    (
        "entity_sum",
        "compacted to a row for each shard, SKU, region and number of free GPUs, and for each shard, currency and state",
    ),
    ("member", "the members, and those that were silent for less than a day"),
    ("parked", "entities that wait for an operator"),
    ("recovery_mark", "one row"),
    ("secret", "the service's own keys"),
    ("shard", "256 rows"),
    ("table_size", "a sample a day for 90 days"),
    ("turn", "leases that are held"),
];

/// The account with the most postings, and the entity with the longest history.
pub(super) const LARGE_ACCOUNT: Uuid = Uuid::from_u128(0xacc0);
pub(super) const LONG_LIVED: Uuid = Uuid::from_u128(0x0de0);
/// It owns a tenth of all that has owners.
pub(super) const LARGE_OWNER: &str = "user:large";
pub(super) const SMALL_OWNER: &str = "user:0";

/// What there is once, whatever the size.
const ONCE: &str = "
DO $$
DECLARE
    parent text;
    first  timestamptz;
    name   text;
BEGIN
    FOREACH parent IN ARRAY ARRAY['history', 'audit'] LOOP
        FOR step IN 1..4 LOOP
            first := (date_trunc('month', now() AT TIME ZONE 'UTC') - make_interval(months => step)) AT TIME ZONE 'UTC';
            name := format('%s_%s', parent, to_char(first AT TIME ZONE 'UTC', 'YYYY_MM'));
            EXECUTE format('CREATE TABLE %I PARTITION OF %I FOR VALUES FROM (%L) TO (%L)',
                           name, parent, first, (first AT TIME ZONE 'UTC' + interval '1 month') AT TIME ZONE 'UTC');
        END LOOP;
    END LOOP;
END
$$;
INSERT INTO entity (id, kind, shard, version, state, body, unique_name, created_at, updated_at)
SELECT md5('sku' || i)::uuid, 'sku', i, 1, 'active', '{\"spec\": {}}', 'sku-' || i, now() - interval '1 year', now() FROM generate_series(0, 20) AS i;
INSERT INTO entity (id, kind, shard, version, state, body, owner, created_at, updated_at)
SELECT md5('bindings' || i)::uuid, 'bindings', i, 1, 'bound', '{\"subject\": \"ann\", \"roles\": {}}', 'user:' || i, now(), now() FROM generate_series(0, 20) AS i;
INSERT INTO entity (id, kind, shard, version, state, body, created_at, updated_at)
SELECT md5('policy' || i)::uuid, 'policy', i, 1, 'present', '{\"scope\": {\"global\": null}, \"values\": []}', now(), now() FROM generate_series(0, 20) AS i;
INSERT INTO entity (id, kind, shard, version, state, body, created_at, updated_at)
VALUES ('00000000-0000-0000-0000-00000000acc0', 'billing_account', 0, 1, 'open', '{\"currency\": \"USD\", \"balance\": 0, \"postings\": 0}', now() - interval '1 year', now());
";

/// The rows from `$from` to `$to`. The last six shards have none: there the workload's own commits have whole audit chains.
const ROWS: &str = "
INSERT INTO entity (id, kind, shard, version, state, body, owner, sku, created_at, updated_at)
SELECT md5('entity' || i)::uuid, kind, i % 250, 3,
       CASE kind
           WHEN 'allocation' THEN CASE WHEN n % 500 = 7 THEN 'release_failed' WHEN n % 4 = 0 THEN 'active' ELSE 'released' END
           WHEN 'node' THEN CASE WHEN n % 500 = 7 THEN 'draining' WHEN n % 7 = 3 THEN 'removed' WHEN n % 9 = 4 THEN 'offline' ELSE 'active' END
           WHEN 'terminal_session' THEN CASE WHEN n % 500 = 7 THEN 'attached' ELSE 'closed' END
           WHEN 'payment' THEN CASE WHEN n % 500 = 7 THEN 'open' ELSE 'deposited' END
           WHEN 'processor_event' THEN CASE WHEN n % 500 = 7 THEN 'dead' ELSE 'processed' END
           WHEN 'billing_account' THEN CASE WHEN n % 50 = 7 THEN 'depleted' ELSE 'open' END
           ELSE CASE WHEN n % 500 = 7 THEN 'active' ELSE 'ended' END
       END,
       CASE kind
           WHEN 'node' THEN jsonb_build_object(
               'registration', jsonb_build_object('sku', jsonb_build_object('name', 'sku-' || n % 20), 'region_code', 'eu', 'gpus_total', 8,
                                                  'host', 'host', 'metadata', '{}'::jsonb),
               'inventory', jsonb_build_object('gpus', '[1, 2]'::jsonb, 'isolates_devices', true), 'holds', '{}'::jsonb,
               'identity', jsonb_build_object('generation', 1, 'certificates', jsonb_build_object('a', jsonb_build_object(
                   'not_after', now() + interval '1 day', 'authority', 'old', 'generation', 1))))
           WHEN 'billing_account' THEN '{\"currency\": \"USD\", \"balance\": 5, \"postings\": 10}'
           WHEN 'payment' THEN jsonb_build_object('payer', 'user:' || n)
           ELSE jsonb_build_object('text', repeat('x', 200))
       END,
       CASE WHEN kind IN ('node', 'processor_event') THEN NULL WHEN n % 10 = 0 THEN 'user:large' ELSE 'user:' || n / 50 END,
       CASE WHEN kind IN ('node', 'allocation') THEN md5('sku' || CASE WHEN n % 500 = 9 THEN 20 ELSE n % 20 END)::uuid END,
       at, at + interval '1 hour'
FROM (
    SELECT i, i / 20 AS n, now() - make_interval(secs => 26000000.0 * (1 - i::float8 / $to)) AS at,
           (ARRAY['allocation', 'allocation', 'allocation', 'allocation', 'allocation', 'allocation', 'allocation', 'allocation',
                  'node', 'node', 'node', 'node', 'terminal_session', 'terminal_session', 'payment', 'payment', 'processor_event',
                  'processor_event', 'billing_account', 'browser_session'])[i % 20 + 1] AS kind
    FROM generate_series($from, $to) AS i
) AS numbered;

INSERT INTO deadline (entity, kind, shard, wake_at, deadline_at, reason)
SELECT id, kind, shard, at, CASE WHEN i % 8 = 0 THEN at END, 'an approval'
FROM (
    SELECT id, kind, shard, i, CASE WHEN i <= 160 THEN now() - interval '1 minute' ELSE now() + make_interval(secs => 3600 + i) END AS at
    FROM (SELECT i, md5('entity' || i)::uuid AS id FROM generate_series($from, $to) AS i WHERE i % 4 = 0) AS timed_id JOIN entity USING (id)
) AS timed;

INSERT INTO history (entity, version, kind, shard, epoch, seq, command, from_state, to_state, why, actor, correlation_id, at)
SELECT CASE WHEN i % 5 = 0 THEN '00000000-0000-0000-0000-000000000de0'::uuid ELSE md5('entity' || i)::uuid END, i, 'node', i % 250, 0, i,
       CASE WHEN i % 500 = 5 THEN 'report' ELSE 'tick' END, 'active', 'active', 'asked for', 'user:ann', 'corr-' || i,
       now() - make_interval(secs => 7600000.0 * (1 - i::float8 / $to))
FROM generate_series($from, $to) AS i;

INSERT INTO audit (shard, epoch, seq, actor, action, target_kind, target_id, correlation_id, metadata, at)
SELECT i % 250, 0, i, CASE WHEN i % 500 = 7 THEN 'user:rare' ELSE 'user:' || i % 20 END,
       CASE WHEN i % 500 = 7 THEN 'skus.retire' ELSE 'allocations.create' END, CASE WHEN i % 500 = 7 THEN 'sku' ELSE 'allocation' END,
       md5('entity' || i / 3)::uuid, 'corr-' || i, '{}', now() - make_interval(secs => 7600000.0 * (1 - i::float8 / $to))
FROM generate_series($from, $to) AS i;
INSERT INTO audit_seal (shard, number, epoch, seq, hash)
SELECT i % 250, i / 250 + 1, 0, i, decode(repeat('00', 32), 'hex') FROM generate_series($from, $to) AS i;
INSERT INTO audit_head (shard, number, epoch, seq, hash, sealed_at, key_id, signature)
SELECT i % 250, i / 250 + 1, 0, i, decode(repeat('00', 32), 'hex'), now(), 'k', decode(repeat('00', 64), 'hex')
FROM generate_series($from, $to) AS i WHERE i / 250 % 2 = 0 OR i > $to - 500;

INSERT INTO outbox (id, shard, epoch, seq, subject, event, correlation_id, created_at, written_at)
SELECT md5('event' || i)::uuid, i % 250, 0, i, 'subject', '{}', 'corr-' || i, now(), now() - interval '1 second'
FROM generate_series($from, $to) AS i WHERE i % 2 = 0;

INSERT INTO command (id, entity, shard, digest, reply, created_at)
SELECT md5('command' || i)::uuid, md5('entity' || i)::uuid, i % 250, decode(repeat('00', 32), 'hex'), '{}',
       now() - CASE WHEN i <= 200 THEN interval '25 hours' ELSE make_interval(secs => 80000.0 * (1 - i::float8 / $to)) END
FROM generate_series($from, $to) AS i;

INSERT INTO ledger (account, number, version, kind, debit, credit, amount, currency, balance, allocation, used_from, used_until, cost,
                    payment, reference, at)
SELECT CASE WHEN is_large THEN '00000000-0000-0000-0000-00000000acc0'::uuid ELSE md5('entity' || i / 200 * 20 + 18)::uuid END,
       CASE WHEN is_large THEN (i + 1) / 2 ELSE i / 2 % 100 + 1 END, i, CASE WHEN is_usage THEN 'usage' ELSE 'deposit' END,
       CASE WHEN is_usage THEN 'prepaid' ELSE 'processor_clearing' END, CASE WHEN is_usage THEN 'revenue' ELSE 'prepaid' END, 5, 'USD', 5,
       CASE WHEN is_usage THEN md5('entity' || i / 200 * 20)::uuid END, CASE WHEN is_usage THEN at END,
       CASE WHEN is_usage THEN at + interval '10 seconds' END, CASE WHEN is_usage THEN 5 END,
       CASE WHEN NOT is_usage THEN md5('payment' || i)::uuid END, CASE WHEN NOT is_usage THEN 'pay-' || i END, at
FROM (
    SELECT i, i % 2 = 1 AS is_large, i % 40 > 1 AS is_usage, now() - make_interval(mins => $to - i) AS at FROM generate_series($from, $to) AS i
) AS posted;

INSERT INTO fleet_hour (hour, gpus_at, added_up_at)
SELECT hour, hour, hour FROM (SELECT date_trunc('hour', now()) - make_interval(hours => $to - i) AS hour FROM generate_series($from, $to) AS i) AS measured
ON CONFLICT DO NOTHING;
INSERT INTO fleet_hour_gpus (hour, sku, region, sku_name, gpus_total, gpus_held, gpus_free)
SELECT hour, md5('sku' || n)::uuid, 'eu', 'sku-' || n, 8, 4, 2 FROM fleet_hour CROSS JOIN generate_series(0, 2) AS n ON CONFLICT DO NOTHING;
INSERT INTO fleet_hour_rentals (hour, sku, region, begun, p50_seconds, p95_seconds)
SELECT hour, sku, region, 5, 10, 20 FROM fleet_hour
CROSS JOIN (VALUES (md5('sku0')::uuid, 'eu'), (md5('sku0')::uuid, ''), ('00000000-0000-0000-0000-000000000000'::uuid, '')) AS parts (sku, region)
ON CONFLICT DO NOTHING;
INSERT INTO fleet_hour_revenue (hour, currency, sku, region, amount)
SELECT hour, 'USD', md5('sku' || n)::uuid, 'eu', 5 FROM fleet_hour CROSS JOIN generate_series(0, 2) AS n ON CONFLICT DO NOTHING;

INSERT INTO term (entity, term)
SELECT md5('entity' || i)::uuid, term
FROM generate_series($from, $to) AS i
CROSS JOIN LATERAL (VALUES (CASE WHEN i % 20 < 8 THEN 'node/' || i / 1000 END), ('label/env'), ('label/env=' || CASE WHEN i / 20 % 2 = 0 THEN 'production' ELSE 'test' END), ('name/' || i),
                           (CASE WHEN i / 20 % 500 = 7 THEN 'label/rare' END)) AS terms (term)
WHERE term IS NOT NULL AND i % 20 IN (0, 1, 8, 9, 10, 11);

INSERT INTO term (entity, term)
SELECT md5('entity' || i)::uuid, 'gateway/' || md5('member' || i % 2)::uuid
FROM generate_series($from, $to) AS i WHERE i % 20 IN (12, 13) AND i / 20 % 500 = 7;

INSERT INTO claim (name, entity)
SELECT 'gpu/' || md5('gpu' || i), md5('entity' || i / 20 * 20 + 8)::uuid FROM generate_series($from, $to) AS i;

INSERT INTO recording (session_id, owner, allocation_id, node_id, key_id, key_enc, chunks, bytes, created_at)
SELECT md5('entity' || i)::uuid, CASE WHEN i / 20 % 10 = 0 THEN 'user:large' ELSE 'user:' || i / 1000 END, md5('entity' || i - 12)::uuid,
       md5('entity' || i - 4)::uuid, 'a', decode('00', 'hex'), 5, 500, now() - make_interval(secs => 2600000.0 * (1 - i::float8 / $to))
FROM generate_series($from, $to) AS i WHERE i % 20 IN (12, 13);
INSERT INTO recording_chunk (session_id, seq, frames_enc)
SELECT md5('entity' || i)::uuid, seq, decode('00', 'hex')
FROM generate_series($from, $to) AS i CROSS JOIN generate_series(0, 4) AS seq WHERE i % 20 IN (12, 13);
";

/// What there is once.
pub(super) async fn insert_first(db: &TestDatabase) {
    execute(db, ONCE).await;
}

/// Rows `from..=to` of every table that grows, and the statistics of the planner.
pub(super) async fn insert(db: &TestDatabase, from: u32, to: u32) {
    let statements = ROWS.replace("$from", &from.to_string()).replace("$to", &to.to_string());
    for statement in statements.split(";\n") {
        execute(db, statement).await;
    }
    execute(db, "VACUUM ANALYZE").await;
}

async fn execute(db: &TestDatabase, statement: &str) {
    db.execute_raw(&format!("{MARK} {statement}")).await;
}

/// The tables of which the planner knows at least so many rows, months by their own names.
pub(super) async fn large_tables(pool: &PgPool, rows: u32) -> Vec<String> {
    let query = format!(
        "SELECT {MARK} relname::text FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND reltuples >= $1"
    );
    sqlx::query_scalar(sqlx::AssertSqlSafe(query)).bind(rows as f32).fetch_all(pool).await.unwrap()
}

/// The tables that are neither large nor in [`SMALL_TABLES`]: no row was generated for them.
pub(super) async fn tables_without_rows(pool: &PgPool, rows: u32) -> Vec<String> {
    let query = format!(
        "SELECT {MARK} relname::text FROM pg_class
         WHERE relkind = 'r' AND NOT relispartition AND relnamespace = 'public'::regnamespace AND reltuples < $1 AND relname <> ALL ($2)"
    );
    sqlx::query_scalar(sqlx::AssertSqlSafe(query))
        .bind(rows as f32)
        .bind(SMALL_TABLES.map(|(name, _)| name))
        .fetch_all(pool)
        .await
        .unwrap()
}
