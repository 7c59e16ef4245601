//! Seals the audit rows of this member's shards, and archives the signed heads outside the database (decisions 7).
//!
//! The archive is the JetStream stream `AUDIT`: an attacker who can rewrite Postgres cannot remove a head there, and `gpuaas audit verify`
//! compares. While NATS cannot be reached the chains still grow, and the newest heads are archived when it is back.

use super::WorkerDependencies;
use crate::cluster::bus::Bus;
use crate::cluster::stream_copies::open_stream;
use crate::supervisor::{WorkerTask, task};
use actors::Host;
use async_nats::jetstream::stream::{Config, DiscardPolicy, LastRawMessageErrorKind, StorageType, Stream};
use async_nats::{Client, jetstream};
use chrono::Utc;
use domain::Shard;
use domain::commit::Epoch;
use persistence::audit::{SealRun, Sealer, SignedHead};
use persistence::membership::incarnation_of;
use persistence::outage_log::{RetryLog, chain};
use prometheus::{Gauge, IntCounter, IntGauge, Registry};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// How often rows are sealed: a row waits this long, and the time of one round.
const INTERVAL: Duration = Duration::from_millis(250);
/// Heads that the archive stores of one shard; older ones are in the database.
const HEADS_PER_SHARD: i64 = 1024;
pub(crate) const ARCHIVE: &str = "AUDIT";
/// How long the archive may take to answer.
const ARCHIVE_TIMEOUT: Duration = Duration::from_secs(2);
const NO_ANSWER: &str = "the archive did not answer in time";

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    Ok(task(&parts.audit_seal, |seal| async move { seal.run().await }))
}

/// The metrics of the sealing.
#[derive(Clone, Debug)]
pub struct SealMetrics {
    unsealed: IntGauge,
    lag: Gauge,
    sealed: IntCounter,
    broken: IntGauge,
}

impl SealMetrics {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            unsealed: IntGauge::new(
                "audit_unsealed_rows",
                "Audit rows of this member's shards that waited for a seal at the last check.",
            )?,
            lag: Gauge::new("audit_seal_lag_seconds", "Age of the oldest audit row that waits for its seal.")?,
            sealed: IntCounter::new("audit_sealed_rows_total", "Audit rows that this member sealed.")?,
            broken: IntGauge::new("audit_broken_chains", "Shards whose chain was altered and is not extended.")?,
        };
        registry.register(Box::new(metrics.unsealed.clone()))?;
        registry.register(Box::new(metrics.lag.clone()))?;
        registry.register(Box::new(metrics.sealed.clone()))?;
        registry.register(Box::new(metrics.broken.clone()))?;
        Ok(metrics)
    }
}

/// The sealing of one process.
pub struct AuditSeal {
    host: Arc<Host>,
    bus: Bus,
    metrics: SealMetrics,
    state: Mutex<SealState>,
    sealing: RetryLog,
    reading: RetryLog,
    archiving: RetryLog,
}

struct SealState {
    sealer: Sealer,
    /// The terms for which the archive was read.
    asked: BTreeSet<(Shard, Epoch)>,
    /// The newest head of each shard that is not archived yet.
    to_archive: BTreeMap<Shard, SignedHead>,
    broken: BTreeSet<Shard>,
    succeeded_at: Instant,
}

impl AuditSeal {
    #[must_use]
    pub fn new(host: Arc<Host>, bus: Bus, sealer: Sealer, metrics: SealMetrics) -> Self {
        let state = SealState {
            sealer,
            asked: BTreeSet::new(),
            to_archive: BTreeMap::new(),
            broken: BTreeSet::new(),
            succeeded_at: Instant::now(),
        };
        let [sealing, reading, archiving] =
            ["seal audit rows", "read the archive of audit heads", "archive audit heads"].map(RetryLog::new);
        Self { host, bus, metrics, state: Mutex::new(state), sealing, reading, archiving }
    }

    /// Seals, periodically.
    ///
    /// # Errors
    /// Never; what fails is retried in the next round.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut turn = tokio::time::interval(INTERVAL);
        turn.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            turn.tick().await;
            while self.seal_pending().await {}
        }
    }

    /// Seals the waiting rows. Returns true where more wait than one round seals.
    pub async fn seal_pending(&self) -> bool {
        let mut state = self.state.lock().await;
        let terms: Vec<_> = self.host.terms().iter().map(|term| (term.shard, term.epoch)).collect();
        if terms.is_empty() {
            state.succeeded_at = Instant::now();
            self.metrics.unsealed.set(0);
            self.metrics.lag.set(0.0);
            return false;
        }
        self.ask_archive(&mut state, &terms).await;
        match state.sealer.run(&terms, Utc::now()).await {
            Ok(turn) => {
                self.sealing.succeeded();
                state.succeeded_at = Instant::now();
                let more = turn.more && turn.sealed > 0;
                self.measure(&turn);
                record_broken(&mut state, &turn);
                self.metrics.broken.set(i64::try_from(state.broken.len()).unwrap_or(i64::MAX));
                state.to_archive.extend(turn.heads.into_iter().map(|head| (head.head.shard, head)));
                self.archive(&mut state).await;
                more
            }
            Err(error) => {
                self.metrics.lag.set(self.metrics.lag.get().max(state.succeeded_at.elapsed().as_secs_f64()));
                self.sealing.failed(&chain(&error));
                false
            }
        }
    }

    fn measure(&self, turn: &SealRun) {
        self.metrics.sealed.inc_by(turn.sealed);
        self.metrics.unsealed.set(i64::try_from(turn.waited).unwrap_or(i64::MAX));
        let age = turn.oldest.map_or(0.0, |oldest| (Utc::now() - oldest).as_seconds_f64().max(0.0));
        self.metrics.lag.set(age);
    }

    /// Reads the archived heads of newly owned shards: their chains must not be shorter.
    async fn ask_archive(&self, state: &mut SealState, terms: &[(Shard, Epoch)]) {
        state.asked.retain(|asked| terms.contains(asked));
        let new: Vec<_> = terms.iter().filter(|term| !state.asked.contains(term)).copied().collect();
        if new.is_empty() || !self.bus.is_connected() {
            return;
        }
        let asking = async {
            let stream = open_archive(self.bus.client(), self.bus.stream_copies()).await?;
            for (shard, epoch) in new {
                if let Some(head) = last_head(&stream, shard).await? {
                    // A database that was restored from a backup lacks heads for a known reason: it has a new incarnation.
                    if incarnation_of(Epoch(head.head.epoch)) == incarnation_of(epoch) {
                        state.sealer.learn_head(&head);
                    }
                }
                state.asked.insert((shard, epoch));
            }
            anyhow::Ok(())
        };
        match tokio::time::timeout(ARCHIVE_TIMEOUT, asking).await {
            Ok(asked) => {
                let _ = self.reading.observe(asked);
            }
            Err(_) => self.reading.failed(NO_ANSWER),
        }
    }

    /// Archives the newest heads. What fails is retried in the next round.
    async fn archive(&self, state: &mut SealState) {
        if state.to_archive.is_empty() || !self.bus.is_connected() {
            return;
        }
        let handing = async {
            let mut context = jetstream::new(self.bus.client().clone());
            context.set_timeout(ARCHIVE_TIMEOUT);
            let mut sent = Vec::new();
            for (shard, head) in &state.to_archive {
                let payload = serde_json::to_vec(head)?;
                sent.push((*shard, context.publish(subject(*shard), payload.into()).await?));
            }
            for (shard, acknowledgement) in sent {
                acknowledgement.await?;
                state.to_archive.remove(&shard);
            }
            anyhow::Ok(())
        };
        match tokio::time::timeout(ARCHIVE_TIMEOUT, handing).await {
            Ok(archived) => {
                if self.archiving.observe(archived).is_none() {
                    // The stream may be gone: it is created when the archive is read again.
                    state.asked.clear();
                }
            }
            Err(_) => self.archiving.failed(NO_ANSWER),
        }
    }
}

/// Logs a changed chain as an error, once.
fn record_broken(state: &mut SealState, turn: &SealRun) {
    for broken in &turn.broken {
        if state.broken.insert(broken.shard) {
            let reason = &broken.reason;
            tracing::error!(shard = %broken.shard, reason, "the audit log of a shard was changed; it is not sealed any further");
        }
    }
    let mended: Vec<_> = turn.heads.iter().map(|head| head.head.shard).collect();
    state.broken.retain(|shard| !mended.contains(shard));
}

fn subject(shard: Shard) -> String {
    format!("audit.head.{shard}")
}

/// Opens the archive, and creates it where it is missing. Neither a message nor the stream's content can be deleted through it.
async fn open_archive(client: &Client, copies: usize) -> anyhow::Result<Stream> {
    let mut context = jetstream::new(client.clone());
    context.set_timeout(ARCHIVE_TIMEOUT);
    let config = Config {
        name: ARCHIVE.to_owned(),
        subjects: vec!["audit.head.*".to_owned()],
        storage: StorageType::File,
        discard: DiscardPolicy::Old,
        max_messages_per_subject: HEADS_PER_SHARD,
        deny_delete: true,
        deny_purge: true,
        ..Config::default()
    };
    open_stream(&context, config, copies).await
}

async fn last_head(stream: &Stream, shard: Shard) -> anyhow::Result<Option<SignedHead>> {
    match stream.get_last_raw_message_by_subject(&subject(shard)).await {
        // A message that is no head is ignored; `gpuaas audit verify` names it.
        Ok(message) => Ok(strict_json::from_slice(&message.payload).ok()),
        Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Every archived head, and the number of messages that are none.
///
/// # Errors
/// Where the archive cannot be read.
pub async fn archived(client: &Client, copies: usize) -> anyhow::Result<(Vec<SignedHead>, u64)> {
    use futures::StreamExt as _;
    let mut stream = open_archive(client, copies).await?;
    let expected = stream.info().await?.state.messages;
    let (mut heads, mut strange) = (Vec::new(), 0);
    if expected == 0 {
        return Ok((heads, strange));
    }
    let config = jetstream::consumer::pull::OrderedConfig::default();
    let mut messages = stream.create_consumer(config).await?.messages().await?;
    while let Some(message) = messages.next().await {
        let message = message?;
        match strict_json::from_slice(&message.payload) {
            Ok(head) => heads.push(head),
            Err(_) => strange += 1,
        }
        if message.info().map_err(|error| anyhow::anyhow!("{error}"))?.pending == 0 {
            break;
        }
    }
    Ok((heads, strange))
}
