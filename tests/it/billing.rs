//! Billing over the public API: credit, allocations, accrual by windows, low and depleted balance, new credit. Windows are short by policy.

use futures::StreamExt as _;
use serde_json::{Value, json};
use std::time::Duration;
use tests::cluster::client::Client;
use tests::cluster::{CURRENCY, REGION, TestCluster, TestClusterBuilder, WAIT_TIMEOUT, id_of};
use uuid::Uuid;

pub(crate) const BALANCE: &str = "/api/v1/billing/balance";

/// A cluster whose windows last a second, without a grace period after the last one, and in which no account has money.
pub(crate) fn short_windows() -> TestClusterBuilder {
    TestCluster::builder()
        .without_credit()
        .policy("billing.window_seconds", 1)
        .policy("billing.depletion_grace_seconds", 0)
}

/// A SKU at 36,000 minor units an hour, 10 a second, of which a node has 8 GPUs.
pub(crate) async fn expensive_sku(cluster: &mut TestCluster) {
    let sku = cluster.offer_sku("dear", 8).await;
    let price = json!({ "price": { "currency": CURRENCY, "amount_minor_per_gpu_hour": 36_000 } });
    let answer = cluster
        .admin
        .request_until_final(reqwest::Method::PATCH, &format!("/api/v1/admin/skus/{sku}"), Some(&price))
        .await;
    assert_eq!(answer.ok()["price"]["amount_minor_per_gpu_hour"], 36_000);
}

pub(crate) fn allocation_request(gpus: u32) -> Value {
    json!({ "sku": "dear", "region_code": REGION, "gpu_count": gpus })
}

/// All postings of the caller, oldest first, read page by page.
pub(crate) async fn postings(by: &Client) -> Vec<Value> {
    let (mut all, mut path) = (Vec::new(), "/api/v1/billing/ledger?limit=7".to_owned());
    loop {
        let page = by.get(&path).await.ok();
        all.extend(page["items"].as_array().unwrap().iter().cloned());
        match page["next_page"].as_str() {
            Some(token) => path = format!("/api/v1/billing/ledger?limit=7&page_token={token}"),
            None => break,
        }
    }
    all.reverse();
    all
}

pub(crate) fn micro(value: &Value) -> i64 {
    value.as_i64().unwrap_or_else(|| panic!("{value} is no amount"))
}

/// Asserts that the ledger as the user sees it is exact to the millionth: numbers, running balances, and no window charged twice.
pub(crate) async fn expect_exact(by: &Client) -> Vec<Value> {
    let all = postings(by).await;
    let mut sum = 0;
    let mut starts = std::collections::BTreeSet::new();
    for (number, posting) in (1..).zip(&all) {
        sum += micro(&posting["change_micro"]);
        assert_eq!((micro(&posting["number"]), micro(&posting["balance_micro"])), (number, sum), "{posting}");
        if posting["used_from"].is_string() {
            let start = (posting["allocation_id"].to_string(), posting["used_from"].to_string());
            assert!(starts.insert(start), "charged twice: {posting}");
        }
    }
    assert_eq!(micro(&by.get(BALANCE).await.ok()["balance_micro"]), sum);
    all
}

/// Asserts that the user's statements cover the whole ledger month by month, and that their files have the same content.
async fn expect_statements(by: &Client, all: &[Value]) {
    let months = by.get("/api/v1/billing/statements").await.ok();
    let mut months = months["items"].as_array().unwrap().clone();
    months.reverse();
    let (mut balance, mut number) = (0, 0);
    for month in months {
        assert_eq!(micro(&month["opening_micro"]), balance, "{month}");
        let path = format!("/api/v1/billing/statements/{}", month["month"].as_str().unwrap());
        let statement = by.get(&path).await.ok();
        let lines = statement["lines"].as_array().unwrap();
        balance += lines.iter().map(|line| micro(&line["change_micro"])).sum::<i64>();
        assert_eq!(micro(&statement["closing_micro"]), balance, "{statement}");
        let csv = by.send(by.request(reqwest::Method::GET, &format!("{path}/csv"))).await.text;
        for posting in csv.lines().filter(|line| line.starts_with("posting,")) {
            let cells: Vec<&str> = posting.split(',').collect();
            let expected = &all[number];
            number += 1;
            assert_eq!(cells[1], number.to_string(), "{posting}");
            assert_eq!(
                cells[13..16].join(","),
                format!("{},{},{}", expected["change_micro"], expected["amount_micro"], expected["balance_micro"])
            );
        }
        assert!(csv.lines().last().is_some_and(|line| line.starts_with("closing,")), "{csv}");
    }
    assert_eq!((balance, number), (micro(&all.last().unwrap()["balance_micro"]), all.len()));
}

/// What a released allocation must have cost: its price from `active` to the release request.
pub(crate) fn expected_cost(allocation: &Value, minor_per_hour: i64) -> i64 {
    let time = |name: &str| -> chrono::DateTime<chrono::Utc> {
        allocation[name].as_str().unwrap_or_else(|| panic!("no {name} in {allocation}")).parse().unwrap()
    };
    let micros = |name| time(name).timestamp_micros();
    minor_per_hour * (micros("release_requested_at") - micros("active_at")) / 3600
}

pub(crate) fn cost(postings: &[Value], id: Uuid) -> (i64, i64) {
    let of_it = || postings.iter().filter(|it| it["allocation_id"] == id.to_string());
    let paid = of_it().map(|it| -micro(&it["change_micro"])).sum();
    let sum = |kind: &str| of_it().filter(|it| it["kind"] == kind).map(|it| micro(&it["amount_micro"])).sum::<i64>();
    (paid, sum("write_off") - sum("write_off_reversal"))
}

async fn expect_ledger_verified(cluster: &TestCluster) {
    let report = persistence::Reads::new(cluster.pool.clone()).verify_ledger().await.expect("the ledger can be read");
    assert!(report.holds(), "{report:#?}");
}

/// The number of events of this subject in the stream.
pub(crate) async fn count_events(cluster: &TestCluster, subject: &str) -> usize {
    let mut context = async_nats::jetstream::new(cluster.bus().await);
    context.set_timeout(WAIT_TIMEOUT);
    let stream = context.get_stream("BILLING").await.expect("the stream is there");
    let mut subjects = stream.info_with_subjects(subject).await.expect("the stream tells its subjects");
    let mut count = 0;
    while let Some(subject) = subjects.next().await {
        count += subject.expect("a subject").1;
    }
    count
}

#[tokio::test(flavor = "multi_thread")]
async fn credit_is_charged_per_window_with_a_warning_until_depleted_and_renewed() {
    let mut cluster = short_windows().start().await;
    expensive_sku(&mut cluster).await;
    cluster.node("dear").await;
    let user = cluster.user.clone();
    // Without money nothing is allocated, and the error names the missing amount.
    let estimate = user.get("/api/v1/billing/estimate?sku=dear&gpu_count=2").await.ok();
    assert_eq!((&estimate["is_covered"], &estimate["needed_micro"]), (&json!(false), &json!(20_000_000)), "{estimate}");
    let refused = user.post("/api/v1/allocations", &allocation_request(2)).await;
    refused.expect_error(402, "insufficient_balance");
    assert!(refused.body["details"]["allocation_id"].is_string(), "{refused}");

    // 540 is above the threshold of 500, for two seconds.
    let account = cluster.credit("user", 540).await;
    let estimate = user.get("/api/v1/billing/estimate?sku=dear&gpu_count=2").await.ok();
    assert_eq!((&estimate["is_covered"], &estimate["lasts_seconds"]), (&json!(true), &json!(27)), "{estimate}");
    let rented = cluster.rent_active("dear", 2).await;
    let running = user.wait_until(BALANCE, "a window is charged", |it| micro(&it["balance_micro"]) < 540_000_000).await;
    assert_eq!((&running["burn_minor_per_hour"], &running["running"]), (&json!(72_000), &json!(1)), "{running}");
    assert!(running["lasts_until"].is_string(), "{running}");
    user.wait_until(BALANCE, "another window is charged", |it| it["balance_minor"] != running["balance_minor"]).await;
    let shown = rented.get().await;
    assert!(shown["cost_to_date_minor"].as_i64() >= Some(20) && shown["billed_until"].is_string(), "{shown}");

    // A price change does not affect allocations that run.
    let sku = cluster.offer_sku("dear", 8).await;
    let price = json!({ "price": { "currency": CURRENCY, "amount_minor_per_gpu_hour": 1 } });
    cluster
        .admin
        .request_until_final(reqwest::Method::PATCH, &format!("/api/v1/admin/skus/{sku}"), Some(&price))
        .await
        .ok();

    let released = rented.expect_state("released").await;
    assert_eq!(released["failure"], Value::Null, "{released}");
    cluster.expect_settled().await;
    let depleted = user.wait_until(BALANCE, "the account is depleted", |it| it["running"] == 0).await;
    assert_eq!(depleted["state"], "depleted", "{depleted}");
    let all = expect_exact(&user).await;
    let (paid, lost) = cost(&all, rented.id);
    assert_eq!(paid + lost, expected_cost(&released, 72_000), "every microsecond, once");
    assert!((0..20_000_000).contains(&micro(&depleted["balance_micro"])), "less than a window is left: {depleted}");
    assert!(all.len() > 10, "window by window: {} postings", all.len());
    assert_eq!(released["cost_to_date_minor"], json!(paid / 1_000_000));
    assert_eq!(count_events(&cluster, "billing.balance_low").await, 1, "warned once");
    assert_eq!(count_events(&cluster, "billing.balance_depleted").await, 1);

    // After a new credit the user rents again, at the new price.
    let more = json!({ "amount_minor": 100, "currency": CURRENCY, "reason": "a test needs it" });
    let adjusted = cluster.admin.post(&format!("/api/v1/admin/billing/accounts/{account}/adjustments"), &more).await;
    assert_eq!(adjusted.created()["state"], "open");
    let repeated = cluster.rent_active("dear", 8).await;
    repeated.release().await;
    let released = repeated.expect_state("released").await;
    user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    let all = expect_exact(&user).await;
    assert_eq!(cost(&all, repeated.id), (expected_cost(&released, 8), 0));
    expect_statements(&user, &all).await;
    expect_ledger_verified(&cluster).await;
    cluster.shutdown().await;
}

/// The owner of the account is killed repeatedly within its windows, and in the end all replicas are down for a while.
#[tokio::test(flavor = "multi_thread")]
async fn replica_crashes_during_accrual_change_no_charge() {
    let mut cluster = short_windows().replicas(2).start().await;
    expensive_sku(&mut cluster).await;
    // A node without isolation takes one tenant at a time.
    for _ in 0..2 {
        cluster.node("dear").await;
    }
    let account = cluster.credit("user", 90_000).await;
    let (first, second) = (cluster.rent("dear", 3).await, cluster.rent("dear", 1).await);
    for rented in [&first, &second] {
        rented.expect_state("active").await;
    }
    for after in [40, 730, 1_010] {
        tokio::time::sleep(Duration::from_millis(after)).await;
        let owner = cluster.owner_of("billing_account", account).await;
        cluster.kill9_replica(owner);
        cluster.restart_replica(owner).await;
    }
    (0..2).for_each(|replica| cluster.kill9_replica(replica));
    tokio::time::sleep(Duration::from_secs(6)).await;
    for replica in 0..2 {
        cluster.restart_replica(replica).await;
    }
    let mut over = Vec::new();
    for rented in [&first, &second] {
        rented.release().await;
        over.push((rented.id, rented.expect_state("released").await));
    }
    let user = cluster.user.clone();
    user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    let all = expect_exact(&user).await;
    for ((id, released), rate) in over.iter().zip([108_000, 36_000]) {
        assert_eq!(cost(&all, *id), (expected_cost(released, rate), 0), "{released}");
    }
    // The missed time is charged as one window.
    let longest = all.iter().filter(|it| it["kind"] == "usage").map(|it| micro(&it["amount_micro"])).max();
    assert!(longest >= Some(3 * 10_000_000 * 5), "{longest:?}");
    expect_ledger_verify_succeeds(&cluster).await;
    cluster.shutdown().await;
}

/// `gpuaas ledger verify`, as an operator runs it.
pub(crate) async fn expect_ledger_verify_succeeds(cluster: &TestCluster) {
    use secrecy::ExposeSecret as _;
    let output = tokio::process::Command::new(&cluster.settings.executable)
        .args(["ledger", "verify", "--json"])
        .env("SVC_DATABASE_URL", cluster.settings.database_url.expose_secret())
        .env("SVC_DATABASE_CA_PATH", &cluster.settings.database_ca_path)
        .output()
        .await
        .expect("the program runs");
    let verification: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    assert!(output.status.success(), "{verification:#} {}", String::from_utf8_lossy(&output.stderr));
    assert_eq!((&verification["ok"], &verification["difference_micro"]), (&json!(true), &json!(0)), "{verification:#}");
    assert!(verification["postings"].as_i64() > Some(5), "{verification:#}");
}

/// A machine with a critical fault costs its tenant nothing from then on, although the tenant keeps it.
#[tokio::test(flavor = "multi_thread")]
async fn lost_gpu_ends_the_billing_of_its_allocation_alone() {
    let mut cluster = short_windows().start().await;
    expensive_sku(&mut cluster).await;
    let node = cluster.node("dear").await;
    cluster.credit("user", 50_000).await;
    let rented = cluster.rent_active("dear", 8).await;
    let user = cluster.user.clone();
    user.wait_until(BALANCE, "it is charged", |it| micro(&it["balance_micro"]) < 50_000_000_000).await;
    // The machine has lost a GPU: a fault of that GPU and its tenant, and of no other.
    cluster.reconfigure_agent(&node, |settings| settings.gpus.count = 7).await;
    user.wait_until(BALANCE, "it is charged no more", |it| it["running"] == 0).await;
    let faulted = rented.get().await;
    assert_eq!((&faulted["state"], &faulted["health"]["status"]), (&json!("active"), &json!("critical")), "{faulted}");
    node.expect_state("active").await;
    let spent = user.get(BALANCE).await.ok()["balance_micro"].clone();
    tokio::time::sleep(Duration::from_secs(3)).await;
    rented.release().await;
    cluster.reconfigure_agent(&node, |settings| settings.gpus.count = 8).await;
    rented.expect_state("released").await;
    assert_eq!(user.get(BALANCE).await.ok()["balance_micro"], spent, "not a millionth more");
    expect_exact(&user).await;
    expect_ledger_verified(&cluster).await;
    cluster.shutdown().await;
}

/// An operator adjusts balances with the role for it alone, once per idempotency key, within bounds, and audited.
#[tokio::test(flavor = "multi_thread")]
async fn adjustments_by_operators_are_bounded_and_audited() {
    let cluster = TestCluster::builder().without_credit().start().await;
    let account = cluster.credit("user", 1_000).await;
    let path = format!("/api/v1/admin/billing/accounts/{account}/adjustments");
    let adjustment =
        |amount: Value| json!({ "amount_minor": amount, "currency": CURRENCY, "reason": "a test needs it" });
    let key = Uuid::new_v4().to_string();
    for replayed in [false, true] {
        let request = cluster.admin.request(reqwest::Method::POST, &path).header("Idempotency-Key", &key);
        let answer = cluster.admin.send(request.json(&adjustment(json!(-400)))).await;
        assert_eq!(answer.headers.contains_key("idempotency-replayed"), replayed, "{answer}");
        assert_eq!(answer.created()["balance_minor"], 600);
    }
    for amount in [json!(0), json!(100_001), json!(-100_001), json!(1.5), json!("10"), json!(i64::MAX), json!(u64::MAX)]
    {
        cluster.admin.post(&path, &adjustment(amount)).await.expect_error(400, "invalid_request");
    }
    for amount in ["1e9", "-1e9", "1000.5"] {
        let literal = adjustment(json!(7)).to_string().replace(":7", &format!(":{amount}"));
        let request = cluster.admin.request(reqwest::Method::POST, &path).header("Idempotency-Key", amount);
        let request = request.header("content-type", "application/json").body(literal);
        cluster.admin.send(request).await.expect_error(400, "invalid_request");
    }
    cluster.admin.post(&path, &adjustment(json!(-601))).await.expect_error(402, "insufficient_balance");
    let euros = json!({ "amount_minor": 1, "currency": "EUR", "reason": "a test needs it" });
    cluster.admin.post(&path, &euros).await.expect_error(409, "state_conflict");
    let without_key = cluster.admin.request(reqwest::Method::POST, &path).json(&adjustment(json!(1)));
    cluster.admin.send(without_key).await.expect_error(400, "invalid_request");
    // The role of an administrator is not enough.
    cluster.second_admin.post(&path, &adjustment(json!(1))).await.expect_error(403, "forbidden");
    cluster.second_admin.get(&format!("/api/v1/admin/billing/accounts/{account}")).await.ok();
    cluster.user.get(&format!("/api/v1/admin/billing/accounts/{account}")).await.expect_error(403, "forbidden");
    let nobody = format!("/api/v1/admin/billing/accounts/{}/adjustments", Uuid::new_v4());
    cluster.admin.post(&nobody, &adjustment(json!(1))).await.expect_error(404, "not_found");
    let audited = cluster.audit_of(account).await;
    let actions: Vec<_> = audited.iter().map(|(_, action, ..)| action.as_str()).collect();
    assert_eq!(actions.iter().filter(|action| **action == "billing.adjust").count(), 2, "{audited:?}");
    assert_eq!(expect_exact(&cluster.user).await.len(), 2);
    let found = cluster.admin.get("/api/v1/admin/billing/accounts?limit=1").await.ok();
    assert_eq!(id_of(&found["items"][0]), account, "{found}");
    expect_ledger_verified(&cluster).await;
    cluster.shutdown().await;
}
