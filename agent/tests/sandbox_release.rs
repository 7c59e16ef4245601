//! What a release by the sandbox executor finds of a tenant's programs.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent::executor::Executor as _;
use agent::executor::tenant_setup::MARKER;
use agent::gpu_probe::DEFAULT_DEADLINE;
use agent::gpus::{GpuSimulation, Gpus};
use agent::sandbox::Sandbox;
use uuid::Uuid;
use wire::cleanup_proof::FindingOutcome;
use wire::inventory::DeviceRef;
use wire::task::{Provision, Release};

/// A program that does not outlive its test.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn program_whose_main_thread_has_ended_is_ended_by_a_release_of_its_sandbox() {
    let folder = tempfile::tempdir().unwrap();
    let simulated = GpuSimulation { count: 1, model: "H100".into(), memory_mib: 1 };
    let gpus = Arc::new(Gpus::detect(Uuid::nil(), Some(&simulated), DEFAULT_DEADLINE));
    let sandbox = Sandbox::open(folder.path(), Arc::clone(&gpus)).unwrap();
    let (allocation_id, devices) = (Uuid::now_v7(), vec![DeviceRef::from(&gpus.list().unwrap()[0])]);
    let provision = Provision {
        allocation_id,
        user_name: "tenant".into(),
        authorized_keys: Vec::new(),
        devices: devices.clone(),
        sku: "h100".into(),
        deadline_at: chrono::Utc::now(),
    };
    sandbox.provision(&provision).unwrap();

    // The system call ends the main thread alone.
    let number = if cfg!(target_arch = "x86_64") { 60 } else { 93 };
    let script = format!("threads->create(sub {{ sleep 1000 }}); syscall({number}, 0)");
    let mut program = Command::new("setsid");
    program.args(["perl", "-Mthreads", "-e", &script]).env(MARKER, allocation_id.to_string()).current_dir("/");
    let mut program = Program(program.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let stat = || std::fs::read_to_string(format!("/proc/{}/stat", program.0.id())).unwrap_or_default();
    let begun = Instant::now();
    while !stat().contains("(perl) Z ") {
        assert!(begun.elapsed() < Duration::from_secs(60), "{}", stat());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(program.0.try_wait().unwrap().is_none(), "its second thread runs");

    let release = Release { allocation_id, user_name: "tenant".into(), devices };
    let outcome = sandbox.release(&release).unwrap();
    assert!(outcome.findings.iter().all(|finding| finding.outcome == FindingOutcome::Gone), "{:?}", outcome.findings);
    assert_eq!(outcome.output["processes_ended"], 1, "{:?}", outcome.output);
    let begun = Instant::now();
    while program.0.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(60), "its second thread runs on");
        std::thread::sleep(Duration::from_millis(5));
    }
}
