//! Webhooks from end to end: replicas as processes, a receiver over TLS, and whatever goes wrong in between.

use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::world::client::Client;
use tests::world::receiver::Receiver;
use tests::world::{PATIENCE, Plan, World};

const ENDPOINTS: &str = "/api/v1/notification-endpoints";

fn plan(receiver: &Receiver) -> Plan {
    World::plan()
        .variable("SVC_NOTIFICATION_CA_PATH", &receiver.authorities_path().display().to_string())
        .variable("SVC_NOTIFICATION_ALLOWED_CIDRS", "127.0.0.0/8,::1/128")
}

/// An endpoint for all events, and its secret.
async fn endpoint(world: &mut World, receiver: &Receiver) -> (Endpoint, String) {
    let body = json!({ "kind": "webhook", "url": receiver.url() });
    let made = world.user.insist(Method::POST, ENDPOINTS, Some(&body)).await.created();
    let endpoint = Endpoint { path: format!("{ENDPOINTS}/{}", made["id"].as_str().unwrap()), by: world.user.clone() };
    let shown = world.user.get(&format!("{}/secret", endpoint.path)).await.ok();
    let secret = shown["secret"].as_str().unwrap().to_owned();
    world.keep_secret("a webhook's secret", secret.strip_prefix("whsec_").unwrap());
    (endpoint, secret)
}

struct Endpoint {
    path: String,
    by: Client,
}

impl Endpoint {
    async fn until(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        self.by.wait_until(&self.path, what, is_so).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn signed_messages_arrive_and_a_refused_one_comes_again_the_same() {
    let receiver = Receiver::start().await;
    let mut world = plan(&receiver).replicas(2).start().await;
    let (endpoint, secret) = endpoint(&mut world, &receiver).await;
    let test = format!("{}/test", endpoint.path);
    world.user.insist(Method::POST, &test, None).await.accepted();
    let tried = receiver.expect("notification.test", 1).await;
    let event = tried[0].verified(&secret);
    assert_eq!((&event["specversion"], &event["dataversion"]), (&json!("1.0"), &json!(1)));

    receiver.answers(&[500]);
    world.node("h100").await;
    let rented = world.rent("h100", 1).await;
    rented.expect_state("active").await;
    let active = receiver.expect("provisioning.active", 2).await;
    let event = active[1].verified(&secret);
    assert_eq!(event["data"]["allocation_id"], rented.id.to_string());
    assert_eq!(active[0].body, active[1].body, "it is the same message");
    assert_eq!(active[0].header("webhook-id"), active[1].header("webhook-id"));
    endpoint.until("nothing waits", |it| it["waiting"] == 0 && it["state"] == "active").await;

    // The receiver is moved to the new secret within a day: until then it knows messages by either.
    let rotated = world.user.insist(Method::POST, &format!("{}/secret", endpoint.path), None).await.created();
    let newer = rotated["secret"].as_str().unwrap().to_owned();
    world.keep_secret("a webhook's secret", newer.strip_prefix("whsec_").unwrap());
    world.user.insist(Method::POST, &test, None).await.accepted();
    let tried = receiver.expect("notification.test", 2).await;
    assert_eq!(tried[1].verified(&secret), tried[1].verified(&newer));
    rented.release().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn message_outlives_every_replica_and_arrives_when_its_receiver_is_back() {
    let receiver = Receiver::start().await;
    let mut world = plan(&receiver).replicas(2).start().await;
    let (endpoint, secret) = endpoint(&mut world, &receiver).await;
    // It is down for the first attempt.
    receiver.answers(&[503]);
    world.node("h100").await;
    let rented = world.rent("h100", 1).await;
    rented.expect_state("active").await;
    receiver.expect("provisioning.active", 1).await;
    endpoint.until("the message waits", |it| it["waiting"] == 1).await;
    (0..2).for_each(|replica| world.kill9_replica(replica));
    for replica in 0..2 {
        world.restart_replica(replica).await;
    }
    let active = receiver.expect("provisioning.active", 2).await;
    assert_eq!(active[1].verified(&secret)["data"]["allocation_id"], rented.id.to_string());
    endpoint.until("nothing waits", |it| it["waiting"] == 0).await;
    rented.release().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn message_that_is_refused_too_often_is_a_dead_letter_until_it_is_sent_again() {
    let receiver = Receiver::start().await;
    let mut world = plan(&receiver).policy("notification.delivery_max_attempts", 1).start().await;
    let (endpoint, _) = endpoint(&mut world, &receiver).await;
    receiver.answers(&[500]);
    world.user.insist(Method::POST, &format!("{}/test", endpoint.path), None).await.accepted();
    endpoint.until("there is a dead letter", |it| it["dead_letters"] == 1).await;
    let letters = world.user.get(&format!("{}/dead-letters", endpoint.path)).await.ok();
    assert!(letters["items"][0]["last_error"].as_str().unwrap().contains("500"), "{letters}");
    let failing = world.admin.get("/api/v1/admin/notification-endpoints?state=failing").await.ok();
    assert_eq!(failing["items"].as_array().unwrap().len(), 1);
    let resend = format!("{}/dead-letters/resend", endpoint.path);
    world.admin.insist(Method::POST, &resend, Some(&json!({ "reason": "it is mended" }))).await.ok();
    receiver.expect("notification.test", 2).await;
    endpoint.until("it is in order", |it| it["state"] == "active" && it["dead_letters"] == 0).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn receiver_that_is_gone_is_asked_no_more() {
    let receiver = Receiver::start().await;
    let mut world = plan(&receiver).start().await;
    let (endpoint, _) = endpoint(&mut world, &receiver).await;
    receiver.answers(&[410]);
    let test = format!("{}/test", endpoint.path);
    world.user.insist(Method::POST, &test, None).await.accepted();
    let disabled = endpoint.until("it is disabled", |it| it["state"] == "disabled").await;
    assert_eq!(disabled["disabled_because"], "gone");
    world.user.insist(Method::POST, &test, None).await.refused(409, "state_conflict");
    let on = json!({ "enabled": true });
    world.user.insist(Method::PATCH, &endpoint.path, Some(&on)).await.ok();
    receiver.expect("notification.test", 2).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn receiver_in_a_private_network_is_not_connected_to_unless_the_operator_allows_it() {
    let receiver = Receiver::start().await;
    let world = World::plan().start().await;
    let body = json!({ "kind": "webhook", "url": receiver.url() });
    world.user.insist(Method::POST, ENDPOINTS, Some(&body)).await.refused(400, "invalid_request");
    // A name that is looked up at the attempt. This machine's own leads to a loopback address or to a private one.
    let name = std::fs::read_to_string("/etc/hostname").unwrap_or_default().trim().to_owned();
    let url = format!("https://{name}:{}/hooks", reqwest::Url::parse(&receiver.url()).unwrap().port().unwrap());
    let made =
        world.user.insist(Method::POST, ENDPOINTS, Some(&json!({ "kind": "webhook", "url": url }))).await.created();
    let endpoint = Endpoint { path: format!("{ENDPOINTS}/{}", made["id"].as_str().unwrap()), by: world.user.clone() };
    world.user.insist(Method::POST, &format!("{}/test", endpoint.path), None).await.accepted();
    endpoint.until("an attempt was made", |it| it["attempts"].as_array().is_some_and(|all| !all.is_empty())).await;
    let until = Instant::now() + Duration::from_secs(2).min(PATIENCE);
    while Instant::now() < until {
        assert!(receiver.received().is_empty());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    world.end().await;
}
