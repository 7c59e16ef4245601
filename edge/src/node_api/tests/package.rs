use super::agent::Agent;
use super::harness::NodeApiHarness;
use crate::outbound::package_registry::PackageRegistry;
use crate::outbound::package_registry::fake::FakeRegistry;
use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use domain::node::Request;
use local_servers::pki::Authority;
use reqwest::Method;
use uuid::Uuid;

const DIGITS: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// A node API that relays a registry with one manifest, its signature and one blob.
struct Relay {
    harness: NodeApiHarness,
    registry: FakeRegistry,
    _folder: tempfile::TempDir,
}

impl Relay {
    async fn start() -> Self {
        crate::testing::install_crypto();
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(folder.path()).unwrap();
        let known = ["manifests/sha256:", "manifests/sha256-", "blobs/sha256:"].map(|part| format!("{part}{DIGITS}"));
        let answer = move |path: &str, _: Option<&str>| {
            let part = path.strip_prefix("/v2/gpuaas/agent/").unwrap_or_default();
            match known.contains(&part.trim_end_matches(".sig").to_owned()) {
                true => format!("{{\"part\":\"{part}\"}}").into_response(),
                false => StatusCode::NOT_FOUND.into_response(),
            }
        };
        let registry = FakeRegistry::start(&authority, Box::new(answer)).await;
        let reference = format!("localhost:{}/gpuaas/agent", registry.port).parse().unwrap();
        let client = PackageRegistry::new(&reference, Some(authority.certificate_pem()), None).unwrap();
        Self { harness: NodeApiHarness::relaying(client).await, registry, _folder: folder }
    }

    /// The answer to a node that presents this token: its status, and its code or the part that was relayed.
    async fn by_token(&self, node_id: Uuid, token: &str, part: &str) -> (u16, String) {
        let (path, header) = (format!("/internal/v1/nodes/{node_id}/package/{part}"), format!("Bearer {token}"));
        let client = self.harness.client(&self.harness.tls(None));
        let headers = [("authorization", header.as_str())];
        summary(&self.harness.send_with(&client, Method::GET, &path, &headers, None).await)
    }

    async fn by_certificate(&self, agent: &Agent, part: &str) -> (u16, String) {
        summary(&agent.get(&self.harness, &format!("package/{part}")).await)
    }
}

fn summary(answer: &super::harness::TestResponse) -> (u16, String) {
    let text = answer.body["code"].as_str().or_else(|| answer.body["part"].as_str());
    (answer.status, text.unwrap_or_default().to_owned())
}

fn relayed(part: &str) -> (u16, String) {
    (200, part.to_owned())
}

fn refused(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

#[tokio::test]
async fn node_pulls_by_its_own_unspent_token_or_certificate_and_by_digest_alone() {
    let it = Relay::start().await;
    let (agent, node_id, other) =
        (it.harness.enrolled().await, it.harness.register().await, it.harness.register().await);
    let (token, others) = (it.harness.token(node_id, None).await, it.harness.token(other, None).await);
    let parts = [
        format!("manifests/sha256:{DIGITS}"),
        format!("manifests/sha256-{DIGITS}.sig"),
        format!("blobs/sha256:{DIGITS}"),
    ];
    // A token is presented, not consumed.
    for part in parts.iter().chain(&parts) {
        assert_eq!(it.by_token(node_id, &token, part).await, relayed(part));
        assert_eq!(it.by_certificate(&agent, part).await, relayed(part));
    }
    let served = it.registry.requests().len();

    let part = &parts[2];
    let path = format!("/internal/v1/nodes/{node_id}/package/{part}");
    let anonymous = it.harness.anonymous(Method::GET, &path, None).await;
    assert_eq!(summary(&anonymous), refused(401, "invalid_node_identity"));
    for wrong in [others.as_str(), "gpuenr_x", "x"] {
        assert_eq!(it.by_token(node_id, wrong, part).await, refused(401, "enrollment_rejected"), "{wrong}");
    }
    // A certificate of another node.
    let foreign = it.harness.send(&it.harness.client(&agent.tls), Method::GET, &path, None).await;
    assert_eq!(foreign.status, 401, "{:?}", foreign.body);
    for elsewhere in [
        "manifests/1.0.0".to_owned(),
        "manifests/latest".to_owned(),
        "manifests/sha256-0.sig".to_owned(),
        format!("manifests/sha256-{DIGITS}"),
        format!("manifests/sha256:{}", DIGITS.to_uppercase()),
        "blobs/uploads".to_owned(),
        "blobs/..%2f..%2f_catalog".to_owned(),
        format!("blobs/sha256:{DIGITS}%3fx=1"),
    ] {
        assert_eq!(it.by_token(node_id, &token, &elsewhere).await, refused(400, "invalid_request"), "{elsewhere}");
    }
    assert_eq!(it.registry.requests().len(), served, "none of these reaches the registry");
    let none = format!("blobs/sha256:{}", "0".repeat(64));
    assert_eq!(it.by_token(node_id, &token, &none).await, refused(404, "not_found"));
}

#[tokio::test]
async fn removed_node_pulls_nothing_by_certificate_or_token() {
    let it = Relay::start().await;
    let (agent, node_id) = (it.harness.enrolled().await, it.harness.register().await);
    let token = it.harness.token(node_id, None).await;
    let part = format!("blobs/sha256:{DIGITS}");
    // What refuses is the machine, not the closed connection.
    it.harness.closes.store(false, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(it.by_certificate(&agent, &part).await, relayed(&part));
    for id in [agent.node_id, node_id] {
        it.harness.admin(id, Request::Retire { reason: "test".into(), drain: false }).await;
        it.harness.admin(id, Request::Remove { reason: "test".into() }).await;
    }
    let served = it.registry.requests().len();
    assert_eq!(it.by_certificate(&agent, &part).await, refused(401, "invalid_node_identity"));
    assert_eq!(it.by_token(node_id, &token, &part).await, refused(401, "enrollment_rejected"));
    assert_eq!(it.registry.requests().len(), served);
}

#[tokio::test]
async fn registry_that_is_away_or_not_relayed_is_an_answer_to_the_node() {
    let it = Relay::start().await;
    let agent = it.harness.enrolled().await;
    let part = format!("blobs/sha256:{DIGITS}");
    drop(it.registry);
    let answer = agent.get(&it.harness, &format!("package/{part}")).await;
    answer.refused(503, "service_unavailable");
    assert!(answer.headers.contains_key("retry-after"), "{:?}", answer.headers);
    assert!(
        !answer.body.to_string().contains("gpuaas/agent"),
        "where the registry is concerns the operator: {}",
        answer.body
    );
    let harness = NodeApiHarness::new().await;
    let agent = harness.enrolled().await;
    agent.get(&harness, &format!("package/{part}")).await.refused(404, "not_found");
}
