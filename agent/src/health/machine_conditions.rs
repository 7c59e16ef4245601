//! Conditions of the machine beside its GPUs: disk, memory, clock.

use std::fs;
use std::path::{Path, PathBuf};

use chrono::TimeDelta;
use nix::sys::statvfs::{FsFlags, statvfs};
use wire::finding::Finding;

use crate::bounded_reading::BoundedReading;
use crate::finding_log::{Condition, late_reading};
use crate::server_clock::describe_offset;

/// With less space the agent may not be able to journal a task.
const LEAST_BYTES: u64 = 64 * 1024 * 1024;
const LEAST_FILES: u64 = 1000;
/// The memory controllers whose errors the kernel counts.
const MEMORY_CONTROLLERS: &str = "/sys/devices/system/edac/mc";

/// Probes the machine. What does not answer keeps nothing else from being probed.
pub struct MachineProbe {
    root: PathBuf,
    state_dir: PathBuf,
    memory_controllers: PathBuf,
    /// Some systems have a read-only root by design. `None` before it was read.
    root_was_read_only: Option<bool>,
    root_state: BoundedReading<Option<bool>>,
    state_space: BoundedReading<Option<(u64, Option<u64>)>>,
    memory_errors: BoundedReading<Option<u64>>,
}

impl MachineProbe {
    /// Probes this machine, with the agent's state in this folder.
    #[must_use]
    pub fn new(state_dir: &Path) -> Self {
        Self::of("/".into(), state_dir.into(), MEMORY_CONTROLLERS.into())
    }

    fn of(root: PathBuf, state_dir: PathBuf, memory_controllers: PathBuf) -> Self {
        let shown = |path: &Path| path.display().to_string();
        Self {
            root_state: BoundedReading::of(shown(&root)),
            state_space: BoundedReading::of(shown(&state_dir)),
            memory_errors: BoundedReading::of(shown(&memory_controllers)),
            root,
            state_dir,
            memory_controllers,
            root_was_read_only: None,
        }
    }

    /// The conditions at this moment. `clock_offset` is how far the machine's clock is ahead of the control plane's, if it is wrong.
    pub async fn observed(&mut self, clock_offset: Option<TimeDelta>) -> Vec<Condition> {
        let (root, state_dir) = (self.root.clone(), self.state_dir.clone());
        let controllers = self.memory_controllers.clone();
        let (root_state, state_space, memory_errors) = tokio::join!(
            self.root_state.read(move || is_read_only(&root)),
            self.state_space.read(move || space(&state_dir)),
            self.memory_errors.read(move || uncorrectable_errors(&controllers)),
        );
        let mut found = Vec::new();
        if let Some(is_read_only) = root_state.fresh().flatten()
            && !*self.root_was_read_only.get_or_insert(is_read_only)
            && is_read_only
        {
            let detail = format!("{} is mounted read-only, and was not when the agent started", self.root.display());
            found.push(Condition::of_machine("disk", "read_only", detail));
        }
        let state_space = state_space.fresh().flatten();
        found.extend(state_space.and_then(|(bytes, files)| too_little(&self.state_dir, bytes, files)));
        if let Some(errors) = memory_errors.fresh().flatten().filter(|errors| *errors > 0) {
            let detail = format!("{errors} uncorrectable errors of the machine's memory since the boot");
            found.push(Condition::of_machine("memory", "uncorrectable", detail));
        }
        if let Some(offset) = clock_offset {
            let detail = format!("the machine's clock is {} the control plane's", describe_offset(offset));
            // A clock that is set from one side to the other is another occurrence.
            let side = if offset > TimeDelta::zero() { "ahead" } else { "behind" };
            found.push(Condition::of_machine("clock", "skew", detail).with_state(side.to_owned()));
        }
        found.extend(late_reading("root", &self.root_state));
        found.extend(late_reading("state", &self.state_space));
        found.extend(late_reading("memory_errors", &self.memory_errors));
        found
    }

    /// Whether nothing is known of this finding, since its reading has not answered.
    #[must_use]
    pub fn is_unknown(&self, finding: &Finding) -> bool {
        match (finding.probe.as_str(), finding.code.as_str()) {
            ("disk", "read_only") => self.root_state.is_in_flight(),
            ("disk", "full") => self.state_space.is_in_flight(),
            ("memory", "uncorrectable") => self.memory_errors.is_in_flight(),
            _ => false,
        }
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
    use crate::bounded_reading::hanging_mount::OwnMounts;
    use crate::terminal::skipped_tests;

    #[tokio::test]
    async fn memory_errors_of_all_controllers_are_added_up() {
        let folder = tempfile::tempdir().unwrap();
        let mut probe = MachineProbe::of("/".into(), folder.path().into(), folder.path().join("mc"));
        assert_eq!(probe.observed(None).await, vec![], "a machine whose kernel counts nothing");
        for (name, count) in [("mc0", "0\n"), ("mc1", "2\n"), ("mc2", "1\n"), ("power", "")] {
            fs::create_dir_all(folder.path().join("mc").join(name)).unwrap();
            fs::write(folder.path().join("mc").join(name).join("ue_count"), count).unwrap();
        }
        let found = probe.observed(None).await;
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

    #[tokio::test]
    async fn read_only_root_is_a_condition_only_where_it_was_writable() {
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
        assert_eq!(probe.observed(None).await, vec![], "by design");
        probe.root_was_read_only = Some(false);
        assert_eq!(probe.observed(None).await[0].key.code, "read_only");
    }

    #[tokio::test]
    async fn clock_that_is_off_is_a_condition() {
        let folder = tempfile::tempdir().unwrap();
        let mut probe = MachineProbe::of("/".into(), folder.path().into(), folder.path().join("mc"));
        for (seconds, detail) in [
            (-42, "the machine's clock is 42 s behind the control plane's"),
            (90_000, "the machine's clock is 90000 s (25 hours) ahead of the control plane's"),
        ] {
            assert_eq!(probe.observed(Some(TimeDelta::seconds(seconds))).await[0].detail, detail);
        }
    }

    #[tokio::test]
    async fn reading_that_hangs_is_a_condition_with_its_path_and_the_others_are_probed() {
        let folder = tempfile::tempdir().unwrap();
        let mut probe = MachineProbe::of("/".into(), folder.path().into(), folder.path().join("mc"));
        let (_answer, hanging) = std::sync::mpsc::channel::<()>();
        let full = Finding {
            probe: "disk".into(),
            gpu_uuid: None,
            code: "full".into(),
            count: 1,
            first_at: chrono::DateTime::UNIX_EPOCH,
            last_at: chrono::DateTime::UNIX_EPOCH,
            boot_id: uuid::Uuid::nil(),
            detail: String::new(),
        };
        assert!(!probe.is_unknown(&full));
        let hangs = move || {
            let _ = hanging.recv();
            None
        };
        probe.state_space.read(hangs).await;
        assert_eq!((probe.observed(None).await, probe.is_unknown(&full)), (vec![], true), "it may be busy");
        probe.state_space.make_late();
        fs::create_dir_all(folder.path().join("mc/mc0")).unwrap();
        fs::write(folder.path().join("mc/mc0/ue_count"), "1\n").unwrap();
        let found = probe.observed(None).await;
        let codes: Vec<_> = found.iter().map(|found| (found.key.probe, found.key.code.as_str())).collect();
        assert_eq!(codes, [("memory", "uncorrectable"), ("reading", "state")]);
        let path = folder.path().display().to_string();
        assert_eq!(found[1].detail, format!("no answer for more than 10 s: {path}"));
    }

    #[tokio::test]
    async fn memory_controllers_that_hang_are_a_condition_until_they_answer() {
        let folder = tempfile::tempdir().unwrap();
        let controllers = folder.path().join("mc");
        fs::create_dir(&controllers).unwrap();
        let Some(mounts) = OwnMounts::of_this_thread(skipped_tests::report_skipped) else { return };
        let hanging = mounts.hang(&controllers);
        let mut probe = MachineProbe::of("/".into(), folder.path().into(), controllers);
        assert_eq!(probe.observed(None).await, vec![]);
        probe.memory_errors.make_late();
        let found = probe.observed(None).await;
        assert_eq!((found.len(), found[0].key.code.as_str()), (1, "memory_errors"), "{found:?}");
        drop(hanging);
        while !probe.observed(None).await.is_empty() {
            tokio::task::yield_now().await;
        }
    }
}
