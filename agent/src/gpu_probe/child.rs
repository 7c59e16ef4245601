//! The child process: it answers requests with calls of NVIDIA's management library.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use nix::sys::signal::{Signal, raise};
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::event::EventSet;
use nvml_wrapper::struct_wrappers::device::PciInfo;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::{
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, NVML_FI_DEV_REMAPPED_FAILURE, NVML_FI_DEV_REMAPPED_PENDING,
};
use nvml_wrapper::{Device, Nvml};
use serde::Serialize;
use wire::heartbeat::GpuTelemetry;
use wire::inventory::{GpuInfo, GpuTopology, is_gpu_uuid};

use nvml_wrapper_sys::bindings::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES as NO_RESOURCES;

use super::fabric::FabricFunctions;
use super::pci_addresses::{DRIVER_GPUS, Unreadable, described};
use super::topology::{LinkedGpu, PCI_DEVICES, numa_node, nvlink_domains, remotes};
use super::{GpuCondition, GpuError, GpuSurvey, GpuTest, ProcessFault, Request, SurveyedGpu, cuda, probe};

/// With the number of its interface: the name without it belongs to development packages.
const LIBRARY: &str = "libnvidia-ml.so.1";
const MIB: u64 = 1024 * 1024;
/// The most GPUs that are read.
const MAX_GPUS: u32 = 64;
/// The most NVLinks of a GPU (`NVML_NVLINK_MAX_LINKS`).
const MAX_NVLINKS: u32 = 18;
/// The most events that one survey reads.
const MAX_EVENTS: usize = 1024;

/// Answers requests on standard input until it ends.
#[must_use]
pub fn serve() -> ExitCode {
    let requests = requests();
    let Some((nvml, first)) = initialised(&requests) else { return ExitCode::FAILURE };
    let mut session = Session { nvml: &nvml, events: None, fabric: FabricFunctions::load(LIBRARY) };
    for request in std::iter::once(first).chain(requests) {
        if session.answer(&request).is_err() {
            break;
        }
    }
    ExitCode::FAILURE
}

/// The library, with the first request that it can answer. Requests before are answered with the error.
fn initialised(requests: &Receiver<Request>) -> Option<(Nvml, Request)> {
    loop {
        let request = requests.recv().ok()?;
        match Nvml::builder().lib_path(LIBRARY.as_ref()).init() {
            Ok(nvml) => return Some((nvml, request)),
            Err(error) => write_answer(&Err::<(), _>(GpuError::from(error))).ok()?,
        }
    }
}

/// The requests on standard input. At its end the agent is gone, and this process ends although the driver may hang.
fn requests() -> Receiver<Request> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Some(request) = line.ok().and_then(|line| strict_json::from_str(&line).ok()) else { break };
            if sender.send(request).is_err() {
                break;
            }
        }
        let _ = raise(Signal::SIGKILL);
    });
    receiver
}

fn write_answer(answer: &Result<impl Serialize, GpuError>) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&line)?;
    stdout.flush()
}

impl From<NvmlError> for GpuError {
    fn from(error: NvmlError) -> Self {
        match error {
            NvmlError::LibloadingError(why) => Self::NotInstalled { why: why.to_string() },
            NvmlError::LibraryNotFound => {
                Self::NotInstalled { why: "the library of the driver is not found".to_owned() }
            }
            NvmlError::DriverNotLoaded => Self::NotLoaded,
            NvmlError::LibRmVersionMismatch => Self::Process {
                message: "the installed library is of another version than the loaded driver; reboot the machine"
                    .to_owned(),
                fault: ProcessFault::DriverReplaced,
            },
            // Of this process: its rights, its limits, the library that it has loaded. They say nothing about the programs of tenants.
            NvmlError::NoPermission
            | NvmlError::OperatingSystem
            | NvmlError::InsufficientMemory
            | NvmlError::FunctionNotFound
            | NvmlError::FailedToLoadSymbol(_)
            | NvmlError::UnexpectedVariant(NO_RESOURCES) => {
                Self::Process { message: error.to_string(), fault: ProcessFault::Other }
            }
            other => Self::Driver { message: other.to_string() },
        }
    }
}

struct Session<'nvml> {
    nvml: &'nvml Nvml,
    events: Option<EventSet<'nvml>>,
    fabric: FabricFunctions,
}

impl Session<'_> {
    fn answer(&mut self, request: &Request) -> std::io::Result<()> {
        let device = |uuid: &str| self.nvml.device_by_uuid(uuid);
        match request {
            Request::Survey { xid_events } => write_answer(&self.survey(*xid_events).map_err(GpuError::from)),
            Request::Processes { uuid } => {
                write_answer(&device(uuid).and_then(|device| processes(&device)).map_err(GpuError::from))
            }
            Request::UsedMemory { uuid } => {
                let memory = device(uuid).and_then(|device| supported(device.memory_info()));
                write_answer(&memory.map(|memory| memory.map(|memory| memory.used / MIB)).map_err(GpuError::from))
            }
            Request::Minor { uuid } => {
                write_answer(&device(uuid).and_then(|device| device.minor_number()).map_err(GpuError::from))
            }
            Request::Test { uuid, milliseconds, is_deep } => {
                let time = Duration::from_millis(*milliseconds);
                write_answer(&device(uuid).map(|device| tested(&device, uuid, time, *is_deep)).map_err(GpuError::from))
            }
        }
    }

    fn survey(&mut self, xid_events: bool) -> Result<GpuSurvey, NvmlError> {
        let driver_version = self.nvml.sys_driver_version().ok();
        let mut survey =
            GpuSurvey { driver_version, is_library_replaced: is_library_replaced(), ..GpuSurvey::default() };
        let (mut unreadable, mut linked) = (Vec::new(), Vec::new());
        for index in 0..self.nvml.device_count()?.min(MAX_GPUS) {
            let mut address = None;
            let gpu = self.nvml.device_by_index(index).and_then(|device| {
                address = pci_address(&device);
                let gpu = surveyed(&device, index, address.clone(), &self.fabric)?;
                linked.extend(linked_gpu(&device, &gpu));
                Ok(gpu)
            });
            match gpu {
                Ok(gpu) => survey.gpus.push(gpu),
                Err(NvmlError::GpuLost) => survey.lost += 1,
                Err(error) => unreadable.push(Unreadable { index, address, error: error.to_string() }),
            }
        }
        let domains = nvlink_domains(&linked);
        for gpu in &mut survey.gpus {
            gpu.info.topology.nvlink_domain = domains.get(&gpu.info.index).copied();
        }
        unreadable.extend(without_unnamed(&mut survey.gpus));
        unreadable.sort_by_key(|gpu| gpu.index);
        let read = survey.gpus.iter().filter_map(|gpu| gpu.pci_address.clone()).collect();
        survey.unreadable = described(&unreadable, &read, survey.lost, Path::new(DRIVER_GPUS));
        if xid_events {
            let mut counts = self.xids();
            for gpu in &mut survey.gpus {
                gpu.condition.xids = counts.remove(&gpu.info.uuid).unwrap_or_default().into_iter().collect();
            }
        }
        Ok(survey)
    }

    /// The Xids since the last call, by GPU. The first call only registers for them.
    fn xids(&mut self) -> BTreeMap<String, BTreeMap<u64, u64>> {
        let mut counts: BTreeMap<String, BTreeMap<u64, u64>> = BTreeMap::new();
        if self.events.is_none() {
            self.events = register(self.nvml).ok();
        }
        let Some(events) = &self.events else { return counts };
        let mut is_lost = false;
        for _ in 0..MAX_EVENTS {
            let event = match events.wait(0) {
                Ok(event) => event,
                Err(NvmlError::Timeout) => break,
                // A GPU of the set is lost, perhaps: the next survey registers the others.
                Err(_) => {
                    is_lost = true;
                    break;
                }
            };
            let Ok(uuid) = event.device.uuid() else { continue };
            if event.event_type.contains(EventTypes::CRITICAL_XID_ERROR) {
                *counts.entry(uuid).or_default().entry(number(event.event_data)).or_default() += 1;
            }
        }
        if is_lost {
            self.events = None;
        }
        counts
    }
}

/// Removes the GPUs whose UUID is invalid or not unique, and returns them as unreadable: a task or finding would reach another GPU.
fn without_unnamed(gpus: &mut Vec<SurveyedGpu>) -> Vec<Unreadable> {
    let mut named: BTreeMap<String, usize> = BTreeMap::new();
    for gpu in gpus.iter() {
        *named.entry(gpu.info.uuid.clone()).or_default() += 1;
    }
    let why = |gpu: &SurveyedGpu| {
        let uuid = gpu.info.uuid.as_str();
        if !is_gpu_uuid(uuid) {
            return Some(format!("its UUID names no GPU ({uuid:?})"));
        }
        (named.get(uuid) > Some(&1)).then(|| format!("another GPU has the same UUID ({uuid})"))
    };
    let mut unreadable = Vec::new();
    gpus.retain(|gpu| {
        let Some(error) = why(gpu) else { return true };
        unreadable.push(Unreadable { index: gpu.info.index, address: gpu.pci_address.clone(), error });
        false
    });
    unreadable
}

fn number(xid: Option<XidError>) -> u64 {
    match xid {
        Some(XidError::Value(number)) => number,
        Some(XidError::Unknown) | None => 0,
    }
}

/// For the events of each GPU that takes it: one that does not keeps none from the others.
fn register(nvml: &Nvml) -> Result<EventSet<'_>, NvmlError> {
    let mut refusing = BTreeSet::new();
    'all: loop {
        let mut set = nvml.create_event_set()?;
        for index in (0..nvml.device_count()?.min(MAX_GPUS)).filter(|index| !refusing.contains(index)) {
            let Ok(device) = nvml.device_by_index(index) else { continue };
            if device.supported_event_types().is_ok_and(|types| types.contains(EventTypes::CRITICAL_XID_ERROR)) {
                // The library's wrapper drops the whole set where one GPU refuses.
                let Ok(registered) = device.register_events(EventTypes::CRITICAL_XID_ERROR, set) else {
                    refusing.insert(index);
                    continue 'all;
                };
                set = registered;
            }
        }
        return Ok(set);
    }
}

/// True where the library that this process has loaded is not the installed one any more.
fn is_library_replaced() -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().any(|line| line.contains("/libnvidia-ml.so") && line.ends_with(" (deleted)"))
}

fn pci_address(device: &Device<'_>) -> Option<String> {
    device.pci_info().ok().map(|pci| address_of(&pci))
}

/// As the kernel log writes it.
pub(super) fn address_of(pci: &PciInfo) -> String {
    format!("{:04x}:{:02x}:{:02x}", pci.domain, pci.bus, pci.device)
}

/// A GPU without a UUID cannot be named. Everything else that the driver does not report is unknown.
fn surveyed(
    device: &Device<'_>,
    index: u32,
    pci_address: Option<String>,
    fabric: &FabricFunctions,
) -> Result<SurveyedGpu, NvmlError> {
    let uuid = device.uuid()?;
    let mut unreported = Vec::new();
    let name = owed("its name", device.name(), &mut unreported)?.unwrap_or_default();
    let memory = owed("its memory", device.memory_info(), &mut unreported)?;
    let load = GpuTelemetry {
        uuid: uuid.clone(),
        utilization_percent: device.utilization_rates().ok().map(|rates| rates.gpu),
        memory_used_mib: memory.as_ref().map(|memory| memory.used / MIB),
        temperature_celsius: device.temperature(TemperatureSensor::Gpu).ok(),
        power_milliwatts: device.power_usage().ok(),
    };
    let info = GpuInfo {
        index,
        uuid,
        vendor: "NVIDIA".to_owned(),
        model: name.strip_prefix("NVIDIA ").unwrap_or(&name).to_owned(),
        memory_mib: memory.map_or(0, |memory| memory.total / MIB),
        topology: GpuTopology {
            numa_node: pci_address.as_ref().and_then(|address| numa_node(address, Path::new(PCI_DEVICES))),
            nvlink_domain: None,
        },
    };
    let mut condition = GpuCondition { unreported, ..condition(device) };
    match fabric.read(device) {
        Ok(fabric) => condition.fabric = fabric,
        Err(_) => drop(condition.unread.insert(probe::GPU_FABRIC.to_owned())),
    }
    Ok(SurveyedGpu { info, pci_address, load: Some(load), condition })
}

fn linked_gpu(device: &Device<'_>, gpu: &SurveyedGpu) -> Option<LinkedGpu> {
    let active = gpu.condition.nvlinks_active.as_ref()?;
    Some(LinkedGpu { index: gpu.info.index, address: gpu.pci_address.clone()?, remotes: remotes(device, active) })
}

/// A property that every GPU has; `None` where the driver does not report it. That the GPU does not have it is no error.
fn owed<T>(what: &str, found: Result<T, NvmlError>, unreported: &mut Vec<String>) -> Result<Option<T>, NvmlError> {
    match found {
        Ok(value) => Ok(Some(value)),
        Err(NvmlError::GpuLost) => Err(NvmlError::GpuLost),
        Err(NvmlError::NotSupported) => Ok(None),
        Err(error) => {
            unreported.push(format!("{what}: {error}"));
            Ok(None)
        }
    }
}

/// All but the fabric, which the library's wrapper cannot read.
fn condition(device: &Device<'_>) -> GpuCondition {
    let mut unread = BTreeSet::new();
    let [pending, failed, action] = fields(
        device,
        [
            (NVML_FI_DEV_REMAPPED_PENDING, probe::ROW_REMAP),
            (NVML_FI_DEV_REMAPPED_FAILURE, probe::ROW_REMAP),
            (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, probe::RECOVERY_ACTION),
        ],
        &mut unread,
    );
    let errors = device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile);
    let ecc_uncorrectable = known(probe::ECC, errors, &mut unread);
    let width = known(probe::PCIE, device.current_pcie_link_width(), &mut unread);
    let widest = known(probe::PCIE, device.max_pcie_link_width(), &mut unread);
    let reasons = known(probe::SLOWDOWN, device.current_throttle_reasons(), &mut unread);
    let mig = known(probe::GPU_MODE, device.mig_mode(), &mut unread);
    let (nvlinks_active, nvlinks_unread) = nvlinks(device);
    if !nvlinks_unread.is_empty() {
        unread.insert(probe::NVLINK.to_owned());
    }
    GpuCondition {
        ecc_uncorrectable,
        remap_pending: pending.map(|value| value != 0),
        remap_failed: failed.map(|value| value != 0),
        recovery_action: action.and_then(|value| u32::try_from(value).ok()),
        slowdown_reasons: reasons.map(|reasons| reasons.bits()),
        nvlinks_active,
        nvlinks_unread,
        fabric: None,
        pcie_width: width.zip(widest),
        xids: Vec::new(),
        mig: mig.map(|mode| (mode.current != 0, mode.pending != 0)),
        compute_mode: known(probe::GPU_MODE, compute_mode(device), &mut unread),
        unreported: Vec::new(),
        unread,
    }
}

/// A value that a GPU may have; `None` where it does not, or where the driver does not say, which is noted for its probe.
fn known<T>(probe: &str, found: Result<T, NvmlError>, unread: &mut BTreeSet<String>) -> Option<T> {
    match found {
        Ok(value) => Some(value),
        Err(error) if is_absent(&error) => None,
        Err(_) => {
            unread.insert(probe.to_owned());
            None
        }
    }
}

/// Whether the GPU, or this driver, does not have what was asked for.
const fn is_absent(error: &NvmlError) -> bool {
    matches!(
        error,
        NvmlError::NotSupported
            | NvmlError::InvalidArg
            | NvmlError::FunctionNotFound
            | NvmlError::FailedToLoadSymbol(_)
            | NvmlError::NotFound
    )
}

/// Also a mode that the library's wrapper does not know.
fn compute_mode(device: &Device<'_>) -> Result<u32, NvmlError> {
    match device.compute_mode() {
        Ok(mode) => Ok(mode.as_c()),
        // The wrapper has names for all errors below.
        Err(NvmlError::UnexpectedVariant(mode)) if mode < NO_RESOURCES => Ok(mode),
        Err(error) => Err(error),
    }
}

/// What this kind of GPU does not have is no error.
fn supported<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Err(NvmlError::NotSupported) => Ok(None),
        answer => answer.map(Some),
    }
}

/// The processes with the GPU open for computing or drawing: the library lists each kind apart, and one process may be of both.
fn processes(device: &Device<'_>) -> Result<BTreeSet<u32>, NvmlError> {
    let computing = supported(device.running_compute_processes())?.unwrap_or_default();
    let drawing = supported(device.running_graphics_processes())?.unwrap_or_default();
    Ok(computing.iter().chain(&drawing).map(|process| process.pid).collect())
}

/// What a load on the GPU shows, between two readings of its error counters.
fn tested(device: &Device<'_>, uuid: &str, time: Duration, is_deep: bool) -> GpuTest {
    let before = condition(device).ecc_uncorrectable;
    let cuda = cuda::test(uuid, time, is_deep);
    let after = condition(device);
    GpuTest {
        pcie_lanes: after.pcie_width.map(|(lanes, _)| lanes),
        pcie_generation: device.current_pcie_link_gen().ok().filter(|_| cuda.is_ok()),
        new_ecc_errors: after.ecc_uncorrectable.zip(before).map(|(after, before)| after.saturating_sub(before)),
        recovery_action: after.recovery_action,
        cuda,
    }
}

/// The values of these fields, each where the driver and the GPU have it, with the probe that reads it.
fn fields<const N: usize>(
    device: &Device<'_>,
    fields: [(u32, &str); N],
    unread: &mut BTreeSet<String>,
) -> [Option<u64>; N] {
    let mut values = [None; N];
    let samples = match device.field_values_for(&fields.map(|(id, _)| FieldId(id))) {
        Ok(samples) => samples,
        Err(error) => {
            if !is_absent(&error) {
                unread.extend(fields.map(|(_, probe)| probe.to_owned()));
            }
            return values;
        }
    };
    for ((value, (_, probe)), sample) in values.iter_mut().zip(fields).zip(samples) {
        *value = known(probe, sample.and_then(|sample| sample.value), unread).and_then(|sample| match sample {
            SampleValue::U32(value) => Some(value.into()),
            SampleValue::U64(value) => Some(value),
            SampleValue::I64(value) => u64::try_from(value).ok(),
            SampleValue::F64(_) => None,
        });
    }
    values
}

/// The NVLinks that are up, where the GPU has any that can be read, and those of which the driver does not say it.
fn nvlinks(device: &Device<'_>) -> (Option<Vec<u32>>, Vec<u32>) {
    let (mut states, mut unread) = (Vec::new(), Vec::new());
    for link in 0..MAX_NVLINKS {
        match device.link_wrapper_for(link).is_active() {
            Ok(is_active) => states.push((link, is_active)),
            Err(error) if is_absent(&error) => {}
            Err(_) => unread.push(link),
        }
    }
    let active = states.iter().filter(|(_, is_active)| *is_active).map(|(link, _)| *link).collect();
    ((!states.is_empty()).then_some(active), unread)
}
