//! No secret is kept or told anywhere. Marked secrets are sown through everything that takes one; the world's end then searches
//! every table, every message of NATS, every log and every replica's figures for each of them (invariant I10).
//!
//! Kept as it is, by design, and so not sown here: what people write as names, reasons and statements (where it has the form of a
//! secret it is refused, which is sown here), correlation ids and trace headers.

use reqwest::Method;
use serde_json::{Value, json};
use tests::world::client::answer_to;
use tests::world::hand::{Showing, anonymous};
use tests::world::{World, ssh_public_key};
use uuid::Uuid;

/// A recognisable text that stands nowhere else.
fn mark(world: &mut World, what: &str) -> String {
    let marked = format!("SownSecret{}", Uuid::new_v4().simple());
    world.keep_secret(what, &marked);
    marked
}

#[tokio::test(flavor = "multi_thread")]
async fn no_secret_that_was_handed_in_anywhere_is_kept_or_told() {
    let mut world = World::plan().replicas(2).start().await;
    let node = world.node("h100").await;
    in_headers(&mut world).await;
    as_ssh_keys(&mut world).await;
    in_texts(&mut world).await;
    in_wrong_places(&mut world).await;
    as_enrollment(&mut world).await;
    as_service_accounts(&mut world).await;
    // And the main job, whose own secrets the world knows.
    let allocation = world.rent("h100", 2).await;
    allocation.expect_state("active").await;
    allocation.release().await;
    allocation.expect_state("released").await;
    node.expect_all_free().await;
    world.end().await;
}

async fn in_headers(world: &mut World) {
    for (what, scheme) in [("a bearer token", "Bearer "), ("a basic password", "Basic "), ("a bare token", "")] {
        let marked = mark(world, what);
        for path in ["/api/v1/allocations", "/api/v1/admin/nodes", "/api/v1/nothing", "/metrics"] {
            let request =
                world.stranger().request(Method::GET, path).header("Authorization", format!("{scheme}{marked}"));
            world.stranger().send(request).await;
        }
    }
    let jwt = format!("eyJhbGciOiJub25lIn0.{}.", mark(world, "a JWT's payload"));
    world.stranger().as_bearer(&jwt).once(Method::GET, "/api/v1/skus", None).await.refused(401, "unauthenticated");
    for name in ["Cookie", "X-Api-Key", "Proxy-Authorization", "Client-Cert", "X-Forwarded-Client-Cert", "Referer"] {
        let marked = mark(world, name);
        let request = world.user.request(Method::GET, "/api/v1/allocations").header(name, format!("a={marked}"));
        world.user.send(request).await.ok();
    }
    let key = mark(world, "an Idempotency-Key");
    let body = json!({ "name": "laptop", "public_key": ssh_public_key("laptop") });
    for expected in [201, 201, 422] {
        let body =
            if expected == 422 { json!({ "name": "other", "public_key": ssh_public_key("x") }) } else { body.clone() };
        let request = world.user.request(Method::POST, "/api/v1/ssh-keys").header("Idempotency-Key", &key).json(&body);
        assert_eq!(world.user.send(request).await.status.as_u16(), expected);
    }
    let long = format!("{}{}", mark(world, "an Idempotency-Key that is too long"), "x".repeat(255));
    let request = world.user.request(Method::POST, "/api/v1/ssh-keys").header("Idempotency-Key", long).json(&body);
    world.user.send(request).await.refused(400, "invalid_request");
}

async fn as_ssh_keys(world: &mut World) {
    let comment = mark(world, "an SSH key's comment");
    let body = json!({ "name": "desk", "public_key": ssh_public_key(&comment) });
    world.user.post("/api/v1/ssh-keys", &body).await.created();
    for (what, text) in [
        ("a private key", "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----\n"),
        ("a PEM key", "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----"),
        ("a PuTTY key", "PuTTY-User-Key-File-3: ssh-ed25519\nPrivate-Lines: 1\n{}"),
        ("an option", "environment=\"TOKEN={}\" ssh-ed25519 AAAA"),
        ("a key that is none", "ssh-ed25519 {}"),
    ] {
        let text = text.replace("{}", &mark(world, what));
        let answer =
            world.user.once(Method::POST, "/api/v1/ssh-keys", Some(&json!({ "name": "x", "public_key": text }))).await;
        answer.refused(400, "invalid_request");
        let mut node = tests::world::node_body("sown", "h100", 8);
        node["ssh_public_key"] = json!(text);
        let answer = world.admin.once(Method::POST, "/api/v1/admin/nodes", Some(&node)).await;
        answer.refused(400, "invalid_request");
    }
}

/// What people write is kept, unless it has the form of a secret.
async fn in_texts(world: &mut World) {
    let node = world.register("h100").await;
    for (what, text) in [
        ("an enrollment token as a reason", "gpuenr_{}AAAAAAA"),
        ("a JWT as a reason", "eyJhbGciOiJSUzI1NiJ9.{}.c2ln"),
        ("a bearer header as a reason", "curl -H 'Authorization: Bearer {}'"),
        ("a URL's password as a reason", "see https://ann:{}@example.com/"),
        ("a private key as a reason", "-----BEGIN PRIVATE KEY----- {}"),
    ] {
        let text = text.replace("{}", &mark(world, what));
        let path = format!("{}/quarantine", node.path());
        world.admin.once(Method::POST, &path, Some(&json!({ "reason": text }))).await.refused(400, "invalid_request");
        let named = json!({ "name": text, "public_key": ssh_public_key("n") });
        world.user.once(Method::POST, "/api/v1/ssh-keys", Some(&named)).await.refused(400, "invalid_request");
    }
}

async fn in_wrong_places(world: &mut World) {
    let marked = mark(world, "a value of the wrong type");
    let bodies = [
        json!({ "sku": { "password": marked }, "gpu_count": 1 }),
        json!({ "sku": "h100", "gpu_count": marked }),
        json!({ "sku": "h100", "gpu_count": 1, "password": marked }),
        json!({ "sku": format!("https://ann:{marked}@h"), "gpu_count": 1 }),
        json!([marked]),
    ];
    for body in bodies {
        world.user.once(Method::POST, "/api/v1/allocations", Some(&body)).await.refused(400, "invalid_request");
    }
    let mut node = tests::world::node_body("sown", "h100", 8);
    node["host"] = json!(format!("ann:{}@example.com", mark(world, "a password in a host")));
    world.admin.once(Method::POST, "/api/v1/admin/nodes", Some(&node)).await.refused(400, "invalid_request");
    for query in ["access_token", "page_token", "state", "sku"] {
        let marked = mark(world, query);
        world.user.once(Method::GET, &format!("/api/v1/allocations?{query}={marked}%20"), None).await;
    }
}

async fn as_enrollment(world: &mut World) {
    let node = world.register("h100").await;
    let bundle = world.bundle(&node).await;
    let http = anonymous(&bundle);
    let enroll = format!("{}/internal/v1/nodes/{}/enroll", world.node_url(), node.id);
    let (honest, key) = Showing::honest(&bundle, 8);
    world.keep_secret("an agent's private key", key.serialize_pem().lines().nth(1).unwrap());
    let wrong = |value: Value, field: &str| {
        let mut body = honest.body();
        body[field] = value;
        body
    };
    let marked = mark(world, "a token of the right form");
    let padded = format!("gpuenr_{marked}A");
    assert_eq!(padded.len(), 7 + 43);
    for token in [padded, mark(world, "a token of no form")] {
        let answer = answer_to(http.post(&enroll).json(&wrong(json!(token), "enrollment_token"))).await.unwrap();
        answer.refused(401, "enrollment_rejected");
        assert!(!answer.text.contains(&marked), "{answer}");
    }
    let pem =
        format!("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n", mark(world, "a key as a request"));
    answer_to(http.post(&enroll).json(&wrong(json!(pem), "csr_pem"))).await.unwrap().refused(400, "invalid_request");
    // The true cause is kept, the token is not.
    let rows = world.audit_of(node.id).await;
    let refused =
        rows.iter().find(|(_, action, ..)| action == "nodes.refuse_enrollment").expect("a refusal is audited");
    assert_eq!(
        (refused.0.as_str(), refused.2["cause"].as_str()),
        (format!("node:{}", node.id).as_str(), Some("the enrollment token does not hold: it is another token"))
    );
}

/// Keys that are made are told once; keys that are wrong are told nowhere.
async fn as_service_accounts(world: &mut World) {
    let account = world.user.post("/api/v1/service-accounts", &json!({ "name": "ci" })).await.created();
    let id = tests::world::id_of(&account);
    let path = format!("/api/v1/service-accounts/{id}/keys");
    let key = world.user.once(Method::POST, &path, Some(&json!({}))).await.created();
    let secret = key["client_secret"].as_str().expect("a key is shown once").to_owned();
    world.keep_secret("a service account's key", &secret);
    let by = world.stranger();
    let ask = |secret: &str| {
        let form = [("grant_type", "client_credentials")];
        by.request(Method::POST, "/api/v1/service-accounts/token").basic_auth(id, Some(secret)).form(&form)
    };
    let granted = by.send(ask(&secret)).await.ok();
    world.keep_secret("a service account's access token", granted["access_token"].as_str().expect("a token"));
    for (what, form) in [("a key of the right form", "gpusak_{}A"), ("a key of no form", "{}")] {
        let marked = mark(world, what);
        let answer = by.send(ask(&form.replace("{}", &marked))).await;
        assert!(answer.status.is_client_error() && !answer.text.contains(&marked), "{answer}");
    }
    let marked = mark(world, "a password in a form");
    let form = [("grant_type", "password"), ("username", "ann"), ("password", marked.as_str())];
    let request = by.request(Method::POST, "/api/v1/service-accounts/token").form(&form);
    assert!(by.send(request).await.status.is_client_error());
    let refresh = by.as_bearer(&mark(world, "a wrong refresh token"));
    assert!(refresh.once(Method::POST, "/internal/auth/jwks/refresh", None).await.status.is_client_error());
}
