//! Service accounts: made, known by their keys, and nobody from the moment that a key is revoked.

use super::world::{Answer, Placing, REFRESH_TOKEN, World, without_ids};
use axum::http::Method;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use domain::policy::Key;
use futures::StreamExt;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::time::Duration;

const ACCOUNTS: &str = "/api/v1/service-accounts";
const TOKEN: &str = "/api/v1/service-accounts/token";

pub(super) struct Account {
    pub(super) id: String,
    pub(super) key: String,
    pub(super) secret: String,
}

impl Account {
    fn path(&self) -> String {
        format!("{ACCOUNTS}/{}", self.id)
    }
}

impl World {
    async fn account(&self, owner: &str, roles: &[&str]) -> String {
        let token = self.token(owner, roles);
        let made = self.post(ACCOUNTS).by(&token).json(&json!({"name": "ci", "roles": roles})).send().await;
        made.is(201)["id"].as_str().unwrap().to_owned()
    }

    pub(super) async fn keyed(&self, owner: &str, roles: &[&str]) -> Account {
        let id = self.account(owner, roles).await;
        let made = self.post(&format!("{ACCOUNTS}/{id}/keys")).by(&self.token(owner, roles)).send().await;
        let text = |name: &str| made.is(201)[name].as_str().unwrap().to_owned();
        assert_eq!(text("client_id"), id);
        assert_eq!(made.headers["cache-control"], "no-store");
        Account { key: text("id"), secret: text("client_secret"), id }
    }

    async fn form(&self, body: &str) -> Answer {
        self.post(TOKEN).header("content-type", "application/x-www-form-urlencoded").raw(body.to_owned()).send().await
    }

    pub(super) async fn ask_token(&self, id: &str, secret: &str) -> Answer {
        self.form(&format!("grant_type=client_credentials&client_id={id}&client_secret={secret}")).await
    }

    pub(super) async fn access(&self, account: &Account) -> String {
        self.ask_token(&account.id, &account.secret).await.is(200)["access_token"].as_str().unwrap().to_owned()
    }
}

fn claims_of(token: &str) -> Value {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(token.split('.').nth(1).unwrap()).unwrap()).unwrap()
}

#[tokio::test]
async fn an_account_acts_for_its_owner_under_its_own_name() {
    let world = World::new().await;
    world.set_policy(Key::AuthServiceAccountTokenTtl, 120);
    let account = world.keyed("ann", &["user"]).await;
    let answer = world.ask_token(&account.id, &account.secret).await;
    assert_eq!((&answer.is(200)["token_type"], &answer.body["expires_in"]), (&json!("Bearer"), &json!(120)));
    assert_eq!(answer.headers["cache-control"], "no-store");
    assert_eq!(answer.headers["pragma"], "no-cache");
    let token = answer.body["access_token"].as_str().unwrap();
    let claims = claims_of(token);
    assert_eq!(claims["exp"].as_i64().unwrap() - claims["iat"].as_i64().unwrap(), 120);
    assert_eq!((&claims["iss"], &claims["sub"]), (&json!("https://api.gpu.example"), &json!(account.id)));

    let seen = world.get(&account.path()).by(token).send().await;
    assert_eq!(seen.is(200)["owner_user_id"], "ann");
    assert_eq!((&seen.body["org_id"], &seen.body["plan"]), (&json!("acme"), &json!("gold")));
    let key = world
        .post("/api/v1/ssh-keys")
        .by(token)
        .json(&json!({"name": "ci", "public_key": super::world::ANNS_KEY}))
        .send()
        .await;
    assert_eq!(key.is(201)["created_by"], format!("service-account:{}", account.id));
    let anns = world.get("/api/v1/ssh-keys").user("ann").send().await;
    assert_eq!(anns.is(200)["items"][0]["id"], key.body["id"], "it is her key");
    world.get("/api/v1/admin/nodes").by(token).send().await.refused(403, "forbidden");
}

#[tokio::test]
async fn an_account_makes_and_changes_no_accounts_not_even_an_administrator_s() {
    let world = World::new().await;
    let account = world.keyed("root", &["admin"]).await;
    let token = world.access(&account).await;
    world.get("/api/v1/admin/nodes").by(&token).send().await.is(200);
    let keys = format!("{}/keys", account.path());
    let key = format!("{keys}/{}", account.key);
    for call in [
        world.post(ACCOUNTS).json(&json!({"name": "another"})),
        world.post(&keys),
        world.call(Method::DELETE, &key),
        world.call(Method::DELETE, &account.path()),
    ] {
        call.by(&token).send().await.refused(403, "forbidden");
    }
    assert_eq!(world.get(&account.path()).admin().send().await.is(200)["keys"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn keys_are_exchanged_without_a_gap_and_a_revoked_one_ends_at_once() {
    let world = World::new().await;
    let old = world.keyed("ann", &["user"]).await;
    let made = world.post(&format!("{}/keys", old.path())).user("ann").key("same").send().await;
    let again = world.post(&format!("{}/keys", old.path())).user("ann").key("same").send().await;
    assert_ne!(made.is(201)["client_secret"], again.is(201)["client_secret"], "a secret is not stored");
    let new = Account {
        id: old.id.clone(),
        key: made.body["id"].as_str().unwrap().to_owned(),
        secret: made.body["client_secret"].as_str().unwrap().to_owned(),
    };
    let (by_old, by_new) = (world.access(&old).await, world.access(&new).await);
    for token in [&by_old, &by_new] {
        world.get("/api/v1/skus").by(token).send().await.is(200);
    }
    let revoke = world.call(Method::DELETE, &format!("{}/keys/{}", old.path(), old.key)).user("ann").send().await;
    assert_eq!(revoke.status, 204);
    world.get("/api/v1/skus").by(&by_old).send().await.refused(401, "unauthenticated");
    world.ask_token(&old.id, &old.secret).await.refused(401, "unauthenticated");
    world.get("/api/v1/skus").by(&by_new).send().await.is(200);
    world.ask_token(&new.id, &new.secret).await.is(200);

    assert_eq!(world.call(Method::DELETE, &old.path()).user("ann").send().await.status, 204);
    world.get("/api/v1/skus").by(&by_new).send().await.refused(401, "unauthenticated");
    world.ask_token(&new.id, &new.secret).await.refused(401, "unauthenticated");
    world.get(&old.path()).user("ann").send().await.refused(404, "not_found");
    assert_eq!(world.get(ACCOUNTS).user("ann").send().await.is(200)["items"], json!([]));
}

#[tokio::test]
async fn other_people_s_accounts_are_not_there_and_roles_are_one_s_own() {
    let world = World::new().await;
    let account = world.keyed("ann", &["user"]).await;
    let keys = format!("{}/keys", account.path());
    let key = format!("{keys}/{}", account.key);
    let none = format!("{keys}/018f4e2a-7c1b-7000-8000-000000000001");
    let lines = [
        world.get(&account.path()).user("bob").send().await,
        world.post(&keys).user("bob").send().await,
        world.call(Method::DELETE, &key).user("bob").send().await,
        world.call(Method::DELETE, &account.path()).user("bob").send().await,
        world.get(&format!("{ACCOUNTS}?user_id=ann")).user("bob").send().await,
        world.call(Method::DELETE, &none).user("ann").send().await,
        world.call(Method::DELETE, &format!("{keys}/7")).user("ann").send().await,
        world.post(ACCOUNTS).user("ann").json(&json!({"name": "x", "roles": ["admin"]})).send().await,
        world.post(ACCOUNTS).user("ann").json(&json!({"name": "x", "roles": []})).send().await,
        world.post(ACCOUNTS).user("ann").json(&json!({"name": "x", "roles": ["auditor"]})).send().await,
        world.post(ACCOUNTS).user("ann").json(&json!({"name": ""})).send().await,
        world.post(ACCOUNTS).user("ann").json(&json!({"name": "x", "owner_user_id": "bob"})).send().await,
        world.post(ACCOUNTS).user("ann").json(&json!({"name": "x".repeat(101)})).send().await,
    ]
    .map(|answer| answer.line());
    insta::assert_snapshot!(lines.join("\n"));
    world.get(&account.path()).admin().send().await.is(200);
    assert_eq!(world.get(ACCOUNTS).user("bob").send().await.is(200)["items"], json!([]));
    assert_eq!(world.get(ACCOUNTS).admin().send().await.is(200)["items"][0]["id"], json!(account.id));
    assert!(!world.get(&account.path()).user("ann").send().await.body.to_string().contains(&account.secret));
}

#[tokio::test]
async fn however_many_are_made_at_once_none_goes_past_the_limit() {
    let world = World::new().await;
    world.set_policy(Key::AuthServiceAccountsPerUser, 3);
    let make = async |key: String| world.post(ACCOUNTS).user("ann").key(&key).json(&json!({"name": "ci"})).send().await;
    let answers = futures::future::join_all((0..12).map(|n| make(format!("key-{n}")))).await;
    let made: Vec<_> = answers.iter().filter(|answer| answer.status == 201).collect();
    assert_eq!(made.len(), 3, "{:?}", answers.iter().map(Answer::line).collect::<Vec<_>>());
    for refused in answers.iter().filter(|answer| answer.status != 201) {
        assert_eq!(refused.refused(409, "state_conflict")["policy_key"], "auth.service_accounts_per_user");
    }
    // A repetition is no new one, though there is room for none.
    let first = answers.iter().position(|answer| answer.status == 201).unwrap();
    let again = make(format!("key-{first}")).await;
    assert_eq!(again.is(201)["id"], answers[first].body["id"]);
    assert!(again.is_replayed());
    assert_eq!(world.get(ACCOUNTS).user("ann").send().await.is(200)["items"].as_array().unwrap().len(), 3);
    world.set_policy(Key::AuthServiceAccountKeysMax, 2);
    let keys = format!("{ACCOUNTS}/{}/keys", again.body["id"].as_str().unwrap());
    for _ in 0..2 {
        world.post(&keys).user("ann").send().await.is(201);
    }
    world.post(&keys).user("ann").send().await.refused(409, "state_conflict");
}

#[tokio::test]
async fn client_credentials_are_taken_as_oauth_says_and_refused_with_its_codes() {
    let world = World::new().await;
    let account = world.keyed("ann", &["user"]).await;
    let other = world.keyed("bob", &["user"]).await;
    let (id, secret) = (&account.id, &account.secret);
    let basic = |id: &str, secret: &str| format!("Basic {}", STANDARD.encode(format!("{id}:{secret}")));
    let by_header = async |authorization: &str, body: &'static str| {
        world
            .post(TOKEN)
            .header("authorization", authorization)
            .header("content-type", "application/x-www-form-urlencoded")
            .raw(body)
            .send()
            .await
    };
    let grant = "grant_type=client_credentials";
    by_header(&basic(id, secret), grant).await.is(200);
    world.form(&format!("{grant}&client_id={id}&client_secret={secret}&unknown=passed+over&scope=")).await.is(200);

    let huge = "x".repeat(2 << 20);
    let wrong = secret.replace(&secret[10..14], "AAAA");
    let mut table = String::new();
    for (what, answer) in [
        ("no grant type", world.form(&format!("client_id={id}&client_secret={secret}")).await),
        ("another grant", world.form(&format!("grant_type=password&client_id={id}&client_secret={secret}")).await),
        ("a scope", world.form(&format!("{grant}&scope=all&client_id={id}&client_secret={secret}")).await),
        ("no credentials", world.form(grant).await),
        ("no secret", world.form(&format!("{grant}&client_id={id}")).await),
        ("a wrong secret", world.form(&format!("{grant}&client_id={id}&client_secret={wrong}")).await),
        ("another account's", world.form(&format!("{grant}&client_id={id}&client_secret={}", other.secret)).await),
        ("no key at all", world.form(&format!("{grant}&client_id={id}&client_secret=%3B%27--")).await),
        ("an unknown account", world.ask_token("018f4e2a-7c1b-7000-8000-000000000001", secret).await),
        ("no uuid", world.ask_token("*", secret).await),
        ("twice", world.form(&format!("{grant}&client_id={id}&client_id={id}&client_secret={secret}")).await),
        ("NUL", world.form(&format!("{grant}&client_id={id}%00&client_secret={secret}")).await),
        ("no UTF-8", world.form(&format!("{grant}&client_id=%ff&client_secret={secret}")).await),
        ("JSON", world.post(TOKEN).json(&json!({"grant_type": "client_credentials"})).send().await),
        ("too large", world.form(&huge).await),
        ("a wrong header", by_header(&basic(id, &wrong), grant).await),
        ("a bearer header", by_header("Bearer x", grant).await),
        ("no base64", by_header("Basic ???", grant).await),
        ("both", by_header(&basic(id, secret), "grant_type=client_credentials&client_secret=x").await),
        ("another id in the form", by_header(&basic(id, secret), "grant_type=client_credentials&client_id=x").await),
    ] {
        let challenge = answer.headers.get("www-authenticate").map_or("-", |value| value.to_str().unwrap());
        let error = answer.body["details"]["error"].as_str().unwrap_or("-");
        writeln!(table, "{what}: {error} | {challenge} | {}", without_ids(&answer.line())).unwrap();
        let text = answer.body.to_string();
        assert!(!text.contains(secret.as_str()) && !text.contains(&wrong), "{what}: the answer repeats a secret");
    }
    insta::assert_snapshot!(table);
}

#[tokio::test]
async fn whoever_guesses_is_slowed_down_and_whoever_knows_is_not() {
    let world = World::new().await;
    let account = world.keyed("ann", &["user"]).await;
    let wrong = account.secret.replace(&account.secret[10..14], "AAAA");
    let mut statuses = Vec::new();
    for _ in 0..15 {
        statuses.push(world.ask_token(&account.id, &wrong).await.status);
    }
    assert_eq!(statuses.iter().filter(|status| **status == 401).count(), 10, "{statuses:?}");
    let slowed = world.ask_token(&account.id, &wrong).await;
    assert_eq!(slowed.refused(429, "rate_limited")["error"], "invalid_client");
    assert!(slowed.headers.contains_key("retry-after"));
    world.ask_token(&account.id, &account.secret).await.is(200);
}

#[tokio::test]
async fn tokens_that_the_service_did_not_sign_so_are_refused() {
    let world = World::new().await;
    let account = world.keyed("ann", &["user"]).await;
    let token = world.access(&account).await;
    let parts: Vec<_> = token.split('.').collect();
    let header: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(parts[0]).unwrap()).unwrap();
    let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let with = |name: &str, value: Value| {
        let mut header = header.clone();
        header[name] = value;
        format!("{}.{}.{}", encode(&header), parts[1], parts[2])
    };
    let mut others = claims_of(&token);
    others["sub"] = world.account("bob", &["user"]).await.into();
    for (what, token) in [
        ("another algorithm", with("alg", json!("none"))),
        ("HMAC", with("alg", json!("HS256"))),
        ("the provider's key", with("kid", json!("one"))),
        ("another account", format!("{}.{}.{}", parts[0], encode(&others), parts[2])),
        ("no signature", format!("{}.{}.", parts[0], parts[1])),
        ("a short signature", format!("{}.{}.AAAA", parts[0], parts[1])),
        ("the secret itself", account.secret.clone()),
    ] {
        let answer = world.get("/api/v1/skus").by(&token).send().await;
        assert_eq!(answer.status, 401, "{what}: {}", answer.body);
    }
    world.get("/api/v1/skus").by(&token).send().await.is(200);
}

#[tokio::test]
async fn what_is_done_is_audited_and_no_key_is_kept() {
    let world = World::new().await;
    let account = world.keyed("ann", &["user"]).await;
    world.call(Method::DELETE, &format!("{}/keys/{}", account.path(), account.key)).user("ann").send().await;
    world.call(Method::DELETE, &account.path()).admin().send().await;
    let path = format!("/api/v1/admin/runtime/entities/service_account/{}", account.id);
    let seen = world.get(&path).admin().send().await;
    let rows = seen.is(200)["history"].as_array().unwrap().clone();
    let told: Vec<_> = rows.iter().rev().map(|row| format!("{} {}", row["actor"], row["command"])).collect();
    assert_eq!(
        told,
        [
            "\"user:ann\" \"create\"",
            "\"user:ann\" \"add_key\"",
            "\"user:ann\" \"revoke_key\"",
            "\"user:root\" \"delete\""
        ]
    );
    assert!(!seen.body.to_string().contains(&account.secret));
}

#[tokio::test]
async fn the_provider_s_keys_are_refreshed_by_whoever_has_the_operator_s_token() {
    let world = World::new().await;
    let path = "/internal/auth/jwks/refresh";
    let user = world.token("root", &["admin"]);
    for wrong in ["x", &user, &REFRESH_TOKEN[1..]] {
        world.post(path).by(wrong).send().await.refused(401, "unauthenticated");
    }
    world.post(path).send().await.refused(401, "unauthenticated");
    assert_eq!(world.post(path).by(REFRESH_TOKEN).send().await.is(200)["keys"], 1);
    let again = world.post(path).by(REFRESH_TOKEN).send().await;
    again.refused(429, "rate_limited");
    assert!(again.headers.contains_key("retry-after"));
}

#[tokio::test]
async fn a_provider_that_does_not_answer_a_refresh_is_an_upstream_error() {
    let world = World::new().await;
    world.stop_provider().await;
    let answer = world.post("/internal/auth/jwks/refresh").by(REFRESH_TOKEN).send().await;
    answer.refused(502, "upstream_error");
}

#[tokio::test]
async fn a_stream_tells_a_revoked_account_nothing_more() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    let node = world.active_node("h100x4", 4).await;
    world.places(Placing::On(node));
    let account = world.keyed("ann", &["user"]).await;
    let token = world.access(&account).await;
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    let rented = world.post("/api/v1/allocations").by(&token).key("k").json(&wanted).send().await;
    assert_eq!(rented.is(201)["user_id"], "ann");
    let path = format!("/api/v1/allocations/{}", rented.body["id"].as_str().unwrap());
    let stream = world.get(&format!("{path}/events")).by(&token).response().await;
    let mut told = stream.into_body().into_data_stream();
    let first = told.next().await.unwrap().unwrap();
    assert!(String::from_utf8_lossy(&first).contains("requested"));
    let revoked =
        world.call(Method::DELETE, &format!("{}/keys/{}", account.path(), account.key)).user("ann").send().await;
    assert_eq!(revoked.status, 204);
    world.post(&format!("{path}/release")).user("ann").send().await.is(202);
    let rest = tokio::time::timeout(Duration::from_secs(5), told.collect::<Vec<_>>()).await.expect("the stream ends");
    let rest: Vec<u8> = rest.into_iter().flat_map(|chunk| chunk.unwrap().to_vec()).collect();
    assert!(!String::from_utf8_lossy(&rest).contains("releasing"), "what happened after the revocation was told");
}
