//! A browser session: a person's login to the web console. The control plane holds the identity provider's tokens, the browser a random
//! secret in a cookie (decisions/0070).
//!
//! ```text
//! active ──logout, end by user or administrator, idle, lifetime, provider──▶ ended
//! ```
//!
//! Its tokens are refreshed by one holder of a lease at a time, so that all tabs and replicas cause one call to the provider. A lease ends by
//! itself, where the replica that held it was killed. The holder may also have tokens that it could not store, since the database was down:
//! the ones before them are spent then, and a provider that sees them again may revoke all of them (RFC 9700, section 4.14.2). So the first
//! refresh that finds a lease over only gives notice ([`REFRESH_NOTICE`]), in a commit that shows that the database serves again
//! (decisions/0099). The tokens are removed with the end of the session.

use crate::audit::{AuditAction, AuditRecord};
use crate::authz::{Principal, ResourceOwner};
use crate::event::Event;
use crate::explanation::Explanation;
use crate::history::{HistoryEntry, Invariant};
use crate::id::{BrowserSessionId, EntityKind, EntityRef};
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{self, Deadline, IndexKeys, Machine, Timestamp, Transition, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt;

mod instruction;
mod request;

pub use instruction::Instruction;
pub use request::{Opening, Request};

/// How long a refresh may take until another replica gives notice of the next one: longer than the timeout of the call to the identity
/// provider.
pub const REFRESH_LEASE: TimeDelta = TimeDelta::seconds(15);

/// How long the holder of a lease that is over may still store its tokens, from the notice on: longer than it takes to send them again.
pub const REFRESH_NOTICE: TimeDelta = TimeDelta::seconds(12);

/// The pause after a refresh, whatever its outcome.
pub const REFRESH_PAUSE: TimeDelta = TimeDelta::seconds(1);

/// A session, from its login to its tombstone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrowserSession {
    pub id: BrowserSessionId,
    pub owner: ResourceOwner,
    /// The `sub` of the ID token (OpenID Connect Core 1.0, section 2).
    pub subject: String,
    /// The `sid` of the ID token: the session at the identity provider.
    pub provider_session: Option<String>,
    /// When the ID token was issued, by the provider's clock.
    pub authenticated_at: Timestamp,
    pub secret_sha256: SecretDigest,
    /// Where the browser was at its login.
    pub place: Place,
    pub created_at: Timestamp,
    pub last_seen_at: Timestamp,
    /// When it ends without a further request.
    pub idle_ends_at: Timestamp,
    /// When it ends in any case.
    pub ends_at: Timestamp,
    /// The provider's tokens, sealed, in base64. None once the session has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_enc: Option<String>,
    /// When the access token ends.
    pub token_ends_at: Timestamp,
    /// How many refreshes were begun, which is the number of the last one.
    pub refreshes: u32,
    pub refresh: RefreshState,
    pub ended: Option<SessionEnd>,
}

/// Where a browser is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    pub address: String,
    /// The header `User-Agent`, cut to a bounded length.
    pub user_agent: String,
}

/// The SHA-256 hash of the cookie's secret.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SecretDigest(pub [u8; 32]);

/// A hash that is written into the database makes a valid secret: not even hashes are logged.
impl fmt::Debug for SecretDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretDigest(..)")
    }
}

/// Who may refresh the tokens, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum RefreshState {
    /// No refresh runs, and the next one may begin at this time.
    Idle { not_before: Timestamp },
    /// The refresh of that number runs until this time. Its end is followed by a notice, and the end of the notice by another refresh.
    Leased {
        attempt: u32,
        until: Timestamp,
        /// Whether its notice was given.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        is_overdue: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionEnd {
    pub at: Timestamp,
    pub reason: EndReason,
}

/// Why a session has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[cfg_attr(test, derive(strum::VariantNames))]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum EndReason {
    /// Its browser logged out.
    LoggedOut,
    /// Its user ended it from another session.
    EndedByUser,
    EndedByAdministrator {
        reason: String,
    },
    /// No request came within policy `auth.browser_session_idle_seconds`.
    Idle,
    /// It reached the lifetime of policy `auth.browser_session_max_ttl_seconds`.
    Lifetime,
    /// The identity provider logged its user out (OpenID Connect Back-Channel Logout 1.0). `token_sha256`: the hash of the logout token's
    /// `jti`, in hexadecimal digits.
    ProviderLogout {
        token_sha256: String,
    },
    /// The identity provider refused to refresh its tokens.
    ProviderRefused {
        error: String,
    },
    /// It was the oldest one when its user logged in above the limit.
    Displaced,
}

impl EndReason {
    #[must_use]
    pub const fn code(&self) -> &'static str {
        self.into_str()
    }
}

/// The commands of a browser session.
pub type Command = state_machine::AnyCommand<Request, Instruction, state_machine::NoCommand, Maintenance>;

state_machine::impl_command_from!(Request, Instruction, Maintenance);

/// What the service does to a browser session by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Maintenance {
    /// The tokens that were sealed as `before`, sealed under another key of the key ring.
    Reseal {
        before: String,
        tokens_enc: String,
    },
    Tick,
}

impl state_machine::Maintenance for Maintenance {
    const TICK: Self = Self::Tick;
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// The session after the command.
    Session {
        session: Box<BrowserSession>,
    },
    /// The caller has the lease of this number, and calls the provider with the session's tokens.
    Leased {
        attempt: u32,
        session: Box<BrowserSession>,
    },
    /// Another refresh runs, or the last one was a moment ago.
    Wait,
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    /// Also where it belongs to another user.
    #[error("there is no such browser session")]
    NotFound,
    #[error("the browser session exists already")]
    Exists,
    #[error("the browser session has ended: {reason}")]
    Ended { reason: String },
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotFound => Explanation::not_found("browser session"),
            Self::Exists => Explanation::conflict("This login was completed before; log in again."),
            Self::Ended { reason } => {
                Explanation::conflict("The browser session has ended; log in again.").detail("reason", reason)
            }
        }
    }
}

impl Machine for BrowserSession {
    const KIND: EntityKind = EntityKind::BrowserSession;
    const INVARIANTS: &'static [Invariant] = &[Invariant::I6, Invariant::I8];
    const ENDED_STATES: &'static [&'static str] = &[Self::ENDED];
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match (state, command) {
            (None, Command::Request(Request::Open(opening))) => Self::open(*opening, ctx),
            (None, _) => Err(Rejection::NotFound),
            (Some(it), Command::Request(request)) => it.execute(request, ctx),
            (Some(it), Command::Instruction(instruction)) => it.follow(instruction, ctx),
            (Some(it), Command::Maintenance(Maintenance::Reseal { before, tokens_enc })) => {
                Ok(it.resealed(&before, tokens_enc))
            }
            (Some(it), Command::Maintenance(Maintenance::Tick)) => Ok(it.tick(ctx)),
        }
    }

    fn state(&self) -> &'static str {
        if self.is_active() { Self::ACTIVE } else { Self::ENDED }
    }

    fn deadline(&self) -> Option<Deadline> {
        let waits_for =
            if self.idle_ends_at < self.ends_at { "no request was received" } else { "the session's lifetime" };
        self.is_active().then(|| Deadline::new(self.idle_ends_at.min(self.ends_at), waits_for))
    }

    fn keys(&self) -> IndexKeys {
        IndexKeys { owner: Some(self.owner.user_id.to_string()), ..IndexKeys::default() }
    }

    /// By which a logout at the identity provider finds it, and a logout token that was used before.
    fn terms(&self) -> BTreeSet<String> {
        match &self.ended {
            None => {
                let by_session = self.provider_session.as_deref().map(Self::provider_session_term);
                by_session.into_iter().chain([Self::subject_term(&self.subject)]).collect()
            }
            Some(SessionEnd { reason: EndReason::ProviderLogout { token_sha256 }, .. }) => {
                [Self::logout_term(token_sha256)].into()
            }
            Some(_) => BTreeSet::new(),
        }
    }

    fn is_transient(&self) -> bool {
        self.is_active()
    }

    /// An ended session has no tokens that could still act for its user.
    fn violations(&self, _: &[HistoryEntry]) -> Vec<Invariant> {
        Invariant::violated([
            (Invariant::I6, self.is_active() || self.tokens_enc.is_none()),
            (Invariant::I8, self.has_deadline_where_transient()),
        ])
    }
}

impl BrowserSession {
    pub const ACTIVE: &'static str = "active";
    pub const ENDED: &'static str = "ended";

    #[must_use]
    pub const fn is_active(&self) -> bool {
        self.ended.is_none()
    }

    /// The code of the reason why the session does not hold at this time; `None` where it holds.
    #[must_use]
    pub fn end_at(&self, now: Timestamp) -> Option<&'static str> {
        match &self.ended {
            Some(end) => Some(end.reason.code()),
            None if now >= self.ends_at => Some(EndReason::Lifetime.code()),
            None if now >= self.idle_ends_at => Some(EndReason::Idle.code()),
            None => None,
        }
    }

    /// The term of sessions of this session at the identity provider.
    #[must_use]
    pub fn provider_session_term(provider_session: &str) -> String {
        format!("oidc-sid/{provider_session}")
    }

    /// The term of sessions of this subject.
    #[must_use]
    pub fn subject_term(subject: &str) -> String {
        format!("oidc-sub/{subject}")
    }

    /// The term of sessions that the logout token with this hash ended.
    #[must_use]
    pub fn logout_term(token_sha256: &str) -> String {
        format!("oidc-logout/{token_sha256}")
    }

    /// The scopes in which its policies are resolved.
    #[must_use]
    pub fn scopes(&self) -> Scopes {
        Scopes::from(&self.owner)
    }

    fn open(opening: Opening, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        let Principal::Caller(caller) = ctx.by else { return Err(Rejection::NotFound) };
        let owner = ResourceOwner::from(caller);
        let (lifetime, idle) = limits(&Scopes::from(&owner), ctx);
        let session = Self {
            id: BrowserSessionId(ctx.id),
            owner,
            subject: opening.subject,
            provider_session: opening.provider_session,
            authenticated_at: opening.authenticated_at,
            secret_sha256: opening.secret_sha256,
            place: opening.place,
            created_at: ctx.now,
            last_seen_at: ctx.now,
            idle_ends_at: ctx.now + idle,
            ends_at: ctx.now + lifetime,
            tokens_enc: Some(opening.tokens_enc),
            token_ends_at: opening.token_ends_at,
            refreshes: 0,
            refresh: RefreshState::Idle { not_before: ctx.now },
            ended: None,
        };
        let place = json!({ "address": session.place.address, "user_agent": session.place.user_agent });
        let audit = session.audit(AuditAction::BrowserSessionsOpen, &place);
        let reply = Reply::Session { session: Box::new(session.clone()) };
        Ok(Transition::to(session, reply, "its user logged in").audit(audit))
    }

    /// The session, where it is active.
    fn active(&self) -> Result<&Self, Rejection> {
        match &self.ended {
            None => Ok(self),
            Some(end) => Err(Rejection::Ended { reason: end.reason.code().to_owned() }),
        }
    }

    /// A session that has ended stays as it is.
    fn end(&self, reason: EndReason, ctx: &TransitionContext<'_>) -> Transition<Self> {
        if !self.is_active() {
            return self.unchanged();
        }
        let code = reason.code();
        let metadata = match &reason {
            EndReason::EndedByAdministrator { reason } => json!({ "code": code, "reason": reason }),
            EndReason::ProviderRefused { error } => json!({ "code": code, "provider_error": error }),
            EndReason::LoggedOut
            | EndReason::EndedByUser
            | EndReason::Idle
            | EndReason::Lifetime
            | EndReason::ProviderLogout { .. }
            | EndReason::Displaced => json!({ "code": code }),
        };
        let ended = Event::BrowserSessionEnded {
            browser_session_id: self.id,
            user_id: self.owner.user_id.clone(),
            reason: code.to_owned(),
        };
        let mut next = self.clone();
        next.tokens_enc = None;
        next.refresh = RefreshState::Idle { not_before: ctx.now };
        next.ended = Some(SessionEnd { at: ctx.now, reason });
        let reply = Reply::Session { session: Box::new(next.clone()) };
        Transition::to(next, reply, format!("ended: {code}"))
            .event(ended)
            .audit(self.audit(AuditAction::BrowserSessionsEnd, &metadata))
    }

    fn tick(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        if !self.is_active() {
            Transition::stay(Reply::Done)
        } else if ctx.now >= self.ends_at {
            self.end(EndReason::Lifetime, ctx)
        } else if ctx.now >= self.idle_ends_at {
            self.end(EndReason::Idle, ctx)
        } else {
            Transition::stay(Reply::Done)
        }
    }

    /// Tokens that were refreshed in between stay: the resealed ones are their predecessors.
    fn resealed(&self, before: &str, tokens_enc: String) -> Transition<Self> {
        if self.tokens_enc.as_deref() != Some(before) {
            return Transition::stay(Reply::Done);
        }
        let next = Self { tokens_enc: Some(tokens_enc), ..self.clone() };
        Transition::to(next, Reply::Done, "its tokens were sealed under another key")
    }

    fn unchanged(&self) -> Transition<Self> {
        Transition::stay(Reply::Session { session: Box::new(self.clone()) })
    }

    fn audit(&self, action: AuditAction, more: &Value) -> AuditRecord {
        let mut metadata = json!({ "user_id": self.owner.user_id });
        if let (Some(metadata), Some(more)) = (metadata.as_object_mut(), more.as_object()) {
            metadata.extend(more.clone());
        }
        AuditRecord::new(action, EntityRef { kind: EntityKind::BrowserSession, id: self.id.0 }, metadata)
    }
}

/// The longest session, and the longest pause between two requests of it.
fn limits(scopes: &Scopes, ctx: &TransitionContext<'_>) -> (TimeDelta, TimeDelta) {
    let lifetime = ctx.policy.seconds(PolicyKey::AuthBrowserSessionMaxTtl, scopes, ctx.now);
    (lifetime, ctx.policy.seconds(PolicyKey::AuthBrowserSessionIdle, scopes, ctx.now))
}

#[cfg(test)]
mod tests;
