//! A state folder without room, or one that does not answer: tenants are released, and nothing else begins.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use agent::executor::tenant_setup::MARKER;
use chrono::TimeDelta;
use uuid::Uuid;
use wire::cleanup_proof::CleanupReport;
use wire::inventory::ExecutorKind;
use wire::task::{Task, TaskStatus};

use super::fake_control_plane::spawned_agent::sandbox_user;
use super::hanging_mount::OwnMounts;
use super::{FakeControlPlane, SpawnedAgent, eventually, skipped_tests};

const UNWRITTEN: &str =
    "the journal cannot be written; tenants are released all the same, and no other task begins until it can be";

#[tokio::test]
async fn tenant_is_released_on_a_full_disk_after_a_restart_too_and_nothing_else_begins_until_there_is_room() {
    let Some(mounts) = OwnMounts::of_this_thread(skipped_tests::report_skipped) else { return };
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    let state = folder.path().join("state");
    std::fs::create_dir(&state).unwrap();
    let disk = mounts.small(&state, 512);
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    eventually(|| (!fake.calls().heartbeats.is_empty()).then_some(())).await;
    let tenant = Uuid::now_v7();
    let provision = fake.provision(tenant);
    fake.dispatch(&provision);
    let made = fake.result_of(provision.task_id).await;
    assert_eq!(made.status, TaskStatus::Succeeded, "{made:?}");
    let home = std::path::PathBuf::from(made.output["home"].as_str().unwrap());

    disk.fill();
    // The last page of the journal may have room for some lines.
    while agent.count(UNWRITTEN) == 0 {
        let validate = fake.payload(Task::Validate { load: None });
        fake.dispatch(&validate);
        let result = fake.result_of(validate.task_id).await;
        assert!(result.error.as_ref().is_none_or(|error| error.code == "node_storage"), "{result:?}");
    }
    eventually(|| {
        let heartbeat = fake.calls().heartbeats.last().cloned()?;
        heartbeat.findings?.into_iter().find(|found| (found.probe.as_str(), found.code.as_str()) == ("disk", "full"))
    })
    .await;

    agent.kill_9();
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    agent.wait_for_message("polling").await;
    let release = fake.release(tenant);
    fake.dispatch(&release);
    let gone = fake.result_of(release.task_id).await;
    assert_eq!(gone.status, TaskStatus::Succeeded, "{gone:?}");
    let recovery_key = fake.calls().recovery_key.unwrap();
    assert!(CleanupReport::open(&gone.proof.unwrap(), &recovery_key).unwrap().is_clean(ExecutorKind::Sandbox));
    assert!(!home.exists());

    // What the tenant has left is room for another program.
    disk.fill();
    let provision = fake.provision(Uuid::now_v7());
    fake.dispatch(&provision);
    let refused = fake.result_of(provision.task_id).await;
    assert_eq!(refused.error.map(|error| error.code), Some("node_storage".to_owned()));

    disk.make_room();
    let journal = state.join("journal.jsonl");
    let has = |task: Uuid| std::fs::read_to_string(&journal).unwrap_or_default().contains(&task.to_string());
    eventually(|| (has(release.task_id) && has(provision.task_id)).then_some(())).await;
    let provision = fake.provision(Uuid::now_v7());
    fake.dispatch(&provision);
    let made = fake.result_of(provision.task_id).await;
    assert_eq!(made.status, TaskStatus::Succeeded, "{made:?}");
}

#[tokio::test]
async fn program_of_a_tenant_is_ended_although_the_disk_does_not_answer() {
    let Some(mounts) = OwnMounts::of_this_thread(skipped_tests::report_skipped) else { return };
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    let state = folder.path().join("state");
    std::fs::create_dir(&state).unwrap();
    let disk = mounts.small(&state, 512);
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    eventually(|| (!fake.calls().heartbeats.is_empty()).then_some(())).await;
    let tenant = Uuid::now_v7();
    let provision = fake.provision(tenant);
    fake.dispatch(&provision);
    assert_eq!(fake.result_of(provision.task_id).await.status, TaskStatus::Succeeded);
    let mut program = Command::new("sleep");
    program.arg("1000").env(MARKER, tenant.to_string()).stdin(Stdio::null()).current_dir("/");
    if let Some(user) = sandbox_user() {
        program.uid(user.uid.as_raw()).gid(user.gid.as_raw());
    }
    let mut program = program.spawn().unwrap();
    // So that the journal is opened again with the next line.
    disk.fill();
    while agent.count(UNWRITTEN) == 0 {
        let validate = fake.payload(Task::Validate { load: None });
        fake.dispatch(&validate);
        fake.result_of(validate.task_id).await;
    }
    let _hanging = mounts.hang(&state);
    fake.dispatch(&fake.release(tenant));
    eventually(|| program.try_wait().unwrap()).await;
    let sent = fake.calls().heartbeats.len();
    eventually(|| (fake.calls().heartbeats.len() > sent + 1).then_some(())).await;
}

#[tokio::test]
async fn agent_whose_next_certificate_cannot_be_stored_runs_on_and_renews_it_once_there_is_room() {
    let Some(mounts) = OwnMounts::of_this_thread(skipped_tests::report_skipped) else { return };
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    let state = folder.path().join("state");
    std::fs::create_dir(&state).unwrap();
    let disk = mounts.small(&state, 512);
    // It is due after 5 to 28 s, and valid long enough for any machine.
    (fake.behaviour().certificate_life, fake.behaviour().backdated_by) =
        (TimeDelta::seconds(120), TimeDelta::seconds(110));
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    agent.wait_for_message("enrolled").await;
    agent.kill_9();
    disk.fill();
    let mut agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    agent.wait_for_message("the next certificate cannot be stored; trying again").await;
    let sent = fake.calls().heartbeats.len();
    eventually(|| (fake.calls().heartbeats.len() > sent + 1).then_some(())).await;
    assert!(agent.ended().is_none());
    disk.make_room();
    agent.wait_for_message("certificate renewed").await;
}
