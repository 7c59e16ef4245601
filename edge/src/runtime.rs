//! What an operator sees of the running cluster, and may do to it. The process that serves the edge implements [`Runtime`]; here are
//! the shapes (decisions 7, *runtime*).

use chrono::{DateTime, Utc};
use domain::runtime::Part;
use domain::{EntityRef, Kind, MemberId};
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
    /// Where one entity lives and what it is doing there; `None` where no such entity was ever committed.
    fn entity(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<EntityNode>, RuntimeError>>;
    /// A row of a member's supervision tree; `None` where no such member lives, or it has no such row.
    fn worker(&self, member: MemberId, name: &str) -> BoxFuture<'_, Result<Option<WorkerNode>, RuntimeError>>;
    /// Starts a part anew: an entity, its failures forgotten on every member; or a worker, whatever it was doing.
    fn restart(&self, part: Part) -> BoxFuture<'_, Result<Restarted, RuntimeError>>;
    /// The members, and what each owns.
    fn cluster(&self) -> BoxFuture<'_, Result<ClusterReport, RuntimeError>>;
    /// Tells the other members that the identity provider's keys have changed. Best effort: they find out by themselves when they meet
    /// a key that they do not know.
    fn provider_keys_changed(&self);
    /// Whether this process can serve: what `readyz` says.
    fn readiness(&self) -> BoxFuture<'_, Readiness>;
    /// This process, as it stands.
    fn stats(&self) -> Stats;
    /// Figures in the Prometheus text format.
    fn metrics(&self) -> String;
}

/// What came of an order to start a part anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restarted {
    Anew,
    /// Nothing of it ran.
    Nothing,
    /// A member that lives did not answer: it may have done it, or do it still.
    Unknown,
}

/// The report could not be made.
#[derive(Debug, thiserror::Error)]
#[error("the runtime cannot be reported: {0}")]
pub struct RuntimeError(pub String);

/// What of the tree is wanted. Without any of it: a summary, and what needs an operator.
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
    /// At most so many entities, 1 to 1000; 100 where it is not given.
    #[param(minimum = 1, maximum = 1000)]
    pub limit: Option<u32>,
}

/// What kinds of entities there are, for the API's description.
#[must_use]
pub fn kinds() -> Object {
    ObjectBuilder::new()
        .schema_type(SchemaType::new(Type::String))
        .enum_values(Some(Kind::ALL.iter().map(|kind| kind.as_str())))
        .build()
}

/// The supervision tree of the cluster.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Tree {
    pub members: Vec<MemberNode>,
    /// Members that live and did not answer in time, by id.
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
}

/// One process.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct MemberNode {
    pub id: Uuid,
    pub name: String,
    pub started_at: DateTime<Utc>,
    pub version: String,
    pub workers: Vec<WorkerNode>,
    /// How many shards it owns.
    pub shards: u64,
    /// Its shards one by one, where the filter asks for them: they hang under `entities`, and their entities under them.
    #[serde(default)]
    pub owned_shards: Vec<ShardNode>,
    /// How many entities are awake in it.
    pub awake: u64,
    /// Commands that wait in front of its entities.
    pub mailbox_depth: u64,
    /// The version of each set of keys that it goes by, by its purpose.
    #[serde(default)]
    pub key_sets: BTreeMap<String, u64>,
    /// The key of the key ring that seals there.
    #[serde(default)]
    pub seals_with: String,
    /// By how much its clock is ahead of Postgres' clock, in milliseconds, as it measured last.
    #[serde(default)]
    pub clock_offset_ms: Option<i64>,
}

/// Something that runs as long as its process.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct WorkerNode {
    pub name: String,
    /// The row that it hangs under; `root` at the top.
    pub under: String,
    pub what: String,
    pub state: WorkerState,
    pub since: DateTime<Utc>,
    pub restarts: u64,
    pub last_error: Option<String>,
    /// True where an operator can start it anew; what hangs below it is started anew with it.
    #[serde(default)]
    pub restartable: bool,
    /// What waits for it, where something does.
    #[serde(default)]
    pub queue: Option<QueueNode>,
}

/// How a row of the tree stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkerState {
    Running,
    /// It ended, and is started again in a moment.
    BackingOff,
    /// It ended too often, and waits for an operator.
    Parked,
    /// The process is ending.
    Stopped,
}

impl WorkerState {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::BackingOff => "backing_off",
            Self::Parked => "parked",
            Self::Stopped => "stopped",
        }
    }
}

/// What waits for a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QueueNode {
    /// Handed to nobody yet.
    pub waiting: u64,
    /// Being worked on.
    pub under_way: u64,
    /// So many may wait; what comes then is turned away or found later. Absent where a store without that bound keeps them.
    pub bound: Option<u64>,
}

/// A shard in a member's hands.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ShardNode {
    pub shard: u8,
    /// The member's term over it: raised by every takeover.
    pub epoch: i64,
    pub state: ShardState,
    pub since: DateTime<Utc>,
    /// How many of its entities are awake.
    pub awake: u64,
    /// Commands that wait in front of them.
    pub mailbox_depth: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ShardState {
    Open,
    /// It is being handed over: what is under way is answered, and nothing new is taken.
    Closing,
}

/// One entity: where it lives, what state it is in, and why it waits.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct EntityNode {
    pub kind: String,
    pub id: Uuid,
    pub shard: u8,
    /// The member that owns its shard.
    pub member: Option<Uuid>,
    pub member_name: Option<String>,
    pub status: EntityStatus,
    /// The state of its machine, as it was committed last.
    pub state: Option<String>,
    pub version: i64,
    /// Since when it is in that state, or awake.
    pub since: Option<DateTime<Utc>>,
    /// What it waits for, in words.
    pub waits_for: Option<String>,
    /// Until when.
    pub deadline_at: Option<DateTime<Utc>>,
    /// When it looks at itself next, if nobody asks it before.
    #[serde(default)]
    pub wakes_at: Option<DateTime<Utc>>,
    pub overdue: bool,
    pub mailbox_depth: u64,
    pub restarts: u64,
    pub last_error: Option<String>,
}

/// How an entity stands with the member that owns its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EntityStatus {
    Awake,
    /// Nobody needs it; the next command or its own time wakes it.
    Asleep,
    /// It ended in failure lately, and is left alone for a moment.
    BackingOff,
    /// It failed too often, and waits for an operator.
    Parked,
}

impl EntityStatus {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Awake => "awake",
            Self::Asleep => "asleep",
            Self::BackingOff => "backing_off",
            Self::Parked => "parked",
        }
    }
}

impl From<actors::host::EntityStatus> for EntityStatus {
    fn from(status: actors::host::EntityStatus) -> Self {
        match status {
            actors::host::EntityStatus::Awake => Self::Awake,
            actors::host::EntityStatus::BackingOff => Self::BackingOff,
            actors::host::EntityStatus::Parked => Self::Parked,
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
    /// Shards that nobody owns at this moment.
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
    /// Since its last word over NATS, in milliseconds; absent where it was not heard at all.
    pub unheard_for_ms: Option<u64>,
    /// By how much its clock is ahead of Postgres' clock, in milliseconds, as it measured last; absent where it has not said so yet.
    pub clock_offset_ms: Option<i64>,
    /// The shards that it owns, in order.
    pub shards: Vec<u8>,
}

/// Whether a process can serve, and what is missing.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Readiness {
    pub ready: bool,
    /// Each check by name; `ok`, or what is wrong.
    pub checks: BTreeMap<String, String>,
    /// It has never been ready: it is on its way, and nobody has to look.
    #[serde(skip)]
    pub starting: bool,
}

impl From<persistence::StoreError> for RuntimeError {
    fn from(error: persistence::StoreError) -> Self {
        Self(error.to_string())
    }
}

/// One process as it stands, read from its memory alone.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    pub member: StatsMember,
    pub entities: StatsEntities,
    /// The committer's workers, one connection each.
    pub committer: Vec<StatsCommitter>,
    pub database_pool: StatsPool,
    /// True while it is connected to NATS.
    pub nats_connected: bool,
    /// True while its renewal in Postgres is fresh: only then it answers from memory.
    pub lease_fresh: bool,
    /// Nodes whose agent waits here for a task.
    pub parked_polls: u64,
    /// Nodes' connections that are open here.
    pub node_connections: u64,
    /// What runs in it.
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
    /// Failed lately, started again.
    pub failing: u64,
    /// Commands that wait in front of them.
    pub mailbox_depth: u64,
    /// How often one ended in failure since the process began.
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
