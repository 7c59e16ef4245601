//! Payments over the public API, through a payment processor that somebody else wrote (localstripe): money comes in, is spent, comes in again
//! and goes back, and all of it adds up to the millionth.

use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use supervisors::dev::processor::intent_in;
use tests::world::client::{Answer, Client};
use tests::world::payments::Begun;
use tests::world::{CURRENCY, Plan, REGION, Rented, World, id_of};
use uuid::Uuid;

const BALANCE: &str = "/api/v1/billing/balance";
const CHECKOUT: &str = "/api/v1/billing/checkout-sessions";
const REFUNDS: &str = "/api/v1/billing/refunds";

/// A world whose windows last a second, without a grace after the last one, in which nobody has money and everybody can pay.
fn short_windows() -> Plan {
    World::plan()
        .penniless()
        .with_processor()
        .policy("billing.window_seconds", 1)
        .policy("billing.depletion_grace_seconds", 0)
        .policy("billing.minimum_deposit_minor", 50)
}

/// A SKU at 36,000 minor units an hour, 10 a second, of which a node has 8 GPUs.
async fn dear_sku(world: &mut World) -> Uuid {
    let sku = world.offer("dear", 8).await;
    price(world, sku, 36_000).await;
    sku
}

async fn price(world: &World, sku: Uuid, minor: i64) {
    let price = json!({ "price": { "currency": CURRENCY, "amount_minor_per_gpu_hour": minor } });
    world.admin.insist(Method::PATCH, &format!("/api/v1/admin/skus/{sku}"), Some(&price)).await.ok();
}

fn wanted(amount_minor: impl Into<Value>) -> Value {
    json!({
        "amount_minor": amount_minor.into(),
        "success_url": "https://console.example/paid",
        "cancel_url": "https://console.example/billing",
    })
}

async fn checkout(by: &Client, key: &str, body: &Value) -> Answer {
    by.send(by.request(Method::POST, CHECKOUT).header("Idempotency-Key", key).json(body)).await
}

fn micro(value: &Value) -> i64 {
    value.as_i64().unwrap_or_else(|| panic!("{value} is no amount"))
}

/// All of the user's postings, oldest first, each following from the one before; and what they come to by kind.
async fn ledger(by: &Client) -> (Vec<Value>, BTreeMap<String, i64>) {
    let (mut all, mut path) = (Vec::new(), "/api/v1/billing/ledger?limit=200".to_owned());
    loop {
        let page = by.get(&path).await.ok();
        all.extend(page["items"].as_array().unwrap().iter().cloned());
        match page["next_page"].as_str() {
            Some(token) => path = format!("/api/v1/billing/ledger?limit=200&page_token={token}"),
            None => break,
        }
    }
    all.reverse();
    let (mut sum, mut by_kind) = (0, BTreeMap::<String, i64>::new());
    for (number, posting) in (1..).zip(&all) {
        sum += micro(&posting["change_micro"]);
        assert_eq!((micro(&posting["number"]), micro(&posting["balance_micro"])), (number, sum), "{posting}");
        *by_kind.entry(posting["kind"].as_str().unwrap().to_owned()).or_default() += micro(&posting["change_micro"]);
    }
    assert_eq!(micro(&by.get(BALANCE).await.ok()["balance_micro"]), sum);
    (all, by_kind)
}

/// What an allocation that is over must have cost: its price from `active` to the release request.
fn owed(allocation: &Value, minor_per_hour: i64) -> i64 {
    let micros = |name: &str| {
        let at: chrono::DateTime<chrono::Utc> = allocation[name].as_str().unwrap().parse().unwrap();
        at.timestamp_micros()
    };
    minor_per_hour * (micros("release_requested_at") - micros("active_at")) / 3600
}

async fn rent(world: &World, gpus: u32) -> Rented {
    let rented = world.rent("dear", gpus).await;
    rented.expect_state("active").await;
    rented
}

async fn verified(world: &World) {
    let report = persistence::Reads::new(world.pool.clone()).verify_ledger().await.expect("the ledger can be read");
    assert!(report.holds() && report.difference() == 0, "{report:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_tops_up_rents_is_warned_is_depleted_tops_up_again_is_refunded_and_it_adds_up() {
    let mut world = short_windows().start().await;
    let sku = dear_sku(&mut world).await;
    world.node("dear").await;
    let user = world.user.clone();
    let mut ear = world.ear(0, "user").await;
    let nothing = json!({ "sku": "dear", "region_code": REGION, "gpu_count": 2 });
    user.post("/api/v1/allocations", &nothing).await.refused(402, "insufficient_balance");

    // 540 is above the threshold of 500, for two seconds.
    let first = world.top_up(540).await.id;
    let told = ear.told("billing.payment_deposited").await;
    assert_eq!((&told["data"]["payment_id"], &told["data"]["state"]), (&json!(first), &json!("deposited")), "{told}");
    let opened = user.get(BALANCE).await.ok();
    assert_eq!((&opened["balance_micro"], &opened["currency"]), (&json!(540_000_000), &json!(CURRENCY)), "{opened}");

    // It falls window by window; a price that changes meanwhile is for others.
    let rented = rent(&world, 2).await;
    let mut before = micro(&opened["balance_micro"]);
    for window in 1..=3 {
        let what = format!("window {window} is charged");
        let now = user.wait_until(BALANCE, &what, |it| micro(&it["balance_micro"]) < before).await;
        before = micro(&now["balance_micro"]);
        if window == 1 {
            price(&world, sku, 1).await;
        }
    }
    ear.told("billing.balance_low").await;
    ear.told("billing.balance_depleted").await;
    let released = rented.expect_state("released").await;
    let depleted = user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    assert_eq!(depleted["state"], "depleted", "{depleted}");
    assert!((0..20_000_000).contains(&micro(&depleted["balance_micro"])), "less than a window is left: {depleted}");
    let (all, kinds) = ledger(&user).await;
    let lost: i64 = all.iter().filter(|it| it["kind"] == "write_off").map(|it| micro(&it["amount_micro"])).sum();
    let used = 540_000_000 - micro(&depleted["balance_micro"]);
    assert_eq!((used + lost, kinds["deposit"]), (owed(&released, 72_000), 540_000_000), "every microsecond, once");
    assert!(all.len() > 10, "window by window: {} postings", all.len());

    // Money comes in again, and it goes on, at the price of now.
    let second = world.top_up(1_000).await.id;
    assert_eq!(user.get(BALANCE).await.ok()["state"], "open");
    let again = rent(&world, 8).await;
    again.release().await;
    let released = again.expect_state("released").await;
    let rest = user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    let cheap = owed(&released, 8);
    assert_eq!(micro(&rest["balance_micro"]), micro(&depleted["balance_micro"]) + 1_000_000_000 - cheap);

    // A part of it goes back, to the payer and once; of the first payment there is no more than what is not spent.
    let back = json!({ "payment_id": second, "amount_minor": 400, "reason": "it was too much" });
    let key = Uuid::new_v4().to_string();
    let ask = || user.send(user.request(Method::POST, REFUNDS).header("Idempotency-Key", &key).json(&back));
    let refund = ask().await.created();
    assert_eq!(id_of(&ask().await.created()), id_of(&refund));
    let told = ear.told("billing.refund_succeeded").await;
    assert_eq!(told["data"]["refund_id"], refund["id"], "{told}");
    let path = format!("/api/v1/billing/payments/{second}");
    let shown = user.wait_until(&path, "it is paid back", |it| it["refunds"][0]["state"] == "succeeded").await;
    assert_eq!((&shown["left_minor"], shown["refunds"].as_array().unwrap().len()), (&json!(600), 1), "{shown}");
    let too_much = json!({ "payment_id": first, "amount_minor": 540, "reason": "all of it" });
    let with_key = |body: &Value| {
        user.request(Method::POST, REFUNDS).header("Idempotency-Key", Uuid::new_v4().to_string()).json(body)
    };
    user.send(with_key(&json!({ "payment_id": second, "amount_minor": 601, "reason": "r" })))
        .await
        .refused(400, "invalid_request");
    let all_there = user.send(with_key(&json!({ "payment_id": second, "reason": "the rest" }))).await.created();
    assert_eq!(user.send(with_key(&too_much)).await.status, 402);

    // What came in, what was used, what went back and what is left are one sum.
    let (_, kinds) = ledger(&user).await;
    let balance = micro(&user.get(BALANCE).await.ok()["balance_micro"]);
    let given_back = 400_000_000 + micro(&all_there["amount_micro"]);
    assert_eq!((kinds["deposit"], kinds["refund"]), (1_540_000_000, -given_back), "{kinds:?}");
    assert_eq!(balance, 1_540_000_000 - used - cheap - given_back);
    verified(&world).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_top_ups_with_one_key_are_one_and_what_is_no_amount_is_none() {
    let mut world = short_windows().replicas(2).start().await;
    let user = world.user.clone();
    for amount in ["-1", "0", "9223372036854775808", "1e9", "\"10\"", "49", "100001"] {
        let body = wanted(0).to_string().replace("\"amount_minor\":0", &format!("\"amount_minor\":{amount}"));
        let request = user.request(Method::POST, CHECKOUT).header("Idempotency-Key", amount);
        let request = request.header("content-type", "application/json").body(body);
        user.send(request).await.refused(400, "invalid_request");
    }
    let mut euros = wanted(500);
    euros["currency"] = json!("EUR");
    checkout(&user, "euros", &euros).await.refused(409, "state_conflict");

    let key = Uuid::new_v4().to_string();
    let body = wanted(500);
    let both = futures::future::join_all((0..8).map(|_| checkout(&user, &key, &body))).await;
    let mut begun: Vec<Value> = Vec::new();
    for answer in both {
        match answer.status.as_u16() {
            201 => begun.push(answer.created()),
            409 => _ = answer.refused(409, "idempotency_in_progress"),
            other => panic!("{other}: {answer}"),
        }
    }
    let last = checkout(&user, &key, &body).await.created();
    for one in &begun {
        assert_eq!((&one["id"], &one["url"]), (&last["id"], &last["url"]), "the same payment, the same secret");
    }
    let url = last["url"].as_str().unwrap();
    world.keep_secret("a client secret", url.split_once('#').unwrap().1);
    let begun = Begun { id: id_of(&last), intent: intent_in(url).unwrap() };
    world.pay(&begun).await;
    world.expect_payment(&begun, "deposited").await;
    assert_eq!(user.get(BALANCE).await.ok()["balance_micro"], json!(500_000_000));
    let paid = checkout(&user, &key, &body).await.created();
    assert_eq!(paid["url"], "https://console.example/paid", "what is paid is not paid again: {paid}");
    let (all, _) = ledger(&user).await;
    assert_eq!((all.len(), &all[0]["kind"], &all[0]["payment_id"]), (1, &json!("deposit"), &last["id"]));
    verified(&world).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn by_command_line_a_user_pays_in_sees_it_and_asks_it_back() {
    let mut world = short_windows().start().await;
    let gpuctl = world.logged_in("user").await;
    let top_up = ["-o", "json", "--idempotency-key", "once", "billing", "top-up", "--amount", "10.00 USD", "--no-open"];
    let begun = gpuctl.run(&top_up).await.json();
    let url = begun["url"].as_str().unwrap();
    world.keep_secret("a client secret", url.split_once('#').unwrap().1);
    let payment = Begun { id: id_of(&begun), intent: intent_in(url).unwrap() };
    let id = payment.id.to_string();
    let late = gpuctl.run(&[&top_up[..], &["--wait", "--timeout", "1s"][..]].concat()).await.failed(10);
    assert!(late.contains(url) && late.contains(&format!("gpuctl billing payment {id}")), "{late}");
    world.pay(&payment).await;
    world.expect_payment(&payment, "deposited").await;
    let there = gpuctl.run(&[&top_up[..], &["--wait"][..]].concat()).await.json();
    assert_eq!((&there["id"], &there["state"]), (&json!(id), &json!("deposited")), "{there}");
    let listed = gpuctl.run(&["billing", "payments", "--state", "deposited"]).await.ok();
    assert!(listed.starts_with("ID") && listed.contains(&id), "{listed}");

    let refund =
        ["-o", "json", "billing", "refund", "--payment", &id, "--amount", "4.00", "--reason", "it was too much"];
    let refund = gpuctl.run(&refund).await.json();
    assert_eq!((&refund["payment_id"], &refund["amount_minor"]), (&json!(id), &json!(400)), "{refund}");
    let path = format!("/api/v1/billing/payments/{id}");
    world.user.wait_until(&path, "it is paid back", |it| it["refunds"][0]["state"] == "succeeded").await;
    let shown = gpuctl.run(&["billing", "payment", &id]).await.ok();
    assert!(shown.contains("6.00 USD") && shown.contains("succeeded") && shown.contains("it was too much"), "{shown}");
    let ledger = gpuctl.run(&["billing", "ledger"]).await.ok();
    assert!(ledger.contains("deposit") && ledger.contains("refund") && ledger.contains(&id), "{ledger}");
    assert!(gpuctl.run(&["billing", "top-up", "--amount", "0 USD"]).await.failed(2).contains("amount"));
    verified(&world).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_account_in_another_currency_cannot_have_is_paid_back_at_the_processor() {
    let mut world = short_windows().start().await;
    let begun = world.begin_payment(5_000).await;
    // Between the checkout and the payment an operator gives the account money of another kind.
    let other = if CURRENCY == "USD" { "EUR" } else { "USD" };
    let subject = world.identity.person("user").unwrap().id;
    let accounts = "/api/v1/admin/billing/accounts";
    let account = id_of(&world.admin.post(accounts, &json!({ "user_id": subject, "currency": other })).await.ok());
    let gift = json!({ "amount_minor": 100, "currency": other, "reason": "a gift" });
    world.admin.post(&format!("{accounts}/{account}/adjustments"), &gift).await.created();

    world.pay(&begun).await;
    world.expect_payment(&begun, "refused").await;
    let path = format!("/api/v1/billing/payments/{}", begun.id);
    let back = world.user.wait_until(&path, "it is paid back", |it| it["refunds"][0]["state"] == "succeeded").await;
    assert_eq!((&back["left_minor"], &back["refunds"][0]["amount_minor"]), (&json!(0), &json!(5_000)), "{back}");
    let there = world.outside().all("refunds").await;
    let of_it = there.iter().filter(|refund| refund["payment_intent"] == begun.intent.as_str());
    assert_eq!(of_it.map(|refund| refund["amount"].as_i64().unwrap()).collect::<Vec<_>>(), [5_000]);
    let (all, _) = ledger(&world.user).await;
    assert_eq!((all.len(), &all[0]["kind"]), (1, &json!("credit")), "nothing of it was in the account: {all:?}");
    verified(&world).await;
    world.end().await;
}
