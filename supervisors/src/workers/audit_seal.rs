//! Seals the audit rows of this member's shards, and hands the signed heads to an archive outside the database (decisions 7).
//!
//! The archive is the JetStream stream `AUDIT`: whoever can rewrite Postgres cannot take a head back there, and `gpuaas audit verify`
//! compares. While NATS cannot be reached the chains grow on, and the newest heads follow when it is back.

use crate::cluster::bus::Bus;
use actors::Host;
use anyhow::Context as _;
use async_nats::jetstream::stream::{Config, DiscardPolicy, LastRawMessageErrorKind, StorageType, Stream};
use async_nats::{Client, jetstream};
use chrono::Utc;
use domain::Shard;
use domain::commit::Epoch;
use persistence::audit::{Sealer, SignedHead, Turn};
use persistence::cluster::incarnation_of;
use prometheus::{Gauge, IntCounter, IntGauge, Registry};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// A row waits for its seal so long, and the time of one turn.
const TURN: Duration = Duration::from_millis(250);
/// Heads that the archive keeps of one shard; older ones stand in the database.
const KEPT_OF_A_SHARD: i64 = 1024;
const ARCHIVE: &str = "AUDIT";
/// How long the archive may take to answer.
const ARCHIVED_WITHIN: Duration = Duration::from_secs(2);

/// What the sealing is measured by.
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
                "Audit rows of this member's shards that waited at the last look.",
            )?,
            lag: Gauge::new("audit_seal_lag_seconds", "Age of the oldest audit row that waits for its seal.")?,
            sealed: IntCounter::new("audit_sealed_rows_total", "Audit rows that this member sealed.")?,
            broken: IntGauge::new("audit_broken_chains", "Shards whose chain was changed and is not gone on with.")?,
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
    state: Mutex<State>,
}

struct State {
    sealer: Sealer,
    /// The terms under which the archive was asked what it knows.
    asked: BTreeSet<(Shard, Epoch)>,
    /// The newest head of each shard that the archive has not got yet.
    to_archive: BTreeMap<Shard, SignedHead>,
    broken: BTreeSet<Shard>,
    succeeded_at: Instant,
}

impl AuditSeal {
    #[must_use]
    pub fn new(host: Arc<Host>, bus: Bus, sealer: Sealer, metrics: SealMetrics) -> Self {
        let state = State {
            sealer,
            asked: BTreeSet::new(),
            to_archive: BTreeMap::new(),
            broken: BTreeSet::new(),
            succeeded_at: Instant::now(),
        };
        Self { host, bus, metrics, state: Mutex::new(state) }
    }

    /// Seals, turn by turn.
    ///
    /// # Errors
    /// Never; what fails is tried again at the next turn.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut turn = tokio::time::interval(TURN);
        turn.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            turn.tick().await;
            while self.turn().await {}
        }
    }

    /// Seals what waits now. True where more waits than a turn seals.
    pub async fn turn(&self) -> bool {
        let mut state = self.state.lock().await;
        let terms: Vec<_> = self.host.terms().iter().map(|term| (term.shard, term.epoch)).collect();
        if terms.is_empty() {
            state.succeeded_at = Instant::now();
            self.metrics.unsealed.set(0);
            self.metrics.lag.set(0.0);
            return false;
        }
        self.ask_archive(&mut state, &terms).await;
        match state.sealer.turn(&terms, Utc::now()).await {
            Ok(turn) => {
                state.succeeded_at = Instant::now();
                let more = turn.more && turn.sealed > 0;
                self.measure(&turn);
                note_broken(&mut state, &turn);
                self.metrics.broken.set(i64::try_from(state.broken.len()).unwrap_or(i64::MAX));
                state.to_archive.extend(turn.heads.into_iter().map(|head| (head.head.shard, head)));
                self.archive(&mut state).await;
                more
            }
            Err(error) => {
                self.metrics.lag.set(self.metrics.lag.get().max(state.succeeded_at.elapsed().as_secs_f64()));
                tracing::warn!(error = %error, source = %error.source, "audit rows could not be sealed; they are at the next turn");
                false
            }
        }
    }

    fn measure(&self, turn: &Turn) {
        self.metrics.sealed.inc_by(turn.sealed);
        self.metrics.unsealed.set(i64::try_from(turn.waited).unwrap_or(i64::MAX));
        let age = turn.oldest.map_or(0.0, |oldest| (Utc::now() - oldest).as_seconds_f64().max(0.0));
        self.metrics.lag.set(age);
    }

    /// What the archive knows of shards that have come to this member: their chains must not be shorter.
    async fn ask_archive(&self, state: &mut State, terms: &[(Shard, Epoch)]) {
        state.asked.retain(|asked| terms.contains(asked));
        let new: Vec<_> = terms.iter().filter(|term| !state.asked.contains(term)).copied().collect();
        if new.is_empty() || !self.bus.is_connected() {
            return;
        }
        let asking = async {
            let stream = open_archive(self.bus.client()).await?;
            for (shard, epoch) in new {
                if let Some(head) = last_head(&stream, shard).await? {
                    // A database that was restored from a backup has forgotten heads for a known reason: it began anew.
                    if incarnation_of(Epoch(head.head.epoch)) == incarnation_of(epoch) {
                        state.sealer.learn(&head);
                    }
                }
                state.asked.insert((shard, epoch));
            }
            anyhow::Ok(())
        };
        match tokio::time::timeout(ARCHIVED_WITHIN, asking).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(error = format!("{error:#}"), "the archive of audit heads was not asked"),
            Err(_) => tracing::warn!("the archive of audit heads did not answer in time"),
        }
    }

    /// Hands the newest heads over. What fails is tried again at the next turn.
    async fn archive(&self, state: &mut State) {
        if state.to_archive.is_empty() || !self.bus.is_connected() {
            return;
        }
        let handing = async {
            let mut context = jetstream::new(self.bus.client().clone());
            context.set_timeout(ARCHIVED_WITHIN);
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
        match tokio::time::timeout(ARCHIVED_WITHIN, handing).await {
            Ok(Ok(())) => {}
            // The stream may be gone: it is made anew when the archive is asked again.
            Ok(Err(error)) => {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "audit heads were not archived; they are at the next turn"
                );
                state.asked.clear();
            }
            Err(_) => tracing::warn!("audit heads were not archived in time; they are at the next turn"),
        }
    }
}

/// A changed chain wakes someone, once.
fn note_broken(state: &mut State, turn: &Turn) {
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

/// The archive, made where it is missing. Neither a message nor the stream's content can be deleted through it.
async fn open_archive(client: &Client) -> anyhow::Result<Stream> {
    let mut context = jetstream::new(client.clone());
    context.set_timeout(ARCHIVED_WITHIN);
    let config = Config {
        name: ARCHIVE.to_owned(),
        subjects: vec!["audit.head.*".to_owned()],
        storage: StorageType::File,
        discard: DiscardPolicy::Old,
        max_messages_per_subject: KEPT_OF_A_SHARD,
        deny_delete: true,
        deny_purge: true,
        ..Config::default()
    };
    context.get_or_create_stream(config).await.context("the stream AUDIT cannot be opened")
}

async fn last_head(stream: &Stream, shard: Shard) -> anyhow::Result<Option<SignedHead>> {
    match stream.get_last_raw_message_by_subject(&subject(shard)).await {
        // Something else on the subject says nothing; `gpuaas audit verify` names it.
        Ok(message) => Ok(serde_json::from_slice(&message.payload).ok()),
        Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Every head that the archive holds, and how many messages are none.
///
/// # Errors
/// Where the archive cannot be read.
pub async fn archived(client: &Client) -> anyhow::Result<(Vec<SignedHead>, u64)> {
    use futures::StreamExt as _;
    let mut stream = open_archive(client).await?;
    let expected = stream.info().await?.state.messages;
    let (mut heads, mut strange) = (Vec::new(), 0);
    if expected == 0 {
        return Ok((heads, strange));
    }
    let config = jetstream::consumer::pull::OrderedConfig::default();
    let mut messages = stream.create_consumer(config).await?.messages().await?;
    while let Some(message) = messages.next().await {
        let message = message?;
        match serde_json::from_slice(&message.payload) {
            Ok(head) => heads.push(head),
            Err(_) => strange += 1,
        }
        if message.info().map_err(|error| anyhow::anyhow!("{error}"))?.pending == 0 {
            break;
        }
    }
    Ok((heads, strange))
}
