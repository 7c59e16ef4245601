use super::*;
use proptest::prelude::*;
use serde::Serialize;
use serde::de::Error as _;
use serde_json::json;
use std::collections::BTreeMap;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Scope {
    user: Option<String>,
    org: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Pair(u8, u8);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Named(Scope);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Kind {
    Plain,
    Wrapped(Scope),
    Fields { scope: Scope },
    Two(u8, u8),
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Message {
    scope: Scope,
    optional: Option<Scope>,
    listed: Vec<Scope>,
    by_name: BTreeMap<String, Scope>,
    named: Option<Named>,
    kind: Option<Kind>,
    pair: Option<Pair>,
    tuple: Option<(Scope, u8)>,
    bytes: Vec<u8>,
    anything: Value,
}

/// One that serde buffers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Tagged {
    Set { scope: Scope, listed: Vec<Scope>, anything: Value },
    Tick,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Untagged {
    Text(String),
    Scope(Scope),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Outer {
    direct: Scope,
    #[serde(flatten)]
    rest: Inner,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Inner {
    scope: Scope,
    either: Untagged,
}

fn outer() -> Value {
    json!({ "direct": {}, "scope": {}, "either": { "user": "ann" } })
}

#[test]
fn list_in_place_of_an_object_is_refused_at_every_depth() {
    for wrong in [
        json!([]),
        json!({ "scope": [] }),
        json!({ "scope": ["ann"] }),
        json!({ "scope": ["ann", null] }),
        json!({ "optional": [null, null] }),
        json!({ "listed": [{}, []] }),
        json!({ "by_name": { "a": [] } }),
        json!({ "named": [null, null] }),
        json!({ "kind": { "Wrapped": [null, null] } }),
        json!({ "kind": { "Fields": [{}] } }),
        json!({ "kind": { "Fields": { "scope": [] } } }),
        json!({ "tuple": [[], 1] }),
    ] {
        let error = from_value::<Message>(wrong.clone()).expect_err(&wrong.to_string()).to_string();
        // serde reads a variant with fields from a map alone.
        let is_of_serde = error == "invalid type: sequence, expected struct variant";
        assert!(error.contains(LIST_FOR_OBJECT) || is_of_serde, "{wrong}: {error}");
        from_str::<Message>(&wrong.to_string()).expect_err("the same from its text");
    }
}

#[test]
fn serde_alone_reads_a_list_as_an_object() {
    assert_eq!(serde_json::from_str::<Scope>(r#"["ann", null]"#).unwrap().user.as_deref(), Some("ann"));
}

#[test]
fn list_where_a_list_belongs_is_read() {
    let message = json!({
        "listed": [{ "user": "ann" }, {}], "pair": [1, 2], "tuple": [{}, 3], "bytes": [1, 2, 3], "kind": { "Two": [4, 5] },
        "anything": [[], { "a": [1] }],
    });
    let read: Message = from_value(message.clone()).unwrap();
    assert_eq!(read, serde_json::from_value(message).unwrap());
}

#[test]
fn path_and_position_of_the_list_are_in_the_error() {
    let text = br#"{"by_name": {"a": {"user": null}, "b": ["ann"]}}"#;
    let mut reader = Deserializer::from_slice(text);
    let error = serde_path_to_error::deserialize::<_, Message>(StrictObjects::new(&mut reader)).unwrap_err();
    assert_eq!(error.path().to_string(), "by_name.b");
    let error = error.into_inner();
    assert!(error.to_string().starts_with(LIST_FOR_OBJECT), "{error}");
    assert_eq!(error.line(), 1);
}

#[test]
fn list_in_a_buffered_part_is_refused_with_its_path() {
    let set =
        |scope: Value, listed: Value| json!({ "type": "set", "scope": scope, "listed": listed, "anything": [1, [2]] });
    let refused = |value: Value| tagged::from_value::<Tagged>(value).unwrap_err().to_string();
    assert_eq!(refused(set(json!([null, null]), json!([]))), "`scope` is a list; it must be an object");
    assert_eq!(refused(set(json!({}), json!([{}, [null, null]]))), "`listed[1]` is a list; it must be an object");
    assert!(refused(json!(["tick"])).contains("must be an object"));
    let text = set(json!([null, null]), json!([])).to_string();
    tagged::from_slice::<Tagged>(text.as_bytes()).unwrap_err();
    tagged::from_value::<Tagged>(set(json!({}), json!([{}]))).unwrap();
    tagged::from_value::<Tagged>(json!({ "type": "tick" })).unwrap();

    let with = |name: &str| {
        let mut value = outer();
        value[name] = json!(["ann", null]);
        tagged::from_value::<Outer>(value).unwrap_err().to_string()
    };
    assert!(with("direct").contains(LIST_FOR_OBJECT));
    assert_eq!(with("scope"), "`scope` is a list; it must be an object");
    assert_eq!(with("either"), "`either` is a list; it must be an object");
    tagged::from_value::<Outer>(outer()).unwrap();
}

#[test]
fn tagged_message_without_lists_has_none_in_any_part() {
    let read = |text: &str| from_slice_without_buffered_lists::<Tagged>(text.as_bytes());
    for wrong in [r#"["tick"]"#, r#"{"type":"set","scope":[null,null],"listed":[],"anything":1}"#] {
        read(wrong).unwrap_err();
    }
    read(r#"{"type":"tick"}"#).unwrap();
}

#[test]
fn byte_order_mark_is_passed_over_at_the_beginning_alone() {
    assert_eq!(from_slice::<Scope>(b"\xef\xbb\xbf{}").unwrap(), Scope::default());
    from_slice::<Scope>(b"\xef\xbb\xbf\xef\xbb\xbf{}").unwrap_err();
    from_slice::<Scope>(b"{}\xef\xbb\xbf").unwrap_err();
    from_slice::<Scope>(b"{} {}").unwrap_err();
}

#[test]
fn readable_form_of_the_format_is_the_inner_one() {
    struct Asked(bool);
    impl<'de> Deserialize<'de> for Asked {
        fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
            let readable = deserializer.is_human_readable();
            u8::deserialize(deserializer).map_err(D::Error::custom).map(|_| Self(readable))
        }
    }
    assert!(from_str::<Asked>("1").unwrap().0);
}

fn scope() -> impl Strategy<Value = Scope> {
    (any::<Option<String>>(), any::<Option<String>>()).prop_map(|(user, org)| Scope { user, org })
}

proptest! {
    #[test]
    fn what_is_written_is_read(first in scope(), second in scope(), bytes in any::<Vec<u8>>(), pair in any::<(u8, u8)>()) {
        let message = Message {
            scope: first.clone(),
            optional: Some(second.clone()),
            listed: vec![first.clone(), second.clone()],
            by_name: BTreeMap::from([("a".to_owned(), first.clone())]),
            named: Some(Named(second.clone())),
            kind: Some(Kind::Fields { scope: first.clone() }),
            pair: Some(Pair(pair.0, pair.1)),
            tuple: Some((first.clone(), pair.0)),
            bytes,
            anything: json!([1, { "a": [] }]),
        };
        prop_assert_eq!(&from_str::<Message>(&serde_json::to_string(&message).unwrap()).unwrap(), &message);
        prop_assert_eq!(&tagged::from_value::<Message>(serde_json::to_value(&message).unwrap()).unwrap(), &message);
        let set = Tagged::Set { scope: first, listed: vec![second], anything: json!([[], {}]) };
        prop_assert_eq!(&tagged::from_value::<Tagged>(serde_json::to_value(&set).unwrap()).unwrap(), &set);
    }
}
