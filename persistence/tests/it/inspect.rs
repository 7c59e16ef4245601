//! What is read to be checked and counted.

use crate::world::{World, bare, create, next};
use chrono::{DurationRound as _, TimeDelta};
use domain::commit::{Commit, Timer};
use domain::{Kind, Shard};
use persistence::read::Inspected;
use sqlx::Executor as _;
use std::time::Duration;

fn shards(of: &[Commit]) -> Vec<Shard> {
    of.iter().map(|commit| commit.shard).collect()
}

#[tokio::test]
async fn entities_are_inspected_with_their_record_and_their_end_page_by_page_in_one_snapshot() {
    let world = World::new().await;
    let first = create(1);
    let endless = bare(create(2));
    let made = [first.clone(), endless.clone(), create(3), create(4)];
    world.commit_all(&made).await;
    world.commit(&Commit { timer: first.timer.clone(), ..next(&first) }).await;

    let reads = world.reads();
    let mut inspection = reads.inspect().await.unwrap();
    let mine = shards(&made[..3]);
    let page = inspection.entities(Kind::Sku, &mine, None, 2).await.unwrap();
    let rest = inspection.entities(Kind::Sku, &mine, page.next, 2).await.unwrap();
    let seen: Vec<_> = page.items.iter().chain(&rest.items).collect();
    assert_eq!(
        seen.iter().map(|row| row.entity).collect::<Vec<_>>(),
        made[..3].iter().map(|it| it.entity).collect::<Vec<_>>()
    );
    assert_eq!(rest.next, None);
    let versions = |row: &Inspected| row.recorded.iter().map(|step| step.version).collect::<Vec<_>>();
    assert_eq!((seen[0].version, versions(seen[0]), seen[0].deadline_is_indexed), (2, vec![1, 2], true));
    assert_eq!((seen[1].version, versions(seen[1]), seen[1].deadline_is_indexed), (1, vec![1], false));

    // What happens meanwhile is of another instant.
    world.pool().execute("DELETE FROM entity").await.unwrap();
    let ids = [first.entity.id, made[3].entity.id];
    assert_eq!(inspection.bodies(Kind::Sku, &ids).await.unwrap().len(), 2);
    assert_eq!(inspection.bodies(Kind::Node, &ids).await.unwrap().len(), 0);
}

#[tokio::test]
async fn a_transition_is_inspected_with_who_did_it_and_whether_that_was_audited() {
    let world = World::new().await;
    let now = chrono::Utc::now().duration_trunc(TimeDelta::microseconds(1)).unwrap();
    let audited = Commit { at: now, ..create(1) };
    let unseen = Commit { audit: Vec::new(), at: now, why: "refused: no".to_owned(), ..next(&audited) };
    let old = Commit { at: now - TimeDelta::hours(2), ..create(2) };
    assert!(!audited.audit.is_empty() && !old.audit.is_empty());
    for commit in [&audited, &unseen, &old] {
        world.commit(commit).await;
    }
    let mut inspection = world.reads().inspect().await.unwrap();
    let rows = inspection.entities(Kind::Sku, &shards(&[audited.clone(), old.clone()]), None, 9).await.unwrap().items;
    let of = |commit: &Commit| rows.iter().find(|row| row.entity == commit.entity).unwrap().recorded.clone();
    let steps = of(&audited);
    assert_eq!((steps[0].actor.as_str(), steps[0].audited, steps[0].refused), ("user:ann", Some(true), false));
    assert_eq!((steps[0].command.as_str(), steps[0].to_state.as_str()), (audited.command_name, audited.to_state));
    assert_eq!((steps[1].audited, steps[1].refused), (Some(false), true));
    assert_eq!(of(&old)[0].audited, None, "nobody looks so far back");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inspection_that_nobody_waits_for_leaves_no_connection_in_a_transaction() {
    let world = World::new().await;
    let reads = world.reads();
    for _ in 0..300 {
        let reads = reads.clone();
        let looking = tokio::spawn(async move { reads.inspect().await.map(drop) });
        tokio::time::sleep(Duration::from_micros(rand::random_range(0..800))).await;
        looking.abort();
        let _ = looking.await;
    }
    let left = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%' AND datname = current_database()";
    for _ in 0..100 {
        if sqlx::query_scalar::<_, i64>(left).fetch_one(world.pool()).await.unwrap() == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("a connection is in a transaction that nobody ends");
}

/// An entity that must not be as it is for longer than so many seconds from here.
fn ending(n: u32, seconds: i64) -> Commit {
    let end = chrono::Utc::now() + chrono::TimeDelta::seconds(seconds);
    let timer = Timer { wake_at: end, deadline_at: Some(end), reason: "an approval".to_owned() };
    Commit { timer: Some(timer), ..create(n) }
}

#[tokio::test]
async fn what_waits_is_counted_in_the_shards_that_are_asked_for() {
    let world = World::new().await;
    let made = [ending(1, -5), ending(2, 600), ending(3, 600)];
    world.commit_all(&made).await;
    world
        .pool()
        .execute("UPDATE outbox SET written_at = written_at - interval '1 minute' WHERE shard = 3")
        .await
        .unwrap();
    world
        .pool()
        .execute(
            "WITH waits AS (UPDATE deadline SET kind = 'allocation' WHERE shard = 2 RETURNING entity)
             UPDATE entity SET kind = 'allocation', state = 'requested' FROM waits WHERE entity.id = waits.entity",
        )
        .await
        .unwrap();

    let reads = world.reads();
    let (all, mine) = (shards(&made), shards(&made[..1]));
    let standing = reads.standing(&all).await.unwrap();
    assert_eq!((standing.requested, standing.overdue.get(&Kind::Sku)), (1, Some(&1)));
    assert_eq!(reads.standing(&mine).await.unwrap().requested, 0);
    let pending = reads.pending(&all).await.unwrap();
    assert!(pending.rows == 3 && pending.oldest >= Duration::from_secs(60), "{pending:?}");
    let pending = reads.pending(&mine).await.unwrap();
    assert!(pending.rows == 1 && pending.oldest < Duration::from_secs(60), "{pending:?}");
    assert_eq!(reads.pending(&[]).await.unwrap().rows, 0);
}
