//! The agent's only interface to the machine.

use std::collections::BTreeMap;

use wire::cleanup_proof::CleanupFinding;
use wire::inventory::ExecutorKind;
use wire::task::{OpenTerminal, Provision, ReconcileSshKeys, Release};

use crate::allocation_records::WithheldGpu;
use crate::finding_log::Condition;
use crate::task_outcome::{TaskFailure, TaskOutput};
use crate::terminal::ShellCommand;
use crate::unproved_gpus::GpuWithoutProof;

pub mod tenant_setup;

/// Executes tasks on this machine. Every method blocks, and every method but [`Executor::reboot`] is idempotent: it may have run before,
/// completely or partially, in this process or an earlier one.
pub trait Executor: Send + Sync + 'static {
    /// The isolation that it can enforce between tenants.
    fn kind(&self) -> ExecutorKind;

    /// Sets the tenant up.
    ///
    /// # Errors
    /// [`TaskFailure`]; what was made so far is removed by a later release.
    fn provision(&self, task: &Provision) -> Result<TaskOutput, TaskFailure>;

    /// Writes the tenant's authorized keys, in the one file that is the agent's for that, and nothing else.
    ///
    /// # Errors
    /// `tenant_unknown` if the tenant is not set up here; [`TaskFailure`] if the file cannot be written.
    fn reconcile_keys(&self, task: &ReconcileSshKeys) -> Result<TaskOutput, TaskFailure>;

    /// Removes the tenant, then checks everything that a tenant can leave, and returns the findings. Leftovers are findings, not a
    /// failure.
    ///
    /// # Errors
    /// [`TaskFailure`] when the checks could not be made.
    fn release(&self, task: &Release) -> Result<ReleaseOutcome, TaskFailure>;

    /// The command that starts the tenant's shell. Changes nothing.
    ///
    /// # Errors
    /// `tenant_unknown` if the tenant is not set up here; [`TaskFailure`] if it must not be entered.
    fn shell(&self, task: &OpenTerminal) -> Result<ShellCommand, TaskFailure>;

    /// The tenants that are set up on the machine, as release tasks.
    fn tenants(&self) -> Vec<Release>;

    /// Withholds a GPU from tenants until the answer is dropped.
    ///
    /// # Errors
    /// `device_in_use` where a tenant has it.
    fn withhold_gpu(&self, uuid: &str) -> Result<WithheldGpu<'_>, TaskFailure>;

    /// The GPUs of which it is not proved that nothing of their last tenant is left, by UUID.
    fn unproved_gpus(&self) -> BTreeMap<String, GpuWithoutProof>;

    /// The bounds of tenants that the machine did not take, as findings.
    fn unbounded_tenants(&self) -> Vec<Condition>;

    /// Opens to present tenants the device nodes that were made since the last call. Asks the driver of nothing where none was.
    fn follow_device_nodes(&self);

    /// Does what the hardware did not allow when it was due: opens the devices of present tenants, and proves GPUs of which that is missing.
    /// Returns whether the unproved GPUs have changed.
    fn reconcile_devices(&self) -> bool;

    /// Whether the machine is fit for tenants.
    ///
    /// # Errors
    /// [`TaskFailure`] names what is not.
    fn validate(&self) -> Result<TaskOutput, TaskFailure>;

    /// Reboots the machine. On success it does not return; otherwise it returns why the machine was not rebooted.
    fn reboot(&self) -> TaskFailure;
}

/// The outcome of a release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReleaseOutcome {
    pub output: TaskOutput,
    pub findings: Vec<CleanupFinding>,
}
