//! The contract: the OpenAPI document, and that the service matches it.

use super::description_layout::laid_out;
use super::harness::ApiHarness;
use crate::api::document::{CODES, share_parts};
use crate::api::routes;
use axum::http::Method;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// The description with every part at its operation.
pub(super) fn document() -> Value {
    serde_json::to_value(routes().1.complete()).unwrap()
}

/// The description as it is served, but for what depends on the installation.
fn published() -> Value {
    let mut api = routes().1.complete();
    share_parts(&mut api);
    serde_json::to_value(api).unwrap()
}

/// Every operation as (method, path, operation).
pub(super) fn operations(document: &Value) -> Vec<(String, String, Value)> {
    let paths = document["paths"].as_object().unwrap();
    let of_path = |(path, item): (&String, &Value)| {
        let operations = item.as_object().unwrap().clone();
        operations
            .into_iter()
            .map(|(method, operation)| (method.to_uppercase(), path.clone(), operation))
            .collect::<Vec<_>>()
    };
    paths.iter().flat_map(of_path).collect()
}

/// The rows of the table of routes in its source: access, method, path.
fn rows() -> Vec<(String, String, String)> {
    let source = include_str!("../../api.rs");
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let (who, verb, path) = (words.next()?, words.next()?, words.next()?);
        let path = path.strip_prefix('"')?.strip_suffix('"')?;
        // The kind of a route does not change its method.
        let method = ["Once", "Keyed", "Long"].iter().find_map(|how| verb.strip_suffix(how)).unwrap_or(verb);
        // The rate-limit group, where it is not `Api`.
        let arrow = words.find(|word| !word.starts_with('('))?;
        (arrow == "=>").then(|| (who.to_owned(), method.to_uppercase(), path.to_owned()))
    };
    source.lines().filter_map(row).collect()
}

#[test]
fn openapi_document_is_as_reviewed() {
    let published = published();
    let text = laid_out(&published);
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), published);
    insta::assert_snapshot!("openapi", text);
}

/// A response or parameter in place of the reference to it.
fn resolve(part: &mut Value, components: &Value) {
    if let Some(reference) = part["$ref"].as_str() {
        let component = components.pointer(reference.strip_prefix("#/components").unwrap());
        *part = component.unwrap_or_else(|| panic!("{reference} leads nowhere")).clone();
    }
}

#[test]
fn published_description_is_that_of_the_operations_with_repeated_parts_as_components() {
    let mut published = published();
    let components = published["components"].clone();
    let mut inline = BTreeSet::new();
    for item in published["paths"].as_object_mut().unwrap().values_mut() {
        for operation in item.as_object_mut().unwrap().values_mut() {
            for response in operation["responses"].as_object_mut().unwrap().values_mut() {
                let is_new = response.get("$ref").is_some() || inline.insert(response.to_string());
                assert!(is_new, "a response that several operations have is no component: {response}");
                resolve(response, &components);
            }
            for parameter in operation.get_mut("parameters").and_then(Value::as_array_mut).into_iter().flatten() {
                let is_new = parameter.get("$ref").is_some() || inline.insert(parameter.to_string());
                assert!(is_new, "a parameter that several operations have is no component: {parameter}");
                resolve(parameter, &components);
            }
        }
    }
    for section in ["responses", "parameters"] {
        let parts = published["components"].as_object_mut().unwrap().remove(section).unwrap();
        assert!(parts.as_object().unwrap().len() > 10, "{section}");
    }
    assert!(published == document(), "a reference resolves to something else than the operation has");
}

#[test]
fn openapi_document_names_no_sealed_field() {
    let text = document().to_string();
    for name in ["scheduler_metadata", "_enc\""] {
        assert!(!text.contains(name), "{name} is described as served");
    }
}

#[test]
fn route_table_and_openapi_document_list_the_same_routes() {
    let described: BTreeSet<_> = operations(&document()).into_iter().map(|(method, path, _)| (method, path)).collect();
    let served: BTreeSet<_> = rows().into_iter().map(|(_, method, path)| (method, path)).collect();
    assert!(served.len() > 30);
    assert_eq!(described, served);
}

#[test]
fn every_route_declares_its_error_codes_and_security() {
    let document = document();
    let who: BTreeMap<_, _> = rows().into_iter().map(|(who, method, path)| ((method, path), who)).collect();
    let mut ids = BTreeSet::new();
    for (method, path, operation) in operations(&document) {
        let name = format!("{method} {path}");
        let codes =
            |status: &str| operation["responses"][status]["description"].as_str().unwrap_or_default().to_owned();
        assert!(ids.insert(operation["operationId"].as_str().unwrap().to_owned()), "{name}");
        let summary = operation["summary"].as_str().unwrap_or_default();
        assert!((5..120).contains(&summary.len()) && !summary.contains('\n'), "{name}: {summary}");
        assert!(codes("500").contains("`internal_error`") && codes("503").contains("`overloaded`"), "{name}");
        let who = who[&(method.clone(), path.clone())].as_str();
        let guarded = matches!(who, "User" | "Admin" | "Bound");
        assert_eq!(codes("401").contains("`unauthenticated`"), who != "Anyone", "{name}");
        assert_eq!(operation["security"][0]["bearer"].is_array(), guarded, "{name}");
        if path.contains('{') {
            assert!(codes("404").contains("`not_found`") && codes("400").contains("`invalid_request`"), "{name}");
        }
        if operation["requestBody"].is_object() {
            assert!(
                codes("413").contains("`payload_too_large`") && codes("415").contains("`unsupported_media_type`"),
                "{name}"
            );
        }
        let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
        let names: Vec<_> = parameters.iter().map(|parameter| parameter["name"].as_str().unwrap().to_owned()).collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "{name}: {names:?}");
        let in_path: Vec<_> = parameters.iter().filter(|it| it["in"] == "path").map(|it| it["name"].clone()).collect();
        let of_path = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        assert_eq!(in_path, of_path.collect::<Vec<_>>(), "{name}");
        assert_eq!(names.iter().any(|name| name == "Idempotency-Key"), method == "POST", "{name}");
    }
}

#[test]
fn every_reference_in_the_openapi_document_resolves() {
    fn references(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("$ref").and_then(Value::as_str).map(str::to_owned));
                fields.values().for_each(|value| references(value, found));
            }
            Value::Array(items) => items.iter().for_each(|value| references(value, found)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    let document = published();
    assert_eq!(document["openapi"], "3.1.0");
    let mut found = BTreeSet::new();
    references(&document, &mut found);
    assert!(found.len() > 20);
    for reference in found {
        let target = document.pointer(reference.strip_prefix('#').unwrap());
        assert!(target.is_some_and(|target| target != &serde_json::json!({})), "{reference} leads nowhere");
    }
}

#[test]
fn every_body_has_an_example_and_every_tag_a_description() {
    let document = document();
    for (method, path, operation) in operations(&document) {
        let shown = |content: &Value| content["example"].is_object() || content["examples"].is_object();
        let body = &operation["requestBody"]["content"]["application/json"];
        assert!(body.is_null() || shown(body), "{method} {path}: {body}");
        for (status, response) in operation["responses"].as_object().unwrap() {
            let content = &response["content"]["application/json"];
            let free_form = content["schema"]["properties"].is_null() && content["schema"]["$ref"].is_null();
            assert!(content.is_null() || free_form || shown(content), "{method} {path} {status}: {content}");
            assert!(response["headers"]["X-Correlation-Id"].is_object(), "{method} {path} {status}");
            let comes_again = matches!(status.as_str(), "429" | "503");
            assert_eq!(response["headers"]["Retry-After"].is_object(), comes_again, "{method} {path} {status}");
            let refuses = status.starts_with(['4', '5']);
            assert_eq!(response[CODES].is_array(), refuses, "{method} {path} {status} does not list its codes");
        }
    }
    let mut names = BTreeSet::new();
    for tag in document["tags"].as_array().unwrap() {
        assert!(names.insert(tag["name"].as_str().unwrap()), "TAGS names {} twice", tag["name"]);
        assert!(tag["description"].is_string(), "TAGS in document/common_parts.rs has no word for {}", tag["name"]);
    }
}

/// The served document without the parts that depend on the installation.
fn without_installation(served: &Value) -> Value {
    let mut served = served.clone();
    assert!(served["servers"][0]["url"].as_str().is_some_and(|url| url.starts_with("https://")));
    served.as_object_mut().unwrap().remove("servers");
    let schemes = served["components"]["securitySchemes"].as_object_mut().unwrap();
    let provider = schemes.remove("identity_provider").unwrap();
    let url = provider["openIdConnectUrl"].as_str().unwrap();
    assert!(url.ends_with("/.well-known/openid-configuration"), "{url}");
    let account = schemes.remove("client_credentials").unwrap();
    let url = account["flows"]["clientCredentials"]["tokenUrl"].as_str().unwrap();
    assert!(url.ends_with("/api/v1/service-accounts/token"), "{url}");
    served
}

#[test]
fn no_schema_has_a_sealed_field() {
    assert!(!document().to_string().contains("_enc\""));
}

#[tokio::test]
async fn every_route_admits_its_callers_alone() {
    let api = ApiHarness::new().await;
    let stranger = api.token("stranger", &["offline_access"]);
    let mut table = String::new();
    for (who, method, route) in rows() {
        let path = route.replace("{id}", "018f4e2a-7c1b-7000-8000-000000000001").replace("{kind}", "node");
        let send = async |token: Option<&str>| {
            let call = api.call(Method::from_bytes(method.as_bytes()).unwrap(), &path).json(&serde_json::json!({}));
            let call = if let Some(token) = token { call.by(token) } else { call };
            call.send().await.status
        };
        let user = api.token("ann", &["user"]);
        let admin = api.token("root", &["admin"]);
        let statuses = [
            send(None).await,
            send(Some("rubbish")).await,
            send(Some(&stranger)).await,
            send(Some(&user)).await,
            send(Some(&admin)).await,
        ];
        writeln!(table, "{method} {route}: {}", statuses.map(|status| status.to_string()).join(" ")).unwrap();
        let refused = |status: u16| matches!(status, 401 | 403);
        match who.as_str() {
            // No access token admits to these; their own credentials are tested elsewhere.
            "Client" => assert_eq!(statuses, [415; 5], "{route}"),
            "Anyone" => assert!(!statuses.iter().any(|status| refused(*status)), "{route}"),
            "User" => assert_eq!(statuses.map(refused), [true, true, true, false, false], "{route}"),
            "Admin" => assert_eq!(statuses.map(refused), [true, true, true, true, false], "{route}"),
            "Internal" => assert_eq!(statuses, [401; 5], "{route}"),
            "Bound" => assert_eq!(statuses.map(refused), [true; 5], "{route}"),
            other => panic!("{other}"),
        }
    }
    insta::assert_snapshot!("who_is_let_in", table);
}

#[tokio::test]
async fn every_route_with_a_token_is_rate_limited_and_documents_it() {
    let api = ApiHarness::new().await;
    for (who, method, route) in rows() {
        let path = route.replace("{id}", "018f4e2a-7c1b-7000-8000-000000000001").replace("{kind}", "node");
        let call = api.call(Method::from_bytes(method.as_bytes()).unwrap(), &path).admin().json(&serde_json::json!({}));
        let headers = call.send().await.headers;
        for header in ["ratelimit-policy", "ratelimit"] {
            let limited = matches!(&*who, "User" | "Admin" | "Bound");
            assert_eq!(headers.contains_key(header), limited, "{method} {route} {header}");
            // Frequent polls, terminal tokens and money have rate limits of their own.
            let group = match route.as_str() {
                "/api/v1/admin/overview" => "\"admin_overview\";",
                "/api/v1/allocations/{id}/terminal-tokens" => "\"terminal_token\";",
                // Of money, what is read page by page and moves none.
                "/api/v1/billing/estimate" => "\"api\";",
                route if route.ends_with("/ledger") || route.ends_with("/statements") => "\"api\";",
                route if route.contains("/billing/") => "\"financial\";",
                _ => "\"api\";",
            };
            let named = headers.get(header).is_none_or(|value| value.to_str().unwrap().starts_with(group));
            assert!(named, "{method} {route} {header}: {headers:?}");
        }
    }
    api.set_policy(domain::policy::PolicyKey::RateLimitApi, 2);
    let asked = async || api.get("/api/v1/skus").user("ann").send().await;
    for left in [1, 0] {
        let answer = asked().await;
        answer.is(200);
        assert_eq!(answer.headers["ratelimit-policy"], "\"api\";q=2;w=60");
        assert!(answer.headers["ratelimit"].to_str().unwrap().starts_with(&format!("\"api\";r={left};t=")));
    }
    let refused = asked().await;
    let details = refused.refused(429, "rate_limited");
    assert_eq!(details["policy_key"], "rate_limit.api_requests_per_minute");
    assert_eq!(refused.headers["retry-after"], details["retry_after_seconds"].to_string().as_str());
}

#[tokio::test]
async fn process_stats_require_the_operator_token() {
    let api = ApiHarness::new().await;
    let stats = api.get("/api/v1/internal/stats").by(super::harness::STATS_TOKEN).send().await;
    assert_eq!(stats.is(200)["entities"]["awake"], 0);
    api.get("/api/v1/internal/stats")
        .by(&super::harness::STATS_TOKEN[1..])
        .send()
        .await
        .refused(401, "unauthenticated");
    let twice = api.get("/api/v1/internal/stats").by(super::harness::STATS_TOKEN).by(super::harness::STATS_TOKEN);
    twice.send().await.refused(401, "unauthenticated");
}

#[tokio::test]
async fn wrong_operator_tokens_are_rate_limited_and_the_right_one_is_not() {
    let api = ApiHarness::new().await;
    api.set_policy(domain::policy::PolicyKey::RateLimitAuthenticationFailures, 10);
    for (method, route, token) in [
        (Method::GET, "/api/v1/internal/stats", super::harness::STATS_TOKEN),
        (Method::POST, "/internal/auth/jwks/refresh", super::harness::REFRESH_TOKEN),
    ] {
        let last = if method == Method::GET { 7 } else { 8 };
        let call = || api.call(method.clone(), route).from([192, 0, 2, last]);
        for _ in 0..10 {
            call().by("a guess").send().await.refused(401, "unauthenticated");
        }
        let slowed = call().by("a guess").send().await;
        slowed.refused(429, "rate_limited");
        assert!(slowed.headers.contains_key("retry-after"), "{route}");
        call().by(token).send().await.is(200);
    }
}

#[tokio::test]
async fn protected_resource_metadata_names_the_issuer_without_a_token() {
    let api = ApiHarness::new().await;
    let metadata = api.get("/.well-known/oauth-protected-resource").send().await.is(200).clone();
    assert_eq!(metadata["resource"], "https://api.gpu.example");
    assert_eq!(metadata["authorization_servers"], serde_json::json!([api.app.authenticator.issuer()]));
    assert_eq!(metadata["gpuctl_client_id"], "gpuctl");
}

#[tokio::test]
async fn openapi_document_and_liveness_need_no_token() {
    let api = ApiHarness::new().await;
    let described = api.get("/api/v1/openapi.json").send().await;
    let (served, described) = (format!("{:#}", without_installation(described.is(200))), format!("{:#}", published()));
    let differs =
        served.lines().zip(described.lines()).enumerate().find(|(_, (served, described))| served != described);
    assert_eq!(differs, None);
    assert_eq!(served.lines().count(), described.lines().count());
    assert_eq!(api.get("/api/v1/healthz").send().await.is(200)["status"], "ok");
    let page = api.get("/api/v1/docs").response().await;
    let may = page.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(may.starts_with("default-src 'none'; script-src 'self';") && !may.contains("http"), "{may}");
    let reader = api.get("/api/v1/docs/reader.js").response().await;
    let script = axum::body::to_bytes(reader.into_body(), 16 << 20).await.unwrap();
    assert!(script.len() > 1 << 20);
    assert!(!String::from_utf8_lossy(&script).contains(" style=\"--line-count"), "the policy refuses it in markup");
}

#[tokio::test]
async fn readiness_and_metrics_of_the_public_listener_require_the_operator_token() {
    let api = ApiHarness::new().await;
    for path in ["/api/v1/readyz", "/metrics"] {
        api.get(path).send().await.refused(401, "unauthenticated");
        api.get(path).admin().send().await.refused(401, "unauthenticated");
    }
    let ready = async || api.get("/api/v1/readyz").by(super::harness::STATS_TOKEN).send().await;
    assert_eq!(ready().await.is(200)["ready"], true);
    let metrics = api.get("/metrics").by(super::harness::STATS_TOKEN).response().await;
    assert!(metrics.headers()["content-type"].to_str().unwrap().starts_with("text/plain"));
    api.app.stopping.cancel();
    let stopping = ready().await;
    stopping.refused(503, "service_unavailable");
    assert!(stopping.headers.contains_key("retry-after"));
}
