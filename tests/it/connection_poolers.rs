//! PgBouncer in front of the database: in session mode the service works, with its time-outs; in the other modes it does not start, and says why.

use local_servers::test_database::TestDatabase;
use persistence::pool::{ConnectionError, PoolConfig, check_connection, open};
use secrecy::SecretString;
use std::time::Duration;
use tests::cluster::TestCluster;
use tests::cluster::pgbouncer::PgBouncer;
use tests::skipped_tests::report_skipped;

/// The exit status for a setting that an operator has to correct (`EX_CONFIG`).
const CONFIGURATION: i32 = 78;
/// That of a check whose outcome is not known.
const UNKNOWN: i32 = 2;

const IGNORES_OPTIONS: &str = "ignore_startup_parameters = options";

fn config(pooler: &PgBouncer) -> PoolConfig {
    PoolConfig { statement_timeout: Duration::from_secs(7), ..PoolConfig::new(SecretString::from(pooler.url()), None) }
}

#[tokio::test(flavor = "multi_thread")]
async fn pooler_in_session_mode_serves_with_the_time_outs_of_the_sessions() {
    if let Some(missing) = PgBouncer::missing() {
        return report_skipped(&missing);
    }
    let database = TestDatabase::fresh().await;
    let pooler = PgBouncer::start(&database, "session", &[IGNORES_OPTIONS]).await.unwrap();
    check_connection(&config(&pooler)).await.unwrap();
    let pool = open(&config(&pooler)).unwrap();
    let timeout: String = sqlx::query_scalar("SHOW statement_timeout").fetch_one(&pool).await.unwrap();
    assert_eq!(timeout, "7s");

    // It is on this machine, without TLS.
    let mut cluster = TestCluster::builder()
        .replicas(2)
        .variable("SVC_DATABASE_URL", &pooler.url())
        .variable("SVC_DATABASE_CA_PATH", "")
        .start()
        .await;
    cluster.pool = database.pool.clone();
    let node = cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 2).await;
    allocation.release_fully().await;
    node.expect_all_free().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pooler_that_gives_a_session_to_several_clients_is_refused() {
    if let Some(missing) = PgBouncer::missing() {
        return report_skipped(&missing);
    }
    let database = TestDatabase::fresh().await;
    for mode in ["transaction", "statement"] {
        let pooler = PgBouncer::start(&database, mode, &[IGNORES_OPTIONS]).await.unwrap();
        let refused = check_connection(&config(&pooler)).await;
        assert!(matches!(refused, Err(ConnectionError::SharedSessions { .. })), "{mode}: {refused:?}");
        let (status, printed) = run_through(&pooler, &["migrate", "--plan"]).await;
        assert!(status == CONFIGURATION && printed.contains("session mode"), "{mode}: {status}: {printed}");
        let (status, printed) = run_through(&pooler, &["ledger", "verify"]).await;
        assert!(status == UNKNOWN && printed.contains("session mode"), "{mode}: {status}: {printed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pooler_that_refuses_the_parameters_of_a_session_is_refused_with_its_setting() {
    if let Some(missing) = PgBouncer::missing() {
        return report_skipped(&missing);
    }
    let database = TestDatabase::fresh().await;
    let pooler = PgBouncer::start(&database, "session", &[]).await.unwrap();
    let refused = check_connection(&config(&pooler)).await;
    assert!(matches!(refused, Err(ConnectionError::StartupParameter { .. })), "{refused:?}; {}", pooler.log_tail());
    let (status, printed) = run_through(&pooler, &["migrate", "--plan"]).await;
    assert!(status == CONFIGURATION && printed.contains("ignore_startup_parameters"), "{status}: {printed}");
}

/// The exit status of a command of `gpuaas`, and what it prints.
async fn run_through(pooler: &PgBouncer, command_line: &[&str]) -> (i32, String) {
    let gpuaas = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("gpuaas");
    let mut command = tokio::process::Command::new(gpuaas);
    command.args(command_line).env_clear().env("SVC_DATABASE_URL", pooler.url());
    let output = command.output().await.unwrap();
    let printed = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap_or(-1), String::from_utf8_lossy(&printed).into_owned())
}
