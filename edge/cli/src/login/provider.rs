//! The client of the identity provider: OpenID Connect Discovery, and tokens by OAuth 2.0 (RFC 6749), the device grant (RFC 8628) or the
//! authorization code with PKCE (RFC 7636) on a loopback port (RFC 8252).

use super::login_store::Login;
use super::loopback::{Loopback, RedirectAddress};
use super::oauth_answer;
use crate::failure::{ExitStatus, Failure, chain, is_passing};
use crate::http_client::{self, BodyError, Trust};
use crate::output::Output;
use crate::{retry_after, text_encoding};
use chrono::{DateTime, TimeDelta, Utc};
use oauth2::basic::{BasicClient, BasicErrorResponseType, BasicTokenResponse};
use oauth2::{
    AuthUrl, AuthorizationCode, ClientId, ClientSecret, CsrfToken, DeviceAuthorizationUrl, EndpointNotSet, EndpointSet,
    ErrorResponse, HttpRequest, HttpResponse, PkceCodeChallenge, RedirectUrl, RefreshToken, RequestTokenError,
    ResourceOwnerPassword, ResourceOwnerUsername, Scope, StandardDeviceAuthorizationResponse, TokenResponse as _,
    TokenUrl,
};
use reqwest::{Client, RequestBuilder, StatusCode, Url};
use secrecy::{ExposeSecret as _, SecretString};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::{Duration, Instant};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// The longest response of a provider that is read.
const MAX_ANSWER_BYTES: usize = 512 * 1024;
/// How long the user may take to log in.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(600);
/// How long a request is sent again after passing faults of the provider.
const RETRY_FOR: Duration = Duration::from_secs(20);
/// The same, where no connection can be made.
const CONNECT_RETRY_FOR: Duration = Duration::from_secs(5);
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_RETRY_PAUSE: Duration = Duration::from_secs(4);
/// The longest pause between two polls of the device grant after faults, where the provider's own interval is no longer.
const LONGEST_POLL_PAUSE: Duration = Duration::from_secs(10);

type TokenClient = BasicClient<EndpointNotSet, EndpointNotSet, EndpointNotSet, EndpointNotSet, EndpointSet>;

/// The metadata of a provider (OpenID Connect Discovery 1.0, section 3; RFC 8628, section 4).
#[derive(Debug, Deserialize)]
pub(crate) struct ProviderMetadata {
    issuer: String,
    pub(crate) token_endpoint: String,
    #[serde(default, deserialize_with = "if_readable")]
    pub(crate) authorization_endpoint: Option<String>,
    #[serde(default, deserialize_with = "if_readable")]
    pub(crate) device_authorization_endpoint: Option<String>,
    #[serde(default, deserialize_with = "if_readable")]
    pub(crate) revocation_endpoint: Option<String>,
    #[serde(default, deserialize_with = "if_readable")]
    pub(crate) grant_types_supported: Option<Vec<String>>,
}

/// A field that may be absent: where it is empty or of another form, it is absent.
fn if_readable<'de, D: Deserializer<'de>, T: DeserializeOwned>(field: D) -> Result<Option<T>, D::Error> {
    let value = Value::deserialize(field)?;
    Ok(if value == "" { None } else { serde_json::from_value(value).ok() })
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

/// What the provider asks the user for (OpenID Connect Core 1.0, section 3.1.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, strum::IntoStaticStr)]
#[value(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Prompt {
    Login,
    Consent,
    SelectAccount,
}

impl Prompt {
    fn name(self) -> &'static str {
        self.into()
    }
}

/// The tokens that a provider issued.
pub(crate) struct TokenGrant {
    pub(crate) access_token: SecretString,
    pub(crate) refresh_token: Option<SecretString>,
    pub(crate) expires_at: Option<DateTime<Utc>>,
}

/// What became of a refresh token.
pub(crate) enum Renewal {
    Granted(TokenGrant),
    /// It was spent, or the provider does not accept it: it is never sent again.
    Spent(Failure),
}

/// After which outcomes a request is sent again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Repeats {
    /// After every passing fault: a second request has no other effect than the first one.
    Always,
    /// Where the provider has not processed it. A refresh token that is sent a second time can be taken for a stolen one (RFC 9700, section
    /// 4.14.2).
    WhereUnprocessed,
    /// After the statuses of a busy server: a page is no passing fault where the address may be a wrong one.
    WhereBusy,
}

impl Repeats {
    /// The pause that the provider asks for, and how long to send the request again; `None` where the outcome is final.
    fn after(self, outcome: &Result<HttpResponse, HttpError>) -> Option<(Option<Duration>, Duration)> {
        match outcome {
            Ok(answer) if self == Self::WhereBusy => {
                let repeats = is_passing(answer.status());
                repeats.then(|| (retry_after::of(answer.headers()), RETRY_FOR))
            }
            Ok(answer) if oauth_answer::is_passing_fault(answer) => {
                // A proxy answers 503, too, where it has lost a request on its way; who names a time has refused it.
                let is_unprocessed = answer.status() == StatusCode::TOO_MANY_REQUESTS
                    || (answer.status() == StatusCode::SERVICE_UNAVAILABLE
                        && retry_after::of(answer.headers()).is_some());
                let repeats = self == Self::Always || is_unprocessed;
                repeats.then(|| (retry_after::of(answer.headers()), RETRY_FOR))
            }
            Ok(_) => None,
            // A certificate error is permanent.
            Err(error) if chain(error).contains("certificate") => None,
            Err(HttpError::Sent(error)) if error.is_connect() => Some((None, CONNECT_RETRY_FOR)),
            Err(HttpError::Read(BodyError::TooLong(_))) => None,
            Err(_) => (self != Self::WhereUnprocessed).then_some((None, RETRY_FOR)),
        }
    }
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
    let no_provider = |why: String| {
        Failure::usage(format!("{url} is no description of an identity provider: {why}"))
            .next("Give the issuer exactly as the service's operator names it: --issuer")
    };
    let body = match document(&http, &url).await {
        Ok(body) => body,
        Err(DocumentError::Unreached(why)) => return Err(unreached(&why)),
        Err(DocumentError::Busy(status)) => return Err(busy(&format!("the identity provider {issuer}"), status)),
        Err(DocumentError::Other(why)) => return Err(no_provider(why)),
    };
    let found: ProviderMetadata = oauth_answer::object_of(&body).map_err(|error| no_provider(error.to_string()))?;
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

/// Why there is no document at an address.
pub(super) enum DocumentError {
    Unreached(String),
    /// The last status of a server that is overloaded or being restarted.
    Busy(StatusCode),
    /// What is there is another thing.
    Other(String),
}

/// Reads a document of an address that the user may have mistyped: it is asked for again after the statuses of a server that is being
/// restarted, and not after pages.
pub(super) async fn document(http: &Client, url: &str) -> Result<Vec<u8>, DocumentError> {
    let answer = match repeated(Repeats::WhereBusy, || answer_to(http.get(url))).await {
        Ok(answer) => answer,
        Err(HttpError::Read(error @ BodyError::TooLong(_))) => return Err(DocumentError::Other(error.to_string())),
        Err(error) => return Err(DocumentError::Unreached(chain(&error))),
    };
    match answer.status() {
        status if status.is_success() => Ok(text_encoding::without_mark(answer.body()).to_vec()),
        status if is_passing(status) => Err(DocumentError::Busy(status)),
        status => Err(DocumentError::Other(format!("it answers {status}"))),
    }
}

/// The failure of a server that is overloaded, or being restarted.
pub(super) fn busy(server: &str, status: StatusCode) -> Failure {
    let message = format!("{server} is overloaded, or being restarted: it answered {status}");
    Failure::new(ExitStatus::Server, message).next("Try again in a moment.")
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

    /// The parameters of an authorization request beside those of RFC 6749. Without being asked to, none asks for the user's consent:
    /// where an administrator has given it for all, a provider that is asked for it refuses its users.
    fn authorization_parameters(&self, prompt: Option<Prompt>) -> Vec<(&'static str, String)> {
        prompt.map(|prompt| ("prompt", prompt.name().to_owned())).into_iter().chain(self.resource()).collect()
    }

    /// The answer to a request of the library, in the form that it reads.
    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (head, body) = request.into_parts();
        let request = self.http.request(head.method, head.uri.to_string()).headers(head.headers).body(body);
        answer_to(request).await.map(oauth_answer::normalized)
    }

    /// The same, sent again after passing faults.
    async fn exchange(&self, request: HttpRequest, repeats: Repeats) -> Result<HttpResponse, HttpError> {
        let answer = repeated(repeats, || self.send(request.clone())).await?;
        if oauth_answer::is_passing_fault(&answer) {
            return Err(HttpError::Busy(answer.status()));
        }
        if !oauth_answer::is_of_token_endpoint(&answer) {
            return Err(HttpError::Foreign(answer.status()));
        }
        Ok(answer)
    }

    /// One poll of the device grant. After a passing fault the library polls again, as after a lost connection: the user may have approved
    /// the login. So it does after each answer that is none of a token endpoint, as a firewall's, until the code ends.
    async fn poll(&self, request: HttpRequest, out: Output, noticed: &AtomicBool) -> Result<HttpResponse, HttpError> {
        let answer = self.send(request).await?;
        if oauth_answer::is_passing_fault(&answer) || !oauth_answer::is_of_token_endpoint(&answer) {
            if !noticed.swap(true, Ordering::Relaxed) {
                out.notice(&format!("The identity provider answered {}; still waiting.", answer.status()));
            }
            tokio::time::sleep(retry_after::of(answer.headers()).unwrap_or_default().min(RETRY_FOR)).await;
            return Err(HttpError::Busy(answer.status()));
        }
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
        let send = |request| self.exchange(request, Repeats::Always);
        request.request_async(&send).await.map(token_grant).map_err(token_error)
    }

    /// The device grant: the user confirms a code on another device.
    pub(crate) async fn by_device(&self, endpoint: &str, out: Output) -> Result<TokenGrant, Failure> {
        let endpoint = DeviceAuthorizationUrl::new(endpoint.to_owned()).map_err(malformed)?;
        let client = self.client.clone().set_device_authorization_url(endpoint);
        let send = |request| self.exchange(request, Repeats::Always);
        let mut request = client.exchange_device_code().add_scopes(self.scopes());
        for (name, value) in self.resource() {
            request = request.add_extra_param(name, value);
        }
        let device_authorization: StandardDeviceAuthorizationResponse =
            request.request_async(&send).await.map_err(token_error)?;
        let at = device_authorization
            .verification_uri_complete()
            .map_or(device_authorization.verification_uri().as_str(), |url| url.secret());
        let code = device_authorization.user_code().secret();
        let [at, code] = [at, code].map(crate::printable::plain);
        out.instruction(&format!("Open {at}\nand confirm the code {code}"), false);
        let mut request = client.exchange_device_access_token(&device_authorization);
        for (name, value) in self.resource() {
            request = request.add_extra_param(name, value);
        }
        let request = request.set_max_backoff_interval(LONGEST_POLL_PAUSE.max(device_authorization.interval()));
        let timeout = LOGIN_TIMEOUT.min(device_authorization.expires_in());
        let noticed = AtomicBool::new(false);
        let poll = |request| self.poll(request, out, &noticed);
        let grant = request.request_async(&poll, tokio::time::sleep, Some(timeout)).await;
        grant.map(token_grant).map_err(token_error)
    }

    /// The authorization code grant, in the user's browser, which is redirected to a loopback port.
    pub(crate) async fn by_browser(
        &self,
        endpoint: &str,
        issuer: &str,
        prompt: Option<Prompt>,
        registered: Option<&RedirectAddress>,
        opens: bool,
        out: Output,
    ) -> Result<TokenGrant, Failure> {
        let loopback = Loopback::bind(registered).await?;
        let back = RedirectUrl::new(loopback.address().to_owned()).map_err(malformed)?;
        let authorization = AuthUrl::new(endpoint.to_owned()).map_err(malformed)?;
        let client = self.client.clone().set_auth_uri(authorization).set_redirect_uri(back);
        let (challenge, verifier) = PkceCodeChallenge::new_random_sha256();
        let request =
            client.authorize_url(CsrfToken::new_random).add_scopes(self.scopes()).set_pkce_challenge(challenge);
        let (url, state) = self
            .authorization_parameters(prompt)
            .into_iter()
            .fold(request, |request, (name, value)| request.add_extra_param(name, value))
            .url();
        let is_open = opens && open::that_detached(url.as_str()).is_ok();
        out.instruction(&format!("Log in with your browser: {url}"), is_open);
        if opens && !is_open {
            out.notice("No browser could be opened here; open that address yourself.");
        }
        let code =
            tokio::time::timeout(LOGIN_TIMEOUT, loopback.code(state.secret(), issuer)).await.map_err(|_| {
                Failure::new(ExitStatus::TooLate, "the login was not completed in time")
                    .next("Log in again: gpuctl login")
            })??;
        let mut request = client.exchange_code(AuthorizationCode::new(code)).set_pkce_verifier(verifier);
        for (name, value) in self.resource() {
            request = request.add_extra_param(name, value);
        }
        let send = |request| self.exchange(request, Repeats::Always);
        request.request_async(&send).await.map(token_grant).map_err(token_error)
    }

    /// The client credentials grant, with a service account's key (RFC 6749, section 4.4). The service itself issues these tokens, and its
    /// errors have its own envelope.
    pub(crate) async fn by_client_credentials(&self) -> Result<TokenGrant, Failure> {
        let secret = self.config.client_secret.as_ref().map(|secret| secret.expose_secret());
        let request = || {
            let request = self.http.post(self.client.token_uri().url().clone());
            let request = request.basic_auth(&self.config.client_id, secret);
            answer_to(request.form(&[("grant_type", "client_credentials")]))
        };
        let answer = repeated(Repeats::Always, request).await;
        let answer = answer.map_err(|error| Failure::network("the service cannot be reached", error))?;
        let mut body = Value::Object(oauth_answer::fields_of(answer.body()).unwrap_or_default());
        if !answer.status().is_success() {
            return Err(Failure::of_answer(answer.status(), &body, retry_after::of(answer.headers())));
        }
        let Value::String(access_token) = body["access_token"].take() else {
            return Err(Failure::unusable_answer("the server's answer is no access token"));
        };
        let life = oauth_answer::seconds(&body["expires_in"]).filter(|seconds| *seconds > 0).map(Duration::from_secs);
        Ok(TokenGrant {
            access_token: access_token.into(),
            refresh_token: None,
            expires_at: life.and_then(end_of_life),
        })
    }

    /// Refreshes the access token of a login.
    pub(crate) async fn renew(&self, refresh_token: &SecretString) -> Result<Renewal, Failure> {
        let token = RefreshToken::new(refresh_token.expose_secret().to_owned());
        let status = AtomicU16::new(0);
        let last_status = &status;
        let send = |request| async move {
            let answer = self.exchange(request, Repeats::WhereUnprocessed).await?;
            last_status.store(answer.status().as_u16(), Ordering::Relaxed);
            Ok::<_, HttpError>(answer)
        };
        match self.client.exchange_refresh_token(&token).request_async(&send).await {
            Ok(response) => Ok(Renewal::Granted(token_grant(response))),
            Err(error) => {
                let status = status.load(Ordering::Relaxed);
                // An answer that grants tokens which cannot be read has spent it, too.
                let was_granted = (200..300).contains(&status);
                let is_spent = was_granted
                    || matches!(&error, RequestTokenError::ServerResponse(response) if refuses_token(status, response.error()));
                let failure = token_error(error);
                if is_spent { Ok(Renewal::Spent(failure.next("Log in again: gpuctl login"))) } else { Err(failure) }
            }
        }
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

/// Whether the provider refuses the refresh token itself, as some do with codes other than that of RFC 6749 (section 5.2): Dex and Zitadel
/// with `invalid_request`. Refusals of the client are its operator's to mend, and leave the token as it is.
fn refuses_token(status: u16, error: &BasicErrorResponseType) -> bool {
    match error {
        BasicErrorResponseType::InvalidGrant => true,
        BasicErrorResponseType::InvalidRequest => (400..500).contains(&status),
        BasicErrorResponseType::Extension(code) => code == "invalid_token" && (400..500).contains(&status),
        BasicErrorResponseType::InvalidClient
        | BasicErrorResponseType::InvalidScope
        | BasicErrorResponseType::UnauthorizedClient
        | BasicErrorResponseType::UnsupportedGrantType => false,
    }
}

#[derive(Debug, thiserror::Error)]
enum HttpError {
    #[error("no answer")]
    Sent(#[source] reqwest::Error),
    #[error(transparent)]
    Read(BodyError),
    #[error("it answered {0}")]
    Busy(StatusCode),
    /// The answer is none of a token endpoint.
    #[error("it answered {0}")]
    Foreign(StatusCode),
}

async fn answer_to(request: RequestBuilder) -> Result<HttpResponse, HttpError> {
    let answer = request.send().await.map_err(HttpError::Sent)?;
    let (status, headers) = (answer.status(), answer.headers().clone());
    let body = http_client::body(answer, MAX_ANSWER_BYTES).await.map_err(HttpError::Read)?;
    let mut answer = HttpResponse::new(body);
    (*answer.status_mut(), *answer.headers_mut()) = (status, headers);
    Ok(answer)
}

/// The last outcome of a request that is sent again after passing faults, as far as `repeats` admits it.
async fn repeated<F: Future<Output = Result<HttpResponse, HttpError>>>(
    repeats: Repeats,
    send: impl Fn() -> F,
) -> Result<HttpResponse, HttpError> {
    let began = Instant::now();
    let mut pause = FIRST_RETRY_PAUSE;
    loop {
        let outcome = send().await;
        let Some((asked, limit)) = repeats.after(&outcome) else { return outcome };
        let after = asked.unwrap_or(pause);
        if began.elapsed() + after > limit {
            return outcome;
        }
        tokio::time::sleep(after).await;
        pause = (pause * 2).min(LONGEST_RETRY_PAUSE);
    }
}

fn token_grant(response: BasicTokenResponse) -> TokenGrant {
    let secret = |text: &str| SecretString::from(text.to_owned());
    TokenGrant {
        access_token: secret(response.access_token().secret()),
        refresh_token: response.refresh_token().map(|token| secret(token.secret())),
        expires_at: response.expires_in().and_then(end_of_life),
    }
}

fn end_of_life(life: Duration) -> Option<DateTime<Utc>> {
    Utc::now().checked_add_signed(TimeDelta::from_std(life).ok()?)
}

/// The errors with which a provider refuses the client, its scopes or its resource (RFC 6749, section 5.2; RFC 8707, section 2).
const CLIENT_REFUSALS: [&str; 5] =
    ["invalid_client", "unauthorized_client", "unsupported_grant_type", "invalid_scope", "invalid_target"];

fn malformed(error: impl std::error::Error) -> Failure {
    Failure::usage(format!("an address of the identity provider cannot be used: {error}"))
        .next("Check --issuer (or SVC_OIDC_ISSUER), or ask the service's operator.")
}

fn token_error<T: ErrorResponse + std::fmt::Display + 'static>(error: RequestTokenError<HttpError, T>) -> Failure {
    match error {
        RequestTokenError::ServerResponse(error_response) => {
            let why = error_response.to_string();
            let is_of_client = CLIENT_REFUSALS.iter().any(|code| why.starts_with(code));
            Failure::new(ExitStatus::LoggedOut, format!("the identity provider refuses: {why}")).next(match is_of_client {
                true => "Ask the service's operator which client, scopes and resource to name: --client-id, --client-secret, --scope, --resource",
                false => "Log in again: gpuctl login",
            })
        }
        RequestTokenError::Request(HttpError::Busy(status)) => busy("the identity provider", status),
        RequestTokenError::Request(HttpError::Foreign(status)) => Failure::new(
            ExitStatus::Server,
            format!("a proxy or a firewall before the identity provider answered {status} in its place"),
        )
        .next("Try again. Where it stays so, ask the operator of the service or of your network."),
        RequestTokenError::Request(error) => Failure::network("the identity provider cannot be reached", error),
        // The response may contain tokens, and is not shown.
        RequestTokenError::Parse(..) => {
            Failure::new(ExitStatus::Server, "the identity provider did not answer as OAuth 2.0 (RFC 6749) says")
                .next("Ask the service's operator: gpuctl may not be registered there as a public client.")
        }
        RequestTokenError::Other(why) => {
            Failure::new(ExitStatus::LoggedOut, format!("the log-in did not end well: {why}"))
                .next("Log in again: gpuctl login")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_consent_is_asked_for_unless_the_user_says_so() {
        let config = ClientConfig {
            client_id: "gpuctl".to_owned(),
            client_secret: None,
            scopes: vec!["openid".to_owned(), "offline_access".to_owned()],
            resource: Some("https://gpu.example".to_owned()),
        };
        let provider = Provider::new(Client::new(), "https://id.example/token", config).unwrap();
        let resource = || ("resource", "https://gpu.example".to_owned());
        assert_eq!(provider.authorization_parameters(None), [resource()]);
        for (prompt, name) in
            [(Prompt::Consent, "consent"), (Prompt::Login, "login"), (Prompt::SelectAccount, "select_account")]
        {
            assert_eq!(provider.authorization_parameters(Some(prompt)), [("prompt", name.to_owned()), resource()]);
        }
    }
}
