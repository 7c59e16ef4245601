//! The agent's one door to the machine.

use serde_json::{Map, Value};
use wire::inventory::ExecutorKind;
use wire::proof::Finding;
use wire::task::{OpenTerminal, Provision, ReconcileSshKeys, Release};

use crate::terminal::Shell;

/// What a task found or made, as it goes into its result.
pub type Output = Map<String, Value>;

/// Does what tasks ask for, on this machine. Every method blocks, and every method but [`Executor::reboot`] is
/// idempotent: it may have run before, to its end or half-way, in this process or an earlier one.
pub trait Executor: Send + Sync + 'static {
    /// What it can enforce between tenants.
    fn kind(&self) -> ExecutorKind;

    /// Makes the tenant's place.
    ///
    /// # Errors
    /// [`Failure`]; what was made so far is removed by a later release.
    fn provision(&self, task: &Provision) -> Result<Output, Failure>;

    /// Writes the keys that open the tenant's login, in the one file that is the agent's for that, and nothing else.
    ///
    /// # Errors
    /// `tenant_unknown` where the tenant's place is not here; [`Failure`] where it cannot be written.
    fn reconcile_keys(&self, task: &ReconcileSshKeys) -> Result<Output, Failure>;

    /// Removes the tenant's place, looks again for everything that a tenant can leave, and says what it found. Leftovers are
    /// findings and no failure.
    ///
    /// # Errors
    /// [`Failure`] when it could not even look.
    fn release(&self, task: &Release) -> Result<Released, Failure>;

    /// How the tenant's shell is begun. Changes nothing.
    ///
    /// # Errors
    /// `tenant_unknown` where the tenant's place is not here; [`Failure`] where it must not be entered.
    fn shell(&self, task: &OpenTerminal) -> Result<Shell, Failure>;

    /// The tenants whose places are on the machine, as they would be removed.
    fn tenants(&self) -> Vec<Release>;

    /// Whether the machine is fit for tenants.
    ///
    /// # Errors
    /// [`Failure`] says what is not.
    fn validate(&self) -> Result<Output, Failure>;

    /// Starts the machine anew. Where that goes well it does not return; else it says why the machine goes on as it is.
    fn reboot(&self) -> Failure;
}

/// The outcome of a release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Released {
    pub output: Output,
    pub findings: Vec<Finding>,
}

/// Why a task failed, as the control plane is told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// Machine-readable, such as `device_in_use`.
    pub code: &'static str,
    /// For the operator.
    pub message: String,
}

impl Failure {
    /// A failure with its code and message.
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

impl From<crate::store::StoreError> for Failure {
    fn from(error: crate::store::StoreError) -> Self {
        Self::new("node_storage", crate::chain(&error))
    }
}
