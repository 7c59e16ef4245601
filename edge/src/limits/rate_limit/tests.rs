//! Limited routes of every group, served by two processes that share a bus which can be cut.

use super::*;
use crate::testing::body_json;
use crate::tls::Peer;
use actors::shell_dependencies::{Remote, RemoteError};
use axum::body::Body;
use axum::extract::{ConnectInfo, FromRequestParts};
use axum::middleware::from_fn_with_state;
use axum::routing::get;
use axum::{Router, http};
use chrono::Utc;
use domain::Shard;
use domain::policy::{PolicyScope, PolicyValue};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use test_host::{MemoryStore, NoEffects, TestHost, first_terms};
use tower::ServiceExt as _;

/// Leads to the one process that owns everything.
#[derive(Default)]
struct Wire {
    owner: OnceLock<Directory>,
    cut: AtomicBool,
    asked: AtomicUsize,
}

struct Bus(Arc<Wire>);

impl Remote for Bus {
    fn request(&self, _: Shard, payload: Vec<u8>, _: Duration) -> BoxFuture<'_, Result<Vec<u8>, RemoteError>> {
        async move {
            self.0.asked.fetch_add(1, Ordering::SeqCst);
            match self.0.owner.get() {
                Some(owner) if !self.0.cut.load(Ordering::SeqCst) => Ok(owner.serve(&payload, Duration::ZERO).await),
                // Silence, as of a member that was stopped.
                Some(_) => std::future::pending().await,
                None => Err(RemoteError::NoResponders),
            }
        }
        .boxed()
    }
}

struct Cluster {
    wire: Arc<Wire>,
    /// The owner's and another process's routes.
    routers: [Router; 2],
    policy: Arc<Mutex<PolicyBook>>,
    registry: Registry,
}

#[derive(Clone)]
struct AppState {
    limiter: RateLimiter,
    policy: Arc<Mutex<PolicyBook>>,
}

/// A caller that is trusted without a token.
struct Caller;

impl FromRequestParts<AppState> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut http::request::Parts, app: &AppState) -> Result<Self, ApiError> {
        let policy = app.policy.lock().unwrap().clone();
        let user = parts.headers.get("user").map(|user| user.to_str().unwrap().to_owned());
        let Some(user) = user else {
            app.limiter.count_refused_token(parts, &policy, Utc::now())?;
            return Err(ApiError::new(Code::Unauthenticated, "Who are you?"));
        };
        let scopes = Scopes { user_id: Some(user.into()), org_id: Some("acme".into()), ..Scopes::default() };
        app.limiter.take(parts.extensions.get(), &scopes, &policy, Utc::now()).await.map(|()| Self)
    }
}

async fn directory(wire: &Arc<Wire>, owns: bool) -> Directory {
    let terms = first_terms().filter(|_| owns);
    let (store, peers) = (Arc::new(MemoryStore::default()), Arc::new(Bus(Arc::clone(wire))));
    TestHost::start_with_peers(store, terms, Arc::default(), Arc::new(NoEffects), peers).await.directory
}

impl Cluster {
    async fn start() -> Self {
        let (wire, policy, registry) = (Arc::new(Wire::default()), Arc::default(), Registry::new());
        let owner = directory(&wire, true).await;
        assert!(wire.owner.set(owner.clone()).is_ok());
        let other = directory(&wire, false).await;
        let router = |directory, registry: &Registry| {
            let limiter = RateLimiter::register(directory, registry).unwrap();
            let app = AppState { limiter, policy: Arc::clone(&policy) };
            let routes = RateLimitGroup::ALL.into_iter().fold(Router::new(), |routes, group| {
                let route = get(|_: Caller| async { "fine" }).route_layer(from_fn_with_state(group, in_group));
                routes.route(&format!("/{}", group.name()), route)
            });
            let service = crate::http::correlation::Service { name: "api", shows_route: false };
            crate::http::router_layers::with_common_layers(
                routes.with_state(app),
                crate::testing::scope_settings(service),
            )
        };
        let routers = [router(owner, &Registry::new()), router(other, &registry)];
        Self { wire, routers, policy, registry }
    }

    fn set(&self, key: PolicyKey, scope: PolicyScope, limit: i64) {
        let long_ago = Timestamp::UNIX_EPOCH;
        self.policy.lock().unwrap().set(key, scope, long_ago, PolicyValue::Int(limit)).unwrap();
    }

    async fn ask(&self, process: usize, group: RateLimitGroup, user: &str) -> Response {
        let request = Request::get(format!("/{}", group.name())).header("user", user);
        self.routers[process].clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
    }

    /// How many of so many requests of the other process are admitted.
    async fn admitted(&self, group: RateLimitGroup, user: &str, requests: usize) -> usize {
        let mut admitted = 0;
        for _ in 0..requests {
            admitted += usize::from(self.ask(1, group, user).await.status() == 200);
        }
        admitted
    }

    fn failed_open(&self, group: RateLimitGroup) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == "api_ratelimit_fail_open_total").unwrap();
        let of_group = family.get_metric().iter().find(|metric| metric.get_label()[0].value() == group.name());
        of_group.unwrap().get_counter().get_value() as u64
    }
}

fn header<'a>(response: &'a Response, name: &str) -> &'a str {
    response.headers()[name].to_str().unwrap()
}

#[tokio::test]
async fn route_of_every_group_reports_its_quota_and_refuses_requests_over_it() {
    let cluster = Cluster::start().await;
    for group in RateLimitGroup::ALL {
        cluster.set(group.key(), PolicyScope::Global, 3);
        // From two processes: the quota is one.
        let (began, mut left) = (Instant::now(), Vec::new());
        for process in [0, 1, 1] {
            let response = cluster.ask(process, group, "ann").await;
            assert_eq!(
                (response.status().as_u16(), header(&response, "ratelimit-policy")),
                (200, &*format!("\"{}\";q=3;w=60", group.name()))
            );
            left.push(header(&response, "ratelimit").to_owned());
        }
        let refused = cluster.ask(1, group, "ann").await;
        let after: u64 = header(&refused, "retry-after").parse().unwrap();
        // Less by the whole seconds for which the machine was paused meanwhile.
        let within = |seconds: u64| seconds.saturating_sub(began.elapsed().as_secs())..=seconds;
        for (shown, (remaining, seconds)) in left.iter().zip([(2, 20), (1, 40), (0, 60)]) {
            let standing = |t| format!("\"{}\";r={remaining};t={t}", group.name());
            assert!(within(seconds).map(standing).any(|it| it == *shown), "{shown}");
        }
        assert!(refused.status() == 429 && within(20).contains(&after), "{}: {after}", refused.status());
        assert!(header(&refused, "ratelimit").starts_with(&format!("\"{}\";r=0;t=", group.name())));
        let body = body_json(refused).await;
        assert_eq!(body["code"], "rate_limited");
        let details = &body["details"];
        assert_eq!(
            (details["policy_key"].as_str(), &details["limit"]),
            (Some(group.key().name()), &serde_json::json!(3))
        );
        assert_eq!(details["window_seconds"], 60);
        assert_eq!(details["retry_after_seconds"], after);
        assert_eq!(cluster.admitted(group, "bob", 4).await, 3, "another user has a quota of their own");
    }
}

#[tokio::test]
async fn limit_follows_the_callers_scopes_and_applies_as_soon_as_it_is_written() {
    let cluster = Cluster::start().await;
    cluster.set(PolicyKey::RateLimitApi, PolicyScope::Global, 2);
    cluster.set(PolicyKey::RateLimitApi, PolicyScope::UserId("ann".into()), 5);
    for (user, limit) in [("ann", 5), ("*", 2), (">", 2), ("a.b", 2)] {
        assert_eq!(cluster.admitted(RateLimitGroup::Api, user, 20).await, limit, "{user}");
    }
    let asked = cluster.wire.asked.load(Ordering::SeqCst);
    assert_eq!(cluster.admitted(RateLimitGroup::Api, "ann", 20).await, 0);
    assert_eq!(
        cluster.wire.asked.load(Ordering::SeqCst),
        asked,
        "a used up quota is not asked for before it can have changed"
    );
    cluster.set(PolicyKey::RateLimitApi, PolicyScope::UserId("ann".into()), 8);
    assert_eq!(cluster.admitted(RateLimitGroup::Api, "ann", 20).await, 3);
    cluster.set(PolicyKey::RateLimitApi, PolicyScope::OrgId("acme".into()), 4);
    assert_eq!(cluster.admitted(RateLimitGroup::Api, "bob", 20).await, 4);
}

#[tokio::test]
async fn unreachable_cell_owner_fails_open_except_for_payments_and_terminals() {
    let cluster = Cluster::start().await;
    for group in RateLimitGroup::ALL {
        cluster.set(group.key(), PolicyScope::Global, 3);
    }
    cluster.wire.cut.store(true, Ordering::SeqCst);
    for (group, admitted) in [
        (RateLimitGroup::Api, 5),
        (RateLimitGroup::AdminOverview, 5),
        (RateLimitGroup::Financial, 3),
        (RateLimitGroup::TerminalToken, 3),
    ] {
        assert_eq!(cluster.admitted(group, "ann", 5).await, admitted, "{group:?}");
        assert_eq!(cluster.failed_open(group), 5, "{group:?}");
    }
    let open = cluster.ask(1, RateLimitGroup::Api, "ann").await;
    assert_eq!(header(&open, "ratelimit-policy"), "\"api\";q=3;w=60");
    // Connected again: the cluster's quota decides.
    cluster.wire.cut.store(false, Ordering::SeqCst);
    assert_eq!(cluster.admitted(RateLimitGroup::Api, "ann", 5).await, 3);
    assert_eq!(cluster.failed_open(RateLimitGroup::Api), 6);
}

#[tokio::test]
async fn flood_of_bad_tokens_is_limited_and_valid_tokens_are_unaffected() {
    let cluster = Cluster::start().await;
    cluster.set(PolicyKey::RateLimitAuthenticationFailures, PolicyScope::Global, 10);
    let ask = async |user: Option<&str>| {
        let request =
            Request::get("/api").extension(ConnectInfo(Peer::new(([192, 0, 2, 7], 4711).into(), None, false)));
        let request = if let Some(user) = user { request.header("user", user) } else { request };
        cluster.routers[1].clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
    };
    let mut statuses = Vec::new();
    for _ in 0..12 {
        statuses.push(ask(None).await.status().as_u16());
    }
    assert_eq!(statuses, [[401; 10].as_slice(), &[429; 2]].concat());
    let refused = ask(None).await;
    let after: u64 = header(&refused, "retry-after").parse().unwrap();
    assert!((1..=6).contains(&after), "{after}");
    assert_eq!(body_json(refused).await["details"]["policy_key"], "rate_limit.authentication_failures_per_minute");
    assert_eq!(ask(Some("ann")).await.status(), 200);
}
