//! A user's public SSH keys, of which one is the default (specification, *SSH key*). The user and administrators may change them.

use super::{Rejection, Reply, Tenant, audit};
use crate::audit::AuditAction;
use crate::authz::Principal;
use crate::event::Event;
use crate::id::SshKeyId;
use crate::policy::{PolicyKey, Scopes};
use crate::ssh_key::AuthorizedKey;
use crate::state_machine::{Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeSet;

/// A public key and its metadata. No private key is ever generated or stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshKey {
    pub id: SshKeyId,
    pub name: String,
    pub key_type: String,
    /// OpenSSH text form, without options.
    pub public_key: String,
    /// OpenSSH `SHA256:` form.
    pub fingerprint: String,
    pub is_default: bool,
    pub created_by: String,
    pub created_at: Timestamp,
}

impl SshKey {
    #[must_use]
    pub fn authorized(&self) -> AuthorizedKey {
        AuthorizedKey { id: self.id, public_key: self.public_key.clone(), fingerprint: self.fingerprint.clone() }
    }
}

/// Why a text is refused as a public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(strum::VariantNames))]
#[cfg_attr(test, strum(serialize_all = "snake_case"))]
#[serde(rename_all = "snake_case")]
pub enum SshKeyFault {
    PrivateKey,
    Weak,
    Options,
    Unreadable,
}

impl Tenant {
    /// Whether this principal may change these keys. Principals that are no callers are not authorized for it (`authz.rs`).
    pub(super) fn may_manage_keys(&self, by: &Principal) -> bool {
        !matches!(by, Principal::Caller(_)) || by.is_user(&self.user_id) || by.is_admin()
    }

    pub(super) fn add_key(
        &self,
        name: String,
        key_type: String,
        public_key: String,
        fingerprint: String,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if let Some(key) = self.keys.values().find(|key| key.fingerprint == fingerprint) {
            return Err(Rejection::KeyExists { existing: key.id });
        }
        let scopes = Scopes { user_id: Some(self.user_id.clone()), ..Scopes::from(ctx.by) };
        let limit = ctx.policy.int(PolicyKey::SshKeyMaxPerUser, &scopes, ctx.now);
        if i64::try_from(self.keys.len()).unwrap_or(i64::MAX) >= limit {
            return Err(Rejection::TooManyKeys { limit });
        }
        let key = SshKey {
            id: SshKeyId(ctx.new_id(0)),
            name,
            key_type,
            public_key,
            fingerprint,
            is_default: self.keys.is_empty(),
            created_by: ctx.by.to_string(),
            created_at: ctx.now,
        };
        let mut next = self.clone();
        next.keys.insert(key.id, key.clone());
        Ok(next.keys_changed(AuditAction::SshKeysCreate, &key, ctx))
    }

    pub(super) fn refuse_key(&self, cause: SshKeyFault, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let Some(refusals) = self.refusals.audited(ctx.now) else { return Transition::stay(Reply::Done) };
        let metadata = json!({ "result": "refused", "code": cause });
        Transition::to(Self { refusals, ..self.clone() }, Reply::Done, "a key was refused").audit(audit(
            AuditAction::SshKeysCreate,
            metadata,
            ctx,
        ))
    }

    pub(super) fn delete_key(&self, id: SshKeyId, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        let mut next = self.clone();
        let Some(key) = next.keys.remove(&id) else { return Err(Rejection::NotFound) };
        // There is a default key as long as there is any key.
        if key.is_default
            && let Some(heir) = next.keys.values_mut().next()
        {
            heir.is_default = true;
        }
        Ok(next.keys_changed(AuditAction::SshKeysDelete, &key, ctx))
    }

    pub(super) fn make_default(
        &self,
        id: SshKeyId,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let key = self.keys.get(&id).ok_or(Rejection::NotFound)?;
        if key.is_default {
            return Ok(Transition::stay(Reply::Key { key: key.clone() }));
        }
        let key = SshKey { is_default: true, ..key.clone() };
        let mut next = self.clone();
        for other in next.keys.values_mut() {
            other.is_default = other.id == id;
        }
        Ok(next.keys_changed(AuditAction::SshKeysMakeDefault, &key, ctx))
    }

    fn keys_changed(mut self, action: AuditAction, key: &SshKey, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let metadata = json!({ "ssh_key_id": key.id, "fingerprint": key.fingerprint, "result": "ok" });
        self.logins_revision = self.logins_revision.saturating_add(1);
        // An additional key opens nothing until it is chosen.
        let concerned =
            if action == AuditAction::SshKeysCreate && !key.is_default { BTreeSet::new() } else { self.live.clone() };
        let user_id = self.user_id.clone();
        let stale = concerned.into_iter().map(|id| Event::LoginsStale { allocation_id: id, user_id: user_id.clone() });
        Transition::to(self, Reply::Key { key: key.clone() }, action.as_str())
            .audit(audit(action, metadata, ctx))
            .with(stale, None)
    }

    /// The default key, which opens allocations without chosen keys.
    #[must_use]
    pub fn default_key(&self) -> Option<&SshKey> {
        self.keys.values().find(|key| key.is_default)
    }

    /// The keys that open an allocation: the chosen ones that exist, or the default key.
    #[must_use]
    pub fn authorized_keys(&self, chosen: Option<&[SshKeyId]>) -> Vec<AuthorizedKey> {
        match chosen {
            Some(chosen) => chosen.iter().filter_map(|id| self.keys.get(id)).map(SshKey::authorized).collect(),
            None => self.default_key().map(SshKey::authorized).into_iter().collect(),
        }
    }
}
