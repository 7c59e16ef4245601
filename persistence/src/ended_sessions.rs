//! Which errors end sessions. A server that restarts, changes its role or was set to read-only, and a pooler that has given a session to
//! another client, leave sessions that answer and fail. The error of every statement is observed ([`observe`]). One of these kinds ends the
//! session that it came from and all that were opened before it, in every pool of the process: each is closed when it is next taken.

use sqlx::postgres::{PgDatabaseError, PgSeverity};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The shortest time between two marks. While a server stays read-only, each failed write would otherwise close all sessions again.
const MARK_INTERVAL: Duration = Duration::from_millis(500);

/// A process uses one database, so all of its pools share the mark.
static LAST_END: SessionEnd = SessionEnd::new();

/// When a session last ended with such an error.
#[derive(Debug)]
struct SessionEnd(Mutex<Option<Instant>>);

impl SessionEnd {
    const fn new() -> Self {
        Self(Mutex::new(None))
    }

    fn mark(&self, now: Instant) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|at| now.duration_since(at) >= MARK_INTERVAL) {
            *last = Some(now);
        }
    }

    fn is_after(&self, opened_at: Instant) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|at| opened_at <= at)
    }
}

/// To be called with the error of every statement.
pub(crate) fn observe(error: &sqlx::Error) {
    if ends_sessions(error) && !is_lack_of_resources(error) {
        LAST_END.mark(Instant::now());
    }
}

/// Whether a session that was opened at that time has to be closed.
pub(crate) fn has_ended(opened_at: Instant) -> bool {
    LAST_END.is_after(opened_at)
}

/// Class 53. It is the statement's or the machine's: the session that met it is closed, and new ones for all the others would add to it.
fn is_lack_of_resources(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(sqlx::error::DatabaseError::code).is_some_and(|code| code.starts_with("53"))
}

/// Whether only another session can succeed.
#[expect(clippy::wildcard_enum_match_arm, reason = "not our enum: what else is there says nothing of the session")]
pub(crate) fn ends_sessions(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) => true,
        sqlx::Error::Database(error) => {
            let routine = error.try_downcast_ref::<PgDatabaseError>().and_then(PgDatabaseError::routine);
            code_ends_sessions(&error.code().unwrap_or_default(), routine)
        }
        _ => false,
    }
}

/// Whether the session of this error answers no further statement: its connection is lost, or the server has closed it (PostgreSQL, 20.8.2,
/// severities FATAL and PANIC).
#[expect(clippy::wildcard_enum_match_arm, reason = "not our enum: the session may answer after what else is there")]
pub(crate) fn has_closed_session(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) => true,
        sqlx::Error::Database(error) => {
            let severity = error.try_downcast_ref::<PgDatabaseError>().map(PgDatabaseError::severity);
            matches!(severity, Some(PgSeverity::Fatal | PgSeverity::Panic))
        }
        _ => false,
    }
}

/// By its SQLSTATE (PostgreSQL, appendix A), and the routine of the server that raised it: messages are in the server's language.
fn code_ends_sessions(code: &str, routine: Option<&str>) -> bool {
    match code {
        // A statement that was cancelled, as by its timeout, and a session that was never opened.
        "57014" | "53300" => false,
        // Prepared statements that the session does not have, or that another client of the same session has made.
        "26000" | "42P05" => true,
        // *cached plan must not change result type*: the library prepares a statement once for each session.
        "0A000" => routine == Some("RevalidateCachedQuery"),
        // Connection exceptions, invalid transaction states (25006: the server takes no writes), resources, operator intervention.
        _ => ["08", "25", "53", "57"].iter().any(|class| code.starts_with(class)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_of_a_server_that_changed_is_ended_and_that_of_a_refused_statement_stays() {
        let ending = [
            "08006", "08P01", "25006", "25P02", "25P03", "26000", "42P05", "53100", "53200", "57P01", "57P02", "57P03",
            "57P05",
        ];
        for code in ending {
            assert!(code_ends_sessions(code, None), "{code}");
        }
        for code in ["", "0A000", "22001", "23505", "40001", "40P01", "42601", "53300", "55P03", "57014"] {
            assert!(!code_ends_sessions(code, None), "{code}");
        }
        assert!(code_ends_sessions("0A000", Some("RevalidateCachedQuery")));
        assert!(!code_ends_sessions("0A000", Some("transformLockingClause")));
        assert!(ends_sessions(&sqlx::Error::Io(std::io::ErrorKind::BrokenPipe.into())));
        assert!(!ends_sessions(&sqlx::Error::RowNotFound) && !ends_sessions(&sqlx::Error::PoolTimedOut));
    }

    #[test]
    fn lost_connection_answers_no_further_statement_and_that_of_a_garbled_answer_may() {
        assert!(has_closed_session(&sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())));
        assert!(!has_closed_session(&sqlx::Error::Protocol("an unexpected message".into())));
        assert!(!has_closed_session(&sqlx::Error::PoolTimedOut));
    }

    #[test]
    fn lasting_outage_ends_all_sessions_at_a_bounded_rate() {
        let (end, begin) = (SessionEnd::new(), Instant::now());
        let at = |millis| begin + Duration::from_millis(millis);
        assert!(!end.is_after(at(0)), "nothing has failed");
        end.mark(at(100));
        assert!(end.is_after(at(0)) && end.is_after(at(100)) && !end.is_after(at(101)));
        end.mark(at(400));
        assert!(!end.is_after(at(101)), "the last mark is too recent");
        end.mark(at(600));
        assert!(end.is_after(at(101)) && !end.is_after(at(700)));
    }
}
