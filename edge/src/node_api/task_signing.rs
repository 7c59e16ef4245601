//! Work of the node machine, as the agent receives it: a task, signed over the exact bytes that travel (decisions 4, *Tasks*).

use crate::trust::current_keys::CurrentKeys;
use chrono::TimeDelta;
use domain::TaskType;
use domain::node::{AgentTask, TaskKind, TenantSlot, ValidationOrder};
use domain::validation::ValidationLevel;
use domain::{NodeId, Timestamp};
use wire::inventory::DeviceRef;
use wire::task::{
    OpenTerminal, Provision, Reboot, ReconcileSshKeys, Release, ResetGpu, SignedEnvelope, Task, TaskPayload,
    UpdateAgent,
};
use wire::validation::{LoadLevel, ValidationLoad};

/// The longest validity of a signed task: long enough for a clock that is slightly off and a busy agent, short enough that a copy of it
/// soon expires. The task is offered, newly signed, for as long as it is pending.
const START_DEADLINE: TimeDelta = TimeDelta::minutes(10);

/// False where the task's own deadline has passed: its allocation gives up the attempt, and no agent may begin it.
#[must_use]
pub(crate) fn is_in_time(order: &AgentTask, now: Timestamp) -> bool {
    now < order.work.deadline_at
}

/// The signed task for the agent of `node_id`. It expires with the order's deadline, and after ten minutes at the latest. `None`: agents
/// have no such task, and no state machine orders one.
#[must_use]
pub(crate) fn payload(node_id: NodeId, order: &AgentTask, now: Timestamp) -> Option<TaskPayload> {
    Some(TaskPayload {
        node_id: node_id.0,
        task_id: order.work.task_id.0,
        attempt: order.work.attempt,
        issued_at: now,
        expires_at: order.work.deadline_at.min(now + START_DEADLINE),
        origin: order.work.origin.clone().map(|origin| wire::task::TaskOrigin {
            correlation_id: origin.correlation_id,
            traceparent: origin.traceparent,
            tracestate: origin.tracestate,
        }),
        task: task(order)?,
    })
}

/// Signs an order with the control plane's task keys.
///
/// # Errors
/// The order is of a type that agents do not have, which no machine orders.
pub(crate) fn signed(
    keys: &CurrentKeys,
    node_id: NodeId,
    order: &AgentTask,
    now: Timestamp,
) -> Result<SignedEnvelope, TaskEncodingError> {
    let payload = payload(node_id, order, now).ok_or(TaskEncodingError::NoSuchType)?;
    keys.load().task.sign(&payload).map_err(TaskEncodingError::Unwritable)
}

/// Why a task cannot be dispatched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TaskEncodingError {
    #[error("agents have no task of this type")]
    NoSuchType,
    #[error("the task cannot be written")]
    Unwritable(#[source] serde_json::Error),
}

fn task(order: &AgentTask) -> Option<Task> {
    Some(match &order.what {
        TaskKind::Provision { place, keys } => Task::Provision(Provision {
            allocation_id: place.allocation_id.0,
            user_name: place.placed.user_name.clone(),
            authorized_keys: keys.iter().map(|key| key.public_key.clone()).collect(),
            devices: devices(place),
            sku: place.sku.clone(),
            deadline_at: order.work.deadline_at,
        }),
        TaskKind::Release { place } => Task::Release(Release {
            allocation_id: place.allocation_id.0,
            user_name: place.placed.user_name.clone(),
            devices: devices(place),
        }),
        TaskKind::ReconcileLogins { place, keys } => Task::ReconcileSshKeys(ReconcileSshKeys {
            allocation_id: place.allocation_id.0,
            user_name: place.placed.user_name.clone(),
            authorized_keys: keys.iter().map(|key| key.public_key.clone()).collect(),
        }),
        TaskKind::OpenTerminal { place, session_id, ends_at, recording } => Task::OpenTerminal(OpenTerminal {
            session_id: session_id.0,
            allocation_id: place.allocation_id.0,
            user_name: place.placed.user_name.clone(),
            ends_at: *ends_at,
            recording: crate::terminal::recording::on_the_wire(*recording),
        }),
        TaskKind::OfNode { task_type: TaskType::NodeValidate, validation, gpu_uuid, .. } => {
            Task::Validate { load: validation.as_ref().map(|order| load(order, gpu_uuid.clone())) }
        }
        TaskKind::OfNode { task_type: TaskType::DiagnosticsCollect, .. } => Task::Diagnose {},
        TaskKind::OfNode { task_type: TaskType::AgentUpdate, update, .. } => {
            let update = update.as_ref()?;
            Task::UpdateAgent(UpdateAgent {
                digest: update.digest.as_str().parse().ok()?,
                force: update.force,
                commit_seconds: update.commit_seconds,
            })
        }
        TaskKind::OfNode { task_type: TaskType::NodeGpuReset, gpu_uuid, .. } => {
            Task::ResetGpu(ResetGpu { gpu_uuid: gpu_uuid.clone()? })
        }
        TaskKind::OfNode { task_type: TaskType::NodeReboot, boot_id, .. } => {
            Task::Reboot(Reboot { boot_id: boot_id.as_ref()?.parse().ok()? })
        }
        TaskKind::OfNode {
            task_type:
                TaskType::AllocationProvision
                | TaskType::AllocationRelease
                | TaskType::SshKeysReconcile
                | TaskType::TerminalOpen,
            ..
        } => return None,
    })
}

fn load(order: &ValidationOrder, gpu_uuid: Option<String>) -> ValidationLoad {
    let level = match order.level {
        ValidationLevel::Quick => LoadLevel::Quick,
        ValidationLevel::Deep => LoadLevel::Deep,
    };
    ValidationLoad { level, load_seconds: order.load_seconds, gpu_uuid }
}

fn devices(place: &TenantSlot) -> Vec<DeviceRef> {
    place.placed.devices.iter().map(|device| DeviceRef { index: device.index, uuid: device.uuid.clone() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::allocation::{AuthorizedKey, Placement};
    use domain::node::PendingTask;
    use domain::recording::{RecordingMode, RecordingTerms};
    use domain::task_type::StaleTaskAction;
    use domain::{AllocationId, RequestOrigin, SshKeyId, TaskId};
    use uuid::Uuid;

    fn order(deadline_at: Timestamp, what: TaskKind) -> AgentTask {
        AgentTask {
            work: PendingTask {
                task_id: TaskId(Uuid::from_u128(3)),
                attempt: 2,
                ordered_at: Timestamp::UNIX_EPOCH,
                deadline_at,
                origin: Some(RequestOrigin {
                    correlation_id: "c-1".into(),
                    traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
                    tracestate: None,
                }),
            },
            what,
        }
    }

    fn place() -> TenantSlot {
        TenantSlot {
            allocation_id: AllocationId(Uuid::from_u128(2)),
            placed: Placement {
                devices: vec![domain::event::GpuDevice { index: 1, uuid: "GPU-1".into() }],
                host: "10.0.0.1".into(),
                port: 22,
                user_name: "gpu-2".into(),
                region_code: "eu-1".into(),
                host_fingerprint: None,
            },
            sku: "h100".into(),
        }
    }

    fn release() -> TaskKind {
        TaskKind::Release { place: place() }
    }

    fn payload(node_id: NodeId, order: &AgentTask, now: Timestamp) -> TaskPayload {
        super::payload(node_id, order, now).unwrap()
    }

    #[test]
    fn task_expires_with_its_deadline_and_after_ten_minutes_at_the_latest() {
        let now = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
        let soon = now + TimeDelta::seconds(30);
        let node = NodeId(Uuid::from_u128(1));
        assert_eq!(payload(node, &order(soon, release()), now).expires_at, soon);
        let endless = payload(node, &order(Timestamp::MAX_UTC, release()), now);
        assert_eq!(endless.expires_at, now + TimeDelta::minutes(10));
        assert!(is_in_time(&order(soon, release()), now));
        assert!(!is_in_time(&order(now, release()), now));
    }

    /// One table defines what happens to a stale task ([`TaskType`]); the agents' behaviour must agree with it.
    #[test]
    fn repeatable_tasks_are_those_that_agents_may_repeat() {
        let now = Timestamp::UNIX_EPOCH;
        let boot_id = Some(Uuid::from_u128(9).to_string());
        let session_id = domain::TerminalSessionId(Uuid::from_u128(9));
        let recording = RecordingTerms { mode: RecordingMode::Strict, most_bytes: 7 };
        let terminal = TaskKind::OpenTerminal { place: place(), session_id, ends_at: now, recording };
        let reconcile = TaskKind::ReconcileLogins { place: place(), keys: Vec::new() };
        let digest = format!("sha256:{}", "0f".repeat(32)).parse().unwrap();
        let update = Some(domain::node::AgentUpdate { digest, force: true, commit_seconds: 7, rollout_id: None });
        let of_node = |task_type, update, gpu_uuid| {
            let boot_id = boot_id.clone();
            TaskKind::OfNode { task_type, boot_id, update, validation: None, gpu_uuid }
        };
        let update = of_node(TaskType::AgentUpdate, update, None);
        let reset = of_node(TaskType::NodeGpuReset, None, Some("GPU-1".to_owned()));
        let provision = TaskKind::Provision { place: place(), keys: Vec::new() };
        let orders = [release(), provision, reconcile, terminal, update, reset]
            .into_iter()
            .chain(TaskType::ORDERED.map(|task_type| of_node(task_type, None, None)));
        for what in orders {
            let task = payload(NodeId(Uuid::nil()), &order(now, what), now).task;
            let task_type = TaskType::parse(task.kind()).unwrap();
            assert_eq!(task.is_idempotent(), task_type.when_stale() == StaleTaskAction::Requeue, "{task_type}");
        }
        for task_type in TaskType::ALL.iter().filter(|it| !TaskType::ORDERED.contains(it)) {
            let order = order(now, of_node(*task_type, None, None));
            assert!(super::payload(NodeId(Uuid::nil()), &order, now).is_none(), "{task_type}");
        }
    }

    #[test]
    fn task_contains_everything_that_the_agent_needs() {
        let now = Timestamp::UNIX_EPOCH;
        let until = now + TimeDelta::minutes(1);
        let key = AuthorizedKey {
            id: SshKeyId(Uuid::nil()),
            public_key: "ssh-ed25519 AAAA".into(),
            fingerprint: "SHA256:x".into(),
        };
        let provision = payload(
            NodeId(Uuid::from_u128(1)),
            &order(until, TaskKind::Provision { place: place(), keys: vec![key] }),
            now,
        );
        assert_eq!(
            (provision.node_id, provision.task_id, provision.attempt),
            (Uuid::from_u128(1), Uuid::from_u128(3), 2)
        );
        let origin = provision.origin.as_ref().unwrap();
        assert_eq!((origin.correlation_id.as_str(), origin.traceparent.is_some()), ("c-1", true));
        let devices = vec![DeviceRef { index: 1, uuid: "GPU-1".into() }];
        let expected = Provision {
            allocation_id: Uuid::from_u128(2),
            user_name: "gpu-2".into(),
            authorized_keys: vec!["ssh-ed25519 AAAA".into()],
            devices: devices.clone(),
            sku: "h100".into(),
            deadline_at: until,
        };
        assert_eq!(provision.task, Task::Provision(expected));
        let release = payload(NodeId(Uuid::from_u128(1)), &order(until, release()), now);
        let expected = Release { allocation_id: Uuid::from_u128(2), user_name: "gpu-2".into(), devices };
        assert_eq!(release.task, Task::Release(expected));
        let session_id = domain::TerminalSessionId(Uuid::from_u128(9));
        let ends_at = now + TimeDelta::hours(4);
        let recording = RecordingTerms { mode: RecordingMode::Strict, most_bytes: 7 };
        let open = payload(
            NodeId(Uuid::from_u128(1)),
            &order(until, TaskKind::OpenTerminal { place: place(), session_id, ends_at, recording }),
            now,
        );
        let expected = OpenTerminal {
            session_id: session_id.0,
            allocation_id: Uuid::from_u128(2),
            user_name: "gpu-2".into(),
            ends_at,
            recording: wire::recording::RecordTerms { mode: wire::recording::RecordMode::Strict, most_bytes: 7 },
        };
        assert_eq!((open.task, open.expires_at), (Task::OpenTerminal(expected), until));
    }
}
