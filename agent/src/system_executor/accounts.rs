//! A tenant's Linux account: created with a uid and gid that this node never used before, and removed from every file that names it.
//!
//! The tools of `shadow` change the files. They copy each file to a backup (`passwd-`) first, and such a copy would keep a removed
//! tenant: the backups are restored as they were.
//!
//! Several agents may have tenants on one machine. They change its files one after the other, and give no uid that another one has given
//! ([`SharedState`]).

use std::collections::BTreeSet;
use std::fs::{self, File, FileTimes, TryLockError};
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use tracing::{info, warn};
use uuid::Uuid;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding, FindingOutcome};

use super::account_records::{ACCOUNT_RECORDS, AccountRecords, UID_CLAIMS, UidClaims, WrittenFiles};
use crate::atomic_file::{self, FileError};
use crate::bounded_tool::Tool;
use crate::task_outcome::TaskFailure;

/// The files that name accounts, and the check of each in the proof. Each may have a backup beside it (`passwd-`).
const FILES: [(&str, CleanupCheck); 6] = [
    ("passwd", CleanupCheck::PasswdEntry),
    ("shadow", CleanupCheck::PasswdEntry),
    ("group", CleanupCheck::GroupEntry),
    ("gshadow", CleanupCheck::GroupEntry),
    ("subuid", CleanupCheck::SubuidEntry),
    ("subgid", CleanupCheck::SubuidEntry),
];

const ETC: &str = "/etc";
/// How often a tool is run when another program has locked the accounts, and the pause between: the tool itself waits 15 s.
const TOOL_RUNS: usize = 3;
const TOOL_PAUSE: Duration = Duration::from_secs(1);
/// How long another agent may have the lock, in limits of a tool: longer than all runs of one.
const LOCK_LIMITS: u32 = 4;
const LOCK_POLL: Duration = Duration::from_millis(50);

/// A tenant's account. Its gid is its uid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantAccount {
    pub name: String,
    pub uid: u32,
}

impl TenantAccount {
    /// Whether the machine has the account.
    #[must_use]
    pub fn is_there(&self) -> bool {
        id_of("passwd", &self.name) == Some(self.uid)
    }
}

/// What the agents of one machine share.
struct SharedState {
    /// Held by the agent that changes the machine's accounts.
    lock: PathBuf,
    claims: PathBuf,
    /// How long one of shadow's tools may run.
    tool_limit: Duration,
}

impl SharedState {
    fn of_this_machine(tool_limit: Duration) -> Self {
        Self { lock: "/run/gpuaas-accounts.lock".into(), claims: UID_CLAIMS.into(), tool_limit }
    }

    /// Excludes other agents from the accounts until it is dropped. One that was stopped while it has the lock is not waited for: a tenant's
    /// end goes on without its account, and is tried again.
    fn lock(&self) -> Result<File, FileError> {
        let lock = || {
            let file = File::options().create(true).append(true).open(&self.lock)?;
            let deadline = Instant::now() + self.tool_limit * LOCK_LIMITS;
            loop {
                match file.try_lock() {
                    Ok(()) => return Ok(file),
                    Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(LOCK_POLL),
                    Err(TryLockError::WouldBlock) => {
                        return Err(io::Error::new(io::ErrorKind::TimedOut, "another agent does not give it up"));
                    }
                    Err(TryLockError::Error(error)) => return Err(error),
                }
            }
        };
        lock().map_err(FileError::at("lock the accounts with", &self.lock))
    }

    fn claims(&self) -> Result<UidClaims, TaskFailure> {
        let text = atomic_file::read_if_there(&self.claims)?;
        let claims = text.map(|text| serde_json::from_str(&text)).transpose();
        let damaged = |error| {
            let path = self.claims.display();
            let message =
                format!("{path} cannot be read ({error}); restore it, or remove it while no agent has tenants");
            TaskFailure::new("node_storage", message)
        };
        Ok(claims.map_err(damaged)?.unwrap_or_default())
    }

    fn write(&self, claims: &UidClaims) -> Result<(), TaskFailure> {
        let text = serde_json::to_vec(claims).map_err(|error| TaskFailure::new("node_storage", error.to_string()))?;
        Ok(atomic_file::write_atomically(&self.claims, &text, atomic_file::PRIVATE)?)
    }

    /// Runs one of shadow's tools, which refuse to run concurrently.
    fn run(&self, tool: &str, args: &[&str]) -> Result<(), TaskFailure> {
        let _alone = self.lock()?;
        let mut runs = 1;
        loop {
            let before: Vec<_> =
                backups().into_iter().map(FileBackup::of).collect::<io::Result<_>>().map_err(failed(tool))?;
            let ran = Tool::new(tool).args(args).run_to_end(self.tool_limit);
            for backup in before {
                backup.restore().map_err(failed(tool))?;
            }
            let ran = ran.map_err(|error| TaskFailure::new("account_tools", error.to_string()))?;
            if ran.status.success() {
                return Ok(());
            }
            let message = ran.stderr;
            // Another program of the machine changes them: a package installation, an administrator.
            if runs < TOOL_RUNS && message.contains("try again later") {
                runs += 1;
                std::thread::sleep(TOOL_PAUSE);
                continue;
            }
            return Err(TaskFailure::new(
                "account_tools",
                format!("{tool} failed ({}): {}", ran.status, message.trim()),
            ));
        }
    }
}

/// See the module's documentation.
pub struct Accounts {
    uids: RangeInclusive<u32>,
    records_path: PathBuf,
    records: Mutex<AccountRecords>,
    /// Held while they are changed and stored, and locked before `records`: neither a disk that does not answer nor another agent keeps a
    /// tenant's end from reading them.
    storing: Mutex<()>,
    /// Whether the file lacks what the records have.
    is_unstored: AtomicBool,
    machine: SharedState,
}

impl Accounts {
    /// # Errors
    /// [`FileError`] when the account records cannot be read. They must not be lost: a uid that was given once could be given again.
    pub fn open(state_dir: &Path, uids: RangeInclusive<u32>, tool_limit: Duration) -> Result<Self, FileError> {
        Self::open_on(SharedState::of_this_machine(tool_limit), state_dir, uids)
    }

    fn open_on(machine: SharedState, state_dir: &Path, uids: RangeInclusive<u32>) -> Result<Self, FileError> {
        let records_path = state_dir.join(ACCOUNT_RECORDS);
        let records = match atomic_file::read_if_there(&records_path)? {
            Some(text) => serde_json::from_str(&text)
                .map_err(|error| FileError::at("understand", &records_path)(io::Error::other(error)))?,
            None => AccountRecords::default(),
        };
        // Created at the start, so that its creation is not a change that a tenant causes.
        drop(machine.lock()?);
        let (records, storing, is_unstored) = (Mutex::new(records), Mutex::default(), AtomicBool::new(false));
        Ok(Self { uids, records_path, records, storing, is_unstored, machine })
    }

    fn lock(&self) -> MutexGuard<'_, AccountRecords> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The account that was given to an allocation.
    #[must_use]
    pub fn of(&self, allocation_id: Uuid) -> Option<TenantAccount> {
        self.lock().accounts.get(&allocation_id).cloned()
    }

    /// What was written for an allocation; `None` where that was not recorded.
    #[must_use]
    pub fn written(&self, allocation_id: Uuid) -> Option<WrittenFiles> {
        self.lock().written.get(&allocation_id).cloned()
    }

    /// Records what is written for an allocation. Before it is written: what is on the machine and not recorded is another program's.
    ///
    /// # Errors
    /// `node_storage`.
    pub fn note_written(&self, allocation_id: Uuid, note: impl FnOnce(&mut WrittenFiles)) -> Result<(), TaskFailure> {
        let storing = self.storing();
        let has_changed = {
            let mut records = self.lock();
            let before = records.written.get(&allocation_id).cloned();
            note(records.written.entry(allocation_id).or_default());
            before.as_ref() != records.written.get(&allocation_id)
        };
        if has_changed { self.store(&storing) } else { Ok(()) }
    }

    /// The number of uids that can still be given.
    #[must_use]
    pub fn uids_left(&self) -> u32 {
        let next = self.lock().last_uid.map_or(*self.uids.start(), |last| last.saturating_add(1));
        (*self.uids.end()).saturating_add(1).saturating_sub(next.max(*self.uids.start()))
    }

    /// Gives the allocation an account, the same one for each call, and creates it.
    ///
    /// # Errors
    /// `uids_exhausted`, `user_exists`, `node_storage`, `account_tools`.
    pub fn make(&self, allocation_id: Uuid, name: &str, home: &Path) -> Result<TenantAccount, TaskFailure> {
        if let Some(uid) = uid_of(name)? {
            // Checked before anything is stored: a release must never remove another user's account as this tenant's.
            return self.of(allocation_id).filter(|account| account.name == name && account.uid == uid).ok_or_else(
                || TaskFailure::new("user_exists", format!("the node has a user {name} already, with uid {uid}")),
            );
        }
        let account = self.assign(allocation_id, name)?;
        let id = account.uid.to_string();
        if !is_named(&Path::new(ETC).join("group"), &account)? {
            self.machine.run("groupadd", &["--gid", &id, "--", &account.name])?;
        }
        let home = home.to_string_lossy();
        let shell = if Path::new("/bin/bash").exists() { "/bin/bash" } else { "/bin/sh" };
        let (lowest, highest) = (format!("UID_MIN={id}"), format!("UID_MAX={id}"));
        let args = [
            ["--uid", &id],
            ["--gid", &id],
            ["--home-dir", &home],
            ["--shell", shell],
            ["--comment", ""],
            // No password, but not locked: sshd refuses a locked account, whatever its keys.
            ["--password", "*"],
            // Avoids the warning about the range, and assigns no subordinate ids.
            ["-K", &lowest],
            ["-K", &highest],
            ["-K", "SUB_UID_COUNT=0"],
            ["-K", "SUB_GID_COUNT=0"],
        ];
        let mut args = args.concat();
        args.extend(["--no-user-group", "--no-create-home", "--no-log-init", "--", &account.name]);
        self.machine.run("useradd", &args)?;
        Ok(account)
    }

    /// Removes the account from every file that names it. [`Accounts::check_removed`] finds those that still do. `has_killed`: processes of
    /// it are killed and cannot end yet, for which the tool would refuse.
    pub fn remove(&self, account: &TenantAccount, has_killed: bool) {
        if id_of("passwd", &account.name) == Some(account.uid) {
            let force: &[&str] = if has_killed { &["--force"] } else { &[] };
            let _ = self.machine.run("userdel", &[force, &["--", account.name.as_str()]].concat());
        }
        if id_of("group", &account.name) == Some(account.uid) {
            let _ = self.machine.run("groupdel", &["--", &account.name]);
        }
        // A crash between a tool and the restore of its backups leaves them; then they are cleaned line by line.
        let Ok(_alone) = self.machine.lock() else { return };
        for backup in backups() {
            let _ = without_lines_of(&backup, account);
        }
    }

    /// Checks every file that could name the account.
    #[must_use]
    pub fn check_removed(&self, account: &TenantAccount) -> Vec<CleanupFinding> {
        [CleanupCheck::PasswdEntry, CleanupCheck::GroupEntry, CleanupCheck::SubuidEntry]
            .map(|what| {
                let files = FILES.iter().filter(|(_, of)| *of == what);
                let paths = files.flat_map(|(file, _)| [Path::new(ETC).join(file), backup_of(file)]);
                let (mut found, mut unreadable) = (Vec::new(), None);
                for path in paths {
                    match is_named(&path, account) {
                        Ok(true) => found.push(path.display().to_string()),
                        Ok(false) => {}
                        Err(error) => unreadable = Some(error.message),
                    }
                }
                let outcome = match (found.is_empty(), &unreadable) {
                    (false, _) => FindingOutcome::Present,
                    (true, Some(_)) => FindingOutcome::Unknown,
                    (true, None) => FindingOutcome::Gone,
                };
                let detail = if found.is_empty() { unreadable } else { Some(found.join(", ")) };
                CleanupFinding { what, looked_for: format!("{} ({})", account.name, account.uid), outcome, detail }
            })
            .to_vec()
    }

    /// Forgets the allocation of the account. Its uid is never given again. Where the disk is full, the record is removed later, by
    /// [`Self::store_pending`], or at the next start by [`Self::forget_released`].
    pub fn forget(&self, allocation_id: Uuid) {
        let storing = self.storing();
        let was_known = {
            let mut records = self.lock();
            let was_written = records.written.remove(&allocation_id).is_some();
            records.accounts.remove(&allocation_id).is_some() || was_written
        };
        if was_known && let Err(failure) = self.store(&storing) {
            warn!(
                error_code = failure.code,
                error = failure.message,
                "the record of a tenant that has left is removed once there is room"
            );
        }
    }

    /// Forgets the accounts of allocations that have no record. Their tenants are released: an allocation is recorded before its account is, and
    /// for as long. Their own records outlived them where the disk was full.
    pub fn forget_released(&self, is_recorded: impl Fn(Uuid) -> bool) {
        let released: Vec<Uuid> = {
            let records = self.lock();
            let recorded = records.accounts.keys().chain(records.written.keys());
            recorded.copied().filter(|allocation_id| !is_recorded(*allocation_id)).collect()
        };
        released.into_iter().for_each(|allocation_id| self.forget(allocation_id));
    }

    /// Stores the records that the disk did not take.
    pub fn store_pending(&self) {
        let storing = self.storing();
        if self.is_unstored.load(Ordering::Relaxed) && self.store(&storing).is_ok() {
            info!("the records of accounts are stored again");
        }
    }

    /// Stored before the account is created: a crash in between wastes a uid and gives none twice.
    fn assign(&self, allocation_id: Uuid, name: &str) -> Result<TenantAccount, TaskFailure> {
        if let Some(account) = self.of(allocation_id) {
            return Ok(account);
        }
        let _alone = self.machine.lock()?;
        let storing = self.storing();
        let (taken, mut claims) = (ids_in_use()?, self.machine.claims()?);
        let is_free = |uid: &u32| !taken.contains(uid) && !claims.has_another(&self.records_path, *uid);
        let first =
            self.lock().last_uid.map_or(*self.uids.start(), |last| last.saturating_add(1)).max(*self.uids.start());
        let uid = (first..=*self.uids.end()).find(is_free).ok_or_else(|| {
            let message = format!(
                "every uid of {}..={} was given once; widen SVC_NODE_AGENT_UIDS, a uid is never used twice",
                self.uids.start(),
                self.uids.end()
            );
            TaskFailure::new("uids_exhausted", message)
        })?;
        claims.claim(&self.records_path, uid);
        self.machine.write(&claims)?;
        let account = TenantAccount { name: name.to_owned(), uid };
        {
            let mut records = self.lock();
            records.last_uid = Some(uid);
            records.accounts.insert(allocation_id, account.clone());
        }
        let stored = self.store(&storing);
        if stored.is_err() {
            self.lock().accounts.remove(&allocation_id);
        }
        stored.map(|()| account)
    }

    fn storing(&self) -> MutexGuard<'_, ()> {
        self.storing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn store(&self, _alone: &MutexGuard<'_, ()>) -> Result<(), TaskFailure> {
        let records = self.lock().clone();
        let text =
            serde_json::to_vec_pretty(&records).map_err(|error| TaskFailure::new("node_storage", error.to_string()))?;
        let written = atomic_file::write_atomically(&self.records_path, &text, atomic_file::PRIVATE);
        self.is_unstored.store(written.is_err(), Ordering::Relaxed);
        Ok(written?)
    }
}

fn failed(tool: &str) -> impl FnOnce(io::Error) -> TaskFailure {
    let tool = tool.to_owned();
    move |error| TaskFailure::new("account_tools", format!("{tool} cannot be run: {error}"))
}

fn backup_of(file: &str) -> PathBuf {
    Path::new(ETC).join(format!("{file}-"))
}

fn backups() -> Vec<PathBuf> {
    FILES.iter().map(|(file, _)| backup_of(file)).collect()
}

/// The backup of a file.
struct FileBackup {
    path: PathBuf,
    was: Option<FileState>,
}

struct FileState {
    bytes: Vec<u8>,
    mode: u32,
    uid: u32,
    gid: u32,
    modified: SystemTime,
}

impl FileBackup {
    fn of(path: PathBuf) -> io::Result<Self> {
        let was = match fs::metadata(&path) {
            Ok(metadata) => Some(FileState {
                bytes: fs::read(&path)?,
                mode: metadata.mode() & 0o7777,
                uid: metadata.uid(),
                gid: metadata.gid(),
                modified: metadata.modified()?,
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        Ok(Self { path, was })
    }

    fn restore(self) -> io::Result<()> {
        match self.was {
            None => match fs::remove_file(&self.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                Ok(()) | Err(_) => Ok(()),
            },
            Some(was) if fs::read(&self.path).is_ok_and(|bytes| bytes == was.bytes) => Ok(()),
            Some(was) => was.write(&self.path),
        }
    }
}

impl FileState {
    fn write(&self, path: &Path) -> io::Result<()> {
        atomic_file::write_without_sync(path, &self.bytes, self.mode).map_err(io::Error::other)?;
        chown(path, Some(self.uid), Some(self.gid))?;
        // After the change of owner, which removes mode bits.
        fs::set_permissions(path, fs::Permissions::from_mode(self.mode))?;
        fs::File::options().append(true).open(path)?.set_times(FileTimes::new().set_modified(self.modified))
    }
}

/// Whether a line is about the account: by its name; by its uid if the file has one; as a member of a group.
fn names_account(file: &Path, line: &str, account: &TenantAccount) -> bool {
    let fields: Vec<&str> = line.split(':').collect();
    let file = file.file_name().and_then(|name| name.to_str()).unwrap_or_default().trim_end_matches('-');
    let id = account.uid.to_string();
    let is_member = |field: &&str| field.split(',').any(|member| member == account.name);
    fields[0] == account.name
        || match file {
            "passwd" => fields[1..].iter().skip(1).take(2).any(|field| *field == id),
            "group" => fields.get(2).is_some_and(|gid| *gid == id) || fields.get(3).is_some_and(is_member),
            "gshadow" => fields.iter().skip(2).any(is_member),
            "subuid" | "subgid" => fields[0] == id,
            _ => false,
        }
}

fn is_named(path: &Path, account: &TenantAccount) -> Result<bool, TaskFailure> {
    let text = atomic_file::read_if_there(path)?.unwrap_or_default();
    Ok(text.lines().any(|line| names_account(path, line, account)))
}

fn without_lines_of(path: &Path, account: &TenantAccount) -> io::Result<()> {
    let backup = FileBackup::of(path.to_owned())?;
    let Some(mut was) = backup.was else { return Ok(()) };
    let text = String::from_utf8_lossy(&was.bytes).into_owned();
    if !text.lines().any(|line| names_account(path, line, account)) {
        return Ok(());
    }
    let lines = text.lines().filter(|line| !names_account(path, line, account));
    was.bytes = lines.flat_map(|line| [line, "\n"]).collect::<String>().into_bytes();
    was.write(path)
}

/// The uid of a user, from the machine's own file or from a directory service.
fn uid_of(name: &str) -> Result<Option<u32>, TaskFailure> {
    if let Some(uid) = id_of("passwd", name) {
        return Ok(Some(uid));
    }
    match nix::unistd::User::from_name(name) {
        Ok(user) => Ok(user.map(|user| user.uid.as_raw())),
        Err(error) => Err(TaskFailure::new("account_tools", format!("users cannot be looked up: {error}"))),
    }
}

/// The number beside a name in the machine's own file of users or groups.
fn id_of(file: &str, name: &str) -> Option<u32> {
    let text = atomic_file::read_if_there(&Path::new(ETC).join(file)).ok()??;
    let mut entries = text.lines().map(|line| line.split(':'));
    entries.find_map(|mut fields| (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?)
}

/// Every uid and gid that the machine's own files name.
fn ids_in_use() -> Result<BTreeSet<u32>, TaskFailure> {
    let mut numbers = BTreeSet::new();
    for file in ["passwd", "group"] {
        let text = atomic_file::read_if_there(&Path::new(ETC).join(file))?.unwrap_or_default();
        let fields = text.lines().flat_map(|line| line.split(':').skip(2).take(2));
        numbers.extend(fields.filter_map(|field| field.parse::<u32>().ok()));
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> TenantAccount {
        TenantAccount { name: "tena".into(), uid: 70_001 }
    }

    #[test]
    fn account_line_is_recognized_by_name_uid_and_membership() {
        let names_account = |file: &str, line: &str| names_account(Path::new(file), line, &account());
        for (file, line) in [
            ("/etc/passwd", "tena:x:70001:70001::/home/tena:/bin/bash"),
            ("/etc/passwd-", "other:x:70001:1::/home/other:/bin/bash"),
            ("/etc/passwd", "other:x:1:70001::/home/other:/bin/bash"),
            ("/etc/group", "docker:x:998:ann,tena"),
            ("/etc/group-", "other:x:70001:"),
            ("/etc/gshadow", "docker:!::ann,tena"),
            ("/etc/shadow-", "tena:!:20000:0:99999:7:::"),
            ("/etc/subuid", "tena:100000:65536"),
            ("/etc/subgid-", "70001:100000:65536"),
        ] {
            assert!(names_account(file, line), "{file} {line}");
        }
        for (file, line) in [
            ("/etc/passwd", "tenant:x:1:1::/home/tena:/bin/sh"),
            ("/etc/group", "docker:x:998:tenant"),
            ("/etc/shadow", "ann:!:70001:0:99999:7:::"),
            ("/etc/subuid", "ann:70001:65536"),
            ("/etc/passwd", ""),
        ] {
            assert!(!names_account(file, line), "{file} {line}");
        }
    }

    #[test]
    fn uid_is_given_once_across_releases_and_restarts() {
        let folder = tempfile::tempdir().unwrap();
        let open = || open(folder.path(), 70_000..=70_002).unwrap();
        let (one, two, three) = (Uuid::from_u128(1), Uuid::from_u128(2), Uuid::from_u128(3));
        let accounts = open();
        let first = accounts.assign(one, "one").unwrap();
        assert_eq!(accounts.assign(one, "one").unwrap(), first);
        accounts.note_written(one, |written| written.sudo_rules = Some("digest".to_owned())).unwrap();
        assert_eq!(open().written(one).unwrap().sudo_rules.as_deref(), Some("digest"));
        accounts.forget(one);
        let accounts = open();
        assert_eq!(accounts.written(one), None);
        let second = accounts.assign(two, "two").unwrap();
        let repeated = accounts.assign(one, "one").unwrap();
        assert_eq!([first.uid, second.uid, repeated.uid], [70_000, 70_001, 70_002]);
        assert_eq!(accounts.uids_left(), 0);
        assert_eq!(accounts.assign(three, "three").unwrap_err().code, "uids_exhausted");
        assert_eq!(accounts.of(two), Some(second));
    }

    #[test]
    fn account_of_a_release_that_the_disk_did_not_record_is_forgotten_at_the_next_start() {
        let folder = tempfile::tempdir().unwrap();
        let open = || open(folder.path(), 70_000..=70_002).unwrap();
        let (present, released) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let accounts = open();
        for (allocation_id, name) in [(present, "one"), (released, "two")] {
            accounts.assign(allocation_id, name).unwrap();
            accounts.note_written(allocation_id, |written| written.sudo_rules = Some("digest".to_owned())).unwrap();
        }
        open().forget_released(|allocation_id| allocation_id == present);
        let accounts = open();
        assert!(accounts.of(present).is_some() && accounts.written(present).is_some());
        assert!(accounts.of(released).is_none() && accounts.written(released).is_none());
        assert_eq!(accounts.assign(Uuid::from_u128(3), "three").unwrap().uid, 70_002, "no uid is given twice");
    }

    /// Accounts of an agent whose folder also holds the machine's shared files.
    fn open(folder: &Path, uids: RangeInclusive<u32>) -> Result<Accounts, FileError> {
        open_beside(folder, folder, uids)
    }

    fn open_beside(machine: &Path, folder: &Path, uids: RangeInclusive<u32>) -> Result<Accounts, FileError> {
        Accounts::open_on(shared_state(machine), folder, uids)
    }

    fn shared_state(folder: &Path) -> SharedState {
        let tool_limit = Duration::from_secs(60);
        SharedState { lock: folder.join("lock"), claims: folder.join("uids.json"), tool_limit }
    }

    #[test]
    fn accounts_that_another_agent_keeps_locked_are_refused_after_a_bounded_wait() {
        let folder = tempfile::tempdir().unwrap();
        let machine = SharedState { tool_limit: Duration::from_millis(100), ..shared_state(folder.path()) };
        let held = machine.lock().unwrap();
        let failed = machine.run("true", &[]).unwrap_err();
        assert_eq!(failed.code, "node_storage");
        let waiting = std::thread::spawn(move || machine.lock());
        drop(held);
        assert!(waiting.join().unwrap().is_ok());
    }

    #[test]
    fn account_is_read_while_another_agent_keeps_the_machines_accounts_locked() {
        let folder = tempfile::tempdir().unwrap();
        let accounts = std::sync::Arc::new(open(folder.path(), 70_000..=70_002).unwrap());
        let (present, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
        accounts.assign(present, "one").unwrap();
        let held = shared_state(folder.path()).lock().unwrap();
        let waiting = {
            let accounts = std::sync::Arc::clone(&accounts);
            std::thread::spawn(move || accounts.assign(next, "two"))
        };
        // It waits by now, or it does a moment later.
        std::thread::sleep(Duration::from_millis(100));
        assert!(accounts.of(present).is_some());
        accounts.forget(present);
        assert!(!waiting.is_finished(), "the other agent has it");
        drop(held);
        assert_eq!(waiting.join().unwrap().unwrap().uid, 70_001);
    }

    #[test]
    fn uid_whose_account_was_not_stored_is_given_to_no_tenant() {
        let folder = tempfile::tempdir().unwrap();
        let accounts = open(folder.path(), 70_000..=70_002).unwrap();
        let in_the_way = folder.path().join(".accounts.json.new");
        fs::create_dir(&in_the_way).unwrap();
        let id = Uuid::from_u128(1);
        for _ in 0..2 {
            assert_eq!(accounts.assign(id, "one").unwrap_err().code, "node_storage");
            assert_eq!(accounts.of(id), None);
        }
        fs::remove_dir(&in_the_way).unwrap();
        assert_eq!(accounts.assign(id, "one").unwrap().uid, 70_002, "the others may have been claimed");
    }

    #[test]
    fn two_agents_on_one_machine_never_give_the_same_uid() {
        let machine = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|name| machine.path().join(name));
        let agent = |folder: &Path| open_beside(machine.path(), folder, 70_000..=70_005).unwrap();
        let mut given = Vec::new();
        for n in 0..2 {
            given.push(agent(&one).assign(Uuid::from_u128(2 * n), "one").unwrap().uid);
            given.push(agent(&two).assign(Uuid::from_u128(2 * n + 1), "two").unwrap().uid);
        }
        assert_eq!(given, [70_000, 70_001, 70_002, 70_003]);
        fs::remove_dir_all(&two).unwrap();
        let next = || agent(&one).assign(Uuid::new_v4(), "one").unwrap().uid;
        assert_eq!([next(), next()], [70_004, 70_005]);
        assert_eq!(fs::read_to_string(machine.path().join("uids.json")).unwrap().matches("accounts.json").count(), 1);
    }

    #[test]
    fn tenant_that_has_left_is_forgotten_although_the_records_cannot_be_written_and_they_are_later() {
        let folder = tempfile::tempdir().unwrap();
        let accounts = open(folder.path(), 70_000..=70_001).unwrap();
        let id = Uuid::from_u128(1);
        accounts.assign(id, "tena").unwrap();
        // No file can be written where this folder is.
        let in_the_way = folder.path().join(".accounts.json.new");
        fs::create_dir(&in_the_way).unwrap();
        accounts.forget(id);
        accounts.store_pending();
        let stored = || open(folder.path(), 70_000..=70_001).unwrap().of(id);
        assert_eq!((accounts.of(id), stored().map(|account| account.uid)), (None, Some(70_000)));
        fs::remove_dir(&in_the_way).unwrap();
        accounts.store_pending();
        assert_eq!(stored(), None);
    }

    #[test]
    fn unreadable_account_records_give_no_uid() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("accounts.json"), "{").unwrap();
        assert!(open(folder.path(), 70_000..=70_001).is_err());
    }
}
