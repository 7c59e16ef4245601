//! `node.validate` with load: the CPU and the memory by stress-ng, the disk by fio, each GPU through the driver.
//!
//! The agent measures and judges nothing: the control plane knows what the SKU promises. A tool that is not installed is a test that was
//! not made. One validation runs at a time, since two would measure each other.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tracing::warn;
use wire::validation::{GpuMeasurements, LoadLevel, LoadReport, ValidationLoad};

use crate::bounded_tool::ToolError;
use crate::gpus::Gpus;
use crate::health::gpu_conditions;
use crate::task_outcome::{TaskFailure, TaskOutput};

mod fio;
mod gpu;
mod stress_ng;

/// Where Debian's packages put the tools.
pub const DEFAULT_PROGRAMS: &str = "/usr/bin";
/// The file of the disk test. It is removed after the test, and by the next agent where this one was killed.
const DATA_FILE: &str = "gpuaas-validation.data";
const MIB: u64 = 1024 * 1024;
/// How long one CPU is measured.
const ONE_CPU: Duration = Duration::from_secs(1);
/// The bounds of a deep validation's load.
const DEEP_SECONDS: std::ops::RangeInclusive<u32> = 30..=3600;
/// The GPUs whose measurements are reported one by one. The control plane bounds the output of a task.
const MAX_REPORTED_GPUS: usize = 16;

/// The time and the size of each test.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Budget {
    /// Processes of a test that can have several.
    workers: u32,
    /// Of one CPU: the same at both levels, so that both measure the same.
    cpu: Duration,
    /// Zero where it is not made.
    all_cpus: Duration,
    memory: Duration,
    memory_pattern: Duration,
    /// For each direction.
    disk: Duration,
    disk_bytes: u64,
    /// For all of them together.
    gpus: Duration,
    is_deep: bool,
}

impl Budget {
    fn of(load: &ValidationLoad) -> Self {
        match load.level {
            LoadLevel::Quick => Self {
                workers: 1,
                cpu: ONE_CPU,
                all_cpus: Duration::ZERO,
                memory: Duration::from_secs(2),
                memory_pattern: Duration::ZERO,
                disk: Duration::from_secs(1),
                disk_bytes: 256 * MIB,
                gpus: Duration::from_secs(2),
                is_deep: false,
            },
            LoadLevel::Deep => {
                let seconds = load.load_seconds.clamp(*DEEP_SECONDS.start(), *DEEP_SECONDS.end());
                let share = |tenths: u32| Duration::from_secs(u64::from(seconds * tenths / 10).max(1));
                let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
                Self {
                    workers: u32::try_from(cpus).unwrap_or(1),
                    cpu: ONE_CPU,
                    all_cpus: share(2).saturating_sub(ONE_CPU),
                    memory: share(1),
                    memory_pattern: share(2),
                    disk: share(1),
                    disk_bytes: 4096 * MIB,
                    gpus: share(3),
                    is_deep: true,
                }
            }
        }
    }
}

/// Where the tools are, and where they write.
struct Tools<'a> {
    programs: &'a Path,
    folder: &'a Path,
}

impl Tools<'_> {
    fn data_file(&self) -> PathBuf {
        self.folder.join(DATA_FILE)
    }
}

/// The validations of this machine.
#[derive(Debug)]
pub struct Validator {
    programs: PathBuf,
    folder: PathBuf,
    running: Mutex<()>,
}

impl Validator {
    /// Removes what a killed agent has left in `folder`, where the disk is tested.
    #[must_use]
    pub fn new(programs: PathBuf, folder: PathBuf) -> Self {
        let left = folder.join(DATA_FILE);
        // In a thread of its own, since the folder may not answer. A test removes the file as well before it writes.
        let removal = std::thread::Builder::new().name("validation".to_owned()).spawn(move || fs::remove_file(left));
        if let Err(error) = removal {
            warn!(error_code = "validation", %error, "what an earlier validation has left is not removed");
        }
        Self { programs, folder, running: Mutex::default() }
    }

    /// Applies the load, and adds what it found to the output of the check without load.
    ///
    /// # Errors
    /// `tenants_present`: a load would disturb them. The load on one GPU disturbs no tenant of another.
    pub fn run(&self, load: &ValidationLoad, checked: TaskOutput, gpus: &Gpus) -> Result<TaskOutput, TaskFailure> {
        let has_tenants = checked.get("allocations").and_then(Value::as_array).is_some_and(|it| !it.is_empty());
        if has_tenants && load.gpu_uuid.is_none() {
            let message = "a tenant is on the machine, and the load of a validation would disturb it";
            return Err(TaskFailure::new("tenants_present", message));
        }
        let _one_at_a_time = self.alone();
        let report = self.report(load, gpus);
        let report = serde_json::to_value(report).map_err(|error| TaskFailure::new("report", error.to_string()))?;
        let mut output = checked;
        if let Value::Object(report) = report {
            output.extend(report);
        }
        Ok(output)
    }

    /// No validation runs while this lives.
    pub fn alone(&self) -> MutexGuard<'_, ()> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, load: &ValidationLoad, gpus: &Gpus) -> LoadReport {
        let budget = Budget::of(load);
        if let Some(uuid) = &load.gpu_uuid {
            let mut tests = Tests::default();
            let by_gpu = gpu::test(gpus, Some(uuid), &budget, &mut tests);
            return tests.report(load.level, by_gpu);
        }
        let tools = Tools { programs: &self.programs, folder: &self.folder };
        let mut tests = Tests::default();
        tests.add("cpu_bogo_ops_per_second", stress_ng::cpu(&tools, &budget));
        tests.add("memory_mib_per_second", stress_ng::memory(&tools, &budget));
        if budget.is_deep {
            tests.add("all_cpus_bogo_ops_per_second", stress_ng::all_cpus(&tools, &budget));
            let tested = half_of_free_memory();
            tests.check("memory_pattern", stress_ng::memory_pattern(&tools, &budget, tested));
        }
        self.remove_data();
        tests.add("disk_write_mib_per_second", fio::write(&tools, &budget));
        tests.add("disk_read_mib_per_second", fio::read(&tools, &budget));
        self.remove_data();
        let by_gpu = gpu::test(gpus, None, &budget, &mut tests);
        tests.report(load.level, by_gpu)
    }

    fn remove_data(&self) {
        // What is not there needs no removal, and what cannot be removed is the next test's error.
        let _ = fs::remove_file(self.folder.join(DATA_FILE));
    }
}

/// The results so far.
#[derive(Debug, Default)]
struct Tests {
    measurements: BTreeMap<String, u64>,
    not_tested: BTreeMap<String, String>,
    failed: BTreeMap<String, String>,
}

impl Tests {
    fn add(&mut self, name: &str, result: Result<u64, ToolError>) {
        match result {
            // Several GPUs have the same measurement: the lowest counts.
            Ok(measurement) => {
                let lowest = self.measurements.get(name).map_or(measurement, |known| measurement.min(*known));
                self.measurements.insert(name.to_owned(), lowest);
            }
            Err(error) => self.check(name, Err(error)),
        }
    }

    fn report(self, level: LoadLevel, by_gpu: Vec<GpuMeasurements>) -> LoadReport {
        let Self { measurements, not_tested, failed } = self;
        LoadReport { level, measurements, not_tested, failed, by_gpu }
    }

    fn check(&mut self, name: &str, result: Result<(), ToolError>) {
        let (kind, why) = match result {
            Ok(()) => return,
            Err(ToolError::NotTested(why)) => (&mut self.not_tested, why),
            Err(error) => (&mut self.failed, error.to_string()),
        };
        kind.entry(name.to_owned()).or_insert(why);
    }
}

/// Checks that no GPU, or not `only` this one, is in a mode in which no tenant can use it. What cannot be read is for other checks to tell.
///
/// # Errors
/// `gpu_mode` with the modes and the commands that end them.
pub fn check_modes(gpus: &Gpus, only: Option<&str>) -> Result<(), TaskFailure> {
    let surveyed = gpus.survey(false).map(|survey| survey.gpus).unwrap_or_default();
    let of_interest = surveyed.iter().filter(|gpu| only.is_none_or(|uuid| gpu.info.uuid == uuid));
    let modes: Vec<String> = of_interest
        .flat_map(|gpu| {
            gpu_conditions::modes(gpu).into_iter().map(move |mode| format!("GPU {}: {}", gpu.info.uuid, mode.detail))
        })
        .collect();
    if modes.is_empty() { Ok(()) } else { Err(TaskFailure::new("gpu_mode", modes.join("; "))) }
}

fn reported(mut by_gpu: Vec<GpuMeasurements>) -> Vec<GpuMeasurements> {
    by_gpu.truncate(MAX_REPORTED_GPUS);
    by_gpu
}

/// In bytes; at least as much as the test needs.
fn half_of_free_memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0);
    (kib * 1024 / 2).max(64 * MIB)
}

#[cfg(test)]
mod tests;
