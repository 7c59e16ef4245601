//! Rules that hold on every route: unknown query parameters, reasons, whole numbers.

use super::contract::{document, operations};
use super::harness::{ApiHarness, REFRESH_TOKEN, STATS_TOKEN, sku_body};
use super::replayed_responses::path_with_values;
use axum::http::Method;
use domain::policy::PolicyKey;
use serde_json::{Value, json};

async fn unlimited() -> ApiHarness {
    let api = ApiHarness::new().await;
    for key in [
        PolicyKey::RateLimitApi,
        PolicyKey::RateLimitFinancial,
        PolicyKey::RateLimitAdminOverview,
        PolicyKey::RateLimitTerminalToken,
    ] {
        api.set_policy(key, 10_000);
    }
    for role in ["platform_operations", "inventory_owner", "billing_operations", "auditor"] {
        api.bind("root", role).await;
    }
    api
}

fn is_of_the_api(path: &str) -> bool {
    path.starts_with("/api/") || path.starts_with("/internal/")
}

#[tokio::test]
async fn unknown_query_parameter_is_refused_on_every_route() {
    let api = unlimited().await;
    let mut refused = 0;
    for (method, path, operation) in operations(&document()).into_iter().filter(|(_, path, _)| is_of_the_api(path)) {
        // The month of a statement is not an id.
        let path = path_with_values(&path.replace("{month}", "2026-01").replace("{kind}", "node"));
        let token = match path.as_str() {
            "/api/v1/internal/stats" => STATS_TOKEN.to_owned(),
            "/internal/auth/jwks/refresh" => REFRESH_TOKEN.to_owned(),
            _ => api.token("root", &["admin"]),
        };
        let body = operation["requestBody"]["content"]["application/json"]["example"].clone();
        let address = format!("{path}?nonsense=1");
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let answer = api.call(method.clone(), &address).by(&token).key("k").json(&body).send().await;
        let details = answer.refused(400, "invalid_request");
        // These routes refuse every query with a reason of their own.
        if !path.ends_with("/ws") {
            assert_eq!(details["field"], "nonsense", "{method} {path}: {}", answer.body);
        }
        refused += 1;
    }
    assert!(refused > 100, "{refused}");
    // Links to browser pages may have foreign parameters.
    api.get("/billing/returned?from=mail").send().await.is(200);
}

#[tokio::test]
async fn path_parameter_of_another_type_is_refused_on_every_route() {
    let api = unlimited().await;
    let mut refused = 0;
    for (method, path, operation) in operations(&document()) {
        let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
        // Any text is the name of a file or of a processor's object.
        let is_typed = |it: &&Value| it["in"] == "path" && it["schema"] != json!({"type": "string"});
        for name in parameters.iter().filter(is_typed).map(|it| it["name"].as_str().unwrap()) {
            // Too long for the name of a user.
            let path = path.replace(&format!("{{{name}}}"), &"%20".repeat(300)).replace("{month}", "2026-01");
            let path = path_with_values(&path.replace("{kind}", "node").replace("{worker}", "idle-passivation"));
            let body = operation["requestBody"]["content"]["application/json"]["example"].clone();
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            let answer = api.call(method.clone(), &path).admin().key("k").json(&body).send().await;
            assert_eq!((answer.status, &answer.body["code"]), (400, &json!("invalid_request")), "{method} {path}");
            refused += 1;
        }
    }
    assert!(refused > 70, "{refused}");
}

#[tokio::test]
async fn blank_reason_is_refused_on_every_route_with_a_reason() {
    let api = unlimited().await;
    let document = document();
    let (mut refused, mut by_parameter) = (0, 0);
    for (method, path, operation) in operations(&document) {
        let schema = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].as_str();
        let name = schema.and_then(|schema| schema.rsplit('/').next()).unwrap_or_default();
        let fields = document["components"]["schemas"][name]["properties"].as_object().cloned().unwrap_or_default();
        let is_reason = |schema: &Value| schema.to_string().contains("#/components/schemas/Reason\"");
        let in_body: Vec<_> =
            fields.into_iter().filter(|(_, schema)| is_reason(schema)).map(|(name, _)| name).collect();
        let path = path_with_values(&path.replace("{kind}", "node").replace("{worker}", "idle-passivation"));
        let call = || {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            api.call(method, &path).admin().key("k")
        };
        for field in in_body {
            let mut body = operation["requestBody"]["content"]["application/json"]["example"].clone();
            for blank in
                [" ", "\u{a0}\t", "", "\u{200b}", "\u{2060}", "\u{feff}", "\u{ad}", "\u{3164}", "\u{e0100}", "\u{2800}"]
            {
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
    let blank = |path: &str| api.call(Method::DELETE, path).admin();
    let deletions = [
        "/api/v1/admin/policy-values?key=billing.window_seconds&reason=%20",
        "/api/v1/admin/health-rules?pattern=xid/79&reason=%20",
        "/api/v1/admin/platform-roles/bindings?subject=ann&role=auditor&reason=%20",
    ];
    assert_eq!(by_parameter, deletions.len());
    for path in deletions {
        for reason in ["%20", "%E2%80%8B", "%E3%85%A4"] {
            let path = path.replace("reason=%20", &format!("reason={reason}"));
            assert_eq!(blank(&path).send().await.refused(400, "invalid_request")["field"], "reason");
        }
    }
}

#[tokio::test]
async fn integer_with_a_point_or_an_exponent_is_accepted_everywhere() {
    let api = unlimited().await;
    let mut sku = sku_body("h100x4", 4);
    (sku["gpu"]["count"], sku["cpu"]["cores"]) = (json!(4.0), json!(64.0));
    let made = api.post("/api/v1/admin/skus").admin().text(sku.to_string()).send().await;
    assert_eq!(made.is(201)["gpu"]["count"], 4);
    let value = r#"{"key": "billing.window_seconds", "value": 6e1, "old_value": null, "reason": "x"}"#;
    assert_eq!(api.post("/api/v1/admin/policy-values").admin().text(value).send().await.is(201)["value"], 60);
    let account = json!({"user_id": "ann", "currency": "EUR"});
    let account = api.post("/api/v1/admin/billing/accounts").admin().json(&account).send().await.is(201).clone();
    let path = format!("/api/v1/admin/billing/accounts/{}/adjustments", account["id"].as_str().unwrap());
    let adjust = |amount: &str| {
        let body = format!(r#"{{"amount_minor": {amount}, "currency": "EUR", "reason": "x"}}"#);
        api.post(&path).admin().key(amount).text(body).send()
    };
    assert_eq!(adjust("1000.0").await.is(201)["balance_minor"], 1000);
    adjust("1000.5").await.refused(400, "invalid_request");
    api.get("/api/v1/skus?limit=1e1").user("ann").send().await.is(200);
    let estimate = "/api/v1/billing/estimate?sku=1.0&gpu_count=1.0";
    // A text is not read as a number: the SKU of this name is not found.
    let answer = api.get(estimate).user("ann").send().await;
    assert_eq!(answer.refused(400, "invalid_request")["field"], "sku", "{}", answer.body);
    api.get("/api/v1/skus?limit=1.5").user("ann").send().await.refused(400, "invalid_request");
}

/// The schema behind references, without its null.
fn resolved<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
    if let Some(reference) = schema["$ref"].as_str() {
        let name = reference.rsplit('/').next().unwrap_or_default();
        return resolved(document, &document["components"]["schemas"][name]);
    }
    let alternatives = ["oneOf", "anyOf", "allOf"].iter().find_map(|key| schema[*key].as_array());
    let others: Vec<_> = alternatives.into_iter().flatten().filter(|it| it["type"] != "null").collect();
    match others.as_slice() {
        [one] => resolved(document, one),
        _ => schema,
    }
}

/// The fields of a schema at every depth, each with its JSON type; not those of several types.
fn fields_of(document: &Value, schema: &Value, above: &[String], found: &mut Vec<(Vec<String>, String, Value)>) {
    let schema = resolved(document, schema);
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = [above, std::slice::from_ref(name)].concat();
        let field = resolved(document, field);
        let types = match &field["type"] {
            Value::Array(types) => types.iter().filter(|it| **it != "null").cloned().collect(),
            one => vec![one.clone()],
        };
        if let [Value::String(one)] = types.as_slice() {
            found.push((path.clone(), one.clone(), field.clone()));
            fields_of(document, field, &path, found);
        }
    }
}

/// The body with `value` at the path.
fn with_value(body: &Value, path: &[String], value: Value) -> Value {
    let mut body = body.clone();
    let mut place = &mut body;
    for name in path {
        if !place[name].is_object() && path.last() != Some(name) {
            place[name] = json!({});
        }
        place = &mut place[name];
    }
    *place = value;
    body
}

#[tokio::test]
async fn value_of_another_type_is_refused_at_every_depth_of_every_body() {
    let api = unlimited().await;
    let document = document();
    let token = api.token("root", &["admin", "user"]);
    let (mut sent, mut lists_for_objects) = (0, 0);
    for (method, path, operation) in operations(&document).into_iter().filter(|(_, path, _)| is_of_the_api(path)) {
        let content = &operation["requestBody"]["content"]["application/json"];
        let mut fields = Vec::new();
        fields_of(&document, &content["schema"], &[], &mut fields);
        let path = path_with_values(&path.replace("{kind}", "node").replace("{worker}", "idle-passivation"));
        for (place, kind, schema) in fields {
            let mut wrong = match kind.as_str() {
                "object" => vec![json!([]), json!([null, null, null]), json!("x"), json!(1)],
                "array" => vec![json!({}), json!("x")],
                "string" => vec![json!({}), json!([]), json!(["x"]), json!(1)],
                "integer" | "number" => vec![json!({}), json!([]), json!([1]), json!("1")],
                "boolean" => vec![json!({}), json!([]), json!("true"), json!(1)],
                other => panic!("{other}"),
            };
            if kind == "array" && resolved(&document, &schema["items"])["type"] == "object" {
                wrong.push(json!([[]]));
                wrong.push(json!([[null, null, null]]));
            }
            for value in wrong {
                let body = with_value(&content["example"], &place, value.clone());
                let method = Method::from_bytes(method.as_bytes()).unwrap();
                let answer = api.call(method.clone(), &path).by(&token).key("k").json(&body).send().await;
                let context = format!("{method} {path} {}: {value}: {}", place.join("."), answer.body);
                assert_eq!((answer.status, &answer.body["code"]), (400, &json!("invalid_request")), "{context}");
                let field = answer.body["details"]["field"].as_str().unwrap_or_default();
                assert!(field.starts_with(&place.join(".")), "{context}");
                // A map's keys are not fields: it has no properties.
                if value.is_array() && kind == "object" && schema["properties"].is_object() {
                    let message = answer.body["message"].as_str().unwrap();
                    assert_eq!(message, format!("`{}` is a list; it must be an object.", place.join(".")), "{context}");
                    lists_for_objects += 1;
                }
                sent += 1;
            }
        }
    }
    assert!(sent > 300 && lists_for_objects >= 10, "{sent}, {lists_for_objects}");
}
