//! Platform roles and decisions with two approvals, over several replicas.

use serde_json::{Value, json};
use tests::cluster::{TestCluster, id_of, sku_body};

const BINDINGS: &str = "/api/v1/admin/platform-roles/bindings";

#[tokio::test(flavor = "multi_thread")]
async fn revoked_role_is_refused_by_every_replica_at_once() {
    let cluster = TestCluster::builder().replicas(2).start().await;
    let subject = cluster.identity.person("user").unwrap().id;
    let at = |replica: usize| cluster.at_replica(replica, "user");
    let revoke = format!("{BINDINGS}?subject={subject}&role=inventory_owner");
    for round in 0..5 {
        cluster.bind("user", "inventory_owner").await;
        for replica in 0..2 {
            at(replica).get("/api/v1/admin/skus").await.ok();
        }
        cluster.at_replica(round % 2, "admin").delete(&revoke).await.ok();
        for replica in 0..2 {
            at(replica).get("/api/v1/admin/skus").await.expect_error(403, "forbidden");
        }
    }
    let figures = cluster.metrics_of(0).await.text;
    let counted = [
        "list_requests",
        "bind_requests",
        "revoke_requests",
        "mutation_success",
        "mutation_failure",
        "service_unavailable",
    ];
    for name in counted {
        assert!(figures.contains(&format!("api_platform_role_{name}_total")), "{figures}");
    }
    assert!(figures.contains("api_platform_role_admin_denied_total 0"), "{figures}");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn approvals_at_different_replicas_activate_once_and_an_old_approval_expires() {
    let cluster = TestCluster::builder().replicas(3).policy("sku.approval_ttl_seconds", 15).start().await;
    cluster.bind("admin", "platform_operations").await;
    cluster.bind("admin2", "inventory_owner").await;
    let sku = cluster.admin.post("/api/v1/admin/skus", &sku_body("h100", 8)).await.created();
    let path = format!("/api/v1/admin/skus/{}", id_of(&sku));
    let activate = format!("{path}/activate");
    let reason = json!({ "reason": "tested" });
    let first = cluster.admin.post(&activate, &reason).await;
    assert_eq!(first.status.as_u16(), 202, "{first}");
    let waits = |sku: &Value| sku["approvals"].as_array().is_some_and(|approvals| !approvals.is_empty());
    assert!(waits(&cluster.second_admin.get("/api/v1/admin/skus").await.ok()["items"][0]));
    let waiting = cluster.admin.get(&format!("/api/v1/admin/runtime/entities/sku/{}", id_of(&sku))).await.ok();
    let reason_to_wait = "to activate it, a second person in role inventory_owner has to approve";
    assert_eq!(waiting["entity"]["waits_for"], reason_to_wait, "{waiting}");
    cluster
        .admin
        .wait_within(std::time::Duration::from_secs(90), &path, "the approval expired", |sku| !waits(sku))
        .await;

    let (one, two) = (cluster.at_replica(0, "admin"), cluster.at_replica(1, "admin2"));
    let answers = tokio::join!(one.post(&activate, &reason), two.post(&activate, &reason));
    let mut statuses = [answers.0.status.as_u16(), answers.1.status.as_u16()];
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 202], "{} {}", answers.0, answers.1);
    let audited = cluster.audit_of(id_of(&sku)).await;
    let count = |action: &str| audited.iter().filter(|(_, named, ..)| named == action).count();
    assert_eq!((count("skus.activate"), count("skus.approve"), count("skus.expire_approval")), (1, 3, 1));
    cluster.shutdown().await;
}
