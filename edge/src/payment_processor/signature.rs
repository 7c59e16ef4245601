//! Whether a webhook is the processor's: Stripe's signature scheme (Stripe, *Webhooks*, *Verify webhook signatures manually*).
//!
//! The header `Stripe-Signature` is `t=<seconds>,v1=<hex>[,v1=<hex>…]`. Each `v1` is the HMAC-SHA256 of `<t>.<body>`, with the body as
//! received, byte for byte, under one of the endpoint's secrets: while a secret is rolled there are two. Any other scheme proves nothing
//! (`v0` is made under a key that cannot be verified).

use chrono::{DateTime, TimeDelta, Utc};
use hmac::{Hmac, KeyInit as _, Mac as _};
use secrecy::{ExposeSecret as _, SecretString};
use sha2::Sha256;
use thiserror::Error;

/// How far the time of the signature may be from ours, both ways.
pub const TOLERANCE: TimeDelta = TimeDelta::seconds(300);

/// Further signatures are ignored. Two secrets make two.
const MAX_SIGNATURES: usize = 8;
/// No header of the processor's is as long.
const MAX_HEADER: usize = 1024;

/// The secrets of the webhook endpoint: one, or two while it is rolled.
#[derive(Clone)]
pub struct WebhookSecrets(Vec<Hmac<Sha256>>);

/// Why a webhook is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SignatureError {
    #[error("the header Stripe-Signature is missing or given twice")]
    NoHeader,
    #[error("the header Stripe-Signature cannot be read")]
    Unreadable,
    #[error("the header has no signature of the scheme v1")]
    NoV1,
    #[error("no signature fits the body")]
    Wrong,
    #[error("the signature was made more than five minutes ago")]
    TooOld,
    #[error("the signature is more than five minutes ahead")]
    TooNew,
}

impl WebhookSecrets {
    /// `None` where there is no secret, or one is empty: anyone could sign with that.
    #[must_use]
    pub fn new(secrets: &[SecretString]) -> Option<Self> {
        let key = |secret: &SecretString| {
            let secret = secret.expose_secret();
            (secret.len() >= 16).then(|| Hmac::new_from_slice(secret.as_bytes()).ok()).flatten()
        };
        let keys: Option<Vec<_>> = secrets.iter().map(key).collect();
        keys.filter(|keys| !keys.is_empty()).map(Self)
    }

    /// Verifies `body`, as received. The time is checked last: a body with a wrong signature gets no further detail.
    ///
    /// # Errors
    /// See [`SignatureError`].
    pub fn verify(&self, header: &str, body: &[u8], now: DateTime<Utc>) -> Result<(), SignatureError> {
        let header = Header::read(header)?;
        // All of them are computed, whichever matches: the duration reveals nothing.
        let fits = |key: &Hmac<Sha256>| {
            let mut mac = key.clone();
            mac.update(header.time.as_bytes());
            mac.update(b".");
            mac.update(body);
            let tag = mac.finalize().into_bytes();
            header.signatures.iter().fold(subtle::Choice::from(0), |found, shown| {
                found | subtle::ConstantTimeEq::ct_eq(&tag[..], &shown[..])
            })
        };
        let found = self.0.iter().fold(subtle::Choice::from(0), |found, key| found | fits(key));
        if !bool::from(found) {
            return Err(SignatureError::Wrong);
        }
        match now - header.at {
            age if age > TOLERANCE => Err(SignatureError::TooOld),
            age if age < -TOLERANCE => Err(SignatureError::TooNew),
            _ => Ok(()),
        }
    }
}

impl std::fmt::Debug for WebhookSecrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WebhookSecrets({})", self.0.len())
    }
}

struct Header<'a> {
    /// As text: it is signed in that form.
    time: &'a str,
    at: DateTime<Utc>,
    signatures: Vec<[u8; 32]>,
}

impl<'a> Header<'a> {
    fn read(text: &'a str) -> Result<Self, SignatureError> {
        if text.len() > MAX_HEADER {
            return Err(SignatureError::Unreadable);
        }
        let (mut time, mut signatures) = (None, Vec::new());
        for element in text.split(',') {
            match element.trim().split_once('=') {
                Some(("t", _)) if time.is_some() => return Err(SignatureError::Unreadable),
                Some(("t", value)) => time = Some(value),
                Some(("v1", value)) if signatures.len() < MAX_SIGNATURES => signatures.push(value),
                // Other schemes prove nothing, and more signatures than that neither.
                Some(_) => {}
                None => return Err(SignatureError::Unreadable),
            }
        }
        let time = time.filter(|time| !time.is_empty() && time.bytes().all(|byte| byte.is_ascii_digit()));
        let seconds = time.and_then(|time| time.parse().ok()).and_then(|seconds| DateTime::from_timestamp(seconds, 0));
        let (Some(time), Some(at)) = (time, seconds) else { return Err(SignatureError::Unreadable) };
        if signatures.is_empty() {
            return Err(SignatureError::NoV1);
        }
        // An invalid signature matches nothing; another beside it may.
        let read = |text: &&str| {
            let mut signature = [0; 32];
            hex::decode_to_slice(text, &mut signature).ok().map(|()| signature)
        };
        Ok(Self { time, at, signatures: signatures.iter().filter_map(read).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Stripe's own library for Python (16.1.0) computes for this body, at this time, under these secrets.
    const BODY: &str = r#"{"id":"evt_1","object":"event","type":"payment_intent.succeeded","note":"Grüße \u20ac"}"#;
    const AT: i64 = 1_700_000_000;
    const FIRST: &str = "whsec_0123456789_first";
    const SECOND: &str = "whsec_0123456789_second";
    const BY_FIRST: &str = "eb59e13e7bd1e79677693649dcb76884251adf033e1470f7d6cf68ba4a6e3300";
    const BY_SECOND: &str = "2c61f10dbba184ba53f50b4c0a90ad26b2b87370e6898914d2bea7e832704d60";

    fn secrets(of: &[&str]) -> WebhookSecrets {
        let of: Vec<SecretString> = of.iter().map(|secret| (*secret).into()).collect();
        WebhookSecrets::new(&of).unwrap()
    }

    fn verify(header: &str, body: &str, seconds_later: i64) -> Result<(), SignatureError> {
        let now = DateTime::from_timestamp(AT + seconds_later, 0).unwrap();
        secrets(&[FIRST]).verify(header, body.as_bytes(), now)
    }

    #[test]
    fn signature_of_the_processors_library_verifies() {
        let now = DateTime::from_timestamp(AT, 0).unwrap();
        for (secret, signature) in [(FIRST, BY_FIRST), (SECOND, BY_SECOND)] {
            let header = format!("t={AT},v1={signature}");
            assert_eq!(secrets(&[secret]).verify(&header, BODY.as_bytes(), now), Ok(()));
        }
    }

    #[test]
    fn rolled_secrets_verify_on_both_sides() {
        let now = DateTime::from_timestamp(AT, 0).unwrap();
        let both = format!("t={AT},v1={BY_SECOND},v1={BY_FIRST}");
        for (known, header) in [
            (vec![FIRST], &both),
            (vec![SECOND], &both),
            (vec![FIRST, SECOND], &format!("t={AT},v1={BY_SECOND}")),
            (vec![SECOND, FIRST], &format!("t={AT},v1={BY_SECOND}")),
        ] {
            assert_eq!(secrets(&known).verify(header, BODY.as_bytes(), now), Ok(()), "{known:?} {header}");
        }
        let third = secrets(&["whsec_0123456789_third"]);
        assert_eq!(third.verify(&both, BODY.as_bytes(), now), Err(SignatureError::Wrong));
    }

    #[test]
    fn altered_body_or_timestamp_does_not_verify() {
        let header = format!("t={AT},v1={BY_FIRST}");
        assert_eq!(verify(&header, BODY, 0), Ok(()));
        for body in [&BODY.replace("evt_1", "evt_2"), &format!("{BODY}\n"), &BODY.replace(":", ": "), ""] {
            assert_eq!(verify(&header, body, 0), Err(SignatureError::Wrong), "{body}");
        }
        let moved = format!("t={},v1={BY_FIRST}", AT + 1);
        assert_eq!(verify(&moved, BODY, 0), Err(SignatureError::Wrong));
        // The same instant in another notation is not what was signed.
        assert_eq!(verify(&format!("t=0{AT},v1={BY_FIRST}"), BODY, 0), Err(SignatureError::Wrong));
    }

    #[test]
    fn signature_is_valid_for_five_minutes_in_both_directions() {
        let header = format!("t={AT},v1={BY_FIRST}");
        for (seconds, expected) in
            [(300, Ok(())), (301, Err(SignatureError::TooOld)), (-300, Ok(())), (-301, Err(SignatureError::TooNew))]
        {
            assert_eq!(verify(&header, BODY, seconds), expected, "{seconds}");
        }
        // A wrong signature is reported without further detail.
        assert_eq!(verify(&header, "{}", 301), Err(SignatureError::Wrong));
    }

    #[test]
    fn other_signature_schemes_are_ignored() {
        for header in [format!("t={AT},v0={BY_FIRST}"), format!("t={AT},v2={BY_FIRST}"), format!("t={AT}")] {
            assert_eq!(verify(&header, BODY, 0), Err(SignatureError::NoV1), "{header}");
        }
        assert_eq!(verify(&format!("t={AT},v0=00,v1={BY_FIRST}"), BODY, 0), Ok(()));
    }

    #[test]
    fn unreadable_signature_header_is_refused() {
        let (long, many) = ("v1=00,".repeat(200), format!("t={AT}{}", ",v1=00".repeat(9)));
        for (header, expected) in [
            ("", SignatureError::Unreadable),
            ("v1", SignatureError::Unreadable),
            (BY_FIRST, SignatureError::Unreadable),
            (&*format!("v1={BY_FIRST}"), SignatureError::Unreadable),
            (&format!("t=,v1={BY_FIRST}"), SignatureError::Unreadable),
            (&format!("t=-{AT},v1={BY_FIRST}"), SignatureError::Unreadable),
            (&format!("t=1e9,v1={BY_FIRST}"), SignatureError::Unreadable),
            (&format!("t=99999999999999999999,v1={BY_FIRST}"), SignatureError::Unreadable),
            (&format!("t={AT},t={AT},v1={BY_FIRST}"), SignatureError::Unreadable),
            (&format!("t={AT},v1="), SignatureError::Wrong),
            (&format!("t={AT},v1={}", &BY_FIRST[1..]), SignatureError::Wrong),
            (&format!("t={AT},v1={BY_FIRST}00"), SignatureError::Wrong),
            (&format!("t={AT},v1=é"), SignatureError::Wrong),
            (&long, SignatureError::Unreadable),
            (&many, SignatureError::Wrong),
        ] {
            assert_eq!(verify(header, BODY, 0), Err(expected), "{header}");
        }
        // A ninth is ignored, even where it would match.
        let ninth = format!("t={AT}{},v1={BY_FIRST}", ",v1=00".repeat(8));
        assert_eq!(verify(&ninth, BODY, 0), Err(SignatureError::Wrong));
    }

    #[test]
    fn empty_webhook_secret_is_refused() {
        assert!(WebhookSecrets::new(&[]).is_none());
        assert!(WebhookSecrets::new(&["".into()]).is_none());
        assert!(WebhookSecrets::new(&[FIRST.into(), "short".into()]).is_none());
        assert!(!format!("{:?}", secrets(&[FIRST])).contains("first"));
    }
}
