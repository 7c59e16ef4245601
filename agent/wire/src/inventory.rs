//! What a node is made of, as its agent found it.

use serde::{Deserialize, Serialize};

/// The hardware and software of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    pub hostname: String,
    /// Kernel release, as `uname -r` prints it.
    pub kernel: String,
    pub cpu_model: String,
    /// Logical processors.
    pub cpu_cores: u32,
    pub memory_mib: u64,
    pub storage_gib: u64,
    /// In order of `index`.
    pub gpus: Vec<Gpu>,
    pub gpu_source: GpuSource,
    pub executor: ExecutorKind,
    /// The host key that tenants meet when they come in by SSH, in OpenSSH's `SHA256:` form; absent where they cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssh_host_key_fingerprint: Option<String>,
}

/// One GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
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
pub struct Device {
    pub index: u32,
    pub uuid: String,
}

impl From<&Gpu> for Device {
    fn from(gpu: &Gpu) -> Self {
        Self { index: gpu.index, uuid: gpu.uuid.clone() }
    }
}

/// Where the agent has its list of GPUs from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuSource {
    /// NVIDIA's management library.
    Nvml,
    /// Made up by `--simulate-gpus`.
    Simulated,
    /// The node has no GPU that the agent can see.
    None,
}

/// How the agent separates tenants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecutorKind {
    /// Folders and processes of the agent's own user; enforces nothing between tenants.
    Sandbox,
    /// Users, device rules and units of the operating system.
    System,
}
