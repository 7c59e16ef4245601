use super::agent::{failed, proved, recovery_key, succeeded};
use super::world::World;
use domain::node::{HoldPhase, Life};
use serde_json::{Value, json};
use uuid::Uuid;
use wire::proof::Outcome;
use wire::task::TaskPayload;

fn recorded(how: &str) -> Value {
    json!({ "recorded": how })
}

#[tokio::test]
async fn a_result_is_recorded_once_and_the_same_one_again_is_said_to_be_recorded() {
    let world = World::new().await;
    let agent = world.active().await;
    let allocation_id = world.rent(&agent).await;
    let task = world.task(&agent).await;
    assert_eq!(agent.report(&world, &task, &succeeded(1)).await.is(200), &recorded("new"));
    let node = world.node(agent.node_id).await;
    assert_eq!(node.holds[&allocation_id].phase, HoldPhase::Ready);
    assert_eq!(agent.report(&world, &task, &succeeded(1)).await.is(200), &recorded("already"));
    // The same, written down otherwise.
    let mut same = succeeded(1);
    same["error"] = Value::Null;
    same["finished_at"] = "2026-11-21T09:00:01+01:00".into();
    assert_eq!(agent.report(&world, &task, &same).await.is(200), &recorded("already"));
    let mut changed = succeeded(1);
    changed["output"]["uid"] = 7.into();
    agent.report(&world, &task, &changed).await.refused(409, "state_conflict");
    agent.report(&world, &task, &failed(1, "useradd", "no")).await.refused(409, "state_conflict");
    assert_eq!(world.node(agent.node_id).await.holds[&allocation_id].phase, HoldPhase::Ready);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_result_sent_many_times_at_once_is_recorded_once() {
    let world = World::new().await;
    let agent = world.active().await;
    world.rent(&agent).await;
    let task = world.task(&agent).await;
    let result = succeeded(1);
    let answers = futures::future::join_all((0..20).map(|_| agent.report(&world, &task, &result))).await;
    let new = answers.iter().filter(|answer| answer.is(200) == &recorded("new")).count();
    assert_eq!(new, 1);
}

#[tokio::test]
async fn a_result_of_another_attempt_is_stale_and_of_a_foreign_task_is_not_found() {
    let world = World::new().await;
    let (agent, other) = (world.active().await, world.active().await);
    world.rent(&agent).await;
    let task = world.task(&agent).await;
    let details = agent.report(&world, &task, &succeeded(2)).await;
    let details = details.refused(409, "stale_attempt");
    assert_eq!((&details["attempt"], &details["current_attempt"]), (&json!(2), &json!(1)));
    other.report(&world, &task, &succeeded(1)).await.refused(404, "not_found");
    let unknown = TaskPayload { task_id: Uuid::now_v7(), ..task.clone() };
    agent.report(&world, &unknown, &succeeded(1)).await.refused(404, "not_found");
    agent.post(&world, "tasks/17/result", &succeeded(1)).await.refused(400, "invalid_request");
    // None of these was the result.
    assert_eq!(agent.report(&world, &task, &succeeded(1)).await.is(200), &recorded("new"));
}

#[tokio::test]
async fn a_failed_setup_is_kept_with_its_reason_within_bounds() {
    let world = World::new().await;
    let agent = world.active().await;
    let allocation_id = world.rent(&agent).await;
    let task = world.task(&agent).await;
    let words = format!("no room\n{}", "x".repeat(10_000));
    agent.report(&world, &task, &failed(1, "disk full!", &words)).await.is(200);
    let node = world.node(agent.node_id).await;
    let HoldPhase::SetupFailed { reason, detail } = &node.holds[&allocation_id].phase else { panic!("{node:?}") };
    assert_eq!(reason, "failed", "a code that is none");
    assert!(detail.starts_with("no room x") && detail.chars().count() == 500);
}

#[tokio::test]
async fn a_result_that_is_none_is_refused_by_name() {
    let world = World::new().await;
    let agent = world.active().await;
    world.rent(&agent).await;
    let task = world.task(&agent).await;
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
        let answer = agent.report(&world, &task, &result).await;
        assert_eq!(answer.refused(400, "invalid_request")["field"], field);
    }
    let huge = with("output", json!({"log": "x".repeat(10 << 20)}));
    agent.report(&world, &task, &huge).await.refused(413, "payload_too_large");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_succeeds_with_a_proof_of_the_nodes_own_key_alone() {
    let world = World::on_postgres().await;
    let agent = world.active().await;
    let allocation_id = world.rent(&agent).await;
    let setup = world.task(&agent).await;
    agent.report(&world, &setup, &succeeded(1)).await.is(200);

    // Each attempt fails for another reason, which the node's history keeps.
    let mut attempt = 0;
    let mut release = async |agent: &super::agent::Agent| {
        attempt += 1;
        world.clean(agent, allocation_id, attempt).await;
        world.task(agent).await
    };
    let task = release(&agent).await;
    agent.report(&world, &task, &succeeded(task.attempt)).await.is(200);

    let task = release(&agent).await;
    let forged = agent.clean(&task).seal(&recovery_key()).unwrap();
    agent.report(&world, &task, &proved(task.attempt, &forged)).await.is(200);

    let task = release(&agent).await;
    let mut left = agent.clean(&task);
    left.findings[0].outcome = Outcome::Present;
    left.findings[0].looked_for = "/home/gpu-x".into();
    let left = left.seal(&agent.recovery).unwrap();
    agent.report(&world, &task, &proved(task.attempt, &left)).await.is(200);

    let task = release(&agent).await;
    let mut rebooted = agent.clean(&task);
    rebooted.boot_id = Uuid::new_v4();
    let rebooted = rebooted.seal(&agent.recovery).unwrap();
    agent.report(&world, &task, &proved(task.attempt, &rebooted)).await.is(200);

    let whys: Vec<_> = world.services.reads.history(agent.node_id, None, 100).await.unwrap().items;
    let outcomes = whys.iter().rev().map(|row| domain::node::reports::read(&row.why).1);
    let failures: Vec<_> = outcomes.filter(|outcome| outcome.starts_with("clean-up attempt")).collect();
    assert_eq!(failures.len(), 4, "{failures:?}");
    assert!(failures[0].contains("no valid clean-up proof"), "{}", failures[0]);
    assert!(failures[1].contains("not signed with the node's recovery key"), "{}", failures[1]);
    assert!(failures[2].contains("Home /home/gpu-x is present"), "{}", failures[2]);
    assert!(failures[3].contains("another boot"), "{}", failures[3]);
    let node = world.node(agent.node_id).await;
    assert!(matches!(node.holds[&allocation_id].phase, HoldPhase::ReleaseFailed { .. }));

    let task = release(&agent).await;
    let proof = agent.clean(&task).seal(&agent.recovery).unwrap();
    let result = proved(task.attempt, &proof);
    assert_eq!(agent.report(&world, &task, &result).await.is(200), &recorded("new"));
    let node = world.node(agent.node_id).await;
    assert!(node.holds.is_empty());
    assert_eq!(node.life, Life::Active);
    // Long after the task is gone.
    assert_eq!(agent.report(&world, &task, &result).await.is(200), &recorded("already"));
    let mut changed = result;
    changed["finished_at"] = "2026-11-21T08:00:02Z".into();
    agent.report(&world, &task, &changed).await.refused(409, "state_conflict");
}
