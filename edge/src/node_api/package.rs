//! The agent's package, relayed from its registry for the delivery mode `node-api`: a node pulls as itself, by its certificate or, before it
//! has one, by its enrollment token, which is not consumed.

use super::NodeApi;
use super::admission::{AdmittedAddress, AuthenticatedNode};
use super::rejection_response::{refused, refused_enrollment, token_refused};
use crate::auth::bearer;
use crate::auth::opaque_token::{self, TokenHash, TokenPurpose};
use crate::http::correlation::Scope;
use crate::http::error::ApiError;
use crate::http::request_body::Path;
use crate::outbound::package_registry::PackageRegistry;
use axum::extract::{FromRequestParts, RawPathParams, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::request;
use axum::response::{IntoResponse, Response};
use domain::NodeId;
use domain::node::Request;
use secrecy::SecretString;
use uuid::Uuid;
use wire::package::Digest;

const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const SIGNATURE_ENDING: &str = ".sig";

/// A node that may pull, as far as its request shows: its state machine decides.
pub(super) enum PullingNode {
    Certified { node_id: NodeId, serial: String },
    WithToken { node_id: NodeId, token: TokenHash },
}

impl FromRequestParts<NodeApi> for PullingNode {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, api: &NodeApi) -> Result<Self, ApiError> {
        if !parts.headers.contains_key(AUTHORIZATION) {
            let AuthenticatedNode(node) = AuthenticatedNode::from_request_parts(parts, api).await?;
            return Ok(Self::Certified { node_id: NodeId(node.node_id), serial: node.serial });
        }
        AdmittedAddress::from_request_parts(parts, api).await?;
        let presented = SecretString::from(bearer(&parts.headers)?);
        let params = RawPathParams::from_request_parts(parts, api).await.map_err(ApiError::internal)?;
        let id = params.iter().find(|(name, _)| *name == "id").and_then(|(_, id)| Uuid::try_parse(id).ok());
        let id = id.ok_or_else(|| {
            ApiError::invalid_request("The node id in the path cannot be read: expected a UUID.").detail("field", "id")
        })?;
        if let Some(scope) = parts.extensions.get::<Scope>() {
            scope.record_resource(format_args!("node/{id}"));
        }
        let token = opaque_token::read(TokenPurpose::Enrollment, &presented)
            .ok_or_else(|| token_refused("it has not the form of an enrollment token"))?;
        Ok(Self::WithToken { node_id: NodeId(id), token })
    }
}

/// `GET /internal/v1/nodes/{id}/package/manifests/{reference}`: by a digest, or by the tag of a digest's signature.
pub(super) async fn manifest(
    State(api): State<NodeApi>,
    node: PullingNode,
    scope: Scope,
    Path((_, reference)): Path<(Uuid, String)>,
) -> Result<Response, ApiError> {
    let as_digest = reference.strip_suffix(SIGNATURE_ENDING).map(|name| name.replacen("sha256-", "sha256:", 1));
    let name = digest(as_digest.as_deref().unwrap_or(&reference), "reference")?;
    let name = if as_digest.is_some() { name.signature_tag() } else { name.to_string() };
    let manifest = api.registry_for(&node, &scope).await?.manifest(&name).await?;
    Ok(([(CONTENT_TYPE, MANIFEST_TYPE)], manifest).into_response())
}

/// `GET /internal/v1/nodes/{id}/package/blobs/{digest}`.
pub(super) async fn blob(
    State(api): State<NodeApi>,
    node: PullingNode,
    scope: Scope,
    Path((_, reference)): Path<(Uuid, String)>,
) -> Result<Response, ApiError> {
    let digest = digest(&reference, "digest")?;
    Ok(api.registry_for(&node, &scope).await?.blob(&digest.to_string()).await?.into_response())
}

fn digest(text: &str, field: &'static str) -> Result<Digest, ApiError> {
    text.parse().map_err(|_| {
        ApiError::invalid_request("A package is pulled by digest: sha256: and 64 hexadecimal digits.")
            .detail("field", field)
    })
}

impl NodeApi {
    /// The registry, where it is relayed, for a node that is in service or being set up.
    async fn registry_for(&self, node: &PullingNode, scope: &Scope) -> Result<&PackageRegistry, ApiError> {
        match node {
            PullingNode::Certified { node_id, serial } => {
                let identify = Request::Identify { serial: serial.clone() };
                self.ask(scope, *node_id, identify, |context| context).await.map_err(refused)?;
            }
            PullingNode::WithToken { node_id, token } => {
                let present = Request::PresentToken { token_sha256: token.to_bytes() };
                self.ask(scope, *node_id, present, |context| context).await.map_err(refused_enrollment)?;
            }
        }
        self.app.agent_package.registry.as_ref().ok_or_else(|| ApiError::not_found("part of a package"))
    }
}
