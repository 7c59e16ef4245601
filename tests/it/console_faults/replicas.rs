//! Replicas that are killed, and restarted, under an open tab.

use super::{Browser, SUBMIT, page};
use serde_json::json;
use std::time::Instant;
use tests::cluster::db_lock::WRITES;
use tests::cluster::{TestCluster, WAIT_TIMEOUT};

#[tokio::test(flavor = "multi_thread")]
async fn killed_and_restarted_replicas_double_nothing_and_lose_nothing_typed() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    cluster.node("h100").await;
    let mut browser = Browser::start(&[]).await;
    browser.log_in_to_console(&cluster, "user").await;
    let rented = rental_whose_replica_is_killed_happens_once(&mut cluster, &mut browser).await;
    form_whose_replica_is_killed_is_sent_once(&mut cluster, &mut browser).await;
    terminal_whose_replica_is_killed_goes_on(&mut cluster, &mut browser, &rented).await;
    tab_stays_usable_while_every_replica_is_restarted(&mut cluster, &mut browser).await;
    allocation_that_two_tabs_release_is_released_once(&cluster, &mut browser, &rented).await;
    browser.expect_no_complaint().await;
    browser.close().await;
    cluster.shutdown().await;
}

/// The replica that answers the browser.
async fn serving(cluster: &TestCluster, browser: &mut Browser) -> usize {
    let count = async |index: usize| -> f64 {
        let text = cluster.operator_at(index).send_once(reqwest::Method::GET, "/metrics", None).await.text;
        let lines =
            text.lines().filter(|line| line.starts_with("http_requests_total{") && line.contains("\"/api/v1/me\""));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let before = [count(0).await, count(1).await];
        let asks = "async () => { for (let i = 0; i < 4; i++) await fetch('/api/v1/me'); }";
        browser.run(asks, json!(null)).await;
        let more = [count(0).await - before[0], count(1).await - before[1]];
        // The page itself may ask in between.
        match (more[0] >= 4.0, more[1] >= 4.0) {
            (true, false) => return 0,
            (false, true) => return 1,
            _ => assert!(Instant::now() < until, "no replica answers the browser: {more:?}"),
        }
    }
}

/// Returns the allocation's id.
async fn rental_whose_replica_is_killed_happens_once(cluster: &mut TestCluster, browser: &mut Browser) -> String {
    browser.open(&page(cluster, "/rent?sku=h100")).await;
    browser.expect_text("main", "gpuctl allocations create --sku h100").await;
    browser.fill("input[name=name]", "typed-once").await;
    let serving = serving(cluster, browser).await;
    let lock = cluster.lock_commits_of("allocation", "request").await;
    browser.double_click("main button.primary").await;
    lock.expect_blocked(WRITES).await;
    cluster.kill9_replica(serving);
    lock.unlock().await;
    browser.send_until(("input[name=name]", "typed-once"), "main .steps").await;
    let listed = cluster.user.get("/api/v1/allocations?name=typed-once").await.ok();
    assert_eq!(listed["items"].as_array().map(Vec::len), Some(1), "{listed}");
    let id = listed["items"][0]["id"].as_str().expect("an id").to_owned();
    assert!(browser.url().await.ends_with(&id), "the page is that of the allocation");
    cluster.restart_replica(serving).await;
    cluster.user.wait_until(&format!("/api/v1/allocations/{id}"), "it is active", |it| it["state"] == "active").await;
    id
}

async fn form_whose_replica_is_killed_is_sent_once(cluster: &mut TestCluster, browser: &mut Browser) {
    browser.open(&page(cluster, "/service-accounts")).await;
    browser.click("button:text('Create')").await;
    browser.fill("[role=dialog] input[name=name]", "robot").await;
    let serving = serving(cluster, browser).await;
    cluster.kill9_replica(serving);
    browser.click(SUBMIT).await;
    browser.send_until(("[role=dialog] input[name=name]", "robot"), "tbody tr:has-text('robot')").await;
    cluster.restart_replica(serving).await;
    let listed = cluster.user.get("/api/v1/service-accounts").await.ok();
    assert_eq!(listed["items"].as_array().map(Vec::len), Some(1), "{listed}");
}

async fn terminal_whose_replica_is_killed_goes_on(cluster: &mut TestCluster, browser: &mut Browser, rented: &str) {
    browser.open(&page(cluster, &format!("/allocations/{rented}"))).await;
    browser.expect_text("main a[href^='/terminal/']", "Open a terminal").await;
    browser.open(&format!("{}/terminal/{rented}", cluster.anonymous_client().base())).await;
    browser.expect_text("#state", "Connected.").await;
    browser.enter("typed=before; echo be''gun").await;
    browser.expect_screen("begun").await;
    // The socket has a connection of its own, so that either may be its replica.
    for index in [0, 1] {
        cluster.kill9_replica(index);
        browser.expect_text("#state", "Connected.").await;
        cluster.restart_replica(index).await;
    }
    browser.expect_text("#state", "Connected.").await;
    browser.enter("echo it was typed $typed.").await;
    browser.expect_screen("it was typed before.").await;
}

async fn tab_stays_usable_while_every_replica_is_restarted(cluster: &mut TestCluster, browser: &mut Browser) {
    browser.open(&page(cluster, "/rent?sku=h100")).await;
    browser.fill("input[name=name]", "typed-before").await;
    for (index, place) in [(0, "SSH keys"), (1, "Money")] {
        cluster.kill9_replica(index);
        browser.click(&format!("nav a:text-is('{place}')")).await;
        browser.expect_text("main h1", place).await;
        cluster.restart_replica(index).await;
        browser.click("nav a:text-is('Sessions')").await;
        browser.expect_text("main tbody", "this browser").await;
    }
    browser.open(&page(cluster, "/rent?sku=h100")).await;
    browser.expect_text("main", "gpuctl allocations create --sku h100 --gpus 1 --name typed-before").await;
}

async fn allocation_that_two_tabs_release_is_released_once(cluster: &TestCluster, browser: &mut Browser, rented: &str) {
    let tabs = ["main", "second"];
    for tab in tabs {
        browser.go_to("main", tab).await;
        browser.open(&page(cluster, &format!("/allocations/{rented}"))).await;
        browser.click("main button:text('Release')").await;
        browser.expect_text("[role=dialog]", "erased").await;
    }
    for tab in tabs {
        browser.go_to("main", tab).await;
        // The second tab may have read the new state before, and does not offer the release then.
        browser.run("at => document.querySelector(at)?.click()", json!(SUBMIT)).await;
        browser.expect_text("main ol.steps [data-is]", "releas").await;
    }
    let path = format!("/api/v1/allocations/{rented}");
    let released = cluster.user.wait_until(&path, "it is released", |it| it["state"] == "released").await;
    let entered = released["status_history"].as_array().expect("a history").iter();
    assert_eq!(entered.filter(|entry| entry["state"] == "releasing").count(), 1, "{released}");
    browser.go_to("main", "main").await;
}
