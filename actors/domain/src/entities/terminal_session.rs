//! A terminal session: one shell on an allocation's machine, and its connection (specification, *Authentication* 7; decisions 5,
//! *Terminal*).
//!
//! ```text
//! opened ──attach──▶ attached ⇄ detached          each ──end, fault, kill, release, lifetime──▶ closed
//!    └──never attached, or in the way of a new session──▶ closed   └──the same for a detached one──▶ closed
//! ```
//!
//! The node's agent runs the shell and stores its output; this state machine decides whether it may. A connection is admitted by a token
//! that is used once. Each connection gets a number, so that a later one replaces an earlier one. Its gateway reports its end; where that
//! member has ended, a worker does (decision 0120).

use crate::audit::{AuditAction, AuditRecord, RefusalAudit};
use crate::authz::{Principal, ResourceOwner};
use crate::event::Event;
use crate::explanation::Explanation;
use crate::history::{HistoryEntry, Invariant};
use crate::id::{AllocationId, BrowserSessionId, EntityKind, EntityRef, MemberId, NodeId, TerminalSessionId};
use crate::policy::{self, Scopes};
use crate::precondition::Precondition;
use crate::recording::RecordingTerms;
use crate::state_machine::{
    self, AuditedRefusal, Deadline, Effect, IndexKeys, Machine, Timestamp, Transition, TransitionContext,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt;

mod gateway;
mod instruction;
mod recording;
mod request;

pub use gateway::{GATEWAY_TERM, gateway_of_term, gateway_term};
pub use instruction::Instruction;
pub use request::Request;

/// A session, from its first token to its tombstone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSession {
    pub id: TerminalSessionId,
    pub allocation_id: AllocationId,
    pub node_id: NodeId,
    pub owner: ResourceOwner,
    /// The browser session by which its last connection's token was requested, or its first token before there is a connection: the
    /// terminal session ends with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub browser_session: Option<BrowserSessionId>,
    pub opened_at: Timestamp,
    /// When it is closed in any case. Fixed at its start, so that reconnecting does not extend it.
    pub ends_at: Timestamp,
    pub phase: Phase,
    /// The number of admitted connections, which is the last one's number.
    pub attachments: u32,
    /// The token that admits the next connection; an earlier one is void.
    pub token: Option<SessionToken>,
    /// The tokens that were used last, so that a replay is detected.
    pub spent: Vec<TokenDigest>,
    #[serde(default)]
    pub refusals: RefusalAudit,
    /// The current recording terms.
    #[serde(default)]
    pub recording: RecordingTerms,
    #[serde(default)]
    pub tape: RecordingState,
}

/// The state of its recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordingState {
    /// It was never recorded.
    #[default]
    Blank,
    /// At least a part of it was to be recorded.
    Used,
    /// Its retention time has passed.
    Forgotten,
}

/// The SHA-256 hash of a token.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TokenDigest(pub [u8; 32]);

/// A hash that is written into the database makes a valid token: not even hashes are logged.
impl fmt::Debug for TokenDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Digest(..)")
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionToken {
    pub sha256: TokenDigest,
    pub expires_at: Timestamp,
    /// The browser session by which it was requested: the token is void when that ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub browser_session: Option<BrowserSessionId>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Phase {
    /// Its first token was not used yet.
    Opened {
        until: Timestamp,
    },
    Attached {
        since: Timestamp,
        /// The member that has the connection: the worker `terminal-gateways` detaches the session where that has ended. `None` in snapshots of
        /// earlier releases.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        gateway: Option<MemberId>,
    },
    /// The shell continues without a connection.
    Detached {
        since: Timestamp,
        /// When it is closed unless a connection comes back. `None` in snapshots of earlier releases: at the session's end.
        #[serde(default)]
        until: Option<Timestamp>,
    },
    Closed {
        at: Timestamp,
        reason: CloseReason,
    },
}

/// Why a session was closed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::EnumDiscriminants)]
#[strum_discriminants(
    name(CloseCode),
    doc = "The reason of a close, as a code.",
    derive(Serialize, Deserialize, strum::Display, strum::IntoStaticStr),
    cfg_attr(test, derive(strum::VariantNames)),
    strum(serialize_all = "snake_case", const_into_str),
    serde(rename_all = "snake_case")
)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum CloseReason {
    /// Its program ended.
    Exited { exit: ShellExit },
    /// The node could not start it, or lost it.
    Failed { code: String },
    /// Its first token was not used in time.
    NeverAttached,
    /// An administrator closed it, or revoked its node's certificates.
    Killed,
    /// Its allocation is not active any more.
    AllocationEnded,
    /// It reached the lifetime of policy `terminal.session_max_ttl_seconds`.
    Lifetime,
    /// No connection came back within policy `terminal.detached_ttl_seconds`.
    DetachedExpired,
    /// Its user opened one above the limit, and it had the oldest token that was never used, or was the oldest detached session.
    Displaced,
    /// Its user ended it.
    EndedByUser,
    /// The browser session that it was opened by has ended.
    LoggedOut,
}

impl CloseReason {
    #[must_use]
    pub const fn code(&self) -> &'static str {
        self.into_str()
    }
}

/// How the session's program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShellExit {
    Code(i32),
    Signal(i32),
}

/// The fault of a session whose agent was stopped or restarted.
pub const AGENT_RESTARTED: &str = "agent_restarted";

/// The bound of remembered spent tokens.
pub const SPENT_TOKENS: usize = 16;

/// The commands of a terminal session.
pub type Command = state_machine::AnyCommand<Request, Instruction, state_machine::NoCommand, Maintenance>;

state_machine::impl_command_from!(Request, Instruction, Maintenance);

/// What the service does to a terminal session by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Maintenance {
    /// Its recording is past its retention time.
    ForgetRecording,
    Tick,
}

impl state_machine::Maintenance for Maintenance {
    const TICK: Self = Self::Tick;
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// The expiry of the token.
    Issued {
        expires_at: Timestamp,
        #[serde(default)]
        recording: RecordingTerms,
    },
    /// The connection is admitted under this number.
    Attached {
        attachment: u32,
        session: Box<TerminalSession>,
    },
    /// The session after the command.
    Session {
        session: Box<TerminalSession>,
    },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    /// Also where it belongs to another user.
    #[error("there is no such terminal session")]
    NotFound,
    #[error("the terminal session exists already")]
    Exists,
    #[error("the terminal session is over: {reason}")]
    Closed { reason: CloseCode },
    #[error("a client is connected to the terminal session")]
    NotDetached,
    #[error("the terminal token does not hold: {cause}")]
    TokenRefused { cause: TerminalTokenFault },
}

/// Why a token is not valid; never sent to the client that presented it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum TerminalTokenFault {
    #[error("it is another token")]
    Mismatch,
    #[error("it was used before")]
    Spent,
    #[error("it has expired")]
    Expired,
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotFound => Explanation::not_found("terminal session"),
            Self::Exists => Explanation::conflict("The terminal session exists already."),
            Self::Closed { reason } => {
                Explanation::conflict("The terminal session is over; leave `session_id` out to open another.")
                    .detail("reason", reason.into_str())
            }
            // No person shows a token here, and a session that is in use makes no room.
            rejection @ (Self::TokenRefused { .. } | Self::NotDetached) => Explanation::unexpected(&rejection),
        }
    }
}

impl Machine for TerminalSession {
    const KIND: EntityKind = EntityKind::TerminalSession;
    const INVARIANTS: &'static [Invariant] = &[Invariant::I4, Invariant::I8];
    const ENDED_STATES: &'static [&'static str] = &["closed"];
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match (state, command) {
            (None, Command::Request(Request::Open { allocation_id, node_id, token_sha256, active })) => {
                Self::open(allocation_id, node_id, token_sha256, active, ctx)
            }
            (None, _) => Err(Rejection::NotFound),
            (Some(it), Command::Request(request)) => it.execute(request, ctx),
            (Some(it), Command::Instruction(instruction)) => it.follow(instruction, ctx),
            (Some(it), Command::Maintenance(Maintenance::ForgetRecording)) => Ok(it.forget_recording()),
            (Some(it), Command::Maintenance(Maintenance::Tick)) => Ok(it.tick(ctx)),
        }
    }

    /// A refused token: the client gets one public code, the audit log records the true cause.
    fn audit_refusal(
        &self,
        command: &Command,
        rejection: &Rejection,
        ctx: &TransitionContext<'_>,
    ) -> Option<AuditedRefusal<Self>> {
        let (Command::Instruction(Instruction::Attach { .. }), Rejection::TokenRefused { cause }) =
            (command, rejection)
        else {
            return None;
        };
        let next = Self { refusals: self.refusals.audited(ctx.now)?, ..self.clone() };
        let metadata = json!({ "cause": cause.to_string(), "result": "refused" });
        Some(AuditedRefusal { next, audit: self.audit(AuditAction::TerminalsRefuseToken, &metadata) })
    }

    fn state(&self) -> &'static str {
        self.phase.name()
    }

    fn deadline(&self) -> Option<Deadline> {
        match &self.phase {
            Phase::Opened { until } => Some(Deadline::new(*until, "no client has connected with the token")),
            Phase::Attached { .. } => Some(Deadline::new(self.ends_at, "the session's lifetime")),
            Phase::Detached { until, .. } => {
                Some(Deadline::new(self.detached_until(*until), "no connection has come back"))
            }
            Phase::Closed { .. } => None,
        }
    }

    fn keys(&self) -> IndexKeys {
        IndexKeys { owner: Some(self.owner.user_id.to_string()), ..IndexKeys::default() }
    }

    fn terms(&self) -> BTreeSet<String> {
        self.gateway().map(gateway_term).into_iter().collect()
    }

    fn is_transient(&self) -> bool {
        self.closed().is_none()
    }

    fn violations(&self, _: &[HistoryEntry]) -> Vec<Invariant> {
        Invariant::violated([
            (Invariant::I4, self.spent_each_token_once()),
            (Invariant::I8, self.has_deadline_where_transient()),
        ])
    }
}

impl Phase {
    /// The states in which the shell may run.
    pub const LIVE: [&str; 3] = ["opened", "attached", "detached"];

    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.into_str()
    }
}

impl TerminalSession {
    #[must_use]
    pub const fn closed(&self) -> Option<&CloseReason> {
        match &self.phase {
            Phase::Closed { reason, .. } => Some(reason),
            Phase::Opened { .. } | Phase::Attached { .. } | Phase::Detached { .. } => None,
        }
    }

    /// I4, as far as the state shows it: it has admitted as many connections as tokens were spent, and a spent token is not valid again.
    #[must_use]
    pub fn spent_each_token_once(&self) -> bool {
        let distinct: BTreeSet<_> = self.spent.iter().collect();
        let remembered = usize::try_from(self.attachments).unwrap_or(usize::MAX).min(SPENT_TOKENS);
        let is_offered = self.token.as_ref().is_some_and(|token| self.spent.contains(&token.sha256));
        distinct.len() == self.spent.len() && distinct.len() == remembered && !is_offered
    }

    /// The scopes in which its policies are resolved.
    #[must_use]
    pub fn scopes(&self) -> Scopes {
        Scopes::from(&self.owner)
    }

    fn open(
        allocation_id: AllocationId,
        node_id: NodeId,
        token_sha256: TokenDigest,
        active: Precondition,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let Principal::Caller(caller) = ctx.by else { return Err(Rejection::NotFound) };
        let (owner, browser_session) = (ResourceOwner::from(caller), caller.browser_session);
        let scopes = Scopes::from(&owner);
        let expires_at = ctx.now + ctx.policy.seconds(policy::PolicyKey::TerminalTokenTtl, &scopes, ctx.now);
        let recording = RecordingTerms::from_policy(ctx.policy, &scopes, ctx.now);
        let session = Self {
            id: TerminalSessionId(ctx.id),
            allocation_id,
            node_id,
            owner,
            browser_session,
            opened_at: ctx.now,
            ends_at: ctx.now + ctx.policy.seconds(policy::PolicyKey::TerminalSessionMaxTtl, &scopes, ctx.now),
            phase: Phase::Opened { until: expires_at },
            attachments: 0,
            token: Some(SessionToken { sha256: token_sha256, expires_at, browser_session }),
            spent: Vec::new(),
            refusals: RefusalAudit::default(),
            recording,
            tape: if recording.is_on() { RecordingState::Used } else { RecordingState::Blank },
        };
        let audit =
            session.audit(AuditAction::TerminalsOpen, &json!({ "node_id": node_id, "recording": recording.mode }));
        let opened = Event::TerminalOpened {
            session_id: session.id,
            allocation_id,
            node_id,
            ends_at: session.ends_at,
            begin_until: expires_at,
            recording,
        };
        Ok(Transition::to(session, Reply::Issued { expires_at, recording }, "opened by the allocation's user")
            .event(opened)
            .audit(audit)
            .precondition(active))
    }

    /// The session itself, where the caller is its owner.
    fn by_owner(&self, ctx: &TransitionContext<'_>) -> Result<&Self, Rejection> {
        if ctx.by.is_user(&self.owner.user_id) { Ok(self) } else { Err(Rejection::NotFound) }
    }

    /// The transition with the session as its reply.
    fn with_session_reply(&self, mut step: Transition<Self>) -> Transition<Self> {
        let session = Box::new(step.next.clone().unwrap_or_else(|| self.clone()));
        step.reply = Reply::Session { session };
        step
    }

    /// When a detached session is closed: at the latest at the end of its lifetime.
    fn detached_until(&self, until: Option<Timestamp>) -> Timestamp {
        until.unwrap_or(self.ends_at).min(self.ends_at)
    }

    fn issue_token(
        &self,
        token_sha256: TokenDigest,
        active: Precondition,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        self.by_owner(ctx)?.check_open(ctx)?;
        let ttl = ctx.policy.seconds(policy::PolicyKey::TerminalTokenTtl, &self.scopes(), ctx.now);
        let expires_at = (ctx.now + ttl).min(self.ends_at);
        let mut next = self.clone();
        let browser_session = match ctx.by {
            Principal::Caller(caller) => caller.browser_session,
            Principal::Node(_) | Principal::System(_) => None,
        };
        next.token = Some(SessionToken { sha256: token_sha256, expires_at, browser_session });
        match &mut next.phase {
            Phase::Opened { until } => {
                *until = expires_at;
                next.browser_session = browser_session;
            }
            // The token admits a connection until its expiry.
            Phase::Detached { until: Some(until), .. } => *until = expires_at.max(*until),
            Phase::Detached { until: None, .. } | Phase::Attached { .. } | Phase::Closed { .. } => {}
        }
        let audit = self.audit(AuditAction::TerminalsIssueToken, &json!({}));
        Ok(Transition::to(
            next,
            Reply::Issued { expires_at, recording: self.recording },
            "a token to connect again was issued",
        )
        .audit(audit)
        .precondition(active))
    }

    fn attach(
        &self,
        shown: TokenDigest,
        active: Precondition,
        gateway: Option<MemberId>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let refused = |cause| Err(Rejection::TokenRefused { cause });
        if self.spent.contains(&shown) {
            return refused(TerminalTokenFault::Spent);
        }
        self.check_open(ctx)?;
        match &self.token {
            Some(token) if token.sha256 == shown && ctx.now < token.expires_at => {}
            Some(token) if token.sha256 == shown => return refused(TerminalTokenFault::Expired),
            Some(_) | None => return refused(TerminalTokenFault::Mismatch),
        }
        let mut next = self.clone();
        next.token = None;
        next.browser_session = self.login_of_token();
        next.spent.push(shown);
        if next.spent.len() > SPENT_TOKENS {
            next.spent.remove(0);
        }
        next.attachments = self.attachments.saturating_add(1);
        next.phase = Phase::Attached { since: ctx.now, gateway };
        let audit = self.audit(AuditAction::TerminalsAttach, &json!({ "attachment": next.attachments }));
        let reply = Reply::Attached { attachment: next.attachments, session: Box::new(next.clone()) };
        Ok(Transition::to(next, reply, "a connection showed the token")
            .audit(audit)
            .precondition(active)
            // The previous connection is closed.
            .effect(Effect::WakeTerminal(self.id)))
    }

    fn detach(&self, attachment: u32, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match &self.phase {
            Phase::Attached { .. } if attachment == self.attachments => {
                let ttl = ctx.policy.seconds(policy::PolicyKey::TerminalDetachedTtl, &self.scopes(), ctx.now);
                let phase = Phase::Detached { since: ctx.now, until: Some(ctx.now + ttl) };
                let next = Self { phase, ..self.clone() };
                Transition::to(next, Reply::Done, "the connection is gone")
            }
            // Another connection has replaced it, or the session is closed.
            Phase::Opened { .. } | Phase::Attached { .. } | Phase::Detached { .. } | Phase::Closed { .. } => {
                Transition::stay(Reply::Done)
            }
        }
    }

    /// A browser session has ended. It ends the connection that it has made, or voids the token that it has requested.
    fn log_out(&self, ended: BrowserSessionId, ctx: &TransitionContext<'_>) -> Transition<Self> {
        if self.browser_session == Some(ended) {
            return self.close(CloseReason::LoggedOut, AuditAction::TerminalsClose, &json!({}), ctx);
        }
        if self.login_of_token() == Some(ended) {
            let next = Self { token: None, ..self.clone() };
            return Transition::to(next, Reply::Done, "the browser session that requested its token has ended");
        }
        Transition::stay(Reply::Done)
    }

    /// The browser session by which the token for the next connection was requested.
    #[must_use]
    pub fn login_of_token(&self) -> Option<BrowserSessionId> {
        match &self.phase {
            // Also in snapshots of earlier releases, whose tokens do not say it.
            Phase::Opened { .. } => self.browser_session,
            Phase::Attached { .. } | Phase::Detached { .. } | Phase::Closed { .. } => {
                self.token.as_ref()?.browser_session
            }
        }
    }

    /// Whether the end of this browser session concerns it.
    #[must_use]
    pub fn is_of_login(&self, browser_session: BrowserSessionId) -> bool {
        [self.browser_session, self.login_of_token()].contains(&Some(browser_session))
    }

    fn tick(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let over = |reason| self.close(reason, AuditAction::TerminalsClose, &json!({}), ctx);
        match &self.phase {
            Phase::Opened { until } if ctx.now >= *until => over(CloseReason::NeverAttached),
            Phase::Attached { .. } | Phase::Detached { .. } if ctx.now >= self.ends_at => over(CloseReason::Lifetime),
            Phase::Detached { until, .. } if ctx.now >= self.detached_until(*until) => {
                over(CloseReason::DetachedExpired)
            }
            Phase::Opened { .. } | Phase::Attached { .. } | Phase::Detached { .. } | Phase::Closed { .. } => {
                Transition::stay(Reply::Done)
            }
        }
    }

    /// Checks that it is not closed. Its deadline may not have been processed yet: a session past its deadline counts as closed.
    fn check_open(&self, ctx: &TransitionContext<'_>) -> Result<(), Rejection> {
        let over = |reason: &CloseReason| Err(Rejection::Closed { reason: reason.into() });
        match &self.phase {
            Phase::Closed { reason, .. } => over(reason),
            Phase::Opened { .. } | Phase::Attached { .. } | Phase::Detached { .. } if ctx.now >= self.ends_at => {
                over(&CloseReason::Lifetime)
            }
            Phase::Detached { until, .. } if ctx.now >= self.detached_until(*until) => {
                over(&CloseReason::DetachedExpired)
            }
            Phase::Opened { .. } | Phase::Attached { .. } | Phase::Detached { .. } => Ok(()),
        }
    }

    /// A second close has no effect; the first reason stays.
    fn close(
        &self,
        reason: CloseReason,
        action: AuditAction,
        more: &Value,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        if self.closed().is_some() {
            return Transition::stay(Reply::Done);
        }
        let code = reason.code();
        let mut metadata = json!({ "code": code, "attachments": self.attachments });
        extend(&mut metadata, more);
        let closed = Event::TerminalClosed {
            session_id: self.id,
            allocation_id: self.allocation_id,
            node_id: self.node_id,
            reason: code.to_owned(),
        };
        let next = Self { phase: Phase::Closed { at: ctx.now, reason }, token: None, ..self.clone() };
        Transition::to(next, Reply::Done, format!("closed: {code}"))
            .event(closed)
            .audit(self.audit(action, &metadata))
            .effect(Effect::WakeTerminal(self.id))
    }

    fn audit(&self, action: AuditAction, more: &Value) -> AuditRecord {
        let mut metadata = json!({ "user_id": self.owner.user_id, "allocation_id": self.allocation_id });
        extend(&mut metadata, more);
        AuditRecord::new(action, EntityRef { kind: EntityKind::TerminalSession, id: self.id.0 }, metadata)
    }
}

fn extend(metadata: &mut Value, more: &Value) {
    if let (Some(metadata), Some(more)) = (metadata.as_object_mut(), more.as_object()) {
        metadata.extend(more.clone());
    }
}

#[cfg(test)]
mod tests;
