//! Terminals: from a keystroke to its echo, and a large file shown, through gateway, mutual TLS and the agent's pseudo-terminal, against
//! terminado (PyPI), which serves a local shell in clear; the file against `ssh -tt` to this machine, too, and against a program that does
//! nothing but read the pseudo-terminal: no terminal server shows more than the kernel hands out. Echo and file with recording on, as it is
//! unless told otherwise, and off. Then how long it takes from asking for a terminal to its prompt, what an idle session takes in the memory
//! of the process that serves it, and the echo once more while there are 1,000 of them, each with a shell of its own.
//!
//! All ends run on this machine; nothing of the world's balancers lies in between. `BENCH_TERMINALS` takes fewer idle sessions.

#[path = "terminal/cost.rs"]
mod cost;
#[path = "terminal/idle.rs"]
mod idle;
#[path = "terminal/others.rs"]
mod others;
#[path = "terminal/shell.rs"]
mod shell;

use anyhow::{Context, ensure};
use hdrhistogram::Histogram;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use others::{Sshd, Terminado};
use shell::Shell;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};
use tests::bench::{Plan, Report, Turns, fewer, median, programs, rounded};
use tests::world::terminal::Terminal;
use tests::world::{GPUS, OnboardedNode, Rented, World};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::WebSocketStream;
use uuid::Uuid;

const SKU: &str = "h100";
const IDLE: usize = 1000;
/// What policy allows at most.
const OF_ONE_ALLOCATION: usize = 50;
/// The file that is shown.
const FILE: u64 = 32 << 20;
/// Sessions opened, one after the other, to see how long it takes. Each counts against the policy for a minute, though it has ended.
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
    let plan = Plan::from_environment()?;
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let mut world = World::plan()
        .binaries(&programs()?)
        .variable("RUST_LOG", "warn")
        .policy("rate_limit.enrollment_requests_per_minute", 1_000_000)
        // What is shown here is far more than anybody's recording may be.
        .policy("terminal.recording_max_session_mib", 4_096)
        .policy("terminal.recording_max_user_mib", 1_048_576)
        .policy("terminal.recording_max_total_mib", 1_048_576)
        .policy("terminal.sessions_per_allocation", i64::try_from(OF_ONE_ALLOCATION)?)
        .start()
        .await;
    match measure(&mut world, plan).await {
        Ok(report) => {
            world.end().await;
            report.publish()
        }
        // The world goes as it stands, and tells where it lies.
        Err(error) => panic!("{error:?}"),
    }
}

struct Measured {
    echo: Turns,
    /// Every keystroke of it, ours and terminado's: how the machine treats whoever wakes up.
    keystrokes: (Histogram<u64>, Histogram<u64>),
    cat: Turns,
    ssh: Vec<f64>,
    cat_of_ssh: Vec<f64>,
    /// Of what a program that only reads the terminal gets.
    kernel: Vec<f64>,
    cat_of_kernel: Vec<f64>,
    /// Milliseconds of processor time for a megabyte shown: replica and agent against terminado.
    cost: Turns,
    /// Without recording, against the same with it.
    echo_unrecorded: Turns,
    cat_unrecorded: Turns,
}

impl Measured {
    fn new() -> anyhow::Result<Self> {
        let keystrokes = (Histogram::new(3)?, Histogram::new(3)?);
        let turns = Turns::default;
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

/// The policy that switches recording, and how long a living session may take to heed it.
const RECORDING: &str = "terminal.recording_enabled";
const HEEDS_WITHIN: Duration = Duration::from_secs(4);

async fn measure(world: &mut World, plan: Plan) -> anyhow::Result<Report> {
    // The shell's user is another one where this is root.
    let readable = std::fs::Permissions::from_mode(0o644);
    let mut file = tempfile::Builder::new().prefix("gpuaas-bench-").permissions(readable).tempfile()?;
    let line = [b"0123456789abcdef".repeat(8).as_slice(), b"\n"].concat();
    for _ in 0..FILE / line.len() as u64 {
        file.write_all(&line)?;
    }
    let (path, bytes) = (file.path().display().to_string(), FILE / line.len() as u64 * line.len() as u64);

    let node = start_node(world).await;
    let allocation = world.rent(SKU, GPUS).await;
    allocation.expect_state("active").await;
    let (terminado, sshd) = (Terminado::start().await?, Sshd::start().await?);
    let mut measured = Measured::new()?;
    {
        let mut ours = ours(world, &allocation).await?;
        let mut theirs = terminado.shell().await?;
        let our_pids = [world.replicas[0].pid().context("the replica has ended")?, world.agent_pid(&node)];
        for _ in 0..plan.rounds {
            let (our, their) = (ours.echoes(plan.each).await?, theirs.echoes(plan.each).await?);
            let recorded_echo = microseconds(&our, 0.5);
            measured.echo.round(recorded_echo, microseconds(&their, 0.5));
            measured.keystrokes.0.add(&our)?;
            measured.keystrokes.1.add(&their)?;
            let (our_cat, our_cost) = cost::of(&our_pids, bytes, ours.cat(&path, bytes)).await?;
            let (their_cat, their_cost) = cost::of(&[terminado.pid()?], bytes, theirs.cat(&path, bytes)).await?;
            measured.cat.round(our_cat, their_cat);
            measured.cost.round(our_cost, their_cost);
            let by_ssh = sshd.cat(&path, bytes).await?;
            measured.ssh.push(by_ssh);
            measured.cat_of_ssh.push(our_cat / by_ssh);
            let kernel = others::only_read(&path, bytes).await?;
            measured.kernel.push(kernel);
            measured.cat_of_kernel.push(our_cat / kernel);

            world.set_policy(RECORDING, false).await;
            tokio::time::sleep(HEEDS_WITHIN).await;
            let unrecorded = ours.echoes(plan.each).await?;
            measured.echo_unrecorded.round(microseconds(&unrecorded, 0.5), recorded_echo);
            measured.cat_unrecorded.round(ours.cat(&path, bytes).await?, our_cat);
            world.set_policy(RECORDING, true).await;
            tokio::time::sleep(HEEDS_WITHIN).await;
        }
    }
    let prompts = prompts(world, &allocation).await?;

    // From the beginning: memory that a process has had once it does not ask for again.
    let count = fewer("BENCH_TERMINALS")?.unwrap_or(IDLE);
    restart(world).await;
    let tls = idle::tls_kib(world, count).await?;
    restart(world).await;
    let idle = idle::grow(world, count).await?;
    let mut busy = (Histogram::<u64>::new(3)?, Histogram::<u64>::new(3)?);
    // Terminado serves one session then, and nobody else, on a machine where ours idle: what it waits for is not its own either.
    let (mut ours, mut theirs) = (ours(world, &allocation).await?, terminado.shell().await?);
    for _ in 0..plan.rounds {
        busy.0.add(ours.echoes(plan.each).await?)?;
        busy.1.add(theirs.echoes(plan.each).await?)?;
    }
    report(&measured, &prompts, count, (idle.kib_each, tls), &busy)
}

async fn restart(world: &mut World) {
    world.replicas[0].stop().await;
    world.restart_replica(0).await;
}

/// A node whose agent speaks to the replica itself.
async fn start_node(world: &mut World) -> OnboardedNode {
    let node = world.register(SKU).await;
    let mut bundle = world.bundle(&node).await;
    bundle.api_url = world.replicas[0].node_url();
    world.start_agent(&node.name, &bundle);
    node.expect_state("active").await;
    node
}

/// A connection to a fresh session.
async fn open(world: &World, allocation: Uuid) -> anyhow::Result<WebSocketStream<TlsStream<TcpStream>>> {
    let mut terminal = opening(world, allocation).await?;
    terminal.attached().await;
    Ok(terminal.into_socket())
}

async fn opening(world: &World, allocation: Uuid) -> anyhow::Result<Terminal> {
    let user = world.at_replica(0, "user");
    let issued = world.try_ticket(&user, allocation, None).await.created();
    let token = issued["token"].as_str().context("the answer has no token")?;
    Ok(world.gateway_at(0).open(token, None).await)
}

async fn ours(world: &World, allocation: &Rented) -> anyhow::Result<Shell> {
    Shell::Ours(Box::new(open(world, allocation.id).await?)).made_plain().await
}

/// From asking for a terminal to its prompt, in microseconds, on connections that are made each time.
async fn prompts(world: &World, allocation: &Rented) -> anyhow::Result<Histogram<u64>> {
    let mut times = Histogram::<u64>::new(3)?;
    for _ in 0..OPENED {
        let began = Instant::now();
        let mut terminal = opening(world, allocation.id).await?;
        let is_prompt = |shown: &[u8]| shown.ends_with(b"$ ") || shown.ends_with(b"# ");
        while !is_prompt(&terminal.shown) {
            ensure!(began.elapsed() < WITHIN, "no prompt: {}", terminal.text());
            terminal.hear(Duration::from_secs(1)).await;
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
) -> anyhow::Result<Report> {
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
    Ok(Report::new("terminal", "us from keystroke to echo, p50", "terminado", echo)
        .figure("echo_p99_ms", ms(microseconds(quiet, 0.99)))
        .figure("echo_terminado_p99_ms", ms(microseconds(quiet_theirs, 0.99)))
        .figure("echo_terminado_beside_idle_p99_ms", ms(microseconds(beside_them, 0.99)))
        .figure("echo_among_idle_p95_ms", ms(microseconds(busy, 0.95)))
        .figure("echo_among_idle_p50_ms", ms(microseconds(busy, 0.5)))
        .figure("echo_among_idle_p99_ms", rounded(p99))
        .figure("cat_mb_per_second", rounded(cat.ours()))
        .figure("cat_terminado_mb_per_second", rounded(cat.baseline()))
        .figure("cat_ratio", rounded(cat.ratio()))
        .figure("cat_ssh_mb_per_second", rounded(median(ssh)))
        .figure("cat_of_ssh_ratio", rounded(median(cat_of_ssh)))
        .figure("cat_kernel_mb_per_second", rounded(median(kernel)))
        .figure("cat_of_kernel_ratio", rounded(median(cat_of_kernel)))
        .figure("cpu_ms_per_mb", rounded(cost.ours()))
        .figure("cpu_terminado_ms_per_mb", rounded(cost.baseline()))
        .figure("cpu_ratio", rounded(cost.ratio()))
        .figure("echo_unrecorded_us", rounded(echo_unrecorded.ours()))
        .figure("echo_unrecorded_of_recorded", rounded(echo_unrecorded.ratio()))
        .figure("cat_unrecorded_mb_per_second", rounded(cat_unrecorded.ours()))
        .figure("cat_unrecorded_of_recorded", rounded(cat_unrecorded.ratio()))
        .figure("post_to_prompt_p50_ms", rounded(prompt))
        .figure("post_to_prompt_p99_ms", rounded(prompts.value_at_quantile(0.99) as f64 / 1000.0))
        .figure("idle_session_kib", rounded(idle))
        .figure("tls_connection_kib", rounded(tls))
        .figure("idle_session_beside_tls_kib", rounded(beside))
        .figure("aim_echo_at_most_2_times_terminado", aim(echo.ratio() <= ECHO_RATIO))
        .figure("aim_echo_p99_under_2_ms_among_idle", aim(p99 < ECHO_P99_MS))
        .figure("aim_cat_3_times_terminado", aim(cat.ratio() >= CAT_RATIO))
        .figure("aim_cat_half_of_ssh", aim(median(cat_of_ssh) >= CAT_OF_SSH))
        .figure("aim_prompt_p50_under_100_ms", aim(prompt < PROMPT_MS))
        .figure("aim_idle_at_most_24_kib_beside_tls", aim(beside <= IDLE_KIB))
        .condition("idle_sessions", count)
        .condition("file_mib", FILE >> 20)
        .condition("recording", "on (best-effort), where it is not said to be off")
        .condition("kernel", "a program that reads the pseudo-terminal and does nothing with it")
        .condition("cpu", "of replica and agent together, and of terminado's one process; without the user's end")
        .condition("shell", "bash --noprofile --norc on both ends; a keystroke every 3 ms")
        .condition("ours", "one process with all roles; TLS to it and mutual TLS from the agent; executor sandbox")
        .condition("terminado", "0.18.1, UniqueTermManager, in clear on loopback")
        .condition("memory", "VmRSS of the fresh process at five counts, slope of the line that fits best; the user's end, the \
                              agent's end and the actor; beside TLS is without two connections on which nothing was asked"))
}
