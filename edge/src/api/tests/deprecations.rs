//! Deprecated routes: the table, what announces them, and `deploy/docs/src/reference/deprecations.md`.

use super::contract::operations;
use super::harness::ApiHarness;
use crate::api::deprecation::{DEPRECATIONS, Deprecation};
use crate::api::{routes_deprecating, served};
use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use chrono::TimeDelta;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use tower::ServiceExt as _;

/// A client that is built when the deprecation is announced still works for this long.
const SHORTEST_NOTICE: TimeDelta = TimeDelta::days(180);

/// What a deprecated route is like: one that answers anyone, and one that refuses without a token.
const EXAMPLES: &[Deprecation] = &[
    Deprecation {
        method: "GET",
        path: "/api/v1/healthz",
        since: "2026-12-01",
        sunset: "2027-06-01",
        successor: "/api/v1/me",
    },
    Deprecation {
        method: "GET",
        path: "/api/v1/allocations/{id}",
        since: "2026-12-01",
        sunset: "2027-06-01",
        successor: "/api/v1/recordings/{id}",
    },
];

fn described(table: &'static [Deprecation]) -> Value {
    serde_json::to_value(routes_deprecating(table).1.complete()).unwrap()
}

/// What is wrong with the rows of a table.
fn faults(table: &'static [Deprecation], changelog: &str) -> Vec<String> {
    let document = described(table);
    let routes: BTreeSet<_> = operations(&document).into_iter().map(|(method, path, _)| (method, path)).collect();
    let mut faults = Vec::new();
    for row in table {
        let name = format!("{} {}", row.method, row.path);
        match row.times() {
            None => faults.push(format!("{name}: no dates")),
            Some((since, sunset)) if sunset - since < SHORTEST_NOTICE => faults.push(format!("{name}: short notice")),
            Some(_) => {}
        }
        if !routes.contains(&(row.method.to_owned(), row.path.to_owned())) {
            faults.push(format!("{name}: no such route"));
        }
        if row.path == row.successor || !routes.iter().any(|(_, path)| path == row.successor) {
            faults.push(format!("{name}: no successor"));
        }
        if !changelog.contains(&format!("`{name}`")) {
            faults.push(format!("{name}: not in the changelog"));
        }
    }
    faults
}

#[test]
fn every_deprecated_route_has_a_successor_a_notice_and_a_line_of_the_changelog() {
    let changelog = include_str!("../../../../CHANGELOG.md");
    assert_eq!(faults(DEPRECATIONS, changelog), Vec::<String>::new());
    let announced = "`GET /api/v1/healthz` `GET /api/v1/allocations/{id}`";
    assert_eq!(faults(EXAMPLES, announced), Vec::<String>::new());
    let [row, _] = EXAMPLES else { unreachable!() };
    for (wrong, fault) in [
        (Deprecation { path: "/api/v1/nothing", ..*row }, "GET /api/v1/nothing: no such route"),
        (Deprecation { sunset: "2027-05-01", ..*row }, "GET /api/v1/healthz: short notice"),
        (Deprecation { successor: "/api/v1/nothing", ..*row }, "GET /api/v1/healthz: no successor"),
        (Deprecation { method: "PUT", ..*row }, "PUT /api/v1/healthz: not in the changelog"),
    ] {
        let found = faults(Box::leak(Box::new([wrong])), announced);
        assert!(found.contains(&fault.to_owned()), "{found:?}");
    }
}

#[test]
fn description_marks_exactly_the_deprecated_routes() {
    for table in [DEPRECATIONS, EXAMPLES] {
        let marked = |(method, path, operation): (String, String, Value)| {
            let is_marked = operation["deprecated"] == true;
            for (status, response) in operation["responses"].as_object().unwrap() {
                for name in ["Deprecation", "Sunset", "Link"] {
                    let header = &response["headers"][name];
                    assert!(header.is_object() || !is_marked, "{method} {path} {status}: {name}");
                }
            }
            is_marked.then(|| (method, path, operation["description"].as_str().unwrap_or_default().to_owned()))
        };
        let marked: Vec<_> = operations(&described(table)).into_iter().filter_map(marked).collect();
        let found: BTreeSet<_> = marked.iter().map(|(method, path, _)| (method.as_str(), path.as_str())).collect();
        let rows: BTreeSet<_> = table.iter().map(|row| (row.method, row.path)).collect();
        assert_eq!(found, rows);
        for row in table {
            let (.., text) = marked.iter().find(|(_, path, _)| path == row.path).unwrap();
            assert!(text.contains(row.since) && text.contains(row.sunset) && text.contains(row.successor), "{text}");
        }
    }
}

/// The answer of a route of this table to a client without a token.
async fn answer(api: &ApiHarness, table: &'static [Deprecation], row: &Deprecation) -> (StatusCode, HeaderMap) {
    let path = row.path.replace("{id}", "0199e3f4-5c1b-7a00-8000-0c0ffee0c0de");
    let request = Request::builder().method(row.method).uri(path).body(Body::empty()).unwrap();
    let response = served(routes_deprecating(table), api.app.clone()).oneshot(request).await.unwrap();
    (response.status(), response.headers().clone())
}

#[tokio::test]
async fn answers_and_refusals_of_deprecated_routes_say_since_when_until_when_and_what_to_use() {
    let api = ApiHarness::new().await;
    for table in [DEPRECATIONS, EXAMPLES] {
        for row in table {
            let (_, headers) = answer(&api, table, row).await;
            let (since, sunset) = row.times().unwrap();
            let of = |name: &str| headers[name].to_str().unwrap().to_owned();
            assert_eq!(of("deprecation"), format!("@{}", since.timestamp()), "{row:?}");
            assert_eq!(chrono::DateTime::parse_from_rfc2822(&of("sunset")).unwrap(), sunset, "{row:?}");
            assert!(of("link").contains("</api/v1/docs>; rel=\"deprecation\""), "{row:?}");
        }
    }
    let [open, refusing] = EXAMPLES else { unreachable!() };
    let (status, headers) = answer(&api, EXAMPLES, open).await;
    assert_eq!((status, &headers["deprecation"]), (StatusCode::OK, &"@1796083200".parse().unwrap()));
    assert_eq!(headers["sunset"], "Tue, 01 Jun 2027 00:00:00 GMT");
    assert!(headers["link"].to_str().unwrap().ends_with(r#", </api/v1/me>; rel="successor-version""#));
    let (status, headers) = answer(&api, EXAMPLES, refusing).await;
    assert_eq!((status, headers["link"].to_str().unwrap().contains("successor")), (StatusCode::UNAUTHORIZED, false));
    // The same routes without a row.
    let (_, headers) = answer(&api, &[], open).await;
    assert!(!headers.contains_key("deprecation") && !headers.contains_key("sunset") && !headers.contains_key("link"));
}

fn page(table: &[Deprecation]) -> String {
    let mut text = PAGE.to_owned();
    if table.is_empty() {
        text.push_str("No route is deprecated.\n");
        return text;
    }
    text.push_str("| route | deprecated since | may be gone from | use |\n| --- | --- | --- | --- |\n");
    for Deprecation { method, path, since, sunset, successor } in table {
        writeln!(text, "| `{method} {path}` | {since} | {sunset} | `{successor}` |").unwrap();
    }
    text
}

const PAGE: &str = "\
# Deprecated routes

<!-- Made by the code: `UPDATE_DOCS=1 cargo test -p edge deprecations_md` regenerates it. -->

A route of `/api/v1` that is to be replaced is deprecated first, and works unchanged for at least 180 days from then on. Meanwhile each of its answers,
refusals included, has the headers

- `Deprecation: @1796083200` ([RFC 9745](https://www.rfc-editor.org/rfc/rfc9745)): since when it is deprecated, in seconds since 1970,
- `Sunset: Tue, 01 Jun 2027 00:00:00 GMT` ([RFC 8594](https://www.rfc-editor.org/rfc/rfc8594)): from when on it may be gone,
- `Link`, with the relations `deprecation` and `sunset` (the description), and `successor-version` where the successor has one address.

The OpenAPI description has `deprecated: true`, which generated clients turn into a warning of their compiler. Fields of an answer are not deprecated: what
is added to an answer is added beside what there is. Agents have a protocol number in place of these headers: the service accepts the present one and the two before it.

";

#[test]
fn deprecations_md_matches_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/docs/src/reference/deprecations.md");
    let made = page(DEPRECATIONS);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(stored, made, "deploy/docs/src/reference/deprecations.md is not what the code says: UPDATE_DOCS=1");
    assert!(page(EXAMPLES).contains("| `GET /api/v1/healthz` | 2026-12-01 | 2027-06-01 | `/api/v1/me` |\n"));
}
