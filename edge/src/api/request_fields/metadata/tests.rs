//! The syntax of names, labels and selectors.

use super::*;
use crate::http::request_body::{parse_json, parse_query};
use domain::redact::{SECRET_ENDS, SECRET_WORDS, redact};
use proptest::prelude::*;
use serde_json::json;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct New {
    name: Option<ResourceName>,
    labels: Option<Labels>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Changed {
    #[serde(default)]
    name: PatchValue<ResourceName>,
    #[serde(default)]
    labels: PatchValue<LabelChanges>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Filter {
    name: Option<ResourceName>,
    #[serde(default)]
    label: LabelSelectors,
}

fn refusal(body: &serde_json::Value) -> String {
    match parse_json::<New>(body.to_string().as_bytes()) {
        Ok(read) => panic!("{body} is read as {read:?}"),
        Err(error) => format!("{} | {}", error.details()["field"], error.message()),
    }
}

#[test]
fn name_is_printable_text_with_blanks_trimmed() {
    let longest = "ü".repeat(63);
    for (written, read) in [
        ("  train 7\u{a0}", "train 7"),
        ("100%_'; DROP--", "100%_'; DROP--"),
        (&longest, &longest),
        ("👩\u{200d}💻", "👩\u{200d}💻"),
    ] {
        let new: New = parse_json(json!({ "name": written }).to_string().as_bytes()).unwrap();
        assert_eq!(metadata(new.name.as_ref(), None).name.as_deref(), Some(read));
    }
}

#[test]
fn invalid_name_is_refused_without_its_text() {
    let long = "a".repeat(64);
    for name in [
        "",
        " ",
        "\u{a0}",
        &long,
        "a\nb",
        "a\u{1b}[31m",
        "a\u{7f}",
        "a\u{85}b",
        "a\u{202e}b",
        "a\u{200b}",
        "\u{feff}",
        "a\u{2028}b",
        "a\u{0}",
        "0198f000-0000-7000-8000-00000000000a",
        "0198F00000007000800000000000000A",
        "gpusak_AAAAAAAAAAAAAAAAAAAAAAAA",
    ] {
        let line = refusal(&json!({ "name": name }));
        assert!(line.starts_with(r#""name" | "#) || line.contains("NUL"), "{name:?}: {line}");
        assert!(name.len() < 3 || !line.contains(name), "{line}");
    }
}

#[test]
fn labels_follow_the_kubernetes_syntax() {
    let (long, prefix) = ("a".repeat(63), vec!["b".repeat(60); 3].join("."));
    for (key, value) in [
        ("env", "dev"),
        ("Env_1.x-y", "A"),
        ("e", ""),
        ("example.com/team", "ml.2_x-y"),
        (&long, &long),
        (&format!("{prefix}/{long}"), "x"),
        ("0", "0"),
    ] {
        let new: New = parse_json(json!({ "labels": { key: value } }).to_string().as_bytes()).unwrap();
        let read = metadata(None, new.labels.as_ref());
        assert_eq!(read.labels, [(key.to_owned(), value.to_owned())].into());
    }
}

#[test]
fn labels_that_are_none_are_refused_by_the_name_of_their_field() {
    let (long, deep) = ("a".repeat(64), format!("{}/a", "b.".repeat(127)));
    let mut lines = Vec::new();
    for key in [
        "",
        "-a",
        "a-",
        ".a",
        "_a",
        "a b",
        "a=b",
        "a,b",
        "ü",
        "a\u{0}",
        "a\n",
        "/a",
        "a/",
        "a/b/c",
        "Example.com/a",
        "-x.com/a",
        "x..com/a",
        "a'b",
        "a%",
        "\"",
        "password",
        "example.com/api_token",
        "gpusak_AAAAAAAAAAAAAAAAAAAAAAAA",
        &long,
        &deep,
    ] {
        lines.push(refusal(&json!({ "labels": { key: "x" } })));
    }
    for value in ["-a", "a-", "a b", "a=b", "a,b", "ü", "a/b", "a\u{0}b", "gpusak_AAAAAAAAAAAAAAAAAAAAAAAA", &long] {
        lines.push(refusal(&json!({ "labels": { "env": value } })));
    }
    for labels in [json!({ "env": null }), json!({ "env": 1 }), json!(["env"]), json!("env=dev"), json!([])] {
        lines.push(refusal(&json!({ "labels": labels })));
    }
    let many: serde_json::Map<_, _> = (0..33).map(|n| (format!("k{n}"), json!(""))).collect();
    lines.push(refusal(&json!({ "labels": many })));
    let twice = parse_json::<New>(br#"{"labels": {"a": "1", "a": "1"}}"#).unwrap_err();
    lines.push(format!("{} | {}", twice.details()["field"], twice.message()));
    insta::assert_snapshot!(lines.join("\n"));
}

#[test]
fn label_change_distinguishes_null_from_absent() {
    let read = |body: &str| {
        let changed: Changed = parse_json(body.as_bytes()).unwrap();
        serde_json::to_value(metadata_patch(changed.name, changed.labels)).unwrap()
    };
    for body in [
        json!({}),
        json!({ "name": null }),
        json!({ "name": "a" }),
        json!({ "labels": null }),
        json!({ "labels": {} }),
        json!({ "labels": { "a": null, "b": "" } }),
    ] {
        assert_eq!(read(&body.to_string()), body);
    }
    let many: serde_json::Map<_, _> = (0..65).map(|n| (format!("k{n}"), json!(null))).collect();
    assert!(parse_json::<Changed>(json!({ "labels": many }).to_string().as_bytes()).is_err());
}

#[test]
fn selectors_are_keys_or_key_value_pairs_in_any_order() {
    let read = |query: &str| {
        let filter: Filter = parse_query(query).unwrap();
        terms(filter.name.as_ref(), &filter.label)
    };
    assert_eq!(read(""), Vec::<String>::new());
    assert_eq!(read("name=a%20b"), ["name/a b"]);
    assert_eq!(read("label=gpu"), ["label/gpu"]);
    assert_eq!(read("label=env="), ["label/env="]);
    assert_eq!(read("label=example.com%2Fx=1%2Cenv=dev,env"), ["label/env", "label/env=dev", "label/example.com/x=1"]);
    assert_eq!(read("label=a,b,a"), read("label=b,a"));
}

#[test]
fn invalid_selector_is_refused() {
    let many = (0..33).map(|n| format!("k{n}")).collect::<Vec<_>>().join(",");
    let long = format!("env={}", "a".repeat(64));
    for label in [
        "", "=", "=dev", "a=b=c", "a,,b", "a,", ",", "a%20b", "a%00", "ü", "a=ü", "%25", "a=_", "a!=b", "!a", &many,
        &long,
    ] {
        let error = parse_query::<Filter>(&format!("label={label}")).unwrap_err();
        assert!(error.details().get("field").is_none_or(|field| field == "label"), "{label}: {}", error.message());
    }
    assert!(parse_query::<Filter>("name=a&name=b").is_err());
    assert!(parse_query::<Filter>("name=%00").is_err());
    assert!(parse_query::<Filter>("name=").is_err());
}

/// The texts that a pattern of the description admits.
fn admitted(pattern: &str) -> impl Strategy<Value = String> {
    proptest::string::string_regex(pattern.trim_start_matches('^').trim_end_matches('$')).unwrap()
}

proptest! {
    #[test]
    fn values_that_the_description_admits_are_accepted(key in admitted(LABEL_KEY), value in admitted(LABEL_VALUE), selector in admitted(LABEL_SELECTOR)) {
        prop_assume!(key.len() <= MAX_KEY_LEN && selector.len() <= MAX_KEY_LEN);
        prop_assert!(is_label_key(&key), "{key}");
        prop_assert!(LabelValue::parse(&value).is_some(), "{value}");
        prop_assert!(LabelSelector::parse(&selector).is_some(), "{selector}");
    }
}

/// Parts of keys that are taken as names of secrets, and of keys that nearly are.
fn key_part() -> impl Strategy<Value = String> {
    let words: Vec<_> =
        SECRET_WORDS.into_iter().chain(SECRET_ENDS).chain(["api", "key", "id", "a", "Private"]).collect();
    let cased = (prop::sample::select(words), any::<bool>());
    cased.prop_map(|(word, upper)| if upper { word.to_ascii_uppercase() } else { word.to_owned() })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Stored responses are redacted by the names of fields: a label whose key were such a name would be shown otherwise in a repetition.
    #[test]
    fn label_that_is_accepted_is_the_same_in_a_stored_response(
        prefix in prop::sample::select(vec!["", "a.b/", "api/", "private-key.x/", "my-token/"]),
        parts in prop::collection::vec((key_part(), prop::sample::select(vec!["", "_", "-", "."])), 1..4),
    ) {
        let key: String = parts.iter().flat_map(|(part, separator)| [part.as_str(), separator]).collect();
        let key = format!("{prefix}{key}");
        let written = json!({ "labels": { key.as_str(): "v" } });
        let mut stored = written.clone();
        redact(&mut stored);
        let is_accepted = parse_json::<New>(written.to_string().as_bytes()).is_ok();
        prop_assert!(!is_accepted || stored == written, "{stored}");
    }
}
