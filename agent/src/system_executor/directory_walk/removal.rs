//! Removal of entries with their content, also of those that are immutable or that other users keep filling.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat};
use nix::sys::stat::{FileStat, Mode, fchmod, fstatat};
use nix::unistd::{UnlinkatFlags, fchown, unlinkat};
use tracing::info;

use super::{FOLDER, Visitor, Walk, WalkEntry, WalkError, id_of, is_folder, open_below, path_in};
use crate::bounded_tool::{SHORT_LIMIT, Tool};
use crate::system_executor::mounts::Mounts;

/// Names of folders in memory at a time: a tenant may make millions of them in one folder.
const MOST_WAITING: usize = 16_384;
/// How often a removal that takes long is logged, and after how many entries the clock is looked at.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
const LOOK_AT_CLOCK: u64 = 1024;

/// Removes the entry at a path with its content, also if it was made immutable. The folders of the path must be root's alone.
///
/// # Errors
/// Some of it is left.
pub fn remove_at(path: &Path, mounts: &Mounts, owner: u32) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    let folder = match openat(AT_FDCWD, parent, FOLDER.difference(OFlag::O_NOFOLLOW), Mode::empty()) {
        Ok(folder) => folder,
        Err(Errno::ENOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let status = match fstatat(&folder, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(status) => status,
        Err(Errno::ENOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let id = (status.st_dev, status.st_ino);
    let entry =
        WalkEntry { folder: folder.as_fd(), name, start: parent, ancestors: &[], is_folder: is_folder(&status), id };
    entry.remove(mounts, owner)
}

/// Removes everything in the folder at a path, which stays. The folders of the path must be root's alone.
pub fn empty(path: &Path, owner: u32) {
    if let Ok(opened) = openat(AT_FDCWD, path, FOLDER, Mode::empty()) {
        Removal::by(owner).run(path, &Mounts::default(), opened);
    }
}

impl WalkEntry<'_> {
    /// Removes it with its content, following no link, also if it was made immutable. Its folders are given to `owner` and closed to all
    /// other users first, so that no other account keeps filling them.
    ///
    /// # Errors
    /// Some of it is left.
    pub fn remove(&self, mounts: &Mounts, owner: u32) -> io::Result<()> {
        let path = self.path();
        // A mounted file system is not the tenant's.
        if mounts.has(&path) {
            return Err(io::Error::from(io::ErrorKind::ResourceBusy));
        }
        if !self.is_folder {
            return Ok(unlink(self.folder, self.name, UnlinkatFlags::NoRemoveDir)?);
        }
        let opened = open_below(self.folder, self.name)?;
        // Another folder may have been put in its place.
        if id_of(&opened) != Some(self.id) {
            return Err(Errno::ESTALE.into());
        }
        let errors = Removal::by(owner).run(&path, mounts, opened);
        match unlink(self.folder, self.name, UnlinkatFlags::RemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(errno) => Err(errors.first().map_or_else(|| errno.into(), |why| io::Error::other(why.to_string()))),
        }
    }
}

/// A removal in progress. Files are removed as they are listed.
pub(super) struct Removal {
    owner: u32,
    removed: u64,
    logged_at: Instant,
    most_waiting: usize,
}

impl Removal {
    /// By this user, to whom folders are given.
    pub(super) fn by(owner: u32) -> Self {
        Self { owner, removed: 0, logged_at: Instant::now(), most_waiting: MOST_WAITING }
    }

    /// The same with few names of folders in memory.
    #[cfg(test)]
    pub(super) fn with_few_waiting(self, most_waiting: usize) -> Self {
        Self { most_waiting, ..self }
    }

    /// Returns the first path that could not be removed.
    pub(super) fn run(mut self, start: &Path, mounts: &Mounts, opened: OwnedFd) -> Vec<WalkError> {
        let mut walk = Walk::of(start, mounts);
        walk.most_errors = 1;
        walk.run(opened, &mut self)
    }

    fn note(&mut self) {
        self.removed += 1;
        if self.removed.is_multiple_of(LOOK_AT_CLOCK) && self.logged_at.elapsed() >= LOG_INTERVAL {
            self.logged_at = Instant::now();
            let (uid, removed) = (self.owner, self.removed);
            info!(uid, removed, "what a tenant has left is being removed");
        }
    }
}

impl Visitor for Removal {
    fn open(&mut self, folder: BorrowedFd<'_>, status: &FileStat) {
        if status.st_uid != self.owner || status.st_mode & 0o777 != 0o700 {
            // A failure to change shows when the entry is removed.
            let _ = fchown(folder, Some(self.owner.into()), Some(self.owner.into()));
            let _ = fchmod(folder, Mode::S_IRWXU);
        }
    }

    fn entry(&mut self, entry: &WalkEntry<'_>, _: &FileStat) -> Result<bool, Errno> {
        if !entry.is_folder {
            unlink(entry.folder, entry.name, UnlinkatFlags::NoRemoveDir)?;
            self.note();
        }
        Ok(entry.is_folder)
    }

    fn leave(&mut self, folder: BorrowedFd<'_>, name: &OsStr) -> Result<(), Errno> {
        unlink(folder, name, UnlinkatFlags::RemoveDir)?;
        self.note();
        Ok(())
    }

    fn removed(&self) -> u64 {
        self.removed
    }

    fn most_waiting(&self) -> usize {
        self.most_waiting
    }
}

/// Removes one name from a folder, also if either was made immutable.
fn unlink(folder: BorrowedFd<'_>, name: &OsStr, flag: UnlinkatFlags) -> Result<(), Errno> {
    match unlinkat(folder, name, flag) {
        Err(Errno::EPERM) => {
            let chattr = Tool::new("chattr").args(["-f", "-i", "-a", "--"]).arg(path_in(folder, OsStr::new(".")));
            let _ = chattr.arg(path_in(folder, name)).run_to_end(SHORT_LIMIT);
            unlinkat(folder, name, flag)
        }
        done => done,
    }
}
