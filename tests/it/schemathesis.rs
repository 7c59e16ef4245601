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
        .args(["--seed", &seed, "--workers", WORKERS, "--request-timeout", "10", "--continue-on-failure"])
        // Earlier failures are not replayed first: a run depends on its seed alone.
        .args(["--generation-database", "none"])
        // `hooks.py` has a check that distinguishes the two meanings of 400.
        .args(["--exclude-checks", "positive_data_acceptance"])
        // Five megabytes of a third-party script; another test requests it once.
        .args(["--exclude-path", "/api/v1/docs/reader.js"]);
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn generated_requests_get_only_responses_of_the_description() {
    // The operators' route needs its token, and payments need a processor.
    let refresh = "refresh-of-a-test-refresh-of-a-test-refresh";
    let builder = TestCluster::builder().with_processor().variable("INTERNAL_JWKS_REFRESH_TOKEN", refresh);
    let mut cluster = builder.start().await;
    cluster.register_secret("the refresh token", refresh);
    let folder = tempfile::tempdir().unwrap();
    // Resources to find, so that not every request is answered with 404.
    cluster.node("h100").await;
    let rented = cluster.rent("h100", 1).await;
    rented.expect_state("active").await;
    rented.release().await;
    rented.expect_state("released").await;

    // Single requests, as an administrator and as a user.
    for (username, phases, examples) in
        [("admin", "examples,coverage,fuzzing", "10"), ("user", "examples,fuzzing", "5")]
    {
        let mut alone = schemathesis(&cluster, folder.path(), username);
        alone.args(["--phases", phases, "--max-examples", examples]);
        run(alone).await;
    }
    // Sequences, in which each request uses the responses before it. The event stream of an active allocation does not end.
    let mut sequences = schemathesis(&cluster, folder.path(), "admin");
    sequences.args(["--phases", "stateful", "--max-examples", "10"]);
    sequences.args(["--exclude-operation-id", "allocation_events"]);
    run(sequences).await;
    // It also removes the node, and an agent whose node is removed logs that and exits.
    cluster.allow_error("the agent ends");
    cluster.shutdown().await;
}
