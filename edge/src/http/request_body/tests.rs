use axum::{
    Router,
    routing::{get, post},
};
use serde::Deserialize;
use serde_json::json;
use tower::ServiceExt;
use uuid::Uuid;

use super::*;
use crate::http::correlation::{RequestScope, Service};
use crate::testing::body_json;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code)]
struct NewNode {
    #[serde(default)]
    host: String,
    #[serde(default)]
    port: u16,
    #[serde(default)]
    gpus: Vec<Gpu>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code)]
struct Gpu {
    index: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code)]
struct Filter {
    port: Option<u16>,
}

fn router() -> Router {
    Router::new()
        .route("/nodes", post(|Json(_): Json<NewNode>| async { "fine" }))
        .route("/maybe", post(|JsonOrDefault(_): JsonOrDefault<NewNode>| async { "fine" }))
        .route("/nodes/{id}", get(|Path(_): Path<Uuid>| async { "fine" }))
        .route("/search", get(|Query(_): Query<Filter>| async { "fine" }))
        .layer(RequestScope(crate::testing::scope_settings(Service { name: "api", shows_route: false })))
}

async fn send(request: Request) -> (u16, Value) {
    let response = router().oneshot(request).await.unwrap();
    let status = response.status().as_u16();
    if status == 200 { (200, Value::Null) } else { (status, body_json(response).await) }
}

async fn post_json(path: &str, body: impl Into<Body>) -> (u16, Value) {
    send(Request::post(path).header("content-type", "application/json").body(body.into()).unwrap()).await
}

async fn fetch(path: &str) -> (u16, Value) {
    send(Request::get(path).body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn a_wrong_type_names_its_field_and_never_its_value() {
    let (status, body) = post_json("/nodes", r#"{"host":"a","port":"hunter2"}"#).await;
    assert_eq!((status, &body["code"]), (400, &json!("invalid_request")));
    assert_eq!(body["details"]["field"], "port");
    assert_eq!(body["details"]["line"], 1);
    assert!(body["message"].as_str().unwrap().contains("expected u16"), "{body}");
    assert!(!body.to_string().contains("hunter2"));
}

#[tokio::test]
async fn a_nested_field_is_named_by_its_path() {
    let (_, body) = post_json("/nodes", r#"{"gpus":[{"index":0},{"index":-1}]}"#).await;
    assert_eq!(body["details"]["field"], "gpus[1].index");
    assert!(body["message"].as_str().unwrap().contains("expected u32"), "{body}");
}

#[tokio::test]
async fn unknown_fields_broken_json_and_huge_numbers_are_refused() {
    for bad in [
        r#"{"hots":"a"}"#,
        r#"{"host":"a""#,
        r#"{"host":"a"} trailing"#,
        r#"{"host":"a","host":"b"}"#,
        r#"{"port":65536}"#,
        r#"{"port":-1}"#,
        r#"{"port":1e400}"#,
        r#"{"port":99999999999999999999999999999999}"#,
        r#"{"host":"a\u0000b"}"#,
        "[]",
        "null",
        "",
    ] {
        let (status, body) = post_json("/nodes", bad).await;
        assert_eq!((status, &body["code"]), (400, &json!("invalid_request")), "{bad}");
    }
    let deep = "[".repeat(100_000);
    assert_eq!(post_json("/nodes", deep).await.0, 400);
    let (_, unknown) = post_json("/nodes", r#"{"hots":"a"}"#).await;
    assert!(unknown["message"].as_str().unwrap().contains("unknown field `hots`"), "{unknown}");
    assert_eq!(post_json("/nodes", r#"{"host":"a\\u0000b"}"#).await.0, 200);
    assert_eq!(post_json("/nodes", vec![b'{', 0xff, b'}']).await.0, 400);
}

#[tokio::test]
async fn byte_order_mark_is_passed_over_and_another_encoding_is_named() {
    assert_eq!(post_json("/nodes", "\u{feff}{\"host\":\"ü\"}").await.0, 200);
    let (_, body) = post_json("/nodes", "\u{feff}{\"hots\":1}").await;
    assert_eq!(body["details"]["field"], "hots");
    assert_eq!(post_json("/nodes", "{\"host\":\"a\"}\u{feff}").await.0, 400);
    assert_eq!(post_json("/nodes", "\u{feff}{\"host\":\"\\u0000\"}").await.0, 400);
    let text = "{\"host\":\"a\"}";
    let in_units = |mark: bool, bytes: fn(u16) -> [u8; 2]| -> Vec<u8> {
        mark.then_some(0xfeff).into_iter().chain(text.encode_utf16()).flat_map(bytes).collect()
    };
    let in_points = |mark: bool, bytes: fn(u32) -> [u8; 4]| -> Vec<u8> {
        mark.then_some(0xfeff).into_iter().chain(text.chars().map(u32::from)).flat_map(bytes).collect()
    };
    for mark in [true, false] {
        for (bytes, encoding) in [
            (in_units(mark, u16::to_le_bytes), "UTF-16"),
            (in_units(mark, u16::to_be_bytes), "UTF-16"),
            (in_points(mark, u32::to_le_bytes), "UTF-32"),
            (in_points(mark, u32::to_be_bytes), "UTF-32"),
        ] {
            let (status, body) = post_json("/nodes", bytes).await;
            assert_eq!((status, &body["details"]["encoding"]), (400, &json!(encoding)), "{body}");
            assert!(body["message"].as_str().unwrap().contains("UTF-8"), "{body}");
        }
    }
}

#[tokio::test]
async fn list_in_place_of_an_object_is_refused_by_its_path() {
    for (bad, field) in [(r#"{"gpus":[[0]]}"#, "gpus[0]"), (r#"{"gpus":[{"index":0},[]]}"#, "gpus[1]")] {
        let (status, body) = post_json("/nodes", bad).await;
        assert_eq!((status, &body["code"]), (400, &json!("invalid_request")), "{bad}");
        assert_eq!(body["message"], format!("`{field}` is a list; it must be an object."));
        assert_eq!(body["details"]["field"], field);
    }
    let (_, body) = post_json("/nodes", " [{}]").await;
    assert_eq!(body["message"], "The body is a JSON list; send an object with named fields.");
}

#[tokio::test]
async fn an_unknown_field_of_a_megabyte_is_not_sent_back() {
    let (_, body) = post_json("/nodes", format!(r#"{{"{}":1}}"#, "x".repeat(900_000))).await;
    assert!(body.to_string().len() < 2_000);
}

#[tokio::test]
async fn another_media_type_is_refused_and_a_charset_is_not() {
    for bad in ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""] {
        let request = Request::post("/nodes").header("content-type", bad).body(Body::from("{}")).unwrap();
        let (status, body) = send(request).await;
        assert_eq!((status, &body["code"]), (415, &json!("unsupported_media_type")), "{bad}");
    }
    let request = Request::post("/nodes").header("content-type", "application/json; charset=ISO-8859-1");
    let (status, body) = send(request.body(Body::from("{}")).unwrap()).await;
    assert!(status == 415 && body["message"].as_str().unwrap().contains("ISO-8859-1"), "{body}");
    for good in [
        "application/json; charset=utf-8",
        "application/json;charset=UTF8",
        "application/json; charset=\"utf8\"",
        "application/json; charset=US-ASCII",
        "Application/JSON",
        "application/merge-patch+json",
    ] {
        let request = Request::post("/nodes").header("content-type", good).body(Body::from("{}")).unwrap();
        assert_eq!(send(request).await.0, 200, "{good}");
    }
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_with_or_without_its_length() {
    let ten_megabytes = vec![b' '; 10 << 20];
    let (status, body) = post_json("/nodes", ten_megabytes.clone()).await;
    assert_eq!((status, &body["code"]), (413, &json!("payload_too_large")));
    let pieces = futures::stream::iter(
        ten_megabytes.chunks(1 << 16).map(|piece| Ok::<_, std::io::Error>(piece.to_vec())).collect::<Vec<_>>(),
    );
    assert_eq!(post_json("/nodes", Body::from_stream(pieces)).await.0, 413);
    let mut just_fits = b"{}".to_vec();
    just_fits.resize(1 << 20, b' ');
    assert_eq!(post_json("/nodes", just_fits.clone()).await.0, 200);
    just_fits.push(b' ');
    assert_eq!(post_json("/nodes", just_fits).await.0, 413);
}

#[tokio::test(start_paused = true)]
async fn a_body_slower_than_its_pace_is_refused_and_one_that_pauses_within_it_is_not() {
    let pace = BodyPace { grace: std::time::Duration::from_millis(300), bytes_per_second: 1024 };
    let send_slowly = |first: usize, pause: u64| {
        let rest = futures::stream::once(async move {
            tokio::time::sleep(std::time::Duration::from_millis(pause)).await;
            Ok::<_, std::io::Error>(b"{}".to_vec())
        });
        let first = futures::stream::iter([Ok(vec![b' '; first])]);
        let request = Request::post("/nodes").header("content-type", "application/json").extension(pace);
        send(request.body(Body::from_stream(first.chain(rest))).unwrap())
    };
    let (status, body) = send_slowly(1, 2_000).await;
    assert_eq!((status, &body["details"]["reason"]), (400, &json!("body_too_slow")));
    assert_eq!(send_slowly(4096, 800).await.0, 200, "4,096 bytes make up for four seconds");
}

#[tokio::test]
async fn a_body_that_breaks_off_is_an_invalid_request() {
    let pieces = futures::stream::iter([Ok(b"{".to_vec()), Err(std::io::Error::other("reset"))]);
    assert_eq!(post_json("/nodes", Body::from_stream(pieces)).await.0, 400);
}

#[tokio::test]
async fn an_optional_body_may_be_left_out_but_not_be_something_else() {
    assert_eq!(send(Request::post("/maybe").body(Body::empty()).unwrap()).await.0, 200);
    assert_eq!(post_json("/maybe", "{}").await.0, 200);
    assert_eq!(send(Request::post("/maybe").body(Body::from("{}")).unwrap()).await.0, 415);
    assert_eq!(post_json("/maybe", "{").await.0, 400);
}

#[tokio::test]
async fn a_bad_uuid_says_what_is_expected() {
    for bad in ["/nodes/17", "/nodes/%00", "/nodes/%ff", "/nodes/not-a-uuid"] {
        let (status, body) = fetch(bad).await;
        assert_eq!((status, &body["code"]), (400, &json!("invalid_request")), "{bad}");
    }
    let (_, body) = fetch("/nodes/17").await;
    assert!(body["message"].as_str().unwrap().contains("UUID"), "{body}");
    assert_eq!(fetch("/nodes/0190b3f8-9f4e-7000-8000-000000000000").await.0, 200);
}

#[tokio::test]
async fn a_bad_query_names_its_parameter() {
    let message = async |query: &str| {
        let (_, body) = fetch(&format!("/search?{query}")).await;
        (body["message"].as_str().unwrap().to_owned(), body["details"]["field"].clone())
    };
    let unknown = "Query parameter `nope` is not known here; leave it out, or give `port`.";
    assert_eq!(message("nope=1").await, (unknown.to_owned(), json!("nope")));
    for bad in ["port=x", "port=-1", "port=1&port=2", "nope=1", "port=%00"] {
        let (status, body) = fetch(&format!("/search?{bad}")).await;
        assert_eq!((status, &body["code"]), (400, &json!("invalid_request")), "{bad}");
    }
    assert_eq!(fetch("/search?port=x").await.1["details"]["field"], "port");
    assert_eq!(fetch("/search").await.0, 200);
}
