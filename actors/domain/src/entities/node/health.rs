//! Health findings of a node, and what follows from them for each of its GPUs.

use super::{Node, NodeHealthStatus, Phase, Rejection};
use crate::audit::AuditAction;
use crate::event::GpuDevice;
use crate::finding::{FindingCause, FindingClass, FindingRule, FindingScope, Judgement, Repair, RuleOverrides};
use crate::id::{AllocationId, FindingId};
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The most findings of a node that are stored.
pub const MAX_STORED_FINDINGS: usize = 32;

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

    fn tenant_message(&self) -> &str {
        self.overridden.as_ref().map_or(self.rule().tenant_message, |judgement| &judgement.tenant_message)
    }

    fn all_classes(&self) -> Vec<FindingClass> {
        match &self.overridden {
            Some(judgement) => judgement.classes.iter().copied().collect(),
            None => self.rule().classes.to_vec(),
        }
    }

    /// Takes over what the overrides in force say of it.
    fn judge(&mut self, overrides: &RuleOverrides) {
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

    pub(super) fn has(&self, class: FindingClass) -> bool {
        self.is_open() && self.classes().contains(&class)
    }

    pub(super) fn prevents_allocation(&self) -> bool {
        self.has(FindingClass::PreventAllocation)
    }

    fn is_unattributed(&self) -> bool {
        self.rule().scope == FindingScope::Gpu && self.reported.gpu_uuid.is_none()
    }

    /// True where it concerns every GPU of the node.
    fn is_of_machine(&self) -> bool {
        self.reported.gpu_uuid.is_none()
    }

    fn concerns(&self, gpus: &[GpuDevice]) -> bool {
        let uuid = self.reported.gpu_uuid.as_deref();
        uuid.is_none_or(|uuid| gpus.iter().any(|gpu| gpu.uuid == uuid))
    }

    fn is_the_same_as(&self, reported: &ReportedFinding) -> bool {
        let known = &self.reported;
        known.probe == reported.probe && known.code == reported.code && known.gpu_uuid == reported.gpu_uuid
    }

    /// Takes over what the agent reports. A cleared finding is open again where it occurred again.
    fn update(&mut self, reported: ReportedFinding, clock: &ReportClock) {
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
    pub(super) fn is_confirmed(&self, ctx: &TransitionContext<'_>) -> bool {
        let delay = ctx.policy.seconds(PolicyKey::NodeRepairDelay, &Scopes::global(), ctx.now);
        self.is_reported && ctx.now >= self.reported_since.unwrap_or(self.opened_at) + delay
    }

    /// The last heartbeat does not have it any more.
    fn end(&mut self, now: Timestamp) {
        self.is_reported = false;
        if self.is_open() && self.repair() != Repair::Operator {
            self.cleared = Some(ClearedFinding { at: now, reason: None });
        }
    }

    /// In the form of an older agent's alert.
    fn alert(&self) -> Value {
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
struct ReportClock {
    sent_at: Timestamp,
    now: Timestamp,
    /// A time of the node's that is earlier is wrong, or of a fault that could not be known: no meter is stopped before it.
    earliest: Timestamp,
}

impl ReportClock {
    /// A time of the node's clock, as long ago as the node says: clocks differ, and a fault is never ahead of its report.
    fn ours(&self, at: Timestamp) -> Timestamp {
        (self.now - (self.sent_at - at)).max(self.earliest).min(self.now)
    }
}

impl Node {
    /// Takes over the report of a heartbeat. The contact before it was at `last_seen_at`.
    pub(super) fn note_findings(
        &mut self,
        report: FindingReport,
        last_seen_at: Option<Timestamp>,
        ctx: &TransitionContext<'_>,
    ) {
        self.note_proved_gpus(&report);
        let FindingReport { sent_at, findings, is_truncated } = report;
        // The time of the last contact lags by a part of the policy's.
        let tolerance = ctx.policy.seconds(PolicyKey::NodeOfflineAfter, &Scopes::global(), ctx.now);
        let earliest = last_seen_at.unwrap_or(self.registered_at) - tolerance;
        let clock = ReportClock { sent_at, now: ctx.now, earliest };
        for known in self.findings.iter_mut().filter(|known| known.is_reported && !is_truncated) {
            if !findings.iter().any(|reported| known.is_the_same_as(reported)) {
                known.end(ctx.now);
            }
        }
        for (n, reported) in (1..).zip(findings) {
            if let Some(known) = self.findings.iter_mut().find(|known| known.is_the_same_as(&reported)) {
                known.update(reported, &clock);
                continue;
            }
            let opened_at = clock.ours(reported.first_at);
            let id = FindingId(ctx.new_id(n));
            self.findings.push(NodeFinding {
                id,
                reported,
                opened_at,
                is_reported: true,
                reported_since: Some(ctx.now),
                cleared: None,
                overridden: None,
            });
        }
        self.findings.iter_mut().for_each(|known| known.judge(ctx.policy.health_rules()));
        self.forget_findings();
        self.health.status = self.status_by_findings();
    }

    /// The oldest that were cleared go first, then the oldest of those that are only shown.
    fn forget_findings(&mut self) {
        while self.findings.len() > MAX_STORED_FINDINGS {
            let worth = |known: &NodeFinding| {
                let is_only_shown = known.all_classes() == [FindingClass::Warn];
                (known.is_open(), !is_only_shown, known.reported.last_at)
            };
            let least = self.findings.iter().enumerate().min_by_key(|(_, known)| worth(known));
            let Some((index, _)) = least else { return };
            self.findings.remove(index);
        }
    }

    fn status_by_findings(&self) -> NodeHealthStatus {
        let any = |class| self.findings.iter().any(|known| known.has(class));
        if any(FindingClass::BillingCredit) || any(FindingClass::Evacuate) || any(FindingClass::Quarantine) {
            NodeHealthStatus::Critical
        } else if any(FindingClass::PreventAllocation) || any(FindingClass::Warn) {
            NodeHealthStatus::Warning
        } else {
            NodeHealthStatus::Ok
        }
    }

    /// An administrator looked at the machine: the finding has no consequence until it occurs again.
    pub(super) fn clear_finding(
        &self,
        finding_id: FindingId,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let known = self.findings.iter().find(|known| known.id == finding_id).ok_or(Rejection::FindingUnknown)?;
        if !known.is_open() {
            return Ok(self.stay_with_node());
        }
        let reported = &known.reported;
        let metadata = json!({
            "finding_id": finding_id,
            "probe": reported.probe,
            "finding_code": reported.code,
            "gpu_uuid": reported.gpu_uuid,
            "count": reported.count,
            "reason": reason,
        });
        let audit = self.audit(AuditAction::NodesClearFinding, metadata);
        let mut next = self.clone();
        next.findings.iter_mut().for_each(|known| known.judge(ctx.policy.health_rules()));
        for known in next.findings.iter_mut().filter(|known| known.id == finding_id) {
            known.cleared = Some(ClearedFinding { at: ctx.now, reason: Some(reason.to_owned()) });
        }
        next.health.status = next.status_by_findings();
        let (mut events, lifted) = next.take_back_recovered_holds(ctx);
        events.extend(next.update_evacuations(ctx));
        let step = next.transition_with_node(format!("finding {finding_id} was cleared: {reason}")).audit(audit);
        let step = lifted.into_iter().fold(step, Transition::audit);
        Ok(events.into_iter().fold(step, Transition::event))
    }

    /// True where the machine as a whole has failed.
    pub(super) fn is_machine_critical(&self) -> bool {
        if !self.health.reports_findings {
            return self.health.status == NodeHealthStatus::Critical;
        }
        self.findings.iter().any(|known| known.is_of_machine() && known.has(FindingClass::BillingCredit))
    }

    /// The GPUs that get no new tenant, by UUID.
    pub(super) fn withheld_gpus(&self) -> BTreeSet<&str> {
        let withheld = self.findings.iter().filter(|known| known.has(FindingClass::PreventAllocation));
        let of_findings = withheld.filter_map(|known| known.reported.gpu_uuid.as_deref());
        let unproved = self.unproved_gpus.keys().map(String::as_str);
        of_findings.chain(self.gpus_withheld_by_reset()).chain(unproved).collect()
    }

    /// The finding about the machine that prevents new allocations, in a sentence for an operator.
    pub(super) fn withheld_by_finding(&self) -> Option<String> {
        let of_machine = self.findings.iter().filter(|known| known.is_of_machine());
        let known = of_machine.into_iter().find(|known| known.has(FindingClass::PreventAllocation))?;
        let NodeFinding { reported, .. } = known;
        let (probe, code, meaning) = (&reported.probe, &reported.code, known.rule().meaning);
        Some(format!("a health finding prevents new allocations: {probe}/{code}, {meaning} ({})", reported.detail))
    }

    /// GPUs without a hold that a finding withholds.
    pub(super) fn withheld_free_gpus(&self) -> usize {
        let withheld = self.withheld_gpus();
        self.unheld_devices().filter(|device| withheld.contains(device.uuid.as_str())).count()
    }

    /// The allocations whose machine or GPU has failed, with the reason and the time of the fault.
    pub(super) fn faulted_by_findings(&self) -> Vec<(AllocationId, &'static str, Timestamp)> {
        let failed: Vec<_> = self.findings.iter().filter(|known| known.has(FindingClass::BillingCredit)).collect();
        let faults = self.holds.iter().filter_map(|(id, hold)| {
            let first = failed
                .iter()
                .filter(|known| known.concerns(&hold.placed.devices))
                .min_by_key(|known| known.opened_at)?;
            let reason = if first.is_of_machine() { "machine_fault" } else { "gpu_fault" };
            Some((*id, reason, first.opened_at))
        });
        faults.collect()
    }

    /// Why the tenant of these GPUs is asked to leave; `None` where it is not.
    pub(super) fn evacuation_reason(&self, gpus: &[GpuDevice]) -> Option<&'static str> {
        let open: Vec<_> = self.findings.iter().filter(|known| known.has(FindingClass::Evacuate)).collect();
        let of_machine = open.iter().find(|known| known.is_of_machine()).map(|_| "machine_maintenance");
        of_machine.or_else(|| open.iter().find(|known| known.concerns(gpus)).map(|_| "gpu_maintenance"))
    }

    /// How many GPUs the agent does not list and has found missing: they are faults, and no drift.
    pub(super) fn gpus_found_missing(&self) -> u32 {
        if matches!(self.life, Phase::Enrolling { .. }) {
            return 0;
        }
        let listed: BTreeSet<&str> =
            self.inventory.iter().flat_map(|inventory| &inventory.gpus).map(|gpu| gpu.uuid.as_str()).collect();
        let missing = self.findings.iter().filter(|known| known.is_reported && known.is_open());
        let missing = missing.filter(|known| known.reported.probe == "gpu");
        let missing = missing.filter_map(|known| known.reported.gpu_uuid.as_deref()).collect::<BTreeSet<_>>();
        u32::try_from(missing.difference(&listed).count()).unwrap_or(u32::MAX)
    }

    /// A program's own error is no news to the next tenant of the GPU.
    pub(super) fn tenant_messages_of_findings(&self, gpus: &[GpuDevice], since: Timestamp) -> Vec<String> {
        let mut messages: Vec<String> = Vec::new();
        for known in self.findings.iter().filter(|known| known.is_open() && known.concerns(gpus)) {
            let is_of_another = known.cause() == FindingCause::Tenant && known.reported.last_at < since;
            let message = known.tenant_message();
            if !message.is_empty()
                && !is_of_another
                && !known.is_unattributed()
                && !messages.iter().any(|it| it == message)
            {
                messages.push(message.to_owned());
            }
        }
        messages
    }

    /// The alerts of its health: an older agent's own, or the open findings in their form.
    #[must_use]
    pub fn alerts(&self) -> Vec<Value> {
        if !self.health.reports_findings {
            return self.health.alerts.clone();
        }
        self.findings.iter().filter(|known| known.is_open()).map(NodeFinding::alert).collect()
    }
}
