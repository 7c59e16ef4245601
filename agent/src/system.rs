//! An executor on a machine of its own: a tenant is a Linux user that never was before and leaves nothing behind.
//!
//! ```text
//! HOMES/<name>/                  0700, the tenant's
//! KEYS/<name>                    authorized keys: root's, outside the home, readable for sshd
//! /etc/sudoers.d/gpuaas-<name>   the few commands it may run as root
//! STATE/accounts.json            which uids were ever given
//! STATE/allocations/<id>/        the reservation; first to come, last to go
//! STATE/private/                 each tenant's own /tmp, /var/tmp and /dev/shm ([`private`])
//! ```
//!
//! Devices are kept apart by who owns their nodes ([`guard`]). Whatever a release finds left keeps the devices reserved.

use std::fs::{self, DirBuilder};
use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use wire::inventory::ExecutorKind;
use wire::proof::{Checked, Finding, Outcome};
use wire::task::{OpenTerminal, Provision, ReconcileSshKeys, Release};

use crate::executor::{Executor, Failure, Output, Released};
use crate::gpus::Gpus;
use crate::reservations::Reservations;
use crate::store::{self, StoreError};
use crate::tenant::{self, output};
use crate::terminal::Shell;

pub mod accounts;
pub mod guard;
pub mod keyrings;
pub mod mounts;
pub mod private;
pub mod processes;
pub mod search;
pub mod sudoers;
pub mod traces;
pub mod walk;

use accounts::{Account, Accounts};
use guard::Guard;
use private::Private;
use sudoers::SudoCommand;
use traces::Traces;

/// New homes begin with a copy of this.
const SKELETON: &str = "/etc/skel";
/// As often as one release removes what is left.
const REMOVALS: usize = 3;
/// How long a machine may take to go down.
const RESTARTS_WITHIN: Duration = Duration::from_secs(120);

/// What an operator decides about tenants' accounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Uids that nothing else on the machine gives out. Each is given once.
    pub uids: RangeInclusive<u32>,
    pub homes: PathBuf,
    /// What sshd is told as `AuthorizedKeysFile KEYS/%u`.
    pub keys: PathBuf,
    pub sudo_commands: Vec<SudoCommand>,
    /// Folders beside the usual ones (`/tmp` and the like) in which every user may leave files.
    pub shared: Vec<PathBuf>,
    /// Where the GPUs' device nodes lie.
    pub devices: PathBuf,
    /// The agent's own program, which is run as a tenant to give up what only the tenant can.
    pub program: PathBuf,
    /// Where the agent's own sshd listens; `None`: the machine's own lets tenants in.
    pub ssh_listen: Option<SocketAddr>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            uids: 70_000..=99_999,
            homes: PathBuf::from("/home"),
            keys: PathBuf::from("/etc/ssh/gpuaas-keys"),
            sudo_commands: Vec::new(),
            shared: Vec::new(),
            devices: PathBuf::from("/dev"),
            program: PathBuf::from("/proc/self/exe"),
            ssh_listen: None,
        }
    }
}

/// See the module's documentation.
pub struct System {
    settings: Settings,
    gpus: Arc<Gpus>,
    reservations: Reservations,
    accounts: Accounts,
    guard: Guard,
    private: Private,
    queues: PathBuf,
}

/// Why the machine cannot be used like this.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("the system executor makes users and needs root; run the agent as root, or with --executor sandbox")]
    NotRoot,
    #[error(
        "the agent sees other mounts than the machine does, so it could not clean up after a tenant; run it without PrivateTmp, \
         ProtectHome, ProtectKernelTunables and whatever else gives a service mounts of its own"
    )]
    OwnMounts,
    #[error("homes cannot lie in {}: tenants have a /tmp, /var/tmp and /dev/shm of their own; set SVC_NODE_AGENT_HOMES to another folder", .0.display())]
    HomesAreCovered(PathBuf),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the tenants' own folders cannot be made")]
    Private(#[source] Failure),
    #[error("the devices cannot be guarded")]
    Guard(#[source] Failure),
}

impl System {
    /// Takes over the tenants that an earlier agent left, and closes every device that none of them holds.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(state_dir: &Path, settings: Settings, gpus: Arc<Gpus>) -> Result<Self, OpenError> {
        if !nix::unistd::Uid::effective().is_root() {
            return Err(OpenError::NotRoot);
        }
        if !sees_the_machines_mounts() {
            return Err(OpenError::OwnMounts);
        }
        if Private::covers(&settings.homes) {
            return Err(OpenError::HomesAreCovered(settings.homes));
        }
        let reservations = Reservations::open(state_dir)?;
        let private = Private::open(state_dir)?;
        let accounts = Accounts::open(state_dir, settings.uids.clone())?;
        let make_keys = || {
            DirBuilder::new().recursive(true).mode(0o755).create(&settings.keys)?;
            fs::set_permissions(&settings.keys, fs::Permissions::from_mode(0o755))
        };
        make_keys().map_err(StoreError::at("create", &settings.keys))?;
        let guard = Guard::of_this_machine(settings.devices.clone());
        let queues = state_dir.join("mqueue");
        let system = Self { settings, gpus, reservations, accounts, guard, private, queues };
        system.make_what_is_private().map_err(OpenError::Private)?;
        system.close_what_is_free().map_err(OpenError::Guard)?;
        system.open_what_is_held().map_err(OpenError::Guard)?;
        Ok(system)
    }

    /// Device nodes and slices are the kernel's and systemd's: after a restart of the machine they are as they were made.
    fn open_what_is_held(&self) -> Result<(), Failure> {
        for reservation in self.reservations.all() {
            // One whose account was being made, or is being cleaned up, gets its devices with the task that comes again.
            match self.accounts.of(reservation.allocation_id).filter(Account::is_there) {
                Some(account) => self.guard.open(&self.gpus, &reservation.devices, &account)?,
                None => self.guard.close(&self.gpus, &reservation.devices)?,
            }
        }
        Ok(())
    }

    /// What lies in memory is gone after a restart of the machine.
    fn make_what_is_private(&self) -> Result<(), Failure> {
        let accounts = self.reservations.all().into_iter().filter_map(|held| self.accounts.of(held.allocation_id));
        accounts.filter(Account::is_there).try_for_each(|account| self.private.make(&account))
    }

    fn close_what_is_free(&self) -> Result<(), Failure> {
        let held = self.reservations.all();
        let gpus = self.gpus.list().map_err(|error| Failure::new("gpu_driver", error.to_string()))?;
        let free = gpus.iter().filter(|gpu| !held.iter().any(|one| one.devices.iter().any(|it| it.uuid == gpu.uuid)));
        self.guard.close(&self.gpus, &free.map(wire::inventory::Device::from).collect::<Vec<_>>())
    }

    fn home_of(&self, user_name: &str) -> PathBuf {
        self.settings.homes.join(user_name)
    }

    fn keys_of(&self, user_name: &str) -> PathBuf {
        self.settings.keys.join(user_name)
    }

    fn release_account(&self, task: &Release, account: &Account) -> Result<Released, Failure> {
        let (home, keys) = (self.home_of(&account.name), self.keys_of(&account.name));
        let (homes, shared) = (&self.settings.homes, &self.settings.shared);
        let traces = Traces { account, home: &home, homes, shared, private: &self.private, queues: &self.queues };
        // No new login, nothing more to run as root, no device to open: then what runs is ended, then what lies is removed.
        let _ = store::remove(&keys);
        sudoers::forbid(&account.name);
        self.guard.close(&self.gpus, &task.devices)?;
        let mut ended = processes::end_all(account);
        traces.remove();
        self.accounts.remove(account);
        self.guard.forget_slice(account);
        // A program that cron or at began meanwhile.
        ended += processes::end_all(account);
        keyrings::forget(account, &self.settings.program);

        // From here on everything is looked at again, whatever the removal thought it did.
        let mut findings = self.look_for(task, account, &traces);
        for _ in 1..REMOVALS {
            if findings.iter().all(|finding| finding.outcome == Outcome::Gone) {
                break;
            }
            // A neighbour may have moved something out of the removal's way.
            ended += processes::end_all(account);
            traces.remove();
            findings = self.look_for(task, account, &traces);
        }
        if findings.iter().all(|finding| finding.outcome == Outcome::Gone) {
            self.reservations.give_back(task.allocation_id)?;
            self.accounts.forget(task.allocation_id)?;
        }
        findings.push(self.reservations.look(task.allocation_id));
        Ok(Released { output: output([("processes_ended", json!(ended))]), findings })
    }
}

impl System {
    fn look_for(&self, task: &Release, account: &Account, traces: &Traces<'_>) -> Vec<Finding> {
        let mut findings = self.accounts.look(account);
        findings.extend([
            processes::look(account),
            sudoers::look(&account.name),
            tenant::look_at_path(Checked::AuthorizedKeys, &self.keys_of(&account.name)),
        ]);
        findings.extend(traces.look());
        findings.push(keyrings::look(account));
        findings.push(tenant::look_at_processes(&self.gpus, &task.devices));
        findings.push(tenant::look_at_memory(&self.gpus, &task.devices));
        findings
    }
}

impl Executor for System {
    fn kind(&self) -> ExecutorKind {
        ExecutorKind::System
    }

    fn provision(&self, task: &Provision) -> Result<Output, Failure> {
        tenant::check(task)?;
        self.guard.check(&self.gpus)?;
        self.reservations.reserve(task, &self.gpus)?;
        let (home, keys) = (self.home_of(&task.user_name), self.keys_of(&task.user_name));
        let account = self.accounts.make(task.allocation_id, &task.user_name, &home)?;
        make_home(&home, &account)?;
        self.private.make(&account)?;
        let may_sudo = sudoers::allow(&account.name, &self.settings.sudo_commands)?;
        self.guard.open(&self.gpus, &task.devices, &account)?;
        // Last: with its keys the tenant can come in, and everything is there.
        let lines = tenant::authorized_keys(&task.authorized_keys);
        store::write_atomically(&keys, lines.as_bytes(), store::PUBLIC)?;
        Ok(output([
            ("user_name", json!(account.name)),
            ("uid", json!(account.uid)),
            ("home", json!(home)),
            ("authorized_keys_path", json!(keys)),
            ("devices", tenant::uuids(&task.devices)),
            ("isolation", json!(self.guard.name())),
            ("sudo", json!(may_sudo)),
        ]))
    }

    fn reconcile_keys(&self, task: &ReconcileSshKeys) -> Result<Output, Failure> {
        tenant::check_authorized_keys(&task.authorized_keys)?;
        let tenant = self.reservations.of_tenant(task.allocation_id, &task.user_name)?;
        let account = self.accounts.of(task.allocation_id).filter(|account| account.name == tenant.user_name);
        // Half removed, it must not be opened again.
        let account = account.filter(Account::is_there);
        let account = account.ok_or_else(|| Failure::new("tenant_unknown", "the allocation has no account here"))?;
        let path = self.keys_of(&account.name);
        store::write_atomically(&path, tenant::authorized_keys(&task.authorized_keys).as_bytes(), store::PUBLIC)?;
        Ok(output([("authorized_keys_path", json!(path)), ("keys", json!(task.authorized_keys.len()))]))
    }

    fn release(&self, task: &Release) -> Result<Released, Failure> {
        tenant::check_user_name(&task.user_name)?;
        match self.accounts.of(task.allocation_id) {
            Some(account) => self.release_account(task, &account),
            None => self.release_nothing(task),
        }
    }

    fn shell(&self, task: &OpenTerminal) -> Result<Shell, Failure> {
        let tenant = self.reservations.of_tenant(task.allocation_id, &task.user_name)?;
        let account = self.accounts.of(task.allocation_id).filter(|account| account.name == tenant.user_name);
        let account = account.ok_or_else(|| Failure::new("tenant_unknown", "the allocation has no account here"))?;
        let home = self.home_of(&account.name);
        let home_text = home.to_string_lossy();
        let environment = tenant::environment(task.allocation_id, &account.name, &tenant.devices, &home_text, "/tmp");
        let shell = tenant::login_shell(&environment, &home, Some(account.uid));
        Ok(self.private.around(&account, self.guard.in_slice(&account, shell)))
    }

    fn tenants(&self) -> Vec<Release> {
        self.reservations.tenants()
    }

    fn validate(&self) -> Result<Output, Failure> {
        self.guard.check(&self.gpus)?;
        self.reservations.try_writing()?;
        let uids_left = self.accounts.uids_left();
        if uids_left == 0 {
            return Err(Failure::new("uids_exhausted", "no uid is left to give; widen SVC_NODE_AGENT_UIDS"));
        }
        let gpus = self.gpus.list().map_err(|error| Failure::new("gpu_driver", error.to_string()))?;
        Ok(output([
            ("gpus", json!(gpus.iter().map(|gpu| gpu.uuid.as_str()).collect::<Vec<_>>())),
            ("allocations", json!(self.reservations.ids())),
            ("uids_left", json!(uids_left)),
            ("isolation", json!(self.guard.name())),
        ]))
    }

    fn reboot(&self) -> Failure {
        let (program, args) = if Path::new("/run/systemd/system").is_dir() {
            ("systemctl", &["reboot"][..])
        } else {
            ("shutdown", &["-r", "now"][..])
        };
        match Command::new(program).args(args).output() {
            Ok(ran) if ran.status.success() => {
                // The agent ends with the machine; what it says of the restart it says when it is started again.
                std::thread::sleep(RESTARTS_WITHIN);
                Failure::new("reboot_failed", "the machine was told to restart, and goes on as it is")
            }
            Ok(ran) => {
                Failure::new("reboot_failed", format!("{program}: {}", String::from_utf8_lossy(&ran.stderr).trim()))
            }
            Err(error) => Failure::new("reboot_failed", format!("{program} cannot be run: {error}")),
        }
    }
}

impl System {
    /// No account was ever given to the allocation, or its clean-up ended well: there is a name and no uid to look for.
    fn release_nothing(&self, task: &Release) -> Result<Released, Failure> {
        self.guard.close(&self.gpus, &task.devices)?;
        let gone = |what| Finding {
            what,
            looked_for: task.allocation_id.to_string(),
            outcome: Outcome::Gone,
            detail: Some("no account of the allocation is on this node".to_owned()),
        };
        let mut findings: Vec<Finding> = Checked::of_an_account().map(gone).collect();
        findings.extend([
            sudoers::look(&task.user_name),
            tenant::look_at_path(Checked::AuthorizedKeys, &self.keys_of(&task.user_name)),
            tenant::look_at_processes(&self.gpus, &task.devices),
            tenant::look_at_memory(&self.gpus, &task.devices),
        ]);
        if findings.iter().all(|finding| finding.outcome == Outcome::Gone) {
            self.reservations.give_back(task.allocation_id)?;
        }
        findings.push(self.reservations.look(task.allocation_id));
        Ok(Released { output: output([("processes_ended", json!(0))]), findings })
    }
}

/// Whether this process has the same mounts as the machine's first one.
fn sees_the_machines_mounts() -> bool {
    let namespace = |process: &str| fs::read_link(Path::new("/proc").join(process).join("ns/mnt")).ok();
    // Who may not look at that of the first process may read its table: the numbers in it are of that namespace alone.
    let table = |process: &str| {
        let text = fs::read_to_string(Path::new("/proc").join(process).join("mountinfo")).ok()?;
        text.lines().next().and_then(|line| line.split(' ').next()).map(str::to_owned)
    };
    match (namespace("self"), namespace("1")) {
        (Some(own), Some(first)) => own == first,
        (Some(_) | None, _) => table("self").is_some_and(|own| Some(own) == table("1")),
    }
}

/// Makes the tenant's home, or finds the one that it made before. Its parent is root's, so nobody can put something else in its place
/// meanwhile.
fn make_home(home: &Path, account: &Account) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::from(StoreError::at("make the home", home)(error));
    match home.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() && metadata.uid() == account.uid => return Ok(()),
        // A crash came between making it and giving it away: nothing of a tenant can be in it.
        Ok(metadata) if metadata.is_dir() && metadata.uid() == 0 => fs::remove_dir_all(home).map_err(failed)?,
        Ok(_) => return Err(Failure::new("home_exists", format!("{} is there and not the tenant's", home.display()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    DirBuilder::new().mode(0o700).create(home).map_err(failed)?;
    copy_into(Path::new(SKELETON), home, account.uid).map_err(failed)?;
    chown(home, Some(account.uid), Some(account.uid)).map_err(failed)
}

fn copy_into(from: &Path, to: &Path, uid: u32) -> io::Result<()> {
    let entries = match fs::read_dir(from) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        let (path, kind) = (to.join(entry.file_name()), entry.file_type()?);
        if kind.is_dir() {
            DirBuilder::new().mode(0o700).create(&path)?;
            copy_into(&entry.path(), &path, uid)?;
        } else if kind.is_file() {
            fs::copy(entry.path(), &path)?;
        } else {
            continue;
        }
        chown(&path, Some(uid), Some(uid))?;
    }
    Ok(())
}
