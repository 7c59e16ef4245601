//! An executor without root: a tenant is a folder, and processes that carry its mark.
//!
//! It isolates nothing by means of the operating system, and says so (`isolation: none`); it is for development, for simulated nodes and
//! for nodes with one tenant. It does guarantee: one allocation for each device, nothing created twice, and a clean-up that is verified.
//!
//! ```text
//! STATE/allocations/<id>/allocation.json   the record of the allocation; written first, removed last
//!                       /authorized_keys   the agent's, outside the home
//!                       /environment       the environment of the tenant's processes
//!                       /home/ /tmp/
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::Arc;

use serde_json::json;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding};
use wire::inventory::ExecutorKind;
use wire::task::{OpenTerminal, Provision, ReconcileSshKeys, Release};

use crate::allocation_records::{AllocationRecords, RECORD, WithheldGpu};
use crate::atomic_file::{self, FileError};
use crate::cleanup_checks;
use crate::executor::{Executor, ReleaseOutcome, tenant_setup};
use crate::finding_log::Condition;
use crate::gpus::Gpus;
use crate::task_outcome::{TaskFailure, TaskOutput, output, uuids};
use crate::terminal::ShellCommand;
use crate::unproved_gpus::{self, GpuWithoutProof};

pub mod folder_cleanup;
pub mod processes;

use folder_cleanup::SandboxLeftovers;
use processes::ProcessTable;

/// See the module's documentation.
pub struct Sandbox {
    gpus: Arc<Gpus>,
    processes: ProcessTable,
    allocations: AllocationRecords,
}

impl Sandbox {
    /// Loads the allocations that an earlier agent stored under `state_dir`.
    ///
    /// # Errors
    /// [`FileError`] when the folder cannot be created or read.
    pub fn open(state_dir: &Path, gpus: Arc<Gpus>) -> Result<Self, FileError> {
        Ok(Self { gpus, processes: ProcessTable::default(), allocations: AllocationRecords::open(state_dir)? })
    }

    fn furnish(&self, task: &Provision, folder: &Path) -> Result<(), TaskFailure> {
        for (name, mode) in [("home", 0o700), ("tmp", 0o700)] {
            let path = folder.join(name);
            DirBuilder::new()
                .recursive(true)
                .mode(mode)
                .create(&path)
                .map_err(|error| TaskFailure::from(FileError::at("create", &path)(error)))?;
        }
        let keys = tenant_setup::authorized_keys(&task.authorized_keys);
        atomic_file::write_without_sync(&folder.join("authorized_keys"), keys.as_bytes(), atomic_file::PUBLIC)?;
        let at = |name: &str| folder.join(name).to_string_lossy().into_owned();
        let environment =
            tenant_setup::environment(task.allocation_id, &task.user_name, &task.devices, &at("home"), &at("tmp"))
                .render()
                .map_err(|error| {
                    TaskFailure::new("invalid_task", format!("the tenant's environment cannot be written: {error}"))
                })?;
        Ok(atomic_file::write_without_sync(&folder.join("environment"), environment.as_bytes(), atomic_file::PUBLIC)?)
    }

    /// Everything but the record.
    fn clear(&self, folder: &Path) {
        let Ok(entries) = fs::read_dir(folder) else { return };
        for entry in entries.flatten().filter(|entry| entry.file_name() != RECORD) {
            // Entries that could not be removed are found by the check that follows.
            let _ = folder_cleanup::remove_tree(&entry.path());
        }
    }
}

impl Executor for Sandbox {
    fn kind(&self) -> ExecutorKind {
        ExecutorKind::Sandbox
    }

    fn provision(&self, task: &Provision) -> Result<TaskOutput, TaskFailure> {
        tenant_setup::check(task)?;
        self.allocations.reserve(task, &self.gpus)?;
        let folder = self.allocations.folder_of(task.allocation_id);
        self.furnish(task, &folder)?;
        Ok(output([
            ("user_name", json!(task.user_name)),
            ("home", json!(folder.join("home"))),
            ("authorized_keys_path", json!(folder.join("authorized_keys"))),
            ("devices", uuids(&task.devices)),
            ("isolation", json!("none")),
        ]))
    }

    fn reconcile_keys(&self, task: &ReconcileSshKeys) -> Result<TaskOutput, TaskFailure> {
        tenant_setup::check_authorized_keys(&task.authorized_keys)?;
        let tenant = self.allocations.of_tenant(task.allocation_id, &task.user_name)?;
        let path = self.allocations.folder_of(tenant.allocation_id).join("authorized_keys");
        atomic_file::write_atomically(
            &path,
            tenant_setup::authorized_keys(&task.authorized_keys).as_bytes(),
            atomic_file::PUBLIC,
        )?;
        Ok(output([("authorized_keys_path", json!(path)), ("keys", json!(task.authorized_keys.len()))]))
    }

    fn release(&self, task: &Release) -> Result<ReleaseOutcome, TaskFailure> {
        let folder = self.allocations.folder_of(task.allocation_id);
        let ended = self.processes.end_all(task.allocation_id, &folder);
        let leftovers = SandboxLeftovers::of(task.allocation_id, ended.seen.clone());
        self.clear(&folder);
        leftovers.remove();
        self.gpus.wait_until_freed(task.devices.iter().map(|device| device.uuid.as_str()));

        // From here on everything is checked, independently of the removal's results.
        let mut findings = vec![
            self.processes.check_removed(task.allocation_id, &folder, &ended),
            cleanup_checks::check_path_removed(CleanupCheck::Home, &folder.join("home")),
            cleanup_checks::check_path_removed(CleanupCheck::AuthorizedKeys, &folder.join("authorized_keys")),
        ];
        findings.extend(leftovers.check_removed());
        findings.extend(cleanup_checks::check_device_processes(&self.gpus, &task.devices, &BTreeSet::new()));
        if findings.iter().all(CleanupFinding::is_no_leftover) {
            self.allocations.free(task.allocation_id, &findings)?;
        }
        findings.push(self.allocations.check_removed(task.allocation_id));
        Ok(ReleaseOutcome { output: output([("processes_ended", json!(ended.seen.len()))]), findings })
    }

    fn shell(&self, task: &OpenTerminal) -> Result<ShellCommand, TaskFailure> {
        let tenant = self.allocations.of_tenant(task.allocation_id, &task.user_name)?;
        // In the sandbox a tenant is the agent's own user, and must not be root. The program does not even start so.
        if nix::unistd::Uid::effective().is_root() {
            let message =
                "the agent runs as root and has no users of its own for tenants; use --user, or --executor system";
            return Err(TaskFailure::new("sandbox_is_root", message));
        }
        let folder = self.allocations.folder_of(task.allocation_id);
        let (home, tmp) = (folder.join("home"), folder.join("tmp"));
        let (home_text, tmp) = (home.to_string_lossy(), tmp.to_string_lossy());
        let environment =
            tenant_setup::environment(task.allocation_id, &tenant.user_name, &tenant.devices, &home_text, &tmp);
        Ok(tenant_setup::login_shell(&environment, &home, None))
    }

    fn tenants(&self) -> Vec<Release> {
        self.allocations.tenants()
    }

    fn withhold_gpu(&self, uuid: &str) -> Result<WithheldGpu<'_>, TaskFailure> {
        self.allocations.withhold(uuid)
    }

    fn unproved_gpus(&self) -> BTreeMap<String, GpuWithoutProof> {
        self.allocations.unproved().all()
    }

    /// It bounds none.
    fn unbounded_tenants(&self) -> Vec<Condition> {
        Vec::new()
    }

    /// Its tenants open the nodes as the agent's own user may.
    fn follow_device_nodes(&self) {}

    fn reconcile_devices(&self) -> bool {
        unproved_gpus::prove(self.allocations.unproved(), &self.gpus)
    }

    fn validate(&self) -> Result<TaskOutput, TaskFailure> {
        let gpus = self.gpus.list().map_err(|error| TaskFailure::new("gpu_driver", error.to_string()))?;
        self.allocations.check_writable()?;
        Ok(output([
            ("gpus", json!(gpus.iter().map(|gpu| gpu.uuid.as_str()).collect::<Vec<_>>())),
            ("allocations", json!(self.allocations.ids())),
        ]))
    }

    fn reboot(&self) -> TaskFailure {
        TaskFailure::new("unsupported", "an agent with the sandbox executor does not restart the machine that it is on")
    }
}

#[cfg(test)]
mod tests;
