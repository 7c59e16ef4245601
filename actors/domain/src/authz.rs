//! Who may ask what. Only [`authorize`] makes a [`Permit`], and no command can be asked without one. The rules stand in one
//! table, so that they can be reviewed as text.

use crate::id::NodeId;
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

/// As the audit log names an actor: `user:…`, `node:…`, `system:…`.
impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
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
    /// Set policy values.
    ManagePolicy,
    /// Rent GPUs.
    Rent,
    /// Give back what one rents oneself; an administrator anybody's. The machine checks whose it is.
    Release,
    /// Keep one's own SSH keys.
    KeepKeys,
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
        Self::ManagePolicy,
        Self::Rent,
        Self::Release,
        Self::KeepKeys,
        Self::SpeakForNode,
        Self::Advance,
    ];

    /// The rule of each action.
    const fn rule(self) -> Rule {
        match self {
            Self::ManageNodes
            | Self::ManageSkus
            | Self::OperateRuntime
            | Self::RescueAllocations
            | Self::ManagePolicy => Rule::Admin,
            Self::Rent | Self::Release | Self::KeepKeys => Rule::AnyRole,
            Self::SpeakForNode => Rule::Node,
            Self::Advance => Rule::System,
        }
    }
}

enum Rule {
    Admin,
    AnyRole,
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
        (Rule::Node, Principal::Node(_)) | (Rule::System, Principal::System(_)) => true,
        (Rule::AnyRole | Rule::Node | Rule::System, _) => false,
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
        })
    }

    #[test]
    fn the_permission_matrix_is_as_reviewed() {
        let who = [
            ("nobody", caller(&[])),
            ("user", caller(&[Role::User])),
            ("admin", caller(&[Role::Admin])),
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
        ManageNodes: admin
        ManageSkus: admin
        OperateRuntime: admin
        RescueAllocations: admin
        ManagePolicy: admin
        Rent: user, admin
        Release: user, admin
        KeepKeys: user, admin
        SpeakForNode: node
        Advance: system
        ");
    }
}
