//! Fuzz target for the trace headers and the correlation id of a request. See [`crate::fuzz`].

use super::{CORRELATION_ID, CorrelationId, TRACEPARENT, TRACESTATE, TRACESTATE_MAX, trace_in, tracestate_in};
use crate::fuzz::{BUDGET, text_of};
use axum::http::{HeaderMap, HeaderValue};

#[test]
fn fuzz_trace_headers_are_bounded_text_and_passed_on_untouched() {
    const TOKENS: [&str; 12] = [
        "vendor=opaque",
        ",",
        "k@sys=v",
        " ",
        "\t",
        "=",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "é",
        "\"",
        "00-",
        "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "-01",
    ];
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        let (first, second) = input.split_at(input.len() / 2);
        let lines = [first, second].map(|half| text_of(half, &TOKENS));
        let mut headers = HeaderMap::new();
        for line in &lines {
            if let Ok(value) = HeaderValue::from_bytes(line.as_bytes()) {
                headers.append(TRACESTATE, value.clone());
                headers.append(TRACEPARENT, value.clone());
                headers.append(CORRELATION_ID, value);
            }
        }
        if let Some(state) = tracestate_in(&headers) {
            assert!((1..=TRACESTATE_MAX).contains(&state.len()));
            assert!(state.bytes().all(|byte| byte == b'\t' || (b' '..=b'~').contains(&byte)), "{state:?}");
            let sent: Vec<&str> = headers.get_all(TRACESTATE).iter().map(|line| line.to_str().unwrap()).collect();
            assert_eq!(state, sent.join(","));
            assert!(HeaderValue::from_str(&state).is_ok(), "it is sent to others");
        }
        let many = headers.get_all(TRACEPARENT).iter().count() > 1;
        assert!(!many || trace_in(&headers).is_none(), "two parents cannot both be meant");
        if let Some(trace) = trace_in(&headers) {
            let sent = headers[TRACEPARENT].to_str().unwrap();
            assert_eq!(trace.traceparent()[..52], format!("00{}", &sent[2..52]));
        }
        let id = CorrelationId::of(&headers);
        assert_eq!(CorrelationId::parse(id.as_str()), Some(id.clone()), "it is written to logs and headers");
        let given = headers.get(CORRELATION_ID).and_then(|line| CorrelationId::parse(line.to_str().ok()?));
        assert!(many || given.is_none_or(|given| given == id));
    });
}
