//! Service accounts over several replicas, and changes of keys.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tests::cluster::client::{ApiResponse, Client};
use tests::cluster::{TestCluster, WAIT_TIMEOUT, id_of};

const ACCOUNTS: &str = "/api/v1/service-accounts";

/// Requests an access token at one replica, with the account's own credentials alone.
async fn token_at(cluster: &TestCluster, replica: usize, id: &str, secret: &str) -> ApiResponse {
    let base = cluster.replicas[replica].public_url();
    let client = Client::new(cluster.authority.certificate_path(), &base, None);
    let form = [("grant_type", "client_credentials"), ("client_id", id), ("client_secret", secret)];
    client.send(client.request(Method::POST, &format!("{ACCOUNTS}/token")).form(&form)).await
}

fn text(value: &Value, name: &str) -> String {
    value[name].as_str().unwrap_or_else(|| panic!("no {name} in {value}")).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_key_is_refused_by_every_replica_from_the_response_on() {
    let mut cluster =
        TestCluster::builder().replicas(2).policy("auth.service_account_token_ttl_seconds", 300).start().await;
    let account = cluster.user.post(ACCOUNTS, &json!({ "name": "ci" })).await.created();
    let path = format!("{ACCOUNTS}/{}", id_of(&account));
    let key = async || cluster.user.send_once(Method::POST, &format!("{path}/keys"), None).await.created();
    let (old, new) = (key().await, key().await);
    let replicas: Vec<_> = (0..2).map(|index| cluster.at_replica(index, "user")).collect();
    let mut tokens = Vec::new();
    for (replica, key) in [&old, &new, &old].into_iter().enumerate() {
        let answer = token_at(&cluster, replica % 2, &text(&account, "id"), &text(key, "client_secret")).await.ok();
        assert_eq!(answer["expires_in"], 300);
        tokens.push(text(&answer, "access_token"));
    }
    // Issued at one replica, accepted at each.
    for replica in &replicas {
        for token in &tokens {
            replica.as_bearer(token).send_once(Method::GET, "/api/v1/skus", None).await.ok();
        }
    }
    let revoked = cluster.user.send_once(Method::DELETE, &format!("{path}/keys/{}", text(&old, "id")), None).await;
    assert_eq!(revoked.status, StatusCode::NO_CONTENT, "{revoked}");
    for (index, replica) in replicas.iter().enumerate() {
        for (token, holds) in tokens.iter().zip([false, true, false]) {
            let answer = replica.as_bearer(token).send_once(Method::GET, "/api/v1/skus", None).await;
            assert_eq!(answer.status.is_success(), holds, "{answer}");
            if !holds {
                answer.expect_error(401, "unauthenticated");
            }
        }
        let answer = token_at(&cluster, index, &text(&account, "id"), &text(&old, "client_secret")).await;
        answer.expect_error(401, "unauthenticated");
    }
    // The signing key belongs to the cluster, not to a process: a restarted replica has it.
    cluster.kill9_replica(1);
    cluster.restart_replica(1).await;
    cluster.at_replica(1, "user").as_bearer(&tokens[1]).get("/api/v1/skus").await.ok();

    for (what, secret) in [("a revoked key", text(&old, "client_secret")), ("a key", text(&new, "client_secret"))] {
        cluster.register_secret(what, &secret);
        let stored = "SELECT (SELECT count(*) FROM command WHERE reply::text LIKE $1) \
                      + (SELECT count(*) FROM outbox WHERE event::text LIKE $1) \
                      + (SELECT count(*) FROM audit WHERE metadata::text LIKE $1) \
                      + (SELECT count(*) FROM entity WHERE body::text LIKE $1)";
        let found: i64 = sqlx::query_scalar(stored).bind(format!("%{secret}%")).fetch_one(&cluster.pool).await.unwrap();
        assert_eq!(found, 0, "{what} is stored");
    }
    for token in tokens {
        cluster.register_secret("a service account's access token", &token);
    }
    let actions: Vec<String> =
        sqlx::query_scalar("SELECT action FROM audit WHERE target_kind = 'service_account' ORDER BY at")
            .fetch_all(&cluster.pool)
            .await
            .unwrap();
    let expected = [
        "service_accounts.create",
        "service_accounts.add_key",
        "service_accounts.add_key",
        "service_accounts.revoke_key",
    ];
    assert_eq!(actions, expected);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn new_keys_of_the_identity_provider_are_followed_and_can_be_pushed_to_every_replica() {
    let refresh = "refresh-of-a-test-refresh-of-a-test-refresh";
    let mut cluster = TestCluster::builder().replicas(2).variable("INTERNAL_JWKS_REFRESH_TOKEN", refresh).start().await;
    cluster.register_secret("the refresh token", refresh);
    for index in 0..2 {
        cluster.at_replica(index, "user").get("/api/v1/skus").await.ok();
    }
    let before = cluster.identity.key_set_reads();
    // A refresh at one replica reaches the other.
    let answer = cluster
        .at_replica(0, "user")
        .as_bearer(refresh)
        .send_once(Method::POST, "/internal/auth/jwks/refresh", None)
        .await;
    assert_eq!(answer.ok()["keys"], 1);
    let until = std::time::Instant::now() + WAIT_TIMEOUT;
    while cluster.identity.key_set_reads() < before + 2 {
        assert!(std::time::Instant::now() < until, "the other replica was not notified");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    // An unknown key is fetched when a token uses it, once the cool-down has passed; the old one is valid meanwhile.
    let old = cluster.at_replica(1, "user");
    cluster.identity.rotate().unwrap();
    let new = cluster.at_replica(1, "user");
    let until = std::time::Instant::now() + WAIT_TIMEOUT;
    while new.send_once(Method::GET, "/api/v1/skus", None).await.status == StatusCode::UNAUTHORIZED {
        assert!(std::time::Instant::now() < until, "the new key is not believed");
        old.send_once(Method::GET, "/api/v1/skus", None).await.ok();
        tokio::time::sleep(std::time::Duration::from_millis(250)).await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn user_name_that_is_a_nats_wildcard_is_taken_literally() {
    let cluster = TestCluster::builder().replicas(2).start().await;
    for sub in [">", "*", "*.>", "gpuaas.>", "a b", "$JS.API.>"] {
        let mut claims = cluster.identity.claims_of("user").unwrap();
        claims["sub"] = sub.into();
        let token = cluster.identity.mint(&claims).unwrap();
        let client = cluster.user.as_bearer(secrecy::ExposeSecret::expose_secret(&token));
        let key = json!({ "name": "mine", "public_key": tests::cluster::ssh_public_key("x") });
        let made = client.post("/api/v1/ssh-keys", &key).await.created();
        assert_eq!(made["owner_user_id"], sub);
        let listed = client.get("/api/v1/ssh-keys").await.ok();
        assert_eq!(listed["items"].as_array().unwrap().len(), 1, "{sub}: {listed}");
        let account = client.post(ACCOUNTS, &json!({ "name": "mine" })).await.created();
        assert_eq!(account["owner_user_id"], sub);
    }
    cluster.shutdown().await;
}
