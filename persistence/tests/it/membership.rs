//! Members that are alive, and owners of shards, as the database has them.

use domain::commit::Epoch;
use domain::id::{EntityKind, EntityRef, MemberId, Shard};
use domain::state_machine::Timestamp;
use local_servers::test_database::TestDatabase;
use persistence::Cluster;
use persistence::membership::Member;
use std::collections::BTreeMap;
use std::time::Duration;
use uuid::Uuid;

/// Longer than a test is interrupted on a busy machine.
const HOUR: Duration = Duration::from_secs(3600);

/// No member has been watched.
static UNWATCHED: BTreeMap<MemberId, Timestamp> = BTreeMap::new();

/// Each member's last heartbeat.
async fn heartbeats(cluster: &Cluster) -> BTreeMap<MemberId, Timestamp> {
    cluster.members().await.unwrap().into_iter().map(|member| (member.member.id, member.heartbeat_at)).collect()
}

async fn cluster() -> (TestDatabase, Cluster) {
    let db = TestDatabase::fresh().await;
    let cluster = Cluster::new(db.pool.clone());
    (db, cluster)
}

fn member(name: &str) -> Member {
    let started_at = crate::test_store::at(0);
    Member {
        id: MemberId(Uuid::new_v4()),
        name: name.to_owned(),
        started_at,
        details: serde_json::json!({"version": "1"}),
    }
}

#[tokio::test]
async fn member_is_alive_while_it_sends_heartbeats() {
    let (db, cluster) = cluster().await;
    let (ann, bob) = (member("ann"), member("bob"));
    cluster.heartbeat(&ann).await.unwrap();
    cluster.heartbeat(&ann).await.unwrap();
    cluster.heartbeat(&bob).await.unwrap();
    sqlx::query("UPDATE member SET beat_at = beat_at - interval '5 hours' WHERE name = 'bob'")
        .execute(&db.pool)
        .await
        .unwrap();
    let living = cluster.alive(HOUR).await.unwrap();
    assert_eq!(living.len(), 1, "{living:?}");
    assert_eq!(living[0].member, ann);
    assert!(living[0].silent_for < HOUR);
    assert_eq!(cluster.alive(9 * HOUR).await.unwrap().len(), 2);
    assert_eq!(cluster.remove_silent(HOUR).await.unwrap(), 1);
    cluster.remove(ann.id).await.unwrap();
    assert_eq!(cluster.alive(9 * HOUR).await.unwrap(), []);
}

#[tokio::test]
async fn members_are_read_without_a_long_detail() {
    let (_db, cluster) = cluster().await;
    let details = |details| Member { details, ..member("ann") };
    cluster.heartbeat(&details(serde_json::json!({"version": "1", "received": ["bob"]}))).await.unwrap();
    cluster.heartbeat(&details(serde_json::Value::Null)).await.unwrap();
    let read = cluster.members_without("received").await.unwrap();
    let mut details: Vec<_> = read.into_iter().map(|member| member.member.details.to_string()).collect();
    details.sort_unstable();
    assert_eq!(details, ["null", r#"{"version":"1"}"#]);
}

#[tokio::test]
async fn concurrent_takeovers_of_a_shard_have_one_winner() {
    let (_db, cluster) = cluster().await;
    let seen = cluster.shards().await.unwrap();
    assert_eq!(seen.len(), 256);
    assert!(seen.iter().all(|shard| shard.owner.is_none() && shard.epoch == Epoch(0)));
    let takers: Vec<MemberId> = (0..6).map(|_| MemberId(Uuid::new_v4())).collect();
    let won = futures::future::join_all(takers.iter().map(|me| cluster.take_over(*me, &seen, &UNWATCHED))).await;
    let won: usize = won.into_iter().map(|won| won.unwrap().len()).sum();
    assert_eq!(won, 256);
    assert!(cluster.shards().await.unwrap().iter().all(|shard| shard.epoch == Epoch(1) && shard.owner.is_some()));
}

#[tokio::test]
async fn owner_with_a_newer_heartbeat_loses_no_shard() {
    let (_db, cluster) = cluster().await;
    let (ann, bob) = (member("ann"), member("bob"));
    cluster.heartbeat(&ann).await.unwrap();
    let free = cluster.shards().await.unwrap();
    assert_eq!(cluster.take_over(ann.id, &free[..2], &UNWATCHED).await.unwrap().len(), 2);
    let seen = cluster.shards().await.unwrap();
    assert_eq!(cluster.take_over(bob.id, &seen[..2], &UNWATCHED).await.unwrap().len(), 0, "no member has watched ann");
    let watched = heartbeats(&cluster).await;
    cluster.heartbeat(&ann).await.unwrap();
    assert_eq!(cluster.take_over(bob.id, &seen[..2], &watched).await.unwrap().len(), 0, "ann has beaten since");
    let watched = heartbeats(&cluster).await;
    assert_eq!(cluster.take_over(bob.id, &free[..2], &watched).await.unwrap().len(), 0, "seen before ann had it");
    let won = cluster.take_over(bob.id, &seen[..2], &watched).await.unwrap();
    assert_eq!(won.into_iter().collect::<Vec<_>>(), [(Shard(0), Epoch(2)), (Shard(1), Epoch(2))]);
}

#[tokio::test]
async fn silent_member_without_shards_is_deleted() {
    let (db, cluster) = cluster().await;
    let (ann, bob) = (member("ann"), member("bob"));
    cluster.heartbeat(&ann).await.unwrap();
    cluster.heartbeat(&bob).await.unwrap();
    cluster.take_over(ann.id, &cluster.shards().await.unwrap()[..1], &UNWATCHED).await.unwrap();
    sqlx::query("UPDATE member SET beat_at = beat_at - interval '5 hours'").execute(&db.pool).await.unwrap();
    assert_eq!(cluster.remove_silent(HOUR).await.unwrap(), 1, "ann owns a shard");
}

#[tokio::test]
async fn a_restart_under_the_same_name_frees_the_shards_of_an_ended_process_at_once() {
    let (_db, cluster) = cluster().await;
    let (before, bob) = (member("ann"), member("bob"));
    cluster.join(&before, |_| true).await.unwrap();
    cluster.join(&bob, |_| true).await.unwrap();
    cluster.take_over(before.id, &cluster.shards().await.unwrap()[..2], &UNWATCHED).await.unwrap();
    let seen = cluster.shards().await.unwrap();
    let after = member("ann");
    cluster.join(&after, |ended| ended.id == before.id).await.unwrap();
    let living: Vec<_> = cluster.alive(HOUR).await.unwrap().into_iter().map(|it| it.member.id).collect();
    assert!(living.len() == 2 && living.contains(&after.id) && living.contains(&bob.id), "{living:?}");
    assert_eq!(cluster.take_over(bob.id, &seen[..2], &UNWATCHED).await.unwrap().len(), 2);
}

#[tokio::test]
async fn start_under_the_name_of_a_live_member_takes_no_shards() {
    let (_db, cluster) = cluster().await;
    let (live, second) = (member("ann"), member("ann"));
    cluster.join(&live, |_| true).await.unwrap();
    cluster.take_over(live.id, &cluster.shards().await.unwrap()[..2], &UNWATCHED).await.unwrap();
    let seen = cluster.shards().await.unwrap();
    cluster.join(&second, |_| false).await.unwrap();
    assert_eq!(cluster.members().await.unwrap().len(), 2);
    assert!(cluster.take_over(second.id, &seen[..2], &UNWATCHED).await.unwrap().is_empty());
}

#[tokio::test]
async fn handover_raises_the_epoch_and_requires_the_owner() {
    let (_db, cluster) = cluster().await;
    let (ann, bob) = (member("ann").id, member("bob").id);
    let free = cluster.shards().await.unwrap();
    cluster.take_over(ann, &free[..3], &UNWATCHED).await.unwrap();
    let mine = [(Shard(0), Epoch(1)), (Shard(1), Epoch(0)), (Shard(9), Epoch(0))];
    assert!(cluster.handover(bob, Some(bob), &mine).await.unwrap().is_empty());
    let given = cluster.handover(ann, Some(bob), &mine).await.unwrap();
    assert_eq!(given.into_iter().collect::<Vec<_>>(), [(Shard(0), Epoch(2))]);
    let released = cluster.handover(ann, None, &[(Shard(2), Epoch(1))]).await.unwrap();
    assert_eq!(released[&Shard(2)], Epoch(2));
    let shards = cluster.shards().await.unwrap();
    assert_eq!((shards[0].owner, shards[1].owner, shards[2].owner), (Some(bob), Some(ann), None));
}

#[tokio::test]
async fn new_incarnation_raises_every_epoch_and_frees_every_shard() {
    let (_db, cluster) = cluster().await;
    let ann = member("ann").id;
    cluster.take_over(ann, &cluster.shards().await.unwrap(), &UNWATCHED).await.unwrap();
    assert_eq!(cluster.incarnation().await.unwrap(), 0);
    let first = cluster.begin_incarnation(0).await.unwrap().position.incarnation;
    assert_eq!(cluster.incarnation().await.unwrap(), first);
    let shards = cluster.shards().await.unwrap();
    assert!(shards.iter().all(|shard| shard.owner.is_none() && shard.epoch == Epoch(first << 32)));
    let second = cluster.begin_incarnation(first + 5).await.unwrap().position.incarnation;
    assert_eq!(second, first + 6, "above what is known elsewhere: of a restore of the same backup in the same minute");
    let won = cluster.take_over(ann, &cluster.shards().await.unwrap(), &UNWATCHED).await.unwrap();
    assert!(won.values().all(|epoch| *epoch > Epoch(first << 32)));
}

#[tokio::test]
async fn parked_entity_is_known_to_every_owner_of_its_shard_until_it_is_restarted() {
    let (db, cluster) = cluster().await;
    let sick = EntityRef { kind: EntityKind::Node, id: Uuid::new_v4() };
    cluster.park(sick, Shard(3), "cannot be read").await.unwrap();
    cluster.park(sick, Shard(3), "still cannot\0 be read").await.unwrap();
    sqlx::query("INSERT INTO parked (entity, kind, shard, reason) VALUES (gen_random_uuid(), 'of_tomorrow', 3, '')")
        .execute(&db.pool)
        .await
        .unwrap();
    assert_eq!(cluster.parked(&[Shard(1), Shard(2)]).await.unwrap(), []);
    assert_eq!(cluster.parked(&[Shard(2), Shard(3)]).await.unwrap(), [(sick, "still cannot be read".to_owned())]);
    cluster.unpark(sick).await.unwrap();
    assert_eq!(cluster.parked(&[Shard(3)]).await.unwrap(), []);
}
