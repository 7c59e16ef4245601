//! The stored form of a node, which every release reads and writes in the same way.

use super::*;

/// A node with a value in every field, and one with none that may be absent, as releases before the parts of a node wrote them.
const STORED: [&str; 2] = [include_str!("stored_node.json"), include_str!("first_stored_node.json")];

#[test]
fn stored_node_of_an_earlier_release_is_read_and_written_unchanged() {
    for stored in STORED {
        let node: Node = serde_json::from_str(stored).unwrap();
        let written = serde_json::to_string(&node).unwrap();
        // Text, since the order of the fields is a part of it.
        assert_eq!(written, without_blanks(stored));
    }
}

#[test]
fn node_without_fields_that_later_releases_added_is_read() {
    let mut stored: serde_json::Value = serde_json::from_str(STORED[1]).unwrap();
    for later in ["tasks", "refusals"] {
        stored.as_object_mut().unwrap().remove(later).unwrap();
    }
    let node: Node = serde_json::from_value(stored).unwrap();
    assert_eq!(node, serde_json::from_str(STORED[1]).unwrap());
    for needed in ["id", "life", "holds", "health"] {
        let mut stored: serde_json::Value = serde_json::from_str(STORED[1]).unwrap();
        stored.as_object_mut().unwrap().remove(needed).unwrap();
        assert!(serde_json::from_value::<Node>(stored).is_err(), "{needed}");
    }
}

/// The JSON without blanks between its values.
fn without_blanks(json: &str) -> String {
    let mut is_text = false;
    let between = |c: &char| {
        is_text ^= *c == '"';
        is_text || !c.is_whitespace()
    };
    json.chars().filter(between).collect()
}
