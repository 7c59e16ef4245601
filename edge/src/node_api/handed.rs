//! Which orders were handed out lately, so that a task which is being executed is not handed out again and again, and that one
//! whose answer was lost is.
//!
//! This memory is one replica's and may be lost at any time: an agent knows from its journal what it has begun.

use dashmap::DashMap;
use domain::node::Order;
use domain::{NodeId, TaskId};
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// After so long without a result, an order is handed out again to the same session.
const AGAIN_TO_THE_SAME: Duration = Duration::from_secs(15);
/// Another session of the node is another life of its agent, or a connection after a lost answer: it gets the order at once, but
/// two sessions that take turns do not spin.
const AGAIN_TO_ANOTHER: Duration = Duration::from_secs(1);
const SWEEP_EVERY: Duration = Duration::from_secs(60);

/// One life of an agent, as far as it can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Session {
    /// As the agent names itself.
    Process(Uuid),
    /// The connection's other end: a new process has a new one.
    Connection(SocketAddr),
}

/// What becomes of a wait, given the orders that there are.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next<'a> {
    /// It ends with this one; `again`: it was handed out here before.
    Hand {
        order: &'a Order,
        again: bool,
    },
    /// All are handed out; one of them is due again then.
    Later(Instant),
    Nothing,
}

/// By node: orders that were handed out and that it has not reported on.
pub(super) struct Handed {
    by_node: DashMap<NodeId, Vec<Entry>>,
    swept_at: Mutex<Instant>,
}

#[derive(Clone, Copy)]
struct Entry {
    task: (TaskId, u32),
    session: Session,
    at: Instant,
}

impl Entry {
    fn again_at(&self, session: Session) -> Instant {
        self.at + if self.session == session { AGAIN_TO_THE_SAME } else { AGAIN_TO_ANOTHER }
    }
}

impl Default for Handed {
    fn default() -> Self {
        Self { by_node: DashMap::new(), swept_at: Mutex::new(Instant::now()) }
    }
}

impl Handed {
    /// Takes the first order that is due for `session` out of `orders`, which are all that the node has.
    pub(super) fn next<'a>(&self, node: NodeId, session: Session, orders: &'a [Order], now: Instant) -> Next<'a> {
        self.sweep(now);
        if orders.is_empty() {
            self.by_node.remove(&node);
            return Next::Nothing;
        }
        let mut entries = self.by_node.entry(node).or_default();
        entries.retain(|entry| orders.iter().any(|order| task_of(order) == entry.task));
        let mut later = None::<Instant>;
        for order in orders {
            let task = task_of(order);
            match entries.iter_mut().find(|entry| entry.task == task) {
                None => {
                    entries.push(Entry { task, session, at: now });
                    return Next::Hand { order, again: false };
                }
                Some(entry) if now >= entry.again_at(session) => {
                    *entry = Entry { task, session, at: now };
                    return Next::Hand { order, again: true };
                }
                Some(entry) => {
                    let again_at = entry.again_at(session);
                    later = Some(later.map_or(again_at, |earliest| earliest.min(again_at)));
                }
            }
        }
        later.map_or(Next::Nothing, Next::Later)
    }

    /// Forgets nodes that do not come back here. An entry that is older than the longest pause decides nothing.
    fn sweep(&self, now: Instant) {
        let Ok(mut swept_at) = self.swept_at.try_lock() else { return };
        if now.saturating_duration_since(*swept_at) < SWEEP_EVERY {
            return;
        }
        *swept_at = now;
        self.by_node.retain(|_, entries| {
            entries.retain(|entry| now.saturating_duration_since(entry.at) < AGAIN_TO_THE_SAME);
            !entries.is_empty()
        });
    }
}

const fn task_of(order: &Order) -> (TaskId, u32) {
    (order.work.task_id, order.work.attempt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::allocation::Placed;
    use domain::node::{Place, What, Work};
    use domain::{AllocationId, Timestamp};

    const NODE: NodeId = NodeId(Uuid::from_u128(1));
    const ONE: Session = Session::Process(Uuid::from_u128(1));
    const OTHER: Session = Session::Process(Uuid::from_u128(2));

    fn order(task: u128, attempt: u32) -> Order {
        let at = Timestamp::UNIX_EPOCH;
        Order {
            work: Work {
                task_id: TaskId(Uuid::from_u128(task)),
                attempt,
                ordered_at: at,
                deadline_at: at,
                origin: None,
            },
            what: What::Release {
                place: Place {
                    allocation_id: AllocationId(Uuid::from_u128(task)),
                    placed: Placed {
                        devices: Vec::new(),
                        host: String::new(),
                        port: 22,
                        user_name: String::new(),
                        region_code: String::new(),
                        host_fingerprint: None,
                    },
                    sku: String::new(),
                },
            },
        }
    }

    const fn handed_over(order: &Order) -> Next<'_> {
        Next::Hand { order, again: false }
    }

    const fn handed_again(order: &Order) -> Next<'_> {
        Next::Hand { order, again: true }
    }

    #[test]
    fn an_order_is_handed_out_once_and_again_when_no_result_came() {
        let (handed, now, orders) = (Handed::default(), Instant::now(), [order(1, 1)]);
        let due = now + AGAIN_TO_THE_SAME;
        assert_eq!(handed.next(NODE, ONE, &orders, now), handed_over(&orders[0]));
        assert_eq!(handed.next(NODE, ONE, &orders, now), Next::Later(due));
        assert_eq!(handed.next(NODE, ONE, &orders, due), handed_again(&orders[0]));
        assert_eq!(handed.next(NODE, ONE, &orders, due), Next::Later(due + AGAIN_TO_THE_SAME));
    }

    #[test]
    fn a_new_attempt_and_another_task_do_not_wait_for_the_one_that_runs() {
        let (handed, now) = (Handed::default(), Instant::now());
        let orders = [order(1, 1), order(2, 1)];
        assert_eq!(handed.next(NODE, ONE, &orders, now), handed_over(&orders[0]));
        assert_eq!(handed.next(NODE, ONE, &orders, now), handed_over(&orders[1]));
        let again = [order(1, 2), order(2, 1)];
        assert_eq!(handed.next(NODE, ONE, &again, now), handed_over(&again[0]));
    }

    #[test]
    fn a_new_life_of_the_agent_gets_the_order_at_once_but_two_of_them_do_not_spin() {
        let (handed, now, orders) = (Handed::default(), Instant::now(), [order(1, 1)]);
        assert_eq!(handed.next(NODE, ONE, &orders, now), handed_over(&orders[0]));
        let soon = now + AGAIN_TO_ANOTHER;
        assert_eq!(handed.next(NODE, OTHER, &orders, now), Next::Later(soon));
        assert_eq!(handed.next(NODE, OTHER, &orders, soon), handed_again(&orders[0]));
    }

    #[test]
    fn what_is_done_or_of_nodes_that_went_elsewhere_is_forgotten() {
        let (handed, now, orders) = (Handed::default(), Instant::now(), [order(1, 1)]);
        handed.next(NODE, ONE, &orders, now);
        assert_eq!(handed.next(NODE, ONE, &[], now), Next::Nothing);
        assert!(handed.by_node.is_empty());
        for n in 0..100 {
            handed.next(NodeId(Uuid::from_u128(n)), ONE, &orders, now);
        }
        handed.next(NODE, ONE, &[], now + SWEEP_EVERY);
        assert!(handed.by_node.is_empty());
    }
}
