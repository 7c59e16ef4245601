//! The alerts of the Alertmanager.

use super::harness::ApiHarness;
use crate::outbound::alertmanager::Alertmanager;
use crate::outbound::service_access::ServiceAccess;
use axum::Router;
use axum::body::Body;
use axum::http::StatusCode;
use axum::routing::get;
use futures::future::join_all;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

const PATH: &str = "/api/v1/admin/alerts";

/// An API whose Alertmanager gives this answer.
async fn api_with_answer(status: StatusCode, answer: impl Into<Vec<u8>>) -> ApiHarness {
    counting_api_with_answer(status, answer).await.0
}

/// The same, and how often the Alertmanager was asked.
async fn counting_api_with_answer(status: StatusCode, answer: impl Into<Vec<u8>>) -> (ApiHarness, Arc<AtomicU32>) {
    let answer = answer.into();
    let requests = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&requests);
    let give = move || async move {
        counter.fetch_add(1, Ordering::Relaxed);
        (status, Body::from(answer.clone()))
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().route("/prefix/api/v2/alerts", get(give));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let alertmanager =
        Alertmanager::new(&format!("http://{address}/prefix/"), None, &ServiceAccess::default()).unwrap();
    (ApiHarness::with_alertmanager(alertmanager).await, requests)
}

fn held(number: u32, severity: &str, silenced_by: &[&str], inhibited_by: &[&str]) -> Value {
    json!({
        "fingerprint": format!("{number:016x}"),
        "labels": { "alertname": format!("Alert{number}"), "severity": severity, "instance": "10.0.0.1:9464" },
        "annotations": { "summary": "Something is wrong.", "runbook_id": "ops.capacity", "description": "more" },
        "startsAt": format!("2026-11-26T10:{:02}:00.000Z", 59 - number % 60),
        "endsAt": "2026-11-26T12:00:00.000Z",
        "status": { "state": "active", "silencedBy": silenced_by, "inhibitedBy": inhibited_by, "mutedBy": [] },
        "receivers": [{ "name": "pager" }],
    })
}

#[tokio::test]
async fn alerts_are_listed_with_what_needs_an_operator_first() {
    let answer = json!([
        held(1, "critical", &["silence"], &[]),
        held(2, "none", &[], &[]),
        held(3, "warning", &[], &[]),
        held(4, "critical", &[], &["cause"]),
        held(5, "critical", &[], &[]),
        held(6, "warning", &[], &[]),
        { "fingerprint": "f", "labels": {}, "startsAt": "2026-11-26T10:00:00+01:00", "status": { "state": "unprocessed" } },
    ]);
    let api = api_with_answer(StatusCode::OK, answer.to_string()).await;
    api.get(PATH).user("ann").send().await.refused(403, "forbidden");
    let shown = api.get(PATH).admin().send().await.is(200).clone();
    assert_eq!((&shown["is_configured"], &shown["total"]), (&json!(true), &json!(7)));
    let order: Vec<_> =
        shown["items"].as_array().unwrap().iter().map(|it| (it["name"].as_str(), it["state"].as_str())).collect();
    let row = |name, state| (Some(name), Some(state));
    assert_eq!(
        order,
        [
            row("Alert5", "firing"),
            row("", "firing"),
            row("Alert6", "firing"),
            row("Alert3", "firing"),
            row("Alert2", "firing"),
            row("Alert4", "inhibited"),
            row("Alert1", "silenced"),
        ]
    );
    assert_eq!(
        shown["items"][0],
        json!({
            "id": "0000000000000005", "name": "Alert5", "severity": "critical", "state": "firing", "since": "2026-11-26T10:54:00Z",
            "summary": "Something is wrong.", "runbook_id": "ops.capacity", "labels": { "instance": "10.0.0.1:9464" },
        })
    );
}

#[tokio::test]
async fn tabs_of_many_operators_ask_the_alertmanager_once() {
    let (api, requests) =
        counting_api_with_answer(StatusCode::OK, json!([held(1, "critical", &[], &[])]).to_string()).await;
    // The provider's keys are read before, so that the requests are concurrent.
    api.get("/api/v1/me").admin().send().await.is(200);
    let shown = join_all((0..10).map(|_| api.get(PATH).admin().send())).await;
    assert!(shown.iter().all(|one| one.is(200) == shown[0].is(200)), "one list for all");
    assert_eq!(requests.load(Ordering::Relaxed), 1);
    api.get(PATH).user("ann").send().await.refused(403, "forbidden");
}

#[tokio::test]
async fn of_many_alerts_500_are_listed_and_all_are_counted() {
    let answer: Vec<_> = (0..1200).map(|number| held(number, "warning", &[], &[])).collect();
    let api = api_with_answer(StatusCode::OK, json!(answer).to_string()).await;
    let shown = api.get(PATH).admin().send().await.is(200).clone();
    assert_eq!((shown["items"].as_array().unwrap().len(), &shown["total"]), (500, &json!(1200)));
}

#[tokio::test]
async fn without_an_alertmanager_the_list_says_that_none_is_configured() {
    let api = ApiHarness::new().await;
    let shown = api.get(PATH).admin().send().await.is(200).clone();
    assert_eq!((&shown["is_configured"], &shown["items"]), (&json!(false), &json!([])));
}

#[tokio::test]
async fn alertmanager_that_fails_is_named_and_its_answer_is_not_passed_on() {
    let too_long = "[".repeat(9 << 20);
    for (status, answer) in [
        (StatusCode::INTERNAL_SERVER_ERROR, "secret of the Alertmanager".to_owned()),
        (StatusCode::OK, "<html>secret</html>".to_owned()),
        (StatusCode::OK, json!({ "secret": [] }).to_string()),
        (StatusCode::FOUND, String::new()),
        (StatusCode::OK, too_long),
    ] {
        let api = api_with_answer(status, answer).await;
        let refused = api.get(PATH).admin().send().await;
        refused.refused(502, "upstream_error");
        assert!(refused.body["message"].as_str().unwrap().contains("SVC_ALERTMANAGER_URL"), "{}", refused.body);
        assert!(!refused.body.to_string().contains("secret"), "{}", refused.body);
    }
    let gone = Alertmanager::new("http://127.0.0.1:1", None, &ServiceAccess::default()).unwrap();
    let api = ApiHarness::with_alertmanager(gone).await;
    api.get(PATH).admin().send().await.refused(502, "upstream_error");
}
