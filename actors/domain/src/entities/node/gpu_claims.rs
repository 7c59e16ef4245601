//! Claims on GPUs: a UUID belongs to one node in the cluster, which the commit of a second node's claim detects.
//!
//! A node claims the UUIDs that it reports from the time it is active until it is removed. Where another node has claimed one of them, the
//! node is quarantined: one of the two machines is a copy, or reports what is not true. An operator who has removed the other node, or
//! corrected the hardware, releases the quarantine, and the node claims its UUIDs again.

use super::{Command, Fact, Node, Phase, Rejection, Request, StateCode};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::NodeId;
use crate::state_machine::{Transition, TransitionContext};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// The claim of a GPU. Its UUID is hexadecimal: case does not distinguish two.
pub(super) fn gpu_claim(uuid: &str) -> String {
    format!("gpu/{}", uuid.trim().to_ascii_lowercase())
}

impl Transition<Node> {
    /// The transition's node claims its GPUs.
    pub(super) fn with_claims(mut self) -> Self {
        if let Some(next) = &mut self.next {
            next.claim(&BTreeMap::new());
        }
        self
    }
}

impl Node {
    /// The transition of a command after the store refused the first one because `holders` have GPUs of this node.
    pub(super) fn advance_without(
        &self,
        command: Command,
        holders: &BTreeMap<String, Uuid>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if matches!(command, Command::Fact(Fact::Reserve { .. })) {
            return Err(Rejection::NotSchedulable {
                why: self.without_gpus_of(holders).gpu_conflict().unwrap_or_default(),
            });
        }
        let frees = matches!(command, Command::Request(Request::ReleaseQuarantine { .. } | Request::Reactivate { .. }));
        let mut step = self.advance(command, ctx)?;
        let Some(next) = &mut step.next else { return Ok(step) };
        next.claim(holders);
        let Some(why) = next.gpu_conflict() else { return Ok(step) };
        if frees {
            return Err(Rejection::NotInOrder { why });
        }
        if !matches!(next.life, Phase::Active | Phase::Offline | Phase::Draining { .. }) {
            return Ok(step);
        }
        let becomes = next.life.clone();
        // It does not become active: the records of the activation are not written.
        if self.life != next.life {
            next.life = self.life.clone();
            step.events.retain(|event| !matches!(event, Event::NodeStateChanged { .. }));
            step.audit.retain(|audit| audit.action != AuditAction::NodesActivate);
        }
        let event = next.enter_quarantine(StateCode::GpuOfAnotherNode, &why, ctx);
        if let Phase::Quarantined { was } = &mut next.life {
            **was = becomes;
        }
        let metadata = json!({ "code": StateCode::GpuOfAnotherNode, "gpus": next.contested_gpus });
        let audit = next.audit(AuditAction::NodesQuarantine, metadata);
        step.why = why;
        Ok(event.into_iter().fold(step, Transition::event).audit(audit))
    }

    /// Claims the node's GPUs except those of `holders`.
    fn claim(&mut self, holders: &BTreeMap<String, Uuid>) {
        let has = self.own_gpus();
        self.contested_gpus.retain(|uuid, _| has.contains(uuid));
        for uuid in &has {
            if let Some(holder) = holders.get(&gpu_claim(uuid)) {
                self.contested_gpus.insert(uuid.clone(), NodeId(*holder));
            }
        }
        self.claimed_gpus = has.into_iter().filter(|uuid| !self.contested_gpus.contains_key(uuid)).collect();
    }

    /// Drops the known conflicts, so that a release of the quarantine or a reactivation claims the GPUs again.
    pub(super) fn reclaim_gpus(mut self) -> Self {
        self.contested_gpus.clear();
        self
    }

    /// The GPUs that it reports, and those that tenants hold although the machine does not report them at the moment.
    fn own_gpus(&self) -> BTreeSet<String> {
        let reported = self.inventory.iter().flat_map(|inventory| &inventory.gpus).map(|gpu| &gpu.uuid);
        let held = self.holds.values().flat_map(|hold| &hold.placed.devices).map(|device| &device.uuid);
        let all = reported.chain(held);
        let is_known = |uuid: &&String| self.claimed_gpus.contains(*uuid) || self.contested_gpus.contains_key(*uuid);
        match self.life.claims_gpus() {
            GpuClaimScope::All => all.cloned().collect(),
            GpuClaimScope::Known => all.filter(is_known).cloned().collect(),
            GpuClaimScope::None => BTreeSet::new(),
        }
    }

    fn without_gpus_of(&self, holders: &BTreeMap<String, Uuid>) -> Self {
        let mut node = self.clone();
        node.claim(holders);
        node
    }

    /// Which of the node's GPUs another node has claimed, in a sentence for an operator.
    fn gpu_conflict(&self) -> Option<String> {
        let (uuid, holder) = self.contested_gpus.first_key_value()?;
        Some(format!(
            "GPU {uuid} belongs to node {holder}; remove that node or correct this machine, then release the quarantine."
        ))
    }
}

/// Which of its reported GPUs a node claims.
enum GpuClaimScope {
    All,
    /// Those that it has claimed before, and no new ones.
    Known,
    None,
}

impl Phase {
    /// A node claims GPUs from the time that it is active until it is removed; out of service it only keeps its claims.
    fn claims_gpus(&self) -> GpuClaimScope {
        match self {
            Self::Active | Self::Offline | Self::Draining { .. } => GpuClaimScope::All,
            Self::Retired => GpuClaimScope::Known,
            Self::Quarantined { was } => was.claims_gpus(),
            Self::Registered
            | Self::BootstrapIssued { .. }
            | Self::Enrolling { .. }
            | Self::Removing { .. }
            | Self::Removed => GpuClaimScope::None,
        }
    }
}
