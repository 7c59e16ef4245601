//! The library's functions, with the names and types of `nvml.h`.
#![allow(unsafe_code, non_snake_case)]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings as nvml;
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlEventSet_t, nvmlReturn_t};

use crate::{FILE, FakeFabric, FakeFabricVersion, FakeGpu, FakeMachine};

const SUCCESS: nvmlReturn_t = nvml::nvmlReturn_enum_NVML_SUCCESS;
const INVALID: nvmlReturn_t = nvml::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
const NOT_FOUND: nvmlReturn_t = nvml::nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
const NOT_LOADED: nvmlReturn_t = nvml::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED;
const NOT_SUPPORTED: nvmlReturn_t = nvml::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
const LOST: nvmlReturn_t = nvml::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST;
const TIMEOUT: nvmlReturn_t = nvml::nvmlReturn_enum_NVML_ERROR_TIMEOUT;
const TOO_SMALL: nvmlReturn_t = nvml::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;
const WRONG_VERSION: nvmlReturn_t = nvml::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
const FUNCTION_NOT_FOUND: nvmlReturn_t = nvml::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND;
const NO_RESOURCES: nvmlReturn_t = nvml::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES;
const REPLACED: nvmlReturn_t = nvml::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH;
const UNKNOWN: nvmlReturn_t = nvml::nvmlReturn_enum_NVML_ERROR_UNKNOWN;
const MIB: u64 = 1024 * 1024;
/// What the driver has of a GPU's memory for itself.
const RESERVED: u64 = 480 * MIB;

/// The UUIDs of the devices that were opened. A device's handle is its place here, from 1: it stays when the order of the GPUs changes.
static HANDLES: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// How many Xids the event set has delivered.
static DELIVERED: Mutex<usize> = Mutex::new(0);

/// How often a function that does not answer looks whether it does.
const POLL: Duration = Duration::from_millis(20);

/// The machine when this function answers.
fn machine(function: &str) -> Result<FakeMachine, nvmlReturn_t> {
    let begun = Instant::now();
    loop {
        let machine = machine_of_any_function()?;
        let late = of_function(function, &machine.late_ms).map_or(Duration::ZERO, |late| Duration::from_millis(*late));
        if begun.elapsed() >= late {
            return answered(function, &machine.errors).map(|()| machine);
        }
        std::thread::sleep(POLL.min(late));
    }
}

/// Fails where the function is to answer with a code.
fn answered(function: &str, errors: &BTreeMap<String, u32>) -> Result<(), nvmlReturn_t> {
    of_function(function, errors).map_or(Ok(()), |code| Err(*code))
}

/// What is set for a function, with or without the number of its version.
fn of_function<'a, T>(function: &str, set: &'a BTreeMap<String, T>) -> Option<&'a T> {
    let without_version = function.rsplit_once("_v").map_or(function, |(name, _)| name);
    set.get(function).or_else(|| set.get(without_version))
}

/// The machine at this moment, once it does not hang.
fn machine_of_any_function() -> Result<FakeMachine, nvmlReturn_t> {
    let file = std::env::var_os(FILE).ok_or(NOT_LOADED)?;
    loop {
        let machine = FakeMachine::read(Path::new(&file)).map_err(|_| UNKNOWN)?;
        if machine.not_loaded {
            return Err(NOT_LOADED);
        }
        if !machine.hangs {
            return Ok(machine);
        }
        std::thread::sleep(POLL);
    }
}

fn handle(uuid: &str) -> nvmlDevice_t {
    let mut handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = handles.iter().position(|known| known == uuid).unwrap_or_else(|| {
        handles.push(uuid.to_owned());
        handles.len() - 1
    });
    std::ptr::without_provenance_mut(known + 1)
}

/// The GPU of a handle, as this function answers.
fn gpu(function: &str, device: nvmlDevice_t) -> Result<(usize, FakeGpu), nvmlReturn_t> {
    let uuid = {
        let handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
        device.addr().checked_sub(1).and_then(|index| handles.get(index).cloned()).ok_or(INVALID)?
    };
    let gpus = machine(function)?.gpus;
    let (index, gpu) = gpus.into_iter().enumerate().find(|(_, gpu)| gpu.uuid == uuid).ok_or(LOST)?;
    opened(&gpu)?;
    answered(function, &gpu.errors)?;
    Ok((index, gpu))
}

fn opened(gpu: &FakeGpu) -> Result<(), nvmlReturn_t> {
    if gpu.is_lost { Err(LOST) } else { gpu.error.map_or(Ok(()), Err) }
}

/// Writes what a function found to the place that its caller gave.
fn give<T>(out: *mut T, found: Result<T, nvmlReturn_t>) -> nvmlReturn_t {
    match found {
        Ok(_) if out.is_null() => INVALID,
        Ok(value) => {
            // SAFETY: the callers of the library give a valid place for the value, by its interface.
            unsafe { out.write(value) };
            SUCCESS
        }
        Err(code) => code,
    }
}

fn give_text(out: *mut c_char, length: c_uint, found: Result<String, nvmlReturn_t>) -> nvmlReturn_t {
    let text = match found {
        Ok(text) => text,
        Err(code) => return code,
    };
    if out.is_null() || text.len() >= length as usize {
        return TOO_SMALL;
    }
    // SAFETY: by the library's interface there are `length` bytes at `out`, which the text and its end fit into.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), out, text.len());
        out.add(text.len()).write(0);
    }
    SUCCESS
}

fn done(found: Result<FakeMachine, nvmlReturn_t>) -> nvmlReturn_t {
    found.map_or_else(|code| code, |_| SUCCESS)
}

/// A function that gives one value of a device.
macro_rules! of_device {
    ($($name:ident -> $type:ty = |$index:ident, $gpu:ident| $value:expr;)+) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name(device: nvmlDevice_t, out: *mut $type) -> nvmlReturn_t {
            give(out, gpu(stringify!($name), device).and_then(|($index, $gpu)| $value))
        }
    )+};
}

of_device! {
    nvmlDeviceGetMemoryInfo -> nvml::nvmlMemory_t = |_index, gpu| {
        // The first version of the structure counts what the driver reserves as used.
        let (total, used) = (gpu.memory_mib * MIB, RESERVED + gpu.used_mib * MIB);
        Ok(nvml::nvmlMemory_t { total, used, free: total.saturating_sub(used) })
    };
    nvmlDeviceGetMemoryInfo_v2 -> nvml::nvmlMemory_v2_t = |_index, gpu| {
        let (total, used, reserved) = (gpu.memory_mib * MIB, gpu.used_mib * MIB, RESERVED);
        Ok(nvml::nvmlMemory_v2_t { version: 0, total, reserved, used, free: total.saturating_sub(reserved + used) })
    };
    nvmlDeviceGetUtilizationRates -> nvml::nvmlUtilization_t = |_index, _gpu| {
        Ok(nvml::nvmlUtilization_t { gpu: 0, memory: 0 })
    };
    nvmlDeviceGetPowerUsage -> c_uint = |_index, _gpu| Ok(70_000);
    nvmlDeviceGetMinorNumber -> c_uint = |index, gpu| {
        gpu.minor.map_or_else(|| c_uint::try_from(index).map_err(|_| INVALID), Ok)
    };
    nvmlDeviceGetCurrentClocksThrottleReasons -> c_ulonglong = |_index, gpu| gpu.slowdown_reasons.ok_or(NOT_SUPPORTED);
    nvmlDeviceGetCurrPcieLinkWidth -> c_uint = |_index, gpu| gpu.pcie_width.map(|width| width.0).ok_or(NOT_SUPPORTED);
    nvmlDeviceGetMaxPcieLinkWidth -> c_uint = |_index, gpu| gpu.pcie_width.map(|width| width.1).ok_or(NOT_SUPPORTED);
    nvmlDeviceGetSupportedEventTypes -> c_ulonglong = |_index, _gpu| Ok(nvml::nvmlEventTypeXidCriticalError.into());
    nvmlDeviceGetComputeMode -> nvml::nvmlComputeMode_t = |_index, gpu| gpu.compute_mode.ok_or(NOT_SUPPORTED);
    nvmlDeviceGetPciInfo_v3 -> nvml::nvmlPciInfo_t = |_index, gpu| Ok(pci_info_of_bus(gpu.pci_bus));
}

fn pci_info_of_bus(bus: u32) -> nvml::nvmlPciInfo_t {
    let mut info = nvml::nvmlPciInfo_t {
        busIdLegacy: [0; 16],
        domain: 0,
        bus,
        device: 0,
        pciDeviceId: 0x2330_10de,
        pciSubSystemId: 0,
        busId: [0; 32],
    };
    let copy = |text: String, into: &mut [c_char]| {
        for (to, from) in into.iter_mut().zip(text.bytes()) {
            *to = c_char::from_ne_bytes([from]);
        }
    };
    copy(format!("0000:{bus:02X}:00.0"), &mut info.busIdLegacy);
    copy(format!("00000000:{bus:02X}:00.0"), &mut info.busId);
    info
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> nvmlReturn_t {
    done(machine("nvmlInit_v2"))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> nvmlReturn_t {
    done(machine("nvmlInit_v2"))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> nvmlReturn_t {
    // It does not wait for a driver that hangs.
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: nvmlReturn_t) -> *const c_char {
    let text: &CStr = match code {
        SUCCESS => c"Success",
        NOT_LOADED => c"Driver Not Loaded",
        LOST => c"GPU is lost",
        REPLACED => c"Driver/library version mismatch",
        NOT_SUPPORTED => c"Not Supported",
        NO_RESOURCES => c"Insufficient Resources",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> nvmlReturn_t {
    give_text(version, length, machine("nvmlSystemGetDriverVersion").map(|_| "580.159.04".to_owned()))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> nvmlReturn_t {
    give(
        count,
        machine("nvmlDeviceGetCount_v2").and_then(|machine| c_uint::try_from(machine.gpus.len()).map_err(|_| UNKNOWN)),
    )
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut nvmlDevice_t) -> nvmlReturn_t {
    let found = machine("nvmlDeviceGetHandleByIndex_v2").and_then(|machine| {
        let gpu = machine.gpus.get(index as usize).ok_or(INVALID)?;
        opened(gpu)?;
        answered("nvmlDeviceGetHandleByIndex", &gpu.errors).map(|()| handle(&gpu.uuid))
    });
    give(device, found)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut nvmlDevice_t) -> nvmlReturn_t {
    if uuid.is_null() {
        return INVALID;
    }
    // SAFETY: by the library's interface it is a C string.
    let uuid = unsafe { CStr::from_ptr(uuid) }.to_string_lossy();
    let found = machine("nvmlDeviceGetHandleByUUID").and_then(|machine| {
        let gpu = machine.gpus.iter().find(|gpu| gpu.uuid == uuid).ok_or(NOT_FOUND)?;
        opened(gpu)?;
        answered("nvmlDeviceGetHandleByUUID", &gpu.errors).map(|()| handle(&gpu.uuid))
    });
    give(device, found)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetName(device: nvmlDevice_t, name: *mut c_char, length: c_uint) -> nvmlReturn_t {
    give_text(name, length, gpu("nvmlDeviceGetName", device).map(|(_, gpu)| gpu.name))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUUID(device: nvmlDevice_t, uuid: *mut c_char, length: c_uint) -> nvmlReturn_t {
    give_text(uuid, length, gpu("nvmlDeviceGetUUID", device).map(|(_, gpu)| gpu.uuid))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTemperature(
    device: nvmlDevice_t,
    _sensor: c_uint,
    temperature: *mut c_uint,
) -> nvmlReturn_t {
    give(temperature, gpu("nvmlDeviceGetTemperature", device).map(|_| 40))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvml::nvmlProcessInfo_t,
) -> nvmlReturn_t {
    give_processes(count, infos, gpu("nvmlDeviceGetComputeRunningProcesses_v3", device).map(|(_, gpu)| gpu.computing))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvml::nvmlProcessInfo_t,
) -> nvmlReturn_t {
    give_processes(
        count,
        infos,
        gpu("nvmlDeviceGetGraphicsRunningProcesses_v3", device).and_then(|(_, gpu)| gpu.drawing.ok_or(NOT_SUPPORTED)),
    )
}

/// Without room for all of them, it gives how many there are.
fn give_processes(
    count: *mut c_uint,
    infos: *mut nvml::nvmlProcessInfo_t,
    found: Result<Vec<u32>, nvmlReturn_t>,
) -> nvmlReturn_t {
    let pids = match found {
        Ok(pids) => pids,
        Err(code) => return code,
    };
    let Ok(found) = c_uint::try_from(pids.len()) else { return UNKNOWN };
    if count.is_null() {
        return INVALID;
    }
    // SAFETY: by the library's interface the place has the number of entries at `infos`, and gets the number of those that were written.
    let room = unsafe { count.replace(found) };
    if found > room || (infos.is_null() && found > 0) {
        return TOO_SMALL;
    }
    for (index, pid) in pids.into_iter().enumerate() {
        let (gpuInstanceId, computeInstanceId) = (u32::MAX, u32::MAX);
        let info = nvml::nvmlProcessInfo_t { pid, usedGpuMemory: 526 * MIB, gpuInstanceId, computeInstanceId };
        // SAFETY: there are so many entries.
        unsafe { infos.add(index).write(info) };
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigMode(device: nvmlDevice_t, current: *mut c_uint, pending: *mut c_uint) -> nvmlReturn_t {
    let found = gpu("nvmlDeviceGetMigMode", device).and_then(|(_, gpu)| gpu.mig.ok_or(NOT_SUPPORTED));
    match give(current, found.map(|(current, _)| current)) {
        SUCCESS => give(pending, found.map(|(_, pending)| pending)),
        code => code,
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTotalEccErrors(
    device: nvmlDevice_t,
    error_type: c_uint,
    _counter: c_uint,
    count: *mut c_ulonglong,
) -> nvmlReturn_t {
    let is_uncorrected = error_type == nvml::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED;
    let errors = |gpu: FakeGpu| gpu.ecc_uncorrectable.map(|errors| if is_uncorrected { errors } else { 0 });
    give(count, gpu("nvmlDeviceGetTotalEccErrors", device).and_then(|(_, gpu)| errors(gpu).ok_or(NOT_SUPPORTED)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkState(device: nvmlDevice_t, link: c_uint, is_active: *mut c_uint) -> nvmlReturn_t {
    let state = |gpu: FakeGpu| gpu.nvlinks.get(link as usize).map(|is_active| (*is_active).into());
    give(is_active, gpu("nvmlDeviceGetNvLinkState", device).and_then(|(_, gpu)| state(gpu).ok_or(NOT_SUPPORTED)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: nvmlDevice_t,
    link: c_uint,
    out: *mut nvml::nvmlPciInfo_t,
) -> nvmlReturn_t {
    let remote = |gpu: FakeGpu| gpu.nvlink_remote_buses.get(link as usize).copied().map(pci_info_of_bus);
    let found = gpu("nvmlDeviceGetNvLinkRemotePciInfo_v2", device);
    give(out, found.and_then(|(_, gpu)| remote(gpu).ok_or(NOT_SUPPORTED)))
}

/// Sets the fields of a structure of the caller, and leaves the bytes between them as they are: some clients read a longer field than there is.
fn fill<T>(function: &str, out: *mut T, device: nvmlDevice_t, set: impl FnOnce(&mut T, FakeFabric)) -> nvmlReturn_t {
    match gpu(function, device).and_then(|(_, gpu)| gpu.fabric.ok_or(NOT_SUPPORTED)) {
        Ok(_) if out.is_null() => INVALID,
        Ok(fabric) => {
            // SAFETY: by the library's interface the caller gives a structure, whose fields are numbers.
            set(unsafe { &mut *out }, fabric);
            SUCCESS
        }
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuFabricInfo(device: nvmlDevice_t, out: *mut nvml::nvmlGpuFabricInfo_t) -> nvmlReturn_t {
    fill("nvmlDeviceGetGpuFabricInfo", out, device, |info, fabric| {
        (info.clusterUuid, info.cliqueId) = ([0; 16], 0);
        (info.status, info.state) = (fabric.status, fabric.fabric_state);
    })
}

/// The version of the structure is in its first field, in the highest byte.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuFabricInfoV(device: nvmlDevice_t, out: *mut nvml::nvmlGpuFabricInfoV_t) -> nvmlReturn_t {
    if out.is_null() {
        return INVALID;
    }
    // SAFETY: by the library's interface the caller has set the version.
    let version = unsafe { (&raw const (*out).version).read() };
    let latest = match machine("nvmlDeviceGetGpuFabricInfoV") {
        Ok(machine) => machine.fabric_version,
        Err(code) => return code,
    };
    let size = c_uint::try_from(size_of::<nvml::nvmlGpuFabricInfo_v3_t>()).unwrap_or_default();
    let size_before = c_uint::try_from(size_of::<nvml::nvmlGpuFabricInfo_v2_t>()).unwrap_or_default();
    match latest {
        FakeFabricVersion::First => FUNCTION_NOT_FOUND,
        FakeFabricVersion::Third if version == size | (3 << 24) => {
            fill("nvmlDeviceGetGpuFabricInfoV", out, device, |info: &mut nvml::nvmlGpuFabricInfo_v3_t, fabric| {
                (info.clusterUuid, info.cliqueId) = ([0; 16], 0);
                (info.status, info.state) = (fabric.status, fabric.fabric_state);
                (info.healthMask, info.healthSummary) = (fabric.health_mask, fabric.health_summary);
            })
        }
        FakeFabricVersion::Second | FakeFabricVersion::Third if version == size_before | (2 << 24) => fill(
            "nvmlDeviceGetGpuFabricInfoV",
            out.cast(),
            device,
            |info: &mut nvml::nvmlGpuFabricInfo_v2_t, fabric| {
                (info.clusterUuid, info.cliqueId) = ([0; 16], 0);
                (info.status, info.state, info.healthMask) = (fabric.status, fabric.fabric_state, fabric.health_mask);
            },
        ),
        FakeFabricVersion::Second | FakeFabricVersion::Third => WRONG_VERSION,
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetFieldValues(
    device: nvmlDevice_t,
    count: c_int,
    values: *mut nvml::nvmlFieldValue_t,
) -> nvmlReturn_t {
    let gpu = match gpu("nvmlDeviceGetFieldValues", device) {
        Ok((_, gpu)) => gpu,
        Err(code) => return code,
    };
    let Ok(count) = usize::try_from(count) else { return INVALID };
    if values.is_null() {
        return INVALID;
    }
    // SAFETY: by the library's interface there are `count` values.
    for value in unsafe { std::slice::from_raw_parts_mut(values, count) } {
        // The types are those that driver 580 gives.
        let long = |found: u32| (nvml::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, found);
        let found = match value.fieldId {
            nvml::field_id::NVML_FI_DEV_REMAPPED_PENDING => gpu.remap_pending.map(u32::from).map(long),
            nvml::field_id::NVML_FI_DEV_REMAPPED_FAILURE => gpu.remap_failed.map(u32::from).map(long),
            nvml::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION => {
                gpu.recovery_action.map(|action| (nvml::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT, action))
            }
            _ => None,
        };
        value.nvmlReturn = if found.is_some() { SUCCESS } else { NOT_SUPPORTED };
        let (value_type, found) = found.unwrap_or((nvml::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT, 0));
        value.valueType = value_type;
        value.value = nvml::nvmlValue_t { ullVal: found.into() };
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetCreate(set: *mut nvmlEventSet_t) -> nvmlReturn_t {
    let created = machine("nvmlEventSetCreate").map(|machine| {
        *DELIVERED.lock().unwrap_or_else(PoisonError::into_inner) = machine.xids.len();
        std::ptr::without_provenance_mut(1)
    });
    give(set, created)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceRegisterEvents(
    device: nvmlDevice_t,
    _types: c_ulonglong,
    _set: nvmlEventSet_t,
) -> nvmlReturn_t {
    gpu("nvmlDeviceRegisterEvents", device).map_or_else(|code| code, |_| SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetWait_v2(
    _set: nvmlEventSet_t,
    data: *mut nvml::nvmlEventData_t,
    timeout_ms: c_uint,
) -> nvmlReturn_t {
    let deadline = Instant::now() + Duration::from_millis(timeout_ms.into());
    loop {
        let xids = match machine("nvmlEventSetWait_v2") {
            Ok(machine) => machine.xids,
            Err(code) => return code,
        };
        let mut delivered = DELIVERED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((uuid, xid)) = xids.get(*delivered) {
            *delivered += 1;
            let event = nvml::nvmlEventData_t {
                device: handle(uuid),
                eventType: nvml::nvmlEventTypeXidCriticalError.into(),
                eventData: *xid,
                gpuInstanceId: u32::MAX,
                computeInstanceId: u32::MAX,
            };
            return give(data, Ok(event));
        }
        drop(delivered);
        if Instant::now() >= deadline {
            return TIMEOUT;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetFree(_set: nvmlEventSet_t) -> nvmlReturn_t {
    SUCCESS
}
