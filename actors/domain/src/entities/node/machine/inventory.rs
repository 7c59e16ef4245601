//! The machine's inventory as the agent reports it.

use crate::hardware::GpuLocality;
use serde::{Deserialize, Serialize};

/// The machine's inventory as the agent reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedInventory {
    pub gpus: Vec<ReportedGpu>,
    /// The source of the GPU data: `nvml`, `simulated` or `none`.
    pub gpu_source: String,
    /// `sandbox` or `system`.
    pub executor: String,
    /// True where the node isolates its tenants' GPUs by enforcement. Where it does not, it takes one tenant at a time (decisions 4).
    pub isolates_devices: bool,
    /// `None` where the agent cannot read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_model: Option<String>,
    /// These three are 0 where the agent cannot read them.
    pub cpu_cores: u32,
    pub memory_mib: u64,
    pub storage_gib: u64,
    /// Of the GPUs' driver; `None` where the agent does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    /// The host key that tenants see when they connect by SSH, in OpenSSH's `SHA256:` form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_fingerprint: Option<String>,
    /// What distinguishes its installation from another; `None` where the agent does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<ReportedSystem>,
    /// The device nodes beside those of GPUs that each tenant may open, as the operator of the machine has set them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tenant_devices: Vec<String>,
}

impl ReportedInventory {
    /// Takes over what an agent does not report each time: the locality of a GPU that it has not read, and all fields that it leaves out until it
    /// knows that the control plane reads them (`is_whole` is false).
    pub(super) fn complete(&mut self, before: &Self, is_whole: bool) {
        for gpu in self.gpus.iter_mut().filter(|gpu| gpu.locality.is_unknown()) {
            let known = before.gpus.iter().find(|known| known.uuid == gpu.uuid);
            gpu.locality = known.map_or(gpu.locality, |known| known.locality);
        }
        if !is_whole {
            self.tenant_devices.clone_from(&before.tenant_devices);
        }
    }
}

/// The installed system of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedSystem {
    /// Of `/etc/machine-id`, which each installation makes for itself.
    pub machine_id: Option<String>,
    /// The digest of the image, where the image carries it.
    pub image_digest: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedGpu {
    pub index: u32,
    pub uuid: String,
    pub model: String,
    pub memory_mib: u64,
    /// As it was reported last: agents leave it out at times, and those of earlier releases do not know it.
    #[serde(default, skip_serializing_if = "GpuLocality::is_unknown")]
    pub locality: GpuLocality,
}
