//! What a part of a node returns to the switchboard, and what it records about its node.

use crate::audit::{AuditAction, AuditRecord};
use crate::event::Event;
use crate::id::{EntityKind, EntityRef, NodeId};
use crate::state_machine::TransitionContext;
use serde_json::Value;

/// What a command leads to in one part.
pub(super) struct Outcome<Part> {
    /// `None`: nothing changes and nothing is recorded.
    pub(super) next: Option<Part>,
    pub(super) events: Vec<Event>,
    pub(super) audits: Vec<AuditRecord>,
    /// The agent has something to do: a waiting poll is answered.
    pub(super) wakes_agent: bool,
    pub(super) why: String,
}

impl<Part> Outcome<Part> {
    pub(super) fn to(next: Part, why: impl Into<String>) -> Self {
        Self { next: Some(next), events: Vec::new(), audits: Vec::new(), wakes_agent: false, why: why.into() }
    }

    pub(super) const fn stay() -> Self {
        Self { next: None, events: Vec::new(), audits: Vec::new(), wakes_agent: false, why: String::new() }
    }

    pub(super) fn event(mut self, event: Event) -> Self {
        self.events.push(event);
        self
    }

    pub(super) fn audit(mut self, audit: AuditRecord) -> Self {
        self.audits.push(audit);
        self
    }

    pub(super) const fn wake_agent(mut self) -> Self {
        self.wakes_agent = true;
        self
    }
}

/// The node that is decided about.
pub(super) const fn node_id(ctx: &TransitionContext<'_>) -> NodeId {
    NodeId(ctx.id)
}

/// An audit record about the node.
pub(super) fn audit(action: AuditAction, metadata: Value, ctx: &TransitionContext<'_>) -> AuditRecord {
    AuditRecord::new(action, EntityRef { kind: EntityKind::Node, id: ctx.id }, metadata)
}
