//! Hostile input at the real listener: it costs its sender's connection at most, and affects no other client.

use super::*;
use crate::http::request_body::Json;
use crate::http::router_layers::{Concurrency, RequestTimeout, bounded};
use axum::routing::post;
use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    name: String,
}

/// A listener with one route that reads a body, and times that are short, but longer than most pauses of the machine.
async fn listener() -> TlsHarness {
    listener_with(Duration::from_secs(5)).await
}

async fn listener_with(request_timeout: Duration) -> TlsHarness {
    let routes = Router::new()
        .route("/open", get(|| async { "open" }))
        .route("/read", post(|Json(Named { name }): Json<Named>| async move { name }));
    let routes = bounded(routes, RequestTimeout(request_timeout), Concurrency::at_most(64));
    let limits = ListenerLimits { header_read_timeout: Duration::from_secs(5), ..ListenerLimits::default() };
    TlsHarness::serving(
        limits,
        None,
        with_common_layers(routes, crate::testing::scope_settings(Service { name: "api", shows_route: false })),
    )
    .await
}

impl TlsHarness {
    /// Everything that is received in response to these bytes over HTTP/1.1 until the connection ends, or is silent for much longer than
    /// its limits allow.
    async fn answer_to(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect(&self.client(None, H1)).await.unwrap();
        // It may be closed while we still send.
        let _ = stream.write_all(bytes).await;
        let (mut received, mut part) = (Vec::new(), [0; 4096]);
        while let Ok(Ok(read @ 1..)) = timeout(WAIT_TIMEOUT, stream.read(&mut part)).await {
            received.extend_from_slice(&part[..read]);
        }
        String::from_utf8_lossy(&received).into_owned()
    }

    async fn expect_served(&self) {
        let mut stream = self.connect(&self.client(None, H1)).await.unwrap();
        assert_eq!(ask(&mut stream, "/open").await.unwrap(), (200, "open".into()));
    }
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
}

fn answers(received: &str) -> usize {
    received.matches("HTTP/1.1 ").count()
}

fn posted(headers: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!(
        "POST /read HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

#[tokio::test]
async fn bodies_that_are_not_plain_json_are_refused_in_the_envelope() {
    let harness = listener().await;
    let json = "content-type: application/json\r\n";
    let gzip = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 0xab, 0x56, 0xca, 0x4b, 0xcc];
    for (expected, code, request) in [
        (200, "named", posted(json, br#"{"name":"named"}"#)),
        (200, "named", posted("content-type: application/json; charset=UTF-8\r\n", br#"{"name":"named"}"#)),
        (415, "unsupported_media_type", posted(&format!("{json}content-encoding: gzip\r\n"), &gzip)),
        (415, "unsupported_media_type", posted(&format!("{json}content-encoding: identity, br\r\n"), b"{}")),
        (415, "unsupported_media_type", posted("content-type: application/json; charset=utf-16\r\n", b"{}")),
        (415, "unsupported_media_type", posted("content-type: text/plain\r\n", b"{}")),
        (415, "unsupported_media_type", posted(&format!("{json}content-type: text/plain\r\n"), b"{}")),
        (400, "invalid_request", posted(json, &gzip)),
        (200, "after a byte order mark", posted(json, b"\xef\xbb\xbf{\"name\":\"after a byte order mark\"}")),
        (400, "invalid_request", posted(json, b"\xff\xfe{\0}\0")),
        (400, "invalid_request", posted(json, br#"{"name":"one","name":"two"}"#)),
    ] {
        let answer = harness.answer_to(&request).await;
        assert_eq!(status(&answer), expected, "{answer}");
        assert!(answer.contains(code), "{answer}");
    }
}

#[tokio::test]
async fn strange_methods_and_targets_get_the_envelope() {
    let harness = listener().await;
    for (line, expected) in [
        ("HEAD /open", 200),
        ("GET http://elsewhere.example/open", 200),
        ("OPTIONS /open", 405),
        ("BREW /open", 405),
        ("TRACE /open", 405),
        ("PROPFIND /open", 405),
        ("OPTIONS *", 404),
        ("GET //open", 404),
        ("GET /open/../open", 404),
        ("GET /%2e%2e/open", 404),
        ("GET /open%00", 404),
        ("GET /%", 404),
        ("GET http://elsewhere.example/", 404),
    ] {
        let request = format!("{line} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        let answer = harness.answer_to(request.as_bytes()).await;
        assert_eq!((status(&answer), answers(&answer)), (expected, 1), "{line}: {answer}");
        if expected >= 400 {
            assert!(answer.contains("\"correlation_id\""), "{line}: {answer}");
        }
        if expected == 405 {
            assert!(answer.to_lowercase().contains("\r\nallow: get,head\r\n"), "{line}: {answer}");
        }
    }
    let head = harness.answer_to(b"HEAD /open HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await;
    assert!(head.ends_with("\r\n\r\n"), "a HEAD has no body: {head}");
    harness.expect_served().await;
}

#[tokio::test]
async fn ambiguous_framing_is_refused() {
    let harness = listener().await;
    let smuggled = "GET /open HTTP/1.1\r\nhost: localhost\r\n\r\n";
    for headers in [
        "content-length: 3\r\ncontent-length: 4\r\n",
        "content-length: +3\r\n",
        "content-length: 0x3\r\n",
        "content-length: 3, 4\r\n",
        "transfer-encoding: chunked, identity\r\n",
        "transfer-encoding: xchunked\r\n",
        "transfer-encoding : chunked\r\n",
        "x: a\r\n folded: b\r\n",
        "x\0y: a\r\n",
    ] {
        let request = format!(
            "POST /read HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}\r\n{smuggled}"
        );
        let answer = harness.answer_to(request.as_bytes()).await;
        assert!(answers(&answer) <= 1 && matches!(status(&answer), 0 | 400), "{headers}: {answer}");
    }
    // With both lengths the chunks count (RFC 9112, section 6.3): what follows them is another request or none, and never the tail of this
    // one.
    let both = "POST /read HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 4\r\n\
                transfer-encoding: chunked\r\n\r\n10\r\n{\"name\":\"first\"}\r\n0\r\n\r\n";
    let answer = harness.answer_to(both.as_bytes()).await;
    assert!(matches!(status(&answer), 200 | 400), "{answer}");
    assert_eq!(status(&answer) == 200, answer.ends_with("first"), "{answer}");
    harness.expect_served().await;
}

#[tokio::test]
async fn endless_request_target_is_refused() {
    let harness = listener().await;
    for target in ["/".repeat(70_000), format!("/open?{}", "x=1&".repeat(20_000))] {
        let answer = harness.answer_to(format!("GET {target} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes()).await;
        assert!(matches!(status(&answer), 414 | 431), "{answer}");
    }
    harness.expect_served().await;
}

#[tokio::test]
async fn unparsable_request_gets_the_envelope() {
    let harness = listener().await;
    let open = "GET /open HTTP/1.1\r\nhost: localhost\r\n";
    let many = (0..200).map(|n| format!("x-{n}: y\r\n")).collect::<String>();
    let long = format!("x: {}\r\n", "y".repeat(1 << 20));
    let target = format!("GET /open?{} HTTP/1.1\r\nhost: localhost\r\n\r\n", "x=1&".repeat(20_000));
    for (expected, code, request) in [
        (431, "headers_too_large", format!("{open}{many}\r\n")),
        (431, "headers_too_large", format!("{open}{long}\r\n")),
        (431, "headers_too_large", format!("{open}x-correlation-id: {}\r\n\r\n", "y".repeat(1 << 20))),
        (431, "headers_too_large", target),
        (400, "invalid_request", format!("{open}x\0y: a\r\n\r\n")),
        (400, "invalid_request", format!("{open}x : a\r\n\r\n")),
        (400, "invalid_request", "GET\r\n\r\n".to_owned()),
        (400, "invalid_request", "GET /open HTTP/1.1\r\nconnection: close\r\n\r\n".to_owned()),
        (400, "invalid_request", format!("{open}host: elsewhere\r\nconnection: close\r\n\r\n")),
        (400, "invalid_request", "GET /open HTTP/9.9\r\n\r\n".to_owned()),
    ] {
        let answer = harness.answer_to(request.as_bytes()).await;
        assert_eq!((status(&answer), answers(&answer)), (expected, 1), "{answer}");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!((&body["code"], &body["details"]["service"]), (&code.into(), &"api".into()), "{answer}");
        let id = body["correlation_id"].as_str().unwrap();
        assert!(head.contains(&format!("x-correlation-id: {id}\r\n")) && head.contains("\r\ndate: "), "{head}");
        assert!(head.contains("connection: close"), "{head}");
    }
    // The response to the previous request comes first, and whole.
    let answer = harness.answer_to(format!("{open}\r\n{open}{many}\r\n").as_bytes()).await;
    assert_eq!((status(&answer), answers(&answer)), (200, 2), "{answer}");
    assert!(answer.contains("\r\n\r\nopenHTTP/1.1 431 ") && answer.contains("headers_too_large"), "{answer}");
    harness.expect_served().await;
}

#[tokio::test]
async fn slow_body_times_out_with_a_response() {
    let harness = listener_with(Duration::from_millis(500)).await;
    let mut stream = harness.connect(&harness.client(None, H1)).await.unwrap();
    let head =
        "POST /read HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let begin = Instant::now();
    let (mut reading, mut writing) = tokio::io::split(stream);
    let dripping = tokio::spawn(async move {
        while writing.write_all(b" ").await.is_ok() {
            let _ = writing.flush().await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    let (status, body) = timeout(WAIT_TIMEOUT, answer(&mut reading)).await.unwrap().unwrap();
    assert_eq!(status, 503, "{body}");
    // Before the body's end, which takes 50 s.
    let took = begin.elapsed();
    assert!(body.contains("service_unavailable") && took < Duration::from_secs(40), "after {took:?}: {body}");
    dripping.abort();
    harness.expect_served().await;
}

#[tokio::test]
async fn hundreds_of_silent_connections_do_not_block_a_handshake() {
    let harness = TlsHarness::with(ListenerLimits { handshake_timeout: LONG, ..ListenerLimits::default() }).await;
    let mut silent = Vec::new();
    for _ in 0..400 {
        silent.push(TcpStream::connect(harness.address).await.unwrap());
    }
    let served = async {
        let mut stream = harness.connect(&harness.client(None, H1)).await.unwrap();
        ask(&mut stream, "/open").await.unwrap()
    };
    // Well before the first of them times out.
    assert_eq!(timeout(WAIT_TIMEOUT, served).await.expect("it is let in"), (200, "open".into()));
}

#[tokio::test]
async fn oldest_pending_connection_is_closed_over_the_bound_and_used_ones_stay() {
    let limits = ListenerLimits { pending: 3, handshake_timeout: LONG, ..ListenerLimits::default() };
    let harness = TlsHarness::with(limits).await;
    let mut in_use = harness.connect(&harness.client(None, H1)).await.unwrap();
    assert_eq!(ask(&mut in_use, "/open").await.unwrap().0, 200);
    let mut oldest = TcpStream::connect(harness.address).await.unwrap();
    let mut others = Vec::new();
    for _ in 0..3 {
        others.push(TcpStream::connect(harness.address).await.unwrap());
    }
    let mut byte = [0];
    let ended = timeout(WAIT_TIMEOUT, oldest.read(&mut byte)).await.expect("the oldest is closed");
    assert!(matches!(ended, Ok(0) | Err(_)));
    assert_eq!(ask(&mut in_use, "/open").await.unwrap().0, 200);
}

#[tokio::test]
async fn partial_client_hello_holds_no_slot() {
    // Long enough for the client that is served.
    let limits = ListenerLimits { handshake_timeout: Duration::from_secs(3), ..ListenerLimits::default() };
    let harness = TlsHarness::with(limits).await;
    let mut half = Vec::new();
    for _ in 0..64 {
        let mut stream = TcpStream::connect(harness.address).await.unwrap();
        stream.write_all(&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3]).await.unwrap();
        half.push(stream);
    }
    for mut stream in half {
        let mut rest = Vec::new();
        let _ = timeout(WAIT_TIMEOUT, stream.read_to_end(&mut rest)).await.expect("it is given up");
    }
    harness.expect_served().await;
}

/// An HTTP/2 frame (RFC 9113, section 4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

const DATA_HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// `GET https://localhost/`, in HPACK.
const REQUEST: &[u8] = b"\x82\x84\x87\x41\x09localhost";

impl TlsHarness {
    async fn connect_h2(&self) -> tokio_rustls::client::TlsStream<TcpStream> {
        let mut stream = self.connect(&self.client(None, &[b"h2"])).await.unwrap();
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        stream.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
        stream
    }
}

/// Sends what `next` makes until the other side closes; fails where that takes more than this many bytes.
async fn flood(mut stream: tokio_rustls::client::TlsStream<TcpStream>, most: usize, mut next: impl FnMut() -> Vec<u8>) {
    let flooding = async {
        let mut sent = 0;
        let mut renewed = [0; 4096];
        loop {
            let bytes = next();
            if stream.write_all(&bytes).await.is_err() || stream.flush().await.is_err() {
                return;
            }
            sent += bytes.len();
            assert!(sent <= most, "{sent} bytes were taken");
            // Its output is read, so that it has no reason to wait for us.
            while let Ok(read) = timeout(Duration::from_micros(50), stream.read(&mut renewed)).await {
                if !matches!(read, Ok(1..)) {
                    return;
                }
            }
        }
    };
    timeout(WAIT_TIMEOUT, flooding).await.expect("the connection is closed");
}

#[tokio::test]
async fn rapid_stream_resets_end_the_connection() {
    let harness = listener().await;
    let stream = harness.connect_h2().await;
    let mut id = 1;
    flood(stream, 4 << 20, move || {
        let mut burst = Vec::new();
        for _ in 0..100 {
            burst.extend(frame(DATA_HEADERS, END_HEADERS | END_STREAM, id, REQUEST));
            burst.extend(frame(RESET, 0, id, &8_u32.to_be_bytes()));
            id += 2;
        }
        burst
    })
    .await;
    harness.expect_served().await;
}

#[tokio::test]
async fn endless_headers_end_the_connection() {
    let harness = listener().await;
    let mut stream = harness.connect_h2().await;
    stream.write_all(&frame(DATA_HEADERS, END_STREAM, 1, REQUEST)).await.unwrap();
    // A literal field without indexing: x: xxxx…
    let mut field = vec![0, 1, b'x', 0x7f, 0x81, 0x7f];
    field.resize(6 + 127 + 16_257, b'x');
    field.truncate(16_384);
    flood(stream, 8 << 20, move || frame(CONTINUATION, 0, 1, &field)).await;
    harness.expect_served().await;
}

#[tokio::test]
async fn headers_over_the_limit_are_refused_over_http_2() {
    let harness = listener().await;
    let client = reqwest::Client::builder()
        .tls_certs_only([harness.settings.authority()])
        .resolve("localhost", harness.address)
        .build()
        .unwrap();
    let url = format!("https://localhost:{}/open", harness.address.port());
    for (count, length) in [(101, 1), (40, 1000)] {
        let flooded =
            (0..count).fold(client.get(&url), |request, n| request.header(format!("x-{n}"), "y".repeat(length)));
        let answer = flooded.send().await.unwrap();
        assert_eq!((answer.status().as_u16(), answer.version()), (431, reqwest::Version::HTTP_2));
        let body: serde_json::Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
        assert_eq!((&body["code"], &body["details"]["limit_count"]), (&"headers_too_large".into(), &100.into()));
    }
    // Far more than that h2 refuses itself.
    let flooded = (0..200).fold(client.get(&url), |request, n| request.header(format!("x-{n}"), "y".repeat(1000)));
    // Refused, or cut off where it does not stop.
    let refused = flooded.send().await.map(|answer| answer.status().as_u16());
    assert!(matches!(refused, Ok(431) | Err(_)), "{refused:?}");
    assert_eq!(client.get(&url).send().await.unwrap().text().await.unwrap(), "open");
}
