//! Service accounts: creation, authentication by keys, and revocation.

use super::harness::{ApiHarness, REFRESH_TOKEN, TestResponse, without_ids};
use axum::http::Method;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use domain::policy::PolicyKey;
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

impl ApiHarness {
    async fn account(&self, owner: &str, roles: &[&str]) -> String {
        let token = self.token(owner, roles);
        let made = self.post(ACCOUNTS).by(&token).json(&json!({"name": "ci", "roles": roles})).send().await;
        made.is(201)["id"].as_str().unwrap().to_owned()
    }

    pub(super) async fn account_with_key(&self, owner: &str, roles: &[&str]) -> Account {
        let id = self.account(owner, roles).await;
        let made = self.post(&format!("{ACCOUNTS}/{id}/keys")).by(&self.token(owner, roles)).send().await;
        let text = |name: &str| made.is(201)[name].as_str().unwrap().to_owned();
        assert_eq!(text("client_id"), id);
        assert_eq!(made.headers["cache-control"], "no-store");
        Account { key: text("id"), secret: text("client_secret"), id }
    }

    async fn form(&self, body: &str) -> TestResponse {
        self.post(TOKEN).header("content-type", "application/x-www-form-urlencoded").raw(body.to_owned()).send().await
    }

    pub(super) async fn ask_token(&self, id: &str, secret: &str) -> TestResponse {
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
async fn service_account_acts_for_its_owner_under_its_own_name() {
    let api = ApiHarness::new().await;
    api.set_policy(PolicyKey::AuthServiceAccountTokenTtl, 120);
    let account = api.account_with_key("ann", &["user"]).await;
    let answer = api.ask_token(&account.id, &account.secret).await;
    assert_eq!((&answer.is(200)["token_type"], &answer.body["expires_in"]), (&json!("Bearer"), &json!(120)));
    assert_eq!(answer.headers["cache-control"], "no-store");
    assert_eq!(answer.headers["pragma"], "no-cache");
    let token = answer.body["access_token"].as_str().unwrap();
    let claims = claims_of(token);
    assert_eq!(claims["exp"].as_i64().unwrap() - claims["iat"].as_i64().unwrap(), 120);
    assert_eq!((&claims["iss"], &claims["sub"]), (&json!("https://api.gpu.example"), &json!(account.id)));

    let seen = api.get(&account.path()).by(token).send().await;
    assert_eq!(seen.is(200)["owner_user_id"], "ann");
    assert_eq!((&seen.body["org_id"], &seen.body["plan"]), (&json!("acme"), &json!("gold")));
    let key = api
        .post("/api/v1/ssh-keys")
        .by(token)
        .json(&json!({"name": "ci", "public_key": super::harness::ANNS_KEY}))
        .send()
        .await;
    assert_eq!(key.is(201)["created_by"], format!("service-account:{}", account.id));
    let anns = api.get("/api/v1/ssh-keys").user("ann").send().await;
    assert_eq!(anns.is(200)["items"][0]["id"], key.body["id"], "it is her key");
    api.get("/api/v1/admin/nodes").by(token).send().await.refused(403, "forbidden");
}

#[tokio::test]
async fn service_account_cannot_manage_service_accounts() {
    let api = ApiHarness::new().await;
    let account = api.account_with_key("root", &["admin"]).await;
    let token = api.access(&account).await;
    api.get("/api/v1/admin/nodes").by(&token).send().await.is(200);
    let keys = format!("{}/keys", account.path());
    let key = format!("{keys}/{}", account.key);
    for call in [
        api.post(ACCOUNTS).json(&json!({"name": "another"})),
        api.post(&keys),
        api.call(Method::DELETE, &key),
        api.call(Method::DELETE, &account.path()),
    ] {
        call.by(&token).send().await.refused(403, "forbidden");
    }
    assert_eq!(api.get(&account.path()).admin().send().await.is(200)["keys"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn service_account_keys_overlap_and_a_revoked_one_is_refused_at_once() {
    let api = ApiHarness::new().await;
    let old = api.account_with_key("ann", &["user"]).await;
    let made = api.post(&format!("{}/keys", old.path())).user("ann").key("same").send().await;
    let repeated = api.post(&format!("{}/keys", old.path())).user("ann").key("same").send().await;
    assert_ne!(made.is(201)["client_secret"], repeated.is(201)["client_secret"], "a secret is not stored");
    let new = Account {
        id: old.id.clone(),
        key: made.body["id"].as_str().unwrap().to_owned(),
        secret: made.body["client_secret"].as_str().unwrap().to_owned(),
    };
    let (by_old, by_new) = (api.access(&old).await, api.access(&new).await);
    for token in [&by_old, &by_new] {
        api.get("/api/v1/skus").by(token).send().await.is(200);
    }
    let revoke = api.call(Method::DELETE, &format!("{}/keys/{}", old.path(), old.key)).user("ann").send().await;
    assert_eq!(revoke.status, 204);
    api.get("/api/v1/skus").by(&by_old).send().await.refused(401, "unauthenticated");
    api.ask_token(&old.id, &old.secret).await.refused(401, "unauthenticated");
    api.get("/api/v1/skus").by(&by_new).send().await.is(200);
    api.ask_token(&new.id, &new.secret).await.is(200);

    assert_eq!(api.call(Method::DELETE, &old.path()).user("ann").send().await.status, 204);
    api.get("/api/v1/skus").by(&by_new).send().await.refused(401, "unauthenticated");
    api.ask_token(&new.id, &new.secret).await.refused(401, "unauthenticated");
    api.get(&old.path()).user("ann").send().await.refused(404, "not_found");
    assert_eq!(api.get(ACCOUNTS).user("ann").send().await.is(200)["items"], json!([]));
}

#[tokio::test]
async fn accounts_of_others_are_hidden_and_roles_are_the_callers() {
    let api = ApiHarness::new().await;
    let account = api.account_with_key("ann", &["user"]).await;
    let keys = format!("{}/keys", account.path());
    let key = format!("{keys}/{}", account.key);
    let none = format!("{keys}/018f4e2a-7c1b-7000-8000-000000000001");
    let lines = [
        api.get(&account.path()).user("bob").send().await,
        api.post(&keys).user("bob").send().await,
        api.call(Method::DELETE, &key).user("bob").send().await,
        api.call(Method::DELETE, &account.path()).user("bob").send().await,
        api.get(&format!("{ACCOUNTS}?user_id=ann")).user("bob").send().await,
        api.call(Method::DELETE, &none).user("ann").send().await,
        api.call(Method::DELETE, &format!("{keys}/7")).user("ann").send().await,
        api.post(ACCOUNTS).user("ann").json(&json!({"name": "x", "roles": ["admin"]})).send().await,
        api.post(ACCOUNTS).user("ann").json(&json!({"name": "x", "roles": []})).send().await,
        api.post(ACCOUNTS).user("ann").json(&json!({"name": "x", "roles": ["auditor"]})).send().await,
        api.post(ACCOUNTS).user("ann").json(&json!({"name": ""})).send().await,
        api.post(ACCOUNTS).user("ann").json(&json!({"name": "x", "owner_user_id": "bob"})).send().await,
        api.post(ACCOUNTS).user("ann").json(&json!({"name": "x".repeat(101)})).send().await,
    ]
    .map(|answer| answer.line());
    insta::assert_snapshot!(lines.join("\n"));
    api.get(&account.path()).admin().send().await.is(200);
    assert_eq!(api.get(ACCOUNTS).user("bob").send().await.is(200)["items"], json!([]));
    assert_eq!(api.get(ACCOUNTS).admin().send().await.is(200)["items"][0]["id"], json!(account.id));
    assert!(!api.get(&account.path()).user("ann").send().await.body.to_string().contains(&account.secret));
}

#[tokio::test]
async fn key_is_made_by_the_owner_alone_and_with_the_roles_of_the_account() {
    let api = ApiHarness::new().await;
    let of_ann = api.account_with_key("ann", &["user"]).await;
    let keys = format!("{}/keys", of_ann.path());
    api.post(&keys).admin().send().await.refused(404, "not_found");
    let revoked = api.call(Method::DELETE, &format!("{keys}/{}", of_ann.key)).admin().send().await;
    assert_eq!(revoked.status, 204, "an administrator takes keys away");
    // An administrator at first, and a user later.
    let of_eve = api.account_with_key("eve", &["admin"]).await;
    let keys = format!("{}/keys", of_eve.path());
    let refused = api.post(&keys).by(&api.token("eve", &["user"])).send().await;
    refused.refused(403, "forbidden");
    assert!(refused.body["message"].as_str().unwrap().contains("a role that you do not have any more"));
    api.post(&keys).by(&api.token("eve", &["admin"])).send().await.is(201);
}

#[tokio::test]
async fn refusal_for_a_missing_role_is_not_replayed_once_the_caller_has_the_role() {
    let api = ApiHarness::new().await;
    let make = async |roles: &[&str]| {
        let wanted = json!({"name": "ci", "roles": ["admin"]});
        api.post(ACCOUNTS).by(&api.token("eve", roles)).key("k").json(&wanted).send().await
    };
    make(&["user"]).await.refused(403, "forbidden");
    let made = make(&["admin"]).await;
    made.is(201);
    assert!(!made.is_replayed());
    assert!(make(&["admin"]).await.is_replayed());
}

#[tokio::test]
async fn concurrent_creations_stay_within_the_limit() {
    let api = ApiHarness::new().await;
    api.set_policy(PolicyKey::AuthServiceAccountsPerUser, 3);
    let make = async |key: String| api.post(ACCOUNTS).user("ann").key(&key).json(&json!({"name": "ci"})).send().await;
    let answers = futures::future::join_all((0..12).map(|n| make(format!("key-{n}")))).await;
    let made: Vec<_> = answers.iter().filter(|answer| answer.status == 201).collect();
    assert_eq!(made.len(), 3, "{:?}", answers.iter().map(TestResponse::line).collect::<Vec<_>>());
    for refused in answers.iter().filter(|answer| answer.status != 201) {
        assert_eq!(refused.refused(409, "state_conflict")["policy_key"], "auth.service_accounts_per_user");
    }
    // A replay succeeds although the limit is reached.
    let first = answers.iter().position(|answer| answer.status == 201).unwrap();
    let repeated = make(format!("key-{first}")).await;
    assert_eq!(repeated.is(201)["id"], answers[first].body["id"]);
    assert!(repeated.is_replayed());
    assert_eq!(api.get(ACCOUNTS).user("ann").send().await.is(200)["items"].as_array().unwrap().len(), 3);
    api.set_policy(PolicyKey::AuthServiceAccountKeysMax, 2);
    let keys = format!("{ACCOUNTS}/{}/keys", repeated.body["id"].as_str().unwrap());
    for _ in 0..2 {
        api.post(&keys).user("ann").send().await.is(201);
    }
    api.post(&keys).user("ann").send().await.refused(409, "state_conflict");
}

#[tokio::test]
async fn client_credentials_follow_oauth_and_its_error_codes() {
    let api = ApiHarness::new().await;
    let account = api.account_with_key("ann", &["user"]).await;
    let other = api.account_with_key("bob", &["user"]).await;
    let (id, secret) = (&account.id, &account.secret);
    let basic = |id: &str, secret: &str| format!("Basic {}", STANDARD.encode(format!("{id}:{secret}")));
    let by_header = async |authorization: &str, body: &'static str| {
        api.post(TOKEN)
            .header("authorization", authorization)
            .header("content-type", "application/x-www-form-urlencoded")
            .raw(body)
            .send()
            .await
    };
    let grant = "grant_type=client_credentials";
    by_header(&basic(id, secret), grant).await.is(200);
    api.form(&format!("{grant}&client_id={id}&client_secret={secret}&unknown=passed+over&scope=")).await.is(200);

    let huge = "x".repeat(2 << 20);
    let wrong = secret.replace(&secret[10..14], "AAAA");
    let mut table = String::new();
    for (what, answer) in [
        ("no grant type", api.form(&format!("client_id={id}&client_secret={secret}")).await),
        ("another grant", api.form(&format!("grant_type=password&client_id={id}&client_secret={secret}")).await),
        ("a scope", api.form(&format!("{grant}&scope=all&client_id={id}&client_secret={secret}")).await),
        ("no credentials", api.form(grant).await),
        ("no secret", api.form(&format!("{grant}&client_id={id}")).await),
        ("a wrong secret", api.form(&format!("{grant}&client_id={id}&client_secret={wrong}")).await),
        ("another account's", api.form(&format!("{grant}&client_id={id}&client_secret={}", other.secret)).await),
        ("no key at all", api.form(&format!("{grant}&client_id={id}&client_secret=%3B%27--")).await),
        ("an unknown account", api.ask_token("018f4e2a-7c1b-7000-8000-000000000001", secret).await),
        ("no uuid", api.ask_token("*", secret).await),
        ("twice", api.form(&format!("{grant}&client_id={id}&client_id={id}&client_secret={secret}")).await),
        ("NUL", api.form(&format!("{grant}&client_id={id}%00&client_secret={secret}")).await),
        ("no UTF-8", api.form(&format!("{grant}&client_id=%ff&client_secret={secret}")).await),
        ("JSON", api.post(TOKEN).json(&json!({"grant_type": "client_credentials"})).send().await),
        ("too large", api.form(&huge).await),
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
async fn failed_token_requests_are_rate_limited_and_correct_ones_are_not() {
    let api = ApiHarness::new().await;
    let account = api.account_with_key("ann", &["user"]).await;
    let wrong = account.secret.replace(&account.secret[10..14], "AAAA");
    let mut statuses = Vec::new();
    for _ in 0..15 {
        statuses.push(api.ask_token(&account.id, &wrong).await.status);
    }
    assert_eq!(statuses.iter().filter(|status| **status == 401).count(), 10, "{statuses:?}");
    let slowed = api.ask_token(&account.id, &wrong).await;
    assert_eq!(slowed.refused(429, "rate_limited")["error"], "invalid_client");
    assert!(slowed.headers.contains_key("retry-after"));
    api.ask_token(&account.id, &account.secret).await.is(200);
}

#[tokio::test]
async fn tokens_with_a_wrong_signature_or_claims_are_refused() {
    let api = ApiHarness::new().await;
    let account = api.account_with_key("ann", &["user"]).await;
    let token = api.access(&account).await;
    let parts: Vec<_> = token.split('.').collect();
    let header: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(parts[0]).unwrap()).unwrap();
    let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let with = |name: &str, value: Value| {
        let mut header = header.clone();
        header[name] = value;
        format!("{}.{}.{}", encode(&header), parts[1], parts[2])
    };
    let mut others = claims_of(&token);
    others["sub"] = api.account("bob", &["user"]).await.into();
    for (what, token) in [
        ("another algorithm", with("alg", json!("none"))),
        ("HMAC", with("alg", json!("HS256"))),
        ("the provider's key", with("kid", json!("one"))),
        ("another account", format!("{}.{}.{}", parts[0], encode(&others), parts[2])),
        ("no signature", format!("{}.{}.", parts[0], parts[1])),
        ("a short signature", format!("{}.{}.AAAA", parts[0], parts[1])),
        ("the secret itself", account.secret.clone()),
    ] {
        let answer = api.get("/api/v1/skus").by(&token).send().await;
        assert_eq!(answer.status, 401, "{what}: {}", answer.body);
    }
    api.get("/api/v1/skus").by(&token).send().await.is(200);
}

#[tokio::test]
async fn service_account_actions_are_audited_and_no_key_is_stored() {
    let api = ApiHarness::new().await;
    let account = api.account_with_key("ann", &["user"]).await;
    api.call(Method::DELETE, &format!("{}/keys/{}", account.path(), account.key)).user("ann").send().await;
    api.call(Method::DELETE, &account.path()).admin().send().await;
    let path = format!("/api/v1/admin/runtime/entities/service_account/{}", account.id);
    let seen = api.get(&path).admin().send().await;
    let rows = seen.is(200)["history"].as_array().unwrap().clone();
    let notified: Vec<_> = rows.iter().rev().map(|row| format!("{} {}", row["actor"], row["command"])).collect();
    assert_eq!(
        notified,
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
async fn provider_keys_are_refreshed_with_the_operator_token() {
    let api = ApiHarness::new().await;
    let path = "/internal/auth/jwks/refresh";
    let user = api.token("root", &["admin"]);
    for wrong in ["x", &user, &REFRESH_TOKEN[1..]] {
        api.post(path).by(wrong).send().await.refused(401, "unauthenticated");
    }
    api.post(path).send().await.refused(401, "unauthenticated");
    assert_eq!(api.post(path).by(REFRESH_TOKEN).send().await.is(200)["keys"], 1);
    let mut repeated = api.post(path).by(REFRESH_TOKEN).send().await;
    // One a second, of which a pause of the machine allows another.
    for _ in 0..4 {
        if repeated.status == 200 {
            repeated = api.post(path).by(REFRESH_TOKEN).send().await;
        }
    }
    repeated.refused(429, "rate_limited");
    assert!(repeated.headers.contains_key("retry-after"));
}

#[tokio::test]
async fn unreachable_provider_is_an_upstream_error_of_the_refresh() {
    let api = ApiHarness::new().await;
    api.stop_provider().await;
    let answer = api.post("/internal/auth/jwks/refresh").by(REFRESH_TOKEN).send().await;
    answer.refused(502, "upstream_error");
}

#[tokio::test]
async fn event_stream_ends_for_a_revoked_account() {
    let (api, _) = ApiHarness::with_free_node().await;
    let account = api.account_with_key("ann", &["user"]).await;
    let token = api.access(&account).await;
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    let rented = api.post("/api/v1/allocations").by(&token).key("k").json(&wanted).send().await;
    assert_eq!(rented.is(201)["user_id"], "ann");
    let path = format!("/api/v1/allocations/{}", rented.body["id"].as_str().unwrap());
    let stream = api.get(&format!("{path}/events")).by(&token).response().await;
    let mut notified = stream.into_body().into_data_stream();
    let first = notified.next().await.unwrap().unwrap();
    assert!(String::from_utf8_lossy(&first).contains("requested"));
    let revoked =
        api.call(Method::DELETE, &format!("{}/keys/{}", account.path(), account.key)).user("ann").send().await;
    assert_eq!(revoked.status, 204);
    api.post(&format!("{path}/release")).user("ann").send().await.is(202);
    let rest =
        tokio::time::timeout(Duration::from_secs(60), notified.collect::<Vec<_>>()).await.expect("the stream ends");
    let rest: Vec<u8> = rest.into_iter().flat_map(|chunk| chunk.unwrap().to_vec()).collect();
    assert!(!String::from_utf8_lossy(&rest).contains("releasing"), "an event after the revocation was sent");
}
