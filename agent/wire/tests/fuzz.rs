//! Fuzz targets for what arrives over the wire: environment files, terminal messages, recordings, verifier keys, signed envelopes.
//!
//! They run as ordinary tests with random inputs, and under `cargo bolero` with a coverage-guided engine
//! (`deploy/docs/src/contribute/testing.md`).

#![allow(clippy::unwrap_used, clippy::expect_used)]

use ed25519_dalek::SigningKey;
use std::time::Duration;
use wire::bundle::{EnvFileError, Variables};
use wire::recording::{FRAME_MAX, Frame, FrameContent, Frames, MAX_MICROS};
use wire::task::{SignedEnvelope, TASK_TYPE, open};
use wire::terminal::{MESSAGE, TerminalCommand, TerminalEvent};
use wire::{VerifierSet, verifier_set};

/// The time of a target in an ordinary run; `BOLERO_RANDOM_TEST_TIME_MS` sets another.
const BUDGET: Duration = Duration::from_millis(400);

/// A text of these tokens, control characters and letters that are not ASCII. The first byte is its length.
fn text_of(input: &[u8], tokens: &[&str]) -> String {
    let Some((length, rest)) = input.split_first() else { return String::new() };
    let mut text = String::new();
    for byte in rest.iter().take(usize::from(*length) % 48) {
        match *byte {
            0..=31 => text.push(char::from(*byte)),
            32..=191 => text.push_str(tokens[usize::from(*byte) % tokens.len()]),
            192..=255 => text.push(char::from(*byte)),
        }
    }
    text
}

#[test]
fn fuzz_env_file_of_any_values_reads_back() {
    const TOKENS: [&str; 12] = ["a", "'", "\"", "\\", "\n", "$", "`", "#", " ", "export ", "=", "€"];
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        let (first, second) = input.split_at(input.len() / 2);
        let values = [first, second].map(|half| text_of(half, &TOKENS).replace('\0', ""));
        let written: Variables = [("SVC_A", values[0].as_str()), ("_b2", values[1].as_str())].into_iter().collect();
        let text = written.render().unwrap();
        assert!(Variables::parse(&text).unwrap() == written, "{values:?}");
    });
}

#[test]
fn fuzz_env_file_of_any_text_has_plain_values() {
    const TOKENS: [&str; 14] =
        ["A", "=", "'", "\"", "\\", "\n", "$", "`", "#", " ", "export ", "B=1\n", "C='x'", "\r\n"];
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        let text = text_of(input, &TOKENS);
        let Ok(read) = Variables::parse(&text) else { return };
        match read.render() {
            Ok(rendered) => assert!(Variables::parse(&rendered).unwrap() == read, "{text:?}"),
            Err(EnvFileError::Nul { .. }) => assert!(text.contains('\0'), "{text:?}"),
            Err(error) => panic!("{text:?} was read, and cannot be written: {error}"),
        }
        let length: usize = read.iter().map(|(name, value)| name.len() + value.len()).sum();
        assert!(length <= text.len(), "no value is longer than its text");
    });
}

/// A message of a known kind, whose content is anything.
fn message_of(input: &[u8]) -> Vec<u8> {
    const KINDS: [u8; 17] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 129, 130, 131, 132, 133, 134, 140];
    let [kind, length, rest @ ..] = input else { return input.to_vec() };
    let content = &rest[..rest.len().min(usize::from(*length) % 24)];
    [&[KINDS[usize::from(*kind) % KINDS.len()]], content].concat()
}

#[test]
fn fuzz_terminal_messages_have_one_encoding() {
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        for message in [message_of(input), input.to_vec()] {
            if let Ok(command) = TerminalCommand::decode(&message) {
                assert_eq!(command.encode(), message, "{command:?}");
            }
            if let Ok(event) = TerminalEvent::decode(&message) {
                assert_eq!(event.encode(), message, "{event:?}");
            }
        }
    });
}

#[test]
fn fuzz_terminal_messages_are_bounded() {
    bolero::check!().with_test_time(BUDGET).with_max_len(2 * MESSAGE).for_each(|input: &[u8]| {
        let long = [input, &vec![0; MESSAGE]].concat();
        assert!(TerminalCommand::decode(&long).is_err() || long.len() <= MESSAGE);
        assert!(TerminalEvent::decode(&long).is_err() || long.len() <= MESSAGE);
    });
}

/// Frames, and a few bytes of which the first may begin another.
fn recording_of(input: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in input.chunks(7) {
        let number = u64::from(part[0]) << 8 | u64::from(*part.last().unwrap_or(&0));
        let what = match part[0] % 8 {
            0 => FrameContent::Begin { columns: 80, rows: u16::from(part[0]) },
            1 => FrameContent::Resize { columns: u16::from(part[0]), rows: 24 },
            2 => FrameContent::Gap { bytes: number },
            3 => FrameContent::Paused,
            4 => FrameContent::Resumed,
            5 => FrameContent::End(wire::recording::RecordingEnd::Full),
            6 => {
                bytes.extend_from_slice(part);
                continue;
            }
            _ => FrameContent::Output(part.to_vec()),
        };
        Frame { micros: number, what }.write(&mut bytes);
    }
    bytes
}

#[test]
fn fuzz_recording_frames_are_a_prefix_that_is_written_as_it_was_read() {
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        for bytes in [recording_of(input), input.to_vec()] {
            let mut frames = Frames::of(&bytes);
            let whole: Vec<Frame> = frames.by_ref().map_while(Result::ok).collect();
            let mut written = Vec::new();
            for frame in &whole {
                assert!(frame.micros <= MAX_MICROS);
                if let FrameContent::Output(output) = &frame.what {
                    assert!((1..=FRAME_MAX).contains(&output.len()));
                }
                frame.write(&mut written);
            }
            assert_eq!(written, bytes[..frames.whole()]);
            // A chunk that is cut off loses its last frames and no other.
            let cut = input.len().min(bytes.len());
            let fewer: Vec<Frame> = Frames::of(&bytes[..cut]).map_while(Result::ok).collect();
            assert!(whole.starts_with(&fewer), "cut off at {cut}");
        }
    });
}

fn signer() -> SigningKey {
    SigningKey::from_bytes(&[7; 32])
}

#[test]
fn fuzz_verifier_keys_of_any_text_read_back() {
    let key = verifier_set::PublicKey::from(&signer()).to_string();
    let tokens = [key.as_str(), ":", ",", "staged", "active", "primary", " ", "=", "AAAA"];
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        let text = text_of(input, &tokens);
        if let Ok(set) = VerifierSet::from_env_value(&text) {
            assert_eq!(VerifierSet::from_env_value(&set.to_env_value()), Ok(set), "{text:?}");
        }
    });
}

#[test]
fn fuzz_altered_envelopes_are_refused() {
    let set = VerifierSet::from_env_value(&format!("k:active:{}", verifier_set::PublicKey::from(&signer()))).unwrap();
    let verifiers = verifier_set::Verifiers::trusting(set).unwrap();
    let payload = format!(
        r#"{{"node_id":"{id}","task_id":"{id}","attempt":1,"issued_at":"2026-01-01T00:00:00Z","expires_at":"2026-01-01T00:05:00Z","task":{{"type":"node.validate"}}}}"#,
        id = uuid::Uuid::nil()
    );
    let sent = SignedEnvelope::sign(&signer(), "k", TASK_TYPE, payload.into_bytes());
    let task = open(&sent, &verifiers).unwrap();
    let text = serde_json::to_vec(&sent).unwrap();
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        let mut altered = text.clone();
        for change in input.chunks_exact(3).take(2) {
            let at = usize::from(u16::from_be_bytes([change[0], change[1]])) % altered.len();
            altered[at] = change[2];
        }
        // Another spelling of the same envelope is the same task; nothing else is accepted.
        if let Ok(envelope) = serde_json::from_slice::<SignedEnvelope>(&altered)
            && let Ok(opened) = open(&envelope, &verifiers)
        {
            assert_eq!(opened, task);
            assert_eq!(envelope.payload, sent.payload);
        }
    });
}
