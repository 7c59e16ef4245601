//! The running agent: who it is, and the four things it does at once (poll, execute and report, beat, renew).

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

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
use wire::heartbeat::PollSettings;
use wire::inventory::{ExecutorKind, Inventory};
use wire::proof::Outcome;

use crate::api::{Api, ApiError, ClientError};
use crate::backoff::Backoff;
use crate::chain;
use crate::config::Config;
use crate::executor::Executor;
use crate::gpus::Gpus;
use crate::identity::{Identity, IdentityError, IdentityStore};
use crate::inventory::{self, Look};
use crate::journal::{Journal, JournalError};
use crate::sandbox::Sandbox;
use crate::simulate::{Misbehaviour, Simulated};
use crate::ssh::{self, SshError, Sshd};
use crate::store::{self, StoreError};
use crate::system::{self, System, private};
use crate::terminal::{Spools, Terminals};

mod beat;
mod enroll;
mod execute;
mod poll;
mod renew;
mod terminal;

/// First pause after a failure.
const BACKOFF_BASE: Duration = Duration::from_millis(250);
/// How long tasks that are under way may take to end when the agent is stopped. What does not make it is finished from the
/// journal at the next start.
const DRAIN_WITHIN: Duration = Duration::from_secs(20);

/// Why the agent ends by itself. Each has an exit code of its own, so that a supervisor can tell what restarting helps.
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
    EnrollmentRefused(#[source] ApiError),
    #[error(
        "the node is not enrolled and SVC_ENROLLMENT_TOKEN is not set. Ask an administrator to reissue the node's enrollment"
    )]
    NoEnrollmentToken,
    #[error(
        "the node's certificate expired at {not_after} and SVC_ENROLLMENT_TOKEN is not set. Ask an administrator to reissue the \
         node's enrollment, then run the restart command that comes with it"
    )]
    CertificateExpired { not_after: chrono::DateTime<Utc> },
    #[error("the control plane no longer speaks this agent's protocol ({}). Upgrade the agent", wire::PROTOCOL)]
    UpgradeRequired(#[source] ApiError),
    #[error("another agent runs on the state folder; stop it first")]
    AlreadyRunning,
    #[error("the process could not be set up")]
    Runtime(#[source] std::io::Error),
    #[error(transparent)]
    System(#[from] system::OpenError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("tenants cannot come in by SSH")]
    Ssh(#[from] SshError),
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
            | Self::System(_)
            | Self::Store(_)
            | Self::Identity(_)
            | Self::Client(_)
            | Self::Journal(_)
            | Self::Ssh(_) => 1,
        })
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
            Self::Runtime(_) => "runtime",
            Self::System(_) => "executor",
            Self::Store(_) => "node_storage",
            Self::Identity(_) => "identity",
            Self::Client(_) => "client",
            Self::Journal(_) => "journal",
            Self::Ssh(_) => "ssh",
            Self::TenantsRemain { .. } => "tenants_remain",
        }
    }

    /// What no retry mends, whatever was being asked.
    fn of(error: ApiError) -> Result<Self, ApiError> {
        if error.is_node_removed() {
            Ok(Self::NodeRemoved)
        } else if error.status() == Some(StatusCode::UPGRADE_REQUIRED) && !error.is_of_an_older_control_plane() {
            Ok(Self::UpgradeRequired(error))
        } else {
            Err(error)
        }
    }
}

/// Runs the agent on this machine until `stop` is cancelled.
///
/// # Errors
/// [`Fatal`], when it cannot go on.
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), Fatal> {
    store::private_folder(&config.state_dir)?;
    let gpus = Arc::new(Gpus::detect(config.node_id, config.simulated_gpus.as_ref()));
    match gpus.as_ref() {
        Gpus::Nvml(_) => info!("GPUs are read through NVML"),
        Gpus::Simulated(gpus) => warn!(gpus = gpus.len(), "GPUs are simulated: this node computes nothing"),
        Gpus::Absent { why } => warn!(why, "no GPU driver: this node offers no GPU; --simulate-gpus N makes some up"),
    }
    let executor = executor(&config, &gpus)?;
    if config.system.is_some() {
        private::warn_of_logins_without();
    }
    run_with(config, gpus, executor, stop).await
}

fn executor(config: &Config, gpus: &Arc<Gpus>) -> Result<Arc<dyn Executor>, Fatal> {
    Ok(match &config.system {
        Some(settings) => misbehaving(System::open(&config.state_dir, settings.clone(), Arc::clone(gpus))?, config),
        None => misbehaving(Sandbox::open(&config.state_dir, Arc::clone(gpus))?, config),
    })
}

/// Removes every tenant from a machine that leaves, without a word to the control plane.
///
/// # Errors
/// [`Fatal`]: an agent runs, or something of a tenant cannot be removed.
pub fn clean_up(config: &Config) -> Result<(), Fatal> {
    store::private_folder(&config.state_dir)?;
    let _only_one = lock(config)?;
    let gpus = Arc::new(Gpus::detect(config.node_id, config.simulated_gpus.as_ref()));
    let executor = executor(config, &gpus)?;
    ssh::end_left_over(&config.state_dir);
    let mut left = 0;
    for tenant in executor.tenants() {
        let allocation_id = tenant.allocation_id;
        let found = executor.release(&tenant).map(|released| released.findings);
        let remains: Vec<String> = match found {
            Ok(findings) => {
                findings.iter().filter(|finding| finding.outcome != Outcome::Gone).map(execute::described).collect()
            }
            Err(failure) => vec![failure.message],
        };
        if remains.is_empty() {
            info!(%allocation_id, "the tenant is removed");
        } else {
            left += 1;
            warn!(%allocation_id, error_code = "tenants_remain", remains = remains.join(", "), "the tenant is not removed");
        }
    }
    if left == 0 { Ok(()) } else { Err(Fatal::TenantsRemain { left }) }
}

/// The executor, with the faults that its simulated hardware was told to have.
fn misbehaving(executor: impl Executor, config: &Config) -> Arc<dyn Executor> {
    if config.misbehaviour == Misbehaviour::default() {
        return Arc::new(executor);
    }
    warn!(misbehaviour = ?config.misbehaviour, "the hardware is simulated to misbehave");
    Arc::new(Simulated::new(executor, config.misbehaviour.clone()))
}

/// Runs the agent over another machine than the one it is on.
///
/// # Errors
/// [`Fatal`], when it cannot go on.
pub async fn run_with(
    config: Config,
    gpus: Arc<Gpus>,
    executor: Arc<dyn Executor>,
    stop: CancellationToken,
) -> Result<(), Fatal> {
    store::private_folder(&config.state_dir)?;
    let _only_one = lock(&config)?;
    let journal = Journal::open(&config.state_dir.join("journal.jsonl"), Utc::now())?;
    let identities = IdentityStore::new(&config);
    let recovery_key = identities.recovery_key()?;
    let mut verifiers = identities.verifiers(&config.verifier_set)?;
    let boot_id = inventory::boot_id()?;
    let sshd = match config.system.as_ref().and_then(|settings| Some((settings, settings.ssh_listen?))) {
        Some((settings, listen)) => Some(Sshd::prepare(&config.state_dir, &settings.keys, listen)?),
        None => None,
    };
    let inventory = look(&gpus, executor.kind(), &config.state_dir).await.inventory;

    let found = identities.load()?;
    // What an earlier life asked for is asked for again, with the same key: another would be taken for a clone's.
    let recovers = found.is_some() || identities.is_recovering()?;
    let way = if recovers { enroll::Way::Recover } else { enroll::Way::Enroll };
    let identity = match found {
        Some(identity) if !identity.is_expired(Utc::now()) => identity,
        Some(identity) if config.enrollment_token.is_none() => {
            return Err(Fatal::CertificateExpired { not_after: identity.not_after });
        }
        Some(_) | None => {
            let applicant = enroll::Applicant {
                config: &config,
                identities: &identities,
                recovery_key: &recovery_key,
                boot_id,
                inventory: inventory.clone(),
                verifier_set_version: verifiers.version(),
            };
            let obtained = tokio::select! {
                obtained = applicant.apply(way) => obtained?,
                () = stop.cancelled() => return Ok(()),
            };
            enroll::follow(&identities, &config.verifier_set, &mut verifiers, &obtained.verifier_sets)?;
            obtained.identity
        }
    };
    let api = Api::with_identity(&config, &identity)?;
    let (tasks, stop) = (TaskTracker::new(), stop.child_token());
    let spools = Spools::new(&config.state_dir, config.recording_spool_bytes);
    let agent = Arc::new(Agent {
        terminals: Terminals::new(spools, tasks.clone(), stop.clone()),
        slots: Arc::new(Semaphore::new(config.max_concurrent_tasks)),
        config,
        identities,
        recovery_key,
        boot_id,
        inventory,
        gpus,
        executor,
        sshd,
        journal,
        session: RwLock::new(Session { api, identity, since: Instant::now() }),
        verifiers: Mutex::new(verifiers),
        recovering: tokio::sync::Mutex::default(),
        under_way: Mutex::default(),
        lanes: Mutex::default(),
        poll_settings: watch::Sender::new(PollSettings::default()),
        beat_now: Notify::new(),
        heard: watch::Sender::new(0),
        renew_within: watch::Sender::new(None),
        tasks,
        stop,
        fatal: Mutex::new(None),
    });
    agent.live().await
}

/// Everything that the parts of a running agent share.
struct Agent {
    config: Config,
    identities: IdentityStore,
    recovery_key: SigningKey,
    boot_id: Uuid,
    /// As it was when the agent started.
    inventory: Inventory,
    gpus: Arc<Gpus>,
    executor: Arc<dyn Executor>,
    sshd: Option<Sshd>,
    journal: Journal,
    session: RwLock<Session>,
    verifiers: Mutex<Verifiers>,
    /// Held by the one part of the agent that recovers the identity; the others wait for it. When a refused certificate was asked about last.
    recovering: tokio::sync::Mutex<Option<Instant>>,
    /// Attempts that this process executes or reports, by task and attempt.
    under_way: Mutex<BTreeMap<(Uuid, u32), execute::Stage>>,
    /// The last task of each allocation, which the next one waits for.
    lanes: Mutex<BTreeMap<Uuid, execute::Lane>>,
    poll_settings: watch::Sender<PollSettings>,
    /// Asks for a heartbeat before its time.
    beat_now: Notify,
    /// How many heartbeats were answered.
    heard: watch::Sender<u64>,
    /// Where the certificate's authority goes: over how long it is to be renewed.
    renew_within: watch::Sender<Option<Duration>>,
    slots: Arc<Semaphore>,
    terminals: Terminals,
    tasks: TaskTracker,
    stop: CancellationToken,
    fatal: Mutex<Option<Fatal>>,
}

struct Session {
    api: Api,
    identity: Identity,
    since: Instant,
}

impl Agent {
    async fn live(self: Arc<Self>) -> Result<(), Fatal> {
        self.send_recordings_left();
        self.say_what_is_lost();
        self.resume();
        tokio::join!(self.poll(), self.beat(), self.renew(), self.let_tenants_in());
        self.tasks.close();
        let drained = tokio::time::timeout(DRAIN_WITHIN, self.tasks.wait()).await;
        if drained.is_err() {
            warn!(tasks = self.tasks.len(), "tasks are left to the next start");
        }
        match held(&self.fatal).take() {
            Some(fatal) => Err(fatal),
            None => {
                info!("stopped");
                Ok(())
            }
        }
    }

    async fn let_tenants_in(&self) {
        if let Some(sshd) = &self.sshd {
            sshd.run(&self.stop).await;
        }
    }

    fn api(&self) -> Api {
        self.session.read().unwrap_or_else(PoisonError::into_inner).api.clone()
    }

    fn identity(&self) -> Identity {
        self.session.read().unwrap_or_else(PoisonError::into_inner).identity.clone()
    }

    fn take_identity(&self, identity: Identity) -> Result<(), ClientError> {
        let api = Api::with_identity(&self.config, &identity)?;
        *self.session.write().unwrap_or_else(PoisonError::into_inner) =
            Session { api, identity, since: Instant::now() };
        Ok(())
    }

    /// Ends the agent. The first reason counts.
    fn fail(&self, fatal: Fatal) {
        held(&self.fatal).get_or_insert(fatal);
        self.stop.cancel();
    }

    /// Waits, unless the agent is stopped. Returns whether to go on.
    async fn pause(&self, length: Duration) -> bool {
        tokio::select! {
            () = tokio::time::sleep(length) => true,
            () = self.stop.cancelled() => false,
        }
    }

    /// Says what went wrong with a call over `api` and waits as long as it takes. Returns whether to go on.
    async fn recover_from(&self, api: &Api, error: ApiError, doing: &'static str, backoff: &mut Backoff) -> bool {
        if error.is_of_the_certificate() && !self.replace_refused_certificate(api, &error).await {
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

/// One line for a failed call that will be tried again.
fn report_failure(error: &ApiError, doing: &'static str, pause: Duration) {
    let pause_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
    warn!(error_code = error.code(), error = chain(error), pause_ms, "{doing} failed; trying again");
}

async fn look(gpus: &Arc<Gpus>, executor: ExecutorKind, state_dir: &Path) -> Look {
    let door = match executor {
        // Its tenants are no users of the machine.
        ExecutorKind::Sandbox => None,
        ExecutorKind::System => ssh::host_key_fingerprint(state_dir),
    };
    let (shared, same) = (Arc::clone(gpus), door.clone());
    match tokio::task::spawn_blocking(move || inventory::read(&shared, executor, same)).await {
        Ok(look) => look,
        // It can only have panicked; on this thread it will say so again.
        Err(_) => inventory::read(gpus, executor, door),
    }
}

/// Two agents on one folder would each execute what the other's journal forbids.
fn lock(config: &Config) -> Result<Flock<File>, Fatal> {
    let path = config.state_dir.join("lock");
    let file = File::create(&path).map_err(StoreError::at("open", &path))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|_| Fatal::AlreadyRunning)
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
