//! Whether a GPU is in use, as the clean-up proof asks: over a fake of NVIDIA's library (`tests/fake-nvml`) that answers as driver 580 does.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use agent::cleanup_checks;
use agent::gpu_probe::GpuProbe;
use agent::gpus::{DeviceUse, Gpus, MemoryUse};
use fake_nvml::{FakeGpu, FakeMachine};
use tempfile::TempDir;
use wire::cleanup_proof::FindingOutcome;
use wire::inventory::DeviceRef;

struct Bench {
    folder: TempDir,
    machine: FakeMachine,
    gpus: Gpus,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fake_nvml::install(folder.path()).unwrap();
        // The probe's child gets the library by its environment.
        let program = folder.path().join("agent");
        let (library, file) = (folder.path().display(), folder.path().join("machine.json"));
        let script = format!(
            "#!/bin/sh\nexec env LD_LIBRARY_PATH='{library}' {}='{}' '{}' \"$@\"\n",
            fake_nvml::FILE,
            file.display(),
            env!("CARGO_BIN_EXE_gpuaas-agent")
        );
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let gpus = Gpus::Nvml(Box::new(GpuProbe::new(program, Duration::from_secs(20))));
        let bench = Self { folder, machine: FakeMachine::with_gpus(2), gpus };
        bench.machine.write(&bench.file()).unwrap();
        bench
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("machine.json")
    }

    fn change(&mut self, change: impl FnOnce(&mut FakeGpu)) {
        change(&mut self.machine.gpus[1]);
        self.machine.write(&self.file()).unwrap();
    }

    fn uuid(&self) -> &str {
        &self.machine.gpus[1].uuid
    }

    fn device(&self) -> DeviceRef {
        DeviceRef { index: 1, uuid: self.uuid().to_owned() }
    }
}

#[test]
fn context_of_a_program_is_memory_in_use_and_what_the_driver_reserves_is_not() {
    let mut bench = Bench::new();
    assert_eq!(bench.gpus.memory_use(bench.uuid()), MemoryUse::DriverOnly);
    // A program that has called `cuInit` and nothing else.
    bench.change(|gpu| gpu.used_mib = 3);
    assert_eq!(bench.gpus.memory_use(bench.uuid()), MemoryUse::DriverOnly);
    // A context; and one of PyTorch, with a few matrices.
    for mib in [526, 1010] {
        bench.change(|gpu| gpu.used_mib = mib);
        assert_eq!(bench.gpus.memory_use(bench.uuid()), MemoryUse::Held { mib });
        let findings = cleanup_checks::check_device_memory(&bench.gpus, &[bench.device()]);
        assert_eq!(findings[0].outcome, FindingOutcome::Present, "{findings:?}");
    }
}

#[test]
fn programs_that_compute_or_draw_are_in_the_way_and_a_gpu_that_cannot_draw_is_no_fault() {
    let mut bench = Bench::new();
    assert_eq!(bench.gpus.device_use(bench.uuid()), DeviceUse::Idle);
    bench.change(|gpu| gpu.drawing = Some(vec![41]));
    assert_eq!(bench.gpus.device_use(bench.uuid()), DeviceUse::BusyWith(vec![41]));
    // A program may do both.
    bench.change(|gpu| gpu.computing = vec![7, 41]);
    assert_eq!(bench.gpus.device_use(bench.uuid()), DeviceUse::BusyWith(vec![7, 41]));
    let findings = cleanup_checks::check_device_processes(&bench.gpus, &[bench.device()], &BTreeSet::new());
    assert_eq!(findings[0].outcome, FindingOutcome::Present, "{findings:?}");
    bench.change(|gpu| (gpu.computing, gpu.drawing) = (Vec::new(), None));
    assert_eq!(bench.gpus.device_use(bench.uuid()), DeviceUse::Idle);
}

#[test]
fn memory_that_the_driver_frees_a_moment_after_its_process_ended_is_waited_for() {
    let mut bench = Bench::new();
    bench.change(|gpu| (gpu.computing, gpu.used_mib) = (vec![7], 70_000));
    std::thread::scope(|scope| {
        let (file, mut machine) = (bench.file(), bench.machine.clone());
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(700));
            machine.gpus[1].computing.clear();
            machine.write(&file).unwrap();
            std::thread::sleep(Duration::from_millis(700));
            machine.gpus[1].used_mib = 0;
            machine.write(&file).unwrap();
        });
        bench.gpus.wait_until_freed([bench.uuid()].into_iter());
        assert_eq!(bench.gpus.device_use(bench.uuid()), DeviceUse::Idle);
        assert_eq!(bench.gpus.memory_use(bench.uuid()), MemoryUse::DriverOnly);
    });
}
