//! Log lines about an outage, bounded: one at its beginning, one for each further cause, then one a minute, and one at its end.

pub use failures::chain;

use crate::ended_sessions;
use std::error::Error;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two lines about one outage.
const REPEAT_INTERVAL: Duration = Duration::from_secs(60);
/// Between the lines of two outages.
const MIN_INTERVAL: Duration = Duration::from_secs(10);

/// The causes of one outage that have a line of their own. The first failure is often a consequence: the server ended the sessions, and then
/// takes no writes.
const MAX_CAUSES: usize = 3;

/// The database, as the statements of this process find it.
static DATABASE: Mutex<OutageLog> = Mutex::new(OutageLog::new());

/// Which lines about one thing are due.
#[derive(Debug, Default)]
pub struct OutageLog {
    began: Option<Instant>,
    /// Whether this outage has had a line.
    is_logged: bool,
    logged_at: Option<Instant>,
    failures: u64,
    /// Those of the lines of this outage.
    causes: Vec<String>,
}

impl OutageLog {
    #[must_use]
    pub const fn new() -> Self {
        Self { began: None, is_logged: false, logged_at: None, failures: 0, causes: Vec::new() }
    }

    /// A failure. Returns the number of this outage's failures so far where a line is due.
    pub fn failed(&mut self, now: Instant) -> Option<u64> {
        self.failed_by(now, "")
    }

    /// The same, by the kind of its cause. A line is due for each of the first kinds of an outage.
    fn failed_by(&mut self, now: Instant, cause: &str) -> Option<u64> {
        self.began.get_or_insert(now);
        self.failures += 1;
        let is_new = self.causes.len() < MAX_CAUSES && !self.causes.iter().any(|known| known == cause);
        let interval = if self.is_logged { REPEAT_INTERVAL } else { MIN_INTERVAL };
        let is_early = self.logged_at.is_some_and(|at| now.duration_since(at) < interval);
        if is_early && !(self.is_logged && is_new) {
            return None;
        }
        if is_new {
            self.causes.push(cause.to_owned());
        }
        (self.is_logged, self.logged_at) = (true, Some(now));
        Some(self.failures)
    }

    #[must_use]
    pub const fn is_ongoing(&self) -> bool {
        self.began.is_some()
    }

    /// A success. Returns the length of the outage that it ends, where that has had a line.
    pub fn ended(&mut self, now: Instant) -> Option<Duration> {
        let began = self.began.take()?;
        self.failures = 0;
        self.causes.clear();
        std::mem::take(&mut self.is_logged).then(|| now.duration_since(began))
    }
}

/// The log of one thing that a worker does again and again: each of the first causes of an outage has a line with its sources, the outage one a
/// minute, and its end one.
#[derive(Debug)]
pub struct RetryLog {
    doing: &'static str,
    log: Mutex<OutageLog>,
}

impl RetryLog {
    /// Of what completes the sentence *could not …*.
    #[must_use]
    pub const fn new(doing: &'static str) -> Self {
        Self { doing, log: Mutex::new(OutageLog::new()) }
    }

    /// Logs what became of an attempt. Returns its result; `None` where it failed.
    pub fn observe<T>(&self, outcome: Result<T, impl Into<Box<dyn Error + Send + Sync>>>) -> Option<T> {
        match outcome {
            Ok(result) => {
                self.succeeded();
                Some(result)
            }
            Err(error) => {
                self.failed(&chain(error.into().as_ref()));
                None
            }
        }
    }

    /// Logs an attempt that failed for this cause.
    pub fn failed(&self, cause: &str) {
        let due = self.log.lock().unwrap_or_else(PoisonError::into_inner).failed_by(Instant::now(), cause);
        if let Some(failures) = due {
            tracing::warn!(error = cause, failures, "could not {}", self.doing);
        }
    }

    /// Logs the end of an outage.
    pub fn succeeded(&self) {
        let ended = self.log.lock().unwrap_or_else(PoisonError::into_inner).ended(Instant::now());
        if let Some(lasted) = ended {
            tracing::info!(seconds = lasted.as_secs_f64(), "can {} again", self.doing);
        }
    }
}

/// Logs a statement that failed because the database does not serve.
pub(crate) fn statement_failed(doing: &'static str, error: &sqlx::Error) {
    if !ended_sessions::ends_sessions(error) && !matches!(error, sqlx::Error::Tls(_) | sqlx::Error::PoolTimedOut) {
        return;
    }
    let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code).unwrap_or_default();
    let due = DATABASE.lock().unwrap_or_else(PoisonError::into_inner).failed_by(Instant::now(), &code);
    if let Some(failures) = due {
        tracing::warn!(error = chain(error), failures, "the database does not serve: {doing} failed");
    }
}

/// Logs the end of an outage. To be called where the database has committed a write.
pub(crate) fn write_succeeded() {
    let ended = DATABASE.lock().unwrap_or_else(PoisonError::into_inner).ended(Instant::now());
    if let Some(lasted) = ended {
        tracing::info!(seconds = lasted.as_secs_f64(), "the database serves again");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_host::CapturedLog;

    #[test]
    fn outage_has_a_line_at_its_beginning_one_a_minute_and_one_at_its_end() {
        let (mut log, begin) = (OutageLog::new(), Instant::now());
        let lines: Vec<_> = (0..150).filter_map(|second| log.failed(begin + Duration::from_secs(second))).collect();
        assert_eq!(lines, [1, 61, 121], "their numbers of failures");
        assert_eq!(log.ended(begin + Duration::from_secs(150)), Some(Duration::from_secs(150)));
        assert_eq!(log.ended(begin + Duration::from_secs(151)), None);
    }

    #[test]
    fn each_of_the_first_causes_of_an_outage_has_a_line_at_once() {
        let (mut log, now) = (OutageLog::new(), Instant::now());
        let causes = ["57P01", "57P01", "25006", "57P01", "25006", "", "08006"];
        let lines: Vec<_> = causes.iter().filter_map(|cause| log.failed_by(now, cause)).collect();
        assert_eq!(lines, [1, 3, 6], "their numbers of failures");
    }

    #[test]
    fn outages_that_follow_each_other_have_a_line_each_ten_seconds_at_most() {
        let (mut log, begin) = (OutageLog::new(), Instant::now());
        let mut lines = 0;
        for second in 0..100 {
            let now = begin + Duration::from_secs(second);
            lines += usize::from(log.failed(now).is_some());
            let _ = log.ended(now);
        }
        assert_eq!(lines, 10);
    }

    #[test]
    fn worker_that_fails_in_each_of_its_rounds_has_a_line_for_each_cause_with_its_sources_and_one_at_the_end() {
        let (log, logging) = CapturedLog::start();
        let retries = RetryLog::new("read the deadlines");
        let failure = |cause: &str| {
            let source = sqlx::Error::Io(std::io::Error::other(cause.to_owned()));
            Err::<(), _>(crate::StoreError { doing: "reading", source })
        };
        for _ in 0..100 {
            assert_eq!(retries.observe(failure("the network is down")), None);
        }
        retries.observe(failure("the host is unknown"));
        assert_eq!(retries.observe(Ok::<_, crate::StoreError>(7)), Some(7));
        assert_eq!(retries.observe(Ok::<_, crate::StoreError>(8)), Some(8));
        drop(logging);
        let lines = log.lines();
        assert_eq!(lines.len(), 3, "{lines:#?}");
        for (line, cause) in lines.iter().zip(["the network is down", "the host is unknown"]) {
            assert_eq!(line["level"], "WARN");
            assert!(line.to_string().contains("could not read the deadlines"), "{line}");
            assert_eq!(line.to_string().matches(cause).count(), 1, "{line}");
        }
        assert_eq!(lines[2]["level"], "INFO");
        assert!(lines[2].to_string().contains("can read the deadlines again"), "{lines:#?}");
    }

    #[test]
    fn line_has_the_cause_of_an_error_once() {
        let source = sqlx::Error::Io(std::io::Error::other("the network is down"));
        let error = crate::StoreError { doing: "reading", source };
        let text = chain(&error);
        assert!(text.starts_with("the store failed while reading: "), "{text}");
        assert_eq!(text.matches("the network is down").count(), 1, "{text}");
    }
}
