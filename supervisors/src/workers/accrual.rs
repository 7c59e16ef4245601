//! Accrual: charges the billing accounts whose window or grace period has ended. The owner of a shard with this role, and for the shards
//! of owners without it another member that has it, reads the deadline index, as [`super::timers`] does; but accounts are due by the
//! thousand, so they are read in bulk, loaded in groups (`persistence::loader`) and ticked many at a time, each through its own mailbox.
//! Their commits fill whole statements of the committer, behind the commits that callers wait for (`CommandContext::patient`). An account
//! that was not active before is passivated after its charge.

use super::WorkerDependencies;
use super::due_entities::DueEntities;
use super::polling_loop::{self, PollLoopConfig};
use super::timers::made_progress;
use crate::cluster::ClusterView;
use crate::process_roles::ProcessRole;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::shell_dependencies::Environment;
use actors::{CommandContext, Directory};
use chrono::TimeDelta;
use domain::authz::authorize;
use domain::billing_account::BillingAccount;
use domain::{Action, EntityKind, Machine, Permit, Principal};
use futures::FutureExt;
use persistence::Reads;
use persistence::queries::DueTimer;
use prometheus::{Histogram, HistogramOpts, Registry};
use std::sync::Arc;
use std::time::Duration;
use tracing::{Instrument as _, error_span};
use uuid::Uuid;

const POLL_LOOP: PollLoopConfig = PollLoopConfig {
    // How late a window may end. A length of one second is the shortest.
    interval: Duration::from_millis(200),
    // Enough to fill the batches that are being written, and those that are written next.
    concurrency: 2048,
    page_size: PAGE_SIZE as usize,
};

/// Accounts in one poll: some 100 bytes each.
const PAGE_SIZE: u32 = 16_384;

/// The timeout of an account's tick.
const COMMAND_TIMEOUT: TimeDelta = TimeDelta::seconds(10);

/// How long the owner of an account's shard is searched for. An account that is not charged is found again.
const OWNER_SEARCH_TIMEOUT: TimeDelta = TimeDelta::milliseconds(500);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { registry, storage, membership, actors, .. } = &parts.stages;
    let environment = Arc::clone(&actors.environment) as Arc<dyn Environment>;
    let (directory, view) = (actors.directory.clone(), Arc::clone(&membership.view));
    let accrual = Accrual::register(registry, directory, view, storage.reads.clone(), environment)?;
    Ok(task(&accrual, Accrual::run))
}

/// Charges due accounts.
pub struct Accrual {
    directory: Directory,
    due: Arc<DueEntities>,
    environment: Arc<dyn Environment>,
    permit: Permit,
    late: Histogram,
}

impl Accrual {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(
        registry: &Registry,
        directory: Directory,
        view: Arc<ClusterView>,
        reads: Reads,
        environment: Arc<dyn Environment>,
    ) -> anyhow::Result<Arc<Self>> {
        let seconds = vec![0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0, 86_400.0];
        let late = Histogram::with_opts(
            HistogramOpts::new("billing_accrual_late_seconds", "How long after its time an account was charged.")
                .buckets(seconds),
        )?;
        registry.register(Box::new(late.clone()))?;
        let permit = authorize(&Principal::system("billing"), Action::Advance)?;
        let due = Arc::new(DueEntities {
            directory: directory.clone(),
            view,
            reads,
            environment: Arc::clone(&environment),
            role: ProcessRole::Billing,
            kind: EntityKind::BillingAccount,
            page_size: PAGE_SIZE,
        });
        Ok(Arc::new(Self { directory, due, environment, permit, late }))
    }

    /// Charges, periodically.
    ///
    /// # Errors
    /// Never in practice; what fails is retried with a growing backoff.
    pub async fn run(self: Arc<Self>) -> anyhow::Result<()> {
        let due = Arc::clone(&self.due);
        let find_due = move |excluded| Arc::clone(&due).find(excluded).boxed();
        let work = |due| Arc::clone(&self).charge(due);
        polling_loop::run(POLL_LOOP, find_due, work).await;
        Ok(())
    }

    /// Charges an account. Returns whether it has made progress.
    async fn charge(self: Arc<Self>, due: DueTimer) -> bool {
        let host = self.directory.host();
        let was_awake = host.is_active(due.entity);
        // The consequences of a window's end have a correlation id of their own.
        let correlation_id = format!("billing-{}", Uuid::now_v7());
        let span = error_span!("accrual", correlation_id, resource_name = %due.entity);
        let context = CommandContext::new(&self.permit, correlation_id, self.environment.now() + COMMAND_TIMEOUT)
            .urgent()
            .patient();
        let (id, tick) = (due.entity.id, BillingAccount::tick());
        let answer = async {
            if host.term(due.shard).is_some() {
                return host.ask::<BillingAccount>(id, tick, context).await;
            }
            // Its owner passivates it by itself.
            self.directory
                .with_owner_timeout(OWNER_SEARCH_TIMEOUT)
                .ask::<BillingAccount>(&self.permit, id, tick, context)
                .await
        };
        let answer = answer.instrument(span.clone()).await;
        if answer.as_ref().is_ok_and(|answered| answered.written) {
            self.late.observe((self.environment.now() - due.wake_at).as_seconds_f64());
        }
        if !was_awake {
            host.passivate(due.entity);
        }
        span.in_scope(|| made_progress(answer))
    }
}
