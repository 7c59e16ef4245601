//! The way from the cookie of a browser session to the caller of a request (decisions/0070): the control plane holds the provider's tokens,
//! and refreshes them ([`refresh`]); the browser has a cookie, and proves that a page of ours has caused the request ([`same_origin`]).
//! Sessions are opened and ended in [`crate::console_login`].

mod refresh;
pub(crate) mod same_origin;

use actors::{AskError, CommandContext};
use axum::http::request;
use chrono::{TimeDelta, Utc};
use domain::authz::authorize;
use domain::browser_session::{BrowserSession, Instruction, RefreshState, Rejection, Reply};
use domain::{Action, BrowserSessionId, Principal};
use secrecy::ExposeSecret as _;
use uuid::Uuid;

use crate::app_state::AppState;
use crate::auth::Caller;
use crate::auth::browser_session::{SessionTokens, presented, session_ended};
use crate::http::error::{ApiError, Code};

/// The principal of what follows from requests by cookie.
const CONSOLE: &str = "console";

/// How long an entity may take to reply.
const ASK_TIMEOUT: TimeDelta = TimeDelta::seconds(8);

/// An access token that ends within this time is refreshed ahead, beside the request.
const REFRESH_AHEAD: TimeDelta = TimeDelta::seconds(30);

/// The longest time between two records that the browser was seen. A session that ends early for idleness is recorded more often.
const LONGEST_UNSEEN: TimeDelta = TimeDelta::minutes(10);
const RECORDS_PER_IDLE_TIME: i32 = 16;

/// The caller of a request by a session's cookie.
///
/// # Errors
/// `forbidden` where another site may have caused the request; `session_ended`; `service_unavailable` where the session cannot be read, or its
/// access token has ended and the identity provider cannot be reached.
pub(crate) async fn session_caller(app: &AppState, parts: &request::Parts) -> Result<Caller, ApiError> {
    same_origin::check(&app.addresses.public_url, parts)?;
    let cookie = presented(&parts.headers)?;
    let session = app.authenticator.browser_sessions()?.session(&cookie, app.environment.now()).await?;
    let (session, caller) = caller_of(app, session).await?;
    record_seen(app, &session);
    Ok(Caller { browser_session: Some(session.id), ..caller })
}

/// The caller that the session's access token names; it is refreshed where it has ended.
async fn caller_of(app: &AppState, session: BrowserSession) -> Result<(BrowserSession, Caller), ApiError> {
    let tokens = app.authenticator.browser_sessions()?.open(&session)?;
    let left = session.token_ends_at - Utc::now();
    if left > TimeDelta::zero() {
        match app.authenticator.verify_token(tokens.access.expose_secret()).await {
            Ok(caller) => {
                if left < REFRESH_AHEAD && can_refresh(&session, &tokens, app) {
                    refresh::spawn_ahead(app, &session);
                }
                return Ok((session, caller));
            }
            // The provider may have withdrawn the key that signed it.
            Err(error) if error.code() == Code::Unauthenticated => {}
            Err(error) => return Err(error),
        }
    }
    let session = refresh::refreshed(app, session).await?;
    let tokens = app.authenticator.browser_sessions()?.open(&session)?;
    let caller = app.authenticator.verify_token(tokens.access.expose_secret()).await.map_err(|error| {
        let is_refused = error.code() == Code::Unauthenticated;
        if is_refused { session_ended("token_refused").because(error) } else { error }
    })?;
    Ok((session, caller))
}

/// Whether a refresh may begin now, as far as the stored session shows it.
fn can_refresh(session: &BrowserSession, tokens: &SessionTokens, app: &AppState) -> bool {
    let (RefreshState::Idle { not_before: from } | RefreshState::Leased { until: from, .. }) = session.refresh;
    tokens.refresh.is_some() && app.environment.now() >= from
}

/// Records now and then that the browser was seen. The request does not wait for it.
fn record_seen(app: &AppState, session: &BrowserSession) {
    let interval = (session.idle_ends_at - session.last_seen_at) / RECORDS_PER_IDLE_TIME;
    if app.environment.now() - session.last_seen_at < interval.min(LONGEST_UNSEEN) {
        return;
    }
    let (app, id) = (app.clone(), session.id);
    tokio::spawn(async move {
        if let Err(error) = tell(&app, id, Instruction::Touch).await {
            tracing::debug!(%error, "a browser session's last request was not recorded");
        }
    });
}

/// Sends an instruction to the session's entity.
///
/// # Errors
/// `session_ended` where it has ended, or does not exist.
pub(crate) async fn tell(app: &AppState, id: BrowserSessionId, instruction: Instruction) -> Result<Reply, ApiError> {
    let permit = authorize(&Principal::system(CONSOLE), Action::Advance).map_err(ApiError::internal)?;
    let deadline = app.environment.now() + ASK_TIMEOUT;
    let context = CommandContext::new(&permit, Uuid::now_v7().to_string(), deadline).urgent();
    match app.directory.ask::<BrowserSession>(&permit, id.0, instruction.into(), context).await {
        Ok(answered) => Ok(answered.reply),
        Err(AskError::Rejected(Rejection::Ended { reason })) => Err(session_ended(&reason)),
        Err(AskError::Rejected(rejection)) => Err(session_ended("unknown").because(rejection)),
        Err(error) => Err(ApiError::unavailable(error)),
    }
}
