//! The name and the labels of a node or an allocation, for people and for searches. Neither is unique, and no decision depends on them.
//!
//! The edge validates names, keys and values; a state machine bounds the number of labels.

use crate::explanation::Explanation;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};

/// The most labels of one entity.
pub const MAX_LABELS: usize = 32;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metadata {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// A change of a [`Metadata`], as a JSON merge patch (RFC 7396).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetadataPatch {
    #[serde(default, skip_serializing_if = "PatchValue::is_keep")]
    pub name: PatchValue<String>,
    /// The new values of the named labels; `None` removes a label.
    #[serde(default, skip_serializing_if = "PatchValue::is_keep")]
    pub labels: PatchValue<BTreeMap<String, Option<String>>>,
}

/// A member of a JSON merge patch: left out, null, or a value. A struct leaves `Keep` out by `skip_serializing_if` and reads it by
/// `default`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PatchValue<T> {
    #[default]
    Keep,
    Remove,
    Set(T),
}

/// There would be more labels than [`MAX_LABELS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyLabels;

impl Metadata {
    /// True where there is neither a name nor a label.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.name.is_none() && self.labels.is_empty()
    }

    /// The metadata itself, where the labels are within their bound.
    ///
    /// # Errors
    /// [`TooManyLabels`]
    pub fn bounded(self) -> Result<Self, TooManyLabels> {
        if self.labels.len() > MAX_LABELS { Err(TooManyLabels) } else { Ok(self) }
    }

    /// The metadata after the patch.
    ///
    /// # Errors
    /// [`TooManyLabels`]
    pub fn patched(&self, patch: &MetadataPatch) -> Result<Self, TooManyLabels> {
        let name = match &patch.name {
            PatchValue::Keep => self.name.clone(),
            PatchValue::Remove => None,
            PatchValue::Set(name) => Some(name.clone()),
        };
        let labels = match &patch.labels {
            PatchValue::Keep => self.labels.clone(),
            PatchValue::Remove => BTreeMap::new(),
            PatchValue::Set(changes) => {
                let mut labels = self.labels.clone();
                for (key, value) in changes {
                    match value {
                        Some(value) => labels.insert(key.clone(), value.clone()),
                        None => labels.remove(key),
                    };
                }
                labels
            }
        };
        Self { name, labels }.bounded()
    }

    /// The terms that lists find it by ([`Machine::terms`](crate::Machine::terms)).
    #[must_use]
    pub fn terms(&self) -> BTreeSet<String> {
        let of_label = |(key, value): (&String, &String)| [label_term(key, None), label_term(key, Some(value))];
        let labels = self.labels.iter().flat_map(of_label);
        self.name.iter().map(|name| name_term(name)).chain(labels).collect()
    }
}

/// The term of everything that has this name.
#[must_use]
pub fn name_term(name: &str) -> String {
    format!("name/{name}")
}

/// The term of everything that has the label, or has it with this value. A key has no `=`.
#[must_use]
pub fn label_term(key: &str, value: Option<&str>) -> String {
    match value {
        Some(value) => format!("label/{key}={value}"),
        None => format!("label/{key}"),
    }
}

impl MetadataPatch {
    /// True where the patch names no member.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.name.is_keep() && self.labels.is_keep()
    }
}

impl<T> PatchValue<T> {
    #[must_use]
    pub const fn is_keep(&self) -> bool {
        matches!(self, Self::Keep)
    }

    /// The same member with a mapped value.
    #[must_use]
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> PatchValue<U> {
        match self {
            Self::Keep => PatchValue::Keep,
            Self::Remove => PatchValue::Remove,
            Self::Set(value) => PatchValue::Set(f(value)),
        }
    }
}

impl<T: Serialize> Serialize for PatchValue<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Keep | Self::Remove => serializer.serialize_none(),
            Self::Set(value) => serializer.serialize_some(value),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for PatchValue<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Option::deserialize(deserializer)?.map_or(Self::Remove, Self::Set))
    }
}

/// The explanation of [`TooManyLabels`]; `what` names the resource as the API does.
#[must_use]
pub fn too_many_labels(what: &str, max: usize) -> Explanation {
    let message = format!("The {what} would have more than {max} labels; remove some in the same request.");
    Explanation::invalid(message, "labels")
}

#[cfg(test)]
mod tests;
