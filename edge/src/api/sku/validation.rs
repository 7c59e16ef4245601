//! What a SKU wants of a validation of its machines.

use domain::validation::{Measurement, ValidationMinimums};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::request_fields::MeasurementMinimum;

/// The least that a machine of the SKU has to reach in its validation. What is absent has no minimum.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct SkuMinimums {
    /// Operations of stress-ng on one CPU while the others are idle.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_bogo_ops_per_second: Option<MeasurementMinimum>,
    /// Operations of stress-ng on all CPUs together. Deep validations alone measure it, and quick ones are not judged by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    all_cpus_bogo_ops_per_second: Option<MeasurementMinimum>,
    /// Reading or writing the memory by one CPU, the lower of both.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_mib_per_second: Option<MeasurementMinimum>,
    /// Writing a file in order, past the page cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_write_mib_per_second: Option<MeasurementMinimum>,
    /// Reading that file.
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_read_mib_per_second: Option<MeasurementMinimum>,
    /// Copying within the memory of the slowest GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_memory_mib_per_second: Option<MeasurementMinimum>,
    /// Copying from the machine's memory to the slowest GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_from_host_mib_per_second: Option<MeasurementMinimum>,
    /// Copying from the slowest GPU to the machine's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_to_host_mib_per_second: Option<MeasurementMinimum>,
    /// PCIe lanes of the GPU that has the fewest.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_pcie_lanes: Option<MeasurementMinimum>,
    /// PCIe generation of the slowest link, under load.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_pcie_generation: Option<MeasurementMinimum>,
}

impl SkuMinimums {
    fn field(&mut self, measurement: Measurement) -> &mut Option<MeasurementMinimum> {
        match measurement {
            Measurement::Cpu => &mut self.cpu_bogo_ops_per_second,
            Measurement::AllCpus => &mut self.all_cpus_bogo_ops_per_second,
            Measurement::Memory => &mut self.memory_mib_per_second,
            Measurement::DiskWrite => &mut self.disk_write_mib_per_second,
            Measurement::DiskRead => &mut self.disk_read_mib_per_second,
            Measurement::GpuMemory => &mut self.gpu_memory_mib_per_second,
            Measurement::GpuFromHost => &mut self.gpu_from_host_mib_per_second,
            Measurement::GpuToHost => &mut self.gpu_to_host_mib_per_second,
            Measurement::GpuPcieLanes => &mut self.gpu_pcie_lanes,
            Measurement::GpuPcieGeneration => &mut self.gpu_pcie_generation,
        }
    }
}

impl From<&SkuMinimums> for ValidationMinimums {
    fn from(given: &SkuMinimums) -> Self {
        let mut given = given.clone();
        let set = |it: &Measurement| Some((*it, given.field(*it).as_ref()?.0));
        Self(Measurement::ALL.iter().filter_map(set).collect())
    }
}

impl From<&ValidationMinimums> for SkuMinimums {
    fn from(minimums: &ValidationMinimums) -> Self {
        let mut view = Self::default();
        for (measurement, minimum) in &minimums.0 {
            *view.field(*measurement) = Some(MeasurementMinimum(*minimum));
        }
        view
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_measurement_has_a_field_of_its_name() {
        for (n, measurement) in (1..).zip(Measurement::ALL) {
            let minimums = ValidationMinimums([(*measurement, n)].into());
            let view = SkuMinimums::from(&minimums);
            assert_eq!(serde_json::to_value(&view).unwrap(), serde_json::json!({ measurement.name(): n }));
            assert_eq!(ValidationMinimums::from(&view), minimums);
        }
    }
}
