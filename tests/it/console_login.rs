//! Logins to the web console over several replicas: one refresh for all of them, and an end that all of them know.

use futures::future::join_all;
use local_servers::identity::browser_login::LoginFaults;
use reqwest::Method;
use std::time::{Duration, Instant};
use tests::cluster::console::ConsoleBrowser;
use tests::cluster::notifications::{NotificationSubscriber, PROTOCOL};
use tests::cluster::{TestCluster, WAIT_TIMEOUT};

const ME: &str = "/api/v1/me";

/// A browser whose access token has ended.
async fn with_ended_token(cluster: &mut TestCluster) -> ConsoleBrowser {
    cluster.identity.set_login_faults(LoginFaults { token_seconds: Some(6), ..LoginFaults::default() });
    // The login itself refuses a token that has ended.
    let browser = cluster.log_in_to_console("user").await;
    tokio::time::sleep(Duration::from_millis(6_100)).await;
    cluster.identity.set_login_faults(LoginFaults::default());
    browser
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_at_an_ended_token_cause_one_refresh() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let browser = with_ended_token(&mut cluster).await;
    let before = cluster.identity.refresh_calls();
    let at = [browser.at(&cluster, 0), browser.at(&cluster, 1)];
    // A busy database is retried; the session's refresh is not.
    let requests = (0..16).map(|n| at[n % 2].get(ME));
    for answer in join_all(requests).await {
        answer.ok();
    }
    assert_eq!(cluster.identity.refresh_calls() - before, 1);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn login_survives_the_replica_that_is_killed_during_its_refresh() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let browser = with_ended_token(&mut cluster).await;
    cluster.identity.set_login_faults(LoginFaults { refreshes_hang: true, ..LoginFaults::default() });
    let before = cluster.identity.refresh_calls();
    let killed = browser.at(&cluster, 1);
    let lost = tokio::spawn(async move { killed.try_send(killed.request(Method::GET, ME)).await.is_ok() });
    let until = Instant::now() + WAIT_TIMEOUT;
    while cluster.identity.refresh_calls() == before {
        assert!(Instant::now() < until, "no refresh began");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    cluster.kill9_replica(1);
    assert!(!lost.await.unwrap(), "it is answered by a killed replica");
    cluster.identity.set_login_faults(LoginFaults::default());
    // Once the lease of the killed one is over.
    browser.at(&cluster, 0).wait_until(ME, "the login is refreshed", |me| me["username"] == "user").await;
    cluster.restart_replica(1).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn end_of_a_login_closes_its_terminals_at_every_replica_and_no_other_logins() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    let (ending, staying) = (cluster.log_in_to_console("user").await, cluster.log_in_to_console("user").await);
    let mut terminals = Vec::new();
    for (browser, replica) in [(&ending, 0), (&ending, 1), (&staying, 0), (&staying, 1)] {
        let ticket = cluster.issue_terminal_token(&browser.client.clone(), allocation.id, None).await;
        let mut terminal = cluster.gateway_at(replica).open(&ticket.token, None).await;
        terminal.attached().await;
        terminals.push(terminal);
    }
    let session = ending.session_id().await;
    let end = format!("/api/v1/me/sessions/{session}/end");
    staying.client.request_until_final(Method::POST, &end, None).await.ok();
    let mut others = terminals.split_off(2);
    for terminal in &mut terminals {
        assert_eq!(terminal.close_code().await, 4403);
    }
    for terminal in &mut others {
        terminal.enter("echo st''ays\n").await;
        terminal.expect_output("stays").await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn login_that_ended_elsewhere_is_refused_by_every_replica_with_its_sockets_and_terminals() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    let (browser, other) = (cluster.log_in_to_console("user").await, cluster.log_in_to_console("user2").await);
    let offered = [PROTOCOL.to_owned()];
    let mut subscriber =
        NotificationSubscriber::connect(&cluster.gateway_at(1), "", &offered, &browser.headers()).await.unwrap();
    subscriber.expect_notification("notifications.ready").await;
    let ticket = cluster.issue_terminal_token(&browser.client.clone(), allocation.id, None).await;
    let mut terminal = cluster.gateway_at(0).open(&ticket.token, None).await;
    terminal.attached().await;

    // The identity provider ends it, and sends its logout token to one of the replicas.
    cluster.identity.end_logins_of("user").await.unwrap();
    for replica in [0, 1] {
        let refused = browser.at(&cluster, replica).get(ME).await;
        refused.expect_error(401, "session_ended");
        assert_eq!(refused.body["details"]["reason"], "provider_logout");
    }
    assert_eq!(subscriber.close_code().await, 4403);
    assert_eq!(terminal.close_code().await, 4403);
    other.client.get(ME).await.ok();
    cluster.shutdown().await;
}
