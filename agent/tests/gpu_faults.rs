//! Faults of GPUs, through the agent's own path to the driver: the agent as a process, over a fake of NVIDIA's management library
//! (`tests/fake-nvml`) and a kernel log that the test writes.
#![allow(clippy::unwrap_used, clippy::expect_used, unreachable_pub, dead_code)]

mod agent_outages;
mod failing_gpus;
mod fake_control_plane;
mod gpu_machine;
mod hanging_mount;
mod never_read_gpus;
mod skipped_tests;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use ed25519_dalek::SigningKey;
use fake_nvml::{FakeFabric, FakeFabricVersion, FakeMachine};
use nix::sys::signal::Signal;
use wire::heartbeat::{Alert, Classification, HealthLevel, Heartbeat};
use wire::inventory::GpuSource;
use wire::task::{Task, TaskStatus};

use fake_control_plane::{FakeControlPlane, eventually};
use gpu_machine::{GpuMachine, name};
use hanging_mount::OwnMounts;

#[tokio::test]
async fn gpus_are_listed_through_the_shipped_path_and_healthy_ones_have_no_finding() {
    let node = GpuMachine::with_gpus(8).await;
    let _agent = node.agent(&[]);
    let heartbeat = eventually(|| node.heartbeat()).await;
    assert_eq!((heartbeat.inventory.gpu_source, heartbeat.inventory.gpus.len()), (GpuSource::Nvml, 8));
    assert_eq!(heartbeat.inventory.gpus[7].model, "H100 80GB HBM3");
    assert_eq!(heartbeat.telemetry.gpus[3].temperature_celsius, Some(40));
    assert_eq!(node.finds(&[]).await, vec![]);
}

#[tokio::test]
async fn xids_before_and_after_the_start_are_found_once_and_forged_ones_never() {
    let mut node = GpuMachine::with_gpus(2).await;
    node.log_xid(10, 1, 79);
    node.log(12, 11, "NVRM: Xid (PCI:0000:10:00): 79, written by a tenant");
    let agent = node.agent(&[]);
    let found = node.finds(&["xid/79 1"]).await;
    assert_eq!((found[0].count, found[0].boot_id), (1, node.heartbeat().unwrap().boot_id));
    node.log_xid(12, 0, 31);
    node.log_xid(13, 0, 31);
    node.log_xid(14, 1, 79);
    // A heartbeat may have the first of these alone.
    node.finds_counts(&["xid/31 0", "xid/79 1"], &[2, 2]).await;
    agent.kill_9();
    // The next agent reads the same records from the beginning, and one more.
    node.log_xid(14, 1, 79);
    node.log_xid(15, 0, 13);
    let _agent = node.agent(&[]);
    let found = node.finds(&["xid/13 0", "xid/31 0", "xid/79 1"]).await;
    assert_eq!(found.iter().map(|finding| finding.count).collect::<Vec<_>>(), [1, 2, 2]);
}

#[tokio::test]
async fn lost_and_reordered_gpus_are_distinguished_by_their_uuid() {
    let mut node = GpuMachine::with_gpus(3).await;
    let _agent = node.agent(&[]);
    node.finds(&[]).await;
    node.change(|machine| machine.gpus.reverse());
    let reordered = eventually(|| node.heartbeat().filter(|it| it.inventory.gpus[0].uuid.ends_with('2'))).await;
    assert_eq!(reordered.findings, Some(vec![]));
    node.change(|machine| machine.gpus[0].is_lost = true);
    node.finds(&["gpu/lost 2"]).await;
    assert_eq!(node.heartbeat().unwrap().inventory.gpus.len(), 2);
    // Its lines in the kernel's log still are its own.
    node.log_xid(1, 2, 79);
    node.finds(&["gpu/lost 2", "xid/79 2"]).await;
    node.change(|machine| machine.gpus[0].is_lost = false);
    node.finds(&["xid/79 2"]).await;
}

#[tokio::test]
async fn hanging_driver_is_a_finding_and_heartbeats_are_in_time() {
    let mut node = GpuMachine::with_gpus(2).await;
    let agent = node.agent(&["--gpu-deadline-seconds", "1"]);
    node.finds(&[]).await;
    node.change(|machine| machine.hangs = true);
    node.finds(&["driver/hung"]).await;
    // Others follow it while the driver hangs, each with the finding. That none of them waits for its deadline is the next test's.
    let before = node.fake.calls().heartbeats.len();
    eventually(|| (node.fake.calls().heartbeats.len() > before + 3).then_some(())).await;
    node.finds(&["driver/hung"]).await;
    assert_eq!(node.heartbeat().unwrap().inventory.gpus.len(), 2, "as they were listed last");
    // A child that does not answer is killed, and another one is tried after a pause.
    eventually(|| probe_processes(agent.pid()).is_empty().then_some(())).await;
    // Both continue once the driver answers.
    node.change(|machine| machine.hangs = false);
    node.finds(&[]).await;
    agent.signal(Signal::SIGTERM);
}

#[tokio::test]
async fn heartbeats_do_not_wait_for_the_deadline_of_a_hanging_driver() {
    let mut node = GpuMachine::with_gpus(2).await;
    let agent = node.agent(&["--gpu-deadline-seconds", "60"]);
    node.finds(&[]).await;
    node.change(|machine| machine.hangs = true);
    // One of them may have its survey already.
    let before = node.fake.calls().heartbeats.len();
    eventually(|| (node.fake.calls().heartbeats.len() > before + 3).then_some(())).await;
    let heartbeat = node.heartbeat().unwrap();
    assert_eq!(heartbeat.findings, Some(vec![]), "the driver may still answer in time");
    assert_eq!(heartbeat.inventory.gpus.len(), 2, "as they were listed last");

    // The agent is killed: its child does not outlive it, although the driver hangs.
    let child = eventually(|| probe_processes(agent.pid()).pop()).await;
    agent.kill_9();
    eventually(|| (!is_running(child)).then_some(())).await;
}

/// The processes that call the driver for this agent.
fn probe_processes(agent: i32) -> Vec<i32> {
    let pids = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_probe = |pid: &i32| {
        let command_line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        command_line.split('\0').any(|argument| argument == "--gpu-probe")
            && parent_and_state(*pid).is_some_and(|it| it.0 == agent)
    };
    pids.filter(is_probe).collect()
}

/// Whether the process has not ended; one that has may wait for its parent.
fn is_running(pid: i32) -> bool {
    parent_and_state(pid).is_some_and(|(_, state)| state != "Z")
}

fn parent_and_state(pid: i32) -> Option<(i32, String)> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in front, in parentheses, may have spaces.
    let mut fields = status.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.to_owned();
    Some((fields.next()?.parse().ok()?, state))
}

#[tokio::test]
async fn driver_that_hangs_from_the_start_delays_the_agent_for_a_moment() {
    let mut node = GpuMachine::with_gpus(2).await;
    node.change(|machine| machine.hangs = true);
    let begun = Instant::now();
    let _agent = node.agent(&["--gpu-deadline-seconds", "1"]);
    eventually(|| node.heartbeat()).await;
    // The driver hangs for ever: an agent that waits for it sends none.
    assert!(begun.elapsed() < Duration::from_secs(90), "{:?}", begun.elapsed());
    node.finds(&["driver/hung"]).await;
}

#[tokio::test]
async fn fault_before_the_drivers_first_answer_is_of_its_gpu() {
    let mut node = GpuMachine::with_gpus(2).await;
    node.log_xid(10, 1, 63);
    // Longer than a heartbeat waits for it.
    node.change(|machine| machine.late_ms = [("nvmlDeviceGetCount".to_owned(), 3000)].into());
    let _agent = node.agent(&[]);
    node.finds(&["xid/63 1"]).await;
    let of_no_gpu = |heartbeat: &Heartbeat| {
        heartbeat.findings.iter().flatten().any(|found| found.probe == "xid" && found.gpu_uuid.is_none())
    };
    assert!(!node.fake.calls().heartbeats.iter().any(of_no_gpu), "it would take the whole machine out of rent");
}

#[tokio::test]
async fn driver_that_is_not_loaded_is_a_finding_until_it_is() {
    let mut node = GpuMachine::with_gpus(2).await;
    node.change(|machine| machine.not_loaded = true);
    let _agent = node.agent(&[]);
    node.finds(&["driver/not_loaded"]).await;
    node.change(|machine| machine.not_loaded = false);
    node.finds(&[]).await;
    assert_eq!(node.heartbeat().unwrap().inventory.gpus.len(), 2);
}

#[tokio::test]
async fn machine_without_the_driver_has_no_gpus_and_no_finding() {
    let node = GpuMachine::with_gpus(2).await;
    std::fs::remove_file(node.folder.path().join(fake_nvml::LIBRARY)).unwrap();
    let _agent = node.agent(&[]);
    let heartbeat = eventually(|| node.heartbeat()).await;
    assert_eq!((heartbeat.inventory.gpu_source, heartbeat.inventory.gpus.len()), (GpuSource::None, 0));
    node.finds(&[]).await;
}

#[tokio::test]
async fn conditions_of_the_driver_are_findings_of_their_gpu() {
    let mut node = GpuMachine::with_gpus(2).await;
    let _agent = node.agent(&[]);
    node.finds(&[]).await;
    node.change(|machine| {
        let gpu = &mut machine.gpus[1];
        gpu.ecc_uncorrectable = Some(3);
        gpu.remap_pending = Some(true);
        gpu.recovery_action = Some(1);
        gpu.slowdown_reasons = Some(0x40);
        gpu.nvlinks = vec![true, false];
        gpu.pcie_width = Some((8, 16));
        gpu.mig = Some((1, 1));
        gpu.fabric.as_mut().unwrap().health_mask = 0x1a9;
    });
    let wanted = [
        "ecc/uncorrectable 1",
        "gpu_fabric/degraded_bandwidth 1",
        "gpu_mode/mig 1",
        "nvlink/down 1",
        "pcie/width 1",
        "recovery_action/gpu_reset 1",
        "row_remap/pending 1",
        "slowdown/thermal 1",
    ];
    node.finds(&wanted).await;
    // What the driver does not say is no sign that it is over.
    let calls = [
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ];
    node.change(|machine| {
        machine.gpus[1].errors = calls.iter().map(|call| ((*call).to_owned(), UNKNOWN)).collect();
    });
    for _ in 0..6 {
        node.next_heartbeat().await;
    }
    node.finds(&wanted).await;
    // A GPU that does not have them, and a driver that does not know.
    node.change(|machine| {
        let gpu = &mut machine.gpus[1];
        let (uuid, pci_bus) = (gpu.uuid.clone(), gpu.pci_bus);
        *gpu = fake_nvml::FakeGpu { uuid, pci_bus, name: "NVIDIA T4".into(), memory_mib: 1, ..Default::default() };
    });
    node.finds(&[]).await;
}

#[tokio::test]
async fn inventory_says_which_gpus_active_nvlinks_connect() {
    let mut node = GpuMachine::with_gpus(4).await;
    let bus = node.machine.gpus.iter().map(|gpu| gpu.pci_bus).collect::<Vec<_>>();
    // Bridges between 0 and 2, and between 1 and 3.
    node.change(|machine| {
        for (gpu, remote) in machine.gpus.iter_mut().zip([bus[2], bus[3], bus[0], bus[1]]) {
            gpu.nvlink_remote_buses = vec![remote; 2];
        }
    });
    let _agent = node.agent(&[]);
    let domains = |node: &GpuMachine| -> Vec<_> {
        let gpus = node.heartbeat().map(|heartbeat| heartbeat.inventory.gpus).unwrap_or_default();
        gpus.into_iter().map(|gpu| gpu.topology.nvlink_domain).collect()
    };
    eventually(|| (domains(&node) == [Some(0), Some(1), Some(0), Some(1)]).then_some(())).await;
    // One bridge is down, and of the other one the driver does not say where it leads.
    node.change(|machine| {
        machine.gpus[0].nvlinks = vec![false; 2];
        machine.gpus[2].nvlinks = vec![false; 2];
        machine.gpus[1].nvlink_remote_buses = Vec::new();
        machine.gpus[3].errors.insert("nvmlDeviceGetNvLinkRemotePciInfo".to_owned(), UNKNOWN);
    });
    eventually(|| (domains(&node) == [None; 4]).then_some(())).await;
}

#[tokio::test]
async fn gpu_in_a_mode_for_no_tenant_is_a_finding_and_fails_the_validation_until_the_mode_ends() {
    let mut node = GpuMachine::with_gpus(2).await;
    // As a repair has left it.
    node.change(|machine| machine.gpus[1].mig = Some((1, 1)));
    let _agent = node.agent(&[]);
    let found = node.finds(&["gpu_mode/mig 1"]).await;
    assert!(found[0].detail.ends_with("run: nvidia-smi -i 0000:11:00.0 -mig 0"), "{found:?}");
    let validated = async |node: &GpuMachine| {
        let task = node.fake.payload(Task::Validate { load: None });
        node.fake.dispatch(&task);
        let result = node.fake.result_of(task.task_id).await;
        (result.status, result.error.map(|error| (error.code, error.message)).unwrap_or_default())
    };
    let (status, (code, message)) = validated(&node).await;
    assert_eq!((status, code.as_str()), (TaskStatus::Failed, "gpu_mode"), "{message}");
    assert!(message.contains(&node.machine.gpus[1].uuid) && !message.contains(&node.machine.gpus[0].uuid), "{message}");
    node.change(|machine| {
        machine.gpus[0].compute_mode = Some(2);
        machine.gpus[1].mig = Some((0, 1));
    });
    node.finds(&["gpu_mode/compute_prohibited 0", "gpu_mode/mig_pending 1"]).await;
    // A GPU that has no such modes, and one that can be divided and is not.
    node.change(|machine| {
        (machine.gpus[0].mig, machine.gpus[0].compute_mode) = (None, None);
        machine.gpus[1].mig = Some((0, 0));
    });
    node.finds(&[]).await;
    assert_eq!(validated(&node).await.0, TaskStatus::Succeeded);
}

/// `nvmlReturn_t`: the library is of another version than the driver; it finds no resources; an error of which no more is known.
const REPLACED: u32 = 18;
const NO_RESOURCES: u32 = 23;
const UNKNOWN: u32 = 999;

fn answers(machine: &mut FakeMachine, function: &str, code: Option<u32>) {
    match code {
        Some(code) => {
            machine.errors.insert(function.to_owned(), code);
        }
        None => {
            machine.errors.remove(function);
        }
    }
}

#[tokio::test]
async fn replaced_driver_is_a_finding_of_the_running_agent_and_of_a_restarted_one() {
    let mut node = GpuMachine::with_gpus(2).await;
    let agent = node.agent(&[]);
    node.finds(&[]).await;
    // The packages of the driver are upgraded. What has loaded the library goes on with it, the agent's child as well.
    node.change(|machine| answers(machine, "nvmlInit", Some(REPLACED)));
    fake_nvml::replace(node.folder.path()).unwrap();
    let found = node.finds(&["driver/restart_needed"]).await;
    assert!(found[0].detail.contains("another version"), "{found:?}");
    let heartbeat = node.heartbeat().unwrap();
    assert_eq!((heartbeat.inventory.gpus.len(), heartbeat.telemetry.gpus.len()), (2, 2), "they are still read");
    expect_no_credit(&heartbeat);
    agent.kill_9();
    // The next agent can read none, and says the same of the machine.
    let before = node.fake.calls().heartbeats.len();
    let _agent = node.agent(&[]);
    for _ in 0..3 {
        let sent = node.fake.calls().heartbeats.len();
        eventually(|| (node.fake.calls().heartbeats.len() > sent).then_some(())).await;
        let heartbeat = node.heartbeat().unwrap();
        let names: Vec<_> = heartbeat.findings.iter().flatten().map(name).collect();
        assert_eq!(names, ["driver/restart_needed"], "after {before} heartbeats");
        assert_eq!(heartbeat.inventory.gpus.len(), 2, "as they were listed last");
        expect_no_credit(&heartbeat);
    }
    // The machine is rebooted.
    node.change(|machine| answers(machine, "nvmlInit", None));
    node.finds(&[]).await;
}

/// Control planes that do not read findings read its alerts.
#[track_caller]
fn expect_no_credit(heartbeat: &Heartbeat) {
    let credits = |alert: &Alert| alert.classifications.contains(&Classification::BillingCredit);
    assert!(!heartbeat.health.alerts.iter().any(credits), "{:?}", heartbeat.health);
    assert_ne!(heartbeat.health.status, HealthLevel::Critical, "{:?}", heartbeat.health);
}

#[tokio::test]
async fn library_of_the_same_version_that_is_installed_again_is_no_finding() {
    let mut node = GpuMachine::with_gpus(2).await;
    let agent = node.agent(&[]);
    node.finds(&[]).await;
    let child = eventually(|| probe_processes(agent.pid()).pop()).await;
    fake_nvml::replace(node.folder.path()).unwrap();
    // The child with the library before has ended, and another reads the GPUs.
    eventually(|| (!is_running(child)).then_some(())).await;
    node.change(|machine| machine.gpus[0].remap_pending = Some(true));
    node.finds(&["row_remap/pending 0"]).await;
}

#[tokio::test]
async fn agent_that_starts_while_the_library_is_not_installed_keeps_the_gpus_and_credits_no_tenant() {
    let node = GpuMachine::with_gpus(2).await;
    let agent = node.agent(&[]);
    node.finds(&[]).await;
    // The file of findings is written after the heartbeat that has them.
    node.next_heartbeat().await;
    agent.kill_9();
    std::fs::remove_file(node.folder.path().join(fake_nvml::LIBRARY)).unwrap();
    let _agent = node.agent(&[]);
    node.finds(&["driver/not_callable"]).await;
    let heartbeat = node.heartbeat().unwrap();
    assert_eq!((heartbeat.inventory.gpus.len(), heartbeat.inventory.gpu_source), (2, GpuSource::Nvml));
    expect_no_credit(&heartbeat);
    fake_nvml::install(node.folder.path()).unwrap();
    node.finds(&[]).await;
}

#[tokio::test]
async fn failure_of_the_agents_own_process_at_the_driver_credits_no_tenant() {
    let mut node = GpuMachine::with_gpus(2).await;
    node.change(|machine| answers(machine, "nvmlInit", Some(NO_RESOURCES)));
    let _agent = node.agent(&[]);
    node.finds(&["driver/not_callable"]).await;
    expect_no_credit(&node.heartbeat().unwrap());
    node.change(|machine| answers(machine, "nvmlInit", None));
    node.finds(&[]).await;
}

#[tokio::test]
async fn gpu_with_one_property_that_fails_is_surveyed_and_one_without_a_uuid_is_named_by_its_address() {
    let mut node = GpuMachine::with_gpus(2).await;
    let agent = node.agent(&[]);
    let known = eventually(|| node.heartbeat().filter(|it| it.inventory.gpus.len() == 2)).await.inventory.gpus;
    node.finds(&[]).await;
    let fail = |machine: &mut FakeMachine, functions: &[&str]| {
        machine.gpus[1].errors = functions.iter().map(|it| ((*it).to_owned(), UNKNOWN)).collect();
    };
    // Properties that not every GPU has.
    let optional = [
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetComputeMode",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetGpuFabricInfo",
    ];
    node.change(|machine| fail(machine, &optional));
    let read = eventually(|| node.heartbeat().filter(|it| it.telemetry.gpus[1].temperature_celsius.is_none())).await;
    assert_eq!((read.inventory.gpus.clone(), read.telemetry.gpus[1].memory_used_mib), (known.clone(), Some(0)));
    assert_eq!(node.finds(&[]).await, vec![]);
    // Those that each has.
    let owed = ["nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo"];
    node.change(|machine| fail(machine, &owed));
    let found = node.finds(&["gpu/incomplete 1"]).await;
    assert!(found[0].detail.contains("its name") && found[0].detail.contains("its memory"), "{found:?}");
    assert_eq!(node.heartbeat().unwrap().inventory.gpus, known, "as they were before in this boot");
    agent.kill_9();
    let _agent = node.agent(&[]);
    let sent = node.fake.calls().heartbeats.len();
    eventually(|| (node.fake.calls().heartbeats.len() > sent + 1).then_some(())).await;
    assert_eq!(node.heartbeat().unwrap().inventory.gpus, known, "also for a restarted agent");
    // Without a UUID, nothing that is read is of a known GPU.
    node.change(|machine| fail(machine, &["nvmlDeviceGetUUID"]));
    let found = node.finds(&["gpu/unreadable 1"]).await;
    assert!(found[0].detail.contains("0000:11:00") && !found[0].detail.contains("0000:10:00"), "{found:?}");
    node.change(|machine| fail(machine, &[]));
    node.finds(&[]).await;
}

#[tokio::test]
async fn gpu_that_its_uuid_does_not_name_is_a_finding_and_the_others_are_reported() {
    let mut node = GpuMachine::with_gpus(4).await;
    let _agent = node.agent(&[]);
    let known = eventually(|| node.heartbeat().filter(|it| it.inventory.gpus.len() == 4)).await.inventory.gpus;
    node.finds(&[]).await;
    let healthy = node.machine.clone();
    for (uuid, why) in [
        ("", "its UUID names no GPU (\"\")"),
        ("GPU-\u{1}\n", "its UUID names no GPU"),
        ("GPU 3,GPU 2", "its UUID names no GPU"),
        ("../GPU-3", "its UUID names no GPU"),
        (known[2].uuid.as_str(), "another GPU has the same UUID"),
    ] {
        node.change(|machine| machine.gpus[3].uuid = uuid.to_owned());
        let is_of_other = uuid == known[2].uuid;
        let wanted: &[&str] =
            if is_of_other { &["gpu/unreadable 2", "gpu/unreadable 3"] } else { &["gpu/unreadable 3"] };
        let found = node.finds(wanted).await;
        assert!(found.iter().all(|it| it.detail.contains(why) && it.detail.contains("0000:1")), "{uuid:?}: {found:?}");
        assert_eq!(node.heartbeat().unwrap().inventory.gpus, known, "{uuid:?}: as they were read before");
        node.change(|machine| *machine = healthy.clone());
        node.finds(&[]).await;
    }
    // What is only shown is shown as far as the control plane accepts it.
    node.change(|machine| {
        (machine.gpus[3].name, machine.gpus[3].memory_mib) = ("NVIDIA \u{7}H100".into(), u64::MAX >> 20);
    });
    let shown = eventually(|| node.heartbeat().filter(|it| it.inventory.gpus[3].model == " H100")).await;
    assert_eq!(shown.inventory.gpus[3].memory_mib, wire::inventory::MAX_AMOUNT);
}

#[tokio::test]
async fn text_of_a_line_decides_with_its_number_and_faults_of_switches_are_of_the_machine() {
    let mut node = GpuMachine::with_gpus(2).await;
    node.log(4, 10, "NVRM: Xid (PCI:0000:11:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008)");
    node.log(4, 11, "NVRM: Xid (PCI:0000:11:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000)");
    node.log(4, 12, "NVRM: Xid (PCI:0000:11:00): 45, pid=7, name=python3, Ch 0000000c caused by previous Xid 149");
    node.log(4, 13, "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up");
    node.log(
        4,
        14,
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Severity 1 Engine instance 30 Sub-engine instance 00",
    );
    node.log(12, 15, "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Fatal, written by a tenant");
    let _agent = node.agent(&[]);
    let found = node
        .finds(&[
            "sxid/fatal.20034",
            "xid/145.nonfatal.rlw_rxpipe 1",
            "xid/149.fatal.netir_link_evt 1",
            "xid/45.caused_by 1",
        ])
        .await;
    let of = |code: &str| &found.iter().find(|it| it.code == code).unwrap().detail;
    assert!(of("145.nonfatal.rlw_rxpipe").contains("Link 13"), "{found:?}");
    assert_eq!(of("fatal.20034"), "NVSwitch at 0000:c1:00: Fatal, Link 30 LTSSM Fault Up");
}

/// `NVML_GPU_FABRIC_STATE_*`.
const NOT_STARTED: u8 = 1;
const IN_PROGRESS: u8 = 2;

fn change_fabric(machine: &mut FakeMachine, gpu: usize, change: impl FnOnce(&mut FakeFabric)) {
    let mut fabric = FakeFabric::default();
    change(&mut fabric);
    machine.gpus[gpu].fabric = Some(fabric);
}

#[tokio::test]
async fn gpus_outside_their_fabric_are_a_finding_also_while_the_driver_does_not_answer() {
    let mut node = GpuMachine::with_gpus(2).await;
    node.change(|machine| {
        change_fabric(machine, 0, |fabric| fabric.fabric_state = NOT_STARTED);
        change_fabric(machine, 1, |fabric| fabric.fabric_state = NOT_STARTED);
    });
    let _agent = node.agent(&[]);
    let found = node.finds(&["fabric/not_started"]).await;
    assert!(found[0].detail.contains("none of 2 GPUs") && found[0].detail.contains("fabricmanager"), "{found:?}");
    // By then `driver/unresponsive` has ended, and so would this one if nothing being known ended it.
    node.change(|machine| machine.not_loaded = true);
    node.finds(&["driver/not_loaded", "fabric/not_started"]).await;
    // The fabric manager has started, and one GPU does not join.
    node.change(|machine| {
        machine.not_loaded = false;
        change_fabric(machine, 0, |_| {});
        change_fabric(machine, 1, |fabric| fabric.fabric_state = IN_PROGRESS);
    });
    node.finds(&["gpu_fabric/in_progress 1"]).await;
}

#[tokio::test]
async fn faults_of_the_fabric_are_read_from_drivers_of_each_age() {
    let mut node = GpuMachine::with_gpus(2).await;
    let unhealthy = |fabric: &mut FakeFabric| {
        // The bandwidth is degraded; the other fields are not supported.
        (fabric.health_mask, fabric.health_summary) = (0x1, 3);
    };
    node.change(|machine| change_fabric(machine, 1, unhealthy));
    let _agent = node.agent(&[]);
    node.finds(&["gpu_fabric/degraded_bandwidth 1"]).await;
    node.change(|machine| {
        machine.fabric_version = FakeFabricVersion::Second;
        change_fabric(machine, 0, unhealthy);
        machine.gpus[1].fabric = None;
    });
    node.finds(&["gpu_fabric/degraded_bandwidth 0"]).await;
    node.change(|machine| {
        machine.fabric_version = FakeFabricVersion::First;
        // NVML_ERROR_INSUFFICIENT_RESOURCES
        change_fabric(machine, 1, |fabric| fabric.status = 23);
    });
    let found = node.finds(&["gpu_fabric/failed 1"]).await;
    assert!(found[0].detail.contains("Insufficient Resources (23)"), "{found:?}");
}

#[tokio::test]
async fn xids_come_from_the_driver_where_the_kernel_log_cannot_be_read() {
    let mut node = GpuMachine::with_gpus(2).await;
    // It has no events, and keeps no other GPU from them.
    node.change(|machine| machine.gpus[0].errors = [("nvmlDeviceRegisterEvents".to_owned(), UNKNOWN)].into());
    let agent = node.agent(&["--kernel-log", "/nonexistent/kmsg"]);
    agent.wait_for_error_code("kernel_log").await;
    let sent = |node: &GpuMachine| node.fake.calls().heartbeats.len();
    let before = sent(&node);
    eventually(|| (sent(&node) > before + 1).then_some(())).await;
    let uuid = node.machine.gpus[1].uuid.clone();
    node.change(|machine| machine.xids = vec![(uuid.clone(), 48), (uuid, 48)]);
    let found = node.finds(&["xid/48 1"]).await;
    assert_eq!(found[0].count, 2);
}

#[tokio::test]
async fn clock_that_is_off_is_a_finding() {
    let node = GpuMachine::with_gpus(1).await;
    node.fake.behaviour().clock_ahead = chrono::TimeDelta::seconds(900);
    let _agent = node.agent(&[]);
    let found = node.finds(&["clock/skew"]).await;
    // The time that the answer took is a part of it.
    let seconds = found[0].detail.split(' ').find_map(|word| word.parse::<i64>().ok());
    assert!(seconds.is_some_and(|seconds| (780..=900).contains(&seconds)), "{found:?}");
    assert!(found[0].detail.contains(" behind "), "{found:?}");
    // By the control plane's time, as exactly as the first answer has it.
    assert!((found[0].first_at - node.fake.now()).abs() < chrono::TimeDelta::minutes(5), "{found:?}");
}

/// PyPI's client of the library, which operators and monitoring programs use.
#[test]
fn other_clients_read_the_same_machine() {
    let folder = tempfile::tempdir().unwrap();
    let Some(python) = python_with_nvml() else {
        return skipped_tests::report_skipped("nvidia-ml-py: `deploy/test --tools` installs it");
    };
    fake_nvml::install(folder.path()).unwrap();
    let mut machine = FakeMachine::with_gpus(2);
    machine.gpus[1].is_lost = true;
    change_fabric(&mut machine, 0, |fabric| {
        (fabric.status, fabric.health_mask, fabric.health_summary) = (23, 0x1a9, 3);
    });
    let file = folder.path().join("machine.json");
    machine.write(&file).unwrap();
    let script = "\
from pynvml import *
nvmlInit()
print(nvmlDeviceGetCount(), nvmlSystemGetDriverVersion())
gpu = nvmlDeviceGetHandleByIndex(0)
print(nvmlDeviceGetUUID(gpu), nvmlDeviceGetName(gpu), nvmlDeviceGetMemoryInfo(gpu).total // 2**20)
third, second, first = c_nvmlGpuFabricInfo_v3_t(), c_nvmlGpuFabricInfo_v2_t(), c_nvmlGpuFabricInfo_t()
nvmlDeviceGetGpuFabricInfoV(gpu, byref(third))
nvmlDeviceGetGpuFabricInfoV(gpu, byref(second))
nvmlDeviceGetGpuFabricInfo(gpu, byref(first))
print(*((fabric.state, fabric.status) for fabric in (third, second, first)))
print(hex(third.healthMask), hex(second.healthMask), third.healthSummary)
try:
    nvmlDeviceGetHandleByIndex(1)
except NVMLError as error:
    print(error)
";
    let ran = Command::new(python)
        .args(["-c", script])
        .env("LD_LIBRARY_PATH", folder.path())
        .env(fake_nvml::FILE, &file)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&ran.stdout);
    let fabric = "(3, 23) (3, 23) (3, 23)\n0x1a9 0x1a9 3";
    let wanted = format!("2 580.159.04\n{} NVIDIA H100 80GB HBM3 81559\n{fabric}\nGPU is lost\n", machine.gpus[0].uuid);
    assert_eq!(printed, wanted, "{}", String::from_utf8_lossy(&ran.stderr));
}

/// The interpreter of the virtual environment in which it is installed.
fn python_with_nvml() -> Option<PathBuf> {
    let tools = std::env::var_os("GPUAAS_TOOLS_DIR").map(PathBuf::from);
    let tools = tools.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.dev/tools"));
    Some(tools.join("nvml/bin/python")).filter(|python| python.exists())
}

#[tokio::test]
async fn mount_that_hangs_keeps_no_heartbeat_no_xid_no_stop_and_no_start_from_its_time() {
    let Some(mounts) = OwnMounts::of_this_thread(skipped_tests::report_skipped) else { return };
    let mut node = GpuMachine::with_gpus(2).await;
    let mut agent = node.agent(&[]);
    let before = eventually(|| node.heartbeat()).await;
    let folder = tempfile::tempdir().unwrap();
    let _hanging = mounts.hang(folder.path());
    node.next_heartbeat().await;
    node.log_xid(10, 1, 79);
    node.finds(&["xid/79 1"]).await;
    let with = node.next_heartbeat().await;
    assert_eq!(with.inventory.storage_gib, before.inventory.storage_gib, "it is no storage of the node");
    agent.signal(Signal::SIGTERM);
    assert_eq!(agent.exit().await.code(), Some(0));
    let mut again = node.agent(&[]);
    let restarted = node.next_heartbeat().await;
    assert_eq!(restarted.inventory.storage_gib, before.inventory.storage_gib);
    node.finds(&["xid/79 1"]).await;
    again.signal(Signal::SIGTERM);
    assert_eq!(again.exit().await.code(), Some(0));
}

#[tokio::test]
async fn state_folder_that_hangs_is_a_finding_and_neither_heartbeats_nor_a_stop_wait_for_it() {
    let Some(mounts) = OwnMounts::of_this_thread(skipped_tests::report_skipped) else { return };
    let mut node = GpuMachine::with_gpus(2).await;
    let mut agent = node.agent(&[]);
    eventually(|| node.heartbeat()).await;
    let state = node.folder.path().join("state");
    let hanging = mounts.hang(&state);
    node.log_xid(10, 1, 79);
    let found = node.finds(&["reading/state", "xid/79 1"]).await;
    let finding = found.iter().find(|finding| finding.probe == "reading").unwrap();
    assert!(finding.detail.ends_with("/state"), "{}", finding.detail);
    let second = SigningKey::from_bytes(&[2; 32]);
    node.fake.behaviour().verifier_sets = vec![FakeControlPlane::rotation(1, &second, &node.fake.signer)];
    eventually(|| node.heartbeat().filter(|it| it.verifier_set_version == 1)).await;
    node.next_heartbeat().await;
    agent.signal(Signal::SIGTERM);
    assert!(agent.exit().await.code().is_some(), "it ends by itself");
    let started = Command::new(env!("CARGO_BIN_EXE_gpuaas-agent"))
        .args(["--env-file", node.folder.path().join("agent.env").to_str().unwrap()])
        .args(["--state-dir", state.to_str().unwrap(), "--user", "nobody"])
        .env_clear()
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&started.stderr);
    assert_eq!(started.status.code(), Some(1), "{log}");
    assert!(log.contains("state_folder_hangs"), "{log}");
    drop(hanging);
    let _again = node.agent(&[]);
    node.next_heartbeat().await;
}
