//! Wakes entities whose time has come, but for billing accounts and notification endpoints. The owner of a shard reads the deadline index, so that a deadline fires without its actor
//! having been awake, and survives any restart.

use super::pace::{self, Pacing};
use actors::{Answered, AskError, Asked, Host};
use chrono::{TimeDelta, Utc};
use domain::authz::authorize;
use domain::id::Visitor;
use domain::{Action, EntityRef, Kind, Machine, Permit, Principal};
use futures::FutureExt;
use futures::future::BoxFuture;
use persistence::Reads;
use std::sync::Arc;
use std::time::Duration;
use tracing::{Instrument as _, error_span};
use uuid::Uuid;

const PACING: Pacing = Pacing {
    // How late a deadline may fire.
    each: Duration::from_millis(200),
    at_once: 128,
    full: IN_ONE_LOOK as usize,
};

const IN_ONE_LOOK: u32 = 512;

/// Ticks what is due, turn by turn.
///
/// # Errors
/// Never in practice; what fails is tried again at the next turn.
pub async fn run(host: Arc<Host>, reads: Reads) -> anyhow::Result<()> {
    let permit = authorize(&Principal::system("timers"), Action::Advance)?;
    let owner = Arc::clone(&host);
    let look = move |passed_over| look(Arc::clone(&owner), reads.clone(), passed_over).boxed();
    let work = |entity: EntityRef| {
        let tick = Tick { host: Arc::clone(&host), permit: permit.clone(), entity };
        entity.kind.visit(tick)
    };
    pace::run(PACING, look, work).await;
    Ok(())
}

async fn look(host: Arc<Host>, reads: Reads, passed_over: Vec<Uuid>) -> Vec<(Uuid, EntityRef)> {
    let shards: Vec<_> = host.terms().iter().map(|term| term.shard).collect();
    if shards.is_empty() {
        return Vec::new();
    }
    match reads.due(&shards, &kinds(), Utc::now(), &passed_over, IN_ONE_LOOK).await {
        Ok(due) => due.into_iter().map(|due| (due.entity.id, due.entity)).collect(),
        Err(error) => {
            tracing::warn!(error = %error, "could not read the deadlines");
            Vec::new()
        }
    }
}

/// All but billing accounts, which come due by the thousand ([`super::accrual`] ticks them), and notification endpoints, which are due when a
/// message is ([`super::notification_delivery`] sends it).
fn kinds() -> Vec<Kind> {
    let others = |kind: &Kind| ![Kind::BillingAccount, Kind::NotificationEndpoint].contains(kind);
    Kind::ALL.iter().copied().filter(others).collect()
}

struct Tick {
    host: Arc<Host>,
    permit: Permit,
    entity: EntityRef,
}

impl Visitor for Tick {
    /// Whether the entity has moved on.
    type Output = BoxFuture<'static, bool>;

    fn visit<M: Machine>(self) -> Self::Output {
        let Self { host, permit, entity } = self;
        async move {
            // What a deadline causes is followed by an id of its own.
            let correlation_id = format!("timer-{}", Uuid::now_v7());
            let span = error_span!("timer", correlation_id, resource_name = %entity);
            let asked = Asked::new(&permit, correlation_id, Utc::now() + TimeDelta::seconds(5)).urgently();
            async { moved_on(host.ask::<M>(entity.id, M::tick(), asked).await) }.instrument(span).await
        }
        .boxed()
    }
}

/// Whether what was due is so no more, or is another's.
pub(super) fn moved_on<R, J: std::fmt::Display>(answer: Result<Answered<R>, AskError<J>>) -> bool {
    match answer {
        // One that stays as it is stays due, and is not to be asked at every turn.
        Ok(answered) => answered.written,
        // Shards that left are another's to wake.
        Err(AskError::NotOwner) => true,
        // Shown as such.
        Err(AskError::Parked { .. }) => false,
        Err(error) => {
            tracing::info!("a due entity could not be woken: {error}");
            false
        }
    }
}
