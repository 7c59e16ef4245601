//! `node.validate` with load: what the control plane orders, and the report in the task's output.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// How thoroughly a machine is tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadLevel {
    /// About ten seconds.
    Quick,
    /// Minutes, on all CPUs and half of the free memory.
    Deep,
}

/// The load of a validation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidationLoad {
    pub level: LoadLevel,
    /// How long all loads may take together. Only of a deep validation; a quick one takes a second for each load.
    #[serde(default)]
    pub load_seconds: u32,
    /// Only this GPU is tested, also beside the tenants of others, and nothing else of the machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_uuid: Option<String>,
}

/// What a validation with load found: fields of the task's output, beside those of a check without load. The control plane judges it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadReport {
    pub level: LoadLevel,
    /// By name, which ends in the unit. Of what is measured on several GPUs, the lowest.
    pub measurements: BTreeMap<String, u64>,
    /// Tests that were not made, by name, with the reason.
    pub not_tested: BTreeMap<String, String>,
    /// Tests that found a fault, or whose tool failed, by name, with what happened.
    pub failed: BTreeMap<String, String>,
    /// Of each GPU, as many as there is room for.
    pub by_gpu: Vec<GpuMeasurements>,
}

/// The measurements of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuMeasurements {
    pub uuid: String,
    pub measurements: BTreeMap<String, u64>,
}
