//! What a pass of the worker does while a call or a commit has not ended, where the node refuses a token, and where the machine is broken,
//! deleted, released by others, or in a status that is unknown.

use super::{
    LONG, LOOKS, MACHINE, builder, come_up, deploying, expect_second_deployment, expect_status, expect_step, register,
    reinstall, start,
};
use domain::{Event, NodeId};
use serde_json::json;
use sqlx::PgPool;
use std::time::Duration;
use tests::cluster::TestClusterBuilder;
use tests::cluster::db_lock::WRITES;
use tests::cluster::fake_maas::FakeMaas;
use uuid::Uuid;

/// Of the readings of a machine.
const ALL: usize = 1000;

#[tokio::test(flavor = "multi_thread")]
async fn machine_is_released_only_after_a_deployment_whose_pass_timed_out_has_begun() {
    /// Longer than a pass, and shorter than its lease.
    const DELAY: Duration = Duration::from_millis(28_500);
    const AFTER_THE_PASS: Duration = Duration::from_secs(26);
    let maas = FakeMaas::start().await;
    maas.delay_deployments(DELAY);
    let mut cluster = start(&maas, builder(&maas).variable("MAAS_API_TIMEOUT_MS", "60000")).await;
    let node = register(&cluster).await;
    maas.wait_for(MACHINE, "its deployment is requested", |_| maas.deploy_requests() == 1).await;
    tokio::time::sleep(AFTER_THE_PASS).await;
    // The machine is due at once, while the provider may still act on the request.
    node.order("retire").await.ok();
    node.order("remove").await.accepted();
    let released = maas.wait_for(MACHINE, "it is released", |machine| machine.erasures == 1).await;
    assert_eq!(
        (released.deployments.len(), maas.deploy_requests()),
        (1, 1),
        "it was released beside a deployment in flight"
    );
    cluster.allow_error("node_removed");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_is_deployed_with_a_token_of_its_own_where_the_commit_of_the_first_was_not_confirmed() {
    /// Longer than a pass waits for the node.
    const SLOW_COMMIT: Duration = Duration::from_secs(4);
    let maas = FakeMaas::start().await;
    let mut cluster = start(&maas, builder(&maas)).await;
    let lock = cluster.lock_commits_of("node", "machine_token").await;
    let node = register(&cluster).await;
    lock.expect_blocked_within(WRITES, LONG).await;
    tokio::time::sleep(SLOW_COMMIT).await;
    lock.unlock().await;
    maas.wait_for(MACHINE, "its deployment began", |machine| machine.deployments.len() == 1).await;
    // The token in its user data is the one that the node knows.
    let agent = come_up(&mut cluster, &maas, &node, "first").await;
    agent.wait(1).await;
    node.expect_state("active").await;
    assert_eq!((maas.deploy_requests(), maas.machine(MACHINE).deployments.len()), (1, 1));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_is_not_deployed_where_its_node_was_retired_before_the_token() {
    let maas = FakeMaas::start().await;
    maas.delay_allocations(Duration::from_secs(6));
    let mut cluster = start(&maas, builder(&maas).variable("MAAS_API_TIMEOUT_MS", "20000")).await;
    let node = register(&cluster).await;
    maas.wait_for(MACHINE, "its allocation is requested", |_| maas.allocation_requests() == 1).await;
    node.order("retire").await.ok();
    maas.wait_for(MACHINE, "it is allocated", |machine| !machine.owner.is_empty()).await;
    tokio::time::sleep(LOOKS).await;
    assert_eq!(maas.deploy_requests(), 0, "its agent could never enroll");
    node.order("remove").await.accepted();
    maas.wait_for(MACHINE, "it is released", |machine| machine.erasures == 1).await;
    assert_eq!(maas.deploy_requests(), 0);
    cluster.allow_error("node_removed");
    cluster.shutdown().await;
}

/// A provider whose answers may take long, and a pass is patient.
fn patient(maas: &FakeMaas) -> TestClusterBuilder {
    builder(maas).variable("MAAS_API_TIMEOUT_MS", "20000")
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_is_not_allocated_where_its_node_was_removed_while_the_provider_answered() {
    let maas = FakeMaas::start().await;
    let mut cluster = start(&maas, patient(&maas)).await;
    maas.hold_reads();
    let node = register(&cluster).await;
    maas.expect_held_read().await;
    node.order("retire").await.ok();
    node.order("remove").await.accepted();
    maas.answer_reads(ALL);
    node.expect_state("removed").await;
    assert_eq!((maas.allocation_requests(), maas.deploy_requests()), (0, 0));
    cluster.allow_error("node_removed");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_is_not_marked_as_broken_where_its_reimage_was_ordered_while_the_provider_answered() {
    let maas = FakeMaas::start().await;
    let (cluster, node) = deploying(&maas, patient(&maas)).await;
    maas.hold_reads();
    maas.change(MACHINE, |machine| machine.status = "Failed deployment");
    maas.expect_held_read().await;
    maas.answer_reads(1);
    expect_step(&cluster, &node, "failing").await;
    maas.expect_held_read().await;
    // An operator has looked at the machine already.
    node.order("reimage").await.ok();
    maas.answer_reads(ALL);
    reinstall(&maas, 2).await;
    let machine = maas.machine(MACHINE);
    assert_eq!((machine.marked_broken, machine.erasures), (0, 1));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_that_was_given_up_while_the_provider_answered_is_not_released() {
    let maas = FakeMaas::start().await;
    let (mut cluster, node) = deploying(&maas, patient(&maas).policy("maas.release_timeout_seconds", 5)).await;
    node.order("retire").await.ok();
    maas.hold_reads();
    node.order("remove").await.accepted();
    maas.expect_held_read().await;
    cluster.admin.wait_within(LONG, &node.path(), "the release is overdue", |node| node["overdue"] == true).await;
    node.order("remove").await.ok();
    node.expect_state("removed").await;
    // Another node may have it from here on.
    maas.answer_reads(ALL);
    tokio::time::sleep(LOOKS / 4).await;
    assert_eq!(maas.machine(MACHINE).erasures, 0);
    cluster.allow_error("node_removed");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reimage_of_a_broken_machine_waits_until_it_is_repaired() {
    let maas = FakeMaas::start().await;
    let (cluster, node) = deploying(&maas, builder(&maas)).await;
    maas.change(MACHINE, |machine| machine.status = "Failed deployment");
    maas.wait_for(MACHINE, "it is marked as broken", |machine| machine.marked_broken == 1).await;
    expect_step(&cluster, &node, "failed").await;
    node.order("reimage").await.ok();
    expect_status(&cluster, &node, "Broken").await;
    tokio::time::sleep(LOOKS).await;
    let waiting = node.get().await;
    assert_eq!(waiting["machine"]["step"], "releasing", "{waiting}");
    let machine = maas.machine(MACHINE);
    assert_eq!(
        (machine.deployments.len(), machine.erasures, machine.marked_broken, machine.status),
        (1, 0, 1, "Broken")
    );
    // An operator of the provider has repaired it.
    maas.change(MACHINE, |machine| (machine.status, machine.owner) = ("Ready", String::new()));
    expect_second_deployment(cluster, &maas, &node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deployment_goes_on_in_an_unknown_status_and_fails_where_the_machine_was_deleted() {
    let maas = FakeMaas::start().await;
    let (cluster, node) = deploying(&maas, builder(&maas)).await;
    maas.change(MACHINE, |machine| machine.status = "Testing the future");
    expect_status(&cluster, &node, "Testing the future").await;
    let waiting = node.get().await;
    assert_eq!(waiting["machine"]["step"], "deploying", "{waiting}");
    maas.delete(MACHINE);
    expect_step(&cluster, &node, "failed").await;
    let failed = node.get().await;
    let reason = &failed["state_reason"];
    assert_eq!(reason["code"], "deployment_failed", "{failed}");
    assert!(reason["message"].as_str().unwrap().contains("no such machine"), "{failed}");
    assert_eq!(maas.deploy_requests(), 1);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_whose_machine_others_have_released_is_quarantined_at_the_next_look() {
    let maas = FakeMaas::start().await;
    let (mut cluster, node) = deploying(&maas, builder(&maas)).await;
    let agent = come_up(&mut cluster, &maas, &node, "first").await;
    agent.wait(1).await;
    node.expect_state("active").await;
    expect_step(&cluster, &node, "deployed").await;
    maas.change(MACHINE, |machine| (machine.status, machine.owner) = ("Ready", String::new()));
    publish_due(&cluster.pool, node.id).await;
    let held = node.expect_state("quarantined").await;
    assert_eq!((&held["state_reason"]["code"], &held["gpus_free"]), (&json!("machine_lost"), &json!(0)), "{held}");
    assert_eq!(maas.deploy_requests(), 1);
    cluster.shutdown().await;
}

/// A deployed machine is due every hour. This is its event, without the wait.
async fn publish_due(pool: &PgPool, node_id: Uuid) {
    let event = Event::MachineDue { node_id: NodeId(node_id) };
    let statement = "INSERT INTO outbox (id, shard, epoch, seq, subject, event, correlation_id, created_at) \
                     SELECT $1, shard, 0, 1, 'node.machine_due', $2::jsonb, correlation_id, now() \
                     FROM history WHERE entity = $3 LIMIT 1";
    let event = serde_json::to_string(&event).expect("an event is JSON");
    let written = sqlx::query(statement).bind(Uuid::now_v7()).bind(event).bind(node_id).execute(pool).await;
    assert_eq!(written.expect("an event can be inserted").rows_affected(), 1);
}
