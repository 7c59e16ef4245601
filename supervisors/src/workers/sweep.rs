//! Periodic maintenance of the database: deletes old command ids, creates partitions ahead, adds up the counts, and once an hour
//! stores the node's term of allocations that a replica of an earlier release has placed.

use super::WorkerDependencies;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::shell_dependencies::Environment;
use domain::policy::{PolicyBook, PolicyKey, Scopes};
use domain::state_machine::Timestamp;
use persistence::outage_log::RetryLog;
use persistence::{Cluster, StoreError, table_maintenance};
use sqlx::PgPool;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// Command ids that are deleted in one statement.
const BATCH_SIZE: u32 = 5000;

/// How often the allocations of the last days are read for missing terms, and how many in one statement.
const TERMS_INTERVAL: Duration = Duration::from_secs(3600);
const TERMS_BATCH_SIZE: u32 = 500;

/// Members without a heartbeat for so long that own nothing are deleted.
const MEMBER_RETENTION: Duration = Duration::from_secs(600);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { storage, actors, .. } = &parts.stages;
    let shared = (storage.pool.clone(), Arc::clone(&actors.environment) as Arc<dyn Environment>);
    Ok(task(&shared, |(pool, environment)| run(pool, environment)))
}

/// How long the ids of commands are kept. The policy has a lower bound: clients may repeat a request for a day, and events are accepted for
/// almost as long.
#[must_use]
pub fn command_retention(policy: &PolicyBook, now: Timestamp) -> Duration {
    let hours = policy.int(PolicyKey::RetentionCommandIds, &Scopes::global(), now);
    Duration::from_secs(hours.unsigned_abs() * 3600)
}

/// Sweeps the database.
///
/// # Errors
/// Never; what fails is retried in the next round.
pub async fn run(pool: PgPool, environment: Arc<dyn Environment>) -> anyhow::Result<()> {
    let mut ticker = interval(Duration::from_secs(60));
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let cluster = Cluster::new(pool.clone());
    let mut terms_at = Instant::now();
    let [counts, sums, partitions, commands, members, terms] = [
        "add up the counts of entities",
        "add up the sums of entities",
        "make partitions",
        "delete old command ids",
        "forget silent members",
        "store the nodes of allocations",
    ]
    .map(RetryLog::new);
    loop {
        ticker.tick().await;
        let _ = counts.observe(table_maintenance::compact_counts(&pool).await);
        let _ = sums.observe(table_maintenance::compact_sums(&pool).await);
        let _ = partitions.observe(table_maintenance::make_partitions(&pool, 2).await);
        let _ = commands.observe(delete_commands(&pool, &*environment).await);
        let _ = members.observe(cluster.remove_silent(MEMBER_RETENTION).await);
        if terms_at <= Instant::now() && terms.observe(store_node_terms(&pool).await).is_some() {
            terms_at = Instant::now() + TERMS_INTERVAL;
        }
    }
}

/// In batches, so that no statement is long.
async fn delete_commands(pool: &PgPool, environment: &dyn Environment) -> Result<(), StoreError> {
    let retention = command_retention(&environment.policy(), environment.now());
    while table_maintenance::delete_commands(pool, retention, BATCH_SIZE).await? >= u64::from(BATCH_SIZE) {
        // A full batch: there may be more.
        tokio::task::yield_now().await;
    }
    Ok(())
}

/// In pages, so that no statement is long.
async fn store_node_terms(pool: &PgPool) -> Result<(), StoreError> {
    let mut after = None;
    loop {
        after = table_maintenance::store_node_terms(pool, after, TERMS_BATCH_SIZE).await?;
        if after.is_none() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::policy::PolicyValue;
    use local_servers::test_database::TestDatabase;
    use test_host::TestEnvironment;

    /// The ages of the stored commands, in hours.
    async fn ages(db: &TestDatabase) -> Vec<i32> {
        let ages =
            "SELECT extract(epoch FROM now() - created_at)::integer / 3600 FROM command ORDER BY created_at DESC";
        sqlx::query_scalar(ages).fetch_all(&db.pool).await.unwrap()
    }

    #[tokio::test]
    async fn command_ids_are_stored_for_as_long_as_the_policy_in_force_says() {
        let db = TestDatabase::fresh().await;
        sqlx::query(
            "INSERT INTO command (id, entity, shard, digest, reply, created_at)
             SELECT gen_random_uuid(), gen_random_uuid(), 0, '', '{}', now() - make_interval(hours => age, mins => 1)
             FROM unnest(ARRAY[1, 23, 30, 50]) AS age",
        )
        .execute(&db.pool)
        .await
        .unwrap();
        let environment = TestEnvironment::default();
        environment.set_policy(PolicyKey::RetentionCommandIds, PolicyValue::Int(48));
        delete_commands(&db.pool, &environment).await.unwrap();
        assert_eq!(ages(&db).await, [1, 23, 30]);
        environment.set_policy(PolicyKey::RetentionCommandIds, PolicyValue::Int(24));
        delete_commands(&db.pool, &environment).await.unwrap();
        assert_eq!(ages(&db).await, [1, 23]);
    }
}
