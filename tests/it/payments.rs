//! Payments over the public API, through a third-party payment processor (localstripe): top-ups, charges and refunds, and the ledger is
//! exact to the millionth.

use local_servers::payment_processor::intent_in;
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tests::cluster::client::{ApiResponse, Client};
use tests::cluster::payments::StartedPayment;
use tests::cluster::{AllocationHandle, CURRENCY, REGION, TestCluster, TestClusterBuilder, WAIT_TIMEOUT, id_of};
use uuid::Uuid;

const BALANCE: &str = "/api/v1/billing/balance";
const CHECKOUT: &str = "/api/v1/billing/checkout-sessions";
const REFUNDS: &str = "/api/v1/billing/refunds";

/// A cluster with windows of a second and no grace period, in which no account has money and every user can pay.
fn short_windows() -> TestClusterBuilder {
    TestCluster::builder()
        .without_credit()
        .with_processor()
        .policy("billing.window_seconds", 1)
        .policy("billing.depletion_grace_seconds", 0)
        .policy("billing.minimum_deposit_minor", 50)
}

/// A SKU at 36,000 minor units an hour, 10 a second, of which a node has 8 GPUs.
async fn dear_sku(cluster: &mut TestCluster) -> Uuid {
    let sku = cluster.offer_sku("dear", 8).await;
    price(cluster, sku, 36_000).await;
    sku
}

async fn price(cluster: &TestCluster, sku: Uuid, minor: i64) {
    let price = json!({ "price": { "currency": CURRENCY, "amount_minor_per_gpu_hour": minor } });
    cluster.admin.request_until_final(Method::PATCH, &format!("/api/v1/admin/skus/{sku}"), Some(&price)).await.ok();
}

fn checkout_request(amount_minor: impl Into<Value>) -> Value {
    json!({
        "amount_minor": amount_minor.into(),
        "success_url": "https://console.example/paid",
        "cancel_url": "https://console.example/billing",
    })
}

async fn checkout(by: &Client, key: &str, body: &Value) -> ApiResponse {
    by.send(by.request(Method::POST, CHECKOUT).header("Idempotency-Key", key).json(body)).await
}

fn micro(value: &Value) -> i64 {
    value.as_i64().unwrap_or_else(|| panic!("{value} is no amount"))
}

/// All postings of the user, oldest first, with their running balances checked; and their sums by kind.
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

/// What a released allocation must have cost: its price from `active` to the release request.
fn expected_cost(allocation: &Value, minor_per_hour: i64) -> i64 {
    let micros = |name: &str| {
        let at: chrono::DateTime<chrono::Utc> = allocation[name].as_str().unwrap().parse().unwrap();
        at.timestamp_micros()
    };
    minor_per_hour * (micros("release_requested_at") - micros("active_at")) / 3600
}

async fn rent(cluster: &TestCluster, gpus: u32) -> AllocationHandle {
    cluster.rent_active("dear", gpus).await
}

async fn expect_ledger_verified(cluster: &TestCluster) {
    let report = persistence::Reads::new(cluster.pool.clone()).verify_ledger().await.expect("the ledger can be read");
    assert!(report.holds() && report.difference() == 0, "{report:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ledger_is_exact_over_top_ups_depletion_and_refund() {
    let mut cluster = short_windows().start().await;
    let sku = dear_sku(&mut cluster).await;
    cluster.node("dear").await;
    let user = cluster.user.clone();
    let mut subscriber = cluster.subscriber(0, "user").await;
    let nothing = json!({ "sku": "dear", "region_code": REGION, "gpu_count": 2 });
    user.post("/api/v1/allocations", &nothing).await.expect_error(402, "insufficient_balance");

    // 540 is above the threshold of 500, for two seconds.
    let first = cluster.top_up(540).await.id;
    let notification = subscriber.expect_notification("billing.payment_deposited").await;
    assert_eq!(
        (&notification["data"]["payment_id"], &notification["data"]["state"]),
        (&json!(first), &json!("deposited")),
        "{notification}"
    );
    let opened = user.get(BALANCE).await.ok();
    assert_eq!((&opened["balance_micro"], &opened["currency"]), (&json!(540_000_000), &json!(CURRENCY)), "{opened}");

    // The balance falls window by window; a price change does not affect allocations that run.
    let rented = rent(&cluster, 2).await;
    let mut before = micro(&opened["balance_micro"]);
    for window in 1..=3 {
        let what = format!("window {window} is charged");
        let now = user.wait_until(BALANCE, &what, |it| micro(&it["balance_micro"]) < before).await;
        before = micro(&now["balance_micro"]);
        // It answers the pings of the service meanwhile.
        while subscriber.receive(Duration::from_millis(50)).await {}
        if window == 1 {
            price(&cluster, sku, 1).await;
        }
    }
    subscriber.expect_notification("billing.balance_low").await;
    subscriber.expect_notification("billing.balance_depleted").await;
    let released = rented.expect_state("released").await;
    let depleted = user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    assert_eq!(depleted["state"], "depleted", "{depleted}");
    assert!((0..20_000_000).contains(&micro(&depleted["balance_micro"])), "less than a window is left: {depleted}");
    let (all, kinds) = ledger(&user).await;
    let lost: i64 = all.iter().filter(|it| it["kind"] == "write_off").map(|it| micro(&it["amount_micro"])).sum();
    let used = 540_000_000 - micro(&depleted["balance_micro"]);
    assert_eq!(
        (used + lost, kinds["deposit"]),
        (expected_cost(&released, 72_000), 540_000_000),
        "every microsecond, once"
    );
    assert!(all.len() > 10, "window by window: {} postings", all.len());

    // After another top-up the user rents again, at the current price.
    let second = cluster.top_up(1_000).await.id;
    assert_eq!(user.get(BALANCE).await.ok()["state"], "open");
    let repeated = rent(&cluster, 8).await;
    repeated.release().await;
    let released = repeated.expect_state("released").await;
    let rest = user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    let cheap = expected_cost(&released, 8);
    assert_eq!(micro(&rest["balance_micro"]), micro(&depleted["balance_micro"]) + 1_000_000_000 - cheap);

    // A part is refunded to the payer, once; of the first payment only the unspent amount can be refunded. A subscriber that has not read
    // for long is disconnected.
    let mut subscriber = cluster.subscriber(0, "user").await;
    let back = json!({ "payment_id": second, "amount_minor": 400, "reason": "it was too much" });
    let key = Uuid::new_v4().to_string();
    let ask = || user.send(user.request(Method::POST, REFUNDS).header("Idempotency-Key", &key).json(&back));
    let refund = ask().await.created();
    assert_eq!(id_of(&ask().await.created()), id_of(&refund));
    let notification = subscriber.expect_notification("billing.refund_succeeded").await;
    assert_eq!(notification["data"]["refund_id"], refund["id"], "{notification}");
    let path = format!("/api/v1/billing/payments/{second}");
    let shown = user.wait_until(&path, "it is paid back", |it| it["refunds"][0]["state"] == "succeeded").await;
    assert_eq!((&shown["left_minor"], shown["refunds"].as_array().unwrap().len()), (&json!(600), 1), "{shown}");
    let too_much = json!({ "payment_id": first, "amount_minor": 540, "reason": "all of it" });
    let with_key = |body: &Value| {
        user.request(Method::POST, REFUNDS).header("Idempotency-Key", Uuid::new_v4().to_string()).json(body)
    };
    user.send(with_key(&json!({ "payment_id": second, "amount_minor": 601, "reason": "r" })))
        .await
        .expect_error(400, "invalid_request");
    let all_there = user.send(with_key(&json!({ "payment_id": second, "reason": "the rest" }))).await.created();
    assert_eq!(user.send(with_key(&too_much)).await.status, 402);

    // The top-ups are the sum of charges, refunds and the balance.
    let (_, kinds) = ledger(&user).await;
    let balance = micro(&user.get(BALANCE).await.ok()["balance_micro"]);
    let given_back = 400_000_000 + micro(&all_there["amount_micro"]);
    assert_eq!((kinds["deposit"], kinds["refund"]), (1_540_000_000, -given_back), "{kinds:?}");
    assert_eq!(balance, 1_540_000_000 - used - cheap - given_back);
    expect_ledger_verified(&cluster).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_top_up_is_one_payment_and_an_invalid_amount_is_refused() {
    let mut cluster = short_windows().replicas(2).start().await;
    let user = cluster.user.clone();
    for amount in ["-1", "0", "9223372036854775808", "1e9", "\"10\"", "49", "100001"] {
        let body = checkout_request(0).to_string().replace("\"amount_minor\":0", &format!("\"amount_minor\":{amount}"));
        let request = user.request(Method::POST, CHECKOUT).header("Idempotency-Key", amount);
        let request = request.header("content-type", "application/json").body(body);
        user.send(request).await.expect_error(400, "invalid_request");
    }
    let mut euros = checkout_request(500);
    euros["currency"] = json!("EUR");
    checkout(&user, "euros", &euros).await.expect_error(409, "state_conflict");

    let key = Uuid::new_v4().to_string();
    let body = checkout_request(500);
    let both = futures::future::join_all((0..8).map(|_| checkout(&user, &key, &body))).await;
    let mut begun: Vec<Value> = Vec::new();
    for answer in both {
        match answer.status.as_u16() {
            201 => begun.push(answer.created()),
            409 => _ = answer.expect_error(409, "idempotency_in_progress"),
            503 => _ = answer.expect_error(503, "service_unavailable"),
            other => panic!("{other}: {answer}"),
        }
    }
    // A busy replica may refuse a request, which its client repeats with the same key.
    let until = Instant::now() + WAIT_TIMEOUT;
    let last = loop {
        let answer = checkout(&user, &key, &body).await;
        if answer.status != 503 || Instant::now() > until {
            break answer.created();
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    for one in &begun {
        assert_eq!((&one["id"], &one["url"]), (&last["id"], &last["url"]), "the same payment, the same secret");
    }
    let url = last["url"].as_str().unwrap();
    cluster.register_secret("a client secret", url.split_once('#').unwrap().1);
    let begun = StartedPayment { id: id_of(&last), intent: intent_in(url).unwrap() };
    cluster.pay(&begun).await;
    cluster.expect_payment(&begun, "deposited").await;
    assert_eq!(user.get(BALANCE).await.ok()["balance_micro"], json!(500_000_000));
    let paid = checkout(&user, &key, &body).await.created();
    assert_eq!(paid["url"], "https://console.example/paid", "what is paid is not paid again: {paid}");
    let (all, _) = ledger(&user).await;
    assert_eq!((all.len(), &all[0]["kind"], &all[0]["payment_id"]), (1, &json!("deposit"), &last["id"]));
    expect_ledger_verified(&cluster).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn user_tops_up_and_requests_a_refund_by_command_line() {
    let mut cluster = short_windows().start().await;
    let gpuctl = cluster.logged_in("user").await;
    let top_up = ["-o", "json", "--idempotency-key", "once", "billing", "top-up", "--amount", "10.00 USD", "--no-open"];
    let begun = gpuctl.run(&top_up).await.json();
    let url = begun["url"].as_str().unwrap();
    cluster.register_secret("a client secret", url.split_once('#').unwrap().1);
    let payment = StartedPayment { id: id_of(&begun), intent: intent_in(url).unwrap() };
    let id = payment.id.to_string();
    let late = gpuctl.run(&[&top_up[..], &["--wait", "--timeout", "1s"][..]].concat()).await.failed(10);
    assert!(late.contains(url) && late.contains(&format!("gpuctl billing payment {id}")), "{late}");
    cluster.pay(&payment).await;
    cluster.expect_payment(&payment, "deposited").await;
    let there = gpuctl.run(&[&top_up[..], &["--wait"][..]].concat()).await.json();
    assert_eq!((&there["id"], &there["state"]), (&json!(id), &json!("deposited")), "{there}");
    let listed = gpuctl.run(&["billing", "payments", "--state", "deposited"]).await.ok();
    assert!(listed.starts_with("ID") && listed.contains(&id), "{listed}");

    let refund =
        ["-o", "json", "billing", "refund", "--payment", &id, "--amount", "4.00", "--reason", "it was too much"];
    let refund = gpuctl.run(&refund).await.json();
    assert_eq!((&refund["payment_id"], &refund["amount_minor"]), (&json!(id), &json!(400)), "{refund}");
    let path = format!("/api/v1/billing/payments/{id}");
    cluster.user.wait_until(&path, "it is paid back", |it| it["refunds"][0]["state"] == "succeeded").await;
    let shown = gpuctl.run(&["billing", "payment", &id]).await.ok();
    assert!(shown.contains("6.00 USD") && shown.contains("succeeded") && shown.contains("it was too much"), "{shown}");
    let ledger = gpuctl.run(&["billing", "ledger"]).await.ok();
    assert!(ledger.contains("deposit") && ledger.contains("refund") && ledger.contains(&id), "{ledger}");
    assert!(gpuctl.run(&["billing", "top-up", "--amount", "0 USD"]).await.failed(2).contains("amount"));
    let more = ["billing", "refund", "--payment", &id, "--amount", "100.00", "--reason", "all of it"];
    let more = gpuctl.run(&more).await.failed(2);
    assert!(more.contains("6.00 USD are left"), "{more}");

    // Another one is not paid: its page is opened again, and it is canceled.
    let other = gpuctl.run(&["-o", "json", "billing", "top-up", "--amount", "10.00 USD", "--no-open"]).await.json();
    cluster.register_secret("a client secret", other["url"].as_str().unwrap().split_once('#').unwrap().1);
    let other_id = other["id"].as_str().unwrap();
    let again = gpuctl.run(&["-o", "json", "billing", "pay", other_id, "--no-open"]).await.json();
    assert_eq!(again["url"], other["url"]);
    let canceled = gpuctl.run(&["-o", "json", "billing", "cancel-payment", other_id]).await.json();
    assert_eq!(canceled["state"], "canceled", "{canceled}");
    expect_ledger_verified(&cluster).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn payment_in_another_currency_than_the_account_is_refunded() {
    let mut cluster = short_windows().start().await;
    let begun = cluster.begin_payment(5_000).await;
    // Between the checkout and the payment an operator credits the account in another currency.
    let other = if CURRENCY == "USD" { "EUR" } else { "USD" };
    let subject = cluster.identity.person("user").unwrap().id;
    let accounts = "/api/v1/admin/billing/accounts";
    let account = id_of(&cluster.admin.post(accounts, &json!({ "user_id": subject, "currency": other })).await.ok());
    let gift = json!({ "amount_minor": 100, "currency": other, "reason": "a gift" });
    cluster.admin.post(&format!("{accounts}/{account}/adjustments"), &gift).await.created();

    cluster.pay(&begun).await;
    cluster.expect_payment(&begun, "refused").await;
    let path = format!("/api/v1/billing/payments/{}", begun.id);
    let back = cluster.user.wait_until(&path, "it is paid back", |it| it["refunds"][0]["state"] == "succeeded").await;
    assert_eq!((&back["left_minor"], &back["refunds"][0]["amount_minor"]), (&json!(0), &json!(5_000)), "{back}");
    let there = cluster.processor_client().all("refunds").await;
    let of_it = there.iter().filter(|refund| refund["payment_intent"] == begun.intent.as_str());
    assert_eq!(of_it.map(|refund| refund["amount"].as_i64().unwrap()).collect::<Vec<_>>(), [5_000]);
    let (all, _) = ledger(&cluster.user).await;
    assert_eq!((all.len(), &all[0]["kind"]), (1, &json!("credit")), "nothing of it was in the account: {all:?}");
    expect_ledger_verified(&cluster).await;
    cluster.shutdown().await;
}
