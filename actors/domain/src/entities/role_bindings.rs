//! The platform roles that are bound to one subject, the `sub` of an access token (decisions 3, *Scopes*; 7).
//!
//! A revoked role allows nothing once the revocation is answered (I6): a request that needs a role reads these bindings from Postgres, and
//! its changes commit only if the bindings are still at the version that was read. Therefore the entity is never removed once it exists,
//! and its version only rises.

use crate::audit::{AuditAction, AuditRecord};
use crate::authz::{Action, Grant, PlatformRole};
use crate::explanation::{Explanation, RejectionCode};
use crate::id::{BindingId, EntityKind, EntityRef, UserId};
use crate::precondition::Precondition;
use crate::state_machine::{self, IndexKeys, Machine, Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleBindings {
    pub subject: UserId,
    pub roles: BTreeMap<PlatformRole, RoleBinding>,
}

/// Who bound a role, when and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleBinding {
    pub id: BindingId,
    /// As the audit log names an actor.
    pub bound_by: String,
    pub bound_at: Timestamp,
    pub reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// Binds the role; no effect where it is bound.
    Bind {
        subject: UserId,
        role: PlatformRole,
        reason: String,
    },
    Revoke {
        role: PlatformRole,
        reason: Option<String>,
    },
    Tick,
}

impl state_machine::Command for Command {
    const TICK: Self = Self::Tick;

    fn name(&self) -> &'static str {
        self.into_str()
    }

    fn action(&self) -> Action {
        match self {
            Self::Bind { .. } | Self::Revoke { .. } => Action::BindPlatformRoles,
            Self::Tick => Action::Advance,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    Bound { binding: RoleBinding },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("the role is not bound to this subject")]
    NotBound,
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotBound => Explanation::new(
                RejectionCode::NotFound,
                "The role is not bound to this subject; GET /api/v1/admin/platform-roles/bindings lists what is.",
            ),
        }
    }
}

impl Machine for RoleBindings {
    const KIND: EntityKind = EntityKind::Bindings;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match (state, command) {
            (None, Command::Bind { subject, role, reason }) => {
                Ok(Self { subject, roles: BTreeMap::new() }.bind(role, reason, ctx))
            }
            (Some(bindings), Command::Bind { subject: _, role, reason }) => Ok(bindings.bind(role, reason, ctx)),
            (Some(bindings), Command::Revoke { role, reason }) => bindings.revoke(role, reason.as_deref(), ctx),
            (None, Command::Revoke { .. }) => Err(Rejection::NotBound),
            (_, Command::Tick) => Ok(Transition::stay(Reply::Done)),
        }
    }

    fn state(&self) -> &'static str {
        if self.roles.is_empty() { "unbound" } else { "bound" }
    }

    fn keys(&self) -> IndexKeys {
        IndexKeys { owner: Some(self.subject.to_string()), sku: None, unique_name: None }
    }
}

impl RoleBindings {
    /// The roles at `version` of this entity, whose id is `id`.
    #[must_use]
    pub fn grant(&self, id: uuid::Uuid, version: i64) -> Grant {
        Grant { roles: self.roles.keys().copied().collect(), from: Precondition { entity: id, version } }
    }

    fn bind(&self, role: PlatformRole, reason: String, ctx: &TransitionContext<'_>) -> Transition<Self> {
        if let Some(binding) = self.roles.get(&role) {
            return Transition::stay(Reply::Bound { binding: binding.clone() });
        }
        let audit = self.audit(AuditAction::PlatformRolesBind, role, Some(&reason), ctx);
        let id = BindingId(ctx.new_id(0));
        let binding = RoleBinding { id, bound_by: ctx.by.to_string(), bound_at: ctx.now, reason };
        let mut next = self.clone();
        next.roles.insert(role, binding.clone());
        Transition::to(next, Reply::Bound { binding }, format!("{role} bound")).audit(audit)
    }

    fn revoke(
        &self,
        role: PlatformRole,
        reason: Option<&str>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let mut next = self.clone();
        next.roles.remove(&role).ok_or(Rejection::NotBound)?;
        let audit = self.audit(AuditAction::PlatformRolesRevoke, role, reason, ctx);
        Ok(Transition::to(next, Reply::Done, format!("{role} revoked")).audit(audit))
    }

    fn audit(
        &self,
        action: AuditAction,
        role: PlatformRole,
        reason: Option<&str>,
        ctx: &TransitionContext<'_>,
    ) -> AuditRecord {
        let own = ctx.by.is_user(&self.subject);
        let metadata = json!({ "subject": self.subject, "role": role, "reason": reason, "of_oneself": own });
        AuditRecord::new(action, EntityRef { kind: EntityKind::Bindings, id: ctx.id }, metadata)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authz::{CallerIdentity, Principal, TokenRole};
    use crate::policy::PolicyBook;
    use proptest::prelude::*;
    use uuid::Uuid;

    fn decide(
        state: Option<&RoleBindings>,
        command: Command,
        version: i64,
    ) -> Result<Transition<RoleBindings>, Rejection> {
        let policy = PolicyBook::default();
        let by = Principal::Caller(CallerIdentity::new("root", [TokenRole::Admin]));
        let (now, id, seed) = (Timestamp::UNIX_EPOCH, Uuid::from_u128(5), version.cast_unsigned().into());
        RoleBindings::decide(
            state,
            command,
            &TransitionContext { seed, id, version, ..TransitionContext::in_test(now, &policy, &by) },
        )
    }

    fn bind(subject: &str, role: PlatformRole) -> Command {
        Command::Bind { subject: subject.into(), role, reason: "hired".into() }
    }

    const fn revoke(role: PlatformRole) -> Command {
        Command::Revoke { role, reason: None }
    }

    #[test]
    fn a_role_is_bound_once_and_revoked_once() {
        let step = decide(None, bind("ann", PlatformRole::Auditor), 0).unwrap();
        assert_eq!(step.audit[0].metadata["of_oneself"], false);
        let ann = step.next.unwrap();
        assert_eq!((ann.state(), ann.keys().owner.as_deref()), ("bound", Some("ann")));
        let again = decide(Some(&ann), bind("ann", PlatformRole::Auditor), 1).unwrap();
        assert!(again.next.is_none() && again.audit.is_empty());
        assert_eq!(again.reply, Reply::Bound { binding: ann.roles[&PlatformRole::Auditor].clone() });
        let revoked = decide(Some(&ann), revoke(PlatformRole::Auditor), 1).unwrap();
        assert_eq!(revoked.audit[0].action, AuditAction::PlatformRolesRevoke);
        let nobody = revoked.next.unwrap();
        assert_eq!(nobody.state(), "unbound");
        assert_eq!(decide(Some(&nobody), revoke(PlatformRole::Auditor), 2).err(), Some(Rejection::NotBound));
        assert_eq!(decide(None, revoke(PlatformRole::Auditor), 0).err(), Some(Rejection::NotBound));
    }

    #[test]
    fn self_binding_of_a_role_is_audited_as_such() {
        let step = decide(None, bind("root", PlatformRole::InventoryOwner), 0).unwrap();
        assert_eq!(step.audit[0].metadata["of_oneself"], true);
    }

    proptest! {
        #[test]
        fn every_binding_change_is_audited_and_the_grant_matches(
            moves in prop::collection::vec((any::<bool>(), 0usize..4), 0..40)
        ) {
            let (mut bindings, mut version) = (None::<RoleBindings>, 0);
            let mut expected = std::collections::BTreeSet::new();
            for (binds, which) in moves {
                let role = PlatformRole::ALL[which];
                let command = if binds { bind("ann", role) } else { revoke(role) };
                let changes = if binds { expected.insert(role) } else { expected.remove(&role) };
                let step = decide(bindings.as_ref(), command, version);
                let (next, audits) = step.map_or((None, 0), |step| (step.next, step.audit.len()));
                prop_assert_eq!((next.is_some(), audits), (changes, usize::from(changes)));
                if let Some(next) = next {
                    let stored = serde_json::to_string(&next).unwrap();
                    prop_assert_eq!(&serde_json::from_str::<RoleBindings>(&stored).unwrap(), &next);
                    bindings = Some(next);
                    version += 1;
                }
                let granted = bindings.as_ref().map(|it| it.grant(Uuid::nil(), version).roles).unwrap_or_default();
                prop_assert_eq!(&granted, &expected);
            }
        }
    }
}
