//! The first rental: a node is onboarded, rented and released, with all events, audit rows and responses.

use async_nats::jetstream::{self, Message};
use futures::StreamExt;
use serde_json::Value;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tests::cluster::{TestCluster, WAIT_TIMEOUT};

/// What a rental publishes.
const PUBLISHED: [&str; 10] = [
    "sku.state_changed",
    "node.state_changed",
    "provisioning.requested",
    "node.devices_reserved",
    "provisioning.started",
    "node.tenant_ready",
    "provisioning.active",
    "provisioning.release_requested",
    "node.tenant_gone",
    "provisioning.released",
];

#[tokio::test(flavor = "multi_thread")]
async fn node_is_onboarded_rented_and_released() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.node("h100").await;
    let allocation = cluster.rent("h100", 4).await;
    let active = allocation.expect_state("active").await;
    assert_eq!(active["devices"].as_array().map(Vec::len), Some(4), "{active}");
    assert_eq!(active["node_id"], node.id.to_string());
    assert!(active["ssh"]["username"].is_string() && active["ssh"]["host"].is_string(), "{active}");
    assert!(active["active_at"].is_string() && active["price"].is_object(), "{active}");
    let held = node.get().await;
    assert_eq!((held["gpus_total"].as_u64(), held["state"].as_str()), (Some(8), Some("active")), "{held}");
    assert_ne!(held["gpus_free"], 8, "{held}");
    let home = cluster.agent_folder(&node).join(format!("state/allocations/{}/home", allocation.id));
    assert!(home.is_dir(), "the tenant has a home on the node");

    allocation.release().await;
    let released = allocation.expect_state("released").await;
    assert!(released["failure"].is_null(), "{released}");
    assert!(released["released_at"].is_string() && released["release_requested_at"].is_string(), "{released}");
    let free = node.expect_all_free().await;
    assert_eq!((free["gpus_free"].as_u64(), free["state"].as_str()), (Some(8), Some("active")), "{free}");
    assert!(!home.exists(), "nothing of the tenant is left on the node");
    let left = std::fs::read_dir(cluster.agent_folder(&node).join("state/allocations")).unwrap().count();
    assert_eq!(left, 0, "the node keeps nothing of its tenants");

    let states: Vec<_> = released["status_history"].as_array().unwrap().iter().map(|step| &step["state"]).collect();
    assert_eq!(states, ["requested", "provisioning", "active", "releasing", "released"]);
    assert_eq!(
        cluster.states_of(allocation.id).await,
        ["requested", "provisioning", "active", "releasing", "released"]
    );
    let lived = cluster.states_of(node.id).await;
    assert_eq!(lived, ["registered", "bootstrap-issued", "enrolling", "active"]);
    expect_audited(&cluster, node.id, &["nodes.create", "nodes.issue_enrollment_token", "nodes.enroll"]).await;
    expect_audited(&cluster, allocation.id, &["allocations.request", "allocations.release"]).await;

    cluster.expect_settled().await;
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let published = events(&cluster).await;
        let missing: Vec<_> = PUBLISHED.iter().filter(|subject| !published.contains(**subject)).collect();
        if missing.is_empty() {
            break;
        }
        assert!(Instant::now() < until, "{missing:?} are not published; the streams have {published:?}");
    }
    cluster.shutdown().await;
}

async fn expect_audited(cluster: &TestCluster, target: uuid::Uuid, actions: &[&str]) {
    let audited = cluster.audit_of(target).await;
    for action in actions {
        let row = audited.iter().find(|(_, named, ..)| named == action);
        let (actor, _, metadata, correlation_id) = row.unwrap_or_else(|| panic!("no {action} in {audited:?}"));
        assert!(actor.contains(':') && !correlation_id.is_empty() && metadata.is_object(), "{row:?}");
    }
}

/// The subjects of all messages in the streams; each message is checked.
async fn events(cluster: &TestCluster) -> BTreeSet<String> {
    let context = jetstream::new(cluster.bus().await);
    let mut subjects = BTreeSet::new();
    for name in ["PROVISIONING", "NODES"] {
        let stream = context.get_stream(name).await.expect("the stream is there");
        let config = jetstream::consumer::pull::Config::default();
        let consumer = stream.create_consumer(config).await.expect("the operator may read the stream");
        let mut messages =
            consumer.fetch().max_messages(1000).expires(Duration::from_secs(2)).messages().await.unwrap();
        while let Some(message) = messages.next().await {
            let message = message.expect("a message");
            expect_cloud_event(&message);
            subjects.insert(message.subject.to_string());
        }
    }
    subjects
}

/// Asserts a CloudEvent 1.0 in JSON format, with the headers of the specification and without secrets.
fn expect_cloud_event(message: &Message) {
    let event: Value = serde_json::from_slice(&message.payload).expect("an event is JSON");
    assert_eq!(event["specversion"], "1.0", "{event}");
    for field in ["id", "source", "type", "subject", "time"] {
        assert!(event[field].as_str().is_some_and(|text| !text.is_empty()), "no {field} in {event}");
    }
    assert_eq!(event["type"], message.subject.as_str());
    let headers = message.headers.as_ref().expect("an event has headers");
    let header = |name: &str| headers.get(name).map(|value| value.as_str().to_owned());
    assert_eq!(header("Nats-Msg-Id").as_deref(), event["id"].as_str());
    assert!(header("x-correlation-id").is_some_and(|id| !id.is_empty()), "{event}");
    expect_no_secret_key(&event["data"]);
}

fn expect_no_secret_key(value: &Value) {
    match value {
        Value::Object(fields) => {
            for (name, inner) in fields {
                let suspect =
                    ["secret", "token", "key", "password"].iter().find(|word| name.to_lowercase().contains(**word));
                assert_eq!(suspect, None, "an event has a field {name}");
                expect_no_secret_key(inner);
            }
        }
        Value::Array(items) => items.iter().for_each(expect_no_secret_key),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
