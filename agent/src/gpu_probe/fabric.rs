//! A GPU's registration with an NVSwitch fabric, by functions of NVIDIA's management library that its wrapper does not have.
//!
//! Later drivers fill a larger structure: `nvmlDeviceGetGpuFabricInfoV` takes its version, and refuses one that the driver does not know.
//! Drivers before that function have `nvmlDeviceGetGpuFabricInfo`, and still earlier ones neither.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};

use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings::{
    NVML_GPU_FABRIC_STATE_COMPLETED, NvmlLib, nvmlDevice_t, nvmlGpuFabricInfo_t, nvmlGpuFabricInfo_v2_t,
    nvmlGpuFabricInfo_v3_t, nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH as VERSION_MISMATCH,
    nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND as FUNCTION_NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT, nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED, nvmlReturn_enum_NVML_SUCCESS as SUCCESS, nvmlReturn_t,
};

use super::GpuFabric;

/// `nvmlGpuFabricInfo_v3` and `nvmlGpuFabricInfo_v2`: the size of the structure, and its version in the highest byte.
const VERSIONS: [u32; 2] = [0x0300_0028, 0x0200_0024];
const _: () = assert!(size_of::<nvmlGpuFabricInfo_v3_t>() == 0x28 && size_of::<nvmlGpuFabricInfo_v2_t>() == 0x24);

/// The third version begins as the second one does, so that its room is enough for both.
type VersionedFunction = unsafe extern "C" fn(nvmlDevice_t, *mut nvmlGpuFabricInfo_v3_t) -> nvmlReturn_t;
type FirstFunction = unsafe extern "C" fn(nvmlDevice_t, *mut nvmlGpuFabricInfo_t) -> nvmlReturn_t;
type ErrorText = unsafe extern "C" fn(nvmlReturn_t) -> *const c_char;

/// The functions that the installed library has.
#[derive(Default)]
pub(super) struct FabricFunctions {
    versioned: Option<VersionedFunction>,
    first: Option<FirstFunction>,
    error_text: Option<ErrorText>,
    /// They are valid while it is loaded.
    _library: Option<NvmlLib>,
}

impl FabricFunctions {
    /// Those of the library of this name, which is initialised already.
    pub(super) fn load(library: &str) -> Self {
        // SAFETY: the process has loaded this library already, so that nothing of it runs here.
        let Ok(library) = (unsafe { NvmlLib::new(library) }) else { return Self::default() };
        Self {
            versioned: library.nvmlDeviceGetGpuFabricInfoV.as_ref().ok().copied(),
            first: library.nvmlDeviceGetGpuFabricInfo.as_ref().ok().copied(),
            error_text: library.nvmlErrorString.as_ref().ok().copied(),
            _library: Some(library),
        }
    }

    /// What the driver reports of this GPU; `None` where the GPU has no fabric, or the driver does not know it.
    ///
    /// # Errors
    /// Another code of the driver.
    pub(super) fn read(&self, device: &Device<'_>) -> Result<Option<GpuFabric>, nvmlReturn_t> {
        // SAFETY: the handle is used while the device is borrowed.
        self.read_handle(unsafe { device.handle() })
    }

    fn read_handle(&self, device: nvmlDevice_t) -> Result<Option<GpuFabric>, nvmlReturn_t> {
        for version in VERSIONS {
            if let Some(fabric) = self.read_version(version, device)? {
                return Ok(Some(fabric));
            }
        }
        self.read_first(device)
    }

    fn read_version(&self, version: u32, device: nvmlDevice_t) -> Result<Option<GpuFabric>, nvmlReturn_t> {
        let Some(function) = self.versioned else { return Ok(None) };
        let mut info = nvmlGpuFabricInfo_v3_t {
            version,
            clusterUuid: [0; 16],
            status: SUCCESS,
            cliqueId: 0,
            state: 0,
            healthMask: 0,
            healthSummary: 0,
        };
        // SAFETY: the function writes the structure of this version, for which there is room.
        let code = unsafe { function(device, &raw mut info) };
        is_known(code).map(|is_known| {
            is_known.then(|| GpuFabric {
                health_mask: info.healthMask,
                health_summary: info.healthSummary.into(),
                ..self.registration(info.state, info.status)
            })
        })
    }

    fn read_first(&self, device: nvmlDevice_t) -> Result<Option<GpuFabric>, nvmlReturn_t> {
        let Some(function) = self.first else { return Ok(None) };
        let mut info = nvmlGpuFabricInfo_t { clusterUuid: [0; 16], status: SUCCESS, cliqueId: 0, state: 0 };
        // SAFETY: the function writes this structure.
        let code = unsafe { function(device, &raw mut info) };
        is_known(code).map(|is_known| is_known.then(|| self.registration(info.state, info.status)))
    }

    /// The status has a meaning in the state `COMPLETED` only.
    fn registration(&self, state: u8, status: nvmlReturn_t) -> GpuFabric {
        let state = u32::from(state);
        let has_failed = state == NVML_GPU_FABRIC_STATE_COMPLETED && status != SUCCESS;
        let error = has_failed.then(|| self.text_of(status));
        GpuFabric { state, error, health_mask: 0, health_summary: 0 }
    }

    /// As `nvidia-smi` shows it.
    fn text_of(&self, status: nvmlReturn_t) -> String {
        let text = self.error_text.map(|function| {
            // SAFETY: the function takes any code.
            unsafe { function(status) }
        });
        match text {
            Some(text) if !text.is_null() => {
                // SAFETY: it is a text of the library's own, which stays.
                let text = unsafe { CStr::from_ptr(text) };
                format!("{} ({status})", text.to_string_lossy())
            }
            _ => format!("error {status}"),
        }
    }
}

/// Whether this answer has a value; false where the GPU or the driver does not have it.
const fn is_known(code: nvmlReturn_t) -> Result<bool, nvmlReturn_t> {
    match code {
        SUCCESS => Ok(true),
        NOT_SUPPORTED | INVALID_ARGUMENT | NOT_FOUND | FUNCTION_NOT_FOUND | VERSION_MISMATCH => Ok(false),
        code => Err(code),
    }
}

#[cfg(test)]
mod tests {
    use nvml_wrapper_sys::bindings::{
        NVML_GPU_FABRIC_STATE_IN_PROGRESS as IN_PROGRESS,
        nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES as INSUFFICIENT_RESOURCES,
        nvmlReturn_enum_NVML_ERROR_UNKNOWN as UNKNOWN,
    };

    use super::*;

    const fn info(version: u32, status: nvmlReturn_t) -> nvmlGpuFabricInfo_v3_t {
        nvmlGpuFabricInfo_v3_t {
            version,
            clusterUuid: [0; 16],
            status,
            cliqueId: 0,
            state: NVML_GPU_FABRIC_STATE_COMPLETED as u8,
            healthMask: 0x2aa,
            healthSummary: 1,
        }
    }

    unsafe extern "C" fn latest(_: nvmlDevice_t, out: *mut nvmlGpuFabricInfo_v3_t) -> nvmlReturn_t {
        // SAFETY: the caller gives a structure of the version that it names.
        unsafe {
            let version = (*out).version;
            if version != VERSIONS[0] {
                return VERSION_MISMATCH;
            }
            out.write(info(version, INSUFFICIENT_RESOURCES));
        }
        SUCCESS
    }

    /// Knows the second version only.
    unsafe extern "C" fn earlier(_: nvmlDevice_t, out: *mut nvmlGpuFabricInfo_v3_t) -> nvmlReturn_t {
        // SAFETY: as above.
        unsafe {
            let version = (*out).version;
            if version != VERSIONS[1] {
                return VERSION_MISMATCH;
            }
            let it = info(version, SUCCESS);
            out.cast::<nvmlGpuFabricInfo_v2_t>().write(nvmlGpuFabricInfo_v2_t {
                version,
                clusterUuid: it.clusterUuid,
                status: it.status,
                cliqueId: it.cliqueId,
                state: it.state,
                healthMask: it.healthMask,
            });
        }
        SUCCESS
    }

    unsafe extern "C" fn refusing(_: nvmlDevice_t, _: *mut nvmlGpuFabricInfo_v3_t) -> nvmlReturn_t {
        NOT_SUPPORTED
    }

    unsafe extern "C" fn first(_: nvmlDevice_t, out: *mut nvmlGpuFabricInfo_t) -> nvmlReturn_t {
        let (status, state) = (INSUFFICIENT_RESOURCES, IN_PROGRESS as u8);
        // SAFETY: the caller gives this structure.
        unsafe { out.write(nvmlGpuFabricInfo_t { clusterUuid: [0; 16], status, cliqueId: 0, state }) };
        SUCCESS
    }

    unsafe extern "C" fn first_refusing(_: nvmlDevice_t, _: *mut nvmlGpuFabricInfo_t) -> nvmlReturn_t {
        NOT_SUPPORTED
    }

    unsafe extern "C" fn text(_: nvmlReturn_t) -> *const c_char {
        c"Insufficient Resources".as_ptr()
    }

    unsafe extern "C" fn failing(_: nvmlDevice_t, _: *mut nvmlGpuFabricInfo_v3_t) -> nvmlReturn_t {
        UNKNOWN
    }

    fn read(
        versioned: Option<VersionedFunction>,
        first: Option<FirstFunction>,
    ) -> Result<Option<GpuFabric>, nvmlReturn_t> {
        let functions = FabricFunctions { versioned, first, error_text: Some(text), _library: None };
        functions.read_handle(std::ptr::null_mut())
    }

    #[test]
    fn latest_version_that_the_driver_knows_is_read() {
        let completed = NVML_GPU_FABRIC_STATE_COMPLETED;
        let failed = Some("Insufficient Resources (23)".to_owned());
        let third = GpuFabric { state: completed, error: failed, health_mask: 0x2aa, health_summary: 1 };
        assert_eq!(read(Some(latest), Some(first)), Ok(Some(third)));
        let second = GpuFabric { state: completed, error: None, health_mask: 0x2aa, health_summary: 0 };
        assert_eq!(read(Some(earlier), Some(first)), Ok(Some(second)));
        // The status says nothing before the registration is completed.
        let oldest = GpuFabric { state: IN_PROGRESS, error: None, health_mask: 0, health_summary: 0 };
        assert_eq!(read(None, Some(first)), Ok(Some(oldest)));
    }

    #[test]
    fn driver_without_the_functions_and_gpu_without_a_fabric_say_nothing() {
        assert_eq!(read(None, None), Ok(None));
        assert_eq!(read(Some(refusing), Some(first_refusing)), Ok(None));
        assert_eq!(read(Some(failing), Some(first)), Err(UNKNOWN), "which is no absence");
        assert_eq!(FabricFunctions::default().text_of(INSUFFICIENT_RESOURCES), "error 23");
    }
}
