//! The client of an OCI registry, or of the control plane that relays one. Nothing that it returns is used before its digest is verified.
//!
//! A registry may send a client elsewhere for a blob (object stores); that is followed a few times, over HTTPS alone and without the
//! credential. Manifests are never elsewhere.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use secrecy::{ExposeSecret as _, SecretString};
use sha2::{Digest as _, Sha256};
use ureq::http::header::{ACCEPT, AUTHORIZATION, LOCATION, WWW_AUTHENTICATE};
use ureq::http::{HeaderValue, Response, StatusCode};
use ureq::{Agent, Body};
use wire::package::{Challenge, Digest, MANIFEST_BYTES, RealmAnswer};

use crate::manifest::{Descriptor, MANIFEST_TYPE};

mod push;
mod tls;

pub use push::push_layout;
pub use tls::{ClientIdentity, TlsError};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
const REDIRECTS: usize = 3;
const COPY_BYTES: usize = 64 * 1024;
/// How much of a refusal is read and shown.
const REFUSAL_BYTES: u64 = 4096;
const REFUSAL_SHOWN: usize = 300;
const REALM_ANSWER_BYTES: u64 = 64 * 1024;

/// How a client shows that it may pull.
#[derive(Debug)]
pub enum Credential {
    Nothing,
    /// Of the registry; given with each request or exchanged for a token, as the registry asks.
    Account {
        user: String,
        password: SecretString,
    },
    /// Of the node API, for a node without a certificate.
    Token(SecretString),
}

/// Why something could not be pulled or pushed. The text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error(
        "{host} cannot be reached ({cause}); check that it runs, its name, its certificate, and the network of this machine"
    )]
    Unreachable { host: String, cause: String },
    #[error("{host} is too slow: it did not deliver {what} in time; run this again, or give it more time")]
    Slow { host: String, what: String },
    #[error("{host} sends this machine elsewhere for {what}, which is refused: {why}; let it serve its content itself")]
    Redirects { host: String, what: String, why: &'static str },
    #[error(
        "{host} refuses the pull credential ({status}); it has expired or was changed: ask an administrator for a new bootstrap script"
    )]
    CredentialRefused { host: String, status: StatusCode },
    #[error("{host} asks for a credential in a way that is not known: {0}", .asked.chars().take(100).collect::<String>())]
    UnknownChallenge { host: String, asked: String },
    #[error("{host} has no {what}; push the package again, or correct its digest")]
    NotFound { host: String, what: String },
    #[error("{host} answers {status} for {what}: {text}")]
    Refused { host: String, status: StatusCode, what: String, text: String },
    #[error("{what} is not what its digest says: it has {found}; it was altered, or the registry's disk has a fault")]
    DigestMismatch { what: String, found: Digest },
    #[error("{what} ends after {found} of {declared} bytes; run this again, or push the package again")]
    Truncated { what: String, found: u64, declared: u64 },
    #[error("{what} is longer than the {declared} bytes that are declared for it")]
    TooLong { what: String, declared: u64 },
    #[error("{what} could not be written")]
    Write {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// A client of one repository.
#[derive(Debug)]
pub struct Registry {
    agent: Agent,
    /// Up to and without the last slash before `manifests` and `blobs`.
    base: String,
    host: String,
    credential: Credential,
    /// What the registry accepts in `Authorization`, once it has asked.
    authorization: Option<HeaderValue>,
    deadline: Instant,
}

/// Where a repository is.
#[derive(Debug, Clone)]
pub struct Location {
    /// Host, and port where it is not 443.
    pub host: String,
    /// Up to and without the last slash before `manifests` and `blobs`.
    pub base: String,
    /// The only trust anchor.
    pub authorities_pem: String,
}

impl Registry {
    /// A client that gives up at `deadline`, whatever it is doing.
    ///
    /// # Errors
    /// Where a certificate or key cannot be read.
    pub fn new(
        at: Location,
        identity: Option<&ClientIdentity>,
        credential: Credential,
        deadline: Instant,
    ) -> Result<Self, RegistryError> {
        let agent = Agent::config_builder()
            .tls_config(tls::config(&at.authorities_pem, identity)?)
            .https_only(true)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("gpuaas-installer/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(ANSWER_TIMEOUT))
            .build();
        let authorization = match &credential {
            Credential::Token(token) => Some(bearer(token.expose_secret())),
            Credential::Nothing | Credential::Account { .. } => None,
        };
        let Location { host, base, .. } = at;
        Ok(Self { agent: agent.into(), base, host, credential, authorization, deadline })
    }

    /// A manifest by its digest, verified.
    ///
    /// # Errors
    /// [`RegistryError`].
    pub fn manifest(&mut self, digest: Digest) -> Result<Vec<u8>, RegistryError> {
        let what = format!("the manifest {digest}");
        let bytes = self.bounded_manifest(&digest.to_string(), &what)?;
        let found = Digest::of(&bytes);
        if found == digest { Ok(bytes) } else { Err(RegistryError::DigestMismatch { what, found }) }
    }

    /// The manifest that a tag names at present. What it says has to be verified by something else.
    ///
    /// # Errors
    /// [`RegistryError`].
    pub fn unverified_manifest(&mut self, tag: &str) -> Result<Vec<u8>, RegistryError> {
        self.bounded_manifest(tag, &format!("the manifest of the tag {tag}"))
    }

    /// Copies a blob, of exactly the declared size, and verifies it. What was written is of no use after an error.
    ///
    /// # Errors
    /// [`RegistryError`].
    pub fn blob(&mut self, blob: &Descriptor, out: &mut impl Write) -> Result<(), RegistryError> {
        let what = format!("the blob {}", blob.digest);
        let response = self.get(&format!("{}/blobs/{}", self.base, blob.digest), None, &what, REDIRECTS)?;
        let mut body = response.into_body().into_with_config().limit(blob.size.saturating_add(1)).reader();
        let (mut hasher, mut buffer, mut found) = (Sha256::new(), vec![0; COPY_BYTES], 0_u64);
        loop {
            let read = body.read(&mut buffer).map_err(|error| self.cut_off(error, &what, found, blob.size))?;
            if read == 0 {
                break;
            }
            found += read as u64;
            if found > blob.size {
                return Err(RegistryError::TooLong { what, declared: blob.size });
            }
            hasher.update(&buffer[..read]);
            let written = out.write_all(&buffer[..read]);
            written.map_err(|source| RegistryError::Write { what: what.clone(), source })?;
        }
        if found < blob.size {
            return Err(RegistryError::Truncated { what, found, declared: blob.size });
        }
        let digest = Digest::finish(hasher);
        if digest == blob.digest { Ok(()) } else { Err(RegistryError::DigestMismatch { what, found: digest }) }
    }

    fn bounded_manifest(&mut self, name: &str, what: &str) -> Result<Vec<u8>, RegistryError> {
        let url = format!("{}/manifests/{name}", self.base);
        let response = self.get(&url, Some(MANIFEST_TYPE), what, 0)?;
        let mut body = response.into_body().into_with_config().limit(MANIFEST_BYTES + 1).reader();
        let mut bytes = Vec::new();
        let read = body.by_ref().take(MANIFEST_BYTES + 1).read_to_end(&mut bytes);
        read.map_err(|error| self.cut_off(error, what, bytes.len() as u64, MANIFEST_BYTES))?;
        if bytes.len() as u64 > MANIFEST_BYTES {
            return Err(RegistryError::TooLong { what: what.to_owned(), declared: MANIFEST_BYTES });
        }
        Ok(bytes)
    }

    /// A successful response. The credential goes to the registry alone.
    fn get(
        &mut self,
        url: &str,
        accept: Option<&str>,
        what: &str,
        redirects: usize,
    ) -> Result<Response<Body>, RegistryError> {
        let mut response = self.send(url, accept, self.authorization.clone(), what)?;
        if response.status() == StatusCode::UNAUTHORIZED && self.authorization.is_none() {
            self.authorization = Some(self.authorize(&response)?);
            response = self.send(url, accept, self.authorization.clone(), what)?;
        }
        let mut followed = 0;
        while response.status().is_redirection() {
            let refused = |why| RegistryError::Redirects { host: self.host.clone(), what: what.to_owned(), why };
            if followed == redirects {
                let why = if redirects == 0 { "a manifest is never elsewhere" } else { "it never ends" };
                return Err(refused(why));
            }
            let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
            if !location.starts_with("https://") {
                return Err(refused("not to an HTTPS address"));
            }
            response = self.send(location, accept, None, what)?;
            followed += 1;
        }
        self.expect_success(response, what)
    }

    fn send(
        &self,
        url: &str,
        accept: Option<&str>,
        authorization: Option<HeaderValue>,
        what: &str,
    ) -> Result<Response<Body>, RegistryError> {
        let mut request = self.agent.get(url).config().timeout_global(Some(self.time_left(what)?)).build();
        if let Some(accept) = accept {
            request = request.header(ACCEPT, accept);
        }
        if let Some(authorization) = authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        request.call().map_err(|error| self.no_answer(error, what))
    }

    fn expect_success(&self, response: Response<Body>, what: &str) -> Result<Response<Body>, RegistryError> {
        let (host, what, status) = (self.host.clone(), what.to_owned(), response.status());
        match status {
            _ if status.is_success() => Ok(response),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(RegistryError::CredentialRefused { host, status }),
            StatusCode::NOT_FOUND => Err(RegistryError::NotFound { host, what }),
            _ => Err(RegistryError::Refused { host, status, what, text: shown(response) }),
        }
    }

    /// What the registry wants to see, according to its challenge.
    fn authorize(&self, challenged: &Response<Body>) -> Result<HeaderValue, RegistryError> {
        let (host, status) = (self.host.clone(), challenged.status());
        let asked =
            challenged.headers().get(WWW_AUTHENTICATE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let challenge = Challenge::parse(asked)
            .ok_or_else(|| RegistryError::UnknownChallenge { host: host.clone(), asked: asked.to_owned() })?;
        let account = match &self.credential {
            Credential::Account { user, password } => Some(basic(user, password)),
            Credential::Nothing | Credential::Token(_) => None,
        };
        match challenge {
            Challenge::Basic => account.ok_or(RegistryError::CredentialRefused { host, status }),
            Challenge::Bearer { realm, service, scope } => self.exchange(&realm, service, scope, account),
        }
    }

    /// A token of the realm that the registry trusts, for the account, or for any client.
    fn exchange(
        &self,
        realm: &str,
        service: Option<String>,
        scope: Option<String>,
        account: Option<HeaderValue>,
    ) -> Result<HeaderValue, RegistryError> {
        let what = "a token for the pull";
        let mut request = self.agent.get(realm).config().timeout_global(Some(self.time_left(what)?)).build();
        for (name, value) in [("service", service), ("scope", scope)] {
            request = value.into_iter().fold(request, |request, value| request.query(name, value));
        }
        if let Some(account) = account {
            request = request.header(AUTHORIZATION, account);
        }
        let response = self.expect_success(request.call().map_err(|error| self.no_answer(error, what))?, what)?;
        let status = response.status();
        let mut body = Vec::new();
        let read = response.into_body().into_reader().take(REALM_ANSWER_BYTES).read_to_end(&mut body);
        read.map_err(|error| self.cut_off(error, what, 0, REALM_ANSWER_BYTES))?;
        let answer = strict_json::from_slice::<RealmAnswer>(&body).ok().and_then(RealmAnswer::token);
        let token = answer.ok_or_else(|| RegistryError::Refused {
            host: self.host.clone(),
            status,
            what: what.to_owned(),
            text: "it has no token".to_owned(),
        })?;
        Ok(bearer(token.expose()))
    }

    /// What is left until the deadline.
    fn time_left(&self, what: &str) -> Result<Duration, RegistryError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(self.slow(what)) } else { Ok(left) }
    }

    fn slow(&self, what: &str) -> RegistryError {
        RegistryError::Slow { host: self.host.clone(), what: what.to_owned() }
    }

    fn no_answer(&self, error: ureq::Error, what: &str) -> RegistryError {
        match error {
            ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
                RegistryError::Unreachable { host: self.host.clone(), cause: "no connection in time".to_owned() }
            }
            ureq::Error::Timeout(_) => self.slow(what),
            other => RegistryError::Unreachable { host: self.host.clone(), cause: crate::chain(&other) },
        }
    }

    fn cut_off(&self, error: io::Error, what: &str, found: u64, declared: u64) -> RegistryError {
        match ureq::Error::from(error) {
            ureq::Error::Timeout(_) => self.slow(what),
            _ => RegistryError::Truncated { what: what.to_owned(), found, declared },
        }
    }
}

fn basic(user: &str, password: &SecretString) -> HeaderValue {
    sensitive(&format!("Basic {}", STANDARD.encode(format!("{user}:{}", password.expose_secret()))))
}

fn bearer(token: &str) -> HeaderValue {
    sensitive(&format!("Bearer {token}"))
}

/// A text that no header can carry is refused by the server, as a wrong one.
fn sensitive(text: &str) -> HeaderValue {
    let mut value = HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static("Bearer"));
    value.set_sensitive(true);
    value
}

/// The beginning of a refusal, without control characters.
fn shown(response: Response<Body>) -> String {
    let mut text = Vec::new();
    // What cannot be read is not shown.
    let _ = response.into_body().into_reader().take(REFUSAL_BYTES).read_to_end(&mut text);
    String::from_utf8_lossy(&text).chars().filter(|character| !character.is_control()).take(REFUSAL_SHOWN).collect()
}
