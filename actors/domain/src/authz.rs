//! Who may ask what. Only [`authorize`] makes a [`Permit`], and no command can be asked without one. The rules stand in one
//! table, so that they can be reviewed as text.

use crate::id::{NodeId, ServiceAccountId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// A role from the identity provider's token (decisions, *Scopes*).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    User,
    Admin,
}

/// A person or program with a verified token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// The token's `sub`.
    pub user_id: String,
    pub roles: BTreeSet<Role>,
    pub org_id: Option<String>,
    pub project_id: Option<String>,
    pub plan: Option<String>,
    /// The service account that acts for the user, where it is not the user who asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_account: Option<ServiceAccountId>,
}

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Principal {
    Caller(Caller),
    /// A node's agent, known by its client certificate or its enrollment token.
    Node(NodeId),
    /// A worker of the control plane itself, by its name in the supervision tree.
    System(String),
}

impl Principal {
    #[must_use]
    pub fn system(worker: &str) -> Self {
        Self::System(worker.to_owned())
    }

    #[must_use]
    pub fn is_admin(&self) -> bool {
        matches!(self, Self::Caller(caller) if caller.roles.contains(&Role::Admin))
    }

    /// True where the principal is the user of that id.
    #[must_use]
    pub fn is_user(&self, user_id: &str) -> bool {
        matches!(self, Self::Caller(caller) if caller.user_id == user_id)
    }
}

/// As the audit log names an actor: `user:…`, `service-account:…`, `node:…`, `system:…`.
impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Caller(Caller { service_account: Some(id), .. }) => write!(f, "service-account:{id}"),
            Self::Caller(caller) => write!(f, "user:{}", caller.user_id),
            Self::Node(id) => write!(f, "node:{id}"),
            Self::System(name) => write!(f, "system:{name}"),
        }
    }
}

/// What can be asked, at the grain at which it is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Register, change, enroll, retire and remove nodes.
    ManageNodes,
    /// Create and change catalog entries.
    ManageSkus,
    /// See every entity, the supervision tree and the cluster; restart what is parked.
    OperateRuntime,
    /// Retry or force a release that failed.
    RescueAllocations,
    /// Rent GPUs.
    Rent,
    /// Give back what one rents oneself; an administrator anybody's. The machine checks whose it is.
    Release,
    /// Keep one's own SSH keys.
    KeepKeys,
    /// Make, change and delete one's own service accounts; an administrator changes and deletes anybody's. A service account
    /// makes and changes none. The machine checks whose it is.
    KeepServiceAccounts,
    /// What a node's agent says and asks, of its own node alone. The machine checks which.
    SpeakForNode,
    /// What the control plane's workers tell the machines.
    Advance,
}

impl Action {
    pub const ALL: [Self; 10] = [
        Self::ManageNodes,
        Self::ManageSkus,
        Self::OperateRuntime,
        Self::RescueAllocations,
        Self::Rent,
        Self::Release,
        Self::KeepKeys,
        Self::KeepServiceAccounts,
        Self::SpeakForNode,
        Self::Advance,
    ];

    /// The rule of each action.
    const fn rule(self) -> Rule {
        match self {
            Self::ManageNodes | Self::ManageSkus | Self::OperateRuntime | Self::RescueAllocations => Rule::Admin,
            Self::Rent | Self::Release | Self::KeepKeys => Rule::AnyRole,
            Self::KeepServiceAccounts => Rule::Person,
            Self::SpeakForNode => Rule::Node,
            Self::Advance => Rule::System,
        }
    }
}

enum Rule {
    Admin,
    AnyRole,
    /// Any role, and no service account: what a person answers for with their own log-in.
    Person,
    Node,
    System,
}

/// The proof that [`authorize`] said yes. It names who asked and for what; commands carry it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permit {
    principal: Principal,
    action: Action,
}

impl Permit {
    #[must_use]
    pub const fn principal(&self) -> &Principal {
        &self.principal
    }

    #[must_use]
    pub const fn action(&self) -> Action {
        self.action
    }
}

/// May `principal` do `action`?
///
/// # Errors
/// [`Denied`] says which action was refused to whom.
pub fn authorize(principal: &Principal, action: Action) -> Result<Permit, Denied> {
    let allowed = match (action.rule(), principal) {
        (Rule::Admin, who) => who.is_admin(),
        (Rule::AnyRole, Principal::Caller(caller)) => !caller.roles.is_empty(),
        (Rule::Person, Principal::Caller(caller)) => !caller.roles.is_empty() && caller.service_account.is_none(),
        (Rule::Node, Principal::Node(_)) | (Rule::System, Principal::System(_)) => true,
        (Rule::AnyRole | Rule::Person | Rule::Node | Rule::System, _) => false,
    };
    if allowed {
        Ok(Permit { principal: principal.clone(), action })
    } else {
        Err(Denied { principal: principal.to_string(), action })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{principal} may not {action:?}")]
pub struct Denied {
    /// As the audit log names an actor.
    pub principal: String,
    pub action: Action,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fmt::Write as _;

    fn caller(roles: &[Role]) -> Principal {
        Principal::Caller(Caller {
            user_id: "u".into(),
            roles: roles.iter().copied().collect(),
            org_id: None,
            project_id: None,
            plan: None,
            service_account: None,
        })
    }

    fn account(roles: &[Role]) -> Principal {
        let Principal::Caller(owner) = caller(roles) else { unreachable!() };
        let service_account = Some(ServiceAccountId(uuid::Uuid::nil()));
        Principal::Caller(Caller { service_account, ..owner })
    }

    #[test]
    fn a_service_account_acts_under_its_own_name_for_its_owner() {
        let account = account(&[Role::User]);
        assert_eq!(account.to_string(), "service-account:00000000-0000-0000-0000-000000000000");
        assert!(account.is_user("u"));
    }

    #[test]
    fn the_permission_matrix_is_as_reviewed() {
        let who = [
            ("nobody", caller(&[])),
            ("user", caller(&[Role::User])),
            ("admin", caller(&[Role::Admin])),
            ("user's account", account(&[Role::User])),
            ("admin's account", account(&[Role::Admin])),
            ("node", Principal::Node(NodeId(uuid::Uuid::nil()))),
            ("system", Principal::system("x")),
        ];
        let mut table = String::new();
        for action in Action::ALL {
            let allowed: Vec<_> =
                who.iter().filter(|(_, p)| authorize(p, action).is_ok()).map(|(name, _)| *name).collect();
            writeln!(table, "{action:?}: {}", allowed.join(", ")).unwrap();
        }
        insta::assert_snapshot!(table, @r"
        ManageNodes: admin, admin's account
        ManageSkus: admin, admin's account
        OperateRuntime: admin, admin's account
        RescueAllocations: admin, admin's account
        Rent: user, admin, user's account, admin's account
        Release: user, admin, user's account, admin's account
        KeepKeys: user, admin, user's account, admin's account
        KeepServiceAccounts: user, admin
        SpeakForNode: node
        Advance: system
        ");
    }
}
