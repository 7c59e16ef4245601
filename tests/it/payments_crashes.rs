//! SIGKILL at each commit of a payment and of its account, from the processor's event to the deposit and from the request to the refund:
//! before the commit, which is rolled back, and after it, when the response is lost. `payment_webhook` tests the webhook's own commit, and
//! `payments_processor` the calls to the processor.

use domain::payment::{Payment, RefundDebit, RefundStatus};
use domain::{Machine as _, RefundId};
use serde_json::json;
use std::time::{Duration, Instant};
use tests::cluster::db_lock::{StatementFate, WRITES};
use tests::cluster::payments::{RESEND_TIMEOUT, StartedPayment};
use tests::cluster::{TestCluster, WAIT_TIMEOUT, id_of};
use uuid::Uuid;

const DEPOSIT: i64 = 5_000;
const REFUND: i64 = 1_000;

/// Each commit is the last statement that a replica sent, with either fate.
const ENDS: [StatementFate; 2] = [StatementFate::RolledBack, StatementFate::Committed];

/// A cluster in which `user` has an account, and its id.
async fn start_with_account() -> (TestCluster, Uuid) {
    let mut cluster = TestCluster::builder().without_credit().with_processor().start().await;
    let started = cluster.top_up(DEPOSIT).await;
    let payment = cluster.user.get(&format!("/api/v1/billing/payments/{}", started.id)).await.ok();
    let account = payment["account_id"].as_str().and_then(|id| id.parse().ok()).expect("a payment has an account");
    (cluster, account)
}

async fn stored_payment(cluster: &TestCluster, started: &StartedPayment) -> Payment {
    cluster.stored_payment(started.id).await.expect("the payment is there")
}

/// The stored balance of the account, since no replica serves the API.
async fn posted_balance(cluster: &TestCluster, account: Uuid) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM ledger WHERE account = $1")
        .bind(account)
        .fetch_one(&cluster.pool)
        .await
        .unwrap()
}

/// Waits until the stored payment satisfies the condition.
async fn wait_until(cluster: &TestCluster, started: &StartedPayment, what: &str, holds: impl Fn(&Payment) -> bool) {
    let end = Instant::now() + RESEND_TIMEOUT;
    while !holds(&stored_payment(cluster, started).await) {
        assert!(Instant::now() < end, "not within {RESEND_TIMEOUT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn crash_at_any_commit_of_a_deposit_posts_it_once() {
    let (mut cluster, account) = start_with_account().await;
    for (nth, fate) in (2..).zip(ENDS) {
        let is_written = fate == StatementFate::Committed;
        let started = cluster.begin_payment(DEPOSIT).await;

        // The payment gets the event that it is paid.
        let (payment, deposit) =
            (cluster.lock_entity_without_timer(started.id).await, cluster.lock_entity(account).await);
        cluster.pay(&started).await;
        cluster.kill_while_writing(payment, fate).await;
        assert_eq!(stored_payment(&cluster, &started).await.paid_at().is_some(), is_written, "{fate:?}");
        cluster.restart_replica(0).await;

        // The account posts it.
        deposit.expect_blocked(WRITES).await;
        let (payment, before) =
            (cluster.lock_entity_without_timer(started.id).await, posted_balance(&cluster, account).await);
        cluster.kill_while_writing(deposit, fate).await;
        assert_eq!(posted_balance(&cluster, account).await - before, i64::from(is_written), "{fate:?}");
        cluster.restart_replica(0).await;

        // The payment learns that the account has posted it.
        cluster.kill_while_writing(payment, fate).await;
        assert_eq!(stored_payment(&cluster, &started).await.state() == "deposited", is_written, "{fate:?}");
        cluster.restart_replica(0).await;

        cluster.expect_payment(&started, "deposited").await;
        assert_eq!(cluster.balance_micro().await, nth * DEPOSIT * 1_000_000, "{fate:?}");
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn crash_at_any_commit_of_a_refund_debits_and_pays_it_once() {
    let (mut cluster, account) = start_with_account().await;
    for fate in ENDS {
        let is_written = fate == StatementFate::Committed;
        let started = cluster.top_up(DEPOSIT).await;
        let balance = cluster.balance_micro().await;

        // The payment records the refund request of its payer, who retries until there is a response.
        let (payment, taking) =
            (cluster.lock_entity_without_timer(started.id).await, cluster.lock_entity(account).await);
        let wanted = json!({ "payment_id": started.id, "amount_minor": REFUND, "reason": "a test needs it" });
        let user = cluster.user.clone();
        let asking = tokio::spawn(async move { user.post("/api/v1/billing/refunds", &wanted).await.created() });
        cluster.kill_while_writing(payment, fate).await;
        assert_eq!(stored_payment(&cluster, &started).await.refunds.len(), usize::from(is_written), "{fate:?}");
        cluster.restart_replica(0).await;

        // The account debits it.
        taking.expect_blocked(WRITES).await;
        let (payment, before) =
            (cluster.lock_entity_without_timer(started.id).await, posted_balance(&cluster, account).await);
        cluster.kill_while_writing(taking, fate).await;
        assert_eq!(posted_balance(&cluster, account).await - before, i64::from(is_written), "{fate:?}");
        cluster.restart_replica(0).await;

        // The payment learns that it is debited. The response of the processor to its next call is held back.
        cluster.payments().link.drop_responses_to("POST /v1/refunds");
        cluster.kill_while_writing(payment, fate).await;
        let is_taken =
            |payment: &Payment| payment.refunds.values().any(|it| matches!(it.taking, RefundDebit::Taken { .. }));
        assert_eq!(is_taken(&stored_payment(&cluster, &started).await), is_written, "{fate:?}");
        cluster.restart_replica(0).await;
        let refund = RefundId(id_of(&asking.await.unwrap()));

        // The payment learns its state at the processor, which has paid it.
        let end = Instant::now() + WAIT_TIMEOUT;
        while refunded_amount(&cluster, &started).await == 0 {
            assert!(Instant::now() < end, "nothing is paid back within {WAIT_TIMEOUT:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let payment = cluster.lock_entity_without_timer(started.id).await;
        cluster.payments().link.restore();
        cluster.kill_while_writing(payment, fate).await;
        let is_at = |payment: &Payment| {
            payment.refunds[&refund].at_processor.as_ref().is_some_and(|at| at.status == RefundStatus::Succeeded)
        };
        assert_eq!(is_at(&stored_payment(&cluster, &started).await), is_written, "{fate:?}");
        cluster.restart_replica(0).await;

        wait_until(&cluster, &started, "it is paid back", is_at).await;
        assert_eq!(
            refunded_amount(&cluster, &started).await,
            REFUND,
            "once, of a processor that ignores keys: {fate:?}"
        );
        assert_eq!(balance - cluster.balance_micro().await, REFUND * 1_000_000, "{fate:?}");
    }
    cluster.shutdown().await;
}

/// The amount that the processor has refunded.
async fn refunded_amount(cluster: &TestCluster, started: &StartedPayment) -> i64 {
    let refunds = cluster.processor_client().all("refunds").await;
    let of_it = refunds.iter().filter(|refund| refund["payment_intent"] == started.intent.as_str());
    of_it.map(|refund| refund["amount"].as_i64().expect("a refund has an amount")).sum()
}
