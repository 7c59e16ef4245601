//! `node.gpu_reset`: the agent as a process, over a fake of NVIDIA's library and of `nvidia-smi` (`tests/fake-nvml`). As the real one, it
//! refuses a reset while any process has the driver open.
#![allow(clippy::unwrap_used, clippy::expect_used, unreachable_pub, dead_code)]

mod fake_control_plane;

use std::path::PathBuf;

use fake_nvml::{FakeCuda, FakeMachine, FakeReset};
use serde_json::json;
use tempfile::TempDir;
use uuid::Uuid;
use wire::inventory::DeviceRef;
use wire::task::{Release, ResetGpu, Task, TaskPayload, TaskResult, TaskStatus};
use wire::validation::{LoadLevel, ValidationLoad};

use fake_control_plane::{FakeControlPlane, SpawnedAgent, eventually};

struct Bench {
    folder: TempDir,
    fake: FakeControlPlane,
    machine: FakeMachine,
}

impl Bench {
    /// GPU 1 waits for its reset.
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fake_nvml::install_cuda(folder.path()).unwrap();
        let mut machine = FakeMachine::with_gpus(2);
        machine.cuda = Some(FakeCuda { memory_mib: 4096, ..FakeCuda::default() });
        machine.gpus[1].remap_pending = Some(true);
        machine.gpus[1].persistence_mode = true;
        let this = Self { folder, fake: FakeControlPlane::start().await, machine };
        this.machine.write(&this.file()).unwrap();
        fake_nvml::install_smi(&this.tools(), this.folder.path(), &this.file()).unwrap();
        this
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("machine.json")
    }

    fn tools(&self) -> PathBuf {
        self.folder.path().join("tools")
    }

    fn change(&mut self, change: impl FnOnce(&mut FakeMachine)) {
        change(&mut self.machine);
        self.machine.write(&self.file()).unwrap();
    }

    /// The machine as the tool has left it.
    fn left(&self) -> FakeMachine {
        serde_json::from_slice(&std::fs::read(self.file()).unwrap()).unwrap()
    }

    fn uuid(&self) -> String {
        self.machine.gpus[1].uuid.clone()
    }

    fn resets(&self) -> usize {
        fake_nvml::calls_of_smi(&self.file()).iter().filter(|call| call.starts_with("--gpu-reset")).count()
    }

    async fn agent(&self) -> SpawnedAgent {
        let bundle = self.fake.bundle(self.folder.path());
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let (tools, data) = (text(self.tools()), text(self.folder.path().to_owned()));
        let folders = ["--driver-tools", &tools, "--validation-tools", &tools, "--validation-folder", &data];
        // A driver that works answers in this time on any machine.
        let args = [&folders[..], &["--gpu-deadline-seconds", "60"]].concat();
        let environment = [("LD_LIBRARY_PATH", data.clone()), (fake_nvml::FILE, text(self.file()))];
        let agent = SpawnedAgent::start_with(self.folder.path(), &bundle, &args, &environment);
        agent.wait_for_message("polling").await;
        agent
    }

    async fn result(&self, task: Task) -> TaskResult {
        let task = self.fake.payload(task);
        self.fake.dispatch(&task);
        self.fake.result_of(task.task_id).await
    }

    async fn reset(&self) -> TaskResult {
        self.result(Task::ResetGpu(ResetGpu { gpu_uuid: self.uuid() })).await
    }

    async fn validate(&self) -> TaskResult {
        let load = ValidationLoad { level: LoadLevel::Quick, load_seconds: 0, gpu_uuid: Some(self.uuid()) };
        self.result(Task::Validate { load: Some(load) }).await
    }

    /// The task that gives a tenant this GPU.
    fn provision(&self, gpu: usize) -> TaskPayload {
        let mut task = self.fake.provision(Uuid::now_v7());
        let uuid = self.machine.gpus[gpu].uuid.clone();
        if let Task::Provision(provision) = &mut task.task {
            provision.devices = vec![DeviceRef { index: u32::try_from(gpu).unwrap(), uuid }];
        }
        task
    }

    async fn rent(&self, gpu: usize) -> Release {
        let task = self.provision(gpu);
        self.fake.dispatch(&task);
        assert_eq!(self.fake.result_of(task.task_id).await.status, TaskStatus::Succeeded);
        let Task::Provision(provision) = task.task else { unreachable!() };
        let (allocation_id, user_name, devices) = (provision.allocation_id, provision.user_name, provision.devices);
        Release { allocation_id, user_name, devices }
    }

    fn findings(&self) -> Option<Vec<String>> {
        let heartbeat = self.fake.calls().heartbeats.last().cloned()?;
        Some(heartbeat.findings?.iter().map(|finding| format!("{}/{}", finding.probe, finding.code)).collect())
    }
}

fn code(result: &TaskResult) -> &str {
    result.error.as_ref().map_or("", |error| error.code.as_str())
}

#[tokio::test]
async fn gpu_is_reset_although_the_agent_watches_it_and_a_tenant_has_another() {
    let bench = Bench::new().await;
    let _agent = bench.agent().await;
    bench.rent(0).await;
    eventually(|| bench.findings().filter(|found| found.contains(&"row_remap/pending".to_owned()))).await;
    let result = bench.reset().await;
    assert_eq!(result.status, TaskStatus::Succeeded, "{result:?}");
    assert_eq!(result.output["gpu_uuid"], json!(bench.uuid()));
    let left = bench.left();
    assert_eq!((left.gpus[1].remap_pending, left.gpus[1].persistence_mode), (Some(false), true));
    // The agent watches the GPUs again, and the fault is over.
    eventually(|| bench.findings().filter(Vec::is_empty)).await;
    assert_eq!(bench.fake.calls().heartbeats.last().unwrap().inventory.gpus.len(), 2);
    // That GPU alone is tested, beside the tenant.
    let valid = bench.validate().await;
    assert_eq!((valid.status, &valid.output["failed"]), (TaskStatus::Succeeded, &json!({})), "{valid:?}");
    let by_gpu = valid.output["by_gpu"].as_array().unwrap();
    assert_eq!(by_gpu.iter().map(|gpu| &gpu["uuid"]).collect::<Vec<_>>(), [&json!(bench.uuid())]);
    assert!(valid.output["measurements"]["gpu_memory_mib_per_second"].as_u64().unwrap() > 0, "{valid:?}");
    assert!(!valid.output["not_tested"].as_object().unwrap().contains_key("cpu_bogo_ops_per_second"), "{valid:?}");
}

#[tokio::test]
async fn gpu_of_a_tenant_is_neither_reset_nor_tested_until_the_tenant_is_gone() {
    let bench = Bench::new().await;
    let _agent = bench.agent().await;
    let release = bench.rent(1).await;
    assert_eq!(code(&bench.reset().await), "device_in_use");
    assert_eq!(code(&bench.validate().await), "device_in_use");
    assert_eq!(fake_nvml::calls_of_smi(&bench.file()), Vec::<String>::new(), "the tool was run");
    assert_eq!(bench.result(Task::Release(release)).await.status, TaskStatus::Succeeded);
    assert_eq!(bench.reset().await.status, TaskStatus::Succeeded);
}

#[tokio::test]
async fn reset_that_an_agent_was_killed_in_is_repeated_by_the_next() {
    let mut bench = Bench::new().await;
    bench.change(|machine| machine.reset = FakeReset::Hangs);
    let agent = bench.agent().await;
    let reset = bench.fake.payload(Task::ResetGpu(ResetGpu { gpu_uuid: bench.uuid() }));
    bench.fake.dispatch(&reset);
    eventually(|| (bench.resets() > 0).then_some(())).await;
    agent.kill_9();
    assert!(!bench.left().gpus[1].persistence_mode, "it is off for the reset");
    bench.machine = bench.left();
    bench.change(|machine| machine.reset = FakeReset::Works);
    let _next = bench.agent().await;
    let result = bench.fake.result_of(reset.task_id).await;
    assert_eq!(result.status, TaskStatus::Succeeded, "{result:?}");
    let left = bench.left();
    assert_eq!((left.gpus[1].remap_pending, left.gpus[1].persistence_mode), (Some(false), true));
    // While a child of the killed agent still ends, the tool refuses, and is run again.
    assert!(bench.resets() >= 2, "{:?}", fake_nvml::calls_of_smi(&bench.file()));
}

#[tokio::test]
async fn machine_without_the_tool_or_with_gpus_that_are_reset_together_says_so() {
    let mut bench = Bench::new().await;
    let _agent = bench.agent().await;
    bench.change(|machine| machine.reset = FakeReset::NotSupported);
    let refused = bench.reset().await;
    assert_eq!(code(&refused), "reset_unsupported", "{refused:?}");
    assert!(refused.error.unwrap().message.contains("Not Supported"));
    let other = bench.result(Task::ResetGpu(ResetGpu { gpu_uuid: "--all".to_owned() })).await;
    assert_eq!(code(&other), "invalid_task");
    std::fs::remove_file(bench.tools().join("nvidia-smi")).unwrap();
    assert_eq!(code(&bench.reset().await), "reset_unsupported");
}

/// The calls of the tool in a reset.
const CALLS: [&str; 4] = ["--query-gpu", "-pm 0", "--gpu-reset", "-pm 1"];

/// The agent is killed while the tool is at this moment, and the next agent comes to it again.
async fn killed_at(moment: String) {
    let bench = Bench::new().await;
    let (agent, file) = (bench.agent().await, bench.file());
    eventually(|| (!bench.fake.calls().heartbeats.is_empty()).then_some(())).await;
    fake_nvml::hold_smi(&file, &moment).unwrap();
    let reset = bench.fake.payload(Task::ResetGpu(ResetGpu { gpu_uuid: bench.uuid() }));
    bench.fake.dispatch(&reset);
    eventually(|| fake_nvml::is_smi_held(&file).then_some(())).await;
    agent.kill_9();
    // A tool of the killed agent ends with it.
    let _ = fake_nvml::is_smi_held(&file);
    // A poll of the killed agent that is still open would take the order, so it is sent twice.
    let early = bench.provision(1);
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    bench.fake.dispatch(&early);
    let _next = bench.agent().await;
    bench.fake.dispatch(&early);
    eventually(|| fake_nvml::is_smi_held(&file).then_some(())).await;
    fake_nvml::let_smi_go(&file).unwrap();
    let result = bench.fake.result_of(reset.task_id).await;
    assert_eq!(result.status, TaskStatus::Succeeded, "{moment}: {result:?}");
    let left = bench.left();
    assert_eq!((left.gpus[1].remap_pending, left.gpus[1].persistence_mode), (Some(false), true), "{moment}");
    // The order of a tenant that came before the reset went on gets the GPU after it, or not at all.
    let early = bench.fake.result_of(early.task_id).await;
    if early.status == TaskStatus::Failed {
        assert_eq!(code(&early), "device_in_use", "{moment}: {early:?}");
        bench.rent(1).await;
    }
}

#[tokio::test]
async fn reset_that_an_agent_was_killed_in_at_any_step_is_resumed_before_a_tenant_gets_the_gpu() {
    let moments = CALLS.iter().flat_map(|call| ["before", "after"].map(|when| format!("{when} {call}")));
    futures::future::join_all(moments.map(killed_at)).await;
}

#[tokio::test]
async fn gpu_whose_reset_waits_for_a_load_is_given_to_no_tenant() {
    let mut bench = Bench::new().await;
    let agent = bench.agent().await;
    eventually(|| (!bench.fake.calls().heartbeats.is_empty()).then_some(())).await;
    bench.change(|machine| machine.cuda.as_mut().unwrap().hangs = true);
    let load =
        ValidationLoad { level: LoadLevel::Quick, load_seconds: 0, gpu_uuid: Some(bench.machine.gpus[0].uuid.clone()) };
    let load = bench.fake.payload(Task::Validate { load: Some(load) });
    bench.fake.dispatch(&load);
    eventually(|| (agent.count("task started") > 0).then_some(())).await;
    let (reset, refused) = loop {
        let started = agent.count("task started");
        let reset = bench.fake.payload(Task::ResetGpu(ResetGpu { gpu_uuid: bench.uuid() }));
        bench.fake.dispatch(&reset);
        eventually(|| (agent.count("task started") > started).then_some(())).await;
        let task = bench.provision(1);
        bench.fake.dispatch(&task);
        let result = bench.fake.result_of(task.task_id).await;
        if result.status == TaskStatus::Failed {
            break (reset, result);
        }
        // The reset was over before the load began, or the order of the tenant was the first of what came at the same moment.
        let over = bench.fake.result_of(reset.task_id).await;
        assert!(["", "device_in_use"].contains(&code(&over)), "a tenant has the GPU before its reset: {over:?}");
        let Task::Provision(provision) = task.task else { unreachable!() };
        let (allocation_id, user_name, devices) = (provision.allocation_id, provision.user_name, provision.devices);
        bench.result(Task::Release(Release { allocation_id, user_name, devices })).await;
    };
    assert!(refused.error.unwrap().message.contains("is being reset or tested"));
    bench.change(|machine| machine.cuda.as_mut().unwrap().hangs = false);
    assert_eq!(bench.fake.result_of(reset.task_id).await.status, TaskStatus::Succeeded);
}
