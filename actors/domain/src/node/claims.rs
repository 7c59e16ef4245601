//! Which GPUs are the node's: a UUID belongs to one node in the cluster, and the commit of the node that comes second says so.
//!
//! A node has the UUIDs that it reports from the time it is active until it is removed. Where one of them is another node's, the node is
//! quarantined: one of the two machines is a copy, or says what is not true. An operator who has removed the other node, or put the
//! hardware right, releases the quarantine, and the node claims its UUIDs again.

use super::{Command, Life, Node, Rejection};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::NodeId;
use crate::machine::{Ctx, Step};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// The code of the quarantine of a node that reports another node's GPU.
pub(super) const GPU_OF_ANOTHER_NODE: &str = "gpu_of_another_node";

/// The name that a GPU is claimed by. Its UUID is hexadecimal: case tells no two apart.
pub(super) fn claim_of(uuid: &str) -> String {
    format!("gpu/{}", uuid.trim().to_ascii_lowercase())
}

impl Step<Node> {
    /// The step's node claims what it has.
    pub(super) fn with_claims(mut self) -> Self {
        if let Some(next) = &mut self.next {
            next.claim(&BTreeMap::new());
        }
        self
    }
}

impl Node {
    /// What follows from a command once the store has said that `holders` have GPUs of this node.
    pub(super) fn advance_without(
        &self,
        command: Command,
        holders: &BTreeMap<String, Uuid>,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        if matches!(command, Command::Reserve { .. }) {
            return Err(Rejection::NotSchedulable { why: self.without(holders).conflict().unwrap_or_default() });
        }
        let frees = matches!(command, Command::ReleaseQuarantine { .. } | Command::Reactivate { .. });
        let mut step = self.advance(command, ctx)?;
        let Some(next) = &mut step.next else { return Ok(step) };
        next.claim(holders);
        let Some(why) = next.conflict() else { return Ok(step) };
        if frees {
            return Err(Rejection::NotInOrder { why });
        }
        if !matches!(next.life, Life::Active | Life::Offline | Life::Draining { .. }) {
            return Ok(step);
        }
        let was = Box::new(next.life.clone());
        // It never was active: what says so is not written.
        if self.life != next.life {
            next.life = self.life.clone();
            step.events.retain(|event| !matches!(event, Event::NodeStateChanged { .. }));
            step.audit.retain(|audit| audit.action != AuditAction::NodesActivate);
        }
        let event = next.enter(Life::Quarantined { was }, GPU_OF_ANOTHER_NODE, &why, ctx);
        let metadata = json!({ "reason": GPU_OF_ANOTHER_NODE, "gpus": next.contested_gpus });
        let audit = next.audit(AuditAction::NodesQuarantine, metadata);
        step.why = why;
        Ok(step.event(event).audit(audit))
    }

    /// Takes what the node has, but for what `holders` have.
    fn claim(&mut self, holders: &BTreeMap<String, Uuid>) {
        let has = self.gpus_of_its_own();
        self.contested_gpus.retain(|uuid, _| has.contains(uuid));
        for uuid in &has {
            if let Some(holder) = holders.get(&claim_of(uuid)) {
                self.contested_gpus.insert(uuid.clone(), NodeId(*holder));
            }
        }
        self.claimed_gpus = has.into_iter().filter(|uuid| !self.contested_gpus.contains_key(uuid)).collect();
    }

    /// What a release of the quarantine, or of the retirement, claims again.
    pub(super) fn contest_again(mut self) -> Self {
        self.contested_gpus.clear();
        self
    }

    /// The GPUs that it reports, and those that tenants hold though the machine does not report them at the moment.
    fn gpus_of_its_own(&self) -> BTreeSet<String> {
        let reported = self.inventory.iter().flat_map(|inventory| &inventory.gpus).map(|gpu| &gpu.uuid);
        let held = self.holds.values().flat_map(|hold| &hold.placed.devices).map(|device| &device.uuid);
        let all = reported.chain(held);
        let is_known = |uuid: &&String| self.claimed_gpus.contains(*uuid) || self.contested_gpus.contains_key(*uuid);
        match self.life.claims_gpus() {
            Claiming::All => all.cloned().collect(),
            Claiming::Known => all.filter(is_known).cloned().collect(),
            Claiming::None => BTreeSet::new(),
        }
    }

    fn without(&self, holders: &BTreeMap<String, Uuid>) -> Self {
        let mut node = self.clone();
        node.claim(holders);
        node
    }

    /// Which of the node's GPUs is another node's, in a sentence for an operator.
    fn conflict(&self) -> Option<String> {
        let (uuid, holder) = self.contested_gpus.first_key_value()?;
        Some(format!(
            "GPU {uuid} belongs to node {holder}; remove that node or correct this machine, then release the quarantine."
        ))
    }
}

/// Which of the GPUs that it reports a node claims.
enum Claiming {
    All,
    /// Those that it had, and no new ones.
    Known,
    None,
}

impl Life {
    /// A node claims GPUs from the time that it is active until it is removed; out of service it only keeps what it has.
    fn claims_gpus(&self) -> Claiming {
        match self {
            Self::Active | Self::Offline | Self::Draining { .. } => Claiming::All,
            Self::Retired => Claiming::Known,
            Self::Quarantined { was } => was.claims_gpus(),
            Self::Registered
            | Self::BootstrapIssued { .. }
            | Self::Enrolling { .. }
            | Self::Removing { .. }
            | Self::Removed => Claiming::None,
        }
    }
}
