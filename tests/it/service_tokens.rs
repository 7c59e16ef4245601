//! The keys that sign service accounts' tokens, exchanged while programs go on asking every replica.

use crate::keys::gpuctl_keys;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tests::world::client::{Answer, Client};
use tests::world::{World, id_of};

const ACCOUNTS: &str = "/api/v1/service-accounts";
const KEYS: &str = "/api/v1/admin/keys";

/// A program with a key of `user`'s.
pub(crate) struct Program {
    id: String,
    secret: String,
}

impl Program {
    pub(crate) async fn made(world: &mut World) -> Self {
        let account = world.user.post(ACCOUNTS, &json!({ "name": "ci" })).await.created();
        let keys = format!("{ACCOUNTS}/{}/keys", id_of(&account));
        let key = world.user.once(Method::POST, &keys, None).await.created();
        let text = |value: &Value, name: &str| value[name].as_str().unwrap().to_owned();
        let program = Self { id: text(&account, "id"), secret: text(&key, "client_secret") };
        world.keep_secret("a service account's key", &program.secret);
        program
    }

    /// A token from this replica.
    pub(crate) async fn token(&self, world: &World, replica: usize) -> String {
        let base = world.replicas[replica].public_url();
        let client = Client::new(world.authority.certificate_path(), &base, None);
        let form = [("grant_type", "client_credentials"), ("client_id", &self.id), ("client_secret", &self.secret)];
        let answer = client.send(client.request(Method::POST, &format!("{ACCOUNTS}/token")).form(&form)).await.ok();
        answer["access_token"].as_str().unwrap().to_owned()
    }
}

/// What each replica says to whoever shows the token.
pub(crate) async fn shown(world: &World, token: &str) -> Vec<StatusCode> {
    let mut statuses = Vec::new();
    for replica in 0..world.replicas.len() {
        let by = world.at_replica(replica, "user").as_bearer(token);
        statuses.push(by.once(Method::GET, "/api/v1/skus", None).await.status);
    }
    statuses
}

async fn step(world: &World, step: &str, key: &str, force: bool) -> Answer {
    let body = json!({ "purpose": "service_tokens", "key_id": key, "reason": "a test wants it", "force": force });
    world.admin.once(Method::POST, &format!("{KEYS}/{step}"), Some(&body)).await
}

async fn in_phase(world: &World, phase: &str) -> String {
    let all = world.admin.get(KEYS).await.ok();
    let set = all["sets"].as_array().unwrap().iter().find(|set| set["purpose"] == "service_tokens").unwrap().clone();
    let key = set["keys"].as_array().unwrap().iter().find(|key| key["phase"] == phase).cloned();
    key.unwrap_or_else(|| panic!("none is {phase}: {set}"))["key_id"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_good_in_its_signer_s_grace_and_refused_by_every_replica_once_that_is_retired() {
    let mut world = World::plan().replicas(2).start().await;
    let program = Program::made(&mut world).await;
    let ok = vec![StatusCode::OK; 2];
    let by_first = program.token(&world, 0).await;
    let first = in_phase(&world, "active").await;
    let second =
        gpuctl_keys(&world, &["stage", "service-tokens", "--reason", "a test wants it"]).await.trim().to_owned();
    assert_eq!((in_phase(&world, "staged").await.as_str(), shown(&world, &by_first).await), (&*second, ok.clone()));

    step(&world, "activate", &second, false).await.ok();
    let by_second = [program.token(&world, 0).await, program.token(&world, 1).await];
    for token in by_second.iter().chain([&by_first]) {
        assert_eq!(shown(&world, token).await, ok);
    }
    step(&world, "retire", &first, false).await.refused(409, "state_conflict");
    // Who starts anew in the middle knows both.
    world.kill9_replica(1);
    world.restart_replica(1).await;
    assert_eq!(shown(&world, &by_first).await, ok);

    step(&world, "retire", &first, true).await.ok();
    assert_eq!(shown(&world, &by_first).await, [StatusCode::UNAUTHORIZED; 2], "from the answer on");
    for token in &by_second {
        assert_eq!(shown(&world, token).await, ok);
    }
    for token in by_second.iter().chain([&by_first]) {
        world.keep_secret("a service account's access token", token);
    }
    let actions: Vec<String> =
        sqlx::query_scalar("SELECT action FROM audit WHERE metadata->>'purpose' = 'service_tokens' ORDER BY at")
            .fetch_all(&world.pool)
            .await
            .unwrap();
    assert_eq!(actions, ["keys.stage", "keys.activate", "keys.retire"]);
    world.end().await;
}
