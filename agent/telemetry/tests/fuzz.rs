//! Fuzz target for `traceparent`, which any client may send (`deploy/docs/src/contribute/testing.md`).

#![allow(clippy::unwrap_used)]

use std::time::Duration;
use telemetry::SpanContext;

/// The time of a target in an ordinary run; `BOLERO_RANDOM_TEST_TIME_MS` sets another.
const BUDGET: Duration = Duration::from_millis(400);

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// A well-formed text with some bytes changed, and a tail.
fn text_of(input: &[u8]) -> String {
    let mut text = PARENT.as_bytes().to_vec();
    let Some((changes, rest)) = input.split_first() else { return PARENT.to_owned() };
    for change in rest.chunks_exact(2).take(usize::from(*changes) % 5) {
        let at = usize::from(change[0]) % text.len();
        text[at] = b"0123456789abcdef-ABCfg+ "[usize::from(change[1]) % 24];
    }
    if *changes > 200 {
        text.extend_from_slice(b"-tail");
    }
    String::from_utf8(text).unwrap()
}

#[test]
fn fuzz_traceparent_is_continued_in_its_own_trace() {
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        for text in [text_of(input), String::from_utf8_lossy(input).into_owned()] {
            let Some(trace) = SpanContext::parse(&text) else { continue };
            let sent = trace.traceparent();
            assert_eq!(sent.len(), PARENT.len());
            assert!(sent.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-')), "{sent}");
            assert_eq!(sent[3..52], text[3..52], "trace and span are those of the caller");
            let repeated = SpanContext::parse(&sent).unwrap();
            assert_eq!((repeated.trace_id(), repeated.span_id()), (trace.trace_id(), trace.span_id()));
            assert_eq!((repeated.is_sampled(), repeated.traceparent()), (trace.is_sampled(), sent));
            assert_eq!(trace.child().trace_id(), trace.trace_id());
        }
    });
}
