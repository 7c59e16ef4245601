//! The two threads at the user's terminal: one reads input, one writes output. A blocked terminal (Ctrl-S, a slow line) blocks the second
//! thread alone, and output that was not written is not acknowledged.

use std::io::{self, Read as _, Write as _};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

const INPUT_QUEUE: usize = 16;
const CHUNK: usize = 4096;
/// The timeout of writing a program's last output.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// Reads input in a thread. The channel ends with standard input.
pub(crate) fn read_input() -> mpsc::Receiver<Vec<u8>> {
    let (typed, input) = mpsc::channel(INPUT_QUEUE);
    std::thread::spawn(move || {
        let mut chunk = [0; CHUNK];
        loop {
            match io::stdin().lock().read(&mut chunk) {
                Ok(0) => return,
                Ok(count) if typed.blocking_send(chunk[..count].to_vec()).is_err() => return,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    });
    input
}

/// The writer of output.
pub(crate) struct Screen {
    shown: mpsc::UnboundedSender<Vec<u8>>,
    queued: u64,
    written: watch::Receiver<u64>,
}

impl Screen {
    pub(crate) fn begin() -> Self {
        #[expect(
            clippy::disallowed_methods,
            reason = "the caller bounds the queue: it checks `undrawn` before it queues more"
        )]
        let (shown, mut to_show) = mpsc::unbounded_channel::<Vec<u8>>();
        let (written_sender, written) = watch::channel(0);
        std::thread::spawn(move || {
            let mut sum = 0;
            while let Some(bytes) = to_show.blocking_recv() {
                let mut out = io::stdout().lock();
                if out.write_all(&bytes).and_then(|()| out.flush()).is_err() {
                    return;
                }
                sum += bytes.len() as u64;
                written_sender.send_replace(sum);
            }
        });
        Self { shown, queued: 0, written }
    }

    pub(crate) fn show(&mut self, bytes: Vec<u8>) {
        self.queued += bytes.len() as u64;
        // Where the writer thread has ended, `wait_for_progress` reports it.
        let _ = self.shown.send(bytes);
    }

    /// Bytes that are queued and not written.
    pub(crate) fn undrawn(&self) -> u64 {
        self.queued - *self.written.borrow()
    }

    /// Waits until more was written. `false`: the terminal is gone.
    pub(crate) async fn wait_for_progress(&mut self) -> bool {
        self.written.changed().await.is_ok()
    }

    /// Waits until all is written, or the timeout is over.
    pub(crate) async fn finish(&mut self) {
        let queued = self.queued;
        let _ = tokio::time::timeout(FLUSH_TIMEOUT, self.written.wait_for(|written| *written >= queued)).await;
    }
}
