//! Payments as their payers see them. Who asks is of the organisation `acme`, whose account it goes into; the processor is a till of the test.

use super::billing::ACCOUNTS;
use super::till::{Failure, Till};
use super::world::{Answer, World};
use crate::processor::{Before, ProcessorError};
use domain::PaymentId;
use domain::money::Currency;
use domain::payment::{Command, Outcome, Payment, What};
use domain::policy::Key;
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

pub(super) const CHECKOUT: &str = "/api/v1/billing/checkout-sessions";
pub(super) const PAYMENTS: &str = "/api/v1/billing/payments";

pub(super) fn wanted(amount: impl Into<Value>) -> Value {
    json!({
        "amount_minor": amount.into(),
        "success_url": "https://console.example/paid?of=1",
        "cancel_url": "http://localhost:3000/billing",
    })
}

pub(super) async fn checkout(world: &World, key: &str, body: &Value) -> Answer {
    world.post(CHECKOUT).user("ann").key(key).json(body).send().await
}

pub(super) fn id_of(answer: &Answer) -> PaymentId {
    answer.is(201)["id"].as_str().unwrap().parse().unwrap()
}

/// The processor says that it has the money, and the account gets it.
pub(super) async fn pay(world: &World, till: &Till, id: PaymentId) {
    let (processor_id, amount_minor) = till.opened_for(id).unwrap();
    let currency = Currency::parse("EUR").unwrap();
    let paid = Command::Paid { processor_id, amount_minor, currency, charge_id: Some("ch_1".into()) };
    world.tell::<Payment>(id.0, paid).await;
    world.until_payment(id, "deposited").await;
}

/// A payment of so much that is in the account.
pub(super) async fn deposited(world: &World, till: &Till, key: &str, amount: i64) -> PaymentId {
    let id = id_of(&checkout(world, key, &wanted(amount)).await);
    pay(world, till, id).await;
    id
}

#[tokio::test]
async fn a_payment_is_begun_paid_and_in_the_account() {
    let till = Till::default();
    let world = World::with_till(&till).await;
    let begun = checkout(&world, "k", &wanted(5_000)).await;
    let id = id_of(&begun);
    assert_eq!(begun.body["url"], format!("https://api.gpu.example/billing/checkout/{id}#pi_1_secret_x"));
    assert_eq!(begun.headers["cache-control"], "no-store");
    assert!(begun.body["expires_at"].is_string());
    let shown = world.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await;
    assert_eq!((&shown.is(200)["state"], &shown.body["left_minor"]), (&json!("open"), &json!(0)));
    let balance = world.get("/api/v1/billing/balance").user("ann").send().await;
    assert_eq!(balance.is(200)["currency"], Value::Null, "nothing was paid yet");

    let declined =
        Command::NotPaid { processor_id: "pi_1".into(), outcome: Outcome::Declined, why: "card_declined".into() };
    world.tell::<Payment>(id.0, declined).await;
    let shown = world.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await;
    assert_eq!((&shown.is(200)["state"], &shown.body["reason"]), (&json!("open"), &json!("card_declined")));

    pay(&world, &till, id).await;
    let balance = world.get("/api/v1/billing/balance").user("ann").send().await;
    assert_eq!((&balance.is(200)["balance_minor"], &balance.body["currency"]), (&json!(5_000), &json!("EUR")));
    let ledger = world.get("/api/v1/billing/ledger").user("ann").send().await;
    let posting = &ledger.is(200)["items"][0];
    assert_eq!((&posting["kind"], &posting["payment_id"]), (&json!("deposit"), &json!(id)));
    let mut shown = world.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await.is(200).clone();
    for varies in ["id", "account_id", "created_at", "paid_at", "deposited_at"] {
        assert!(shown[varies].is_string(), "{varies}");
        shown[varies] = "<varies>".into();
    }
    insta::assert_json_snapshot!("payment", shown);
}

#[tokio::test]
async fn where_the_processor_has_a_page_that_is_where_one_pays() {
    let till = Till::hosted();
    let world = World::with_till(&till).await;
    let begun = checkout(&world, "k", &wanted(5_000)).await;
    assert_eq!(begun.is(201)["url"], "https://pay.processor.example/pi_1");
}

#[tokio::test]
async fn two_requests_with_one_key_are_one_payment_and_the_secret_is_asked_for_again() {
    let till = Till::default();
    let world = World::with_till(&till).await;
    world.post(CHECKOUT).user("ann").json(&wanted(5_000)).send().await.refused(400, "invalid_request");
    let body = wanted(5_000);
    let (one, other) = tokio::join!(checkout(&world, "k", &body), checkout(&world, "k", &body));
    let answers: Vec<_> = [one, other].into_iter().filter(|answer| answer.status != 409).collect();
    let again = checkout(&world, "k", &wanted(5_000)).await;
    assert!(again.is_replayed());
    for answer in &answers {
        assert_eq!((id_of(answer), &answer.body["url"]), (id_of(&again), &again.body["url"]));
    }
    let (opened, canceled) = till.counts();
    assert_eq!(opened - canceled, 1, "whoever opened another one has canceled it");
    assert!(matches!(till.asked().last(), Some(Before::Known(id)) if id == "pi_1"));
    checkout(&world, "k", &wanted(5_001)).await.refused(422, "idempotency_key_reused");
    // Nothing that opens the page is at rest anywhere.
    let listed = world.get(PAYMENTS).user("ann").send().await;
    assert_eq!(listed.is(200)["items"].as_array().unwrap().len(), 1);
    assert!(!listed.body.to_string().contains("secret"));
    let stored = world.stored();
    assert!(stored.contains("https://console.example/paid") && !stored.contains("_secret_x"));

    // What was paid meanwhile is not paid again.
    let id = id_of(&again);
    pay(&world, &till, id).await;
    let late = checkout(&world, "k", &wanted(5_000)).await;
    assert_eq!((&late.is(201)["url"], late.is_replayed()), (&json!("https://console.example/paid?of=1"), true));
    assert_eq!(world.get("/api/v1/billing/balance").user("ann").send().await.is(200)["balance_minor"], 5_000);
}

#[tokio::test]
async fn who_asks_again_for_what_is_being_paid_is_sent_on_as_soon_as_that_is_told() {
    let till = Till::default();
    let world = World::with_till(&till).await;
    let body = wanted(5_000);
    let id = id_of(&checkout(&world, "k", &body).await);
    till.closes("pi_1");
    let soon = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        pay(&world, &till, id).await;
    };
    let (again, ()) = tokio::join!(checkout(&world, "k", &body), soon);
    assert_eq!(again.is(201)["url"], "https://console.example/paid?of=1");
    // Where nobody tells, it is said where to look.
    let other = id_of(&checkout(&world, "l", &body).await);
    till.closes("pi_2");
    let untold = checkout(&world, "l", &body).await;
    assert_eq!(untold.refused(409, "state_conflict")["payment_id"], json!(other));
}

#[tokio::test]
async fn an_answer_of_the_processor_that_was_lost_is_looked_for() {
    let till = Till::default();
    let world = World::with_till(&till).await;
    till.fails(Failure::LosesItsAnswer);
    let lost = checkout(&world, "k", &wanted(5_000)).await;
    lost.refused(502, "upstream_error");
    let found = checkout(&world, "k", &wanted(5_000)).await;
    assert!(found.is_replayed() && till.opened_for(id_of(&found)).is_some());
    assert_eq!(till.counts(), (1, 0));
    assert!(matches!(till.asked()[..], [Before::Nothing, Before::Since(_)]));
}

#[tokio::test]
async fn a_processor_that_fails_is_an_upstream_error_and_one_that_is_missing_is_said_so() {
    let till = Till::default();
    let world = World::with_till(&till).await;
    let refused = ProcessorError::Refused { code: Some("amount_too_small".into()), why: "sk_test_0: no".into() };
    let mut lines = Vec::new();
    for error in [refused, ProcessorError::Later("busy".into()), ProcessorError::Unknown("reset".into())] {
        till.fails(Failure::Fails(error));
        let answer = checkout(&world, "k", &wanted(5_000)).await;
        answer.refused(502, "upstream_error");
        lines.push(answer.line());
    }
    assert_eq!(till.counts(), (0, 0));
    // The same request gets through when the processor does.
    checkout(&world, "k", &wanted(5_000)).await.is(201);
    let without = World::new().await;
    let answer = checkout(&without, "k", &wanted(5_000)).await;
    answer.refused(503, "service_unavailable");
    lines.push(answer.line());
    insta::assert_snapshot!("without_a_processor", lines.join("\n"));
}

#[tokio::test]
async fn what_is_no_payment_is_refused_by_name() {
    let till = Till::default();
    let world = World::with_till(&till).await;
    let mut lines = Vec::new();
    for amount in ["-1", "0", "9223372036854775808", "1e9", "1000.5", "\"10\"", "null", "999", "100001"] {
        let body = wanted(0).to_string().replace("\"amount_minor\":0", &format!("\"amount_minor\":{amount}"));
        let answer = world.post(CHECKOUT).user("ann").key(amount).text(body).send().await;
        let details = answer.refused(400, "invalid_request");
        let policy = details["policy_key"].as_str().unwrap_or_default();
        lines.push(format!("{amount}: {} {policy}", answer.line()));
    }
    for url in [
        "http://console.example/",
        "javascript:alert(1)",
        "/billing",
        "https://ann@console.example/",
        "https://",
        "http://localhost.example/",
    ] {
        for field in ["success_url", "cancel_url"] {
            let mut body = wanted(5_000);
            body[field] = url.into();
            let answer = checkout(&world, "k", &body).await;
            answer.refused(400, "invalid_request");
            lines.push(format!("{url}: {}", answer.line()));
        }
    }
    let mut long = wanted(5_000);
    long["success_url"] = format!("https://console.example/{}", "a".repeat(2_048)).into();
    checkout(&world, "k", &long).await.refused(400, "invalid_request");
    let mut dollars = wanted(5_000);
    dollars["currency"] = "USD".into();
    let answer = checkout(&world, "dollars", &dollars).await;
    assert_eq!(answer.refused(409, "state_conflict")["currency"], "EUR");
    lines.push(format!("dollars: {}", answer.line()));
    assert_eq!(till.counts(), (0, 0), "nothing of it reached the processor");
    insta::assert_snapshot!("refused_payments", lines.join("\n"));

    world.set_policy(Key::BillingMinimumDeposit, 50);
    let mut euros = wanted(50);
    euros["currency"] = "EUR".into();
    checkout(&world, "k", &euros).await.is(201);
}

#[tokio::test]
async fn only_so_many_payments_wait_for_one_user() {
    let till = Till::default();
    let world = World::with_till(&till).await;
    world.set_policy(Key::BillingOpenPaymentsPerUser, 2);
    let first = id_of(&checkout(&world, "k", &wanted(5_000)).await);
    checkout(&world, "l", &wanted(5_000)).await.is(201);
    let refused = checkout(&world, "m", &wanted(5_000)).await;
    assert_eq!(refused.refused(409, "state_conflict")["policy_key"], "billing.open_payments_per_user");
    assert_eq!(till.counts(), (2, 0), "nothing of it reached the processor");
    // A repetition of what was begun is answered, and what is paid makes room for another request.
    assert!(checkout(&world, "l", &wanted(5_000)).await.is_replayed());
    pay(&world, &till, first).await;
    assert!(checkout(&world, "m", &wanted(5_000)).await.is_replayed(), "the refusal stays that request's answer");
    checkout(&world, "o", &wanted(5_000)).await.is(201);
    checkout(&world, "n", &wanted(5_000)).await.refused(409, "state_conflict");
    // Nobody is in the way of a colleague who shares the account.
    world.post(CHECKOUT).user("bob").key("k").json(&wanted(5_000)).send().await.is(201);
}

#[tokio::test]
async fn what_an_account_in_another_currency_cannot_have_is_shown_on_its_way_back() {
    let till = Till::default();
    let world = World::with_till(&till).await;
    let id = id_of(&checkout(&world, "k", &wanted(5_000)).await);
    world.bind("biller", "billing_operations").await.is(201);
    let dollars = json!({"org_id": "acme", "currency": "USD"});
    let account = world.post(ACCOUNTS).user("biller").json(&dollars).send().await.is(201)["id"].clone();
    let gift = json!({"amount_minor": 700, "currency": "USD", "reason": "a gift"});
    let adjustments = format!("{ACCOUNTS}/{}/adjustments", account.as_str().unwrap());
    world.post(&adjustments).user("biller").key("a").json(&gift).send().await.is(201);
    let paid = Command::Paid {
        processor_id: till.opened_for(id).unwrap().0,
        amount_minor: 5_000,
        currency: Currency::parse("EUR").unwrap(),
        charge_id: None,
    };
    world.tell::<Payment>(id.0, paid).await;
    world.until_payment(id, "refused").await;
    let shown = world.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await;
    assert_eq!((&shown.is(200)["left_minor"], &shown.body["refunds"][0]["state"]), (&json!(0), &json!("pending")));
    assert_eq!(shown.body["refunds"][0]["amount_minor"], 5_000);
    assert!(shown.body["reason"].as_str().unwrap().contains("USD"), "{shown:?}");
    let again = checkout(&world, "k", &wanted(5_000)).await;
    assert_eq!(again.refused(409, "state_conflict")["state"], "refused");
    let balance = world.get("/api/v1/billing/balance").user("ann").send().await;
    assert_eq!((&balance.is(200)["balance_minor"], &balance.body["currency"]), (&json!(700), &json!("USD")));
}

#[tokio::test]
async fn what_ended_before_it_was_paid_is_begun_anew() {
    let till = Till::default();
    let world = World::with_till(&till).await;
    let id = id_of(&checkout(&world, "k", &wanted(5_000)).await);
    let canceled = Command::NotPaid { processor_id: "pi_1".into(), outcome: Outcome::Canceled, why: "by ann".into() };
    world.tell::<Payment>(id.0, canceled).await;
    let again = checkout(&world, "k", &wanted(5_000)).await;
    assert_eq!(again.refused(409, "state_conflict")["state"], "canceled");
    assert!(again.is_replayed());
    assert_ne!(id_of(&checkout(&world, "l", &wanted(5_000)).await), id);
    let canceled = world.get(&format!("{PAYMENTS}?state=canceled")).user("ann").send().await;
    let items = canceled.is(200)["items"].as_array().unwrap();
    assert_eq!((items.len(), &items[0]["id"], &items[0]["reason"]), (1, &json!(id), &json!("by ann")));
    world.get(&format!("{PAYMENTS}?state=lost")).user("ann").send().await.refused(400, "invalid_request");
}

#[tokio::test]
async fn payments_are_seen_by_those_whose_account_it_is_and_by_operators() {
    let till = Till::default();
    let world = World::with_till(&till).await;
    let first = deposited(&world, &till, "k", 5_000).await;
    let second = id_of(&checkout(&world, "l", &wanted(6_000)).await);
    // bob is of the same organisation.
    let page = world.get(&format!("{PAYMENTS}?limit=1")).user("bob").send().await;
    assert_eq!(page.is(200)["items"][0]["id"], json!(first));
    let token = page.body["next_page"].as_str().unwrap();
    let rest = world.get(&format!("{PAYMENTS}?limit=1&page_token={token}")).user("bob").send().await;
    assert_eq!((&rest.is(200)["items"][0]["id"], &rest.body["next_page"]), (&json!(second), &Value::Null));
    world.get(&format!("{PAYMENTS}/{first}")).user("bob").send().await.is(200);
    let of_another = world.token_of("eve", "umbrella");
    world.get(&format!("{PAYMENTS}/{first}")).by(&of_another).send().await.refused(404, "not_found");
    assert_eq!(world.get(PAYMENTS).by(&of_another).send().await.is(200)["items"], json!([]));
    world.get(&format!("{PAYMENTS}/{first}")).admin().send().await.is(200);

    let account = page.body["items"][0]["account_id"].as_str().unwrap();
    let of_account = format!("/api/v1/admin/billing/accounts/{account}/payments");
    world.get(&of_account).user("ann").send().await.refused(403, "forbidden");
    world.bind("biller", "billing_operations").await.is(201);
    let all = world.get(&of_account).user("biller").send().await;
    assert_eq!(all.is(200)["items"].as_array().unwrap().len(), 2);
    let nobody = format!("/api/v1/admin/billing/accounts/{}/payments", Uuid::from_u128(7));
    world.get(&nobody).admin().send().await.refused(404, "not_found");
}

#[tokio::test]
async fn a_dispute_shows_at_its_payment() {
    let till = Till::default();
    let world = World::with_till(&till).await;
    let id = deposited(&world, &till, "k", 5_000).await;
    let currency = Currency::parse("EUR").unwrap();
    let opened =
        Command::Reversed { reversal_id: "dp_1".into(), what: What::DisputeOpened, amount_minor: 5_000, currency };
    world.tell::<Payment>(id.0, opened).await;
    let shown = world.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await;
    let mut reversal = shown.is(200)["reversals"][0].clone();
    reversal["heard_at"] = "<varies>".into();
    let expected =
        json!({"id": "dp_1", "kind": "dispute", "amount_minor": 5_000, "is_undone": false, "heard_at": "<varies>"});
    assert_eq!((&reversal, &shown.body["left_minor"]), (&expected, &json!(0)));
}
