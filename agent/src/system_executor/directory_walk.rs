//! A walk through folders that tenants write to at the same time.
//!
//! It goes from an open folder to its entries by name, follows no link and crosses no mount, so it never leaves the folder in which it
//! started, and an entry is removed where it was found. It keeps few folders open, at any depth. A path that it cannot read does not end
//! it: the rest is searched, and each such path is reported as a [`WalkError`].

use std::ffi::{CStr, CString, OsStr};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};

use super::mounts::Mounts;
use crate::server_clock::since_boot;
pub use removal::{empty, remove_at};
pub use search::{SearchScope, owned_by, visit};

mod removal;
mod search;

/// The folders nearest to the current one, which stay open.
const OPEN: usize = 64;
/// The folders nearest to the start, which stay open too: the path back to them cannot be lost.
const PINNED: usize = 32;
/// How often one walk reopens a lost path from the top.
const MAX_LOST_PATHS: usize = 16;
/// The kernel's clock for file times may lag behind its clock by this much.
const CLOCK_LAG: Duration = Duration::from_millis(10);
const NANOS: i128 = 1_000_000_000;
/// The length of a path in a message. Tenants nest folders without bound.
const SHOWN: usize = 256;
const FOLDER: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// A path that a walk could not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WalkError {
    pub path: PathBuf,
    /// The user who is able to cause it: the owner of the folder, or, in a sticky folder, of the entry.
    pub owner: u32,
    pub cause: WalkErrorCause,
}

/// Why a path could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WalkErrorCause {
    /// Entries were added or removed while the folder was listed.
    Changed,
    /// The entry was listed and is not there.
    Vanished(Errno),
    /// The folder is not where the walk entered it.
    Moved,
    Failed(Errno),
}

impl WalkError {
    /// Whether the error decides a search for what `id` owns. Changes by another account in its own folders must not: their owner could
    /// as well have copied what is in them.
    #[must_use]
    pub fn is_decisive(&self, id: u32) -> bool {
        match self.cause {
            WalkErrorCause::Failed(_) => true,
            WalkErrorCause::Moved => self.owner == 0 || self.owner == id,
            WalkErrorCause::Changed | WalkErrorCause::Vanished(_) => self.owner == id,
        }
    }
}

impl fmt::Display for WalkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = shortened(&self.path);
        match self.cause {
            WalkErrorCause::Changed => write!(f, "{path}: it changed while it was listed"),
            WalkErrorCause::Moved => write!(f, "{path}: it was moved while it was searched"),
            WalkErrorCause::Vanished(errno) | WalkErrorCause::Failed(errno) => write!(f, "{path}: {errno}"),
        }
    }
}

/// A path as shown in a message.
#[must_use]
pub fn shortened(path: &Path) -> String {
    let text = path.display().to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// An entry of a folder.
pub struct WalkEntry<'a> {
    folder: BorrowedFd<'a>,
    name: &'a OsStr,
    start: &'a Path,
    /// The folders between the start and the entry.
    ancestors: &'a [CString],
    is_folder: bool,
    /// Device and inode.
    id: (u64, u64),
}

/// The folder at a path without any link in it, opened so that no user can replace a component meanwhile.
///
/// # Errors
/// It does not exist, is not a folder, or its path has a link.
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

/// A path by which another process finds this name in an open folder, independent of the folder's own path.
#[must_use]
pub fn path_in(folder: BorrowedFd<'_>, name: &OsStr) -> PathBuf {
    PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), folder.as_raw_fd())).join(name)
}

impl WalkEntry<'_> {
    /// Its path when it was found.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        joined(self.start, self.ancestors).join(self.name)
    }

    /// Its extended attribute of this name; `None` where it has none.
    ///
    /// # Errors
    /// It cannot be read, or the value is longer than the buffer.
    pub fn attribute<'b>(&self, name: &str, buffer: &'b mut [u8]) -> io::Result<Option<&'b [u8]>> {
        attribute(rustix::fs::lgetxattr(path_in(self.folder, self.name), name, &mut *buffer), buffer)
    }
}

/// The value of an extended attribute that was read into the buffer; `None` where the file, or its file system, has none.
///
/// # Errors
/// It could not be read.
pub fn attribute(read: rustix::io::Result<usize>, buffer: &[u8]) -> io::Result<Option<&[u8]>> {
    match read {
        Ok(length) => Ok(buffer.get(..length)),
        Err(rustix::io::Errno::NODATA | rustix::io::Errno::NOTSUP) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The folder of that name in another. `EXDEV` if it is a mount point.
fn open_below<P: ?Sized + nix::NixPath>(folder: impl AsFd + Copy, name: &P) -> Result<OwnedFd, Errno> {
    let how = OpenHow::new().flags(FOLDER).resolve(ResolveFlag::RESOLVE_NO_XDEV | ResolveFlag::RESOLVE_NO_SYMLINKS);
    match openat2(folder, name, how) {
        // A kernel before 5.6, which leaves only the mount table to check.
        Err(Errno::ENOSYS) => openat(folder, name, FOLDER, Mode::empty()),
        // The folder above was moved meanwhile.
        Err(Errno::EAGAIN) => openat2(folder, name, how),
        opened => opened,
    }
}

/// Whether the name is a mount point, whose file system need not answer.
fn is_mounted_over(folder: BorrowedFd<'_>, name: &OsStr) -> bool {
    let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC);
    matches!(openat2(folder, name, how.resolve(ResolveFlag::RESOLVE_NO_XDEV)), Err(Errno::EXDEV))
}

/// The actions of a walk.
trait Visitor {
    /// A folder is about to be listed.
    fn open(&mut self, _folder: BorrowedFd<'_>, _status: &FileStat) {}
    /// Called for each entry of a folder; for a folder it returns whether to enter it.
    fn entry(&mut self, entry: &WalkEntry<'_>, status: &FileStat) -> Result<bool, Errno>;
    /// Called when a folder has been left, with its parent.
    fn leave(&mut self, _folder: BorrowedFd<'_>, _name: &OsStr) -> Result<(), Errno> {
        Ok(())
    }
    /// Whether a folder that changed since the walk began is an error.
    fn notes_changes(&self) -> bool {
        false
    }
    /// How many entries it has removed: a folder of which some is removed is listed again, so that the walk has few names of folders in memory
    /// at a time, however many there are.
    fn removed(&self) -> u64 {
        0
    }
    /// How many names of folders may wait at once.
    fn most_waiting(&self) -> usize {
        usize::MAX
    }
}

/// A walk in progress.
struct Walk<'a> {
    mounts: &'a Mounts,
    start: &'a Path,
    began: Moment,
    levels: Vec<Level>,
    /// The folders of all levels that are yet to be entered.
    waiting: usize,
    /// The names of all levels but the first.
    ancestors: Vec<CString>,
    lost_paths: usize,
    errors: Vec<WalkError>,
    /// Errors beyond are not noted.
    most_errors: usize,
}

/// A folder on the current path.
struct Level {
    /// `None` if it had to be closed for those below it.
    folder: Option<OwnedFd>,
    /// Device and inode, which identify it again.
    id: (u64, u64),
    owner: u32,
    /// The folders in it that are yet to be entered, and who can move them.
    below: Vec<(CString, u32)>,
    /// How many entries were removed when its listing ended before its end.
    unlisted: Option<u64>,
}

impl<'a> Walk<'a> {
    fn of(start: &'a Path, mounts: &'a Mounts) -> Self {
        Self {
            mounts,
            start,
            began: Moment::now(),
            levels: Vec::new(),
            waiting: 0,
            ancestors: Vec::new(),
            lost_paths: 0,
            errors: Vec::new(),
            most_errors: usize::MAX,
        }
    }

    fn run(mut self, start: OwnedFd, visitor: &mut impl Visitor) -> Vec<WalkError> {
        let first = self.level(start, visitor);
        self.levels.extend(first);
        while let Some(level) = self.levels.last_mut() {
            if let Some((name, owner)) = level.below.pop() {
                self.waiting -= 1;
                self.go_into(name, owner, visitor);
            } else if level.unlisted.take().is_some_and(|removed| removed < visitor.removed()) {
                self.list_again(visitor);
            } else {
                self.go_back(visitor);
            }
        }
        self.errors
    }

    /// Lists the rest of the last level.
    fn list_again(&mut self, visitor: &mut impl Visitor) {
        let folder = self.levels.last().and_then(|level| level.folder.as_ref());
        let again = folder.and_then(|folder| openat(folder, ".", FOLDER, Mode::empty()).ok());
        let listed = again.and_then(|again| self.level(again, visitor));
        if let (Some(listed), Some(level)) = (listed, self.levels.last_mut()) {
            (level.below, level.unlisted) = (listed.below, listed.unlisted);
        }
    }

    fn go_into(&mut self, name: CString, owner: u32, visitor: &mut impl Visitor) {
        let Some(folder) = self.levels.last().and_then(|level| level.folder.as_ref()) else { return };
        let opened = match open_below(folder, name.as_c_str()) {
            Ok(opened) => opened,
            // A mount point is a start of its own, or not to be searched.
            Err(Errno::EXDEV) => return,
            Err(errno) => return self.note(Some(&name), owner, cause(errno)),
        };
        self.ancestors.push(name);
        match self.level(opened, visitor) {
            Some(level) => {
                self.levels.push(level);
                if let Some(far_above) = self.levels.len().checked_sub(OPEN + 1).filter(|level| *level >= PINNED) {
                    self.levels[far_above].folder = None;
                }
            }
            None => drop(self.ancestors.pop()),
        }
    }

    fn go_back(&mut self, visitor: &mut impl Visitor) {
        let (Some(done), name) = (self.levels.pop(), self.ancestors.pop()) else { return };
        let (Some(above), Some(name)) = (self.levels.last_mut(), name) else { return };
        if above.folder.is_none() {
            above.folder = reopened(&done, above.id);
        }
        let owner = above.owner;
        let Some(folder) = above.folder.as_ref() else {
            self.note(Some(&name), owner, WalkErrorCause::Moved);
            return self.reopen_levels();
        };
        if let Err(errno) = visitor.leave(folder.as_fd(), OsStr::from_bytes(name.to_bytes())) {
            self.note(Some(&name), owner, cause(errno));
        }
    }

    /// Opens the last level by its names from the nearest open level above. Levels that were moved are abandoned.
    fn reopen_levels(&mut self) {
        let open = self.levels.iter().rposition(|level| level.folder.is_some());
        let Some(open) = open else { return self.levels.clear() };
        self.lost_paths += 1;
        let mut at: Option<OwnedFd> = None;
        let mut reached = open;
        while self.lost_paths <= MAX_LOST_PATHS && reached + 1 < self.levels.len() {
            let above = at.as_ref().or(self.levels[open].folder.as_ref());
            // The names begin at the second level.
            let next = above.and_then(|above| open_below(above, self.ancestors[reached].as_c_str()).ok());
            let is_it = |next: &OwnedFd| id_of(next) == Some(self.levels[reached + 1].id);
            let Some(next) = next.filter(is_it) else { break };
            at = Some(next);
            reached += 1;
        }
        if at.is_some() {
            self.levels[reached].folder = at;
        }
        let Some(lost) = self.ancestors.get(reached).cloned() else { return };
        self.levels.truncate(reached + 1);
        self.waiting = self.levels.iter().map(|level| level.below.len()).sum();
        self.ancestors.truncate(reached);
        let owner = self.levels[reached].owner;
        self.note(Some(&lost), owner, WalkErrorCause::Moved);
    }

    fn note(&mut self, name: Option<&CStr>, owner: u32, cause: WalkErrorCause) {
        if self.errors.len() >= self.most_errors {
            return;
        }
        let mut path = joined(self.start, &self.ancestors);
        path.extend(name.map(|name| OsStr::from_bytes(name.to_bytes())));
        self.errors.push(WalkError { path, owner, cause });
    }

    /// `None` where the folder cannot be listed.
    fn level(&mut self, folder: OwnedFd, visitor: &mut impl Visitor) -> Option<Level> {
        let status = match fstat(&folder) {
            Ok(status) => status,
            Err(errno) => {
                self.note(None, 0, WalkErrorCause::Failed(errno));
                return None;
            }
        };
        visitor.open(folder.as_fd(), &status);
        let owner = status.st_uid;
        // A second opening, since listing moves on in the first.
        let mut listing = match Dir::openat(&folder, ".", FOLDER, Mode::empty()) {
            Ok(listing) => listing,
            // It was removed since it was opened, and a removed folder is empty.
            Err(Errno::ENOENT) => return None,
            Err(errno) => {
                self.note(None, owner, cause(errno));
                return None;
            }
        };
        let is_sticky = status.st_mode & Mode::S_ISVTX.bits() != 0;
        let (mut below, mut unlisted) = (Vec::new(), None);
        for listed in listing.iter() {
            if !below.is_empty() && self.waiting >= visitor.most_waiting() {
                unlisted = Some(visitor.removed());
                break;
            }
            let listed = match listed {
                Ok(listed) => listed,
                Err(errno) => {
                    self.note(None, owner, cause(errno));
                    break;
                }
            };
            let name = listed.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let text = OsStr::from_bytes(name.to_bytes());
            if self.mounts.has_named(text) && self.mounts.has(&joined(self.start, &self.ancestors).join(text)) {
                continue;
            }
            let seen = match fstatat(&folder, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
                Ok(seen) => seen,
                // In a sticky folder only its owner could remove it, and may do so at any time.
                Err(Errno::ENOENT) if is_sticky => continue,
                Err(Errno::ENOENT) => {
                    self.note(Some(name), owner, WalkErrorCause::Vanished(Errno::ENOENT));
                    continue;
                }
                Err(_) if is_mounted_over(folder.as_fd(), text) => continue,
                Err(errno) => {
                    self.note(Some(name), owner, cause(errno));
                    continue;
                }
            };
            let (start, ancestors, id) = (self.start, self.ancestors.as_slice(), (seen.st_dev, seen.st_ino));
            let entry =
                WalkEntry { folder: folder.as_fd(), name: text, start, ancestors, is_folder: is_folder(&seen), id };
            match visitor.entry(&entry, &seen) {
                Ok(true) => {
                    below.push((name.to_owned(), if is_sticky { seen.st_uid } else { owner }));
                    self.waiting += 1;
                }
                Ok(false) => {}
                Err(errno) => self.note(Some(name), owner, cause(errno)),
            }
        }
        if visitor.notes_changes() && !is_sticky && fstat(&folder).is_ok_and(|status| self.has_changed(&status)) {
            self.note(None, owner, WalkErrorCause::Changed);
        }
        Some(Level { folder: Some(folder), id: (status.st_dev, status.st_ino), owner, below, unlisted })
    }

    fn has_changed(&self, status: &FileStat) -> bool {
        let changed_at = i128::from(status.st_ctime) * NANOS + i128::from(status.st_ctime_nsec);
        is_between(changed_at, self.began, Moment::now())
    }
}

/// A moment by the clock that file times are of, and by the one that no program can set, in nanoseconds.
#[derive(Debug, Clone, Copy)]
struct Moment {
    local: i128,
    since_boot: i128,
}

impl Moment {
    fn now() -> Self {
        let local = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { local: nanos(local), since_boot: nanos(since_boot()) }
    }
}

fn nanos(duration: Duration) -> i128 {
    i128::try_from(duration.as_nanos()).unwrap_or(i128::MAX)
}

/// Whether a change at this time of a file may have happened between these moments. Files of a time when the clock was ahead have changed in
/// the future, and so before. Where the clock was set meanwhile, the times before and after that are not distinguished.
fn is_between(changed_at: i128, began: Moment, now: Moment) -> bool {
    let lag = nanos(CLOCK_LAG);
    let began_by_present_clock = now.local - (now.since_boot - began.since_boot);
    let was_set = (began_by_present_clock - began.local).abs() > lag;
    let earliest = began.local.min(began_by_present_clock) - lag;
    changed_at >= earliest && (was_set || changed_at <= now.local + lag)
}

/// The parent of a folder that was left, if it is still the one that the walk entered it from.
fn reopened(below: &Level, id: (u64, u64)) -> Option<OwnedFd> {
    let above = openat(below.folder.as_ref()?, "..", FOLDER, Mode::empty()).ok()?;
    (id_of(&above) == Some(id)).then_some(above)
}

fn id_of(folder: &OwnedFd) -> Option<(u64, u64)> {
    fstat(folder).ok().map(|status| (status.st_dev, status.st_ino))
}

/// Separates errors that another user's renames and removals cause from other errors.
const fn cause(errno: Errno) -> WalkErrorCause {
    match errno {
        Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ESTALE | Errno::EAGAIN => {
            WalkErrorCause::Vanished(errno)
        }
        errno => WalkErrorCause::Failed(errno),
    }
}

fn joined(start: &Path, ancestors: &[CString]) -> PathBuf {
    let mut path = start.to_owned();
    path.extend(ancestors.iter().map(|name| OsStr::from_bytes(name.to_bytes())));
    path
}

fn is_folder(status: &FileStat) -> bool {
    SFlag::from_bits_truncate(status.st_mode) & SFlag::S_IFMT == SFlag::S_IFDIR
}

#[cfg(test)]
mod tests;
