//! A driver and GPUs that fail, under the executor that makes Linux users: over a fake of NVIDIA's library (`tests/fake-nvml`).

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agent::executor::Executor as _;
use agent::gpu_probe::GpuProbe;
use agent::gpus::Gpus;
use agent::system_executor::{Settings, System, SystemOpenError};
use agent::task_outcome::TaskFailure;
use fake_nvml::FakeMachine;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use uuid::Uuid;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding, FindingOutcome};
use wire::inventory::DeviceRef;
use wire::task::{Provision, Release};

use super::failing_gpus::{FailingGpus, GpuOutage, gpu_outage};
use super::{
    NAME, STATE, TENANT_UIDS, assert_clean, can, eventually, mode, outcome, overlay_machine, run, spawn, stop,
};

const LIBRARY: &str = "/opt/fake-nvml";
const MACHINE: &str = "/opt/fake-nvml/machine.json";
/// `NVML_ERROR_UNKNOWN`.
const UNKNOWN: u32 = 999;

/// A node with NVIDIA's driver and four GPUs.
struct DriverNode {
    system: System,
    machine: FakeMachine,
}

impl DriverNode {
    fn start() -> Self {
        for minor in 0..4 {
            let node = format!("/dev/nvidia{minor}");
            if !Path::new(&node).exists() {
                run("mknod", &["-m", "666", &node, "c", "1", "3"]);
            }
        }
        fs::write("/etc/.pwd.lock", "").unwrap();
        fs::create_dir_all(LIBRARY).unwrap();
        fake_nvml::install(Path::new(LIBRARY)).unwrap();
        run("mount", &["-t", "tmpfs", "nvidia", "/proc/driver"]);
        fs::create_dir("/proc/driver/nvidia").unwrap();
        fs::write("/proc/driver/nvidia/params", "ModifyDeviceFiles: 0\n").unwrap();
        let mut machine = FakeMachine::with_gpus(4);
        for (minor, gpu) in (0..).zip(&mut machine.gpus) {
            gpu.minor = Some(minor);
        }
        machine.write(Path::new(MACHINE)).unwrap();
        Self { system: open(Duration::from_secs(20)).unwrap(), machine }
    }

    fn change(&mut self, change: impl FnOnce(&mut FakeMachine)) {
        change(&mut self.machine);
        self.machine.write(Path::new(MACHINE)).unwrap();
    }

    /// The next agent. Its driver has this long to answer.
    fn restart(&mut self, deadline: Duration) {
        self.system = open(deadline).unwrap();
    }

    fn device(&self, index: u32) -> DeviceRef {
        DeviceRef { index, uuid: self.machine.gpus[index as usize].uuid.clone() }
    }

    fn provision(&self, id: u128, name: &str, gpu: u32) -> Result<u32, TaskFailure> {
        self.provision_on(id, name, self.device(gpu))
    }

    fn provision_on(&self, id: u128, name: &str, device: DeviceRef) -> Result<u32, TaskFailure> {
        let task = Provision {
            allocation_id: Uuid::from_u128(id),
            user_name: name.into(),
            authorized_keys: vec!["ssh-ed25519 AAAA ann@laptop".into()],
            devices: vec![device],
            sku: "h100".into(),
            deadline_at: chrono::Utc::now(),
        };
        let output = self.system.provision(&task)?;
        Ok(output["uid"].as_u64().unwrap().try_into().unwrap())
    }

    fn release(&self, id: u128, name: &str, gpu: u32) -> Vec<CleanupFinding> {
        let devices = vec![self.device(gpu)];
        let task = Release { allocation_id: Uuid::from_u128(id), user_name: name.into(), devices };
        self.system.release(&task).unwrap().findings
    }

    fn unproved(&self) -> Vec<String> {
        self.system.unproved_gpus().into_keys().collect()
    }
}

fn open(deadline: Duration) -> Result<System, SystemOpenError> {
    open_with(deadline, Vec::new())
}

/// With these further devices for tenants.
fn open_with(deadline: Duration, tenant_devices: Vec<PathBuf>) -> Result<System, SystemOpenError> {
    let program = Path::new(LIBRARY).join("agent");
    let agent = env!("CARGO_BIN_EXE_gpuaas-agent");
    let script =
        format!("#!/bin/sh\nexec env LD_LIBRARY_PATH={LIBRARY} {}={MACHINE} '{agent}' \"$@\"\n", fake_nvml::FILE);
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let gpus = Gpus::Nvml(Box::new(GpuProbe::new(program, deadline)));
    let settings = Settings { uids: TENANT_UIDS, program: agent.into(), tenant_devices, ..Settings::default() };
    fs::create_dir_all(STATE).unwrap();
    System::open(Path::new(STATE), settings, Arc::new(gpus))
}

type Change = fn(&mut FakeMachine);

/// What a driver can answer for one GPU.
fn outages() -> [(&'static str, Change); 4] {
    [
        ("lost", |machine| machine.gpus[0].is_lost = true),
        ("unknown error", |machine| machine.gpus[0].error = Some(UNKNOWN)),
        ("not listed", |machine| drop(machine.gpus.remove(0))),
        ("driver not loaded", |machine| machine.not_loaded = true),
    ]
}

#[test]
fn tenant_ends_although_its_gpu_does_not_answer_and_the_gpu_alone_waits_for_its_proof() {
    overlay_machine::alone(
        "gpu_outages::tenant_ends_although_its_gpu_does_not_answer_and_the_gpu_alone_waits_for_its_proof",
        || {
            let mut node = DriverNode::start();
            let healthy = node.machine.clone();
            let neighbour = node.provision(99, "neighbour", 1).unwrap();
            let mut work = spawn(neighbour, "exec sleep 1000");
            for (id, (outage, change)) in (1..).zip(outages()) {
                let uid = node.provision(id, NAME, 0).unwrap();
                let (device, mut session) = (node.device(0), spawn(uid, "exec sleep 777"));
                node.change(change);
                let task = Release {
                    allocation_id: Uuid::from_u128(id),
                    user_name: NAME.into(),
                    devices: vec![device.clone()],
                };
                let findings = node.system.release(&task).unwrap().findings;
                assert_clean(&findings);
                assert_eq!(outcome(&findings, CleanupCheck::GpuMemory), FindingOutcome::Unknown, "{outage}");
                session.wait().unwrap();
                assert!(!Path::new("/home/tena").exists() && mode("/dev/nvidia0") == (0o600, 0, 0), "{outage}");
                assert_eq!(node.unproved(), std::slice::from_ref(&device.uuid), "{outage}");
                // The next agent knows it, too, and gives it to no tenant.
                node.restart(Duration::from_secs(20));
                node.change(|machine| *machine = healthy.clone());
                let refused = node.provision(50, "next", 0).unwrap_err();
                assert!(
                    refused.code == "device_in_use" && refused.message.contains("free of its last tenant"),
                    "{refused:?}"
                );
                assert!(
                    work.try_wait().unwrap().is_none() && can(neighbour, "cat /dev/nvidia1"),
                    "{outage}: the neighbour"
                );
                assert!(node.system.reconcile_devices(), "{outage}");
                assert_eq!(node.unproved(), Vec::<String>::new(), "{outage}");
            }
            let uid = node.provision(50, "next", 0).unwrap();
            assert!(can(uid, "cat /dev/nvidia0"));
            stop(work);
        },
    );
}

#[test]
fn hung_driver_keeps_no_tenant_and_no_agent_from_its_end_and_its_start() {
    overlay_machine::alone("gpu_outages::hung_driver_keeps_no_tenant_and_no_agent_from_its_end_and_its_start", || {
        let mut node = DriverNode::start();
        let deadline = Duration::from_millis(500);
        let neighbour = node.provision(99, "neighbour", 1).unwrap();
        let uid = node.provision(1, NAME, 0).unwrap();
        let mut session = spawn(uid, "exec sleep 777");
        node.change(|machine| machine.hangs = true);
        node.restart(deadline);
        assert!(
            can(neighbour, "cat /dev/nvidia1") && can(uid, "cat /dev/nvidia0"),
            "a restart takes nothing from a tenant"
        );
        assert_clean(&node.release(1, NAME, 0));
        session.wait().unwrap();
        assert_eq!(node.unproved(), [node.device(0).uuid]);
        node.change(|machine| machine.hangs = false);
        eventually(|| {
            node.system.reconcile_devices();
            node.unproved().is_empty()
        });
    });
}

#[test]
fn memory_that_stays_in_use_without_a_process_withholds_its_gpu_alone() {
    overlay_machine::alone("gpu_outages::memory_that_stays_in_use_without_a_process_withholds_its_gpu_alone", || {
        let mut node = DriverNode::start();
        node.provision(1, NAME, 0).unwrap();
        node.change(|machine| machine.gpus[0].used_mib = 9000);
        assert_clean(&node.release(1, NAME, 0));
        assert_eq!(node.unproved(), [node.device(0).uuid]);
        let unproved = node.system.unproved_gpus().into_values().next().unwrap();
        assert!(unproved.why.contains("holds 9000 MiB"), "{}", unproved.why);
        node.change(|machine| machine.gpus[0].used_mib = 0);
        assert!(node.system.reconcile_devices() && node.unproved().is_empty());
    });
}

#[test]
fn healthy_gpu_is_rented_and_returned_beside_one_that_the_driver_cannot_read() {
    overlay_machine::alone(
        "gpu_outages::healthy_gpu_is_rented_and_returned_beside_one_that_the_driver_cannot_read",
        || {
            let mut node = DriverNode::start();
            let changes: [Change; 2] =
                [|machine| machine.gpus[3].error = Some(UNKNOWN), |machine| machine.gpus[3].is_lost = true];
            for (id, change) in (1..).zip(changes) {
                node.change(change);
                node.restart(Duration::from_secs(20));
                let uid = node.provision(id, NAME, 0).unwrap();
                assert!(can(uid, "cat /dev/nvidia0") && !can(uid, "cat /dev/nvidia3"));
                assert_eq!(node.system.validate().unwrap()["gpus"].as_array().unwrap().len(), 3);
                let refused = node.provision(9, "other", 3).unwrap_err();
                assert!(["gpu_driver", "device_unknown"].contains(&refused.code), "{refused:?}");
                assert_clean(&node.release(id, NAME, 0));
                assert_eq!(node.unproved(), Vec::<String>::new());
            }
        },
    );
}

#[test]
fn tenant_of_a_gpu_that_is_lost_at_the_next_boot_keeps_the_agent_from_nothing() {
    overlay_machine::alone(
        "gpu_outages::tenant_of_a_gpu_that_is_lost_at_the_next_boot_keeps_the_agent_from_nothing",
        || {
            let mut node = DriverNode::start();
            let (uid, neighbour) = (node.provision(1, NAME, 0).unwrap(), node.provision(2, "neighbour", 1).unwrap());
            node.change(|machine| machine.gpus[0].is_lost = true);
            // The kernel makes new nodes at a boot.
            for minor in 0..4 {
                fs::remove_file(format!("/dev/nvidia{minor}")).unwrap();
                run("mknod", &["-m", "666", &format!("/dev/nvidia{minor}"), "c", "1", "3"]);
            }
            node.restart(Duration::from_secs(20));
            assert!(
                can(neighbour, "cat /dev/nvidia1") && !can(uid, "cat /dev/nvidia0") && !can(uid, "cat /dev/nvidia2")
            );
            let log = logged(|| reconcile_often(&node));
            assert_eq!(log.matches("a device of a tenant is not open").count(), 0, "as the start has logged it: {log}");
            // The GPU returns, and its tenant gets it without a restart of the agent.
            node.change(|machine| machine.gpus[0].is_lost = false);
            let log = logged(|| reconcile_often(&node));
            assert_eq!(log.matches("the tenant's devices are open").count(), 1, "{log}");
            assert!(can(uid, "cat /dev/nvidia0") && !can(neighbour, "cat /dev/nvidia0"));
            assert_clean(&node.release(1, NAME, 0));
            assert_clean(&node.release(2, "neighbour", 1));
        },
    );
}

/// A program of the machine that is this script.
pub fn install_program(name: &str, script: &str) {
    let path = Path::new("/usr/local/bin").join(name);
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// The part of systemd that reloads the units.
pub fn boot_systemd() {
    fs::create_dir_all("/run/systemd/system").unwrap();
    install_program("systemctl", "echo \"$@\" >>/run/systemctl.calls");
}

#[test]
fn hanging_driver_tool_delays_neither_provision_nor_release() {
    overlay_machine::alone("gpu_outages::hanging_driver_tool_delays_neither_provision_nor_release", || {
        boot_systemd();
        install_program("nvidia-modprobe", "echo $$ >/run/modprobe.pid; exec sleep 1000");
        let node = DriverNode::start();
        let uid = node.provision(1, NAME, 0).unwrap();
        assert!(can(uid, "cat /dev/nvidia0"));
        let hung = fs::read_to_string("/run/modprobe.pid").unwrap();
        eventually(|| !Path::new("/proc").join(hung.trim()).exists());
        assert_clean(&node.release(1, NAME, 0));
    });
}

fn reconcile_often(node: &DriverNode) {
    for _ in 0..5 {
        node.system.reconcile_devices();
    }
}

/// What is logged meanwhile, as text.
fn logged(action: impl FnOnce()) -> String {
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(subscriber, action);
    let text = lines.0.lock().unwrap().clone();
    String::from_utf8(text).unwrap()
}

#[test]
fn device_node_that_is_made_later_is_opened_to_present_tenants() {
    overlay_machine::alone("gpu_outages::device_node_that_is_made_later_is_opened_to_present_tenants", || {
        boot_systemd();
        let reloads = || fs::read_to_string("/run/systemctl.calls").unwrap_or_default().lines().count();
        fs::create_dir_all("/dev/infiniband").unwrap();
        let further = ["/dev/fuse", "/dev/infiniband/uverbs0"].map(Into::into).to_vec();
        let mut node = DriverNode::start();
        node.system = open_with(Duration::from_secs(20), further).unwrap();
        let uid = node.provision(1, NAME, 0).unwrap();
        let allowed = || {
            let slice = fs::read_to_string(format!("/run/systemd/system/user-{uid}.slice.d/50-gpuaas.conf")).unwrap();
            slice
                .lines()
                .filter_map(|line| Some(line.strip_prefix("DeviceAllow=/dev/")?.to_owned()))
                .collect::<Vec<_>>()
        };
        assert_eq!(allowed(), ["nvidia0 rw"]);
        for (count, later) in [(1, "nvidia-uvm"), (2, "fuse"), (3, "infiniband/uverbs0")] {
            let before = reloads();
            run("mknod", &["-m", "666", &format!("/dev/{later}"), "c", "1", "3"]);
            eventually(|| {
                node.system.follow_device_nodes();
                allowed().len() == count + 1
            });
            assert!(allowed().contains(&format!("{later} rw")) && reloads() == before + 1, "{later}");
            node.system.follow_device_nodes();
            node.system.reconcile_devices();
            assert_eq!(reloads(), before + 1, "systemd has nothing to read where nothing has changed");
        }
        assert_clean(&node.release(1, NAME, 0));
        assert!(!Path::new(&format!("/run/systemd/system/user-{uid}.slice.d")).exists());
    });
}

/// What happens to the machine or is ordered of the agent.
#[derive(Debug, Clone, Copy)]
enum Happening {
    Provision { gpu: usize },
    Release { gpu: usize },
    Outage(GpuOutage),
    KeepsMemory { gpu: usize },
    Restart,
    Reconcile,
}

/// The functions by which tenants are set up and cleaned up.
const CALLS: [&str; 10] = [
    "nvmlInit",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetPciInfo",
];

fn happening() -> impl Strategy<Value = Happening> {
    let gpu = 0..GPUS;
    prop_oneof![
        6 => gpu.clone().prop_map(|gpu| Happening::Provision { gpu }),
        6 => gpu.clone().prop_map(|gpu| Happening::Release { gpu }),
        16 => gpu_outage(GPUS, &CALLS).prop_map(Happening::Outage),
        1 => gpu.prop_map(|gpu| Happening::KeepsMemory { gpu }),
        2 => Just(Happening::Restart),
        2 => Just(Happening::Reconcile),
    ]
}

const GPUS: usize = 4;
/// Longer than a driver takes that answers.
const DEADLINE: Duration = Duration::from_secs(2);

/// The machine, and what it should have.
struct Model {
    node: DriverNode,
    failing: FailingGpus,
    /// By GPU: the allocation and a program of its tenant.
    tenants: BTreeMap<usize, (u128, u32, std::process::Child)>,
    next_id: u128,
}

impl Model {
    fn name(id: u128) -> String {
        format!("t{id}")
    }

    /// Every call about it succeeds, and nothing is left on it.
    fn is_healthy(&self, gpu: usize) -> bool {
        let (failing, machine) = (&self.failing, &self.node.machine);
        !failing.is_silent(gpu, machine) && !failing.has_failing_calls(gpu, machine) && failing.gpus[gpu].used_mib == 0
    }

    fn apply(&mut self) {
        let listed = self.failing.listed();
        self.node.change(|machine| machine.gpus = listed);
    }

    fn device(&self, gpu: usize) -> DeviceRef {
        DeviceRef { index: 0, uuid: self.failing.gpus[gpu].uuid.clone() }
    }

    fn does(&mut self, happening: Happening) {
        match happening {
            Happening::Provision { gpu } => self.provision(gpu),
            Happening::Release { gpu } => self.release(gpu),
            Happening::Outage(outage) => self.failing.suffer(outage, &mut self.node.machine),
            Happening::KeepsMemory { gpu } => self.failing.gpus[gpu].used_mib = 5000,
            Happening::Restart => self.node.restart(DEADLINE),
            Happening::Reconcile => drop(self.node.system.reconcile_devices()),
        }
        self.apply();
        self.expect_tenants_to_run();
    }

    fn provision(&mut self, gpu: usize) {
        let (id, device) = (self.next_id, self.device(gpu));
        self.next_id += 1;
        let is_free = !self.tenants.contains_key(&gpu) && !self.node.unproved().contains(&device.uuid);
        let may_succeed = is_free && self.is_healthy(gpu);
        match self.node.provision_on(id, &Self::name(id), device) {
            Ok(uid) => {
                assert!(is_free, "GPU {gpu} was given to a second tenant");
                self.tenants.insert(gpu, (id, uid, spawn(uid, "exec sleep 1000")));
            }
            Err(failure) => {
                // A driver that was just killed is left alone for a while.
                let rests = failure.message.contains("did not answer");
                assert!(!may_succeed || rests, "healthy GPU {gpu} is refused: {failure:?}");
                // What was set up so far is cleaned up, as the allocation orders it.
                let task =
                    Release { allocation_id: Uuid::from_u128(id), user_name: Self::name(id), devices: Vec::new() };
                assert_clean(&self.node.system.release(&task).unwrap().findings);
            }
        }
    }

    fn release(&mut self, gpu: usize) {
        let Some((id, uid, mut program)) = self.tenants.remove(&gpu) else { return };
        let devices = vec![self.device(gpu)];
        let task = Release { allocation_id: Uuid::from_u128(id), user_name: Self::name(id), devices };
        let findings = self.node.system.release(&task).unwrap().findings;
        assert_clean(&findings);
        assert!(!program.wait().unwrap().success(), "a program of the tenant was not ended");
        let open = (0..GPUS).filter(|minor| mode(format!("/dev/nvidia{minor}")).2 == uid).count();
        assert_eq!(open, 0, "a device is open to an ended tenant");
        let is_proved = !self.node.unproved().contains(&self.failing.gpus[gpu].uuid);
        // A GPU that does not support a call has nothing to prove by it.
        let (failing, machine) = (&self.failing, &self.node.machine);
        let keeps_memory = failing.gpus[gpu].used_mib > 0 && !failing.has_failing_calls(gpu, machine);
        let must_wait = failing.is_silent(gpu, machine) || keeps_memory;
        assert!(!is_proved || !must_wait, "GPU {gpu} is free without a proof");
    }

    fn expect_tenants_to_run(&mut self) {
        for (gpu, (_, _, program)) in &mut self.tenants {
            assert!(program.try_wait().unwrap().is_none(), "the tenant of GPU {gpu} was ended");
        }
    }

    /// Everything works again: each GPU is proved, its tenant has it, and what was free can be rented.
    fn recovers(mut self) {
        (self.node.machine.hangs, self.node.machine.not_loaded) = (false, false);
        for gpu in 0..GPUS {
            self.does(Happening::Outage(GpuOutage::Recovers { gpu }));
        }
        self.node.restart(Duration::from_secs(20));
        self.node.system.reconcile_devices();
        assert_eq!(self.node.unproved(), Vec::<String>::new());
        for (gpu, (_, uid, _)) in &self.tenants {
            assert!(can(*uid, &format!("cat /dev/nvidia{gpu}")), "GPU {gpu} is closed to its tenant");
        }
        for gpu in 0..GPUS {
            if !self.tenants.contains_key(&gpu) {
                self.provision(gpu);
                assert!(self.tenants.contains_key(&gpu), "GPU {gpu} is not rented");
            }
            self.release(gpu);
        }
    }
}

#[test]
fn any_outages_of_gpus_and_driver_end_no_tenant_and_outlast_no_release() {
    overlay_machine::alone("gpu_outages::any_outages_of_gpus_and_driver_end_no_tenant_and_outlast_no_release", || {
        // A case that fails is not made smaller: each leaves its tenants on the machine.
        let config = ProptestConfig { cases: 10, max_shrink_iters: 0, ..ProptestConfig::default() };
        let next_id = Cell::new(1_u128);
        let ran = TestRunner::new(config).run(&prop::collection::vec(happening(), 8..20), |happenings| {
            let node = DriverNode::start();
            let failing = FailingGpus::of(&node.machine);
            let mut model = Model { node, failing, tenants: BTreeMap::new(), next_id: next_id.get() };
            for happening in &happenings {
                model.does(*happening);
            }
            next_id.set(model.next_id + GPUS as u128);
            model.recovers();
            Ok(())
        });
        ran.unwrap();
    });
}
