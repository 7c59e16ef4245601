//! Webhooks of notifications from end to end: replicas as processes, a receiver over TLS, and faults in between.

use reqwest::Method;
use serde_json::{Value, json};
use tests::cluster::client::Client;
use tests::cluster::webhook_receiver::WebhookReceiver;
use tests::cluster::{TestCluster, TestClusterBuilder, id_of};
use uuid::Uuid;

const ENDPOINTS: &str = "/api/v1/notification-endpoints";

fn cluster_builder(receiver: &WebhookReceiver) -> TestClusterBuilder {
    TestCluster::builder()
        .variable("SVC_NOTIFICATION_CA_PATH", &receiver.authorities_path().display().to_string())
        .variable("SVC_NOTIFICATION_ALLOWED_CIDRS", "127.0.0.0/8,::1/128")
}

/// An endpoint for all events, with its secret.
async fn endpoint(cluster: &mut TestCluster, receiver: &WebhookReceiver) -> (Endpoint, String) {
    let body = json!({ "kind": "webhook", "url": receiver.url() });
    let endpoint =
        Endpoint::of(cluster, &cluster.user.request_until_final(Method::POST, ENDPOINTS, Some(&body)).await.created());
    let shown = cluster.user.get(&format!("{}/secret", endpoint.path)).await.ok();
    let secret = shown["secret"].as_str().unwrap().to_owned();
    cluster.register_secret("a webhook's secret", secret.strip_prefix("whsec_").unwrap());
    (endpoint, secret)
}

struct Endpoint {
    id: Uuid,
    path: String,
    by: Client,
}

impl Endpoint {
    fn of(cluster: &TestCluster, made: &Value) -> Self {
        let id = id_of(made);
        Self { id, path: format!("{ENDPOINTS}/{id}"), by: cluster.user.clone() }
    }

    fn test_path(&self) -> String {
        format!("{}/test", self.path)
    }

    async fn until(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        self.by.wait_until(&self.path, what, is_so).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn signed_messages_arrive_and_a_refused_one_is_resent_unchanged() {
    let receiver = WebhookReceiver::start().await;
    let mut cluster = cluster_builder(&receiver).replicas(2).start().await;
    let (endpoint, secret) = endpoint(&mut cluster, &receiver).await;
    let test = endpoint.test_path();
    cluster.user.request_until_final(Method::POST, &test, None).await.accepted();
    let tried = receiver.expect("notification.test", 1).await;
    let event = tried[0].verified(&secret);
    assert_eq!((&event["specversion"], &event["dataversion"]), (&json!("1.0"), &json!(1)));

    receiver.answers(&[500]);
    cluster.node("h100").await;
    let rented = cluster.rent_active("h100", 1).await;
    let active = receiver.expect("provisioning.active", 2).await;
    let event = active[1].verified(&secret);
    assert_eq!(event["data"]["allocation_id"], rented.id.to_string());
    assert_eq!(active[0].body, active[1].body, "it is the same message");
    assert_eq!(active[0].header("webhook-id"), active[1].header("webhook-id"));
    endpoint.until("nothing waits", |it| it["waiting"] == 0 && it["state"] == "active").await;

    // The old secret is valid for a day: until then messages have signatures with both.
    let rotated =
        cluster.user.request_until_final(Method::POST, &format!("{}/secret", endpoint.path), None).await.created();
    let newer = rotated["secret"].as_str().unwrap().to_owned();
    cluster.register_secret("a webhook's secret", newer.strip_prefix("whsec_").unwrap());
    cluster.user.request_until_final(Method::POST, &test, None).await.accepted();
    let tried = receiver.expect("notification.test", 2).await;
    assert_eq!(tried[1].verified(&secret), tried[1].verified(&newer));
    rented.release().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn message_survives_a_crash_of_all_replicas_and_arrives_when_its_receiver_is_back() {
    let receiver = WebhookReceiver::start().await;
    let mut cluster = cluster_builder(&receiver).replicas(2).start().await;
    let (endpoint, secret) = endpoint(&mut cluster, &receiver).await;
    // The receiver fails at the first attempt.
    receiver.answers(&[503]);
    cluster.node("h100").await;
    let rented = cluster.rent_active("h100", 1).await;
    receiver.expect("provisioning.active", 1).await;
    endpoint.until("the message waits", |it| it["waiting"] == 1).await;
    (0..2).for_each(|replica| cluster.kill9_replica(replica));
    for replica in 0..2 {
        cluster.restart_replica(replica).await;
    }
    let active = receiver.expect("provisioning.active", 2).await;
    assert_eq!(active[1].verified(&secret)["data"]["allocation_id"], rented.id.to_string());
    endpoint.until("nothing waits", |it| it["waiting"] == 0).await;
    rented.release().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn message_that_is_refused_too_often_is_a_dead_letter_until_it_is_resent() {
    let receiver = WebhookReceiver::start().await;
    let mut cluster = cluster_builder(&receiver).policy("notification.delivery_max_attempts", 1).start().await;
    let (endpoint, _) = endpoint(&mut cluster, &receiver).await;
    receiver.answers(&[500]);
    cluster.user.request_until_final(Method::POST, &endpoint.test_path(), None).await.accepted();
    endpoint.until("there is a dead letter", |it| it["dead_letters"] == 1).await;
    let letters = cluster.user.get(&format!("{}/dead-letters", endpoint.path)).await.ok();
    assert!(letters["items"][0]["last_error"].as_str().unwrap().contains("500"), "{letters}");
    let failing = cluster.admin.get("/api/v1/admin/notification-endpoints?state=failing").await.ok();
    assert_eq!(failing["items"].as_array().unwrap().len(), 1);
    let resend = format!("{}/dead-letters/resend", endpoint.path);
    cluster.admin.request_until_final(Method::POST, &resend, Some(&json!({ "reason": "it is mended" }))).await.ok();
    receiver.expect("notification.test", 2).await;
    endpoint.until("it is in order", |it| it["state"] == "active" && it["dead_letters"] == 0).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn receiver_that_answers_gone_is_sent_no_more_messages() {
    let receiver = WebhookReceiver::start().await;
    let mut cluster = cluster_builder(&receiver).start().await;
    let (endpoint, _) = endpoint(&mut cluster, &receiver).await;
    receiver.answers(&[410]);
    let test = endpoint.test_path();
    cluster.user.request_until_final(Method::POST, &test, None).await.accepted();
    let disabled = endpoint.until("it is disabled", |it| it["state"] == "disabled").await;
    assert_eq!(disabled["disabled_because"], "gone");
    cluster.user.request_until_final(Method::POST, &test, None).await.expect_error(409, "state_conflict");
    let on = json!({ "enabled": true });
    cluster.user.request_until_final(Method::PATCH, &endpoint.path, Some(&on)).await.ok();
    receiver.expect("notification.test", 2).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn receiver_in_a_private_network_is_not_connected_to_unless_the_operator_allows_it() {
    let receiver = WebhookReceiver::start().await;
    let cluster = TestCluster::builder().start().await;
    let body = json!({ "kind": "webhook", "url": receiver.url() });
    cluster.user.request_until_final(Method::POST, ENDPOINTS, Some(&body)).await.expect_error(400, "invalid_request");
    let port = reqwest::Url::parse(&receiver.url()).unwrap().port().unwrap();
    let url = format!("https://{}:{port}/hooks", name_of_a_private_address().await);
    let body = json!({ "kind": "webhook", "url": url });
    let endpoint =
        Endpoint::of(&cluster, &cluster.user.request_until_final(Method::POST, ENDPOINTS, Some(&body)).await.created());
    cluster.user.request_until_final(Method::POST, &endpoint.test_path(), None).await.accepted();
    let attempted = endpoint.until("an attempt was made", |it| it["attempts"] != json!([])).await;
    let error = attempted["attempts"][0]["error"].as_str().unwrap();
    assert!(error.contains("its address is "), "the name is looked up and its address is refused: {error}");
    assert!(receiver.received().is_empty());
    cluster.shutdown().await;
}

/// A name without an address in it that resolves to a loopback or private address: this machine's own.
async fn name_of_a_private_address() -> String {
    let own = std::fs::read_to_string("/etc/hostname").unwrap_or_default().trim().to_owned();
    for name in [own, "ip6-localhost".to_owned()] {
        if tokio::net::lookup_host((name.as_str(), 443)).await.is_ok_and(|mut found| found.next().is_some()) {
            return name;
        }
    }
    panic!("neither this machine's name nor ip6-localhost is in /etc/hosts");
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_endpoint_delays_no_other_and_gets_its_messages_once_it_is_restored() {
    let receivers = [WebhookReceiver::start().await, WebhookReceiver::start().await, WebhookReceiver::start().await];
    // Each receiver has an authority of its own; the service trusts them all.
    let authorities = tempfile::NamedTempFile::new().unwrap();
    let pems = receivers.each_ref().map(|it| std::fs::read_to_string(it.authorities_path()).unwrap());
    std::fs::write(authorities.path(), pems.concat()).unwrap();
    let trusted = authorities.path().display().to_string();
    let builder = TestCluster::builder().variable("SVC_NOTIFICATION_CA_PATH", &trusted);
    let mut cluster = builder.variable("SVC_NOTIFICATION_ALLOWED_CIDRS", "127.0.0.0/8,::1/128").start().await;
    let mut endpoints = Vec::new();
    for receiver in &receivers {
        endpoints.push(endpoint(&mut cluster, receiver).await.0);
    }
    // Neither the first nor the last, in any order of reading.
    let altered = endpoints[1].id;
    cluster.allow_error("snapshot_refused");
    let alter = "UPDATE entity SET body = jsonb_build_object('was', body::text)::json WHERE id = $1";
    assert_eq!(sqlx::query(alter).bind(altered).execute(&cluster.pool).await.unwrap().rows_affected(), 1);
    cluster.node("h100").await;
    let rented = cluster.rent_active("h100", 1).await;
    for receiver in [&receivers[0], &receivers[2]] {
        receiver.expect("provisioning.active", 1).await;
    }
    assert!(receivers[1].received().is_empty());
    let restore = "UPDATE entity SET body = (body->>'was')::json WHERE id = $1";
    sqlx::query(restore).bind(altered).execute(&cluster.pool).await.unwrap();
    receivers[1].expect("provisioning.active", 1).await;
    rented.release().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoint_gets_its_messages_however_many_others_its_holder_has_deleted() {
    /// One more than fits on a page of endpoints.
    const DELETED: usize = 201;
    let receiver = WebhookReceiver::start().await;
    let mut cluster = cluster_builder(&receiver).start().await;
    let body = json!({ "kind": "webhook", "url": receiver.url() });
    for _ in 0..DELETED {
        let made = cluster.user.request_until_final(Method::POST, ENDPOINTS, Some(&body)).await.created();
        cluster.user.request_until_final(Method::DELETE, &Endpoint::of(&cluster, &made).path, None).await;
    }
    let (made, _) = endpoint(&mut cluster, &receiver).await;
    cluster.node("h100").await;
    let rented = cluster.rent("h100", 1).await;
    receiver.expect("provisioning.active", 1).await;
    let listed = cluster.user.get(ENDPOINTS).await.ok();
    assert_eq!(listed["items"][0]["id"], json!(made.id), "the first page of the list has it: {listed}");
    rented.release().await;
    cluster.shutdown().await;
}
