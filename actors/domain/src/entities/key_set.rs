//! The keys of one purpose, and the state of each in its rotation (design 8; decisions 4, *Tasks*).
//!
//! ```text
//! staged ──activate──▶ active ──the activation of the next──▶ grace ──retire──▶ retired
//!    └──────────────────────────────retire──────────────────────────────────────▶
//! ```
//!
//! A staged key is trusted everywhere before anything depends on it; a key in grace is trusted until nothing depends on it any more. Only
//! the public parts are here: the private parts are stored sealed beside, generated and opened at the edge. Where no key was ever rotated
//! there is no such entity, and the one key that was generated with the cluster is active, in version 0.

use crate::explanation::{Explanation, RejectionCode};
pub use crate::key_purpose::KeySetPurpose;

use crate::audit::{AuditAction, AuditRecord};
use crate::authz::Action;
use crate::event::Event;
use crate::id::{EntityKind, EntityRef, KeySetId};
use crate::policy::{self, Scopes};
use crate::state_machine::{
    self, Deadline, Effect, IndexKeys, Machine, TickOnly, Timestamp, Transition, TransitionContext,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The bound of retired keys in the set.
const MAX_RETIRED: usize = 8;
/// The bound of links in the chain: an agent that missed more rotations must enroll again.
const MAX_LINKS: usize = 512;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeySet {
    pub purpose: KeySetPurpose,
    /// Rises with every change of the trusted keys; 0 is the version that the cluster began with.
    pub version: u64,
    /// In the order of their creation, with the retired ones.
    pub keys: Vec<KeyEntry>,
    /// The trusted keys of each version since the first, signed by keys of the version before: an agent that missed rotations follows it.
    pub chain: Vec<TrustLink>,
}

/// The public part of a key and its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyEntry {
    pub id: String,
    /// A public key or a certificate, in text.
    pub public: String,
    #[serde(rename = "standing")]
    pub state: KeyState,
    pub made_at: Timestamp,
    pub entered_at: Timestamp,
}

/// The state of a key in its rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub enum KeyState {
    /// Trusted, and not used yet; overdue from `until` on.
    Staged {
        until: Timestamp,
    },
    Active,
    /// Trusted, and used only for verifiers that do not know a newer key; from `until` on it waits for its retirement.
    Grace {
        until: Timestamp,
    },
    Retired,
}

/// The phase of a [`KeyState`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Staged,
    Active,
    Grace,
    Retired,
}

impl Phase {
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl KeyState {
    #[must_use]
    pub const fn phase(self) -> Phase {
        match self {
            Self::Staged { .. } => Phase::Staged,
            Self::Active => Phase::Active,
            Self::Grace { .. } => Phase::Grace,
            Self::Retired => Phase::Retired,
        }
    }
}

/// The trusted keys of one version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrustLink {
    pub version: u64,
    pub keys: Vec<TrustedKey>,
    /// By keys of the version before.
    pub signatures: Vec<KeySetSignature>,
}

/// A trusted key as it is published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrustedKey {
    pub id: String,
    pub public: String,
    pub phase: Phase,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeySetSignature {
    pub by: String,
    /// Base64.
    pub value: String,
}

/// A new key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewKey {
    pub id: String,
    pub public: String,
}

/// A change of the set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "change", rename_all = "snake_case")]
pub enum KeySetChange {
    Stage {
        key: NewKey,
    },
    Activate {
        id: String,
    },
    /// `dependents`: how many entities depend on this key alone, as counted just before. `force`: they are cut off.
    Retire {
        id: String,
        dependents: u64,
        force: bool,
    },
}

/// The version that a change was prepared for, and the signatures of its outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeBasis {
    pub purpose: KeySetPurpose,
    pub version: u64,
    /// The key that the cluster began with, where no key was rotated yet.
    pub founding: NewKey,
    pub founded_at: Timestamp,
    pub signatures: Vec<KeySetSignature>,
}

/// The commands of a key set.
pub type Command = state_machine::AnyCommand<Request, state_machine::NoCommand, Fact>;

state_machine::impl_command_from!(Request, Fact);

/// What operators ask of a key set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Request {
    Rotate {
        change: KeySetChange,
        on: ChangeBasis,
        reason: String,
    },
    /// From now on this key of the key ring seals; what is sealed under the others is to be resealed.
    Adopt {
        id: String,
        outgoing: Vec<String>,
        reason: String,
    },
}

impl state_machine::Request for Request {
    fn action(&self) -> Action {
        match self {
            Self::Rotate { .. } | Self::Adopt { .. } => Action::RotateKeys,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Rotate { change: KeySetChange::Stage { .. }, .. } => "stage",
            Self::Rotate { change: KeySetChange::Activate { .. }, .. } => "activate",
            Self::Rotate { change: KeySetChange::Retire { .. }, .. } => "retire",
            Self::Adopt { .. } => "adopt",
        }
    }
}

/// What the worker that reseals reports to a key set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Fact {
    /// No value is sealed under the key any more.
    Emptied { id: String },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// The version of the set after the command, and the key that changed.
    At {
        version: u64,
        id: String,
    },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("there is no key {id}")]
    NotFound { id: String },
    #[error("key {id} was in the set before")]
    Exists { id: String },
    #[error("key {id} is staged already")]
    AlreadyStaged { id: String },
    #[error("key {id} is {phase:?}")]
    WrongPhase { id: String, phase: Phase },
    #[error("key {id} is the active one")]
    StillActive { id: String },
    #[error("key {id} may be needed until {until}")]
    InGrace { id: String, until: Timestamp },
    #[error("{dependents} need key {id} and no other")]
    InUse { id: String, dependents: u64 },
    #[error("the set has changed since this was prepared")]
    Moved,
    #[error("keys of this purpose do not rotate this way")]
    OtherPurpose,
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotFound { id } => Explanation::new(
                RejectionCode::NotFound,
                format!(
                    "There is no key {id} of this purpose; GET /api/v1/admin/keys lists those there \
                 are."
                ),
            ),
            Self::AlreadyStaged { id } => {
                Explanation::conflict(format!("Key {id} is staged already; activate it, or retire it first."))
                    .detail("key_id", id)
            }
            Self::WrongPhase { id, phase } => {
                let way = match phase {
                    Phase::Staged => "activate it first",
                    Phase::Active => "it is in use; to replace it, stage another and activate that one",
                    Phase::Grace => "it was replaced; stage a new one",
                    Phase::Retired => "that is its end; stage a new one",
                };
                Explanation::conflict(format!("Key {id} is {}: {way}.", phase.name()))
                    .detail("key_id", id)
                    .detail("phase", phase.name())
            }
            Self::StillActive { id } => Explanation::conflict(format!(
                "Key {id} is the active one; stage another, activate that one, and then retire this \
                 one."
            ))
            .detail("key_id", id),
            Self::InGrace { id, until } => Explanation::conflict(format!(
                "What key {id} signed may be in use until {until}; retire it then, or by force \
                 (\"force\": true) where the key has leaked."
            ))
            .detail("key_id", id)
            .detail("until", json!(until)),
            Self::InUse { id, dependents } => Explanation::conflict(format!(
                "{dependents} nodes have certificates by authority {id} alone; wait until they have \
                 renewed, or retire it by force (\"force\": true): those nodes have to recover or to be \
                 enrolled again."
            ))
            .detail("key_id", id)
            .detail("dependents", dependents),
            Self::Moved => Explanation::temporary("Another request rotates these keys at this moment; ask again."),
            Self::OtherPurpose => Explanation::invalid(
                "Keys of this purpose do not rotate this way: those at rest are in the key ring file, and `rewrap` seals everything \
                 with the active one."
                    .to_owned(),
                "purpose",
            ),
            rejection @ Self::Exists { .. } => Explanation::unexpected(&rejection),
        }
    }
}

impl Machine for KeySet {
    const KIND: EntityKind = EntityKind::KeySet;
    /// The chain of 512 task key versions.
    const SNAPSHOT_MOST: usize = 512 * 1024;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match command {
            Command::Request(Request::Rotate { change, on, reason }) => {
                let founded = Self::founded(on.purpose, on.founding, on.founded_at);
                state.unwrap_or(&founded).rotate(&change, on.version, on.signatures, &reason, ctx)
            }
            Command::Request(Request::Adopt { id, outgoing, reason }) => {
                let empty = Self { purpose: KeySetPurpose::AtRest, version: 0, keys: Vec::new(), chain: Vec::new() };
                state.unwrap_or(&empty).adopt(&id, &outgoing, &reason, ctx)
            }
            Command::Fact(Fact::Emptied { id }) => match state {
                Some(set) if set.purpose == KeySetPurpose::AtRest => Ok(set.emptied(&id, ctx)),
                Some(_) | None => Err(Rejection::OtherPurpose),
            },
            Command::Maintenance(TickOnly::Tick) => Ok(Transition::stay(Reply::Done)),
        }
    }

    fn state(&self) -> &'static str {
        if self.waiting().next().is_some() { "rotating" } else { "settled" }
    }

    fn deadline(&self) -> Option<Deadline> {
        let (key, until) = self.waiting().min_by_key(|(_, until)| *until)?;
        let (purpose, id) = (self.purpose, &key.id);
        let what = match key.state.phase() {
            Phase::Staged => "is staged and waits for its activation",
            Phase::Active | Phase::Grace | Phase::Retired => "is in grace and waits to be retired",
        };
        Some(Deadline::new(until, format!("{purpose}: key {id} {what}")))
    }

    fn keys(&self) -> IndexKeys {
        IndexKeys { unique_name: Some(self.purpose.name().to_owned()), ..IndexKeys::default() }
    }
}

impl KeySet {
    /// The set that a cluster begins with.
    #[must_use]
    pub fn founded(purpose: KeySetPurpose, key: NewKey, at: Timestamp) -> Self {
        let key = KeyEntry { id: key.id, public: key.public, state: KeyState::Active, made_at: at, entered_at: at };
        Self { purpose, version: 0, keys: vec![key], chain: Vec::new() }
    }

    #[must_use]
    pub fn key(&self, id: &str) -> Option<&KeyEntry> {
        self.keys.iter().find(|key| key.id == id)
    }

    /// The keys that are not retired, as they are published.
    #[must_use]
    pub fn listed(&self) -> Vec<TrustedKey> {
        let listed =
            |key: &KeyEntry| TrustedKey { id: key.id.clone(), public: key.public.clone(), phase: key.state.phase() };
        self.keys.iter().map(listed).filter(|listed| listed.phase != Phase::Retired).collect()
    }

    /// The keys that would be published after `change`: the caller that prepares it has to sign them.
    ///
    /// As the change itself would be refused, whether or not anything depends on the key.
    pub fn listed_after(&self, change: &KeySetChange) -> Result<Vec<TrustedKey>, Rejection> {
        let (staged, grace) = (Timestamp::MAX_UTC, Timestamp::MAX_UTC);
        Ok(self.changed(change, Timestamp::UNIX_EPOCH, staged, grace)?.listed())
    }

    fn waiting(&self) -> impl Iterator<Item = (&KeyEntry, Timestamp)> {
        self.keys.iter().filter_map(|key| match key.state {
            KeyState::Staged { until } | KeyState::Grace { until } => Some((key, until)),
            KeyState::Active | KeyState::Retired => None,
        })
    }

    fn rotate(
        &self,
        change: &KeySetChange,
        version: u64,
        signatures: Vec<KeySetSignature>,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if self.purpose == KeySetPurpose::AtRest {
            return Err(Rejection::OtherPurpose);
        }
        if version != self.version {
            return Err(Rejection::Moved);
        }
        if let KeySetChange::Retire { id, dependents, force: false } = change {
            self.is_free(id, *dependents, ctx.now)?;
        }
        let staged_until = ctx.now + seconds(policy::PolicyKey::KeysRotationOverdue, ctx);
        let grace_until = ctx.now + self.grace(ctx);
        let mut next = self.changed(change, ctx.now, staged_until, grace_until)?;
        next.chain.push(TrustLink { version: next.version, keys: next.listed(), signatures });
        let surplus = next.chain.len().saturating_sub(MAX_LINKS);
        next.chain.drain(..surplus);
        let (action, id, forced, cut_off) = match change {
            KeySetChange::Stage { key } => (AuditAction::KeysStage, &key.id, false, 0),
            KeySetChange::Activate { id } => (AuditAction::KeysActivate, id, false, 0),
            KeySetChange::Retire { id, dependents, force } => (AuditAction::KeysRetire, id, *force, *dependents),
        };
        let metadata = json!({
            "purpose": self.purpose, "key_id": id, "version": next.version, "reason": reason, "forced": forced,
            "cut_off": cut_off,
        });
        Ok(next.published(action, id, metadata, reason, ctx))
    }

    /// How long a formerly active key is needed: until the last task that it signed, the last certificate or the last token has ended.
    fn grace(&self, ctx: &TransitionContext<'_>) -> chrono::TimeDelta {
        match self.purpose {
            KeySetPurpose::TaskSigning => seconds(policy::PolicyKey::KeysTaskGrace, ctx),
            KeySetPurpose::NodeCa => seconds(policy::PolicyKey::NodeCertificateTtl, ctx),
            // As long as any token can live: the lifetimes of issued tokens are not stored.
            KeySetPurpose::ServiceTokens => policy::PolicyKey::AuthServiceAccountTokenTtl.longest(),
            // A message is accepted for less than that (`supervisors::cluster::authentication`).
            KeySetPurpose::MemberMessages => chrono::TimeDelta::hours(24),
            KeySetPurpose::AtRest => seconds(policy::PolicyKey::KeysRotationOverdue, ctx),
        }
    }

    /// Whether signatures of these keys are valid for a time alone, because there is no list of what they signed.
    const fn signs(&self) -> bool {
        match self.purpose {
            KeySetPurpose::TaskSigning | KeySetPurpose::ServiceTokens | KeySetPurpose::MemberMessages => true,
            KeySetPurpose::NodeCa | KeySetPurpose::AtRest => false,
        }
    }

    fn is_free(&self, id: &str, dependents: u64, now: Timestamp) -> Result<(), Rejection> {
        match self.key(id).map(|key| key.state) {
            Some(KeyState::Grace { until }) if self.signs() && now < until => {
                Err(Rejection::InGrace { id: id.to_owned(), until })
            }
            Some(_) if dependents > 0 => Err(Rejection::InUse { id: id.to_owned(), dependents }),
            Some(_) | None => Ok(()),
        }
    }

    fn changed(
        &self,
        change: &KeySetChange,
        now: Timestamp,
        staged_until: Timestamp,
        grace_until: Timestamp,
    ) -> Result<Self, Rejection> {
        let mut next = Self { version: self.version + 1, ..self.clone() };
        match change {
            KeySetChange::Stage { key } => {
                if self.key(&key.id).is_some() {
                    return Err(Rejection::Exists { id: key.id.clone() });
                }
                if let Some(staged) = self.keys.iter().find(|key| key.state.phase() == Phase::Staged) {
                    return Err(Rejection::AlreadyStaged { id: staged.id.clone() });
                }
                let state = KeyState::Staged { until: staged_until };
                let (id, public) = (key.id.clone(), key.public.clone());
                next.keys.push(KeyEntry { id, public, state, made_at: now, entered_at: now });
            }
            KeySetChange::Activate { id } => {
                self.in_phase(id, &[Phase::Staged])?;
                next.activate(id, now, grace_until);
            }
            KeySetChange::Retire { id, .. } => {
                if self.in_phase(id, &[Phase::Staged, Phase::Grace, Phase::Active])? == Phase::Active {
                    return Err(Rejection::StillActive { id: id.clone() });
                }
                next.enter(id, KeyState::Retired, now);
            }
        }
        next.forget_oldest();
        Ok(next)
    }

    fn in_phase(&self, id: &str, allowed: &[Phase]) -> Result<Phase, Rejection> {
        let key = self.key(id).ok_or_else(|| Rejection::NotFound { id: id.to_owned() })?;
        let phase = key.state.phase();
        if allowed.contains(&phase) { Ok(phase) } else { Err(Rejection::WrongPhase { id: id.to_owned(), phase }) }
    }

    fn activate(&mut self, id: &str, now: Timestamp, grace_until: Timestamp) {
        for key in &mut self.keys {
            if key.state == KeyState::Active {
                (key.state, key.entered_at) = (KeyState::Grace { until: grace_until }, now);
            }
        }
        self.enter(id, KeyState::Active, now);
    }

    fn enter(&mut self, id: &str, state: KeyState, now: Timestamp) {
        for key in self.keys.iter_mut().filter(|key| key.id == id) {
            (key.state, key.entered_at) = (state, now);
        }
    }

    fn forget_oldest(&mut self) {
        let retired = |key: &KeyEntry| key.state == KeyState::Retired;
        while self.keys.iter().filter(|key| retired(key)).count() > MAX_RETIRED {
            let oldest =
                self.keys.iter().enumerate().filter(|(_, key)| retired(key)).min_by_key(|(_, key)| key.entered_at);
            let Some(at) = oldest.map(|(at, _)| at) else { return };
            self.keys.remove(at);
        }
    }

    fn adopt(
        &self,
        id: &str,
        outgoing: &[String],
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if self.purpose != KeySetPurpose::AtRest {
            return Err(Rejection::OtherPurpose);
        }
        let (mut next, until) = (self.clone(), ctx.now + self.grace(ctx));
        let mut known = |id: &str, state| {
            if next.key(id).is_none() {
                let (id, public) = (id.to_owned(), String::new());
                next.keys.push(KeyEntry { id, public, state, made_at: ctx.now, entered_at: ctx.now });
            }
        };
        known(id, KeyState::Retired);
        outgoing.iter().filter(|other| *other != id).for_each(|other| known(other, KeyState::Retired));
        for other in outgoing.iter().filter(|other| *other != id) {
            // A key that is in use again, from a backup or an old ring, has to be emptied again.
            if next.key(other).is_some_and(|key| key.state == KeyState::Retired) {
                next.enter(other, KeyState::Grace { until }, ctx.now);
            }
        }
        if next.key(id).is_some_and(|key| key.state != KeyState::Active) {
            next.activate(id, ctx.now, until);
        }
        next.forget_oldest();
        if next == *self {
            return Ok(Transition::stay(next.reply(id)));
        }
        next.version += 1;
        let metadata = json!({ "purpose": self.purpose, "key_id": id, "outgoing": outgoing, "reason": reason });
        Ok(next.published(AuditAction::KeysActivate, id, metadata, reason, ctx))
    }

    fn emptied(&self, id: &str, ctx: &TransitionContext<'_>) -> Transition<Self> {
        if self.key(id).is_none_or(|key| key.state.phase() != Phase::Grace) {
            return Transition::stay(self.reply(id));
        }
        let mut next = Self { version: self.version + 1, ..self.clone() };
        next.enter(id, KeyState::Retired, ctx.now);
        next.forget_oldest();
        let metadata = json!({ "purpose": self.purpose, "key_id": id, "version": next.version });
        next.published(AuditAction::KeysRetire, id, metadata, "nothing is sealed under it any more", ctx)
    }

    fn published(
        self,
        action: AuditAction,
        id: &str,
        metadata: serde_json::Value,
        why: &str,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let audit = AuditRecord::new(action, EntityRef { kind: EntityKind::KeySet, id: ctx.id }, metadata);
        let event = Event::TrustChanged { set_id: KeySetId(ctx.id), purpose: self.purpose, version: self.version };
        let reply = self.reply(id);
        Transition::to(self, reply, why).audit(audit).event(event).effect(Effect::ReadKeys)
    }

    fn reply(&self, id: &str) -> Reply {
        Reply::At { version: self.version, id: id.to_owned() }
    }
}

fn seconds(key: policy::PolicyKey, ctx: &TransitionContext<'_>) -> chrono::TimeDelta {
    ctx.policy.seconds(key, &Scopes::global(), ctx.now)
}

#[cfg(test)]
mod tests;
