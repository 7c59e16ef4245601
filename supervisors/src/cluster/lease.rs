//! This member's lease: while it is fresh, the member may answer from its memory. Each heartbeat in Postgres renews it.

use super::ClusterView;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// How long a heartbeat lets a member answer from its memory: it stops before the others may take over its shards.
pub const LEASE_DURATION: Duration = Duration::from_millis(2500);

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
    use persistence::cluster::Member;
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
