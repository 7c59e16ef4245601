//! The scrollback that the service replays after a reconnect to a session. It may contain terminal queries that were answered when they
//! were live, so it is sanitized until all of it is drawn.

use crate::sanitize::Sanitizer;
use std::time::{Duration, Instant};

/// The most output that the service replays.
const MAX_SCROLLBACK: u64 = 256 * 1024;
/// The scrollback arrives without gaps. Output after a pause of this length is live.
const QUIET_PERIOD: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct ScrollbackFilter {
    sanitizer: Sanitizer,
    /// Output from this position on is certainly live.
    live_from: Option<u64>,
    /// When output arrived last on this connection; `None` while disconnected.
    last_output_at: Option<Instant>,
}

impl ScrollbackFilter {
    pub(super) fn new() -> Self {
        Self { sanitizer: Sanitizer::for_own_session(), live_from: None, last_output_at: None }
    }

    /// The connection was lost.
    pub(super) fn on_disconnect(&mut self) {
        self.last_output_at = None;
    }

    /// Attached; the scrollback begins at this position.
    pub(super) fn on_attach(&mut self, position: u64) {
        self.live_from.get_or_insert(position.saturating_add(MAX_SCROLLBACK));
        self.last_output_at = Some(Instant::now());
    }

    /// Output was drawn, so that more can arrive.
    pub(super) fn on_drawn(&mut self) {
        if self.last_output_at.is_some() {
            self.last_output_at = Some(Instant::now());
        }
    }

    /// The sanitized output.
    pub(super) fn sanitize(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.last_output_at = Some(Instant::now());
        self.sanitizer.sanitize_bytes(bytes)
    }

    /// Whether the scrollback is complete once all output up to this position has arrived.
    pub(super) fn is_complete(&self, position: u64) -> bool {
        self.sanitizer.is_idle() && self.live_from.is_some_and(|new| position >= new)
    }

    /// How long the stream must stay silent until the scrollback counts as complete; `None` while it has not begun.
    pub(super) fn quiet_left(&self) -> Option<Duration> {
        self.last_output_at.map(|at| QUIET_PERIOD.saturating_sub(at.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrollback_is_complete_after_its_maximum_and_never_inside_a_sequence() {
        let mut filter = ScrollbackFilter::new();
        assert!(!filter.is_complete(u64::MAX), "nothing has come");
        assert_eq!(filter.quiet_left(), None);
        filter.on_attach(1000);
        assert!(filter.quiet_left().is_some_and(|left| left <= QUIET_PERIOD));
        assert_eq!(filter.sanitize(b"a\x1b[6nb\x1b[3"), b"ab");
        assert!(!filter.is_complete(1000 + MAX_SCROLLBACK), "the sequence has no end yet");
        assert_eq!(filter.sanitize(b"1m"), b"\x1b[31m");
        assert!(!filter.is_complete(999 + MAX_SCROLLBACK) && filter.is_complete(1000 + MAX_SCROLLBACK));
        // It goes on over another connection.
        filter.on_disconnect();
        filter.on_drawn();
        assert_eq!(filter.quiet_left(), None);
        filter.on_attach(5000);
        assert!(filter.is_complete(1000 + MAX_SCROLLBACK));
    }
}
