//! The answers: health, the way to the user interface, and what the telemetry agent answers.

use super::request_rules::{Refusal, Requested, judge, passed};
use http_body_util::{Either, Empty, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tracing::debug;

/// How long the telemetry agent may take to accept a connection, and to answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// A longer answer is cut off.
const ANSWER_BYTES: usize = 64 << 20;
/// How long it is remembered which versions of the user interface there are.
const INTERFACE_TTL: Duration = Duration::from_secs(30);
/// The versions, newest first.
const INTERFACES: [&str; 4] = ["/v3/", "/v2/", "/v1/", "/"];

/// Headers of an answer that are passed on.
const PASSED_BACK: [HeaderName; 8] = [
    header::CACHE_CONTROL,
    header::CONTENT_ENCODING,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::ETAG,
    header::EXPIRES,
    header::LAST_MODIFIED,
    header::VARY,
];

pub(super) type Body = Either<Full<Bytes>, Limited<Incoming>>;

pub(super) struct Proxy {
    upstream: SocketAddr,
    requires_client: bool,
    interface: Mutex<Option<(Instant, &'static str)>>,
}

impl Proxy {
    pub(super) fn new(upstream: SocketAddr, requires_client: bool) -> Self {
        Self { upstream, requires_client, interface: Mutex::default() }
    }

    /// Answers a request over a connection with or without a client certificate that was verified.
    pub(super) async fn respond(&self, request: Request<Incoming>, has_certificate: bool) -> Response<Body> {
        let target = request.uri().path_and_query().map_or("", |target| target.as_str());
        let path = request.uri().path();
        let requested = judge(request.method(), target, path, request.headers());
        let answer = match requested {
            Ok(Requested::Health) => Ok(text(StatusCode::OK, "ok")),
            Ok(_) if self.requires_client && !has_certificate => {
                Err((StatusCode::FORBIDDEN, "Send the client certificate of the control plane."))
            }
            Ok(Requested::Interface) => self.interface().await.map(redirect),
            Ok(Requested::Upstream) => self.pass(&request, target).await,
            Err(refusal) => Err(refusal),
        };
        answer.unwrap_or_else(|(status, why)| {
            let mut response = text(status, why);
            if status == StatusCode::METHOD_NOT_ALLOWED {
                response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
            }
            response
        })
    }

    /// The newest user interface that the telemetry agent has.
    async fn interface(&self) -> Result<&'static str, Refusal> {
        let known = *self.interface.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((found_at, path)) = known
            && found_at.elapsed() < INTERFACE_TTL
        {
            return Ok(path);
        }
        for path in INTERFACES {
            let request = Request::builder().uri(path).body(Empty::<Bytes>::new());
            let request = request.map_err(|_| (StatusCode::INTERNAL_SERVER_ERROR, "A path is none."))?;
            if self.send(request).await?.status().is_success() {
                *self.interface.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), path));
                return Ok(path);
            }
        }
        Err((StatusCode::NOT_FOUND, "The telemetry agent of this machine has no user interface."))
    }

    async fn pass(&self, request: &Request<Incoming>, target: &str) -> Result<Response<Body>, Refusal> {
        let unusable = |_| (StatusCode::BAD_REQUEST, "The path cannot be passed on.");
        let uri: Uri = target.parse().map_err(|_| (StatusCode::BAD_REQUEST, "The path cannot be passed on."))?;
        let mut passed_on = Request::builder().method(Method::GET).uri(uri).body(Empty::new()).map_err(unusable)?;
        *passed_on.headers_mut() = passed(request.headers());
        let (head, body) = self.send(passed_on).await?.into_parts();
        let mut response = Response::new(Either::Right(Limited::new(body, ANSWER_BYTES)));
        *response.status_mut() = head.status;
        for name in PASSED_BACK {
            if let Some(value) = head.headers.get(&name) {
                response.headers_mut().insert(name, value.clone());
            }
        }
        // A redirect within the telemetry agent is followed here; one to elsewhere is not the client's business.
        if let Some(location) = head.headers.get(header::LOCATION)
            && location.as_bytes().starts_with(b"/")
            && !location.as_bytes().starts_with(b"//")
        {
            response.headers_mut().insert(header::LOCATION, location.clone());
        }
        secure(&mut response);
        Ok(response)
    }

    /// Sends a request to the telemetry agent over a connection of its own.
    async fn send(&self, mut request: Request<Empty<Bytes>>) -> Result<Response<Incoming>, Refusal> {
        let host = HeaderValue::from_str(&self.upstream.to_string());
        let host = host.map_err(|_| (StatusCode::INTERNAL_SERVER_ERROR, "An address is none."))?;
        request.headers_mut().insert(header::HOST, host);
        let absent = (StatusCode::SERVICE_UNAVAILABLE, "The telemetry agent of this machine does not answer.");
        let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(self.upstream)).await;
        let stream = stream.map_err(|_| absent)?.map_err(|_| absent)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|_| absent)?;
        // It ends with the answer, or when the client's connection is dropped with it.
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                debug!(error = %error, "the connection to the telemetry agent ended");
            }
        });
        let answered = timeout(ANSWER_TIMEOUT, sender.send_request(request)).await;
        let slow = (StatusCode::GATEWAY_TIMEOUT, "The telemetry agent of this machine is too slow.");
        answered.map_err(|_| slow)?.map_err(|_| absent)
    }
}

fn redirect(path: &'static str) -> Response<Body> {
    let mut response = text(StatusCode::TEMPORARY_REDIRECT, "");
    response.headers_mut().insert(header::LOCATION, HeaderValue::from_static(path));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn text(status: StatusCode, text: &'static str) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::new(Bytes::from_static(text.as_bytes()))));
    *response.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    secure(&mut response);
    response
}

fn secure(response: &mut Response<Body>) {
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
}
