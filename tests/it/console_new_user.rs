//! A new user with the console alone, in a real Chromium over a real cluster and a payment processor: from an empty balance to a released allocation.

use crate::browser::Browser;
use crate::payment_page::give_card;
use serde_json::{Value, json};
use tests::cluster::payments::StartedPayment;
use tests::cluster::{CURRENCY, TestCluster, id_of};

const SUBMIT: &str = "[role=dialog] button[type=submit]";
/// The next of the first steps, and what does it.
const NEXT_STEP: &str = "main [aria-label='First steps'] [aria-current=step]";

#[tokio::test(flavor = "multi_thread")]
async fn new_user_tops_up_rents_works_sees_the_cost_and_releases() {
    let mut cluster = TestCluster::builder().without_credit().with_processor().start().await;
    let node = cluster.node("h100").await;
    let mut browser = Browser::start(&[]).await;
    browser.log_in_to_console(&cluster, "user").await;

    browser.expect_text(NEXT_STEP, "Top up your balance").await;
    browser.click(&format!("{NEXT_STEP} a")).await;
    browser.expect_text("h1", "Money").await;
    top_up(&mut cluster, &mut browser, "50.00").await;

    browser.expect_text(NEXT_STEP, "Choose GPUs and rent them").await;
    browser.click(&format!("{NEXT_STEP} a")).await;
    browser.expect_text("h1", "Catalog").await;
    browser.click("main [aria-label=h100] a.primary").await;
    browser.expect_text("main [aria-label='What it costs']", "$2.50").await;
    browser.click("main button[type=submit]").await;

    let terminal = "main a[href^='/terminal/']";
    browser.expect_text(terminal, "Open a terminal").await;
    let allocation = browser.url().await;
    let address = browser.run("at => document.querySelector(at).href", json!(terminal)).await;
    browser.go_to("main", "terminal").await;
    browser.open(address.as_str().expect("an address")).await;
    browser.expect_text("#state", "Connected.").await;
    browser.enter("echo the-first''-work").await;
    browser.expect_screen("the-first-work").await;

    browser.go_to("main", "main").await;
    browser.expect_text("main aside", "Cost to date").await;
    browser.click("main button:text-is('Release…')").await;
    browser.expect_text("[role=dialog]", "It has cost").await;
    browser.click(SUBMIT).await;
    browser.expect_text("main ol.steps [data-is]", "released").await;
    node.expect_all_free().await;
    assert_eq!(browser.url().await, allocation);

    // What it has cost in the end.
    browser.click("nav a:text-is('Money')").await;
    browser.expect_text("section[aria-label=Ledger] tbody", "deposit").await;
    browser.expect_text("section[aria-label=Ledger] tbody", "usage").await;
    assert!(cluster.balance_micro().await < 5_000_000_000, "the work has cost something");
    browser.expect_no_complaint().await;
    browser.close().await;
    cluster.shutdown().await;
}

/// Tops up by the console's form and the payment page, which leads back.
async fn top_up(cluster: &mut TestCluster, browser: &mut Browser, amount: &str) {
    browser.click("main button:text-is('Top up…')").await;
    browser.fill("[role=dialog] [name=amount]", amount).await;
    browser.fill("[role=dialog] [name=currency]", CURRENCY).await;
    browser.click(SUBMIT).await;
    browser.expect_text("#amount", amount).await;
    let url = browser.url().await;
    cluster.register_secret("a client secret", url.split_once('#').expect("the page is ours").1);
    let listed: Value = cluster.user.get("/api/v1/billing/payments").await.ok();
    let id = id_of(&listed["items"][0]);
    let intent = local_servers::payment_processor::intent_in(&url).expect("the page is of an intent");
    give_card(cluster, &StartedPayment { id, intent }).await;
    browser.click("#confirm").await;
    browser.click("text=Complete authentication").await;
    browser.expect_text("main dl.numbers", amount).await;
}
