//! A proxy in front of the control plane that answers with pages of its own: they say nothing of the node, its tasks or its terminals.

use axum::http::StatusCode;
use chrono::{TimeDelta, Utc};
use uuid::Uuid;
use wire::recording::{RecordMode, RecordTerms, RecordingEnd};
use wire::task::{OpenTerminal, Task, TaskStatus};
use wire::terminal::ProgramExit;

use crate::fake_control_plane::spawned_agent::enrolled;
use crate::fake_control_plane::{FakeControlPlane, SpawnedAgent, eventually};

/// Waits until the proxy has answered so many more requests, of which the path has this in it.
async fn expect_pages(fake: &FakeControlPlane, path: &str, count: usize) {
    let pages = || fake.calls().pages.iter().filter(|requested| requested.contains(path)).count();
    let before = pages();
    eventually(|| (pages() >= before + count).then_some(())).await;
}

#[tokio::test]
async fn page_of_a_proxy_ends_no_enrollment() {
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    fake.behaviour().page = Some(StatusCode::NOT_FOUND);
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    for status in [StatusCode::NOT_FOUND, StatusCode::FORBIDDEN, StatusCode::UPGRADE_REQUIRED] {
        fake.behaviour().page = Some(status);
        expect_pages(&fake, "/enroll", 1).await;
    }
    fake.behaviour().page = None;
    agent.wait_for_message("enrolled").await;
    agent.wait_for_message("polling").await;
}

#[tokio::test]
async fn page_of_a_proxy_ends_no_running_agent() {
    let (fake, _folder, agent) = enrolled(&[]).await;
    agent.wait_for_message("polling").await;
    for status in [StatusCode::UPGRADE_REQUIRED, StatusCode::NOT_FOUND] {
        fake.behaviour().page = Some(status);
        expect_pages(&fake, "/heartbeat", 1).await;
        expect_pages(&fake, "/tasks/wait", 1).await;
    }
    fake.behaviour().page = None;
    fake.validate().await;
}

#[tokio::test]
async fn page_of_a_proxy_ends_no_terminal_and_no_recording() {
    let (fake, _folder, _agent) = enrolled(&[]).await;
    let (allocation_id, session_id) = (Uuid::now_v7(), Uuid::now_v7());
    fake.set_up(allocation_id).await;
    let open = fake.payload(Task::OpenTerminal(OpenTerminal {
        session_id,
        allocation_id,
        user_name: "tenant".into(),
        ends_at: Utc::now() + TimeDelta::minutes(10),
        // A recording that is refused ends its session.
        recording: RecordTerms { mode: RecordMode::Strict, most_bytes: 64 << 20 },
    }));
    fake.dispatch(&open);
    assert_eq!(fake.result_of(open.task_id).await.status, TaskStatus::Succeeded);
    let enter = |text: &str| fake.calls().terminals.entry(session_id).or_default().input.push_back(text.into());
    let shows = |text: &'static str| {
        let fake = &fake;
        eventually(move || {
            let calls = fake.calls();
            let seen = calls.terminals.get(&session_id)?;
            String::from_utf8_lossy(&seen.output).contains(text).then_some(())
        })
    };
    // There is always more to record.
    enter("stty -echo; while sleep 0.2; do echo more; done & echo be''fore\n");
    shows("before").await;
    // Each of these statuses is a refusal where the control plane itself answers with it.
    for status in [StatusCode::CONFLICT, StatusCode::NOT_FOUND, StatusCode::BAD_REQUEST] {
        fake.behaviour().page = Some(status);
        expect_pages(&fake, "/stream", 1).await;
        expect_pages(&fake, "/recording/", 1).await;
    }
    fake.behaviour().page = None;
    enter("kill $!; echo af''ter; exit 3\n");
    shows("after").await;
    let exit = eventually(|| fake.calls().terminals[&session_id].exit).await;
    assert_eq!(exit, ProgramExit::Code(3));
    eventually(|| fake.calls().terminals[&session_id].recording().2).await;
    let calls = fake.calls();
    let seen = &calls.terminals[&session_id];
    let (recorded, gaps, end) = seen.recording();
    assert_eq!((gaps, end, seen.missing), (0, Some(RecordingEnd::Session), 0));
    assert!(recorded == seen.output, "{} bytes recorded of {}", recorded.len(), seen.output.len());
}
