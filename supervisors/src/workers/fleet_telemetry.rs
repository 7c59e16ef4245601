//! Adds up the load of the nodes periodically: for the metrics `fleet_*`, and so that a request for it waits for no query.

use super::WorkerDependencies;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use edge::app_state::AppState;
use edge::fleet_telemetry::{FleetGroup, FleetReport};
use persistence::metrics::registered;
use persistence::outage_log::RetryLog;
use prometheus::{Gauge, GaugeVec, Opts, Registry};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

const INTERVAL: Duration = Duration::from_secs(10);

const BYTES_PER_MIB: f64 = 1024.0 * 1024.0;
const BYTES_PER_GIB: f64 = 1024.0 * BYTES_PER_MIB;

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { registry, services, .. } = &parts.stages;
    let metrics = Arc::new(FleetMetrics::register(registry)?);
    let shared = (services.services.clone(), metrics);
    Ok(task(&shared, |(services, metrics)| run(services, metrics)))
}

/// Adds up, periodically.
///
/// # Errors
/// Never; what cannot be read keeps its last value, and its age shows.
pub async fn run(services: AppState, metrics: Arc<FleetMetrics>) -> anyhow::Result<()> {
    let mut ticker = interval(INTERVAL);
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let retries = RetryLog::new("read the nodes of the fleet");
    loop {
        ticker.tick().await;
        let now = services.environment.now();
        services.fleet.expire(now);
        let report = async {
            services.fleet_directory.refresh(now).await?;
            services.fleet_report().await
        };
        if let Some(report) = retries.observe(report.await) {
            metrics.set(&report);
        }
    }
}

/// A gauge, and what of a group it shows; `None` where that was not measured.
type GroupGauge = (GaugeVec, fn(&FleetGroup) -> Option<f64>);

/// The load of the cluster's nodes. Every process with the role exports the same values.
pub struct FleetMetrics {
    gauges: Vec<GroupGauge>,
    oldest: Gauge,
    silent_members: Gauge,
    /// The groups that are exported, by SKU and region.
    shown: Mutex<BTreeSet<[String; 2]>>,
}

impl FleetMetrics {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str| registered(registry, Gauge::new(name, help));
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            registered(registry, GaugeVec::new(Opts::new(name, help), labels))
        };
        let nodes = gauges("fleet_nodes", "Nodes that are neither removed nor being removed.", &["sku", "region"])?;
        let reporting =
            gauges("fleet_nodes_reporting", "Nodes whose load is no older than three heartbeats.", &["sku", "region"])?;
        let silent = gauges("fleet_nodes_silent", "Nodes that should send heartbeats and do not.", &["sku", "region"])?;
        let cores = gauges("fleet_cpu_cores", "Logical processors of the reporting nodes.", &["sku", "region"])?;
        let cpu = gauges("fleet_cpu_utilization_ratio", "Mean utilization of the processors.", &["sku", "region"])?;
        let memory = gauges("fleet_memory_bytes", "Memory of the reporting nodes.", &["sku", "region"])?;
        let memory_used = gauges("fleet_memory_used_bytes", "Memory in use.", &["sku", "region"])?;
        let storage = gauges("fleet_storage_bytes", "Storage of the reporting nodes.", &["sku", "region"])?;
        let storage_used = gauges("fleet_storage_used_bytes", "Storage in use.", &["sku", "region"])?;
        let gpus = gauges("fleet_gpus", "GPUs of the reporting nodes.", &["sku", "region"])?;
        let gpu = gauges("fleet_gpu_utilization_ratio", "Mean utilization of the GPUs.", &["sku", "region"])?;
        let gpu_memory = gauges("fleet_gpu_memory_bytes", "Memory of the GPUs.", &["sku", "region"])?;
        let gpu_memory_used = gauges("fleet_gpu_memory_used_bytes", "Memory of the GPUs in use.", &["sku", "region"])?;
        let hottest =
            gauges("fleet_gpu_temperature_celsius_max", "Temperature of the hottest GPU.", &["sku", "region"])?;
        let power = gauges("fleet_gpu_power_watts", "Power of all GPUs.", &["sku", "region"])?;
        let gauges: Vec<GroupGauge> = vec![
            (nodes, |group| Some(group.nodes as f64)),
            (reporting, |group| Some(group.reporting as f64)),
            (silent, |group| Some(group.silent as f64)),
            (cores, |group| Some(group.cpu.cores as f64)),
            (cpu, |group| group.cpu.utilization_percent.map(|percent| percent / 100.0)),
            (memory, |group| Some(group.memory.total_mib as f64 * BYTES_PER_MIB)),
            (memory_used, |group| group.memory.used_mib.map(|used| used as f64 * BYTES_PER_MIB)),
            (storage, |group| Some(group.storage.total_gib as f64 * BYTES_PER_GIB)),
            (storage_used, |group| group.storage.used_gib.map(|used| used as f64 * BYTES_PER_GIB)),
            (gpus, |group| Some(group.gpus.count as f64)),
            (gpu, |group| group.gpus.utilization_percent.map(|percent| percent / 100.0)),
            (gpu_memory, |group| Some(group.gpus.memory_total_mib as f64 * BYTES_PER_MIB)),
            (gpu_memory_used, |group| group.gpus.memory_used_mib.map(|used| used as f64 * BYTES_PER_MIB)),
            (hottest, |group| group.gpus.temperature_celsius_max.map(f64::from)),
            (power, |group| group.gpus.power_watts),
        ];
        Ok(Self {
            gauges,
            oldest: gauge(
                "fleet_data_oldest_seconds",
                "Age of the oldest load that is added up in the metrics of the fleet.",
            )?,
            silent_members: gauge(
                "fleet_silent_members",
                "Members that did not answer when the load was added up; their nodes are counted as silent.",
            )?,
            shown: Mutex::default(),
        })
    }

    /// Shows this report, and nothing of SKUs and regions that it does not have.
    pub fn set(&self, report: &FleetReport) {
        self.oldest.set(report.data_age.as_ref().map_or(0.0, |age| age.oldest_seconds));
        self.silent_members.set(report.silent_members.len() as f64);
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left = std::mem::take(&mut *shown);
        for group in &report.items {
            let labels = [group.sku.clone(), group.region_code.clone()];
            for (gauge, value) in &self.gauges {
                match value(group) {
                    Some(value) => gauge.with_label_values(&labels).set(value),
                    // It was not shown before either, where this fails.
                    None => drop(gauge.remove_label_values(&[&*labels[0], &*labels[1]])),
                }
            }
            left.remove(&labels);
            shown.insert(labels);
        }
        for labels in left {
            for (gauge, _) in &self.gauges {
                let _ = gauge.remove_label_values(&[&*labels[0], &*labels[1]]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::{TimeDelta, Utc};
    use domain::NodeId;
    use edge::fleet_telemetry::{FleetNode, FleetSamples, FleetTelemetry, NodeSample, report};
    use prometheus::TextEncoder;
    use uuid::Uuid;

    #[test]
    fn gauges_are_of_the_last_report_alone_and_name_no_node() {
        let registry = Registry::new();
        let metrics = FleetMetrics::register(&registry).unwrap();
        let (now, id) = (Utc::now(), NodeId(Uuid::from_u128(7)));
        let node =
            FleetNode { id, sku_id: Uuid::nil(), sku: "h100".into(), region_code: "eu-1".into(), is_expected: true };
        let sample = NodeSample {
            received_at: now,
            cpu_cores: 64,
            cpu_percent: Some(25.0),
            memory_mib: 1,
            memory_used_mib: None,
            storage_gib: 1,
            storage_used_gib: None,
            gpus: Vec::new(),
        };
        let fleet = FleetTelemetry::default();
        fleet.record(id, sample);
        let mut samples = FleetSamples::default();
        samples.merge(fleet.summaries(0, 1));
        let shown = |nodes: &[FleetNode], seconds: i64| {
            metrics.set(&report(nodes, &samples, now + TimeDelta::seconds(seconds), TimeDelta::seconds(90)));
            TextEncoder::new().encode_to_string(&registry.gather()).unwrap()
        };
        let page = shown(std::slice::from_ref(&node), 1);
        assert!(page.contains("fleet_cpu_utilization_ratio{region=\"eu-1\",sku=\"h100\"} 0.25\n"), "{page}");
        assert!(page.contains("fleet_memory_bytes{region=\"eu-1\",sku=\"h100\"} 1048576\n"), "{page}");
        assert!(!page.contains("fleet_memory_used_bytes{"), "what was not measured is not exported: {page}");
        assert!(!page.contains(&id.0.to_string()), "{page}");
        let silent = shown(&[node], 91);
        assert!(silent.contains("fleet_nodes_silent{region=\"eu-1\",sku=\"h100\"} 1\n"), "{silent}");
        assert!(!silent.contains("fleet_cpu_utilization_ratio{"), "{silent}");
        assert!(!shown(&[], 91).contains("h100"), "the last node of its SKU is removed");
    }
}
