//! A walk through folders that tenants write to at the same time.
//!
//! It goes from an open folder to its entries by name, follows no link and crosses no mount, so it never leaves the folder in which it
//! started, and an entry is removed where it was found. It keeps few folders open, at any depth. A path that it cannot read does not end
//! it: the rest is searched, and each such path is reported as a [`WalkError`].

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, OsStr};
use std::fmt;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::{FileStat, Mode, SFlag, fchmod, fstat, fstatat};
use nix::unistd::{UnlinkatFlags, fchown, unlinkat};

use super::mounts::Mounts;

/// The folders nearest to the current one, which are kept open.
const OPEN: usize = 64;
/// The folders nearest to the start, which are kept open too: the path back to them cannot be lost.
const PINNED: usize = 32;
/// How often one walk reopens a lost path from the top.
const MAX_LOST_PATHS: usize = 16;
/// The kernel's clock for file times may lag behind its clock by this much.
const CLOCK_LAG: Duration = Duration::from_millis(10);
/// The most errors that a visit notes.
const MAX_VISIT_ERRORS: usize = 100;
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

/// Which folders a search enters.
#[derive(Debug, Clone, Copy)]
pub struct SearchScope<'a> {
    /// The owner to search for: a uid, which is also a gid.
    pub id: u32,
    /// Restricts the folders directly below a start to those of these owners, and those that everybody may write to. `None`: all.
    pub owners: Option<&'a BTreeSet<u32>>,
}

/// Searches folders for what an account owns; not below what it owns, which is removed with it, nor in mounts. `found` may end the walk.
/// Returns the paths that could not be read.
pub fn owned_by(
    scope: SearchScope<'_>,
    folders: &[PathBuf],
    mounts: &Mounts,
    found: impl FnMut(&WalkEntry<'_>) -> ControlFlow<()>,
) -> Vec<WalkError> {
    let mut search = Search { scope, found, is_over: false };
    let mut errors = Vec::new();
    for start in folders {
        // The folder itself may be a link of the machine's own.
        match openat(AT_FDCWD, start, FOLDER.difference(OFlag::O_NOFOLLOW), Mode::empty()) {
            Ok(opened) => errors.extend(Walk::of(start, mounts).run(opened, &mut search)),
            // A missing folder has nothing in it, nor has a file that something is mounted on.
            Err(Errno::ENOENT | Errno::ENOTDIR) => {}
            Err(errno) => {
                errors.push(WalkError { path: start.clone(), owner: 0, cause: WalkErrorCause::Failed(errno) });
            }
        }
        if search.is_over {
            break;
        }
    }
    errors
}

/// Visits every entry below a folder, at any depth, but not in mounts. `visitor` says of each folder whether it is entered, and may end the
/// walk. Returns the first paths that could not be read.
pub fn visit(
    start: &Path,
    mounts: &Mounts,
    visitor: impl FnMut(&WalkEntry<'_>, &FileStat) -> ControlFlow<(), bool>,
) -> Vec<WalkError> {
    match openat(AT_FDCWD, start, FOLDER.difference(OFlag::O_NOFOLLOW), Mode::empty()) {
        Ok(opened) => {
            let mut walk = Walk::of(start, mounts);
            walk.most_errors = MAX_VISIT_ERRORS;
            // What vanishes during the walk is not there.
            let errors = walk.run(opened, &mut Visit { visitor, is_over: false });
            errors.into_iter().filter(|error| matches!(error.cause, WalkErrorCause::Failed(_))).collect()
        }
        Err(Errno::ENOENT | Errno::ENOTDIR) => Vec::new(),
        Err(errno) => vec![WalkError { path: start.to_owned(), owner: 0, cause: WalkErrorCause::Failed(errno) }],
    }
}

struct Visit<F> {
    visitor: F,
    is_over: bool,
}

impl<F: FnMut(&WalkEntry<'_>, &FileStat) -> ControlFlow<(), bool>> Visitor for Visit<F> {
    fn entry(&mut self, entry: &WalkEntry<'_>, status: &FileStat) -> Result<bool, Errno> {
        if self.is_over {
            return Ok(false);
        }
        match (self.visitor)(entry, status) {
            ControlFlow::Continue(enters) => Ok(enters && entry.is_folder),
            ControlFlow::Break(()) => {
                self.is_over = true;
                Ok(false)
            }
        }
    }
}

struct Search<'a, F> {
    scope: SearchScope<'a>,
    found: F,
    is_over: bool,
}

impl<F: FnMut(&WalkEntry<'_>) -> ControlFlow<()>> Visitor for Search<'_, F> {
    fn entry(&mut self, entry: &WalkEntry<'_>, status: &FileStat) -> Result<bool, Errno> {
        if self.is_over {
            return Ok(false);
        }
        if status.st_uid == self.scope.id || status.st_gid == self.scope.id {
            self.is_over = (self.found)(entry).is_break();
            return Ok(false);
        }
        let is_left_out = |owners: &BTreeSet<u32>| {
            entry.ancestors.is_empty() && !owners.contains(&status.st_uid) && status.st_mode & 0o022 == 0
        };
        Ok(entry.is_folder && !self.scope.owners.is_some_and(is_left_out))
    }

    fn notes_changes(&self) -> bool {
        true
    }
}

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
        Walk::of(path, &Mounts::default()).run(opened, &mut Removal { owner });
    }
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
        let errors = Walk::of(&path, mounts).run(opened, &mut Removal { owner });
        match unlink(self.folder, self.name, UnlinkatFlags::RemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(errno) => Err(errors.first().map_or_else(|| errno.into(), |why| io::Error::other(why.to_string()))),
        }
    }
}

struct Removal {
    owner: u32,
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
        }
        Ok(entry.is_folder)
    }

    fn leave(&mut self, folder: BorrowedFd<'_>, name: &OsStr) -> Result<(), Errno> {
        unlink(folder, name, UnlinkatFlags::RemoveDir)
    }
}

/// Removes one name from a folder, also if either was made immutable.
fn unlink(folder: BorrowedFd<'_>, name: &OsStr, flag: UnlinkatFlags) -> Result<(), Errno> {
    match unlinkat(folder, name, flag) {
        Err(Errno::EPERM) => {
            let mut chattr = Command::new("chattr");
            chattr.args(["-f", "-i", "-a", "--"]).arg(path_in(folder, OsStr::new("."))).arg(path_in(folder, name));
            let _ = chattr.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
            unlinkat(folder, name, flag)
        }
        done => done,
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
}

/// A walk in progress.
struct Walk<'a> {
    mounts: &'a Mounts,
    start: &'a Path,
    /// When it began, less the lag of the kernel's clock for file times.
    began: (i64, i64),
    levels: Vec<Level>,
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
}

impl<'a> Walk<'a> {
    fn of(start: &'a Path, mounts: &'a Mounts) -> Self {
        let began = SystemTime::now() - CLOCK_LAG;
        let began = began.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let began = (i64::try_from(began.as_secs()).unwrap_or(i64::MAX), i64::from(began.subsec_nanos()));
        Self {
            mounts,
            start,
            began,
            levels: Vec::new(),
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
            match level.below.pop() {
                Some((name, owner)) => self.go_into(name, owner, visitor),
                None => self.go_back(visitor),
            }
        }
        self.errors
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
        let mut below = Vec::new();
        for listed in listing.iter() {
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
                Ok(true) => below.push((name.to_owned(), if is_sticky { seen.st_uid } else { owner })),
                Ok(false) => {}
                Err(errno) => self.note(Some(name), owner, cause(errno)),
            }
        }
        if visitor.notes_changes() && !is_sticky && fstat(&folder).is_ok_and(|now| self.is_since(&now)) {
            self.note(None, owner, WalkErrorCause::Changed);
        }
        Some(Level { folder: Some(folder), id: (status.st_dev, status.st_ino), owner, below })
    }

    fn is_since(&self, status: &FileStat) -> bool {
        (status.st_ctime, status.st_ctime_nsec) >= self.began
    }
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
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn own() -> u32 {
        nix::unistd::Uid::current().as_raw()
    }

    fn found_in(folder: &Path) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let note = |entry: &WalkEntry<'_>| {
            found.push(entry.path());
            ControlFlow::Continue(())
        };
        let scope = SearchScope { id: own(), owners: None };
        let decisive = |error: &WalkError| matches!(error.cause, WalkErrorCause::Failed(_));
        assert!(!owned_by(scope, &[folder.to_owned()], &Mounts::default(), note).iter().any(decisive));
        found.sort();
        found
    }

    fn remove(path: &Path) -> io::Result<()> {
        remove_at(path, &Mounts::default(), own())
    }

    fn run(start: &Path, visitor: &mut impl Visitor) -> Vec<WalkError> {
        let opened = openat(AT_FDCWD, start, FOLDER, Mode::empty()).unwrap();
        Walk::of(start, &Mounts::default()).run(opened, visitor)
    }

    /// Enters every folder, calls `seen` for each entry, and counts the folders that it leaves.
    struct RecordingVisitor<F> {
        seen: F,
        left: usize,
    }

    impl<F: FnMut(&WalkEntry<'_>)> Visitor for RecordingVisitor<F> {
        fn entry(&mut self, entry: &WalkEntry<'_>, _: &FileStat) -> Result<bool, Errno> {
            (self.seen)(entry);
            Ok(entry.is_folder)
        }

        fn leave(&mut self, _: BorrowedFd<'_>, _: &OsStr) -> Result<(), Errno> {
            self.left += 1;
            Ok(())
        }
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
    fn owned_files_are_found_and_no_link_is_followed() {
        let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(elsewhere.path().join("file"), "x").unwrap();
        symlink(elsewhere.path(), folder.path().join("link")).unwrap();
        fs::create_dir(folder.path().join("own")).unwrap();
        fs::write(folder.path().join("own/below"), "x").unwrap();
        assert_eq!(found_in(folder.path()), ["link", "own"].map(|name| folder.path().join(name)));
        assert_eq!(found_in(&folder.path().join("not there")), Vec::<PathBuf>::new());
        remove(&folder.path().join("link")).unwrap();
        assert!(elsewhere.path().join("file").exists());
        assert!(found_in(folder.path()).len() == 1);
    }

    #[test]
    fn tree_of_any_depth_is_walked_and_removed_with_few_open_files() {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path().join("top");
        fs::create_dir(&top).unwrap();
        let bottom = nest(&top, 3_000);
        drop(openat(&bottom, "file", OFlag::O_CREAT | OFlag::O_WRONLY, Mode::from_bits_truncate(0o600)).unwrap());
        drop(bottom);
        let mut seen = 0;
        let mut everything = RecordingVisitor { seen: |_: &WalkEntry<'_>| seen += 1, left: 0 };
        assert_eq!(run(&top, &mut everything), []);
        assert_eq!(seen, 3_001);
        remove(&top).unwrap();
        assert!(!top.exists());
    }

    #[test]
    fn folder_moved_during_a_walk_affects_only_itself() {
        let folder = tempfile::tempdir().unwrap();
        let (top, elsewhere) = (folder.path().join("top"), folder.path().join("elsewhere"));
        fs::create_dir(&top).unwrap();
        fs::create_dir(&elsewhere).unwrap();
        let depth = 4 * OPEN;
        drop(nest(&top, depth));
        // When the bottom is reached, this one is closed.
        let below_the_pinned = ["deep"; 2 * PINNED].iter().fold(top.clone(), |path, name| path.join(name));
        let mut seen = 0;
        let swap = |_: &WalkEntry<'_>| {
            seen += 1;
            if seen == depth {
                fs::rename(&below_the_pinned, elsewhere.join("x")).unwrap();
            }
        };
        let mut everything = RecordingVisitor { seen: swap, left: 0 };
        let errors = run(&top, &mut everything);
        let (left, owner) = (everything.left, own());
        assert_eq!(errors, [WalkError { path: below_the_pinned.clone(), owner, cause: WalkErrorCause::Moved }]);
        assert_eq!(left, depth - 1, "all but the one that was moved");
    }

    #[test]
    fn moved_ancestor_folder_is_reopened_from_the_top_or_abandoned() {
        let folder = tempfile::tempdir().unwrap();
        let (top, elsewhere) = (folder.path().join("top"), folder.path().join("elsewhere"));
        fs::create_dir(&top).unwrap();
        fs::create_dir(&elsewhere).unwrap();
        let depth = 4 * OPEN;
        drop(nest(&top, depth));
        let at = |level: usize| vec!["deep"; level].iter().fold(top.clone(), |path, name| path.join(name));
        let (upper, lower) = (at(PINNED + 10), at(PINNED + 20));
        let mut seen = 0;
        let swap = |_: &WalkEntry<'_>| {
            seen += 1;
            if seen == depth {
                fs::rename(&lower, elsewhere.join("lower")).unwrap();
                fs::rename(&upper, elsewhere.join("upper")).unwrap();
            }
        };
        let mut everything = RecordingVisitor { seen: swap, left: 0 };
        let errors = run(&top, &mut everything);
        let left = everything.left;
        let paths: Vec<_> = errors.iter().map(|error| (&error.path, error.cause)).collect();
        assert_eq!(paths, [(&lower, WalkErrorCause::Moved), (&upper, WalkErrorCause::Moved)]);
        // Those between the two are abandoned; everything above is left in order.
        assert_eq!(left, depth - (PINNED + 20) + PINNED + 9);
    }

    #[test]
    fn changes_of_another_account_in_its_folders_decide_no_search() {
        let error = |owner, cause| WalkError { path: "/tmp/x".into(), owner, cause };
        let (tenant, other) = (70_001, 70_002);
        for cause in [
            WalkErrorCause::Changed,
            WalkErrorCause::Moved,
            WalkErrorCause::Vanished(Errno::ENOENT),
            WalkErrorCause::Vanished(Errno::ELOOP),
        ] {
            assert!(!error(other, cause).is_decisive(tenant), "{cause:?}");
            assert!(error(tenant, cause).is_decisive(tenant), "{cause:?}");
        }
        for owner in [0, tenant, other] {
            assert!(error(owner, WalkErrorCause::Failed(Errno::EIO)).is_decisive(tenant));
        }
        assert_eq!(error(other, WalkErrorCause::Failed(Errno::EIO)).to_string(), "/tmp/x: EIO: I/O error");
    }

    #[test]
    fn folder_under_removal_is_closed_to_other_writers() {
        let folder = tempfile::tempdir().unwrap();
        let open = folder.path().join("open");
        fs::create_dir_all(open.join("below")).unwrap();
        for path in [open.clone(), open.join("below")] {
            fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        }
        let status = nix::sys::stat::stat(&open).unwrap();
        let opened = openat(AT_FDCWD, &open, FOLDER, Mode::empty()).unwrap();
        Removal { owner: own() }.open(opened.as_fd(), &status);
        assert_eq!(nix::sys::stat::stat(&open).unwrap().st_mode & 0o777, 0o700);
        remove(&open).unwrap();
        assert!(!open.exists());
    }

    #[test]
    fn entry_swapped_for_a_symlink_before_removal_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["shared", "shared/mine", "precious", "precious/mine"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::write(at("shared/mine/file"), "x").unwrap();
        fs::write(at("precious/mine/file"), "x").unwrap();
        let swap_and_remove = |entry: &WalkEntry<'_>| {
            if entry.name == "mine" {
                fs::rename(at("shared"), at("moved")).unwrap();
                symlink(at("precious"), at("shared")).unwrap();
                entry.remove(&Mounts::default(), own()).unwrap();
            }
        };
        let mut everything = RecordingVisitor { seen: swap_and_remove, left: 0 };
        run(&at("shared"), &mut everything);
        assert!(at("precious/mine/file").exists());
        assert!(!at("moved/mine").exists());
    }

    #[test]
    fn folder_that_replaced_another_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["mine", "precious"] {
            fs::create_dir(at(name)).unwrap();
        }
        let mut refused = 0;
        let swap_and_remove = |entry: &WalkEntry<'_>| {
            if entry.name == "mine" {
                fs::rename(at("mine"), at("moved")).unwrap();
                fs::rename(at("precious"), at("mine")).unwrap();
                refused += usize::from(entry.remove(&Mounts::default(), own()).is_err());
            }
        };
        run(folder.path(), &mut RecordingVisitor { seen: swap_and_remove, left: 0 });
        assert_eq!(refused, 1);
        assert!(at("mine").exists());
    }

    #[test]
    fn path_with_a_symlink_is_never_followed() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().canonicalize().unwrap();
        fs::create_dir_all(real.join("a/b")).unwrap();
        symlink(real.join("a"), real.join("link")).unwrap();
        assert!(open_without_links(&real.join("a/b")).is_ok());
        assert!(open_without_links(&real.join("link/b")).is_err());
        assert!(open_without_links(Path::new("a/../b")).is_err());
    }
}
