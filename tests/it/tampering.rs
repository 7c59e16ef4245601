//! Tampering with Postgres: no decision is made from, and no task is signed for, data that was changed there without the service.

use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::fake_agent::FakeAgent;
use tests::cluster::{GPUS, REGION, TestCluster, WAIT_TIMEOUT, id_of, ssh_public_key};
use uuid::Uuid;

const BINDINGS: &str = "/api/v1/admin/platform-roles/bindings";

/// Replaces a text in the row of an entity, past the service.
async fn alter(cluster: &TestCluster, id: Uuid, [from, to]: [&str; 2]) {
    let statement =
        "UPDATE entity SET body = replace(body::text, $2, $3)::jsonb WHERE id = $1 AND strpos(body::text, $2) > 0";
    let done = sqlx::query(statement).bind(id).bind(from).bind(to).execute(&cluster.pool).await.unwrap();
    assert_eq!(done.rows_affected(), 1, "{from} is in the row");
}

/// The refusal of an entity's row is counted, which the alert `GPUAASSnapshotAltered` is about, and logged with the entity and the runbook.
async fn expect_refusal_is_visible(cluster: &TestCluster, kind: &str, id: Uuid) {
    let counted = cluster.metric_total("snapshots_refused_total", &[("kind", kind), ("why", "altered")]).await;
    assert!(counted >= 1.0, "{kind}: {counted}");
    let is_meant = |line: &&Value| {
        let message = line["message"].as_str().unwrap_or_default();
        line["level"] == "ERROR" && line["error_code"] == "snapshot_refused" && message.contains(&id.to_string())
    };
    let until = Instant::now() + WAIT_TIMEOUT;
    let line = loop {
        if let Some(line) = cluster.replica_lines(0).iter().find(is_meant) {
            break line.clone();
        }
        assert!(Instant::now() < until, "the refusal of {kind} {id} is not logged");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert!(line["message"].as_str().unwrap().contains("ops.snapshot.altered"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tampered_task_is_not_dispatched_and_its_node_is_parked() {
    let mut cluster = TestCluster::start().await;
    cluster.offer_sku("h100", GPUS).await;
    let node = cluster.register("h100").await;
    let agent = FakeAgent::onboard(&cluster.bundle(&node).await, GPUS).await;
    let order = json!({ "type": "node.validate", "reason": "a look" });
    cluster.admin.post(&format!("{}/tasks", node.path()), &order).await.created();
    // Passivated, so that the row is loaded again.
    cluster.replicas[0].stop().await;
    alter(&cluster, node.id, ["node.validate", "node.reboot"]).await;
    cluster.allow_parked(node.id);
    cluster.allow_error("snapshot_refused");
    cluster.allow_error(&node.id.to_string());
    cluster.restart_replica(0).await;

    let refused = agent.poll(1).await.expect("an answer");
    assert_eq!(refused.status.as_u16(), 503, "no task is signed: {refused}");
    let shown = cluster.admin.get(&format!("/api/v1/admin/runtime/entities/node/{}", node.id)).await.ok();
    assert!(shown.to_string().contains("the row was altered"), "an operator reads why: {shown}");
    expect_refusal_is_visible(&cluster, "node", node.id).await;
    let listed = cluster.admin.get("/api/v1/admin/nodes").await.ok();
    assert_eq!(listed["items"], json!([]), "no list shows it as if it were true");

    // The restored row is the committed one.
    alter(&cluster, node.id, ["node.reboot", "node.validate"]).await;
    let restart = format!("/api/v1/admin/runtime/entities/node/{}/restart", node.id);
    cluster.admin.send_once(Method::POST, &restart, Some(&json!({ "reason": "put back" }))).await.accepted();
    let task = agent.next_task().await;
    assert_eq!(task.task.kind(), "node.validate");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn altered_platform_role_is_effective_nowhere() {
    let mut cluster = TestCluster::start().await;
    cluster.bind("user", "auditor").await;
    let subject = cluster.identity.person("user").unwrap().id;
    let (skus, audit_log) = ("/api/v1/admin/skus", "/api/v1/admin/audit-log");
    cluster.user.get(audit_log).await.ok();
    cluster.user.send_once(Method::GET, skus, None).await.expect_error(403, "forbidden");
    let id: Uuid = sqlx::query_scalar("SELECT id FROM entity WHERE kind = 'bindings' AND owner = $1")
        .bind(subject.to_string())
        .fetch_one(&cluster.pool)
        .await
        .unwrap();
    let of_user = format!("{BINDINGS}?subject={subject}");
    let binding = id_of(&cluster.admin.get(&of_user).await.ok()["items"][0]);
    cluster.allow_error("snapshot_refused");

    alter(&cluster, id, ["auditor", "inventory_owner"]).await;
    for path in [skus, audit_log] {
        cluster.user.send_once(Method::GET, path, None).await.expect_error(503, "service_unavailable");
    }
    expect_refusal_is_visible(&cluster, "bindings", id).await;
    // Administrators do not read of a role that was not bound.
    assert_eq!(cluster.admin.get(&of_user).await.ok()["items"], json!([]));
    let one = format!("{BINDINGS}/{binding}");
    cluster.admin.send_once(Method::GET, &one, None).await.expect_error(503, "service_unavailable");

    alter(&cluster, id, ["inventory_owner", "auditor"]).await;
    cluster.user.get(audit_log).await.ok();
    cluster.user.send_once(Method::GET, skus, None).await.expect_error(403, "forbidden");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn altered_ssh_key_opens_no_machine() {
    let mut cluster = TestCluster::start().await;
    cluster.node("h100").await;
    let (own, foreign) = (ssh_public_key("ann"), ssh_public_key("eve"));
    let blob = |key: &str| key.split(' ').nth(1).unwrap().to_owned();
    cluster.user.post("/api/v1/ssh-keys", &json!({ "name": "own", "public_key": own })).await.created();
    let id: Uuid = sqlx::query_scalar("SELECT id FROM entity WHERE kind = 'tenant' AND strpos(body::text, $1) > 0")
        .bind(blob(&own))
        .fetch_one(&cluster.pool)
        .await
        .unwrap();
    // Passivated, so that the row is read again.
    cluster.replicas[0].stop().await;
    alter(&cluster, id, [&blob(&own), &blob(&foreign)]).await;
    cluster.allow_error("snapshot_refused");
    cluster.allow_error(&id.to_string());
    cluster.restart_replica(0).await;

    let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1 });
    let refused = cluster.user.send_once(Method::POST, "/api/v1/allocations", Some(&wanted)).await;
    refused.expect_error(503, "service_unavailable");
    cluster.user.send_once(Method::GET, "/api/v1/ssh-keys", None).await.expect_error(503, "service_unavailable");
    expect_refusal_is_visible(&cluster, "tenant", id).await;
    let rented = "SELECT count(*) FROM entity WHERE kind = 'allocation'";
    let rented: i64 = sqlx::query_scalar(rented).fetch_one(&cluster.pool).await.unwrap();
    assert_eq!(rented, 0, "no machine is asked to admit the key");

    alter(&cluster, id, [&blob(&foreign), &blob(&own)]).await;
    cluster.rent_active("h100", 1).await;
    cluster.shutdown().await;
}
