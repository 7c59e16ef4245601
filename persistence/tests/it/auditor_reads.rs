//! Reads of the auditor and of metrics.

use crate::test_store::{TestStore, bare, create, next};
use chrono::{DurationRound as _, TimeDelta};
use domain::commit::{Commit, Timer};
use domain::{EntityKind, Shard};
use persistence::queries::InspectedEntity;
use sqlx::Executor as _;
use std::time::Duration;

fn shards(of: &[Commit]) -> Vec<Shard> {
    of.iter().map(|commit| commit.shard).collect()
}

#[tokio::test]
async fn entities_are_inspected_with_history_and_deadline_in_one_snapshot() {
    let store = TestStore::new().await;
    let first = create(1);
    let endless = bare(create(2));
    let made = [first.clone(), endless.clone(), create(3), create(4)];
    store.commit_all(&made).await;
    store.commit(&Commit { timer: first.timer.clone(), ..next(&first) }).await;

    let reads = store.reads();
    let mut inspection = reads.inspect().await.unwrap();
    let mine = shards(&made[..3]);
    let page = inspection.entities(EntityKind::Sku, &mine, None, 2).await.unwrap();
    let rest = inspection.entities(EntityKind::Sku, &mine, page.next, 2).await.unwrap();
    let seen: Vec<_> = page.items.iter().chain(&rest.items).collect();
    assert_eq!(
        seen.iter().map(|row| row.entity).collect::<Vec<_>>(),
        made[..3].iter().map(|it| it.entity).collect::<Vec<_>>()
    );
    assert_eq!(rest.next, None);
    let versions = |row: &InspectedEntity| row.recorded.iter().map(|step| step.version).collect::<Vec<_>>();
    assert_eq!((seen[0].version, versions(seen[0]), seen[0].deadline_is_indexed), (2, vec![1, 2], true));
    assert_eq!((seen[1].version, versions(seen[1]), seen[1].deadline_is_indexed), (1, vec![1], false));

    // A later commit is not in the snapshot.
    store.pool().execute("DELETE FROM entity").await.unwrap();
    let ids = [first.entity.id, made[3].entity.id];
    assert_eq!(inspection.bodies(EntityKind::Sku, &ids).await.unwrap().len(), 2);
    assert_eq!(inspection.bodies(EntityKind::Node, &ids).await.unwrap().len(), 0);
}

#[tokio::test]
async fn inspected_transition_has_its_actor_and_whether_it_was_audited() {
    let store = TestStore::new().await;
    let now = chrono::Utc::now().duration_trunc(TimeDelta::microseconds(1)).unwrap();
    let audited = Commit { at: now, ..create(1) };
    let unseen = Commit { audit: Vec::new(), at: now, why: "refused: no".to_owned(), ..next(&audited) };
    let old = Commit { at: now - TimeDelta::hours(2), ..create(2) };
    assert!(!audited.audit.is_empty() && !old.audit.is_empty());
    for commit in [&audited, &unseen, &old] {
        store.commit(commit).await;
    }
    let mut inspection = store.reads().inspect().await.unwrap();
    let rows =
        inspection.entities(EntityKind::Sku, &shards(&[audited.clone(), old.clone()]), None, 9).await.unwrap().items;
    let of = |commit: &Commit| rows.iter().find(|row| row.entity == commit.entity).unwrap().recorded.clone();
    let steps = of(&audited);
    assert_eq!((steps[0].actor.as_str(), steps[0].audited, steps[0].refused), ("user:ann", Some(true), false));
    assert_eq!((steps[0].command.as_str(), steps[0].to_state.as_str()), (audited.command_name, audited.to_state));
    assert_eq!((steps[1].audited, steps[1].refused), (Some(false), true));
    assert_eq!(of(&old)[0].audited, None, "it is older than the window");
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_inspection_leaves_no_connection_in_a_transaction() {
    let store = TestStore::new().await;
    let reads = store.reads();
    for _ in 0..300 {
        let reads = reads.clone();
        let looking = tokio::spawn(async move { reads.inspect().await.map(drop) });
        tokio::time::sleep(Duration::from_micros(rand::random_range(0..800))).await;
        looking.abort();
        let _ = looking.await;
    }
    let left = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%' AND datname = current_database()";
    for _ in 0..100 {
        if sqlx::query_scalar::<_, i64>(left).fetch_one(store.pool()).await.unwrap() == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("a connection is left in a transaction");
}

/// An entity with a deadline so many seconds from now.
fn ending(n: u32, seconds: i64) -> Commit {
    let end = chrono::Utc::now() + chrono::TimeDelta::seconds(seconds);
    let timer = Timer { wake_at: end, deadline_at: Some(end), reason: "an approval".to_owned() };
    Commit { timer: Some(timer), ..create(n) }
}

#[tokio::test]
async fn waiting_entities_are_counted_in_the_requested_shards() {
    let store = TestStore::new().await;
    let made = [ending(1, -5), ending(2, 600), ending(3, 600)];
    store.commit_all(&made).await;
    store
        .pool()
        .execute("UPDATE outbox SET written_at = written_at - interval '1 minute' WHERE shard = 3")
        .await
        .unwrap();
    store
        .pool()
        .execute(
            "WITH waits AS (UPDATE deadline SET kind = 'allocation' WHERE shard = 2 RETURNING entity)
             UPDATE entity SET kind = 'allocation', state = 'requested' FROM waits WHERE entity.id = waits.entity",
        )
        .await
        .unwrap();

    let reads = store.reads();
    let (all, mine) = (shards(&made), shards(&made[..1]));
    let standing = reads.waiting_counts(&all).await.unwrap();
    assert_eq!((standing.requested, standing.overdue.get(&EntityKind::Sku)), (1, Some(&1)));
    assert_eq!(reads.waiting_counts(&mine).await.unwrap().requested, 0);
    let pending = reads.outbox_backlog(&all).await.unwrap();
    assert!(pending.rows == 3 && pending.oldest >= Duration::from_secs(60), "{pending:?}");
    let pending = reads.outbox_backlog(&mine).await.unwrap();
    assert!(pending.rows == 1 && pending.oldest < Duration::from_secs(60), "{pending:?}");
    assert_eq!(reads.outbox_backlog(&[]).await.unwrap().rows, 0);
}
