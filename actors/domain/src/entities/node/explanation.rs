//! The code and the remedy of a node's rejections.

use super::{CommandName, PhaseName, Rejection};
use crate::explanation::{Explanation, RejectionCode};
use crate::{metadata, state_machine};

/// The GPUs that a message names.
const MAX_LISTED: usize = 16;

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotFound => Explanation::not_found("node"),
            Self::Exists => Explanation::conflict("The node exists already."),
            Self::WrongState { state, command } => {
                let (done, way) = node_command(state, command);
                Explanation::invalid_request(format!("A node that is {state} cannot be {done}; {way}"))
                    .detail("state", state.into_str())
            }
            Self::InUse { allocation_id } => Explanation::new(
                RejectionCode::NodeInUse,
                format!(
                    "Allocation {allocation_id} is on the node; release it first, or retire with \
                 \"drain\": true."
                ),
            )
            .detail("allocation_id", allocation_id.to_string()),
            Self::GpusDiffer { given, promised } => Explanation::invalid(
                format!(
                    "`gpus_total` is {given}, but a node of this SKU has {promised} GPUs; correct it or \
                 choose another SKU."
                ),
                "gpus_total",
            ),
            Self::RegionNotAllowed { region_code } => Explanation::invalid(
                format!(
                    "The SKU is not offered in region {region_code}; add the region to the SKU or choose \
                 another."
                ),
                "region_code",
            ),
            Self::VersionDiffers => Explanation::conflict(
                "The node has changed since the version in If-Match; read it again and repeat your \
                 change on it.",
            )
            .detail("field", "If-Match"),
            Self::TooManyLabels { max } => metadata::too_many_labels("node", max),
            Self::NotInOrder { why } => Explanation::conflict(format!(
                "The node is not in order: {}. Repair it, wait for its next heartbeat and ask \
                 again.",
                why.trim_end_matches('.')
            )),
            Self::NotProvided => Explanation::conflict(
                "The node has no machine at a bare-metal provider that could reinstall it; only a node of onboarding_mode maas has.",
            ),
            Self::MachineTaken { node_id } => Explanation::conflict(format!(
                "The machine belongs to node {node_id}; retire and remove that node first."
            ))
            .detail("node_id", node_id.to_string()),
            Self::FindingUnknown => Explanation::not_found("finding"),
            Self::GpuUnknown { gpu_uuid, reported } => Explanation::new(
                RejectionCode::NotFound,
                format!("The node has no GPU {gpu_uuid}; its agent reports {}.", listed(&reported)),
            ),
            Self::GpuNotReset { gpu_uuid, why } => {
                Explanation::conflict(format!("GPU {gpu_uuid} is not reset: {why}.")).detail("gpu_uuid", gpu_uuid)
            }
            Self::NotOrdered { task_type } => Explanation::invalid(
                format!("`type` {task_type} cannot be ordered; such tasks follow from requests for allocations."),
                "type",
            ),
            Self::TooManyTasks { limit } => Explanation::conflict(format!(
                "The node has {limit} tasks without a result, which is the most; wait for it, or resume the tasks that wait for \
                 an operator."
            ))
            .detail("limit", limit),
            Self::UpdateInProgress { task_id } => Explanation::conflict(format!(
                "Task {task_id} updates the node's agent; wait for its result, or resume it where it waits for an operator."
            ))
            .detail("task_id", task_id.to_string()),
            Self::TaskDoesNotWait { why } => {
                Explanation::conflict(format!("The task does not wait for an operator: {why}."))
            }
            Self::TaskUnknown => Explanation::not_found("task of this node"),
            rejection @ (Self::TokenRefused { .. }
            | Self::CertificateUnknown
            | Self::CertificateExpired
            | Self::Removed
            | Self::Fenced { .. }
            | Self::ForeignNode { .. }
            | Self::StaleAttempt { .. }
            | Self::NotSchedulable { .. }
            | Self::NotEnoughGpus { .. }) => Explanation::unexpected(&rejection),
        }
    }
}

/// The GPUs of a node, as many as fit into a sentence.
fn listed(uuids: &[String]) -> String {
    match uuids {
        [] => "none".to_owned(),
        few if few.len() <= MAX_LISTED => few.join(", "),
        many => format!("{} and {} more", many[..MAX_LISTED].join(", "), many.len() - MAX_LISTED),
    }
}

/// The refused operation on a node, and what has to be done first.
fn node_command(state: PhaseName, command: CommandName) -> (&'static str, &'static str) {
    match command {
        CommandName::Remove => ("removed", "retire it first."),
        CommandName::Retire => ("retired", "it is gone. Register the machine as a new node."),
        CommandName::Reactivate => ("reactivated", "only a retired node can be."),
        CommandName::ReleaseQuarantine => ("released from quarantine", "only a quarantined node can be."),
        CommandName::IssueToken => (
            "given a first enrollment token",
            "that is for nodes that have not been active. Its identity comes back by \
                 reissue-enrollment.",
        ),
        CommandName::Reissue if state == PhaseName::Draining => {
            ("given a new token", "wait until its last allocation ends and it is retired, or quarantine it.")
        }
        CommandName::OrderTask | CommandName::UpdateAgent | CommandName::Validate | CommandName::ResetGpu
            if !matches!(state, PhaseName::Removing | PhaseName::Removed) =>
        {
            ("given a task", "its agent has not enrolled yet.")
        }
        CommandName::Quarantine => ("quarantined", "it is gone."),
        CommandName::Reimage if state == PhaseName::Draining => ("reinstalled", "wait until its last allocation ends."),
        CommandName::Reimage => ("reinstalled", "it is gone."),
        CommandName::Register
        | CommandName::Revise
        | CommandName::Reissue
        | CommandName::OrderTask
        | CommandName::ResumeTask
        | CommandName::Validate
        | CommandName::UpdateAgent
        | CommandName::ResetGpu
        | CommandName::ClearFinding
        | CommandName::Enroll
        | CommandName::Recover
        | CommandName::Renew
        | CommandName::Poll
        | CommandName::Heartbeat
        | CommandName::Report
        | CommandName::Identify
        | CommandName::PresentToken => ("changed", "it is gone. Register the machine as a new node."),
    }
}
