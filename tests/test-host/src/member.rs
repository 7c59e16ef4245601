//! A member that owns every shard of a database, and the shell's store over its committer.

use actors::shell_dependencies::{Store, StoreReadError, Term};
use domain::commit::{CompletedCommand, Epoch, Snapshot};
use domain::{CommandId, Commit, CommitOutcome, EntityRef, MemberId, Shard};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use persistence::committer::CommitterMetrics;
use persistence::{Cluster, Committer, CommitterConfig, OutboxRow, Reads};
use prometheus::Registry;
use sqlx::PgPool;
use std::collections::BTreeMap;
use tokio::sync::mpsc;
use uuid::Uuid;

/// A member that owns every shard of a database, with its committer.
pub struct PgMember {
    pub id: MemberId,
    pub epochs: BTreeMap<Shard, Epoch>,
    pub committer: Committer,
    /// The committed rows of the outbox. Commits wait while a thousand are not received.
    pub published: mpsc::Receiver<OutboxRow>,
    /// The committer's metrics.
    pub registry: Registry,
}

impl PgMember {
    pub async fn start(pool: &PgPool) -> Self {
        Self::with(pool, |_| {}).await
    }

    /// As [`PgMember::start`], with changed settings of the committer.
    pub async fn with(pool: &PgPool, change: impl FnOnce(&mut CommitterConfig)) -> Self {
        let (cluster, id) = (Cluster::new(pool.clone()), MemberId(Uuid::now_v7()));
        let seen = cluster.shards().await.unwrap();
        let epochs = cluster.take_over(id, &seen, &BTreeMap::new()).await.unwrap();
        assert_eq!(epochs.len(), Shard::COUNT, "the database has another owner");
        let mut config = CommitterConfig::new(id);
        change(&mut config);
        let registry = Registry::new();
        let metrics = CommitterMetrics::register(&registry).unwrap();
        let (publish, published) = mpsc::channel(1000);
        let committer = Committer::start(pool, config, metrics, publish);
        Self { id, epochs, committer, published, registry }
    }

    /// The terms of its shards.
    pub fn terms(&self) -> impl Iterator<Item = Term> + use<> {
        self.epochs.clone().into_iter().map(|(shard, epoch)| Term { shard, epoch })
    }

    /// The store of a host, without the loader of a replica.
    #[must_use]
    pub fn store(&self, reads: &Reads) -> PgTestStore {
        PgTestStore { committer: self.committer.clone(), reads: reads.clone() }
    }

    /// Drops published rows, in place of the relay.
    pub fn drop_published(self) {
        let mut published = self.published;
        tokio::spawn(async move { while published.recv().await.is_some() {} });
    }
}

/// The shell's store over a committer and the read pool.
pub struct PgTestStore {
    pub committer: Committer,
    pub reads: Reads,
}

impl Store for PgTestStore {
    fn load(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<Snapshot>, StoreReadError>> {
        async move { self.reads.snapshot(entity).await.map_err(|error| unreadable(&error)) }.boxed()
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, CommitOutcome> {
        self.committer.commit(commit).boxed()
    }

    fn command(&self, id: CommandId) -> BoxFuture<'_, Result<Option<CompletedCommand>, StoreReadError>> {
        async move { self.reads.command(id).await.map_err(|error| unreadable(&error)) }.boxed()
    }
}

fn unreadable(error: &persistence::StoreError) -> StoreReadError {
    StoreReadError::unavailable(error.to_string())
}
