//! What service accounts show: tokens that the service signs, with keys that operators exchange.

use super::world::{Answer, World};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::{TimeDelta, Utc};
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

const PURPOSE: &str = "service_tokens";

/// The key that a token says it is signed with.
fn signer_of(token: &str) -> String {
    let header = URL_SAFE_NO_PAD.decode(token.split('.').next().unwrap()).unwrap();
    serde_json::from_slice::<Value>(&header).unwrap()["kid"].as_str().unwrap().to_owned()
}

async fn rotate(world: &World, step: &str, body: &Value) -> Answer {
    world.post(&format!("/api/v1/admin/keys/{step}")).admin().json(body).send().await
}

fn step(id: &str, force: bool) -> Value {
    json!({ "purpose": PURPOSE, "key_id": id, "reason": "a year has passed", "force": force })
}

async fn shown(world: &World, token: &str) -> Answer {
    world.get("/api/v1/skus").by(token).send().await
}

#[tokio::test]
async fn a_token_ends_with_its_time() {
    let world = World::new().await;
    let account = world.keyed("ann", &["user"]).await;
    let tokens = world.services.authenticator.service_tokens().unwrap();
    let id = |text: &str| text.parse::<Uuid>().unwrap();
    let made = |age: i64, life: i64| {
        let issued = Utc::now() - TimeDelta::seconds(age);
        let token = tokens.issue(id(&account.id).into(), id(&account.key).into(), issued, TimeDelta::seconds(life));
        secrecy::ExposeSecret::expose_secret(&token.unwrap()).to_owned()
    };
    shown(&world, &made(60, 90)).await.is(200);
    // The clocks of two replicas are not one.
    shown(&world, &made(-5, 90)).await.is(200);
    shown(&world, &made(-60, 90)).await.refused(401, "unauthenticated");
    let over = shown(&world, &made(60, 59)).await;
    over.refused(401, "unauthenticated");
    assert!(over.headers["www-authenticate"].to_str().unwrap().contains("expired"));
}

#[tokio::test]
async fn a_token_that_is_asked_for_is_a_request_of_the_owner_s() {
    let world = World::new().await;
    let account = world.keyed("ann", &["user"]).await;
    // To make the key was the first request.
    world.set_policy(domain::policy::Key::RateLimitApi, 5);
    for _ in 0..4 {
        world.access(&account).await;
    }
    let over = world.ask_token(&account.id, &account.secret).await;
    assert_eq!(over.refused(429, "rate_limited")["policy_key"], "rate_limit.api_requests_per_minute");
    assert_eq!(over.headers["ratelimit-policy"], "\"api\";q=5;w=60");
    world.get("/api/v1/skus").user("ann").send().await.refused(429, "rate_limited");
    world.get("/api/v1/skus").user("bob").send().await.is(200);
}

#[tokio::test]
async fn a_signer_is_exchanged_without_a_gap_and_one_that_leaked_ends_at_once() {
    let world = World::new().await;
    let account = world.keyed("ann", &["user"]).await;
    let by_old = world.access(&account).await;
    let old = signer_of(&by_old);
    let staged = rotate(&world, "stage", &json!({ "purpose": PURPOSE, "reason": "a year has passed" })).await;
    let new = staged.is(201)["key_id"].as_str().unwrap().to_owned();
    assert_eq!(signer_of(&world.access(&account).await), old, "what is staged signs nothing yet");
    rotate(&world, "activate", &step(&new, false)).await.is(200);
    let by_new = loop {
        let token = world.access(&account).await;
        if signer_of(&token) == new {
            break token;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    for token in [&by_old, &by_new] {
        shown(&world, token).await.is(200);
    }
    let early = rotate(&world, "retire", &step(&old, false)).await;
    assert!(early.refused(409, "state_conflict")["until"].is_string());

    rotate(&world, "retire", &step(&old, true)).await.is(200);
    let gone = loop {
        let answer = shown(&world, &by_old).await;
        if answer.status == 401 {
            break answer;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    gone.refused(401, "unauthenticated");
    assert!(gone.line().contains("retired; get a new token"), "{}", gone.line());
    shown(&world, &by_new).await.is(200);
    // Whoever has the retired key signs what they like, and nobody asks the identity provider about it.
    let forged = format!("{}.{}.AAAA", by_old.split('.').next().unwrap(), by_new.split('.').nth(1).unwrap());
    shown(&world, &forged).await.refused(401, "unauthenticated");
}
