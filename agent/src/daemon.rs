//! The running agent: its identity, and its four concurrent loops (poll, execute and report, heartbeat, renew).

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use agent_package::update::Installation;
use chrono::Utc;
use ed25519_dalek::SigningKey;
use nix::fcntl::{Flock, FlockArg};
use reqwest::StatusCode;
use tokio::sync::{Notify, Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};
use uuid::Uuid;
use wire::Verifiers;
use wire::cleanup_proof::FindingOutcome;
use wire::heartbeat::PollSettings;
use wire::inventory::{ExecutorKind, NodeInventory};

use crate::agent_update::AgentUpdates;
use crate::atomic_file::{self, FileError};
use crate::bounded_reading::{BoundedReading, LATE_AFTER, Reading};
use crate::chain;
use crate::config::AgentConfig;
use crate::executor::Executor;
use crate::finding_log;
use crate::full_jitter::Backoff;
use crate::gpu_reset::GpuResetter;
use crate::gpus::Gpus;
use crate::identity::{AgentIdentity, IdentityError, IdentityStore};
use crate::integrity::IntegrityMonitor;
use crate::inventory::InventoryReadings;
use crate::node_api_client::{ClientError, NodeApiClient, NodeApiError};
use crate::repeated_failures::RepeatedFailures;
use crate::sandbox::Sandbox;
use crate::server_clock::{self, ServerClock};
use crate::service_manager::ServiceManager;
use crate::simulated_faults::{SimulatedExecutor, SimulatedFaults};
use crate::ssh::{self, TenantAccess};
use crate::system_executor::loopback_guard::LoopbackGuard;
use crate::system_executor::{self, System, bus_policy, private_tmp};
use crate::task_journal::{Journal, JournalError};
use crate::terminal::{Spools, TerminalSessions};
use crate::validation::Validator;

mod devices;
mod enroll;
mod execute;
mod heartbeat;
mod poll;
mod renew;
mod terminal;
mod update;

/// First pause after a failure.
const BACKOFF_BASE: Duration = Duration::from_millis(250);
/// How long tasks in flight may take to end when the agent is stopped. A task that does not end in time is finished from the journal at
/// the next start.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);
/// The most tasks that wait for others, beside those that are executed.
const WAITING_TASKS: usize = 256;
/// A process that is stopped ends after this time, whatever hangs in it: before the service manager kills it (`TimeoutStopSec=`).
pub const STOP_TIMEOUT: Duration = Duration::from_secs(25);

/// Why the agent exits by itself. Each reason has an exit code of its own, so that a supervisor knows when a restart helps.
#[derive(Debug, thiserror::Error)]
pub enum Fatal {
    #[error(
        "this node was removed from the inventory; it will get nothing any more. Register the machine as a new node to use it \
         again"
    )]
    NodeRemoved,
    #[error(
        "the enrollment token is refused: it is used, expired, or of another node. Ask an administrator to reissue the node's \
         enrollment"
    )]
    EnrollmentRefused(#[source] NodeApiError),
    #[error(
        "the node is not enrolled and SVC_ENROLLMENT_TOKEN is not set. Ask an administrator to reissue the node's enrollment"
    )]
    NoEnrollmentToken,
    #[error(
        "the node's certificate expired at {not_after} and SVC_ENROLLMENT_TOKEN is not set. Ask an administrator to reissue the \
         node's enrollment, then run the restart command that comes with it"
    )]
    CertificateExpired { not_after: chrono::DateTime<Utc> },
    #[error("the control plane does not support this agent's protocol ({}); upgrade the agent", wire::PROTOCOL)]
    UpgradeRequired(#[source] NodeApiError),
    #[error("another agent runs on the state folder; stop it first")]
    AlreadyRunning,
    #[error(
        "the state folder {} does not answer. Look for a dead mount on its path, and at the kernel's log for errors of the disk",
        path.display()
    )]
    StateFolderHangs { path: PathBuf },
    #[error("the process could not be set up")]
    Runtime(#[source] std::io::Error),
    #[error(transparent)]
    System(#[from] system_executor::SystemOpenError),
    #[error(transparent)]
    Store(#[from] FileError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("{left} of the tenants on this machine could not be removed; the log says what is left of each")]
    TenantsRemain { left: usize },
}

impl Fatal {
    /// 3 enrollment refused, 4 node removed, 5 certificate expired, 6 upgrade required, 7 already running, 8 tenants remain, 1 anything
    /// else.
    /// (0 is a requested stop, 2 a wrong configuration.)
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::EnrollmentRefused(_) | Self::NoEnrollmentToken => 3,
            Self::NodeRemoved => 4,
            Self::CertificateExpired { .. } => 5,
            Self::UpgradeRequired(_) => 6,
            Self::AlreadyRunning => 7,
            Self::TenantsRemain { .. } => 8,
            Self::Runtime(_)
            | Self::StateFolderHangs { .. }
            | Self::System(_)
            | Self::Store(_)
            | Self::Identity(_)
            | Self::Client(_)
            | Self::Journal(_) => 1,
        })
    }

    /// Whether the same agent may continue when it is started again: the unit does not start it after the other exit codes.
    fn may_pass(&self) -> bool {
        self.exit_code() == ExitCode::from(1)
    }

    /// For the log field `error_code`.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NodeRemoved => "node_removed",
            Self::EnrollmentRefused(_) => "enrollment_rejected",
            Self::NoEnrollmentToken => "no_enrollment_token",
            Self::CertificateExpired { .. } => "certificate_expired",
            Self::UpgradeRequired(_) => "upgrade_required",
            Self::AlreadyRunning => "already_running",
            Self::StateFolderHangs { .. } => "state_folder_hangs",
            Self::Runtime(_) => "runtime",
            Self::System(_) => "executor",
            Self::Store(_) => "node_storage",
            Self::Identity(_) => "identity",
            Self::Client(_) => "client",
            Self::Journal(_) => "journal",
            Self::TenantsRemain { .. } => "tenants_remain",
        }
    }

    /// The errors that no retry corrects, whatever the call.
    fn of(error: NodeApiError) -> Result<Self, NodeApiError> {
        let is_too_old = error.is_refused_with(&[StatusCode::UPGRADE_REQUIRED]) && !error.is_from_older_control_plane();
        if error.is_node_removed() {
            Ok(Self::NodeRemoved)
        } else if is_too_old {
            Ok(Self::UpgradeRequired(error))
        } else {
            Err(error)
        }
    }
}

/// Runs the agent on this machine until `stop` is cancelled.
///
/// # Errors
/// [`Fatal`], when it cannot continue.
pub async fn run(config: AgentConfig, manager: Arc<ServiceManager>, stop: CancellationToken) -> Result<(), Fatal> {
    open_state_dir(&config.state_dir)?;
    let gpus = gpus(&config);
    match gpus.as_ref() {
        Gpus::Nvml(_) => info!("GPUs are read through NVML"),
        Gpus::Simulated(gpus) => warn!(gpus = gpus.len(), "GPUs are simulated: this node computes nothing"),
        Gpus::Absent { why } => warn!(why, "no GPU driver: this node offers no GPU; --simulate-gpus N makes some up"),
    }
    let executor = executor(&config, &gpus)?;
    if config.system.is_some() {
        private_tmp::warn_of_logins_without();
    }
    run_with(config, gpus, executor, manager, stop).await
}

/// Makes the state folder where it is missing. Everything else that is stored is below it: a disk that does not answer is the reason of a
/// start that fails, and not of one that never ends.
fn open_state_dir(state_dir: &Path) -> Result<(), Fatal> {
    let folder = state_dir.to_owned();
    let mut opening = BoundedReading::of(state_dir.display().to_string());
    match opening.read_within(LATE_AFTER, move || atomic_file::private_folder(&folder)) {
        Reading::Fresh(opened) => Ok(opened?),
        Reading::Late { .. } => Err(Fatal::StateFolderHangs { path: state_dir.to_owned() }),
    }
}

/// A machine whose GPUs an agent has read before has them, also while the driver's library is not installed: its packages may be in an upgrade,
/// beside programs of tenants that run on.
fn gpus(config: &AgentConfig) -> Arc<Gpus> {
    let detected = Gpus::detect(config.node_id, config.simulated_gpus.as_ref(), config.gpu_deadline);
    Arc::new(match detected {
        Gpus::Absent { .. } if finding_log::has_read_gpus(&config.state_dir) => Gpus::of_driver(config.gpu_deadline),
        detected @ (Gpus::Nvml(_) | Gpus::Simulated(_) | Gpus::Absent { .. }) => detected,
    })
}

fn executor(config: &AgentConfig, gpus: &Arc<Gpus>) -> Result<Arc<dyn Executor>, Fatal> {
    Ok(match &config.system {
        Some(settings) => {
            with_simulated_faults(System::open(&config.state_dir, settings.clone(), Arc::clone(gpus))?, config)
        }
        None => with_simulated_faults(Sandbox::open(&config.state_dir, Arc::clone(gpus))?, config),
    })
}

/// Removes every tenant from a machine that is decommissioned, without contacting the control plane.
///
/// # Errors
/// [`Fatal`]: an agent is running, or a tenant cannot be removed completely.
pub fn clean_up(config: &AgentConfig) -> Result<(), Fatal> {
    atomic_file::private_folder(&config.state_dir)?;
    let _only_one = lock_state_dir(config)?;
    let gpus = gpus(config);
    let executor = executor(config, &gpus)?;
    ssh::end_leftover_listener(&config.state_dir);
    let mut left = 0;
    for tenant in executor.tenants() {
        let allocation_id = tenant.allocation_id;
        let found = executor.release(&tenant).map(|released| released.findings);
        let remains: Vec<String> = match found {
            Ok(findings) => findings
                .iter()
                .filter(|finding| finding.outcome != FindingOutcome::Gone)
                .map(execute::describe_finding)
                .collect(),
            Err(failure) => vec![failure.message],
        };
        if remains.is_empty() {
            info!(%allocation_id, "the tenant is removed");
        } else {
            left += 1;
            warn!(%allocation_id, error_code = "tenants_remain", remains = remains.join(", "), "the tenant is not removed");
        }
    }
    if left > 0 {
        return Err(Fatal::TenantsRemain { left });
    }
    if let Some(settings) = &config.system {
        LoopbackGuard::new(&config.state_dir, settings).remove();
        bus_policy::remove();
    }
    Ok(())
}

/// The executor, with the configured faults of simulated hardware.
fn with_simulated_faults(executor: impl Executor, config: &AgentConfig) -> Arc<dyn Executor> {
    if config.simulated_faults == SimulatedFaults::default() {
        return Arc::new(executor);
    }
    warn!(misbehaviour = ?config.simulated_faults, "the hardware is simulated to misbehave");
    Arc::new(SimulatedExecutor::new(executor, config.simulated_faults.clone()))
}

/// Runs the agent over an executor that is given, such as a fake machine.
///
/// # Errors
/// [`Fatal`], when it cannot continue.
pub async fn run_with(
    config: AgentConfig,
    gpus: Arc<Gpus>,
    executor: Arc<dyn Executor>,
    manager: Arc<ServiceManager>,
    stop: CancellationToken,
) -> Result<(), Fatal> {
    atomic_file::private_folder(&config.state_dir)?;
    let _only_one = lock_state_dir(&config)?;
    let gpu_resetter = GpuResetter::new(config.driver_tools.clone(), &config.state_dir);
    let validator = Validator::new(config.validation_tools.clone(), config.validation_folder.clone());
    let boot_id = server_clock::boot_id()?;
    let clock = ServerClock::open(&config.state_dir, config.node_id, boot_id);
    let journal = Journal::open(&config.state_dir.join("journal.jsonl"), &clock)?;
    let identities = IdentityStore::new(&config);
    let recovery_key = identities.recovery_key()?;
    let mut verifiers = identities.verifiers(&config.verifier_set)?;
    let own_sshd = config.system.as_ref().and_then(|settings| Some((settings, settings.ssh_listen?)));
    let tenant_access =
        own_sshd.map(|(settings, listen)| TenantAccess::open(&config.state_dir, &settings.keys, listen));
    let (lister, source) = (Arc::clone(&gpus), gpus.source());
    let listed = tokio::task::spawn_blocking(move || lister.list()).await;
    let listed = listed.ok().and_then(Result::ok).unwrap_or_default();
    let tenant_devices = config.system.as_ref().map_or(&[][..], |settings| &settings.tenant_devices);
    let public_host_key = match executor.kind() {
        ExecutorKind::System => Some(ssh::public_host_key(&config.state_dir, tenant_access.is_some())),
        // Tenants of the sandbox are not users of the machine.
        ExecutorKind::Sandbox => None,
    };
    let mut readings = InventoryReadings::new(public_host_key, tenant_devices);
    readings.read().await;
    // The version of the driver is in the first heartbeat.
    let inventory = readings.inventory(listed, (source, None), executor.kind());

    let found = identities.load()?;
    // A node that cannot reach its control plane has started all the same, and tries again.
    manager.notify_ready();
    let has_expired = match &found {
        Some(identity) => tokio::select! {
            has_expired = renew::has_expired(&config, &clock, identity) => has_expired?,
            () = stop.cancelled() => return Ok(()),
        },
        None => false,
    };
    let identity = match found {
        Some(identity) if !has_expired => identity,
        Some(identity) if config.enrollment_token.is_none() => {
            return Err(Fatal::CertificateExpired { not_after: identity.not_after });
        }
        Some(_) | None => {
            let applicant = enroll::Applicant {
                config: &config,
                clock: &clock,
                identities: &identities,
                recovery_key: &recovery_key,
                boot_id,
                inventory: inventory.clone(),
                verifier_set_version: verifiers.version(),
            };
            let issued = tokio::select! {
                issued = applicant.apply() => issued?,
                () = stop.cancelled() => return Ok(()),
            };
            if let Some(current) = enroll::follow_verifier_sets(&mut verifiers, &issued.verifier_sets) {
                enroll::store_verifier_set(&identities, &config.verifier_set, &current);
            }
            issued.identity
        }
    };
    let api = NodeApiClient::with_identity(&config, &identity, &clock)?;
    let (tasks, stop) = (TaskTracker::new(), stop.child_token());
    let spools = Spools::new(&config.state_dir, config.recording_spool_bytes);
    let updates =
        Arc::new(AgentUpdates::of_this_process(config.env_file.as_deref(), &config.cert_path, &config.key_path));
    let heartbeat_now = Arc::new(Notify::new());
    let integrity = watch_integrity(&config, &stop, &heartbeat_now);
    let agent = Arc::new(Agent {
        terminals: TerminalSessions::new(spools, Arc::clone(&manager), clock.clone(), tasks.clone(), stop.clone()),
        manager,
        slots: Semaphore::new(config.max_concurrent_tasks),
        admission: Arc::new(Semaphore::new(config.max_concurrent_tasks + WAITING_TASKS)),
        config,
        clock,
        updates,
        identities,
        recovery_key,
        boot_id,
        process: Uuid::new_v4(),
        integrity,
        inventory,
        gpus,
        executor,
        gpu_resetter: Arc::new(gpu_resetter),
        validator: Arc::new(validator),
        tenant_access,
        journal,
        session: RwLock::new(Session { api, identity, since: Instant::now() }),
        verifiers: Mutex::new(verifiers),
        recovering: tokio::sync::Mutex::default(),
        in_flight: Mutex::default(),
        lanes: Mutex::default(),
        poll_settings: watch::Sender::new(PollSettings::default()),
        heartbeat_now,
        unstored: RepeatedFailures::default(),
        verifiers_storing: tokio::sync::Mutex::new(BoundedReading::of("the stored task-signing keys")),
        heartbeats_answered: watch::Sender::new(0),
        renew_within: watch::Sender::new(None),
        tasks,
        stop,
        fatal: Mutex::new(None),
    });
    agent.run_until_stopped(readings).await
}

/// Watches what the configuration says; `None` where that is nothing.
fn watch_integrity(
    config: &AgentConfig,
    stop: &CancellationToken,
    heartbeat_now: &Arc<Notify>,
) -> Option<Arc<IntegrityMonitor>> {
    let package = std::env::current_exe().ok().and_then(|program| Installation::of_agent(&program));
    let settings = config.integrity.as_ref()?;
    let heartbeat_now = Arc::clone(heartbeat_now);
    IntegrityMonitor::start(settings.clone(), package, stop.clone(), move || heartbeat_now.notify_one())
}

/// The state that the loops of a running agent share.
struct Agent {
    config: AgentConfig,
    clock: ServerClock,
    updates: Arc<AgentUpdates>,
    identities: IdentityStore,
    recovery_key: SigningKey,
    boot_id: Uuid,
    /// Names this process in heartbeats and polls.
    process: Uuid,
    /// `None` where the machine's integrity is not watched.
    integrity: Option<Arc<IntegrityMonitor>>,
    /// The inventory at the agent's start.
    inventory: NodeInventory,
    gpus: Arc<Gpus>,
    executor: Arc<dyn Executor>,
    gpu_resetter: Arc<GpuResetter>,
    validator: Arc<Validator>,
    /// `None` where the machine's own sshd admits tenants.
    tenant_access: Option<TenantAccess>,
    journal: Journal,
    session: RwLock<Session>,
    verifiers: Mutex<Verifiers>,
    /// Held by the one loop that recovers the identity, or renews it; the others wait for it.
    recovering: tokio::sync::Mutex<renew::RefusalChecks>,
    /// Attempts that this process executes or reports, by task and attempt.
    in_flight: Mutex<BTreeMap<(Uuid, u32), execute::AttemptStage>>,
    /// The last task of each allocation; the next task waits for it.
    lanes: Mutex<BTreeMap<Uuid, execute::QueueTail>>,
    poll_settings: watch::Sender<PollSettings>,
    /// Requests a heartbeat ahead of its schedule.
    heartbeat_now: Arc<Notify>,
    /// What of the identity cannot be stored.
    unstored: RepeatedFailures<UnstoredFile>,
    verifiers_storing: tokio::sync::Mutex<BoundedReading<()>>,
    /// The number of answered heartbeats.
    heartbeats_answered: watch::Sender<u64>,
    /// Set when the certificate's authority is retired: the window within which the certificate is to be renewed.
    renew_within: watch::Sender<Option<Duration>>,
    /// For tasks that are executed at once, but for releases.
    slots: Semaphore,
    /// For tasks that are executed, or wait for it.
    admission: Arc<Semaphore>,
    terminals: TerminalSessions,
    manager: Arc<ServiceManager>,
    tasks: TaskTracker,
    stop: CancellationToken,
    fatal: Mutex<Option<Fatal>>,
}

/// A file of the identity that is changed while the agent runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum UnstoredFile {
    Authorities,
    Certificate,
}

struct Session {
    api: NodeApiClient,
    identity: AgentIdentity,
    since: Instant,
}

impl Agent {
    async fn run_until_stopped(self: Arc<Self>, readings: InventoryReadings) -> Result<(), Fatal> {
        self.continue_terminals();
        tokio::join!(
            self.poll(),
            self.send_heartbeats(readings),
            self.renew(),
            self.reconcile_devices(),
            self.run_sshd()
        );
        self.tasks.close();
        let drained = tokio::time::timeout(DRAIN_TIMEOUT, self.tasks.wait()).await;
        if drained.is_err() {
            warn!(tasks = self.tasks.len(), "tasks are left to the next start");
        }
        match locked(&self.fatal).take() {
            Some(fatal) => Err(fatal),
            None => {
                info!("stopped");
                Ok(())
            }
        }
    }

    async fn run_sshd(&self) {
        if let Some(access) = &self.tenant_access {
            access.run(&self.stop).await;
        }
    }

    fn api(&self) -> NodeApiClient {
        self.session.read().unwrap_or_else(PoisonError::into_inner).api.clone()
    }

    fn identity(&self) -> AgentIdentity {
        self.session.read().unwrap_or_else(PoisonError::into_inner).identity.clone()
    }

    fn replace_identity(&self, identity: AgentIdentity) -> Result<(), ClientError> {
        let api = NodeApiClient::with_identity(&self.config, &identity, &self.clock)?;
        *self.session.write().unwrap_or_else(PoisonError::into_inner) =
            Session { api, identity, since: Instant::now() };
        Ok(())
    }

    /// Stops the agent. The first reason counts.
    fn fail(&self, fatal: Fatal) {
        // In an update, the unit starts an agent again whatever this one exits with.
        if !fatal.may_pass() && !self.updates.is_updating() {
            self.manager.ends_for_good();
        }
        locked(&self.fatal).get_or_insert(fatal);
        self.stop.cancel();
    }

    /// Sleeps, unless the agent is stopped. Returns whether the agent continues.
    async fn pause(&self, length: Duration) -> bool {
        tokio::select! {
            () = tokio::time::sleep(length) => true,
            () = self.stop.cancelled() => false,
        }
    }

    /// Logs the failure of a call over `api` and waits for the backoff. Returns whether the agent continues.
    async fn retry_after_failure(
        &self,
        api: &NodeApiClient,
        error: NodeApiError,
        doing: &'static str,
        backoff: &mut Backoff,
    ) -> bool {
        if error.is_certificate_refusal() && !self.replace_refused_certificate(api, &error).await {
            return false;
        }
        let error = match Fatal::of(error) {
            Ok(fatal) => {
                self.fail(fatal);
                return false;
            }
            Err(error) => error,
        };
        let pause = backoff.next(rand::random(), error.retry_after());
        report_failure(&error, doing, pause);
        self.pause(pause).await
    }
}

/// Logs a failed call that will be retried.
fn report_failure(error: &NodeApiError, doing: &'static str, pause: Duration) {
    let pause_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
    warn!(error_code = error.code(), error = chain(error), pause_ms, "{doing} failed; trying again");
}

/// Locks the state folder: with two agents on one folder, each would execute what the other's journal forbids.
fn lock_state_dir(config: &AgentConfig) -> Result<Flock<File>, Fatal> {
    let path = config.state_dir.join("lock");
    let file = atomic_file::open_to_lock(&path).map_err(FileError::at("open", &path))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|_| Fatal::AlreadyRunning)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
