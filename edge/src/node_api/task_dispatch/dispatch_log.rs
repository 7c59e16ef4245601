//! The dispatch log: which tasks were dispatched recently, so that a task that is being executed is not dispatched over and over, and one
//! whose response was lost is dispatched again.
//!
//! This log belongs to one replica and may be lost at any time: an agent knows from its journal what it has begun.

use dashmap::DashMap;
use domain::node::AgentTask;
use domain::{NodeId, TaskId};
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// After this time without a result, a task is dispatched again to the same session.
const RESEND_TO_SAME_SESSION: Duration = Duration::from_secs(15);
/// Another session of the node is a restarted agent, or a connection after a lost response: it gets the task at once, but two sessions that
/// alternate do not spin.
const RESEND_TO_OTHER_SESSION: Duration = Duration::from_secs(1);
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);

/// One process of an agent, as far as it can be identified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AgentSession {
    /// As the agent names itself.
    Process(Uuid),
    /// The connection's other end: a new process has a new one.
    Connection(SocketAddr),
}

/// The outcome of a poll, given the node's tasks.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NextDispatch<'a> {
    /// It ends with this task; `again`: it was dispatched before.
    Task {
        order: &'a AgentTask,
        again: bool,
    },
    /// All are dispatched; one of them is due again then.
    Later(Instant),
    Nothing,
}

/// By node: tasks that were dispatched and have no result yet.
pub(in crate::node_api) struct DispatchLog {
    by_node: DashMap<NodeId, Vec<DispatchEntry>>,
    swept_at: Mutex<Instant>,
}

#[derive(Clone, Copy)]
struct DispatchEntry {
    task: (TaskId, u32),
    session: AgentSession,
    at: Instant,
}

impl DispatchEntry {
    fn due_at(&self, session: AgentSession) -> Instant {
        self.at + if self.session == session { RESEND_TO_SAME_SESSION } else { RESEND_TO_OTHER_SESSION }
    }
}

impl Default for DispatchLog {
    fn default() -> Self {
        Self { by_node: DashMap::new(), swept_at: Mutex::new(Instant::now()) }
    }
}

impl DispatchLog {
    /// Takes the first task that is due for `session` out of `orders`, which are all tasks of the node.
    pub(super) fn next<'a>(
        &self,
        node: NodeId,
        session: AgentSession,
        orders: &'a [AgentTask],
        now: Instant,
    ) -> NextDispatch<'a> {
        self.sweep(now);
        if orders.is_empty() {
            self.by_node.remove(&node);
            return NextDispatch::Nothing;
        }
        let mut entries = self.by_node.entry(node).or_default();
        entries.retain(|entry| orders.iter().any(|order| task_of(order) == entry.task));
        let mut later = None::<Instant>;
        for order in orders {
            let task = task_of(order);
            match entries.iter_mut().find(|entry| entry.task == task) {
                None => {
                    entries.push(DispatchEntry { task, session, at: now });
                    return NextDispatch::Task { order, again: false };
                }
                Some(entry) if now >= entry.due_at(session) => {
                    *entry = DispatchEntry { task, session, at: now };
                    return NextDispatch::Task { order, again: true };
                }
                Some(entry) => {
                    let due_at = entry.due_at(session);
                    later = Some(later.map_or(due_at, |earliest| earliest.min(due_at)));
                }
            }
        }
        later.map_or(NextDispatch::Nothing, NextDispatch::Later)
    }

    /// Removes nodes that poll elsewhere. An entry that is older than the longest pause has no effect.
    fn sweep(&self, now: Instant) {
        let Ok(mut swept_at) = self.swept_at.try_lock() else { return };
        if now.saturating_duration_since(*swept_at) < SWEEP_INTERVAL {
            return;
        }
        *swept_at = now;
        self.by_node.retain(|_, entries| {
            entries.retain(|entry| now.saturating_duration_since(entry.at) < RESEND_TO_SAME_SESSION);
            !entries.is_empty()
        });
    }
}

const fn task_of(order: &AgentTask) -> (TaskId, u32) {
    (order.work.task_id, order.work.attempt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::allocation::Placement;
    use domain::node::{PendingTask, TaskKind, TenantSlot};
    use domain::{AllocationId, Timestamp};

    const NODE: NodeId = NodeId(Uuid::from_u128(1));
    const ONE: AgentSession = AgentSession::Process(Uuid::from_u128(1));
    const OTHER: AgentSession = AgentSession::Process(Uuid::from_u128(2));

    fn order(task: u128, attempt: u32) -> AgentTask {
        let at = Timestamp::UNIX_EPOCH;
        AgentTask {
            work: PendingTask {
                task_id: TaskId(Uuid::from_u128(task)),
                attempt,
                ordered_at: at,
                deadline_at: at,
                origin: None,
            },
            what: TaskKind::Release {
                place: TenantSlot {
                    allocation_id: AllocationId(Uuid::from_u128(task)),
                    placed: Placement {
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

    const fn dispatched(order: &AgentTask) -> NextDispatch<'_> {
        NextDispatch::Task { order, again: false }
    }

    const fn dispatched_again(order: &AgentTask) -> NextDispatch<'_> {
        NextDispatch::Task { order, again: true }
    }

    #[test]
    fn task_is_dispatched_once_and_again_without_a_result() {
        let (log, now, orders) = (DispatchLog::default(), Instant::now(), [order(1, 1)]);
        let due = now + RESEND_TO_SAME_SESSION;
        assert_eq!(log.next(NODE, ONE, &orders, now), dispatched(&orders[0]));
        assert_eq!(log.next(NODE, ONE, &orders, now), NextDispatch::Later(due));
        assert_eq!(log.next(NODE, ONE, &orders, due), dispatched_again(&orders[0]));
        assert_eq!(log.next(NODE, ONE, &orders, due), NextDispatch::Later(due + RESEND_TO_SAME_SESSION));
    }

    #[test]
    fn new_attempt_and_other_tasks_are_dispatched_while_one_runs() {
        let (log, now) = (DispatchLog::default(), Instant::now());
        let orders = [order(1, 1), order(2, 1)];
        assert_eq!(log.next(NODE, ONE, &orders, now), dispatched(&orders[0]));
        assert_eq!(log.next(NODE, ONE, &orders, now), dispatched(&orders[1]));
        let repeated = [order(1, 2), order(2, 1)];
        assert_eq!(log.next(NODE, ONE, &repeated, now), dispatched(&repeated[0]));
    }

    #[test]
    fn restarted_agent_gets_the_task_at_once_but_two_sessions_do_not_spin() {
        let (log, now, orders) = (DispatchLog::default(), Instant::now(), [order(1, 1)]);
        assert_eq!(log.next(NODE, ONE, &orders, now), dispatched(&orders[0]));
        let soon = now + RESEND_TO_OTHER_SESSION;
        assert_eq!(log.next(NODE, OTHER, &orders, now), NextDispatch::Later(soon));
        assert_eq!(log.next(NODE, OTHER, &orders, soon), dispatched_again(&orders[0]));
    }

    #[test]
    fn completed_tasks_and_absent_nodes_are_removed() {
        let (log, now, orders) = (DispatchLog::default(), Instant::now(), [order(1, 1)]);
        log.next(NODE, ONE, &orders, now);
        assert_eq!(log.next(NODE, ONE, &[], now), NextDispatch::Nothing);
        assert!(log.by_node.is_empty());
        for n in 0..100 {
            log.next(NodeId(Uuid::from_u128(n)), ONE, &orders, now);
        }
        log.next(NODE, ONE, &[], now + SWEEP_INTERVAL);
        assert!(log.by_node.is_empty());
    }
}
