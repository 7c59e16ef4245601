//! Files that survive a power cut whole: written beside their name, synced, renamed, the folder synced.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Only the agent's user reads it.
pub const PRIVATE: u32 = 0o600;
/// Everybody may read it.
pub const PUBLIC: u32 = 0o644;

/// A file or folder of the agent could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("could not {doing} {}", path.display())]
pub struct StoreError {
    doing: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

impl StoreError {
    /// Wraps an I/O error with what was attempted, as in "could not read PATH".
    pub fn at(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { doing, path, source }
    }
}

/// Replaces `path` by `bytes` with the given mode, all or nothing, and durably.
///
/// # Errors
/// [`StoreError`]; the old content is then still there.
pub fn write_atomically(path: &Path, bytes: &[u8], mode: u32) -> Result<(), StoreError> {
    replace(path, bytes, mode, true).map_err(StoreError::at("write", path))
}

/// Replaces `path` all or nothing, for what can be made again after a power cut.
///
/// # Errors
/// [`StoreError`]; the old content is then still there.
pub fn write_without_sync(path: &Path, bytes: &[u8], mode: u32) -> Result<(), StoreError> {
    replace(path, bytes, mode, false).map_err(StoreError::at("write", path))
}

fn replace(path: &Path, bytes: &[u8], mode: u32, durable: bool) -> io::Result<()> {
    let folder = folder_of(path);
    if !folder.exists() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().ok_or_else(|| io::Error::other("the path names no file"))?);
    name.push(".new");
    let temporary = folder.join(name);
    // What a crash left behind may have another mode.
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
    // The process's mask may have taken bits away.
    file.set_permissions(Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    if durable {
        file.sync_all()?;
    }
    fs::rename(&temporary, path)?;
    if durable {
        sync_folder(folder)?;
    }
    Ok(())
}

/// Makes a folder that only the agent's user can enter.
///
/// # Errors
/// [`StoreError`].
pub fn private_folder(path: &Path) -> Result<(), StoreError> {
    let make = || {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        fs::set_permissions(path, Permissions::from_mode(0o700))
    };
    make().map_err(StoreError::at("create", path))
}

/// The content of a file, or nothing where there is no such file.
///
/// # Errors
/// [`StoreError`] for anything but a missing file.
pub fn read_if_there(path: &Path) -> Result<Option<String>, StoreError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(StoreError::at("read", path)(error)),
    }
}

/// Removes a file durably; one that is not there is fine.
///
/// # Errors
/// [`StoreError`].
pub fn remove(path: &Path) -> Result<(), StoreError> {
    match fs::remove_file(path) {
        Ok(()) => sync_folder(folder_of(path)).map_err(StoreError::at("sync the folder of", path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(StoreError::at("remove", path)(error)),
    }
}

pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_file_is_replaced_with_its_mode_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er/secret");
        write_atomically(&path, b"one", PUBLIC).unwrap();
        write_atomically(&path, b"two", PRIVATE).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(mode(&path), 0o600);
        assert_eq!(mode(path.parent().unwrap()), 0o700);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn what_a_crash_left_half_written_does_not_stand_in_the_way() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        fs::write(folder.path().join(".key.new"), b"half").unwrap();
        write_atomically(&path, b"whole", PRIVATE).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(mode(&path), 0o600);
    }

    #[test]
    fn a_missing_file_is_nothing_and_removing_it_is_fine() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("absent");
        assert_eq!(read_if_there(&path).unwrap(), None);
        remove(&path).unwrap();
    }
}
