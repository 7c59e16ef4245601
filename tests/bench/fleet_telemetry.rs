//! What a request for the load of the fleet computes, with 10,000 nodes of 8 GPUs whose heartbeats three members receive: each member's
//! answers as messages, their merging, the roll-up by SKU and region, and the response as JSON. The aim is a p99 under 50 ms. The baseline is
//! the same without adding up a node's GPUs before they are sent.
//!
//! The messages' way over NATS is not in it, nor the query for SKU and region, which a worker makes every ten seconds.

use anyhow::ensure;
use chrono::{DateTime, TimeDelta, Utc};
use domain::NodeId;
use edge::fleet_telemetry::{FleetNode, FleetSamples, FleetTelemetry, GpuSample, NodeSample, NodeSummary, report};
use std::time::{Duration, Instant};
use tests::bench::{BenchReport, MeasurementPlan, PairedSamples, rounded};
use uuid::Uuid;

const NODES: u128 = 10_000;
const GPUS: u32 = 8;
const MEMBERS: u128 = 3;
/// As a member answers (`supervisors/src/cluster_runtime.rs`).
const PARTS: u8 = 32;
/// The largest message of NATS.
const MESSAGE_BYTES: usize = 1 << 20;
const AIM_MS: f64 = 50.0;

struct Fleet {
    members: Vec<FleetTelemetry>,
    samples: Vec<(NodeId, NodeSample)>,
    nodes: Vec<FleetNode>,
    now: DateTime<Utc>,
}

fn main() -> anyhow::Result<()> {
    let plan = MeasurementPlan::of_seconds(4.0)?;
    let fleet = Fleet::new();
    let (mut turns, mut ours, mut largest) = (PairedSamples::default(), Vec::new(), 0);
    for _ in 0..plan.rounds {
        let of_ours = measure(plan.each, || {
            let message = fleet.gather()?;
            largest = largest.max(message);
            Ok(())
        })?;
        let of_baseline = measure(plan.each, || fleet.gather_one_by_one())?;
        turns.round(p99(&of_ours), p99(&of_baseline));
        ours.extend(of_ours);
    }
    ensure!(largest < MESSAGE_BYTES, "a message has {largest} bytes, and NATS takes {MESSAGE_BYTES}");
    let aim = if p99(&ours) < AIM_MS { "met" } else { "missed" };
    BenchReport::new("fleet-telemetry", "p99 ms", "GPUs one by one", &turns)
        .metric("median_ms", rounded(tests::bench::median(&ours)))
        .metric("p99_of_all_ms", rounded(p99(&ours)))
        .metric("requests", ours.len())
        .metric("largest_message_bytes", largest)
        .metric("aim_p99_under_50_ms", aim)
        .condition("nodes", NODES as u64)
        .condition("gpus_per_node", GPUS)
        .condition("members", MEMBERS as u64)
        .publish()
}

impl Fleet {
    fn new() -> Self {
        let now = Utc::now();
        let members: Vec<_> = (0..MEMBERS).map(|_| FleetTelemetry::default()).collect();
        let (mut samples, mut nodes) = (Vec::new(), Vec::new());
        for number in 0..NODES {
            // The last bytes of an id are random.
            let id = NodeId(Uuid::from_u128(number.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)));
            let age = TimeDelta::milliseconds((number % 120_000) as i64);
            let sample = sample(number as u32, now - age);
            members[(number % MEMBERS) as usize].record(id, sample.clone());
            samples.push((id, sample));
            let sku_id = Uuid::from_u128(number % 20);
            let (sku, region) = (format!("sku-{}", number % 20), format!("region-{}", number % 7));
            nodes.push(FleetNode { id, sku_id, sku: sku.into(), region_code: region.into(), is_expected: true });
        }
        Self { members, samples, nodes, now }
    }

    /// A request as it is answered. Returns the bytes of the largest message.
    fn gather(&self) -> anyhow::Result<usize> {
        let (mut merged, mut largest) = (FleetSamples::default(), 0);
        for part in 0..PARTS {
            for member in &self.members {
                let message = serde_json::to_vec(&member.summaries(part, PARTS))?;
                largest = largest.max(message.len());
                merged.merge(serde_json::from_slice::<Vec<(NodeId, NodeSummary)>>(&message)?);
            }
        }
        self.respond(&merged)?;
        Ok(largest)
    }

    fn gather_one_by_one(&self) -> anyhow::Result<()> {
        let mut merged = FleetSamples::default();
        for chunk in self.samples.chunks(100) {
            let message = serde_json::to_vec(chunk)?;
            let received: Vec<(NodeId, NodeSample)> = serde_json::from_slice(&message)?;
            merged.merge(received.into_iter().map(|(id, sample)| (id, sample.summary())));
        }
        self.respond(&merged)
    }

    fn respond(&self, merged: &FleetSamples) -> anyhow::Result<()> {
        let report = report(&self.nodes, merged, self.now, TimeDelta::seconds(90));
        ensure!(report.items.iter().map(|group| group.nodes).sum::<u64>() == NODES as u64, "all nodes are counted");
        ensure!(!serde_json::to_vec(&report)?.is_empty());
        Ok(())
    }
}

fn sample(number: u32, received_at: DateTime<Utc>) -> NodeSample {
    let gpu = |index: u32| GpuSample {
        uuid: format!("GPU-{}", Uuid::from_u128(u128::from(number) * 64 + u128::from(index))),
        model: "NVIDIA H100 80GB HBM3".into(),
        memory_mib: 81_559,
        utilization_percent: Some((number + index * 13) % 101),
        memory_used_mib: Some(u64::from(number % 80_000)),
        temperature_celsius: Some(30 + (number + index) % 50),
        power_milliwatts: Some(70_000 + number),
    };
    NodeSample {
        received_at,
        cpu_cores: 192,
        cpu_percent: Some((number % 1000) as f32 / 10.0),
        memory_mib: 2_063_937,
        memory_used_mib: Some(u64::from(number) * 100),
        storage_gib: 28_000,
        storage_used_gib: Some(u64::from(number)),
        gpus: (0..GPUS).map(gpu).collect(),
    }
}

/// The time of each run, in milliseconds.
fn measure(each: Duration, mut run: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Vec<f64>> {
    let (began, mut times) = (Instant::now(), Vec::new());
    while began.elapsed() < each || times.len() < 100 {
        let start = Instant::now();
        run()?;
        times.push(start.elapsed().as_secs_f64() * 1000.0);
    }
    Ok(times)
}

fn p99(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get((sorted.len() * 99).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default()
}
