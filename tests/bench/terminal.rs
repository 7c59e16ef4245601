//! Terminals: from a keystroke to its echo, and a large file shown, through gateway, mutual TLS and the agent's pseudo-terminal, against
//! terminado (PyPI), which serves a local shell without TLS; the file also against `ssh -tt` to this machine, and a program that does
//! nothing but read the pseudo-terminal, the upper bound of any terminal server. Echo and file are measured with recording on, which is the
//! default, and off. Further metrics: the time from the request for a terminal to its prompt, the memory of an idle session
//! in the process that serves it, and the echo again with 1,000 idle sessions, each with a shell of its own.
//!
//! Everything runs on this machine, without the cluster's load balancers. `BENCH_TERMINALS` sets a smaller number of idle sessions.

#[path = "terminal/baselines.rs"]
mod baselines;
#[path = "terminal/idle.rs"]
mod idle;
#[path = "terminal/shell.rs"]
mod shell;

use anyhow::{Context, ensure};
use baselines::{Sshd, Terminado};
use hdrhistogram::Histogram;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use shell::Shell;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};
use tests::bench::{BenchReport, MeasurementPlan, PairedSamples, count_from_env, cpu_time, median, programs, rounded};
use tests::cluster::terminal::Terminal;
use tests::cluster::{AllocationHandle, GPUS, NodeHandle, TestCluster};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::WebSocketStream;
use uuid::Uuid;

const SKU: &str = "h100";
const IDLE: usize = 1000;
/// The maximum of the policy.
const OF_ONE_ALLOCATION: usize = 50;
/// The size of the file.
const FILE: u64 = 32 << 20;
/// The number of sessions that are opened, one after the other. Each counts against the policy for a minute after its end.
const OPENED: usize = 40;
const WITHIN: Duration = Duration::from_secs(30);

const ECHO_RATIO: f64 = 2.0;
const ECHO_P99_MS: f64 = 2.0;
const CAT_RATIO: f64 = 3.0;
const CAT_OF_SSH: f64 = 0.5;
const IDLE_KIB: f64 = 24.0;
const PROMPT_MS: f64 = 100.0;

fn main() -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(run())
}

async fn run() -> anyhow::Result<()> {
    let plan = MeasurementPlan::from_environment()?;
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let mut cluster = TestCluster::builder()
        .own_postgres()
        .binaries(&programs()?)
        .variable("RUST_LOG", "warn")
        .policy("rate_limit.enrollment_requests_per_minute", 1_000_000)
        // The output here exceeds the size limit of recordings.
        .policy("terminal.recording_max_session_mib", 4_096)
        .policy("terminal.recording_max_user_mib", 1_048_576)
        .policy("terminal.recording_max_total_mib", 1_048_576)
        .policy("terminal.sessions_per_allocation", i64::try_from(OF_ONE_ALLOCATION)?)
        .start()
        .await;
    match measure(&mut cluster, plan).await {
        Ok(report) => {
            cluster.shutdown().await;
            report.publish()
        }
        // A failed benchmark keeps the cluster's folder and prints its path.
        Err(error) => panic!("{error:?}"),
    }
}

struct Measured {
    echo: PairedSamples,
    /// Every keystroke, ours and terminado's, which shows how the machine schedules processes that wake up.
    keystrokes: (Histogram<u64>, Histogram<u64>),
    cat: PairedSamples,
    ssh: Vec<f64>,
    cat_of_ssh: Vec<f64>,
    /// Relative to a program that only reads the pseudo-terminal.
    kernel: Vec<f64>,
    cat_of_kernel: Vec<f64>,
    /// Milliseconds of CPU time per megabyte of output: replica and agent against terminado.
    cost: PairedSamples,
    /// Without recording, relative to the same with it.
    echo_unrecorded: PairedSamples,
    cat_unrecorded: PairedSamples,
}

impl Measured {
    fn new() -> anyhow::Result<Self> {
        let keystrokes = (Histogram::new(3)?, Histogram::new(3)?);
        let turns = PairedSamples::default;
        Ok(Self {
            echo: turns(),
            keystrokes,
            cat: turns(),
            ssh: Vec::new(),
            cat_of_ssh: Vec::new(),
            kernel: Vec::new(),
            cat_of_kernel: Vec::new(),
            cost: turns(),
            echo_unrecorded: turns(),
            cat_unrecorded: turns(),
        })
    }
}

/// The policy that enables recording, and how long an open session may take to apply it.
const RECORDING: &str = "terminal.recording_enabled";
const HEEDS_WITHIN: Duration = Duration::from_secs(4);

async fn measure(cluster: &mut TestCluster, plan: MeasurementPlan) -> anyhow::Result<BenchReport> {
    // As root, the shell runs as another user.
    let readable = std::fs::Permissions::from_mode(0o644);
    let mut file = tempfile::Builder::new().prefix("gpuaas-bench-").permissions(readable).tempfile()?;
    let line = [b"0123456789abcdef".repeat(8).as_slice(), b"\n"].concat();
    for _ in 0..FILE / line.len() as u64 {
        file.write_all(&line)?;
    }
    let (path, bytes) = (file.path().display().to_string(), FILE / line.len() as u64 * line.len() as u64);

    let node = start_node(cluster).await;
    let allocation = cluster.rent(SKU, GPUS).await;
    allocation.expect_state("active").await;
    let (terminado, sshd) = (Terminado::start().await?, Sshd::start().await?);
    let mut measured = Measured::new()?;
    {
        let mut ours = ours(cluster, &allocation).await?;
        let mut theirs = terminado.shell().await?;
        let our_pids = [cluster.replicas[0].pid().context("the replica has ended")?, cluster.agent_pid(&node)];
        for _ in 0..plan.rounds {
            let (our, their) = (ours.echoes(plan.each).await?, theirs.echoes(plan.each).await?);
            let recorded_echo = microseconds(&our, 0.5);
            measured.echo.round(recorded_echo, microseconds(&their, 0.5));
            measured.keystrokes.0.add(&our)?;
            measured.keystrokes.1.add(&their)?;
            let (our_cat, our_cost) = cpu_time::per_megabyte(&our_pids, bytes, ours.cat(&path, bytes)).await?;
            let (their_cat, their_cost) =
                cpu_time::per_megabyte(&[terminado.pid()?], bytes, theirs.cat(&path, bytes)).await?;
            measured.cat.round(our_cat, their_cat);
            measured.cost.round(our_cost, their_cost);
            let by_ssh = sshd.cat(&path, bytes).await?;
            measured.ssh.push(by_ssh);
            measured.cat_of_ssh.push(our_cat / by_ssh);
            let kernel = baselines::only_read(&path, bytes).await?;
            measured.kernel.push(kernel);
            measured.cat_of_kernel.push(our_cat / kernel);

            cluster.set_policy(RECORDING, false).await;
            tokio::time::sleep(HEEDS_WITHIN).await;
            let unrecorded = ours.echoes(plan.each).await?;
            measured.echo_unrecorded.round(microseconds(&unrecorded, 0.5), recorded_echo);
            measured.cat_unrecorded.round(ours.cat(&path, bytes).await?, our_cat);
            cluster.set_policy(RECORDING, true).await;
            tokio::time::sleep(HEEDS_WITHIN).await;
        }
    }
    let prompts = prompts(cluster, &allocation).await?;

    // In a new process, since freed memory is reused and would not be measured.
    let count = count_from_env("BENCH_TERMINALS")?.unwrap_or(IDLE);
    restart(cluster).await;
    let tls = idle::tls_kib(cluster, count).await?;
    restart(cluster).await;
    let idle = idle::grow(cluster, count).await?;
    let mut busy = (Histogram::<u64>::new(3)?, Histogram::<u64>::new(3)?);
    // Terminado has one session then, on the machine with our idle ones: its delays are not its own either.
    let (mut ours, mut theirs) = (ours(cluster, &allocation).await?, terminado.shell().await?);
    for _ in 0..plan.rounds {
        busy.0.add(ours.echoes(plan.each).await?)?;
        busy.1.add(theirs.echoes(plan.each).await?)?;
    }
    report(&measured, &prompts, count, (idle.kib_each, tls), &busy)
}

async fn restart(cluster: &mut TestCluster) {
    cluster.replicas[0].stop().await;
    cluster.restart_replica(0).await;
}

/// A node whose agent connects to the replica directly.
async fn start_node(cluster: &mut TestCluster) -> NodeHandle {
    let node = cluster.register(SKU).await;
    let mut bundle = cluster.bundle(&node).await;
    bundle.api_url = cluster.replicas[0].node_url();
    cluster.start_agent(&node.name, &bundle);
    node.expect_state("active").await;
    node
}

/// A connection to a new session.
async fn open(cluster: &TestCluster, allocation: Uuid) -> anyhow::Result<WebSocketStream<TlsStream<TcpStream>>> {
    let mut terminal = opening(cluster, allocation).await?;
    terminal.attached().await;
    Ok(terminal.into_socket())
}

async fn opening(cluster: &TestCluster, allocation: Uuid) -> anyhow::Result<Terminal> {
    let user = cluster.at_replica(0, "user");
    let issued = cluster.request_terminal_token(&user, allocation, None).await.created();
    let token = issued["token"].as_str().context("the answer has no token")?;
    Ok(cluster.gateway_at(0).open(token, None).await)
}

async fn ours(cluster: &TestCluster, allocation: &AllocationHandle) -> anyhow::Result<Shell> {
    Shell::Ours(Box::new(open(cluster, allocation.id).await?)).made_plain().await
}

/// The time from the request for a terminal to its prompt, in microseconds, each on a new connection.
async fn prompts(cluster: &TestCluster, allocation: &AllocationHandle) -> anyhow::Result<Histogram<u64>> {
    let mut times = Histogram::<u64>::new(3)?;
    for _ in 0..OPENED {
        let began = Instant::now();
        let mut terminal = opening(cluster, allocation.id).await?;
        let is_prompt = |shown: &[u8]| shown.ends_with(b"$ ") || shown.ends_with(b"# ");
        while !is_prompt(&terminal.shown) {
            ensure!(began.elapsed() < WITHIN, "no prompt: {}", terminal.text());
            terminal.receive(Duration::from_secs(1)).await;
        }
        times.record(u64::try_from(began.elapsed().as_micros())?)?;
        terminal.control(&serde_json::json!({ "type": "exit" })).await;
        terminal.close_code().await;
    }
    Ok(times)
}

fn microseconds(times: &Histogram<u64>, quantile: f64) -> f64 {
    times.value_at_quantile(quantile) as f64 / 1000.0
}

fn report(
    measured: &Measured,
    prompts: &Histogram<u64>,
    count: usize,
    (idle, tls): (f64, f64),
    (busy, beside_them): &(Histogram<u64>, Histogram<u64>),
) -> anyhow::Result<BenchReport> {
    let aim = |met: bool| if met { "met" } else { "missed" };
    let ms = |microseconds: f64| rounded(microseconds / 1000.0);
    let (p99, prompt) = (microseconds(busy, 0.99) / 1000.0, prompts.value_at_quantile(0.5) as f64 / 1000.0);
    // The user's connection and the agent's.
    let beside = idle - 2.0 * tls;
    let Measured {
        echo,
        keystrokes: (quiet, quiet_theirs),
        cat,
        ssh,
        cat_of_ssh,
        kernel,
        cat_of_kernel,
        cost,
        echo_unrecorded,
        cat_unrecorded,
    } = measured;
    Ok(BenchReport::new("terminal", "us from keystroke to echo, p50", "terminado", echo)
        .metric("echo_p99_ms", ms(microseconds(quiet, 0.99)))
        .metric("echo_terminado_p99_ms", ms(microseconds(quiet_theirs, 0.99)))
        .metric("echo_terminado_beside_idle_p99_ms", ms(microseconds(beside_them, 0.99)))
        .metric("echo_among_idle_p95_ms", ms(microseconds(busy, 0.95)))
        .metric("echo_among_idle_p50_ms", ms(microseconds(busy, 0.5)))
        .metric("echo_among_idle_p99_ms", rounded(p99))
        .metric("cat_mb_per_second", rounded(cat.ours()))
        .metric("cat_terminado_mb_per_second", rounded(cat.baseline()))
        .metric("cat_ratio", rounded(cat.ratio()))
        .metric("cat_ssh_mb_per_second", rounded(median(ssh)))
        .metric("cat_of_ssh_ratio", rounded(median(cat_of_ssh)))
        .metric("cat_kernel_mb_per_second", rounded(median(kernel)))
        .metric("cat_of_kernel_ratio", rounded(median(cat_of_kernel)))
        .metric("cpu_ms_per_mb", rounded(cost.ours()))
        .metric("cpu_terminado_ms_per_mb", rounded(cost.baseline()))
        .metric("cpu_ratio", rounded(cost.ratio()))
        .metric("echo_unrecorded_us", rounded(echo_unrecorded.ours()))
        .metric("echo_unrecorded_of_recorded", rounded(echo_unrecorded.ratio()))
        .metric("cat_unrecorded_mb_per_second", rounded(cat_unrecorded.ours()))
        .metric("cat_unrecorded_of_recorded", rounded(cat_unrecorded.ratio()))
        .metric("post_to_prompt_p50_ms", rounded(prompt))
        .metric("post_to_prompt_p99_ms", rounded(prompts.value_at_quantile(0.99) as f64 / 1000.0))
        .metric("idle_session_kib", rounded(idle))
        .metric("tls_connection_kib", rounded(tls))
        .metric("idle_session_beside_tls_kib", rounded(beside))
        .metric("aim_echo_at_most_2_times_terminado", aim(echo.ratio() <= ECHO_RATIO))
        .metric("aim_echo_p99_under_2_ms_among_idle", aim(p99 < ECHO_P99_MS))
        .metric("aim_cat_3_times_terminado", aim(cat.ratio() >= CAT_RATIO))
        .metric("aim_cat_half_of_ssh", aim(median(cat_of_ssh) >= CAT_OF_SSH))
        .metric("aim_prompt_p50_under_100_ms", aim(prompt < PROMPT_MS))
        .metric("aim_idle_at_most_24_kib_beside_tls", aim(beside <= IDLE_KIB))
        .condition("idle_sessions", count)
        .condition("file_mib", FILE >> 20)
        .condition("recording", "on (best-effort), unless stated otherwise")
        .condition("kernel", "a program that reads the pseudo-terminal and does nothing with it")
        .condition("cpu", "of replica and agent together, and of terminado's one process; without the user's end")
        .condition("shell", "bash --noprofile --norc on both ends; a keystroke every 3 ms")
        .condition("ours", "one process with all roles; TLS to it and mutual TLS from the agent; executor sandbox")
        .condition("terminado", "0.18.1, UniqueTermManager, in clear on loopback")
        .condition("memory", "VmRSS of the fresh process at five counts, slope of the line that fits best; the user's end, the \
                              agent's end and the actor; beside TLS is without two connections on which nothing was asked"))
}
