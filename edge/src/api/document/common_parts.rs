//! The parts that all operations of the description have in common: tags, headers, examples, links, and references in place of copied
//! schemas. They are added once all operations are registered.

use std::collections::BTreeSet;

use serde_json::{Map, Value};
use utoipa::openapi::header::{Header, HeaderBuilder};
use utoipa::openapi::link::LinkBuilder;
use utoipa::openapi::path::Operation;
use utoipa::openapi::schema::{ObjectBuilder, Schema, SchemaType, Type};
use utoipa::openapi::tag::TagBuilder;
use utoipa::openapi::{OpenApi, PathItem, Ref, RefOr, Response};

use super::error_responses::error_example;
use super::example::{ExampleScope, Schemas};
use crate::http::error::Code;

/// The description of each tag (a file of routes), in the order of the page.
const TAGS: &[(&str, &str)] = &[
    ("me", "The caller, as this service knows them."),
    ("browser_session", "Logins to the web console."),
    ("capacity", "How many GPUs are free, by SKU and region."),
    ("allocation", "GPUs that are rented: requests, states and releases."),
    ("terminal", "Shells on allocations: the tokens that open them, and their sessions."),
    ("recording", "What terminals showed, to play it back."),
    ("terminal_page", "A page with a terminal, for a browser."),
    ("sku", "The catalog: kinds of machines, where they are offered and at what price."),
    ("billing", "Prepaid money: balance, ledger and estimates."),
    ("payment", "Money that users pay in through the payment processor."),
    ("refund", "Refunds of payments, and credits of what an allocation has cost."),
    ("payment_page", "A page to pay on, for a browser, where the processor has none."),
    ("processor_event", "Events of the payment processor, and those that wait for an operator."),
    ("statement", "Monthly statements of an account, as JSON, CSV and PDF."),
    ("notification", "Notifications of what happens to your resources, and announcements of operators."),
    ("notification_endpoint", "Webhooks and e-mail addresses that receive events, and what could not be delivered."),
    ("ssh_key", "The public keys that open a user's allocations."),
    ("service_account", "Programs that act for a user, and their keys."),
    ("access_token", "Access tokens for service accounts, by OAuth 2.0 client credentials."),
    ("protected_resource", "Where to log in (RFC 9728)."),
    ("node", "The inventory: machines, their enrollment, and what administrators do with them."),
    ("rollout", "Updates of the agents of many nodes: canaries first, then waves."),
    ("key_set", "The keys of the service itself, and their rotation."),
    ("platform_role", "Roles that are bound here to subjects, beside those of their tokens."),
    ("health_rule", "What follows from health findings, and the overrides of administrators."),
    ("policy", "Policies: the catalog of keys, the values in force, and their changes."),
    ("audit", "Who did what, to what, and when; sealed into chains."),
    ("overview", "The whole service at a glance."),
    ("fleet_history", "The fleet hour by hour: GPUs, rentals and revenue."),
    ("alert", "What fires in the monitoring of the service."),
    ("telemetry", "The load of the nodes, and of the GPUs of an allocation."),
    ("runtime", "The running cluster: members, the supervision tree, and entities that wait or are parked."),
    ("identity_keys", "The identity provider's signing keys, for operators."),
    ("internal", "Statistics of one process, for its operators."),
    ("health", "Whether a process lives and can serve, and its metrics."),
    ("document", "This description."),
];

const CORRELATION: &str = "X-Correlation-Id";
const RETRY_AFTER: &str = "Retry-After";
const CHALLENGE: &str = "WWW-Authenticate";
const LIMITS: [&str; 2] = ["RateLimit-Policy", "RateLimit"];

pub(in crate::api) fn add_common_parts(api: &mut OpenApi) {
    let components = api.components.get_or_insert_default();
    for &code in Code::ALL {
        components.examples.insert(code.as_str().to_owned(), RefOr::T(error_example(code)));
    }
    components.headers.extend(headers().into_iter().map(|(name, header)| (name.to_owned(), RefOr::T(header))));
    deduplicate_item_schemas(&mut components.schemas);
    let schemas = match serde_json::to_value(&components.schemas) {
        Ok(Value::Object(schemas)) => Schemas(schemas),
        Ok(_) | Err(_) => Schemas(Map::new()),
    };
    let mut used = BTreeSet::new();
    for operation in api.paths.paths.values_mut().flat_map(operations) {
        used.extend(operation.tags.iter().flatten().cloned());
        let limited = operation.responses.responses.contains_key("429");
        for (status, response) in &mut operation.responses.responses {
            if let RefOr::T(response) = response {
                add_headers(response, status, limited);
                add_examples(response, &schemas);
            }
        }
        add_request_example(operation, &schemas);
        for parameter in operation.parameters.iter_mut().flatten() {
            if let RefOr::T(parameter) = parameter {
                parameter.schema = parameter.schema.take().map(without_null);
            }
        }
    }
    add_links(api);
    // A tag without a description comes last, and a test fails on it.
    let known = TAGS.iter().map(|(name, text)| (*name, Some(*text))).filter(|(name, _)| used.contains(*name));
    let others =
        used.iter().filter(|name| TAGS.iter().all(|(known, _)| known != name)).map(|name| (name.as_str(), None));
    let tag = |(name, text): (&str, Option<&str>)| TagBuilder::new().name(name).description(text).build();
    api.tags = Some(known.chain(others).map(tag).collect());
}

pub(super) fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [&mut item.get, &mut item.put, &mut item.post, &mut item.patch, &mut item.delete].into_iter().flatten()
}

fn headers() -> Vec<(&'static str, Header)> {
    let text = || ObjectBuilder::new().schema_type(SchemaType::new(Type::String));
    let header = |schema: ObjectBuilder, what: &str, example: Value| {
        HeaderBuilder::new().schema(Some(schema)).description(Some(what)).example(Some(example)).build()
    };
    vec![
        (
            CORRELATION,
            header(
                text().min_length(Some(1)).max_length(Some(128)).pattern(Some("^[A-Za-z0-9._-]+$")),
                "The id under which this request is found in logs, events and the audit log: the request's own where it brought one.",
                "0199e3f4-5c1b-7a00-8000-0c0ffee0c0de".into(),
            ),
        ),
        (
            RETRY_AFTER,
            header(
                ObjectBuilder::new().schema_type(SchemaType::new(Type::Integer)).minimum(Some(1)),
                "After how many seconds to try again.",
                2.into(),
            ),
        ),
        (
            CHALLENGE,
            header(text(), "What is wrong with the access token (RFC 6750).", r#"Bearer realm="gpuaas""#.into()),
        ),
        (
            LIMITS[0],
            header(
                text(),
                "The limit of the route's group: its name, `q` requests in a window of `w` seconds.",
                r#""api";q=120;w=60"#.into(),
            ),
        ),
        (
            LIMITS[1],
            header(
                text(),
                "What is left: `r` requests now, all of them again in `t` seconds.",
                r#""api";r=118;t=1"#.into(),
            ),
        ),
    ]
}

fn add_headers(response: &mut Response, status: &str, limited: bool) {
    let succeeds = status.starts_with('2');
    let applicable =
        [(CORRELATION, true), (RETRY_AFTER, matches!(status, "429" | "503")), (CHALLENGE, status == "401")];
    let limits = LIMITS.map(|name| (name, limited && (succeeds || status == "429")));
    for (name, _) in applicable.into_iter().chain(limits).filter(|(_, applicable)| *applicable) {
        let reference = Ref::new(format!("#/components/headers/{name}"));
        response.headers.entry(name.to_owned()).or_insert(RefOr::Ref(reference));
    }
}

fn add_examples(response: &mut Response, schemas: &Schemas) {
    for (kind, content) in &mut response.content {
        if let RefOr::T(content) = content
            && kind == "application/json"
            && content.example.is_none()
            && content.examples.is_empty()
        {
            content.example =
                content.schema.as_ref().and_then(|schema| example(schema, schemas, ExampleScope::Everything));
        }
    }
}

fn add_request_example(operation: &mut Operation, schemas: &Schemas) {
    let Some(RefOr::T(body)) = &mut operation.request_body else { return };
    for content in body.content.values_mut() {
        if let RefOr::T(content) = content
            && content.example.is_none()
            && content.examples.is_empty()
        {
            content.example =
                content.schema.as_ref().and_then(|schema| example(schema, schemas, ExampleScope::Required));
        }
    }
}

fn example(schema: &RefOr<Schema>, schemas: &Schemas, scope: ExampleScope) -> Option<Value> {
    schemas.example(&serde_json::to_value(schema).ok()?, scope).filter(|example| *example != Value::Object(Map::new()))
}

/// A parameter is present or absent; it is never null.
fn without_null(schema: RefOr<Schema>) -> RefOr<Schema> {
    let Ok(mut written) = serde_json::to_value(&schema) else { return schema };
    if let Some(types) = written["type"].as_array_mut() {
        types.retain(|one| one != "null");
        if let [one] = types.as_slice() {
            written["type"] = one.clone();
        }
    }
    serde_json::from_value(written).unwrap_or(schema)
}

/// Links the operation that creates a resource to those of its tag that take the resource's `id`, which is in its response.
fn add_links(api: &mut OpenApi) {
    let about_one = |(path, item): (&String, &PathItem)| {
        let one = path.matches('{').count() == 1 && path.contains("/{id}");
        let named = |it: &Operation| Some((it.tags.clone()?.pop()?, it.operation_id.clone()?));
        let all = [&item.get, &item.put, &item.post, &item.patch, &item.delete];
        all.into_iter().flatten().filter(|_| one).filter_map(named).collect::<Vec<_>>()
    };
    let followers: Vec<(String, String)> = api.paths.paths.iter().flat_map(about_one).collect();
    for (path, item) in &mut api.paths.paths {
        let Some(create) = item.post.as_mut().filter(|_| !path.contains('{')) else { continue };
        let tag = create.tags.iter().flatten().next().cloned().unwrap_or_default();
        let Some(RefOr::T(created)) = create.responses.responses.get_mut("201") else { continue };
        for (_, operation_id) in followers.iter().filter(|(of, _)| *of == tag) {
            let link =
                LinkBuilder::new().operation_id(operation_id.clone()).parameter("id", "$response.body#/id").build();
            created.links.insert(operation_id.clone(), RefOr::T(link));
        }
    }
}

/// A list's schema copies that of its items. A reference in its place tells generated clients that both are the same type.
fn deduplicate_item_schemas(schemas: &mut std::collections::BTreeMap<String, RefOr<Schema>>) {
    let written: Vec<(String, Value)> =
        schemas.iter().filter_map(|(name, schema)| Some((name.clone(), serde_json::to_value(schema).ok()?))).collect();
    let named = |copy: &Value| {
        let found = written.iter().find(|(_, schema)| schema == copy && copy["properties"].is_object())?;
        Some(Value::from_iter([("$ref", format!("#/components/schemas/{}", found.0))]))
    };
    for (name, mut schema) in written.clone() {
        let reference = schema.pointer("/properties/items/items").and_then(named);
        let slot = schema.pointer_mut("/properties/items/items");
        if let (Some(reference), Some(slot)) = (reference, slot) {
            *slot = reference;
            if let Ok(schema) = serde_json::from_value(schema) {
                schemas.insert(name, schema);
            }
        }
    }
}
