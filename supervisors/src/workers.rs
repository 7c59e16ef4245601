//! The workers of a process: the supervision tree as a table (design 7), and a file for each worker.
//!
//! | module | what |
//! | --- | --- |
//! | `worker_dependencies`, `polling_loop`, `due_entities` | what workers are made of; a loop with a backoff per item; the entities of one kind whose timer is due |
//! | `committer_and_loader`, `membership`, `listeners` | the lanes to the store; the workers of `crate::cluster`; those of the edge |
//! | `outbox_relay`, `outbox_poll`, `orphans` | publish committed events; feed the relay with those of shards without one; find events whose reaction is overdue |
//! | `event_delivery`, `event_reactions` | what the reaction to an event works with; the reactions |
//! | `timers`, `idle_passivation` | tick entities whose timer is due; passivate idle ones |
//! | `placement_index`, `provisioning`, `ssh_access` | the free GPUs in memory; the placement of allocations; the keys of tenants |
//! | `bare_metal`, `rollout_nodes` | have the bare-metal provider do what nodes want; read the next nodes of a rollout |
//! | `terminal_gateways`, `close_terminals`, `recordings` | detach sessions of gateways that have ended; close sessions; delete old recordings |
//! | `accrual`, `payments` | charge rentals; exchange with the payment processor |
//! | `notification_relay`, `notification_queue`, `notification_delivery` | notify subscribers; queue messages for endpoints; deliver them |
//! | `keys`, `policy`, `rewrap` | cache keys and policy values; rewrap sealed values |
//! | `audit_seal`, `auditor`, `lost_commits`, `recovery_mark` | seal the audit log; check the invariants; park what a failover has lost; mark the recovery of the database |
//! | `retention`, `sweep` | remove what is older than policies keep; maintain tables |
//! | `metrics`, `fleet_telemetry`, `fleet_history`, `entity_changes`, `trace_export` | measure, for operators |

pub mod accrual;
pub mod audit_seal;
pub mod auditor;
pub mod bare_metal;
mod close_terminals;
mod committer_and_loader;
mod due_entities;
mod entity_changes;
pub mod event_delivery;
pub mod event_reactions;
pub mod fleet_history;
pub mod fleet_telemetry;
pub mod idle_passivation;
pub mod keys;
pub mod listeners;
mod lost_commits;
mod membership;
pub mod metrics;
pub mod notification_delivery;
pub mod notification_queue;
pub mod notification_relay;
mod orphans;
pub mod outbox_poll;
pub mod outbox_relay;
pub mod payments;
pub mod placement_index;
pub mod policy;
pub mod polling_loop;
pub mod provisioning;
pub mod recordings;
mod recovery_mark;
pub mod retention;
pub mod rewrap;
mod rollout_nodes;
mod ssh_access;
pub mod sweep;
mod terminal_gateways;
pub mod timers;
mod trace_export;
mod worker_dependencies;

pub use worker_dependencies::WorkerDependencies;

use crate::process_roles::ProcessRole;
use crate::supervisor::{ALWAYS, BOUNDED, ReadinessRule, ShutdownStep, WorkerQueue, WorkerSpec, WorkerTask};
use ReadinessRule::{MustNotPark, MustRun, NotNeeded};
use WorkerQueue::{Committed, CommitterLane, Consumer, Hidden};
use WorkerStart::{Group, Optional, Task};
use domain::event::Stream;

/// One row of the supervision tree.
#[derive(Clone, Copy, Debug)]
pub struct TreeRow {
    pub spec: WorkerSpec,
    /// The worker runs in processes that have one of these roles.
    pub roles: &'static [ProcessRole],
    pub start: WorkerStart,
}

/// What makes the task of a row. It is called in every process, whatever its roles, so that the metrics are exported from the beginning.
#[derive(Clone, Copy, Debug)]
pub enum WorkerStart {
    /// The row only groups others.
    Group,
    Task(fn(&WorkerDependencies) -> anyhow::Result<WorkerTask>),
    /// `None` where the configuration or the roles do not ask for it.
    Optional(fn(&WorkerDependencies) -> anyhow::Result<Option<WorkerTask>>),
}

const EVERY: &[ProcessRole] = &ProcessRole::ALL;
const ACCRUAL: &[ProcessRole] = &[ProcessRole::Billing];
const ENTITIES: &[ProcessRole] = &[ProcessRole::Entities];
const RELAY: &[ProcessRole] = &[ProcessRole::OutboxRelay];
const NOTIFY: &[ProcessRole] = &[ProcessRole::NotificationRelay];
const REACT: &[ProcessRole] = &[ProcessRole::Provisioning];
const PLACEMENT: &[ProcessRole] = &[ProcessRole::Entities, ProcessRole::Provisioning];
const API: &[ProcessRole] = &[ProcessRole::Api];
const NODE_API: &[ProcessRole] = &[ProcessRole::NodeApi, ProcessRole::NodeLogGateway];
const WEBHOOK: &[ProcessRole] = &[ProcessRole::Webhook];
const PUBLIC: &[ProcessRole] = &[ProcessRole::Api, ProcessRole::TerminalGateway];
const POLLED: &[ProcessRole] = &[ProcessRole::NodeApi, ProcessRole::TerminalGateway];

macro_rules! tree {
    ($($name:literal in $parent:literal, $roles:ident, $restart:ident, $readiness:ident, $stop:ident, $queue:expr, $start:expr =>
        $description:literal;)*) => {
        /// The whole tree, from the root's children down. Shards and their entities are children of `entities` and are not listed.
        pub const TREE: &[TreeRow] = &[$(TreeRow {
            spec: WorkerSpec {
                name: $name,
                parent: $parent,
                restart: $restart,
                readiness: $readiness,
                stop: ShutdownStep::$stop,
                queue: $queue,
                description: $description,
            },
            roles: $roles,
            start: $start,
        }),*];
    };
}

// Each row: its name and its parent, the roles that run it, its restart rule, whether serving needs it, the step of the shutdown that stops
// it, the queue that is shown with it, and what starts it.
tree! {
    "cluster" in "root", EVERY, BOUNDED, MustNotPark, Cluster, Hidden, Group =>
        "membership and ownership";
    "heartbeat" in "cluster", EVERY, ALWAYS, MustNotPark, Membership, Hidden, Task(membership::heartbeat) =>
        "renews this member's lease in Postgres";
    "peer-listener" in "cluster", EVERY, ALWAYS, MustNotPark, WithParent, Hidden, Task(membership::peer_listener) =>
        "receives heartbeats of other members";
    "command-answers" in "cluster", EVERY, ALWAYS, MustNotPark, WithParent, Hidden, Task(membership::command_answers) =>
        "receives the answers to this member's commands";
    "ownership" in "cluster", EVERY, ALWAYS, MustNotPark, Membership, Hidden, Task(membership::ownership) =>
        "acquires, hands over and releases shards";
    "peer-rpc" in "cluster", EVERY, ALWAYS, MustNotPark, WithParent, Hidden, Task(membership::peer_rpc) =>
        "answers other members' questions about this one";
    "recovery-mark" in "cluster", EVERY, ALWAYS, NotNeeded, WithParent, Hidden, Task(recovery_mark::start) =>
        "publishes how far the database's commits have come, so that a restored one is recognized";
    "accrual" in "root", ACCRUAL, BOUNDED, MustNotPark, Accrual, Hidden, Task(accrual::start) =>
        "charges billing accounts whose window has ended";
    "entities" in "root", ENTITIES, BOUNDED, MustNotPark, Entities, Hidden, Group =>
        "the shards that this member owns";
    "timers" in "entities", ENTITIES, BOUNDED, MustNotPark, WithParent, Hidden, Task(timers::start) =>
        "sends ticks to entities at their deadlines";
    "orphans" in "entities", ENTITIES, BOUNDED, MustNotPark, WithParent, Hidden, Task(orphans::start) =>
        "processes events whose reaction is overdue";
    "auditor" in "entities", ENTITIES, BOUNDED, MustNotPark, WithParent, Hidden, Task(auditor::start) =>
        "checks the invariants";
    "entity-changes" in "entities", ENTITIES, ALWAYS, NotNeeded, WithParent, Hidden, Task(entity_changes::start) =>
        "publishes which entities changed, for operators";
    "node-capacity" in "entities", ENTITIES, ALWAYS, NotNeeded, WithParent, Hidden, Task(placement_index::start_publisher) =>
        "publishes the free GPUs of nodes that changed";
    "idle-passivation" in "entities", ENTITIES, BOUNDED, NotNeeded, WithParent, Hidden, Task(idle_passivation::start) =>
        "passivates idle entities";
    "sweep" in "entities", ENTITIES, BOUNDED, NotNeeded, WithParent, Hidden, Task(sweep::start) =>
        "deletes old command ids, creates partitions in advance";
    "recordings" in "entities", ENTITIES, BOUNDED, NotNeeded, WithParent, Hidden, Task(recordings::start) =>
        "deletes recordings of terminals that are too old";
    "terminal-gateways" in "entities", ENTITIES, BOUNDED, NotNeeded, WithParent, Hidden, Task(terminal_gateways::start) =>
        "detaches terminals whose gateway has ended";
    "retention" in "entities", ENTITIES, BOUNDED, NotNeeded, WithParent, Hidden, Task(retention::start) =>
        "removes months of the history and of the audit log, and ended entities, that are older than policies keep them";
    "fleet-history" in "entities", ENTITIES, BOUNDED, NotNeeded, WithParent, Hidden, Task(fleet_history::start) =>
        "counts the GPUs of each hour, and adds up its rentals and its revenue";
    "rewrap" in "entities", ENTITIES, BOUNDED, NotNeeded, WithParent, Hidden, Task(rewrap::start) =>
        "rewraps values that a retiring key of the key ring sealed";
    "rewrap-listener" in "rewrap", ENTITIES, ALWAYS, MustNotPark, WithParent, Hidden, Task(rewrap::start_listener) =>
        "receives the activation of keys of the key ring";
    "audit-seal" in "entities", ENTITIES, ALWAYS, MustNotPark, WithParent, Hidden, Task(audit_seal::start) =>
        "seals audit rows into their shard's chain";
    "store" in "root", EVERY, BOUNDED, MustNotPark, Store, Hidden, Group =>
        "writes and reads entities";
    "committer-1" in "store", EVERY, ALWAYS, MustRun, WithParent, CommitterLane(0), Task(|parts| committer_and_loader::committer(parts, 0)) =>
        "commits the transitions of every second shard";
    "committer-2" in "store", EVERY, ALWAYS, MustRun, WithParent, CommitterLane(1), Task(|parts| committer_and_loader::committer(parts, 1)) =>
        "commits the transitions of the other shards";
    "loader-1" in "store", EVERY, ALWAYS, MustRun, WithParent, Hidden, Task(|parts| committer_and_loader::loader(parts, 0)) =>
        "loads entities, one query at a time";
    "loader-2" in "store", EVERY, ALWAYS, MustRun, WithParent, Hidden, Task(|parts| committer_and_loader::loader(parts, 1)) =>
        "loads entities, one query at a time";
    "loader-3" in "store", EVERY, ALWAYS, MustRun, WithParent, Hidden, Task(|parts| committer_and_loader::loader(parts, 2)) =>
        "loads entities, one query at a time";
    "loader-4" in "store", EVERY, ALWAYS, MustRun, WithParent, Hidden, Task(|parts| committer_and_loader::loader(parts, 3)) =>
        "loads entities, one query at a time";
    "lost-commits" in "store", EVERY, ALWAYS, MustNotPark, WithParent, Hidden, Task(lost_commits::start) =>
        "parks entities whose commits a failover of the database lost";
    "policy" in "root", EVERY, ALWAYS, MustNotPark, Policy, Hidden, Task(policy::start) =>
        "reads the policy values";
    "policy-invalidation" in "policy", EVERY, ALWAYS, MustNotPark, WithParent, Hidden, Task(policy::start_listener) =>
        "receives changes of policy values";
    "keys" in "root", EVERY, ALWAYS, MustNotPark, Keys, Hidden, Task(keys::start) =>
        "follows the rotation of keys";
    "key-invalidation" in "keys", EVERY, ALWAYS, MustNotPark, WithParent, Hidden, Task(keys::start_listener) =>
        "receives rotations of keys";
    "metrics" in "root", EVERY, BOUNDED, MustNotPark, Metrics, Hidden, Task(metrics::start) =>
        "periodically reads the metrics that need queries";
    "trace-export" in "root", EVERY, BOUNDED, MustNotPark, TraceExport, Hidden, Optional(trace_export::start) =>
        "sends spans to the collector, if one is configured";
    "outbox-relay" in "root", RELAY, ALWAYS, MustNotPark, OutboxRelay, Committed, Task(outbox_relay::start) =>
        "publishes committed events to JetStream";
    "outbox-poll" in "outbox-relay", RELAY, BOUNDED, MustNotPark, WithParent, Hidden, Task(outbox_poll::start) =>
        "reads the events of shards whose owners have no relay of their own";
    "notification-relay" in "root", NOTIFY, ALWAYS, NotNeeded, Notifications, Hidden, Task(notification_relay::start) =>
        "publishes notifications of events";
    "notification-queue" in "notification-relay", NOTIFY, ALWAYS, NotNeeded, WithParent, Hidden, Task(notification_queue::start) =>
        "queues events for webhooks and e-mail addresses";
    "notification-delivery" in "notification-relay", NOTIFY, BOUNDED, NotNeeded, WithParent, Hidden, Task(notification_delivery::start) =>
        "delivers queued messages to webhooks and e-mail addresses";
    "provisioning" in "root", REACT, BOUNDED, MustNotPark, Reactions, Hidden, Group =>
        "turns events into commands";
    "provisioning-events" in "provisioning", REACT, ALWAYS, MustNotPark, WithParent, Consumer(Stream::Provisioning),
        Task(|parts| event_reactions::start_consumer(parts, Stream::Provisioning)) =>
        "consumer of stream PROVISIONING";
    "node-events" in "provisioning", REACT, ALWAYS, MustNotPark, WithParent, Consumer(Stream::Nodes),
        Task(|parts| event_reactions::start_consumer(parts, Stream::Nodes)) =>
        "consumer of stream NODES";
    "terminal-events" in "provisioning", REACT, ALWAYS, MustNotPark, WithParent, Consumer(Stream::Terminals),
        Task(|parts| event_reactions::start_consumer(parts, Stream::Terminals)) =>
        "consumer of stream TERMINALS";
    "billing-events" in "provisioning", REACT, ALWAYS, MustNotPark, WithParent, Consumer(Stream::Billing),
        Task(|parts| event_reactions::start_consumer(parts, Stream::Billing)) =>
        "consumer of stream BILLING";
    "reconciliation" in "provisioning", REACT, ALWAYS, NotNeeded, WithParent, Hidden, Optional(payments::reconciliation::start) =>
        "compares payments with the payment processor's";
    "placement-index" in "root", PLACEMENT, ALWAYS, NotNeeded, Reactions, Hidden, Task(placement_index::start) =>
        "compares the index of free GPUs with the database";
    "placement-feed" in "placement-index", PLACEMENT, ALWAYS, NotNeeded, WithParent, Hidden, Task(placement_index::start_listener) =>
        "receives the free GPUs of nodes that changed";
    "edge" in "root", EVERY, BOUNDED, MustNotPark, Edge, Hidden, Group =>
        "listeners";
    "operations" in "edge", EVERY, ALWAYS, MustNotPark, WithParent, Hidden, Task(listeners::operations) =>
        "metrics, health and statistics for operators, without TLS";
    "public-api" in "edge", PUBLIC, ALWAYS, MustNotPark, WithParent, Hidden, Optional(listeners::public_api) =>
        "HTTPS for users and administrators, and their terminals";
    "node-api" in "edge", NODE_API, ALWAYS, MustNotPark, WithParent, Hidden, Optional(listeners::node_api) =>
        "mutual TLS for node agents, and the gateway for their logs";
    "webhook" in "edge", WEBHOOK, ALWAYS, MustNotPark, WithParent, Hidden, Optional(listeners::webhook) =>
        "HTTPS for webhooks of the payment processor, if one is configured";
    "provider-keys" in "edge", API, ALWAYS, MustNotPark, WithParent, Hidden, Task(listeners::provider_keys) =>
        "fetches the identity provider's keys on request";
    "fleet-telemetry" in "edge", API, BOUNDED, NotNeeded, WithParent, Hidden, Task(fleet_telemetry::start) =>
        "adds up the load of the nodes for the metrics, and reads their SKUs and regions";
    "wake-listener" in "edge", POLLED, ALWAYS, MustNotPark, WithParent, Hidden, Task(listeners::wake_listener) =>
        "wakes long polls and terminals after commits of other members";
}

/// Starts every row of the tree that this process's roles include.
///
/// # Errors
/// Where a worker cannot be made.
pub fn start_all(parts: &WorkerDependencies) -> anyhow::Result<()> {
    let mut tasks = Vec::new();
    for row in TREE {
        tasks.push(match row.start {
            Group => None,
            Task(start) => Some(start(parts)?),
            Optional(start) => start(parts)?,
        });
    }
    let supervisor = &parts.stages.actors.supervisor;
    let here = |row: &TreeRow| row.roles.iter().any(|role| parts.stages.config.roles.contains(role));
    for (row, task) in TREE.iter().zip(tasks).filter(|(row, _)| here(row)) {
        match (row.start, task) {
            (_, Some(task)) => supervisor.add(row.spec, task),
            (Group, None) => supervisor.group(row.spec),
            (Task(_) | Optional(_), None) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
