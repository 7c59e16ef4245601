//! Rewraps all sealed values after the operator has activated another key of the key ring (`gpuctl keys rewrap`).
//!
//! It reads what is left and rewraps it: so it may be interrupted anywhere, and several members do it at once, each for the entities of
//! its own shards. When nothing is sealed under a key any more, that key is retired. A member whose key ring seals with another key than
//! the activated one does nothing: it would undo the others' work.

use super::WorkerDependencies;
use crate::cluster::bus::Bus;
use crate::supervisor::{WorkerTask, task};
use actors::sharding::shard_of;
use actors::{CommandContext, Directory, Host};
use chrono::{TimeDelta, Utc};
use domain::allocation::{self, Allocation};
use domain::authz::authorize;
use domain::browser_session::{self, BrowserSession};
use domain::key_set::{self, KeySet, KeySetPurpose, Phase};
use domain::notification_endpoint::{self, NotificationEndpoint};
use domain::processor_event::{self, ProcessorEvent};
use domain::{Action, EntityKind, Event, Machine, Permit, Principal};
use edge::trust::current_keys::{set_id, stored};
use futures::StreamExt;
use persistence::Reads;
use persistence::key_rewrap::{OutdatedValue, Rewrap, SEALED_FIELDS, SealedField};
use persistence::outage_log::RetryLog;
use prometheus::{IntGauge, Registry};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval};
use uuid::Uuid;

/// How often values under old keys are looked for.
const INTERVAL: Duration = Duration::from_secs(5);

/// Entities that are read at once.
const PAGE_SIZE: u32 = 200;

/// The timeout of a command to an entity.
const COMMAND_TIMEOUT: TimeDelta = TimeDelta::seconds(5);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    Ok(task(&parts.rewrapper, |rewrapper| async move { rewrapper.run().await }))
}

pub(super) fn start_listener(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let shared = (Arc::clone(&parts.rewrapper), parts.stages.membership.bus.clone());
    Ok(task(&shared, |(rewrapper, bus)| async move { rewrapper.listen(bus).await }))
}

/// Rewraps sealed values under the active key.
pub struct Rewrapper {
    directory: Directory,
    host: Arc<Host>,
    reads: Reads,
    values: Rewrap,
    left: IntGauge,
    permit: Permit,
    wake: Notify,
}

impl Rewrapper {
    /// # Errors
    /// Where the registry has a metric of its name.
    pub fn register(
        registry: &Registry,
        directory: Directory,
        host: Arc<Host>,
        reads: Reads,
        values: Rewrap,
    ) -> anyhow::Result<Self> {
        let left = IntGauge::new("rewrap_values_left", "Values that are sealed under a retiring key.")?;
        registry.register(Box::new(left.clone()))?;
        let permit = authorize(&Principal::system("rewrap"), Action::Advance)?;
        Ok(Self { directory, host, reads, values, left, permit, wake: Notify::new() })
    }

    /// Rewraps, periodically and when notified.
    ///
    /// # Errors
    /// Never; what fails is retried in the next round.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut ticker = interval(INTERVAL);
        ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let retries = RetryLog::new("seal values under the active key");
        loop {
            tokio::select! {
                _ = ticker.tick() => {}
                () = self.wake.notified() => {}
            }
            let _ = retries.observe(self.rewrap_once().await);
        }
    }

    /// Receives the event that a key was activated.
    ///
    /// # Errors
    /// Where the subscription ends.
    pub async fn listen(&self, bus: Bus) -> anyhow::Result<()> {
        let mut events = bus.events(Event::TRUST_CHANGED).await?;
        while events.next().await.is_some() {
            self.wake.notify_one();
        }
        anyhow::bail!("the subscription ended")
    }

    async fn rewrap_once(&self) -> anyhow::Result<()> {
        let Some(set) = stored(&self.reads, KeySetPurpose::AtRest).await? else { return Ok(()) };
        let of = |phase: Phase| set.keys.iter().filter(move |key| key.state.phase() == phase);
        let seals = of(Phase::Active).any(|key| key.id == self.values.active());
        if !seals || of(Phase::Grace).next().is_none() {
            return Ok(());
        }
        self.values.secrets().await?;
        self.values.recordings().await?;
        for field in SEALED_FIELDS {
            self.entities(field).await?;
        }
        let sealed = self.values.sealed().await?;
        let left = |id: &str| sealed.get(id).copied().unwrap_or(0);
        self.left.set(of(Phase::Grace).map(|key| left(&key.id)).sum::<u64>().cast_signed());
        for key in of(Phase::Grace).filter(|key| left(&key.id) == 0) {
            let command = key_set::Fact::Emptied { id: key.id.clone() };
            self.directory
                .ask::<KeySet>(&self.permit, set_id(KeySetPurpose::AtRest), command.into(), self.command_context())
                .await?;
            tracing::info!(key.id, "nothing is sealed under key {} of the key ring any more", key.id);
        }
        Ok(())
    }

    /// Rewraps this field of the entities of this member's shards.
    async fn entities(&self, field: SealedField) -> anyhow::Result<()> {
        let mut after = None;
        loop {
            let page = self.values.outdated(field, after, PAGE_SIZE).await?;
            let Some(last) = page.last() else { return Ok(()) };
            after = Some(last.entity.id);
            for outdated in &page {
                if self.host.term(shard_of(outdated.entity.id)).is_some() {
                    self.reseal(field, outdated).await?;
                }
            }
        }
    }

    async fn reseal(&self, field: SealedField, outdated: &OutdatedValue) -> anyhow::Result<()> {
        let rewrapped = self.values.reseal(field, outdated)?;
        match field.kind {
            EntityKind::ProcessorEvent => {
                self.send_reseal::<ProcessorEvent>(
                    outdated,
                    processor_event::Maintenance::Reseal { body_enc: rewrapped },
                )
                .await;
            }
            EntityKind::NotificationEndpoint => {
                let command = notification_endpoint::Maintenance::Reseal {
                    secret_enc: rewrapped,
                    is_former: field.is_former_secret(),
                };
                self.send_reseal::<NotificationEndpoint>(outdated, command).await;
            }
            EntityKind::BrowserSession => {
                let command =
                    browser_session::Maintenance::Reseal { before: outdated.sealed.clone(), tokens_enc: rewrapped };
                self.send_reseal::<BrowserSession>(outdated, command).await;
            }
            // The only other kind with a sealed field.
            _ => {
                let command = allocation::Maintenance::Reseal { scheduler_request_enc: rewrapped };
                self.send_reseal::<Allocation>(outdated, command).await;
            }
        }
        Ok(())
    }

    /// Sends the command. An entity that is parked or moves at this moment is found again in the next round.
    async fn send_reseal<M: Machine>(&self, outdated: &OutdatedValue, command: impl Into<M::Command>) {
        if let Err(error) =
            self.directory.ask::<M>(&self.permit, outdated.entity.id, command.into(), self.command_context()).await
        {
            tracing::debug!(resource_name = %outdated.entity, ?error, "not resealed yet");
        }
    }

    fn command_context(&self) -> CommandContext {
        CommandContext::new(&self.permit, Uuid::now_v7().to_string(), Utc::now() + COMMAND_TIMEOUT)
    }
}
