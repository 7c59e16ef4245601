//! The log of a test.

use serde_json::Value;
use std::sync::{Arc, Mutex, OnceLock};
use tracing::subscriber::{DefaultGuard, set_default, set_global_default};

/// What a thread or the process logs, as lines of JSON.
#[derive(Clone, Default)]
pub struct CapturedLog(Arc<Mutex<Vec<u8>>>);

impl CapturedLog {
    /// Captures the log of this thread until the guard is dropped.
    #[must_use]
    pub fn start() -> (Self, DefaultGuard) {
        Self::filtered("info")
    }

    /// Captures the statements that this thread sends to Postgres, until the guard is dropped.
    #[must_use]
    pub fn of_statements() -> (Self, DefaultGuard) {
        Self::filtered("off,sqlx::query=debug")
    }

    /// Everything that the process logs, from the first call on.
    #[must_use]
    pub fn of_process() -> Self {
        static LOG: OnceLock<CapturedLog> = OnceLock::new();
        let start = || {
            let (log, subscriber) = Self::with_filter("debug");
            let _ = set_global_default(subscriber);
            log
        };
        LOG.get_or_init(start).clone()
    }

    fn filtered(filter: &str) -> (Self, DefaultGuard) {
        let (log, subscriber) = Self::with_filter(filter);
        (log, set_default(subscriber))
    }

    fn with_filter(filter: &str) -> (Self, impl tracing::Subscriber + Send + Sync + use<>) {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(move || writer.clone());
        (log, subscriber.finish())
    }

    /// The captured statements, in their order.
    #[must_use]
    pub fn statements(&self) -> Vec<String> {
        let statement = |line: Value| {
            // A statement of a few words is in the summary alone.
            let text = |name: &str| line["fields"][name].as_str().unwrap_or_default().trim().to_owned();
            Some(text("db.statement")).filter(|text| !text.is_empty()).unwrap_or_else(|| text("summary"))
        };
        self.lines().into_iter().map(statement).collect()
    }

    /// The lines, in their order.
    #[must_use]
    pub fn lines(&self) -> Vec<Value> {
        self.text().lines().map(|line| line.parse().expect("a line is JSON")).collect()
    }

    /// The level and the message of each line, in their order.
    #[must_use]
    pub fn messages(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        self.lines().iter().map(|line| (text(&line["level"]), text(&line["fields"]["message"]))).collect()
    }

    /// The lines that contain all of these words.
    #[must_use]
    pub fn lines_with(&self, words: &[&str]) -> Vec<String> {
        self.text().lines().filter(|line| words.iter().all(|word| line.contains(word))).map(str::to_owned).collect()
    }

    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl std::io::Write for CapturedLog {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
