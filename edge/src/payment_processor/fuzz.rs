//! Fuzz targets for the payment processor's webhooks: the signature header and the event. See [`crate::fuzz`].

use super::signature::WebhookSecrets;
use super::stripe::event::StripeEvent;
use super::stripe::objects::is_id;
use crate::fuzz::{BUDGET, text_of};
use chrono::{DateTime, TimeDelta, Utc};
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde_json::Value;
use sha2::Sha256;
use std::panic::AssertUnwindSafe;

const SECRET: &str = "whsec_0123456789_fuzz";
const AT: i64 = 1_700_000_000;

fn now() -> DateTime<Utc> {
    DateTime::from_timestamp(AT, 0).unwrap()
}

/// The secrets. What computes a MAC is not marked as unwind safe.
fn secrets() -> AssertUnwindSafe<WebhookSecrets> {
    AssertUnwindSafe(WebhookSecrets::new(&[SECRET.into()]).unwrap())
}

/// The signature of a body at a time.
fn signature(seconds: i64, body: &[u8]) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(SECRET.as_bytes()).unwrap();
    mac.update(format!("{seconds}.").as_bytes());
    mac.update(body);
    hex::encode(mac.finalize().into_bytes())
}

#[test]
fn fuzz_webhook_signature_holds_for_its_body_and_time_alone() {
    let secrets = secrets();
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        let [seconds, at, change, body @ ..] = input else { return };
        let seconds = AT + i64::from(*seconds);
        let (signed, verify) =
            (signature(seconds, body), |header: &str, body: &[u8]| secrets.verify(header, body, now()));
        let header = format!("t={seconds},v1={signed}");
        assert_eq!(verify(&header, body), Ok(()));
        let mut other = body.to_vec();
        match other.len() {
            0 => other.push(*change),
            length => other[usize::from(*at) % length] ^= (*change).max(1),
        }
        assert!(verify(&header, &other).is_err(), "another body");
        assert!(verify(&header, &[body, &[*change]].concat()).is_err(), "a longer body");
        assert!(verify(&format!("t={},v1={signed}", seconds + 1), body).is_err(), "another time");
        assert!(verify(&format!("t={seconds},v0={signed}"), body).is_err(), "another scheme");
        let late = now() + TimeDelta::seconds(600);
        assert!(secrets.verify(&header, body, late).is_err(), "too late");
    });
}

#[test]
fn fuzz_webhook_signature_header_of_any_text_verifies_with_the_signature_alone() {
    let (secrets, body) = (secrets(), br#"{"id":"evt_1"}"#);
    let (right, zeros, time) = (signature(AT, body), "0".repeat(64), format!("t={AT}"));
    let other = signature(AT, b"{}");
    let tokens = [
        ",",
        "t=",
        "v1=",
        "v0=",
        "=",
        " ",
        &time,
        "1700000000",
        "-1",
        right.as_str(),
        &zeros,
        &other,
        "v1=00",
        "18446744073709551616",
    ];
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        for header in [text_of(input, &tokens), String::from_utf8_lossy(input).into_owned()] {
            if secrets.verify(&header, body, now()).is_ok() {
                let elements: Vec<&str> = header.split(',').map(str::trim).collect();
                assert!(elements.contains(&format!("v1={right}").as_str()), "{header:?}");
                assert_eq!(
                    elements.iter().filter(|element| element.starts_with("t=")).collect::<Vec<_>>(),
                    [&time.as_str()]
                );
                assert!(secrets.verify(&header, b"{}", now()).is_err() || header.contains(&other));
            }
        }
    });
}

/// An event whose parts are of any type.
fn event_of(input: &[u8]) -> String {
    const TYPES: [&str; 10] = [
        "payment_intent.succeeded",
        "payment_intent.payment_failed",
        "checkout.session.completed",
        "checkout.session.async_payment_failed",
        "charge.refunded",
        "refund.updated",
        "charge.dispute.created",
        "customer.created",
        "Bad Type",
        "",
    ];
    const NAMES: [&str; 16] = [
        "id",
        "amount",
        "currency",
        "status",
        "metadata",
        "payment_intent",
        "refunds",
        "data",
        "has_more",
        "charge",
        "amount_total",
        "payment_status",
        "reason",
        "last_payment_error",
        "latest_charge",
        "created",
    ];
    const VALUES: [&str; 24] = [
        "null",
        "1",
        "-1",
        "9223372036854775807",
        "1e400",
        "0.5",
        "\"\"",
        "\"pi_1\"",
        "\"usd\"",
        "\"succeeded\"",
        "\"paid\"",
        "\"é\\u0000\"",
        "{}",
        "[]",
        "{\"id\":\"re_1\",\"amount\":1,\"currency\":\"usd\",\"status\":\"succeeded\"}",
        "{\"data\":[],\"has_more\":false}",
        "true",
        "{\"gpuaas_payment_id\":\"x\"}",
        "\"requires_payment_method\"",
        "\"canceled\"",
        "1700000000",
        "{\"code\":\"card_declined\"}",
        "\"ch_1\"",
        "[1]",
    ];
    let byte = |at: usize| usize::from(*input.get(at).unwrap_or(&0));
    let fields = input.get(3..).unwrap_or_default().chunks_exact(2).take(12).map(|pair| {
        let (name, value) = (NAMES[usize::from(pair[0]) % NAMES.len()], VALUES[usize::from(pair[1]) % VALUES.len()]);
        format!("\"{name}\":{value}")
    });
    let object = fields.collect::<Vec<_>>().join(",");
    let id = ["evt_1", "evt-1", "", "é"][byte(0) / 64];
    let created = VALUES[byte(1) % VALUES.len()];
    format!(
        r#"{{"id":"{id}","object":"event","type":"{}","created":{created},"data":{{"object":{{{object}}}}},"pending_webhooks":{}}}"#,
        TYPES[byte(2) % TYPES.len()],
        byte(3)
    )
}

#[test]
fn fuzz_processor_event_is_bounded_and_its_digest_is_that_of_its_content() {
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        let text = event_of(input);
        let mut raw = text.clone().into_bytes();
        if let [.., at, change] = input {
            let at = usize::from(*at) * 5 % raw.len();
            raw[at] = *change;
        }
        for body in [text.into_bytes(), raw, input.to_vec()] {
            let Ok(event) = StripeEvent::read(&body) else { continue };
            assert!(is_id(&event.id) && (1..=100).contains(&event.event_type.len()), "{event:?}");
            assert!(event.object_id().is_none_or(|id| is_id(&id)), "{event:?}");
            // Another order of members and other metadata of the delivery: the same content.
            // A number that no type holds may stand where nothing is read.
            let Ok(mut sent) = serde_json::from_slice::<Value>(&body) else { continue };
            sent.sort_all_objects();
            sent["pending_webhooks"] = 99.into();
            let repeated = StripeEvent::read(sent.to_string().as_bytes()).unwrap();
            assert_eq!(
                (&repeated.id, repeated.digest(), repeated.occurred_at),
                (&event.id, event.digest(), event.occurred_at)
            );
            sent["data"]["object"]["more"] = 1.into();
            assert_ne!(StripeEvent::read(sent.to_string().as_bytes()).unwrap().digest(), event.digest());
            let (update, expected) = (repeated.update(), event.update());
            assert_eq!(update, expected);
        }
    });
}
