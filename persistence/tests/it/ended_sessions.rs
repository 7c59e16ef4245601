//! Sessions that a change of the server has made useless: one failed statement replaces all of them.

use crate::test_store::{TestStore, create};
use domain::commit::CommitOutcome;
use persistence::membership::Member;
use persistence::pool::{PoolConfig, open};
use persistence::{Cluster, StoreError};
use secrecy::ExposeSecret as _;
use sqlx::{AssertSqlSafe, PgPool};
use std::time::Duration;

const SESSIONS: u32 = 4;

fn member(store: &TestStore) -> Member {
    let (name, details) = ("member".to_owned(), serde_json::json!({}));
    Member { id: store.me, name, started_at: chrono::Utc::now(), details }
}

/// Changes what new sessions of the database do; this one may be read-only itself.
async fn set_read_only(store: &TestStore, value: &str) {
    let name = store.db.name();
    let alter = format!("BEGIN READ WRITE; ALTER DATABASE {name} SET default_transaction_read_only = {value}; COMMIT");
    sqlx::raw_sql(AssertSqlSafe(alter)).execute(store.pool()).await.unwrap();
}

/// Opens as many sessions as the pool may have, and returns all of them to it.
async fn fill(pool: &PgPool) {
    let mut sessions = Vec::new();
    for _ in 0..SESSIONS {
        sessions.push(pool.acquire().await.unwrap());
    }
    drop(sessions);
    while pool.num_idle() < SESSIONS as usize {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn assert_unavailable(failed: &Result<impl std::fmt::Debug, StoreError>, cause: &str) {
    let error = failed.as_ref().expect_err("the session is of before");
    let text = persistence::outage_log::chain(error);
    assert!(error.is_unavailable() && text.contains(cause), "{text}");
}

#[tokio::test]
async fn sessions_of_a_server_that_was_read_only_are_replaced_after_one_failed_write() {
    let store = TestStore::new().await;
    let pool = open(&PoolConfig { connections: SESSIONS, ..store.db.pool_config() }).unwrap();
    let (cluster, member) = (Cluster::new(pool.clone()), member(&store));
    set_read_only(&store, "on").await;
    fill(&pool).await;
    set_read_only(&store, "off").await;
    assert_unavailable(&cluster.heartbeat(&member).await, "read-only");
    for _ in 0..2 * SESSIONS {
        cluster.heartbeat(&member).await.expect("every other session was replaced");
    }
}

#[tokio::test]
async fn write_that_is_rolled_back_finds_a_server_that_takes_no_writes() {
    let store = TestStore::new().await;
    let pool = open(&PoolConfig { connections: 1, ..store.db.pool_config() }).unwrap();
    let (cluster, member) = (Cluster::new(pool), member(&store));
    let stored_at = cluster.heartbeat(&member).await.unwrap();
    cluster.check_write(member.id).await.unwrap();
    set_read_only(&store, "on").await;
    cluster.check_write(member.id).await.expect("its session is of before");
    let held = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE application_name = 'gpuaas' AND datname = current_database() AND pid <> pg_backend_pid()";
    sqlx::query(held).execute(store.pool()).await.unwrap();
    while cluster.members().await.is_err() {}
    assert_unavailable(&cluster.check_write(member.id).await, "read-only");
    set_read_only(&store, "off").await;
    let is_replaced = async { while cluster.check_write(member.id).await.is_err() {} };
    tokio::time::timeout(Duration::from_secs(60), is_replaced).await.expect("the session is replaced");
    assert_eq!(cluster.members().await.unwrap()[0].heartbeat_at, stored_at, "nothing was written");
}

#[tokio::test]
async fn statement_whose_plan_the_server_refuses_succeeds_on_another_session() {
    let store = TestStore::new().await;
    let pool = open(&PoolConfig { connections: 1, ..store.db.pool_config() }).unwrap();
    let cluster = Cluster::new(pool);
    cluster.heartbeat(&member(&store)).await.unwrap();
    cluster.members().await.unwrap();
    store.db.execute("ALTER TABLE member ALTER COLUMN name TYPE varchar(200)").await;
    assert_unavailable(&cluster.members().await, "cached plan");
    assert_eq!(cluster.members().await.unwrap().len(), 1);
}

#[tokio::test]
async fn server_that_opens_no_session_is_unavailable_whatever_reason_it_names() {
    let store = TestStore::new().await;
    let url = store.db.pool_config().url.expose_secret().to_owned();
    // As while a database is restored, and while its roles are changed.
    for (other, cause) in [
        (url.replace(&format!("/{}?", store.db.name()), "/not_restored?"), "not_restored"),
        (url.replace("postgres://", "postgres://withdrawn_"), "withdrawn_"),
    ] {
        assert_ne!(other, url);
        let pool = open(&PoolConfig { url: other.into(), ..store.db.pool_config() }).unwrap();
        assert_unavailable(&Cluster::new(pool).members().await, cause);
    }
}

#[tokio::test]
async fn lane_that_found_a_read_only_server_connects_by_itself_when_it_takes_writes() {
    let store = TestStore::new().await;
    set_read_only(&store, "on").await;
    let refused = store.commit(&create(1)).await;
    assert!(
        matches!(&refused, CommitOutcome::NotApplied { reason } if reason.contains("takes no writes")),
        "{refused:?}"
    );
    set_read_only(&store, "off").await;
    // Without a further transition: the lane connects by itself.
    let is_connected = async {
        while store.committer.workers().iter().any(|lane| lane.outage().is_some()) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), is_connected).await.expect("the lane connects again");
    assert_eq!(store.commit(&create(1)).await, CommitOutcome::Applied);
}

#[tokio::test]
async fn batch_that_its_session_cannot_write_is_committed_on_another_one() {
    let store = TestStore::new().await;
    // A sequence goes on where a transaction is rolled back.
    store
        .db
        .execute_raw(
            "CREATE SEQUENCE batches;
             CREATE FUNCTION fail_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 IF nextval('batches') = 1 THEN RAISE EXCEPTION 'read-only' USING ERRCODE = '25006'; END IF;
                 RETURN NULL;
             END $$;
             CREATE TRIGGER fail_once BEFORE INSERT ON history FOR EACH STATEMENT EXECUTE FUNCTION fail_once()",
        )
        .await;
    assert_eq!(store.commit(&create(1)).await, CommitOutcome::Applied);
    let batches: i64 = sqlx::query_scalar("SELECT last_value FROM batches").fetch_one(store.pool()).await.unwrap();
    assert_eq!(batches, 2, "it was written twice, and rolled back once");
}
