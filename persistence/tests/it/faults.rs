//! Lost connections, killed servers, full queues: what is *not applied* was not written, and what is *unknown* may have been.

use crate::test_store::{TestStore, create, next};
use domain::commit::{Commit, CommitOutcome};
use futures::{FutureExt as _, poll};
use local_servers::test_database::TestDatabase;
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

async fn applied_eventually(store: &TestStore, commit: &Commit) {
    let began = Instant::now();
    loop {
        let outcome = store.commit(commit).await;
        if outcome == CommitOutcome::Applied {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{outcome:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_terminated_backend_leaves_the_batch_unknown_and_the_committer_alive() {
    let store = TestStore::new().await;
    assert_eq!(store.commit(&create(1)).await, CommitOutcome::Applied);
    let holder = store.hold_shards().await;
    let lost = create(3);
    let terminate = async {
        store.until_blocked(1).await;
        sqlx::query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE application_name LIKE '%committer%' AND wait_event_type = 'Lock' AND datname = current_database()",
        )
        .execute(store.pool())
        .await
        .unwrap();
    };
    let (outcome, ()) = futures::future::join(store.commit(&lost), terminate).await;
    assert!(matches!(outcome, CommitOutcome::Unknown { .. }), "{outcome:?}");
    holder.rollback().await.unwrap();
    assert_eq!(store.reads().entity(lost.entity).await.unwrap(), None);
    assert_eq!(store.commit(&lost).await, CommitOutcome::Applied);
}

#[tokio::test]
async fn load_waits_for_commits_in_flight() {
    let store = TestStore::new().await;
    let (first, other) = (create(1), create(257));
    assert_eq!(
        store.commit_all(&[first.clone(), other.clone()]).await,
        [CommitOutcome::Applied, CommitOutcome::Applied]
    );
    let certain = |commit: &Commit| {
        let (committer, entity, shard) = (store.committer.clone(), commit.entity.id, commit.shard);
        async move { committer.wait_settled(entity, shard).await }
    };
    let holder = store.hold_shards().await;
    let sent = tokio::spawn({
        let (committer, next) = (store.committer.clone(), next(&first));
        async move { committer.commit(next).await }
    });
    store.until_blocked(1).await;
    assert!(certain(&other).await, "another entity of the shard has no commit in flight");
    assert!(!certain(&first).await, "its fate is not decided");
    let waiting = tokio::spawn(certain(&first));
    holder.rollback().await.unwrap();
    assert!(waiting.await.unwrap());
    assert_eq!(store.reads().entity(first.entity).await.unwrap().unwrap().version, 2);
    assert_eq!(sent.await.unwrap(), CommitOutcome::Applied);
}

#[tokio::test]
async fn server_killed_during_a_commit_loses_no_acknowledged_transition() {
    let store = TestStore::with(TestDatabase::alone().await, |_| {}).await;
    let acknowledged: Vec<Commit> = (0..100).map(create).collect();
    assert!(store.commit_all(&acknowledged).await.iter().all(|outcome| *outcome == CommitOutcome::Applied));

    let holder = store.hold_shards().await;
    let lost: Vec<Commit> = (100..140).map(create).collect();
    let kill = async {
        store.until_blocked(2).await;
        store.db.kill9().await;
    };
    let (outcomes, ()) = futures::future::join(store.commit_all(&lost), kill).await;
    drop(holder);
    assert!(outcomes.iter().any(|outcome| matches!(outcome, CommitOutcome::Unknown { .. })), "{outcomes:?}");
    for outcome in &outcomes {
        assert!(matches!(outcome, CommitOutcome::Unknown { .. } | CommitOutcome::NotApplied { .. }), "{outcome:?}");
    }
    let down = store.commit(&create(500)).await;
    assert!(matches!(down, CommitOutcome::NotApplied { .. }), "{down:?}");
    assert!(store.committer.workers().iter().any(|worker| !worker.connected && worker.last_error.is_some()));

    store.db.start_again().await;
    applied_eventually(&store, &create(500)).await;
    applied_eventually(&store, &create(501)).await;
    for commit in &acknowledged {
        assert!(store.reads().entity(commit.entity).await.unwrap().is_some());
    }
    for commit in &lost {
        assert_eq!(store.reads().entity(commit.entity).await.unwrap(), None, "it was blocked, so it cannot be there");
    }
    assert_eq!(store.rows().await, [102; 6]);
}

/// A proxy between the committer and the server that can drop responses.
struct FaultyLink {
    port: u16,
    swallow: Arc<AtomicBool>,
}

impl FaultyLink {
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

    fn pool(&self, db: &TestDatabase) -> PgPool {
        let options = db.pool.connect_options();
        let options = sqlx::postgres::PgConnectOptions::new_without_pgpass()
            .host("127.0.0.1")
            .port(self.port)
            .username(local_servers::postgres::ROLE)
            .database(options.get_database().unwrap())
            .ssl_mode(PgSslMode::Disable);
        PgPoolOptions::new().connect_lazy_with(options)
    }
}

#[tokio::test]
async fn lost_response_to_an_applied_batch_is_unknown() {
    let store = TestStore::new().await;
    let wire = FaultyLink::to(store.db.socket()).await;
    let metrics = CommitterMetrics::register(&prometheus::Registry::new()).unwrap();
    let mut config = CommitterConfig::new(store.me);
    // The server has to apply a statement in this time, and then the committer waits for its answer in vain.
    config.statement_timeout = Duration::from_secs(5);
    let (publish, _published) = mpsc::channel(10);
    let committer = Committer::start(&wire.pool(&store.db), config, metrics, publish);
    let first = create(1);
    assert_eq!(committer.commit(first.clone()).await, CommitOutcome::Applied);

    wire.swallow.store(true, Ordering::SeqCst);
    let outcome = committer.commit(next(&first)).await;
    assert!(matches!(outcome, CommitOutcome::Unknown { .. }), "{outcome:?}");
    wire.swallow.store(false, Ordering::SeqCst);
    assert_eq!(store.reads().entity(first.entity).await.unwrap().unwrap().version, 2);

    // A retry is recognized, so it is safe.
    assert_eq!(committer.commit(next(&first)).await, CommitOutcome::Conflict);
}

#[tokio::test]
async fn before_the_next_batch_the_lost_backend_is_ended() {
    let store = TestStore::new().await;
    let wire = FaultyLink::to(store.db.socket()).await;
    let metrics = CommitterMetrics::register(&prometheus::Registry::new()).unwrap();
    let mut config = CommitterConfig::new(store.me);
    config.statement_timeout = Duration::from_secs(30);
    let (publish, _published) = mpsc::channel(10);
    let committer = Committer::start(&wire.pool(&store.db), config, metrics, publish);
    assert_eq!(committer.commit(create(1)).await, CommitOutcome::Applied);

    // The batch waits for a lock in the server while its client is cut off: the proxy drops the responses, then the socket.
    let holder = store.hold_shards().await;
    wire.swallow.store(true, Ordering::SeqCst);
    let lost = create(3);
    let certain = committer.clone();
    let cut = async {
        store.until_blocked(1).await;
        // Any byte from the server ends the proxy's connection: a cancelled statement sends one.
        sqlx::query(
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity
             WHERE application_name LIKE '%committer%' AND wait_event_type = 'Lock' AND datname = current_database()",
        )
        .execute(store.pool())
        .await
        .unwrap();
    };
    let (outcome, ()) = futures::future::join(committer.commit(lost.clone()), cut).await;
    assert!(matches!(outcome, CommitOutcome::Unknown { .. }), "{outcome:?}");
    wire.swallow.store(false, Ordering::SeqCst);
    // No further batch is needed: the outcome of the last one is resolved.
    assert!(certain.wait_settled(lost.entity.id, lost.shard).await);
    assert!(committer.workers().iter().all(|worker| !worker.in_doubt));
    holder.rollback().await.unwrap();
    assert_eq!(committer.commit(lost).await, CommitOutcome::Applied);
    let backends: i64 = sqlx::query_scalar(
        "SELECT count(DISTINCT application_name) - count(*) FROM pg_stat_activity
         WHERE application_name LIKE 'gpuaas committer%' AND client_addr IS NOT NULL AND datname = current_database()",
    )
    .fetch_one(store.pool())
    .await
    .unwrap();
    assert_eq!(backends, 0, "no worker has two backends");
}

#[tokio::test]
async fn statement_cancelled_by_the_server_is_not_applied() {
    let store =
        TestStore::with(TestDatabase::fresh().await, |config| config.statement_timeout = Duration::from_millis(200))
            .await;
    let holder = store.hold_shards().await;
    let outcome = loop {
        match store.commit(&create(1)).await {
            // On a busy machine the server's answer comes after the committer's own limit.
            CommitOutcome::Unknown { .. } => {}
            outcome => break outcome,
        }
    };
    assert!(matches!(&outcome, CommitOutcome::NotApplied { reason } if reason.contains("57014")), "{outcome:?}");
    holder.rollback().await.unwrap();
    applied_eventually(&store, &create(1)).await;
}

#[tokio::test]
async fn full_queue_refuses_commits() {
    let store = TestStore::with(TestDatabase::fresh().await, |config| config.queue = 4).await;
    let holder = store.hold_shards().await;
    let commits: Vec<Commit> = (0..100).map(|n| create(n * 256)).collect();
    let release = async {
        store.until_blocked(1).await;
        holder.rollback().await.unwrap();
    };
    let (outcomes, ()) = futures::future::join(store.commit_all(&commits), release).await;
    let applied = outcomes.iter().filter(|outcome| **outcome == CommitOutcome::Applied).count();
    let full = CommitOutcome::NotApplied { reason: "the commit queue is full".to_owned() };
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == full).count(), 100 - applied);
    assert!(applied < 100);
    assert_eq!(store.count("entity").await, i64::try_from(applied).unwrap());
}

#[tokio::test]
async fn closing_commits_the_queue_and_refuses_new_transitions() {
    let store = TestStore::new().await;
    let holder = store.hold_shards().await;
    let commits: Vec<Commit> = (0..50).map(create).collect();
    let close = async {
        store.until_blocked(2).await;
        let (_, ()) = futures::future::join(holder.rollback(), store.committer.close()).await;
    };
    let (outcomes, ()) = futures::future::join(store.commit_all(&commits), close).await;
    assert!(outcomes.iter().all(|outcome| *outcome == CommitOutcome::Applied));
    let late = store.commit(&create(99)).await;
    assert_eq!(late, CommitOutcome::NotApplied { reason: "the committer is shut down".to_owned() });
}

#[tokio::test]
async fn transition_of_a_dropped_caller_is_left_out() {
    let store = TestStore::new().await;
    let holder = store.hold_shards().await;
    let first = create(1);
    let gone = create(257);
    let blocked = store.commit(&first);
    let abandon = async {
        store.until_blocked(1).await;
        let given_up = tokio::time::timeout(Duration::from_millis(50), store.commit(&gone)).await;
        assert!(given_up.is_err());
        holder.rollback().await.unwrap();
    };
    assert_eq!(futures::future::join(blocked, abandon).await.0, CommitOutcome::Applied);
    assert_eq!(store.commit(&create(513)).await, CommitOutcome::Applied);
    assert_eq!(store.reads().entity(gone.entity).await.unwrap(), None);
}

#[tokio::test]
async fn a_takeover_waits_for_the_batch_in_flight_and_fences_the_next() {
    let store = TestStore::new().await;
    let holder = store.hold_shards().await;
    let seen = store.cluster().shards().await.unwrap();
    let heir = domain::id::MemberId(uuid::Uuid::new_v4());
    let cluster = store.cluster();
    let takeover = async {
        store.until_blocked(1).await;
        let taken = tokio::spawn({
            let (cluster, seen) = (cluster.clone(), seen.clone());
            async move { cluster.take_over(heir, &seen, &std::collections::BTreeMap::new()).await.unwrap() }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        holder.rollback().await.unwrap();
        taken.await.unwrap()
    };
    let first = create(1);
    let (outcome, taken) = futures::future::join(store.commit(&first), takeover).await;
    assert_eq!(taken.len(), 256);
    // Whichever got the lock first: the commit is stored and the new owner reads it, or it was fenced and is not there.
    let stands = store.reads().entity(first.entity).await.unwrap().is_some();
    assert_eq!(stands, outcome == CommitOutcome::Applied);
    assert!(matches!(outcome, CommitOutcome::Applied | CommitOutcome::Fenced));
    assert_eq!(store.commit(&create(3)).await, CommitOutcome::Fenced);
}

/// A committer whose lanes are run one by one, as by a supervisor. The first batch that the database answers makes its worker panic
/// before any caller has an outcome.
async fn failing_once(store: &TestStore) -> Committer {
    static FAILED: AtomicBool = AtomicBool::new(false);
    let config = CommitterConfig {
        workers: 1,
        batch: 1,
        on_response: Some(|| assert!(FAILED.swap(true, Ordering::SeqCst), "made to fail")),
        ..CommitterConfig::new(store.me)
    };
    let metrics = CommitterMetrics::register(&prometheus::Registry::new()).unwrap();
    Committer::new(&store.db.pool, config, metrics, mpsc::channel(1000).0)
}

#[tokio::test]
async fn worker_panic_makes_its_batch_unknown_and_preserves_the_queue() {
    let store = TestStore::new().await;
    let committer = failing_once(&store).await;
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
    assert!(matches!(written_outcome.await.unwrap(), CommitOutcome::Unknown { .. }), "it may have been committed");
    assert!(!waits_outcome.is_finished());
    assert!(committer.workers()[0].in_doubt);
    let lane = {
        let committer = committer.clone();
        tokio::spawn(async move { committer.run_lane(0).await })
    };
    assert!(committer.wait_settled(written.entity.id, written.shard).await, "its backend has ended");
    assert_eq!(waits_outcome.await.unwrap(), CommitOutcome::Applied);
    assert!(store.reads().entity(written.entity).await.unwrap().is_some(), "it was committed");
    assert_eq!(committer.commit(create(3)).await, CommitOutcome::Applied);
    committer.close().await;
    lane.await.unwrap();
    assert!(matches!(committer.commit(create(4)).await, CommitOutcome::NotApplied { .. }));
}

#[tokio::test]
async fn loader_panic_fails_its_query_and_preserves_the_queue() {
    let store = TestStore::new().await;
    let stored = create(1);
    store.commit(&stored).await;
    let loader = Loader::new(&store.reads());
    // Loads go to the lanes round-robin: the first and the last are of lane 0.
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
async fn load_waits_for_the_end_of_an_interrupted_batch() {
    let store = TestStore::new().await;
    let committer = failing_once(&store).await;
    let holder = store.hold_shards().await;
    let sent = create(1);
    let asker = {
        let (committer, sent) = (committer.clone(), sent.clone());
        tokio::spawn(async move { committer.commit(sent).await })
    };
    let lane = {
        let committer = committer.clone();
        tokio::spawn(async move { committer.run_lane(0).await })
    };
    store.until_blocked(1).await;
    // Stopped while the statement runs: as a panic of the task, or as a restart by an operator.
    lane.abort();
    assert!(matches!(asker.await.unwrap(), CommitOutcome::Unknown { .. }));
    assert!(!committer.wait_settled(sent.entity.id, sent.shard).await, "the statement may still be executed");
    let lane = {
        let committer = committer.clone();
        tokio::spawn(async move { committer.run_lane(0).await })
    };
    assert!(committer.wait_settled(sent.entity.id, sent.shard).await, "its backend was ended");
    holder.rollback().await.unwrap();
    assert_eq!(store.reads().entity(sent.entity).await.unwrap(), None);
    lane.abort();
}

#[tokio::test]
async fn closing_a_committer_with_a_stopped_worker_commits_the_queue() {
    let store = TestStore::new().await;
    let metrics = CommitterMetrics::register(&prometheus::Registry::new()).unwrap();
    let config = CommitterConfig::new(store.me);
    let committer = Committer::new(&store.db.pool, config, metrics, mpsc::channel(1000).0);
    let waits = {
        let committer = committer.clone();
        tokio::spawn(async move { committer.commit(create(1)).await })
    };
    tokio::task::yield_now().await;
    committer.close().await;
    assert_eq!(waits.await.unwrap(), CommitOutcome::Applied);
}

/// Sets whether commits wait for a standby, which there is not, and returns when they do. Only the checkpointer puts the setting into effect: a
/// session that has read it may still commit without waiting.
async fn wait_for_absent_standby(store: &TestStore, waits: bool) {
    let statement = if waits {
        "ALTER SYSTEM SET synchronous_standby_names = 'absent'"
    } else {
        "ALTER SYSTEM RESET synchronous_standby_names"
    };
    sqlx::query(statement).execute(store.pool()).await.unwrap();
    sqlx::query("SELECT pg_reload_conf()").execute(store.pool()).await.unwrap();
    let mut session = store.pool().acquire().await.unwrap();
    let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *session).await.unwrap();
    let is_waiting = async || {
        let query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND pid = $1";
        while sqlx::query_scalar::<_, i64>(query).bind(pid).fetch_one(store.pool()).await.unwrap() == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(60) {
        let mut commit = pin!(sqlx::query("SELECT pg_logical_emit_message(true, 'test', '')").execute(&mut *session));
        tokio::select! {
            done = &mut commit => {
                done.unwrap();
                if !waits {
                    return;
                }
            }
            () = is_waiting(), if waits => {
                sqlx::query("SELECT pg_cancel_backend($1)").bind(pid).execute(store.pool()).await.unwrap();
                commit.await.unwrap();
                return;
            }
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the server does not put its settings into effect");
}

#[tokio::test]
async fn commit_without_its_standby_is_unknown_in_time_and_in_doubt_until_it_is_replicated() {
    let short = |config: &mut CommitterConfig| config.statement_timeout = Duration::from_secs(1);
    let store = TestStore::with(TestDatabase::alone().await, short).await;
    let first = create(1);
    applied_eventually(&store, &first).await;
    wait_for_absent_standby(&store, true).await;
    let hung = next(&first);
    loop {
        match store.commit(&hung).await {
            CommitOutcome::Unknown { .. } => break,
            // On a busy machine the server's timeout ends the statement before it waits for the standby.
            CommitOutcome::NotApplied { .. } => {}
            outcome => panic!("{outcome:?}"),
        }
    }
    for _ in 0..2 {
        let settled = store.committer.wait_settled(hung.entity.id, hung.shard).await;
        assert!(!settled, "a transition that the primary alone has is not settled");
    }
    let waiting: i64 = sqlx::query_scalar("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        .fetch_one(store.pool())
        .await
        .unwrap();
    assert!(waiting <= 2, "{waiting} backends wait for one lane");
    wait_for_absent_standby(&store, false).await;
    while !store.committer.wait_settled(hung.entity.id, hung.shard).await {}
    assert_eq!(store.reads().entity(hung.entity).await.unwrap().unwrap().version, 2);
    applied_eventually(&store, &next(&hung)).await;
}

#[tokio::test]
async fn commits_that_were_given_up_without_a_standby_leave_no_connection_occupied() {
    let store = TestStore::with(TestDatabase::alone().await, |_| {}).await;
    let pool =
        persistence::pool::open(&persistence::pool::PoolConfig { connections: 8, ..store.db.pool_config() }).unwrap();
    let cluster = persistence::Cluster::new(pool);
    wait_for_absent_standby(&store, true).await;
    let member = persistence::membership::Member {
        id: store.me,
        name: "abandoned".to_owned(),
        started_at: chrono::Utc::now(),
        details: serde_json::json!({}),
    };
    let waiting = || async {
        let query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        sqlx::query_scalar::<_, i64>(query).fetch_one(store.pool()).await.unwrap()
    };
    let is_waiting = async {
        while waiting().await == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        ended = cluster.heartbeat(&member) => panic!("it does not wait for the standby: {ended:?}"),
        () = is_waiting => {}
    }
    assert_eq!(waiting().await, 1);
    let began = Instant::now();
    while waiting().await > 0 {
        assert!(began.elapsed() < Duration::from_secs(60), "the abandoned commit occupies its connection");
        cluster.end_abandoned_commits().await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    wait_for_absent_standby(&store, false).await;
}

/// Ends the committer's connections, as a failover does.
async fn end_connections(store: &TestStore) {
    sqlx::query(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
         WHERE application_name LIKE '%committer%' AND datname = current_database()",
    )
    .execute(store.pool())
    .await
    .unwrap();
}

#[tokio::test]
async fn acknowledged_transition_that_the_database_has_lost_is_found_before_its_entity_goes_on() {
    let store = TestStore::new().await;
    // Of one lane.
    let [lost, replaced, intact] = [1, 3, 5].map(create);
    for commit in [&lost, &replaced, &intact] {
        assert_eq!(store.commit(commit).await, CommitOutcome::Applied);
        assert_eq!(store.commit(&next(commit)).await, CommitOutcome::Applied);
    }
    assert_eq!(store.commit(&next(&next(&intact))).await, CommitOutcome::Applied);
    // What a standby without the last second has: the state of before, or another transition to the same version.
    sqlx::query("DELETE FROM history WHERE entity = $1 AND version = 2")
        .bind(lost.entity.id)
        .execute(store.pool())
        .await
        .unwrap();
    sqlx::query("UPDATE entity SET version = 1 WHERE id = $1")
        .bind(lost.entity.id)
        .execute(store.pool())
        .await
        .unwrap();
    sqlx::query("UPDATE history SET seq = seq + 1000 WHERE entity = $1 AND version = 2")
        .bind(replaced.entity.id)
        .execute(store.pool())
        .await
        .unwrap();
    end_connections(&store).await;

    let from_memory = next(&next(&lost));
    loop {
        match store.commit(&from_memory).await {
            CommitOutcome::NotApplied { reason } if reason.contains("lost in a failover") => break,
            CommitOutcome::NotApplied { .. } | CommitOutcome::Unknown { .. } => {}
            outcome => panic!("{outcome:?}"),
        }
    }
    let from_the_database = next(&lost);
    let refused = store.commit(&from_the_database).await;
    assert!(
        matches!(refused, CommitOutcome::NotApplied { .. }),
        "it is decided again only by an operator: {refused:?}"
    );
    let mut found = store.committer.wait_lost().await;
    found.sort_by_key(|lost| lost.entity.id);
    let mut expected = vec![(lost.entity, 2, 1), (replaced.entity, 2, 2)];
    expected.sort_by_key(|(entity, ..)| entity.id);
    assert_eq!(found.iter().map(|lost| (lost.entity, lost.acknowledged, lost.stored)).collect::<Vec<_>>(), expected);
    assert!(!store.committer.wait_settled(lost.entity.id, lost.shard).await, "nothing of it is loaded");
    assert_eq!(store.commit(&next(&next(&next(&intact)))).await, CommitOutcome::Applied);

    // Parked, and restarted by an operator: it is found once.
    store.committer.resolve_lost(lost.entity.id);
    end_connections(&store).await;
    assert!(store.committer.wait_settled(lost.entity.id, lost.shard).await);
    applied_eventually(&store, &from_the_database).await;
}

#[tokio::test]
async fn committer_writes_nothing_on_a_server_that_takes_no_writes() {
    let store = TestStore::new().await;
    assert_eq!(store.commit(&create(1)).await, CommitOutcome::Applied);
    let name: String = sqlx::query_scalar("SELECT current_database()").fetch_one(store.pool()).await.unwrap();
    let alter = |value: &str| format!("ALTER DATABASE {name} SET default_transaction_read_only = {value}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(alter("on"))).execute(store.pool()).await.unwrap();
    end_connections(&store).await;
    let refused = async {
        loop {
            if let CommitOutcome::NotApplied { reason } = store.commit(&create(3)).await
                && reason.contains("takes no writes")
            {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), refused).await.unwrap();
    assert!(store.committer.workers().iter().any(|worker| !worker.connected));
    let writable = format!("BEGIN READ WRITE; {}; COMMIT", alter("off"));
    sqlx::raw_sql(sqlx::AssertSqlSafe(writable)).execute(store.pool()).await.unwrap();
    applied_eventually(&store, &create(3)).await;
}
