//! What its owner, or an operator, asks of a notification endpoint.

use super::{EndpointChange, NotificationEndpoint, Rejection, Target};
use crate::account_holder::Holder;
use crate::authz::Action;
use crate::state_machine::{self, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use uuid::Uuid;

/// What its owner, or an operator, asks of a notification endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Request {
    Create {
        holder: Holder,
        target: Target,
        secret_enc: Option<String>,
        events: Option<BTreeSet<String>>,
        place: u16,
    },
    Change {
        change: EndpointChange,
    },
    RotateSecret {
        secret_enc: String,
    },
    Delete,
    /// A test by its owner.
    Test {
        body: String,
    },
    /// Resends dead letters: one, or all.
    Resend {
        message_id: Option<Uuid>,
        reason: Option<String>,
    },
    /// Dismisses dead letters: one, or all.
    Dismiss {
        message_id: Option<Uuid>,
        reason: Option<String>,
    },
}

impl state_machine::Request for Request {
    fn action(&self) -> Action {
        match self {
            Self::Create { .. }
            | Self::Change { .. }
            | Self::RotateSecret { .. }
            | Self::Delete
            | Self::Test { .. }
            | Self::Resend { .. }
            | Self::Dismiss { .. } => Action::KeepNotificationEndpoints,
        }
    }

    fn creates(&self) -> bool {
        matches!(self, Self::Create { .. })
    }
}

impl NotificationEndpoint {
    pub(super) fn execute(&self, request: Request, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        if matches!(request, Request::Create { .. }) && !self.exists() {
            return Err(Rejection::Exists);
        }
        // False of a deleted endpoint.
        if !self.is_for(ctx.by) {
            return Err(Rejection::NotFound);
        }
        match request {
            Request::Create { .. } => Err(Rejection::Exists),
            Request::Change { change } => self.changed(change, ctx),
            Request::RotateSecret { secret_enc } => self.secret_rotated(secret_enc, ctx),
            Request::Delete => Ok(self.deleted(ctx)),
            Request::Test { body } => self.tested(body, ctx),
            Request::Resend { message_id, reason } => self.resent(message_id, reason.as_deref(), ctx),
            Request::Dismiss { message_id, reason } => self.dismissed(message_id, reason.as_deref(), ctx),
        }
    }
}
