//! The payment page, in a real Chromium, with the script of a third-party payment processor (localstripe).

use crate::browser::Browser;
use crate::external_tools::{root, run};
use reqwest::Method;
use serde_json::{Value, json};
use std::process::Command;
use tests::cluster::payments::StartedPayment;
use tests::cluster::{TestCluster, id_of};
use uuid::Uuid;

/// A card that requires authentication by its holder: the only kind that localstripe's script lets a browser pay with.
const ASKS_ITS_HOLDER: [(&str, &str); 5] = [
    ("type", "card"),
    ("card[number]", "4000002500003155"),
    ("card[exp_month]", "12"),
    ("card[exp_year]", "2030"),
    ("card[cvc]", "123"),
];

/// A started payment of this amount, and the URL of its page.
async fn start_payment(cluster: &mut TestCluster, amount: i64) -> (StartedPayment, String) {
    let back = format!("{}/billing/returned", cluster.anonymous_client().base());
    let wanted =
        json!({ "amount_minor": amount, "success_url": format!("{back}?paid"), "cancel_url": format!("{back}?later") });
    let key = Uuid::new_v4().to_string();
    let asked = cluster.user.request(Method::POST, "/api/v1/billing/checkout-sessions").header("Idempotency-Key", key);
    let answer = cluster.user.send(asked.json(&wanted)).await.created();
    let url = answer["url"].as_str().unwrap().to_owned();
    cluster.register_secret("a client secret", url.split_once('#').expect("the page is ours").1);
    let intent = local_servers::payment_processor::intent_in(&url).unwrap();
    (StartedPayment { id: id_of(&answer), intent }, url)
}

/// Stripe's script sends the card with the confirmation; localstripe's leaves that to the holder of the secret key.
pub(crate) async fn give_card(cluster: &TestCluster, payment: &StartedPayment) {
    let there = cluster.processor();
    let card = there.post("/v1/payment_methods", &ASKS_ITS_HOLDER).await.unwrap();
    let intent = format!("/v1/payment_intents/{}", payment.intent);
    there.post(&intent, &[("payment_method", card["id"].as_str().unwrap())]).await.unwrap();
    there.post(&format!("{intent}/confirm"), &[]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn payment_in_a_browser_is_deposited_and_returns_to_the_success_url() {
    let mut cluster = TestCluster::builder().without_credit().with_processor().start().await;
    let mut browser = Browser::start(&[]).await;
    let (payment, url) = start_payment(&mut cluster, 5_000).await;
    assert_eq!(browser.open(&url).await, 200);
    browser.expect_text("#amount", "50.00").await;
    browser.expect_text("#confirm", "Pay").await;
    browser.fill("#card input[placeholder=number]", ASKS_ITS_HOLDER[1].1).await;

    // A payer whose bank declines sees that, and may retry.
    give_card(&cluster, &payment).await;
    browser.click("#confirm").await;
    browser.click("text=Fail authentication").await;
    browser.expect_text("#state", "failed authentication").await;
    assert_eq!(cluster.expect_payment(&payment, "open").await["paid_at"], Value::Null);

    give_card(&cluster, &payment).await;
    browser.click("#confirm").await;
    browser.click("text=Complete authentication").await;
    browser.expect_text("main", "You can close this page").await;
    assert!(browser.url().await.ends_with("/billing/returned?paid"), "{}", browser.url().await);
    cluster.expect_payment(&payment, "deposited").await;
    assert_eq!(cluster.balance_micro().await, 5_000_000_000);

    // The page of a completed payment leads back to the shop.
    browser.open(&format!("{}/billing/assets/style.css", cluster.anonymous_client().base())).await;
    let leave = "url => { setTimeout(() => { location.href = url; }, 0); return null; }";
    browser.run(leave, json!(url)).await;
    browser.expect_text("main", "You can close this page").await;

    let seen = browser.activity().await;
    assert!(seen.complaints.is_empty() && seen.dialogs.is_empty() && seen.windows == 0, "{seen:?}");
    let (own, processor) = (cluster.anonymous_client().base().to_owned(), cluster.processor().url());
    for asked in seen.asked.iter().filter(|asked| !asked.starts_with("data:")) {
        assert!(asked.starts_with(&own) || asked.starts_with(&processor), "the page asks {asked}");
        assert!(!asked.split('#').next().unwrap().contains("_secret_"), "the secret left the browser in {asked}");
    }
    browser.close().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn incomplete_or_unknown_payment_address_shows_an_error() {
    let mut cluster = TestCluster::builder().without_credit().with_processor().start().await;
    let mut browser = Browser::start(&[]).await;
    let (payment, url) = start_payment(&mut cluster, 5_000).await;
    let (page, secret) = url.split_once('#').unwrap();
    browser.open(page).await;
    browser.expect_text("#state", "not whole").await;
    // Another fragment alone would load nothing.
    browser.open(&format!("{}/billing/returned", cluster.anonymous_client().base())).await;
    browser.open(&format!("{page}#pi_another_secret_{}", secret.rsplit('_').next().unwrap())).await;
    browser.expect_text("#state", "There is no such payment").await;
    let other = page.replace(&payment.id.to_string(), &Uuid::new_v4().to_string());
    browser.open(&format!("{other}#{secret}")).await;
    browser.expect_text("#state", "There is no such payment").await;
    assert_eq!(browser.text_of("#pay").await, None);
    browser.close().await;
    cluster.shutdown().await;
}

#[tokio::test]
async fn unit_tests_of_the_page_pass() {
    let mut tests = Command::new("node");
    tests.arg("--test").current_dir(root().join("edge/payment-page"));
    let output = run(tests).await;
    assert!(output.contains("pass ") && !output.contains("\n# pass 0"), "{output}");
}
