//! The browser logins of the development identity provider: authorization code with PKCE (RFC 6749, section 4.1; RFC 7636) for the console,
//! and for `gpuctl` on a loopback port (RFC 8252, section 7.3), refresh tokens that are used once, logout (OpenID Connect RP-Initiated Logout
//! 1.0) and back-channel logout (OpenID Connect Back-Channel Logout 1.0).
//!
//! Its page is a form without a script. Logins are in memory: a provider that was started again knows none.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use axum::Form;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::{CLIENT_ID, DemoUser, Issuer, REALM, TokenRequest, no_such_realm, refusal, same};
use crate::private_files::random_hex;

/// The client as which people log in to the web console.
pub const CONSOLE_CLIENT_ID: &str = "gpuaas-console";

/// The cookie of a login at the provider.
const COOKIE: &str = "gpuaas-idp";
const CODE_LIFE: Duration = Duration::from_secs(60);
/// Where `gpuctl` receives its code, on any port of 127.0.0.1.
const LOOPBACK_PATH: &str = "/callback";
/// The bound of logins, codes and refresh tokens, each: the oldest is forgotten.
const MAX_ENTRIES: usize = 10_000;
const LOGOUT_EVENT: &str = "http://schemas.openid.net/event/backchannel-logout";
const LOGOUT_TIMEOUT: Duration = Duration::from_secs(5);

/// The console, as it is registered.
#[derive(Clone, Debug)]
pub struct RegisteredConsole {
    /// The public URL of the control plane, without a slash at its end.
    pub url: String,
    /// The authority of its certificate, PEM.
    pub ca_pem: String,
}

/// The client that people log in with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoginClient {
    Console,
    Gpuctl,
}

/// What a test has the provider do wrong.
#[derive(Clone, Debug, Default)]
pub struct LoginFaults {
    /// A code is accepted more than once.
    pub codes_are_reusable: bool,
    /// Claims of ID tokens in place of the right ones; null removes one.
    pub id_token: BTreeMap<String, Value>,
    /// Claims of access tokens in place of the right ones; null removes one.
    pub access_token: BTreeMap<String, Value>,
    /// The token endpoint answers 503.
    pub is_away: bool,
    /// The token endpoint does not answer refreshes.
    pub refreshes_hang: bool,
    /// A refresh token that is sent again ends its login at the provider (RFC 9700, section 4.14.2).
    pub reuse_ends_login: bool,
    /// The life of access tokens, in seconds.
    pub token_seconds: Option<i64>,
}

/// What of browser logins is in memory.
#[derive(Default)]
pub(super) struct BrowserLogins(Mutex<Logins>);

#[derive(Default)]
struct Logins {
    console: Option<RegisteredConsole>,
    sessions: Vec<ProviderSession>,
    codes: Vec<AuthorizationCode>,
    refresh_tokens: Vec<RefreshToken>,
    spent_refresh_tokens: Vec<RefreshToken>,
    refresh_calls: u64,
    faults: LoginFaults,
}

#[derive(Clone)]
pub(super) struct ProviderSession {
    id: String,
    username: String,
    cookie: String,
}

#[derive(Clone)]
struct AuthorizationCode {
    code: String,
    redirect_uri: String,
    challenge: String,
    nonce: Option<String>,
    client: LoginClient,
    session: ProviderSession,
    issued_at: Instant,
}

struct RefreshToken {
    token: String,
    client: LoginClient,
    session: ProviderSession,
}

impl LoginClient {
    fn id(self) -> &'static str {
        match self {
            Self::Console => CONSOLE_CLIENT_ID,
            Self::Gpuctl => CLIENT_ID,
        }
    }
}

/// An authorization request that is served.
struct CheckedRequest {
    client: LoginClient,
    redirect_uri: String,
    challenge: String,
}

/// An authorization request.
#[derive(Deserialize)]
pub(super) struct AuthorizationRequest {
    client_id: Option<String>,
    redirect_uri: Option<String>,
    response_type: Option<String>,
    scope: Option<String>,
    state: Option<String>,
    nonce: Option<String>,
    code_challenge: Option<String>,
    code_challenge_method: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct Credentials {
    username: String,
    password: SecretString,
}

#[derive(Deserialize)]
pub(super) struct EndSession {
    id_token_hint: Option<String>,
    post_logout_redirect_uri: Option<String>,
}

impl BrowserLogins {
    fn lock(&self) -> MutexGuard<'_, Logins> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn register(&self, console: RegisteredConsole) {
        self.lock().console = Some(console);
    }

    pub(super) fn set_faults(&self, faults: LoginFaults) {
        self.lock().faults = faults;
    }

    pub(super) fn refresh_calls(&self) -> u64 {
        self.lock().refresh_calls
    }

    pub(super) fn token_seconds(&self) -> Option<i64> {
        self.lock().faults.token_seconds
    }

    /// The session that the browser's cookie is of.
    fn session_of(&self, headers: &HeaderMap) -> Option<ProviderSession> {
        let cookies = headers.get_all(header::COOKIE).iter().filter_map(|line| line.to_str().ok());
        let cookie = cookies
            .flat_map(|line| line.split(';'))
            .find_map(|pair| pair.trim().split_once('=').filter(|(name, _)| *name == COOKIE));
        let value = cookie?.1;
        self.lock().sessions.iter().find(|session| same(&session.cookie, value)).cloned()
    }

    pub(super) fn open_session(&self, username: &str) -> ProviderSession {
        let session = ProviderSession { id: random_hex(16), username: username.to_owned(), cookie: random_hex(32) };
        push(&mut self.lock().sessions, session.clone());
        session
    }

    /// Ends the sessions, and takes their refresh tokens back.
    fn end_sessions(&self, is_meant: impl Fn(&ProviderSession) -> bool) -> Vec<ProviderSession> {
        let mut logins = self.lock();
        let ended: Vec<_> = logins.sessions.extract_if(.., |session| is_meant(session)).collect();
        logins.refresh_tokens.retain(|known| !ended.iter().any(|session| session.id == known.session.id));
        ended
    }

    /// Takes a code that agrees with the request of this client.
    fn take_code(&self, client: LoginClient, request: &TokenRequest) -> Option<AuthorizationCode> {
        let mut logins = self.lock();
        let code = request.code.as_deref()?;
        let at = logins.codes.iter().position(|known| same(&known.code, code))?;
        let found = if logins.faults.codes_are_reusable { logins.codes[at].clone() } else { logins.codes.remove(at) };
        let verifier = request.code_verifier.as_deref()?;
        let agrees = found.client == client
            && found.issued_at.elapsed() < CODE_LIFE
            && request.redirect_uri.as_deref() == Some(found.redirect_uri.as_str())
            && same(&URL_SAFE_NO_PAD.encode(Sha256::digest(verifier)), &found.challenge);
        agrees.then_some(found)
    }

    fn take_refresh_token(&self, client: LoginClient, token: &str) -> Option<ProviderSession> {
        let mut logins = self.lock();
        let is_it = |known: &RefreshToken| known.client == client && same(&known.token, token);
        let Some(at) = logins.refresh_tokens.iter().position(is_it) else {
            let reused = logins.spent_refresh_tokens.iter().find(|known| is_it(known));
            let session = reused.filter(|_| logins.faults.reuse_ends_login).map(|known| known.session.id.clone());
            drop(logins);
            if let Some(id) = session {
                self.end_sessions(|session| session.id == id);
            }
            return None;
        };
        let spent = logins.refresh_tokens.remove(at);
        let session = spent.session.clone();
        push(&mut logins.spent_refresh_tokens, spent);
        Some(session)
    }

    fn issue_refresh_token(&self, client: LoginClient, session: ProviderSession) -> String {
        let token = random_hex(32);
        push(&mut self.lock().refresh_tokens, RefreshToken { token: token.clone(), client, session });
        token
    }
}

pub(super) fn push<T>(entries: &mut Vec<T>, entry: T) {
    if entries.len() >= MAX_ENTRIES {
        entries.remove(0);
    }
    entries.push(entry);
}

impl AuthorizationRequest {
    /// The client, its redirect URI and the challenge, where the request is one that is served.
    ///
    /// # Errors
    /// What is wrong with it, for a person.
    fn check(&self, logins: &BrowserLogins) -> Result<CheckedRequest, &'static str> {
        let redirect_uri = self.redirect_uri.clone().unwrap_or_default();
        let (client, is_own) = match self.client_id.as_deref() {
            Some(CONSOLE_CLIENT_ID) => {
                let registered = logins.lock().console.clone().ok_or("The console is not registered here.")?;
                (LoginClient::Console, redirect_uri == format!("{}/console/callback", registered.url))
            }
            Some(CLIENT_ID) => (LoginClient::Gpuctl, is_loopback(&redirect_uri)),
            _ => return Err("The client is unknown."),
        };
        if !is_own {
            return Err("The redirect URI is not that of the client.");
        }
        let is_openid = self.scope.as_deref().unwrap_or_default().split(' ').any(|scope| scope == "openid");
        if self.response_type.as_deref() != Some("code") || !is_openid {
            return Err("Only the authorization code of OpenID Connect is served here.");
        }
        match (&self.code_challenge, self.code_challenge_method.as_deref()) {
            (Some(challenge), Some("S256")) => {
                Ok(CheckedRequest { client, redirect_uri, challenge: challenge.clone() })
            }
            _ => Err("PKCE with the method S256 is required."),
        }
    }
}

/// Whether it is `gpuctl`'s address on some port of 127.0.0.1.
fn is_loopback(redirect_uri: &str) -> bool {
    let port = redirect_uri.strip_prefix("http://127.0.0.1:").and_then(|rest| rest.strip_suffix(LOOPBACK_PATH));
    port.is_some_and(|port| port.parse::<u16>().is_ok())
}

/// The page with the form, or the way back where the browser is logged in.
pub(super) async fn authorize(
    State(issuer): State<Arc<Issuer>>,
    Path(realm): Path<String>,
    headers: HeaderMap,
    Query(request): Query<AuthorizationRequest>,
) -> Response {
    if realm != REALM {
        return no_such_realm();
    }
    match request.check(&issuer.logins) {
        Err(why) => page(StatusCode::BAD_REQUEST, &format!("<p>{why}</p>")),
        // Programs are let in by a person each time, and not by the cookie of an earlier login (RFC 8252, section 8.6).
        Ok(CheckedRequest { client: LoginClient::Gpuctl, .. }) => {
            page(StatusCode::OK, &form("<p>This logs gpuctl in on this machine.</p>", ""))
        }
        Ok(checked) => match issuer.logins.session_of(&headers) {
            Some(session) => redirect_back(&issuer, request, checked, session),
            None => page(StatusCode::OK, &form("", "")),
        },
    }
}

/// The form comes back to the address of the authorization request.
pub(super) async fn log_in(
    State(issuer): State<Arc<Issuer>>,
    Path(realm): Path<String>,
    Query(request): Query<AuthorizationRequest>,
    Form(credentials): Form<Credentials>,
) -> Response {
    if realm != REALM {
        return no_such_realm();
    }
    let checked = match request.check(&issuer.logins) {
        Ok(checked) => checked,
        Err(why) => return page(StatusCode::BAD_REQUEST, &format!("<p>{why}</p>")),
    };
    let Some(person) = issuer.authenticate(&credentials.username, &credentials.password) else {
        return page(StatusCode::UNAUTHORIZED, &form(WRONG_PASSWORD, ""));
    };
    let session = issuer.logins.open_session(&person.username);
    let cookie = format!("{COOKIE}={}; Path=/realms/{REALM}; HttpOnly; SameSite=Lax", session.cookie);
    let back = redirect_back(&issuer, request, checked, session);
    ([(header::SET_COOKIE, cookie)], back).into_response()
}

fn redirect_back(
    issuer: &Issuer,
    request: AuthorizationRequest,
    checked: CheckedRequest,
    session: ProviderSession,
) -> Response {
    let CheckedRequest { client, redirect_uri, challenge } = checked;
    let Ok(mut location) = reqwest::Url::parse(&redirect_uri) else {
        return page(StatusCode::BAD_REQUEST, "<p>The redirect URI is none.</p>");
    };
    let code = random_hex(32);
    let (nonce, issued_at) = (request.nonce, Instant::now());
    let issued = AuthorizationCode { code: code.clone(), redirect_uri, challenge, nonce, client, session, issued_at };
    push(&mut issuer.logins.lock().codes, issued);
    location.query_pairs_mut().append_pair("code", &code).append_pair("iss", &issuer.name());
    if let Some(state) = &request.state {
        location.query_pairs_mut().append_pair("state", state);
    }
    (StatusCode::FOUND, [(header::LOCATION, location.to_string()), (header::CACHE_CONTROL, "no-store".to_owned())])
        .into_response()
}

/// Tokens for a code or a refresh token of this client.
pub(super) async fn login_token(issuer: &Issuer, client: LoginClient, request: &TokenRequest) -> Response {
    let faults = issuer.logins.lock().faults.clone();
    if faults.is_away {
        return refusal(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable", "A test has it so");
    }
    let invalid = |why: &str| refusal(StatusCode::BAD_REQUEST, "invalid_grant", why);
    match request.grant_type.as_deref() {
        Some("authorization_code") => match issuer.logins.take_code(client, request) {
            Some(code) => issue(issuer, client, code.session, code.nonce),
            None => invalid("The code is unknown, used, or of another request"),
        },
        Some("refresh_token") => {
            let token = request.refresh_token.as_ref().map(SecretString::expose_secret).unwrap_or_default();
            issuer.logins.lock().refresh_calls += 1;
            while issuer.logins.lock().faults.refreshes_hang {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            match issuer.logins.take_refresh_token(client, token) {
                Some(session) => issue(issuer, client, session, None),
                None => invalid("The refresh token is unknown, or was used"),
            }
        }
        _ => refusal(StatusCode::BAD_REQUEST, "unsupported_grant_type", "This client has no such grant"),
    }
}

/// The tokens of a login.
pub(super) fn issue(issuer: &Issuer, client: LoginClient, session: ProviderSession, nonce: Option<String>) -> Response {
    let faults = issuer.logins.lock().faults.clone();
    let Some(person) = issuer.person(&session.username) else {
        return refusal(StatusCode::BAD_REQUEST, "invalid_grant", "The user is gone");
    };
    let minted = tokens(issuer, client, &person, &session, nonce, &faults);
    let (access_token, id_token, expires_in) = match minted {
        Ok(minted) => minted,
        Err(error) => return refusal(StatusCode::INTERNAL_SERVER_ERROR, "server_error", &error.to_string()),
    };
    let answer = json!({
        "access_token": access_token.expose_secret(),
        "id_token": id_token.expose_secret(),
        "refresh_token": issuer.logins.issue_refresh_token(client, session),
        "token_type": "Bearer",
        "expires_in": expires_in,
    });
    ([(header::CACHE_CONTROL, "no-store"), (header::PRAGMA, "no-cache")], axum::Json(answer)).into_response()
}

fn tokens(
    issuer: &Issuer,
    client: LoginClient,
    person: &DemoUser,
    session: &ProviderSession,
    nonce: Option<String>,
    faults: &LoginFaults,
) -> anyhow::Result<(SecretString, SecretString, i64)> {
    let mut access = issuer.claims(person);
    access["azp"] = json!(client.id());
    access["sid"] = json!(session.id);
    let (issued_at, expires_at) = (access["iat"].clone(), access["exp"].clone());
    let mut id_token = json!({
        "iss": issuer.name(),
        "aud": client.id(),
        "sub": person.id,
        "sid": session.id,
        "preferred_username": person.username,
        "iat": issued_at,
        "exp": expires_at,
    });
    if let Some(nonce) = nonce {
        id_token["nonce"] = json!(nonce);
    }
    replace_claims(&mut access, &faults.access_token);
    replace_claims(&mut id_token, &faults.id_token);
    let expires_in = expires_at.as_i64().zip(issued_at.as_i64()).map_or(0, |(end, begin)| end - begin);
    Ok((issuer.mint(&access)?, issuer.mint(&id_token)?, expires_in))
}

fn replace_claims(claims: &mut Value, replacements: &BTreeMap<String, Value>) {
    let Value::Object(claims) = claims else { return };
    for (name, value) in replacements {
        if value.is_null() {
            claims.remove(name);
        } else {
            claims.insert(name.clone(), value.clone());
        }
    }
}

/// Logs the browser out, here and at the console.
pub(super) async fn end_session(
    State(issuer): State<Arc<Issuer>>,
    Path(realm): Path<String>,
    headers: HeaderMap,
    Query(request): Query<EndSession>,
) -> Response {
    if realm != REALM {
        return no_such_realm();
    }
    let hinted = request.id_token_hint.as_deref().and_then(session_in);
    let own = issuer.logins.session_of(&headers).map(|session| session.id);
    let ids: Vec<_> = hinted.into_iter().chain(own).collect();
    let ended = issuer.logins.end_sessions(|session| ids.contains(&session.id));
    for session in &ended {
        if let Err(error) = issuer.send_logout(session).await {
            // The console has ended its own session before it sent the browser here.
            eprintln!("the console was not notified of a logout: {error:#}");
        }
    }
    let console = issuer.logins.lock().console.clone();
    let back = request.post_logout_redirect_uri.filter(|uri| {
        console.is_some_and(|console| uri.strip_prefix(&console.url).is_some_and(|path| path.starts_with('/')))
    });
    let gone = format!("{COOKIE}=; Path=/realms/{REALM}; HttpOnly; SameSite=Lax; Max-Age=0");
    match back {
        Some(uri) => (StatusCode::FOUND, [(header::SET_COOKIE, gone), (header::LOCATION, uri)]).into_response(),
        None => ([(header::SET_COOKIE, gone)], page(StatusCode::OK, "<p>You are logged out.</p>")).into_response(),
    }
}

/// The `sid` of an ID token. Its signature does not matter: who knows the id of a session may end it.
fn session_in(id_token: &str) -> Option<String> {
    let payload = URL_SAFE_NO_PAD.decode(id_token.split('.').nth(1)?).ok()?;
    let claims: Value = serde_json::from_slice(&payload).ok()?;
    claims["sid"].as_str().map(str::to_owned)
}

impl Issuer {
    /// Ends the sessions of a user, as an administrator of the provider does, and sends their logout tokens.
    pub(super) async fn end_sessions_of(&self, username: &str) -> anyhow::Result<()> {
        for session in self.logins.end_sessions(|session| session.username == username) {
            self.send_logout(&session).await?;
        }
        Ok(())
    }

    async fn send_logout(&self, session: &ProviderSession) -> anyhow::Result<()> {
        let console = self.logins.lock().console.clone().context("no console is registered")?;
        let person = self.person(&session.username).context("the user is gone")?;
        let now = chrono::Utc::now().timestamp();
        let token = self.mint(&json!({
            "iss": self.name(),
            "aud": CONSOLE_CLIENT_ID,
            "sub": person.id,
            "sid": session.id,
            "iat": now,
            "exp": now + 120,
            "jti": Uuid::new_v4(),
            "events": { LOGOUT_EVENT: {} },
        }))?;
        let authorities = reqwest::Certificate::from_pem_bundle(console.ca_pem.as_bytes())?;
        let client = reqwest::Client::builder().tls_certs_only(authorities).timeout(LOGOUT_TIMEOUT).build()?;
        let url = format!("{}/console/backchannel-logout", console.url);
        let answer = client.post(url).form(&[("logout_token", token.expose_secret())]).send().await?;
        anyhow::ensure!(answer.status().is_success(), "the console answered {}", answer.status());
        Ok(())
    }
}

pub(super) const WRONG_PASSWORD: &str = "<p role=\"alert\">Name or password is wrong.</p>";

/// A form for a name and a password, below a message and with more fields, both as markup.
pub(super) fn form(message: &str, fields: &str) -> String {
    format!(
        "{message}<form method=\"post\">{fields}<p><label>Name<br><input name=\"username\" autocomplete=\"username\" required autofocus></label></p>\
         <p><label>Password<br><input name=\"password\" type=\"password\" autocomplete=\"current-password\" required></label></p>\
         <p><button>Log in</button></p></form>"
    )
}

const STYLE: &str = "body{font:16px system-ui,sans-serif;max-width:20rem;margin:4rem auto;padding:0 1rem}\
                     input,button{font:inherit;padding:.4rem .6rem;width:100%;box-sizing:border-box}";

pub(super) fn page(status: StatusCode, body: &str) -> Response {
    let html = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>Log in</title><style>{STYLE}</style><h1>Development login</h1>{body}</html>"
    );
    let style = STANDARD.encode(Sha256::digest(STYLE));
    let policy = format!("default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; frame-ancestors 'none'");
    let headers = [
        (header::CONTENT_SECURITY_POLICY, policy.as_str()),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (status, headers, Html(html)).into_response()
}

#[cfg(test)]
mod tests {
    use super::super::IdentityProvider;
    use super::*;

    const BACK: &str = "https://console.example/console/callback";

    async fn provider() -> IdentityProvider {
        let provider = IdentityProvider::start().await.unwrap();
        let url = "https://console.example".to_owned();
        provider.register_console(RegisteredConsole { url, ca_pem: String::new() });
        provider
    }

    fn authorization(provider: &IdentityProvider, changed: &[(&str, &str)]) -> String {
        let challenge = URL_SAFE_NO_PAD.encode(Sha256::digest("v".repeat(43)));
        let mut query = BTreeMap::from([
            ("client_id", CONSOLE_CLIENT_ID),
            ("redirect_uri", BACK),
            ("response_type", "code"),
            ("scope", "openid profile"),
            ("state", "s"),
            ("nonce", "n"),
            ("code_challenge", &challenge),
            ("code_challenge_method", "S256"),
        ]);
        query.extend(changed.iter().copied());
        let at = format!("{}/protocol/openid-connect/auth", provider.issuer());
        reqwest::Url::parse_with_params(&at, query).unwrap().to_string()
    }

    fn http() -> reqwest::Client {
        reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build().unwrap()
    }

    async fn log_in(provider: &IdentityProvider, password: &str) -> (u16, Option<reqwest::Url>) {
        let form = [("username", "user"), ("password", password)];
        let answer = http().post(authorization(provider, &[])).form(&form).send().await.unwrap();
        let location = answer.headers().get(header::LOCATION).map(|value| value.to_str().unwrap().parse().unwrap());
        (answer.status().as_u16(), location)
    }

    async fn tokens(provider: &IdentityProvider, form: &[(&str, &str)]) -> (u16, Value) {
        let url = format!("{}/protocol/openid-connect/token", provider.issuer());
        let request = http().post(url).basic_auth(CONSOLE_CLIENT_ID, Some(provider.console_secret().expose_secret()));
        let answer = request.form(form).send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    }

    #[tokio::test]
    async fn user_logs_in_by_the_form_and_the_code_holds_once_for_its_verifier() {
        let provider = provider().await;
        let page = reqwest::get(authorization(&provider, &[])).await.unwrap().text().await.unwrap();
        assert!(page.contains("<form method=\"post\">") && !page.contains("<script"), "{page}");
        assert_eq!(log_in(&provider, "wrong").await.0, 401);
        let password = provider.person("user").unwrap().password;
        let (status, back) = log_in(&provider, password.expose_secret()).await;
        let back = back.unwrap();
        assert!(status == 302 && back.as_str().starts_with(BACK), "{back}");
        let answer: BTreeMap<_, _> = back.query_pairs().into_owned().collect();
        assert_eq!((answer["state"].as_str(), &answer["iss"]), ("s", &provider.issuer()));
        let verifier = "v".repeat(43);
        let exchange = |code: String, verifier: String| {
            [
                ("grant_type", "authorization_code".to_owned()),
                ("code", code),
                ("redirect_uri", BACK.to_owned()),
                ("code_verifier", verifier),
            ]
        };
        let form = exchange(answer["code"].clone(), verifier);
        let form: Vec<_> = form.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let (status, issued) = tokens(&provider, &form).await;
        assert!(status == 200 && issued["id_token"].is_string(), "{issued}");
        assert_eq!(tokens(&provider, &form).await.1["error"], "invalid_grant", "a code is used once");
        let refresh = issued["refresh_token"].as_str().unwrap().to_owned();
        let form = [("grant_type", "refresh_token"), ("refresh_token", refresh.as_str())];
        assert_eq!(tokens(&provider, &form).await.0, 200);
        assert_eq!(tokens(&provider, &form).await.1["error"], "invalid_grant", "a refresh token is used once");
        let (_, back) = log_in(&provider, password.expose_secret()).await;
        let code = back.unwrap().query_pairs().find(|(name, _)| name == "code").unwrap().1.into_owned();
        let form = exchange(code, "w".repeat(43));
        let form: Vec<_> = form.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(tokens(&provider, &form).await.1["error"], "invalid_grant", "another verifier");
    }

    #[tokio::test]
    async fn gpuctl_logs_in_on_a_loopback_port_without_a_secret_and_its_codes_are_its_own() {
        const LOOPBACK: &str = "http://127.0.0.1:4711/callback";
        let provider = provider().await;
        let gpuctl = [("client_id", CLIENT_ID), ("redirect_uri", LOOPBACK)];
        let password = provider.person("user").unwrap().password;
        let form = [("username", "user"), ("password", password.expose_secret())];
        let authorized = async || {
            let answer = http().post(authorization(&provider, &gpuctl)).form(&form).send().await.unwrap();
            let cookie = answer.headers()[header::SET_COOKIE].to_str().unwrap().split(';').next().unwrap().to_owned();
            let back: reqwest::Url = answer.headers()[header::LOCATION].to_str().unwrap().parse().unwrap();
            assert!(back.as_str().starts_with(LOOPBACK), "{back}");
            (back.query_pairs().find(|(name, _)| name == "code").unwrap().1.into_owned(), cookie)
        };
        let verifier = "v".repeat(43);
        let exchange = |code: &str| {
            let verifier = verifier.as_str();
            [
                ("grant_type", "authorization_code"),
                ("code", code),
                ("redirect_uri", LOOPBACK),
                ("code_verifier", verifier),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
        };
        let url = format!("{}/protocol/openid-connect/token", provider.issuer());
        let public = async |fields: &[(String, String)]| {
            let client = [("client_id".to_owned(), CLIENT_ID.to_owned())];
            let answer = http().post(&url).form(&[client.as_slice(), fields].concat()).send().await.unwrap();
            answer.json::<Value>().await.unwrap()
        };
        let (code, cookie) = authorized().await;
        let issued = public(&exchange(&code)).await;
        assert!(issued["access_token"].is_string(), "{issued}");
        let refresh = [("grant_type", "refresh_token"), ("refresh_token", issued["refresh_token"].as_str().unwrap())];
        assert_eq!(tokens(&provider, &refresh).await.1["error"], "invalid_grant", "the console has no token of gpuctl");
        let refresh = refresh.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert!(public(&refresh).await["access_token"].is_string());

        let (code, _) = authorized().await;
        let fields = exchange(&code);
        let fields: Vec<_> = fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(tokens(&provider, &fields).await.1["error"], "invalid_grant", "the console has no code of gpuctl");
        // A program gets no code by the cookie of an earlier login.
        let answer = http().get(authorization(&provider, &gpuctl)).header(header::COOKIE, cookie).send().await.unwrap();
        assert_eq!((answer.status().as_u16(), answer.headers().get(header::LOCATION)), (200, None));
    }

    #[tokio::test]
    async fn foreign_client_redirect_and_missing_challenge_are_refused() {
        let provider = provider().await;
        for changed in [
            ("client_id", "other"),
            ("redirect_uri", "https://evil.example/console/callback"),
            ("response_type", "token"),
            ("scope", "profile"),
            ("code_challenge_method", "plain"),
        ] {
            let answer = http().get(authorization(&provider, &[changed])).send().await.unwrap();
            assert_eq!((answer.status().as_u16(), answer.headers().get(header::LOCATION)), (400, None), "{changed:?}");
        }
        for foreign in [
            BACK,
            "https://127.0.0.1:4711/callback",
            "http://127.0.0.1:4711/other",
            "http://127.0.0.1:4711@evil.example/callback",
            "http://localhost:4711/callback",
        ] {
            let changed = [("client_id", CLIENT_ID), ("redirect_uri", foreign)];
            let answer = http().get(authorization(&provider, &changed)).send().await.unwrap();
            assert_eq!(answer.status().as_u16(), 400, "{foreign}");
        }
    }
}
