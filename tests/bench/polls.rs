//! What a parked poll costs: agents with certificates of their own wait for tasks at one process of the node API, over mutual TLS, and its
//! resident memory is looked at while they become more; the slope is what one of them takes. Beside it, in the same run, HAProxy holds the
//! same requests over the same mutual TLS in its tarpit, which has no connection behind it. Both are measured over HTTP/1.1, where a
//! connection is a poll and little else, and over HTTP/2, which agents speak: one connection for all that they say. While all are parked, tasks are handed to some of them: how long that takes from the request of a tenant.
//!
//! The waiting ends live in this process, the nodes' machines in another one. `BENCH_POLLS` takes fewer than the 15,000, and so does the
//! limit of open files.

#[path = "polls/fleet.rs"]
mod fleet;
#[path = "polls/haproxy.rs"]
mod haproxy;
#[path = "polls/parked.rs"]
mod parked;

use anyhow::{Context, ensure};
use fleet::Fleet;
use haproxy::Haproxy;
use hdrhistogram::Histogram;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use parked::{Parked, Speaks, Target};
use serde_json::json;
use std::time::{Duration, Instant};
use tests::bench::memory::{resident_kib, slope};
use tests::bench::{Report, Turns, fewer, median, programs, rounded};
use tests::world::{REGION, World, id_of};

const POLLS: usize = 15_000;
/// At so many counts, evenly apart, memory is looked at.
const LOOKS: usize = 5;
/// How long a process is left alone before it is looked at.
const SETTLES_IN: Duration = Duration::from_secs(3);
/// Tasks handed out, one after the other.
const HANDED: usize = 200;
const AT_MOST_KB: f64 = 24.0;
const AT_MOST_RATIO: f64 = 1.1;
const AIM_RATIO: f64 = 0.8;
/// The replica whose process holds the polls; the other one has everything else.
const HOLDS: usize = 1;

fn main() -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(run())
}

async fn run() -> anyhow::Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    // Of the process that holds them, and of this one: a connection each, and what else a process has open.
    let polls = fewer("BENCH_POLLS")?.unwrap_or(POLLS).min(usize::try_from(most)?.saturating_sub(1000)).max(LOOKS);
    let mut world = World::plan()
        .replicas(2)
        .binaries(&programs()?)
        .variable("RUST_LOG", "warn")
        .variable_of(HOLDS, "SVC_ROLES", "node-api")
        .policy("rate_limit.enrollment_requests_per_minute", 1_000_000)
        .policy("allocation.max_concurrent_per_user", 10_000)
        .start()
        .await;
    match measure(&mut world, polls).await {
        Ok(report) => {
            world.end().await;
            report.publish()
        }
        // The world goes as it stands, and tells where it lies.
        Err(error) => panic!("{error:?}"),
    }
}

async fn measure(world: &mut World, polls: usize) -> anyhow::Result<Report> {
    let fleet = Fleet::enroll(world, polls).await?;
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    let mut latencies = None;
    for speaks in [Speaks::Http1, Speaks::Http2] {
        let target = Target::new(&world.replicas[HOLDS].node_url(), world.authority.certificate_path(), speaks)?;
        let pid = world.replicas[HOLDS].pid().context("the replica has ended")?;
        let mut parked = Parked::at(target);
        let look = async |count: usize| parked_at(world, count).await;
        ours.push(slope(&grow(&mut parked, &fleet, pid, look).await?));
        if speaks == Speaks::Http2 {
            latencies = Some(hand_out(world, &fleet, &mut parked).await?);
        }
        drop(parked);
        // From the beginning: memory that a process has had once it does not ask for again.
        world.replicas[HOLDS].stop().await;
        world.restart_replica(HOLDS).await;

        let haproxy = Haproxy::start(world, fleet.authorities(), polls)?;
        let mut held = Parked::at(Target::new(&haproxy.url(), world.authority.certificate_path(), speaks)?);
        theirs.push(slope(&grow(&mut held, &fleet, haproxy.pid(), async |_: usize| Ok(())).await?));
    }
    let (from_request, from_answer) = latencies.context("nothing was handed out")?;
    report(polls, [ours[0], ours[1]], [theirs[0], theirs[1]], &from_request, &from_answer)
}

/// Parks ever more, and looks at the process's memory at each step: polls and KiB.
async fn grow(
    parked: &mut Parked,
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

/// Waits until the process that holds the polls says that it holds so many.
async fn parked_at(world: &World, count: usize) -> anyhow::Result<()> {
    let url = format!("{}/metrics", world.replicas[HOLDS].operations_url());
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

/// From a tenant's request, and from its answer, to the task in the agent's hands, in microseconds.
async fn hand_out(
    world: &World,
    fleet: &Fleet,
    parked: &mut Parked,
) -> anyhow::Result<(Histogram<u64>, Histogram<u64>)> {
    let (mut from_request, mut from_answer) = (Histogram::<u64>::new(3)?, Histogram::<u64>::new(3)?);
    for turn in 0..HANDED.min(fleet.len()) {
        let number = turn * fleet.len() / HANDED.min(fleet.len());
        let node = fleet.node(number);
        let wanted = json!({"sku": fleet::SKU, "region_code": REGION, "gpu_count": 1, "node_id": node});
        let asked = Instant::now();
        let created = world.user.post("/api/v1/allocations", &wanted).await.created();
        let answered = Instant::now();
        let handed = tokio::time::timeout(Duration::from_secs(30), parked.handed(number)).await;
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
) -> anyhow::Result<Report> {
    let mut turns = Turns::default();
    turns.round(ours[0], theirs[0]);
    let ratio = median(&[ours[0] / theirs[0]]);
    let aim = |met: bool| if met { "met" } else { "missed" };
    let ms = |times: &Histogram<u64>, quantile| rounded(times.value_at_quantile(quantile) as f64 / 1000.0);
    Ok(Report::new("polls", "KiB each", "HAProxy tarpit", &turns)
        .figure("http2_kib_each", rounded(ours[1]))
        .figure("http2_haproxy_kib_each", rounded(theirs[1]))
        .figure("http2_ratio", rounded(ours[1] / theirs[1]))
        .figure("request_to_task_p50_ms", ms(from_request, 0.5))
        .figure("request_to_task_p99_ms", ms(from_request, 0.99))
        .figure("answer_to_task_p50_ms", ms(from_answer, 0.5))
        .figure("answer_to_task_p99_ms", ms(from_answer, 0.99))
        .figure("at_most_24_kib", aim(ours[0] <= AT_MOST_KB))
        .figure("at_most_1.1_times_haproxy", aim(ratio <= AT_MOST_RATIO))
        .figure("aim_0.8_times_haproxy", aim(ratio <= AIM_RATIO))
        .condition("polls", polls)
        .condition(
            "memory",
            "VmRSS of the process at five counts, slope of the line that fits best; the process is fresh",
        )
        .condition("connection", "mutual TLS 1.3, a certificate for each node; HTTP/1.1 where not said")
        .condition("ours", "one process with the role node-api alone; the nodes' machines are in another")
        .condition("haproxy", "verify required, http-request tarpit, no backend connection"))
}
