//! The API client against a scripted server.

use super::*;
use crate::output::OutputFormat;
use axum::http::HeaderMap;
use axum::response::{IntoResponse as _, Response as Page};
use axum::routing::{get, post};
use axum::{Json, Router};
use std::sync::Arc;

const OUT: Output = Output { format: OutputFormat::Json, quiet: true };

async fn serve(routes: Router) -> Url {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, routes).await });
    http_client::address(&url).unwrap()
}

async fn api(routes: Router) -> Api {
    let session = Session::AccessToken("a-token".to_owned().into());
    Api::new(serve(routes).await, None, session, None, OUT).unwrap()
}

fn envelope(code: &str) -> Json<Value> {
    Json(json!({ "code": code, "message": "No.", "correlation_id": "c-7", "details": {} }))
}

#[tokio::test]
async fn busy_server_is_retried_after_retry_after_under_the_same_key() {
    let keys: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = Arc::clone(&keys);
    let create = move |headers: HeaderMap| async move {
        assert_eq!(headers["authorization"], "Bearer a-token");
        let mut seen = seen.lock().unwrap();
        seen.push(headers["idempotency-key"].to_str().unwrap().to_owned());
        match seen.len() {
            1 => (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "0")], envelope("overloaded")).into_response(),
            2 => (StatusCode::CONFLICT, envelope("idempotency_in_progress")).into_response(),
            3 => (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "1")], envelope("rate_limited")).into_response(),
            _ => Json(json!({ "id": "x" })).into_response(),
        }
    };
    let api = api(Router::new().route("/things", post(create))).await;
    let began = Instant::now();
    assert_eq!(api.post("/things", &json!({})).await.unwrap()["id"], "x");
    assert!(began.elapsed() >= Duration::from_secs(1), "Retry-After is respected");
    let keys = keys.lock().unwrap();
    assert!(keys.len() == 4 && keys.iter().all(|key| *key == keys[0]), "{keys:?}");
}

#[tokio::test]
async fn busy_server_is_retried_at_the_date_in_retry_after() {
    let attempts: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let seen = Arc::clone(&attempts);
    let busy = move || async move {
        let mut seen = seen.lock().unwrap();
        seen.push(Instant::now());
        if seen.len() > 1 {
            return Json(json!({ "id": "x" })).into_response();
        }
        // By the server's clock, which differs from this machine's.
        let headers = [("date", "Thu, 26 Nov 2020 12:00:00 GMT"), ("retry-after", "Thu, 26 Nov 2020 12:00:02 GMT")];
        (StatusCode::SERVICE_UNAVAILABLE, headers, envelope("service_unavailable")).into_response()
    };
    let api = api(Router::new().route("/things", get(busy))).await;
    assert_eq!(api.get("/things", &[]).await.unwrap()["id"], "x");
    let attempts = attempts.lock().unwrap();
    assert!(attempts.len() == 2 && attempts[1] - attempts[0] >= Duration::from_secs(2), "{attempts:?}");
}

/// A page of a proxy, with its status.
fn page(status: u16) -> Page {
    let headers = [("content-type", "text/html")];
    (StatusCode::from_u16(status).unwrap(), headers, "<html><h1>Nothing here</h1></html>").into_response()
}

#[tokio::test]
async fn page_of_a_gateway_is_asked_again_under_the_same_key() {
    for status in [500, 502, 503, 504, 408, 425, 429, 522] {
        let keys: Arc<Mutex<Vec<String>>> = Arc::default();
        let seen = Arc::clone(&keys);
        let rent = move |headers: HeaderMap| async move {
            let mut seen = seen.lock().unwrap();
            seen.push(headers["idempotency-key"].to_str().unwrap().to_owned());
            if seen.len() == 1 { page(status) } else { Json(json!({ "id": "x" })).into_response() }
        };
        let api = api(Router::new().route("/things", post(rent))).await;
        assert_eq!(api.post("/things", &json!({})).await.unwrap()["id"], "x", "{status}");
        let keys = keys.lock().unwrap();
        assert!(keys.len() == 2 && keys[0] == keys[1], "{status}: {keys:?}");
    }
}

#[tokio::test]
async fn page_of_a_gateway_that_stays_names_the_key_and_no_wrong_address() {
    let gone = |status: u16| async move { page(status) };
    let routes = Router::new()
        .route("/bad", post(move || gone(502)).get(move || gone(504)).delete(move || gone(504)))
        .route("/html", post(move || gone(200)).get(move || gone(404)).delete(move || gone(403)))
        .route("/ours", post(|| async { (StatusCode::BAD_GATEWAY, envelope("upstream_error")) }));
    let api = api(routes).await;
    let token = "a-token".to_owned().into();
    let attempt = async |method: Method, path: &str, key: Option<&str>| {
        let call = ApiCall { method, path, query: &[], body: None, key: key.map(str::to_owned) };
        match api.attempt(&call, &token).await {
            AttemptOutcome::Answer(answer) => panic!("{answer}"),
            AttemptOutcome::Failed(failure) => (false, failure),
            AttemptOutcome::Retry { failure, .. } => (true, failure),
        }
    };
    for (method, path, key, is_retried, next) in [
        (Method::POST, "/bad", Some("my-key"), true, "--idempotency-key my-key"),
        (Method::POST, "/bad", None, false, "Look at the result"),
        (Method::GET, "/bad", None, true, "Try again"),
        // A second one would not find what the first one has removed.
        (Method::DELETE, "/bad", None, false, "Look at the result"),
        (Method::POST, "/ours", Some("my-key"), false, "--idempotency-key my-key"),
        (Method::POST, "/html", Some("my-key"), false, "Check the address"),
        (Method::GET, "/html", None, false, "Check the address"),
        (Method::DELETE, "/html", None, false, "firewall"),
    ] {
        let (retried, failure) = attempt(method.clone(), path, key).await;
        let shown = failure.to_string();
        assert_eq!((retried, failure.exit_status), (is_retried, ExitStatus::Server), "{method} {path}: {shown}");
        assert!(shown.contains(next), "{method} {path}: {shown}");
        assert_eq!(shown.contains("address"), next.contains("address"), "{method} {path}: {shown}");
    }
}

#[tokio::test]
async fn file_is_asked_for_again_after_a_page_of_a_gateway_and_a_page_is_no_file() {
    let asked = Arc::new(Mutex::new(0));
    let counts = Arc::clone(&asked);
    let statement = move || async move {
        *counts.lock().unwrap() += 1;
        if *counts.lock().unwrap() == 1 { page(502) } else { "a,b".into_response() }
    };
    let routes = Router::new().route("/statement", get(statement)).route("/portal", get(|| async { page(200) }));
    let api = api(routes).await;
    assert_eq!(api.open("/statement", "text/csv").await.unwrap().text().await.unwrap(), "a,b");
    assert_eq!(*asked.lock().unwrap(), 2);
    for failure in [api.open("/portal", "text/csv").await, api.stream("/portal", None).await].map(Result::unwrap_err) {
        assert_eq!(failure.exit_status, ExitStatus::Server);
        assert!(failure.next.as_deref().unwrap_or_default().contains("Check the address"), "{failure}");
    }
}

#[tokio::test]
async fn answer_with_a_byte_order_mark_is_read() {
    let marked = || async { "\u{feff}{\"id\": \"x\"}" };
    let api = api(Router::new().route("/things", get(marked))).await;
    assert_eq!(api.get("/things", &[]).await.unwrap()["id"], "x");
}

#[tokio::test]
async fn too_long_retry_after_is_reported_at_once() {
    let refuse = || async { (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "59")], envelope("rate_limited")) };
    let api = api(Router::new().route("/things", get(refuse))).await;
    let failure = api.get("/things", &[]).await.unwrap_err();
    assert_eq!((failure.exit_status, failure.next.as_deref()), (ExitStatus::RateLimited, Some("Ask again in 59 s.")));
}

#[tokio::test]
async fn refusal_is_not_retried_and_an_oversized_body_is_not_read() {
    let asked = Arc::new(Mutex::new(0));
    let counts = Arc::clone(&asked);
    let refuse = move || async move {
        *counts.lock().unwrap() += 1;
        (StatusCode::CONFLICT, envelope("state_conflict"))
    };
    let endless = || async { vec![b' '; MAX_BODY_BYTES + 1] };
    let page = || async { "<html>" };
    let elsewhere = || async { (StatusCode::FOUND, [("location", "/things")]) };
    let routes = Router::new()
        .route("/things", post(refuse))
        .route("/endless", get(endless))
        .route("/page", get(page))
        .route("/elsewhere", get(elsewhere));
    let api = api(routes).await;
    let failure = api.post("/things", &json!({})).await.unwrap_err();
    assert_eq!((failure.exit_status, *asked.lock().unwrap()), (ExitStatus::Refused, 1));
    assert_eq!(api.get("/endless", &[]).await.unwrap_err().exit_status, ExitStatus::Server);
    assert_eq!(api.get("/page", &[]).await.unwrap_err().exit_status, ExitStatus::Server);
    assert_eq!(
        api.get("/elsewhere", &[]).await.unwrap_err().exit_status,
        ExitStatus::Server,
        "no redirect is followed"
    );
}

#[tokio::test]
async fn list_is_read_page_by_page_up_to_the_limit() {
    let list = |axum::extract::RawQuery(query): axum::extract::RawQuery| async move {
        let query = query.unwrap();
        let page = usize::from(query.contains("page_token=1"));
        let limit: usize = query.split("limit=").nth(1).unwrap().split('&').next().unwrap().parse().unwrap();
        let items: Vec<_> = (0..limit.min(3)).map(|n| page * 3 + n).collect();
        Json(json!({ "items": items, "next_page": if page == 0 { json!("1") } else { Value::Null } }))
    };
    let api = api(Router::new().route("/things", get(list))).await;
    let all = api.list("/things", &[], 100).await.unwrap();
    assert_eq!(all, json!({ "items": [0, 1, 2, 3, 4, 5], "next_page": null }));
    let some = api.list("/things", &[("state", "a b&c".to_owned())], 2).await.unwrap();
    assert_eq!(some, json!({ "items": [0, 1], "next_page": "1" }));
}

#[tokio::test]
async fn unreachable_server_is_reported_soon_and_the_request_is_repeatable() {
    let session = || Session::AccessToken("a-token".to_owned().into());
    let nobody = http_client::address("http://127.0.0.1:9").unwrap();
    let began = Instant::now();
    let failure = Api::new(nobody, None, session(), None, OUT).unwrap().get("/x", &[]).await.unwrap_err();
    assert_eq!(failure.exit_status, ExitStatus::Network);
    assert!(failure.message.contains("cannot be reached: ") && !failure.message.contains("/x"), "{failure}");
    // Before the end of the 30 s for which requests to a busy server are retried.
    assert!(began.elapsed() < 5 * CONNECT_RETRY_FOR, "{:?}", began.elapsed());

    // The server closes the connection in the middle, so that the outcome is unknown.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = http_client::address(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
    tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    let api = Api::new(base, None, session(), Some("my-key".to_owned()), OUT).unwrap();
    let once = |key: Option<&str>| ApiCall {
        method: Method::POST,
        path: "/things",
        query: &[],
        body: Some(&Value::Null),
        key: key.map(str::to_owned),
    };
    let token = "a-token".to_owned().into();
    let AttemptOutcome::Retry { failure, .. } = api.attempt(&once(Some("my-key")), &token).await else {
        panic!("it is safe to ask again");
    };
    assert!(failure.next.as_deref().unwrap_or_default().contains("--idempotency-key my-key"), "{failure}");
    assert!(matches!(api.attempt(&once(None), &token).await, AttemptOutcome::Failed(_)), "without a key it is not");
}

#[tokio::test]
async fn whole_id_of_a_user_or_an_organisation_resolves_to_the_billing_account() {
    let [user, org, account, other] = [1, 2, 3, 4].map(uuid::Uuid::from_u128);
    let list = move |axum::extract::RawQuery(query): axum::extract::RawQuery| async move {
        let query = query.unwrap();
        let is_theirs = [format!("user_id={user}"), format!("org_id={org}")].iter().any(|it| query.contains(it));
        let items = if is_theirs { vec![json!({ "id": account })] } else { Vec::new() };
        Json(json!({ "items": items, "next_page": null }))
    };
    let api = api(Router::new().route(crate::resource_ref::ACCOUNT.path, get(list))).await;
    for (given, expected) in [(user, account), (org, account), (account, account), (other, other)] {
        let reference = given.to_string().parse().unwrap();
        assert_eq!(crate::resource_ref::account(&reference, &api).await.unwrap(), expected);
    }
}

#[tokio::test]
async fn present_nodes_are_listed_without_the_removed_ones_up_to_the_limit() {
    // Every second node is removed, and a page has four.
    let list = |axum::extract::RawQuery(query): axum::extract::RawQuery| async move {
        let query = query.unwrap();
        assert!(query.matches("page_token=").count() <= 1, "{query}");
        let value = |name: &str| query.split(name).nth(1).map(|rest| rest.split('&').next().unwrap().parse().unwrap());
        let (begin, limit): (usize, usize) = (value("page_token=").unwrap_or(0), value("limit=").unwrap());
        let end = (begin + limit.min(4)).min(10);
        let items: Vec<_> =
            (begin..end).map(|n| json!({ "id": n, "state": if n % 2 == 0 { "removed" } else { "active" } })).collect();
        Json(json!({ "items": items, "next_page": if end < 10 { json!(end.to_string()) } else { Value::Null } }))
    };
    let api = api(Router::new().route(crate::resource_ref::NODE.path, get(list))).await;
    for (limit, expected) in [(100, vec![1, 3, 5, 7, 9]), (2, vec![1, 3])] {
        let page = crate::resource_ref::present_nodes(&vec![("sku", "x".to_owned())], limit, &api).await.unwrap();
        let ids: Vec<u64> = page["items"].as_array().unwrap().iter().map(|node| node["id"].as_u64().unwrap()).collect();
        assert_eq!(ids, expected, "{page}");
        assert_eq!(page["next_page"].is_null(), limit == 100, "{page}");
    }
}

#[tokio::test]
async fn entity_is_restarted_by_a_unique_prefix_of_its_id() {
    let ids = ["0198f000-0000-7000-8000-00000000000a", "0199f000-0000-7000-8000-00000000000b"];
    let tree = move |axum::extract::RawQuery(query): axum::extract::RawQuery| async move {
        assert_eq!(query.unwrap(), "kind=key_set&limit=1000");
        Json(json!({ "entities": ids.map(|id| json!({ "kind": "key_set", "id": id })), "truncated": false }))
    };
    let list = move || async move {
        Json(json!({ "items": ids.map(|id| json!({ "id": id, "host": "gpu-1" })), "next_page": null }))
    };
    let restarted: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = Arc::clone(&restarted);
    let restart = move |uri: axum::http::Uri| async move {
        log.lock().unwrap().push(uri.path().to_owned());
        Json(json!({ "restarted": true }))
    };
    let routes = Router::new()
        .route("/api/v1/admin/runtime/tree", get(tree))
        .route(crate::resource_ref::NODE.path, get(list))
        .route("/api/v1/admin/runtime/entities/{kind}/{id}/restart", post(restart));
    let api = api(routes).await;
    let run = async |entity: &str| {
        let command_line = ["gpuctl", "restart", entity, "--yes"];
        let arguments = <crate::Arguments as clap::Parser>::try_parse_from(command_line).unwrap();
        let crate::Command::Restart(args) = arguments.command else { panic!("{entity}") };
        crate::cluster::restart(args, &api).await
    };
    for (entity, id) in [("key_set/0198", ids[0]), ("node/0199f", ids[1])] {
        run(entity).await.unwrap();
        let kind = entity.split('/').next().unwrap();
        let path = format!("/api/v1/admin/runtime/entities/{kind}/{id}/restart");
        assert_eq!(restarted.lock().unwrap().pop(), Some(path));
    }
    assert_eq!(run("key_set/019").await.unwrap_err().exit_status, ExitStatus::NotFound, "three characters");
    assert!(run("node/0197").await.unwrap_err().next.unwrap().contains("gpuctl nodes list"));
}

#[tokio::test]
async fn more_gpus_than_a_node_has_are_refused_without_advice_to_wait() {
    let skus = || async { Json(json!({ "items": [{ "name": "h100x8", "gpu": { "count": 8 } }], "next_page": null })) };
    let api = api(Router::new().route("/api/v1/skus", get(skus))).await;
    for (sku, gpus) in [("h100x8", 1), ("h100x8", 8), ("unknown", 9)] {
        crate::skus::expect_fits_one_node(sku, gpus, &api).await.unwrap();
    }
    let failure = crate::skus::expect_fits_one_node("h100x8", 9, &api).await.unwrap_err();
    let text = failure.to_string();
    assert!(failure.exit_status == ExitStatus::Refused && text.contains("each of its nodes has 8"), "{text}");
    assert!(!text.contains("queue") && !text.contains("wait"), "{text}");
}

#[tokio::test]
async fn default_ssh_key_is_deleted_after_a_confirmation_alone() {
    let ids = ["0198f000-0000-7000-8000-00000000000a", "0198f000-0000-7000-8000-00000000000b"];
    let key = move |at: usize| json!({ "id": ids[at], "name": format!("key-{at}"), "is_default": at == 1 });
    let list = move || async move { Json(json!({ "items": [key(0), key(1)], "next_page": null })) };
    let deleted: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = Arc::clone(&deleted);
    let delete = move |axum::extract::Path(id): axum::extract::Path<String>| async move {
        log.lock().unwrap().push(id);
        StatusCode::NO_CONTENT
    };
    let routes = Router::new()
        .route(crate::resource_ref::SSH_KEY.path, get(list))
        .route("/api/v1/ssh-keys/{id}", axum::routing::delete(delete));
    let api = api(routes).await;
    let run = async |command_line: &[&str]| {
        let command_line = [&["gpuctl", "ssh-keys", "delete"], command_line].concat();
        let arguments = <crate::Arguments as clap::Parser>::try_parse_from(command_line).unwrap();
        let crate::Command::SshKeys(command) = arguments.command else { panic!("another command") };
        crate::ssh_keys::run(command, &api).await
    };
    // There is no terminal to ask in.
    let failure = run(&["key-1"]).await.unwrap_err();
    assert_eq!((failure.exit_status, deleted.lock().unwrap().len()), (ExitStatus::Usage, 0), "{failure}");
    run(&["key-1", "--yes"]).await.unwrap();
    run(&["key-0"]).await.unwrap();
    assert_eq!(*deleted.lock().unwrap(), [ids[1], ids[0]]);
}

#[tokio::test]
async fn policy_key_without_a_value_names_the_value_in_force() {
    let none = || async { Json(json!({ "items": [], "next_page": null })) };
    let catalog = || async { Json(json!({ "items": [{ "key": "billing.window_seconds" }] })) };
    let routes =
        Router::new().route("/api/v1/admin/policy-values", get(none)).route("/api/v1/admin/policies", get(catalog));
    let api = api(routes).await;
    let show = async |key: &str| {
        let arguments = <crate::Arguments as clap::Parser>::try_parse_from(["gpuctl", "policy", "show", key]).unwrap();
        let crate::Command::Policy(command) = arguments.command else { panic!("{key}") };
        crate::policy::run(command, &api).await.unwrap_err()
    };
    let unset = show("billing.window_seconds").await;
    assert_eq!(unset.exit_status, ExitStatus::NotFound);
    assert!(unset.message.contains("gpuctl policy resolve billing.window_seconds"), "{unset}");
    assert!(unset.message.contains("gpuctl policy catalog"), "{unset}");
    assert!(!show("billing.windows").await.message.contains("resolve"), "no key of the catalog");
}

#[tokio::test]
async fn no_token_is_issued_for_a_file_that_cannot_be_made() {
    let issued: Arc<Mutex<u32>> = Arc::default();
    let count = Arc::clone(&issued);
    let issue = move || async move {
        *count.lock().unwrap() += 1;
        Json(
            json!({ "token_id": "t", "expires_at": "2026-11-29T00:00:00Z", "bootstrap_bundle": { "token": "secret" } }),
        )
    };
    let id = "0198f000-0000-7000-8000-00000000000a";
    let api = api(Router::new().route(&format!("/api/v1/admin/nodes/{id}/enrollment-token"), post(issue))).await;
    let token = async |to: &std::path::Path| {
        let line = ["gpuctl", "nodes", "token", id, "--to", to.to_str().unwrap()];
        let arguments = <crate::Arguments as clap::Parser>::try_parse_from(line).unwrap();
        let crate::Command::Nodes(command) = arguments.command else { panic!("another command") };
        crate::nodes::run(command, &api).await
    };
    let folder = tempfile::tempdir().unwrap();
    let failure = token(&folder.path().join("not-there/token.json")).await.unwrap_err();
    assert!(failure.exit_status == ExitStatus::Usage && failure.next.is_some(), "{failure}");
    assert_eq!(*issued.lock().unwrap(), 0, "a token that nobody gets is not issued");
    let file = folder.path().join("token.json");
    token(&file).await.unwrap();
    assert!(std::fs::read_to_string(&file).unwrap().contains("secret"));
    assert!(token(&file).await.unwrap_err().message.contains("is there already"));
    assert_eq!(*issued.lock().unwrap(), 1);
}

#[tokio::test]
async fn list_that_repeats_itself_ends() {
    // Each page has another one, and its entries are all filtered out.
    let count = std::sync::atomic::AtomicUsize::new(0);
    let count = Arc::new(count);
    let asked = Arc::clone(&count);
    let longest = move || async move {
        let page = asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Json(json!({ "items": [{ "state": "removed" }], "next_page": page.to_string() }))
    };
    let long = api(Router::new().route(crate::resource_ref::NODE.path, get(longest))).await;
    let page = crate::resource_ref::present_nodes(&Vec::new(), 10, &long).await.unwrap();
    assert!(page["items"] == json!([]) && page["next_page"].is_string(), "{page}");
    assert_eq!(count.load(std::sync::atomic::Ordering::Relaxed), MAX_PAGES);
    // Each page names itself as the next one.
    let endless = || async { Json(json!({ "items": [{ "state": "removed" }], "next_page": "again" })) };
    let api = api(Router::new().route(crate::resource_ref::NODE.path, get(endless))).await;
    let failure = crate::resource_ref::present_nodes(&Vec::new(), 10, &api).await.unwrap_err();
    assert!(failure.exit_status == ExitStatus::Server && failure.message.contains("repeats"), "{failure}");
}
