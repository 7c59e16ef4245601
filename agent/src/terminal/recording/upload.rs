//! Uploads what is recorded, chunk after chunk, until the control plane has it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use uuid::Uuid;

use super::spool::{NextUpload, Spool, Spools};
use crate::full_jitter::Backoff;
use crate::terminal::{TerminalTransport, UploadError};

const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// How long a stopped agent continues to upload.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// The uploader of one session's recording.
pub(in crate::terminal) struct Upload {
    spool: Arc<Spool>,
    transport: Arc<dyn TerminalTransport>,
    /// Bounds the concurrent uploads.
    permits: Arc<Semaphore>,
    stop: CancellationToken,
}

impl Upload {
    pub(in crate::terminal) fn new(
        spool: Arc<Spool>,
        transport: Arc<dyn TerminalTransport>,
        permits: Arc<Semaphore>,
        stop: CancellationToken,
    ) -> Self {
        Self { spool, transport, permits, stop }
    }

    /// Of a recording that an earlier agent left.
    ///
    /// # Errors
    /// The recording cannot be read.
    pub(in crate::terminal) async fn of_leftover(
        spools: &Spools,
        session_id: Uuid,
        transport: Arc<dyn TerminalTransport>,
        permits: Arc<Semaphore>,
        stop: CancellationToken,
    ) -> io::Result<Self> {
        let spools = spools.clone();
        let spool =
            tokio::task::spawn_blocking(move || spools.recover(session_id)).await.map_err(io::Error::other)??;
        info!(terminal_session_id = %session_id, "the recording that was left is sent");
        Ok(Self::new(spool, transport, permits, stop))
    }

    /// Runs until everything is uploaded or refused; what is not uploaded soon after the agent is stopped is left to the next one.
    pub(in crate::terminal) async fn run(self) {
        let stopped = async {
            self.stop.cancelled().await;
            tokio::time::sleep(STOP_TIMEOUT).await;
        };
        tokio::select! {
            () = self.send() => {}
            () = stopped => {}
        }
    }

    async fn send(&self) {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            let seq = match self.spool.next() {
                NextUpload::Chunk(seq) => seq,
                NextUpload::Nothing => {
                    self.spool.filled.notified().await;
                    continue;
                }
                NextUpload::Left => return,
                NextUpload::Done => {
                    let spool = Arc::clone(&self.spool);
                    let _ = tokio::task::spawn_blocking(move || spool.remove()).await;
                    return;
                }
            };
            match self.send_one(seq).await {
                Ok(()) => backoff.reset(),
                Err(UploadError::Refused(why)) => {
                    warn!(terminal_session_id = %self.spool.session_id, why, "the control plane refuses a recording; what is left of it is deleted");
                    self.spool.refuse();
                }
                Err(UploadError::Later { why, after }) => {
                    let pause = backoff.next(rand::random(), after);
                    warn!(terminal_session_id = %self.spool.session_id, why, "a recording cannot be sent; trying again");
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    async fn send_one(&self, seq: u32) -> Result<(), UploadError> {
        let spool = Arc::clone(&self.spool);
        let read = tokio::task::spawn_blocking(move || spool.read(seq)).await;
        let frames = match read {
            Ok(Ok(frames)) => frames,
            Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                return Err(UploadError::Refused("its file is gone".to_owned()));
            }
            Ok(Err(error)) => return Err(UploadError::Later { why: error.to_string(), after: None }),
            Err(error) => return Err(UploadError::Later { why: error.to_string(), after: None }),
        };
        let _permit = self.permits.acquire().await;
        self.transport.send_chunk(self.spool.session_id, seq, frames).await?;
        let spool = Arc::clone(&self.spool);
        let _ = tokio::task::spawn_blocking(move || spool.mark_sent(seq)).await;
        Ok(())
    }
}
