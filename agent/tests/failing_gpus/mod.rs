//! GPUs and a driver that fail, go and return: what may happen to them, and the machine as it is then.

use std::collections::BTreeSet;

use fake_nvml::{FakeGpu, FakeMachine};
use proptest::prelude::*;

/// What happens to a GPU or the driver.
#[derive(Debug, Clone, Copy)]
pub enum GpuOutage {
    /// Every call about the GPU answers this code (`nvmlReturn_t`).
    Fails {
        gpu: usize,
        code: u32,
    },
    /// One function of the library answers it, about all GPUs or one.
    CallFails {
        gpu: Option<usize>,
        call: &'static str,
        code: u32,
    },
    Falls {
        gpu: usize,
    },
    Vanishes {
        gpu: usize,
    },
    /// Its UUID is empty from here on.
    LosesItsName {
        gpu: usize,
    },
    /// The driver answers for it again, and nothing is left on it.
    Recovers {
        gpu: usize,
    },
    DriverHangs {
        hangs: bool,
    },
    DriverIsUnloaded {
        is_unloaded: bool,
    },
}

/// An outage of one of so many GPUs, or of one of these functions.
pub fn gpu_outage(gpus: usize, calls: &'static [&'static str]) -> impl Strategy<Value = GpuOutage> {
    use GpuOutage as O;
    let gpu = 0..gpus;
    // All codes of `nvmlReturn_t`, and one that none of them has.
    let code = || prop_oneof![1_u32..=30, Just(999), Just(500)];
    prop_oneof![
        3 => (gpu.clone(), code()).prop_map(|(gpu, code)| O::Fails { gpu, code }),
        4 => (prop::option::of(gpu.clone()), prop::sample::select(calls), code())
            .prop_map(|(gpu, call, code)| O::CallFails { gpu, call, code }),
        2 => gpu.clone().prop_map(|gpu| O::Falls { gpu }),
        2 => gpu.clone().prop_map(|gpu| O::Vanishes { gpu }),
        1 => gpu.clone().prop_map(|gpu| O::LosesItsName { gpu }),
        4 => gpu.prop_map(|gpu| O::Recovers { gpu }),
        1 => any::<bool>().prop_map(|hangs| O::DriverHangs { hangs }),
        1 => any::<bool>().prop_map(|is_unloaded| O::DriverIsUnloaded { is_unloaded }),
    ]
}

/// All GPUs of a machine, also those that it does not list at the moment.
pub struct FailingGpus {
    pub gpus: Vec<FakeGpu>,
    vanished: BTreeSet<usize>,
    unnamed: BTreeSet<usize>,
}

impl FailingGpus {
    pub fn of(machine: &FakeMachine) -> Self {
        Self { gpus: machine.gpus.clone(), vanished: BTreeSet::new(), unnamed: BTreeSet::new() }
    }

    /// The driver's part is written to the machine at once, that of the GPUs by [`FailingGpus::listed`].
    pub fn suffer(&mut self, outage: GpuOutage, machine: &mut FakeMachine) {
        match outage {
            GpuOutage::Fails { gpu, code } => self.gpus[gpu].error = Some(code),
            GpuOutage::CallFails { gpu, call, code } => {
                let errors = match gpu {
                    Some(gpu) => &mut self.gpus[gpu].errors,
                    None => &mut machine.errors,
                };
                errors.insert(call.to_owned(), code);
            }
            GpuOutage::Falls { gpu } => self.gpus[gpu].is_lost = true,
            GpuOutage::Vanishes { gpu } => drop(self.vanished.insert(gpu)),
            GpuOutage::LosesItsName { gpu } => drop(self.unnamed.insert(gpu)),
            GpuOutage::Recovers { gpu } => {
                self.vanished.remove(&gpu);
                self.unnamed.remove(&gpu);
                machine.errors.clear();
                machine.late_ms.clear();
                let found = &mut self.gpus[gpu];
                (found.error, found.is_lost, found.used_mib) = (None, false, 0);
                found.errors.clear();
            }
            GpuOutage::DriverHangs { hangs } => machine.hangs = hangs,
            GpuOutage::DriverIsUnloaded { is_unloaded } => machine.not_loaded = is_unloaded,
        }
    }

    /// Those that the machine lists.
    pub fn listed(&self) -> Vec<FakeGpu> {
        let there = self.gpus.iter().enumerate().filter(|(index, _)| !self.vanished.contains(index));
        let as_named = |(index, gpu): (usize, &FakeGpu)| {
            let uuid = if self.unnamed.contains(&index) { String::new() } else { gpu.uuid.clone() };
            FakeGpu { uuid, ..gpu.clone() }
        };
        there.map(as_named).collect()
    }

    /// Nothing can be known of it.
    pub fn is_silent(&self, gpu: usize, machine: &FakeMachine) -> bool {
        let found = &self.gpus[gpu];
        let is_absent = self.vanished.contains(&gpu) || self.unnamed.contains(&gpu);
        let is_gone = found.error.is_some() || found.is_lost || is_absent;
        is_gone || machine.hangs || machine.not_loaded
    }

    pub fn has_failing_calls(&self, gpu: usize, machine: &FakeMachine) -> bool {
        !self.gpus[gpu].errors.is_empty() || !machine.errors.is_empty() || !machine.late_ms.is_empty()
    }
}
