//! What the payment processor says, and what somebody says in its name: believed, kept once, and carried out once, whatever dies meanwhile.

use nix::sys::signal::Signal;
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::world::desk::{Desk, event, intent, signature};
use tests::world::{CREDIT, PATIENCE, World};

const BALANCE: &str = "/api/v1/billing/balance";
const EVENTS: &str = "/api/v1/admin/billing/processor-events";

/// What the service knows of the processor's event of this id, once that is as wanted.
async fn known(world: &World, event_id: &str, state: &str) -> Value {
    let path = format!("{EVENTS}?event_id={event_id}");
    let wanted = |page: &Value| page["items"][0]["state"] == state;
    world.admin.wait_until(&path, &format!("{event_id} is {state}"), wanted).await["items"][0].clone()
}

async fn balance_is(world: &World, minor: i64) {
    let wanted = |balance: &Value| balance["balance_minor"] == minor;
    world.user.wait_until(BALANCE, &format!("the balance is {minor}"), wanted).await;
}

/// How often it was posted, by its kind.
async fn postings(world: &World) -> Vec<(String, i64)> {
    let page = world.user.get("/api/v1/billing/ledger?limit=200").await.ok();
    let posting =
        |it: &Value| (it["kind"].as_str().unwrap().to_owned(), it["change_micro"].as_i64().unwrap() / 1_000_000);
    let mut all: Vec<_> = page["items"].as_array().unwrap().iter().map(posting).collect();
    all.reverse();
    // The first is what everybody begins with.
    all.split_off(1)
}

/// A figure of all replicas together.
async fn counted(world: &World, name: &str) -> u64 {
    let mut sum = 0;
    for replica in &world.replicas {
        let text = reqwest::get(format!("{}/metrics", replica.operations_url())).await.unwrap().text().await.unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        sum += line.unwrap_or_else(|| panic!("there is no {name}")).parse::<u64>().unwrap();
    }
    sum
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_paid_is_deposited_once_though_it_is_said_a_hundred_times_at_two_replicas() {
    let desk = Desk::start().await;
    let world = desk.plan(World::plan().replicas(2)).start().await;
    let payment = world.payment_under_way("user", 5_000, "pi_1").await;
    let paid = event("evt_1", "payment_intent.succeeded", &intent("pi_1", payment, 5_000, "succeeded"));
    let deliveries = (0..100).map(|turn| world.deliver(turn % 2, &paid));
    for answer in futures::future::join_all(deliveries).await {
        assert_eq!(answer.ok(), json!({ "received": true }));
    }
    balance_is(&world, CREDIT + 5_000).await;
    let event = known(&world, "evt_1", "processed").await;
    assert_eq!((event["outcome"].as_str(), event["object_id"].as_str()), (Some("told"), Some("pi_1")));
    assert_eq!(postings(&world).await, [("deposit".to_owned(), 5_000)]);
    for (name, expected) in [
        ("webhook_events_received_total", 100),
        ("webhook_processed_success_total", 1),
        ("webhook_signature_failures_total", 0),
        ("webhook_invalid_payload_total", 0),
        ("webhook_persist_failures_total", 0),
        ("webhook_processing_failures_total", 0),
        ("payments_reconcile_failed_total", 0),
    ] {
        assert_eq!(counted(&world, name).await, expected, "{name}");
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_the_processors_is_refused_and_leaves_nothing() {
    let desk = Desk::start().await;
    let world = desk.plan(World::plan()).start().await;
    let payment = world.payment_under_way("user", 5_000, "pi_1").await;
    let paid = event("evt_1", "payment_intent.succeeded", &intent("pi_1", payment, 5_000, "succeeded"));
    let compact = serde_json::from_str::<Value>(&paid).unwrap().to_string();
    let good = signature("v1", 0, &paid);
    for (what, signature, body, reason) in [
        ("wrong", good.replace("v1=", "v1=00"), &paid, "signature_wrong"),
        ("of another body", good.clone(), &paid.replace("5000", "9000"), "signature_wrong"),
        ("re-serialised on the way", good.clone(), &compact, "signature_wrong"),
        ("v0 alone", signature("v0", 0, &paid), &paid, "signature_scheme"),
        ("old", signature("v1", 301, &paid), &paid, "signature_too_old"),
        ("ahead", signature("v1", -310, &paid), &paid, "signature_too_new"),
        ("none", String::new(), &paid, "signature_unreadable"),
    ] {
        let answer = world.try_deliver(0, &signature, body).await.unwrap();
        let details = &answer.refused(400, "invalid_request").body["details"];
        assert_eq!(
            (details["reason"].as_str(), details["service"].as_str()),
            (Some(reason), Some("webhook")),
            "{what}"
        );
    }
    assert_eq!(world.admin.get(EVENTS).await.ok()["items"], json!([]));
    assert_eq!(counted(&world, "webhook_signature_failures_total").await, 7);
    balance_is(&world, CREDIT).await;
    // The same event, when it is the processor's after all.
    world.deliver(0, &paid).await.ok();
    balance_is(&world, CREDIT + 5_000).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_in_any_order_come_to_the_same() {
    let desk = Desk::start().await;
    let world = desk.plan(World::plan()).start().await;
    let payment = world.payment_under_way("user", 5_000, "pi_1").await;
    let (open, paid) =
        (intent("pi_1", payment, 5_000, "requires_payment_method"), intent("pi_1", payment, 5_000, "succeeded"));
    desk.knows(&paid);
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
    // Back to front: the refund and the dispute before the charge, the last word on each before the first.
    for (id, event_type, object) in [
        ("evt_6", "charge.dispute.closed", dispute("won")),
        ("evt_5", "charge.dispute.created", dispute("needs_response")),
        ("evt_4", "refund.updated", refund("succeeded")),
        ("evt_3", "refund.created", refund("pending")),
        ("evt_2", "payment_intent.succeeded", paid.clone()),
        ("evt_1", "payment_intent.payment_failed", open),
    ] {
        world.deliver(0, &event(id, event_type, &object)).await.ok();
        assert_eq!(known(&world, id, "processed").await["outcome"], "told", "{event_type}");
    }
    balance_is(&world, CREDIT + 3_000).await;
    let list = json!({ "object": "list", "has_more": false, "data": [refund("succeeded")] });
    desk.shows("/v1/refunds", list);
    // A charge that does not say what was given back of it: that is looked up, and was known.
    let charge = json!({ "id": "ch_pi_1", "object": "charge", "amount_refunded": 2_000, "payment_intent": "pi_1" });
    world.deliver(0, &event("evt_7", "charge.refunded", &charge)).await.ok();
    known(&world, "evt_7", "processed").await;
    balance_is(&world, CREDIT + 3_000).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_concerns_nobody_here_is_passed_over_and_counted() {
    let desk = Desk::start().await;
    let world = desk.plan(World::plan()).start().await;
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
        world.deliver(0, &event(id, event_type, &object)).await.ok();
        assert_eq!(known(&world, id, "processed").await["outcome"], outcome, "{event_type}");
    }
    assert_eq!(counted(&world, "webhook_not_ours_total").await, 2);
    assert_eq!(counted(&world, "webhook_processed_success_total").await, 3);
    balance_is(&world, CREDIT).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_differs_from_the_payment_waits_for_an_operator_and_moves_no_money() {
    let desk = Desk::start().await;
    let world = desk.plan(World::plan().policy("billing.webhook_max_attempts", 1)).start().await;
    let payment = world.payment_under_way("user", 5_000, "pi_1").await;
    let paid = intent("pi_1", payment, 5_000, "succeeded");
    let mut other_currency = paid.clone();
    other_currency["currency"] = json!("eur");
    for (id, object) in [("evt_1", other_currency), ("evt_2", intent("pi_1", payment, 4_999, "succeeded"))] {
        world.deliver(0, &event(id, "payment_intent.succeeded", &object)).await.ok();
        let dead = known(&world, id, "dead").await;
        assert_eq!((dead["overdue"].as_bool(), dead["attempts"].as_u64()), (Some(true), Some(1)));
        assert!(dead["last_error"].as_str().unwrap().contains("5000"), "{dead}");
    }
    assert_eq!(counted(&world, "webhook_processing_failures_total").await, 2);
    balance_is(&world, CREDIT).await;
    let dead = world.admin.get(&format!("{EVENTS}?state=dead")).await.ok();
    let ids: Vec<_> =
        dead["items"].as_array().unwrap().iter().map(|it| it["id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(ids.len(), 2);
    let why = json!({ "reason": "looked at it at the processor" });
    world.admin.post(&format!("{EVENTS}/{}/retry", ids[0]), &why).await.ok();
    known(&world, "evt_1", "dead").await;
    let dismissed = world.admin.post(&format!("{EVENTS}/{}/dismiss", ids[1]), &why).await.ok();
    assert_eq!(dismissed["state"], "dismissed");
    // Nor does the money of a payment that was lost here: whose it is somebody has to find out.
    let lost = intent("pi_9", domain::PaymentId(uuid::Uuid::now_v7()), 5_000, "succeeded");
    world.deliver(0, &event("evt_4", "payment_intent.succeeded", &lost)).await.ok();
    let dead = known(&world, "evt_4", "dead").await;
    assert!(dead["last_error"].as_str().unwrap().contains("is not here"), "{dead}");
    // The right one is heard as ever.
    world.deliver(0, &event("evt_3", "payment_intent.succeeded", &paid)).await.ok();
    balance_is(&world, CREDIT + 5_000).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_dies_between_receipt_and_processing_loses_nothing() {
    let desk = Desk::start().await;
    let mut world = desk.plan(World::plan()).start().await;
    let payment = world.payment_under_way("user", 5_000, "pi_1").await;
    let paid = event("evt_1", "payment_intent.succeeded", &intent("pi_1", payment, 5_000, "succeeded"));
    // Each commit takes a while, so that there is a between.
    world.slow_commits_by(Duration::from_millis(200)).await;
    world.deliver(0, &paid).await.ok();
    world.kill9_replica(0);
    assert_eq!(world.steps_so_far("processor_event", "receive").await, 1, "what was answered is stored");
    assert_eq!(world.steps_so_far("processor_event", "processed").await, 0, "and nothing more");
    world.restart_replica(0).await;
    known(&world, "evt_1", "processed").await;
    balance_is(&world, CREDIT + 5_000).await;
    assert_eq!(postings(&world).await, [("deposit".to_owned(), 5_000)]);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_postgres_is_away_the_processor_is_told_to_send_again_and_nothing_is_lost() {
    let desk = Desk::start().await;
    let mut world = desk.plan(World::plan()).start().await;
    let payment = world.payment_under_way("user", 5_000, "pi_1").await;
    let paid = event("evt_1", "payment_intent.succeeded", &intent("pi_1", payment, 5_000, "succeeded"));
    world.postgres.stop().await;
    let answer = world.deliver(0, &paid).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer}");
    assert!(answer.headers.contains_key("retry-after"));
    assert!(counted(&world, "webhook_persist_failures_total").await >= 1);
    world.postgres.start_again().await.unwrap();
    world.deliver_until_taken(0, &paid).await;
    balance_is(&world, CREDIT + 5_000).await;
    assert_eq!(postings(&world).await, [("deposit".to_owned(), 5_000)]);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_may_take_in_webhooks_and_do_nothing_else() {
    let desk = Desk::start().await;
    let plan = desk.plan(World::plan().replicas(2)).variable_of(1, "SVC_ROLES", "webhook");
    let world = plan.start().await;
    let payment = world.payment_under_way("user", 5_000, "pi_1").await;
    let paid = event("evt_1", "payment_intent.succeeded", &intent("pi_1", payment, 5_000, "succeeded"));
    // Whoever stores stands still for a while: it is answered when it is stored, and not before.
    world.signal_replica(0, Signal::SIGSTOP);
    let began = Instant::now();
    let (answer, ()) = tokio::join!(world.deliver(1, &paid), async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        world.signal_replica(0, Signal::SIGCONT);
    });
    assert!(began.elapsed() >= Duration::from_secs(1) && began.elapsed() < PATIENCE);
    if !answer.status.is_success() {
        world.deliver_until_taken(1, &paid).await;
    }
    balance_is(&world, CREDIT + 5_000).await;
    world.end().await;
}
