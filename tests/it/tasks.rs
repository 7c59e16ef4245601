//! Tasks and their results, and contention for the last GPU.

use reqwest::Method;
use serde_json::{Value, json};
use std::sync::Arc;
use tests::cluster::fake_agent::FakeAgent;
use tests::cluster::{AllocationHandle, GPUS, REGION, TestCluster, id_of};
use uuid::Uuid;
use wire::task::{Task, TaskPayload, TaskResult};

/// The task's first attempt after this one.
async fn attempt_after(agent: &FakeAgent, before: &TaskPayload) -> TaskPayload {
    loop {
        let task = agent.next_task().await;
        if task.attempt > before.attempt {
            return task;
        }
    }
}

/// Reports the result of this attempt, which is recorded. On a slow machine it may have timed out before, and is then followed by another
/// one; returns the attempt whose result is recorded.
async fn report_an_attempt(
    agent: &FakeAgent,
    mut task: TaskPayload,
    result: impl Fn(&TaskPayload) -> TaskResult,
) -> TaskPayload {
    loop {
        let answer = agent.report(task.task_id, &result(&task)).await;
        if answer.code() != "stale_attempt" {
            assert_eq!(answer.ok()["recorded"], "new", "{task:?}");
            return task;
        }
        task = attempt_after(agent, &task).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn task_result_is_recorded_once_and_never_changed() {
    let mut cluster = TestCluster::builder()
        .policy("allocation.release_timeout_seconds", 5)
        .policy("allocation.release_backoff_max_seconds", 1)
        .start()
        .await;
    let (node, foreign) = (cluster.register("h100").await, cluster.register("h100").await);
    let (bundle, of_foreign) = (cluster.bundle(&node).await, cluster.bundle(&foreign).await);
    let agent = FakeAgent::onboard(&bundle, GPUS).await;
    let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 2, "node_id": node.id });
    let allocation = AllocationHandle::new(
        id_of(&cluster.user.post("/api/v1/allocations", &wanted).await.created()),
        cluster.user.clone(),
    );
    let task = agent.next_task().await;
    assert_eq!((task.node_id, task.task.allocation_id()), (node.id, Some(allocation.id)));

    // A task of another node, and an unknown one.
    let stranger = FakeAgent::onboard(&of_foreign, GPUS).await;
    stranger.report(task.task_id, &stranger.success(&task)).await.expect_error(404, "not_found");
    agent.report(Uuid::now_v7(), &agent.success(&task)).await.expect_error(404, "not_found");
    assert_eq!(allocation.get().await["state"], "provisioning");

    // Twice concurrently, and once more.
    let done = agent.success(&task);
    let (one, two) = tokio::join!(agent.report(task.task_id, &done), agent.report(task.task_id, &done));
    let mut recorded = [one.ok(), two.ok()].map(|answer| answer["recorded"].as_str().unwrap().to_owned());
    recorded.sort();
    assert_eq!(recorded, ["already", "new"]);
    assert_eq!(agent.report(task.task_id, &done).await.ok()["recorded"], "already");
    agent.report(task.task_id, &agent.failure(&task)).await.expect_error(409, "state_conflict");
    let told_more = TaskResult { output: Value::as_object(&json!({ "more": 1 })).unwrap().clone(), ..done.clone() };
    agent.report(task.task_id, &told_more).await.expect_error(409, "state_conflict");
    allocation.expect_state("active").await;

    // The first attempt of the release times out: it is stale when its result arrives.
    allocation.release().await;
    let first = agent.next_task().await;
    allocation.expect_state("release_failed").await;
    let second = loop {
        let task = agent.next_task().await;
        if task.attempt > first.attempt || task.task_id != first.task_id {
            break task;
        }
    };
    assert!(matches!(second.task, Task::Release(_)));
    if first.task_id == second.task_id {
        agent.report(first.task_id, &agent.failure(&first)).await.expect_error(409, "stale_attempt");
    }
    let without_proof = |task: &TaskPayload| TaskResult { proof: None, ..agent.success(task) };
    let second = report_an_attempt(&agent, second, without_proof).await;
    allocation.expect_state("release_failed").await;
    // A proof with another signature is invalid.
    let forged = |task: &TaskPayload| TaskResult { proof: stranger.success(task).proof, ..agent.success(task) };
    let third = report_an_attempt(&agent, attempt_after(&agent, &second).await, forged).await;
    allocation.expect_state("release_failed").await;
    report_an_attempt(&agent, attempt_after(&agent, &third).await, |task| agent.success(task)).await;
    allocation.expect_state("released").await;
    node.expect_all_free().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn last_gpu_goes_to_one_of_two_users_and_the_other_sees_the_free_capacity() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    cluster.offer_sku("lone", 1).await;
    let node = cluster.register("lone").await;
    let bundle = cluster.bundle(&node).await;
    let agent = Arc::new(FakeAgent::onboard(&bundle, 1).await);
    let serving = tokio::spawn(Arc::clone(&agent).serve());
    let wanted = json!({ "sku": "lone", "region_code": REGION, "gpu_count": 1 });
    for _ in 0..5 {
        let ask = |index: usize, username: &str| {
            let by = cluster.at_replica(index, username);
            let wanted = wanted.clone();
            async move { (by.post("/api/v1/allocations", &wanted).await, by) }
        };
        let ((one, user), (two, other)) = tokio::join!(ask(0, "user"), ask(1, "user2"));
        let (won, by, lost) = if one.status.is_success() { (one, user, two) } else { (two, other, one) };
        let allocation = AllocationHandle::new(id_of(&won.created()), by);
        let refused = lost.expect_error(409, "insufficient_capacity");
        let details = &refused.body["details"];
        assert!(details["suggestion"].is_string() && details["allocation_id"].is_string(), "{refused}");
        allocation.expect_state("active").await;
        cluster.expect_every_gpu_held_once().await;
        allocation.release_fully().await;
        node.expect_all_free().await;
    }
    serving.abort();
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idempotency_key_rents_once_and_belongs_to_one_request() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let node = cluster.node("h100").await;
    let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1 });
    let send = |index: usize, body: Value| {
        let by = cluster.at_replica(index, "user");
        let request =
            by.request(Method::POST, "/api/v1/allocations").header("Idempotency-Key", "the-one-key").json(&body);
        async move { by.send(request).await }
    };
    let first = send(0, wanted.clone()).await.created();
    let repeated = send(1, wanted.clone()).await;
    assert_eq!(repeated.headers.get("idempotency-replayed").map(|it| it.to_str().unwrap()), Some("true"), "{repeated}");
    assert_eq!(repeated.created()["id"], first["id"]);
    let other = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 2 });
    send(1, other).await.expect_error(422, "idempotency_key_reused");
    let without = cluster.user.request(Method::POST, "/api/v1/allocations").json(&wanted);
    cluster.user.send(without).await.expect_error(400, "invalid_request");
    let all = cluster.user.get("/api/v1/allocations").await.ok();
    assert_eq!(all["items"].as_array().map(Vec::len), Some(1), "{all}");
    let allocation = AllocationHandle::new(id_of(&first), cluster.user.clone());
    allocation.expect_state("active").await;
    allocation.release_fully().await;
    node.expect_all_free().await;
    cluster.shutdown().await;
}
