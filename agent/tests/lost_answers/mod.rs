//! Answers that are lost on the way to an identity, and certificates that the control plane has forgotten.

use chrono::TimeDelta;
use tempfile::TempDir;
use wire::SecretToken;
use wire::bundle::BootstrapBundle;

use super::fake_control_plane::spawned_agent::enrolled_and_killed;
use super::fake_control_plane::{FakeControlPlane, SpawnedAgent, eventually};
use super::trust_authority;

/// A node in its second generation, whose agent is stopped.
async fn recovered_once() -> (FakeControlPlane, TempDir, BootstrapBundle) {
    let (fake, folder, bundle) = enrolled_and_killed().await;
    fake.expire_certificate(&bundle);
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    agent.wait_for_message("polling").await;
    agent.kill_9();
    let counts = {
        let seen = fake.calls();
        (seen.generation, seen.recoveries.len())
    };
    assert_eq!(counts, (2, 1));
    (fake, folder, bundle)
}

/// What a reissue and its restart command do.
fn reissue(fake: &FakeControlPlane, bundle: BootstrapBundle) -> BootstrapBundle {
    fake.behaviour().token = "second-token".into();
    std::fs::remove_file(&bundle.cert_path).unwrap();
    std::fs::remove_file(&bundle.key_path).unwrap();
    BootstrapBundle { enrollment_token: SecretToken::new("second-token"), ..bundle }
}

async fn expect_work(fake: &FakeControlPlane) {
    fake.validate().await;
    assert_eq!(fake.calls().clones, 0);
}

#[tokio::test]
async fn reissued_node_whose_enroll_answer_was_lost_recovers_and_is_no_clone() {
    for is_killed in [false, true] {
        let (fake, folder, bundle) = recovered_once().await;
        let bundle = reissue(&fake, bundle);
        fake.behaviour().lose_answers_of_enrolled = 1;
        // An agent that is killed has had no answer to its recovery either.
        fake.behaviour().lose_recovery_answers = if is_killed { usize::MAX } else { 0 };
        let mut agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
        if is_killed {
            eventually(|| (fake.calls().generation == 4).then_some(())).await;
            agent.end_at_once();
            fake.behaviour().lose_recovery_answers = 0;
            agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
        }
        agent.wait_for_message("recovered").await;
        expect_work(&fake).await;
        let seen = fake.calls();
        assert_eq!((seen.generation, seen.recoveries.len()), (4, 2));
    }
}

#[tokio::test]
async fn recovery_whose_answer_was_lost_is_repeated_although_a_renewal_is_due_at_the_next_start() {
    let (fake, folder, bundle) = enrolled_and_killed().await;
    // Two thirds of its time are over. Its authority is retired.
    fake.replace_certificate(&bundle, (TimeDelta::hours(1), TimeDelta::hours(2)));
    fake.calls().issued.clear();
    fake.behaviour().trusted_authorities = Some(vec!["00".into()]);
    fake.behaviour().lose_recovery_answers = usize::MAX;
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    eventually(|| (fake.calls().generation == 2).then_some(())).await;
    agent.kill_9();
    fake.behaviour().lose_recovery_answers = 0;
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    agent.wait_for_message("recovered").await;
    expect_work(&fake).await;
    let seen = fake.calls();
    assert_eq!((seen.generation, seen.recoveries.len()), (2, 1));
}

#[tokio::test]
async fn recovery_whose_nonce_expired_on_its_way_is_repeated_with_another() {
    let (fake, folder, bundle) = enrolled_and_killed().await;
    fake.expire_certificate(&bundle);
    fake.behaviour().expire_nonces = 1;
    let agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    agent.wait_for_message("recovered").await;
    expect_work(&fake).await;
    let seen = fake.calls();
    assert_eq!((seen.generation, seen.csrs.len()), (2, 1));
}

#[tokio::test]
async fn certificate_that_the_control_plane_has_forgotten_is_replaced_although_its_authority_is_trusted() {
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), &[]);
    eventually(|| (!fake.calls().certificates.is_empty()).then_some(())).await;
    trust_authority(&fake);
    // As a control plane that is restored from a backup.
    fake.calls().issued.clear();
    agent.wait_for_message("recovered").await;
    expect_work(&fake).await;
    let seen = fake.calls();
    assert_eq!((seen.generation, seen.recoveries.len()), (2, 1));
}

#[tokio::test]
async fn agent_with_a_revoked_certificate_and_a_void_token_runs_until_the_restart_command() {
    let (fake, folder) = (FakeControlPlane::start().await, tempfile::tempdir().unwrap());
    let bundle = fake.bundle(folder.path());
    let mut agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    eventually(|| (!fake.calls().certificates.is_empty()).then_some(())).await;
    trust_authority(&fake);
    let issued = std::mem::take(&mut fake.calls().issued);
    fake.behaviour().token = "second-token".into();
    agent.wait_for_error_code("certificate_not_replaced").await;
    assert_eq!(agent.ended(), None);
    // As if it had never been revoked: the agent has tried with it all the time.
    fake.calls().issued = issued;
    expect_work(&fake).await;
    agent.end_at_once();
    fake.calls().issued.clear();
    let bundle = reissue(&fake, bundle);
    let _agent = SpawnedAgent::start(folder.path(), &bundle, &[]);
    eventually(|| (fake.calls().generation == 2).then_some(())).await;
    expect_work(&fake).await;
    assert_eq!(fake.calls().recoveries.len(), 0);
}
