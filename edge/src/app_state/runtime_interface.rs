//! An operator's view of the running cluster, and the operations on it. The process that serves the edge implements [`Runtime`]; its data
//! types are here (decisions 7, *Runtime*).

use crate::fleet_telemetry::{FleetSamples, NodeSample};
use chrono::{DateTime, Utc};
use domain::restart_record::RuntimePart;
use domain::{EntityKind, EntityRef, MemberId, NodeId};
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaType, Type};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

/// The running cluster, from any of its members.
pub trait Runtime: Send + Sync + 'static {
    /// The supervision trees of all living members, merged.
    fn tree(&self, filter: TreeFilter) -> BoxFuture<'_, Result<Tree, RuntimeError>>;
    /// The owner of an entity and its state there; `None` where no such entity was ever committed.
    fn entity(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<EntityNode>, RuntimeError>>;
    /// A worker of a member's supervision tree; `None` where there is no such member, or no such worker.
    fn worker(&self, member: MemberId, name: &str) -> BoxFuture<'_, Result<Option<WorkerNode>, RuntimeError>>;
    /// Restarts a part: an entity, with its failure count reset on every member; or a worker, whatever it was doing.
    fn restart(&self, part: RuntimePart) -> BoxFuture<'_, Result<RestartOutcome, RuntimeError>>;
    /// The members, and what each owns.
    fn cluster(&self) -> BoxFuture<'_, Result<ClusterReport, RuntimeError>>;
    /// The load of each node, from the memory of all members.
    fn fleet(&self) -> BoxFuture<'_, FleetSamples>;
    /// The load of one node, from the memory of the member that received its last heartbeat.
    fn node_load(&self, node_id: NodeId) -> BoxFuture<'_, Option<NodeSample>>;
    /// Notifies the other members that the identity provider's keys have changed. Best effort: they refresh by themselves at the first
    /// unknown key.
    fn provider_keys_changed(&self);
    /// Whether this process can serve: the result of `readyz`.
    fn readiness(&self) -> BoxFuture<'_, Readiness>;
    /// The current state of this process.
    fn stats(&self) -> Stats;
    /// Metrics in the Prometheus text format.
    fn metrics(&self) -> String;
}

/// The outcome of a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartOutcome {
    Restarted,
    /// Nothing of it ran.
    Nothing,
    /// A living member did not answer: it may have restarted the part, or still do so.
    Unknown,
}

/// The report could not be made.
#[derive(Debug, thiserror::Error)]
#[error("the runtime cannot be reported: {0}")]
pub struct RuntimeError(pub String);

/// Which parts of the tree to return. Without a filter: a summary, and what needs an operator.
#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct TreeFilter {
    /// Entities of this kind.
    #[param(schema_with = kinds)]
    pub kind: Option<String>,
    /// Entities in this state of their machine.
    #[param(example = "provisioning", max_length = 64, pattern = r"^[^\u0000-\u001f\u007f-\u009f]*$")]
    pub state: Option<String>,
    /// Entities past their deadline.
    pub overdue: Option<bool>,
    /// Entities that failed too often.
    pub parked: Option<bool>,
    /// With every member's shards one by one.
    pub shards: Option<bool>,
    /// The maximum number of entities, 1 to 1000; 100 by default.
    #[param(minimum = 1, maximum = 1000)]
    pub limit: Option<u32>,
    /// Where the entities begin: the `next_page` of the answer before, with the same filter.
    #[param(value_type = Option<String>, pattern = "^(none|[0-9]{1,16})_[0-9a-f]{32}$")]
    pub page_token: Option<TreePosition>,
}

/// The position of an entity in the order of the tree's list: by deadline, the nearest first, then by id. As text it is the deadline in
/// microseconds since 1970, or `none`, and the id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TreePosition {
    pub deadline_at: Option<DateTime<Utc>>,
    pub id: Uuid,
}

/// The text is no position.
#[derive(Debug, thiserror::Error)]
#[error("is not the next_page of an earlier answer; begin again without it")]
pub struct NoTreePosition;

impl TryFrom<String> for TreePosition {
    type Error = NoTreePosition;

    fn try_from(text: String) -> Result<Self, NoTreePosition> {
        let (deadline, id) = text.split_once('_').ok_or(NoTreePosition)?;
        let is_short = deadline.len() <= 16 && deadline.bytes().all(|digit| digit.is_ascii_digit());
        let deadline_at = match deadline {
            "none" => None,
            micros if is_short => {
                Some(micros.parse().ok().and_then(DateTime::from_timestamp_micros).ok_or(NoTreePosition)?)
            }
            _ => return Err(NoTreePosition),
        };
        match Uuid::try_parse(id) {
            Ok(id) if text.len() == deadline.len() + 33 => Ok(Self { deadline_at, id }),
            _ => Err(NoTreePosition),
        }
    }
}

impl From<TreePosition> for String {
    fn from(TreePosition { deadline_at, id }: TreePosition) -> Self {
        let deadline = deadline_at.map_or("none".to_owned(), |at| at.timestamp_micros().to_string());
        format!("{deadline}_{}", id.simple())
    }
}

/// The kinds of entities, for the API's description.
#[must_use]
pub fn kinds() -> Object {
    ObjectBuilder::new()
        .schema_type(SchemaType::new(Type::String))
        .enum_values(Some(EntityKind::ALL.iter().map(|kind| kind.as_str())))
        .build()
}

/// The supervision tree of the cluster.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Tree {
    pub members: Vec<MemberNode>,
    /// Living members that did not answer in time, by id.
    pub silent: Vec<Uuid>,
    /// All committed entities, counted by kind and state.
    pub entities_by_kind: BTreeMap<String, BTreeMap<String, u64>>,
    /// How many entities are past their deadline.
    pub overdue: u64,
    /// How many entities are parked.
    pub parked: u64,
    /// What the filter selects; without one: what is overdue, parked or waiting for something.
    pub entities: Vec<EntityNode>,
    /// True where more were selected than are shown.
    pub truncated: bool,
    /// The `page_token` of the entities that follow; null where there are none.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub next_page: Option<TreePosition>,
}

/// One process.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct MemberNode {
    pub id: Uuid,
    pub name: String,
    pub started_at: DateTime<Utc>,
    pub version: String,
    pub workers: Vec<WorkerNode>,
    /// The number of shards that it owns.
    pub shards: u64,
    /// Its shards one by one, where the filter selects them: their parent is `entities`, and their entities are below them.
    #[serde(default)]
    pub owned_shards: Vec<ShardNode>,
    /// The number of entities that are activated in it.
    pub awake: u64,
    /// Commands in the mailboxes of its entities.
    pub mailbox_depth: u64,
    /// The version of each key set that it uses, by its purpose.
    #[serde(default)]
    pub key_sets: BTreeMap<String, u64>,
    /// The key of the key ring that it seals with.
    #[serde(default)]
    pub seals_with: String,
    /// By how much its clock is ahead of Postgres' clock, in milliseconds, as it measured last.
    #[serde(default)]
    pub clock_offset_ms: Option<i64>,
}

/// A worker: it runs as long as its process.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct WorkerNode {
    pub name: String,
    /// Its parent; `root` at the top.
    pub under: String,
    pub what: String,
    pub state: WorkerState,
    pub since: DateTime<Utc>,
    pub restarts: u64,
    pub last_error: Option<String>,
    /// True where an operator can restart it; its children are restarted with it.
    #[serde(default)]
    pub restartable: bool,
    /// Its queue, where it has one.
    #[serde(default)]
    pub queue: Option<QueueNode>,
}

/// The state of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum WorkerState {
    Running,
    /// It runs, and has had no work so far: a committer opens its connection for the first transition.
    Idle,
    /// It ended, and is restarted in a moment.
    BackingOff,
    /// It ended too often, and waits for an operator.
    Parked,
    /// The process is ending.
    Stopped,
}

impl WorkerState {
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

/// The queue of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QueueNode {
    /// Not dispatched yet.
    pub waiting: u64,
    /// Being processed.
    pub under_way: u64,
    /// The bound on the queue; what exceeds it is refused or found later. Absent where a store without that bound holds them.
    pub bound: Option<u64>,
}

/// A shard, as its owner sees it.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ShardNode {
    pub shard: u8,
    /// The term of its ownership: raised by every takeover.
    pub epoch: i64,
    pub state: ShardState,
    pub since: DateTime<Utc>,
    /// The number of its activated entities.
    pub awake: u64,
    /// Commands in their mailboxes.
    pub mailbox_depth: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ShardState {
    Open,
    /// It is being handed over: commands in flight are answered, and no new ones are accepted.
    Closing,
}

/// One entity: its owner, its state, and why it waits.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct EntityNode {
    pub kind: String,
    pub id: Uuid,
    pub shard: u8,
    /// The member that owns its shard.
    pub member: Option<Uuid>,
    pub member_name: Option<String>,
    pub status: EntityStatus,
    /// The committed state of its state machine.
    pub state: Option<String>,
    pub version: i64,
    /// Since when it is in that state, or activated.
    pub since: Option<DateTime<Utc>>,
    /// What it waits for, as a text.
    pub waits_for: Option<String>,
    /// The deadline of the wait.
    pub deadline_at: Option<DateTime<Utc>>,
    /// Its next timer, unless a command comes before.
    #[serde(default)]
    pub wakes_at: Option<DateTime<Utc>>,
    pub overdue: bool,
    pub mailbox_depth: u64,
    pub restarts: u64,
    pub last_error: Option<String>,
}

/// The activation state of an entity at its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum EntityStatus {
    Awake,
    /// It is passivated; the next command or its timer activates it.
    Asleep,
    /// It failed recently, and is restarted after a backoff.
    BackingOff,
    /// It failed too often, and waits for an operator.
    Parked,
}

impl EntityStatus {
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl From<actors::entity_host::ActivationStatus> for EntityStatus {
    fn from(status: actors::entity_host::ActivationStatus) -> Self {
        match status {
            actors::entity_host::ActivationStatus::Awake => Self::Awake,
            actors::entity_host::ActivationStatus::BackingOff => Self::BackingOff,
            actors::entity_host::ActivationStatus::Parked => Self::Parked,
        }
    }
}

/// The members of the cluster.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ClusterReport {
    /// Raised when a database is restored from a backup.
    pub incarnation: i64,
    /// The member that answers.
    pub answered_by: Uuid,
    pub members: Vec<MemberReport>,
    /// Shards that no member owns at this moment.
    pub unowned_shards: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct MemberReport {
    pub id: Uuid,
    pub name: String,
    pub started_at: DateTime<Utc>,
    pub roles: Vec<String>,
    /// Since its last renewal in Postgres, in milliseconds.
    pub silent_for_ms: u64,
    /// Since its last heartbeat over NATS, in milliseconds; absent where there was none.
    pub unheard_for_ms: Option<u64>,
    /// By how much its clock is ahead of Postgres' clock, in milliseconds, as it measured last; absent where it has not reported it yet.
    pub clock_offset_ms: Option<i64>,
    /// The shards that it owns, in order.
    pub shards: Vec<u8>,
}

/// Whether a process can serve, and which checks fail.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Readiness {
    pub ready: bool,
    /// Each check by name; `ok`, or the fault.
    pub checks: BTreeMap<String, String>,
    /// It has never been ready: it is starting, and needs no attention.
    #[serde(skip)]
    pub starting: bool,
}

impl From<persistence::StoreError> for RuntimeError {
    fn from(error: persistence::StoreError) -> Self {
        Self(error.to_string())
    }
}

/// The current state of one process, read from its memory alone.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    pub member: StatsMember,
    pub entities: StatsEntities,
    /// The committer's workers, one connection each.
    pub committer: Vec<StatsCommitter>,
    pub database_pool: StatsPool,
    /// True while it is connected to NATS.
    pub nats_connected: bool,
    /// True while its lease in Postgres is fresh: only then it answers from memory.
    pub lease_fresh: bool,
    /// Nodes whose agent waits here for a task.
    pub parked_polls: u64,
    /// Nodes' connections that are open here.
    pub node_connections: u64,
    /// The entities that are activated in it.
    pub workers: Vec<WorkerNode>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct StatsMember {
    pub id: Uuid,
    pub name: String,
    pub version: String,
    pub roles: Vec<String>,
    pub started_at: DateTime<Utc>,
    pub uptime_seconds: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct StatsEntities {
    /// Shards that it owns.
    pub shards: u64,
    pub awake: u64,
    /// Failed too often, waiting for an operator.
    pub parked: u64,
    /// Failed recently, restarted.
    pub failing: u64,
    /// Commands that wait in front of them.
    pub mailbox_depth: u64,
    /// The number of failures since the process began.
    pub failures_total: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct StatsCommitter {
    pub connected: bool,
    /// Transitions in its queue.
    pub waiting: u64,
    pub batches: u64,
    pub last_error: Option<String>,
    pub last_error_at: Option<DateTime<Utc>>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct StatsPool {
    pub open: u32,
    pub idle: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_of_the_tree_is_read_from_its_own_text_alone() {
        let id = Uuid::from_u128(7);
        for deadline_at in
            [None, DateTime::from_timestamp_micros(0), DateTime::from_timestamp_micros(1_764_000_000_123_456)]
        {
            let position = TreePosition { deadline_at, id };
            assert_eq!(TreePosition::try_from(String::from(position)).unwrap(), position);
        }
        let hex = id.simple();
        for text in [
            String::new(),
            "none".to_owned(),
            format!("_{hex}"),
            format!("-1_{hex}"),
            format!("+1_{hex}"),
            format!("99999999999999999_{hex}"),
            format!("none_{id}"),
            format!("none_{hex}0"),
            format!("none_{{{hex}}}"),
        ] {
            assert!(TreePosition::try_from(text.clone()).is_err(), "{text}");
        }
    }
}
