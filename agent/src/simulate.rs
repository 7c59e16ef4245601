//! Faults and delays of a simulated machine. Only a node with simulated GPUs can have them, so that no real node can be told
//! to fail.

use std::time::Duration;

use wire::inventory::ExecutorKind;
use wire::task::{OpenTerminal, Provision, ReconcileSshKeys, Release};

use crate::executor::{Executor, Failure, Output, Released};
use crate::terminal::Shell;

/// Which kind of task fails on the simulated machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SimulatedFailure {
    Provision,
    Release,
}

/// How the simulated machine misbehaves.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Misbehaviour {
    pub provision_delay: Duration,
    pub failure: Option<SimulatedFailure>,
}

/// An executor on a machine that misbehaves.
pub struct Simulated<E> {
    inner: E,
    misbehaviour: Misbehaviour,
}

impl<E: Executor> Simulated<E> {
    /// Puts the misbehaviour in front of `inner`.
    pub fn new(inner: E, misbehaviour: Misbehaviour) -> Self {
        Self { inner, misbehaviour }
    }

    fn fail_if(&self, kind: SimulatedFailure) -> Result<(), Failure> {
        if self.misbehaviour.failure == Some(kind) {
            Err(Failure::new("simulated_failure", "this node simulates hardware that fails (--simulate-failure)"))
        } else {
            Ok(())
        }
    }
}

impl<E: Executor> Executor for Simulated<E> {
    fn kind(&self) -> ExecutorKind {
        self.inner.kind()
    }

    fn provision(&self, task: &Provision) -> Result<Output, Failure> {
        std::thread::sleep(self.misbehaviour.provision_delay);
        self.fail_if(SimulatedFailure::Provision)?;
        self.inner.provision(task)
    }

    fn reconcile_keys(&self, task: &ReconcileSshKeys) -> Result<Output, Failure> {
        self.inner.reconcile_keys(task)
    }

    fn release(&self, task: &Release) -> Result<Released, Failure> {
        self.fail_if(SimulatedFailure::Release)?;
        self.inner.release(task)
    }

    fn shell(&self, task: &OpenTerminal) -> Result<Shell, Failure> {
        self.inner.shell(task)
    }

    fn tenants(&self) -> Vec<Release> {
        self.inner.tenants()
    }

    fn validate(&self) -> Result<Output, Failure> {
        self.inner.validate()
    }

    fn reboot(&self) -> Failure {
        self.inner.reboot()
    }
}
