//! The metrics of one process (specification, *Observability surface*). State in memory is read at the scrape; state in Postgres or NATS
//! is read periodically by the worker `metrics`, so that a scrape costs the database nothing.
//!
//! Metrics of shards cover this process's own shards: the sum over the processes is the cluster's. A metric that belongs to no single
//! process (a stream's lag) is exported by every process with the role, with the same value.

pub mod backups;
pub mod certificate_log;
pub mod entity_totals;
pub mod replication;
pub mod retention;

use actors::entity_host::HostMetrics;
use backups::BackupMetrics;
use chrono::{DateTime, Utc};
use domain::audit::AuditAction;
use domain::event::Stream;
use domain::key_set::Phase;
use domain::{Commit, EntityKind, Event};
use edge::trust::current_keys::Keys;
use entity_totals::EntityTotals;
use persistence::metrics::registered;
use persistence::queries::{OutboxBacklog, WaitingCounts};
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};
use replication::ReplicationMetrics;
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The state of this process that is measured at a scrape.
#[derive(Clone, Debug, Default)]
pub struct ProcessSample {
    pub host: HostMetrics,
    pub pool_open: u32,
    pub pool_idle: usize,
    pub parked_polls: usize,
    pub nats_connected: bool,
    pub lease_fresh: bool,
    /// In seconds; `None` before the first heartbeat.
    pub clock_offset: Option<f64>,
    /// How many living members have each role.
    pub role_members: BTreeMap<&'static str, usize>,
}

/// The lag of a stream's consumer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConsumerLag {
    /// Events that were not delivered to it.
    pub waiting: u64,
    /// Events that were delivered to it and are not acknowledged.
    pub in_flight: u64,
}

/// Gauges and counters of this process.
pub struct ProcessMetrics {
    pub entity_totals: EntityTotals,
    pub backups: BackupMetrics,
    pub replication: ReplicationMetrics,
    registry: Registry,
    shards: IntGauge,
    awake: IntGauge,
    parked: IntGauge,
    failing: IntGauge,
    mailbox: IntGauge,
    failures: IntCounter,
    pool: IntGaugeVec,
    polls: IntGauge,
    nats: IntGauge,
    lease: IntGauge,
    clock: Gauge,
    roles: IntGaugeVec,
    queue: IntGauge,
    overdue: IntGaugeVec,
    outbox: IntGauge,
    outbox_age: Gauge,
    ledger: IntGauge,
    lag: IntGaugeVec,
    read_at: GaugeVec,
    key_age: GaugeVec,
    lags: Mutex<BTreeMap<&'static str, ConsumerLag>>,
    /// Two scrapes at once must not count the same failures twice.
    scraped: Mutex<u64>,
}

impl ProcessMetrics {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry, member: &str, roles: &str) -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str| registered(registry, IntGauge::new(name, help));
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            registered(registry, IntGaugeVec::new(Opts::new(name, help), labels))
        };
        let info = gauges("build_info", "Always 1; the labels say what runs here.", &["version", "member", "roles"])?;
        info.with_label_values(&[env!("CARGO_PKG_VERSION"), member, roles]).set(1);
        let failures = IntCounter::new("entity_failures_total", "Entities' actors that ended in failure.")?;
        registry.register(Box::new(failures.clone()))?;
        let outbox_age =
            Gauge::new("outbox_oldest_seconds", "Age of the oldest unsettled event of this process's shards.")?;
        registry.register(Box::new(outbox_age.clone()))?;
        let read_at = GaugeVec::new(
            Opts::new("figures_read_timestamp_seconds", "When the periodically read metrics were last read."),
            &["from"],
        )?;
        registry.register(Box::new(read_at.clone()))?;
        let key_age = GaugeVec::new(
            Opts::new(
                "key_phase_age_seconds",
                "Since when a key of the service is in its phase, as this process knows it.",
            ),
            &["purpose", "phase", "key_id"],
        )?;
        registry.register(Box::new(key_age.clone()))?;
        let clock = Gauge::new(
            "member_clock_offset_seconds",
            "By how much this member's clock is ahead of Postgres' clock, measured at each heartbeat.",
        )?;
        registry.register(Box::new(clock.clone()))?;
        Ok(Self {
            entity_totals: EntityTotals::register(registry)?,
            backups: BackupMetrics::register(registry)?,
            replication: ReplicationMetrics::register(registry)?,
            registry: registry.clone(),
            clock,
            roles: gauges("cluster_role_members", "Living members that have the role.", &["role"])?,
            shards: gauge("shards_owned", "Shards that this process owns.")?,
            awake: gauge("entities_awake", "Entities that have an actor here.")?,
            parked: gauge("entities_parked", "Entities that failed too often and wait for an operator.")?,
            failing: gauge("entities_failing", "Entities that failed recently and are restarted.")?,
            mailbox: gauge("mailbox_waiting_commands", "Commands that wait in the mailboxes of this process.")?,
            failures,
            pool: gauges("database_pool_connections", "Connections of the pool for reads.", &["state"])?,
            polls: gauge("node_polls_parked", "Nodes whose agent waits here for a task.")?,
            nats: gauge("nats_connected", "1 while this process is connected to NATS.")?,
            lease: gauge("member_lease_fresh", "1 while this member's renewal in Postgres is fresh.")?,
            queue: gauge(
                "provisioning_queue_depth",
                "Requests for allocations that wait for a node, in this process's shards.",
            )?,
            overdue: gauges("entities_overdue", "Entities past their deadline, in this process's shards.", &["kind"])?,
            outbox: gauge("outbox_unsettled_events", "Events of this process's shards whose effect is not committed.")?,
            outbox_age,
            ledger: gauge(
                "billing_ledger_difference_micro",
                "How far this process's accounts are apart from the balance at their last posting, in millionths of a minor unit; must stay 0. \
                 What was changed before that posting shows by `gpuaas ledger verify` and in invariant_violations_total.",
            )?,
            lag: gauges("nats_consumer_lag", "Events that the reactions' consumer has not settled.", &["stream"])?,
            read_at,
            key_age,
            lags: Mutex::default(),
            scraped: Mutex::default(),
        })
    }

    /// All metrics in the Prometheus text format.
    #[must_use]
    pub fn render(&self, moment: ProcessSample) -> String {
        self.update_gauges(moment);
        let mut text = Vec::new();
        match TextEncoder::new().encode(&self.registry.gather(), &mut text) {
            Ok(()) => String::from_utf8(text).unwrap_or_default(),
            Err(error) => {
                tracing::warn!(%error, "the metrics cannot be encoded");
                String::new()
            }
        }
    }

    fn update_gauges(&self, moment: ProcessSample) {
        let HostMetrics { shards, awake, parked, backing_off, mailbox_depth, failures_total } = moment.host;
        for (gauge, value) in [
            (&self.shards, shards),
            (&self.awake, awake),
            (&self.parked, parked),
            (&self.failing, backing_off),
            (&self.mailbox, mailbox_depth),
            (&self.polls, moment.parked_polls),
        ] {
            gauge.set(as_i64(value));
        }
        let in_use = (moment.pool_open as usize).saturating_sub(moment.pool_idle);
        self.pool.with_label_values(&["idle"]).set(as_i64(moment.pool_idle));
        self.pool.with_label_values(&["in_use"]).set(as_i64(in_use));
        self.nats.set(i64::from(moment.nats_connected));
        self.lease.set(i64::from(moment.lease_fresh));
        if let Some(offset) = moment.clock_offset {
            self.clock.set(offset);
        }
        for (role, members) in &moment.role_members {
            self.roles.with_label_values(&[role]).set(as_i64(*members));
        }
        let mut scraped = self.scraped.lock().unwrap_or_else(PoisonError::into_inner);
        self.failures.inc_by(failures_total.saturating_sub(*scraped));
        *scraped = failures_total.max(*scraped);
    }

    /// Sets the ages of the keys that this process uses, and the end of the authority that certifies nodes.
    pub fn set_key_ages(&self, keys: &Keys, now: DateTime<Utc>) {
        self.entity_totals.set_node_authority_end(keys);
        self.key_age.reset();
        for (purpose, key) in keys.all() {
            let phase = key.state.phase();
            if phase != Phase::Retired {
                let age = (now - key.entered_at).as_seconds_f64();
                self.key_age.with_label_values(&[purpose.name(), phase.name(), &key.id]).set(age);
            }
        }
    }

    /// Sets the gauges of this process's shards, as read from Postgres.
    pub fn set_shard_gauges(&self, standing: &WaitingCounts, pending: &OutboxBacklog) {
        self.queue.set(standing.requested.cast_signed());
        for kind in EntityKind::ALL {
            let overdue = standing.overdue.get(kind).copied().unwrap_or(0);
            self.overdue.with_label_values(&[kind.as_str()]).set(overdue.cast_signed());
        }
        self.outbox.set(pending.rows.cast_signed());
        self.outbox_age.set(pending.oldest.as_secs_f64());
        self.mark_read("postgres");
    }

    /// Sets the difference between accounts and their ledgers.
    pub fn set_ledger_difference(&self, micro: i64) {
        self.ledger.set(micro);
        self.mark_read("ledger");
    }

    /// Sets the lag of a stream's consumer, as read from JetStream.
    pub fn set_consumer_lag(&self, stream: Stream, lag: ConsumerLag) {
        self.lag.with_label_values(&[stream.name()]).set((lag.waiting + lag.in_flight).cast_signed());
        self.lags.lock().unwrap_or_else(PoisonError::into_inner).insert(stream.name(), lag);
        self.mark_read("nats");
    }

    /// The lag of a stream's consumer at the last read; `None` before the first.
    #[must_use]
    pub fn consumer_lag(&self, stream: Stream) -> Option<ConsumerLag> {
        self.lags.lock().unwrap_or_else(PoisonError::into_inner).get(stream.name()).copied()
    }

    /// Records that the gauges of [`EntityTotals`] were read.
    pub fn mark_inventory_read(&self) {
        self.mark_read("inventory");
    }

    fn mark_read(&self, from: &str) {
        self.read_at.with_label_values(&[from]).set(chrono::Utc::now().timestamp_micros() as f64 / 1e6);
    }
}

fn as_i64(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// The connections of a pool: those open, and those idle.
#[must_use]
pub fn pool_connections(pool: &PgPool) -> (u32, usize) {
    (pool.size(), pool.num_idle())
}

/// Counts the events of the transitions that this process commits.
#[derive(Clone)]
pub struct EventMetrics {
    committed: IntCounterVec,
    failures: IntCounter,
    timeouts: IntCounter,
    activation: Histogram,
    ssh_keys: IntCounterVec,
}

/// What a commit adds to the metrics once it is applied.
#[derive(Default)]
pub struct CommitObservations {
    counters: Vec<IntCounter>,
    /// How long an allocation took from its request until it was active.
    activation: Option<(Histogram, f64)>,
}

impl CommitObservations {
    /// Adds it to the metrics.
    pub fn record(&self) {
        self.counters.iter().for_each(IntCounter::inc);
        if let Some((histogram, seconds)) = &self.activation {
            histogram.observe(*seconds);
        }
    }
}

/// The reason code of a provisioning that the node did not confirm in time.
const TIMEOUT: &str = "provisioning_timeout";

const KEYS_WRITTEN: &str = "ok";
const KEYS_NOT_WRITTEN: &str = "failed";

impl EventMetrics {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            committed: IntCounterVec::new(
                Opts::new("events_committed_total", "Events committed, by type."),
                &["type"],
            )?,
            failures: IntCounter::new(
                "provisioning_failures_total",
                "Allocations that could not be provisioned, for any reason.",
            )?,
            timeouts: IntCounter::new(
                "provisioning_timeouts_total",
                "Allocations whose node did not confirm in time.",
            )?,
            activation: Histogram::with_opts(
                HistogramOpts::new(
                    "provisioning_active_latency_seconds",
                    "Time from the request for an allocation until it is active; the time in the queue for capacity is part of it.",
                )
                .buckets(vec![1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0]),
            )?,
            ssh_keys: IntCounterVec::new(
                Opts::new("ssh_keys_reconciled_total", "Results of agents that were to write a tenant's SSH keys: ok or failed."),
                &["result"],
            )?,
        };
        for result in [KEYS_WRITTEN, KEYS_NOT_WRITTEN] {
            // Exported from the start, so that a first failure is an increase.
            let _ = metrics.ssh_keys.with_label_values(&[result]);
        }
        registry.register(Box::new(metrics.committed.clone()))?;
        registry.register(Box::new(metrics.failures.clone()))?;
        registry.register(Box::new(metrics.timeouts.clone()))?;
        registry.register(Box::new(metrics.activation.clone()))?;
        registry.register(Box::new(metrics.ssh_keys.clone()))?;
        Ok(metrics)
    }

    /// What to record once this commit is applied.
    #[must_use]
    pub fn observations_of(&self, commit: &Commit) -> CommitObservations {
        let mut observed = CommitObservations::default();
        for (_, event) in &commit.outbox {
            observed.counters.push(self.committed.with_label_values(&[event.subject()]));
            if let Event::ProvisioningFailed { reason, .. } = event {
                observed.counters.push(self.failures.clone());
                if reason == TIMEOUT {
                    observed.counters.push(self.timeouts.clone());
                }
            }
            // The id has the time of the request.
            if let Event::AllocationActive { allocation_id, .. } = event
                && let Some(requested_at) = allocation_id.0.get_timestamp()
            {
                let (seconds, nanos) = requested_at.to_unix();
                let requested_at = seconds as f64 + f64::from(nanos) / 1e9;
                let latency = (commit.at.timestamp_micros() as f64 / 1e6 - requested_at).max(0.0);
                observed.activation = Some((self.activation.clone(), latency));
            }
        }
        for record in &commit.audit {
            if record.action == AuditAction::SshKeysReconcile {
                let is_written = record.metadata["result"] == "ok";
                let result = if is_written { KEYS_WRITTEN } else { KEYS_NOT_WRITTEN };
                observed.counters.push(self.ssh_keys.with_label_values(&[result]));
            }
        }
        observed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::commit::Epoch;
    use domain::state_machine::{IndexKeys, RequestOrigin};
    use domain::{AllocationId, EntityRef, EventId, Shard, Timestamp};
    use uuid::Uuid;

    fn commit(reasons: &[&str]) -> Commit {
        let allocation_id = AllocationId(Uuid::nil());
        let failed = |reason: &&str| {
            let reason = (*reason).to_owned();
            (EventId(Uuid::nil()), Event::ProvisioningFailed { allocation_id, node_id: None, reason })
        };
        Commit {
            entity: EntityRef { kind: EntityKind::Allocation, id: Uuid::nil() },
            shard: Shard(0),
            epoch: Epoch(1),
            expected_version: 1,
            snapshot: String::new(),
            from_state: None,
            to_state: "releasing",
            keys: IndexKeys::default(),
            claims: domain::commit::SetChange::default(),
            terms: domain::commit::SetChange::default(),
            timer: None,
            at: Timestamp::UNIX_EPOCH,
            command_name: "tick",
            why: String::new(),
            actor: String::new(),
            origin: RequestOrigin::untraced(""),
            audit: Vec::new(),
            outbox: reasons.iter().map(failed).collect(),
            postings: Vec::new(),
            summands: Vec::new(),
            command: None,
            requires: Vec::new(),
            patient: false,
        }
    }

    #[test]
    fn provisioning_failures_are_counted_and_timeouts_separately() {
        let metrics = EventMetrics::register(&Registry::new()).unwrap();
        for reasons in [&["simulated_failure"][..], &["provisioning_timeout"], &[]] {
            metrics.observations_of(&commit(reasons)).record();
        }
        assert_eq!((metrics.failures.get(), metrics.timeouts.get()), (2, 1));
        assert_eq!(metrics.committed.with_label_values(&["provisioning.failed"]).get(), 2);
    }

    #[test]
    fn activation_latency_begins_with_the_request_that_is_in_the_allocations_id() {
        let metrics = EventMetrics::register(&Registry::new()).unwrap();
        let requested = uuid::Timestamp::from_unix(uuid::NoContext, 1_700_000_000, 0);
        let (allocation_id, node_id) = (AllocationId(Uuid::new_v7(requested)), domain::NodeId(Uuid::nil()));
        let mut activated = commit(&[]);
        activated.at = Timestamp::from_timestamp(1_700_000_042, 0).unwrap();
        activated.outbox = vec![(EventId(Uuid::nil()), Event::AllocationActive { allocation_id, node_id })];
        let _ = metrics.observations_of(&activated);
        assert_eq!(metrics.activation.get_sample_count(), 0, "it is not applied yet");
        metrics.observations_of(&activated).record();
        assert_eq!((metrics.activation.get_sample_count(), metrics.activation.get_sample_sum()), (1, 42.0));
    }

    #[test]
    fn keys_that_an_agent_did_not_write_are_counted() {
        let metrics = EventMetrics::register(&Registry::new()).unwrap();
        let target = EntityRef { kind: EntityKind::Node, id: Uuid::nil() };
        for result in ["ok", "failed", "failed"] {
            let metadata = serde_json::json!({ "result": result });
            let record = domain::audit::AuditRecord::new(AuditAction::SshKeysReconcile, target, metadata);
            metrics.observations_of(&Commit { audit: vec![record], ..commit(&[]) }).record();
        }
        let counted = |result| metrics.ssh_keys.with_label_values(&[result]).get();
        assert_eq!((counted("ok"), counted("failed")), (1, 2));
    }

    #[test]
    fn failures_are_counted_once_for_any_number_of_scrapes() {
        let metrics = ProcessMetrics::register(&Registry::new(), "m", "all").unwrap();
        for failures_total in [2, 2, 3] {
            let _ = metrics.render(ProcessSample {
                host: HostMetrics { failures_total, ..HostMetrics::default() },
                ..ProcessSample::default()
            });
        }
        assert_eq!(metrics.failures.get(), 3);
    }
}
