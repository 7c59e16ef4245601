//! The logs of a cluster's processes, and what they must not contain.

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
    /// Lines of level ERROR, and lines that are not structured (a panic before logging was set up, for example).
    pub(super) fn errors(&self) -> Vec<&str> {
        let is_error = |line: &&str| match serde_json::from_str::<Value>(line) {
            Ok(event) => event["level"] == "ERROR",
            Err(_) => !line.trim().is_empty(),
        };
        self.text.lines().filter(is_error).collect()
    }

    pub(super) fn warnings_and_errors(&self) -> Vec<&str> {
        let wanted = |line: &&str| match serde_json::from_str::<Value>(line) {
            Ok(event) => event["level"] == "ERROR" || event["level"] == "WARN",
            Err(_) => true,
        };
        self.text.lines().filter(wanted).collect()
    }
}

impl Log {
    /// Lines that do not have the specified fields (*Observability surface*), with what is missing.
    pub(super) fn invalid_lines(&self) -> Vec<String> {
        let lines = self.text.lines().filter_map(|line| Some((line, serde_json::from_str::<Value>(line).ok()?)));
        lines.filter_map(|(line, event)| Some(format!("{}: {line}", violation_of(&event)?))).collect()
    }
}

/// The fields of every line inside a scope, `null` if there is no value.
const IN_SCOPE: [&str; 6] = ["trace_id", "span_id", "org_id", "project_id", "error_code", "resource_name"];

fn violation_of(event: &Value) -> Option<String> {
    let text = |name: &str| event[name].as_str().unwrap_or_default();
    if chrono::DateTime::parse_from_rfc3339(text("timestamp")).is_err() {
        return Some("no timestamp".to_owned());
    }
    if !["ERROR", "WARN", "INFO", "DEBUG", "TRACE"].contains(&text("level")) {
        return Some("no level".to_owned());
    }
    if let Some(name) = ["service", "message", "target"].into_iter().find(|name| text(name).is_empty()) {
        return Some(format!("no {name}"));
    }
    if text("service") == "node-agent"
        && let Some(name) = ["host_role", "host_name", "node_id"].into_iter().find(|name| text(name).is_empty())
    {
        return Some(format!("no {name}"));
    }
    let is_hex = |name: &str, len: usize| {
        event[name].is_null() || text(name).len() == len && text(name).bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    if !is_hex("trace_id", 32) || !is_hex("span_id", 16) {
        return Some("an id that is none".to_owned());
    }
    // A failed login is logged, whatever the log filter is.
    if event["http.status"] == 401 && (text("level") != "WARN" || text("error_code").is_empty()) {
        return Some("a 401 that is no WARN with its code".to_owned());
    }
    // Outside a scope no further fields are required.
    event.get("correlation_id")?;
    let lacks =
        IN_SCOPE.into_iter().find(|name| event.get(name).is_none_or(|value| !value.is_null() && !value.is_string()));
    if text("correlation_id").is_empty() {
        Some("no correlation_id".to_owned())
    } else {
        lacks.map(|name| format!("no {name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn log_line_without_a_specified_field_is_invalid() {
        let whole = json!({
            "timestamp": "2026-11-21T08:00:00.000000Z", "level": "WARN", "service": "api", "target": "edge", "message": "no",
            "correlation_id": "c", "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "span_id": null, "org_id": null,
            "project_id": "p", "error_code": "unauthenticated", "resource_name": null, "http.status": 401,
        });
        assert_eq!(violation_of(&whole), None);
        for name in
            ["timestamp", "level", "service", "message", "trace_id", "span_id", "org_id", "project_id", "error_code"]
        {
            let mut line = whole.clone();
            line.as_object_mut().unwrap().remove(name);
            assert!(violation_of(&line).is_some(), "{name}");
        }
        for (name, bad) in [("level", "INFO"), ("trace_id", "4bf9"), ("correlation_id", ""), ("service", "node-agent")]
        {
            let mut line = whole.clone();
            line[name] = json!(bad);
            assert!(violation_of(&line).is_some(), "{name}");
        }
    }

    #[test]
    fn error_line_has_that_level_or_no_structure() {
        let lines = [
            r#"{"level":"INFO","message":"said ERROR, meant nothing"}"#,
            r#"{"level":"ERROR","message":"lost"}"#,
            r#"{"level":"WARN","message":"late"}"#,
            "thread 'main' panicked",
            "",
        ];
        let log = Log { name: "a".to_owned(), text: lines.join("\n") };
        assert_eq!(log.errors(), [lines[1], lines[3]]);
        assert_eq!(log.warnings_and_errors(), [lines[1], lines[2], lines[3]]);
    }
}
