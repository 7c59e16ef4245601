//! The web console in a real Chromium over a real replica, from the login at the identity provider to the logout.

use crate::browser::Browser;
use serde_json::json;
use tests::cluster::TestCluster;

/// The next of the first steps of a new user.
const NEXT_STEP: &str = "main [aria-label='First steps'] [aria-current=step]";
const TERMINAL_LINK: &str = "main a[href^='/terminal/']";

#[tokio::test(flavor = "multi_thread")]
async fn user_logs_in_rents_works_in_a_terminal_and_logs_out() {
    let mut cluster = TestCluster::start().await;
    cluster.node("h100").await;
    let base = cluster.anonymous_client().base().to_owned();
    let mut browser = Browser::start(&[]).await;

    // The address of the service leads to the console, and its login to the identity provider and back.
    browser.open(&base).await;
    browser.expect_text("main", "Log in").await;
    browser.log_in_to_console(&cluster, "user").await;
    assert!(browser.url().await.starts_with(&format!("{base}/console/")), "{}", browser.url().await);

    // A new user is led from an empty balance to a shell. The test cluster has credited the account.
    browser.expect_text(NEXT_STEP, "Choose GPUs and rent them").await;

    browser.open(&format!("{base}/console/rent?sku=h100")).await;
    browser.expect_text("main", "gpuctl allocations create --sku h100 --gpus 1").await;
    browser.click("main button.primary").await;
    browser.expect_text(TERMINAL_LINK, "Open a terminal").await;
    let rented = cluster.user.get("/api/v1/allocations?state=active").await.ok();
    assert_eq!(rented["items"].as_array().map(Vec::len), Some(1), "{rented}");

    browser.open(&format!("{base}/console/")).await;
    browser.expect_text(NEXT_STEP, "Open a terminal").await;

    // The terminal is a page of its own, and takes the same login.
    let link = browser.run("at => document.querySelector(at).href", json!(TERMINAL_LINK)).await;
    browser.open(link.as_str().expect("a link")).await;
    browser.expect_text("#state", "Connected.").await;
    browser.enter("echo from-the''-console").await;
    browser.expect_screen("from-the-console").await;

    // No script can read what the login rests on.
    let readable = browser
        .run("() => document.cookie + JSON.stringify({ ...localStorage, ...sessionStorage })", json!(null))
        .await;
    assert!(!readable.as_str().is_some_and(|text| text.contains("__Host-") || text.contains("eyJ")), "{readable}");

    browser.open(&format!("{base}/console/")).await;
    browser.expect_text("h1", "Overview").await;
    browser.click("text=Log out").await;
    let logins = "/api/v1/admin/browser-sessions?state=active";
    cluster.admin.wait_until(logins, "the login has ended", |found| found["items"] == json!([])).await;
    // The identity provider sends the browser back.
    browser.expect_text("main", "Log in").await;
    browser.open(link.as_str().expect("a link")).await;
    browser.expect_text("#sign-in", "Log in").await;

    let activity = browser.activity().await;
    assert!(activity.complaints.is_empty() && activity.dialogs.is_empty(), "{activity:?}");
    browser.close().await;
    cluster.shutdown().await;
}
