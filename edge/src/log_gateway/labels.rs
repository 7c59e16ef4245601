//! The labels that a stream of a node must have, and those that it must not have (specification, *Observability surface*).

use super::push_request::Labels;
use crate::http::error::ApiError;
use domain::NodeId;

/// The labels of one stream at most: what Loki takes by default.
const LABELS_MAX: usize = 15;
/// The longest name and the longest value of a label, in bytes: what Loki takes by default.
const NAME_BYTES: usize = 1024;
const VALUE_BYTES: usize = 2048;

/// The one value of `host_role`.
const HOST_ROLE: &str = "worker_compute";

/// The required labels, each with its allowed values; none where every text but the empty one is allowed. `node_id` is required too.
const REQUIRED: [(&str, &[&str]); 6] = [
    ("service", &["node-agent", "metrics-helper"]),
    ("component", &[]),
    ("source", &["journald", "self-update-finalizer"]),
    ("systemd_unit", &[]),
    ("host_role", &[HOST_ROLE]),
    ("host_name", &[]),
];

const NODE_ID: &str = "node_id";

/// Values that differ from line to line: as labels, each would make a stream of its own in the store.
const HIGH_CARDINALITY: [&str; 6] = ["task_id", "allocation_id", "correlation_id", "session_id", "trace_id", "span_id"];

/// Checks the labels of one stream of a node.
///
/// # Errors
/// `invalid_request`, with the label in `details.label`.
pub(super) fn check(labels: &Labels, node_id: NodeId) -> Result<(), ApiError> {
    if labels.len() > LABELS_MAX {
        let message = format!("A stream has {} labels, {LABELS_MAX} are the most.", labels.len());
        return Err(ApiError::invalid_request(message).detail("limit", LABELS_MAX));
    }
    for (name, value) in labels {
        check_form(name, value)?;
    }
    for (name, allowed) in REQUIRED {
        let value = labels.get(name).map(String::as_str).unwrap_or_default();
        if value.is_empty() || (!allowed.is_empty() && !allowed.contains(&value)) {
            let wanted = if allowed.is_empty() { "a text that is not empty".to_owned() } else { allowed.join(" or ") };
            return Err(refused(name, format!("The label `{name}` of each stream must be {wanted}.")));
        }
    }
    if labels.get(NODE_ID).is_none_or(|value| *value != node_id.to_string()) {
        let message = "The label `node_id` of each stream must be the id of the node whose token was sent.";
        return Err(refused(NODE_ID, message.to_owned()));
    }
    Ok(())
}

fn check_form(name: &str, value: &str) -> Result<(), ApiError> {
    let begins = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
    let is_name = name.bytes().next().is_some_and(begins)
        && name.bytes().all(|byte| begins(byte) || byte.is_ascii_digit())
        && name.len() <= NAME_BYTES;
    if !is_name {
        let message = format!("A label's name has letters, digits and underscores, and {NAME_BYTES} bytes at most.");
        return Err(ApiError::invalid_request(message));
    }
    if HIGH_CARDINALITY.contains(&name) {
        return Err(refused(name, format!("`{name}` is no label; leave it in the line as a field of JSON.")));
    }
    if value.len() > VALUE_BYTES {
        return Err(refused(name, format!("The value of the label `{name}` is over {VALUE_BYTES} bytes.")));
    }
    Ok(())
}

fn refused(label: &str, message: String) -> ApiError {
    ApiError::invalid_request(message).detail("label", label)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels_of(node_id: NodeId) -> Labels {
        let pairs = [
            ("service", "node-agent"),
            ("component", "agent"),
            ("source", "journald"),
            ("systemd_unit", "gpuaas-agent.service"),
            ("host_role", "worker_compute"),
            ("host_name", "rack7-3"),
        ];
        let mut labels: Labels = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        labels.insert("node_id".to_owned(), node_id.to_string());
        labels
    }

    fn refused_label(labels: &Labels, node_id: NodeId) -> String {
        let error = check(labels, node_id).unwrap_err();
        error.details()["label"].as_str().unwrap_or_default().to_owned()
    }

    #[test]
    fn stream_with_all_required_labels_is_accepted() {
        let node_id = NodeId(uuid::Uuid::now_v7());
        let mut labels = labels_of(node_id);
        check(&labels, node_id).unwrap();
        labels.insert("level".to_owned(), "INFO".to_owned());
        check(&labels, node_id).unwrap();
    }

    #[test]
    fn missing_empty_or_unknown_value_of_a_required_label_is_refused_by_its_name() {
        let node_id = NodeId(uuid::Uuid::now_v7());
        for name in labels_of(node_id).into_keys() {
            let mut labels = labels_of(node_id);
            labels.remove(&name);
            assert_eq!(refused_label(&labels, node_id), name);
            labels.insert(name.clone(), String::new());
            assert_eq!(refused_label(&labels, node_id), name);
        }
        for name in ["service", "source", "host_role"] {
            let mut labels = labels_of(node_id);
            labels.insert(name.to_owned(), "another".to_owned());
            assert_eq!(refused_label(&labels, node_id), name);
        }
    }

    #[test]
    fn stream_of_another_node_is_refused() {
        let (own, other) = (NodeId(uuid::Uuid::now_v7()), NodeId(uuid::Uuid::now_v7()));
        assert_eq!(refused_label(&labels_of(other), own), "node_id");
    }

    #[test]
    fn value_that_differs_from_line_to_line_is_refused_as_a_label() {
        let node_id = NodeId(uuid::Uuid::now_v7());
        for name in HIGH_CARDINALITY {
            let mut labels = labels_of(node_id);
            labels.insert(name.to_owned(), "1".to_owned());
            assert_eq!(refused_label(&labels, node_id), name);
        }
    }

    #[test]
    fn labels_over_their_bounds_are_refused() {
        let node_id = NodeId(uuid::Uuid::now_v7());
        let with = |name: String, value: String| {
            let mut labels = labels_of(node_id);
            labels.insert(name, value);
            check(&labels, node_id)
        };
        with("a".repeat(NAME_BYTES), "v".repeat(VALUE_BYTES)).unwrap();
        for name in [String::new(), "a".repeat(NAME_BYTES + 1), "1a".into(), "a-b".into(), "ä".into()] {
            with(name, "v".into()).unwrap_err();
        }
        with("a".into(), "v".repeat(VALUE_BYTES + 1)).unwrap_err();
        let mut labels = labels_of(node_id);
        labels.extend((labels.len()..=LABELS_MAX).map(|n| (format!("label_{n}"), "v".to_owned())));
        assert_eq!(check(&labels, node_id).unwrap_err().details()["limit"], LABELS_MAX);
    }
}
