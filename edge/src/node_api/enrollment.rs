//! How a node gets its certificate, and the next one.

use super::admission::{AdmittedAddress, AuthenticatedNode};
use super::rejection_response::{refused, refused_enrollment, token_refused};
use super::strict_body::StrictJson;
use super::{NodeApi, inventory, unexpected};
use crate::auth::opaque_token::{self, TokenPurpose};
use crate::http::correlation::Scope;
use crate::http::error::ApiError;
use crate::http::request_body::Path;
use crate::trust::node_ca::{IssueError, IssuedCertificate};
use actors::CommandKey;
use actors::sharding::{command_id, digest_of};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use domain::NodeId;
use domain::node::{CertificateRecord, Enrollment, Reply, Request};
use domain::policy::{PolicyKey, Scopes};
use secrecy::SecretString;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;
use wire::VerifierSet;
use wire::enroll::{EnrollAnswer, EnrollRequest, RecoveryState, RenewRequest};

/// `POST /internal/v1/nodes/{id}/enroll`. Everything that can be wrong with the request is found before the token is spent.
pub(super) async fn enroll(
    State(api): State<NodeApi>,
    _: AdmittedAddress,
    scope: Scope,
    Path(id): Path<Uuid>,
    StrictJson(request): StrictJson<EnrollRequest>,
) -> Result<(StatusCode, Json<EnrollAnswer>), ApiError> {
    scope.record_resource(format_args!("node/{id}"));
    let node_id = NodeId(id);
    let agent_version = inventory::agent_version(&request.agent_version)?;
    let inventory = inventory::inventory(request.inventory)?;
    let presented = SecretString::from(request.enrollment_token.expose());
    let token = opaque_token::read(TokenPurpose::Enrollment, &presented)
        .ok_or_else(|| token_refused("it has not the form of an enrollment token"))?;
    let issued = api.issue(node_id, &request.csr_pem)?;
    let command = Request::Enroll(Box::new(Enrollment {
        token_sha256: token.to_bytes(),
        csr_sha256: Sha256::digest(request.csr_pem.as_bytes()).into(),
        issued: certificate(&issued),
        recovery_public_key: request.recovery_public_key.to_string(),
        boot_id: request.boot_id.to_string(),
        agent_version,
        protocol: request.protocol,
        inventory,
    }));
    // The serial is unique to this request: the command can be resent by us, not by a client that sends the token again.
    let once = CommandKey::repeatable(
        command_id(&[b"enroll", id.as_bytes(), issued.serial.as_bytes()]),
        digest_of(&[issued.serial.as_bytes()]),
    );
    let answered = api.ask_until_certain(&scope, node_id, command, once).await.map_err(refused_enrollment)?;
    if answered.reply == Reply::SystemRefused {
        return Err(token_refused(
            "the reinstalled machine is not the new system; the node's state_reason has the cause",
        ));
    }
    let answer = api.answer(issued, &answered.reply, api.verifier_sets_after(request.verifier_set_version))?;
    Ok((StatusCode::CREATED, Json(answer)))
}

/// `POST /internal/v1/nodes/{id}/certificate/renew`. The presented certificate stays valid until it expires.
pub(super) async fn renew(
    State(api): State<NodeApi>,
    AuthenticatedNode(node): AuthenticatedNode,
    scope: Scope,
    StrictJson(request): StrictJson<RenewRequest>,
) -> Result<Json<EnrollAnswer>, ApiError> {
    let node_id = NodeId(node.node_id);
    let issued = api.issue(node_id, &request.csr_pem)?;
    let command = Request::Renew { serial: node.serial, issued: certificate(&issued) };
    let answered = api.ask(&scope, node_id, command, |context| context).await.map_err(refused)?;
    // Heartbeats carry rotations: a renewal names no version.
    api.answer(issued, &answered.reply, Vec::new()).map(Json)
}

impl NodeApi {
    pub(super) fn issue(&self, node_id: NodeId, csr_pem: &str) -> Result<IssuedCertificate, ApiError> {
        let environment = &self.app.environment;
        let now = environment.now();
        let ttl = environment.policy().seconds(PolicyKey::NodeCertificateTtl, &Scopes::global(), now);
        let authorities = &self.app.trust.keys.load().node;
        authorities.issue(node_id.0, csr_pem, now, now + ttl).map_err(|error| match error {
            IssueError::Request(csr) => {
                ApiError::invalid_request(format!("The certificate request cannot be used: {csr}."))
                    .detail("field", "csr_pem")
            }
            IssueError::AuthorityEnds(_) | IssueError::NoValidity | IssueError::Sign(_) => ApiError::internal(error),
        })
    }

    /// The verifier sets that an agent with the newest version `version` lacks.
    pub(super) fn verifier_sets_after(&self, version: u64) -> Vec<VerifierSet> {
        self.app.trust.keys.load().task.sets_after(version)
    }

    pub(super) fn answer(
        &self,
        issued: IssuedCertificate,
        reply: &Reply,
        verifier_sets: Vec<VerifierSet>,
    ) -> Result<EnrollAnswer, ApiError> {
        let Reply::Enrolled { identity_generation, recoveries_left } = reply else { return Err(unexpected(reply)) };
        Ok(EnrollAnswer {
            certificate_pem: issued.certificate_pem,
            chain_pem: issued.chain_pem,
            not_after: issued.not_after,
            recovery: RecoveryState {
                identity_generation: u64::from(*identity_generation),
                remaining: *recoveries_left,
            },
            verifier_sets,
            node_ca_bundle_pem: Some(self.app.trust.keys.load().node.bundle_pem()),
        })
    }
}

pub(super) fn certificate(issued: &IssuedCertificate) -> CertificateRecord {
    let authority = Some(issued.authority.clone());
    CertificateRecord { serial: issued.serial.clone(), not_after: issued.not_after, generation: 0, authority }
}
