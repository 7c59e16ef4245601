//! Runbooks about the edge, events, hosts of a lab and the monitoring itself, followed as `executed_runbooks` does. The waits of their rules are
//! seconds here.

use super::executed_runbooks::follow;
use super::monitoring::{Monitoring, MonitoringOptions};
use crate::docs_recipes::{REFRESH, followed, recipe, transcript};
use reqwest::Method;
use serde_json::json;
use std::time::Duration;
use supervisors::process_roles::ProcessRole;
use tests::cluster::terminal::TerminalRequest;
use tests::cluster::webhook_receiver::WebhookReceiver;
use tests::cluster::{TestCluster, id_of};

const HURRIED: [&str; 4] = ["terminal-gateway.yaml", "notifications.yaml", "bus.yaml", "lab.yaml"];
/// More than the alert allows in its window.
const FAILURES: usize = 28;
const ENDPOINTS: &str = "/api/v1/notification-endpoints";

#[tokio::test(flavor = "multi_thread")]
async fn alerts_of_terminals_and_notifications_are_resolved_by_their_runbooks() {
    const TERMINALS: &str = "runbooks/ops.terminal.gateway.md";
    const NOTIFICATIONS: &str = "runbooks/ops.notifications.dead.md";
    let receiver = WebhookReceiver::start().await;
    let mut cluster = TestCluster::builder()
        .policy("notification.delivery_max_attempts", 1)
        .policy("notification.endpoints_per_holder", 50)
        .variable("SVC_NOTIFICATION_CA_PATH", &receiver.authorities_path().display().to_string())
        .variable("SVC_NOTIFICATION_ALLOWED_CIDRS", "127.0.0.0/8,::1/128")
        .variable(REFRESH.0, REFRESH.1)
        .start()
        .await;
    cluster.node("h100").await;
    let rented = cluster.rent_active("h100", 1).await;
    let options = MonitoringOptions { hurried: &HURRIED, ..MonitoringOptions::default() };
    let monitoring = Monitoring::start_with(&cluster, &options).await;
    let alerts = &monitoring.alertmanager;
    let folder = followed(&cluster);

    // A client uses its token again and again, and a receiver fails.
    let (mut terminal, session) = cluster.terminal(rented.id).await;
    receiver.answers(&[500; FAILURES]);
    // All that takes time is done before: the attempts are to be in one window.
    let mut endpoints = Vec::new();
    for _ in 0..FAILURES {
        let body = json!({ "kind": "webhook", "url": receiver.url() });
        let endpoint = cluster.user.request_until_final(Method::POST, ENDPOINTS, Some(&body)).await.created();
        endpoints.push(id_of(&endpoint));
    }
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), rented.id, None).await;
    let request = TerminalRequest { token: Some(ticket.token), ..TerminalRequest::default() };
    let mut untested = endpoints.iter();
    for attempts in [1, FAILURES - 1] {
        for _ in 0..attempts {
            if let Ok(mut replayed) = cluster.gateway().connect(&request).await {
                while replayed.closed.is_none() && replayed.unread.is_empty() {
                    replayed.receive(Duration::from_secs(3)).await;
                }
            }
        }
        for endpoint in untested.by_ref().take(attempts) {
            let test = format!("{ENDPOINTS}/{endpoint}/test");
            cluster.user.request_until_final(Method::POST, &test, None).await.accepted();
        }
        monitoring.wait_for_samples(&[r#"notification_delivery_attempts_total{outcome="failed"}"#]).await;
    }
    let endpoint = endpoints[0];
    let path = format!("{ENDPOINTS}/{endpoint}");
    let replayed = alerts.expect("tickets", "GPUAASTerminalTokenReplaySpike", true).await;
    let undelivered = alerts.expect("tickets", "GPUAASNotificationsNotDelivered", true).await;

    let seen = follow(folder.path(), &replayed, TERMINALS, &["Look here"], "").await;
    assert!(seen.contains(&session.to_string()), "the page shows the sessions: {seen}");
    let given = format!("session={session}");
    follow(folder.path(), &replayed, TERMINALS, &["Fix: end a session"], &given).await;
    terminal.close_code().await;

    follow(folder.path(), &undelivered, NOTIFICATIONS, &["Look here"], "").await;
    // The receiver is back.
    let given = format!("endpoint={endpoint}");
    let fixed = follow(folder.path(), &undelivered, NOTIFICATIONS, &["Fix: resend dead letters"], &given).await;
    assert!(fixed.contains("500"), "the page shows the last attempts: {fixed}");
    cluster.user.wait_until(&path, "all are delivered", |it| it["dead_letters"] == 0 && it["waiting"] == 0).await;
    for name in ["GPUAASTerminalTokenReplaySpike", "GPUAASNotificationsNotDelivered"] {
        alerts.expect("tickets", name, false).await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn alerts_of_events_of_a_silent_host_and_of_the_monitoring_are_resolved_by_their_runbooks() {
    const BUS: &str = "runbooks/ops.bus.backlog.md";
    const LAB: &str = "runbooks/ops.lab.three-host.md";
    const WATCHDOG: &str = "runbooks/ops.monitoring.watchdog.md";
    let others: Vec<_> =
        ProcessRole::ALL.iter().filter(|role| **role != ProcessRole::OutboxRelay).map(|role| role.name()).collect();
    let mut cluster = TestCluster::builder()
        .replicas(2)
        .variable_of(0, "SVC_ROLES", &others.join(","))
        .variable_of(1, "SVC_ROLES", ProcessRole::OutboxRelay.name())
        .variable(REFRESH.0, REFRESH.1)
        .start()
        .await;
    cluster.node("h100").await;
    let options = MonitoringOptions { hurried: &HURRIED, lab_hosts: &[1] };
    let mut monitoring = Monitoring::start_with(&cluster, &options).await;
    let folder = followed(&cluster);

    // The only process that publishes events is gone with its host.
    cluster.kill9_replica(1);
    let rented = cluster.rent("h100", 1).await;
    let silent = monitoring.alertmanager.expect("tickets", "GPUAASLabHostSilent", true).await;
    let seen = follow(folder.path(), &silent, LAB, &["Look here"], "").await;
    assert!(seen.contains("replica-1"), "{seen}");

    // Meanwhile the monitoring itself fails: the first command of its page says which part.
    let given = format!(
        "PROMETHEUS={} ALERTMANAGER={}\nPATH={}:$PATH\n",
        monitoring.url(),
        monitoring.alertmanager.url,
        super::tools_folder()
    );
    let look = format!("set -eu\n{given}{}", recipe((WATCHDOG, "Look here")));
    monitoring.stop_prometheus().await;
    let (_, printed) = transcript(&look, folder.path()).await;
    assert!(printed.contains("Prometheus does not answer") && printed.contains("GPUAASWatchdog"), "{printed}");
    monitoring.start_prometheus().await;
    let (went_well, printed) = transcript(&look, folder.path()).await;
    assert!(went_well && !printed.contains("does not answer"), "{printed}");
    assert_eq!(printed.matches("GPUAASWatchdog").count(), 2, "{printed}");
    let alerts = &monitoring.alertmanager;

    let waiting = alerts.expect("pager", "GPUAASOutboxBacklog", true).await;
    let seen = follow(folder.path(), &waiting, BUS, &["Look here"], "").await;
    assert!(!seen.contains("outbox-relay"), "no member has the role: {seen}");
    // A process with the role is started, as both pages say.
    cluster.restart_replica(1).await;
    rented.expect_state("active").await;
    let both = |it: &serde_json::Value| it["members"].as_array().is_some_and(|members| members.len() == 2);
    cluster.admin.wait_until("/api/v1/admin/runtime/cluster", "both are members", both).await;
    let fixed = follow(folder.path(), &waiting, BUS, &["Afterwards"], "").await;
    assert!(fixed.contains("outbox-relay"), "{fixed}");
    follow(folder.path(), &silent, LAB, &["Afterwards"], "").await;
    alerts.expect("pager", "GPUAASOutboxBacklog", false).await;
    alerts.expect("tickets", "GPUAASLabHostSilent", false).await;

    // All hosts answer, and one does not reach the host with NATS.
    cluster.nats.stop().await;
    let broken = monitoring.alertmanager.expect("tickets", "GPUAASLabBoundaryBroken", true).await;
    cluster.nats.start_again().await.unwrap();
    monitoring.alertmanager.expect("tickets", "GPUAASLabBoundaryBroken", false).await;
    follow(folder.path(), &broken, LAB, &["Afterwards"], "").await;
    cluster.shutdown().await;
}
