//! Webhooks of the payment processor, forged ones, and operators' actions on failed events.

use super::harness::{ApiHarness, TestResponse, without_ids};
use crate::app_state::Payments;
use crate::payment_processor::signature::{TOLERANCE, WebhookSecrets};
use crate::payment_processor::stripe::{CheckoutPage, Stripe, StripeSettings};
use crate::payment_webhook::{self, COUNTERS, PATH, body_of, id_of_event};
use axum::body::Body;
use axum::http::{Method, Request};
use chrono::Utc;
use domain::policy::PolicyKey;
use domain::processor_event::{Fact, ProcessingOutcome, ProcessorEvent};
use domain::{EntityKind, EntityRef};
use hmac::{Hmac, KeyInit as _, Mac as _};
use prometheus::{Registry, TextEncoder};
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use sha2::Sha256;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use tower::ServiceExt as _;

const SECRET: &str = "whsec_0123456789abcdef";
const EVENTS: &str = "/api/v1/admin/billing/processor-events";

/// A harness whose payment processor is unreachable: no test here calls it.
fn payments() -> Payments {
    let settings = StripeSettings {
        api_base: "http://127.0.0.1:9".to_owned(),
        secret_key: "sk_test_0123456789".into(),
        checkout: CheckoutPage::Sessions,
        authorities_pem: None,
    };
    crate::testing::install_crypto();
    Payments {
        processor: Arc::new(Stripe::new(settings).unwrap()),
        webhook_secrets: WebhookSecrets::new(&[SECRET.into()]).unwrap(),
        currency: domain::money::Currency::parse("EUR").unwrap(),
        page: None,
    }
}

async fn harness() -> ApiHarness {
    ApiHarness::with_payments(payments()).await
}

fn event(id: &str, amount: i64) -> String {
    let intent = json!({
        "id": "pi_1", "object": "payment_intent", "amount": amount, "currency": "eur", "status": "succeeded",
        "shipping": { "name": "Ann Example" },
    });
    let event = json!({
        "id": id, "object": "event", "created": 1_700_000_000, "pending_webhooks": 1, "type": "payment_intent.succeeded",
        "data": { "object": intent },
    });
    event.to_string()
}

fn signed(scheme: &str, seconds_ago: i64, body: &str) -> String {
    let at = Utc::now().timestamp() - seconds_ago;
    let mut mac = Hmac::<Sha256>::new_from_slice(SECRET.as_bytes()).unwrap();
    mac.update(format!("{at}.{body}").as_bytes());
    format!("t={at},{scheme}={}", hex::encode(mac.finalize().into_bytes()))
}

async fn send(api: &ApiHarness, request: Request<Body>) -> TestResponse {
    let response = payment_webhook::router(api.app.clone()).oneshot(request).await.unwrap();
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    TestResponse { status, headers, body: serde_json::from_slice(&bytes).unwrap_or(Value::Null) }
}

fn request(signatures: &[&str], body: &str) -> Request<Body> {
    let mut request = Request::post(PATH).header("content-type", "application/json; charset=utf-8");
    for signature in signatures {
        request = request.header("stripe-signature", *signature);
    }
    request.body(Body::from(body.to_owned())).unwrap()
}

async fn deliver(api: &ApiHarness, body: &str) -> TestResponse {
    send(api, request(&[&signed("v1", 0, body)], body)).await
}

/// Status, code and message on one line, and the reason.
fn refusal(answer: &TestResponse) -> String {
    assert_eq!(answer.body["details"]["service"], "webhook", "{}", answer.body);
    let reason = answer.body["details"]["reason"].as_str().map(|reason| format!(" [{reason}]")).unwrap_or_default();
    let text = |name: &str| answer.body[name].as_str().unwrap_or("-").to_owned();
    without_ids(&format!("{} {}{reason}: {}", answer.status, text("code"), text("message")))
}

/// The metrics of webhooks that are not 0.
fn metrics() -> BTreeMap<String, u64> {
    let registry = Registry::new();
    COUNTERS.register(&registry).unwrap();
    let text = TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(' '));
    lines.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).filter(|(_, value)| *value > 0).collect()
}

async fn stored(api: &ApiHarness) -> Vec<Value> {
    api.get(EVENTS).admin().send().await.is(200)["items"].as_array().unwrap().clone()
}

#[tokio::test]
async fn concurrent_duplicate_webhooks_are_stored_once_and_sealed() {
    let api = harness().await;
    let body = event("evt_1", 5_000);
    let answers = futures::future::join_all((0..100).map(|_| deliver(&api, &body))).await;
    for answer in answers {
        assert_eq!(answer.is(200), &json!({ "received": true }));
    }
    // Redelivered later: the same event with another count of pending webhooks.
    let repeated = body.replace("\"pending_webhooks\":1", "\"pending_webhooks\": 4");
    assert_ne!(repeated, body);
    deliver(&api, &repeated).await.is(200);
    let events = stored(&api).await;
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!(metrics(), [("webhook_events_received_total".to_owned(), 101)].into());

    let entity = EntityRef { kind: EntityKind::ProcessorEvent, id: id_of_event("evt_1") };
    let row = api.app.reads.entity(entity).await.unwrap().unwrap();
    assert!(!row.body.contains("Ann Example"), "{}", row.body);
    let stored: ProcessorEvent = serde_json::from_str(&row.body).unwrap();
    let opened = body_of(&api.app.trust.at_rest, &stored).unwrap().unwrap();
    assert_eq!(opened.expose_secret(), body.as_bytes());
    let view = &events[0];
    assert_eq!((view["event_id"].as_str(), view["object_id"].as_str()), (Some("evt_1"), Some("pi_1")));
    assert_eq!(
        (view["state"].as_str(), view["event_type"].as_str()),
        (Some("received"), Some("payment_intent.succeeded"))
    );
}

#[tokio::test]
async fn webhook_of_another_sender_is_refused_with_its_remedy_and_not_stored() {
    let api = harness().await;
    let body = event("evt_1", 5_000);
    let good = signed("v1", 0, &body);
    let long = TOLERANCE.num_seconds() + 2;
    let mut refusals = String::new();
    for (name, signatures, body) in [
        ("without a signature", vec![], body.clone()),
        ("with two headers", vec![good.clone(), good.clone()], body.clone()),
        ("no header of its form", vec!["signed by me".to_owned()], body.clone()),
        ("v0 alone", vec![signed("v0", 0, &body)], body.clone()),
        ("another body", vec![good.clone()], event("evt_1", 5_001)),
        ("re-serialised on the way", vec![good.clone()], body.replace(':', ": ")),
        ("too old", vec![signed("v1", long, &body)], body.clone()),
        ("too new", vec![signed("v1", -long, &body)], body.clone()),
        (
            "old, and its time was replaced",
            vec![signed("v1", long, &body).replacen(
                &(Utc::now().timestamp() - long).to_string(),
                &Utc::now().timestamp().to_string(),
                1,
            )],
            body.clone(),
        ),
    ] {
        let signatures: Vec<_> = signatures.iter().map(String::as_str).collect();
        writeln!(refusals, "{name}: {}", refusal(&send(&api, request(&signatures, &body)).await)).unwrap();
    }
    insta::assert_snapshot!(refusals);
    assert_eq!(stored(&api).await, Vec::<Value>::new());
    let expected = [("webhook_events_received_total", 9), ("webhook_signature_failures_total", 9)];
    assert_eq!(metrics(), expected.map(|(name, count)| (name.to_owned(), count)).into());
}

#[tokio::test]
async fn signed_webhook_without_an_event_is_counted_separately() {
    let api = harness().await;
    let first = event("evt_1", 5_000);
    deliver(&api, &first).await.is(200);
    let mut refusals = String::new();
    for (name, body) in [
        ("nothing", String::new()),
        ("no JSON", "id=evt_1".to_owned()),
        ("no event", json!({ "id": "pi_1", "amount": 5_000 }).to_string()),
        (
            "an event of API v2",
            json!({ "id": "evt_9", "object": "v2.core.event", "type": "a.b", "data": { "object": {} } }).to_string(),
        ),
        ("an id that is none", first.replace("evt_1", "evt 1")),
        ("another under a known id", event("evt_1", 5_001)),
        ("too large", format!("{}{}", first, " ".repeat(256 * 1024))),
    ] {
        writeln!(refusals, "{name}: {}", refusal(&deliver(&api, &body).await)).unwrap();
    }
    insta::assert_snapshot!(refusals);
    assert_eq!(stored(&api).await.len(), 1);
    let expected = [("webhook_events_received_total", 8), ("webhook_invalid_payload_total", 7)];
    assert_eq!(metrics(), expected.map(|(name, count)| (name.to_owned(), count)).into());
}

#[tokio::test]
async fn webhook_that_cannot_be_stored_is_answered_for_a_retry() {
    let api = ApiHarness::with_own_postgres(Some(payments())).await;
    deliver(&api, &event("evt_1", 5_000)).await.is(200);
    api.kill_postgres().await;
    let answer = deliver(&api, &event("evt_2", 5_000)).await;
    assert!(answer.headers.contains_key("retry-after"), "{:?}", answer.headers);
    assert_eq!((answer.status, answer.body["code"].as_str()), (503, Some("service_unavailable")), "{}", answer.body);
    assert_eq!(metrics()["webhook_persist_failures_total"], 1);
}

#[tokio::test]
async fn slow_webhook_bodies_do_not_block_the_processor() {
    let api = harness().await;
    let router = payment_webhook::router(api.app.clone());
    for n in 0..300_u16 {
        let address = [192, 0, 2 + u8::try_from(n / 50).unwrap(), u8::try_from(n % 50).unwrap()];
        let peer = crate::tls::Peer::new((address, 4711).into(), None, false);
        let stuck = Request::post(PATH).extension(axum::extract::ConnectInfo(peer));
        let stuck = stuck.body(Body::from_stream(futures::stream::pending::<Result<Vec<u8>, std::io::Error>>()));
        let receiving = router.clone().oneshot(stuck.unwrap());
        tokio::spawn(receiving);
        tokio::task::yield_now().await;
    }
    let body = event("evt_1", 5_000);
    let delivered = router.oneshot(request(&[&signed("v1", 0, &body)], &body)).await.unwrap();
    assert_eq!(delivered.status(), 200);
}

#[tokio::test]
async fn webhook_listener_has_one_route_and_refuses_others_with_the_envelope() {
    let api = harness().await;
    let of = |method: Method, path: &str| Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
    for (method, path, expected) in [
        (Method::GET, PATH, (405, "method_not_allowed")),
        (Method::POST, "/webhooks/payments/", (404, "not_found")),
        (Method::GET, "/metrics", (404, "not_found")),
        (Method::GET, "/api/v1/billing/balance", (404, "not_found")),
    ] {
        let answer = send(&api, of(method, path)).await;
        assert_eq!((answer.status, answer.body["code"].as_str()), (expected.0, Some(expected.1)), "{path}");
        assert_eq!(answer.body["details"]["service"], "webhook");
    }
    let without = ApiHarness::new().await;
    assert_eq!(deliver(&without, &event("evt_1", 1)).await.status, 503);
}

#[tokio::test]
async fn operator_retries_or_dismisses_dead_webhook_events() {
    let api = harness().await;
    api.set_policy(PolicyKey::BillingWebhookMaxAttempts, 1);
    for id in ["evt_1", "evt_2", "evt_3"] {
        deliver(&api, &event(id, 5_000)).await.is(200);
    }
    for id in ["evt_1", "evt_2"] {
        api.ask_as_system::<ProcessorEvent>(id_of_event(id), Fact::Failed { why: "the amount differs".into() }).await;
    }
    let done = Fact::Processed { outcome: ProcessingOutcome::NotOurs };
    api.ask_as_system::<ProcessorEvent>(id_of_event("evt_3"), done).await;
    let page = |query: &str| format!("{EVENTS}?{query}");
    let ids = |answer: &TestResponse| {
        let items = answer.is(200)["items"].as_array().unwrap().clone();
        items.iter().map(|item| item["event_id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let dead = api.get(&page("state=dead")).admin().send().await;
    assert_eq!(ids(&dead), ["evt_1", "evt_2"]);
    assert_eq!(dead.body["items"][0]["overdue"], true);
    assert_eq!(dead.body["items"][0]["last_error"], "the amount differs");
    assert_eq!(ids(&api.get(&page("event_id=evt_3")).admin().send().await), ["evt_3"]);
    assert!(ids(&api.get(&page("event_id=evt_3&state=dead")).admin().send().await).is_empty());
    assert!(ids(&api.get(&page("event_id=evt_9")).admin().send().await).is_empty());

    let path = |id: &str, action: &str| format!("{EVENTS}/{}{action}", id_of_event(id));
    let why = json!({ "reason": "the currency of the account was put right" });
    api.post(&path("evt_1", "/retry")).admin().json(&why).send().await.refused(403, "forbidden");
    api.get(&path("evt_1", "")).user("ann").send().await.refused(403, "forbidden");
    api.bind("biller", "billing_operations").await;
    let biller = || api.token("biller", &["user"]);
    let once = |path: String, key: &str| api.post(&path).by(&biller()).key(key).json(&why);
    let retried = once(path("evt_1", "/retry"), "k1").send().await;
    assert_eq!((retried.is(200)["state"].as_str(), retried.body["attempts"].as_u64()), (Some("retrying"), Some(0)));
    assert!(once(path("evt_1", "/retry"), "k1").send().await.is_replayed());
    let dismissed = once(path("evt_2", "/dismiss"), "k2").send().await;
    assert_eq!(dismissed.is(200)["dismissed_because"], why["reason"]);
    once(path("evt_2", "/retry"), "k3").send().await.refused(409, "state_conflict");
    once(path("evt_3", "/dismiss"), "k4").send().await.refused(409, "state_conflict");
    once(path("evt_9", "/dismiss"), "k5").send().await.refused(404, "not_found");
    let log = api.get("/api/v1/admin/audit-log?target_kind=processor_event").admin().send().await;
    let actions: Vec<_> = log.is(200)["items"].as_array().unwrap().iter().map(|row| row["action"].clone()).collect();
    assert_eq!(actions, ["processor_events.dismiss", "processor_events.retry"]);
}
