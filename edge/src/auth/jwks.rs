//! The identity provider's published keys (RFC 7517), found by OpenID Connect Discovery 1.0.
//!
//! An unknown key id causes a fetch, at a bounded rate and never twice at once; cached keys stay while the provider cannot be reached, and no
//! failure of a fetch touches a token whose key is cached. A key is unknown only after a complete fetch without it whose request followed the
//! token: the provider may have begun to use a key after it wrote the response of an earlier request. A token that joins a fetch in flight
//! and is not served by it waits for the next one. Which tokens a fetch followed is remembered per token and not per key id: a repeated
//! token of an unknown key is refused at once, and a caller who guesses the provider's next key id has no other caller refused. A set is
//! bounded in size and number, and fetching it in time.

use std::{
    collections::{BTreeSet, HashMap},
    hash::{BuildHasher as _, RandomState},
    mem,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwapOption;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey};
use reqwest::{Client, header::CACHE_CONTROL};
use serde_json::Value;
use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::outbound::http_client::{client_builder, error_chain, is_secure, read_bounded_body};

const RSA_MIN_BYTES: usize = 256;
/// The longest wait for the gap between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How many tokens of unknown keys are remembered for one fetch.
const MAX_AWAITING: usize = 1024;

/// How the provider's keys are fetched.
#[derive(Clone, Debug)]
pub struct JwksSettings {
    /// The issuer, with `/.well-known/openid-configuration` below it. HTTPS, or HTTP on this machine.
    pub issuer: String,
    /// Authorities for the provider's certificate in PEM, where the system does not trust it.
    pub authorities_pem: Option<String>,
    /// For each of the two requests.
    pub timeout: Duration,
    /// Of each of the two answers, in bytes.
    pub max_bytes: usize,
    pub max_keys: usize,
    /// Between two attempts that unknown key ids cause.
    pub min_refresh_gap: Duration,
    /// Between two forced refreshes.
    pub min_forced_gap: Duration,
    /// How many requests at once wait for a refresh in flight, and as many more for the gap before the next one. The others are asked to
    /// retry. A slow provider must not block all of the API's request slots.
    pub max_waiting: usize,
    /// After which the keys are refreshed although none is missing, so that a withdrawn key ends.
    pub max_age: Duration,
}

impl JwksSettings {
    #[must_use]
    pub fn new(issuer: impl Into<String>) -> Self {
        Self {
            issuer: issuer.into(),
            authorities_pem: None,
            timeout: Duration::from_secs(5),
            max_bytes: 256 * 1024,
            max_keys: 64,
            min_refresh_gap: Duration::from_secs(5),
            min_forced_gap: Duration::from_secs(1),
            max_waiting: 64,
            max_age: Duration::from_secs(300),
        }
    }
}

/// Why the keys could not be fetched.
#[derive(Clone, Debug, Error)]
pub enum JwksError {
    #[error("{0} is no https address (http only on this machine)")]
    Insecure(String),
    #[error("the client for the identity provider cannot be made: {0}")]
    Client(String),
    #[error("{url} could not be fetched: {reason}")]
    Fetch { url: String, reason: String },
    #[error(
        "the discovery document is of issuer {0}; SVC_OIDC_ISSUER has to be exactly the issuer in it, with or without a slash at its end"
    )]
    ForeignIssuer(String),
    #[error("{0} has no usable keys")]
    NoKeys(String),
    #[error("the keys were fetched a moment ago")]
    TooSoon,
    #[error("too many requests wait for the provider's keys")]
    TooManyWait,
    /// Beside cached keys that are young: most of these tokens are made up.
    #[error("too many tokens of unknown keys wait for the next fetch of the provider's keys")]
    TooManyUnknown,
}

/// One key that the provider signs with.
pub struct PublishedKey {
    algorithms: Vec<Algorithm>,
    decoding: DecodingKey,
}

impl PublishedKey {
    pub(super) fn decoding(&self) -> &DecodingKey {
        &self.decoding
    }
}

/// Where a token comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenSource {
    /// A request: its key id may be made up, and costs others nothing.
    Request,
    /// The provider's response to this service: its key is absent only where a fetch that begins after the response lacks it.
    Provider,
}

/// A token as far as its key is looked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct SignedToken<'a> {
    pub(super) kid: &'a str,
    pub(super) algorithm: Algorithm,
    /// The text that was signed, and the signature: no other token has both.
    pub(super) content: (&'a str, &'a str),
    pub(super) source: TokenSource,
}

type KeySet = HashMap<String, Vec<Arc<PublishedKey>>>;
type Refresh = Shared<BoxFuture<'static, Result<(), JwksError>>>;

/// The provider's keys, refreshed on demand.
#[derive(Clone)]
pub struct Jwks(Arc<Inner>);

struct Inner {
    settings: JwksSettings,
    client: Client,
    keys: ArcSwapOption<FetchedKeys>,
    refreshing: Mutex<RefreshState>,
    /// Of requests that wait for a refresh in flight.
    waiting: Semaphore,
    /// Of requests that wait for the gap: made-up key ids do so at will, and take no permit of the others.
    pausing: Semaphore,
    /// Its keys are of this process alone: no caller makes a token with the digest of another one.
    digests: RandomState,
}

struct FetchedKeys {
    keys: KeySet,
    /// When they were requested: a token from before has no other key.
    requested_at: Instant,
    at: Instant,
    /// The digests of tokens that waited for these keys when they were requested.
    awaited_by: BTreeSet<u64>,
}

#[derive(Default)]
struct RefreshState {
    last_attempt_at: Option<Instant>,
    last_forced_at: Option<Instant>,
    running: Option<Refresh>,
    /// The digests of tokens that wait for the next request of the keys.
    awaiting: BTreeSet<u64>,
}

impl Jwks {
    /// # Errors
    /// Where the issuer is not on HTTPS or the authorities cannot be read.
    pub fn new(settings: JwksSettings) -> Result<Self, JwksError> {
        require_https(&settings.issuer)?;
        let client = client_builder(settings.authorities_pem.as_deref()).map_err(JwksError::Client)?;
        let client = client.timeout(settings.timeout).build().map_err(|error| JwksError::Client(error.to_string()))?;
        let permits = settings.max_waiting.min(Semaphore::MAX_PERMITS);
        let (waiting, pausing) = (Semaphore::new(permits), Semaphore::new(permits));
        let (keys, refreshing) = (ArcSwapOption::empty(), Mutex::default());
        Ok(Self(Arc::new(Inner { settings, client, keys, refreshing, waiting, pausing, digests: RandomState::new() })))
    }

    /// Fetches the keys now, however fresh they are. Returns the number of keys. The response of a fetch in flight may be from before a key was
    /// withdrawn: another one follows it.
    ///
    /// # Errors
    /// [`JwksError::TooSoon`] where a refresh was forced a moment ago; else where the keys could not be fetched: the cached ones stay.
    pub async fn refresh(&self) -> Result<usize, JwksError> {
        let began = Instant::now();
        let in_flight = {
            let mut refreshing = self.0.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
            if refreshing.last_forced_at.is_some_and(|at| at.elapsed() < self.0.settings.min_forced_gap) {
                return Err(JwksError::TooSoon);
            }
            refreshing.last_forced_at = Some(began);
            refreshing.running.clone()
        };
        if let Some(in_flight) = in_flight {
            // Its failure is no failure of this one.
            let _ = in_flight.await;
        }
        let is_requested_since = |fetched: &Arc<FetchedKeys>| fetched.requested_at >= began;
        if !self.0.keys.load().as_ref().is_some_and(is_requested_since) {
            let refresh = {
                let mut refreshing = self.0.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
                refreshing.running.clone().unwrap_or_else(|| self.spawn_refresh(&mut refreshing))
            };
            refresh.await?;
        }
        Ok(self.0.keys.load().as_ref().map_or(0, |fetched| fetched.keys.values().map(Vec::len).sum()))
    }

    /// The keys that may have signed this token; none where a complete fetch that began after the token was there has not found its key id.
    ///
    /// # Errors
    /// Where the id is unknown and the keys cannot be fetched at the moment.
    pub(super) async fn keys_for(&self, token: SignedToken<'_>) -> Result<Vec<Arc<PublishedKey>>, JwksError> {
        let SignedToken { kid, algorithm, content, source } = token;
        let (began, gap) = (Instant::now(), self.0.settings.min_refresh_gap);
        let digest = || self.0.digests.hash_one(content);
        let mut has_paused = false;
        loop {
            if let Some(fetched) = &*self.0.keys.load() {
                let found = matching_keys(&fetched.keys, kid, algorithm);
                if !found.is_empty() {
                    if fetched.at.elapsed() > self.0.settings.max_age {
                        // Not awaited: the cached keys serve until the new ones are there.
                        if let Ok(refresh) = self.try_refresh(None) {
                            tokio::spawn(refresh);
                        }
                    }
                    return Ok(found);
                }
                // A repeated token does not wait for the gap again.
                let is_repeated = source == TokenSource::Request
                    && fetched.at.elapsed() < gap
                    && fetched.awaited_by.contains(&digest());
                if fetched.requested_at >= began || is_repeated {
                    return Ok(found);
                }
            }
            match self.try_refresh(Some(digest())) {
                Ok(refresh) => {
                    let Ok(_permit) = self.0.waiting.try_acquire() else { return Err(self.too_many(source)) };
                    refresh.await?;
                }
                Err(pause) if has_paused || pause > LONGEST_PAUSE => return Err(JwksError::TooSoon),
                Err(pause) => {
                    let Ok(_permit) = self.0.pausing.try_acquire() else { return Err(self.too_many(source)) };
                    tokio::time::sleep(pause).await;
                    has_paused = true;
                }
            }
        }
    }

    /// Why an unknown key id is not waited for. Beside young keys it is most likely made up, which is no fault of the provider's.
    fn too_many(&self, source: TokenSource) -> JwksError {
        let max_age = self.0.settings.max_age;
        let is_young = self.0.keys.load().as_ref().is_some_and(|fetched| fetched.at.elapsed() < max_age);
        let is_flood = is_young && source == TokenSource::Request;
        if is_flood { JwksError::TooManyUnknown } else { JwksError::TooManyWait }
    }

    /// Joins the refresh in flight, or starts one unless the last attempt is too recent: then the pause until the next one may start. A token
    /// whose digest is given waits for the next request of the keys.
    fn try_refresh(&self, token: Option<u64>) -> Result<Refresh, Duration> {
        let mut refreshing = self.0.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        if refreshing.awaiting.len() < MAX_AWAITING {
            refreshing.awaiting.extend(token);
        }
        if let Some(running) = &refreshing.running {
            return Ok(running.clone());
        }
        let gap = self.0.settings.min_refresh_gap;
        let pause = refreshing.last_attempt_at.map_or(Duration::ZERO, |at| gap.saturating_sub(at.elapsed()));
        if pause.is_zero() { Ok(self.spawn_refresh(&mut refreshing)) } else { Err(pause) }
    }

    /// In a task of its own, so that it does not end with the request that began it.
    fn spawn_refresh(&self, refreshing: &mut RefreshState) -> Refresh {
        refreshing.last_attempt_at = Some(Instant::now());
        let jwks = self.clone();
        let task = tokio::spawn(async move {
            let running = RefreshGuard(jwks);
            let result = running.0.fetch().await;
            if let Err(error) = &result {
                warn!(%error, issuer = %running.0.0.settings.issuer, "the identity provider's keys could not be refreshed");
            }
            result
        });
        let issuer = self.0.settings.issuer.clone();
        let refresh = task
            .map(move |joined| {
                joined.unwrap_or_else(|error| Err(JwksError::Fetch { url: issuer, reason: error.to_string() }))
            })
            .boxed()
            .shared();
        refreshing.running = Some(refresh.clone());
        refresh
    }

    async fn fetch(&self) -> Result<(), JwksError> {
        let settings = &self.0.settings;
        let discovery =
            self.get(&format!("{}/.well-known/openid-configuration", settings.issuer.trim_end_matches('/'))).await?;
        let issuer = discovery.get("issuer").and_then(Value::as_str).unwrap_or_default();
        if issuer != settings.issuer {
            return Err(JwksError::ForeignIssuer(issuer.chars().take(200).collect()));
        }
        let address = discovery.get("jwks_uri").and_then(Value::as_str).unwrap_or_default();
        require_https(address)?;
        let awaited_by = mem::take(&mut self.0.refreshing.lock().unwrap_or_else(PoisonError::into_inner).awaiting);
        let requested_at = Instant::now();
        let published = self.get(address).await?;
        let keys = read_keys(&published, settings.max_keys);
        if keys.is_empty() {
            return Err(JwksError::NoKeys(address.to_owned()));
        }
        debug!(keys = keys.len(), "the identity provider's keys were refreshed");
        self.0.keys.store(Some(Arc::new(FetchedKeys { keys, requested_at, at: Instant::now(), awaited_by })));
        Ok(())
    }

    async fn get(&self, url: &str) -> Result<Value, JwksError> {
        let failed = |reason: String| JwksError::Fetch { url: url.to_owned(), reason };
        // A cache on the way may have a response from before a key was published, or withdrawn (RFC 9111, section 5.2.1.4).
        let request = self.0.client.get(url).header(CACHE_CONTROL, "no-cache");
        let response = request.send().await.map_err(|error| failed(error_chain(error)))?;
        if response.status() != 200 {
            return Err(failed(format!("status {}", response.status().as_u16())));
        }
        let body = read_bounded_body(response, self.0.settings.max_bytes).await.map_err(failed)?;
        strict_json::from_slice(&body).map_err(|_| failed("the answer is no JSON".into()))
    }
}

/// A refresh in flight, until it ends in whatever way.
struct RefreshGuard(Jwks);

impl Drop for RefreshGuard {
    fn drop(&mut self) {
        self.0.0.refreshing.lock().unwrap_or_else(PoisonError::into_inner).running = None;
    }
}

fn require_https(address: &str) -> Result<(), JwksError> {
    if is_secure(address) { Ok(()) } else { Err(JwksError::Insecure(address.chars().take(200).collect())) }
}

fn matching_keys(keys: &KeySet, kid: &str, algorithm: Algorithm) -> Vec<Arc<PublishedKey>> {
    let of_this_id = keys.get(kid).map(Vec::as_slice).unwrap_or_default();
    of_this_id.iter().filter(|key| key.algorithms.contains(&algorithm)).map(Arc::clone).collect()
}

/// Reads the usable signing keys; a key of an unknown kind is not a fault of the set (RFC 7517, section 5).
fn read_keys(published: &Value, max_keys: usize) -> KeySet {
    let mut keys = KeySet::new();
    let listed = published.get("keys").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    if listed.len() > max_keys {
        warn!(listed = listed.len(), max_keys, "the identity provider publishes more keys than are accepted");
    }
    for (kid, key) in listed.iter().take(max_keys).filter_map(read_key) {
        keys.entry(kid).or_default().push(Arc::new(key));
    }
    keys
}

fn read_key(jwk: &Value) -> Option<(String, PublishedKey)> {
    let text = |name: &str| jwk.get(name).and_then(Value::as_str);
    let kid = text("kid")?.to_owned();
    if text("use").is_some_and(|purpose| purpose != "sig") {
        return None;
    }
    let operations = jwk.get("key_ops").and_then(Value::as_array);
    if operations.is_some_and(|operations| !operations.iter().any(|operation| operation == "verify")) {
        return None;
    }
    let (decoding, possible) = match (text("kty")?, text("crv")) {
        ("RSA", _) => {
            let (modulus, exponent) = (number(text("n")?)?, number(text("e")?)?);
            if modulus.len() < RSA_MIN_BYTES {
                return None;
            }
            (DecodingKey::from_rsa_raw_components(&modulus, &exponent), AlgorithmFamily::Rsa.algorithms().to_vec())
        }
        ("EC", Some("P-256")) => (elliptic(text("x")?, text("y")?, 32)?, vec![Algorithm::ES256]),
        ("EC", Some("P-384")) => (elliptic(text("x")?, text("y")?, 48)?, vec![Algorithm::ES384]),
        ("OKP", Some("Ed25519")) => (DecodingKey::from_ed_components(text("x")?).ok()?, vec![Algorithm::EdDSA]),
        _ => return None,
    };
    let algorithms = match text("alg") {
        None => possible,
        Some(named) => {
            let named = named.parse().ok()?;
            possible.contains(&named).then(|| vec![named])?
        }
    };
    Some((kid, PublishedKey { algorithms, decoding }))
}

/// A number without zero bytes in front. RFC 7518, section 2, has it in base64url without padding; some providers write base64, pad it, or put
/// the zero byte of a signed number in front.
fn number(encoded: &str) -> Option<Vec<u8>> {
    let encoded = encoded.trim_end_matches('=').replace('+', "-").replace('/', "_");
    let bytes = URL_SAFE_NO_PAD.decode(encoded).ok()?;
    Some(bytes.into_iter().skip_while(|byte| *byte == 0).collect())
}

/// A point whose coordinates have so many bytes (RFC 7518, section 6.2.1.2); some providers leave their zero bytes out.
fn elliptic(x: &str, y: &str, size: usize) -> Option<DecodingKey> {
    let coordinate = |encoded: &str| {
        let number = number(encoded)?;
        let zeros = size.checked_sub(number.len())?;
        Some(URL_SAFE_NO_PAD.encode([vec![0; zeros], number].concat()))
    };
    DecodingKey::from_ec_components(&coordinate(x)?, &coordinate(y)?).ok()
}
