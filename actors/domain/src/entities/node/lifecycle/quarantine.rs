//! A quarantine is a set of holds, each with an author: what takes a hold back takes back its own alone.

use super::{Lifecycle, Phase, StateCode, StateReason};
use crate::audit::{AuditAction, AuditRecord};
use crate::entities::node::outcome;
use crate::event::Event;
use crate::state_machine::{Timestamp, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Why a node is out of rent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantineHold {
    pub author: HoldAuthor,
    /// As [`Lifecycle::reason`], of which the first hold is the origin.
    pub code: StateCode,
    pub message: String,
    pub since_at: Timestamp,
}

/// Who holds a node in quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum HoldAuthor {
    /// A finding about the machine, or an older agent's critical health.
    Health,
    /// The inventory differs from the SKU.
    Drift,
    /// A finding that the machine was altered.
    Integrity,
    /// A machine that may be the copy of another.
    Clone,
    /// A release without clean-up proof.
    Release,
    /// `node.validate`.
    Validation,
    /// Its machine is being reinstalled.
    Reimage,
    /// Its machine is not the node's any more at the bare-metal provider.
    Provider,
    Administrator,
}

impl HoldAuthor {
    const fn of(code: &StateCode) -> Self {
        match code {
            StateCode::HealthCritical => Self::Health,
            StateCode::InventoryDrift => Self::Drift,
            StateCode::IntegrityFinding => Self::Integrity,
            StateCode::CloneSuspected | StateCode::GpuOfAnotherNode => Self::Clone,
            StateCode::ForcedRelease => Self::Release,
            StateCode::ValidationFailed => Self::Validation,
            StateCode::Reimaging | StateCode::SystemRefused => Self::Reimage,
            StateCode::MachineLost => Self::Provider,
            StateCode::Registered
            | StateCode::TokenIssued
            | StateCode::TokenExpired
            | StateCode::CertificateIssued
            | StateCode::EnrollmentExpired
            | StateCode::InventoryMismatch
            | StateCode::FirstPoll
            | StateCode::Silent
            | StateCode::ContactRestored
            | StateCode::Restarted
            | StateCode::Draining
            | StateCode::Drained
            | StateCode::Retired
            | StateCode::Reactivated
            | StateCode::Removing
            | StateCode::Removed
            | StateCode::Quarantined
            | StateCode::QuarantineReleased
            | StateCode::DeploymentFailed
            | StateCode::Other(_) => Self::Administrator,
        }
    }
}

impl HoldAuthor {
    /// True where the hold is about what the agent reports of its machine: another version of the agent may end it, or may have caused it.
    const fn is_of_a_fault(self) -> bool {
        match self {
            Self::Health | Self::Drift | Self::Integrity | Self::Validation => true,
            Self::Clone | Self::Release | Self::Reimage | Self::Provider | Self::Administrator => false,
        }
    }
}

impl Lifecycle {
    /// The holds of its quarantine, oldest first. A node that an earlier release quarantined has the one of its reason.
    #[must_use]
    pub fn quarantine_holds(&self) -> Vec<QuarantineHold> {
        if !matches!(self.phase, Phase::Quarantined { .. }) {
            return Vec::new();
        }
        if !self.quarantine_holds.is_empty() {
            return self.quarantine_holds.clone();
        }
        let (code, message) = (self.reason.code.clone(), self.reason.message.clone());
        vec![QuarantineHold { author: HoldAuthor::of(&code), code, message, since_at: self.entered_at }]
    }

    /// True where this author holds it in quarantine.
    pub(in crate::entities::node) fn is_held_by(&self, author: HoldAuthor) -> bool {
        self.quarantine_holds().iter().any(|hold| hold.author == author)
    }

    /// True where every hold is of an author whose fault another version of the agent may end, or may have caused.
    pub(in crate::entities::node) fn is_held_by_faults_alone(&self) -> bool {
        self.quarantine_holds().iter().all(|hold| hold.author.is_of_a_fault())
    }

    /// Adds a hold. The first one quarantines the node, which returns to its present state once the last one is taken back.
    pub(in crate::entities::node) fn enter_quarantine(
        &mut self,
        code: StateCode,
        message: &str,
        ctx: &TransitionContext<'_>,
    ) -> Option<Event> {
        let author = HoldAuthor::of(&code);
        let mut holds = self.quarantine_holds();
        holds.retain(|hold| hold.author != author);
        holds.push(QuarantineHold { author, code: code.clone(), message: message.to_owned(), since_at: ctx.now });
        let event = (!matches!(self.phase, Phase::Quarantined { .. })).then(|| {
            let was = Box::new(self.phase.clone());
            self.enter(Phase::Quarantined { was }, code, message, ctx)
        });
        self.quarantine_holds = holds;
        self.show_first_hold();
        event
    }

    /// Takes back the holds of these authors. Without any other, the node returns to the state that it had before, with an event.
    pub(in crate::entities::node) fn take_back_holds(
        &mut self,
        authors: &[HoldAuthor],
        ctx: &TransitionContext<'_>,
    ) -> Option<(Option<Event>, AuditRecord)> {
        let Phase::Quarantined { was } = &self.phase else { return None };
        let was = Phase::clone(was);
        let held = self.quarantine_holds();
        let (over, left): (Vec<_>, Vec<_>) = held.into_iter().partition(|hold| authors.contains(&hold.author));
        if over.is_empty() {
            return None;
        }
        let names: Vec<&str> = over.iter().map(|hold| hold.author.into()).collect();
        let metadata = json!({ "holds": names, "left": left.len() });
        let audit = outcome::audit(AuditAction::NodesReleaseQuarantine, metadata, ctx);
        if left.is_empty() {
            const WHY: &str = "The cause of the quarantine is over.";
            return Some((Some(self.enter(was, StateCode::QuarantineReleased, WHY, ctx)), audit));
        }
        self.quarantine_holds = left;
        self.show_first_hold();
        Some((None, audit))
    }

    /// Replaces what this author's hold says, where there is one.
    pub(in crate::entities::node) fn explain_hold(&mut self, author: HoldAuthor, message: &str) {
        for hold in self.quarantine_holds.iter_mut().filter(|hold| hold.author == author) {
            message.clone_into(&mut hold.message);
        }
        self.show_first_hold();
    }

    fn show_first_hold(&mut self) {
        if let Some(first) = self.quarantine_holds.first() {
            self.reason = StateReason::new(first.code.clone(), first.message.clone());
        }
    }
}
