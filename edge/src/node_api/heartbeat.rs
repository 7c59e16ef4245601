//! Liveness: what an agent says of its machine, and what the control plane tells it in return.

use super::answer::refused;
use super::gate::Speaker;
use super::spoken::Spoken;
use super::{NodeApi, inventory, unexpected};
use crate::correlation::Scope;
use crate::error::ApiError;
use axum::Json;
use axum::extract::State;
use domain::NodeId;
use domain::node::{Command, Reply, Seen};
use domain::policy::{Key, Scopes};
use wire::bundle::fingerprint;
use wire::heartbeat::{Heartbeat, HeartbeatAnswer, PollSettings};

/// `POST /internal/v1/nodes/{id}/heartbeat`. A fenced node's is taken too: its health and inventory are needed to end the fence.
pub(super) async fn beat(
    State(api): State<NodeApi>,
    Speaker(node): Speaker,
    scope: Scope,
    Spoken(beat): Spoken<Heartbeat>,
) -> Result<Json<HeartbeatAnswer>, ApiError> {
    let now = api.services.world.now();
    let seen = Seen {
        boot_id: beat.boot_id.to_string(),
        agent_version: inventory::agent_version(&beat.agent_version)?,
        protocol: beat.protocol,
        // The machine says when: these two are its own.
        last_seen_at: now,
        silent_at: now,
        task_types: beat.task_types.map(inventory::task_types).transpose()?,
    };
    let command = Command::Heartbeat {
        serial: node.serial,
        seen: Box::new(seen),
        inventory: Box::new(inventory::inventory(beat.inventory)?),
        health: Box::new(inventory::health(beat.health).map_err(ApiError::internal)?),
    };
    let answered = api.ask(&scope, NodeId(node.node_id), command, |asked| asked).await.map_err(refused)?;
    let Reply::Heard { next_heartbeat_seconds } = answered.reply else { return Err(unexpected(&answered.reply)) };
    let authorities = &api.services.trust.keys.load().node;
    let spread = api.services.world.policy().int(Key::KeysRenewalSpread, &Scopes::global(), now);
    let spread = u32::try_from(spread).unwrap_or(1);
    let bundle_pem = authorities.bundle_pem();
    let knows_it = beat.node_ca_bundle_fingerprint.is_none_or(|known| known == fingerprint(&bundle_pem));
    Ok(Json(HeartbeatAnswer {
        server_time: api.services.world.now(),
        next_heartbeat_seconds,
        verifier_sets: api.verifier_sets_after(beat.verifier_set_version),
        poll: PollSettings::default(),
        node_ca_bundle_pem: (!knows_it).then_some(bundle_pem),
        renew_within_seconds: authorities.is_outgoing(&node.authority).then_some(spread),
    }))
}
