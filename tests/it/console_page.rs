//! The whole way of a user with the web console alone, in a real Chromium over a real replica and a payment processor: from the login at the identity
//! provider and an empty balance to a released allocation and the logout.

use crate::browser::Browser;
use crate::payment_page::give_card;
use serde_json::{Value, json};
use tests::cluster::payments::StartedPayment;
use tests::cluster::{CURRENCY, TestCluster, id_of};

const SUBMIT: &str = "[role=dialog] button[type=submit]";
/// The next of the first steps, and what does it.
const NEXT_STEP: &str = "main [aria-label='First steps'] [aria-current=step]";
const TERMINAL_LINK: &str = "main a[href^='/terminal/']";

#[tokio::test(flavor = "multi_thread")]
async fn new_user_logs_in_tops_up_rents_works_sees_the_cost_releases_and_logs_out() {
    let mut cluster = TestCluster::builder().without_credit().with_processor().start().await;
    let node = cluster.node("h100").await;
    let base = cluster.anonymous_client().base().to_owned();
    let mut browser = Browser::start(&[]).await;

    // The address of the service leads to the console, and its login to the identity provider and back.
    browser.open(&base).await;
    browser.expect_text("main", "Log in").await;
    browser.log_in_to_console(&cluster, "user").await;
    assert!(browser.url().await.starts_with(&format!("{base}/console/")), "{}", browser.url().await);

    browser.expect_text(NEXT_STEP, "Top up your balance").await;
    browser.click(&format!("{NEXT_STEP} a")).await;
    browser.expect_text("h1", "Money").await;
    top_up(&mut cluster, &mut browser, "50.00").await;

    browser.expect_text(NEXT_STEP, "Choose GPUs and rent them").await;
    browser.click(&format!("{NEXT_STEP} a")).await;
    browser.expect_text("h1", "Catalog").await;
    browser.click("main [aria-label=h100] a.primary").await;
    browser.expect_text("main [aria-label='What it costs']", "$2.50").await;
    browser.expect_text("main", "gpuctl allocations create --sku h100 --gpus 1").await;
    browser.click("main button[type=submit]").await;
    browser.expect_text(TERMINAL_LINK, "Open a terminal").await;
    let allocation = browser.url().await;
    let rented = cluster.user.get("/api/v1/allocations?state=active").await.ok();
    assert_eq!(rented["items"].as_array().map(Vec::len), Some(1), "{rented}");

    // The last step leads to the terminal, which is a page of its own and takes the same login.
    browser.open(&format!("{base}/console/")).await;
    browser.expect_text(NEXT_STEP, "Open a terminal").await;
    let link = browser.run("at => document.querySelector(at).href", json!(TERMINAL_LINK)).await;
    let link = link.as_str().expect("a link").to_owned();
    browser.go_to("main", "terminal").await;
    browser.open(&link).await;
    browser.expect_text("#state", "Connected.").await;
    browser.enter("echo from-the''-console").await;
    browser.expect_screen("from-the-console").await;

    // No script can read what the login rests on.
    let readable = browser
        .run("() => document.cookie + JSON.stringify({ ...localStorage, ...sessionStorage })", json!(null))
        .await;
    assert!(!readable.as_str().is_some_and(|text| text.contains("__Host-") || text.contains("eyJ")), "{readable}");

    browser.go_to("main", "main").await;
    browser.open(&allocation).await;
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

    browser.click("text=Log out").await;
    let logins = "/api/v1/admin/browser-sessions?state=active";
    cluster.admin.wait_until(logins, "the login has ended", |found| found["items"] == json!([])).await;
    // The identity provider sends the browser back.
    browser.expect_text("main", "Log in").await;
    browser.open(&link).await;
    browser.expect_text("#sign-in", "Log in").await;

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
