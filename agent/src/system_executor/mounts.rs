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

/// What has the files of a local file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Medium {
    /// A disk of the machine, which the table of mounts names by its device number.
    Disk,
    /// Disks of the machine that several file systems share, as datasets of one pool.
    Pool,
    /// Its memory: no storage.
    Memory,
}

/// The local file systems: the kernel alone answers for them, from what the machine itself has. Of all others a program answers (FUSE), or
/// another machine (NFS, CIFS, Ceph, Lustre): they may not answer at all, and are no part of the machine. Not in the table although they
/// are local: what other file systems are mounted again as (overlay), and images (squashfs, iso9660) and boot partitions (vfat), which are no
/// storage for tenants and have no files with other rights than their readers'.
const LOCAL: [(&str, Medium); 9] = [
    ("bcachefs", Medium::Disk),
    ("btrfs", Medium::Disk),
    ("ext2", Medium::Disk),
    ("ext3", Medium::Disk),
    ("ext4", Medium::Disk),
    ("f2fs", Medium::Disk),
    ("tmpfs", Medium::Memory),
    ("xfs", Medium::Disk),
    ("zfs", Medium::Pool),
];

/// Other file systems that the kernel answers for, and that paths lead through.
const PASSED: [&str; 6] = ["devtmpfs", "iso9660", "overlay", "ramfs", "squashfs", "vfat"];

fn medium(kind: &[u8]) -> Option<Medium> {
    LOCAL.iter().find(|(name, _)| name.as_bytes() == kind).map(|(_, medium)| *medium)
}

/// The table of this process's mounts. The kernel reads it from its own memory, and asks no file system.
const TABLE: &str = "/proc/thread-self/mountinfo";

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
    /// Neither a program nor another machine has to answer for it.
    is_local: bool,
    /// The user that mounted it, as FUSE records it.
    user: Option<u32>,
}

impl Mounts {
    /// # Errors
    /// The table cannot be read.
    pub fn of_this_machine() -> io::Result<Self> {
        Ok(Self::read(&fs::read(TABLE)?))
    }

    fn read(table: &[u8]) -> Self {
        let mount = |line: MountLine<'_>| {
            let user = line
                .options
                .split(|byte| *byte == b',')
                .find_map(|option| std::str::from_utf8(option.strip_prefix(b"user_id=")?).ok()?.parse().ok());
            let (is_fuse, is_pseudo, is_local) = (line.is_fuse(), line.is_pseudo(), line.is_local());
            (line.point, Mount { is_fuse, is_pseudo, is_local, user: user.filter(|_| is_fuse) })
        };
        let by_path: BTreeMap<PathBuf, Mount> = mount_lines(table).map(mount).collect();
        let names = by_path.keys().filter_map(|point| point.file_name().map(OsStr::to_owned)).collect();
        Self { by_path, names }
    }

    /// Whether the path, without links, is on a local file system: its files can be asked for, and the answer comes.
    #[must_use]
    pub fn is_on_local(&self, path: &Path) -> bool {
        path.ancestors().find_map(|folder| self.by_path.get(folder)).is_none_or(|mount| mount.is_local)
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
        // What is not local may not answer, and is not asked: FUSE says whose it is, and users mount nothing else.
        let is_of_account =
            |folder: &Path| fs::symlink_metadata(folder).is_ok_and(|metadata| metadata.uid() == account.uid);
        let is_the_tenants = |point: &Path, mount: &Mount| {
            mount.user == Some(account.uid)
                || folders.iter().any(|folder| point.starts_with(folder))
                || point.ancestors().filter(|folder| self.is_on_local(folder)).any(is_of_account)
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
    Ok(local_mounts(&fs::read(TABLE)?))
}

fn local_mounts(table: &[u8]) -> Vec<PathBuf> {
    let is_searched = |line: &MountLine<'_>| {
        let is_root = line.point == Path::new("/");
        let is_local = medium(line.kind).is_some() || is_root;
        is_local && !line.has_flag(b"nosuid") && (is_root || line.part == b"/")
    };
    let points: BTreeSet<PathBuf> = mount_lines(table).filter(is_searched).map(|line| line.point).collect();
    points.into_iter().collect()
}

/// A file system on the machine's own disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalDisk {
    /// The disks that it is on. File systems with the same share their space.
    pub pool: String,
    /// Where it is asked.
    pub point: PathBuf,
}

/// The file systems on the machine's own disks, each once, wherever it is mounted. In a container without any, its root.
///
/// # Errors
/// The table cannot be read.
pub fn local_disks() -> io::Result<Vec<LocalDisk>> {
    Ok(disks_of(&fs::read(TABLE)?))
}

fn disks_of(table: &[u8]) -> Vec<LocalDisk> {
    let lines: Vec<MountLine<'_>> = mount_lines(table).collect();
    // What is mounted later at the mount point, or at a folder above, answers in place of it.
    let is_hidden = |at: usize| lines[at + 1..].iter().any(|later| lines[at].point.starts_with(&later.point));
    let mut by_device: BTreeMap<&[u8], LocalDisk> = BTreeMap::new();
    for (at, line) in lines.iter().enumerate() {
        let pool = match medium(line.kind) {
            Some(Medium::Disk) => line.device,
            Some(Medium::Pool) => line.source.split(|byte| *byte == b'/').next().unwrap_or_default(),
            Some(Medium::Memory) | None => continue,
        };
        if !is_hidden(at) {
            let pool = String::from_utf8_lossy(pool).into_owned();
            by_device.entry(line.device).or_insert_with(|| LocalDisk { pool, point: line.point.clone() });
        }
    }
    if by_device.is_empty()
        && let Some(root) = lines.iter().rfind(|line| line.point == Path::new("/")).filter(|root| root.is_local())
    {
        return vec![LocalDisk { pool: String::from_utf8_lossy(root.device).into_owned(), point: root.point.clone() }];
    }
    by_device.into_values().collect()
}

/// Why root has no rights at the path (without links), where its file system is not the machine's own, and what to do about it. `None` where it
/// is on one that knows this machine's root, or where the table cannot be read.
#[must_use]
pub fn why_root_is_refused(path: &Path) -> Option<String> {
    refusal_of(&fs::read(TABLE).ok()?, path)
}

fn refusal_of(table: &[u8], path: &Path) -> Option<String> {
    let lines: Vec<MountLine<'_>> = mount_lines(table).collect();
    // The last one of those at the deepest mount point answers.
    let below = lines.iter().filter(|line| path.starts_with(&line.point));
    let line = below.max_by_key(|line| line.point.components().count()).filter(|line| !line.is_local())?;
    let (kind, source) = (String::from_utf8_lossy(line.kind), unescaped(line.source));
    Some(format!(
        "{} is {kind} of {}, which may give this machine's root no rights; set SVC_NODE_AGENT_HOMES to a folder on a disk of the machine, or have \
         its server trust root (NFS: no_root_squash)",
        line.point.display(),
        source.display()
    ))
}

/// A file system that bounds what each user stores on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaFileSystem {
    /// Its block device, by which quotas are set.
    pub device: PathBuf,
    pub point: PathBuf,
}

/// The file systems on the machine's own disks that are mounted with quotas of users, each once.
///
/// # Errors
/// The table cannot be read.
pub fn with_user_quotas() -> io::Result<Vec<QuotaFileSystem>> {
    Ok(quota_file_systems(&fs::read(TABLE)?).into_values().collect())
}

/// Whether the path, without links, is on one of them.
///
/// # Errors
/// The table cannot be read.
pub fn has_user_quotas(path: &Path) -> io::Result<bool> {
    Ok(is_on_quota(&fs::read(TABLE)?, path))
}

fn is_on_quota(table: &[u8], path: &Path) -> bool {
    let lines: Vec<MountLine<'_>> = mount_lines(table).collect();
    // The last one of those at the deepest mount point answers.
    let below = lines.iter().filter(|line| path.starts_with(&line.point));
    below.max_by_key(|line| line.point.components().count()).is_some_and(MountLine::has_user_quotas)
}

fn quota_file_systems(table: &[u8]) -> BTreeMap<&[u8], QuotaFileSystem> {
    let mut by_device = BTreeMap::new();
    for line in mount_lines(table).filter(MountLine::has_user_quotas) {
        // The source may be a name that no node has, as /dev/root.
        let by_number = Path::new("/dev/block").join(String::from_utf8_lossy(line.device).as_ref());
        let device = if by_number.exists() { by_number } else { unescaped(line.source) };
        by_device.entry(line.device).or_insert(QuotaFileSystem { device, point: line.point });
    }
    by_device
}

/// A line of the table, as in proc(5).
struct MountLine<'a> {
    /// The number of its device; of a file system without one, a number of its own.
    device: &'a [u8],
    /// The folder of the file system that is mounted.
    part: &'a [u8],
    point: PathBuf,
    flags: &'a [u8],
    kind: &'a [u8],
    source: &'a [u8],
    options: &'a [u8],
}

impl MountLine<'_> {
    fn is_fuse(&self) -> bool {
        self.kind == b"fuse" || self.kind.starts_with(b"fuse.") || self.kind == b"fuseblk"
    }

    fn is_pseudo(&self) -> bool {
        PSEUDO.iter().any(|name| name.as_bytes() == self.kind)
    }

    /// A path may lead through it without a wait for a program or another machine.
    fn is_local(&self) -> bool {
        // autofs asks a program.
        let is_kernels = self.is_pseudo() && self.kind != b"autofs";
        medium(self.kind).is_some() || is_kernels || PASSED.iter().any(|name| name.as_bytes() == self.kind)
    }

    /// ext4 and f2fs name the file of quotas in the option, where they are in a file.
    fn has_user_quotas(&self) -> bool {
        let is_it = |option: &[u8]| option == b"usrquota" || option.starts_with(b"usrjquota=");
        medium(self.kind) == Some(Medium::Disk) && self.options.split(|byte| *byte == b',').any(is_it)
    }

    fn has_flag(&self, flag: &[u8]) -> bool {
        self.flags.split(|byte| *byte == b',').any(|option| option == flag)
    }
}

fn mount_lines(table: &[u8]) -> impl Iterator<Item = MountLine<'_>> {
    table.split(|byte| *byte == b'\n').filter_map(|line| {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let (device, part, flags) = (*fields.get(2)?, *fields.get(3)?, *fields.get(5)?);
        let point = unescaped(fields.get(4)?);
        // Optional fields end at the dash; behind it come type, source and options of the file system.
        let dash = fields.iter().skip(6).position(|field| *field == b"-")? + 6;
        let kind = *fields.get(dash + 1)?;
        let field = |at: usize| fields.get(dash + at).copied().unwrap_or_default();
        Some(MountLine { device, part, point, flags, kind, source: field(2), options: field(3) })
    })
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
    use crate::bounded_reading::hanging_mount::OwnMounts;
    use crate::terminal::skipped_tests;

    const MOUNTS: &[u8] = b"24 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
        30 24 0:26 / /home/tena/a\\040b\\134040c rw shared:2 master:1 - tmpfs tmpfs rw,user_id=70001\n\
        31 24 0:27 / /opt/data rw - fuse.sshfs host: rw,user_id=70001,group_id=70001\n\
        32 24 0:28 / /tmp/mine rw - fuse host: rw,user_id=1000\n\
        33 24 0:29 / /tmp/scratch rw - tmpfs tmpfs rw\n\
        34 24 0:30 / /tmp/proc rw - proc proc rw\n\
        35 24 0:31 / /tmp/groups rw - cgroup2 cgroup2 rw\n\
        cut off\n";

    #[test]
    fn mount_belongs_to_the_tenant_by_path_and_by_mounting_user() {
        let mounts = Mounts::read(MOUNTS);
        let account = TenantAccount { name: "tena".into(), uid: 70_001 };
        let theirs = mounts.of(&account, &[PathBuf::from("/home/tena")]);
        assert_eq!(theirs, [PathBuf::from("/home/tena/a b\\040c"), PathBuf::from("/opt/data")]);
        assert!(mounts.has(Path::new("/tmp/mine")) && !mounts.has(Path::new("/tmp")));
    }

    #[test]
    fn local_disks_are_counted_once_and_neither_memory_nor_programs_nor_other_machines() {
        let table = b"24 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n\
            25 24 259:2 /srv /mnt/again rw - ext4 /dev/nvme0n1p2 rw\n\
            26 24 259:9 / /data rw - xfs /dev/nvme1n1 rw\n\
            27 24 0:40 /@home /home rw - btrfs /dev/sdb rw\n\
            28 24 0:40 /@log /var/log rw - btrfs /dev/sdb rw\n\
            29 24 0:41 / /tank rw - zfs tank rw\n\
            30 24 0:42 / /tank/b rw - zfs tank/b rw\n\
            31 24 0:43 / /dev/shm rw - tmpfs tmpfs rw\n\
            32 24 0:44 / /mnt/models rw - fuse.s3fs s3 rw,user_id=0,allow_other\n\
            33 24 8:17 / /mnt/ntfs rw - fuseblk /dev/sdc1 rw,user_id=0\n\
            34 24 0:45 / /mnt/nfs rw - nfs4 filer:/ rw\n\
            35 24 0:46 / /var/lib/containers/a rw - overlay overlay rw\n\
            36 24 8:33 / /mnt/hidden rw - ext4 /dev/sdd1 rw\n\
            37 24 0:47 / /mnt rw - fuse x rw,user_id=0\n";
        let found: Vec<_> = disks_of(table).into_iter().map(|disk| (disk.pool, disk.point)).collect();
        let expected = [("0:40", "/home"), ("tank", "/tank"), ("tank", "/tank/b"), ("259:2", "/"), ("259:9", "/data")];
        assert_eq!(found, expected.map(|(pool, point)| (pool.to_owned(), PathBuf::from(point))));
        let container = b"1 0 0:50 / / rw - overlay overlay rw\n2 1 0:51 / /models rw - fuse x rw\n";
        let found: Vec<_> = disks_of(container).into_iter().map(|disk| disk.point).collect();
        assert_eq!(found, [PathBuf::from("/")]);
    }

    #[test]
    fn file_systems_with_user_quotas_are_known_by_their_options() {
        let table = b"24 1 259:902 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,quota,usrquota,prjquota\n\
            25 24 259:902 /srv /mnt/again rw - ext4 /dev/nvme0n1p2 rw,quota,usrquota,prjquota\n\
            26 24 259:909 / /data rw - xfs /dev/nvme1n1 rw,attr2,usrquota\n\
            27 24 259:910 / /scratch rw - xfs /dev/nvme2n1 rw,uqnoenforce,prjquota\n\
            28 24 259:911 / /old rw - ext4 /dev/sda1 rw,jqfmt=vfsv1,usrjquota=aquota.user\n\
            29 24 0:41 / /run rw - tmpfs tmpfs rw,usrquota\n\
            30 26 259:912 / /data/plain rw - ext4 /dev/sdb1 rw\n";
        let found: Vec<_> = quota_file_systems(table).into_values().collect();
        let found: Vec<_> = found.iter().map(|it| (it.device.to_str().unwrap(), it.point.to_str().unwrap())).collect();
        assert_eq!(found, [("/dev/nvme0n1p2", "/"), ("/dev/nvme1n1", "/data"), ("/dev/sda1", "/old")]);
        for (path, is_bounded) in
            [("/home", true), ("/data/a", true), ("/data/plain/a", false), ("/scratch/a", false), ("/run/user", false)]
        {
            assert_eq!(is_on_quota(table, Path::new(path)), is_bounded, "{path}");
        }
    }

    #[test]
    fn file_system_that_may_refuse_root_is_named_with_its_server_and_the_setting() {
        let table = b"24 1 259:2 / / rw - ext4 /dev/sda1 rw\n25 24 0:45 / /home rw - nfs4 filer:/tenants rw,vers=4.2\n\
            26 25 259:3 / /home/fast rw - xfs /dev/sdb rw\n";
        let why = refusal_of(table, Path::new("/home/tena")).unwrap();
        assert!(why.starts_with("/home is nfs4 of filer:/tenants") && why.contains("SVC_NODE_AGENT_HOMES"), "{why}");
        for own in ["/homes/tena", "/home/fast/tena", "/"] {
            assert_eq!(refusal_of(table, Path::new(own)), None, "{own}");
        }
    }

    #[test]
    fn path_is_local_by_the_mount_that_it_is_on() {
        let mounts = Mounts::read(MOUNTS);
        for local in ["/", "/etc", "/tmp/scratch/a", "/tmp/proc", "/tmp/mined", "/home/tena/a b\\040c"] {
            assert!(mounts.is_on_local(Path::new(local)), "{local}");
        }
        for other in ["/opt/data", "/opt/data/a/b", "/tmp/mine"] {
            assert!(!mounts.is_on_local(Path::new(other)), "{other}");
        }
        assert!(Mounts::default().is_on_local(Path::new("/any")), "nothing is known to be mounted");
    }

    #[test]
    fn mount_that_hangs_keeps_neither_the_tenants_mounts_nor_the_disks_from_being_listed() {
        let folder = tempfile::tempdir().unwrap();
        let point = folder.path().canonicalize().unwrap();
        let Some(own) = OwnMounts::of_this_thread(skipped_tests::report_skipped) else { return };
        let _hanging = own.hang(&point);
        let mounts = Mounts::of_this_machine().unwrap();
        let stranger = TenantAccount { name: "tena".into(), uid: 70_001 };
        assert_eq!(mounts.of(&stranger, &[PathBuf::from("/home/tena")]), Vec::<PathBuf>::new());
        let below_its_folder = mounts.of(&stranger, std::slice::from_ref(&point));
        assert_eq!(below_its_folder, vec![point.clone()]);
        assert!(
            !mounts.is_on_local(&point.join("below")) && mounts.searchable_below(Path::new("/")).all(|it| it != point)
        );
        assert!(local_disks().unwrap().iter().all(|disk| !disk.point.starts_with(&point)));
    }

    #[test]
    fn fuse_and_pseudo_file_systems_are_not_searched() {
        let mounts = Mounts::read(MOUNTS);
        let below: Vec<_> = mounts.searchable_below(Path::new("/tmp")).collect();
        assert_eq!(below, [PathBuf::from("/tmp/scratch")]);
    }
}
