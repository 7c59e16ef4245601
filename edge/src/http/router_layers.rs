//! The common layers of every router: a timeout, a bound on concurrency, panic handling, and responses for unknown paths and methods.

use std::{
    any::Any,
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    extract::{MatchedPath, Request},
    response::{IntoResponse, Response},
};
use futures::{
    FutureExt,
    future::{BoxFuture, ready},
};
use tokio::sync::Semaphore;
use tower::{Service, ServiceExt as _, layer::layer_fn};
use tower_http::catch_panic::CatchPanicLayer;

use crate::http::correlation::{RequestScope, ScopeSettings};
use crate::http::error::{ApiError, Code};

/// Timeout for the head of the response. Long polls have a router of their own with a longer one; what follows the head (a stream of
/// events, a WebSocket) is not bounded by it.
#[derive(Clone, Copy, Debug)]
pub struct RequestTimeout(pub Duration);

/// How many requests a group of routes serves at once; over it, requests are refused and not queued.
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
pub fn with_common_layers<S: Clone + Send + Sync + 'static>(
    router: Router<S>,
    scope_settings: ScopeSettings,
) -> Router<S> {
    router
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(CatchPanicLayer::custom(panicked))
        .layer(RequestScope(scope_settings))
}

/// Mounts a finished router at `path` of another one. Each keeps its own layers and its own error details.
pub(crate) fn mount(outer: Router, path: &str, inner: Router) -> Router {
    let serve = move |mut request: Request| {
        // The inner router reports the matched route itself.
        request.extensions_mut().remove::<MatchedPath>();
        inner.clone().oneshot(request)
    };
    outer.route_service(path, tower::service_fn(serve))
}

/// Both bounds in one service, instead of two `from_fn` layers: each layer costs a box in every waiting request, and that of an `async fn`
/// holds the request as long.
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
            // On a timeout the handler is dropped where it waits; a command that it sent may still be committed.
            answered
                .unwrap_or_else(|_| Ok(ApiError::unavailable(format!("no answer within {limit:?}")).into_response()))
        });
        answer.boxed()
    }
}

/// The answer to a path that is no route.
pub(crate) async fn unknown_route() -> ApiError {
    ApiError::new(Code::NotFound, "There is no such route; see /api/v1/openapi.json for those there are.")
}

async fn wrong_method() -> ApiError {
    ApiError::new(
        Code::MethodNotAllowed,
        "This route does not have this method; see the Allow header for those it has.",
    )
}

fn panicked(payload: Box<dyn Any + Send>) -> Response {
    let reason = payload
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| payload.downcast_ref::<&str>().copied())
        .unwrap_or("a value that is no text");
    ApiError::internal(format!("a handler panicked: {reason}")).into_response()
}

#[cfg(test)]
mod tests {
    use axum::{
        body::Body,
        routing::{get, post},
    };
    use tokio::sync::Notify;
    use tower::ServiceExt;

    use super::*;
    use crate::http::correlation::Service;
    use crate::testing::body_json;

    fn router(release: Arc<Notify>) -> Router {
        let routes = Router::new()
            .route("/fine", get(|| async { "fine" }).post(|| async { "made" }))
            .route("/panics", post(|| async { panic!("the hidden reason") as &str }))
            .route("/slow", get(|| async { std::future::pending::<()>().await }))
            .route("/held", get(move || async move { release.notified().await }));
        let bounded = bounded(routes, RequestTimeout(Duration::from_millis(300)), Concurrency::at_most(2));
        with_common_layers(bounded, crate::testing::scope_settings(Service { name: "api", shows_route: false }))
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
    async fn panic_is_an_internal_error_without_its_reason() {
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

    #[tokio::test(start_paused = true)]
    async fn requests_over_the_concurrency_bound_are_refused_and_under_it_served() {
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
