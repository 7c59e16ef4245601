//! The contract: the description, and that it describes what is served.

use super::world::World;
use crate::api::routes;
use axum::http::Method;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

fn document() -> Value {
    serde_json::to_value(routes().1).unwrap()
}

/// Every operation as (method, path, operation).
fn operations(document: &Value) -> Vec<(String, String, Value)> {
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

/// The rows of the page as they stand in its source: who, method, path.
fn rows() -> Vec<(String, String, String)> {
    let source = include_str!("../../api.rs");
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let (who, verb, path) = (words.next()?, words.next()?, words.next()?);
        let path = path.strip_prefix('"')?.strip_suffix('"')?;
        let verb = verb.strip_suffix("Once").unwrap_or(verb);
        (words.next()? == "=>").then(|| (who.to_owned(), verb.to_uppercase(), path.to_owned()))
    };
    source.lines().filter_map(row).collect()
}

#[test]
fn the_description_is_as_reviewed() {
    insta::assert_json_snapshot!("openapi", document());
}

#[test]
fn the_page_and_the_description_list_the_same_routes() {
    let described: BTreeSet<_> = operations(&document()).into_iter().map(|(method, path, _)| (method, path)).collect();
    let served: BTreeSet<_> = rows().into_iter().map(|(_, method, path)| (method, path)).collect();
    assert!(served.len() > 30);
    assert_eq!(described, served);
}

#[test]
fn every_route_declares_what_it_may_refuse_and_who_may_use_it() {
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
        let guarded = matches!(who, "User" | "Admin");
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
        for part in path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}')) {
            assert!(names.iter().any(|name| name == part), "{name} does not describe {part}");
        }
        assert_eq!(names.iter().any(|name| name == "Idempotency-Key"), method == "POST", "{name}");
    }
}

#[test]
fn every_reference_in_the_description_leads_somewhere() {
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
    let document = document();
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
fn no_schema_has_a_sealed_field() {
    assert!(!document().to_string().contains("_enc\""));
}

#[tokio::test]
async fn every_route_lets_in_whom_it_is_for_and_nobody_else() {
    let world = World::new().await;
    let stranger = world.token("stranger", &["offline_access"]);
    let mut table = String::new();
    for (who, method, route) in rows() {
        let path = route.replace("{id}", "018f4e2a-7c1b-7000-8000-000000000001").replace("{kind}", "node");
        let send = async |token: Option<&str>| {
            let call = world.call(Method::from_bytes(method.as_bytes()).unwrap(), &path).json(&serde_json::json!({}));
            let call = if let Some(token) = token { call.by(token) } else { call };
            call.send().await.status
        };
        let user = world.token("ann", &["user"]);
        let admin = world.token("root", &["admin"]);
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
            // Nobody's access token opens these; what does, is tested with them.
            "Client" => assert_eq!(statuses, [415; 5], "{route}"),
            "Internal" => assert_eq!(statuses, [401; 5], "{route}"),
            "Anyone" => assert!(!statuses.iter().any(|status| refused(*status)), "{route}"),
            "User" => assert_eq!(statuses.map(refused), [true, true, true, false, false], "{route}"),
            "Admin" => assert_eq!(statuses.map(refused), [true, true, true, true, false], "{route}"),
            "Bound" => assert_eq!(statuses.map(refused), [true; 5], "{route}"),
            other => panic!("{other}"),
        }
    }
    insta::assert_snapshot!("who_is_let_in", table);
}

#[tokio::test]
async fn the_description_health_and_figures_are_for_anyone() {
    let world = World::new().await;
    let described = world.get("/api/v1/openapi.json").send().await;
    assert_eq!(described.is(200), &document());
    assert_eq!(world.get("/api/v1/healthz").send().await.is(200)["status"], "ok");
    assert_eq!(world.get("/api/v1/readyz").send().await.is(200)["ready"], true);
    let figures = world.get("/metrics").response().await;
    assert!(figures.headers()["content-type"].to_str().unwrap().starts_with("text/plain"));
    world.services.stopping.cancel();
    let stopping = world.get("/api/v1/readyz").send().await;
    stopping.refused(503, "service_unavailable");
    assert!(stopping.headers.contains_key("retry-after"));
}
