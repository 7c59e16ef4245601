//! Those who wait for something to happen to an entity: agents for work of their node, ends of a terminal for the session's end. One
//! who waits is no actor: it is one entry here, woken by the effect of a commit.

use dashmap::DashMap;
use domain::NodeId;
use std::hash::Hash;
use std::sync::Arc;
use tokio::sync::Notify;

/// What is parked in this process, by what it waits for.
pub struct Polls<K: Eq + Hash = NodeId>(Arc<DashMap<K, Parked>>);

impl<K: Eq + Hash> Clone for Polls<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K: Eq + Hash> Default for Polls<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

struct Parked {
    wake: Arc<Notify>,
    polls: usize,
}

/// One parked poll; it leaves when it is dropped.
pub struct Poll<K: Eq + Hash = NodeId> {
    node: K,
    wake: Arc<Notify>,
    polls: Polls<K>,
}

impl<K: Eq + Hash + Copy> Polls<K> {
    /// Parks a poll. To be done before the node is asked for work, so that work which comes in between is not missed.
    #[must_use]
    pub fn park(&self, node: K) -> Poll<K> {
        let mut parked = self.0.entry(node).or_insert_with(|| Parked { wake: Arc::default(), polls: 0 });
        parked.polls += 1;
        Poll { node, wake: Arc::clone(&parked.wake), polls: self.clone() }
    }

    /// Wakes the polls of `node`, if any are parked here.
    pub fn wake(&self, node: K) {
        if let Some(parked) = self.0.get(&node) {
            parked.wake.notify_waiters();
        }
    }

    /// Wakes all of them: what concerns them all has changed.
    pub fn wake_all(&self) {
        for parked in self.0.iter() {
            parked.wake.notify_waiters();
        }
    }

    /// How many nodes have a poll parked here.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.0.len()
    }
}

impl<K: Eq + Hash> Poll<K> {
    /// Completes at the next wake after this call; create it before asking the node, await it after.
    pub fn woken(&self) -> tokio::sync::futures::Notified<'_> {
        self.wake.notified()
    }
}

impl<K: Eq + Hash> Drop for Poll<K> {
    fn drop(&mut self) {
        let last = |parked: &mut Parked| {
            parked.polls -= 1;
            parked.polls == 0
        };
        self.polls.0.remove_if_mut(&self.node, |_, parked| last(parked));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn a_wake_reaches_every_poll_of_the_node_and_no_other() {
        let (polls, node, other) =
            (Polls::<NodeId>::default(), NodeId(uuid::Uuid::from_u128(1)), NodeId(uuid::Uuid::from_u128(2)));
        let (first, second, elsewhere) = (polls.park(node), polls.park(node), polls.park(other));
        let mut waits = [Box::pin(first.woken()), Box::pin(second.woken()), Box::pin(elsewhere.woken())];
        for wait in &mut waits {
            wait.as_mut().enable();
        }
        polls.wake(node);
        let [first, second, elsewhere] = waits;
        first.await;
        second.await;
        assert!(tokio::time::timeout(Duration::from_millis(20), elsewhere).await.is_err());
    }

    #[test]
    fn the_entry_goes_with_the_last_poll() {
        let (polls, node) = (Polls::<NodeId>::default(), NodeId(uuid::Uuid::from_u128(1)));
        let (first, second) = (polls.park(node), polls.park(node));
        drop(first);
        assert_eq!(polls.nodes(), 1);
        drop(second);
        assert_eq!(polls.nodes(), 0);
    }
}
