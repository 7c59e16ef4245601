//! The running cluster as an operator sees it: this process's own state, together with the other members' answers and the
//! database's content.

pub mod store_check;
mod this_member;
mod tree_page;

use crate::cluster::bus::Bus;
use crate::cluster::member_queries::{answer_all, ask_all};
use crate::cluster::{ClusterState, ClusterView};
use crate::metrics::ProcessMetrics;
use crate::supervisor::{Supervisor, workers_check};
use actors::Host;
use actors::entity_host::{self, HostedEntity};
use actors::sharding::shard_of;
use chrono::{TimeDelta, Utc};
use domain::restart_record::RuntimePart as Restartable;
use domain::{EntityKind, EntityRef, MemberId, NodeId};
use edge::app_state::runtime_interface::{
    ClusterReport, EntityNode, EntityStatus, MemberNode, MemberReport, Readiness, RestartOutcome, Runtime,
    RuntimeError, Stats, Tree, TreeFilter, TreePosition, WorkerNode,
};
use edge::fleet_telemetry::{FleetSamples, FleetTelemetry, NodeSample, NodeSummary};
use edge::http::long_poll::LongPolls;
use edge::tls::connections::Connections;
use edge::trust::current_keys::CurrentKeys;
use futures::FutureExt;
use futures::future::{BoxFuture, join_all};
use persistence::queries::{WaitingEntity, WaitingFilter, WaitingPosition};
use persistence::{Cluster, Committer, OutboxRow, Reads};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use store_check::StoreCheck;
use tokio::sync::mpsc;
use tree_page::TreePage;
use uuid::Uuid;

/// How many entities a tree shows by default.
const DEFAULT_LIMIT: u32 = 100;

/// A tick that lies further ahead means never.
const NEVER_AFTER: TimeDelta = TimeDelta::days(3650);

/// In how many answers a member sends what it knows of the fleet: 100,000 nodes are below the 1 MiB of a message of NATS.
const FLEET_PARTS: u8 = 32;

/// The runtime state of one process, and its access to the rest of the cluster.
pub struct OperatorView {
    pub view: Arc<ClusterView>,
    pub bus: Bus,
    pub host: Arc<Host>,
    pub supervisor: Supervisor,
    pub committer: Committer,
    pub reads: Reads,
    pub cluster: Cluster,
    pub metrics: Arc<ProcessMetrics>,
    pub pool: PgPool,
    pub polls: LongPolls,
    pub connections: Connections,
    pub keys: CurrentKeys,
    /// The id of the key-encryption key that seals here.
    pub seals_with: String,
    /// The queue of committed events that the relay has not taken yet.
    pub committed: mpsc::Sender<OutboxRow>,
    pub been_ready: AtomicBool,
    pub store_check: StoreCheck,
    /// The load of the nodes whose heartbeats this process receives.
    pub fleet: FleetTelemetry,
}

/// A request from one member to the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RuntimeRequest {
    /// The member's workers, with the entities of `ids` and all that are parked or backing off; its shards too, where requested.
    Part {
        ids: Vec<Uuid>,
        #[serde(default)]
        shards: bool,
    },
    Restart {
        entity: EntityRef,
    },
    RestartWorker {
        member: MemberId,
        worker: String,
    },
    /// The load of the nodes in one of `parts` parts.
    Fleet {
        part: u8,
        parts: u8,
    },
    NodeLoad {
        node_id: NodeId,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RuntimeReply {
    Part(Box<MemberRuntime>),
    Restarted(bool),
    Fleet(Vec<(NodeId, NodeSummary)>),
    NodeLoad(Option<NodeSample>),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct MemberRuntime {
    node: MemberNode,
    entities: Vec<HostedEntity>,
}

impl OperatorView {
    /// Answers the other members.
    ///
    /// # Errors
    /// Where the subscription ends.
    pub async fn serve_peers(&self) -> anyhow::Result<()> {
        answer_all(&self.bus, &self.view, |request| self.reply_to(&request)).await
    }

    async fn gather(&self, ids: Vec<Uuid>, shards: bool) -> (BTreeMap<MemberId, MemberRuntime>, Vec<MemberId>) {
        let request = RuntimeRequest::Part { ids, shards };
        let own = self.reply_to(&request);
        let gathered = ask_all(&self.bus, &self.view, &request, own).await;
        let parts = gathered.answers.into_iter().filter_map(|(id, reply)| match reply {
            RuntimeReply::Part(part) => Some((id, *part)),
            RuntimeReply::Restarted(_) | RuntimeReply::Fleet(_) | RuntimeReply::NodeLoad(_) => None,
        });
        (parts.collect(), gathered.silent)
    }

    async fn make_tree(&self, filter: TreeFilter) -> Result<Tree, RuntimeError> {
        let limit = filter.limit.unwrap_or(DEFAULT_LIMIT).clamp(1, 1000);
        let now = Utc::now();
        let kind = match &filter.kind {
            None => None,
            Some(name) => {
                Some(EntityKind::parse(name).ok_or_else(|| RuntimeError(format!("there is no kind {name:?}")))?)
            }
        };
        let only_parked = filter.parked == Some(true);
        let after = filter.page_token.map(|TreePosition { deadline_at, id }| WaitingPosition { deadline_at, id });
        let overdue_at = filter.overdue.unwrap_or(false).then_some(now);
        let mut wanted = WaitingFilter { kind, state: filter.state.clone(), overdue_at, ids: None, after };
        let with_shards = filter.shards == Some(true);
        // Which entities are parked is known by their hosts alone.
        let hosted = if only_parked { Some(self.gather(Vec::new(), with_shards).await) } else { None };
        if let Some((parts, _)) = &hosted {
            let rows = parts.values().flat_map(|part| &part.entities);
            let parked = rows.filter(|row| row.status == entity_host::ActivationStatus::Parked);
            wanted.ids = Some(parked.map(|row| row.id).collect());
        }
        let waiting = self.reads.waiting(&wanted, limit + 1).await?;
        let (parts, silent) = match hosted {
            Some(gathered) => gathered,
            None => self.gather(waiting.iter().map(|row| row.entity.id).collect(), with_shards).await,
        };
        let rows: BTreeMap<Uuid, &HostedEntity> =
            parts.values().flat_map(|part| &part.entities).map(|row| (row.id, row)).collect();
        let troubled: Vec<_> =
            rows.values().filter(|row| row.status != entity_host::ActivationStatus::Awake).copied().collect();
        let is_filtered = only_parked || filter.kind.is_some() || filter.state.is_some() || filter.overdue.is_some();
        let page = if is_filtered {
            TreePage::of(waiting, limit)
        } else {
            let ids: Vec<_> = troubled.iter().map(|row| row.id).collect();
            TreePage::of_summary(&self.reads, after, waiting, &ids, limit).await?
        };
        let owners = self.owners();
        let shown = |at: &WaitingEntity| entity_node(at, rows.get(&at.entity.id).copied(), &owners);
        let entities = page.entities.iter().map(shown).collect();
        let mut entities_by_kind: BTreeMap<String, BTreeMap<String, u64>> = BTreeMap::new();
        for count in self.reads.counts().await? {
            entities_by_kind.entry(count.kind.to_string()).or_default().insert(count.state, count.count);
        }
        Ok(Tree {
            overdue: self.reads.overdue(now, 1).await?.count,
            parked: troubled.iter().filter(|row| row.status == entity_host::ActivationStatus::Parked).count() as u64,
            members: parts.values().map(|part| part.node.clone()).collect(),
            silent: silent.into_iter().map(|id| id.0).collect(),
            entities_by_kind,
            entities,
            truncated: page.next.is_some(),
            next_page: page.next.map(|WaitingPosition { deadline_at, id }| TreePosition { deadline_at, id }),
        })
    }

    async fn gather_fleet(&self) -> FleetSamples {
        let parts = join_all((0..FLEET_PARTS).map(|part| async move {
            let request = RuntimeRequest::Fleet { part, parts: FLEET_PARTS };
            ask_all(&self.bus, &self.view, &request, self.reply_to(&request)).await
        }));
        let (mut samples, mut silent) = (FleetSamples::default(), BTreeSet::new());
        for gathered in parts.await {
            silent.extend(gathered.silent);
            for reply in gathered.answers.into_values() {
                if let RuntimeReply::Fleet(summaries) = reply {
                    samples.merge(summaries);
                }
            }
        }
        samples.silent_members = silent.into_iter().map(|member| member.0).collect();
        samples
    }

    async fn gather_node_load(&self, node_id: NodeId) -> Option<NodeSample> {
        let request = RuntimeRequest::NodeLoad { node_id };
        let gathered = ask_all(&self.bus, &self.view, &request, self.reply_to(&request)).await;
        let loads = gathered.answers.into_values().filter_map(|reply| match reply {
            RuntimeReply::NodeLoad(load) => load,
            RuntimeReply::Part(_) | RuntimeReply::Restarted(_) | RuntimeReply::Fleet(_) => None,
        });
        loads.max_by_key(|load| load.received_at)
    }

    async fn find(&self, entity: EntityRef) -> Result<Option<EntityNode>, RuntimeError> {
        let wanted = WaitingFilter { kind: Some(entity.kind), ids: Some(vec![entity.id]), ..WaitingFilter::default() };
        let Some(at) = self.reads.waiting(&wanted, 1).await?.pop() else { return Ok(None) };
        let (parts, _) = self.gather(vec![entity.id], false).await;
        let row = parts.values().flat_map(|part| &part.entities).find(|row| row.id == entity.id);
        Ok(Some(entity_node(&at, row, &self.owners())))
    }

    async fn find_worker(&self, member: MemberId, name: &str) -> Result<Option<WorkerNode>, RuntimeError> {
        let (mut parts, silent) = self.gather(Vec::new(), false).await;
        if silent.contains(&member) {
            return Err(RuntimeError(format!("member {member} lives and did not answer")));
        }
        let workers = parts.remove(&member).map(|part| part.node.workers).unwrap_or_default();
        Ok(workers.into_iter().find(|worker| worker.name == name))
    }

    async fn restart(&self, part: Restartable) -> Result<RestartOutcome, RuntimeError> {
        let (request, by) = match part {
            Restartable::Entity { entity } => {
                self.cluster.unpark(entity).await?;
                // For the member that owns it, or still has an actor of it.
                (RuntimeRequest::Restart { entity }, None)
            }
            Restartable::Worker { member, worker } => (RuntimeRequest::RestartWorker { member, worker }, Some(member)),
        };
        let own = self.reply_to(&request);
        let gathered = ask_all(&self.bus, &self.view, &request, own).await;
        let done = gathered.answers.values().any(|reply| matches!(reply, RuntimeReply::Restarted(true)));
        let missing = by.map_or(!gathered.silent.is_empty(), |member| gathered.silent.contains(&member));
        Ok(match (done, missing) {
            (true, _) => RestartOutcome::Restarted,
            (false, true) => RestartOutcome::Unknown,
            (false, false) => RestartOutcome::Nothing,
        })
    }

    /// The owner of each shard, by id and name.
    fn owners(&self) -> BTreeMap<u8, (Uuid, Option<String>)> {
        let state = self.view.state();
        let name = |id: MemberId| {
            state
                .living
                .iter()
                .find(|heartbeat| heartbeat.member.id == id)
                .map(|heartbeat| heartbeat.member.name.clone())
        };
        let owned = state.shards.iter().filter_map(|at| at.owner.map(|owner| (at.shard.0, (owner.0, name(owner)))));
        owned.collect()
    }

    async fn report(&self) -> Result<ClusterReport, RuntimeError> {
        let incarnation = self.cluster.incarnation().await?;
        let shards = self.cluster.shards().await?;
        // By this member's own view: a step of the database's clock makes no dead member live.
        let ClusterState { living, last_message_at, .. } = self.view.state();
        let member = |at: &persistence::membership::MemberHeartbeat| MemberReport {
            id: at.member.id.0,
            name: at.member.name.clone(),
            started_at: at.member.started_at,
            roles: strict_json::from_value(at.member.details["roles"].clone()).unwrap_or_default(),
            silent_for_ms: millis(at.silent_for),
            unheard_for_ms: last_message_at.get(&at.member.id).map(|last_message_at| millis(last_message_at.elapsed())),
            clock_offset_ms: at.member.details["clock_offset_ms"].as_i64(),
            shards: shards.iter().filter(|o| o.owner == Some(at.member.id)).map(|o| o.shard.0).collect(),
        };
        let members: Vec<_> = living.iter().map(member).collect();
        let owned: usize = members.iter().map(|member| member.shards.len()).sum();
        Ok(ClusterReport {
            incarnation,
            answered_by: self.view.me.id.0,
            unowned_shards: (shards.len() - owned) as u64,
            members,
        })
    }

    /// Whether this process can serve.
    pub async fn check_readiness(&self) -> Readiness {
        // On the pool that serves, not on the one of the heartbeats.
        let store = self.store_check.run(&Cluster::new(self.pool.clone()), self.view.me.id, &self.committer).await;
        let state = self.view.state();
        let owned = state.shards.iter().filter(|at| at.owner.is_some()).count();
        let shards = if owned == domain::Shard::COUNT { "ok".to_owned() } else { format!("{owned} of 256 are owned") };
        let member = match (self.view.has_fresh_lease(), state.partitioned) {
            (false, _) => "this member's renewal is overdue",
            (true, true) => "the other members receive each other over NATS and not this one",
            (true, false) => "ok",
        };
        let member = member.to_owned();
        // Without NATS the cluster keeps serving; a replica that never had it cannot reach the others' shards.
        let bus = if self.bus.is_connected() { "ok" } else { "not connected" }.to_owned();
        let workers = workers_check(&self.supervisor.rows());
        let ready = [&store, &shards, &member, &workers].into_iter().all(|check| check == "ok");
        let checks =
            [("postgres", store), ("shards", shards), ("membership", member), ("workers", workers), ("nats", bus)];
        let starting = !self.been_ready.fetch_or(ready, Ordering::Relaxed) && !ready;
        Readiness { ready, checks: checks.map(|(name, check)| (name.to_owned(), check)).into(), starting }
    }
}

/// An entity as the database stores it, with its status at its host.
fn entity_node(
    at: &WaitingEntity,
    row: Option<&HostedEntity>,
    owners: &BTreeMap<u8, (Uuid, Option<String>)>,
) -> EntityNode {
    let shard = shard_of(at.entity.id).0;
    let owner = owners.get(&shard);
    let parked =
        row.filter(|row| row.status != entity_host::ActivationStatus::Awake).and_then(|row| row.waits_for.clone());
    EntityNode {
        kind: at.entity.kind.to_string(),
        id: at.entity.id,
        shard,
        member: owner.map(|(id, _)| *id),
        member_name: owner.and_then(|(_, name)| name.clone()),
        status: row.map_or(EntityStatus::Asleep, |row| row.status.into()),
        state: Some(at.state.clone()),
        version: at.version,
        since: Some(at.updated_at),
        waits_for: parked.or_else(|| at.reason.clone().filter(|reason| !reason.is_empty())),
        deadline_at: at.deadline_at,
        wakes_at: at.wake_at.filter(|wake_at| *wake_at < Utc::now() + NEVER_AFTER),
        overdue: at.deadline_at.is_some_and(|deadline| deadline < Utc::now()),
        mailbox_depth: row.map_or(0, |row| row.mailbox_depth as u64),
        restarts: row.map_or(0, |row| row.restarts),
        last_error: row.and_then(|row| row.last_error.clone()),
    }
}

fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The cluster's runtime, as the edge serves it.
pub struct ClusterRuntime(pub Arc<OperatorView>);

impl Runtime for ClusterRuntime {
    fn tree(&self, filter: TreeFilter) -> BoxFuture<'_, Result<Tree, RuntimeError>> {
        self.0.make_tree(filter).boxed()
    }

    fn entity(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<EntityNode>, RuntimeError>> {
        self.0.find(entity).boxed()
    }

    fn worker(&self, member: MemberId, name: &str) -> BoxFuture<'_, Result<Option<WorkerNode>, RuntimeError>> {
        let name = name.to_owned();
        async move { self.0.find_worker(member, &name).await }.boxed()
    }

    fn restart(&self, part: Restartable) -> BoxFuture<'_, Result<RestartOutcome, RuntimeError>> {
        self.0.restart(part).boxed()
    }

    fn cluster(&self) -> BoxFuture<'_, Result<ClusterReport, RuntimeError>> {
        self.0.report().boxed()
    }

    fn fleet(&self) -> BoxFuture<'_, FleetSamples> {
        self.0.gather_fleet().boxed()
    }

    fn node_load(&self, node_id: NodeId) -> BoxFuture<'_, Option<NodeSample>> {
        self.0.gather_node_load(node_id).boxed()
    }

    fn provider_keys_changed(&self) {
        let bus = self.0.bus.clone();
        tokio::spawn(async move { bus.provider_keys_changed().await });
    }

    fn readiness(&self) -> BoxFuture<'_, Readiness> {
        self.0.check_readiness().boxed()
    }

    fn stats(&self) -> Stats {
        self.0.stats()
    }

    fn metrics(&self) -> String {
        self.0.metrics.set_key_ages(&self.0.keys.load(), Utc::now());
        self.0.metrics.render(self.0.sample())
    }
}
