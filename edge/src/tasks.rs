//! Work of the node machine, as the agent receives it: a task, signed over the exact bytes that travel (decisions 4, *Tasks*).

use crate::services::Trust;
use chrono::TimeDelta;
use domain::node::{Order, What};
use domain::{NodeId, Timestamp};
use wire::inventory::Device;
use wire::task::{Envelope, OpenTerminal, Provision, Release, Task, TaskPayload, sign};

/// How long a signed task may be begun, at most: long enough for a clock that is a little off and an agent that is busy, short
/// enough that a copy of it is soon worthless. The order itself is offered, newly signed, for as long as it stands.
const BEGUN_WITHIN: TimeDelta = TimeDelta::minutes(10);

/// False where the order's own deadline has passed: its allocation gives the attempt up, and nobody may begin it.
#[must_use]
pub fn is_in_time(order: &Order, now: Timestamp) -> bool {
    now < order.work.deadline_at
}

/// The task that an order is, for the agent of `node_id`. It expires with the order, and after ten minutes at the latest.
#[must_use]
pub fn payload(node_id: NodeId, order: &Order, now: Timestamp) -> TaskPayload {
    TaskPayload {
        node_id: node_id.0,
        task_id: order.work.task_id.0,
        attempt: order.work.attempt,
        issued_at: now,
        expires_at: order.work.deadline_at.min(now + BEGUN_WITHIN),
        origin: order.work.origin.clone().map(|origin| wire::task::Origin {
            correlation_id: origin.correlation_id,
            traceparent: origin.traceparent,
            tracestate: origin.tracestate,
        }),
        task: task(order),
    }
}

/// Signs an order with the control plane's task key.
///
/// # Errors
/// The payload does not serialise, which no order does.
pub fn signed(trust: &Trust, node_id: NodeId, order: &Order, now: Timestamp) -> Result<Envelope, serde_json::Error> {
    sign(&trust.task_signer, &trust.task_key_id, &payload(node_id, order, now))
}

fn task(order: &Order) -> Task {
    let allocation_id = order.allocation_id.0;
    let user_name = order.placed.user_name.clone();
    let devices: Vec<_> =
        order.placed.devices.iter().map(|device| Device { index: device.index, uuid: device.uuid.clone() }).collect();
    match &order.what {
        What::Provision { keys } => Task::Provision(Provision {
            allocation_id,
            user_name,
            authorized_keys: keys.iter().map(|key| key.public_key.clone()).collect(),
            devices,
            sku: order.sku.clone(),
            deadline_at: order.work.deadline_at,
        }),
        What::Release => Task::Release(Release { allocation_id, user_name, devices }),
        What::OpenTerminal { session_id, ends_at } => {
            Task::OpenTerminal(OpenTerminal { session_id: session_id.0, allocation_id, user_name, ends_at: *ends_at })
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use domain::allocation::{AuthorizedKey, Placed};
    use domain::node::Work;
    use domain::{AllocationId, Origin, SshKeyId, TaskId};
    use uuid::Uuid;

    fn order(deadline_at: Timestamp, what: What) -> Order {
        Order {
            work: Work {
                task_id: TaskId(Uuid::from_u128(3)),
                attempt: 2,
                ordered_at: Timestamp::UNIX_EPOCH,
                deadline_at,
                origin: Some(Origin {
                    correlation_id: "c-1".into(),
                    traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
                    tracestate: None,
                }),
            },
            allocation_id: AllocationId(Uuid::from_u128(2)),
            placed: Placed {
                devices: vec![domain::event::Device { index: 1, uuid: "GPU-1".into() }],
                host: "10.0.0.1".into(),
                port: 22,
                user_name: "gpu-2".into(),
                region_code: "eu-1".into(),
            },
            sku: "h100".into(),
            what,
        }
    }

    #[test]
    fn a_task_expires_with_its_order_and_after_ten_minutes_at_the_latest() {
        let now = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
        let soon = now + TimeDelta::seconds(30);
        let node = NodeId(Uuid::from_u128(1));
        assert_eq!(payload(node, &order(soon, What::Release), now).expires_at, soon);
        let endless = payload(node, &order(Timestamp::MAX_UTC, What::Release), now);
        assert_eq!(endless.expires_at, now + TimeDelta::minutes(10));
        assert!(is_in_time(&order(soon, What::Release), now));
        assert!(!is_in_time(&order(now, What::Release), now));
    }

    #[test]
    fn a_task_says_everything_that_the_agent_acts_on() {
        let now = Timestamp::UNIX_EPOCH;
        let until = now + TimeDelta::minutes(1);
        let key = AuthorizedKey {
            id: SshKeyId(Uuid::nil()),
            public_key: "ssh-ed25519 AAAA".into(),
            fingerprint: "SHA256:x".into(),
        };
        let provision = payload(NodeId(Uuid::from_u128(1)), &order(until, What::Provision { keys: vec![key] }), now);
        assert_eq!(
            (provision.node_id, provision.task_id, provision.attempt),
            (Uuid::from_u128(1), Uuid::from_u128(3), 2)
        );
        let origin = provision.origin.as_ref().unwrap();
        assert_eq!((origin.correlation_id.as_str(), origin.traceparent.is_some()), ("c-1", true));
        let devices = vec![Device { index: 1, uuid: "GPU-1".into() }];
        let expected = Provision {
            allocation_id: Uuid::from_u128(2),
            user_name: "gpu-2".into(),
            authorized_keys: vec!["ssh-ed25519 AAAA".into()],
            devices: devices.clone(),
            sku: "h100".into(),
            deadline_at: until,
        };
        assert_eq!(provision.task, Task::Provision(expected));
        let release = payload(NodeId(Uuid::from_u128(1)), &order(until, What::Release), now);
        let expected = Release { allocation_id: Uuid::from_u128(2), user_name: "gpu-2".into(), devices };
        assert_eq!(release.task, Task::Release(expected));
        let session_id = domain::TerminalSessionId(Uuid::from_u128(9));
        let ends_at = now + TimeDelta::hours(4);
        let open = payload(NodeId(Uuid::from_u128(1)), &order(until, What::OpenTerminal { session_id, ends_at }), now);
        let expected = OpenTerminal {
            session_id: session_id.0,
            allocation_id: Uuid::from_u128(2),
            user_name: "gpu-2".into(),
            ends_at,
        };
        assert_eq!((open.task, open.expires_at), (Task::OpenTerminal(expected), until));
    }
}
