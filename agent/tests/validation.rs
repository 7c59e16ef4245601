//! `node.validate` with load: the agent as a process, over a fake of NVIDIA's libraries (`tests/fake-nvml`), and tools that are scripts.
#![allow(clippy::unwrap_used, clippy::expect_used, unreachable_pub, dead_code)]

mod fake_control_plane;

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fake_nvml::{FakeCuda, FakeMachine};
use serde_json::{Value, json};
use tempfile::TempDir;
use wire::task::{Task, TaskPayload, TaskStatus};
use wire::validation::{LoadLevel, ValidationLoad};

use fake_control_plane::{FakeControlPlane, SpawnedAgent, eventually};

struct Bench {
    folder: TempDir,
    fake: FakeControlPlane,
    machine: FakeMachine,
}

impl Bench {
    async fn with_gpus(count: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fake_nvml::install_cuda(folder.path()).unwrap();
        let mut machine = FakeMachine::with_gpus(count);
        machine.cuda = Some(FakeCuda { memory_mib: 4096, ..FakeCuda::default() });
        let this = Self { folder, fake: FakeControlPlane::start().await, machine };
        this.machine.write(&this.file()).unwrap();
        this
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("machine.json")
    }

    fn change(&mut self, change: impl FnOnce(&mut FakeMachine)) {
        change(&mut self.machine);
        self.machine.write(&self.file()).unwrap();
    }

    fn tool(&self, name: &str, script: &str) {
        let program = self.folder.path().join("tools").join(name);
        std::fs::create_dir_all(program.parent().unwrap()).unwrap();
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn agent(&self, gpu_deadline: &str) -> SpawnedAgent {
        let bundle = self.fake.bundle(self.folder.path());
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let tools = text(self.folder.path().join("tools"));
        let data = text(self.folder.path().to_owned());
        let args = ["--validation-tools", &tools, "--validation-folder", &data, "--gpu-deadline-seconds", gpu_deadline];
        let library = text(self.folder.path().to_owned());
        let environment = [("LD_LIBRARY_PATH", library), (fake_nvml::FILE, text(self.file()))];
        SpawnedAgent::start_with(self.folder.path(), &bundle, &args, &environment)
    }

    /// Orders a quick validation.
    fn order(&self) -> TaskPayload {
        let load = Some(ValidationLoad { level: LoadLevel::Quick, load_seconds: 0, gpu_uuid: None });
        let task = self.fake.payload(Task::Validate { load });
        self.fake.dispatch(&task);
        task
    }

    async fn validated(&self) -> Value {
        let result = self.fake.result_of(self.order().task_id).await;
        assert_eq!(result.status, TaskStatus::Succeeded, "{result:?}");
        json!(result.output)
    }
}

#[tokio::test]
async fn every_gpu_is_tested_through_cuda_and_measured() {
    let bench = Bench::with_gpus(2).await;
    let _agent = bench.agent("10");
    let output = bench.validated().await;
    assert_eq!((&output["level"], &output["failed"]), (&json!("quick"), &json!({})), "{output}");
    let measurements = output["measurements"].as_object().unwrap();
    for name in ["gpu_memory_mib_per_second", "gpu_from_host_mib_per_second", "gpu_to_host_mib_per_second"] {
        assert!(measurements[name].as_u64().unwrap() > 0, "{output}");
    }
    assert_eq!(measurements["gpu_pcie_lanes"], 16);
    let by_gpu = output["by_gpu"].as_array().unwrap();
    assert_eq!(by_gpu.len(), 2, "{output}");
    assert!(by_gpu.iter().all(|gpu| gpu["uuid"].as_str().unwrap().starts_with("GPU-")), "{output}");
    assert!(output["not_tested"]["cpu_bogo_ops_per_second"].as_str().unwrap().contains("not installed"), "{output}");
}

#[tokio::test]
async fn wrong_bits_an_error_of_cuda_and_a_request_for_recovery_are_failures() {
    let mut bench = Bench::with_gpus(1).await;
    let _agent = bench.agent("10");
    bench.change(|machine| machine.cuda.as_mut().unwrap().wrong_words = 3);
    let output = bench.validated().await;
    assert!(output["failed"]["gpu_pattern"].as_str().unwrap().contains("were read back wrong"), "{output}");
    bench.change(|machine| {
        machine.cuda = Some(FakeCuda { error: Some(719), ..FakeCuda::default() });
        machine.gpus[0].recovery_action = Some(1);
    });
    let output = bench.validated().await;
    assert!(output["failed"]["gpu_pattern"].as_str().unwrap().contains("answered 719"), "{output}");
    assert!(output["failed"]["gpu_recovery"].as_str().unwrap().contains("recovery action 1"), "{output}");
}

#[tokio::test]
async fn driver_without_a_compiler_has_its_memory_compared_in_the_host() {
    let mut bench = Bench::with_gpus(1).await;
    bench.change(|machine| machine.cuda.as_mut().unwrap().has_no_compiler = true);
    let _agent = bench.agent("10");
    let output = bench.validated().await;
    assert_eq!(output["failed"], json!({}), "{output}");
    bench.change(|machine| machine.cuda.as_mut().unwrap().wrong_words = 3);
    let output = bench.validated().await;
    assert!(output["failed"]["gpu_pattern"].as_str().unwrap().contains("were read back wrong"), "{output}");
}

#[tokio::test]
async fn machine_without_cuda_is_not_tested_there_and_passes() {
    let bench = Bench::with_gpus(1).await;
    std::fs::remove_file(bench.folder.path().join(fake_nvml::CUDA_LIBRARY)).unwrap();
    let _agent = bench.agent("10");
    let output = bench.validated().await;
    assert_eq!(output["failed"], json!({}), "{output}");
    assert!(output["not_tested"]["gpu_pattern"].as_str().unwrap().contains("CUDA is not installed"), "{output}");
    assert_eq!(output["measurements"], json!({ "gpu_pcie_lanes": 16 }), "an idle link shows no generation");
}

#[tokio::test]
async fn cuda_that_hangs_is_killed_and_heartbeats_go_on_meanwhile() {
    let mut bench = Bench::with_gpus(2).await;
    let agent = bench.agent("5");
    agent.wait_for_message("polling").await;
    bench.change(|machine| machine.cuda.as_mut().unwrap().hangs = true);
    let begun = Instant::now();
    let output = bench.validated().await;
    assert!(output["failed"]["gpu_driver"].as_str().unwrap().contains("did not answer"), "{output}");
    // CUDA hangs for ever. That the next GPU is not waited for is tested with the probe.
    assert!(begun.elapsed() < Duration::from_secs(90), "{:?}", begun.elapsed());
    let sent = bench.fake.calls().heartbeats.len();
    eventually(|| (bench.fake.calls().heartbeats.len() > sent + 2).then_some(())).await;
    let heartbeats = bench.fake.calls().heartbeats.clone();
    let hung = heartbeats.iter().flat_map(|it| it.findings.iter().flatten()).find(|it| it.code == "hung");
    assert!(hung.is_none(), "the heartbeats' own child does not hang: {hung:?}");
}

#[tokio::test]
async fn cuda_that_is_ready_late_is_tried_again_by_another_process() {
    let mut bench = Bench::with_gpus(1).await;
    let _agent = bench.agent("10");
    // CUDA_ERROR_SYSTEM_NOT_READY.
    bench.change(|machine| machine.cuda.as_mut().unwrap().error = Some(802));
    let task_id = bench.order().task_id;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(!bench.fake.calls().results.iter().any(|(id, ..)| *id == task_id), "it waits");
    bench.change(|machine| machine.cuda.as_mut().unwrap().error = None);
    let result = bench.fake.result_of(task_id).await;
    assert_eq!(result.output["failed"], json!({}), "{result:?}");
    assert!(result.output["measurements"]["gpu_memory_mib_per_second"].as_u64().unwrap() > 0, "{result:?}");
}

#[tokio::test]
async fn load_ends_with_a_killed_agent_and_the_next_one_validates_again_and_leaves_no_file() {
    let bench = Bench::with_gpus(0).await;
    // The disk test of the first agent hangs, after it has written.
    let hangs = r#"for it in "$@"; do case $it in --filename=*) echo data >"${it#--filename=}"; esac; done
        echo $$ >"$(dirname "$0")/pid"; exec sleep 1000"#;
    bench.tool("fio", hangs);
    let agent = bench.agent("10");
    let task = bench.order();
    let file = bench.folder.path().join("tools/pid");
    let pid = eventually(|| std::fs::read_to_string(&file).ok().filter(|pid| pid.ends_with('\n'))).await;
    let data = bench.folder.path().join("gpuaas-validation.data");
    assert!(data.exists());
    agent.kill_9();
    let process = PathBuf::from(format!("/proc/{}/stat", pid.trim()));
    eventually(|| std::fs::read_to_string(&process).map_or(true, |stat| stat.contains(") Z ")).then_some(())).await;
    bench.tool("fio", "echo broken >&2; exit 7");
    let next = bench.agent("10");
    next.wait_for_message("polling").await;
    bench.fake.dispatch(&task);
    let result = bench.fake.result_of(task.task_id).await;
    assert_eq!(result.output["failed"]["disk_write_mib_per_second"], "fio ended with status 7: broken");
    assert!(!data.exists(), "the file of the killed validation is left");
    let results = bench.fake.calls().results.iter().filter(|(id, ..)| *id == task.task_id).count();
    assert_eq!(results, 1);
}
