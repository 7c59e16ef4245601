//! The logs of a world's processes, and what must not stand in them.

use serde_json::Value;
use std::path::{Path, PathBuf};

/// A process's log.
pub(super) struct Log {
    pub(super) name: String,
    pub(super) text: String,
}

/// All logs in these folders.
pub(super) fn read(folders: &[PathBuf]) -> Vec<Log> {
    let files = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
    let logs = files.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|it| it == "log"));
    logs.map(|path| Log { name: name_of(&path), text: lossy(&path) }).collect()
}

fn name_of(path: &Path) -> String {
    path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
}

fn lossy(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}

impl Log {
    /// Lines that wake someone: of level ERROR, or no structured line at all (a panic before logging began, say).
    pub(super) fn errors(&self) -> Vec<&str> {
        let is_error = |line: &&str| match serde_json::from_str::<Value>(line) {
            Ok(event) => event["level"] == "ERROR",
            Err(_) => !line.trim().is_empty(),
        };
        self.text.lines().filter(is_error).collect()
    }

    pub(super) fn lines_at_or_above_warn(&self) -> Vec<&str> {
        let wanted = |line: &&str| match serde_json::from_str::<Value>(line) {
            Ok(event) => event["level"] == "ERROR" || event["level"] == "WARN",
            Err(_) => true,
        };
        self.text.lines().filter(wanted).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_a_line_of_that_level_or_no_structured_line_at_all() {
        let lines = [
            r#"{"level":"INFO","message":"said ERROR, meant nothing"}"#,
            r#"{"level":"ERROR","message":"lost"}"#,
            r#"{"level":"WARN","message":"late"}"#,
            "thread 'main' panicked",
            "",
        ];
        let log = Log { name: "a".to_owned(), text: lines.join("\n") };
        assert_eq!(log.errors(), [lines[1], lines[3]]);
        assert_eq!(log.lines_at_or_above_warn(), [lines[1], lines[2], lines[3]]);
    }
}
