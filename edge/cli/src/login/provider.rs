//! The client of the identity provider: OpenID Connect Discovery, and tokens by OAuth 2.0 (RFC 6749), the device grant (RFC 8628) or the
//! authorization code with PKCE (RFC 7636) on a loopback port (RFC 8252).

use super::login_store::Login;
use super::loopback::Loopback;
use crate::failure::{ExitStatus, Failure, chain};
use crate::http_client::{self, BodyError, Trust};
use crate::output::print_notice;
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

const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// The longest response of a provider that is read.
const MAX_ANSWER_BYTES: usize = 512 * 1024;
/// How long the user may take to log in.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(600);

type TokenClient = BasicClient<EndpointNotSet, EndpointNotSet, EndpointNotSet, EndpointNotSet, EndpointSet>;

/// The metadata of a provider (OpenID Connect Discovery 1.0, section 3; RFC 8628, section 4).
#[derive(Debug, Deserialize)]
pub(crate) struct ProviderMetadata {
    issuer: String,
    pub(crate) token_endpoint: String,
    pub(crate) authorization_endpoint: Option<String>,
    pub(crate) device_authorization_endpoint: Option<String>,
    pub(crate) revocation_endpoint: Option<String>,
    #[serde(default)]
    pub(crate) grant_types_supported: Vec<String>,
}

/// The OAuth client, its scopes and its resource.
#[derive(Clone, Debug)]
pub(crate) struct ClientConfig {
    pub(crate) client_id: String,
    pub(crate) client_secret: Option<SecretString>,
    pub(crate) scopes: Vec<String>,
    /// What the tokens are for (RFC 8707).
    pub(crate) resource: Option<String>,
}

/// The tokens that a provider issued.
pub(crate) struct TokenGrant {
    pub(crate) access_token: SecretString,
    pub(crate) refresh_token: Option<SecretString>,
    pub(crate) expires_at: Option<DateTime<Utc>>,
}

/// Reads the provider's metadata.
pub(crate) async fn discover(issuer: &str, ca_bundle: Option<&Path>) -> Result<(Client, ProviderMetadata), Failure> {
    let issuer = issuer.trim_end_matches('/');
    let http = http(issuer, ca_bundle)?;
    let url = format!("{issuer}/.well-known/openid-configuration");
    let unreached = |cause: &str| {
        Failure::new(ExitStatus::Network, format!("the identity provider {issuer} cannot be reached: {cause}"))
            .next("Check --issuer (or SVC_OIDC_ISSUER) and the network.")
    };
    let answer = http.get(&url).send().await.map_err(|error| unreached(&chain(&error)))?;
    let status = answer.status();
    let body = http_client::body(answer, MAX_ANSWER_BYTES).await.map_err(|error| unreached(&chain(&error)))?;
    let no_provider = |why: String| {
        Failure::usage(format!("{url} is no description of an identity provider: {why}"))
            .next("Give the issuer exactly as the service's operator names it: --issuer")
    };
    if !status.is_success() {
        return Err(no_provider(format!("it answers {status}")));
    }
    let found: ProviderMetadata = serde_json::from_slice(&body).map_err(|error| no_provider(error.to_string()))?;
    // Metadata of another issuer is refused (section 4.3).
    if found.issuer.trim_end_matches('/') != issuer {
        return Err(no_provider(format!("it is of {}", found.issuer)));
    }
    let others = [&found.authorization_endpoint, &found.device_authorization_endpoint, &found.revocation_endpoint];
    for endpoint in others.into_iter().flatten().chain([&found.token_endpoint]) {
        http_client::address(endpoint)?;
    }
    Ok((http, found))
}

pub(crate) fn http(url: &str, ca_bundle: Option<&Path>) -> Result<Client, Failure> {
    let trust = ca_bundle.map_or(Trust::System, Trust::Also);
    http_client::build(http_client::client(&http_client::address(url)?, trust)?.timeout(ANSWER_TIMEOUT))
}

/// A provider's token endpoint and the client for it.
pub(crate) struct Provider {
    http: Client,
    client: TokenClient,
    config: ClientConfig,
}

impl Provider {
    pub(crate) fn new(http: Client, token_endpoint: &str, config: ClientConfig) -> Result<Self, Failure> {
        let mut client = BasicClient::new(ClientId::new(config.client_id.clone()));
        if let Some(secret) = &config.client_secret {
            client = client.set_client_secret(ClientSecret::new(secret.expose_secret().to_owned()));
        }
        let client = client.set_token_uri(TokenUrl::new(token_endpoint.to_owned()).map_err(malformed)?);
        Ok(Self { http, client, config })
    }

    /// The provider of this login.
    pub(crate) fn of(login: &Login) -> Result<Self, Failure> {
        let config = ClientConfig {
            client_id: login.client_id.clone(),
            client_secret: login.client_secret.clone(),
            scopes: Vec::new(),
            resource: None,
        };
        let http = http(&login.token_endpoint, login.ca_bundle.as_deref())?;
        Self::new(http, &login.token_endpoint, config)
    }

    fn scopes(&self) -> Vec<Scope> {
        self.config.scopes.iter().cloned().map(Scope::new).collect()
    }

    fn resource(&self) -> impl Iterator<Item = (&'static str, String)> + use<> {
        self.config.resource.clone().into_iter().map(|resource| ("resource", resource))
    }

    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (head, body) = request.into_parts();
        let request = self.http.request(head.method, head.uri.to_string()).headers(head.headers).body(body);
        let answer = request.send().await.map_err(HttpError::Sent)?;
        let (status, headers) = (answer.status(), answer.headers().clone());
        let body = http_client::body(answer, MAX_ANSWER_BYTES).await.map_err(HttpError::Read)?;
        let mut answer = HttpResponse::new(body);
        (*answer.status_mut(), *answer.headers_mut()) = (status, headers);
        Ok(answer)
    }

    /// The password grant, for development providers.
    pub(crate) async fn by_password(&self, username: &str, password: &SecretString) -> Result<TokenGrant, Failure> {
        let username = ResourceOwnerUsername::new(username.to_owned());
        let password = ResourceOwnerPassword::new(password.expose_secret().to_owned());
        let mut request = self.client.exchange_password(&username, &password).add_scopes(self.scopes());
        for (name, value) in self.resource() {
            request = request.add_extra_param(name, value);
        }
        let send = |request| self.send(request);
        request.request_async(&send).await.map(token_grant).map_err(token_error)
    }

    /// The device grant: the user confirms a code on another device.
    pub(crate) async fn by_device(&self, endpoint: &str) -> Result<TokenGrant, Failure> {
        let endpoint = DeviceAuthorizationUrl::new(endpoint.to_owned()).map_err(malformed)?;
        let client = self.client.clone().set_device_authorization_url(endpoint);
        let send = |request| self.send(request);
        let mut request = client.exchange_device_code().add_scopes(self.scopes());
        for (name, value) in self.resource() {
            request = request.add_extra_param(name, value);
        }
        let device_authorization: StandardDeviceAuthorizationResponse =
            request.request_async(&send).await.map_err(token_error)?;
        let at = device_authorization
            .verification_uri_complete()
            .map_or(device_authorization.verification_uri().as_str(), |url| url.secret());
        print_notice(&format!("Open {}", crate::printable::plain(at)));
        print_notice(&format!(
            "and confirm the code {}",
            crate::printable::plain(device_authorization.user_code().secret())
        ));
        let mut request = client.exchange_device_access_token(&device_authorization);
        for (name, value) in self.resource() {
            request = request.add_extra_param(name, value);
        }
        let grant = request.request_async(&send, tokio::time::sleep, Some(LOGIN_TIMEOUT)).await;
        grant.map(token_grant).map_err(token_error)
    }

    /// The authorization code grant, in the user's browser, which is redirected to a loopback port.
    pub(crate) async fn by_browser(&self, endpoint: &str, issuer: &str, opens: bool) -> Result<TokenGrant, Failure> {
        let loopback = Loopback::bind().await?;
        let back = RedirectUrl::new(loopback.address().to_owned()).map_err(malformed)?;
        let authorization = AuthUrl::new(endpoint.to_owned()).map_err(malformed)?;
        let client = self.client.clone().set_auth_uri(authorization).set_redirect_uri(back);
        let (challenge, verifier) = PkceCodeChallenge::new_random_sha256();
        let mut request =
            client.authorize_url(CsrfToken::new_random).add_scopes(self.scopes()).set_pkce_challenge(challenge);
        // Without it no provider issues a refresh token (OpenID Connect Core, section 11).
        if self.config.scopes.iter().any(|scope| scope == "offline_access") {
            request = request.add_extra_param("prompt", "consent");
        }
        for (name, value) in self.resource() {
            request = request.add_extra_param(name, value);
        }
        let (url, state) = request.url();
        print_notice(&format!("Log in with your browser: {url}"));
        if opens && open::that_detached(url.as_str()).is_err() {
            print_notice("No browser could be opened here; open that address yourself.");
        }
        let code = tokio::time::timeout(LOGIN_TIMEOUT, loopback.code(state.secret(), issuer))
            .await
            .map_err(|_| Failure::new(ExitStatus::TooLate, "the login was not completed in time"))??;
        let mut request = client.exchange_code(AuthorizationCode::new(code)).set_pkce_verifier(verifier);
        for (name, value) in self.resource() {
            request = request.add_extra_param(name, value);
        }
        let send = |request| self.send(request);
        request.request_async(&send).await.map(token_grant).map_err(token_error)
    }

    /// The client credentials grant, with a service account's key (RFC 6749, section 4.4). The service itself issues these tokens, and its
    /// errors have its own envelope.
    pub(crate) async fn by_client_credentials(&self) -> Result<TokenGrant, Failure> {
        let secret = self.config.client_secret.as_ref().map(|secret| secret.expose_secret());
        let request = self.http.post(self.client.token_uri().url().clone()).basic_auth(&self.config.client_id, secret);
        let answer = request.form(&[("grant_type", "client_credentials")]).send().await;
        let answer = answer.map_err(|error| Failure::network("the service cannot be reached", error))?;
        let status = answer.status();
        let body = http_client::body(answer, MAX_ANSWER_BYTES).await;
        let body = body.map_err(|error| Failure::network("the service's answer cannot be read", error))?;
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        if !status.is_success() {
            return Err(Failure::of_answer(status, &body, None));
        }
        let issued: IssuedToken = serde_json::from_value(body)
            .map_err(|_| Failure::new(ExitStatus::Server, "the server's answer is no access token"))?;
        let life = TimeDelta::from_std(Duration::from_secs(issued.expires_in)).ok();
        Ok(TokenGrant {
            access_token: issued.access_token,
            refresh_token: None,
            expires_at: life.and_then(|life| Utc::now().checked_add_signed(life)),
        })
    }

    /// Refreshes the access token of a login.
    pub(crate) async fn renew(&self, refresh_token: &SecretString) -> Result<TokenGrant, Failure> {
        let token = RefreshToken::new(refresh_token.expose_secret().to_owned());
        let send = |request| self.send(request);
        self.client.exchange_refresh_token(&token).request_async(&send).await.map(token_grant).map_err(token_error)
    }

    /// Revokes a token at the provider (RFC 7009). A failure does not keep the login: it is already removed from this machine.
    pub(crate) async fn revoke(&self, endpoint: &str, token: &SecretString) -> Result<(), Failure> {
        let url = Url::parse(endpoint).map_err(malformed)?;
        let mut form = vec![("token", token.expose_secret()), ("client_id", &self.config.client_id)];
        form.extend(self.config.client_secret.as_ref().map(|secret| ("client_secret", secret.expose_secret())));
        let answer = self.http.post(url).form(&form).send().await;
        let answer = answer.map_err(|error| Failure::network("the identity provider cannot be reached", error))?;
        if answer.status().is_success() {
            return Ok(());
        }
        Err(Failure::new(ExitStatus::Server, format!("the identity provider answered {}", answer.status())))
    }
}

/// The response with a service account's access token.
#[derive(Deserialize)]
struct IssuedToken {
    access_token: SecretString,
    expires_in: u64,
}

#[derive(Debug, thiserror::Error)]
enum HttpError {
    #[error("no answer")]
    Sent(#[source] reqwest::Error),
    #[error(transparent)]
    Read(BodyError),
}

fn token_grant(response: BasicTokenResponse) -> TokenGrant {
    let secret = |text: &str| SecretString::from(text.to_owned());
    let life = response.expires_in().and_then(|life| TimeDelta::from_std(life).ok());
    TokenGrant {
        access_token: secret(response.access_token().secret()),
        refresh_token: response.refresh_token().map(|token| secret(token.secret())),
        expires_at: life.and_then(|life| Utc::now().checked_add_signed(life)),
    }
}

fn malformed(error: impl std::error::Error) -> Failure {
    Failure::usage(format!("an address of the identity provider cannot be used: {error}"))
}

fn token_error<E: std::error::Error + 'static, T: ErrorResponse + std::fmt::Display + 'static>(
    error: RequestTokenError<E, T>,
) -> Failure {
    match error {
        RequestTokenError::ServerResponse(error_response) => {
            Failure::new(ExitStatus::LoggedOut, format!("the identity provider refuses: {error_response}"))
                .next("Log in: gpuctl login")
        }
        RequestTokenError::Request(error) => Failure::network("the identity provider cannot be reached", error),
        // The response may contain tokens, and is not shown.
        RequestTokenError::Parse(..) => {
            Failure::new(ExitStatus::Server, "the identity provider did not answer as OAuth 2.0 (RFC 6749) says")
        }
        RequestTokenError::Other(why) => {
            Failure::new(ExitStatus::LoggedOut, format!("the log-in did not end well: {why}"))
        }
    }
}
