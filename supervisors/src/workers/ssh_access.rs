//! SSH access: resolves a user's keys for an allocation, and sends them to its node. This worker holds no state. Both entities are read,
//! and the result carries the revision of the keys, so that a result that is out of date changes nothing.

use super::event_delivery::{Disposition, EventDelivery, ReactionContext};
use actors::sharding::id_of_name;
use domain::allocation::{self, Allocation};
use domain::node::{self, Node};
use domain::tenant::Tenant;
use domain::{AllocationId, EntityRef, Machine, NodeId, UserId};
use uuid::Uuid;

/// Updates the allocation with the user's keys that open it.
pub(super) async fn update_allocation(
    by: &ReactionContext,
    delivery: &EventDelivery,
    id: AllocationId,
    user_id: &UserId,
) -> Disposition {
    let (allocation, tenant) = match read(by, id, user_id).await {
        Ok((Some(allocation), Some(tenant))) => (allocation, tenant),
        // Neither is ever removed: the event is settled without an effect.
        Ok((None, _) | (_, None)) => return by.settle(delivery).await,
        Err(why) => return Disposition::Later { why },
    };
    let chosen = allocation.ssh_access().chosen;
    let keys = tenant.authorized_keys(chosen.as_deref());
    let command = allocation::Fact::LoginsResolved { chosen, keys, logins_revision: tenant.logins_revision };
    by.send_command::<Allocation>(delivery, id.0, command).await
}

async fn read(
    by: &ReactionContext,
    id: AllocationId,
    user_id: &UserId,
) -> Result<(Option<Allocation>, Option<Tenant>), String> {
    // The tenant first: the choice that is read afterwards was made at the same revision of the keys, or a later one.
    let tenant = stored::<Tenant>(by, id_of_name(Tenant::KIND, user_id)).await?;
    Ok((stored::<Allocation>(by, id.0).await?, tenant))
}

/// Updates the node with the keys that open the allocation.
pub(super) async fn update_node(
    by: &ReactionContext,
    delivery: &EventDelivery,
    id: AllocationId,
    node_id: NodeId,
) -> Disposition {
    let logins = match stored::<Allocation>(by, id.0).await {
        Ok(Some(allocation)) => allocation.ssh_access(),
        Ok(None) => return by.settle(delivery).await,
        Err(why) => return Disposition::Later { why },
    };
    let command =
        node::Instruction::ReconcileLogins { allocation_id: id, revision: logins.revision, keys: logins.keys };
    by.send_command::<Node>(delivery, node_id.0, command).await
}

/// The entity as it was last committed: the event itself came from such a commit.
async fn stored<M: Machine>(by: &ReactionContext, id: Uuid) -> Result<Option<M>, String> {
    let snapshot = by.reads.snapshot(EntityRef { kind: M::KIND, id }).await.map_err(|error| error.to_string())?;
    let read = snapshot.map(|snapshot| serde_json::from_str(&snapshot.body)).transpose();
    read.map_err(|error| format!("{} {id} cannot be read: {error}", M::KIND))
}
