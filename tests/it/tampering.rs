//! Tampering with Postgres: no decision is made from, and no task is signed for, data that was changed there without the service.

use reqwest::Method;
use serde_json::json;
use tests::cluster::fake_agent::FakeAgent;
use tests::cluster::{GPUS, TestCluster};

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
    let altered = "UPDATE entity SET body = replace(body::text, 'node.validate', 'node.reboot')::jsonb WHERE id = $1";
    let done = sqlx::query(altered).bind(node.id).execute(&cluster.pool).await.unwrap();
    assert_eq!(done.rows_affected(), 1);
    cluster.allow_parked(node.id);
    cluster.allow_error("snapshot_refused");
    cluster.allow_error(&node.id.to_string());
    cluster.restart_replica(0).await;

    let refused = agent.poll(1).await.expect("an answer");
    assert_eq!(refused.status.as_u16(), 503, "no task is signed: {refused}");
    let shown = cluster.admin.get(&format!("/api/v1/admin/runtime/entities/node/{}", node.id)).await.ok();
    assert!(shown.to_string().contains("the row was altered"), "an operator reads why: {shown}");
    let metrics = format!("{}/metrics", cluster.replicas[0].operations_url());
    let page = reqwest::get(metrics).await.unwrap().text().await.unwrap();
    assert!(page.contains("snapshots_refused_total{kind=\"node\",why=\"altered\"}"), "{page}");

    // The restored row is the committed one.
    let mended = "UPDATE entity SET body = replace(body::text, 'node.reboot', 'node.validate')::jsonb WHERE id = $1";
    sqlx::query(mended).bind(node.id).execute(&cluster.pool).await.unwrap();
    let restart = format!("/api/v1/admin/runtime/entities/node/{}/restart", node.id);
    cluster.admin.send_once(Method::POST, &restart, Some(&json!({ "reason": "put back" }))).await.accepted();
    let task = agent.next_task().await;
    assert_eq!(task.task.kind(), "node.validate");
    cluster.shutdown().await;
}
