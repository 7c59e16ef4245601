//! The representation of an allocation in the API (decisions 3, *Allocation*).

use chrono::{DateTime, Utc};
use domain::allocation::{Allocation, Phase};
use domain::node::{self, Node};
use domain::{Machine, Timestamp};
use persistence::queries::AllocationCost;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::api::request_fields::{Labels, ResourceName};
use crate::api::sku::PriceView;

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Allocation)]
pub(in crate::api) struct AllocationView {
    id: Uuid,
    #[schema(value_type = Option<ResourceName>)]
    name: Option<String>,
    #[schema(value_type = Labels)]
    labels: BTreeMap<String, String>,
    user_id: String,
    org_id: Option<String>,
    project_id: Option<String>,
    /// The node that it is on, or was on last.
    node_id: Option<Uuid>,
    /// The SKU's name.
    sku: String,
    region_code: Option<String>,
    gpu_count: u32,
    /// The GPUs that it has, or had last.
    devices: Vec<DeviceView>,
    /// The device nodes beside those of its GPUs that its programs may open while it is active, such as `/dev/fuse`.
    further_devices: Vec<String>,
    state: StateName,
    /// Why it is in its state: a code or a sentence.
    state_reason: String,
    /// Why it could not be placed, or failed; null where it did not.
    failure: Option<FailureView>,
    status_history: Vec<StatusView>,
    /// The number of the clean-up attempt; 0 before the first.
    attempt: u32,
    /// How the node is cleaned after it.
    isolation_model: String,
    /// Its price, which stays the same to its end.
    price: PriceView,
    /// The end of the billed time; null where nothing is billed.
    billed_until: Option<DateTime<Utc>>,
    /// Its cost up to then, in minor units, rounded down.
    cost_to_date_minor: i64,
    /// Where to log in; null while there is nothing to log in to.
    ssh: Option<SshView>,
    /// Known problems with it, such as a machine that is not in contact; null where there are none.
    health: Option<HealthView>,
    /// The deadline of its state; null where the state has none.
    deadline_at: Option<DateTime<Utc>>,
    /// True after the deadline.
    overdue: bool,
    requested_at: DateTime<Utc>,
    active_at: Option<DateTime<Utc>>,
    release_requested_at: Option<DateTime<Utc>>,
    released_at: Option<DateTime<Utc>>,
    /// Raised by every change; the `ETag` too.
    generation: i64,
}

/// The six states of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[schema(as = AllocationState)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum StateName {
    Requested,
    Provisioning,
    Active,
    Releasing,
    ReleaseFailed,
    Released,
}

/// A GPU as the node's driver names it.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Device)]
pub(in crate::api) struct DeviceView {
    index: u32,
    uuid: String,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AllocationFailure)]
pub(in crate::api) struct FailureView {
    /// The state in which it failed.
    phase: String,
    code: String,
    message: String,
    /// True where a new request may succeed.
    retryable: bool,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AllocationStatus)]
pub(in crate::api) struct StatusView {
    state: String,
    at: DateTime<Utc>,
    reason: String,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AllocationSsh)]
pub(in crate::api) struct SshView {
    host: String,
    port: u16,
    username: String,
    /// The fingerprint of the expected host key, in OpenSSH's `SHA256:` form; null where the node's agent has not reported one.
    host_key_fingerprint: Option<String>,
    /// The fingerprints of the keys that open it, in OpenSSH's `SHA256:` form.
    key_fingerprints: Vec<String>,
    /// False until the node has written the keys after a change: until then the earlier keys open it.
    keys_written: bool,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AllocationHealth)]
pub(in crate::api) struct HealthView {
    status: &'static str,
    message: String,
    /// When the allocation is released because of them; null where it is not.
    release_at: Option<DateTime<Utc>>,
}

impl AllocationView {
    /// `node`: the node that it is placed on, where that was read.
    pub(in crate::api) fn of(
        it: &Allocation,
        node: Option<&Node>,
        version: i64,
        cost: Option<&AllocationCost>,
        now: Timestamp,
    ) -> Self {
        let asked = it.asked.clone();
        let (node_id, placed) = it.placement().unzip();
        let deadline = it.deadline();
        let device = |device: &domain::event::GpuDevice| DeviceView { index: device.index, uuid: device.uuid.clone() };
        Self {
            id: it.id.0,
            name: it.metadata.name.clone(),
            labels: it.metadata.labels.clone(),
            user_id: asked.owner.user_id.0,
            org_id: asked.owner.org_id.map(|id| id.0),
            project_id: asked.owner.project_id.map(|id| id.0),
            node_id: node_id.or(asked.node_id).map(|id| id.0),
            sku: asked.sku,
            region_code: placed.map(|placed| placed.region_code.clone()).or(asked.region_code),
            gpu_count: asked.gpu_count,
            devices: placed.into_iter().flat_map(|placed| &placed.devices).map(device).collect(),
            further_devices: node.map(further_devices).unwrap_or_default(),
            state: StateName::of(it),
            state_reason: it.history.last().map(|entry| entry.reason.as_str().to_owned()).unwrap_or_default(),
            failure: it.failure.as_ref().map(|failure| FailureView {
                phase: failure.phase.to_string(),
                code: failure.code.to_string(),
                message: failure.message.clone(),
                retryable: failure.retryable,
            }),
            status_history: it
                .history
                .iter()
                .map(|entry| StatusView {
                    state: entry.state.to_string(),
                    at: entry.at,
                    reason: entry.reason.as_str().to_owned(),
                })
                .collect(),
            attempt: it.attempt(),
            isolation_model: asked.isolation_model,
            price: PriceView::from(&asked.price),
            billed_until: cost.and_then(|cost| cost.billed_until),
            cost_to_date_minor: cost.map_or(0, |cost| cost.cost.minor()),
            ssh: SshView::of(it),
            health: HealthView::of(it, node, now),
            overdue: deadline.as_ref().is_some_and(|deadline| deadline.at < now),
            deadline_at: deadline.map(|deadline| deadline.at),
            requested_at: it.requested_at,
            active_at: it.active_at,
            release_requested_at: it.release_requested_at,
            released_at: match it.phase {
                Phase::Released { at, .. } => Some(at),
                Phase::Requested { .. }
                | Phase::Provisioning { .. }
                | Phase::Active { .. }
                | Phase::Releasing { .. }
                | Phase::ReleaseFailed { .. } => None,
            },
            generation: version,
        }
    }
}

fn further_devices(node: &Node) -> Vec<String> {
    node.machine.inventory.as_ref().map(|inventory| inventory.tenant_devices.clone()).unwrap_or_default()
}

impl StateName {
    const fn of(it: &Allocation) -> Self {
        match it.phase {
            Phase::Requested { .. } => Self::Requested,
            Phase::Provisioning { .. } => Self::Provisioning,
            Phase::Active { .. } => Self::Active,
            Phase::Releasing { .. } => Self::Releasing,
            Phase::ReleaseFailed { .. } => Self::ReleaseFailed,
            Phase::Released { .. } => Self::Released,
        }
    }

    /// The name of the state in the state machine.
    pub(super) const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl SshView {
    fn of(it: &Allocation) -> Option<Self> {
        match &it.phase {
            Phase::Provisioning { placed, .. } | Phase::Active { placed, .. } => Some(Self {
                host: placed.host.clone(),
                port: placed.port,
                username: placed.user_name.clone(),
                host_key_fingerprint: placed.host_fingerprint.clone(),
                key_fingerprints: it.ssh_access().keys.into_iter().map(|key| key.fingerprint).collect(),
                keys_written: matches!(it.phase, Phase::Active { .. }) && !it.ssh_access().are_pending(),
            }),
            Phase::Requested { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => None,
        }
    }
}

impl HealthView {
    fn of(it: &Allocation, node: Option<&Node>, now: Timestamp) -> Option<Self> {
        match &it.phase {
            Phase::ReleaseFailed { reason, .. } => Some(Self {
                status: "critical",
                message: format!("Cleaning up after it failed ({reason}); it is not in use any more."),
                release_at: None,
            }),
            Phase::Active { placed, .. } => {
                let fault = it.fault.as_ref().map(|fault| {
                    format!("Its machine has had a fault since {}; it costs nothing since. Release it.", fault.at)
                });
                let status = if fault.is_some() { "critical" } else { "warning" };
                let silent_since = node.and_then(|node| node.agent.silent_since(now));
                let silence = silent_since.map(|at| {
                    let charged = if fault.is_some() { "" } else { " It is charged until you release it." };
                    format!(
                        "Its machine is offline: the service has not been in contact with it since {}. Its programs may still run; \
                         terminals and logins wait until it is back.{charged}",
                        at.format("%Y-%m-%d %H:%M:%S UTC")
                    )
                });
                let drain = node.filter(|node| matches!(node.lifecycle.phase, node::Phase::Draining { .. })).map(|_| {
                    "Its machine is taken out of service after its last allocation. This one runs until you release it; the next one is \
                     on another machine."
                        .to_owned()
                });
                let alerts =
                    node.map(|node| node.tenant_messages(&placed.devices, it.requested_at)).unwrap_or_default();
                let release_at =
                    node.and_then(|node| node.evacuation_of(it.id)).map(|evacuation| evacuation.release_at);
                let leave = release_at.map(|at| format!("It is released at {at}."));
                let messages: Vec<String> =
                    fault.into_iter().chain(silence).chain(drain).chain(alerts).chain(leave).collect();
                (!messages.is_empty()).then(|| Self { status, message: messages.join(" "), release_at })
            }
            Phase::Requested { .. } | Phase::Provisioning { .. } | Phase::Releasing { .. } | Phase::Released { .. } => {
                None
            }
        }
    }
}
