//! Which allocation holds which GPU of this node, as the agent remembers it over restarts.
//!
//! ```text
//! STATE/allocations/<id>/allocation.json   first to come, last to go
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use wire::inventory::Device;
use wire::proof::{Checked, Finding, Outcome};
use wire::task::{Provision, Release};

use crate::executor::Failure;
use crate::gpus::Gpus;
use crate::store::{self, StoreError};

/// The name of an allocation's record in its folder.
pub const RECORD: &str = "allocation.json";

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
pub struct Reservations {
    folder: PathBuf,
    held: Mutex<BTreeMap<Uuid, Reservation>>,
}

impl Reservations {
    /// Takes over what an earlier agent left under `state_dir`.
    ///
    /// # Errors
    /// [`StoreError`] when the folder cannot be made or read.
    pub fn open(state_dir: &Path) -> Result<Self, StoreError> {
        let folder = state_dir.join("allocations");
        store::private_folder(&folder)?;
        let held = Mutex::new(read(&folder)?);
        Ok(Self { folder, held })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Uuid, Reservation>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where an allocation's things lie.
    #[must_use]
    pub fn folder_of(&self, allocation_id: Uuid) -> PathBuf {
        self.folder.join(allocation_id.to_string())
    }

    /// The allocations that hold something.
    #[must_use]
    pub fn all(&self) -> Vec<Reservation> {
        self.lock().values().cloned().collect()
    }

    /// The same, as they would be removed.
    #[must_use]
    pub fn tenants(&self) -> Vec<Release> {
        let release = |held: Reservation| Release {
            allocation_id: held.allocation_id,
            user_name: held.user_name,
            devices: held.devices,
        };
        self.all().into_iter().map(release).collect()
    }

    /// Their ids, in text, for an output.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<String> {
        self.lock().keys().map(Uuid::to_string).collect()
    }

    /// Writes down that the allocation holds its devices, unless another holds one of them.
    ///
    /// # Errors
    /// `device_unknown`, `device_in_use`, `allocation_differs`; `node_storage` where it cannot be written.
    pub fn reserve(&self, task: &Provision, gpus: &Gpus) -> Result<(), Failure> {
        let known = gpus.list().map_err(|error| Failure::new("gpu_driver", error.to_string()))?;
        if let Some(device) = task.devices.iter().find(|device| !known.iter().any(|gpu| gpu.uuid == device.uuid)) {
            return Err(Failure::new("device_unknown", format!("this node has no GPU {}", device.uuid)));
        }
        let mut held = self.lock();
        for device in &task.devices {
            if let Some(holder) = holder_of(&held, device, task.allocation_id) {
                let message = format!("GPU {} is held by allocation {holder}", device.uuid);
                return Err(Failure::new("device_in_use", message));
            }
        }
        let provisioned_at = match held.get(&task.allocation_id) {
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
        if held.get(&task.allocation_id) != Some(&reservation) {
            let text = serde_json::to_vec_pretty(&reservation)
                .map_err(|error| Failure::new("node_storage", error.to_string()))?;
            store::write_atomically(&self.folder_of(task.allocation_id).join(RECORD), &text, store::PRIVATE)?;
            held.insert(task.allocation_id, reservation);
        }
        Ok(())
    }

    /// Gives the devices back, which only a node without leftovers may do.
    ///
    /// # Errors
    /// `node_storage` where the allocation's folder cannot be removed.
    pub fn give_back(&self, allocation_id: Uuid) -> Result<(), Failure> {
        let folder = self.folder_of(allocation_id);
        let mut held = self.lock();
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(StoreError::at("remove", &folder)(error).into())
            }
            Ok(()) | Err(_) => {
                store::sync_folder(&self.folder).map_err(|error| StoreError::at("sync", &self.folder)(error))?;
                held.remove(&allocation_id);
                Ok(())
            }
        }
    }

    /// Whether the allocation still holds anything.
    #[must_use]
    pub fn look(&self, allocation_id: Uuid) -> Finding {
        let held = self.lock().contains_key(&allocation_id) || self.folder_of(allocation_id).exists();
        Finding {
            what: Checked::DeviceReservation,
            looked_for: allocation_id.to_string(),
            outcome: if held { Outcome::Present } else { Outcome::Gone },
            detail: held.then(|| "kept until nothing else of the tenant is left".to_owned()),
        }
    }

    /// Whether something can be written where the reservations lie.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn try_writing(&self) -> Result<(), StoreError> {
        let probe = self.folder.join(".validate");
        store::write_atomically(&probe, b"", store::PRIVATE)?;
        store::remove(&probe)
    }
}

fn holder_of(held: &BTreeMap<Uuid, Reservation>, device: &Device, but: Uuid) -> Option<Uuid> {
    let holds =
        |other: &&Reservation| other.allocation_id != but && other.devices.iter().any(|held| held.uuid == device.uuid);
    held.values().find(holds).map(|other| other.allocation_id)
}

fn read(folder: &Path) -> Result<BTreeMap<Uuid, Reservation>, StoreError> {
    let mut held = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(StoreError::at("read", folder))? {
        let entry = entry.map_err(StoreError::at("read", folder))?;
        let Some(allocation_id) = entry.file_name().to_str().and_then(|name| name.parse::<Uuid>().ok()) else {
            continue;
        };
        let path = entry.path().join(RECORD);
        // A folder without one was being made or removed; the task comes again.
        let Some(text) = store::read_if_there(&path)? else { continue };
        let reservation: Reservation = serde_json::from_str(&text)
            .map_err(|error| StoreError::at("understand", &path)(io::Error::other(error)))?;
        held.insert(allocation_id, reservation);
    }
    // The folder's mode is part of the promise that tenants cannot read each other's keys from outside.
    fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).map_err(StoreError::at("protect", folder))?;
    Ok(held)
}
