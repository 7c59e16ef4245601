//! This member's heartbeats, in Postgres and over NATS, and its row, which the others read. A heartbeat in Postgres also lets the member
//! answer from its memory for [`LEASE_DURATION`].

use super::failure_detector::HEARTBEAT_TIMEOUT;
use super::shard_takeover::ShardReconciler;
use super::{ClusterView, FAILURE_TIMEOUT, HEARTBEAT_INTERVAL, process_identity};
use domain::Timestamp;
use persistence::membership::Member;
use persistence::outage_log::{OutageLog, chain};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// The detail of a member's row that lists the members it receives over NATS.
pub(super) const RECEIVED_MEMBERS: &str = "hears";

/// How long a heartbeat lets a member answer from its memory: it stops before the others may take over its shards.
const LEASE_DURATION: Duration = Duration::from_millis(2500);

impl ShardReconciler {
    /// Sends heartbeats: every second to Postgres, twice as often over NATS. One that Postgres did not store is sent again after half a second.
    ///
    /// # Errors
    /// Never; it runs until it is dropped.
    pub async fn run_heartbeat(&self) -> anyhow::Result<()> {
        let mut ticker = tokio::time::interval(HEARTBEAT_INTERVAL / 2);
        ticker.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut outage, mut retries) = (OutageLog::new(), false);
        for n in 0_u64.. {
            ticker.tick().await;
            // Before its first heartbeat in Postgres no member accepts its broadcasts.
            if self.view.clock.shared().is_some() {
                self.bus.send_heartbeat(self.view.me.id).await;
            }
            if !self.view.has_fresh_lease() {
                self.stop_serving_all();
            }
            if n % 2 == 0 || retries {
                let before = Instant::now();
                let renewed = tokio::time::timeout(FAILURE_TIMEOUT, self.renew(n == 0)).await;
                retries = !matches!(renewed, Ok(Ok(_)));
                match renewed {
                    Ok(Ok(postgres)) => {
                        if let Some(lasted) = outage.ended(Instant::now()) {
                            let seconds = lasted.as_secs_f64();
                            tracing::info!(seconds, "Postgres answers this member's renewals again");
                        }
                        self.view.clock.measure(before, postgres);
                        self.view.clock.warn();
                        // The first time, the others know this member by now: it can take its share. Later, they may have taken over its
                        // shards.
                        if self.view.record_renewal(before) {
                            self.reconcile_now.notify_one();
                        }
                    }
                    // The store logs outages, each with its cause.
                    Ok(Err(error)) if error.is_unavailable() => {}
                    Ok(Err(error)) => {
                        tracing::warn!(error = chain(&error), "could not renew this member in Postgres");
                    }
                    Err(_) => {
                        if let Some(failures) = outage.failed(Instant::now()) {
                            tracing::warn!(failures, "Postgres did not answer a renewal in time");
                        }
                        // A reading statement: it waits for no standby.
                        let _ = tokio::time::timeout(HEARTBEAT_INTERVAL, self.cluster.end_abandoned_commits()).await;
                    }
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
                state.last_message_at.keys().filter(|id| state.has_recent_message_from(**id, now)).collect();
            me.details[RECEIVED_MEMBERS] = serde_json::json!(received);
        }
        me.details["cut_off"] = state.partitioned.into();
        me.details["clock_offset_ms"] = self.view.clock.offset().map(|offset| offset.ahead.num_milliseconds()).into();
        me
    }
}

impl ClusterView {
    /// Records a heartbeat in Postgres that was sent at `before`. Returns whether the lease had lapsed; then it is renewed by
    /// [`ClusterView::confirm_renewal`].
    pub fn record_renewal(&self, before: Instant) -> bool {
        let lapsed = !self.has_fresh_lease();
        self.change_state(|state| {
            let renewal = if lapsed { &mut state.renewed_after_lapse } else { &mut state.renewed_at };
            *renewal = Some(before);
        });
        lapsed
    }

    /// Renews the lease: the shards were read after `renewal`, and applied.
    pub fn confirm_renewal(&self, renewal: Instant) {
        self.change_state(|state| state.renewed_at = state.renewed_at.max(Some(renewal)));
    }

    /// Whether this member's own lease is fresh: only then it may answer from its memory.
    #[must_use]
    pub fn has_fresh_lease(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.renewed_at.is_some_and(|at| at.elapsed() < LEASE_DURATION)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::{MemberId, Timestamp};
    use persistence::membership::Member;
    use uuid::Uuid;

    #[test]
    fn renewal_after_a_lapse_counts_after_the_shards_were_read() {
        let (id, started_at) = (MemberId(Uuid::from_u128(1)), Timestamp::UNIX_EPOCH);
        let member = Member { id, name: "1".to_owned(), started_at, details: serde_json::Value::Null };
        let view = ClusterView::new(member);
        let renewal = Instant::now();
        assert!(view.record_renewal(renewal));
        assert!(!view.has_fresh_lease());
        view.confirm_renewal(renewal);
        assert!(view.has_fresh_lease());
        assert!(!view.record_renewal(Instant::now()), "the next one follows in time");
    }
}
