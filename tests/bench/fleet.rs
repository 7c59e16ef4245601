//! What a fleet's size costs: whole cycles of renting and releasing, the time until `active`, the overview, the first and the last page of
//! lists, `/metrics`, the runtime tree, the memory of a replica, and the time from its death until its successor has rented, among 100, 1,000
//! and 10,000 nodes of one SKU with ten past allocations each. Some of the nodes have simulated agents and are rented; the others are inserted
//! ([`generated_fleet`]).
//!
//! `ratio` is the time until `active` among the most nodes, compared with the fewest: 1 where it does not depend on the fleet. The measurements
//! of every size follow, and their ratios. `BENCH_FLEET_NODES` sets the largest size (100,000 take some minutes to insert), `BENCH_FLEET_AGENTS`
//! the number of simulated agents.

#[path = "fleet/generated_fleet.rs"]
mod generated_fleet;

use anyhow::{Context, ensure};
use generated_fleet::{FleetGenerator, PAST_PER_NODE};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tests::bench::memory::resident_kib;
use tests::bench::rentals::{SKU, SimulatedNodes, Tenants};
use tests::bench::{
    BenchReport, MeasurementPlan, PairedSamples, block_on, count_from_env, median, programs, raise_open_files, rounded,
};
use tests::cluster::client::Client;
use tests::cluster::{GPUS, TestCluster};

const SIZES: [usize; 4] = [100, 1_000, 10_000, 100_000];
/// The largest size, unless it is set.
const LARGEST: usize = 10_000;
const AGENTS: usize = 64;
const AT_ONCE: usize = 16;

/// Each is read so many times.
const READS: usize = 15;

/// A replica compares its index of free GPUs with the database so often: after that it knows the inserted nodes.
const INDEX_INTERVAL: Duration = Duration::from_secs(16);

/// After that, a process that took over has failed.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(300);

/// Lists, by the name of their measurement.
const LISTS: [(&str, &str); 3] = [
    ("nodes", "/api/v1/admin/nodes?limit=200"),
    ("active_nodes", "/api/v1/admin/nodes?limit=200&state=active"),
    ("released_allocations", "/api/v1/allocations?limit=200&state=released"),
];

/// The measurements of one size, by a name that ends in the unit.
type Measurements = BTreeMap<String, f64>;

fn main() -> anyhow::Result<()> {
    block_on(run())
}

async fn run() -> anyhow::Result<()> {
    let plan = MeasurementPlan::from_environment()?;
    let largest = count_from_env("BENCH_FLEET_NODES")?.unwrap_or(LARGEST);
    let agents = count_from_env("BENCH_FLEET_AGENTS")?.unwrap_or(AGENTS).clamp(1, SIZES[0]);
    ensure!(largest > SIZES[0], "BENCH_FLEET_NODES={largest}: the smallest size has {} nodes already", SIZES[0]);
    let sizes: Vec<usize> = SIZES.into_iter().filter(|size| *size < largest).chain([largest]).collect();
    raise_open_files()?;
    let mut cluster = TestCluster::builder()
        .own_postgres()
        .binaries(&programs()?)
        .policy("allocation.max_concurrent_per_user", 10_000)
        .variable("RUST_LOG", "warn")
        .start()
        .await;
    let fleet = SimulatedNodes::onboard(&mut cluster, agents, GPUS).await;
    let mut generator = FleetGenerator::learn(&cluster).await?;
    let tenants = Tenants::of(&cluster, AT_ONCE, GPUS).await?;
    // Warm-up: caches, connections, prepared statements.
    tenants.cycles(AT_ONCE, Duration::from_secs(1)).await?;

    let mut measured: Vec<Measurements> = Vec::new();
    let mut to_active: Vec<Vec<f64>> = Vec::new();
    for size in &sizes {
        generator.grow_to(size - agents).await?;
        tokio::time::sleep(INDEX_INTERVAL).await;
        let (mut alone, mut rates) = (Vec::new(), Vec::new());
        for _ in 0..plan.rounds {
            alone.push(tenants.cycles(1, plan.each).await?.p50_ms);
            rates.push(tenants.cycles(AT_ONCE, plan.each).await?.cycles_per_second);
        }
        let mut of_size = read_all(&cluster).await?;
        of_size.insert("to_active_p50_ms".to_owned(), median(&alone));
        of_size.insert(format!("cycles_per_second_at_{AT_ONCE}"), median(&rates));
        let pid = cluster.replicas[0].pid().context("the replica has ended")?;
        of_size.insert("replica_resident_kib".to_owned(), resident_kib(pid)?);
        of_size.insert("killed_to_active_ms".to_owned(), killed_to_active(&mut cluster).await);
        measured.push(of_size);
        to_active.push(alone);
    }

    publish(&sizes, agents, &measured, &to_active)?;
    // The agents stop first: requests that are interrupted are not measured.
    fleet.leave();
    cluster.shutdown().await;
    Ok(())
}

fn publish(sizes: &[usize], agents: usize, measured: &[Measurements], to_active: &[Vec<f64>]) -> anyhow::Result<()> {
    let (few, many) = measured.first().zip(measured.last()).context("nothing was measured")?;
    let mut turns = PairedSamples::default();
    let (fewest, most) = to_active.first().zip(to_active.last()).context("nothing was measured")?;
    for (many, few) in most.iter().zip(fewest) {
        turns.round(*many, *few);
    }
    let mut report = BenchReport::new("fleet", "p50 ms to active, most nodes", "fewest nodes", &turns);
    for (name, of_few) in few {
        for (size, of_size) in sizes.iter().zip(measured) {
            let value = of_size.get(name).with_context(|| format!("{name} was not measured among {size} nodes"))?;
            report = report.metric(format!("among_{size}_{name}"), rounded(*value));
        }
        report = report.metric(format!("ratio_of_{name}"), rounded(many[name] / of_few));
    }
    report
        .condition("nodes", sizes.to_vec())
        .condition("past_allocations_per_node", PAST_PER_NODE)
        .condition("nodes_with_agents", agents)
        .condition("replicas", 1)
        .condition("agents", "simulated, in the process of the client")
        .publish()
}

/// The time from the death of the replica until a rental is active at the process that follows it, which starts and takes over all shards.
async fn killed_to_active(cluster: &mut TestCluster) -> f64 {
    let began = Instant::now();
    cluster.kill9_replica(0);
    cluster.restart_replica(0).await;
    let rented = cluster.rent_when_free(SKU, GPUS).await;
    rented.expect_state_within(TAKEOVER_TIMEOUT, "active").await;
    let took = began.elapsed().as_secs_f64() * 1000.0;
    rented.release().await;
    rented.expect_state("released").await;
    took
}

/// The times of reads.
async fn read_all(cluster: &TestCluster) -> anyhow::Result<Measurements> {
    let mut measured = Measurements::new();
    let admin = cluster.at_replica(0, "admin");
    measured.insert("overview_p50_ms".to_owned(), time_of(&admin, "/api/v1/admin/overview").await);
    measured.insert("runtime_tree_p50_ms".to_owned(), time_of(&admin, "/api/v1/admin/runtime/tree").await);
    let operator = cluster.operator_at(0);
    measured.insert("metrics_p50_ms".to_owned(), time_of(&operator, "/metrics").await);
    let user = cluster.at_replica(0, "user");
    for (name, path) in LISTS {
        let client = if path.contains("/admin/") { &admin } else { &user };
        measured.insert(format!("{name}_first_page_p50_ms"), time_of(client, path).await);
        let last = last_page(client, path).await;
        measured.insert(format!("{name}_last_page_p50_ms"), time_of(client, &last).await);
    }
    Ok(measured)
}

/// The path of a list's last page.
async fn last_page(client: &Client, first: &str) -> String {
    let mut path = first.to_owned();
    loop {
        let page: Value = client.get(&path).await.ok();
        match page["next_page"].as_str() {
            Some(token) => path = format!("{first}&page_token={token}"),
            None => return path,
        }
    }
}

/// The median time of a read, in milliseconds.
async fn time_of(client: &Client, path: &str) -> f64 {
    let mut times = Vec::with_capacity(READS);
    for _ in 0..READS {
        let began = Instant::now();
        let answer = client.get(path).await;
        times.push(began.elapsed().as_secs_f64() * 1000.0);
        assert_eq!(answer.status, 200, "{path}: {}", answer.text);
    }
    median(&times)
}
