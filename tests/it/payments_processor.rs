//! The payment processor, a server that somebody else wrote: what is paid there is in the account and what is asked back is paid back once,
//! whoever dies, hangs or does not hear in between. No webhook comes here: what nobody tells of is found. Deaths at our own commits are in
//! `payments_deaths`.

use domain::payment::{RefundStatus, Taking};
use domain::{PaymentId, RefundId};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::world::payments::{Begun, SAID_AGAIN_WITHIN, checkout};
use tests::world::{PATIENCE, Plan, World, id_of};
use uuid::Uuid;

const RECONCILE: &str = "SVC_PAYMENTS_RECONCILE_SECONDS";
const DEPOSIT: i64 = 5_000;

/// A world in which nobody has money and the processor's books are looked at so often.
fn reconciled_every(seconds: u64) -> Plan {
    World::plan().penniless().with_unheard_processor().variable(RECONCILE, &seconds.to_string())
}

/// All that the processor has of one kind and of this payment.
async fn there(world: &World, what: &str, is_it: impl Fn(&Value) -> bool) -> Vec<Value> {
    let list = world.processor().get(&format!("/v1/{what}?limit=100")).await.unwrap();
    list["data"].as_array().unwrap().iter().filter(|object| is_it(object)).cloned().collect()
}

async fn refunds_of(world: &World, begun: &Begun) -> Vec<Value> {
    there(world, "refunds", |refund| refund["payment_intent"] == begun.intent.as_str()).await
}

/// Until `look` is true of the world.
async fn eventually(what: &str, limit: Duration, mut look: impl AsyncFnMut() -> bool) {
    let until = Instant::now() + limit;
    while !look().await {
        assert!(Instant::now() < until, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn expect_balance(world: &World, minor: i64) {
    let wanted = minor * 1_000_000;
    eventually(&format!("{minor} in the account"), SAID_AGAIN_WITHIN, async || world.balance_micro().await == wanted)
        .await;
}

/// Asks for so much of it back.
async fn ask_back(world: &World, begun: &Begun, minor: i64) -> RefundId {
    let wanted = json!({ "payment_id": begun.id, "amount_minor": minor, "reason": "a test needs it" });
    RefundId(id_of(&world.user.post("/api/v1/billing/refunds", &wanted).await.created()))
}

async fn expect_refund(world: &World, begun: &Begun, refund: RefundId, wanted: RefundStatus) {
    eventually(&format!("refund {refund} is {wanted:?}"), SAID_AGAIN_WITHIN, async || {
        let payment = world.stored_payment(begun.id).await.unwrap();
        payment.refunds[&refund].at_processor.as_ref().is_some_and(|at| at.status == wanted)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_webhook_told_of_is_in_the_account_after_the_books_were_compared() {
    let mut world = reconciled_every(1).replicas(2).start().await;
    let begun = world.top_up(DEPOSIT).await;
    expect_balance(&world, DEPOSIT).await;
    // Somebody pays back at the processor: in full, though it was never asked here.
    let form = [("payment_intent", begun.intent.as_str()), ("amount", "1500")];
    world.processor().post("/v1/refunds", &form).await.unwrap();
    expect_balance(&world, DEPOSIT - 1_500).await;
    let payment = world.stored_payment(begun.id).await.unwrap();
    assert_eq!((payment.id, payment.left_minor()), (PaymentId(begun.id), DEPOSIT - 1_500));
    // A payment of somebody else who shares the account at the processor is none of ours.
    let theirs = [("amount", "700"), ("currency", "usd"), ("payment_method", "pm_card_visa"), ("confirm", "true")];
    world.processor().post("/v1/payment_intents", &theirs).await.unwrap();
    // Two members compare in turns; of a processor that is away they say so.
    world.payments().line.cut();
    let failed = async |world: &World| {
        let mut failed = 0.0;
        for replica in 0..2 {
            failed += figure(world, replica, "payments_reconcile_failed_total").await;
        }
        failed
    };
    eventually("a comparison failed", PATIENCE, async || failed(&world).await >= 2.0).await;
    world.payments().line.mend();
    let second = world.top_up(DEPOSIT).await;
    assert_ne!(second.id, begun.id);
    expect_balance(&world, 2 * DEPOSIT - 1_500).await;
    let missed = figure(&world, 0, "payments_reconcile_missed_total").await
        + figure(&world, 1, "payments_reconcile_missed_total").await;
    assert!(missed >= 1.0, "the refund at the processor, at least");
    world.end().await;
}

async fn figure(world: &World, replica: usize, name: &str) -> f64 {
    let url = format!("{}/metrics", world.replicas[replica].operations_url());
    let text = reqwest::get(url).await.unwrap().text().await.unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name}")).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deposit_survives_kill_9_while_it_is_opened_and_while_it_is_paid() {
    // Nobody compares any books: the payment finds out by itself.
    let mut world = reconciled_every(86_400).start().await;

    // While the processor's answer is on its way: the payer asks again under the same key, and it is opened once.
    world.payments().line.lose_answers_to("POST /v1/payment_intents");
    let (user, body) = (world.user.clone(), checkout(DEPOSIT));
    let asking = tokio::spawn(async move { user.post("/api/v1/billing/checkout-sessions", &body).await.created() });
    eventually("it is asked for", PATIENCE, async || !there(&world, "payment_intents", |_| true).await.is_empty())
        .await;
    world.kill9_replica(0);
    world.payments().line.mend();
    world.restart_replica(0).await;
    let answer = asking.await.unwrap();
    let url = answer["url"].as_str().unwrap().to_owned();
    world.keep_secret("a client secret", url.split_once('#').unwrap().1);
    let begun = Begun { id: id_of(&answer), intent: supervisors::dev::processor::intent_in(&url).unwrap() };
    let is_open =
        |intent: &Value| intent["metadata"]["payment_id"] == begun.id.to_string() && intent["status"] != "canceled";
    assert_eq!(there(&world, "payment_intents", is_open).await.len(), 1, "one can be paid");

    // Paid while nobody is there.
    world.kill9_replica(0);
    world.pay(&begun).await;
    world.restart_replica(0).await;
    world.expect_payment(&begun, "deposited").await;
    expect_balance(&world, DEPOSIT).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refund_survives_kill_9_around_the_processor_and_is_paid_once() {
    let mut world = reconciled_every(86_400).start().await;
    let begun = world.top_up(DEPOSIT).await;
    expect_balance(&world, DEPOSIT).await;

    // It is done at the processor, and whoever asked dies without having heard so.
    world.payments().line.lose_answers_to("POST /v1/refunds");
    let refund = ask_back(&world, &begun, 2_000).await;
    eventually("the processor has paid back", PATIENCE, async || refunds_of(&world, &begun).await.len() == 1).await;
    world.kill9_replica(0);
    world.payments().line.mend();
    world.restart_replica(0).await;
    expect_refund(&world, &begun, refund, RefundStatus::Succeeded).await;
    expect_balance(&world, DEPOSIT - 2_000).await;

    // Before the processor can be asked.
    world.payments().line.cut();
    let refund = ask_back(&world, &begun, 1_000).await;
    world.kill9_replica(0);
    world.payments().line.mend();
    world.restart_replica(0).await;
    expect_refund(&world, &begun, refund, RefundStatus::Succeeded).await;
    expect_balance(&world, DEPOSIT - 3_000).await;
    let paid_back: i64 = refunds_of(&world, &begun).await.iter().map(|it| it["amount"].as_i64().unwrap()).sum();
    assert_eq!(paid_back, 3_000, "each once, of a processor that heeds no key and caps nothing");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refund_that_the_processor_refuses_is_in_the_account_again() {
    let mut world = reconciled_every(1).start().await;
    let begun = world.top_up(DEPOSIT).await;
    // The processor holds it for not paid, and refuses whoever wants it back.
    world.processor().post(&format!("/v1/payment_intents/{}", begun.intent), &[("payment_method", "")]).await.unwrap();
    let refund = ask_back(&world, &begun, 2_000).await;
    expect_refund(&world, &begun, refund, RefundStatus::Failed).await;
    expect_balance(&world, DEPOSIT).await;
    let payment = world.stored_payment(begun.id).await.unwrap();
    assert!(matches!(payment.refunds[&refund].taking, Taking::GivenBack { amount_minor: 2_000 }), "{payment:#?}");
    assert!(refunds_of(&world, &begun).await.is_empty());
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_processor_is_down_or_hangs_nothing_else_waits_and_nothing_is_lost() {
    let mut world = reconciled_every(86_400).start().await;
    let begun = world.top_up(DEPOSIT).await;
    world.payments().processor.hang();
    let refund = ask_back(&world, &begun, 2_000).await;
    // Renting goes on, and is paid for.
    let node = world.node("h100").await;
    let allocation = world.rent("h100", 1).await;
    allocation.expect_state("active").await;
    world.payments().processor.kill9();
    allocation.release().await;
    allocation.expect_state("released").await;
    node.expect_state("active").await;
    let payment = world.stored_payment(begun.id).await.unwrap();
    assert!(matches!(payment.refunds[&refund].taking, Taking::Taken { .. }), "{payment:#?}");
    let wanted = checkout(DEPOSIT);
    let key = Uuid::new_v4().to_string();
    let request = || {
        let request = world.user.request(reqwest::Method::POST, "/api/v1/billing/checkout-sessions");
        request.header("Idempotency-Key", &key).json(&wanted)
    };
    let refused = world.user.send(request()).await;
    assert!(refused.status.is_server_error(), "{refused}");
    refused.in_envelope();

    world.payments().processor.start_again().await.unwrap();
    expect_refund(&world, &begun, refund, RefundStatus::Succeeded).await;
    assert_eq!(refunds_of(&world, &begun).await.len(), 1);
    world.end().await;
}
