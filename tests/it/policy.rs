//! Policy values in a running cluster: written at one replica, they apply at all.

use futures::StreamExt as _;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::{TestCluster, WAIT_TIMEOUT, id_of};

const VALUES: &str = "/api/v1/admin/policy-values";
/// Below the 20 s after which a replica reads the values again without an invalidation. A replica that has read a value so late has read it
/// a moment before the next one is written, and would read that 20 s later: three values in a row cannot all be by chance.
const BEFORE_REFRESH: Duration = Duration::from_secs(15);
const RESOLVE: &str = "/api/v1/admin/policy-values/resolve?key=billing.window_seconds";

fn window(seconds: i64) -> Value {
    json!({ "key": "billing.window_seconds", "value": seconds, "reason": "a test" })
}

#[tokio::test(flavor = "multi_thread")]
async fn policy_value_applies_at_all_replicas_before_their_next_refresh_and_its_event_names_no_user() {
    let cluster = TestCluster::builder().replicas(2).start().await;
    let mut words = cluster.bus().await.subscribe("policy.invalidate.>").await.unwrap();
    let mut seen = Vec::new();
    let admins: Vec<_> = (0..2).map(|index| cluster.at_replica(index, "admin")).collect();
    for (n, value) in (100..103).enumerate() {
        let admin = &admins[n % admins.len()];
        let mut body = window(value);
        body["scope"] = json!({ "user_id": "a.b.>" });
        let written = admin.post(VALUES, &body).await.created();
        for reader in &admins {
            let path = format!("{RESOLVE}&user_id=a.b.%3E");
            reader.wait_within(BEFORE_REFRESH, &path, "the value holds", |it| it["value"] == value).await;
        }

        // An event may be published twice: those of the values before are not of this one.
        let (headers, event) = loop {
            let word = tokio::time::timeout(WAIT_TIMEOUT, words.next()).await.expect("an event").unwrap();
            assert_eq!(word.subject.as_str(), "policy.invalidate.billing.window_seconds");
            let event: Value = serde_json::from_slice(&word.payload).unwrap();
            if !seen.contains(&event["id"].to_string()) {
                seen.push(event["id"].to_string());
                break (word.headers.unwrap(), event);
            }
        };
        assert_eq!(headers.get("Nats-Msg-Id").unwrap().as_str(), event["id"]);
        assert!(headers.get("x-correlation-id").is_some());
        assert_eq!(event["data"]["value_id"], written["id"]);
        assert!(!event.to_string().contains("a.b.>"), "{event}");
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn future_policy_value_applies_on_time_at_every_replica_also_after_a_restart() {
    let mut cluster = TestCluster::builder().replicas(3).start().await;
    cluster.admin.post(VALUES, &window(100)).await.created();
    let from = chrono::Utc::now() + chrono::TimeDelta::seconds(20);
    let mut body = window(200);
    body["effective_at"] = json!(from);
    cluster.admin.post(VALUES, &body).await.created();
    cluster.kill9_replica(2);
    cluster.restart_replica(2).await;
    let admins: Vec<_> = (0..3).map(|index| cluster.at_replica(index, "admin")).collect();
    for admin in &admins {
        admin.wait_until(RESOLVE, "a value holds", |it| it["value"] == 100 || it["value"] == 200).await;
    }
    for admin in &admins {
        loop {
            let before = chrono::Utc::now();
            let value = admin.get(RESOLVE).await.ok()["value"].clone();
            let after = chrono::Utc::now();
            if before >= from {
                assert_eq!(value, 200);
                break;
            }
            if after < from {
                assert_eq!(value, 100);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn policy_value_written_during_a_nats_outage_applies_within_a_minute() {
    let mut cluster = TestCluster::builder().replicas(3).start().await;
    // The owner of the values stays the same without NATS.
    cluster.wait_for_balanced_shards().await;
    cluster.set_policy("billing.window_seconds", 100).await;
    let listed = cluster.admin.get(&format!("{VALUES}?key=billing.window_seconds")).await.ok();
    let statement = "SELECT id FROM entity WHERE kind = 'policy' AND body::text LIKE '%' || $1 || '%'";
    let id: uuid::Uuid = sqlx::query_scalar(statement)
        .bind(id_of(&listed["items"][0]).to_string())
        .fetch_one(&cluster.pool)
        .await
        .unwrap();
    let owner = cluster.owner_of("policy", id).await;
    cluster.nats.stop().await;
    // The owner of the values accepts the write; the others cannot be notified.
    let begin = Instant::now();
    cluster.at_replica(owner, "admin").post(VALUES, &window(200)).await.created();
    for index in 0..3 {
        let admin = cluster.at_replica(index, "admin");
        admin.wait_within(Duration::from_secs(60), RESOLVE, "the value holds", |it| it["value"] == 200).await;
    }
    assert!(begin.elapsed() < Duration::from_secs(60));
    cluster.nats.start_again().await.unwrap();
    cluster.expect_settled().await;
    cluster.shutdown().await;
}
