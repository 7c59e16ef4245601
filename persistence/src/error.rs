//! Errors of statements outside the committer.

use crate::ended_sessions;
use crate::outage_log;
use crate::snapshot_seal::SealRefusal;

/// A statement failed. `doing` is for the operator; the edge chooses what a caller of the API sees.
#[derive(Debug, thiserror::Error)]
#[error("the store failed while {doing}")]
pub struct StoreError {
    pub doing: &'static str,
    #[source]
    pub source: sqlx::Error,
}

impl StoreError {
    /// True where the database answered that the statement exceeded its timeout.
    #[must_use]
    pub fn took_too_long(&self) -> bool {
        const QUERY_CANCELED: &str = "57014";
        self.source.as_database_error().and_then(sqlx::error::DatabaseError::code).as_deref() == Some(QUERY_CANCELED)
    }

    /// Why a stored snapshot is refused, where that is the error.
    #[must_use]
    #[expect(clippy::wildcard_enum_match_arm, reason = "not our enum: a refusal has one form there")]
    pub fn seal_refused(&self) -> Option<SealRefusal> {
        match &self.source {
            sqlx::Error::Decode(source) => source.downcast_ref().copied(),
            _ => None,
        }
    }

    /// True where the database was unreachable or overloaded: a retry may help.
    #[must_use]
    #[expect(clippy::wildcard_enum_match_arm, reason = "not our enum: whatever is new there is a defect")]
    pub fn is_unavailable(&self) -> bool {
        match &self.source {
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::Protocol(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed => true,
            sqlx::Error::Database(error) => {
                // Rollbacks, too many connections, statements that took too long, locks that are not
                // available. A session that the server does not open has no statement to blame, whatever the reason.
                let code = error.code().unwrap_or_default();
                ended_sessions::ends_sessions(&self.source)
                    || ended_sessions::has_closed_session(&self.source)
                    || ["40", "53300", "57014", "55P03"].iter().any(|class| code.starts_with(class))
            }
            _ => false,
        }
    }
}

/// Adds the operation that failed. Every error of a statement passes here, so that one that ends sessions is observed in one place.
pub(crate) trait OperationContext<T> {
    fn doing(self, doing: &'static str) -> Result<T, StoreError>;
}

impl<T> OperationContext<T> for Result<T, sqlx::Error> {
    fn doing(self, doing: &'static str) -> Result<T, StoreError> {
        self.map_err(|source| {
            ended_sessions::observe(&source);
            outage_log::statement_failed(doing, &source);
            StoreError { doing, source }
        })
    }
}

/// A row that this release cannot decode.
pub(crate) fn damaged(error: impl std::error::Error + Send + Sync + 'static) -> sqlx::Error {
    sqlx::Error::Decode(Box::new(error))
}
