//! The agent against control planes of the two protocol generations before its own (`wire/tests/protocol`): their messages are
//! sufficient, and a control plane that is not upgraded yet does not end the agent.

use crate::fake_control_plane::spawned_agent::enrolled;
use crate::fake_control_plane::{FakeControlPlane, SpawnedAgent, eventually};
use axum::http::StatusCode;
use uuid::Uuid;
use wire::heartbeat::Heartbeat;
use wire::task::{TaskOrigin, TaskPayload, TaskStatus};
use wire::{OLDEST_PROTOCOL, PROTOCOL};

#[tokio::test]
async fn agent_works_with_control_planes_of_the_two_previous_generations() {
    for generation in OLDEST_PROTOCOL..PROTOCOL {
        let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
        fake.behaviour().generation = generation;
        // Renewed as soon as it is received.
        fake.behaviour().certificate_life = chrono::TimeDelta::seconds(6);
        let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
        eventually(|| (!fake.calls().heartbeats.is_empty()).then_some(())).await;
        let allocation_id = Uuid::now_v7();
        let origin = TaskOrigin { correlation_id: "of-a-newer-one".into(), traceparent: None, tracestate: None };
        let provision = TaskPayload { origin: Some(origin), ..fake.provision(allocation_id) };
        fake.dispatch_as(generation, "provision_payload", &provision);
        assert_eq!(fake.result_of(provision.task_id).await.status, TaskStatus::Succeeded);
        let release = fake.release(allocation_id);
        fake.dispatch_as(generation, "release_payload", &release);
        let gone = fake.result_of(release.task_id).await;
        assert!(gone.status == TaskStatus::Succeeded && gone.proof.is_some(), "{gone:?}");
        eventually(|| (fake.calls().renewals > 0).then_some(())).await;
        agent.wait_for_message("certificate renewed").await;
        assert!(!std::fs::read_to_string(&agent.log).unwrap().contains("of-a-newer-one"));
    }
}

#[tokio::test]
async fn agent_waits_for_an_older_control_plane_and_uses_what_it_serves() {
    let (fake, _folder, agent) = enrolled(&[]).await;
    fake.behaviour().newest_protocol = PROTOCOL - 1;
    agent.wait_for_error_code("upgrade_required").await;
    // Polls and results have no protocol field.
    fake.validate().await;
    fake.behaviour().newest_protocol = PROTOCOL;
    let beats = fake.calls().heartbeats.len();
    eventually(|| (fake.calls().heartbeats.len() > beats + 1).then_some(())).await;
    assert_eq!(agent.count("the agent ends"), 0);
}

#[tokio::test]
async fn node_enrolls_once_the_control_plane_supports_its_protocol() {
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    fake.behaviour().newest_protocol = PROTOCOL - 1;
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    agent.wait_for_error_code("upgrade_required").await;
    fake.behaviour().newest_protocol = PROTOCOL;
    agent.wait_for_message("enrolled").await;
}

#[tokio::test]
async fn agent_too_old_for_the_control_plane_ends_with_the_remedy() {
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    fake.behaviour().refuse_as_too_old = true;
    let mut agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    assert_eq!(agent.exit().await.code(), Some(6));
    assert!(std::fs::read_to_string(&agent.log).unwrap().contains("upgrade the agent"));
}

#[tokio::test]
async fn outage_takes_no_field_from_a_heartbeat_and_a_refusal_those_that_an_earlier_release_does_not_read() {
    let (fake, _folder, agent) = enrolled(&[]).await;
    let is_whole = |heartbeat: &Heartbeat| *heartbeat != heartbeat.clone().without_later_fields();
    let sent = || fake.calls().heartbeats.len();
    eventually(|| fake.calls().heartbeats.last().is_some_and(is_whole).then_some(())).await;
    fake.behaviour().page = Some(StatusCode::BAD_GATEWAY);
    agent.wait_for_message("the heartbeat failed; trying again").await;
    let before = sent();
    fake.behaviour().page = None;
    eventually(|| (sent() > before).then_some(())).await;
    assert!(is_whole(&fake.calls().heartbeats[before]), "the first one after the outage");

    // It is rolled back to the previous release, and upgraded again.
    fake.behaviour().reads_later_fields = false;
    let before = sent();
    eventually(|| fake.calls().heartbeats[before..].iter().any(|heartbeat| !is_whole(heartbeat)).then_some(())).await;
    let (before, refused) = (sent(), agent.count("the heartbeat failed; trying again"));
    eventually(|| (sent() > before + 1).then_some(())).await;
    assert!(!fake.calls().heartbeats[before..].iter().any(is_whole));
    assert_eq!(agent.count("the heartbeat failed; trying again"), refused);
    fake.behaviour().reads_later_fields = true;
    eventually(|| fake.calls().heartbeats.last().is_some_and(is_whole).then_some(())).await;
}
