//! Reads the next nodes of a rollout's selector and sends them to it.
//!
//! Nothing is stored here: the rollout asks again where it is not answered, and counts a page that comes twice once.

use super::event_delivery::{Disposition, EventDelivery, ReactionContext};
use domain::rollout::{Fact, Rollout};
use domain::{EntityKind, EntityRef, RolloutId};
use edge::app_state::rollout_nodes::RolloutScope;

/// The page that the rollout waits for.
pub(super) async fn find(context: &ReactionContext, delivery: &EventDelivery, rollout_id: RolloutId) -> Disposition {
    // As it is committed, and not as it may be in the memory of a member that another one has replaced.
    let entity = EntityRef { kind: EntityKind::Rollout, id: rollout_id.0 };
    let rollout = match context.reads.snapshot(entity).await {
        Ok(Some(snapshot)) => serde_json::from_str::<Rollout>(&snapshot.body),
        Ok(None) => return context.settle(delivery).await,
        Err(error) => return Disposition::Later { why: error.to_string() },
    };
    let rollout = match rollout {
        Ok(rollout) => rollout,
        Err(error) => return Disposition::Later { why: format!("rollout {rollout_id} cannot be read: {error}") },
    };
    if rollout.feed.due.is_none() || rollout.has_ended() {
        return context.settle(delivery).await;
    }
    let order = &rollout.order;
    let scope = RolloutScope {
        selector: &order.selector,
        digest: &order.digest,
        includes_held: order.includes_held,
        created_at: rollout.created_at,
    };
    match scope.page(&context.reads, rollout.feed.after).await {
        Ok(page) => {
            context.send_command::<Rollout>(delivery, rollout_id.0, Fact::NodesFound { page: Box::new(page) }).await
        }
        Err(error) => Disposition::Later { why: error.to_string() },
    }
}
