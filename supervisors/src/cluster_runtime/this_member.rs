//! The runtime state of this process.

use super::{MemberRuntime, OperatorView, RuntimeReply, RuntimeRequest};
use crate::metrics::{ProcessSample, pool_connections};
use crate::supervisor::{WorkerQueue, WorkerRow};
use actors::entity_host::{ActivationStatus, HostedEntity, HostedShard};
use chrono::Utc;
use domain::Shard;
use edge::app_state::runtime_interface::{
    MemberNode, QueueNode, ShardNode, ShardState, Stats, StatsCommitter, StatsEntities, StatsMember, StatsPool,
    WorkerNode, WorkerState,
};
use persistence::committer::LaneStatus;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use uuid::Uuid;

/// The pause before a worker is restarted: it may be the one that carries the answer.
const RESTART_DELAY: Duration = Duration::from_millis(100);

impl OperatorView {
    pub(super) fn reply_to(&self, request: &RuntimeRequest) -> RuntimeReply {
        match request {
            RuntimeRequest::Part { ids, shards } => RuntimeReply::Part(Box::new(self.member_runtime(ids, *shards))),
            RuntimeRequest::Restart { entity } => RuntimeReply::Restarted(self.host.restart(*entity)),
            RuntimeRequest::RestartWorker { member, worker } => {
                RuntimeReply::Restarted(*member == self.view.me.id && self.restart_soon(worker))
            }
            RuntimeRequest::Fleet { part, parts } => RuntimeReply::Fleet(self.fleet.summaries(*part, *parts)),
            RuntimeRequest::NodeLoad { node_id } => RuntimeReply::NodeLoad(self.fleet.sample(*node_id)),
        }
    }

    /// `false` where there is no such worker.
    fn restart_soon(&self, worker: &str) -> bool {
        let there = self.supervisor.rows().iter().any(|row| row.spec.name == worker && row.restartable);
        if there {
            let (supervisor, worker) = (self.supervisor.clone(), worker.to_owned());
            tokio::spawn(async move {
                tokio::time::sleep(RESTART_DELAY).await;
                // The worker is gone by now only where the process is shutting down.
                let _ = supervisor.restart(&worker);
            });
        }
        there
    }

    fn member_runtime(&self, ids: &[Uuid], with_shards: bool) -> MemberRuntime {
        let wanted: BTreeSet<_> = ids.iter().collect();
        let all = self.host.entities();
        let shards = self.host.shards();
        let is_awake = |row: &&HostedEntity| row.status == ActivationStatus::Awake;
        let mut awake: BTreeMap<Shard, u64> = BTreeMap::new();
        for row in all.iter().filter(is_awake) {
            *awake.entry(row.shard).or_default() += 1;
        }
        let shown = |shard: &HostedShard| shard_node(shard, awake.get(&shard.shard).copied().unwrap_or(0));
        let node = MemberNode {
            id: self.view.me.id.0,
            name: self.view.me.name.clone(),
            started_at: self.view.me.started_at,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            workers: self.workers(),
            shards: shards.len() as u64,
            owned_shards: if with_shards { shards.iter().map(shown).collect() } else { Vec::new() },
            awake: awake.values().sum(),
            mailbox_depth: shards.iter().map(|shard| shard.mailbox_depth as u64).sum(),
            key_sets: self.keys.load().versions(),
            seals_with: self.seals_with.clone(),
            clock_offset_ms: self.view.clock.offset().map(|offset| offset.ahead.num_milliseconds()),
        };
        let shown = |row: &HostedEntity| row.status != ActivationStatus::Awake || wanted.contains(&row.id);
        MemberRuntime { node, entities: all.into_iter().filter(shown).collect() }
    }

    fn workers(&self) -> Vec<WorkerNode> {
        let lanes = self.committer.workers();
        let node = |WorkerRow { spec, state, since, restarts, last_error, restartable }: WorkerRow| {
            let shown = WorkerNode {
                name: spec.name.to_owned(),
                under: spec.parent.to_owned(),
                what: spec.description.to_owned(),
                state,
                since,
                restarts,
                last_error,
                restartable,
                queue: self.queue(spec.queue),
            };
            match spec.queue {
                WorkerQueue::CommitterLane(number) => match lanes.get(number) {
                    Some(lane) => with_lane_status(shown, lane),
                    None => shown,
                },
                WorkerQueue::Hidden | WorkerQueue::Committed | WorkerQueue::Consumer(_) => shown,
            }
        };
        self.supervisor.rows().into_iter().map(node).collect()
    }

    /// The queue of a worker: committed events for the relay, and for a consumer its lag at the last read.
    fn queue(&self, of: WorkerQueue) -> Option<QueueNode> {
        match of {
            WorkerQueue::Hidden | WorkerQueue::CommitterLane(_) => None,
            WorkerQueue::Committed => {
                let bound = self.committed.max_capacity();
                Some(queue(bound - self.committed.capacity(), bound))
            }
            WorkerQueue::Consumer(stream) => {
                let lag = self.metrics.consumer_lag(stream)?;
                Some(QueueNode { waiting: lag.waiting, under_way: lag.in_flight, bound: None })
            }
        }
    }

    pub(super) fn sample(&self) -> ProcessSample {
        let (pool_open, pool_idle) = pool_connections(&self.pool);
        ProcessSample {
            host: self.host.metrics(),
            pool_open,
            pool_idle,
            parked_polls: self.polls.nodes(),
            nats_connected: self.bus.is_connected(),
            lease_fresh: self.view.has_fresh_lease(),
            clock_offset: self.view.clock.offset().map(|offset| offset.ahead.as_seconds_f64()),
            role_members: self.view.role_members(),
        }
    }

    pub(super) fn stats(&self) -> Stats {
        let ProcessSample { host, pool_open, pool_idle, parked_polls, nats_connected, lease_fresh, .. } = self.sample();
        let me = &self.view.me;
        let committer = self.committer.workers().into_iter().map(|worker| StatsCommitter {
            connected: worker.connected,
            waiting: worker.waiting as u64,
            batches: worker.batches,
            last_error: worker.last_error,
            last_error_at: worker.last_error_at,
        });
        Stats {
            member: StatsMember {
                id: me.id.0,
                name: me.name.clone(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                roles: strict_json::from_value(me.details["roles"].clone()).unwrap_or_default(),
                started_at: me.started_at,
                uptime_seconds: (Utc::now() - me.started_at).num_seconds().max(0).unsigned_abs(),
            },
            entities: StatsEntities {
                shards: host.shards as u64,
                awake: host.awake as u64,
                parked: host.parked as u64,
                failing: host.backing_off as u64,
                mailbox_depth: host.mailbox_depth as u64,
                failures_total: host.failures_total,
            },
            committer: committer.collect(),
            database_pool: StatsPool { open: pool_open, idle: pool_idle as u64 },
            nats_connected,
            lease_fresh,
            parked_polls: parked_polls as u64,
            node_connections: self.connections.all() as u64,
            workers: self.workers(),
        }
    }
}

fn shard_node(row: &HostedShard, awake: u64) -> ShardNode {
    ShardNode {
        shard: row.shard.0,
        epoch: row.epoch.0,
        state: if row.closing { ShardState::Closing } else { ShardState::Open },
        since: row.since,
        awake,
        mailbox_depth: row.mailbox_depth as u64,
    }
}

const fn queue(waiting: usize, bound: usize) -> QueueNode {
    QueueNode { waiting: waiting as u64, under_way: 0, bound: Some(bound as u64) }
}

/// Adds the status of a committer's lane to its worker: a lane that runs may be without a connection, which it opens for its first work.
fn with_lane_status(shown: WorkerNode, lane: &LaneStatus) -> WorkerNode {
    let state = match shown.state {
        WorkerState::Running if !lane.connected && lane.last_error.is_none() => WorkerState::Idle,
        WorkerState::Running if !lane.connected => WorkerState::BackingOff,
        state => state,
    };
    WorkerNode {
        what: format!("{}: {} batches so far", shown.what, lane.batches),
        state,
        last_error: lane.last_error.clone().or(shown.last_error),
        queue: Some(queue(lane.waiting, lane.bound)),
        ..shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn committer_without_work_so_far_is_idle_and_one_without_a_connection_backs_off() {
        let shown = |state: WorkerState, lane: &LaneStatus| {
            let worker = WorkerNode {
                name: "committer-1".to_owned(),
                under: "store".to_owned(),
                what: "commits".to_owned(),
                state,
                since: Utc::now(),
                restarts: 0,
                last_error: None,
                restartable: false,
                queue: None,
            };
            with_lane_status(worker, lane).state
        };
        let unused = LaneStatus::default();
        let connected = LaneStatus { connected: true, batches: 1, ..LaneStatus::default() };
        let lost = LaneStatus { connected: false, last_error: Some("refused".to_owned()), ..connected.clone() };
        assert_eq!(shown(WorkerState::Running, &unused), WorkerState::Idle);
        assert_eq!(shown(WorkerState::Running, &connected), WorkerState::Running);
        assert_eq!(shown(WorkerState::Running, &lost), WorkerState::BackingOff);
        assert_eq!(shown(WorkerState::Parked, &unused), WorkerState::Parked);
    }
}
