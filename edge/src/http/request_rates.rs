//! The edge's metrics: rate, errors and duration of every route, and the dispatch latency of allocations.
//!
//! Labels are bounded: a route is its pattern on the page of routes (whatever is on no page is `unmatched`), a method one of seven
//! or `other`, a status its class. The children of a route are resolved at its first request and found without a lock after that.

use crate::http::error::Code;
use arc_swap::ArcSwap;
use axum::http::{Method, StatusCode};
use chrono::{DateTime, Utc};
use domain::AllocationId;
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The route label of a request that matches no route.
pub const UNMATCHED: &str = "unmatched";

const METHODS: [&str; 8] = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "other"];

/// By the first digit of the status; the last is for requests whose client disconnected before the response.
const CLASSES: [&str; 6] = ["1xx", "2xx", "3xx", "4xx", "5xx", "dropped"];
const DROPPED: usize = 5;

/// In seconds; the last are long polls.
const BUCKETS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// Everything that the edge counts. Cheap to clone.
#[derive(Clone)]
pub struct EdgeMetrics(Arc<MetricFamilies>);

struct MetricFamilies {
    requests: IntCounterVec,
    seconds: HistogramVec,
    in_flight: IntGaugeVec,
    errors: IntCounterVec,
    dispatch: Histogram,
}

impl EdgeMetrics {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let families = MetricFamilies {
            requests: IntCounterVec::new(
                Opts::new(
                    "http_requests_total",
                    "Responses, by route and status class; `dropped`: the client disconnected.",
                ),
                &["service", "route", "method", "status_class"],
            )?,
            seconds: HistogramVec::new(
                HistogramOpts::new("http_request_duration_seconds", "Time to the head of the response.")
                    .buckets(BUCKETS.to_vec()),
                &["service", "route", "method"],
            )?,
            in_flight: IntGaugeVec::new(Opts::new("http_requests_in_flight", "Requests in progress."), &["service"])?,
            errors: IntCounterVec::new(
                Opts::new("http_errors_total", "Refused requests, by error code."),
                &["service", "code"],
            )?,
            dispatch: Histogram::with_opts(
                HistogramOpts::new(
                    "provisioning_dispatch_latency_seconds",
                    "Time from the request for an allocation to the dispatch of its task to the node's agent.",
                )
                .buckets(vec![0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0]),
            )?,
        };
        registry.register(Box::new(families.requests.clone()))?;
        registry.register(Box::new(families.seconds.clone()))?;
        registry.register(Box::new(families.in_flight.clone()))?;
        registry.register(Box::new(families.errors.clone()))?;
        registry.register(Box::new(families.dispatch.clone()))?;
        Ok(Self(Arc::new(families)))
    }

    /// The metrics of one service's routes.
    #[must_use]
    pub fn for_service(&self, service: &'static str) -> HttpMetrics {
        let families = Arc::clone(&self.0);
        let in_flight = families.in_flight.with_label_values(&[service]);
        HttpMetrics(Arc::new(ServiceRoutes { service, families, in_flight, known: ArcSwap::default() }))
    }

    /// Observes that the task that sets an allocation up was dispatched to its node's agent. The allocation's id holds the time of the
    /// request.
    pub fn observe_dispatch(&self, allocation: AllocationId, now: DateTime<Utc>) {
        if let Some(asked_at) = allocation.0.get_timestamp() {
            let (seconds, nanos) = asked_at.to_unix();
            let asked_at = seconds as f64 + f64::from(nanos) / 1e9;
            self.0.dispatch.observe((now.timestamp_micros() as f64 / 1e6 - asked_at).max(0.0));
        }
    }
}

/// The metrics of one service's routes. Cheap to clone.
#[derive(Clone)]
pub struct HttpMetrics(Arc<ServiceRoutes>);

struct ServiceRoutes {
    service: &'static str,
    families: Arc<MetricFamilies>,
    in_flight: IntGauge,
    /// Replaced at the first request of a route; bounded by the number of routes.
    known: ArcSwap<HashMap<Box<str>, Arc<MethodMetrics>>>,
}

type MethodMetrics = [OnceLock<Arc<RouteMetrics>>; METHODS.len()];

struct RouteMetrics {
    classes: [IntCounter; CLASSES.len()],
    seconds: Histogram,
}

impl HttpMetrics {
    /// Starts to measure a request; it is counted when the returned guard is dropped.
    pub(crate) fn start(&self, route: &str, method: &Method) -> InFlightRequest {
        self.0.in_flight.inc();
        let by_method = self.0.known.load().get(route).cloned().unwrap_or_else(|| self.add_route(route));
        let at = METHODS.iter().position(|name| *name == method.as_str()).unwrap_or(METHODS.len() - 1);
        let metrics = Arc::clone(by_method[at].get_or_init(|| self.resolve(route, METHODS[at])));
        InFlightRequest { routes: Arc::clone(&self.0), metrics, began: Instant::now(), status: None }
    }

    fn add_route(&self, route: &str) -> Arc<MethodMetrics> {
        let new: Arc<MethodMetrics> = Arc::default();
        self.0.known.rcu(|known| {
            let mut known = HashMap::clone(known);
            known.entry(route.into()).or_insert_with(|| Arc::clone(&new));
            known
        });
        // Another may have been quicker; both lead to the same children.
        self.0.known.load().get(route).cloned().unwrap_or(new)
    }

    fn resolve(&self, route: &str, method: &str) -> Arc<RouteMetrics> {
        let MetricFamilies { requests, seconds, .. } = &*self.0.families;
        let service = self.0.service;
        Arc::new(RouteMetrics {
            classes: CLASSES.map(|class| requests.with_label_values(&[service, route, method, class])),
            seconds: seconds.with_label_values(&[service, route, method]),
        })
    }
}

/// One request in flight.
pub(crate) struct InFlightRequest {
    routes: Arc<ServiceRoutes>,
    metrics: Arc<RouteMetrics>,
    began: Instant,
    status: Option<StatusCode>,
}

impl InFlightRequest {
    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    pub(crate) fn count_error(&self, code: Code) {
        self.routes.families.errors.with_label_values(&[self.routes.service, code.as_str()]).inc();
    }

    pub(crate) fn finish(mut self, status: StatusCode) {
        self.status = Some(status);
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        self.routes.in_flight.dec();
        let class = match self.status {
            Some(status) => usize::from(status.as_u16() / 100).saturating_sub(1).min(DROPPED - 1),
            None => DROPPED,
        };
        self.metrics.classes[class].inc();
        if self.status.is_some() {
            self.metrics.seconds.observe(self.began.elapsed().as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn metrics() -> (Registry, EdgeMetrics) {
        let registry = Registry::new();
        let metrics = EdgeMetrics::register(&registry).unwrap();
        (registry, metrics)
    }

    fn requests(metrics: &EdgeMetrics, labels: [&str; 4]) -> u64 {
        metrics.0.requests.with_label_values(&labels).get()
    }

    #[test]
    fn a_request_is_counted_once_by_its_route_method_and_class() {
        let (_, metrics) = metrics();
        let http = metrics.for_service("api");
        http.start("/things/{id}", &Method::GET).finish(StatusCode::OK);
        http.start("/things/{id}", &Method::GET).finish(StatusCode::NOT_FOUND);
        drop(http.start("/things/{id}", &Method::GET));
        http.start(UNMATCHED, &Method::from_bytes(b"BREW").unwrap()).finish(StatusCode::METHOD_NOT_ALLOWED);
        for (class, expected) in [("2xx", 1), ("4xx", 1), ("dropped", 1), ("5xx", 0)] {
            assert_eq!(requests(&metrics, ["api", "/things/{id}", "GET", class]), expected, "{class}");
        }
        assert_eq!(requests(&metrics, ["api", UNMATCHED, "other", "4xx"]), 1);
        assert_eq!(metrics.0.in_flight.with_label_values(&["api"]).get(), 0);
        assert_eq!(metrics.0.seconds.with_label_values(&["api", "/things/{id}", "GET"]).get_sample_count(), 2);
    }

    #[test]
    fn concurrent_first_requests_of_a_route_are_all_counted() {
        let (_, metrics) = metrics();
        let http = metrics.for_service("api");
        std::thread::scope(|scope| {
            for n in 0..8 {
                let http = &http;
                scope.spawn(move || {
                    for k in 0..100 {
                        http.start(&format!("/{}", (n + k) % 10), &Method::POST).finish(StatusCode::CREATED);
                    }
                });
            }
        });
        let counted: u64 = (0..10).map(|n| requests(&metrics, ["api", &format!("/{n}"), "POST", "2xx"])).sum();
        assert_eq!(counted, 800);
    }

    #[test]
    fn dispatch_latency_starts_at_the_allocation_ids_time() {
        let (_, metrics) = metrics();
        let now = Utc::now();
        metrics.observe_dispatch(AllocationId(Uuid::now_v7()), now + chrono::TimeDelta::seconds(3));
        metrics.observe_dispatch(AllocationId(Uuid::nil()), now);
        assert_eq!(metrics.0.dispatch.get_sample_count(), 1);
        assert!((2.5..3.5).contains(&metrics.0.dispatch.get_sample_sum()), "{}", metrics.0.dispatch.get_sample_sum());
    }
}
