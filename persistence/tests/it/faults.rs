//! Lost connections, killed servers, full queues: what is *not applied* was not written, and what is *unknown* may have been.

use crate::postgres::Database;
use crate::world::{World, create, next};
use domain::commit::{Commit, Outcome};
use futures::{FutureExt as _, poll};
use persistence::committer::CommitterMetrics;
use persistence::loader::{LANES, LoadError};
use persistence::{Committer, CommitterConfig, Loader};
use sqlx::postgres::{PgPool, PgPoolOptions, PgSslMode};
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::mpsc;

async fn applied_in_the_end(world: &World, commit: &Commit) {
    let began = Instant::now();
    loop {
        let outcome = world.commit(commit).await;
        if outcome == Outcome::Applied {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{outcome:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_terminated_backend_leaves_the_batch_unknown_and_the_committer_alive() {
    let world = World::new().await;
    assert_eq!(world.commit(&create(1)).await, Outcome::Applied);
    let holder = world.hold_shards().await;
    let lost = create(3);
    let terminate = async {
        world.until_blocked(1).await;
        sqlx::query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE application_name LIKE '%committer%' AND wait_event_type = 'Lock' AND datname = current_database()",
        )
        .execute(world.pool())
        .await
        .unwrap();
    };
    let (outcome, ()) = futures::future::join(world.commit(&lost), terminate).await;
    assert!(matches!(outcome, Outcome::Unknown { .. }), "{outcome:?}");
    holder.rollback().await.unwrap();
    assert_eq!(world.reads().entity(lost.entity).await.unwrap(), None);
    assert_eq!(world.commit(&lost).await, Outcome::Applied);
}

#[tokio::test]
async fn what_is_read_to_be_decided_on_waits_for_what_is_under_way() {
    let world = World::new().await;
    let (first, other) = (create(1), create(257));
    assert_eq!(world.commit_all(&[first.clone(), other.clone()]).await, [Outcome::Applied, Outcome::Applied]);
    let certain = |commit: &Commit| {
        let (committer, entity, shard) = (world.committer.clone(), commit.entity.id, commit.shard);
        async move { committer.certain(entity, shard).await }
    };
    let holder = world.hold_shards().await;
    let sent = tokio::spawn({
        let (committer, next) = (world.committer.clone(), next(&first));
        async move { committer.commit(next).await }
    });
    world.until_blocked(1).await;
    assert!(certain(&other).await, "another entity of the shard has nothing under way");
    assert!(!certain(&first).await, "its fate is not decided");
    let waiting = tokio::spawn(certain(&first));
    holder.rollback().await.unwrap();
    assert!(waiting.await.unwrap());
    assert_eq!(world.reads().entity(first.entity).await.unwrap().unwrap().version, 2);
    assert_eq!(sent.await.unwrap(), Outcome::Applied);
}

#[tokio::test]
async fn a_server_killed_in_mid_commit_loses_nothing_that_was_acknowledged() {
    let world = World::with(Database::alone().await, |_| {}).await;
    let acknowledged: Vec<Commit> = (0..100).map(create).collect();
    assert!(world.commit_all(&acknowledged).await.iter().all(|outcome| *outcome == Outcome::Applied));

    let holder = world.hold_shards().await;
    let lost: Vec<Commit> = (100..140).map(create).collect();
    let kill = async {
        world.until_blocked(2).await;
        let server = Arc::clone(&world.db.server);
        tokio::task::spawn_blocking(move || server.kill()).await.unwrap();
    };
    let (outcomes, ()) = futures::future::join(world.commit_all(&lost), kill).await;
    drop(holder);
    assert!(outcomes.iter().any(|outcome| matches!(outcome, Outcome::Unknown { .. })), "{outcomes:?}");
    for outcome in &outcomes {
        assert!(matches!(outcome, Outcome::Unknown { .. } | Outcome::NotApplied { .. }), "{outcome:?}");
    }
    let down = world.commit(&create(500)).await;
    assert!(matches!(down, Outcome::NotApplied { .. }), "{down:?}");
    assert!(world.committer.workers().iter().any(|worker| !worker.connected && worker.last_error.is_some()));

    let server = Arc::clone(&world.db.server);
    tokio::task::spawn_blocking(move || server.run()).await.unwrap();
    applied_in_the_end(&world, &create(500)).await;
    applied_in_the_end(&world, &create(501)).await;
    for commit in &acknowledged {
        assert!(world.reads().entity(commit.entity).await.unwrap().is_some());
    }
    for commit in &lost {
        assert_eq!(world.reads().entity(commit.entity).await.unwrap(), None, "it was blocked, so it cannot be there");
    }
    assert_eq!(world.rows().await, [102; 6]);
}

/// Stands between the committer and the server, and can keep answers to itself.
struct Wire {
    port: u16,
    swallow: Arc<AtomicBool>,
}

impl Wire {
    async fn to(socket: PathBuf) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let swallow = Arc::new(AtomicBool::new(false));
        let swallowing = Arc::clone(&swallow);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = UnixStream::connect(&socket).await.unwrap().into_split();
                tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
                let swallowing = Arc::clone(&swallowing);
                tokio::spawn(async move {
                    let mut bytes = vec![0; 65_536];
                    while let Ok(n @ 1..) = from_server.read(&mut bytes).await {
                        if swallowing.load(Ordering::SeqCst) || to_client.write_all(&bytes[..n]).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { port, swallow }
    }

    fn pool(&self, db: &Database) -> PgPool {
        let options = db.pool.connect_options();
        let options = sqlx::postgres::PgConnectOptions::new_without_pgpass()
            .host("127.0.0.1")
            .port(self.port)
            .username("svc")
            .database(options.get_database().unwrap())
            .ssl_mode(PgSslMode::Disable);
        PgPoolOptions::new().connect_lazy_with(options)
    }
}

#[tokio::test]
async fn an_answer_lost_on_the_way_is_unknown_though_it_was_written() {
    let world = World::new().await;
    let wire = Wire::to(world.db.server.socket()).await;
    let metrics = CommitterMetrics::register(&prometheus::Registry::new()).unwrap();
    let mut config = CommitterConfig::new(world.me);
    config.statement_timeout = Duration::from_secs(1);
    let (publish, _published) = mpsc::channel(10);
    let committer = Committer::start(&wire.pool(&world.db), config, metrics, publish);
    let first = create(1);
    assert_eq!(committer.commit(first.clone()).await, Outcome::Applied);

    wire.swallow.store(true, Ordering::SeqCst);
    let outcome = committer.commit(next(&first)).await;
    assert!(matches!(outcome, Outcome::Unknown { .. }), "{outcome:?}");
    wire.swallow.store(false, Ordering::SeqCst);
    assert_eq!(world.reads().entity(first.entity).await.unwrap().unwrap().version, 2);

    // The same again is recognised, so the retry is safe.
    assert_eq!(committer.commit(next(&first)).await, Outcome::Conflict);
}

#[tokio::test]
async fn before_the_next_batch_the_lost_backend_is_ended() {
    let world = World::new().await;
    let wire = Wire::to(world.db.server.socket()).await;
    let metrics = CommitterMetrics::register(&prometheus::Registry::new()).unwrap();
    let mut config = CommitterConfig::new(world.me);
    config.statement_timeout = Duration::from_secs(30);
    let (publish, _published) = mpsc::channel(10);
    let committer = Committer::start(&wire.pool(&world.db), config, metrics, publish);
    assert_eq!(committer.commit(create(1)).await, Outcome::Applied);

    // The batch hangs at a lock in the server while its client is cut off: the proxy drops what comes, then the socket.
    let holder = world.hold_shards().await;
    wire.swallow.store(true, Ordering::SeqCst);
    let lost = create(3);
    let certain = committer.clone();
    let cut = async {
        world.until_blocked(1).await;
        // Any byte from the server ends the proxy's connection: a cancelled statement sends one.
        sqlx::query(
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity
             WHERE application_name LIKE '%committer%' AND wait_event_type = 'Lock' AND datname = current_database()",
        )
        .execute(world.pool())
        .await
        .unwrap();
    };
    let (outcome, ()) = futures::future::join(committer.commit(lost.clone()), cut).await;
    assert!(matches!(outcome, Outcome::Unknown { .. }), "{outcome:?}");
    wire.swallow.store(false, Ordering::SeqCst);
    // Nobody has to send another batch for it: the fate of the last one is found out.
    assert!(certain.certain(lost.entity.id, lost.shard).await);
    assert!(committer.workers().iter().all(|worker| !worker.in_doubt));
    holder.rollback().await.unwrap();
    assert_eq!(committer.commit(lost).await, Outcome::Applied);
    let backends: i64 = sqlx::query_scalar(
        "SELECT count(DISTINCT application_name) - count(*) FROM pg_stat_activity
         WHERE application_name LIKE 'gpuaas committer%' AND client_addr IS NOT NULL AND datname = current_database()",
    )
    .fetch_one(world.pool())
    .await
    .unwrap();
    assert_eq!(backends, 0, "no worker has two backends");
}

#[tokio::test]
async fn a_statement_that_the_server_gives_up_was_not_applied() {
    let world =
        World::with(Database::fresh().await, |config| config.statement_timeout = Duration::from_millis(200)).await;
    let holder = world.hold_shards().await;
    let outcome = world.commit(&create(1)).await;
    assert!(matches!(&outcome, Outcome::NotApplied { reason } if reason.contains("57014")), "{outcome:?}");
    holder.rollback().await.unwrap();
    assert_eq!(world.commit(&create(1)).await, Outcome::Applied);
}

#[tokio::test]
async fn over_a_full_queue_nothing_is_taken() {
    let world = World::with(Database::fresh().await, |config| config.queue = 4).await;
    let holder = world.hold_shards().await;
    let commits: Vec<Commit> = (0..100).map(|n| create(n * 256)).collect();
    let release = async {
        world.until_blocked(1).await;
        holder.rollback().await.unwrap();
    };
    let (outcomes, ()) = futures::future::join(world.commit_all(&commits), release).await;
    let applied = outcomes.iter().filter(|outcome| **outcome == Outcome::Applied).count();
    let full = Outcome::NotApplied { reason: "the commit queue is full".to_owned() };
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == full).count(), 100 - applied);
    assert!(applied < 100);
    assert_eq!(world.count("entity").await, i64::try_from(applied).unwrap());
}

#[tokio::test]
async fn closing_commits_what_waits_and_takes_nothing_more() {
    let world = World::new().await;
    let holder = world.hold_shards().await;
    let commits: Vec<Commit> = (0..50).map(create).collect();
    let close = async {
        world.until_blocked(2).await;
        let (_, ()) = futures::future::join(holder.rollback(), world.committer.close()).await;
    };
    let (outcomes, ()) = futures::future::join(world.commit_all(&commits), close).await;
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Applied));
    let late = world.commit(&create(99)).await;
    assert_eq!(late, Outcome::NotApplied { reason: "the committer is shut down".to_owned() });
}

#[tokio::test]
async fn who_no_longer_waits_is_left_out() {
    let world = World::new().await;
    let holder = world.hold_shards().await;
    let first = create(1);
    let gone = create(257);
    let blocked = world.commit(&first);
    let abandon = async {
        world.until_blocked(1).await;
        let given_up = tokio::time::timeout(Duration::from_millis(50), world.commit(&gone)).await;
        assert!(given_up.is_err());
        holder.rollback().await.unwrap();
    };
    assert_eq!(futures::future::join(blocked, abandon).await.0, Outcome::Applied);
    assert_eq!(world.commit(&create(513)).await, Outcome::Applied);
    assert_eq!(world.reads().entity(gone.entity).await.unwrap(), None);
}

#[tokio::test]
async fn a_takeover_waits_for_the_batch_in_flight_and_fences_the_next() {
    let world = World::new().await;
    let holder = world.hold_shards().await;
    let seen = world.cluster().shards().await.unwrap();
    let heir = domain::id::MemberId(uuid::Uuid::new_v4());
    let cluster = world.cluster();
    let takeover = async {
        world.until_blocked(1).await;
        let taken = tokio::spawn({
            let (cluster, seen) = (cluster.clone(), seen.clone());
            async move { cluster.take_over(heir, &seen, &std::collections::BTreeMap::new()).await.unwrap() }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        holder.rollback().await.unwrap();
        taken.await.unwrap()
    };
    let first = create(1);
    let (outcome, taken) = futures::future::join(world.commit(&first), takeover).await;
    assert_eq!(taken.len(), 256);
    // Whoever came first at the lock: either it stands, and the heir sees it, or it was fenced and is not there.
    let stands = world.reads().entity(first.entity).await.unwrap().is_some();
    assert_eq!(stands, outcome == Outcome::Applied);
    assert!(matches!(outcome, Outcome::Applied | Outcome::Fenced));
    assert_eq!(world.commit(&create(3)).await, Outcome::Fenced);
}

/// A committer whose lanes are run one by one, as a supervisor does. The first batch that the database answers makes its worker panic
/// before anybody is told.
async fn failing_once(world: &World) -> Committer {
    static FAILED: AtomicBool = AtomicBool::new(false);
    let config = CommitterConfig {
        workers: 1,
        batch: 1,
        answered: Some(|| assert!(FAILED.swap(true, Ordering::SeqCst), "made to fail")),
        ..CommitterConfig::new(world.me)
    };
    let metrics = CommitterMetrics::register(&prometheus::Registry::new()).unwrap();
    Committer::new(&world.db.pool, config, metrics, mpsc::channel(1000).0)
}

#[tokio::test]
async fn a_worker_that_panics_leaves_what_it_wrote_unknown_and_what_waits_for_its_next_run() {
    let world = World::new().await;
    let committer = failing_once(&world).await;
    let (written, waits) = (create(1), create(2));
    let commits = [&written, &waits].map(|commit| {
        let (committer, commit) = (committer.clone(), commit.clone());
        tokio::spawn(async move { committer.commit(commit).await })
    });
    let lane = {
        let committer = committer.clone();
        tokio::spawn(async move { committer.run_lane(0).await })
    };
    assert!(lane.await.unwrap_err().is_panic());
    let [written_outcome, waits_outcome] = commits;
    assert!(matches!(written_outcome.await.unwrap(), Outcome::Unknown { .. }), "it may have been committed");
    assert!(!waits_outcome.is_finished());
    assert!(committer.workers()[0].in_doubt);
    let lane = {
        let committer = committer.clone();
        tokio::spawn(async move { committer.run_lane(0).await })
    };
    assert!(committer.certain(written.entity.id, written.shard).await, "its backend has ended");
    assert_eq!(waits_outcome.await.unwrap(), Outcome::Applied);
    assert!(world.reads().entity(written.entity).await.unwrap().is_some(), "it was committed");
    assert_eq!(committer.commit(create(3)).await, Outcome::Applied);
    committer.close().await;
    lane.await.unwrap();
    assert!(matches!(committer.commit(create(4)).await, Outcome::NotApplied { .. }));
}

#[tokio::test]
async fn a_lane_of_the_loader_that_panics_fails_what_it_was_reading_and_leaves_what_waits_for_its_next_run() {
    let world = World::new().await;
    let stored = create(1);
    world.commit(&stored).await;
    let loader = Loader::new(&world.reads());
    // Loads go to the lanes in turn: the first and the last are of lane 0.
    let mut reading = Box::pin(loader.load(stored.entity));
    assert!(poll!(&mut reading).is_pending());
    let mut waiting: Vec<_> = (0..LANES).map(|_| Box::pin(loader.load(stored.entity))).collect();
    let failing = async {
        let mut lane = pin!(loader.run_lane(0));
        assert!(poll!(&mut lane).is_pending(), "its query is in flight");
        for load in &mut waiting {
            assert!(poll!(load).is_pending());
        }
        panic!("made to fail");
    };
    assert!(AssertUnwindSafe(failing).catch_unwind().await.is_err());
    assert!(matches!(reading.await, Err(LoadError::Ended)));
    let mut waits = waiting.pop().unwrap();
    assert!(poll!(&mut waits).is_pending());
    let found = tokio::select! {
        found = waits => found.unwrap(),
        () = loader.run_lane(0) => panic!("a lane ends with its loader"),
    };
    assert_eq!(found.map(|snapshot| snapshot.version), Some(1));
}

#[tokio::test]
async fn an_entity_of_an_interrupted_batch_is_not_read_before_the_batch_has_ended() {
    let world = World::new().await;
    let committer = failing_once(&world).await;
    let holder = world.hold_shards().await;
    let sent = create(1);
    let asker = {
        let (committer, sent) = (committer.clone(), sent.clone());
        tokio::spawn(async move { committer.commit(sent).await })
    };
    let lane = {
        let committer = committer.clone();
        tokio::spawn(async move { committer.run_lane(0).await })
    };
    world.until_blocked(1).await;
    // Stopped while the statement runs: as a panic of the task, or as a restart by an operator.
    lane.abort();
    assert!(matches!(asker.await.unwrap(), Outcome::Unknown { .. }));
    assert!(!committer.certain(sent.entity.id, sent.shard).await, "the statement may still be carried out");
    let lane = {
        let committer = committer.clone();
        tokio::spawn(async move { committer.run_lane(0).await })
    };
    assert!(committer.certain(sent.entity.id, sent.shard).await, "its backend was ended");
    holder.rollback().await.unwrap();
    assert_eq!(world.reads().entity(sent.entity).await.unwrap(), None);
    lane.abort();
}

#[tokio::test]
async fn closing_a_committer_whose_worker_does_not_run_commits_what_waits() {
    let world = World::new().await;
    let metrics = CommitterMetrics::register(&prometheus::Registry::new()).unwrap();
    let config = CommitterConfig::new(world.me);
    let committer = Committer::new(&world.db.pool, config, metrics, mpsc::channel(1000).0);
    let waits = {
        let committer = committer.clone();
        tokio::spawn(async move { committer.commit(create(1)).await })
    };
    tokio::task::yield_now().await;
    committer.close().await;
    assert_eq!(waits.await.unwrap(), Outcome::Applied);
}
