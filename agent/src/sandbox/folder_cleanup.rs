//! What a tenant can leave outside its folder without being root: files in shared folders, and IPC objects.
//!
//! Without Linux users, the sandbox identifies a tenant's files by the allocation's prefix (`gpuaas-<id>`, in file names) and its System
//! V objects by the process that made them. The findings say so.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use nix::unistd::Uid;
use uuid::Uuid;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding};

use crate::bounded_tool::{SHORT_LIMIT, Tool, ToolError};
use crate::cleanup_checks::finding;

/// The leftovers of one allocation.
pub struct SandboxLeftovers {
    prefix: String,
    /// Processes that the tenant had.
    processes: BTreeSet<i32>,
}

/// A shared folder and the prefix of the tenant's file names there.
struct SharedFolder {
    what: CleanupCheck,
    folder: &'static str,
    name_begins: String,
}

/// A kind of System V object and where the kernel lists it.
struct SysvListing {
    path: &'static str,
    /// The columns with the process that made or last used an object.
    made_by: &'static [usize],
    ipcrm_flag: &'static str,
}

const SYSV: [SysvListing; 2] = [
    SysvListing { path: "/proc/sysvipc/shm", made_by: &[4, 5], ipcrm_flag: "-m" },
    SysvListing { path: "/proc/sysvipc/msg", made_by: &[5, 6], ipcrm_flag: "-q" },
];
const ID_COLUMN: usize = 1;

impl SandboxLeftovers {
    /// The leftovers of an allocation that had these processes.
    #[must_use]
    pub fn of(allocation_id: Uuid, processes: BTreeSet<i32>) -> Self {
        Self { prefix: format!("gpuaas-{allocation_id}"), processes }
    }

    /// Removes what can be removed; [`SandboxLeftovers::check_removed`] shows what is left.
    pub fn remove(&self) {
        for place in self.folders() {
            for path in self.entries(&place).unwrap_or_default() {
                let _ = remove_tree(&path);
            }
        }
        for listing in &SYSV {
            for id in self.sysv_objects(listing).unwrap_or_default() {
                // A tool instead of the kernel's own interface, which needs unsafe code.
                let ran = Tool::new("ipcrm").args([listing.ipcrm_flag, &id]).run(SHORT_LIMIT);
                // The next one would hang as well. What is left is found by the check.
                if matches!(ran, Err(ToolError::Hung { .. })) {
                    break;
                }
            }
        }
    }

    /// Checks for every kind of leftover.
    #[must_use]
    pub fn check_removed(&self) -> Vec<CleanupFinding> {
        let mut findings: Vec<CleanupFinding> = self.folders().iter().map(|place| self.check_folder(place)).collect();
        findings.push(self.check_sysv());
        findings
    }

    fn folders(&self) -> [SharedFolder; 5] {
        let place =
            |what, folder, before: &str| SharedFolder { what, folder, name_begins: format!("{before}{}", self.prefix) };
        [
            place(CleanupCheck::Tmp, "/tmp", ""),
            place(CleanupCheck::VarTmp, "/var/tmp", ""),
            place(CleanupCheck::DevShm, "/dev/shm", ""),
            // glibc keeps named semaphores beside shared memory.
            place(CleanupCheck::PosixIpc, "/dev/shm", "sem."),
            place(CleanupCheck::PosixIpc, "/dev/mqueue", ""),
        ]
    }

    fn entries(&self, place: &SharedFolder) -> io::Result<Vec<PathBuf>> {
        let mut paths = Vec::new();
        let entries = match fs::read_dir(place.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(paths),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(&place.name_begins) {
                paths.push(entry.path());
            }
        }
        Ok(paths)
    }

    fn check_folder(&self, place: &SharedFolder) -> CleanupFinding {
        let found = self.entries(place).map(|paths| paths.iter().map(|path| path.display().to_string()).collect());
        finding(place.what, format!("{}/{}*", place.folder, place.name_begins), found)
    }

    fn check_sysv(&self) -> CleanupFinding {
        let mut found = Ok(Vec::new());
        for listing in &SYSV {
            match (&mut found, self.sysv_objects(listing)) {
                (Ok(all), Ok(ids)) => all.extend(ids.into_iter().map(|id| format!("{} {id}", listing.path))),
                (Ok(_), Err(error)) => found = Err(error),
                (Err(_), _) => {}
            }
        }
        finding(CleanupCheck::SysvIpc, "shared memory and queues of the allocation's processes".to_owned(), found)
    }

    /// Ids of the agent user's objects that one of the tenant's processes made or used last. A kernel without System V IPC has none.
    fn sysv_objects(&self, listing: &SysvListing) -> io::Result<Vec<String>> {
        if self.processes.is_empty() {
            return Ok(Vec::new());
        }
        let text = match fs::read_to_string(listing.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let is_ours = |fields: &Vec<&str>| {
            listing.made_by.iter().any(|column| {
                fields.get(*column).and_then(|pid| pid.parse().ok()).is_some_and(|pid| self.processes.contains(&pid))
            })
        };
        let rows = text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
        Ok(rows.filter(is_ours).filter_map(|fields| fields.get(ID_COLUMN).map(|id| (*id).to_owned())).collect())
    }
}

/// Removes a file or a folder with its content, following no link, and opening folders that a tenant has closed to itself.
///
/// # Errors
/// What could not be removed.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    let metadata = path.symlink_metadata()?;
    if !metadata.is_dir() {
        return fs::remove_file(path);
    }
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && metadata.uid() == Uid::current().as_raw() => {
            open_folders(path)?;
            fs::remove_dir_all(path)
        }
        other => other,
    }
}

fn open_folders(folder: &Path) -> io::Result<()> {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o700))?;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            open_folders(&entry.path())?;
        }
    }
    Ok(())
}
