//! What whoever comes back to a shell is shown again. In it may be questions to the terminal, which were answered when they were new: until
//! all of it is drawn, only what asks nothing is.

use crate::recordings::tame::Tame;
use std::time::{Duration, Instant};

/// Of what was shown before, the service keeps no more.
const KEPT: u64 = 256 * 1024;
/// It comes at once. After a pause of this length, what comes is new.
const QUIET: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct Again {
    tame: Tame,
    /// What lies from here on is new for certain.
    new_from: Option<u64>,
    /// When there was something of it last, on this connection.
    seen_at: Option<Instant>,
}

impl Again {
    pub(super) fn new() -> Self {
        Self { tame: Tame::own(), new_from: None, seen_at: None }
    }

    /// There is no connection over which it comes.
    pub(super) fn interrupted(&mut self) {
        self.seen_at = None;
    }

    /// It comes, from this position on.
    pub(super) fn attached(&mut self, position: u64) {
        self.new_from.get_or_insert(position.saturating_add(KEPT));
        self.seen_at = Some(Instant::now());
    }

    /// More of it is drawn, so that more of it can come.
    pub(super) fn drew(&mut self) {
        if self.seen_at.is_some() {
            self.seen_at = Some(Instant::now());
        }
    }

    /// What is drawn of it.
    pub(super) fn let_through(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.seen_at = Some(Instant::now());
        self.tame.let_bytes_through(bytes)
    }

    /// Whether nothing of it can be on its way any more, where everything up to this position has come.
    pub(super) fn is_over(&self, position: u64) -> bool {
        self.tame.is_whole() && self.new_from.is_some_and(|new| position >= new)
    }

    /// How long it may still be silent before it counts as over; `None` while it has not begun.
    pub(super) fn patience(&self) -> Option<Duration> {
        self.seen_at.map(|at| QUIET.saturating_sub(at.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_over_after_all_that_is_kept_and_never_in_the_middle_of_a_sequence() {
        let mut again = Again::new();
        assert!(!again.is_over(u64::MAX), "nothing has come");
        assert_eq!(again.patience(), None);
        again.attached(1000);
        assert!(again.patience().is_some_and(|left| left <= QUIET));
        assert_eq!(again.let_through(b"a\x1b[6nb\x1b[3"), b"ab");
        assert!(!again.is_over(1000 + KEPT), "the sequence has no end yet");
        assert_eq!(again.let_through(b"1m"), b"\x1b[31m");
        assert!(!again.is_over(999 + KEPT) && again.is_over(1000 + KEPT));
        // Over another connection it goes on where it was.
        again.interrupted();
        again.drew();
        assert_eq!(again.patience(), None);
        again.attached(5000);
        assert!(again.is_over(1000 + KEPT));
    }
}
