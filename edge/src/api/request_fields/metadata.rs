//! The names and labels of nodes and allocations, and the selectors by which lists are filtered.

use domain::metadata::{MAX_LABELS, Metadata, MetadataPatch, PatchValue, label_term, name_term};
use domain::redact::is_secret;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::without_control;
use crate::api::request_fields::secret_detection::holds_a_secret;
use crate::http::visible_text::{is_blank, shows_nothing_pattern};

const MAX_NAME_LEN: usize = 63;
const MAX_KEY_LEN: usize = 253;
/// The most labels that one request names: as many as there can be are removed, and as many are set.
const MAX_LABEL_CHANGES: usize = 2 * MAX_LABELS;

/// [`is_printable`] as a pattern, for the description.
const PRINTABLE: &str = concat!(
    r"^[^\u0000-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]*[^\u0000-\u001f\u007f-\u009f",
    shows_nothing_pattern!(),
    r"][^\u0000-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]*$"
);
const LABEL_KEY: &str = r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$";
const LABEL_VALUE: &str = r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$";
const LABEL_SELECTOR: &str = r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?(=([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?)?$";

texts! {
    /// The key of a label, as Kubernetes writes it: a name, after a DNS name and a slash where it has a prefix. What names a secret, as
    /// `api_token` does, is refused.
    LabelKey: 253, "a label's key such as env or example.com/team, of letters, digits, dots, dashes and underscores, and no name of a secret",
        LABEL_KEY, is_label_key;
}

/// A name for people, not unique. Blanks around it are taken off. What looks like a key, a token or a password is refused, and so is
/// a UUID.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct ResourceName(String);

impl<'de> Deserialize<'de> for ResourceName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let name = text.trim();
        let fits = (1..=MAX_NAME_LEN).contains(&text.chars().count()) && is_printable(&text) && !is_blank(name);
        if fits && uuid::Uuid::parse_str(name).is_err() && !holds_a_secret(name) {
            Ok(Self(name.to_owned()))
        } else {
            Err(D::Error::custom(
                "expected printable text other than blanks, without secrets and no UUID, 1 to 63 characters",
            ))
        }
    }
}

impl PartialSchema for ResourceName {
    fn schema() -> RefOr<Schema> {
        text(PRINTABLE, MAX_NAME_LEN)
            .min_length(Some(1))
            .description(Some(
                "A name for people, not unique. Blanks around it are taken off. What looks like a key, a token or a password is \
                 refused, and so is a UUID.",
            ))
            .into()
    }
}

impl ToSchema for ResourceName {}

/// The value of a label. It may be empty. What looks like a key, a token or a password is refused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub(crate) struct LabelValue(String);

impl LabelValue {
    const EXPECTED: &'static str = "expected a label's value: at most 63 letters, digits, dots, dashes and underscores, beginning and \
                                    ending with a letter or digit, and no secret";

    fn parse(text: &str) -> Option<Self> {
        let fits = text.is_empty() || (is_label_name(text) && !holds_a_secret(text));
        fits.then(|| Self(text.to_owned()))
    }
}

impl<'de> Deserialize<'de> for LabelValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).ok_or_else(|| D::Error::custom(Self::EXPECTED))
    }
}

/// Labels: at most 32, each with its key and its value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct Labels(BTreeMap<LabelKey, LabelValue>);

impl<'de> Deserialize<'de> for Labels {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(LabelMapVisitor { max: MAX_LABELS, value: PhantomData }).map(Self)
    }
}

impl PartialSchema for Labels {
    fn schema() -> RefOr<Schema> {
        let value = text(LABEL_VALUE, MAX_NAME_LEN);
        labels(value, MAX_LABELS).description(Some("Labels by their keys.")).into()
    }
}

impl ToSchema for Labels {}

/// A change of labels (RFC 7396): what is null goes, what is named is set, the others stay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct LabelChanges(BTreeMap<LabelKey, Option<LabelValue>>);

impl<'de> Deserialize<'de> for LabelChanges {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(LabelMapVisitor { max: MAX_LABEL_CHANGES, value: PhantomData }).map(Self)
    }
}

impl PartialSchema for LabelChanges {
    fn schema() -> RefOr<Schema> {
        let value = text(LABEL_VALUE, MAX_NAME_LEN).schema_type(SchemaType::from_iter([Type::String, Type::Null]));
        labels(value, MAX_LABEL_CHANGES)
            .description(Some(
                "What changes of the labels (RFC 7396): one that is null is removed, one that has a value is set, the others stay.",
            ))
            .into()
    }
}

impl ToSchema for LabelChanges {}

/// An object whose keys are label keys, each there once.
struct LabelMapVisitor<V> {
    max: usize,
    value: PhantomData<V>,
}

impl<'de, V: Deserialize<'de>> Visitor<'de> for LabelMapVisitor<V> {
    type Value = BTreeMap<LabelKey, V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of labels")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut labels = BTreeMap::new();
        while let Some((key, value)) = members.next_entry::<LabelKey, V>()? {
            if labels.insert(key, value).is_some() {
                return Err(A::Error::custom("a label is given twice"));
            }
            if labels.len() > self.max {
                return Err(A::Error::custom(format!("expected at most {} labels", self.max)));
            }
        }
        Ok(labels)
    }
}

/// A label that a resource must have: `key`, or `key=value`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LabelSelector {
    key: LabelKey,
    value: Option<LabelValue>,
}

impl LabelSelector {
    fn parse(text: &str) -> Option<Self> {
        let (key, value) = text.split_once('=').map_or((text, None), |(key, value)| (key, Some(value)));
        let key = is_label_key(key).then(|| LabelKey(key.to_owned()))?;
        let value = match value {
            Some(value) => Some(LabelValue::parse(value)?),
            None => None,
        };
        Some(Self { key, value })
    }
}

impl PartialSchema for LabelSelector {
    fn schema() -> RefOr<Schema> {
        text(LABEL_SELECTOR, MAX_KEY_LEN + 1 + MAX_NAME_LEN)
            .min_length(Some(1))
            .description(Some("A label that must be there: `key`, or `key=value` where it must have that value."))
            .into()
    }
}

impl ToSchema for LabelSelector {}

/// Labels that must all be present: selectors with commas between them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LabelSelectors(BTreeSet<LabelSelector>);

impl LabelSelectors {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<'de> Deserialize<'de> for LabelSelectors {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let selectors: Option<BTreeSet<_>> = text.split(',').map(LabelSelector::parse).collect();
        let selectors = selectors.ok_or_else(|| {
            D::Error::custom("expected a label's key, or a key and a value with an equals sign between them")
        })?;
        if selectors.len() > MAX_LABELS {
            return Err(D::Error::custom(format!("expected at most {MAX_LABELS} labels")));
        }
        Ok(Self(selectors))
    }
}

/// In one order, whatever the order of the request.
impl Serialize for LabelSelectors {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(|selector| label_term(&selector.key, selector.value())))
    }
}

impl LabelSelector {
    fn value(&self) -> Option<&str> {
        self.value.as_ref().map(|value| value.0.as_str())
    }
}

/// The search terms for this name and these labels.
pub(crate) fn terms(name: Option<&ResourceName>, labels: &LabelSelectors) -> Vec<String> {
    let name = name.map(|name| name_term(&name.0));
    name.into_iter().chain(labels.0.iter().map(|label| label_term(&label.key, label.value()))).collect()
}

/// The name and the labels of a new resource.
pub(crate) fn metadata(name: Option<&ResourceName>, labels: Option<&Labels>) -> Metadata {
    let labels = labels.into_iter().flat_map(|labels| &labels.0);
    Metadata {
        name: name.map(|name| name.0.clone()),
        labels: labels.map(|(key, value)| (key.to_string(), value.0.clone())).collect(),
    }
}

/// The change of a name and of labels.
pub(crate) fn metadata_patch(name: PatchValue<ResourceName>, labels: PatchValue<LabelChanges>) -> MetadataPatch {
    let change = |(key, value): (LabelKey, Option<LabelValue>)| (key.to_string(), value.map(|value| value.0));
    MetadataPatch {
        name: name.map(|name| name.0),
        labels: labels.map(|changes| changes.0.into_iter().map(change).collect()),
    }
}

fn text(pattern: &str, max: usize) -> ObjectBuilder {
    ObjectBuilder::new().schema_type(SchemaType::new(Type::String)).max_length(Some(max)).pattern(Some(pattern))
}

fn labels(value: ObjectBuilder, max: usize) -> ObjectBuilder {
    let key = text(LABEL_KEY, MAX_KEY_LEN).min_length(Some(1));
    ObjectBuilder::new()
        .schema_type(SchemaType::new(Type::Object))
        .property_names(Some(key.build()))
        .additional_properties(Some(Schema::from(value.build())))
        .max_properties(Some(max))
        .examples([serde_json::json!({ "env": "dev" })])
}

/// Whether the text has no invisible characters and none that change the direction of text.
fn is_printable(text: &str) -> bool {
    let is_invisible = |c: char| matches!(c, '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    without_control(text) && !text.chars().any(is_invisible)
}

fn is_label_key(text: &str) -> bool {
    let (prefix, name) = text.rsplit_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    text.len() <= MAX_KEY_LEN
        && prefix.is_none_or(is_dns_name)
        && is_label_name(name)
        && !is_secret(name)
        && !holds_a_secret(text)
}

/// 1 to 63 characters of the alphabet of labels.
fn is_label_name(text: &str) -> bool {
    let ends_well = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.len() <= MAX_NAME_LEN
        && ends_well(text.chars().next())
        && ends_well(text.chars().next_back())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// Lower-case parts with dots between them, as in a host's name (RFC 1123).
fn is_dns_name(text: &str) -> bool {
    let is_part = |part: &str| {
        (1..=63).contains(&part.len())
            && part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
            && !part.starts_with('-')
            && !part.ends_with('-')
    };
    text.split('.').all(is_part)
}

#[cfg(test)]
mod tests;
