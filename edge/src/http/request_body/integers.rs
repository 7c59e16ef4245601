//! Integers in the sense of JSON Schema: 7.0 and 70e-1 are integers as 7 is (JSON Schema 2020-12, core, section 4.2.3), and this API is
//! described in JSON Schema. Types with derived serde implementations accept digits only, so a refused text is rewritten to digits and read
//! again. The text is rewritten, not converted to floating point: it is exact to the last digit.

use serde::de::DeserializeOwned;
use std::borrow::Cow;

/// The maximum digits of a number in any field.
const MAX_DIGITS: usize = 20;

/// Reads a small message in JSON whose integers may be written with a point or an exponent, and that has no list where its type is tagged.
///
/// # Errors
/// serde's own.
pub(crate) fn from_json<T: DeserializeOwned>(text: &[u8]) -> Result<T, serde_json::Error> {
    let first = strict_json::from_slice_without_buffered_lists(text);
    match &first {
        Err(error) if wants_digits(error) => {
            in_digits_throughout(text).map_or(first, |text| strict_json::from_slice_without_buffered_lists(&text))
        }
        Ok(_) | Err(_) => first,
    }
}

/// Whether a number with a point or an exponent was found where an integer is expected.
pub(super) fn wants_digits(error: &serde_json::Error) -> bool {
    error.is_data() && error.to_string().starts_with("invalid type: floating point")
}

/// A JSON text with its integers in digits; `None` where they are already.
pub(super) fn in_digits_throughout(text: &[u8]) -> Option<Vec<u8>> {
    let mut written = Vec::with_capacity(text.len());
    let (mut changed, mut at) = (false, 0);
    while at < text.len() {
        let length = match text[at] {
            b'"' => string_at(&text[at..]),
            b'-' | b'0'..=b'9' => number_at(&text[at..]),
            _ => 1,
        };
        let token = &text[at..at + length];
        let digits = std::str::from_utf8(token).ok().filter(|_| length > 1).and_then(in_digits);
        changed |= digits.is_some();
        written.extend_from_slice(digits.as_deref().map_or(token, str::as_bytes));
        at += length;
    }
    changed.then_some(written)
}

/// The length of the string that begins here, with its quotes.
fn string_at(text: &[u8]) -> usize {
    let mut escaped = false;
    for (at, byte) in text.iter().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

fn number_at(text: &[u8]) -> usize {
    let is_part = |byte: &&u8| byte.is_ascii_digit() || matches!(byte, b'-' | b'+' | b'.' | b'e' | b'E');
    text.iter().take_while(is_part).count()
}

/// The digits of an integer that is written with a point or an exponent; `None` for anything else.
pub(crate) fn in_digits(number: &str) -> Option<String> {
    if !number.contains(['.', 'e', 'E']) {
        return None;
    }
    let (sign, rest) = number.strip_prefix('-').map_or(("", number), |rest| ("-", rest));
    let (mantissa, exponent) = rest.split_once(['e', 'E']).unwrap_or((rest, "0"));
    let (whole, fraction) = match mantissa.split_once('.') {
        Some((_, "")) => return None,
        Some(parts) => parts,
        None => (mantissa, ""),
    };
    let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let begins_as_json = whole == "0" || (!whole.is_empty() && !whole.starts_with('0'));
    if !begins_as_json || !is_digits(whole) || !is_digits(fraction) {
        return None;
    }
    let digits = format!("{whole}{fraction}");
    let exponent: i32 = exponent.strip_prefix('+').unwrap_or(exponent).parse().ok()?;
    let significant = digits.trim_start_matches('0');
    if significant.is_empty() {
        return Some("0".to_owned());
    }
    // How many of the significant digits are before the point.
    let leading_zeros = digits.len() - significant.len();
    let before = i64::try_from(whole.len()).ok()? + i64::from(exponent) - i64::try_from(leading_zeros).ok()?;
    let before = usize::try_from(before).ok().filter(|before| (1..=MAX_DIGITS).contains(before))?;
    let (kept, rest) = significant.split_at(before.min(significant.len()));
    rest.bytes().all(|digit| digit == b'0').then(|| format!("{sign}{kept:0<before$}"))
}

/// A query with the value of its parameter `name` in digits; `None` where it is already, or is not an integer.
pub(super) fn in_query(query: &str, name: &str) -> Option<String> {
    let mut changed = false;
    let pairs = query.split('&').map(|pair| match pair.split_once('=') {
        Some((key, value)) if key == name => match in_digits(value) {
            Some(digits) => {
                changed = true;
                Cow::Owned(format!("{key}={digits}"))
            }
            None => Cow::Borrowed(pair),
        },
        Some(_) | None => Cow::Borrowed(pair),
    });
    let query = pairs.collect::<Vec<_>>().join("&");
    changed.then_some(query)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn whole_numbers_are_written_in_digits() {
        for (number, digits) in [
            ("1.0", "1"),
            ("-7.000", "-7"),
            ("1e3", "1000"),
            ("1.25E+2", "125"),
            ("1200e-2", "12"),
            ("0.0", "0"),
            ("-0.0", "0"),
            ("0e99999", "0"),
            ("9007199254740993.0", "9007199254740993"),
        ] {
            assert_eq!(in_digits(number).as_deref(), Some(digits), "{number}");
        }
    }

    #[test]
    fn other_numbers_stay_as_they_are() {
        for number in [
            "1",
            "1.5",
            "1e-1",
            "1.",
            ".5",
            "01.0",
            "1.0.0",
            "1e",
            "1e400",
            "--1.0",
            "1.00000000000000000001",
            "1e9999999999",
        ] {
            assert_eq!(in_digits(number), None, "{number}");
        }
    }

    #[test]
    fn numbers_in_strings_stay_strings() {
        let text = br#"{"a": 1.0, "b\"2.0": "3.0 \\", "c": [-4e0, 5.5]}"#;
        let written = in_digits_throughout(text).unwrap();
        assert_eq!(written, br#"{"a": 1, "b\"2.0": "3.0 \\", "c": [-4, 5.5]}"#);
        assert_eq!(in_digits_throughout(&written), None);
    }

    #[test]
    fn only_the_named_parameter_is_rewritten() {
        assert_eq!(in_query("sku=1.0&gpu_count=2.0", "gpu_count").as_deref(), Some("sku=1.0&gpu_count=2"));
        assert_eq!(in_query("gpu_count=2.5", "gpu_count"), None);
    }

    proptest! {
        #[test]
        fn rewriting_preserves_the_value_and_never_fails(text in "[-0-9.eE\"\\\\{}:, ]{0,40}") {
            if let Some(written) = in_digits_throughout(text.as_bytes())
                && let Ok(before) = serde_json::from_str::<serde_json::Value>(&text)
            {
                let after: serde_json::Value = serde_json::from_slice(&written).unwrap();
                if let (Some(before), Some(after)) = (before.as_f64(), after.as_f64()) {
                    prop_assert_eq!(before, after);
                }
            }
        }
    }
}
