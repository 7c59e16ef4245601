//! Seals everything anew after the operator has put another key of the key ring to use (`gpuctl keys rewrap`).
//!
//! It looks at what is left, and takes it up: so it may be interrupted anywhere, and several members do it at once, each the
//! entities of its own shards. When nothing is sealed under a key any more, that key is retired. A member whose key ring seals with
//! another key than the one that was put to use does nothing: it would seal back what the others have sealed.

use crate::cluster::bus::Bus;
use actors::place::shard_of;
use actors::{Asked, Directory, Host};
use chrono::{TimeDelta, Utc};
use domain::allocation::{Allocation, Command as ToAllocation};
use domain::authz::authorize;
use domain::key_set::{Command as ToKeys, KeySet, Phase, Purpose};
use domain::notification_endpoint::{Command as ToEndpoint, NotificationEndpoint};
use domain::processor_event::{Command as ToEvent, ProcessorEvent};
use domain::{Action, Event, Kind, Machine, Permit, Principal};
use edge::keys::{set_id, stored};
use futures::StreamExt;
use persistence::Reads;
use persistence::rewrap::{IN_ENTITIES, Outdated, Rewrap, SealedField};
use prometheus::{IntGauge, Registry};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval};
use uuid::Uuid;

/// How often it is looked whether there is something to do.
const TURN: Duration = Duration::from_secs(5);

/// Entities that are read at once.
const AT_ONCE: u32 = 200;

/// How long one of them may take.
const ASK_WITHIN: TimeDelta = TimeDelta::seconds(5);

/// See the module.
pub struct Rewrapper {
    directory: Directory,
    host: Arc<Host>,
    reads: Reads,
    values: Rewrap,
    left: IntGauge,
    permit: Permit,
    looked: Notify,
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
        let left = IntGauge::new("rewrap_values_left", "Values that are sealed under a key which is going.")?;
        registry.register(Box::new(left.clone()))?;
        let permit = authorize(&Principal::system("rewrap"), Action::Advance)?;
        Ok(Self { directory, host, reads, values, left, permit, looked: Notify::new() })
    }

    /// Works, turn by turn.
    ///
    /// # Errors
    /// Never; what fails is taken up again at the next turn.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut turn = interval(TURN);
        turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = turn.tick() => {}
                () = self.looked.notified() => {}
            }
            if let Err(error) = self.turn().await {
                tracing::warn!(error = format!("{error:#}"), "sealing anew is interrupted, and goes on");
            }
        }
    }

    /// Hears that a key was put to use.
    ///
    /// # Errors
    /// Where the subscription ends.
    pub async fn listen(&self, bus: Bus) -> anyhow::Result<()> {
        let mut words = bus.events(Event::TRUST_CHANGED).await?;
        while words.next().await.is_some() {
            self.looked.notify_one();
        }
        anyhow::bail!("the subscription ended")
    }

    async fn turn(&self) -> anyhow::Result<()> {
        let Some(set) = stored(&self.reads, Purpose::AtRest).await? else { return Ok(()) };
        let of = |phase: Phase| set.keys.iter().filter(move |key| key.standing.phase() == phase);
        let seals = of(Phase::Active).any(|key| key.id == self.values.active());
        if !seals || of(Phase::Grace).next().is_none() {
            return Ok(());
        }
        self.values.secrets().await?;
        self.values.recordings().await?;
        for field in IN_ENTITIES {
            self.entities(field).await?;
        }
        let sealed = self.values.sealed().await?;
        let left = |id: &str| sealed.get(id).copied().unwrap_or(0);
        self.left.set(of(Phase::Grace).map(|key| left(&key.id)).sum::<u64>().cast_signed());
        for key in of(Phase::Grace).filter(|key| left(&key.id) == 0) {
            let command = ToKeys::Emptied { id: key.id.clone() };
            self.directory.ask::<KeySet>(&self.permit, set_id(Purpose::AtRest), command, self.asked()).await?;
            tracing::info!(key.id, "nothing is sealed under key {} of the key ring any more", key.id);
        }
        Ok(())
    }

    /// Those of this member's shards.
    async fn entities(&self, field: SealedField) -> anyhow::Result<()> {
        let mut after = None;
        loop {
            let page = self.values.outdated(field, after, AT_ONCE).await?;
            let Some(last) = page.last() else { return Ok(()) };
            after = Some(last.entity.id);
            for outdated in &page {
                if self.host.term(shard_of(outdated.entity.id)).is_some() {
                    self.reseal(field, outdated).await?;
                }
            }
        }
    }

    async fn reseal(&self, field: SealedField, outdated: &Outdated) -> anyhow::Result<()> {
        let anew = self.values.reseal(field, outdated)?;
        match field.kind {
            Kind::ProcessorEvent => {
                self.tell::<ProcessorEvent>(outdated, ToEvent::Reseal { body_enc: anew }).await;
            }
            Kind::NotificationEndpoint => {
                let command = ToEndpoint::Reseal { secret_enc: anew, is_former: field.is_former_secret() };
                self.tell::<NotificationEndpoint>(outdated, command).await;
            }
            // The one kind that is left of those that hold something sealed.
            _ => self.tell::<Allocation>(outdated, ToAllocation::Reseal { scheduler_request_enc: anew }).await,
        }
        Ok(())
    }

    /// One that is parked or moves at this moment is found again at the next turn.
    async fn tell<M: Machine>(&self, outdated: &Outdated, command: M::Command) {
        if let Err(error) = self.directory.ask::<M>(&self.permit, outdated.entity.id, command, self.asked()).await {
            tracing::debug!(resource_name = %outdated.entity, ?error, "not sealed anew yet");
        }
    }

    fn asked(&self) -> Asked {
        Asked::new(&self.permit, Uuid::now_v7().to_string(), Utc::now() + ASK_WITHIN)
    }
}
