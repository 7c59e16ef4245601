//! GPUs whose last tenant has left, and of which the driver does not show that nothing of it is left: no allocation gets them.
//!
//! ```text
//! STATE/unproved-gpus.json   written before the release is reported
//! ```
//!
//! A tenant's end waits for no hardware. Its processes, logins and files are removed and proved without the driver; what only the driver
//! can show is proved later, for each GPU by itself. A GPU is off the list once the driver shows that nothing uses it, or once a later boot
//! of the machine does not have it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};
use uuid::Uuid;
use wire::cleanup_proof::{CleanupFinding, FindingOutcome};
use wire::inventory::DeviceRef;

use crate::atomic_file::{self, FileError};
use crate::chain;
use crate::cleanup_checks;
use crate::finding_log::Condition;
use crate::gpus::Gpus;
use crate::repeated_failures::RepeatedFailures;
use crate::server_clock;

const FILE: &str = "unproved-gpus.json";
/// The probe and the code of the finding.
pub const PROBE: &str = "clean_up";
const CODE: &str = "unproved";

/// What is known of a GPU without proof.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuWithoutProof {
    /// Its last tenant.
    pub allocation_id: Uuid,
    pub since: DateTime<Utc>,
    /// What the driver answered last.
    pub why: String,
    /// The boot in which the tenant has left.
    boot_id: Option<Uuid>,
}

/// All GPUs without proof, by UUID.
pub struct UnprovedGpus {
    path: PathBuf,
    gpus: Mutex<BTreeMap<String, GpuWithoutProof>>,
    /// Held while they are stored and then changed, and locked before `gpus`: a disk that does not answer keeps no reader waiting.
    storing: Mutex<()>,
    unstored: RepeatedFailures<()>,
}

impl UnprovedGpus {
    /// Loads those that an earlier agent has stored under `state_dir`.
    ///
    /// # Errors
    /// [`FileError`] when the file cannot be read: a GPU of it must not be given to a tenant.
    pub fn open(state_dir: &Path) -> Result<Self, FileError> {
        let path = state_dir.join(FILE);
        let gpus = match atomic_file::read_if_there(&path)? {
            Some(text) => serde_json::from_str(&text)
                .map_err(|error| FileError::at("understand", &path)(io::Error::other(error)))?,
            None => BTreeMap::new(),
        };
        let (gpus, storing) = (Mutex::new(gpus), Mutex::default());
        Ok(Self { path, gpus, storing, unstored: RepeatedFailures::default() })
    }

    /// All of them.
    #[must_use]
    pub fn all(&self) -> BTreeMap<String, GpuWithoutProof> {
        self.lock().clone()
    }

    #[must_use]
    pub fn contains(&self, uuid: &str) -> bool {
        self.lock().contains_key(uuid)
    }

    /// Notes the GPUs that these findings do not prove.
    ///
    /// # Errors
    /// [`FileError`]: nothing is noted, and the release must not be reported as complete.
    pub fn note(&self, allocation_id: Uuid, findings: &[CleanupFinding]) -> Result<(), FileError> {
        let _alone = self.storing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = self.all();
        for (uuid, finding) in findings.iter().filter_map(|finding| Some((finding.unproved_gpu()?, finding))) {
            let why = finding.detail.clone().unwrap_or_else(|| "the driver gave no answer".to_owned());
            let unproved =
                GpuWithoutProof { allocation_id, since: Utc::now(), why, boot_id: server_clock::boot_id().ok() };
            next.insert(uuid.to_owned(), unproved);
        }
        self.replace(next)
    }

    /// Asks the driver about each of them again. Returns whether the list has changed.
    ///
    /// # Errors
    /// [`FileError`] when it cannot be stored.
    pub fn prove(&self, gpus: &Gpus) -> Result<bool, FileError> {
        let known = self.all();
        if known.is_empty() {
            return Ok(false);
        }
        let listed = gpus.survey(false).ok().filter(|survey| survey.unreadable.is_empty() && survey.lost == 0);
        let booted = server_clock::boot_id().ok();
        let is_removed = |uuid: &str, unproved: &GpuWithoutProof| {
            let is_listed = listed.as_ref().is_none_or(|survey| survey.gpus.iter().any(|gpu| gpu.info.uuid == uuid));
            !is_listed && booted.is_some() && unproved.boot_id.is_some() && booted != unproved.boot_id
        };
        let mut next = BTreeMap::new();
        for (uuid, unproved) in &known {
            match why_unproved(gpus, uuid) {
                None => info!(gpu_uuid = uuid, "nothing of its last tenant is left on the GPU"),
                Some(_) if is_removed(uuid, unproved) => {
                    info!(gpu_uuid = uuid, "the machine does not have the GPU any more");
                }
                Some(why) => {
                    next.insert(uuid.clone(), GpuWithoutProof { why, ..unproved.clone() });
                }
            }
        }
        let has_changed = next != known;
        let _alone = self.storing.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that were noted meanwhile stay.
        next.extend(self.all().into_iter().filter(|(uuid, _)| !known.contains_key(uuid)));
        self.replace(next)?;
        Ok(has_changed)
    }

    fn replace(&self, next: BTreeMap<String, GpuWithoutProof>) -> Result<(), FileError> {
        if *self.lock() != next {
            let text = serde_json::to_vec(&next).map_err(|error| FileError::at("write", &self.path)(error.into()))?;
            atomic_file::write_atomically(&self.path, &text, atomic_file::PRIVATE)?;
            *self.lock() = next;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, GpuWithoutProof>> {
        self.gpus.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks the driver about each GPU of the list. Returns whether the list has changed. What cannot be stored is logged, and tried again.
pub fn prove(unproved: &UnprovedGpus, gpus: &Gpus) -> bool {
    let proved = unproved.prove(gpus);
    unproved.unstored.retain(|()| proved.is_err());
    proved.unwrap_or_else(|error| {
        let error = chain(&error);
        if unproved.unstored.is_to_be_logged((), &error) {
            warn!(error_code = "node_storage", error, "the list of unproved GPUs cannot be stored");
        }
        false
    })
}

/// The findings about these GPUs.
#[must_use]
pub fn conditions(gpus: &BTreeMap<String, GpuWithoutProof>) -> Vec<Condition> {
    let condition = |(uuid, unproved): (&String, &GpuWithoutProof)| {
        let detail = format!("allocation {} has left, and {}", unproved.allocation_id, unproved.why);
        Condition::of_gpu(uuid, PROBE, CODE, detail)
    };
    gpus.iter().map(condition).collect()
}

/// Why the driver does not show that nothing of a tenant is left on the GPU; `None` where it does.
fn why_unproved(gpus: &Gpus, uuid: &str) -> Option<String> {
    // The index is not part of the question.
    let device = [DeviceRef { index: 0, uuid: uuid.to_owned() }];
    let mut findings = cleanup_checks::check_device_processes(gpus, &device, &BTreeSet::new());
    findings.extend(cleanup_checks::check_device_memory(gpus, &device));
    let open = findings.into_iter().find(|finding| finding.outcome != FindingOutcome::Gone)?;
    Some(open.detail.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use wire::cleanup_proof::CleanupCheck;

    use super::*;
    use crate::gpus::GpuSimulation;

    const ALLOCATION: Uuid = Uuid::from_u128(1);

    fn finding(uuid: &str, outcome: FindingOutcome) -> CleanupFinding {
        let detail = Some(format!("{uuid}: the GPU is lost"));
        CleanupFinding { what: CleanupCheck::GpuMemory, looked_for: uuid.into(), outcome, detail }
    }

    fn simulated() -> Gpus {
        let asked = GpuSimulation { count: 2, model: "H100".into(), memory_mib: 1 };
        Gpus::detect(Uuid::nil(), Some(&asked), crate::gpu_probe::DEFAULT_DEADLINE)
    }

    #[test]
    fn gpu_without_proof_is_known_to_the_next_agent_and_a_finding() {
        let folder = tempfile::tempdir().unwrap();
        let known = UnprovedGpus::open(folder.path()).unwrap();
        known
            .note(ALLOCATION, &[finding("GPU-1", FindingOutcome::Unknown), finding("GPU-2", FindingOutcome::Gone)])
            .unwrap();
        let next = UnprovedGpus::open(folder.path()).unwrap();
        assert!(next.contains("GPU-1") && !next.contains("GPU-2"));
        let [condition] = &conditions(&next.all())[..] else { panic!("{:?}", next.all()) };
        assert_eq!((condition.key.probe, condition.key.code.as_str()), ("clean_up", "unproved"));
        assert!(condition.detail.contains("the GPU is lost"), "{}", condition.detail);
    }

    #[test]
    fn gpu_is_proved_once_the_driver_shows_that_nothing_uses_it() {
        let folder = tempfile::tempdir().unwrap();
        let (known, gpus) = (UnprovedGpus::open(folder.path()).unwrap(), simulated());
        assert!(!known.prove(&gpus).unwrap());
        let uuid = &gpus.list().unwrap()[0].uuid;
        known.note(ALLOCATION, &[finding(uuid, FindingOutcome::Present)]).unwrap();
        assert!(known.prove(&gpus).unwrap());
        assert_eq!((known.all().len(), UnprovedGpus::open(folder.path()).unwrap().all().len()), (0, 0));
    }

    #[test]
    fn damaged_list_stops_the_agent() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE), "{").unwrap();
        let error = UnprovedGpus::open(folder.path()).err().unwrap();
        assert!(crate::chain(&error).contains(FILE), "{}", crate::chain(&error));
    }
}
