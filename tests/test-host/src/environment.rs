//! The environment of a host in a test: a clock and a policy that the test sets, no peers, and no receivers of effects.

use actors::shell_dependencies::{Effects, Environment, Remote, RemoteError};
use arc_swap::{ArcSwap, ArcSwapOption};
use chrono::{SubsecRound as _, TimeDelta, Utc};
use domain::policy::{PolicyBook, PolicyKey, PolicyScope, PolicyValue};
use domain::{Effect, Shard, Timestamp};
use futures::future::BoxFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// The machine's clock, which a test sets forward or stops, and the policy that it sets.
#[derive(Default)]
pub struct TestEnvironment {
    pub policy: ArcSwap<PolicyBook>,
    ahead_micros: AtomicI64,
    /// The instant at which the clock is stopped; `None` where it runs.
    stopped_at: ArcSwapOption<Timestamp>,
}

impl TestEnvironment {
    /// Sets the clock forward.
    pub fn advance(&self, by: TimeDelta) {
        let micros = by.num_microseconds().expect("a step of the clock is short");
        self.ahead_micros.fetch_add(micros, Ordering::SeqCst);
    }

    /// Stops the clock at this instant.
    pub fn stop_clock_at(&self, at: Timestamp) {
        self.stopped_at.store(Some(Arc::new(at)));
    }

    /// Sets a global policy value, in force since ever.
    pub fn set_policy(&self, key: PolicyKey, value: PolicyValue) {
        let mut book = PolicyBook::clone(&self.policy.load());
        book.set(key, PolicyScope::Global, Timestamp::UNIX_EPOCH, value).expect("the value is admitted");
        self.policy.store(Arc::new(book));
    }
}

impl Environment for TestEnvironment {
    /// To the microsecond, as Postgres stores it.
    fn now(&self) -> Timestamp {
        let ahead = TimeDelta::microseconds(self.ahead_micros.load(Ordering::SeqCst));
        self.stopped_at.load().as_deref().copied().unwrap_or_else(|| (Utc::now() + ahead).trunc_subsecs(6))
    }

    fn seed(&self) -> u128 {
        rand::random()
    }

    fn policy(&self) -> Arc<PolicyBook> {
        self.policy.load_full()
    }
}

/// Effects without a receiver.
pub struct NoEffects;

impl Effects for NoEffects {
    fn perform(&self, _: Effect) {}
}

/// No other members: this process owns every shard.
pub struct NoPeers;

impl Remote for NoPeers {
    fn request(&self, _: Shard, _: Vec<u8>, _: Duration) -> BoxFuture<'_, Result<Vec<u8>, RemoteError>> {
        Box::pin(std::future::ready(Err(RemoteError::NoResponders)))
    }
}
