//! The holder of a billing account: a user or an organization.

use crate::id::{OrgId, UserId};
use crate::policy::Scopes;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The owner of an account.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Holder {
    User(UserId),
    Org(OrgId),
}

impl Holder {
    /// The holder who pays for this user's allocations: the organization, where the token names one.
    #[must_use]
    pub fn paying_for(user_id: &UserId, org_id: Option<&OrgId>) -> Self {
        org_id.map_or_else(|| Self::User(user_id.clone()), |org| Self::Org(org.clone()))
    }

    /// True where this user is the holder.
    #[must_use]
    pub fn is_user(&self, user_id: &UserId) -> bool {
        matches!(self, Self::User(id) if id == user_id)
    }

    /// The organization, where it is the holder.
    #[must_use]
    pub fn org_id(&self) -> Option<&OrgId> {
        match self {
            Self::User(_) => None,
            Self::Org(id) => Some(id),
        }
    }

    /// The scopes in which policies of the holder are resolved, with this plan.
    #[must_use]
    pub fn scopes(&self, plan: Option<&str>) -> Scopes {
        let scopes = Scopes { plan: plan.map(str::to_owned), ..Scopes::default() };
        match self {
            Self::User(id) => Scopes { user_id: Some(id.clone()), ..scopes },
            Self::Org(id) => Scopes { org_id: Some(id.clone()), ..scopes },
        }
    }
}

/// The holder's one name, from which the account's id follows: `user:ann`, `org:acme`.
impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(id) => write!(f, "user:{id}"),
            Self::Org(id) => write!(f, "org:{id}"),
        }
    }
}
