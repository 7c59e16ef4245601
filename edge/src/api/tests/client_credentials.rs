//! Access tokens of service accounts, which the service signs with keys that operators rotate.

use super::harness::{ApiHarness, TestResponse};
use crate::auth::claims::TokenFault;
use crate::auth::signed_tokens::node_log::{NodeLogTokenSubject, NodeLogTokens};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::{TimeDelta, Utc};
use domain::NodeId;
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

const PURPOSE: &str = "service_tokens";

/// The id of the key that signed the token.
fn signer_of(token: &str) -> String {
    let header = URL_SAFE_NO_PAD.decode(token.split('.').next().unwrap()).unwrap();
    serde_json::from_slice::<Value>(&header).unwrap()["kid"].as_str().unwrap().to_owned()
}

async fn rotate(api: &ApiHarness, step: &str, body: &Value) -> TestResponse {
    api.post(&format!("/api/v1/admin/keys/{step}")).admin().json(body).send().await
}

fn step(id: &str, force: bool) -> Value {
    json!({ "purpose": PURPOSE, "key_id": id, "reason": "a year has passed", "force": force })
}

async fn shown(api: &ApiHarness, token: &str) -> TestResponse {
    api.get("/api/v1/skus").by(token).send().await
}

#[tokio::test]
async fn service_token_expires() {
    let api = ApiHarness::new().await;
    let account = api.account_with_key("ann", &["user"]).await;
    let tokens = api.app.authenticator.service_tokens().unwrap();
    let id = |text: &str| text.parse::<Uuid>().unwrap();
    let made = |age: i64, life: i64| {
        let issued = Utc::now() - TimeDelta::seconds(age);
        let token = tokens.issue(id(&account.id).into(), id(&account.key).into(), issued, TimeDelta::seconds(life));
        secrecy::ExposeSecret::expose_secret(&token.unwrap()).to_owned()
    };
    shown(&api, &made(60, 90)).await.is(200);
    // The clocks of two replicas differ.
    shown(&api, &made(-5, 90)).await.is(200);
    shown(&api, &made(-60, 90)).await.refused(401, "unauthenticated");
    let over = shown(&api, &made(60, 59)).await;
    over.refused(401, "unauthenticated");
    assert!(over.headers["www-authenticate"].to_str().unwrap().contains("expired"));
}

#[tokio::test]
async fn token_request_counts_against_the_owners_rate_limit() {
    let api = ApiHarness::new().await;
    let account = api.account_with_key("ann", &["user"]).await;
    // Creating the key was the first request.
    api.set_policy(domain::policy::PolicyKey::RateLimitApi, 5);
    for _ in 0..4 {
        api.access(&account).await;
    }
    let over = api.ask_token(&account.id, &account.secret).await;
    assert_eq!(over.refused(429, "rate_limited")["policy_key"], "rate_limit.api_requests_per_minute");
    assert_eq!(over.headers["ratelimit-policy"], "\"api\";q=5;w=60");
    api.get("/api/v1/skus").user("ann").send().await.refused(429, "rate_limited");
    api.get("/api/v1/skus").user("bob").send().await.is(200);
}

#[tokio::test]
async fn token_signing_keys_overlap_and_a_retired_one_is_refused_at_once() {
    let api = ApiHarness::new().await;
    let account = api.account_with_key("ann", &["user"]).await;
    let by_old = api.access(&account).await;
    let old = signer_of(&by_old);
    let staged = rotate(&api, "stage", &json!({ "purpose": PURPOSE, "reason": "a year has passed" })).await;
    let new = staged.is(201)["key_id"].as_str().unwrap().to_owned();
    assert_eq!(signer_of(&api.access(&account).await), old, "what is staged signs nothing yet");
    rotate(&api, "activate", &step(&new, false)).await.is(200);
    let by_new = loop {
        let token = api.access(&account).await;
        if signer_of(&token) == new {
            break token;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    for token in [&by_old, &by_new] {
        shown(&api, token).await.is(200);
    }
    let early = rotate(&api, "retire", &step(&old, false)).await;
    assert!(early.refused(409, "state_conflict")["until"].is_string());

    rotate(&api, "retire", &step(&old, true)).await.is(200);
    let gone = loop {
        let answer = shown(&api, &by_old).await;
        if answer.status == 401 {
            break answer;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    gone.refused(401, "unauthenticated");
    assert!(gone.line().contains("retired; get a new token"), "{}", gone.line());
    shown(&api, &by_new).await.is(200);
    // A token that is signed with the retired key is refused without a request to the identity provider.
    let forged = format!("{}.{}.AAAA", by_old.split('.').next().unwrap(), by_new.split('.').nth(1).unwrap());
    shown(&api, &forged).await.refused(401, "unauthenticated");
}

#[tokio::test]
async fn log_token_of_a_node_and_access_token_are_not_accepted_for_each_other() {
    let api = ApiHarness::new().await;
    let account = api.account_with_key("ann", &["user"]).await;
    let id = |text: &str| text.parse::<Uuid>().unwrap();
    let (now, hour) = (Utc::now(), TimeDelta::hours(1));
    let access = api.app.authenticator.service_tokens().unwrap();
    let access = access.issue(id(&account.id).into(), id(&account.key).into(), now, hour).unwrap();
    let logs = api.app.node_log_tokens();
    let subject = || NodeLogTokenSubject { node_id: NodeId(Uuid::from_u128(7)), certificate_serial: "0a".to_owned() };
    let (token, expires_at) = logs.issue(subject(), now).unwrap();

    assert_eq!(logs.verify(&token, now).unwrap(), subject());
    assert!(matches!(logs.verify(&token, expires_at + hour), Err(TokenFault::Expired)));
    assert!(matches!(logs.verify(&access, now), Err(TokenFault::Header)));
    let elsewhere = NodeLogTokens::new("https://api.gpu.example", "https://other.example", api.app.trust.keys.clone());
    assert!(matches!(elsewhere.verify(&token, now), Err(TokenFault::Audience)));
    shown(&api, secrecy::ExposeSecret::expose_secret(&token)).await.refused(401, "unauthenticated");
}
