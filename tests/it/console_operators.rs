//! Faults that an operator finds and repairs with the console alone, in a real Chromium over a real cluster: from the overview to the cause and its
//! remedy, in ten clicks at most. What no console can do (a machine's repair, a clock, NATS) the test does where the runbook says so.

use crate::browser::Browser;
use chrono::TimeDelta;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::{AllocationHandle, NodeHandle, TestCluster, WAIT_TIMEOUT};

const MOST_CLICKS: usize = 10;
const SUBMIT: &str = "[role=dialog] button[type=submit]";
const REASON: &str = "[role=dialog] [name=reason]";
/// The durable consumer of the events of stream NODES, and the worker of its members.
const CONSUMER: &str = "nodes-reactions";
const WORKER: &str = "node-events";
/// More than the console, and the alert `GPUAASConsumerLag`, take for usual.
const LAG: usize = 1_100;

/// An operator at the console, whose clicks are counted.
struct Operator<'a> {
    browser: &'a mut Browser,
    clicks: Vec<String>,
}

impl<'a> Operator<'a> {
    /// Begins at the overview.
    async fn begin(cluster: &TestCluster, browser: &'a mut Browser) -> Self {
        browser.open(&format!("{}/console/", cluster.anonymous_client().base())).await;
        browser.expect_text("h1", "Overview").await;
        Self { browser, clicks: Vec::new() }
    }

    /// Clicks once the element is there.
    async fn click(&mut self, at: &str) {
        self.clicks.push(at.to_owned());
        self.browser.click(at).await;
    }

    async fn open_page(&mut self, title: &str) {
        self.click(&format!("nav a:text-is('{title}')")).await;
        self.browser.expect_text("main h1", title).await;
    }

    /// Goes from the page of the fleet to what is wrong.
    async fn see_why(&mut self) {
        self.open_page("Fleet").await;
        self.click("main dl.numbers a:text-is('See why')").await;
        self.browser.expect_text("main h1", "Stuck").await;
    }

    /// Presses the button of a remedy, and confirms it with a reason.
    async fn remedy(&mut self, button: &str, reason: &str) {
        self.click(button).await;
        self.click(REASON).await;
        self.browser.type_text(reason).await;
        self.click(SUBMIT).await;
        self.browser.expect_gone("[role=dialog]").await;
    }

    fn end(self) {
        assert!(self.clicks.len() <= MOST_CLICKS, "{} clicks: {:#?}", self.clicks.len(), self.clicks);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fenced_node_and_stuck_release_are_found_and_repaired_within_ten_clicks() {
    let mut cluster = TestCluster::builder()
        .policy("allocation.release_max_attempts", 2)
        .policy("allocation.release_backoff_max_seconds", 1)
        .policy("allocation.release_timeout_seconds", 15)
        .start()
        .await;
    // A resumed agent has a task that has expired.
    for error in ["simulated_failure", "node_fenced", "task_expired"] {
        cluster.allow_error(error);
    }
    let failing = cluster.node_with("h100", &["--simulate-failure", "release"]).await;
    let fencing = cluster.rent_active("h100", 4).await;
    // The first node has a tenant, and cannot keep another one apart.
    let silent = cluster.node("h100").await;
    let stuck = cluster.rent("h100", 4).await;
    let placed = stuck.expect_state("active").await;
    assert_eq!(placed["node_id"], json!(silent.id));
    cluster.lose_agent(&silent);
    stuck.release().await;
    fencing.release().await;

    let mut browser = Browser::start(&[]).await;
    browser.log_in_to_console(&cluster, "admin").await;
    fenced_node(&mut cluster, &mut browser, &failing, &fencing).await;
    stuck_release(&mut cluster, &mut browser, &silent, &stuck).await;
    browser.expect_no_complaint().await;
    browser.close().await;
    cluster.shutdown().await;
}

/// The list of nodes says why the node takes nothing, its page has the allocation, and that has the retry that lifts the fence.
async fn fenced_node(
    cluster: &mut TestCluster,
    browser: &mut Browser,
    node: &NodeHandle,
    allocation: &AllocationHandle,
) {
    expect_transition(cluster, node, "fence").await;
    let mut operator = Operator::begin(cluster, browser).await;
    operator.open_page("Nodes").await;
    let row = format!("main tbody tr:has(code[title='{}'])", node.id);
    operator.browser.expect_text(&row, "is not proved").await;
    operator.click(&format!("{row} a.row-link")).await;
    operator.browser.expect_text("main", "It takes no allocation: the clean-up of allocation").await;
    operator.click("section[aria-label=Tenants] tbody tr:has-text('release failed') a.row-link").await;
    operator.browser.expect_text("main p.why", "release failed").await;
    // On the machine.
    cluster.restart_agent_with_flags(node, &[]).await;
    operator.remedy("main button:text-is('Retry the release…')", "the machine was repaired").await;
    allocation.expect_state("released").await;
    node.expect_all_free().await;
    operator.end();
}

/// The machine does not answer: the release is forced, and the node taken back into service with its clean-up proof.
async fn stuck_release(
    cluster: &mut TestCluster,
    browser: &mut Browser,
    node: &NodeHandle,
    allocation: &AllocationHandle,
) {
    expect_transition(cluster, node, "fence").await;
    let mut operator = Operator::begin(cluster, browser).await;
    operator.see_why().await;
    operator.browser.expect_text("main", &format!("clean-up on node {} failed too often", node.id)).await;
    operator.browser.expect_text("main", "ops.provisioning.stuck").await;
    operator.remedy("main button:text-is('Force the release…')", "the tenant is gone for good").await;
    allocation.expect_state("released").await;
    operator.browser.expect_text("main", "Nothing is stuck.").await;
    node.expect_state("quarantined").await;

    // On the machine.
    cluster.resume_agent(node);
    let is_clean = |seen: &Value| {
        let gpus = seen["inventory"]["gpus"].as_array();
        gpus.is_some_and(|gpus| gpus.iter().all(|gpu| gpu["allocation_id"].is_null()))
    };
    cluster.admin.wait_until(&node.path(), "its clean-up is proved", is_clean).await;
    operator.open_page("Nodes").await;
    operator.click(&format!("main tbody tr:has(code[title='{}']) a.row-link", node.id)).await;
    operator.remedy("main button:text-is('Release the quarantine…')", "it has proved its clean-up").await;
    node.expect_state("active").await;
    node.expect_all_free().await;
    operator.end();
}

/// Waits until this command has changed the node.
async fn expect_transition(cluster: &TestCluster, node: &NodeHandle, command: &str) {
    let until = Instant::now() + WAIT_TIMEOUT;
    while !cluster.history_of(node.id).await.iter().any(|step| step.command == command) {
        assert!(Instant::now() < until, "no {command}: {:#}", node.get().await);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lagging_consumer_and_wrong_clock_are_found_within_ten_clicks_and_gone_after_their_repair() {
    let cluster = TestCluster::builder().replicas(2).clock_of(1).start().await;
    let mut browser = Browser::start(&[]).await;
    browser.log_in_to_console(&cluster, "admin").await;
    lagging_consumer(&cluster, &mut browser).await;
    wrong_clock(&cluster, &mut browser).await;
    browser.expect_no_complaint().await;
    browser.close().await;
    cluster.shutdown().await;
}

/// JetStream delivers nothing to the consumer of a stream. Its worker is restarted by the console, and the consumer is repaired at NATS.
async fn lagging_consumer(cluster: &TestCluster, browser: &mut Browser) {
    pause_consumer(cluster, &json!({ "pause_until": "2100-01-01T00:00:00Z" })).await;
    let jetstream = async_nats::jetstream::new(cluster.bus().await);
    for _ in 0..LAG {
        jetstream.publish("node.test", "an event of another release".into()).await.unwrap().await.unwrap();
    }
    let name = cluster.replicas[1].name().to_owned();
    let restarts = cluster.restarts_of(WORKER).await[&name];

    let mut operator = Operator::begin(cluster, browser).await;
    operator.see_why().await;
    let cause = format!("main section[aria-label*='worker {WORKER} (consumer of stream NODES) lags']");
    operator.browser.expect_text(&cause, "ops.bus.backlog").await;
    let row = format!("{cause} tbody tr:has-text('{name}')");
    operator.browser.expect_text(&row, "1,1").await;
    operator.remedy(&format!("{row} button:text-is('Restart…')"), "it may hang").await;
    let until = Instant::now() + WAIT_TIMEOUT;
    while cluster.restarts_of(WORKER).await.get(&name).is_none_or(|count| *count == restarts) {
        assert!(Instant::now() < until, "the worker is not restarted");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    // At NATS.
    pause_consumer(cluster, &json!({})).await;
    operator.browser.expect_text("main", "Nothing is stuck.").await;
    operator.end();
}

/// Pauses the consumer until the time that is given, or lets it go on.
async fn pause_consumer(cluster: &TestCluster, until: &Value) {
    let subject = format!("$JS.API.CONSUMER.PAUSE.NODES.{CONSUMER}");
    let answer = cluster.bus().await.request(subject, until.to_string().into()).await.expect("JetStream answers");
    let answer: Value = serde_json::from_slice(&answer.payload).expect("the answer is JSON");
    assert!(answer["error"].is_null() && answer["paused"] == json!(until["pause_until"].is_string()), "{answer}");
}

/// The clock of one member is half a minute ahead. The console names the member and by how much; its machine's clock is set right.
async fn wrong_clock(cluster: &TestCluster, browser: &mut Browser) {
    let clock = cluster.service_clock.as_ref().expect("the builder has made it");
    clock.set_offset(TimeDelta::seconds(30));
    let mut operator = Operator::begin(cluster, browser).await;
    operator.see_why().await;
    let cause = "main section[aria-label*='its clock differs']";
    operator.browser.expect_text(cause, "ops.api.degradation").await;
    operator.browser.expect_text(cause, "timedatectl").await;
    let row = format!("{cause} tbody tr:has-text('{}')", cluster.replicas[1].name());
    operator.browser.expect_text(&row, "ms ahead").await;
    // On the machine.
    clock.set_offset(TimeDelta::zero());
    operator.browser.expect_text("main", "Nothing is stuck.").await;
    operator.end();
}
