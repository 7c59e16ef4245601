//! GPUs, what the catalog promises of them, and where an allocation has them.

use crate::id::SkuId;
use serde::{Deserialize, Serialize};

/// A GPU as the node's driver names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GpuDevice {
    pub index: u32,
    pub uuid: String,
}

/// What a GPU is near to in its machine. What is unknown is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuLocality {
    /// On most machines, its socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// The lowest index of the GPUs that NVLinks connect it with; it counts itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink_domain: Option<u32>,
}

impl GpuLocality {
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        *self == Self::default()
    }
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
    /// `None` where an earlier release registered the node: nothing but its GPUs was promised then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<SoldMachine>,
}

/// What a SKU sells of a whole machine beside its GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SoldMachine {
    /// Without threads.
    pub cpu_cores: u32,
    pub memory_mib: u64,
    pub storage_gib: u64,
}

/// What the machines of a SKU must have beside their GPUs, as an administrator expects it; a field that is absent expects nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectedHardware {
    /// A part of the processor's name as the kernel reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_model: Option<String>,
    /// Logical processors, at least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_cores: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Of all local file systems together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage_gib: Option<u64>,
    /// The oldest version of the GPU driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_version_min: Option<DriverVersion>,
}

impl ExpectedHardware {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The version of a GPU driver: one to four numbers with dots between them, such as `570.86.15`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DriverVersion(Vec<u16>);

/// The text is no version of a driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no version of a driver such as 570.86.15")]
pub struct InvalidDriverVersion(String);

impl std::str::FromStr for DriverVersion {
    type Err = InvalidDriverVersion;

    fn from_str(text: &str) -> Result<Self, InvalidDriverVersion> {
        let is_number = |part: &str| (1..=4).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit());
        let parts: Vec<&str> = text.split('.').collect();
        let invalid = || InvalidDriverVersion(text.chars().take(32).collect());
        if parts.len() > 4 || !parts.iter().all(|part| is_number(part)) {
            return Err(invalid());
        }
        let numbers: Result<Vec<u16>, _> = parts.iter().map(|part| part.parse()).collect();
        numbers.map(Self).map_err(|_| invalid())
    }
}

impl std::fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&parts.join("."))
    }
}

impl From<DriverVersion> for String {
    fn from(version: DriverVersion) -> Self {
        version.to_string()
    }
}

impl TryFrom<String> for DriverVersion {
    type Error = InvalidDriverVersion;

    fn try_from(text: String) -> Result<Self, InvalidDriverVersion> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_versions_are_compared_by_their_numbers() {
        let version = |text: &str| text.parse::<DriverVersion>();
        assert!(version("570.86.15").unwrap() > version("570.9.99").unwrap());
        assert!(version("570.86").unwrap() < version("570.86.0").unwrap(), "a version with less numbers is older");
        assert!(version("1000").unwrap() > version("999.9").unwrap());
        for text in ["", "570.", "570..1", "v570", "570.86.15.1.1", "57000.1", "-1", "570.86\n", "５70"] {
            assert!(version(text).is_err(), "{text:?}");
        }
    }
}
