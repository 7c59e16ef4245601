//! A logout at the identity provider that is reported while a login is completed (OpenID Connect Back-Channel Logout 1.0).
//!
//! ```text
//! login:   code ──▶ tokens ──▶ session is committed ──▶ is a logout stored? ──▶ cookie
//! logout:  token ──▶ logout is stored ──▶ active sessions are read and ended
//! ```
//!
//! Either the logout reads the session, or the login reads the logout: in each order the session has ended (decisions/0110).

use actors::sharding::command_id;
use chrono::{DateTime, Utc};
use domain::CommandId;
use domain::browser_session::{BrowserSession, Instruction};
use persistence::provider_logouts::ProviderLogout;

use crate::app_state::AppState;
use crate::auth::openid_claims::LogoutToken;
use crate::console_session::tell;
use crate::http::error::ApiError;

/// Stores the logout, before the sessions are read that it ends.
pub(super) async fn record(app: &AppState, token: &LogoutToken) -> Result<(), ApiError> {
    let logout = ProviderLogout {
        issued_at: token.issued_at,
        received_at: app.environment.now(),
        token_sha256: token.jti_sha256.clone(),
    };
    let id = logout_id(token.subject.as_deref(), token.provider_session.as_deref());
    Ok(app.reads.provider_logouts().record(id, &logout).await?)
}

/// Ends a session that was opened meanwhile, where the provider has logged out its user since its tokens were issued. True where it has.
/// `requested_at`: before the provider was asked for the tokens.
pub(super) async fn end_logged_out(
    app: &AppState,
    session: &BrowserSession,
    requested_at: DateTime<Utc>,
) -> Result<bool, ApiError> {
    let (subject, at_provider) = (Some(session.subject.as_str()), session.provider_session.as_deref());
    let mut ids = vec![logout_id(subject, None)];
    if at_provider.is_some() {
        ids.extend([logout_id(None, at_provider), logout_id(subject, at_provider)]);
    }
    let Some(logout) = app.reads.provider_logouts().latest(&ids).await? else { return Ok(false) };
    // The provider's times are in seconds: of one and the same second, the logout that was received before the login is the earlier one.
    let login = (session.authenticated_at, requested_at);
    if (logout.issued_at, logout.received_at) < login {
        return Ok(false);
    }
    let end = Instruction::EndByProvider { token_sha256: logout.token_sha256, issued_at: logout.issued_at };
    tell(app, session.id, end).await?;
    Ok(true)
}

/// The id of the logout of a user, of one session, or of one session of a user, as the logout token names them.
fn logout_id(subject: Option<&str>, provider_session: Option<&str>) -> CommandId {
    let part = |text: Option<&str>| text.map(|text| format!("={text}")).unwrap_or_default();
    let (subject, provider_session) = (part(subject), part(provider_session));
    command_id(&[b"provider-logout", subject.as_bytes(), provider_session.as_bytes()])
}
