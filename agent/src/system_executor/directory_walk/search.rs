//! Searches for what an account owns, and visits of every entry.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::{FileStat, Mode};

use super::{FOLDER, Visitor, Walk, WalkEntry, WalkError, WalkErrorCause};
use crate::system_executor::mounts::Mounts;

/// The most errors that a visit notes.
const MAX_VISIT_ERRORS: usize = 100;

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
