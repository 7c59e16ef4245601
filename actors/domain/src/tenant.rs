//! A tenant: one user's standing with the service. Their SSH keys (specification, *SSH key*), and the allocations that count
//! against their quota (policy `allocation.max_concurrent_per_user`). The limit spans allocations, so that it can only be kept where all
//! of them are counted: in this one mailbox.

use crate::allocation::AuthorizedKey;
use crate::authz::Action;
use crate::id::{AllocationId, EntityRef, Kind, SshKeyId};
use crate::machine::{self, Audit, Ctx, Deadline, Keys, Machine, Step, Timestamp};
use crate::policy::{Key, Scopes};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

/// A user has few keys; a thousand would be somebody's script.
pub const MAX_KEYS: usize = 100;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    pub user_id: String,
    pub keys: BTreeMap<SshKeyId, SshKey>,
    /// Asked for and not released.
    pub live: BTreeSet<AllocationId>,
}

/// A public key and what is known of it. No private key is ever made or kept.
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

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    AddKey {
        user_id: String,
        name: String,
        key_type: String,
        public_key: String,
        fingerprint: String,
    },
    DeleteKey {
        key: SshKeyId,
    },
    MakeDefault {
        key: SshKeyId,
    },
    /// Counts an allocation, if the quota admits it.
    Admit {
        user_id: String,
        allocation_id: AllocationId,
        scopes: AskedScopes,
    },
    Forget {
        allocation_id: AllocationId,
    },
    Tick,
}

/// The scopes in which the quota is resolved: those of the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskedScopes {
    pub org_id: Option<String>,
    pub project_id: Option<String>,
    pub plan: Option<String>,
}

impl machine::Command for Command {
    fn name(&self) -> &'static str {
        match self {
            Self::AddKey { .. } => "add_key",
            Self::DeleteKey { .. } => "delete_key",
            Self::MakeDefault { .. } => "make_default",
            Self::Admit { .. } => "admit",
            Self::Forget { .. } => "forget",
            Self::Tick => "tick",
        }
    }

    fn action(&self) -> Action {
        match self {
            Self::AddKey { .. } | Self::DeleteKey { .. } | Self::MakeDefault { .. } => Action::KeepKeys,
            Self::Admit { .. } | Self::Forget { .. } | Self::Tick => Action::Advance,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    Key { key: SshKey },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("there is no such key")]
    NotFound,
    #[error("the key is registered already, as {existing}")]
    KeyExists { existing: SshKeyId },
    #[error("{MAX_KEYS} keys are registered; delete one first")]
    TooManyKeys,
    #[error("the quota of {limit} allocations is used up")]
    OverQuota { limit: i64 },
}

impl Machine for Tenant {
    const KIND: Kind = Kind::Tenant;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(state: Option<&Self>, command: Command, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let Some(tenant) = state else {
            return match &command {
                // A tenant comes to be with the first thing that is kept of them.
                Command::AddKey { user_id, .. } | Command::Admit { user_id, .. } => {
                    Self::new(&user_id.clone()).advance(command.clone(), ctx)
                }
                Command::DeleteKey { .. } | Command::MakeDefault { .. } => Err(Rejection::NotFound),
                Command::Forget { .. } | Command::Tick => Ok(Step::stay(Reply::Done)),
            };
        };
        tenant.advance(command, ctx)
    }

    fn state(&self) -> &'static str {
        "present"
    }

    fn deadline(&self) -> Option<Deadline> {
        None
    }

    fn keys(&self) -> Keys {
        Keys { owner: Some(self.user_id.clone()), sku: None, unique_name: None }
    }

    fn tick() -> Command {
        Command::Tick
    }
}

impl Tenant {
    fn new(user_id: &str) -> Self {
        Self { user_id: user_id.to_owned(), keys: BTreeMap::new(), live: BTreeSet::new() }
    }

    fn advance(&self, command: Command, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match command {
            Command::AddKey { user_id: _, name, key_type, public_key, fingerprint } => {
                self.add_key(name, key_type, public_key, fingerprint, ctx)
            }
            Command::DeleteKey { key } => self.delete_key(key, ctx),
            Command::MakeDefault { key } => self.make_default(key, ctx),
            Command::Admit { user_id: _, allocation_id, scopes } => self.admit(allocation_id, scopes, ctx),
            Command::Forget { allocation_id } => Ok(self.forget(allocation_id)),
            Command::Tick => Ok(Step::stay(Reply::Done)),
        }
    }

    fn add_key(
        &self,
        name: String,
        key_type: String,
        public_key: String,
        fingerprint: String,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        if let Some(key) = self.keys.values().find(|key| key.fingerprint == fingerprint) {
            return Err(Rejection::KeyExists { existing: key.id });
        }
        if self.keys.len() >= MAX_KEYS {
            return Err(Rejection::TooManyKeys);
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
        Ok(next.keys_changed("ssh_keys.create", &key, ctx))
    }

    fn delete_key(&self, id: SshKeyId, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let mut next = self.clone();
        let Some(key) = next.keys.remove(&id) else { return Err(Rejection::NotFound) };
        // Somebody must be the default, as long as there is somebody.
        if key.is_default
            && let Some(heir) = next.keys.values_mut().next()
        {
            heir.is_default = true;
        }
        Ok(next.keys_changed("ssh_keys.delete", &key, ctx))
    }

    fn make_default(&self, id: SshKeyId, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let mut next = self.clone();
        for key in next.keys.values_mut() {
            key.is_default = key.id == id;
        }
        let Some(key) = next.keys.get(&id).cloned() else { return Err(Rejection::NotFound) };
        Ok(next.keys_changed("ssh_keys.make_default", &key, ctx))
    }

    fn keys_changed(self, action: &'static str, key: &SshKey, ctx: &Ctx<'_>) -> Step<Self> {
        let target = EntityRef { kind: Kind::Tenant, id: ctx.id };
        let metadata = json!({ "ssh_key_id": key.id, "fingerprint": key.fingerprint, "result": "ok" });
        Step::to(self, Reply::Key { key: key.clone() }, action).audit(Audit::new(action, target, metadata))
    }

    fn admit(&self, allocation_id: AllocationId, scopes: AskedScopes, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        if self.live.contains(&allocation_id) {
            return Ok(Step::stay(Reply::Done));
        }
        let AskedScopes { org_id, project_id, plan } = scopes;
        let scopes = Scopes { user_id: Some(self.user_id.clone()), project_id, org_id, plan };
        let limit = ctx.policy.int(Key::AllocationMaxConcurrent, &scopes, ctx.now);
        if i64::try_from(self.live.len()).unwrap_or(i64::MAX) >= limit {
            return Err(Rejection::OverQuota { limit });
        }
        let mut next = self.clone();
        next.live.insert(allocation_id);
        Ok(Step::to(next, Reply::Done, format!("allocation {allocation_id} counts against the quota")))
    }

    fn forget(&self, allocation_id: AllocationId) -> Step<Self> {
        if !self.live.contains(&allocation_id) {
            return Step::stay(Reply::Done);
        }
        let mut next = self.clone();
        next.live.remove(&allocation_id);
        Step::to(next, Reply::Done, format!("allocation {allocation_id} has ended"))
    }

    /// The key that opens allocations for which none was named.
    #[must_use]
    pub fn default_key(&self) -> Option<&SshKey> {
        self.keys.values().find(|key| key.is_default)
    }
}
