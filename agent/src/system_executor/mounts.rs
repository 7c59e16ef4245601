//! The machine's mounts, and which of them are a tenant's: in its own folders, or through FUSE, which needs no root.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, umount2};

use super::accounts::TenantAccount;
use super::directory_walk;

/// File systems whose files are the kernel's own, and no account's. Reading them may fail for reasons of their own (`/proc/<pid>` of a
/// process that exits).
const PSEUDO: [&str; 18] = [
    "autofs",
    "binfmt_misc",
    "bpf",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "efivarfs",
    "fusectl",
    "mqueue",
    "nsfs",
    "proc",
    "pstore",
    "rpc_pipefs",
    "securityfs",
    "sysfs",
    "tracefs",
];

/// File systems on the machine's own disks, or in its memory.
const LOCAL: [&str; 9] = ["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs", "zfs"];

/// The mounts of this machine by mount point. Of several on one mount point the last, which is the visible one.
#[derive(Debug, Default)]
pub struct Mounts {
    by_path: BTreeMap<PathBuf, Mount>,
    /// The last components of their paths, for a quick check.
    names: BTreeSet<OsString>,
}

#[derive(Debug, PartialEq, Eq)]
struct Mount {
    /// Its files are provided by a user's program.
    is_fuse: bool,
    is_pseudo: bool,
    /// The user that mounted it, as FUSE records it.
    user: Option<u32>,
}

impl Mounts {
    /// # Errors
    /// The table cannot be read.
    pub fn of_this_machine() -> io::Result<Self> {
        Ok(Self::read(&fs::read("/proc/self/mountinfo")?))
    }

    /// proc(5): the fourth field is the mount point; behind a dash come type, source and options of the file system.
    fn read(table: &[u8]) -> Self {
        let mount = |line: &[u8]| {
            let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
            let point = unescaped(fields.get(4)?);
            let dash = fields.iter().skip(6).position(|field| *field == b"-")? + 6;
            let (kind, options) = (fields.get(dash + 1)?, fields.get(dash + 3).copied().unwrap_or_default());
            let user = options
                .split(|byte| *byte == b',')
                .find_map(|option| std::str::from_utf8(option.strip_prefix(b"user_id=")?).ok()?.parse().ok());
            let is_fuse = *kind == b"fuse" || kind.starts_with(b"fuse.") || *kind == b"fuseblk";
            let is_pseudo = PSEUDO.iter().any(|name| name.as_bytes() == *kind);
            Some((point, Mount { is_fuse, is_pseudo, user: user.filter(|_| is_fuse) }))
        };
        let by_path: BTreeMap<PathBuf, Mount> = table.split(|byte| *byte == b'\n').filter_map(mount).collect();
        let names = by_path.keys().filter_map(|point| point.file_name().map(OsStr::to_owned)).collect();
        Self { by_path, names }
    }

    /// Whether the path is a mount point.
    #[must_use]
    pub fn has(&self, path: &Path) -> bool {
        self.by_path.contains_key(path)
    }

    /// Whether any mount point has this name.
    #[must_use]
    pub fn has_named(&self, name: &OsStr) -> bool {
        self.names.contains(name)
    }

    /// Mount points strictly below the folder whose files are to be searched: files that a user's program or the kernel provides are no
    /// account's.
    pub fn searchable_below<'a>(&'a self, folder: &'a Path) -> impl Iterator<Item = PathBuf> + 'a {
        let below = self.by_path.iter().filter(move |(point, _)| point.starts_with(folder) && *point != folder);
        below.filter(|(_, mount)| !mount.is_fuse && !mount.is_pseudo).map(|(point, _)| point.clone())
    }

    /// The tenant's mounts, deepest first: at or below its folders, mounts that are shown as its own, and FUSE mounts anywhere.
    #[must_use]
    pub fn of(&self, account: &TenantAccount, folders: &[PathBuf]) -> Vec<PathBuf> {
        let is_the_tenants = |point: &Path, mount: &Mount| {
            mount.user == Some(account.uid)
                || folders.iter().any(|folder| point.starts_with(folder))
                || point
                    .ancestors()
                    .any(|folder| fs::symlink_metadata(folder).is_ok_and(|metadata| metadata.uid() == account.uid))
        };
        let theirs = self.by_path.iter().filter(|(point, mount)| is_the_tenants(point, mount));
        let mut theirs: Vec<PathBuf> = theirs.map(|(point, _)| point.clone()).collect();
        theirs.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
        theirs
    }
}

/// The mount points of local file systems on which a file can have the rights of its owner. A file system of containers is theirs, and a part
/// of another file system that is mounted a second time is searched there.
///
/// # Errors
/// The table cannot be read.
pub fn local_with_setuid() -> io::Result<Vec<PathBuf>> {
    Ok(local_mounts(&fs::read("/proc/self/mountinfo")?))
}

fn local_mounts(table: &[u8]) -> Vec<PathBuf> {
    let point = |line: &[u8]| {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let (part, point, options) = (fields.get(3)?, unescaped(fields.get(4)?), fields.get(5)?);
        let dash = fields.iter().skip(6).position(|field| *field == b"-")? + 6;
        let kind = std::str::from_utf8(fields.get(dash + 1)?).ok()?;
        let is_root = point == Path::new("/");
        let is_local = LOCAL.contains(&kind) || is_root;
        let is_nosuid = options.split(|byte| *byte == b',').any(|option| option == b"nosuid");
        (is_local && !is_nosuid && (is_root || *part == b"/")).then_some(point)
    };
    let points: BTreeSet<PathBuf> = table.split(|byte| *byte == b'\n').filter_map(point).collect();
    points.into_iter().collect()
}

/// Unmounts it, without following a link that another user may have placed on the path.
///
/// # Errors
/// It is still mounted, or something else is there by now.
pub fn unmount(point: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (point.parent(), point.file_name()) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    let folder = directory_walk::open_without_links(parent)?;
    // Detached: the processes that hold it open are dead or about to exit.
    Ok(umount2(&directory_walk::path_in(folder.as_fd(), name), MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)?)
}

/// Blanks and the like are octal numbers in the table.
fn unescaped(field: &[u8]) -> PathBuf {
    let (mut bytes, mut rest) = (Vec::with_capacity(field.len()), field);
    while let Some((byte, after)) = rest.split_first() {
        let octal = (*byte == b'\\').then(|| after.get(..3)).flatten();
        let number = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match number {
            Some(number) => {
                bytes.push(number);
                rest = &after[3..];
            }
            None => {
                bytes.push(*byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"24 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
        30 24 0:26 / /home/tena/a\\040b\\134040c rw shared:2 master:1 - tmpfs tmpfs rw,user_id=70001\n\
        31 24 0:27 / /opt/data rw - fuse.sshfs host: rw,user_id=70001,group_id=70001\n\
        32 24 0:28 / /tmp/mine rw - fuse host: rw,user_id=1000\n\
        33 24 0:29 / /tmp/scratch rw - tmpfs tmpfs rw\n\
        34 24 0:30 / /tmp/proc rw - proc proc rw\n\
        35 24 0:31 / /tmp/groups rw - cgroup2 cgroup2 rw\n\
        cut off\n";

    #[test]
    fn mount_belongs_to_the_tenant_by_path_and_by_mounting_user() {
        let mounts = Mounts::read(TABLE);
        let account = TenantAccount { name: "tena".into(), uid: 70_001 };
        let theirs = mounts.of(&account, &[PathBuf::from("/home/tena")]);
        assert_eq!(theirs, [PathBuf::from("/home/tena/a b\\040c"), PathBuf::from("/opt/data")]);
        assert!(mounts.has(Path::new("/tmp/mine")) && !mounts.has(Path::new("/tmp")));
    }

    #[test]
    fn fuse_and_pseudo_file_systems_are_not_searched() {
        let mounts = Mounts::read(TABLE);
        let below: Vec<_> = mounts.searchable_below(Path::new("/tmp")).collect();
        assert_eq!(below, [PathBuf::from("/tmp/scratch")]);
    }
}
