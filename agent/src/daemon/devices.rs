//! What the hardware did not allow when it was due is done later: devices of present tenants, and proofs of GPUs whose tenant has left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Agent;

/// How often the agent looks for device nodes that were made or removed.
const NODES_INTERVAL: Duration = Duration::from_secs(1);
/// How often the driver is asked again about what it did not answer, whichever executor runs.
const DRIVER_INTERVAL: Duration = Duration::from_secs(10);

/// When the driver is asked again.
#[derive(Debug, Default)]
struct DriverPace {
    asked_at: Option<Instant>,
}

impl DriverPace {
    /// Whether the driver is to be asked now.
    fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.asked_at.is_none_or(|asked_at| now.saturating_duration_since(asked_at) >= DRIVER_INTERVAL);
        if is_due {
            self.asked_at = Some(now);
        }
        is_due
    }
}

impl Agent {
    pub(super) async fn reconcile_devices(&self) {
        let mut pace = DriverPace::default();
        while self.pause(NODES_INTERVAL).await {
            let (executor, asks_driver) = (Arc::clone(&self.executor), pace.is_due(Instant::now()));
            let reconciled = tokio::task::spawn_blocking(move || {
                executor.follow_device_nodes();
                asks_driver && executor.reconcile_devices()
            });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_is_asked_at_once_and_then_every_ten_seconds() {
        let (mut pace, begun) = (DriverPace::default(), Instant::now());
        let asked: Vec<u64> =
            (0..25).filter(|second| pace.is_due(begun + NODES_INTERVAL * *second)).map(u64::from).collect();
        assert_eq!(asked, [0, 10, 20]);
    }
}
