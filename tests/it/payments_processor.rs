//! Calls to the payment processor, a third-party server: payments are deposited and refunds are paid once,
//! whatever crashes or hangs in between. No webhook is delivered here: reconciliation finds the payments. Crashes at our own commits are in
//! `payments_crashes`.

use crate::alerts::monitoring::Monitoring;
use domain::payment::{RefundDebit, RefundStatus};
use domain::{PaymentId, RefundId};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::payments::{RESEND_TIMEOUT, StartedPayment, checkout};
use tests::cluster::{TestCluster, TestClusterBuilder, WAIT_TIMEOUT, id_of};
use uuid::Uuid;

const RECONCILE: &str = "SVC_PAYMENTS_RECONCILE_SECONDS";
const DEPOSIT: i64 = 5_000;

/// A cluster in which no account has money, with this interval of reconciliation.
fn reconciled_every(seconds: u64) -> TestClusterBuilder {
    TestCluster::builder().without_credit().with_processor_without_webhooks().variable(RECONCILE, &seconds.to_string())
}

/// All objects of this kind at the processor that satisfy the condition.
async fn processor_objects(cluster: &TestCluster, what: &str, is_it: impl Fn(&Value) -> bool) -> Vec<Value> {
    let list = cluster.processor().get(&format!("/v1/{what}?limit=100")).await.unwrap();
    list["data"].as_array().unwrap().iter().filter(|object| is_it(object)).cloned().collect()
}

async fn refunds_of(cluster: &TestCluster, begun: &StartedPayment) -> Vec<Value> {
    processor_objects(cluster, "refunds", |refund| refund["payment_intent"] == begun.intent.as_str()).await
}

/// Waits until `look` returns true.
async fn eventually(what: &str, limit: Duration, mut look: impl AsyncFnMut() -> bool) {
    let until = Instant::now() + limit;
    while !look().await {
        assert!(Instant::now() < until, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn expect_balance(cluster: &TestCluster, minor: i64) {
    let wanted = minor * 1_000_000;
    eventually(&format!("{minor} in the account"), RESEND_TIMEOUT, async || cluster.balance_micro().await == wanted)
        .await;
}

/// Requests a refund of this amount.
async fn request_refund(cluster: &TestCluster, begun: &StartedPayment, minor: i64) -> RefundId {
    let wanted = json!({ "payment_id": begun.id, "amount_minor": minor, "reason": "a test needs it" });
    RefundId(id_of(&cluster.user.post("/api/v1/billing/refunds", &wanted).await.created()))
}

async fn expect_refund(cluster: &TestCluster, begun: &StartedPayment, refund: RefundId, wanted: RefundStatus) {
    eventually(&format!("refund {refund} is {wanted:?}"), RESEND_TIMEOUT, async || {
        let payment = cluster.stored_payment(begun.id).await.unwrap();
        payment.refunds[&refund].at_processor.as_ref().is_some_and(|at| at.status == wanted)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn payment_without_a_webhook_is_deposited_by_reconciliation() {
    let mut cluster = reconciled_every(1).replicas(2).start().await;
    let begun = cluster.top_up(DEPOSIT).await;
    expect_balance(&cluster, DEPOSIT).await;
    // An operator refunds at the processor, in full and without a request here.
    let form = [("payment_intent", begun.intent.as_str()), ("amount", "1500")];
    cluster.processor().post("/v1/refunds", &form).await.unwrap();
    expect_balance(&cluster, DEPOSIT - 1_500).await;
    let payment = cluster.stored_payment(begun.id).await.unwrap();
    assert_eq!((payment.id, payment.left_minor()), (PaymentId(begun.id), DEPOSIT - 1_500));
    // A payment of another service with the same account at the processor is ignored.
    let theirs = [("amount", "700"), ("currency", "usd"), ("payment_method", "pm_card_visa"), ("confirm", "true")];
    cluster.processor().post("/v1/payment_intents", &theirs).await.unwrap();
    // Two members reconcile in turns; a processor that is not reachable is counted.
    let monitoring = Monitoring::start(&cluster).await;
    cluster.payments().link.cut();
    let failed = "payments_reconcile_failed_total";
    eventually("a comparison failed", WAIT_TIMEOUT, async || cluster.metric_total(failed, &[]).await >= 2.0).await;
    let not_reconciled = monitoring.alertmanager.expect("tickets", "GPUAASPaymentsNotReconciled", true).await;
    assert_eq!(not_reconciled.runbook, "ops.webhook.outage");
    cluster.payments().link.restore();
    let second = cluster.top_up(DEPOSIT).await;
    assert_ne!(second.id, begun.id);
    expect_balance(&cluster, 2 * DEPOSIT - 1_500).await;
    let missed = cluster.metric_total("payments_reconcile_missed_total", &[]).await;
    assert!(missed >= 1.0, "the refund at the processor, at least");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deposit_survives_kill_9_while_it_is_opened_and_while_it_is_paid() {
    // Without reconciliation: the payment queries the processor by itself.
    let mut cluster = reconciled_every(86_400).start().await;

    // While the processor's response is in flight the payer retries with the same key, and it is opened once.
    cluster.payments().link.drop_responses_to("POST /v1/payment_intents");
    let (user, body) = (cluster.user.clone(), checkout(DEPOSIT));
    let asking = tokio::spawn(async move { user.post("/api/v1/billing/checkout-sessions", &body).await.created() });
    eventually("it is asked for", WAIT_TIMEOUT, async || {
        !processor_objects(&cluster, "payment_intents", |_| true).await.is_empty()
    })
    .await;
    cluster.kill9_replica(0);
    cluster.payments().link.restore();
    cluster.restart_replica(0).await;
    let answer = asking.await.unwrap();
    let url = answer["url"].as_str().unwrap().to_owned();
    cluster.register_secret("a client secret", url.split_once('#').unwrap().1);
    let begun =
        StartedPayment { id: id_of(&answer), intent: local_servers::payment_processor::intent_in(&url).unwrap() };
    let is_open =
        |intent: &Value| intent["metadata"]["payment_id"] == begun.id.to_string() && intent["status"] != "canceled";
    assert_eq!(processor_objects(&cluster, "payment_intents", is_open).await.len(), 1, "one can be paid");

    // Paid while no replica runs.
    cluster.kill9_replica(0);
    cluster.pay(&begun).await;
    cluster.restart_replica(0).await;
    cluster.expect_payment(&begun, "deposited").await;
    expect_balance(&cluster, DEPOSIT).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refund_whose_response_is_lost_by_kill_9_is_paid_once() {
    let mut cluster = reconciled_every(86_400).start().await;
    let begun = cluster.top_up(DEPOSIT).await;
    expect_balance(&cluster, DEPOSIT).await;
    // It is executed at the processor, and the replica dies before the response.
    cluster.payments().link.drop_responses_to("POST /v1/refunds");
    let refund = request_refund(&cluster, &begun, 2_000).await;
    eventually("the processor has paid back", WAIT_TIMEOUT, async || refunds_of(&cluster, &begun).await.len() == 1)
        .await;
    cluster.kill9_replica(0);
    cluster.payments().link.restore();
    cluster.restart_replica(0).await;
    expect_refund(&cluster, &begun, refund, RefundStatus::Succeeded).await;
    expect_balance(&cluster, DEPOSIT - 2_000).await;
    expect_paid_back_once(&cluster, &begun, 2_000).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refund_requested_before_kill_9_and_while_the_processor_is_unreachable_is_paid_once() {
    let mut cluster = reconciled_every(86_400).start().await;
    let begun = cluster.top_up(DEPOSIT).await;
    expect_balance(&cluster, DEPOSIT).await;
    cluster.payments().link.cut();
    let refund = request_refund(&cluster, &begun, 1_000).await;
    cluster.kill9_replica(0);
    cluster.payments().link.restore();
    cluster.restart_replica(0).await;
    expect_refund(&cluster, &begun, refund, RefundStatus::Succeeded).await;
    expect_balance(&cluster, DEPOSIT - 1_000).await;
    expect_paid_back_once(&cluster, &begun, 1_000).await;
    cluster.shutdown().await;
}

/// The processor ignores idempotency keys and caps nothing: a repeated refund would be paid twice.
async fn expect_paid_back_once(cluster: &TestCluster, begun: &StartedPayment, minor: i64) {
    let paid_back: Vec<_> = refunds_of(cluster, begun).await.iter().map(|it| it["amount"].as_i64().unwrap()).collect();
    assert_eq!(paid_back, [minor]);
}

#[tokio::test(flavor = "multi_thread")]
async fn refund_that_the_processor_refuses_is_credited_back() {
    let mut cluster = reconciled_every(1).start().await;
    let begun = cluster.top_up(DEPOSIT).await;
    // The processor has it as not paid, and refuses the refund.
    cluster
        .processor()
        .post(&format!("/v1/payment_intents/{}", begun.intent), &[("payment_method", "")])
        .await
        .unwrap();
    let refund = request_refund(&cluster, &begun, 2_000).await;
    expect_refund(&cluster, &begun, refund, RefundStatus::Failed).await;
    expect_balance(&cluster, DEPOSIT).await;
    // The account is credited first, and the payment learns of it by an event.
    eventually("the payment knows that the refund is credited back", WAIT_TIMEOUT, async || {
        let payment = cluster.stored_payment(begun.id).await.unwrap();
        matches!(payment.refunds[&refund].taking, RefundDebit::GivenBack { amount_minor: 2_000 })
    })
    .await;
    assert!(refunds_of(&cluster, &begun).await.is_empty());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outage_or_hang_of_the_processor_delays_nothing_else_and_loses_nothing() {
    let mut cluster = reconciled_every(86_400).start().await;
    let begun = cluster.top_up(DEPOSIT).await;
    cluster.payments().processor.suspend();
    let refund = request_refund(&cluster, &begun, 2_000).await;
    // Allocations work meanwhile, and are charged.
    let node = cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    cluster.payments().processor.kill9();
    allocation.release_fully().await;
    node.expect_state("active").await;
    eventually("the refund is debited", WAIT_TIMEOUT, async || {
        let payment = cluster.stored_payment(begun.id).await.unwrap();
        matches!(payment.refunds[&refund].taking, RefundDebit::Taken { .. })
    })
    .await;
    let wanted = checkout(DEPOSIT);
    let key = Uuid::new_v4().to_string();
    let request = || {
        let request = cluster.user.request(reqwest::Method::POST, "/api/v1/billing/checkout-sessions");
        request.header("Idempotency-Key", &key).json(&wanted)
    };
    let refused = cluster.user.send(request()).await;
    assert!(refused.status.is_server_error(), "{refused}");
    refused.expect_error_envelope();

    cluster.payments().processor.start_again().await.unwrap();
    expect_refund(&cluster, &begun, refund, RefundStatus::Succeeded).await;
    assert_eq!(refunds_of(&cluster, &begun).await.len(), 1);
    cluster.shutdown().await;
}
