//! The error envelope that every refused request is answered with.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// `{"code","message","correlation_id","details"}`, as the specification's section "Errors" has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Envelope {
    /// Machine-readable code, such as `state_conflict`.
    pub code: String,
    /// For a person; says what to do next.
    pub message: String,
    /// Ties the answer to the log lines of whoever served it.
    pub correlation_id: String,
    /// At least `service`; further keys depend on the code.
    #[serde(default)]
    pub details: Map<String, Value>,
}

impl Envelope {
    /// The finer cause in `details.reason`, where the code has one.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        self.details.get("reason").and_then(Value::as_str)
    }
}

/// `code` of a request whose client certificate does not speak for the node; [`Envelope::reason`] is one of [`reason`].
pub const INVALID_NODE_IDENTITY: &str = "invalid_node_identity";

/// Values of `details.reason` beside [`INVALID_NODE_IDENTITY`].
pub mod reason {
    /// The connection carried no client certificate.
    pub const CERTIFICATE_MISSING: &str = "certificate_missing";
    /// The certificate is not one that the control plane issued for the node's current identity.
    pub const CERTIFICATE_UNKNOWN: &str = "certificate_unknown";
    /// The certificate's validity is over.
    pub const CERTIFICATE_EXPIRED: &str = "certificate_expired";
    /// The node gets no tasks until an operator ends its failed release.
    pub const NODE_FENCED: &str = "node_fenced";
    /// The node has left the inventory for good.
    pub const NODE_REMOVED: &str = "node_removed";
}
