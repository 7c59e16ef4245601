//! What a tenant can leave on the machine outside its account: its home, files in shared places, mounts, jobs and IPC objects. All of
//! it is told by the owner's uid, which no other account ever had or will have.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use wire::proof::{Checked, Finding};

use super::accounts::Account;
use crate::tenant::{finding, look_at_path};

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
const NAMED: [(Checked, &str); 6] = [
    (Checked::Cron, "/var/spool/cron/crontabs"),
    (Checked::Mail, "/var/spool/mail"),
    (Checked::SessionFiles, "/run/user"),
    (Checked::SessionFiles, "/run/sudo/ts"),
    (Checked::SessionFiles, "/var/lib/sudo/lectured"),
    (Checked::SessionFiles, "/var/lib/systemd/linger"),
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
    /// A folder of the agent's own, to look at message queues through where the machine shows them nowhere.
    pub queues: &'a Path,
}

impl Traces<'_> {
    /// Removes what can be removed; [`Traces::look`] tells whether that was all.
    pub fn remove(&self) {
        self.unmount();
        // Below a mount that would not go lies what is another's.
        if self.mounts().is_ok_and(|mounts| mounts.is_empty()) {
            let _ = remove_tree(self.home);
        }
        for (_, folder) in SHARED {
            for path in self.owned_in(Path::new(folder)).unwrap_or_default() {
                let _ = remove_tree(&path);
            }
        }
        for (_, path) in self.named() {
            let _ = remove_tree(&path);
        }
        let _ = self.with_queues(|folder| {
            self.owned_in(folder)?.iter().for_each(|path| drop(fs::remove_file(path)));
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
        for (what, folder) in SHARED {
            let found = self.owned_in(Path::new(folder));
            findings.push(finding(what, format!("files of uid {} in {folder}", self.account.uid), shown(found)));
        }
        findings.extend(self.named().into_iter().map(|(what, path)| look_at_path(what, &path)));
        findings.push(self.look_at_queues());
        findings.push(self.look_at_sysv());
        findings
    }

    fn look_at_mounts(&self) -> Finding {
        finding(Checked::Home, format!("mounts at or below {}", self.home.display()), shown(self.mounts()))
    }

    fn look_at_queues(&self) -> Finding {
        let found = self.with_queues(|folder| self.owned_in(folder));
        finding(Checked::PosixIpc, format!("message queues of uid {}", self.account.uid), shown(found))
    }

    fn look_at_sysv(&self) -> Finding {
        let found: io::Result<Vec<Vec<String>>> = SYSV
            .iter()
            .map(|listing| Ok(self.sysv(listing)?.into_iter().map(|id| format!("{} {id}", listing.path)).collect()))
            .collect();
        finding(Checked::SysvIpc, format!("objects of uid {}", self.account.uid), found.map(|all| all.concat()))
    }

    /// Mount points at or below the home, deepest first.
    fn mounts(&self) -> io::Result<Vec<PathBuf>> {
        let table = fs::read_to_string("/proc/self/mountinfo")?;
        let points =
            table.lines().filter_map(|line| line.split(' ').nth(4)).map(|field| PathBuf::from(unescape(field)));
        let mut below: Vec<PathBuf> = points.filter(|point| point.starts_with(self.home)).collect();
        below.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
        Ok(below)
    }

    fn unmount(&self) {
        for point in self.mounts().unwrap_or_default() {
            // Not followed: the tenant may have put a link in its place. Detached: what holds it open is dead or dies.
            let _ = umount2(&point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW);
        }
    }

    fn named(&self) -> Vec<(Checked, PathBuf)> {
        let uid = self.account.uid.to_string();
        let both = |(what, folder): (Checked, &str)| {
            [self.account.name.as_str(), uid.as_str()].map(|name| (what, Path::new(folder).join(name)))
        };
        NAMED.into_iter().flat_map(both).collect()
    }

    /// What the tenant owns in a folder, at any depth, but not below what it owns: that goes with it.
    fn owned_in(&self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        let mut owned = Vec::new();
        let mut folders = vec![folder.to_owned()];
        while let Some(folder) = folders.pop() {
            let entries = match fs::read_dir(&folder) {
                Ok(entries) => entries,
                // Others' files come and go while this looks.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            for entry in entries {
                let Ok(entry) = entry else { continue };
                let metadata = match entry.metadata() {
                    Ok(metadata) => metadata,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    Err(error) => return Err(error),
                };
                if metadata.uid() == self.account.uid || metadata.gid() == self.account.uid {
                    owned.push(entry.path());
                } else if metadata.is_dir() {
                    folders.push(entry.path());
                }
            }
        }
        owned.sort();
        Ok(owned)
    }

    /// Message queues live in no folder until one is mounted.
    fn with_queues<T: Default>(&self, look: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
        fs::create_dir_all(self.queues)?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        match mount(Some("mqueue"), self.queues, Some("mqueue"), flags, None::<&str>) {
            Ok(()) => {}
            // This kernel has none.
            Err(nix::Error::ENODEV) => return Ok(T::default()),
            Err(error) => return Err(error.into()),
        }
        let looked = look(self.queues);
        umount2(self.queues, MntFlags::MNT_DETACH)?;
        looked
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
    found.map(|paths| paths.iter().map(|path| path.display().to_string()).collect())
}

/// Removes a file or a folder with all in it, following no link, also where it was made immutable.
fn remove_tree(path: &Path) -> io::Result<()> {
    let remove = || {
        let metadata = path.symlink_metadata()?;
        if metadata.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
    };
    match remove() {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            // The tool follows no link below the folder that it is given.
            let mut chattr = Command::new("chattr");
            chattr.args(["-R", "-f", "-i", "-a", "--"]).arg(path).stdout(Stdio::null()).stderr(Stdio::null());
            let _ = chattr.status();
            remove()
        }
        other => other,
    }
}

/// Blanks and the like stand as octal numbers in the table of mounts (proc(5)).
fn unescape(field: &str) -> String {
    ["\\040", "\\011", "\\012", "\\134"]
        .into_iter()
        .zip([" ", "\t", "\n", "\\"])
        .fold(field.to_owned(), |text, (escaped, plain)| text.replace(escaped, plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_point_is_read_as_the_path_that_it_is() {
        assert_eq!(unescape(r"/home/a\040b\134040c"), r"/home/a b\040c");
    }
}
