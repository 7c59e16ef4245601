//! The store of logins on this machine: one file per profile, readable by its owner alone, replaced atomically.
//!
//! A login is written into a file beside, which is locked by the process that writes it. A process that is killed leaves the file; the next one
//! that writes removes it, where no process holds its lock.

use crate::failure::{ExitStatus, Failure};
use crate::output::Output;
use chrono::{DateTime, Utc};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize, Serializer};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The longest file of a login.
const MAX_LOGIN_BYTES: u64 = 256 * 1024;
/// The room that is reserved for a login: most have a few kilobytes.
const RESERVED_BYTES: usize = 64 * 1024;
/// The letters of the number at the end of a file beside a login.
const NUMBER_LETTERS: usize = 16;
/// A file beside a login that is younger may not be locked yet.
const ABANDONED_AFTER: Duration = Duration::from_mins(10);
/// The same where its file system has no locks: longer than any login waits for its user.
const ABANDONED_AFTER_WITHOUT_LOCK: Duration = Duration::from_hours(24);
/// The most entries of the folder that are looked at.
const MAX_ENTRIES: usize = 10_000;

/// A login: the server, the provider and the tokens.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Login {
    /// The service's address.
    pub(crate) server: String,
    /// The authorities of its certificate, where they are not the system's.
    pub(crate) ca_bundle: Option<PathBuf>,
    pub(crate) issuer: String,
    pub(crate) token_endpoint: String,
    pub(crate) revocation_endpoint: Option<String>,
    pub(crate) client_id: String,
    #[serde(serialize_with = "exposed")]
    pub(crate) client_secret: Option<SecretString>,
    #[serde(serialize_with = "exposed_text")]
    pub(crate) access_token: SecretString,
    #[serde(serialize_with = "exposed")]
    pub(crate) refresh_token: Option<SecretString>,
    /// The client is a key of a service account: a new token is issued for its secret (RFC 6749, section 4.4).
    #[serde(default)]
    pub(crate) service_account: bool,
    /// When the access token ends, as far as that is known.
    pub(crate) expires_at: Option<DateTime<Utc>>,
}

impl Login {
    /// Whether the token can be renewed without the user.
    pub(crate) const fn is_renewable(&self) -> bool {
        self.refresh_token.is_some() || self.service_account
    }
}

fn exposed<S: Serializer>(secret: &Option<SecretString>, to: S) -> Result<S::Ok, S::Error> {
    secret.as_ref().map(|secret| secret.expose_secret()).serialize(to)
}

fn exposed_text<S: Serializer>(secret: &SecretString, to: S) -> Result<S::Ok, S::Error> {
    secret.expose_secret().serialize(to)
}

/// The folder of this user's logins, and the profile.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    folder: PathBuf,
    profile: String,
    pub(super) calls: FileCalls,
}

/// The calls that file systems of shared homes refuse, though others have them.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileCalls {
    pub(super) lock: fn(&File) -> Result<(), Errno>,
    /// The same, refused where another process has the lock.
    pub(super) try_lock: fn(&File) -> Result<(), Errno>,
    pub(super) create: fn(&Path) -> io::Result<File>,
    pub(super) synchronize_folder: fn(&Path) -> io::Result<()>,
}

impl FileCalls {
    pub(super) const SYSTEM: Self = Self {
        lock: |file| flock(file, FlockOperation::LockExclusive),
        try_lock: |file| flock(file, FlockOperation::NonBlockingLockExclusive),
        create: |path| OpenOptions::new().create_new(true).write(true).mode(0o600).open(path),
        synchronize_folder: |path| File::open(path)?.sync_all(),
    };
}

/// An exclusive lock on the login of a profile.
pub(crate) struct ProfileLock(File);

impl Drop for ProfileLock {
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

impl Store {
    /// `$XDG_CONFIG_HOME/gpuctl`, or `~/.config/gpuctl` (XDG Base Directory Specification).
    pub(crate) fn of_user(profile: &str) -> Result<Self, Failure> {
        let named = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let folder = named("XDG_CONFIG_HOME").or_else(|| named("HOME").map(|home| home.join(".config")));
        let folder = folder.ok_or_else(|| {
            Failure::usage("neither XDG_CONFIG_HOME nor HOME names the folder of logins")
                .next("Set HOME, or XDG_CONFIG_HOME, to an absolute path.")
        })?;
        Self::new(folder.join("gpuctl"), profile)
    }

    pub(crate) fn new(folder: PathBuf, profile: &str) -> Result<Self, Failure> {
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if profile.is_empty() || profile.len() > 64 || profile.starts_with('.') || !profile.chars().all(good) {
            return Err(Failure::usage(format!("`{profile}` is no name of a profile")).next("Name it with up to 64 letters, digits, dots, dashes and underscores, not a dot first: --profile (or SVC_PROFILE)"));
        }
        Ok(Self { folder, profile: profile.to_owned(), calls: FileCalls::SYSTEM })
    }

    pub(crate) fn profile(&self) -> &str {
        &self.profile
    }

    /// The folder of known host keys.
    pub(crate) fn known_hosts(&self) -> Result<PathBuf, Failure> {
        let folder = self.folder.join("known_hosts");
        make_folder(&folder).map_err(|error| failure_at(&folder, &error))?;
        Ok(folder)
    }

    fn path(&self) -> PathBuf {
        self.folder.join(format!("{}.json", self.profile))
    }

    /// The login; `None` where there is none.
    pub(crate) fn read(&self) -> Result<Option<Login>, Failure> {
        let path = self.path();
        // A pipe in its place is not waited for.
        let nonblocking = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
        let mut file = match OpenOptions::new().read(true).custom_flags(nonblocking).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failure_at(&path, &error)),
        };
        let about = file.metadata().map_err(|error| failure_at(&path, &error))?;
        let wrong = |why: &str| {
            let shown = path.display();
            Failure::new(ExitStatus::LoggedOut, format!("{shown}: {why}"))
                .next("Remove it, and log in again: gpuctl login")
        };
        if !about.is_file() {
            return Err(wrong("the stored login is not a regular file"));
        }
        if about.permissions().mode() & 0o077 != 0 {
            return Err(wrong("others can read this login, and may have"));
        }
        if about.len() > MAX_LOGIN_BYTES {
            return Err(wrong("this is no login: it is too long"));
        }
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(|error| failure_at(&path, &error))?;
        // Its content is not shown: it contains tokens.
        serde_json::from_str(&text).map(Some).map_err(|_| wrong("this is no login of this release"))
    }

    /// Replaces the login.
    pub(crate) fn write(&self, login: &Login) -> Result<(), Failure> {
        self.reserve()?.store(login)
    }

    /// Room for a login that is about to be issued or renewed: where there is none, no user approves it and no refresh token is spent.
    pub(crate) fn reserve(&self) -> Result<Reservation, Failure> {
        let reserve = || {
            make_folder(&self.folder)?;
            self.remove_abandoned();
            let file = NewFile::reserve(&self.path(), RESERVED_BYTES, self.calls)?;
            // A login that others can read is refused when it is read.
            match file.file.metadata()?.permissions().mode() & 0o077 {
                0 => Ok(Reservation(file)),
                _ => Err(io::Error::other("its file system shows every file to other users")),
            }
        };
        reserve().map_err(|error: io::Error| unwritable(&self.path(), &error))
    }

    /// Removes what killed processes have left beside logins. What cannot be removed is left to the next one.
    fn remove_abandoned(&self) {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().take(MAX_ENTRIES).flatten();
        for entry in entries.filter(|entry| is_beside_a_login(&entry.file_name())) {
            let path = entry.path();
            // A link is not followed.
            let file = match path.symlink_metadata() {
                Ok(about) if about.is_file() => OpenOptions::new().write(true).open(&path),
                Ok(_) | Err(_) => continue,
            };
            if file.is_ok_and(|file| is_abandoned(&file, self.calls)) {
                let _ = fs::remove_file(&path);
            }
        }
    }

    /// Removes the login. Returns whether there was one.
    pub(crate) fn remove(&self) -> Result<bool, Failure> {
        match fs::remove_file(self.path()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(failure_at(&self.path(), &error)),
        }
    }

    /// Waits until no other process of this user changes the login, and locks it. `None`, after a notice, where that cannot be done: file
    /// systems of shared homes may have no locks.
    pub(crate) fn lock(&self, out: Output) -> Option<ProfileLock> {
        let path = self.folder.join(format!(".{}.lock", self.profile));
        let lock = || {
            make_folder(&self.folder)?;
            let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path)?;
            if (self.calls.try_lock)(&file) == Err(Errno::WOULDBLOCK) {
                let shown = path.display();
                out.notice(&format!("Another gpuctl of this profile changes its login; waiting for it ({shown})."));
            }
            (self.calls.lock)(&file)?;
            Ok(ProfileLock(file))
        };
        let locked: io::Result<_> = lock();
        let warned = locked.inspect_err(|error| {
            let path = path.display();
            out.notice(&format!(
                "{path} cannot be locked ({error}). Run no other gpuctl of this profile at the same moment."
            ));
        });
        warned.ok()
    }
}

/// Room for a login, in the folder of logins.
pub(crate) struct Reservation(NewFile);

impl Reservation {
    /// Replaces the login by this one.
    pub(crate) fn store(self, login: &Login) -> Result<(), Failure> {
        let path = self.0.path.clone();
        let text = serde_json::to_vec_pretty(login).map_err(io::Error::from);
        text.and_then(|text| self.0.replace_by(&text)).map_err(|error| unwritable(&path, &error))
    }
}

/// Whether a file of the folder has the name that [`NewFile`] gives: no profile begins with a dot.
fn is_beside_a_login(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    let parts = name.strip_prefix('.').and_then(|rest| rest.rsplit_once('.'));
    parts.is_some_and(|(login, number)| {
        login.ends_with(".json")
            && number.len() == NUMBER_LETTERS
            && number.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

/// Whether the process that made the file has ended.
fn is_abandoned(file: &File, calls: FileCalls) -> bool {
    let after = match (calls.try_lock)(file) {
        Ok(()) => ABANDONED_AFTER,
        Err(Errno::WOULDBLOCK | Errno::INTR) => return false,
        Err(_) => ABANDONED_AFTER_WITHOUT_LOCK,
    };
    let changed_at = file.metadata().and_then(|about| about.modified());
    // Where the clock of the file server is ahead, it is too young.
    changed_at.is_ok_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age >= after))
}

fn make_folder(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn failure_at(path: &Path, error: &io::Error) -> Failure {
    Failure::new(ExitStatus::Failed, format!("{}: {error}", path.display()))
        .next("Make it readable and writable for you, or name another folder in XDG_CONFIG_HOME.")
}

fn unwritable(path: &Path, error: &io::Error) -> Failure {
    Failure::new(ExitStatus::Failed, format!("the login cannot be stored in {}: {error}", path.display())).next(
        "Make room there, make the folder writable, or name another folder in XDG_CONFIG_HOME; then repeat the command.",
    )
}

/// Replaces a file atomically by one that only this user can read.
pub(crate) fn write_private(path: &Path, content: &[u8]) -> io::Result<()> {
    NewFile::reserve(path, content.len(), FileCalls::SYSTEM)?.replace_by(content)
}

/// A file beside the one that it is about to replace, which only this user can read. It is removed where it does not replace it. Its lock says
/// that this process lives.
struct NewFile {
    path: PathBuf,
    beside: PathBuf,
    file: File,
    calls: FileCalls,
}

impl NewFile {
    /// With so many bytes, so that a full disk or a quota is found before there is anything to lose.
    fn reserve(path: &Path, bytes: usize, calls: FileCalls) -> io::Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let beside = path.with_file_name(format!(".{name}.{:0NUMBER_LETTERS$x}", rand::random::<u64>()));
        let file = (calls.create)(&beside)?;
        // A file system without locks is accepted.
        let _ = (calls.try_lock)(&file);
        let mut new = Self { path: path.to_owned(), beside, file, calls };
        new.file.write_all(&vec![0; bytes])?;
        new.synchronize()?;
        Ok(new)
    }

    fn replace_by(mut self, content: &[u8]) -> io::Result<()> {
        self.file.rewind()?;
        self.file.write_all(content)?;
        self.file.set_len(content.len() as u64)?;
        self.synchronize()?;
        fs::rename(&self.beside, &self.path)?;
        self.synchronize_folder()
    }

    fn synchronize(&self) -> io::Result<()> {
        where_supported(self.file.sync_all())
    }

    /// The new name may not be on the disk yet: after a power failure the old file would be there, with a refresh token that is spent.
    fn synchronize_folder(&self) -> io::Result<()> {
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        match where_supported((self.calls.synchronize_folder)(folder)) {
            // A folder that can be written to and not be listed cannot be opened.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            done => done,
        }
    }
}

/// A file system without this call writes to its disk by itself.
fn where_supported(synchronized: io::Result<()>) -> io::Result<()> {
    match synchronized {
        Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP)) => {
            Ok(())
        }
        done => done,
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // It is absent where it has replaced the other one.
        let _ = fs::remove_file(&self.beside);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn login() -> Login {
        Login {
            server: "https://gpu.example".to_owned(),
            ca_bundle: None,
            issuer: "https://id.example".to_owned(),
            token_endpoint: "https://id.example/token".to_owned(),
            revocation_endpoint: None,
            client_id: "gpuctl".to_owned(),
            client_secret: None,
            access_token: "an-access-token".to_owned().into(),
            refresh_token: Some("a-refresh-token".to_owned().into()),
            service_account: false,
            expires_at: None,
        }
    }

    #[test]
    fn login_is_stored_for_its_owner_alone() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path().join("gpuctl"), "default").unwrap();
        assert!(store.read().unwrap().is_none());
        store.write(&login()).unwrap();
        let read = store.read().unwrap().unwrap();
        assert_eq!(read.access_token.expose_secret(), "an-access-token");
        assert!(!format!("{read:?}").contains("an-access-token"), "a secret is not shown");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&store.path()), mode(&store.folder)), (0o600, 0o700));
        let left: Vec<_> = fs::read_dir(&store.folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["default.json"]);
        assert!(store.remove().unwrap() && !store.remove().unwrap());
    }

    #[test]
    fn login_file_that_is_readable_by_others_or_invalid_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path().to_owned(), "default").unwrap();
        store.write(&login()).unwrap();
        fs::set_permissions(store.path(), fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(store.read().unwrap_err().exit_status, ExitStatus::LoggedOut);
        for content in [&b"{\"access_token\":\"hidden\"}"[..], &vec![b'x'; 300_000]] {
            write_private(&store.path(), content).unwrap();
            let failure = store.read().unwrap_err();
            assert!(failure.exit_status == ExitStatus::LoggedOut && !failure.message.contains("hidden"), "{failure}");
        }
    }

    #[test]
    fn folder_or_pipe_in_place_of_a_login_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path().to_owned(), "default").unwrap();
        let refused = || {
            let failure = store.read().unwrap_err();
            assert!(
                failure.exit_status == ExitStatus::LoggedOut && failure.message.contains("not a regular file"),
                "{failure}"
            );
            assert!(failure.next.is_some(), "{failure}");
        };
        fs::create_dir(store.path()).unwrap();
        refused();
        fs::remove_dir(store.path()).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(store.path()).status().unwrap().success());
        refused();
    }

    #[test]
    fn login_is_replaced_without_a_lock_and_without_remains() {
        const OUT: Output = Output { format: crate::output::OutputFormat::Table, quiet: true };
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::new(folder.path().to_owned(), "default").unwrap();
        assert!(store.lock(OUT).is_some());
        type Lock = fn(&File) -> Result<(), Errno>;
        let refusals: [Lock; 4] =
            [|_| Err(Errno::NOSYS), |_| Err(Errno::NOLCK), |_| Err(Errno::OPNOTSUPP), |_| Err(Errno::INVAL)];
        for lock in refusals {
            store.calls.lock = lock;
            assert!(store.lock(OUT).is_none());
            store.write(&login()).unwrap();
        }
        drop(store.reserve().unwrap());
        let mut left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, [".default.lock", "default.json"]);
    }

    /// A file beside the login, as a gpuctl that was killed leaves it.
    fn left(store: &Store, name: &str, age: Duration) -> PathBuf {
        let path = store.folder.join(name);
        fs::write(&path, vec![0; RESERVED_BYTES]).unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(SystemTime::now() - age).unwrap();
        path
    }

    #[test]
    fn file_that_a_killed_gpuctl_left_is_removed_at_the_next_use_and_that_of_a_live_one_stays() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::new(folder.path().to_owned(), "default").unwrap();
        let abandoned = left(&store, ".default.json.0123456789abcdef", ABANDONED_AFTER);
        let of_another = left(&store, ".lab.json.0123456789abcdef", ABANDONED_AFTER);
        let young = left(&store, ".default.json.1123456789abcdef", Duration::from_mins(9));
        let other = left(&store, ".default.json.backup", ABANDONED_AFTER * 10);
        // One that waits for its user.
        let waiting = store.reserve().unwrap();
        waiting.0.file.set_modified(SystemTime::now() - ABANDONED_AFTER * 3).unwrap();
        store.write(&login()).unwrap();
        for (path, stays) in [(&abandoned, false), (&of_another, false), (&young, true), (&other, true)] {
            assert_eq!(path.exists(), stays, "{}", path.display());
        }
        waiting.store(&login()).unwrap();
        // Without locks, a day has to pass.
        store.calls.try_lock = |_| Err(Errno::NOSYS);
        let old = left(&store, ".default.json.2123456789abcdef", ABANDONED_AFTER_WITHOUT_LOCK);
        let of_today = left(&store, ".default.json.3123456789abcdef", Duration::from_hours(23));
        store.write(&login()).unwrap();
        assert!(!old.exists() && of_today.exists());
    }

    #[test]
    fn replaced_login_is_on_the_disk_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::new(folder.path().to_owned(), "default").unwrap();
        // It fails here where it is called before the name is there.
        store.calls.synchronize_folder = |folder| {
            assert!(folder.join("default.json").exists());
            Err(io::Error::other("the disk is broken"))
        };
        let failure = store.write(&login()).unwrap_err();
        assert!(failure.message.contains("the disk is broken"), "{failure}");
        for errno in [Errno::INVAL, Errno::NOSYS, Errno::OPNOTSUPP] {
            assert!(where_supported(Err(errno.into())).is_ok());
        }
        store.calls.synchronize_folder = |_| Err(io::ErrorKind::PermissionDenied.into());
        store.write(&login()).unwrap();
    }

    #[test]
    fn folder_that_shows_files_to_others_or_is_none_takes_no_login() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let mut shared = Store::new(folder.path().to_owned(), "default").unwrap();
        shared.calls.create = |path| OpenOptions::new().create_new(true).write(true).mode(0o644).open(path);
        for store in [shared, Store::new(file, "default").unwrap()] {
            let failure = store.write(&login()).unwrap_err();
            assert!(failure.next.as_deref().unwrap_or_default().contains("XDG_CONFIG_HOME"), "{failure}");
            assert!(!store.path().exists(), "nothing is stored where others can read it");
        }
    }

    #[test]
    fn profile_name_cannot_be_a_path() {
        for bad in ["", "..", "../x", ".x", "a/b", "a b", &"x".repeat(65)] {
            assert!(Store::new(PathBuf::from("/tmp"), bad).is_err(), "{bad}");
        }
    }
}
