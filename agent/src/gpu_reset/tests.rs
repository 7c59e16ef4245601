use std::path::PathBuf;

use fake_nvml::{FakeMachine, FakeReset};
use tempfile::TempDir;

use super::*;

/// A machine with the driver's tool, and a child of the agent that has no driver open.
struct Bench {
    folder: TempDir,
    machine: FakeMachine,
    resetter: GpuResetter,
    probe: GpuProbe,
}

impl Bench {
    fn new(reset: FakeReset) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let machine = FakeMachine { reset, ..FakeMachine::with_gpus(2) };
        let tools = folder.path().join("tools");
        let mut resetter = GpuResetter::new(tools.clone(), folder.path());
        resetter.busy_retries = Duration::ZERO;
        let probe = GpuProbe::new(PathBuf::from("/bin/false"), Duration::from_secs(1));
        let mut this = Self { folder, machine, resetter, probe };
        fake_nvml::install_smi(&tools, &this.folder.path().join("library"), &this.file()).unwrap();
        this.change(|machine| machine.gpus[1].remap_pending = Some(true));
        this
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("machine.json")
    }

    fn change(&mut self, change: impl FnOnce(&mut FakeMachine)) {
        change(&mut self.machine);
        self.machine.write(&self.file()).unwrap();
    }

    /// The machine as the tool has left it.
    fn left(&self) -> FakeMachine {
        serde_json::from_slice(&std::fs::read(self.file()).unwrap()).unwrap()
    }

    fn uuid(&self) -> &str {
        &self.machine.gpus[1].uuid
    }

    fn reset(&self) -> Result<TaskOutput, TaskFailure> {
        self.resetter.reset_withheld(&self.probe, self.uuid())
    }

    fn record(&self) -> Option<String> {
        std::fs::read_to_string(self.folder.path().join(RECORD)).ok()
    }
}

#[test]
fn gpu_is_reset_by_its_uuid_alone() {
    let bench = Bench::new(FakeReset::Works);
    let output = bench.reset().unwrap();
    assert_eq!(output["gpu_uuid"], bench.uuid());
    assert!(output["tool"].as_str().unwrap().contains("was successfully reset"), "{output:?}");
    assert_eq!(bench.left().gpus[1].remap_pending, Some(false));
    let query = "--query-gpu=uuid,persistence_mode --format=csv,noheader".to_owned();
    assert_eq!(fake_nvml::calls_of_smi(&bench.file()), [query, format!("--gpu-reset -i {}", bench.uuid())]);
}

#[test]
fn persistence_mode_is_off_for_the_reset_alone() {
    let mut bench = Bench::new(FakeReset::Works);
    bench.change(|machine| machine.gpus.iter_mut().for_each(|gpu| gpu.persistence_mode = true));
    bench.reset().unwrap();
    let left = bench.left();
    assert_eq!(left.gpus.iter().map(|gpu| gpu.persistence_mode).collect::<Vec<_>>(), [true, true]);
    assert_eq!((left.gpus[1].remap_pending, bench.record()), (Some(false), None));
    let calls = fake_nvml::calls_of_smi(&bench.file());
    let of_gpu = |call: &str| format!("{call} -i {}", bench.uuid());
    assert_eq!(calls[1..], [of_gpu("-pm 0"), of_gpu("--gpu-reset"), of_gpu("-pm 1")]);
}

#[test]
fn persistence_mode_is_on_again_after_a_reset_that_failed() {
    let mut bench = Bench::new(FakeReset::Fails);
    bench.change(|machine| machine.gpus[1].persistence_mode = true);
    assert_eq!(bench.reset().unwrap_err().code, "reset_failed");
    assert_eq!((bench.left().gpus[1].persistence_mode, bench.record()), (true, None));
}

#[test]
fn repeat_after_a_crash_switches_persistence_mode_on_again() {
    let mut bench = Bench::new(FakeReset::Works);
    bench.change(|machine| machine.gpus[1].persistence_mode = true);
    // The agent is killed between the reset and its end.
    assert_eq!(bench.resetter.suspend_persistence(bench.uuid()), Ok(true));
    assert_eq!((bench.left().gpus[1].persistence_mode, bench.record()), (false, Some(format!("{}\n", bench.uuid()))));
    bench.reset().unwrap();
    assert_eq!((bench.left().gpus[1].persistence_mode, bench.record()), (true, None));
}

#[test]
fn answers_of_the_tool_have_their_codes() {
    let code_of = |reset: FakeReset| {
        let failure = Bench::new(reset).reset().unwrap_err();
        assert!(failure.message.chars().count() < 500, "{failure}");
        failure.code
    };
    assert_eq!(code_of(FakeReset::Busy), "gpu_busy");
    assert_eq!(code_of(FakeReset::NotSupported), "reset_unsupported");
    assert_eq!(code_of(FakeReset::Primary), "reset_unsupported");
    assert_eq!(code_of(FakeReset::Fails), "reset_failed");
    let bench = Bench::new(FakeReset::Works);
    std::fs::remove_file(bench.folder.path().join("tools/nvidia-smi")).unwrap();
    let missing = bench.reset().unwrap_err();
    assert_eq!(missing.code, "reset_unsupported");
    assert!(missing.message.contains("nvidia-smi is not installed in"), "{missing}");
}

#[test]
fn gpu_that_is_busy_for_a_moment_is_reset_after_it() {
    let mut bench = Bench::new(FakeReset::Busy);
    bench.resetter.busy_retries = Duration::from_secs(60);
    let (file, uuid) = (bench.file(), bench.uuid().to_owned());
    let freed = FakeMachine { reset: FakeReset::Works, ..bench.machine.clone() };
    let refused = format!("--gpu-reset -i {uuid}");
    let other = std::thread::spawn(move || {
        let begun = Instant::now();
        while !fake_nvml::calls_of_smi(&file).contains(&refused) {
            assert!(begun.elapsed() < Duration::from_secs(50), "the reset was not tried");
            std::thread::sleep(Duration::from_millis(20));
        }
        freed.write(&file).unwrap();
    });
    bench.reset().unwrap();
    other.join().unwrap();
    let resets = fake_nvml::calls_of_smi(&bench.file()).into_iter().filter(|call| call.starts_with("--gpu-reset"));
    assert!(resets.count() >= 2, "it was not refused first");
}

#[test]
fn tool_that_hangs_is_killed() {
    let bench = Bench::new(FakeReset::Hangs);
    let begun = Instant::now();
    let args = ["--gpu-reset", "-i", bench.uuid()];
    let error = bench.resetter.tool(&args, Duration::from_millis(500)).unwrap_err();
    // The tool sleeps for a quarter of an hour.
    assert!(begun.elapsed() < Duration::from_secs(90), "{:?}", begun.elapsed());
    assert_eq!(failed_tool(&error).code, "reset_hung");
}

#[test]
fn nothing_is_reset_while_a_child_of_the_agent_cannot_be_ended() {
    let bench = Bench::new(FakeReset::Works);
    let hung = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    bench.probe.abandon(hung);
    assert_eq!(bench.reset().unwrap_err().code, "reset_hung");
    assert_eq!(fake_nvml::calls_of_smi(&bench.file()), Vec::<String>::new());
    bench.probe.end_abandoned();
    bench.reset().unwrap();
}

#[test]
fn text_that_is_not_a_gpu_uuid_is_refused() {
    for uuid in [
        "",
        "0",
        "GPU-1",
        "--all",
        "GPU-00000000-0000-4000-8000-00000000000g",
        "MIG-00000000-0000-4000-8000-000000000001",
    ] {
        assert_eq!(check(uuid).unwrap_err().code, "invalid_task", "{uuid}");
    }
    check("GPU-00000000-0000-4000-8000-000000000001").unwrap();
}
