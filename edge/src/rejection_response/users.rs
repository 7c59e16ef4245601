//! Rejections about users, their resources and their permissions: tenants, service accounts, bindings, notification endpoints,
//! announcements.

use domain::policy::PolicyKey;
use domain::{announcement, notification_endpoint, role_bindings, service_account, tenant};

use super::{Explain, conflict, invalid, limited_by, unexpected};
use crate::error::{ApiError, Code};

impl Explain for tenant::Rejection {
    fn explain(self) -> ApiError {
        use tenant::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("SSH key"),
            R::KeyExists { existing } => {
                conflict(format!("You have registered this key already, as {existing}; use that one."))
                    .detail("ssh_key_id", existing.to_string())
            }
            R::TooManyKeys { limit } => limited_by(
                conflict(format!("You have {limit} keys, which is the most; delete one first.")),
                PolicyKey::SshKeyMaxPerUser,
                limit,
            ),
            R::TooManyServiceAccounts { limit } => limited_by(
                conflict(format!(
                    "You may have {limit} service accounts; delete one that nothing uses, then try again."
                )),
                PolicyKey::AuthServiceAccountsPerUser,
                limit,
            ),
            R::TooManyTerminals { limit } => limited_by(
                conflict(format!(
                    "The allocation has {limit} terminal sessions, which is the most; end one, or connect to it with `session_id`."
                )),
                PolicyKey::TerminalSessionsPerAllocation,
                limit,
            ),
            rejection @ R::OverQuota { .. } => unexpected(&rejection),
        }
    }
}

impl Explain for role_bindings::Rejection {
    fn explain(self) -> ApiError {
        match self {
            Self::NotBound => ApiError::new(
                Code::NotFound,
                "The role is not bound to this subject; GET /api/v1/admin/platform-roles/bindings lists what is.",
            ),
        }
    }
}

impl Explain for service_account::Rejection {
    fn explain(self) -> ApiError {
        use service_account::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("service account"),
            R::KeyNotFound => ApiError::not_found("key of this service account"),
            R::Exists => conflict("The service account exists already."),
            R::RolesNotHeld => ApiError::forbidden(
                "A service account gets no role that you do not have yourself; ask for fewer in `roles`.",
            )
            .detail("field", "roles"),
            R::TooManyKeys { limit } => limited_by(
                conflict(format!(
                    "The service account has {limit} keys, which is the most; revoke one that nothing uses."
                )),
                PolicyKey::AuthServiceAccountKeysMax,
                limit,
            ),
        }
    }
}

impl Explain for notification_endpoint::Rejection {
    fn explain(self) -> ApiError {
        use notification_endpoint::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("notification endpoint"),
            R::Exists => conflict("The notification endpoint exists already."),
            R::TooMany { limit } => limited_by(
                conflict(format!("You have {limit} notification endpoints, which are the most; delete one first.")),
                PolicyKey::NotificationEndpoints,
                limit,
            ),
            R::PlaceTaken => conflict(
                "Another notification endpoint was made at the same moment; ask again with a new Idempotency-Key.",
            ),
            R::NotAWebhook => invalid("An e-mail address has no URL and no secret; leave `url` out.".to_owned(), "url"),
            R::IsDisabled => conflict("The notification endpoint is disabled; enable it first (\"enabled\": true)."),
            R::NoSuchLetter => ApiError::not_found("dead letter of this notification endpoint"),
        }
    }
}

impl Explain for announcement::Rejection {
    fn explain(self) -> ApiError {
        use announcement::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("announcement"),
            R::Exists => conflict("This was announced already."),
        }
    }
}
