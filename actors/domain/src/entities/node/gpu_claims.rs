//! Claims on GPUs: a UUID belongs to one node in the cluster, which the commit of a second node's claim detects.
//!
//! A node claims the UUIDs that it reports from the time it is active until it is removed. Where another node has claimed one of them, the
//! node is quarantined: one of the two machines is a copy, or reports what is not true. An operator who has removed the other node, or
//! corrected the hardware, releases the quarantine, and the node claims its UUIDs again.

use super::{Command, GpuClaimScope, Instruction, Node, Phase, Rejection, Request, StateCode};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::state_machine::{Transition, TransitionContext};
use serde_json::json;
use std::collections::BTreeMap;
use uuid::Uuid;

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
        if matches!(command, Command::Instruction(Instruction::Reserve { .. })) {
            return Err(Rejection::NotSchedulable {
                why: self.without_gpus_of(holders).machine.gpu_conflict().unwrap_or_default(),
            });
        }
        let frees = matches!(command, Command::Request(Request::ReleaseQuarantine { .. } | Request::Reactivate { .. }));
        let mut step = self.advance(command, ctx)?;
        let Some(next) = &mut step.next else { return Ok(step) };
        next.claim(holders);
        let Some(why) = next.machine.gpu_conflict() else { return Ok(step) };
        if frees {
            return Err(Rejection::NotInOrder { why });
        }
        if !matches!(next.lifecycle.phase, Phase::Active | Phase::Offline | Phase::Draining { .. }) {
            return Ok(step);
        }
        let becomes = next.lifecycle.phase.clone();
        // It does not become active: the records of the activation are not written.
        if self.lifecycle.phase != next.lifecycle.phase {
            next.lifecycle.phase = self.lifecycle.phase.clone();
            step.events.retain(|event| !matches!(event, Event::NodeStateChanged { .. }));
            step.audit.retain(|audit| audit.action != AuditAction::NodesActivate);
        }
        let event = next.lifecycle.enter_quarantine(StateCode::GpuOfAnotherNode, &why, ctx);
        if let Phase::Quarantined { was } = &mut next.lifecycle.phase {
            **was = becomes;
        }
        let metadata = json!({ "code": StateCode::GpuOfAnotherNode, "gpus": next.machine.contested_gpus });
        let audit = next.audit(AuditAction::NodesQuarantine, metadata);
        step.why = why;
        Ok(step.with(event, [audit]))
    }

    /// Claims the node's GPUs except those of `holders`.
    fn claim(&mut self, holders: &BTreeMap<String, Uuid>) {
        self.machine.claim(&self.lifecycle.phase.claims_gpus(), self.tenancy.held_gpus(), holders);
    }

    fn without_gpus_of(&self, holders: &BTreeMap<String, Uuid>) -> Self {
        let mut node = self.clone();
        node.claim(holders);
        node
    }
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
