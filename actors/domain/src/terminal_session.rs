//! A terminal session: one shell on an allocation's machine, and who is connected to it (specification, *Authentication* 7; decisions 5,
//! *Terminal*).
//!
//! ```text
//! opened ──attach──▶ attached ⇄ detached          each ──end, fault, kill, release, lifetime──▶ closed
//!    └──never attached──▶ closed       └──detached for too long, or in the way of a new session──▶ closed
//! ```
//!
//! The shell runs and its output is kept by the node's agent; what is here says whether it may. A connection is let in by a token that
//! is used once. Each one gets a number, so that a later one puts an earlier one out.

use crate::audit::{Audit, AuditAction, Refusals};
use crate::authz::{Action, Principal};
use crate::commit::Footing;
use crate::event::Event;
use crate::id::{AllocationId, EntityRef, Kind, NodeId, TerminalSessionId};
use crate::machine::{self, Ctx, Deadline, Effect, Keys, Machine, Refused, Step, Timestamp};
use crate::policy::{self, Scopes};
use crate::recording::Terms;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt;

mod recorded;

/// A session, from its first token to its tombstone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSession {
    pub id: TerminalSessionId,
    pub allocation_id: AllocationId,
    pub node_id: NodeId,
    pub owner: Owner,
    pub opened_at: Timestamp,
    /// When it is closed whatever it does. Fixed at its beginning, so that nobody lives for ever by coming again.
    pub ends_at: Timestamp,
    pub phase: Phase,
    /// How many connections were let in; the last one's number.
    pub attachments: u32,
    /// The token that lets the next connection in; an earlier one is void.
    pub token: Option<Token>,
    /// The tokens that were used last, so that a replay is known for one.
    pub spent: Vec<Digest>,
    #[serde(default)]
    pub refusals: Refusals,
    /// On which terms it is recorded at this moment.
    #[serde(default)]
    pub recording: Terms,
    #[serde(default)]
    pub tape: Tape,
}

/// What is there of its recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tape {
    /// It was never recorded.
    #[default]
    Blank,
    /// Some of it at least was to be recorded.
    Used,
    /// It was kept as long as recordings are.
    Forgotten,
}

/// Whose it is, with the scopes in which its policies are resolved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    pub user_id: String,
    pub org_id: Option<String>,
    pub project_id: Option<String>,
    pub plan: Option<String>,
}

/// The SHA-256 hash of a token.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(pub [u8; 32]);

/// Whoever can write a hash into the database has made a token: not even that belongs in a log.
impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Digest(..)")
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    pub sha256: Digest,
    pub expires_at: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Phase {
    /// Its token was not used yet.
    Opened {
        until: Timestamp,
    },
    Attached {
        since: Timestamp,
    },
    /// The shell runs on, and nobody is connected.
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

/// Why a session is over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum CloseReason {
    /// Its program ended.
    Exited { exit: Exit },
    /// The node could not begin it, or lost it.
    Failed { code: String },
    /// Its first token was not used in time.
    NeverAttached,
    /// An administrator closed it, or revoked its node's certificates.
    Killed,
    /// Its allocation is no longer active.
    AllocationEnded,
    /// It lived as long as policy `terminal.session_max_ttl_seconds` lets it.
    Lifetime,
    /// No connection came back for as long as policy `terminal.detached_ttl_seconds` waits.
    DetachedExpired,
    /// It was the oldest detached session when its user opened one more than the limit.
    Displaced,
    /// Its user ended it.
    EndedByUser,
}

impl CloseReason {
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Exited { .. } => "exited",
            Self::Failed { .. } => "failed",
            Self::NeverAttached => "never_attached",
            Self::Killed => "killed",
            Self::AllocationEnded => "allocation_ended",
            Self::Lifetime => "lifetime",
            Self::DetachedExpired => "detached_expired",
            Self::Displaced => "displaced",
            Self::EndedByUser => "ended_by_user",
        }
    }
}

/// How the session's program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

/// The fault of a session whose agent was stopped or started anew.
pub const AGENT_RESTARTED: &str = "agent_restarted";

/// How many used tokens are remembered.
pub const SPENT: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// The owner of an active allocation wants a shell. `active`: the allocation as it was read.
    Open {
        allocation_id: AllocationId,
        node_id: NodeId,
        token_sha256: Digest,
        active: Footing,
    },
    /// Its owner wants to connect to it again.
    IssueToken {
        token_sha256: Digest,
        active: Footing,
    },
    /// A connection shows a token.
    Attach {
        token_sha256: Digest,
        active: Footing,
    },
    /// The connection of that number is gone.
    Detach {
        attachment: u32,
    },
    /// The node's agent says that the program ended.
    End {
        exit: Exit,
    },
    /// The node's agent says that it was stopped or started anew, and that the program went with it.
    Lose,
    /// The node could not begin it, or lost it.
    Fail {
        node_id: NodeId,
        code: String,
    },
    Kill {
        reason: String,
    },
    /// Its owner ends it.
    EndByUser,
    /// Its owner opens one session more than the limit. Refused unless it is detached.
    Displace,
    /// Its allocation is being given back.
    Revoke,
    /// An administrator has revoked the certificates of its node.
    CutOff,
    /// A policy about recordings may have changed.
    HeedPolicy,
    /// Somebody wants to read its recording.
    ReadRecording,
    /// Its recording is older than it is kept.
    ForgetRecording,
    Tick,
}

impl machine::Command for Command {
    fn name(&self) -> &'static str {
        match self {
            Self::Open { .. } => "open",
            Self::IssueToken { .. } => "issue_token",
            Self::Attach { .. } => "attach",
            Self::Detach { .. } => "detach",
            Self::End { .. } => "end",
            Self::Lose => "lose",
            Self::Fail { .. } => "fail",
            Self::Kill { .. } => "kill",
            Self::EndByUser => "end_by_user",
            Self::Displace => "displace",
            Self::Revoke => "revoke",
            Self::CutOff => "cut_off",
            Self::HeedPolicy => "heed_policy",
            Self::ReadRecording => "read_recording",
            Self::ForgetRecording => "forget_recording",
            Self::Tick => "tick",
        }
    }

    fn action(&self) -> Action {
        match self {
            Self::Open { .. } | Self::IssueToken { .. } | Self::EndByUser | Self::Displace => Action::OpenTerminals,
            Self::Kill { .. } => Action::OperateTerminals,
            Self::End { .. } | Self::Lose => Action::SpeakForNode,
            Self::ReadRecording => Action::ReadRecordings,
            Self::Attach { .. }
            | Self::Detach { .. }
            | Self::Fail { .. }
            | Self::Revoke
            | Self::CutOff
            | Self::HeedPolicy
            | Self::ForgetRecording
            | Self::Tick => Action::Advance,
        }
    }

    fn creates(&self) -> bool {
        matches!(self, Self::Open { .. })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Until when the token can be used.
    Issued {
        expires_at: Timestamp,
        #[serde(default)]
        recording: Terms,
    },
    /// The connection is let in under this number.
    Attached {
        attachment: u32,
        session: Box<TerminalSession>,
    },
    /// The session as it stands.
    Session {
        session: Box<TerminalSession>,
    },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    /// Also where it is somebody else's, who is not to know of it.
    #[error("there is no such terminal session")]
    NotFound,
    #[error("the terminal session exists already")]
    Exists,
    #[error("the terminal session is over: {reason}")]
    Closed { reason: String },
    #[error("the terminal session is not detached")]
    NotDetached,
    #[error("the terminal token does not hold: {cause}")]
    TokenRefused { cause: TokenCause },
}

/// Why a token does not hold; never told to the one who shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum TokenCause {
    #[error("it is another token")]
    Mismatch,
    #[error("it was used before")]
    Spent,
    #[error("it has expired")]
    Expired,
}

impl Machine for TerminalSession {
    const KIND: Kind = Kind::TerminalSession;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(state: Option<&Self>, command: Command, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match (state, command) {
            (None, Command::Open { allocation_id, node_id, token_sha256, active }) => {
                Self::open(allocation_id, node_id, token_sha256, active, ctx)
            }
            (Some(_), Command::Open { .. }) => Err(Rejection::Exists),
            (None, _) => Err(Rejection::NotFound),
            (Some(it), command) => it.advance(command, ctx),
        }
    }

    /// A token that does not hold: the one who showed it hears one public code, the log keeps the true cause.
    fn audit_refusal(&self, command: &Command, rejection: &Rejection, ctx: &Ctx<'_>) -> Option<Refused<Self>> {
        let (Command::Attach { .. }, Rejection::TokenRefused { cause }) = (command, rejection) else { return None };
        let next = Self { refusals: self.refusals.audited(ctx.now)?, ..self.clone() };
        let metadata = json!({ "cause": cause.to_string(), "result": "refused" });
        Some(Refused { next, audit: self.audit(AuditAction::TerminalsRefuseToken, &metadata) })
    }

    fn state(&self) -> &'static str {
        self.phase.name()
    }

    fn deadline(&self) -> Option<Deadline> {
        match &self.phase {
            Phase::Opened { until } => Some(Deadline::new(*until, "nobody has connected with the token")),
            Phase::Attached { .. } => Some(Deadline::new(self.ends_at, "the session's lifetime")),
            Phase::Detached { until, .. } => {
                Some(Deadline::new(self.detached_until(*until), "no connection has come back"))
            }
            Phase::Closed { .. } => None,
        }
    }

    fn keys(&self) -> Keys {
        Keys { owner: Some(self.owner.user_id.clone()), ..Keys::default() }
    }

    fn tick() -> Command {
        Command::Tick
    }
}

impl Phase {
    /// The states in which the shell may run.
    pub const LIVE: [&str; 3] = ["opened", "attached", "detached"];

    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Opened { .. } => "opened",
            Self::Attached { .. } => "attached",
            Self::Detached { .. } => "detached",
            Self::Closed { .. } => "closed",
        }
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

    /// The scopes in which its policies are resolved.
    #[must_use]
    pub fn scopes(&self) -> Scopes {
        self.owner.scopes()
    }

    fn open(
        allocation_id: AllocationId,
        node_id: NodeId,
        token_sha256: Digest,
        active: Footing,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        let Principal::Caller(caller) = ctx.by else { return Err(Rejection::NotFound) };
        let owner = Owner {
            user_id: caller.user_id.clone(),
            org_id: caller.org_id.clone(),
            project_id: caller.project_id.clone(),
            plan: caller.plan.clone(),
        };
        let scopes = owner.scopes();
        let expires_at = ctx.now + ctx.policy.seconds(policy::Key::TerminalTokenTtl, &scopes, ctx.now);
        let recording = Terms::by_policy(ctx.policy, &scopes, ctx.now);
        let session = Self {
            id: TerminalSessionId(ctx.id),
            allocation_id,
            node_id,
            owner,
            opened_at: ctx.now,
            ends_at: ctx.now + ctx.policy.seconds(policy::Key::TerminalSessionMaxTtl, &scopes, ctx.now),
            phase: Phase::Opened { until: expires_at },
            attachments: 0,
            token: Some(Token { sha256: token_sha256, expires_at }),
            spent: Vec::new(),
            refusals: Refusals::default(),
            recording,
            tape: if recording.is_on() { Tape::Used } else { Tape::Blank },
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
        Ok(Step::to(session, Reply::Issued { expires_at, recording }, "opened by the allocation's user")
            .event(opened)
            .audit(audit)
            .resting_on(active))
    }

    fn advance(&self, command: Command, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match command {
            Command::Open { .. } => Err(Rejection::Exists),
            Command::IssueToken { token_sha256, active } => self.issue_token(token_sha256, active, ctx),
            Command::Attach { token_sha256, active } => self.attach(token_sha256, active, ctx),
            Command::Detach { attachment } => Ok(self.detach(attachment, ctx)),
            Command::End { exit } => {
                if *ctx.by != Principal::Node(self.node_id) {
                    return Err(Rejection::NotFound);
                }
                Ok(self.close(CloseReason::Exited { exit }, AuditAction::TerminalsClose, &json!({}), ctx))
            }
            Command::Lose => {
                if *ctx.by != Principal::Node(self.node_id) {
                    return Err(Rejection::NotFound);
                }
                let code = AGENT_RESTARTED.to_owned();
                let metadata = json!({ "fault": code });
                Ok(self.close(CloseReason::Failed { code }, AuditAction::TerminalsClose, &metadata, ctx))
            }
            Command::Fail { node_id, code } if node_id == self.node_id => {
                let metadata = json!({ "fault": code });
                Ok(self.close(CloseReason::Failed { code }, AuditAction::TerminalsClose, &metadata, ctx))
            }
            Command::Fail { .. } => Ok(Step::stay(Reply::Done)),
            Command::Kill { reason } => {
                let metadata = json!({ "reason": reason });
                Ok(self.answered(self.close(CloseReason::Killed, AuditAction::TerminalsKill, &metadata, ctx)))
            }
            Command::EndByUser => {
                let step =
                    self.by_owner(ctx)?.close(CloseReason::EndedByUser, AuditAction::TerminalsClose, &json!({}), ctx);
                Ok(self.answered(step))
            }
            Command::Displace => {
                let it = self.by_owner(ctx)?;
                match it.phase {
                    Phase::Detached { .. } | Phase::Closed { .. } => {
                        Ok(it.close(CloseReason::Displaced, AuditAction::TerminalsClose, &json!({}), ctx))
                    }
                    Phase::Opened { .. } | Phase::Attached { .. } => Err(Rejection::NotDetached),
                }
            }
            Command::Revoke => {
                Ok(self.close(CloseReason::AllocationEnded, AuditAction::TerminalsClose, &json!({}), ctx))
            }
            Command::CutOff => {
                let metadata = json!({ "cause": "node_revoked" });
                Ok(self.close(CloseReason::Killed, AuditAction::TerminalsClose, &metadata, ctx))
            }
            Command::HeedPolicy => Ok(self.heed_policy(ctx)),
            Command::ReadRecording => self.read_recording(ctx),
            Command::ForgetRecording => Ok(self.forget_recording()),
            Command::Tick => Ok(self.tick(ctx)),
        }
    }

    /// Itself, where its owner asks.
    fn by_owner(&self, ctx: &Ctx<'_>) -> Result<&Self, Rejection> {
        if ctx.by.is_user(&self.owner.user_id) { Ok(self) } else { Err(Rejection::NotFound) }
    }

    /// The step with the session as its reply.
    fn answered(&self, mut step: Step<Self>) -> Step<Self> {
        let session = Box::new(step.next.clone().unwrap_or_else(|| self.clone()));
        step.reply = Reply::Session { session };
        step
    }

    /// When a detached session ends: at the latest with its lifetime.
    fn detached_until(&self, until: Option<Timestamp>) -> Timestamp {
        until.unwrap_or(self.ends_at).min(self.ends_at)
    }

    fn issue_token(&self, token_sha256: Digest, active: Footing, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        self.by_owner(ctx)?.living(ctx)?;
        let ttl = ctx.policy.seconds(policy::Key::TerminalTokenTtl, &self.scopes(), ctx.now);
        let expires_at = (ctx.now + ttl).min(self.ends_at);
        let mut next = self.clone();
        next.token = Some(Token { sha256: token_sha256, expires_at });
        match &mut next.phase {
            Phase::Opened { until } => *until = expires_at,
            // The token lets a connection in for as long as it says.
            Phase::Detached { until: Some(until), .. } => *until = expires_at.max(*until),
            Phase::Detached { until: None, .. } | Phase::Attached { .. } | Phase::Closed { .. } => {}
        }
        let audit = self.audit(AuditAction::TerminalsIssueToken, &json!({}));
        Ok(Step::to(
            next,
            Reply::Issued { expires_at, recording: self.recording },
            "a token to connect again was issued",
        )
        .audit(audit)
        .resting_on(active))
    }

    fn attach(&self, shown: Digest, active: Footing, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let refused = |cause| Err(Rejection::TokenRefused { cause });
        if self.spent.contains(&shown) {
            return refused(TokenCause::Spent);
        }
        self.living(ctx)?;
        match &self.token {
            Some(token) if token.sha256 == shown && ctx.now < token.expires_at => {}
            Some(token) if token.sha256 == shown => return refused(TokenCause::Expired),
            Some(_) | None => return refused(TokenCause::Mismatch),
        }
        let mut next = self.clone();
        next.token = None;
        next.spent.push(shown);
        if next.spent.len() > SPENT {
            next.spent.remove(0);
        }
        next.attachments = self.attachments.saturating_add(1);
        next.phase = Phase::Attached { since: ctx.now };
        let audit = self.audit(AuditAction::TerminalsAttach, &json!({ "attachment": next.attachments }));
        let reply = Reply::Attached { attachment: next.attachments, session: Box::new(next.clone()) };
        Ok(Step::to(next, reply, "a connection showed the token")
            .audit(audit)
            .resting_on(active)
            // Whoever was connected before is put out.
            .effect(Effect::WakeTerminal(self.id)))
    }

    fn detach(&self, attachment: u32, ctx: &Ctx<'_>) -> Step<Self> {
        match &self.phase {
            Phase::Attached { .. } if attachment == self.attachments => {
                let ttl = ctx.policy.seconds(policy::Key::TerminalDetachedTtl, &self.scopes(), ctx.now);
                let phase = Phase::Detached { since: ctx.now, until: Some(ctx.now + ttl) };
                let next = Self { phase, ..self.clone() };
                Step::to(next, Reply::Done, "the connection is gone")
            }
            // Another came in its place, or it is over.
            Phase::Opened { .. } | Phase::Attached { .. } | Phase::Detached { .. } | Phase::Closed { .. } => {
                Step::stay(Reply::Done)
            }
        }
    }

    fn tick(&self, ctx: &Ctx<'_>) -> Step<Self> {
        let over = |reason| self.close(reason, AuditAction::TerminalsClose, &json!({}), ctx);
        match &self.phase {
            Phase::Opened { until } if ctx.now >= *until => over(CloseReason::NeverAttached),
            Phase::Attached { .. } | Phase::Detached { .. } if ctx.now >= self.ends_at => over(CloseReason::Lifetime),
            Phase::Detached { until, .. } if ctx.now >= self.detached_until(*until) => {
                over(CloseReason::DetachedExpired)
            }
            Phase::Opened { .. } | Phase::Attached { .. } | Phase::Detached { .. } | Phase::Closed { .. } => {
                Step::stay(Reply::Done)
            }
        }
    }

    /// Its deadline may not have been heard of yet: what is over is over from the instant on.
    fn living(&self, ctx: &Ctx<'_>) -> Result<(), Rejection> {
        let over = |reason: &CloseReason| Err(Rejection::Closed { reason: reason.code().to_owned() });
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

    /// Closing twice is closing once; the first reason stands.
    fn close(&self, reason: CloseReason, action: AuditAction, more: &Value, ctx: &Ctx<'_>) -> Step<Self> {
        if self.closed().is_some() {
            return Step::stay(Reply::Done);
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
        Step::to(next, Reply::Done, format!("closed: {code}"))
            .event(closed)
            .audit(self.audit(action, &metadata))
            .effect(Effect::WakeTerminal(self.id))
    }

    fn audit(&self, action: AuditAction, more: &Value) -> Audit {
        let mut metadata = json!({ "user_id": self.owner.user_id, "allocation_id": self.allocation_id });
        extend(&mut metadata, more);
        Audit::new(action, EntityRef { kind: Kind::TerminalSession, id: self.id.0 }, metadata)
    }
}

impl Owner {
    #[must_use]
    pub fn scopes(&self) -> Scopes {
        Scopes {
            user_id: Some(self.user_id.clone()),
            project_id: self.project_id.clone(),
            org_id: self.org_id.clone(),
            plan: self.plan.clone(),
        }
    }
}

fn extend(metadata: &mut Value, more: &Value) {
    if let (Some(metadata), Some(more)) = (metadata.as_object_mut(), more.as_object()) {
        metadata.extend(more.clone());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
