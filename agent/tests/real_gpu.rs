//! The agent over NVIDIA's own driver and a real GPU: `cargo test -p agent --test real_gpu` on a machine that has one, which needs Python 3 in
//! addition. Elsewhere these tests are reported as skipped. Nothing resets a GPU or changes its settings.
#![allow(clippy::unwrap_used, clippy::expect_used, unreachable_pub, dead_code)]
#![allow(clippy::print_stdout, reason = "figures, for a run with --no-capture")]

mod fake_control_plane;
mod skipped_tests;

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use agent::gpu_probe::{DEFAULT_DEADLINE, GpuProbe, GpuSurvey};
use agent::gpus::{DeviceUse, Gpus, MemoryUse};
use agent::health::kernel_log::{self, KernelLog};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;
use wire::heartbeat::Heartbeat;
use wire::inventory::{DeviceRef, GpuSource};
use wire::task::{ResetGpu, Task, TaskResult, TaskStatus};
use wire::validation::{LoadLevel, ValidationLoad};

use fake_control_plane::{FakeControlPlane, SpawnedAgent, eventually};

/// A program with a context on the first GPU. It prints a line and waits.
const HOLDER: &str = "
import ctypes
cuda = ctypes.CDLL('libcuda.so.1')
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
print('ready', flush=True)
input()
";
/// A program that writes where it has no memory, which its GPU reports. Only the program ends by it.
const FAULT: &str = "
program = b'''.version 6.0
.target sm_50
.address_size 64
.visible .entry fault(.param .u64 param_address) {
    .reg .b32 %value;
    .reg .b64 %address;
    ld.param.u64 %address, [param_address];
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
'''
from ctypes import *
cuda = CDLL('libcuda.so.1')
context, module, function, memory = c_void_p(), c_void_p(), c_void_p(), c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuModuleLoadData(byref(module), program) == 0
assert cuda.cuModuleGetFunction(byref(function), module, b'fault') == 0
assert cuda.cuMemAlloc_v2(byref(memory), c_size_t(4096)) == 0
address = c_uint64(memory.value + 2**42)
parameters = (c_void_p * 1)(cast(byref(address), c_void_p))
assert cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, parameters, None) == 0
status = cuda.cuCtxSynchronize()
assert status == 700, status
";

/// A machine with a GPU, for one test at a time.
struct RealMachine {
    folder: TempDir,
    fake: FakeControlPlane,
    _alone: Flock<std::fs::File>,
}

impl RealMachine {
    /// `None`, and a report, where there is none.
    async fn here() -> Option<Self> {
        let has_gpu = std::fs::read_dir("/proc/driver/nvidia/gpus").is_ok_and(|mut gpus| gpus.next().is_some());
        if !has_gpu {
            skipped_tests::report_skipped("this machine has no GPU of NVIDIA's with its driver");
            return None;
        }
        let lock = std::fs::File::create(std::env::temp_dir().join("gpuaas-real-gpu.lock")).unwrap();
        let alone = tokio::task::spawn_blocking(|| Flock::lock(lock, FlockArg::LockExclusive).unwrap());
        let alone = alone.await.unwrap();
        Some(Self { folder: tempfile::tempdir().unwrap(), fake: FakeControlPlane::start().await, _alone: alone })
    }

    fn agent(&self, more: &[&str]) -> SpawnedAgent {
        SpawnedAgent::start_with(self.folder.path(), &self.fake.bundle(self.folder.path()), more, &[])
    }

    fn heartbeat(&self) -> Option<Heartbeat> {
        self.fake.calls().heartbeats.last().cloned()
    }

    fn heartbeats(&self) -> usize {
        self.fake.calls().heartbeats.len()
    }

    fn findings(&self) -> Option<Vec<String>> {
        let findings = self.heartbeat()?.findings?;
        Some(findings.iter().map(|finding| format!("{}/{}", finding.probe, finding.code)).collect())
    }

    async fn result(&self, task: Task) -> TaskResult {
        let task = self.fake.payload(task);
        self.fake.dispatch(&task);
        self.result_of(task.task_id, Duration::from_secs(120)).await
    }

    async fn result_of(&self, task_id: Uuid, limit: Duration) -> TaskResult {
        let begun = Instant::now();
        loop {
            let found = self.fake.calls().results.iter().find(|it| it.0 == task_id).map(|it| it.1.clone());
            match found {
                Some(result) => return result,
                None => assert!(begun.elapsed() < limit, "the task has no result"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn validated(&self, level: LoadLevel, load_seconds: u32) -> Value {
        let load = Some(ValidationLoad { level, load_seconds, gpu_uuid: None });
        let result = self.result(Task::Validate { load }).await;
        assert_eq!(result.status, TaskStatus::Succeeded, "{result:?}");
        json!(result.output)
    }
}

/// The driver, as this test asks it: by a child process that is the agent's program.
fn probe() -> GpuProbe {
    GpuProbe::new(env!("CARGO_BIN_EXE_gpuaas-agent").into(), DEFAULT_DEADLINE)
}

fn survey() -> GpuSurvey {
    probe().survey(false).unwrap()
}

/// A Python program, which is killed at the end.
struct Script(Child);

impl Script {
    fn start(text: &str) -> Self {
        let mut python = Command::new("python3");
        let child = python.args(["-c", text]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        Self(child)
    }

    /// A program with a context on the first GPU.
    fn holder() -> Self {
        let mut holder = Self::start(HOLDER);
        let mut line = String::new();
        BufReader::new(holder.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        holder
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn real_gpu_is_listed_and_measured_and_a_healthy_one_has_no_finding() {
    let Some(node) = RealMachine::here().await else { return };
    let _agent = node.agent(&[]);
    eventually(|| (node.heartbeats() > 3).then_some(())).await;
    let heartbeat = node.heartbeat().unwrap();
    assert_eq!(heartbeat.inventory.gpu_source, GpuSource::Nvml);
    assert!(heartbeat.inventory.driver_version.is_some() && !heartbeat.inventory.gpus.is_empty(), "{heartbeat:?}");
    for gpu in &heartbeat.inventory.gpus {
        assert!(gpu.uuid.starts_with("GPU-") && gpu.uuid.len() == 40 && gpu.memory_mib > 1024, "{gpu:?}");
        assert!(!gpu.model.is_empty() && !gpu.model.starts_with("NVIDIA"), "{gpu:?}");
    }
    for load in &heartbeat.telemetry.gpus {
        assert!(load.temperature_celsius.is_some_and(|celsius| (10..100).contains(&celsius)), "{load:?}");
        assert!(load.power_milliwatts.is_some_and(|milliwatts| milliwatts > 1000), "{load:?}");
        assert!(load.utilization_percent.is_some() && load.memory_used_mib.is_some(), "{load:?}");
    }
    assert_eq!(heartbeat.telemetry.gpus.len(), heartbeat.inventory.gpus.len());
    assert_eq!(node.findings(), Some(vec![]));
}

#[tokio::test]
async fn program_on_a_real_gpu_is_found_and_its_memory_is_free_after_it_was_killed() {
    let Some(_machine) = RealMachine::here().await else { return };
    let uuid = survey().gpus[0].info.uuid.clone();
    let gpus = Gpus::Nvml(Box::new(probe()));
    assert_eq!((gpus.device_use(&uuid), gpus.memory_use(&uuid)), (DeviceUse::Idle, MemoryUse::DriverOnly));
    let holder = Script::holder();
    assert_eq!(gpus.device_use(&uuid), DeviceUse::BusyWith(vec![holder.0.id()]));
    assert!(matches!(gpus.memory_use(&uuid), MemoryUse::Held { .. }), "{:?}", gpus.memory_use(&uuid));
    drop(holder);
    gpus.wait_until_freed([uuid.as_str()].into_iter());
    assert_eq!((gpus.device_use(&uuid), gpus.memory_use(&uuid)), (DeviceUse::Idle, MemoryUse::DriverOnly));
}

#[tokio::test]
async fn fault_of_a_program_on_a_real_gpu_is_an_xid_of_the_kernels_log_and_of_the_driver() {
    let Some(_machine) = RealMachine::here().await else { return };
    let probe = probe();
    let before = probe.survey(true).unwrap();
    let address = before.gpus[0].pci_address.clone().unwrap();
    assert!(Script::start(FAULT).0.wait().unwrap().success());
    let mut seen = Vec::new();
    let begun = Instant::now();
    while seen.is_empty() {
        seen = probe.survey(true).unwrap().gpus[0].condition.xids.clone();
        assert!(begun.elapsed() < Duration::from_secs(20), "the driver has no event");
    }
    // 31: a fault of the memory's addresses; 13 and 43 on other GPUs: a program can cause all of them.
    assert!(seen.iter().all(|(xid, _)| [13, 31, 43].contains(xid)), "{seen:?}");
    if !nix::unistd::Uid::effective().is_root() {
        return skipped_tests::report_skipped("its second half needs root, to read the kernel's log");
    }
    let stop = CancellationToken::new();
    let log = KernelLog::follow(Path::new(kernel_log::DEVICE), None, stop.clone(), || {});
    let begun = Instant::now();
    let mut found = false;
    while !found {
        found = log.take().faults.keys().any(|kind| kind.pci_address == address && kind.code == seen[0].0.to_string());
        assert!(begun.elapsed() < Duration::from_secs(20), "the kernel's log has no line of it");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    stop.cancel();
}

#[tokio::test]
async fn real_gpu_passes_quick_and_deep_validation() {
    let Some(node) = RealMachine::here().await else { return };
    let agent = node.agent(&[]);
    agent.wait_for_message("polling").await;
    for (level, load_seconds) in [(LoadLevel::Quick, 0), (LoadLevel::Deep, 10)] {
        let output = node.validated(level, load_seconds).await;
        assert_eq!(output["failed"], json!({}), "{output}");
        let measured = |name: &str| output["measurements"][name].as_u64().unwrap_or_else(|| panic!("{name}: {output}"));
        assert!(measured("gpu_memory_mib_per_second") > measured("gpu_from_host_mib_per_second"), "{output}");
        assert!(measured("gpu_to_host_mib_per_second") > 500 && measured("gpu_pcie_lanes") > 0, "{output}");
        println!("{}", output["by_gpu"]);
    }
    // Nothing of the load is left.
    let uuid = survey().gpus[0].info.uuid.clone();
    let gpus = Gpus::Nvml(Box::new(probe()));
    assert_eq!((gpus.device_use(&uuid), gpus.memory_use(&uuid)), (DeviceUse::Idle, MemoryUse::DriverOnly));
    assert_eq!(node.findings(), Some(vec![]));
}

#[tokio::test]
async fn real_driver_whose_calls_do_not_return_is_hung_until_they_do() {
    let Some(node) = RealMachine::here().await else { return };
    let agent = node.agent(&["--gpu-deadline-seconds", "1"]);
    eventually(|| node.findings().filter(Vec::is_empty)).await;
    let begun = Instant::now();
    while node.findings() != Some(vec!["driver/hung".to_owned()]) {
        for child in children_of(agent.pid()) {
            let _ = kill(Pid::from_raw(child), Signal::SIGSTOP);
        }
        assert!(begun.elapsed() < Duration::from_secs(90), "{:?}", node.findings());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let listed = node.heartbeat().unwrap().inventory.gpus;
    assert!(!listed.is_empty(), "as they were listed last");
    eventually(|| node.findings().filter(Vec::is_empty)).await;
}

/// The processes by which this agent calls the driver.
fn children_of(agent: i32) -> Vec<i32> {
    let pids = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_child = |pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(1)?.parse().ok());
        let command_line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        parent == Some(agent) && command_line.contains("--gpu-probe")
    };
    pids.filter(is_child).collect()
}

/// A program in place of `nvidia-smi` that passes questions on to it and refuses resets, as the tool does where another program has the GPU
/// open, then where a GPU cannot be reset. It notes what it is asked for, and who has the GPU open meanwhile.
fn refusing_tool(folder: &Path) -> PathBuf {
    let calls = folder.join("calls");
    let tools = folder.join("tools");
    std::fs::create_dir_all(&tools).unwrap();
    let script = format!(
        r#"#!/bin/sh
case $1 in --query-gpu=*) PATH=$PATH:/usr/local/nvidia/bin exec nvidia-smi "$@";; esac
echo "$*" >>'{0}'
for file in /proc/[0-9]*/fd/*; do
    case $(readlink "$file") in /dev/nvidia[0-9]*) echo "open $file" >>'{0}';; esac
done
[ "$1" = --gpu-reset ] || exit 0
if [ "$(grep -c gpu-reset '{0}')" = 1 ]; then
    echo "GPU is currently in use by another client."; exit 255
fi
echo "Resetting GPU is not supported."; exit 3
"#,
        calls.display()
    );
    std::fs::write(tools.join("nvidia-smi"), script).unwrap();
    std::fs::set_permissions(tools.join("nvidia-smi"), std::fs::Permissions::from_mode(0o755)).unwrap();
    tools
}

#[tokio::test]
async fn reset_of_a_real_gpu_is_refused_beside_a_tenant_and_begins_when_the_agent_has_closed_it() {
    let Some(node) = RealMachine::here().await else { return };
    let tools = refusing_tool(node.folder.path());
    let agent = node.agent(&["--driver-tools", tools.to_str().unwrap()]);
    agent.wait_for_message("polling").await;
    eventually(|| (!children_of(agent.pid()).is_empty()).then_some(())).await;
    let gpu = survey().gpus[0].info.clone();
    let reset = || Task::ResetGpu(ResetGpu { gpu_uuid: gpu.uuid.clone() });
    let calls = || std::fs::read_to_string(node.folder.path().join("calls")).unwrap_or_default();

    let allocation = Uuid::now_v7();
    let mut task = node.fake.provision(allocation);
    if let Task::Provision(provision) = &mut task.task {
        provision.devices = vec![DeviceRef::from(&gpu)];
    }
    node.fake.dispatch(&task);
    assert_eq!(node.fake.result_of(task.task_id).await.status, TaskStatus::Succeeded);
    assert_eq!(node.result(reset()).await.error.unwrap().code, "device_in_use");
    assert_eq!(calls(), "");

    let release = node.fake.release(allocation);
    node.fake.dispatch(&release);
    assert_eq!(node.fake.result_of(release.task_id).await.status, TaskStatus::Succeeded);
    assert_eq!(node.result(reset()).await.error.unwrap().code, "reset_unsupported");
    let calls = calls();
    assert!(calls.contains("--gpu-reset -i GPU-") && !calls.contains("open "), "{calls}");
    let modes: Vec<_> = calls.lines().filter_map(|call| call.strip_prefix("-pm ")).map(|call| &call[..1]).collect();
    assert!(modes.is_empty() || modes == ["0", "1"], "{calls}");
    // The agent watches the GPU again.
    eventually(|| (!children_of(agent.pid()).is_empty()).then_some(())).await;
}
