//! The CPU time of the agent's health probes on a machine with 8 GPUs: NVIDIA's management library in the probe's process, the kernel's log
//! with ten lines a second, disk, memory and clock. The aim is less than 0.5 % of a core. The baseline, in the same run and at the same time,
//! is an agent with 8 simulated GPUs, which reads neither library nor log.
//!
//! The library is the fake of `tests/fake-nvml`, which reads its machine from a file at each call: what it costs counts as the probes' time,
//! and the time that a real driver spends in the kernel is not measured.

use anyhow::Context;
use fake_nvml::FakeMachine;
use nix::sys::stat::Mode;
use std::fs::{File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use supervisors::dev::agents::FILES;
use tests::bench::{BenchReport, MeasurementPlan, PairedSamples, block_on, conclude, cpu_time, programs, rounded};
use tests::cluster::{GPU_MEMORY_MIB, GPU_MODEL, GPUS, TestCluster};

const SKU: &str = "h100";
const AIM_PERCENT: f64 = 0.5;
const LOG_LINES_PER_SECOND: u32 = 10;
/// The start and its first inventory are over after this time.
const SETTLES_IN: Duration = Duration::from_secs(10);

fn main() -> anyhow::Result<()> {
    block_on(run())
}

async fn run() -> anyhow::Result<()> {
    let plan = MeasurementPlan::of_seconds(30.0)?;
    let binaries = programs()?;
    let mut cluster =
        TestCluster::builder().own_postgres().binaries(&binaries).variable("RUST_LOG", "warn").start().await;
    let measured = measure(&mut cluster, plan, &binaries).await;
    conclude(cluster, measured).await
}

async fn measure(cluster: &mut TestCluster, plan: MeasurementPlan, binaries: &Path) -> anyhow::Result<BenchReport> {
    let folder = tempfile::Builder::new().prefix("gpuaas-bench-").tempdir()?;
    let probed = ProbedAgent::start(cluster, folder.path(), binaries).await?;
    let simulated = cluster.node(SKU).await;
    let simulated = cluster.agent_pid(&simulated);
    tokio::time::sleep(SETTLES_IN).await;

    let mut turns = PairedSamples::default();
    let mut probe_process = Vec::new();
    for _ in 0..plan.rounds {
        let child = probed.probe_process()?;
        let pids = [probed.agent.id(), child];
        let before = (cpu_time::spent(&pids)?, cpu_time::spent(&[child])?, cpu_time::spent(&[simulated])?);
        probed.log_lines(plan.each).await?;
        let share = |spent: Duration, before: Duration| {
            spent.saturating_sub(before).as_secs_f64() / plan.each.as_secs_f64() * 100.0
        };
        turns.round(share(cpu_time::spent(&pids)?, before.0), share(cpu_time::spent(&[simulated])?, before.2));
        probe_process.push(share(cpu_time::spent(&[child])?, before.1));
    }
    let probes = turns.ours() - turns.baseline();
    Ok(BenchReport::new("health-probes", "% of a core", "simulated GPUs", &turns)
        .metric("probes_percent_of_a_core", rounded(probes))
        .metric("probe_process_percent_of_a_core", rounded(tests::bench::median(&probe_process)))
        .metric("aim_under_half_a_percent", if probes < AIM_PERCENT { "met" } else { "missed" })
        .condition("gpus", GPUS)
        .condition("kernel_log_lines_per_second", LOG_LINES_PER_SECOND))
}

/// The shipped agent over the fake of NVIDIA's library, as a node of the cluster.
struct ProbedAgent {
    agent: Child,
    /// A named pipe: each write is one read of its reader, as with the kernel's log.
    kernel_log: File,
}

impl ProbedAgent {
    async fn start(cluster: &mut TestCluster, folder: &Path, binaries: &Path) -> anyhow::Result<Self> {
        let node = cluster.register(SKU).await;
        let bundle = cluster.bundle(&node).await;
        fake_nvml::install(folder)?;
        let machine = folder.join("machine.json");
        // As the SKU promises them: the node would not be active otherwise.
        let mut gpus = FakeMachine::with_gpus(GPUS);
        for gpu in &mut gpus.gpus {
            gpu.name = format!("NVIDIA {GPU_MODEL}");
            gpu.memory_mib = GPU_MEMORY_MIB;
        }
        gpus.write(&machine)?;
        let log = folder.join("kmsg");
        nix::unistd::mkfifo(&log, Mode::from_bits_truncate(0o600))?;
        let kernel_log = File::options().read(true).write(true).custom_flags(nix::libc::O_NONBLOCK).open(&log)?;
        std::fs::write(folder.join("agent.env"), bundle.to_env_file()?)?;
        let mut command = Command::new(binaries.join("gpuaas-agent"));
        // The sandbox executor does not run as root.
        if let Some(nobody) =
            nix::unistd::User::from_name("nobody")?.filter(|_| nix::unistd::Uid::effective().is_root())
        {
            std::fs::set_permissions(folder, Permissions::from_mode(0o755))?;
            for path in std::iter::once(folder.to_path_buf()).chain(files_of(folder)?) {
                chown(path, Some(nobody.uid.as_raw()), Some(nobody.gid.as_raw()))?;
            }
            command.args(["--user", "nobody"]);
        }
        for (flag, file) in FILES {
            command.arg(flag).arg(folder.join(file));
        }
        let agent = command
            .arg("--kernel-log")
            .arg(&log)
            .env("LD_LIBRARY_PATH", folder)
            .env(fake_nvml::FILE, &machine)
            .env("RUST_LOG", "warn")
            .stdout(Stdio::null())
            .spawn()?;
        let this = Self { agent, kernel_log };
        node.expect_state("active").await;
        Ok(this)
    }

    /// The agent's child that calls the library. Not every kernel lists the children of a process.
    fn probe_process(&self) -> anyhow::Result<u32> {
        let pids = std::fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        pids.into_iter().find(|pid| self.is_probe(*pid)).context("the agent has no probe process")
    }

    fn is_probe(&self, pid: u32) -> bool {
        let file = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let stat = file("stat");
        // After the program's name, which may contain anything: the state, then the parent.
        let parent = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(1)?.parse().ok());
        parent == Some(self.agent.id()) && file("cmdline").split('\0').any(|argument| argument == "--gpu-probe")
    }

    /// Writes ordinary lines to the kernel's log for this time.
    async fn log_lines(&self, duration: Duration) -> anyhow::Result<()> {
        let begun = tokio::time::Instant::now();
        let mut due = tokio::time::interval(Duration::from_secs(1) / LOG_LINES_PER_SECOND);
        let mut sequence = 0_u64;
        while begun.elapsed() < duration {
            due.tick().await;
            sequence += 1;
            let line = format!("6,{sequence},1000000,-;eth0: link is up at 100 Gb/s, full duplex\n");
            (&self.kernel_log).write_all(line.as_bytes())?;
        }
        Ok(())
    }
}

impl Drop for ProbedAgent {
    fn drop(&mut self) {
        // It has no tenants, and its folder is removed.
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}

fn files_of(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries: Result<Vec<_>, _> = std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect();
    Ok(entries?)
}
