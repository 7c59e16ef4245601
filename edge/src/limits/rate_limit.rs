//! Rate limits (decisions 2, *Rate limit*): per group of routes and user, over the whole cluster, by policy.
//!
//! The route's middleware sets the group and writes the headers; the extractor that authenticates the caller takes the request out of the
//! quota. The owner of the shard holds the quota's cell; while the owner cannot be reached, requests are admitted and counted, except for
//! groups that have a quota of their own in each process.

mod address_limit;
mod node_limit;

pub use address_limit::AddressLimit;
pub(crate) use address_limit::cell_of;
pub use node_limit::NodeLimit;

use actors::Directory;
use actors::rate_cells::RateCells;
use actors::sharding::command_id;
use axum::extract::{Request, State};
use axum::http::{Extensions, HeaderMap, HeaderName, HeaderValue, request};
use axum::middleware::Next;
use axum::response::Response;
use dashmap::DashMap;
use domain::Timestamp;
use domain::gcra::{RateDecision, WINDOW};
use domain::policy::{PolicyBook, PolicyKey, Scopes};
use prometheus::{IntCounterVec, Opts, Registry};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use uuid::Uuid;

use crate::http::error::{ApiError, Code};

/// Timeout for the owner of a cell. Without an answer the request is admitted.
const ASK_TIMEOUT: Duration = Duration::from_millis(100);
/// Refusals that are remembered, about 2 MB.
const CACHED_CELLS: usize = 16_384;

const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// Routes that share a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum RateLimitGroup {
    Api,
    TerminalToken,
    Financial,
    AdminOverview,
}

impl RateLimitGroup {
    pub const ALL: [Self; 4] = [Self::Api, Self::TerminalToken, Self::Financial, Self::AdminOverview];

    /// As headers and metrics name it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }

    #[must_use]
    pub const fn key(self) -> PolicyKey {
        match self {
            Self::Api => PolicyKey::RateLimitApi,
            Self::TerminalToken => PolicyKey::RateLimitTerminalToken,
            Self::Financial => PolicyKey::RateLimitFinancial,
            Self::AdminOverview => PolicyKey::RateLimitAdminOverview,
        }
    }

    /// Has a quota in this process while the cluster's cannot be reached: what costs money or opens a machine.
    const fn has_local_quota(self) -> bool {
        match self {
            Self::TerminalToken | Self::Financial => true,
            Self::Api | Self::AdminOverview => false,
        }
    }
}

/// The limits of this process; cheap to clone.
#[derive(Clone)]
pub struct RateLimiter(Arc<Parts>);

struct Parts {
    directory: Directory,
    /// Quotas for when the cluster's cannot be reached.
    local: RateCells,
    /// Cells that their owner reported as exhausted, and until when that cannot change: a cell only ever fills.
    refusals: DashMap<Uuid, ExhaustedCell>,
    unauthenticated: AddressLimit,
    decisions: IntCounterVec,
    fail_open: IntCounterVec,
}

#[derive(Clone, Copy)]
struct ExhaustedCell {
    limit: u32,
    until: Instant,
    full_at: Instant,
}

/// The outcome for a request: the numbers of the header.
#[derive(Clone, Copy, Debug)]
struct QuotaDecision {
    group: RateLimitGroup,
    limit: u32,
    /// `None` where the limiter could not be reached.
    verdict: Option<RateDecision>,
}

/// Marks a limited route for the authenticating extractor, and carries the decision back to the route's middleware.
#[derive(Clone)]
pub(crate) struct LimitedRoute {
    group: RateLimitGroup,
    decision: Arc<OnceLock<QuotaDecision>>,
}

impl RateLimiter {
    /// # Errors
    /// Where the registry has metrics of these names already.
    pub fn register(directory: Directory, registry: &Registry) -> prometheus::Result<Self> {
        let decisions = IntCounterVec::new(
            Opts::new("api_ratelimit_decisions_total", "Requests of limited routes, by decision of the rate limit"),
            &["group", "decision"],
        )?;
        let fail_open = IntCounterVec::new(
            Opts::new(
                "api_ratelimit_fail_open_total",
                "Requests admitted because the owner of the rate limit did not answer",
            ),
            &["group"],
        )?;
        registry.register(Box::new(decisions.clone()))?;
        registry.register(Box::new(fail_open.clone()))?;
        for group in RateLimitGroup::ALL {
            // So that a rate can be seen from the first one on.
            fail_open.with_label_values(&[group.name()]).inc_by(0);
        }
        Ok(Self(Arc::new(Parts {
            directory,
            local: RateCells::default(),
            refusals: DashMap::new(),
            unauthenticated: AddressLimit::default(),
            decisions,
            fail_open,
        })))
    }

    /// Takes a request of `user_id` out of the quota of the route's group; a no-op on a route without one.
    ///
    /// # Errors
    /// `rate_limited` where the quota is used up.
    pub(crate) async fn take(
        &self,
        route: Option<&LimitedRoute>,
        scopes: &Scopes,
        policy: &PolicyBook,
        now: Timestamp,
    ) -> Result<(), ApiError> {
        let Some(route) = route else { return Ok(()) };
        let group = route.group;
        let limit = u32::try_from(policy.int(group.key(), scopes, now)).unwrap_or(1);
        let user = scopes.user_id.as_deref().unwrap_or_default();
        let cell = command_id(&[b"rate limit", group.name().as_bytes(), user.as_bytes()]).0;
        let verdict = self.ask(group, cell, limit).await;
        let decision = QuotaDecision { group, limit, verdict };
        let _ = route.decision.set(decision);
        match verdict {
            Some(verdict) if !verdict.admitted => Err(decision.refusal(verdict)),
            Some(_) | None => Ok(()),
        }
    }

    async fn ask(&self, group: RateLimitGroup, cell: Uuid, limit: u32) -> Option<RateDecision> {
        let begin = Instant::now();
        if let Some(verdict) = self.0.cached_refusal(cell, limit, begin) {
            self.0.count(group, verdict.admitted);
            return Some(verdict);
        }
        match self.0.directory.check_rate_limit(cell, limit, ASK_TIMEOUT).await {
            Ok(verdict) => {
                if !verdict.admitted {
                    self.0.cache_refusal(cell, limit, verdict, begin);
                }
                self.0.count(group, verdict.admitted);
                Some(verdict)
            }
            Err(error) => {
                self.0.fail_open.with_label_values(&[group.name()]).inc();
                tracing::debug!(%error, group = group.name(), "a rate limit's owner could not be reached");
                if !group.has_local_quota() {
                    self.0.decisions.with_label_values(&[group.name(), "failed_open"]).inc();
                    return None;
                }
                let verdict = self.0.local.take_or_share(cell, limit, begin);
                self.0.count(group, verdict.admitted);
                Some(verdict)
            }
        }
    }

    /// Counts a refused access token against its address. A caller with a valid token is never limited by this, also on a shared address:
    /// it only ends the responses, and the warnings in the log, that a flood of bad tokens would cause.
    ///
    /// # Errors
    /// `rate_limited` where the address has had too many.
    pub fn count_refused_token(
        &self,
        parts: &request::Parts,
        policy: &PolicyBook,
        now: Timestamp,
    ) -> Result<(), ApiError> {
        self.admit_unauthenticated(&parts.extensions, policy, now)
    }

    /// Counts a request that needs no token against its address, which has one quota for these and for its bad tokens: an id and a name
    /// that have to be guessed are no less a secret.
    ///
    /// # Errors
    /// `rate_limited` where the address has had too many.
    pub fn admit_unauthenticated(
        &self,
        connection: &Extensions,
        policy: &PolicyBook,
        now: Timestamp,
    ) -> Result<(), ApiError> {
        self.0.unauthenticated.admit(connection, PolicyKey::RateLimitAuthenticationFailures, policy, now)
    }
}

impl Parts {
    fn count(&self, group: RateLimitGroup, admitted: bool) {
        let decision = if admitted { "admitted" } else { "limited" };
        self.decisions.with_label_values(&[group.name(), decision]).inc();
    }

    fn cached_refusal(&self, cell: Uuid, limit: u32, now: Instant) -> Option<RateDecision> {
        let refusals = *self.refusals.get(&cell)?;
        (refusals.limit == limit && now < refusals.until).then(|| RateDecision {
            admitted: false,
            remaining: 0,
            full_after: refusals.full_at.saturating_duration_since(now),
            retry_after: refusals.until.saturating_duration_since(now),
        })
    }

    /// Counted from before the query was sent, so that no caller is refused for longer than by the owner.
    fn cache_refusal(&self, cell: Uuid, limit: u32, verdict: RateDecision, begin: Instant) {
        if self.refusals.len() >= CACHED_CELLS {
            self.refusals.retain(|_, refusals| refusals.until > begin);
        }
        if self.refusals.len() < CACHED_CELLS {
            let (until, full_at) = (begin + verdict.retry_after, begin + verdict.full_after);
            self.refusals.insert(cell, ExhaustedCell { limit, until, full_at });
        }
    }
}

impl QuotaDecision {
    fn refusal(self, verdict: RateDecision) -> ApiError {
        let per = WINDOW.as_secs();
        let message = format!(
            "{} requests in {per} s are the most here, and you have made them; go on after the time in Retry-After.",
            self.limit
        );
        limited(message, self.group.key(), self.limit, verdict.retry_after)
    }

    fn write(self, headers: &mut HeaderMap) {
        let (name, limit, window) = (self.group.name(), self.limit, WINDOW.as_secs());
        let mut set = |header: &HeaderName, value: String| {
            if let Ok(value) = HeaderValue::from_str(&value) {
                headers.insert(header.clone(), value);
            }
        };
        set(&RATELIMIT_POLICY, format!("\"{name}\";q={limit};w={window}"));
        // Where the limiter could not be reached, the remaining quota is unknown.
        if let Some(verdict) = self.verdict {
            set(&RATELIMIT, format!("\"{name}\";r={};t={}", verdict.remaining, whole_seconds(verdict.full_after)));
        }
    }
}

/// The refusal of every limit.
fn limited(message: String, key: PolicyKey, limit: u32, retry_after: Duration) -> ApiError {
    ApiError::new(Code::RateLimited, message)
        .retry_after(retry_after)
        .detail("policy_key", key.name())
        .detail("limit", limit)
        .detail("window_seconds", WINDOW.as_secs())
        .detail("retry_after_seconds", whole_seconds(retry_after).max(1))
}

/// Rounded up.
fn whole_seconds(duration: Duration) -> u64 {
    duration.as_secs() + u64::from(duration.subsec_nanos() > 0)
}

/// The middleware of a limited route.
pub(crate) async fn in_group(State(group): State<RateLimitGroup>, mut request: Request, next: Next) -> Response {
    let decision = Arc::new(OnceLock::new());
    request.extensions_mut().insert(LimitedRoute { group, decision: Arc::clone(&decision) });
    let mut response = next.run(request).await;
    if let Some(decision) = decision.get() {
        decision.write(response.headers_mut());
    }
    response
}

#[cfg(test)]
mod tests;
