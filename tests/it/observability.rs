//! Observability: one trace through all processes, spans at a collector, metrics of every process, and its stats.

mod collector;

use async_nats::jetstream;
use collector::Collector;
use futures::StreamExt;
use reqwest::Method;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::metrics_page::MetricsPage;
use tests::cluster::{AllocationHandle, GPUS, REGION, TestCluster, WAIT_TIMEOUT, id_of, node_body, ssh_public_key};
use uuid::Uuid;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

/// The `traceparent` of a sampled trace of the caller.
fn traceparent() -> String {
    format!("00-{TRACE}-{CALLER}-01")
}

/// A request for GPUs, as part of the caller's trace.
async fn rent_traced(cluster: &TestCluster, correlation_id: &str) -> AllocationHandle {
    let body = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 2 });
    let request = cluster
        .user
        .request(Method::POST, "/api/v1/allocations")
        .header("Idempotency-Key", Uuid::new_v4().to_string())
        .header("X-Correlation-Id", correlation_id)
        .header("traceparent", traceparent())
        .header("tracestate", "vendor=1")
        .json(&body);
    let made = cluster.user.send(request).await;
    assert_eq!(made.headers["x-correlation-id"], correlation_id);
    AllocationHandle::new(id_of(&made.created()), cluster.user.clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_covers_the_request_the_agent_and_the_active_allocation() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let node = cluster.node("h100").await;
    let allocation = rent_traced(&cluster, "job-17").await;
    allocation.expect_state("active").await;

    // The log lines of the agent.
    let log = cluster.agent_log(&node);
    let lines: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let finished = lines.iter().find(|line| line["message"] == "task finished").expect("the agent did its task");
    assert_eq!((&finished["trace_id"], &finished["correlation_id"]), (&json!(TRACE), &json!("job-17")), "{finished}");
    assert_ne!(finished["span_id"], CALLER, "the agent's work is a span of its own");
    assert_eq!(finished["resource_name"], format!("allocation/{}", allocation.id));

    // The log lines of the control plane about its result, which may be written after the allocation is active.
    let reported = |line: &Value| line["message"].as_str().is_some_and(|text| text.starts_with("task succeeded"));
    let until = Instant::now() + WAIT_TIMEOUT;
    let line = loop {
        if let Some(line) = (0..2).flat_map(|index| cluster.replica_lines(index)).find(reported) {
            break line;
        }
        assert!(Instant::now() < until, "no replica has logged that the task succeeded");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    assert_eq!((&line["trace_id"], &line["correlation_id"]), (&json!(TRACE), &json!("job-17")), "{line}");

    // The resulting transition, and its event.
    let (active,): (String,) =
        sqlx::query_as("SELECT correlation_id FROM history WHERE entity = $1 AND to_state = 'active'")
            .bind(allocation.id)
            .fetch_one(&cluster.pool)
            .await
            .unwrap();
    assert_eq!(active, "job-17");
    let headers = headers_of(&cluster, "provisioning.active", allocation.id).await;
    let header = |name: &str| headers.get(name).map(|value| value.as_str().to_owned()).unwrap_or_default();
    assert!(header("traceparent").starts_with(&format!("00-{TRACE}-")), "{headers:?}");
    assert!(!header("traceparent").contains(CALLER), "{headers:?}");
    assert_eq!((header("tracestate").as_str(), header("x-correlation-id").as_str()), ("vendor=1", "job-17"));

    allocation.release_fully().await;
    cluster.shutdown().await;
}

/// The headers of the event of this type about this allocation.
async fn headers_of(cluster: &TestCluster, subject: &str, allocation: Uuid) -> async_nats::HeaderMap {
    let context = jetstream::new(cluster.bus().await);
    let stream = context.get_stream("PROVISIONING").await.unwrap();
    let config = jetstream::consumer::pull::Config { filter_subject: subject.to_owned(), ..Default::default() };
    let consumer = stream.create_consumer(config).await.unwrap();
    let mut messages = consumer.messages().await.unwrap();
    tokio::time::timeout(WAIT_TIMEOUT, async {
        loop {
            let message = messages.next().await.unwrap().unwrap();
            if String::from_utf8_lossy(&message.payload).contains(&allocation.to_string()) {
                return message.headers.clone().unwrap();
            }
        }
    })
    .await
    .expect("the event is published")
}

#[tokio::test(flavor = "multi_thread")]
async fn collector_receives_the_spans_of_a_request_at_the_edge_and_at_the_owner() {
    let collector = Collector::start().await;
    let mut cluster =
        TestCluster::builder().replicas(2).variable("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url()).start().await;
    let sku = cluster.offer_sku("h100", 8).await;
    let owner = cluster.owner_of("sku", sku).await;
    let elsewhere = cluster.at_replica(1 - owner, "admin");
    let request = elsewhere
        .request(Method::PATCH, &format!("/api/v1/admin/skus/{sku}"))
        .header("traceparent", traceparent())
        .json(&json!({ "allowed_regions": [REGION, "test-2"] }));
    elsewhere.send(request).await.ok();

    let spans = collector.spans_of(TRACE, &["request", "command", "commit"]).await;
    let named = |name: &str| spans.iter().find(|span| span.name == name).unwrap();
    let (asked, command, commit) = (named("request"), named("command"), named("commit"));
    assert_eq!(asked.parent, CALLER, "the caller's span is above ours");
    assert_eq!((command.parent.as_str(), commit.parent.as_str()), (asked.id.as_str(), command.id.as_str()));
    assert_eq!(asked.member, format!("replica-{}", 2 - owner), "asked at the one");
    assert_eq!(
        (&command.member, &commit.member),
        (&format!("replica-{}", owner + 1), &command.member),
        "done at the other"
    );
    assert_eq!(asked.attribute("http.route").as_deref(), Some("/api/v1/admin/skus/{id}"));
    assert_eq!(asked.attribute("http.response.status_code").as_deref(), Some("200"));
    assert!(asked.is_server && !command.is_server);
    assert!(spans.iter().all(|span| span.ended >= span.began));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_process_serves_metrics_health_and_stats_in_every_role() {
    let mut cluster = TestCluster::builder()
        .replicas(2)
        .variable_of(1, "SVC_ROLES", "entities,billing,outbox-relay,provisioning")
        .start()
        .await;
    let node = cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 2).await;
    cluster.wait_for_balanced_shards().await;
    let http = reqwest::Client::new();
    let (mut figures, mut batches) = (Vec::new(), 0);
    for (index, replica) in cluster.replicas.iter().enumerate() {
        let url = replica.operations_url();
        for path in ["/api/v1/healthz", "/api/v1/readyz"] {
            let probed = cluster.operator_at(index).get(path).await;
            assert_eq!(probed.status, 200, "{probed}");
        }
        let page = http.get(format!("{url}/metrics")).send().await.unwrap();
        assert!(page.headers()["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
        figures.push(MetricsPage::parse(&page.text().await.unwrap()));

        let stats = format!("{url}/api/v1/internal/stats");
        for wrong in ["", "Bearer", "Bearer wrong", "Basic d3Jvbmc6"] {
            let refused = http.get(&stats).header("authorization", wrong).send().await.unwrap();
            assert_eq!(refused.status(), 401, "{wrong:?}");
        }
        // After a pause of the machine its lease is stale for a moment.
        let until = Instant::now() + WAIT_TIMEOUT;
        let stats = loop {
            let answer = http.get(&stats).bearer_auth(&cluster.stats_token).send().await.unwrap();
            let stats: Value = answer.json().await.unwrap();
            if stats["lease_fresh"] == true && stats["nats_connected"] == true {
                break stats;
            }
            assert!(Instant::now() < until, "{stats}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        assert_eq!(stats["member"]["name"], replica.name());
        batches +=
            stats["committer"].as_array().unwrap().iter().filter_map(|worker| worker["batches"].as_u64()).sum::<u64>();
        assert!(stats["entities"]["shards"].as_u64() > Some(0), "{stats}");
    }
    assert!(batches > 0, "no process has counted commits");
    for (index, page) in figures.iter().enumerate() {
        for name in [
            "provisioning_queue_depth",
            "provisioning_dispatch_latency_seconds",
            "provisioning_timeouts_total",
            "provisioning_failures_total",
            "invariant_violations_total",
            "process_resident_memory_bytes",
        ] {
            assert!(page.has(name), "replica {index} has no {name}");
        }
        assert!(page.value("build_info", &[]).is_some());
    }
    let described = crate::reference_pages::metric_names();
    for family in figures.iter().flat_map(|page| &page.families).filter(|family| !family.starts_with("process_")) {
        assert!(described.contains(family), "{family} is not on the page of metrics: see reference_pages.rs");
    }
    let sum =
        |name: &str, labels: &[(&str, &str)]| figures.iter().filter_map(|page| page.value(name, labels)).sum::<f64>();
    assert_eq!(sum("provisioning_dispatch_latency_seconds_count", &[]), 1.0);
    assert_eq!(sum("events_committed_total", &[("type", "provisioning.active")]), 1.0);
    assert_eq!(sum("shards_owned", &[]), 256.0);
    assert_eq!(sum("invariant_violations_total", &[]), 0.0);
    let rented = [("service", "api"), ("route", "/api/v1/allocations"), ("method", "POST"), ("status_class", "2xx")];
    assert_eq!(figures[0].value("http_requests_total", &rented), Some(1.0));
    let polls = [("service", "node-api"), ("route", "/internal/v1/nodes/{id}/tasks/wait")];
    assert!(figures[0].value("http_requests_total", &polls) > Some(0.0));
    // A process without the API has the operations listener alone.
    assert!(http.get(cluster.replicas[1].public_url()).send().await.unwrap_err().is_connect());
    cluster
        .wait_for_metrics(1, |page| page.value("nats_consumer_lag", &[("stream", "PROVISIONING")]) == Some(0.0))
        .await;

    allocation.release_fully().await;
    node.expect_all_free().await;
    cluster.shutdown().await;
}

/// A node, a tenant with a key, and an allocation that has ended. Returns their ids.
async fn add_one_of_each(cluster: &TestCluster) -> Vec<String> {
    let name = format!("more-{}", Uuid::new_v4().simple());
    let node = cluster.admin.post("/api/v1/admin/nodes", &node_body(&name, "h100", GPUS)).await.created();
    let (mut claims, subject) = (cluster.identity.claims_of("user").unwrap(), Uuid::new_v4().to_string());
    claims["sub"] = json!(subject);
    let token = cluster.identity.mint(&claims).unwrap();
    let key = json!({ "name": "laptop", "public_key": ssh_public_key(&name) });
    let key = cluster.user.as_bearer(token.expose_secret()).post("/api/v1/ssh-keys", &key).await.created();
    let body = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1, "queue_seconds": 600 });
    let queued = cluster.user.post("/api/v1/allocations", &body).await.created();
    let queued = AllocationHandle::new(id_of(&queued), cluster.user.clone());
    queued.release_fully().await;
    vec![id_of(&node).to_string(), subject, id_of(&key).to_string(), queued.id.to_string()]
}

/// Scrapes before and after there are more entities and tenants, where no GPU is free. A label by entity or tenant would add a series
/// for each.
async fn expect_series_that_do_not_grow(cluster: &TestCluster) {
    const MORE: u32 = 100;
    let are_counted = |count: u32| {
        move |page: &MetricsPage| {
            let of = |kind, state| page.value("entities_by_state", &[("kind", kind), ("state", state)]);
            [("node", "registered"), ("tenant", "present"), ("allocation", "released")]
                .into_iter()
                .all(|(kind, state)| of(kind, state) >= Some(f64::from(count)))
        }
    };
    add_one_of_each(cluster).await;
    let before = cluster.wait_for_metrics(0, are_counted(1)).await.series();
    let mut ids = Vec::new();
    for _ in 0..MORE / 10 {
        let ten = futures::future::join_all((0..10).map(|_| add_one_of_each(cluster))).await;
        ids.extend(ten.into_iter().flatten());
    }
    let page = cluster.wait_for_metrics(0, are_counted(MORE)).await;
    let after = page.series();
    // Tables are measured for the first time 20 s after the start.
    let grown: Vec<_> = after.difference(&before).filter(|series| !series.starts_with("table_")).collect();
    assert!(grown.len() < MORE as usize / 2, "{} series came with {MORE} more of each: {grown:#?}", grown.len());
    let named: Vec<_> = ids.iter().filter(|id| page.text.contains(id.as_str())).collect();
    assert!(named.is_empty(), "ids in the metrics: {named:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn queued_and_failed_allocations_show_in_metrics_whose_number_does_not_grow() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.node_with("h100", &["--simulate-failure", "provision"]).await;
    let failed = cluster.rent("h100", 1).await;
    failed.expect_state("released").await;
    cluster.wait_for_metrics(0, |page| page.value("provisioning_failures_total", &[]) == Some(1.0)).await;

    let body = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 8, "queue_seconds": 600 });
    cluster.restart_agent_with_flags(&node, &[]).await;
    let holder = cluster.rent_active("h100", 8).await;
    let queued = cluster.user.post("/api/v1/allocations", &body).await.created();
    cluster.wait_for_metrics(0, |page| page.value("provisioning_queue_depth", &[]) == Some(1.0)).await;
    let queued = AllocationHandle::new(id_of(&queued), cluster.user.clone());
    queued.release_fully().await;
    cluster.wait_for_metrics(0, |page| page.value("provisioning_queue_depth", &[]) == Some(0.0)).await;
    expect_series_that_do_not_grow(&cluster).await;
    holder.release_fully().await;
    cluster.allow_error("simulated_failure");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invariant_violation_is_counted_and_logged_as_an_error() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 2).await;
    let violations = |id: &'static str| {
        move |page: &MetricsPage| page.value("invariant_violations_total", &[("id", id)]) > Some(0.0)
    };

    // The allocation has GPUs that its node does not hold.
    let (body,): (Value,) =
        sqlx::query_as("SELECT body FROM entity WHERE id = $1").bind(node.id).fetch_one(&cluster.pool).await.unwrap();
    let emptied = "UPDATE entity SET body = jsonb_set(body, '{holds}', '{}') WHERE id = $1";
    sqlx::query(emptied).bind(node.id).execute(&cluster.pool).await.unwrap();
    cluster.wait_for_metrics(0, violations("I2")).await;
    let mended = "UPDATE entity SET body = $2 WHERE id = $1";
    sqlx::query(mended).bind(node.id).bind(&body).execute(&cluster.pool).await.unwrap();

    // The history has a transition that the entity does not have.
    let ahead = "UPDATE history SET version = version + $2 WHERE entity = $1";
    sqlx::query(ahead).bind(allocation.id).bind(10).execute(&cluster.pool).await.unwrap();
    cluster.wait_for_metrics(0, violations("I1")).await;
    sqlx::query(ahead).bind(allocation.id).bind(-10).execute(&cluster.pool).await.unwrap();

    // A node that waits for its enrollment without a deadline.
    let waiting = cluster.register("h100").await;
    cluster.bundle(&waiting).await;
    sqlx::query("DELETE FROM deadline WHERE entity = $1").bind(waiting.id).execute(&cluster.pool).await.unwrap();
    cluster.wait_for_metrics(0, violations("I8")).await;

    // A user's transition without an audit row.
    let unseen = "UPDATE history SET actor = 'user:nobody' WHERE entity = $1 AND command = 'reserved'";
    sqlx::query(unseen).bind(allocation.id).execute(&cluster.pool).await.unwrap();
    cluster.wait_for_metrics(0, violations("I7")).await;

    // A deleted account has a key again.
    let accounts = "/api/v1/service-accounts";
    let account = cluster.user.post(accounts, &json!({ "name": "gone" })).await.created();
    let keys = format!("{accounts}/{}/keys", id_of(&account));
    cluster.user.send_once(Method::POST, &keys, None).await.created();
    let (with_key,): (Value,) = sqlx::query_as("SELECT body FROM entity WHERE id = $1")
        .bind(id_of(&account))
        .fetch_one(&cluster.pool)
        .await
        .unwrap();
    cluster.user.delete(&format!("{accounts}/{}", id_of(&account))).await;
    let revived = "UPDATE entity SET body = jsonb_set(body, '{keys}', $2->'keys') WHERE id = $1";
    sqlx::query(revived).bind(id_of(&account)).bind(&with_key).execute(&cluster.pool).await.unwrap();
    cluster.wait_for_metrics(0, violations("I6")).await;

    allocation.release_fully().await;
    cluster.allow_error("invariant_violated");
    cluster.shutdown().await;
}
