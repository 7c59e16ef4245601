//! What is read to be checked and counted.

use crate::world::{World, bare, create, next};
use domain::commit::{Commit, Timer};
use domain::{Kind, Shard};
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
    assert_eq!(
        (seen[0].version, seen[0].recorded.as_slice(), seen[0].deadline_is_indexed),
        (2, [1, 2].as_slice(), true)
    );
    assert_eq!((seen[1].version, seen[1].recorded.as_slice(), seen[1].deadline_is_indexed), (1, [1].as_slice(), false));

    // What happens meanwhile is of another instant.
    world.pool().execute("DELETE FROM entity").await.unwrap();
    let ids = [first.entity.id, made[3].entity.id];
    assert_eq!(inspection.bodies(Kind::Sku, &ids).await.unwrap().len(), 2);
    assert_eq!(inspection.bodies(Kind::Node, &ids).await.unwrap().len(), 0);
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
