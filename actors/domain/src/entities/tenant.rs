//! A tenant: one user's SSH keys (specification, *SSH key*), the allocations that count against their quota (policy
//! `allocation.max_concurrent_per_user`), and the slots for service accounts and terminal sessions that are being created (policies
//! `auth.service_accounts_per_user`, `terminal.sessions_per_allocation`). The limits span entities, so they can only be enforced where all
//! of them are counted: in this one mailbox.

mod service_account_slots;
mod ssh_keys;
mod terminal_slots;

use crate::audit::{AuditAction, AuditRecord, RefusalAudit};
use crate::authz::Action;
use crate::event::Event;
use crate::explanation::Explanation;
use crate::id::{AllocationId, EntityKind, EntityRef, ServiceAccountId, SshKeyId, TerminalSessionId};
use crate::machine::{
    self, AuditedRefusal, Command as _, IndexKeys, Machine, Timestamp, Transition, TransitionContext,
};
use crate::policy::{PolicyKey, Scopes};
use crate::retry::RetryTimer;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

pub use ssh_keys::{SshKey, SshKeyFault};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    pub user_id: String,
    pub keys: BTreeMap<SshKeyId, SshKey>,
    /// Raised with each change of the keys, so that of two reads for an allocation the later one counts.
    #[serde(default)]
    pub logins_revision: u64,
    /// Requested and not released.
    pub live: BTreeSet<AllocationId>,
    /// When it asks again whether they have ended.
    #[serde(default)]
    pub again: Option<RetryTimer>,
    /// Service accounts that were admitted recently, by the part of the id that a repeated creation shares, and since when.
    #[serde(default)]
    pub expected_accounts: BTreeMap<u64, Timestamp>,
    /// Terminal sessions that were admitted recently, by allocation.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub expected_terminals: BTreeMap<AllocationId, BTreeMap<TerminalSessionId, Timestamp>>,
    #[serde(default)]
    pub refusals: RefusalAudit,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::EnumDiscriminants)]
#[strum_discriminants(
    name(CommandName),
    doc = "The name of a command.",
    derive(Serialize, Deserialize, strum::Display, strum::IntoStaticStr),
    strum(serialize_all = "snake_case", const_into_str),
    serde(rename_all = "snake_case")
)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    AddKey {
        user_id: String,
        name: String,
        key_type: String,
        public_key: String,
        fingerprint: String,
    },
    /// Records that a key was refused before it could be parsed: the audit log has the cause, and nothing of what was sent.
    RefuseKey {
        user_id: String,
        cause: SshKeyFault,
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
        scopes: QuotaScopes,
        /// The revision of the keys that the allocation knows.
        #[serde(default)]
        logins_revision: u64,
    },
    Forget {
        allocation_id: AllocationId,
    },
    /// Reserves a slot for a service account that is being created, if the limit admits one more beside the existing ones.
    ExpectAccount {
        user_id: String,
        account: ServiceAccountId,
        /// The existing ones, by a recent read.
        there: BTreeSet<ServiceAccountId>,
        scopes: QuotaScopes,
    },
    /// Reserves a slot for a terminal session that is being opened, likewise.
    ExpectTerminal {
        user_id: String,
        allocation_id: AllocationId,
        session: TerminalSessionId,
        there: BTreeSet<TerminalSessionId>,
        /// Sessions that are closed: they occupy no slot.
        #[serde(default)]
        over: BTreeSet<TerminalSessionId>,
        scopes: QuotaScopes,
    },
    Tick,
}

/// The scopes in which the quota is resolved: those of the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaScopes {
    pub org_id: Option<String>,
    pub project_id: Option<String>,
    pub plan: Option<String>,
}

impl machine::Command for Command {
    const TICK: Self = Self::Tick;

    fn name(&self) -> &'static str {
        self.into_str()
    }

    fn action(&self) -> Action {
        match self {
            Self::AddKey { .. } | Self::RefuseKey { .. } | Self::DeleteKey { .. } | Self::MakeDefault { .. } => {
                Action::KeepKeys
            }
            Self::ExpectAccount { .. } => Action::KeepServiceAccounts,
            Self::ExpectTerminal { .. } => Action::OpenTerminals,
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
    #[error("{limit} keys are registered; delete one first")]
    TooManyKeys { limit: i64 },
    #[error("the quota of {limit} allocations is used up")]
    OverQuota { limit: i64 },
    #[error("there are {limit} service accounts, which is the most; delete one first")]
    TooManyServiceAccounts { limit: i64 },
    #[error("there are {limit} terminal sessions, which is the most; end one first")]
    TooManyTerminals { limit: i64 },
}

impl machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotFound => Explanation::not_found("SSH key"),
            Self::KeyExists { existing } => {
                Explanation::conflict(format!("You have registered this key already, as {existing}; use that one."))
                    .detail("ssh_key_id", existing.to_string())
            }
            Self::TooManyKeys { limit } => {
                Explanation::conflict(format!("You have {limit} keys, which is the most; delete one first."))
                    .limited_by(PolicyKey::SshKeyMaxPerUser, limit)
            }
            Self::TooManyServiceAccounts { limit } => Explanation::conflict(format!(
                "You may have {limit} service accounts; delete one that nothing uses, then try \
                 again."
            ))
            .limited_by(PolicyKey::AuthServiceAccountsPerUser, limit),
            Self::TooManyTerminals { limit } => Explanation::conflict(format!(
                "The allocation has {limit} terminal sessions, which is the most; end one, or \
                 connect to it with `session_id`."
            ))
            .limited_by(PolicyKey::TerminalSessionsPerAllocation, limit),
            rejection @ Self::OverQuota { .. } => Explanation::unexpected(&rejection),
        }
    }
}

impl Machine for Tenant {
    const KIND: EntityKind = EntityKind::Tenant;
    /// As many SSH keys (1,000) and allocations (10,000) as the largest policies admit.
    const SNAPSHOT_MOST: usize = 2048 * 1024;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if let Some(tenant) = state
            && command.action() == Action::KeepKeys
            && !tenant.may_manage_keys(ctx.by)
        {
            // The reply does not reveal whose key it is.
            return Err(Rejection::NotFound);
        }
        let Some(tenant) = state else {
            return match &command {
                // A tenant is created with its first stored data.
                Command::AddKey { user_id, .. }
                | Command::RefuseKey { user_id, .. }
                | Command::Admit { user_id, .. }
                | Command::ExpectAccount { user_id, .. }
                | Command::ExpectTerminal { user_id, .. } => Self::new(&user_id.clone()).advance(command.clone(), ctx),
                Command::DeleteKey { .. } | Command::MakeDefault { .. } => Err(Rejection::NotFound),
                Command::Forget { .. } | Command::Tick => Ok(Transition::stay(Reply::Done)),
            };
        };
        tenant.advance(command, ctx)
    }

    /// Mutations of keys are audited with their result, refusals too (specification, *Audit log entry*).
    fn audit_refusal(
        &self,
        command: &Command,
        rejection: &Rejection,
        ctx: &TransitionContext<'_>,
    ) -> Option<AuditedRefusal<Self>> {
        let (action, key) = match command {
            Command::AddKey { .. } => (AuditAction::SshKeysCreate, None),
            Command::DeleteKey { key } => (AuditAction::SshKeysDelete, Some(key)),
            Command::MakeDefault { key } => (AuditAction::SshKeysMakeDefault, Some(key)),
            Command::RefuseKey { .. }
            | Command::Admit { .. }
            | Command::ExpectAccount { .. }
            | Command::ExpectTerminal { .. }
            | Command::Forget { .. }
            | Command::Tick => return None,
        };
        let next = Self { refusals: self.refusals.audited(ctx.now)?, ..self.clone() };
        let metadata = json!({ "ssh_key_id": key, "result": "refused", "cause": rejection.to_string() });
        Some(AuditedRefusal { next, audit: audit(action, metadata, ctx) })
    }

    fn state(&self) -> &'static str {
        "present"
    }

    fn timer(&self) -> Option<Timestamp> {
        self.again.map(|again| again.at)
    }

    fn keys(&self) -> IndexKeys {
        IndexKeys { owner: Some(self.user_id.clone()), sku: None, unique_name: None }
    }
}

impl Tenant {
    fn new(user_id: &str) -> Self {
        Self {
            user_id: user_id.to_owned(),
            keys: BTreeMap::new(),
            logins_revision: 0,
            live: BTreeSet::new(),
            again: None,
            expected_accounts: BTreeMap::new(),
            expected_terminals: BTreeMap::new(),
            refusals: RefusalAudit::default(),
        }
    }

    fn advance(&self, command: Command, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match command {
            Command::AddKey { user_id: _, name, key_type, public_key, fingerprint } => {
                self.add_key(name, key_type, public_key, fingerprint, ctx)
            }
            Command::RefuseKey { user_id: _, cause } => Ok(self.refuse_key(cause, ctx)),
            Command::DeleteKey { key } => self.delete_key(key, ctx),
            Command::MakeDefault { key } => self.make_default(key, ctx),
            Command::Admit { user_id: _, allocation_id, scopes, logins_revision } => {
                self.admit(allocation_id, scopes, logins_revision, ctx)
            }
            Command::Forget { allocation_id } => Ok(self.forget(allocation_id)),
            Command::ExpectAccount { user_id: _, account, there, scopes } => {
                self.expect_account(account, &there, scopes, ctx)
            }
            Command::ExpectTerminal { user_id: _, allocation_id, session, there, over, scopes } => {
                self.expect_terminal(allocation_id, session, &there, &over, scopes, ctx)
            }
            Command::Tick => Ok(self.tick(ctx)),
        }
    }

    /// The event of an allocation's end may have been lost: then it would count for ever.
    fn tick(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let Some(again) = self.again.filter(|again| again.is_due(ctx.now)) else {
            return Transition::stay(Reply::Done);
        };
        let next = Self { again: Some(again.next(ctx.now)), ..self.clone() };
        let logins_revision = self.logins_revision;
        let asked = self.live.iter().map(|id| Event::AllocationCounted { allocation_id: *id, logins_revision });
        asked.fold(Transition::to(next, Reply::Done, "asking which of its allocations are over"), Transition::event)
    }

    fn admit(
        &self,
        allocation_id: AllocationId,
        scopes: QuotaScopes,
        logins_revision: u64,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if self.live.contains(&allocation_id) {
            return Ok(Transition::stay(Reply::Done));
        }
        let limit = ctx.policy.int(PolicyKey::AllocationMaxConcurrent, &self.scopes(scopes), ctx.now);
        if i64::try_from(self.live.len()).unwrap_or(i64::MAX) >= limit {
            return Err(Rejection::OverQuota { limit });
        }
        let mut next = self.clone();
        next.live.insert(allocation_id);
        next.again = Some(RetryTimer::first(ctx.now));
        let step = Transition::to(next, Reply::Done, format!("allocation {allocation_id} counts against the quota"));
        // It was not notified of changes between its request and now, because it was not counted yet.
        let knows = logins_revision >= self.logins_revision;
        let stale = Event::LoginsStale { allocation_id, user_id: self.user_id.clone() };
        Ok(if knows { step } else { step.event(stale) })
    }

    fn scopes(&self, QuotaScopes { org_id, project_id, plan }: QuotaScopes) -> Scopes {
        Scopes { user_id: Some(self.user_id.clone()), project_id, org_id, plan }
    }

    fn forget(&self, allocation_id: AllocationId) -> Transition<Self> {
        if !self.live.contains(&allocation_id) {
            return Transition::stay(Reply::Done);
        }
        let mut next = self.clone();
        next.live.remove(&allocation_id);
        next.again = next.again.filter(|_| !next.live.is_empty());
        Transition::to(next, Reply::Done, format!("allocation {allocation_id} has ended"))
    }
}

/// An audit record about this tenant.
const fn audit(action: AuditAction, metadata: serde_json::Value, ctx: &TransitionContext<'_>) -> AuditRecord {
    AuditRecord::new(action, EntityRef { kind: EntityKind::Tenant, id: ctx.id }, metadata)
}

#[cfg(test)]
mod tests;
