use super::harness::NodeApiHarness;
use crate::node_api::task_dispatch;
use domain::AllocationId;
use domain::node::Instruction;
use serde_json::json;
use std::future::Future;
use std::time::{Duration, Instant};
use uuid::Uuid;
use wire::task::Task;

#[tokio::test]
async fn waiting_poll_is_woken_by_a_new_task_at_once() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    let (answer, ordered_at) = tokio::join!(
        async {
            let answer = agent.wait(&harness, 55).await;
            (answer, Instant::now())
        },
        async {
            harness.until_polled(1).await;
            assert_eq!(harness.app.polls.nodes(), 1);
            harness.rent(&agent).await;
            Instant::now()
        }
    );
    let (answer, answered_at) = answer;
    let task = harness.opened(&answer);
    assert!(matches!(task.task, Task::Provision(_)));
    assert_eq!((task.node_id, task.attempt), (agent.node_id, 1));
    let took = answered_at.saturating_duration_since(ordered_at);
    // Not at the end of the poll, which is 55 s long.
    assert!(took < Duration::from_secs(45), "{took:?}");
    assert_eq!(harness.app.polls.nodes(), 0);
}

#[tokio::test]
async fn a_wait_without_work_ends_after_its_time_with_204() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    let began = Instant::now();
    let answer = agent.wait(&harness, 1).await;
    assert!(answer.is(204).is_null());
    // Before the end of a poll that names no time, which is 30 s long.
    assert!((Duration::from_secs(1)..Duration::from_secs(28)).contains(&began.elapsed()), "{:?}", began.elapsed());
}

#[tokio::test]
async fn the_first_wait_of_an_enrolled_agent_makes_its_node_active() {
    let harness = NodeApiHarness::new().await;
    let agent = harness.enrolled().await;
    agent.wait(&harness, 1).await.is(204);
    assert_eq!(harness.node(agent.node_id).await.lifecycle.phase, domain::node::Phase::Active);
}

#[tokio::test]
async fn timeout_out_of_bounds_is_refused() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    for bad in ["0", "56", "-1", "1.5", "x", "", "4294967296", "99999999999999999999"] {
        let answer = agent.get(&harness, &format!("tasks/wait?timeout_seconds={bad}")).await;
        assert_eq!(answer.refused(400, "invalid_request")["field"], "timeout_seconds", "{bad}");
    }
    for bad in ["timeout_seconds=1&x=1", "timeout_seconds=1&timeout_seconds=2", "session=17"] {
        agent.get(&harness, &format!("tasks/wait?{bad}")).await.refused(400, "invalid_request");
    }
}

#[tokio::test]
async fn running_task_is_dispatched_again_only_to_a_restarted_agent() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    harness.rent(&agent).await;
    let (one, two) = (Uuid::new_v4(), Uuid::new_v4());
    let of = |session: Uuid| format!("tasks/wait?timeout_seconds=2&session={session}");
    let first = harness.opened(&agent.get(&harness, &of(one)).await);
    agent.get(&harness, &of(one)).await.is(204);
    let repeated = harness.opened(&agent.get(&harness, &of(two)).await);
    assert_eq!((repeated.task_id, repeated.attempt), (first.task_id, first.attempt));
    // Without a session, the connection identifies the agent: this one's stays the same.
    let unnamed = harness.opened(&agent.wait(&harness, 3).await);
    assert_eq!(unnamed.task_id, first.task_id);
    agent.wait(&harness, 2).await.is(204);
    let repeated = harness.opened(&agent.reconnected(&harness).wait(&harness, 3).await);
    assert_eq!(repeated.task_id, first.task_id);
}

#[tokio::test]
async fn two_tasks_are_dispatched_in_turn_and_an_expired_one_is_not() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    // Distinguished by their GPUs: without isolation a node takes one tenant at a time.
    let mut beat = agent.heartbeat();
    beat["inventory"]["executor"] = "system".into();
    agent.post(&harness, "heartbeat", &beat).await.is(200);
    let (first, second) = (harness.rent(&agent).await, harness.rent(&agent).await);
    let mut given: Vec<_> = Vec::new();
    for _ in 0..2 {
        given.push(AllocationId(harness.task(&agent).await.task.allocation_id().unwrap()));
    }
    given.sort();
    assert_eq!(given, [first, second]);
    harness.advance(chrono::TimeDelta::minutes(11));
    agent.reconnected(&harness).wait(&harness, 2).await.is(204);
}

#[tokio::test]
async fn fenced_node_gets_no_tasks_and_other_requests_pass() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    let allocation_id = harness.rent(&agent).await;
    harness.clean(&agent, allocation_id, 1).await;
    harness.tell(agent.node_id, Instruction::Fence { allocation_id, attempt: 1 }).await;
    let details = agent.wait(&harness, 1).await;
    assert_eq!(details.is_refused_as("node_fenced")["allocation_id"], allocation_id.to_string());
    agent.send_heartbeat(&harness).await.is(200);
    agent.renew(&harness).await.is(200);
    // The operator retries the clean-up: the fence is lifted.
    harness.clean(&agent, allocation_id, 2).await;
    let task = harness.task(&agent).await;
    assert_eq!((task.attempt, task.task.kind()), (2, "allocation.release"));
}

#[tokio::test]
async fn waiting_poll_of_a_node_that_becomes_fenced_is_refused() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    let allocation_id = harness.rent(&agent).await;
    harness.task(&agent).await;
    let (answer, ()) = tokio::join!(agent.wait(&harness, 55), async {
        harness.until_polled(1).await;
        harness.tell(agent.node_id, Instruction::Fence { allocation_id, attempt: 1 }).await;
        harness.app.polls.wake(domain::NodeId(agent.node_id));
    });
    answer.is_refused_as("node_fenced");
}

#[tokio::test]
async fn waiting_polls_end_early_when_the_process_stops() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    let began = Instant::now();
    let (answer, ()) = tokio::join!(agent.wait(&harness, 55), async {
        harness.until_polled(1).await;
        harness.app.stopping.cancel();
    });
    answer.is(204);
    assert!(began.elapsed() < Duration::from_secs(45), "{:?}", began.elapsed());
}

#[tokio::test]
async fn heartbeat_returns_the_interval_and_the_poll_settings() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    let answer = agent.send_heartbeat(&harness).await;
    let read: wire::heartbeat::HeartbeatAnswer = serde_json::from_value(answer.is(200).clone()).unwrap();
    assert_eq!((read.next_heartbeat_seconds, read.poll.timeout_seconds), (30, 30));
    assert!(read.verifier_sets.is_empty());
    assert!((read.server_time - harness.now()).abs() < chrono::TimeDelta::seconds(60));
    let mut bogus = agent.heartbeat();
    bogus["telemetry"]["bogus"] = 1.into();
    let refused = agent.post(&harness, "heartbeat", &bogus).await;
    assert_eq!(refused.refused(400, "invalid_request")["field"], "telemetry.bogus");
    let mut drifted = agent.heartbeat();
    drifted["inventory"]["gpus"] = json!([]);
    agent.post(&harness, "heartbeat", &drifted).await.is(200);
    assert_eq!(harness.node(agent.node_id).await.lifecycle.phase.name(), "quarantined");
}

#[tokio::test]
async fn load_of_an_accepted_heartbeat_is_stored_and_its_hostile_numbers_are_not() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    let load = || harness.app.fleet.sample(domain::NodeId(agent.node_id));
    let mut hostile = agent.heartbeat();
    let uuid = hostile["inventory"]["gpus"][0]["uuid"].clone();
    hostile["telemetry"]["cpu_percent"] = json!(1e38);
    let known = json!({"uuid": uuid, "utilization_percent": 4_000_000_000_u32, "temperature_celsius": 61});
    let mut gpus: Vec<_> = (0..9_000).map(|_| json!({"uuid": "GPU-1"})).collect();
    gpus.push(known);
    hostile["telemetry"]["gpus"] = json!(gpus);
    agent.post(&harness, "heartbeat", &hostile).await.is(200);
    let stored = load().unwrap();
    assert_eq!((stored.cpu_percent, stored.gpus.len()), (None, 2));
    assert_eq!((stored.gpus[0].utilization_percent, stored.gpus[0].temperature_celsius), (None, Some(61)));

    for (field, value) in [("memory_used_mib", json!(-1)), ("cpu_percent", json!("NaN"))] {
        let mut invalid = agent.heartbeat();
        invalid["telemetry"][field] = value;
        agent.post(&harness, "heartbeat", &invalid).await.refused(400, "invalid_request");
    }
    let mut crowded = agent.heartbeat();
    crowded["inventory"]["gpus"] = (0..65)
        .map(|n| json!({"index": n, "uuid": format!("GPU-{n}"), "vendor": "x", "model": "y", "memory_mib": 1}))
        .collect();
    agent.post(&harness, "heartbeat", &crowded).await.refused(400, "invalid_request");
    assert_eq!(load().unwrap(), stored, "a heartbeat that is refused changes nothing");
}

/// The memory of a waiting poll besides its connection.
#[test]
fn waiting_poll_takes_a_few_kilobytes() {
    fn size_of_answer<A, B, C, D, E, F: Future>(_: impl Fn(A, B, C, D, E) -> F) -> usize {
        size_of::<F>()
    }
    let size = size_of_answer(task_dispatch::wait);
    assert!(size < 6 * 1024, "{size} bytes");
}

/// The memory of the node's end of a terminal besides its connection.
#[test]
fn terminal_stream_takes_a_few_kilobytes() {
    fn size_of_run<A, B, F: Future>(_: impl Fn(A, B) -> F) -> usize {
        size_of::<F>()
    }
    let size = size_of_run(crate::node_api::terminal::AgentConnection::run);
    assert!(size < 4 * 1024, "{size} bytes");
}
