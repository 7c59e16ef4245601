//! A tenant: one user's standing with the service. Their SSH keys (specification, *SSH key*), the allocations that count
//! against their quota (policy `allocation.max_concurrent_per_user`), and the places for service accounts and terminal sessions that are
//! being made (policies `auth.service_accounts_per_user`, `terminal.sessions_per_allocation`). The limits span entities, so that they can
//! only be kept where all of them are counted: in this one mailbox.

mod accounts;
mod terminals;

use crate::again::Again;
use crate::allocation::AuthorizedKey;
use crate::audit::{Audit, AuditAction, Refusals};
use crate::authz::Action;
use crate::event::Event;
use crate::id::{AllocationId, EntityRef, Kind, ServiceAccountId, SshKeyId, TerminalSessionId};
use crate::machine::{self, Ctx, Deadline, Keys, Machine, Refused, Step, Timestamp};
use crate::policy::{Key, Scopes};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    pub user_id: String,
    pub keys: BTreeMap<SshKeyId, SshKey>,
    /// Raised with each change of the keys, so that of two allocations' readings the later one counts.
    #[serde(default)]
    pub logins_revision: u64,
    /// Asked for and not released.
    pub live: BTreeSet<AllocationId>,
    /// When it asks again whether they are over.
    #[serde(default)]
    pub again: Option<Again>,
    /// Service accounts that were admitted a moment ago, by what a repetition of their creation shares with it, and since when.
    #[serde(default)]
    pub expected_accounts: BTreeMap<u64, Timestamp>,
    /// Terminal sessions that were admitted a moment ago, by allocation.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub expected_terminals: BTreeMap<AllocationId, BTreeMap<TerminalSessionId, Timestamp>>,
    #[serde(default)]
    pub refusals: Refusals,
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
    /// Keeps that a key was refused before it could be read: the log names the cause, and nothing of what was sent.
    RefuseKey {
        user_id: String,
        cause: KeyCause,
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
        /// Of the keys that the allocation knows.
        #[serde(default)]
        logins_revision: u64,
    },
    Forget {
        allocation_id: AllocationId,
    },
    /// Keeps a place for a service account that is about to be made, if the limit admits one more beside those that are there.
    ExpectAccount {
        user_id: String,
        account: ServiceAccountId,
        /// Those that a read found a moment ago.
        there: BTreeSet<ServiceAccountId>,
        scopes: AskedScopes,
    },
    /// Keeps a place for a terminal session that is about to be opened, likewise.
    ExpectTerminal {
        user_id: String,
        allocation_id: AllocationId,
        session: TerminalSessionId,
        there: BTreeSet<TerminalSessionId>,
        scopes: AskedScopes,
    },
    Tick,
}

/// Why a text is not taken for a public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyCause {
    PrivateKey,
    Weak,
    Options,
    Unreadable,
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
            Self::RefuseKey { .. } => "refuse_key",
            Self::DeleteKey { .. } => "delete_key",
            Self::MakeDefault { .. } => "make_default",
            Self::Admit { .. } => "admit",
            Self::Forget { .. } => "forget",
            Self::ExpectAccount { .. } => "expect_account",
            Self::ExpectTerminal { .. } => "expect_terminal",
            Self::Tick => "tick",
        }
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

impl Machine for Tenant {
    const KIND: Kind = Kind::Tenant;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(state: Option<&Self>, command: Command, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let Some(tenant) = state else {
            return match &command {
                // A tenant comes to be with the first thing that is kept of them.
                Command::AddKey { user_id, .. }
                | Command::RefuseKey { user_id, .. }
                | Command::Admit { user_id, .. }
                | Command::ExpectAccount { user_id, .. }
                | Command::ExpectTerminal { user_id, .. } => Self::new(&user_id.clone()).advance(command.clone(), ctx),
                Command::DeleteKey { .. } | Command::MakeDefault { .. } => Err(Rejection::NotFound),
                Command::Forget { .. } | Command::Tick => Ok(Step::stay(Reply::Done)),
            };
        };
        tenant.advance(command, ctx)
    }

    /// Mutations of keys are audited with their result, refusals too (specification, *Audit log entry*).
    fn audit_refusal(&self, command: &Command, rejection: &Rejection, ctx: &Ctx<'_>) -> Option<Refused<Self>> {
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
        Some(Refused { next, audit: audit(action, metadata, ctx) })
    }

    fn state(&self) -> &'static str {
        "present"
    }

    fn deadline(&self) -> Option<Deadline> {
        None
    }

    fn timer(&self) -> Option<Timestamp> {
        self.again.map(|again| again.at)
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
        Self {
            user_id: user_id.to_owned(),
            keys: BTreeMap::new(),
            logins_revision: 0,
            live: BTreeSet::new(),
            again: None,
            expected_accounts: BTreeMap::new(),
            expected_terminals: BTreeMap::new(),
            refusals: Refusals::default(),
        }
    }

    fn advance(&self, command: Command, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
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
            Command::ExpectTerminal { user_id: _, allocation_id, session, there, scopes } => {
                self.expect_terminal(allocation_id, session, &there, scopes, ctx)
            }
            Command::Tick => Ok(self.tick(ctx)),
        }
    }

    /// The end of an allocation may not have been heard: then it would count for ever.
    fn tick(&self, ctx: &Ctx<'_>) -> Step<Self> {
        let Some(again) = self.again.filter(|again| again.is_due(ctx.now)) else { return Step::stay(Reply::Done) };
        let next = Self { again: Some(again.next(ctx.now)), ..self.clone() };
        let logins_revision = self.logins_revision;
        let asked = self.live.iter().map(|id| Event::AllocationCounted { allocation_id: *id, logins_revision });
        asked.fold(Step::to(next, Reply::Done, "asking which of its allocations are over"), Step::event)
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
        let scopes = Scopes { user_id: Some(self.user_id.clone()), ..Scopes::from(ctx.by) };
        let limit = ctx.policy.int(Key::SshKeyMaxPerUser, &scopes, ctx.now);
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

    fn refuse_key(&self, cause: KeyCause, ctx: &Ctx<'_>) -> Step<Self> {
        let Some(refusals) = self.refusals.audited(ctx.now) else { return Step::stay(Reply::Done) };
        let metadata = json!({ "result": "refused", "cause": cause });
        Step::to(Self { refusals, ..self.clone() }, Reply::Done, "a key was refused").audit(audit(
            AuditAction::SshKeysCreate,
            metadata,
            ctx,
        ))
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
        Ok(next.keys_changed(AuditAction::SshKeysDelete, &key, ctx))
    }

    fn make_default(&self, id: SshKeyId, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let mut next = self.clone();
        for key in next.keys.values_mut() {
            key.is_default = key.id == id;
        }
        let Some(key) = next.keys.get(&id).cloned() else { return Err(Rejection::NotFound) };
        Ok(next.keys_changed(AuditAction::SshKeysMakeDefault, &key, ctx))
    }

    fn keys_changed(mut self, action: AuditAction, key: &SshKey, ctx: &Ctx<'_>) -> Step<Self> {
        let metadata = json!({ "ssh_key_id": key.id, "fingerprint": key.fingerprint, "result": "ok" });
        self.logins_revision = self.logins_revision.saturating_add(1);
        // A further key opens nothing until it is chosen.
        let concerned =
            if action == AuditAction::SshKeysCreate && !key.is_default { BTreeSet::new() } else { self.live.clone() };
        let user_id = self.user_id.clone();
        let stale = concerned.into_iter().map(|id| Event::LoginsStale { allocation_id: id, user_id: user_id.clone() });
        let step = Step::to(self, Reply::Key { key: key.clone() }, action.as_str()).audit(audit(action, metadata, ctx));
        stale.fold(step, Step::event)
    }

    fn admit(
        &self,
        allocation_id: AllocationId,
        scopes: AskedScopes,
        logins_revision: u64,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        if self.live.contains(&allocation_id) {
            return Ok(Step::stay(Reply::Done));
        }
        let limit = ctx.policy.int(Key::AllocationMaxConcurrent, &self.scopes(scopes), ctx.now);
        if i64::try_from(self.live.len()).unwrap_or(i64::MAX) >= limit {
            return Err(Rejection::OverQuota { limit });
        }
        let mut next = self.clone();
        next.live.insert(allocation_id);
        next.again = Some(Again::first(ctx.now));
        let step = Step::to(next, Reply::Done, format!("allocation {allocation_id} counts against the quota"));
        // Of what changed between its request and now it was not told: it was not counted yet.
        let knows = logins_revision >= self.logins_revision;
        let stale = Event::LoginsStale { allocation_id, user_id: self.user_id.clone() };
        Ok(if knows { step } else { step.event(stale) })
    }

    fn scopes(&self, AskedScopes { org_id, project_id, plan }: AskedScopes) -> Scopes {
        Scopes { user_id: Some(self.user_id.clone()), project_id, org_id, plan }
    }

    fn forget(&self, allocation_id: AllocationId) -> Step<Self> {
        if !self.live.contains(&allocation_id) {
            return Step::stay(Reply::Done);
        }
        let mut next = self.clone();
        next.live.remove(&allocation_id);
        next.again = next.again.filter(|_| !next.live.is_empty());
        Step::to(next, Reply::Done, format!("allocation {allocation_id} has ended"))
    }

    /// The key that opens allocations for which none was named.
    #[must_use]
    pub fn default_key(&self) -> Option<&SshKey> {
        self.keys.values().find(|key| key.is_default)
    }

    /// The keys that open an allocation: of those that were chosen for it the ones that there are, or the default one.
    #[must_use]
    pub fn logins(&self, chosen: Option<&[SshKeyId]>) -> Vec<AuthorizedKey> {
        match chosen {
            Some(chosen) => chosen.iter().filter_map(|id| self.keys.get(id)).map(SshKey::authorized).collect(),
            None => self.default_key().map(SshKey::authorized).into_iter().collect(),
        }
    }
}

/// A row about the tenant that decides.
const fn audit(action: AuditAction, metadata: serde_json::Value, ctx: &Ctx<'_>) -> Audit {
    Audit::new(action, EntityRef { kind: Kind::Tenant, id: ctx.id }, metadata)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::authz::Principal;
    use crate::policy::{PolicyBook, Scope, Value};
    use proptest::prelude::*;
    use uuid::Uuid;

    fn book(quota: i64) -> PolicyBook {
        let mut book = PolicyBook::default();
        book.set(Key::AllocationMaxConcurrent, Scope::Global, Timestamp::UNIX_EPOCH, Value::Int(quota)).unwrap();
        book
    }

    fn decide(state: Option<&Tenant>, command: Command, seed: u128, quota: i64) -> Result<Step<Tenant>, Rejection> {
        let (policy, by) = (book(quota), Principal::system("test"));
        let (now, id) = (Timestamp::UNIX_EPOCH, Uuid::nil());
        Tenant::decide(
            state,
            command,
            &Ctx {
                now,
                policy: &policy,
                by: &by,
                correlation_id: "c",
                trace: crate::machine::Trace::default(),
                seed,
                id,
                version: 1,
            },
        )
    }

    fn add(n: usize) -> Command {
        Command::AddKey {
            user_id: "ann".into(),
            name: format!("key {n}"),
            key_type: "ssh-ed25519".into(),
            public_key: format!("ssh-ed25519 {n}"),
            fingerprint: format!("SHA256:{n}"),
        }
    }

    fn admit(n: u128) -> Command {
        let scopes = AskedScopes { org_id: None, project_id: None, plan: None };
        let allocation_id = AllocationId(Uuid::from_u128(n));
        Command::Admit { user_id: "ann".into(), allocation_id, scopes, logins_revision: 0 }
    }

    fn forget(n: u128) -> Command {
        Command::Forget { allocation_id: AllocationId(Uuid::from_u128(n)) }
    }

    fn with_keys(count: usize) -> Tenant {
        (0..count).fold(Tenant::new("ann"), |tenant, n| {
            decide(Some(&tenant), add(n), n as u128 * 0x1_0000_0000_0000_0000, 50).unwrap().next.unwrap()
        })
    }

    fn defaults(tenant: &Tenant) -> usize {
        tenant.keys.values().filter(|key| key.is_default).count()
    }

    fn ctx<'a>(now: Timestamp, policy: &'a PolicyBook, by: &'a Principal) -> Ctx<'a> {
        Ctx {
            now,
            policy,
            by,
            correlation_id: "c",
            seed: 1,
            id: Uuid::nil(),
            version: 1,
            trace: machine::Trace::default(),
        }
    }

    #[test]
    fn refused_mutations_of_keys_are_kept_with_their_cause_and_nothing_that_was_sent() {
        let (policy, by) = (book(50), Principal::system("test"));
        let (tenant, now) = (with_keys(1), Timestamp::UNIX_EPOCH);
        let nobodys = SshKeyId(Uuid::from_u128(99));
        for (command, action) in [
            (add(0), AuditAction::SshKeysCreate),
            (Command::DeleteKey { key: nobodys }, AuditAction::SshKeysDelete),
            (Command::MakeDefault { key: nobodys }, AuditAction::SshKeysMakeDefault),
        ] {
            let rejection = decide(Some(&tenant), command.clone(), 1, 50).unwrap_err();
            let refused = tenant.audit_refusal(&command, &rejection, &ctx(now, &policy, &by)).unwrap();
            assert_eq!((refused.audit.action, &refused.audit.metadata["result"]), (action, &json!("refused")));
            assert_eq!(refused.audit.metadata["cause"], rejection.to_string());
            assert!(
                refused.next.audit_refusal(&command, &rejection, &ctx(now, &policy, &by)).is_none(),
                "one a minute"
            );
        }
        let quota = Rejection::OverQuota { limit: 1 };
        assert!(tenant.audit_refusal(&admit(1), &quota, &ctx(now, &policy, &by)).is_none());

        // What is no key at all is refused before it comes here, also of somebody who has none yet.
        let command = Command::RefuseKey { user_id: "ann".into(), cause: KeyCause::PrivateKey };
        let step = decide(None, command.clone(), 1, 50).unwrap();
        assert_eq!(step.audit[0].metadata, json!({"result": "refused", "cause": "private_key"}));
        let again = decide(step.next.as_ref(), command, 1, 50).unwrap();
        assert!(again.next.is_none() && again.audit.is_empty());
    }

    #[test]
    fn a_tenant_comes_to_be_with_the_first_thing_kept_of_them() {
        assert!(decide(None, add(1), 1, 50).unwrap().next.is_some());
        assert!(decide(None, admit(1), 1, 50).unwrap().next.is_some());
        assert!(decide(None, forget(1), 1, 50).unwrap().next.is_none());
        assert!(decide(None, Command::Tick, 1, 50).unwrap().next.is_none());
        let nobodys = SshKeyId(Uuid::nil());
        assert_eq!(decide(None, Command::DeleteKey { key: nobodys }, 1, 50).err(), Some(Rejection::NotFound));
        assert_eq!(decide(None, Command::MakeDefault { key: nobodys }, 1, 50).err(), Some(Rejection::NotFound));
        // Over a quota of nothing, not even a first allocation comes to be.
        assert_eq!(decide(None, admit(1), 1, 0).err(), Some(Rejection::OverQuota { limit: 0 }));
    }

    #[test]
    fn the_first_key_is_the_default_and_it_passes_on_when_deleted() {
        let tenant = with_keys(3);
        let first = tenant.default_key().unwrap().clone();
        assert_eq!(first.name, "key 0");
        let heir = decide(Some(&tenant), Command::DeleteKey { key: first.id }, 1, 50).unwrap().next.unwrap();
        assert_eq!(defaults(&heir), 1);
    }

    #[test]
    fn a_key_is_registered_once_and_there_is_an_end_to_them() {
        let tenant = with_keys(100);
        let existing = tenant.keys.values().find(|key| key.fingerprint == "SHA256:7").unwrap().id;
        assert_eq!(decide(Some(&tenant), add(7), 1, 50).err(), Some(Rejection::KeyExists { existing }));
        assert_eq!(decide(Some(&tenant), add(100), 1, 50).err(), Some(Rejection::TooManyKeys { limit: 100 }));
    }

    #[test]
    fn every_change_of_a_key_is_audited() {
        let tenant = with_keys(1);
        let key = tenant.default_key().unwrap().id;
        for command in [add(9), Command::MakeDefault { key }, Command::DeleteKey { key }] {
            let step = decide(Some(&tenant), command, 77, 50).unwrap();
            assert_eq!(step.audit.len(), 1);
            assert_eq!(step.audit[0].metadata["result"], "ok");
        }
    }

    #[test]
    fn a_quota_that_is_lowered_lets_those_be_who_are_there() {
        let two = [1, 2]
            .into_iter()
            .fold(Tenant::new("ann"), |tenant, n| decide(Some(&tenant), admit(n), 1, 50).unwrap().next.unwrap());
        assert_eq!(decide(Some(&two), admit(3), 1, 1).err(), Some(Rejection::OverQuota { limit: 1 }));
        assert!(decide(Some(&two), admit(2), 1, 1).unwrap().next.is_none(), "admitted before");
    }

    proptest! {
        #[test]
        fn the_quota_is_never_exceeded_and_counts_each_allocation_once(
            moves in prop::collection::vec((any::<bool>(), 0u128..8), 0..60), quota in 0i64..5
        ) {
            let mut tenant = Tenant::new("ann");
            for (comes, n) in moves {
                let command = if comes { admit(n) } else { forget(n) };
                if let Ok(Step { next: Some(next), .. }) = decide(Some(&tenant), command, 1, quota) {
                    tenant = next;
                }
                prop_assert!(tenant.live.len() as i64 <= quota);
            }
        }

        #[test]
        fn of_any_keys_exactly_one_is_the_default(
            moves in prop::collection::vec((0u8..3, 0usize..6), 0..40)
        ) {
            let mut tenant = Tenant::new("ann");
            for (n, (kind, which)) in moves.into_iter().enumerate() {
                let key = tenant.keys.keys().nth(which).copied().unwrap_or(SshKeyId(Uuid::nil()));
                let command = match kind {
                    0 => add(which),
                    1 => Command::DeleteKey { key },
                    _ => Command::MakeDefault { key },
                };
                if let Ok(Step { next: Some(next), .. }) = decide(Some(&tenant), command, (n as u128) << 64, 50) {
                    let kept = serde_json::to_string(&next).unwrap();
                    prop_assert_eq!(&serde_json::from_str::<Tenant>(&kept).unwrap(), &next);
                    tenant = next;
                }
                prop_assert_eq!(defaults(&tenant), usize::from(!tenant.keys.is_empty()));
            }
        }
    }
}
