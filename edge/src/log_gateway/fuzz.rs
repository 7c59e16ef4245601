//! Fuzz target for batches of log lines, which a node sends. See [`crate::fuzz`].

use super::labels;
use super::push_request::{PushFormat, read};
use crate::fuzz::{BUDGET, text_of};
use crate::http::error::Code;
use domain::NodeId;
use uuid::Uuid;

const TOKENS: [&str; 16] = [
    "{",
    "}",
    "[",
    "]",
    "\"",
    ",",
    ":",
    "=",
    "\\",
    "streams",
    "stream",
    "values",
    "\"1700000000000000000\"",
    "{\"streams\":[",
    "{a=\"b\"}",
    "node_id",
];

#[test]
fn fuzz_any_batch_is_read_or_refused_as_invalid() {
    bolero::check!().with_test_time(BUDGET).with_max_len(600).for_each(|input: &[u8]| {
        let compressed = snap::raw::Encoder::new().compress_vec(input).unwrap();
        let text = text_of(input, &TOKENS).into_bytes();
        let batches = [
            (PushFormat::Json, input.to_vec()),
            (PushFormat::Json, text.clone()),
            (PushFormat::SnappyProtobuf, input.to_vec()),
            (PushFormat::SnappyProtobuf, compressed),
            (
                PushFormat::SnappyProtobuf,
                snap::raw::Encoder::new().compress_vec(&[&[10, 255][..], &text].concat()).unwrap(),
            ),
        ];
        for (format, batch) in batches {
            match read(format, &batch) {
                Ok(summary) => {
                    for stream in &summary.streams {
                        let _ = labels::check(stream, NodeId(Uuid::nil()));
                    }
                }
                Err(error) => assert!(matches!(error.code(), Code::InvalidRequest | Code::PayloadTooLarge)),
            }
        }
    });
}
