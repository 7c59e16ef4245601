//! A rate limit per node, for the requests of agents with a certificate: each process has its own.

use super::limited;
use crate::http::error::ApiError;
use actors::rate_cells::RateCells;
use domain::policy::{PolicyBook, PolicyKey, Scopes};
use domain::{NodeId, Timestamp};
use std::time::Instant;

/// Nodes with a cell of their own, about 5 MB; the others share one.
const MAX_NODES: usize = 65_536;

/// The rate cells of the nodes for one policy.
#[derive(Debug)]
pub struct NodeLimit {
    key: PolicyKey,
    cells: RateCells,
}

impl NodeLimit {
    /// `key` is the policy of how many requests a minute one node may make.
    #[must_use]
    pub fn of(key: PolicyKey) -> Self {
        Self { key, cells: RateCells::with_capacity(MAX_NODES) }
    }

    /// Admits one request of the node, whose certificate was verified before.
    ///
    /// # Errors
    /// `rate_limited` where the node is over the rate of the policy.
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
