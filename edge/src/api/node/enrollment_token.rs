//! Enrollment tokens, and the bundle and script that set a node's machine up.

use super::unexpected;
use crate::api::node::bootstrap_bundle::{bootstrap_bundle, bootstrap_script, package_script, restart_command};
use crate::api::request_context::AdminRequest;
use crate::api::request_fields::{Reason, TokenTtl};
use crate::app_state::AppState;
use crate::app_state::read_model::find;
use crate::auth::opaque_token::{MintedToken, TokenPurpose, mint};
use crate::http::correlation::no_store;
use crate::http::error::ApiError;
use crate::http::request_body::{self, JsonOrDefault, Path};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::node::{Node, Registration, Reissue, Reply, Request};
use domain::{NodeId, TokenId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;
use wire::bundle::BootstrapBundle;
use wire::bundle::env_file::quote;

#[derive(Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct NewToken {
    /// How long the token holds; policy `node.enrollment_token_ttl_seconds` where it is left out.
    ttl_seconds: Option<TokenTtl>,
}

/// A single-use enrollment token, in the bundle that a node is set up with.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct IssuedToken {
    token_id: Uuid,
    expires_at: DateTime<Utc>,
    /// Everything that the node's agent is set up with. It holds the token: it is shown once and stored nowhere.
    #[schema(value_type = Object)]
    bootstrap_bundle: BootstrapBundle,
}

/// The reason for a new token, and whether the current certificate is revoked.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct NewEnrollment {
    reason: Reason,
    /// How long the token holds; policy `node.enrollment_token_ttl_seconds` where it is left out.
    ttl_seconds: Option<TokenTtl>,
    /// The certificate that the node has now is void at once. Without it the node works on with it until it enrolls again.
    #[serde(default)]
    revoke_current_certificate: bool,
}

/// A single-use enrollment token in place of every token before, and what to do with it.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct ReissuedToken {
    token_id: Uuid,
    expires_at: DateTime<Utc>,
    recovery_bundle: RecoveryBundle,
}

#[derive(Serialize, ToSchema)]
pub(in crate::api) struct RecoveryBundle {
    /// Everything that the node's agent is set up with. It holds the token: it is shown once and stored nowhere.
    #[serde(flatten)]
    #[schema(value_type = Object)]
    bundle: BootstrapBundle,
    /// To be run on the machine as root: puts the new token into the agent's environment file, removes its certificate and key, and
    /// restarts it.
    restart_command: String,
}

/// The format of the script.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct NewScript {
    format: ScriptFormat,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum ScriptFormat {
    /// A POSIX shell script for a machine on which the agent is installed.
    Script,
    /// A POSIX shell script that also installs the agent's package, on a machine with nothing but systemd and coreutils. It carries the
    /// program that does so, and has some MiB: 6 at most.
    Package,
}

/// A script that sets a machine up, or up again.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct BootstrapScript {
    token_id: Uuid,
    expires_at: DateTime<Utc>,
    format: ScriptFormat,
    /// To be run on the machine as root, as often as needed. It holds the token: it is shown once and stored nowhere.
    #[schema(max_length = 6_291_456)]
    script: String,
    /// A shell command that brings the machine in over SSH, from where the script is saved as `bootstrap.sh`.
    command: String,
}

/// Issues a single-use enrollment token, which voids an earlier one.
///
/// The answer is a secret: it is stored nowhere, so a repetition issues a new token whatever its `Idempotency-Key`.
#[utoipa::path(
    post,
    path = "/",
    request_body(content = NewToken, description = "May be left out."),
    responses((status = 201, description = "The token, in its bundle. `Cache-Control: no-store`.", body = IssuedToken)),
    extensions(("x-without-console" = json!("the set-up command holds such a token, and is what an administrator pastes"))),
)]
pub(in crate::api) async fn issue_token(
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    JsonOrDefault(new): JsonOrDefault<NewToken>,
) -> Result<Response, ApiError> {
    let (minted, token_id) = (mint(TokenPurpose::Enrollment), Uuid::now_v7());
    let command = Request::IssueToken {
        token_id: TokenId(token_id),
        token_sha256: minted.hash.to_bytes(),
        ttl_seconds: new.ttl_seconds.map(|ttl| ttl.0),
    };
    let answered = context.ask_unstored::<Node>(id, command).await?;
    let Reply::TokenIssued { expires_at } = answered.reply else { return Err(unexpected()) };
    let bootstrap_bundle = bootstrap_bundle(&app, NodeId(id), minted.token);
    let issued = IssuedToken { token_id, expires_at, bootstrap_bundle };
    Ok((StatusCode::CREATED, no_store(), Json(issued)).into_response())
}

/// Issues a token in place of whatever the node had.
///
/// For a machine that lost its identity or its token. Older tokens are void, also the one by which the agent would recover. The answer
/// is a secret: it is stored nowhere, so a repetition issues a new token whatever its `Idempotency-Key`.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewEnrollment,
    responses((status = 200, description = "The token, in its bundle. `Cache-Control: no-store`.", body = ReissuedToken)),
)]
pub(in crate::api) async fn reissue_enrollment(
    by: AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    request_body::Json(asked): request_body::Json<NewEnrollment>,
) -> Result<Response, ApiError> {
    let (token_id, minted) = (Uuid::now_v7(), mint(TokenPurpose::Enrollment));
    let request = ReissueRequest {
        reason: asked.reason.to_string(),
        ttl_seconds: asked.ttl_seconds.map(|ttl| ttl.0),
        revokes: asked.revoke_current_certificate,
    };
    let expires_at = reissue(by, id, token_id, &minted, request).await?;
    let bundle = bootstrap_bundle(&app, NodeId(id), minted.token);
    let restart_command = restart_command(&bundle)?;
    let recovery_bundle = RecoveryBundle { bundle, restart_command };
    Ok((no_store(), Json(ReissuedToken { token_id, expires_at, recovery_bundle })).into_response())
}

/// Writes the script that sets the node's machine up.
///
/// It holds a fresh token, which voids every older one. The answer is a secret: it is stored nowhere. In the format `package` it has up to
/// 6 MiB; where the package is not configured, that format is refused, with the names of the settings.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewScript,
    responses((status = 200, description = "The script. `Cache-Control: no-store`.", body = BootstrapScript)),
)]
pub(in crate::api) async fn write_script(
    by: AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    request_body::Json(asked): request_body::Json<NewScript>,
) -> Result<Response, ApiError> {
    let first_program = match asked.format {
        ScriptFormat::Script => None,
        ScriptFormat::Package => Some(app.agent_package.for_scripts().map_err(|missing| not_packaged(&missing))?),
    };
    let node = find::<Node>(&app, id).await?.ok_or_else(|| ApiError::not_found("node"))?.it;
    let command = remote_command(&node);
    let (token_id, minted) = (Uuid::now_v7(), mint(TokenPurpose::Enrollment));
    let request =
        ReissueRequest { reason: "a bootstrap script was asked for".to_owned(), ttl_seconds: None, revokes: false };
    let expires_at = reissue(by, id, token_id, &minted, request).await?;
    let bundle = bootstrap_bundle(&app, NodeId(id), minted.token);
    let script = match first_program {
        None => bootstrap_script(&bundle)?,
        Some(program) => package_script(&bundle, program)?,
    };
    let written = BootstrapScript { token_id, expires_at, format: asked.format, script, command };
    Ok((no_store(), Json(written)).into_response())
}

fn not_packaged(missing: &[&'static str]) -> ApiError {
    let message = format!(
        "This installation publishes no package of the agent; ask for format `script`, or have the operator set {}.",
        missing.join(", ")
    );
    ApiError::invalid_request(message).detail("field", "format").detail("settings", missing.to_vec())
}

/// Runs the script, from standard input, as root on the node's machine.
fn remote_command(node: &Node) -> String {
    let Registration { ssh_username, host, port, .. } = &node.machine.registration;
    let login = quote(&format!("{ssh_username}@{host}"));
    format!("ssh -p {port} -- {login} sudo sh -s <bootstrap.sh")
}

struct ReissueRequest {
    reason: String,
    ttl_seconds: Option<u32>,
    revokes: bool,
}

async fn reissue(
    AdminRequest(context): AdminRequest,
    id: Uuid,
    token_id: Uuid,
    minted: &MintedToken,
    request: ReissueRequest,
) -> Result<DateTime<Utc>, ApiError> {
    let command = Request::Reissue(Box::new(Reissue {
        token_id: TokenId(token_id),
        token_sha256: minted.hash.to_bytes(),
        ttl_seconds: request.ttl_seconds,
        reason: request.reason,
        revoke_current_certificate: request.revokes,
    }));
    // Exempt from load shedding: a node that an attacker has taken over must lose its identity at once.
    let answered = context.prioritized().ask_unstored::<Node>(id, command).await?;
    let Reply::TokenIssued { expires_at } = answered.reply else { return Err(unexpected()) };
    Ok(expires_at)
}
