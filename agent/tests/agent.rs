//! The agent as a process against a control plane of this process, over mutual TLS.
#![allow(clippy::unwrap_used, clippy::expect_used, unreachable_pub)]

mod descriptor_store;
mod fake_control_plane;
mod full_disk;
mod handover;
mod hanging_mount;
mod lost_answers;
mod protocol_generations;
mod proxy_pages;
mod skipped_tests;
mod stuck_log;
mod wrong_clock;

use std::time::Duration;

use axum::http::StatusCode;
use chrono::{TimeDelta, Utc};
use ed25519_dalek::SigningKey;
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::time::sleep;
use uuid::Uuid;
use wire::PublicKey;
use wire::bundle::{BootstrapBundle, fingerprint};
use wire::cleanup_proof::CleanupReport;
use wire::inventory::{ExecutorKind, GpuSource};
use wire::task::{Reboot, SignedEnvelope, TASK_TYPE, Task, TaskPayload, TaskStatus, UpdateAgent, sign};

use fake_control_plane::spawned_agent::{enrolled, enrolled_and_killed, enrolled_and_killed_at};
use fake_control_plane::{FakeControlPlane, SpawnedAgent, TOKEN, authority, eventually};

#[tokio::test]
async fn node_enrolls_provisions_and_proves_the_clean_up() {
    let (fake, folder, mut agent) = enrolled(&[]).await;
    let allocation_id = Uuid::now_v7();
    let provision = fake.provision(allocation_id);
    let made = fake.execute(&provision).await;
    assert_eq!(made.status, TaskStatus::Succeeded, "{made:?}");
    let home = made.output["home"].as_str().unwrap().to_owned();
    assert!(std::path::Path::new(&home).is_dir());

    let release = fake.release(allocation_id);
    let gone = fake.execute(&release).await;
    assert_eq!(gone.status, TaskStatus::Succeeded, "{gone:?}");
    let recovery_key = fake.calls().recovery_key.unwrap();
    let report = CleanupReport::open(&gone.proof.unwrap(), &recovery_key).unwrap();
    assert!(report.is_clean(wire::inventory::ExecutorKind::Sandbox));
    let bound = (report.node_id, report.allocation_id, report.task_id, report.attempt);
    assert_eq!(bound, (fake.node_id, allocation_id, release.task_id, 1));
    let boot_id = fake.calls().heartbeats[0].boot_id;
    assert_eq!(report.boot_id, boot_id);
    assert!(!std::path::Path::new(&home).exists());
    assert!(folder.path().join("etc/node-ca.pem").exists());
    {
        let seen = fake.calls();
        let inventory = &seen.heartbeats[0].inventory;
        assert_eq!((inventory.gpu_source, inventory.executor), (GpuSource::Simulated, ExecutorKind::Sandbox));
        assert_eq!(inventory.gpus.len(), 2);
    }

    agent.signal(Signal::SIGTERM);
    assert_eq!(agent.exit().await.code(), Some(0));
    for message in ["enrolled", "polling", "task started", "task finished", "stopped"] {
        assert!(agent.count(message) > 0, "no line says {message:?}");
    }
    for line in agent.lines() {
        assert_eq!(line["service"], "node-agent");
        assert_eq!(line["node_id"], fake.node_id.to_string());
        assert_ne!(line["level"], "ERROR", "{line}");
    }
    let started = agent.lines().into_iter().find(|line| line["message"] == "task started").unwrap();
    assert_eq!(started["task_id"], provision.task_id.to_string());
    assert_eq!(started["allocation_id"], allocation_id.to_string());
    assert!(!std::fs::read_to_string(&agent.log).unwrap().contains(TOKEN));
}

#[tokio::test]
async fn altered_forged_expired_or_foreign_task_is_refused_and_the_next_executed() {
    let (fake, _folder, agent) = enrolled(&[]).await;
    let good = || fake.payload(Task::Validate { load: None });
    let mut altered = fake.sign(&good());
    let position = altered.payload.len() / 2;
    altered.payload[position] ^= 1;
    fake.dispatch_envelope(altered);
    let stranger = SigningKey::from_bytes(&[66; 32]);
    fake.dispatch_envelope(sign(&stranger, &PublicKey::from(&stranger).key_id(), &good()).unwrap());
    // A trusted key id on a stranger's signature.
    fake.dispatch_envelope(sign(&stranger, &PublicKey::from(&fake.signer).key_id(), &good()).unwrap());
    fake.dispatch(&TaskPayload { expires_at: Utc::now() - TimeDelta::seconds(1), ..good() });
    fake.dispatch(&TaskPayload { node_id: Uuid::now_v7(), ..good() });
    let last = good();
    fake.dispatch(&last);

    assert_eq!(fake.result_of(last.task_id).await.status, TaskStatus::Succeeded);
    // A result whose answer came late is sent again.
    let answered: Vec<Uuid> = fake.calls().results.iter().map(|result| result.0).collect();
    assert!(answered.iter().all(|task_id| *task_id == last.task_id), "{answered:?}, and not {} alone", last.task_id);
    assert_eq!(agent.count("task started"), 1);
    for code in ["task_signature_invalid", "task_key_unknown", "task_expired", "task_for_another_node"] {
        assert!(agent.has_code(code), "no line has code {code}");
    }
}

#[tokio::test]
async fn task_of_an_unknown_type_is_answered_with_the_remedy() {
    let (fake, _folder, agent) = enrolled(&[]).await;
    let known = fake.payload(Task::Validate { load: None });
    let mut value = serde_json::to_value(&known).unwrap();
    value["task"] = json!({ "type": "node.sing", "loud": true });
    let id = PublicKey::from(&fake.signer).key_id();
    let bytes = |value: &serde_json::Value| serde_json::to_vec(value).unwrap();
    let mut foreign = value.clone();
    foreign["node_id"] = json!(Uuid::now_v7());
    foreign["task_id"] = json!(Uuid::now_v7());
    for value in [&foreign, &value] {
        fake.dispatch_envelope(SignedEnvelope::sign(&fake.signer, &id, TASK_TYPE, bytes(value)));
    }
    let result = fake.result_of(known.task_id).await;
    let error = result.error.unwrap();
    assert_eq!((result.status, error.code.as_str()), (TaskStatus::Failed, "task_type_unknown"));
    assert!(error.message.contains("node.sing") && error.message.ends_with("upgrade the agent"), "{error:?}");
    assert!(agent.has_code("task_kind_unknown"));
    let answered: Vec<Uuid> = fake.calls().results.iter().map(|result| result.0).collect();
    assert!(answered.iter().all(|task_id| *task_id == known.task_id), "{answered:?}, and not {} alone", known.task_id);
    assert_eq!(agent.count("task started"), 0);
}

#[tokio::test]
async fn machine_is_diagnosed_and_never_rebooted_twice() {
    let (fake, _folder, agent) = enrolled(&[]).await;
    let asked = fake.payload(Task::Diagnose {});
    let response = fake.execute(&asked).await;
    assert_eq!((response.status, &response.output["fitness"]["fit"]), (TaskStatus::Succeeded, &json!(true)));

    // The boot id differs from the task's: the reboot has happened.
    let boot_id = fake.calls().heartbeats[0].boot_id;
    let before = fake.payload(Task::Reboot(Reboot { boot_id: Uuid::now_v7() }));
    let done = fake.execute(&before).await;
    assert_eq!((done.status, &done.output["boot_id"]), (TaskStatus::Succeeded, &json!(boot_id)));
    // The agent must not reboot this machine.
    let now = fake.payload(Task::Reboot(Reboot { boot_id }));
    assert_eq!(fake.execute(&now).await.error.unwrap().code, "unsupported");
    assert!(agent.has_code("unsupported"));
}

#[tokio::test]
async fn agent_that_no_package_installed_refuses_its_update_and_runs_on() {
    let (fake, _folder, agent) = enrolled(&[]).await;
    assert_eq!(fake.calls().heartbeats[0].package_digest, None);
    let digest = wire::package::Digest::of(b"new");
    let update = fake.payload(Task::UpdateAgent(UpdateAgent { digest, force: true, commit_seconds: 60 }));
    assert_eq!(fake.execute(&update).await.error.unwrap().code, "update_unsupported");
    fake.validate().await;
    assert!(agent.has_code("update_unsupported"));
}

#[tokio::test]
async fn replayed_task_gets_the_stored_result_and_a_higher_attempt_is_executed() {
    let (fake, _folder, agent) = enrolled(&[]).await;
    let task = fake.payload(Task::Validate { load: None });
    let first = fake.execute(&task).await;
    fake.dispatch(&task);
    eventually(|| (fake.calls().results.len() >= 2).then_some(())).await;
    assert_eq!(fake.calls().results[1].1, first);
    assert_eq!(agent.count("task started"), 1);

    let repeated = TaskPayload { attempt: 2, ..task };
    fake.dispatch(&repeated);
    eventually(|| fake.calls().results.iter().any(|result| result.1.attempt == 2).then_some(())).await;
    assert_eq!(agent.count("task started"), 2);
}

#[tokio::test]
async fn after_kill_9_between_effect_and_result_the_stored_result_is_sent_once_executed() {
    let (fake, folder, agent) = enrolled(&[]).await;
    fake.behaviour().results = StatusCode::SERVICE_UNAVAILABLE;
    let task = fake.provision(Uuid::now_v7());
    fake.dispatch(&task);
    let lost = eventually(|| fake.calls().results.first().map(|result| result.1.clone())).await;
    agent.kill_9();

    fake.behaviour().results = StatusCode::OK;
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    assert_eq!(fake.result_of(task.task_id).await, lost);
    assert_eq!(agent.count("task started"), 0);
    assert_eq!(agent.count("enrolled"), 0);
    assert_eq!(fake.calls().csrs.len(), 1);
}

#[tokio::test]
async fn after_kill_9_in_the_middle_of_an_effect_the_task_is_executed_when_it_is_sent_again() {
    let (fake, folder, agent) = enrolled(&["--simulate-provision-delay-ms", "60000"]).await;
    let task = fake.provision(Uuid::now_v7());
    fake.dispatch(&task);
    agent.wait_for_message("task started").await;
    agent.kill_9();
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    agent.wait_for_message("polling").await;
    assert_eq!(agent.count("task started"), 0, "its tenant may be released by now");
    assert_eq!(fake.execute(&task).await.status, TaskStatus::Succeeded);
    assert_eq!(agent.count("task started"), 1);
}

#[tokio::test]
async fn polling_and_other_tasks_continue_during_a_long_task() {
    let (fake, _folder, _agent) = enrolled(&["--simulate-provision-delay-ms", "60000"]).await;
    let slow = fake.provision(Uuid::now_v7());
    fake.dispatch(&slow);
    let quick = fake.payload(Task::Validate { load: None });
    fake.dispatch(&quick);
    fake.result_of(quick.task_id).await;
    let running = eventually(|| fake.calls().heartbeats.last()?.running.first().copied()).await;
    assert_eq!((running.task_id, running.attempt), (slow.task_id, 1));
}

#[tokio::test]
async fn release_is_executed_while_other_tasks_take_all_slots() {
    let (fake, _folder, agent) =
        enrolled(&["--simulate-provision-delay-ms", "60000", "--max-concurrent-tasks", "1"]).await;
    fake.dispatch(&fake.provision(Uuid::now_v7()));
    agent.wait_for_message("task started").await;
    let (next, release) = (fake.payload(Task::Validate { load: None }), fake.release(Uuid::now_v7()));
    fake.dispatch(&next);
    assert_eq!(fake.execute(&release).await.status, TaskStatus::Succeeded);
    assert!(fake.calls().results.iter().all(|result| result.0 != next.task_id), "it waits for its slot");
}

#[tokio::test]
async fn release_during_provisioning_waits_for_its_end() {
    let (fake, _folder, _agent) = enrolled(&["--simulate-provision-delay-ms", "300"]).await;
    let allocation_id = Uuid::now_v7();
    let (provision, release) = (fake.provision(allocation_id), fake.release(allocation_id));
    fake.dispatch(&provision);
    let gone = fake.execute(&release).await;
    let made = fake.result_of(provision.task_id).await;
    assert!(made.finished_at <= gone.started_at);
    let home = made.output["home"].as_str().unwrap();
    assert!(!std::path::Path::new(home).exists(), "nothing is left of it");
}

#[tokio::test]
async fn machine_failure_is_reported_with_its_code() {
    let (fake, _folder, _agent) = enrolled(&["--simulate-failure", "release"]).await;
    let task = fake.release(Uuid::now_v7());
    let failed = fake.execute(&task).await;
    assert_eq!(failed.status, TaskStatus::Failed);
    assert_eq!((failed.error.unwrap().code.as_str(), failed.proof), ("simulated_failure", None));
}

#[tokio::test]
async fn permanently_refused_result_is_dropped_with_an_error_and_not_resent() {
    let (fake, folder, agent) = enrolled(&[]).await;
    fake.behaviour().results = StatusCode::CONFLICT;
    let task = fake.payload(Task::Validate { load: None });
    fake.dispatch(&task);
    agent.wait_for_error_code("stale_attempt").await;
    // That it is given up is in the journal a moment after the error is in the log.
    let journal = folder.path().join("state/journal.jsonl");
    eventually(|| std::fs::read_to_string(&journal).unwrap().contains("given_up\"").then_some(())).await;
    agent.kill_9();
    let sent = fake.calls().results.len();
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    agent.wait_for_message("polling").await;
    sleep(Duration::from_millis(200)).await;
    assert_eq!(fake.calls().results.len(), sent, "it was sent again");
}

#[tokio::test]
async fn result_of_a_superseded_provision_is_dropped_without_an_error() {
    let (fake, _folder, agent) = enrolled(&[]).await;
    fake.behaviour().results = StatusCode::NOT_FOUND;
    fake.dispatch(&fake.provision(Uuid::now_v7()));
    agent.wait_for_message("the task is superseded: its result is discarded").await;
    assert_eq!(agent.count("the control plane will not take the result; giving it up"), 0);
}

#[tokio::test]
async fn lost_enroll_answer_is_requested_with_the_same_csr_also_after_kill_9() {
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    fake.behaviour().lose_enroll_answers = usize::MAX;
    let bundle = fake.bundle(folder.path());
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    eventually(|| (fake.calls().csrs.len() >= 2).then_some(())).await;
    agent.kill_9();
    fake.behaviour().lose_enroll_answers = 0;
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    agent.wait_for_message("enrolled").await;
    let seen = fake.calls();
    assert!(seen.csrs.iter().all(|csr| *csr == seen.csrs[0]));
}

#[tokio::test]
async fn control_plane_of_another_ca_never_receives_the_token() {
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    let (_, other_ca) = authority();
    let bundle = BootstrapBundle {
        ca_bundle_fingerprint: fingerprint(&other_ca),
        ca_bundle_pem: other_ca,
        ..fake.bundle(folder.path())
    };
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    agent.wait_for_error_code("tls_untrusted").await;
    assert!(fake.calls().csrs.is_empty());
}

#[tokio::test]
async fn refused_or_missing_token_ends_the_agent_with_the_remedy() {
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    fake.behaviour().refuse_enrollment = true;
    let bundle = fake.bundle(folder.path());
    let mut agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    assert_eq!(agent.exit().await.code(), Some(3));
    let last = agent.lines().pop().unwrap();
    assert_eq!(last["error_code"], "enrollment_rejected");
    assert!(last["error"].as_str().unwrap().contains("reissue"), "{last}");

    let bundle = BootstrapBundle { enrollment_token: wire::SecretToken::new(""), ..bundle };
    let mut agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    assert_eq!(agent.exit().await.code(), Some(3));
    assert!(agent.has_code("no_enrollment_token"));
}

#[tokio::test]
async fn agent_of_a_removed_node_ends_with_its_own_exit_code() {
    let (fake, _folder, mut agent) = enrolled(&[]).await;
    fake.behaviour().node_removed = true;
    assert_eq!(agent.exit().await.code(), Some(4));
    assert!(agent.has_code("node_removed"));
}

#[tokio::test]
async fn certificate_is_renewed_in_its_second_half_and_then_used() {
    let fake = FakeControlPlane::start().await;
    // Of 120 s, 55 are over when it is issued: it is due after 5 to 17 s, and valid long enough for any machine.
    (fake.behaviour().certificate_life, fake.behaviour().backdated_by) =
        (TimeDelta::seconds(65), TimeDelta::seconds(55));
    let (folder, bundle) = enrolled_and_killed_at(&fake).await;
    let enrolled = std::fs::read(folder.path().join("etc/node.pem")).unwrap();
    let enrolled = x509_parser::pem::parse_x509_pem(&enrolled).unwrap().1.contents;
    fake.behaviour().certificate_life = TimeDelta::hours(1);
    // The lifetime of a certificate that is on the disk begins when it says so.
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    let is_another = |used: &Vec<u8>| *used != enrolled;
    eventually(|| fake.calls().certificates.last().is_some_and(is_another).then_some(())).await;
    assert!(fake.calls().renewals >= 1);
    assert_eq!(fake.calls().generation, 1, "it was renewed, and not recovered");
    assert!(!agent.has_code("certificate_expired"));
    fake.validate().await;
}

#[tokio::test]
async fn certificate_backdated_beyond_its_lifetime_is_not_renewed_immediately() {
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    // Long enough for any machine: half of it is half an hour.
    (fake.behaviour().certificate_life, fake.behaviour().backdated_by) = (TimeDelta::hours(1), TimeDelta::hours(3));
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    agent.wait_for_message("polling").await;
    for _ in 0..3 {
        fake.validate().await;
    }
    assert_eq!(fake.calls().renewals, 0, "it is due in half an hour");
}

#[tokio::test]
async fn expired_certificate_is_recovered_with_the_spent_token_despite_a_lost_answer() {
    let (fake, folder, bundle) = enrolled_and_killed().await;
    fake.expire_certificate(&bundle);
    fake.behaviour().lose_recovery_answers = 1;
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    agent.wait_for_message("recovered").await;
    agent.wait_for_message("polling").await;
    let seen = fake.calls();
    assert_eq!((seen.generation, seen.recoveries.len()), (2, 1));
}

#[tokio::test]
async fn certificate_by_an_untrusted_authority_is_replaced_also_behind_a_proxy() {
    let (fake, _folder, agent) = enrolled(&[]).await;
    agent.wait_for_message("polling").await;
    fake.behaviour().trusted_authorities = Some(vec!["00".into()]);
    fake.behaviour().refuse_the_first_certificate = true;
    agent.wait_for_message("recovered").await;
    fake.validate().await;
    let seen = fake.calls();
    assert_eq!((seen.generation, seen.recoveries.len()), (2, 1), "once, whichever of its parts was refused");
}

#[tokio::test]
async fn trusted_certificate_refused_by_a_proxy_spends_no_recovery() {
    let (fake, _folder, agent) = enrolled(&[]).await;
    agent.wait_for_message("polling").await;
    trust_authority(&fake);
    fake.behaviour().refuse_the_first_certificate = true;
    agent.wait_for_error_code("certificate_not_replaced").await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(fake.calls().recoveries.len(), 0);
    fake.behaviour().refuse_the_first_certificate = false;
    fake.validate().await;
    assert_eq!(fake.calls().generation, 1);
}

/// Nonces come with the authority of the agent's certificate.
fn trust_authority(fake: &FakeControlPlane) {
    let shown = fake.calls().certificates[0].clone();
    fake.behaviour().trusted_authorities = Some(vec![authority_of(&shown)]);
}

/// The key identifier of the certificate's issuer.
fn authority_of(certificate: &[u8]) -> String {
    use x509_parser::extensions::ParsedExtension;
    use x509_parser::prelude::FromDer as _;
    let (_, certificate) = x509_parser::certificate::X509Certificate::from_der(certificate).unwrap();
    let found = certificate.iter_extensions().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::AuthorityKeyIdentifier(it) => it.key_identifier.as_ref().map(|id| hex::encode(id.0)),
        _ => None,
    });
    found.unwrap()
}

#[tokio::test]
async fn task_by_a_freshly_rotated_key_is_executed() {
    let (mut fake, _folder, agent) = enrolled(&[]).await;
    agent.wait_for_message("polling").await;
    let second = SigningKey::from_bytes(&[2; 32]);
    fake.behaviour().verifier_sets = vec![FakeControlPlane::rotation(1, &second, &fake.signer)];
    fake.signer = second;
    fake.validate().await;
    assert!(
        !agent.has_code("task_key_unknown"),
        "the control plane was asked before the task was taken for a stranger's"
    );
}

#[tokio::test]
async fn machine_without_certificate_recovers_with_a_spent_token() {
    let (fake, folder, agent) = enrolled(&[]).await;
    agent.kill_9();
    std::fs::remove_file(folder.path().join("etc/node.pem")).unwrap();
    std::fs::remove_file(folder.path().join("etc/node.key")).unwrap();
    fake.behaviour().refuse_enrollment = true;
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    agent.wait_for_message("recovered").await;
    agent.wait_for_message("polling").await;
}

#[tokio::test]
async fn expired_certificate_without_a_token_ends_the_agent_with_the_remedy() {
    let (fake, folder, bundle) = enrolled_and_killed().await;
    fake.expire_certificate(&bundle);
    let without = BootstrapBundle { enrollment_token: wire::SecretToken::new(""), ..bundle.clone() };
    let mut agent = SpawnedAgent::start(folder.path(), &without, &[]);
    assert_eq!(agent.exit().await.code(), Some(5));
    let last = agent.lines().pop().unwrap();
    assert!(last["error"].as_str().unwrap().contains("reissue"), "{last}");

    // What the reissue's restart command does: a new token, no certificate, no key.
    std::fs::remove_file(folder.path().join("etc/node.pem")).unwrap();
    std::fs::remove_file(folder.path().join("etc/node.key")).unwrap();
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    agent.wait_for_message("polling").await;
}

#[tokio::test]
async fn rotated_task_keys_are_followed_through_the_heartbeat_and_remembered() {
    let (mut fake, folder, agent) = enrolled(&[]).await;
    let (second, third) = (SigningKey::from_bytes(&[2; 32]), SigningKey::from_bytes(&[3; 32]));
    fake.behaviour().verifier_sets =
        vec![FakeControlPlane::rotation(1, &second, &fake.signer), FakeControlPlane::rotation(2, &third, &second)];
    agent.wait_for_message("task-signing keys rotated").await;
    agent.kill_9();

    let bundle = fake.bundle(folder.path());
    fake.signer = third;
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    // By then the killed agent's poll, which could receive the task, is gone too.
    agent.wait_for_message("polling").await;
    fake.validate().await;
    eventually(|| (fake.calls().heartbeats.last()?.verifier_set_version == 2).then_some(())).await;
}

#[tokio::test]
async fn verifier_set_of_a_stranger_or_lower_version_is_refused_and_trust_is_unchanged() {
    let (fake, folder, agent) = enrolled(&[]).await;
    let (second, stranger) = (SigningKey::from_bytes(&[2; 32]), SigningKey::from_bytes(&[9; 32]));
    fake.behaviour().verifier_sets = vec![FakeControlPlane::rotation(5, &second, &fake.signer)];
    agent.wait_for_message("task-signing keys rotated").await;
    let stored = found(folder.path(), "verifiers.json");
    let before = std::fs::read(&stored).unwrap();
    // This set is signed by no key that the agent trusts; the other is older than the current one.
    let mut forged = FakeControlPlane::rotation(6, &stranger, &stranger);
    forged.signatures[0].key_id = FakeControlPlane::rotation(6, &stranger, &second).signatures[0].key_id.clone();
    fake.behaviour().verifier_sets = vec![forged, FakeControlPlane::rotation(9, &stranger, &stranger)];
    agent.wait_for_message("a set of task-signing keys is refused").await;
    fake.behaviour().lowest_set = Some(FakeControlPlane::rotation(4, &stranger, &second));
    let beats = fake.calls().heartbeats.len();
    eventually(|| (fake.calls().heartbeats.len() > beats + 2).then_some(())).await;
    assert_eq!(fake.calls().heartbeats.last().unwrap().verifier_set_version, 5);
    assert_eq!(std::fs::read(&stored).unwrap(), before, "what is stored is not touched by what is refused");
}

#[tokio::test]
async fn node_authorities_are_followed_and_a_certificate_of_a_retired_one_is_renewed_early() {
    let (fake, folder, agent) = enrolled(&[]).await;
    let bundle = "-----BEGIN CERTIFICATE-----\none\n-----END CERTIFICATE-----\n".repeat(2);
    fake.behaviour().node_authorities = Some(bundle.clone());
    agent.wait_for_message("the authorities of nodes changed").await;
    assert_eq!(std::fs::read_to_string(found(folder.path(), "node-ca.pem")).unwrap(), bundle);
    assert_eq!(fake.calls().renewals, 0, "a certificate of a day is not due");
    fake.behaviour().renew_within_seconds = Some(1);
    agent.wait_for_message("certificate renewed").await;
    fake.behaviour().renew_within_seconds = None;
}

/// The file of that name below the folder.
fn found(folder: &std::path::Path, name: &str) -> std::path::PathBuf {
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().flatten() {
            match entry.path() {
                path if path.is_dir() => folders.push(path),
                path if path.ends_with(name) => return path,
                _ => {}
            }
        }
    }
    panic!("there is no {name} below {}", folder.display());
}

#[tokio::test]
async fn second_agent_on_the_same_state_folder_does_not_start() {
    let (fake, folder, _agent) = enrolled(&[]).await;
    let mut second = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    assert_eq!(second.exit().await.code(), Some(7));
}

#[tokio::test]
async fn wrong_configuration_is_reported_on_one_json_line() {
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    let bundle = BootstrapBundle { api_url: "http://plain".into(), ..fake.bundle(folder.path()) };
    let mut agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    assert_eq!(agent.exit().await.code(), Some(2));
    let last = agent.lines().pop().unwrap();
    assert_eq!(last["error_code"], json!("configuration"));
    assert!(last["error"].as_str().unwrap().contains("SVC_API_URL"));
}

#[tokio::test]
async fn sandbox_agent_as_root_does_not_start_and_names_the_remedy() {
    if !nix::unistd::Uid::effective().is_root() {
        return skipped_tests::report_skipped("it needs root, which is refused");
    }
    let start = |more: &[&str]| {
        let ran =
            std::process::Command::new(env!("CARGO_BIN_EXE_gpuaas-agent")).env_clear().args(more).output().unwrap();
        (ran.status.code(), String::from_utf8_lossy(&ran.stderr).into_owned() + &String::from_utf8_lossy(&ran.stdout))
    };
    for (more, says) in [
        (&[][..], "--user"),
        (&["--user", "root"], "or it is root"),
        (&["--user", "nobody-of-that-name"], "there is no user"),
        (&["--executor", "system", "--user", "nobody"], "leave --user out"),
    ] {
        let (code, output) = start(more);
        assert!(code == Some(2) && output.contains(says), "{more:?}: {code:?} {output}");
    }
}
