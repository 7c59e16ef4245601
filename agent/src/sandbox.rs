//! An executor without root: a tenant is a folder, and processes that carry its mark.
//!
//! It separates nothing that the operating system would enforce, and says so (`isolation: none`); it is for development,
//! for simulated nodes and for nodes with one tenant. What it promises it keeps: one allocation for each device, nothing
//! made twice, and a clean-up that really looks.
//!
//! ```text
//! STATE/allocations/<id>/allocation.json   the reservation; first to come, last to go
//!                       /authorized_keys   the agent's, outside the home
//!                       /environment       what the tenant's processes start with
//!                       /home/ /tmp/
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::json;
use uuid::Uuid;
use wire::bundle::Variables;
use wire::inventory::{Device, ExecutorKind};
use wire::proof::{Checked, Finding, Outcome};
use wire::task::{Provision, Release};

use crate::executor::{Executor, Failure, Output, Released};
use crate::gpus::{DeviceUse, Gpus};
use crate::store::{self, StoreError};

pub mod processes;
pub mod traces;

use processes::ProcessTable;
use traces::Traces;

/// Every process of a tenant has this variable in its environment, with the allocation's id as value.
pub const MARKER: &str = "GPUAAS_ALLOCATION_ID";

const RESERVATION: &str = "allocation.json";
const KEY_TYPES: [&str; 7] = [
    "ssh-ed25519",
    "ssh-rsa",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
];

/// What the agent remembers of an allocation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    pub allocation_id: Uuid,
    pub user_name: String,
    pub sku: String,
    pub devices: Vec<Device>,
    pub provisioned_at: DateTime<Utc>,
}

/// See the module's documentation.
pub struct Sandbox {
    folder: PathBuf,
    gpus: Arc<Gpus>,
    processes: ProcessTable,
    reservations: Mutex<BTreeMap<Uuid, Reservation>>,
}

impl Sandbox {
    /// Takes over the allocations that an earlier agent left under `state_dir`.
    ///
    /// # Errors
    /// [`StoreError`] when the folder cannot be made or read.
    pub fn open(state_dir: &Path, gpus: Arc<Gpus>) -> Result<Self, StoreError> {
        let folder = state_dir.join("allocations");
        store::private_folder(&folder)?;
        let reservations = read_reservations(&folder)?;
        Ok(Self { folder, gpus, processes: ProcessTable::default(), reservations: Mutex::new(reservations) })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Uuid, Reservation>> {
        self.reservations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn folder_of(&self, allocation_id: Uuid) -> PathBuf {
        self.folder.join(allocation_id.to_string())
    }

    /// Writes down that the allocation holds its devices, unless another holds one of them.
    fn reserve(&self, task: &Provision) -> Result<(), Failure> {
        let known = self.gpus.list().map_err(|error| Failure::new("gpu_driver", error.to_string()))?;
        if let Some(device) = task.devices.iter().find(|device| !known.iter().any(|gpu| gpu.uuid == device.uuid)) {
            return Err(Failure::new("device_unknown", format!("this node has no GPU {}", device.uuid)));
        }
        let mut reservations = self.lock();
        let held_by = |device: &Device| {
            let holds = |other: &&Reservation| {
                other.allocation_id != task.allocation_id && other.devices.iter().any(|held| held.uuid == device.uuid)
            };
            reservations.values().find(holds).map(|other| other.allocation_id)
        };
        for device in &task.devices {
            if let Some(holder) = held_by(device) {
                let message = format!("GPU {} is held by allocation {holder}", device.uuid);
                return Err(Failure::new("device_in_use", message));
            }
        }
        let provisioned_at = match reservations.get(&task.allocation_id) {
            Some(before) if before.devices != task.devices || before.user_name != task.user_name => {
                let message = "the allocation is on this node already, with other devices or another user";
                return Err(Failure::new("allocation_differs", message));
            }
            Some(before) => before.provisioned_at,
            None => Utc::now(),
        };
        let reservation = Reservation {
            allocation_id: task.allocation_id,
            user_name: task.user_name.clone(),
            sku: task.sku.clone(),
            devices: task.devices.clone(),
            provisioned_at,
        };
        if reservations.get(&task.allocation_id) != Some(&reservation) {
            let text = serde_json::to_vec_pretty(&reservation)
                .map_err(|error| Failure::new("node_storage", error.to_string()))?;
            store::write_atomically(&self.folder_of(task.allocation_id).join(RESERVATION), &text, store::PRIVATE)?;
            reservations.insert(task.allocation_id, reservation);
        }
        Ok(())
    }

    fn furnish(&self, task: &Provision, folder: &Path) -> Result<(), Failure> {
        for (name, mode) in [("home", 0o700), ("tmp", 0o700)] {
            let path = folder.join(name);
            DirBuilder::new()
                .recursive(true)
                .mode(mode)
                .create(&path)
                .map_err(|error| Failure::from(StoreError::at("create", &path)(error)))?;
        }
        let mut keys = task.authorized_keys.join("\n");
        keys.push('\n');
        store::write_without_sync(&folder.join("authorized_keys"), keys.as_bytes(), store::PUBLIC)?;
        let environment = environment(task, folder).render().map_err(|error| {
            Failure::new("invalid_task", format!("the tenant's environment cannot be written: {error}"))
        })?;
        Ok(store::write_without_sync(&folder.join("environment"), environment.as_bytes(), store::PUBLIC)?)
    }

    /// Everything but the reservation.
    fn clear(&self, folder: &Path) {
        let Ok(entries) = fs::read_dir(folder) else { return };
        for entry in entries.flatten().filter(|entry| entry.file_name() != RESERVATION) {
            // What could not be removed is found by the look that follows.
            let _ = traces::remove_tree(&entry.path());
        }
    }

    fn look_at_devices(&self, devices: &[Device]) -> Finding {
        let looked_for = devices.iter().map(|device| device.uuid.as_str()).collect::<Vec<_>>().join(" ");
        let (mut outcome, mut details) = (Outcome::Gone, Vec::new());
        for device in devices {
            match self.gpus.look_at(&device.uuid) {
                DeviceUse::Idle => {}
                DeviceUse::BusyWith(pids) => {
                    outcome = Outcome::Present;
                    details.push(format!("{} is used by processes {pids:?}", device.uuid));
                }
                DeviceUse::Unknown(why) => {
                    if outcome == Outcome::Gone {
                        outcome = Outcome::Unknown;
                    }
                    details.push(format!("{}: {why}", device.uuid));
                }
            }
        }
        if details.is_empty() {
            match self.gpus.as_ref() {
                Gpus::Simulated(_) => details.push("simulated devices run no processes".to_owned()),
                Gpus::Absent { .. } => details.push("the node has no GPU driver".to_owned()),
                Gpus::Nvml(_) => {}
            }
        }
        let detail = (!details.is_empty()).then(|| details.join("; "));
        Finding { what: Checked::GpuProcesses, looked_for, outcome, detail }
    }

    /// Gives the devices back, which only a node without leftovers may do.
    fn give_back(&self, allocation_id: Uuid, folder: &Path) -> Result<(), Failure> {
        let mut reservations = self.lock();
        match fs::remove_dir_all(folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(StoreError::at("remove", folder)(error).into())
            }
            Ok(()) | Err(_) => {
                store::sync_folder(&self.folder).map_err(|error| StoreError::at("sync", &self.folder)(error))?;
                reservations.remove(&allocation_id);
                Ok(())
            }
        }
    }

    fn look_at_reservation(&self, allocation_id: Uuid, folder: &Path) -> Finding {
        let held = self.lock().contains_key(&allocation_id) || folder.exists();
        Finding {
            what: Checked::DeviceReservation,
            looked_for: allocation_id.to_string(),
            outcome: if held { Outcome::Present } else { Outcome::Gone },
            detail: held.then(|| "kept until nothing else of the tenant is left".to_owned()),
        }
    }
}

impl Executor for Sandbox {
    fn kind(&self) -> ExecutorKind {
        ExecutorKind::Sandbox
    }

    fn provision(&self, task: &Provision) -> Result<Output, Failure> {
        check_user_name(&task.user_name)?;
        task.authorized_keys.iter().try_for_each(|key| check_authorized_key(key))?;
        self.reserve(task)?;
        let folder = self.folder_of(task.allocation_id);
        self.furnish(task, &folder)?;
        let devices: Vec<&str> = task.devices.iter().map(|device| device.uuid.as_str()).collect();
        Ok(output([
            ("user_name", json!(task.user_name)),
            ("home", json!(folder.join("home"))),
            ("authorized_keys_path", json!(folder.join("authorized_keys"))),
            ("devices", json!(devices)),
            ("isolation", json!("none")),
        ]))
    }

    fn release(&self, task: &Release) -> Result<Released, Failure> {
        let folder = self.folder_of(task.allocation_id);
        let ended = self.processes.end_all(task.allocation_id, &folder);
        let traces = Traces::of(task.allocation_id, ended.seen.clone());
        self.clear(&folder);
        traces.remove();

        // From here on everything is looked at again, whatever the removal thought it did.
        let mut findings = vec![
            self.processes.look(task.allocation_id, &folder, &ended),
            traces::look_at_path(Checked::Home, &folder.join("home")),
            traces::look_at_path(Checked::AuthorizedKeys, &folder.join("authorized_keys")),
        ];
        findings.extend(traces.look());
        findings.push(self.look_at_devices(&task.devices));
        if findings.iter().all(|finding| finding.outcome == Outcome::Gone) {
            self.give_back(task.allocation_id, &folder)?;
        }
        findings.push(self.look_at_reservation(task.allocation_id, &folder));
        Ok(Released { output: output([("processes_ended", json!(ended.seen.len()))]), findings })
    }

    fn validate(&self) -> Result<Output, Failure> {
        let gpus = self.gpus.list().map_err(|error| Failure::new("gpu_driver", error.to_string()))?;
        let probe = self.folder.join(".validate");
        store::write_atomically(&probe, b"", store::PRIVATE)?;
        store::remove(&probe)?;
        let allocations: BTreeSet<String> = self.lock().keys().map(Uuid::to_string).collect();
        Ok(output([
            ("gpus", json!(gpus.iter().map(|gpu| gpu.uuid.as_str()).collect::<Vec<_>>())),
            ("allocations", json!(allocations)),
        ]))
    }
}

fn output<const N: usize>(pairs: [(&str, serde_json::Value); N]) -> Output {
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn environment(task: &Provision, folder: &Path) -> Variables {
    let allocation_id = task.allocation_id.to_string();
    let at = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let (home, tmp) = (at("home"), at("tmp"));
    let devices: Vec<&str> = task.devices.iter().map(|device| device.uuid.as_str()).collect();
    let devices = devices.join(",");
    [
        (MARKER, allocation_id.as_str()),
        ("HOME", &home),
        ("TMPDIR", &tmp),
        ("USER", &task.user_name),
        ("LOGNAME", &task.user_name),
        ("CUDA_VISIBLE_DEVICES", &devices),
    ]
    .into_iter()
    .collect()
}

fn check_user_name(name: &str) -> Result<(), Failure> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    let begins_well = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    if begins_well && name.len() <= 32 && name.chars().all(plain) {
        Ok(())
    } else {
        Err(Failure::new("invalid_task", "the user name is not [a-z_][a-z0-9_-]* of 32 characters at most"))
    }
}

/// One key on one line, without options: those could run commands as the tenant's login.
fn check_authorized_key(key: &str) -> Result<(), Failure> {
    let mut words = key.split(' ');
    let known = words.next().is_some_and(|kind| KEY_TYPES.contains(&kind)) && words.next().is_some();
    if known && !key.chars().any(char::is_control) {
        Ok(())
    } else {
        Err(Failure::new("invalid_task", "an authorized key is not one line of `type base64 [comment]`"))
    }
}

fn read_reservations(folder: &Path) -> Result<BTreeMap<Uuid, Reservation>, StoreError> {
    let mut reservations = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(StoreError::at("read", folder))? {
        let entry = entry.map_err(StoreError::at("read", folder))?;
        let Some(allocation_id) = entry.file_name().to_str().and_then(|name| name.parse::<Uuid>().ok()) else {
            continue;
        };
        let path = entry.path().join(RESERVATION);
        // A folder without one was being made or removed; the task comes again.
        let Some(text) = store::read_if_there(&path)? else { continue };
        let reservation: Reservation = serde_json::from_str(&text)
            .map_err(|error| StoreError::at("understand", &path)(io::Error::other(error)))?;
        reservations.insert(allocation_id, reservation);
    }
    // The folder's mode is part of the promise that tenants cannot read each other's keys from outside.
    fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).map_err(StoreError::at("protect", folder))?;
    Ok(reservations)
}

#[cfg(test)]
mod tests;
