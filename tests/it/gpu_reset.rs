//! A fault that the reset of a GPU ends, in a running cluster: a real agent, over fakes of NVIDIA's library and of `nvidia-smi`.

use fake_nvml::{FakeMachine, FakeReset};
use reqwest::Method;
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tests::cluster::{GPU_MEMORY_MIB, GPU_MODEL, NodeHandle, TestCluster};

const SKU: &str = "h100x2";
const GPUS: u32 = 2;

/// NVIDIA's driver on the machine of an agent. The agent may run as another user.
struct Driver {
    folder: tempfile::TempDir,
    machine: FakeMachine,
}

impl Driver {
    fn install() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        fake_nvml::install(folder.path()).unwrap();
        let mut machine = FakeMachine::with_gpus(GPUS);
        for gpu in &mut machine.gpus {
            gpu.name = format!("NVIDIA {GPU_MODEL}");
            gpu.memory_mib = GPU_MEMORY_MIB;
        }
        // Other clusters of this machine have GPUs of their own.
        for gpu in &mut machine.gpus {
            gpu.uuid = format!("GPU-{}", uuid::Uuid::new_v4());
        }
        let mut this = Self { folder, machine };
        fake_nvml::install_smi(&this.tools(), this.folder.path(), &this.file()).unwrap();
        this.change(|_| {});
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
        std::fs::set_permissions(self.file(), std::fs::Permissions::from_mode(0o666)).unwrap();
    }

    /// The machine as the tool has left it.
    fn left(&self) -> FakeMachine {
        serde_json::from_slice(&std::fs::read(self.file()).unwrap()).unwrap()
    }

    fn resets(&self) -> Vec<String> {
        let calls = fake_nvml::calls_of_smi(&self.file());
        calls.iter().filter_map(|call| call.strip_prefix("--gpu-reset -i ").map(str::to_owned)).collect()
    }

    /// A program that starts the agent on this machine, without GPUs that are simulated.
    fn agent(&self, agent: &Path) -> PathBuf {
        let script = format!(
            "#!/bin/bash\nkept=()\nwhile [ $# -gt 0 ]; do case $1 in --simulate-gpus | --gpu-model | --gpu-memory-mib) shift 2;; *) kept+=(\"$1\"); \
             shift;; esac; done\nexport LD_LIBRARY_PATH='{}' {}='{}'\nexec '{}' \"${{kept[@]}}\"\n",
            self.folder.path().display(),
            fake_nvml::FILE,
            self.file().display(),
            agent.display(),
        );
        let program = self.folder.path().join("gpuaas-agent");
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        program
    }
}

async fn node_with(cluster: &mut TestCluster, driver: &Driver) -> NodeHandle {
    cluster.offer_sku(SKU, GPUS).await;
    let node = cluster.register(SKU).await;
    let bundle = cluster.bundle(&node).await;
    let tools = driver.tools().display().to_string();
    cluster.start_agent_on(&node.name, &bundle, |settings| {
        settings.executable = driver.agent(&settings.executable);
        settings.flags = vec!["--driver-tools".to_owned(), tools];
    });
    node.expect_state("active").await;
    node
}

fn phase_of(node: &Value, uuid: &str) -> Value {
    let resets = node["gpu_resets"].as_array().unwrap();
    resets.iter().find(|reset| reset["gpu_uuid"] == uuid).map_or(Value::Null, |reset| reset["phase"].clone())
}

fn has_finding(node: &Value, uuid: &str) -> bool {
    let findings = node["health"]["findings"].as_array().unwrap();
    findings.iter().any(|finding| finding["gpu_uuid"] == uuid && finding["cleared_at"].is_null())
}

#[tokio::test(flavor = "multi_thread")]
async fn faulty_gpu_is_reset_after_its_tenant_validated_and_free_again() {
    // A heartbeat every three seconds: each decides about the next step.
    let builder = TestCluster::builder().policy("node.offline_after_seconds", 10);
    let mut cluster = builder.policy("node.repair_delay_seconds", 1).start().await;
    let mut driver = Driver::install();
    let node = node_with(&mut cluster, &driver).await;
    let rented = cluster.rent_when_free(SKU, 1).await;
    rented.expect_state("active").await;
    let (faulty, other) = (driver.machine.gpus[0].uuid.clone(), driver.machine.gpus[1].uuid.clone());

    // A tenant has it.
    driver.change(|machine| machine.gpus[0].remap_pending = Some(true));
    let admin = cluster.admin.clone();
    admin.wait_until(&node.path(), "the fault is known", |it| has_finding(it, &faulty)).await;
    tokio::time::sleep(Duration::from_secs(8)).await;
    let waits = node.get().await;
    assert_eq!((&waits["gpu_resets"], &waits["repair"]), (&json!([]), &Value::Null), "{waits}");
    assert_eq!(driver.resets(), Vec::<String>::new());

    // The tenant leaves: the GPU is reset, and the driver reports no fault any more.
    rented.release_fully().await;
    let done = |it: &Value| phase_of(it, &faulty) == "succeeded" && it["gpus_free"] == GPUS;
    let repaired = admin.wait_until(&node.path(), "the GPU is reset and free", done).await;
    assert!(!has_finding(&repaired, &faulty) && repaired["repair"].is_null(), "{repaired}");
    assert_eq!((driver.resets(), driver.left().gpus[0].remap_pending), (vec![faulty.clone()], Some(false)));
    let tasks = admin.get(&format!("{}/tasks", node.path())).await.ok();
    let ended: Vec<_> = tasks["ended"].as_array().unwrap().iter().map(|task| &task["type"]).collect();
    assert_eq!(ended, ["node.gpu_reset", "node.validate"], "{tasks}");
    let repeated = cluster.rent_when_free(SKU, GPUS).await;
    repeated.expect_state("active").await;
    repeated.release_fully().await;

    // GPUs that cannot be reset alone: a reboot is next, which an agent without the right to it refuses, and then an operator.
    driver.machine = driver.left();
    driver.change(|machine| {
        machine.reset = FakeReset::NotSupported;
        machine.gpus[1].remap_pending = Some(true);
    });
    let over = |it: &Value| it["repair"]["phase"] == "awaits_operator";
    let waits = admin.wait_until(&node.path(), "an operator has to repair it", over).await;
    assert_eq!((phase_of(&waits, &other), &waits["overdue"]), (json!("failed"), &json!(true)), "{waits}");
    let error = waits["gpu_resets"].as_array().unwrap().iter().find_map(|reset| reset["error"].as_str()).unwrap();
    assert!(error.starts_with("reset_unsupported: ") && error.contains("Not Supported"), "{error}");
    assert_eq!((driver.resets().len(), &waits["gpus_free"]), (2, &json!(GPUS - 1)));
    cluster.shutdown().await;
}

/// The sandbox shares all GPUs with its tenants, so that a tenant of one is in the way of the others.
#[tokio::test(flavor = "multi_thread")]
async fn administrator_resets_gpus_without_a_fault_once_no_tenant_can_use_them() {
    let mut cluster = TestCluster::builder().policy("node.offline_after_seconds", 10).start().await;
    let driver = Driver::install();
    let node = node_with(&mut cluster, &driver).await;
    let rented = cluster.rent_when_free(SKU, 1).await;
    rented.expect_state("active").await;
    let admin = cluster.admin.clone();
    let path = |gpu: &str| format!("{}/gpus/{gpu}/reset", node.path());
    let why = json!({ "reason": "slow" });
    let uuids: Vec<_> = driver.machine.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    for gpu in &uuids {
        let refused = admin.send_once(Method::POST, &path(gpu), Some(&why)).await;
        assert_eq!(refused.expect_error(409, "node_in_use").body["details"]["allocation_id"], json!(rented.id));
    }
    assert_eq!(driver.resets(), Vec::<String>::new());

    rented.release_fully().await;
    for gpu in &uuids {
        let ordered = admin.post(&path(gpu), &why).await.created();
        assert_eq!(ordered["type"], "node.gpu_reset");
        let done = |it: &Value| phase_of(it, gpu) == "succeeded" && it["gpus_free"] == GPUS;
        admin.wait_until(&node.path(), "the GPU is reset, validated and free", done).await;
    }
    assert_eq!(driver.resets(), uuids);
    cluster.shutdown().await;
}
