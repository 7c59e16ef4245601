//! Notifications: the WebSocket on which users subscribe to them, and operators' broadcasts (decisions 7; specification, *Notification
//! channel*).

use axum::Json;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::{FromRequestParts, State};
use axum::http::{HeaderValue, StatusCode, header, request};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::announcement::{self, Announcement, Command, Reply};
use domain::authz::{Action, Principal, authorize};
use domain::notification::Channel;
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::ToSchema;
use uuid::Uuid;

use super::request_context::{AdminRequest, AuthenticatedUser, replayed};
use super::request_fields::Reason;
use crate::api::idempotency::request_layer::Idempotent;
use crate::app_state::AppState;
use crate::auth::browser_session::has_session_cookie;
use crate::auth::{self, Caller};
use crate::http::error::{ApiError, Code};
use crate::http::request_body;
use crate::http::websocket::{Close, REVOKED, TOKEN, close_now, no_upgrade, offered};
use crate::limits::connection_quota::{ConnectionKind, QuotaExceeded};
use crate::notifications::{Connection, Credential, FULL, NotificationMessage, Switches};

/// The WebSocket subprotocol.
const PROTOCOL: &str = "gpu.notifications.v1";
/// Offered beside it by a client that shows operators what changes. It is never chosen as the protocol.
const OPERATIONS: &str = "gpu.notifications.operations";

/// The longest message of a client, which sends pings alone.
const CLIENT_MESSAGE: usize = 1024;

/// A request to subscribe, before the caller is authorized.
pub(super) struct SubscribeRequest {
    caller: Result<Caller, ApiError>,
    token: Option<SecretString>,
    /// The token came as a subprotocol or in a cookie, as browsers send it. A browser page sees close codes and no HTTP errors.
    is_page: bool,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
    has_protocol: bool,
    wants_operations: bool,
}

impl FromRequestParts<AppState> for SubscribeRequest {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, app: &AppState) -> Result<Self, ApiError> {
        // Proxies log URLs, so a token in a query is no secret.
        if parts.uri.query().is_some() {
            return Err(ApiError::invalid_request(
                "This address takes no query: offer the access token as the subprotocol `bearer.<token>`, and treat one that was in \
                 a URL as known to others.",
            ));
        }
        app.addresses.check_origin(&parts.headers)?;
        let offered = offered(&parts.headers)?;
        let (has_protocol, wants_operations) = (offered.contains(&PROTOCOL), offered.contains(&OPERATIONS));
        let mut tokens = offered.iter().filter_map(|protocol| protocol.strip_prefix("bearer."));
        let (token, second) = (tokens.next().map(|token| SecretString::from(token.to_owned())), tokens.next());
        let is_page = token.is_some();
        if second.is_some() || (is_page && parts.headers.contains_key(header::AUTHORIZATION)) {
            return Err(ApiError::invalid_request(
                "Send one access token: as the subprotocol `bearer.<token>`, or in the header Authorization.",
            ));
        }
        if let Some(token) = token {
            // A subprotocol is visible ASCII, so it is a valid header value.
            let value = HeaderValue::from_str(&format!("Bearer {}", token.expose_secret()));
            let mut value = value.map_err(|_| ApiError::invalid_request("`bearer.<token>` holds no token."))?;
            value.set_sensitive(true);
            parts.headers.insert(header::AUTHORIZATION, value);
        }
        let token = auth::bearer(&parts.headers).ok().map(|token| SecretString::from(token.to_owned()));
        // A cookie adds nothing to a token.
        let is_page = is_page || (token.is_none() && has_session_cookie(&parts.headers));
        let caller = AuthenticatedUser::from_request_parts(parts, app).await.map(|AuthenticatedUser(caller)| caller);
        let upgrade = WebSocketUpgrade::from_request_parts(parts, app).await;
        Ok(Self { caller, token, is_page, upgrade, has_protocol, wants_operations })
    }
}

/// Subscribes to notifications about your resources.
///
/// A WebSocket (RFC 6455, over HTTP/1.1). Offer the subprotocols `gpu.notifications.v1` and `bearer.<access token>`, or send the token in
/// the header `Authorization`; a browser that is logged in to the web console sends its cookie. You receive the channels `user`, `org` where the token names one, and `broadcast`. A client that offers `gpu.notifications.operations` too, and may operate the runtime, receives `operations`: up to four messages a second from each member, `runtime.changed`, which name the entities that changed. Each text message is one
/// `Notification`, the first one `notifications.ready`. Nothing is stored for you: read the current state after you have connected. The
/// connection ends with the access token. Close codes: 4401 the token is not accepted, 4403 it was revoked, or has no role here, 4408 it
/// has ended, 4413 you were too slow, 4429 you have too many connections (policy `notification.connections_per_user`), 1008 your message
/// is not valid, 1009 it is too long, 1012 and 1013 reconnect.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 101, description = "From here on messages come: each is one `Notification`.", body = NotificationMessage)),
    extensions(("x-without-console" = json!("no request: all tabs share one connection to it"))),
)]
pub(super) async fn listen(State(app): State<AppState>, request: SubscribeRequest) -> Result<Response, ApiError> {
    let SubscribeRequest { caller, token, is_page, upgrade, has_protocol, wants_operations } = request;
    let caller = match caller {
        Ok(caller) => caller,
        Err(error) => {
            return match (close_code_of(&error), upgrade) {
                (Some(why), Ok(upgrade)) if is_page && has_protocol => Ok(closed(upgrade, why)),
                _ => Err(error),
            };
        }
    };
    let upgrade = upgrade.map_err(no_upgrade)?;
    if !has_protocol {
        return Err(ApiError::invalid_request(format!("Offer the subprotocol `{PROTOCOL}`.")));
    }
    let credential = match (caller.browser_session, token) {
        (Some(session), _) => Credential::BrowserSession(session),
        (None, Some(token)) => Credential::Token(token),
        (None, None) => return Err(ApiError::internal("a caller was known without a token")),
    };
    let most =
        app.environment.policy().int(ConnectionKind::Notifications.key(), &scopes_of(&caller), app.environment.now());
    let slot = match app.connection_quotas.acquire(ConnectionKind::Notifications, &caller.user_id, most).await {
        Ok(slot) => slot,
        Err(QuotaExceeded::PerUser { .. }) => return Ok(closed(upgrade, FULL)),
        Err(full @ QuotaExceeded::PerProcess) => return Err(full.into()),
    };
    // The token decides on the channels; a client can only leave out the one for operators.
    let mut channels = vec![Channel::User(caller.user_id.clone())];
    channels.extend(caller.org_id.clone().map(Channel::Org));
    channels.push(Channel::Broadcast);
    if wants_operations && may_operate(&caller) {
        channels.push(Channel::Operations);
    }
    let upgrade = upgrade
        .protocols([PROTOCOL])
        .max_message_size(CLIENT_MESSAGE)
        .max_frame_size(CLIENT_MESSAGE)
        .read_buffer_size(CLIENT_MESSAGE)
        .write_buffer_size(0)
        .max_write_buffer_size(64 * 1024);
    Ok(upgrade.on_upgrade(async move |socket| {
        let subscription = app.notifications.listen(channels).await;
        let authenticator = Arc::clone(&app.authenticator);
        let (metrics, stopping) = (app.notifications.metrics().clone(), app.stopping.clone());
        let switches = Switches { environment: Arc::clone(&app.environment), recipient: scopes_of(&caller) };
        let connection =
            Connection { authenticator, metrics, stopping, subscription, switches, credential, caller, slot };
        connection.run(socket).await;
    }))
}

/// Whether the caller may see which entities change.
fn may_operate(caller: &Caller) -> bool {
    let principal = Principal::Caller(caller.clone().into_identity());
    authorize(&principal, Action::OperateRuntime).is_ok()
}

fn scopes_of(caller: &Caller) -> domain::policy::Scopes {
    domain::policy::Scopes {
        user_id: Some(caller.user_id.clone()),
        project_id: caller.project_id.clone(),
        org_id: caller.org_id.clone(),
        plan: caller.plan.clone(),
    }
}

/// The close code for a refusal that is permanent, for a browser page.
fn close_code_of(error: &ApiError) -> Option<Close> {
    match error.code() {
        Code::Unauthenticated | Code::SessionEnded => Some(TOKEN),
        Code::Forbidden => Some(REVOKED),
        _ => None,
    }
}

fn closed(upgrade: WebSocketUpgrade, why: Close) -> Response {
    upgrade.protocols([PROTOCOL]).on_upgrade(async move |mut socket| close_now(&mut socket, why).await)
}

/// The severity of an announcement.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum Severity {
    Info,
    Warning,
    Critical,
}

/// An announcement to be broadcast.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewAnnouncement {
    severity: Severity,
    /// For people, in one line. What looks like a key, a token or a password is refused.
    message: Reason,
}

/// A broadcast announcement.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Announcement)]
pub(super) struct AnnouncementView {
    id: Uuid,
    severity: Severity,
    message: String,
    /// `user:…`
    announced_by: String,
    announced_at: DateTime<Utc>,
}

/// Broadcasts an announcement to all current subscribers.
///
/// It is published on the channel `broadcast` as `notification.announced`, and cannot be withdrawn. Clients that connect later do not
/// receive it.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewAnnouncement,
    responses((status = 201, description = "The broadcast is accepted.", body = AnnouncementView)),
)]
pub(super) async fn broadcast(
    AdminRequest(context): AdminRequest,
    Idempotent(request_body::Json(new)): Idempotent<request_body::Json<NewAnnouncement>>,
) -> Result<impl IntoResponse, ApiError> {
    let context = context.prioritized();
    let command = Command::Announce { severity: new.severity.into(), message: new.message.to_string() };
    let answered = context.ask::<Announcement>(context.new_id(), command).await?;
    let replayed = replayed(&answered);
    let Reply::Announced { announcement } = answered.reply else {
        return Err(ApiError::internal("the machine of announcements answered another question"));
    };
    let Announcement { id, message, by, at, .. } = *announcement;
    let view = AnnouncementView { id: id.0, severity: new.severity, message, announced_by: by, announced_at: at };
    Ok((StatusCode::CREATED, replayed, Json(view)))
}

impl From<Severity> for announcement::Severity {
    fn from(severity: Severity) -> Self {
        match severity {
            Severity::Info => Self::Info,
            Severity::Warning => Self::Warning,
            Severity::Critical => Self::Critical,
        }
    }
}
