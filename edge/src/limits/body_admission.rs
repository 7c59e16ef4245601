//! Admission of requests whose caller is unknown until the body has been read: credentials in a form, an enrollment token, a signature over
//! the bytes.
//!
//! Their bodies are received before the request takes one of the slots of its group, and under bounds of their own: per network, in memory,
//! in time. A client that sends slowly therefore holds its connection and nothing that another request needs.

use std::{
    convert::Infallible,
    net::IpAddr,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{ConnectInfo, Request},
    response::{IntoResponse, Response},
};
use dashmap::{DashMap, Entry};
use futures::{FutureExt, future::BoxFuture};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::{Service, layer::layer_fn};

use crate::http::error::{ApiError, Code};
use crate::http::request_body::{BodyLimit, BodyPace, read_body_claiming};
use crate::tls::Peer;

/// Memory is counted in units of this many bytes; a body takes one unit before its first byte.
const UNIT_BYTES: usize = 1024;

/// `Retry-After` for a caller over the bound of its network.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// The bounds of one group of routes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyAdmissionLimits {
    /// The largest body, in bytes.
    pub(crate) body_bytes: usize,
    /// Bodies being received at once from one address, or from one IPv6 network of 64 bits.
    pub(crate) per_network: u32,
    /// Bytes of incomplete bodies at once.
    pub(crate) memory_bytes: usize,
    /// The slowest that a body may arrive.
    pub(crate) pace: BodyPace,
    /// Timeout for one body, whatever its rate.
    pub(crate) within: Duration,
}

impl BodyAdmissionLimits {
    pub(crate) fn of_bodies_up_to(body_bytes: usize) -> Self {
        let (pace, within) = (BodyPace::default(), Duration::from_secs(30));
        Self { body_bytes, per_network: 64, memory_bytes: 64 << 20, pace, within }
    }
}

/// The bodies being received for one group of routes; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct BodyAdmission {
    limits: BodyAdmissionLimits,
    memory: Arc<Semaphore>,
    by_network: Arc<DashMap<IpAddr, u32>>,
    on_refusal: fn(),
}

impl BodyAdmission {
    pub(crate) fn new(limits: BodyAdmissionLimits) -> Self {
        let units = (limits.memory_bytes / UNIT_BYTES).min(Semaphore::MAX_PERMITS);
        Self { limits, memory: Arc::new(Semaphore::new(units)), by_network: Arc::default(), on_refusal: || {} }
    }

    /// Calls `on_refusal` for every request that is refused here and so never reaches its handler.
    pub(crate) const fn counting_refusals(mut self, on_refusal: fn()) -> Self {
        self.on_refusal = on_refusal;
        self
    }

    /// The request with its whole body in memory.
    async fn receive(&self, request: Request) -> Result<Request, ApiError> {
        let _slot = self.acquire_slot(&request)?;
        let mut claim = self.claim_memory()?;
        let (mut parts, body) = request.into_parts();
        parts.extensions.insert(BodyLimit(self.limits.body_bytes));
        parts.extensions.insert(self.limits.pace);
        let reading = read_body_claiming(Request::from_parts(parts.clone(), body), move |held| claim.grow(held));
        let late = || ApiError::invalid_request("The body took too long to arrive; send the request again.");
        let body = tokio::time::timeout(self.limits.within, reading).await.map_err(|_| late())??;
        Ok(Request::from_parts(parts, Body::from(body)))
    }

    /// Acquires a slot among the bodies of the client's network. A request without a connection, and one from an address that many clients
    /// share, has no network to count it against.
    fn acquire_slot(&self, request: &Request) -> Result<Option<BodySlot>, ApiError> {
        let peer = request.extensions().get::<ConnectInfo<Peer>>();
        let Some(network) = peer.and_then(|ConnectInfo(peer)| peer.network()) else { return Ok(None) };
        let most = self.limits.per_network;
        {
            let mut receiving = self.by_network.entry(network).or_insert(0);
            if *receiving < most {
                *receiving += 1;
                return Ok(Some(BodySlot { network, by_network: Arc::clone(&self.by_network) }));
            }
        }
        let message = format!(
            "This address is sending {most} requests here at once, and none of them is complete; finish those, then try again after \
             Retry-After."
        );
        Err(ApiError::new(Code::RateLimited, message).retry_after(RETRY_AFTER).detail("limit", most))
    }

    fn claim_memory(&self) -> Result<MemoryClaim, ApiError> {
        let first = Arc::clone(&self.memory).try_acquire_owned().map_err(|_| no_memory())?;
        Ok(MemoryClaim { memory: Arc::clone(&self.memory), units: first })
    }
}

/// Receives the bodies of these routes before anything inside of this layer sees the request.
pub(crate) fn admit_bodies<S: Clone + Send + Sync + 'static>(router: Router<S>, admission: BodyAdmission) -> Router<S> {
    router.route_layer(layer_fn(move |inner| BodyAdmissionService { inner, admission: admission.clone() }))
}

#[derive(Clone)]
struct BodyAdmissionService<S> {
    inner: S,
    admission: BodyAdmission,
}

impl<S> Service<Request> for BodyAdmissionService<S>
where
    S: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let clone = self.inner.clone();
        // The one that was polled ready is the one to call.
        let mut inner = std::mem::replace(&mut self.inner, clone);
        let admission = self.admission.clone();
        async move {
            match admission.receive(request).await {
                Ok(request) => inner.call(request).await,
                Err(error) => {
                    (admission.on_refusal)();
                    Ok(error.into_response())
                }
            }
        }
        .boxed()
    }
}

/// One body in reception, counted against its network; over on drop.
struct BodySlot {
    network: IpAddr,
    by_network: Arc<DashMap<IpAddr, u32>>,
}

impl Drop for BodySlot {
    fn drop(&mut self) {
        if let Entry::Occupied(mut receiving) = self.by_network.entry(self.network) {
            *receiving.get_mut() -= 1;
            if *receiving.get() == 0 {
                receiving.remove();
            }
        }
    }
}

/// The memory that one body holds; released on drop.
struct MemoryClaim {
    memory: Arc<Semaphore>,
    units: OwnedSemaphorePermit,
}

impl MemoryClaim {
    fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        let missing = bytes.div_ceil(UNIT_BYTES).saturating_sub(self.units.num_permits());
        if missing > 0 {
            let more = u32::try_from(missing).map_err(|_| no_memory())?;
            self.units.merge(Arc::clone(&self.memory).try_acquire_many_owned(more).map_err(|_| no_memory())?);
        }
        Ok(())
    }
}

fn no_memory() -> ApiError {
    ApiError::overloaded().because("the bound on incomplete bodies of unknown callers is reached")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::correlation::Service as Named;
    use crate::http::router_layers::{Concurrency, RequestTimeout, bounded, with_common_layers};
    use axum::body::Bytes;
    use axum::routing::post;
    use std::net::SocketAddr;
    use tower::ServiceExt;

    const GRACE: Duration = Duration::from_millis(400);

    fn limits(body_bytes: usize) -> BodyAdmissionLimits {
        let pace = BodyPace { grace: GRACE, ..BodyPace::default() };
        BodyAdmissionLimits { pace, ..BodyAdmissionLimits::of_bodies_up_to(body_bytes) }
    }

    fn router(limits: BodyAdmissionLimits) -> Router {
        let routes = Router::new().route("/", post(|body: Bytes| async move { body.len().to_string() }));
        let routes = bounded(routes, RequestTimeout(Duration::from_secs(1)), Concurrency::at_most(1));
        let routes = admit_bodies(routes, BodyAdmission::new(limits));
        with_common_layers(routes, crate::testing::scope_settings(Named { name: "api", shows_route: false }))
    }

    /// A body whose first part has arrived and whose second never does.
    fn unfinished(first: Vec<u8>) -> Body {
        use futures::StreamExt;
        let first = futures::stream::iter([Ok::<_, std::io::Error>(first)]);
        Body::from_stream(first.chain(futures::stream::pending()))
    }

    async fn send(router: &Router, address: &str, body: Body) -> u16 {
        let peer = Peer::new(SocketAddr::new(address.parse().unwrap(), 4711), None, false);
        let request = Request::post("/").extension(ConnectInfo(peer)).body(body).unwrap();
        router.clone().oneshot(request).await.unwrap().status().as_u16()
    }

    async fn stuck(router: &Router, address: &'static str, bodies: usize, bytes: usize) {
        for _ in 0..bodies {
            let router = router.clone();
            tokio::spawn(async move { send(&router, address, unfinished(vec![0; bytes])).await });
        }
        // Each body is in reception when its task has run once; the runtime runs some tasks between two polls of the test.
        for _ in 0..bodies {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn slow_bodies_of_many_addresses_leave_request_slots_free() {
        let router = router(limits(64 * 1024));
        for n in 0..100_u8 {
            let router = router.clone();
            tokio::spawn(async move { send(&router, &format!("192.0.2.{n}"), unfinished(vec![0; 10])).await });
            tokio::task::yield_now().await;
        }
        assert_eq!(send(&router, "198.51.100.1", Body::from("whole")).await, 200);
    }

    #[tokio::test(start_paused = true)]
    async fn address_over_its_bound_is_refused_until_its_bodies_time_out() {
        let router = router(limits(64 * 1024));
        stuck(&router, "2001:db8::1", 64, 10).await;
        assert_eq!(send(&router, "2001:db8::ffff", Body::from("whole")).await, 429, "it is of the same network");
        assert_eq!(send(&router, "2001:db8:0:1::1", Body::from("whole")).await, 200);
        tokio::time::sleep(2 * GRACE).await;
        assert_eq!(send(&router, "2001:db8::ffff", Body::from("whole")).await, 200);
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_hold_memory_for_received_bytes_only() {
        let limits = BodyAdmissionLimits { memory_bytes: 100 * 1024, ..limits(64 * 1024) };
        let router = router(limits);
        stuck(&router, "192.0.2.1", 50, 10).await;
        assert_eq!(send(&router, "192.0.2.2", Body::from(vec![0; 40 * 1024])).await, 200);
        assert_eq!(send(&router, "192.0.2.2", Body::from(vec![0; 60 * 1024])).await, 503);
        tokio::time::sleep(2 * GRACE).await;
        assert_eq!(send(&router, "192.0.2.2", Body::from(vec![0; 60 * 1024])).await, 200);
    }

    #[tokio::test]
    async fn a_body_over_its_limit_is_refused_before_the_handler() {
        let router = router(limits(1024));
        assert_eq!(send(&router, "192.0.2.1", Body::from(vec![0; 1025])).await, 413);
    }
}
