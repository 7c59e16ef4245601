//! What the hardware did not allow when it was due is done later: devices of present tenants, and proofs of GPUs whose tenant has left.

use std::sync::Arc;
use std::time::Duration;

use super::Agent;

/// How often the executor is asked to. It asks the driver less often.
const INTERVAL: Duration = Duration::from_secs(1);

impl Agent {
    pub(super) async fn reconcile_devices(&self) {
        while self.pause(INTERVAL).await {
            let executor = Arc::clone(&self.executor);
            let reconciled = tokio::task::spawn_blocking(move || executor.reconcile_devices());
            let has_changed = tokio::select! {
                reconciled = reconciled => reconciled.unwrap_or(false),
                () = self.stop.cancelled() => return,
            };
            if has_changed {
                self.heartbeat_now.notify_one();
            }
        }
    }
}
