//! A development identity provider: an OpenID Connect issuer with the token path and the claims of the real one.
//!
//! Plain HTTP on loopback. Its key, users' ids and passwords are those of an earlier start where they were saved. `POST …/token` accepts
//! `grant_type=password` (RFC 6749, section 4.3) of the command line's client, and the codes and refresh tokens of that client and of the web
//! console's ([`browser_login`], [`device_login`]); it answers errors by section 5.2.

pub mod browser_login;
mod device_login;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use anyhow::Context as _;
use axum::extract::rejection::FormRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Form, Json, Router};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jsonwebtoken::jwk::{Jwk, JwkSet, PublicKeyUse};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use crate::private_files;
use crate::settings::SavedSettings;
use browser_login::{BrowserLogins, CONSOLE_CLIENT_ID, LoginClient, LoginFaults, RegisteredConsole};
use device_login::{DEVICE_GRANT, DeviceLogins};

pub const REALM: &str = "gpuaas";
pub const CLIENT_ID: &str = "gpuaas-cli";
/// The audience of the tokens: their `aud`.
pub const AUDIENCE: &str = "gpuaas-api";

const PASSWORD_GRANT: &str = "password";

/// The lifetime of an access token, in seconds.
const TOKEN_SECONDS: i64 = 3600;

/// A user who can log in.
#[derive(Debug, Clone)]
pub struct DemoUser {
    /// The token's `sub`.
    pub id: Uuid,
    pub username: String,
    pub password: SecretString,
    /// The token's `realm_access.roles`.
    pub roles: Vec<String>,
    pub org_id: Option<String>,
    pub project_id: Option<String>,
    pub plan: Option<String>,
}

impl DemoUser {
    /// A user with a new id and a random password, without organisation, project or plan.
    pub fn new(username: &str, roles: &[&str]) -> Self {
        Self {
            id: Uuid::new_v4(),
            username: username.to_owned(),
            password: private_files::random_hex(16).into(),
            roles: roles.iter().map(|role| (*role).to_owned()).collect(),
            org_id: None,
            project_id: None,
            plan: None,
        }
    }
}

/// A running provider. Dropping it closes it.
pub struct IdentityProvider {
    issuer: Arc<Issuer>,
    server: tokio::task::JoinHandle<()>,
}

struct Issuer {
    auth_url: String,
    client_secret: SecretString,
    console_secret: SecretString,
    logins: BrowserLogins,
    devices: DeviceLogins,
    people: RwLock<Vec<DemoUser>>,
    keys: RwLock<Vec<SigningKey>>,
    key_set_reads: AtomicU64,
}

struct SigningKey {
    id: String,
    key: EncodingKey,
    public: Jwk,
}

impl IdentityProvider {
    /// Starts a provider on a random port of 127.0.0.1, with the users `admin`, `admin2` (roles `user` and `admin`), `user`
    /// and `user2` (role `user`).
    pub async fn start() -> anyhow::Result<Self> {
        Self::restore(&SavedSettings::ephemeral()).await
    }

    /// The same, with the port, the key and the users of an earlier start, where there was one.
    pub async fn restore(saved: &SavedSettings) -> anyhow::Result<Self> {
        let port = saved.port("the identity provider's port")?;
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", port.number)).await?;
        let address: SocketAddr = listener.local_addr()?;
        let mut people = vec![
            DemoUser::new("admin", &["user", "admin"]),
            DemoUser::new("admin2", &["user", "admin"]),
            DemoUser::new("user", &["user"]),
            DemoUser::new("user2", &["user"]),
        ];
        for person in &mut people {
            let name = &person.username;
            person.id = saved.value(&format!("id of {name}"), || Ok(person.id.to_string()))?.parse()?;
            person.password = saved.secret(&format!("password of {name}"), "", 16)?;
        }
        let issuer = Arc::new(Issuer {
            auth_url: format!("http://{address}"),
            client_secret: saved.secret("secret of the client", "", 16)?,
            console_secret: saved.secret("secret of the console's client", "", 16)?,
            logins: BrowserLogins::default(),
            devices: DeviceLogins::default(),
            people: RwLock::new(people),
            keys: RwLock::new(vec![SigningKey::saved(saved)?]),
            key_set_reads: AtomicU64::new(0),
        });
        let routes = Router::new()
            .route("/realms/{realm}/.well-known/openid-configuration", get(discovery))
            .route("/realms/{realm}/protocol/openid-connect/certs", get(key_set))
            .route("/realms/{realm}/protocol/openid-connect/token", post(token))
            .route(
                "/realms/{realm}/protocol/openid-connect/auth",
                get(browser_login::authorize).post(browser_login::log_in),
            )
            .route("/realms/{realm}/protocol/openid-connect/logout", get(browser_login::end_session))
            .route("/realms/{realm}/protocol/openid-connect/auth/device", post(device_login::authorize))
            .route("/realms/{realm}/device", get(device_login::show).post(device_login::confirm))
            .with_state(Arc::clone(&issuer));
        let server = tokio::spawn(async move {
            // It ends when the listener fails, which one on loopback does not.
            let _ = axum::serve(listener, routes).await;
        });
        Ok(Self { issuer, server })
    }

    /// `{auth_url}` of the specification: the part before `/realms/…`.
    pub fn auth_url(&self) -> &str {
        &self.issuer.auth_url
    }

    /// The tokens' `iss`, below which the discovery document lies.
    pub fn issuer(&self) -> String {
        self.issuer.name()
    }

    pub fn client_secret(&self) -> &SecretString {
        &self.issuer.client_secret
    }

    /// The secret of the web console's client.
    pub fn console_secret(&self) -> &SecretString {
        &self.issuer.console_secret
    }

    /// Lets people log in to the console at this address.
    pub fn register_console(&self, console: RegisteredConsole) {
        self.issuer.logins.register(console);
    }

    /// Has the provider make these mistakes, and no others.
    pub fn set_login_faults(&self, faults: LoginFaults) {
        self.issuer.logins.set_faults(faults);
    }

    /// How many times a refresh token was presented.
    pub fn refresh_calls(&self) -> u64 {
        self.issuer.logins.refresh_calls()
    }

    /// Ends the browser logins of a user, and notifies the console of it.
    pub async fn end_logins_of(&self, username: &str) -> anyhow::Result<()> {
        self.issuer.end_sessions_of(username).await
    }

    pub fn person(&self, username: &str) -> Option<DemoUser> {
        self.issuer.person(username)
    }

    /// Adds a user; one of the same name is replaced.
    pub fn admit(&self, person: DemoUser) {
        let mut people = self.issuer.people.write().unwrap_or_else(PoisonError::into_inner);
        people.retain(|known| known.username != person.username);
        people.push(person);
    }

    /// The claims that a login of this user would get now, to be changed and passed to [`Self::mint`].
    pub fn claims_of(&self, username: &str) -> anyhow::Result<Value> {
        let person = self.person(username).with_context(|| format!("there is no user {username}"))?;
        Ok(self.issuer.claims(&person))
    }

    /// An access token as a login of this user returns it.
    pub fn token_of(&self, username: &str) -> anyhow::Result<SecretString> {
        self.mint(&self.claims_of(username)?)
    }

    /// Signs any claims with the current key.
    pub fn mint(&self, claims: &Value) -> anyhow::Result<SecretString> {
        self.issuer.mint(claims)
    }

    /// Signs with a new key from here on, and publishes it beside the old ones.
    pub fn rotate(&self) -> anyhow::Result<()> {
        let key = SigningKey::generate()?;
        self.issuer.keys.write().unwrap_or_else(PoisonError::into_inner).push(key);
        Ok(())
    }

    /// Publishes the current key alone: tokens of other keys are not valid any more.
    pub fn forget_old_keys(&self) {
        let mut keys = self.issuer.keys.write().unwrap_or_else(PoisonError::into_inner);
        let old = keys.len().saturating_sub(1);
        keys.drain(..old);
    }

    /// How many times the key set was fetched.
    pub fn key_set_reads(&self) -> u64 {
        self.issuer.key_set_reads.load(Ordering::Relaxed)
    }
}

impl Drop for IdentityProvider {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Issuer {
    fn name(&self) -> String {
        format!("{}/realms/{REALM}", self.auth_url)
    }

    fn person(&self, username: &str) -> Option<DemoUser> {
        let people = self.people.read().unwrap_or_else(PoisonError::into_inner);
        people.iter().find(|person| person.username == username).cloned()
    }

    /// The user, where the password is theirs.
    fn authenticate(&self, username: &str, password: &SecretString) -> Option<DemoUser> {
        self.person(username).filter(|person| same(password.expose_secret(), person.password.expose_secret()))
    }

    /// The client of a token request. `gpuctl`'s has a secret for the password grant alone: it is a public one otherwise (RFC 8252, section
    /// 8.4).
    fn client_of(&self, headers: &HeaderMap, request: &TokenRequest) -> Option<LoginClient> {
        let by_header = basic_credentials(headers).map(|(id, secret)| (id, Some(secret)));
        let (id, given) = by_header.or_else(|| Some((request.client_id.clone()?, request.client_secret.clone())))?;
        let agrees = |known: &SecretString| {
            given.as_ref().is_some_and(|given| same(given.expose_secret(), known.expose_secret()))
        };
        let is_public = given.is_none() && request.grant_type.as_deref() != Some(PASSWORD_GRANT);
        match id.as_str() {
            CONSOLE_CLIENT_ID if agrees(&self.console_secret) => Some(LoginClient::Console),
            CLIENT_ID if is_public || agrees(&self.client_secret) => Some(LoginClient::Gpuctl),
            _ => None,
        }
    }

    fn claims(&self, person: &DemoUser) -> Value {
        let now = chrono::Utc::now().timestamp();
        let mut claims = json!({
            "iss": self.name(),
            "aud": AUDIENCE,
            "azp": CLIENT_ID,
            "typ": "Bearer",
            "sub": person.id,
            "preferred_username": person.username,
            "realm_access": { "roles": person.roles },
            "iat": now,
            "nbf": now,
            "exp": now + self.logins.token_seconds().unwrap_or(TOKEN_SECONDS),
            "jti": Uuid::new_v4(),
        });
        for (name, value) in [("org_id", &person.org_id), ("project_id", &person.project_id), ("plan", &person.plan)] {
            if let Some(value) = value {
                claims[name] = json!(value);
            }
        }
        claims
    }

    fn mint(&self, claims: &Value) -> anyhow::Result<SecretString> {
        let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        let current = keys.last().context("the provider has no key")?;
        let mut header = Header::new(Algorithm::ES256);
        header.kid = Some(current.id.clone());
        Ok(jsonwebtoken::encode(&header, claims, &current.key)?.into())
    }
}

impl SigningKey {
    fn generate() -> anyhow::Result<Self> {
        Self::saved(&SavedSettings::ephemeral())
    }

    fn saved(saved: &SavedSettings) -> anyhow::Result<Self> {
        let made = || Ok(hex::encode(rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?.serialized_der()));
        let key = EncodingKey::from_ec_der(&hex::decode(saved.value("the identity provider's key", made)?)?);
        let id = saved.value("id of the identity provider's key", || Ok(private_files::random_hex(8)))?;
        let mut public = Jwk::from_encoding_key(&key, Algorithm::ES256)?;
        public.common.key_id = Some(id.clone());
        public.common.public_key_use = Some(PublicKeyUse::Signature);
        Ok(Self { id, key, public })
    }
}

async fn discovery(State(issuer): State<Arc<Issuer>>, Path(realm): Path<String>) -> Response {
    if realm != REALM {
        return no_such_realm();
    }
    let base = issuer.name();
    Json(json!({
        "issuer": base,
        "token_endpoint": format!("{base}/protocol/openid-connect/token"),
        "jwks_uri": format!("{base}/protocol/openid-connect/certs"),
        "authorization_endpoint": format!("{base}/protocol/openid-connect/auth"),
        "end_session_endpoint": format!("{base}/protocol/openid-connect/logout"),
        "device_authorization_endpoint": format!("{base}/protocol/openid-connect/auth/device"),
        "grant_types_supported": ["password", "authorization_code", "refresh_token", DEVICE_GRANT],
        "response_types_supported": ["code"],
        "code_challenge_methods_supported": ["S256"],
        "authorization_response_iss_parameter_supported": true,
        "backchannel_logout_supported": true,
        "backchannel_logout_session_supported": true,
        "subject_types_supported": ["public"],
        "id_token_signing_alg_values_supported": ["ES256"],
        "token_endpoint_auth_methods_supported": ["client_secret_post", "client_secret_basic", "none"],
    }))
    .into_response()
}

async fn key_set(State(issuer): State<Arc<Issuer>>, Path(realm): Path<String>) -> Response {
    if realm != REALM {
        return no_such_realm();
    }
    issuer.key_set_reads.fetch_add(1, Ordering::Relaxed);
    let keys = issuer.keys.read().unwrap_or_else(PoisonError::into_inner);
    Json(JwkSet { keys: keys.iter().map(|key| key.public.clone()).collect() }).into_response()
}

#[derive(Deserialize)]
struct TokenRequest {
    grant_type: Option<String>,
    client_id: Option<String>,
    client_secret: Option<SecretString>,
    username: Option<String>,
    password: Option<SecretString>,
    code: Option<String>,
    redirect_uri: Option<String>,
    code_verifier: Option<String>,
    refresh_token: Option<SecretString>,
    device_code: Option<SecretString>,
}

async fn token(
    State(issuer): State<Arc<Issuer>>,
    Path(realm): Path<String>,
    headers: HeaderMap,
    form: Result<Form<TokenRequest>, FormRejection>,
) -> Response {
    if realm != REALM {
        return no_such_realm();
    }
    let Ok(Form(request)) = form else {
        return refusal(
            StatusCode::BAD_REQUEST,
            "invalid_request",
            "The body must be application/x-www-form-urlencoded",
        );
    };
    let Some(client) = issuer.client_of(&headers, &request) else {
        return refusal(StatusCode::UNAUTHORIZED, "invalid_client", "Unknown client, or a wrong client_secret");
    };
    match (client, request.grant_type.as_deref()) {
        (LoginClient::Gpuctl, Some(PASSWORD_GRANT)) => by_password(&issuer, request),
        (LoginClient::Gpuctl, Some(DEVICE_GRANT)) => device_login::token(&issuer, &request),
        (_, Some(_)) => browser_login::login_token(&issuer, client, &request).await,
        (_, None) => refusal(StatusCode::BAD_REQUEST, "invalid_request", "Missing form field: grant_type"),
    }
}

/// A token for a name and a password (RFC 6749, section 4.3).
fn by_password(issuer: &Issuer, request: TokenRequest) -> Response {
    let (Some(username), Some(password)) = (request.username, request.password) else {
        return refusal(StatusCode::BAD_REQUEST, "invalid_request", "Missing form field: username or password");
    };
    let Some(person) = issuer.authenticate(&username, &password) else {
        return refusal(StatusCode::BAD_REQUEST, "invalid_grant", "Invalid user credentials");
    };
    match issuer.mint(&issuer.claims(&person)) {
        Ok(token) => {
            let answer = json!({
                "access_token": token.expose_secret(),
                "token_type": "Bearer",
                "expires_in": TOKEN_SECONDS,
            });
            ([(header::CACHE_CONTROL, "no-store"), (header::PRAGMA, "no-cache")], Json(answer)).into_response()
        }
        Err(error) => refusal(StatusCode::INTERNAL_SERVER_ERROR, "server_error", &error.to_string()),
    }
}

/// Client credentials of an `Authorization: Basic` header (RFC 6749, section 2.3.1).
fn basic_credentials(headers: &HeaderMap) -> Option<(String, SecretString)> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Basic ")?;
    let text = String::from_utf8(STANDARD.decode(value.trim()).ok()?).ok()?;
    let (id, secret) = text.split_once(':')?;
    // Both are form-encoded before they are joined. Neither has a character that would need it but the hyphen.
    let decoded = |text: &str| text.replace("%2D", "-");
    Some((decoded(id), decoded(secret).into()))
}

/// Compares digests, so that the duration does not reveal where the texts differ.
fn same(one: &str, other: &str) -> bool {
    Sha256::digest(one) == Sha256::digest(other)
}

fn refusal(status: StatusCode, error: &str, description: &str) -> Response {
    let body = Json(json!({ "error": error, "error_description": description }));
    let mut response = (status, [(header::CACHE_CONTROL, "no-store")], body).into_response();
    if status == StatusCode::UNAUTHORIZED {
        response
            .headers_mut()
            .insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Basic realm=\"gpuaas\""));
    }
    response
}

fn no_such_realm() -> Response {
    (StatusCode::NOT_FOUND, Json(json!({ "error": "Realm does not exist" }))).into_response()
}

#[cfg(test)]
mod tests {
    use jsonwebtoken::{DecodingKey, Validation};

    use super::*;

    async fn ask(provider: &IdentityProvider, form: &[(&str, &str)]) -> (u16, Value) {
        let url = format!("{}/protocol/openid-connect/token", provider.issuer());
        let answer = reqwest::Client::new().post(url).form(form).send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    }

    #[tokio::test]
    async fn login_returns_a_token_that_the_published_key_verifies() {
        let provider = IdentityProvider::start().await.unwrap();
        let person = provider.person("admin").unwrap();
        let discovery: Value = reqwest::get(format!("{}/.well-known/openid-configuration", provider.issuer()))
            .await
            .unwrap()
            .json()
            .await
            .unwrap();
        assert_eq!(discovery["issuer"], provider.issuer());
        let answer = reqwest::Client::new()
            .post(discovery["token_endpoint"].as_str().unwrap())
            .basic_auth(CLIENT_ID, Some(provider.client_secret().expose_secret()))
            .form(&[("grant_type", "password"), ("username", "admin"), ("password", person.password.expose_secret())])
            .send()
            .await
            .unwrap();
        assert_eq!(answer.headers()["cache-control"], "no-store");
        let token = answer.json::<Value>().await.unwrap()["access_token"].as_str().unwrap().to_owned();

        let keys: JwkSet = reqwest::get(discovery["jwks_uri"].as_str().unwrap()).await.unwrap().json().await.unwrap();
        assert_eq!(provider.key_set_reads(), 1);
        let header = jsonwebtoken::decode_header(&token).unwrap();
        let key = DecodingKey::from_jwk(keys.find(&header.kid.unwrap()).unwrap()).unwrap();
        let mut validation = Validation::new(Algorithm::ES256);
        validation.set_audience(&[AUDIENCE]);
        validation.set_issuer(&[provider.issuer()]);
        let claims = jsonwebtoken::decode::<Value>(&token, &key, &validation).unwrap().claims;
        assert_eq!(claims["sub"], person.id.to_string());
        assert_eq!(claims["realm_access"]["roles"], json!(["user", "admin"]));
    }

    #[tokio::test]
    async fn refusals_are_those_of_rfc_6749() {
        let provider = IdentityProvider::start().await.unwrap();
        let secret = provider.client_secret().expose_secret();
        let client = [("client_id", CLIENT_ID), ("client_secret", secret)];
        let cases = [
            (vec![("grant_type", "password"), ("username", "user"), ("password", "wrong")], "invalid_grant"),
            (vec![("grant_type", "password"), ("username", "nobody"), ("password", "x")], "invalid_grant"),
            (vec![("grant_type", "authorization_code"), ("code", "x")], "invalid_grant"),
            (vec![("grant_type", "client_credentials")], "unsupported_grant_type"),
            (vec![("grant_type", "password"), ("username", "user")], "invalid_request"),
        ];
        for (fields, error) in cases {
            let (status, body) = ask(&provider, &[&client, fields.as_slice()].concat()).await;
            assert_eq!((status, body["error"].as_str().unwrap()), (400, error), "{fields:?}");
        }
        let password = ("grant_type", "password");
        for client in [vec![("client_secret", "wrong")], vec![("client_secret", "wrong"), password], vec![password]] {
            let (status, body) = ask(&provider, &[&[("client_id", CLIENT_ID)], client.as_slice()].concat()).await;
            assert_eq!((status, body["error"].as_str().unwrap()), (401, "invalid_client"), "{client:?}");
        }
    }

    #[tokio::test]
    async fn old_key_is_still_published_after_a_rotation() {
        let provider = IdentityProvider::start().await.unwrap();
        let before = provider.token_of("user").unwrap();
        provider.rotate().unwrap();
        let after = provider.token_of("user").unwrap();
        let url = format!("{}/protocol/openid-connect/certs", provider.issuer());
        let keys: JwkSet = reqwest::get(url).await.unwrap().json().await.unwrap();
        for token in [before, after] {
            let id = jsonwebtoken::decode_header(token.expose_secret()).unwrap().kid.unwrap();
            assert!(keys.find(&id).is_some());
        }
    }
}
