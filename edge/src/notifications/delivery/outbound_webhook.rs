//! Webhooks to receivers of users (Standard Webhooks 1.0.0): a POST of the CloudEvent, signed by HMAC-SHA256 over id, time and body.
//!
//! A user names the receiver, so a delivery could reach the service's own network. A name is resolved once for each connection, every
//! address in the result is checked, and the connection goes to one of these. Redirects are not followed, proxies of the environment are
//! not used, and only the status and `Retry-After` of a response are read.

use crate::outbound::host_address::is_localhost_name;
use crate::outbound::http_client::{client_builder, error_chain, retry_after};
use crate::outbound::node_probe::{DeniedAddress, Resolve, SystemResolver, embedded_or_same};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chrono::{DateTime, Utc};
use domain::notification_endpoint::DeliveryFailure;
use hmac::{Hmac, KeyInit as _, Mac as _};
use ipnet::IpNet;
use rand::RngExt as _;
use reqwest::dns::{Addrs, Name, Resolving};
use reqwest::{Client, Response, StatusCode, Url, header};
use secrecy::{ExposeSecret as _, SecretSlice, SecretString};
use sha2::Sha256;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use uuid::Uuid;

/// For a whole attempt. Standard Webhooks has receivers answer within 15 to 30 s.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(15);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Addresses of one name; a name with more is refused whole.
const MAX_ADDRESSES: usize = 16;
/// Bytes of a secret (the specification requires 24 to 64).
const SECRET_BYTES: usize = 32;
const SECRET_PREFIX: &str = "whsec_";
/// The longest URL, in bytes.
const MAX_URL: usize = domain::notification_endpoint::ADDRESS_MOST;

/// Where webhooks may go.
#[derive(Clone, Debug, Default)]
pub struct WebhookSettings {
    /// `SVC_NOTIFICATION_ALLOWED_CIDRS`: networks that are admitted though they are private.
    pub allowed: Vec<IpNet>,
    /// Authorities for receivers' certificates in PEM, beside the system's.
    pub authorities_pem: Option<String>,
}

/// The client for webhooks cannot be made.
#[derive(Debug, Error)]
#[error("the client for webhooks cannot be made: {0}")]
pub struct WebhookClientError(String);

/// Why a text is not a receiver's URL.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ReceiverUrlError {
    #[error("it must be an https URL of at most {MAX_URL} characters, such as https://receiver.example/hooks")]
    Url,
    #[error("it must not hold a user name or a password; the messages are signed")]
    Credentials,
    #[error("it must not have a fragment")]
    Fragment,
    #[error(
        "its address is {0}; a receiver must be reachable on the internet, or in a network that the operator allows"
    )]
    Address(DeniedAddress),
}

/// Sends webhooks. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Webhooks {
    client: Client,
    receivers: Receivers,
}

/// A message to a receiver.
pub struct SignedWebhook<'a> {
    pub id: Uuid,
    pub body: &'a str,
    /// A receiver may know any of them; the newest first.
    pub secrets: &'a [SecretSlice<u8>],
}

impl Webhooks {
    /// # Errors
    /// [`WebhookClientError`], where the authorities cannot be read for example.
    pub fn new(settings: WebhookSettings) -> Result<Self, WebhookClientError> {
        let receivers = Receivers { allowed: settings.allowed.into(), resolver: Arc::new(SystemResolver) };
        let client = client_builder(settings.authorities_pem.as_deref()).map_err(WebhookClientError)?;
        let client = client
            .https_only(true)
            .timeout(ATTEMPT_TIMEOUT)
            .connect_timeout(CONNECT_TIMEOUT)
            .no_proxy()
            .pool_max_idle_per_host(1)
            .user_agent(concat!("gpuaas/", env!("CARGO_PKG_VERSION")))
            .dns_resolver(receivers.clone());
        let client = client.build().map_err(|error| WebhookClientError(error_chain(error)))?;
        Ok(Self { client, receivers })
    }

    /// Checks a receiver's URL as far as possible without the network.
    ///
    /// # Errors
    /// [`ReceiverUrlError`]
    pub fn check(&self, text: &str) -> Result<(), ReceiverUrlError> {
        let url = Url::parse(text).map_err(|_| ReceiverUrlError::Url)?;
        let is_plain = text.len() <= MAX_URL && text.bytes().all(|byte| byte.is_ascii_graphic());
        if url.scheme() != "https" || !url.has_host() || !is_plain {
            return Err(ReceiverUrlError::Url);
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(ReceiverUrlError::Credentials);
        }
        if url.fragment().is_some() {
            return Err(ReceiverUrlError::Fragment);
        }
        match literal(&url) {
            Some(address) => self.receivers.check(address).map_err(ReceiverUrlError::Address),
            None if names_this_machine(&url) => self.receivers.check_name_of_this_machine(),
            None => Ok(()),
        }
    }

    /// Makes one attempt.
    ///
    /// # Errors
    /// [`DeliveryFailure`], as the endpoint's owner reads it.
    pub async fn send(
        &self,
        url: &str,
        message: &SignedWebhook<'_>,
        now: DateTime<Utc>,
    ) -> Result<(), DeliveryFailure> {
        // A policy of the operator's may have changed since the URL was accepted.
        self.check(url).map_err(|why| failure(&why.to_string()))?;
        let (id, timestamp) = (message.id.to_string(), now.timestamp().to_string());
        let request = self
            .client
            .post(url)
            .header(header::CONTENT_TYPE, "application/cloudevents+json; charset=utf-8")
            .header("webhook-id", &id)
            .header("webhook-timestamp", &timestamp)
            .header("webhook-signature", signatures(message.secrets, &id, &timestamp, message.body))
            .body(message.body.to_owned());
        let answer = request.send().await.map_err(|error| failure(&unreachable(error)))?;
        check_response(&answer, now)
    }
}

/// The meaning of the receiver's response. Its body is not read.
fn check_response(answer: &Response, now: DateTime<Utc>) -> Result<(), DeliveryFailure> {
    let status = answer.status();
    if status.is_success() {
        return Ok(());
    }
    let wait = retry_after(answer.headers(), now);
    let redirected = if status.is_redirection() { "; redirects are not followed" } else { "" };
    Err(DeliveryFailure {
        is_gone: status == StatusCode::GONE,
        retry_after_seconds: wait.and_then(|wait| wait.as_secs().try_into().ok()),
        ..failure(&format!("it answered {status}{redirected}"))
    })
}

fn failure(why: &str) -> DeliveryFailure {
    DeliveryFailure { why: why.to_owned(), is_final: false, is_gone: false, retry_after_seconds: None }
}

/// Without names that are known only on the operator's machines.
fn unreachable(error: reqwest::Error) -> String {
    if error.is_timeout() { "it did not answer in time".to_owned() } else { error_chain(error) }
}

/// `v1,` and the HMAC-SHA256 in base64 for each secret, with blanks between.
fn signatures(secrets: &[SecretSlice<u8>], id: &str, timestamp: &str, body: &str) -> String {
    let signed = |secret: &SecretSlice<u8>| {
        #[allow(clippy::expect_used)]
        let mut mac = Hmac::<Sha256>::new_from_slice(secret.expose_secret()).expect("HMAC takes a key of any length");
        for part in [id, ".", timestamp, ".", body] {
            mac.update(part.as_bytes());
        }
        format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
    };
    secrets.iter().map(signed).collect::<Vec<_>>().join(" ")
}

/// A new secret.
#[must_use]
pub fn new_secret() -> SecretSlice<u8> {
    rand::rng().random::<[u8; SECRET_BYTES]>().to_vec().into()
}

/// A secret in the form that receivers get.
#[must_use]
pub fn shown_secret(secret: &SecretSlice<u8>) -> SecretString {
    format!("{SECRET_PREFIX}{}", STANDARD.encode(secret.expose_secret())).into()
}

/// The addresses that a receiver may have.
#[derive(Clone)]
struct Receivers {
    allowed: Arc<[IpNet]>,
    resolver: Arc<dyn Resolve>,
}

impl std::fmt::Debug for Receivers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receivers").field("allowed", &self.allowed).finish_non_exhaustive()
    }
}

impl Receivers {
    fn check(&self, address: IpAddr) -> Result<(), DeniedAddress> {
        let is_allowed = |address: IpAddr| self.allowed.iter().any(|network| network.contains(&address));
        match embedded_or_same(address) {
            Err(DeniedAddress::Loopback) if is_allowed(address) => Ok(()),
            Err(denied) => Err(denied),
            Ok(meant) if is_private(meant) && !is_allowed(meant) => Err(DeniedAddress::Private),
            Ok(_) => Ok(()),
        }
    }

    fn check_name_of_this_machine(&self) -> Result<(), ReceiverUrlError> {
        let loopback = IpAddr::from([127, 0, 0, 1]);
        self.check(loopback).map_err(ReceiverUrlError::Address)
    }

    /// All addresses are checked before any is used: a name with one good and one bad address is a trap.
    async fn addresses(&self, name: &str) -> Result<Vec<SocketAddr>, String> {
        let found = self.resolver.resolve(name).await.map_err(|_| "the name does not resolve".to_owned())?;
        if found.is_empty() {
            return Err("the name has no address".to_owned());
        }
        if found.len() > MAX_ADDRESSES {
            return Err(format!("its address is {}", DeniedAddress::TooMany));
        }
        for address in &found {
            self.check(*address).map_err(|denied| format!("its address is {denied}"))?;
        }
        Ok(found.into_iter().map(|address| SocketAddr::new(address, 0)).collect())
    }
}

impl reqwest::dns::Resolve for Receivers {
    fn resolve(&self, name: Name) -> Resolving {
        let receivers = self.clone();
        Box::pin(async move {
            let addresses = receivers.addresses(name.as_str()).await?;
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

/// Networks without hosts on the internet: private, shared by carriers, for benchmarks, for protocols, for documentation, unique local and
/// site-local (RFC 6890, RFC 5737, RFC 3849, RFC 4193, RFC 3879).
fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            v4.is_private()
                || (a == 100 && (64..128).contains(&b))
                || (a == 198 && (18..20).contains(&b))
                || (a, b, c) == (192, 0, 0)
                || v4.is_documentation()
        }
        IpAddr::V6(v6) => {
            matches!(v6.segments()[0] & 0xffc0, 0xfc00..=0xfdc0 | 0xfec0) || v6.segments()[..2] == [0x2001, 0x0db8]
        }
    }
}

fn literal(url: &Url) -> Option<IpAddr> {
    url.host_str()?.trim_matches(['[', ']']).parse().ok()
}

fn names_this_machine(url: &Url) -> bool {
    url.host_str().is_some_and(|host| is_localhost_name(host.trim_end_matches('.')))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::io;
    use std::pin::Pin;

    /// Resolves every name to these addresses.
    struct FixedResolver(Vec<IpAddr>);

    impl Resolve for FixedResolver {
        fn resolve<'a>(&'a self, _: &'a str) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'a>> {
            Box::pin(async { Ok(self.0.clone()) })
        }
    }

    fn webhooks(allowed: &[&str]) -> Webhooks {
        let allowed = allowed.iter().map(|network| network.parse().unwrap()).collect();
        Webhooks::new(WebhookSettings { allowed, authorities_pem: None }).unwrap()
    }

    #[test]
    fn signature_matches_the_specification_example() {
        let secret: SecretSlice<u8> = STANDARD.decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap().into();
        let body = r#"{"test": 2432232314}"#;
        let signed = signatures(std::slice::from_ref(&secret), "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", body);
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        let both = [new_secret(), secret];
        let signed = signatures(&both, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", body);
        assert!(signed.starts_with("v1,") && signed.ends_with(" v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="));
    }

    #[test]
    fn retry_after_of_a_receiver_is_seconds_or_a_date_by_its_own_clock() {
        let now = DateTime::parse_from_rfc3339("2026-11-26T12:00:00Z").unwrap().to_utc();
        let answered = |headers: &[(header::HeaderName, &str)]| {
            let answer = axum::http::Response::builder().status(503);
            let answer = headers.iter().fold(answer, |answer, (name, value)| answer.header(name, *value)).body("");
            check_response(&Response::from(answer.unwrap()), now).unwrap_err().retry_after_seconds
        };
        let wait = |value: &str| answered(&[(header::RETRY_AFTER, value)]);
        let an_hour_late = (header::DATE, "Thu, 26 Nov 2026 11:00:00 GMT");
        assert_eq!(answered(&[an_hour_late, (header::RETRY_AFTER, "Thu, 26 Nov 2026 11:02:00 GMT")]), Some(120));
        for (value, seconds) in [
            ("120", Some(120)),
            ("Thu, 26 Nov 2026 12:02:00 GMT", Some(120)),
            ("Thu, 26 Nov 2026 11:00:00 GMT", Some(0)),
            ("Fri, 31 Dec 9999 23:59:59 GMT", Some(86_400)),
            ("later", None),
        ] {
            assert_eq!(wait(value), seconds, "{value}");
        }
    }

    #[test]
    fn secret_has_the_receivers_format() {
        let shown = shown_secret(&new_secret());
        let encoded = shown.expose_secret().strip_prefix("whsec_").unwrap();
        assert_eq!(STANDARD.decode(encoded).unwrap().len(), SECRET_BYTES);
    }

    #[test]
    fn url_of_a_receiver_is_on_https_without_credentials_and_on_the_internet() {
        let webhooks = webhooks(&[]);
        for good in ["https://receiver.example/hooks?team=7", "https://9.9.9.9:8443/", "https://[2001:db9::1]/"] {
            assert_eq!(webhooks.check(good), Ok(()), "{good}");
        }
        let long = format!("https://receiver.example/{}", "x".repeat(MAX_URL));
        for wrong in ["", "receiver.example", "http://receiver.example/", "ftp://receiver.example/", "https://", &long]
        {
            assert_eq!(webhooks.check(wrong), Err(ReceiverUrlError::Url), "{wrong}");
        }
        assert_eq!(webhooks.check("https://ann:pw@receiver.example/"), Err(ReceiverUrlError::Credentials));
        assert_eq!(webhooks.check("https://receiver.example/#x"), Err(ReceiverUrlError::Fragment));
        for inside in [
            "https://127.0.0.1/",
            "https://2130706433/",
            "https://0x7f.1/",
            "https://localhost:9464/",
            "https://LOCALHOST./",
            "https://10.0.0.1/",
            "https://192.168.0.1/",
            "https://100.64.0.1/",
            "https://169.254.169.254/latest/meta-data",
            "https://192.0.2.1/",
            "https://198.51.100.1/",
            "https://203.0.113.1/",
            "https://[2001:db8::1]/",
            "https://[::1]/",
            "https://[::ffff:10.0.0.1]/",
            "https://[fd00::1]/",
            "https://[fec0::1]/",
        ] {
            assert!(matches!(webhooks.check(inside), Err(ReceiverUrlError::Address(_))), "{inside}");
        }
    }

    #[test]
    fn operator_may_allow_private_networks_but_never_the_metadata_service() {
        let webhooks = webhooks(&["10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16"]);
        for good in ["https://10.1.2.3/", "https://127.0.0.1:8443/", "https://localhost/"] {
            assert_eq!(webhooks.check(good), Ok(()), "{good}");
        }
        for wrong in ["https://192.168.0.1/", "https://169.254.169.254/"] {
            assert!(webhooks.check(wrong).is_err(), "{wrong}");
        }
    }

    #[tokio::test]
    async fn name_that_resolves_to_an_internal_address_is_not_connected_to() {
        let receivers = |addresses: &[&str]| Receivers {
            allowed: Arc::default(),
            resolver: Arc::new(FixedResolver(addresses.iter().map(|address| address.parse().unwrap()).collect())),
        };
        let of = async |addresses: &[&str]| receivers(addresses).addresses("receiver.example").await;
        assert_eq!(of(&["9.9.9.9"]).await.unwrap(), ["9.9.9.9:0".parse().unwrap()]);
        assert_eq!(of(&["9.9.9.9", "127.0.0.1"]).await.unwrap_err(), "its address is loopback");
        assert_eq!(of(&["::ffff:192.168.1.1"]).await.unwrap_err(), "its address is in a private network");
        assert_eq!(of(&[]).await.unwrap_err(), "the name has no address");
        assert!(of(&["9.9.9.9"; 17]).await.is_err());
    }
}
