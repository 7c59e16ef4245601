//! The archive of a package: a tar of regular files, gzip. It is written in a fixed order, without times and owners, so that the same
//! files give the same bytes. It is unpacked against the verified list of files: what is not in the list is not written.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use flate2::{Compression, GzBuilder};
use sha2::{Digest as _, Sha256};
use tar::{Archive, Builder, EntryType, Header};
use wire::package::Digest;

use crate::manifest::{FileEntry, FileList, FileMode, PACKAGE_BYTES};

/// Of a gzip header: the system that compressed does not matter.
const UNKNOWN_SYSTEM: u8 = 255;
const COPY_BYTES: usize = 64 * 1024;

/// The files of a package by their paths in it.
pub type Files = BTreeMap<String, (FileMode, Vec<u8>)>;

/// Why an archive was not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    #[error("the archive has {0:?}, which its list of files does not name")]
    Unlisted(String),
    #[error("the archive has {path:?} as {kind}; only regular files are accepted")]
    NotAFile { path: String, kind: &'static str },
    #[error("the archive has {0:?} twice")]
    Twice(String),
    #[error("the archive lacks {0:?}")]
    Missing(String),
    #[error("{path:?} in the archive is not the file of the list: {difference}")]
    Differs { path: String, difference: &'static str },
    #[error("the archive cannot be read")]
    Read(#[source] io::Error),
    #[error("could not write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Writes the files, which are sorted by their paths, as an archive.
///
/// # Errors
/// Where the output cannot be written.
pub fn write(files: &Files, out: impl Write) -> io::Result<()> {
    let gzip = GzBuilder::new().mtime(0).operating_system(UNKNOWN_SYSTEM).write(out, Compression::best());
    let mut archive = Builder::new(gzip);
    for (path, (mode, content)) in files {
        let mut header = Header::new_ustar();
        header.set_path(path)?;
        header.set_entry_type(EntryType::Regular);
        header.set_mode(mode.bits());
        header.set_size(content.len() as u64);
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        header.set_cksum();
        archive.append(&header, content.as_slice())?;
    }
    archive.into_inner()?.finish()?.flush()
}

/// Unpacks an archive into an empty folder of the caller's alone. Every file that is there at the end is one of the list, whole, and on
/// the disk.
///
/// # Errors
/// [`ArchiveError`] for the first thing that differs from the list; the folder's content is then of no use.
pub fn unpack(archive: impl Read, list: &FileList, folder: &Path) -> Result<(), ArchiveError> {
    let mut lacking: BTreeMap<&str, &FileEntry> = list.files.iter().map(|file| (file.path.as_str(), file)).collect();
    // Headers and padding are beside the files; the list bounds these.
    let plain = GzDecoder::new(archive).take(PACKAGE_BYTES * 2);
    let mut archive = Archive::new(plain);
    // Raw: extensions of the format (long names, sparse files) are entries that are no regular files.
    for entry in archive.entries().map_err(ArchiveError::Read)?.raw(true) {
        let mut entry = entry.map_err(ArchiveError::Read)?;
        let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        if entry.header().entry_type() != EntryType::Regular {
            return Err(ArchiveError::NotAFile { path, kind: kind_of(entry.header().entry_type()) });
        }
        let Some(listed) = lacking.remove(path.as_str()) else {
            let is_listed = list.files.iter().any(|file| file.path == path);
            return Err(if is_listed { ArchiveError::Twice(path) } else { ArchiveError::Unlisted(path) });
        };
        let mode = entry.header().mode().map_err(ArchiveError::Read)?;
        if entry.size() != listed.size || mode != listed.mode.bits() {
            return Err(ArchiveError::Differs { path, difference: "its size or its mode" });
        }
        let found = write_file(&mut entry, &folder.join(&listed.path), listed.mode)?;
        if found != listed.sha256 {
            return Err(ArchiveError::Differs { path, difference: "its content" });
        }
    }
    match lacking.pop_first() {
        Some((path, _)) => Err(ArchiveError::Missing(path.to_owned())),
        None => Ok(()),
    }
}

/// Whether a folder has every file of the list, unaltered.
///
/// # Errors
/// The path of the first file that is missing or differs.
pub fn verify(list: &FileList, folder: &Path) -> Result<(), String> {
    for file in &list.files {
        let path = folder.join(&file.path);
        let metadata = fs::symlink_metadata(&path).map_err(|_| file.path.clone())?;
        let is_plain = metadata.is_file() && metadata.len() == file.size;
        if !is_plain || metadata.permissions().mode() & 0o7777 != file.mode.bits() {
            return Err(file.path.clone());
        }
        if !File::open(&path).and_then(digest_of).is_ok_and(|found| found == file.sha256) {
            return Err(file.path.clone());
        }
    }
    Ok(())
}

fn digest_of(mut content: File) -> io::Result<Digest> {
    let (mut hasher, mut buffer) = (Sha256::new(), vec![0; COPY_BYTES]);
    loop {
        match content.read(&mut buffer)? {
            0 => return Ok(Digest::finish(hasher)),
            read => hasher.update(&buffer[..read]),
        }
    }
}

fn kind_of(entry_type: EntryType) -> &'static str {
    match entry_type {
        EntryType::Symlink => "a symbolic link",
        EntryType::Link => "a hard link",
        EntryType::Char | EntryType::Block => "a device",
        EntryType::Fifo => "a named pipe",
        EntryType::Directory => "a folder",
        _ => "an entry of another type",
    }
}

fn write_file(content: &mut impl Read, path: &Path, mode: FileMode) -> Result<Digest, ArchiveError> {
    let failed = |source| ArchiveError::Write { path: path.to_owned(), source };
    if let Some(parent) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(parent).map_err(failed)?;
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
    let (mut hasher, mut buffer) = (Sha256::new(), vec![0; COPY_BYTES]);
    loop {
        let read = content.read(&mut buffer).map_err(ArchiveError::Read)?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
        file.write_all(&buffer[..read]).map_err(failed)?;
    }
    // Whatever the caller's mask is.
    file.set_permissions(fs::Permissions::from_mode(mode.bits())).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    Ok(Digest::finish(hasher))
}

#[cfg(test)]
mod tests;
