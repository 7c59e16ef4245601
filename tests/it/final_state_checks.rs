//! Tests of the test cluster itself: one with an inconsistent end state fails its test.

use reqwest::Method;
use serde_json::json;
use tests::cluster::TestCluster;
use tests::cluster::gpuctl::PtySession;

#[tokio::test(flavor = "multi_thread")]
async fn logged_secret_stored_secret_and_undeclared_error_fail_the_test() {
    let mut cluster = TestCluster::start().await;
    // Correlation ids are logged by design, and names of keys are stored as they are.
    let (logged, stored) = ("Sown.By-This_Test", "sown-by-this-test-0123456789");
    let request = cluster.admin.request(Method::GET, "/api/v1/nothing").header("X-Correlation-Id", logged);
    cluster.admin.send(request).await.expect_error(404, "not_found");
    let key = json!({ "name": stored, "public_key": tests::cluster::ssh_public_key("a") });
    cluster.user.post("/api/v1/ssh-keys", &key).await.created();
    cluster.register_secret("what was logged", logged);
    cluster.register_secret("what was stored", stored);

    let node = cluster.register("h100").await;
    cluster.replicas[0].stop().await;
    let statement = "UPDATE entity SET body = '{}' WHERE id = $1";
    sqlx::query(statement).bind(node.id).execute(&cluster.pool).await.unwrap();
    cluster.restart_replica(0).await;
    let path = format!("{}/enrollment-token", node.path());
    let answer = cluster.admin.send_once(Method::POST, &path, Some(&json!({}))).await;
    assert!(answer.status.is_server_error(), "{answer}");
    cluster.allow_parked(node.id);

    let ended = tokio::spawn(cluster.shutdown()).await;
    let panic = ended.expect_err("this cluster must not end well").into_panic();
    let message = panic.downcast_ref::<String>().cloned().unwrap_or_default();
    for complaint in
        ["what was logged is in the log of replica-1", "what was stored is in table ", "logged undeclared errors"]
    {
        assert!(message.contains(complaint), "{complaint}: {message}");
    }
    assert!(message.contains(&node.id.to_string()), "{message}");
}

/// A program exits before its output is read: all of the output is still received.
#[tokio::test]
async fn last_output_of_a_program_is_read_after_its_exit() {
    let folder = tempfile::tempdir().unwrap();
    let mut screen = PtySession::of("sh", &["-c", "echo its last words"], folder.path(), &[]);
    let status = format!("/proc/{}/status", screen.pid());
    while !std::fs::read_to_string(&status).unwrap().contains("State:\tZ") {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    screen.expect_output("its last words").await;
    assert!(screen.wait_for_exit().await.success());
}
