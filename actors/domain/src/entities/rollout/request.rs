//! What administrators ask of a rollout.

use super::{Feed, Phase, PhaseName, Rejection, Rollout, RolloutOrder};
use crate::audit::AuditAction;
use crate::authz::Action;
use crate::event::Event;
use crate::id::RolloutId;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{self, Transition, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A message between a node and its rollout may be resent once before a rollout counts as overdue.
const ON_THE_WAY: TimeDelta = TimeDelta::minutes(2);

/// What administrators ask of a rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[derive(strum::IntoStaticStr, strum::VariantNames, strum::EnumDiscriminants)]
#[strum_discriminants(
    name(CommandName),
    doc = "The name of a request.",
    derive(Serialize, Deserialize, strum::Display),
    strum(serialize_all = "snake_case"),
    serde(rename_all = "snake_case")
)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Request {
    Create {
        order: Box<RolloutOrder>,
    },
    Pause {
        reason: String,
    },
    /// Also after a stop: the nodes that have not ended follow.
    Resume {
        reason: String,
    },
    Abort {
        reason: String,
    },
}

impl state_machine::Request for Request {
    fn action(&self) -> Action {
        match self {
            Self::Create { .. } | Self::Pause { .. } | Self::Resume { .. } | Self::Abort { .. } => Action::ManageNodes,
        }
    }

    fn creates(&self) -> bool {
        matches!(self, Self::Create { .. })
    }
}

impl Rollout {
    pub(super) fn create(order: RolloutOrder, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let seconds = |key| ctx.policy.seconds(key, &Scopes::global(), ctx.now);
        let result_within = seconds(PolicyKey::NodeTaskTimeout) + seconds(PolicyKey::NodeUpdateCommit) + ON_THE_WAY;
        let metadata = json!({
            "digest": order.digest,
            "canary": order.canary,
            "max_unavailable": order.max_unavailable,
            "soak_seconds": order.soak_seconds,
            "include_held": order.includes_held,
            "selector": order.selector,
            "reason": order.reason,
        });
        let (why, digest) = (format!("a rollout was ordered: {}", order.reason), order.digest.clone());
        let mut rollout = Self {
            id: RolloutId(ctx.id),
            order,
            created_by: ctx.by.to_string(),
            created_at: ctx.now,
            phase: Phase::Running,
            entered_at: ctx.now,
            result_within_seconds: u32::try_from(result_within.num_seconds()).unwrap_or(u32::MAX),
            feed: Feed::default(),
            waiting: VecDeque::new(),
            in_flight: BTreeMap::new(),
            updated: 0,
            failed: 0,
            skipped: 0,
            failures: Vec::new(),
            skips: Vec::new(),
            soaking: BTreeSet::new(),
            soak: None,
        };
        let follows = rollout.advance(ctx);
        let audit = rollout.audit(AuditAction::RolloutsCreate, metadata);
        let started = Event::RolloutStarted { rollout_id: rollout.id, digest };
        let reply = rollout.shown();
        Transition::to(rollout, reply, why).audit(audit).event(started).with(follows, None)
    }

    pub(super) fn execute(&self, request: Request, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        let rollout_id = self.id;
        let command = super::CommandName::from(&request);
        match (request, &self.phase) {
            (Request::Create { .. }, _) => Err(Rejection::Exists),
            (Request::Pause { reason }, Phase::Running) => {
                let event = Event::RolloutPaused { rollout_id };
                Ok(self.ordered(Phase::Paused, AuditAction::RolloutsPause, Some(event), &reason, ctx))
            }
            (Request::Resume { reason }, Phase::Paused | Phase::Stopped { .. }) => {
                let event = Event::RolloutResumed { rollout_id };
                Ok(self.ordered(Phase::Running, AuditAction::RolloutsResume, Some(event), &reason, ctx))
            }
            (Request::Abort { reason }, Phase::Running | Phase::Paused | Phase::Stopped { .. }) => {
                Ok(self.ordered(Phase::Aborting, AuditAction::RolloutsAbort, None, &reason, ctx))
            }
            // What is wanted is the case.
            (Request::Pause { .. }, Phase::Paused)
            | (Request::Resume { .. }, Phase::Running)
            | (Request::Abort { .. }, Phase::Aborting | Phase::Aborted) => Ok(Transition::stay(self.shown())),
            (Request::Pause { .. }, Phase::Stopped { .. } | Phase::Aborting | Phase::Aborted | Phase::Completed)
            | (Request::Resume { .. }, Phase::Aborting | Phase::Aborted | Phase::Completed)
            | (Request::Abort { .. }, Phase::Completed) => {
                Err(Rejection::WrongState { state: PhaseName::from(&self.phase), command })
            }
        }
    }

    /// Another phase by an administrator.
    fn ordered(
        &self,
        phase: Phase,
        action: AuditAction,
        event: Option<Event>,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let mut next = self.clone();
        next.enter(phase, ctx);
        let events = event.into_iter().chain(next.advance(ctx)).collect::<Vec<_>>();
        let audit = self.audit(action, json!({ "reason": reason }));
        let reply = next.shown();
        Transition::to(next, reply, reason).with(events, [audit])
    }
}
