//! The gateway for the logs of nodes: whose lines it passes on, what it refuses, and what happens while the log store is away.

use crate::external_tools::{installed, root, run};
use prost::Message;
use reqwest::Method;
use reqwest::header::CONTENT_TYPE;
use serde_json::{Value, json};
use std::process::Command;
use tests::cluster::client::{ApiResponse, send_request};
use tests::cluster::fake_agent::{FakeAgent, anonymous};
use tests::cluster::fake_log_store::FakeLogStore;
use tests::cluster::{NodeHandle, TestCluster};
use uuid::Uuid;

const PUSH: &str = "/internal/v1/node-logs/loki/api/v1/push";

/// A node with an agent of the test's own, and a client without a certificate, as a collector is one.
pub(crate) struct CollectingNode {
    pub(crate) node: NodeHandle,
    agent: FakeAgent,
    collector: reqwest::Client,
    url: String,
}

impl CollectingNode {
    pub(crate) async fn enroll(cluster: &mut TestCluster) -> Self {
        let (node, bundle) = cluster.registered("h100").await;
        let agent = FakeAgent::enroll(&bundle, 1).await;
        Self { node, agent, collector: anonymous(&bundle), url: format!("{}{PUSH}", cluster.node_url()) }
    }

    /// The same node, with a collector that sends to another address.
    pub(crate) fn pushing_to(self, base: &str) -> Self {
        Self { url: format!("{base}{PUSH}"), ..self }
    }

    pub(crate) async fn token(&self) -> String {
        let answer = self.agent.send(Method::POST, "log-token", None).await.ok();
        answer["token"].as_str().unwrap().to_owned()
    }

    pub(crate) async fn push(&self, token: &str, batch: &Value) -> ApiResponse {
        send_request(self.collector.post(&self.url).bearer_auth(token).json(batch)).await.unwrap()
    }
}

pub(crate) fn batch_of(node_id: Uuid, line: &str) -> Value {
    json!({"streams": [{
        "stream": {
            "service": "node-agent",
            "component": "agent",
            "source": "journald",
            "systemd_unit": "gpuaas-agent.service",
            "host_role": "worker_compute",
            "host_name": "rack7-3",
            "node_id": node_id,
        },
        "values": [["1700000000000000000", line]],
    }]})
}

async fn start(store: &FakeLogStore) -> TestCluster {
    let builder = TestCluster::builder().variable("SVC_LOG_STORE_URL", &store.url());
    let mut cluster =
        builder.variable("SVC_LOG_STORE_CA_PATH", &store.authorities_path().display().to_string()).start().await;
    cluster.offer_sku("h100", 1).await;
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn node_pushes_lines_of_its_own_alone_until_it_is_removed() {
    let store = FakeLogStore::start().await;
    let mut cluster = start(&store).await;
    let (one, other) = (CollectingNode::enroll(&mut cluster).await, CollectingNode::enroll(&mut cluster).await);
    let token = one.token().await;
    cluster.register_secret("a node's log token", &token);

    let batch = batch_of(one.node.id, "a line");
    let pushed = one.push(&token, &batch).await;
    assert_eq!(pushed.status, 204, "{pushed:?}");
    let received = store.received();
    assert_eq!((received.len(), received[0].content_type.as_str()), (1, "application/json"));
    assert_eq!(serde_json::from_slice::<Value>(&received[0].body).unwrap(), batch, "nothing of it is changed");

    let foreign = one.push(&token, &batch_of(other.node.id, "forged")).await;
    assert_eq!(foreign.expect_error(400, "invalid_request").body["details"]["label"], "node_id");
    // The token is no access token of the API, and a user's token none of a node.
    let me = cluster.user.as_bearer(&token).get("/api/v1/me").await;
    me.expect_error(401, "unauthenticated");
    one.push("gpusak_unknown", &batch).await.expect_error(401, "unauthenticated");

    one.node.order("retire").await.accepted();
    one.node.order("remove").await.accepted();
    one.node.expect_state("removed").await;
    one.push(&token, &batch).await.expect_error(401, "unauthenticated");
    assert_eq!(store.received().len(), 1, "nothing else was passed on");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn log_store_outage_and_refusal_of_a_batch_have_different_responses_and_counters() {
    let store = FakeLogStore::start().await;
    let mut cluster = start(&store).await;
    let node = CollectingNode::enroll(&mut cluster).await;
    let (token, batch) = (node.token().await, batch_of(node.node.id, "a line"));
    store.answer(500, "out of disk");
    let failed = node.push(&token, &batch).await;
    failed.expect_error(503, "service_unavailable");
    store.answer(400, "entry too far behind");
    let refused = node.push(&token, &batch).await;
    assert_eq!(refused.expect_error(400, "invalid_request").body["details"]["log_store"], "entry too far behind");
    store.answer(429, "too many");
    node.push(&token, &batch).await.expect_error(429, "rate_limited");
    store.answer(204, "");
    assert_eq!(node.push(&token, &batch).await.status, 204);
    drop(store);
    node.push(&token, &batch).await.expect_error(503, "service_unavailable");

    let page = cluster.metrics_of(0).await;
    let counted = |name: &str| page.number(&format!("node_log_gateway_{name}_total"));
    assert_eq!(
        [counted("requests"), counted("entries"), counted("rejected"), counted("upstream_errors")],
        [5.0, 1.0, 2.0, 2.0]
    );
    assert_eq!(counted("bytes"), batch.to_string().len() as f64);
    cluster.allow_error("the log store");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn store_with_tenants_is_named_as_a_wrong_setting_until_tenant_and_token_are_set() {
    let store = FakeLogStore::start().await;
    store.require("fleet", "Bearer st0re-t0ken-of-the-fleet");
    let mut cluster = start(&store).await;
    let node = CollectingNode::enroll(&mut cluster).await;
    let (token, batch) = (node.token().await, batch_of(node.node.id, "a line"));
    for _ in 0..2 {
        let refused = node.push(&token, &batch).await;
        // The collector keeps the lines.
        assert_eq!(refused.expect_error(503, "service_unavailable").body["details"]["reason"], "log_store_credentials");
    }
    let page = cluster.metrics_of(0).await.text;
    for line in [
        r#"node_log_gateway_store_failures_total{reason="credentials"} 2"#,
        r#"node_log_gateway_store_failures_total{reason="outage"} 0"#,
        "node_log_gateway_rejected_total 0",
    ] {
        assert!(page.lines().any(|found| found == line), "{line}: {page}");
    }
    cluster.allow_error("the log store");
    cluster.shutdown().await;

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    std::fs::write(&file, "st0re-t0ken-of-the-fleet\n").unwrap();
    let builder = TestCluster::builder()
        .variable("SVC_LOG_STORE_URL", &store.url())
        .variable("SVC_LOG_STORE_CA_PATH", &store.authorities_path().display().to_string())
        .variable("SVC_LOG_STORE_TENANT", "fleet")
        .variable("SVC_LOG_STORE_TOKEN_PATH", file.to_str().unwrap());
    let mut cluster = builder.start().await;
    cluster.register_secret("the token of the log store", "st0re-t0ken-of-the-fleet");
    cluster.offer_sku("h100", 1).await;
    let node = CollectingNode::enroll(&mut cluster).await;
    let token = node.token().await;
    assert_eq!(node.push(&token, &batch_of(node.node.id, "a line")).await.status, 204);
    assert_eq!(store.received().len(), 1);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_batches_are_refused_and_the_gateway_serves_on() {
    let store = FakeLogStore::start().await;
    let mut cluster = start(&store).await;
    let node = CollectingNode::enroll(&mut cluster).await;
    let token = node.token().await;
    let push = |content_type: &'static str, body: Vec<u8>| {
        let request = node.collector.post(&node.url).bearer_auth(&token).header(CONTENT_TYPE, content_type).body(body);
        async move { send_request(request).await.unwrap() }
    };
    let four_gigabytes = [vec![0xff, 0xff, 0xff, 0xff, 0x0f], vec![0; 1024]].concat();
    push("application/x-protobuf", four_gigabytes).await.expect_error(413, "payload_too_large");
    push("application/x-protobuf", vec![b' '; 3 << 20]).await.expect_error(413, "payload_too_large");
    push("application/x-protobuf", b"not snappy".to_vec()).await.expect_error(400, "invalid_request");
    push("text/plain", b"a line".to_vec()).await.expect_error(415, "unsupported_media_type");
    push("application/json", b"[".repeat(100_000)).await.expect_error(400, "invalid_request");
    let mut crowded = batch_of(node.node.id, "a line");
    for n in 0..10_000 {
        crowded["streams"][0]["stream"][format!("label_{n}")] = "v".into();
    }
    node.push(&token, &crowded).await.expect_error(400, "invalid_request");
    let mut labelled = batch_of(node.node.id, "a line");
    labelled["streams"][0]["stream"]["allocation_id"] = "1".into();
    let refused = node.push(&token, &labelled).await;
    assert_eq!(refused.expect_error(400, "invalid_request").body["details"]["label"], "allocation_id");
    assert_eq!(node.push(&token, &batch_of(node.node.id, "after all")).await.status, 204);
    cluster.shutdown().await;
}

/// The part of Loki's `push.proto` that the test reads.
#[derive(Clone, PartialEq, Message)]
struct PushRequest {
    #[prost(message, repeated, tag = "1")]
    streams: Vec<Stream>,
}

#[derive(Clone, PartialEq, Message)]
struct Stream {
    #[prost(string, tag = "1")]
    labels: String,
    #[prost(message, repeated, tag = "2")]
    entries: Vec<Entry>,
}

#[derive(Clone, PartialEq, Message)]
struct Entry {
    #[prost(string, tag = "2")]
    line: String,
}

#[tokio::test(flavor = "multi_thread")]
async fn third_party_clients_push_json_and_snappy_protobuf() {
    let store = FakeLogStore::start().await;
    let mut cluster = start(&store).await;
    let node = CollectingNode::enroll(&mut cluster).await;
    let token = node.token().await;
    let labels = batch_of(node.node.id, "")["streams"][0]["stream"].to_string();
    let gateway = format!("{}/internal/v1/node-logs", cluster.node_url());
    let clients = installed("log-clients/node_modules").parent().unwrap().to_owned();
    for client in ["pino", "winston"] {
        let mut push = Command::new("node");
        push.arg(root().join("tests/log-clients/push.mjs"));
        push.args([client, &gateway, &token, &labels, &format!("a line by {client}")]);
        push.env("CLIENT_FOLDER", &clients).env("NODE_EXTRA_CA_CERTS", cluster.authority.certificate_path());
        run(push).await;
    }
    let received = store.received();
    let types: Vec<_> = received.iter().map(|batch| batch.content_type.as_str()).collect();
    assert_eq!(types, ["application/json", "application/x-protobuf"]);
    let json: Value = serde_json::from_slice(&received[0].body).unwrap();
    assert_eq!(json["streams"][0]["stream"]["node_id"], node.node.id.to_string());
    assert!(json["streams"][0]["values"][0][1].as_str().unwrap().contains("a line by pino"), "{json}");
    let bytes = snap::raw::Decoder::new().decompress_vec(&received[1].body).unwrap();
    let stream = &PushRequest::decode(bytes.as_slice()).unwrap().streams[0];
    assert!(stream.labels.contains(&format!("node_id=\"{}\"", node.node.id)), "{}", stream.labels);
    assert!(stream.entries[0].line.contains("a line by winston"), "{}", stream.entries[0].line);
    cluster.shutdown().await;
}
