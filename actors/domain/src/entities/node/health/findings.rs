//! What an agent finds wrong with its machine, as it reports it and as it is stored.

use crate::event::GpuDevice;
use crate::finding::{FindingCause, FindingClass, FindingRule, FindingScope, Judgement, Repair, RuleOverrides};
use crate::id::FindingId;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Timestamp, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// What an agent reports in one heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingReport {
    /// By the node's clock, as the times of the findings.
    pub sent_at: Timestamp,
    pub findings: Vec<ReportedFinding>,
    /// More were found than are reported.
    pub is_truncated: bool,
}

/// A finding as the agent reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedFinding {
    pub probe: String,
    /// `None`: the machine, or a GPU that the agent cannot name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_uuid: Option<String>,
    pub code: String,
    /// How often it occurred in this boot.
    pub count: u64,
    pub first_at: Timestamp,
    pub last_at: Timestamp,
    pub boot_id: String,
    pub detail: String,
}

/// A finding of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFinding {
    pub id: FindingId,
    pub reported: ReportedFinding,
    /// When the occurrence that opened it happened, by the control plane's clock.
    pub opened_at: Timestamp,
    /// True where the last heartbeat has it.
    pub is_reported: bool,
    /// Since when heartbeats have had it as it is: without an interruption, in one boot, and open. `None` where an earlier release has stored it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reported_since: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cleared: Option<ClearedFinding>,
    /// What an administrator's override says of it in place of its row, as of the last heartbeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overridden: Option<Box<Judgement>>,
}

/// Why a finding has no consequence any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearedFinding {
    pub at: Timestamp,
    /// The reason of the administrator who cleared it; `None` where it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl NodeFinding {
    /// The row of the table.
    #[must_use]
    pub fn rule(&self) -> &'static FindingRule {
        FindingRule::of(&self.reported.probe, &self.reported.code)
    }

    #[must_use]
    pub fn cause(&self) -> FindingCause {
        self.overridden.as_ref().map_or(self.rule().cause, |judgement| judgement.cause)
    }

    #[must_use]
    pub fn repair(&self) -> Repair {
        self.overridden.as_ref().map_or(self.rule().repair, |judgement| judgement.repair)
    }

    pub(super) fn tenant_message(&self) -> &str {
        self.overridden.as_ref().map_or(self.rule().tenant_message, |judgement| &judgement.tenant_message)
    }

    pub(super) fn all_classes(&self) -> Vec<FindingClass> {
        match &self.overridden {
            Some(judgement) => judgement.classes.iter().copied().collect(),
            None => self.rule().classes.to_vec(),
        }
    }

    /// Takes over what the overrides in force say of it.
    pub(super) fn judge(&mut self, overrides: &RuleOverrides) {
        let judgement = overrides.judgement_of(&self.reported.probe, &self.reported.code);
        if self.overridden.as_deref() != judgement {
            self.overridden = judgement.cloned().map(Box::new);
        }
    }

    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.cleared.is_none()
    }

    /// The classes that apply. A GPU that the agent cannot name is withheld with all of its node, and costs its tenant as before.
    #[must_use]
    pub fn classes(&self) -> Vec<FindingClass> {
        let classes = self.all_classes().into_iter();
        if self.is_unattributed() {
            classes.filter(|class| matches!(class, FindingClass::PreventAllocation | FindingClass::Warn)).collect()
        } else {
            classes.collect()
        }
    }

    pub(in crate::entities::node) fn has(&self, class: FindingClass) -> bool {
        self.is_open() && self.classes().contains(&class)
    }

    pub(in crate::entities::node) fn prevents_allocation(&self) -> bool {
        self.has(FindingClass::PreventAllocation)
    }

    pub(super) fn is_unattributed(&self) -> bool {
        self.rule().scope == FindingScope::Gpu && self.reported.gpu_uuid.is_none()
    }

    /// True where it concerns every GPU of the node.
    pub(super) fn is_of_machine(&self) -> bool {
        self.reported.gpu_uuid.is_none()
    }

    pub(super) fn concerns(&self, gpus: &[GpuDevice]) -> bool {
        let uuid = self.reported.gpu_uuid.as_deref();
        uuid.is_none_or(|uuid| gpus.iter().any(|gpu| gpu.uuid == uuid))
    }

    pub(super) fn is_the_same_as(&self, reported: &ReportedFinding) -> bool {
        let known = &self.reported;
        known.probe == reported.probe && known.code == reported.code && known.gpu_uuid == reported.gpu_uuid
    }

    /// Takes over what the agent reports. A cleared finding is open again where it occurred again.
    pub(super) fn update(&mut self, reported: ReportedFinding, clock: &ReportClock) {
        if !self.is_reported || reported.boot_id != self.reported.boot_id {
            self.reported_since = Some(clock.now);
        }
        let occurred_again =
            !self.is_reported || reported.boot_id != self.reported.boot_id || reported.count > self.reported.count;
        if occurred_again && !self.is_open() {
            self.cleared = None;
            self.opened_at = clock.ours(reported.last_at);
            self.reported_since = Some(clock.now);
        }
        self.is_reported = true;
        self.reported = reported;
    }

    /// True where it was there at a second look, so that a repair may begin: heartbeats have had it for as long as policy
    /// `node.repair_delay_seconds` wants, up to the last one.
    pub(in crate::entities::node) fn is_confirmed(&self, ctx: &TransitionContext<'_>) -> bool {
        let delay = ctx.policy.seconds(PolicyKey::NodeRepairDelay, &Scopes::global(), ctx.now);
        self.is_reported && ctx.now >= self.reported_since.unwrap_or(self.opened_at) + delay
    }

    /// The last heartbeat does not have it any more.
    pub(super) fn end(&mut self, now: Timestamp) {
        self.is_reported = false;
        if self.is_open() && self.repair() != Repair::Operator {
            self.cleared = Some(ClearedFinding { at: now, reason: None });
        }
    }

    /// In the form of an older agent's alert.
    pub(super) fn alert(&self) -> Value {
        let (rule, reported) = (self.rule(), &self.reported);
        json!({
            "probe_id": format!("{}.{}", reported.probe, reported.code),
            "target": reported.gpu_uuid.as_deref().unwrap_or("machine"),
            "since": self.opened_at,
            "classifications": self.classes(),
            "message": format!("{}: {}", rule.meaning, reported.detail),
            "tenant_message": self.tenant_message(),
        })
    }
}

/// The clock of a node against the control plane's.
pub(super) struct ReportClock {
    pub(super) sent_at: Timestamp,
    pub(super) now: Timestamp,
    /// A time of the node's that is earlier is wrong, or of a fault that could not be known: no meter is stopped before it.
    pub(super) earliest: Timestamp,
}

impl ReportClock {
    /// A time of the node's clock, as long ago as the node says: clocks differ, and a fault is never ahead of its report.
    pub(super) fn ours(&self, at: Timestamp) -> Timestamp {
        (self.now - (self.sent_at - at)).max(self.earliest).min(self.now)
    }
}
