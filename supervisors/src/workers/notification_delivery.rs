//! Sends the messages that wait in notification endpoints (`domain::notification_endpoint`). The member that owns a shard and has this role
//! reads the deadline index, as [`super::accrual`] does, and another member that has the role reads it for owners without.
//!
//! A message may be sent twice, where a member dies between the attempt and the commit: its receiver knows it by its id.

use super::pace::{self, Pacing};
use crate::cluster::View;
use crate::config::Role;
use actors::ports::World;
use actors::{Asked, Directory};
use chrono::TimeDelta;
use domain::authz::authorize;
use domain::notification_endpoint::{Command, NotificationEndpoint, Target};
use domain::{Action, EntityRef, Kind, Permit, Principal};
use edge::delivery::Delivery;
use futures::FutureExt;
use persistence::Reads;
use persistence::read::Due;
use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{Instrument as _, error_span};
use uuid::Uuid;

const PACING: Pacing = Pacing { each: Duration::from_millis(250), at_once: 64, full: IN_ONE_LOOK as usize };
/// Endpoints in one look.
const IN_ONE_LOOK: u32 = 512;
/// Messages that an endpoint is sent before the others have their turn.
const IN_A_ROW: usize = 20;
/// How long the machine may take to note what came of an attempt.
const NOTED_WITHIN: TimeDelta = TimeDelta::seconds(10);
/// How long the owner of an endpoint's shard is looked for.
const SEEKS_FOR: TimeDelta = TimeDelta::seconds(2);

/// Sends what is due.
pub struct NotificationDelivery {
    directory: Directory,
    view: Arc<View>,
    reads: Reads,
    world: Arc<dyn World>,
    delivery: Delivery,
    permit: Permit,
    attempts: IntCounterVec,
    seconds: HistogramVec,
}

impl NotificationDelivery {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(
        registry: &Registry,
        directory: Directory,
        view: Arc<View>,
        reads: Reads,
        world: Arc<dyn World>,
        delivery: Delivery,
    ) -> anyhow::Result<Arc<Self>> {
        let attempts = IntCounterVec::new(
            Opts::new("notification_delivery_attempts_total", "Attempts to deliver a message to an endpoint."),
            &["kind", "outcome"],
        )?;
        let buckets = vec![0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0];
        let seconds = HistogramVec::new(
            HistogramOpts::new("notification_delivery_seconds", "How long an attempt took.").buckets(buckets),
            &["kind"],
        )?;
        registry.register(Box::new(attempts.clone()))?;
        registry.register(Box::new(seconds.clone()))?;
        for kind in ["webhook", "email"] {
            for outcome in ["delivered", "failed"] {
                // Shown from the beginning on, so that a first failure is an increase.
                let _ = attempts.with_label_values(&[kind, outcome]);
            }
        }
        let permit = authorize(&Principal::system("notification-delivery"), Action::Advance)?;
        let directory = directory.seeking_for(SEEKS_FOR);
        Ok(Arc::new(Self { directory, view, reads, world, delivery, permit, attempts, seconds }))
    }

    /// Sends, turn by turn.
    ///
    /// # Errors
    /// Never in practice; what fails is tried again, ever more seldom.
    pub async fn run(self: Arc<Self>) -> anyhow::Result<()> {
        let here = Arc::clone(&self);
        let look = move |passed_over| Arc::clone(&here).look(passed_over).boxed();
        let work = |due: Due| {
            let here = Arc::clone(&self);
            async move { here.serve(due.entity).await }
        };
        pace::run(PACING, look, work).await;
        Ok(())
    }

    async fn look(self: Arc<Self>, passed_over: Vec<Uuid>) -> Vec<(Uuid, Due)> {
        let host = self.directory.host();
        let mut shards: Vec<_> = host.terms().iter().map(|term| term.shard).collect();
        shards.extend(self.view.shards_without(Role::NotificationRelay));
        if shards.is_empty() {
            return Vec::new();
        }
        let kinds = [Kind::NotificationEndpoint];
        match self.reads.due(&shards, &kinds, self.world.now(), &passed_over, IN_ONE_LOOK).await {
            Ok(due) => due.into_iter().map(|due| (due.entity.id, due)).collect(),
            Err(error) => {
                tracing::warn!(%error, "could not read which endpoints have messages to send");
                Vec::new()
            }
        }
    }

    /// Whether the endpoint has moved on.
    async fn serve(&self, endpoint: EntityRef) -> bool {
        let correlation_id = format!("delivery-{}", Uuid::now_v7());
        let span = error_span!("delivery", correlation_id, resource_name = %endpoint);
        async {
            for _ in 0..IN_A_ROW {
                match self.attempt(endpoint, &correlation_id).await {
                    Ok(true) => {}
                    Ok(false) => return true,
                    Err(error) => {
                        tracing::info!(error = format!("{error:#}"), "a message has to wait");
                        return false;
                    }
                }
            }
            true
        }
        .instrument(span)
        .await
    }

    /// Makes an attempt at the first message that is due, and has the machine note what came of it. Answers whether there may be another one.
    async fn attempt(&self, entity: EntityRef, correlation_id: &str) -> anyhow::Result<bool> {
        let Some(snapshot) = self.reads.snapshot(entity).await? else { return Ok(false) };
        let endpoint: NotificationEndpoint = serde_json::from_str(&snapshot.body)?;
        let now = self.world.now();
        let Some(waiting) = endpoint.queue.due(now).filter(|_| endpoint.is_enabled()) else { return Ok(false) };
        let began = Instant::now();
        let outcome = self.delivery.attempt(&endpoint, &waiting.message, now).await;
        let kind = match endpoint.target {
            Target::Webhook { .. } => "webhook",
            Target::Email { .. } => "email",
        };
        self.seconds.with_label_values(&[kind]).observe(began.elapsed().as_secs_f64());
        let message_id = waiting.message.id;
        let (command, is_delivered) = match outcome {
            Ok(()) => (Command::Delivered { message_id }, true),
            Err(failure) => {
                tracing::info!(message.id = %message_id, why = failure.why, "a message could not be delivered");
                (Command::Failed { message_id, failure }, false)
            }
        };
        self.attempts.with_label_values(&[kind, if is_delivered { "delivered" } else { "failed" }]).inc();
        let asked = Asked::new(&self.permit, correlation_id.to_owned(), self.world.now() + NOTED_WITHIN).patiently();
        self.directory.ask::<NotificationEndpoint>(&self.permit, entity.id, command, asked).await?;
        Ok(is_delivered)
    }
}
