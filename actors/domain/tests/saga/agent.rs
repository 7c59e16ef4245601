//! A node's agent and its machine with the real tenants.

use domain::node::{AgentTask, TaskKind, TaskOutcome};
use domain::state_machine::Timestamp;
use domain::{AllocationId, SshKeyId, TaskId};
use std::collections::{BTreeMap, BTreeSet};

/// A throw with which everything goes well.
pub(crate) const LUCKY: u8 = 11;

#[derive(Default)]
pub(crate) struct Agent {
    pub(crate) serial: String,
    pub(crate) token: Option<[u8; 32]>,
    /// Tasks from polls that are not executed yet.
    pub(crate) taken: Vec<AgentTask>,
    /// Its journal of executed tasks, which prevents a second execution.
    done: BTreeSet<(TaskId, u32)>,
    /// Allocations that it had to clean up: it sets none of them up afterwards.
    cleaned: BTreeSet<AllocationId>,
    /// Results not yet reported.
    pub(crate) results: Vec<(TaskId, u32, TaskOutcome)>,
    /// The tenants on the machine, and their GPUs.
    pub(crate) tenants: BTreeMap<AllocationId, Vec<String>>,
    /// Those whose set-up is complete.
    pub(crate) ready: BTreeSet<AllocationId>,
    /// Their SSH keys.
    pub(crate) logins: BTreeMap<AllocationId, Vec<SshKeyId>>,
    /// How often each task took effect.
    pub(crate) effects: BTreeMap<(TaskId, u32), u32>,
}

impl Agent {
    pub(crate) fn take(&mut self, orders: Vec<AgentTask>) {
        for order in orders {
            let task = (order.work.task_id, order.work.attempt);
            let known = self.done.contains(&task)
                || self.taken.iter().any(|taken| (taken.work.task_id, taken.work.attempt) == task);
            if !known {
                self.taken.push(order);
            }
        }
    }

    /// Executes one of the tasks; `luck` determines the result.
    pub(crate) fn work(&mut self, which: usize, luck: u8, now: Timestamp) {
        if self.taken.is_empty() {
            return;
        }
        let order = self.taken.remove(which % self.taken.len());
        let task = (order.work.task_id, order.work.attempt);
        if !self.done.insert(task) {
            return;
        }
        let failed =
            |code: &str| TaskOutcome::Failed { code: code.to_owned(), message: format!("{code}, by bad luck") };
        let verdict = match order.what {
            TaskKind::Provision { place, .. } if self.cleaned.contains(&place.allocation_id) => {
                failed("cleaned_up_before")
            }
            TaskKind::Provision { .. } if now >= order.work.deadline_at => failed("too_late"),
            TaskKind::Provision { place, keys } => {
                *self.effects.entry(task).or_default() += 1;
                let gpus = place.placed.devices.iter().map(|device| device.uuid.clone()).collect();
                // A failed set-up may leave something behind.
                self.tenants.insert(place.allocation_id, gpus);
                if luck.is_multiple_of(4) {
                    failed("setup")
                } else {
                    self.logins.insert(place.allocation_id, keys.iter().map(|key| key.id).collect());
                    self.ready.insert(place.allocation_id);
                    TaskOutcome::Succeeded { proof: None }
                }
            }
            // A tenant's tasks are executed in order.
            TaskKind::ReconcileLogins { .. }
                if self.done.range((task.0, task.1 + 1)..=(task.0, u32::MAX)).next().is_some() =>
            {
                failed("overtaken")
            }
            TaskKind::ReconcileLogins { place, keys } => {
                *self.effects.entry(task).or_default() += 1;
                if luck.is_multiple_of(5) || !self.tenants.contains_key(&place.allocation_id) {
                    failed("reconcile")
                } else {
                    let ids = keys.iter().map(|key| key.id).collect();
                    self.logins.insert(place.allocation_id, ids);
                    TaskOutcome::Succeeded { proof: None }
                }
            }
            TaskKind::OpenTerminal { .. } => TaskOutcome::Succeeded { proof: None },
            TaskKind::Release { place } => {
                *self.effects.entry(task).or_default() += 1;
                self.cleaned.insert(place.allocation_id);
                self.ready.remove(&place.allocation_id);
                match luck % 6 {
                    0 | 1 => failed("remains"),
                    2 => TaskOutcome::Succeeded { proof: None },
                    _ => {
                        self.tenants.remove(&place.allocation_id);
                        self.logins.remove(&place.allocation_id);
                        TaskOutcome::Succeeded { proof: Some(place.allocation_id) }
                    }
                }
            }
            TaskKind::OfNode { .. } => TaskOutcome::Succeeded { proof: None },
        };
        self.results.push((task.0, task.1, verdict));
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.taken.is_empty() && self.results.is_empty()
    }
}
