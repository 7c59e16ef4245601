//! A rollout over 1,000 simulated agents: from its order to its end, with a canary and waves, each of which is watched for a second:
//! without that time there are no waves. The aim is 2 minutes, and no node is offline. The baseline, in the same run and with the same
//! agents, is a client that orders the same updates one after the other through the API, without waiting for any, and then waits for the
//! last: nothing bounds how many are under update at once.
//!
//! An agent takes a tenth of a second for an update, as long as the heartbeat of a new process takes. `BENCH_NODES` sets another number of nodes.

use anyhow::{Context, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::json;
use std::time::{Duration, Instant};
use tests::bench::{
    BenchReport, PairedSamples, block_on, conclude, count_from_env, programs, raise_open_files, rounded,
};
use tests::cluster::fake_agent::FakeAgent;
use tests::cluster::updatable_agent::{UpdatableAgent, UpdatableFleet, digest};
use tests::cluster::{GPUS, NodeHandle, TestCluster, node_body};
use wire::bundle::BootstrapBundle;

const NODES: usize = 1000;
const MAX_UNAVAILABLE: usize = 50;
const CANARIES: usize = 5;
const SOAK_SECONDS: u64 = 1;
const UPDATE_TAKES: Duration = Duration::from_millis(100);
const AIM: Duration = Duration::from_secs(120);
const SKU: &str = "rolled";
/// Nodes that are enrolled at once.
const AT_ONCE: usize = 16;
const ENDS_WITHIN: Duration = Duration::from_secs(600);

fn main() -> anyhow::Result<()> {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    block_on(run())
}

async fn run() -> anyhow::Result<()> {
    raise_open_files()?;
    let nodes = count_from_env("BENCH_NODES")?.unwrap_or(NODES).max(CANARIES + 1);
    let mut cluster = TestCluster::builder()
        .own_postgres()
        .replicas(2)
        .binaries(&programs()?)
        .variable("RUST_LOG", "warn")
        .policy("rate_limit.enrollment_requests_per_minute", 1_000_000)
        .policy("rate_limit.api_requests_per_minute", 1_000_000)
        .start()
        .await;
    let measured = measure(&mut cluster, nodes).await;
    conclude(cluster, measured).await
}

async fn measure(cluster: &mut TestCluster, nodes: usize) -> anyhow::Result<BenchReport> {
    let fleet = enroll(cluster, nodes).await?;
    let rolled = roll_out(cluster, nodes).await?;
    ensure!(fleet.shared.ended() == nodes, "{} of {nodes} agents were updated", fleet.shared.ended());
    let most_in_flight = fleet.shared.most_in_flight();
    ensure!(most_in_flight <= MAX_UNAVAILABLE, "{most_in_flight} nodes were under update at once");

    let begin = Instant::now();
    for node in &fleet.nodes {
        let body = json!({ "digest": digest('b'), "reason": "a baseline" });
        cluster.admin.post(&format!("{}/update-agent", node.path()), &body).await.created();
    }
    while fleet.shared.ended() < 2 * nodes {
        ensure!(begin.elapsed() < ENDS_WITHIN, "{} of {nodes} agents were updated", fleet.shared.ended() - nodes);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let ordered = begin.elapsed();
    let offline = count(cluster, "SELECT count(*) FROM history WHERE kind = 'node' AND to_state = 'offline'").await?;
    ensure!(offline == 0, "{offline} nodes were offline");

    let mut turns = PairedSamples::default();
    turns.round(rolled.as_secs_f64(), ordered.as_secs_f64());
    let aim = if rolled < AIM { "met" } else { "missed" };
    Ok(BenchReport::new("rollout", "s", "ordered one by one", &turns)
        .metric("most_in_flight", most_in_flight)
        .metric("most_in_flight_of_the_baseline", fleet.shared.most_in_flight())
        .metric("nodes_offline", offline)
        .metric("updates_per_second", rounded(nodes as f64 / rolled.as_secs_f64()))
        .metric("aim_under_2_minutes", aim)
        .condition("nodes", nodes)
        .condition("max_unavailable", MAX_UNAVAILABLE)
        .condition("canaries", CANARIES)
        .condition("soak_seconds", SOAK_SECONDS)
        .condition("update_takes_ms", rounded(UPDATE_TAKES.as_secs_f64() * 1000.0)))
}

/// From the order of a rollout to its end.
async fn roll_out(cluster: &TestCluster, nodes: usize) -> anyhow::Result<Duration> {
    const PATH: &str = "/api/v1/admin/rollouts";
    let body = json!({
        "digest": digest('a'), "canary": CANARIES, "max_unavailable": MAX_UNAVAILABLE, "soak_seconds": SOAK_SECONDS,
        "selector": { "sku": SKU }, "reason": "a benchmark",
    });
    let begin = Instant::now();
    let created = cluster.admin.post(PATH, &body).await.created();
    let path = format!("{PATH}/{}", tests::cluster::id_of(&created));
    let ended = cluster.admin.wait_within(ENDS_WITHIN, &path, "the rollout ends", |it| it["state"] != "running").await;
    let took = begin.elapsed();
    ensure!(ended["state"] == "completed" && ended["updated"] == json!(nodes), "{ended}");
    Ok(took)
}

async fn enroll(cluster: &mut TestCluster, count_of_nodes: usize) -> anyhow::Result<UpdatableFleet> {
    cluster.offer_sku(SKU, GPUS).await;
    let admin = cluster.admin.clone();
    let enrolled = stream::iter(0..count_of_nodes).map(|number| {
        let admin = admin.clone();
        async move {
            let body = node_body(&format!("rolled-{number}"), SKU, GPUS);
            let node = NodeHandle::of(&admin.post("/api/v1/admin/nodes", &body).await.created(), admin.clone());
            let issued = admin.post(&format!("{}/enrollment-token", node.path()), &json!({})).await.created();
            let bundle: BootstrapBundle = serde_json::from_value(issued["bootstrap_bundle"].clone())?;
            let agent = UpdatableAgent::new(FakeAgent::enroll(&bundle, GPUS).await);
            agent.heartbeat().await;
            anyhow::Ok((node, agent))
        }
    });
    let enrolled: Vec<_> = enrolled.buffer_unordered(AT_ONCE).try_collect().await?;
    let fleet = UpdatableFleet::of(enrolled, usize::MAX >> 4);
    fleet.shared.take_for_each(UPDATE_TAKES);
    let (begin, expected) = (Instant::now(), i64::try_from(count_of_nodes)?);
    while count(cluster, "SELECT count(*) FROM entity WHERE kind = 'node' AND state = 'active'").await? < expected {
        ensure!(begin.elapsed() < ENDS_WITHIN, "not every node is active");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(fleet)
}

async fn count(cluster: &TestCluster, query: &'static str) -> anyhow::Result<i64> {
    sqlx::query_scalar(query).fetch_one(&cluster.pool).await.context("counting")
}
