//! Sends what is recorded, chunk after chunk, until the control plane has it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use uuid::Uuid;

use super::spool::{Next, Spool, Spools};
use crate::backoff::Backoff;
use crate::terminal::{NotSent, Way};

const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// How long an agent that is stopped goes on sending.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The sender of one session's recording.
pub(in crate::terminal) struct Upload {
    spool: Arc<Spool>,
    way: Arc<dyn Way>,
    /// How many send at once.
    places: Arc<Semaphore>,
    stop: CancellationToken,
}

impl Upload {
    pub(in crate::terminal) fn new(
        spool: Arc<Spool>,
        way: Arc<dyn Way>,
        places: Arc<Semaphore>,
        stop: CancellationToken,
    ) -> Self {
        Self { spool, way, places, stop }
    }

    /// Of what an earlier agent left.
    ///
    /// # Errors
    /// What is left cannot be read.
    pub(in crate::terminal) async fn of_left(
        spools: &Spools,
        session_id: Uuid,
        way: Arc<dyn Way>,
        places: Arc<Semaphore>,
        stop: CancellationToken,
    ) -> io::Result<Self> {
        let spools = spools.clone();
        let spool =
            tokio::task::spawn_blocking(move || spools.take_up(session_id)).await.map_err(io::Error::other)??;
        info!(terminal_session_id = %session_id, "the recording that was left is sent");
        Ok(Self::new(spool, way, places, stop))
    }

    /// Until all is sent or nobody wants it; what is not sent soon after the agent is stopped is left to the next one.
    pub(in crate::terminal) async fn run(self) {
        let stopped = async {
            self.stop.cancelled().await;
            tokio::time::sleep(LAST_WORDS).await;
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
                Next::Chunk(seq) => seq,
                Next::Nothing => {
                    self.spool.filled.notified().await;
                    continue;
                }
                Next::Done => {
                    let spool = Arc::clone(&self.spool);
                    let _ = tokio::task::spawn_blocking(move || spool.remove()).await;
                    return;
                }
            };
            match self.send_one(seq).await {
                Ok(()) => backoff.reset(),
                Err(NotSent::Refused(why)) => {
                    warn!(terminal_session_id = %self.spool.session_id, why, "the control plane refuses a recording; what is left of it is deleted");
                    self.spool.refuse();
                }
                Err(NotSent::Later { why, after }) => {
                    let pause = backoff.next(rand::random(), after);
                    warn!(terminal_session_id = %self.spool.session_id, why, "a recording cannot be sent; trying again");
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    async fn send_one(&self, seq: u32) -> Result<(), NotSent> {
        let spool = Arc::clone(&self.spool);
        let read = tokio::task::spawn_blocking(move || spool.read(seq)).await;
        let frames = match read {
            Ok(Ok(frames)) => frames,
            Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                return Err(NotSent::Refused("its file is gone".to_owned()));
            }
            Ok(Err(error)) => return Err(NotSent::Later { why: error.to_string(), after: None }),
            Err(error) => return Err(NotSent::Later { why: error.to_string(), after: None }),
        };
        let _place = self.places.acquire().await;
        self.way.send_recorded(self.spool.session_id, seq, frames).await?;
        let spool = Arc::clone(&self.spool);
        let _ = tokio::task::spawn_blocking(move || spool.sent(seq)).await;
        Ok(())
    }
}
