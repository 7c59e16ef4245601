//! The trace and span of a piece of work (W3C Trace Context, level 1).

use rand::Rng as _;
use std::fmt;

/// A span within its trace. Cheap to copy: it becomes text where it leaves the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanContext {
    trace_id: u128,
    span_id: u64,
    /// Zero: the trace begins with this span.
    parent_id: u64,
    flags: u8,
}

const SAMPLED: u8 = 1;

impl SpanContext {
    /// A trace that begins here.
    #[must_use]
    pub fn begin(sampling: Sampling) -> Self {
        // All zero would be no trace id.
        let trace_id = random_u128() | 1 << 127;
        Self { trace_id, span_id: new_span_id(), parent_id: 0, flags: u8::from(sampling.samples(trace_id)) }
    }

    /// The span that a `traceparent` names; `None` where the text is malformed, as the recommendation asks.
    #[must_use]
    pub fn parse(traceparent: &str) -> Option<Self> {
        let mut fields = traceparent.split('-');
        let (version, trace_id, span_id, flags) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let version = u8::from_str_radix(lower_hex(version, 2)?, 16).ok()?;
        // A later version may append fields; this one has four, and ff is none.
        if version == 0xff || (version == 0 && fields.next().is_some()) {
            return None;
        }
        let trace_id = u128::from_str_radix(lower_hex(trace_id, 32)?, 16).ok()?;
        let span_id = u64::from_str_radix(lower_hex(span_id, 16)?, 16).ok()?;
        let flags = u8::from_str_radix(lower_hex(flags, 2)?, 16).ok()?;
        (trace_id != 0 && span_id != 0).then_some(Self { trace_id, span_id, parent_id: 0, flags })
    }

    /// A new span below this one.
    #[must_use]
    pub fn child(self) -> Self {
        Self { span_id: new_span_id(), parent_id: self.span_id, ..self }
    }

    /// Whether its spans are exported.
    #[must_use]
    pub const fn is_sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// 32 lower-case hexadecimal digits.
    #[must_use]
    pub const fn trace_id(self) -> Hex128 {
        Hex128(self.trace_id)
    }

    /// 16 lower-case hexadecimal digits.
    #[must_use]
    pub const fn span_id(self) -> Hex64 {
        Hex64(self.span_id)
    }

    /// The parent span, as a span's field `otel.parent`: present only if the trace is sampled, all zero for a root span.
    #[must_use]
    pub fn parent_to_export(self) -> Option<tracing::field::DisplayValue<Hex64>> {
        self.is_sampled().then(|| tracing::field::display(Hex64(self.parent_id)))
    }

    /// The `traceparent` of work that this span causes.
    #[must_use]
    pub fn traceparent(self) -> String {
        // Level 1 defines one flag; a caller's other flags are not forwarded.
        format!("00-{}-{}-{:02x}", self.trace_id(), self.span_id(), self.flags & SAMPLED)
    }
}

fn lower_hex(part: &str, len: usize) -> Option<&str> {
    (part.len() == len && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))).then_some(part)
}

fn random_u128() -> u128 {
    let mut bytes = [0; 16];
    rand::rng().fill_bytes(&mut bytes);
    u128::from_be_bytes(bytes)
}

fn new_span_id() -> u64 {
    // All zero would be no span id.
    rand::rng().next_u64() | 1
}

/// An id as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hex128(u128);

impl fmt::Display for Hex128 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// An id as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hex64(u64);

impl fmt::Display for Hex64 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The share of new traces that are sampled. A continued trace goes by its own flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// Trace ids whose last 56 bits are below this are sampled.
    below: u64,
}

const CHANCE_BITS: u32 = 56;

impl Sampling {
    /// No trace is sampled.
    pub const NEVER: Self = Self { below: 0 };

    /// This share of the traces, 0 to 1.
    #[must_use]
    pub fn of_ratio(ratio: f64) -> Self {
        let all = (1_u64 << CHANCE_BITS) as f64;
        // Saturates at both ends; NaN is zero.
        Self { below: (ratio.clamp(0.0, 1.0) * all) as u64 }
    }

    const fn samples(self, trace_id: u128) -> bool {
        ((trace_id as u64) & ((1 << CHANCE_BITS) - 1)) < self.below
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn child_keeps_the_trace_with_a_new_span() {
        let above = SpanContext::parse(PARENT).unwrap();
        let below = above.child();
        assert_eq!(below.trace_id().to_string(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_ne!(below.span_id(), above.span_id());
        assert_eq!(below.parent_id, above.span_id);
        assert!(below.is_sampled() && below.traceparent().ends_with("-01"));
    }

    #[test]
    fn malformed_trace_parents_are_ignored() {
        for bad in [
            "",
            "00",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        ] {
            assert_eq!(SpanContext::parse(bad), None, "{bad}");
        }
        assert!(SpanContext::parse("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more").is_some());
    }

    #[test]
    fn ratio_is_the_share_of_sampled_traces() {
        let taken = |ratio| {
            let sampling = Sampling::of_ratio(ratio);
            (0..4000).filter(|_| SpanContext::begin(sampling).is_sampled()).count()
        };
        assert_eq!((taken(0.0), taken(1.0), taken(f64::NAN), taken(-3.0)), (0, 4000, 0, 0));
        assert!((800..1200).contains(&taken(0.25)));
        assert!(!SpanContext::begin(Sampling::NEVER).is_sampled());
    }

    proptest! {
        #[test]
        fn traceparent_round_trips(trace_id in 1_u128.., span_id in 1_u64.., sampled: bool) {
            let trace = SpanContext { trace_id, span_id, parent_id: 0, flags: u8::from(sampled) };
            prop_assert_eq!(SpanContext::parse(&trace.traceparent()), Some(trace));
        }

        #[test]
        fn no_text_makes_the_parser_fail(text in "\\PC{0,80}") {
            let _ = SpanContext::parse(&text);
        }
    }
}
