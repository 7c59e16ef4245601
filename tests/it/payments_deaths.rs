//! kill -9 at each commit of a payment and of its account, from the processor's word to the deposit and from a payer's wish to the refund: before
//! it is written, so that it never is, and after it was, so that nobody is told. The webhook's own commit is `webhook`'s, and what lies at the
//! processor `payments_processor`'s.

use domain::payment::{Payment, RefundStatus, Taking};
use domain::{Machine as _, RefundId};
use serde_json::json;
use std::time::{Duration, Instant};
use tests::world::held::{Held, Then, WRITES};
use tests::world::payments::{Begun, SAID_AGAIN_WITHIN};
use tests::world::{PATIENCE, World, id_of};
use uuid::Uuid;

const DEPOSIT: i64 = 5_000;
const REFUND: i64 = 1_000;

/// Each commit is the last thing that a replica sent, with either end.
const ENDS: [Then; 2] = [Then::CutOff, Then::Written];

/// A world in which `user` has an account, and its id.
async fn paying() -> (World, Uuid) {
    let mut world = World::plan().penniless().with_processor().start().await;
    let begun = world.top_up(DEPOSIT).await;
    let payment = world.user.get(&format!("/api/v1/billing/payments/{}", begun.id)).await.ok();
    let account = payment["account_id"].as_str().and_then(|id| id.parse().ok()).expect("a payment has an account");
    (world, account)
}

/// The replica dies while its write waits for what is held, and comes back after what became of that.
async fn dies_writing(world: &mut World, held: Held, then: Then) {
    held.expect_waiting(WRITES).await;
    world.kill9_replica(0);
    held.give_back(WRITES, then).await;
}

async fn stored(world: &World, begun: &Begun) -> Payment {
    world.stored_payment(begun.id).await.expect("the payment is there")
}

/// What the account has, as it is stored: nobody serves the API.
async fn posted(world: &World, account: Uuid) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM ledger WHERE account = $1")
        .bind(account)
        .fetch_one(&world.pool)
        .await
        .unwrap()
}

/// Until the payment is stored like that.
async fn until(world: &World, begun: &Begun, what: &str, holds: impl Fn(&Payment) -> bool) {
    let end = Instant::now() + SAID_AGAIN_WITHIN;
    while !holds(&stored(world, begun).await) {
        assert!(Instant::now() < end, "not within {SAID_AGAIN_WITHIN:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_death_at_any_commit_of_a_deposit_posts_it_once() {
    let (mut world, account) = paying().await;
    for (nth, then) in (2..).zip(ENDS) {
        let is_written = then == Then::Written;
        let begun = world.begin_payment(DEPOSIT).await;

        // The payment hears that it is paid.
        let (payment, deposit) = (world.hold_untimed(begun.id).await, world.hold(account).await);
        world.pay(&begun).await;
        dies_writing(&mut world, payment, then).await;
        assert_eq!(stored(&world, &begun).await.paid_at().is_some(), is_written, "{then:?}");
        world.restart_replica(0).await;

        // The account posts it.
        deposit.expect_waiting(WRITES).await;
        let (payment, before) = (world.hold_untimed(begun.id).await, posted(&world, account).await);
        dies_writing(&mut world, deposit, then).await;
        assert_eq!(posted(&world, account).await - before, i64::from(is_written), "{then:?}");
        world.restart_replica(0).await;

        // The payment hears that the account has it.
        dies_writing(&mut world, payment, then).await;
        assert_eq!(stored(&world, &begun).await.state() == "deposited", is_written, "{then:?}");
        world.restart_replica(0).await;

        world.expect_payment(&begun, "deposited").await;
        assert_eq!(world.balance_micro().await, nth * DEPOSIT * 1_000_000, "{then:?}");
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_death_at_any_commit_of_a_refund_takes_it_once_and_pays_it_once() {
    let (mut world, account) = paying().await;
    for then in ENDS {
        let is_written = then == Then::Written;
        let begun = world.top_up(DEPOSIT).await;
        let balance = world.balance_micro().await;

        // The payment takes down what its payer wants, who asks again for as long as there is no answer.
        let (payment, taking) = (world.hold_untimed(begun.id).await, world.hold(account).await);
        let wanted = json!({ "payment_id": begun.id, "amount_minor": REFUND, "reason": "a test needs it" });
        let user = world.user.clone();
        let asking = tokio::spawn(async move { user.post("/api/v1/billing/refunds", &wanted).await.created() });
        dies_writing(&mut world, payment, then).await;
        assert_eq!(stored(&world, &begun).await.refunds.len(), usize::from(is_written), "{then:?}");
        world.restart_replica(0).await;

        // The account takes it.
        taking.expect_waiting(WRITES).await;
        let (payment, before) = (world.hold_untimed(begun.id).await, posted(&world, account).await);
        dies_writing(&mut world, taking, then).await;
        assert_eq!(posted(&world, account).await - before, i64::from(is_written), "{then:?}");
        world.restart_replica(0).await;

        // The payment hears that it is taken. What it asks of the processor next is answered when we like.
        world.payments().line.lose_answers_to("POST /v1/refunds");
        dies_writing(&mut world, payment, then).await;
        let is_taken = |payment: &Payment| payment.refunds.values().any(|it| matches!(it.taking, Taking::Taken { .. }));
        assert_eq!(is_taken(&stored(&world, &begun).await), is_written, "{then:?}");
        world.restart_replica(0).await;
        let refund = RefundId(id_of(&asking.await.unwrap()));

        // And how it stands at the processor, which has paid it.
        let end = Instant::now() + PATIENCE;
        while paid_back(&world, &begun).await == 0 {
            assert!(Instant::now() < end, "nothing is paid back within {PATIENCE:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let payment = world.hold_untimed(begun.id).await;
        world.payments().line.mend();
        dies_writing(&mut world, payment, then).await;
        let is_at = |payment: &Payment| {
            payment.refunds[&refund].at_processor.as_ref().is_some_and(|at| at.status == RefundStatus::Succeeded)
        };
        assert_eq!(is_at(&stored(&world, &begun).await), is_written, "{then:?}");
        world.restart_replica(0).await;

        until(&world, &begun, "it is paid back", is_at).await;
        assert_eq!(paid_back(&world, &begun).await, REFUND, "once, of a processor that heeds no key: {then:?}");
        assert_eq!(balance - world.balance_micro().await, REFUND * 1_000_000, "{then:?}");
    }
    world.end().await;
}

/// What the processor has paid back of it.
async fn paid_back(world: &World, begun: &Begun) -> i64 {
    let refunds = world.outside().all("refunds").await;
    let of_it = refunds.iter().filter(|refund| refund["payment_intent"] == begun.intent.as_str());
    of_it.map(|refund| refund["amount"].as_i64().expect("a refund has an amount")).sum()
}
