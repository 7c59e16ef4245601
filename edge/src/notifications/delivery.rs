//! Delivery of notifications to external addresses, one attempt at a time. The endpoint's state machine decides on retries and on giving
//! up.

pub mod email;
pub mod outbound_webhook;

use crate::outbound::http_client::one_line;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chrono::{DateTime, Utc};
use domain::notification_endpoint::{DeliveryFailure, NotificationEndpoint, QueuedNotification, Target};
use email::{Mail, Mailer};
use outbound_webhook::{SignedWebhook, Webhooks};
use persistence::envelope_encryption::{EnvelopeError, KeyRing};
use persistence::key_rewrap::webhook_secret_context;
use secrecy::{ExposeSecret as _, SecretSlice};
use std::sync::Arc;
use thiserror::Error;
use uuid::Uuid;

/// An attempt to deliver a notification that failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{why}")]
pub struct SendFailure {
    /// A retry would fail in the same way.
    pub is_final: bool,
    /// For the endpoint's owner: one line without credentials.
    pub why: String,
}

impl From<SendFailure> for DeliveryFailure {
    fn from(undelivered: SendFailure) -> Self {
        let SendFailure { is_final, why } = undelivered;
        Self { why, is_final, is_gone: false, retry_after_seconds: None }
    }
}

/// Delivers to endpoints of every kind. Cheap to clone.
#[derive(Clone)]
pub struct NotificationSender {
    pub webhooks: Webhooks,
    /// `None` where no mail server is configured.
    pub mailer: Option<Mailer>,
    /// Opens the secrets that sign webhooks.
    pub at_rest: Arc<KeyRing>,
}

impl NotificationSender {
    /// Makes one attempt at a message.
    ///
    /// # Errors
    /// [`DeliveryFailure`], as the endpoint's owner reads it.
    pub async fn attempt(
        &self,
        endpoint: &NotificationEndpoint,
        message: &QueuedNotification,
        now: DateTime<Utc>,
    ) -> Result<(), DeliveryFailure> {
        match &endpoint.target {
            Target::Webhook { url } => {
                let secrets =
                    self.secrets(endpoint, now).map_err(|_| SendFailure::temporary("its secret cannot be read"))?;
                let signed = SignedWebhook { id: message.id, body: &message.body, secrets: &secrets };
                self.webhooks.send(url, &signed, now).await
            }
            Target::Email { address } => {
                let Some(mailer) = &self.mailer else {
                    return Err(SendFailure::temporary("no mail server is configured").into());
                };
                let (message_id, endpoint_id) = (message.id.to_string(), endpoint.id.to_string());
                let mail = Mail { message_id: &message_id, endpoint_id: &endpoint_id, body: &message.body };
                Ok(mailer.send(address, &mail).await?)
            }
        }
    }

    /// A secret as an endpoint stores it.
    ///
    /// # Errors
    /// [`EnvelopeError`]
    pub fn seal(&self, endpoint: Uuid, secret: &SecretSlice<u8>) -> Result<String, EnvelopeError> {
        let row = endpoint.to_string();
        Ok(STANDARD.encode(self.at_rest.seal(&webhook_secret_context(&row), secret.expose_secret())?))
    }

    /// The secrets that sign the endpoint's messages, the newest first.
    ///
    /// # Errors
    /// [`EnvelopeError`]
    pub fn secrets(
        &self,
        endpoint: &NotificationEndpoint,
        now: DateTime<Utc>,
    ) -> Result<Vec<SecretSlice<u8>>, EnvelopeError> {
        let row = endpoint.id.to_string();
        let open = |sealed: &str| {
            let sealed = STANDARD.decode(sealed).map_err(|_| EnvelopeError::Refused)?;
            self.at_rest.open(&webhook_secret_context(&row), &sealed)
        };
        endpoint.secrets(now).map(open).collect()
    }
}

impl SendFailure {
    /// Characters of a reason.
    pub const LONGEST: usize = 300;

    /// A permanent failure: a retry would fail in the same way.
    #[must_use]
    pub fn permanent(why: &str) -> Self {
        Self { is_final: true, why: one_line(why, Self::LONGEST) }
    }

    /// A failure that may be over at the next attempt.
    #[must_use]
    pub fn temporary(why: &str) -> Self {
        Self { is_final: false, why: one_line(why, Self::LONGEST) }
    }
}
