//! Reads a program's output, as much at once as is available.

use futures::FutureExt as _;
use pty_process::OwnedReadPty;
use tokio::io::AsyncReadExt as _;
use tokio::time::{Instant, sleep_until};
use wire::terminal::CHUNK;

/// Nearly as much as the kernel returns at once.
const BULK_READ: usize = 3840;

/// Reads the terminal. The kernel returns 4 KiB at once, and often there is more.
pub(super) struct ReadBuffer {
    buffer: Box<[u8]>,
    filled: usize,
    /// The fill level at the last yield.
    waited_at: usize,
}

impl ReadBuffer {
    pub(super) fn new() -> Self {
        Self { buffer: vec![0; CHUNK].into(), filled: 0, waited_at: 0 }
    }

    /// Returns how much is buffered; reads not before `not_before`. Cancel-safe: what was read stays in the buffer.
    pub(super) async fn read(&mut self, reader: &mut OwnedReadPty, not_before: Instant) -> std::io::Result<usize> {
        if self.filled == 0 {
            if Instant::now() < not_before {
                sleep_until(not_before).await;
            }
            self.filled = reader.read(&mut self.buffer).await?;
        }
        while self.filled < self.buffer.len() {
            // An error or end is returned again by the next read.
            if let Some(Ok(more @ 1..)) = reader.read(&mut self.buffer[self.filled..]).now_or_never() {
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

    pub(super) const fn is_empty(&self) -> bool {
        self.filled == 0
    }

    pub(super) fn take(&mut self) -> &[u8] {
        let filled = std::mem::take(&mut self.filled);
        self.waited_at = 0;
        &self.buffer[..filled]
    }
}
