//! How often a caller may ask (decisions 2, *Rate limit*): per group of routes and user, over the whole cluster, by policy.
//!
//! The route's middleware says which group it is in, and writes the headers; the extractor that finds out who asks takes the request
//! out of the quota. The quota's cell is kept by the owner of its shard; while that one cannot be reached, requests are let in and
//! counted, but for groups that keep a quota of their own in each process.

mod address;
mod node;

pub use address::AddressLimit;
pub use node::NodeLimit;

use actors::Directory;
use actors::cells::Cells;
use actors::place::command_id;
use axum::extract::{Request, State};
use axum::http::{Extensions, HeaderMap, HeaderName, HeaderValue, request};
use axum::middleware::Next;
use axum::response::Response;
use dashmap::DashMap;
use domain::Timestamp;
use domain::policy::{Key, PolicyBook, Scopes};
use domain::rate_limit::{Verdict, WINDOW};
use prometheus::{IntCounterVec, Opts, Registry};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use uuid::Uuid;

use crate::error::{ApiError, Code};

/// How long the keeper of a cell may take. Who is not answered is let in.
const ASK_WITHIN: Duration = Duration::from_millis(100);
/// Refusals that are remembered, about 2 MB.
const REMEMBERED: usize = 16_384;

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const STANDING: HeaderName = HeaderName::from_static("ratelimit");

/// Routes that share a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    Api,
    TerminalToken,
    Financial,
    AdminOverview,
}

impl Group {
    pub const ALL: [Self; 4] = [Self::Api, Self::TerminalToken, Self::Financial, Self::AdminOverview];

    /// As headers and metrics name it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Api => "api",
            Self::TerminalToken => "terminal_token",
            Self::Financial => "financial",
            Self::AdminOverview => "admin_overview",
        }
    }

    #[must_use]
    pub const fn key(self) -> Key {
        match self {
            Self::Api => Key::RateLimitApi,
            Self::TerminalToken => Key::RateLimitTerminalToken,
            Self::Financial => Key::RateLimitFinancial,
            Self::AdminOverview => Key::RateLimitAdminOverview,
        }
    }

    /// Has a quota in this process while the cluster's cannot be asked: what costs money or opens a machine.
    const fn is_kept_here(self) -> bool {
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
    /// Quotas for when the cluster's cannot be asked.
    here: Cells,
    /// Cells that another member said were used up, and until when nothing can have changed: a cell only ever fills.
    used_up: DashMap<Uuid, UsedUp>,
    strangers: AddressLimit,
    decisions: IntCounterVec,
    fail_open: IntCounterVec,
}

#[derive(Clone, Copy)]
struct UsedUp {
    limit: u32,
    until: Instant,
    full_at: Instant,
}

/// What became of a request: the header's numbers.
#[derive(Clone, Copy, Debug)]
struct Standing {
    group: Group,
    limit: u32,
    /// `None` where the limiter could not be asked.
    verdict: Option<Verdict>,
}

/// A limited route's word to whoever finds out who asks, and where its middleware waits for the caller's standing.
#[derive(Clone)]
pub(crate) struct Limited {
    group: Group,
    standing: Arc<OnceLock<Standing>>,
}

impl RateLimiter {
    /// # Errors
    /// Where the registry has metrics of these names already.
    pub fn register(directory: Directory, registry: &Registry) -> prometheus::Result<Self> {
        let decisions = IntCounterVec::new(
            Opts::new("api_ratelimit_decisions_total", "Requests of limited routes by what the rate limit said"),
            &["group", "decision"],
        )?;
        let fail_open = IntCounterVec::new(
            Opts::new("api_ratelimit_fail_open_total", "Requests whose rate limit could not be asked"),
            &["group"],
        )?;
        registry.register(Box::new(decisions.clone()))?;
        registry.register(Box::new(fail_open.clone()))?;
        for group in Group::ALL {
            // So that a rate can be seen from the first one on.
            fail_open.with_label_values(&[group.name()]).inc_by(0);
        }
        Ok(Self(Arc::new(Parts {
            directory,
            here: Cells::default(),
            used_up: DashMap::new(),
            strangers: AddressLimit::default(),
            decisions,
            fail_open,
        })))
    }

    /// Takes a request of `user_id` out of the quota of the route's group; nothing on a route that has none.
    ///
    /// # Errors
    /// `rate_limited` where the quota is used up.
    pub(crate) async fn take(
        &self,
        asked: Option<&Limited>,
        scopes: &Scopes,
        policy: &PolicyBook,
        now: Timestamp,
    ) -> Result<(), ApiError> {
        let Some(asked) = asked else { return Ok(()) };
        let group = asked.group;
        let limit = u32::try_from(policy.int(group.key(), scopes, now)).unwrap_or(1);
        let user = scopes.user_id.as_deref().unwrap_or_default();
        let cell = command_id(&[b"rate limit", group.name().as_bytes(), user.as_bytes()]).0;
        let verdict = self.ask(group, cell, limit).await;
        let standing = Standing { group, limit, verdict };
        let _ = asked.standing.set(standing);
        match verdict {
            Some(verdict) if !verdict.admitted => Err(standing.refusal(verdict)),
            Some(_) | None => Ok(()),
        }
    }

    async fn ask(&self, group: Group, cell: Uuid, limit: u32) -> Option<Verdict> {
        let begin = Instant::now();
        if let Some(verdict) = self.0.known_to_be_used_up(cell, limit, begin) {
            self.0.count(group, verdict.admitted);
            return Some(verdict);
        }
        match self.0.directory.take(cell, limit, ASK_WITHIN).await {
            Ok(verdict) => {
                if !verdict.admitted {
                    self.0.remember(cell, limit, verdict, begin);
                }
                self.0.count(group, verdict.admitted);
                Some(verdict)
            }
            Err(error) => {
                self.0.fail_open.with_label_values(&[group.name()]).inc();
                tracing::debug!(%error, group = group.name(), "a rate limit could not be asked");
                if !group.is_kept_here() {
                    self.0.decisions.with_label_values(&[group.name(), "failed_open"]).inc();
                    return None;
                }
                let verdict = self.0.here.take_or_share(cell, limit, begin);
                self.0.count(group, verdict.admitted);
                Some(verdict)
            }
        }
    }

    /// Counts a refused access token against its address. Who has a good token is never hindered, whoever shares the address: this only
    /// ends the answers, and the warnings in the log, that a flood of bad ones would cause.
    ///
    /// # Errors
    /// `rate_limited` where the address has had too many.
    pub fn token_refused(&self, parts: &request::Parts, policy: &PolicyBook, now: Timestamp) -> Result<(), ApiError> {
        self.asked_by_nobody(&parts.extensions, policy, now)
    }

    /// Counts a question that needs no token against its address, which has one quota for these and for its bad tokens: an id and a name
    /// that have to be guessed are no less a secret.
    ///
    /// # Errors
    /// `rate_limited` where the address has had too many.
    pub fn asked_by_nobody(
        &self,
        connection: &Extensions,
        policy: &PolicyBook,
        now: Timestamp,
    ) -> Result<(), ApiError> {
        self.0.strangers.admit(connection, Key::RateLimitAuthenticationFailures, policy, now)
    }
}

impl Parts {
    fn count(&self, group: Group, admitted: bool) {
        let decision = if admitted { "admitted" } else { "limited" };
        self.decisions.with_label_values(&[group.name(), decision]).inc();
    }

    fn known_to_be_used_up(&self, cell: Uuid, limit: u32, now: Instant) -> Option<Verdict> {
        let used_up = *self.used_up.get(&cell)?;
        (used_up.limit == limit && now < used_up.until).then(|| Verdict {
            admitted: false,
            remaining: 0,
            full_after: used_up.full_at.saturating_duration_since(now),
            retry_after: used_up.until.saturating_duration_since(now),
        })
    }

    /// Counted from before the question was sent, so that nobody is refused for longer than the keeper would have.
    fn remember(&self, cell: Uuid, limit: u32, verdict: Verdict, begin: Instant) {
        if self.used_up.len() >= REMEMBERED {
            self.used_up.retain(|_, used_up| used_up.until > begin);
        }
        if self.used_up.len() < REMEMBERED {
            let (until, full_at) = (begin + verdict.retry_after, begin + verdict.full_after);
            self.used_up.insert(cell, UsedUp { limit, until, full_at });
        }
    }
}

impl Standing {
    fn refusal(self, verdict: Verdict) -> ApiError {
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
        set(&POLICY, format!("\"{name}\";q={limit};w={window}"));
        // Where nobody could be asked, nothing is known of what is left.
        if let Some(verdict) = self.verdict {
            set(&STANDING, format!("\"{name}\";r={};t={}", verdict.remaining, whole_seconds(verdict.full_after)));
        }
    }
}

/// The refusal of every limit.
fn limited(message: String, key: Key, limit: u32, retry_after: Duration) -> ApiError {
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
pub(crate) async fn in_group(State(group): State<Group>, mut request: Request, next: Next) -> Response {
    let standing = Arc::new(OnceLock::new());
    request.extensions_mut().insert(Limited { group, standing: Arc::clone(&standing) });
    let mut response = next.run(request).await;
    if let Some(standing) = standing.get() {
        standing.write(response.headers_mut());
    }
    response
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests;
