//! The token with which a node's collector pushes logs to the gateway.

use super::NodeApi;
use super::admission::AuthenticatedNode;
use super::rejection_response::refused;
use crate::auth::signed_tokens::node_log::NodeLogTokenSubject;
use crate::http::correlation::Scope;
use crate::http::error::ApiError;
use crate::http::request_body::NoBody;
use axum::Json;
use axum::extract::State;
use domain::NodeId;
use domain::node::Request;
use secrecy::ExposeSecret as _;
use wire::SecretToken;
use wire::log_gateway_access::LogTokenAnswer;

/// `POST /internal/v1/nodes/{id}/log-token`.
pub(super) async fn issue(
    State(api): State<NodeApi>,
    AuthenticatedNode(node): AuthenticatedNode,
    scope: Scope,
    _: NoBody,
) -> Result<Json<LogTokenAnswer>, ApiError> {
    let node_id = NodeId(node.node_id);
    let identify = Request::Identify { serial: node.serial.clone() };
    api.ask(&scope, node_id, identify, |context| context).await.map_err(refused)?;
    let subject = NodeLogTokenSubject { node_id, certificate_serial: node.serial };
    let (token, expires_at) = api.app.node_log_tokens().issue(subject, api.app.environment.now())?;
    Ok(Json(LogTokenAnswer { token: SecretToken::new(token.expose_secret()), expires_at }))
}
