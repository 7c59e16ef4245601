//! The latency from `POST /api/v1/allocations` to `active`, and whole cycles of renting and releasing, on one replica of the release build
//! with 64 simulated nodes whose agents use the node API over mutual TLS and execute their tasks at once.
//!
//! The baseline is a lower bound of such a service: the same number of durable commits, one after the other for each
//! cycle, each one statement that writes a snapshot, a history row and an event (`floor`). The ratio shows how much of the time is ours.

use anyhow::Context;
use futures::future::join_all;
use serde_json::json;
use sqlx::PgPool;
use std::time::{Duration, Instant};
use tests::bench::rentals::{RentalLoad, SimulatedNodes, Tenants};
use tests::bench::{
    BenchReport, MeasurementPlan, PairedSamples, block_on, median, raise_open_files, release_build, rounded,
};
use tests::cluster::TestCluster;
use uuid::Uuid;

const NODES: usize = 64;
const GPUS: u32 = 8;
const AT_ONCE: [usize; 2] = [1, 32];

/// The sequential commits of one cycle: request, admit, reserve, reserved, provision, report, provisioned; release,
/// clean, report, cleaned.
const COMMITS: usize = 11;
/// The sequential commits until `active`.
const COMMITS_TO_ACTIVE: usize = 7;

/// Slurm 22.05 with 64 nodes on two cores: the same for a cluster scheduler.
const SLURM_P50_MS: f64 = 990.0;
const SLURM_CYCLES_PER_SECOND: f64 = 32.0;

fn main() -> anyhow::Result<()> {
    block_on(run())
}

async fn run() -> anyhow::Result<()> {
    let plan = MeasurementPlan::from_environment()?;
    raise_open_files()?;
    let mut cluster = TestCluster::builder()
        .own_postgres()
        .binaries(&release_build()?)
        .policy("allocation.max_concurrent_per_user", 10_000)
        .variable("RUST_LOG", "warn")
        .start()
        .await;
    let fleet = SimulatedNodes::onboard(&mut cluster, NODES, GPUS).await;
    let floor = Floor::prepare(&cluster.pool).await?;
    let users = Tenants::of(&cluster, AT_ONCE[1], GPUS).await?;

    // Warm-up: caches, connections, prepared statements.
    users.cycles(AT_ONCE[1], Duration::from_secs(1)).await?;
    let mut turns = PairedSamples::default();
    let mut loads: Vec<Vec<RentalLoad>> = vec![Vec::new(); AT_ONCE.len()];
    let mut to_active_floor = Vec::new();
    let mut spent: Vec<CpuTime> = Vec::new();
    for _ in 0..plan.rounds {
        for (at_once, of_it) in AT_ONCE.iter().zip(&mut loads) {
            let before = CpuTime::so_far(&cluster)?;
            let load = users.cycles(*at_once, plan.each).await?;
            if *at_once == AT_ONCE[1] {
                spent.push(CpuTime::so_far(&cluster)?.since(&before).over(load.cycles));
            }
            of_it.push(load);
        }
        let cycles = loads.last().and_then(|of_it| of_it.last()).map_or(0.0, |load| load.cycles_per_second);
        turns.round(cycles, floor.cycles(AT_ONCE[1], plan.each).await?);
        to_active_floor.push(floor.time_to_active().await?);
    }

    let mut report = BenchReport::new("allocate", "cycles/s", "bare commits of the same steps", &turns);
    for (at_once, of_it) in AT_ONCE.iter().zip(&loads) {
        let middle = |of: fn(&RentalLoad) -> f64| rounded(median(&of_it.iter().map(of).collect::<Vec<_>>()));
        report = report
            .metric(format!("to_active_p50_ms_at_{at_once}"), middle(|load| load.p50_ms))
            .metric(format!("to_active_p99_ms_at_{at_once}"), middle(|load| load.p99_ms))
            .metric(format!("cycles_per_second_at_{at_once}"), middle(|load| load.cycles_per_second));
    }
    for (from, to) in [("request", "reserved"), ("reserved", "provisioned"), ("release", "cleaned")] {
        report = report.metric(format!("{from}_to_{to}_p50_ms"), rounded(between(&cluster.pool, from, to).await?));
    }
    for (n, (who, _)) in spent.first().into_iter().flat_map(|spent| &spent.0).enumerate() {
        let each: Vec<f64> = spent.iter().map(|spent| spent.0[n].1).collect();
        report = report.metric(format!("cpu_of_{who}_ms_per_cycle_at_32"), rounded(median(&each)));
    }
    let cycles: usize = loads.iter().flatten().map(|load| load.cycles).sum();
    let aim = |met: bool| if met { "met" } else { "missed" };
    let p50 = report.metrics["to_active_p50_ms_at_1"].as_f64().unwrap_or(f64::MAX);
    report
        .metric("floor_to_active_ms", rounded(median(&to_active_floor)))
        .metric("slurm_p50_ms", SLURM_P50_MS)
        .metric("slurm_cycles_per_second", SLURM_CYCLES_PER_SECOND)
        .metric("aim_p50_under_20_ms", aim(p50 < 20.0))
        .metric("aim_300_cycles_per_second", aim(turns.ours() >= 300.0))
        .condition("nodes", NODES)
        .condition("cycles", cycles)
        .condition("replicas", 1)
        .condition("users", AT_ONCE[1])
        .condition("commits_in_a_cycle", COMMITS)
        .condition("agents", "simulated, in the process of the client")
        .condition("connection", "kept alive; TLS, HTTP/2")
        .condition("waiting", "one stream of events for each allocation")
        .publish()?;
    // The agents stop first: requests that are interrupted are not measured.
    fleet.leave();
    cluster.shutdown().await;
    Ok(())
}

/// The median time between two transitions of the same allocation, over the whole run.
async fn between(pool: &PgPool, from: &str, to: &str) -> anyhow::Result<f64> {
    let statement = "SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM later.at - earlier.at)::float8 * 1000) \
                     FROM history earlier JOIN history later ON later.entity = earlier.entity \
                     WHERE earlier.kind = 'allocation' AND earlier.command = $1 AND later.command = $2";
    let median: Option<f64> = sqlx::query_scalar(statement).bind(from).bind(to).fetch_one(pool).await?;
    median.with_context(|| format!("no allocation went from {from} to {to}"))
}

/// CPU time by process, in milliseconds, which does not depend on other load of the machine.
struct CpuTime(Vec<(&'static str, f64)>);

impl CpuTime {
    fn so_far(cluster: &TestCluster) -> anyhow::Result<Self> {
        let of = |pid: Option<u32>| processor_time(pid.context("a process has ended")?);
        Ok(Self(vec![
            ("replica", of(cluster.replicas[0].pid())?),
            ("postgres", of(Some(cluster.postgres.pid()))?),
            ("nats", of(cluster.nats.pid())?),
            ("client_and_agents", of(Some(std::process::id()))?),
        ]))
    }

    fn since(self, before: &Self) -> Self {
        Self(self.0.into_iter().zip(&before.0).map(|((who, after), (_, before))| (who, after - before)).collect())
    }

    fn over(self, cycles: usize) -> Self {
        Self(self.0.into_iter().map(|(who, spent)| (who, spent / cycles.max(1) as f64)).collect())
    }
}

/// The CPU time of a process and, for Postgres, of its living children, in milliseconds.
fn processor_time(pid: u32) -> anyhow::Result<f64> {
    let tick = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("the clock has no tick")? as f64;
    let mut ticks = 0.0;
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(each) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{each}/stat")) else { continue };
        // After the name, which may contain anything: state, parent, …, user time, system time (proc(5), fields 3, 4, 14, 15).
        let Some((head, rest)) = stat.rsplit_once(')') else { continue };
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let session = head.contains("(postgres") && fields[1] == pid.to_string();
        if each == pid || session {
            ticks += fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
        }
    }
    Ok(ticks / tick * 1000.0)
}

/// The bare commits of a cycle.
struct Floor {
    pool: PgPool,
}

impl Floor {
    async fn prepare(pool: &PgPool) -> anyhow::Result<Self> {
        for statement in [
            "CREATE TABLE floor_entity (id uuid PRIMARY KEY, version bigint NOT NULL, body jsonb NOT NULL) WITH (fillfactor = 75)",
            "CREATE TABLE floor_history (entity uuid NOT NULL, version bigint NOT NULL, why text NOT NULL)",
            "CREATE TABLE floor_outbox (id uuid PRIMARY KEY, event jsonb NOT NULL)",
        ] {
            sqlx::query(statement).execute(pool).await?;
        }
        Ok(Self { pool: pool.clone() })
    }

    async fn commits(&self, count: usize) -> anyhow::Result<()> {
        const STEP: &str = "WITH step AS (UPDATE floor_entity SET version = version + 1, body = $2 WHERE id = $1 RETURNING version), \
                            event AS (INSERT INTO floor_outbox (id, event) VALUES ($3, $2)) \
                            INSERT INTO floor_history (entity, version, why) SELECT $1, version, 'a step' FROM step";
        let id = Uuid::new_v4();
        let body = json!({ "state": "provisioning", "padding": "x".repeat(800) });
        let create = "INSERT INTO floor_entity (id, version, body) VALUES ($1, 1, $2)";
        sqlx::query(create).bind(id).bind(&body).execute(&self.pool).await?;
        for _ in 1..count {
            sqlx::query(STEP).bind(id).bind(&body).bind(Uuid::new_v4()).execute(&self.pool).await?;
        }
        Ok(())
    }

    /// Concurrent cycles of bare commits per second.
    async fn cycles(&self, at_once: usize, during: Duration) -> anyhow::Result<f64> {
        let began = Instant::now();
        let one = |_| async {
            let mut done = 0_usize;
            while began.elapsed() < during {
                self.commits(COMMITS).await?;
                done += 1;
            }
            anyhow::Ok(done)
        };
        let mut done = 0;
        for of_it in join_all((0..at_once).map(one)).await {
            done += of_it?;
        }
        Ok(done as f64 / began.elapsed().as_secs_f64())
    }

    /// The time of the commits until `active` without other load, in milliseconds.
    async fn time_to_active(&self) -> anyhow::Result<f64> {
        let mut times = Vec::new();
        for _ in 0..50 {
            let began = Instant::now();
            self.commits(COMMITS_TO_ACTIVE).await?;
            times.push(began.elapsed().as_secs_f64() * 1000.0);
        }
        Ok(median(&times))
    }
}
