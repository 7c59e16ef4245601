//! Durable transitions a second through the real committer with all its rows, against the same rows as one transaction each by
//! pgbench, in turns.
//!
//! A transition is: the shard's epoch locked and checked, a snapshot updated under its version, a history row, an audit row, an
//! event, a command id, a moved deadline, and the deletion of the event that it executes. A further metric is the rate of bare
//! `UNNEST` batches (snapshot, history and event alone, only the version checked): the upper bound of batching here.

use anyhow::{Context, ensure};
use domain::audit::{AuditAction, AuditRecord};
use domain::commit::{CommandRecord, Commit, CommitOutcome, Epoch, Timer};
use domain::event::Event;
use domain::id::{CommandId, EntityKind, EntityRef, EventId, Shard, SkuId};
use domain::state_machine::{IndexKeys, RequestOrigin};
use hdrhistogram::Histogram;
use persistence::Committer;
use serde_json::json;
use sqlx::postgres::{PgBindIterExt, PgPool};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};
use test_host::PgMember;
use tests::bench::postgres::{self, Postgres};
use tests::bench::{BenchReport, MeasurementPlan, PairedSamples, median, rounded};
use uuid::Uuid;

const ENTITIES: u32 = 20_480;
const CLIENTS: u32 = 16;
/// Concurrent submitters; the last number is compared.
const SUBMITTERS: [u32; 4] = [1, 64, 256, 512];
/// Bare batches: connections and transitions in each.
const RAW: (u32, u32) = (2, 256);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let plan = MeasurementPlan::from_environment()?;
    let server = Postgres::start().await?;
    let ours = CommitterBench::prepare(server.database("ours").await?).await?;
    let theirs = Baseline::prepare(&server).await?;
    let raw = BareBatches::prepare(server.database("raw").await?).await?;

    server.age().await?;

    let mut turns = PairedSamples::default();
    let mut rates: Vec<Vec<Load>> = vec![Vec::new(); SUBMITTERS.len()];
    let mut raw_rates = Vec::new();
    for _ in 0..plan.rounds {
        for (submitters, loads) in SUBMITTERS.iter().zip(&mut rates) {
            loads.push(ours.load(*submitters, plan.each).await?);
        }
        let most = rates.last().and_then(|loads| loads.last()).map_or(0.0, |load| load.rate);
        turns.round(most, theirs.load(plan.each).await?);
        raw_rates.push(raw.load(plan.each).await?);
    }
    ours.check().await?;
    theirs.check().await?;

    let mut report = BenchReport::new("commit", "transitions/s", "pgbench, one transaction each", &turns);
    for (submitters, loads) in SUBMITTERS.iter().zip(&rates) {
        let middle = |of: fn(&Load) -> f64| rounded(median(&loads.iter().map(of).collect::<Vec<_>>()));
        report = report
            .metric(format!("submitters_{submitters}_per_s"), middle(|load| load.rate))
            .metric(format!("submitters_{submitters}_p50_ms"), middle(|load| load.p50))
            .metric(format!("submitters_{submitters}_p99_ms"), middle(|load| load.p99))
            .metric(format!("submitters_{submitters}_batch_mean"), middle(|load| load.batch));
    }
    let version: String = sqlx::query_scalar("SHOW server_version").fetch_one(&ours.pool).await?;
    report = report
        .metric("raw_unnest_per_s", rounded(median(&raw_rates)))
        .condition("postgres", version)
        .condition("fsync", "on")
        .condition("synchronous_commit", "on")
        .condition("link", "socket, for both")
        .condition("committer", format!("2 workers, batches of 512 at most, {} submitters", SUBMITTERS[3]))
        .condition("pgbench", format!("{CLIENTS} clients, prepared"))
        .condition("raw_unnest", format!("{} x {}", RAW.0, RAW.1))
        .condition("entities", ENTITIES)
        .condition("rounds", plan.rounds)
        .condition("seconds_each", plan.each.as_secs_f64());
    for (name, value) in postgres::SETTINGS {
        report = report.condition(name, value);
    }
    report.publish()
}

/// One round of one load; times in milliseconds.
#[derive(Clone, Copy)]
struct Load {
    rate: f64,
    p50: f64,
    p99: f64,
    batch: f64,
}

/// A snapshot of about the size of a node with its GPUs. Made once: the serialization by the state machine is not the
/// committer's work, and pgbench does not do it.
static BODY: LazyLock<String> = LazyLock::new(|| {
    let gpu =
        |index| json!({"index": index, "uuid": format!("GPU-{index:08}-aaaa-bbbb-cccc-0123456789ab"), "held_by": null});
    json!({"state": "active", "gpus": (0..8).map(gpu).collect::<Vec<_>>(), "labels": {"region": "eu"}}).to_string()
});

fn entity_id(n: u32) -> Uuid {
    Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0000 | u128::from(n))
}

struct CommitterBench {
    pool: PgPool,
    committer: Committer,
    registry: prometheus::Registry,
    /// Every entity with its version and the event that its next transition executes.
    entities: Vec<tokio::sync::Mutex<(i64, EventId)>>,
}

impl CommitterBench {
    async fn prepare(pool: PgPool) -> anyhow::Result<Arc<Self>> {
        let member = PgMember::start(&pool).await;
        let (committer, registry) = (member.committer.clone(), member.registry.clone());
        member.drop_published();
        let entities = (0..ENTITIES).map(|_| tokio::sync::Mutex::new((0, EventId(Uuid::nil())))).collect();
        let ours = Arc::new(Self { pool, committer, registry, entities });
        let created = (0..64).map(|lane| {
            let ours = Arc::clone(&ours);
            tokio::spawn(async move {
                for n in (lane..ENTITIES).step_by(64) {
                    ours.transition(n).await?;
                }
                anyhow::Ok(())
            })
        });
        for created in futures::future::join_all(created).await {
            created??;
        }
        sqlx::query("VACUUM ANALYZE").execute(&ours.pool).await?;
        Ok(ours)
    }

    async fn transition(&self, n: u32) -> anyhow::Result<()> {
        let mut entity = self.entities[n as usize].lock().await;
        let (version, last) = *entity;
        let id = EntityRef { kind: EntityKind::Sku, id: entity_id(n) };
        let event = EventId(Uuid::now_v7());
        let now = chrono::Utc::now();
        let consumes = (version > 0).then_some(last);
        let commit = Commit {
            entity: id,
            shard: Shard((n % 256) as u8),
            epoch: Epoch(1),
            expected_version: version,
            snapshot: BODY.clone(),
            from_state: Some("draft"),
            to_state: "active",
            keys: IndexKeys::default(),
            claims: domain::commit::SetChange::default(),
            terms: domain::commit::SetChange::default(),
            timer: Some(Timer { wake_at: now, deadline_at: Some(now), reason: "the agent confirms".to_owned() }),
            at: now,
            command_name: "activate",
            why: "asked for by an operator".to_owned(),
            actor: "user:018f6d1e".to_owned(),
            origin: RequestOrigin::untraced("0af7651916cd43dd8448eb211c80319c"),
            audit: vec![AuditRecord::new(AuditAction::SkusActivate, id, json!({"reason": "asked for"}))],
            outbox: vec![(event, Event::SkuStateChanged { sku_id: SkuId(id.id), from: None, to: "active".to_owned() })],
            postings: Vec::new(),
            summands: Vec::new(),
            command: Some(CommandRecord {
                id: CommandId(Uuid::new_v4()),
                digest: [7; 32],
                reply: Some(r#"{"ok": true}"#.to_owned()),
                resolved: None,
                consumes,
            }),
            requires: Vec::new(),
            patient: false,
        };
        let outcome = self.committer.commit(commit).await;
        ensure!(outcome == CommitOutcome::Applied, "{outcome:?}");
        *entity = (version + 1, event);
        Ok(())
    }

    async fn load(self: &Arc<Self>, submitters: u32, each: Duration) -> anyhow::Result<Load> {
        let before = self.batches();
        let began = Instant::now();
        let tasks: Vec<_> = (0..submitters)
            .map(|lane| {
                let ours = Arc::clone(self);
                tokio::spawn(async move {
                    let mut micros = Histogram::<u64>::new(3)?;
                    // Each submitter has entities of its own, as an actor has its own.
                    for n in (lane..ENTITIES).step_by(submitters as usize).cycle() {
                        if began.elapsed() >= each {
                            break;
                        }
                        let asked = Instant::now();
                        ours.transition(n).await?;
                        micros.record(u64::try_from(asked.elapsed().as_micros())?)?;
                    }
                    anyhow::Ok(micros)
                })
            })
            .collect();
        let mut micros = Histogram::<u64>::new(3)?;
        for task in tasks {
            micros.add(task.await??)?;
        }
        let after = self.batches();
        let milliseconds = |quantile| micros.value_at_quantile(quantile) as f64 / 1000.0;
        Ok(Load {
            rate: micros.len() as f64 / began.elapsed().as_secs_f64(),
            p50: milliseconds(0.5),
            p99: milliseconds(0.99),
            batch: (after.1 - before.1) / (after.0 - before.0).max(1.0),
        })
    }

    /// Statements and the transitions in them.
    fn batches(&self) -> (f64, f64) {
        let families = self.registry.gather();
        let sizes = families.iter().find(|family| family.name() == "commit_batch_transitions");
        let histogram = sizes.and_then(|sizes| sizes.get_metric().first().map(|metric| metric.get_histogram().clone()));
        histogram.map_or((0.0, 0.0), |histogram| (histogram.get_sample_count() as f64, histogram.get_sample_sum()))
    }

    /// Asserts that every acknowledged transition has all its rows.
    async fn check(&self) -> anyhow::Result<()> {
        let mut transitions = 0;
        for entity in &self.entities {
            transitions += entity.lock().await.0;
        }
        let written: (i64, i64, i64, i64, i64, i64) = sqlx::query_as(
            "SELECT (SELECT sum(version)::bigint FROM entity), (SELECT count(*) FROM history), (SELECT count(*) FROM audit),
                    (SELECT count(*) FROM command), (SELECT count(*) FROM outbox), (SELECT count(*) FROM deadline)",
        )
        .fetch_one(&self.pool)
        .await?;
        let entities = i64::from(ENTITIES);
        let expected = (transitions, transitions, transitions, transitions, entities, entities);
        ensure!(written == expected, "rows {written:?}, transitions {expected:?}");
        self.committer.close().await;
        Ok(())
    }
}

/// The same rows in one transaction each, by pgbench.
struct Baseline<'a> {
    server: &'a Postgres,
    pool: PgPool,
    script: tempfile::NamedTempFile,
    rounds: std::cell::Cell<u32>,
}

const SCRIPT: &str = r"
\set n :n + 1
\set e random(0, ENTITIES / CLIENTS - 1) * CLIENTS + :client_id
\set shard :e % 256
\set seq :round * 100000000000 + :client_id * 1000000000 + :n * 3
BEGIN;
SELECT epoch FROM shard WHERE id = :shard AND owner = '00000000-0000-0000-0000-000000000001' AND epoch = 1 FOR SHARE;
UPDATE entity SET version = version + 1, state = 'active', body = :body::jsonb, updated_at = now() WHERE id = ('01900000-0000-7000-8000-' || lpad(to_hex(:e::bigint), 12, '0'))::uuid AND version > 0 RETURNING version AS v \gset
INSERT INTO history (entity, version, kind, shard, epoch, seq, command, command_id, from_state, to_state, why, actor, correlation_id, at) VALUES (('01900000-0000-7000-8000-' || lpad(to_hex(:e::bigint), 12, '0'))::uuid, :v, 'sku', :shard, 1, :seq, 'activate', gen_random_uuid(), 'draft', 'active', 'asked for by an operator', 'user:018f6d1e', '0af7651916cd43dd8448eb211c80319c', now());
INSERT INTO audit (shard, epoch, seq, actor, action, target_kind, target_id, correlation_id, metadata, at) VALUES (:shard, 1, :seq::bigint + 1, 'user:018f6d1e', 'skus.activate', 'sku', ('01900000-0000-7000-8000-' || lpad(to_hex(:e::bigint), 12, '0'))::uuid, '0af7651916cd43dd8448eb211c80319c', :metadata::jsonb, now());
INSERT INTO outbox (id, shard, epoch, seq, subject, event, correlation_id, created_at) VALUES (lpad(to_hex(:seq::bigint), 32, '0')::uuid, :shard, 1, :seq::bigint + 2, 'sku.state_changed', :event::jsonb, '0af7651916cd43dd8448eb211c80319c', now());
DELETE FROM outbox WHERE id = lpad(to_hex(:seq::bigint - 3), 32, '0')::uuid;
INSERT INTO command (id, entity, shard, digest, reply) VALUES (gen_random_uuid(), ('01900000-0000-7000-8000-' || lpad(to_hex(:e::bigint), 12, '0'))::uuid, :shard, '\x0707070707070707070707070707070707070707070707070707070707070707', :reply::jsonb);
INSERT INTO deadline (entity, kind, shard, wake_at, deadline_at, reason) VALUES (('01900000-0000-7000-8000-' || lpad(to_hex(:e::bigint), 12, '0'))::uuid, 'sku', :shard, now(), now(), 'the agent confirms') ON CONFLICT (entity) DO UPDATE SET wake_at = excluded.wake_at, deadline_at = excluded.deadline_at, reason = excluded.reason;
COMMIT;
";

impl<'a> Baseline<'a> {
    async fn prepare(server: &'a Postgres) -> anyhow::Result<Self> {
        let pool = server.database("baseline").await?;
        fill(&pool).await?;
        let text = SCRIPT.replace("ENTITIES", &ENTITIES.to_string()).replace("CLIENTS", &CLIENTS.to_string());
        let script = tempfile::NamedTempFile::new()?;
        std::fs::write(script.path(), text)?;
        Ok(Self { server, pool, script, rounds: std::cell::Cell::new(1) })
    }

    /// Transactions a second.
    async fn load(&self, each: Duration) -> anyhow::Result<f64> {
        let round = self.rounds.replace(self.rounds.get() + 1);
        let event = Event::SkuStateChanged { sku_id: SkuId(entity_id(1)), from: None, to: "active".to_owned() };
        // As parameters, since every transition brings them.
        let json = [
            ("body", BODY.clone()),
            ("event", serde_json::to_string(&event)?),
            ("metadata", r#"{"reason": "asked for"}"#.to_owned()),
            ("reply", r#"{"ok": true}"#.to_owned()),
        ];
        let mut pgbench = self.server.pgbench()?;
        pgbench
            .args(["-n", "-M", "prepared", "-j", "2", "-c", &CLIENTS.to_string()])
            .args(["-D", "n=0", "-D", &format!("round={round}"), "-T", &each.as_secs_f64().ceil().to_string()])
            .args(json.iter().flat_map(|(name, value)| ["-D".to_owned(), format!("{name}={value}")]))
            .arg("-f")
            .arg(self.script.path())
            .arg("baseline");
        let out = tokio::task::spawn_blocking(move || pgbench.output()).await?.context("running pgbench")?;
        let text = String::from_utf8_lossy(&out.stdout);
        ensure!(out.status.success(), "pgbench: {}\n{text}", String::from_utf8_lossy(&out.stderr));
        let rate = text.lines().find_map(|line| line.strip_prefix("tps = ")?.split_whitespace().next()?.parse().ok());
        rate.with_context(|| format!("pgbench printed no rate:\n{text}"))
    }

    /// Asserts that it wrote the same rows.
    async fn check(&self) -> anyhow::Result<()> {
        let written: (i64, i64, i64, i64) = sqlx::query_as(
            "SELECT (SELECT sum(version - 1)::bigint FROM entity), (SELECT count(*) FROM history),
                    (SELECT count(*) FROM audit), (SELECT count(*) FROM command)",
        )
        .fetch_one(&self.pool)
        .await?;
        ensure!(
            written.0 > 0 && written.1 == written.0 && written.2 == written.0 && written.3 == written.0,
            "{written:?}"
        );
        Ok(())
    }
}

/// The entities as they are before the first change, owned by member 1 in epoch 1.
async fn fill(pool: &PgPool) -> anyhow::Result<()> {
    sqlx::query("UPDATE shard SET owner = '00000000-0000-0000-0000-000000000001', epoch = 1").execute(pool).await?;
    sqlx::query(
        "INSERT INTO entity (id, kind, shard, version, state, body, created_at, updated_at)
         SELECT ('01900000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'sku', n % 256, 1, 'draft', $2::jsonb, now(), now()
         FROM generate_series(0, $1 - 1) AS n",
    )
    .bind(i32::try_from(ENTITIES)?)
    .bind(BODY.as_str())
    .execute(pool)
    .await?;
    sqlx::query("VACUUM ANALYZE").execute(pool).await?;
    Ok(())
}

/// Batches with nothing but a snapshot, a history row and an event.
struct BareBatches {
    pool: PgPool,
    /// The version of all entities of a batch.
    versions: Arc<Vec<AtomicI64>>,
}

const BARE: &str = "WITH item AS MATERIALIZED (
     SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::text[], $4::uuid[], $5::text[]) AS item (id, version, body, event_id, event)
 ), updated AS (
     UPDATE entity SET version = entity.version + 1, body = item.body::jsonb, updated_at = now()
     FROM item WHERE entity.id = ANY ($1) AND entity.id = item.id AND entity.version = item.version
     RETURNING item.id, item.version, item.event_id, item.event
 ), history_row AS (
     INSERT INTO history (entity, version, kind, shard, epoch, seq, command, to_state, why, actor, correlation_id, at)
     SELECT id, version + 1, 'sku', 0, 1, 1, 'activate', 'active', 'asked for', 'user:018f6d1e', '0af7651916cd43dd', now() FROM updated
 ), outbox_row AS (
     INSERT INTO outbox (id, shard, epoch, seq, subject, event, correlation_id, created_at)
     SELECT event_id, 0, $6, version * 1000000 + row_number() OVER (), 'sku.state_changed', event::jsonb, '0af7651916cd43dd', now()
     FROM updated
 ) SELECT id FROM updated";

impl BareBatches {
    async fn prepare(pool: PgPool) -> anyhow::Result<Self> {
        fill(&pool).await?;
        let versions = (0..ENTITIES / RAW.1).map(|_| AtomicI64::new(1)).collect();
        Ok(Self { pool, versions: Arc::new(versions) })
    }

    /// Transitions per second. Every connection has entities of its own and updates them in turn.
    async fn load(&self, each: Duration) -> anyhow::Result<f64> {
        let began = Instant::now();
        let connections: Vec<_> = (0..RAW.0)
            .map(|lane| {
                let (pool, versions) = (self.pool.clone(), Arc::clone(&self.versions));
                tokio::spawn(async move {
                    let mut connection = pool.acquire().await?;
                    sqlx::query("SET enable_nestloop = off").execute(&mut *connection).await?;
                    let mut done = 0_u64;
                    for batch in (lane..ENTITIES / RAW.1).step_by(RAW.0 as usize).cycle() {
                        if began.elapsed() >= each {
                            break;
                        }
                        let version = versions[batch as usize].fetch_add(1, Ordering::Relaxed);
                        let ids: Vec<Uuid> = (0..RAW.1).map(|n| entity_id(batch * RAW.1 + n)).collect();
                        let event = format!(r#"{{"fact": "sku_state_changed", "sku_id": "{}"}}"#, ids[0]);
                        let written = sqlx::query(BARE)
                            .bind(&ids)
                            .bind(ids.iter().map(|_| version).bind_iter())
                            .bind(ids.iter().map(|_| BODY.as_str()).bind_iter())
                            .bind(ids.iter().map(|_| Uuid::now_v7()).bind_iter())
                            .bind(ids.iter().map(|_| event.as_str()).bind_iter())
                            .bind(i64::from(batch))
                            .fetch_all(&mut *connection)
                            .await?;
                        ensure!(written.len() == ids.len(), "a batch of {} wrote {}", ids.len(), written.len());
                        done += written.len() as u64;
                    }
                    anyhow::Ok(done)
                })
            })
            .collect();
        let mut done = 0;
        for connection in connections {
            done += connection.await??;
        }
        Ok(done as f64 / began.elapsed().as_secs_f64())
    }
}
