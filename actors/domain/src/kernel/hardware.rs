//! GPUs, what the catalog promises of them, and where an allocation has them.

use crate::id::SkuId;
use serde::{Deserialize, Serialize};

/// A GPU as the node's driver names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GpuDevice {
    pub index: u32,
    pub uuid: String,
}

/// The devices and the login of an allocation on its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    pub devices: Vec<GpuDevice>,
    pub host: String,
    pub port: u16,
    pub user_name: String,
    pub region_code: String,
    /// The expected host key, in OpenSSH's `SHA256:` form; `None` where the node's agent did not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_fingerprint: Option<String>,
}

/// The hardware that the catalog promised for the node's SKU when the node was registered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromisedHardware {
    pub sku_id: SkuId,
    pub name: String,
    pub gpu_model: String,
    pub gpu_memory_mib: u64,
    pub gpu_count: u32,
    pub allowed_regions: Vec<String>,
}
