//! A notification endpoint: a webhook's URL or an e-mail address of a user or an organization, and the queue of messages for it
//! (decision 0031).
//!
//! ```text
//! active ──an attempt fails, or messages are dead──▶ failing ──an attempt succeeds, none is dead──▶ active
//!    └── its owner, 410 Gone, or days of failures ──▶ disabled ──its owner──▶ active          each ──▶ deleted
//! ```
//!
//! A message stays in the endpoint's queue until an attempt succeeds. Each message has its own backoff, and the endpoint pauses after a
//! failure, so that a failing receiver gets one request per pause and not one per message. A message that was tried too often, or for too
//! long, or that finds the queue full, is a dead letter, which its owner or an operator resends or dismisses.

mod fact;
mod queue;
mod request;

#[cfg(test)]
mod tests;

pub use fact::Fact;
pub use queue::{BODY_MOST, DeliveryAttempt, DeliveryFailure, DeliveryQueue, QueueEntry, QueuedNotification};
pub use request::Request;

use crate::account_holder::Holder;
use crate::audit::{AuditAction, AuditRecord};
use crate::authz::{CallerIdentity, Principal};
use crate::explanation::Explanation;
use crate::id::{EntityKind, EntityRef, NotificationEndpointId, OrgId, UserId};
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{self, IndexKeys, Machine, Timestamp, Transition, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// The longest URL or e-mail address, in bytes.
pub const ADDRESS_MOST: usize = 2048;
/// How long the former secret is used beside its successor, so that receivers can change without a gap.
const FORMER_SECRET_TTL: TimeDelta = TimeDelta::hours(24);
/// An endpoint that has failed for so long, without one success, is disabled (Standard Webhooks, *Operational considerations*).
const DISABLED_AFTER: TimeDelta = TimeDelta::days(5);
/// The bound of a stored reason, in characters.
const MAX_REASON_CHARS: usize = 200;
/// The states of an endpoint that is not deleted. Deleted ones stay as tombstones, of which a holder may have any number.
pub const PRESENT: [&str; 3] = ["active", "failing", "disabled"];
/// The event of a test message.
pub const TEST: &str = "notification.test";

/// The events that an e-mail address gets unless its owner chooses others: depletion, and lost machines.
pub const DEFAULT_EMAIL_EVENTS: &[&str] = &[
    "billing.balance_low",
    "billing.balance_depleted",
    "provisioning.failed",
    "provisioning.released",
    "provisioning.release_exhausted",
    "node.tenant_faulted",
    "node.evacuation_begun",
    "node.state_changed",
];

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotificationEndpoint {
    pub id: NotificationEndpointId,
    pub holder: Holder,
    /// What the last token of its holder names, for its policies.
    #[serde(default, skip_serializing_if = "RecipientClaims::is_empty")]
    pub claims: RecipientClaims,
    pub target: Target,
    /// The secret that signs messages, sealed, in base64. An e-mail address has none.
    pub secret_enc: Option<String>,
    /// The former secret, and until when it signs too.
    pub former_secret: Option<FormerSecret>,
    /// The event types that it gets; `None`: all.
    pub events: Option<BTreeSet<String>>,
    /// Its slot among the holder's; `None` for the e-mail address that came with a token.
    pub place: Option<u16>,
    pub created_by: String,
    pub created_at: Timestamp,
    pub queue: DeliveryQueue,
    pub phase: Phase,
}

/// What a token names beside the user: policies of notifications follow their recipient (decisions 3, *Which scopes a key has*).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecipientClaims {
    pub org_id: Option<OrgId>,
    pub plan: Option<String>,
}

impl RecipientClaims {
    /// True where the token named neither, or none was seen.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.org_id.is_none() && self.plan.is_none()
    }
}

impl From<&CallerIdentity> for RecipientClaims {
    fn from(caller: &CallerIdentity) -> Self {
        Self { org_id: caller.org_id.clone(), plan: caller.plan.clone() }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Target {
    Webhook { url: String },
    Email { address: String },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FormerSecret {
    pub secret_enc: String,
    pub until: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub enum Phase {
    Active,
    /// Nothing is queued and nothing is sent.
    Disabled {
        since: Timestamp,
        because: DisableCause,
    },
    Deleted {
        at: Timestamp,
    },
}

/// Why an endpoint is disabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum DisableCause {
    /// Its owner disabled it.
    ByOwner,
    /// It answered 410 Gone.
    Gone,
    /// Every attempt failed for days.
    Failing,
}

impl DisableCause {
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

/// A change of an endpoint; `None` keeps the value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointChange {
    pub url: Option<String>,
    /// `Some(None)`: all events.
    pub events: Option<Option<BTreeSet<String>>>,
    pub is_enabled: Option<bool>,
}

/// The commands of a notification endpoint.
pub type Command = state_machine::AnyCommand<Request, state_machine::NoCommand, Fact, Maintenance>;

state_machine::impl_command_from!(Request, Fact, Maintenance);

/// What the service does to a notification endpoint by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Maintenance {
    /// The same secret, or the former one, sealed under another key of the key ring.
    Reseal {
        secret_enc: String,
        is_former: bool,
    },
    Tick,
}

impl state_machine::Maintenance for Maintenance {
    const TICK: Self = Self::Tick;
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    Shown {
        endpoint: Box<NotificationEndpoint>,
    },
    /// The number of dead letters that were concerned.
    Letters {
        count: u32,
        endpoint: Box<NotificationEndpoint>,
    },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    /// Also where it belongs to another holder.
    #[error("there is no such notification endpoint")]
    NotFound,
    #[error("the notification endpoint exists already")]
    Exists,
    #[error("{limit} notification endpoints are there, which is the most; delete one first")]
    TooMany { limit: i64 },
    #[error("another notification endpoint is being made at this moment")]
    PlaceTaken,
    #[error("an e-mail address has no URL and no secret")]
    NotAWebhook,
    #[error("the notification endpoint is disabled; enable it first")]
    IsDisabled,
    #[error("there is no such dead letter")]
    NoSuchLetter,
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotFound => Explanation::not_found("notification endpoint"),
            Self::Exists => Explanation::conflict("The notification endpoint exists already."),
            Self::TooMany { limit } => Explanation::conflict(format!(
                "You have {limit} notification endpoints, which are the most; delete one first."
            ))
            .limited_by(PolicyKey::NotificationEndpoints, limit),
            Self::PlaceTaken => Explanation::conflict(
                "Another notification endpoint was made at the same moment; ask again with a new Idempotency-Key.",
            ),
            Self::NotAWebhook => {
                Explanation::invalid("An e-mail address has no URL and no secret; leave `url` out.".to_owned(), "url")
            }
            Self::IsDisabled => {
                Explanation::conflict("The notification endpoint is disabled; enable it first (\"enabled\": true).")
            }
            Self::NoSuchLetter => Explanation::not_found("dead letter of this notification endpoint"),
        }
    }
}

impl Machine for NotificationEndpoint {
    const KIND: EntityKind = EntityKind::NotificationEndpoint;
    /// The bounds of [`DeliveryQueue`], and as much again for the escaping of JSON within JSON.
    const SNAPSHOT_MOST: usize = 1024 * 1024;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match (state, command) {
            (Some(endpoint), Command::Request(request)) => endpoint.execute(request, ctx),
            (Some(endpoint), Command::Fact(fact)) => Ok(endpoint.apply(fact, ctx)),
            (Some(endpoint), Command::Maintenance(Maintenance::Reseal { secret_enc, is_former }))
                if endpoint.exists() =>
            {
                Ok(endpoint.resealed(secret_enc, is_former))
            }
            (None, Command::Request(request)) => Self::begin(request, ctx),
            (None, Command::Fact(Fact::AddressVerified { user_id, address, claims })) => {
                Ok(Self::introduced(user_id, address, claims.unwrap_or_default(), ctx))
            }
            (None, Command::Fact(_)) | (_, Command::Maintenance(_)) => Ok(Transition::stay(Reply::Done)),
        }
    }

    /// Another request took the slot at the same time.
    fn decide_without(
        _: Option<&Self>,
        _: Command,
        _: &BTreeMap<String, Uuid>,
        _: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        Err(Rejection::PlaceTaken)
    }

    fn state(&self) -> &'static str {
        match self.phase {
            Phase::Active if self.queue.is_failing() => "failing",
            Phase::Active => "active",
            Phase::Disabled { .. } => "disabled",
            Phase::Deleted { .. } => "deleted",
        }
    }

    fn timer(&self) -> Option<Timestamp> {
        match self.phase {
            Phase::Active => self.queue.next_attempt_at(),
            Phase::Disabled { .. } | Phase::Deleted { .. } => None,
        }
    }

    fn keys(&self) -> IndexKeys {
        IndexKeys { owner: Some(self.holder.to_string()), ..IndexKeys::default() }
    }

    fn claims(&self) -> BTreeSet<String> {
        match (self.phase, self.place) {
            (Phase::Active | Phase::Disabled { .. }, Some(place)) => {
                [format!("notification-endpoint/{place}/{}", self.holder)].into()
            }
            (Phase::Deleted { .. }, _) | (_, None) => BTreeSet::new(),
        }
    }
}

/// On one line, and within the bound.
fn truncated(why: &str) -> String {
    why.chars().map(|it| if it.is_control() { ' ' } else { it }).take(MAX_REASON_CHARS).collect()
}

impl NotificationEndpoint {
    /// True where `who` may see and change it: the user, a user whose token names the organization, or an administrator.
    #[must_use]
    pub fn is_for(&self, who: &Principal) -> bool {
        !matches!(self.phase, Phase::Deleted { .. }) && (who.is_admin() || self.holders_claims(who).is_some())
    }

    /// What the token of its holder names; `None` where the principal is not its holder.
    fn holders_claims(&self, who: &Principal) -> Option<RecipientClaims> {
        let is_holder = |caller: &CallerIdentity| match &self.holder {
            Holder::User(id) => caller.user_id == *id,
            Holder::Org(id) => caller.org_id.as_ref() == Some(id),
        };
        match who {
            Principal::Caller(caller) if is_holder(caller) => Some(caller.into()),
            Principal::Caller(_) | Principal::Node(_) | Principal::System(_) => None,
        }
    }

    /// True where it gets events of this type.
    #[must_use]
    pub fn wants(&self, event: &str) -> bool {
        let is_chosen = self.events.as_ref().is_none_or(|events| events.contains(event));
        self.phase == Phase::Active && (is_chosen || event == TEST)
    }

    /// The secrets that sign messages now, sealed, the newest first.
    pub fn secrets(&self, now: Timestamp) -> impl Iterator<Item = &str> {
        let former = self.former_secret.iter().filter(move |former| now < former.until);
        self.secret_enc.as_deref().into_iter().chain(former.map(|former| former.secret_enc.as_str()))
    }

    #[must_use]
    pub const fn exists(&self) -> bool {
        !matches!(self.phase, Phase::Deleted { .. })
    }

    /// True of the endpoint of this e-mail address.
    #[must_use]
    pub fn is_at(&self, wanted: &str) -> bool {
        matches!(&self.target, Target::Email { address } if address == wanted)
    }

    /// The scopes in which its policies are resolved.
    #[must_use]
    pub fn scopes(&self) -> Scopes {
        let RecipientClaims { org_id, plan } = &self.claims;
        match &self.holder {
            Holder::User(_) => Scopes { org_id: org_id.clone(), ..self.holder.scopes(plan.as_deref()) },
            Holder::Org(_) => self.holder.scopes(plan.as_deref()),
        }
    }

    fn begin(request: Request, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match request {
            Request::Create { holder, target, secret_enc, events, place } => {
                let mut endpoint = Self::new(holder, target, secret_enc, events, Some(place), ctx);
                endpoint.claims = endpoint.holders_claims(ctx.by).unwrap_or_default();
                let limit = ctx.policy.int(PolicyKey::NotificationEndpoints, &endpoint.scopes(), ctx.now);
                if i64::from(place) >= limit {
                    return Err(Rejection::TooMany { limit });
                }
                // A request for another holder's endpoint is refused before the endpoint exists.
                if !endpoint.is_for(ctx.by) {
                    return Err(Rejection::NotFound);
                }
                let audit = endpoint.audit(AuditAction::NotificationEndpointsCreate, &json!({}));
                Ok(Transition::to(endpoint.clone(), endpoint.shown(), "its owner made it").audit(audit))
            }
            Request::Change { .. }
            | Request::RotateSecret { .. }
            | Request::Delete
            | Request::Test { .. }
            | Request::Resend { .. }
            | Request::Dismiss { .. } => Err(Rejection::NotFound),
        }
    }

    fn introduced(
        user_id: UserId,
        address: String,
        claims: RecipientClaims,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let events = DEFAULT_EMAIL_EVENTS.iter().map(|event| (*event).to_owned()).collect();
        let (holder, target) = (Holder::User(user_id), Target::Email { address });
        let endpoint = Self { claims, ..Self::new(holder, target, None, Some(events), None, ctx) };
        Transition::to(endpoint, Reply::Done, "the identity provider has verified the address")
    }

    fn new(
        holder: Holder,
        target: Target,
        secret_enc: Option<String>,
        events: Option<BTreeSet<String>>,
        place: Option<u16>,
        ctx: &TransitionContext<'_>,
    ) -> Self {
        Self {
            id: NotificationEndpointId(ctx.id),
            holder,
            claims: RecipientClaims::default(),
            target,
            secret_enc,
            former_secret: None,
            events,
            place,
            created_by: ctx.by.to_string(),
            created_at: ctx.now,
            queue: DeliveryQueue::default(),
            phase: Phase::Active,
        }
    }

    /// The address follows the identity provider's, and the claims follow its tokens. Its use stays the owner's choice.
    fn reintroduced(&self, address: String, claims: Option<RecipientClaims>) -> Transition<Self> {
        let next = Self {
            target: Target::Email { address },
            claims: claims.unwrap_or_else(|| self.claims.clone()),
            ..self.clone()
        };
        if next == *self || matches!(self.phase, Phase::Deleted { .. }) {
            return Transition::stay(Reply::Done);
        }
        Transition::to(next, Reply::Done, "the identity provider names another address, organization or plan")
    }

    fn changed(&self, change: EndpointChange, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        let mut next = self.clone();
        next.claims = self.holders_claims(ctx.by).unwrap_or_else(|| self.claims.clone());
        if let Some(to) = change.url {
            let Target::Webhook { url } = &mut next.target else { return Err(Rejection::NotAWebhook) };
            *url = to;
        }
        if let Some(events) = change.events {
            next.events = events;
        }
        match (change.is_enabled, self.phase) {
            (Some(false), Phase::Active) => {
                next.phase = Phase::Disabled { since: ctx.now, because: DisableCause::ByOwner };
            }
            (Some(true), Phase::Disabled { .. }) => {
                next.phase = Phase::Active;
                next.queue.resume(ctx.now);
            }
            _ => {}
        }
        if next == *self {
            return Ok(Transition::stay(self.shown()));
        }
        let audit = next.audit(AuditAction::NotificationEndpointsUpdate, &json!({ "is_enabled": next.is_enabled() }));
        Ok(Transition::to(next.clone(), next.shown(), "its owner changed it").audit(audit))
    }

    fn secret_rotated(&self, secret_enc: String, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        let Some(former) = self.secret_enc.clone() else { return Err(Rejection::NotAWebhook) };
        let former = FormerSecret { secret_enc: former, until: ctx.now + FORMER_SECRET_TTL };
        let next = Self { secret_enc: Some(secret_enc), former_secret: Some(former), ..self.clone() };
        let audit = next.audit(AuditAction::NotificationEndpointsRotateSecret, &json!({}));
        Ok(Transition::to(next.clone(), next.shown(), "its owner rotated the secret").audit(audit))
    }

    fn deleted(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let audit = self.audit(
            AuditAction::NotificationEndpointsDelete,
            &json!({ "waiting": self.queue.waiting.len(), "dead_letters": self.queue.dead.len() }),
        );
        let next = Self {
            secret_enc: None,
            former_secret: None,
            queue: DeliveryQueue::default(),
            phase: Phase::Deleted { at: ctx.now },
            ..self.clone()
        };
        Transition::to(next, Reply::Done, "its owner deleted it").audit(audit)
    }

    fn enqueued(&self, message: QueuedNotification, ctx: &TransitionContext<'_>) -> Transition<Self> {
        if !self.wants(&message.event) || self.queue.contains(message.id) {
            return Transition::stay(Reply::Done);
        }
        let mut next = self.clone();
        next.queue.push(message, ctx.now);
        Transition::to(next, Reply::Done, "a message waits for this endpoint")
    }

    fn tested(&self, body: String, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        if self.phase != Phase::Active {
            return Err(Rejection::IsDisabled);
        }
        let mut next = self.clone();
        next.queue.push(QueuedNotification { id: ctx.new_id(0), event: TEST.to_owned(), body }, ctx.now);
        let audit = self.audit(AuditAction::NotificationEndpointsTest, &json!({}));
        Ok(Transition::to(next.clone(), next.shown(), "its owner tests it").audit(audit))
    }

    fn delivered(&self, message_id: Uuid, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = self.clone();
        if !next.queue.delivered(message_id, ctx.now) {
            return Transition::stay(Reply::Done);
        }
        Transition::to(next, Reply::Done, "a message was delivered")
    }

    fn failed(&self, message_id: Uuid, failure: DeliveryFailure, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let most = ctx.policy.int(PolicyKey::NotificationDeliveryMaxAttempts, &self.scopes(), ctx.now);
        let failure = DeliveryFailure { why: truncated(&failure.why), ..failure };
        let mut next = self.clone();
        if !next.queue.failed(message_id, &failure, most, ctx) {
            return Transition::stay(Reply::Done);
        }
        let for_days = next.queue.failing_since.is_some_and(|since| ctx.now - since >= DISABLED_AFTER);
        let because = match (failure.is_gone, for_days) {
            (true, _) => Some(DisableCause::Gone),
            (false, true) => Some(DisableCause::Failing),
            (false, false) => None,
        };
        if let (Some(because), Phase::Active) = (because, self.phase) {
            next.phase = Phase::Disabled { since: ctx.now, because };
            return Transition::to(next, Reply::Done, format!("it is disabled: {}", because.name()));
        }
        Transition::to(next, Reply::Done, "the delivery of a message failed")
    }

    fn resent(
        &self,
        message_id: Option<Uuid>,
        reason: Option<&str>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if self.phase != Phase::Active {
            return Err(Rejection::IsDisabled);
        }
        let mut next = self.clone();
        let count = next.queue.resend(message_id, ctx.now);
        self.letters(next, count, AuditAction::NotificationEndpointsResend, message_id, reason)
    }

    fn dismissed(
        &self,
        message_id: Option<Uuid>,
        reason: Option<&str>,
        _: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let mut next = self.clone();
        let count = next.queue.dismiss(message_id);
        self.letters(next, count, AuditAction::NotificationEndpointsDismiss, message_id, reason)
    }

    fn letters(
        &self,
        next: Self,
        count: u32,
        action: AuditAction,
        message_id: Option<Uuid>,
        reason: Option<&str>,
    ) -> Result<Transition<Self>, Rejection> {
        if count == 0 && message_id.is_some() {
            return Err(Rejection::NoSuchLetter);
        }
        let reply = Reply::Letters { count, endpoint: Box::new(next.clone()) };
        if count == 0 {
            return Ok(Transition::stay(reply));
        }
        let audit = self.audit(action, &json!({ "message_id": message_id, "count": count, "reason": reason }));
        Ok(Transition::to(next, reply, format!("{count} dead letters were settled")).audit(audit))
    }

    fn resealed(&self, rewrapped: String, is_former: bool) -> Transition<Self> {
        let mut next = self.clone();
        let sealed = match is_former {
            true => next.former_secret.as_mut().map(|former| &mut former.secret_enc),
            false => next.secret_enc.as_mut(),
        };
        let Some(sealed) = sealed else { return Transition::stay(Reply::Done) };
        *sealed = rewrapped;
        Transition::to(next, Reply::Done, "the key at rest was rotated")
    }

    #[must_use]
    pub const fn is_enabled(&self) -> bool {
        matches!(self.phase, Phase::Active)
    }

    fn shown(&self) -> Reply {
        Reply::Shown { endpoint: Box::new(self.clone()) }
    }

    fn audit(&self, action: AuditAction, more: &Value) -> AuditRecord {
        let (kind, host) = match &self.target {
            Target::Webhook { url } => ("webhook", url.split('/').nth(2).unwrap_or_default()),
            Target::Email { .. } => ("email", ""),
        };
        // A URL may hold a secret in its path, and an address is personal data.
        let mut metadata = json!({ "holder": self.holder.to_string(), "kind": kind, "host": host });
        if let (Some(metadata), Some(more)) = (metadata.as_object_mut(), more.as_object()) {
            metadata.extend(more.clone());
        }
        AuditRecord::new(action, EntityRef { kind: EntityKind::NotificationEndpoint, id: self.id.0 }, metadata)
    }
}
