//! Whether the database takes the writes that serving needs: one that is rolled back, and the state of the committer's connections. A read
//! does not say so: a standby, or a server that was set to read-only, answers it.

use crate::cluster::HEARTBEAT_INTERVAL;
use domain::MemberId;
use persistence::outage_log::chain;
use persistence::{Cluster, Committer};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;
use tokio::time::timeout;

/// The age up to which the result of a write is used again, however often the check is asked for.
const MAX_AGE: Duration = Duration::from_millis(500);

/// The check, with its last result: `None` where the write succeeded. One runs at a time.
#[derive(Debug, Default)]
pub struct StoreCheck(Mutex<Option<(Instant, Option<String>)>>);

impl StoreCheck {
    /// `ok`, or why the database does not serve this process.
    pub(super) async fn run(&self, cluster: &Cluster, me: MemberId, committer: &Committer) -> String {
        let lanes = committer.workers();
        if let Some(outage) = lanes.iter().find_map(|lane| lane.outage()) {
            return format!("the committer: {outage}");
        }
        let mut last = self.0.lock().await;
        if last.as_ref().is_none_or(|(at, _)| at.elapsed() >= MAX_AGE) {
            let failed = match timeout(2 * HEARTBEAT_INTERVAL, cluster.check_write(me)).await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(chain(&error)),
                Err(_) => Some("a write is not answered in time".to_owned()),
            };
            *last = Some((Instant::now(), failed));
        }
        last.as_ref().and_then(|(_, failed)| failed.clone()).unwrap_or_else(|| "ok".to_owned())
    }
}
