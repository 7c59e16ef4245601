//! SIGKILL of the replica at each commit of a reimage, before it is durable and after: the machine is erased and deployed once, and no GPU is free
//! before the new system is validated.

use super::{GPUS, IMAGE, MACHINE, builder, bundle_with_delivered_token, come_up, deploying, expect_step};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use sqlx::{PgPool, Row as _};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tests::cluster::client::{ApiResponse, send_request};
use tests::cluster::crash_sweep::KillPoint;
use tests::cluster::db_lock::StatementFate;
use tests::cluster::fake_agent::{EnrollmentAttempt, FakeAgent, anonymous};
use tests::cluster::fake_maas::FakeMaas;
use tests::cluster::recovery_attempt::RecoveryAttempt;
use tests::cluster::{NodeHandle, TestCluster};
use uuid::Uuid;
use wire::bundle::BootstrapBundle;

/// Commits of the node that a reimage has at least, in their order: the machine is erased, and then deployed.
const EXPECTED: [&str; 6] = ["reimage", "machine_reported", "machine_token", "machine_reported", "enroll", "report"];
/// A lease of the dead worker, and the pause to the next look at the provider.
const LONG: Duration = Duration::from_secs(150);

#[tokio::test(flavor = "multi_thread")]
async fn kill_before_any_commit_of_a_reimage_erases_and_deploys_once() {
    reimage_with_kills(StatementFate::RolledBack).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_after_any_commit_of_a_reimage_erases_and_deploys_once() {
    reimage_with_kills(StatementFate::Committed).await;
}

async fn reimage_with_kills(fate: StatementFate) {
    let maas = Arc::new(FakeMaas::start().await);
    let (mut cluster, node) = deploying(&maas, builder(&maas)).await;
    let agent = come_up(&mut cluster, &maas, &node, "system 1").await;
    agent.wait(1).await;
    node.expect_state("active").await;
    expect_step(&cluster, &node, "deployed").await;
    let other = cluster.register("h100").await;
    let any = cluster.bundle(&other).await;

    let steps = reimage(&mut cluster, &maas, &node, (2, any.clone()), &[], fate).await;
    let mut order = steps.iter();
    for command in EXPECTED {
        assert!(order.any(|step| step == command), "{command} is no commit of a reimage, in this order: {steps:?}");
    }
    reimage(&mut cluster, &maas, &node, (3, any), &EXPECTED, fate).await;
    let machine = maas.machine(MACHINE);
    assert_eq!((machine.deployments.len(), machine.erasures, machine.marked_broken), (3, 2, 0));
    cluster.allow_error("enroll");
    cluster.shutdown().await;
}

/// Reinstalls the machine as its system of this number. The replica is killed at each of these commits in turn. Returns the commits.
async fn reimage(
    cluster: &mut TestCluster,
    maas: &Arc<FakeMaas>,
    node: &NodeHandle,
    (system, any): (usize, BootstrapBundle),
    kills: &[&str],
    fate: StatementFate,
) -> Vec<String> {
    let before = commits(&cluster.pool, node.id).await.len();
    let machine = tokio::spawn(be_the_machine(Arc::clone(maas), cluster.pool.clone(), node.id, any, system));
    let (admin, path) = (cluster.admin.clone(), format!("{}/reimage", node.path()));
    let order =
        async move { admin.request_until_final(Method::POST, &path, Some(&json!({ "reason": "a test" }))).await.ok() };
    let kill = |command: &&str| KillPoint { kind: "node".to_owned(), command: (*command).to_owned(), at_most: None };
    cluster.request_with_kills(order, kills.iter().map(kill).collect(), fate, LONG).await;
    let token = machine.await.expect("the machine comes up");
    cluster.register_secret("the token in the user data", &token);
    let free = |node: &Value| node["state"] == "active" && node["gpus_free"] == GPUS;
    cluster.admin.wait_within(LONG, &node.path(), "the new system is validated", free).await;
    let machine = maas.machine(MACHINE);
    assert_eq!((machine.deployments.len(), machine.erasures), (system, system - 1));
    commits(&cluster.pool, node.id).await.split_off(before)
}

/// The provider erases and deploys, and the new system enrolls and validates itself; both go on whatever dies. Returns the token.
async fn be_the_machine(
    maas: Arc<FakeMaas>,
    pool: PgPool,
    node_id: Uuid,
    any: BootstrapBundle,
    system: usize,
) -> String {
    wait_long(&maas, "it is erased", |machine| machine.status == "Disk erasing").await;
    maas.change(MACHINE, |machine| (machine.status, machine.owner) = ("Ready", String::new()));
    wait_long(&maas, "it is deployed", |machine| machine.deployments.len() == system).await;
    let reports =
        async || commits(&pool, node_id).await.iter().filter(|command| *command == "machine_reported").count();
    let before = reports().await;
    maas.change(MACHINE, |machine| machine.status = "Deployed");
    // So that the commits are in one order.
    let until = Instant::now() + LONG * 3;
    while reports().await == before {
        assert!(Instant::now() < until, "the deployment is not reported");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let bundle = bundle_with_delivered_token(&maas, node_id, any);
    let (attempt, key) = EnrollmentAttempt::valid(&bundle, GPUS);
    let mut body = attempt.body();
    body["inventory"]["system"] = json!({ "machine_id": format!("system {system}"), "image_digest": IMAGE });
    let url = format!("{}/internal/v1/nodes/{node_id}/enroll", bundle.api_url);
    let agent = match until_final("enroll", || anonymous(&bundle).post(&url).json(&body)).await {
        Ok(answer) => FakeAgent::with_identity(&attempt, &key, &answer),
        // The answer was lost with the replica: the token is used, and recovers the identity of which the agent knows nothing.
        Err(refused) => {
            assert_eq!(refused.status, StatusCode::UNAUTHORIZED, "{refused}");
            let (bundle, token) = (bundle.clone(), bundle.enrollment_token.clone());
            let (recovery, boot_id) = (attempt.machine.recovery.clone(), attempt.machine.boot_id);
            let (csr_pem, generation) = (attempt.csr_pem.clone(), 1);
            let lost = RecoveryAttempt { bundle, token, key: recovery, generation, csr_pem, boot_id };
            FakeAgent::with_identity(&attempt, &key, &lost.execute().await.ok())
        }
    };
    // A task stays in the queue until its result is recorded.
    let until = Instant::now() + LONG;
    while !agent.poll(2).await.is_ok_and(|answer| answer.status == StatusCode::OK) {
        assert!(Instant::now() < until, "no task for the new system");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let validate = agent.next_task().await;
    let result = serde_json::to_value(agent.success(&validate)).unwrap();
    let path = format!("tasks/{}/result", validate.task_id);
    let reported = until_final("report", || agent.request(Method::POST, &path).json(&result)).await;
    reported.unwrap_or_else(|refused| panic!("{refused}"));
    bundle.enrollment_token.expose().to_owned()
}

async fn wait_long(maas: &FakeMaas, what: &str, wanted: impl Fn(&tests::cluster::fake_maas::ProviderMachine) -> bool) {
    let until = Instant::now() + LONG * 3;
    while !wanted(&maas.machine(MACHINE)) {
        assert!(Instant::now() < until, "{what}: {:?}", maas.machine(MACHINE));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Sends a request until it succeeds or is refused for good.
async fn until_final(what: &str, request: impl Fn() -> reqwest::RequestBuilder) -> Result<Value, ApiResponse> {
    let until = Instant::now() + LONG;
    loop {
        let last = match send_request(request()).await {
            Ok(answer) if answer.status.is_success() => return Ok(answer.body),
            Ok(answer) if !answer.is_transient() => return Err(answer),
            Ok(answer) => format!("{answer}"),
            Err(error) => format!("{error:?}"),
        };
        assert!(Instant::now() < until, "{what}: {last}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// The node's commits, oldest first; without those that only time or an agent's connection causes.
async fn commits(pool: &PgPool, node: Uuid) -> Vec<String> {
    let statement = "SELECT command FROM history WHERE kind = 'node' AND entity = $1 \
                     AND command NOT IN ('tick', 'heartbeat', 'poll', 'renew', 'identify') ORDER BY at, epoch, seq";
    let rows = sqlx::query(statement).bind(node).fetch_all(pool).await.expect("the history can be read");
    rows.iter().map(|row| row.get("command")).collect()
}
