//! The identity provider as a client of it sees it: its metadata (OpenID Connect Discovery 1.0), the authorization code (RFC 6749, section
//! 4.1, with PKCE, RFC 7636) and refresh tokens (section 6).

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC};
use reqwest::{Client, RequestBuilder};
use secrecy::{ExposeSecret as _, SecretString};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use thiserror::Error;
use tokio::time::Instant;
use url::Url;

use crate::outbound::http_client::{client_builder, error_chain, is_secure, one_line, read_bounded_body};

/// The timeout of each request: less than the lease of a refresh ([`domain::browser_session::REFRESH_LEASE`]).
const TIMEOUT: Duration = Duration::from_secs(10);
const MAX_BYTES: usize = 256 * 1024;
/// After which the metadata is read again.
const METADATA_MAX_AGE: Duration = Duration::from_secs(300);
/// The longest error code that is taken from the provider, and the longest description.
const MAX_ERROR: usize = 64;
const MAX_DESCRIPTION: usize = 300;
/// How long the exchange of a code is sent again: less than a request of the console may take.
const EXCHANGE_FOR: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// A longer life of an access token is cut.
const LONGEST_LIFE: Duration = Duration::from_hours(366 * 24);
/// The errors of a provider that is overloaded (RFC 6749, section 4.1.2.1).
const PASSING: [&str; 3] = ["temporarily_unavailable", "server_error", "slow_down"];
/// The errors that are a decision on the user's login, which the user has to repeat (RFC 6749, section 5.2; OpenID Connect Core 1.0, section
/// 3.1.2.6; Okta's `access_denied` by a policy).
const DECISIONS: [&str; 5] =
    ["invalid_grant", "interaction_required", "login_required", "consent_required", "access_denied"];
/// Further ones of a refresh, whose request differs from one that was granted in the token alone: Dex and Zitadel answer `invalid_request`
/// for a token that is spent, and the others have names of their own for it.
const REFRESH_DECISIONS: [&str; 5] =
    ["invalid_request", "invalid_token", "invalid_refresh_token", "token_expired", "token_inactive"];
/// What is encoded in client credentials. The unreserved characters (RFC 3986, section 2.3) are not: some providers do not decode.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// As what the control plane logs people in to the web console.
#[derive(Clone, Debug)]
pub struct LoginSettings {
    pub client_id: String,
    /// None for a public client, which has PKCE alone.
    pub client_secret: Option<SecretString>,
    /// The scopes that are asked for, with spaces.
    pub scope: String,
    /// The resource for which the access token is asked for (RFC 8707), where the provider needs it.
    pub resource: Option<String>,
}

/// The provider's metadata, as far as it is used.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ProviderMetadata {
    issuer: String,
    pub(crate) authorization_endpoint: Url,
    token_endpoint: Url,
    #[serde(default, deserialize_with = "if_readable")]
    pub(crate) end_session_endpoint: Option<Url>,
    #[serde(default, deserialize_with = "if_readable")]
    authorization_response_iss_parameter_supported: Option<bool>,
    #[serde(default, deserialize_with = "if_readable")]
    token_endpoint_auth_methods_supported: Option<Vec<String>>,
}

/// A field without which people can log in: where it has another form than the standard gives it, it is as if it were absent.
fn if_readable<'de, D: Deserializer<'de>, T: DeserializeOwned>(field: D) -> Result<Option<T>, D::Error> {
    Ok(strict_json::from_value(Value::deserialize(field)?).ok())
}

/// Issued tokens (RFC 6749, section 5.1).
pub(crate) struct IssuedTokens {
    pub(crate) access_token: SecretString,
    pub(crate) refresh_token: Option<SecretString>,
    pub(crate) id_token: Option<SecretString>,
    /// The life of the access token, where the provider says it.
    pub(crate) expires_in: Option<Duration>,
}

/// An error of the provider (RFC 6749, sections 4.1.2.1 and 5.2): its code, and its description for an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProviderError {
    pub(crate) code: String,
    description: Option<String>,
}

impl ProviderError {
    /// Both bounded, on one line.
    pub(crate) fn new(code: &str, description: Option<&str>) -> Self {
        let description = description.map(|text| one_line(text, MAX_DESCRIPTION)).filter(|text| !text.is_empty());
        Self { code: one_line(code, MAX_ERROR), description }
    }

    /// With what an operator may have to correct.
    pub(crate) fn with_step(&self) -> String {
        format!("{self}{}", step(&self.code))
    }
}

impl fmt::Display for ProviderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.code)?;
        self.description.as_ref().map_or(Ok(()), |description| write!(f, " ({description})"))
    }
}

/// The setting that an error of the provider is about, as the end of a sentence.
fn step(code: &str) -> &'static str {
    match code {
        "invalid_client" => "; correct SVC_OIDC_CONSOLE_CLIENT_ID or SVC_OIDC_CONSOLE_CLIENT_SECRET",
        "unauthorized_client" | "unsupported_grant_type" | "unsupported_response_type" => {
            "; allow the client of SVC_OIDC_CONSOLE_CLIENT_ID the authorization code and refresh tokens at the provider"
        }
        "invalid_scope" => "; correct SVC_OIDC_CONSOLE_SCOPE, or allow these scopes to the client at the provider",
        "invalid_target" | "invalid_resource" => "; correct SVC_OIDC_CONSOLE_RESOURCE",
        "redirect_uri_mismatch" | "invalid_redirect_uri" => {
            "; register SVC_PUBLIC_URL with /console/callback behind it as a redirect URI of the client at the provider"
        }
        "invalid_request" => {
            "; compare SVC_OIDC_CONSOLE_SCOPE, SVC_OIDC_CONSOLE_RESOURCE and SVC_PUBLIC_URL with the client at the provider"
        }
        _ => "",
    }
}

/// Why the provider issued no tokens.
#[derive(Debug, Error)]
pub(crate) enum ProviderFault {
    /// Its decision: the same request is refused again.
    #[error("the identity provider refused: {0}")]
    Refused(ProviderError),
    /// It has issued tokens that cannot be read: a code or a refresh token is spent.
    #[error("the identity provider's answer holds no access token")]
    Unreadable,
    /// It refuses the control plane itself, as its client: that is the operator's to correct, and no decision on this user.
    #[error("the identity provider does not serve this client: {}", .0.with_step())]
    Client(ProviderError),
    /// It cannot be reached, or does not answer as a token endpoint at the moment.
    #[error("the identity provider cannot be used: {0}")]
    Away(String),
}

/// The provider, with its metadata of the last minutes.
pub struct OpenIdProvider {
    issuer: String,
    pub(crate) settings: LoginSettings,
    redirect_uri: String,
    client: Client,
    metadata: Mutex<Option<(Instant, Arc<ProviderMetadata>)>>,
    /// The provider has taken the secret in the form alone, though its metadata names Basic, too.
    takes_form_alone: AtomicBool,
}

impl OpenIdProvider {
    /// # Errors
    /// Where the authorities cannot be read.
    pub fn new(
        issuer: impl Into<String>,
        redirect_uri: impl Into<String>,
        authorities_pem: Option<&str>,
        settings: LoginSettings,
    ) -> Result<Self, String> {
        let client = client_builder(authorities_pem)?.timeout(TIMEOUT).build().map_err(error_chain)?;
        let (issuer, redirect_uri) = (issuer.into(), redirect_uri.into());
        let takes_form_alone = AtomicBool::new(false);
        Ok(Self { issuer, settings, redirect_uri, client, metadata: Mutex::default(), takes_form_alone })
    }

    /// Where the provider sends the browser back to.
    pub(crate) fn redirect_uri(&self) -> &str {
        &self.redirect_uri
    }

    /// # Errors
    /// [`ProviderFault::Away`]. Metadata that was read before is used for as long as the provider is away.
    pub(crate) async fn metadata(&self) -> Result<Arc<ProviderMetadata>, ProviderFault> {
        let known = self.metadata.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((_, metadata)) = known.as_ref().filter(|(at, _)| at.elapsed() < METADATA_MAX_AGE) {
            return Ok(Arc::clone(metadata));
        }
        match self.fetch_metadata().await {
            Ok(metadata) => {
                let metadata = Arc::new(metadata);
                let fetched = Some((Instant::now(), Arc::clone(&metadata)));
                *self.metadata.lock().unwrap_or_else(PoisonError::into_inner) = fetched;
                Ok(metadata)
            }
            Err(fault) => known.map(|(_, metadata)| metadata).ok_or(fault),
        }
    }

    async fn fetch_metadata(&self) -> Result<ProviderMetadata, ProviderFault> {
        let url = format!("{}/.well-known/openid-configuration", self.issuer.trim_end_matches('/'));
        let (status, body) = send(self.client.get(url)).await?;
        if status != 200 {
            return Err(ProviderFault::Away(format!("its discovery document is answered {status}")));
        }
        let metadata: ProviderMetadata = strict_json::from_slice(&body)
            .map_err(|error| ProviderFault::Away(format!("its discovery document cannot be read: {error}")))?;
        if metadata.issuer != self.issuer {
            return Err(ProviderFault::Away("its discovery document is of another issuer".to_owned()));
        }
        let used = [&metadata.authorization_endpoint, &metadata.token_endpoint];
        if let Some(address) =
            used.into_iter().chain(&metadata.end_session_endpoint).find(|address| !is_secure(address.as_str()))
        {
            return Err(ProviderFault::Away(format!("{address} is no https address (http only on this machine)")));
        }
        Ok(metadata)
    }

    /// Exchanges the authorization code.
    pub(crate) async fn exchange(&self, code: &str, verifier: &str) -> Result<IssuedTokens, ProviderFault> {
        let form = [
            ("grant_type", "authorization_code"),
            ("code", code),
            ("redirect_uri", self.redirect_uri.as_str()),
            ("code_verifier", verifier),
        ];
        let began = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            match self.tokens(&form).await {
                // The user has approved the login: a passing fault of the provider does not undo that.
                Err(ProviderFault::Away(why)) if began.elapsed() + pause < EXCHANGE_FOR => {
                    tracing::info!(error = %why, "the exchange of an authorization code is sent again");
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                }
                outcome => return outcome,
            }
        }
    }

    /// Refreshes tokens. It is sent once, unless the provider did not know its client: a refresh token that is sent a second time can be taken for a stolen one (RFC 9700, section 4.14.2).
    pub(crate) async fn refresh(&self, refresh_token: &SecretString) -> Result<IssuedTokens, ProviderFault> {
        self.tokens(&[("grant_type", "refresh_token"), ("refresh_token", refresh_token.expose_secret())]).await
    }

    async fn tokens(&self, form: &[(&str, &str)]) -> Result<IssuedTokens, ProviderFault> {
        let metadata = self.metadata().await?;
        let mut form = form.to_vec();
        form.extend(self.settings.resource.as_deref().map(|resource| ("resource", resource)));
        let authentication = match &self.settings.client_secret {
            None => ClientAuthentication::Public,
            Some(secret) if metadata.takes("client_secret_basic") && !self.takes_form_alone.load(Ordering::Relaxed) => {
                ClientAuthentication::Basic(secret)
            }
            Some(secret) => ClientAuthentication::Form(secret),
        };
        let outcome = self.send_form(&metadata, &form, authentication).await;
        // The metadata is the provider's, and a client may be registered for one of its methods. A client that is not known has spent nothing.
        match (&outcome, authentication) {
            (Err(ProviderFault::Client(error)), ClientAuthentication::Basic(secret))
                if error.code == "invalid_client" && metadata.names("client_secret_post") =>
            {
                let second = self.send_form(&metadata, &form, ClientAuthentication::Form(secret)).await;
                match &second {
                    Err(ProviderFault::Client(error)) if error.code == "invalid_client" => outcome,
                    Err(ProviderFault::Away(_)) => second,
                    _ => {
                        self.takes_form_alone.store(true, Ordering::Relaxed);
                        second
                    }
                }
            }
            _ => outcome,
        }
    }

    async fn send_form(
        &self,
        metadata: &ProviderMetadata,
        form: &[(&str, &str)],
        authentication: ClientAuthentication<'_>,
    ) -> Result<IssuedTokens, ProviderFault> {
        let mut form = form.to_vec();
        let mut request = self.client.post(metadata.token_endpoint.clone());
        let client_id = self.settings.client_id.as_str();
        match authentication {
            ClientAuthentication::Public => form.push(("client_id", client_id)),
            ClientAuthentication::Basic(secret) => {
                // Both are form-encoded before they are joined (RFC 6749, section 2.3.1).
                request = request.basic_auth(form_encoded(client_id), Some(form_encoded(secret.expose_secret())));
            }
            ClientAuthentication::Form(secret) => {
                form.extend([("client_id", client_id), ("client_secret", secret.expose_secret())]);
            }
        }
        let (status, body) = send(request.form(&form)).await?;
        let is_refresh = form.contains(&("grant_type", "refresh_token"));
        let secret = self.settings.client_secret.as_ref().map(|secret| secret.expose_secret());
        let sent = form.iter().filter(|(name, _)| SECRET_FIELDS.contains(name)).map(|(_, value)| *value).chain(secret);
        read_answer(status, &body, is_refresh, &sent.collect::<Vec<_>>())
    }
}

/// The fields of a request whose values are secrets.
const SECRET_FIELDS: [&str; 4] = ["code", "code_verifier", "refresh_token", "client_secret"];

/// How a client authenticates at the token endpoint (RFC 6749, section 2.3.1).
#[derive(Clone, Copy)]
enum ClientAuthentication<'a> {
    Public,
    Basic(&'a SecretString),
    Form(&'a SecretString),
}

/// What an answer of the token endpoint says. Providers write numbers as strings or with fractions, and refusals with other statuses than 400.
/// A description that repeats one of the secrets that were `sent` is not taken.
fn read_answer(status: u16, body: &[u8], is_refresh: bool, sent: &[&str]) -> Result<IssuedTokens, ProviderFault> {
    let Ok(fields) = strict_json::from_slice::<Map<String, Value>>(body) else {
        return Err(match status {
            401 | 403 => {
                ProviderFault::Client(ProviderError::new(&format!("its token endpoint answered {status}"), None))
            }
            _ => ProviderFault::Away(format!("its token endpoint answered {status}, and not in JSON")),
        });
    };
    let text = |name: &str| fields.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    let secret = |name: &str| text(name).map(|text| SecretString::from(text.to_owned()));
    let description = text("error_description").filter(|text| {
        // A short one may be a word of the description.
        !sent.iter().any(|secret| secret.len() >= 16 && text.contains(secret))
    });
    let is_decision =
        |error: &str| DECISIONS.contains(&error) || is_refresh && status >= 400 && REFRESH_DECISIONS.contains(&error);
    match (text("error"), secret("access_token")) {
        (None, Some(access_token)) if (200..300).contains(&status) => Ok(IssuedTokens {
            access_token,
            refresh_token: secret("refresh_token"),
            id_token: secret("id_token"),
            expires_in: fields.get("expires_in").and_then(life),
        }),
        (None, _) if (200..300).contains(&status) => Err(ProviderFault::Unreadable),
        (Some(error), _) if status < 500 && status != 429 && is_decision(error) => {
            Err(ProviderFault::Refused(ProviderError::new(error, description)))
        }
        (Some(error), _) if status < 500 && status != 429 && !PASSING.contains(&error) => {
            Err(ProviderFault::Client(ProviderError::new(error, description)))
        }
        (_, _) => Err(ProviderFault::Away(format!("its token endpoint answered {status}"))),
    }
}

/// A life in seconds: a number, with or without a fraction, or either of them as a string. `None` of 0, which some providers write for none.
fn life(value: &Value) -> Option<Duration> {
    let seconds: f64 = match value {
        Value::Number(number) => number.as_f64()?,
        Value::String(text) => text.trim().parse().ok()?,
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => return None,
    };
    // `min` of a number and none is the number.
    let seconds = Some(seconds).filter(|seconds| !seconds.is_nan())?;
    let life = Duration::try_from_secs_f64(seconds.min(LONGEST_LIFE.as_secs_f64())).ok()?;
    Some(Duration::from_secs(life.as_secs())).filter(|life| !life.is_zero())
}

impl ProviderMetadata {
    /// Whether each authorization response names the issuer (RFC 9207, section 3).
    pub(crate) fn names_issuer_in_responses(&self) -> bool {
        self.authorization_response_iss_parameter_supported == Some(true)
    }

    /// Client authentication by Basic is the default, where the provider does not say it (OpenID Connect Discovery 1.0, section 3).
    fn takes(&self, method: &str) -> bool {
        self.token_endpoint_auth_methods_supported.is_none() || self.names(method)
    }

    fn names(&self, method: &str) -> bool {
        let methods = self.token_endpoint_auth_methods_supported.as_ref();
        methods.is_some_and(|methods| methods.iter().any(|named| named == method))
    }
}

fn form_encoded(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, ENCODED).to_string()
}

async fn send(request: RequestBuilder) -> Result<(u16, Vec<u8>), ProviderFault> {
    let response = request.send().await.map_err(|error| ProviderFault::Away(error_chain(error)))?;
    let status = response.status().as_u16();
    Ok((status, read_bounded_body(response, MAX_BYTES).await.map_err(ProviderFault::Away)?))
}
