//! Faults and delays of simulated hardware. Only a node with simulated GPUs can have them, so that no real node can be made to fail.

use std::collections::BTreeMap;
use std::time::Duration;

use wire::inventory::ExecutorKind;
use wire::task::{OpenTerminal, Provision, ReconcileSshKeys, Release};
use wire::{OLDEST_PROTOCOL, PROTOCOL};

use crate::allocation_records::WithheldGpu;
use crate::executor::{Executor, ReleaseOutcome};
use crate::finding_log::Condition;
use crate::task_outcome::{TaskFailure, TaskOutput};
use crate::terminal::ShellCommand;
use crate::unproved_gpus::GpuWithoutProof;

/// What fails on simulated hardware.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SimulatedFailure {
    /// Tasks that provision.
    Provision,
    /// Tasks that release.
    Release,
    /// Heartbeats: they are of a protocol that no control plane supports.
    Protocol,
}

/// The configured faults and delays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SimulatedFaults {
    pub provision_delay: Duration,
    pub failure: Option<SimulatedFailure>,
}

impl SimulatedFaults {
    /// The protocol that heartbeats are sent with.
    #[must_use]
    pub fn protocol(&self) -> u16 {
        if self.failure == Some(SimulatedFailure::Protocol) { OLDEST_PROTOCOL - 1 } else { PROTOCOL }
    }
}

/// An executor on simulated hardware with faults.
pub struct SimulatedExecutor<E> {
    inner: E,
    simulated_faults: SimulatedFaults,
}

impl<E: Executor> SimulatedExecutor<E> {
    /// Wraps `inner`.
    pub fn new(inner: E, simulated_faults: SimulatedFaults) -> Self {
        Self { inner, simulated_faults }
    }

    fn fail_if(&self, kind: SimulatedFailure) -> Result<(), TaskFailure> {
        if self.simulated_faults.failure == Some(kind) {
            Err(TaskFailure::new("simulated_failure", "this node simulates hardware that fails (--simulate-failure)"))
        } else {
            Ok(())
        }
    }
}

impl<E: Executor> Executor for SimulatedExecutor<E> {
    fn kind(&self) -> ExecutorKind {
        self.inner.kind()
    }

    fn provision(&self, task: &Provision) -> Result<TaskOutput, TaskFailure> {
        std::thread::sleep(self.simulated_faults.provision_delay);
        self.fail_if(SimulatedFailure::Provision)?;
        self.inner.provision(task)
    }

    fn reconcile_keys(&self, task: &ReconcileSshKeys) -> Result<TaskOutput, TaskFailure> {
        self.inner.reconcile_keys(task)
    }

    fn release(&self, task: &Release) -> Result<ReleaseOutcome, TaskFailure> {
        self.fail_if(SimulatedFailure::Release)?;
        self.inner.release(task)
    }

    fn shell(&self, task: &OpenTerminal) -> Result<ShellCommand, TaskFailure> {
        self.inner.shell(task)
    }

    fn tenants(&self) -> Vec<Release> {
        self.inner.tenants()
    }

    fn withhold_gpu(&self, uuid: &str) -> Result<WithheldGpu<'_>, TaskFailure> {
        self.inner.withhold_gpu(uuid)
    }

    fn unproved_gpus(&self) -> BTreeMap<String, GpuWithoutProof> {
        self.inner.unproved_gpus()
    }

    fn unbounded_tenants(&self) -> Vec<Condition> {
        self.inner.unbounded_tenants()
    }

    fn follow_device_nodes(&self) {
        self.inner.follow_device_nodes();
    }

    fn reconcile_devices(&self) -> bool {
        self.inner.reconcile_devices()
    }

    fn validate(&self) -> Result<TaskOutput, TaskFailure> {
        self.inner.validate()
    }

    fn reboot(&self) -> TaskFailure {
        self.inner.reboot()
    }
}
