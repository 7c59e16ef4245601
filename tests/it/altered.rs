//! What is altered in Postgres beside the service is not decided from: nothing of it is signed.

use reqwest::Method;
use serde_json::json;
use tests::world::hand::HandAgent;
use tests::world::{GPUS, World};

#[tokio::test(flavor = "multi_thread")]
async fn task_that_is_altered_in_postgres_is_not_handed_out_and_its_node_is_parked() {
    let mut world = World::start().await;
    world.offer("h100", GPUS).await;
    let node = world.register("h100").await;
    let agent = HandAgent::onboard(&world.bundle(&node).await, GPUS).await;
    let order = json!({ "type": "node.validate", "reason": "a look" });
    world.admin.post(&format!("{}/tasks", node.path()), &order).await.created();
    // Asleep, so that the row is read again.
    world.replicas[0].stop().await;
    let altered = "UPDATE entity SET body = replace(body::text, 'node.validate', 'node.reboot')::jsonb WHERE id = $1";
    let done = sqlx::query(altered).bind(node.id).execute(&world.pool).await.unwrap();
    assert_eq!(done.rows_affected(), 1);
    world.expects_parked(node.id);
    world.expects_error("snapshot_refused");
    world.expects_error(&node.id.to_string());
    world.restart_replica(0).await;

    let refused = agent.poll(1).await.expect("an answer");
    assert_eq!(refused.status.as_u16(), 503, "no task is signed: {refused}");
    let shown = world.admin.get(&format!("/api/v1/admin/runtime/entities/node/{}", node.id)).await.ok();
    assert!(shown.to_string().contains("the row was altered"), "an operator reads why: {shown}");
    let metrics = format!("{}/metrics", world.replicas[0].operations_url());
    let page = reqwest::get(metrics).await.unwrap().text().await.unwrap();
    assert!(page.contains("snapshots_refused_total{kind=\"node\",why=\"altered\"}"), "{page}");

    // What is put back is what was committed.
    let mended = "UPDATE entity SET body = replace(body::text, 'node.reboot', 'node.validate')::jsonb WHERE id = $1";
    sqlx::query(mended).bind(node.id).execute(&world.pool).await.unwrap();
    let restart = format!("/api/v1/admin/runtime/entities/node/{}/restart", node.id);
    world.admin.once(Method::POST, &restart, Some(&json!({ "reason": "put back" }))).await.accepted();
    let task = agent.next_task().await;
    assert_eq!(task.task.kind(), "node.validate");
    world.end().await;
}
