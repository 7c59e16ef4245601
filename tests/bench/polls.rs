//! The memory of a long poll: agents with certificates of their own wait for tasks at one process of the node API, over mutual TLS, and its
//! resident memory is measured while their number grows; the slope is the memory of one. The baseline, in the same run, is HAProxy with the
//! same requests over the same mutual TLS in its tarpit, which has no upstream connection. Both are measured over HTTP/1.1, where a
//! connection is a poll and little else, and over HTTP/2, as agents use it: one connection for all requests, ten of which were answered before.
//! While all polls wait, tasks are dispatched to some of them: the latency is measured from the request of a tenant.
//!
//! The polls run in this process, the nodes' entities in another one. `BENCH_POLLS` sets a smaller number than 15,000, as does the
//! limit of open files.

#[path = "polls/fleet.rs"]
mod fleet;
#[path = "polls/haproxy.rs"]
mod haproxy;
#[path = "polls/parked_polls.rs"]
mod parked_polls;

use anyhow::{Context, ensure};
use fleet::Fleet;
use haproxy::Haproxy;
use hdrhistogram::Histogram;
use parked_polls::{HttpVersion, ParkedPolls, Target};
use serde_json::json;
use std::time::{Duration, Instant};
use tests::bench::cpu_time::spent;
use tests::bench::memory::{resident_kib, slope};
use tests::bench::{
    BenchReport, PairedSamples, block_on, conclude, count_from_env, median, programs, raise_open_files, rounded,
};
use tests::cluster::{REGION, TestCluster, id_of};

const POLLS: usize = 15_000;
/// The number of measurements of the memory, at evenly spaced counts.
const LOOKS: usize = 5;
/// The pause before the memory of a process is measured.
const SETTLES_IN: Duration = Duration::from_secs(3);
/// The number of tasks that are dispatched, one after the other.
const DISPATCHED: usize = 200;
const AT_MOST_KB: f64 = 24.0;
const AT_MOST_RATIO: f64 = 1.1;
const AIM_RATIO: f64 = 0.8;
/// The replica with the polls; the other one has everything else.
const HOLDS: usize = 1;

fn main() -> anyhow::Result<()> {
    block_on(run())
}

async fn run() -> anyhow::Result<()> {
    let most = raise_open_files()?;
    // The open files of that process, and of this one: a connection for each poll, and the others of a process.
    let polls =
        count_from_env("BENCH_POLLS")?.unwrap_or(POLLS).min(usize::try_from(most)?.saturating_sub(1000)).max(LOOKS);
    let mut cluster = TestCluster::builder()
        .own_postgres()
        .replicas(2)
        .binaries(&programs()?)
        .variable("RUST_LOG", "warn")
        .variable_of(HOLDS, "SVC_ROLES", "node-api")
        .policy("rate_limit.enrollment_requests_per_minute", 1_000_000)
        .policy("allocation.max_concurrent_per_user", 10_000)
        .start()
        .await;
    let measured = measure(&mut cluster, polls).await;
    conclude(cluster, measured).await
}

async fn measure(cluster: &mut TestCluster, polls: usize) -> anyhow::Result<BenchReport> {
    let fleet = Fleet::enroll(cluster, polls).await?;
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    let mut latencies = None;
    let mut cpu_ms = 0.0;
    for speaks in [HttpVersion::Http1, HttpVersion::Http2] {
        let target = Target::new(&cluster.replicas[HOLDS].node_url(), cluster.authority.certificate_path(), speaks)?;
        let pid = cluster.replicas[HOLDS].pid().context("the replica has ended")?;
        let mut parked = ParkedPolls::at(target);
        let look = async |count: usize| parked_at(cluster, count).await;
        let before = spent(&[pid])?;
        ours.push(slope(&grow(&mut parked, &fleet, pid, look).await?));
        cpu_ms = spent(&[pid])?.saturating_sub(before).as_secs_f64() * 1e3 / fleet.len() as f64;
        if speaks == HttpVersion::Http2 {
            latencies = Some(dispatch_tasks(cluster, &fleet, &mut parked).await?);
        }
        drop(parked);
        // In a new process, since freed memory is reused and would not be measured.
        cluster.replicas[HOLDS].stop().await;
        cluster.restart_replica(HOLDS).await;

        let haproxy = Haproxy::start(cluster, fleet.authorities(), polls)?;
        let mut held = ParkedPolls::at(Target::new(&haproxy.url(), cluster.authority.certificate_path(), speaks)?);
        theirs.push(slope(&grow(&mut held, &fleet, haproxy.pid(), async |_: usize| Ok(())).await?));
    }
    let (from_request, from_answer) = latencies.context("nothing was handed out")?;
    Ok(report(polls, [ours[0], ours[1]], [theirs[0], theirs[1]], &from_request, &from_answer)?
        .metric("cpu_ms_of_connection_http2", rounded(cpu_ms))
        .condition(
            "cpu_ms_of_connection_http2",
            "of that process, from the first connection to the last parked poll, over all connections",
        ))
}

/// Adds polls, and measures the process's memory at each step: polls and KiB.
async fn grow(
    parked: &mut ParkedPolls,
    fleet: &Fleet,
    pid: u32,
    all_there: impl AsyncFn(usize) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<(f64, f64)>> {
    let mut seen = Vec::with_capacity(LOOKS);
    for step in 1..=LOOKS {
        let count = fleet.len() * step / LOOKS;
        parked.grow_to(count, fleet).await?;
        all_there(count).await?;
        tokio::time::sleep(SETTLES_IN).await;
        parked.expect_all_open()?;
        seen.push((count as f64, resident_kib(pid)?));
    }
    Ok(seen)
}

/// Waits until the process reports this number of polls.
async fn parked_at(cluster: &TestCluster, count: usize) -> anyhow::Result<()> {
    let url = format!("{}/metrics", cluster.replicas[HOLDS].operations_url());
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let text = reqwest::get(&url).await?.text().await?;
        let line = text.lines().find_map(|line| line.strip_prefix("node_polls_parked "));
        let parked: usize = line.context("there is no figure of parked polls")?.trim().parse()?;
        if parked >= count {
            return Ok(());
        }
        ensure!(Instant::now() < until, "{parked} of {count} polls are parked");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// The latencies from a tenant's request, and from its response, to the task at the agent, in microseconds.
async fn dispatch_tasks(
    cluster: &TestCluster,
    fleet: &Fleet,
    parked: &mut ParkedPolls,
) -> anyhow::Result<(Histogram<u64>, Histogram<u64>)> {
    let (mut from_request, mut from_answer) = (Histogram::<u64>::new(3)?, Histogram::<u64>::new(3)?);
    for turn in 0..DISPATCHED.min(fleet.len()) {
        let number = turn * fleet.len() / DISPATCHED.min(fleet.len());
        let node = fleet.node(number);
        let wanted = json!({"sku": fleet::SKU, "region_code": REGION, "gpu_count": 1, "node_id": node});
        let asked = Instant::now();
        let created = cluster.user.post("/api/v1/allocations", &wanted).await.created();
        let answered = Instant::now();
        let handed = tokio::time::timeout(Duration::from_secs(30), parked.wait_for_task(number)).await;
        let handed = handed.with_context(|| format!("node {node} got no task for {}", id_of(&created)))??;
        from_request.record(u64::try_from((handed - asked).as_micros())?)?;
        from_answer.record(u64::try_from(handed.saturating_duration_since(answered).as_micros())?)?;
    }
    Ok((from_request, from_answer))
}

fn report(
    polls: usize,
    ours: [f64; 2],
    theirs: [f64; 2],
    from_request: &Histogram<u64>,
    from_answer: &Histogram<u64>,
) -> anyhow::Result<BenchReport> {
    let mut turns = PairedSamples::default();
    turns.round(ours[0], theirs[0]);
    let ratio = median(&[ours[0] / theirs[0]]);
    let aim = |met: bool| if met { "met" } else { "missed" };
    let ms = |times: &Histogram<u64>, quantile| rounded(times.value_at_quantile(quantile) as f64 / 1000.0);
    Ok(BenchReport::new("polls", "KiB each", "HAProxy tarpit", &turns)
        .metric("http2_kib_each", rounded(ours[1]))
        .metric("http2_haproxy_kib_each", rounded(theirs[1]))
        .metric("http2_ratio", rounded(ours[1] / theirs[1]))
        .metric("request_to_task_p50_ms", ms(from_request, 0.5))
        .metric("request_to_task_p99_ms", ms(from_request, 0.99))
        .metric("answer_to_task_p50_ms", ms(from_answer, 0.5))
        .metric("answer_to_task_p99_ms", ms(from_answer, 0.99))
        .metric("at_most_24_kib", aim(ours[0] <= AT_MOST_KB))
        .metric("at_most_1.1_times_haproxy", aim(ratio <= AT_MOST_RATIO))
        .metric("aim_0.8_times_haproxy", aim(ratio <= AIM_RATIO))
        .condition("polls", polls)
        .condition(
            "memory",
            "VmRSS of the process at five counts, slope of the line that fits best; the process is fresh",
        )
        .condition("connection", "mutual TLS 1.3, a certificate for each node; HTTP/1.1 unless stated")
        .condition("ours", "one process with the role node-api alone; the nodes' machines are in another")
        .condition("haproxy", "verify required, http-request tarpit, no backend connection"))
}
