//! An executor on a dedicated machine: a tenant is a Linux user with a new uid who leaves nothing behind.
//!
//! ```text
//! HOMES/<name>/                  0700, the tenant's
//! KEYS/<name>                    authorized keys: root's, outside the home, readable for sshd
//! /etc/sudoers.d/gpuaas-<name>   the few commands it may run as root
//! STATE/accounts.json            which uids were ever given, and what was written for each tenant
//! STATE/allocations/<id>/        the record of the allocation; written first, removed last
//! STATE/private/                 each tenant's own /tmp, /var/tmp and /dev/shm ([`private_tmp`])
//! ```
//!
//! Devices are isolated by the owners of their nodes ([`device_guard`]), neighbours from each other by a `/proc` of their own
//! ([`private_proc`]), rules for loopback addresses ([`loopback_guard`]) and shares of the machine ([`tenant_limits`], [`disk_quotas`]). Any
//! leftover that a release finds keeps the devices reserved.
//!
//! | module | what |
//! | --- | --- |
//! | `accounts`, `account_records`, `account_cleanup` | a tenant's Linux account; what is recorded of it; what it leaves |
//! | `device_guard`, `held_devices` | which devices a tenant opens; those of present tenants |
//! | `private_proc`, `private_tmp`, `mounts` | what a session sees of processes and temporary files; the machine's mounts |
//! | `loopback_guard`, `bus_policy`, `neighbours`, `sudoers` | what a tenant reaches of others; what of it this machine lacks; commands as root |
//! | `tenant_limits`, `disk_quotas` | shares of the machine, and of its disks |
//! | `processes`, `keyrings`, `directory_walk`, `file_search` | the end of a tenant's processes, keyrings and files |

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder};
use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use tracing::warn;
use uuid::Uuid;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding, FindingOutcome};
use wire::inventory::ExecutorKind;
use wire::task::{OpenTerminal, Provision, ReconcileSshKeys, Release};

use crate::allocation_records::{AllocationRecord, AllocationRecords, WithheldGpu};
use crate::atomic_file::{self, FileError};
use crate::bounded_tool::Tool;
use crate::cleanup_checks;
use crate::executor::{Executor, ReleaseOutcome, tenant_setup};
use crate::finding_log::Condition;
use crate::gpus::Gpus;
use crate::task_outcome::{TaskFailure, TaskOutput, output, uuids};
use crate::terminal::ShellCommand;
use crate::unproved_gpus::{self, GpuWithoutProof};

pub mod account_cleanup;
pub mod account_records;
pub mod accounts;
pub mod bus_policy;
pub mod device_guard;
pub mod directory_walk;
pub mod disk_quotas;
pub mod file_search;
mod held_devices;
pub mod keyrings;
pub mod loopback_guard;
pub mod mounts;
mod neighbours;
pub mod private_proc;
pub mod private_tmp;
pub mod processes;
pub mod sudoers;
pub mod tenant_limits;

use account_cleanup::TenantLeftovers;
use account_records::content_digest;
use accounts::{Accounts, TenantAccount};
use device_guard::DeviceGuard;
use held_devices::HeldDevices;
use loopback_guard::LoopbackGuard;
use neighbours::TenantFault;
use private_tmp::PrivateTmp;
use processes::TenantProcesses;
use sudoers::SudoCommand;
use tenant_limits::{LimitSettings, TenantLimits};

/// The skeleton of new homes.
const SKELETON: &str = "/etc/skel";
/// How often one release removes what is left.
const REMOVAL_PASSES: usize = 3;
/// How long one of shadow's tools may run: it waits 15 s for another program that changes the accounts.
const ACCOUNT_TOOL_LIMIT: Duration = Duration::from_secs(60);
/// How long the order to reboot may take, and then the reboot to begin.
const REBOOT_ORDER_LIMIT: Duration = Duration::from_secs(60);
const REBOOT_TIMEOUT: Duration = Duration::from_secs(120);

/// An operator's settings of tenants' accounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Uids that nothing else on the machine assigns. Each is given once.
    pub uids: RangeInclusive<u32>,
    pub homes: PathBuf,
    /// The folder that sshd has as `AuthorizedKeysFile KEYS/%u`.
    pub keys: PathBuf,
    pub sudo_commands: Vec<SudoCommand>,
    /// Folders in addition to the usual ones (`/tmp` and the like) that every user may write to.
    pub shared: Vec<PathBuf>,
    /// The folder of the GPUs' device nodes.
    pub devices: PathBuf,
    /// Device nodes beside those of GPUs that every tenant may open.
    pub tenant_devices: Vec<PathBuf>,
    /// The agent's own program, which is run as a tenant to revoke what only the tenant can revoke.
    pub program: PathBuf,
    /// The address of the agent's own sshd; `None`: the machine's own sshd admits tenants.
    pub ssh_listen: Option<SocketAddr>,
    /// Whether what a tenant listens on at loopback addresses is closed to its neighbours.
    pub loopback_guard: bool,
    pub limits: LimitSettings,
    /// How long `useradd`, `userdel` and the like may each run.
    pub account_tool_limit: Duration,
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
            tenant_devices: Vec::new(),
            program: PathBuf::from("/proc/self/exe"),
            ssh_listen: None,
            loopback_guard: true,
            limits: LimitSettings::default(),
            account_tool_limit: ACCOUNT_TOOL_LIMIT,
        }
    }
}

/// See the module's documentation.
pub struct System {
    settings: Settings,
    gpus: Arc<Gpus>,
    allocations: AllocationRecords,
    accounts: Accounts,
    guard: DeviceGuard,
    private: PrivateTmp,
    loopback: LoopbackGuard,
    limits: TenantLimits,
    queues: PathBuf,
    held_devices: HeldDevices,
    /// By uid.
    unbounded: Mutex<BTreeMap<u32, Vec<TenantFault>>>,
    state_dir: PathBuf,
}

/// Why the executor cannot run on the machine.
#[derive(Debug, thiserror::Error)]
pub enum SystemOpenError {
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
    Store(#[from] FileError),
}

impl System {
    /// Loads the tenants that an earlier agent left, and closes every device that none of them holds. Neither needs the driver: an agent
    /// starts whatever its GPUs do.
    ///
    /// # Errors
    /// [`SystemOpenError`].
    pub fn open(state_dir: &Path, settings: Settings, gpus: Arc<Gpus>) -> Result<Self, SystemOpenError> {
        if !nix::unistd::Uid::effective().is_root() {
            return Err(SystemOpenError::NotRoot);
        }
        if !has_host_mounts() {
            return Err(SystemOpenError::OwnMounts);
        }
        if PrivateTmp::covers(&settings.homes) {
            return Err(SystemOpenError::HomesAreCovered(settings.homes));
        }
        let allocations = AllocationRecords::open(state_dir)?;
        let private = PrivateTmp::open(state_dir)?;
        let accounts = Accounts::open(state_dir, settings.uids.clone(), settings.account_tool_limit)?;
        accounts.forget_released(|allocation_id| allocations.contains(allocation_id));
        let make_keys = || {
            DirBuilder::new().recursive(true).mode(0o755).create(&settings.keys)?;
            atomic_file::protect(&settings.keys, 0o755)
        };
        make_keys().map_err(FileError::at("create", &settings.keys))?;
        let guard = DeviceGuard::of_this_machine(settings.devices.clone(), settings.tenant_devices.clone());
        let queues = queues_folder(state_dir);
        let loopback = LoopbackGuard::new(state_dir, &settings);
        let limits = TenantLimits::of_this_machine(settings.limits.clone(), guard.slices.clone());
        let system = Self {
            settings,
            gpus,
            allocations,
            accounts,
            guard,
            private,
            loopback,
            limits,
            queues,
            held_devices: HeldDevices::default(),
            unbounded: Mutex::default(),
            state_dir: state_dir.to_owned(),
        };
        system.separate_neighbours();
        system.restore_private_tmp();
        let tenants = system.present_tenants().into_iter().map(|(_, account)| account.uid).collect();
        if let Err(failure) = system.guard.close_all_but(&tenants) {
            warn!(error_code = failure.code, error = failure.message, "a device stays open that no tenant holds");
        }
        system.open_held_devices();
        system.bound_present_tenants();
        system.renew_sudo_rules();
        Ok(system)
    }

    /// Gives present tenants the sudo commands of the present settings. A file that is neither what the agent has written nor what it would
    /// write is left as it is, and reported as a change of privileges.
    fn renew_sudo_rules(&self) {
        for record in self.allocations.all() {
            let id = record.allocation_id;
            let Some(account) = self.accounts.of(id).filter(TenantAccount::is_there) else { continue };
            if let Err(error) = self.renew_sudo_rules_of(id, &account) {
                warn!(
                    error_code = error.code,
                    error = error.message,
                    user_name = account.name,
                    "a tenant keeps the previous sudo commands"
                );
            }
        }
    }

    fn renew_sudo_rules_of(&self, allocation_id: Uuid, account: &TenantAccount) -> Result<(), TaskFailure> {
        let wanted = self.sudo_digest(account);
        let found = atomic_file::read_bytes_if_there(&sudoers::path_of(&account.name))?;
        let found = found.map(|content| content_digest(&content));
        let written = self.accounts.written(allocation_id).and_then(|written| written.sudo_rules);
        if found.is_some() && found != wanted && found != written {
            return Ok(());
        }
        if wanted.is_none() {
            sudoers::forbid(&account.name);
        } else if found != wanted {
            sudoers::allow(&account.name, &self.settings.sudo_commands)?;
        }
        self.accounts.note_written(allocation_id, |written| written.sudo_rules = wanted)
    }

    /// Of the rules that the tenant has by the present settings.
    fn sudo_digest(&self, account: &TenantAccount) -> Option<String> {
        let commands = &self.settings.sudo_commands;
        (!commands.is_empty()).then(|| content_digest(sudoers::render(&account.name, commands).as_bytes()))
    }

    fn write_keys(&self, allocation_id: Uuid, name: &str, keys: &[String]) -> Result<PathBuf, TaskFailure> {
        let (path, lines) = (self.keys_of(name), tenant_setup::authorized_keys(keys));
        let digest = content_digest(lines.as_bytes());
        self.accounts.note_written(allocation_id, |written| written.authorized_keys = Some(digest))?;
        atomic_file::write_atomically(&path, lines.as_bytes(), atomic_file::PUBLIC)?;
        Ok(path)
    }

    /// The tenants whose accounts are there. An allocation whose account was being made, or is being cleaned up, gets its devices when its
    /// task is sent again.
    fn present_tenants(&self) -> Vec<(AllocationRecord, TenantAccount)> {
        let account = |held: AllocationRecord| {
            let account = self.accounts.of(held.allocation_id).filter(TenantAccount::is_there)?;
            Some((held, account))
        };
        self.allocations.all().into_iter().filter_map(account).collect()
    }

    /// Folders in memory are gone after a reboot. A tenant whose folders cannot be made gets no session; its neighbours get theirs.
    fn restore_private_tmp(&self) {
        for (held, account) in self.present_tenants() {
            if let Err(failure) = self.private.make(&account) {
                warn!(
                    error_code = failure.code,
                    error = failure.message,
                    allocation_id = %held.allocation_id,
                    "a tenant has no /tmp of its own, and no new session; correct what the error names, and restart the agent"
                );
            }
        }
    }

    const fn processes_of<'a>(&'a self, account: &'a TenantAccount) -> TenantProcesses<'a> {
        TenantProcesses { account, tenants: &self.settings.uids }
    }

    fn home_of(&self, user_name: &str) -> PathBuf {
        self.settings.homes.join(user_name)
    }

    fn keys_of(&self, user_name: &str) -> PathBuf {
        self.settings.keys.join(user_name)
    }

    fn release_account(&self, task: &Release, account: &TenantAccount) -> Result<ReleaseOutcome, TaskFailure> {
        let (home, keys) = (self.home_of(&account.name), self.keys_of(&account.name));
        let (homes, shared) = (&self.settings.homes, &self.settings.shared);
        let leftovers =
            TenantLeftovers { account, home: &home, homes, shared, private: &self.private, queues: &self.queues };
        // First no new login, no sudo and no device; then processes are ended; then files are removed. None of it waits for the driver.
        let _ = atomic_file::remove(&keys);
        sudoers::forbid(&account.name);
        let closed = self.allocations.close_devices(task.allocation_id, || self.guard.close(account));
        if let Err(failure) = closed {
            // It is open to a uid that no process has from here on, and that no other tenant gets.
            warn!(error_code = failure.code, error = failure.message, "a device of an ended tenant keeps its owner");
        }
        let processes = self.processes_of(account);
        let mut ended = processes.end_all();
        leftovers.remove();
        self.accounts.remove(account, !processes.killed().is_empty());
        self.guard.forget_slice(account);
        self.forget_bounds(account);
        // A program that cron or at started in between.
        ended += processes.end_all();
        keyrings::revoke(account, &self.settings.program);

        self.gpus.wait_until_freed(task.devices.iter().map(|device| device.uuid.as_str()));
        // From here on everything is checked, independently of the removal's results.
        let mut findings = self.check_all_removed(task, account, &leftovers);
        for _ in 1..REMOVAL_PASSES {
            if findings.iter().all(CleanupFinding::is_no_leftover) {
                break;
            }
            // A neighbour may have moved a file out of the removal's way.
            ended += processes.end_all();
            leftovers.remove();
            findings = self.check_all_removed(task, account, &leftovers);
        }
        if findings.iter().all(CleanupFinding::is_no_leftover) {
            self.allocations.free(task.allocation_id, &findings)?;
            self.accounts.forget(task.allocation_id);
        }
        findings.push(self.allocations.check_removed(task.allocation_id));
        Ok(ReleaseOutcome { output: output([("processes_ended", json!(ended))]), findings })
    }
}

impl System {
    fn check_all_removed(
        &self,
        task: &Release,
        account: &TenantAccount,
        leftovers: &TenantLeftovers<'_>,
    ) -> Vec<CleanupFinding> {
        let mut findings = self.accounts.check_removed(account);
        findings.extend([
            self.processes_of(account).check_removed(),
            sudoers::check_removed(&account.name),
            cleanup_checks::check_path_removed(CleanupCheck::AuthorizedKeys, &self.keys_of(&account.name)),
        ]);
        findings.extend(leftovers.check_removed());
        findings.push(disk_quotas::check_removed(account));
        findings.push(keyrings::check_removed(account));
        let killed = self.processes_of(account).killed();
        findings.extend(cleanup_checks::check_device_processes(&self.gpus, &task.devices, &killed));
        findings.extend(cleanup_checks::check_device_memory(&self.gpus, &task.devices));
        findings
    }
}

impl Executor for System {
    fn kind(&self) -> ExecutorKind {
        ExecutorKind::System
    }

    fn provision(&self, task: &Provision) -> Result<TaskOutput, TaskFailure> {
        tenant_setup::check(task)?;
        self.guard.check(&self.gpus)?;
        self.allocations.reserve(task, &self.gpus)?;
        let home = self.home_of(&task.user_name);
        let account = self.accounts.make(task.allocation_id, &task.user_name, &home)?;
        make_home(&home, &account)?;
        self.private.make(&account)?;
        let rules = self.sudo_digest(&account);
        self.accounts.note_written(task.allocation_id, |written| written.sudo_rules = rules)?;
        let may_sudo = sudoers::allow(&account.name, &self.settings.sudo_commands)?;
        self.restore_loopback_guard();
        let (held, gpus) = (task.devices.len(), self.count_gpus());
        let has_new_limits = self.limit(&account, held, gpus)?;
        self.guard.open(&self.gpus, &task.devices, &account, has_new_limits)?;
        self.bound(&account, held, gpus);
        // Last: with its keys the tenant can log in, and everything else is ready.
        let keys = self.write_keys(task.allocation_id, &account.name, &task.authorized_keys)?;
        Ok(output([
            ("user_name", json!(account.name)),
            ("uid", json!(account.uid)),
            ("home", json!(home)),
            ("authorized_keys_path", json!(keys)),
            ("devices", uuids(&task.devices)),
            ("further_devices", json!(self.settings.tenant_devices)),
            ("isolation", json!(self.guard.name())),
            ("separated", json!(self.separated())),
            ("sudo", json!(may_sudo)),
        ]))
    }

    fn reconcile_keys(&self, task: &ReconcileSshKeys) -> Result<TaskOutput, TaskFailure> {
        tenant_setup::check_authorized_keys(&task.authorized_keys)?;
        let tenant = self.allocations.of_tenant(task.allocation_id, &task.user_name)?;
        let account = self.accounts.of(task.allocation_id).filter(|account| account.name == tenant.user_name);
        // An account that is being removed must not be opened again.
        let account = account.filter(TenantAccount::is_there);
        let account =
            account.ok_or_else(|| TaskFailure::new("tenant_unknown", "the allocation has no account here"))?;
        let path = self.write_keys(task.allocation_id, &account.name, &task.authorized_keys)?;
        Ok(output([("authorized_keys_path", json!(path)), ("keys", json!(task.authorized_keys.len()))]))
    }

    fn release(&self, task: &Release) -> Result<ReleaseOutcome, TaskFailure> {
        tenant_setup::check_user_name(&task.user_name)?;
        match self.accounts.of(task.allocation_id) {
            Some(account) => self.release_account(task, &account),
            None => self.release_nothing(task),
        }
    }

    fn shell(&self, task: &OpenTerminal) -> Result<ShellCommand, TaskFailure> {
        let tenant = self.allocations.of_tenant(task.allocation_id, &task.user_name)?;
        let account = self.accounts.of(task.allocation_id).filter(|account| account.name == tenant.user_name);
        let account =
            account.ok_or_else(|| TaskFailure::new("tenant_unknown", "the allocation has no account here"))?;
        let home = self.home_of(&account.name);
        let home_text = home.to_string_lossy();
        let environment =
            tenant_setup::environment(task.allocation_id, &account.name, &tenant.devices, &home_text, "/tmp");
        let shell = tenant_setup::login_shell(&environment, &home, Some(account.uid));
        Ok(self.private.wrap_shell(&account, self.guard.in_slice(&account, shell)))
    }

    fn tenants(&self) -> Vec<Release> {
        self.allocations.tenants()
    }

    fn withhold_gpu(&self, uuid: &str) -> Result<WithheldGpu<'_>, TaskFailure> {
        self.allocations.withhold(uuid)
    }

    fn unproved_gpus(&self) -> BTreeMap<String, GpuWithoutProof> {
        self.allocations.unproved().all()
    }

    fn unbounded_tenants(&self) -> Vec<Condition> {
        self.bound_conditions()
    }

    fn follow_device_nodes(&self) {
        self.follow_nodes();
    }

    fn reconcile_devices(&self) -> bool {
        self.accounts.store_pending();
        self.open_held_devices();
        unproved_gpus::prove(self.allocations.unproved(), &self.gpus)
    }

    fn validate(&self) -> Result<TaskOutput, TaskFailure> {
        self.guard.check(&self.gpus)?;
        self.allocations.check_writable()?;
        self.restore_loopback_guard();
        let uids_left = self.accounts.uids_left();
        if uids_left == 0 {
            return Err(TaskFailure::new("uids_exhausted", "no uid is left to give; widen SVC_NODE_AGENT_UIDS"));
        }
        let gpus = self.gpus.list().map_err(|error| TaskFailure::new("gpu_driver", error.to_string()))?;
        Ok(output([
            ("gpus", json!(gpus.iter().map(|gpu| gpu.uuid.as_str()).collect::<Vec<_>>())),
            ("allocations", json!(self.allocations.ids())),
            ("uids_left", json!(uids_left)),
            ("isolation", json!(self.guard.name())),
            ("separated", json!(self.separated())),
        ]))
    }

    fn reboot(&self) -> TaskFailure {
        let (program, args) = if Path::new("/run/systemd/system").is_dir() {
            ("systemctl", &["reboot"][..])
        } else {
            ("shutdown", &["-r", "now"][..])
        };
        match Tool::new(program).args(args).run(REBOOT_ORDER_LIMIT) {
            Ok(_) => {
                // The agent ends with the machine; it reports the reboot after its next start.
                std::thread::sleep(REBOOT_TIMEOUT);
                TaskFailure::new("reboot_failed", "the machine accepted the order to restart, and has not restarted")
            }
            Err(error) => TaskFailure::new("reboot_failed", error.to_string()),
        }
    }
}

impl System {
    /// No account was ever given to the allocation, or its clean-up is complete: there is a name, but no uid to search for.
    fn release_nothing(&self, task: &Release) -> Result<ReleaseOutcome, TaskFailure> {
        self.gpus.wait_until_freed(task.devices.iter().map(|device| device.uuid.as_str()));
        let gone = |what| CleanupFinding {
            what,
            looked_for: task.allocation_id.to_string(),
            outcome: FindingOutcome::Gone,
            detail: Some("no account of the allocation is on this node".to_owned()),
        };
        let mut findings: Vec<CleanupFinding> = CleanupCheck::account_checks().map(gone).collect();
        findings.extend([
            sudoers::check_removed(&task.user_name),
            cleanup_checks::check_path_removed(CleanupCheck::AuthorizedKeys, &self.keys_of(&task.user_name)),
        ]);
        findings.extend(cleanup_checks::check_device_processes(&self.gpus, &task.devices, &BTreeSet::new()));
        findings.extend(cleanup_checks::check_device_memory(&self.gpus, &task.devices));
        if findings.iter().all(CleanupFinding::is_no_leftover) {
            self.allocations.free(task.allocation_id, &findings)?;
        }
        findings.push(self.allocations.check_removed(task.allocation_id));
        Ok(ReleaseOutcome { output: output([("processes_ended", json!(0))]), findings })
    }
}

/// The folder to look at message queues in. What is mounted there covers it for the thread that looks alone, so that any folder will do where a
/// disk has no room for one more.
fn queues_folder(state_dir: &Path) -> PathBuf {
    let own = state_dir.join("mqueue");
    if fs::create_dir_all(&own).is_ok() { own } else { state_dir.to_owned() }
}

/// Whether this process has the same mounts as the machine's first one.
fn has_host_mounts() -> bool {
    let namespace = |process: &str| fs::read_link(Path::new("/proc").join(process).join("ns/mnt")).ok();
    // Without access to the namespace of the first process, its mount table is compared: the mount ids in it are unique to a namespace.
    let table = |process: &str| {
        let text = fs::read_to_string(Path::new("/proc").join(process).join("mountinfo")).ok()?;
        text.lines().next().and_then(|line| line.split(' ').next()).map(str::to_owned)
    };
    match (namespace("self"), namespace("1")) {
        (Some(own), Some(first)) => own == first,
        (Some(_) | None, _) => table("self").is_some_and(|own| Some(own) == table("1")),
    }
}

/// Creates the tenant's home, or finds the one that was created before. Its parent is root's, so no other user can replace it meanwhile.
fn make_home(home: &Path, account: &TenantAccount) -> Result<(), TaskFailure> {
    let failed = |error: io::Error| {
        let is_refused = error.kind() == io::ErrorKind::PermissionDenied;
        let failure = TaskFailure::from(FileError::at("make the home", home)(error));
        match mounts::why_root_is_refused(home).filter(|_| is_refused) {
            Some(why) => TaskFailure::new(failure.code, format!("{}: {why}", failure.message)),
            None => failure,
        }
    };
    match home.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() && metadata.uid() == account.uid => return Ok(()),
        // A crash happened between its creation and its change of owner: it cannot contain anything of a tenant.
        Ok(metadata) if metadata.is_dir() && metadata.uid() == 0 => fs::remove_dir_all(home).map_err(failed)?,
        Ok(metadata) => {
            let (path, owner) = (home.display(), metadata.uid());
            // A server that squashes root has given the folder that the agent made to another user.
            let why = mounts::why_root_is_refused(home).map(|why| format!(": {why}")).unwrap_or_default();
            return Err(TaskFailure::new(
                "home_exists",
                format!("{path} is there and is user {owner}'s, not the tenant's{why}"),
            ));
        }
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
