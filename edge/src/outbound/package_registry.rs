//! The client of the OCI registry with the agent's package, which the node API relays: nodes pull as themselves, and the registry's account
//! stays here. What it delivers is verified by the node, by digest and signature.

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;

use crate::http::error::{ApiError, Code};
use crate::outbound::http_client::{client_builder, error_chain, read_bounded_body};
use axum::body::Body;
use futures::stream;
use reqwest::header::{
    ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION, WWW_AUTHENTICATE,
};
use reqwest::{Client, RequestBuilder, Response, StatusCode, Url};
use secrecy::{ExposeSecret as _, SecretString};
use std::time::Duration;
use thiserror::Error;
use tokio::time::{Instant, timeout, timeout_at};
use wire::package::{Challenge, MANIFEST_BYTES, RealmAnswer, Reference};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const REDIRECTS: usize = 3;
const REALM_ANSWER_BYTES: usize = 64 * 1024;
const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";

/// Why the client could not be built.
#[derive(Debug, Error)]
#[error("the client for the registry cannot be made: {0}")]
pub struct PackageRegistryError(String);

/// An account of the registry that may pull.
#[derive(Clone, Debug)]
pub struct PullAccount {
    pub user: String,
    pub password: SecretString,
}

/// One repository of a registry. Cheap to clone.
#[derive(Clone, Debug)]
pub struct PackageRegistry {
    base: String,
    client: Client,
    account: Option<PullAccount>,
    limits: TimeLimits,
}

/// How long the registry may take.
#[derive(Clone, Copy, Debug)]
struct TimeLimits {
    /// For the head of an answer.
    head: Duration,
    /// For the next piece of a blob, and for a whole manifest.
    piece: Duration,
    /// For a whole blob.
    blob: Duration,
}

impl Default for TimeLimits {
    fn default() -> Self {
        Self { head: Duration::from_secs(10), piece: Duration::from_secs(30), blob: Duration::from_secs(900) }
    }
}

/// Why something could not be relayed; the operator's half.
#[derive(Debug, Error)]
pub(crate) enum RelayError {
    #[error("the registry has no such content")]
    NotFound,
    #[error("the registry cannot be reached: {0}")]
    Unreachable(String),
    #[error("the registry does not answer in time")]
    Slow,
    #[error("the registry refuses the account of this installation ({0})")]
    Refused(StatusCode),
    #[error("the registry asks for a credential in a way that is not known")]
    UnknownChallenge,
    #[error("the registry answers {0}")]
    Status(StatusCode),
    #[error("the registry sends its clients elsewhere, {0}")]
    Redirects(&'static str),
}

impl From<RelayError> for ApiError {
    fn from(error: RelayError) -> Self {
        if matches!(error, RelayError::NotFound) {
            return Self::not_found("part of a package");
        }
        let message = "The registry of the agent's package does not deliver it at the moment; run the installation again after \
                       Retry-After.";
        Self::new(Code::ServiceUnavailable, message).because(error)
    }
}

impl PackageRegistry {
    /// `authorities_pem` are trusted beside the system's.
    ///
    /// # Errors
    /// Where the authorities cannot be read.
    pub fn new(
        reference: &Reference,
        authorities_pem: Option<&str>,
        account: Option<PullAccount>,
    ) -> Result<Self, PackageRegistryError> {
        let client = client_builder(authorities_pem).map_err(PackageRegistryError)?;
        let client = client.https_only(true).connect_timeout(CONNECT_TIMEOUT).build();
        let client = client.map_err(|error| PackageRegistryError(error.to_string()))?;
        let base = format!("https://{}/v2/{}", reference.registry, reference.repository);
        Ok(Self { base, client, account, limits: TimeLimits::default() })
    }

    /// A manifest, by a digest or a tag.
    pub(crate) async fn manifest(&self, name: &str) -> Result<Vec<u8>, RelayError> {
        let response = self.get(&format!("{}/manifests/{name}", self.base), 0).await?;
        let most = usize::try_from(MANIFEST_BYTES).unwrap_or(usize::MAX);
        let body = timeout(self.limits.piece, read_bounded_body(response, most)).await.map_err(|_| RelayError::Slow)?;
        body.map_err(RelayError::Unreachable)
    }

    /// A blob as a stream, with its length where the registry says it.
    pub(crate) async fn blob(&self, digest: &str) -> Result<(HeaderMap, Body), RelayError> {
        let response = self.get(&format!("{}/blobs/{digest}", self.base), REDIRECTS).await?;
        let mut headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"))]);
        if let Some(length) = response.headers().get(CONTENT_LENGTH) {
            headers.insert(CONTENT_LENGTH, length.clone());
        }
        let TimeLimits { piece, blob, .. } = self.limits;
        let ends_at = Instant::now() + blob;
        let pieces = stream::try_unfold(response, move |mut response| async move {
            let next = timeout_at(ends_at.min(Instant::now() + piece), response.chunk()).await;
            let piece = next.map_err(|_| RelayError::Slow)?;
            let piece = piece.map_err(|error| RelayError::Unreachable(error_chain(error)))?;
            Ok::<_, RelayError>(piece.map(|piece| (piece, response)))
        });
        Ok((headers, Body::from_stream(pieces)))
    }

    /// A successful response. The account goes to the registry and its realm alone.
    async fn get(&self, url: &str, redirects: usize) -> Result<Response, RelayError> {
        let first = || self.client.get(url).header(ACCEPT, MANIFEST_TYPE);
        let mut response = self.send(first()).await?;
        if response.status() == StatusCode::UNAUTHORIZED {
            let authorization = self.authorize(&response).await?;
            response = self.send(first().header(AUTHORIZATION, authorization)).await?;
        }
        let mut followed = 0;
        while response.status().is_redirection() {
            if followed == redirects {
                return Err(RelayError::Redirects(if redirects == 0 { "for a manifest" } else { "and never ends" }));
            }
            let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
            let location = Url::parse(location).ok().filter(|url| url.scheme() == "https");
            let location = location.ok_or(RelayError::Redirects("and not to an HTTPS address"))?;
            response = self.send(self.client.get(location)).await?;
            followed += 1;
        }
        match response.status() {
            status if status.is_success() => Ok(response),
            StatusCode::NOT_FOUND => Err(RelayError::NotFound),
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => Err(RelayError::Refused(status)),
            status => Err(RelayError::Status(status)),
        }
    }

    async fn authorize(&self, challenged: &Response) -> Result<HeaderValue, RelayError> {
        let asked =
            challenged.headers().get(WWW_AUTHENTICATE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        match Challenge::parse(asked).ok_or(RelayError::UnknownChallenge)? {
            Challenge::Basic => {
                let account = self.account.as_ref().ok_or(RelayError::Refused(challenged.status()))?;
                Ok(basic(account))
            }
            Challenge::Bearer { realm, service, scope } => {
                let query: Vec<_> = [("service", service), ("scope", scope)]
                    .into_iter()
                    .filter_map(|(name, value)| Some((name, value?)))
                    .collect();
                let mut request = self.client.get(realm).query(&query);
                if let Some(account) = &self.account {
                    request = request.header(AUTHORIZATION, basic(account));
                }
                let response = self.send(request).await?;
                if !response.status().is_success() {
                    return Err(RelayError::Refused(response.status()));
                }
                let body = timeout(self.limits.head, read_bounded_body(response, REALM_ANSWER_BYTES)).await;
                let body = body.map_err(|_| RelayError::Slow)?.map_err(RelayError::Unreachable)?;
                let token = strict_json::from_slice::<RealmAnswer>(&body).ok().and_then(RealmAnswer::token);
                let token = token.ok_or(RelayError::UnknownChallenge)?;
                Ok(sensitive(&format!("Bearer {}", token.expose())))
            }
        }
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, RelayError> {
        let answered = timeout(self.limits.head, request.send()).await.map_err(|_| RelayError::Slow)?;
        answered.map_err(|error| RelayError::Unreachable(error_chain(error)))
    }
}

fn basic(account: &PullAccount) -> HeaderValue {
    use base64::Engine as _;
    let pair = format!("{}:{}", account.user, account.password.expose_secret());
    sensitive(&format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(pair)))
}

/// A text that no header can carry is refused by the registry, as a wrong one.
fn sensitive(text: &str) -> HeaderValue {
    let mut value = HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static("Bearer"));
    value.set_sensitive(true);
    value
}
