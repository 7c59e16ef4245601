//! Authorization. Only [`authorize`] makes a [`Permit`], and no command can be sent without one. The rules are one table, so that they can
//! be reviewed as text.

use crate::id::{BrowserSessionId, NodeId, OrgId, ProjectId, ServiceAccountId, UserId};
use crate::precondition::Precondition;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// A role from the identity provider's token (decisions 3, *Scopes*).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenRole {
    User,
    Admin,
}

/// A role that is bound to a subject here, beside those of the token (decisions 3, *Scopes*).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum PlatformRole {
    PlatformOperations,
    InventoryOwner,
    BillingOperations,
    Auditor,
}

impl PlatformRole {
    pub const ALL: [Self; 4] = [Self::PlatformOperations, Self::InventoryOwner, Self::BillingOperations, Self::Auditor];

    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl fmt::Display for PlatformRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The platform roles of a subject as read from Postgres for this request. A command in one of them commits only if the bindings are still
/// at the version that was read (I6).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    pub roles: BTreeSet<PlatformRole>,
    pub from: Precondition,
}

/// A person or program with a verified token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallerIdentity {
    /// The token's `sub`.
    pub user_id: UserId,
    pub roles: BTreeSet<TokenRole>,
    pub org_id: Option<OrgId>,
    pub project_id: Option<ProjectId>,
    pub plan: Option<String>,
    /// The platform roles, where the request needed one.
    #[serde(default)]
    pub grant: Option<Grant>,
    /// The service account that acts for the user, where the caller is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_account: Option<ServiceAccountId>,
    /// The browser session by whose cookie the caller was authenticated, where it was by one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub browser_session: Option<BrowserSessionId>,
}

impl CallerIdentity {
    /// A person with these roles of the token, of no organization and without a platform role.
    pub fn new(user_id: impl Into<UserId>, roles: impl IntoIterator<Item = TokenRole>) -> Self {
        Self {
            user_id: user_id.into(),
            roles: roles.into_iter().collect(),
            org_id: None,
            project_id: None,
            plan: None,
            grant: None,
            service_account: None,
            browser_session: None,
        }
    }
}

/// The user to whom something belongs, with the scopes of their token in which its policies are resolved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceOwner {
    pub user_id: UserId,
    pub org_id: Option<OrgId>,
    pub project_id: Option<ProjectId>,
    pub plan: Option<String>,
}

impl From<&CallerIdentity> for ResourceOwner {
    fn from(caller: &CallerIdentity) -> Self {
        Self {
            user_id: caller.user_id.clone(),
            org_id: caller.org_id.clone(),
            project_id: caller.project_id.clone(),
            plan: caller.plan.clone(),
        }
    }
}

/// Who acts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Principal {
    Caller(CallerIdentity),
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
        matches!(self, Self::Caller(caller) if caller.roles.contains(&TokenRole::Admin))
    }

    /// True where the role is bound to the caller, and the identity provider still gives the caller a role. Platform roles are for
    /// persons: no service account acts in one, so that one person cannot give two approvals.
    #[must_use]
    pub fn holds(&self, role: PlatformRole) -> bool {
        let granted = |caller: &CallerIdentity| caller.grant.as_ref().is_some_and(|grant| grant.roles.contains(&role));
        matches!(self, Self::Caller(caller)
            if !caller.roles.is_empty() && caller.service_account.is_none() && granted(caller))
    }

    /// The precondition of a command by this principal: the role bindings, where only they allow the action.
    #[must_use]
    pub fn requires(&self, action: Action) -> Option<Precondition> {
        let Self::Caller(caller) = self else { return None };
        let without = Self::Caller(CallerIdentity { grant: None, ..caller.clone() });
        if authorize(&without, action).is_ok() { None } else { caller.grant.as_ref().map(|grant| grant.from) }
    }

    /// True where the principal is the user of that id.
    #[must_use]
    pub fn is_user(&self, user_id: &UserId) -> bool {
        matches!(self, Self::Caller(caller) if caller.user_id == *user_id)
    }
}

/// As the audit log names an actor: `user:…`, `service-account:…`, `node:…`, `system:…`.
impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Caller(CallerIdentity { service_account: Some(id), .. }) => write!(f, "service-account:{id}"),
            Self::Caller(caller) => write!(f, "user:{}", caller.user_id),
            Self::Node(id) => write!(f, "node:{id}"),
            Self::System(name) => write!(f, "system:{name}"),
        }
    }
}

/// The actions that are authorized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[derive(strum::VariantArray, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum Action {
    /// Register, change, enroll, retire and remove nodes.
    ManageNodes,
    /// Create and change catalog entries.
    ManageSkus,
    /// See the whole catalog, with the changes that wait for an approval.
    SeeSkus,
    /// Approve changes of a catalog entry's status. The state machine requires two people, one in each role.
    ApproveSkus,
    /// Bind platform roles to subjects, and revoke them.
    BindPlatformRoles,
    /// Read the audit log.
    ReadAudit,
    /// See every entity, the supervision tree and the cluster; restart what is parked.
    OperateRuntime,
    /// Retry or force a release that failed.
    RescueAllocations,
    /// Set policy values.
    ManagePolicy,
    /// See the states of the service's own keys, and rotate them.
    RotateKeys,
    /// Request allocations.
    Rent,
    /// Release one's own allocations; an administrator anyone's. The state machine checks the owner.
    Release,
    /// Name and label one's own allocations; an administrator anyone's. The state machine checks the owner.
    ReviseAllocations,
    /// Open terminals on one's own allocations, and connect to them. A service account opens none. The state machine checks the owner.
    OpenTerminals,
    /// See all terminal sessions, and close them.
    OperateTerminals,
    /// Read the recordings of one's own terminal sessions; an administrator anyone's. A service account reads none. The state machine
    /// checks the owner.
    ReadRecordings,
    /// See all billing accounts and their ledgers.
    SeeBilling,
    /// Open billing accounts, credit and debit them with a reason.
    AdjustBilling,
    /// Retry or dismiss events of the payment processor, and end the reviews of payments.
    SettleProcessorEvents,
    /// Announce something to all connected clients.
    Announce,
    /// Pay into one's own account, or one's organization's.
    Pay,
    /// Request a refund of one's own payment. A service account requests none. The state machine checks the payer.
    AskMoneyBack,
    /// Manage one's own SSH keys.
    KeepKeys,
    /// Create, change and delete one's own service accounts; an administrator deletes anyone's, and their keys, and makes no key for others. A
    /// service account creates and changes none. The state machine checks the owner.
    KeepServiceAccounts,
    /// Log in to the web console, see one's own logins and end them. A service account has none. The state machine checks the owner.
    KeepBrowserSessions,
    /// See all logins to the web console, and end them.
    OperateBrowserSessions,
    /// Manage one's own notification endpoints, and one's organization's; an administrator anyone's. The state machine checks the owner.
    KeepNotificationEndpoints,
    /// Commands of a node's agent, for its own node alone. The state machine checks which.
    SpeakForNode,
    /// Commands of the control plane's workers.
    Advance,
}

impl Action {
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// Its name in the API.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }

    /// The rule of each action.
    const fn rule(self) -> Rule {
        use PlatformRole::{Auditor, BillingOperations, InventoryOwner, PlatformOperations};
        match self {
            Self::ManageNodes
            | Self::ManageSkus
            | Self::OperateRuntime
            | Self::RescueAllocations
            | Self::OperateTerminals
            | Self::OperateBrowserSessions
            | Self::Announce
            | Self::ManagePolicy => Rule::Admin,
            Self::BindPlatformRoles | Self::RotateKeys => Rule::AdminInPerson,
            Self::SeeSkus => Rule::AdminOr(&[PlatformOperations, InventoryOwner]),
            Self::ApproveSkus => Rule::OneOf(&[PlatformOperations, InventoryOwner]),
            Self::SeeBilling => Rule::AdminOr(&[BillingOperations]),
            Self::AdjustBilling | Self::SettleProcessorEvents => Rule::OneOf(&[BillingOperations]),
            Self::ReadAudit => Rule::AdminOr(&[Auditor]),
            Self::Rent
            | Self::Release
            | Self::ReviseAllocations
            | Self::Pay
            | Self::KeepKeys
            | Self::KeepNotificationEndpoints => Rule::AnyRole,
            Self::KeepServiceAccounts
            | Self::KeepBrowserSessions
            | Self::OpenTerminals
            | Self::ReadRecordings
            | Self::AskMoneyBack => Rule::Person,
            Self::SpeakForNode => Rule::Node,
            Self::Advance => Rule::System,
        }
    }

    /// True where being an administrator is enough.
    #[must_use]
    pub const fn admits_administrators(self) -> bool {
        match self.rule() {
            Rule::Admin | Rule::AdminInPerson | Rule::AdminOr(_) | Rule::AnyRole => true,
            Rule::OneOf(_) | Rule::Person | Rule::Node | Rule::System => false,
        }
    }

    /// The platform roles each of which allows the action.
    #[must_use]
    pub const fn platform_roles(self) -> &'static [PlatformRole] {
        match self.rule() {
            Rule::AdminOr(roles) | Rule::OneOf(roles) => roles,
            Rule::Admin | Rule::AdminInPerson | Rule::AnyRole | Rule::Person | Rule::Node | Rule::System => &[],
        }
    }
}

enum Rule {
    Admin,
    /// An administrator, and no service account.
    AdminInPerson,
    /// An administrator, or a caller in one of these platform roles.
    AdminOr(&'static [PlatformRole]),
    /// A caller in one of these platform roles; being an administrator is not enough.
    OneOf(&'static [PlatformRole]),
    AnyRole,
    /// Any role, and no service account: a person acts with their own login.
    Person,
    Node,
    System,
}

/// The proof that [`authorize`] allowed the action. It names the principal and the action; commands carry it.
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
/// [`PermissionDenied`] names the principal and the refused action.
pub fn authorize(principal: &Principal, action: Action) -> Result<Permit, PermissionDenied> {
    let allowed = match (action.rule(), principal) {
        (Rule::Admin, who) => who.is_admin(),
        (Rule::AdminInPerson, Principal::Caller(caller)) => principal.is_admin() && caller.service_account.is_none(),
        (Rule::AdminOr(roles), who) => who.is_admin() || roles.iter().any(|role| who.holds(*role)),
        (Rule::OneOf(roles), who) => roles.iter().any(|role| who.holds(*role)),
        (Rule::AnyRole, Principal::Caller(caller)) => !caller.roles.is_empty(),
        (Rule::Person, Principal::Caller(caller)) => !caller.roles.is_empty() && caller.service_account.is_none(),
        (Rule::Node, Principal::Node(_)) | (Rule::System, Principal::System(_)) => true,
        (Rule::AdminInPerson | Rule::AnyRole | Rule::Person | Rule::Node | Rule::System, _) => false,
    };
    if allowed {
        Ok(Permit { principal: principal.clone(), action })
    } else {
        Err(PermissionDenied { principal: principal.to_string(), action })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{principal} may not {action:?}")]
pub struct PermissionDenied {
    /// As the audit log names an actor.
    pub principal: String,
    pub action: Action,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write as _;
    use uuid::Uuid;

    fn caller(roles: &[TokenRole], platform: &[PlatformRole]) -> Principal {
        let precondition = Precondition { entity: Uuid::from_u128(1), version: 3 };
        Principal::Caller(CallerIdentity {
            grant: Some(Grant { roles: platform.iter().copied().collect(), from: precondition }),
            ..CallerIdentity::new("u", roles.iter().copied())
        })
    }

    fn account(roles: &[TokenRole]) -> Principal {
        let Principal::Caller(owner) = caller(roles, &PlatformRole::ALL) else { unreachable!() };
        let service_account = Some(ServiceAccountId(Uuid::nil()));
        Principal::Caller(CallerIdentity { service_account, ..owner })
    }

    #[test]
    fn a_service_account_acts_under_its_own_name_for_its_owner() {
        let account = account(&[TokenRole::User]);
        assert_eq!(account.to_string(), "service-account:00000000-0000-0000-0000-000000000000");
        assert!(account.is_user(&"u".into()));
    }

    #[test]
    fn the_permission_matrix_is_as_reviewed() {
        let mut who = vec![
            ("nobody", caller(&[], &PlatformRole::ALL)),
            ("user", caller(&[TokenRole::User], &[])),
            ("admin", caller(&[TokenRole::Admin], &[])),
        ];
        who.extend(PlatformRole::ALL.map(|role| (role.name(), caller(&[TokenRole::User], &[role]))));
        who.push(("user's account", account(&[TokenRole::User])));
        who.push(("admin's account", account(&[TokenRole::Admin])));
        who.push(("node", Principal::Node(NodeId(Uuid::nil()))));
        who.push(("system", Principal::system("x")));
        let width = Action::ALL.iter().map(|action| format!("{action:?}").len()).max().unwrap();
        let names: Vec<_> = who.iter().map(|(name, _)| *name).collect();
        let mut table = format!("{:width$}  {}\n", "", names.join("  "));
        for &action in Action::ALL {
            let cell = |(name, principal): &(&str, Principal)| {
                let mark = if authorize(principal, action).is_ok() { "yes" } else { "-" };
                format!("{mark:width$}", width = name.len())
            };
            let cells: Vec<_> = who.iter().map(cell).collect();
            writeln!(table, "{:width$}  {}", format!("{action:?}"), cells.join("  ").trim_end()).unwrap();
        }
        insta::assert_snapshot!("permission_matrix", table);
    }

    #[test]
    fn action_allowed_only_by_a_platform_role_requires_its_bindings() {
        let all = caller(&[TokenRole::Admin], &PlatformRole::ALL);
        let operator = caller(&[TokenRole::User], &[PlatformRole::PlatformOperations]);
        let precondition = Some(Precondition { entity: Uuid::from_u128(1), version: 3 });
        assert_eq!(all.requires(Action::ApproveSkus), precondition);
        assert_eq!(all.requires(Action::SeeSkus), None, "an administrator may without");
        assert_eq!(operator.requires(Action::SeeSkus), precondition);
        assert_eq!(operator.requires(Action::Rent), None);
        assert_eq!(Principal::system("x").requires(Action::Advance), None);
    }

    #[test]
    fn caller_of_the_previous_release_is_read() {
        let before = r#"{"caller":{"user_id":"u","roles":["admin"],"org_id":null,"project_id":null,"plan":null}}"#;
        assert!(serde_json::from_str::<Principal>(before).unwrap().is_admin());
    }
}
