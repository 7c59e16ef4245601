//! The files of an update. Every write is beside the file's name, synced, renamed, the folder synced.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use wire::package::Digest;

use super::{AgentUpdateOutcome, FailedVersion, Proof, UpdateRecord};

const FOLDER: &str = "update";
const RECORD: &str = "record.json";
const PROOF: &str = "proof.json";
const LAST: &str = "last.json";
const FAILED: &str = "failed.json";
const RESERVE: &str = "reserve";
const RESERVE_BYTES: usize = 1024 * 1024;
const FILE_BYTES: u64 = 64 * 1024;
/// The most versions that are remembered as failed; the oldest is forgotten then.
const MOST_FAILED: usize = 64;

/// A file of an update cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("could not {doing} {}", path.display())]
pub struct UpdateFileError {
    doing: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

impl UpdateFileError {
    /// Whether the disk is full.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self.source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }
}

/// The folder of an installation's updates.
#[derive(Debug, Clone)]
pub struct UpdateFolder(PathBuf);

impl UpdateFolder {
    /// Of the installation in this folder.
    #[must_use]
    pub fn of(install_root: &Path) -> Self {
        Self(install_root.join(FOLDER))
    }

    /// Whether an update is in progress.
    #[must_use]
    pub fn is_updating(&self) -> bool {
        fs::symlink_metadata(self.0.join(RECORD)).is_ok()
    }

    /// The update in progress.
    ///
    /// # Errors
    /// [`UpdateFileError`]: an operator has to look.
    pub fn record(&self) -> Result<Option<UpdateRecord>, UpdateFileError> {
        self.read(RECORD)
    }

    /// # Errors
    /// [`UpdateFileError`]; the record is then as before.
    pub fn set_record(&self, record: &UpdateRecord) -> Result<(), UpdateFileError> {
        self.write(RECORD, record)
    }

    /// Ends the update, and gives its disk back.
    ///
    /// # Errors
    /// [`UpdateFileError`].
    pub fn remove_record(&self) -> Result<(), UpdateFileError> {
        self.release_reserve()?;
        self.remove_proof()?;
        self.remove(RECORD)
    }

    /// What the new agent has written. One that cannot be read is none: the agent writes it again.
    #[must_use]
    pub fn proof(&self) -> Option<Proof> {
        self.read(PROOF).ok().flatten()
    }

    /// # Errors
    /// [`UpdateFileError`].
    pub fn set_proof(&self, proof: &Proof) -> Result<(), UpdateFileError> {
        self.write(PROOF, proof)
    }

    /// # Errors
    /// [`UpdateFileError`].
    pub fn remove_proof(&self) -> Result<(), UpdateFileError> {
        self.remove(PROOF)
    }

    /// The outcome of the last update.
    ///
    /// # Errors
    /// [`UpdateFileError`].
    pub fn last(&self) -> Result<Option<AgentUpdateOutcome>, UpdateFileError> {
        self.read(LAST)
    }

    /// # Errors
    /// [`UpdateFileError`].
    pub fn set_last(&self, outcome: &AgentUpdateOutcome) -> Result<(), UpdateFileError> {
        self.write(LAST, outcome)
    }

    /// The versions that were rolled back, the oldest first.
    ///
    /// # Errors
    /// [`UpdateFileError`].
    pub fn failed(&self) -> Result<Vec<FailedVersion>, UpdateFileError> {
        Ok(self.read(FAILED)?.unwrap_or_default())
    }

    /// Remembers a version as failed. Once more changes nothing.
    ///
    /// # Errors
    /// [`UpdateFileError`].
    pub fn remember_failed(&self, version: FailedVersion) -> Result<(), UpdateFileError> {
        let mut failed = self.failed()?;
        if failed.iter().any(|known| known.digest == version.digest) {
            return Ok(());
        }
        failed.push(version);
        let excess = failed.len().saturating_sub(MOST_FAILED);
        failed.drain(..excess);
        self.write(FAILED, &failed)
    }

    /// An operator orders this version all the same.
    ///
    /// # Errors
    /// [`UpdateFileError`].
    pub fn forget_failed(&self, digest: Digest) -> Result<(), UpdateFileError> {
        let mut failed = self.failed()?;
        let known = failed.len();
        failed.retain(|version| version.digest != digest);
        if failed.len() == known { Ok(()) } else { self.write(FAILED, &failed) }
    }

    /// Takes disk for a roll back.
    ///
    /// # Errors
    /// [`UpdateFileError`]: there is not even that much.
    pub fn take_reserve(&self) -> Result<(), UpdateFileError> {
        // No zeros, which some file systems do not store.
        let bytes: Vec<u8> = (0..RESERVE_BYTES).map(|at| u8::try_from(at * 31 % 251).unwrap_or(1)).collect();
        self.write_bytes(RESERVE, &bytes)
    }

    /// # Errors
    /// [`UpdateFileError`].
    pub fn release_reserve(&self) -> Result<(), UpdateFileError> {
        self.remove(RESERVE)
    }

    fn failure(&self, doing: &'static str, name: &str) -> impl FnOnce(io::Error) -> UpdateFileError {
        let path = self.0.join(name);
        move |source| UpdateFileError { doing, path, source }
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, UpdateFileError> {
        let read = || {
            let path = self.0.join(name);
            let found = match fs::symlink_metadata(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                found => found?,
            };
            if !found.is_file() || found.len() > FILE_BYTES {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no file that this program writes"));
            }
            match fs::read(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                text => serde_json::from_slice(&text?).map(Some).map_err(io::Error::from),
            }
        };
        read().map_err(self.failure("read", name))
    }

    fn write(&self, name: &str, value: &impl Serialize) -> Result<(), UpdateFileError> {
        let text = serde_json::to_vec(value).map_err(|error| self.failure("write", name)(error.into()))?;
        self.write_bytes(name, &text)
    }

    fn write_bytes(&self, name: &str, bytes: &[u8]) -> Result<(), UpdateFileError> {
        let write = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
            let unfinished = self.0.join(format!(".{name}.new"));
            match fs::remove_file(&unfinished) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
            let written =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished).and_then(|mut file| {
                    file.write_all(bytes)?;
                    file.sync_all()
                });
            if let Err(error) = written {
                let _ = fs::remove_file(&unfinished);
                return Err(error);
            }
            fs::rename(&unfinished, self.0.join(name))?;
            File::open(&self.0)?.sync_all()
        };
        write().map_err(self.failure("write", name))
    }

    fn remove(&self, name: &str) -> Result<(), UpdateFileError> {
        let removed = match fs::remove_file(self.0.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            removed => removed.and_then(|()| File::open(&self.0)?.sync_all()),
        };
        removed.map_err(self.failure("remove", name))
    }
}
