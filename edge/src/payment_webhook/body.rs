//! A webhook's body in its stored form: compressed first, since sealed data does not compress, then sealed, and encoded in base64. The
//! store writes it with every transition.

use super::BODY_BYTES;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use domain::processor_event::ProcessorEvent;
use miniz_oxide::deflate::compress_to_vec_zlib;
use miniz_oxide::inflate::decompress_to_vec_zlib_with_limit;
use persistence::envelope_encryption::{EnvelopeError, KeyRing};
use persistence::key_rewrap::body_context;
use secrecy::{ExposeSecret as _, SecretSlice};
use uuid::Uuid;

/// How zlib begins (RFC 1950), and no JSON: a body without it is not packed.
const ZLIB_MAGIC: u8 = 0x78;
/// The quickest.
const LEVEL: u8 = 1;

/// Seals a body for this event.
///
/// # Errors
/// [`EnvelopeError`]
pub fn seal_body(ring: &KeyRing, id: Uuid, body: &[u8]) -> Result<String, EnvelopeError> {
    Ok(STANDARD.encode(ring.seal(&body_context(&id.to_string()), &compress_to_vec_zlib(body, LEVEL))?))
}

/// The body of a stored event, as it was received.
///
/// # Errors
/// [`EnvelopeError`]; `None` where it was erased.
pub fn body_of(ring: &KeyRing, event: &ProcessorEvent) -> Option<Result<SecretSlice<u8>, EnvelopeError>> {
    let sealed = STANDARD.decode(event.body_enc.as_ref()?).map_err(|_| EnvelopeError::Refused);
    let opened = sealed.and_then(|sealed| ring.open(&body_context(&event.id.to_string()), &sealed));
    Some(opened.and_then(|body| {
        match body.expose_secret() {
            // Nothing longer was accepted.
            packed @ [ZLIB_MAGIC, ..] => decompress_to_vec_zlib_with_limit(packed, BODY_BYTES)
                .map(SecretSlice::from)
                .map_err(|_| EnvelopeError::Refused),
            _ => Ok(body),
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::ProcessorEventId;
    use domain::processor_event::Phase;
    use domain::resend_timer::ResendTimer;

    fn ring() -> KeyRing {
        KeyRing::parse(&format!("key a {}\nactive a\n", STANDARD.encode([7; 32]))).unwrap()
    }

    fn event(id: Uuid, body_enc: String) -> ProcessorEvent {
        let now = chrono::DateTime::UNIX_EPOCH;
        ProcessorEvent {
            id: ProcessorEventId(id),
            event_id: "evt_1".into(),
            event_type: "charge.refunded".into(),
            object_id: None,
            occurred_at: None,
            received_at: now,
            digest: String::new(),
            body_enc: Some(body_enc),
            attempts: 0,
            last_error: None,
            phase: Phase::Received { again: ResendTimer::first(now) },
        }
    }

    #[test]
    fn sealed_body_opens_unchanged_and_is_a_third_of_its_size() {
        let line = r#"{"id":"il_1","amount":1000,"currency":"usd","description":"one of a dozen lines"},"#;
        for body in ["{}".to_owned(), line.repeat(12), line.repeat(3000)] {
            let id = Uuid::from_u128(1);
            let stored = seal_body(&ring(), id, body.as_bytes()).unwrap();
            assert!(body.len() < 100 || stored.len() < body.len() / 3, "{} of {}", stored.len(), body.len());
            let back = body_of(&ring(), &event(id, stored)).unwrap().unwrap();
            assert_eq!(back.expose_secret(), body.as_bytes());
        }
    }

    #[test]
    fn uncompressed_stored_body_opens_and_one_that_inflates_beyond_the_bound_does_not() {
        let id = Uuid::from_u128(1);
        let seal = |bytes: &[u8]| STANDARD.encode(ring().seal(&body_context(&id.to_string()), bytes).unwrap());
        let back = body_of(&ring(), &event(id, seal(br#"{"id":"evt_1"}"#))).unwrap().unwrap();
        assert_eq!(back.expose_secret(), br#"{"id":"evt_1"}"#);
        let grows = compress_to_vec_zlib(&vec![b' '; BODY_BYTES + 1], LEVEL);
        assert!(body_of(&ring(), &event(id, seal(&grows))).unwrap().is_err());
    }
}
