//! Findings that the machine was altered: they quarantine the node until they are over, or an administrator has accepted them (decision 0057).

use super::{Health, NodeFinding};
use crate::finding::{FindingClass, PRIVILEGE_PROBE};
use serde::{Deserialize, Serialize};

/// The most findings that a hold names.
const NAMED: usize = 8;

/// An occurrence of a finding that an administrator has accepted by clearing it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingAcceptance {
    pub probe: String,
    pub code: String,
    pub boot_id: String,
    pub count: u64,
}

impl Health {
    /// The open findings that quarantine it, in a sentence for an operator.
    pub(in crate::entities::node) fn integrity_fault(&self) -> Option<String> {
        let open: Vec<_> = self.findings.iter().filter(|known| known.has(FindingClass::Quarantine)).collect();
        let describe = |known: &&NodeFinding| {
            let reported = &known.reported;
            format!("{}/{}, {}: {}", reported.probe, reported.code, known.rule().meaning, reported.detail)
        };
        let named: Vec<String> = open.iter().take(NAMED).map(describe).collect();
        let advice = "Correct the machine, or clear the findings to accept it as it is.";
        (!named.is_empty()).then(|| format!("The machine was altered. {}. {advice}", named.join("; ")))
    }

    /// What the agent is to compare with from here on. The agent reports a finding until it has learned that.
    pub(in crate::entities::node) fn accepted_findings(&self) -> Vec<FindingAcceptance> {
        let is_accepted = |known: &&NodeFinding| {
            let is_cleared = known.cleared.as_ref().is_some_and(|cleared| cleared.reason.is_some());
            known.is_reported && is_cleared && known.reported.probe == PRIVILEGE_PROBE
        };
        let accepted = |known: &NodeFinding| FindingAcceptance {
            probe: known.reported.probe.clone(),
            code: known.reported.code.clone(),
            boot_id: known.reported.boot_id.clone(),
            count: known.reported.count,
        };
        self.findings.iter().filter(is_accepted).map(accepted).collect()
    }
}
