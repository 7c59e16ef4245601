//! The two threads at the user's own terminal: one reads what is typed, one writes what is shown. A terminal that stands still (Ctrl-S, a slow
//! line) holds up the second alone, and what was not written is not acknowledged.

use std::io::{self, Read as _, Write as _};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

const TYPED: usize = 16;
const CHUNK: usize = 4096;
/// How long what a program said last may take to be drawn.
const DRAWN_WITHIN: Duration = Duration::from_secs(3);

/// What is typed, as it comes. It ends with standard input.
pub(crate) fn keys() -> mpsc::Receiver<Vec<u8>> {
    let (typed, keys) = mpsc::channel(TYPED);
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
    keys
}

/// What is shown.
pub(crate) struct Screen {
    shown: mpsc::UnboundedSender<Vec<u8>>,
    given: u64,
    written: watch::Receiver<u64>,
}

impl Screen {
    pub(crate) fn begin() -> Self {
        // How much lies in it is bounded by whoever looks at `behind` before they give more.
        let (shown, mut to_show) = mpsc::unbounded_channel::<Vec<u8>>();
        let (tells, written) = watch::channel(0);
        std::thread::spawn(move || {
            let mut sum = 0;
            while let Some(bytes) = to_show.blocking_recv() {
                let mut out = io::stdout().lock();
                if out.write_all(&bytes).and_then(|()| out.flush()).is_err() {
                    return;
                }
                sum += bytes.len() as u64;
                tells.send_replace(sum);
            }
        });
        Self { shown, given: 0, written }
    }

    pub(crate) fn show(&mut self, bytes: Vec<u8>) {
        self.given += bytes.len() as u64;
        // Nobody draws any more: `drew` says so.
        let _ = self.shown.send(bytes);
    }

    /// Bytes that are given and not written.
    pub(crate) fn behind(&self) -> u64 {
        self.given - *self.written.borrow()
    }

    /// Until more was written. `false`: the terminal is gone.
    pub(crate) async fn drew(&mut self) -> bool {
        self.written.changed().await.is_ok()
    }

    /// Until all is written, or that takes too long.
    pub(crate) async fn finish(&mut self) {
        let given = self.given;
        let _ = tokio::time::timeout(DRAWN_WITHIN, self.written.wait_for(|written| *written >= given)).await;
    }
}
