//! A walk through folders that tenants write to while it goes on.
//!
//! Whatever they rename, swap for links or nest: it goes from an open folder to what is in it by name and follows no link, so it never
//! leaves the folder that it began in, and what is removed is removed where it was found. It keeps few folders open, however deep it gets.

use std::ffi::{CString, OsStr};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::mounts::Mounts;

/// Folders on the way down that are kept open.
const OPEN: usize = 64;
const FOLDER: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// Something in a folder.
pub struct Entry<'a> {
    folder: BorrowedFd<'a>,
    name: &'a OsStr,
    /// Where it was when it was found.
    pub path: PathBuf,
    is_folder: bool,
}

/// Looks through folders for what a uid or a gid owns; not below what it owns, that goes with it, nor into what is mounted there. `found`
/// may end the walk.
///
/// # Errors
/// A folder could not be looked into. One that is not there has nothing in it.
pub fn owned_by(
    id: u32,
    folders: &[PathBuf],
    mounts: &Mounts,
    mut found: impl FnMut(&Entry<'_>) -> ControlFlow<()>,
) -> io::Result<()> {
    for start in folders {
        // The folder itself may be a link of the machine's own.
        let opened = openat(AT_FDCWD, start, FOLDER.difference(OFlag::O_NOFOLLOW), Mode::empty());
        let opened = match opened {
            Ok(opened) => opened,
            Err(Errno::ENOENT) => continue,
            Err(error) => return Err(error.into()),
        };
        let mut is_over = false;
        let walk = Walk { mounts, path: start.clone() };
        let enter = |entry: &Entry<'_>, status: &FileStat| {
            if is_over || (status.st_uid != id && status.st_gid != id) {
                return Ok(entry.is_folder && !is_over);
            }
            is_over = found(entry).is_break();
            Ok(false)
        };
        walk.run(opened, enter, |_, _| Ok(()))?;
        if is_over {
            break;
        }
    }
    Ok(())
}

/// Removes what is at a path, with all in it, also where it was made immutable. The folders on the way are to be root's alone.
///
/// # Errors
/// Something of it is left.
pub fn remove_at(path: &Path, mounts: &Mounts) -> io::Result<()> {
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
    Entry { folder: folder.as_fd(), name, path: path.to_owned(), is_folder: is_folder(&status) }.remove(mounts)
}

/// The folder at a path without any link in it, opened so that nobody can swap a part of the way meanwhile.
///
/// # Errors
/// It is not there, or not a folder, or a link is on the way.
pub fn open_without_links(path: &Path) -> io::Result<OwnedFd> {
    let mut folder = openat(AT_FDCWD, "/", FOLDER, Mode::empty())?;
    for part in path.components() {
        match part {
            Component::RootDir => {}
            Component::Normal(name) => folder = openat(&folder, name, FOLDER, Mode::empty())?,
            Component::Prefix(_) | Component::CurDir | Component::ParentDir => {
                return Err(io::Error::from(io::ErrorKind::InvalidInput));
            }
        }
    }
    Ok(folder)
}

/// A path by which others find what has this name in an open folder, whatever becomes of the way to that.
#[must_use]
pub fn path_in(folder: BorrowedFd<'_>, name: &OsStr) -> PathBuf {
    PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), folder.as_raw_fd())).join(name)
}

impl Entry<'_> {
    /// Removes it, with all in it, following no link, also where it was made immutable.
    ///
    /// # Errors
    /// Something of it is left.
    pub fn remove(&self, mounts: &Mounts) -> io::Result<()> {
        match self.try_to_remove(mounts) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                // The tool follows no link below the folder that it is given.
                let mut chattr = Command::new("chattr");
                chattr.args(["-R", "-f", "-i", "-a", "--"]).arg(path_in(self.folder, self.name));
                let _ = chattr.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
                self.try_to_remove(mounts)
            }
            removed => removed,
        }
    }

    fn try_to_remove(&self, mounts: &Mounts) -> io::Result<()> {
        // What lies behind it is not the tenant's.
        if mounts.has(&self.path) {
            return Err(io::Error::from(io::ErrorKind::ResourceBusy));
        }
        if !self.is_folder {
            return Ok(unlinkat(self.folder, self.name, UnlinkatFlags::NoRemoveDir)?);
        }
        let opened = openat(self.folder, self.name, FOLDER, Mode::empty())?;
        let walk = Walk { mounts, path: self.path.clone() };
        let enter = |entry: &Entry<'_>, _: &FileStat| {
            if !entry.is_folder {
                unlinkat(entry.folder, entry.name, UnlinkatFlags::NoRemoveDir)?;
            }
            Ok(entry.is_folder)
        };
        walk.run(opened, enter, |folder, name| Ok(unlinkat(folder, name, UnlinkatFlags::RemoveDir)?))?;
        Ok(unlinkat(self.folder, self.name, UnlinkatFlags::RemoveDir)?)
    }
}

/// A walk in progress.
struct Walk<'a> {
    mounts: &'a Mounts,
    /// Of the folder that is looked into.
    path: PathBuf,
}

/// A folder on the way.
struct Level {
    /// `None` where it had to be closed for those below it.
    folder: Option<OwnedFd>,
    /// Device and inode, by which it is known again.
    id: (u64, u64),
    name: CString,
    /// The folders in it that are yet to be walked through.
    below: Vec<CString>,
}

impl Walk<'_> {
    /// `enter` sees everything, and says of a folder whether to go into it; `leave` sees a folder that was gone into, from the one above.
    fn run(
        mut self,
        start: OwnedFd,
        mut enter: impl FnMut(&Entry<'_>, &FileStat) -> io::Result<bool>,
        mut leave: impl FnMut(BorrowedFd<'_>, &OsStr) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut levels = vec![self.level(start, CString::default(), &mut enter)?];
        while let Some(level) = levels.last_mut() {
            let Some(folder) = level.folder.as_ref() else { return Err(moved()) };
            if let Some(name) = level.below.pop() {
                let opened = match openat(folder, name.as_c_str(), FOLDER, Mode::empty()) {
                    Ok(opened) => opened,
                    // Others' folders come and go while this looks.
                    Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => continue,
                    Err(error) => return Err(error.into()),
                };
                self.path.push(OsStr::from_bytes(name.to_bytes()));
                let next = self.level(opened, name, &mut enter)?;
                if let Some(far_above) = levels.len().checked_sub(OPEN) {
                    levels[far_above].folder = None;
                }
                levels.push(next);
                continue;
            }
            let Some(done) = levels.pop() else { break };
            let Some(above) = levels.last_mut() else { break };
            self.path.pop();
            let folder = match above.folder.take() {
                Some(folder) => folder,
                None => reopened(&done, above.id)?,
            };
            leave(folder.as_fd(), OsStr::from_bytes(done.name.to_bytes()))?;
            above.folder = Some(folder);
        }
        Ok(())
    }

    fn level(
        &self,
        folder: OwnedFd,
        name: CString,
        enter: &mut impl FnMut(&Entry<'_>, &FileStat) -> io::Result<bool>,
    ) -> io::Result<Level> {
        let status = fstat(&folder)?;
        let mut below = Vec::new();
        // A second opening, since listing moves on in the first.
        let mut listing = Dir::openat(&folder, ".", FOLDER, Mode::empty())?;
        for listed in listing.iter() {
            let listed = listed?;
            let name = listed.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let text = OsStr::from_bytes(name.to_bytes());
            let path = self.path.join(text);
            if self.mounts.has(&path) {
                continue;
            }
            let status = match fstatat(&folder, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
                Ok(status) => status,
                Err(Errno::ENOENT) => continue,
                Err(error) => return Err(error.into()),
            };
            let entry = Entry { folder: folder.as_fd(), name: text, path, is_folder: is_folder(&status) };
            if enter(&entry, &status)? {
                below.push(name.to_owned());
            }
        }
        Ok(Level { folder: Some(folder), id: (status.st_dev, status.st_ino), name, below })
    }
}

/// The folder above one that was walked through, if it is still the one that the walk came from.
fn reopened(below: &Level, id: (u64, u64)) -> io::Result<OwnedFd> {
    let folder = below.folder.as_ref().ok_or_else(moved)?;
    let above = openat(folder, "..", FOLDER, Mode::empty())?;
    let status = fstat(&above)?;
    if (status.st_dev, status.st_ino) == id { Ok(above) } else { Err(moved()) }
}

fn moved() -> io::Error {
    io::Error::other("a folder was moved while it was looked into")
}

fn is_folder(status: &FileStat) -> bool {
    SFlag::from_bits_truncate(status.st_mode) & SFlag::S_IFMT == SFlag::S_IFDIR
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn found_in(folder: &Path) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let own = nix::unistd::Uid::current().as_raw();
        let note = |entry: &Entry<'_>| {
            found.push(entry.path.clone());
            ControlFlow::Continue(())
        };
        owned_by(own, &[folder.to_owned()], &Mounts::default(), note).unwrap();
        found.sort();
        found
    }

    /// Folders within folders, deeper than paths are long and than files may be open.
    fn nest(folder: &Path, depth: usize) -> OwnedFd {
        let mut at = openat(AT_FDCWD, folder, FOLDER, Mode::empty()).unwrap();
        for _ in 0..depth {
            nix::sys::stat::mkdirat(&at, "deep", Mode::from_bits_truncate(0o700)).unwrap();
            at = openat(&at, "deep", FOLDER, Mode::empty()).unwrap();
        }
        at
    }

    #[test]
    fn what_is_owned_is_found_and_nothing_is_followed_out_of_the_folder() {
        let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(elsewhere.path().join("file"), "x").unwrap();
        symlink(elsewhere.path(), folder.path().join("link")).unwrap();
        fs::create_dir(folder.path().join("own")).unwrap();
        fs::write(folder.path().join("own/below"), "x").unwrap();
        assert_eq!(found_in(folder.path()), ["link", "own"].map(|name| folder.path().join(name)));
        assert_eq!(found_in(&folder.path().join("not there")), Vec::<PathBuf>::new());
        remove_at(&folder.path().join("link"), &Mounts::default()).unwrap();
        assert!(elsewhere.path().join("file").exists());
        assert!(found_in(folder.path()).len() == 1);
    }

    #[test]
    fn a_tree_of_any_depth_is_walked_through_and_removed_with_few_files_open() {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path().join("top");
        fs::create_dir(&top).unwrap();
        let bottom = nest(&top, 3_000);
        drop(openat(&bottom, "file", OFlag::O_CREAT | OFlag::O_WRONLY, Mode::from_bits_truncate(0o600)).unwrap());
        drop(bottom);
        let mut seen = 0;
        let opened = openat(AT_FDCWD, &top, FOLDER, Mode::empty()).unwrap();
        let walk = Walk { mounts: &Mounts::default(), path: top.clone() };
        let count = |entry: &Entry<'_>, _: &FileStat| {
            seen += 1;
            Ok(entry.is_folder)
        };
        walk.run(opened, count, |_, _| Ok(())).unwrap();
        assert_eq!(seen, 3_001);
        remove_at(&top, &Mounts::default()).unwrap();
        assert!(!top.exists());
    }

    #[test]
    fn a_walk_whose_way_back_was_moved_goes_on_nowhere_else() {
        let folder = tempfile::tempdir().unwrap();
        let (top, elsewhere) = (folder.path().join("top"), folder.path().join("elsewhere"));
        fs::create_dir(&top).unwrap();
        fs::create_dir(&elsewhere).unwrap();
        drop(nest(&top, 2 * OPEN));
        // By the time that the bottom is reached this one is closed.
        let half_way = ["deep"; 20].iter().fold(top.clone(), |path, name| path.join(name));
        let opened = openat(AT_FDCWD, &top, FOLDER, Mode::empty()).unwrap();
        let walk = Walk { mounts: &Mounts::default(), path: top };
        let mut depth = 0;
        let swap = |entry: &Entry<'_>, _: &FileStat| {
            depth += 1;
            if depth == 2 * OPEN {
                fs::rename(&half_way, elsewhere.join("x")).unwrap();
            }
            Ok(entry.is_folder)
        };
        let mut left = 0;
        let leave = |_: BorrowedFd<'_>, _: &OsStr| {
            left += 1;
            Ok(())
        };
        assert!(walk.run(opened, swap, leave).is_err());
        assert_eq!(left, 2 * OPEN - 20, "up to the one that was moved");
    }

    #[test]
    fn what_is_swapped_for_a_link_between_look_and_removal_leads_nowhere() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["shared", "shared/mine", "precious", "precious/mine"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::write(at("shared/mine/file"), "x").unwrap();
        fs::write(at("precious/mine/file"), "x").unwrap();
        // Of a user whom everything belongs to but the shared folder, which the walk therefore goes into.
        let mut removed = 0;
        let opened = openat(AT_FDCWD, &at("shared"), FOLDER, Mode::empty()).unwrap();
        let walk = Walk { mounts: &Mounts::default(), path: at("shared") };
        let swap_and_remove = |entry: &Entry<'_>, _: &FileStat| {
            fs::rename(at("shared"), at("moved")).unwrap();
            symlink(at("precious"), at("shared")).unwrap();
            entry.remove(&Mounts::default()).unwrap();
            removed += 1;
            Ok(false)
        };
        walk.run(opened, swap_and_remove, |_, _| Ok(())).unwrap();
        assert_eq!(removed, 1);
        assert!(at("precious/mine/file").exists());
        assert!(!at("moved/mine").exists());
    }

    #[test]
    fn a_way_with_a_link_in_it_is_not_gone() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().canonicalize().unwrap();
        fs::create_dir_all(real.join("a/b")).unwrap();
        symlink(real.join("a"), real.join("link")).unwrap();
        assert!(open_without_links(&real.join("a/b")).is_ok());
        assert!(open_without_links(&real.join("link/b")).is_err());
        assert!(open_without_links(Path::new("a/../b")).is_err());
    }
}
