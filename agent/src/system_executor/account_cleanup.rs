//! What a tenant can leave on the machine outside its account: its home, files in shared folders, mounts, jobs and IPC objects. All of it
//! is identified by the owner's uid, which no other account ever had or will have.

use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use wire::cleanup_proof::{CleanupCheck, CleanupFinding, FindingOutcome};

use super::accounts::TenantAccount;
use super::directory_walk::{self, SearchScope, WalkEntry};
use super::file_search::{self, SearchResult};
use super::mounts::{self, Mounts};
use super::private_tmp::PrivateTmp;
use crate::bounded_tool::{SHORT_LIMIT, Tool, ToolError};
use crate::cleanup_checks::{check_path_removed, finding};

/// The most paths that a finding names.
const SHOWN: usize = 20;
/// Where a machine keeps core dumps, under names with the uid in them.
const DUMPS: &str = "/var/lib/systemd/coredump";

/// Folders that every user may write to, and the check of each in the proof.
const SHARED: [(CleanupCheck, &str); 12] = [
    (CleanupCheck::Tmp, "/tmp"),
    (CleanupCheck::VarTmp, "/var/tmp"),
    (CleanupCheck::DevShm, "/dev/shm"),
    (CleanupCheck::PosixIpc, "/dev/mqueue"),
    (CleanupCheck::Mail, "/var/mail"),
    (CleanupCheck::Cron, "/var/spool/cron"),
    (CleanupCheck::At, "/var/spool/at"),
    (CleanupCheck::At, "/var/spool/atjobs"),
    (CleanupCheck::SessionFiles, "/run/user"),
    (CleanupCheck::SessionFiles, "/run/lock"),
    (CleanupCheck::SessionFiles, "/run/screen"),
    (CleanupCheck::SessionFiles, "/var/crash"),
];

/// Files that carry the tenant's name or uid and belong to root.
const NAMED: [(CleanupCheck, &str); 7] = [
    (CleanupCheck::Cron, "/var/spool/cron/crontabs"),
    (CleanupCheck::Mail, "/var/spool/mail"),
    (CleanupCheck::SessionFiles, "/run/user"),
    (CleanupCheck::SessionFiles, "/run/sudo/ts"),
    (CleanupCheck::SessionFiles, "/var/lib/sudo/lectured"),
    (CleanupCheck::SessionFiles, "/var/lib/systemd/linger"),
    (CleanupCheck::SessionFiles, "/run/systemd/users"),
];

/// A kind of System V object: where the kernel lists it, and the columns of its id, its owner and its creator.
struct SysvListing {
    path: &'static str,
    id: usize,
    owners: [usize; 2],
    /// The column of its mode, where that shows that the object is removed and only held by those who are attached.
    mode: Option<usize>,
    ipcrm_flag: &'static str,
}

/// `SHM_DEST` of a mode in that column: the segment is gone once its last process detaches, which may be a neighbour's.
const REMOVED: u32 = 0o1000;

const SYSV: [SysvListing; 3] = [
    SysvListing { path: "/proc/sysvipc/shm", id: 1, owners: [7, 9], mode: Some(2), ipcrm_flag: "-m" },
    SysvListing { path: "/proc/sysvipc/msg", id: 1, owners: [7, 9], mode: None, ipcrm_flag: "-q" },
    SysvListing { path: "/proc/sysvipc/sem", id: 1, owners: [4, 6], mode: None, ipcrm_flag: "-s" },
];

/// The leftovers of one tenant.
pub struct TenantLeftovers<'a> {
    pub account: &'a TenantAccount,
    pub home: &'a Path,
    /// The parent of all homes: another tenant may have taken in files of this one.
    pub homes: &'a Path,
    /// Further folders that every user may write to.
    pub shared: &'a [PathBuf],
    /// The tenants' own `/tmp` and the like.
    pub private: &'a PrivateTmp,
    /// A folder of the agent's own, to mount the message queues on if the machine has them mounted nowhere.
    pub queues: &'a Path,
}

impl TenantLeftovers<'_> {
    /// Removes what can be removed; [`TenantLeftovers::check_removed`] shows what is left.
    pub fn remove(&self) {
        for point in self.mounts().unwrap_or_default() {
            let _ = mounts::unmount(&point);
        }
        self.private.remove(self.account);
        // Remaining mounts are skipped.
        let Ok(mounts) = Mounts::of_this_machine() else { return };
        let _ = directory_walk::remove_at(self.home, &mounts, self.account.uid);
        for (_, folder) in self.folders() {
            self.remove_in(&self.folders_of(&folder, &mounts), &mounts);
        }
        for (_, path) in self.named_files() {
            let _ = directory_walk::remove_at(&path, &mounts, self.account.uid);
        }
        for path in self.dumps().unwrap_or_default() {
            let _ = directory_walk::remove_at(&path, &mounts, self.account.uid);
        }
        let _ = self.with_queues(|folder| {
            self.remove_in(&[folder.to_owned()], &Mounts::default());
            Ok(())
        });
        for listing in &SYSV {
            for id in self.sysv(listing).unwrap_or_default() {
                // A tool, since the kernel's own interface needs unsafe code.
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
        let mut findings = vec![self.check_home(), self.check_mounts()];
        findings.extend(self.private.check_removed(self.account));
        for (what, folder) in self.folders() {
            let looked_for = format!("files of uid {} in {}", self.account.uid, folder.display());
            let searched = file_search::owned_by(self.account.uid, |mounts| self.folders_of(&folder, mounts));
            findings.push(searched_finding(what, looked_for, searched));
        }
        findings.extend(self.named_files().into_iter().map(|(what, path)| check_path_removed(what, &path)));
        let looked_for = format!("dumps of uid {} in {DUMPS}", self.account.uid);
        findings.push(finding(CleanupCheck::SessionFiles, looked_for, paths_as_text(self.dumps())));
        findings.push(self.check_queues());
        findings.push(self.check_sysv());
        findings
    }

    /// Folders that every user may write to, and the folders of tenants.
    fn folders(&self) -> Vec<(CleanupCheck, PathBuf)> {
        let usual = SHARED.into_iter().map(|(what, folder)| (what, PathBuf::from(folder)));
        let further = self.shared.iter().map(|folder| (CleanupCheck::Tmp, folder.clone()));
        usual
            .chain(further)
            .chain(self.private.folders())
            .chain([(CleanupCheck::Home, self.homes.to_owned())])
            .collect()
    }

    fn remove_in(&self, folders: &[PathBuf], mounts: &Mounts) {
        let remove = |entry: &WalkEntry<'_>| {
            let _ = entry.remove(mounts, self.account.uid);
            ControlFlow::Continue(())
        };
        directory_walk::owned_by(SearchScope { id: self.account.uid, owners: None }, folders, mounts, remove);
    }

    /// The folder, and the mounts below it. Mounts among the homes belong to the machine's own users, elsewhere they stay, and are not for
    /// tenants.
    fn folders_of(&self, place: &Path, mounts: &Mounts) -> Vec<PathBuf> {
        let below = mounts.searchable_below(place).filter(|_| place != self.homes);
        std::iter::once(place.to_owned()).chain(below).collect()
    }

    fn check_home(&self) -> CleanupFinding {
        let mut found = check_path_removed(CleanupCheck::Home, self.home);
        if found.outcome != FindingOutcome::Gone
            && let Some(why) = mounts::why_root_is_refused(self.home)
        {
            found.detail = Some([found.detail.take().unwrap_or_default(), why].join(": "));
        }
        found
    }

    fn check_mounts(&self) -> CleanupFinding {
        finding(CleanupCheck::Home, format!("mounts of uid {}", self.account.uid), paths_as_text(self.mounts()))
    }

    fn check_queues(&self) -> CleanupFinding {
        let searched = self.with_queues(|folder| file_search::owned_by(self.account.uid, |_| vec![folder.to_owned()]));
        searched_finding(CleanupCheck::PosixIpc, format!("message queues of uid {}", self.account.uid), searched)
    }

    fn check_sysv(&self) -> CleanupFinding {
        let found: io::Result<Vec<Vec<String>>> = SYSV
            .iter()
            .map(|listing| Ok(self.sysv(listing)?.into_iter().map(|id| format!("{} {id}", listing.path)).collect()))
            .collect();
        finding(CleanupCheck::SysvIpc, format!("objects of uid {}", self.account.uid), found.map(|all| all.concat()))
    }

    /// The tenant's mounts, deepest first: in its home, in the runtime folder of its logins, in folders of its own elsewhere.
    fn mounts(&self) -> io::Result<Vec<PathBuf>> {
        let runtime = Path::new("/run/user").join(self.account.uid.to_string());
        Ok(Mounts::of_this_machine()?.of(self.account, &[self.home.to_owned(), runtime]))
    }

    /// systemd-coredump names a dump after the program, the uid, the boot, the pid and the time.
    fn dumps(&self) -> io::Result<Vec<PathBuf>> {
        let entries = match fs::read_dir(DUMPS) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mark = format!(".{}.", self.account.uid);
        let paths = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
        let is_of = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().contains(&mark));
        Ok(paths.into_iter().filter(is_of).collect())
    }

    fn named_files(&self) -> Vec<(CleanupCheck, PathBuf)> {
        let uid = self.account.uid.to_string();
        let both = |(what, folder): (CleanupCheck, &str)| {
            [self.account.name.as_str(), uid.as_str()].map(|name| (what, Path::new(folder).join(name)))
        };
        NAMED.into_iter().flat_map(both).collect()
    }

    /// Message queues are in no folder until they are mounted: here in a mount namespace of this check's own, which ends with it, so that
    /// concurrent checks do not interfere.
    fn with_queues<T: Default + Send>(&self, look: impl FnOnce(&Path) -> io::Result<T> + Send) -> io::Result<T> {
        fs::create_dir_all(self.queues)?;
        let apart = || {
            unshare(CloneFlags::CLONE_NEWNS)?;
            // No mount propagates to the machine.
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
            let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
            match mount(Some("mqueue"), self.queues, Some("mqueue"), flags, None::<&str>) {
                // An earlier agent that was killed may have left it mounted.
                Ok(()) | Err(nix::Error::EBUSY) => look(self.queues),
                // This kernel has none.
                Err(nix::Error::ENODEV) => Ok(T::default()),
                Err(error) => Err(error.into()),
            }
        };
        // A mount namespace belongs to a thread.
        let looked = std::thread::scope(|scope| scope.spawn(apart).join());
        looked.unwrap_or_else(|_| Err(io::Error::other("the look at message queues ended without an answer")))
    }

    fn sysv(&self, listing: &SysvListing) -> io::Result<Vec<String>> {
        let text = match fs::read_to_string(listing.path) {
            Ok(text) => text,
            // This kernel has none.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let uid = self.account.uid.to_string();
        let rows = text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
        let is_removed = |fields: &[&str]| {
            let mode = listing.mode.and_then(|column| u32::from_str_radix(fields.get(column)?, 8).ok());
            mode.is_some_and(|mode| mode & REMOVED != 0)
        };
        let is_owned = |fields: &[&str]| listing.owners.iter().any(|column| fields.get(*column) == Some(&uid.as_str()));
        let ours = rows.filter(|fields| is_owned(fields) && !is_removed(fields));
        Ok(ours.filter_map(|fields| fields.get(listing.id).map(|id| (*id).to_owned())).collect())
    }
}

fn paths_as_text(found: io::Result<Vec<PathBuf>>) -> io::Result<Vec<String>> {
    found.map(|paths| paths.iter().take(SHOWN).map(|path| directory_walk::shortened(path)).collect())
}

fn searched_finding(what: CleanupCheck, looked_for: String, searched: io::Result<SearchResult>) -> CleanupFinding {
    let (owned, unsettled) = match searched {
        Ok(searched) => (Ok(searched.owned), searched.unsettled),
        Err(error) => (Err(error), Vec::new()),
    };
    let mut found = finding(what, looked_for, paths_as_text(owned));
    if found.outcome == FindingOutcome::Gone && !unsettled.is_empty() {
        found.detail = Some(format!(
            "other accounts changed their folders meanwhile: {}",
            file_search::describe_errors(&unsettled)
        ));
    }
    found
}
