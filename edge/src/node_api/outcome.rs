//! What a task found, as far as the node's machine keeps it for who ordered the task.

use super::inventory::clipped;
use serde_json::{Map, Value, json};

/// As much of an output as is kept, in bytes of JSON.
const KEPT: usize = 8 * 1024;

/// The output, whole where it is small enough; else its beginning as text, and that it is no more.
pub(super) fn kept(output: &Map<String, Value>) -> Option<Value> {
    if output.is_empty() {
        return None;
    }
    let whole = Value::Object(output.clone());
    let text = whole.to_string();
    // A NUL can be kept in no database.
    let clean = text.replace("\\u0000", " ");
    if clean.len() <= KEPT && clean == text {
        return Some(whole);
    }
    Some(json!({ "cut_off": true, "text": clipped(&clean, KEPT) }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn output(text: &str) -> Map<String, Value> {
        json!({ "text": text }).as_object().unwrap().clone()
    }

    #[test]
    fn a_small_output_is_kept_whole_and_of_a_large_one_the_beginning() {
        assert_eq!(kept(&Map::new()), None);
        assert_eq!(kept(&output("x")), Some(json!({ "text": "x" })));
        let cut = kept(&output(&"\u{2028}".repeat(100_000))).unwrap();
        assert_eq!(cut["cut_off"], true);
        assert!(cut["text"].as_str().unwrap().len() <= 4 * KEPT, "a character has four bytes at most");
        let nul = kept(&output("a\0b")).unwrap();
        assert!(!nul.to_string().contains("\\u0000"), "{nul}");
    }
}
