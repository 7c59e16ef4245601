//! The token with which a node's collector pushes logs to the control plane's gateway.

use crate::SecretToken;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

/// The answer to `POST /internal/v1/nodes/{id}/log-token`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LogTokenAnswer {
    /// For `Authorization: Bearer` at the gateway, for this node's logs alone.
    pub token: SecretToken,
    pub expires_at: DateTime<Utc>,
}
