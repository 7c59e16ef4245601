//! `GET /ws/v1/terminal`: where users connect (decisions 5, *Terminal*).
//!
//! The token is among the offered subprotocols, never in the URL. It is spent, which is audited, before the upgrade. An invalid token is
//! refused with a close code after the upgrade, since a browser shows its page nothing else.

mod attachment;
mod browser;
mod session_end;

use crate::app_state::AppState;
use crate::app_state::read_model::find;
use crate::auth::RevocableLogin;
use crate::http::correlation::{Scope, Service};
use crate::http::error::{ApiError, Code};
use crate::http::router_layers::{Concurrency, RequestTimeout, bounded, mount, with_common_layers};
use crate::http::websocket::{self, Close, close_now, no_upgrade};
use crate::terminal::{PROTOCOL, read_token};
use actors::AskError;
use axum::Router;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::{State, WebSocketUpgrade};
use axum::http::{HeaderMap, Uri};
use axum::response::Response;
use axum::routing::get;
use chrono::TimeDelta;
use domain::allocation::{Allocation, Phase};
use domain::authz::authorize;
use domain::commit::Precondition;
use domain::terminal_session::{Instruction, Rejection, Reply, TerminalSession, TerminalTokenFault, TokenDigest};
use domain::{Action, Permit, Principal, TerminalSessionId};
use secrecy::SecretString;
use std::time::Duration;
use tokio::time::Instant;
use tracing::Instrument as _;
use wire::terminal::MESSAGE;

use attachment::Attachment;
use browser::{Browser, close};
use session_end::SessionEnd;
pub(crate) use session_end::until_session_ends;

/// The gateway's one route.
pub const PATH: &str = wire::address::TERMINAL_PATH;

/// The principal of a connection with a valid token.
const GATEWAY: &str = "terminal-gateway";

const UPGRADE_TIMEOUT: Duration = Duration::from_secs(20);
const MAX_CONCURRENT_UPGRADES: usize = 1024;
const ASK_TIMEOUT: TimeDelta = TimeDelta::seconds(8);

/// The largest message of a user: a paste is sent in many.
const MAX_USER_MESSAGE: usize = 64 * 1024;

/// The gateway, ready to be served at [`PATH`].
pub fn router(app: AppState) -> Router {
    let scope_settings = app.scope_settings(Service { name: "terminal-gateway", shows_route: true });
    let router = Router::new().route(PATH, get(connect)).with_state(app);
    with_common_layers(
        bounded(router, RequestTimeout(UPGRADE_TIMEOUT), Concurrency::at_most(MAX_CONCURRENT_UPGRADES)),
        scope_settings,
    )
}

/// Mounts the gateway on the address of the public API. Each keeps its own layers and its own error details.
pub fn beside(public: Router, app: AppState) -> Router {
    mount(public, PATH, router(app))
}

/// The subprotocols that the client offers.
#[derive(Debug, Default)]
struct OfferedProtocols {
    has_protocol: bool,
    token: Option<SecretString>,
    /// Up to where it has the session's output.
    from: Option<u64>,
}

async fn connect(
    State(app): State<AppState>,
    scope: Scope,
    uri: Uri,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    // URLs are logged by intermediaries.
    if uri.query().is_some() {
        return Err(ApiError::invalid_request(
            "This address takes no query: offer the token as the subprotocol `token.<token>`, and treat one that was in a URL as \
             spent.",
        ));
    }
    app.addresses.check_origin(&headers)?;
    let upgrade = upgrade.map_err(no_upgrade)?;
    let offered = offered(&headers)?;
    if !offered.has_protocol {
        return Err(ApiError::invalid_request(format!("Offer the subprotocol `{PROTOCOL}`.")));
    }
    let Some(token) = offered.token else {
        return Err(ApiError::new(
            Code::TokenInvalid,
            "Offer a terminal token as the subprotocol `token.<token>`; POST /api/v1/allocations/{id}/terminal-tokens makes one.",
        ));
    };
    // In a task of its own: a client that leaves meanwhile drops this future, and the session would stay attached.
    let admission = tokio::spawn(admit(app.clone(), scope, token).in_current_span());
    let admitted = admission.await.map_err(ApiError::internal)??;
    let upgrade = upgrade
        .protocols([PROTOCOL])
        .max_message_size(MAX_USER_MESSAGE)
        .max_frame_size(MAX_USER_MESSAGE)
        // Zero-filled for each read and allocated for as long as the connection: people type a few bytes.
        .read_buffer_size(1024)
        .write_buffer_size(MESSAGE)
        .max_write_buffer_size(8 * MESSAGE);
    Ok(match admitted {
        // A failed upgrade drops the browser, and with it its attachment.
        Ok((attachment, session)) => {
            let browser = Browser { app, session, attachment, from: offered.from, since: Instant::now() };
            upgrade.on_upgrade(move |socket| async move { browser.run(socket).await })
        }
        Err(why) => upgrade.on_upgrade(move |mut socket| async move { close_now(&mut socket, why).await }),
    })
}

fn offered(headers: &HeaderMap) -> Result<OfferedProtocols, ApiError> {
    let mut offered = OfferedProtocols::default();
    for protocol in websocket::offered(headers)? {
        if protocol == PROTOCOL {
            offered.has_protocol = true;
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

/// Spends the token. A permanent refusal is a close code; a temporary one is an error.
async fn admit(
    app: AppState,
    scope: Scope,
    token: SecretString,
) -> Result<Result<(Attachment, TerminalSession), Close>, ApiError> {
    let Some((id, hash)) = read_token(&token) else { return Ok(Err(close::TOKEN)) };
    let Some(session) = find::<TerminalSession>(&app, id.0).await? else { return Ok(Err(close::TOKEN)) };
    scope.record_resource(format_args!("terminal_session/{id}"));
    // A session that was opened while the browser session ended is not in the list that its end closes.
    if let Some(browser_session) = session.it.login_of_token() {
        let login = RevocableLogin::BrowserSession(browser_session);
        if !app.authenticator.is_still_authorized(&login).await? {
            return Ok(Err(close::REVOKED));
        }
    }
    // As it is now: the commit rests on it.
    let allocation = find::<Allocation>(&app, session.it.allocation_id.0).await?;
    let active = allocation.filter(|found| matches!(found.it.phase, Phase::Active { .. }));
    let Some(allocation) = active else { return Ok(Err(close::REVOKED)) };
    let active = Precondition { entity: allocation.it.id.0, version: allocation.version };
    let attach = Instruction::Attach { token_sha256: TokenDigest(hash.to_bytes()), active, gateway: Some(app.member) };
    match ask(&app, &scope, id, attach).await {
        Ok(Reply::Attached { attachment, session }) => {
            app.terminals.metrics().consumed.inc();
            Ok(Ok((Attachment::new(app, scope, &session, attachment), *session)))
        }
        Ok(Reply::Issued { .. } | Reply::Session { .. } | Reply::Done) => {
            Err(ApiError::internal("the terminal session's machine answered another question"))
        }
        Err(AskError::Rejected(Rejection::TokenRefused { cause })) => {
            if cause == TerminalTokenFault::Spent {
                app.terminals.metrics().replayed.inc();
            }
            tracing::warn!(error_code = "token_invalid", cause = %cause, "a terminal token was refused");
            Ok(Err(close::TOKEN))
        }
        Err(AskError::Rejected(Rejection::Closed { reason })) => Ok(Err(close::of(reason))),
        Err(AskError::Rejected(Rejection::NotFound | Rejection::Exists)) => Ok(Err(close::TOKEN)),
        Err(AskError::Overloaded) => Err(ApiError::overloaded()),
        Err(error) => Err(ApiError::unavailable(error)),
    }
}

/// Sends an instruction to the session's state machine as the gateway.
async fn ask(
    app: &AppState,
    scope: &Scope,
    session: TerminalSessionId,
    instruction: Instruction,
) -> Result<Reply, AskError<Rejection>> {
    let permit: Permit = authorize(&Principal::system(GATEWAY), Action::Advance).map_err(|_| AskError::Denied)?;
    let context = scope.command_context(&permit, app.environment.now() + ASK_TIMEOUT).urgent();
    let answered = app.directory.ask::<TerminalSession>(&permit, session.0, instruction.into(), context).await?;
    Ok(answered.reply)
}

#[cfg(test)]
mod tests {
    use super::browser::Browser;

    /// The memory of a user's end besides its connection.
    #[test]
    fn user_connection_takes_a_few_kilobytes() {
        fn size_of_run<A, B, F: Future>(_: impl Fn(A, B) -> F) -> usize {
            size_of::<F>()
        }
        let size = size_of_run(Browser::run);
        assert!(size < 5 * 1024, "{size} bytes");
    }
}
