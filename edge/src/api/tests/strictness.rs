//! The same rule on every route: unknown query parameters, reasons, whole numbers.

use super::contract::{document, operations};
use super::replays::filled;
use super::world::{REFRESH_TOKEN, STATS_TOKEN, World, sku_body};
use axum::http::Method;
use domain::policy::Key;
use serde_json::{Value, json};

async fn unlimited() -> World {
    let world = World::new().await;
    for key in [Key::RateLimitApi, Key::RateLimitFinancial, Key::RateLimitAdminOverview, Key::RateLimitTerminalToken] {
        world.set_policy(key, 10_000);
    }
    for role in ["platform_operations", "inventory_owner", "billing_operations", "auditor"] {
        world.bind("root", role).await;
    }
    world
}

fn is_of_the_api(path: &str) -> bool {
    path.starts_with("/api/") || path.starts_with("/internal/")
}

#[tokio::test]
async fn unknown_query_parameter_is_refused_on_every_route() {
    let world = unlimited().await;
    let mut refused = 0;
    for (method, path, operation) in operations(&document()).into_iter().filter(|(_, path, _)| is_of_the_api(path)) {
        // The month of a statement is not an id.
        let path = filled(&path.replace("{month}", "2026-01").replace("{kind}", "node"));
        let token = match path.as_str() {
            "/api/v1/internal/stats" => STATS_TOKEN.to_owned(),
            "/internal/auth/jwks/refresh" => REFRESH_TOKEN.to_owned(),
            _ => world.token("root", &["admin"]),
        };
        let body = operation["requestBody"]["content"]["application/json"]["example"].clone();
        let address = format!("{path}?nonsense=1");
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let answer = world.call(method.clone(), &address).by(&token).key("k").json(&body).send().await;
        let details = answer.refused(400, "invalid_request");
        // These addresses say why they take no query at all.
        if !path.ends_with("/ws") {
            assert_eq!(details["field"], "nonsense", "{method} {path}: {}", answer.body);
        }
        refused += 1;
    }
    assert!(refused > 100, "{refused}");
    // Links to pages for people carry what others add to them.
    world.get("/billing/returned?from=mail").send().await.is(200);
}

#[tokio::test]
async fn blank_reason_is_refused_on_every_route_that_takes_one() {
    let world = unlimited().await;
    let document = document();
    let (mut refused, mut by_parameter) = (0, 0);
    for (method, path, operation) in operations(&document) {
        let schema = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].as_str();
        let name = schema.and_then(|schema| schema.rsplit('/').next()).unwrap_or_default();
        let fields = document["components"]["schemas"][name]["properties"].as_object().cloned().unwrap_or_default();
        let is_reason = |schema: &Value| schema.to_string().contains("#/components/schemas/Reason\"");
        let in_body: Vec<_> =
            fields.into_iter().filter(|(_, schema)| is_reason(schema)).map(|(name, _)| name).collect();
        let path = filled(&path.replace("{kind}", "node").replace("{worker}", "rest"));
        let call = || {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            world.call(method, &path).admin().key("k")
        };
        for field in in_body {
            let mut body = operation["requestBody"]["content"]["application/json"]["example"].clone();
            for blank in [" ", "\u{a0}\t", ""] {
                body[&field] = blank.into();
                let answer = call().json(&body).send().await;
                assert_eq!(answer.refused(400, "invalid_request")["field"], field.as_str(), "{method} {path}");
            }
            refused += 1;
        }
        let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
        by_parameter += parameters.iter().filter(|parameter| parameter["name"] == "reason").count();
    }
    assert!(refused > 20, "{refused}");
    let blank = |path: &str| world.call(Method::DELETE, path).admin();
    let deletions = [
        "/api/v1/admin/policy-values?key=billing.window_seconds&reason=%20",
        "/api/v1/admin/platform-roles/bindings?subject=ann&role=auditor&reason=%20",
    ];
    assert_eq!(by_parameter, deletions.len());
    for path in deletions {
        assert_eq!(blank(path).send().await.refused(400, "invalid_request")["field"], "reason");
    }
}

#[tokio::test]
async fn whole_number_with_a_point_or_an_exponent_is_read_everywhere() {
    let world = unlimited().await;
    let mut sku = sku_body("h100x4", 4);
    (sku["gpu"]["count"], sku["cpu"]["cores"]) = (json!(4.0), json!(64.0));
    let made = world.post("/api/v1/admin/skus").admin().text(sku.to_string()).send().await;
    assert_eq!(made.is(201)["gpu"]["count"], 4);
    let value = r#"{"key": "billing.window_seconds", "value": 6e1, "old_value": null, "reason": "x"}"#;
    assert_eq!(world.post("/api/v1/admin/policy-values").admin().text(value).send().await.is(201)["value"], 60);
    let account = json!({"user_id": "ann", "currency": "EUR"});
    let account = world.post("/api/v1/admin/billing/accounts").admin().json(&account).send().await.is(201).clone();
    let path = format!("/api/v1/admin/billing/accounts/{}/adjustments", account["id"].as_str().unwrap());
    let adjust = |amount: &str| {
        let body = format!(r#"{{"amount_minor": {amount}, "currency": "EUR", "reason": "x"}}"#);
        world.post(&path).admin().key(amount).text(body).send()
    };
    assert_eq!(adjust("1000.0").await.is(201)["balance_minor"], 1000);
    adjust("1000.5").await.refused(400, "invalid_request");
    world.get("/api/v1/skus?limit=1e1").user("ann").send().await.is(200);
    let estimate = "/api/v1/billing/estimate?sku=1.0&gpu_count=1.0";
    // A text stays as it is: what is missing is the SKU of this name.
    let answer = world.get(estimate).user("ann").send().await;
    assert_eq!(answer.refused(400, "invalid_request")["field"], "sku", "{}", answer.body);
    world.get("/api/v1/skus?limit=1.5").user("ann").send().await.refused(400, "invalid_request");
}
