//! The messages that feed the indexes of free GPUs, and how a missing one is noticed.

use domain::placement::NodeCapacity;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use uuid::Uuid;

/// Nodes in one message at most: a node with sixty-four tenants takes 3 KiB, and NATS accepts 1 MiB.
pub(super) const MAX_NODES: usize = 128;

/// Feeds whose position is known at most. A feed begins with each start of its publisher.
const MAX_FEEDS: usize = 1024;

/// What commits have made of some nodes.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct CapacityMessage {
    /// The publisher's, since its start.
    pub(super) feed: Uuid,
    /// The first message of a feed has number 1.
    pub(super) sequence: u64,
    pub(super) nodes: Vec<CommittedCapacity>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct CommittedCapacity {
    pub(super) version: i64,
    pub(super) capacity: NodeCapacity,
}

/// The last message of each feed.
#[derive(Default)]
pub(super) struct FeedPositions {
    last: BTreeMap<Uuid, u64>,
}

impl FeedPositions {
    /// Whether messages are missing before this one. A late or repeated message says nothing: the gap was seen before.
    pub(super) fn is_gap(&mut self, feed: Uuid, sequence: u64) -> bool {
        let last = self.last.get(&feed).copied().unwrap_or(0);
        if sequence <= last {
            return false;
        }
        if self.last.len() >= MAX_FEEDS && last == 0 {
            // Of the feeds that go on, the next message is a gap, and costs one check.
            self.last.clear();
        }
        self.last.insert(feed, sequence);
        sequence != last + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(n: u128) -> Uuid {
        Uuid::from_u128(n)
    }

    #[test]
    fn missing_message_is_noticed_once_and_late_and_repeated_ones_are_no_gap() {
        let mut positions = FeedPositions::default();
        let gaps = [1, 2, 2, 5, 3, 4, 5, 6, 8].map(|sequence| positions.is_gap(feed(1), sequence));
        assert_eq!(gaps, [false, false, false, true, false, false, false, false, true]);
    }

    #[test]
    fn each_feed_has_numbers_of_its_own_and_one_whose_beginning_was_missed_is_a_gap() {
        let mut positions = FeedPositions::default();
        assert!(!positions.is_gap(feed(1), 1));
        assert!(!positions.is_gap(feed(2), 1), "its publisher has started");
        assert!(positions.is_gap(feed(3), 7));
        assert!(!positions.is_gap(feed(3), 8));
    }

    #[test]
    fn memory_is_bounded_however_often_publishers_start() {
        let mut positions = FeedPositions::default();
        for n in 0..10 * MAX_FEEDS {
            assert!(!positions.is_gap(feed(n as u128), 1));
            assert!(positions.last.len() <= MAX_FEEDS);
        }
    }
}
