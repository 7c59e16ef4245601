//! schemathesis (a third-party program) generates requests from the served description, valid and invalid, and checks that the
//! responses conform to it. Further checks are in `deploy/schemathesis/hooks.py`.

use crate::external_tools::{python_program, root, run};
use secrecy::ExposeSecret as _;
use std::path::Path;
use std::process::Command;
use tests::cluster::TestCluster;

/// The same requests every time, however fast the machine is: a run is bounded by their number. For other requests,
/// set `SCHEMATHESIS_SEED`.
const SEED: &str = "20261121";
/// One worker: with several, the seed does not determine the requests.
const WORKERS: &str = "1";

/// `folder`: for the files of its run.
fn schemathesis(cluster: &TestCluster, folder: &Path, username: &str) -> Command {
    let seed = std::env::var("SCHEMATHESIS_SEED").unwrap_or_else(|_| SEED.to_owned());
    let (hooks, token) = (root().join("deploy/schemathesis"), cluster.identity.token_of(username).expect("it signs"));
    let mut command = Command::new(python_program("st"));
    command
        .current_dir(folder)
        .env("PYTHONPATH", &hooks)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("SCHEMATHESIS_HOOKS", "hooks")
        .arg("--config-file")
        .arg(hooks.join("schemathesis.toml"))
        .arg("run")
        .arg(format!("{}/api/v1/openapi.json", cluster.admin.base()))
        .arg("--tls-verify")
        .arg(cluster.authority.certificate_path())
        .arg("--header")
        .arg(format!("Authorization: Bearer {}", token.expose_secret()))
        .args(["--seed", &seed, "--workers", WORKERS, "--request-timeout", "60", "--continue-on-failure"])
        // Earlier failures are not replayed first: a run depends on its seed alone.
        .args(["--generation-database", "none"])
        // `hooks.py` has a check that distinguishes the two meanings of 400.
        .args(["--exclude-checks", "positive_data_acceptance"])
        // Five megabytes of a third-party script; another test requests it once.
        .args(["--exclude-path", "/api/v1/docs/reader.js"]);
    command
}

/// A cluster with resources to find, so that not every request is answered with 404.
async fn cluster_with_resources() -> TestCluster {
    // The operators' route needs its token, and payments need a processor.
    let refresh = "refresh-of-a-test-refresh-of-a-test-refresh";
    let builder = TestCluster::builder().with_processor().variable("INTERNAL_JWKS_REFRESH_TOKEN", refresh);
    let mut cluster = builder.start().await;
    cluster.register_secret("the refresh token", refresh);
    cluster.node("h100").await;
    let rented = cluster.rent_active("h100", 1).await;
    rented.release_fully().await;
    cluster
}

/// Sends generated requests of these phases as this user.
async fn run_phases(cluster: &TestCluster, username: &str, phases: &str, examples: &str, further: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = schemathesis(cluster, folder.path(), username);
    command.args(["--phases", phases, "--max-examples", examples]).args(further);
    run(command).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn examples_and_limits_sent_by_an_administrator_get_only_responses_of_the_description() {
    let mut cluster = cluster_with_resources().await;
    run_phases(&cluster, "admin", "examples,coverage", "10", &[]).await;
    allow_removed_node(&mut cluster);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_requests_of_an_administrator_get_only_responses_of_the_description() {
    let mut cluster = cluster_with_resources().await;
    run_phases(&cluster, "admin", "fuzzing", "10", &[]).await;
    allow_removed_node(&mut cluster);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn single_requests_of_a_user_get_only_responses_of_the_description() {
    let cluster = cluster_with_resources().await;
    run_phases(&cluster, "user", "examples,fuzzing", "5", &[]).await;
    cluster.shutdown().await;
}

/// Each request of a sequence uses the responses before it.
#[tokio::test(flavor = "multi_thread")]
async fn sequences_of_requests_get_only_responses_of_the_description() {
    let mut cluster = cluster_with_resources().await;
    // The event stream of an active allocation does not end.
    run_phases(&cluster, "admin", "stateful", "10", &["--exclude-operation-id", "allocation_events"]).await;
    allow_removed_node(&mut cluster);
    cluster.shutdown().await;
}

/// An administrator's requests also remove the node, and an agent whose node is removed logs that and exits.
fn allow_removed_node(cluster: &mut TestCluster) {
    cluster.allow_error("the agent ends");
}
