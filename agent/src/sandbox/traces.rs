//! What a tenant can leave outside its folder without being root: files in shared places, and IPC objects.
//!
//! Without users of its own, the sandbox tells a tenant's things by the allocation's prefix (`gpuaas-<id>`, in file names) and
//! by the process that made them (System V objects). The findings say so.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::unistd::Uid;
use uuid::Uuid;
use wire::proof::{Checked, Finding};

use crate::tenant::finding;

/// The traces of one allocation.
pub struct Traces {
    prefix: String,
    /// Processes that the tenant had.
    processes: BTreeSet<i32>,
}

/// A shared place and the beginning of the names that are the tenant's there.
struct Place {
    what: Checked,
    folder: &'static str,
    name_begins: String,
}

/// A kind of System V object and where the kernel lists it.
struct Listing {
    path: &'static str,
    /// Columns that hold the process that made or last used an object.
    made_by: &'static [usize],
    ipcrm_flag: &'static str,
}

const SYSV: [Listing; 2] = [
    Listing { path: "/proc/sysvipc/shm", made_by: &[4, 5], ipcrm_flag: "-m" },
    Listing { path: "/proc/sysvipc/msg", made_by: &[5, 6], ipcrm_flag: "-q" },
];
const ID_COLUMN: usize = 1;

impl Traces {
    /// Traces of an allocation that had these processes.
    #[must_use]
    pub fn of(allocation_id: Uuid, processes: BTreeSet<i32>) -> Self {
        Self { prefix: format!("gpuaas-{allocation_id}"), processes }
    }

    /// Removes what can be removed; [`Traces::look`] tells whether that was all.
    pub fn remove(&self) {
        for place in self.places() {
            for path in self.entries(&place).unwrap_or_default() {
                let _ = remove_tree(&path);
            }
        }
        for listing in &SYSV {
            for id in self.sysv_objects(listing).unwrap_or_default() {
                // Another tool than the kernel's own interface, since that needs unsafe code.
                let _ = Command::new("ipcrm").args([listing.ipcrm_flag, &id]).stderr(Stdio::null()).status();
            }
        }
    }

    /// Looks for all of it.
    #[must_use]
    pub fn look(&self) -> Vec<Finding> {
        let mut findings: Vec<Finding> = self.places().iter().map(|place| self.look_at_place(place)).collect();
        findings.push(self.look_at_sysv());
        findings
    }

    fn places(&self) -> [Place; 5] {
        let place =
            |what, folder, before: &str| Place { what, folder, name_begins: format!("{before}{}", self.prefix) };
        [
            place(Checked::Tmp, "/tmp", ""),
            place(Checked::VarTmp, "/var/tmp", ""),
            place(Checked::DevShm, "/dev/shm", ""),
            // glibc keeps named semaphores beside shared memory.
            place(Checked::PosixIpc, "/dev/shm", "sem."),
            place(Checked::PosixIpc, "/dev/mqueue", ""),
        ]
    }

    fn entries(&self, place: &Place) -> io::Result<Vec<PathBuf>> {
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

    fn look_at_place(&self, place: &Place) -> Finding {
        let found = self.entries(place).map(|paths| paths.iter().map(|path| path.display().to_string()).collect());
        finding(place.what, format!("{}/{}*", place.folder, place.name_begins), found)
    }

    fn look_at_sysv(&self) -> Finding {
        let mut found = Ok(Vec::new());
        for listing in &SYSV {
            match (&mut found, self.sysv_objects(listing)) {
                (Ok(all), Ok(ids)) => all.extend(ids.into_iter().map(|id| format!("{} {id}", listing.path))),
                (Ok(_), Err(error)) => found = Err(error),
                (Err(_), _) => {}
            }
        }
        finding(Checked::SysvIpc, "shared memory and queues of the allocation's processes".to_owned(), found)
    }

    /// Ids of the agent's user's objects that one of the tenant's processes made or used last. A kernel without System V IPC
    /// has none.
    fn sysv_objects(&self, listing: &Listing) -> io::Result<Vec<String>> {
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

/// Removes a file or a folder with all in it, following no link, and opening folders that a tenant has closed to itself.
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
