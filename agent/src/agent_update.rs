//! The agent's part in its own update: it fetches the new version and starts the finalizer of its own; the agent that runs afterwards
//! proves itself and reports the outcome. What they pass to each other is on the disk (`agent_package::update`).

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use agent_package::contents::{FINALIZER_UNIT, PROGRAM_FOLDER};
use agent_package::install::{InstallError, InstallTarget, Installed, fetch, link_finalizer, version_folder};
use agent_package::source::{NodeCredential, PackageSource};
use agent_package::update::{
    AgentUpdateOutcome, Installation, Proof, Stage, UpdateFileError, UpdateFolder, UpdateRecord, unix_seconds,
};
use serde_json::Value;
use uuid::Uuid;
use wire::bundle::BootstrapBundle;
use wire::package::Digest;
use wire::task::UpdateAgent;

use crate::atomic_file;
use crate::bounded_tool::Tool;
use crate::chain;
use crate::task_outcome::{TaskFailure, TaskOutput};

/// How long the registry may take for a whole package.
const FETCHED_WITHIN: Duration = Duration::from_secs(600);
/// How long systemd may take to start the finalizer.
const START_LIMIT: Duration = Duration::from_secs(90);
const FINALIZER: &str = "gpuaas-finalizer";
/// The finalizer writes units; what the agent fetches stays beside.
const UNIT_FOLDER: &str = "/etc/systemd/system";

/// Updates of the agent that runs.
#[derive(Debug)]
pub struct AgentUpdates {
    /// `None` where no package installed the agent.
    installation: Option<Installation>,
    env_file: Option<PathBuf>,
    cert_path: PathBuf,
    key_path: PathBuf,
    systemctl: PathBuf,
    /// The update for which this process has written its proof.
    proved: Mutex<Option<Uuid>>,
}

/// What became of the beginning of an update.
#[derive(Debug, PartialEq, Eq)]
pub enum Begun {
    /// This agent is of that version.
    InUse,
    /// The finalizer has it.
    Started,
}

impl AgentUpdates {
    /// Of the program that runs, which was configured by this environment file, if by any, and has its certificate and key at these paths.
    #[must_use]
    pub fn of_this_process(env_file: Option<&Path>, cert_path: &Path, key_path: &Path) -> Self {
        let installation = std::env::current_exe().ok().and_then(|program| Installation::of_agent(&program));
        let (cert_path, key_path) = (cert_path.to_owned(), key_path.to_owned());
        let (env_file, systemctl) = (env_file.map(Path::to_owned), PathBuf::from("systemctl"));
        Self { installation, env_file, cert_path, key_path, systemctl, proved: Mutex::default() }
    }

    /// The digest of the package that the agent is of.
    #[must_use]
    pub fn digest(&self) -> Option<Digest> {
        self.installation.as_ref().map(|installation| installation.digest)
    }

    /// Whether an update is in progress: whatever this process exits with, another one is started.
    #[must_use]
    pub fn is_updating(&self) -> bool {
        self.folder().is_some_and(|folder| folder.is_updating())
    }

    /// Fetches the version and hands it to the finalizer. It may be begun again.
    ///
    /// # Errors
    /// [`TaskFailure`]; the version in use runs on.
    pub fn begin(&self, task_id: Uuid, task: &UpdateAgent) -> Result<Begun, TaskFailure> {
        let unsupported = |why: &str| TaskFailure::new("update_unsupported", why);
        let installation = self.installation.as_ref().ok_or_else(|| {
            unsupported("no package installed this agent; set the node up by a bootstrap script with format package")
        })?;
        if installation.digest == task.digest {
            return Ok(Begun::InUse);
        }
        let folder = UpdateFolder::of(&installation.root);
        if folder.is_updating() {
            let message = "another update of the agent is in progress on the machine; wait for its end";
            return Err(TaskFailure::new("update_in_progress", message));
        }
        if !task.force {
            refuse_failed(&folder, task.digest)?;
        }
        let env_file = self.env_file.as_ref().ok_or_else(|| unsupported("the agent was started without --env-file"))?;
        let (target, installed) = self.fetch(env_file, installation, task.digest)?;
        if task.force {
            folder.forget_failed(task.digest)?;
        }
        let record = UpdateRecord {
            nonce: Uuid::new_v4(),
            task_id,
            from: installation.digest,
            to: task.digest,
            version: installed.version,
            unit: target.unit,
            env_file: target.env_file,
            commit_seconds: task.commit_seconds,
            stage: Stage::Prepared,
        };
        self.start(&folder, installation, &record).inspect_err(|_| {
            // A record without a finalizer would end no update; one that cannot be removed is the next finalizer's.
            let _ = folder.remove_record();
        })?;
        Ok(Begun::Started)
    }

    fn fetch(
        &self,
        env_file: &Path,
        installation: &Installation,
        digest: Digest,
    ) -> Result<(InstallTarget, Installed), TaskFailure> {
        let configuration = |message: String| TaskFailure::new("configuration", message);
        let text = atomic_file::read_if_there(env_file)?
            .ok_or_else(|| configuration(format!("{} is missing", env_file.display())))?;
        let mut bundle = BootstrapBundle::from_env_file(&text).map_err(|error| configuration(chain(&error)))?;
        bundle.package.digest = Some(digest.to_string());
        bundle.cert_path = self.cert_path.display().to_string();
        bundle.key_path = self.key_path.display().to_string();
        let source = PackageSource::from_bundle(&bundle, NodeCredential::Certificate)
            .map_err(|error| configuration(chain(&error)))?;
        let target = InstallTarget {
            install_root: installation.root.clone(),
            env_file: source.env_file.clone(),
            unit: source.unit.clone(),
            unit_folder: PathBuf::from(UNIT_FOLDER),
            release_keys: source.release_keys.clone(),
        };
        let mut registry =
            source.open(Instant::now() + FETCHED_WITHIN).map_err(|error| failure(&InstallError::Pull(error)))?;
        let installed = fetch(digest, &mut registry, &target).map_err(|error| failure(&error))?;
        Ok((target, installed))
    }

    /// Writes the record and starts the finalizer of the version in use.
    fn start(
        &self,
        folder: &UpdateFolder,
        installation: &Installation,
        record: &UpdateRecord,
    ) -> Result<(), TaskFailure> {
        let program = version_folder(&installation.root, installation.digest).join(PROGRAM_FOLDER).join(FINALIZER);
        if !program.is_file() {
            let message = format!("{} is missing: install the version in use again", program.display());
            return Err(TaskFailure::new("update_unsupported", message));
        }
        link_finalizer(&installation.root, installation.digest).map_err(|error| failure(&error))?;
        folder.take_reserve()?;
        folder.set_record(record)?;
        self.start_finalizer()
    }

    /// Starts the finalizer, unless it runs: an agent that was killed may have left an update without one.
    ///
    /// # Errors
    /// `finalizer_not_started`.
    pub fn start_finalizer(&self) -> Result<(), TaskFailure> {
        let not_started = |why: String| TaskFailure::new("finalizer_not_started", format!("systemctl start: {why}"));
        let started = Tool::new(&self.systemctl).args(["start", "--", FINALIZER_UNIT]).run(START_LIMIT);
        started.map(drop).map_err(|error| not_started(error.to_string()))
    }

    /// The outcome of the update that a task ordered; `None` while it is in progress.
    ///
    /// # Errors
    /// [`TaskFailure`]: it was rolled back, or never began.
    pub fn outcome(&self, task_id: Uuid) -> Result<Option<TaskOutput>, TaskFailure> {
        let never =
            || TaskFailure::new("update_interrupted", "the agent ended before the update began; order it again");
        let folder = self.folder().ok_or_else(never)?;
        // In this order: the outcome is written before the record goes.
        let is_in_progress = folder.record()?.is_some_and(|record| record.task_id == task_id);
        match folder.last()?.filter(|last| last.task_id == task_id) {
            Some(last) => reported(last).map(Some),
            None if is_in_progress => Ok(None),
            None => Err(never()),
        }
    }

    /// Writes the proof that the control plane has answered a heartbeat of this process, where a finalizer waits for it.
    ///
    /// # Errors
    /// The proof cannot be written; it is tried again after the next heartbeat.
    pub fn prove(&self) -> Result<(), UpdateFileError> {
        let (Some(folder), Some(digest)) = (self.folder(), self.digest()) else { return Ok(()) };
        let Some(record) = folder.record()?.filter(|record| record.to == digest) else { return Ok(()) };
        let mut proved = self.proved.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *proved == Some(record.nonce) {
            return Ok(());
        }
        let (nonce, pid) = (record.nonce, std::process::id());
        folder.set_proof(&Proof { nonce, digest, pid, at: unix_seconds() })?;
        *proved = Some(record.nonce);
        Ok(())
    }

    fn folder(&self) -> Option<UpdateFolder> {
        self.installation.as_ref().map(|installation| UpdateFolder::of(&installation.root))
    }
}

/// The output of an update whose version is in use.
#[must_use]
pub fn in_use(version: &str, digest: Digest) -> TaskOutput {
    let output = [("version", version.to_owned()), ("package_digest", digest.to_string())];
    output.into_iter().map(|(name, value)| (name.to_owned(), Value::from(value))).collect()
}

fn reported(last: AgentUpdateOutcome) -> Result<TaskOutput, TaskFailure> {
    match last.rolled_back {
        None => Ok(in_use(&last.version, last.to)),
        Some(reason) => {
            let message = format!("{} ({}); version {} is in use again", reason.message, reason.code, last.from);
            Err(TaskFailure::new("rolled_back", message))
        }
    }
}

fn refuse_failed(folder: &UpdateFolder, digest: Digest) -> Result<(), TaskFailure> {
    let failed = folder.failed()?.into_iter().find(|version| version.digest == digest);
    failed.map_or(Ok(()), |version| {
        let reason = version.reason.message;
        let message = format!("this version was rolled back on this machine: {reason}; `force` tries it again");
        Err(TaskFailure::new("failed_before", message))
    })
}

fn failure(error: &InstallError) -> TaskFailure {
    TaskFailure::new(error.code(), chain(error))
}

impl From<UpdateFileError> for TaskFailure {
    fn from(error: UpdateFileError) -> Self {
        let code = if error.is_full() { "disk_full" } else { "node_storage" };
        Self::new(code, chain(&error))
    }
}

#[cfg(test)]
mod tests;
