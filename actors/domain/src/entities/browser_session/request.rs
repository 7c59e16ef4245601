//! What people ask of a browser session.

use super::{BrowserSession, EndReason, Place, Rejection, SecretDigest};
use crate::authz::Action;
use crate::state_machine::{self, Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};

/// What people ask of a browser session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Request {
    /// The caller has logged in.
    Open(Box<Opening>),
    EndByUser,
    EndByAdministrator {
        reason: String,
    },
}

/// A login that the identity provider has confirmed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    pub secret_sha256: SecretDigest,
    pub subject: String,
    pub provider_session: Option<String>,
    pub authenticated_at: Timestamp,
    pub place: Place,
    pub tokens_enc: String,
    pub token_ends_at: Timestamp,
}

impl state_machine::Request for Request {
    fn action(&self) -> Action {
        match self {
            Self::Open(_) | Self::EndByUser => Action::KeepBrowserSessions,
            Self::EndByAdministrator { .. } => Action::OperateBrowserSessions,
        }
    }

    fn creates(&self) -> bool {
        matches!(self, Self::Open(_))
    }
}

impl BrowserSession {
    pub(super) fn execute(&self, request: Request, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match request {
            Request::Open(_) => Err(Rejection::Exists),
            Request::EndByUser if !ctx.by.is_user(&self.owner.user_id) => Err(Rejection::NotFound),
            Request::EndByUser => Ok(self.end(EndReason::EndedByUser, ctx)),
            Request::EndByAdministrator { reason } => Ok(self.end(EndReason::EndedByAdministrator { reason }, ctx)),
        }
    }
}
