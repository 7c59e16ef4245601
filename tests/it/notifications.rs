//! Notifications: who hears of what, who hears of nothing, and what becomes of the connections.

use crate::service_tokens::Program;
use async_nats::HeaderMap;
use domain::notification::Channel;
use reqwest::Method;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::world::client::Client;
use tests::world::notifications::{Ear, PROTOCOL};
use tests::world::{CURRENCY, PATIENCE, World, id_of};
use tokio_tungstenite::tungstenite::Message;
use uuid::Uuid;

const BROADCAST: &str = "/api/v1/admin/notifications/broadcast";

fn types(told: &[Value]) -> Vec<&str> {
    told.iter().map(|told| told["type"].as_str().unwrap()).collect()
}

/// A token of the person's, otherwise than a log-in gives it.
fn minted(world: &World, username: &str, change: impl FnOnce(&mut Value)) -> String {
    let mut claims = world.identity.claims_of(username).unwrap();
    change(&mut claims);
    world.identity.mint(&claims).unwrap().expose_secret().to_owned()
}

/// Says something to everybody.
async fn announce(by: &Client, message: &str) -> Value {
    by.post(BROADCAST, &json!({ "severity": "info", "message": message })).await.created()
}

/// A figure of the replica's.
async fn figure(world: &World, replica: usize, name: &str) -> u64 {
    let url = format!("{}/metrics", world.replicas[replica].operations_url());
    let page = reqwest::get(url).await.unwrap().text().await.unwrap();
    let value = page.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
    value.unwrap_or_else(|| panic!("there is no {name}")).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happens_to_what_one_rents_is_told_at_every_replica_to_them_and_to_nobody_else() {
    let mut world = World::plan().replicas(2).start().await;
    let node = world.node("h100").await;
    let (mut here, mut there) = (world.ear(0, "user").await, world.ear(1, "user").await);
    let (mut other, mut operator) = (world.ear(1, "user2").await, world.ear(0, "admin").await);
    // In the role of an administrator alone, which says nothing of what they run.
    let mut second = world.ear(1, "admin2").await;
    // Whose id is another's org: the two are different channels.
    let user = world.identity.person("user").unwrap().id;
    let mut namesake = world.ear_of(0, &minted(&world, "user2", |claims| claims["org_id"] = json!(user))).await;

    let rented = world.rent("h100", 1).await;
    for ear in [&mut here, &mut there] {
        let told = ear.told("provisioning.active").await;
        assert_eq!((&told["channel"], &told["specversion"]), (&json!("user"), &json!("1.0")), "{told}");
        let data = json!({ "allocation_id": rented.id, "node_id": node.id, "state": "active" });
        assert_eq!((&told["subject"], &told["data"]), (&json!(format!("allocation/{}", rented.id)), &data));
        assert!(told["correlationid"].is_string() && told["id"].is_string(), "{told}");
    }
    let (terminal, session) = world.terminal(rented.id).await;
    let opened = here.told("terminal.opened").await;
    assert_eq!(opened["data"], json!({ "session_id": session, "allocation_id": rented.id, "state": "opened" }));
    node.order("quarantine").await.accepted();
    let known = operator.told_where("node.state_changed", |told| told["data"]["state"] == "quarantined").await;
    assert_eq!((&known["data"]["from_state"], &known["data"]["reason"]), (&json!("active"), &json!("quarantined")));
    let heard = here.told("node.state_changed").await;
    let data = json!({ "node_id": node.id, "allocation_id": rented.id, "state": "quarantined" });
    assert_eq!(heard["data"], data, "why, is for those who run it");
    rented.release().await;
    let closed = here.told("terminal.closed").await;
    assert_eq!(
        (&closed["data"]["reason"], &closed["data"]["session_id"]),
        (&json!("allocation_ended"), &json!(session))
    );
    let released = here.told("provisioning.released").await;
    assert_eq!(released["data"]["allocation_id"], json!(rented.id), "{released}");
    drop(terminal);

    let rest = there.rest().await;
    let mut heard = types(&rest);
    // Of different streams: nobody promised an order between them.
    heard.sort_unstable();
    assert_eq!(heard, ["node.state_changed", "provisioning.released", "terminal.closed", "terminal.opened"]);
    for (name, ear) in [("user2", &mut other), ("user2 of an org", &mut namesake), ("admin2", &mut second)] {
        assert_eq!(ear.rest().await, Vec::<Value>::new(), "{name} heard what is not theirs");
    }
    assert!(types(&operator.rest().await).iter().all(|kind| kind.starts_with("node.")), "operators run the nodes");
    assert_eq!(figure(&world, 0, "ws_notifications_active_connections").await, 3);
    assert!(figure(&world, 0, "ws_notifications_forwarded_messages_total").await >= 6);
    assert_eq!(figure(&world, 0, "ws_notifications_write_errors_total").await, 0);
    drop((here, there, other, operator, second, namesake));
    let until = Instant::now() + PATIENCE;
    while figure(&world, 0, "ws_notifications_active_connections").await > 0 {
        assert!(Instant::now() < until, "connections that are gone are counted");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    world.end().await;
}

/// Opens the account, and puts it below the threshold.
async fn impoverish(world: &World, holder: &Value) -> Uuid {
    let accounts = "/api/v1/admin/billing/accounts";
    let mut account = holder.clone();
    account["currency"] = json!(CURRENCY);
    let account = id_of(&world.admin.post(accounts, &account).await.ok());
    for amount in [1000, -600] {
        let change = json!({ "amount_minor": amount, "currency": CURRENCY, "reason": "a test needs it" });
        world.admin.post(&format!("{accounts}/{account}/adjustments"), &change).await.created();
    }
    account
}

#[tokio::test(flavor = "multi_thread")]
async fn a_low_balance_is_told_to_its_holder_alone_and_where_the_switch_is_on() {
    let world = World::plan().penniless().replicas(2).start().await;
    let of_org = |username: &str, org: &str| minted(&world, username, |claims| claims["org_id"] = json!(org));
    let mut user = world.ear(0, "user").await;
    let mut in_acme = world.ear_of(1, &of_org("user", "acme")).await;
    let mut also_in_acme = world.ear_of(0, &of_org("user2", "acme")).await;
    let mut elsewhere = world.ear_of(1, &of_org("user2", "acme.")).await;
    let mut nowhere = world.ear_of(1, &of_org("admin2", "*")).await;

    let account = impoverish(&world, &json!({ "org_id": "acme" })).await;
    for ear in [&mut in_acme, &mut also_in_acme] {
        let told = ear.told("billing.balance_low").await;
        assert_eq!((&told["channel"], &told["data"]), (&json!("org"), &json!({ "account_id": account })));
    }
    let subject = world.identity.person("user").unwrap().id;
    let account = impoverish(&world, &json!({ "user_id": subject })).await;
    for ear in [&mut user, &mut in_acme] {
        let told = ear.told("billing.balance_low").await;
        assert_eq!((&told["channel"], &told["data"]), (&json!("user"), &json!({ "account_id": account })));
    }
    // Switched off for one org: the others are told.
    let value = json!({
        "key": "notification.low_balance_enabled", "value": false, "scope": { "org_id": "quiet" }, "reason": "a test needs it",
    });
    world.admin.post("/api/v1/admin/policy-values", &value).await.created();
    let mut quiet = world.ear_of(0, &of_org("user2", "quiet")).await;
    let mut loud = world.ear_of(0, &of_org("user2", "loud")).await;
    // A value is seen by every process within a second.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    impoverish(&world, &json!({ "org_id": "quiet" })).await;
    impoverish(&world, &json!({ "org_id": "loud" })).await;
    loud.told("billing.balance_low").await;
    for ear in [&mut user, &mut in_acme, &mut also_in_acme, &mut elsewhere, &mut nowhere, &mut quiet, &mut loud] {
        assert_eq!(ear.rest().await, Vec::<Value>::new());
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_depleted_balance_is_told_with_when_what_runs_is_released() {
    let plan = World::plan().penniless().policy("billing.window_seconds", 1);
    let mut world = plan.policy("billing.depletion_grace_seconds", 2).start().await;
    let sku = world.offer("dear", 8).await;
    let price = json!({ "price": { "currency": CURRENCY, "amount_minor_per_gpu_hour": 36_000 } });
    world.admin.insist(Method::PATCH, &format!("/api/v1/admin/skus/{sku}"), Some(&price)).await.ok();
    world.node("dear").await;
    world.credit("user", 40).await;
    let mut ear = world.ear(0, "user").await;
    let rented = world.rent("dear", 1).await;
    let told = ear.told("billing.balance_depleted").await;
    assert!(told["data"]["release_at"].is_string() && told["data"]["account_id"].is_string(), "{told}");
    ear.told("provisioning.released").await;
    rented.expect_state("released").await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_listen_is_told_so_and_hears_nothing() {
    let mut world = World::start().await;
    let at = world.gateway_at(0);
    let good = world.identity.token_of("user").unwrap().expose_secret().to_owned();
    let bearer = |token: &str| format!("bearer.{token}");
    let protocol = || PROTOCOL.to_owned();
    // What a page can be shown is a close code.
    let expired = minted(&world, "user", |claims| {
        for name in ["iat", "nbf", "exp"] {
            claims[name] = json!(claims[name].as_i64().unwrap() - 7200);
        }
    });
    let foreign_issuer = minted(&world, "user", |claims| claims["iss"] = json!("https://elsewhere.example"));
    let without_role = minted(&world, "user", |claims| claims["realm_access"]["roles"] = json!([]));
    let forged = format!("{}AA", &good[..good.len() - 2]);
    for (token, code) in [
        (&expired, 4401),
        (&foreign_issuer, 4401),
        (&forged, 4401),
        (&"eyJhbGciOiJub25lIn0.e30.".to_owned(), 4401),
        (&without_role, 4403),
    ] {
        let mut ear = Ear::open(&at, token).await;
        assert_eq!((ear.close_code().await, ear.told.len()), (code, 0), "{token}");
    }
    let ask = async |query: &str, offered: &[String], headers: &[(&'static str, &str)]| {
        let asked = Ear::ask(&at, query, offered, headers).await;
        let (status, body) = asked.err().expect("it is not let in");
        (status, body["code"].as_str().unwrap_or_default().to_owned())
    };
    let told = |status: u16, code: &str| (status, code.to_owned());
    let both = [protocol(), bearer(&good)];
    let header = format!("Bearer {good}");
    assert_eq!(ask("", &[protocol()], &[]).await, told(401, "unauthenticated"));
    assert_eq!(ask("", &[bearer(&good)], &[]).await, told(400, "invalid_request"));
    assert_eq!(ask("", &[protocol(), bearer(&good), bearer(&good)], &[]).await, told(400, "invalid_request"));
    assert_eq!(ask("", &both, &[("authorization", &header)]).await, told(400, "invalid_request"));
    assert_eq!(ask("?token=x", &both, &[]).await, told(400, "invalid_request"));
    let expired_header = format!("Bearer {expired}");
    assert_eq!(ask("", &[protocol()], &[("authorization", &expired_header)]).await, told(401, "unauthenticated"));
    for origin in ["https://evil.example", "null", "https://127.0.0.1", ""] {
        assert_eq!(ask("", &both, &[("origin", origin)]).await, told(403, "forbidden"), "{origin}");
    }
    let path = "/api/v1/notifications/ws";
    world.user.once(Method::GET, path, None).await.refused(426, "upgrade_required");
    world.stranger().once(Method::GET, path, None).await.refused(401, "unauthenticated");
    world.user.once(Method::POST, path, None).await.refused(405, "method_not_allowed");

    // A page of the service's own, and a program with its header, are let in.
    let own = world.settings.public_url.clone();
    let mut page = Ear::ask(&at, "", &both, &[("origin", &own)]).await.unwrap();
    let mut program = Ear::ask(&at, "", &[protocol()], &[("authorization", &header)]).await.unwrap();
    for ear in [&mut page, &mut program] {
        let ready = ear.told("notifications.ready").await;
        assert_eq!(ready["data"]["channels"], json!(["user", "broadcast"]), "{ready}");
        ear.send(Message::Text(r#"{"type":"ping"}"#.into())).await.unwrap();
        ear.told("notifications.pong").await;
    }
    world.keep_secret("a token in a subprotocol", &good);
    world.keep_secret("a refused token in a subprotocol", &expired);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_heard_any_more_from_the_moment_in_which_a_token_does_not_hold() {
    let refresh = "refresh-of-a-test-refresh-of-a-test-refresh";
    let mut world = World::plan().replicas(2).variable("INTERNAL_JWKS_REFRESH_TOKEN", refresh).start().await;
    world.keep_secret("the refresh token", refresh);
    let program = Program::made(&mut world).await;
    let accounts = world.user.get("/api/v1/service-accounts").await.ok();
    let account = format!("/api/v1/service-accounts/{}", id_of(&accounts["items"][0]));
    let token = program.token(&world, 0).await;
    world.keep_secret("a service account's access token", &token);
    let mut by_account = world.ear_of(1, &token).await;
    let short = minted(&world, "user", |claims| claims["exp"] = json!(chrono::Utc::now().timestamp() + 8));
    let mut short_lived = world.ear_of(0, &short).await;
    let mut lives_on = world.ear(0, "user").await;
    announce(&world.admin, "first").await;
    for ear in [&mut by_account, &mut short_lived, &mut lives_on] {
        assert_eq!(ear.told("notification.announced").await["data"]["message"], "first");
    }
    // The account's key is revoked: what is said from then on is not for it.
    let key = world.user.get(&account).await.ok()["keys"][0]["id"].as_str().unwrap().to_owned();
    let revoked = world.user.once(Method::DELETE, &format!("{account}/keys/{key}"), None).await;
    assert_eq!(revoked.status, 204, "{revoked}");
    announce(&world.admin, "second").await;
    assert_eq!((by_account.close_code().await, by_account.told.len()), (4403, 0));
    assert_eq!(short_lived.close_code().await, 4408);
    announce(&world.admin, "after its end").await;
    for message in ["second", "after its end"] {
        assert_eq!(lives_on.told("notification.announced").await["data"]["message"], message);
    }

    // The provider takes the key back that has signed everything so far.
    world.identity.rotate().unwrap();
    let mut after = world.ear(1, "user").await;
    world.identity.forget_old_keys();
    let refreshed = world.admin.as_bearer(refresh).once(Method::POST, "/internal/auth/jwks/refresh", None).await;
    assert!(refreshed.status.is_success(), "{refreshed}");
    world.admin = world.admin.as_bearer(world.identity.token_of("admin").unwrap().expose_secret());
    assert_eq!(lives_on.close_code().await, 4403, "it is looked at again");
    announce(&world.admin, "third").await;
    assert_eq!(after.told("notification.announced").await["data"]["message"], "third");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_who_does_not_read_is_put_out_with_a_word_and_the_others_hear_all() {
    let world = World::start().await;
    let token = world.identity.token_of("user").unwrap();
    let mut slow = Ear::with_a_small_window(&world.gateway_at(0), token.expose_secret()).await;
    slow.told("notifications.ready").await;
    let mut quick = world.ear(0, "user").await;
    // As a replica's relay says it, and longer than any real one.
    let bus = world.members_bus().await;
    let subject = Channel::User(world.identity.person("user").unwrap().id.to_string()).subject();
    let filling = "x".repeat(7 * 1024);
    let (until, mut said) = (Instant::now() + PATIENCE, 0_u64);
    while figure(&world, 0, "ws_notifications_write_errors_total").await == 0 {
        assert!(Instant::now() < until, "{said} messages of 7 KiB each were taken by one who does not read");
        for _ in 0..16 {
            let message = json!({ "type": "filling", "number": said, "data": { "message": filling } });
            assert!(bus.notify(subject.clone(), None, HeaderMap::new(), message.to_string().into_bytes()).await);
            said += 1;
        }
        bus.client().flush().await.unwrap();
        for number in said - 16..said {
            quick.told_where("filling", |told| told["number"] == number).await;
        }
    }
    assert_eq!(slow.close_code().await, 4413, "after {said} messages: {:?}", slow.closed);
    assert!(slow.told.len() < usize::try_from(said).unwrap());
    let last = json!({ "type": "last" }).to_string().into_bytes();
    assert!(bus.notify(subject, None, HeaderMap::new(), last).await);
    quick.told("last").await;
    eprintln!("one who does not read was put out after {said} messages, of which it was sent {}", slow.told.len());
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_client_says_ends_its_connection_and_no_other() {
    let world = World::start().await;
    let mut other = world.ear(0, "user").await;
    // A masked text frame that says it is 1 GiB long (RFC 6455, section 5.2).
    let mut huge = vec![0x81, 0xff];
    huge.extend_from_slice(&(1_u64 << 30).to_be_bytes());
    huge.extend_from_slice(&[1, 2, 3, 4]);
    let mut ear = world.ear(0, "user").await;
    ear.send_raw(&huge).await;
    assert_eq!(ear.close_code().await, 1009, "its length is enough");
    for rubbish in [
        Message::Text("hello".into()),
        Message::Text(r#"{"type":"subscribe","channel":"user","id":"somebody"}"#.into()),
        Message::Text(r#"{"type":"ping","to":"all"}"#.into()),
        Message::Binary(vec![0; 10].into()),
    ] {
        let mut ear = world.ear(0, "user").await;
        ear.send(rubbish.clone()).await.unwrap();
        assert_eq!(ear.close_code().await, 1008, "{rubbish:?}");
    }
    // Bytes that are no frame: a reserved opcode, unmasked.
    let mut ear = world.ear(0, "user").await;
    ear.send_raw(&[0x83, 0x01, 0x00]).await;
    assert!([1002, 1006].contains(&ear.close_code().await), "{:?}", ear.closed);
    for flood in [Message::Ping(vec![0; 100].into()), Message::Text(r#"{"type":"ping"}"#.into())] {
        let mut ear = world.ear(0, "user").await;
        for _ in 0..5_000 {
            if ear.send(flood.clone()).await.is_err() {
                break;
            }
        }
        assert!([1008, 1006].contains(&ear.close_code().await), "{:?}", ear.closed);
    }
    announce(&world.admin, "still here").await;
    other.told("notification.announced").await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nats_may_die_and_come_back_and_who_listens_hears_again() {
    let mut world = World::plan().replicas(2).start().await;
    let mut ears = [world.ear(0, "user").await, world.ear(1, "user").await];
    announce(&world.admin, "before").await;
    for ear in &mut ears {
        ear.told("notification.announced").await;
    }
    world.nats.kill9();
    // Who comes meanwhile is let in, and hears when there is something to hear.
    let mut meanwhile = world.ear(0, "user").await;
    for ear in &mut ears {
        ear.send(Message::Text(r#"{"type":"ping"}"#.into())).await.unwrap();
        ear.told("notifications.pong").await;
    }
    world.nats.start_again().await.unwrap();
    let until = Instant::now() + PATIENCE;
    let mut said = 0;
    // What is said before the relays have come back, too, is told late or not at all: nobody promised more.
    loop {
        said += 1;
        let message = format!("after {said}");
        let body = json!({ "severity": "info", "message": message });
        world.admin.insist(Method::POST, BROADCAST, Some(&body)).await.created();
        if ears[0].hear(Duration::from_secs(2)).await && !ears[0].told.is_empty() {
            break;
        }
        assert!(Instant::now() < until, "nothing is heard after {said} words");
    }
    let [_, other] = &mut ears;
    for ear in [other, &mut meanwhile] {
        let told = ear.told("notification.announced").await;
        assert!(told["data"]["message"].as_str().unwrap().starts_with("after "), "{told}");
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_has_as_many_connections_and_streams_as_policy_admits_whichever_replicas_they_are_at() {
    let mut world = World::plan()
        .replicas(2)
        .policy("notification.connections_per_user", 3)
        .policy("allocation.event_streams_per_user", 2)
        .start()
        .await;
    world.settled().await;
    let mut ears = Vec::new();
    for replica in [0, 1, 1] {
        ears.push(world.ear(replica, "user").await);
    }
    let token = world.identity.token_of("user").unwrap();
    for replica in [0, 1] {
        let mut fourth = Ear::open(&world.gateway_at(replica), token.expose_secret()).await;
        assert_eq!(fourth.close_code().await, 4429);
    }
    world.ear(0, "user2").await;
    drop(ears.pop());
    let until = Instant::now() + PATIENCE;
    let again = loop {
        let mut ear = Ear::open(&world.gateway_at(0), token.expose_secret()).await;
        ear.hear(Duration::from_secs(5)).await;
        if ear.closed.is_none() {
            break ear;
        }
        assert!(Instant::now() < until, "who left one cannot take another");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    // Streams of an allocation's transitions are counted apart from these, and over the whole cluster as well.
    world.node("h100").await;
    let rented = world.rent("h100", 1).await;
    let path = format!("{}/events", rented.path());
    let mut streams = Vec::new();
    for replica in [0, 1] {
        let stream = world.at_replica(replica, "user").request(Method::GET, &path).send().await.unwrap();
        assert_eq!(stream.status(), 200);
        streams.push(stream);
    }
    for replica in [0, 1] {
        let refused = world.at_replica(replica, "user").once(Method::GET, &path, None).await;
        refused.refused(503, "overloaded");
        assert_eq!(refused.body["details"]["policy_key"], "allocation.event_streams_per_user", "{refused}");
    }
    drop((streams, again));
    rented.expect_state("active").await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_speaks_to_everybody_once_and_leaves_a_trace() {
    let world = World::plan().replicas(2).start().await;
    let mut ears = [world.ear(0, "user").await, world.ear(1, "user2").await, world.ear(1, "admin2").await];
    let body = json!({ "severity": "warning", "message": "Region test-1 is maintained from noon on." });
    let key = Uuid::new_v4().to_string();
    let mut announced = Value::Null;
    for replayed in [false, true] {
        let request = world.admin.request(Method::POST, BROADCAST).header("Idempotency-Key", &key).json(&body);
        let answer = world.admin.send(request).await;
        assert_eq!(answer.headers.contains_key("idempotency-replayed"), replayed, "{answer}");
        announced = answer.created();
    }
    let id = id_of(&announced);
    for ear in &mut ears {
        let told = ear.told("notification.announced").await;
        let data = json!({ "announcement_id": id, "severity": "warning", "message": body["message"] });
        assert_eq!((&told["channel"], &told["data"]), (&json!("broadcast"), &data));
        assert_eq!(ear.rest().await, Vec::<Value>::new(), "once");
    }
    let audited = world.audit_of(id).await;
    let [(actor, action, metadata, _)] = audited.as_slice() else { panic!("{audited:?}") };
    assert!(actor.starts_with("user:") && action == "notifications.broadcast", "{audited:?}");
    assert_eq!(metadata["message"], body["message"]);
    for by in [&world.user, &world.other_user] {
        by.post(BROADCAST, &body).await.refused(403, "forbidden");
    }
    for bad in [
        json!({}),
        json!({ "severity": "loud", "message": "x" }),
        json!({ "severity": "info", "message": "" }),
        json!({ "severity": "info", "message": "x".repeat(501) }),
        json!({ "severity": "info", "message": "a\u{1b}[2J" }),
        json!({ "severity": "info", "message": "x", "channel": "user" }),
    ] {
        world.admin.post(BROADCAST, &bad).await.refused(400, "invalid_request");
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gpuctl_watches_and_goes_on_where_a_replica_was_started_anew() {
    use tokio::io::{AsyncBufReadExt as _, BufReader};
    let mut world = World::start().await;
    let gpuctl = world.logged_in("user").await;
    let login = std::fs::read(gpuctl.folder().join("default.json")).unwrap();
    let login: Value = serde_json::from_slice(&login).unwrap();
    world.keep_secret("the token of a login", login["access_token"].as_str().unwrap());
    let watching = ["-o", "json", "notifications", "watch", "--count", "2", "--type", "notification."];
    let mut watches = gpuctl.command(&watching).spawn().unwrap();
    let mut said = BufReader::new(watches.stderr.take().unwrap()).lines();
    let mut shown = BufReader::new(watches.stdout.take().unwrap()).lines();
    let word = "it says something in time";
    let listening = tokio::time::timeout(PATIENCE, said.next_line()).await.expect(word).unwrap().unwrap();
    assert!(listening.starts_with("Listening to user, broadcast"), "{listening}");
    let mut messages = Vec::new();
    for message in ["one", "two"] {
        let admin = world.logged_in("admin").await;
        let spoken = admin.run(&["notifications", "broadcast", message, "--severity", "critical"]).await.ok();
        assert!(spoken.contains("Said to everybody"), "{spoken}");
        let line = tokio::time::timeout(PATIENCE, shown.next_line()).await.expect(word).unwrap().unwrap();
        messages.push(serde_json::from_str::<Value>(&line).unwrap()["data"]["message"].as_str().unwrap().to_owned());
        if message == "one" {
            world.kill9_replica(0);
            world.restart_replica(0).await;
            let again = tokio::time::timeout(PATIENCE, said.next_line()).await.expect(word).unwrap().unwrap();
            assert!(again.starts_with("Again listening"), "{again}");
        }
    }
    assert_eq!(messages, ["one", "two"]);
    let ended =
        tokio::time::timeout(PATIENCE, watches.wait()).await.expect("as many have come as were wanted").unwrap();
    assert!(ended.success(), "{ended}");
    world.user.once(Method::GET, "/api/v1/allocations", None).await.ok();
    gpuctl.run(&["notifications", "broadcast", "no"]).await.failed(4);
    world.end().await;
}
