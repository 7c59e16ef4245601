//! Idempotent replays over several replicas, after the references of the request and the replica that answered it are gone.

use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::client::{ApiResponse, Client};
use tests::cluster::{TestCluster, WAIT_TIMEOUT, id_of, ssh_public_key};

async fn rent(client: &Client, body: &Value) -> ApiResponse {
    rent_under(client, "k", body).await
}

/// Repeated under the same key while a takeover is in progress.
async fn rent_under(client: &Client, key: &str, body: &Value) -> ApiResponse {
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let request = client.request(Method::POST, "/api/v1/allocations").header("Idempotency-Key", key);
        let answer = client.send(request.json(body)).await;
        if !answer.is_transient() || Instant::now() >= until {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

fn is_replayed(answer: &ApiResponse) -> bool {
    answer.headers.get("idempotency-replayed").is_some_and(|value| value == "true")
}

#[tokio::test(flavor = "multi_thread")]
async fn rental_is_replayed_by_every_replica_after_its_references_are_gone_and_its_replica_is_dead() {
    let mut cluster = TestCluster::builder().replicas(3).start().await;
    let sku = cluster.offer_sku("h100", 8).await;
    let key = json!({ "name": "laptop", "public_key": ssh_public_key("laptop") });
    let key = id_of(&cluster.user.post("/api/v1/ssh-keys", &key).await.created());
    let body = json!({ "sku": "h100", "gpu_count": 1, "queue_seconds": 600, "ssh_key_ids": [key] });
    let first = rent(&cluster.at_replica(0, "user"), &body).await;
    assert!(!is_replayed(&first), "{first}");
    let made = first.created();
    // The missing reference of a refused request is created later, and does not change the replayed error.
    let unknown = json!({ "sku": "b200", "gpu_count": 1 });
    rent_under(&cluster.at_replica(0, "user"), "l", &unknown).await.expect_error(400, "invalid_request");

    cluster.at_replica(1, "user").delete(&format!("/api/v1/ssh-keys/{key}")).await;
    let review = json!({ "reason": "x", "impact_review": "few", "rollback_plan": "activate it" });
    for approver in [&cluster.admin, &cluster.second_admin] {
        approver.post(&format!("/api/v1/admin/skus/{sku}/deactivate"), &review).await.accepted();
    }
    cluster.offer_sku("b200", 8).await;
    cluster.kill9_replica(0);
    for replica in [1, 2] {
        let repeated = rent(&cluster.at_replica(replica, "user"), &body).await;
        assert!(is_replayed(&repeated), "{repeated}");
        assert_eq!(repeated.created(), made);
        let refused = rent_under(&cluster.at_replica(replica, "user"), "l", &unknown).await;
        assert!(is_replayed(&refused), "{refused}");
        refused.expect_error(400, "invalid_request");
    }
    // Without the response that the first repetition has stored, the answer follows from the commits' rows.
    sqlx::query("UPDATE command SET answer = NULL WHERE reply IS NOT NULL").execute(&cluster.pool).await.unwrap();
    let repeated = rent(&cluster.at_replica(2, "user"), &body).await;
    assert!(is_replayed(&repeated), "{repeated}");
    assert_eq!(repeated.created(), made);
    cluster.restart_replica(0).await;
    cluster.shutdown().await;
}
