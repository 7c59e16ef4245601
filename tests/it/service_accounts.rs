//! Service accounts over several replicas, and what happens where keys change.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tests::world::client::{Answer, Client};
use tests::world::{World, id_of};

const ACCOUNTS: &str = "/api/v1/service-accounts";

/// Asks one replica for an access token, with nothing but the account's own credentials.
async fn token_at(world: &World, replica: usize, id: &str, secret: &str) -> Answer {
    let base = world.replicas[replica].public_url();
    let client = Client::new(world.authority.certificate_path(), &base, None);
    let form = [("grant_type", "client_credentials"), ("client_id", id), ("client_secret", secret)];
    client.send(client.request(Method::POST, &format!("{ACCOUNTS}/token")).form(&form)).await
}

fn text(value: &Value, name: &str) -> String {
    value[name].as_str().unwrap_or_else(|| panic!("no {name} in {value}")).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_key_is_refused_by_every_replica_from_the_moment_of_the_answer() {
    let mut world = World::plan().replicas(3).policy("auth.service_account_token_ttl_seconds", 300).start().await;
    let account = world.user.post(ACCOUNTS, &json!({ "name": "ci" })).await.created();
    let path = format!("{ACCOUNTS}/{}", id_of(&account));
    let key = async || world.user.once(Method::POST, &format!("{path}/keys"), None).await.created();
    let (old, new) = (key().await, key().await);
    let replicas: Vec<_> = (0..3).map(|index| world.at_replica(index, "user")).collect();
    let mut tokens = Vec::new();
    for (replica, key) in [&old, &new, &old].into_iter().enumerate() {
        let answer = token_at(&world, replica, &text(&account, "id"), &text(key, "client_secret")).await.ok();
        assert_eq!(answer["expires_in"], 300);
        tokens.push(text(&answer, "access_token"));
    }
    // Issued at one, believed at each.
    for replica in &replicas {
        for token in &tokens {
            replica.as_bearer(token).once(Method::GET, "/api/v1/skus", None).await.ok();
        }
    }
    let revoked = world.user.once(Method::DELETE, &format!("{path}/keys/{}", text(&old, "id")), None).await;
    assert_eq!(revoked.status, StatusCode::NO_CONTENT, "{revoked}");
    for (index, replica) in replicas.iter().enumerate() {
        for (token, holds) in tokens.iter().zip([false, true, false]) {
            let answer = replica.as_bearer(token).once(Method::GET, "/api/v1/skus", None).await;
            assert_eq!(answer.status.is_success(), holds, "{answer}");
            if !holds {
                answer.refused(401, "unauthenticated");
            }
        }
        let answer = token_at(&world, index, &text(&account, "id"), &text(&old, "client_secret")).await;
        answer.refused(401, "unauthenticated");
    }
    // What signs them is the cluster's, not a process's: a replica that starts anew knows it.
    world.kill9_replica(1);
    world.restart_replica(1).await;
    world.at_replica(1, "user").as_bearer(&tokens[1]).get("/api/v1/skus").await.ok();

    for (what, secret) in [("a revoked key", text(&old, "client_secret")), ("a key", text(&new, "client_secret"))] {
        world.keep_secret(what, &secret);
        let stored = "SELECT (SELECT count(*) FROM command WHERE reply::text LIKE $1) \
                      + (SELECT count(*) FROM outbox WHERE event::text LIKE $1) \
                      + (SELECT count(*) FROM audit WHERE metadata::text LIKE $1) \
                      + (SELECT count(*) FROM entity WHERE body::text LIKE $1)";
        let found: i64 = sqlx::query_scalar(stored).bind(format!("%{secret}%")).fetch_one(&world.pool).await.unwrap();
        assert_eq!(found, 0, "{what} is stored");
    }
    for token in tokens {
        world.keep_secret("a service account's access token", &token);
    }
    let actions: Vec<String> =
        sqlx::query_scalar("SELECT action FROM audit WHERE target_kind = 'service_account' ORDER BY at")
            .fetch_all(&world.pool)
            .await
            .unwrap();
    let expected = [
        "service_accounts.create",
        "service_accounts.add_key",
        "service_accounts.add_key",
        "service_accounts.revoke_key",
    ];
    assert_eq!(actions, expected);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_that_changes_its_keys_is_followed_and_can_be_announced_to_every_replica() {
    let refresh = "refresh-of-a-test-refresh-of-a-test-refresh";
    let mut world = World::plan().replicas(2).variable("INTERNAL_JWKS_REFRESH_TOKEN", refresh).start().await;
    world.keep_secret("the refresh token", refresh);
    for index in 0..2 {
        world.at_replica(index, "user").get("/api/v1/skus").await.ok();
    }
    let before = world.identity.key_set_reads();
    // One word to one replica reaches the other.
    let answer =
        world.at_replica(0, "user").as_bearer(refresh).once(Method::POST, "/internal/auth/jwks/refresh", None).await;
    assert_eq!(answer.ok()["keys"], 1);
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while world.identity.key_set_reads() < before + 2 {
        assert!(std::time::Instant::now() < until, "the other replica was not told");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    // A key that nobody announced is asked for when it is met, once the cool-down has passed; the old one holds meanwhile.
    let old = world.at_replica(1, "user");
    world.identity.rotate().unwrap();
    let new = world.at_replica(1, "user");
    while new.once(Method::GET, "/api/v1/skus", None).await.status == StatusCode::UNAUTHORIZED {
        assert!(std::time::Instant::now() < until, "the new key is not believed");
        old.once(Method::GET, "/api/v1/skus", None).await.ok();
        tokio::time::sleep(std::time::Duration::from_millis(250)).await;
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_a_wildcard_of_nats_is_a_name_like_others() {
    let world = World::plan().replicas(2).start().await;
    for sub in [">", "*", "*.>", "gpuaas.>", "a b", "$JS.API.>"] {
        let mut claims = world.identity.claims_of("user").unwrap();
        claims["sub"] = sub.into();
        let token = world.identity.mint(&claims).unwrap();
        let client = world.user.as_bearer(secrecy::ExposeSecret::expose_secret(&token));
        let key = json!({ "name": "mine", "public_key": tests::world::ssh_public_key("x") });
        let made = client.post("/api/v1/ssh-keys", &key).await.created();
        assert_eq!(made["owner_user_id"], sub);
        let listed = client.get("/api/v1/ssh-keys").await.ok();
        assert_eq!(listed["items"].as_array().unwrap().len(), 1, "{sub}: {listed}");
        let account = client.post(ACCOUNTS, &json!({ "name": "mine" })).await.created();
        assert_eq!(account["owner_user_id"], sub);
    }
    world.end().await;
}
