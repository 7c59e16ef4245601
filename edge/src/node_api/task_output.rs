//! The output of a task, in the bounded form that the node's state machine stores for the task's requester.

use super::inventory::truncated;
use serde_json::{Map, Value, json};

/// The longest stored output, in bytes of JSON.
const MAX_BYTES: usize = 8 * 1024;

/// The output, whole where it is small enough; else its beginning as text, marked as truncated.
pub(super) fn bounded(output: &Map<String, Value>) -> Option<Value> {
    if output.is_empty() {
        return None;
    }
    let whole = Value::Object(output.clone());
    let text = whole.to_string();
    // No database stores a NUL.
    let clean = text.replace("\\u0000", " ");
    if clean.len() <= MAX_BYTES && clean == text {
        return Some(whole);
    }
    Some(json!({ "cut_off": true, "text": truncated(&clean, MAX_BYTES) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(text: &str) -> Map<String, Value> {
        json!({ "text": text }).as_object().unwrap().clone()
    }

    #[test]
    fn small_output_is_stored_whole_and_a_large_one_truncated() {
        assert_eq!(bounded(&Map::new()), None);
        assert_eq!(bounded(&output("x")), Some(json!({ "text": "x" })));
        let cut = bounded(&output(&"\u{2028}".repeat(100_000))).unwrap();
        assert_eq!(cut["cut_off"], true);
        assert!(cut["text"].as_str().unwrap().len() <= 4 * MAX_BYTES, "a character has four bytes at most");
        let nul = bounded(&output("a\0b")).unwrap();
        assert!(!nul.to_string().contains("\\u0000"), "{nul}");
    }
}
