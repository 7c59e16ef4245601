//! The shipped agent as a process on machines on which anything fails at any time: any code of any function of NVIDIA's library, functions
//! that are late or never answer, GPUs that go and return, a mount that hangs, and restarts and kills of the agent in between.
//!
//! Several machines run at once, since an agent mostly waits. `AGENT_OUTAGES_CASES=200 cargo nextest run -p agent agent_outages` runs more.

use std::collections::BTreeMap;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent::executor::tenant_setup::MARKER;
use chrono::TimeDelta;
use nix::sys::signal::Signal;
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use tempfile::TempDir;
use uuid::Uuid;
use wire::cleanup_proof::CleanupReport;
use wire::inventory::{DeviceRef, ExecutorKind};
use wire::task::{Provision, Release, Task, TaskPayload, TaskResult, TaskStatus};

use super::GpuMachine;
use super::failing_gpus::{FailingGpus, GpuOutage, gpu_outage};
use super::fake_control_plane::spawned_agent::sandbox_user;
use super::fake_control_plane::{SpawnedAgent, eventually};
use super::hanging_mount::{HangingMount, OwnMounts};

const GPUS: usize = 3;
/// The machines of a run, and how many of them run at once.
const CASES: usize = 8;
const AT_ONCE: usize = 8;
/// An agent that polls and sends no heartbeat for so long is as good as dead. It polls once a second where it has no task.
const MOST_POLLS: usize = 60;
/// Longer than a busy machine takes for what has to come.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// The control plane sends a task again that has no result.
const RESEND_AFTER: Duration = Duration::from_secs(3);

/// What happens to the machine, or is ordered of the agent.
#[derive(Debug, Clone, Copy)]
enum AgentHappening {
    /// `killed_after_ms`: the agent is killed so long after the order, and started again.
    Provision {
        gpu: usize,
        killed_after_ms: Option<u64>,
    },
    Release {
        gpu: usize,
        killed_after_ms: Option<u64>,
    },
    Outage(GpuOutage),
    CallIsLate {
        call: &'static str,
        milliseconds: u64,
    },
    MountHangs {
        hangs: bool,
    },
    /// The service manager restarts the agent.
    Restart,
    /// It is killed as by a power failure, and started again.
    Kill,
    Heartbeat,
}

/// All functions that the agent calls.
const CALLS: [&str; 27] = [
    "nvmlInit",
    "nvmlSystemGetDriverVersion",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlEventSetCreate",
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetWait",
];

fn happening() -> impl Strategy<Value = AgentHappening> {
    use AgentHappening as H;
    let gpu = 0..GPUS;
    let call = prop::sample::select(&CALLS[..]);
    // About as long as a task takes, so that it is killed at any of its steps.
    let killed_after_ms = || prop::option::weighted(0.3, 0_u64..400);
    prop_oneof![
        8 => (gpu.clone(), killed_after_ms()).prop_map(|(gpu, killed_after_ms)| H::Provision { gpu, killed_after_ms }),
        6 => (gpu, killed_after_ms()).prop_map(|(gpu, killed_after_ms)| H::Release { gpu, killed_after_ms }),
        17 => gpu_outage(GPUS, &CALLS).prop_map(H::Outage),
        2 => (call, prop_oneof![Just(50_u64), Just(700), Just(3_600_000)])
            .prop_map(|(call, milliseconds)| H::CallIsLate { call, milliseconds }),
        1 => any::<bool>().prop_map(|hangs| H::MountHangs { hangs }),
        2 => Just(H::Restart),
        2 => Just(H::Kill),
        1 => Just(H::Heartbeat),
    ]
}

/// A machine with one agent after another, and what it should have.
struct FailingMachine {
    agent: SpawnedAgent,
    /// Before its folder, which is removed afterwards.
    hanging: Option<HangingMount>,
    mount_point: TempDir,
    mounts: Arc<Option<OwnMounts>>,
    node: GpuMachine,
    arguments: Vec<&'static str>,
    failing: FailingGpus,
    /// By GPU.
    tenants: BTreeMap<usize, RunningTenant>,
}

struct RunningTenant {
    release: Release,
    program: Child,
}

impl Drop for RunningTenant {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

impl FailingMachine {
    /// `reads_kernel_log`: otherwise Xids are known from the driver's events.
    async fn start(mounts: Arc<Option<OwnMounts>>, reads_kernel_log: bool) -> Self {
        let node = GpuMachine::with_gpus(u32::try_from(GPUS).unwrap()).await;
        let mut arguments = vec!["--gpu-deadline-seconds", "1"];
        if !reads_kernel_log {
            arguments.extend(["--kernel-log", "/nonexistent/kmsg"]);
        }
        let (agent, failing) = (node.agent(&arguments), FailingGpus::of(&node.machine));
        let mount_point = tempfile::tempdir().unwrap();
        let (hanging, tenants) = (None, BTreeMap::new());
        Self { agent, hanging, mount_point, mounts, node, arguments, failing, tenants }
    }

    async fn does(&mut self, happening: AgentHappening) {
        match happening {
            AgentHappening::Provision { gpu, killed_after_ms } => {
                self.provision(gpu, killed_after_ms).await;
            }
            AgentHappening::Release { gpu, killed_after_ms } => self.release(gpu, killed_after_ms).await,
            AgentHappening::Outage(outage) => self.failing.suffer(outage, &mut self.node.machine),
            AgentHappening::CallIsLate { call, milliseconds } => {
                self.node.machine.late_ms.insert(call.to_owned(), milliseconds);
            }
            AgentHappening::MountHangs { hangs } => {
                let hang = |mounts: &OwnMounts| mounts.hang(self.mount_point.path());
                self.hanging =
                    if hangs { self.hanging.take().or_else(|| self.mounts.as_ref().as_ref().map(hang)) } else { None };
            }
            AgentHappening::Restart => {
                self.agent.signal(Signal::SIGTERM);
                // It ends by itself, whatever hangs, or by the signal where that has overtaken its start.
                let status = self.agent.exit().await;
                assert!(status.code().is_some() || status.signal() == Some(15), "{status}");
                self.start_agent();
            }
            AgentHappening::Kill => self.kill_agent(),
            AgentHappening::Heartbeat => drop(self.node.next_heartbeat().await),
        }
        self.apply();
        let ended = self.agent.ended();
        assert!(ended.is_none(), "the agent has ended: {ended:?}");
        for (gpu, tenant) in &mut self.tenants {
            assert!(tenant.program.try_wait().unwrap().is_none(), "the tenant of GPU {gpu} was ended");
        }
    }

    /// Writes the machine as it is.
    fn apply(&mut self) {
        let listed = self.failing.listed();
        self.node.change(|machine| machine.gpus = listed);
    }

    fn start_agent(&mut self) {
        self.agent = self.node.agent(&self.arguments);
    }

    /// The next agent starts when this one has ended.
    fn kill_agent(&mut self) {
        self.agent.end_at_once();
        self.start_agent();
    }

    /// Every call about it succeeds.
    fn is_healthy(&self, gpu: usize) -> bool {
        let machine = &self.node.machine;
        !self.failing.has_failing_calls(gpu, machine) && !self.failing.is_silent(gpu, machine)
    }

    /// The result of a task, which is sent again until there is one.
    async fn result_of(&mut self, task: Task, killed_after_ms: Option<u64>) -> TaskResult {
        let task: TaskPayload = self.node.fake.payload(task);
        self.node.fake.dispatch(&task);
        if let Some(milliseconds) = killed_after_ms {
            tokio::time::sleep(Duration::from_millis(milliseconds)).await;
            self.kill_agent();
        }
        let begun = Instant::now();
        loop {
            let fake = &self.node.fake;
            if let Ok(result) = tokio::time::timeout(RESEND_AFTER, fake.result_of(task.task_id)).await {
                return result;
            }
            let ended = self.agent.ended();
            assert!(ended.is_none(), "the agent has ended: {ended:?}");
            assert!(begun.elapsed() < WAIT_TIMEOUT, "{:?} has no result", task.task);
            self.node.fake.dispatch(&task);
        }
    }

    /// Returns whether a tenant has the GPU by this order.
    async fn provision(&mut self, gpu: usize, killed_after_ms: Option<u64>) -> bool {
        let allocation_id = Uuid::now_v7();
        let devices = vec![DeviceRef { index: 0, uuid: self.failing.gpus[gpu].uuid.clone() }];
        let order = Provision {
            allocation_id,
            user_name: "tenant".into(),
            authorized_keys: vec!["ssh-ed25519 AAAA ann@laptop".into()],
            devices: devices.clone(),
            sku: "h100".into(),
            deadline_at: self.node.fake.now() + TimeDelta::minutes(5),
        };
        let is_free = !self.tenants.contains_key(&gpu);
        let result = self.result_of(Task::Provision(order), killed_after_ms).await;
        let release = Release { allocation_id, user_name: "tenant".into(), devices };
        if result.status == TaskStatus::Succeeded {
            assert!(is_free, "GPU {gpu} was given to a second tenant");
            let program = self.program_of(allocation_id);
            self.tenants.insert(gpu, RunningTenant { release, program });
            return true;
        }
        let error = result.error.unwrap();
        // A driver that did not answer is left alone for a while, and a GPU whose last tenant left meanwhile waits for its proof.
        let passes = ["did not answer", "is not proved"].iter().any(|passing| error.message.contains(passing));
        assert!(!is_free || !self.is_healthy(gpu) || passes, "healthy GPU {gpu} is refused: {error:?}");
        // What was set up so far is cleaned up, as the allocation orders it.
        self.expect_clean(release, None).await;
        false
    }

    /// A program of the tenant, as its processes are marked in the sandbox.
    fn program_of(&self, allocation_id: Uuid) -> Child {
        let mut program = Command::new("sleep");
        program.arg("1000").env(MARKER, allocation_id.to_string()).stdin(Stdio::null()).current_dir("/");
        if let Some(user) = sandbox_user() {
            program.uid(user.uid.as_raw()).gid(user.gid.as_raw());
        }
        program.spawn().unwrap()
    }

    async fn release(&mut self, gpu: usize, killed_after_ms: Option<u64>) {
        let Some(mut tenant) = self.tenants.remove(&gpu) else { return };
        self.expect_clean(tenant.release.clone(), killed_after_ms).await;
        assert!(tenant.program.try_wait().unwrap().is_some(), "a program of the tenant of GPU {gpu} has outlived it");
    }

    /// The release succeeds, and proves that nothing of the tenant is left.
    async fn expect_clean(&mut self, release: Release, killed_after_ms: Option<u64>) {
        let folder = self.node.folder.path().join("state/allocations").join(release.allocation_id.to_string());
        let result = self.result_of(Task::Release(release), killed_after_ms).await;
        assert_eq!(result.status, TaskStatus::Succeeded, "{result:?}");
        let recovery_key = self.node.fake.calls().recovery_key.unwrap();
        let report = CleanupReport::open(&result.proof.unwrap(), &recovery_key).unwrap();
        assert!(report.is_clean(ExecutorKind::Sandbox), "{report:?}");
        assert!(!folder.exists(), "{}", folder.display());
    }

    /// Everything works again: no finding is left, and each GPU is given back and rented once more.
    async fn recovers(&mut self) {
        // While everything fails, too.
        self.node.next_heartbeat().await;
        self.node.next_heartbeat().await;
        (self.node.machine.hangs, self.node.machine.not_loaded, self.hanging) = (false, false, None);
        for gpu in 0..GPUS {
            self.does(AgentHappening::Outage(GpuOutage::Recovers { gpu })).await;
        }
        for gpu in 0..GPUS {
            self.release(gpu, None).await;
            let begun = Instant::now();
            while !self.provision(gpu, None).await {
                assert!(begun.elapsed() < WAIT_TIMEOUT, "GPU {gpu} is healthy, and not rented");
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            self.release(gpu, None).await;
        }
        let found = || {
            let heartbeat = self.node.heartbeat()?;
            let found = heartbeat.findings.unwrap();
            let lasts = |probe: &str| ["driver", "gpu", "clean_up", "reading"].contains(&probe);
            (heartbeat.inventory.gpus.len() == GPUS && !found.iter().any(|it| lasts(&it.probe))).then_some(())
        };
        eventually(found).await;
        let most = self.node.fake.calls().most_polls_between_heartbeats;
        assert!(most < MOST_POLLS, "the agent has polled {most} times without a heartbeat");
        let errors = self.agent.lines().into_iter().filter(|line| line["level"] == "ERROR").collect::<Vec<_>>();
        assert!(errors.is_empty(), "{errors:?}");
    }
}

#[tokio::test]
async fn agent_lives_through_any_outages_and_no_tenant_outlives_its_release() {
    let cases = std::env::var("AGENT_OUTAGES_CASES").ok().and_then(|it| it.parse().ok()).unwrap_or(CASES);
    let mut runner = TestRunner::new(ProptestConfig::default());
    let strategy = prop::collection::vec(happening(), 8..20);
    let cases: Vec<_> = (0..cases).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect();
    // Where this machine cannot have one, no mount hangs.
    let mounts = Arc::new(OwnMounts::of_this_thread(|_| ()));
    for some in cases.chunks(AT_ONCE) {
        let running = some.iter().enumerate().map(|(index, happenings)| {
            let (mounts, happenings) = (Arc::clone(&mounts), happenings.clone());
            tokio::spawn(async move {
                let mut machine = FailingMachine::start(mounts, index % 2 == 0).await;
                for happening in happenings {
                    machine.does(happening).await;
                }
                machine.recovers().await;
            })
        });
        for (ended, happenings) in futures::future::join_all(running).await.into_iter().zip(some) {
            assert!(ended.is_ok(), "a machine has failed, by: {happenings:#?}");
        }
    }
}
