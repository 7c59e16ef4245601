//! What a tenant can leave on the machine outside its account: its home, files in shared places, mounts, jobs and IPC objects. All of
//! it is told by the owner's uid, which no other account ever had or will have.

use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use wire::proof::{Checked, Finding, Outcome};

use super::accounts::Account;
use super::mounts::{self, Mounts};
use super::private::Private;
use super::search::{self, Searched};
use super::walk::{self, Entry, Scope};
use crate::tenant::{finding, look_at_path};

/// As many paths as a finding names.
const SHOWN: usize = 20;
/// Where a machine keeps what its programs held when they crashed, under names with the uid in them.
const DUMPS: &str = "/var/lib/systemd/coredump";

/// Places where every user may leave files, and what a look at them is called in the proof.
const SHARED: [(Checked, &str); 12] = [
    (Checked::Tmp, "/tmp"),
    (Checked::VarTmp, "/var/tmp"),
    (Checked::DevShm, "/dev/shm"),
    (Checked::PosixIpc, "/dev/mqueue"),
    (Checked::Mail, "/var/mail"),
    (Checked::Cron, "/var/spool/cron"),
    (Checked::At, "/var/spool/at"),
    (Checked::At, "/var/spool/atjobs"),
    (Checked::SessionFiles, "/run/user"),
    (Checked::SessionFiles, "/run/lock"),
    (Checked::SessionFiles, "/run/screen"),
    (Checked::SessionFiles, "/var/crash"),
];

/// Files that carry the tenant's name or uid and belong to root.
const NAMED: [(Checked, &str); 7] = [
    (Checked::Cron, "/var/spool/cron/crontabs"),
    (Checked::Mail, "/var/spool/mail"),
    (Checked::SessionFiles, "/run/user"),
    (Checked::SessionFiles, "/run/sudo/ts"),
    (Checked::SessionFiles, "/var/lib/sudo/lectured"),
    (Checked::SessionFiles, "/var/lib/systemd/linger"),
    (Checked::SessionFiles, "/run/systemd/users"),
];

/// A kind of System V object: where the kernel lists it, in which columns its id, its owner and its maker stand.
struct Listing {
    path: &'static str,
    id: usize,
    owners: [usize; 2],
    ipcrm_flag: &'static str,
}

const SYSV: [Listing; 3] = [
    Listing { path: "/proc/sysvipc/shm", id: 1, owners: [7, 9], ipcrm_flag: "-m" },
    Listing { path: "/proc/sysvipc/msg", id: 1, owners: [7, 9], ipcrm_flag: "-q" },
    Listing { path: "/proc/sysvipc/sem", id: 1, owners: [4, 6], ipcrm_flag: "-s" },
];

/// What one tenant can have left.
pub struct Traces<'a> {
    pub account: &'a Account,
    pub home: &'a Path,
    /// Where all homes are: another tenant may have taken in what this one left.
    pub homes: &'a Path,
    /// Further places where every user may leave files.
    pub shared: &'a [PathBuf],
    /// The tenants' own `/tmp` and the like.
    pub private: &'a Private,
    /// A folder of the agent's own, to look at message queues through where the machine shows them nowhere.
    pub queues: &'a Path,
}

impl Traces<'_> {
    /// Removes what can be removed; [`Traces::look`] tells whether that was all.
    pub fn remove(&self) {
        for point in self.mounts().unwrap_or_default() {
            let _ = mounts::unmount(&point);
        }
        self.private.remove(self.account);
        // What is mounted still is passed by.
        let Ok(mounts) = Mounts::of_this_machine() else { return };
        let _ = walk::remove_at(self.home, &mounts, self.account.uid);
        for (_, folder) in self.places() {
            self.remove_in(&self.folders_of(&folder, &mounts), &mounts);
        }
        for (_, path) in self.named() {
            let _ = walk::remove_at(&path, &mounts, self.account.uid);
        }
        for path in self.dumps().unwrap_or_default() {
            let _ = walk::remove_at(&path, &mounts, self.account.uid);
        }
        let _ = self.with_queues(|folder| {
            self.remove_in(&[folder.to_owned()], &Mounts::default());
            Ok(())
        });
        for listing in &SYSV {
            for id in self.sysv(listing).unwrap_or_default() {
                // A tool, since the kernel's own interface needs unsafe code.
                let _ = Command::new("ipcrm").args([listing.ipcrm_flag, &id]).stderr(Stdio::null()).status();
            }
        }
    }

    /// Looks for all of it.
    #[must_use]
    pub fn look(&self) -> Vec<Finding> {
        let mut findings = vec![look_at_path(Checked::Home, self.home), self.look_at_mounts()];
        findings.extend(self.private.look(self.account));
        for (what, folder) in self.places() {
            let looked_for = format!("files of uid {} in {}", self.account.uid, folder.display());
            let searched = search::owned_by(self.account.uid, |mounts| self.folders_of(&folder, mounts));
            findings.push(searched_finding(what, looked_for, searched));
        }
        findings.extend(self.named().into_iter().map(|(what, path)| look_at_path(what, &path)));
        let looked_for = format!("dumps of uid {} in {DUMPS}", self.account.uid);
        findings.push(finding(Checked::SessionFiles, looked_for, shown(self.dumps())));
        findings.push(self.look_at_queues());
        findings.push(self.look_at_sysv());
        findings
    }

    /// Where every user may leave files, and where tenants have theirs.
    fn places(&self) -> Vec<(Checked, PathBuf)> {
        let usual = SHARED.into_iter().map(|(what, folder)| (what, PathBuf::from(folder)));
        let further = self.shared.iter().map(|folder| (Checked::Tmp, folder.clone()));
        usual.chain(further).chain(self.private.places()).chain([(Checked::Home, self.homes.to_owned())]).collect()
    }

    fn remove_in(&self, folders: &[PathBuf], mounts: &Mounts) {
        let remove = |entry: &Entry<'_>| {
            let _ = entry.remove(mounts, self.account.uid);
            ControlFlow::Continue(())
        };
        walk::owned_by(Scope { id: self.account.uid, owners: None }, folders, mounts, remove);
    }

    /// The place, and what is mounted below it. Among the homes that is the machine's own people's, elsewhere kept and not for tenants.
    fn folders_of(&self, place: &Path, mounts: &Mounts) -> Vec<PathBuf> {
        let below = mounts.to_be_looked_into_below(place).filter(|_| place != self.homes);
        std::iter::once(place.to_owned()).chain(below).collect()
    }

    fn look_at_mounts(&self) -> Finding {
        finding(Checked::Home, format!("mounts of uid {}", self.account.uid), shown(self.mounts()))
    }

    fn look_at_queues(&self) -> Finding {
        let searched = self.with_queues(|folder| search::owned_by(self.account.uid, |_| vec![folder.to_owned()]));
        searched_finding(Checked::PosixIpc, format!("message queues of uid {}", self.account.uid), searched)
    }

    fn look_at_sysv(&self) -> Finding {
        let found: io::Result<Vec<Vec<String>>> = SYSV
            .iter()
            .map(|listing| Ok(self.sysv(listing)?.into_iter().map(|id| format!("{} {id}", listing.path)).collect()))
            .collect();
        finding(Checked::SysvIpc, format!("objects of uid {}", self.account.uid), found.map(|all| all.concat()))
    }

    /// What it has mounted, deepest first: in its home, where a login has its runtime files, in folders of its own elsewhere.
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

    fn named(&self) -> Vec<(Checked, PathBuf)> {
        let uid = self.account.uid.to_string();
        let both = |(what, folder): (Checked, &str)| {
            [self.account.name.as_str(), uid.as_str()].map(|name| (what, Path::new(folder).join(name)))
        };
        NAMED.into_iter().flat_map(both).collect()
    }

    /// Message queues live in no folder until one is mounted: here in a mount namespace of this look's own, which ends with it, so that looks
    /// at once do not meet.
    fn with_queues<T: Default + Send>(&self, look: impl FnOnce(&Path) -> io::Result<T> + Send) -> io::Result<T> {
        fs::create_dir_all(self.queues)?;
        let apart = || {
            unshare(CloneFlags::CLONE_NEWNS)?;
            // Nothing of it reaches the machine.
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
            let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
            match mount(Some("mqueue"), self.queues, Some("mqueue"), flags, None::<&str>) {
                // An agent of before that was killed may have left it mounted.
                Ok(()) | Err(nix::Error::EBUSY) => look(self.queues),
                // This kernel has none.
                Err(nix::Error::ENODEV) => Ok(T::default()),
                Err(error) => Err(error.into()),
            }
        };
        // A namespace is a thread's.
        let looked = std::thread::scope(|scope| scope.spawn(apart).join());
        looked.unwrap_or_else(|_| Err(io::Error::other("the look at message queues ended without an answer")))
    }

    fn sysv(&self, listing: &Listing) -> io::Result<Vec<String>> {
        let text = match fs::read_to_string(listing.path) {
            Ok(text) => text,
            // This kernel has none.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let uid = self.account.uid.to_string();
        let rows = text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
        let ours = rows.filter(|fields| listing.owners.iter().any(|column| fields.get(*column) == Some(&uid.as_str())));
        Ok(ours.filter_map(|fields| fields.get(listing.id).map(|id| (*id).to_owned())).collect())
    }
}

fn shown(found: io::Result<Vec<PathBuf>>) -> io::Result<Vec<String>> {
    found.map(|paths| paths.iter().take(SHOWN).map(|path| walk::shortened(path)).collect())
}

fn searched_finding(what: Checked, looked_for: String, searched: io::Result<Searched>) -> Finding {
    let (owned, unsettled) = match searched {
        Ok(searched) => (Ok(searched.owned), searched.unsettled),
        Err(error) => (Err(error), Vec::new()),
    };
    let mut found = finding(what, looked_for, shown(owned));
    if found.outcome == Outcome::Gone && !unsettled.is_empty() {
        found.detail = Some(format!("other accounts changed their folders meanwhile: {}", search::named(&unsettled)));
    }
    found
}
