//! `GET /ws/v1/terminal`: where users connect (decisions 5, *Terminal*).
//!
//! The token stands among the offered subprotocols, never in the URL. It is spent, and that is audited, before the upgrade. One that does
//! not hold is told so by a close code after the upgrade, since a browser shows its page nothing else.

use super::browser::{Browser, close};
use super::{PROTOCOL, read_token};
use crate::api::find;
use crate::correlation::{Outermost, Scope, Service};
use crate::error::{ApiError, Code};
use crate::limits::{Concurrency, RequestTimeout, bounded, finished};
use crate::services::Services;
use crate::websocket::{self, Close, check_origin, close_now, no_upgrade};
use actors::AskError;
use axum::Router;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::{MatchedPath, Request, State, WebSocketUpgrade};
use axum::http::{HeaderMap, Uri};
use axum::response::Response;
use axum::routing::get;
use chrono::TimeDelta;
use domain::allocation::{Allocation, Phase};
use domain::authz::authorize;
use domain::commit::Footing;
use domain::terminal_session::{Command, Digest, Rejection, Reply, TerminalSession, TokenCause};
use domain::{Action, Permit, Principal, TerminalSessionId};
use secrecy::SecretString;
use std::time::Duration;
use tokio::time::Instant;
use tower::ServiceExt as _;
use wire::terminal::MESSAGE;

/// The gateway's one route.
pub const PATH: &str = "/ws/v1/terminal";

/// Who acts for a connection, once its token holds.
const GATEWAY: &str = "terminal-gateway";

const UPGRADES_WITHIN: Duration = Duration::from_secs(20);
const UPGRADES_AT_ONCE: usize = 1024;
const ASK_WITHIN: TimeDelta = TimeDelta::seconds(8);

/// A message of a user, at most: a paste comes in many.
const USER_MESSAGE: usize = 64 * 1024;

/// The gateway, ready to be served at [`PATH`].
pub fn router(services: Services) -> Router {
    let outermost = Outermost::of(Service { name: "terminal-gateway", tells_route: true }, &services);
    let router = Router::new().route(PATH, get(connect)).with_state(services);
    finished(bounded(router, RequestTimeout(UPGRADES_WITHIN), Concurrency::at_most(UPGRADES_AT_ONCE)), outermost)
}

/// The gateway on the address of the public API. Each keeps its own layers and its own words.
pub fn beside(public: Router, services: Services) -> Router {
    let gateway = router(services);
    let serve = move |mut request: Request| {
        // The gateway says itself which of its routes this is.
        request.extensions_mut().remove::<MatchedPath>();
        gateway.clone().oneshot(request)
    };
    public.route_service(PATH, tower::service_fn(serve))
}

/// What the client offers as subprotocols.
#[derive(Debug, Default)]
struct Offered {
    speaks: bool,
    token: Option<SecretString>,
    /// Up to where it has the session's output.
    from: Option<u64>,
}

async fn connect(
    State(services): State<Services>,
    scope: Scope,
    uri: Uri,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    // Whatever stands in a URL is written down on its way.
    if uri.query().is_some() {
        return Err(ApiError::invalid_request(
            "This address takes no query: offer the token as the subprotocol `token.<token>`, and treat one that was in a URL as \
             spent.",
        ));
    }
    check_origin(&services, &headers)?;
    let upgrade = upgrade.map_err(no_upgrade)?;
    let offered = offered(&headers)?;
    if !offered.speaks {
        return Err(ApiError::invalid_request(format!("Offer the subprotocol `{PROTOCOL}`.")));
    }
    let Some(token) = offered.token else {
        return Err(ApiError::new(
            Code::TokenInvalid,
            "Offer a terminal token as the subprotocol `token.<token>`; POST /api/v1/allocations/{id}/terminal-tokens makes one.",
        ));
    };
    let admitted = admit(&services, &scope, &token).await?;
    let upgrade = upgrade
        .protocols([PROTOCOL])
        .max_message_size(USER_MESSAGE)
        .max_frame_size(USER_MESSAGE)
        // Filled with zeros for each read and kept for as long as the connection: people type a few bytes.
        .read_buffer_size(1024)
        .write_buffer_size(MESSAGE)
        .max_write_buffer_size(8 * MESSAGE);
    Ok(match admitted {
        Ok((attachment, session)) => upgrade.on_upgrade(move |socket| {
            let (from, since) = (offered.from, Instant::now());
            async move { Browser { services, scope, session, attachment, from, since }.run(socket).await }
        }),
        Err(why) => upgrade.on_upgrade(move |mut socket| async move { close_now(&mut socket, why).await }),
    })
}

fn offered(headers: &HeaderMap) -> Result<Offered, ApiError> {
    let mut offered = Offered::default();
    for protocol in websocket::offered(headers)? {
        if protocol == PROTOCOL {
            offered.speaks = true;
        } else if let Some(token) = protocol.strip_prefix("token.") {
            if offered.token.replace(token.to_owned().into()).is_some() {
                return Err(ApiError::invalid_request("Offer one `token.<token>`, and no second."));
            }
        } else if let Some(from) = protocol.strip_prefix("from.") {
            let position = from.parse().map_err(|_| {
                ApiError::invalid_request("Offer `from.<position>` with the position up to which you have the output.")
            })?;
            offered.from = Some(position);
        }
    }
    Ok(offered)
}

/// Spends the token. What is refused for good is a close code; what may go better next time is an error.
async fn admit(
    services: &Services,
    scope: &Scope,
    token: &SecretString,
) -> Result<Result<(u32, TerminalSession), Close>, ApiError> {
    let Some((id, hash)) = read_token(token) else { return Ok(Err(close::TOKEN)) };
    let Some(session) = find::<TerminalSession>(services, id.0).await? else { return Ok(Err(close::TOKEN)) };
    scope.record_resource(format_args!("terminal_session/{id}"));
    // As it is now: the commit rests on it.
    let allocation = find::<Allocation>(services, session.it.allocation_id.0).await?;
    let active = allocation.filter(|found| matches!(found.it.phase, Phase::Active { .. }));
    let Some(allocation) = active else { return Ok(Err(close::REVOKED)) };
    let active = Footing { entity: allocation.it.id.0, version: allocation.version };
    let command = Command::Attach { token_sha256: Digest(hash.to_bytes()), active };
    match ask(services, scope, id, command).await {
        Ok(Reply::Attached { attachment, session }) => {
            services.terminals.figures().consumed.inc();
            Ok(Ok((attachment, *session)))
        }
        Ok(Reply::Issued { .. } | Reply::Session { .. } | Reply::Done) => {
            Err(ApiError::internal("the terminal session's machine answered another question"))
        }
        Err(AskError::Rejected(Rejection::TokenRefused { cause })) => {
            if cause == TokenCause::Spent {
                services.terminals.figures().replayed.inc();
            }
            tracing::warn!(error_code = "token_invalid", cause = %cause, "a terminal token was refused");
            Ok(Err(close::TOKEN))
        }
        Err(AskError::Rejected(Rejection::Closed { reason })) => Ok(Err(close::of_code(&reason))),
        Err(AskError::Rejected(Rejection::NotFound | Rejection::Exists)) => Ok(Err(close::TOKEN)),
        Err(AskError::Overloaded) => Err(ApiError::overloaded()),
        Err(error) => Err(ApiError::unavailable(error)),
    }
}

/// Asks the session's machine in the gateway's name.
pub(super) async fn ask(
    services: &Services,
    scope: &Scope,
    session: TerminalSessionId,
    command: Command,
) -> Result<Reply, AskError<Rejection>> {
    let permit: Permit = authorize(&Principal::system(GATEWAY), Action::Advance).map_err(|_| AskError::Denied)?;
    let asked = scope.asked(&permit, services.world.now() + ASK_WITHIN).urgently();
    let answered = services.directory.ask::<TerminalSession>(&permit, session.0, command, asked).await?;
    Ok(answered.reply)
}
