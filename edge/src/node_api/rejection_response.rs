//! The responses to an agent whose command was rejected.

use super::NodeAskError;
use crate::http::error::{ApiError, Code};
use crate::node_api::identity::{IdentityRefusal, refuse};
use actors::AskError;
use domain::node::Rejection;
use wire::error::RECOVERABLE;

/// The answer to a node with a certificate.
pub(super) fn refused(why: NodeAskError) -> ApiError {
    match why {
        NodeAskError::Rejected(rejection) => rejected(rejection),
        NodeAskError::Asking(error) => not_answered(error),
    }
}

/// The response to a client with an enrollment token: every fault of the token, the node or both has one response, which reveals neither
/// which nodes exist nor which tokens were issued.
pub(super) fn refused_enrollment(why: NodeAskError) -> ApiError {
    match why {
        NodeAskError::Rejected(
            cause @ (Rejection::NotFound
            | Rejection::Removed
            | Rejection::TokenRefused { .. }
            | Rejection::ForeignNode { .. }),
        ) => token_refused(cause),
        NodeAskError::Rejected(rejection) => rejected(rejection),
        NodeAskError::Asking(error) => not_answered(error),
    }
}

/// The one public response to an invalid token. The cause goes to the log, as WARN.
pub(super) fn token_refused(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ApiError {
    ApiError::new(
        Code::EnrollmentRejected,
        "The enrollment token is not accepted for this node; ask an administrator for a new one.",
    )
    .because(cause)
}

fn rejected(rejection: Rejection) -> ApiError {
    match &rejection {
        // The certificate is ours and yet the node does not exist: the database was restored from before it.
        Rejection::NotFound | Rejection::ForeignNode { .. } => {
            refuse(IdentityRefusal::CertificateUnknown).because(rejection)
        }
        // Revoked, replaced, or issued after the backup from which the database was restored: a recovery decides it.
        Rejection::CertificateUnknown => {
            refuse(IdentityRefusal::CertificateUnknown).detail(RECOVERABLE, true).because(rejection)
        }
        Rejection::CertificateExpired => refuse(IdentityRefusal::CertificateExpired),
        Rejection::Removed => refuse(IdentityRefusal::NodeRemoved),
        Rejection::Fenced { allocation_id } => {
            refuse(IdentityRefusal::NodeFenced).detail("allocation_id", allocation_id.to_string())
        }
        Rejection::TaskUnknown => ApiError::not_found("task"),
        Rejection::StaleAttempt { given, current } => ApiError::new(
            Code::StaleAttempt,
            format!("The result is of attempt {given}, the task is at attempt {current}; work on that one."),
        )
        .detail("attempt", *given)
        .detail("current_attempt", *current),
        Rejection::TokenRefused { .. } => token_refused(rejection),
        // No command of an agent is rejected with these.
        Rejection::Exists
        | Rejection::WrongState { .. }
        | Rejection::InUse { .. }
        | Rejection::GpusDiffer { .. }
        | Rejection::RegionNotAllowed { .. }
        | Rejection::VersionDiffers
        | Rejection::TooManyLabels { .. }
        | Rejection::NotInOrder { .. }
        | Rejection::NotProvided
        | Rejection::MachineTaken { .. }
        | Rejection::FindingUnknown
        | Rejection::GpuUnknown { .. }
        | Rejection::GpuNotReset { .. }
        | Rejection::NotOrdered { .. }
        | Rejection::TooManyTasks { .. }
        | Rejection::TaskDoesNotWait { .. }
        | Rejection::UpdateInProgress { .. }
        | Rejection::NotSchedulable { .. }
        | Rejection::NotEnoughGpus { .. } => ApiError::internal(rejection),
    }
}

fn not_answered(error: AskError<Rejection>) -> ApiError {
    match error {
        AskError::Rejected(rejection) => rejected(rejection),
        AskError::Overloaded => ApiError::overloaded(),
        // A client that retries learns the outcome.
        AskError::InProgress
        | AskError::Parked { .. }
        | AskError::Unavailable { .. }
        | AskError::Unknown { .. }
        | AskError::NotOwner => ApiError::unavailable(error),
        AskError::AlreadyDone | AskError::Reused => {
            ApiError::new(Code::StateConflict, "Something else is recorded for this already; this request was refused.")
                .because(error)
        }
        AskError::Denied | AskError::Taken { .. } | AskError::Broken { .. } => ApiError::internal(error),
    }
}
