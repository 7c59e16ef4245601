//! The load of the nodes (specification, *Endpoints*): the last sample of each node in the memory of the member that received its
//! heartbeat, and what an operator sees of all of them.
//!
//! Samples are not stored: a member that starts knows nothing, and the next heartbeat of each node brings its load again.

mod node_directory;
mod rollup;
mod sample;

pub use node_directory::{FleetDirectory, FleetNode};
pub use rollup::{
    CpuLoad, DataAge, FleetGroup, FleetReport, GpuLoad, MemoryLoad, SILENT_NODES_SHOWN, SilentNode, SilentNodes,
    StorageLoad, report,
};
pub use sample::{GpuSample, GpuSummary, NodeSample, NodeSummary, TELEMETRY_COUNTERS, TelemetryCounters};

use chrono::{DateTime, TimeDelta, Utc};
use domain::NodeId;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use uuid::Uuid;

/// Nodes whose sample one member stores. A sample over the bound is dropped and counted.
const NODES_MAX: usize = 100_000;
/// How long a sample is stored: after that, its node is known to be silent and nothing else is.
const RETENTION: TimeDelta = TimeDelta::hours(1);

/// The last sample of each node whose heartbeat this process received. Clones share it.
#[derive(Clone, Default)]
pub struct FleetTelemetry(Arc<Mutex<HashMap<NodeId, NodeSample>>>);

/// The last sample of each node, over the members that answered.
#[derive(Clone, Debug, Default)]
pub struct FleetSamples {
    pub nodes: HashMap<NodeId, NodeSummary>,
    /// Living members that did not answer in time. Nodes whose heartbeats they receive look silent.
    pub silent_members: Vec<Uuid>,
}

impl FleetTelemetry {
    /// Stores the sample of a heartbeat that was accepted, in place of the node's last one.
    pub fn record(&self, node_id: NodeId, sample: NodeSample) {
        let mut nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if nodes.len() >= NODES_MAX && !nodes.contains_key(&node_id) {
            let oldest = sample.received_at - RETENTION;
            nodes.retain(|_, stored| stored.received_at > oldest);
            if nodes.len() >= NODES_MAX {
                TELEMETRY_COUNTERS.drop_sample();
                return;
            }
        }
        nodes.insert(node_id, sample);
    }

    /// The last sample of one node, as this member received it.
    #[must_use]
    pub fn sample(&self, node_id: NodeId) -> Option<NodeSample> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&node_id).cloned()
    }

    /// What is known of one of `parts` parts of the nodes. By their random last byte the parts are about equal.
    #[must_use]
    pub fn summaries(&self, part: u8, parts: u8) -> Vec<(NodeId, NodeSummary)> {
        let nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let in_part = |node_id: &NodeId| node_id.0.as_bytes()[15] % parts.max(1) == part;
        nodes.iter().filter(|(id, _)| in_part(id)).map(|(id, sample)| (*id, sample.summary())).collect()
    }

    /// Drops the samples of nodes that have been silent for long, such as removed ones.
    pub fn expire(&self, now: DateTime<Utc>) {
        let mut nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.retain(|_, sample| sample.received_at > now - RETENTION);
    }
}

impl FleetSamples {
    /// Adds what a member knows. A node that changed its member is known to both: the newer sample is its load.
    pub fn merge(&mut self, summaries: impl IntoIterator<Item = (NodeId, NodeSummary)>) {
        for (node_id, summary) in summaries {
            let known = self.nodes.entry(node_id).or_insert_with(|| summary.clone());
            if known.received_at < summary.received_at {
                *known = summary;
            }
        }
    }
}

#[cfg(test)]
mod tests;
