//! Every statement of this crate, executed as the service does, on generated rows.

use super::generated_rows::{LARGE_ACCOUNT, LARGE_OWNER, LONG_LIVED, MARK, SMALL_OWNER};
use crate::test_store::{TestStore, create, next};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chrono::{DateTime, TimeDelta, Utc};
use domain::authz::PlatformRole;
use domain::commit::{Commit, CommitOutcome, Epoch, SetChange};
use domain::id::{
    AllocationId, BillingAccountId, BindingId, CommandId, EntityKind, EntityRef, EventId, MemberId, PolicyId, Shard,
    SkuId,
};
use domain::ledger::PostingKind;
use domain::{NodeId, TerminalSessionId};
use ed25519_dalek::SigningKey;
use persistence::audit::{AuditKey, AuditKeys, AuditVerification, Sealer, verify};
use persistence::envelope_encryption::KeyRing;
use persistence::fleet_history::{HourlyGpus, hour_of};
use persistence::key_rewrap::SEALED_FIELDS;
use persistence::membership::Member;
use persistence::migrate::{Migrations, StartingMember};
use persistence::month_removal::remove_month;
use persistence::provider_logouts::ProviderLogout;
use persistence::queries::{
    AuditFilter, AuditPosition, BindingFilter, Cursor, FleetFilter, LedgerFilter, ListFilter, OutboxCursor,
    PolicyFilter, WaitingFilter, WaitingPosition,
};
use persistence::recordings::{Chunk, ChunkOwner, RecordingFilter};
use persistence::retention::{self, MonthlyLog};
use persistence::{
    Cluster, FleetHistory, Leases, Outbox, Reads, RecoveryMarks, Secrets, SnapshotSealer, entity_sums,
    table_maintenance, table_sizes,
};
use secrecy::SecretSlice;
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

/// The rows of a page.
const PAGE: u32 = 50;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Generated rows that the statements ask for.
struct SampleRows {
    allocations: Vec<Uuid>,
    /// No member has sealed it.
    unsealed: Uuid,
    nodes: Vec<Uuid>,
    sessions: Vec<Uuid>,
    events: Vec<Uuid>,
    commands: Vec<Uuid>,
    skus: Vec<Uuid>,
    /// The SKU of one node in 500.
    rare_sku: Uuid,
    /// Of an allocation in the middle of its list.
    middle: DateTime<Utc>,
}

impl SampleRows {
    async fn read(pool: &PgPool) -> Self {
        let ids = async |from: &str| -> Vec<Uuid> {
            let query = format!("SELECT {MARK} id FROM {from} LIMIT {PAGE}");
            sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_all(pool).await.unwrap()
        };
        let middle = format!(
            "SELECT {MARK} min(created_at) + (max(created_at) - min(created_at)) / 2 FROM entity WHERE kind = 'allocation'"
        );
        Self {
            allocations: ids("entity WHERE kind = 'allocation'").await,
            unsealed: ids("entity WHERE kind = 'payment' AND seal IS NULL").await[0],
            nodes: ids("entity WHERE kind = 'node' AND state = 'active'").await,
            sessions: ids("entity WHERE kind = 'terminal_session'").await,
            events: ids("outbox").await,
            commands: ids("command").await,
            skus: ids("entity WHERE kind = 'sku' AND unique_name = 'sku-3'").await,
            rare_sku: ids("entity WHERE kind = 'sku' AND unique_name = 'sku-20'").await[0],
            middle: sqlx::query_scalar(sqlx::AssertSqlSafe(middle)).fetch_one(pool).await.unwrap(),
        }
    }

    fn cursor(&self) -> Cursor {
        Cursor { created_at: self.middle, id: self.allocations[0] }
    }
}

/// The key that signs the audit chains of the workload.
fn audit_key() -> AuditKey {
    AuditKey::new(SigningKey::from_bytes(&[42; 32]))
}

/// The ring of these keys, sealing with the first.
fn ring(keys: &[(&str, u8)]) -> Arc<KeyRing> {
    let line = |(id, byte): &(&str, u8)| format!("key {id} {}\n", STANDARD.encode([*byte; 32]));
    let lines: String = keys.iter().map(line).collect();
    Arc::new(KeyRing::parse(&format!("{lines}active {}\n", keys[0].0)).unwrap())
}

/// The shards of one of three replicas.
fn third_of_shards() -> Vec<Shard> {
    Shard::all().step_by(3).collect()
}

/// Executes every statement that leaves the generated rows as they are, or nearly so; it may be called again.
pub(super) async fn run(store: &TestStore, pool: &PgPool) {
    let rows = SampleRows::read(pool).await;
    let reads = Reads::new(pool.clone());
    commit(store).await;
    read_entities(&reads, &rows).await;
    list_entities(&reads, &rows).await;
    read_timers_and_events(&reads, &rows).await;
    read_waiting_entities(&reads, &rows).await;
    read_audit_log(&reads, &rows).await;
    read_ledger(&reads, &rows).await;
    read_policies_and_bindings(pool, &rows).await;
    read_idempotency_records(&reads, &rows).await;
    read_totals(&reads, pool, &rows).await;
    inspect(&reads, &rows).await;
    seal_audit_rows(store, pool).await;
    keep_recordings(pool, &rows).await;
    keep_secrets(pool).await;
    keep_members(store, pool).await;
    maintain_tables(pool).await;
    measure_fleet(pool, &rows).await;
}

/// An hour of the fleet, which the generated rows have, and the hours of a month.
async fn measure_fleet(pool: &PgPool, rows: &SampleRows) {
    let history = FleetHistory::new(pool.clone());
    let (reads, hour) = (Reads::new(pool.clone()), hour_of(Utc::now()));
    let gpus = [HourlyGpus {
        sku_id: SkuId(rows.skus[0]),
        sku: "sku-3".to_owned(),
        region_code: "eu".to_owned(),
        total: 8,
        held: 4,
        free: 2,
    }];
    history.has_gpus(hour).await.unwrap();
    history.store_gpus(hour, hour, &gpus).await.unwrap();
    let week = hour - TimeDelta::days(7);
    history.hours_to_add_up(week, hour, &[hour], 24).await.unwrap();
    history.add_up(hour - TimeDelta::hours(1), hour).await.unwrap();
    let (month, until) = (hour - TimeDelta::days(31), hour + TimeDelta::hours(1));
    for filter in [FleetFilter::default(), FleetFilter { sku: Some(rows.skus[0]), region: Some("eu".to_owned()) }] {
        reads.fleet_hours(month, until, &filter, 10_000).await.unwrap().unwrap();
    }
    assert_eq!(history.delete_before(DateTime::UNIX_EPOCH).await.unwrap(), 0);
}

/// Executes what can be executed once: the removal of a month, and the beginning of an incarnation.
pub(super) async fn run_last(pool: &PgPool) {
    let now = Utc::now();
    let months = retention::partitions(pool).await.unwrap();
    for log in MonthlyLog::ALL {
        let count = format!("SELECT {MARK} count(*) FROM {} WHERE at < $1", log.name());
        // The first month that has rows.
        for month in months.iter().filter(|it| it.log == log) {
            let rows: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(count.clone()))
                .bind(month.month.end())
                .fetch_one(pool)
                .await
                .unwrap();
            remove_month(pool, &audit_key(), *month, now).await.unwrap();
            if rows > 0 {
                break;
            }
        }
    }
    let verification = AuditVerification {
        shards: vec![Shard(0), Shard(255)],
        keys: AuditKeys::of(&audit_key()),
        heads: Vec::new(),
        unsealed_after: TimeDelta::minutes(5),
        now,
    };
    verify(pool, &verification).await.unwrap();
    Cluster::new(pool.clone()).begin_incarnation(0).await.unwrap();
}

/// The statement of the committer, and those of its new connection.
async fn commit(store: &TestStore) {
    // In the shards without generated rows.
    let number = |n: u32| rand::random_range(0..1 << 20) * 256 + 250 + n % 6;
    let terms = SetChange { added: vec!["label/env".to_owned()], dropped: Vec::new() };
    let created: Vec<_> = (0..8).map(|n| Commit { terms: terms.clone(), ..create(number(n)) }).collect();
    let outcomes = store.commit_all(&created).await;
    assert!(outcomes.iter().all(|outcome| *outcome == CommitOutcome::Applied), "{outcomes:?}");
    let connections = format!(
        "SELECT {MARK} pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE application_name LIKE '%committer%' AND datname = current_database()"
    );
    sqlx::query(sqlx::AssertSqlSafe(connections)).fetch_all(store.pool()).await.unwrap();
    for before in &created {
        let mut outcome = CommitOutcome::Conflict;
        for _ in 0..50 {
            outcome = store.commit(&Commit { audit: Vec::new(), ..next(before) }).await;
            if outcome == CommitOutcome::Applied {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(outcome, CommitOutcome::Applied);
    }
}

async fn read_entities(reads: &Reads, rows: &SampleRows) {
    let node = EntityRef { kind: EntityKind::Node, id: rows.nodes[0] };
    let nodes: Vec<_> = rows.nodes.iter().map(|id| EntityRef { kind: EntityKind::Node, id: *id }).collect();
    assert_eq!(reads.snapshots(&nodes).await.unwrap().len(), nodes.len());
    reads.snapshot(node).await.unwrap().unwrap();
    reads.entity(node).await.unwrap().unwrap();
    reads.entities(EntityKind::Node, &rows.nodes).await.unwrap();
    reads.find_by_name(EntityKind::Sku, "sku-7").await.unwrap().unwrap();
    reads.states_of(&rows.allocations).await.unwrap();
    for before in [None, Some(200)] {
        reads.history(LONG_LIVED, before, PAGE).await.unwrap();
        reads.history_of_command(LONG_LIVED, "report", before, PAGE).await.unwrap();
    }
    reads.open_payments(LARGE_OWNER, "user:7").await.unwrap();
    reads.reply_at(rows.nodes[0], 1).await.unwrap();
    reads.node_versions(SkuId(rows.skus[0]), "active").await.unwrap();
    let placed: Vec<_> = rows.nodes.iter().copied().map(NodeId).collect();
    reads.node_rows(&placed).await.unwrap();
    reads.sku_ids().await.unwrap();
    reads.sku_references(SkuId(rows.skus[0])).await.unwrap();
}

/// Each filter of lists, alone and with another one, on the first page and on a later one.
async fn list_entities(reads: &Reads, rows: &SampleRows) {
    let states = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let all = ListFilter::default;
    let of = |owner: &str| ListFilter { owner: Some(owner.to_owned()), ..all() };
    let common = ListFilter { sku: rows.skus.first().copied(), ..all() };
    let rare = ListFilter { sku: Some(rows.rare_sku), ..all() };
    let labelled = |term: &str| ListFilter { terms: vec![term.to_owned()], ..all() };
    let filters = [
        (EntityKind::Allocation, all()),
        (EntityKind::Allocation, of(SMALL_OWNER)),
        (EntityKind::Allocation, of(LARGE_OWNER)),
        (EntityKind::Allocation, ListFilter { states: states(&["release_failed"]), ..all() }),
        (EntityKind::Allocation, ListFilter { states: states(&["released"]), ..all() }),
        (EntityKind::Allocation, ListFilter { states: states(&["release_failed"]), ..of(LARGE_OWNER) }),
        (EntityKind::Allocation, common.clone()),
        (EntityKind::Allocation, rare.clone()),
        (EntityKind::Allocation, ListFilter { states: states(&["release_failed"]), ..common.clone() }),
        (EntityKind::Allocation, ListFilter { states: states(&["released"]), ..rare.clone() }),
        (EntityKind::Allocation, ListFilter { sku: common.sku, ..of(LARGE_OWNER) }),
        (EntityKind::Allocation, labelled("label/env=production")),
        (EntityKind::Allocation, labelled("label/rare")),
        (EntityKind::Allocation, labelled("node/0")),
        (EntityKind::Allocation, ListFilter { is_newest_first: true, ..labelled("node/0") }),
        (EntityKind::Allocation, ListFilter { is_newest_first: true, ..all() }),
        (EntityKind::Allocation, ListFilter { is_newest_first: true, ..of(LARGE_OWNER) }),
        (
            EntityKind::Allocation,
            ListFilter { is_newest_first: true, states: states(&["released"]), ..of(LARGE_OWNER) },
        ),
        (EntityKind::Payment, ListFilter { is_newest_first: true, ..of(LARGE_OWNER) }),
        (EntityKind::Allocation, ListFilter { terms: labelled("label/rare").terms, ..of(LARGE_OWNER) }),
        (EntityKind::Allocation, ListFilter { terms: states(&["label/env", "label/rare"]), ..all() }),
        (EntityKind::Node, all()),
        (EntityKind::Node, ListFilter { states: states(&["draining"]), ..all() }),
        (
            EntityKind::Node,
            ListFilter { states: states(&["active", "offline", "quarantined"]), sku: common.sku, ..all() },
        ),
        (EntityKind::Node, rare),
        (EntityKind::Node, labelled("label/rare")),
        (EntityKind::TerminalSession, ListFilter { states: states(&["opened", "attached", "detached"]), ..all() }),
        (
            EntityKind::TerminalSession,
            ListFilter { states: states(&["opened", "attached", "detached"]), ..of(LARGE_OWNER) },
        ),
        (EntityKind::BrowserSession, ListFilter { states: states(&["active"]), ..of(LARGE_OWNER) }),
        (EntityKind::Payment, ListFilter { states: states(&["open"]), ..of(LARGE_OWNER) }),
        (EntityKind::ProcessorEvent, ListFilter { states: states(&["dead"]), ..all() }),
        (EntityKind::BillingAccount, all()),
        (EntityKind::Rollout, all()),
    ];
    for (kind, filter) in filters {
        for after in [None, Some(rows.cursor())] {
            reads.list(kind, &filter, after, PAGE).await.unwrap();
        }
    }
}

async fn read_timers_and_events(reads: &Reads, rows: &SampleRows) {
    let (now, mine) = (Utc::now(), third_of_shards());
    reads.due_timers(&mine, EntityKind::ALL, now, &rows.nodes[..2], 500).await.unwrap();
    reads.overdue(now, 1).await.unwrap();
    reads.waiting_counts(&mine).await.unwrap();
    reads.outbox_backlog(&mine).await.unwrap();
    let except: Vec<_> = rows.events[..2].iter().map(|id| EventId(*id)).collect();
    reads.orphaned_events(&mine, Duration::from_millis(500), &except, 20).await.unwrap();
    let gateways = reads.ended_gateways(&[MemberId(Uuid::from_u128(7))]).await.unwrap();
    assert_eq!(gateways.len(), 2, "each member with connections once");
    reads.terminals_at(&gateways[..1], &mine, &[TerminalSessionId(rows.sessions[0])], PAGE).await.unwrap();
    let cursors: Vec<_> = mine.iter().map(|shard| OutboxCursor::start(*shard)).collect();
    reads.events_after(&cursors, 20).await.unwrap();
    let cursors: Vec<_> = mine.iter().map(|shard| OutboxCursor { shard: *shard, epoch: Epoch(0), seq: 500 }).collect();
    reads.events_after(&cursors, 20).await.unwrap();
}

async fn read_waiting_entities(reads: &Reads, rows: &SampleRows) {
    let (all, at) = (WaitingFilter::default, Some(Utc::now() + TimeDelta::hours(2)));
    let filters = [
        all(),
        WaitingFilter { kind: Some(EntityKind::Allocation), ..all() },
        WaitingFilter { state: Some("release_failed".to_owned()), ..all() },
        WaitingFilter { kind: Some(EntityKind::Allocation), state: Some("release_failed".to_owned()), ..all() },
        WaitingFilter { overdue_at: Some(Utc::now()), ..all() },
        WaitingFilter { overdue_at: Some(Utc::now()), kind: Some(EntityKind::Node), ..all() },
        WaitingFilter { overdue_at: Some(Utc::now()), state: Some("active".to_owned()), ..all() },
        WaitingFilter { ids: Some(rows.nodes.clone()), ..all() },
        WaitingFilter { ids: Some(rows.nodes[..1].to_vec()), kind: Some(EntityKind::Node), ..all() },
    ];
    let positions = [
        None,
        Some(WaitingPosition { deadline_at: at, id: rows.nodes[0] }),
        Some(WaitingPosition { deadline_at: None, id: Uuid::from_u128(u128::MAX / 2) }),
    ];
    for filter in filters {
        for after in positions {
            reads.waiting(&WaitingFilter { after, ..filter.clone() }, PAGE).await.unwrap();
        }
    }
}

async fn read_audit_log(reads: &Reads, rows: &SampleRows) {
    let (all, now) = (AuditFilter::default, Utc::now());
    let text = |text: &str| Some(text.to_owned());
    let filters = [
        all(),
        AuditFilter { actor: text("user:7"), ..all() },
        AuditFilter { actor: text("user:rare"), ..all() },
        AuditFilter { action: text("allocations.create"), ..all() },
        AuditFilter { action: text("skus.retire"), ..all() },
        AuditFilter { target_kind: text("allocation"), ..all() },
        AuditFilter { target_kind: text("sku"), ..all() },
        AuditFilter { target: Some(rows.nodes[0]), ..all() },
        AuditFilter { target: Some(rows.nodes[0]), target_kind: text("allocation"), ..all() },
        AuditFilter { correlation_id: text("corr-77"), ..all() },
        AuditFilter { from: Some(now - TimeDelta::days(3)), ..all() },
        AuditFilter { from: Some(now - TimeDelta::days(40)), until: Some(now - TimeDelta::days(20)), ..all() },
        AuditFilter {
            from: Some(now - TimeDelta::days(40)),
            actor: text("user:rare"),
            action: text("skus.retire"),
            ..all()
        },
    ];
    let before = AuditPosition { at: now - TimeDelta::days(10), shard: Shard(7), epoch: Epoch(0), seq: 0 };
    for filter in filters {
        for before in [None, Some(before)] {
            reads.audit(&filter, before, PAGE).await.unwrap();
        }
    }
    reads.audit_heads().await.unwrap();
}

async fn read_ledger(reads: &Reads, rows: &SampleRows) {
    let (account, all) = (BillingAccountId(LARGE_ACCOUNT), LedgerFilter::default);
    let filters = [
        all(),
        LedgerFilter { kind: Some(PostingKind::Usage), ..all() },
        LedgerFilter { kind: Some(PostingKind::Deposit), ..all() },
        LedgerFilter { kind: Some(PostingKind::Credit), ..all() },
        LedgerFilter { allocation: Some(AllocationId(rows.allocations[0])), ..all() },
        LedgerFilter { after: Some(100), until: Some(200), ..all() },
    ];
    for filter in filters {
        for before in [None, Some(300)] {
            reads.ledger(account, &filter, before, PAGE).await.unwrap();
        }
    }
    reads.allocation_costs(&rows.allocations).await.unwrap();
    reads.has_posting(account, PostingKind::Deposit, "pay-80").await.unwrap();
    let now = Utc::now();
    reads.ledger_positions(account, &[now - TimeDelta::minutes(500), now]).await.unwrap();
    reads.ledger_sums(account, 100, 200, 20).await.unwrap();
    reads.ledger_stretch(account, 100, 200, PAGE).await.unwrap();
    reads.verify_ledger().await.unwrap();
    reads.prepaid_totals().await.unwrap();
    reads.ledger_difference(&third_of_shards()).await.unwrap();
}

/// Also with a row that was altered: it fails the statement, and another one reads the others.
async fn read_policies_and_bindings(pool: &PgPool, rows: &SampleRows) {
    let seals = SnapshotSealer::new(&SecretSlice::from(vec![7; 32]), None).unwrap();
    let reads = Reads::new(pool.clone()).sealed(seals.clone());
    let ask = async || {
        for after in [None, Some(rows.cursor())] {
            let policies = PolicyFilter {
                id: Some(rows.nodes[0]),
                key: Some("retention.audit_months".to_owned()),
                scope: Some(PolicyId(rows.nodes[0])),
                scope_kind: Some("global".to_owned()),
            };
            let id = Some(BindingId(rows.nodes[0]));
            let bindings = BindingFilter { id, subject: Some("user:1".to_owned()), role: Some(PlatformRole::Auditor) };
            for filter in [PolicyFilter::default(), policies] {
                reads.policy_values(&filter, Utc::now(), after, PAGE).await.unwrap();
            }
            for filter in [BindingFilter::default(), bindings] {
                reads.bindings(&filter, after, PAGE).await.unwrap();
            }
        }
    };
    ask().await;
    reads.policy_book().await.unwrap();
    altered(
        pool,
        "kind IN ('policy', 'bindings') AND shard = 1",
        r#"{"scope": {}, "values": [{"effective_at": "never"}], "roles": {"admin": {"bound_at": "never"}}}"#,
        ask,
    )
    .await;
    seals.adopt(pool, Some(rows.unsealed)).await.unwrap();
}

/// Runs `ask` while the bodies of these entities are replaced.
async fn altered(pool: &PgPool, entities: &str, body: &str, ask: impl AsyncFn()) {
    let alter = format!(
        "UPDATE {MARK} entity SET ssh_private_key_enc = convert_to(body::text, 'UTF8'), body = '{body}' WHERE {entities}"
    );
    let restore = format!(
        "UPDATE {MARK} entity SET body = convert_from(ssh_private_key_enc, 'UTF8')::jsonb, ssh_private_key_enc = NULL
         WHERE ssh_private_key_enc IS NOT NULL AND {entities}"
    );
    for (statement, is_altered) in [(alter, true), (restore, false)] {
        let done = sqlx::query(sqlx::AssertSqlSafe(statement)).execute(pool).await.unwrap();
        assert!(done.rows_affected() > 0);
        if is_altered {
            ask().await;
        }
    }
}

async fn read_idempotency_records(reads: &Reads, rows: &SampleRows) {
    let records = reads.idempotency_records();
    let committed = CommandId(rows.commands[0]);
    reads.command(committed).await.unwrap().unwrap();
    records.find(committed).await.unwrap().unwrap();
    records.store_for_committed(committed, "{}").await.unwrap();
    records.store_for_uncommitted(CommandId(Uuid::new_v4()), [7; 32], Some("{}")).await.unwrap();
    let logouts = reads.provider_logouts();
    let id = CommandId(Uuid::new_v4());
    for seconds in [1, 2] {
        let at = DateTime::UNIX_EPOCH + TimeDelta::seconds(seconds);
        let logout = ProviderLogout { issued_at: at, received_at: at, token_sha256: "07".to_owned() };
        logouts.record(id, &logout).await.unwrap();
        assert_eq!(logouts.latest(&[id, CommandId(Uuid::new_v4())]).await.unwrap(), Some(logout));
    }
}

/// What dashboards and metrics ask for.
async fn read_totals(reads: &Reads, pool: &PgPool, rows: &SampleRows) {
    let mine = third_of_shards();
    reads.counts().await.unwrap();
    reads.gpu_use(&mine).await.unwrap();
    reads.account_sums(&mine).await.unwrap();
    reads.node_concerns(&mine).await.unwrap();
    let gpus = async || {
        reads.gpus().await.unwrap();
        reads.node_states().await.unwrap();
    };
    gpus().await;
    let node = format!("id = '{}'", rows.nodes[0]);
    let placed: Vec<_> = rows.nodes.iter().copied().map(NodeId).collect();
    let without_node = async || drop(reads.fleet_nodes(&placed).await.unwrap());
    altered(pool, &node, r#"{"holds": 5}"#, without_node).await;
    reads.dependents("old", true, Utc::now(), PAGE).await.unwrap();
    reads.replication_status().await.unwrap();
    reads.backup_times().await.unwrap();
    for below in [None, Some(7)] {
        reads.last_commits(below, Utc::now() - TimeDelta::days(1)).await.unwrap();
    }
}

async fn inspect(reads: &Reads, rows: &SampleRows) {
    let mut inspection = reads.inspect().await.unwrap();
    for after in [None, Some(rows.cursor())] {
        inspection.entities(EntityKind::Allocation, &third_of_shards(), after, PAGE).await.unwrap();
    }
    inspection.bodies(EntityKind::Node, &rows.nodes).await.unwrap();
    inspection.sum_of_entries(BillingAccountId(LARGE_ACCOUNT)).await.unwrap();
}

async fn seal_audit_rows(store: &TestStore, pool: &PgPool) {
    let terms: Vec<_> = Shard::all().map(|shard| (shard, Epoch(1))).collect();
    let mut sealer = Sealer::new(pool.clone(), store.me, audit_key());
    let sealed = sealer.run(&terms, Utc::now()).await.unwrap();
    assert!(sealed.sealed > 0 && sealed.broken.is_empty(), "{sealed:?}");
}

async fn keep_recordings(pool: &PgPool, rows: &SampleRows) {
    let (old, new) = (ring(&[("b", 2)]), ring(&[("a", 1), ("b", 2)]));
    let recordings = Secrets::new(pool.clone(), Arc::clone(&old)).recordings();
    let session = TerminalSessionId(Uuid::new_v4());
    let (allocation, node) = (AllocationId(rows.allocations[0]), NodeId(rows.nodes[0]));
    let of = ChunkOwner { session, owner: SMALL_OWNER, allocation, node };
    for _ in 0..2 {
        let chunk = Chunk { seq: 0, frames: b"frames", lost_bytes: 0, micros: 0, ends: false };
        recordings.store_chunk(&of, &chunk, 1 << 20).await.unwrap();
    }
    let secrets = Secrets::new(pool.clone(), Arc::clone(&new));
    let rewrap = secrets.rewrap();
    rewrap.check().await.unwrap();
    rewrap.recordings().await.unwrap();
    for field in SEALED_FIELDS {
        rewrap.outdated(field, None, PAGE).await.unwrap();
    }
    let recordings = secrets.recordings();
    recordings.read(session, 0, PAGE).await.unwrap();
    recordings.get(session).await.unwrap().unwrap();
    let all = RecordingFilter::default;
    let filters = [
        all(),
        RecordingFilter { owner: Some(LARGE_OWNER.to_owned()), ..all() },
        RecordingFilter { allocation: Some(allocation), ..all() },
        RecordingFilter { allocation: Some(allocation), is_newest_first: true, ..all() },
        RecordingFilter { owner: Some(LARGE_OWNER.to_owned()), allocation: Some(allocation), ..all() },
    ];
    for filter in filters {
        for after in [None, Some(Cursor { created_at: Utc::now() - TimeDelta::days(9), id: rows.sessions[0] })] {
            recordings.list(&filter, after, i64::from(PAGE)).await.unwrap();
        }
    }
    for owner in [None, Some(LARGE_OWNER)] {
        recordings.bytes(owner).await.unwrap();
    }
    recordings.delete(session).await.unwrap();
}

async fn keep_secrets(pool: &PgPool) {
    let secrets = Secrets::new(pool.clone(), ring(&[("b", 2)]));
    let value = || SecretSlice::from(vec![9; 32]);
    secrets.get_or_create("one", || (value(), serde_json::json!({}))).await.unwrap();
    secrets.create("two", &value(), serde_json::json!({})).await.unwrap();
    secrets.list("t").await.unwrap();
    Secrets::new(pool.clone(), ring(&[("a", 1), ("b", 2)])).rewrap().secrets().await.unwrap();
    secrets.destroy("one").await.unwrap();
    secrets.destroy("two").await.unwrap();
}

async fn keep_members(store: &TestStore, pool: &PgPool) {
    let cluster = Cluster::new(pool.clone());
    let member = || Member {
        id: MemberId(Uuid::new_v4()),
        name: "one".to_owned(),
        started_at: Utc::now(),
        details: serde_json::json!({}),
    };
    let (first, second) = (member(), member());
    drop(StartingMember::begin(pool).await.unwrap());
    cluster.join(&first, |_| true).await.unwrap();
    cluster.join(&second, |_| true).await.unwrap();
    cluster.check_write(second.id).await.unwrap();
    cluster.end_abandoned_commits().await.unwrap();
    cluster.alive(DAY).await.unwrap();
    cluster.members_without("hears").await.unwrap();
    cluster.remove(second.id).await.unwrap();
    cluster.remove_silent(DAY).await.unwrap();
    cluster.shards().await.unwrap();
    cluster.take_over(second.id, &[], &BTreeMap::new()).await.unwrap();
    cluster.handover(second.id, None, &[]).await.unwrap();
    cluster.incarnation().await.unwrap();
    let entity = EntityRef { kind: EntityKind::Node, id: LONG_LIVED };
    cluster.park(entity, Shard(0), "it fails").await.unwrap();
    cluster.parked(&third_of_shards()).await.unwrap();
    cluster.unpark(entity).await.unwrap();

    let leases = Leases::new(pool.clone(), store.me);
    let lease = leases.acquire("one", DAY).await.unwrap().unwrap();
    leases.release(lease).await.unwrap();
    leases.delete_expired().await.unwrap();
    leases.store_reconciled_until("books", Utc::now()).await.unwrap();
    leases.reconciled_until("books").await.unwrap();
    let marks = RecoveryMarks::new(pool.clone());
    marks.read().await.unwrap();
    marks.raise().await.unwrap();
    Migrations::embedded().check(pool).await.unwrap();
}

async fn maintain_tables(pool: &PgPool) {
    let now = Utc::now();
    table_maintenance::delete_commands(pool, DAY, 20).await.unwrap();
    table_maintenance::store_node_terms(pool, None, 20).await.unwrap();
    table_maintenance::compact_counts(pool).await.unwrap();
    table_maintenance::correct_counts(pool).await.unwrap();
    table_maintenance::compact_sums(pool).await.unwrap();
    entity_sums::correct(pool, &third_of_shards()).await.unwrap();
    table_maintenance::make_partitions(pool, 2).await.unwrap();
    Outbox::new(pool.clone()).settle(&[EventId(Uuid::new_v4())]).await.unwrap();
    let before = retention::earlier_clock(pool, now).await.unwrap() - TimeDelta::days(500);
    retention::delete_stray_history(pool, before).await.unwrap();
    retention::delete_ended(pool, EntityKind::Allocation, before).await.unwrap();
    retention::count_ended(pool, EntityKind::Allocation, before).await.unwrap();
    retention::lag_of_ended(pool, before).await.unwrap();
    let sizes = table_sizes::table_sizes(pool).await.unwrap();
    table_sizes::store_sample(pool, &sizes, now).await.unwrap();
    table_sizes::daily_growth(pool, &sizes, now).await.unwrap();
    table_sizes::oldest_rows(pool).await.unwrap();
}
