//! Notifications: which subscribers receive which events, who is refused, and how connections end.

use crate::service_account_signing_keys::ServiceAccountClient;
use async_nats::HeaderMap;
use domain::notification::Channel;
use reqwest::Method;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::client::Client;
use tests::cluster::notifications::{NotificationSubscriber, PROTOCOL};
use tests::cluster::{CURRENCY, TestCluster, WAIT_TIMEOUT, id_of};
use tokio_tungstenite::tungstenite::Message;
use uuid::Uuid;

/// Asks for the changes of all entities.
const OPERATIONS: &str = "gpu.notifications.operations";

const BROADCAST: &str = "/api/v1/admin/notifications/broadcast";

fn event_types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

/// A token of the user with changed claims.
fn mint_token(cluster: &TestCluster, username: &str, change: impl FnOnce(&mut Value)) -> String {
    let mut claims = cluster.identity.claims_of(username).unwrap();
    change(&mut claims);
    cluster.identity.mint(&claims).unwrap().expose_secret().to_owned()
}

/// Broadcasts an announcement.
async fn announce(by: &Client, message: &str) -> Value {
    by.post(BROADCAST, &json!({ "severity": "info", "message": message })).await.created()
}

#[tokio::test(flavor = "multi_thread")]
async fn allocation_events_reach_their_user_at_every_replica_and_no_other_user() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let node = cluster.node("h100").await;
    let (mut here, mut there) = (cluster.subscriber(0, "user").await, cluster.subscriber(1, "user").await);
    let (mut other, mut operator) = (cluster.subscriber(1, "user2").await, cluster.subscriber(0, "admin").await);
    // A user with the role of an administrator alone.
    let mut second = cluster.subscriber(1, "admin2").await;
    // A user whose id is the id of another's org: the two are different channels.
    let user = cluster.identity.person("user").unwrap().id;
    let mut namesake =
        cluster.subscriber_with_token(0, &mint_token(&cluster, "user2", |claims| claims["org_id"] = json!(user))).await;

    let rented = cluster.rent("h100", 1).await;
    for subscriber in [&mut here, &mut there] {
        let event = subscriber.expect_notification("provisioning.active").await;
        assert_eq!((&event["channel"], &event["specversion"]), (&json!("user"), &json!("1.0")), "{event}");
        let data = json!({ "allocation_id": rented.id, "node_id": node.id, "state": "active" });
        assert_eq!((&event["subject"], &event["data"]), (&json!(format!("allocation/{}", rented.id)), &data));
        assert!(event["correlationid"].is_string() && event["id"].is_string(), "{event}");
    }
    let (terminal, session) = cluster.terminal(rented.id).await;
    let opened = here.expect_notification("terminal.opened").await;
    assert_eq!(opened["data"], json!({ "session_id": session, "allocation_id": rented.id, "state": "opened" }));
    for subscriber in [&mut there, &mut other, &mut second, &mut namesake] {
        subscriber.receive_pending().await;
    }
    node.order("quarantine").await.accepted();
    let known =
        operator.expect_notification_where("node.state_changed", |event| event["data"]["state"] == "quarantined").await;
    assert_eq!((&known["data"]["from_state"], &known["data"]["reason"]), (&json!("active"), &json!("quarantined")));
    let received = here.expect_notification("node.state_changed").await;
    let data = json!({ "node_id": node.id, "allocation_id": rented.id, "state": "quarantined" });
    assert_eq!(received["data"], data, "why, is for those who run it");
    for subscriber in [&mut there, &mut other, &mut operator, &mut second, &mut namesake] {
        subscriber.receive_pending().await;
    }
    rented.release().await;
    let closed = here.expect_notification("terminal.closed").await;
    assert_eq!(
        (&closed["data"]["reason"], &closed["data"]["session_id"]),
        (&json!("allocation_ended"), &json!(session))
    );
    let released = here.expect_notification("provisioning.released").await;
    assert_eq!(released["data"]["allocation_id"], json!(rented.id), "{released}");
    drop(terminal);

    // The events are of different streams, between which there is no order.
    for kind in [
        "node.state_changed",
        "provisioning.release_requested",
        "provisioning.released",
        "provisioning.requested",
        "provisioning.started",
        "terminal.closed",
        "terminal.opened",
    ] {
        there.expect_notification(kind).await;
    }
    assert_eq!(there.drain().await, Vec::<Value>::new(), "each once");
    for (name, subscriber) in [("user2", &mut other), ("user2 of an org", &mut namesake), ("admin2", &mut second)] {
        assert_eq!(subscriber.drain().await, Vec::<Value>::new(), "{name} received the notifications of another user");
    }
    assert!(
        event_types(&operator.drain().await).iter().all(|kind| kind.starts_with("node.")),
        "operators run the nodes"
    );
    assert_eq!(cluster.metrics_of(0).await.number("ws_notifications_active_connections"), 3.0);
    assert!(cluster.metrics_of(0).await.number("ws_notifications_forwarded_messages_total") >= 6.0);
    assert_eq!(cluster.metrics_of(0).await.number("ws_notifications_write_errors_total"), 0.0);
    drop((here, there, other, operator, second, namesake));
    let until = Instant::now() + WAIT_TIMEOUT;
    while cluster.metrics_of(0).await.number("ws_notifications_active_connections") > 0.0 {
        assert!(Instant::now() < until, "connections that are gone are counted");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    cluster.shutdown().await;
}

/// Waits until the subscriber was notified of changes of all of these entities. One notification may name several of them.
async fn expect_changes(subscriber: &mut NotificationSubscriber, entities: &[(&str, Option<Uuid>)]) {
    let is_named = |event: &Value, (kind, id): &(&str, Option<Uuid>)| {
        let entity = json!({ "kind": kind, "id": id });
        event["data"]["kinds"].as_array().is_some_and(|kinds| kinds.contains(&json!(kind)))
            && (id.is_none() || event["data"]["entities"].as_array().is_some_and(|all| all.contains(&entity)))
    };
    let mut missing = entities.to_vec();
    while !missing.is_empty() {
        let names_one = |event: &Value| missing.iter().any(|entity| is_named(event, entity));
        let event = subscriber.expect_notification_where("runtime.changed", names_one).await;
        assert_eq!((&event["channel"], &event["specversion"]), (&json!("operations"), &json!("1.0")), "{event}");
        missing.retain(|entity| !is_named(&event, entity));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_are_notified_of_changes_of_every_entity_and_users_of_none() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let node = cluster.node("h100").await;
    let token_of = |username: &str| cluster.identity.token_of(username).unwrap().expose_secret().to_owned();
    let open = async |replica: usize, username: &str| {
        let offered = [PROTOCOL.to_owned(), OPERATIONS.to_owned(), format!("bearer.{}", token_of(username))];
        let mut it = NotificationSubscriber::connect(&cluster.gateway_at(replica), "", &offered, &[]).await.unwrap();
        let ready = it.expect_notification("notifications.ready").await;
        (it, ready["data"]["channels"].clone())
    };
    let (mut here, channels) = open(0, "admin").await;
    assert_eq!(channels, json!(["user", "broadcast", "operations"]));
    let (mut there, _) = open(1, "admin2").await;
    // A user who asks for it too.
    let (mut user, channels) = open(0, "user2").await;
    assert_eq!(channels, json!(["user", "broadcast"]));
    // An administrator who does not ask.
    let mut without = cluster.subscriber(1, "admin2").await;

    let rented = cluster.rent("h100", 1).await;
    let key = json!({ "subject": "a-new-auditor", "role": "auditor", "reason": "a test needs it" });
    let binding = id_of(&cluster.admin.post("/api/v1/admin/platform-roles/bindings", &key).await.created());
    for operator in [&mut here, &mut there] {
        let entities = [("allocation", Some(rented.id)), ("node", Some(node.id)), ("bindings", None)];
        expect_changes(operator, &entities).await;
    }
    assert!(!binding.is_nil());
    rented.release().await;
    for (name, subscriber) in [("user2", &mut user), ("admin2", &mut without)] {
        assert_eq!(subscriber.drain().await, Vec::<Value>::new(), "{name} received changes of others");
    }
    drop((here, there, user, without));
    cluster.shutdown().await;
}

/// Opens the account, and adjusts it to less than the threshold.
async fn drain_balance(cluster: &TestCluster, holder: &Value) -> Uuid {
    let accounts = "/api/v1/admin/billing/accounts";
    let mut account = holder.clone();
    account["currency"] = json!(CURRENCY);
    let account = id_of(&cluster.admin.post(accounts, &account).await.ok());
    for amount in [1000, -600] {
        let change = json!({ "amount_minor": amount, "currency": CURRENCY, "reason": "a test needs it" });
        cluster.admin.post(&format!("{accounts}/{account}/adjustments"), &change).await.created();
    }
    account
}

#[tokio::test(flavor = "multi_thread")]
async fn low_balance_notifies_its_holder_alone_where_the_policy_enables_it() {
    let cluster = TestCluster::builder().without_credit().replicas(2).start().await;
    let of_org = |username: &str, org: &str| mint_token(&cluster, username, |claims| claims["org_id"] = json!(org));
    let mut user = cluster.subscriber(0, "user").await;
    let mut in_acme = cluster.subscriber_with_token(1, &of_org("user", "acme")).await;
    let mut also_in_acme = cluster.subscriber_with_token(0, &of_org("user2", "acme")).await;
    let mut elsewhere = cluster.subscriber_with_token(1, &of_org("user2", "acme.")).await;
    let mut nowhere = cluster.subscriber_with_token(1, &of_org("admin2", "*")).await;

    let account = drain_balance(&cluster, &json!({ "org_id": "acme" })).await;
    for subscriber in [&mut in_acme, &mut also_in_acme] {
        let event = subscriber.expect_notification("billing.balance_low").await;
        assert_eq!((&event["channel"], &event["data"]), (&json!("org"), &json!({ "account_id": account })));
    }
    let subject = cluster.identity.person("user").unwrap().id;
    let account = drain_balance(&cluster, &json!({ "user_id": subject })).await;
    for subscriber in [&mut user, &mut in_acme] {
        let event = subscriber.expect_notification("billing.balance_low").await;
        assert_eq!((&event["channel"], &event["data"]), (&json!("user"), &json!({ "account_id": account })));
    }
    // Disabled for one org: the others are notified.
    let value = json!({
        "key": "notification.low_balance_enabled", "value": false, "scope": { "org_id": "quiet" }, "reason": "a test needs it",
    });
    cluster.admin.post("/api/v1/admin/policy-values", &value).await.created();
    // It follows the recipient: a member's own value wins in the organization, and the value of a plan is for the members with that plan.
    let wakeful = &cluster.identity.person("admin2").unwrap().id;
    for (scope, is_on) in [(json!({ "user_id": wakeful }), true), (json!({ "plan": "silent" }), false)] {
        let mut value = value.clone();
        (value["scope"], value["value"]) = (scope, json!(is_on));
        cluster.admin.post("/api/v1/admin/policy-values", &value).await.created();
    }
    let mut quiet = cluster.subscriber_with_token(0, &of_org("user2", "quiet")).await;
    let mut wakeful_in_quiet = cluster.subscriber_with_token(1, &of_org("admin2", "quiet")).await;
    let mut loud = cluster.subscriber_with_token(0, &of_org("user2", "loud")).await;
    let silent = mint_token(&cluster, "user2", |claims| {
        claims["org_id"] = json!("loud");
        claims["plan"] = json!("silent");
    });
    let mut silent_in_loud = cluster.subscriber_with_token(1, &silent).await;
    let resolve = "/api/v1/admin/policy-values/resolve?key=notification.low_balance_enabled";
    let own = format!("{resolve}&org_id=quiet&user_id={wakeful}");
    for replica in [0, 1] {
        let admin = cluster.at_replica(replica, "admin");
        for (query, value) in [(format!("{resolve}&org_id=quiet"), false), (own.clone(), true)] {
            admin.wait_until(&query, "the policy value applies", |it| it["value"] == value).await;
        }
        let of_plan = format!("{resolve}&org_id=loud&plan=silent");
        admin.wait_until(&of_plan, "the policy value applies", |it| it["value"] == false).await;
    }
    drain_balance(&cluster, &json!({ "org_id": "quiet" })).await;
    drain_balance(&cluster, &json!({ "org_id": "loud" })).await;
    loud.expect_notification("billing.balance_low").await;
    wakeful_in_quiet.expect_notification("billing.balance_low").await;
    for subscriber in [
        &mut user,
        &mut in_acme,
        &mut also_in_acme,
        &mut elsewhere,
        &mut nowhere,
        &mut quiet,
        &mut wakeful_in_quiet,
        &mut loud,
        &mut silent_in_loud,
    ] {
        assert_eq!(subscriber.drain().await, Vec::<Value>::new());
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn notification_of_a_depleted_balance_has_the_time_of_release() {
    let builder = TestCluster::builder().without_credit().policy("billing.window_seconds", 1);
    let mut cluster = builder.policy("billing.depletion_grace_seconds", 2).start().await;
    let sku = cluster.offer_sku("dear", 8).await;
    let price = json!({ "price": { "currency": CURRENCY, "amount_minor_per_gpu_hour": 36_000 } });
    cluster.admin.request_until_final(Method::PATCH, &format!("/api/v1/admin/skus/{sku}"), Some(&price)).await.ok();
    cluster.node("dear").await;
    cluster.credit("user", 40).await;
    let mut subscriber = cluster.subscriber(0, "user").await;
    let rented = cluster.rent("dear", 1).await;
    let event = subscriber.expect_notification("billing.balance_depleted").await;
    assert!(event["data"]["release_at"].is_string() && event["data"]["account_id"].is_string(), "{event}");
    subscriber.expect_notification("provisioning.released").await;
    rented.expect_state("released").await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unauthorized_subscriber_is_refused_with_a_reason_and_receives_nothing() {
    let mut cluster = TestCluster::start().await;
    let at = cluster.gateway_at(0);
    let good = cluster.identity.token_of("user").unwrap().expose_secret().to_owned();
    let bearer = |token: &str| format!("bearer.{token}");
    let protocol = || PROTOCOL.to_owned();
    // A page can only see a close code.
    let expired = mint_token(&cluster, "user", |claims| {
        for name in ["iat", "nbf", "exp"] {
            claims[name] = json!(claims[name].as_i64().unwrap() - 7200);
        }
    });
    let foreign_issuer = mint_token(&cluster, "user", |claims| claims["iss"] = json!("https://elsewhere.example"));
    let without_role = mint_token(&cluster, "user", |claims| claims["realm_access"]["roles"] = json!([]));
    let forged = format!("{}AA", &good[..good.len() - 2]);
    for (token, code) in [
        (&expired, 4401),
        (&foreign_issuer, 4401),
        (&forged, 4401),
        (&"eyJhbGciOiJub25lIn0.e30.".to_owned(), 4401),
        (&without_role, 4403),
    ] {
        let mut subscriber = NotificationSubscriber::open(&at, token).await;
        assert_eq!((subscriber.close_code().await, subscriber.unread.len()), (code, 0), "{token}");
    }
    let ask = async |query: &str, offered: &[String], headers: &[(&'static str, &str)]| {
        let asked = NotificationSubscriber::connect(&at, query, offered, headers).await;
        let (status, body) = asked.err().expect("it is not let in");
        (status, body["code"].as_str().unwrap_or_default().to_owned())
    };
    let refusal = |status: u16, code: &str| (status, code.to_owned());
    let both = [protocol(), bearer(&good)];
    let header = format!("Bearer {good}");
    assert_eq!(ask("", &[protocol()], &[]).await, refusal(401, "unauthenticated"));
    assert_eq!(ask("", &[bearer(&good)], &[]).await, refusal(400, "invalid_request"));
    assert_eq!(ask("", &[protocol(), bearer(&good), bearer(&good)], &[]).await, refusal(400, "invalid_request"));
    assert_eq!(ask("", &both, &[("authorization", &header)]).await, refusal(400, "invalid_request"));
    assert_eq!(ask("?token=x", &both, &[]).await, refusal(400, "invalid_request"));
    let expired_header = format!("Bearer {expired}");
    assert_eq!(ask("", &[protocol()], &[("authorization", &expired_header)]).await, refusal(401, "unauthenticated"));
    for origin in ["https://evil.example", "null", "https://127.0.0.1", ""] {
        assert_eq!(ask("", &both, &[("origin", origin)]).await, refusal(403, "forbidden"), "{origin}");
    }
    let path = "/api/v1/notifications/ws";
    cluster.user.send_once(Method::GET, path, None).await.expect_error(426, "upgrade_required");
    cluster.anonymous_client().send_once(Method::GET, path, None).await.expect_error(401, "unauthenticated");
    cluster.user.send_once(Method::POST, path, None).await.expect_error(405, "method_not_allowed");

    // A page of the service's own origin, and a program with the header, are accepted.
    let own = cluster.settings.public_url.clone();
    let mut page = NotificationSubscriber::connect(&at, "", &both, &[("origin", &own)]).await.unwrap();
    let mut program =
        NotificationSubscriber::connect(&at, "", &[protocol()], &[("authorization", &header)]).await.unwrap();
    for subscriber in [&mut page, &mut program] {
        let ready = subscriber.expect_notification("notifications.ready").await;
        assert_eq!(ready["data"]["channels"], json!(["user", "broadcast"]), "{ready}");
        subscriber.send(Message::Text(r#"{"type":"ping"}"#.into())).await.unwrap();
        subscriber.expect_notification("notifications.pong").await;
    }
    cluster.register_secret("a token in a subprotocol", &good);
    cluster.register_secret("a refused token in a subprotocol", &expired);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn subscriber_receives_nothing_once_its_token_is_invalid() {
    let refresh = "refresh-of-a-test-refresh-of-a-test-refresh";
    let mut cluster = TestCluster::builder().replicas(2).variable("INTERNAL_JWKS_REFRESH_TOKEN", refresh).start().await;
    cluster.register_secret("the refresh token", refresh);
    let program = ServiceAccountClient::create(&mut cluster).await;
    let accounts = cluster.user.get("/api/v1/service-accounts").await.ok();
    let account = format!("/api/v1/service-accounts/{}", id_of(&accounts["items"][0]));
    let token = program.token(&cluster, 0).await;
    cluster.register_secret("a service account's access token", &token);
    let mut by_account = cluster.subscriber_with_token(1, &token).await;
    let short = mint_token(&cluster, "user", |claims| claims["exp"] = json!(chrono::Utc::now().timestamp() + 20));
    let mut short_lived = cluster.subscriber_with_token(0, &short).await;
    let mut lives_on = cluster.subscriber(0, "user").await;
    announce(&cluster.admin, "first").await;
    for subscriber in [&mut by_account, &mut short_lived, &mut lives_on] {
        assert_eq!(subscriber.expect_notification("notification.announced").await["data"]["message"], "first");
    }
    // The account's key is revoked: it receives no later notification.
    let key = cluster.user.get(&account).await.ok()["keys"][0]["id"].as_str().unwrap().to_owned();
    let revoked = cluster.user.send_once(Method::DELETE, &format!("{account}/keys/{key}"), None).await;
    assert_eq!(revoked.status, 204, "{revoked}");
    announce(&cluster.admin, "second").await;
    assert_eq!((by_account.close_code().await, by_account.unread.len()), (4403, 0));
    assert_eq!(short_lived.close_code().await, 4408);
    announce(&cluster.admin, "after its end").await;
    for message in ["second", "after its end"] {
        assert_eq!(lives_on.expect_notification("notification.announced").await["data"]["message"], message);
    }

    // The provider withdraws the key that has signed all tokens so far.
    cluster.identity.rotate().unwrap();
    let mut after = cluster.subscriber(1, "user").await;
    cluster.identity.forget_old_keys();
    let refreshed = cluster.admin.as_bearer(refresh).send_once(Method::POST, "/internal/auth/jwks/refresh", None).await;
    assert!(refreshed.status.is_success(), "{refreshed}");
    cluster.admin = cluster.admin.as_bearer(cluster.identity.token_of("admin").unwrap().expose_secret());
    assert_eq!(lives_on.close_code().await, 4403, "it is looked at again");
    announce(&cluster.admin, "third").await;
    assert_eq!(after.expect_notification("notification.announced").await["data"]["message"], "third");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn subscriber_that_does_not_read_is_disconnected_with_a_reason_and_others_receive_all() {
    let cluster = TestCluster::start().await;
    let token = cluster.identity.token_of("user").unwrap();
    let mut slow = NotificationSubscriber::open_with_small_window(&cluster.gateway_at(0), token.expose_secret()).await;
    slow.expect_notification("notifications.ready").await;
    let mut quick = cluster.subscriber(0, "user").await;
    // As a replica's relay sends it, and longer than any real one.
    let bus = cluster.member_bus().await;
    let subject = Channel::User(cluster.identity.person("user").unwrap().id.to_string().into()).subject();
    let filling = "x".repeat(7 * 1024);
    let (until, mut published) = (Instant::now() + WAIT_TIMEOUT, 0_u64);
    while cluster.metrics_of(0).await.number("ws_notifications_write_errors_total") == 0.0 {
        assert!(Instant::now() < until, "{published} messages of 7 KiB each were taken by one who does not read");
        for _ in 0..16 {
            let message = json!({ "type": "filling", "number": published, "data": { "message": filling } });
            assert!(bus.notify(subject.clone(), None, HeaderMap::new(), message.to_string().into_bytes()).await);
            published += 1;
        }
        bus.client().flush().await.unwrap();
        for number in published - 16..published {
            quick.expect_notification_where("filling", |event| event["number"] == number).await;
        }
    }
    assert_eq!(slow.close_code().await, 4413, "after {published} messages: {:?}", slow.closed);
    assert!(slow.unread.len() < usize::try_from(published).unwrap());
    let last = json!({ "type": "last" }).to_string().into_bytes();
    assert!(bus.notify(subject, None, HeaderMap::new(), last).await);
    quick.expect_notification("last").await;
    eprintln!(
        "one who does not read was put out after {published} messages, of which it was sent {}",
        slow.unread.len()
    );
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn protocol_violation_closes_its_own_connection_and_no_other() {
    let cluster = TestCluster::start().await;
    let mut other = cluster.subscriber(0, "user").await;
    // A masked text frame with a length of 1 GiB (RFC 6455, section 5.2).
    let mut huge = vec![0x81, 0xff];
    huge.extend_from_slice(&(1_u64 << 30).to_be_bytes());
    huge.extend_from_slice(&[1, 2, 3, 4]);
    let mut subscriber = cluster.subscriber(0, "user").await;
    subscriber.send_raw(&huge).await;
    assert_eq!(subscriber.close_code().await, 1009, "its length is enough");
    for rubbish in [
        Message::Text("hello".into()),
        Message::Text(r#"{"type":"subscribe","channel":"user","id":"somebody"}"#.into()),
        Message::Text(r#"{"type":"ping","to":"all"}"#.into()),
        Message::Binary(vec![0; 10].into()),
    ] {
        let mut subscriber = cluster.subscriber(0, "user").await;
        subscriber.send(rubbish.clone()).await.unwrap();
        assert_eq!(subscriber.close_code().await, 1008, "{rubbish:?}");
    }
    // Bytes that are no frame: a reserved opcode, unmasked.
    let mut subscriber = cluster.subscriber(0, "user").await;
    subscriber.send_raw(&[0x83, 0x01, 0x00]).await;
    assert!([1002, 1006].contains(&subscriber.close_code().await), "{:?}", subscriber.closed);
    for flood in [Message::Ping(vec![0; 100].into()), Message::Text(r#"{"type":"ping"}"#.into())] {
        let mut subscriber = cluster.subscriber(0, "user").await;
        for _ in 0..5_000 {
            if subscriber.send(flood.clone()).await.is_err() {
                break;
            }
        }
        assert!([1008, 1006].contains(&subscriber.close_code().await), "{:?}", subscriber.closed);
    }
    announce(&cluster.admin, "still here").await;
    other.expect_notification("notification.announced").await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn subscribers_receive_notifications_after_a_nats_outage() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let mut subscribers = [cluster.subscriber(0, "user").await, cluster.subscriber(1, "user").await];
    announce(&cluster.admin, "before").await;
    for subscriber in &mut subscribers {
        subscriber.expect_notification("notification.announced").await;
    }
    cluster.nats.kill9();
    // A new subscriber is accepted meanwhile, and receives notifications once there are any.
    let mut meanwhile = cluster.subscriber(0, "user").await;
    for subscriber in &mut subscribers {
        subscriber.send(Message::Text(r#"{"type":"ping"}"#.into())).await.unwrap();
        subscriber.expect_notification("notifications.pong").await;
    }
    cluster.nats.start_again().await.unwrap();
    let until = Instant::now() + WAIT_TIMEOUT;
    let mut published = 0;
    // Notifications from before the relays' return may be late or lost: delivery is best effort.
    loop {
        published += 1;
        let message = format!("after {published}");
        let body = json!({ "severity": "info", "message": message });
        cluster.admin.request_until_final(Method::POST, BROADCAST, Some(&body)).await.created();
        if subscribers[0].receive(Duration::from_secs(2)).await && !subscribers[0].unread.is_empty() {
            break;
        }
        assert!(Instant::now() < until, "nothing is received after {published} announcements");
    }
    let [_, other] = &mut subscribers;
    for subscriber in [other, &mut meanwhile] {
        let event = subscriber.expect_notification("notification.announced").await;
        assert!(event["data"]["message"].as_str().unwrap().starts_with("after "), "{event}");
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_quota_of_a_user_holds_across_replicas() {
    let mut cluster = TestCluster::builder()
        .replicas(2)
        .policy("notification.connections_per_user", 3)
        .policy("allocation.event_streams_per_user", 2)
        .start()
        .await;
    cluster.wait_for_balanced_shards().await;
    let mut subscribers = Vec::new();
    for replica in [0, 1, 1] {
        subscribers.push(cluster.subscriber(replica, "user").await);
    }
    let token = cluster.identity.token_of("user").unwrap();
    for replica in [0, 1] {
        let mut fourth = NotificationSubscriber::open(&cluster.gateway_at(replica), token.expose_secret()).await;
        assert_eq!(fourth.close_code().await, 4429);
    }
    cluster.subscriber(0, "user2").await;
    drop(subscribers.pop());
    let until = Instant::now() + WAIT_TIMEOUT;
    let repeated = loop {
        let mut subscriber = NotificationSubscriber::open(&cluster.gateway_at(0), token.expose_secret()).await;
        subscriber.receive(Duration::from_secs(5)).await;
        if subscriber.closed.is_none() {
            break subscriber;
        }
        assert!(Instant::now() < until, "who left one cannot take another");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    // Streams of an allocation's transitions are counted apart from these, and over the whole cluster as well.
    cluster.node("h100").await;
    let rented = cluster.rent("h100", 1).await;
    let path = format!("{}/events", rented.path());
    let mut streams = Vec::new();
    for replica in [0, 1] {
        let stream = cluster.at_replica(replica, "user").request(Method::GET, &path).send().await.unwrap();
        assert_eq!(stream.status(), 200);
        streams.push(stream);
    }
    for replica in [0, 1] {
        let refused = cluster.at_replica(replica, "user").send_once(Method::GET, &path, None).await;
        refused.expect_error(503, "overloaded");
        assert_eq!(refused.body["details"]["policy_key"], "allocation.event_streams_per_user", "{refused}");
    }
    drop((streams, repeated));
    rented.expect_state("active").await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn broadcast_reaches_every_subscriber_once_and_is_audited() {
    let cluster = TestCluster::builder().replicas(2).start().await;
    let mut subscribers = [
        cluster.subscriber(0, "user").await,
        cluster.subscriber(1, "user2").await,
        cluster.subscriber(1, "admin2").await,
    ];
    let body = json!({ "severity": "warning", "message": "Region test-1 is maintained from noon on." });
    let key = Uuid::new_v4().to_string();
    let mut announced = Value::Null;
    for replayed in [false, true] {
        let request = cluster.admin.request(Method::POST, BROADCAST).header("Idempotency-Key", &key).json(&body);
        let answer = cluster.admin.send(request).await;
        assert_eq!(answer.headers.contains_key("idempotency-replayed"), replayed, "{answer}");
        announced = answer.created();
    }
    let id = id_of(&announced);
    for subscriber in &mut subscribers {
        let event = subscriber.expect_notification("notification.announced").await;
        let data = json!({ "announcement_id": id, "severity": "warning", "message": body["message"] });
        assert_eq!((&event["channel"], &event["data"]), (&json!("broadcast"), &data));
        assert_eq!(subscriber.drain().await, Vec::<Value>::new(), "once");
    }
    let audited = cluster.audit_of(id).await;
    let [(actor, action, metadata, _)] = audited.as_slice() else { panic!("{audited:?}") };
    assert!(actor.starts_with("user:") && action == "notifications.broadcast", "{audited:?}");
    assert_eq!(metadata["message"], body["message"]);
    for by in [&cluster.user, &cluster.other_user] {
        by.post(BROADCAST, &body).await.expect_error(403, "forbidden");
    }
    for bad in [
        json!({}),
        json!({ "severity": "loud", "message": "x" }),
        json!({ "severity": "info", "message": "" }),
        json!({ "severity": "info", "message": "x".repeat(501) }),
        json!({ "severity": "info", "message": "a\u{1b}[2J" }),
        json!({ "severity": "info", "message": "x", "channel": "user" }),
    ] {
        cluster.admin.post(BROADCAST, &bad).await.expect_error(400, "invalid_request");
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gpuctl_watch_continues_after_a_replica_restart() {
    use tokio::io::{AsyncBufReadExt as _, BufReader};
    let mut cluster = TestCluster::start().await;
    let gpuctl = cluster.logged_in("user").await;
    let login = std::fs::read(gpuctl.folder().join("default.json")).unwrap();
    let login: Value = serde_json::from_slice(&login).unwrap();
    cluster.register_secret("the token of a login", login["access_token"].as_str().unwrap());
    let watching = ["-o", "json", "notifications", "watch", "--count", "2", "--type", "notification."];
    let mut watches = gpuctl.command(&watching).spawn().unwrap();
    let mut stderr_lines = BufReader::new(watches.stderr.take().unwrap()).lines();
    let mut shown = BufReader::new(watches.stdout.take().unwrap()).lines();
    let word = "it says something in time";
    let listening = tokio::time::timeout(WAIT_TIMEOUT, stderr_lines.next_line()).await.expect(word).unwrap().unwrap();
    assert!(listening.starts_with("Listening to user, broadcast"), "{listening}");
    let mut messages = Vec::new();
    for message in ["one", "two"] {
        let admin = cluster.logged_in("admin").await;
        let spoken = admin.run(&["notifications", "broadcast", message, "--severity", "critical"]).await.ok();
        assert!(spoken.contains("Sent to all connected clients"), "{spoken}");
        let line = tokio::time::timeout(WAIT_TIMEOUT, shown.next_line()).await.expect(word).unwrap().unwrap();
        messages.push(serde_json::from_str::<Value>(&line).unwrap()["data"]["message"].as_str().unwrap().to_owned());
        if message == "one" {
            cluster.kill9_replica(0);
            cluster.restart_replica(0).await;
            let repeated =
                tokio::time::timeout(WAIT_TIMEOUT, stderr_lines.next_line()).await.expect(word).unwrap().unwrap();
            assert!(repeated.starts_with("Again listening"), "{repeated}");
        }
    }
    assert_eq!(messages, ["one", "two"]);
    let ended =
        tokio::time::timeout(WAIT_TIMEOUT, watches.wait()).await.expect("as many have come as were wanted").unwrap();
    assert!(ended.success(), "{ended}");
    cluster.user.send_once(Method::GET, "/api/v1/allocations", None).await.ok();
    gpuctl.run(&["notifications", "broadcast", "no"]).await.failed(4);
    cluster.shutdown().await;
}
