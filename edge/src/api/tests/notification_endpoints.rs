//! Notification endpoints over HTTP: holders, events, secrets and limits.

use super::harness::{ApiHarness, PlacementOutcome};
use axum::http::Method;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use domain::billing_account::Holder;
use domain::notification_endpoint::{DeliveryFailure, Fact, NotificationEndpoint, QueuedNotification};
use domain::policy::PolicyKey;
use serde_json::{Value, json};
use uuid::Uuid;

const ENDPOINTS: &str = "/api/v1/notification-endpoints";
const URL: &str = "https://receiver.example/hooks";

fn webhook() -> Value {
    json!({ "kind": "webhook", "url": URL })
}

fn path(endpoint: &Value) -> String {
    format!("{ENDPOINTS}/{}", endpoint["id"].as_str().unwrap())
}

impl ApiHarness {
    async fn webhook_of(&self, user: &str) -> Value {
        self.post(ENDPOINTS).user(user).json(&webhook()).send().await.is(201).clone()
    }

    /// A dead letter.
    async fn dead_letter(&self, endpoint: &Value, n: u128) -> Uuid {
        let id: Uuid = endpoint["id"].as_str().unwrap().parse().unwrap();
        let message_id = Uuid::from_u128(n);
        let message = QueuedNotification { id: message_id, event: "billing.balance_low".into(), body: "{}".into() };
        self.ask_as_system::<NotificationEndpoint>(id, Fact::NotificationDue { message }).await;
        let failure = DeliveryFailure {
            why: "it answered 500".into(),
            is_final: true,
            is_gone: false,
            retry_after_seconds: None,
        };
        self.ask_as_system::<NotificationEndpoint>(id, Fact::Failed { message_id, failure }).await;
        message_id
    }
}

#[tokio::test]
async fn webhook_is_created_once_and_its_secret_is_shown_to_its_holder_alone() {
    let api = ApiHarness::new().await;
    let create = || api.post(ENDPOINTS).user("ann").key("k").json(&webhook());
    let made = create().send().await;
    assert_eq!((&made.is(201)["url"], &made.body["state"]), (&json!(URL), &json!("active")));
    assert_eq!((&made.body["events"], &made.body["user_id"]), (&Value::Null, &json!("ann")));
    let repeated = create().send().await;
    assert_eq!((repeated.is(201), repeated.is_replayed()), (&made.body, true));
    let of_secret = format!("{}/secret", path(&made.body));
    let shown = api.get(&of_secret).user("ann").send().await;
    let secret = shown.is(200)["secret"].as_str().unwrap().to_owned();
    assert_eq!(STANDARD.decode(secret.strip_prefix("whsec_").unwrap()).unwrap().len(), 32);
    assert_eq!(shown.headers["cache-control"], "no-store");
    api.get(&of_secret).user("bob").send().await.refused(404, "not_found");
    api.get(&of_secret).admin().send().await.refused(404, "not_found");
    api.post(&of_secret).admin().send().await.refused(404, "not_found");
    let rotated = api.post(&of_secret).user("ann").send().await;
    assert_ne!(rotated.is(201)["secret"], json!(secret));
    assert_eq!(api.get(&of_secret).user("ann").send().await.is(200), &rotated.body);
    assert!(!api.database_dump().contains(secret.strip_prefix("whsec_").unwrap()), "it is sealed");
}

#[tokio::test]
async fn endpoint_is_changed_disabled_and_deleted_by_its_holder_and_by_administrators() {
    let api = ApiHarness::new().await;
    let made = api.webhook_of("ann").await;
    let change = |body: Value| api.call(Method::PATCH, &path(&made)).json(&body);
    change(json!({ "enabled": false })).user("bob").send().await.refused(404, "not_found");
    let off = change(json!({ "enabled": false, "events": ["billing.balance_low"] })).user("ann").send().await;
    assert_eq!((&off.is(200)["state"], &off.body["disabled_because"]), (&json!("disabled"), &json!("by_owner")));
    assert_eq!(off.body["events"], json!(["billing.balance_low"]));
    api.post(&format!("{}/test", path(&made))).user("ann").send().await.refused(409, "state_conflict");
    let on = change(json!({ "enabled": true, "events": null })).admin().send().await;
    assert_eq!((&on.is(200)["state"], &on.body["events"]), (&json!("active"), &Value::Null));
    change(json!({})).user("ann").send().await.refused(400, "invalid_request");
    let tested = api.post(&format!("{}/test", path(&made))).user("ann").send().await;
    assert_eq!(tested.is(202)["waiting"], 1);
    assert_eq!(api.call(Method::DELETE, &path(&made)).user("ann").send().await.status, 204);
    api.get(&path(&made)).user("ann").send().await.refused(404, "not_found");
    assert_eq!(api.get(ENDPOINTS).user("ann").send().await.is(200)["items"], json!([]));
}

#[tokio::test]
async fn endpoint_of_an_organization_belongs_to_its_members() {
    let api = ApiHarness::new().await;
    let (ann, bob, carl) = (api.token_of("ann", "acme"), api.token_of("bob", "acme"), api.token_of("carl", "other"));
    let body = json!({ "kind": "webhook", "url": URL, "holder": "org" });
    let made = api.post(ENDPOINTS).by(&ann).json(&body).send().await.is(201).clone();
    assert_eq!((&made["user_id"], &made["org_id"]), (&Value::Null, &json!("acme")));
    let of_org = format!("{ENDPOINTS}?holder=org");
    for (token, count) in [(&bob, 1), (&carl, 0)] {
        let seen = api.get(&of_org).by(token).send().await;
        assert_eq!(seen.is(200)["items"].as_array().unwrap().len(), count);
    }
    assert_eq!(api.get(ENDPOINTS).by(&ann).send().await.is(200)["items"], json!([]), "it is not her own");
    api.call(Method::DELETE, &path(&made)).by(&carl).send().await.refused(404, "not_found");
    assert_eq!(api.call(Method::DELETE, &path(&made)).by(&bob).send().await.status, 204);
}

#[tokio::test]
async fn invalid_receiver_or_event_is_refused_by_field_name() {
    let api = ApiHarness::new().await;
    for (body, field) in [
        (json!({ "kind": "webhook" }), "url"),
        (json!({ "kind": "webhook", "url": "http://receiver.example/" }), "url"),
        (json!({ "kind": "webhook", "url": "https://127.0.0.1/" }), "url"),
        (json!({ "kind": "webhook", "url": "https://[::ffff:10.0.0.1]/" }), "url"),
        (json!({ "kind": "webhook", "url": "https://169.254.169.254/" }), "url"),
        (json!({ "kind": "webhook", "url": "https://ann:pw@receiver.example/" }), "url"),
        (json!({ "kind": "webhook", "url": URL, "events": ["billing.balance"] }), "events[0]"),
        (json!({ "kind": "webhook", "url": URL, "events": ["notification.announced"] }), "events[0]"),
        (json!({ "kind": "email", "url": URL }), "url"),
        (json!({ "kind": "pager", "url": URL }), "kind"),
    ] {
        let refused = api.post(ENDPOINTS).user("ann").json(&body).send().await;
        assert_eq!(refused.refused(400, "invalid_request")["field"], field, "{body}: {}", refused.body);
    }
    let mail = api.post(ENDPOINTS).user("ann").json(&json!({ "kind": "email" })).send().await;
    mail.refused(409, "state_conflict");
}

#[tokio::test]
async fn concurrent_creations_stay_within_the_limit() {
    let api = ApiHarness::new().await;
    api.set_policy(PolicyKey::NotificationEndpoints, 2);
    let make = || api.post(ENDPOINTS).user("ann").json(&webhook()).send();
    let answers = futures::future::join_all((0..12).map(|_| make())).await;
    let made: Vec<_> = answers.iter().filter(|answer| answer.status == 201).collect();
    assert!((1..=2).contains(&made.len()), "{}", made.len());
    answers.iter().filter(|answer| answer.status != 201).for_each(|answer| {
        answer.refused(409, "state_conflict");
    });
    while api.get(ENDPOINTS).user("ann").send().await.is(200)["items"].as_array().unwrap().len() < 2 {
        make().await.is(201);
    }
    let full = make().await;
    assert_eq!(full.refused(409, "state_conflict")["policy_key"], "notification.endpoints_per_holder");
    api.post(ENDPOINTS).user("bob").json(&webhook()).send().await.is(201);
    assert_eq!(api.call(Method::DELETE, &path(&made[0].body)).user("ann").send().await.status, 204);
    make().await.is(201);
}

#[tokio::test]
async fn dead_letters_are_listed_resent_and_dismissed() {
    let api = ApiHarness::new().await;
    let made = api.webhook_of("ann").await;
    let (one, two) = (api.dead_letter(&made, 1).await, api.dead_letter(&made, 2).await);
    let letters = format!("{}/dead-letters", path(&made));
    let shown = api.get(&letters).user("ann").send().await.is(200).clone();
    assert_eq!(shown["items"][0]["message_id"], one.to_string());
    assert_eq!(shown["items"][1]["last_error"], "it answered 500");
    api.get(&letters).user("bob").send().await.refused(404, "not_found");
    let failing = api.get("/api/v1/admin/notification-endpoints?state=failing").admin().send().await;
    assert_eq!(failing.is(200)["items"][0]["dead_letters"], 2);
    assert!(!failing.body.to_string().contains("whsec_"));
    let resend = |body: Value| api.post(&format!("{letters}/resend")).json(&body);
    let repeated = resend(json!({ "message_id": one, "reason": "it is mended" })).admin().send().await;
    assert_eq!((&repeated.is(200)["dead_letters"], &repeated.body["waiting"]), (&json!(1), &json!(1)));
    resend(json!({ "message_id": one })).user("ann").send().await.refused(404, "not_found");
    resend(json!({ "reason": " " })).user("ann").send().await.refused(400, "invalid_request");
    let given_up = api.post(&format!("{letters}/dismiss")).user("ann").json(&json!({ "message_id": two })).send().await;
    assert_eq!((&given_up.is(200)["dead_letters"], &given_up.body["state"]), (&json!(0), &json!("active")));
}

#[tokio::test]
async fn user_whose_id_looks_like_an_organization_sees_nothing_of_it() {
    let api = ApiHarness::new().await;
    let ann = api.token_of("ann", "acme");
    let body = json!({ "kind": "webhook", "url": URL, "holder": "org" });
    api.post(ENDPOINTS).by(&ann).json(&body).send().await.is(201);
    assert_eq!(Holder::Org("acme".into()).to_string(), "org:acme");
    for user in ["org:acme", "acme", "user:ann"] {
        let seen = api.get(ENDPOINTS).user(user).send().await;
        assert_eq!(seen.is(200)["items"], json!([]), "{user}");
    }
}

#[tokio::test]
async fn default_endpoint_is_made_by_a_rental_and_by_no_read_or_refused_request() {
    let api = ApiHarness::with_mail().await;
    api.sku("h100x4", 4).await;
    api.set_placement(PlacementOutcome::NoCapacity);
    let rent = async |address: &str, sku: &str| {
        let (token, body) = (api.token_with_email("ann", address), json!({ "sku": sku, "gpu_count": 1 }));
        let key = Uuid::new_v4().to_string();
        api.post("/api/v1/allocations").by(&token).key(&key).json(&body).send().await
    };
    let addresses = async |address: &str| {
        let listed = api.get(ENDPOINTS).by(&api.token_with_email("ann", address)).send().await;
        let items = listed.is(200)["items"].as_array().unwrap().clone();
        items.iter().map(|item| item["address"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(addresses("ann@example.com").await, [""; 0]);
    let refused = rent("ann@example.com", "unknown").await;
    assert_eq!(refused.refused(400, "invalid_request")["field"], "sku");
    assert_eq!(addresses("ann@example.com").await, [""; 0]);
    // An allocation that fails at once is one: its user gets the mail.
    rent("ann@example.com", "h100x4").await.refused(409, "insufficient_capacity");
    assert_eq!(addresses("ann@example.com").await, ["ann@example.com"]);
    // The address follows the token of the next rental, and no token of a read.
    assert_eq!(addresses("ann@example.org").await, ["ann@example.com"]);
    rent("ann@example.org", "h100x4").await.refused(409, "insufficient_capacity");
    assert_eq!(addresses("ann@example.net").await, ["ann@example.org"]);
}

#[tokio::test]
async fn user_with_an_email_endpoint_gets_no_default_one() {
    let api = ApiHarness::with_mail().await;
    api.sku("h100x4", 4).await;
    api.set_placement(PlacementOutcome::NoCapacity);
    let token = api.token_with_email("ann", "ann@example.com");
    let made = api.post(ENDPOINTS).by(&token).json(&json!({ "kind": "email" })).send().await.is(201).clone();
    let body = json!({ "sku": "h100x4", "gpu_count": 1 });
    api.post("/api/v1/allocations").by(&token).key("k").json(&body).send().await.refused(409, "insufficient_capacity");
    let listed = api.get(ENDPOINTS).by(&token).send().await.is(200)["items"].clone();
    assert_eq!(listed.as_array().unwrap().iter().map(|it| &it["id"]).collect::<Vec<_>>(), [&made["id"]]);
}
