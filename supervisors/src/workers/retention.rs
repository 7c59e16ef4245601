//! Removes what is older than the policies `retention.*` keep: months of the history and of the audit log, and ended entities. One member at
//! a time removes; each measures. Two at once, after a lease that lapsed, do no harm: each step is a transaction of its own.

use super::WorkerDependencies;
use crate::cluster_keys;
use crate::metrics::retention::RetentionMetrics;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::shell_dependencies::Environment;
use anyhow::Context as _;
use domain::EntityKind;
use domain::policy::{PolicyBook, PolicyKey, Scopes};
use domain::state_machine::Timestamp;
use persistence::audit::AuditKey;
use persistence::month_removal::remove_month;
use persistence::retention::{
    self, MonthRemoval, MonthlyLog, RetentionCutoffs, RetentionMonths, delete_ended, delete_stray_history,
    earlier_clock, lag_of_ended, lag_of_log, partitions,
};
use persistence::{Leases, Secrets, table_sizes};
use sqlx::PgPool;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OnceCell;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

/// How often it is looked. Some delay does not matter, since retention is in months.
const INTERVAL: Duration = Duration::from_secs(600);
const FIRST_RUN_AFTER: Duration = Duration::from_secs(20);
/// A member measures from its first run on, and removes after this time: until then, operators who have upgraded see what would be removed
/// (`gpuaas retention`), and can set the policies that keep more.
const REMOVES_AFTER: Duration = Duration::from_secs(60 * 60);

const LEASE_NAME: &str = "retention";
/// Longer than a run takes; a member that dies in one is succeeded after it.
const LEASE: Duration = Duration::from_secs(900);

/// Batches of ended entities of a kind in one run, so that a run ends and the lease is not outlived.
const BATCHES_PER_RUN: usize = 200;

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { registry, storage, actors, .. } = &parts.stages;
    let retention = Retention {
        pool: storage.pool.clone(),
        secrets: storage.secrets.clone(),
        leases: parts.leases.clone(),
        environment: Arc::clone(&actors.environment) as Arc<dyn Environment>,
        metrics: RetentionMetrics::register(registry)?,
        audit_key: OnceCell::new(),
    };
    Ok(task(&Arc::new(retention), |retention| async move { retention.run().await }))
}

/// The months of the policies in force.
#[must_use]
pub fn retained_months(policy: &PolicyBook, now: Timestamp) -> RetentionMonths {
    let months = |key| u32::try_from(policy.int(key, &Scopes::global(), now)).unwrap_or(u32::MAX);
    RetentionMonths {
        history: months(PolicyKey::RetentionHistory),
        audit: months(PolicyKey::RetentionAudit),
        ended_entities: months(PolicyKey::RetentionEndedEntities),
    }
}

/// Removes by age.
pub struct Retention {
    pub pool: PgPool,
    pub secrets: Secrets,
    pub leases: Leases,
    pub environment: Arc<dyn Environment>,
    pub metrics: RetentionMetrics,
    /// It signs where the audit chains continue.
    pub audit_key: OnceCell<AuditKey>,
}

impl Retention {
    /// Removes, periodically.
    ///
    /// # Errors
    /// Never; what fails is retried in the next round.
    pub async fn run(&self) -> anyhow::Result<()> {
        let began = Instant::now();
        let mut ticker = interval_at(began + FIRST_RUN_AFTER, INTERVAL);
        ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticker.tick().await;
            if let Err(error) = self.run_once(began.elapsed() >= REMOVES_AFTER).await {
                tracing::warn!(error = format!("{error:#}"), "rows past their retention could not be removed");
            }
        }
    }

    /// One round, in which this member removes if it may and no other member does. Returns whether it did.
    ///
    /// # Errors
    /// Where something could not be removed or measured.
    pub async fn run_once(&self, may_remove: bool) -> anyhow::Result<bool> {
        let now = earlier_clock(&self.pool, self.environment.now()).await?;
        let cutoffs = RetentionCutoffs::of(retained_months(&self.environment.policy(), now), now);
        let lease = if may_remove { self.leases.acquire(LEASE_NAME, LEASE).await? } else { None };
        let is_mine = lease.is_some();
        let removed = if is_mine { self.remove(&cutoffs, now).await } else { Ok(()) };
        if let Some(lease) = lease {
            self.leases.release(lease).await?;
        }
        self.measure(&cutoffs, now).await?;
        removed.map(|()| is_mine)
    }

    /// A month or a kind that cannot be removed does not keep the others: the first error is returned at the end.
    async fn remove(&self, cutoffs: &RetentionCutoffs, now: Timestamp) -> anyhow::Result<()> {
        let mut failure = None;
        for month in retention::expired(&partitions(&self.pool).await?, cutoffs) {
            let (log, name) = (month.log.name(), month.month);
            match remove_month(&self.pool, self.audit_key().await?, month, now).await {
                Ok(MonthRemoval::Removed) => {
                    self.metrics.count_removed(log, 1);
                    tracing::info!("month {name} of table {log} is removed");
                }
                Ok(MonthRemoval::InUse) => {
                    tracing::warn!("month {name} of table {log} is in use by a long transaction, and is removed later");
                }
                Err(error) => {
                    failure.get_or_insert(anyhow::Error::new(error).context(format!("month {name} of {log}")));
                }
            }
        }
        while delete_stray_history(&self.pool, cutoffs.history).await? > 0 {}
        for kind in EntityKind::ALL.iter().filter(|kind| !kind.ended_states().is_empty()) {
            match self.remove_ended(*kind, cutoffs.ended_entities).await {
                Ok(0) => {}
                Ok(removed) => tracing::info!("{removed} ended entities of kind {kind} are removed"),
                Err(error) => {
                    failure.get_or_insert(error.context(format!("ended entities of kind {kind}")));
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }

    async fn remove_ended(&self, kind: EntityKind, before: Timestamp) -> anyhow::Result<u64> {
        let mut removed = 0;
        for _ in 0..BATCHES_PER_RUN {
            match delete_ended(&self.pool, kind, before).await? {
                0 => break,
                count => removed += count,
            }
            tokio::task::yield_now().await;
        }
        self.metrics.count_removed("ended_entities", removed);
        Ok(removed)
    }

    async fn measure(&self, cutoffs: &RetentionCutoffs, now: Timestamp) -> anyhow::Result<()> {
        let sizes = table_sizes::table_sizes(&self.pool).await?;
        table_sizes::store_sample(&self.pool, &sizes, now).await?;
        self.metrics.set_sizes(&sizes);
        let months = partitions(&self.pool).await?;
        for log in MonthlyLog::ALL {
            self.metrics.set_lag(log.name(), lag_of_log(&months, cutoffs, log));
        }
        self.metrics.set_lag("ended_entities", lag_of_ended(&self.pool, cutoffs.ended_entities).await?);
        self.metrics.mark_run(self.environment.now());
        Ok(())
    }

    async fn audit_key(&self) -> anyhow::Result<&AuditKey> {
        let opened = self.audit_key.get_or_try_init(|| cluster_keys::audit_key(&self.secrets));
        opened.await.context("the audit key cannot be opened")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::Utc;
    use domain::id::MemberId;
    use domain::policy::PolicyValue;
    use local_servers::test_database::TestDatabase;
    use persistence::envelope_encryption::KeyRing;
    use persistence::retention::Month;
    use prometheus::Registry;
    use test_host::TestEnvironment;
    use uuid::Uuid;

    /// The worker of one process.
    struct TestMember {
        retention: Retention,
        environment: Arc<TestEnvironment>,
        registry: Registry,
    }

    impl TestMember {
        fn of(db: &TestDatabase) -> Self {
            let ring = KeyRing::parse(&format!("active k\nkey k {}=", "A".repeat(43))).unwrap();
            let (environment, registry) = (Arc::<TestEnvironment>::default(), Registry::new());
            let retention = Retention {
                pool: db.pool.clone(),
                secrets: Secrets::new(db.pool.clone(), Arc::new(ring)),
                leases: Leases::new(db.pool.clone(), MemberId(Uuid::new_v4())),
                environment: Arc::clone(&environment) as Arc<dyn Environment>,
                metrics: RetentionMetrics::register(&registry).unwrap(),
                audit_key: OnceCell::new(),
            };
            Self { retention, environment, registry }
        }

        /// A metric of the history.
        fn of_history(&self, name: &str) -> f64 {
            let families = self.registry.gather();
            let family = families.iter().find(|family| family.name() == name).unwrap();
            let is_history =
                |it: &&prometheus::proto::Metric| it.get_label().iter().any(|label| label.value() == "history");
            let metric = family.get_metric().iter().find(is_history).unwrap();
            metric.get_gauge().get_value() + metric.get_counter().get_value()
        }
    }

    async fn database_with_an_old_month() -> TestDatabase {
        let db = TestDatabase::fresh().await;
        let make = "CREATE TABLE history_2024_01 PARTITION OF history FOR VALUES FROM ('2024-01-01 UTC') TO ('2024-02-01 UTC')";
        sqlx::query(make).execute(&db.pool).await.unwrap();
        db
    }

    async fn has_old_month(db: &TestDatabase) -> bool {
        let old = Month::parse("2024-01").unwrap();
        partitions(&db.pool).await.unwrap().iter().any(|partition| partition.month == old)
    }

    #[tokio::test]
    async fn member_without_the_lease_measures_and_removes_nothing() {
        let db = database_with_an_old_month().await;
        let (ann, bob) = (TestMember::of(&db), TestMember::of(&db));
        let lease = bob.retention.leases.acquire(LEASE_NAME, LEASE).await.unwrap().unwrap();
        for may_remove in [true, false] {
            assert!(!ann.retention.run_once(may_remove).await.unwrap());
            assert!(has_old_month(&db).await);
        }
        assert!(ann.of_history("retention_lag_seconds") > 86_400.0 && ann.of_history("table_size_bytes") > 0.0);

        bob.retention.leases.release(lease).await.unwrap();
        assert!(!ann.retention.run_once(false).await.unwrap(), "it has started just now");
        assert!(has_old_month(&db).await);
        assert!(ann.retention.run_once(true).await.unwrap());
        assert!(!has_old_month(&db).await);
        assert_eq!((ann.of_history("retention_lag_seconds"), ann.of_history("retention_removed_total")), (0.0, 1.0));
    }

    #[tokio::test]
    async fn members_that_run_at_once_remove_a_month_once() {
        let db = database_with_an_old_month().await;
        let members: Vec<_> = (0..4).map(|_| TestMember::of(&db)).collect();
        let ran = futures::future::join_all(members.iter().map(|member| member.retention.run_once(true))).await;
        assert!(ran.into_iter().any(Result::unwrap));
        assert!(!has_old_month(&db).await);
        let removed: f64 = members.iter().map(|member| member.of_history("retention_removed_total")).sum();
        assert_eq!(removed, 1.0);
    }

    #[tokio::test]
    async fn policy_in_force_decides_and_a_clock_that_is_ahead_does_not() {
        let db = database_with_an_old_month().await;
        let ann = TestMember::of(&db);
        let months = |policy: &PolicyBook| retained_months(policy, Utc::now());
        let defaults = RetentionMonths { history: 13, audit: 24, ended_entities: 13 };
        assert_eq!(months(&ann.environment.policy()), defaults);
        ann.environment.set_policy(PolicyKey::RetentionHistory, PolicyValue::Int(1200));
        assert_eq!(months(&ann.environment.policy()), RetentionMonths { history: 1200, ..defaults });
        ann.environment.advance(chrono::TimeDelta::days(365 * 200));
        let before = partitions(&db.pool).await.unwrap();
        assert!(ann.retention.run_once(true).await.unwrap());
        assert_eq!(partitions(&db.pool).await.unwrap(), before);
    }
}
