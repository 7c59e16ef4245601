//! The audit log's chains against an attacker who can change every table.

use crate::test_store::{TestStore, create};
use chrono::{TimeDelta, Utc};
use domain::commit::{Commit, CommitOutcome, Epoch};
use domain::id::{MemberId, Shard};
use ed25519_dalek::SigningKey;
use persistence::audit::{
    AuditFinding, AuditKey, AuditKeys, AuditReport, AuditVerification, FindingKind, Sealer, SignedHead, drop_month,
    verify,
};
use sqlx::Row;
use uuid::Uuid;

const SHARD: Shard = Shard(7);

fn key() -> AuditKey {
    AuditKey::new(SigningKey::from_bytes(&[42; 32]))
}

fn sealer(store: &TestStore) -> Sealer {
    Sealer::new(store.pool().clone(), store.me, key())
}

fn terms(epoch: i64) -> Vec<(Shard, Epoch)> {
    (0..=255).map(|shard| (Shard(shard), Epoch(epoch))).collect()
}

/// The `n`th transition in [`SHARD`], with an audit row.
fn nth(n: u32) -> Commit {
    create(n * 256 + u32::from(SHARD.0))
}

async fn rows(store: &TestStore, numbers: std::ops::Range<u32>) {
    for n in numbers {
        assert_eq!(store.commit(&nth(n)).await, CommitOutcome::Applied);
    }
}

async fn seal(sealer: &mut Sealer) -> Vec<SignedHead> {
    let run = sealer.run(&terms(1), Utc::now()).await.unwrap();
    assert_eq!(run.broken, []);
    run.heads
}

/// Ten rows in one shard and one in another, sealed four and six at a time.
async fn sealed() -> (TestStore, Sealer, Vec<SignedHead>) {
    let store = TestStore::new().await;
    let mut sealer = sealer(&store);
    rows(&store, 0..4).await;
    let mut heads = seal(&mut sealer).await;
    rows(&store, 4..10).await;
    assert_eq!(store.commit(&create(3)).await, CommitOutcome::Applied);
    heads.extend(seal(&mut sealer).await);
    assert_eq!(
        heads.iter().map(|head| (head.head.shard.0, head.head.number)).collect::<Vec<_>>(),
        [(7, 4), (3, 1), (7, 10)]
    );
    (store, sealer, heads)
}

async fn verified_with(store: &TestStore, heads: &[SignedHead]) -> AuditReport {
    let what = AuditVerification {
        shards: (0..=255).map(Shard).collect(),
        keys: AuditKeys::of(&key()),
        heads: heads.to_vec(),
        unsealed_after: TimeDelta::minutes(5),
        now: Utc::now(),
    };
    verify(store.pool(), &what).await.unwrap()
}

async fn only_finding(store: &TestStore, heads: &[SignedHead]) -> AuditFinding {
    let mut report = verified_with(store, heads).await;
    assert_eq!(report.findings.len(), 1, "{report:?}");
    report.findings.pop().unwrap()
}

/// An attacker's statements as the owner of the database: past every trigger.
async fn tamper(store: &TestStore, statements: &[&'static str]) {
    let mut session = store.pool().acquire().await.unwrap();
    sqlx::query("SET session_replication_role = replica").execute(&mut *session).await.unwrap();
    for statement in statements {
        let changed = sqlx::query(*statement).execute(&mut *session).await.unwrap();
        assert!(changed.rows_affected() > 0, "{statement} changed nothing");
    }
    sqlx::query("RESET session_replication_role").execute(&mut *session).await.unwrap();
}

async fn expect(statements: &[&'static str], kind: FindingKind, number: Option<i64>) {
    let (store, _, _) = sealed().await;
    tamper(&store, statements).await;
    let finding = only_finding(&store, &[]).await;
    assert_eq!((finding.shard, finding.kind, finding.number), (SHARD, kind, number), "{statements:?}: {finding:?}");
}

#[tokio::test]
async fn untouched_chains_verify_and_every_row_has_its_seal() {
    let (store, _, heads) = sealed().await;
    let report = verified_with(&store, &heads).await;
    assert_eq!((report.findings.len(), report.verified, report.unsealed), (0, 11, 0), "{report:?}");
    assert_eq!(report.heads, 6, "three stored here, three elsewhere");
    rows(&store, 10..12).await;
    let report = verified_with(&store, &heads).await;
    assert_eq!((report.findings.len(), report.unsealed), (0, 2), "two wait, not too long");
}

#[tokio::test]
async fn change_of_any_column_is_found_at_its_row() {
    let changes = [
        "UPDATE audit SET actor = 'user:eve' WHERE shard = 7 AND seq = 7",
        "UPDATE audit SET action = 'skus.forget' WHERE shard = 7 AND seq = 7",
        "UPDATE audit SET target_kind = 'node' WHERE shard = 7 AND seq = 7",
        "UPDATE audit SET target_id = gen_random_uuid() WHERE shard = 7 AND seq = 7",
        "UPDATE audit SET correlation_id = 'another' WHERE shard = 7 AND seq = 7",
        "UPDATE audit SET metadata = metadata || '{\"n\": 0}' WHERE shard = 7 AND seq = 7",
        "UPDATE audit SET at = at + interval '1 microsecond' WHERE shard = 7 AND seq = 7",
    ];
    let (store, _, _) = sealed().await;
    // Each transition takes three numbers: history, audit, event. The third audit row has number 8.
    let places: Vec<i64> =
        sqlx::query_scalar("SELECT seq FROM audit WHERE shard = 7 ORDER BY seq").fetch_all(store.pool()).await.unwrap();
    for change in changes {
        let change: &'static str =
            Box::leak(change.replace("seq = 7", &format!("seq = {}", places[2])).into_boxed_str());
        expect(&[change], FindingKind::Altered, Some(3)).await;
    }
}

/// A seal covers exactly the existing columns.
#[tokio::test]
async fn every_column_of_the_audit_table_is_sealed() {
    let store = TestStore::new().await;
    let columns: Vec<String> = sqlx::query_scalar(
        "SELECT attname::text FROM pg_attribute WHERE attrelid = 'audit'::regclass AND attnum > 0 AND NOT attisdropped
         ORDER BY attnum",
    )
    .fetch_all(store.pool())
    .await
    .unwrap();
    let covered =
        ["shard", "epoch", "seq", "actor", "action", "target_kind", "target_id", "correlation_id", "metadata", "at"];
    assert_eq!(columns, covered, "a new column needs a new version of the digest in persistence/src/audit/chain.rs");
}

#[tokio::test]
async fn row_deleted_from_the_middle_is_found_as_removed() {
    let third = "DELETE FROM audit WHERE (shard, epoch, seq) = (SELECT shard, epoch, seq FROM audit_seal WHERE shard = 7 AND number = 3)";
    expect(&[third], FindingKind::Removed, Some(3)).await;
    expect(&[third, "DELETE FROM audit_seal WHERE shard = 7 AND number = 3"], FindingKind::Removed, Some(3)).await;
}

#[tokio::test]
async fn truncated_chain_is_found_with_and_without_its_seals() {
    let tail = "DELETE FROM audit WHERE (shard, epoch, seq) IN (SELECT shard, epoch, seq FROM audit_seal WHERE shard = 7 AND number > 6)";
    expect(&[tail], FindingKind::CutOff, Some(7)).await;
    expect(&[tail, "DELETE FROM audit_seal WHERE shard = 7 AND number > 6"], FindingKind::CutOff, Some(7)).await;
    let all = ["DELETE FROM audit WHERE shard = 7", "DELETE FROM audit_seal WHERE shard = 7"];
    expect(&all, FindingKind::CutOff, Some(1)).await;
}

#[tokio::test]
async fn swapped_rows_are_found_as_altered() {
    // In three steps, past the unique index.
    let steps = [
        "UPDATE audit SET seq = -1 WHERE shard = 7 AND seq = (SELECT seq FROM audit_seal WHERE shard = 7 AND number = 5)",
        "UPDATE audit SET seq = (SELECT seq FROM audit_seal WHERE shard = 7 AND number = 5)
         WHERE shard = 7 AND seq = (SELECT seq FROM audit_seal WHERE shard = 7 AND number = 8)",
        "UPDATE audit SET seq = (SELECT seq FROM audit_seal WHERE shard = 7 AND number = 8) WHERE shard = 7 AND seq = -1",
    ];
    expect(&steps, FindingKind::Altered, Some(5)).await;
}

#[tokio::test]
async fn row_among_sealed_ones_is_found_as_inserted() {
    let insert =
        "INSERT INTO audit SELECT shard, epoch, seq - 1, 'user:eve', action, target_kind, target_id, correlation_id,
                  metadata, at FROM audit JOIN audit_seal USING (shard, epoch, seq) WHERE shard = 7 AND number = 4";
    expect(&[insert], FindingKind::Inserted, None).await;
    let twice =
        "INSERT INTO audit SELECT shard, epoch, seq, 'user:eve', action, target_kind, target_id, correlation_id,
                 metadata, at + interval '1 second' FROM audit JOIN audit_seal USING (shard, epoch, seq)
                 WHERE shard = 7 AND number = 4";
    let (store, _, _) = sealed().await;
    tamper(&store, &[twice]).await;
    let finding = only_finding(&store, &[]).await;
    assert_eq!((finding.shard, finding.kind), (SHARD, FindingKind::Altered), "{finding:?}");
}

#[tokio::test]
async fn deleted_newest_head_is_found() {
    expect(&["DELETE FROM audit_head WHERE shard = 7 AND number = 10"], FindingKind::HeadRemoved, Some(10)).await;
    expect(&["DELETE FROM audit_head WHERE shard = 7"], FindingKind::HeadRemoved, Some(10)).await;
}

#[tokio::test]
async fn head_signed_by_another_key_is_found() {
    expect(
        &["UPDATE audit_head SET signature = decode(repeat('00', 64), 'hex') WHERE shard = 7 AND number = 4"],
        FindingKind::HeadSignature,
        Some(4),
    )
    .await;
    expect(
        &["UPDATE audit_head SET key_id = 'mine' WHERE shard = 7 AND number = 10"],
        FindingKind::HeadSignature,
        Some(10),
    )
    .await;
}

/// Rows, seals and head are restored to an earlier state: nothing inside the database contradicts it. An external head does.
#[tokio::test]
async fn restored_older_state_is_found_by_an_external_head_and_stops_the_sealer() {
    let (store, mut sealer, heads) = sealed().await;
    tamper(&store, &[
        "DELETE FROM audit WHERE (shard, epoch, seq) IN (SELECT shard, epoch, seq FROM audit_seal WHERE shard = 7 AND number > 4)",
        "DELETE FROM audit_seal WHERE shard = 7 AND number > 4",
        "DELETE FROM audit_head WHERE shard = 7 AND number > 4",
    ])
    .await;
    assert_eq!(verified_with(&store, &[]).await.findings, [], "the database alone does not know");
    let finding = only_finding(&store, &heads).await;
    assert_eq!((finding.shard, finding.kind, finding.number), (SHARD, FindingKind::CutOff, Some(5)), "{finding:?}");

    // Neither the sealer that sealed it continues from there, nor another that learned the head.
    rows(&store, 20..21).await;
    let run = sealer.run(&terms(1), Utc::now()).await.unwrap();
    assert_eq!((run.sealed, run.broken.len(), run.broken[0].shard), (0, 1, SHARD), "{run:?}");
    let mut other = self::sealer(&store);
    heads.iter().for_each(|head| other.learn_head(head));
    assert_eq!(other.run(&terms(1), Utc::now()).await.unwrap().broken.len(), 1);

    // One that learned no head does, and the fork shows: the head of 10 was signed over other rows.
    let mut ignorant = self::sealer(&store);
    rows(&store, 21..30).await;
    seal(&mut ignorant).await;
    assert_eq!(verified_with(&store, &[]).await.findings, []);
    let finding = only_finding(&store, &heads).await;
    assert_eq!((finding.shard, finding.kind, finding.number), (SHARD, FindingKind::Altered, Some(10)), "{finding:?}");
}

/// The algorithm is no secret: an attacker who rewrites a row can recompute the seals. The signed heads stay.
#[tokio::test]
async fn recomputed_seals_contradict_the_signed_head() {
    let (store, _, _) = sealed().await;
    tamper(&store, &["UPDATE audit SET actor = 'user:eve' WHERE (shard, epoch, seq) = (SELECT shard, epoch, seq FROM audit_seal WHERE shard = 7 AND number = 6)"]).await;
    // The attacker's own run, with another key, over an empty seal table.
    let saved = sqlx::query("CREATE TABLE honest AS SELECT * FROM audit_head").execute(store.pool()).await;
    saved.unwrap();
    tamper(&store, &["DELETE FROM audit_seal", "DELETE FROM audit_head"]).await;
    let mut forger = Sealer::new(store.pool().clone(), store.me, AuditKey::new(SigningKey::from_bytes(&[66; 32])));
    seal(&mut forger).await;
    assert_eq!(only_or_all(&store).await, FindingKind::HeadSignature, "his key is not ours");
    tamper(&store, &["DELETE FROM audit_head", "INSERT INTO audit_head SELECT * FROM honest"]).await;
    let finding = only_finding(&store, &[]).await;
    assert_eq!((finding.shard, finding.kind, finding.number), (SHARD, FindingKind::Altered, Some(10)), "{finding:?}");
}

async fn only_or_all(store: &TestStore) -> FindingKind {
    let report = verified_with(store, &[]).await;
    assert_eq!(report.findings.len(), 2, "both shards: {report:?}");
    report.findings[0].kind
}

#[tokio::test]
async fn row_without_a_seal_is_found_after_the_limit() {
    let store = TestStore::new().await;
    let old = Commit { at: Utc::now() - TimeDelta::minutes(6), ..nth(0) };
    assert_eq!(store.commit(&old).await, CommitOutcome::Applied);
    let finding = only_finding(&store, &[]).await;
    assert_eq!((finding.shard, finding.kind), (SHARD, FindingKind::UnsealedTooLong));
    seal(&mut sealer(&store)).await;
    assert_eq!(verified_with(&store, &[]).await.findings, []);
}

/// A sealer that is killed leaves a whole batch or nothing, and the next one continues.
#[tokio::test]
async fn sealer_killed_during_a_run_leaves_no_gap() {
    let store = TestStore::new().await;
    rows(&store, 0..20).await;
    for _ in 0..20 {
        let mut victim = sealer(&store);
        let pool = store.pool().clone();
        let run = tokio::spawn(async move { victim.run(&terms(1), Utc::now()).await.map(drop) });
        tokio::time::sleep(std::time::Duration::from_millis(rand::random_range(0..12))).await;
        run.abort();
        let _ = run.await;
        // Its transaction ends with its connection.
        sqlx::query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND state = 'idle in transaction' AND datname = current_database()")
            .execute(&pool)
            .await
            .unwrap();
        let n = store.count("audit").await;
        rows(&store, u32::try_from(n).unwrap()..u32::try_from(n).unwrap() + 2).await;
    }
    seal(&mut sealer(&store)).await;
    let report = verified_with(&store, &[]).await;
    assert_eq!((report.findings.len(), report.unsealed), (0, 0), "{report:?}");
    assert_eq!(report.verified, 60);
}

#[tokio::test]
async fn former_owner_seals_nothing_after_a_takeover_and_the_new_one_continues() {
    let (store, mut old, _) = sealed().await;
    rows(&store, 10..12).await;
    let heir = MemberId(Uuid::new_v4());
    let mine: Vec<_> = terms(1);
    store.cluster().handover(store.me, Some(heir), &mine).await.unwrap();
    let run = old.run(&terms(1), Utc::now()).await.unwrap();
    assert_eq!((run.sealed, run.waited, run.broken.len()), (0, 2, 0), "fenced: {run:?}");
    // Nor under the successor's epoch: it is not the owner.
    assert_eq!(old.run(&terms(2), Utc::now()).await.unwrap().sealed, 0);
    let mut new = Sealer::new(store.pool().clone(), heir, key());
    let run = new.run(&terms(2), Utc::now()).await.unwrap();
    assert_eq!((run.sealed, run.broken.len()), (2, 0), "{run:?}");
    let report = verified_with(&store, &[]).await;
    assert_eq!((report.findings.len(), report.verified), (0, 13), "{report:?}");
}

/// Two owners seal one after the other while another client commits; the takeover comes at any moment.
#[tokio::test]
async fn takeover_during_a_seal_run_forks_no_chain() {
    let store = TestStore::new().await;
    rows(&store, 0..50).await;
    let heir = MemberId(Uuid::new_v4());
    let mut old = sealer(&store);
    let sealing = tokio::spawn(async move {
        for _ in 0..20 {
            old.run(&terms(1), Utc::now()).await.unwrap();
        }
    });
    store.cluster().handover(store.me, Some(heir), &terms(1)).await.unwrap();
    let mut new = Sealer::new(store.pool().clone(), heir, key());
    for _ in 0..5 {
        assert_eq!(new.run(&terms(2), Utc::now()).await.unwrap().broken, []);
    }
    sealing.await.unwrap();
    let report = verified_with(&store, &[]).await;
    assert_eq!((report.findings.len(), report.verified), (0, 50), "{report:?}");
}

#[tokio::test]
async fn audit_rows_cannot_be_changed_deleted_or_emptied() {
    let (store, _, _) = sealed().await;
    for statement in [
        "UPDATE audit SET actor = 'user:eve'",
        "DELETE FROM audit",
        "TRUNCATE audit",
        "UPDATE audit_seal SET hash = hash",
        "UPDATE audit_head SET hash = hash",
    ] {
        let error = sqlx::query(statement).execute(store.pool()).await.unwrap_err().to_string();
        assert!(error.contains("never changed or deleted"), "{statement}: {error}");
    }
    let partitions: Vec<String> =
        sqlx::query_scalar("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'audit'::regclass")
            .fetch_all(store.pool())
            .await
            .unwrap();
    assert!(partitions.len() >= 4, "{partitions:?}");
    for partition in partitions {
        for statement in [format!("DELETE FROM {partition}"), format!("TRUNCATE {partition}")] {
            let result = sqlx::query(sqlx::AssertSqlSafe(statement.clone())).execute(store.pool()).await;
            let empty = statement.starts_with("DELETE") && result.as_ref().is_ok_and(|done| done.rows_affected() == 0);
            assert!(result.is_err() || empty, "{statement} was executed");
        }
    }
    assert_eq!(store.count("audit").await, 11);
}

/// Rows of an old month, in chain order mixed with two of a later month, as at the edge of a month.
#[tokio::test]
async fn dropped_month_does_not_break_the_chain() {
    let store = TestStore::new().await;
    for (partition, from, to) in
        [("audit_2024_01", "2024-01-01", "2024-02-01"), ("audit_2024_02", "2024-02-01", "2024-03-01")]
    {
        let make =
            format!("CREATE TABLE {partition} PARTITION OF audit FOR VALUES FROM ('{from} UTC') TO ('{to} UTC')");
        sqlx::query(sqlx::AssertSqlSafe(make)).execute(store.pool()).await.unwrap();
    }
    let at = |text: &str| text.parse::<chrono::DateTime<Utc>>().unwrap();
    let (january, february) = (at("2024-01-31T23:59:59Z"), at("2024-02-01T00:00:01Z"));
    for (n, at) in [january, january, february, january, february, Utc::now()].into_iter().enumerate() {
        let n = u32::try_from(n).unwrap();
        assert_eq!(store.commit(&Commit { at, ..nth(n) }).await, CommitOutcome::Applied);
    }
    assert!(
        drop_month(store.pool(), &key(), "2024-01", Utc::now()).await.unwrap_err().to_string().contains("not sealed")
    );
    let mut sealer = sealer(&store);
    seal(&mut sealer).await;
    for bad in ["2024-1", "2024-13", "x", "", "2024-01-01", "2023-12"] {
        assert!(drop_month(store.pool(), &key(), bad, Utc::now()).await.is_err(), "{bad}");
    }
    let running = Utc::now().format("%Y-%m").to_string();
    assert!(drop_month(store.pool(), &key(), &running, Utc::now()).await.unwrap_err().to_string().contains("not over"));

    assert_eq!(drop_month(store.pool(), &key(), "2024-01", Utc::now()).await.unwrap().shards, 1);
    assert_eq!(store.count("audit").await, 3);
    let report = verified_with(&store, &[]).await;
    assert_eq!((report.findings.len(), report.verified), (0, 3), "{report:?}");
    rows(&store, 6..8).await;
    seal(&mut sealer).await;
    assert_eq!(verified_with(&store, &[]).await.findings, []);

    // The retained row before the checkpoint is covered by it.
    for (change, kind) in [
        ("UPDATE audit SET actor = 'user:eve' WHERE at = '2024-02-01T00:00:01Z'", FindingKind::Altered),
        ("DELETE FROM audit WHERE at = '2024-02-01T00:00:01Z' AND seq < 9", FindingKind::Removed),
        ("UPDATE audit_checkpoint SET hash = decode(repeat('00', 32), 'hex')", FindingKind::HeadSignature),
    ] {
        let mut session = store.pool().begin().await.unwrap();
        sqlx::query("SET LOCAL session_replication_role = replica").execute(&mut *session).await.unwrap();
        sqlx::query("CREATE TABLE IF NOT EXISTS kept_audit AS SELECT * FROM audit")
            .execute(&mut *session)
            .await
            .unwrap();
        sqlx::query("CREATE TABLE IF NOT EXISTS kept_checkpoint AS SELECT * FROM audit_checkpoint")
            .execute(&mut *session)
            .await
            .unwrap();
        assert!(sqlx::query(change).execute(&mut *session).await.unwrap().rows_affected() > 0, "{change}");
        session.commit().await.unwrap();
        assert_eq!(only_finding(&store, &[]).await.kind, kind, "{change}");
        tamper(&store, &["DELETE FROM audit", "INSERT INTO audit SELECT * FROM kept_audit"]).await;
        tamper(&store, &["DELETE FROM audit_checkpoint", "INSERT INTO audit_checkpoint SELECT * FROM kept_checkpoint"])
            .await;
        assert_eq!(verified_with(&store, &[]).await.findings, []);
    }

    assert_eq!(drop_month(store.pool(), &key(), "2024-02", Utc::now()).await.unwrap().shards, 1);
    let report = verified_with(&store, &[]).await;
    assert_eq!((report.findings.len(), report.verified), (0, 3), "{report:?}");
}

/// The row that the API shows: with its position in the chain, where it is sealed.
#[tokio::test]
async fn audit_row_has_its_number_and_hash_once_it_is_sealed() {
    let (store, _, _) = sealed().await;
    rows(&store, 10..11).await;
    let filter = persistence::queries::AuditFilter::default();
    let page = store.reads().audit(&filter, None, 100).await.unwrap();
    let unsealed = page.items.iter().filter(|row| row.seal.is_none()).count();
    assert_eq!((page.items.len(), unsealed), (12, 1));
    let row = sqlx::query("SELECT epoch, seq, hash FROM audit_seal WHERE shard = 7 AND number = 9")
        .fetch_one(store.pool())
        .await
        .unwrap();
    let nine = page.items.iter().find(|item| item.seal.as_ref().is_some_and(|seal| seal.number == 9)).unwrap();
    assert_eq!(nine.place.seq, row.get::<i64, _>("seq"));
    assert_eq!(nine.seal.as_ref().unwrap().hash.to_vec(), row.get::<Vec<u8>, _>("hash"));
}
