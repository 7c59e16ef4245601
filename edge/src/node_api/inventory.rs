//! What an agent says of its machine, checked and turned into what the node's machine keeps.

use crate::error::ApiError;
use domain::node::{Gpu, Health, HealthStatus, Inventory};
use std::collections::BTreeSet;
use wire::heartbeat as reported;
use wire::inventory::{ExecutorKind, GpuSource};

const GPUS: usize = 64;
const TEXT: usize = 256;
const VERSION: usize = 64;
const TASK_TYPES: usize = 64;
/// Far above every machine, and far below where sums of it could overflow.
const AMOUNT: u64 = 1 << 40;
/// Of a GPU's UUID and model: both stand in the node's snapshot several times.
const GPU_TEXT: usize = 96;
/// Alerts that are stored of a heartbeat, characters of each text in them, and bytes of all of them as JSON.
const ALERTS: usize = 64;
const ALERT_TEXT: usize = 500;
const ALERTS_BYTES: usize = 16 * 1024;

/// # Errors
/// `invalid_request`, naming the field.
pub(super) fn agent_version(version: &str) -> Result<String, ApiError> {
    text("agent_version", version, VERSION).map(|()| version.to_owned())
}

/// The types of task that an agent does, by their names: also those that this release has not.
///
/// # Errors
/// `invalid_request`, naming the field.
pub(super) fn task_types(names: Vec<String>) -> Result<BTreeSet<String>, ApiError> {
    const FIELD: &str = "task_types";
    if names.len() > TASK_TYPES {
        return Err(refused(FIELD, format!("has more than {TASK_TYPES} entries")));
    }
    let is_name = |name: &String| {
        let plain = |byte: u8| byte.is_ascii_lowercase() || matches!(byte, b'.' | b'_');
        (1..=VERSION).contains(&name.len()) && name.bytes().all(plain)
    };
    if !names.iter().all(is_name) {
        return Err(refused(FIELD, "has an entry that is no name such as `node.validate`"));
    }
    Ok(names.into_iter().collect())
}

/// # Errors
/// `invalid_request`, naming the field.
pub(super) fn inventory(sent: wire::inventory::Inventory) -> Result<Inventory, ApiError> {
    text("inventory.hostname", &sent.hostname, TEXT)?;
    text("inventory.kernel", &sent.kernel, TEXT)?;
    text("inventory.cpu_model", &sent.cpu_model, TEXT)?;
    amount("inventory.cpu_cores", sent.cpu_cores.into())?;
    amount("inventory.memory_mib", sent.memory_mib)?;
    amount("inventory.storage_gib", sent.storage_gib)?;
    if let Some(fingerprint) = &sent.ssh_host_key_fingerprint {
        text("inventory.ssh_host_key_fingerprint", fingerprint, TEXT)?;
    }
    if sent.gpus.len() > GPUS {
        return Err(refused("inventory.gpus", format!("has more than {GPUS} entries")));
    }
    for (index, gpu) in sent.gpus.iter().enumerate() {
        let field = |name: &str| format!("inventory.gpus[{index}].{name}");
        if gpu.uuid.is_empty() {
            return Err(refused(&field("uuid"), "is empty"));
        }
        text(&field("uuid"), &gpu.uuid, GPU_TEXT)?;
        text(&field("vendor"), &gpu.vendor, TEXT)?;
        text(&field("model"), &gpu.model, GPU_TEXT)?;
        amount(&field("memory_mib"), gpu.memory_mib)?;
    }
    let gpu = |gpu: wire::inventory::Gpu| Gpu {
        index: gpu.index,
        uuid: gpu.uuid,
        model: gpu.model,
        memory_mib: gpu.memory_mib,
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
    Ok(Inventory {
        gpus: sent.gpus.into_iter().map(gpu).collect(),
        gpu_source: gpu_source.to_owned(),
        executor: executor.to_owned(),
        isolates_devices,
        cpu_cores: sent.cpu_cores,
        memory_mib: sent.memory_mib,
        storage_gib: sent.storage_gib,
        host_fingerprint: sent.ssh_host_key_fingerprint,
    })
}

/// A node that has too much to tell is not taken for silent: what is over the bounds is cut off.
pub(super) fn health(sent: reported::Health) -> Result<Health, serde_json::Error> {
    let status = match sent.status {
        reported::HealthStatus::Ok => HealthStatus::Ok,
        reported::HealthStatus::Warning => HealthStatus::Warning,
        reported::HealthStatus::Critical => HealthStatus::Critical,
    };
    let short = |alert: reported::Alert| {
        serde_json::to_value(reported::Alert {
            probe_id: clipped(&alert.probe_id, VERSION),
            target: clipped(&alert.target, TEXT),
            since: alert.since,
            classifications: alert.classifications.into_iter().take(16).collect(),
            message: clipped(&alert.message, ALERT_TEXT),
            tenant_message: clipped(&alert.tenant_message, ALERT_TEXT),
        })
    };
    let alerts: Vec<_> = sent.alerts.into_iter().take(ALERTS).map(short).collect::<Result<_, _>>()?;
    let mut room = ALERTS_BYTES;
    let fits = move |alert: &serde_json::Value| {
        room = room.saturating_sub(alert.to_string().len());
        room > 0
    };
    Ok(Health { status, alerts: alerts.into_iter().take_while(fits).collect() })
}

/// Text of an agent's, bounded and without control characters.
pub(super) fn clipped(text: &str, characters: usize) -> String {
    let one_line = text.chars().map(|character| if character.is_control() { ' ' } else { character });
    let mut kept: String = one_line.take(characters).collect();
    if text.chars().nth(characters).is_some() {
        kept.pop();
        kept.push('…');
    }
    kept
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
    if amount > AMOUNT { Err(refused(field, format!("is over {AMOUNT}"))) } else { Ok(()) }
}

fn refused(field: &str, what: impl std::fmt::Display) -> ApiError {
    ApiError::invalid_request(format!("Field `{field}` {what}.")).detail("field", field)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::node_api::tests::agent::h100s;

    #[test]
    fn only_an_executor_of_the_system_keeps_tenants_gpus_apart() {
        let mut sent = h100s(2);
        let kept = inventory(sent.clone()).unwrap();
        assert_eq!((kept.executor.as_str(), kept.isolates_devices), ("sandbox", false));
        assert_eq!((kept.gpu_source.as_str(), kept.gpus.len()), ("simulated", 2));
        assert_eq!(kept.gpus[1].uuid, sent.gpus[1].uuid);
        sent.executor = ExecutorKind::System;
        assert!(inventory(sent).unwrap().isolates_devices);
    }

    #[test]
    fn what_no_machine_has_is_refused_by_name() {
        let change = |change: fn(&mut wire::inventory::Inventory)| {
            let mut sent = h100s(1);
            change(&mut sent);
            inventory(sent).unwrap_err().details()["field"].as_str().unwrap().to_owned()
        };
        assert_eq!(change(|sent| sent.hostname = "x".repeat(257)), "inventory.hostname");
        assert_eq!(change(|sent| sent.kernel = "6.1\n".into()), "inventory.kernel");
        assert_eq!(change(|sent| sent.memory_mib = u64::MAX), "inventory.memory_mib");
        assert_eq!(change(|sent| sent.gpus = vec![sent.gpus[0].clone(); 65]), "inventory.gpus");
        assert_eq!(change(|sent| sent.gpus[0].uuid.clear()), "inventory.gpus[0].uuid");
        assert_eq!(change(|sent| sent.gpus[0].model = "x".repeat(1000)), "inventory.gpus[0].model");
    }

    #[test]
    fn the_types_of_task_that_an_agent_does_are_names_and_not_many() {
        let names = |names: &[&str]| task_types(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(names(&["node.validate", "node.sing", "node.sing"]).unwrap().len(), 2);
        for bad in ["", "Node", "a b", "a\n", "a;b", "\u{2028}", &"x".repeat(65)] {
            assert_eq!(names(&[bad]).unwrap_err().details()["field"], "task_types", "{bad:?}");
        }
        assert!(names(&["x"; 65]).is_err());
    }

    #[test]
    fn alerts_over_the_bounds_are_cut_off_and_the_status_stands() {
        let alert = reported::Alert {
            probe_id: "xid".into(),
            target: "GPU-1".into(),
            since: chrono::DateTime::UNIX_EPOCH,
            classifications: vec![reported::Classification::Warn; 100],
            message: "m".repeat(100_000),
            tenant_message: "a\nb".into(),
        };
        let small = reported::Alert { message: "m".into(), classifications: Vec::new(), ..alert.clone() };
        let sent = reported::Health { status: reported::HealthStatus::Critical, alerts: vec![small; 1000] };
        let kept = health(sent).unwrap();
        assert_eq!((kept.status, kept.alerts.len()), (HealthStatus::Critical, 64));
        let sent = reported::Health { status: reported::HealthStatus::Critical, alerts: vec![alert; 1000] };
        let kept = health(sent).unwrap();
        assert!(serde_json::to_string(&kept).unwrap().len() < 17_000);
        assert_eq!(kept.alerts[0]["tenant_message"], "a b");
    }
}
