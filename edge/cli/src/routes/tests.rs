//! The table of routes against the API's description: each command runs against a fake API that responds as the description says, and its
//! request is compared with the description.

use super::*;
use crate::output::{Output, OutputFormat};
use crate::{Arguments, Connection, execute};
use axum::Router;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use clap::{CommandFactory as _, Parser as _};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

/// The extension of a route's description that says why no command of `gpuctl` calls it.
const WITHOUT_COMMAND: &str = "x-without-gpuctl";

/// Routes whose commands need more than `every_command_sends_its_request_as_described` provides, and their tests.
const TESTED_ELSEWHERE: &[(&str, &str)] = &[
    ("POST /api/v1/allocations/{id}/terminal-tokens", "needs a terminal: tests/it/gpuctl.rs"),
    ("POST /api/v1/service-accounts/token", "a login, not a call: login/tests.rs"),
];

/// The keys of the description that are methods.
const METHODS: [&str; 5] = ["GET", "POST", "PUT", "PATCH", "DELETE"];

const ID: &str = "0198f000-0000-7000-8000-000000000001";
/// The timeout for a command's request.
const ASKS_WITHIN: Duration = Duration::from_secs(60);

fn description() -> Value {
    let file = "../src/api/tests/snapshots/edge__api__tests__contract__openapi.snap";
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    serde_json::from_str(text.splitn(3, "---\n").nth(2).unwrap()).unwrap()
}

/// `GET /api/v1/skus` and what the description says of it.
fn operations(description: &Value) -> BTreeMap<String, Value> {
    let methods = |(path, of): (&String, &Value)| {
        let of = of.as_object().unwrap().clone();
        let known = of.into_iter().filter(|(method, _)| METHODS.contains(&method.to_uppercase().as_str()));
        let described = |(method, operation): (String, Value)| {
            (format!("{} {path}", method.to_uppercase()), resolved(description, operation))
        };
        known.map(described).collect::<Vec<_>>()
    };
    description["paths"].as_object().unwrap().iter().flat_map(methods).collect()
}

/// The operation with its responses and parameters in place of references to them.
fn resolved(description: &Value, mut operation: Value) -> Value {
    let resolve = |part: &mut Value| {
        if let Some(reference) = part["$ref"].as_str() {
            *part = description.pointer(reference.trim_start_matches('#')).unwrap().clone();
        }
    };
    operation["responses"].as_object_mut().into_iter().flat_map(serde_json::Map::values_mut).for_each(resolve);
    operation.get_mut("parameters").and_then(Value::as_array_mut).into_iter().flatten().for_each(resolve);
    operation
}

#[test]
fn every_api_route_has_a_command_or_a_reason_without() {
    let routes = operations(&description());
    let with_command: BTreeSet<&str> = COMMANDS.iter().map(|(route, _)| *route).collect();
    let gone: Vec<_> = with_command.iter().filter(|route| !routes.contains_key(**route)).collect();
    assert!(gone.is_empty(), "COMMANDS has routes that the API does not have: {gone:#?}");
    for (route, operation) in &routes {
        let reason = operation[WITHOUT_COMMAND].as_str();
        assert!(
            with_command.contains(route.as_str()) != reason.is_some(),
            "{route}: give it either a command (a row of COMMANDS in edge/cli/src/routes.rs), or the reason why it has none, in the \
             #[utoipa::path] of its handler: extensions((\"{WITHOUT_COMMAND}\" = json!(\"…\")))"
        );
    }
}

/// Commands that call no route of the table.
const LOCAL: [&str; 6] = ["login", "logout", "ssh", "completions", "recordings play", "terminal"];

#[test]
fn every_command_is_in_the_table_or_local() {
    fn leaves(command: &clap::Command, path: &str, found: &mut Vec<String>) {
        for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
            let path = format!("{path} {}", sub.get_name()).trim_start().to_owned();
            if !sub.has_subcommands() {
                found.push(path.clone());
            }
            leaves(sub, &path, found);
        }
    }
    let mut found = Vec::new();
    leaves(&Arguments::command(), "", &mut found);
    let known = |path: &String| {
        LOCAL.contains(&path.as_str())
            || COMMANDS.iter().any(|(_, command)| format!("{command} ").starts_with(&format!("{path} ")))
    };
    let unknown: Vec<_> = found.iter().filter(|path| !known(path)).collect();
    assert!(unknown.is_empty(), "{unknown:#?}");
}

/// A request that the fake API received.
#[derive(Clone, Debug)]
struct RecordedRequest {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
}

#[derive(Clone)]
struct FakeApi {
    operations: Arc<BTreeMap<String, Value>>,
    requests: Arc<Mutex<Vec<RecordedRequest>>>,
    notify: Arc<Notify>,
}

async fn answer(State(api): State<FakeApi>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1024 * 1024).await.unwrap();
    let is_next_page = head.uri.query().is_some_and(|query| query.contains("page_token="));
    let request = RecordedRequest { method: head.method, uri: head.uri, headers: head.headers, body };
    let operation = api.operation(&request);
    api.requests.lock().unwrap().push(request);
    api.notify.notify_one();
    let Some((_, operation)) = operation else { return StatusCode::NOT_FOUND.into_response() };
    let answers = operation["responses"].as_object().unwrap();
    let (status, answer) = answers.iter().find(|(status, _)| status.starts_with('2') || *status == "101").unwrap();
    let status = StatusCode::from_u16(status.parse().unwrap()).unwrap();
    let Some((media_type, content)) = answer["content"].as_object().and_then(|content| content.iter().next()) else {
        return status.into_response();
    };
    let mut example = content["example"].clone();
    // A list has two pages: its example has a next one.
    if let Some(next) = example.get_mut("next_page").filter(|_| is_next_page) {
        *next = Value::Null;
    }
    let body = if example.is_null() { String::new() } else { example.to_string() };
    (status, [("content-type", media_type.clone())], body).into_response()
}

impl FakeApi {
    /// The route of a request; literal parts take precedence over names in braces.
    fn operation(&self, request: &RecordedRequest) -> Option<(String, Value)> {
        let fitting = self.operations.iter().filter(|(route, _)| {
            let (method, path) = route.split_once(' ').unwrap();
            method == request.method.as_str() && fits(path, request.uri.path())
        });
        let found = fitting.min_by_key(|(route, _)| route.matches('{').count());
        found.map(|(route, operation)| (route.clone(), operation.clone()))
    }

    fn find(&self, route: &str) -> Option<RecordedRequest> {
        let requests = self.requests.lock().unwrap();
        requests.iter().find(|request| self.operation(request).is_some_and(|(found, _)| found == route)).cloned()
    }
}

/// The value of a placeholder.
fn value<'a>(word: &'a str, route: &str, key_file: &'a str) -> &'a str {
    match word {
        "TEXT" => "a reason",
        "REVIEW" => "pi_1:4200:GBP",
        "PRICE" => "2.50 EUR",
        "AMOUNT" => "20.00 EUR",
        "CODE" => "EUR",
        "MONTH" => "2026-11",
        "N" => "8",
        "REGION" => "eu-1",
        "HOST" => "gpu-1.example",
        "NAME" | "USER" => "ann",
        "FILE" => key_file,
        "ROLE" => "auditor",
        "POLICY" => "billing.window_seconds",
        "VALUE" => "60",
        "PURPOSE" => "node-ca",
        "ENTITY" => "node/0198f000-0000-7000-8000-000000000001",
        "WORKER" => "outbox-relay",
        "TASK-TYPE" => "node.validate",
        "SKU" if !route.contains("/skus") => "h100x8",
        "SKU" | "NODE" | "TASK" | "FINDING" | "ALLOCATION" | "SESSION" | "RECORDING" | "PAYMENT" | "ACCOUNT"
        | "EVENT" | "KEY" | "SERVICE-ACCOUNT" | "ENDPOINT" | "MEMBER" | "BINDING" | "POLICY-VALUE" | "ROLLOUT" => ID,
        word => word,
    }
}

/// The command line, with `--yes` where the command would ask.
fn arguments(route: &str, command: &str, key_file: &str) -> Vec<String> {
    let mut command_line = vec!["gpuctl".to_owned()];
    command_line.extend(command.split(' ').map(|word| value(word, route, key_file).to_owned()));
    let mut leaf = Arguments::command();
    for word in &command_line[1..] {
        let Some(sub) = leaf.find_subcommand(word) else { break };
        leaf = sub.clone();
    }
    command_line.extend(leaf.get_arguments().any(|argument| argument.get_id() == "yes").then(|| "--yes".to_owned()));
    command_line
}

#[tokio::test]
async fn every_command_sends_its_request_as_described() {
    let description = description();
    let folder = tempfile::tempdir().unwrap();
    let key_file: PathBuf = folder.path().join("key.pub");
    std::fs::write(&key_file, "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHljwaG ann\n").unwrap();
    let api =
        FakeApi { operations: Arc::new(operations(&description)), requests: Arc::default(), notify: Arc::default() };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    let routes = Router::new().fallback(answer).with_state(api.clone());
    tokio::spawn(async move { axum::serve(listener, routes).await });

    for (route, command) in
        COMMANDS.iter().filter(|(route, _)| TESTED_ELSEWHERE.iter().all(|(tested, _)| tested != route))
    {
        api.requests.lock().unwrap().clear();
        let command_line = arguments(route, command, key_file.to_str().unwrap());
        let arguments =
            Arguments::try_parse_from(&command_line).unwrap_or_else(|error| panic!("{command_line:?}: {error}"));
        let connection = Connection {
            server: Some(server.clone()),
            ca_bundle: None,
            token: Some("a-token".to_owned().into()),
            key: None,
            store: crate::login::login_store::Store::new(folder.path().join("logins"), "default").unwrap(),
            out: Output { format: OutputFormat::Table, quiet: true },
        };
        let request = async {
            loop {
                if let Some(request) = api.find(route) {
                    return request;
                }
                api.notify.notified().await;
            }
        };
        // A command that waits for a result has sent its request by then.
        let (request, failure) = tokio::select! {
            biased;
            request = tokio::time::timeout(ASKS_WITHIN, request) => (request.ok(), None),
            ended = execute(arguments.command, connection) => (api.find(route), ended.err()),
        };
        let request = request.unwrap_or_else(|| panic!("{command_line:?} does not ask for {route}: {failure:?}"));
        expect_described(&description, &api.operations[*route], route, &request);
    }
}

/// The request has what the description requires, and nothing that it does not know.
fn expect_described(description: &Value, operation: &Value, route: &str, request: &RecordedRequest) {
    let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
    let in_query = |required: bool| -> BTreeSet<String> {
        let parameters = parameters.iter().filter(|parameter| parameter["in"] == "query");
        let parameters = parameters.filter(|parameter| !required || parameter["required"] == true);
        parameters.map(|parameter| parameter["name"].as_str().unwrap().to_owned()).collect()
    };
    let url = reqwest::Url::parse(&format!("http://here{}", request.uri)).unwrap();
    let given: BTreeSet<String> = url.query_pairs().map(|(name, _)| name.into_owned()).collect();
    assert!(in_query(true).is_subset(&given) && given.is_subset(&in_query(false)), "{route}: {given:?}");
    assert!(request.headers["authorization"] == "Bearer a-token", "{route}");

    let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
    match (schema, request.body.is_empty()) {
        (Value::Null, empty) => assert!(empty, "{route} takes no body: {:?}", request.body),
        (schema, _) => {
            let body: Value = serde_json::from_slice(&request.body).unwrap_or_else(|error| panic!("{route}: {error}"));
            expect_fits(description, schema, &body, route);
        }
    }
}

/// Checks names, enumerations and plain types.
fn expect_fits(description: &Value, schema: &Value, value: &Value, at: &str) {
    if let Some(reference) = schema["$ref"].as_str() {
        let schema = description.pointer(reference.trim_start_matches('#')).unwrap();
        return expect_fits(description, schema, value, at);
    }
    if let Some(choices) = schema["oneOf"].as_array() {
        // Something, or null.
        let choice = choices.iter().find(|choice| (choice["type"] == "null") == value.is_null());
        return expect_fits(description, choice.unwrap_or_else(|| panic!("{at}: {value}")), value, at);
    }
    if let Some(allowed) = schema["enum"].as_array() {
        assert!(allowed.contains(value), "{at}: {value} is none of {allowed:?}");
    }
    let is = |name: &str| {
        schema["type"] == name || schema["type"].as_array().is_some_and(|types| types.contains(&json!(name)))
    };
    match value {
        Value::String(_) => assert!(schema["type"].is_null() || is("string"), "{at}: {value}"),
        Value::Number(_) => assert!(schema["type"].is_null() || is("integer") || is("number"), "{at}: {value}"),
        Value::Bool(_) => assert!(schema["type"].is_null() || is("boolean"), "{at}: {value}"),
        Value::Array(items) => {
            assert!(is("array"), "{at}: {value}");
            items.iter().for_each(|item| expect_fits(description, &schema["items"], item, at));
        }
        Value::Object(fields) => {
            let Some(properties) = schema["properties"].as_object() else { return };
            for (name, field) in fields {
                let schema = properties.get(name).unwrap_or_else(|| panic!("{at} has no `{name}`"));
                expect_fits(description, schema, field, &format!("{at} {name}"));
            }
            for name in schema["required"].as_array().into_iter().flatten() {
                assert!(fields.contains_key(name.as_str().unwrap()), "{at} lacks {name}");
            }
        }
        Value::Null => {}
    }
}

#[test]
fn message_names_commands_in_place_of_routes_and_no_position() {
    for (message, shown) in [
        (
            "`sku` is not the name or id of an active SKU; GET /api/v1/skus lists those there are.",
            "`sku` is not the name or id of an active SKU; `gpuctl skus list` lists those there are.",
        ),
        (
            "Field `gpu_count` cannot be read: a number is needed (line 1, column 15).",
            "Field `gpu_count` cannot be read: a number is needed.",
        ),
        ("GET /api/v1/admin/policy-values/resolve says what holds.", "`gpuctl policy resolve POLICY` says what holds."),
        ("The body is not valid JSON at line 1, column 7.", "The body is not valid JSON."),
        ("Look at `GET /api/v1/allocations/{id}`.", "Look at `gpuctl allocations show ALLOCATION`."),
        ("See (GET /api/v1/admin/keys), and wait.", "See (`gpuctl keys list`), and wait."),
        ("No such thing: GET /elsewhere/x is not a route.", "No such thing: GET /elsewhere/x is not a route."),
        ("In line 1, column 2 of your file.", "In line 1, column 2 of your file."),
    ] {
        assert_eq!(for_people(message), shown);
    }
}
