//! Invalid requests: each is answered with the error envelope and a helpful message.

use super::harness::ApiHarness;
use axum::http::Method;
use serde_json::json;

#[tokio::test]
async fn malformed_request_gets_the_error_envelope() {
    let api = ApiHarness::new().await;
    let skus = || api.post("/api/v1/admin/skus").admin();
    let answers = [
        api.get("/api/v1/nowhere").send().await,
        api.get("/").send().await,
        api.call(Method::PUT, "/api/v1/skus").user("ann").send().await,
        api.call(Method::DELETE, "/api/v1/healthz").send().await,
        skus().text("{").send().await,
        skus().text("{\"name\": }").send().await,
        skus().text("").send().await,
        skus().text("null").send().await,
        skus().text("\"text\"").send().await,
        skus().text("{} {}").send().await,
        skus().text(vec![b'{', b'"', 0xff, b'"', b':', b'1', b'}']).send().await,
        skus().raw("{}").send().await,
        skus().header("content-type", "text/plain").raw("{}").send().await,
        skus().text(vec![b' '; 10 << 20]).send().await,
        skus().json(&json!({"name": {"deep": true}})).send().await,
        api.get("/api/v1/admin/nodes/not-a-uuid").admin().send().await,
        api.get("/api/v1/admin/nodes?limit=many").admin().send().await,
        api.get("/api/v1/admin/nodes?limit=0").admin().send().await,
        api.get("/api/v1/admin/nodes?limit=1&limit=2").admin().send().await,
        api.get("/api/v1/admin/nodes?page_token=%00").admin().send().await,
        api.get("/api/v1/admin/nodes?colour=red").admin().send().await,
        api.post("/api/v1/admin/skus")
            .admin()
            .header("idempotency-key", "a")
            .header("idempotency-key", "b")
            .json(&json!({}))
            .send()
            .await,
        api.get("/api/v1/skus").send().await,
        api.get("/api/v1/skus").header("authorization", "Basic YTpi").send().await,
        api.get("/api/v1/skus").by(&api.token("ann", &[])).send().await,
        api.get("/api/v1/admin/skus").user("ann").send().await,
    ];
    for answer in &answers {
        assert_eq!(
            (answer.body["correlation_id"].as_str(), answer.body["details"]["service"].as_str()),
            (Some("test"), Some("api"))
        );
        assert_eq!(answer.headers["x-correlation-id"], "test");
    }
    insta::assert_snapshot!(answers.map(|answer| answer.line()).join("\n"));
}
