//! A pattern and bandwidth test of a GPU's memory through CUDA's driver library, which comes with the driver: no toolkit is needed.
//!
//! The names and types are those of `cuda.h`. The library may hang or crash, so only the child process calls it.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};
use std::time::{Duration, Instant};

use libloading::{Library, Symbol};

use super::{CudaTest, GpuError};

const LIBRARY: &str = "libcuda.so.1";
const MIB: usize = 1024 * 1024;
/// The memory of one step, on the GPU and of the buffer in the host.
const STEP: usize = 64 * MIB;
/// The memory of a quick test.
const QUICK: usize = 4 * STEP;
/// A deep test leaves this much of the GPU's memory to the driver.
const SPARED: usize = 1024 * MIB;
/// Every bit is 0 once and 1 once, next to equal bits and next to others.
const PATTERNS: [u32; 4] = [0x5555_5555, 0xaaaa_aaaa, 0x0000_0000, 0xffff_ffff];

type Status = c_int;
type DevicePointer = u64;
type Context = *mut c_void;

/// The functions that are used.
struct Cuda<'lib> {
    device_count: Symbol<'lib, unsafe extern "C" fn(*mut c_int) -> Status>,
    device: Symbol<'lib, unsafe extern "C" fn(*mut c_int, c_int) -> Status>,
    device_uuid: Symbol<'lib, unsafe extern "C" fn(*mut [u8; 16], c_int) -> Status>,
    retain_context: Symbol<'lib, unsafe extern "C" fn(*mut Context, c_int) -> Status>,
    release_context: Symbol<'lib, unsafe extern "C" fn(c_int) -> Status>,
    set_context: Symbol<'lib, unsafe extern "C" fn(Context) -> Status>,
    synchronize: Symbol<'lib, unsafe extern "C" fn() -> Status>,
    memory_info: Symbol<'lib, unsafe extern "C" fn(*mut usize, *mut usize) -> Status>,
    allocate: Symbol<'lib, unsafe extern "C" fn(*mut DevicePointer, usize) -> Status>,
    free: Symbol<'lib, unsafe extern "C" fn(DevicePointer) -> Status>,
    allocate_host: Symbol<'lib, unsafe extern "C" fn(*mut *mut c_void, usize) -> Status>,
    free_host: Symbol<'lib, unsafe extern "C" fn(*mut c_void) -> Status>,
    fill: Symbol<'lib, unsafe extern "C" fn(DevicePointer, c_uint, usize) -> Status>,
    to_host: Symbol<'lib, unsafe extern "C" fn(*mut c_void, DevicePointer, usize) -> Status>,
    from_host: Symbol<'lib, unsafe extern "C" fn(DevicePointer, *const c_void, usize) -> Status>,
    within: Symbol<'lib, unsafe extern "C" fn(DevicePointer, DevicePointer, usize) -> Status>,
}

/// Tests the GPU for about this long.
///
/// # Errors
/// `NotInstalled` where the machine has no such library; otherwise what the driver answered.
pub(super) fn test(uuid: &str, time: Duration, is_deep: bool) -> Result<CudaTest, GpuError> {
    let missing = |error: libloading::Error| GpuError::NotInstalled { why: format!("CUDA is not installed: {error}") };
    // SAFETY: the library is NVIDIA's, whose initialisation may run in a process that is there for that alone.
    let library = unsafe { Library::new(LIBRARY) }.map_err(missing)?;
    let cuda = Cuda::load(&library).map_err(missing)?;
    let device = cuda.device_of(uuid)?;
    let context = PrimaryContext::of(&cuda, device)?;
    let memory = Memory::allocate(&context, is_deep)?;
    memory.test(time)
}

/// What the driver answered, as an error of this step.
fn answered(step: &str, status: Status) -> Result<(), GpuError> {
    if status == 0 { Ok(()) } else { Err(GpuError::Driver { message: format!("{step} answered {status}") }) }
}

impl<'lib> Cuda<'lib> {
    fn load(library: &'lib Library) -> Result<Self, libloading::Error> {
        // SAFETY: the types are those of `cuda.h` for functions of these names, whose versions are part of the names.
        unsafe {
            let init: Symbol<'_, unsafe extern "C" fn(c_uint) -> Status> = library.get(b"cuInit\0")?;
            let cuda = Self {
                device_count: library.get(b"cuDeviceGetCount\0")?,
                device: library.get(b"cuDeviceGet\0")?,
                device_uuid: library.get(b"cuDeviceGetUuid\0")?,
                retain_context: library.get(b"cuDevicePrimaryCtxRetain\0")?,
                release_context: library.get(b"cuDevicePrimaryCtxRelease_v2\0")?,
                set_context: library.get(b"cuCtxSetCurrent\0")?,
                synchronize: library.get(b"cuCtxSynchronize\0")?,
                memory_info: library.get(b"cuMemGetInfo_v2\0")?,
                allocate: library.get(b"cuMemAlloc_v2\0")?,
                free: library.get(b"cuMemFree_v2\0")?,
                allocate_host: library.get(b"cuMemAllocHost_v2\0")?,
                free_host: library.get(b"cuMemFreeHost\0")?,
                fill: library.get(b"cuMemsetD32_v2\0")?,
                to_host: library.get(b"cuMemcpyDtoH_v2\0")?,
                from_host: library.get(b"cuMemcpyHtoD_v2\0")?,
                within: library.get(b"cuMemcpyDtoD_v2\0")?,
            };
            // Its error is that of every later call, too, and is reported there.
            let _ = init(0);
            Ok(cuda)
        }
    }

    /// The device with this UUID, as NVML writes it.
    fn device_of(&self, uuid: &str) -> Result<c_int, GpuError> {
        let mut count = 0;
        // SAFETY: the places that the functions write to are of their types, here and below.
        answered("cuDeviceGetCount", unsafe { (self.device_count)(&raw mut count) })?;
        for ordinal in 0..count {
            let (mut device, mut bytes) = (0, [0; 16]);
            // SAFETY: as above.
            answered("cuDeviceGet", unsafe { (self.device)(&raw mut device, ordinal) })?;
            // SAFETY: as above.
            answered("cuDeviceGetUuid", unsafe { (self.device_uuid)(&raw mut bytes, device) })?;
            if uuid == format!("GPU-{}", uuid::Uuid::from_bytes(bytes)) {
                return Ok(device);
            }
        }
        Err(GpuError::Driver { message: format!("CUDA has no GPU {uuid} among its {count}") })
    }
}

/// The context of a device, current in this thread.
struct PrimaryContext<'cuda> {
    cuda: &'cuda Cuda<'cuda>,
    device: c_int,
}

impl<'cuda> PrimaryContext<'cuda> {
    fn of(cuda: &'cuda Cuda<'cuda>, device: c_int) -> Result<Self, GpuError> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the place is of the function's type, and the device is one that the library named.
        answered("cuDevicePrimaryCtxRetain", unsafe { (cuda.retain_context)(&raw mut context, device) })?;
        let this = Self { cuda, device };
        // SAFETY: the context is the one that the library gave, and is retained until `this` is dropped.
        answered("cuCtxSetCurrent", unsafe { (cuda.set_context)(context) })?;
        Ok(this)
    }
}

impl Drop for PrimaryContext<'_> {
    fn drop(&mut self) {
        // SAFETY: it was retained once.
        unsafe { (self.cuda.release_context)(self.device) };
    }
}

/// What is tested: blocks of [`STEP`] on the GPU, and a buffer of the same size in the host, which the GPU reaches by itself.
struct Memory<'cuda> {
    cuda: &'cuda Cuda<'cuda>,
    blocks: Vec<DevicePointer>,
    host: *mut c_void,
}

impl<'cuda> Memory<'cuda> {
    fn allocate(context: &'cuda PrimaryContext<'cuda>, is_deep: bool) -> Result<Self, GpuError> {
        let cuda = context.cuda;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the places are of the function's types.
        answered("cuMemGetInfo", unsafe { (cuda.memory_info)(&raw mut free, &raw mut total) })?;
        let wanted = if is_deep { free.saturating_sub(SPARED).max(QUICK) } else { QUICK };
        let mut memory = Self { cuda, blocks: Vec::new(), host: std::ptr::null_mut() };
        // SAFETY: as above. What was allocated is freed when `memory` is dropped.
        answered("cuMemAllocHost", unsafe { (cuda.allocate_host)(&raw mut memory.host, STEP) })?;
        while memory.blocks.len() * STEP < wanted {
            let mut block = 0;
            // SAFETY: as above.
            match unsafe { (cuda.allocate)(&raw mut block, STEP) } {
                0 => memory.blocks.push(block),
                // Less is free than it said.
                _ if memory.blocks.len() * STEP >= QUICK => break,
                status => answered("cuMemAlloc", status)?,
            }
        }
        Ok(memory)
    }

    /// First the bandwidths, in a quarter of the time; then patterns, each in as many blocks as the rest of the time allows.
    fn test(&self, time: Duration) -> Result<CudaTest, GpuError> {
        let begun = Instant::now();
        let (first, second) = (self.blocks[0], self.blocks[1]);
        let each = time / 12;
        // SAFETY: the blocks and the buffer have STEP bytes each, here and below.
        let within = || unsafe { (self.cuda.within)(second, first, STEP) };
        // SAFETY: as above.
        let from_host = || unsafe { (self.cuda.from_host)(first, self.host, STEP) };
        // SAFETY: as above.
        let to_host = || unsafe { (self.cuda.to_host)(self.host, first, STEP) };
        let memory_mib_per_second = self.bandwidth(each, "cuMemcpyDtoD", within)?;
        let from_host_mib_per_second = self.bandwidth(each, "cuMemcpyHtoD", from_host)?;
        let to_host_mib_per_second = self.bandwidth(each, "cuMemcpyDtoH", to_host)?;
        let (mut tested_mib, mut wrong_words) = (0, 0);
        'patterns: for pattern in PATTERNS {
            for block in &self.blocks {
                // SAFETY: the block has STEP bytes.
                answered("cuMemsetD32", unsafe { (self.cuda.fill)(*block, pattern, STEP / 4) })?;
            }
            for block in &self.blocks {
                wrong_words += self.wrong_words(*block, pattern)?;
                tested_mib += (STEP / MIB) as u64;
                if begun.elapsed() > time && tested_mib >= (QUICK / MIB) as u64 {
                    break 'patterns;
                }
            }
        }
        Ok(CudaTest {
            memory_mib_per_second,
            from_host_mib_per_second,
            to_host_mib_per_second,
            tested_mib,
            wrong_words,
        })
    }

    /// Repeats a copy of one step for this long, and at least once.
    fn bandwidth(&self, time: Duration, step: &str, copy: impl Fn() -> Status) -> Result<u64, GpuError> {
        let begun = Instant::now();
        let mut copied = 0_u64;
        while copied == 0 || begun.elapsed() < time {
            answered(step, copy())?;
            // SAFETY: it has no arguments. Copies within the GPU are not finished when the call returns.
            answered("cuCtxSynchronize", unsafe { (self.cuda.synchronize)() })?;
            copied += (STEP / MIB) as u64;
        }
        let micros = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX).max(1);
        Ok(copied.saturating_mul(1_000_000) / micros)
    }

    fn wrong_words(&self, block: DevicePointer, pattern: u32) -> Result<u64, GpuError> {
        // SAFETY: block and buffer have STEP bytes.
        answered("cuMemcpyDtoH", unsafe { (self.cuda.to_host)(self.host, block, STEP) })?;
        // SAFETY: the buffer has STEP bytes, is aligned to pages, and nothing writes to it while the slice is there: the copy has ended.
        let words = unsafe { std::slice::from_raw_parts(self.host.cast::<u32>(), STEP / 4) };
        Ok(words.iter().filter(|word| **word != pattern).count() as u64)
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        for block in &self.blocks {
            // SAFETY: it was allocated and is freed once.
            unsafe { (self.cuda.free)(*block) };
        }
        if !self.host.is_null() {
            // SAFETY: as above.
            unsafe { (self.cuda.free_host)(self.host) };
        }
    }
}
