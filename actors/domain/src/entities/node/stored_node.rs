//! The stored form of a node: one flat object, whatever the parts are, so that a release reads what another one has written.

use super::{
    Agent, AgentContact, GpuReset, Health, Hold, Identity, Lifecycle, MachineRepair, Node, NodeFinding, NodeHealth,
    NodeMachine, NodeRepair, NodeRollout, NodeTask, NodeValidation, Phase, ProbeOutcome, ProvidedMachine,
    QuarantineHold, Registration, Reimage, ReportedInventory, StateReason, Tasks, Tenancy, UnprovedGpu, Validation,
};
use crate::audit::RefusalAudit;
use crate::hardware::ExpectedHardware;
use crate::id::{AllocationId, NodeId, TaskId};
use crate::state_machine::Timestamp;
use crate::validation::ValidationLevel;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// The fields in the order in which they are written. What may be absent was added by a later release.
#[derive(Serialize, Deserialize)]
struct StoredNode<'a> {
    id: NodeId,
    registration: Cow<'a, Registration>,
    registered_at: Timestamp,
    life: Cow<'a, Phase>,
    entered_at: Timestamp,
    reason: Cow<'a, StateReason>,
    probe: Cow<'a, Option<ProbeOutcome>>,
    identity: Cow<'a, Identity>,
    inventory: Cow<'a, Option<ReportedInventory>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expected_hardware: Cow<'a, Option<Box<ExpectedHardware>>>,
    seen: Cow<'a, Option<AgentContact>>,
    health: Cow<'a, NodeHealth>,
    #[serde(default, skip_serializing_if = "<[_]>::is_empty")]
    findings: Cow<'a, [NodeFinding]>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    repair: Cow<'a, Option<NodeRepair>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    gpu_resets: Cow<'a, BTreeMap<String, GpuReset>>,
    #[serde(default, skip_serializing_if = "<[_]>::is_empty")]
    quarantine_holds: Cow<'a, [QuarantineHold]>,
    holds: Cow<'a, BTreeMap<AllocationId, Hold>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    unproved_gpus: Cow<'a, BTreeMap<String, UnprovedGpu>>,
    fenced_by: Cow<'a, BTreeSet<AllocationId>>,
    #[serde(default)]
    tasks: Cow<'a, BTreeMap<TaskId, NodeTask>>,
    #[serde(default)]
    refusals: RefusalAudit,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    claimed_gpus: Cow<'a, BTreeSet<String>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    contested_gpus: Cow<'a, BTreeMap<String, NodeId>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    machine: Cow<'a, Option<ProvidedMachine>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reimage: Cow<'a, Option<Reimage>>,
    #[serde(default, skip_serializing_if = "<[_]>::is_empty")]
    rollouts: Cow<'a, [NodeRollout]>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    validation: Cow<'a, Option<Box<NodeValidation>>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failed_validation: Option<ValidationLevel>,
}

impl Serialize for Node {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { id, identity, lifecycle, tenancy, tasks, health, repair, validation, machine, agent } = self;
        let stored = StoredNode {
            id: *id,
            registration: Cow::Borrowed(&machine.registration),
            registered_at: machine.registered_at,
            life: Cow::Borrowed(&lifecycle.phase),
            entered_at: lifecycle.entered_at,
            reason: Cow::Borrowed(&lifecycle.reason),
            probe: Cow::Borrowed(&machine.probe),
            identity: Cow::Borrowed(identity),
            inventory: Cow::Borrowed(&machine.inventory),
            expected_hardware: Cow::Borrowed(&machine.expected_hardware),
            seen: Cow::Borrowed(&agent.contact),
            health: Cow::Borrowed(&health.reported),
            findings: Cow::Borrowed(&health.findings),
            repair: Cow::Borrowed(&repair.of_machine),
            gpu_resets: Cow::Borrowed(&repair.gpu_resets),
            quarantine_holds: Cow::Borrowed(&lifecycle.quarantine_holds),
            holds: Cow::Borrowed(&tenancy.holds),
            unproved_gpus: Cow::Borrowed(&tenancy.unproved_gpus),
            fenced_by: Cow::Borrowed(&tenancy.fenced_by),
            tasks: Cow::Borrowed(&tasks.by_id),
            refusals: identity.refusals,
            claimed_gpus: Cow::Borrowed(&machine.claimed_gpus),
            contested_gpus: Cow::Borrowed(&machine.contested_gpus),
            machine: Cow::Borrowed(&machine.provided),
            reimage: Cow::Borrowed(&machine.reimage),
            rollouts: Cow::Borrowed(&agent.rollouts),
            validation: Cow::Borrowed(&validation.last),
            failed_validation: validation.failed,
        };
        stored.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let stored = StoredNode::deserialize(deserializer)?;
        Ok(Self {
            id: stored.id,
            identity: Identity { refusals: stored.refusals, ..stored.identity.into_owned() },
            lifecycle: Lifecycle {
                phase: stored.life.into_owned(),
                entered_at: stored.entered_at,
                reason: stored.reason.into_owned(),
                quarantine_holds: stored.quarantine_holds.into_owned(),
            },
            tenancy: Tenancy {
                holds: stored.holds.into_owned(),
                unproved_gpus: stored.unproved_gpus.into_owned(),
                fenced_by: stored.fenced_by.into_owned(),
            },
            tasks: Tasks { by_id: stored.tasks.into_owned() },
            health: Health { reported: stored.health.into_owned(), findings: stored.findings.into_owned() },
            repair: MachineRepair {
                of_machine: stored.repair.into_owned(),
                gpu_resets: stored.gpu_resets.into_owned(),
            },
            validation: Validation { last: stored.validation.into_owned(), failed: stored.failed_validation },
            machine: NodeMachine {
                registration: stored.registration.into_owned(),
                registered_at: stored.registered_at,
                probe: stored.probe.into_owned(),
                inventory: stored.inventory.into_owned(),
                expected_hardware: stored.expected_hardware.into_owned(),
                claimed_gpus: stored.claimed_gpus.into_owned(),
                contested_gpus: stored.contested_gpus.into_owned(),
                provided: stored.machine.into_owned(),
                reimage: stored.reimage.into_owned(),
            },
            agent: Agent { contact: stored.seen.into_owned(), rollouts: stored.rollouts.into_owned() },
        })
    }
}
