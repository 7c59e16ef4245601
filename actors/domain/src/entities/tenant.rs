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
use crate::id::{
    AllocationId, EntityKind, EntityRef, OrgId, ProjectId, ServiceAccountId, SshKeyId, TerminalSessionId, UserId,
};
use crate::policy::{PolicyKey, Scopes};
use crate::resend_timer::ResendTimer;
use crate::state_machine::{
    self, AuditedRefusal, IndexKeys, Machine, Request as _, TickOnly, Timestamp, Transition, TransitionContext,
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

pub use ssh_keys::{SshKey, SshKeyFault};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    pub user_id: UserId,
    pub keys: BTreeMap<SshKeyId, SshKey>,
    /// Raised with each change of the keys, so that of two reads for an allocation the later one counts.
    #[serde(default)]
    pub logins_revision: u64,
    /// Requested and not released.
    pub live: BTreeSet<AllocationId>,
    /// When it asks again whether they have ended.
    #[serde(default)]
    pub again: Option<ResendTimer>,
    /// Service accounts that were admitted recently, by the part of the id that a repeated creation shares, and since when.
    #[serde(default)]
    pub expected_accounts: BTreeMap<u64, Timestamp>,
    /// Terminal sessions that were admitted recently, by allocation.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub expected_terminals: BTreeMap<AllocationId, BTreeMap<TerminalSessionId, Timestamp>>,
    #[serde(default)]
    pub refusals: RefusalAudit,
}

/// The commands of a tenant.
pub type Command = state_machine::AnyCommand<Request, Instruction>;

state_machine::impl_command_from!(Request, Instruction);

/// What users ask of their tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[derive(strum::IntoStaticStr, strum::VariantNames, strum::EnumDiscriminants)]
#[strum_discriminants(
    name(CommandName),
    doc = "The name of a request.",
    derive(Serialize, Deserialize, strum::Display, strum::IntoStaticStr),
    strum(serialize_all = "snake_case", const_into_str),
    serde(rename_all = "snake_case")
)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Request {
    AddKey {
        user_id: UserId,
        name: String,
        key_type: String,
        public_key: String,
        fingerprint: String,
    },
    /// Records that a key was refused before it could be parsed: the audit log has the cause, and nothing of what was sent.
    RefuseKey {
        user_id: UserId,
        cause: SshKeyFault,
    },
    DeleteKey {
        key: SshKeyId,
    },
    MakeDefault {
        key: SshKeyId,
    },
    /// Reserves a slot for a service account that is being created, if the limit admits one more beside the existing ones.
    ExpectAccount {
        user_id: UserId,
        account: ServiceAccountId,
        /// The existing ones, by a recent read.
        there: BTreeSet<ServiceAccountId>,
        scopes: QuotaScopes,
    },
    /// Reserves a slot for a terminal session that is being opened, likewise.
    ExpectTerminal {
        user_id: UserId,
        allocation_id: AllocationId,
        session: TerminalSessionId,
        there: BTreeSet<TerminalSessionId>,
        /// Sessions that are closed: they occupy no slot.
        #[serde(default)]
        over: BTreeSet<TerminalSessionId>,
        scopes: QuotaScopes,
    },
}

impl state_machine::Request for Request {
    fn action(&self) -> Action {
        match self {
            Self::AddKey { .. } | Self::RefuseKey { .. } | Self::DeleteKey { .. } | Self::MakeDefault { .. } => {
                Action::KeepKeys
            }
            Self::ExpectAccount { .. } => Action::KeepServiceAccounts,
            Self::ExpectTerminal { .. } => Action::OpenTerminals,
        }
    }
}

/// What the sagas of allocations have a tenant do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Instruction {
    /// Counts an allocation, if the quota admits it.
    Admit {
        user_id: UserId,
        allocation_id: AllocationId,
        scopes: QuotaScopes,
        /// The revision of the keys that the allocation knows.
        #[serde(default)]
        logins_revision: u64,
    },
    /// Counts it no longer: it has ended.
    Forget { allocation_id: AllocationId },
}

/// The scopes in which the quota is resolved: those of the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaScopes {
    pub org_id: Option<OrgId>,
    pub project_id: Option<ProjectId>,
    pub plan: Option<String>,
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

impl state_machine::Rejection for Rejection {
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
    /// As many SSH keys (1,000, of up to 3 KiB) and allocations (10,000) as the largest policies admit.
    const SNAPSHOT_MOST: usize = 5120 * 1024;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match (state, command) {
            // The reply does not reveal whose key it is.
            (Some(tenant), Command::Request(request))
                if request.action() == Action::KeepKeys && !tenant.may_manage_keys(ctx.by) =>
            {
                Err(Rejection::NotFound)
            }
            (Some(tenant), Command::Request(request)) => tenant.execute(request, ctx),
            (Some(tenant), Command::Instruction(instruction)) => tenant.follow(instruction, ctx),
            (Some(tenant), Command::Maintenance(TickOnly::Tick)) => Ok(tenant.tick(ctx)),
            (None, Command::Request(request)) => Self::begin_by_request(request, ctx),
            (None, Command::Instruction(instruction)) => Self::begin_by_instruction(instruction, ctx),
            (None, Command::Maintenance(TickOnly::Tick)) => Ok(Transition::stay(Reply::Done)),
        }
    }

    /// Mutations of keys are audited with their result, refusals too (specification, *Audit log entry*).
    fn audit_refusal(
        &self,
        command: &Command,
        rejection: &Rejection,
        ctx: &TransitionContext<'_>,
    ) -> Option<AuditedRefusal<Self>> {
        let Command::Request(request) = command else { return None };
        let (action, key) = match request {
            Request::AddKey { .. } => (AuditAction::SshKeysCreate, None),
            Request::DeleteKey { key } => (AuditAction::SshKeysDelete, Some(key)),
            Request::MakeDefault { key } => (AuditAction::SshKeysMakeDefault, Some(key)),
            Request::RefuseKey { .. } | Request::ExpectAccount { .. } | Request::ExpectTerminal { .. } => return None,
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
        IndexKeys { owner: Some(self.user_id.to_string()), sku: None, unique_name: None }
    }
}

impl Tenant {
    fn new(user_id: &UserId) -> Self {
        Self {
            user_id: user_id.clone(),
            keys: BTreeMap::new(),
            logins_revision: 0,
            live: BTreeSet::new(),
            again: None,
            expected_accounts: BTreeMap::new(),
            expected_terminals: BTreeMap::new(),
            refusals: RefusalAudit::default(),
        }
    }

    /// A tenant is created with its first stored data.
    fn begin_by_request(request: Request, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match &request {
            Request::AddKey { user_id, .. }
            | Request::RefuseKey { user_id, .. }
            | Request::ExpectAccount { user_id, .. }
            | Request::ExpectTerminal { user_id, .. } => Self::new(user_id).execute(request.clone(), ctx),
            Request::DeleteKey { .. } | Request::MakeDefault { .. } => Err(Rejection::NotFound),
        }
    }

    fn begin_by_instruction(
        instruction: Instruction,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match &instruction {
            Instruction::Admit { user_id, .. } => Self::new(user_id).follow(instruction.clone(), ctx),
            Instruction::Forget { .. } => Ok(Transition::stay(Reply::Done)),
        }
    }

    fn execute(&self, request: Request, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match request {
            Request::AddKey { user_id: _, name, key_type, public_key, fingerprint } => {
                self.add_key(name, key_type, public_key, fingerprint, ctx)
            }
            Request::RefuseKey { user_id: _, cause } => Ok(self.refuse_key(cause, ctx)),
            Request::DeleteKey { key } => self.delete_key(key, ctx),
            Request::MakeDefault { key } => self.make_default(key, ctx),
            Request::ExpectAccount { user_id: _, account, there, scopes } => {
                self.expect_account(account, &there, scopes, ctx)
            }
            Request::ExpectTerminal { user_id: _, allocation_id, session, there, over, scopes } => {
                self.expect_terminal(allocation_id, session, &there, &over, scopes, ctx)
            }
        }
    }

    fn follow(&self, instruction: Instruction, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match instruction {
            Instruction::Admit { user_id: _, allocation_id, scopes, logins_revision } => {
                self.admit(allocation_id, scopes, logins_revision, ctx)
            }
            Instruction::Forget { allocation_id } => Ok(self.forget(allocation_id)),
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
        Transition::to(next, Reply::Done, "asking which of its allocations have ended").with(asked, None)
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
        next.again = Some(ResendTimer::first(ctx.now));
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
fn audit(action: AuditAction, metadata: serde_json::Value, ctx: &TransitionContext<'_>) -> AuditRecord {
    AuditRecord::new(action, EntityRef { kind: EntityKind::Tenant, id: ctx.id }, metadata)
}

#[cfg(test)]
mod tests;
