//! Files that survive a power failure whole: written beside their name, synced, renamed, the folder synced.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Readable for the agent's user only.
pub const PRIVATE: u32 = 0o600;
/// Readable for all users.
pub const PUBLIC: u32 = 0o644;

/// A file or folder of the agent could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("could not {doing} {}", path.display())]
pub struct FileError {
    doing: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

impl FileError {
    /// Wraps an I/O error with the operation, as in "could not read PATH".
    pub fn at(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { doing, path, source }
    }
}

/// Replaces `path` by `bytes` with the given mode, atomically and durably.
///
/// # Errors
/// [`FileError`]; the old content is then unchanged.
pub fn write_atomically(path: &Path, bytes: &[u8], mode: u32) -> Result<(), FileError> {
    replace(path, bytes, mode, true).map_err(FileError::at("write", path))
}

/// Replaces `path` atomically, for content that can be recreated after a power failure.
///
/// # Errors
/// [`FileError`]; the old content is then unchanged.
pub fn write_without_sync(path: &Path, bytes: &[u8], mode: u32) -> Result<(), FileError> {
    replace(path, bytes, mode, false).map_err(FileError::at("write", path))
}

/// The same where the file has another content or mode: a start of the agent needs no room for what is there. Returns whether it was written.
///
/// # Errors
/// [`FileError`]; the old content is then unchanged.
pub fn write_if_changed(path: &Path, bytes: &[u8], mode: u32) -> Result<bool, FileError> {
    let has_mode = |metadata: fs::Metadata| metadata.is_file() && metadata.permissions().mode() & 0o7777 == mode;
    if fs::symlink_metadata(path).is_ok_and(has_mode) && fs::read(path).is_ok_and(|present| present == bytes) {
        return Ok(false);
    }
    write_without_sync(path, bytes, mode).map(|()| true)
}

fn replace(path: &Path, bytes: &[u8], mode: u32, durable: bool) -> io::Result<()> {
    #[cfg(test)]
    kill_points::pass()?;
    let folder = folder_of(path);
    if !folder.exists() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().ok_or_else(|| io::Error::other("the path names no file"))?);
    name.push(".new");
    let temporary = folder.join(name);
    // A file that a crash left may have another mode.
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let written = write_new(&temporary, bytes, mode, durable).and_then(|()| fs::rename(&temporary, path));
    if let Err(error) = written {
        // Half a file would take the last room of a disk that is full.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    if durable {
        sync_folder(folder)?;
    }
    Ok(())
}

fn write_new(path: &Path, bytes: &[u8], mode: u32, durable: bool) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    // The process's umask may have removed bits.
    file.set_permissions(Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    if durable { file.sync_all() } else { Ok(()) }
}

/// Creates a folder that only the agent's user can enter.
///
/// # Errors
/// [`FileError`].
pub fn private_folder(path: &Path) -> Result<(), FileError> {
    let make = || {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        protect(path, 0o700)
    };
    make().map_err(FileError::at("create", path))
}

/// Gives a file or folder this mode, where it has another one. An equal mode writes nothing, so that it works on a read-only disk.
///
/// # Errors
/// The mode is another one, and cannot be changed.
pub fn protect(path: &Path, mode: u32) -> io::Result<()> {
    if fs::metadata(path)?.permissions().mode() & 0o7777 == mode {
        return Ok(());
    }
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Opens a file to lock it, and creates it where it is missing. One that is there can be locked on a disk that has become read-only, too.
///
/// # Errors
/// It is missing and cannot be created, or cannot be opened.
pub fn open_to_lock(path: &Path) -> io::Result<File> {
    match OpenOptions::new().create(true).append(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => File::open(path),
        opened => opened,
    }
}

/// The content of a file, or `None` if there is no such file.
///
/// # Errors
/// [`FileError`] for anything but a missing file.
pub fn read_if_there(path: &Path) -> Result<Option<String>, FileError> {
    existing(fs::read_to_string(path), path)
}

/// As [`read_if_there`], for content that need not be text.
///
/// # Errors
/// [`FileError`] for anything but a missing file.
pub fn read_bytes_if_there(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
    existing(fs::read(path), path)
}

fn existing<T>(read: io::Result<T>, path: &Path) -> Result<Option<T>, FileError> {
    match read {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::at("read", path)(error)),
    }
}

/// Removes a file durably; a missing file is fine.
///
/// # Errors
/// [`FileError`].
pub fn remove(path: &Path) -> Result<(), FileError> {
    #[cfg(test)]
    kill_points::pass().map_err(FileError::at("remove", path))?;
    match fs::remove_file(path) {
        Ok(()) => sync_folder(folder_of(path)).map_err(FileError::at("sync the folder of", path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(FileError::at("remove", path)(error)),
    }
}

pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// For tests of what a kill between two changes leaves: from one on, all changes of this thread fail.
#[cfg(test)]
pub(crate) mod kill_points {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        static CHANGES_LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    }

    /// The changes that are made before the kill; `None`: it is not killed.
    pub(crate) fn kill_after(changes: Option<usize>) {
        CHANGES_LEFT.set(changes);
    }

    pub(crate) fn is_killed() -> bool {
        CHANGES_LEFT.get() == Some(0)
    }

    pub(super) fn pass() -> io::Result<()> {
        if is_killed() {
            return Err(io::Error::other("killed"));
        }
        CHANGES_LEFT.set(CHANGES_LEFT.get().map(|left| left - 1));
        Ok(())
    }
}

#[cfg(test)]
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
    fn half_written_file_of_a_crash_does_not_block_the_next_write() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        fs::write(folder.path().join(".key.new"), b"half").unwrap();
        write_atomically(&path, b"whole", PRIVATE).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(mode(&path), 0o600);
    }

    #[test]
    fn write_that_fails_leaves_the_old_content_and_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        // A folder is not replaced by a file.
        fs::create_dir(folder.path().join("key")).unwrap();
        write_atomically(&folder.path().join("key"), b"whole", PRIVATE).unwrap_err();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn file_is_written_where_its_content_or_its_mode_differs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rules");
        let written = |bytes, mode| write_if_changed(&path, bytes, mode).unwrap();
        assert!(written(b"one", PUBLIC) && !written(b"one", PUBLIC));
        assert!(written(b"two", PUBLIC) && written(b"two", PRIVATE) && !written(b"two", PRIVATE));
        assert_eq!((fs::read(&path).unwrap(), mode(&path)), (b"two".to_vec(), PRIVATE));
    }

    #[test]
    fn missing_file_reads_as_none_and_is_removed_without_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("absent");
        assert_eq!(read_if_there(&path).unwrap(), None);
        remove(&path).unwrap();
    }
}
