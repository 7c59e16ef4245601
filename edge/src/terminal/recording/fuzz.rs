//! Fuzz target for recordings, whose frames a node sends. See [`crate::fuzz`].

use super::asciicast::Cast;
use crate::fuzz::BUDGET;
use chrono::DateTime;
use serde_json::Value;
use wire::recording::{Frame, FrameContent, RecordingEnd};

/// Frames whose bytes may be altered.
fn chunk_of(input: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in input.chunks(9) {
        let what = match part[0] % 6 {
            0 => FrameContent::Begin { columns: u16::from(part[0]), rows: 24 },
            1 => FrameContent::Resize { columns: 80, rows: u16::from(part[0]) },
            2 => FrameContent::Gap { bytes: u64::from(part[0]) },
            3 => FrameContent::End(RecordingEnd::Session),
            _ => FrameContent::Output(part.to_vec()),
        };
        Frame { micros: u64::from(*part.last().unwrap_or(&0)) << 20, what }.write(&mut bytes);
    }
    if let [at, change, ..] = input {
        let at = usize::from(*at) * 7 % bytes.len();
        bytes[at] ^= change;
    }
    bytes
}

#[test]
fn fuzz_asciicast_of_any_chunks_is_json_lines_in_order() {
    bolero::check!().with_test_time(BUDGET).with_max_len(400).for_each(|input: &[u8]| {
        let (first, second) = input.split_at(input.len() / 2);
        let mut cast = Cast::new(DateTime::UNIX_EPOCH, "a \"title\"".to_owned());
        let mut text = [chunk_of(first), second.to_vec(), chunk_of(second)].map(|chunk| cast.write(&chunk)).concat();
        text += &cast.finish();
        let mut last = 0.0;
        for line in text.lines() {
            assert!(!line.contains(|ch| ch < ' '), "{line:?}");
            match serde_json::from_str(line).unwrap() {
                Value::Object(header) => assert!(header["version"] == 2 && header["width"].as_u64() > Some(0)),
                Value::Array(event) => {
                    let at = event[0].as_f64().unwrap();
                    assert!(event.len() == 3 && event[2].is_string() && at >= last, "{line}");
                    last = at;
                }
                other => panic!("{other}"),
            }
        }
        assert_eq!(text.lines().filter(|line| line.starts_with('{')).count(), 1, "one header");
    });
}
