//! Reading types with `tag`, `untagged` or `flatten` anywhere in them.
//!
//! serde reads their content out of a buffer of its own, which gives a struct a list as readily as a map, and a deserializer around it
//! cannot refuse. So the value is serialized again and compared with the input: where the input has a list and the output an object, it is refused.

use crate::{from_slice as strict_slice, from_value as strict_value};
use serde::Serialize;
use serde::de::{DeserializeOwned, Error};
use serde_json::{Result, Value};

/// As [`crate::from_slice`], for types with buffered content.
///
/// # Errors
/// As [`crate::from_slice`]; the error of a list in a buffered part names its path.
pub fn from_slice<T: DeserializeOwned + Serialize>(text: &[u8]) -> Result<T> {
    let understood: T = strict_slice(text)?;
    if text.contains(&b'[') {
        check(&strict_slice(text)?, &understood)?;
    }
    Ok(understood)
}

/// As [`crate::from_value`], for types with buffered content.
///
/// # Errors
/// As [`from_slice`].
pub fn from_value<T: DeserializeOwned + Serialize>(value: Value) -> Result<T> {
    if !has_list(&value) {
        return strict_value(value);
    }
    let understood: T = strict_value(value.clone())?;
    check(&value, &understood)?;
    Ok(understood)
}

/// Refuses a list in `sent` that was understood as an object, by its path.
fn check<T: Serialize>(sent: &Value, understood: &T) -> Result<()> {
    match list_for_object(sent, &serde_json::to_value(understood)?) {
        None => Ok(()),
        Some(path) => {
            Err(serde_json::Error::custom(format_args!("`{}` is a list; it must be an object", path.trim_matches('.'))))
        }
    }
}

/// The path of the first list in `sent` that is an object in `understood`; "." for the whole.
#[must_use]
pub fn list_for_object(sent: &Value, understood: &Value) -> Option<String> {
    match (sent, understood) {
        (Value::Array(_), Value::Object(_)) => Some(".".to_owned()),
        (Value::Object(sent), Value::Object(understood)) => sent
            .iter()
            .filter_map(|(name, value)| Some((name, value, understood.get(name)?)))
            .find_map(|(name, value, read)| list_for_object(value, read).map(|below| joined(name, &below))),
        (Value::Array(sent), Value::Array(understood)) => {
            sent.iter().zip(understood).enumerate().find_map(|(index, (value, read))| {
                list_for_object(value, read).map(|below| joined(&format!("[{index}]"), &below))
            })
        }
        (
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_),
            _,
        ) => None,
    }
}

/// `a`, `a.b` or `a[0]`.
fn joined(name: &str, below: &str) -> String {
    match below {
        "." => name.to_owned(),
        index if index.starts_with('[') => format!("{name}{index}"),
        field => format!("{name}.{field}"),
    }
}

fn has_list(value: &Value) -> bool {
    match value {
        Value::Array(_) => true,
        Value::Object(fields) => fields.values().any(has_list),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}
