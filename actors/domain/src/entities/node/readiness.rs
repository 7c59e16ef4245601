//! The readiness of a node, read from all of its parts: what its machine lacks, what excludes an allocation, which GPUs are free.

use super::{Evacuation, HardwareComparison, HoldAuthor, Node, Phase, RepairView, ReportedGpu};
use crate::event::GpuDevice;
use crate::id::AllocationId;
use crate::state_machine::{Timestamp, TransitionContext};
use crate::task_type::TaskType;
use crate::validation::{ValidationLevel, ValidationMinimums};
use std::collections::BTreeSet;

impl Node {
    /// The GPUs that its agent lists, by UUID.
    pub(super) fn listed_gpus(&self) -> BTreeSet<&str> {
        self.machine.gpus().map(|gpu| gpu.uuid.as_str()).collect()
    }

    /// How many GPUs the agent does not list and has found missing. A machine that has never had them all has none.
    fn missing_gpus(&self) -> u32 {
        match self.lifecycle.phase {
            Phase::Enrolling { .. } => 0,
            Phase::Registered
            | Phase::BootstrapIssued { .. }
            | Phase::Active
            | Phase::Offline
            | Phase::Draining { .. }
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => self.health.missing_gpus(&self.listed_gpus()),
        }
    }

    /// The difference of the machine from what its SKU promises and expects, in a sentence for an operator.
    #[must_use]
    pub fn mismatch(&self) -> Option<String> {
        self.machine.mismatch(self.missing_gpus(), self.lifecycle.phase.is_to_become_active())
    }

    /// What the SKU promises of GPUs, what it sells of the rest of the machine, and what is expected of it.
    #[must_use]
    pub fn compared_hardware(&self) -> Vec<HardwareComparison> {
        self.machine.compared_hardware(self.missing_gpus())
    }

    /// The minimums of its SKU for a validation.
    pub(super) fn minimums<'a>(&self, ctx: &'a TransitionContext<'_>) -> &'a ValidationMinimums {
        ctx.policy.minimums(self.machine.registration.sku.sku_id)
    }

    /// The strictest level of a validation that it has failed and not passed since.
    #[must_use]
    pub fn failed_level(&self) -> Option<ValidationLevel> {
        self.validation.failed_level(self.lifecycle.is_held_by(HoldAuthor::Validation))
    }

    /// The level of a validation after which the machine is fit.
    pub(super) fn required_level(&self) -> ValidationLevel {
        self.failed_level().unwrap_or(ValidationLevel::Quick)
    }

    /// True where it has to pass a validation before it is active for the first time.
    pub(super) fn lacks_first_validation(&self, ctx: &TransitionContext<'_>) -> bool {
        self.validation.lacks_first(!self.minimums(ctx).is_empty(), self.failed_level())
    }

    /// What the repair has to know of the machine.
    pub(super) fn repair_view(&self) -> RepairView<'_> {
        RepairView {
            findings: &self.health.findings,
            listed: self.listed_gpus(),
            is_critical: self.health.is_machine_critical(),
            can_reset: self.agent.lacks_task_type(TaskType::NodeGpuReset).is_none(),
        }
    }

    /// The allocations that a fault of the machine concerns, with the fault, and its time where it is known.
    pub(super) fn faulted(&self) -> Vec<(AllocationId, &'static str, Option<Timestamp>)> {
        self.health.faulted(self.tenancy.tenants(), &self.listed_gpus())
    }

    /// The fault of the machine that concerns this allocation, if any.
    pub(super) fn fault_of(&self, allocation_id: AllocationId) -> Option<&'static str> {
        self.faulted().into_iter().find(|(id, ..)| *id == allocation_id).map(|(_, reason, _)| reason)
    }

    /// The messages for a tenant who has had these GPUs since this time. What is about a GPU of another tenant is not among them.
    #[must_use]
    pub fn tenant_messages(&self, gpus: &[GpuDevice], since: Timestamp) -> Vec<String> {
        self.health.tenant_messages(gpus, since, &self.listed_gpus())
    }

    /// The time that the tenant of an allocation has to leave, where it is asked to.
    #[must_use]
    pub fn evacuation_of(&self, allocation_id: AllocationId) -> Option<&Evacuation> {
        self.tenancy.evacuation_of(allocation_id)
    }

    /// Why it cannot be reimaged after a tenant; `None` where it can.
    #[must_use]
    pub fn not_reimageable(&self) -> Option<String> {
        self.machine.not_reimageable()
    }

    /// Whether one tenant can have all of it now, and it can be reimaged afterwards.
    #[must_use]
    pub fn is_reimageable_as_a_whole(&self) -> bool {
        self.not_reimageable().is_none() && self.gpus_free() == self.machine.registration.gpus_total
    }

    /// Why it takes no new allocation; `None` where it does.
    #[must_use]
    pub fn not_schedulable(&self) -> Option<String> {
        self.unfit().or_else(|| self.health.withheld()).or_else(|| self.occupied())
    }

    /// Why no allocation can be placed on it, regardless of its tenants.
    fn unfit(&self) -> Option<String> {
        if self.lifecycle.phase != Phase::Active {
            return Some(format!("it is {}", self.lifecycle.phase.name()));
        }
        self.mismatch()
            .or_else(|| self.agent.unmonitored())
            .or_else(|| self.repair.obstacle())
            .or_else(|| self.validation.obstacle(self.tasks.has_open_validation()))
    }

    /// Why its present or past tenants exclude another one.
    fn occupied(&self) -> Option<String> {
        self.tenancy.occupied(self.machine.isolates_devices())
    }

    /// How many GPUs a new allocation could get now.
    #[must_use]
    pub fn gpus_free(&self) -> u32 {
        if self.not_schedulable().is_some() {
            return 0;
        }
        u32::try_from(self.free_gpus().count()).unwrap_or(0)
    }

    /// How many more GPUs a new allocation could get, if the node's health did not prevent it.
    #[must_use]
    pub fn gpus_withheld(&self) -> u32 {
        if self.unfit().is_some() || self.occupied().is_some() {
            return 0;
        }
        let (is_withheld, withheld) = (self.health.withheld().is_some(), self.withheld_gpus());
        let withheld = self.unheld_gpus().filter(|gpu| is_withheld || withheld.contains(gpu.uuid.as_str()));
        u32::try_from(withheld.count()).unwrap_or(0)
    }

    /// The GPUs that get no new tenant, by UUID.
    fn withheld_gpus(&self) -> BTreeSet<&str> {
        let unproved = self.tenancy.unproved_gpus.keys().map(String::as_str);
        self.health.withheld_gpus().chain(self.repair.withheld_gpus()).chain(unproved).collect()
    }

    /// The GPUs that a new tenant can get, in the order of their index.
    pub fn free_gpus(&self) -> impl Iterator<Item = &ReportedGpu> {
        let withheld = self.withheld_gpus();
        self.unheld_gpus().filter(move |gpu| !withheld.contains(gpu.uuid.as_str()))
    }

    /// The GPUs without a hold, in the order of their index. Before the agent's first report there are none.
    fn unheld_gpus(&self) -> impl Iterator<Item = &ReportedGpu> {
        let held: BTreeSet<&str> = self.tenancy.held_gpus().collect();
        self.machine.gpus().filter(move |gpu| !held.contains(gpu.uuid.as_str()))
    }
}
