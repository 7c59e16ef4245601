//! The node's GPUs: NVIDIA's through NVML, simulated ones, or none.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;
use wire::heartbeat::GpuTelemetry;
use wire::inventory::{GpuInfo, GpuSource};

const MIB: u64 = 1024 * 1024;

/// The simulation that `--simulate-gpus` configures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuSimulation {
    pub count: u32,
    pub model: String,
    pub memory_mib: u64,
}

/// The source of the list of GPUs.
pub enum Gpus {
    /// NVIDIA's driver is installed.
    Nvml(Box<Nvml>),
    /// Simulated; they compute nothing, and only the agent's own records show who holds one.
    Simulated(Vec<GpuInfo>),
    /// No driver, and nothing simulated.
    Absent { why: String },
}

/// What uses a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceUse {
    /// Nothing runs on it.
    Idle,
    /// These processes use it.
    BusyWith(Vec<u32>),
    /// It could not be queried.
    Unknown(String),
}

/// What a device's memory holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryUse {
    /// No more than the driver's own reservation.
    DriverOnly,
    /// This much beyond the driver's reservation.
    Held { mib: u64 },
    /// It could not be queried.
    Unknown(String),
}

/// The most that a driver with its persistence daemon reserves on an idle device.
const OF_THE_DRIVER_MIB: u64 = 1024;

impl Gpus {
    /// Uses the configured simulation, otherwise the driver if there is one.
    #[must_use]
    pub fn detect(node_id: Uuid, simulated: Option<&GpuSimulation>) -> Self {
        if let Some(simulated) = simulated {
            return Self::Simulated(simulate(node_id, simulated));
        }
        match Nvml::init() {
            Ok(nvml) => Self::Nvml(Box::new(nvml)),
            Err(error) => Self::Absent { why: error.to_string() },
        }
    }

    /// The source of the list.
    #[must_use]
    pub fn source(&self) -> GpuSource {
        match self {
            Self::Nvml(_) => GpuSource::Nvml,
            Self::Simulated(_) => GpuSource::Simulated,
            Self::Absent { .. } => GpuSource::None,
        }
    }

    /// All GPUs, in order of index. A GPU that the driver reports as lost is left out.
    ///
    /// # Errors
    /// The driver's, when it is installed and does not answer: then nothing is known of any of them.
    pub fn list(&self) -> Result<Vec<GpuInfo>, NvmlError> {
        match self {
            Self::Nvml(nvml) => present((0..nvml.device_count()?).map(|index| read_gpu(nvml, index))),
            Self::Simulated(gpus) => Ok(gpus.clone()),
            Self::Absent { .. } => Ok(Vec::new()),
        }
    }

    /// Load of each GPU. Simulated GPUs have none.
    #[must_use]
    pub fn telemetry(&self) -> Vec<GpuTelemetry> {
        match self {
            Self::Nvml(nvml) => {
                (0..nvml.device_count().unwrap_or(0)).filter_map(|index| read_load(nvml, index).ok()).collect()
            }
            Self::Simulated(_) | Self::Absent { .. } => Vec::new(),
        }
    }

    /// The processes that compute on a device at this moment.
    #[must_use]
    pub fn device_use(&self, uuid: &str) -> DeviceUse {
        match self {
            Self::Nvml(nvml) => match nvml.device_by_uuid(uuid).and_then(|device| device.running_compute_processes()) {
                Ok(processes) if processes.is_empty() => DeviceUse::Idle,
                Ok(processes) => DeviceUse::BusyWith(processes.into_iter().map(|process| process.pid).collect()),
                Err(error) => DeviceUse::Unknown(error.to_string()),
            },
            Self::Simulated(_) | Self::Absent { .. } => DeviceUse::Idle,
        }
    }

    /// What a device's memory holds at this moment. The driver clears a page before it gives it to another process, so this also shows
    /// processes that NVML does not list.
    #[must_use]
    pub fn memory_use(&self, uuid: &str) -> MemoryUse {
        match self {
            Self::Nvml(nvml) => match nvml.device_by_uuid(uuid).and_then(|device| device.memory_info()) {
                Ok(memory) if memory.used / MIB <= OF_THE_DRIVER_MIB => MemoryUse::DriverOnly,
                Ok(memory) => MemoryUse::Held { mib: memory.used / MIB },
                Err(error) => MemoryUse::Unknown(error.to_string()),
            },
            Self::Simulated(_) | Self::Absent { .. } => MemoryUse::DriverOnly,
        }
    }

    /// The number in the name of a device's node, `/dev/nvidiaN`. Simulated GPUs are numbered in list order.
    ///
    /// # Errors
    /// The driver's, when it is installed and does not answer.
    pub fn minor_of(&self, uuid: &str) -> Result<Option<u32>, NvmlError> {
        match self {
            Self::Nvml(nvml) => nvml.device_by_uuid(uuid)?.minor_number().map(Some),
            Self::Simulated(gpus) => Ok(gpus.iter().find(|gpu| gpu.uuid == uuid).map(|gpu| gpu.index)),
            Self::Absent { .. } => Ok(None),
        }
    }
}

/// A GPU that has fallen off its bus is absent, which is a valid answer; any other error is not.
fn present(read: impl Iterator<Item = Result<GpuInfo, NvmlError>>) -> Result<Vec<GpuInfo>, NvmlError> {
    read.filter(|gpu| !matches!(gpu, Err(NvmlError::GpuLost))).collect()
}

fn read_gpu(nvml: &Nvml, index: u32) -> Result<GpuInfo, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let name = device.name()?;
    Ok(GpuInfo {
        index,
        uuid: device.uuid()?,
        vendor: "NVIDIA".to_owned(),
        model: name.strip_prefix("NVIDIA ").unwrap_or(&name).to_owned(),
        memory_mib: device.memory_info()?.total / MIB,
    })
}

fn read_load(nvml: &Nvml, index: u32) -> Result<GpuTelemetry, NvmlError> {
    let device = nvml.device_by_index(index)?;
    Ok(GpuTelemetry {
        uuid: device.uuid()?,
        utilization_percent: device.utilization_rates().ok().map(|rates| rates.gpu),
        memory_used_mib: device.memory_info().ok().map(|memory| memory.used / MIB),
        temperature_celsius: device.temperature(TemperatureSensor::Gpu).ok(),
        power_milliwatts: device.power_usage().ok(),
    })
}

/// UUIDs are derived from the node's id, so that a restarted agent has the same GPUs and two nodes never share one.
fn simulate(node_id: Uuid, simulated: &GpuSimulation) -> Vec<GpuInfo> {
    let uuid = |index: u32| {
        let digest = Sha256::new().chain_update(node_id.as_bytes()).chain_update(index.to_be_bytes()).finalize();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        uuid::Builder::from_random_bytes(bytes).into_uuid()
    };
    (0..simulated.count)
        .map(|index| GpuInfo {
            index,
            uuid: format!("GPU-{}", uuid(index)),
            vendor: "NVIDIA".to_owned(),
            model: simulated.model.clone(),
            memory_mib: simulated.memory_mib,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn simulated(node: u128) -> Vec<GpuInfo> {
        let asked = GpuSimulation { count: 8, model: "H100".into(), memory_mib: 81_920 };
        Gpus::detect(Uuid::from_u128(node), Some(&asked)).list().unwrap()
    }

    #[test]
    fn simulated_gpus_are_the_same_after_a_restart_and_different_on_another_node() {
        assert_eq!(simulated(1), simulated(1));
        let all: std::collections::BTreeSet<String> =
            [simulated(1), simulated(2)].concat().into_iter().map(|gpu| gpu.uuid).collect();
        assert_eq!(all.len(), 16);
        assert!(all.iter().all(|uuid| uuid.starts_with("GPU-") && uuid.len() == 40));
    }

    #[test]
    fn lost_gpu_is_missing_and_unresponsive_driver_is_an_error() {
        let gpus = || simulated(1).into_iter().map(Ok);
        let left = present(gpus().take(3).chain([Err(NvmlError::GpuLost)]).chain(gpus().skip(4))).unwrap();
        assert_eq!(left.len(), 7);
        assert!(matches!(present(gpus().chain([Err(NvmlError::Timeout)])), Err(NvmlError::Timeout)));
    }

    #[test]
    fn detection_lists_gpus_or_says_why_there_are_none() {
        match Gpus::detect(Uuid::nil(), None) {
            Gpus::Absent { why } => assert!(!why.is_empty()),
            gpus @ Gpus::Nvml(_) => {
                let list = gpus.list().unwrap();
                assert!(list.iter().all(|gpu| gpu.uuid.starts_with("GPU-") && gpu.memory_mib > 0), "{list:?}");
                assert_eq!(gpus.telemetry().len(), list.len());
                for gpu in &list {
                    assert!(!matches!(gpus.device_use(&gpu.uuid), DeviceUse::Unknown(_)), "{gpu:?}");
                }
            }
            Gpus::Simulated(_) => panic!("nothing was asked to be simulated"),
        }
    }
}
