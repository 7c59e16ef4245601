use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use chrono::Utc;
use tempfile::TempDir;
use uuid::Uuid;
use wire::bundle::Variables;
use wire::cleanup_proof::{CleanupReport, FindingOutcome};
use wire::inventory::DeviceRef;

use super::*;
use crate::executor::tenant_setup::MARKER;
use crate::gpu_probe::DEFAULT_DEADLINE;
use crate::gpus::GpuSimulation;

struct Fixture {
    folder: TempDir,
    sandbox: Sandbox,
    gpus: Arc<Gpus>,
}

fn fixture() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let asked = GpuSimulation { count: 4, model: "H100".into(), memory_mib: 1 };
    let gpus = Arc::new(Gpus::detect(Uuid::nil(), Some(&asked), DEFAULT_DEADLINE));
    let sandbox = Sandbox::open(folder.path(), Arc::clone(&gpus)).unwrap();
    Fixture { folder, sandbox, gpus }
}

impl Fixture {
    fn device(&self, index: usize) -> DeviceRef {
        DeviceRef::from(&self.gpus.list().unwrap()[index])
    }

    fn provision(&self, allocation_id: Uuid, devices: &[usize]) -> Provision {
        Provision {
            allocation_id,
            user_name: "tenant".into(),
            authorized_keys: vec!["ssh-ed25519 AAAA someone@somewhere".into()],
            devices: devices.iter().map(|index| self.device(*index)).collect(),
            sku: "h100".into(),
            deadline_at: Utc::now(),
        }
    }

    fn release(&self, allocation_id: Uuid, devices: &[usize]) -> Release {
        let devices = devices.iter().map(|index| self.device(*index)).collect();
        Release { allocation_id, user_name: "tenant".into(), devices }
    }

    fn allocation(&self, id: Uuid) -> PathBuf {
        self.folder.path().join("allocations").join(id.to_string())
    }
}

fn report(findings: Vec<CleanupFinding>) -> CleanupReport {
    CleanupReport {
        node_id: Uuid::nil(),
        allocation_id: Uuid::nil(),
        task_id: Uuid::nil(),
        attempt: 1,
        boot_id: Uuid::nil(),
        checked_at: Utc::now(),
        findings,
    }
}

fn outcome(findings: &[CleanupFinding], what: CleanupCheck) -> FindingOutcome {
    findings.iter().find(|finding| finding.what == what).unwrap().outcome
}

/// A tenant's process in a session of its own, as a login creates it.
fn tenant(allocation_id: Uuid, script: &str) -> Child {
    let mut command = Command::new("setsid");
    command.args(["sh", "-c", script]).env(MARKER, allocation_id.to_string()).spawn().unwrap()
}

fn eventually(what: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(60) {
        if what() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

#[test]
fn allocation_is_set_up_used_and_removed_without_leftovers() {
    let fixture = fixture();
    let id = Uuid::now_v7();
    let output = fixture.sandbox.provision(&fixture.provision(id, &[0, 1])).unwrap();
    assert_eq!(output["isolation"], "none");
    let folder = fixture.allocation(id);
    assert!(folder.join("home").is_dir());
    let keys = folder.join("authorized_keys");
    assert_eq!(fs::read_to_string(&keys).unwrap(), "ssh-ed25519 AAAA someone@somewhere\n");
    assert_eq!(fs::metadata(&keys).unwrap().permissions().mode() & 0o777, 0o644);
    let environment = fs::read_to_string(folder.join("environment")).unwrap();
    let environment = Variables::parse(&environment).unwrap();
    let devices = format!("{},{}", fixture.device(0).uuid, fixture.device(1).uuid);
    assert_eq!(environment.get("CUDA_VISIBLE_DEVICES"), Some(devices.as_str()));
    assert_eq!(environment.get(MARKER), Some(id.to_string().as_str()));

    let released = fixture.sandbox.release(&fixture.release(id, &[0, 1])).unwrap();
    assert!(report(released.findings.clone()).is_clean(ExecutorKind::Sandbox), "{:#?}", released.findings);
    assert!(!folder.exists());
}

#[test]
fn provisioning_and_releasing_again_changes_nothing() {
    let fixture = fixture();
    let id = Uuid::now_v7();
    let task = fixture.provision(id, &[0]);
    let first = fixture.sandbox.provision(&task).unwrap();
    fs::write(fixture.allocation(id).join("home/work"), "kept").unwrap();
    assert_eq!(fixture.sandbox.provision(&task).unwrap(), first);
    assert_eq!(fs::read_to_string(fixture.allocation(id).join("home/work")).unwrap(), "kept");
    for _ in 0..2 {
        let released = fixture.sandbox.release(&fixture.release(id, &[0])).unwrap();
        assert!(report(released.findings).is_clean(ExecutorKind::Sandbox));
    }
}

#[test]
fn device_is_held_by_one_allocation_across_a_restart() {
    let fixture = fixture();
    let (one, two) = (Uuid::now_v7(), Uuid::now_v7());
    fixture.sandbox.provision(&fixture.provision(one, &[0, 1])).unwrap();
    let refused = fixture.sandbox.provision(&fixture.provision(two, &[1, 2])).unwrap_err();
    assert_eq!(refused.code, "device_in_use");
    assert!(!fixture.allocation(two).exists());

    let restarted = Sandbox::open(fixture.folder.path(), Arc::clone(&fixture.gpus)).unwrap();
    assert_eq!(restarted.provision(&fixture.provision(two, &[1])).unwrap_err().code, "device_in_use");
    restarted.release(&fixture.release(one, &[0, 1])).unwrap();
    restarted.provision(&fixture.provision(two, &[1, 2])).unwrap();
}

#[test]
fn concurrent_requests_for_the_last_device_allocate_it_once() {
    let fixture = fixture();
    let won = std::thread::scope(|scope| {
        let tries: Vec<_> = (0..16)
            .map(|_| scope.spawn(|| fixture.sandbox.provision(&fixture.provision(Uuid::now_v7(), &[3])).is_ok()))
            .collect();
        tries.into_iter().map(|thread| thread.join().unwrap()).filter(|won| *won).count()
    });
    assert_eq!(won, 1);
}

#[test]
fn same_allocation_with_other_devices_is_refused() {
    let fixture = fixture();
    let id = Uuid::now_v7();
    fixture.sandbox.provision(&fixture.provision(id, &[0])).unwrap();
    let refused = fixture.sandbox.provision(&fixture.provision(id, &[1])).unwrap_err();
    assert_eq!(refused.code, "allocation_differs");
}

#[test]
fn hostile_parameters_are_refused_before_any_change() {
    let fixture = fixture();
    let id = Uuid::now_v7();
    let good = || fixture.provision(id, &[0]);
    let mut tasks = Vec::new();
    for user_name in ["", "root; rm -rf /", "../../etc", "a\nb", "Caps", &"x".repeat(33)] {
        tasks.push(Provision { user_name: user_name.into(), ..good() });
    }
    for key in ["", "ssh-ed25519", "command=\"id\" ssh-ed25519 AAAA", "ssh-ed25519 AAAA\nssh-rsa BBBB", "ssh-dss AAAA"]
    {
        tasks.push(Provision { authorized_keys: vec![key.into()], ..good() });
    }
    for task in tasks {
        assert_eq!(fixture.sandbox.provision(&task).unwrap_err().code, "invalid_task", "{task:?}");
    }
    let unknown = vec![DeviceRef { index: 0, uuid: "GPU-none".into() }];
    let refused = fixture.sandbox.provision(&Provision { devices: unknown, ..good() }).unwrap_err();
    assert_eq!(refused.code, "device_unknown");
    assert!(!fixture.allocation(id).exists());
}

#[test]
fn release_ends_every_process_of_the_tenant_and_no_other() {
    let fixture = fixture();
    let (id, other) = (Uuid::now_v7(), Uuid::now_v7());
    fixture.sandbox.provision(&fixture.provision(id, &[0])).unwrap();
    // One ignores SIGTERM, one has cleared its environment, one keeps forking.
    let scripts = [
        "trap '' TERM; sleep 600 & wait; sleep 600",
        "env -i sleep 600 & wait",
        "while true; do sleep 600 & sleep 0.01; done",
    ];
    let mut tenants: Vec<Child> = scripts.iter().map(|script| tenant(id, script)).collect();
    let mut neighbour = tenant(other, "exec sleep 600");
    let table = ProcessTable::default();
    let folder = fixture.allocation(id);
    let reaper = std::thread::spawn(move || tenants.iter_mut().for_each(|child| drop(child.wait())));
    assert!(eventually(|| {
        !matches!(table.check_removed(id, &folder, &processes::Termination::default()).outcome, FindingOutcome::Gone)
    }));
    std::thread::sleep(Duration::from_millis(100));

    let released = fixture.sandbox.release(&fixture.release(id, &[0])).unwrap();
    assert!(report(released.findings.clone()).is_clean(ExecutorKind::Sandbox), "{:#?}", released.findings);
    assert!(released.output["processes_ended"].as_u64().unwrap() >= 3);
    reaper.join().unwrap();
    assert!(neighbour.try_wait().unwrap().is_none(), "the neighbour lives");
    neighbour.kill().unwrap();
    neighbour.wait().unwrap();
}

#[test]
fn files_with_the_allocation_prefix_and_closed_folders_are_removed() {
    let fixture = fixture();
    let id = Uuid::now_v7();
    fixture.sandbox.provision(&fixture.provision(id, &[0])).unwrap();
    let closed = fixture.allocation(id).join("home/closed");
    fs::create_dir_all(closed.join("deep")).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
    let left: Vec<PathBuf> =
        ["/tmp", "/var/tmp", "/dev/shm"].iter().map(|place| Path::new(place).join(format!("gpuaas-{id}-x"))).collect();
    for path in &left {
        fs::write(path, "left").unwrap();
    }
    let semaphore = PathBuf::from(format!("/dev/shm/sem.gpuaas-{id}"));
    fs::write(&semaphore, "left").unwrap();
    let findings = fixture.sandbox.release(&fixture.release(id, &[0])).unwrap().findings;
    assert!(report(findings).is_clean(ExecutorKind::Sandbox));
    assert!(left.iter().all(|path| !path.exists()) && !semaphore.exists());
}

/// A process table with one process that carries the mark and that no signal reaches.
fn table_with_unkillable_process(folder: &Path, allocation_id: Uuid) -> ProcessTable {
    // Above the largest id that a kernel gives.
    let ghost = folder.join("2000000000");
    fs::create_dir_all(&ghost).unwrap();
    fs::write(ghost.join("stat"), "2000000000 (a (b) c) S 1 2000000000 2000000000 0").unwrap();
    fs::write(ghost.join("environ"), format!("A=b\0{MARKER}={allocation_id}\0")).unwrap();
    ProcessTable { proc: folder.to_owned(), give_up_after: Duration::from_millis(50) }
}

#[test]
fn leftover_is_reported_and_keeps_the_devices_reserved() {
    let mut fixture = fixture();
    let (id, next) = (Uuid::now_v7(), Uuid::now_v7());
    fixture.sandbox.provision(&fixture.provision(id, &[0])).unwrap();
    let proc = tempfile::tempdir().unwrap();
    fixture.sandbox.processes = table_with_unkillable_process(proc.path(), id);

    let findings = fixture.sandbox.release(&fixture.release(id, &[0])).unwrap().findings;
    assert_eq!(outcome(&findings, CleanupCheck::Processes), FindingOutcome::Present);
    assert_eq!(outcome(&findings, CleanupCheck::Home), FindingOutcome::Gone);
    assert_eq!(outcome(&findings, CleanupCheck::DeviceReservation), FindingOutcome::Present);
    assert!(!report(findings).is_clean(ExecutorKind::Sandbox));
    let refused = fixture.sandbox.provision(&fixture.provision(next, &[0])).unwrap_err();
    assert_eq!(refused.code, "device_in_use");

    fixture.sandbox.processes = ProcessTable::default();
    let findings = fixture.sandbox.release(&fixture.release(id, &[0])).unwrap().findings;
    assert!(report(findings).is_clean(ExecutorKind::Sandbox));
    fixture.sandbox.provision(&fixture.provision(next, &[0])).unwrap();
}

#[test]
fn a_process_table_that_cannot_be_read_is_unknown_and_not_clean() {
    let mut fixture = fixture();
    let id = Uuid::now_v7();
    fixture.sandbox.processes = ProcessTable { proc: "/nonexistent".into(), ..ProcessTable::default() };
    let findings = fixture.sandbox.release(&fixture.release(id, &[0])).unwrap().findings;
    assert_eq!(outcome(&findings, CleanupCheck::Processes), FindingOutcome::Unknown);
    assert!(!report(findings).is_clean(ExecutorKind::Sandbox));
}

#[test]
fn keys_are_written_for_a_present_tenant_only() {
    let fixture = fixture();
    let id = Uuid::from_u128(1);
    fixture.sandbox.provision(&fixture.provision(id, &[0])).unwrap();
    let task = |allocation_id, user_name: &str, keys: &[&str]| ReconcileSshKeys {
        allocation_id,
        user_name: user_name.into(),
        authorized_keys: keys.iter().map(|key| (*key).to_owned()).collect(),
    };
    let file = fixture.allocation(id).join("authorized_keys");
    for keys in [&["ssh-ed25519 BBBB", "ssh-ed25519 CCCC"][..], &["ssh-ed25519 CCCC"], &["ssh-ed25519 CCCC"], &[]] {
        fixture.sandbox.reconcile_keys(&task(id, "tenant", keys)).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap().lines().collect::<Vec<_>>(), keys);
    }
    let code = |task: &ReconcileSshKeys| fixture.sandbox.reconcile_keys(task).unwrap_err().code;
    assert_eq!(code(&task(id, "another", &[])), "tenant_unknown");
    assert_eq!(code(&task(Uuid::from_u128(2), "tenant", &[])), "tenant_unknown");
    assert_eq!(code(&task(id, "tenant", &["ssh-ed25519 AAAA\nssh-ed25519 BBBB"])), "invalid_task");
    fixture.sandbox.release(&fixture.release(id, &[0])).unwrap();
    assert_eq!(code(&task(id, "tenant", &["ssh-ed25519 AAAA"])), "tenant_unknown");
    assert!(!file.exists());
}

#[test]
fn gpu_is_withheld_from_tenants_until_the_last_task_about_it_is_over() {
    let fixture = fixture();
    let uuid = fixture.device(1).uuid;
    let (reset, test) = (fixture.sandbox.withhold_gpu(&uuid).unwrap(), fixture.sandbox.withhold_gpu(&uuid).unwrap());
    let refused = |devices: &[usize]| fixture.sandbox.provision(&fixture.provision(Uuid::now_v7(), devices));
    assert_eq!(refused(&[0, 1]).unwrap_err().code, "device_in_use");
    refused(&[2]).unwrap();
    drop(reset);
    assert_eq!(refused(&[1]).unwrap_err().code, "device_in_use");
    drop(test);
    refused(&[1]).unwrap();
    assert_eq!(fixture.sandbox.withhold_gpu(&uuid).map(drop).unwrap_err().code, "device_in_use");
    fixture.sandbox.withhold_gpu(&fixture.device(0).uuid).map(drop).unwrap();
}
