//! Merge patches of names and labels, and the search terms.

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn metadata(name: Option<&str>, labels: &[(&str, &str)]) -> Metadata {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    Metadata { name: name.map(str::to_owned), labels }
}

fn patch(written: Value) -> MetadataPatch {
    serde_json::from_value(written).unwrap()
}

#[test]
fn patch_sets_what_it_names_removes_what_is_null_and_keeps_the_rest() {
    let before = metadata(Some("a"), &[("env", "dev"), ("team", "ml")]);
    for (written, after) in [
        (json!({}), before.clone()),
        (json!({ "name": "b" }), metadata(Some("b"), &[("env", "dev"), ("team", "ml")])),
        (json!({ "name": null }), metadata(None, &[("env", "dev"), ("team", "ml")])),
        (json!({ "labels": {} }), before.clone()),
        (json!({ "labels": null }), metadata(Some("a"), &[])),
        (json!({ "labels": { "env": null, "gone": null } }), metadata(Some("a"), &[("team", "ml")])),
        (
            json!({ "labels": { "env": "", "tier": "1" } }),
            metadata(Some("a"), &[("env", ""), ("team", "ml"), ("tier", "1")]),
        ),
    ] {
        assert_eq!(before.patched(&patch(written.clone())).unwrap(), after, "{written}");
    }
}

#[test]
fn labels_beyond_the_bound_are_refused_and_exchanged_at_the_bound() {
    let labels = |range: std::ops::Range<usize>| range.map(|n| (format!("k{n}"), String::new())).collect();
    let full = Metadata { name: None, labels: labels(0..MAX_LABELS) };
    assert_eq!(full.clone().bounded(), Ok(full.clone()));
    assert_eq!(full.patched(&patch(json!({ "labels": { "more": "" } }))), Err(TooManyLabels));
    assert!(full.patched(&patch(json!({ "labels": { "more": "", "k0": null } }))).is_ok());
    assert_eq!(Metadata { name: None, labels: labels(0..MAX_LABELS + 1) }.bounded(), Err(TooManyLabels));
}

#[test]
fn snapshot_without_metadata_omits_the_fields() {
    assert_eq!(serde_json::to_value(Metadata::default()).unwrap(), json!({}));
    assert_eq!(serde_json::from_value::<Metadata>(json!({})).unwrap(), Metadata::default());
    assert_eq!(serde_json::to_value(MetadataPatch::default()).unwrap(), json!({}));
}

#[test]
fn terms_of_a_label_are_its_key_and_its_key_with_its_value() {
    let terms = metadata(Some("a=b"), &[("example.com/env", "dev"), ("gpu", "")]).terms();
    let expected = ["label/example.com/env", "label/example.com/env=dev", "label/gpu", "label/gpu=", "name/a=b"];
    assert_eq!(terms.iter().map(String::as_str).collect::<Vec<_>>(), expected);
}

/// The algorithm of RFC 7396, section 2.
fn merge_patch(target: &mut Value, patch: &Value) {
    let Value::Object(members) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (name, value) in members {
        if value.is_null() {
            target.as_object_mut().unwrap().remove(name);
        } else {
            merge_patch(&mut target[name.as_str()], value);
        }
    }
}

prop_compose! {
    fn any_metadata()(name in proptest::option::of("[a-c]"), labels in proptest::collection::btree_map("[a-e]", "[x-z]?", 0..4)) -> Metadata {
        Metadata { name, labels }
    }
}

fn member<T: std::fmt::Debug + Clone + 'static>(
    value: impl Strategy<Value = T> + 'static,
) -> impl Strategy<Value = PatchValue<T>> {
    prop_oneof![Just(PatchValue::Keep), Just(PatchValue::Remove), value.prop_map(PatchValue::Set)]
}

prop_compose! {
    fn any_patch()(
        name in member("[a-c]"),
        labels in member(proptest::collection::btree_map("[a-e]", proptest::option::of("[x-z]?"), 0..4)),
    ) -> MetadataPatch {
        MetadataPatch { name, labels }
    }
}

proptest! {
    #[test]
    fn patch_does_what_the_rfc_says(before in any_metadata(), patch in any_patch()) {
        let mut expected = json!(before);
        merge_patch(&mut expected, &json!(patch));
        let after = before.patched(&patch).unwrap();
        let empty = json!({});
        prop_assert_eq!(&json!(after)["name"], &expected["name"]);
        prop_assert_eq!(json!(after.labels), expected.get("labels").unwrap_or(&empty).clone());
        prop_assert_eq!(after.patched(&patch).unwrap(), after, "a repetition changes nothing");
    }

    #[test]
    fn patch_survives_serialization(patch in any_patch()) {
        prop_assert_eq!(&serde_json::from_value::<MetadataPatch>(json!(patch)).unwrap(), &patch);
    }
}
