//! Compares the counters that commits maintain, entities by kind and state and the sums of GPUs and money, with the entities, and corrects
//! them (deploy/decisions/0104).

use actors::shell_dependencies::Term;
use domain::Shard;
use domain::commit::Epoch;
use persistence::entity_sums::{self, SumReport};
use persistence::{StoreError, table_maintenance};
use prometheus::{IntCounterVec, Opts, Registry};
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Between two comparisons.
const INTERVAL: Duration = Duration::from_secs(60);

/// The pause after a comparison is so many times as long as it took: with many entities it costs a twentieth of a core.
const PAUSE_FACTOR: u32 = 20;

/// Differences that have a log line of their own. All are counted.
const LOGGED_MAX: usize = 16;

/// Each counter is counted by one member: the sums of a shard, and all other counters with this shard, by the shard's owner.
const COUNTS_SHARD: Shard = Shard(0);

/// See the module.
#[derive(Clone)]
pub struct SumChecks {
    pool: PgPool,
    corrections: IntCounterVec,
    due_at: Instant,
    /// The shards whose sums this process has compared, and in which epoch. Before that, a member of the release before may have owned the
    /// shard and written no sums.
    compared: BTreeMap<Shard, Epoch>,
}

impl SumChecks {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry, pool: PgPool) -> Result<Self, prometheus::Error> {
        let corrections = IntCounterVec::new(
            Opts::new(
                "counter_corrections_total",
                "Counters of entities that differed from the entities and were corrected; must not grow but for an upgrade.",
            ),
            &["counter"],
        )?;
        ["entity_count", "entity_sum"].iter().for_each(|counter| corrections.with_label_values(&[counter]).reset());
        registry.register(Box::new(corrections.clone()))?;
        Ok(Self { pool, corrections, due_at: Instant::now(), compared: BTreeMap::new() })
    }

    #[must_use]
    pub fn are_due(&self) -> bool {
        self.due_at <= Instant::now()
    }

    /// Compares the sums of these shards.
    ///
    /// # Errors
    /// [`StoreError`]; then they are compared in the next interval.
    pub async fn check(&mut self, terms: &[Term]) -> Result<(), StoreError> {
        let began = Instant::now();
        let outcome = self.compare(terms).await;
        self.due_at = Instant::now() + INTERVAL.max(began.elapsed() * PAUSE_FACTOR);
        outcome
    }

    async fn compare(&mut self, terms: &[Term]) -> Result<(), StoreError> {
        let terms: BTreeMap<Shard, Epoch> = terms.iter().map(|term| (term.shard, term.epoch)).collect();
        if terms.contains_key(&COUNTS_SHARD) {
            let differences = table_maintenance::correct_counts(&self.pool).await?;
            self.corrections.with_label_values(&["entity_count"]).inc_by(differences.len() as u64);
            for it in differences.iter().take(LOGGED_MAX) {
                tracing::warn!(
                    error_code = "counter_corrected",
                    kind = it.kind,
                    state = it.state,
                    missing = it.missing,
                    "the counter of entities of kind {} in state {} lacked {}: corrected",
                    it.kind,
                    it.state,
                    it.missing
                );
            }
        }
        let shards: Vec<Shard> = terms.keys().copied().collect();
        let report = entity_sums::correct(&self.pool, &shards).await?;
        self.corrections.with_label_values(&["entity_sum"]).inc_by(report.differences.len() as u64);
        self.log(&report, &terms);
        self.compared = terms;
        Ok(())
    }

    fn log(&self, report: &SumReport, terms: &BTreeMap<Shard, Epoch>) {
        let is_new = |shard: &Shard| self.compared.get(shard) != terms.get(shard);
        let (first, wrong): (Vec<_>, Vec<_>) = report.differences.iter().partition(|it| is_new(&it.shard));
        if !first.is_empty() {
            let (corrected, entities) = (first.len(), report.entities);
            tracing::info!(corrected, entities, "the sums of acquired shards are counted: {corrected} differed");
        }
        for it in wrong.iter().take(LOGGED_MAX) {
            let (shard, group) = (it.shard.0, it.group.to_string());
            tracing::warn!(
                error_code = "counter_corrected", shard, group, stored = %it.stored, actual = %it.actual,
                "the sum of {group} in shard {shard} was \"{}\", and its entities add up to \"{}\": corrected",
                it.stored, it.actual
            );
        }
        if wrong.len() > LOGGED_MAX {
            tracing::warn!(
                error_code = "counter_corrected",
                "{} more sums were wrong: corrected",
                wrong.len() - LOGGED_MAX
            );
        }
        if !report.unreadable.is_empty() {
            let entities =
                report.unreadable.iter().take(LOGGED_MAX).map(ToString::to_string).collect::<Vec<_>>().join(" ");
            tracing::warn!(entities, "{} entities cannot be read and are in no sum", report.unreadable.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actors::sharding::shard_of;
    use actors::shell_dependencies::Store;
    use domain::billing_account::{BillingAccount, Holder, Instruction};
    use domain::money::Currency;
    use domain::{OrgId, PaymentId};
    use local_servers::test_database::TestDatabase;
    use persistence::Reads;
    use std::sync::Arc;
    use test_host::{CapturedLog, NoEffects, PgMember, TestHost};
    use uuid::Uuid;

    /// The lines, each with its level, of a comparison.
    async fn lines_of(checks: &mut SumChecks, terms: &[Term]) -> Vec<(String, String)> {
        let (log, logging) = CapturedLog::start();
        checks.check(terms).await.unwrap();
        drop(logging);
        log.messages()
    }

    fn corrected(checks: &SumChecks) -> [u64; 2] {
        ["entity_count", "entity_sum"].map(|counter| checks.corrections.with_label_values(&[counter]).get())
    }

    #[tokio::test]
    async fn manipulated_counter_is_named_once_and_what_an_earlier_owner_left_out_is_no_warning() {
        let db = TestDatabase::fresh().await;
        let member = PgMember::with(&db.pool, |_| {}).await;
        let store: Arc<dyn Store> = Arc::new(member.store(&Reads::new(db.pool.clone())));
        let mut terms: Vec<_> = member.terms().collect();
        member.drop_published();
        let host = TestHost::start(store, terms.clone(), Arc::default(), Arc::new(NoEffects)).await;
        let id = Uuid::from_u128(7);
        let (holder, currency) = (Holder::Org(OrgId("acme".into())), Currency::parse("EUR").unwrap());
        let deposit =
            Instruction::Deposit { payment_id: PaymentId(Uuid::from_u128(8)), holder, currency, amount_minor: 5 };
        host.ask::<BillingAccount>(&test_host::system(), id, deposit).await.unwrap();

        let mut checks = SumChecks::register(&Registry::new(), db.pool.clone()).unwrap();
        assert!(checks.are_due(), "as a member starts");
        let nothing: Vec<(String, String)> = Vec::new();
        assert_eq!(lines_of(&mut checks, &terms).await, nothing);
        assert!(!checks.are_due());

        let manipulate = "UPDATE entity_sum SET balance = balance - 1 WHERE balance > 0";
        sqlx::query(manipulate).execute(&db.pool).await.unwrap();
        sqlx::query("INSERT INTO entity_count VALUES ('node', 'active', 2)").execute(&db.pool).await.unwrap();
        let lines = lines_of(&mut checks, &terms).await;
        let sum = format!(
            "the sum of balances in EUR, accounts in state open in shard {} was \"entities 1, GPUs 0, sold 0, held 0, balance 4999999\", and \
             its entities add up to \"entities 1, GPUs 0, sold 0, held 0, balance 5000000\": corrected",
            shard_of(id)
        );
        let count = "the counter of entities of kind node in state active lacked -2: corrected".to_owned();
        assert_eq!(lines, [("WARN".to_owned(), count), ("WARN".to_owned(), sum)]);
        assert_eq!(lines_of(&mut checks, &terms).await, nothing);
        assert_eq!(corrected(&checks), [1, 1]);

        // The release before owned the shard meanwhile: it is acquired in another epoch.
        sqlx::query(manipulate).execute(&db.pool).await.unwrap();
        for term in &mut terms {
            term.epoch = Epoch(term.epoch.0 + 1);
        }
        let acquired = ("INFO".to_owned(), "the sums of acquired shards are counted: 1 differed".to_owned());
        assert_eq!(lines_of(&mut checks, &terms).await, [acquired]);
        assert_eq!(corrected(&checks), [1, 2]);
        // Another member's shards are its own.
        sqlx::query(manipulate).execute(&db.pool).await.unwrap();
        assert_eq!(lines_of(&mut checks, &[]).await, nothing);
        assert_eq!(corrected(&checks), [1, 2]);
    }
}
