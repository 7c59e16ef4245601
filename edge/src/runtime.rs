//! What an operator sees of the running cluster, and may do to it. The process that serves the edge implements [`Runtime`]; here are
//! the shapes (decisions 7, *runtime*).

use chrono::{DateTime, Utc};
use domain::{EntityRef, Kind};
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
    /// Forgets an entity's failures on every member and starts it anew. `false` where no member knew of it.
    fn restart_entity(&self, entity: EntityRef) -> BoxFuture<'_, Result<bool, RuntimeError>>;
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
}

/// Something that runs as long as its process.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct WorkerNode {
    pub name: String,
    /// The row that it hangs under; `root` at the top.
    pub under: String,
    pub what: String,
    /// `running`, `backing_off`, `parked` or `stopped`.
    pub state: String,
    pub since: DateTime<Utc>,
    pub restarts: u64,
    pub last_error: Option<String>,
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
    /// `awake`, `asleep`, `backing_off` or `parked`.
    pub status: String,
    /// The state of its machine, as it was committed last.
    pub state: Option<String>,
    pub version: i64,
    /// Since when it is in that state, or awake.
    pub since: Option<DateTime<Utc>>,
    /// What it waits for, in words.
    pub waits_for: Option<String>,
    /// Until when.
    pub deadline_at: Option<DateTime<Utc>>,
    pub overdue: bool,
    pub mailbox_depth: u64,
    pub restarts: u64,
    pub last_error: Option<String>,
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
    /// The shards that it owns, in order.
    pub shards: Vec<u8>,
}

/// Whether a process can serve, and what is missing.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Readiness {
    pub ready: bool,
    /// Each check by name; `ok`, or what is wrong.
    pub checks: BTreeMap<String, String>,
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
