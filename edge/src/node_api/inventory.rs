//! Validates what an agent reports of its machine and converts it for the node's state machine.

use crate::http::error::ApiError;
use crate::http::visible_text::is_blank;
use chrono::{DateTime, Utc};
use domain::hardware::GpuLocality;
use domain::node::{
    FindingReport, NodeHealth, NodeHealthStatus, ReportedFinding, ReportedGpu, ReportedInventory, ReportedSystem,
};
use std::collections::BTreeSet;
use wire::finding::{AcceptedFinding, Finding, MAX_FINDING_DETAIL, MAX_FINDING_NAME, MAX_FINDINGS};
use wire::heartbeat as reported;
use wire::inventory::{
    ExecutorKind, GpuSource, MAX_AMOUNT, MAX_DRIVER_VERSION, MAX_GPU_TEXT, MAX_GPUS, MAX_SYSTEM_TEXT,
    MAX_TENANT_DEVICE_PATH, MAX_TENANT_DEVICES, MAX_TEXT,
};

const MAX_VERSION: usize = 64;
const MAX_TASK_TYPES: usize = 64;
/// What an agent reports where it cannot read a name.
const UNKNOWN: &str = "unknown";
/// Alerts that are stored of a heartbeat, characters of each text in them, and bytes of all of them as JSON.
const MAX_ALERTS: usize = 64;
const MAX_ALERT_TEXT: usize = 500;
const MAX_ALERTS_BYTES: usize = 16 * 1024;

/// # Errors
/// `invalid_request`, naming the field.
pub(super) fn agent_version(version: &str) -> Result<String, ApiError> {
    text("agent_version", version, MAX_VERSION).map(|()| version.to_owned())
}

/// The types of task that an agent does, by their names: also those that this release has not.
///
/// # Errors
/// `invalid_request`, naming the field.
pub(super) fn task_types(names: Vec<String>) -> Result<BTreeSet<String>, ApiError> {
    const FIELD: &str = "task_types";
    if names.len() > MAX_TASK_TYPES {
        return Err(refused(FIELD, format!("has more than {MAX_TASK_TYPES} entries")));
    }
    let is_name = |name: &String| {
        let plain = |byte: u8| byte.is_ascii_lowercase() || matches!(byte, b'.' | b'_');
        (1..=MAX_VERSION).contains(&name.len()) && name.bytes().all(plain)
    };
    if !names.iter().all(is_name) {
        return Err(refused(FIELD, "has an entry that is no name such as `node.validate`"));
    }
    Ok(names.into_iter().collect())
}

/// # Errors
/// `invalid_request`, naming the field.
pub(super) fn inventory(sent: wire::inventory::NodeInventory) -> Result<ReportedInventory, ApiError> {
    text("inventory.hostname", &sent.hostname, MAX_TEXT)?;
    text("inventory.kernel", &sent.kernel, MAX_TEXT)?;
    text("inventory.cpu_model", &sent.cpu_model, MAX_TEXT)?;
    if let Some(version) = &sent.driver_version {
        text("inventory.driver_version", version, MAX_DRIVER_VERSION)?;
    }
    amount("inventory.cpu_cores", sent.cpu_cores.into())?;
    amount("inventory.memory_mib", sent.memory_mib)?;
    amount("inventory.storage_gib", sent.storage_gib)?;
    if let Some(fingerprint) = &sent.ssh_host_key_fingerprint {
        text("inventory.ssh_host_key_fingerprint", fingerprint, MAX_TEXT)?;
    }
    for (field, value) in sent.system.iter().flat_map(|system| {
        [("inventory.system.machine_id", &system.machine_id), ("inventory.system.image_digest", &system.image_digest)]
    }) {
        value.as_ref().map_or(Ok(()), |value| text(field, value, MAX_SYSTEM_TEXT))?;
    }
    if sent.tenant_devices.len() > MAX_TENANT_DEVICES {
        return Err(refused("inventory.tenant_devices", format!("has more than {MAX_TENANT_DEVICES} entries")));
    }
    for (index, path) in sent.tenant_devices.iter().enumerate() {
        text(&format!("inventory.tenant_devices[{index}]"), path, MAX_TENANT_DEVICE_PATH)?;
    }
    if sent.gpus.len() > MAX_GPUS {
        return Err(refused("inventory.gpus", format!("has more than {MAX_GPUS} entries")));
    }
    for (index, gpu) in sent.gpus.iter().enumerate() {
        let field = |name: &str| format!("inventory.gpus[{index}].{name}");
        if gpu.uuid.is_empty() {
            return Err(refused(&field("uuid"), "is empty"));
        }
        text(&field("uuid"), &gpu.uuid, MAX_GPU_TEXT)?;
        text(&field("vendor"), &gpu.vendor, MAX_TEXT)?;
        text(&field("model"), &gpu.model, MAX_GPU_TEXT)?;
        amount(&field("memory_mib"), gpu.memory_mib)?;
    }
    let gpu = |gpu: wire::inventory::GpuInfo| ReportedGpu {
        index: gpu.index,
        uuid: gpu.uuid,
        model: gpu.model,
        memory_mib: gpu.memory_mib,
        locality: GpuLocality { numa_node: gpu.topology.numa_node, nvlink_domain: gpu.topology.nvlink_domain },
    };
    let (executor, isolates_devices) = match sent.executor {
        ExecutorKind::Sandbox => ("sandbox", false),
        ExecutorKind::System => ("system", true),
    };
    let gpu_source = match sent.gpu_source {
        GpuSource::Nvml => "nvml",
        GpuSource::Simulated => "simulated",
        GpuSource::None => "none",
    };
    Ok(ReportedInventory {
        gpus: sent.gpus.into_iter().map(gpu).collect(),
        gpu_source: gpu_source.to_owned(),
        executor: executor.to_owned(),
        isolates_devices,
        cpu_model: Some(sent.cpu_model).filter(|model| !is_blank(model) && model != UNKNOWN),
        cpu_cores: sent.cpu_cores,
        memory_mib: sent.memory_mib,
        storage_gib: sent.storage_gib,
        driver_version: sent.driver_version,
        host_fingerprint: sent.ssh_host_key_fingerprint,
        system: sent
            .system
            .map(|system| ReportedSystem { machine_id: system.machine_id, image_digest: system.image_digest }),
        tenant_devices: sent.tenant_devices,
    })
}

/// A node that reports too much is not treated as silent: what is over the bounds is truncated.
pub(super) fn health(
    sent: reported::HealthReport,
    report: Option<FindingReport>,
) -> Result<NodeHealth, serde_json::Error> {
    let status = match sent.status {
        reported::HealthLevel::Ok => NodeHealthStatus::Ok,
        reported::HealthLevel::Warning => NodeHealthStatus::Warning,
        reported::HealthLevel::Critical => NodeHealthStatus::Critical,
    };
    let short = |alert: reported::Alert| {
        serde_json::to_value(reported::Alert {
            probe_id: truncated(&alert.probe_id, MAX_VERSION),
            target: truncated(&alert.target, MAX_TEXT),
            since: alert.since,
            classifications: alert.classifications.into_iter().take(16).collect(),
            message: truncated(&alert.message, MAX_ALERT_TEXT),
            tenant_message: truncated(&alert.tenant_message, MAX_ALERT_TEXT),
        })
    };
    let alerts: Vec<_> = sent.alerts.into_iter().take(MAX_ALERTS).map(short).collect::<Result<_, _>>()?;
    let mut room = MAX_ALERTS_BYTES;
    let fits = move |alert: &serde_json::Value| {
        room = room.saturating_sub(alert.to_string().len());
        room > 0
    };
    Ok(NodeHealth { status, alerts: alerts.into_iter().take_while(fits).collect(), report, ..NodeHealth::default() })
}

/// A name of a finding's probe or code, in the form of a reason code: ASCII letters, digits and these `signs`.
fn finding_name(sent: &str, signs: &str) -> String {
    let sign = |c: char| if c.is_ascii_alphanumeric() || signs.contains(c) { c } else { '_' };
    let name: String = sent.chars().take(MAX_FINDING_NAME).map(sign).collect();
    if name.is_empty() { "unnamed".to_owned() } else { name }
}

/// The findings of a heartbeat, if its agent reports any. What is over the bounds is truncated, as with alerts.
pub(super) fn findings(sent: Option<Vec<Finding>>, sent_at: DateTime<Utc>) -> Option<FindingReport> {
    let sent = sent?;
    let is_truncated = sent.len() >= MAX_FINDINGS;
    let finding = |finding: Finding| ReportedFinding {
        probe: finding_name(&finding.probe.to_lowercase(), "_"),
        gpu_uuid: finding.gpu_uuid.map(|uuid| truncated(&uuid, MAX_GPU_TEXT)),
        code: finding_name(&finding.code, "._-"),
        count: finding.count,
        first_at: finding.first_at,
        last_at: finding.last_at,
        boot_id: finding.boot_id.to_string(),
        detail: truncated(&finding.detail, MAX_FINDING_DETAIL),
    };
    let findings = sent.into_iter().take(MAX_FINDINGS).map(finding).collect();
    Some(FindingReport { sent_at, findings, is_truncated })
}

/// An accepted finding as its agent knows it; `None` where it was of an agent that names its boots otherwise.
pub(super) fn accepted(finding: domain::node::FindingAcceptance) -> Option<AcceptedFinding> {
    let boot_id = finding.boot_id.parse().ok()?;
    Some(AcceptedFinding { probe: finding.probe, code: finding.code, boot_id, count: finding.count })
}

/// Text of an agent's, bounded and without control characters.
pub(super) fn truncated(text: &str, characters: usize) -> String {
    let one_line = text.chars().map(|character| if character.is_control() { ' ' } else { character });
    let mut stored: String = one_line.take(characters).collect();
    if text.chars().nth(characters).is_some() {
        stored.pop();
        stored.push('…');
    }
    stored
}

fn text(field: &str, text: &str, characters: usize) -> Result<(), ApiError> {
    if text.chars().nth(characters).is_some() {
        return Err(refused(field, format!("is longer than {characters} characters")));
    }
    if text.chars().any(char::is_control) {
        return Err(refused(field, "has a control character"));
    }
    Ok(())
}

fn amount(field: &str, amount: u64) -> Result<(), ApiError> {
    if amount > MAX_AMOUNT { Err(refused(field, format!("is over {MAX_AMOUNT}"))) } else { Ok(()) }
}

fn refused(field: &str, what: impl std::fmt::Display) -> ApiError {
    ApiError::invalid_request(format!("Field `{field}` {what}.")).detail("field", field)
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_host::simulated_machine::SimulatedMachine;
    use uuid::Uuid;
    use wire::inventory::{GpuInfo, InstalledSystem, NodeInventory};

    fn sent(gpus: u32) -> NodeInventory {
        SimulatedMachine::new(Uuid::nil(), gpus).inventory()
    }

    #[test]
    fn only_the_system_executor_isolates_devices() {
        let mut sent = sent(2);
        let stored = inventory(sent.clone()).unwrap();
        assert_eq!((stored.executor.as_str(), stored.isolates_devices), ("sandbox", false));
        assert_eq!((stored.gpu_source.as_str(), stored.gpus.len()), ("simulated", 2));
        assert_eq!(stored.gpus[1].uuid, sent.gpus[1].uuid);
        sent.executor = ExecutorKind::System;
        assert!(inventory(sent).unwrap().isolates_devices);
    }

    #[test]
    fn impossible_inventory_is_refused_with_its_field() {
        let change = |change: fn(&mut wire::inventory::NodeInventory)| {
            let mut sent = sent(1);
            change(&mut sent);
            inventory(sent).unwrap_err().details()["field"].as_str().unwrap().to_owned()
        };
        assert_eq!(change(|sent| sent.hostname = "x".repeat(257)), "inventory.hostname");
        assert_eq!(change(|sent| sent.kernel = "6.1\n".into()), "inventory.kernel");
        assert_eq!(change(|sent| sent.memory_mib = u64::MAX), "inventory.memory_mib");
        assert_eq!(change(|sent| sent.driver_version = Some("5".repeat(65))), "inventory.driver_version");
        let devices = |sent: &mut wire::inventory::NodeInventory| sent.tenant_devices = vec!["/dev/fuse".into(); 33];
        assert_eq!(change(devices), "inventory.tenant_devices");
        assert_eq!(change(|sent| sent.tenant_devices = vec!["x".repeat(129)]), "inventory.tenant_devices[0]");
        assert_eq!(change(|sent| sent.gpus = vec![sent.gpus[0].clone(); 65]), "inventory.gpus");
        assert_eq!(change(|sent| sent.gpus[0].uuid.clear()), "inventory.gpus[0].uuid");
        assert_eq!(change(|sent| sent.gpus[0].model = "x".repeat(1000)), "inventory.gpus[0].model");
    }

    proptest::proptest! {
        #[test]
        fn inventory_of_a_present_agent_is_accepted_whatever_the_machine_says_of_itself(
            texts in proptest::collection::vec("[\0-\u{9f}]{0,4}.{0,300}", 10),
            uuids in proptest::collection::vec("(GPU-[0-9a-f]{2}|.{0,3}|x{95,98}|a,b|a b|\n)", 0..70),
            amount in proptest::prelude::any::<u64>(),
        ) {
            let mut sent = sent(1);
            let (vendor, model) = (texts[0].clone(), texts[1].clone());
            let gpu = GpuInfo { vendor, model, memory_mib: amount, ..sent.gpus.remove(0) };
            sent.gpus = uuids.into_iter().map(|uuid| GpuInfo { uuid, ..gpu.clone() }).collect();
            (sent.hostname, sent.kernel, sent.cpu_model) = (texts[2].clone(), texts[3].clone(), texts[4].clone());
            (sent.memory_mib, sent.storage_gib) = (amount, amount);
            (sent.driver_version, sent.ssh_host_key_fingerprint) = (Some(texts[5].clone()), Some(texts[6].clone()));
            let (machine_id, image_digest) = (Some(texts[7].clone()), Some(texts[8].clone()));
            sent.system = Some(InstalledSystem { machine_id, image_digest });
            sent.tenant_devices = vec![texts[9].clone(); 40];
            let stored = inventory(sent.within_bounds());
            proptest::prop_assert!(stored.is_ok(), "{:?}", stored.err().map(|error| error.details().clone()));
        }
    }

    #[test]
    fn task_types_are_bounded_names() {
        let names = |names: &[&str]| task_types(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(names(&["node.validate", "node.sing", "node.sing"]).unwrap().len(), 2);
        for bad in ["", "Node", "a b", "a\n", "a;b", "\u{2028}", &"x".repeat(65)] {
            assert_eq!(names(&[bad]).unwrap_err().details()["field"], "task_types", "{bad:?}");
        }
        assert!(names(&["x"; 65]).is_err());
    }

    #[test]
    fn alerts_over_the_bounds_are_truncated_and_the_status_is_unchanged() {
        let alert = reported::Alert {
            probe_id: "xid".into(),
            target: "GPU-1".into(),
            since: chrono::DateTime::UNIX_EPOCH,
            classifications: vec![reported::Classification::Warn; 100],
            message: "m".repeat(100_000),
            tenant_message: "a\nb".into(),
        };
        let small = reported::Alert { message: "m".into(), classifications: Vec::new(), ..alert.clone() };
        let sent = reported::HealthReport { status: reported::HealthLevel::Critical, alerts: vec![small; 1000] };
        let stored = health(sent, None).unwrap();
        assert_eq!((stored.status, stored.alerts.len()), (NodeHealthStatus::Critical, 64));
        let sent = reported::HealthReport { status: reported::HealthLevel::Critical, alerts: vec![alert; 1000] };
        let stored = health(sent, None).unwrap();
        assert!(serde_json::to_string(&stored).unwrap().len() < 17_000);
        assert_eq!(stored.alerts[0]["tenant_message"], "a b");
    }

    #[test]
    fn findings_over_the_bounds_are_truncated_and_absent_ones_are_of_an_older_agent() {
        let at = chrono::DateTime::UNIX_EPOCH;
        assert_eq!(findings(None, at), None);
        let finding = Finding {
            probe: "p".repeat(1000),
            gpu_uuid: Some("G".repeat(1000)),
            code: "c\n".repeat(1000),
            count: u64::MAX,
            first_at: at,
            last_at: at,
            boot_id: uuid::Uuid::nil(),
            detail: "d".repeat(100_000),
        };
        let stored = findings(Some(vec![finding.clone(); 1000]), at).unwrap();
        assert!(stored.is_truncated && stored.findings.len() == MAX_FINDINGS);
        assert!(serde_json::to_string(&stored).unwrap().len() < 64 * 1024);
        assert!(!stored.findings[0].code.contains('\n'));
        assert!(!findings(Some(vec![finding]), at).unwrap().is_truncated);
    }
}
