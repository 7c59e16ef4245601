//! What every router gets around it: a bound on time, a bound on number, a net under panics, and answers for paths and
//! methods that do not exist.

use std::{
    any::Any,
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    extract::Request,
    response::{IntoResponse, Response},
};
use futures::{
    FutureExt,
    future::{BoxFuture, ready},
};
use tokio::sync::Semaphore;
use tower::{Service, layer::layer_fn};
use tower_http::catch_panic::CatchPanicLayer;

use crate::{
    correlation::{Outermost, RequestScope},
    error::{ApiError, Code},
};

/// How long a request may take to its answer's head. A long poll has a router of its own with a longer one; what comes
/// after the head (a stream of events, a WebSocket) is not bounded by it.
#[derive(Clone, Copy, Debug)]
pub struct RequestTimeout(pub Duration);

/// How many requests a group of routes serves at once; over it, they are refused and not queued.
#[derive(Clone, Debug)]
pub struct Concurrency(Arc<Semaphore>);

impl Concurrency {
    #[must_use]
    pub fn at_most(requests: usize) -> Self {
        Self(Arc::new(Semaphore::new(requests.min(Semaphore::MAX_PERMITS))))
    }
}

/// Bounds a group of routes in time and in number.
pub fn bounded<S: Clone + Send + Sync + 'static>(
    router: Router<S>,
    timeout: RequestTimeout,
    concurrency: Concurrency,
) -> Router<S> {
    router.route_layer(layer_fn(move |inner| Bounded { inner, timeout, concurrency: concurrency.clone() }))
}

/// Finishes a router: unknown paths and methods and panics are answered with the envelope. Nothing may be added outside.
pub fn finished<S: Clone + Send + Sync + 'static>(router: Router<S>, outermost: Outermost) -> Router<S> {
    router
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(CatchPanicLayer::custom(panicked))
        .layer(RequestScope(outermost))
}

/// Both bounds in one service, and no `from_fn`: each layer has boxes of its own in every request that waits, and that of an `async fn`
/// keeps room for the request for as long.
#[derive(Clone)]
struct Bounded<S> {
    inner: S,
    timeout: RequestTimeout,
    concurrency: Concurrency,
}

impl<S> Service<Request> for Bounded<S>
where
    S: Service<Request, Response = Response, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let Ok(permit) = Arc::clone(&self.concurrency.0).try_acquire_owned() else {
            let refusal = ApiError::overloaded().because("the bound on concurrent requests is reached");
            return ready(Ok(refusal.into_response())).boxed();
        };
        let RequestTimeout(limit) = self.timeout;
        let answering = tokio::time::timeout(limit, self.inner.call(request));
        let answer = answering.map(move |answered| {
            drop(permit);
            // Where it took too long, the handler is dropped where it waits; what it had asked for may still happen.
            answered
                .unwrap_or_else(|_| Ok(ApiError::unavailable(format!("no answer within {limit:?}")).into_response()))
        });
        answer.boxed()
    }
}

async fn unknown_route() -> ApiError {
    ApiError::new(Code::NotFound, "There is no such route; see /api/v1/openapi.json for those there are.")
}

async fn wrong_method() -> ApiError {
    ApiError::new(
        Code::MethodNotAllowed,
        "This route does not have this method; see the Allow header for those it has.",
    )
}

fn panicked(payload: Box<dyn Any + Send>) -> Response {
    let said = payload
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| payload.downcast_ref::<&str>().copied())
        .unwrap_or("a value that is no text");
    ApiError::internal(format!("a handler panicked: {said}")).into_response()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use axum::{
        body::Body,
        routing::{get, post},
    };
    use tokio::sync::Notify;
    use tower::ServiceExt;

    use super::*;
    use crate::correlation::Service;
    use crate::testing::body_json;

    fn router(release: Arc<Notify>) -> Router {
        let routes = Router::new()
            .route("/fine", get(|| async { "fine" }).post(|| async { "made" }))
            .route("/panics", post(|| async { panic!("the hidden reason") as &str }))
            .route("/slow", get(|| async { std::future::pending::<()>().await }))
            .route("/held", get(move || async move { release.notified().await }));
        let bounded = bounded(routes, RequestTimeout(Duration::from_millis(300)), Concurrency::at_most(2));
        finished(bounded, crate::testing::outermost(Service { name: "api", tells_route: false }))
    }

    async fn send(router: &Router, method: &str, path: &str) -> Response {
        router.clone().oneshot(Request::builder().method(method).uri(path).body(Body::empty()).unwrap()).await.unwrap()
    }

    async fn refused(method: &str, path: &str) -> (u16, String, serde_json::Value) {
        let response = send(&router(Arc::default()), method, path).await;
        let status = response.status().as_u16();
        assert!(response.headers().contains_key("x-correlation-id"));
        let body = body_json(response).await;
        (status, body["code"].as_str().unwrap().to_owned(), body)
    }

    #[tokio::test]
    async fn an_unknown_path_and_a_wrong_method_get_the_envelope() {
        let (status, code, _) = refused("GET", "/nowhere").await;
        assert_eq!((status, code.as_str()), (404, "not_found"));
        let (status, code, _) = refused("DELETE", "/fine").await;
        assert_eq!((status, code.as_str()), (405, "method_not_allowed"));
        let response = send(&router(Arc::default()), "DELETE", "/fine").await;
        let allow = response.headers()["allow"].to_str().unwrap();
        assert!(allow.contains("GET") && allow.contains("POST"));
    }

    #[tokio::test]
    async fn a_panic_is_an_internal_error_that_keeps_its_reason_to_itself() {
        let (status, code, body) = refused("POST", "/panics").await;
        assert_eq!((status, code.as_str()), (500, "internal_error"));
        assert!(!body.to_string().contains("hidden"));
    }

    #[tokio::test]
    async fn a_request_that_takes_too_long_is_answered() {
        let response = send(&router(Arc::default()), "GET", "/slow").await;
        assert_eq!(response.status(), 503);
        assert!(response.headers().contains_key("retry-after"));
        assert_eq!(body_json(response).await["code"], "service_unavailable");
    }

    #[tokio::test]
    async fn over_the_bound_requests_are_refused_and_under_it_again_served() {
        let release = Arc::new(Notify::new());
        let router = router(Arc::clone(&release));
        let held: Vec<_> = (0..2)
            .map(|_| {
                let router = router.clone();
                tokio::spawn(async move { send(&router, "GET", "/held").await.status() })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(50)).await;
        let response = send(&router, "GET", "/fine").await;
        assert_eq!(response.status(), 503);
        assert!(response.headers().contains_key("retry-after"));
        assert_eq!(body_json(response).await["code"], "overloaded");
        release.notify_waiters();
        for request in held {
            assert_eq!(request.await.unwrap(), 200);
        }
        assert_eq!(send(&router, "GET", "/fine").await.status(), 200);
    }
}
