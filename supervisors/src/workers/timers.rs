//! Ticks entities whose timer is due, except billing accounts and notification endpoints. The owner of a shard reads the deadline index, so
//! that a timer fires without an active actor, and survives any restart.

use super::WorkerDependencies;
use super::polling_loop::{self, PollLoopConfig};
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::{AskError, CommandContext, CommandReply, Host};
use chrono::{TimeDelta, Utc};
use domain::Visitor;
use domain::authz::authorize;
use domain::{Action, EntityKind, EntityRef, Machine, Permit, Principal};
use futures::FutureExt;
use futures::future::BoxFuture;
use persistence::Reads;
use persistence::outage_log::RetryLog;
use std::sync::Arc;
use std::time::Duration;
use tracing::{Instrument as _, error_span};
use uuid::Uuid;

const POLL_LOOP: PollLoopConfig = PollLoopConfig {
    // How late a deadline may fire.
    interval: Duration::from_millis(200),
    concurrency: 128,
    page_size: PAGE_SIZE as usize,
};

const PAGE_SIZE: u32 = 512;

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { storage, actors, .. } = &parts.stages;
    let shared = (Arc::clone(&actors.host), storage.reads.clone());
    Ok(task(&shared, |(host, reads)| run(host, reads)))
}

/// Ticks due entities, periodically.
///
/// # Errors
/// Never in practice; what fails is retried by the next poll.
pub async fn run(host: Arc<Host>, reads: Reads) -> anyhow::Result<()> {
    let permit = authorize(&Principal::system("timers"), Action::Advance)?;
    let owner = Arc::clone(&host);
    let find_due = move |excluded| find_due(Arc::clone(&owner), reads.clone(), excluded).boxed();
    let work = |entity: EntityRef| {
        let tick = TickVisitor { host: Arc::clone(&host), permit: permit.clone(), entity };
        entity.kind.visit(tick)
    };
    polling_loop::run(POLL_LOOP, find_due, work).await;
    Ok(())
}

async fn find_due(host: Arc<Host>, reads: Reads, excluded: Vec<Uuid>) -> Vec<(Uuid, EntityRef)> {
    let shards: Vec<_> = host.terms().iter().map(|term| term.shard).collect();
    if shards.is_empty() {
        return Vec::new();
    }
    static RETRIES: RetryLog = RetryLog::new("read the deadlines");
    let due = RETRIES.observe(reads.due_timers(&shards, &timed_kinds(), Utc::now(), &excluded, PAGE_SIZE).await);
    due.into_iter().flatten().map(|due| (due.entity.id, due.entity)).collect()
}

/// All kinds but billing accounts, which are due by the thousand ([`super::accrual`] ticks them), and notification endpoints, which are due
/// when a message is ([`super::notification_delivery`] sends it).
fn timed_kinds() -> Vec<EntityKind> {
    let others = |kind: &EntityKind| ![EntityKind::BillingAccount, EntityKind::NotificationEndpoint].contains(kind);
    EntityKind::ALL.iter().copied().filter(others).collect()
}

struct TickVisitor {
    host: Arc<Host>,
    permit: Permit,
    entity: EntityRef,
}

impl Visitor for TickVisitor {
    /// Whether the entity has made progress.
    type Output = BoxFuture<'static, bool>;

    fn visit<M: Machine>(self) -> Self::Output {
        let Self { host, permit, entity } = self;
        async move {
            // The consequences of a timer have a correlation id of their own.
            let correlation_id = format!("timer-{}", Uuid::now_v7());
            let span = error_span!("timer", correlation_id, resource_name = %entity);
            let context = CommandContext::new(&permit, correlation_id, Utc::now() + TimeDelta::seconds(5)).urgent();
            async { made_progress(host.ask::<M>(entity.id, M::tick(), context).await) }.instrument(span).await
        }
        .boxed()
    }
}

/// Whether the entity is no longer due, or belongs to another member.
pub(super) fn made_progress<R, J: std::fmt::Display>(answer: Result<CommandReply<R>, AskError<J>>) -> bool {
    match answer {
        // An entity that does not change stays due, and must not be ticked by every poll.
        Ok(answered) => answered.written,
        // Another member ticks the entities of shards that were handed over.
        Err(AskError::NotOwner) => true,
        // It is shown as parked.
        Err(AskError::Parked { .. }) => false,
        Err(error) => {
            tracing::info!("a due entity could not be woken: {error}");
            false
        }
    }
}
