//! The load of one node. What an agent reports is judged by its own inventory: a number that cannot be is dropped and counted, and the
//! heartbeat is accepted all the same, so that a driver's nonsense makes no node silent.

use chrono::{DateTime, Utc};
use prometheus::core::{AtomicU64, GenericCounter};
use prometheus::{Opts, Registry};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::LazyLock;
use wire::heartbeat::{GpuTelemetry, Telemetry};
use wire::inventory::NodeInventory;

/// More is no temperature of silicon, in degrees Celsius.
const TEMPERATURE_MAX: u32 = 150;
/// More is no power of one GPU, in milliwatts.
const POWER_MAX: u32 = 5_000_000;
/// How far a percentage may be over 100 by its rounding.
const PERCENT_TOLERANCE: f32 = 1.0;

/// The load of a node at its last heartbeat, and what it is the load of. What was not measured is `None`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeSample {
    /// By the clock of the member that received it.
    pub received_at: DateTime<Utc>,
    pub cpu_cores: u32,
    pub cpu_percent: Option<f32>,
    pub memory_mib: u64,
    pub memory_used_mib: Option<u64>,
    pub storage_gib: u64,
    pub storage_used_gib: Option<u64>,
    /// Every GPU of the inventory.
    pub gpus: Vec<GpuSample>,
}

/// The load of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuSample {
    pub uuid: String,
    pub model: String,
    pub memory_mib: u64,
    pub utilization_percent: Option<u32>,
    pub memory_used_mib: Option<u64>,
    pub temperature_celsius: Option<u32>,
    pub power_milliwatts: Option<u32>,
}

/// The load of a node with its GPUs added up, as members send it to each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeSummary {
    #[serde(rename = "at", with = "chrono::serde::ts_milliseconds")]
    pub received_at: DateTime<Utc>,
    #[serde(rename = "cores")]
    pub cpu_cores: u32,
    #[serde(rename = "cpu")]
    pub cpu_percent: Option<f32>,
    #[serde(rename = "memory")]
    pub memory_mib: u64,
    #[serde(rename = "memory_used")]
    pub memory_used_mib: Option<u64>,
    #[serde(rename = "storage")]
    pub storage_gib: u64,
    #[serde(rename = "storage_used")]
    pub storage_used_gib: Option<u64>,
    pub gpus: GpuSummary,
}

/// The GPUs of a node, added up. A sum has the number of GPUs that it is of, where it is not all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuSummary {
    #[serde(rename = "n")]
    pub count: u64,
    #[serde(rename = "memory")]
    pub memory_mib: u64,
    /// The sum of the utilizations in percent, and the GPUs that were measured.
    #[serde(rename = "util")]
    pub utilization: (u64, u64),
    #[serde(rename = "memory_used")]
    pub memory_used_mib: Option<u64>,
    #[serde(rename = "celsius")]
    pub temperature_celsius_max: Option<u32>,
    #[serde(rename = "milliwatts")]
    pub power_milliwatts: Option<u64>,
}

impl NodeSample {
    /// The load that an agent reports of the machine that it reports.
    #[must_use]
    pub fn of(inventory: &NodeInventory, telemetry: Telemetry, received_at: DateTime<Utc>) -> Self {
        // Of GPUs that the inventory does not list nothing is stored, and of one that is listed twice the first.
        let mut reported: BTreeMap<String, GpuTelemetry> = BTreeMap::new();
        for gpu in telemetry.gpus {
            if inventory.gpus.iter().any(|known| known.uuid == gpu.uuid) {
                reported.entry(gpu.uuid.clone()).or_insert(gpu);
            } else {
                TELEMETRY_COUNTERS.drop_value();
            }
        }
        let gpus = inventory.gpus.iter().map(|gpu| {
            let load = reported.remove(&gpu.uuid);
            let load = load.as_ref();
            GpuSample {
                uuid: gpu.uuid.clone(),
                model: gpu.model.clone(),
                memory_mib: gpu.memory_mib,
                utilization_percent: at_most(load.and_then(|load| load.utilization_percent), 100),
                memory_used_mib: at_most(load.and_then(|load| load.memory_used_mib), gpu.memory_mib),
                temperature_celsius: at_most(load.and_then(|load| load.temperature_celsius), TEMPERATURE_MAX),
                power_milliwatts: at_most(load.and_then(|load| load.power_milliwatts), POWER_MAX),
            }
        });
        Self {
            received_at,
            cpu_cores: inventory.cpu_cores,
            cpu_percent: telemetry.cpu_percent.and_then(percent),
            memory_mib: inventory.memory_mib,
            memory_used_mib: at_most(telemetry.memory_used_mib, inventory.memory_mib),
            storage_gib: inventory.storage_gib,
            storage_used_gib: at_most(telemetry.storage_used_gib, inventory.storage_gib),
            gpus: gpus.collect(),
        }
    }

    #[must_use]
    pub fn summary(&self) -> NodeSummary {
        let mut gpus = GpuSummary { count: self.gpus.len() as u64, ..GpuSummary::default() };
        for gpu in &self.gpus {
            gpus.memory_mib += gpu.memory_mib;
            if let Some(percent) = gpu.utilization_percent {
                gpus.utilization.0 += u64::from(percent);
                gpus.utilization.1 += 1;
            }
            add(&mut gpus.memory_used_mib, gpu.memory_used_mib);
            add(&mut gpus.power_milliwatts, gpu.power_milliwatts.map(u64::from));
            gpus.temperature_celsius_max = gpus.temperature_celsius_max.max(gpu.temperature_celsius);
        }
        NodeSummary {
            received_at: self.received_at,
            cpu_cores: self.cpu_cores,
            cpu_percent: self.cpu_percent,
            memory_mib: self.memory_mib,
            memory_used_mib: self.memory_used_mib,
            storage_gib: self.storage_gib,
            storage_used_gib: self.storage_used_gib,
            gpus,
        }
    }
}

/// Adds to a sum that is `None` until something was measured.
pub(super) fn add(sum: &mut Option<u64>, value: Option<u64>) {
    if let Some(value) = value {
        *sum = Some(sum.unwrap_or(0).saturating_add(value));
    }
}

fn at_most<T: PartialOrd>(value: Option<T>, bound: T) -> Option<T> {
    let value = value?;
    if value <= bound {
        return Some(value);
    }
    TELEMETRY_COUNTERS.drop_value();
    None
}

fn percent(value: f32) -> Option<f32> {
    // NaN is in no range.
    if (0.0..=100.0 + PERCENT_TOLERANCE).contains(&value) {
        return Some(value.min(100.0));
    }
    TELEMETRY_COUNTERS.drop_value();
    None
}

/// Of the process.
pub static TELEMETRY_COUNTERS: LazyLock<TelemetryCounters> = LazyLock::new(TelemetryCounters::new);

/// See [`TELEMETRY_COUNTERS`].
pub struct TelemetryCounters {
    implausible: GenericCounter<AtomicU64>,
    dropped: GenericCounter<AtomicU64>,
}

impl TelemetryCounters {
    fn new() -> Self {
        // The names are fixed and valid: a failure here fails every test.
        let counter = |name: &str, help: &str| {
            GenericCounter::with_opts(Opts::new(name, help)).unwrap_or_else(|error| unreachable!("{name}: {error}"))
        };
        Self {
            implausible: counter(
                "fleet_telemetry_implausible_values_total",
                "Numbers in heartbeats that cannot be, or are of a GPU that the node does not have; they were dropped.",
            ),
            dropped: counter(
                "fleet_telemetry_dropped_samples_total",
                "Loads of nodes that were not stored, since this process stores those of too many nodes.",
            ),
        }
    }

    fn drop_value(&self) {
        self.implausible.inc();
    }

    pub(super) fn drop_sample(&self) {
        self.dropped.inc();
    }

    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        let all = [&self.implausible, &self.dropped];
        all.into_iter().try_for_each(|counter| registry.register(Box::new(counter.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn inventory() -> NodeInventory {
        let gpu = |index: u32| json!({"index": index, "uuid": format!("GPU-{index}"), "vendor": "NVIDIA", "model": "H100", "memory_mib": 80_000});
        serde_json::from_value(json!({
            "hostname": "n", "kernel": "6", "cpu_model": "x", "cpu_cores": 64, "memory_mib": 1000, "storage_gib": 100,
            "gpus": [gpu(0), gpu(1)], "gpu_source": "nvml", "executor": "system",
        }))
        .unwrap()
    }

    fn gpu(uuid: &str, percent: u32) -> GpuTelemetry {
        GpuTelemetry {
            uuid: uuid.to_owned(),
            utilization_percent: Some(percent),
            memory_used_mib: Some(40_000),
            temperature_celsius: Some(60),
            power_milliwatts: Some(300_000),
        }
    }

    fn of(telemetry: Telemetry) -> NodeSample {
        NodeSample::of(&inventory(), telemetry, DateTime::UNIX_EPOCH)
    }

    #[test]
    fn numbers_that_cannot_be_are_dropped_and_the_others_are_stored() {
        for cpu in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, 101.5, 1e38] {
            let sample = of(Telemetry { cpu_percent: Some(cpu), memory_used_mib: Some(500), ..Telemetry::default() });
            assert_eq!((sample.cpu_percent, sample.memory_used_mib), (None, Some(500)), "{cpu}");
        }
        assert_eq!(of(Telemetry { cpu_percent: Some(100.2), ..Telemetry::default() }).cpu_percent, Some(100.0));
        let huge = Telemetry {
            memory_used_mib: Some(u64::MAX),
            storage_used_gib: Some(101),
            gpus: vec![
                GpuTelemetry {
                    memory_used_mib: Some(80_001),
                    temperature_celsius: Some(u32::MAX),
                    ..gpu("GPU-0", 101)
                },
                GpuTelemetry { power_milliwatts: Some(u32::MAX), ..gpu("GPU-1", 7) },
            ],
            ..Telemetry::default()
        };
        let sample = of(huge);
        assert_eq!((sample.memory_used_mib, sample.storage_used_gib), (None, None));
        let summary = sample.summary().gpus;
        assert_eq!((summary.utilization, summary.memory_used_mib), ((7, 1), Some(40_000)));
        assert_eq!((summary.temperature_celsius_max, summary.power_milliwatts), (Some(60), Some(300_000)));
    }

    #[test]
    fn ten_thousand_gpus_of_which_the_inventory_has_two_are_two() {
        let mut gpus: Vec<_> = (2..10_000).map(|index| gpu(&format!("GPU-{index}"), 100)).collect();
        gpus.extend([gpu("GPU-1", 10), gpu("GPU-0", 20), gpu("GPU-1", 99), gpu("", 1)]);
        let sample = of(Telemetry { gpus, ..Telemetry::default() });
        let percents: Vec<_> = sample.gpus.iter().map(|gpu| gpu.utilization_percent).collect();
        assert_eq!(percents, [Some(20), Some(10)], "the second report of one GPU is dropped");
        assert_eq!(sample.summary().gpus.count, 2);
    }

    #[test]
    fn summary_survives_the_way_to_another_member() {
        let sample = of(Telemetry { cpu_percent: Some(3.5), gpus: vec![gpu("GPU-0", 50)], ..Telemetry::default() });
        let text = serde_json::to_string(&sample.summary()).unwrap();
        assert_eq!(serde_json::from_str::<NodeSummary>(&text).unwrap(), sample.summary());
        assert!(text.len() < 300, "{text}");
    }
}
