//! Rotation of the keys that sign service accounts' tokens, while clients use every replica.

use crate::key_rotation::gpuctl_keys;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tests::cluster::client::{ApiResponse, Client};
use tests::cluster::{TestCluster, id_of};

const ACCOUNTS: &str = "/api/v1/service-accounts";
const KEYS: &str = "/api/v1/admin/keys";

/// A client with a service account of `user`.
pub(crate) struct ServiceAccountClient {
    id: String,
    secret: String,
}

impl ServiceAccountClient {
    pub(crate) async fn create(cluster: &mut TestCluster) -> Self {
        let account = cluster.user.post(ACCOUNTS, &json!({ "name": "ci" })).await.created();
        let keys = format!("{ACCOUNTS}/{}/keys", id_of(&account));
        let key = cluster.user.send_once(Method::POST, &keys, None).await.created();
        let text = |value: &Value, name: &str| value[name].as_str().unwrap().to_owned();
        let program = Self { id: text(&account, "id"), secret: text(&key, "client_secret") };
        cluster.register_secret("a service account's key", &program.secret);
        program
    }

    /// A token from this replica.
    pub(crate) async fn token(&self, cluster: &TestCluster, replica: usize) -> String {
        let base = cluster.replicas[replica].public_url();
        let client = Client::new(cluster.authority.certificate_path(), &base, None);
        let form = [("grant_type", "client_credentials"), ("client_id", &self.id), ("client_secret", &self.secret)];
        let answer = client.send(client.request(Method::POST, &format!("{ACCOUNTS}/token")).form(&form)).await.ok();
        answer["access_token"].as_str().unwrap().to_owned()
    }
}

/// The status of each replica's response to a request with the token.
pub(crate) async fn statuses_of(cluster: &TestCluster, token: &str) -> Vec<StatusCode> {
    let mut statuses = Vec::new();
    for replica in 0..cluster.replicas.len() {
        let by = cluster.at_replica(replica, "user").as_bearer(token);
        statuses.push(by.send_once(Method::GET, "/api/v1/skus", None).await.status);
    }
    statuses
}

async fn step(cluster: &TestCluster, step: &str, key: &str, force: bool) -> ApiResponse {
    let body = json!({ "purpose": "service_tokens", "key_id": key, "reason": "a test wants it", "force": force });
    cluster.admin.send_once(Method::POST, &format!("{KEYS}/{step}"), Some(&body)).await
}

async fn key_in_phase(cluster: &TestCluster, phase: &str) -> String {
    let all = cluster.admin.get(KEYS).await.ok();
    let set = all["sets"].as_array().unwrap().iter().find(|set| set["purpose"] == "service_tokens").unwrap().clone();
    let key = set["keys"].as_array().unwrap().iter().find(|key| key["phase"] == phase).cloned();
    key.unwrap_or_else(|| panic!("none is {phase}: {set}"))["key_id"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn token_is_accepted_during_the_grace_of_its_signing_key_and_refused_once_that_is_retired() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let program = ServiceAccountClient::create(&mut cluster).await;
    let ok = vec![StatusCode::OK; 2];
    let by_first = program.token(&cluster, 0).await;
    let first = key_in_phase(&cluster, "active").await;
    let second =
        gpuctl_keys(&cluster, &["stage", "service-tokens", "--reason", "a test wants it"]).await.trim().to_owned();
    assert_eq!(
        (key_in_phase(&cluster, "staged").await.as_str(), statuses_of(&cluster, &by_first).await),
        (&*second, ok.clone())
    );

    step(&cluster, "activate", &second, false).await.ok();
    let by_second = [program.token(&cluster, 0).await, program.token(&cluster, 1).await];
    for token in by_second.iter().chain([&by_first]) {
        assert_eq!(statuses_of(&cluster, token).await, ok);
    }
    step(&cluster, "retire", &first, false).await.expect_error(409, "state_conflict");
    // A replica that restarts in between has both.
    cluster.kill9_replica(1);
    cluster.restart_replica(1).await;
    assert_eq!(statuses_of(&cluster, &by_first).await, ok);

    step(&cluster, "retire", &first, true).await.ok();
    assert_eq!(statuses_of(&cluster, &by_first).await, [StatusCode::UNAUTHORIZED; 2], "from the answer on");
    for token in &by_second {
        assert_eq!(statuses_of(&cluster, token).await, ok);
    }
    for token in by_second.iter().chain([&by_first]) {
        cluster.register_secret("a service account's access token", token);
    }
    let actions: Vec<String> =
        sqlx::query_scalar("SELECT action FROM audit WHERE metadata->>'purpose' = 'service_tokens' ORDER BY at")
            .fetch_all(&cluster.pool)
            .await
            .unwrap();
    assert_eq!(actions, ["keys.stage", "keys.activate", "keys.retire"]);
    cluster.shutdown().await;
}
