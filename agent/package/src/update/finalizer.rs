//! What the finalizer does, from the record alone: it may end at any point, and the next one continues.

use std::time::Duration;

use uuid::Uuid;
use wire::package::Digest;

use super::{AgentUpdateOutcome, Proof, RollbackReason, Stage, UpdateFileError, UpdateRecord};
use crate::install::InstallError;

/// A machine that restarts again and again does not wait for ever.
const MOST_BOOTS: u8 = 3;
const PAUSE: Duration = Duration::from_millis(200);

/// Why the finalizer stopped before the update's end. It is to be started again.
#[derive(Debug, thiserror::Error)]
pub enum FinalizeError {
    #[error(transparent)]
    File(#[from] UpdateFileError),
    #[error(transparent)]
    Install(#[from] InstallError),
    #[error("systemctl {arguments} failed: {message}")]
    Systemctl { arguments: String, message: String },
    #[error("could not {doing}")]
    Machine {
        doing: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("another finalizer is at work")]
    Locked,
}

impl FinalizeError {
    /// Whether the disk is full.
    #[must_use]
    pub fn is_full(&self) -> bool {
        match self {
            Self::File(error) => error.is_full(),
            Self::Install(error) => matches!(error, InstallError::DiskFull(_)),
            Self::Systemctl { .. } | Self::Machine { .. } | Self::Locked => false,
        }
    }
}

/// The effects of the finalizer on its machine. Each may be repeated.
pub trait UpdateMachine {
    /// The update in progress.
    ///
    /// # Errors
    /// [`FinalizeError`].
    fn record(&self) -> Result<Option<UpdateRecord>, FinalizeError>;
    /// # Errors
    /// [`FinalizeError`]; the record is as before.
    fn set_record(&mut self, record: &UpdateRecord) -> Result<(), FinalizeError>;
    /// Whether a version is there unaltered.
    fn has_version(&self, digest: Digest) -> bool;
    /// The agent's unit is started again whatever it exits with, and so keeps its terminals, until [`Self::end_hold`].
    ///
    /// # Errors
    /// [`FinalizeError`].
    fn hold_terminals(&mut self, unit: &str) -> Result<(), FinalizeError>;
    /// # Errors
    /// [`FinalizeError`].
    fn end_hold(&mut self, unit: &str) -> Result<(), FinalizeError>;
    /// Makes a version the current one, units included.
    ///
    /// # Errors
    /// [`FinalizeError`].
    fn activate(&mut self, digest: Digest, record: &UpdateRecord) -> Result<(), FinalizeError>;
    /// Has systemd read its units again.
    ///
    /// # Errors
    /// [`FinalizeError`].
    fn reload(&mut self) -> Result<(), FinalizeError>;
    /// Restarts the agent, and does not wait for it. Never stop and start: that would end its terminals.
    ///
    /// # Errors
    /// [`FinalizeError`].
    fn restart(&mut self, unit: &str) -> Result<(), FinalizeError>;
    fn proof(&self) -> Option<Proof>;
    /// # Errors
    /// [`FinalizeError`].
    fn forget_proof(&mut self) -> Result<(), FinalizeError>;
    /// Whether the process of a proof lives, and runs the agent of this version.
    fn runs(&self, pid: u32, digest: Digest) -> bool;
    /// # Errors
    /// [`FinalizeError`].
    fn remember_failed(&mut self, digest: Digest, reason: &RollbackReason) -> Result<(), FinalizeError>;
    /// # Errors
    /// [`FinalizeError`].
    fn set_last(&mut self, outcome: &AgentUpdateOutcome) -> Result<(), FinalizeError>;
    /// Removes all versions but these.
    ///
    /// # Errors
    /// [`FinalizeError`].
    fn remove_other_versions(&mut self, but: [Digest; 2]) -> Result<(), FinalizeError>;
    /// # Errors
    /// [`FinalizeError`].
    fn remove_record(&mut self) -> Result<(), FinalizeError>;
    /// The boot and the seconds since its beginning, which no setting of the clock changes.
    ///
    /// # Errors
    /// [`FinalizeError::Machine`].
    fn uptime(&self) -> Result<(Uuid, u64), FinalizeError>;
    fn sleep(&self, time: Duration);
}

/// Carries the update in progress to its end. Returns the outcome; `None` where there is none in progress.
///
/// # Errors
/// [`FinalizeError`]; the finalizer is to be started again.
pub fn finalize(machine: &mut impl UpdateMachine) -> Result<Option<AgentUpdateOutcome>, FinalizeError> {
    let Some(mut record) = machine.record()? else { return Ok(None) };
    loop {
        let next = match &record.stage {
            Stage::Prepared => after_preparation(machine, &record)?,
            Stage::Switching { boot_id, boots } => switch(machine, &record, (*boot_id, *boots))?,
            Stage::Waiting { boot_id, since_uptime, boots } => {
                match wait(machine, &record, (*boot_id, *since_uptime, *boots))? {
                    Some(next) => next,
                    None => {
                        machine.sleep(PAUSE);
                        continue;
                    }
                }
            }
            Stage::Committing => return commit(machine, &record).map(Some),
            Stage::RollingBack { reason } => return roll_back(machine, &record, reason).map(Some),
        };
        record.stage = next;
        machine.set_record(&record)?;
    }
}

fn after_preparation(machine: &impl UpdateMachine, record: &UpdateRecord) -> Result<Stage, FinalizeError> {
    if machine.has_version(record.to) {
        let (boot_id, _) = machine.uptime()?;
        return Ok(Stage::Switching { boot_id, boots: 1 });
    }
    let message = format!("version {} was altered on the disk after it was verified", record.to);
    Ok(Stage::RollingBack { reason: RollbackReason { code: "version_altered".to_owned(), message } })
}

fn switch(
    machine: &mut impl UpdateMachine,
    record: &UpdateRecord,
    (boot_id, boots): (Uuid, u8),
) -> Result<Stage, FinalizeError> {
    let (boot_now, since_uptime) = machine.uptime()?;
    if boot_now != boot_id {
        return Ok(after_boot(boot_now, boots));
    }
    // After a boot too: what held the terminals ended with the one before.
    machine.hold_terminals(&record.unit)?;
    machine.activate(record.to, record)?;
    machine.reload()?;
    // One of an earlier boot says nothing of this one.
    machine.forget_proof()?;
    machine.restart(&record.unit)?;
    Ok(Stage::Waiting { boot_id, since_uptime, boots })
}

/// A boot is counted before the new agent is started in it, which may be what ends it.
fn after_boot(boot_id: Uuid, boots: u8) -> Stage {
    if boots < MOST_BOOTS {
        return Stage::Switching { boot_id, boots: boots + 1 };
    }
    let message = format!("the machine was restarted {boots} times before the new agent had proved itself");
    Stage::RollingBack { reason: RollbackReason { code: "too_many_boots".to_owned(), message } }
}

/// The stage after the wait; `None` while it goes on.
fn wait(
    machine: &impl UpdateMachine,
    record: &UpdateRecord,
    (boot_id, since_uptime, boots): (Uuid, u64, u8),
) -> Result<Option<Stage>, FinalizeError> {
    let (boot_now, uptime) = machine.uptime()?;
    if boot_now != boot_id {
        return Ok(Some(after_boot(boot_now, boots)));
    }
    let fault = match machine.proof() {
        None => "",
        Some(proof) if proof.nonce != record.nonce || proof.digest != record.to => "; the proof is of another update",
        Some(proof) if !machine.runs(proof.pid, record.to) => "; the process of the proof does not run the new agent",
        Some(_) => return Ok(Some(Stage::Committing)),
    };
    let seconds = u64::from(record.commit_seconds);
    if uptime < since_uptime.saturating_add(seconds) {
        return Ok(None);
    }
    let message = format!("no heartbeat of the new agent was answered by the control plane within {seconds} s{fault}");
    Ok(Some(Stage::RollingBack { reason: RollbackReason { code: "no_heartbeat".to_owned(), message } }))
}

fn commit(machine: &mut impl UpdateMachine, record: &UpdateRecord) -> Result<AgentUpdateOutcome, FinalizeError> {
    machine.end_hold(&record.unit)?;
    machine.reload()?;
    machine.remove_other_versions([record.from, record.to])?;
    end(machine, record, None)
}

fn roll_back(
    machine: &mut impl UpdateMachine,
    record: &UpdateRecord,
    reason: &RollbackReason,
) -> Result<AgentUpdateOutcome, FinalizeError> {
    machine.remember_failed(record.to, reason)?;
    machine.hold_terminals(&record.unit)?;
    machine.activate(record.from, record)?;
    machine.reload()?;
    machine.restart(&record.unit)?;
    machine.end_hold(&record.unit)?;
    machine.reload()?;
    end(machine, record, Some(reason.clone()))
}

/// The outcome is on the disk before the record goes: an agent that finds neither knows that its update never began.
fn end(
    machine: &mut impl UpdateMachine,
    record: &UpdateRecord,
    rolled_back: Option<RollbackReason>,
) -> Result<AgentUpdateOutcome, FinalizeError> {
    let UpdateRecord { task_id, from, to, version, .. } = record.clone();
    let outcome = AgentUpdateOutcome { task_id, from, to, version, rolled_back };
    machine.set_last(&outcome)?;
    machine.remove_record()?;
    Ok(outcome)
}
