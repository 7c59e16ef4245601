//! The rate limit of a cluster: one quota however many replicas get the requests, and none while its owner is not available.

use crate::alerts::monitoring::Monitoring;
use actors::sharding::{command_id, shard_of};
use futures::future::join_all;
use reqwest::Method;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tests::cluster::{TestCluster, WAIT_TIMEOUT};
use uuid::Uuid;

const LIMIT: u32 = 60;
const AT_ONCE: usize = 20;
const ASKED_FOR: Duration = Duration::from_secs(10);

/// Limits `user` alone to one request a second.
async fn start_with_limit() -> (TestCluster, String) {
    let cluster = TestCluster::builder().replicas(3).start().await;
    cluster.wait_for_balanced_shards().await;
    let user = cluster.identity.person("user").expect("there is a user").id.to_string();
    let body = json!({
        "key": "rate_limit.api_requests_per_minute", "value": LIMIT, "scope": { "user_id": user }, "reason": "a test",
    });
    cluster.admin.post("/api/v1/admin/policy-values", &body).await.created();
    for index in 0..3 {
        let path = format!("/api/v1/admin/policy-values/resolve?key=rate_limit.api_requests_per_minute&user_id={user}");
        let admin = cluster.at_replica(index, "admin");
        admin.wait_until(&path, "the limit holds", |resolved| resolved["value"] == LIMIT).await;
    }
    (cluster, user)
}

/// The sum of a counter of the replicas' limiters, by its name and labels.
async fn metric_total(cluster: &TestCluster, counter: &str) -> u64 {
    let mut sum = 0;
    for index in 0..3 {
        sum += metric_at(cluster, index, counter).await;
    }
    sum
}

/// The counter of one replica; 0 where it does not run.
async fn metric_at(cluster: &TestCluster, index: usize, counter: &str) -> u64 {
    let operator = cluster.operator_at(index);
    let Ok(page) = operator.try_send(operator.request(Method::GET, "/metrics")).await else { return 0 };
    let line = page.text.lines().find(|line| line.starts_with(counter));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0)
}

async fn fail_open_at(cluster: &TestCluster, index: usize) -> u64 {
    metric_at(cluster, index, FAIL_OPEN).await
}

const FAIL_OPEN: &str = "api_ratelimit_fail_open_total{group=\"api\"}";

#[tokio::test(flavor = "multi_thread")]
async fn three_replicas_at_many_times_the_limit_admit_burst_plus_rate_times_time() {
    let (cluster, _) = start_with_limit().await;
    let cluster = Arc::new(cluster);
    let begin = Instant::now();
    let expected = |elapsed: Duration| f64::from(LIMIT) + f64::from(LIMIT) / 60.0 * elapsed.as_secs_f64();
    let total = Arc::new(AtomicU32::new(0));
    let mut askers = Vec::new();
    for index in 0..3 {
        let (user, total) = (cluster.at_replica(index, "user"), Arc::clone(&total));
        askers.push(tokio::spawn(async move {
            let (mut admitted, mut empty_at) = (0_u32, Duration::ZERO);
            // A slow machine takes longer for so many that the limit matters.
            let are_few = || f64::from(total.load(Ordering::SeqCst)) <= 2.0 * expected(begin.elapsed());
            while begin.elapsed() < ASKED_FOR || are_few() {
                let sent_at = begin.elapsed();
                assert!(sent_at < WAIT_TIMEOUT, "{total:?} requests are too few to show anything");
                let answer = user.send_once(Method::GET, "/api/v1/skus", None).await;
                total.fetch_add(1, Ordering::SeqCst);
                match answer.status.as_u16() {
                    200 => admitted += 1,
                    429 => {
                        assert_eq!(answer.body["details"]["limit"], LIMIT, "{answer}");
                        empty_at = sent_at;
                    }
                    _ => panic!("{answer}"),
                }
                assert_eq!(answer.headers["ratelimit-policy"], format!("\"api\";q={LIMIT};w=60"));
            }
            (admitted, empty_at)
        }));
    }
    // Everything that was there until the last refusal was admitted, and at the end no more than there can have been.
    let (mut admitted, mut empty_at) = (0, Duration::ZERO);
    for asker in askers {
        let (some, at) = asker.await.unwrap();
        admitted += some;
        empty_at = empty_at.max(at);
    }
    let (least, most) = (expected(empty_at) - 3.0, expected(begin.elapsed()) + 1.0);
    let unasked = metric_total(&cluster, FAIL_OPEN).await as f64;
    let admitted = f64::from(admitted);
    assert!(
        admitted >= least && admitted <= most + unasked,
        "{admitted} of {total:?}, not {least} to {most} (+ {unasked})"
    );
    let Ok(cluster) = Arc::try_unwrap(cluster) else { panic!("a request is still in flight") };
    cluster.shutdown().await;
}

/// The replica that owns the cell's shard.
async fn owner_of_cell(cluster: &TestCluster, cell: Uuid) -> usize {
    let report = cluster.admin.get("/api/v1/admin/runtime/cluster").await.ok();
    let owns = |member: &serde_json::Value| member["shards"].as_array().unwrap().contains(&json!(shard_of(cell).0));
    let owner = report["members"].as_array().unwrap().iter().find(|member| owns(member)).unwrap()["name"].clone();
    cluster.replicas.iter().position(|replica| owner == replica.name()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_admitted_and_counted_while_the_owner_of_a_rate_cell_is_dead() {
    let (mut cluster, user) = start_with_limit().await;
    let monitoring = Monitoring::start(&cluster).await;
    let admitted = async |cluster: &TestCluster, index: usize| {
        let user = cluster.at_replica(index, "user");
        // Many at once: one after the other they may be slower than the quota is refilled.
        let requests = (0..AT_ONCE).map(|_| user.send_once(Method::GET, "/api/v1/skus", None));
        join_all(requests).await.iter().filter(|answer| answer.status == 200).count()
    };
    while admitted(&cluster, 0).await == AT_ONCE {}
    let cell = command_id(&[b"rate limit", b"api", user.as_bytes()]).0;
    let owner = owner_of_cell(&cluster, cell).await;
    let survivor = (owner + 1) % 3;
    // The counts of the replica that is killed end with it.
    let before = fail_open_at(&cluster, survivor).await;
    cluster.kill9_replica(owner);
    let killed = Instant::now();
    let (mut let_in, mut unasked) = (0, 0);
    while let_in <= 3 || unasked == 0 || killed.elapsed() < Duration::from_millis(2500) {
        let_in += admitted(&cluster, survivor).await;
        unasked = fail_open_at(&cluster, survivor).await.saturating_sub(before);
        assert!(
            killed.elapsed() < WAIT_TIMEOUT,
            "{let_in} were admitted while no owner was reachable, {unasked} of them without it"
        );
    }
    // The next owner enforces the quota.
    let until = Instant::now() + WAIT_TIMEOUT;
    while admitted(&cluster, survivor).await == AT_ONCE {
        assert!(Instant::now() < until, "no replica limits any more");
    }
    // It was delivered before the alert about the replica itself, a minute after its end, which makes this one silent.
    let fails_open = monitoring.alertmanager.expect("tickets", "GPUAASRateLimitFailOpenDetected", true).await;
    assert_eq!(fails_open.runbook, "ops.api.degradation");
    cluster.restart_replica(owner).await;
    cluster.shutdown().await;
}

/// The rest of `user`'s quota, as this replica reports it once it reaches the owner of the cell: until then it admits without a report.
async fn remaining(cluster: &TestCluster, index: usize) -> u32 {
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let answer = cluster.at_replica(index, "user").send_once(Method::GET, "/api/v1/skus", None).await;
        if let Some(standing) = answer.headers.get("ratelimit") {
            let standing = standing.to_str().unwrap();
            let left = standing.split(';').find_map(|part| part.strip_prefix("r="));
            return left.unwrap_or_else(|| panic!("{standing}")).parse().unwrap();
        }
        assert!(Instant::now() < until, "no replica reports the rest of the quota");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn orderly_takeover_of_a_rate_cell_keeps_its_count() {
    let (mut cluster, user) = start_with_limit().await;
    let cell = command_id(&[b"rate limit", b"api", user.as_bytes()]).0;
    let mut owner = owner_of_cell(&cluster, cell).await;
    // The bucket refills from the first request on.
    let began = Instant::now();
    // Only this replica is used, so that no other has a cached state.
    for _ in 0..50 {
        remaining(&cluster, owner).await;
    }
    // It stops, and another replica owns the shard; when it is back, the shard moves back or stays: in order, either way.
    cluster.replicas[owner].stop().await;
    let survivor = (owner + 1) % 3;
    let left_over = remaining(&cluster, survivor).await;
    let drained = u32::try_from(began.elapsed().as_secs()).unwrap() + 1;
    assert!(left_over <= 10 + drained, "{left_over} are left after {drained} s: the quota started over");
    cluster.replicas[owner].start_again().await.unwrap();
    cluster.wait_for_balanced_shards().await;
    owner = owner_of_cell(&cluster, cell).await;
    let left_over = remaining(&cluster, owner).await;
    let drained = u32::try_from(began.elapsed().as_secs()).unwrap() + 1;
    assert!(left_over <= 10 + drained, "{left_over} are left after {drained} s: the quota started over");
    cluster.shutdown().await;
}
