//! A node's hardware and software, as its agent reports it.

use serde::{Deserialize, Serialize};

/// The hardware and software of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInventory {
    pub hostname: String,
    /// Kernel release, as `uname -r` prints it.
    pub kernel: String,
    pub cpu_model: String,
    /// Logical processors.
    pub cpu_cores: u32,
    pub memory_mib: u64,
    pub storage_gib: u64,
    /// In order of `index`.
    pub gpus: Vec<GpuInfo>,
    pub gpu_source: GpuSource,
    /// Of the GPUs' driver; absent where there is none, or it has not answered yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    pub executor: ExecutorKind,
    /// The SSH host key that tenants see, in OpenSSH's `SHA256:` form; absent if there is no SSH access.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssh_host_key_fingerprint: Option<String>,
    /// What distinguishes this installation from another one of the same machine. Agents before it do not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<InstalledSystem>,
    /// The device nodes beside those of GPUs that each tenant may open; absent where there are none. At most [`MAX_TENANT_DEVICES`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tenant_devices: Vec<String>,
}

/// The most device nodes beside those of GPUs that a node gives to its tenants.
pub const MAX_TENANT_DEVICES: usize = 32;
/// The longest path of one, in bytes.
pub const MAX_TENANT_DEVICE_PATH: usize = 128;

/// The installed system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstalledSystem {
    /// Of `/etc/machine-id`, which each installation makes for itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,
    /// What the image carries in [`IMAGE_DIGEST_FILE`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
}

/// Where an image carries its digest, or any other text that names its build.
pub const IMAGE_DIGEST_FILE: &str = "/etc/gpuaas/image-digest";

/// One GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInfo {
    /// The driver's index; it may change over a reboot, the UUID does not.
    pub index: u32,
    /// The driver's UUID, `GPU-` and 36 characters.
    pub uuid: String,
    pub vendor: String,
    pub model: String,
    pub memory_mib: u64,
}

/// A GPU as tasks name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeviceRef {
    pub index: u32,
    pub uuid: String,
}

impl From<&GpuInfo> for DeviceRef {
    fn from(gpu: &GpuInfo) -> Self {
        Self { index: gpu.index, uuid: gpu.uuid.clone() }
    }
}

/// The source of the agent's list of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuSource {
    /// NVIDIA's management library.
    Nvml,
    /// Simulated by `--simulate-gpus`.
    Simulated,
    /// The node has no GPU that the agent can see.
    None,
}

/// How the agent isolates tenants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecutorKind {
    /// Folders and processes of the agent's own user; enforces nothing between tenants.
    Sandbox,
    /// Users, device rules and units of the operating system.
    System,
}
