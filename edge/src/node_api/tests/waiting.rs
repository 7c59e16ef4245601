use super::world::World;
use crate::node_api::wait;
use domain::AllocationId;
use domain::node::Command;
use serde_json::json;
use std::future::Future;
use std::time::{Duration, Instant};
use uuid::Uuid;
use wire::task::Task;

#[tokio::test]
async fn a_parked_wait_is_woken_by_new_work_at_once() {
    let world = World::new().await;
    let agent = world.active().await;
    let (answer, ordered_at) = tokio::join!(
        async {
            let answer = agent.wait(&world, 30).await;
            (answer, Instant::now())
        },
        async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert_eq!(world.services.polls.nodes(), 1);
            world.rent(&agent).await;
            Instant::now()
        }
    );
    let (answer, answered_at) = answer;
    let task = world.opened(&answer);
    assert!(matches!(task.task, Task::Provision(_)));
    assert_eq!((task.node_id, task.attempt), (agent.node_id, 1));
    let took = answered_at.saturating_duration_since(ordered_at);
    // Milliseconds; more only where the machine that tests is busy.
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert_eq!(world.services.polls.nodes(), 0);
}

#[tokio::test]
async fn a_wait_without_work_ends_after_its_time_with_204() {
    let world = World::new().await;
    let agent = world.active().await;
    let began = Instant::now();
    let answer = agent.wait(&world, 1).await;
    assert!(answer.is(204).is_null());
    assert!((Duration::from_secs(1)..Duration::from_secs(3)).contains(&began.elapsed()), "{:?}", began.elapsed());
}

#[tokio::test]
async fn the_first_wait_of_an_enrolled_agent_makes_its_node_active() {
    let world = World::new().await;
    let agent = world.enrolled().await;
    agent.wait(&world, 1).await.is(204);
    assert_eq!(world.node(agent.node_id).await.life, domain::node::Life::Active);
}

#[tokio::test]
async fn a_time_out_of_bounds_is_refused() {
    let world = World::new().await;
    let agent = world.active().await;
    for bad in ["0", "56", "-1", "1.5", "x", "", "4294967296", "99999999999999999999"] {
        let answer = agent.get(&world, &format!("tasks/wait?timeout_seconds={bad}")).await;
        assert_eq!(answer.refused(400, "invalid_request")["field"], "timeout_seconds", "{bad}");
    }
    for bad in ["timeout_seconds=1&x=1", "timeout_seconds=1&timeout_seconds=2", "session=17"] {
        agent.get(&world, &format!("tasks/wait?{bad}")).await.refused(400, "invalid_request");
    }
}

#[tokio::test]
async fn a_running_task_is_not_handed_out_again_but_to_another_life_of_the_agent() {
    let world = World::new().await;
    let agent = world.active().await;
    world.rent(&agent).await;
    let (one, two) = (Uuid::new_v4(), Uuid::new_v4());
    let of = |session: Uuid| format!("tasks/wait?timeout_seconds=2&session={session}");
    let first = world.opened(&agent.get(&world, &of(one)).await);
    agent.get(&world, &of(one)).await.is(204);
    let again = world.opened(&agent.get(&world, &of(two)).await);
    assert_eq!((again.task_id, again.attempt), (first.task_id, first.attempt));
    // Without a session, the connection tells: this agent's stays the same.
    let unnamed = world.opened(&agent.wait(&world, 3).await);
    assert_eq!(unnamed.task_id, first.task_id);
    agent.wait(&world, 2).await.is(204);
    let anew = world.opened(&agent.reconnected(&world).wait(&world, 3).await);
    assert_eq!(anew.task_id, first.task_id);
}

#[tokio::test]
async fn two_orders_are_handed_out_one_after_the_other_and_one_that_is_over_is_not() {
    let world = World::new().await;
    let agent = world.active().await;
    // Told apart by their GPUs: without isolation a node takes one tenant at a time.
    let mut beat = agent.heartbeat();
    beat["inventory"]["executor"] = "system".into();
    agent.post(&world, "heartbeat", &beat).await.is(200);
    let (first, second) = (world.rent(&agent).await, world.rent(&agent).await);
    let mut given: Vec<_> = Vec::new();
    for _ in 0..2 {
        given.push(AllocationId(world.task(&agent).await.task.allocation_id().unwrap()));
    }
    given.sort();
    assert_eq!(given, [first, second]);
    world.advance(chrono::TimeDelta::minutes(11));
    agent.reconnected(&world).wait(&world, 2).await.is(204);
}

#[tokio::test]
async fn a_fenced_node_gets_no_tasks_and_everything_else_passes() {
    let world = World::new().await;
    let agent = world.active().await;
    let allocation_id = world.rent(&agent).await;
    world.clean(&agent, allocation_id, 1).await;
    world.tell(agent.node_id, Command::Fence { allocation_id, attempt: 1 }).await;
    let details = agent.wait(&world, 1).await;
    assert_eq!(details.not_let_in("node_fenced")["allocation_id"], allocation_id.to_string());
    agent.beat(&world).await.is(200);
    agent.renew(&world).await.is(200);
    // The operator asks for the clean-up again: the fence is lifted.
    world.clean(&agent, allocation_id, 2).await;
    let task = world.task(&agent).await;
    assert_eq!((task.attempt, task.task.kind()), (2, "allocation.release"));
}

#[tokio::test]
async fn a_wait_that_is_parked_when_the_fence_comes_is_told_at_its_next_look() {
    let world = World::new().await;
    let agent = world.active().await;
    let allocation_id = world.rent(&agent).await;
    world.task(&agent).await;
    let (answer, ()) = tokio::join!(agent.wait(&world, 10), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        world.tell(agent.node_id, Command::Fence { allocation_id, attempt: 1 }).await;
        world.services.polls.wake(domain::NodeId(agent.node_id));
    });
    answer.not_let_in("node_fenced");
}

#[tokio::test]
async fn when_the_process_stops_waits_end_early() {
    let world = World::new().await;
    let agent = world.active().await;
    let began = Instant::now();
    let (answer, ()) = tokio::join!(agent.wait(&world, 30), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        world.services.stopping.cancel();
    });
    answer.is(204);
    assert!(began.elapsed() < Duration::from_secs(2));
}

#[tokio::test]
async fn a_heartbeat_is_answered_with_the_pace_and_the_poll_settings() {
    let world = World::new().await;
    let agent = world.active().await;
    let answer = agent.beat(&world).await;
    let read: wire::heartbeat::HeartbeatAnswer = serde_json::from_value(answer.is(200).clone()).unwrap();
    assert_eq!((read.next_heartbeat_seconds, read.poll.timeout_seconds), (30, 30));
    assert!(read.verifier_sets.is_empty());
    assert!((read.server_time - world.now()).abs() < chrono::TimeDelta::seconds(5));
    let mut bogus = agent.heartbeat();
    bogus["telemetry"]["bogus"] = 1.into();
    let refused = agent.post(&world, "heartbeat", &bogus).await;
    assert_eq!(refused.refused(400, "invalid_request")["field"], "telemetry.bogus");
    let mut drifted = agent.heartbeat();
    drifted["inventory"]["gpus"] = json!([]);
    agent.post(&world, "heartbeat", &drifted).await.is(200);
    assert_eq!(world.node(agent.node_id).await.life.name(), "quarantined");
}

/// What a parked wait keeps beside its connection.
#[test]
fn a_wait_costs_a_few_kilobytes() {
    fn size_of_answer<A, B, C, D, E, F: Future>(_: impl Fn(A, B, C, D, E) -> F) -> usize {
        size_of::<F>()
    }
    let size = size_of_answer(wait::wait);
    assert!(size < 6 * 1024, "{size} bytes");
}

/// What the node's end of a terminal keeps beside its connection.
#[test]
fn a_terminals_stream_costs_a_few_kilobytes() {
    fn size_of_run<A, B, F: Future>(_: impl Fn(A, B) -> F) -> usize {
        size_of::<F>()
    }
    let size = size_of_run(crate::node_api::terminal::NodeEnd::run);
    assert!(size < 4 * 1024, "{size} bytes");
}
