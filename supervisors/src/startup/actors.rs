//! The fourth stage: the host of the entities, their ports, and the supervisors above them.

use super::membership::MembershipStage;
use super::storage::StorageStage;
use crate::cluster::shard_takeover::ShardReconciler;
use crate::cluster_keys;
use crate::config::Config;
use crate::effect_broadcast::ProcessEffects;
use crate::entity_environment::EntityEnvironment;
use crate::entity_store::PgStore;
use crate::metrics::EventMetrics;
use crate::process_roles::ProcessRole;
use crate::supervisor::Supervisor;
use actors::{Directory, Host, HostConfig};
use edge::http::long_poll::LongPolls;
use edge::terminal::Terminals;
use edge::tls::connections::Connections;
use prometheus::Registry;
use std::sync::Arc;
use tokio::sync::Notify;

/// The entities of this process, and the way to those of the others.
pub struct ActorStage {
    pub environment: Arc<EntityEnvironment>,
    /// What the effects of commits act on.
    pub effects: ProcessEffects,
    pub host: Arc<Host>,
    pub directory: Directory,
    pub supervisor: Supervisor,
    pub reconciler: Arc<ShardReconciler>,
}

impl ActorStage {
    /// # Errors
    /// Where a secret cannot be opened, or the root of the tree cannot be started.
    pub async fn start(
        config: &Config,
        registry: &Registry,
        storage: &StorageStage,
        membership: &MembershipStage,
    ) -> anyhow::Result<Self> {
        let MembershipStage { view, bus, cluster, read_ownership, superseded: _ } = membership;
        let environment = Arc::new(EntityEnvironment::new(Arc::clone(view)));
        environment.set_policy_book(storage.policy_book.clone());
        let relay_secret = cluster_keys::terminal_relay(&storage.secrets).await?;
        let effects = ProcessEffects {
            polls: LongPolls::default(),
            terminals: Terminals::register(registry, Some(Arc::new(bus.clone())), relay_secret)?,
            connections: Connections::default(),
            environment: Arc::clone(&environment),
            keys_changed: Arc::new(Notify::new()),
            bus: bus.clone(),
        };
        let store = PgStore {
            committer: storage.committer.clone(),
            reads: storage.reads.clone(),
            loader: storage.loader.clone(),
            fenced: Arc::clone(read_ownership),
            cluster: cluster.clone(),
            metrics: EventMetrics::register(registry)?,
        };
        let (performer, clock) = (Arc::new(effects.clone()), Arc::clone(&environment));
        let host = Host::new(HostConfig::default(), Arc::new(store), performer, clock);
        let directory = Directory::new(Arc::clone(&host), Arc::new(bus.clone()));
        let supervisor = Supervisor::start().await?;
        let takes_shards = config.roles.contains(&ProcessRole::Entities);
        let reconciler = Arc::new(ShardReconciler::new(
            Arc::clone(view),
            cluster.clone(),
            Arc::clone(&host),
            directory.clone(),
            bus.clone(),
            takes_shards.then(|| supervisor.root()),
            Arc::clone(read_ownership),
        ));
        Ok(Self { environment, effects, host, directory, supervisor, reconciler })
    }
}
