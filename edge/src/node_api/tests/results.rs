use super::agent::{failed, proved, succeeded};
use super::harness::NodeApiHarness;
use domain::node::{HoldPhase, Phase};
use serde_json::{Value, json};
use test_host::simulated_machine::SimulatedMachine;
use uuid::Uuid;
use wire::cleanup_proof::FindingOutcome;
use wire::task::TaskPayload;

fn recorded(how: &str) -> Value {
    json!({ "recorded": how })
}

#[tokio::test]
async fn result_is_recorded_once_and_a_repetition_is_reported_as_recorded() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    let allocation_id = harness.rent(&agent).await;
    let task = harness.task(&agent).await;
    assert_eq!(agent.report(&harness, &task, &succeeded(1)).await.is(200), &recorded("new"));
    let node = harness.node(agent.node_id).await;
    assert_eq!(node.tenancy.holds[&allocation_id].phase, HoldPhase::Ready);
    assert_eq!(agent.report(&harness, &task, &succeeded(1)).await.is(200), &recorded("already"));
    // The same, written down otherwise.
    let mut same = succeeded(1);
    same["error"] = Value::Null;
    same["finished_at"] = "2026-11-21T09:00:01+01:00".into();
    assert_eq!(agent.report(&harness, &task, &same).await.is(200), &recorded("already"));
    let mut changed = succeeded(1);
    changed["output"]["uid"] = 7.into();
    agent.report(&harness, &task, &changed).await.refused(409, "state_conflict");
    agent.report(&harness, &task, &failed(1, "useradd", "no")).await.refused(409, "state_conflict");
    assert_eq!(harness.node(agent.node_id).await.tenancy.holds[&allocation_id].phase, HoldPhase::Ready);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_result_sent_many_times_at_once_is_recorded_once() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    harness.rent(&agent).await;
    let task = harness.task(&agent).await;
    let result = succeeded(1);
    let answers = futures::future::join_all((0..20).map(|_| agent.report(&harness, &task, &result))).await;
    let new = answers.iter().filter(|answer| answer.is(200) == &recorded("new")).count();
    assert_eq!(new, 1);
}

#[tokio::test]
async fn a_result_of_another_attempt_is_stale_and_of_a_foreign_task_is_not_found() {
    let harness = NodeApiHarness::new().await;
    let (agent, other) = (harness.active().await, harness.active().await);
    harness.rent(&agent).await;
    let task = harness.task(&agent).await;
    let details = agent.report(&harness, &task, &succeeded(2)).await;
    let details = details.refused(409, "stale_attempt");
    assert_eq!((&details["attempt"], &details["current_attempt"]), (&json!(2), &json!(1)));
    other.report(&harness, &task, &succeeded(1)).await.refused(404, "not_found");
    let unknown = TaskPayload { task_id: Uuid::now_v7(), ..task.clone() };
    agent.report(&harness, &unknown, &succeeded(1)).await.refused(404, "not_found");
    agent.post(&harness, "tasks/17/result", &succeeded(1)).await.refused(400, "invalid_request");
    // None of these was the result.
    assert_eq!(agent.report(&harness, &task, &succeeded(1)).await.is(200), &recorded("new"));
}

#[tokio::test]
async fn failed_setup_is_stored_with_a_bounded_reason() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    let allocation_id = harness.rent(&agent).await;
    let task = harness.task(&agent).await;
    let words = format!("no room\n{}", "x".repeat(10_000));
    agent.report(&harness, &task, &failed(1, "disk full!", &words)).await.is(200);
    let node = harness.node(agent.node_id).await;
    let HoldPhase::SetupFailed { reason, detail } = &node.tenancy.holds[&allocation_id].phase else {
        panic!("{node:?}")
    };
    assert_eq!(reason, "failed", "a code that is none");
    assert!(detail.starts_with("no room x") && detail.chars().count() == 500);
}

#[tokio::test]
async fn malformed_result_is_refused_with_its_field() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    harness.rent(&agent).await;
    let task = harness.task(&agent).await;
    let with = |field: &str, value: Value| {
        let mut result = succeeded(1);
        result[field] = value;
        result
    };
    for (result, field) in [
        (with("attempt", (-1).into()), "attempt"),
        (with("attempt", json!(1e20)), "attempt"),
        (with("status", "fine".into()), "status"),
        (with("output", "text".into()), "output"),
        (with("started_at", "yesterday".into()), "started_at"),
        (with("bogus", 1.into()), "bogus"),
        (with("proof", json!({"payload_type": "t", "payload": "!", "signatures": []})), "proof.payload"),
    ] {
        let answer = agent.report(&harness, &task, &result).await;
        assert_eq!(answer.refused(400, "invalid_request")["field"], field);
    }
    let huge = with("output", json!({"log": "x".repeat(10 << 20)}));
    agent.report(&harness, &task, &huge).await.refused(413, "payload_too_large");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_succeeds_only_with_a_proof_by_the_nodes_own_key() {
    let harness = NodeApiHarness::on_postgres().await;
    let agent = harness.active().await;
    let allocation_id = harness.rent(&agent).await;
    let setup = harness.task(&agent).await;
    agent.report(&harness, &setup, &succeeded(1)).await.is(200);

    // Each attempt fails for another reason, which the node's history stores.
    let mut attempt = 0;
    let mut release = async |agent: &super::agent::Agent| {
        attempt += 1;
        harness.clean(agent, allocation_id, attempt).await;
        harness.task(agent).await
    };
    let task = release(&agent).await;
    agent.report(&harness, &task, &succeeded(task.attempt)).await.is(200);

    let task = release(&agent).await;
    let forged = agent.cleanup_report(&task).seal(&SimulatedMachine::new(agent.node_id, 2).recovery).unwrap();
    agent.report(&harness, &task, &proved(task.attempt, &forged)).await.is(200);

    let task = release(&agent).await;
    let mut left = agent.cleanup_report(&task);
    left.findings[0].outcome = FindingOutcome::Present;
    left.findings[0].looked_for = "/home/gpu-x".into();
    let left = left.seal(&agent.recovery).unwrap();
    agent.report(&harness, &task, &proved(task.attempt, &left)).await.is(200);

    let task = release(&agent).await;
    let mut rebooted = agent.cleanup_report(&task);
    rebooted.boot_id = Uuid::new_v4();
    let rebooted = rebooted.seal(&agent.recovery).unwrap();
    agent.report(&harness, &task, &proved(task.attempt, &rebooted)).await.is(200);

    let whys: Vec<_> = harness.app.reads.history(agent.node_id, None, 100).await.unwrap().items;
    let outcomes = whys.iter().rev().map(|row| domain::node::report_reasons::read(&row.why).1);
    let failures: Vec<_> = outcomes.filter(|outcome| outcome.starts_with("clean-up attempt")).collect();
    assert_eq!(failures.len(), 4, "{failures:?}");
    assert!(failures[0].contains("no valid clean-up proof"), "{}", failures[0]);
    assert!(failures[1].contains("not signed with the node's recovery key"), "{}", failures[1]);
    assert!(failures[2].contains("Home /home/gpu-x is present"), "{}", failures[2]);
    assert!(failures[3].contains("another boot"), "{}", failures[3]);
    let node = harness.node(agent.node_id).await;
    assert!(matches!(node.tenancy.holds[&allocation_id].phase, HoldPhase::ReleaseFailed { .. }));

    let task = release(&agent).await;
    let proof = agent.cleanup_report(&task).seal(&agent.recovery).unwrap();
    let result = proved(task.attempt, &proof);
    assert_eq!(agent.report(&harness, &task, &result).await.is(200), &recorded("new"));
    let node = harness.node(agent.node_id).await;
    assert!(node.tenancy.holds.is_empty());
    assert_eq!(node.lifecycle.phase, Phase::Active);
    // Long after the task is gone.
    assert_eq!(agent.report(&harness, &task, &result).await.is(200), &recorded("already"));
    let mut changed = result;
    changed["finished_at"] = "2026-11-21T08:00:02Z".into();
    agent.report(&harness, &task, &changed).await.refused(409, "state_conflict");
}
