//! The node's GPUs: NVIDIA's through NVML, simulated ones, or none.

use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};
use uuid::Uuid;
use wire::inventory::{GpuInfo, GpuSource, GpuTopology};

use crate::gpu_probe::{GpuCondition, GpuError, GpuProbe, GpuSurvey, SurveyedGpu};

/// The simulation that `--simulate-gpus` configures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuSimulation {
    pub count: u32,
    pub model: String,
    pub memory_mib: u64,
}

/// The source of the list of GPUs.
pub enum Gpus {
    /// NVIDIA's driver is installed. Its library is called in a process of its own.
    Nvml(Box<GpuProbe>),
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
    /// No more than on a device on which nothing runs.
    DriverOnly,
    /// This much.
    Held { mib: u64 },
    /// Its kind of GPU has no memory of its own that the driver could report.
    NotReported,
    /// It could not be queried.
    Unknown(String),
}

/// The most memory in use on a device on which nothing runs. What the driver reserves for itself is not counted as in use (615 MiB on an H200
/// with driver 580). A process that has called `cuInit` shows as 3 MiB, and one with a context as 500 MiB.
const IDLE_MEMORY_MIB: u64 = 128;
/// How long the driver may take to free what an ended process had on a device.
const FREED_WITHIN: Duration = Duration::from_secs(15);
const FREED_CHECK_INTERVAL: Duration = Duration::from_millis(100);

impl Gpus {
    /// Uses the configured simulation, otherwise the driver if there is one. A driver that does not answer within `deadline` is there.
    #[must_use]
    pub fn detect(node_id: Uuid, simulated: Option<&GpuSimulation>, deadline: Duration) -> Self {
        if let Some(simulated) = simulated {
            return Self::Simulated(simulate(node_id, simulated));
        }
        let probe = GpuProbe::of_this_program(deadline);
        match probe.survey(false) {
            Err(GpuError::NotInstalled { why }) => Self::Absent { why },
            Ok(_)
            | Err(
                GpuError::NotLoaded
                | GpuError::Hung { .. }
                | GpuError::Driver { .. }
                | GpuError::NotReady { .. }
                | GpuError::Process { .. },
            ) => Self::Nvml(Box::new(probe)),
        }
    }

    /// Those of NVIDIA's driver, whether it answers or not.
    #[must_use]
    pub fn of_driver(deadline: Duration) -> Self {
        Self::Nvml(Box::new(GpuProbe::of_this_program(deadline)))
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

    /// The reading of all GPUs. `xid_events` also reads the driver's events.
    ///
    /// # Errors
    /// [`GpuError`], when the driver is installed and reports nothing at all.
    pub fn survey(&self, xid_events: bool) -> Result<GpuSurvey, GpuError> {
        let simulated = |info: &GpuInfo| SurveyedGpu {
            info: info.clone(),
            pci_address: None,
            load: None,
            condition: GpuCondition::default(),
        };
        match self {
            Self::Nvml(probe) => probe.survey(xid_events),
            Self::Simulated(gpus) => {
                Ok(GpuSurvey { gpus: gpus.iter().map(simulated).collect(), ..GpuSurvey::default() })
            }
            Self::Absent { .. } => Ok(GpuSurvey::default()),
        }
    }

    /// The GPUs that the driver reports, in order of index. One that is lost or cannot be read is left out.
    ///
    /// # Errors
    /// [`GpuError`], when the driver is installed and reports nothing at all.
    pub fn list(&self) -> Result<Vec<GpuInfo>, GpuError> {
        Ok(self.survey(false)?.gpus.into_iter().map(|gpu| gpu.info).collect())
    }

    /// The processes that compute or draw on a device at this moment.
    #[must_use]
    pub fn device_use(&self, uuid: &str) -> DeviceUse {
        match self {
            Self::Nvml(probe) => match probe.processes(uuid) {
                Ok(processes) if processes.is_empty() => DeviceUse::Idle,
                Ok(processes) => DeviceUse::BusyWith(processes),
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
            Self::Nvml(probe) => match probe.used_memory_mib(uuid) {
                Ok(None) => MemoryUse::NotReported,
                Ok(Some(mib)) if mib <= IDLE_MEMORY_MIB => MemoryUse::DriverOnly,
                Ok(Some(mib)) => MemoryUse::Held { mib },
                Err(error) => MemoryUse::Unknown(error.to_string()),
            },
            Self::Simulated(_) | Self::Absent { .. } => MemoryUse::DriverOnly,
        }
    }

    /// Waits until nothing uses the devices, as long as the driver may take to free what ended processes had on them.
    pub fn wait_until_freed<'a>(&self, uuids: impl Iterator<Item = &'a str> + Clone) {
        let begun = Instant::now();
        let is_used = |uuid: &str| {
            matches!(self.device_use(uuid), DeviceUse::BusyWith(_))
                || matches!(self.memory_use(uuid), MemoryUse::Held { .. })
        };
        while uuids.clone().any(is_used) && begun.elapsed() < FREED_WITHIN {
            std::thread::sleep(FREED_CHECK_INTERVAL);
        }
    }

    /// The number in the name of a device's node, `/dev/nvidiaN`. Simulated GPUs are numbered in list order.
    ///
    /// # Errors
    /// [`GpuError`], when the driver is installed and does not answer.
    pub fn minor_of(&self, uuid: &str) -> Result<Option<u32>, GpuError> {
        match self {
            Self::Nvml(probe) => probe.minor(uuid).map(Some),
            Self::Simulated(gpus) => Ok(gpus.iter().find(|gpu| gpu.uuid == uuid).map(|gpu| gpu.index)),
            Self::Absent { .. } => Ok(None),
        }
    }
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
            topology: GpuTopology::default(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn simulated(node: u128) -> Vec<GpuInfo> {
        let asked = GpuSimulation { count: 8, model: "H100".into(), memory_mib: 81_920 };
        Gpus::detect(Uuid::from_u128(node), Some(&asked), crate::gpu_probe::DEFAULT_DEADLINE).list().unwrap()
    }

    #[test]
    fn simulated_gpus_are_the_same_after_a_restart_and_different_on_another_node() {
        assert_eq!(simulated(1), simulated(1));
        let all: std::collections::BTreeSet<String> =
            [simulated(1), simulated(2)].concat().into_iter().map(|gpu| gpu.uuid).collect();
        assert_eq!(all.len(), 16);
        assert!(all.iter().all(|uuid| uuid.starts_with("GPU-") && uuid.len() == 40));
    }
}
