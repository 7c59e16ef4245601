//! schemathesis (a program of others) makes requests of the service's own description, well-formed and not, and looks whether the
//! answers keep to it. What it checks beside its own checks stands in `deploy/schemathesis/hooks.py`.

use crate::tool::{python_program, root, run};
use secrecy::ExposeSecret as _;
use std::path::Path;
use std::process::Command;
use tests::world::World;

/// The same requests every time, however fast the machine is: what bounds a run is how many there are. Whoever wants to look further
/// sets `SCHEMATHESIS_SEED`.
const SEED: &str = "20261121";
/// One after the other: with several, the seed does not decide alone.
const WORKERS: &str = "1";

/// `folder`: where it may leave what it remembers of a run.
fn schemathesis(world: &World, folder: &Path, username: &str) -> Command {
    let seed = std::env::var("SCHEMATHESIS_SEED").unwrap_or_else(|_| SEED.to_owned());
    let (hooks, token) = (root().join("deploy/schemathesis"), world.identity.token_of(username).expect("it signs"));
    let mut command = Command::new(python_program("st"));
    command
        .current_dir(folder)
        .env("PYTHONPATH", &hooks)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("SCHEMATHESIS_HOOKS", "hooks")
        .arg("--config-file")
        .arg(hooks.join("schemathesis.toml"))
        .arg("run")
        .arg(format!("{}/api/v1/openapi.json", world.admin.base()))
        .arg("--tls-verify")
        .arg(world.authority.certificate_path())
        .arg("--header")
        .arg(format!("Authorization: Bearer {}", token.expose_secret()))
        .args(["--seed", &seed, "--workers", WORKERS, "--request-timeout", "10", "--continue-on-failure"])
        // What failed once is not tried first: a run depends on nothing but its seed.
        .args(["--generation-database", "none"])
        // `hooks.py` has one that tells the two meanings of 400 apart.
        .args(["--exclude-checks", "positive_data_acceptance"])
        // Five megabytes of somebody else's script; its one request is made by another test.
        .args(["--exclude-path", "/api/v1/docs/reader.js"]);
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_that_can_be_thought_of_gets_an_answer_outside_of_the_description() {
    // Without its token the operators' route is none; without a processor nobody can pay.
    let refresh = "refresh-of-a-test-refresh-of-a-test-refresh";
    let plan = World::plan().with_processor().variable("INTERNAL_JWKS_REFRESH_TOKEN", refresh);
    let mut world = plan.start().await;
    world.keep_secret("the refresh token", refresh);
    let folder = tempfile::tempdir().unwrap();
    // Something to find, so that not everything ends at a 404.
    world.node("h100").await;
    let rented = world.rent("h100", 1).await;
    rented.expect_state("active").await;
    rented.release().await;
    rented.expect_state("released").await;

    // Single requests, as an administrator and as a user.
    for (username, phases, examples) in
        [("admin", "examples,coverage,fuzzing", "10"), ("user", "examples,fuzzing", "5")]
    {
        let mut alone = schemathesis(&world, folder.path(), username);
        alone.args(["--phases", phases, "--max-examples", examples]);
        run(alone).await;
    }
    // Sequences, each request made of the answers before it. The stream of an allocation that lives has no end to wait for.
    let mut sequences = schemathesis(&world, folder.path(), "admin");
    sequences.args(["--phases", "stateful", "--max-examples", "10"]);
    sequences.args(["--exclude-operation-id", "allocation_events"]);
    run(sequences).await;
    // It removes the node, too, and an agent whose node is removed says so and ends.
    world.expects_error("the agent ends");
    world.end().await;
}
