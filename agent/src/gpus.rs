//! The node's GPUs: NVIDIA's through NVML, made-up ones, or none.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;
use wire::heartbeat::GpuTelemetry;
use wire::inventory::{Gpu, GpuSource};

const MIB: u64 = 1024 * 1024;

/// What `--simulate-gpus` asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimulatedGpus {
    pub count: u32,
    pub model: String,
    pub memory_mib: u64,
}

/// Where GPUs are looked for.
pub enum Gpus {
    /// NVIDIA's driver is there.
    Nvml(Box<Nvml>),
    /// Made up; they compute nothing and can be held by nobody but the agent's own records.
    Simulated(Vec<Gpu>),
    /// No driver, and nothing simulated.
    Absent { why: String },
}

/// What was found on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceUse {
    /// Nothing runs on it.
    Idle,
    /// These processes use it.
    BusyWith(Vec<u32>),
    /// It could not be looked at.
    Unknown(String),
}

/// What a device's memory holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryUse {
    /// No more than the driver keeps for itself.
    DriverOnly,
    /// So much beyond that.
    Held { mib: u64 },
    /// It could not be looked at.
    Unknown(String),
}

/// What a driver with its persistence daemon keeps on an idle device at the most.
const OF_THE_DRIVER_MIB: u64 = 1024;

impl Gpus {
    /// Uses what was asked to be simulated, else the driver where there is one.
    #[must_use]
    pub fn detect(node_id: Uuid, simulated: Option<&SimulatedGpus>) -> Self {
        if let Some(simulated) = simulated {
            return Self::Simulated(make_up(node_id, simulated));
        }
        match Nvml::init() {
            Ok(nvml) => Self::Nvml(Box::new(nvml)),
            Err(error) => Self::Absent { why: error.to_string() },
        }
    }

    /// Where the list comes from.
    #[must_use]
    pub fn source(&self) -> GpuSource {
        match self {
            Self::Nvml(_) => GpuSource::Nvml,
            Self::Simulated(_) => GpuSource::Simulated,
            Self::Absent { .. } => GpuSource::None,
        }
    }

    /// All GPUs, in order of index. One that the driver says is lost is not among them.
    ///
    /// # Errors
    /// The driver's, when it is there and does not answer: then nothing is known of any of them.
    pub fn list(&self) -> Result<Vec<Gpu>, NvmlError> {
        match self {
            Self::Nvml(nvml) => there((0..nvml.device_count()?).map(|index| read_gpu(nvml, index))),
            Self::Simulated(gpus) => Ok(gpus.clone()),
            Self::Absent { .. } => Ok(Vec::new()),
        }
    }

    /// Load of each GPU. Made-up GPUs have none.
    #[must_use]
    pub fn telemetry(&self) -> Vec<GpuTelemetry> {
        match self {
            Self::Nvml(nvml) => {
                (0..nvml.device_count().unwrap_or(0)).filter_map(|index| read_load(nvml, index).ok()).collect()
            }
            Self::Simulated(_) | Self::Absent { .. } => Vec::new(),
        }
    }

    /// Which processes compute on a device at this moment.
    #[must_use]
    pub fn look_at(&self, uuid: &str) -> DeviceUse {
        match self {
            Self::Nvml(nvml) => match nvml.device_by_uuid(uuid).and_then(|device| device.running_compute_processes()) {
                Ok(processes) if processes.is_empty() => DeviceUse::Idle,
                Ok(processes) => DeviceUse::BusyWith(processes.into_iter().map(|process| process.pid).collect()),
                Err(error) => DeviceUse::Unknown(error.to_string()),
            },
            Self::Simulated(_) | Self::Absent { .. } => DeviceUse::Idle,
        }
    }

    /// What is kept in a device's memory at this moment. The driver clears a page before it gives it to another process, so this
    /// tells of processes that NVML does not list.
    #[must_use]
    pub fn memory_of(&self, uuid: &str) -> MemoryUse {
        match self {
            Self::Nvml(nvml) => match nvml.device_by_uuid(uuid).and_then(|device| device.memory_info()) {
                Ok(memory) if memory.used / MIB <= OF_THE_DRIVER_MIB => MemoryUse::DriverOnly,
                Ok(memory) => MemoryUse::Held { mib: memory.used / MIB },
                Err(error) => MemoryUse::Unknown(error.to_string()),
            },
            Self::Simulated(_) | Self::Absent { .. } => MemoryUse::DriverOnly,
        }
    }

    /// The number in the name of a device's node, `/dev/nvidiaN`. Made-up GPUs are numbered as they are listed.
    ///
    /// # Errors
    /// The driver's, when it is there and does not answer.
    pub fn minor_of(&self, uuid: &str) -> Result<Option<u32>, NvmlError> {
        match self {
            Self::Nvml(nvml) => nvml.device_by_uuid(uuid)?.minor_number().map(Some),
            Self::Simulated(gpus) => Ok(gpus.iter().find(|gpu| gpu.uuid == uuid).map(|gpu| gpu.index)),
            Self::Absent { .. } => Ok(None),
        }
    }
}

/// A GPU that has fallen off its bus is gone, which is an answer; any other error is none.
fn there(read: impl Iterator<Item = Result<Gpu, NvmlError>>) -> Result<Vec<Gpu>, NvmlError> {
    read.filter(|gpu| !matches!(gpu, Err(NvmlError::GpuLost))).collect()
}

fn read_gpu(nvml: &Nvml, index: u32) -> Result<Gpu, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let name = device.name()?;
    Ok(Gpu {
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

/// UUIDs follow from the node's id, so that a restarted agent has the same GPUs and two nodes never share one.
fn make_up(node_id: Uuid, simulated: &SimulatedGpus) -> Vec<Gpu> {
    let uuid = |index: u32| {
        let digest = Sha256::new().chain_update(node_id.as_bytes()).chain_update(index.to_be_bytes()).finalize();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        uuid::Builder::from_random_bytes(bytes).into_uuid()
    };
    (0..simulated.count)
        .map(|index| Gpu {
            index,
            uuid: format!("GPU-{}", uuid(index)),
            vendor: "NVIDIA".to_owned(),
            model: simulated.model.clone(),
            memory_mib: simulated.memory_mib,
        })
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use super::*;

    fn simulated(node: u128) -> Vec<Gpu> {
        let asked = SimulatedGpus { count: 8, model: "H100".into(), memory_mib: 81_920 };
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
    fn a_gpu_that_fell_off_its_bus_is_missing_and_a_driver_that_does_not_answer_says_nothing() {
        let gpus = || simulated(1).into_iter().map(Ok);
        let left = there(gpus().take(3).chain([Err(NvmlError::GpuLost)]).chain(gpus().skip(4))).unwrap();
        assert_eq!(left.len(), 7);
        assert!(matches!(there(gpus().chain([Err(NvmlError::Timeout)])), Err(NvmlError::Timeout)));
    }

    #[test]
    fn a_machine_answers_with_its_gpus_or_with_the_reason_why_it_has_none() {
        match Gpus::detect(Uuid::nil(), None) {
            Gpus::Absent { why } => assert!(!why.is_empty()),
            gpus @ Gpus::Nvml(_) => {
                let list = gpus.list().unwrap();
                assert!(list.iter().all(|gpu| gpu.uuid.starts_with("GPU-") && gpu.memory_mib > 0), "{list:?}");
                assert_eq!(gpus.telemetry().len(), list.len());
                for gpu in &list {
                    assert!(!matches!(gpus.look_at(&gpu.uuid), DeviceUse::Unknown(_)), "{gpu:?}");
                }
            }
            Gpus::Simulated(_) => panic!("nothing was asked to be simulated"),
        }
    }
}
