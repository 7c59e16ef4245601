//! A limit per node, for what agents ask with their certificate: each process has its own.

use super::limited;
use crate::error::ApiError;
use actors::cells::Cells;
use domain::policy::{Key, PolicyBook, Scopes};
use domain::{NodeId, Timestamp};
use std::time::Instant;

/// Nodes that are remembered, about 5 MB; the others share one quota.
const NODES: usize = 65_536;

/// What each node has used up of one policy's quota.
#[derive(Debug)]
pub struct NodeLimit {
    key: Key,
    cells: Cells,
}

impl NodeLimit {
    /// `key` says how many requests a minute one node may make.
    #[must_use]
    pub fn of(key: Key) -> Self {
        Self { key, cells: Cells::remembering(NODES) }
    }

    /// Lets one request of the node in, whose certificate was verified before.
    ///
    /// # Errors
    /// `rate_limited` where the node has had as many as the policy says.
    pub fn admit(&self, node_id: NodeId, policy: &PolicyBook, now: Timestamp) -> Result<(), ApiError> {
        let limit = u32::try_from(policy.int(self.key, &Scopes::global(), now)).unwrap_or(1);
        let verdict = self.cells.take_or_share(node_id.0, limit, Instant::now());
        if verdict.admitted {
            return Ok(());
        }
        let message = format!(
            "This node has sent too many requests: {limit} a minute are the most here; go on after Retry-After."
        );
        Err(limited(message, self.key, limit, verdict.retry_after))
    }
}
