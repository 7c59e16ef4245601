//! The identity provider: found by OpenID Connect Discovery, asked for tokens by OAuth 2.0 (RFC 6749), its device grant (RFC 8628) or its
//! authorization code with PKCE (RFC 7636) on a port of this machine (RFC 8252).

use super::loopback::Loopback;
use super::store::Login;
use crate::failure::{Ended, Failure, chain};
use crate::out::say_always;
use crate::web::{self, Trust, Unread};
use chrono::{DateTime, TimeDelta, Utc};
use oauth2::basic::{BasicClient, BasicTokenResponse};
use oauth2::{
    AuthUrl, AuthorizationCode, ClientId, ClientSecret, CsrfToken, DeviceAuthorizationUrl, EndpointNotSet, EndpointSet,
    ErrorResponse, HttpRequest, HttpResponse, PkceCodeChallenge, RedirectUrl, RefreshToken, RequestTokenError,
    ResourceOwnerPassword, ResourceOwnerUsername, Scope, StandardDeviceAuthorizationResponse, TokenResponse as _,
    TokenUrl,
};
use reqwest::{Client, Url};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

const ANSWERS_WITHIN: Duration = Duration::from_secs(20);
/// The longest answer of a provider that is read.
const LONGEST: usize = 512 * 1024;
/// How long somebody may take to log in.
const LOGS_IN_WITHIN: Duration = Duration::from_secs(600);

type TokenClient = BasicClient<EndpointNotSet, EndpointNotSet, EndpointNotSet, EndpointNotSet, EndpointSet>;

/// What a provider says of itself (OpenID Connect Discovery 1.0, section 3; RFC 8628, section 4).
#[derive(Debug, Deserialize)]
pub(crate) struct Discovered {
    issuer: String,
    pub(crate) token_endpoint: String,
    pub(crate) authorization_endpoint: Option<String>,
    pub(crate) device_authorization_endpoint: Option<String>,
    pub(crate) revocation_endpoint: Option<String>,
    #[serde(default)]
    pub(crate) grant_types_supported: Vec<String>,
}

/// Who asks a provider, and for what.
#[derive(Clone, Debug)]
pub(crate) struct Asking {
    pub(crate) client_id: String,
    pub(crate) client_secret: Option<SecretString>,
    pub(crate) scopes: Vec<String>,
    /// What the tokens are for (RFC 8707).
    pub(crate) resource: Option<String>,
}

/// What a provider gave.
pub(crate) struct Granted {
    pub(crate) access_token: SecretString,
    pub(crate) refresh_token: Option<SecretString>,
    pub(crate) expires_at: Option<DateTime<Utc>>,
}

/// Finds out what the provider offers.
pub(crate) async fn discover(issuer: &str, ca_bundle: Option<&Path>) -> Result<(Client, Discovered), Failure> {
    let issuer = issuer.trim_end_matches('/');
    let http = http(issuer, ca_bundle)?;
    let url = format!("{issuer}/.well-known/openid-configuration");
    let unreached = |cause: &str| {
        Failure::new(Ended::Network, format!("the identity provider {issuer} cannot be reached: {cause}"))
            .next("Check --issuer (or SVC_OIDC_ISSUER) and the network.")
    };
    let answer = http.get(&url).send().await.map_err(|error| unreached(&chain(&error)))?;
    let status = answer.status();
    let body = web::body(answer, LONGEST).await.map_err(|error| unreached(&chain(&error)))?;
    let no_provider = |why: String| {
        Failure::usage(format!("{url} is no description of an identity provider: {why}"))
            .next("Give the issuer exactly as the service's operator names it: --issuer")
    };
    if !status.is_success() {
        return Err(no_provider(format!("it answers {status}")));
    }
    let found: Discovered = serde_json::from_slice(&body).map_err(|error| no_provider(error.to_string()))?;
    // Whoever describes itself as another is not believed (section 4.3).
    if found.issuer.trim_end_matches('/') != issuer {
        return Err(no_provider(format!("it is of {}", found.issuer)));
    }
    let others = [&found.authorization_endpoint, &found.device_authorization_endpoint, &found.revocation_endpoint];
    for endpoint in others.into_iter().flatten().chain([&found.token_endpoint]) {
        web::address(endpoint)?;
    }
    Ok((http, found))
}

pub(crate) fn http(url: &str, ca_bundle: Option<&Path>) -> Result<Client, Failure> {
    let trust = ca_bundle.map_or(Trust::System, Trust::Also);
    web::built(web::client(&web::address(url)?, trust)?.timeout(ANSWERS_WITHIN))
}

/// A provider that is asked.
pub(crate) struct Provider {
    http: Client,
    client: TokenClient,
    asking: Asking,
}

impl Provider {
    pub(crate) fn new(http: Client, token_endpoint: &str, asking: Asking) -> Result<Self, Failure> {
        let mut client = BasicClient::new(ClientId::new(asking.client_id.clone()));
        if let Some(secret) = &asking.client_secret {
            client = client.set_client_secret(ClientSecret::new(secret.expose_secret().to_owned()));
        }
        let client = client.set_token_uri(TokenUrl::new(token_endpoint.to_owned()).map_err(malformed)?);
        Ok(Self { http, client, asking })
    }

    /// The one that this login came from.
    pub(crate) fn of(login: &Login) -> Result<Self, Failure> {
        let asking = Asking {
            client_id: login.client_id.clone(),
            client_secret: login.client_secret.clone(),
            scopes: Vec::new(),
            resource: None,
        };
        let http = http(&login.token_endpoint, login.ca_bundle.as_deref())?;
        Self::new(http, &login.token_endpoint, asking)
    }

    fn scopes(&self) -> Vec<Scope> {
        self.asking.scopes.iter().cloned().map(Scope::new).collect()
    }

    fn resource(&self) -> impl Iterator<Item = (&'static str, String)> + use<> {
        self.asking.resource.clone().into_iter().map(|resource| ("resource", resource))
    }

    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, Unanswered> {
        let (head, body) = request.into_parts();
        let request = self.http.request(head.method, head.uri.to_string()).headers(head.headers).body(body);
        let answer = request.send().await.map_err(Unanswered::Sent)?;
        let (status, headers) = (answer.status(), answer.headers().clone());
        let body = web::body(answer, LONGEST).await.map_err(Unanswered::Read)?;
        let mut answer = HttpResponse::new(body);
        (*answer.status_mut(), *answer.headers_mut()) = (status, headers);
        Ok(answer)
    }

    /// With a password: for providers on a developer's own machine.
    pub(crate) async fn by_password(&self, username: &str, password: &SecretString) -> Result<Granted, Failure> {
        let username = ResourceOwnerUsername::new(username.to_owned());
        let password = ResourceOwnerPassword::new(password.expose_secret().to_owned());
        let mut request = self.client.exchange_password(&username, &password).add_scopes(self.scopes());
        for (name, value) in self.resource() {
            request = request.add_extra_param(name, value);
        }
        let send = |request| self.send(request);
        request.request_async(&send).await.map(granted).map_err(refused)
    }

    /// With a code that is entered elsewhere.
    pub(crate) async fn by_device(&self, endpoint: &str) -> Result<Granted, Failure> {
        let endpoint = DeviceAuthorizationUrl::new(endpoint.to_owned()).map_err(malformed)?;
        let client = self.client.clone().set_device_authorization_url(endpoint);
        let send = |request| self.send(request);
        let mut request = client.exchange_device_code().add_scopes(self.scopes());
        for (name, value) in self.resource() {
            request = request.add_extra_param(name, value);
        }
        let asked: StandardDeviceAuthorizationResponse = request.request_async(&send).await.map_err(refused)?;
        let at = asked.verification_uri_complete().map_or(asked.verification_uri().as_str(), |url| url.secret());
        say_always(&format!("Open {}", crate::text::plain(at)));
        say_always(&format!("and confirm the code {}", crate::text::plain(asked.user_code().secret())));
        let mut request = client.exchange_device_access_token(&asked);
        for (name, value) in self.resource() {
            request = request.add_extra_param(name, value);
        }
        let granted_to = request.request_async(&send, tokio::time::sleep, Some(LOGS_IN_WITHIN)).await;
        granted_to.map(granted).map_err(refused)
    }

    /// In the user's browser, which comes back to a port of this machine.
    pub(crate) async fn by_browser(&self, endpoint: &str, issuer: &str, opens: bool) -> Result<Granted, Failure> {
        let loopback = Loopback::bind().await?;
        let back = RedirectUrl::new(loopback.address().to_owned()).map_err(malformed)?;
        let authorization = AuthUrl::new(endpoint.to_owned()).map_err(malformed)?;
        let client = self.client.clone().set_auth_uri(authorization).set_redirect_uri(back);
        let (challenge, verifier) = PkceCodeChallenge::new_random_sha256();
        let mut request =
            client.authorize_url(CsrfToken::new_random).add_scopes(self.scopes()).set_pkce_challenge(challenge);
        // Without it no provider gives what a login is renewed with (OpenID Connect Core, section 11).
        if self.asking.scopes.iter().any(|scope| scope == "offline_access") {
            request = request.add_extra_param("prompt", "consent");
        }
        for (name, value) in self.resource() {
            request = request.add_extra_param(name, value);
        }
        let (url, state) = request.url();
        say_always(&format!("Log in with your browser: {url}"));
        if opens && open::that_detached(url.as_str()).is_err() {
            say_always("No browser could be opened here; open that address yourself.");
        }
        let code = tokio::time::timeout(LOGS_IN_WITHIN, loopback.code(state.secret(), issuer))
            .await
            .map_err(|_| Failure::new(Ended::TooLate, "nobody logged in in time"))??;
        let mut request = client.exchange_code(AuthorizationCode::new(code)).set_pkce_verifier(verifier);
        for (name, value) in self.resource() {
            request = request.add_extra_param(name, value);
        }
        let send = |request| self.send(request);
        request.request_async(&send).await.map(granted).map_err(refused)
    }

    /// With a service account's key (RFC 6749, section 4.4). The service itself issues these tokens, and refuses in its own envelope.
    pub(crate) async fn by_client_credentials(&self) -> Result<Granted, Failure> {
        let secret = self.asking.client_secret.as_ref().map(|secret| secret.expose_secret());
        let request = self.http.post(self.client.token_uri().url().clone()).basic_auth(&self.asking.client_id, secret);
        let answer = request.form(&[("grant_type", "client_credentials")]).send().await;
        let answer = answer.map_err(|error| Failure::network("the service cannot be reached", error))?;
        let status = answer.status();
        let body = web::body(answer, LONGEST).await;
        let body = body.map_err(|error| Failure::network("the service's answer cannot be read", error))?;
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        if !status.is_success() {
            return Err(Failure::of_answer(status, &body, None));
        }
        let issued: Issued = serde_json::from_value(body)
            .map_err(|_| Failure::new(Ended::Server, "the server's answer is no access token"))?;
        let life = TimeDelta::from_std(Duration::from_secs(issued.expires_in)).ok();
        Ok(Granted {
            access_token: issued.access_token,
            refresh_token: None,
            expires_at: life.and_then(|life| Utc::now().checked_add_signed(life)),
        })
    }

    /// A new access token for an old login.
    pub(crate) async fn renew(&self, refresh_token: &SecretString) -> Result<Granted, Failure> {
        let token = RefreshToken::new(refresh_token.expose_secret().to_owned());
        let send = |request| self.send(request);
        self.client.exchange_refresh_token(&token).request_async(&send).await.map(granted).map_err(refused)
    }

    /// Tells the provider that the login is over (RFC 7009). Whether it listens is its own affair: the login is gone from here.
    pub(crate) async fn revoke(&self, endpoint: &str, token: &SecretString) -> Result<(), Failure> {
        let url = Url::parse(endpoint).map_err(malformed)?;
        let mut form = vec![("token", token.expose_secret()), ("client_id", &self.asking.client_id)];
        form.extend(self.asking.client_secret.as_ref().map(|secret| ("client_secret", secret.expose_secret())));
        let answer = self.http.post(url).form(&form).send().await;
        let answer = answer.map_err(|error| Failure::network("the identity provider cannot be reached", error))?;
        if answer.status().is_success() {
            return Ok(());
        }
        Err(Failure::new(Ended::Server, format!("the identity provider answered {}", answer.status())))
    }
}

/// A service account's access token.
#[derive(Deserialize)]
struct Issued {
    access_token: SecretString,
    expires_in: u64,
}

#[derive(Debug, thiserror::Error)]
enum Unanswered {
    #[error("no answer")]
    Sent(#[source] reqwest::Error),
    #[error(transparent)]
    Read(Unread),
}

fn granted(response: BasicTokenResponse) -> Granted {
    let secret = |text: &str| SecretString::from(text.to_owned());
    let life = response.expires_in().and_then(|life| TimeDelta::from_std(life).ok());
    Granted {
        access_token: secret(response.access_token().secret()),
        refresh_token: response.refresh_token().map(|token| secret(token.secret())),
        expires_at: life.and_then(|life| Utc::now().checked_add_signed(life)),
    }
}

fn malformed(error: impl std::error::Error) -> Failure {
    Failure::usage(format!("an address of the identity provider cannot be used: {error}"))
}

fn refused<E: std::error::Error + 'static, T: ErrorResponse + std::fmt::Display + 'static>(
    error: RequestTokenError<E, T>,
) -> Failure {
    match error {
        RequestTokenError::ServerResponse(said) => {
            Failure::new(Ended::LoggedOut, format!("the identity provider refuses: {said}"))
                .next("Log in: gpuctl login")
        }
        RequestTokenError::Request(error) => Failure::network("the identity provider cannot be reached", error),
        // What it answered may hold tokens, and is not shown.
        RequestTokenError::Parse(..) => {
            Failure::new(Ended::Server, "the identity provider did not answer as OAuth 2.0 (RFC 6749) says")
        }
        RequestTokenError::Other(why) => Failure::new(Ended::LoggedOut, format!("the log-in did not end well: {why}")),
    }
}
