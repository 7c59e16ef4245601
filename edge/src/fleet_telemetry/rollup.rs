//! The loads of all nodes, added up by SKU and region.

use super::sample::{NodeSummary, add};
use super::{FleetNode, FleetSamples};
use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;
use uuid::Uuid;

/// Silent nodes that a report names; more are counted.
pub const SILENT_NODES_SHOWN: usize = 100;

/// The load of the fleet at one moment.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct FleetReport {
    pub at: DateTime<Utc>,
    /// How old the loads are that are added up here; null where there are none.
    pub data_age: Option<DataAge>,
    /// One for each SKU and region with nodes, by name and region.
    pub items: Vec<FleetGroup>,
    pub silent_nodes: SilentNodes,
    /// Living members of the cluster that did not answer in time. Nodes whose heartbeats they receive are counted as silent.
    pub silent_members: Vec<Uuid>,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct DataAge {
    pub oldest_seconds: f64,
    pub newest_seconds: f64,
}

/// The nodes of one SKU in one region. Loads are of those that report; what none of them measures is null.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct FleetGroup {
    pub sku_id: Uuid,
    pub sku: String,
    pub region_code: String,
    /// Neither removed nor being removed.
    pub nodes: u64,
    /// Those whose load is no older than three heartbeats.
    pub reporting: u64,
    /// Those that should report and do not.
    pub silent: u64,
    pub cpu: CpuLoad,
    pub memory: MemoryLoad,
    pub storage: StorageLoad,
    pub gpus: GpuLoad,
}

#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct CpuLoad {
    /// Logical processors.
    pub cores: u64,
    /// The mean over all processors that were measured.
    pub utilization_percent: Option<f64>,
}

#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct MemoryLoad {
    pub total_mib: u64,
    pub used_mib: Option<u64>,
}

#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct StorageLoad {
    pub total_gib: u64,
    pub used_gib: Option<u64>,
}

#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[schema(as = FleetGpuLoad)]
pub struct GpuLoad {
    pub count: u64,
    /// The mean over all GPUs that were measured.
    pub utilization_percent: Option<f64>,
    pub memory_total_mib: u64,
    pub memory_used_mib: Option<u64>,
    /// Of the hottest GPU.
    pub temperature_celsius_max: Option<u32>,
    /// Of all GPUs that were measured.
    pub power_watts: Option<f64>,
}

/// Nodes that should send heartbeats, and whose last one is older than three of them or unknown.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct SilentNodes {
    pub count: u64,
    /// The first 100, by id.
    #[schema(max_items = 100)]
    pub nodes: Vec<SilentNode>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct SilentNode {
    pub node_id: Uuid,
    pub sku: String,
    pub region_code: String,
    /// When its last heartbeat was received; null where no member knows of one within the last hour.
    pub last_at: Option<DateTime<Utc>>,
}

/// Sums from which the means of a group are taken.
#[derive(Default)]
struct Means {
    /// Of the utilization, weighted by processors, and the processors.
    cpu: (f64, f64),
    gpu: (u64, u64),
    milliwatts: Option<u64>,
}

/// Adds up the loads of these nodes. A load that is older than `silent_after` is of no interest any more.
#[must_use]
pub fn report(nodes: &[FleetNode], samples: &FleetSamples, now: DateTime<Utc>, silent_after: TimeDelta) -> FleetReport {
    let mut groups: BTreeMap<(&str, &str, Uuid), (FleetGroup, Means)> = BTreeMap::new();
    let mut silent: Vec<(&FleetNode, Option<DateTime<Utc>>)> = Vec::new();
    let mut ages: Option<(TimeDelta, TimeDelta)> = None;
    for node in nodes {
        let key = (&*node.sku, &*node.region_code, node.sku_id);
        let (group, means) = groups.entry(key).or_insert_with(|| (FleetGroup::of(node), Means::default()));
        group.nodes += 1;
        let known = samples.nodes.get(&node.id);
        match known.filter(|summary| now - summary.received_at <= silent_after) {
            Some(summary) => {
                let age = (now - summary.received_at).max(TimeDelta::zero());
                ages = Some(ages.map_or((age, age), |(oldest, newest)| (oldest.max(age), newest.min(age))));
                group.add(means, summary);
            }
            None if node.is_expected => {
                group.silent += 1;
                silent.push((node, known.map(|summary| summary.received_at)));
            }
            None => {}
        }
    }
    let count = silent.len() as u64;
    if silent.len() > SILENT_NODES_SHOWN {
        silent.select_nth_unstable_by_key(SILENT_NODES_SHOWN, |(node, _)| node.id);
        silent.truncate(SILENT_NODES_SHOWN);
    }
    silent.sort_unstable_by_key(|(node, _)| node.id);
    FleetReport {
        at: now,
        data_age: ages.map(|(oldest, newest)| DataAge {
            oldest_seconds: oldest.as_seconds_f64(),
            newest_seconds: newest.as_seconds_f64(),
        }),
        items: groups.into_values().map(|(group, means)| group.with(&means)).collect(),
        silent_nodes: SilentNodes { count, nodes: silent.into_iter().map(SilentNode::of).collect() },
        silent_members: samples.silent_members.clone(),
    }
}

impl FleetGroup {
    fn of(node: &FleetNode) -> Self {
        Self {
            sku_id: node.sku_id,
            sku: node.sku.to_string(),
            region_code: node.region_code.to_string(),
            nodes: 0,
            reporting: 0,
            silent: 0,
            cpu: CpuLoad::default(),
            memory: MemoryLoad::default(),
            storage: StorageLoad::default(),
            gpus: GpuLoad::default(),
        }
    }

    // The numbers of a sample are bounded by the inventory's, so that no fleet overflows a sum.
    fn add(&mut self, means: &mut Means, summary: &NodeSummary) {
        self.reporting += 1;
        self.cpu.cores += u64::from(summary.cpu_cores);
        if let Some(percent) = summary.cpu_percent {
            let cores = f64::from(summary.cpu_cores.max(1));
            means.cpu.0 += f64::from(percent) * cores;
            means.cpu.1 += cores;
        }
        self.memory.total_mib = self.memory.total_mib.saturating_add(summary.memory_mib);
        add(&mut self.memory.used_mib, summary.memory_used_mib);
        self.storage.total_gib = self.storage.total_gib.saturating_add(summary.storage_gib);
        add(&mut self.storage.used_gib, summary.storage_used_gib);
        let (gpus, of) = (&mut self.gpus, &summary.gpus);
        gpus.count += of.count;
        gpus.memory_total_mib = gpus.memory_total_mib.saturating_add(of.memory_mib);
        add(&mut gpus.memory_used_mib, of.memory_used_mib);
        gpus.temperature_celsius_max = gpus.temperature_celsius_max.max(of.temperature_celsius_max);
        means.gpu.0 += of.utilization.0;
        means.gpu.1 += of.utilization.1;
        add(&mut means.milliwatts, of.power_milliwatts);
    }

    fn with(mut self, means: &Means) -> Self {
        self.cpu.utilization_percent = (means.cpu.1 > 0.0).then(|| tenths(means.cpu.0 / means.cpu.1));
        self.gpus.utilization_percent = (means.gpu.1 > 0).then(|| tenths(means.gpu.0 as f64 / means.gpu.1 as f64));
        self.gpus.power_watts = means.milliwatts.map(|milliwatts| tenths(milliwatts as f64 / 1000.0));
        self
    }
}

impl SilentNode {
    fn of((node, last_at): (&FleetNode, Option<DateTime<Utc>>)) -> Self {
        let (sku, region_code) = (node.sku.to_string(), node.region_code.to_string());
        Self { node_id: node.id.0, sku, region_code, last_at }
    }
}

fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}
