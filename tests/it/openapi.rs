//! The OpenAPI description that the service serves.

use serde_json::Value;
use std::collections::BTreeSet;
use tests::cluster::TestCluster;

/// The routes of the service, by path below `/api/v1`.
const ROUTES: &[(&str, &[&str])] = &[
    ("/healthz", &["get"]),
    ("/readyz", &["get"]),
    ("/skus", &["get"]),
    ("/admin/skus", &["get", "post"]),
    ("/admin/skus/{id}", &["get"]),
    ("/admin/skus/{id}/activate", &["post"]),
    ("/admin/skus/{id}/deprecate", &["post"]),
    ("/admin/skus/{id}/deactivate", &["post"]),
    ("/admin/platform-roles/bindings", &["get", "post", "delete"]),
    ("/admin/overview", &["get"]),
    ("/admin/nodes", &["get", "post"]),
    ("/admin/nodes/{id}", &["get", "patch"]),
    ("/admin/nodes/{id}/enrollment-token", &["post"]),
    ("/admin/nodes/{id}/retire", &["post"]),
    ("/admin/nodes/{id}/reactivate", &["post"]),
    ("/admin/nodes/{id}/remove", &["post"]),
    ("/admin/nodes/{id}/quarantine", &["post"]),
    ("/admin/nodes/{id}/findings/{finding_id}/clear", &["post"]),
    ("/admin/nodes/{id}/release-quarantine", &["post"]),
    ("/admin/health-rules", &["get", "post", "delete"]),
    ("/allocations", &["get", "post"]),
    ("/allocations/{id}", &["get", "patch"]),
    ("/allocations/{id}/events", &["get"]),
    ("/allocations/{id}/release", &["post"]),
    ("/admin/allocations/{id}/retry-release", &["post"]),
    ("/admin/allocations/{id}/force-release", &["post"]),
    ("/billing/balance", &["get"]),
    ("/billing/ledger", &["get"]),
    ("/billing/estimate", &["get"]),
    ("/billing/statements", &["get"]),
    ("/billing/statements/{month}", &["get"]),
    ("/billing/statements/{month}/csv", &["get"]),
    ("/billing/statements/{month}/pdf", &["get"]),
    ("/admin/billing/accounts", &["get", "post"]),
    ("/admin/billing/accounts/{id}", &["get"]),
    ("/admin/billing/accounts/{id}/ledger", &["get"]),
    ("/admin/billing/accounts/{id}/adjustments", &["post"]),
    ("/admin/billing/accounts/{id}/statements", &["get"]),
    ("/admin/billing/accounts/{id}/statements/{month}", &["get"]),
    ("/admin/billing/accounts/{id}/statements/{month}/csv", &["get"]),
    ("/admin/billing/accounts/{id}/statements/{month}/pdf", &["get"]),
    ("/notifications/ws", &["get"]),
    ("/admin/notifications/broadcast", &["post"]),
    ("/ssh-keys", &["get", "post"]),
    ("/ssh-keys/{id}", &["delete"]),
    ("/ssh-keys/{id}/default", &["post"]),
    ("/admin/runtime/tree", &["get"]),
    ("/admin/runtime/cluster", &["get"]),
    ("/admin/runtime/entities/{kind}/{id}", &["get"]),
    ("/admin/runtime/entities/{kind}/{id}/restart", &["post"]),
    ("/admin/runtime/members/{member}/workers/{worker}/restart", &["post"]),
];

#[tokio::test(flavor = "multi_thread")]
async fn served_description_is_openapi_3_1_and_has_every_route() {
    let cluster = TestCluster::start().await;
    let description = cluster.anonymous_client().get("/api/v1/openapi.json").await.ok();
    let version = description["openapi"].as_str().unwrap_or_default();
    assert!(version.starts_with("3.1"), "{version}");
    let paths = description["paths"].as_object().expect("it has paths");
    for (path, methods) in ROUTES {
        let full = format!("/api/v1{path}");
        let described =
            paths.get(&full).unwrap_or_else(|| panic!("{full} is not described; there are {:?}", paths.keys()));
        for method in *methods {
            assert!(described[method].is_object(), "{method} {full} is not described");
        }
    }
    let mut ids = BTreeSet::new();
    for (path, methods) in paths {
        for (method, operation) in methods.as_object().unwrap().iter().filter(|(name, _)| *name != "parameters") {
            expect_described(&description, path, method, &with_responses(&description, operation));
            if let Some(id) = operation["operationId"].as_str() {
                assert!(ids.insert(id.to_owned()), "two operations are called {id}");
            }
        }
    }
    cluster.shutdown().await;
}

/// The operation with its responses in place of references to the description's components.
pub(crate) fn with_responses(description: &Value, operation: &Value) -> Value {
    let mut operation = operation.clone();
    for response in operation["responses"].as_object_mut().into_iter().flat_map(serde_json::Map::values_mut) {
        if let Some(reference) = response["$ref"].as_str() {
            let found = description.pointer(reference.trim_start_matches('#'));
            *response = found.unwrap_or_else(|| panic!("{reference} leads nowhere")).clone();
        }
    }
    operation
}

/// Asserts that an operation lists its responses, that errors use the error envelope, and that every reference resolves.
fn expect_described(description: &Value, path: &str, method: &str, operation: &Value) {
    let responses = operation["responses"].as_object().unwrap_or_else(|| panic!("{method} {path} has no responses"));
    // For a WebSocket upgrade the success is 101 (RFC 6455, section 4.2.2).
    let succeeds = |status: &String| status.starts_with('2') || status == "101";
    assert!(responses.keys().any(succeeds), "{method} {path} never succeeds");
    for (status, response) in responses.iter().filter(|(status, _)| status.starts_with(['4', '5'])) {
        let schema = &response["content"]["application/json"]["schema"]["$ref"];
        // `readyz` answers 503 with its checks.
        let envelope = schema == "#/components/schemas/Error" || path.ends_with("/readyz");
        assert!(envelope, "{method} {path} answers {status} with {response}");
    }
    if path.starts_with("/api/v1/admin") {
        for status in ["401", "403"] {
            assert!(responses.contains_key(status), "{method} {path} does not say when it answers {status}");
        }
    }
    expect_references(description, operation);
}

fn expect_references(description: &Value, value: &Value) {
    match value {
        Value::Object(fields) => {
            if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
                let found = description.pointer(reference.trim_start_matches('#'));
                assert!(found.is_some(), "{reference} leads nowhere");
            }
            fields.values().for_each(|inner| expect_references(description, inner));
        }
        Value::Array(items) => items.iter().for_each(|inner| expect_references(description, inner)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
