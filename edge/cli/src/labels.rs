//! Names and labels of nodes and allocations on the command line: in new resources, changes and filters.

use crate::api::Query;
use crate::failure::Failure;
use serde_json::{Map, Value};
use std::str::FromStr;

/// A label on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Label {
    key: String,
    value: String,
}

impl FromStr for Label {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('=') {
            Some((key, value)) if !key.is_empty() => Ok(Self { key: key.to_owned(), value: value.to_owned() }),
            Some(_) | None => Err("a key, an equals sign and a value: env=dev"),
        }
    }
}

/// What something new is called.
#[derive(Debug, clap::Args)]
pub(crate) struct Metadata {
    /// A name for people; it need not be unique.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// A label; repeatable.
    #[arg(long = "label", value_name = "KEY=VALUE")]
    labels: Vec<Label>,
}

impl Metadata {
    /// Adds it to the body of a request.
    pub(crate) fn add_to(self, body: &mut Value) -> Result<(), Failure> {
        if let Some(name) = self.name {
            body["name"] = name.into();
        }
        if !self.labels.is_empty() {
            body["labels"] = Value::Object(labels(self.labels, Vec::new())?);
        }
        Ok(())
    }
}

/// What changes of a name and of labels.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(crate) struct MetadataChange {
    /// A name for people; it need not be unique.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Remove its name.
    #[arg(long, conflicts_with = "name")]
    no_name: bool,
    /// A label to set; repeatable.
    #[arg(long = "label", value_name = "KEY=VALUE")]
    labels: Vec<Label>,
    /// A label to remove; repeatable.
    #[arg(long = "remove-label", value_name = "KEY")]
    removed: Vec<String>,
}

impl MetadataChange {
    /// The arguments' ids, for commands that need one of them or of others.
    pub(crate) const IDS: [&'static str; 4] = ["name", "no_name", "labels", "removed"];

    /// The change as a JSON merge patch (RFC 7396).
    pub(crate) fn patch(self) -> Result<Map<String, Value>, Failure> {
        let name = match self.no_name {
            true => Some(Value::Null),
            false => self.name.map(Value::from),
        };
        let labels = labels(self.labels, self.removed)?;
        let labels = (!labels.is_empty()).then_some(Value::Object(labels));
        let members = [("name", name), ("labels", labels)];
        Ok(members.into_iter().filter_map(|(member, value)| Some((member.to_owned(), value?))).collect())
    }
}

fn labels(set: Vec<Label>, removed: Vec<String>) -> Result<Map<String, Value>, Failure> {
    let set = set.into_iter().map(|label| (label.key, Value::from(label.value)));
    let removed = removed.into_iter().map(|key| (key, Value::Null));
    let mut labels = Map::new();
    for (key, value) in set.chain(removed) {
        if labels.contains_key(&key) {
            return Err(Failure::usage(format!("label `{key}` is given twice")));
        }
        labels.insert(key, value);
    }
    Ok(labels)
}

/// What a list is narrowed to.
#[derive(Debug, clap::Args)]
pub(crate) struct Selector {
    /// List those of this name.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// List those that have this label, or have it with this value; repeatable: they have all of them.
    #[arg(long = "label", short = 'l', value_name = "KEY[=VALUE]")]
    labels: Vec<String>,
}

impl Selector {
    pub(crate) fn add_to(self, query: &mut Query<'_>) {
        query.extend(self.name.map(|name| ("name", name)));
        query.extend(self.labels.into_iter().map(|label| ("label", label)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;
    use serde_json::json;

    #[derive(Debug, clap::Parser)]
    struct Given {
        #[command(flatten)]
        change: MetadataChange,
    }

    fn patch(arguments: &[&str]) -> Value {
        let given = Given::try_parse_from(["x"].iter().chain(arguments)).unwrap();
        Value::Object(given.change.patch().unwrap())
    }

    #[test]
    fn metadata_change_is_a_merge_patch_of_the_given_arguments() {
        assert_eq!(patch(&[]), json!({}));
        assert_eq!(patch(&["--no-name"]), json!({ "name": null }));
        assert_eq!(
            patch(&["--name", "a b", "--label", "env=dev", "--label", "example.com/x=", "--remove-label", "old"]),
            json!({ "name": "a b", "labels": { "env": "dev", "example.com/x": "", "old": null } })
        );
        // The service validates values.
        assert_eq!(patch(&["--label", "a=b=c"]), json!({ "labels": { "a": "b=c" } }));
    }

    #[test]
    fn contradictory_or_invalid_label_arguments_are_refused() {
        for arguments in [["--label", "a=1", "--label", "a=2"], ["--label", "a=1", "--remove-label", "a"]] {
            let given = Given::try_parse_from(["x"].iter().chain(&arguments)).unwrap();
            assert!(given.change.patch().is_err(), "{arguments:?}");
        }
        for arguments in [["--label", "a"], ["--label", "=1"], ["--label", ""]] {
            assert!(Given::try_parse_from(["x"].iter().chain(&arguments)).is_err(), "{arguments:?}");
        }
        assert!(Given::try_parse_from(["x", "--name", "a", "--no-name"]).is_err());
    }
}
