//! Conditions of the machine beside its GPUs: disk, memory, clock.

use std::fs;
use std::path::{Path, PathBuf};

use chrono::TimeDelta;
use nix::sys::statvfs::{FsFlags, statvfs};

use super::finding_log::Condition;
use crate::server_clock::describe_offset;

/// With less space the agent may not be able to journal a task.
const LEAST_BYTES: u64 = 64 * 1024 * 1024;
const LEAST_FILES: u64 = 1000;
/// The memory controllers whose errors the kernel counts.
const MEMORY_CONTROLLERS: &str = "/sys/devices/system/edac/mc";

/// Probes the machine.
pub struct MachineProbe {
    root: PathBuf,
    state_dir: PathBuf,
    memory_controllers: PathBuf,
    /// Some systems have a read-only root by design.
    root_was_read_only: bool,
}

impl MachineProbe {
    /// Probes this machine, with the agent's state in this folder.
    #[must_use]
    pub fn new(state_dir: &Path) -> Self {
        Self::of("/".into(), state_dir.into(), MEMORY_CONTROLLERS.into())
    }

    fn of(root: PathBuf, state_dir: PathBuf, memory_controllers: PathBuf) -> Self {
        let root_was_read_only = is_read_only(&root) == Some(true);
        Self { root, state_dir, memory_controllers, root_was_read_only }
    }

    /// The conditions at this moment. `clock_offset` is how far the machine's clock is ahead of the control plane's, if it is wrong.
    #[must_use]
    pub fn observed(&self, clock_offset: Option<TimeDelta>) -> Vec<Condition> {
        let mut found = Vec::new();
        if !self.root_was_read_only && is_read_only(&self.root) == Some(true) {
            let detail = format!("{} is mounted read-only, and was not when the agent started", self.root.display());
            found.push(Condition::of_machine("disk", "read_only", detail));
        }
        found.extend(space(&self.state_dir).and_then(|(bytes, files)| too_little(&self.state_dir, bytes, files)));
        if let Some(errors) = uncorrectable_errors(&self.memory_controllers).filter(|errors| *errors > 0) {
            let detail = format!("{errors} uncorrectable errors of the machine's memory since the boot");
            found.push(Condition::of_machine("memory", "uncorrectable", detail));
        }
        if let Some(offset) = clock_offset {
            let detail = format!("the machine's clock is {} the control plane's", describe_offset(offset));
            found.push(Condition::of_machine("clock", "skew", detail));
        }
        found
    }
}

fn is_read_only(path: &Path) -> Option<bool> {
    Some(statvfs(path).ok()?.flags().contains(FsFlags::ST_RDONLY))
}

/// The bytes that are free for the agent, and the files where the file system has a fixed number of them.
fn space(path: &Path) -> Option<(u64, Option<u64>)> {
    let found = statvfs(path).ok()?;
    let files = (found.files() > 0).then(|| found.files_available());
    Some((found.blocks_available().saturating_mul(found.fragment_size()), files))
}

fn too_little(path: &Path, bytes: u64, files: Option<u64>) -> Option<Condition> {
    let path = path.display();
    let detail = if bytes < LEAST_BYTES {
        format!("{path}: {} MiB are free", bytes / (1024 * 1024))
    } else if files.is_some_and(|files| files < LEAST_FILES) {
        format!("{path}: {} more files can be created", files.unwrap_or(0))
    } else {
        return None;
    };
    Some(Condition::of_machine("disk", "full", detail))
}

/// The sum over all memory controllers; `None` where the kernel counts none.
fn uncorrectable_errors(controllers: &Path) -> Option<u64> {
    let counts = fs::read_dir(controllers).ok()?.flatten().filter_map(|entry| {
        let count = fs::read_to_string(entry.path().join("ue_count")).ok()?;
        count.trim().parse::<u64>().ok()
    });
    Some(counts.sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::skipped_tests;

    #[test]
    fn memory_errors_of_all_controllers_are_added_up() {
        let folder = tempfile::tempdir().unwrap();
        let probe = MachineProbe::of("/".into(), folder.path().into(), folder.path().join("mc"));
        assert_eq!(probe.observed(None), vec![], "a machine whose kernel counts nothing");
        for (name, count) in [("mc0", "0\n"), ("mc1", "2\n"), ("mc2", "1\n"), ("power", "")] {
            fs::create_dir_all(folder.path().join("mc").join(name)).unwrap();
            fs::write(folder.path().join("mc").join(name).join("ue_count"), count).unwrap();
        }
        let found = probe.observed(None);
        assert_eq!((found.len(), found[0].key.probe), (1, "memory"));
        assert!(found[0].detail.starts_with("3 uncorrectable"), "{found:?}");
    }

    #[test]
    fn full_file_system_is_a_condition_and_a_usual_one_is_not() {
        let path = Path::new("/var/lib/gpuaas-agent");
        assert_eq!(too_little(path, LEAST_BYTES, None), None);
        assert_eq!(too_little(path, LEAST_BYTES, Some(LEAST_FILES)), None);
        assert!(too_little(path, LEAST_BYTES - 1, None).unwrap().detail.ends_with("63 MiB are free"));
        let files = too_little(path, u64::MAX, Some(3)).unwrap();
        assert!(files.detail.ends_with("3 more files can be created") && files.key.code == "full");
    }

    #[test]
    fn read_only_root_is_a_condition_only_where_it_was_writable() {
        let folder = tempfile::tempdir().unwrap();
        // The file system of processes' namespaces is never writable for files; sysfs may be either, so a real one is looked for.
        let read_only = fs::read_to_string("/proc/self/mounts").unwrap();
        let read_only = read_only.lines().filter_map(|line| {
            let fields: Vec<_> = line.split(' ').collect();
            fields[3].split(',').any(|option| option == "ro").then(|| PathBuf::from(fields[1]))
        });
        let Some(read_only) = read_only.into_iter().find(|path| is_read_only(path) == Some(true)) else {
            return skipped_tests::report_skipped("no file system here is mounted read-only");
        };
        let mut probe = MachineProbe::of(read_only, folder.path().into(), folder.path().join("mc"));
        assert_eq!(probe.observed(None), vec![], "by design");
        probe.root_was_read_only = false;
        assert_eq!(probe.observed(None)[0].key.code, "read_only");
    }

    #[test]
    fn clock_that_is_off_is_a_condition() {
        let folder = tempfile::tempdir().unwrap();
        let probe = MachineProbe::of("/".into(), folder.path().into(), folder.path().join("mc"));
        let detail = |seconds| probe.observed(Some(TimeDelta::seconds(seconds)))[0].detail.clone();
        assert_eq!(detail(-42), "the machine's clock is 42 s behind the control plane's");
        assert_eq!(detail(90_000), "the machine's clock is 90000 s (25 hours) ahead of the control plane's");
    }
}
