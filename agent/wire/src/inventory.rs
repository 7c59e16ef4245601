//! A node's hardware and software, as its agent reports it.

use std::collections::BTreeSet;

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

/// The most GPUs of a node, and characters of the texts about it. The control plane refuses a heartbeat that is beyond.
pub const MAX_GPUS: usize = 64;
/// Of the UUID and the model of a GPU: the node's snapshot contains both several times.
pub const MAX_GPU_TEXT: usize = 96;
pub const MAX_DRIVER_VERSION: usize = 64;
/// Of the machine id and the image's digest.
pub const MAX_SYSTEM_TEXT: usize = 128;
/// Of the other texts.
pub const MAX_TEXT: usize = 256;
/// The most of anything that is counted: far above every machine, and far below where sums of it could overflow.
pub const MAX_AMOUNT: u64 = 1 << 40;

/// Whether a driver's text can name a GPU in tasks, lists by commas and file names.
#[must_use]
pub fn is_gpu_uuid(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':');
    !text.is_empty() && text.len() <= MAX_GPU_TEXT && text.bytes().all(is_plain)
}

impl NodeInventory {
    /// As a control plane of an earlier release reads it (`heartbeat::LATER_FIELDS`).
    #[must_use]
    pub fn without_later_fields(mut self) -> Self {
        for gpu in &mut self.gpus {
            gpu.topology = GpuTopology::default();
        }
        Self { tenant_devices: Vec::new(), ..self }
    }

    /// What of it the control plane accepts, whatever the machine says of itself: one odd name or number must not make a node silent. Texts
    /// are shortened, numbers are bounded, and a GPU that cannot be named is left out.
    #[must_use]
    pub fn within_bounds(self) -> Self {
        let mut named = BTreeSet::new();
        let gpus = self.gpus.into_iter().filter(|gpu| is_gpu_uuid(&gpu.uuid) && named.insert(gpu.uuid.clone()));
        let bounded = |gpu: GpuInfo| GpuInfo {
            vendor: one_line(&gpu.vendor, MAX_TEXT),
            model: one_line(&gpu.model, MAX_GPU_TEXT),
            memory_mib: gpu.memory_mib.min(MAX_AMOUNT),
            ..gpu
        };
        let system = self.system.map(|system| InstalledSystem {
            machine_id: system.machine_id.map(|text| one_line(&text, MAX_SYSTEM_TEXT)),
            image_digest: system.image_digest.map(|text| one_line(&text, MAX_SYSTEM_TEXT)),
        });
        let devices = self.tenant_devices.into_iter().map(|path| one_line(&path, MAX_TENANT_DEVICE_PATH));
        Self {
            hostname: one_line(&self.hostname, MAX_TEXT),
            kernel: one_line(&self.kernel, MAX_TEXT),
            cpu_model: one_line(&self.cpu_model, MAX_TEXT),
            memory_mib: self.memory_mib.min(MAX_AMOUNT),
            storage_gib: self.storage_gib.min(MAX_AMOUNT),
            gpus: gpus.take(MAX_GPUS).map(bounded).collect(),
            driver_version: self.driver_version.map(|version| one_line(&version, MAX_DRIVER_VERSION)),
            ssh_host_key_fingerprint: self.ssh_host_key_fingerprint.map(|text| one_line(&text, MAX_TEXT)),
            system,
            tenant_devices: devices.take(MAX_TENANT_DEVICES).collect(),
            ..self
        }
    }
}

/// Without control characters.
fn one_line(text: &str, characters: usize) -> String {
    text.chars().take(characters).map(|character| if character.is_control() { ' ' } else { character }).collect()
}

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
    #[serde(default, skip_serializing_if = "GpuTopology::is_unknown")]
    pub topology: GpuTopology,
}

/// What a GPU is near to in its machine. What is unknown is absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuTopology {
    /// The NUMA node of its PCI slot: on most machines, the socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// The lowest index of the GPUs that active NVLinks connect it with, directly or by switches; it counts itself. Absent where it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink_domain: Option<u32>,
}

impl GpuTopology {
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        *self == Self::default()
    }
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
