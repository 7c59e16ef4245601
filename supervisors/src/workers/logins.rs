//! Who may log in: what a user's keys come to for an allocation, and what its node is told of it. Nothing is held here. Both are read, and
//! what was read carries its revision, so that a reading that was overtaken changes nothing.

use super::reactor::{Effect, Heard, Reactor};
use actors::place::id_of_name;
use domain::allocation::{self, Allocation};
use domain::node::{self, Node};
use domain::tenant::Tenant;
use domain::{AllocationId, EntityRef, Machine, NodeId};
use uuid::Uuid;

/// Says which of the user's keys open the allocation.
pub(super) async fn resolve(by: &Reactor, heard: &Heard, id: AllocationId, user_id: &str) -> Effect {
    let (allocation, tenant) = match read(by, id, user_id).await {
        Ok((Some(allocation), Some(tenant))) => (allocation, tenant),
        // Neither is ever removed: there is nobody to be told.
        Ok((None, _) | (_, None)) => return by.settle(heard).await,
        Err(why) => return Effect::Later { why },
    };
    let chosen = allocation.logins().chosen;
    let keys = tenant.logins(chosen.as_deref());
    let command = allocation::Command::AdoptLogins { chosen, keys, logins_revision: tenant.logins_revision };
    by.carry_out::<Allocation>(heard, id.0, command).await
}

async fn read(by: &Reactor, id: AllocationId, user_id: &str) -> Result<(Option<Allocation>, Option<Tenant>), String> {
    // The tenant first: what is chosen after that is chosen of what was read at the same revision, or a later one.
    let tenant = stored::<Tenant>(by, id_of_name(Tenant::KIND, user_id)).await?;
    Ok((stored::<Allocation>(by, id.0).await?, tenant))
}

/// Tells the node which keys open the allocation.
pub(super) async fn tell(by: &Reactor, heard: &Heard, id: AllocationId, node_id: NodeId) -> Effect {
    let logins = match stored::<Allocation>(by, id.0).await {
        Ok(Some(allocation)) => allocation.logins(),
        Ok(None) => return by.settle(heard).await,
        Err(why) => return Effect::Later { why },
    };
    let command = node::Command::ReconcileLogins { allocation_id: id, revision: logins.revision, keys: logins.keys };
    by.carry_out::<Node>(heard, node_id.0, command).await
}

/// As it was committed last: the event that is worked on came out of such a commit.
async fn stored<M: Machine>(by: &Reactor, id: Uuid) -> Result<Option<M>, String> {
    let snapshot = by.reads.snapshot(EntityRef { kind: M::KIND, id }).await.map_err(|error| error.to_string())?;
    let read = snapshot.map(|snapshot| serde_json::from_str(&snapshot.body)).transpose();
    read.map_err(|error| format!("{} {id} cannot be read: {error}", M::KIND))
}
