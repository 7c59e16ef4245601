//! The nodes that changed and whose free GPUs are not published yet.

use domain::NodeId;
use std::collections::BTreeSet;
use std::mem;
use std::sync::{Mutex, PoisonError};
use tokio::sync::Notify;

/// Nodes that wait at most.
const MAX_WAITING: usize = 65_536;

/// What changed since it was taken last: each node once.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ChangedNodeSet {
    pub nodes: BTreeSet<NodeId>,
    /// More changed than may wait: some are missing.
    pub is_incomplete: bool,
}

/// Collects nodes until they are taken.
#[derive(Default)]
pub struct ChangedNodes {
    collected: Mutex<ChangedNodeSet>,
    noted: Notify,
}

impl ChangedNodes {
    pub(crate) fn note(&self, node: NodeId) {
        let mut collected = self.collected.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = collected.nodes.is_empty();
        if collected.nodes.len() < MAX_WAITING {
            collected.nodes.insert(node);
        } else if !collected.nodes.contains(&node) {
            collected.is_incomplete = true;
        }
        drop(collected);
        if is_first {
            self.noted.notify_one();
        }
    }

    /// Waits for a change, and takes those that were noted. To be called by one reader.
    pub async fn next(&self) -> ChangedNodeSet {
        loop {
            let changes = mem::take(&mut *self.collected.lock().unwrap_or_else(PoisonError::into_inner));
            if !changes.nodes.is_empty() {
                return changes;
            }
            self.noted.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;
    use uuid::Uuid;

    fn node(n: usize) -> NodeId {
        NodeId(Uuid::from_u128(n as u128))
    }

    #[tokio::test]
    async fn node_that_changes_twice_is_taken_once() {
        let changed = ChangedNodes::default();
        for n in [1, 2, 1] {
            changed.note(node(n));
        }
        let expected = ChangedNodeSet { nodes: [node(1), node(2)].into(), is_incomplete: false };
        assert_eq!(changed.next().await, expected);
        assert!(changed.next().now_or_never().is_none(), "nothing changed since");
        changed.note(node(1));
        assert_eq!(changed.next().await.nodes, [node(1)].into());
    }

    #[tokio::test]
    async fn memory_is_bounded_and_the_reader_learns_that_nodes_are_missing() {
        let changed = ChangedNodes::default();
        for n in 0..=MAX_WAITING {
            changed.note(node(n));
        }
        let changes = changed.next().await;
        assert_eq!((changes.nodes.len(), changes.is_incomplete), (MAX_WAITING, true));
        changed.note(node(7));
        assert!(!changed.next().await.is_incomplete);
    }
}
