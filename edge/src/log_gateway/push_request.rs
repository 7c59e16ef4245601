//! A batch of log lines as a client of Loki pushes it: JSON, or protobuf compressed with snappy.
//!
//! The lines themselves are passed on as they came. What is read here is what the gateway judges: the labels of each stream, and the number
//! and the length of its entries. Nothing is allocated for an entry, so that a small body cannot become a large one in memory.

use crate::http::error::{ApiError, Code};
use prost::bytes::Buf;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::fmt;

/// The most bytes of a batch after decompression.
pub(super) const DECODED_BYTES: usize = 8 << 20;
/// The most streams of a batch.
const STREAMS: usize = 1000;
/// The most entries of a batch.
const ENTRIES: usize = 100_000;
/// The longest line, in bytes: what Loki takes by default.
const LINE_BYTES: usize = 256 * 1024;
/// Labels of one stream that are read at all; how many are allowed is decided with their names.
const LABELS_READ: usize = 64;
/// The longest text of one stream's labels in a protobuf batch, in bytes.
const LABEL_TEXT_BYTES: usize = 16 * 1024;

/// The labels of one stream.
pub(super) type Labels = BTreeMap<String, String>;

/// What the gateway judges and counts of a batch.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PushSummary {
    pub(super) streams: Vec<Labels>,
    pub(super) entries: usize,
}

/// The form of a batch, by its media type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PushFormat {
    Json,
    /// Snappy's block format around protobuf. Clients name no `Content-Encoding`.
    SnappyProtobuf,
}

impl PushFormat {
    /// The form that a `Content-Type` names.
    pub(super) fn of(content_type: &str) -> Option<Self> {
        match content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase().as_str() {
            "application/json" => Some(Self::Json),
            "application/x-protobuf" => Some(Self::SnappyProtobuf),
            _ => None,
        }
    }
}

/// Reads a batch within the bounds.
///
/// # Errors
/// `payload_too_large` over a bound on bytes, `invalid_request` for everything else.
pub(super) fn read(format: PushFormat, body: &[u8]) -> Result<PushSummary, ApiError> {
    match format {
        PushFormat::Json => read_json(body),
        PushFormat::SnappyProtobuf => read_protobuf(&decompress(body)?),
    }
}

/// Decompresses, where the length that the block declares is within the bound: it is checked before memory is allocated.
fn decompress(body: &[u8]) -> Result<Vec<u8>, ApiError> {
    let unreadable = |_| malformed("The body cannot be decompressed; compress it with snappy's block format.");
    let declared = snap::raw::decompress_len(body).map_err(unreadable)?;
    if declared > DECODED_BYTES {
        let message = format!(
            "The batch has {declared} bytes after decompression, {DECODED_BYTES} are the most; send it in parts."
        );
        return Err(ApiError::new(Code::PayloadTooLarge, message).detail("limit_bytes", DECODED_BYTES));
    }
    snap::raw::Decoder::new().decompress_vec(body).map_err(unreadable)
}

fn malformed(message: impl Into<std::borrow::Cow<'static, str>>) -> ApiError {
    ApiError::invalid_request(message)
}

/// Why a batch is over a bound, in the sender's terms.
fn too_many(what: &str, most: usize) -> String {
    format!("the batch has more than {most} {what}; send it in parts")
}

impl PushSummary {
    fn add_entry(&mut self, line_bytes: usize) -> Result<(), String> {
        if line_bytes > LINE_BYTES {
            return Err(format!("a line has {line_bytes} bytes, {LINE_BYTES} are the most; cut it"));
        }
        self.entries += 1;
        if self.entries > ENTRIES { Err(too_many("entries", ENTRIES)) } else { Ok(()) }
    }

    fn add_stream(&mut self, labels: Labels) -> Result<(), String> {
        self.streams.push(labels);
        if self.streams.len() > STREAMS { Err(too_many("streams", STREAMS)) } else { Ok(()) }
    }
}

// JSON: {"streams": [{"stream": {label: value}, "values": [["nanoseconds", "line", {metadata}]]}]}

fn read_json(body: &[u8]) -> Result<PushSummary, ApiError> {
    let mut summary = PushSummary::default();
    let mut reader = serde_json::Deserializer::from_slice(body);
    Batch(&mut summary)
        .deserialize(&mut reader)
        .and_then(|()| reader.end())
        .map_err(|error| malformed(format!("The batch cannot be read as JSON: {error}.")))?;
    Ok(summary)
}

struct Batch<'a>(&'a mut PushSummary);

impl<'de> DeserializeSeed<'de> for Batch<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Batch<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `streams`")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut found = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == "streams" && !found {
                found = true;
                map.next_value_seed(Streams(&mut *self.0))?;
            } else {
                return Err(A::Error::custom("an object has the one field `streams`, once"));
            }
        }
        if found { Ok(()) } else { Err(A::Error::missing_field("streams")) }
    }
}

struct Streams<'a>(&'a mut PushSummary);

impl<'de> DeserializeSeed<'de> for Streams<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Streams<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of streams")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while let Some(()) = list.next_element_seed(Stream(&mut *self.0))? {}
        Ok(())
    }
}

struct Stream<'a>(&'a mut PushSummary);

impl<'de> DeserializeSeed<'de> for Stream<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Stream<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `stream` and `values`")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let (mut labels, mut has_values) = (None, false);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "stream" if labels.is_none() => labels = Some(map.next_value::<BoundedLabels>()?.0),
                "values" if !has_values => {
                    has_values = true;
                    map.next_value_seed(Values(&mut *self.0))?;
                }
                _ => return Err(A::Error::custom("a stream has the fields `stream` and `values`, each once")),
            }
        }
        let labels = labels.ok_or_else(|| A::Error::missing_field("stream"))?;
        if !has_values {
            return Err(A::Error::missing_field("values"));
        }
        self.0.add_stream(labels).map_err(A::Error::custom)
    }
}

struct BoundedLabels(Labels);

impl<'de> Deserialize<'de> for BoundedLabels {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(LabelVisitor).map(Self)
    }
}

struct LabelVisitor;

impl<'de> Visitor<'de> for LabelVisitor {
    type Value = Labels;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of labels, all of them texts")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Labels, A::Error> {
        let mut labels = Labels::new();
        while let Some((name, value)) = map.next_entry::<String, String>()? {
            insert_label(&mut labels, name, value).map_err(A::Error::custom)?;
        }
        Ok(labels)
    }
}

fn insert_label(labels: &mut Labels, name: String, value: String) -> Result<(), String> {
    if labels.insert(name, value).is_some() {
        return Err("a label is given twice".to_owned());
    }
    if labels.len() > LABELS_READ { Err(format!("a stream has more than {LABELS_READ} labels")) } else { Ok(()) }
}

struct Values<'a>(&'a mut PushSummary);

impl<'de> DeserializeSeed<'de> for Values<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Values<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of entries")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while let Some(Entry { line_bytes }) = list.next_element()? {
            self.0.add_entry(line_bytes).map_err(A::Error::custom)?;
        }
        Ok(())
    }
}

/// `["nanoseconds", "line"]`, with an object of metadata where there is some.
struct Entry {
    line_bytes: usize,
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_seq(EntryVisitor)
    }
}

struct EntryVisitor;

impl<'de> Visitor<'de> for EntryVisitor {
    type Value = Entry;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an entry: [\"nanoseconds since 1970\", \"line\"]")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Entry, A::Error> {
        let time = list.next_element::<TextLength>()?.ok_or_else(|| A::Error::invalid_length(0, &self))?;
        if !time.is_digits {
            return Err(A::Error::custom("the time of an entry is a text of nanoseconds since 1970"));
        }
        let line = list.next_element::<TextLength>()?.ok_or_else(|| A::Error::invalid_length(1, &self))?;
        list.next_element::<IgnoredAny>()?;
        if list.next_element::<IgnoredAny>()?.is_some() {
            return Err(A::Error::invalid_length(4, &self));
        }
        Ok(Entry { line_bytes: line.bytes })
    }
}

/// Of a text its length, and whether it is a number; the text is not kept.
struct TextLength {
    bytes: usize,
    is_digits: bool,
}

impl<'de> Deserialize<'de> for TextLength {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_str(TextVisitor)
    }
}

struct TextVisitor;

impl Visitor<'_> for TextVisitor {
    type Value = TextLength;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }
    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<TextLength, E> {
        let is_digits = (1..=20).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
        Ok(TextLength { bytes: text.len(), is_digits })
    }
}

// Protobuf: PushRequest { repeated Stream streams = 1 }, Stream { string labels = 1; repeated Entry entries = 2; uint64 hash = 3 },
// Entry { Timestamp timestamp = 1; string line = 2; repeated LabelPair metadata = 3 }. Unknown fields are passed over, as protobuf wants it.

fn read_protobuf(body: &[u8]) -> Result<PushSummary, ApiError> {
    let mut summary = PushSummary::default();
    let read = fields(body, |field, stream| {
        if field != 1 {
            return Ok(());
        }
        let mut labels = None;
        fields(stream, |field, bytes| match field {
            1 if bytes.len() > LABEL_TEXT_BYTES => {
                Err(format!("the labels of a stream are over {LABEL_TEXT_BYTES} bytes"))
            }
            1 => {
                let text = std::str::from_utf8(bytes).map_err(|_| "the labels of a stream are not UTF-8".to_owned())?;
                labels = Some(parse_labels(text)?);
                Ok(())
            }
            2 => {
                let mut line_bytes = 0;
                fields(bytes, |field, bytes| {
                    if field == 2 {
                        std::str::from_utf8(bytes).map_err(|_| "a line is not UTF-8".to_owned())?;
                        line_bytes = bytes.len();
                    }
                    Ok(())
                })?;
                summary.add_entry(line_bytes)
            }
            _ => Ok(()),
        })?;
        summary.add_stream(labels.ok_or("a stream has no labels")?)
    });
    read.map_err(|why| malformed(format!("The batch cannot be read as protobuf: {why}.")))?;
    Ok(summary)
}

/// Calls `each` with the number and the bytes of every length-delimited field of a message.
fn fields(mut message: &[u8], mut each: impl FnMut(u32, &[u8]) -> Result<(), String>) -> Result<(), String> {
    while message.has_remaining() {
        let (field, wire_type) = decode_key(&mut message).map_err(|error| error.to_string())?;
        if wire_type == WireType::LengthDelimited {
            let length = decode_varint(&mut message).map_err(|error| error.to_string())?;
            let length = usize::try_from(length).ok().filter(|length| *length <= message.len());
            let (bytes, rest) = message.split_at(length.ok_or("a field is longer than its message")?);
            each(field, bytes)?;
            message = rest;
        } else {
            skip_field(wire_type, field, &mut message, DecodeContext::default()).map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}

/// Labels as a protobuf batch has them: `{name="value", other="value"}`, values quoted as in Go.
fn parse_labels(text: &str) -> Result<Labels, String> {
    let wrong = |rest: &str| {
        let position = text.len() - rest.len();
        format!("the labels of a stream cannot be read at byte {position}; they look like {{name=\"value\"}}")
    };
    let mut labels = Labels::new();
    let mut rest = text.trim().strip_prefix('{').ok_or_else(|| wrong(text))?.trim_start();
    while !rest.starts_with('}') {
        let (name, after) = rest.split_once('=').ok_or_else(|| wrong(rest))?;
        let quoted = after.trim_start().strip_prefix('"').ok_or_else(|| wrong(after))?;
        let (value, after) = unquote(quoted).ok_or_else(|| wrong(quoted))?;
        insert_label(&mut labels, name.trim().to_owned(), value)?;
        let after = after.trim_start();
        rest = match after.strip_prefix(',') {
            Some(next) => next.trim_start(),
            None if after.starts_with('}') => after,
            None => return Err(wrong(after)),
        };
    }
    if rest == "}" { Ok(labels) } else { Err(wrong(&rest[1..])) }
}

/// The value before the closing quote, and what follows the quote.
fn unquote(quoted: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => value.push(match characters.next()?.1 {
                'n' => '\n',
                't' => '\t',
                'r' => '\r',
                same @ ('"' | '\\') => same,
                'u' => {
                    let digits: String = characters.by_ref().take(4).map(|(_, digit)| digit).collect();
                    char::from_u32(u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 4)?)?
                }
                _ => return None,
            }),
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests;
