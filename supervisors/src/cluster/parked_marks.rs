//! Entities that another member has parked: the owner of their shard parks them, too, where it finds their mark.

use actors::Host;
use actors::entity_host::ActivationStatus;
use actors::sharding::shard_of;
use domain::EntityRef;
use persistence::{Cluster, StoreError};

/// Whether the entity is parked in this process.
#[must_use]
pub fn is_parked(host: &Host, entity: EntityRef) -> bool {
    host.entity(entity).is_some_and(|row| row.status == ActivationStatus::Parked)
}

/// Parks the entities of this member's shards that have a mark and are not parked here.
///
/// # Errors
/// [`StoreError`]
pub async fn park_marked(cluster: &Cluster, host: &Host) -> Result<(), StoreError> {
    let shards: Vec<_> = host.terms().iter().map(|term| term.shard).collect();
    for (entity, reason) in cluster.parked(&shards).await? {
        if host.term(shard_of(entity.id)).is_some() && !is_parked(host, entity) {
            host.park(entity, reason);
        }
    }
    Ok(())
}
