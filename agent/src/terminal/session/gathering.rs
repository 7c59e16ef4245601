//! Takes in what a program says, as much at once as there is.

use futures::FutureExt as _;
use pty_process::OwnedReadPty;
use tokio::io::AsyncReadExt as _;
use tokio::time::{Instant, sleep_until};
use wire::terminal::CHUNK;

/// As much as the kernel hands out at once, nearly.
const A_FLOOD: usize = 3840;

/// Reads the terminal. The kernel hands out 4 KiB at once, and there is often more.
pub(super) struct Gathering {
    buffer: Box<[u8]>,
    filled: usize,
    /// So much was there when it was last waited for more.
    waited_at: usize,
}

impl Gathering {
    pub(super) fn new() -> Self {
        Self { buffer: vec![0; CHUNK].into(), filled: 0, waited_at: 0 }
    }

    /// How much there is, read not before that time. What was read stays where this is dropped.
    pub(super) async fn read(&mut self, reader: &mut OwnedReadPty, not_before: Instant) -> std::io::Result<usize> {
        if self.filled == 0 {
            if Instant::now() < not_before {
                sleep_until(not_before).await;
            }
            self.filled = reader.read(&mut self.buffer).await?;
        }
        while self.filled < self.buffer.len() {
            // Whatever ends it is said again by the next read.
            if let Some(Ok(more @ 1..)) = reader.read(&mut self.buffer[self.filled..]).now_or_never() {
                self.filled += more;
            } else if self.filled - self.waited_at >= A_FLOOD {
                // Who said so much says more in a moment; the echo of a keystroke does not wait for it.
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
