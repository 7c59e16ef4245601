//! Every role of the specification in a process of its own.

use crate::billing::{allocation_request, expect_exact, expensive_sku};
use crate::log_gateway::{CollectingNode, batch_of};
use local_servers::ports::free_port;
use reqwest::Method;
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr};
use supervisors::process_roles::ProcessRole;
use tests::cluster::fake_log_store::FakeLogStore;
use tests::cluster::metrics_page::MetricsPage;
use tests::cluster::terminal::TerminalRequest;
use tests::cluster::webhook_receiver::WebhookReceiver;
use tests::cluster::{AllocationHandle, TestCluster, TestClusterBuilder, id_of};

/// The roles that listen where another role does, and the variable of their address.
const LISTENERS: [(ProcessRole, &str); 2] =
    [(ProcessRole::TerminalGateway, "SVC_PUBLIC_LISTEN"), (ProcessRole::NodeLogGateway, "SVC_NODE_LISTEN")];

#[tokio::test(flavor = "multi_thread")]
async fn roles_in_processes_of_their_own_rent_and_bill_together_and_serve_metrics() {
    let mut builder = TestCluster::builder().replicas(ProcessRole::ALL.len()).policy("billing.window_seconds", 1);
    for (index, role) in ProcessRole::ALL.iter().enumerate() {
        builder = builder.variable_of(index, "SVC_ROLES", role.name());
    }
    // These listeners are not behind the balancers of the public API and the node API.
    for (role, variable) in LISTENERS {
        let index = ProcessRole::ALL.iter().position(|other| *other == role).unwrap();
        // No other test's process takes it before the replica binds it.
        let elsewhere = format!("127.0.0.1:{}", free_port().unwrap());
        builder = builder.variable_of(index, variable, &elsewhere);
    }
    let mut cluster = builder.start().await;
    expensive_sku(&mut cluster).await;
    cluster.node("dear").await;
    let rented = cluster.user.post("/api/v1/allocations", &allocation_request(1)).await.created();
    let rented = AllocationHandle::new(id_of(&rented), cluster.user.clone());
    rented.expect_state("active").await;

    // The account is owned by the process with the entities, which does not run accrual; the relay has no entities, and publishes.
    let charged = |page: &Value| {
        page["items"].as_array().is_some_and(|items| {
            items.iter().filter(|posting| posting["allocation_id"] == rented.id.to_string()).count() >= 3
        })
    };
    cluster.user.wait_until("/api/v1/billing/ledger?limit=50", "three windows are charged", charged).await;
    rented.release_fully().await;
    expect_exact(&cluster.user).await;

    let report = cluster.admin.get("/api/v1/admin/runtime/cluster").await.ok();
    let members = report["members"].as_array().unwrap();
    for (index, (replica, role)) in cluster.replicas.iter().zip(ProcessRole::ALL).enumerate() {
        let sees = |page: &MetricsPage, role: &ProcessRole| {
            page.value("cluster_role_members", &[("role", role.name())]) == Some(1.0)
        };
        // A member that was paused is seen again with its next heartbeat.
        let sees_all = |page: &MetricsPage| ProcessRole::ALL.iter().all(|other| sees(page, other));
        let page = cluster.wait_for_metrics(index, sees_all).await;
        assert!(page.text.contains(&format!("roles=\"{}\"", role.name())), "{role:?}: {}", page.text);
        let owns = if role == ProcessRole::Entities { 256.0 } else { 0.0 };
        assert_eq!(page.number("shards_owned"), owns, "{role:?}");
        let reported = members.iter().find(|member| member["name"] == replica.name()).unwrap();
        assert_eq!(reported["roles"], serde_json::json!([role.name()]));
    }
    cluster.shutdown().await;
}

/// Two processes: the first with every role but this one, the second with this one alone.
fn split(role: ProcessRole) -> TestClusterBuilder {
    let others: Vec<_> = ProcessRole::ALL.iter().filter(|other| **other != role).map(|other| other.name()).collect();
    let builder = TestCluster::builder().replicas(2);
    builder.variable_of(0, "SVC_ROLES", &others.join(",")).variable_of(1, "SVC_ROLES", role.name())
}

/// An address that is behind no balancer.
fn elsewhere() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, free_port().unwrap()).into()
}

#[tokio::test(flavor = "multi_thread")]
async fn terminal_gateway_in_a_process_of_its_own_alone_serves_terminals() {
    let at = elsewhere();
    let builder = split(ProcessRole::TerminalGateway).variable_of(1, "SVC_PUBLIC_LISTEN", &at.to_string());
    let mut cluster = builder.start().await;
    cluster.node("h100").await;
    let rented = cluster.rent_active("h100", 1).await;
    let ticket = cluster.issue_terminal_token(&cluster.user.clone(), rented.id, None).await;
    let request = TerminalRequest { token: Some(ticket.token.clone()), ..TerminalRequest::default() };
    let Err((status, _)) = cluster.gateway_at(0).connect(&request).await else {
        panic!("the process without the role opens a terminal")
    };
    assert_eq!(status, 404);
    let mut terminal = cluster.gateway().at(at).open(&ticket.token, None).await;
    terminal.attached().await;
    terminal.enter("echo $((6 * 7))-done\n").await;
    terminal.expect_output("42-done").await;
    assert_eq!(cluster.metrics_of(1).await.number("terminal_connections"), 1.0);
    assert_eq!(cluster.metrics_of(0).await.number("terminal_connections"), 0.0);
    terminal.enter("exit\n").await;
    rented.release_fully().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_log_gateway_in_a_process_of_its_own_alone_passes_lines_on() {
    let (store, at) = (FakeLogStore::start().await, elsewhere());
    let mut cluster = split(ProcessRole::NodeLogGateway)
        .variable_of(1, "SVC_NODE_LISTEN", &at.to_string())
        .variable("SVC_LOG_STORE_URL", &store.url())
        .variable("SVC_LOG_STORE_CA_PATH", &store.authorities_path().display().to_string())
        .start()
        .await;
    cluster.offer_sku("h100", 1).await;
    let node = CollectingNode::enroll(&mut cluster).await;
    let token = node.token().await;
    cluster.register_secret("a node's log token", &token);
    let batch = batch_of(node.node.id, "a line");
    node.push(&token, &batch).await.expect_error(404, "not_found");
    let node = node.pushing_to(&format!("https://{at}"));
    let pushed = node.push(&token, &batch).await;
    assert_eq!(pushed.status, 204, "{pushed:?}");
    assert_eq!(store.received().len(), 1);
    assert_eq!(cluster.metrics_of(1).await.number("node_log_gateway_entries_total"), 1.0);
    assert_eq!(cluster.metrics_of(0).await.number("node_log_gateway_requests_total"), 0.0);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn notification_relay_in_a_process_of_its_own_alone_notifies_subscribers_and_endpoints() {
    const ACTIVE: &str = "provisioning.active";
    const RELEASED: &str = "provisioning.released";
    let receiver = WebhookReceiver::start().await;
    let mut cluster = split(ProcessRole::NotificationRelay)
        .variable("SVC_NOTIFICATION_CA_PATH", &receiver.authorities_path().display().to_string())
        .variable("SVC_NOTIFICATION_ALLOWED_CIDRS", "127.0.0.0/8,::1/128")
        .start()
        .await;
    let mut subscriber = cluster.subscriber(0, "user").await;
    let body = json!({ "kind": "webhook", "url": receiver.url(), "events": [ACTIVE, RELEASED] });
    let endpoints = "/api/v1/notification-endpoints";
    cluster.user.request_until_final(Method::POST, endpoints, Some(&body)).await.created();
    cluster.node("h100").await;
    let rented = cluster.rent_active("h100", 1).await;
    let event = subscriber.expect_notification(ACTIVE).await;
    assert_eq!(event["data"]["allocation_id"], rented.id.to_string());
    receiver.expect(ACTIVE, 1).await;

    // Without that process nothing is sent, and with it what has waited is.
    cluster.kill9_replica(1);
    rented.release_fully().await;
    let meanwhile = subscriber.drain().await;
    assert!(meanwhile.iter().all(|event| event["type"] != RELEASED), "{meanwhile:?}");
    assert!(receiver.received().iter().all(|sent| !String::from_utf8_lossy(&sent.body).contains(RELEASED)));
    cluster.restart_replica(1).await;
    subscriber.expect_notification(RELEASED).await;
    receiver.expect(RELEASED, 1).await;
    cluster.shutdown().await;
}
