//! The supervision tree as a table: each worker with its parent, its roles and its restart policy (design 7).

use crate::config::ProcessRole;
use std::time::Duration;

/// One row: a worker that runs as long as the process.
#[derive(Clone, Copy, Debug)]
pub struct TreeRow {
    pub name: &'static str,
    pub parent: &'static str,
    /// The worker runs in processes that have one of these roles.
    pub roles: &'static [ProcessRole],
    pub restart: RestartPolicy,
    pub description: &'static str,
}

/// What happens when a worker ends, in whatever way: it is meant to run for ever.
#[derive(Clone, Copy, Debug)]
pub struct RestartPolicy {
    /// The pause before a restart; it doubles with each failure within [`RestartPolicy::window`], up to `longest`.
    pub pause: Duration,
    pub longest: Duration,
    /// This many failures within the window park the worker: it is shown, and not restarted until an operator does so. Its siblings run on.
    pub intensity: usize,
    pub window: Duration,
}

/// For workers that depend on something outside this process, and must recover by themselves whenever that does.
const ALWAYS: RestartPolicy = RestartPolicy {
    pause: Duration::from_millis(100),
    longest: Duration::from_secs(2),
    intensity: usize::MAX,
    window: Duration::from_secs(60),
};

/// For workers inside this process: one that keeps failing has a fault that a restart does not repair.
const BOUNDED: RestartPolicy = RestartPolicy {
    pause: Duration::from_millis(50),
    longest: Duration::from_secs(1),
    intensity: 10,
    window: Duration::from_secs(60),
};

const EVERY: &[ProcessRole] = &ProcessRole::ALL;

/// The whole tree, from the root's children down. Shards and their entities are children of `entities` and are not listed.
pub const TREE: &[TreeRow] = &[
    row("cluster", "root", EVERY, BOUNDED, "membership and ownership"),
    row("heartbeat", "cluster", EVERY, ALWAYS, "says that this member lives"),
    row("peer-listener", "cluster", EVERY, ALWAYS, "hears the other members"),
    row("command-answers", "cluster", EVERY, ALWAYS, "receives the answers to this member's commands"),
    row("ownership", "cluster", EVERY, ALWAYS, "takes, gives and drops shards"),
    row("peer-rpc", "cluster", EVERY, ALWAYS, "answers other members' questions about this one"),
    row("accrual", "root", &[ProcessRole::Billing], BOUNDED, "charges billing accounts whose window has ended"),
    row("entities", "root", &[ProcessRole::Entities], BOUNDED, "the shards that this member owns"),
    row("timers", "entities", &[ProcessRole::Entities], BOUNDED, "wakes entities whose deadline has come"),
    row("orphans", "entities", &[ProcessRole::Entities], BOUNDED, "takes up events whose effect is overdue"),
    row("auditor", "entities", &[ProcessRole::Entities], BOUNDED, "checks what must always hold"),
    row("idle-passivation", "entities", &[ProcessRole::Entities], BOUNDED, "puts idle entities to sleep"),
    row("sweep", "entities", &[ProcessRole::Entities], BOUNDED, "forgets old command ids, makes partitions ahead"),
    row(
        "recordings",
        "entities",
        &[ProcessRole::Entities],
        BOUNDED,
        "deletes recordings of terminals that are too old",
    ),
    row(
        "rewrap",
        "entities",
        &[ProcessRole::Entities],
        BOUNDED,
        "seals anew what a key of the key ring has sealed that goes",
    ),
    row(
        "rewrap-listener",
        "rewrap",
        &[ProcessRole::Entities],
        ALWAYS,
        "hears that a key of the key ring was put to use",
    ),
    row("audit-seal", "entities", &[ProcessRole::Entities], ALWAYS, "seals audit rows into their shard's chain"),
    row("store", "root", EVERY, BOUNDED, "writes and reads entities"),
    row("committer-1", "store", EVERY, ALWAYS, "commits the transitions of every second shard"),
    row("committer-2", "store", EVERY, ALWAYS, "commits the transitions of the other shards"),
    row("loader-1", "store", EVERY, ALWAYS, "loads entities, one query at a time"),
    row("loader-2", "store", EVERY, ALWAYS, "loads entities, one query at a time"),
    row("loader-3", "store", EVERY, ALWAYS, "loads entities, one query at a time"),
    row("loader-4", "store", EVERY, ALWAYS, "loads entities, one query at a time"),
    row("policy", "root", EVERY, ALWAYS, "reads the policy values"),
    row("policy-invalidation", "policy", EVERY, ALWAYS, "hears that a policy value was written"),
    row("keys", "root", EVERY, ALWAYS, "follows the rotation of keys"),
    row("key-invalidation", "keys", EVERY, ALWAYS, "hears that keys were rotated"),
    row("metrics", "root", EVERY, BOUNDED, "reads now and then what is shown on /metrics"),
    row("trace-export", "root", EVERY, BOUNDED, "sends spans to the collector, where one is configured"),
    row("outbox-relay", "root", &[ProcessRole::OutboxRelay], ALWAYS, "publishes committed events to JetStream"),
    row(
        "outbox-poll",
        "outbox-relay",
        &[ProcessRole::OutboxRelay],
        BOUNDED,
        "reads the events of shards whose owners have no relay of their own",
    ),
    row("notification-relay", "root", &[ProcessRole::NotificationRelay], ALWAYS, "tells people of events"),
    row(
        "notification-queue",
        "notification-relay",
        &[ProcessRole::NotificationRelay],
        ALWAYS,
        "queues events for webhooks and e-mail addresses",
    ),
    row(
        "notification-delivery",
        "notification-relay",
        &[ProcessRole::NotificationRelay],
        BOUNDED,
        "sends what is queued for webhooks and e-mail addresses",
    ),
    row("provisioning", "root", &[ProcessRole::Provisioning], BOUNDED, "turns events into commands"),
    row("provisioning-events", "provisioning", &[ProcessRole::Provisioning], ALWAYS, "consumer of stream PROVISIONING"),
    row("node-events", "provisioning", &[ProcessRole::Provisioning], ALWAYS, "consumer of stream NODES"),
    row("terminal-events", "provisioning", &[ProcessRole::Provisioning], ALWAYS, "consumer of stream TERMINALS"),
    row("billing-events", "provisioning", &[ProcessRole::Provisioning], ALWAYS, "consumer of stream BILLING"),
    row(
        "reconciliation",
        "provisioning",
        &[ProcessRole::Provisioning],
        ALWAYS,
        "compares the payment processor's books with ours",
    ),
    row("edge", "root", EVERY, BOUNDED, "what listens"),
    row("operations", "edge", EVERY, ALWAYS, "figures, health and stats for operators, in clear"),
    row(
        "public-api",
        "edge",
        &[ProcessRole::Api, ProcessRole::TerminalGateway],
        ALWAYS,
        "HTTPS for users and administrators, and their terminals",
    ),
    row("node-api", "edge", &[ProcessRole::NodeApi], ALWAYS, "mutual TLS for node agents"),
    row(
        "webhook",
        "edge",
        &[ProcessRole::Webhook],
        ALWAYS,
        "HTTPS for what the payment processor says, where one is configured",
    ),
    row("provider-keys", "edge", &[ProcessRole::Api], ALWAYS, "fetches the identity provider's keys when told to"),
    row(
        "wake-listener",
        "edge",
        &[ProcessRole::NodeApi, ProcessRole::TerminalGateway],
        ALWAYS,
        "wakes parked polls and terminals that other members' commits concern",
    ),
];

/// Rows that readiness does not require: a process serves without them for a long time.
pub const NOT_NEEDED_FOR_READINESS: &[&str] = &[
    "idle-passivation",
    "sweep",
    "recordings",
    "rewrap",
    "notification-relay",
    "notification-queue",
    "notification-delivery",
    "reconciliation",
];

/// The rows that run the committer's lanes, in their order: each of its commits waits for one of them.
pub const COMMITTER_ROWS: [&str; 2] = ["committer-1", "committer-2"];

/// The rows that run the loader's lanes, in their order.
pub const LOADER_ROWS: [&str; 4] = ["loader-1", "loader-2", "loader-3", "loader-4"];

/// Rows that have a task only where an operator has configured it.
pub const OPTIONAL_ROWS: &[&str] = &["trace-export", "reconciliation", "webhook"];

/// The order of the shutdown: the listeners stop, long polls are answered, shards are handed over, and committed events are
/// published.
pub const SHUTDOWN_ORDER: &[&str] = &[
    "edge",
    "provisioning",
    "accrual",
    "entities",
    "outbox-relay",
    "notification-relay",
    "policy",
    "keys",
    "metrics",
    "store",
    "cluster",
    "trace-export",
];

const fn row(
    name: &'static str,
    parent: &'static str,
    roles: &'static [ProcessRole],
    restart: RestartPolicy,
    description: &'static str,
) -> TreeRow {
    TreeRow { name, parent, roles, restart, description }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_row_has_an_earlier_parent_and_a_unique_name() {
        let mut known = BTreeSet::from(["root"]);
        for row in TREE {
            assert!(known.contains(row.parent), "{} has no parent", row.name);
            assert!(known.insert(row.name), "{} is listed twice", row.name);
        }
    }

    #[test]
    fn shutdown_order_names_every_child_of_the_root_once() {
        let children: BTreeSet<_> = TREE.iter().filter(|row| row.parent == "root").map(|row| row.name).collect();
        let stopped: BTreeSet<_> = SHUTDOWN_ORDER.iter().copied().collect();
        assert_eq!(children, stopped);
        assert_eq!(SHUTDOWN_ORDER.len(), stopped.len());
    }

    #[test]
    fn row_lists_name_only_existing_rows() {
        for name in NOT_NEEDED_FOR_READINESS.iter().chain(OPTIONAL_ROWS).chain(&COMMITTER_ROWS).chain(&LOADER_ROWS) {
            assert!(TREE.iter().any(|row| row.name == *name), "there is no {name}");
        }
    }
}
