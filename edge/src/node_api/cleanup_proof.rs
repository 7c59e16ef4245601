//! Whether a result proves its claim: a release has succeeded only with a report, signed by the node's own key, that every resource was
//! checked and nothing is left (decisions 4, *Clean-up proof*).

use super::inventory::truncated;
use domain::node::{Hold, HoldPhase, Node, ProofGap, TaskOutcome};
use domain::reason_code;
use domain::{AllocationId, NodeId, TaskId};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use thiserror::Error;
use wire::PublicKey;
use wire::SignedEnvelope;
use wire::cleanup_proof::{CleanupFinding, CleanupReport, FindingOutcome, ProofError};
use wire::inventory::ExecutorKind;
use wire::task::{TaskResult, TaskStatus};

/// Bounds of a failure's stored code and message; they go into the node's history and into events.
const MAX_CODE: usize = 64;
const MAX_MESSAGE: usize = 500;

/// The outcome of a result for the node's state machine, with the GPUs that its proof leaves out. `node` is needed where the result carries
/// a proof.
pub(super) fn verdict(
    result: &TaskResult,
    node_id: NodeId,
    task_id: TaskId,
    node: Option<&Node>,
) -> (TaskOutcome, Option<Box<ProofGap>>) {
    let outcome = match (result.status, &result.proof) {
        (TaskStatus::Failed, _) => match &result.error {
            Some(error) => {
                TaskOutcome::Failed { code: code_of(&error.code), message: truncated(&error.message, MAX_MESSAGE) }
            }
            None => TaskOutcome::Failed { code: "failed".into(), message: "The agent gave no reason.".into() },
        },
        (TaskStatus::Succeeded, None) => TaskOutcome::Succeeded { proof: None },
        // A setup proves nothing, whatever the result carries.
        (TaskStatus::Succeeded, Some(_)) if node.is_some_and(|node| is_setup(node, task_id)) => {
            TaskOutcome::Succeeded { proof: None }
        }
        (TaskStatus::Succeeded, Some(proof)) => match check(proof, result.attempt, node_id, task_id, node) {
            Ok(proved) => {
                return (
                    TaskOutcome::Succeeded { proof: Some(AllocationId(proved.allocation_id)) },
                    proof_gap(&proved),
                );
            }
            Err(fault) => TaskOutcome::Failed {
                code: fault.code().to_owned(),
                message: truncated(&fault.to_string(), MAX_MESSAGE),
            },
        },
    };
    (outcome, None)
}

fn proof_gap(report: &CleanupReport) -> Option<Box<ProofGap>> {
    let why = |finding: &CleanupFinding| {
        let why = finding.detail.as_deref().unwrap_or("the driver gave no answer");
        truncated(why, MAX_MESSAGE)
    };
    let gpus: BTreeMap<_, _> = report.unproved_gpus().map(|(uuid, finding)| (uuid.to_owned(), why(finding))).collect();
    (!gpus.is_empty()).then(|| Box::new(ProofGap { checked_at: report.checked_at, gpus }))
}

/// What is wrong with a proof, in terms for the operator.
#[derive(Debug, Error)]
enum ProofFault {
    #[error("the node has no recovery key to verify the clean-up report with")]
    NoKey,
    #[error("{0}")]
    Unreadable(#[from] ProofError),
    #[error("the clean-up report is of another {0}")]
    Foreign(&'static str),
    #[error("two agents use this node's identity at the same time: the report may be of the other machine")]
    SharedIdentity,
    #[error("the clean-up report leaves out: {0}")]
    Incomplete(String),
    #[error("the clean-up left: {0}")]
    Leftovers(String),
}

impl ProofFault {
    const fn code(&self) -> &'static str {
        match self {
            Self::NoKey | Self::Unreadable(_) | Self::Foreign(_) | Self::SharedIdentity | Self::Incomplete(_) => {
                "proof_invalid"
            }
            Self::Leftovers(_) => "leftovers",
        }
    }
}

/// The report that proves the clean-up of its allocation.
fn check(
    proof: &SignedEnvelope,
    attempt: u32,
    node_id: NodeId,
    task_id: TaskId,
    node: Option<&Node>,
) -> Result<CleanupReport, ProofFault> {
    let key: Option<PublicKey> =
        node.and_then(|node| node.identity.recovery_public_key.as_ref()).and_then(|key| key.parse().ok());
    let report = CleanupReport::open(proof, &key.ok_or(ProofFault::NoKey)?)?;
    let booted = node.and_then(|node| node.agent.contact.as_ref()).map(|seen| seen.boot_id.as_str());
    let held = node.and_then(|node| hold_of(node, task_id)).map(|(allocation_id, _)| allocation_id);
    let allocation_id = AllocationId(report.allocation_id);
    if node.is_some_and(|node| node.identity.sessions.run_beside_each_other()) {
        return Err(ProofFault::SharedIdentity);
    }
    if report.node_id != node_id.0 {
        return Err(ProofFault::Foreign("node"));
    }
    if report.task_id != task_id.0 {
        return Err(ProofFault::Foreign("task"));
    }
    if report.attempt != attempt {
        return Err(ProofFault::Foreign("attempt"));
    }
    // Where the node has no such task, the state machine rejects the result.
    if held.is_some_and(|held| held != allocation_id) {
        return Err(ProofFault::Foreign("allocation"));
    }
    if booted != Some(report.boot_id.to_string().as_str()) {
        return Err(ProofFault::Foreign("boot than the one of the agent's last contact"));
    }
    if report.leftovers().next().is_some() {
        return Err(ProofFault::Leftovers(leftovers(&report)));
    }
    let executor = node.map_or(ExecutorKind::Sandbox, executor_of);
    let missing: Vec<_> = report.missing_checks(executor).map(|what| format!("{what:?}")).collect();
    if !missing.is_empty() {
        return Err(ProofFault::Incomplete(missing.join(", ")));
    }
    Ok(report)
}

/// How the node isolates tenants, by its last report.
fn executor_of(node: &Node) -> ExecutorKind {
    let system = node.machine.inventory.as_ref().is_some_and(|inventory| inventory.executor == "system");
    if system { ExecutorKind::System } else { ExecutorKind::Sandbox }
}

fn leftovers(report: &CleanupReport) -> String {
    const MAX_FINDINGS: usize = 5;
    let mut words = String::new();
    for finding in report.leftovers().take(MAX_FINDINGS) {
        let outcome = match finding.outcome {
            FindingOutcome::Present => "is present",
            FindingOutcome::Unknown => "could not be looked at",
            FindingOutcome::Gone => "is gone",
        };
        let separator = if words.is_empty() { "" } else { "; " };
        let _ = write!(words, "{separator}{:?} {} {outcome}", finding.what, truncated(&finding.looked_for, 80));
    }
    let more = report.leftovers().count().saturating_sub(MAX_FINDINGS);
    if more > 0 {
        let _ = write!(words, "; and {more} more");
    }
    words
}

fn is_setup(node: &Node, task_id: TaskId) -> bool {
    hold_of(node, task_id).is_some_and(|(_, hold)| matches!(hold.phase, HoldPhase::Provisioning { .. }))
}

/// The hold that a task is about.
fn hold_of(node: &Node, task_id: TaskId) -> Option<(AllocationId, &Hold)> {
    node.tenancy.holds.iter().find_map(|(id, hold)| match &hold.phase {
        HoldPhase::Provisioning { work }
        | HoldPhase::Releasing { work }
        | HoldPhase::ReleaseFailed { work }
        | HoldPhase::Abandoned { work } => (work.task_id == task_id).then_some((*id, hold)),
        HoldPhase::Reserved | HoldPhase::Ready | HoldPhase::SetupFailed { .. } => None,
    })
}

/// A code in the form that events and metrics accept.
fn code_of(given: &str) -> String {
    let acceptable = given.len() <= MAX_CODE && reason_code::is_snake_case(given);
    if acceptable { given.to_owned() } else { "failed".to_owned() }
}

#[cfg(test)]
mod tests;
