//! The login to the web console: to the identity provider and back, the logout, and the provider's own logout (OpenID Connect Core 1.0,
//! RP-Initiated Logout 1.0, Back-Channel Logout 1.0). These routes are for browsers and the provider, not for clients of the API, and are
//! not in its description. The control plane runs OAuth's authorization code flow (decisions/0070). A login and a logout in flight are in
//! the folder of this module; requests by the session's cookie are authenticated in `console_session.rs`.

mod concurrent_logout;
mod pending_login;
mod pending_logout;

use actors::{AskError, CommandReply};
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header, request};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use chrono::TimeDelta;
use domain::browser_session::{BrowserSession, Instruction, Opening, Place, Reply, Request, SecretDigest};
use domain::policy::{PolicyKey, Scopes};
use domain::{BrowserSessionId, EntityKind, Principal};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use persistence::queries::ListFilter;
use reqwest::Url;
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize};
use std::time::Duration;

use crate::app_state::AppState;
use crate::app_state::read_model::StoredEntity;
use crate::auth::browser_session::{
    CLEARED, SessionCookie, SessionTokens, has_session_cookie, presented, session_ended, set_cookie,
};
use crate::auth::claims::TokenFault;
use crate::auth::openid_claims::{IdToken, LogoutToken, OpenIdFault};
use crate::auth::openid_provider::{IssuedTokens, ProviderError, ProviderFault};
use crate::auth::{Caller, INVALID};
use crate::console_session::{same_origin, tell};
use crate::http::correlation::{Scope, Service, no_store};
use crate::http::error::{ApiError, Code};
use crate::http::request_body::{Form, Query};
use crate::http::router_layers::{Concurrency, RequestTimeout, bounded, mount, with_common_layers};
use crate::tls::Peer;
use pending_login::{CONSOLE, PendingLogin, destination};
use pending_logout::PendingLogout;

/// The routes, below the path of the console's pages.
const LOGIN: &str = "/console/login";
const CALLBACK: &str = "/console/callback";
const LOGOUT: &str = "/console/logout";
const BACKCHANNEL_LOGOUT: &str = "/console/backchannel-logout";

const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_CONCURRENT_REQUESTS: usize = 256;
const ASK_TIMEOUT: TimeDelta = TimeDelta::seconds(8);

/// Mounts the routes on the address of the public API. They keep their own layers and their own error details.
pub fn beside(public: Router, app: AppState) -> Router {
    let scope_settings = app.scope_settings(Service { name: "console", shows_route: true });
    let router = Router::new()
        .route(LOGIN, get(login))
        .route(CALLBACK, get(callback))
        .route(LOGOUT, post(logout).get(leave))
        .route(BACKCHANNEL_LOGOUT, post(backchannel_logout))
        .with_state(app);
    let router = bounded(router, RequestTimeout(REQUEST_TIMEOUT), Concurrency::at_most(MAX_CONCURRENT_REQUESTS));
    let router = with_common_layers(router, scope_settings);
    [LOGIN, CALLBACK, LOGOUT, BACKCHANNEL_LOGOUT]
        .into_iter()
        .fold(public, |public, path| mount(public, path, router.clone()))
}

/// The longest authorization code and `state` that are read, in bytes.
const MAX_PARAMETER: usize = 4096;
/// The longest `User-Agent` that is stored, in characters.
const MAX_USER_AGENT: usize = 256;
/// Sessions that are read at once: more than any user may have active.
const PAGE_SIZE: u32 = 1000;

/// Where to go after the login.
#[derive(Debug, Deserialize)]
struct LoginQuery {
    /// A path below `/console/`, or of another page of this service; anything else leads to `/console/`.
    return_to: Option<String>,
}

/// The response of the identity provider (RFC 6749, sections 4.1.2 and 4.1.2.1; RFC 9207).
#[derive(Deserialize)]
struct CallbackQuery {
    code: Option<String>,
    state: Option<String>,
    /// Why it did not log the user in.
    error: Option<String>,
    error_description: Option<String>,
    /// The issuer.
    iss: Option<String>,
}

/// The logout at the identity provider.
#[derive(Serialize)]
struct ConsoleLogout {
    /// Where the browser goes to log out there, too: a path of ours, since scripts read this answer. Null where the provider has no such page.
    logout_url: Option<&'static str>,
}

/// A logout token of the identity provider.
#[derive(Deserialize)]
struct BackchannelLogout {
    logout_token: SecretString,
}

/// `GET /console/login` begins a login to the web console.
///
/// It redirects to the identity provider, which sends the browser back to `/console/callback`.
async fn login(
    State(app): State<AppState>,
    parts: request::Parts,
    Query(query): Query<LoginQuery>,
) -> Result<Response, ApiError> {
    let answered = begin(&app, &parts, &query).await;
    or_page(&parts.headers, query.return_to.as_deref(), answered)
}

async fn begin(app: &AppState, parts: &request::Parts, query: &LoginQuery) -> Result<Response, ApiError> {
    let provider = app.console_provider()?;
    app.limiter.admit_unauthenticated(&parts.extensions, &app.environment.policy(), app.environment.now())?;
    let metadata = provider.metadata().await.map_err(provider_error)?;
    let login = PendingLogin::begin(query.return_to.as_deref(), app.environment.now());
    let location = login.authorization_url(provider, &metadata).to_string();
    let location = HeaderValue::from_str(&location).map_err(ApiError::internal)?;
    let headers = [(header::LOCATION, location), (header::SET_COOKIE, login.set_cookie(&app.trust.at_rest)?)];
    Ok((StatusCode::FOUND, no_store(), no_referrer(), headers).into_response())
}

/// `GET /console/callback` completes a login to the web console.
///
/// It redirects to where the login was wanted. The browser has the session's cookie then.
async fn callback(
    State(app): State<AppState>,
    scope: Scope,
    parts: request::Parts,
    Query(query): Query<CallbackQuery>,
) -> Result<Response, ApiError> {
    let answered = complete(&app, &scope, &parts, &query).await;
    let return_to = PendingLogin::return_to_of(&parts.headers, &app.trust.at_rest);
    or_page(&parts.headers, return_to.as_deref(), answered)
}

async fn complete(
    app: &AppState,
    scope: &Scope,
    parts: &request::Parts,
    query: &CallbackQuery,
) -> Result<Response, ApiError> {
    let (provider, now) = (app.console_provider()?, app.environment.now());
    app.limiter.admit_unauthenticated(&parts.extensions, &app.environment.policy(), now)?;
    let state = query.state.as_deref().filter(|state| state.len() <= MAX_PARAMETER).unwrap_or_default();
    let login = PendingLogin::of_callback(&parts.headers, &app.trust.at_rest, state, now).ok_or_else(|| {
        ApiError::invalid_request(
            "This login was not begun in this browser, or too long ago; begin again at /console/login.",
        )
    })?;
    let metadata = provider.metadata().await.map_err(provider_error)?;
    let is_of_issuer = match query.iss.as_deref() {
        Some(issuer) => issuer == app.authenticator.issuer(),
        None => !metadata.names_issuer_in_responses(),
    };
    if !is_of_issuer {
        return Err(not_logged_in("The response is not of this service's identity provider").because("another `iss`"));
    }
    if let Some(error) = &query.error {
        let error = ProviderError::new(error, query.error_description.as_deref());
        let why = format!("the identity provider answered {}", error.with_step());
        return Err(not_logged_in("The identity provider did not log you in").because(why));
    }
    let code = query.code.as_deref().filter(|code| !code.is_empty() && code.len() <= MAX_PARAMETER);
    let code = code.ok_or_else(|| not_logged_in("The identity provider sent no code").because("no `code`"))?;
    let issued = provider.exchange(code, &login.verifier).await.map_err(provider_error)?;
    let (caller, id_token) = confirmed(app, &issued, &login.nonce).await?;
    let id = BrowserSessionId(login.session);
    let (cookie, secret_sha256) = SessionCookie::mint(id.0);
    let opening = opening(app, parts, id, secret_sha256, &caller, issued, id_token)?;
    let session = open(app, scope, id, caller, opening).await?;
    if concurrent_logout::end_logged_out(app, &session, now).await? {
        return Err(not_logged_in("The identity provider has logged you out meanwhile").because("a logout token"));
    }
    end_oldest(app, &session).await?;
    tracing::info!(session.id = %session.id, "user {} logged in to the console", session.owner.user_id);
    let location = HeaderValue::from_str(&login.return_to).map_err(ApiError::internal)?;
    let mut headers = HeaderMap::new();
    headers.insert(header::LOCATION, location);
    headers.append(header::SET_COOKIE, set_cookie(&cookie, session.ends_at - now)?);
    headers.append(header::SET_COOKIE, PendingLogin::CLEARED);
    Ok((StatusCode::SEE_OTHER, no_store(), no_referrer(), headers).into_response())
}

/// Who has logged in: the access token and the ID token are both of the provider, for us, and of one user.
async fn confirmed(app: &AppState, issued: &IssuedTokens, nonce: &str) -> Result<(Caller, IdToken), ApiError> {
    let client_id = &app.console_provider()?.settings.client_id;
    let id_token = issued.id_token.as_ref().ok_or_else(|| not_logged_in("The identity provider sent no ID token"))?;
    let verified =
        app.authenticator.verify_id_token(id_token.expose_secret(), client_id, nonce, app.environment.now()).await;
    let verified =
        verified.map_err(|fault| token_error(fault, "The login that the identity provider confirms is another one"))?;
    let caller = app.authenticator.verify_issued_token(issued.access_token.expose_secret()).await?;
    if !app.authenticator.is_of_subject(&caller, &verified.subject) {
        let why = "claim `sub` of the ID token and of the access token differ: where the provider has a subject for each client, \
                   SVC_OIDC_CLAIM_USER_ID names the claim that identifies the user in access tokens";
        return Err(not_logged_in("The identity provider's tokens are of two users").because(why));
    }
    Ok((caller, verified))
}

fn opening(
    app: &AppState,
    parts: &request::Parts,
    id: BrowserSessionId,
    secret_sha256: SecretDigest,
    caller: &Caller,
    issued: IssuedTokens,
    id_token: IdToken,
) -> Result<Opening, ApiError> {
    let missing = || not_logged_in("The identity provider sent no ID token");
    let tokens = SessionTokens {
        access: issued.access_token,
        refresh: issued.refresh_token,
        id_token: issued.id_token.ok_or_else(missing)?,
    };
    Ok(Opening {
        secret_sha256,
        subject: id_token.subject,
        provider_session: id_token.provider_session,
        authenticated_at: id_token.issued_at,
        place: place(parts),
        tokens_enc: app.authenticator.browser_sessions()?.seal(id, &tokens)?,
        token_ends_at: caller.token_expires_at,
    })
}

/// Opens the session, as its user. A login opens one session: it is refused where it was completed before.
async fn open(
    app: &AppState,
    scope: &Scope,
    id: BrowserSessionId,
    caller: Caller,
    opening: Opening,
) -> Result<BrowserSession, ApiError> {
    scope.record_resource(format_args!("{}/{id}", EntityKind::BrowserSession));
    let command = Request::Open(Box::new(opening));
    let by = Principal::Caller(caller.into_identity());
    let permit = domain::authz::authorize(&by, domain::state_machine::Request::action(&command)).map_err(|denied| {
        let message = "Your account has neither the role `user` nor `admin`; ask an administrator for one.";
        ApiError::forbidden(message).because(denied)
    })?;
    let context = scope.command_context(&permit, app.environment.now() + ASK_TIMEOUT);
    match app.directory.ask::<BrowserSession>(&permit, id.0, command.into(), context).await {
        Ok(CommandReply { reply: Reply::Session { session }, .. }) => Ok(*session),
        Ok(_) => Err(ApiError::internal("the browser session's machine answered another question")),
        Err(AskError::Rejected(rejection)) => {
            Err(ApiError::new(Code::StateConflict, "This login was completed before; log in again at /console/login.")
                .because(rejection))
        }
        Err(AskError::Overloaded) => Err(ApiError::overloaded()),
        Err(error) => Err(ApiError::unavailable(error)),
    }
}

/// Ends the user's oldest sessions above the limit.
async fn end_oldest(app: &AppState, session: &BrowserSession) -> Result<(), ApiError> {
    let scopes: Scopes = session.scopes();
    let most = app.environment.policy().int(PolicyKey::AuthBrowserSessionsPerUser, &scopes, app.environment.now());
    let active = ListFilter { owner: Some(session.owner.user_id.to_string()), ..active_sessions() };
    let rows = app.reads.list(EntityKind::BrowserSession, &active, None, PAGE_SIZE).await?.items;
    let others = rows.into_iter().map(|row| row.entity.id).filter(|id| *id != session.id.0).collect::<Vec<_>>();
    let kept = usize::try_from(most - 1).unwrap_or_default();
    for oldest in &others[..others.len().saturating_sub(kept)] {
        tell(app, BrowserSessionId(*oldest), Instruction::Displace).await?;
    }
    Ok(())
}

fn active_sessions() -> ListFilter {
    ListFilter { states: vec![BrowserSession::ACTIVE.to_owned()], ..ListFilter::default() }
}

/// Where the browser is, as far as it says it.
fn place(parts: &request::Parts) -> Place {
    let address = parts
        .extensions
        .get::<ConnectInfo<Peer>>()
        .map(|ConnectInfo(peer)| peer.address.ip().to_canonical().to_string());
    let user_agent = parts.headers.get(header::USER_AGENT).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let plain = |text: &str| text.chars().filter(|c| !c.is_control()).take(MAX_USER_AGENT).collect();
    Place { address: address.unwrap_or_default(), user_agent: user_agent.map(|text| plain(&text)).unwrap_or_default() }
}

/// `POST /console/logout` logs the browser out. Its session has ended before the answer.
///
/// By the cookie, from a page of this service. The browser then goes to `logout_url`, to log out at the identity provider too.
async fn logout(State(app): State<AppState>, parts: request::Parts) -> Result<Response, ApiError> {
    same_origin::check(&app.addresses.public_url, &parts)?;
    if !has_session_cookie(&parts.headers) {
        return Err(session_ended("unknown"));
    }
    let cookie = presented(&parts.headers)?;
    let (reader, now) = (app.authenticator.browser_sessions()?, app.environment.now());
    let session = reader.session(&cookie, now).await?;
    // The session ends, whether or not its tokens can be opened: the provider asks its user then.
    let hint = reader.open(&session).map(|tokens| tokens.id_token).inspect_err(|fault| {
        tracing::warn!(error = %fault, session.id = %session.id, "a browser session was left without its ID token");
    });
    tell(&app, session.id, Instruction::LogOut).await?;
    // The session has ended, whether or not the provider can be reached.
    let logout_url = provider_logout(&app).await.map(|_| LOGOUT);
    let mut headers = HeaderMap::new();
    headers.append(header::SET_COOKIE, CLEARED);
    if logout_url.is_some() {
        headers.append(header::SET_COOKIE, PendingLogout::set_cookie(hint.ok().as_ref(), &app.trust.at_rest, now)?);
    }
    Ok((StatusCode::OK, no_store(), headers, Json(ConsoleLogout { logout_url })).into_response())
}

/// `GET /console/logout` goes on to the identity provider after a logout, which ends the provider's own session.
///
/// The ID token is in the address of the redirect, which no script can read where the browser navigates.
async fn leave(State(app): State<AppState>, parts: request::Parts) -> Result<Response, ApiError> {
    same_origin::check_navigation(&parts)?;
    let now = app.environment.now();
    let pending = PendingLogout::of(&parts.headers, &app.trust.at_rest, now);
    let url = match (pending, provider_logout(&app).await) {
        (Some(pending), Some(endpoint)) => {
            pending.url(&endpoint, app.console_provider()?, &app.addresses.public_url).to_string()
        }
        // There was no logout, or it was too long ago: the provider's session is not ended without one.
        (None, _) | (_, None) => CONSOLE.to_owned(),
    };
    let mut location = HeaderValue::from_str(&url).map_err(ApiError::internal)?;
    location.set_sensitive(true);
    let headers = [(header::LOCATION, location), (header::SET_COOKIE, PendingLogout::CLEARED)];
    Ok((StatusCode::SEE_OTHER, no_store(), no_referrer(), headers).into_response())
}

/// The provider's page for logouts; none where it has no such page, or cannot be reached.
async fn provider_logout(app: &AppState) -> Option<Url> {
    app.console_provider().ok()?.metadata().await.ok()?.end_session_endpoint.clone()
}

/// `POST /console/backchannel-logout` ends the sessions of a user, or of one login, when the identity provider requests it.
///
/// OpenID Connect Back-Channel Logout 1.0. The sessions have ended before the answer.
async fn backchannel_logout(
    State(app): State<AppState>,
    parts: request::Parts,
    Form(request): Form<BackchannelLogout>,
) -> Result<Response, ApiError> {
    let (client_id, now) = (&app.console_provider()?.settings.client_id, app.environment.now());
    let verified = app.authenticator.verify_logout_token(request.logout_token.expose_secret(), client_id, now).await;
    let token = match verified {
        Ok(token) => token,
        Err(OpenIdFault::Token(fault @ TokenFault::NoKeys(_))) => return Err(ApiError::unavailable(fault)),
        Err(fault) => {
            app.limiter.admit_unauthenticated(&parts.extensions, &app.environment.policy(), now)?;
            return Err(logout_refused("It is no logout token for this service.").because(fault));
        }
    };
    let is_used = was_used(&app, &token).await?;
    if !is_used {
        concurrent_logout::record(&app, &token).await?;
    }
    let open = sessions_of(&app, &token, is_used).await?;
    // A token that has ended some of its sessions is sent again where others could not be ended.
    if is_used && open.is_empty() {
        return Err(logout_refused("This logout token was used before."));
    }
    let mut failure = None;
    for id in open {
        let end = Instruction::EndByProvider { token_sha256: token.jti_sha256.clone(), issued_at: token.issued_at };
        if let Err(error) = tell(&app, id, end).await {
            failure.get_or_insert(error);
        }
    }
    match failure {
        None => Ok((StatusCode::OK, no_store()).into_response()),
        Some(error) => Err(error),
    }
}

fn logout_refused(message: &'static str) -> ApiError {
    ApiError::invalid_request(message).detail("error", "invalid_request")
}

/// Whether a session was ended by this token. One that has ended none is no news for later logins, however often it is sent.
async fn was_used(app: &AppState, token: &LogoutToken) -> Result<bool, ApiError> {
    let terms = vec![BrowserSession::logout_term(&token.jti_sha256)];
    let filter = ListFilter { terms, ..ListFilter::default() };
    Ok(!app.reads.list(EntityKind::BrowserSession, &filter, None, 1).await?.items.is_empty())
}

/// The active sessions that the token ends: a later login is another one. To a token that was used, so is one of its own second.
async fn sessions_of(app: &AppState, token: &LogoutToken, is_used: bool) -> Result<Vec<BrowserSessionId>, ApiError> {
    let subject = token.subject.as_deref().map(BrowserSession::subject_term);
    let session = token.provider_session.as_deref().map(BrowserSession::provider_session_term);
    let filter = ListFilter { terms: subject.into_iter().chain(session).collect(), ..active_sessions() };
    let (mut sessions, mut after) = (Vec::new(), None);
    loop {
        let page = app.reads.list(EntityKind::BrowserSession, &filter, after, PAGE_SIZE).await?;
        for listed in &page.items {
            // One that cannot be read here is its entity's to decide.
            let is_later = StoredEntity::<BrowserSession>::of_listed(listed).is_some_and(|session| {
                let at = session.it.authenticated_at;
                at > token.issued_at || is_used && at == token.issued_at
            });
            if !is_later {
                sessions.push(BrowserSessionId(listed.entity.id));
            }
        }
        after = page.next;
        if after.is_none() {
            return Ok(sessions);
        }
    }
}

fn not_logged_in(what: &str) -> ApiError {
    ApiError::new(Code::Unauthenticated, format!("{what}; log in again at /console/login."))
        .header(header::WWW_AUTHENTICATE, HeaderValue::from_static(INVALID))
}

fn token_error(fault: OpenIdFault, what: &str) -> ApiError {
    match fault {
        OpenIdFault::Token(fault @ TokenFault::NoKeys(_)) => ApiError::unavailable(fault),
        fault => not_logged_in(what).because(fault),
    }
}

fn provider_error(fault: ProviderFault) -> ApiError {
    match fault {
        ProviderFault::Refused(_) => not_logged_in("The identity provider does not accept this login").because(fault),
        ProviderFault::Unreadable | ProviderFault::Client(_) | ProviderFault::Away(_) => {
            let message = "The identity provider cannot be used at the moment; log in again later at /console/login.";
            ApiError::new(Code::ServiceUnavailable, message).detail("reason", "identity_provider_away").because(fault)
        }
    }
}

/// Addresses with codes in them are not sent on.
fn no_referrer() -> [(HeaderName, HeaderValue); 1] {
    [(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"))]
}

/// A page in place of the envelope, for a browser that navigates here. Its link begins another login that leads to `return_to`.
fn or_page(
    headers: &HeaderMap,
    return_to: Option<&str>,
    result: Result<Response, ApiError>,
) -> Result<Response, ApiError> {
    let accepts = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let error = match result {
        Err(error) if accepts.contains("text/html") => error,
        other => return other,
    };
    let (message, again) = (escaped(error.message()), escaped(&login_address(return_to)));
    let html = format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>Not logged in</title>\n<h1>Not logged in</h1>\n<p>{message}</p>\n<p><a href=\"{again}\">Log in again</a></p>\n</html>\n"
    );
    let policy = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    let headers = [
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    let add = |error: ApiError, (name, value)| error.header(name, HeaderValue::from_static(value));
    Err(headers.into_iter().fold(error.with_page(html), add))
}

/// Where a login begins that leads to `return_to`, where that is a page of ours.
fn login_address(return_to: Option<&str>) -> String {
    let destination = destination(return_to);
    if destination == CONSOLE {
        return LOGIN.to_owned();
    }
    format!("{LOGIN}?return_to={}", utf8_percent_encode(&destination, NON_ALPHANUMERIC))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
