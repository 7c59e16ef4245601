//! Lines of the finalizer's log: one JSON object each, with the fields that the agent's lines have (`telemetry::JsonLogLines`; specification,
//! *Observability surface*). They are made here, since static programs are made of this crate, and have as few dependencies as possible. A
//! test of the agent compares both.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

use chrono::{SecondsFormat, Utc};
use wire::bundle::{Variables, names};

/// The role of a node's machine in a lab.
const HOST_ROLE: &str = "worker_compute";
const HOST_NAME_FILE: &str = "/proc/sys/kernel/hostname";

/// As the agent's lines have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    Info,
    Warn,
}

impl Level {
    const fn name(self) -> &'static str {
        match self {
            Self::Info => "INFO",
            Self::Warn => "WARN",
        }
    }
}

/// The fields that all lines of a process have.
#[derive(Debug)]
pub struct JsonLogLines {
    target: &'static str,
    host: Vec<(&'static str, String)>,
}

impl JsonLogLines {
    /// `target` names the program. The node's id is read from the agent's environment file, where one is known.
    pub fn new(target: &'static str, environment: impl Fn(&str) -> Option<String>, env_file: Option<&Path>) -> Self {
        let get = |name| environment(name).filter(|value| !value.trim().is_empty());
        let own_name = || std::fs::read_to_string(HOST_NAME_FILE).ok().map(|name| name.trim().to_owned());
        let host = [
            ("host_role", get("SVC_HOST_ROLE").or_else(|| Some(HOST_ROLE.to_owned()))),
            ("host_name", get("SVC_HOST_NAME").or_else(own_name)),
            ("lab_stack", get("SVC_LAB_STACK")),
            ("node_id", env_file.and_then(node_id_in).or_else(|| get(names::NODE_ID))),
        ];
        Self { target, host: host.into_iter().filter_map(|(name, value)| Some((name, value?))).collect() }
    }

    /// One line, with its end. Names of fields are constants, and need no escaping.
    #[must_use]
    pub fn line(&self, level: Level, message: &str, fields: &[(&'static str, &str)]) -> String {
        let now = Utc::now().to_rfc3339_opts(SecondsFormat::Micros, true);
        let mut line = format!(r#"{{"timestamp":"{now}","level":"{}","service":"node-agent""#, level.name());
        let host = self.host.iter().map(|(name, value)| (*name, value.as_str()));
        let own = [("target", self.target), ("message", message)];
        for (name, value) in host.chain(own).chain(fields.iter().copied()) {
            let value = serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned());
            let _ = write!(line, r#","{name}":{value}"#);
        }
        line.push_str("}\n");
        line
    }

    /// Writes a line to standard error. A closed output changes nothing.
    pub fn write(&self, level: Level, message: &str, fields: &[(&'static str, &str)]) {
        let _ = std::io::stderr().write_all(self.line(level, message, fields).as_bytes());
    }
}

fn node_id_in(env_file: &Path) -> Option<String> {
    let text = std::fs::read_to_string(env_file).ok()?;
    Variables::parse(&text).ok()?.get(names::NODE_ID).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn line_is_one_object_whatever_its_texts_have_in_them_and_names_the_node_of_the_environment_file() {
        let folder = tempfile::tempdir().unwrap();
        let env_file = folder.path().join("agent.env");
        std::fs::write(&env_file, "SVC_NODE_ID='0199e3f4-5c1b-7a00-8000-0c0ffee0c0de'\n").unwrap();
        let lines = JsonLogLines::new("gpuaas_finalizer", |_| None, Some(&env_file));
        let line = lines.line(Level::Warn, "a \"quoted\"\nmessage", &[("error_code", "no_heartbeat")]);
        assert!(line.ends_with("}\n") && line.matches('\n').count() == 1, "{line}");
        let line: Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&line["level"], &line["message"]), (&"WARN".into(), &"a \"quoted\"\nmessage".into()));
        assert_eq!((&line["host_role"], &line["service"]), (&"worker_compute".into(), &"node-agent".into()));
        assert_eq!(line["node_id"], "0199e3f4-5c1b-7a00-8000-0c0ffee0c0de");
        let unknown = JsonLogLines::new("gpuaas_finalizer", |_| None, Some(&folder.path().join("gone")));
        let line: Value = serde_json::from_str(&unknown.line(Level::Info, "m", &[])).unwrap();
        assert_eq!(line.get("node_id"), None, "a line is written all the same");
    }
}
