//! What the workers of notifications and the edge report to a notification endpoint.

use super::{DeliveryFailure, NotificationEndpoint, QueuedNotification, RecipientClaims, Reply};
use crate::id::UserId;
use crate::state_machine::{Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// What the workers of notifications and the edge report to a notification endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Fact {
    /// The identity provider has verified this address of the user. Its name between members is that of earlier releases.
    #[serde(rename = "introduce")]
    #[strum(serialize = "introduce")]
    AddressVerified {
        user_id: UserId,
        address: String,
        /// What the token names beside them; `None` from a member of an earlier release.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        claims: Option<RecipientClaims>,
    },
    /// A message for the endpoint was published. Its name between members is that of earlier releases.
    #[serde(rename = "enqueue")]
    #[strum(serialize = "enqueue")]
    NotificationDue { message: QueuedNotification },
    /// The receiver has accepted the message.
    Delivered { message_id: Uuid },
    /// An attempt failed.
    Failed { message_id: Uuid, failure: DeliveryFailure },
}

impl NotificationEndpoint {
    pub(super) fn apply(&self, fact: Fact, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match fact {
            Fact::AddressVerified { address, claims, .. } => self.reintroduced(address, claims),
            Fact::NotificationDue { .. } | Fact::Delivered { .. } | Fact::Failed { .. } if !self.exists() => {
                Transition::stay(Reply::Done)
            }
            Fact::NotificationDue { message } => self.enqueued(message, ctx),
            Fact::Delivered { message_id } => self.delivered(message_id, ctx),
            Fact::Failed { message_id, failure } => self.failed(message_id, failure, ctx),
        }
    }
}
