//! Repetitions of requests over several replicas, after what they refer to is gone and the replica that answered is dead.

use reqwest::Method;
use serde_json::{Value, json};
use tests::world::client::{Answer, Client};
use tests::world::{World, id_of, ssh_public_key};

async fn rent(client: &Client, body: &Value) -> Answer {
    rent_under(client, "k", body).await
}

async fn rent_under(client: &Client, key: &str, body: &Value) -> Answer {
    client.send(client.request(Method::POST, "/api/v1/allocations").header("Idempotency-Key", key).json(body)).await
}

fn is_replayed(answer: &Answer) -> bool {
    answer.headers.get("idempotency-replayed").is_some_and(|value| value == "true")
}

#[tokio::test(flavor = "multi_thread")]
async fn rental_is_replayed_by_every_replica_after_its_references_are_gone_and_its_replica_is_dead() {
    let mut world = World::plan().replicas(3).start().await;
    let sku = world.offer("h100", 8).await;
    let key = json!({ "name": "laptop", "public_key": ssh_public_key("laptop") });
    let key = id_of(&world.user.post("/api/v1/ssh-keys", &key).await.created());
    let body = json!({ "sku": "h100", "gpu_count": 1, "queue_seconds": 600, "ssh_key_ids": [key] });
    let first = rent(&world.at_replica(0, "user"), &body).await;
    assert!(!is_replayed(&first), "{first}");
    let made = first.created();
    // The reference of a refusal is made later, and does not change the refusal.
    let unknown = json!({ "sku": "b200", "gpu_count": 1 });
    rent_under(&world.at_replica(0, "user"), "l", &unknown).await.refused(400, "invalid_request");

    world.at_replica(1, "user").delete(&format!("/api/v1/ssh-keys/{key}")).await;
    let review = json!({ "reason": "x", "impact_review": "few", "rollback_plan": "activate it" });
    for approver in [&world.admin, &world.second_admin] {
        approver.post(&format!("/api/v1/admin/skus/{sku}/deactivate"), &review).await.accepted();
    }
    world.offer("b200", 8).await;
    world.kill9_replica(0);
    for replica in [1, 2] {
        let again = rent(&world.at_replica(replica, "user"), &body).await;
        assert!(is_replayed(&again), "{again}");
        assert_eq!(again.created(), made);
        let refused = rent_under(&world.at_replica(replica, "user"), "l", &unknown).await;
        assert!(is_replayed(&refused), "{refused}");
        refused.refused(400, "invalid_request");
    }
    // Had it been killed between the commit and the answer, there would be the machine's reply alone.
    sqlx::query("UPDATE command SET answer = NULL WHERE reply IS NOT NULL").execute(&world.pool).await.unwrap();
    let again = rent(&world.at_replica(2, "user"), &body).await;
    assert!(is_replayed(&again), "{again}");
    assert_eq!(id_of(&again.created()), id_of(&made));
    world.restart_replica(0).await;
    world.end().await;
}
