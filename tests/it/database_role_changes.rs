//! A database whose server changes its role under the replicas: it is set to read-only and back, its sessions are ended, it restarts, or a
//! standby takes its place behind one address. Writes are refused with a time to come back, one line of the log has the cause, and the
//! service writes again within seconds of the server.

#![allow(clippy::print_stdout, reason = "measurements, for a run with --no-capture")]

use local_servers::postgres::PostgresOptions;
use local_servers::test_database::TestDatabase;
use reqwest::{Method, StatusCode};
use secrecy::ExposeSecret as _;
use serde_json::Value;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tests::cluster::client::{ApiResponse, Client};
use tests::cluster::standby::{StandbyServer, SwitchedProxy};
use tests::cluster::{TestCluster, WAIT_TIMEOUT, sku_body};
use uuid::Uuid;

const REPLICAS: usize = 2;

/// How long after the server the service writes again: two seconds, and some more on a busy machine.
const BACK_WITHIN: Duration = Duration::from_secs(5);

/// How long a fault lasts: longer than a member's lease, so that replicas stop serving.
const FAULT: Duration = Duration::from_secs(6);

const POLL_INTERVAL: Duration = Duration::from_millis(50);

async fn write_at(replica: &Client) -> ApiResponse {
    let body = sku_body(&format!("sku-{}", Uuid::new_v4().simple()), 8);
    replica.send_once(Method::POST, "/api/v1/admin/skus", Some(&body)).await
}

async fn readiness_at(replica: &Client) -> ApiResponse {
    replica.send_once(Method::GET, "/api/v1/readyz", None).await
}

/// The replicas, each by its public and its operations address.
fn replicas(cluster: &TestCluster) -> Vec<(Client, Client)> {
    (0..REPLICAS).map(|index| (cluster.at_replica(index, "admin"), cluster.operator_at(index))).collect()
}

async fn expect_refused(cluster: &TestCluster, cause: &str) {
    for (public, operations) in replicas(cluster) {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let (refused, ready) = (write_at(&public).await, readiness_at(&operations).await);
            let is_named = ready.body["details"]["checks"]["postgres"].as_str().is_some_and(|it| it.contains(cause));
            if refused.status == StatusCode::SERVICE_UNAVAILABLE && ready.status == refused.status && is_named {
                assert!(refused.headers.contains_key("retry-after"), "{refused}");
                break;
            }
            assert!(Instant::now() < until, "not refused with {cause:?}: {refused}; {ready}");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

/// Writes at each replica until it is acknowledged and the replica is ready, and returns when the last one was.
async fn expect_back(cluster: &TestCluster, what: &str, server_back_at: Instant) {
    let mut back_after = Duration::ZERO;
    for (public, operations) in replicas(cluster) {
        loop {
            let (written, ready) = (write_at(&public).await, readiness_at(&operations).await);
            if written.status == StatusCode::CREATED && ready.status == StatusCode::OK {
                break;
            }
            let waited = server_back_at.elapsed();
            assert!(waited < WAIT_TIMEOUT, "{what}: after {waited:?} it does not serve: {written}; {ready}");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        back_after = back_after.max(server_back_at.elapsed());
    }
    println!("{what}: all replicas write and are ready {back_after:?} after the server");
    assert!(back_after < BACK_WITHIN, "{what}: back after {back_after:?}");
}

/// The lines of each replica since `from` that say that the database does not serve.
fn outage_lines(cluster: &TestCluster, from: &[usize]) -> Vec<Vec<Value>> {
    let is_one =
        |line: &Value| line["message"].as_str().is_some_and(|text| text.starts_with("the database does not serve"));
    let lines =
        |(index, from): (usize, &usize)| cluster.replica_lines(index).into_iter().skip(*from).filter(is_one).collect();
    from.iter().enumerate().map(lines).collect()
}

fn lengths(cluster: &TestCluster) -> Vec<usize> {
    (0..REPLICAS).map(|index| cluster.replica_lines(index).len()).collect()
}

/// Ends every session of the replicas.
async fn cut_sessions(cluster: &TestCluster) {
    sqlx::query(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE datname = current_database() AND application_name LIKE 'gpuaas %'",
    )
    .execute(&cluster.pool)
    .await
    .unwrap();
}

async fn set_read_only(cluster: &TestCluster, value: &str) {
    let name = cluster.postgres.name();
    let alter = format!("BEGIN READ WRITE; ALTER DATABASE {name} SET default_transaction_read_only = {value}; COMMIT");
    sqlx::raw_sql(sqlx::AssertSqlSafe(alter)).execute(&cluster.pool).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_return_after_a_server_that_was_read_only_cut_its_sessions_or_restarted() {
    let cluster = TestCluster::builder().replicas(REPLICAS).own_postgres().start().await;
    let from = lengths(&cluster);
    set_read_only(&cluster, "on").await;
    cut_sessions(&cluster).await;
    expect_refused(&cluster, "read-only").await;
    tokio::time::sleep(FAULT).await;
    set_read_only(&cluster, "off").await;
    expect_back(&cluster, "read-only and back", Instant::now()).await;
    for lines in outage_lines(&cluster, &from) {
        let texts: Vec<String> = lines.iter().map(ToString::to_string).collect();
        assert!((1..=3).contains(&lines.len()), "{texts:#?}");
        let has_cause = |line: &Value| line["error"].as_str().is_some_and(|error| error.contains("read-only"));
        assert!(lines.iter().any(has_cause), "no line has the cause: {texts:#?}");
    }

    cut_sessions(&cluster).await;
    expect_back(&cluster, "sessions cut", Instant::now()).await;

    cluster.postgres.stop().await;
    expect_refused(&cluster, "").await;
    tokio::time::sleep(FAULT).await;
    cluster.postgres.start_again().await;
    expect_back(&cluster, "restarted", Instant::now()).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_return_after_a_standby_behind_one_address_was_promoted() {
    let database = TestDatabase::with_options(PostgresOptions::default()).await;
    let standby = StandbyServer::of(&database).await.unwrap();
    let (_, port) = database.socket_address();
    let proxy = SwitchedProxy::to(SocketAddr::from(([127, 0, 0, 1], port))).await.unwrap();
    let through = format!(":{}/", proxy.address().port());
    let mut cluster = TestCluster::builder()
        .replicas(REPLICAS)
        .variable("SVC_DATABASE_URL", &database.url().expose_secret().replace(&format!(":{port}/"), &through))
        .variable("SVC_DATABASE_CA_PATH", &database.ca_path().display().to_string())
        .start()
        .await;
    let config = persistence::pool::PoolConfig::new(standby.url().into(), Some(database.ca_path().to_owned()));
    cluster.pool = persistence::pool::open(&config).unwrap();

    // An orderly end: the standby has everything.
    database.stop().await;
    proxy.switch_to(standby.address());
    expect_refused(&cluster, "read-only").await;
    tokio::time::sleep(FAULT).await;
    standby.promote().await.unwrap();
    expect_back(&cluster, "promoted standby", Instant::now()).await;
    cluster.shutdown().await;
}
