//! A service account: a program that acts for a user, its owner (specification, *Authentication* 8; decisions 7).
//!
//! It authenticates by keys, of which several are valid at once, so that they can be exchanged without a gap. Its permissions are fixed
//! when it is created: roles that its creator had, in the organization, project and plan of the creator. A deleted one stays as its own
//! tombstone.

use crate::audit::{AuditAction, AuditRecord};
use crate::authz::{Action, CallerIdentity, Principal, ResourceOwner, TokenRole};
use crate::explanation::Explanation;
use crate::history::{HistoryEntry, Invariant};
use crate::id::{EntityKind, EntityRef, ServiceAccountId, ServiceAccountKeyId};
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{self, IndexKeys, Machine, Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceAccount {
    pub id: ServiceAccountId,
    pub name: String,
    /// The user for whom it acts.
    pub owner: ResourceOwner,
    pub roles: BTreeSet<TokenRole>,
    /// The valid keys. A revoked one is removed; the audit log has it.
    pub keys: BTreeMap<ServiceAccountKeyId, AccountKey>,
    pub created_by: String,
    pub created_at: Timestamp,
    pub deleted_at: Option<Timestamp>,
}

/// What is stored of a key: enough to verify it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccountKey {
    pub sha256: [u8; 32],
    pub created_by: String,
    pub created_at: Timestamp,
}

/// A hash that is written into the database makes a valid key: not even hashes are logged.
impl std::fmt::Debug for AccountKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AccountKey").field("created_at", &self.created_at).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// For the caller, with some of the caller's roles.
    Create {
        name: String,
        roles: BTreeSet<TokenRole>,
    },
    AddKey {
        sha256: [u8; 32],
    },
    RevokeKey {
        key: ServiceAccountKeyId,
    },
    Delete,
    Tick,
}

impl state_machine::Command for Command {
    const TICK: Self = Self::Tick;

    fn name(&self) -> &'static str {
        self.into_str()
    }

    fn action(&self) -> Action {
        match self {
            Self::Create { .. } | Self::AddKey { .. } | Self::RevokeKey { .. } | Self::Delete => {
                Action::KeepServiceAccounts
            }
            Self::Tick => Action::Advance,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    Account { account: Box<ServiceAccount> },
    Key { id: ServiceAccountKeyId, created_at: Timestamp },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    /// Also where it belongs to another user.
    #[error("there is no such service account")]
    NotFound,
    #[error("there is no such key")]
    KeyNotFound,
    #[error("the service account exists already")]
    Exists,
    #[error("the creator of a service account must have the roles that it gets")]
    RolesNotHeld,
    #[error("the owner of the service account does not have all of its roles any more")]
    RolesLost,
    #[error("{limit} keys are valid, which is the most; revoke one first")]
    TooManyKeys { limit: i64 },
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotFound => Explanation::not_found("service account"),
            Self::KeyNotFound => Explanation::not_found("key of this service account"),
            Self::Exists => Explanation::conflict("The service account exists already."),
            Self::RolesNotHeld => Explanation::forbidden(
                "A service account gets no role that you do not have yourself; ask for fewer in `roles`.",
            )
            .detail("field", "roles"),
            Self::RolesLost => Explanation::forbidden(
                "The service account has a role that you do not have any more, and gets no further key; delete it, and create one with \
                 roles of yours.",
            ),
            Self::TooManyKeys { limit } => Explanation::conflict(format!(
                "The service account has {limit} keys, which is the most; revoke one that nothing uses."
            ))
            .limited_by(PolicyKey::AuthServiceAccountKeysMax, limit),
        }
    }
}

impl Machine for ServiceAccount {
    const KIND: EntityKind = EntityKind::ServiceAccount;
    const INVARIANTS: &'static [Invariant] = &[Invariant::I6];
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let Some(account) = state else {
            return match command {
                Command::Create { name, roles } => Self::create(name, roles, ctx),
                Command::AddKey { .. } | Command::RevokeKey { .. } | Command::Delete => Err(Rejection::NotFound),
                Command::Tick => Ok(Transition::stay(Reply::Done)),
            };
        };
        match command {
            Command::Create { .. } => Err(Rejection::Exists),
            Command::Tick => Ok(Transition::stay(Reply::Done)),
            Command::AddKey { .. } | Command::RevokeKey { .. } | Command::Delete if !account.is_for(ctx.by) => {
                Err(Rejection::NotFound)
            }
            // A key acts as the owner: an administrator makes none for others.
            Command::AddKey { .. } if !ctx.by.is_user(&account.owner.user_id) => Err(Rejection::NotFound),
            Command::AddKey { sha256 } => account.add_key(sha256, ctx),
            Command::RevokeKey { key } => account.revoke_key(key, ctx),
            Command::Delete => Ok(account.delete(ctx)),
        }
    }

    fn state(&self) -> &'static str {
        if self.is_active() { "active" } else { "deleted" }
    }

    fn keys(&self) -> IndexKeys {
        IndexKeys { owner: Some(self.owner.user_id.to_string()), ..IndexKeys::default() }
    }

    /// A deleted service account has no key that could still authenticate.
    fn violations(&self, _: &[HistoryEntry]) -> Vec<Invariant> {
        Invariant::violated([(Invariant::I6, self.is_active() || self.keys.is_empty())])
    }
}

impl ServiceAccount {
    #[must_use]
    pub const fn is_active(&self) -> bool {
        self.deleted_at.is_none()
    }

    /// True where `who` may see and change it: its owner or an administrator, unless it is deleted.
    #[must_use]
    pub fn is_for(&self, who: &Principal) -> bool {
        self.is_active() && (who.is_user(&self.owner.user_id) || who.is_admin())
    }

    /// The scopes in which its policy values are resolved: its owner's.
    #[must_use]
    pub fn scopes(&self) -> Scopes {
        Scopes::from(&self.owner)
    }

    fn create(
        name: String,
        roles: BTreeSet<TokenRole>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let Principal::Caller(maker) = ctx.by else { return Err(Rejection::RolesNotHeld) };
        if roles.is_empty() || !roles.iter().all(|role| holds(maker, *role)) {
            return Err(Rejection::RolesNotHeld);
        }
        let account = Self {
            id: ServiceAccountId(ctx.id),
            name,
            owner: ResourceOwner::from(maker),
            roles,
            keys: BTreeMap::new(),
            created_by: ctx.by.to_string(),
            created_at: ctx.now,
            deleted_at: None,
        };
        let audit =
            account.audit(AuditAction::ServiceAccountsCreate, &json!({ "name": account.name, "roles": account.roles }));
        let reply = Reply::Account { account: Box::new(account.clone()) };
        Ok(Transition::to(account, reply, "created by its owner").audit(audit))
    }

    fn add_key(&self, sha256: [u8; 32], ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        // A role that the owner has lost at the identity provider is not gained back by a new key.
        let Principal::Caller(owner) = ctx.by else { return Err(Rejection::NotFound) };
        if !self.roles.iter().all(|role| holds(owner, *role)) {
            return Err(Rejection::RolesLost);
        }
        let limit = ctx.policy.int(PolicyKey::AuthServiceAccountKeysMax, &self.scopes(), ctx.now);
        if i64::try_from(self.keys.len()).unwrap_or(i64::MAX) >= limit {
            return Err(Rejection::TooManyKeys { limit });
        }
        let id = ServiceAccountKeyId(ctx.new_id(0));
        let mut next = self.clone();
        next.keys.insert(id, AccountKey { sha256, created_by: ctx.by.to_string(), created_at: ctx.now });
        let audit = self.audit(AuditAction::ServiceAccountsAddKey, &json!({ "key_id": id }));
        Ok(Transition::to(next, Reply::Key { id, created_at: ctx.now }, format!("key {id} was added")).audit(audit))
    }

    fn revoke_key(&self, id: ServiceAccountKeyId, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        let mut next = self.clone();
        let key = next.keys.remove(&id).ok_or(Rejection::KeyNotFound)?;
        let age = (ctx.now - key.created_at).num_seconds();
        let audit = self.audit(AuditAction::ServiceAccountsRevokeKey, &json!({ "key_id": id, "age_seconds": age }));
        Ok(Transition::to(next, Reply::Done, format!("key {id} was revoked")).audit(audit))
    }

    fn delete(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = self.clone();
        let revoked: Vec<_> = std::mem::take(&mut next.keys).into_keys().collect();
        next.deleted_at = Some(ctx.now);
        let audit =
            self.audit(AuditAction::ServiceAccountsDelete, &json!({ "name": self.name, "revoked_key_ids": revoked }));
        Transition::to(next, Reply::Done, "deleted").audit(audit)
    }

    fn audit(&self, action: AuditAction, more: &Value) -> AuditRecord {
        let mut metadata = json!({ "owner_user_id": self.owner.user_id });
        if let (Some(metadata), Some(more)) = (metadata.as_object_mut(), more.as_object()) {
            metadata.extend(more.clone());
        }
        AuditRecord::new(action, EntityRef { kind: EntityKind::ServiceAccount, id: self.id.0 }, metadata)
    }
}

/// An administrator has every permission of a user.
fn holds(maker: &CallerIdentity, role: TokenRole) -> bool {
    maker.roles.contains(&role) || (role == TokenRole::User && maker.roles.contains(&TokenRole::Admin))
}

#[cfg(test)]
mod tests;
