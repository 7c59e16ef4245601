//! How a node whose certificate has expired recovers its identity (decisions 4).

use super::admission::AdmittedAddress;
use super::enrollment::certificate;
use super::rejection_response::{refused_enrollment, token_refused};
use super::strict_body::StrictJson;
use super::{NodeApi, inventory};
use crate::auth::opaque_token::{self, TokenPurpose};
use crate::http::correlation::Scope;
use crate::http::error::ApiError;
use crate::http::request_body::Path;
use actors::CommandKey;
use actors::sharding::{command_id, digest_of};
use axum::Json;
use axum::extract::State;
use domain::NodeId;
use domain::node::{IdentityRecovery, Reply, Request};
use secrecy::SecretString;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;
use wire::PublicKey;
use wire::enroll::{EnrollAnswer, NonceAnswer, RecoverRequest};

/// `GET /internal/v1/nodes/{id}/recover/nonce`. It reveals nothing of the node, not even whether it exists. The authorities that nodes are
/// verified by are not secret: every handshake names them.
pub(super) async fn nonce(State(api): State<NodeApi>, _: AdmittedAddress, Path(id): Path<Uuid>) -> Json<NonceAnswer> {
    let (trust, now) = (&api.app.trust, api.app.environment.now());
    let minted = trust.nonces.mint(id, now);
    Json(NonceAnswer {
        nonce: minted.value,
        expires_at: minted.until,
        server_time: Some(now),
        node_authorities: Some(trust.keys.load().node.key_ids()),
    })
}

/// `POST /internal/v1/nodes/{id}/recover`. Whatever does not hold has one public answer; the cause is logged and audited.
pub(super) async fn recover(
    State(api): State<NodeApi>,
    _: AdmittedAddress,
    scope: Scope,
    Path(id): Path<Uuid>,
    StrictJson(request): StrictJson<RecoverRequest>,
) -> Result<Json<EnrollAnswer>, ApiError> {
    scope.record_resource(format_args!("node/{id}"));
    let node_id = NodeId(id);
    let agent_version = inventory::agent_version(&request.agent_version)?;
    let presented = SecretString::from(request.enrollment_token.expose());
    let token = opaque_token::read(TokenPurpose::Enrollment, &presented)
        .ok_or_else(|| token_refused("it has not the form of an enrollment token"))?;
    let nonce = api.app.trust.nonces.read(id, &request.nonce);
    let nonce = nonce.ok_or_else(|| token_refused("the nonce was not given out here for this node"))?;
    let node = api.node(node_id).await?.ok_or_else(|| token_refused("there is no such node"))?;
    let key = node.identity.recovery_public_key.clone();
    let key = key.ok_or_else(|| token_refused("the node has no recovery key: it never enrolled"))?;
    let public_key: PublicKey = key.parse().map_err(ApiError::internal)?;
    if !request.is_signed_by(id, &public_key) {
        return Err(token_refused("the signature is not of the node's recovery key"));
    }
    let issued = api.issue(node_id, &request.csr_pem)?;
    let command = Request::Recover(Box::new(IdentityRecovery {
        token_sha256: token.to_bytes(),
        identity_generation: u32::try_from(request.identity_generation).unwrap_or(u32::MAX),
        verified_with: key,
        nonce,
        csr_sha256: Sha256::digest(request.csr_pem.as_bytes()).into(),
        issued: certificate(&issued),
        boot_id: request.boot_id.to_string(),
        agent_version,
        protocol: request.protocol,
    }));
    let once = CommandKey::repeatable(
        command_id(&[b"recover", id.as_bytes(), issued.serial.as_bytes()]),
        digest_of(&[issued.serial.as_bytes()]),
    );
    let answered = api.ask_until_certain(&scope, node_id, command, once).await.map_err(refused_enrollment)?;
    if answered.reply == Reply::CloneSuspected {
        return Err(token_refused("an old identity generation was shown: another machine has this node's state"));
    }
    api.answer(issued, &answered.reply, api.verifier_sets_after(request.verifier_set_version)).map(Json)
}
