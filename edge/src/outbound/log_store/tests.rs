//! What the gateway makes of a store's answers, with stores that answer as Loki, its proxies and other services do.

use super::*;
use crate::outbound::service_access::ServiceCredential;
use strum::IntoEnumIterator as _;
use wiremock::matchers::{header, method, path};
use wiremock::{Mock, MockServer, ResponseTemplate};

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const BATCH: &[u8] = br#"{"streams":[{"stream":{"service":"node-agent"},"values":[["1","a line"]]}]}"#;

async fn store_that_answers(answer: ResponseTemplate) -> MockServer {
    let server = MockServer::start().await;
    Mock::given(method("POST")).and(path(PUSH_PATH)).respond_with(answer).mount(&server).await;
    server
}

fn client(base: &str) -> LogStore {
    crate::testing::install_crypto();
    LogStore::new(base, None, &ServiceAccess::default()).unwrap()
}

async fn failure_at(base: &str) -> PushFailure {
    client(base).push(JSON, Bytes::from_static(BATCH)).await.unwrap_err()
}

const NO_HANDLER: &str = r#"{"error":"no handler found for uri [/loki/api/v1/push?pretty] and method [POST]"}"#;

fn page(status: u16) -> ResponseTemplate {
    ResponseTemplate::new(status).set_body_raw("<html>Please log in</html>", "text/html; charset=utf-8")
}

#[tokio::test]
async fn each_kind_of_answer_has_its_reason_and_only_lines_that_the_store_refuses_may_be_dropped() {
    let plain = |status: u16, text: &str| ResponseTemplate::new(status).set_body_string(text);
    let moved = ResponseTemplate::new(302).insert_header("Location", "https://login.example/?next=push");
    for (answer, kind, code) in [
        (plain(401, "no org id\n"), PushFailureKind::Credentials, Code::ServiceUnavailable),
        (plain(403, "invalid scope requested"), PushFailureKind::Credentials, Code::ServiceUnavailable),
        (page(403), PushFailureKind::Credentials, Code::ServiceUnavailable),
        (plain(400, "multiple org IDs present"), PushFailureKind::Credentials, Code::ServiceUnavailable),
        (plain(404, "404 page not found"), PushFailureKind::Address, Code::ServiceUnavailable),
        (plain(405, ""), PushFailureKind::Address, Code::ServiceUnavailable),
        (moved, PushFailureKind::Address, Code::ServiceUnavailable),
        // VictoriaLogs without `/insert`, Elasticsearch and OpenSearch, a server of TLS.
        (
            plain(400, r#"unsupported path requested: "/loki/api/v1/push""#),
            PushFailureKind::Address,
            Code::ServiceUnavailable,
        ),
        (plain(400, NO_HANDLER), PushFailureKind::Address, Code::ServiceUnavailable),
        (
            plain(400, "Client sent an HTTP request to an HTTPS server.\n"),
            PushFailureKind::Address,
            Code::ServiceUnavailable,
        ),
        (plain(406, "Not Acceptable!"), PushFailureKind::Address, Code::ServiceUnavailable),
        (page(200), PushFailureKind::Address, Code::ServiceUnavailable),
        (page(400), PushFailureKind::Address, Code::ServiceUnavailable),
        (plain(400, "entry too far behind"), PushFailureKind::Batch, Code::InvalidRequest),
        (plain(400, "Max entry size '262144' bytes exceeded"), PushFailureKind::Batch, Code::InvalidRequest),
        (plain(422, "at least one label pair is required per stream"), PushFailureKind::Batch, Code::InvalidRequest),
        (plain(413, ""), PushFailureKind::BatchSize, Code::PayloadTooLarge),
        (page(413), PushFailureKind::BatchSize, Code::PayloadTooLarge),
        (plain(429, "Ingestion rate limit exceeded"), PushFailureKind::RateLimit, Code::RateLimited),
        (plain(500, "out of disk"), PushFailureKind::Outage, Code::ServiceUnavailable),
        (page(502), PushFailureKind::Outage, Code::ServiceUnavailable),
        (plain(408, ""), PushFailureKind::Outage, Code::ServiceUnavailable),
    ] {
        let store = store_that_answers(answer).await;
        let failure = failure_at(&store.uri()).await;
        let shown = format!("{failure:?}");
        assert_eq!(failure.kind, kind, "{shown}");
        let error = ApiError::from(failure);
        assert_eq!(error.code(), code, "{shown}");
        let is_dropped_by_collectors = matches!(code, Code::InvalidRequest | Code::PayloadTooLarge);
        let is_of_these_lines = matches!(kind, PushFailureKind::Batch | PushFailureKind::BatchSize);
        assert_eq!(is_dropped_by_collectors, is_of_these_lines, "{shown}");
        assert!(!shown.contains("<html>"), "{shown}");
    }
}

#[tokio::test]
async fn wrong_address_is_distinguished_from_an_outage() {
    let server = store_that_answers(ResponseTemplate::new(204)).await;
    let port = server.address().port();
    // TLS with a server that has none.
    let failure = failure_at(&format!("https://127.0.0.1:{port}")).await;
    assert_eq!(failure.kind, PushFailureKind::Address, "{failure:?}");
    // A path that is not the store's.
    assert_eq!(failure_at(&format!("{}/wrong", server.uri())).await.kind, PushFailureKind::Address);
    client(&server.uri()).push(JSON, Bytes::from_static(BATCH)).await.unwrap();
    drop(server);
    // It has its port and accepts no connection.
    let closed = tokio::net::TcpSocket::new_v4().unwrap();
    closed.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = closed.local_addr().unwrap();
    assert_eq!(failure_at(&format!("http://{address}")).await.kind, PushFailureKind::Outage);
}

#[tokio::test]
async fn certificate_by_an_unknown_authority_is_a_wrong_setting() {
    use crate::outbound::package_registry::fake::FakeRegistry;
    use axum::response::IntoResponse as _;
    crate::testing::install_crypto();
    let folder = tempfile::tempdir().unwrap();
    let authority = local_servers::pki::Authority::create(folder.path()).unwrap();
    let answer = Box::new(|_: &str, _: Option<&str>| axum::http::StatusCode::NO_CONTENT.into_response());
    let store = FakeRegistry::start(&authority, answer).await;
    let url = format!("https://localhost:{}", store.port);
    let failure = failure_at(&url).await;
    assert_eq!(failure.kind, PushFailureKind::Address, "{failure:?}");
    let trusting = LogStore::new(&url, Some(authority.certificate_pem()), &ServiceAccess::default()).unwrap();
    trusting.push(JSON, Bytes::from_static(BATCH)).await.unwrap();
}

#[tokio::test]
async fn tenant_and_credentials_are_sent_and_the_stores_pause_is_passed_on() {
    crate::testing::install_crypto();
    let server = MockServer::start().await;
    let admitted = Mock::given(header("X-Scope-OrgID", "fleet")).and(header("Authorization", "Basic b3BzOmh1bnRlcjI="));
    admitted.respond_with(ResponseTemplate::new(204)).with_priority(1).mount(&server).await;
    let refused = ResponseTemplate::new(401).set_body_string("no org id");
    Mock::given(method("POST")).respond_with(refused).with_priority(2).mount(&server).await;
    let credential = ServiceCredential::Basic { user: "ops".to_owned(), password: "hunter2".into() };
    let access = ServiceAccess { tenant: Some("fleet".to_owned()), credential: Some(credential) };
    let store = LogStore::new(&server.uri(), None, &access).unwrap();
    store.push(JSON, Bytes::from_static(BATCH)).await.unwrap();
    store.check().await.unwrap();
    assert!(
        !format!("{store:?}").contains("hunter2") && !format!("{store:?}").contains("b3BzOmh1bnRlcjI="),
        "{store:?}"
    );
    let refused = client(&server.uri()).check().await.unwrap_err();
    assert!(refused.contains("SVC_LOG_STORE_TENANT") && refused.contains("no org id"), "{refused}");

    // The clock of a store may be years away from this machine's.
    for (pause, seconds) in [("7", 7), ("Thu, 26 Nov 2020 12:00:25 GMT", 25)] {
        let busy = ResponseTemplate::new(429).insert_header("Date", "Thu, 26 Nov 2020 12:00:00 GMT");
        let busy = store_that_answers(busy.insert_header("Retry-After", pause).set_body_string("rate limit")).await;
        let failure = failure_at(&busy.uri()).await;
        assert_eq!(
            (failure.kind, failure.retry_after),
            (PushFailureKind::RateLimit, Some(Duration::from_secs(seconds)))
        );
        // It is there, and admits this service.
        client(&busy.uri()).check().await.unwrap();
    }
}

#[tokio::test]
async fn store_at_a_nearly_right_address_fails_the_check_with_the_setting() {
    let plain = |status: u16, text: &str| ResponseTemplate::new(status).set_body_string(text);
    for answer in [
        plain(400, r#"unsupported path requested: "/loki/api/v1/push""#),
        plain(400, NO_HANDLER),
        plain(400, "Client sent an HTTP request to an HTTPS server.\n"),
        plain(422, "Unprocessable Entity"),
        plain(413, ""),
        page(200),
    ] {
        let store = store_that_answers(answer).await;
        let refused = client(&store.uri()).check().await.unwrap_err();
        assert!(refused.contains("SVC_LOG_STORE_URL"), "{refused}");
    }
    // What versions of Loki say of an empty batch.
    for answer in [plain(204, ""), plain(422, "error at least one valid stream is required for ingestion\n")] {
        let store = store_that_answers(answer).await;
        client(&store.uri()).check().await.unwrap();
    }
}

/// A store that answers an empty batch as `empty`, and any other as `lines`.
async fn store_that_distinguishes(empty: ResponseTemplate, lines: ResponseTemplate) -> MockServer {
    use wiremock::matchers::body_string;
    let server = MockServer::start().await;
    for body in [r#"{"streams":[]}"#, "\0"] {
        Mock::given(body_string(body)).respond_with(empty.clone()).with_priority(1).mount(&server).await;
    }
    Mock::given(method("POST")).respond_with(lines).with_priority(2).mount(&server).await;
    server
}

#[tokio::test]
async fn lines_that_a_firewall_refuses_are_halved_while_an_empty_batch_is_admitted() {
    let admits = || ResponseTemplate::new(204);
    for refusal in [page(403), ResponseTemplate::new(403), ResponseTemplate::new(406), page(200), page(400)] {
        for content_type in [JSON, HeaderValue::from_static("application/x-protobuf")] {
            let store = store_that_distinguishes(admits(), refusal.clone()).await;
            let failure = client(&store.uri()).push(content_type, Bytes::from_static(BATCH)).await.unwrap_err();
            assert_eq!(failure.kind.name(), "filtered", "{failure:?}");
            let error = ApiError::from(failure);
            assert_eq!(error.code(), Code::PayloadTooLarge, "{error:?}");
        }
    }
    // A limit on the empty batch proves nothing.
    let store = store_that_distinguishes(ResponseTemplate::new(429), page(403)).await;
    assert_eq!(failure_at(&store.uri()).await.kind, PushFailureKind::Credentials);
    // Nor is a path, which is the same for every batch, about lines.
    let store = store_that_distinguishes(admits(), ResponseTemplate::new(404)).await;
    assert_eq!(failure_at(&store.uri()).await.kind, PushFailureKind::Address);
}

#[tokio::test]
async fn store_that_takes_an_empty_batch_may_refuse_lines_in_a_text_of_its_own() {
    let own_words = ResponseTemplate::new(400).set_body_string("the line is over the limit");
    let store = store_that_distinguishes(ResponseTemplate::new(204), own_words).await;
    let failure = failure_at(&store.uri()).await;
    assert_eq!(failure.kind, PushFailureKind::Batch, "{failure:?}");
}

#[test]
fn names_of_failures_are_the_labels_of_the_metric() {
    let names: Vec<_> = PushFailureKind::iter().map(PushFailureKind::name).collect();
    assert_eq!(names, ["credentials", "address", "rate_limit", "batch", "batch_size", "filtered", "outage"]);
}
