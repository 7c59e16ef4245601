//! Delivers the messages that are queued in notification endpoints (`domain::notification_endpoint`). The owner of a shard that has this
//! role reads the deadline index, as [`super::accrual`] does, and another member with the role reads it for owners without.
//!
//! A message may be sent twice, where a member dies between the attempt and the commit: its receiver recognizes it by its id.

use super::WorkerDependencies;
use super::due_entities::DueEntities;
use super::polling_loop::{self, PollLoopConfig};
use crate::cluster::ClusterView;
use crate::process_roles::ProcessRole;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::shell_dependencies::Environment;
use actors::{CommandContext, Directory};
use chrono::TimeDelta;
use domain::authz::authorize;
use domain::notification_endpoint::{Fact, NotificationEndpoint, Target};
use domain::{Action, EntityKind, EntityRef, Permit, Principal};
use edge::notifications::delivery::NotificationSender;
use futures::FutureExt;
use persistence::Reads;
use persistence::queries::DueTimer;
use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{Instrument as _, error_span};
use uuid::Uuid;

const POLL_LOOP: PollLoopConfig =
    PollLoopConfig { interval: Duration::from_millis(250), concurrency: 64, page_size: PAGE_SIZE as usize };
/// Endpoints in one poll.
const PAGE_SIZE: u32 = 512;
/// Messages that are sent to one endpoint before the others.
const ATTEMPTS_IN_A_ROW: usize = 20;
/// The timeout of the command that records an attempt.
const COMMAND_TIMEOUT: TimeDelta = TimeDelta::seconds(10);
/// How long the owner of an endpoint's shard is searched for.
const OWNER_SEARCH_TIMEOUT: TimeDelta = TimeDelta::seconds(2);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { registry, storage, membership, actors, services, .. } = &parts.stages;
    let environment = Arc::clone(&actors.environment) as Arc<dyn Environment>;
    let (directory, view, reads) = (actors.directory.clone(), Arc::clone(&membership.view), storage.reads.clone());
    let sender = services.services.delivery.clone();
    let delivery = NotificationDelivery::register(registry, directory, view, reads, environment, sender)?;
    Ok(task(&delivery, NotificationDelivery::run))
}

/// Delivers due messages.
pub struct NotificationDelivery {
    directory: Directory,
    due: Arc<DueEntities>,
    reads: Reads,
    environment: Arc<dyn Environment>,
    delivery: NotificationSender,
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
        view: Arc<ClusterView>,
        reads: Reads,
        environment: Arc<dyn Environment>,
        delivery: NotificationSender,
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
                // Exported from the start, so that a first failure is an increase.
                let _ = attempts.with_label_values(&[kind, outcome]);
            }
        }
        let permit = authorize(&Principal::system("notification-delivery"), Action::Advance)?;
        let directory = directory.with_owner_timeout(OWNER_SEARCH_TIMEOUT);
        let due = Arc::new(DueEntities {
            directory: directory.clone(),
            view,
            reads: reads.clone(),
            environment: Arc::clone(&environment),
            role: ProcessRole::NotificationRelay,
            kind: EntityKind::NotificationEndpoint,
            page_size: PAGE_SIZE,
        });
        Ok(Arc::new(Self { directory, due, reads, environment, delivery, permit, attempts, seconds }))
    }

    /// Delivers, periodically.
    ///
    /// # Errors
    /// Never in practice; what fails is retried with a growing backoff.
    pub async fn run(self: Arc<Self>) -> anyhow::Result<()> {
        let due = Arc::clone(&self.due);
        let find_due = move |excluded| Arc::clone(&due).find(excluded).boxed();
        let work = |due: DueTimer| {
            let this = Arc::clone(&self);
            async move { this.deliver_due(due.entity).await }
        };
        polling_loop::run(POLL_LOOP, find_due, work).await;
        Ok(())
    }

    /// Delivers the due messages of an endpoint. Returns whether it has made progress.
    async fn deliver_due(&self, endpoint: EntityRef) -> bool {
        let correlation_id = format!("delivery-{}", Uuid::now_v7());
        let span = error_span!("delivery", correlation_id, resource_name = %endpoint);
        async {
            for _ in 0..ATTEMPTS_IN_A_ROW {
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

    /// Attempts the first due message, and records the outcome in the endpoint. Returns whether another message may be due.
    async fn attempt(&self, entity: EntityRef, correlation_id: &str) -> anyhow::Result<bool> {
        let Some(snapshot) = self.reads.snapshot(entity).await? else { return Ok(false) };
        let endpoint: NotificationEndpoint = serde_json::from_str(&snapshot.body)?;
        let now = self.environment.now();
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
            Ok(()) => (Fact::Delivered { message_id }, true),
            Err(failure) => {
                tracing::info!(message.id = %message_id, why = failure.why, "a message could not be delivered");
                (Fact::Failed { message_id, failure }, false)
            }
        };
        self.attempts.with_label_values(&[kind, if is_delivered { "delivered" } else { "failed" }]).inc();
        let context =
            CommandContext::new(&self.permit, correlation_id.to_owned(), self.environment.now() + COMMAND_TIMEOUT)
                .patient();
        self.directory.ask::<NotificationEndpoint>(&self.permit, entity.id, command.into(), context).await?;
        Ok(is_delivered)
    }
}
