//! The health of a node's machine: what its agent reports, and what follows from it for each of the GPUs.

mod findings;
mod integrity;

use super::{Rejection, outcome};
use crate::audit::{AuditAction, AuditRecord};
use crate::event::GpuDevice;
use crate::finding::{self, FindingCause, FindingClass};
use crate::id::{AllocationId, FindingId};
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Timestamp, TransitionContext};
use findings::ReportClock;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeSet;

pub use findings::{ClearedFinding, FindingReport, NodeFinding, ReportedFinding};
pub use integrity::FindingAcceptance;

/// The most findings of a node that are stored.
pub const MAX_STORED_FINDINGS: usize = 32;

/// The class of an alert that prevents new allocations on the node while it is active (decisions 7, *Health alert*).
const PREVENT_ALLOCATION: &str = "prevent_allocation";

/// The classes of findings that stop a rollout.
const STOPPING: [FindingClass; 3] = [FindingClass::Evacuate, FindingClass::BillingCredit, FindingClass::Quarantine];

/// Why a reset ends the events of its GPU.
const CLEARED_BY_RESET: &str = "the GPU was reset";

/// The part of a node that knows the health of its machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    pub reported: NodeHealth,
    /// What the agent's health probes found, oldest first.
    pub findings: Vec<NodeFinding>,
}

/// The machine's health as the agent reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeHealth {
    pub status: NodeHealthStatus,
    /// Of an older agent, which judges its machine itself.
    pub alerts: Vec<serde_json::Value>,
    /// True where the agent reports findings.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reports_findings: bool,
    /// The findings of a heartbeat, in its command alone: the node stores them beside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<FindingReport>,
}

impl NodeHealth {
    fn is_of_class(alert: &serde_json::Value, class: &str) -> bool {
        let classes = alert.get("classifications").and_then(serde_json::Value::as_array);
        classes.into_iter().flatten().any(|it| it == class)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeHealthStatus {
    /// No report yet.
    #[default]
    Unknown,
    Ok,
    Warning,
    Critical,
}

impl Health {
    /// Takes over what the agent reports of its machine's health. An agent that reports findings leaves the judgement to the table of
    /// findings. The contact before it, or else the registration, was at `last_seen_at`.
    pub(super) fn report(&mut self, health: NodeHealth, last_seen_at: Timestamp, ctx: &TransitionContext<'_>) {
        let NodeHealth { status, alerts, report, .. } = health;
        match report {
            Some(report) => {
                let status = self.reported.status;
                self.reported = NodeHealth { reports_findings: true, status, ..NodeHealth::default() };
                self.note_findings(report, last_seen_at, ctx);
            }
            None => self.reported = NodeHealth { status, alerts, ..NodeHealth::default() },
        }
    }

    /// Takes over the report of a heartbeat. The contact before it was at `last_seen_at`.
    fn note_findings(&mut self, report: FindingReport, last_seen_at: Timestamp, ctx: &TransitionContext<'_>) {
        let FindingReport { sent_at, findings, is_truncated } = report;
        // The time of the last contact lags by a part of the policy's.
        let tolerance = ctx.policy.seconds(PolicyKey::NodeOfflineAfter, &Scopes::global(), ctx.now);
        let earliest = last_seen_at - tolerance;
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
        self.reported.status = self.status_by_findings();
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

    /// An administrator looked at the machine: the finding has no consequence until it occurs again. `None`: it has none already.
    pub(super) fn clear(
        &mut self,
        finding_id: FindingId,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Option<AuditRecord>, Rejection> {
        let known = self.findings.iter().position(|known| known.id == finding_id).ok_or(Rejection::FindingUnknown)?;
        if !self.findings[known].is_open() {
            return Ok(None);
        }
        self.findings.iter_mut().for_each(|known| known.judge(ctx.policy.health_rules()));
        let known = &mut self.findings[known];
        known.cleared = Some(ClearedFinding { at: ctx.now, reason: Some(reason.to_owned()) });
        let reported = &known.reported;
        let metadata = json!({
            "finding_id": finding_id,
            "probe": reported.probe,
            "finding_code": reported.code,
            "gpu_uuid": reported.gpu_uuid,
            "count": reported.count,
            "reason": reason,
        });
        self.reported.status = self.status_by_findings();
        Ok(Some(outcome::audit(AuditAction::NodesClearFinding, metadata, ctx)))
    }

    /// The GPU was reset. An event is reported until the next boot, so that a reset ends it here. A condition ends when the driver does not
    /// report it any more.
    pub(super) fn end_events_of_reset_gpu(&mut self, uuid: &str, now: Timestamp) {
        for known in &mut self.findings {
            let is_event = known.reported.probe == "xid" && known.reported.gpu_uuid.as_deref() == Some(uuid);
            if is_event && known.repair() == finding::Repair::Reset && known.is_open() {
                known.cleared = Some(ClearedFinding { at: now, reason: Some(CLEARED_BY_RESET.to_owned()) });
            }
        }
    }

    /// True where the machine as a whole has failed.
    pub(super) fn is_machine_critical(&self) -> bool {
        if !self.reported.reports_findings {
            return self.reported.status == NodeHealthStatus::Critical;
        }
        self.findings.iter().any(|known| known.is_of_machine() && known.has(FindingClass::BillingCredit))
    }

    /// The finding about the machine that prevents new allocations, in a sentence for an operator.
    fn withheld_by_finding(&self) -> Option<String> {
        let of_machine = self.findings.iter().filter(|known| known.is_of_machine());
        let known = of_machine.into_iter().find(|known| known.has(FindingClass::PreventAllocation))?;
        let NodeFinding { reported, .. } = known;
        let (probe, code, meaning) = (&reported.probe, &reported.code, known.rule().meaning);
        Some(format!("a health finding prevents new allocations: {probe}/{code}, {meaning} ({})", reported.detail))
    }

    /// Why the tenant of these GPUs is asked to leave; `None` where it is not.
    pub(super) fn evacuation_reason(&self, gpus: &[GpuDevice]) -> Option<&'static str> {
        if !self.reported.reports_findings {
            return None;
        }
        let open: Vec<_> = self.findings.iter().filter(|known| known.has(FindingClass::Evacuate)).collect();
        let of_machine = open.iter().find(|known| known.is_of_machine()).map(|_| "machine_maintenance");
        of_machine.or_else(|| open.iter().find(|known| known.concerns(gpus)).map(|_| "gpu_maintenance"))
    }

    /// A program's own error is no news to the next tenant of the GPU.
    fn tenant_messages_of_findings(&self, gpus: &[GpuDevice], since: Timestamp) -> Vec<String> {
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
        if !self.reported.reports_findings {
            return self.reported.alerts.clone();
        }
        self.findings.iter().filter(|known| known.is_open()).map(NodeFinding::alert).collect()
    }

    /// The messages for a tenant who has had these GPUs since this time. What is about a GPU of another tenant, which the machine lists too,
    /// is not among them.
    pub(super) fn tenant_messages(&self, gpus: &[GpuDevice], since: Timestamp, listed: &BTreeSet<&str>) -> Vec<String> {
        if self.reported.reports_findings {
            return self.tenant_messages_of_findings(gpus, since);
        }
        let is_foreign = |target: &str| listed.contains(target) && gpus.iter().all(|gpu| gpu.uuid != target);
        let mut messages: Vec<String> = Vec::new();
        for alert in &self.reported.alerts {
            let text = |field: &str| alert.get(field).and_then(Value::as_str).unwrap_or_default();
            let (target, message) = (text("target"), text("tenant_message"));
            if !message.is_empty() && !is_foreign(target) && !messages.iter().any(|known| known == message) {
                messages.push(message.to_owned());
            }
        }
        messages
    }

    /// What of it prevents new allocations on all of the GPUs.
    pub(super) fn withheld(&self) -> Option<String> {
        self.withheld_by_finding().or_else(|| self.withheld_by_alert())
    }

    /// The alert of an older agent that prevents new allocations.
    fn withheld_by_alert(&self) -> Option<String> {
        let alert = self.reported.alerts.iter().find(|alert| NodeHealth::is_of_class(alert, PREVENT_ALLOCATION))?;
        let text = |field: &str| alert.get(field).and_then(Value::as_str).unwrap_or_default();
        let (probe, target, message) = (text("probe_id"), text("target"), text("message"));
        Some(format!("an alert of its agent prevents new allocations: {probe} on {target}: {message}"))
    }

    /// The GPUs that get no new tenant because of a finding about them, by UUID.
    pub(super) fn withheld_gpus(&self) -> impl Iterator<Item = &str> {
        let withheld = self.findings.iter().filter(|known| known.has(FindingClass::PreventAllocation));
        withheld.filter_map(|known| known.reported.gpu_uuid.as_deref())
    }

    /// The tenants that a fault of the machine concerns, with the fault, and its time where it is known. The machine lists the GPUs `listed`.
    pub(super) fn faulted<'a>(
        &self,
        tenants: impl Iterator<Item = (AllocationId, &'a [GpuDevice])>,
        listed: &BTreeSet<&str>,
    ) -> Vec<(AllocationId, &'static str, Option<Timestamp>)> {
        let reports_findings = self.reported.reports_findings;
        let is_critical = !reports_findings && self.is_machine_critical();
        let faults = tenants.filter_map(|(id, gpus)| {
            if let Some((reason, at)) = self.failure_of(gpus).filter(|_| reports_findings) {
                return Some((id, reason, Some(at)));
            }
            let has_all = gpus.iter().all(|device| listed.contains(device.uuid.as_str()));
            match (is_critical, has_all) {
                (true, _) => Some((id, "health_critical", None)),
                (false, false) => Some((id, "gpu_lost", None)),
                (false, true) => None,
            }
        });
        faults.collect()
    }

    /// Why the machine, or one of these GPUs, has failed, and when.
    fn failure_of(&self, gpus: &[GpuDevice]) -> Option<(&'static str, Timestamp)> {
        let failed =
            self.findings.iter().filter(|known| known.has(FindingClass::BillingCredit) && known.concerns(gpus));
        let first = failed.min_by_key(|known| known.opened_at)?;
        Some((if first.is_of_machine() { "machine_fault" } else { "gpu_fault" }, first.opened_at))
    }

    /// How many GPUs the agent does not list and has found missing: they are faults, and no drift.
    pub(super) fn missing_gpus(&self, listed: &BTreeSet<&str>) -> u32 {
        let missing = self.findings.iter().filter(|known| known.is_reported && known.is_open());
        let missing = missing.filter(|known| known.reported.probe == "gpu");
        let missing = missing.filter_map(|known| known.reported.gpu_uuid.as_deref()).collect::<BTreeSet<_>>();
        u32::try_from(missing.difference(listed).count()).unwrap_or(u32::MAX)
    }

    /// The first finding since this time that stops a rollout.
    pub(super) fn rollout_fault_since(&self, since: Timestamp) -> Option<String> {
        let stops =
            |known: &&NodeFinding| known.opened_at >= since && STOPPING.into_iter().any(|class| known.has(class));
        self.findings.iter().find(stops).map(|known| format!("{}/{}", known.reported.probe, known.reported.code))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{decided_at, start};
    use super::*;

    #[test]
    fn report_of_findings_replaces_what_an_older_agent_judged() {
        let mut health = Health::default();
        let judged = NodeHealth { status: NodeHealthStatus::Critical, ..NodeHealth::default() };
        decided_at(start(), |ctx| health.report(judged, start(), ctx));
        assert!(health.is_machine_critical());
        let report = FindingReport { sent_at: start(), findings: Vec::new(), is_truncated: false };
        let reported = NodeHealth { report: Some(report), ..NodeHealth::default() };
        decided_at(start(), |ctx| health.report(reported, start(), ctx));
        assert_eq!((health.reported.status, health.is_machine_critical()), (NodeHealthStatus::Ok, false));
        let unknown = FindingId(uuid::Uuid::from_u128(1));
        let cleared = decided_at(start(), |ctx| health.clear(unknown, "looked at", ctx));
        assert_eq!(cleared.unwrap_err(), Rejection::FindingUnknown);
    }
}
