//! Which allocation holds which GPU of this node, as the agent stores it across restarts.
//!
//! ```text
//! STATE/allocations/<id>/allocation.json   written first, removed last
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding, FindingOutcome};
use wire::inventory::DeviceRef;
use wire::task::{Provision, Release};

use crate::atomic_file::{self, FileError};
use crate::gpus::Gpus;
use crate::task_outcome::TaskFailure;
use crate::unproved_gpus::UnprovedGpus;

/// The name of an allocation's record in its folder.
pub const RECORD: &str = "allocation.json";

/// The stored record of an allocation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationRecord {
    pub allocation_id: Uuid,
    pub user_name: String,
    pub sku: String,
    pub devices: Vec<DeviceRef>,
    pub provisioned_at: DateTime<Utc>,
}

/// See the module's documentation.
pub struct AllocationRecords {
    folder: PathBuf,
    held: Mutex<BTreeMap<Uuid, AllocationRecord>>,
    /// GPUs that no allocation can get at this moment, and how many tasks withhold each. Locked after `held`.
    withheld: Mutex<BTreeMap<String, usize>>,
    /// The allocations whose release has begun, until they are freed. Held while a device is opened, and locked before `held`.
    closed: Mutex<BTreeSet<Uuid>>,
    unproved: UnprovedGpus,
}

/// A GPU that no allocation gets while this lives.
#[must_use]
pub struct WithheldGpu<'a> {
    withheld: &'a Mutex<BTreeMap<String, usize>>,
    uuid: String,
}

impl Drop for WithheldGpu<'_> {
    fn drop(&mut self) {
        let mut withheld = self.withheld.lock().unwrap_or_else(PoisonError::into_inner);
        match withheld.get_mut(&self.uuid) {
            Some(tasks) if *tasks > 1 => *tasks -= 1,
            Some(_) | None => drop(withheld.remove(&self.uuid)),
        }
    }
}

impl AllocationRecords {
    /// Loads the records that an earlier agent stored under `state_dir`.
    ///
    /// # Errors
    /// [`FileError`] when the folder cannot be created or read.
    pub fn open(state_dir: &Path) -> Result<Self, FileError> {
        let folder = state_dir.join("allocations");
        atomic_file::private_folder(&folder)?;
        let held = Mutex::new(read(&folder)?);
        let (withheld, closed) = (Mutex::default(), Mutex::default());
        Ok(Self { folder, held, withheld, closed, unproved: UnprovedGpus::open(state_dir)? })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Uuid, AllocationRecord>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The folder of an allocation.
    #[must_use]
    pub fn folder_of(&self, allocation_id: Uuid) -> PathBuf {
        self.folder.join(allocation_id.to_string())
    }

    /// All records.
    #[must_use]
    pub fn all(&self) -> Vec<AllocationRecord> {
        self.lock().values().cloned().collect()
    }

    /// Whether the allocation holds devices.
    #[must_use]
    pub fn contains(&self, allocation_id: Uuid) -> bool {
        self.lock().contains_key(&allocation_id)
    }

    /// Opens a device of an allocation, unless its release has begun: since the caller has read the record, the allocation may even have
    /// ended. `open` must not ask the driver, for which a release would wait.
    ///
    /// # Errors
    /// That of `open`.
    pub fn open_device<E>(&self, allocation_id: Uuid, open: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        if closed.contains(&allocation_id) || !self.contains(allocation_id) { Ok(()) } else { open() }
    }

    /// Closes the devices of an allocation for good: from here on, [`Self::open_device`] opens none.
    pub fn close_devices<T>(&self, allocation_id: Uuid, close: impl FnOnce() -> T) -> T {
        let mut closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        closed.insert(allocation_id);
        close()
    }

    /// The record of an allocation, if it is on this node under this user name.
    ///
    /// # Errors
    /// `tenant_unknown`.
    pub fn of_tenant(&self, allocation_id: Uuid, user_name: &str) -> Result<AllocationRecord, TaskFailure> {
        let found = self.lock().get(&allocation_id).filter(|held| held.user_name == user_name).cloned();
        found.ok_or_else(|| TaskFailure::new("tenant_unknown", "the allocation is not set up on this node"))
    }

    /// All recorded allocations as release tasks.
    #[must_use]
    pub fn tenants(&self) -> Vec<Release> {
        let release = |held: AllocationRecord| Release {
            allocation_id: held.allocation_id,
            user_name: held.user_name,
            devices: held.devices,
        };
        self.all().into_iter().map(release).collect()
    }

    /// Their ids as text, for an output.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<String> {
        self.lock().keys().map(Uuid::to_string).collect()
    }

    /// Stores that the allocation holds its devices, unless another one holds any of them.
    ///
    /// # Errors
    /// `device_unknown`, `gpu_driver`, `device_in_use`, `allocation_differs`; `node_storage` if it cannot be written.
    pub fn reserve(&self, task: &Provision, gpus: &Gpus) -> Result<(), TaskFailure> {
        let survey = gpus.survey(false).map_err(|error| TaskFailure::new("gpu_driver", error.to_string()))?;
        let is_listed = |device: &&DeviceRef| survey.gpus.iter().any(|gpu| gpu.info.uuid == device.uuid);
        if let Some(device) = task.devices.iter().find(|device| !is_listed(device)) {
            let uuid = &device.uuid;
            // The other GPUs of the machine are none of this allocation's concern.
            return Err(match survey.unreadable.first() {
                Some(gpu) => TaskFailure::new("gpu_driver", format!("GPU {uuid} cannot be read ({})", gpu.why)),
                None => TaskFailure::new("device_unknown", format!("this node has no GPU {uuid}")),
            });
        }
        let (record, before) = self.hold(task)?;
        if before.as_ref() == Some(&record) {
            return Ok(());
        }
        let stored = self.store(&record);
        if stored.is_err() {
            let mut held = self.lock();
            match before {
                Some(before) => held.insert(task.allocation_id, before),
                None => held.remove(&task.allocation_id),
            };
        }
        stored
    }

    /// Notes that the allocation holds its devices, before that is stored: a disk that does not answer keeps no reader waiting.
    /// Returns its record, and the one that it had before.
    fn hold(&self, task: &Provision) -> Result<(AllocationRecord, Option<AllocationRecord>), TaskFailure> {
        let mut held = self.lock();
        for device in &task.devices {
            if let Some(holder) = holder_of(&held, device, task.allocation_id) {
                let message = format!("GPU {} is held by allocation {holder}", device.uuid);
                return Err(TaskFailure::new("device_in_use", message));
            }
            if self.unproved.contains(&device.uuid) && !held.contains_key(&task.allocation_id) {
                let message = format!("it is not proved that GPU {} is free of its last tenant", device.uuid);
                return Err(TaskFailure::new("device_in_use", message));
            }
            if self.withheld().contains_key(&device.uuid) {
                let message = format!("GPU {} is being reset or tested", device.uuid);
                return Err(TaskFailure::new("device_in_use", message));
            }
        }
        let provisioned_at = match held.get(&task.allocation_id) {
            Some(before) if before.devices != task.devices || before.user_name != task.user_name => {
                let message = "the allocation is on this node already, with other devices or another user";
                return Err(TaskFailure::new("allocation_differs", message));
            }
            Some(before) => before.provisioned_at,
            None => Utc::now(),
        };
        let record = AllocationRecord {
            allocation_id: task.allocation_id,
            user_name: task.user_name.clone(),
            sku: task.sku.clone(),
            devices: task.devices.clone(),
            provisioned_at,
        };
        let before = held.insert(task.allocation_id, record.clone());
        Ok((record, before))
    }

    fn store(&self, record: &AllocationRecord) -> Result<(), TaskFailure> {
        let text =
            serde_json::to_vec_pretty(record).map_err(|error| TaskFailure::new("node_storage", error.to_string()))?;
        let path = self.folder_of(record.allocation_id).join(RECORD);
        Ok(atomic_file::write_atomically(&path, &text, atomic_file::PRIVATE)?)
    }

    /// Withholds a GPU from allocations, unless one holds it.
    ///
    /// # Errors
    /// `device_in_use`.
    pub fn withhold(&self, uuid: &str) -> Result<WithheldGpu<'_>, TaskFailure> {
        let held = self.lock();
        let holder = held.values().find(|held| held.devices.iter().any(|device| device.uuid == uuid));
        if let Some(holder) = holder {
            let message = format!("GPU {uuid} is held by allocation {}", holder.allocation_id);
            return Err(TaskFailure::new("device_in_use", message));
        }
        *self.withheld().entry(uuid.to_owned()).or_default() += 1;
        Ok(WithheldGpu { withheld: &self.withheld, uuid: uuid.to_owned() })
    }

    /// The GPUs of which it is not proved that nothing of their last tenant is left.
    #[must_use]
    pub const fn unproved(&self) -> &UnprovedGpus {
        &self.unproved
    }

    fn withheld(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.withheld.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees the devices, which requires a machine without leftovers of the tenant. A GPU that the findings do not prove gets no other one.
    ///
    /// # Errors
    /// `node_storage` if the allocation's folder cannot be removed.
    pub fn free(&self, allocation_id: Uuid, findings: &[CleanupFinding]) -> Result<(), TaskFailure> {
        self.unproved.note(allocation_id, findings)?;
        let folder = self.folder_of(allocation_id);
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(FileError::at("remove", &folder)(error).into())
            }
            Ok(()) | Err(_) => {
                atomic_file::sync_folder(&self.folder).map_err(|error| FileError::at("sync", &self.folder)(error))?;
                self.lock().remove(&allocation_id);
                // Without a record, nothing is opened either.
                self.closed.lock().unwrap_or_else(PoisonError::into_inner).remove(&allocation_id);
                Ok(())
            }
        }
    }

    /// Whether the allocation still holds anything.
    #[must_use]
    pub fn check_removed(&self, allocation_id: Uuid) -> CleanupFinding {
        let held = self.lock().contains_key(&allocation_id) || self.folder_of(allocation_id).exists();
        CleanupFinding {
            what: CleanupCheck::DeviceReservation,
            looked_for: allocation_id.to_string(),
            outcome: if held { FindingOutcome::Present } else { FindingOutcome::Gone },
            detail: held.then(|| "held until nothing else of the tenant is left".to_owned()),
        }
    }

    /// Whether the folder of the records is writable.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn check_writable(&self) -> Result<(), FileError> {
        let probe = self.folder.join(".validate");
        atomic_file::write_atomically(&probe, b"", atomic_file::PRIVATE)?;
        atomic_file::remove(&probe)
    }
}

fn holder_of(held: &BTreeMap<Uuid, AllocationRecord>, device: &DeviceRef, but: Uuid) -> Option<Uuid> {
    let holds = |other: &&AllocationRecord| {
        other.allocation_id != but && other.devices.iter().any(|held| held.uuid == device.uuid)
    };
    held.values().find(holds).map(|other| other.allocation_id)
}

fn read(folder: &Path) -> Result<BTreeMap<Uuid, AllocationRecord>, FileError> {
    let mut held = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(FileError::at("read", folder))? {
        let entry = entry.map_err(FileError::at("read", folder))?;
        let Some(allocation_id) = entry.file_name().to_str().and_then(|name| name.parse::<Uuid>().ok()) else {
            continue;
        };
        let path = entry.path().join(RECORD);
        // A folder without a record was being created or removed; the task is sent again.
        let Some(text) = atomic_file::read_if_there(&path)? else { continue };
        let record: AllocationRecord =
            serde_json::from_str(&text).map_err(|error| FileError::at("understand", &path)(io::Error::other(error)))?;
        held.insert(allocation_id, record);
    }
    // The folder's mode is part of the guarantee that tenants cannot read each other's keys.
    atomic_file::protect(folder, 0o700).map_err(FileError::at("protect", folder))?;
    Ok(held)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::bounded_reading::hanging_mount::OwnMounts;
    use crate::gpus::GpuSimulation;
    use crate::terminal::skipped_tests;

    fn gpus() -> Gpus {
        let asked = GpuSimulation { count: 1, model: "H100".into(), memory_mib: 1 };
        Gpus::detect(Uuid::nil(), Some(&asked), crate::gpu_probe::DEFAULT_DEADLINE)
    }

    fn provision(id: Uuid, gpus: &Gpus) -> Provision {
        Provision {
            allocation_id: id,
            user_name: "tena".into(),
            authorized_keys: Vec::new(),
            devices: gpus.list().unwrap().iter().map(DeviceRef::from).collect(),
            sku: "h100".into(),
            deadline_at: Utc::now(),
        }
    }

    #[test]
    fn device_of_a_record_that_cannot_be_stored_is_free_again() {
        let folder = tempfile::tempdir().unwrap();
        let (records, gpus) = (AllocationRecords::open(folder.path()).unwrap(), gpus());
        let [first, second] = [1, 2].map(Uuid::from_u128);
        // No folder can be made where this file is.
        fs::write(records.folder_of(first), "").unwrap();
        assert_eq!(records.reserve(&provision(first, &gpus), &gpus).unwrap_err().code, "node_storage");
        records.reserve(&provision(second, &gpus), &gpus).unwrap();
        assert_eq!(records.ids(), BTreeSet::from([second.to_string()]));
    }

    /// In a thread that is left to itself: it ends once the disk that it waits for is unmounted.
    fn begin(
        records: &Arc<AllocationRecords>,
        asked: &std::sync::mpsc::Sender<()>,
        waits: impl FnOnce(&AllocationRecords) + Send + 'static,
    ) {
        let (records, asked) = (Arc::clone(records), asked.clone());
        std::thread::spawn(move || {
            asked.send(()).unwrap();
            waits(&records);
        });
    }

    #[test]
    fn disk_that_does_not_answer_keeps_no_device_open_and_no_heartbeat_waiting() {
        let Some(mounts) = OwnMounts::of_this_thread(skipped_tests::report_skipped) else { return };
        let folder = tempfile::tempdir().unwrap();
        let (records, gpus) = (Arc::new(AllocationRecords::open(folder.path()).unwrap()), Arc::new(gpus()));
        let [present, next] = [1, 2].map(Uuid::from_u128);
        records.reserve(&provision(present, &gpus), &gpus).unwrap();
        let _hanging = mounts.hang(folder.path());
        let uuid = gpus.list().unwrap()[0].uuid.clone();
        let of_other = Provision { devices: Vec::new(), ..provision(next, &gpus) };
        let finding = CleanupFinding {
            what: CleanupCheck::GpuMemory,
            looked_for: uuid,
            outcome: FindingOutcome::Unknown,
            detail: None,
        };
        let (asked, are_asked) = std::sync::mpsc::channel();
        begin(&records, &asked, move |records| drop(records.reserve(&of_other, &gpus)));
        begin(&records, &asked, move |records| drop(records.unproved().note(present, &[finding])));
        begin(&records, &asked, move |records| drop(records.free(next, &[])));
        (0..3).for_each(|_| are_asked.recv().unwrap());
        // They wait for the disk by now, or do a moment later.
        std::thread::sleep(std::time::Duration::from_millis(200));
        let (read, is_read) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            records.open_device(present, || Ok::<_, io::Error>(())).unwrap();
            records.close_devices(present, || ());
            read.send((records.contains(present), records.unproved().all().len())).unwrap();
        });
        assert_eq!(is_read.recv_timeout(std::time::Duration::from_secs(60)), Ok((true, 0)));
    }

    #[test]
    fn device_is_opened_until_the_release_begins_and_the_release_leaves_nothing_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let records = AllocationRecords::open(folder.path()).unwrap();
        let gpus = gpus();
        for id in (1..=3).map(Uuid::from_u128) {
            let opens = || {
                let mut is_open = false;
                let opened: Result<(), io::Error> = records.open_device(id, || {
                    is_open = true;
                    Ok(())
                });
                opened.is_ok() && is_open
            };
            assert!(!opens(), "without a record");
            records.reserve(&provision(id, &gpus), &gpus).unwrap();
            assert!(opens());
            records.close_devices(id, || ());
            assert!(!opens(), "its release has begun");
            records.free(id, &[]).unwrap();
            assert!(!opens(), "its release has ended");
        }
        assert_eq!(records.closed.lock().unwrap().len(), 0);
    }
}
