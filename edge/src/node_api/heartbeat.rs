//! Liveness: the agent's report of its machine, and the control plane's settings in return.

use super::admission::AuthenticatedNode;
use super::rejection_response::refused;
use super::strict_body::StrictJson;
use super::{NodeApi, inventory, unexpected};
use crate::fleet_telemetry::NodeSample;
use crate::http::correlation::Scope;
use crate::http::error::ApiError;
use axum::Json;
use axum::extract::State;
use domain::NodeId;
use domain::node::{AgentContact, Reply, Request};
use domain::policy::{PolicyKey, Scopes};
use wire::bundle::fingerprint;
use wire::heartbeat::{Heartbeat, HeartbeatAnswer, LATER_FIELDS, PollSettings};

/// `POST /internal/v1/nodes/{id}/heartbeat`. A fenced node's heartbeat is accepted too: its health and inventory are needed to lift the
/// fence.
pub(super) async fn heartbeat(
    State(api): State<NodeApi>,
    AuthenticatedNode(node): AuthenticatedNode,
    scope: Scope,
    StrictJson(beat): StrictJson<Heartbeat>,
) -> Result<Json<HeartbeatAnswer>, ApiError> {
    let now = api.app.environment.now();
    let seen = AgentContact {
        boot_id: beat.boot_id.to_string(),
        agent_version: inventory::agent_version(&beat.agent_version)?,
        protocol: beat.protocol,
        // The node's state machine sets these three.
        last_seen_at: now,
        silent_at: now,
        last_heartbeat: None,
        task_types: beat.task_types.map(inventory::task_types).transpose()?,
        package_digest: beat.package_digest.and_then(|digest| digest.to_string().parse().ok()),
        session: beat.session,
    };
    let findings = inventory::findings(beat.findings, beat.sent_at);
    // It is judged by the inventory, and so after the bounds of that were checked.
    let checked = inventory::inventory(beat.inventory.clone())?;
    let load = NodeSample::of(&beat.inventory, beat.telemetry, now);
    let command = Request::Heartbeat {
        serial: node.serial,
        seen: Box::new(seen),
        inventory: Box::new(checked),
        health: Box::new(inventory::health(beat.health, findings).map_err(ApiError::internal)?),
    };
    let answered = api.ask(&scope, NodeId(node.node_id), command, |context| context).await.map_err(refused)?;
    let Reply::HeartbeatAccepted { next_heartbeat_seconds, accepted } = answered.reply else {
        return Err(unexpected(&answered.reply));
    };
    // Only the load of a heartbeat that the node's state machine accepted.
    api.app.fleet.record(NodeId(node.node_id), load);
    let authorities = &api.app.trust.keys.load().node;
    let spread = api.app.environment.policy().int(PolicyKey::KeysRenewalSpread, &Scopes::global(), now);
    let spread = u32::try_from(spread).unwrap_or(1);
    let bundle_pem = authorities.bundle_pem();
    let has_bundle = beat.node_ca_bundle_fingerprint.is_none_or(|known| known == fingerprint(&bundle_pem));
    Ok(Json(HeartbeatAnswer {
        server_time: api.app.environment.now(),
        next_heartbeat_seconds,
        verifier_sets: api.verifier_sets_after(beat.verifier_set_version),
        poll: PollSettings::default(),
        node_ca_bundle_pem: (!has_bundle).then_some(bundle_pem),
        renew_within_seconds: authorities.is_outgoing(&node.authority).then_some(spread),
        later_fields: LATER_FIELDS.map(str::to_owned).to_vec(),
        accepted_findings: accepted.into_iter().filter_map(inventory::accepted).collect(),
    }))
}
