//! No submitted secret is stored or shown. Marked secrets are sent to every input that takes one; the final checks then search
//! every table, every message of NATS, every log and every replica's metrics for each of them (invariant I10).
//!
//! Stored as they are, by design, and so not sent here: names, reasons and statements that users write (text in the form of a
//! secret is refused, which is tested here), correlation ids and trace headers.

use reqwest::Method;
use serde_json::{Value, json};
use tests::cluster::client::send_request;
use tests::cluster::fake_agent::{EnrollmentAttempt, anonymous};
use tests::cluster::{TestCluster, ssh_public_key};
use uuid::Uuid;

/// A recognizable text that occurs nowhere else.
fn mark(cluster: &mut TestCluster, what: &str) -> String {
    let marked = format!("SownSecret{}", Uuid::new_v4().simple());
    cluster.register_secret(what, &marked);
    marked
}

#[tokio::test(flavor = "multi_thread")]
async fn submitted_secrets_are_stored_and_shown_nowhere() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let node = cluster.node("h100").await;
    send_in_headers(&mut cluster).await;
    send_as_ssh_keys(&mut cluster).await;
    send_in_texts(&mut cluster).await;
    send_in_wrong_fields(&mut cluster).await;
    send_in_enrollment(&mut cluster).await;
    send_in_service_accounts(&mut cluster).await;
    // The first rental, whose secrets are registered by the cluster.
    let allocation = cluster.rent_active("h100", 2).await;
    allocation.release_fully().await;
    node.expect_all_free().await;
    cluster.shutdown().await;
}

async fn send_in_headers(cluster: &mut TestCluster) {
    for (what, scheme) in [("a bearer token", "Bearer "), ("a basic password", "Basic "), ("a bare token", "")] {
        let marked = mark(cluster, what);
        for path in ["/api/v1/allocations", "/api/v1/admin/nodes", "/api/v1/nothing", "/metrics"] {
            let request = cluster
                .anonymous_client()
                .request(Method::GET, path)
                .header("Authorization", format!("{scheme}{marked}"));
            cluster.anonymous_client().send(request).await;
        }
    }
    let jwt = format!("eyJhbGciOiJub25lIn0.{}.", mark(cluster, "a JWT's payload"));
    cluster
        .anonymous_client()
        .as_bearer(&jwt)
        .send_once(Method::GET, "/api/v1/skus", None)
        .await
        .expect_error(401, "unauthenticated");
    for name in ["Cookie", "X-Api-Key", "Proxy-Authorization", "Client-Cert", "X-Forwarded-Client-Cert", "Referer"] {
        let marked = mark(cluster, name);
        let request = cluster.user.request(Method::GET, "/api/v1/allocations").header(name, format!("a={marked}"));
        cluster.user.send(request).await.ok();
    }
    let key = mark(cluster, "an Idempotency-Key");
    let body = json!({ "name": "laptop", "public_key": ssh_public_key("laptop") });
    for expected in [201, 201, 422] {
        let body =
            if expected == 422 { json!({ "name": "other", "public_key": ssh_public_key("x") }) } else { body.clone() };
        let request =
            cluster.user.request(Method::POST, "/api/v1/ssh-keys").header("Idempotency-Key", &key).json(&body);
        assert_eq!(cluster.user.send(request).await.status.as_u16(), expected);
    }
    let long = format!("{}{}", mark(cluster, "an Idempotency-Key that is too long"), "x".repeat(255));
    let request = cluster.user.request(Method::POST, "/api/v1/ssh-keys").header("Idempotency-Key", long).json(&body);
    cluster.user.send(request).await.expect_error(400, "invalid_request");
}

async fn send_as_ssh_keys(cluster: &mut TestCluster) {
    let comment = mark(cluster, "an SSH key's comment");
    let body = json!({ "name": "desk", "public_key": ssh_public_key(&comment) });
    cluster.user.post("/api/v1/ssh-keys", &body).await.created();
    for (what, text) in [
        ("a private key", "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----\n"),
        ("a PEM key", "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----"),
        ("a PuTTY key", "PuTTY-User-Key-File-3: ssh-ed25519\nPrivate-Lines: 1\n{}"),
        ("an option", "environment=\"TOKEN={}\" ssh-ed25519 AAAA"),
        ("a key that is none", "ssh-ed25519 {}"),
    ] {
        let text = text.replace("{}", &mark(cluster, what));
        let answer = cluster
            .user
            .send_once(Method::POST, "/api/v1/ssh-keys", Some(&json!({ "name": "x", "public_key": text })))
            .await;
        answer.expect_error(400, "invalid_request");
        let mut node = tests::cluster::node_body("sown", "h100", 8);
        node["ssh_public_key"] = json!(text);
        let answer = cluster.admin.send_once(Method::POST, "/api/v1/admin/nodes", Some(&node)).await;
        answer.expect_error(400, "invalid_request");
    }
}

/// Free text is stored, unless it has the form of a secret.
async fn send_in_texts(cluster: &mut TestCluster) {
    let node = cluster.register("h100").await;
    for (what, text) in [
        ("an enrollment token as a reason", "gpuenr_{}AAAAAAA"),
        ("a JWT as a reason", "eyJhbGciOiJSUzI1NiJ9.{}.c2ln"),
        ("a bearer header as a reason", "curl -H 'Authorization: Bearer {}'"),
        ("a URL's password as a reason", "see https://ann:{}@example.com/"),
        ("a private key as a reason", "-----BEGIN PRIVATE KEY----- {}"),
        ("a PuTTY key as a reason", "PuTTY-User-Key-File-3: ssh-ed25519 {}"),
    ] {
        let text = text.replace("{}", &mark(cluster, what));
        let path = format!("{}/quarantine", node.path());
        cluster
            .admin
            .send_once(Method::POST, &path, Some(&json!({ "reason": text })))
            .await
            .expect_error(400, "invalid_request");
        let named = json!({ "name": text, "public_key": ssh_public_key("n") });
        cluster
            .user
            .send_once(Method::POST, "/api/v1/ssh-keys", Some(&named))
            .await
            .expect_error(400, "invalid_request");
    }
}

async fn send_in_wrong_fields(cluster: &mut TestCluster) {
    let marked = mark(cluster, "a value of the wrong type");
    let bodies = [
        json!({ "sku": { "password": marked }, "gpu_count": 1 }),
        json!({ "sku": "h100", "gpu_count": marked }),
        json!({ "sku": "h100", "gpu_count": 1, "password": marked }),
        json!({ "sku": format!("https://ann:{marked}@h"), "gpu_count": 1 }),
        json!([marked]),
    ];
    for body in bodies {
        cluster
            .user
            .send_once(Method::POST, "/api/v1/allocations", Some(&body))
            .await
            .expect_error(400, "invalid_request");
    }
    let mut node = tests::cluster::node_body("sown", "h100", 8);
    node["host"] = json!(format!("ann:{}@example.com", mark(cluster, "a password in a host")));
    cluster
        .admin
        .send_once(Method::POST, "/api/v1/admin/nodes", Some(&node))
        .await
        .expect_error(400, "invalid_request");
    for query in ["access_token", "page_token", "state", "sku"] {
        let marked = mark(cluster, query);
        cluster.user.send_once(Method::GET, &format!("/api/v1/allocations?{query}={marked}%20"), None).await;
    }
}

async fn send_in_enrollment(cluster: &mut TestCluster) {
    let (node, bundle) = cluster.registered("h100").await;
    let http = anonymous(&bundle);
    let enroll = format!("{}/internal/v1/nodes/{}/enroll", cluster.node_url(), node.id);
    let (honest, key) = EnrollmentAttempt::valid(&bundle, 8);
    cluster.register_secret("an agent's private key", key.serialize_pem().lines().nth(1).unwrap());
    let wrong = |value: Value, field: &str| {
        let mut body = honest.body();
        body[field] = value;
        body
    };
    let marked = mark(cluster, "a token of the right form");
    let padded = format!("gpuenr_{marked}A");
    assert_eq!(padded.len(), 7 + 43);
    for token in [padded, mark(cluster, "a token of no form")] {
        let answer = send_request(http.post(&enroll).json(&wrong(json!(token), "enrollment_token"))).await.unwrap();
        answer.expect_error(401, "enrollment_rejected");
        assert!(!answer.text.contains(&marked), "{answer}");
    }
    let pem =
        format!("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n", mark(cluster, "a key as a request"));
    send_request(http.post(&enroll).json(&wrong(json!(pem), "csr_pem")))
        .await
        .unwrap()
        .expect_error(400, "invalid_request");
    // The cause is stored, the token is not.
    let rows = cluster.audit_of(node.id).await;
    let refused =
        rows.iter().find(|(_, action, ..)| action == "nodes.refuse_enrollment").expect("a refusal is audited");
    assert_eq!(
        (refused.0.as_str(), refused.2["cause"].as_str()),
        (format!("node:{}", node.id).as_str(), Some("the enrollment token does not hold: it is another token"))
    );
}

/// New keys are shown once; wrong keys are shown nowhere.
async fn send_in_service_accounts(cluster: &mut TestCluster) {
    let account = cluster.user.post("/api/v1/service-accounts", &json!({ "name": "ci" })).await.created();
    let id = tests::cluster::id_of(&account);
    let path = format!("/api/v1/service-accounts/{id}/keys");
    let key = cluster.user.send_once(Method::POST, &path, Some(&json!({}))).await.created();
    let secret = key["client_secret"].as_str().expect("a key is shown once").to_owned();
    cluster.register_secret("a service account's key", &secret);
    let by = cluster.anonymous_client();
    let ask = |secret: &str| {
        let form = [("grant_type", "client_credentials")];
        by.request(Method::POST, "/api/v1/service-accounts/token").basic_auth(id, Some(secret)).form(&form)
    };
    let granted = by.send(ask(&secret)).await.ok();
    cluster.register_secret("a service account's access token", granted["access_token"].as_str().expect("a token"));
    for (what, form) in [("a key of the right form", "gpusak_{}A"), ("a key of no form", "{}")] {
        let marked = mark(cluster, what);
        let answer = by.send(ask(&form.replace("{}", &marked))).await;
        assert!(answer.status.is_client_error() && !answer.text.contains(&marked), "{answer}");
    }
    let marked = mark(cluster, "a password in a form");
    let form = [("grant_type", "password"), ("username", "ann"), ("password", marked.as_str())];
    let request = by.request(Method::POST, "/api/v1/service-accounts/token").form(&form);
    assert!(by.send(request).await.status.is_client_error());
    let refresh = by.as_bearer(&mark(cluster, "a wrong refresh token"));
    assert!(refresh.send_once(Method::POST, "/internal/auth/jwks/refresh", None).await.status.is_client_error());
}
