//! Wakes entities whose time has come. The owner of a shard reads the deadline index, so that a deadline fires without its actor
//! having been awake, and survives any restart.

use actors::{AskError, Asked, Host};
use chrono::{TimeDelta, Utc};
use domain::authz::authorize;
use domain::id::Visitor;
use domain::{Action, EntityRef, Machine, Permit, Principal};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use persistence::Reads;
use std::sync::Arc;
use std::time::Duration;
use tracing::{Instrument as _, error_span};
use uuid::Uuid;

/// How late a deadline may fire.
const TURN: Duration = Duration::from_millis(200);

/// Due entities in one turn; the rest are due at the next.
const IN_ONE_TURN: u32 = 512;

const AT_ONCE: usize = 64;

/// Ticks what is due, turn by turn.
///
/// # Errors
/// Never in practice; what fails is tried again at the next turn.
pub async fn run(host: Arc<Host>, reads: Reads) -> anyhow::Result<()> {
    let permit = authorize(&Principal::system("timers"), Action::Advance)?;
    let mut turn = tokio::time::interval(TURN);
    turn.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        turn.tick().await;
        let shards: Vec<_> = host.terms().iter().map(|term| term.shard).collect();
        if shards.is_empty() {
            continue;
        }
        match reads.due(&shards, Utc::now(), IN_ONE_TURN).await {
            Ok(due) => {
                let ticks = due.into_iter().map(|due| tick(&host, &permit, due.entity));
                futures::stream::iter(ticks).buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
            }
            Err(error) => tracing::warn!(error = %error, "could not read the deadlines"),
        }
    }
}

async fn tick(host: &Arc<Host>, permit: &Permit, entity: EntityRef) {
    entity.kind.visit(Tick { host, permit, entity }).await;
}

struct Tick<'a> {
    host: &'a Arc<Host>,
    permit: &'a Permit,
    entity: EntityRef,
}

impl<'a> Visitor for Tick<'a> {
    type Output = BoxFuture<'a, ()>;

    fn visit<M: Machine>(self) -> Self::Output {
        let Self { host, permit, entity } = self;
        async move {
            // What a deadline causes is followed by an id of its own.
            let correlation_id = format!("timer-{}", Uuid::now_v7());
            let span = error_span!("timer", correlation_id, resource_name = %entity);
            let asked = Asked::new(permit, correlation_id, Utc::now() + TimeDelta::seconds(5)).urgently();
            async {
                match host.ask::<M>(entity.id, M::tick(), asked).await {
                    // Parked entities are shown as such; shards that left are another's to wake.
                    Ok(_) | Err(AskError::Parked { .. } | AskError::NotOwner) => {}
                    Err(error) => tracing::info!("a due entity could not be woken: {error}"),
                }
            }
            .instrument(span)
            .await;
        }
        .boxed()
    }
}
