//! The log of a test.

use std::sync::{Arc, Mutex};
use tracing::subscriber::DefaultGuard;

/// What a thread logs, as lines of JSON.
#[derive(Clone, Default)]
pub(crate) struct CapturedLog(Arc<Mutex<Vec<u8>>>);

impl CapturedLog {
    /// Captures the log of this thread until the guard is dropped.
    pub(crate) fn start() -> (Self, DefaultGuard) {
        Self::filtered("info")
    }

    /// Captures the statements that this thread sends to Postgres, until the guard is dropped.
    pub(crate) fn of_statements() -> (Self, DefaultGuard) {
        Self::filtered("off,sqlx::query=debug")
    }

    fn filtered(filter: &str) -> (Self, DefaultGuard) {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(move || writer.clone());
        (log, tracing::subscriber::set_default(subscriber.finish()))
    }

    /// The captured statements, in their order.
    pub(crate) fn statements(&self) -> Vec<String> {
        let statement = |line: &str| {
            let fields = serde_json::from_str::<serde_json::Value>(line).unwrap()["fields"].take();
            // A statement of a few words is in the summary alone.
            let text = |name: &str| fields[name].as_str().unwrap_or_default().trim().to_owned();
            Some(text("db.statement")).filter(|text| !text.is_empty()).unwrap_or_else(|| text("summary"))
        };
        self.text().lines().map(statement).collect()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
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
