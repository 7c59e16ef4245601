//! The disk under Postgres is full: changes are refused with a reason, reads are answered, and nothing that was acknowledged is lost, also where
//! the write-ahead log cannot grow and Postgres stops.

use local_servers::test_database::TestDatabase;
use reqwest::{Method, StatusCode};
use serde_json::json;
use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use tests::cluster::client::ApiResponse;
use tests::cluster::{TestCluster, WAIT_TIMEOUT, id_of};
use tests::skipped_tests::report_skipped;

/// The space that Postgres has beside its data.
const FREE_MIB: u64 = 64;
/// Changes after which the disk must be full: each needs some hundred bytes of a page of 8 KiB.
const MOST_CHANGES: usize = 2000;
const SERVICE_ACCOUNTS: &str = "/api/v1/service-accounts";

/// A file system of its own under the data of Postgres.
struct SmallDisk {
    at: PathBuf,
}

impl SmallDisk {
    /// Moves the data to it. The server is restarted.
    async fn under(postgres: &TestDatabase) -> Self {
        let at = postgres.data_folder().await;
        let before = at.with_extension("before");
        postgres.stop().await;
        std::fs::rename(&at, &before).unwrap();
        let (at_path, before_path) = (at.display(), before.display());
        shell(&format!(
            "size=$(du -sm {before_path} | cut -f1); mkdir {at_path}; \
             mount -t tmpfs -o size=$((size + {FREE_MIB}))m gpuaas-small-disk {at_path}; cp -a {before_path}/. {at_path}/"
        ));
        let disk = Self { at };
        postgres.start_again().await;
        disk
    }

    fn ballast(&self) -> PathBuf {
        self.at.join("ballast")
    }

    /// Takes all of its space.
    fn fill(&self) {
        let mut ballast = File::create(self.ballast()).unwrap();
        let block = vec![0; 4096];
        while ballast.write_all(&block).is_ok() {}
    }

    fn free(&self) {
        std::fs::remove_file(self.ballast()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: Postgres ends after it.
        let _ = Command::new("umount").arg("--lazy").arg(&self.at).status();
    }
}

fn shell(script: &str) {
    let output = Command::new("bash").args(["-euc", script]).output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
}

async fn create(cluster: &TestCluster, n: usize) -> ApiResponse {
    cluster.user.send_once(Method::POST, SERVICE_ACCOUNTS, Some(&json!({ "name": format!("robot-{n}") }))).await
}

/// Waits until a change is refused, and returns those that were acknowledged until then.
async fn create_until_refused(cluster: &TestCluster) -> Vec<String> {
    let mut acknowledged = Vec::new();
    for n in 0..MOST_CHANGES {
        let answer = create(cluster, n).await;
        if answer.status == StatusCode::CREATED {
            acknowledged.push(answer.created()["id"].as_str().unwrap().to_owned());
            continue;
        }
        answer.expect_error(503, "service_unavailable");
        return acknowledged;
    }
    panic!("{MOST_CHANGES} changes fit on a full disk");
}

/// Makes Postgres begin new segments of its log until it stops for want of space.
async fn exhaust_the_log(cluster: &TestCluster) {
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let switched = sqlx::raw_sql("SELECT pg_logical_emit_message(true, 'test', 'x'); SELECT pg_switch_wal()");
        if switched.execute(&cluster.pool).await.is_err() && log_of(cluster).contains("PANIC") {
            return;
        }
        assert!(Instant::now() < until, "Postgres did not stop: {}", log_of(cluster));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn log_of(cluster: &TestCluster) -> String {
    std::fs::read_to_string(cluster.postgres.log()).unwrap()
}

/// Starts Postgres where it has ended, until it takes a change.
async fn wait_for_postgres(cluster: &TestCluster) {
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        cluster.postgres.start_again().await;
        let written = sqlx::query("SELECT pg_logical_emit_message(true, 'test', 'x')").execute(&cluster.pool).await;
        let Err(error) = written else { return };
        assert!(Instant::now() < until, "Postgres takes no change: {error}; {}", log_of(cluster));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn expect_all(cluster: &TestCluster, acknowledged: &[String]) {
    for id in acknowledged {
        cluster.user.get(&format!("{SERVICE_ACCOUNTS}/{id}")).await.ok();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_of_postgres_refuses_changes_answers_reads_and_loses_nothing_acknowledged() {
    if !nix::unistd::Uid::effective().is_root() {
        report_skipped("it mounts a small file system, which needs root");
        return;
    }
    let mut cluster = TestCluster::builder().own_postgres().start().await;
    let disk = SmallDisk::under(&cluster.postgres).await;
    let node = cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 2).await;

    disk.fill();
    let acknowledged = create_until_refused(&cluster).await;
    cluster.user.get("/api/v1/skus").await.ok();
    assert_eq!(allocation.get().await["state"], "active");
    expect_all(&cluster, &acknowledged).await;
    disk.free();
    let later = cluster.user.post(SERVICE_ACCOUNTS, &json!({ "name": "later" })).await.created();

    // Without space for its log, Postgres stops at once.
    disk.fill();
    exhaust_the_log(&cluster).await;
    create(&cluster, MOST_CHANGES).await.expect_error(503, "service_unavailable");
    disk.free();
    wait_for_postgres(&cluster).await;
    expect_all(&cluster, &[acknowledged, vec![id_of(&later).to_string()]].concat()).await;

    allocation.release_fully().await;
    node.expect_all_free().await;
    cluster.shutdown().await;
}
