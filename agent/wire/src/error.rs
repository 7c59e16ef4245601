//! The error envelope of every refused request.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// `{"code","message","correlation_id","details"}`, as the specification's section "Errors" has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorEnvelope {
    /// Machine-readable code, such as `state_conflict`.
    pub code: String,
    /// For a person; names the next step.
    pub message: String,
    /// Ties the answer to the log lines of the replica that served it.
    pub correlation_id: String,
    /// At least `service`; further keys depend on the code.
    #[serde(default)]
    pub details: Map<String, Value>,
}

impl ErrorEnvelope {
    /// The finer cause in `details.reason`, where the code has one.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        self.details.get("reason").and_then(Value::as_str)
    }
}

/// `code` of a request whose client certificate does not speak for the node; [`ErrorEnvelope::reason`] is one of [`reason`].
pub const INVALID_NODE_IDENTITY: &str = "invalid_node_identity";

/// In `details` beside [`reason::CERTIFICATE_UNKNOWN`]: `true` where the node's state lacks the certificate, so that a recovery replaces it although
/// its authority is trusted. Absent where a proxy in front did not verify it, and from control planes of earlier releases.
pub const RECOVERABLE: &str = "recoverable";

/// Values of `details.reason` beside [`INVALID_NODE_IDENTITY`].
pub mod reason {
    /// The connection carried no client certificate.
    pub const CERTIFICATE_MISSING: &str = "certificate_missing";
    /// The certificate was not issued by the control plane for the node's current identity.
    pub const CERTIFICATE_UNKNOWN: &str = "certificate_unknown";
    /// The certificate has expired.
    pub const CERTIFICATE_EXPIRED: &str = "certificate_expired";
    /// The node gets no tasks until an operator ends its failed release.
    pub const NODE_FENCED: &str = "node_fenced";
    /// The node was removed from the inventory permanently.
    pub const NODE_REMOVED: &str = "node_removed";
}
