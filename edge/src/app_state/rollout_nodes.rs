//! The nodes of a rollout, read in pages in the order of their creation.

use domain::node::{Node, PhaseName};
use domain::rollout::{FeedPosition, NodeSelector, NodesPage, PAGE, RolloutCandidate};
use domain::{EntityKind, NodeId, PackageDigest, Timestamp};
use persistence::queries::{Cursor, EntityRow, ListFilter};
use persistence::{Reads, StoreError};
use uuid::Uuid;

/// A selector, and the version that decides which nodes need no update.
#[derive(Clone, Copy, Debug)]
pub struct RolloutScope<'a> {
    pub selector: &'a NodeSelector,
    pub digest: &'a PackageDigest,
    /// Also nodes that a fault holds in quarantine.
    pub includes_held: bool,
    /// Nodes that were registered later are no part of it.
    pub created_at: Timestamp,
}

/// The states of nodes that a selector without ids matches: removed nodes remain in the store for ever.
const SELECTED: [PhaseName; 8] = [
    PhaseName::Registered,
    PhaseName::BootstrapIssued,
    PhaseName::Enrolling,
    PhaseName::Active,
    PhaseName::Offline,
    PhaseName::Draining,
    PhaseName::Quarantined,
    PhaseName::Retired,
];

impl RolloutScope<'_> {
    /// The page after this place. It may be empty and not the last.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn page(&self, reads: &Reads, after: Option<FeedPosition>) -> Result<NodesPage, StoreError> {
        let (rows, is_last) = match &self.selector.node_ids {
            Some(ids) => {
                let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
                let mut rows = reads.entities(EntityKind::Node, &ids).await?;
                rows.sort_by_key(position);
                rows.retain(|row| after.is_none_or(|after| position(row) > after));
                let is_last = rows.len() <= PAGE;
                rows.truncate(PAGE);
                (rows.into_iter().map(|row| (position(&row), Some(row))).collect::<Vec<_>>(), is_last)
            }
            None => {
                let filter = ListFilter {
                    states: SELECTED.map(|state| state.to_string()).into(),
                    sku: self.selector.sku_id.map(|id| id.0),
                    ..ListFilter::default()
                };
                let after = after.map(|after| Cursor { created_at: after.created_at, id: after.node_id.0 });
                let limit = u32::try_from(PAGE).unwrap_or(u32::MAX);
                let found = reads.list(EntityKind::Node, &filter, after, limit).await?;
                let placed = found.items.into_iter().map(|listed| {
                    let node_id = NodeId(listed.entity.id);
                    (FeedPosition { created_at: listed.created_at, node_id }, listed.row.ok())
                });
                (placed.collect(), found.next.is_none())
            }
        };
        let is_last = is_last || rows.iter().any(|(at, _)| at.created_at > self.created_at);
        let next = if is_last { None } else { rows.last().map(|(at, _)| *at) };
        let wanted = rows.iter().filter(|(at, _)| at.created_at <= self.created_at);
        // One whose seal does not hold is left out as one that cannot be decoded.
        let nodes = wanted.filter_map(|(_, row)| self.candidate(row.as_ref()?));
        Ok(NodesPage { after, nodes: nodes.collect(), next })
    }

    /// `None` where the node does not match, or cannot be read: its owner has parked it.
    fn candidate(&self, row: &EntityRow) -> Option<RolloutCandidate> {
        let node: Node = serde_json::from_str(&row.body)
            .inspect_err(|error| {
                tracing::warn!(entity.id = %row.entity.id, %error, "an unreadable node is left out of a rollout");
            })
            .ok()?;
        let is_sku = self.selector.sku_id.is_none_or(|sku_id| sku_id == node.machine.registration.sku.sku_id);
        let is_region =
            self.selector.region_code.as_ref().is_none_or(|code| *code == node.machine.registration.region_code);
        let skip = || node.rollout_skip(self.digest, self.includes_held);
        (is_sku && is_region).then(|| RolloutCandidate { node_id: node.id, skip: skip() })
    }
}

const fn position(row: &EntityRow) -> FeedPosition {
    FeedPosition { created_at: row.created_at, node_id: NodeId(row.entity.id) }
}
