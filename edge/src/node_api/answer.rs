//! What an agent is told when the node's machine says no.

use super::Refused;
use crate::error::{ApiError, Code};
use crate::identity::{Reason, refuse};
use actors::AskError;
use domain::node::Rejection;

/// The answer to a node with a certificate.
pub(super) fn refused(why: Refused) -> ApiError {
    match why {
        Refused::Rejected(rejection) => rejected(rejection),
        Refused::Asking(error) => not_asked(error),
    }
}

/// The answer to one who shows an enrollment token: whatever does not hold of the token, the node or both is one answer, so that
/// nobody learns from it which nodes there are or which tokens there were.
pub(super) fn refused_enrollment(why: Refused) -> ApiError {
    match why {
        Refused::Rejected(
            cause @ (Rejection::NotFound
            | Rejection::Removed
            | Rejection::TokenRefused { .. }
            | Rejection::ForeignNode { .. }),
        ) => token_refused(cause),
        Refused::Rejected(rejection) => rejected(rejection),
        Refused::Asking(error) => not_asked(error),
    }
}

/// The one public answer to a token that does not hold. The cause goes to the log, as WARN.
pub(super) fn token_refused(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ApiError {
    ApiError::new(
        Code::EnrollmentRejected,
        "The enrollment token is not accepted for this node; ask an administrator for a new one.",
    )
    .because(cause)
}

fn rejected(rejection: Rejection) -> ApiError {
    match &rejection {
        // Its certificate is ours and yet there is no such node: the database has forgotten it.
        Rejection::NotFound | Rejection::CertificateUnknown | Rejection::ForeignNode { .. } => {
            refuse(Reason::CertificateUnknown).because(rejection)
        }
        Rejection::CertificateExpired => refuse(Reason::CertificateExpired),
        Rejection::Removed => refuse(Reason::NodeRemoved),
        Rejection::Fenced { allocation_id } => {
            refuse(Reason::NodeFenced).detail("allocation_id", allocation_id.to_string())
        }
        Rejection::TaskUnknown => ApiError::not_found("task"),
        Rejection::StaleAttempt { given, current } => ApiError::new(
            Code::StaleAttempt,
            format!("The result is of attempt {given}, the task is at attempt {current}; work on that one."),
        )
        .detail("attempt", *given)
        .detail("current_attempt", *current),
        Rejection::TokenRefused { .. } => token_refused(rejection),
        // Nothing that an agent asks is answered so.
        Rejection::Exists
        | Rejection::WrongState { .. }
        | Rejection::InUse { .. }
        | Rejection::GpusDiffer { .. }
        | Rejection::RegionNotAllowed { .. }
        | Rejection::VersionDiffers
        | Rejection::TooManyLabels { .. }
        | Rejection::NotInOrder { .. }
        | Rejection::NotOrdered { .. }
        | Rejection::TooManyTasks { .. }
        | Rejection::TaskDoesNotWait { .. }
        | Rejection::NotSchedulable { .. }
        | Rejection::NotEnoughGpus { .. } => ApiError::internal(rejection),
    }
}

fn not_asked(error: AskError<Rejection>) -> ApiError {
    match error {
        AskError::Rejected(rejection) => rejected(rejection),
        AskError::Overloaded => ApiError::overloaded(),
        // Whoever sends it again finds out what became of it.
        AskError::InProgress
        | AskError::Parked { .. }
        | AskError::Unavailable { .. }
        | AskError::Unknown { .. }
        | AskError::NotOwner => ApiError::unavailable(error),
        AskError::AlreadyDone | AskError::Reused => ApiError::new(
            Code::StateConflict,
            "Something else was recorded for this before; it stands, and this was not taken.",
        )
        .because(error),
        AskError::Denied | AskError::Taken { .. } | AskError::Broken { .. } => ApiError::internal(error),
    }
}
