//! Checks in production what must always hold (design 2): a few entities of this process's shards at a time, over and over, each
//! time in one snapshot of the database, by the predicates that the property tests use.
//!
//! From the database I1, I2, I3, I6, I7 and I8 can be judged, and I4 of terminals' tokens. I4 of others and I5 are held by what a commit refuses and by the
//! agent's journal, and leave nothing behind by which a breach would show: a counter for them could not move, and there is none. Of I6
//! it can be seen that what is gone has nothing left; that nobody is answered any more is for the tests.

use actors::Host;
use domain::allocation::Allocation;
use domain::billing_account::BillingAccount;
use domain::invariant;
use domain::machine::Machine;
use domain::node::Node;
use domain::payment::Payment;
use domain::processor_event::ProcessorEvent;
use domain::service_account::ServiceAccount;
use domain::terminal_session::TerminalSession;
use domain::{AllocationId, Kind, NodeId, Shard};
use persistence::read::{Cursor, Inspected, Inspection};
use persistence::{Reads, StoreError};
use prometheus::{IntCounterVec, Opts, Registry};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

const TURN: Duration = Duration::from_secs(2);

/// Entities of each kind in one turn.
const AT_A_TIME: u32 = 100;

const JUDGED: [&str; 7] = ["I1", "I2", "I3", "I4", "I6", "I7", "I8"];

/// What was checked, and what was found broken.
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
            JUDGED.iter().for_each(|id| counters.with_label_values(&[id]).reset());
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

    /// Checks, turn by turn.
    ///
    /// # Errors
    /// Never; what cannot be read is read at the next turn.
    pub async fn run(&self, host: Arc<Host>) -> anyhow::Result<()> {
        let mut turn = interval(TURN);
        turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut places: BTreeMap<Kind, Option<Cursor>> = Kind::ALL.iter().map(|kind| (*kind, None)).collect();
        loop {
            turn.tick().await;
            let shards: Vec<_> = host.terms().iter().map(|term| term.shard).collect();
            if shards.is_empty() {
                continue;
            }
            for (kind, place) in &mut places {
                // After the last comes the first again.
                match self.look(*kind, &shards, *place).await {
                    Ok(next) => *place = next,
                    Err(error) => tracing::warn!(error = %error, %kind, "could not check the invariants of entities"),
                }
            }
        }
    }

    /// Checks the entities of a kind that come after `at`, and says how far it came.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn look(&self, kind: Kind, shards: &[Shard], at: Option<Cursor>) -> Result<Option<Cursor>, StoreError> {
        let mut inspection = self.reads.inspect().await?;
        let page = inspection.entities(kind, shards, at, AT_A_TIME).await?;
        page.items.iter().for_each(|row| self.judge_record(row));
        match kind {
            Kind::Node => page.items.iter().for_each(|row| self.judge_node(row)),
            Kind::Allocation => self.judge_allocations(&page.items, &mut inspection).await?,
            Kind::ServiceAccount => page.items.iter().for_each(|row| self.judge_account(row)),
            Kind::TerminalSession => page.items.iter().for_each(|row| self.judge_terminal(row)),
            Kind::BillingAccount => self.judge_billing(&page.items, &mut inspection).await?,
            Kind::Payment => page.items.iter().for_each(|row| self.judge_payment(row)),
            Kind::ProcessorEvent => page.items.iter().for_each(|row| self.judge_processor_event(row)),
            Kind::Sku
            | Kind::Tenant
            | Kind::Bindings
            | Kind::Policy
            | Kind::Runtime
            | Kind::KeySet
            | Kind::NotificationEndpoint
            | Kind::Announcement => {}
        }
        Ok(page.next)
    }

    fn judge_record(&self, row: &Inspected) {
        let versions: Vec<_> = row.recorded.iter().map(|step| step.version).collect();
        self.judge("I1", row, invariant::i1_nothing_acknowledged_is_lost(&versions, row.version));
        let audited = |step| invariant::i7_what_people_do_is_audited(row.entity.kind, step);
        self.judge("I7", row, row.recorded.iter().all(audited));
    }

    fn judge_node(&self, row: &Inspected) {
        let Some(node) = decoded::<Node>(row) else { return };
        self.judge("I8", row, ends(row, &node, invariant::node_is_transient(&node)));
        self.judge("I6", row, invariant::i6_a_removed_node_gets_nothing(&node, &row.recorded));
        let alone = BTreeMap::from([(node.id, node)]);
        self.judge("I2", row, invariant::i2_a_gpu_has_one_tenant(&alone, &BTreeMap::new()));
    }

    fn judge_account(&self, row: &Inspected) {
        let Some(account) = decoded::<ServiceAccount>(row) else { return };
        self.judge("I6", row, invariant::i6_a_deleted_account_has_no_keys(&account));
    }

    /// Against the sum of its entries. One with more of them than can be added up in time is passed over: others come after it.
    async fn judge_billing(&self, rows: &[Inspected], inspection: &mut Inspection) -> Result<(), StoreError> {
        for row in rows {
            let Some(account) = decoded::<BillingAccount>(row) else { continue };
            match inspection.sum_of_entries(account.id).await {
                Ok((sum, postings)) => self.judge("I3", row, account.balance == sum && account.postings == postings),
                Err(error) if error.took_too_long() => self.skip("I3", row, &error),
                Err(error) => return Err(error),
            }
            self.judge("I3", row, invariant::i3_what_accrues_is_covered(&account));
            self.judge("I8", row, ends(row, &account, invariant::account_is_transient(&account)));
        }
        Ok(())
    }

    fn judge_payment(&self, row: &Inspected) {
        let Some(payment) = decoded::<Payment>(row) else { return };
        self.judge("I3", row, invariant::i3_no_more_is_refunded_than_was_paid(&payment));
        self.judge("I8", row, ends(row, &payment, invariant::payment_is_transient(&payment)));
    }

    fn judge_processor_event(&self, row: &Inspected) {
        let Some(event) = decoded::<ProcessorEvent>(row) else { return };
        self.judge("I8", row, ends(row, &event, invariant::processor_event_is_transient(&event)));
    }

    fn judge_terminal(&self, row: &Inspected) {
        let Some(session) = decoded::<TerminalSession>(row) else { return };
        self.judge("I4", row, invariant::a_spent_terminal_token_is_gone(&session));
        self.judge("I8", row, ends(row, &session, invariant::terminal_session_is_transient(&session)));
    }

    /// Against their nodes.
    async fn judge_allocations(&self, rows: &[Inspected], inspection: &mut Inspection) -> Result<(), StoreError> {
        let allocations: Vec<_> = rows.iter().filter_map(|row| Some((row, decoded::<Allocation>(row)?))).collect();
        let places = allocations.iter().filter_map(|(_, allocation)| Some(allocation.place()?.0.0));
        let nodes = inspection.bodies(Kind::Node, &places.collect::<Vec<_>>()).await?;
        let nodes: BTreeMap<NodeId, Node> =
            nodes.iter().filter_map(|body| serde_json::from_str(body).ok()).map(|node: Node| (node.id, node)).collect();
        for (row, allocation) in allocations {
            self.judge("I8", row, ends(row, &allocation, invariant::allocation_is_transient(&allocation)));
            let alone: BTreeMap<AllocationId, _> = BTreeMap::from([(allocation.id, allocation)]);
            self.judge("I2", row, invariant::each_believed_place_is_held(&nodes, &alone));
        }
        Ok(())
    }

    fn skip(&self, id: &'static str, row: &Inspected, error: &StoreError) {
        self.skipped.with_label_values(&[id]).inc();
        tracing::warn!(resource_name = %row.entity, %error, invariant = id, "{} was not checked in time", row.entity);
    }

    fn judge(&self, id: &'static str, row: &Inspected, holds: bool) {
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

/// I8: a transient state has an end, and the end stands in the index by which it is seen.
fn ends<M: Machine>(row: &Inspected, entity: &M, transient: bool) -> bool {
    invariant::i8_what_is_transient_has_an_end(entity, transient)
        && (entity.deadline().is_none() || row.deadline_is_indexed)
}

/// One that cannot be read is parked by its owner, and shown there.
fn decoded<M: DeserializeOwned>(row: &Inspected) -> Option<M> {
    serde_json::from_str(&row.body).ok()
}
