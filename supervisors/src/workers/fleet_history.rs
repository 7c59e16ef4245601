//! Measures the fleet hour by hour (deploy/decisions/0106): counts the GPUs once in each hour, adds up the rentals and the revenue of each
//! hour after its end, and removes hours that are older than policy `retention.fleet_history_months` keeps.
//!
//! Every member tries; the first one writes an hour (`persistence::fleet_history`). After an outage the hours of the last week are added
//! up later. The GPUs of an hour without a member that counts are not known, and shown as a gap. An hour that cannot be added up is tried
//! again ever less often, so that however many of them keep no later hour from it.

use super::WorkerDependencies;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::shell_dependencies::Environment;
use chrono::{Months, TimeDelta};
use domain::policy::{PolicyKey, Scopes};
use domain::state_machine::Timestamp;
use persistence::fleet_history::{HourlyGpus, hour_of};
use persistence::outage_log::{self, RetryLog};
use persistence::retention::earlier_clock;
use persistence::{FleetHistory, Reads, StoreError};
use prometheus::{IntGauge, Registry};
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

/// How often it is looked. An hour that is measured costs a read by its key.
const INTERVAL: Duration = Duration::from_secs(60);
/// By then a member that has just started has its place in the cluster.
const FIRST_RUN_AFTER: Duration = Duration::from_secs(20);

/// An hour is added up so long after its end: what was decided in it is committed by then. The committer retries no commit over an outage of
/// Postgres: it answers within seconds that a commit is not applied or unknown, and the next decision of the entity has a time of its own.
const ADDED_UP_AFTER: TimeDelta = TimeDelta::minutes(5);
/// Hours that are added up later, where no member ran.
const ADDED_UP_WITHIN: TimeDelta = TimeDelta::days(7);
/// In one round, so that GPUs are counted in between.
const HOURS_PER_ROUND: u32 = 12;
/// An hour is tried in so many rounds before it is postponed.
const ATTEMPTS_AT_ONCE: u32 = 3;
/// The pause of a postponed hour doubles with each further attempt.
const FIRST_PAUSE: TimeDelta = TimeDelta::minutes(10);
const LONGEST_PAUSE: TimeDelta = TimeDelta::hours(6);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { registry, storage, actors, .. } = &parts.stages;
    let environment = Arc::clone(&actors.environment) as Arc<dyn Environment>;
    let worker = FleetHistoryWorker::register(registry, storage.pool.clone(), storage.reads.clone(), environment)?;
    Ok(task(&Arc::new(worker), |worker| async move { worker.run().await }))
}

/// See the module.
pub struct FleetHistoryWorker {
    pool: PgPool,
    reads: Reads,
    history: FleetHistory,
    environment: Arc<dyn Environment>,
    /// The hours that this process could not add up.
    failing: Mutex<BTreeMap<Timestamp, FailingHour>>,
    failing_hours: IntGauge,
}

/// An hour that could not be added up.
#[derive(Clone, Copy, Debug)]
struct FailingHour {
    attempts: u32,
    next_attempt_at: Timestamp,
}

impl FleetHistoryWorker {
    /// # Errors
    /// Where the registry has a metric of its name.
    pub fn register(
        registry: &Registry,
        pool: PgPool,
        reads: Reads,
        environment: Arc<dyn Environment>,
    ) -> prometheus::Result<Self> {
        let failing_hours = IntGauge::new(
            "fleet_history_failing_hours",
            "Hours of the last week that this process could not add up for the fleet's history, and tries again ever less often.",
        )?;
        registry.register(Box::new(failing_hours.clone()))?;
        let (history, failing) = (FleetHistory::new(pool.clone()), Mutex::default());
        Ok(Self { history, pool, reads, environment, failing, failing_hours })
    }

    /// Measures, periodically.
    ///
    /// # Errors
    /// Never; what fails is retried in the next round.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut ticker = interval_at(Instant::now() + FIRST_RUN_AFTER, INTERVAL);
        ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let [clock, round] = ["read the database's clock", "measure the fleet"].map(RetryLog::new);
        loop {
            ticker.tick().await;
            // A clock that is ahead must not add up an hour before its end.
            if let Some(now) = clock.observe(earlier_clock(&self.pool, self.environment.now()).await) {
                let _ = round.observe(self.run_once(now).await);
            }
        }
    }

    /// One round. Returns the number of hours that this member has added up.
    ///
    /// # Errors
    /// The first one, after each part was tried: GPUs that cannot be counted keep no hour from being added up.
    pub async fn run_once(&self, now: Timestamp) -> Result<usize, StoreError> {
        let (gpus, added_up, removed) =
            (self.measure_gpus(now).await, self.add_up(now).await, self.remove_old(now).await);
        gpus.and(removed).and(added_up)
    }

    async fn measure_gpus(&self, now: Timestamp) -> Result<(), StoreError> {
        let hour = hour_of(now);
        if !self.history.has_gpus(hour).await? {
            self.history.store_gpus(hour, now, &count_gpus(&self.reads).await?).await?;
        }
        Ok(())
    }

    async fn add_up(&self, now: Timestamp) -> Result<usize, StoreError> {
        let until = hour_of(now - ADDED_UP_AFTER);
        let from = until - ADDED_UP_WITHIN;
        let postponed = self.postponed(from, now);
        let hours = self.history.hours_to_add_up(from, until, &postponed, HOURS_PER_ROUND).await?;
        if hours.len() < HOURS_PER_ROUND as usize {
            self.forget_added_up(&hours, &postponed);
        }
        let mut added_up = Ok(0);
        for hour in hours {
            let added = self.history.add_up(hour, now).await;
            self.note_attempt(hour, now, added.as_ref().err());
            // The first error is returned after the other hours: one that cannot be added up keeps none of them from it.
            added_up = added_up.and_then(|count| added.map(|added| count + usize::from(added)));
        }
        added_up
    }

    /// The hours whose next attempt is later. Those that left the window are forgotten.
    fn postponed(&self, from: Timestamp, now: Timestamp) -> Vec<Timestamp> {
        let mut failing = self.failing();
        failing.retain(|hour, _| *hour >= from);
        self.failing_hours.set(i64::try_from(failing.len()).unwrap_or(i64::MAX));
        failing.iter().filter(|(_, of)| of.next_attempt_at > now).map(|(hour, _)| *hour).collect()
    }

    /// Forgets the failing hours that another member has added up: those that are neither postponed nor among all that are left to add up.
    fn forget_added_up(&self, left: &[Timestamp], postponed: &[Timestamp]) {
        let mut failing = self.failing();
        failing.retain(|hour, _| left.contains(hour) || postponed.contains(hour));
        self.failing_hours.set(i64::try_from(failing.len()).unwrap_or(i64::MAX));
    }

    fn note_attempt(&self, hour: Timestamp, now: Timestamp, error: Option<&StoreError>) {
        let mut failing = self.failing();
        if let Some(error) = error {
            let attempts = failing.get(&hour).map_or(1, |of| of.attempts.saturating_add(1));
            failing.insert(hour, FailingHour { attempts, next_attempt_at: now + pause_after(attempts) });
            if attempts == ATTEMPTS_AT_ONCE {
                tracing::warn!(
                    error = outage_log::chain(error),
                    attempts,
                    "the hour from {hour} of the fleet's history cannot be added up; later hours go on, and it is tried again ever less often"
                );
            }
        } else if failing.remove(&hour).is_some_and(|of| of.attempts >= ATTEMPTS_AT_ONCE) {
            tracing::info!("the hour from {hour} of the fleet's history is added up after all");
        }
        self.failing_hours.set(i64::try_from(failing.len()).unwrap_or(i64::MAX));
    }

    fn failing(&self) -> MutexGuard<'_, BTreeMap<Timestamp, FailingHour>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn remove_old(&self, now: Timestamp) -> Result<(), StoreError> {
        let months = self.environment.policy().int(PolicyKey::RetentionFleetHistory, &Scopes::global(), now);
        let months = Months::new(u32::try_from(months).unwrap_or(u32::MAX));
        if let Some(before) = now.checked_sub_months(months) {
            while self.history.delete_before(before).await? > 0 {
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }
}

/// How long an hour waits after so many failed attempts.
fn pause_after(attempts: u32) -> TimeDelta {
    let Some(doublings) = attempts.checked_sub(ATTEMPTS_AT_ONCE) else { return TimeDelta::zero() };
    FIRST_PAUSE.checked_mul(1 << doublings.min(16)).unwrap_or(LONGEST_PAUSE).min(LONGEST_PAUSE)
}

/// The GPUs by SKU and region, from the sums that commits maintain.
async fn count_gpus(reads: &Reads) -> Result<Vec<HourlyGpus>, StoreError> {
    let counted = reads.gpus().await?;
    let sample = |of: persistence::queries::GpuCount| HourlyGpus {
        sku_id: of.sku_id,
        sku: of.sku,
        region_code: of.region_code,
        total: of.total,
        held: of.held,
        free: of.free,
    };
    Ok(counted.into_iter().map(sample).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::policy::PolicyValue;
    use local_servers::test_database::TestDatabase;
    use persistence::queries::{FleetFilter, FleetHour};
    use test_host::TestEnvironment;

    struct Fleet {
        db: TestDatabase,
        environment: Arc<TestEnvironment>,
    }

    impl Fleet {
        async fn new() -> Self {
            let fleet = Self { db: TestDatabase::fresh().await, environment: Arc::default() };
            fleet.add_node().await;
            fleet
        }

        /// A node of eight GPUs, as its commits have added it to the sums.
        async fn add_node(&self) {
            let node = "INSERT INTO entity_sum (shard, kind, sku, sku_name, region, gpus_free, entities, gpus_total, gpus_sold, gpus_held, balance)
                        VALUES (0, 'node', '00000000-0000-0000-0000-000000000001', 'h100', 'eu', 8, 1, 8, 0, 0, 0)";
            sqlx::query(node).execute(&self.db.pool).await.unwrap();
        }

        fn member(&self) -> FleetHistoryWorker {
            let environment = Arc::clone(&self.environment) as Arc<dyn Environment>;
            let (pool, reads) = (self.db.pool.clone(), Reads::new(self.db.pool.clone()));
            FleetHistoryWorker::register(&Registry::new(), pool, reads, environment).unwrap()
        }

        async fn hours(&self) -> Vec<FleetHour> {
            let reads = Reads::new(self.db.pool.clone());
            let all = reads.fleet_hours(at(-10_000, 0), at(10_000, 0), &FleetFilter::default(), 1000).await;
            all.unwrap().unwrap()
        }

        /// Of each hour from the first of the test on: the number of GPUs that were counted, and whether it is added up.
        async fn measured(&self) -> Vec<(i64, Option<u64>, bool)> {
            let hours = self.hours().await.into_iter();
            let hours = hours.filter(|hour| hour.hour >= at(0, 0));
            let total = |hour: &FleetHour| hour.gpus.as_ref().map(|gpus| gpus.iter().map(|sample| sample.total).sum());
            hours.map(|hour| ((hour.hour - at(0, 0)).num_hours(), total(&hour), hour.rentals.is_some())).collect()
        }
    }

    /// An instant of the `n`th hour of the test.
    fn at(n: i64, minute: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + n * 3600 + minute * 60, 0).unwrap()
    }

    #[tokio::test]
    async fn hour_in_which_no_member_ran_has_sums_and_no_gpus() {
        let fleet = Fleet::new().await;
        let member = fleet.member();
        member.run_once(at(0, 1)).await.unwrap();
        assert_eq!(fleet.measured().await, [(0, Some(8), false)]);
        // It is killed, and another is started in the third hour.
        fleet.add_node().await;
        drop(member);
        let next = fleet.member();
        while next.run_once(at(3, 10)).await.unwrap() > 0 {}
        let expected = [(0, Some(8), true), (1, None, true), (2, None, true), (3, Some(16), false)];
        assert_eq!(fleet.measured().await, expected);
    }

    #[tokio::test]
    async fn hour_is_added_up_some_minutes_after_its_end_and_not_before() {
        let fleet = Fleet::new().await;
        let member = fleet.member();
        for (minute, is_added_up) in [(59, false), (60, false), (64, false), (65, true)] {
            while member.run_once(at(0, minute)).await.unwrap() > 0 {}
            assert_eq!(fleet.measured().await[0].2, is_added_up, "minute {minute}");
        }
    }

    #[tokio::test]
    async fn hour_that_cannot_be_added_up_keeps_no_later_hour_from_it() {
        let fleet = Fleet::new().await;
        let member = fleet.member();
        while member.run_once(at(0, 10)).await.unwrap() > 0 {}
        let refused = format!(
            "ALTER TABLE fleet_hour ADD CONSTRAINT refused CHECK (hour <> '{}' OR added_up_at IS NULL)",
            at(0, 0).to_rfc3339()
        );
        sqlx::query(sqlx::AssertSqlSafe(refused)).execute(&fleet.db.pool).await.unwrap();
        member.run_once(at(3, 10)).await.unwrap_err();
        let expected = [(0, Some(8), false), (1, None, true), (2, None, true), (3, Some(8), false)];
        assert_eq!(fleet.measured().await, expected);
        sqlx::query("ALTER TABLE fleet_hour DROP CONSTRAINT refused").execute(&fleet.db.pool).await.unwrap();
        assert_eq!(member.run_once(at(3, 11)).await.unwrap(), 1);
    }

    #[tokio::test]
    async fn more_failing_hours_than_a_round_has_block_no_later_hour_and_are_added_up_once_they_can_be() {
        let fleet = Fleet::new().await;
        let member = fleet.member();
        while member.run_once(at(0, 10)).await.unwrap() > 0 {}
        let broken = i64::from(HOURS_PER_ROUND);
        let refused = format!(
            "ALTER TABLE fleet_hour ADD CONSTRAINT refused CHECK (hour NOT BETWEEN '{}' AND '{}' OR added_up_at IS NULL)",
            at(0, 0).to_rfc3339(),
            at(broken - 1, 0).to_rfc3339()
        );
        sqlx::query(sqlx::AssertSqlSafe(refused)).execute(&fleet.db.pool).await.unwrap();
        let later = broken + 2;
        for round in 0..i64::from(ATTEMPTS_AT_ONCE) {
            member.run_once(at(later, 10 + round)).await.unwrap_err();
        }
        assert_eq!(member.failing_hours.get(), broken);
        assert_eq!(member.run_once(at(later, 14)).await.unwrap(), 2, "the two hours after them");
        assert_eq!(member.run_once(at(later, 15)).await.unwrap(), 0, "they are postponed");
        member.run_once(at(later, 23)).await.unwrap_err();
        sqlx::query("ALTER TABLE fleet_hour DROP CONSTRAINT refused").execute(&fleet.db.pool).await.unwrap();
        assert_eq!(member.run_once(at(later, 40)).await.unwrap(), 0, "the pause has doubled");
        assert_eq!(member.run_once(at(later, 43)).await.unwrap(), usize::try_from(broken).unwrap());
        assert_eq!(member.failing_hours.get(), 0);
    }

    #[tokio::test]
    async fn hour_that_failed_here_and_that_another_member_has_added_up_is_no_failing_one() {
        let fleet = Fleet::new().await;
        let (member, other) = (fleet.member(), fleet.member());
        while member.run_once(at(0, 10)).await.unwrap() > 0 {}
        sqlx::query("ALTER TABLE fleet_hour ADD CONSTRAINT refused CHECK (added_up_at IS NULL) NOT VALID")
            .execute(&fleet.db.pool)
            .await
            .unwrap();
        member.run_once(at(1, 10)).await.unwrap_err();
        assert_eq!(member.failing_hours.get(), 1);
        sqlx::query("ALTER TABLE fleet_hour DROP CONSTRAINT refused").execute(&fleet.db.pool).await.unwrap();
        assert_eq!(other.run_once(at(1, 11)).await.unwrap(), 1);
        assert_eq!(member.run_once(at(1, 12)).await.unwrap(), 0);
        assert_eq!(member.failing_hours.get(), 0);
    }

    #[test]
    fn pause_of_a_failing_hour_doubles_and_has_a_bound() {
        let minutes = |attempts| pause_after(attempts).num_minutes();
        assert_eq!([1, 2, 3, 4, 5, 9, u32::MAX].map(minutes), [0, 0, 10, 20, 40, 360, 360]);
    }

    #[tokio::test]
    async fn each_of_several_members_measures_an_hour_that_no_other_has() {
        let fleet = Fleet::new().await;
        let members: Vec<_> = (0..4).map(|_| fleet.member()).collect();
        let mut added_up = 0;
        loop {
            let ran = futures::future::join_all(members.iter().map(|member| member.run_once(at(0, 10)))).await;
            let count: usize = ran.into_iter().map(Result::unwrap).sum();
            added_up += count;
            if count == 0 {
                break;
            }
        }
        assert_eq!(added_up, 7 * 24, "each hour of the last week once");
        assert_eq!(fleet.measured().await, [(0, Some(8), false)]);
        assert_eq!(fleet.hours().await.len(), 7 * 24 + 1);
    }

    #[tokio::test]
    async fn hours_past_their_retention_are_removed() {
        let fleet = Fleet::new().await;
        fleet.environment.set_policy(PolicyKey::RetentionFleetHistory, PolicyValue::Int(1));
        let member = fleet.member();
        while member.run_once(at(0, 10)).await.unwrap() > 0 {}
        assert_eq!(fleet.hours().await.len(), 7 * 24 + 1);
        while member.run_once(at(24 * 60, 10)).await.unwrap() > 0 {}
        let kept = fleet.hours().await;
        assert_eq!((kept.len(), kept[0].hour), (7 * 24 + 1, at(24 * 60 - 7 * 24, 0)));
    }
}
