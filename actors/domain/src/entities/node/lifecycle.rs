//! The state of a node: its phase, since when, why, and who holds it in quarantine.

mod quarantine;
mod state_reason;

use super::outcome;
use crate::event::Event;
use crate::state_machine::{Timestamp, TransitionContext};
use serde::{Deserialize, Serialize};

pub use quarantine::{HoldAuthor, QuarantineHold};
pub use state_reason::{StateCode, StateReason};

/// The part of a node that says in which state it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lifecycle {
    pub phase: Phase,
    pub entered_at: Timestamp,
    /// The reason of its state, as a code and a sentence.
    pub reason: StateReason,
    /// Why it is in quarantine. See [`Lifecycle::quarantine_holds`].
    pub(super) quarantine_holds: Vec<QuarantineHold>,
}

impl Lifecycle {
    /// The lifecycle of a node that is registered at this moment.
    pub(super) fn registered(message: &str, now: Timestamp) -> Self {
        let reason = StateReason::new(StateCode::Registered, message);
        Self { phase: Phase::Registered, entered_at: now, reason, quarantine_holds: Vec::new() }
    }

    /// Enters another phase. Every phase but a quarantine ends the holds.
    pub(super) fn enter(&mut self, phase: Phase, code: StateCode, message: &str, ctx: &TransitionContext<'_>) -> Event {
        let from = self.phase.name().to_owned();
        if !matches!(phase, Phase::Quarantined { .. }) {
            self.quarantine_holds.clear();
        }
        self.phase = phase;
        self.entered_at = ctx.now;
        let reason = code.as_str().to_owned();
        self.reason = StateReason::new(code, message);
        let to = self.phase.name().to_owned();
        Event::NodeStateChanged { node_id: outcome::node_id(ctx), from: Some(from), to, reason }
    }
}

/// The states of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::EnumDiscriminants)]
#[strum_discriminants(
    name(PhaseName),
    doc = "The name of a node's state.",
    derive(Serialize, Deserialize, strum::Display, strum::IntoStaticStr),
    strum(serialize_all = "kebab-case", const_into_str),
    serde(rename_all = "kebab-case")
)]
#[strum(serialize_all = "kebab-case", const_into_str)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Phase {
    Registered,
    BootstrapIssued {
        until: Timestamp,
    },
    Enrolling {
        until: Timestamp,
    },
    Active,
    Offline,
    Draining {
        until: Timestamp,
    },
    /// It returns to `was` once the quarantine is released.
    Quarantined {
        was: Box<Phase>,
    },
    Retired,
    Removing {
        until: Timestamp,
    },
    Removed,
}

impl Phase {
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.into_str()
    }

    /// True where the node has no identity yet that could have faults.
    #[must_use]
    pub const fn has_no_identity(&self) -> bool {
        matches!(self, Self::Registered | Self::BootstrapIssued { .. })
    }

    /// True where the node's identity is revoked for good.
    #[must_use]
    pub const fn is_gone(&self) -> bool {
        matches!(self, Self::Removing { .. } | Self::Removed)
    }

    /// The phase without its quarantine: the one that the node returns to.
    pub(super) fn underlying(&self) -> &Self {
        if let Self::Quarantined { was } = self { was } else { self }
    }

    /// Whether the node serves its tenants. A quarantined node only cleans up.
    pub(super) const fn is_in_service(&self) -> bool {
        matches!(self, Self::Active | Self::Offline | Self::Draining { .. })
    }

    /// Whether heartbeats are expected of its agent. In other phases it has no identity, is silent, or is out of service.
    pub(super) const fn is_monitored(&self) -> bool {
        match self {
            Self::Active | Self::Draining { .. } | Self::Quarantined { .. } => true,
            Self::Registered
            | Self::BootstrapIssued { .. }
            | Self::Enrolling { .. }
            | Self::Offline
            | Self::Retired
            | Self::Removing { .. }
            | Self::Removed => false,
        }
    }

    /// False of a node in service, also while it is quarantined or drained.
    pub(super) fn is_to_become_active(&self) -> bool {
        match self.underlying() {
            Self::Registered | Self::BootstrapIssued { .. } | Self::Enrolling { .. } | Self::Retired => true,
            Self::Active
            | Self::Offline
            | Self::Draining { .. }
            | Self::Quarantined { .. }
            | Self::Removing { .. }
            | Self::Removed => false,
        }
    }

    /// True where the phase ends by itself.
    pub(super) const fn is_transient(&self) -> bool {
        match self {
            Self::BootstrapIssued { .. } | Self::Enrolling { .. } | Self::Draining { .. } | Self::Removing { .. } => {
                true
            }
            Self::Registered
            | Self::Active
            | Self::Offline
            | Self::Quarantined { .. }
            | Self::Retired
            | Self::Removed => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{decided_at, start};
    use super::*;

    #[test]
    fn phase_other_than_a_quarantine_ends_the_holds() {
        let mut lifecycle = Lifecycle::registered("new", start());
        let hold = |author, code| QuarantineHold { author, code, message: "m".to_owned(), since_at: start() };
        let later = start() + chrono::TimeDelta::hours(1);
        decided_at(later, |ctx| {
            lifecycle.quarantine_holds.push(hold(HoldAuthor::Health, StateCode::HealthCritical));
            let was = Box::new(Phase::Active);
            lifecycle.enter(Phase::Quarantined { was }, StateCode::HealthCritical, "it failed", ctx);
            assert_eq!((lifecycle.quarantine_holds.len(), lifecycle.phase.underlying()), (1, &Phase::Active));
            let event = lifecycle.enter(Phase::Retired, StateCode::Registered, "retired", ctx);
            assert!(
                matches!(event, Event::NodeStateChanged { from: Some(from), to, .. } if (&*from, &*to) == ("quarantined", "retired"))
            );
        });
        assert!(lifecycle.quarantine_holds.is_empty());
        assert_eq!(lifecycle.entered_at, later);
    }
}
