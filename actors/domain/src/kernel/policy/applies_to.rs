//! The subjects that a policy key applies to.

use super::{PolicyKey, PolicyScope};

/// The subject for which a key's values are resolved. A key can be set in the scopes that its readers resolve, and in no other: elsewhere
/// a value would never win.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppliesTo {
    /// The caller of a request, as the token names them: user, project, organization and plan.
    Caller,
    /// The holder of a billing account: a user, or the organization that the users' tokens name. In an organization's account no user has
    /// a value of their own. The plan is that of the holder, as the last token named it.
    AccountHolder,
    /// The recipient of a notification: a user, who may be a member of an organization, or an organization.
    Recipient,
    /// The service as a whole.
    Service,
}

impl AppliesTo {
    /// The kinds of scopes in which such a key can be set, most specific first, as the API names them.
    #[must_use]
    pub const fn scope_kinds(self) -> &'static [&'static str] {
        match self {
            Self::Caller => &["user_id", "project_id", "org_id", "plan", "global"],
            Self::AccountHolder | Self::Recipient => &["user_id", "org_id", "plan", "global"],
            Self::Service => &["global"],
        }
    }

    /// Why a key has no value in other scopes, for administrators.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Caller => "it applies to the caller of a request",
            Self::AccountHolder => "it applies to a billing account, which a user or an organization holds",
            Self::Recipient => "it applies to the recipient of a notification, which is a user or an organization",
            Self::Service => "it applies to the service as a whole",
        }
    }
}

impl PolicyKey {
    /// True where a value of this scope can win for a subject.
    #[must_use]
    pub fn can_be_set_for(self, scope: &PolicyScope) -> bool {
        self.applies_to().scope_kinds().contains(&scope.kind())
    }
}
