//! Foreign text in a terminal, without control characters.

use chrono::{DateTime, Utc};
use serde_json::Value;

/// The longest text in a row of a table; `--output json` has the whole.
const LONGEST: usize = 200;
/// The longest value on a line of its own, such as the address of a payment page.
const LONGEST_ALONE: usize = 4096;

/// The text with every control character (and what turns the direction of text) replaced; a line break becomes a space.
pub(crate) fn plain(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => ' ',
        c if c.is_control() => '\u{fffd}',
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' => '\u{fffd}',
        c => c,
    };
    text.chars().map(shown).collect()
}

/// A value in a row of a table.
pub(crate) fn cell(value: &Value) -> String {
    cut(text_of(value), LONGEST)
}

/// A value on a line of its own.
pub(crate) fn value_alone(value: &Value) -> String {
    cut(text_of(value), LONGEST_ALONE)
}

fn cut(text: String, longest: usize) -> String {
    match text.char_indices().nth(longest) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Texts as they are, labels as `key=value`, instants to the second, nothing as `-`.
fn text_of(value: &Value) -> String {
    let text = match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => instant(text).unwrap_or_else(|| plain(text)),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::Array(items) if items.is_empty() => "-".to_owned(),
        Value::Array(items) if items.iter().all(|item| !item.is_object()) => {
            items.iter().map(text_of).collect::<Vec<_>>().join(", ")
        }
        Value::Object(fields) if fields.values().all(Value::is_string) => fields
            .iter()
            .map(|(name, field)| format!("{}={}", plain(name), plain(field.as_str().unwrap_or_default())))
            .collect::<Vec<_>>()
            .join(", "),
        Value::Number(_) | Value::Array(_) | Value::Object(_) => plain(&value.to_string()),
    };
    if text.is_empty() { "-".to_owned() } else { text }
}

fn instant(text: &str) -> Option<String> {
    // Cheaper than parsing every text.
    let looks = text.len() >= 20 && text.as_bytes().get(10) == Some(&b'T');
    let at: DateTime<Utc> = looks.then(|| text.parse().ok())??;
    Some(at.format("%Y-%m-%d %H:%M:%SZ").to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn cells_are_short_plain_and_never_empty() {
        let shown = |value: Value| cell(&value);
        assert_eq!(shown(json!(null)), "-");
        assert_eq!(shown(json!("")), "-");
        assert_eq!(shown(json!(true)), "yes");
        assert_eq!(shown(json!(["eu-1", "eu-2"])), "eu-1, eu-2");
        assert_eq!(
            shown(json!({ "env": "dev", "gpu": "", "x\u{1b}": "\u{202e}" })),
            "env=dev, gpu=, x\u{fffd}=\u{fffd}"
        );
        assert_eq!(shown(json!({})), "-");
        assert_eq!(shown(json!("2026-11-22T01:02:03.456789Z")), "2026-11-22 01:02:03Z");
        assert_eq!(shown(json!("a\u{1b}]0;owned\u{7}\r\nb\u{202e}")), "a\u{fffd}]0;owned\u{fffd}\u{fffd} b\u{fffd}");
        assert_eq!(shown(json!("x".repeat(1000))).chars().count(), LONGEST + 1);
        // A payment page's address has hundreds of characters.
        assert_eq!(value_alone(&json!("x".repeat(1000))), "x".repeat(1000));
        assert_eq!(value_alone(&json!("ä".repeat(10_000_000))).chars().count(), LONGEST_ALONE + 1);
    }
}
