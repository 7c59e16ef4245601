//! Parks the entities whose acknowledged transitions a failover of the database has lost. What they caused outside is done, so that a decision
//! from the older state would contradict it: a node with a tenant that the database does not know, money that was moved twice.

use super::WorkerDependencies;
use crate::cluster::bus::Bus;
use crate::cluster::parked_marks::is_parked;
use crate::supervisor::{WorkerTask, task};
use actors::Host;
use persistence::committer::LostCommit;
use persistence::outage_log::RetryLog;
use persistence::{Cluster, Committer, StoreError};
use std::sync::Arc;
use std::time::Duration;

/// The pause after a mark could not be stored.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let stages = &parts.stages;
    let shared = LostCommits {
        committer: stages.storage.committer.clone(),
        host: Arc::clone(&stages.actors.host),
        cluster: stages.membership.cluster.clone(),
        bus: stages.membership.bus.clone(),
    };
    Ok(task(&Arc::new(shared), LostCommits::run))
}

struct LostCommits {
    committer: Committer,
    host: Arc<Host>,
    cluster: Cluster,
    bus: Bus,
}

impl LostCommits {
    /// Runs until it is dropped.
    ///
    /// # Errors
    /// Never.
    async fn run(self: Arc<Self>) -> anyhow::Result<()> {
        let retries = RetryLog::new("mark entities whose commits were lost as parked");
        loop {
            for lost in self.committer.wait_lost().await {
                match retries.observe(park(lost, &self.cluster, &self.host).await) {
                    Some(()) => self.committer.resolve_lost(lost.entity.id),
                    None => tokio::time::sleep(RETRY_INTERVAL).await,
                }
            }
            // The owners of their shards by now.
            self.bus.ownership_changed().await;
        }
    }
}

/// Parks the entity, by a mark for the owner of its shard; in this process only where this member is the owner. In another one the entity would
/// stay parked after an operator has restarted it at its owner.
async fn park(lost: LostCommit, cluster: &Cluster, host: &Host) -> Result<(), StoreError> {
    let LostCommit { entity, shard, acknowledged, stored } = lost;
    let reason = format!(
        "a failover of the database lost its acknowledged transition to version {acknowledged}; the database has version {stored}"
    );
    if host.term(shard).is_some() && !is_parked(host, entity) {
        host.park(entity, reason.clone());
    }
    cluster.park(entity, shard, &reason).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::parked_marks::park_marked;
    use actors::AskError;
    use actors::sharding::shard_of;
    use actors::shell_dependencies::Store;
    use domain::EntityRef;
    use domain::announcement::{self, Announcement, Severity};
    use domain::authz::TokenRole;
    use domain::id::EntityKind;
    use local_servers::test_database::TestDatabase;
    use persistence::Reads;
    use test_host::{NoEffects, PgMember, TestHost, caller};
    use uuid::Uuid;

    /// The owner of all shards, with its database.
    async fn owner(db: &TestDatabase) -> TestHost {
        let member = PgMember::start(&db.pool).await;
        let store: Arc<dyn Store> = Arc::new(member.store(&Reads::new(db.pool.clone())));
        let terms: Vec<_> = member.terms().collect();
        member.drop_published();
        TestHost::start(store, terms, Arc::default(), Arc::new(NoEffects)).await
    }

    fn announcement(n: u128) -> EntityRef {
        EntityRef { kind: EntityKind::Announcement, id: Uuid::from_u128(n) }
    }

    #[tokio::test]
    async fn entity_is_parked_by_the_owner_of_its_shard_whichever_member_notices_the_loss() {
        let db = TestDatabase::fresh().await;
        let (cluster, owner) = (Cluster::new(db.pool.clone()), owner(&db).await);
        let (lost, other) = (announcement(1), announcement(2));
        let announce = announcement::Command::Announce { severity: Severity::Info, message: "x".to_owned() };
        let ask = async |entity: EntityRef| {
            owner.ask::<Announcement>(&caller("root", TokenRole::Admin), entity.id, announce.clone()).await
        };
        ask(lost).await.unwrap();
        let commit = LostCommit { entity: lost, shard: shard_of(lost.id), acknowledged: 2, stored: 1 };
        // A member that has lost the shard since its commit.
        let (noticing, _) = TestHost::in_memory().await;
        let noticing = noticing.directory.host();
        for term in noticing.terms() {
            noticing.lose(term.shard);
        }
        park(commit, &cluster, noticing).await.unwrap();
        assert!(!is_parked(noticing, lost), "it would stay so after an operator's restart");
        let host = owner.directory.host();
        park_marked(&cluster, host).await.unwrap();
        assert!(matches!(ask(lost).await, Err(AskError::Parked { .. })));
        assert!(!is_parked(host, other));
        ask(other).await.unwrap();

        let failures = host.failures_total();
        park_marked(&cluster, host).await.unwrap();
        park(commit, &cluster, host).await.unwrap();
        assert_eq!(host.failures_total(), failures, "it is parked once");
        assert_eq!(cluster.parked(&[shard_of(lost.id)]).await.unwrap().len(), 1);
    }
}
