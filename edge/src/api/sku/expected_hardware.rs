//! What the machines of a SKU must have beside their GPUs.

use domain::hardware::ExpectedHardware;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::request_fields::{CpuCores, DriverVersionText, Label, MemoryMib, StorageGib};

/// What the machine of each node of the SKU must have. A field that is absent expects nothing.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct NewExpectedHardware {
    /// A part of the processor's name as the kernel reports it, in upper or lower case.
    #[schema(example = "EPYC 9654")]
    cpu_model: Option<Label>,
    /// Logical processors, at least.
    cpu_cores: Option<CpuCores>,
    /// Of which 95 % are enough.
    memory_mib: Option<MemoryMib>,
    /// Of all local file systems together, of which 95 % are enough.
    storage_gib: Option<StorageGib>,
    /// The oldest version of the GPU driver.
    #[schema(example = "570.86.15")]
    driver_version_min: Option<DriverVersionText>,
}

/// What the machine of each node of the SKU must have.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ExpectedHardware)]
pub(in crate::api) struct ExpectedHardwareView {
    cpu_model: Option<String>,
    cpu_cores: Option<u32>,
    memory_mib: Option<u64>,
    storage_gib: Option<u64>,
    driver_version_min: Option<String>,
}

impl From<NewExpectedHardware> for ExpectedHardware {
    fn from(new: NewExpectedHardware) -> Self {
        Self {
            cpu_model: new.cpu_model.map(|model| model.to_string()),
            cpu_cores: new.cpu_cores.map(|cores| cores.0),
            memory_mib: new.memory_mib.map(|memory| memory.0),
            storage_gib: new.storage_gib.map(|storage| storage.0).filter(|storage| *storage > 0),
            driver_version_min: new.driver_version_min.and_then(|version| version.parse().ok()),
        }
    }
}

impl From<&ExpectedHardware> for ExpectedHardwareView {
    fn from(expected: &ExpectedHardware) -> Self {
        Self {
            cpu_model: expected.cpu_model.clone(),
            cpu_cores: expected.cpu_cores,
            memory_mib: expected.memory_mib,
            storage_gib: expected.storage_gib,
            driver_version_min: expected.driver_version_min.as_ref().map(ToString::to_string),
        }
    }
}
