//! Payments as their payers see them. The callers are of the organisation `acme`, whose account gets the money; the processor is a fake.

use super::billing::ACCOUNTS;
use super::harness::{ApiHarness, TestResponse, payments_at};
use crate::app_state::Payments;
use crate::payment_processor::fake::FakeProcessor;
use crate::payment_processor::{PriorCheckout, ProcessorError};
use domain::PaymentId;
use domain::money::Currency;
use domain::payment::{Fact, Payment, PaymentFailure, ReversalStep};
use domain::policy::PolicyKey;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use uuid::Uuid;

pub(super) const CHECKOUT: &str = "/api/v1/billing/checkout-sessions";
pub(super) const PAYMENTS: &str = "/api/v1/billing/payments";

pub(super) fn checkout_body(amount: impl Into<Value>) -> Value {
    json!({
        "amount_minor": amount.into(),
        "success_url": "https://console.example/paid?of=1",
        "cancel_url": "http://localhost:3000/billing",
    })
}

pub(super) async fn checkout(api: &ApiHarness, key: &str, body: &Value) -> TestResponse {
    api.post(CHECKOUT).user("ann").key(key).json(body).send().await
}

pub(super) fn id_of(answer: &TestResponse) -> PaymentId {
    answer.is(201)["id"].as_str().unwrap().parse().unwrap()
}

/// The processor reports the payment, and the account gets the deposit.
pub(super) async fn pay(api: &ApiHarness, processor: &FakeProcessor, id: PaymentId) {
    let (processor_id, amount_minor) = processor.opened_for(id).unwrap();
    let currency = Currency::parse("EUR").unwrap();
    let paid = Fact::Paid { processor_id, amount_minor, currency, charge_id: Some("ch_1".into()), presented: None };
    api.ask_as_system::<Payment>(id.0, paid).await;
    api.wait_until_payment(id, "deposited").await;
}

/// A deposited payment of this amount.
pub(super) async fn deposited(api: &ApiHarness, processor: &FakeProcessor, key: &str, amount: i64) -> PaymentId {
    let id = id_of(&checkout(api, key, &checkout_body(amount)).await);
    pay(api, processor, id).await;
    id
}

#[tokio::test]
async fn refusals_of_an_amount_name_one_limit() {
    let (_, api) = ApiHarness::with_fake_processor().await;
    for (at, amount) in [0, -1, 999, 100_001, 100_000_001, i64::MAX].into_iter().enumerate() {
        let refused = checkout(&api, &format!("k{at}"), &checkout_body(amount)).await;
        assert_eq!(refused.refused(400, "invalid_request")["field"], "amount_minor", "{amount}: {}", refused.body);
        let message = refused.body["message"].as_str().unwrap();
        assert!(message.contains("from 10.00 EUR to 1000.00 EUR"), "{amount}: {message}");
    }
}

#[tokio::test]
async fn payment_is_created_paid_and_deposited() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    let begun = checkout(&api, "k", &checkout_body(5_000)).await;
    let id = id_of(&begun);
    assert_eq!(begun.body["url"], format!("https://api.gpu.example/billing/checkout/{id}#pi_1_secret_x"));
    assert_eq!(begun.headers["cache-control"], "no-store");
    assert!(begun.body["expires_at"].is_string());
    let shown = api.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await;
    assert_eq!((&shown.is(200)["state"], &shown.body["left_minor"]), (&json!("open"), &json!(0)));
    let balance = api.get("/api/v1/billing/balance").user("ann").send().await;
    assert_eq!(balance.is(200)["currency"], Value::Null, "nothing was paid yet");

    let declined =
        Fact::NotPaid { processor_id: "pi_1".into(), outcome: PaymentFailure::Declined, why: "card_declined".into() };
    api.ask_as_system::<Payment>(id.0, declined).await;
    let shown = api.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await;
    assert_eq!((&shown.is(200)["state"], &shown.body["reason"]), (&json!("open"), &json!("card_declined")));

    pay(&api, &processor, id).await;
    let balance = api.get("/api/v1/billing/balance").user("ann").send().await;
    assert_eq!((&balance.is(200)["balance_minor"], &balance.body["currency"]), (&json!(5_000), &json!("EUR")));
    let ledger = api.get("/api/v1/billing/ledger").user("ann").send().await;
    let posting = &ledger.is(200)["items"][0];
    assert_eq!((&posting["kind"], &posting["payment_id"]), (&json!("deposit"), &json!(id)));
    let mut shown = api.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await.is(200).clone();
    for varies in ["id", "account_id", "created_at", "paid_at", "deposited_at"] {
        assert!(shown[varies].is_string(), "{varies}");
        shown[varies] = "<varies>".into();
    }
    insta::assert_json_snapshot!("payment", shown);
}

#[tokio::test]
async fn payment_and_refund_in_a_currency_of_three_decimals_end_with_a_zero() {
    let (processor, currency) = (FakeProcessor::default(), Currency::parse("KWD").unwrap());
    let payments = Payments { currency: currency.clone(), ..payments_at(&processor) };
    let api = ApiHarness::with_payments(payments).await;
    let refused = checkout(&api, "k", &checkout_body(5_123)).await;
    refused.refused(400, "invalid_request");
    assert!(refused.line().contains("`amount_minor`") && refused.line().contains("5130"), "{}", refused.line());
    assert_eq!(processor.counts(), (0, 0));

    let id = id_of(&checkout(&api, "l", &checkout_body(5_130)).await);
    let (processor_id, amount_minor) = processor.opened_for(id).unwrap();
    let paid = Fact::Paid { processor_id, amount_minor, currency, charge_id: Some("ch_1".into()), presented: None };
    api.ask_as_system::<Payment>(id.0, paid).await;
    api.wait_until_payment(id, "deposited").await;
    let refund = async |by: &'static str, amount: i64| {
        let body = json!({"payment_id": id, "amount_minor": amount, "reason": "r"});
        api.post("/api/v1/billing/refunds").user(by).key(&format!("refund of {amount}")).json(&body).send().await
    };
    refund("ann", 1_234).await.refused(400, "invalid_request");
    refund("bob", 1_234).await.refused(404, "not_found");
    assert_eq!(refund("ann", 1_230).await.is(201)["amount_minor"], 1_230);
}

#[tokio::test]
async fn checkout_uses_the_page_of_a_processor_that_has_one() {
    let processor = FakeProcessor::hosted();
    let api = ApiHarness::with_processor(&processor).await;
    let begun = checkout(&api, "k", &checkout_body(5_000)).await;
    assert_eq!(begun.is(201)["url"], "https://pay.processor.example/pi_1");
}

#[tokio::test]
async fn concurrent_checkouts_with_one_key_make_one_payment_and_the_secret_is_not_stored() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    api.post(CHECKOUT).user("ann").json(&checkout_body(5_000)).send().await.refused(400, "invalid_request");
    let body = checkout_body(5_000);
    let (one, other) = tokio::join!(checkout(&api, "k", &body), checkout(&api, "k", &body));
    let answers: Vec<_> = [one, other].into_iter().filter(|answer| answer.status != 409).collect();
    let repeated = checkout(&api, "k", &checkout_body(5_000)).await;
    assert!(repeated.is_replayed());
    for answer in &answers {
        assert_eq!((id_of(answer), &answer.body["url"]), (id_of(&repeated), &repeated.body["url"]));
    }
    let (opened, canceled) = processor.counts();
    assert_eq!(opened - canceled, 1, "the request that opened a second checkout has canceled it");
    assert!(matches!(processor.objects().checkouts.last(), Some(PriorCheckout::Known(id)) if id == "pi_1"));
    checkout(&api, "k", &checkout_body(5_001)).await.refused(422, "idempotency_key_reused");
    // The secret of the page is not stored anywhere.
    let listed = api.get(PAYMENTS).user("ann").send().await;
    assert_eq!(listed.is(200)["items"].as_array().unwrap().len(), 1);
    assert!(!listed.body.to_string().contains("secret"));
    let stored = api.database_dump();
    assert!(stored.contains("https://console.example/paid") && !stored.contains("_secret_x"));

    // A payment that was made in the meantime is not repeated.
    let id = id_of(&repeated);
    pay(&api, &processor, id).await;
    let late = checkout(&api, "k", &checkout_body(5_000)).await;
    assert_eq!((&late.is(201)["url"], late.is_replayed()), (&json!("https://console.example/paid?of=1"), true));
    assert_eq!(api.get("/api/v1/billing/balance").user("ann").send().await.is(200)["balance_minor"], 5_000);
}

#[tokio::test]
async fn key_of_a_checkout_for_one_organization_begins_none_for_another() {
    let processor = FakeProcessor::default();
    let api = ApiHarness::with_processor(&processor).await;
    let of = async |org: &str, key: &str| {
        let body = checkout_body(5_000);
        api.post(CHECKOUT).by(&api.token_of("ann", org)).key(key).json(&body).send().await
    };
    let first = of("acme", "k").await;
    first.is(201);
    of("umbrella", "k").await.refused(422, "idempotency_key_reused");
    let (again, other) = (of("acme", "k").await, of("umbrella", "l").await);
    assert_eq!(id_of(&again), id_of(&first));
    other.is(201);
    assert_ne!(id_of(&other), id_of(&first));
}

#[tokio::test]
async fn repeated_checkout_of_a_paid_payment_redirects_once_the_webhook_arrives() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    let body = checkout_body(5_000);
    let id = id_of(&checkout(&api, "k", &body).await);
    processor.set_paid("pi_1");
    let began = Instant::now();
    let soon = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        pay(&api, &processor, id).await;
        began.elapsed()
    };
    let (again, paid_after) = tokio::join!(checkout(&api, "k", &body), soon);
    // A checkout waits 3 s for the webhook, and a pause of the machine may delay it for longer.
    let again = if paid_after < Duration::from_secs(2) { again } else { checkout(&api, "k", &body).await };
    assert_eq!(again.is(201)["url"], "https://console.example/paid?of=1");
    // Where no webhook arrives, the response says where to look.
    let other = id_of(&checkout(&api, "l", &body).await);
    processor.set_paid("pi_2");
    let untold = checkout(&api, "l", &body).await;
    assert_eq!(untold.refused(409, "state_conflict")["payment_id"], json!(other));
}

#[tokio::test]
async fn lost_processor_response_is_looked_up() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    processor.lose_next_answer();
    let lost = checkout(&api, "k", &checkout_body(5_000)).await;
    lost.refused(502, "upstream_error");
    let found = checkout(&api, "k", &checkout_body(5_000)).await;
    assert!(found.is_replayed() && processor.opened_for(id_of(&found)).is_some());
    assert_eq!(processor.counts(), (1, 0));
    assert!(matches!(processor.objects().checkouts[..], [PriorCheckout::Nothing, PriorCheckout::Since(_)]));
}

#[tokio::test]
async fn failing_processor_is_an_upstream_error_and_a_missing_one_is_reported() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    let refused = ProcessorError::Refused { code: Some("amount_too_small".into()), why: "sk_test_0: no".into() };
    let mut lines = Vec::new();
    for error in [refused, ProcessorError::Later("busy".into()), ProcessorError::Unknown("reset".into())] {
        processor.fail_next(error);
        let answer = checkout(&api, "k", &checkout_body(5_000)).await;
        answer.refused(502, "upstream_error");
        lines.push(answer.line());
    }
    assert_eq!(processor.counts(), (0, 0));
    // The same request succeeds once the processor does.
    checkout(&api, "k", &checkout_body(5_000)).await.is(201);
    let without = ApiHarness::new().await;
    let answer = checkout(&without, "k", &checkout_body(5_000)).await;
    answer.refused(503, "service_unavailable");
    lines.push(answer.line());
    insta::assert_snapshot!("without_a_processor", lines.join("\n"));
}

#[tokio::test]
async fn invalid_checkout_is_refused_by_field_name() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    let mut lines = Vec::new();
    for amount in ["-1", "0", "9223372036854775808", "1e9", "1000.5", "\"10\"", "null", "999", "100001"] {
        let body = checkout_body(0).to_string().replace("\"amount_minor\":0", &format!("\"amount_minor\":{amount}"));
        let answer = api.post(CHECKOUT).user("ann").key(amount).text(body).send().await;
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
            let mut body = checkout_body(5_000);
            body[field] = url.into();
            let answer = checkout(&api, "k", &body).await;
            answer.refused(400, "invalid_request");
            lines.push(format!("{url}: {}", answer.line()));
        }
    }
    let mut long = checkout_body(5_000);
    long["success_url"] = format!("https://console.example/{}", "a".repeat(2_048)).into();
    checkout(&api, "k", &long).await.refused(400, "invalid_request");
    let mut dollars = checkout_body(5_000);
    dollars["currency"] = "USD".into();
    let answer = checkout(&api, "dollars", &dollars).await;
    assert_eq!(answer.refused(409, "state_conflict")["currency"], "EUR");
    lines.push(format!("dollars: {}", answer.line()));
    assert_eq!(processor.counts(), (0, 0), "nothing of it reached the processor");
    insta::assert_snapshot!("refused_payments", lines.join("\n"));

    api.set_policy(PolicyKey::BillingMinimumDeposit, 50);
    let mut euros = checkout_body(50);
    euros["currency"] = "EUR".into();
    checkout(&api, "k", &euros).await.is(201);
}

#[tokio::test]
async fn open_payments_per_user_are_limited() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    api.set_policy(PolicyKey::BillingOpenPaymentsPerUser, 2);
    let first = id_of(&checkout(&api, "k", &checkout_body(5_000)).await);
    checkout(&api, "l", &checkout_body(5_000)).await.is(201);
    let refused = checkout(&api, "m", &checkout_body(5_000)).await;
    assert_eq!(refused.refused(409, "state_conflict")["policy_key"], "billing.open_payments_per_user");
    assert_eq!(processor.counts(), (2, 0), "nothing of it reached the processor");
    // A replay is answered, and a paid payment frees a slot for another one.
    assert!(checkout(&api, "l", &checkout_body(5_000)).await.is_replayed());
    pay(&api, &processor, first).await;
    assert!(checkout(&api, "m", &checkout_body(5_000)).await.is_replayed(), "the refusal stays that request's answer");
    checkout(&api, "o", &checkout_body(5_000)).await.is(201);
    checkout(&api, "n", &checkout_body(5_000)).await.refused(409, "state_conflict");
    // The limit is per user, and not per shared account.
    api.post(CHECKOUT).user("bob").key("k").json(&checkout_body(5_000)).send().await.is(201);
}

#[tokio::test]
async fn payer_gets_the_address_of_an_open_payment_again_and_cancels_it_to_begin_another() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    api.set_policy(PolicyKey::BillingOpenPaymentsPerUser, 1);
    let begun = checkout(&api, "k", &checkout_body(5_000)).await;
    let id = id_of(&begun);
    let (again, cancel) = (format!("{PAYMENTS}/{id}/checkout-session"), format!("{PAYMENTS}/{id}/cancel"));
    let resumed = api.post(&again).user("ann").send().await;
    assert_eq!(resumed.is(200), &begun.body);
    assert_eq!(resumed.headers["cache-control"], "no-store");
    assert!(matches!(processor.objects().checkouts.last(), Some(PriorCheckout::Known(id)) if id == "pi_1"));
    // bob is of the same organisation, and sees the payment; the address and the decision are ann's.
    for other in ["bob", "root"] {
        api.post(&again).user(other).send().await.refused(404, "not_found");
        api.post(&cancel).user(other).send().await.refused(404, "not_found");
    }

    let refused = checkout(&api, "l", &checkout_body(5_000)).await;
    assert!(refused.line().contains("pay or cancel one"), "{}", refused.line());
    // Where the processor gives no answer, the payment stays as it is.
    processor.fail_next(ProcessorError::Later("busy".into()));
    api.post(&cancel).user("ann").key("c").send().await.refused(502, "upstream_error");
    assert_eq!(api.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await.is(200)["state"], "open");
    let canceled = api.post(&cancel).user("ann").key("d").send().await;
    assert_eq!(
        (&canceled.is(200)["state"], &canceled.body["reason"]),
        (&json!("canceled"), &json!("canceled by its payer"))
    );
    assert_eq!(processor.counts(), (1, 1), "it cannot be paid any more");
    assert!(api.post(&cancel).user("ann").key("d").send().await.is_replayed());
    assert_eq!(api.post(&cancel).user("ann").send().await.is(200)["state"], "canceled");
    assert_eq!(api.post(&again).user("ann").send().await.refused(409, "state_conflict")["state"], "canceled");
    let log = api.get("/api/v1/admin/audit-log?action=payments.cancel").admin().send().await;
    assert_eq!(log.is(200)["items"].as_array().unwrap().len(), 1, "{log:?}");
    checkout(&api, "m", &checkout_body(5_000)).await.is(201);
}

#[tokio::test]
async fn payment_whose_opening_was_lost_is_canceled_and_a_paid_one_is_not() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    processor.lose_next_answer();
    checkout(&api, "k", &checkout_body(5_000)).await.refused(502, "upstream_error");
    let listed = api.get(&format!("{PAYMENTS}?state=created")).user("ann").send().await;
    let lost = listed.is(200)["items"][0]["id"].as_str().unwrap().to_owned();
    let canceled = api.post(&format!("{PAYMENTS}/{lost}/cancel")).user("ann").send().await;
    assert_eq!((&canceled.is(200)["state"], processor.counts()), (&json!("canceled"), (1, 1)));

    // It is paid at the processor, and its webhook has not arrived.
    let id = id_of(&checkout(&api, "l", &checkout_body(6_000)).await);
    let cancel = format!("{PAYMENTS}/{id}/cancel");
    processor.set_paid(&processor.opened_for(id).unwrap().0);
    let late = api.post(&cancel).user("ann").send().await;
    assert_eq!(late.refused(409, "state_conflict")["payment_id"], json!(id));
    assert!(late.line().contains("paid a moment ago"), "{}", late.line());
    pay(&api, &processor, id).await;
    assert_eq!(api.post(&cancel).user("ann").send().await.refused(409, "state_conflict")["state"], "deposited");
    api.post(&format!("{PAYMENTS}/{}/cancel", Uuid::from_u128(7))).user("ann").send().await.refused(404, "not_found");
}

#[tokio::test]
async fn payment_in_another_currency_is_shown_as_refunded() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    let id = id_of(&checkout(&api, "k", &checkout_body(5_000)).await);
    api.bind("biller", "billing_operations").await.is(201);
    let dollars = json!({"org_id": "acme", "currency": "USD"});
    let account = api.post(ACCOUNTS).user("biller").json(&dollars).send().await.is(201)["id"].clone();
    let gift = json!({"amount_minor": 700, "currency": "USD", "reason": "a gift"});
    let adjustments = format!("{ACCOUNTS}/{}/adjustments", account.as_str().unwrap());
    api.post(&adjustments).user("biller").key("a").json(&gift).send().await.is(201);
    let paid = Fact::Paid {
        processor_id: processor.opened_for(id).unwrap().0,
        amount_minor: 5_000,
        currency: Currency::parse("EUR").unwrap(),
        charge_id: None,
        presented: None,
    };
    api.ask_as_system::<Payment>(id.0, paid).await;
    api.wait_until_payment(id, "refused").await;
    let shown = api.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await;
    assert_eq!((&shown.is(200)["left_minor"], &shown.body["refunds"][0]["state"]), (&json!(0), &json!("pending")));
    assert_eq!(shown.body["refunds"][0]["amount_minor"], 5_000);
    assert!(shown.body["reason"].as_str().unwrap().contains("USD"), "{shown:?}");
    let repeated = checkout(&api, "k", &checkout_body(5_000)).await;
    assert_eq!(repeated.refused(409, "state_conflict")["state"], "refused");
    let balance = api.get("/api/v1/billing/balance").user("ann").send().await;
    assert_eq!((&balance.is(200)["balance_minor"], &balance.body["currency"]), (&json!(700), &json!("USD")));
}

#[tokio::test]
async fn checkout_of_an_expired_payment_needs_a_new_payment() {
    let (_, api) = ApiHarness::with_fake_processor().await;
    let id = id_of(&checkout(&api, "k", &checkout_body(5_000)).await);
    let canceled =
        Fact::NotPaid { processor_id: "pi_1".into(), outcome: PaymentFailure::Canceled, why: "by ann".into() };
    api.ask_as_system::<Payment>(id.0, canceled).await;
    let repeated = checkout(&api, "k", &checkout_body(5_000)).await;
    assert_eq!(repeated.refused(409, "state_conflict")["state"], "canceled");
    assert!(repeated.is_replayed());
    assert_ne!(id_of(&checkout(&api, "l", &checkout_body(5_000)).await), id);
    let canceled = api.get(&format!("{PAYMENTS}?state=canceled")).user("ann").send().await;
    let items = canceled.is(200)["items"].as_array().unwrap();
    assert_eq!((items.len(), &items[0]["id"], &items[0]["reason"]), (1, &json!(id), &json!("by ann")));
    api.get(&format!("{PAYMENTS}?state=lost")).user("ann").send().await.refused(400, "invalid_request");
}

#[tokio::test]
async fn payments_are_visible_to_the_account_holder_and_operators() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    let first = deposited(&api, &processor, "k", 5_000).await;
    let second = id_of(&checkout(&api, "l", &checkout_body(6_000)).await);
    // bob is of the same organisation.
    let page = api.get(&format!("{PAYMENTS}?limit=1")).user("bob").send().await;
    assert_eq!(page.is(200)["items"][0]["id"], json!(first));
    let token = page.body["next_page"].as_str().unwrap();
    let rest = api.get(&format!("{PAYMENTS}?limit=1&page_token={token}")).user("bob").send().await;
    assert_eq!((&rest.is(200)["items"][0]["id"], &rest.body["next_page"]), (&json!(second), &Value::Null));
    api.get(&format!("{PAYMENTS}/{first}")).user("bob").send().await.is(200);
    let of_another = api.token_of("eve", "umbrella");
    api.get(&format!("{PAYMENTS}/{first}")).by(&of_another).send().await.refused(404, "not_found");
    assert_eq!(api.get(PAYMENTS).by(&of_another).send().await.is(200)["items"], json!([]));
    api.get(&format!("{PAYMENTS}/{first}")).admin().send().await.is(200);

    let account = page.body["items"][0]["account_id"].as_str().unwrap();
    let of_account = format!("/api/v1/admin/billing/accounts/{account}/payments");
    api.get(&of_account).user("ann").send().await.refused(403, "forbidden");
    api.bind("biller", "billing_operations").await.is(201);
    let all = api.get(&of_account).user("biller").send().await;
    assert_eq!(all.is(200)["items"].as_array().unwrap().len(), 2);
    let of_biller = api.token_of("biller", "umbrella");
    assert_eq!(api.get(&format!("{PAYMENTS}/{first}")).by(&of_biller).send().await.is(200)["id"], json!(first));
    api.bind("auditor", "auditor").await.is(201);
    let of_auditor = api.token_of("auditor", "umbrella");
    api.get(&format!("{PAYMENTS}/{first}")).by(&of_auditor).send().await.refused(404, "not_found");
    let nobody = format!("/api/v1/admin/billing/accounts/{}/payments", Uuid::from_u128(7));
    api.get(&nobody).admin().send().await.refused(404, "not_found");
}

#[tokio::test]
async fn operator_ends_the_review_of_a_payment_that_no_event_reported() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    api.bind("biller", "billing_operations").await.is(201);
    let biller = || api.token("biller", &["user"]);
    let path = |id: PaymentId, way: &str| format!("/api/v1/admin/billing/payments/{id}/{way}");
    let decision = |review: &str| json!({ "review": review, "reason": "its worth was credited" });
    let order =
        |id, way, key: &str, review: &str| api.post(&path(id, way)).by(&biller()).key(key).json(&decision(review));
    let [first, second] = ["a", "b"].map(|key| (key.to_owned(), checkout_body(5_000)));
    let first = id_of(&checkout(&api, &first.0, &first.1).await);
    let second = id_of(&checkout(&api, &second.0, &second.1).await);
    let mut reviews = Vec::new();
    for id in [first, second] {
        order(id, "settle-review", &format!("early {id}"), "pi_1:4200:GBP").send().await.refused(409, "state_conflict");
        let (processor_id, _) = processor.opened_for(id).unwrap();
        let currency = Currency::parse("GBP").unwrap();
        let name = format!("{processor_id}:4200:GBP");
        api.ask_as_system::<Payment>(id.0, Fact::PaidOtherwise { processor_id, amount_minor: 4_200, currency }).await;
        // The operator sees what the decision has to name.
        let shown = api.get(&format!("{PAYMENTS}/{id}")).by(&biller()).send().await;
        assert_eq!(shown.is(200)["review"], json!(name));
        reviews.push(name);
    }
    let (of_first, of_second) = (&reviews[0], &reviews[1]);
    for way in ["settle-review", "dismiss-review"] {
        api.post(&path(first, way)).admin().json(&decision(of_first)).send().await.refused(403, "forbidden");
        api.post(&path(first, way)).user("ann").json(&decision(of_first)).send().await.refused(403, "forbidden");
        // A client of an earlier release names no review.
        for (without, field) in [(json!({ "review": of_first }), "reason"), (json!({ "reason": "r" }), "review")] {
            let refused = api
                .post(&path(first, way))
                .by(&biller())
                .key(&format!("{way} without {field}"))
                .json(&without)
                .send()
                .await;
            refused.refused(400, "invalid_request");
            let message = refused.body["message"].as_str().unwrap();
            assert!(message.contains(&format!("`{field}`")), "{message}");
        }
        for (n, bad) in ["", "pi_1", "pi_1:4200", ":4200:GBP", "pi_1:-1:GBP", "pi_1:4200:gbp", "pi 1:4200:GBP"]
            .into_iter()
            .enumerate()
        {
            let refused = api
                .post(&path(first, way))
                .by(&biller())
                .key(&format!("{way} bad {n}"))
                .json(&decision(bad))
                .send()
                .await;
            assert_eq!(refused.refused(400, "invalid_request")["field"], "review", "{bad}");
        }
        let nobody = PaymentId(Uuid::from_u128(7));
        order(nobody, way, &format!("nobody {way}"), of_first).send().await.refused(404, "not_found");
        let other = order(first, way, &format!("other {way}"), of_second).send().await;
        assert_eq!(other.refused(409, "state_conflict")["review"], json!(of_first));
    }
    let settled = order(first, "settle-review", "k1", of_first).send().await;
    assert_eq!((settled.is(200)["state"].as_str(), &settled.body["left_minor"]), (Some("canceled"), &json!(0)));
    assert!(settled.body["reason"].as_str().unwrap().contains("settled"), "{}", settled.body);
    assert_eq!(settled.body["review"], Value::Null);
    assert!(order(first, "settle-review", "k1", of_first).send().await.is_replayed());
    // The answer was lost, and other money came under review before it is repeated without its key.
    let (processor_id, currency) = ("pi_other".to_owned(), Currency::parse("GBP").unwrap());
    api.ask_as_system::<Payment>(first.0, Fact::PaidOtherwise { processor_id, amount_minor: 700, currency }).await;
    let repeated = order(first, "settle-review", "k2", of_first).send().await;
    assert_eq!(
        (&repeated.is(200)["state"], &repeated.body["review"]),
        (&json!("under_review"), &json!("pi_other:700:GBP"))
    );
    let refused = order(first, "dismiss-review", "k3", of_first).send().await;
    assert_eq!(refused.refused(409, "state_conflict")["decision"], "settled");
    assert_eq!(order(second, "dismiss-review", "k4", of_second).send().await.is(200)["state"], "canceled");
    assert_eq!(
        order(second, "settle-review", "k5", of_second).send().await.refused(409, "state_conflict")["decision"],
        "dismissed"
    );
    let log = api.get("/api/v1/admin/audit-log?target_kind=payment").admin().send().await;
    let rows = log.is(200)["items"].as_array().unwrap().clone();
    let is_of_a_review = |row: &&Value| row["action"].as_str().unwrap().ends_with("_review");
    let decisions: Vec<_> = rows.iter().filter(is_of_a_review).collect();
    let actions: Vec<_> = decisions.iter().map(|row| row["action"].as_str().unwrap()).collect();
    assert_eq!(actions, ["payments.dismiss_review", "payments.settle_review"]);
    assert_eq!(decisions[0]["metadata"]["reason"], "its worth was credited");
}

#[tokio::test]
async fn dispute_is_shown_at_its_payment() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    let id = deposited(&api, &processor, "k", 5_000).await;
    let currency = Currency::parse("EUR").unwrap();
    let opened = Fact::Reversed {
        reversal_id: "dp_1".into(),
        what: ReversalStep::DisputeOpened,
        amount_minor: 5_000,
        currency,
        of: None,
    };
    api.ask_as_system::<Payment>(id.0, opened).await;
    let shown = api.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await;
    let mut reversal = shown.is(200)["reversals"][0].clone();
    reversal["heard_at"] = "<varies>".into();
    let expected =
        json!({"id": "dp_1", "kind": "dispute", "amount_minor": 5_000, "is_undone": false, "heard_at": "<varies>"});
    assert_eq!((&reversal, &shown.body["left_minor"]), (&expected, &json!(0)));
}
