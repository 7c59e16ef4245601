//! What operators see: one trace through everything, spans at a collector, figures of every process, and its stats.

mod collector;
mod page;

use async_nats::jetstream;
use collector::Collector;
use futures::StreamExt;
use page::Page;
use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::world::{PATIENCE, REGION, Rented, World, id_of};
use uuid::Uuid;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

/// A trace of the caller's own that is sampled.
fn traceparent() -> String {
    format!("00-{TRACE}-{CALLER}-01")
}

/// A request for GPUs, as part of the caller's trace.
async fn rent_traced(world: &World, correlation_id: &str) -> Rented {
    let body = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 2 });
    let request = world
        .user
        .request(Method::POST, "/api/v1/allocations")
        .header("Idempotency-Key", Uuid::new_v4().to_string())
        .header("X-Correlation-Id", correlation_id)
        .header("traceparent", traceparent())
        .header("tracestate", "vendor=1")
        .json(&body);
    let made = world.user.send(request).await;
    assert_eq!(made.headers["x-correlation-id"], correlation_id);
    Rented::new(id_of(&made.created()), world.user.clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_leads_from_the_request_to_the_agent_and_back_to_the_active_allocation() {
    let mut world = World::plan().replicas(2).start().await;
    let node = world.node("h100").await;
    let allocation = rent_traced(&world, "job-17").await;
    allocation.expect_state("active").await;

    // The agent's own lines.
    let log = world.agent_log(&node);
    let lines: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let finished = lines.iter().find(|line| line["message"] == "task finished").expect("the agent did its task");
    assert_eq!((&finished["trace_id"], &finished["correlation_id"]), (&json!(TRACE), &json!("job-17")), "{finished}");
    assert_ne!(finished["span_id"], CALLER, "the agent's work is a span of its own");
    assert_eq!(finished["resource_name"], format!("allocation/{}", allocation.id));

    // The control plane's lines about its result.
    let reported = |line: &Value| line["message"].as_str().is_some_and(|text| text.starts_with("task succeeded"));
    let line = (0..2).flat_map(|index| world.replica_lines(index)).find(reported).expect("the result was recorded");
    assert_eq!((&line["trace_id"], &line["correlation_id"]), (&json!(TRACE), &json!("job-17")), "{line}");

    // The transition that it led to, and what the bus was told of it.
    let (active,): (String,) =
        sqlx::query_as("SELECT correlation_id FROM history WHERE entity = $1 AND to_state = 'active'")
            .bind(allocation.id)
            .fetch_one(&world.pool)
            .await
            .unwrap();
    assert_eq!(active, "job-17");
    let told = headers_of(&world, "provisioning.active", allocation.id).await;
    let header = |name: &str| told.get(name).map(|value| value.as_str().to_owned()).unwrap_or_default();
    assert!(header("traceparent").starts_with(&format!("00-{TRACE}-")), "{told:?}");
    assert!(!header("traceparent").contains(CALLER), "{told:?}");
    assert_eq!((header("tracestate").as_str(), header("x-correlation-id").as_str()), ("vendor=1", "job-17"));

    allocation.release().await;
    allocation.expect_state("released").await;
    world.end().await;
}

/// The headers of the event of that type about that allocation.
async fn headers_of(world: &World, subject: &str, allocation: Uuid) -> async_nats::HeaderMap {
    let context = jetstream::new(world.bus().await);
    let stream = context.get_stream("PROVISIONING").await.unwrap();
    let config = jetstream::consumer::pull::Config { filter_subject: subject.to_owned(), ..Default::default() };
    let consumer = stream.create_consumer(config).await.unwrap();
    let mut messages = consumer.messages().await.unwrap();
    tokio::time::timeout(PATIENCE, async {
        loop {
            let message = messages.next().await.unwrap().unwrap();
            if String::from_utf8_lossy(&message.payload).contains(&allocation.to_string()) {
                return message.headers.clone().unwrap();
            }
        }
    })
    .await
    .expect("the bus is told")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_is_sent_the_spans_of_a_request_at_its_edge_and_at_the_owner() {
    let collector = Collector::start().await;
    let mut world = World::plan().replicas(2).variable("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url()).start().await;
    let sku = world.offer("h100", 8).await;
    let owner = world.owner_of("sku", sku).await;
    let elsewhere = world.at_replica(1 - owner, "admin");
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
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_process_shows_its_figures_health_and_stats_whatever_its_roles() {
    let mut world = World::plan()
        .replicas(2)
        .variable_of(1, "SVC_ROLES", "entities,billing,outbox-relay,provisioning")
        .start()
        .await;
    let node = world.node("h100").await;
    let allocation = world.rent("h100", 2).await;
    allocation.expect_state("active").await;
    let http = reqwest::Client::new();
    let (mut figures, mut batches) = (Vec::new(), 0);
    for replica in &world.replicas {
        let url = replica.operations_url();
        for path in ["/api/v1/healthz", "/api/v1/readyz"] {
            assert_eq!(http.get(format!("{url}{path}")).send().await.unwrap().status(), 200, "{path}");
        }
        let page = http.get(format!("{url}/metrics")).send().await.unwrap();
        assert!(page.headers()["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
        figures.push(Page::parse(&page.text().await.unwrap()));

        let stats = format!("{url}/api/v1/internal/stats");
        for wrong in ["", "Bearer", "Bearer wrong", "Basic d3Jvbmc6"] {
            let refused = http.get(&stats).header("authorization", wrong).send().await.unwrap();
            assert_eq!(refused.status(), 401, "{wrong:?}");
        }
        let stats: Value = http.get(&stats).bearer_auth(&world.stats_token).send().await.unwrap().json().await.unwrap();
        assert_eq!(stats["member"]["name"], replica.name());
        assert!(stats["lease_fresh"] == true && stats["nats_connected"] == true, "{stats}");
        batches +=
            stats["committer"].as_array().unwrap().iter().filter_map(|worker| worker["batches"].as_u64()).sum::<u64>();
        assert!(stats["entities"]["shards"].as_u64() > Some(0), "{stats}");
    }
    assert!(batches > 0, "what the world did was committed by somebody");
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
    // A process without the API listens for operators alone.
    assert!(http.get(world.replicas[1].public_url()).send().await.unwrap_err().is_connect());
    eventually(&world, 1, |page| page.value("nats_consumer_lag", &[("stream", "PROVISIONING")]) == Some(0.0)).await;

    allocation.release().await;
    allocation.expect_state("released").await;
    node.expect_all_free().await;
    world.end().await;
}

/// Waits until a replica's page of figures is as wanted.
async fn eventually(world: &World, replica: usize, wanted: impl Fn(&Page) -> bool) {
    let until = Instant::now() + PATIENCE;
    loop {
        let page = reqwest::get(format!("{}/metrics", world.replicas[replica].operations_url())).await.unwrap();
        let text = page.text().await.unwrap();
        if wanted(&Page::parse(&text)) {
            return;
        }
        assert!(Instant::now() < until, "not in time: {text}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_for_a_node_or_fails_on_it_shows_in_the_figures() {
    let mut world = World::start().await;
    let node = world.node_with("h100", &["--simulate-failure", "provision"]).await;
    let failed = world.rent("h100", 1).await;
    failed.expect_state("released").await;
    eventually(&world, 0, |page| page.value("provisioning_failures_total", &[]) == Some(1.0)).await;

    let body = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 8, "queue_seconds": 600 });
    world.mend_agent(&node, &[]).await;
    let holder = world.rent("h100", 8).await;
    holder.expect_state("active").await;
    let queued = world.user.post("/api/v1/allocations", &body).await.created();
    eventually(&world, 0, |page| page.value("provisioning_queue_depth", &[]) == Some(1.0)).await;
    let queued = Rented::new(id_of(&queued), world.user.clone());
    queued.release().await;
    queued.expect_state("released").await;
    eventually(&world, 0, |page| page.value("provisioning_queue_depth", &[]) == Some(0.0)).await;
    holder.release().await;
    holder.expect_state("released").await;
    world.expects_error("simulated_failure");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_invariant_is_counted_and_wakes_someone() {
    let mut world = World::start().await;
    let node = world.node("h100").await;
    let allocation = world.rent("h100", 2).await;
    allocation.expect_state("active").await;
    let violations =
        |id: &'static str| move |page: &Page| page.value("invariant_violations_total", &[("id", id)]) > Some(0.0);

    // The allocation believes to have GPUs that its node does not hold.
    let (body,): (Value,) =
        sqlx::query_as("SELECT body FROM entity WHERE id = $1").bind(node.id).fetch_one(&world.pool).await.unwrap();
    let emptied = "UPDATE entity SET body = jsonb_set(body, '{holds}', '{}') WHERE id = $1";
    sqlx::query(emptied).bind(node.id).execute(&world.pool).await.unwrap();
    eventually(&world, 0, violations("I2")).await;
    let mended = "UPDATE entity SET body = $2 WHERE id = $1";
    sqlx::query(mended).bind(node.id).bind(&body).execute(&world.pool).await.unwrap();

    // The history knows of a transition that the entity does not.
    let ahead = "UPDATE history SET version = version + $2 WHERE entity = $1";
    sqlx::query(ahead).bind(allocation.id).bind(10).execute(&world.pool).await.unwrap();
    eventually(&world, 0, violations("I1")).await;
    sqlx::query(ahead).bind(allocation.id).bind(-10).execute(&world.pool).await.unwrap();

    // A node that waits to be enrolled, for ever.
    let waiting = world.register("h100").await;
    world.bundle(&waiting).await;
    sqlx::query("DELETE FROM deadline WHERE entity = $1").bind(waiting.id).execute(&world.pool).await.unwrap();
    eventually(&world, 0, violations("I8")).await;

    // Somebody did what no audit row tells of.
    let unseen = "UPDATE history SET actor = 'user:nobody' WHERE entity = $1 AND command = 'reserved'";
    sqlx::query(unseen).bind(allocation.id).execute(&world.pool).await.unwrap();
    eventually(&world, 0, violations("I7")).await;

    // A deleted account is given a key again.
    let accounts = "/api/v1/service-accounts";
    let account = world.user.post(accounts, &json!({ "name": "gone" })).await.created();
    let keys = format!("{accounts}/{}/keys", id_of(&account));
    world.user.once(Method::POST, &keys, None).await.created();
    let (with_key,): (Value,) = sqlx::query_as("SELECT body FROM entity WHERE id = $1")
        .bind(id_of(&account))
        .fetch_one(&world.pool)
        .await
        .unwrap();
    world.user.delete(&format!("{accounts}/{}", id_of(&account))).await;
    let revived = "UPDATE entity SET body = jsonb_set(body, '{keys}', $2->'keys') WHERE id = $1";
    sqlx::query(revived).bind(id_of(&account)).bind(&with_key).execute(&world.pool).await.unwrap();
    eventually(&world, 0, violations("I6")).await;

    allocation.release().await;
    allocation.expect_state("released").await;
    world.expects_error("invariant_violated");
    world.end().await;
}
