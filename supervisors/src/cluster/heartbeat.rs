//! This member's heartbeats, in Postgres and over NATS, and what its row says to the others.

use super::failure_detector::HEARTBEAT_TIMEOUT;
use super::takeover::ShardReconciler;
use super::{FAILURE_TIMEOUT, HEARTBEAT_INTERVAL, process_identity};
use domain::Timestamp;
use persistence::cluster::Member;
use std::time::Instant;

impl ShardReconciler {
    /// Sends heartbeats: every second to Postgres, twice as often over NATS.
    ///
    /// # Errors
    /// Never; it runs until it is dropped.
    pub async fn run_heartbeat(&self) -> anyhow::Result<()> {
        let mut ticker = tokio::time::interval(HEARTBEAT_INTERVAL / 2);
        ticker.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        for n in 0_u64.. {
            ticker.tick().await;
            // Before its first heartbeat in Postgres no member accepts its broadcasts.
            if self.view.clock.shared().is_some() {
                self.bus.send_heartbeat(self.view.me.id).await;
            }
            if !self.view.has_fresh_lease() {
                self.stop_serving_all();
            }
            if n % 2 == 0 {
                let before = Instant::now();
                match tokio::time::timeout(FAILURE_TIMEOUT, self.renew(n == 0)).await {
                    Ok(Ok(postgres)) => {
                        self.view.clock.measure(before, postgres);
                        self.view.clock.warn();
                        // The first time, the others know this member by now: it can take its share. Later, they may have taken over its
                        // shards.
                        if self.view.record_renewal(before) {
                            self.reconcile_now.notify_one();
                        }
                    }
                    Ok(Err(error)) => tracing::warn!(error = %error, "could not renew this member in Postgres"),
                    Err(_) => tracing::warn!("Postgres did not answer a renewal in time"),
                }
            }
        }
        Ok(())
    }

    /// Returns Postgres' time at the heartbeat.
    async fn renew(&self, first: bool) -> Result<Timestamp, persistence::StoreError> {
        let me = self.current_member();
        if first {
            self.cluster.join(&me, process_identity::has_ended).await
        } else {
            self.cluster.heartbeat(&me).await
        }
    }

    /// This member's row, with what the others must know of it: which members it receives over NATS, and whether it withdraws itself.
    pub(super) fn current_member(&self) -> Member {
        let (mut me, state, now) = (self.view.me.clone(), self.view.state(), Instant::now());
        // A member that has just started has had no time to receive messages.
        if self.began.elapsed() > HEARTBEAT_TIMEOUT + HEARTBEAT_INTERVAL {
            let received: Vec<_> =
                state.heard_at.keys().filter(|id| state.has_recent_message_from(**id, now)).collect();
            me.details["hears"] = serde_json::json!(received);
        }
        me.details["cut_off"] = state.partitioned.into();
        me.details["clock_offset_ms"] = self.view.clock.offset().map(|offset| offset.ahead.num_milliseconds()).into();
        me
    }
}
