//! Wakes entities whose time has come. The owner of a shard reads the deadline index, so that a deadline fires without its actor
//! having been awake, and survives any restart.

use super::pace;
use actors::{AskError, Asked, Host};
use chrono::{TimeDelta, Utc};
use domain::authz::authorize;
use domain::id::Visitor;
use domain::{Action, EntityRef, Machine, Permit, Principal};
use futures::FutureExt;
use futures::future::BoxFuture;
use persistence::Reads;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

/// How late a deadline may fire.
const TURN: Duration = Duration::from_millis(200);

/// Due entities in one turn; the rest are due at the next.
const IN_ONE_TURN: u32 = 512;

const AT_ONCE: usize = 128;

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
    pace::run(TURN, AT_ONCE, look, work).await;
    Ok(())
}

async fn look(host: Arc<Host>, reads: Reads, passed_over: Vec<Uuid>) -> Vec<(Uuid, EntityRef)> {
    let shards: Vec<_> = host.terms().iter().map(|term| term.shard).collect();
    if shards.is_empty() {
        return Vec::new();
    }
    match reads.due(&shards, Utc::now(), &passed_over, IN_ONE_TURN).await {
        Ok(due) => due.into_iter().map(|due| (due.entity.id, due.entity)).collect(),
        Err(error) => {
            tracing::warn!(error = %error, "could not read the deadlines");
            Vec::new()
        }
    }
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
            let asked = Asked::new(&permit, "timer", Utc::now() + TimeDelta::seconds(5)).urgently();
            match host.ask::<M>(entity.id, M::tick(), asked).await {
                // One that stays as it is stays due, and is not to be asked at every turn.
                Ok(answered) => answered.written,
                // Shards that left are another's to wake.
                Err(AskError::NotOwner) => true,
                // Shown as such.
                Err(AskError::Parked { .. }) => false,
                Err(error) => {
                    tracing::info!(entity = %entity, "a due entity could not be woken: {error}");
                    false
                }
            }
        }
        .boxed()
    }
}
