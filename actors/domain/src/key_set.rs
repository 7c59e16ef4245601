//! The keys of one purpose, and where each of them stands in its rotation (design 8; decisions 4, *Tasks*).
//!
//! ```text
//! staged ──activate──▶ active ──the activation of the next──▶ grace ──retire──▶ retired
//!    └──────────────────────────────retire──────────────────────────────────────▶
//! ```
//!
//! What is staged is trusted everywhere before anything depends on it; what is in grace is trusted until nothing depends on it any
//! more. Only the halves that may be known are here: the private ones lie sealed beside, made and opened at the edge. Where no key was
//! ever rotated there is no such entity, and the one key that was made with the cluster is active, in version 0.

use crate::audit::{Audit, AuditAction};
use crate::authz::Action;
use crate::event::Event;
use crate::id::{EntityRef, KeySetId, Kind};
use crate::machine::{self, Ctx, Deadline, Effect, Keys, Machine, Step, Timestamp};
use crate::policy::{self, Scopes};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fmt;

/// Retired keys that are remembered.
const REMEMBERED: usize = 8;
/// Links of the chain that are kept: whoever slept through more rotations than these are has to be enrolled anew.
const LINKS: usize = 512;

/// What the keys are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// They sign what agents execute.
    TaskSigning,
    /// They certify nodes.
    NodeCa,
    /// They sign the access tokens of service accounts.
    ServiceTokens,
    /// They authenticate what the members send each other.
    MemberMessages,
    /// They seal what must be readable again; the keys themselves are in the operator's key ring alone.
    AtRest,
}

impl Purpose {
    pub const ALL: [Self; 5] =
        [Self::TaskSigning, Self::NodeCa, Self::ServiceTokens, Self::MemberMessages, Self::AtRest];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::TaskSigning => "task_signing",
            Self::NodeCa => "node_ca",
            Self::ServiceTokens => "service_tokens",
            Self::MemberMessages => "member_messages",
            Self::AtRest => "at_rest",
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeySet {
    pub purpose: Purpose,
    /// Rises with every change of what is trusted; 0 is what the cluster began with.
    pub version: u64,
    /// In the order in which they came, the retired ones among them.
    pub keys: Vec<Key>,
    /// What was trusted in each version since the first, signed by the one before: the way back for whoever slept.
    pub chain: Vec<Link>,
}

/// A key, as far as it may be known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    pub id: String,
    /// A public key or a certificate, in text.
    pub public: String,
    pub standing: Standing,
    pub made_at: Timestamp,
    pub entered_at: Timestamp,
}

/// Where a key stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub enum Standing {
    /// Trusted, and not used yet; overdue from `until` on.
    Staged {
        until: Timestamp,
    },
    Active,
    /// Trusted, and used no more but for those who know no other; from `until` on it waits for its end.
    Grace {
        until: Timestamp,
    },
    Retired,
}

/// A [`Standing`] in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
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
        match self {
            Self::Staged => "staged",
            Self::Active => "active",
            Self::Grace => "grace",
            Self::Retired => "retired",
        }
    }
}

impl Standing {
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

/// What was trusted in one version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    pub version: u64,
    pub keys: Vec<Listed>,
    /// By keys of the version before.
    pub signatures: Vec<Signature>,
}

/// A trusted key as it is published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    pub id: String,
    pub public: String,
    pub phase: Phase,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    pub by: String,
    /// Base64.
    pub value: String,
}

/// A key that comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewKey {
    pub id: String,
    pub public: String,
}

/// What is to become of the set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "change", rename_all = "snake_case")]
pub enum Change {
    Stage {
        key: NewKey,
    },
    Activate {
        id: String,
    },
    /// `dependents`: how many need the key and no other, as counted just before. `force`: whoever does is cut off.
    Retire {
        id: String,
        dependents: u64,
        force: bool,
    },
}

/// What a change was prepared on, and the signatures that were made for what comes of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Basis {
    pub purpose: Purpose,
    pub version: u64,
    /// The key that the cluster began with, where no other ever came.
    pub founding: NewKey,
    pub founded_at: Timestamp,
    pub signatures: Vec<Signature>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    Rotate {
        change: Change,
        on: Basis,
        reason: String,
    },
    /// From here on this key of the key ring seals; what is sealed under the others is to be sealed anew.
    Adopt {
        id: String,
        outgoing: Vec<String>,
        reason: String,
    },
    /// Nothing is sealed under the key any more.
    Emptied {
        id: String,
    },
    Tick,
}

impl machine::Command for Command {
    fn name(&self) -> &'static str {
        match self {
            Self::Rotate { change: Change::Stage { .. }, .. } => "stage",
            Self::Rotate { change: Change::Activate { .. }, .. } => "activate",
            Self::Rotate { change: Change::Retire { .. }, .. } => "retire",
            Self::Adopt { .. } => "adopt",
            Self::Emptied { .. } => "emptied",
            Self::Tick => "tick",
        }
    }

    fn action(&self) -> Action {
        match self {
            Self::Rotate { .. } | Self::Adopt { .. } => Action::RotateKeys,
            Self::Emptied { .. } | Self::Tick => Action::Advance,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// The version that the set is in after the command, and the key that moved.
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
    #[error("key {id} was here before")]
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
    #[error("keys of this purpose are not rotated so")]
    OtherPurpose,
}

impl Machine for KeySet {
    const KIND: Kind = Kind::KeySet;
    /// The chain of 512 task key versions.
    const SNAPSHOT_MOST: usize = 512 * 1024;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(state: Option<&Self>, command: Command, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match command {
            Command::Rotate { change, on, reason } => {
                let founded = Self::founded(on.purpose, on.founding, on.founded_at);
                state.unwrap_or(&founded).rotate(&change, on.version, on.signatures, &reason, ctx)
            }
            Command::Adopt { id, outgoing, reason } => {
                let empty = Self { purpose: Purpose::AtRest, version: 0, keys: Vec::new(), chain: Vec::new() };
                state.unwrap_or(&empty).adopt(&id, &outgoing, &reason, ctx)
            }
            Command::Emptied { id } => match state {
                Some(set) if set.purpose == Purpose::AtRest => Ok(set.emptied(&id, ctx)),
                Some(_) | None => Err(Rejection::OtherPurpose),
            },
            Command::Tick => Ok(Step::stay(Reply::Done)),
        }
    }

    fn state(&self) -> &'static str {
        if self.waiting().next().is_some() { "rotating" } else { "settled" }
    }

    fn deadline(&self) -> Option<Deadline> {
        let (key, until) = self.waiting().min_by_key(|(_, until)| *until)?;
        let (purpose, id) = (self.purpose, &key.id);
        let what = match key.standing.phase() {
            Phase::Staged => "is staged and waits for its activation",
            Phase::Active | Phase::Grace | Phase::Retired => "is in grace and waits to be retired",
        };
        Some(Deadline::new(until, format!("{purpose}: key {id} {what}")))
    }

    fn keys(&self) -> Keys {
        Keys { unique_name: Some(self.purpose.name().to_owned()), ..Keys::default() }
    }

    fn tick() -> Command {
        Command::Tick
    }
}

impl KeySet {
    /// The set that a cluster begins with.
    #[must_use]
    pub fn founded(purpose: Purpose, key: NewKey, at: Timestamp) -> Self {
        let key = Key { id: key.id, public: key.public, standing: Standing::Active, made_at: at, entered_at: at };
        Self { purpose, version: 0, keys: vec![key], chain: Vec::new() }
    }

    #[must_use]
    pub fn key(&self, id: &str) -> Option<&Key> {
        self.keys.iter().find(|key| key.id == id)
    }

    /// The keys that count, as they are published.
    #[must_use]
    pub fn listed(&self) -> Vec<Listed> {
        let listed = |key: &Key| Listed { id: key.id.clone(), public: key.public.clone(), phase: key.standing.phase() };
        self.keys.iter().map(listed).filter(|listed| listed.phase != Phase::Retired).collect()
    }

    /// What would be published after `change`: what whoever prepares it has to sign.
    ///
    /// # Errors
    /// As the change itself would be refused, whatever depends on the key.
    pub fn listed_after(&self, change: &Change) -> Result<Vec<Listed>, Rejection> {
        let (staged, grace) = (Timestamp::MAX_UTC, Timestamp::MAX_UTC);
        Ok(self.changed(change, Timestamp::UNIX_EPOCH, staged, grace)?.listed())
    }

    fn waiting(&self) -> impl Iterator<Item = (&Key, Timestamp)> {
        self.keys.iter().filter_map(|key| match key.standing {
            Standing::Staged { until } | Standing::Grace { until } => Some((key, until)),
            Standing::Active | Standing::Retired => None,
        })
    }

    fn rotate(
        &self,
        change: &Change,
        version: u64,
        signatures: Vec<Signature>,
        reason: &str,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        if self.purpose == Purpose::AtRest {
            return Err(Rejection::OtherPurpose);
        }
        if version != self.version {
            return Err(Rejection::Moved);
        }
        if let Change::Retire { id, dependents, force: false } = change {
            self.is_free(id, *dependents, ctx.now)?;
        }
        let staged_until = ctx.now + seconds(policy::Key::KeysRotationOverdue, ctx);
        let grace_until = ctx.now + self.grace(ctx);
        let mut next = self.changed(change, ctx.now, staged_until, grace_until)?;
        next.chain.push(Link { version: next.version, keys: next.listed(), signatures });
        let surplus = next.chain.len().saturating_sub(LINKS);
        next.chain.drain(..surplus);
        let (action, id, forced, cut_off) = match change {
            Change::Stage { key } => (AuditAction::KeysStage, &key.id, false, 0),
            Change::Activate { id } => (AuditAction::KeysActivate, id, false, 0),
            Change::Retire { id, dependents, force } => (AuditAction::KeysRetire, id, *force, *dependents),
        };
        let metadata = json!({
            "purpose": self.purpose, "key_id": id, "version": next.version, "reason": reason, "forced": forced,
            "cut_off": cut_off,
        });
        Ok(next.told(action, id, metadata, reason, ctx))
    }

    /// How long a key that was active is needed: until the last task that it signed has ended, the last certificate, or the last token.
    fn grace(&self, ctx: &Ctx<'_>) -> chrono::TimeDelta {
        match self.purpose {
            Purpose::TaskSigning => seconds(policy::Key::KeysTaskGrace, ctx),
            Purpose::NodeCa => seconds(policy::Key::NodeCertificateTtl, ctx),
            // As long as any token can live: how long those lived that were issued is nobody's memory.
            Purpose::ServiceTokens => policy::Key::AuthServiceAccountTokenTtl.longest(),
            // An event is believed for less than that (`supervisors::cluster::authentication`).
            Purpose::MemberMessages => chrono::TimeDelta::hours(24),
            Purpose::AtRest => seconds(policy::Key::KeysRotationOverdue, ctx),
        }
    }

    /// Whether what these keys have signed is believed for its time alone, since nobody keeps a list of it.
    const fn signs(&self) -> bool {
        match self.purpose {
            Purpose::TaskSigning | Purpose::ServiceTokens | Purpose::MemberMessages => true,
            Purpose::NodeCa | Purpose::AtRest => false,
        }
    }

    fn is_free(&self, id: &str, dependents: u64, now: Timestamp) -> Result<(), Rejection> {
        match self.key(id).map(|key| key.standing) {
            Some(Standing::Grace { until }) if self.signs() && now < until => {
                Err(Rejection::InGrace { id: id.to_owned(), until })
            }
            Some(_) if dependents > 0 => Err(Rejection::InUse { id: id.to_owned(), dependents }),
            Some(_) | None => Ok(()),
        }
    }

    fn changed(
        &self,
        change: &Change,
        now: Timestamp,
        staged_until: Timestamp,
        grace_until: Timestamp,
    ) -> Result<Self, Rejection> {
        let mut next = Self { version: self.version + 1, ..self.clone() };
        match change {
            Change::Stage { key } => {
                if self.key(&key.id).is_some() {
                    return Err(Rejection::Exists { id: key.id.clone() });
                }
                if let Some(staged) = self.keys.iter().find(|key| key.standing.phase() == Phase::Staged) {
                    return Err(Rejection::AlreadyStaged { id: staged.id.clone() });
                }
                let standing = Standing::Staged { until: staged_until };
                let (id, public) = (key.id.clone(), key.public.clone());
                next.keys.push(Key { id, public, standing, made_at: now, entered_at: now });
            }
            Change::Activate { id } => {
                self.in_phase(id, &[Phase::Staged])?;
                next.activate(id, now, grace_until);
            }
            Change::Retire { id, .. } => {
                if self.in_phase(id, &[Phase::Staged, Phase::Grace, Phase::Active])? == Phase::Active {
                    return Err(Rejection::StillActive { id: id.clone() });
                }
                next.enter(id, Standing::Retired, now);
            }
        }
        next.forget_the_oldest();
        Ok(next)
    }

    fn in_phase(&self, id: &str, allowed: &[Phase]) -> Result<Phase, Rejection> {
        let key = self.key(id).ok_or_else(|| Rejection::NotFound { id: id.to_owned() })?;
        let phase = key.standing.phase();
        if allowed.contains(&phase) { Ok(phase) } else { Err(Rejection::WrongPhase { id: id.to_owned(), phase }) }
    }

    fn activate(&mut self, id: &str, now: Timestamp, grace_until: Timestamp) {
        for key in &mut self.keys {
            if key.standing == Standing::Active {
                (key.standing, key.entered_at) = (Standing::Grace { until: grace_until }, now);
            }
        }
        self.enter(id, Standing::Active, now);
    }

    fn enter(&mut self, id: &str, standing: Standing, now: Timestamp) {
        for key in self.keys.iter_mut().filter(|key| key.id == id) {
            (key.standing, key.entered_at) = (standing, now);
        }
    }

    fn forget_the_oldest(&mut self) {
        let retired = |key: &Key| key.standing == Standing::Retired;
        while self.keys.iter().filter(|key| retired(key)).count() > REMEMBERED {
            let oldest =
                self.keys.iter().enumerate().filter(|(_, key)| retired(key)).min_by_key(|(_, key)| key.entered_at);
            let Some(at) = oldest.map(|(at, _)| at) else { return };
            self.keys.remove(at);
        }
    }

    fn adopt(&self, id: &str, outgoing: &[String], reason: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        if self.purpose != Purpose::AtRest {
            return Err(Rejection::OtherPurpose);
        }
        let (mut next, until) = (self.clone(), ctx.now + self.grace(ctx));
        let mut known = |id: &str, standing| {
            if next.key(id).is_none() {
                let (id, public) = (id.to_owned(), String::new());
                next.keys.push(Key { id, public, standing, made_at: ctx.now, entered_at: ctx.now });
            }
        };
        known(id, Standing::Retired);
        outgoing.iter().filter(|other| *other != id).for_each(|other| known(other, Standing::Retired));
        for other in outgoing.iter().filter(|other| *other != id) {
            // One that is in use again, from a backup or an old ring, has to be emptied again.
            if next.key(other).is_some_and(|key| key.standing == Standing::Retired) {
                next.enter(other, Standing::Grace { until }, ctx.now);
            }
        }
        if next.key(id).is_some_and(|key| key.standing != Standing::Active) {
            next.activate(id, ctx.now, until);
        }
        next.forget_the_oldest();
        if next == *self {
            return Ok(Step::stay(next.reply(id)));
        }
        next.version += 1;
        let metadata = json!({ "purpose": self.purpose, "key_id": id, "outgoing": outgoing, "reason": reason });
        Ok(next.told(AuditAction::KeysActivate, id, metadata, reason, ctx))
    }

    fn emptied(&self, id: &str, ctx: &Ctx<'_>) -> Step<Self> {
        if self.key(id).is_none_or(|key| key.standing.phase() != Phase::Grace) {
            return Step::stay(self.reply(id));
        }
        let mut next = Self { version: self.version + 1, ..self.clone() };
        next.enter(id, Standing::Retired, ctx.now);
        next.forget_the_oldest();
        let metadata = json!({ "purpose": self.purpose, "key_id": id, "version": next.version });
        next.told(AuditAction::KeysRetire, id, metadata, "nothing is sealed under it any more", ctx)
    }

    fn told(self, action: AuditAction, id: &str, metadata: serde_json::Value, why: &str, ctx: &Ctx<'_>) -> Step<Self> {
        let audit = Audit::new(action, EntityRef { kind: Kind::KeySet, id: ctx.id }, metadata);
        let event = Event::TrustChanged { set_id: KeySetId(ctx.id), purpose: self.purpose, version: self.version };
        let reply = self.reply(id);
        Step::to(self, reply, why).audit(audit).event(event).effect(Effect::ReadKeys)
    }

    fn reply(&self, id: &str) -> Reply {
        Reply::At { version: self.version, id: id.to_owned() }
    }
}

fn seconds(key: policy::Key, ctx: &Ctx<'_>) -> chrono::TimeDelta {
    ctx.policy.seconds(key, &Scopes::global(), ctx.now)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
