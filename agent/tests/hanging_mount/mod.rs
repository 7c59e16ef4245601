//! File systems that fail: FUSE whose program never reads a request, so that nothing is answered, and one in memory that is full.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

/// The mounts of this thread, its threads and its children, which no other process sees.
#[allow(unreachable_pub, reason = "integration tests use it from their crate's root, the agent's own tests do not")]
pub struct OwnMounts(());

/// While it lives, everything that asks the mount waits; after that, it gets an error.
#[allow(dead_code, unreachable_pub, reason = "as above, and not every crate of tests has one")]
pub struct HangingMount {
    point: PathBuf,
    /// The requests, which are never read.
    _requests: File,
}

#[allow(unreachable_pub, reason = "as above")]
impl OwnMounts {
    /// `None`: this machine cannot have them, which is reported.
    pub fn of_this_thread(report_skipped: fn(&str)) -> Option<Self> {
        let none = None::<&str>;
        let is_own = Path::new("/dev/fuse").exists()
            && unshare(CloneFlags::CLONE_NEWNS).is_ok()
            && mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).is_ok();
        if !is_own {
            report_skipped("it needs /dev/fuse and root, to mount a file system that does not answer");
        }
        is_own.then_some(Self(()))
    }

    /// Mounts a file system that hangs at a folder.
    #[allow(dead_code, reason = "not every crate of tests has one")]
    pub fn hang(&self, point: &Path) -> HangingMount {
        let point = point.canonicalize().unwrap();
        let requests = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", requests.as_raw_fd());
        mount(Some("hanging"), &point, Some("fuse"), MsFlags::empty(), Some(options.as_str())).unwrap();
        HangingMount { point, _requests: requests }
    }

    /// Mounts a file system with room for so many KiB at a folder.
    #[allow(dead_code, reason = "not every crate of tests fills a disk")]
    pub fn small(&self, point: &Path, kib: usize) -> SmallMount {
        let (point, options) = (point.canonicalize().unwrap(), format!("size={kib}k,mode=700"));
        mount(Some("small"), &point, Some("tmpfs"), MsFlags::empty(), Some(options.as_str())).unwrap();
        SmallMount { point }
    }
}

/// A file system that is soon full.
#[allow(dead_code, unreachable_pub, reason = "as above")]
pub struct SmallMount {
    point: PathBuf,
}

#[allow(dead_code, unreachable_pub, reason = "as above")]
impl SmallMount {
    /// Leaves no room.
    pub fn fill(&self) {
        fill(&self.point);
    }

    /// As after an error of the disk. Nothing may have a file of it open for writing.
    pub fn set_read_only(&self, is_read_only: bool) {
        let flags = if is_read_only { MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY } else { MsFlags::MS_REMOUNT };
        mount(None::<&str>, &self.point, None::<&str>, flags, None::<&str>).unwrap();
    }

    /// Removes what has filled it.
    pub fn make_room(&self) {
        std::fs::remove_file(self.point.join("ballast")).unwrap();
    }
}

/// Leaves no room in the file system of a folder.
#[allow(unreachable_pub, reason = "as above")]
pub fn fill(folder: &Path) {
    let mut ballast = File::options().create(true).append(true).open(folder.join("ballast")).unwrap();
    while ballast.write_all(&[b'x'; 4096]).is_ok() {}
}

impl Drop for SmallMount {
    fn drop(&mut self) {
        umount2(&self.point, MntFlags::MNT_DETACH).unwrap();
    }
}

impl Drop for HangingMount {
    fn drop(&mut self) {
        umount2(&self.point, MntFlags::MNT_DETACH).unwrap();
    }
}
