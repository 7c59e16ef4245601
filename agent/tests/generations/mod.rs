//! The agent against control planes of the two generations before its own (`wire/tests/protocol`): what they say is enough for it, and one
//! that is yet to be upgraded does not end it.

use crate::fake::{AgentProcess, Fake, enrolled, eventually};
use uuid::Uuid;
use wire::task::{Origin, TaskPayload, TaskStatus};
use wire::{OLDEST_PROTOCOL, PROTOCOL};

#[tokio::test]
async fn the_agent_lives_on_what_control_planes_of_the_two_generations_before_say() {
    for generation in OLDEST_PROTOCOL..PROTOCOL {
        let (fake, folder) = (Fake::start().await, tempfile::tempdir().unwrap());
        fake.behave().generation = generation;
        // Renewed as soon as it is there.
        fake.behave().certificate_life = chrono::TimeDelta::seconds(6);
        let agent = AgentProcess::start(folder.path(), &fake.bundle(folder.path()), &[]);
        eventually(|| (!fake.seen().heartbeats.is_empty()).then_some(())).await;
        let allocation_id = Uuid::now_v7();
        let origin = Origin { correlation_id: "of-a-newer-one".into(), traceparent: None, tracestate: None };
        let provision = TaskPayload { origin: Some(origin), ..fake.provision(allocation_id) };
        fake.dispatch_as(generation, "provision_payload", &provision);
        assert_eq!(fake.result_of(provision.task_id).await.status, TaskStatus::Succeeded);
        let release = fake.release(allocation_id);
        fake.dispatch_as(generation, "release_payload", &release);
        let gone = fake.result_of(release.task_id).await;
        assert!(gone.status == TaskStatus::Succeeded && gone.proof.is_some(), "{gone:?}");
        eventually(|| (fake.seen().renewals > 0).then_some(())).await;
        agent.says("certificate renewed").await;
        assert!(!std::fs::read_to_string(&agent.log).unwrap().contains("of-a-newer-one"));
    }
}

#[tokio::test]
async fn a_control_plane_that_is_yet_to_be_upgraded_is_waited_for_and_serves_meanwhile_what_it_can() {
    let (fake, _folder, agent) = enrolled(&[]).await;
    fake.behave().newest_protocol = PROTOCOL - 1;
    agent.complains_of("upgrade_required").await;
    // Waits and results name no protocol.
    let task = fake.payload(wire::task::Task::Validate {});
    fake.dispatch(&task);
    assert_eq!(fake.result_of(task.task_id).await.status, TaskStatus::Succeeded);
    fake.behave().newest_protocol = PROTOCOL;
    let beats = fake.seen().heartbeats.len();
    eventually(|| (fake.seen().heartbeats.len() > beats + 1).then_some(())).await;
    assert_eq!(agent.count("the agent ends"), 0);
}

#[tokio::test]
async fn a_node_enrolls_as_soon_as_the_control_plane_speaks_its_protocol() {
    let (fake, folder) = (Fake::start().await, tempfile::tempdir().unwrap());
    fake.behave().newest_protocol = PROTOCOL - 1;
    let agent = AgentProcess::start(folder.path(), &fake.bundle(folder.path()), &[]);
    agent.complains_of("upgrade_required").await;
    fake.behave().newest_protocol = PROTOCOL;
    agent.says("enrolled").await;
}

#[tokio::test]
async fn an_agent_that_is_too_old_for_the_control_plane_ends_and_says_what_to_do() {
    let (fake, folder) = (Fake::start().await, tempfile::tempdir().unwrap());
    fake.behave().refuse_as_too_old = true;
    let mut agent = AgentProcess::start(folder.path(), &fake.bundle(folder.path()), &[]);
    assert_eq!(agent.exit().await.code(), Some(6));
    assert!(std::fs::read_to_string(&agent.log).unwrap().contains("Upgrade the agent"));
}
