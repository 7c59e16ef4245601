//! Puts a package in place: `versions/sha256-DIGEST/` has its files, the link `current` names the version in use, and systemd's folder has
//! its units. Until the link is switched, nothing of a version in use has changed; after an error, no part of the new one is there.
//!
//! A version is a folder that was renamed into place when it was whole and on the disk. It keeps the package's manifest and list of files,
//! by which it can be verified against its digest without a network.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufReader, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use wire::PublicKey;
use wire::package::Digest;

use crate::archive::{self, ArchiveError};
use crate::contents::{self, CURRENT, UNIT_FOLDER};
use crate::manifest::{Descriptor, FileList, ImageManifest, ManifestError};
use crate::registry::{Registry, RegistryError};
use crate::signature::{self, ReleaseSignatureError};

pub(crate) const VERSIONS: &str = "versions";
const LOCK: &str = ".lock";
/// Beside a version's files.
const MANIFEST: &str = ".manifest.json";
const FILE_LIST: &str = ".files.json";
/// The beginning of folders of an installation that has not ended.
const UNFINISHED: &str = ".new-";
/// The paths in the units of `deploy/systemd`, which an installation replaces by its own.
const UNIT_PROGRAMS: &str = "/usr/local/bin/";
const UNIT_BYTES: u64 = 64 * 1024;
/// Enabled units have a link in this folder beside them (`WantedBy=` in their `[Install]`).
const WANTS: &str = "multi-user.target.wants";

/// Why nothing was installed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    #[error(transparent)]
    Pull(#[from] RegistryError),
    #[error("the package's manifest or list of files is refused")]
    Manifest(#[from] ManifestError),
    #[error("the package is refused")]
    Archive(#[source] ArchiveError),
    #[error("the package has no release signature; release it with `deploy/package --key`")]
    Unsigned,
    #[error(
        "the package's release signature is refused; sign it with a release key, or give this node's bundle the key"
    )]
    Signature(#[from] ReleaseSignatureError),
    #[error("the disk of {} is full; nothing was installed: make room and run this again", .0.display())]
    DiskFull(PathBuf),
    #[error("the package is for machines of {package}, and this one is {machine}")]
    Architecture { package: String, machine: &'static str },
    #[error("another installation is running in {}; wait for its end", .0.display())]
    Locked(PathBuf),
    #[error("an update of the agent is in progress in {}; it ends by itself: look at gpuaas-finalizer.service", .0.display())]
    Updating(PathBuf),
    #[error("version {digest} is not installed, or {altered} in it was altered")]
    VersionAltered { digest: Digest, altered: String },
    #[error("the package's unit {0} cannot be used")]
    Unit(String),
    #[error("could not {doing} {}", path.display())]
    File {
        doing: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl InstallError {
    /// The error's name, for scripts and logs.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Pull(RegistryError::Unreachable { .. }) => "registry_unreachable",
            Self::Pull(RegistryError::Slow { .. }) => "registry_slow",
            Self::Pull(RegistryError::Redirects { .. }) => "registry_redirects",
            Self::Pull(RegistryError::CredentialRefused { .. } | RegistryError::UnknownChallenge { .. }) => {
                "credential_refused"
            }
            Self::Pull(RegistryError::NotFound { .. }) => "package_not_found",
            Self::Pull(RegistryError::Refused { .. }) => "registry_refused",
            Self::Pull(RegistryError::DigestMismatch { .. }) => "digest_mismatch",
            Self::Pull(RegistryError::Truncated { .. }) => "truncated",
            Self::Pull(RegistryError::TooLong { .. }) => "too_long",
            Self::Pull(RegistryError::Write { .. }) | Self::File { .. } => "file_error",
            Self::Pull(RegistryError::Tls(_)) => "configuration",
            Self::Manifest(_) => "manifest_refused",
            Self::Archive(_) => "archive_refused",
            Self::Unsigned => "signature_missing",
            Self::Signature(_) => "signature_refused",
            Self::DiskFull(_) => "disk_full",
            Self::Architecture { .. } => "wrong_architecture",
            Self::Locked(_) => "locked",
            Self::Updating(_) => "update_in_progress",
            Self::VersionAltered { .. } => "version_altered",
            Self::Unit(_) => "unit_refused",
        }
    }
}

/// Where and as what a package is installed.
#[derive(Debug)]
pub struct InstallTarget {
    pub install_root: PathBuf,
    pub env_file: PathBuf,
    /// The name of the agent's unit.
    pub unit: String,
    /// systemd's folder for units.
    pub unit_folder: PathBuf,
    /// A package without a signature by one of them is not installed.
    pub release_keys: Vec<PublicKey>,
}

/// What an installation did.
#[derive(Debug, PartialEq, Eq)]
pub struct Installed {
    pub version: String,
    /// It was there, unaltered, and was not pulled.
    pub was_there: bool,
}

/// Installs the package of this digest and makes it the current one. It may be run again, also after it was interrupted at any point.
///
/// # Errors
/// [`InstallError`]; the version in use has not changed then.
pub fn install(digest: Digest, registry: &mut Registry, target: &InstallTarget) -> Result<Installed, InstallError> {
    if crate::update::UpdateFolder::of(&target.install_root).is_updating() {
        return Err(InstallError::Updating(target.install_root.clone()));
    }
    let (installed, list, _lock) = fetch_locked(digest, registry, target)?;
    install_units(&version_folder(&target.install_root, digest), &list, target)?;
    set_link(&target.install_root, CURRENT, digest)?;
    Ok(installed)
}

/// Pulls and verifies the package of this digest and puts it beside the version in use, which does not change.
///
/// # Errors
/// [`InstallError`].
pub fn fetch(digest: Digest, registry: &mut Registry, target: &InstallTarget) -> Result<Installed, InstallError> {
    fetch_locked(digest, registry, target).map(|(installed, ..)| installed)
}

/// Makes a version that is there the current one: its units, then the link. Each step may be repeated. Its files are not verified: the
/// previous version must come back whatever was altered in it.
///
/// # Errors
/// [`InstallError`]; the units may be those of the version already.
pub fn activate(digest: Digest, target: &InstallTarget) -> Result<(), InstallError> {
    let _lock = lock(&target.install_root)?;
    let folder = version_folder(&target.install_root, digest);
    let list = version_files(&folder, digest).map_err(|altered| InstallError::VersionAltered { digest, altered })?;
    install_units(&folder, &list, target)?;
    set_link(&target.install_root, CURRENT, digest)
}

/// Removes all versions but these.
///
/// # Errors
/// [`InstallError`]; some versions may be left.
pub fn remove_other_versions(root: &Path, but: &[Digest]) -> Result<(), InstallError> {
    let _lock = lock(root)?;
    let versions = root.join(VERSIONS);
    let needed: Vec<String> = but.iter().map(Digest::name).collect();
    for entry in fs::read_dir(&versions).map_err(file_error("list", &versions))? {
        let path = entry.map_err(file_error("list", &versions))?.path();
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        if name.starts_with("sha256-") && !needed.iter().any(|digest| digest == name) {
            fs::remove_dir_all(&path).map_err(file_error("remove", &path))?;
        }
    }
    Ok(())
}

/// Makes the finalizer's unit start that of this version.
///
/// # Errors
/// [`InstallError`].
pub fn link_finalizer(root: &Path, digest: Digest) -> Result<(), InstallError> {
    set_link(root, contents::FINALIZER_LINK, digest)
}

/// The folder of a version.
#[must_use]
pub fn version_folder(root: &Path, digest: Digest) -> PathBuf {
    root.join(VERSIONS).join(digest.name())
}

/// The version is there for as long as the lock is held.
fn fetch_locked(
    digest: Digest,
    registry: &mut Registry,
    target: &InstallTarget,
) -> Result<(Installed, FileList, File), InstallError> {
    let versions = target.install_root.join(VERSIONS);
    make_folder(&versions)?;
    make_traversable(&target.install_root)?;
    make_traversable(&versions)?;
    let lock = lock(&target.install_root)?;
    remove_unfinished(&versions)?;
    let there = verify_version(&versions.join(digest.name()), digest).ok();
    let was_there = there.is_some();
    let list = match there {
        Some(list) => list,
        None => pull(digest, registry, target, &versions)?,
    };
    Ok((Installed { version: list.version.clone(), was_there }, list, lock))
}

/// Whether a version's folder is whole and unaltered: its manifest is the one of the digest, its list that of the manifest, and its files
/// those of the list. The signature was verified when it was installed.
///
/// # Errors
/// What is missing or differs.
pub fn verify_version(folder: &Path, digest: Digest) -> Result<FileList, String> {
    let list = version_files(folder, digest)?;
    archive::verify(&list, folder)?;
    Ok(list)
}

/// The list of files of a version, verified against its digest. The files themselves are not.
///
/// # Errors
/// The name of the document that is missing or differs.
pub fn version_files(folder: &Path, digest: Digest) -> Result<FileList, String> {
    let read = |name: &str, most: u64| {
        let path = folder.join(name);
        let is_bounded = fs::symlink_metadata(&path).is_ok_and(|found| found.is_file() && found.len() <= most);
        if is_bounded { fs::read(&path).map_err(|_| name.to_owned()) } else { Err(name.to_owned()) }
    };
    let manifest = read(MANIFEST, wire::package::MANIFEST_BYTES)?;
    let list = read(FILE_LIST, crate::manifest::FILE_LIST_BYTES)?;
    let parsed = ImageManifest::parse_package(&manifest).ok().filter(|_| Digest::of(&manifest) == digest);
    let (_, files, _) = parsed.ok_or_else(|| MANIFEST.to_owned())?;
    let parsed = FileList::parse(&list).ok().filter(|_| Digest::of(&list) == files.digest);
    parsed.ok_or_else(|| FILE_LIST.to_owned())
}

/// Pulls and verifies a package, and renames it into place.
fn pull(
    digest: Digest,
    registry: &mut Registry,
    target: &InstallTarget,
    versions: &Path,
) -> Result<FileList, InstallError> {
    let unfinished = versions.join(format!("{UNFINISHED}{}", std::process::id()));
    let pulled = pull_into(&unfinished, digest, registry, target);
    let placed = pulled.and_then(|list| place(&unfinished, &versions.join(digest.name())).map(|()| list));
    if placed.is_err() {
        // What cannot be removed now is removed by the next installation.
        let _ = fs::remove_dir_all(&unfinished);
    }
    placed.map_err(|error| if is_full(&error) { InstallError::DiskFull(versions.to_owned()) } else { error })
}

fn pull_into(
    folder: &Path,
    digest: Digest,
    registry: &mut Registry,
    target: &InstallTarget,
) -> Result<FileList, InstallError> {
    let manifest = registry.manifest(digest)?;
    let (_, files, archive) = ImageManifest::parse_package(&manifest)?;
    // Before anything large is pulled.
    verify_signature(digest, registry, &target.release_keys)?;
    let mut list = Vec::new();
    registry.blob(&files, &mut list)?;
    let parsed = FileList::parse(&list)?;
    if parsed.architecture != std::env::consts::ARCH {
        let (package, machine) = (parsed.architecture, std::env::consts::ARCH);
        return Err(InstallError::Architecture { package, machine });
    }
    // Programs must be readable for the users that run them.
    DirBuilder::new().mode(0o755).create(folder).map_err(file_error("make", folder))?;
    let pulled = pull_archive(&folder.join(".archive"), registry, &archive)?;
    archive::unpack(BufReader::new(pulled), &parsed, folder).map_err(InstallError::Archive)?;
    write(&folder.join(MANIFEST), &manifest)?;
    write(&folder.join(FILE_LIST), &list)?;
    sync_folders(folder)?;
    Ok(parsed)
}

/// The archive, verified, in a file without a name: it ends with this process.
fn pull_archive(path: &Path, registry: &mut Registry, archive: &Descriptor) -> Result<File, InstallError> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create_new(true).mode(0o600);
    let mut file = options.open(path).map_err(file_error("make", path))?;
    fs::remove_file(path).map_err(file_error("remove", path))?;
    registry.blob(archive, &mut file)?;
    file.rewind().map_err(file_error("read", path))?;
    Ok(file)
}

fn verify_signature(digest: Digest, registry: &mut Registry, keys: &[PublicKey]) -> Result<(), InstallError> {
    let manifest = registry.unverified_manifest(&digest.signature_tag()).map_err(|error| match error {
        RegistryError::NotFound { .. } => InstallError::Unsigned,
        other => InstallError::Pull(other),
    })?;
    let candidates = signature::candidates(&manifest)?;
    let signatures = candidates.len();
    for (document, signature) in candidates {
        let mut payload = Vec::new();
        registry.blob(&document, &mut payload)?;
        if signature::is_by_one_of(keys, digest, &payload, &signature) {
            return Ok(());
        }
    }
    Err(InstallError::Signature(ReleaseSignatureError::Foreign { signatures, keys: keys.len() }))
}

/// Renames a whole version into place. An altered one that is there gives way, and its programs run on.
fn place(unfinished: &Path, folder: &Path) -> Result<(), InstallError> {
    if fs::symlink_metadata(folder).is_ok() {
        let aside = unfinished.with_extension("altered");
        fs::rename(folder, &aside).map_err(file_error("move away", folder))?;
        fs::rename(unfinished, folder).map_err(file_error("put in place", folder))?;
        let _ = fs::remove_dir_all(&aside);
    } else {
        fs::rename(unfinished, folder).map_err(file_error("put in place", folder))?;
    }
    sync_parent(folder)
}

/// Writes the package's units into systemd's folder, with the paths of this installation and the name of its agent's unit.
fn install_units(folder: &Path, list: &FileList, target: &InstallTarget) -> Result<(), InstallError> {
    make_folder(&target.unit_folder)?;
    let prefix = format!("{UNIT_FOLDER}/");
    for file in &list.files {
        let Some(name) = file.path.strip_prefix(&prefix) else { continue };
        let refused = || InstallError::Unit(name.to_owned());
        if file.size > UNIT_BYTES || name.contains('/') {
            return Err(refused());
        }
        let known = contents::unit(name);
        let link = known.map_or(CURRENT, |unit| unit.link);
        let programs = target.install_root.join(link).join(contents::PROGRAM_FOLDER);
        let path = folder.join(&file.path);
        let text = fs::read_to_string(&path).map_err(|_| refused())?;
        let text = text
            .replace(wire::package::DEFAULT_INSTALL_ROOT, &target.install_root.display().to_string())
            .replace(UNIT_PROGRAMS, &format!("{}/", programs.display()))
            .replace(wire::package::DEFAULT_ENV_FILE, &target.env_file.display().to_string())
            .replace(wire::package::DEFAULT_UNIT, &target.unit);
        let name = if known.is_some_and(|unit| unit.is_agent) { target.unit.as_str() } else { name };
        write_unit(&target.unit_folder.join(name), text.as_bytes())?;
        if known.is_some_and(|unit| unit.is_enabled) {
            enable_unit(name, target)?;
        }
    }
    Ok(())
}

/// As `systemctl enable` does.
fn enable_unit(name: &str, target: &InstallTarget) -> Result<(), InstallError> {
    let wants = target.unit_folder.join(WANTS);
    make_folder(&wants)?;
    let link = wants.join(name);
    if fs::symlink_metadata(&link).is_ok() {
        return Ok(());
    }
    symlink(Path::new("..").join(name), &link).map_err(file_error("enable", &link))?;
    sync_parent(&link)
}

fn write_unit(path: &Path, text: &[u8]) -> Result<(), InstallError> {
    if fs::read(path).is_ok_and(|found| found == text) {
        return Ok(());
    }
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(".new");
    let unfinished = PathBuf::from(unfinished);
    remove_if_there(&unfinished)?;
    let written =
        write(&unfinished, text).and_then(|()| fs::rename(&unfinished, path).map_err(file_error("write", path)));
    if written.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    written.map_err(|error| if is_full(&error) { InstallError::DiskFull(path.to_owned()) } else { error })?;
    sync_parent(path)
}

/// Makes a link of the installation name the version of this digest, in one step.
fn set_link(root: &Path, name: &str, digest: Digest) -> Result<(), InstallError> {
    let (link, unfinished) = (root.join(name), root.join(format!(".{name}.new")));
    let version = Path::new(VERSIONS).join(digest.name());
    if fs::read_link(&link).is_ok_and(|found| found == version) {
        return Ok(());
    }
    remove_if_there(&unfinished)?;
    let switched = symlink(&version, &unfinished).and_then(|()| fs::rename(&unfinished, &link));
    switched.map_err(file_error("switch", &link)).map_err(|error| full_disk(error, root))?;
    sync_parent(&link)
}

fn full_disk(error: InstallError, root: &Path) -> InstallError {
    if is_full(&error) { InstallError::DiskFull(root.to_owned()) } else { error }
}

fn lock(root: &Path) -> Result<File, InstallError> {
    let path = root.join(LOCK);
    let opened = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = opened.map_err(file_error("open", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(InstallError::Locked(root.to_owned())),
        Err(fs::TryLockError::Error(source)) => Err(file_error("lock", &path)(source)),
    }
}

/// Removes what an interrupted installation has left.
fn remove_unfinished(versions: &Path) -> Result<(), InstallError> {
    for entry in fs::read_dir(versions).map_err(file_error("list", versions))? {
        let path = entry.map_err(file_error("list", versions))?.path();
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        if name.starts_with(UNFINISHED) {
            fs::remove_dir_all(&path).map_err(file_error("remove", &path))?;
        }
    }
    Ok(())
}

fn remove_if_there(path: &Path) -> Result<(), InstallError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(file_error("remove", path)(source)),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn make_folder(path: &Path) -> Result<(), InstallError> {
    DirBuilder::new().recursive(true).mode(0o755).create(path).map_err(|source| {
        if source.kind() == io::ErrorKind::StorageFull {
            InstallError::DiskFull(path.to_owned())
        } else {
            file_error("make", path)(source)
        }
    })
}

/// Lets the users of unprivileged units reach the programs below this folder, whatever the mask was under which it was made.
fn make_traversable(folder: &Path) -> Result<(), InstallError> {
    let mode = fs::metadata(folder).map_err(file_error("read", folder))?.permissions().mode();
    if mode & 0o555 == 0o555 {
        return Ok(());
    }
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).map_err(file_error("write", folder))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), InstallError> {
    let written = OpenOptions::new().write(true).create_new(true).mode(0o644).open(path).and_then(|mut file| {
        file.write_all(bytes)?;
        file.set_permissions(fs::Permissions::from_mode(0o644))?;
        file.sync_all()
    });
    written.map_err(file_error("write", path))
}

/// Syncs a version's folder and those in it, so that a power failure after the rename leaves it whole.
fn sync_folders(folder: &Path) -> Result<(), InstallError> {
    for entry in fs::read_dir(folder).map_err(file_error("list", folder))? {
        let path = entry.map_err(file_error("list", folder))?.path();
        if path.is_dir() {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).map_err(file_error("write", &path))?;
            sync_folders(&path)?;
        }
    }
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).map_err(file_error("write", folder))?;
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(file_error("write", folder))
}

fn sync_parent(path: &Path) -> Result<(), InstallError> {
    let parent = path.parent().unwrap_or(path);
    File::open(parent).and_then(|folder| folder.sync_all()).map_err(file_error("write", parent))
}

fn file_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> InstallError {
    let path = path.to_owned();
    move |source| InstallError::File { doing, path, source }
}

/// Whether an error is that of a full disk.
fn is_full(error: &InstallError) -> bool {
    let (InstallError::File { source, .. }
    | InstallError::Pull(RegistryError::Write { source, .. })
    | InstallError::Archive(ArchiveError::Write { source, .. })) = error
    else {
        return false;
    };
    matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_made_under_a_strict_mask_is_traversable_for_unprivileged_units() {
        let root = tempfile::tempdir().unwrap();
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o700)).unwrap();
        make_traversable(root.path()).unwrap();
        assert_eq!(fs::metadata(root.path()).unwrap().permissions().mode() & 0o777, 0o755);
    }
}
