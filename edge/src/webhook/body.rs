//! What came in, as it is kept: packed first, since nobody can pack what is sealed, then sealed, and written in base64. The store writes it
//! with every transition.

use super::BODY_BYTES;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use domain::processor_event::ProcessorEvent;
use miniz_oxide::deflate::compress_to_vec_zlib;
use miniz_oxide::inflate::decompress_to_vec_zlib_with_limit;
use persistence::envelope::{EnvelopeError, KeyRing};
use persistence::rewrap::body_place;
use secrecy::{ExposeSecret as _, SecretSlice};
use uuid::Uuid;

/// How zlib begins (RFC 1950), and no JSON: a body without it is not packed.
const PACKED: u8 = 0x78;
/// The quickest.
const LEVEL: u8 = 1;

/// A body as it is kept for this event.
///
/// # Errors
/// [`EnvelopeError`]
pub fn kept(ring: &KeyRing, id: Uuid, body: &[u8]) -> Result<String, EnvelopeError> {
    Ok(STANDARD.encode(ring.seal(&body_place(&id.to_string()), &compress_to_vec_zlib(body, LEVEL))?))
}

/// The body of a stored event, as it came.
///
/// # Errors
/// [`EnvelopeError`]; `None` where it was forgotten.
pub fn body_of(ring: &KeyRing, event: &ProcessorEvent) -> Option<Result<SecretSlice<u8>, EnvelopeError>> {
    let sealed = STANDARD.decode(event.body_enc.as_ref()?).map_err(|_| EnvelopeError::Refused);
    let opened = sealed.and_then(|sealed| ring.open(&body_place(&event.id.to_string()), &sealed));
    Some(opened.and_then(|body| {
        match body.expose_secret() {
            // Nothing longer was taken in.
            packed @ [PACKED, ..] => decompress_to_vec_zlib_with_limit(packed, BODY_BYTES)
                .map(SecretSlice::from)
                .map_err(|_| EnvelopeError::Refused),
            _ => Ok(body),
        }
    }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use domain::ProcessorEventId;
    use domain::again::Again;
    use domain::processor_event::Phase;

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
            phase: Phase::Received { again: Again::first(now) },
        }
    }

    #[test]
    fn a_body_comes_back_as_it_came_and_takes_a_third_of_its_place() {
        let line = r#"{"id":"il_1","amount":1000,"currency":"usd","description":"one of a dozen lines"},"#;
        for body in ["{}".to_owned(), line.repeat(12), line.repeat(3000)] {
            let id = Uuid::from_u128(1);
            let kept = kept(&ring(), id, body.as_bytes()).unwrap();
            assert!(body.len() < 100 || kept.len() < body.len() / 3, "{} of {}", kept.len(), body.len());
            let back = body_of(&ring(), &event(id, kept)).unwrap().unwrap();
            assert_eq!(back.expose_secret(), body.as_bytes());
        }
    }

    #[test]
    fn a_body_that_was_kept_unpacked_is_read_as_ever_and_one_that_grows_beyond_the_bound_is_not() {
        let id = Uuid::from_u128(1);
        let seal = |bytes: &[u8]| STANDARD.encode(ring().seal(&body_place(&id.to_string()), bytes).unwrap());
        let back = body_of(&ring(), &event(id, seal(br#"{"id":"evt_1"}"#))).unwrap().unwrap();
        assert_eq!(back.expose_secret(), br#"{"id":"evt_1"}"#);
        let grows = compress_to_vec_zlib(&vec![b' '; BODY_BYTES + 1], LEVEL);
        assert!(body_of(&ring(), &event(id, seal(&grows))).unwrap().is_err());
    }
}
