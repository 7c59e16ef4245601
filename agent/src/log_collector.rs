//! The collector of the node's logs (specification, *Observability surface*): it reads the journal of the service's units, spools batches on
//! disk, and pushes them to the log gateway of the control plane.
//!
//! A line is in the journal, in the spool, or accepted by the gateway, at each moment: the journal is read on from the newest batch of the
//! spool, or, where that is empty, from the cursor that was saved after the gateway's last answer. A crash between that answer and its
//! record repeats one batch.

mod entry;
mod gateway;
mod journald;
mod sender;
mod settings;
mod spool;

pub use settings::{CollectorConfig, CollectorConfigError};

use crate::atomic_file::{self, FileError};
use crate::node_api_client::ClientError;
use spool::Spool;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// Why the collector ends by itself.
#[derive(Debug, thiserror::Error)]
pub enum CollectorError {
    #[error("this node was removed from the inventory; its logs are not taken any more")]
    NodeRemoved,
    #[error(transparent)]
    Store(#[from] FileError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("the HTTP client of the log gateway could not be made")]
    Gateway(#[source] reqwest::Error),
    #[error("the process could not be set up")]
    Runtime(#[source] std::io::Error),
}

/// What the reader of the journal and the sender share.
struct Shared {
    spool: Mutex<Spool>,
    /// The spool has a batch.
    filled: Notify,
    /// Lines that were dropped since the start.
    lost: AtomicU64,
}

impl Shared {
    fn spool(&self) -> MutexGuard<'_, Spool> {
        self.spool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count_lost(&self, lines: u64, why: &str) {
        if lines > 0 {
            let lost_since_start = self.lost.fetch_add(lines, Ordering::Relaxed) + lines;
            warn!(error_code = "log_lines_lost", lines, lost_since_start, why, "lines of the log are dropped");
        }
    }
}

/// Collects until `stop` is cancelled.
///
/// # Errors
/// [`CollectorError`], when it cannot continue.
pub async fn run(config: CollectorConfig, stop: CancellationToken) -> Result<(), CollectorError> {
    atomic_file::private_folder(&config.state_dir)?;
    let spool = Spool::open(&config.state_dir, config.spool_bytes)?;
    let shared = Arc::new(Shared { spool: Mutex::new(spool), filled: Notify::new(), lost: AtomicU64::new(0) });
    let sender = sender::Sender::new(&config, Arc::clone(&shared))?;
    tokio::select! {
        () = stop.cancelled() => Ok(()),
        never = journald::read(&config, &shared) => match never {},
        ended = sender.run() => ended,
    }
}
