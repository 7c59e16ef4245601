//! A fake payment processor: it answers with the objects that a test sets, and a test sends signed webhooks in its name. Tests that need
//! a processor with behaviour of its own use [`super::payments`].

use super::builder::TestClusterBuilder;
use super::client::{ApiResponse, send_request};
use super::{CURRENCY, TestCluster, WAIT_TIMEOUT};
use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use chrono::Utc;
use domain::billing_account::Holder;
use domain::money::Currency;
use domain::payment::{self, Fact, Payment};
use domain::policy::PolicyBook;
use domain::state_machine::TraceContext;
use domain::{BillingAccountId, EntityKind, Machine as _, PaymentId, Principal, TransitionContext};
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde_json::{Value, json};
use sha2::Sha256;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use uuid::Uuid;

/// The secret that signs its webhooks.
pub const SECRET: &str = "whsec_of_the_desk_0123456789";

/// The lists that it serves.
const LISTS: [&str; 5] = ["/v1/charges", "/v1/refunds", "/v1/disputes", "/v1/payment_intents", "/v1/checkout/sessions"];

type Shown = Arc<Mutex<BTreeMap<String, Value>>>;

/// A running fake processor. It ends with the test.
pub struct FakeProcessor {
    address: SocketAddr,
    shown: Shown,
}

impl FakeProcessor {
    pub async fn start() -> Self {
        let shown = Shown::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("there is a port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let router = Router::new().fallback(show).with_state(Arc::clone(&shown));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { address, shown }
    }

    /// Configures the cluster to use this processor.
    pub fn configure(&self, builder: TestClusterBuilder) -> TestClusterBuilder {
        builder
            .variable("SVC_PAYMENTS_SECRET_KEY", "sk_of_the_desk_0123456789")
            .variable("SVC_PAYMENTS_WEBHOOK_SECRETS", SECRET)
            .variable("SVC_PAYMENTS_API_BASE", &format!("http://{}", self.address))
            .variable("SVC_PAYMENTS_CURRENCY", CURRENCY)
    }

    /// Sets the response to a GET of this path. Every other object does not exist, and every other list is empty.
    pub fn set_object(&self, path: &str, object: Value) {
        self.shown.lock().unwrap().insert(path.to_owned(), object);
    }

    /// Sets a payment intent.
    pub fn set_intent(&self, intent: &Value) {
        self.set_object(
            &format!("/v1/payment_intents/{}", intent["id"].as_str().expect("an intent has an id")),
            intent.clone(),
        );
    }
}

async fn show(State(shown): State<Shown>, request: Request) -> Response {
    let path = request.uri().path();
    let object = shown.lock().unwrap().get(path).cloned();
    match object {
        Some(object) => axum::Json(object).into_response(),
        None if LISTS.contains(&path) => {
            axum::Json(json!({ "object": "list", "data": [], "has_more": false })).into_response()
        }
        None => {
            let error = json!({ "error": { "code": "resource_missing", "message": "No such object." } });
            (StatusCode::NOT_FOUND, axum::Json(error)).into_response()
        }
    }
}

/// An event in Stripe's format.
#[must_use]
pub fn event(id: &str, event_type: &str, object: &Value) -> String {
    let event = json!({
        "id": id, "object": "event", "api_version": "2024-06-20", "created": Utc::now().timestamp(), "livemode": false,
        "pending_webhooks": 1, "request": { "id": null, "idempotency_key": null }, "type": event_type,
        "data": { "object": object },
    });
    serde_json::to_string_pretty(&event).expect("it is JSON")
}

/// A payment intent of `amount` minor units for this payment.
#[must_use]
pub fn intent(id: &str, of: PaymentId, amount: i64, status: &str) -> Value {
    json!({
        "id": id, "object": "payment_intent", "amount": amount, "amount_received": amount, "currency": CURRENCY.to_lowercase(),
        "status": status, "latest_charge": format!("ch_{id}"), "metadata": { "payment_id": of.0.to_string() },
    })
}

/// The signature header of a body, of this age and scheme.
#[must_use]
pub fn signature(scheme: &str, seconds_ago: i64, body: &str) -> String {
    signature_under(SECRET, scheme, seconds_ago, body)
}

/// As [`signature`], under another secret.
#[must_use]
pub fn signature_under(secret: &str, scheme: &str, seconds_ago: i64, body: &str) -> String {
    let at = Utc::now().timestamp() - seconds_ago;
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).expect("a key of any length will do");
    mac.update(format!("{at}.{body}").as_bytes());
    format!("t={at},{scheme}={}", hex::encode(mac.finalize().into_bytes()))
}

impl TestCluster {
    /// Sends a signed event to a replica, as the processor does.
    pub async fn deliver(&self, replica: usize, body: &str) -> ApiResponse {
        self.try_deliver(replica, &signature("v1", 0, body), body).await.expect("there is an answer")
    }

    /// Sends an event with any signature.
    ///
    /// # Errors
    /// If no complete response is received.
    pub async fn try_deliver(
        &self,
        replica: usize,
        signature: &str,
        body: &str,
    ) -> Result<ApiResponse, reqwest::Error> {
        let request = self.admin.http().post(self.replicas[replica].webhook_url());
        let request = request.header("content-type", "application/json; charset=utf-8");
        send_request(request.header("stripe-signature", signature).body(body.to_owned())).await
    }

    /// Resends an event until it is accepted, as the processor does.
    pub async fn deliver_until_accepted(&self, replica: usize, body: &str) {
        let until = std::time::Instant::now() + WAIT_TIMEOUT;
        loop {
            let answer = self.try_deliver(replica, &signature("v1", 0, body), body).await;
            if answer.as_ref().is_ok_and(|answer| answer.status.is_success()) {
                return;
            }
            assert!(std::time::Instant::now() < until, "it is never taken: {answer:?}");
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }

    /// Inserts an open payment of the user with this id at the processor, as if it had just been started.
    pub async fn insert_open_payment(&self, username: &str, amount_minor: i64, processor_id: &str) -> PaymentId {
        let user_id = self.identity.person(username).expect("the person can log in").id.to_string();
        let id = Uuid::now_v7();
        let create = payment::Request::Create {
            account_id: BillingAccountId(Uuid::nil()),
            holder: Holder::User(user_id.as_str().into()),
            payer: user_id.into(),
            amount_minor,
            currency: Currency::parse(CURRENCY).expect("it is one"),
            success_url: "https://shop.example/done".to_owned(),
            cancel_url: "https://shop.example/back".to_owned(),
        };
        let (policy, by) = (PolicyBook::default(), Principal::system("a test"));
        let ctx = TransitionContext {
            now: Utc::now(),
            policy: &policy,
            by: &by,
            correlation_id: "a-test",
            trace: TraceContext::default(),
            seed: 1,
            id,
            version: 0,
        };
        let created = Payment::decide(None, create.into(), &ctx).expect("it can be created").next.expect("it is");
        let opened = Fact::Opened { processor_id: processor_id.to_owned() };
        let open = Payment::decide(Some(&created), opened.into(), &ctx).expect("it can be opened").next.expect("it is");
        // In one transaction, as a commit does it: an invariant check in between would find a payment without a deadline.
        let mut at_once = self.pool.begin().await.expect("the database answers");
        sqlx::query(
            "INSERT INTO entity (id, kind, shard, version, state, body, owner, created_at, updated_at)
             VALUES ($1, $2, $3, 1, 'open', $4, $5, now(), now())",
        )
        .bind(id)
        .bind(EntityKind::Payment.as_str())
        .bind(i16::from(actors::sharding::shard_of(id).0))
        .bind(serde_json::to_value(&open).expect("it is JSON"))
        .bind(open.holder.to_string())
        .execute(&mut *at_once)
        .await
        .expect("the database takes it");
        let deadline = open.deadline().expect("its payer has an end of time to pay");
        sqlx::query(
            "INSERT INTO deadline (entity, kind, shard, wake_at, deadline_at, reason) VALUES ($1, $2, $3, $4, $4, $5)",
        )
        .bind(id)
        .bind(EntityKind::Payment.as_str())
        .bind(i16::from(actors::sharding::shard_of(id).0))
        .bind(deadline.at)
        .bind(deadline.reason)
        .execute(&mut *at_once)
        .await
        .expect("the database takes its end");
        sqlx::query("INSERT INTO entity_count (kind, state, change) VALUES ('payment', 'open', 1)")
            .execute(&mut *at_once)
            .await
            .expect("the database counts it");
        at_once.commit().await.expect("the database takes it");
        self.seal(id).await;
        PaymentId(id)
    }
}
