//! The supervision tree as a table: what runs, under whom, in which role, and what happens when it fails (design 7).

use crate::config::Role;
use std::time::Duration;

/// One row: something that runs as long as the process.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub name: &'static str,
    pub under: &'static str,
    /// Runs in processes that have one of these roles.
    pub roles: &'static [Role],
    pub restart: Restart,
    pub what: &'static str,
}

/// What happens when it ends, in whatever way: it was meant to run for ever.
#[derive(Clone, Copy, Debug)]
pub struct Restart {
    /// The pause before it is started again; it doubles with each failure in [`Restart::window`], up to `longest`.
    pub pause: Duration,
    pub longest: Duration,
    /// So many failures in the window park it: shown, and left alone until an operator restarts it. Its siblings live on.
    pub intensity: usize,
    pub window: Duration,
}

/// Follows what is outside this process, and has to come back by itself whenever that does.
const ALWAYS: Restart = Restart {
    pause: Duration::from_millis(100),
    longest: Duration::from_secs(2),
    intensity: usize::MAX,
    window: Duration::from_secs(60),
};

/// Works inside this process: if it keeps failing, something is wrong that a restart does not mend.
const BOUNDED: Restart = Restart {
    pause: Duration::from_millis(50),
    longest: Duration::from_secs(1),
    intensity: 10,
    window: Duration::from_secs(60),
};

const EVERY: &[Role] = &Role::ALL;

/// The whole tree, from the root's children down. Shards and their entities hang below `entities` and come and go.
pub const TREE: &[Row] = &[
    row("cluster", "root", EVERY, BOUNDED, "membership and ownership"),
    row("beat", "cluster", EVERY, ALWAYS, "says that this member lives"),
    row("listen", "cluster", EVERY, ALWAYS, "hears the other members"),
    row("command-answers", "cluster", EVERY, ALWAYS, "receives the answers to this member's commands"),
    row("ownership", "cluster", EVERY, ALWAYS, "takes, gives and drops shards"),
    row("answers", "cluster", EVERY, ALWAYS, "answers other members' questions about this one"),
    row("accrual", "root", &[Role::Billing], BOUNDED, "charges billing accounts whose window has ended"),
    row("entities", "root", &[Role::Entities], BOUNDED, "the shards that this member owns"),
    row("timers", "entities", &[Role::Entities], BOUNDED, "wakes entities whose deadline has come"),
    row("orphans", "entities", &[Role::Entities], BOUNDED, "takes up events whose effect is overdue"),
    row("auditor", "entities", &[Role::Entities], BOUNDED, "checks what must always hold"),
    row("rest", "entities", &[Role::Entities], BOUNDED, "puts idle entities to sleep"),
    row("sweep", "entities", &[Role::Entities], BOUNDED, "forgets old command ids, makes partitions ahead"),
    row("recordings", "entities", &[Role::Entities], BOUNDED, "deletes recordings of terminals that are too old"),
    row("rewrap", "entities", &[Role::Entities], BOUNDED, "seals anew what a key of the key ring has sealed that goes"),
    row("rewrap-words", "rewrap", &[Role::Entities], ALWAYS, "hears that a key of the key ring was put to use"),
    row("audit-seal", "entities", &[Role::Entities], ALWAYS, "seals audit rows into their shard's chain"),
    row("store", "root", EVERY, BOUNDED, "writes and reads entities"),
    row("committer-1", "store", EVERY, ALWAYS, "commits the transitions of every second shard"),
    row("committer-2", "store", EVERY, ALWAYS, "commits the transitions of the other shards"),
    row("loader-1", "store", EVERY, ALWAYS, "loads entities, one query at a time"),
    row("loader-2", "store", EVERY, ALWAYS, "loads entities, one query at a time"),
    row("loader-3", "store", EVERY, ALWAYS, "loads entities, one query at a time"),
    row("loader-4", "store", EVERY, ALWAYS, "loads entities, one query at a time"),
    row("policy", "root", EVERY, ALWAYS, "reads the policy values"),
    row("policy-words", "policy", EVERY, ALWAYS, "hears that a policy value was written"),
    row("keys", "root", EVERY, ALWAYS, "follows the rotation of keys"),
    row("keys-words", "keys", EVERY, ALWAYS, "hears that keys were rotated"),
    row("figures", "root", EVERY, BOUNDED, "reads now and then what is shown on /metrics"),
    row("trace-export", "root", EVERY, BOUNDED, "sends spans to the collector, where one is configured"),
    row("outbox-relay", "root", &[Role::OutboxRelay], ALWAYS, "publishes committed events to JetStream"),
    row(
        "outbox-poll",
        "outbox-relay",
        &[Role::OutboxRelay],
        BOUNDED,
        "reads the events of shards whose owners have no relay of their own",
    ),
    row("notification-relay", "root", &[Role::NotificationRelay], ALWAYS, "tells people of events"),
    row(
        "notification-queue",
        "notification-relay",
        &[Role::NotificationRelay],
        ALWAYS,
        "queues events for webhooks and e-mail addresses",
    ),
    row(
        "notification-delivery",
        "notification-relay",
        &[Role::NotificationRelay],
        BOUNDED,
        "sends what is queued for webhooks and e-mail addresses",
    ),
    row("provisioning", "root", &[Role::Provisioning], BOUNDED, "turns events into commands"),
    row("provisioning-events", "provisioning", &[Role::Provisioning], ALWAYS, "consumer of stream PROVISIONING"),
    row("node-events", "provisioning", &[Role::Provisioning], ALWAYS, "consumer of stream NODES"),
    row("terminal-events", "provisioning", &[Role::Provisioning], ALWAYS, "consumer of stream TERMINALS"),
    row("billing-events", "provisioning", &[Role::Provisioning], ALWAYS, "consumer of stream BILLING"),
    row(
        "reconciliation",
        "provisioning",
        &[Role::Provisioning],
        ALWAYS,
        "compares the payment processor's books with ours",
    ),
    row("edge", "root", EVERY, BOUNDED, "what listens"),
    row("operations", "edge", EVERY, ALWAYS, "figures, health and stats for operators, in clear"),
    row(
        "public-api",
        "edge",
        &[Role::Api, Role::TerminalGateway],
        ALWAYS,
        "HTTPS for users and administrators, and their terminals",
    ),
    row("node-api", "edge", &[Role::NodeApi], ALWAYS, "mutual TLS for node agents"),
    row(
        "webhook",
        "edge",
        &[Role::Webhook],
        ALWAYS,
        "HTTPS for what the payment processor says, where one is configured",
    ),
    row("provider-keys", "edge", &[Role::Api], ALWAYS, "fetches the identity provider's keys when told to"),
    row(
        "nudges",
        "edge",
        &[Role::NodeApi, Role::TerminalGateway],
        ALWAYS,
        "wakes parked polls and terminals that other members' commits concern",
    ),
];

/// Rows without which a process serves on for a good while.
pub const BESIDE: &[&str] = &[
    "rest",
    "sweep",
    "recordings",
    "rewrap",
    "notification-relay",
    "notification-queue",
    "notification-delivery",
    "reconciliation",
];

/// The rows that run the committer's workers, in their order: all its commits wait for one of them.
pub const COMMITTER: [&str; 2] = ["committer-1", "committer-2"];

/// The rows that run the loader's lanes, in their order.
pub const LOADER: [&str; 4] = ["loader-1", "loader-2", "loader-3", "loader-4"];

/// Rows whose work is there only where an operator has configured it.
pub const WHERE_CONFIGURED: &[&str] = &["trace-export", "reconciliation", "webhook"];

/// What is stopped in which order at the end: nothing new comes in, what is parked is answered, shards are handed over, and what was
/// committed is published.
pub const SHUTDOWN: &[&str] = &[
    "edge",
    "provisioning",
    "accrual",
    "entities",
    "outbox-relay",
    "notification-relay",
    "policy",
    "keys",
    "figures",
    "store",
    "cluster",
    "trace-export",
];

const fn row(
    name: &'static str,
    under: &'static str,
    roles: &'static [Role],
    restart: Restart,
    what: &'static str,
) -> Row {
    Row { name, under, roles, restart, what }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_row_hangs_under_an_earlier_one_and_has_a_name_of_its_own() {
        let mut known = BTreeSet::from(["root"]);
        for row in TREE {
            assert!(known.contains(row.under), "{} hangs under nothing", row.name);
            assert!(known.insert(row.name), "{} stands twice", row.name);
        }
    }

    #[test]
    fn the_shutdown_names_every_child_of_the_root_once() {
        let children: BTreeSet<_> = TREE.iter().filter(|row| row.under == "root").map(|row| row.name).collect();
        let stopped: BTreeSet<_> = SHUTDOWN.iter().copied().collect();
        assert_eq!(children, stopped);
        assert_eq!(SHUTDOWN.len(), stopped.len());
    }

    #[test]
    fn what_is_said_of_rows_elsewhere_is_said_of_rows_that_are_there() {
        for name in BESIDE.iter().chain(WHERE_CONFIGURED).chain(&COMMITTER).chain(&LOADER) {
            assert!(TREE.iter().any(|row| row.name == *name), "there is no {name}");
        }
    }
}
