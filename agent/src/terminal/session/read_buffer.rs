//! Reads a program's output, as much at once as is available.

use futures::FutureExt as _;
use tokio::time::{Instant, sleep_until};
use wire::terminal::CHUNK;

use crate::terminal::pty::PtyMaster;
use crate::terminal::session_handover::OutputLog;

/// Nearly as much as the kernel returns at once.
const BULK_READ: usize = 3840;

/// Reads the terminal. The kernel returns 4 KiB at once, and often there is more.
pub(in crate::terminal) struct ReadBuffer {
    buffer: Box<[u8]>,
    filled: usize,
    /// The fill level at the last yield.
    waited_at: usize,
    /// Through which the output goes on its way here, if it is to survive the agent.
    log: Option<OutputLog>,
}

impl ReadBuffer {
    pub(in crate::terminal) fn new(log: Option<OutputLog>) -> Self {
        Self { buffer: vec![0; CHUNK].into(), filled: 0, waited_at: 0, log }
    }

    /// Returns how much is buffered; reads not before `not_before`. Cancel-safe: what was read stays in the buffer.
    pub(super) async fn read(&mut self, pty: &PtyMaster, not_before: Instant) -> std::io::Result<usize> {
        if self.filled == 0 {
            if Instant::now() < not_before {
                sleep_until(not_before).await;
            }
            self.filled = self.fill(pty).await?;
        }
        while self.filled < self.buffer.len() {
            // An error or end is returned again by the next read.
            if let Some(Ok(more @ 1..)) = self.fill(pty).now_or_never() {
                self.filled += more;
            } else if self.filled - self.waited_at >= BULK_READ {
                // A program that wrote this much writes more in a moment; the echo of a keystroke is not delayed.
                self.waited_at = self.filled;
                tokio::task::yield_now().await;
            } else {
                break;
            }
        }
        Ok(self.filled)
    }

    async fn fill(&mut self, pty: &PtyMaster) -> std::io::Result<usize> {
        let into = &mut self.buffer[self.filled..];
        match &mut self.log {
            None => pty.read(into).await,
            Some(log) => log.read_next(pty, into).await,
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.filled == 0
    }

    pub(super) fn take(&mut self) -> &[u8] {
        let filled = std::mem::take(&mut self.filled);
        self.waited_at = 0;
        &self.buffer[..filled]
    }
}
