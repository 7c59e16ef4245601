//! The environment of this process's entities: clock, randomness, policy, lease.

use crate::cluster::ClusterView;
use actors::shell_dependencies::Environment;
use arc_swap::ArcSwap;
use chrono::{DurationRound, TimeDelta, Utc};
use domain::Timestamp;
use domain::policy::PolicyBook;
use std::sync::Arc;
use tokio::sync::Notify;

/// The clock, the random numbers, the policy values as they were last read, and this member's lease.
pub struct EntityEnvironment {
    policy: ArcSwap<PolicyBook>,
    /// Notified when the policy values are to be read at once.
    pub policy_written: Notify,
    view: Arc<ClusterView>,
}

impl EntityEnvironment {
    #[must_use]
    pub fn new(view: Arc<ClusterView>) -> Self {
        Self { policy: ArcSwap::default(), policy_written: Notify::new(), view }
    }

    /// Replaces the policy values.
    pub fn set_policy_book(&self, book: PolicyBook) {
        self.policy.store(Arc::new(book));
    }
}

impl Environment for EntityEnvironment {
    /// To the microsecond, as Postgres stores it: a decided time and the same time read back are equal.
    fn now(&self) -> Timestamp {
        let now = Utc::now();
        now.duration_trunc(TimeDelta::microseconds(1)).unwrap_or(now)
    }

    fn seed(&self) -> u128 {
        rand::random()
    }

    fn policy(&self) -> Arc<PolicyBook> {
        self.policy.load_full()
    }

    fn may_answer_from_memory(&self) -> bool {
        self.view.has_fresh_lease()
    }
}
