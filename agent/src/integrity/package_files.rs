//! The files of the agent's package, compared with the list in it that its digest covers.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use agent_package::install::{version_files, version_folder};
use agent_package::manifest::{FileEntry, FileList};
use agent_package::update::{Installation, UpdateFolder};

use super::bounded_file::{FileStamp, digest, sha256};
use crate::finding_log::{Condition, PACKAGE};

/// The most files that a finding names.
const NAMED: usize = 8;

/// Watches the version that the agent is of.
pub struct PackageFiles {
    installation: Installation,
    folder: PathBuf,
    /// Files that were found unaltered, as they were then.
    unaltered: BTreeMap<String, FileStamp>,
}

impl PackageFiles {
    #[must_use]
    pub fn of(installation: Installation) -> Self {
        let folder = version_folder(&installation.root, installation.digest);
        Self { installation, folder, unaltered: BTreeMap::new() }
    }

    /// The finding about altered files. A file that looks as it did when it was last hashed is not hashed again, unless `hashes_all`.
    /// `None`: nothing is altered, or an update is in progress, which may remove the version.
    pub fn check(&mut self, hashes_all: bool) -> Option<Condition> {
        if hashes_all {
            self.unaltered.clear();
        }
        let list = version_files(&self.folder, self.installation.digest);
        let altered = match list {
            Ok(list) => self.altered(&list),
            Err(document) => vec![document],
        };
        if altered.is_empty() || UpdateFolder::of(&self.installation.root).is_updating() {
            return None;
        }
        let mut named: Vec<&str> = altered.iter().take(NAMED).map(String::as_str).collect();
        if altered.len() > NAMED {
            named.push("…");
        }
        let detail = format!("{} of {}: {}", altered.len(), self.installation.digest.name(), named.join(", "));
        Some(Condition::of_machine(PACKAGE, "altered", detail).with_state(digest(altered.join("\n").as_bytes())))
    }

    fn altered(&mut self, list: &FileList) -> Vec<String> {
        list.files.iter().filter(|file| !self.is_unaltered(file)).map(|file| file.path.clone()).collect()
    }

    fn is_unaltered(&mut self, file: &FileEntry) -> bool {
        let path = self.folder.join(&file.path);
        let Ok(metadata) = fs::symlink_metadata(&path) else { return false };
        let mode = metadata.permissions().mode() & 0o7777;
        if !metadata.is_file() || metadata.len() != file.size || mode != file.mode.bits() {
            return false;
        }
        let stamp = FileStamp::of(&metadata);
        if self.unaltered.get(&file.path) == Some(&stamp) {
            return true;
        }
        let found = File::open(&path).and_then(|opened| sha256(opened.into(), file.size.saturating_add(1)));
        let is_unaltered = found.is_ok_and(|found| found == file.sha256.hex());
        if is_unaltered {
            self.unaltered.insert(file.path.clone(), stamp);
        } else {
            self.unaltered.remove(&file.path);
        }
        is_unaltered
    }
}

#[cfg(test)]
mod tests;
