//! Rejections of nodes, allocations, SKUs and terminal sessions.

use domain::policy::PolicyKey;
use domain::{allocation, node, sku, terminal_session};

use super::{Explain, conflict, invalid, limited_by, unexpected};
use crate::error::{ApiError, Code};

impl Explain for node::Rejection {
    fn explain(self) -> ApiError {
        use node::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("node"),
            R::Exists => conflict("The node exists already."),
            R::WrongState { state, command } => {
                let (done, way) = node_command(state, command);
                ApiError::invalid_request(format!("A node that is {state} cannot be {done}; {way}"))
                    .detail("state", state.into_str())
            }
            R::InUse { allocation_id } => ApiError::new(
                Code::NodeInUse,
                format!("Allocation {allocation_id} is on the node; release it first, or retire with \"drain\": true."),
            )
            .detail("allocation_id", allocation_id.to_string()),
            R::GpusDiffer { given, promised } => invalid(
                format!(
                    "`gpus_total` is {given}, but a node of this SKU has {promised} GPUs; correct it or choose another SKU."
                ),
                "gpus_total",
            ),
            R::RegionNotAllowed { region_code } => invalid(
                format!("The SKU is not offered in region {region_code}; add the region to the SKU or choose another."),
                "region_code",
            ),
            R::VersionDiffers => conflict(
                "The node has changed since the version in If-Match; read it again and repeat your change on it.",
            )
            .detail("field", "If-Match"),
            R::TooManyLabels { max } => too_many_labels("node", max),
            R::NotInOrder { why } => conflict(format!(
                "The node is not in order: {}. Repair it, wait for its next heartbeat and ask again.",
                why.trim_end_matches('.')
            )),
            R::NotOrdered { task_type } => invalid(
                format!("`type` {task_type} is not ordered by hand; it follows from what is done with allocations."),
                "type",
            ),
            R::TooManyTasks { limit } => conflict(format!(
                "The node has not reported on {limit} tasks, which is the most; wait for it, or resume what waits for you."
            ))
            .detail("limit", limit),
            R::TaskDoesNotWait { why } => conflict(format!("The task does not wait for an operator: {why}.")),
            R::TaskUnknown => ApiError::not_found("task of this node"),
            rejection @ (R::TokenRefused { .. }
            | R::CertificateUnknown
            | R::CertificateExpired
            | R::Removed
            | R::Fenced { .. }
            | R::ForeignNode { .. }
            | R::StaleAttempt { .. }
            | R::NotSchedulable { .. }
            | R::NotEnoughGpus { .. }) => unexpected(&rejection),
        }
    }
}

/// The refused operation on a node, and what has to be done first.
fn node_command(state: node::PhaseName, command: node::CommandName) -> (&'static str, &'static str) {
    use node::{CommandName, PhaseName};
    match command {
        CommandName::Remove => ("removed", "retire it first."),
        CommandName::Retire => ("retired", "it is gone. Register the machine as a new node."),
        CommandName::Reactivate => ("reactivated", "only a retired node can be."),
        CommandName::ReleaseQuarantine => ("released from quarantine", "only a quarantined node can be."),
        CommandName::IssueToken => (
            "given a first enrollment token",
            "that is for nodes that have not been active. Its identity comes back by reissue-enrollment.",
        ),
        CommandName::Reissue if state == PhaseName::Draining => {
            ("given a new token", "wait until its last allocation ends and it is retired, or quarantine it.")
        }
        CommandName::OrderTask if !matches!(state, PhaseName::Removing | PhaseName::Removed) => {
            ("given a task", "its agent has not enrolled yet.")
        }
        CommandName::Quarantine => ("quarantined", "it is gone."),
        _ => ("changed", "it is gone. Register the machine as a new node."),
    }
}

impl Explain for allocation::Rejection {
    fn explain(self) -> ApiError {
        use allocation::{CommandName, Rejection as R};
        match self {
            R::NotFound => ApiError::not_found("allocation"),
            R::Exists => conflict("The allocation exists already."),
            R::WrongState { state, command: CommandName::ChooseLogins } => conflict(format!(
                "Nobody logs in to an allocation that is {state}; its keys cannot be chosen any more."
            ))
            .detail("state", state.into_str()),
            R::WrongState { state, command: CommandName::Revise } => {
                conflict(format!("An allocation that is {state} keeps the name and the labels that it had at its end."))
                    .detail("state", state.into_str())
            }
            R::WrongState { state, command } => {
                let how = if command == CommandName::ForceRelease { "by force" } else { "by another try" };
                conflict(format!(
                    "An allocation that is {state} cannot be released {how}; this is a way out of release_failed alone."
                ))
                .detail("state", state.into_str())
            }
            R::GpuCount { max } => invalid(format!("`gpu_count` must be a whole number from 1 to {max}."), "gpu_count"),
            R::QueueSeconds { max } => limited_by(
                invalid(format!("`queue_seconds` must be a whole number from 0 to {max}."), "queue_seconds"),
                PolicyKey::AllocationQueueMax,
                max,
            ),
            R::KeyUnknown { id } => invalid(
                format!("{id} is not a key of the allocation's user; GET /api/v1/ssh-keys lists theirs."),
                "ssh_key_ids",
            ),
            R::KeysMoved => conflict("The user's keys change at this moment; ask again."),
            R::VersionDiffers => conflict(
                "The allocation has changed since the version in If-Match; read it again and repeat your change on it.",
            )
            .detail("field", "If-Match"),
            R::TooManyLabels { max } => too_many_labels("allocation", max),
        }
    }
}

fn too_many_labels(what: &str, max: usize) -> ApiError {
    invalid(format!("The {what} would have more than {max} labels; remove some in the same request."), "labels")
}

impl Explain for sku::Rejection {
    fn explain(self) -> ApiError {
        use sku::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("SKU"),
            R::Exists => conflict("The SKU exists already."),
            R::WrongStatus { status, command } => {
                let done = match command {
                    sku::StatusChange::Deprecate => "deprecated; only an active one can be",
                    sku::StatusChange::Deactivate => "deactivated; it was never active",
                    sku::StatusChange::Activate => "changed so",
                };
                conflict(format!("A SKU that is {status} cannot be {done}.")).detail("status", status.name())
            }
            R::RoleNotHeld { role: Some(role) } => ApiError::forbidden(format!(
                "You do not hold the platform role `{role}`; leave `role` out, or ask an administrator to bind it to you."
            ))
            .detail("field", "role"),
            R::RoleNotHeld { role: None } => ApiError::forbidden(
                "This needs the platform role `platform_operations` or `inventory_owner`; ask an administrator to bind it to you.",
            ),
            R::ReviewMissing { field } => invalid(
                format!("Nodes or allocations refer to the SKU: say in `{field}` what its end means for them."),
                field.into_str(),
            ),
            R::Moved => conflict("Others decide on the SKU at this moment; look at it and ask again."),
        }
    }
}

impl Explain for terminal_session::Rejection {
    fn explain(self) -> ApiError {
        use terminal_session::Rejection as R;
        match self {
            R::NotFound => ApiError::not_found("terminal session"),
            R::Exists => conflict("The terminal session exists already."),
            R::Closed { reason } => conflict("The terminal session is over; leave `session_id` out to open another.")
                .detail("reason", reason.into_str()),
            // No person shows a token here, and a session that is in use makes no room.
            rejection @ (R::TokenRefused { .. } | R::NotDetached) => unexpected(&rejection),
        }
    }
}
