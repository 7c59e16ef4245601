//! Reads of files that an intruder may have replaced by something that does not end, or does not answer.

use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use nix::fcntl::OFlag;
use sha2::{Digest as _, Sha256};

/// The largest configuration file that is read.
pub const CONFIGURATION_BYTES: u64 = 1024 * 1024;
/// Bytes that are hashed at once.
const CHUNK: usize = 64 * 1024;

/// What shows that a file has not changed since it was hashed. Only root sets a change time back, by the machine's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    mode: u32,
    owner: (u32, u32),
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    /// Of a file with this metadata.
    #[must_use]
    pub fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.len(),
            mode: metadata.mode(),
            owner: (metadata.uid(), metadata.gid()),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// The content of a regular file. `None`: there is none.
///
/// # Errors
/// It cannot be read, is no regular file, or is too large.
pub fn read(path: &Path, most: u64) -> io::Result<Option<(Vec<u8>, Metadata)>> {
    let file = match open(path) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    let mut content = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut content)?;
    if content.len() as u64 > most {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {most} bytes")));
    }
    Ok(Some((content, metadata)))
}

/// Whether a file was not read because of what it is: an intruder may have made it so, and other programs may read it.
#[must_use]
pub fn is_unfit(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::FileTooLarge)
}

/// A named pipe is opened without waiting for its other end.
fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits() | OFlag::O_CLOEXEC.bits()).open(path)
}

/// The SHA-256 of an open file, in hexadecimal digits. What is beyond `most` bytes is left out.
///
/// # Errors
/// It cannot be read.
pub fn sha256(file: OwnedFd, most: u64) -> io::Result<String> {
    let (mut hasher, mut buffer) = (Sha256::new(), vec![0; CHUNK]);
    let mut file = File::from(file).take(most);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex::encode(hasher.finalize())),
            read => hasher.update(&buffer[..read]),
        }
    }
}

/// The SHA-256 of bytes, in hexadecimal digits.
#[must_use]
pub fn digest(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}
