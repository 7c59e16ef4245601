//! One line of the journal, and the batch in which it is pushed.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use uuid::Uuid;

/// A longer line is cut: far below what the gateway takes, and far above what the agent writes.
const LINE_BYTES: usize = 64 * 1024;
/// The longest cursor that is used; journald's have some 200 characters.
const CURSOR_MAX: usize = 512;

/// The labels by which the lines of a unit are distinguished.
#[derive(Debug, PartialEq, Eq)]
struct UnitLabels {
    service: &'static str,
    component: &'static str,
    source: &'static str,
}

/// Of the agent, whose unit is called as the bundle says.
const AGENT: UnitLabels = UnitLabels { service: "node-agent", component: "agent", source: "journald" };

/// The other units of this service on a node, whose names are always these.
#[rustfmt::skip]
const OTHERS: [(&str, UnitLabels); 3] = [
    ("gpuaas-finalizer.service", UnitLabels { service: "node-agent", component: "finalizer", source: "self-update-finalizer" }),
    ("gpuaas-log-collector.service", UnitLabels { service: "node-agent", component: "log-collector", source: "journald" }),
    ("gpuaas-telemetry-edge.service", UnitLabels { service: "metrics-helper", component: "telemetry-edge", source: "journald" }),
];

/// The units of this service on this node. Lines of tenants and of the system are not collected.
#[derive(Clone, Debug)]
pub(super) struct CollectedUnits {
    agent: String,
}

impl CollectedUnits {
    /// `agent`: the name of the agent's unit.
    pub(super) fn new(agent: &str) -> Self {
        Self { agent: agent.to_owned() }
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.agent.as_str()).chain(OTHERS.iter().map(|(name, _)| *name))
    }
}

/// A line whose unit is none of the others is the agent's, perhaps under the name of before a change of the settings: it was spooled then.
fn labels_of(unit: &str) -> &'static UnitLabels {
    OTHERS.iter().find(|(name, _)| *name == unit).map_or(&AGENT, |(_, labels)| labels)
}

/// A line, as it is spooled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Line {
    pub(super) unit: String,
    /// Nanoseconds since 1970.
    pub(super) at: u64,
    pub(super) text: String,
}

/// An entry of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) cursor: String,
    /// `None` where it is of no unit that is collected.
    pub(super) line: Option<Line>,
}

/// The fields that journalctl is asked for, beside those that it always prints.
pub(super) const FIELDS: &str = "MESSAGE,_SYSTEMD_UNIT,UNIT,OBJECT_SYSTEMD_UNIT";

/// A field has several values where the entry has the field more than once, and bytes where it is no text.
#[derive(Deserialize)]
struct Fields {
    #[serde(rename = "__CURSOR")]
    cursor: String,
    #[serde(rename = "__REALTIME_TIMESTAMP")]
    at: String,
    #[serde(rename = "_SYSTEMD_UNIT", default)]
    unit: Value,
    /// Of a message of systemd about a unit.
    #[serde(rename = "UNIT", default)]
    about: Value,
    #[serde(rename = "OBJECT_SYSTEMD_UNIT", default)]
    object: Value,
    #[serde(rename = "MESSAGE", default)]
    message: Value,
}

impl Entry {
    /// Reads a line that `journalctl --output=json` printed; `None` where it is none.
    pub(super) fn parse(json: &[u8], collected: &CollectedUnits) -> Option<Self> {
        let fields: Fields = strict_json::from_slice(json).ok()?;
        if !is_cursor(&fields.cursor) {
            return None;
        }
        let units = [&fields.unit, &fields.about, &fields.object].map(text);
        let unit = collected.names().find(|unit| units.iter().any(|name| name == unit));
        let at = fields.at.parse::<u64>().ok()?.checked_mul(1000)?;
        let line = unit.map(|unit| Line { unit: unit.to_owned(), at, text: cut(text(&fields.message)) });
        Some(Self { cursor: fields.cursor, line })
    }
}

/// Whether a text can be a cursor of journald's: it is an argument of journalctl.
pub(super) fn is_cursor(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'=' | b';');
    text.starts_with("s=") && text.len() <= CURSOR_MAX && text.bytes().all(plain)
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            let bytes: Option<Vec<u8>> =
                items.iter().map(|item| item.as_u64().and_then(|byte| u8::try_from(byte).ok())).collect();
            match bytes {
                Some(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
                None => items.first().map(text).unwrap_or_default(),
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => String::new(),
    }
}

/// A line within the bound; what is left away is counted in it.
fn cut(mut line: String) -> String {
    if line.len() > LINE_BYTES {
        let end = line.floor_char_boundary(LINE_BYTES);
        let mark = format!("… [{} bytes were cut]", line.len() - end);
        line.truncate(end);
        line.push_str(&mark);
    }
    line
}

/// The labels that are the same for all lines of this node.
#[derive(Clone, Debug)]
pub(super) struct NodeLabels {
    pub(super) node_id: Uuid,
    pub(super) host_name: String,
}

/// A batch for Loki's push API: a stream for each unit. Values that differ from line to line stay in the lines.
pub(super) fn push_body(lines: &[Line], labels: &NodeLabels) -> Vec<u8> {
    let mut by_unit: BTreeMap<&str, Vec<[Value; 2]>> = BTreeMap::new();
    for line in lines {
        by_unit.entry(&line.unit).or_default().push([line.at.to_string().into(), line.text.as_str().into()]);
    }
    let streams = by_unit.into_iter().map(|(name, values)| {
        let unit = labels_of(name);
        json!({
            "stream": {
                "service": unit.service,
                "component": unit.component,
                "source": unit.source,
                "systemd_unit": name,
                "host_role": "worker_compute",
                "host_name": labels.host_name,
                "node_id": labels.node_id,
            },
            "values": values,
        })
    });
    json!({ "streams": streams.collect::<Vec<_>>() }).to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CURSOR: &str = "s=8d1;i=2a;b=7f;m=1;t=2;x=3";

    fn entry(more: Value) -> Option<Entry> {
        entry_of("gpuaas-agent.service", more)
    }

    /// As the collector reads it where the agent's unit is called so.
    fn entry_of(agent: &str, more: Value) -> Option<Entry> {
        let mut fields = json!({"__CURSOR": CURSOR, "__REALTIME_TIMESTAMP": "1700000000000001"});
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        Entry::parse(fields.to_string().as_bytes(), &CollectedUnits::new(agent))
    }

    fn line(more: Value) -> Option<Line> {
        entry(more).unwrap().line
    }

    #[test]
    fn lines_of_our_units_and_of_systemd_about_them_are_read_and_no_others() {
        let own = line(json!({"_SYSTEMD_UNIT": "gpuaas-agent.service", "MESSAGE": "{\"level\":\"INFO\"}"})).unwrap();
        assert_eq!((own.at, own.text.as_str()), (1_700_000_000_000_001_000, "{\"level\":\"INFO\"}"));
        let about = json!({"_SYSTEMD_UNIT": "init.scope", "UNIT": "gpuaas-agent.service", "MESSAGE": "Started."});
        assert_eq!(line(about).unwrap().unit, "gpuaas-agent.service");
        for unit in ["ssh.service", "gpuaas-agent.service.evil", "user@1000.service"] {
            assert_eq!(line(json!({"_SYSTEMD_UNIT": unit, "MESSAGE": "m"})), None, "{unit}");
        }
    }

    #[test]
    fn unit_of_the_agent_is_read_under_the_name_of_the_settings_and_no_other() {
        let named =
            |unit: &str| entry_of("rented.service", json!({"_SYSTEMD_UNIT": unit, "MESSAGE": "m"})).unwrap().line;
        assert_eq!(named("rented.service").unwrap().unit, "rented.service");
        assert!(named("gpuaas-finalizer.service").is_some() && named("gpuaas-agent.service").is_none());
        let collected = CollectedUnits::new("rented.service");
        let all = [
            "rented.service",
            "gpuaas-finalizer.service",
            "gpuaas-log-collector.service",
            "gpuaas-telemetry-edge.service",
        ];
        assert!(collected.names().eq(all));
    }

    #[test]
    fn line_that_was_spooled_under_an_earlier_name_of_the_agents_unit_is_pushed() {
        let line = Line { unit: "of-before.service".into(), at: 1, text: "line".into() };
        let body = push_body(&[line], &NodeLabels { node_id: Uuid::nil(), host_name: "rack7-3".into() });
        let body: Value = serde_json::from_slice(&body).unwrap();
        let stream = &body["streams"][0]["stream"];
        assert_eq!((&stream["systemd_unit"], &stream["component"]), (&json!("of-before.service"), &json!("agent")));
    }

    #[test]
    fn message_that_is_bytes_or_several_or_too_long_is_text_within_the_bound() {
        let unit = "gpuaas-agent.service";
        let text = |message: Value| line(json!({"_SYSTEMD_UNIT": unit, "MESSAGE": message})).unwrap().text;
        assert_eq!(text(json!([104, 105, 255])), "hi\u{fffd}");
        assert_eq!(text(json!(["first", "second"])), "first");
        assert_eq!(text(json!(null)), "");
        let cut = text(json!("ä".repeat(50_000)));
        assert!(cut.len() < LINE_BYTES + 64 && cut.ends_with("… [34464 bytes were cut]"), "{}", &cut[cut.len() - 40..]);
    }

    #[test]
    fn text_that_journalctl_never_prints_is_not_an_entry() {
        for bad in ["", "[]", "{}", "not json", "{\"__CURSOR\":\"s=1\"}"] {
            assert_eq!(Entry::parse(bad.as_bytes(), &CollectedUnits::new("gpuaas-agent.service")), None, "{bad}");
        }
        assert_eq!(entry(json!({"__CURSOR": "--vacuum-size=1"})), None);
        assert_eq!(entry(json!({"__REALTIME_TIMESTAMP": "-1"})), None);
        assert_eq!(entry(json!({"__REALTIME_TIMESTAMP": u64::MAX.to_string()})), None);
        assert!(!is_cursor(&format!("s={}", "a".repeat(CURSOR_MAX))));
    }

    #[test]
    fn batch_has_one_stream_for_each_unit_with_the_required_labels() {
        let line = |unit: &str, at| Line { unit: unit.to_owned(), at, text: format!("line {at}") };
        let (agent, finalizer) = ("gpuaas-agent.service", "gpuaas-finalizer.service");
        let labels = NodeLabels { node_id: Uuid::nil(), host_name: "rack7-3".into() };
        let body = push_body(&[line(agent, 1), line(finalizer, 2), line(agent, 3)], &labels);
        let body: Value = serde_json::from_slice(&body).unwrap();
        let agent = &body["streams"][0];
        let wanted = json!({
            "service": "node-agent", "component": "agent", "source": "journald", "systemd_unit": "gpuaas-agent.service",
            "host_role": "worker_compute", "host_name": "rack7-3", "node_id": Uuid::nil(),
        });
        assert_eq!(agent["stream"], wanted);
        assert_eq!(agent["values"], json!([["1", "line 1"], ["3", "line 3"]]));
        assert_eq!(body["streams"][1]["stream"]["source"], "self-update-finalizer");
    }
}
