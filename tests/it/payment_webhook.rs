//! Webhooks of the payment processor, real and forged: authenticated, stored once, and processed once, whatever crashes meanwhile.

use nix::sys::signal::Signal;
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::db_lock::StatementFate;
use tests::cluster::fake_processor::{FakeProcessor, event, intent, signature};
use tests::cluster::{CREDIT, TestCluster, WAIT_TIMEOUT};

const BALANCE: &str = "/api/v1/billing/balance";
const EVENTS: &str = "/api/v1/admin/billing/processor-events";

/// The processor event of this id, once it is in this state.
async fn wait_for_event(cluster: &TestCluster, event_id: &str, state: &str) -> Value {
    let path = format!("{EVENTS}?event_id={event_id}");
    let wanted = |page: &Value| page["items"][0]["state"] == state;
    cluster.admin.wait_until(&path, &format!("{event_id} is {state}"), wanted).await["items"][0].clone()
}

async fn expect_balance(cluster: &TestCluster, minor: i64) {
    let wanted = |balance: &Value| balance["balance_minor"] == minor;
    cluster.user.wait_until(BALANCE, &format!("the balance is {minor}"), wanted).await;
}

/// The postings of the account: kind and amount.
async fn postings(cluster: &TestCluster) -> Vec<(String, i64)> {
    let page = cluster.user.get("/api/v1/billing/ledger?limit=200").await.ok();
    let posting =
        |it: &Value| (it["kind"].as_str().unwrap().to_owned(), it["change_micro"].as_i64().unwrap() / 1_000_000);
    let mut all: Vec<_> = page["items"].as_array().unwrap().iter().map(posting).collect();
    all.reverse();
    // The first is the initial credit.
    all.split_off(1)
}

/// Waits until the sum of a metric is this: what is committed is counted a moment later.
async fn expect_metric_total(cluster: &TestCluster, name: &str, expected: u32) {
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let counted = cluster.metric_total(name, &[]).await;
        if counted >= f64::from(expected) || Instant::now() > until {
            assert_eq!(counted, f64::from(expected), "{name}");
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn payment_event_sent_a_hundred_times_to_two_replicas_is_deposited_once() {
    let fake_processor = FakeProcessor::start().await;
    let cluster = fake_processor.configure(TestCluster::builder().replicas(2)).start().await;
    let payment = cluster.insert_open_payment("user", 5_000, "pi_1").await;
    let paid = event("evt_1", "payment_intent.succeeded", &intent("pi_1", payment, 5_000, "succeeded"));
    let deliveries = (0..100).map(|turn| cluster.deliver(turn % 2, &paid));
    for answer in futures::future::join_all(deliveries).await {
        assert_eq!(answer.ok(), json!({ "received": true }));
    }
    expect_balance(&cluster, CREDIT + 5_000).await;
    let event = wait_for_event(&cluster, "evt_1", "processed").await;
    assert_eq!((event["outcome"].as_str(), event["object_id"].as_str()), (Some("told"), Some("pi_1")));
    assert_eq!(postings(&cluster).await, [("deposit".to_owned(), 5_000)]);
    for (name, expected) in [
        ("webhook_events_received_total", 100),
        ("webhook_processed_success_total", 1),
        ("webhook_signature_failures_total", 0),
        ("webhook_invalid_payload_total", 0),
        ("webhook_persist_failures_total", 0),
        ("webhook_processing_failures_total", 0),
        ("payments_reconcile_failed_total", 0),
    ] {
        expect_metric_total(&cluster, name, expected).await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn event_that_the_processor_did_not_sign_is_refused_and_not_stored() {
    let fake_processor = FakeProcessor::start().await;
    let cluster = fake_processor.configure(TestCluster::builder()).start().await;
    let payment = cluster.insert_open_payment("user", 5_000, "pi_1").await;
    let paid = event("evt_1", "payment_intent.succeeded", &intent("pi_1", payment, 5_000, "succeeded"));
    let compact = serde_json::from_str::<Value>(&paid).unwrap().to_string();
    let good = signature("v1", 0, &paid);
    for (what, signature, body, reason) in [
        ("wrong", good.replace("v1=", "v1=00"), &paid, "signature_wrong"),
        ("of another body", good.clone(), &paid.replace("5000", "9000"), "signature_wrong"),
        ("re-serialised on the way", good.clone(), &compact, "signature_wrong"),
        ("v0 alone", signature("v0", 0, &paid), &paid, "signature_scheme"),
        ("old", signature("v1", 301, &paid), &paid, "signature_too_old"),
        // Ahead by far more than the tolerance of 300 s: time passes until it is sent.
        ("ahead", signature("v1", -900, &paid), &paid, "signature_too_new"),
        ("none", String::new(), &paid, "signature_unreadable"),
    ] {
        let answer = cluster.try_deliver(0, &signature, body).await.unwrap();
        let details = &answer.expect_error(400, "invalid_request").body["details"];
        assert_eq!(
            (details["reason"].as_str(), details["service"].as_str()),
            (Some(reason), Some("webhook")),
            "{what}"
        );
    }
    assert_eq!(cluster.admin.get(EVENTS).await.ok()["items"], json!([]));
    expect_metric_total(&cluster, "webhook_signature_failures_total", 7).await;
    expect_balance(&cluster, CREDIT).await;
    // The same event with a valid signature.
    cluster.deliver(0, &paid).await.ok();
    expect_balance(&cluster, CREDIT + 5_000).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_in_any_order_have_the_same_result() {
    let fake_processor = FakeProcessor::start().await;
    let cluster = fake_processor.configure(TestCluster::builder()).start().await;
    let payment = cluster.insert_open_payment("user", 5_000, "pi_1").await;
    let (open, paid) =
        (intent("pi_1", payment, 5_000, "requires_payment_method"), intent("pi_1", payment, 5_000, "succeeded"));
    fake_processor.set_intent(&paid);
    let refund = |status: &str| {
        json!({
            "id": "re_1", "object": "refund", "amount": 2_000, "currency": "usd", "status": status, "payment_intent": "pi_1",
            "charge": "ch_pi_1", "metadata": {},
        })
    };
    let dispute = |status: &str| {
        json!({
            "id": "dp_1", "object": "dispute", "amount": 3_000, "currency": "usd", "status": status, "payment_intent": "pi_1",
            "charge": "ch_pi_1",
        })
    };
    // In reverse order: the refund and the dispute before the charge, the last event of each before the first.
    for (id, event_type, object) in [
        ("evt_6", "charge.dispute.closed", dispute("won")),
        ("evt_5", "charge.dispute.created", dispute("needs_response")),
        ("evt_4", "refund.updated", refund("succeeded")),
        ("evt_3", "refund.created", refund("pending")),
        ("evt_2", "payment_intent.succeeded", paid.clone()),
        ("evt_1", "payment_intent.payment_failed", open),
    ] {
        cluster.deliver(0, &event(id, event_type, &object)).await.ok();
        assert_eq!(wait_for_event(&cluster, id, "processed").await["outcome"], "told", "{event_type}");
    }
    expect_balance(&cluster, CREDIT + 3_000).await;
    let list = json!({ "object": "list", "has_more": false, "data": [refund("succeeded")] });
    fake_processor.set_object("/v1/refunds", list);
    // A charge without its refunds: they are looked up, and were known.
    let charge = json!({ "id": "ch_pi_1", "object": "charge", "amount_refunded": 2_000, "payment_intent": "pi_1" });
    cluster.deliver(0, &event("evt_7", "charge.refunded", &charge)).await.ok();
    wait_for_event(&cluster, "evt_7", "processed").await;
    expect_balance(&cluster, CREDIT + 3_000).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn event_of_a_foreign_payment_is_ignored_and_counted() {
    let fake_processor = FakeProcessor::start().await;
    let cluster = fake_processor.configure(TestCluster::builder()).start().await;
    let mut foreign = intent("pi_9", domain::PaymentId(uuid::Uuid::now_v7()), 5_000, "succeeded");
    foreign["metadata"] = json!({});
    let theirs = json!({
        "id": "re_9", "object": "refund", "amount": 1, "currency": "usd", "status": "succeeded", "payment_intent": "pi_9",
        "metadata": {},
    });
    for (id, event_type, object, outcome) in [
        ("evt_1", "payment_intent.succeeded", foreign, "not_ours"),
        ("evt_2", "refund.created", theirs, "not_ours"),
        ("evt_3", "customer.created", json!({ "id": "cus_1", "name": "Ann Example" }), "nothing_to_do"),
    ] {
        cluster.deliver(0, &event(id, event_type, &object)).await.ok();
        assert_eq!(wait_for_event(&cluster, id, "processed").await["outcome"], outcome, "{event_type}");
    }
    expect_metric_total(&cluster, "webhook_not_ours_total", 2).await;
    expect_metric_total(&cluster, "webhook_processed_success_total", 3).await;
    expect_balance(&cluster, CREDIT).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn event_that_contradicts_its_payment_waits_for_an_operator_and_posts_nothing() {
    let fake_processor = FakeProcessor::start().await;
    let cluster =
        fake_processor.configure(TestCluster::builder().policy("billing.webhook_max_attempts", 1)).start().await;
    let payment = cluster.insert_open_payment("user", 5_000, "pi_1").await;
    let paid = intent("pi_1", payment, 5_000, "succeeded");
    let mut other_currency = paid.clone();
    other_currency["currency"] = json!("eur");
    for (id, object) in [("evt_1", other_currency), ("evt_2", intent("pi_1", payment, 4_999, "succeeded"))] {
        cluster.deliver(0, &event(id, "payment_intent.succeeded", &object)).await.ok();
        let dead = wait_for_event(&cluster, id, "dead").await;
        assert_eq!((dead["overdue"].as_bool(), dead["attempts"].as_u64()), (Some(true), Some(1)));
        assert!(dead["last_error"].as_str().unwrap().contains("50.00 "), "{dead}");
    }
    expect_metric_total(&cluster, "webhook_processing_failures_total", 2).await;
    expect_balance(&cluster, CREDIT).await;
    let dead = cluster.admin.get(&format!("{EVENTS}?state=dead")).await.ok();
    let ids: Vec<_> =
        dead["items"].as_array().unwrap().iter().map(|it| it["id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(ids.len(), 2);
    let why = json!({ "reason": "looked at it at the processor" });
    cluster.admin.post(&format!("{EVENTS}/{}/retry", ids[0]), &why).await.ok();
    wait_for_event(&cluster, "evt_1", "dead").await;
    let dismissed = cluster.admin.post(&format!("{EVENTS}/{}/dismiss", ids[1]), &why).await.ok();
    assert_eq!(dismissed["state"], "dismissed");
    let path = format!("/api/v1/billing/payments/{}", payment.0);
    cluster.user.wait_until(&path, "the review ends", |payment: &Value| payment["state"] == "canceled").await;
    // Nor is a payment deposited that is lost in the database: an operator has to find its payer.
    let lost = intent("pi_9", domain::PaymentId(uuid::Uuid::now_v7()), 5_000, "succeeded");
    cluster.deliver(0, &event("evt_4", "payment_intent.succeeded", &lost)).await.ok();
    let dead = wait_for_event(&cluster, "evt_4", "dead").await;
    assert!(dead["last_error"].as_str().unwrap().contains("is not here"), "{dead}");
    // The operator has decided about this money: as it was ordered it is reviewed again, and not credited.
    cluster.deliver(0, &event("evt_3", "payment_intent.succeeded", &paid)).await.ok();
    let dead = wait_for_event(&cluster, "evt_3", "dead").await;
    assert!(dead["last_error"].as_str().unwrap().contains("pi_1"), "{dead}");
    assert_eq!(cluster.user.get(&path).await.ok()["state"], "under_review");
    expect_balance(&cluster, CREDIT).await;
    // The payment of other money is processed as usual.
    let other = cluster.insert_open_payment("user", 5_000, "pi_2").await;
    let paid = intent("pi_2", other, 5_000, "succeeded");
    cluster.deliver(0, &event("evt_5", "payment_intent.succeeded", &paid)).await.ok();
    expect_balance(&cluster, CREDIT + 5_000).await;
    cluster.shutdown().await;
}

/// Stripe's Adaptive Pricing: the payer pays in the currency of their country.
#[tokio::test(flavor = "multi_thread")]
async fn payment_in_another_currency_is_credited_as_ordered_or_under_review_until_an_operator_settles_it() {
    let fake_processor = FakeProcessor::start().await;
    let cluster =
        fake_processor.configure(TestCluster::builder().policy("billing.webhook_max_attempts", 1)).start().await;
    let in_pounds = |id: &str, payment| {
        let mut paid = intent(id, payment, 4_200, "succeeded");
        paid["currency"] = json!("gbp");
        paid
    };
    // Its session explains what was charged: as many events as there may be credit it once.
    let converted = cluster.insert_open_payment("user", 5_000, "cs_1").await;
    let session = json!({
        "id": "cs_1", "object": "checkout.session", "status": "complete", "payment_status": "paid",
        "payment_intent": "pi_1", "amount_total": 4_200, "currency": "gbp", "metadata": { "payment_id": converted.0.to_string() },
        "currency_conversion": {
            "amount_subtotal": 5_000, "amount_total": 5_000, "fx_rate": "0.84",
            "source_currency": tests::cluster::CURRENCY.to_lowercase(),
        },
    });
    let list = json!({ "object": "list", "data": [session], "has_more": false });
    fake_processor.set_object("/v1/checkout/sessions", list);
    cluster.deliver(0, &event("evt_1", "payment_intent.succeeded", &in_pounds("pi_1", converted))).await.ok();
    wait_for_event(&cluster, "evt_1", "processed").await;
    cluster.deliver(0, &event("evt_2", "checkout.session.completed", &session)).await.ok();
    wait_for_event(&cluster, "evt_2", "processed").await;
    expect_balance(&cluster, CREDIT + 5_000).await;
    let shown = cluster.user.get(&format!("/api/v1/billing/payments/{}", converted.0)).await.ok();
    assert_eq!(shown["presented"], json!({ "amount_minor": 4_200, "currency": "GBP" }));

    // No session explains this one.
    let other = cluster.insert_open_payment("user", 5_000, "pi_2").await;
    let path = format!("/api/v1/billing/payments/{}", other.0);
    cluster.deliver(0, &event("evt_3", "payment_intent.succeeded", &in_pounds("pi_2", other))).await.ok();
    let dead = wait_for_event(&cluster, "evt_3", "dead").await;
    let shown = cluster.user.get(&path).await.ok();
    assert_eq!(shown["state"], "under_review", "{shown}");
    let reason = shown["reason"].as_str().unwrap();
    assert!(reason.contains("42.00 GBP") && reason.contains("50.00") && reason.contains("operator"), "{reason}");
    let refused = cluster.user.post(&format!("{path}/cancel"), &json!({})).await;
    assert!(refused.expect_error(409, "state_conflict").body["message"].as_str().unwrap().contains("operator"));
    let why = json!({ "reason": "credited by hand" });
    let event_id = dead["id"].as_str().unwrap();
    cluster.admin.post(&format!("{EVENTS}/{event_id}/retry"), &why).await.ok();
    wait_for_event(&cluster, "evt_3", "dead").await;
    cluster.admin.post(&format!("{EVENTS}/{event_id}/dismiss"), &why).await.ok();
    cluster.user.wait_until(&path, "the review ends", |payment: &Value| payment["state"] == "canceled").await;
    // The processor reports it again: it is decided, and waits for nothing.
    cluster.deliver(0, &event("evt_4", "payment_intent.succeeded", &in_pounds("pi_2", other))).await.ok();
    wait_for_event(&cluster, "evt_4", "processed").await;
    assert_eq!(cluster.user.get(&path).await.ok()["state"], "canceled");
    expect_balance(&cluster, CREDIT + 5_000).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn crash_between_receipt_and_processing_of_an_event_loses_nothing() {
    let fake_processor = FakeProcessor::start().await;
    let mut cluster = fake_processor.configure(TestCluster::builder()).start().await;
    let payment = cluster.insert_open_payment("user", 5_000, "pi_1").await;
    let paid = event("evt_1", "payment_intent.succeeded", &intent("pi_1", payment, 5_000, "succeeded"));
    // The first commit of its processing is that of the payment, which is blocked, so that the crash is in between.
    let lock = cluster.lock_entity(payment.0).await;
    cluster.deliver(0, &paid).await.ok();
    cluster.kill_while_writing(lock, StatementFate::RolledBack).await;
    assert_eq!(cluster.count_transitions("processor_event", "receive").await, 1, "what was answered is stored");
    assert_eq!(cluster.count_transitions("processor_event", "processed").await, 0, "and nothing more");
    cluster.restart_replica(0).await;
    wait_for_event(&cluster, "evt_1", "processed").await;
    expect_balance(&cluster, CREDIT + 5_000).await;
    assert_eq!(postings(&cluster).await, [("deposit".to_owned(), 5_000)]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_outage_makes_the_processor_resend_and_loses_nothing() {
    let fake_processor = FakeProcessor::start().await;
    let cluster = fake_processor.configure(TestCluster::builder().own_postgres()).start().await;
    let payment = cluster.insert_open_payment("user", 5_000, "pi_1").await;
    let paid = event("evt_1", "payment_intent.succeeded", &intent("pi_1", payment, 5_000, "succeeded"));
    cluster.postgres.stop().await;
    let answer = cluster.deliver(0, &paid).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer}");
    assert!(answer.headers.contains_key("retry-after"));
    assert!(cluster.metric_total("webhook_persist_failures_total", &[]).await >= 1.0);
    cluster.postgres.start_again().await;
    cluster.deliver_until_accepted(0, &paid).await;
    expect_balance(&cluster, CREDIT + 5_000).await;
    assert_eq!(postings(&cluster).await, [("deposit".to_owned(), 5_000)]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn webhook_role_runs_in_a_process_of_its_own() {
    let fake_processor = FakeProcessor::start().await;
    let builder = fake_processor.configure(TestCluster::builder().replicas(2)).variable_of(1, "SVC_ROLES", "webhook");
    let cluster = builder.start().await;
    let payment = cluster.insert_open_payment("user", 5_000, "pi_1").await;
    let paid = event("evt_1", "payment_intent.succeeded", &intent("pi_1", payment, 5_000, "succeeded"));
    // Postgres is stopped for a while: the response is sent when the event is stored, and not before.
    cluster.signal_replica(0, Signal::SIGSTOP);
    let began = Instant::now();
    let (answer, ()) = tokio::join!(cluster.deliver(1, &paid), async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        cluster.signal_replica(0, Signal::SIGCONT);
    });
    assert!(began.elapsed() >= Duration::from_secs(1) && began.elapsed() < WAIT_TIMEOUT);
    if !answer.status.is_success() {
        cluster.deliver_until_accepted(1, &paid).await;
    }
    expect_balance(&cluster, CREDIT + 5_000).await;
    cluster.shutdown().await;
}
