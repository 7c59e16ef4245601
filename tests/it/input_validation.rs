//! Invalid input over HTTP is refused in the error envelope, with the right code and a useful message.

use reqwest::Method;
use serde_json::{Value, json};
use tests::cluster::client::{ApiResponse, Client};
use tests::cluster::{REGION, TestCluster, node_body, sku_body};
use uuid::Uuid;

#[tokio::test(flavor = "multi_thread")]
async fn invalid_input_is_refused_in_the_error_envelope_and_changes_nothing() {
    let mut cluster = TestCluster::start().await;
    cluster.offer_sku("h100", 8).await;
    bodies(&cluster).await;
    values(&cluster).await;
    paths_and_methods(&cluster).await;
    identities(&cluster).await;
    node_api(&mut cluster).await;
    // Valid requests are served afterwards.
    let node = cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    allocation.release_fully().await;
    node.expect_all_free().await;
    cluster.shutdown().await;
}

async fn raw(by: &Client, path: &str, body: impl Into<reqwest::Body>) -> ApiResponse {
    let request = by.request(Method::POST, path).header("Idempotency-Key", Uuid::new_v4().to_string());
    by.send(request.header("Content-Type", "application/json").body(body)).await
}

async fn bodies(cluster: &TestCluster) {
    for path in ["/api/v1/allocations", "/api/v1/ssh-keys"] {
        for (what, body) in [
            ("nothing", String::new()),
            ("broken", "{\"sku\": ".to_owned()),
            ("a list", "[]".to_owned()),
            ("null", "null".to_owned()),
            ("two", "{} {}".to_owned()),
            ("not text", "\u{0}\u{1}".to_owned()),
            ("deep", format!("{}{}", "[".repeat(100_000), "]".repeat(100_000))),
        ] {
            let answer = raw(&cluster.user, path, body).await;
            assert_eq!(answer.status.as_u16(), 400, "{what}: {answer}");
            answer.expect_error(400, "invalid_request");
        }
        raw(&cluster.user, path, vec![0xff, 0xfe, 0x7b, 0x7d]).await.expect_error(400, "invalid_request");
        let huge = format!("{{\"name\": \"{}\"}}", "x".repeat(10 << 20));
        raw(&cluster.user, path, huge).await.expect_error(413, "payload_too_large");
        let request = cluster
            .user
            .request(Method::POST, path)
            .header("Idempotency-Key", "k")
            .header("Content-Type", "text/plain");
        cluster.user.send(request.body("{}")).await.expect_error(415, "unsupported_media_type");
    }
    let fine = json!({ "sku": "h100", "gpu_count": 1, "gpu_cuont": 1 });
    let answer = cluster.user.send_once(Method::POST, "/api/v1/allocations", Some(&fine)).await;
    let message = answer.expect_error(400, "invalid_request").body["message"].as_str().unwrap().to_owned();
    assert!(message.contains("gpu_cuont"), "the field is named: {message}");
    // A value in the wrong field may be a secret: it is not repeated.
    let secret = json!({ "sku": { "hunter2-not-to-be-repeated": 1 }, "gpu_count": "hunter3-not-to-be-repeated" });
    let answer = cluster.user.send_once(Method::POST, "/api/v1/allocations", Some(&secret)).await;
    answer.expect_error(400, "invalid_request");
    assert!(!answer.text.contains("hunter3"), "{answer}");
}

async fn values(cluster: &TestCluster) {
    let rent = |change: Value| {
        let mut body = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1 });
        merge(&mut body, change);
        body
    };
    for change in [
        json!({ "gpu_count": 0 }),
        json!({ "gpu_count": -1 }),
        json!({ "gpu_count": 65 }),
        json!({ "gpu_count": 4_294_967_296_u64 }),
        json!({ "gpu_count": 1e300 }),
        json!({ "gpu_count": 1.5 }),
        json!({ "gpu_count": "1" }),
        json!({ "gpu_count": null }),
        json!({ "sku": 7 }),
        json!({ "sku": "" }),
        json!({ "sku": "no-such-sku" }),
        json!({ "sku": "h100\u{0}" }),
        json!({ "sku": Uuid::now_v7() }),
        json!({ "node_id": "not-a-uuid" }),
        json!({ "ssh_key_ids": ["not-a-uuid"] }),
        json!({ "ssh_key_ids": [Uuid::now_v7()] }),
        json!({ "queue_seconds": -5 }),
        json!({ "queue_seconds": 99_999_999_999_u64 }),
        json!({ "queue_seconds": 604_801 }),
    ] {
        let answer = cluster.user.send_once(Method::POST, "/api/v1/allocations", Some(&rent(change.clone()))).await;
        assert!(matches!(answer.status.as_u16(), 400 | 404), "{change}: {answer}");
        answer.expect_error_envelope();
    }
    for change in [
        json!({ "port": 0 }),
        json!({ "port": 65_536 }),
        json!({ "port": -22 }),
        json!({ "gpus_total": 7 }),
        json!({ "gpus_total": -8 }),
        json!({ "sku": "free text" }),
        json!({ "region_code": "elsewhere-1" }),
        json!({ "onboarding_mode": "magic" }),
        json!({ "host": "" }),
        json!({ "host": "a b" }),
        json!({ "host": "http://example.com/" }),
        json!({ "host": "x".repeat(5000) }),
        json!({ "ssh_public_key": "ssh-ed25519 nonsense" }),
        json!({ "ssh_public_key": "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----" }),
        json!({ "ssh_username": "root; rm -rf /" }),
        json!({ "probe": "yes" }),
    ] {
        let mut body = node_body("bad", "h100", 8);
        merge(&mut body, change.clone());
        let answer = cluster.admin.send_once(Method::POST, "/api/v1/admin/nodes", Some(&body)).await;
        assert_eq!(answer.status.as_u16(), 400, "{change}: {answer}");
        answer.expect_error(400, "invalid_request");
    }
    for change in [
        json!({ "name": "" }),
        json!({ "gpu": { "vendor": "NVIDIA", "model": "H100", "memory_mib": -1, "count": 8 } }),
        json!({ "gpu": "H100" }),
        json!({ "price": { "currency": "USD", "amount_minor_per_gpu_hour": -250 } }),
        json!({ "price": { "currency": "money", "amount_minor_per_gpu_hour": 250 } }),
        json!({ "allowed_regions": "everywhere" }),
        json!({ "memory_mib": 1.0e40 }),
    ] {
        let mut body = sku_body("bad", 8);
        merge(&mut body, change.clone());
        let answer = cluster.admin.send_once(Method::POST, "/api/v1/admin/skus", Some(&body)).await;
        assert_eq!(answer.status.as_u16(), 400, "{change}: {answer}");
        answer.expect_error(400, "invalid_request");
    }
    for key in [
        "ssh-dss AAAAB3NzaC1kc3MAAACBAP8",
        "command=\"/bin/sh\" ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHljwaG/IIDOAyX8sBd6dFhjytL6vAi5Gh4CqwpunUqG x",
        "ssh-ed25519",
        "",
    ] {
        let body = json!({ "name": "bad", "public_key": key });
        let answer = cluster.user.send_once(Method::POST, "/api/v1/ssh-keys", Some(&body)).await;
        answer.expect_error(400, "invalid_request");
    }
}

fn merge(body: &mut Value, change: Value) {
    let Value::Object(change) = change else { panic!("a change is an object") };
    body.as_object_mut().unwrap().extend(change);
}

async fn paths_and_methods(cluster: &TestCluster) {
    let unknown = Uuid::now_v7();
    for path in [
        "/",
        "/api",
        "/api/v1",
        "/api/v2/allocations",
        "/api/v1/nothing",
        "/internal/v1/nodes",
        "/../etc/passwd",
        "/%00",
    ] {
        let answer = cluster.admin.send_once(Method::GET, path, None).await;
        answer.expect_error(404, "not_found");
    }
    for path in [
        format!("/api/v1/allocations/{unknown}"),
        format!("/api/v1/admin/nodes/{unknown}"),
        format!("/api/v1/admin/skus/{unknown}"),
        format!("/api/v1/admin/runtime/entities/node/{unknown}"),
    ] {
        cluster.admin.send_once(Method::GET, &path, None).await.expect_error(404, "not_found");
    }
    for id in ["not-a-uuid", "7", "00000000-0000-0000-0000-00000000000", "%F0%9F%92%A9"] {
        for path in [format!("/api/v1/allocations/{id}"), format!("/api/v1/admin/nodes/{id}")] {
            let answer = cluster.admin.send_once(Method::GET, &path, None).await;
            assert!(matches!(answer.status.as_u16(), 400 | 404), "{answer}");
            answer.expect_error_envelope();
        }
    }
    for (method, path) in [
        (Method::DELETE, "/api/v1/allocations"),
        (Method::PUT, "/api/v1/admin/nodes"),
        (Method::POST, "/api/v1/healthz"),
        (Method::PATCH, "/api/v1/ssh-keys"),
    ] {
        let answer = cluster.admin.send_once(method, path, Some(&json!({}))).await;
        answer.expect_error(405, "method_not_allowed");
        assert!(answer.headers.contains_key("allow"), "{answer}");
    }
    for query in
        ["limit=0", "limit=201", "limit=-1", "limit=many", "page_token=made-up", "page_token=%00", "surprise=1"]
    {
        let answer = cluster.admin.send_once(Method::GET, &format!("/api/v1/admin/nodes?{query}"), None).await;
        answer.expect_error(400, "invalid_request");
    }

    // A valid correlation id is used, an invalid one is replaced.
    let named = |id: &str| {
        let request = cluster.admin.request(Method::GET, "/api/v1/nothing").header("X-Correlation-Id", id.to_owned());
        let by = cluster.admin.clone();
        async move { by.send(request).await }
    };
    let stored = named("Mine.1_2-3").await;
    assert_eq!(stored.expect_error(404, "not_found").body["correlation_id"], "Mine.1_2-3");
    for made_anew in ["with space", "semi;colon", &"x".repeat(129)] {
        let answer = named(made_anew).await;
        assert_ne!(answer.expect_error(404, "not_found").body["correlation_id"], *made_anew);
    }
    let fine = cluster.admin.request(Method::GET, "/api/v1/healthz").header("X-Correlation-Id", "also-of-a-success");
    let answer = cluster.admin.send(fine).await;
    assert_eq!(answer.headers["x-correlation-id"], "also-of-a-success");
}

async fn identities(cluster: &TestCluster) {
    let stranger = cluster.anonymous_client();
    for path in ["/api/v1/allocations", "/api/v1/admin/nodes", "/api/v1/ssh-keys", "/api/v1/admin/runtime/tree"] {
        stranger.send_once(Method::GET, path, None).await.expect_error(401, "unauthenticated");
        for token in ["", "x", "a.b.c", "ey.ey.ey"] {
            stranger.as_bearer(token).send_once(Method::GET, path, None).await.expect_error(401, "unauthenticated");
        }
    }
    for path in
        ["/api/v1/admin/nodes", "/api/v1/admin/skus", "/api/v1/admin/runtime/tree", "/api/v1/admin/runtime/cluster"]
    {
        cluster.user.send_once(Method::GET, path, None).await.expect_error(403, "forbidden");
    }
    // Another user's resource is not found.
    let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1, "queue_seconds": 600 });
    let queued = cluster.user.send_once(Method::POST, "/api/v1/allocations", Some(&wanted)).await.created();
    let path = format!("/api/v1/allocations/{}", tests::cluster::id_of(&queued));
    cluster.other_user.send_once(Method::GET, &path, None).await.expect_error(404, "not_found");
    cluster
        .other_user
        .send_once(Method::POST, &format!("{path}/release"), Some(&json!({})))
        .await
        .expect_error(404, "not_found");
    let cancelled = cluster.user.send_once(Method::POST, &format!("{path}/release"), Some(&json!({}))).await;
    assert_eq!(cancelled.status.as_u16(), 202, "{cancelled}");
    cluster.user.wait_until(&path, "it is cancelled", |it| it["state"] == "released").await;
}

async fn node_api(cluster: &mut TestCluster) {
    use tests::cluster::client::send_request;
    use tests::cluster::fake_agent::{EnrollmentAttempt, anonymous};
    let (node, bundle) = cluster.registered("h100").await;
    let http = anonymous(&bundle);
    let url = |path: &str| format!("{}{path}", cluster.node_url());
    for path in ["/", "/internal/v1/nothing", "/api/v1/allocations"] {
        send_request(http.get(url(path))).await.unwrap().expect_error(404, "not_found");
    }
    let enroll = url(&format!("/internal/v1/nodes/{}/enroll", node.id));
    let (honest, _) = EnrollmentAttempt::valid(&bundle, 8);
    for change in [
        json!({ "enrollment_token": 7 }),
        json!({ "recovery_public_key": "AAAA" }),
        json!({ "boot_id": "yesterday" }),
        json!({ "protocol": -1 }),
        json!({ "inventory": [] }),
        json!({ "csr_pem": null }),
    ] {
        let mut body = honest.body();
        merge(&mut body, change.clone());
        let answer = send_request(http.post(&enroll).json(&body)).await.unwrap();
        assert_eq!(answer.status.as_u16(), 400, "{change}: {answer}");
        answer.expect_error(400, "invalid_request");
        assert!(!answer.text.contains(bundle.enrollment_token.expose()), "{change}");
    }
    let mut old = honest.body();
    merge(&mut old, json!({ "protocol": 0 }));
    send_request(http.post(&enroll).json(&old)).await.unwrap().expect_error(426, "upgrade_required");
    let huge = http.post(&enroll).header("Content-Type", "application/json").body(vec![b' '; 10 << 20]);
    send_request(huge).await.unwrap().expect_error(413, "payload_too_large");
    send_request(http.get(&enroll)).await.unwrap().expect_error(405, "method_not_allowed");
}
