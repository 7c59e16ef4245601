//! The refresh of a session's tokens: one call to the identity provider for all tabs and replicas, by the holder of the lease that the
//! session's entity gives.

use chrono::{DateTime, Utc};
use domain::BrowserSessionId;
use domain::browser_session::{BrowserSession, Instruction, REFRESH_NOTICE, RefreshState, Reply};
use secrecy::ExposeSecret as _;
use std::time::Duration;
use tokio::time::Instant;

use super::{ASK_TIMEOUT, tell};
use crate::app_state::AppState;
use crate::app_state::read_model::wait_until;
use crate::auth::browser_session::{SessionTokens, session_ended};
use crate::auth::openid_provider::{IssuedTokens, ProviderError, ProviderFault};
use crate::http::error::{ApiError, Code};

/// How long a request waits for a refresh that another one has begun: longer than its call may take.
const WAIT: Duration = Duration::from_secs(12);
const STEP: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_millis(50);

/// The life of an access token that does not say it, and cannot be verified at the moment.
const UNKNOWN_LIFE: Duration = Duration::from_secs(60);

/// How long the verification of issued tokens may take, which waits for the provider's keys where it has changed them.
const VERIFY_FOR: Duration = Duration::from_secs(2);

/// How long issued tokens are sent to the session's entity again where it does not answer: longer than most outages of the database take.
const STORE_FOR: Duration = Duration::from_mins(15);
const FIRST_STORE_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_STORE_PAUSE: Duration = Duration::from_secs(2);

// Tokens are sent at least once within the notice of the next refresh.
const _: () = assert!(
    ASK_TIMEOUT.num_seconds() + LONGEST_STORE_PAUSE.as_secs().cast_signed() < REFRESH_NOTICE.num_seconds(),
    "the notice is too short"
);

/// Refreshes the tokens beside the request, which goes on with those that it has.
pub(super) fn spawn_ahead(app: &AppState, session: &BrowserSession) {
    let (app, session) = (app.clone(), session.clone());
    tokio::spawn(async move {
        match begin(&app, &session).await {
            Ok(Reply::Leased { attempt, session }) => {
                if let Err(error) = run(app, attempt, *session).await {
                    tracing::info!(%error, "a browser session was not refreshed ahead");
                }
            }
            Ok(Reply::Session { .. } | Reply::Wait | Reply::Done) => {}
            Err(error) => tracing::debug!(%error, "a refresh could not begin"),
        }
    });
}

/// The session with fresh tokens.
///
/// # Errors
/// `session_ended` where the provider refuses; `service_unavailable` where it cannot be reached.
pub(super) async fn refreshed(app: &AppState, session: BrowserSession) -> Result<BrowserSession, ApiError> {
    let end = Instant::now() + WAIT;
    let seen = session.token_ends_at;
    loop {
        match begin(app, &session).await? {
            Reply::Session { session } => return Ok(*session),
            Reply::Leased { attempt, session } => {
                // In a task of its own: the tokens, which the provider issues once, are not lost with a client that goes away.
                let refresh = tokio::spawn(run(app.clone(), attempt, *session));
                return match tokio::time::timeout_at(end, refresh).await {
                    Ok(refreshed) => refreshed.map_err(ApiError::internal)?,
                    Err(_) => Err(ApiError::unavailable("the refreshed tokens could not be stored yet")),
                };
            }
            Reply::Wait | Reply::Done if Instant::now() >= end => return Err(away(seen)),
            Reply::Wait | Reply::Done => {
                let changed = |it: &BrowserSession| {
                    it.token_ends_at != seen || !it.is_active() || matches!(it.refresh, RefreshState::Idle { .. })
                };
                wait_until(app, session.id.0, STEP, changed).await?;
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

async fn begin(app: &AppState, session: &BrowserSession) -> Result<Reply, ApiError> {
    tell(app, session.id, Instruction::BeginRefresh { token_ends_at: session.token_ends_at }).await
}

/// Calls the provider as the holder of the lease, and reports its answer.
async fn run(app: AppState, attempt: u32, session: BrowserSession) -> Result<BrowserSession, ApiError> {
    let instruction = match request_tokens(&app, &session).await? {
        Ok((tokens_enc, token_ends_at)) => Instruction::FinishRefresh { attempt, tokens_enc, token_ends_at },
        Err(ProviderFault::Refused(error)) => {
            tracing::info!(%error, session.id = %session.id, "a browser session ends: the refresh of its tokens is refused");
            Instruction::RefuseRefresh { attempt, error: error.code }
        }
        // Its refresh token is spent, and is never sent again.
        Err(fault @ ProviderFault::Unreadable) => {
            tracing::warn!(error = %fault, session.id = %session.id, "a browser session's tokens could not be refreshed");
            Instruction::RefuseRefresh { attempt, error: "unreadable_tokens".to_owned() }
        }
        Err(fault @ (ProviderFault::Client(_) | ProviderFault::Away(_))) => {
            tracing::warn!(error = %fault, session.id = %session.id, "a browser session's tokens could not be refreshed");
            Instruction::FailRefresh { attempt }
        }
    };
    match stored(&app, session.id, instruction).await? {
        Reply::Session { session } => match &session.ended {
            None => Ok(*session),
            Some(end) => Err(session_ended(end.reason.code())),
        },
        Reply::Done | Reply::Wait | Reply::Leased { .. } => Err(away(session.token_ends_at)),
    }
}

/// Reports the answer until it is stored: the provider has issued these tokens once, and the ones before them are spent.
async fn stored(app: &AppState, id: BrowserSessionId, instruction: Instruction) -> Result<Reply, ApiError> {
    let begin = Instant::now();
    let (end, mut pause) = (begin + STORE_FOR, FIRST_STORE_PAUSE);
    let mut is_delayed = false;
    loop {
        match tell(app, id, instruction.clone()).await {
            Err(error) if error.code() == Code::ServiceUnavailable && Instant::now() < end => {
                if !is_delayed {
                    let cause = error.cause();
                    tracing::info!(cause, session.id = %id, "the answer of a refresh cannot be stored, and is sent to its session again");
                }
                is_delayed = true;
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_STORE_PAUSE);
            }
            Err(error) if error.code() == Code::ServiceUnavailable => {
                let cause = error.cause();
                tracing::warn!(cause, session.id = %id, "the answer of a refresh could not be stored: its user may have to log in again");
                return Err(error);
            }
            outcome => {
                if is_delayed {
                    let seconds = begin.elapsed().as_secs_f64();
                    tracing::info!(seconds, session.id = %id, "the answer of a refresh was received by its session");
                }
                return outcome;
            }
        }
    }
}

/// The fresh tokens, sealed, and when the access token ends.
async fn request_tokens(
    app: &AppState,
    session: &BrowserSession,
) -> Result<Result<(String, DateTime<Utc>), ProviderFault>, ApiError> {
    let (provider, reader) = (app.console_provider()?, app.authenticator.browser_sessions()?);
    let tokens = reader.open(session)?;
    let Some(refresh_token) = &tokens.refresh else {
        return Ok(Err(ProviderFault::Refused(ProviderError::new("no_refresh_token", None))));
    };
    let issued = match provider.refresh(refresh_token).await {
        Ok(issued) => issued,
        Err(fault) => return Ok(Err(fault)),
    };
    let token_ends_at = match accepted(app, session, &issued).await {
        Ok(token_ends_at) => token_ends_at,
        Err(why) => return Ok(Err(ProviderFault::Refused(ProviderError::new(why, None)))),
    };
    let fresh = SessionTokens {
        access: issued.access_token,
        // A provider that does not rotate refresh tokens issues none.
        refresh: issued.refresh_token.or(tokens.refresh),
        id_token: tokens.id_token,
    };
    Ok(Ok((reader.seal(session.id, &fresh)?, token_ends_at)))
}

/// When the issued access token ends, where it is accepted here and of the same user.
async fn accepted(
    app: &AppState,
    session: &BrowserSession,
    issued: &IssuedTokens,
) -> Result<DateTime<Utc>, &'static str> {
    let verified = app.authenticator.verify_issued_token(issued.access_token.expose_secret());
    // The lease does not wait for the provider's keys.
    let Ok(verified) = tokio::time::timeout(VERIFY_FOR, verified).await else {
        return Ok(Utc::now() + issued.expires_in.unwrap_or(UNKNOWN_LIFE));
    };
    match verified {
        Ok(caller) if caller.user_id == session.owner.user_id => Ok(caller.token_expires_at),
        Ok(_) => Err("another_user"),
        Err(error) if error.code() == Code::Unauthenticated => {
            let cause = error.cause();
            tracing::warn!(cause, session.id = %session.id, "the identity provider's new access token for a browser session is refused");
            Err("token_refused")
        }
        // The provider's keys cannot be had at the moment; each request verifies the token.
        Err(_) => Ok(Utc::now() + issued.expires_in.unwrap_or(UNKNOWN_LIFE)),
    }
}

fn away(token_ended_at: DateTime<Utc>) -> ApiError {
    let message = "The identity provider cannot be reached, and the access token of your login has ended. Your login is not lost: try again \
                   in a moment.";
    ApiError::new(Code::ServiceUnavailable, message)
        .detail("reason", "identity_provider_away")
        .detail("token_ended_at", token_ended_at.to_rfc3339())
        .expected()
}
