//! Reading JSON of others: an object is an object.
//!
//! serde's derived code reads a struct from a list too, field by field in the order of their declaration, at any depth: `"scope": []` is
//! then a scope without any field. No sender intends that. [`StrictObjects`] is a deserializer around another one that refuses it.
//!
//! The content of types with `tag`, `untagged` or `flatten` is buffered by serde and read out of the buffer, where no deserializer around
//! it has a say. [`tagged`] reads such types.

mod reader;
pub mod tagged;

pub use reader::{LIST_FOR_OBJECT, StrictObjects};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Deserializer, Result, Value};

/// U+FEFF in UTF-8, which programs of some systems put before any text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The text without a byte-order mark at its beginning: a reader of JSON may ignore one (RFC 8259, section 8.1).
#[must_use]
pub fn without_byte_order_mark(text: &[u8]) -> &[u8] {
    text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text)
}

/// As `serde_json::from_slice`, with objects only where structs are expected. A byte-order mark is passed over.
///
/// # Errors
/// Where the text is no JSON, or not of this type.
pub fn from_slice<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T> {
    let mut reader = Deserializer::from_slice(without_byte_order_mark(text));
    let value = T::deserialize(StrictObjects::new(&mut reader))?;
    reader.end()?;
    Ok(value)
}

/// As [`from_slice`], for messages without any list where their type buffers its content: small tagged messages.
///
/// # Errors
/// As [`from_slice`], and where a buffered part has a list.
pub fn from_slice_without_buffered_lists<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T> {
    let mut reader = Deserializer::from_slice(without_byte_order_mark(text));
    let value = T::deserialize(StrictObjects::without_buffered_lists(&mut reader))?;
    reader.end()?;
    Ok(value)
}

/// As [`from_slice`], of a text in UTF-8.
///
/// # Errors
/// As [`from_slice`].
pub fn from_str<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T> {
    from_slice(text.as_bytes())
}

/// As `serde_json::from_value`, with objects only where structs are expected.
///
/// # Errors
/// Where the value is not of this type.
pub fn from_value<T: DeserializeOwned>(value: Value) -> Result<T> {
    T::deserialize(StrictObjects::new(value))
}

#[cfg(test)]
mod tests;
