//! Requests that wait for an event of an entity: agents for tasks of their node, both ends of a terminal for the end of the session. A
//! waiting request is not an actor: it is one entry here, woken by the effect of a commit.

use dashmap::DashMap;
use domain::NodeId;
use std::hash::Hash;
use std::sync::Arc;
use tokio::sync::Notify;

/// The requests that wait in this process, by entity.
pub struct LongPolls<K: Eq + Hash = NodeId>(Arc<DashMap<K, ParkedPolls>>);

impl<K: Eq + Hash> Clone for LongPolls<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K: Eq + Hash> Default for LongPolls<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

struct ParkedPolls {
    wake: Arc<Notify>,
    polls: usize,
}

/// One parked poll; it leaves when it is dropped.
pub struct LongPoll<K: Eq + Hash = NodeId> {
    node: K,
    wake: Arc<Notify>,
    polls: LongPolls<K>,
}

impl<K: Eq + Hash + Copy> LongPolls<K> {
    /// Registers a poll. Register before querying the node for work, so that work which arrives in between is not missed.
    #[must_use]
    pub fn park(&self, node: K) -> LongPoll<K> {
        let mut parked = self.0.entry(node).or_insert_with(|| ParkedPolls { wake: Arc::default(), polls: 0 });
        parked.polls += 1;
        LongPoll { node, wake: Arc::clone(&parked.wake), polls: self.clone() }
    }

    /// Wakes the polls of `node`, if any are parked here.
    pub fn wake(&self, node: K) {
        if let Some(parked) = self.0.get(&node) {
            parked.wake.notify_waiters();
        }
    }

    /// Wakes all polls: a change concerns every node.
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

impl<K: Eq + Hash> LongPoll<K> {
    /// Completes at the next wake after this call; create it before asking the node, await it after.
    pub fn woken(&self) -> tokio::sync::futures::Notified<'_> {
        self.wake.notified()
    }
}

impl<K: Eq + Hash> Drop for LongPoll<K> {
    fn drop(&mut self) {
        let last = |parked: &mut ParkedPolls| {
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
    async fn wake_up_reaches_every_poll_of_the_node_and_no_other() {
        let (polls, node, other) =
            (LongPolls::<NodeId>::default(), NodeId(uuid::Uuid::from_u128(1)), NodeId(uuid::Uuid::from_u128(2)));
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
    fn entry_is_removed_with_the_last_poll() {
        let (polls, node) = (LongPolls::<NodeId>::default(), NodeId(uuid::Uuid::from_u128(1)));
        let (first, second) = (polls.park(node), polls.park(node));
        drop(first);
        assert_eq!(polls.nodes(), 1);
        drop(second);
        assert_eq!(polls.nodes(), 0);
    }
}
