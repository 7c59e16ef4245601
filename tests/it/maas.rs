//! Nodes whose machines a bare-metal provider deploys, releases and reinstalls, and allocations that are isolated by that.

mod other_users;
mod pages;
mod python_libmaas;
mod real_machine;
mod reimage_crashes;
mod two_images;
mod worker_passes;
mod wrong_answers;

use reqwest::Method;
use serde_json::{Value, json};
use std::time::Duration;
use tests::cluster::client::{ApiResponse, send_request};
use tests::cluster::fake_agent::{EnrollmentAttempt, FakeAgent, anonymous};
use tests::cluster::fake_maas::{API_KEY, FakeMaas, MaasFault};
use tests::cluster::{AllocationHandle, NodeHandle, REGION, TestCluster, TestClusterBuilder, id_of, node_body};
use uuid::Uuid;
use wire::bundle::BootstrapBundle;

const GPUS: u32 = 2;
const MACHINE: &str = "abc123";
const IMAGE: &str = "sha256:of-the-image";
/// What the provider does is looked at every few seconds, and after the death of a worker once its lease has lapsed.
const LONG: Duration = Duration::from_secs(120);
/// Several looks of the worker at a machine.
const LOOKS: Duration = Duration::from_secs(12);

fn builder(maas: &FakeMaas) -> TestClusterBuilder {
    with_settings(maas).policy("maas.enabled", true)
}

/// A cluster that knows the provider, whose policy is as it is at first.
fn with_settings(maas: &FakeMaas) -> TestClusterBuilder {
    TestCluster::builder()
        .variable("MAAS_API_BASE_URL", maas.url())
        .variable("MAAS_API_TOKEN", API_KEY)
        .variable("MAAS_API_TIMEOUT_MS", "2000")
        .variable("MAAS_IMAGE_DIGEST", IMAGE)
}

async fn start(maas: &FakeMaas, builder: TestClusterBuilder) -> TestCluster {
    maas.add(MACHINE, "gpu-1");
    let mut cluster = builder.start().await;
    cluster.register_secret("the provider's API key", "secret-of-a-test");
    cluster.offer_sku("h100", GPUS).await;
    cluster
}

fn maas_node(host: &str) -> Value {
    let mut body = node_body("gpu-1", "h100", GPUS);
    body["host"] = host.into();
    body["onboarding_mode"] = "maas".into();
    body
}

async fn register(cluster: &TestCluster) -> NodeHandle {
    let node = cluster.admin.post("/api/v1/admin/nodes", &maas_node("gpu-1")).await.created();
    NodeHandle::of(&node, cluster.admin.clone())
}

/// A cluster with a node whose machine the provider has begun to deploy.
async fn deploying(maas: &FakeMaas, builder: TestClusterBuilder) -> (TestCluster, NodeHandle) {
    let cluster = start(maas, builder).await;
    let node = register(&cluster).await;
    maas.wait_for(MACHINE, "its deployment began", |machine| machine.deployments.len() == 1).await;
    (cluster, node)
}

/// The bundle in the user data of the machine's last deployment. All but node and token is as in any other node's bundle.
async fn delivered_bundle(cluster: &mut TestCluster, maas: &FakeMaas, node_id: Uuid) -> BootstrapBundle {
    let other = cluster.register("h100").await;
    let any = cluster.bundle(&other).await;
    let bundle = bundle_with_delivered_token(maas, node_id, any);
    cluster.register_secret("the token in the user data", bundle.enrollment_token.expose());
    bundle
}

/// This bundle with the node and the token that are in the user data of the machine's last deployment.
fn bundle_with_delivered_token(maas: &FakeMaas, node_id: Uuid, any: BootstrapBundle) -> BootstrapBundle {
    let user_data = maas.machine(MACHINE).deployments.last().cloned().expect("it was deployed");
    assert!(user_data.starts_with("#!/bin/sh") && user_data.contains(&node_id.to_string()), "{user_data}");
    let rest = user_data.split("SVC_ENROLLMENT_TOKEN=").nth(1).expect("it has a token");
    let is_of_token = |character: &char| character.is_ascii_alphanumeric() || matches!(character, '-' | '_');
    let token: String = rest.chars().skip_while(|it| !is_of_token(it)).take_while(is_of_token).collect();
    BootstrapBundle { node_id, enrollment_token: wire::SecretToken::new(&token), ..any }
}

/// Enrolls as a system with this machine id and the image.
async fn enroll(bundle: &BootstrapBundle, machine_id: &str) -> (ApiResponse, impl FnOnce(Value) -> FakeAgent) {
    enroll_with(bundle, machine_id, IMAGE).await
}

/// Enrolls as a system with this machine id and the image of this digest.
async fn enroll_with(
    bundle: &BootstrapBundle,
    machine_id: &str,
    image_digest: &str,
) -> (ApiResponse, impl FnOnce(Value) -> FakeAgent) {
    let (attempt, key) = EnrollmentAttempt::valid(bundle, GPUS);
    let mut body = attempt.body();
    body["inventory"]["system"] = json!({ "machine_id": machine_id, "image_digest": image_digest });
    let url = format!("{}/internal/v1/nodes/{}/enroll", bundle.api_url, bundle.node_id);
    let answer = send_request(anonymous(bundle).post(url).json(&body)).await.unwrap();
    (answer, move |answer| FakeAgent::with_identity(&attempt, &key, &answer))
}

/// The provider ends the deployment, and the system comes up with this machine id.
async fn come_up(cluster: &mut TestCluster, maas: &FakeMaas, node: &NodeHandle, machine_id: &str) -> FakeAgent {
    maas.change(MACHINE, |machine| machine.status = "Deployed");
    let bundle = delivered_bundle(cluster, maas, node.id).await;
    let (answer, agent) = enroll(&bundle, machine_id).await;
    agent(answer.created())
}

/// The machine is deployed again and its node active: the end of a test.
async fn expect_second_deployment(mut cluster: TestCluster, maas: &FakeMaas, node: &NodeHandle) {
    maas.wait_for(MACHINE, "it is deployed again", |machine| machine.deployments.len() == 2).await;
    let agent = come_up(&mut cluster, maas, node, "first").await;
    agent.wait(1).await;
    node.expect_state("active").await;
    cluster.shutdown().await;
}

async fn expect_step(cluster: &TestCluster, node: &NodeHandle, step: &str) {
    let what = format!("the machine is {step}");
    cluster.admin.wait_within(LONG, &node.path(), &what, |node| node["machine"]["step"] == step).await;
}

async fn expect_status(cluster: &TestCluster, node: &NodeHandle, says: &str) {
    let is_so = |node: &Value| node["machine"]["status"].as_str().is_some_and(|status| status.contains(says));
    cluster.admin.wait_within(LONG, &node.path(), says, is_so).await;
}

/// The provider ends the release and begins the next deployment.
async fn reinstall(maas: &FakeMaas, deployments: usize) {
    maas.wait_for(MACHINE, "it is erased", |machine| machine.status == "Disk erasing").await;
    maas.change(MACHINE, |machine| (machine.status, machine.owner) = ("Ready", String::new()));
    maas.wait_for(MACHINE, "it is deployed again", |machine| machine.deployments.len() == deployments).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_that_is_not_ready_or_provider_that_fails_registers_no_node() {
    let maas = FakeMaas::start().await;
    let cluster = start(&maas, builder(&maas)).await;
    maas.add("two", "double");
    maas.add("three", "double");
    maas.add("four", "no-power");
    maas.change("four", |machine| machine.power = "error");
    let register = async |host: &str, says: &str| {
        let refused = cluster.admin.send_once(Method::POST, "/api/v1/admin/nodes", Some(&maas_node(host))).await;
        let refused = refused.expect_error(503, "service_unavailable");
        assert!(refused.body["message"].as_str().unwrap().contains(says), "{host}: {refused}");
    };
    register("elsewhere", "no machine of this name").await;
    register("double", "several machines").await;
    register("no-power", "power settings").await;
    for status in ["Allocated", "Deployed", "Broken", "Testing the future"] {
        maas.change(MACHINE, |machine| machine.status = status);
        register("gpu-1", status).await;
    }
    maas.change(MACHINE, |machine| machine.status = "Ready");
    for fault in [
        MaasFault::Status(401),
        MaasFault::Status(409),
        MaasFault::Status(503),
        MaasFault::Page,
        MaasFault::Slow,
        MaasFault::Cut,
    ] {
        maas.fail(Some(fault));
        register("gpu-1", "does not answer as it should").await;
    }
    maas.fail(None);
    let nodes = cluster.admin.get("/api/v1/admin/nodes").await.ok();
    assert_eq!(nodes["items"], json!([]));
    assert!(maas.machine(MACHINE).deployments.is_empty());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_is_deployed_once_though_its_worker_is_killed_before_the_record_of_it() {
    let maas = FakeMaas::start().await;
    let mut cluster = start(&maas, builder(&maas)).await;
    maas.hold_next_answer();
    let node = register(&cluster).await;
    maas.wait_for(MACHINE, "its deployment began", |machine| machine.deployments.len() == 1).await;
    cluster.kill9_replica(0);
    cluster.restart_replica(0).await;
    // Until then the provider is asked again several times, also while it fails.
    maas.fail(Some(MaasFault::Status(503)));
    cluster
        .admin
        .wait_within(LONG, &node.path(), "the provider's failure is shown", |node| {
            node["machine"]["status"].as_str().is_some_and(|status| status.contains("503"))
        })
        .await;
    maas.fail(None);
    let agent = come_up(&mut cluster, &maas, &node, "first").await;
    agent.wait(1).await;
    node.expect_state("active").await;
    expect_step(&cluster, &node, "deployed").await;
    let machine = maas.machine(MACHINE);
    assert_eq!((machine.deployments.len(), machine.erasures), (1, 0));

    // Another node does not get the machine, and the removed one gives it back with its disks erased.
    node.order("retire").await.ok();
    node.order("remove").await.accepted();
    maas.wait_for(MACHINE, "it is released", |machine| machine.status == "Disk erasing" && machine.erasures == 1).await;
    assert_eq!(node.get().await["state"], "removing");
    maas.change(MACHINE, |machine| (machine.status, machine.owner) = ("Ready", String::new()));
    cluster.admin.wait_within(LONG, &node.path(), "it is removed", |node| node["state"] == "removed").await;
    cluster.allow_error("node_removed");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deployment_that_is_slow_to_begin_is_requested_by_one_worker_alone() {
    // Longer than the time to the next two looks at the machine, and shorter than a worker's pass may take.
    const DELAY: Duration = Duration::from_secs(14);
    let maas = FakeMaas::start().await;
    maas.delay_deployments(DELAY);
    let plan = builder(&maas).replicas(2).variable("MAAS_API_TIMEOUT_MS", "20000");
    let (mut cluster, node) = deploying(&maas, plan).await;
    // Further looks, at a machine that is being deployed.
    tokio::time::sleep(LOOKS).await;
    assert_eq!(maas.deploy_requests(), 1, "another worker requests it with another token, which voids the first");
    let agent = come_up(&mut cluster, &maas, &node, "first").await;
    agent.wait(1).await;
    node.expect_state("active").await;
    assert_eq!((maas.deploy_requests(), maas.machine(MACHINE).deployments.len()), (1, 1));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_provider_is_asked_about_a_bounded_number_of_machines_at_once_and_none_is_forgotten() {
    const MACHINES: usize = 40;
    /// Of the worker, in each process.
    const AT_ONCE: usize = 32;
    let maas = FakeMaas::start().await;
    maas.delay_deployments(Duration::from_secs(10));
    let cluster = start(&maas, builder(&maas).variable("MAAS_API_TIMEOUT_MS", "20000")).await;
    let ids: Vec<String> = (0..MACHINES).map(|n| format!("many{n}")).collect();
    // A pass reads its machine first: they deploy together once all are registered, however long that takes.
    maas.hold_reads();
    for id in &ids {
        maas.add(id, id);
        cluster.admin.post("/api/v1/admin/nodes", &maas_node(id)).await.created();
    }
    maas.expect_held_reads(AT_ONCE).await;
    maas.answer_reads(10 * MACHINES);
    for id in &ids {
        maas.wait_for(id, "its deployment began", |machine| machine.deployments.len() == 1).await;
    }
    assert_eq!((maas.most_deploys_at_once(), maas.deploy_requests()), (AT_ONCE, MACHINES));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_deployment_marks_the_machine_as_broken_and_can_be_ordered_again() {
    let maas = FakeMaas::start().await;
    let (cluster, node) = deploying(&maas, builder(&maas)).await;
    maas.change(MACHINE, |machine| machine.status = "Failed deployment");
    maas.wait_for(MACHINE, "it is marked as broken", |machine| machine.marked_broken == 1).await;
    expect_step(&cluster, &node, "failed").await;
    let failed = node.get().await;
    assert_eq!(failed["state_reason"]["code"], "deployment_failed", "{failed}");
    // An operator of the provider has repaired it.
    maas.change(MACHINE, |machine| (machine.status, machine.owner) = ("Ready", String::new()));
    node.order("reimage").await.ok();
    expect_second_deployment(cluster, &maas, &node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whole_node_is_reinstalled_after_its_tenant_and_free_only_with_a_new_system() {
    let maas = FakeMaas::start().await;
    let (mut cluster, node) =
        deploying(&maas, builder(&maas).policy("allocation.isolation_model", "full-reimage")).await;
    let agent = come_up(&mut cluster, &maas, &node, "first").await;
    agent.wait(1).await;
    expect_step(&cluster, &node, "deployed").await;

    let wanted = |gpus: u32| json!({ "sku": "h100", "region_code": REGION, "gpu_count": gpus });
    let part = cluster.user.send_once(Method::POST, "/api/v1/allocations", Some(&wanted(1))).await;
    let part = part.expect_error(409, "insufficient_capacity");
    let suggestion = part.body["details"]["suggestion"].as_str().unwrap();
    assert!(suggestion.contains("whole node") && suggestion.contains("2 GPUs"), "{part}");

    let rented = cluster.user.post("/api/v1/allocations", &wanted(GPUS)).await.created();
    let allocation = AllocationHandle::new(id_of(&rented), cluster.user.clone());
    let provision = agent.next_task().await;
    agent.report(provision.task_id, &agent.success(&provision)).await.ok();
    allocation.expect_state("active").await;
    allocation.release().await;
    let release = agent.next_task().await;
    agent.report(release.task_id, &agent.success(&release)).await.ok();
    allocation.expect_state("released").await;
    let held = node.expect_state("quarantined").await;
    assert_eq!((&held["state_reason"]["code"], &held["gpus_free"]), (&json!("reimaging"), &json!(0)), "{held}");
    node.order("release-quarantine").await.expect_error(409, "state_conflict");

    // The old disk comes back: it gets no certificate, and the node stays held.
    reinstall(&maas, 2).await;
    let bundle = delivered_bundle(&mut cluster, &maas, node.id).await;
    let (refused, _) = enroll(&bundle, "first").await;
    refused.expect_error(401, "enrollment_rejected");
    let says = |node: &Value| node["state_reason"]["code"] == "system_refused" && node["overdue"] == true;
    cluster.admin.wait_until(&node.path(), "the old disk is refused", says).await;

    node.order("reimage").await.ok();
    reinstall(&maas, 3).await;
    let agent = come_up(&mut cluster, &maas, &node, "second").await;
    let validate = agent.next_task().await;
    assert_eq!(node.get().await["gpus_free"], 0);
    agent.report(validate.task_id, &agent.success(&validate)).await.ok();
    node.expect_state("active").await;
    assert_eq!(node.expect_all_free().await["id"], json!(node.id));
    assert_eq!(maas.machine(MACHINE).erasures, 2);
    cluster.shutdown().await;
}
