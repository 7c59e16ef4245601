//! What this process knows of itself.

use super::{Operations, Part, Question, Said};
use crate::figures::{Moment, pool_of};
use crate::supervisor::WorkerRow;
use crate::tree::COMMITTER;
use actors::host::{EntityRow, EntityStatus, ShardRow};
use chrono::Utc;
use domain::Shard;
use domain::event::Stream;
use edge::runtime::{
    MemberNode, QueueNode, ShardNode, ShardState, Stats, StatsCommitter, StatsEntities, StatsMember, StatsPool,
    WorkerNode, WorkerState,
};
use persistence::committer::WorkerStatus;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use uuid::Uuid;

/// The pause before a worker is started anew: it may be the one that carries the answer.
const A_MOMENT: Duration = Duration::from_millis(100);

/// The consumers whose lag is theirs to show.
const CONSUMERS: [(&str, Stream); 4] = [
    ("provisioning-events", Stream::Provisioning),
    ("node-events", Stream::Nodes),
    ("terminal-events", Stream::Terminals),
    ("billing-events", Stream::Billing),
];

impl Operations {
    pub(super) fn say(&self, question: &Question) -> Said {
        match question {
            Question::Part { ids, shards } => Said::Part(Box::new(self.part(ids, *shards))),
            Question::Restart { entity } => Said::Restarted(self.host.restart(*entity)),
            Question::RestartWorker { member, worker } => {
                Said::Restarted(*member == self.view.me.id && self.restart_soon(worker))
            }
        }
    }

    /// `false` where there is no such worker.
    fn restart_soon(&self, worker: &str) -> bool {
        let there = self.supervisor.rows().iter().any(|row| row.row.name == worker && row.restartable);
        if there {
            let (supervisor, worker) = (self.supervisor.clone(), worker.to_owned());
            tokio::spawn(async move {
                tokio::time::sleep(A_MOMENT).await;
                // Gone by now only where the process is ending.
                let _ = supervisor.restart(&worker);
            });
        }
        there
    }

    fn part(&self, ids: &[Uuid], with_shards: bool) -> Part {
        let wanted: BTreeSet<_> = ids.iter().collect();
        let all = self.host.entities();
        let shards = self.host.shards();
        let is_awake = |row: &&EntityRow| row.status == EntityStatus::Awake;
        let mut awake: BTreeMap<Shard, u64> = BTreeMap::new();
        for row in all.iter().filter(is_awake) {
            *awake.entry(row.shard).or_default() += 1;
        }
        let shown = |shard: &ShardRow| shard_node(shard, awake.get(&shard.shard).copied().unwrap_or(0));
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
        let shown = |row: &EntityRow| row.status != EntityStatus::Awake || wanted.contains(&row.id);
        Part { node, entities: all.into_iter().filter(shown).collect() }
    }

    fn workers(&self) -> Vec<WorkerNode> {
        let commits = self.committer.workers();
        let node = |WorkerRow { row, state, since, restarts, last_error, restartable }: WorkerRow| {
            let lane = COMMITTER.iter().position(|name| *name == row.name).and_then(|number| commits.get(number));
            let shown = WorkerNode {
                name: row.name.to_owned(),
                under: row.under.to_owned(),
                what: row.what.to_owned(),
                state,
                since,
                restarts,
                last_error,
                restartable,
                queue: self.queue_of(row.name),
            };
            match lane {
                Some(lane) => committing(shown, lane),
                None => shown,
            }
        };
        self.supervisor.rows().into_iter().map(node).collect()
    }

    /// What waits for a worker: committed events for the relay, and for a consumer what JetStream said of it at the last look.
    fn queue_of(&self, worker: &str) -> Option<QueueNode> {
        if worker == "outbox-relay" {
            return Some(queue(
                self.committed.max_capacity() - self.committed.capacity(),
                self.committed.max_capacity(),
            ));
        }
        let (_, stream) = CONSUMERS.iter().find(|(name, _)| *name == worker)?;
        let lag = self.figures.lag_of(*stream)?;
        Some(QueueNode { waiting: lag.waiting, under_way: lag.under_way, bound: None })
    }

    pub(super) fn moment(&self) -> Moment {
        let (pool_open, pool_idle) = pool_of(&self.pool);
        Moment {
            lives: self.host.figures(),
            pool_open,
            pool_idle,
            parked_polls: self.polls.nodes(),
            nats_connected: self.bus.is_connected(),
            lease_fresh: self.view.is_fresh(),
            clock_offset: self.view.clock.offset().map(|offset| offset.ahead.as_seconds_f64()),
            role_members: self.view.role_members(),
        }
    }

    pub(super) fn stats(&self) -> Stats {
        let Moment { lives, pool_open, pool_idle, parked_polls, nats_connected, lease_fresh, .. } = self.moment();
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
                roles: serde_json::from_value(me.details["roles"].clone()).unwrap_or_default(),
                started_at: me.started_at,
                uptime_seconds: (Utc::now() - me.started_at).num_seconds().max(0).unsigned_abs(),
            },
            entities: StatsEntities {
                shards: lives.shards as u64,
                awake: lives.awake as u64,
                parked: lives.parked as u64,
                failing: lives.backing_off as u64,
                mailbox_depth: lives.mailbox_depth as u64,
                failures_total: lives.failures_total,
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

fn shard_node(row: &ShardRow, awake: u64) -> ShardNode {
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

/// What a worker of the committer says of itself, beside what its supervisor knows: one that runs may be without a connection.
fn committing(shown: WorkerNode, lane: &WorkerStatus) -> WorkerNode {
    let state = match shown.state {
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
