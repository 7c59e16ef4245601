//! Fuzz target for the control messages of a terminal's client. See [`crate::fuzz`].

use super::control_frames::FromUser;
use crate::fuzz::{BUDGET, text_of};
use crate::http::request_body::integers::from_json;
use serde_json::{Value, json};

/// The message as a client sends it.
fn written(message: &FromUser) -> Value {
    match message {
        FromUser::Resize { columns, rows } => json!({ "type": "resize", "columns": columns, "rows": rows }),
        FromUser::Ping {} => json!({ "type": "ping" }),
        FromUser::Ack { position } => json!({ "type": "ack", "position": position }),
        FromUser::Exit {} => json!({ "type": "exit" }),
    }
}

#[test]
fn fuzz_control_message_has_known_fields_alone() {
    const TOKENS: [&str; 20] = [
        "{\"type\":\"resize\",",
        "{\"type\":\"ack\",\"position\":",
        "{\"type\":\"ping\"}",
        "{\"type\":\"exit\"}",
        "\"cols\":80",
        "\"columns\":80",
        "\"rows\":24",
        ",",
        "}",
        "65536",
        "18446744073709551615",
        "18446744073709551616",
        "-1",
        "8e1",
        "1.0",
        "\"more\":1",
        "null",
        "[",
        " ",
        "\"",
    ];
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        for text in [text_of(input, &TOKENS), String::from_utf8_lossy(input).into_owned()] {
            let Ok(message) = from_json::<FromUser>(text.as_bytes()) else { continue };
            let repeated = written(&message);
            let read = from_json::<FromUser>(repeated.to_string().as_bytes()).unwrap();
            assert_eq!(written(&read), repeated, "{text:?}");
            assert!(!text.contains("more"), "an unknown field is refused: {text:?}");
        }
    });
}
