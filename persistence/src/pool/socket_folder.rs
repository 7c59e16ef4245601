//! The folder of a socket that this process connects to: in the runtime folder where there is one, since others clean temporary folders up
//! (systemd-tmpfiles). What is removed nevertheless is made again.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use tokio::net::UnixListener;
use uuid::Uuid;

/// Where a container has a file system of its own that can be written, even if it has no temporary folder.
const SHARED_MEMORY: &str = "/dev/shm";

/// The names of the folders.
const FOLDER_PREFIX: &str = "gpuaas-postgres-";

/// The bound of a socket's path, and the bytes that a socket's name adds to its folder's (unix(7), `.s.PGSQL.65535` in a folder).
const PATH_MAX: usize = 107;
const NAME_MAX: usize = "/monitor/.s.PGSQL.65535".len();

/// A folder that only its owner may enter. Its lock file is locked while its process lives: the kernel unlocks it, however that ends.
pub(super) struct SocketFolder {
    path: PathBuf,
    lock: Mutex<File>,
}

impl SocketFolder {
    /// In the runtime folder of the unit, or in a temporary folder. That of a login (`XDG_RUNTIME_DIR`) ends with the login, and can then not be
    /// made again.
    pub(super) fn create() -> io::Result<Self> {
        // systemd.exec(5): several are separated by colons.
        let of_unit = std::env::var_os("RUNTIME_DIRECTORY").and_then(|all| std::env::split_paths(&all).next());
        // One that another user owns is of another unit, as under `sudo`.
        let own = |folder: &PathBuf| folder.is_absolute() && is_own(folder);
        let runtime = of_unit.into_iter().filter(own);
        let folders: Vec<PathBuf> = runtime.chain([std::env::temp_dir(), SHARED_MEMORY.into()]).collect();
        Self::create_in_first(&folders)
    }

    /// In the first of these folders that can be used.
    fn create_in_first(folders: &[PathBuf]) -> io::Result<Self> {
        let mut refused = Vec::new();
        for folder in folders {
            match Self::create_in(folder) {
                Ok(made) => return Ok(made),
                Err(error) => refused.push(format!("{}: {error}", folder.display())),
            }
        }
        let refused = refused.join("; ");
        Err(io::Error::other(format!(
            "there is no folder for its socket ({refused}): mount one, and name it in TMPDIR"
        )))
    }

    fn create_in(parent: &Path) -> io::Result<Self> {
        remove_abandoned(parent);
        let id = Uuid::new_v4().simple();
        let path = parent.join(format!("{FOLDER_PREFIX}{id}"));
        if path.as_os_str().len() + NAME_MAX > PATH_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidFilename, "its path is too long for a socket"));
        }
        // It gets its name when it is locked, so that no other process takes it for an abandoned one.
        let unlocked = parent.join(format!("new-{FOLDER_PREFIX}{id}"));
        DirBuilder::new().mode(0o700).create(&unlocked)?;
        let lock = locked_file(&unlocked)?;
        std::fs::rename(&unlocked, &path)?;
        Ok(Self { path, lock: Mutex::new(lock) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the folder and its lock file again where they were removed.
    pub(super) fn restore(&self) -> io::Result<()> {
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        DirBuilder::new().mode(0o700).recursive(true).create(&self.path)?;
        // Any user may have made one of this name in a temporary folder after it was removed.
        let found = std::fs::symlink_metadata(&self.path)?;
        if !found.is_dir() || found.uid() != lock.metadata()?.uid() || found.mode() & 0o077 != 0 {
            let refused = format!("{} is not of this process", self.path.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, refused));
        }
        if self.path.join("lock").exists() {
            return Ok(());
        }
        *lock = locked_file(&self.path)?;
        Ok(())
    }

    /// Listens again on a socket of this folder where that was removed.
    pub(super) fn restore_socket(&self, socket: &Path) -> io::Result<Option<UnixListener>> {
        self.restore()?;
        if socket.exists() {
            return Ok(None);
        }
        if let Some(folder) = socket.parent() {
            DirBuilder::new().mode(0o700).recursive(true).create(folder)?;
        }
        UnixListener::bind(socket).map(Some)
    }
}

impl Drop for SocketFolder {
    fn drop(&mut self) {
        // At worst it stays until another process starts.
        let _ = self.lock.get_mut().unwrap_or_else(PoisonError::into_inner).unlock();
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn locked_file(folder: &Path) -> io::Result<File> {
    let lock = File::create_new(folder.join("lock"))?;
    lock.lock()?;
    Ok(lock)
}

fn is_own(folder: &Path) -> bool {
    let owner = |path: &Path| std::fs::metadata(path).map(|found| found.uid());
    matches!((owner(folder), owner(Path::new("/proc/self"))), (Ok(one), Ok(other)) if one == other)
}

/// Removes the folders of processes that were killed. What cannot be read or removed belongs to another user.
fn remove_abandoned(parent: &Path) {
    for folder in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        if folder.file_name().to_string_lossy().starts_with(FOLDER_PREFIX)
            && let Ok(lock) = File::open(folder.path().join("lock"))
            && lock.try_lock().is_ok()
        {
            let _ = std::fs::remove_dir_all(folder.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn folder_of_a_killed_process_is_removed_and_that_of_a_living_one_stays() {
        let parent = tempfile::tempdir().unwrap();
        let alive = SocketFolder::create_in(parent.path()).unwrap();
        let killed = SocketFolder::create_in(parent.path()).unwrap();
        killed.lock.lock().unwrap().unlock().unwrap();
        let next = SocketFolder::create_in(parent.path()).unwrap();
        assert!(!killed.path.exists() && alive.path.exists() && next.path.exists());
    }

    #[test]
    fn folder_that_cannot_be_used_is_followed_by_the_next_one() {
        let next = tempfile::tempdir().unwrap();
        let (absent, long) = (PathBuf::from("/proc/absent"), next.path().join("a-long-name-".repeat(8)));
        std::fs::create_dir(&long).unwrap();
        let made = SocketFolder::create_in_first(&[absent.clone(), long, next.path().to_owned()]).unwrap();
        assert_eq!(made.path().parent(), Some(next.path()));
        let error = SocketFolder::create_in_first(&[absent]).err().unwrap().to_string();
        assert!(error.contains("/proc/absent: ") && error.contains("TMPDIR"), "{error}");
    }

    #[tokio::test]
    async fn removed_folder_is_made_again_with_its_lock_and_its_sockets() {
        let parent = tempfile::tempdir().unwrap();
        let folder = SocketFolder::create_in(parent.path()).unwrap();
        let socket = folder.path().join("monitor/.s.PGSQL.5432");
        let _listener = folder.restore_socket(&socket).unwrap().expect("it is new");
        assert!(folder.restore_socket(&socket).unwrap().is_none(), "nothing is missing");
        std::fs::remove_dir_all(parent.path()).unwrap();
        let listener = folder.restore_socket(&socket).unwrap().expect("it was removed");
        let (connected, accepted) = tokio::join!(tokio::net::UnixStream::connect(&socket), listener.accept());
        assert!(connected.is_ok() && accepted.is_ok());
        remove_abandoned(parent.path());
        assert!(socket.exists(), "another process does not take it for an abandoned one");
        std::fs::remove_file(folder.path().join("lock")).unwrap();
        assert!(folder.restore_socket(&socket).unwrap().is_none() && folder.path().join("lock").exists());
    }

    #[test]
    fn folder_that_others_may_enter_is_not_used_in_its_place() {
        let parent = tempfile::tempdir().unwrap();
        let folder = SocketFolder::create_in(parent.path()).unwrap();
        std::fs::remove_dir_all(folder.path()).unwrap();
        std::fs::create_dir(folder.path()).unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        // With all that is looked for in it.
        let socket = folder.path().join(".s.PGSQL.5432");
        std::fs::write(folder.path().join("lock"), "").unwrap();
        let _foreign = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for refused in [folder.restore(), folder.restore_socket(&socket).map(drop)].map(Result::unwrap_err) {
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied, "{refused}");
        }
    }
}
