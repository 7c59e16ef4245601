//! A state folder without room, or one that does not answer: tenants are released, and nothing else begins.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use agent::executor::tenant_setup::MARKER;
use chrono::TimeDelta;
use tempfile::TempDir;
use uuid::Uuid;
use wire::inventory::ExecutorKind;
use wire::task::Task;

use super::fake_control_plane::spawned_agent::{enroll_and_kill, sandbox_user};
use super::hanging_mount::{OwnMounts, SmallMount};
use super::{FakeControlPlane, SpawnedAgent, eventually, skipped_tests};

const UNWRITTEN: &str =
    "the journal cannot be written; tenants are released all the same, and no other task begins until it can be";

/// A small disk with the state folder of a node's agent.
fn state_on(mounts: &OwnMounts, folder: &TempDir) -> (PathBuf, SmallMount) {
    let state = folder.path().join("state");
    std::fs::create_dir(&state).unwrap();
    let disk = mounts.small(&state, 512);
    (state, disk)
}

/// Fills the disk, until the journal has no room for another line either.
async fn fill(disk: &SmallMount, fake: &FakeControlPlane, agent: &SpawnedAgent) {
    disk.fill();
    // The last page of the journal may have room for some lines.
    while agent.count(UNWRITTEN) == 0 {
        let result = fake.execute(&fake.payload(Task::Validate { load: None })).await;
        assert!(result.error.as_ref().is_none_or(|error| error.code == "node_storage"), "{result:?}");
    }
}

#[tokio::test]
async fn tenant_is_released_on_a_full_disk_after_a_restart_too_and_nothing_else_begins_until_there_is_room() {
    let Some(mounts) = OwnMounts::of_this_thread(skipped_tests::report_skipped) else { return };
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    let (state, disk) = state_on(&mounts, &folder);
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    eventually(|| (!fake.calls().heartbeats.is_empty()).then_some(())).await;
    let tenant = Uuid::now_v7();
    let made = fake.set_up(tenant).await;
    let home = PathBuf::from(made.output["home"].as_str().unwrap());

    fill(&disk, &fake, &agent).await;
    eventually(|| {
        let heartbeat = fake.calls().heartbeats.last().cloned()?;
        heartbeat.findings?.into_iter().find(|found| (found.probe.as_str(), found.code.as_str()) == ("disk", "full"))
    })
    .await;

    agent.kill_9();
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    agent.wait_for_message("polling").await;
    let report = fake.end(tenant).await;
    assert!(report.is_clean(ExecutorKind::Sandbox) && !home.exists(), "{report:?}");

    // What the tenant has left is room for another program.
    disk.fill();
    let provision = fake.provision(Uuid::now_v7());
    let refused = fake.execute(&provision).await;
    assert_eq!(refused.error.map(|error| error.code), Some("node_storage".to_owned()));

    disk.make_room();
    let journal = state.join("journal.jsonl");
    let has = |task: Uuid| std::fs::read_to_string(&journal).unwrap_or_default().contains(&task.to_string());
    eventually(|| (has(report.task_id) && has(provision.task_id)).then_some(())).await;
    fake.set_up(Uuid::now_v7()).await;
}

#[tokio::test]
async fn agent_starts_on_a_disk_that_has_become_read_only_and_ends_the_program_of_a_tenant() {
    let Some(mounts) = OwnMounts::of_this_thread(skipped_tests::report_skipped) else { return };
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    let (_, disk) = state_on(&mounts, &folder);
    let bundle = fake.bundle(folder.path());
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    eventually(|| (!fake.calls().heartbeats.is_empty()).then_some(())).await;
    let tenant = Uuid::now_v7();
    fake.set_up(tenant).await;
    let mut program = program_of(tenant);
    agent.kill_9();
    disk.set_read_only(true);
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    agent.wait_for_message("polling").await;
    let failed = fake.execute(&fake.release(tenant)).await;
    assert!(program.try_wait().unwrap().is_some(), "{failed:?}");
    // Its end is proved once the disk takes that.
    assert_eq!(failed.error.map(|error| error.code), Some("cleanup_incomplete".to_owned()));
    assert!(agent.count(UNWRITTEN) > 0);
    agent.kill_9();
    disk.set_read_only(false);
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    agent.wait_for_message("polling").await;
    let report = fake.end(tenant).await;
    assert!(report.is_clean(ExecutorKind::Sandbox), "{report:?}");
}

/// A program that belongs to a tenant.
fn program_of(tenant: Uuid) -> Child {
    let mut program = Command::new("sleep");
    program.arg("1000").env(MARKER, tenant.to_string()).stdin(Stdio::null()).current_dir("/");
    if let Some(user) = sandbox_user() {
        program.uid(user.uid.as_raw()).gid(user.gid.as_raw());
    }
    program.spawn().unwrap()
}

#[tokio::test]
async fn program_of_a_tenant_is_ended_although_the_disk_does_not_answer() {
    let Some(mounts) = OwnMounts::of_this_thread(skipped_tests::report_skipped) else { return };
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    let (state, disk) = state_on(&mounts, &folder);
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    eventually(|| (!fake.calls().heartbeats.is_empty()).then_some(())).await;
    let tenant = Uuid::now_v7();
    fake.set_up(tenant).await;
    let mut program = program_of(tenant);
    // So that the journal is opened again with the next line.
    fill(&disk, &fake, &agent).await;
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
    let (_, disk) = state_on(&mounts, &folder);
    // It is due after 5 to 28 s, and valid long enough for any machine.
    (fake.behaviour().certificate_life, fake.behaviour().backdated_by) =
        (TimeDelta::seconds(120), TimeDelta::seconds(110));
    let bundle = fake.bundle(folder.path());
    enroll_and_kill(folder.path(), &bundle).await;
    disk.fill();
    let mut agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    agent.wait_for_message("the next certificate cannot be stored; trying again").await;
    let sent = fake.calls().heartbeats.len();
    eventually(|| (fake.calls().heartbeats.len() > sent + 1).then_some(())).await;
    assert!(agent.ended().is_none());
    disk.make_room();
    agent.wait_for_message("certificate renewed").await;
}
