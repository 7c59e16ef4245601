//! A state folder without room: tenants are released, and nothing else begins.

use uuid::Uuid;
use wire::cleanup_proof::CleanupReport;
use wire::inventory::ExecutorKind;
use wire::task::{Task, TaskStatus};

use super::hanging_mount::OwnMounts;
use super::{FakeControlPlane, SpawnedAgent, eventually, skipped_tests};

const UNWRITTEN: &str =
    "the journal cannot be written; tenants are released all the same, and no other task begins until there is room";

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

    let mark = state.join("journal.complete");
    assert!(mark.exists());
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

    assert!(!mark.exists(), "the next agent would go on with what the journal has unfinished");
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
    eventually(|| (has(release.task_id) && has(provision.task_id) && mark.exists()).then_some(())).await;
    let provision = fake.provision(Uuid::now_v7());
    fake.dispatch(&provision);
    let made = fake.result_of(provision.task_id).await;
    assert_eq!(made.status, TaskStatus::Succeeded, "{made:?}");
}
