//! A database with a committer over it, and transitions to commit.

use domain::audit::{AuditAction, AuditRecord};
use domain::commit::{CommandRecord, Commit, CommitOutcome, Epoch, Timer};
use domain::event::Event;
use domain::id::{CommandId, EntityKind, EntityRef, EventId, MemberId, Shard, SkuId};
use domain::state_machine::{IndexKeys, RequestOrigin, Timestamp};
use local_servers::test_database::TestDatabase;
use persistence::queries::{WaitingEntity, WaitingFilter};
use persistence::{Cluster, Committer, CommitterConfig, OutboxRow, Reads};
use sqlx::PgPool;
use std::time::{Duration, Instant};
use test_host::PgMember;
use tokio::sync::mpsc;
use uuid::Uuid;

pub(crate) struct TestStore {
    pub(crate) db: TestDatabase,
    pub(crate) me: MemberId,
    pub(crate) committer: Committer,
    pub(crate) published: mpsc::Receiver<OutboxRow>,
    pub(crate) registry: prometheus::Registry,
}

impl TestStore {
    /// This member owns all shards, in epoch 1.
    pub(crate) async fn new() -> Self {
        Self::with(TestDatabase::fresh().await, |_| {}).await
    }

    /// A statement has a minute, unless the test changes it: the seconds of a replica are over where a busy machine stands still.
    pub(crate) async fn with(db: TestDatabase, change: impl FnOnce(&mut CommitterConfig)) -> Self {
        let settings = |config: &mut CommitterConfig| {
            config.statement_timeout = Duration::from_secs(60);
            change(config);
        };
        let PgMember { id: me, committer, published, registry, .. } = PgMember::with(&db.pool, settings).await;
        Self { db, me, committer, published, registry }
    }

    pub(crate) fn pool(&self) -> &PgPool {
        &self.db.pool
    }

    pub(crate) fn reads(&self) -> Reads {
        Reads::new(self.db.pool.clone())
    }

    /// The timer and deadline of an entity, as the supervision tree reads it.
    pub(crate) async fn waiting(&self, entity: EntityRef) -> WaitingEntity {
        let wanted = WaitingFilter { ids: Some(vec![entity.id]), ..WaitingFilter::default() };
        self.reads().waiting(&wanted, 1).await.unwrap().remove(0)
    }

    pub(crate) fn cluster(&self) -> Cluster {
        Cluster::new(self.db.pool.clone())
    }

    pub(crate) async fn commit(&self, commit: &Commit) -> CommitOutcome {
        self.committer.commit(commit.clone()).await
    }

    /// All at once, answers in the same order.
    pub(crate) async fn commit_all(&self, commits: &[Commit]) -> Vec<CommitOutcome> {
        futures::future::join_all(commits.iter().map(|commit| self.commit(commit))).await
    }

    pub(crate) async fn count(&self, table: &'static str) -> i64 {
        let query = format!("SELECT count(*) FROM {table}");
        sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_one(self.pool()).await.unwrap()
    }

    /// Rows of every table that a commit writes.
    pub(crate) async fn rows(&self) -> [i64; 6] {
        let mut rows = [0; 6];
        for (n, table) in ["entity", "history", "audit", "outbox", "command", "deadline"].into_iter().enumerate() {
            rows[n] = self.count(table).await;
        }
        rows
    }

    /// The histogram of batch sizes: statements and transitions.
    pub(crate) fn batches(&self) -> (u64, f64) {
        let families = self.registry.gather();
        let sizes = families.iter().find(|family| family.name() == "commit_batch_transitions").unwrap();
        let histogram = sizes.get_metric()[0].get_histogram();
        (histogram.get_sample_count(), histogram.get_sample_sum())
    }

    pub(crate) fn counted(&self, outcome: &str) -> u64 {
        let families = self.registry.gather();
        let Some(outcomes) = families.iter().find(|family| family.name() == "commit_transitions_total") else {
            return 0;
        };
        let of = outcomes.get_metric().iter().find(|metric| metric.get_label()[0].value() == outcome);
        of.map_or(0, |metric| metric.get_counter().get_value() as u64)
    }

    /// Locks the shards, so that batches wait: the test ends the transaction.
    pub(crate) async fn hold_shards(&self) -> sqlx::Transaction<'static, sqlx::Postgres> {
        let mut holder = self.pool().begin().await.unwrap();
        sqlx::query("SELECT id FROM shard ORDER BY id FOR UPDATE").fetch_all(&mut *holder).await.unwrap();
        holder
    }

    /// Waits until so many of the committer's statements wait for a lock.
    pub(crate) async fn until_blocked(&self, statements: i64) {
        let began = Instant::now();
        loop {
            let blocked: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '%committer%' AND wait_event_type = 'Lock'
                 AND datname = current_database()",
            )
            .fetch_one(self.pool())
            .await
            .unwrap();
            if blocked >= statements {
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(50), "{blocked} of {statements} statements are blocked");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

pub(crate) fn at(millisecond: i64) -> Timestamp {
    // Near the present: inside a month that has a partition.
    let now = chrono::Utc::now();
    Timestamp::from_timestamp(now.timestamp(), 0).unwrap() + chrono::TimeDelta::milliseconds(millisecond)
}

/// The creation of an entity with one of every row that a commit writes. Shard and id follow from `n`.
pub(crate) fn create(n: u32) -> Commit {
    let id = Uuid::from_u128(0x1000_0000_0000_7000_8000_0000_0000_0000 | u128::from(n));
    let entity = EntityRef { kind: EntityKind::Sku, id };
    Commit {
        entity,
        shard: Shard(u8::try_from(n % 256).unwrap()),
        epoch: Epoch(1),
        expected_version: 0,
        snapshot: format!(r#"{{"n": {n}}}"#),
        from_state: None,
        to_state: "draft",
        keys: IndexKeys::default(),
        claims: domain::commit::SetChange::default(),
        terms: domain::commit::SetChange::default(),
        summands: Vec::new(),
        timer: Some(Timer { wake_at: at(10), deadline_at: Some(at(20)), reason: "an approval".to_owned() }),
        at: at(0),
        command_name: "create",
        why: "asked for".to_owned(),
        actor: "user:ann".to_owned(),
        origin: RequestOrigin {
            correlation_id: format!("corr-{n}"),
            traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned()),
            tracestate: Some("vendor=1".to_owned()),
        },
        audit: vec![AuditRecord::new(AuditAction::SkusCreate, entity, serde_json::json!({"name": n}))],
        outbox: vec![(EventId(Uuid::now_v7()), event(id))],
        postings: Vec::new(),
        command: Some(command(None)),
        requires: Vec::new(),
        patient: false,
    }
}

pub(crate) fn event(id: Uuid) -> Event {
    Event::SkuStateChanged { sku_id: SkuId(id), from: None, to: "draft".to_owned() }
}

pub(crate) fn command(consumes: Option<EventId>) -> CommandRecord {
    let reply = Some(r#"{"ok": true}"#.to_owned());
    CommandRecord {
        id: CommandId(Uuid::new_v4()),
        digest: [7; 32],
        reply,
        resolved: Some(r#"{"cost": 7}"#.to_owned()),
        consumes,
    }
}

/// The transition after `before`.
pub(crate) fn next(before: &Commit) -> Commit {
    Commit {
        expected_version: before.expected_version + 1,
        snapshot: format!(r#"{{"version": {}}}"#, before.expected_version + 2),
        from_state: Some(before.to_state),
        to_state: "active",
        command_name: "activate",
        outbox: vec![(EventId(Uuid::now_v7()), event(before.entity.id))],
        command: Some(command(None)),
        ..before.clone()
    }
}

/// The transition without other rows.
pub(crate) fn bare(commit: Commit) -> Commit {
    Commit { audit: Vec::new(), outbox: Vec::new(), command: None, timer: None, ..commit }
}
