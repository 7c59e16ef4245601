//! The harness itself: a world that was not left in order fails its test.

use reqwest::Method;
use serde_json::json;
use tests::world::World;
use tests::world::gpuctl::OnScreen;

/// What the end of this world says.
async fn complaint(world: World) -> String {
    let ended = tokio::spawn(world.end()).await;
    let panic = ended.expect_err("this world must not end well").into_panic();
    panic.downcast_ref::<String>().cloned().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_in_a_log_fails_the_test() {
    let mut world = World::start().await;
    // Correlation ids are logged: that is what they are for.
    let sown = "Sown.By-This_Test";
    let request = world.admin.request(Method::GET, "/api/v1/nothing").header("X-Correlation-Id", sown);
    let answer = world.admin.send(request).await;
    answer.refused(404, "not_found");
    world.keep_secret("what this test has sown", sown);
    let said = complaint(world).await;
    assert!(said.contains("what this test has sown stands in the log of replica-1"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_in_the_database_fails_the_test() {
    let mut world = World::start().await;
    // Names of keys are kept as they are: that is what they are for.
    let sown = "sown-by-this-test-0123456789";
    let key = json!({ "name": sown, "public_key": tests::world::ssh_public_key("a") });
    world.user.post("/api/v1/ssh-keys", &key).await.created();
    world.keep_secret("what this test has sown", sown);
    let said = complaint(world).await;
    assert!(said.contains("what this test has sown stands in table "), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_nobody_declared_fails_the_test() {
    let mut world = World::start().await;
    let node = world.register("h100").await;
    world.replicas[0].stop().await;
    let statement = "UPDATE entity SET body = '{}' WHERE id = $1";
    sqlx::query(statement).bind(node.id).execute(&world.pool).await.unwrap();
    world.restart_replica(0).await;
    let path = format!("{}/enrollment-token", node.path());
    let answer = world.admin.once(Method::POST, &path, Some(&json!({}))).await;
    assert!(answer.status.is_server_error(), "{answer}");
    world.expects_parked(node.id);
    let said = complaint(world).await;
    assert!(said.contains("logged what nobody declared") && said.contains(&node.id.to_string()), "{said}");
}

/// A program has said all before anybody reads: its end does not come before its words.
#[tokio::test]
async fn what_a_program_shows_last_is_seen_after_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let mut screen = OnScreen::of("sh", &["-c", "echo its last words"], folder.path(), &[]);
    let status = format!("/proc/{}/status", screen.pid());
    while !std::fs::read_to_string(&status).unwrap().contains("State:\tZ") {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    screen.shows("its last words").await;
    assert!(screen.ends().await.success());
}
