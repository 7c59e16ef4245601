//! Diagnostics of the machine and its tenants, for an operator who cannot log in to it. They name allocations, devices and metrics, and
//! nothing of what tenants run.

use std::fs;

use serde_json::{Value, json};

use crate::bounded_tool::{SHORT_LIMIT, Tool};
use crate::executor::Executor;
use crate::gpus::{DeviceUse, Gpus, MemoryUse};
use crate::task_outcome::{TaskOutput, output};

/// The most kernel log lines that are shown.
const LINES: usize = 20;
/// The most characters of each line.
const LINE: usize = 200;
/// The longest kernel log that is read: machines with many devices have one of several megabytes (`log_buf_len`).
const KERNEL_LOG_BYTES: u64 = 64 << 20;

/// Collects all diagnostics once.
#[must_use]
pub fn collect(gpus: &Gpus, executor: &dyn Executor) -> TaskOutput {
    let fitness = match executor.validate() {
        Ok(found) => json!({ "fit": true, "found": found }),
        Err(failure) => json!({ "fit": false, "code": failure.code, "why": failure.message }),
    };
    output([
        ("executor", json!(executor.kind())),
        ("fitness", fitness),
        ("gpus", of_gpus(gpus)),
        ("load", json!(first_fields("/proc/loadavg", 3))),
        ("uptime_seconds", json!(first_fields("/proc/uptime", 1))),
        ("memory_pressure", json!(first_line("/proc/pressure/memory"))),
        ("processes", json!(processes())),
        ("kernel_gpu_errors", json!(kernel_gpu_errors())),
    ])
}

fn of_gpus(gpus: &Gpus) -> Value {
    match gpus.list() {
        Err(error) => json!({ "error": error.to_string() }),
        Ok(list) => list
            .iter()
            .map(|gpu| {
                let usage = match gpus.device_use(&gpu.uuid) {
                    DeviceUse::Idle => json!("idle"),
                    DeviceUse::BusyWith(pids) => json!({ "processes": pids.len() }),
                    DeviceUse::Unknown(why) => json!({ "unknown": why }),
                };
                let memory = match gpus.memory_use(&gpu.uuid) {
                    MemoryUse::DriverOnly => json!("free"),
                    MemoryUse::NotReported => json!("not_reported"),
                    MemoryUse::Held { mib } => json!({ "held_mib": mib }),
                    MemoryUse::Unknown(why) => json!({ "unknown": why }),
                };
                json!({ "index": gpu.index, "uuid": gpu.uuid, "model": gpu.model, "use": usage, "memory": memory })
            })
            .collect(),
    }
}

fn first_line(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()?.lines().next().map(str::to_owned)
}

fn first_fields(path: &str, count: usize) -> Option<String> {
    Some(first_line(path)?.split_whitespace().take(count).collect::<Vec<_>>().join(" "))
}

fn processes() -> Option<usize> {
    let entries = fs::read_dir("/proc").ok()?.flatten();
    Some(entries.filter(|entry| entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit())).count())
}

/// The kernel's messages about NVIDIA devices (`Xid`), the latest last. `None` if the kernel log cannot be read.
fn kernel_gpu_errors() -> Option<Vec<String>> {
    let log = Tool::new("dmesg").max_output(KERNEL_LOG_BYTES).run(SHORT_LIMIT).ok()?;
    Some(gpu_errors(&log))
}

fn gpu_errors(log: &str) -> Vec<String> {
    let found: Vec<&str> = log.lines().filter(|line| line.contains("NVRM: Xid")).collect();
    found[found.len().saturating_sub(LINES)..].iter().map(|line| line.chars().take(LINE).collect()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use uuid::Uuid;

    use super::*;
    use crate::gpu_probe::DEFAULT_DEADLINE;
    use crate::gpus::GpuSimulation;
    use crate::sandbox::Sandbox;

    #[test]
    fn diagnostics_describe_the_machine() {
        let folder = tempfile::tempdir().unwrap();
        let asked = GpuSimulation { count: 2, model: "H100".into(), memory_mib: 81_920 };
        let gpus = Arc::new(Gpus::detect(Uuid::nil(), Some(&asked), DEFAULT_DEADLINE));
        let sandbox = Sandbox::open(folder.path(), Arc::clone(&gpus)).unwrap();
        let found = collect(&gpus, &sandbox);
        assert_eq!((&found["fitness"]["fit"], found["gpus"].as_array().unwrap().len()), (&json!(true), 2));
        assert!(found["load"].is_string() && found["uptime_seconds"].is_string(), "{found:?}");
        fs::remove_dir_all(folder.path().join("allocations")).unwrap();
        fs::write(folder.path().join("allocations"), "").unwrap();
        assert_eq!(collect(&gpus, &sandbox)["fitness"]["fit"], false);
    }

    #[test]
    fn kernel_log_is_reduced_to_a_few_gpu_lines() {
        let log: String =
            (0..50).map(|n| format!("[{n}] NVRM: Xid (PCI:0000): {n}, {}\nother\n", "x".repeat(500))).collect();
        let shown = gpu_errors(&log);
        assert_eq!(shown.len(), LINES);
        assert!(shown.iter().all(|line| line.chars().count() == LINE && line.contains("Xid")));
        assert!(shown[LINES - 1].starts_with("[49]"));
    }
}
