//! The figures of one process (specification, *Observability surface*). What lies in memory is read when somebody asks for the
//! page; what lies in Postgres or NATS is read now and then by the worker `figures`, so that a scrape costs the database nothing.
//!
//! Figures of the shards are those of this process's own shards: the sum over the processes is the cluster's. What belongs to nobody
//! alone (a stream's lag) is said by every process with the role, the same by each.

use actors::host::Figures as Lives;
use chrono::{DateTime, Utc};
use domain::event::Stream;
use domain::key_set::Phase;
use domain::{Commit, Event, Kind};
use edge::keys::Keys;
use persistence::read::{Pending, Standing};
use prometheus::{
    Encoder, Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// What of this process is measured when it is asked.
#[derive(Clone, Debug, Default)]
pub struct Moment {
    pub lives: Lives,
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

/// How far a stream's consumer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lag {
    /// Events that it has not been given.
    pub waiting: u64,
    /// Events that it was given and has not settled.
    pub under_way: u64,
}

/// Gauges and counters of this process.
pub struct ProcessFigures {
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
    lags: Mutex<BTreeMap<&'static str, Lag>>,
    /// Two scrapes at once must not count the same failures twice.
    scraped: Mutex<u64>,
}

impl ProcessFigures {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry, member: &str, roles: &str) -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone())).map(|()| gauge)
        };
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            let gauges = IntGaugeVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(gauges.clone())).map(|()| gauges)
        };
        let info = gauges("build_info", "Always 1; the labels say what runs here.", &["version", "member", "roles"])?;
        info.with_label_values(&[env!("CARGO_PKG_VERSION"), member, roles]).set(1);
        let failures = IntCounter::new("entity_failures_total", "Entities' actors that ended in failure.")?;
        registry.register(Box::new(failures.clone()))?;
        let outbox_age =
            Gauge::new("outbox_oldest_seconds", "Age of the oldest unsettled event of this process's shards.")?;
        registry.register(Box::new(outbox_age.clone()))?;
        let read_at = GaugeVec::new(
            Opts::new("figures_read_timestamp_seconds", "When the figures that are read now and then were read last."),
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
            registry: registry.clone(),
            clock,
            roles: gauges("cluster_role_members", "Living members that have the role.", &["role"])?,
            shards: gauge("shards_owned", "Shards in this process's hands.")?,
            awake: gauge("entities_awake", "Entities that have an actor here.")?,
            parked: gauge("entities_parked", "Entities that failed too often and wait for an operator.")?,
            failing: gauge("entities_failing", "Entities that failed lately and are started again.")?,
            mailbox: gauge("mailbox_waiting_commands", "Commands that wait in front of entities here.")?,
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
            outbox: gauge("outbox_unsettled_events", "Events of this process's shards whose effect is not durable.")?,
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

    /// The page, in the Prometheus text format.
    #[must_use]
    pub fn page(&self, moment: Moment) -> String {
        self.note(moment);
        let mut text = Vec::new();
        match TextEncoder::new().encode(&self.registry.gather(), &mut text) {
            Ok(()) => String::from_utf8(text).unwrap_or_default(),
            Err(error) => {
                tracing::warn!(%error, "the metrics cannot be written down");
                String::new()
            }
        }
    }

    fn note(&self, moment: Moment) {
        let Lives { shards, awake, parked, backing_off, mailbox_depth, failures_total } = moment.lives;
        for (gauge, value) in [
            (&self.shards, shards),
            (&self.awake, awake),
            (&self.parked, parked),
            (&self.failing, backing_off),
            (&self.mailbox, mailbox_depth),
            (&self.polls, moment.parked_polls),
        ] {
            gauge.set(whole(value));
        }
        let in_use = (moment.pool_open as usize).saturating_sub(moment.pool_idle);
        self.pool.with_label_values(&["idle"]).set(whole(moment.pool_idle));
        self.pool.with_label_values(&["in_use"]).set(whole(in_use));
        self.nats.set(i64::from(moment.nats_connected));
        self.lease.set(i64::from(moment.lease_fresh));
        if let Some(offset) = moment.clock_offset {
            self.clock.set(offset);
        }
        for (role, members) in &moment.role_members {
            self.roles.with_label_values(&[role]).set(whole(*members));
        }
        let mut scraped = self.scraped.lock().unwrap_or_else(PoisonError::into_inner);
        self.failures.inc_by(failures_total.saturating_sub(*scraped));
        *scraped = failures_total.max(*scraped);
    }

    /// Where the keys stand that this process goes by.
    pub fn keys(&self, keys: &Keys, now: DateTime<Utc>) {
        self.key_age.reset();
        for (purpose, key) in keys.all() {
            let phase = key.standing.phase();
            if phase != Phase::Retired {
                let age = (now - key.entered_at).as_seconds_f64();
                self.key_age.with_label_values(&[purpose.name(), phase.name(), &key.id]).set(age);
            }
        }
    }

    /// What Postgres says of this process's shards.
    pub fn stands(&self, standing: &Standing, pending: &Pending) {
        self.queue.set(standing.requested.cast_signed());
        for kind in Kind::ALL {
            let overdue = standing.overdue.get(kind).copied().unwrap_or(0);
            self.overdue.with_label_values(&[kind.as_str()]).set(overdue.cast_signed());
        }
        self.outbox.set(pending.rows.cast_signed());
        self.outbox_age.set(pending.oldest.as_secs_f64());
        self.read_now("postgres");
    }

    /// How far accounts and their ledgers are apart.
    pub fn ledger_differs(&self, micro: i64) {
        self.ledger.set(micro);
        self.read_now("ledger");
    }

    /// What JetStream says of a stream's consumer.
    pub fn lags(&self, stream: Stream, lag: Lag) {
        self.lag.with_label_values(&[stream.name()]).set((lag.waiting + lag.under_way).cast_signed());
        self.lags.lock().unwrap_or_else(PoisonError::into_inner).insert(stream.name(), lag);
        self.read_now("nats");
    }

    /// How far a stream's consumer was when it was looked at last; `None` where nobody has looked yet.
    #[must_use]
    pub fn lag_of(&self, stream: Stream) -> Option<Lag> {
        self.lags.lock().unwrap_or_else(PoisonError::into_inner).get(stream.name()).copied()
    }

    fn read_now(&self, from: &str) {
        self.read_at.with_label_values(&[from]).set(chrono::Utc::now().timestamp_micros() as f64 / 1e6);
    }
}

fn whole(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Connections of a pool: open, and of those idle.
#[must_use]
pub fn pool_of(pool: &PgPool) -> (u32, usize) {
    (pool.size(), pool.num_idle())
}

/// Counts the events of transitions that this process committed.
#[derive(Clone)]
pub struct EventFigures {
    committed: IntCounterVec,
    failures: IntCounter,
    timeouts: IntCounter,
}

/// The reason code of a provisioning that the node did not confirm in time.
const TIMEOUT: &str = "provisioning_timeout";

impl EventFigures {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let figures = Self {
            committed: IntCounterVec::new(
                Opts::new("events_committed_total", "Events committed, by type."),
                &["type"],
            )?,
            failures: IntCounter::new(
                "provisioning_failures_total",
                "Allocations that could not be provisioned, for whatever reason.",
            )?,
            timeouts: IntCounter::new(
                "provisioning_timeouts_total",
                "Allocations whose node did not confirm in time.",
            )?,
        };
        registry.register(Box::new(figures.committed.clone()))?;
        registry.register(Box::new(figures.failures.clone()))?;
        registry.register(Box::new(figures.timeouts.clone()))?;
        Ok(figures)
    }

    /// What is to be counted once this commit stands.
    #[must_use]
    pub fn of(&self, commit: &Commit) -> Vec<IntCounter> {
        let mut counters = Vec::new();
        for (_, event) in &commit.outbox {
            counters.push(self.committed.with_label_values(&[event.subject()]));
            if let Event::ProvisioningFailed { reason, .. } = event {
                counters.push(self.failures.clone());
                if reason == TIMEOUT {
                    counters.push(self.timeouts.clone());
                }
            }
        }
        counters
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use domain::commit::Epoch;
    use domain::machine::Keys;
    use domain::{AllocationId, EntityRef, EventId, Shard, Timestamp};
    use uuid::Uuid;

    fn commit(reasons: &[&str]) -> Commit {
        let allocation_id = AllocationId(Uuid::nil());
        let failed = |reason: &&str| {
            let reason = (*reason).to_owned();
            (EventId(Uuid::nil()), Event::ProvisioningFailed { allocation_id, node_id: None, reason })
        };
        Commit {
            entity: EntityRef { kind: Kind::Allocation, id: Uuid::nil() },
            shard: Shard(0),
            epoch: Epoch(1),
            expected_version: 1,
            snapshot: String::new(),
            from_state: None,
            to_state: "releasing",
            keys: Keys::default(),
            claims: domain::commit::SetChange::default(),
            terms: domain::commit::SetChange::default(),
            timer: None,
            at: Timestamp::UNIX_EPOCH,
            command_name: "tick",
            why: String::new(),
            actor: String::new(),
            correlation_id: String::new(),
            traceparent: None,
            tracestate: None,
            audit: Vec::new(),
            outbox: reasons.iter().map(failed).collect(),
            postings: Vec::new(),
            command: None,
            rests_on: Vec::new(),
            patient: false,
        }
    }

    #[test]
    fn a_provisioning_that_fails_is_counted_and_one_that_takes_too_long_as_such() {
        let figures = EventFigures::register(&Registry::new()).unwrap();
        for reasons in [&["simulated_failure"][..], &["provisioning_timeout"], &[]] {
            figures.of(&commit(reasons)).iter().for_each(IntCounter::inc);
        }
        assert_eq!((figures.failures.get(), figures.timeouts.get()), (2, 1));
        assert_eq!(figures.committed.with_label_values(&["provisioning.failed"]).get(), 2);
    }

    #[test]
    fn failures_are_counted_once_however_often_the_page_is_read() {
        let figures = ProcessFigures::register(&Registry::new(), "m", "all").unwrap();
        for failures_total in [2, 2, 3] {
            let _ = figures.page(Moment { lives: Lives { failures_total, ..Lives::default() }, ..Moment::default() });
        }
        assert_eq!(figures.failures.get(), 3);
    }
}
