//! The audit log's chains against somebody who may change every table.

use crate::world::{World, create};
use chrono::{TimeDelta, Utc};
use domain::commit::{Commit, Epoch, Outcome};
use domain::id::{MemberId, Shard};
use ed25519_dalek::SigningKey;
use persistence::audit::{AuditKey, AuditKeys, Finding, Kind, Report, Sealer, SignedHead, Verify, forget, verify};
use sqlx::Row;
use uuid::Uuid;

const SHARD: Shard = Shard(7);

fn key() -> AuditKey {
    AuditKey::new(SigningKey::from_bytes(&[42; 32]))
}

fn sealer(world: &World) -> Sealer {
    Sealer::new(world.pool().clone(), world.me, key())
}

fn terms(epoch: i64) -> Vec<(Shard, Epoch)> {
    (0..=255).map(|shard| (Shard(shard), Epoch(epoch))).collect()
}

/// The `n`th transition in [`SHARD`], with an audit row.
fn nth(n: u32) -> Commit {
    create(n * 256 + u32::from(SHARD.0))
}

async fn rows(world: &World, numbers: std::ops::Range<u32>) {
    for n in numbers {
        assert_eq!(world.commit(&nth(n)).await, Outcome::Applied);
    }
}

async fn seal(sealer: &mut Sealer) -> Vec<SignedHead> {
    let turn = sealer.turn(&terms(1), Utc::now()).await.unwrap();
    assert_eq!(turn.broken, []);
    turn.heads
}

/// Ten rows in one shard and one in another, sealed four and six at a time.
async fn sealed() -> (World, Sealer, Vec<SignedHead>) {
    let world = World::new().await;
    let mut sealer = sealer(&world);
    rows(&world, 0..4).await;
    let mut heads = seal(&mut sealer).await;
    rows(&world, 4..10).await;
    assert_eq!(world.commit(&create(3)).await, Outcome::Applied);
    heads.extend(seal(&mut sealer).await);
    assert_eq!(
        heads.iter().map(|head| (head.head.shard.0, head.head.number)).collect::<Vec<_>>(),
        [(7, 4), (3, 1), (7, 10)]
    );
    (world, sealer, heads)
}

async fn verified_with(world: &World, heads: &[SignedHead]) -> Report {
    let what = Verify {
        shards: (0..=255).map(Shard).collect(),
        keys: AuditKeys::of(&key()),
        heads: heads.to_vec(),
        unsealed_after: TimeDelta::seconds(10),
        now: Utc::now(),
    };
    verify(world.pool(), &what).await.unwrap()
}

async fn only_finding(world: &World, heads: &[SignedHead]) -> Finding {
    let mut report = verified_with(world, heads).await;
    assert_eq!(report.findings.len(), 1, "{report:?}");
    report.findings.pop().unwrap()
}

/// What somebody does who owns the database: past every trigger.
async fn tamper(world: &World, statements: &[&'static str]) {
    let mut session = world.pool().acquire().await.unwrap();
    sqlx::query("SET session_replication_role = replica").execute(&mut *session).await.unwrap();
    for statement in statements {
        let changed = sqlx::query(*statement).execute(&mut *session).await.unwrap();
        assert!(changed.rows_affected() > 0, "{statement} changed nothing");
    }
    sqlx::query("RESET session_replication_role").execute(&mut *session).await.unwrap();
}

async fn expect(statements: &[&'static str], kind: Kind, number: Option<i64>) {
    let (world, _, _) = sealed().await;
    tamper(&world, statements).await;
    let finding = only_finding(&world, &[]).await;
    assert_eq!((finding.shard, finding.kind, finding.number), (SHARD, kind, number), "{statements:?}: {finding:?}");
}

#[tokio::test]
async fn chains_that_nobody_touched_verify_and_every_row_has_its_seal() {
    let (world, _, heads) = sealed().await;
    let report = verified_with(&world, &heads).await;
    assert_eq!((report.findings.len(), report.verified, report.unsealed), (0, 11, 0), "{report:?}");
    assert_eq!(report.heads, 6, "three kept here, three elsewhere");
    rows(&world, 10..12).await;
    let report = verified_with(&world, &heads).await;
    assert_eq!((report.findings.len(), report.unsealed), (0, 2), "two wait, not too long");
}

#[tokio::test]
async fn a_change_of_any_column_names_its_row() {
    let changes = [
        "UPDATE audit SET actor = 'user:eve' WHERE shard = 7 AND seq = 7",
        "UPDATE audit SET action = 'skus.forget' WHERE shard = 7 AND seq = 7",
        "UPDATE audit SET target_kind = 'node' WHERE shard = 7 AND seq = 7",
        "UPDATE audit SET target_id = gen_random_uuid() WHERE shard = 7 AND seq = 7",
        "UPDATE audit SET correlation_id = 'another' WHERE shard = 7 AND seq = 7",
        "UPDATE audit SET metadata = metadata || '{\"n\": 0}' WHERE shard = 7 AND seq = 7",
        "UPDATE audit SET at = at + interval '1 microsecond' WHERE shard = 7 AND seq = 7",
    ];
    let (world, _, _) = sealed().await;
    // Each transition takes three numbers: history, audit, event. The third audit row stands at 8.
    let places: Vec<i64> =
        sqlx::query_scalar("SELECT seq FROM audit WHERE shard = 7 ORDER BY seq").fetch_all(world.pool()).await.unwrap();
    for change in changes {
        let change: &'static str =
            Box::leak(change.replace("seq = 7", &format!("seq = {}", places[2])).into_boxed_str());
        expect(&[change], Kind::Altered, Some(3)).await;
    }
}

/// The columns that a seal covers are the columns that there are.
#[tokio::test]
async fn no_column_of_the_audit_table_is_left_out_of_the_seal() {
    let world = World::new().await;
    let columns: Vec<String> = sqlx::query_scalar(
        "SELECT attname::text FROM pg_attribute WHERE attrelid = 'audit'::regclass AND attnum > 0 AND NOT attisdropped
         ORDER BY attnum",
    )
    .fetch_all(world.pool())
    .await
    .unwrap();
    let covered =
        ["shard", "epoch", "seq", "actor", "action", "target_kind", "target_id", "correlation_id", "metadata", "at"];
    assert_eq!(columns, covered, "a new column needs a new version of the digest in persistence/src/audit/chain.rs");
}

#[tokio::test]
async fn a_row_taken_from_the_middle_is_removed() {
    let third = "DELETE FROM audit WHERE (shard, epoch, seq) = (SELECT shard, epoch, seq FROM audit_seal WHERE shard = 7 AND number = 3)";
    expect(&[third], Kind::Removed, Some(3)).await;
    expect(&[third, "DELETE FROM audit_seal WHERE shard = 7 AND number = 3"], Kind::Removed, Some(3)).await;
}

#[tokio::test]
async fn an_end_that_is_gone_is_cut_off_with_and_without_its_seals() {
    let tail = "DELETE FROM audit WHERE (shard, epoch, seq) IN (SELECT shard, epoch, seq FROM audit_seal WHERE shard = 7 AND number > 6)";
    expect(&[tail], Kind::CutOff, Some(7)).await;
    expect(&[tail, "DELETE FROM audit_seal WHERE shard = 7 AND number > 6"], Kind::CutOff, Some(7)).await;
    let all = ["DELETE FROM audit WHERE shard = 7", "DELETE FROM audit_seal WHERE shard = 7"];
    expect(&all, Kind::CutOff, Some(1)).await;
}

#[tokio::test]
async fn two_rows_that_changed_places_are_altered() {
    // In three steps, past the unique index.
    let steps = [
        "UPDATE audit SET seq = -1 WHERE shard = 7 AND seq = (SELECT seq FROM audit_seal WHERE shard = 7 AND number = 5)",
        "UPDATE audit SET seq = (SELECT seq FROM audit_seal WHERE shard = 7 AND number = 5)
         WHERE shard = 7 AND seq = (SELECT seq FROM audit_seal WHERE shard = 7 AND number = 8)",
        "UPDATE audit SET seq = (SELECT seq FROM audit_seal WHERE shard = 7 AND number = 8) WHERE shard = 7 AND seq = -1",
    ];
    expect(&steps, Kind::Altered, Some(5)).await;
}

#[tokio::test]
async fn a_row_put_among_sealed_ones_is_inserted() {
    let insert =
        "INSERT INTO audit SELECT shard, epoch, seq - 1, 'user:eve', action, target_kind, target_id, correlation_id,
                  metadata, at FROM audit JOIN audit_seal USING (shard, epoch, seq) WHERE shard = 7 AND number = 4";
    expect(&[insert], Kind::Inserted, None).await;
    let twice =
        "INSERT INTO audit SELECT shard, epoch, seq, 'user:eve', action, target_kind, target_id, correlation_id,
                 metadata, at + interval '1 second' FROM audit JOIN audit_seal USING (shard, epoch, seq)
                 WHERE shard = 7 AND number = 4";
    let (world, _, _) = sealed().await;
    tamper(&world, &[twice]).await;
    let finding = only_finding(&world, &[]).await;
    assert_eq!((finding.shard, finding.kind), (SHARD, Kind::Altered), "{finding:?}");
}

#[tokio::test]
async fn a_newest_head_that_is_gone_is_missed() {
    expect(&["DELETE FROM audit_head WHERE shard = 7 AND number = 10"], Kind::HeadRemoved, Some(10)).await;
    expect(&["DELETE FROM audit_head WHERE shard = 7"], Kind::HeadRemoved, Some(10)).await;
}

#[tokio::test]
async fn a_head_that_another_key_signed_is_told() {
    expect(
        &["UPDATE audit_head SET signature = decode(repeat('00', 64), 'hex') WHERE shard = 7 AND number = 4"],
        Kind::HeadSignature,
        Some(4),
    )
    .await;
    expect(&["UPDATE audit_head SET key_id = 'mine' WHERE shard = 7 AND number = 10"], Kind::HeadSignature, Some(10))
        .await;
}

/// Rows, seals and head are put back as they once were: nothing inside the database contradicts. A head kept elsewhere does.
#[tokio::test]
async fn an_older_state_put_back_as_a_whole_shows_by_a_head_kept_elsewhere_and_stops_the_sealer() {
    let (world, mut sealer, heads) = sealed().await;
    tamper(&world, &[
        "DELETE FROM audit WHERE (shard, epoch, seq) IN (SELECT shard, epoch, seq FROM audit_seal WHERE shard = 7 AND number > 4)",
        "DELETE FROM audit_seal WHERE shard = 7 AND number > 4",
        "DELETE FROM audit_head WHERE shard = 7 AND number > 4",
    ])
    .await;
    assert_eq!(verified_with(&world, &[]).await.findings, [], "the database alone does not know");
    let finding = only_finding(&world, &heads).await;
    assert_eq!((finding.shard, finding.kind, finding.number), (SHARD, Kind::CutOff, Some(5)), "{finding:?}");

    // Neither the one that sealed it goes on from there, nor another that was told of the head.
    rows(&world, 20..21).await;
    let turn = sealer.turn(&terms(1), Utc::now()).await.unwrap();
    assert_eq!((turn.sealed, turn.broken.len(), turn.broken[0].shard), (0, 1, SHARD), "{turn:?}");
    let mut other = self::sealer(&world);
    heads.iter().for_each(|head| other.learn(head));
    assert_eq!(other.turn(&terms(1), Utc::now()).await.unwrap().broken.len(), 1);

    // One that knows nothing does, and the fork shows: the head of 10 was signed over other rows.
    let mut ignorant = self::sealer(&world);
    rows(&world, 21..30).await;
    seal(&mut ignorant).await;
    assert_eq!(verified_with(&world, &[]).await.findings, []);
    let finding = only_finding(&world, &heads).await;
    assert_eq!((finding.shard, finding.kind, finding.number), (SHARD, Kind::Altered, Some(10)), "{finding:?}");
}

/// The algorithm is no secret: whoever rewrites a row can compute the seals anew. The signed heads stay.
#[tokio::test]
async fn seals_that_were_computed_anew_meet_the_signed_head() {
    let (world, _, _) = sealed().await;
    tamper(&world, &["UPDATE audit SET actor = 'user:eve' WHERE (shard, epoch, seq) = (SELECT shard, epoch, seq FROM audit_seal WHERE shard = 7 AND number = 6)"]).await;
    // The forger's own run, with a key of his own, over an empty seal table.
    let saved = sqlx::query("CREATE TABLE honest AS SELECT * FROM audit_head").execute(world.pool()).await;
    saved.unwrap();
    tamper(&world, &["DELETE FROM audit_seal", "DELETE FROM audit_head"]).await;
    let mut forger = Sealer::new(world.pool().clone(), world.me, AuditKey::new(SigningKey::from_bytes(&[66; 32])));
    seal(&mut forger).await;
    assert_eq!(only_or_all(&world).await, Kind::HeadSignature, "his key is not ours");
    tamper(&world, &["DELETE FROM audit_head", "INSERT INTO audit_head SELECT * FROM honest"]).await;
    let finding = only_finding(&world, &[]).await;
    assert_eq!((finding.shard, finding.kind, finding.number), (SHARD, Kind::Altered, Some(10)), "{finding:?}");
}

async fn only_or_all(world: &World) -> Kind {
    let report = verified_with(world, &[]).await;
    assert_eq!(report.findings.len(), 2, "both shards: {report:?}");
    report.findings[0].kind
}

#[tokio::test]
async fn a_row_that_nobody_seals_is_told_after_a_while() {
    let world = World::new().await;
    let old = Commit { at: Utc::now() - TimeDelta::seconds(30), ..nth(0) };
    assert_eq!(world.commit(&old).await, Outcome::Applied);
    let finding = only_finding(&world, &[]).await;
    assert_eq!((finding.shard, finding.kind), (SHARD, Kind::UnsealedTooLong));
    seal(&mut sealer(&world)).await;
    assert_eq!(verified_with(&world, &[]).await.findings, []);
}

/// A sealer that is killed leaves a whole batch or nothing, and the next one goes on.
#[tokio::test]
async fn a_sealer_killed_in_the_middle_leaves_no_gap() {
    let world = World::new().await;
    rows(&world, 0..20).await;
    for _ in 0..20 {
        let mut victim = sealer(&world);
        let pool = world.pool().clone();
        let turn = tokio::spawn(async move { victim.turn(&terms(1), Utc::now()).await.map(drop) });
        tokio::time::sleep(std::time::Duration::from_millis(rand::random_range(0..12))).await;
        turn.abort();
        let _ = turn.await;
        // What it still held ends with its connection.
        sqlx::query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND state = 'idle in transaction' AND datname = current_database()")
            .execute(&pool)
            .await
            .unwrap();
        let n = world.count("audit").await;
        rows(&world, u32::try_from(n).unwrap()..u32::try_from(n).unwrap() + 2).await;
    }
    seal(&mut sealer(&world)).await;
    let report = verified_with(&world, &[]).await;
    assert_eq!((report.findings.len(), report.unsealed), (0, 0), "{report:?}");
    assert_eq!(report.verified, 60);
}

#[tokio::test]
async fn an_old_owner_seals_nothing_after_a_takeover_and_the_new_one_goes_on() {
    let (world, mut old, _) = sealed().await;
    rows(&world, 10..12).await;
    let heir = MemberId(Uuid::new_v4());
    let mine: Vec<_> = terms(1);
    world.cluster().hand_over(world.me, Some(heir), &mine).await.unwrap();
    let turn = old.turn(&terms(1), Utc::now()).await.unwrap();
    assert_eq!((turn.sealed, turn.waited, turn.broken.len()), (0, 2, 0), "fenced: {turn:?}");
    // Nor under the heir's epoch: it is not the owner.
    assert_eq!(old.turn(&terms(2), Utc::now()).await.unwrap().sealed, 0);
    let mut new = Sealer::new(world.pool().clone(), heir, key());
    let turn = new.turn(&terms(2), Utc::now()).await.unwrap();
    assert_eq!((turn.sealed, turn.broken.len()), (2, 0), "{turn:?}");
    let report = verified_with(&world, &[]).await;
    assert_eq!((report.findings.len(), report.verified), (0, 13), "{report:?}");
}

/// Two owners in turn seal while a third party commits; the takeover comes wherever it comes.
#[tokio::test]
async fn a_takeover_in_the_middle_of_sealing_forks_nothing() {
    let world = World::new().await;
    rows(&world, 0..50).await;
    let heir = MemberId(Uuid::new_v4());
    let mut old = sealer(&world);
    let sealing = tokio::spawn(async move {
        for _ in 0..20 {
            old.turn(&terms(1), Utc::now()).await.unwrap();
        }
    });
    world.cluster().hand_over(world.me, Some(heir), &terms(1)).await.unwrap();
    let mut new = Sealer::new(world.pool().clone(), heir, key());
    for _ in 0..5 {
        assert_eq!(new.turn(&terms(2), Utc::now()).await.unwrap().broken, []);
    }
    sealing.await.unwrap();
    let report = verified_with(&world, &[]).await;
    assert_eq!((report.findings.len(), report.verified), (0, 50), "{report:?}");
}

#[tokio::test]
async fn audit_rows_cannot_be_changed_deleted_or_emptied() {
    let (world, _, _) = sealed().await;
    for statement in [
        "UPDATE audit SET actor = 'user:eve'",
        "DELETE FROM audit",
        "TRUNCATE audit",
        "UPDATE audit_seal SET hash = hash",
        "UPDATE audit_head SET hash = hash",
    ] {
        let error = sqlx::query(statement).execute(world.pool()).await.unwrap_err().to_string();
        assert!(error.contains("never changed or deleted"), "{statement}: {error}");
    }
    let partitions: Vec<String> =
        sqlx::query_scalar("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'audit'::regclass")
            .fetch_all(world.pool())
            .await
            .unwrap();
    assert!(partitions.len() >= 4, "{partitions:?}");
    for partition in partitions {
        for statement in [format!("DELETE FROM {partition}"), format!("TRUNCATE {partition}")] {
            let result = sqlx::query(sqlx::AssertSqlSafe(statement.clone())).execute(world.pool()).await;
            let empty = statement.starts_with("DELETE") && result.as_ref().is_ok_and(|done| done.rows_affected() == 0);
            assert!(result.is_err() || empty, "{statement} was carried out");
        }
    }
    assert_eq!(world.count("audit").await, 11);
}

/// Rows of an old month, in chain order mixed with two of a later month, as it happens at a month's edge.
#[tokio::test]
async fn a_month_that_was_dropped_does_not_break_the_chain() {
    let world = World::new().await;
    for (partition, from, to) in
        [("audit_2024_01", "2024-01-01", "2024-02-01"), ("audit_2024_02", "2024-02-01", "2024-03-01")]
    {
        let make =
            format!("CREATE TABLE {partition} PARTITION OF audit FOR VALUES FROM ('{from} UTC') TO ('{to} UTC')");
        sqlx::query(sqlx::AssertSqlSafe(make)).execute(world.pool()).await.unwrap();
    }
    let at = |text: &str| text.parse::<chrono::DateTime<Utc>>().unwrap();
    let (january, february) = (at("2024-01-31T23:59:59Z"), at("2024-02-01T00:00:01Z"));
    for (n, at) in [january, january, february, january, february, Utc::now()].into_iter().enumerate() {
        let n = u32::try_from(n).unwrap();
        assert_eq!(world.commit(&Commit { at, ..nth(n) }).await, Outcome::Applied);
    }
    assert!(forget(world.pool(), &key(), "2024-01", Utc::now()).await.unwrap_err().to_string().contains("not sealed"));
    let mut sealer = sealer(&world);
    seal(&mut sealer).await;
    for bad in ["2024-1", "2024-13", "x", "", "2024-01-01", "2023-12"] {
        assert!(forget(world.pool(), &key(), bad, Utc::now()).await.is_err(), "{bad}");
    }
    let running = Utc::now().format("%Y-%m").to_string();
    assert!(forget(world.pool(), &key(), &running, Utc::now()).await.unwrap_err().to_string().contains("not over"));

    assert_eq!(forget(world.pool(), &key(), "2024-01", Utc::now()).await.unwrap().shards, 1);
    assert_eq!(world.count("audit").await, 3);
    let report = verified_with(&world, &[]).await;
    assert_eq!((report.findings.len(), report.verified), (0, 3), "{report:?}");
    rows(&world, 6..8).await;
    seal(&mut sealer).await;
    assert_eq!(verified_with(&world, &[]).await.findings, []);

    // The row that stayed before the checkpoint is guarded by it.
    for (change, kind) in [
        ("UPDATE audit SET actor = 'user:eve' WHERE at = '2024-02-01T00:00:01Z'", Kind::Altered),
        ("DELETE FROM audit WHERE at = '2024-02-01T00:00:01Z' AND seq < 9", Kind::Removed),
        ("UPDATE audit_checkpoint SET hash = decode(repeat('00', 32), 'hex')", Kind::HeadSignature),
    ] {
        let mut session = world.pool().begin().await.unwrap();
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
        assert_eq!(only_finding(&world, &[]).await.kind, kind, "{change}");
        tamper(&world, &["DELETE FROM audit", "INSERT INTO audit SELECT * FROM kept_audit"]).await;
        tamper(&world, &["DELETE FROM audit_checkpoint", "INSERT INTO audit_checkpoint SELECT * FROM kept_checkpoint"])
            .await;
        assert_eq!(verified_with(&world, &[]).await.findings, []);
    }

    assert_eq!(forget(world.pool(), &key(), "2024-02", Utc::now()).await.unwrap().shards, 1);
    let report = verified_with(&world, &[]).await;
    assert_eq!((report.findings.len(), report.verified), (0, 3), "{report:?}");
}

/// What the API shows of a row: its place in the chain, where it is sealed.
#[tokio::test]
async fn the_log_tells_a_row_s_number_and_hash_once_it_is_sealed() {
    let (world, _, _) = sealed().await;
    rows(&world, 10..11).await;
    let filter = persistence::read::AuditFilter::default();
    let page = world.reads().audit(&filter, None, 100).await.unwrap();
    let unsealed = page.items.iter().filter(|row| row.seal.is_none()).count();
    assert_eq!((page.items.len(), unsealed), (12, 1));
    let row = sqlx::query("SELECT epoch, seq, hash FROM audit_seal WHERE shard = 7 AND number = 9")
        .fetch_one(world.pool())
        .await
        .unwrap();
    let nine = page.items.iter().find(|item| item.seal.as_ref().is_some_and(|seal| seal.number == 9)).unwrap();
    assert_eq!(nine.place.seq, row.get::<i64, _>("seq"));
    assert_eq!(nine.seal.as_ref().unwrap().hash.to_vec(), row.get::<Vec<u8>, _>("hash"));
}
