//! Checks the invariants in production (design 2), and the counters that operators see ([`sum_checks`]): some entities of this process's shards at a time, continuously, each time in one
//! snapshot of the database, by the predicates that the property tests use.
//!
//! The database shows whether I1, I2, I3, I6, I7 and I8 hold, and I4 for terminals' tokens. I4 for others and I5 are enforced by the checks
//! of a commit and by the agent's journal, and a violation leaves no trace: a counter for them could not move, and there is none. Of I6 the
//! database shows that removed entities hold nothing; that they answer no caller is checked by the tests.

mod sum_checks;

use super::WorkerDependencies;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::Host;
use domain::allocation::Allocation;
use domain::billing_account::BillingAccount;
use domain::invariants::{self, Invariant};
use domain::node::Node;
use domain::state_machine::Machine;
use domain::{AllocationId, EntityKind, NodeId, Shard, Visitor};
use persistence::outage_log::RetryLog;
use persistence::queries::{Cursor, InspectedEntity, Inspection};
use persistence::{Reads, StoreError};
use prometheus::{IntCounterVec, Opts, Registry};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
pub use sum_checks::SumChecks;
use tokio::time::{MissedTickBehavior, interval};

const INTERVAL: Duration = Duration::from_secs(2);

/// Entities of each kind in one round.
const PAGE_SIZE: u32 = 100;

const CHECKED_INVARIANTS: [&str; 7] = ["I1", "I2", "I3", "I4", "I6", "I7", "I8"];

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { registry, storage, actors, .. } = &parts.stages;
    let auditor = Auditor::register(registry, storage.reads.clone())?;
    let sums = SumChecks::register(registry, storage.pool.clone())?;
    let shared = (Arc::new(auditor), sums, Arc::clone(&actors.host));
    Ok(task(&shared, |(auditor, sums, host)| async move { auditor.run(host, sums).await }))
}

/// Checks the invariants, and counts the violations.
pub struct Auditor {
    reads: Reads,
    checked: IntCounterVec,
    violations: IntCounterVec,
    skipped: IntCounterVec,
}

impl Auditor {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry, reads: Reads) -> Result<Self, prometheus::Error> {
        let counters = |name: &str, help: &str| {
            let counters = IntCounterVec::new(Opts::new(name, help), &["id"])?;
            CHECKED_INVARIANTS.iter().for_each(|id| counters.with_label_values(&[id]).reset());
            registry.register(Box::new(counters.clone())).map(|()| counters)
        };
        Ok(Self {
            reads,
            checked: counters("invariant_checks_total", "Entities that were checked against an invariant.")?,
            violations: counters("invariant_violations_total", "Entities that break an invariant; must stay 0.")?,
            skipped: counters(
                "invariant_checks_skipped_total",
                "Entities that were passed over, since there is more of them than can be read in time; `gpuaas ledger verify` has the time.",
            )?,
        })
    }

    /// Checks, periodically.
    ///
    /// # Errors
    /// Never; what cannot be read is read in the next round.
    pub async fn run(&self, host: Arc<Host>, mut sums: SumChecks) -> anyhow::Result<()> {
        let mut ticker = interval(INTERVAL);
        ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut cursors: BTreeMap<EntityKind, Option<Cursor>> =
            EntityKind::ALL.iter().map(|kind| (*kind, None)).collect();
        let [retries, sum_retries] =
            ["check the invariants of entities", "compare the sums of entities with them"].map(RetryLog::new);
        loop {
            ticker.tick().await;
            let terms = host.terms();
            let shards: Vec<_> = terms.iter().map(|term| term.shard).collect();
            if shards.is_empty() {
                continue;
            }
            let mut outcome = Ok(());
            for (kind, cursor) in &mut cursors {
                // After the last entity the first follows again.
                match self.check_page(*kind, &shards, *cursor).await {
                    Ok(next) => *cursor = next,
                    Err(error) => outcome = outcome.and(Err(error)),
                }
            }
            let _ = retries.observe(outcome);
            if sums.are_due() {
                let _ = sum_retries.observe(sums.check(&terms).await);
            }
        }
    }

    /// Checks the entities of a kind after `at`, and returns the next cursor.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn check_page(
        &self,
        kind: EntityKind,
        shards: &[Shard],
        at: Option<Cursor>,
    ) -> Result<Option<Cursor>, StoreError> {
        let mut inspection = self.reads.inspect().await?;
        let page = inspection.entities(kind, shards, at, PAGE_SIZE).await?;
        page.items.iter().for_each(|row| self.check_record(row));
        page.items.iter().for_each(|row| kind.visit(EntityCheck { auditor: self, row }));
        // What more than the entity shows.
        if kind == EntityKind::Allocation {
            self.check_allocations(&page.items, &mut inspection).await?;
        }
        if kind == EntityKind::BillingAccount {
            self.check_billing_accounts(&page.items, &mut inspection).await?;
        }
        Ok(page.next)
    }

    fn check_record(&self, row: &InspectedEntity) {
        let versions: Vec<_> = row.recorded.iter().map(|step| step.version).collect();
        self.check("I1", row, invariants::i1_nothing_acknowledged_is_lost(&versions, row.version));
        let audited = |step| invariants::i7_actions_of_people_are_audited(row.entity.kind, step);
        self.check("I7", row, row.recorded.iter().all(audited));
    }

    /// Checks accounts against the sum of their postings. An account with more of them than can be added up in time is skipped: others
    /// follow.
    async fn check_billing_accounts(
        &self,
        rows: &[InspectedEntity],
        inspection: &mut Inspection,
    ) -> Result<(), StoreError> {
        for row in rows {
            let Some(account) = decoded::<BillingAccount>(row) else { continue };
            match inspection.sum_of_entries(account.id).await {
                Ok((sum, postings)) => self.check("I3", row, account.balance == sum && account.postings == postings),
                Err(error) if error.took_too_long() => self.skip("I3", row, &error),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Checks allocations against their nodes.
    async fn check_allocations(&self, rows: &[InspectedEntity], inspection: &mut Inspection) -> Result<(), StoreError> {
        let allocations: Vec<_> = rows.iter().filter_map(|row| Some((row, decoded::<Allocation>(row)?))).collect();
        let places = allocations.iter().filter_map(|(_, allocation)| Some(allocation.placement()?.0.0));
        let nodes = inspection.bodies(EntityKind::Node, &places.collect::<Vec<_>>()).await?;
        let nodes: BTreeMap<NodeId, Node> =
            nodes.iter().filter_map(|body| serde_json::from_str(body).ok()).map(|node: Node| (node.id, node)).collect();
        for (row, allocation) in allocations {
            let alone: BTreeMap<AllocationId, _> = BTreeMap::from([(allocation.id, allocation)]);
            self.check("I2", row, invariants::each_allocation_holds_its_gpus(&nodes, &alone));
        }
        Ok(())
    }

    fn skip(&self, id: &'static str, row: &InspectedEntity, error: &StoreError) {
        self.skipped.with_label_values(&[id]).inc();
        tracing::warn!(resource_name = %row.entity, %error, invariant = id, "{} was not checked in time", row.entity);
    }

    fn check(&self, id: &'static str, row: &InspectedEntity, holds: bool) {
        self.checked.with_label_values(&[id]).inc();
        if !holds {
            self.violations.with_label_values(&[id]).inc();
            let entity = row.entity;
            tracing::error!(
                resource_name = %entity, error_code = "invariant_violated", invariant = id, version = row.version,
                "{entity} breaks invariant {id}"
            );
        }
    }
}

/// Checks an entity against the invariants that it shows by itself.
struct EntityCheck<'a> {
    auditor: &'a Auditor,
    row: &'a InspectedEntity,
}

impl Visitor for EntityCheck<'_> {
    type Output = ();

    fn visit<M: Machine>(self) {
        let Self { auditor, row } = self;
        if M::INVARIANTS.is_empty() {
            return;
        }
        let Some(entity) = decoded::<M>(row) else { return };
        let violations = entity.violations(&row.recorded);
        // I8: the deadline is in the index by which it is found, too.
        let is_found = |id| id != Invariant::I8 || entity.deadline().is_none() || row.deadline_is_indexed;
        for id in M::INVARIANTS {
            auditor.check(id.name(), row, !violations.contains(id) && is_found(*id));
        }
    }
}

/// The entity, where it can be parsed: one that cannot is parked by its owner, and shown there.
fn decoded<M: DeserializeOwned>(row: &InspectedEntity) -> Option<M> {
    serde_json::from_str(&row.body).ok()
}
