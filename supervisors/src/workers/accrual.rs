//! Charges the billing accounts whose window has ended, or whose grace. The owner of a shard with this role, and for the shards of owners
//! without it another member that has it, reads the deadline index, as
//! [`super::timers`] does; but accounts come due by the thousand, so they are looked for in bulk, loaded in groups (`persistence::loader`)
//! and asked many at a time, each through its own mailbox. What they post fills whole statements of the committer, behind what somebody
//! waits for (`Asked::patient`). Whoever slept before sleeps again after.

use super::pace::{self, Pacing};
use super::timers::moved_on;
use crate::cluster::View;
use crate::config::Role;
use actors::ports::World;
use actors::{Asked, Directory};
use chrono::TimeDelta;
use domain::authz::authorize;
use domain::billing_account::BillingAccount;
use domain::{Action, Kind, Machine, Permit, Principal};
use futures::FutureExt;
use persistence::Reads;
use persistence::read::Due;
use prometheus::{Histogram, HistogramOpts, Registry};
use std::sync::Arc;
use std::time::Duration;
use tracing::{Instrument as _, error_span};
use uuid::Uuid;

const PACING: Pacing = Pacing {
    // How late a window may end. A length of one second is the shortest.
    each: Duration::from_millis(200),
    // Enough to fill the batches that are being written, and those that are written next.
    at_once: 2048,
    full: IN_ONE_LOOK as usize,
};

/// Accounts in one look: some 100 bytes each.
const IN_ONE_LOOK: u32 = 16_384;

/// How long an account may take.
const WITHIN: TimeDelta = TimeDelta::seconds(10);

/// How long the owner of an account's shard is looked for. One that is not charged comes again.
const SEEKS_FOR: TimeDelta = TimeDelta::milliseconds(500);

/// Charges what is due.
pub struct Accrual {
    directory: Directory,
    view: Arc<View>,
    reads: Reads,
    world: Arc<dyn World>,
    permit: Permit,
    late: Histogram,
}

impl Accrual {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(
        registry: &Registry,
        directory: Directory,
        view: Arc<View>,
        reads: Reads,
        world: Arc<dyn World>,
    ) -> anyhow::Result<Arc<Self>> {
        let seconds = vec![0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0, 86_400.0];
        let late = Histogram::with_opts(
            HistogramOpts::new("billing_accrual_late_seconds", "How long after its time an account was charged.")
                .buckets(seconds),
        )?;
        registry.register(Box::new(late.clone()))?;
        let permit = authorize(&Principal::system("billing"), Action::Advance)?;
        Ok(Arc::new(Self { directory, view, reads, world, permit, late }))
    }

    /// Charges, turn by turn.
    ///
    /// # Errors
    /// Never in practice; what fails is tried again, ever more seldom.
    pub async fn run(self: Arc<Self>) -> anyhow::Result<()> {
        let here = Arc::clone(&self);
        let look = move |passed_over| Arc::clone(&here).look(passed_over).boxed();
        let work = |due| Arc::clone(&self).charge(due);
        pace::run(PACING, look, work).await;
        Ok(())
    }

    async fn look(self: Arc<Self>, passed_over: Vec<Uuid>) -> Vec<(Uuid, Due)> {
        let host = self.directory.host();
        let mut shards: Vec<_> = host.terms().iter().map(|term| term.shard).collect();
        shards.extend(self.view.shards_without(Role::Billing));
        if shards.is_empty() {
            return Vec::new();
        }
        match self.reads.due(&shards, &[Kind::BillingAccount], self.world.now(), &passed_over, IN_ONE_LOOK).await {
            Ok(due) => due.into_iter().map(|due| (due.entity.id, due)).collect(),
            Err(error) => {
                tracing::warn!(error = %error, "could not read which accounts are due");
                Vec::new()
            }
        }
    }

    /// Whether it has moved on.
    async fn charge(self: Arc<Self>, due: Due) -> bool {
        let host = self.directory.host();
        let was_awake = host.is_awake(due.entity);
        // What a window's end causes is followed by an id of its own.
        let correlation_id = format!("billing-{}", Uuid::now_v7());
        let span = error_span!("accrual", correlation_id, resource_name = %due.entity);
        let asked = Asked::new(&self.permit, correlation_id, self.world.now() + WITHIN).urgently().patiently();
        let (id, tick) = (due.entity.id, BillingAccount::tick());
        let answer = async {
            if host.term(due.shard).is_some() {
                return host.ask::<BillingAccount>(id, tick, asked).await;
            }
            // Its owner puts it to sleep again by itself.
            self.directory.seeking_for(SEEKS_FOR).ask::<BillingAccount>(&self.permit, id, tick, asked).await
        };
        let answer = answer.instrument(span.clone()).await;
        if answer.as_ref().is_ok_and(|answered| answered.written) {
            self.late.observe((self.world.now() - due.wake_at).as_seconds_f64());
        }
        if !was_awake {
            host.put_to_sleep(due.entity);
        }
        span.in_scope(|| moved_on(answer))
    }
}
