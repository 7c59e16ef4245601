//! Agents on machines whose clock is wrong. The control plane's clock is shifted in place of the machine's: one that is ten years ahead has an
//! agent that is ten years behind. Its certificate is valid for a short time around its own.

use std::path::{Path, PathBuf};

use chrono::{DateTime, TimeDelta};
use serde_json::{Value, json};
use uuid::Uuid;
use wire::bundle::BootstrapBundle;
use wire::task::{Task, TaskPayload};

use crate::fake_control_plane::spawned_agent::{enrolled, enrolled_and_killed_at, enrolled_at};
use crate::fake_control_plane::{FakeControlPlane, SpawnedAgent, eventually};
use crate::skipped_tests::report_skipped;

const VALIDITY: (TimeDelta, TimeDelta) = (TimeDelta::hours(-6), TimeDelta::hours(6));
/// More than a test takes on a busy machine.
const NEAR: TimeDelta = TimeDelta::minutes(5);

fn years(years: i64) -> TimeDelta {
    TimeDelta::days(365 * years)
}

#[tokio::test]
async fn node_ten_years_behind_works_by_the_control_planes_time() {
    works(years(10)).await;
}

#[tokio::test]
async fn node_a_day_behind_works_by_the_control_planes_time() {
    works(TimeDelta::hours(24)).await;
}

#[tokio::test]
async fn node_more_than_a_day_ahead_works_by_the_control_planes_time() {
    works(-TimeDelta::hours(25)).await;
}

#[tokio::test]
async fn node_ten_years_ahead_works_by_the_control_planes_time() {
    works(-years(10)).await;
}

/// Enrolls, provisions, releases, restarts, reboots and renews at a control plane that is so far ahead.
async fn works(ahead: TimeDelta) {
    let (fake, folder, agent) = enrolled_at(FakeControlPlane::start_ahead(ahead, VALIDITY).await, &[]).await;
    let bundle = fake.bundle(folder.path());
    provision_and_release(&fake).await;
    let is_found = || fake.calls().heartbeats.last().is_some_and(|heartbeat| has_skew(&fake, heartbeat, ahead));
    eventually(|| is_found().then_some(())).await;
    assert_one_clear_warning(&agent, ahead);
    assert!(!agent.has_code("task_expired"));
    agent.kill_9();

    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    agent.wait_for_message("polling").await;
    fake.validate().await;
    assert_one_clear_warning(&agent, ahead);
    agent.kill_9();

    // The kernel's clock since boot says nothing, and the agent begins with its certificate and the machine's clock.
    begin_another_boot(folder.path());
    let mut agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    agent.wait_for_message("polling").await;
    fake.validate().await;
    fake.behaviour().renew_within_seconds = Some(1);
    agent.wait_for_message("certificate renewed").await;
    fake.behaviour().renew_within_seconds = None;
    assert_one_clear_warning(&agent, ahead);
    agent.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(agent.exit().await.code(), Some(0));
    let seen = fake.calls();
    assert_eq!((seen.generation, seen.recoveries.len(), seen.csrs.len()), (1, 0, 1), "no recovery is used up");
}

async fn provision_and_release(fake: &FakeControlPlane) {
    let allocation_id = Uuid::now_v7();
    let made = fake.set_up(allocation_id).await;
    assert!(is_near(fake, made.started_at) && is_near(fake, made.finished_at), "{made:?}");
    let report = fake.end(allocation_id).await;
    assert!(is_near(fake, report.checked_at), "{report:?}");
}

fn is_near(fake: &FakeControlPlane, time: DateTime<chrono::Utc>) -> bool {
    (fake.now() - time).abs() < NEAR
}

fn has_skew(fake: &FakeControlPlane, heartbeat: &wire::heartbeat::Heartbeat, ahead: TimeDelta) -> bool {
    assert!(is_near(fake, heartbeat.sent_at), "{} and not {}", heartbeat.sent_at, fake.now());
    let findings = heartbeat.findings.iter().flatten();
    let skew =
        findings.into_iter().find(|finding| (finding.probe.as_str(), finding.code.as_str()) == ("clock", "skew"));
    let direction = if ahead > TimeDelta::zero() { " behind " } else { " ahead of " };
    skew.is_some_and(|skew| skew.detail.contains(direction) && is_near(fake, skew.first_at))
}

fn clock_warnings(agent: &SpawnedAgent) -> Vec<Value> {
    agent.lines().into_iter().filter(|line| line["error_code"] == "clock_skew").collect()
}

/// The log has one line about the clock, and none about authorities, certificates or recoveries.
#[track_caller]
fn assert_one_clear_warning(agent: &SpawnedAgent, ahead: TimeDelta) {
    let warnings = clock_warnings(agent);
    let [warning] = warnings.as_slice() else { panic!("{warnings:?}") };
    let seconds = warning["seconds"].as_i64().unwrap();
    assert!((seconds + ahead.num_seconds()).abs() < NEAR.num_seconds(), "{warning}");
    assert!(warning["message"].as_str().unwrap().contains("time service"), "{warning}");
    let misleading = ["tls_untrusted", "server_certificate_time", "certificate_refused", "certificate_invalid"];
    let found: Vec<&str> = misleading.into_iter().filter(|code| agent.has_code(code)).collect();
    assert!(found.is_empty(), "{found:?}");
    assert_eq!(agent.count("recovering the identity"), 0);
}

/// What is stored of the time is that of an earlier boot.
fn begin_another_boot(folder: &Path) {
    let path = folder.join("state/server_time.json");
    let mut stored: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    stored["boot_id"] = json!(Uuid::now_v7());
    std::fs::write(&path, stored.to_string()).unwrap();
}

#[tokio::test]
async fn certificate_is_renewed_when_it_is_due_by_the_control_planes_time() {
    for ahead in [TimeDelta::hours(24), -TimeDelta::hours(25)] {
        let fake = FakeControlPlane::start_ahead(ahead, VALIDITY).await;
        // Of 120 s, 55 are over when it is issued: it is due after 5 to 17 s, and valid long enough for any machine.
        fake.behaviour().certificate_life = TimeDelta::seconds(65);
        fake.behaviour().backdated_by = TimeDelta::seconds(55);
        let (folder, bundle) = enrolled_and_killed_at(&fake).await;
        fake.behaviour().certificate_life = TimeDelta::hours(1);
        let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
        agent.wait_for_message("certificate renewed").await;
        fake.validate().await;
        let calls = fake.calls();
        assert_eq!((calls.renewals, calls.generation), (1, 1), "{ahead}");
    }
}

#[tokio::test]
async fn certificate_that_has_expired_by_the_control_planes_time_is_recovered_once() {
    for ahead in [years(10), -years(10)] {
        let fake = FakeControlPlane::start_ahead(ahead, VALIDITY).await;
        let (fake, folder, agent) = enrolled_at(fake, &[]).await;
        agent.kill_9();
        let bundle = fake.bundle(folder.path());
        fake.expire_certificate(&bundle);
        begin_another_boot(folder.path());
        let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
        agent.wait_for_message("recovered").await;
        fake.validate().await;
        let calls = fake.calls();
        assert_eq!((calls.generation, calls.recoveries.len()), (2, 1), "{ahead}");
    }
}

#[tokio::test]
async fn control_plane_that_issues_invalid_certificates_uses_up_one_recovery() {
    let (fake, folder, agent) = enrolled(&[]).await;
    agent.kill_9();
    let bundle = fake.bundle(folder.path());
    fake.expire_certificate(&bundle);
    fake.behaviour().certificate_life = TimeDelta::seconds(-1);
    fake.behaviour().backdated_by = TimeDelta::hours(1);
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    agent.wait_for_error_code("certificate_invalid").await;
    // The control plane confirms that the certificate is not valid, and the next refusals follow.
    eventually(|| (!fake.calls().nonces.is_empty()).then_some(())).await;
    let refused = || agent.lines().iter().filter(|line| line["error_code"] == "certificate_refused").count();
    let before = refused();
    eventually(|| (refused() > before + 2).then_some(())).await;
    assert_eq!(fake.calls().recoveries.len(), 1);
}

#[tokio::test]
async fn clock_that_is_set_while_the_agent_runs_costs_no_task_and_no_recovery() {
    let fake = FakeControlPlane::start().await;
    // The node's certificate is valid at all these times.
    fake.behaviour().backdated_by = TimeDelta::hours(24);
    let (fake, _folder, agent) = enrolled_at(fake, &[]).await;
    for ahead in [TimeDelta::hours(5), TimeDelta::zero(), -TimeDelta::hours(5), TimeDelta::zero()] {
        fake.behaviour().clock_ahead = ahead;
        // The answer to the second heartbeat is after the change.
        let sent = fake.calls().heartbeats.len();
        eventually(|| (fake.calls().heartbeats.len() > sent + 2).then_some(())).await;
        let is_found = |fake: &FakeControlPlane| {
            let calls = fake.calls();
            let mut findings = calls.heartbeats.last().unwrap().findings.iter().flatten();
            findings.any(|finding| finding.probe == "clock")
        };
        eventually(|| (is_found(&fake) != ahead.is_zero()).then_some(())).await;
        fake.validate().await;
        let over = TaskPayload { expires_at: fake.now() - TimeDelta::seconds(2), ..fake.payload(Task::Diagnose {}) };
        fake.dispatch(&over);
        fake.validate().await;
        assert!(fake.calls().results.iter().all(|result| result.0 != over.task_id), "it has expired");
    }
    assert_eq!((clock_warnings(&agent).len(), fake.calls().recoveries.len()), (2, 0));
    assert_eq!(agent.count("this machine's clock agrees with the control plane's"), 2);
}

/// The machine's clock itself, as a process of the agent sees it.
struct MachineClock {
    folder: PathBuf,
}

impl MachineClock {
    /// `None` without libfaketime (`tests/src/cluster/fake_clock.rs`).
    fn in_folder(folder: &Path) -> Option<Self> {
        let tools = std::env::var_os("GPUAAS_TOOLS_DIR").map(PathBuf::from);
        let tools = tools.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.dev/tools"));
        let library = tools.join("faketime/libfaketimeMT.so.1");
        std::fs::copy(library, folder.join("faketime.so")).ok()?;
        Some(Self { folder: folder.to_owned() })
    }

    fn set_ahead(&self, ahead: TimeDelta) {
        // Renamed into place, so that the agent does not read half of it.
        std::fs::write(self.folder.join("ahead.new"), format!("{:+}", ahead.num_seconds())).unwrap();
        std::fs::rename(self.folder.join("ahead.new"), self.folder.join("ahead")).unwrap();
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        let path = |name: &str| self.folder.join(name).to_str().unwrap().to_owned();
        vec![
            ("LD_PRELOAD", path("faketime.so")),
            ("FAKETIME_TIMESTAMP_FILE", path("ahead")),
            ("FAKETIME_NO_CACHE", "1".to_owned()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ]
    }
}

#[tokio::test]
async fn machines_clock_that_is_set_while_the_agent_runs_costs_no_task_and_no_recovery() {
    let fake = FakeControlPlane::start_ahead(TimeDelta::zero(), VALIDITY).await;
    let folder = tempfile::tempdir().unwrap();
    let Some(clock) = MachineClock::in_folder(folder.path()) else {
        return report_skipped("libfaketime: `deploy/test --tools` installs it");
    };
    clock.set_ahead(TimeDelta::hours(25));
    let bundle = fake.bundle(folder.path());
    let agent = SpawnedAgent::start_with(folder.path(), &bundle, &["--simulate-gpus", "2"], &clock.environment());
    for ahead in [TimeDelta::hours(25), -TimeDelta::hours(24), years(10), -years(10), TimeDelta::zero()] {
        clock.set_ahead(ahead);
        let found = || {
            let calls = fake.calls();
            let last = calls.heartbeats.last()?;
            assert!(is_near(&fake, last.sent_at), "{} and not {}", last.sent_at, fake.now());
            let skew = last.findings.iter().flatten().find(|finding| finding.probe == "clock");
            let expected = match ahead.num_seconds() {
                0 => None,
                seconds if seconds > 0 => Some(" ahead of "),
                _ => Some(" behind "),
            };
            match (skew, expected) {
                (None, None) => Some(()),
                (Some(skew), Some(expected)) => skew.detail.contains(expected).then_some(()),
                _ => None,
            }
        };
        eventually(found).await;
        fake.validate().await;
    }
    assert_one_clear_warning(&agent, -TimeDelta::hours(25));
    let seen = fake.calls();
    assert_eq!((seen.generation, seen.recoveries.len(), seen.renewals), (1, 0, 0));
}

/// A bundle of the same node, and of a control plane with an old certificate.
fn impostor(fake: &FakeControlPlane, folder: &Path, node_id: Uuid) -> BootstrapBundle {
    let bundle = fake.bundle(folder);
    std::fs::create_dir_all(Path::new(&bundle.ca_bundle_path).parent().unwrap()).unwrap();
    std::fs::write(&bundle.ca_bundle_path, &bundle.ca_bundle_pem).unwrap();
    BootstrapBundle { node_id, ..bundle }
}

#[tokio::test]
async fn old_certificate_of_the_control_plane_neither_gets_the_token_nor_sets_a_node_back() {
    let (fake, folder, agent) = enrolled(&[]).await;
    agent.kill_9();
    let old = FakeControlPlane::start_ahead(-years(2), VALIDITY).await;
    // The second one is a node that has never been in contact, and was registered at this time.
    let fresh = tempfile::tempdir().unwrap();
    for (folder, node_id) in [(folder.path(), fake.node_id), (fresh.path(), Uuid::now_v7())] {
        let agent = SpawnedAgent::start(folder, &impostor(&old, folder, node_id), &[]);
        agent.wait_for_error_code("server_certificate_time").await;
        let lines = agent.lines();
        let refused = lines.iter().find(|line| line["error_code"] == "server_certificate_time").unwrap();
        let error = refused["error"].as_str().unwrap();
        assert!(error.contains("is before the last one") && !error.contains("does not chain"), "{error}");
        assert!(!agent.has_code("clock_skew"));
        let seen = old.calls();
        assert_eq!((seen.csrs.len(), seen.heartbeats.len(), seen.recoveries.len()), (0, 0, 0));
    }
}

#[tokio::test]
async fn expired_certificate_of_the_control_plane_is_called_that() {
    let past = (-TimeDelta::days(2), -TimeDelta::days(1));
    let (fake, folder) = (FakeControlPlane::start_ahead(TimeDelta::zero(), past).await, tempfile::tempdir().unwrap());
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    agent.wait_for_error_code("server_certificate_time").await;
    let lines = agent.lines();
    let refused = lines.iter().find(|line| line["error_code"] == "server_certificate_time").unwrap();
    let error = refused["error"].as_str().unwrap();
    assert!(error.contains("ended at") && error.contains("own time either"), "{error}");
    assert!(fake.calls().csrs.is_empty() && !agent.has_code("tls_untrusted"));
}
