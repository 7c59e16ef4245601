//! Three replicas are upgraded from the previous release, rolled back and upgraded again, one after the other, under load.
//!
//! The previous release is the commit in `deploy/releases.toml`, whose programs `deploy/test` builds.

#![allow(clippy::print_stdout, reason = "figures, for a run with --no-capture")]

mod load;

use load::Load;
use local_servers::private_files;
use nix::sys::signal::Signal;
use secrecy::ExposeSecret as _;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tests::cluster::TestCluster;
use tests::skipped_tests::report_skipped;

/// The folder with the programs of the previous release.
const PREVIOUS_RELEASE: &str = "GPUAAS_PREVIOUS_RELEASE";
const REPLICAS: usize = 3;
/// Nodes, each with an agent of the previous release.
const NODES: usize = 4;

fn previous_release() -> Option<PathBuf> {
    let folder = std::env::var_os(PREVIOUS_RELEASE).map(PathBuf::from).filter(|folder| folder.join("gpuaas").is_file());
    if folder.is_none() {
        report_skipped("it needs the previous release: the commit of deploy/releases.toml, which deploy/test builds");
    }
    folder
}

fn this_release() -> PathBuf {
    let program = private_files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas").unwrap();
    program.parent().unwrap().to_owned()
}

/// Runs `gpuaas migrate` of these programs, as an operator does between two releases.
fn migrate(cluster: &TestCluster, programs: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(programs.join("gpuaas"));
    command.arg("migrate").args(arguments).env_clear();
    command.env("SVC_DATABASE_URL", cluster.settings.database_url.expose_secret());
    command.env("SVC_DATABASE_CA_PATH", &cluster.settings.database_ca_path);
    let output = command.output().unwrap();
    let printed = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{printed}");
    printed
}

/// Restarts one replica after the other on these programs, each after the others have answered without it. Returns how long each was away.
async fn roll(cluster: &mut TestCluster, programs: &Path, load: &Load) -> Vec<Duration> {
    let mut away = Vec::new();
    for replica in &mut cluster.replicas {
        let began = Instant::now();
        replica.stop().await;
        load.expect_read().await;
        replica.set_executable(programs.join("gpuaas"));
        replica.start_again().await.expect("the replica starts");
        away.push(began.elapsed());
    }
    away
}

/// Waits until all replicas are members.
async fn expect_all_members(cluster: &TestCluster) {
    let are_all = |shown: &Value| shown["members"].as_array().is_some_and(|members| members.len() == REPLICAS);
    cluster.admin.wait_until("/api/v1/admin/runtime/cluster", "every replica is a member", are_all).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_rollback_and_upgrade_under_load_lose_no_request_no_byte_and_no_node() {
    let Some(previous) = previous_release() else { return };
    let this = this_release();
    let cluster = TestCluster::builder().replicas(REPLICAS).binaries(&previous).migrated_by_its_binaries();
    let mut cluster = cluster.start().await;
    let mut nodes = Vec::new();
    for _ in 0..NODES {
        nodes.push(cluster.node("h100").await);
    }
    let load = Load::start(&mut cluster, "h100").await;

    // What is added to the schema comes before the programs that need it, and the previous release runs on it.
    println!("{}", migrate(&cluster, &this, &["--expand"]));
    let plan = [("upgrade", &this), ("rollback", &previous), ("upgrade", &this)];
    for (step, programs) in plan {
        let away = roll(&mut cluster, programs, &load).await;
        println!("{step}: each replica was away for {away:.1?}");
        expect_all_members(&cluster).await;
        load.expect_progress().await;
    }
    // What is removed comes after the last program that needs it.
    println!("{}", migrate(&cluster, &this, &[]));
    load.expect_progress().await;

    let report = load.stop().await;
    println!("{report}");
    assert!(report.failures.is_empty(), "{report}");
    for node in nodes {
        node.expect_state("active").await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_killed_in_the_middle_of_an_upgrade_leaves_a_mixed_cluster_that_serves() {
    let Some(previous) = previous_release() else { return };
    let this = this_release();
    let cluster = TestCluster::builder().replicas(REPLICAS).binaries(&previous).migrated_by_its_binaries();
    let mut cluster = cluster.start().await;
    let _node = cluster.node("h100").await;
    migrate(&cluster, &this, &["--expand"]);
    cluster.replicas[0].stop().await;
    cluster.replicas[0].set_executable(this.join("gpuaas"));
    cluster.restart_replica(0).await;
    // The second one dies as a replica of the previous release, and does not come back for now.
    cluster.signal_replica(1, Signal::SIGKILL);
    let allocation = cluster.rent_active("h100", 1).await;
    for index in [0, 2] {
        let seen = cluster.at_replica(index, "user").get(&allocation.path()).await.ok();
        assert_eq!(seen["state"], Value::from("active"), "replica {index}");
    }
    allocation.release_fully().await;
    cluster.replicas[1].kill9();
    cluster.replicas[1].set_executable(this.join("gpuaas"));
    cluster.restart_replica(1).await;
    cluster.shutdown().await;
}
