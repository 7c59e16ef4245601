//! Each GPU: what the driver reports of it before and after a load, and a pattern and bandwidth test of its memory through CUDA.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use wire::inventory::GpuInfo;
use wire::validation::GpuMeasurements;

use super::{Budget, Tests, reported};
use crate::bounded_tool::ToolError;
use crate::gpu_probe::{GpuError, GpuProbe, GpuTest};
use crate::gpus::Gpus;

const PATTERN: &str = "gpu_pattern";
/// How long a validation waits for CUDA, for all GPUs together: the fabric manager of a machine starts minutes after the driver.
const READY_WITHIN: Duration = Duration::from_secs(120);
const TRIED_EVERY: Duration = Duration::from_secs(5);
/// What CUDA measures.
const BANDWIDTHS: [&str; 3] =
    ["gpu_memory_mib_per_second", "gpu_from_host_mib_per_second", "gpu_to_host_mib_per_second"];

/// Tests the GPUs one after another, or `only` this one.
pub(super) fn test(gpus: &Gpus, only: Option<&str>, budget: &Budget, tests: &mut Tests) -> Vec<GpuMeasurements> {
    let probe = match gpus {
        // A child process of its own, so that heartbeats need not wait for the test, and nothing of it is left on a GPU afterwards.
        Gpus::Nvml(probe) => probe.another(),
        Gpus::Simulated(_) => return none(tests, "the GPUs are simulated"),
        Gpus::Absent { why } => return none(tests, why),
    };
    let is_tested = |gpu: &GpuInfo| only.is_none_or(|uuid| gpu.uuid == uuid);
    let listed: Vec<_> = match gpus.list() {
        Ok(listed) => listed.into_iter().filter(is_tested).collect(),
        Err(error) => {
            fail(tests, &error);
            return Vec::new();
        }
    };
    if let (Some(uuid), true) = (only, listed.is_empty()) {
        fail(tests, &GpuError::Driver { message: format!("it does not list GPU {uuid}") });
        return Vec::new();
    }
    if listed.is_empty() {
        return none(tests, "the machine has no GPU");
    }
    let each = budget.gpus / u32::try_from(listed.len()).unwrap_or(1).max(1);
    let each = each.max(Duration::from_millis(200));
    let mut by_gpu = Vec::new();
    let until = Instant::now() + READY_WITHIN;
    for gpu in listed {
        match once_ready(&probe, until, |probe| probe.test(&gpu.uuid, each, budget.is_deep)) {
            Ok(found) => by_gpu.push(add(&gpu.uuid, found, tests)),
            // The driver that hangs at one GPU is not asked for the next.
            Err(error) => {
                fail(tests, &error);
                break;
            }
        }
    }
    reported(by_gpu)
}

/// Tests again while CUDA is not ready, each time by a new process: a process keeps the first answer of its library.
fn once_ready(
    probe: &GpuProbe,
    until: Instant,
    test: impl Fn(&GpuProbe) -> Result<GpuTest, GpuError>,
) -> Result<GpuTest, GpuError> {
    let begun = Instant::now();
    let mut found = test(probe)?;
    while let Err(GpuError::NotReady { .. }) = &found.cuda
        && Instant::now() + TRIED_EVERY <= until
    {
        std::thread::sleep(TRIED_EVERY);
        found = test(&probe.another())?;
    }
    if let Err(GpuError::NotReady { message }) = &mut found.cuda {
        let waited = begun.elapsed().as_secs();
        message.push_str(&format!(
            " for {waited} s; on machines with NVSwitch, look at the service nvidia-fabricmanager, then validate again"
        ));
    }
    Ok(found)
}

fn add(uuid: &str, found: GpuTest, tests: &mut Tests) -> GpuMeasurements {
    let mut measurements = BTreeMap::new();
    let mut add = |tests: &mut Tests, name: &str, measurement: u64| {
        measurements.insert(name.to_owned(), measurement);
        tests.add(name, Ok(measurement));
    };
    for (name, measurement) in [("gpu_pcie_lanes", found.pcie_lanes), ("gpu_pcie_generation", found.pcie_generation)] {
        match measurement {
            Some(measurement) => add(tests, name, measurement.into()),
            None => tests.add(name, Err(ToolError::NotTested("the driver does not report it".to_owned()))),
        }
    }
    let garbage = |why: String| ToolError::Garbage { tool: format!("GPU {uuid}"), why };
    match found.cuda {
        Ok(cuda) => {
            let measured = [cuda.memory_mib_per_second, cuda.from_host_mib_per_second, cuda.to_host_mib_per_second];
            for (name, measurement) in BANDWIDTHS.into_iter().zip(measured) {
                add(tests, name, measurement);
            }
            if cuda.wrong_words > 0 {
                let why = format!("{} words of {} MiB were read back wrong", cuda.wrong_words, cuda.tested_mib);
                tests.check(PATTERN, Err(garbage(why)));
            }
        }
        Err(GpuError::NotInstalled { why }) => {
            for name in BANDWIDTHS.into_iter().chain([PATTERN]) {
                tests.check(name, Err(ToolError::NotTested(why.clone())));
            }
        }
        Err(error) => tests.check(PATTERN, Err(garbage(error.to_string()))),
    }
    if let Some(errors) = found.new_ecc_errors.filter(|errors| *errors > 0) {
        let why = format!("its memory had {errors} uncorrectable errors during the test");
        tests.check("gpu_ecc", Err(garbage(why)));
    }
    if let Some(action) = found.recovery_action.filter(|action| *action != 0) {
        tests.check("gpu_recovery", Err(garbage(format!("the driver asks for recovery action {action}"))));
    }
    GpuMeasurements { uuid: uuid.to_owned(), measurements }
}

fn none(tests: &mut Tests, why: &str) -> Vec<GpuMeasurements> {
    for name in BANDWIDTHS.into_iter().chain([PATTERN, "gpu_pcie_lanes", "gpu_pcie_generation"]) {
        tests.check(name, Err(ToolError::NotTested(why.to_owned())));
    }
    Vec::new()
}

fn fail(tests: &mut Tests, error: &GpuError) {
    tests.check("gpu_driver", Err(ToolError::NotRun { tool: "the GPU test".to_owned(), why: error.to_string() }));
}
