//! A pattern and bandwidth test of a GPU's memory through CUDA's driver library, which comes with the driver: no toolkit is needed.
//!
//! The names and types are those of `cuda.h`. The library may hang or crash, so only the child process calls it.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::time::{Duration, Instant};

use libloading::{Library, Symbol};

use super::{CudaTest, GpuError};

const LIBRARY: &str = "libcuda.so.1";
const MIB: usize = 1024 * 1024;
/// The memory of one step, on the GPU and of the buffer in the host.
const STEP: usize = 64 * MIB;
/// The size of a copy within the GPU's memory: several times that of its caches.
const COPIED: usize = 256 * MIB;
/// So many copies at once take at least this long, if no more than [`MOST_AT_ONCE`] are needed for it.
const SHORTEST_ROUND: Duration = Duration::from_millis(5);
const MOST_AT_ONCE: u64 = 256;
/// The memory of a quick test.
const QUICK: usize = 4 * STEP;
/// A deep test leaves this much of the GPU's memory to the driver.
const SPARED: usize = 1024 * MIB;
const PAGE_WORDS: usize = 1024;
/// Every bit is 0 once and 1 once, next to equal bits and next to others.
const PATTERNS: [u32; 4] = [0x5555_5555, 0xaaaa_aaaa, 0x0000_0000, 0xffff_ffff];

/// `CUDA_ERROR_SYSTEM_NOT_READY`.
const SYSTEM_NOT_READY: Status = 802;

type Status = c_int;
type DevicePointer = u64;
type Context = *mut c_void;
type Module = *mut c_void;
type Function = *mut c_void;
type Stream = *mut c_void;

/// Counts the 32-bit words that differ from the pattern. PTX, which the driver compiles for the GPU of the machine.
const COMPARISON: &str = concat!(include_str!("count_wrong.ptx"), "\0");
/// Enough threads for every GPU to have all of its memory busy.
const COMPARISON_BLOCKS: c_uint = 2048;
const COMPARISON_THREADS: c_uint = 256;

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
    load_module: Symbol<'lib, unsafe extern "C" fn(*mut Module, *const c_void) -> Status>,
    function: Symbol<'lib, unsafe extern "C" fn(*mut Function, Module, *const c_char) -> Status>,
    launch: Symbol<'lib, Launch>,
}

/// `cuLaunchKernel`: the function, the grid, the threads of a block, shared memory, the stream, the parameters.
type Launch = unsafe extern "C" fn(
    Function,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    Stream,
    *mut *const c_void,
    *mut *mut c_void,
) -> Status;

/// Tests the GPU for about this long.
///
/// # Errors
/// `NotInstalled` where the machine has no such library, `NotReady` where a later process may succeed; otherwise what the driver answered.
pub(super) fn test(uuid: &str, time: Duration, is_deep: bool) -> Result<CudaTest, GpuError> {
    let missing = |error: libloading::Error| GpuError::NotInstalled { why: format!("CUDA is not installed: {error}") };
    // SAFETY: the library is NVIDIA's, whose initialisation may run in a process that is there for that alone.
    let library = unsafe { Library::new(LIBRARY) }.map_err(missing)?;
    let (cuda, initialized) = Cuda::load(&library).map_err(missing)?;
    answered("cuInit", initialized)?;
    let device = cuda.device_of(uuid)?;
    let context = PrimaryContext::of(&cuda, device)?;
    let cuda = context.cuda;
    let host = HostMemory::allocate(cuda)?;
    let Bandwidths { within, from_host, to_host } = bandwidths(cuda, &host, time / 4)?;
    let (tested_mib, wrong_words) = PatternTest::allocate(cuda, host, is_deep)?.run(time * 3 / 4)?;
    Ok(CudaTest {
        memory_mib_per_second: within,
        from_host_mib_per_second: from_host,
        to_host_mib_per_second: to_host,
        tested_mib,
        wrong_words,
    })
}

/// What the driver answered, as an error of this step.
fn answered(step: &str, status: Status) -> Result<(), GpuError> {
    let message = || format!("{step} answered {status}");
    match status {
        0 => Ok(()),
        SYSTEM_NOT_READY => Err(GpuError::NotReady { message: message() }),
        _ => Err(GpuError::Driver { message: message() }),
    }
}

impl<'lib> Cuda<'lib> {
    fn load(library: &'lib Library) -> Result<(Self, Status), libloading::Error> {
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
                load_module: library.get(b"cuModuleLoadData\0")?,
                function: library.get(b"cuModuleGetFunction\0")?,
                launch: library.get(b"cuLaunchKernel\0")?,
            };
            Ok((cuda, init(0)))
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

/// Memory of the GPU.
struct DeviceMemory<'cuda> {
    cuda: &'cuda Cuda<'cuda>,
    address: DevicePointer,
}

impl<'cuda> DeviceMemory<'cuda> {
    fn allocate(cuda: &'cuda Cuda<'cuda>, bytes: usize) -> Result<Self, GpuError> {
        let mut address = 0;
        // SAFETY: the place is of the function's type. What was allocated is freed when the returned value is dropped.
        answered("cuMemAlloc", unsafe { (cuda.allocate)(&raw mut address, bytes) })?;
        Ok(Self { cuda, address })
    }

    /// Sets the first `words` words. The memory has at least that many.
    fn fill(&self, pattern: u32, words: usize) -> Result<(), GpuError> {
        // SAFETY: the memory has at least `words` words.
        answered("cuMemsetD32", unsafe { (self.cuda.fill)(self.address, pattern, words) })
    }
}

impl Drop for DeviceMemory<'_> {
    fn drop(&mut self) {
        // SAFETY: it was allocated and is freed once.
        unsafe { (self.cuda.free)(self.address) };
    }
}

/// A buffer of [`STEP`] bytes in the host, which the GPU reaches by itself.
struct HostMemory<'cuda> {
    cuda: &'cuda Cuda<'cuda>,
    address: *mut c_void,
}

impl<'cuda> HostMemory<'cuda> {
    fn allocate(cuda: &'cuda Cuda<'cuda>) -> Result<Self, GpuError> {
        let mut address = std::ptr::null_mut();
        // SAFETY: the place is of the function's type. What was allocated is freed when the returned value is dropped.
        answered("cuMemAllocHost", unsafe { (cuda.allocate_host)(&raw mut address, STEP) })?;
        Ok(Self { cuda, address })
    }
}

impl Drop for HostMemory<'_> {
    fn drop(&mut self) {
        // SAFETY: it was allocated and is freed once.
        unsafe { (self.cuda.free_host)(self.address) };
    }
}

/// The speeds of copies, in MiB per second.
struct Bandwidths {
    within: u64,
    from_host: u64,
    to_host: u64,
}

/// Measures each for a third of the time.
fn bandwidths(cuda: &Cuda<'_>, host: &HostMemory<'_>, time: Duration) -> Result<Bandwidths, GpuError> {
    let (first, second) = (DeviceMemory::allocate(cuda, COPIED)?, DeviceMemory::allocate(cuda, COPIED)?);
    // SAFETY: both have so many bytes.
    let within = || unsafe { (cuda.within)(second.address, first.address, COPIED) };
    // SAFETY: both have STEP bytes, here and below.
    let from_host = || unsafe { (cuda.from_host)(first.address, host.address, STEP) };
    // SAFETY: as above.
    let to_host = || unsafe { (cuda.to_host)(host.address, first.address, STEP) };
    let each = time / 3;
    Ok(Bandwidths {
        within: bandwidth(cuda, each, COPIED, "cuMemcpyDtoD", within)?,
        from_host: bandwidth(cuda, each, STEP, "cuMemcpyHtoD", from_host)?,
        to_host: bandwidth(cuda, each, STEP, "cuMemcpyDtoH", to_host)?,
    })
}

/// Repeats a copy of so many bytes for this long, and at least once. As many are begun at once as take a few milliseconds together, so that
/// the memory is measured, and not the beginning of a copy.
fn bandwidth(
    cuda: &Cuda<'_>,
    time: Duration,
    bytes: usize,
    step: &str,
    copy: impl Fn() -> Status,
) -> Result<u64, GpuError> {
    let end = Instant::now() + time;
    let (mut begun, mut copies, mut at_once) = (Instant::now(), 0_u64, 1_u64);
    while copies == 0 || Instant::now() < end {
        let round = Instant::now();
        for _ in 0..at_once {
            answered(step, copy())?;
        }
        // SAFETY: it has no arguments. Copies within the GPU are not finished when the call of the copy returns.
        answered("cuCtxSynchronize", unsafe { (cuda.synchronize)() })?;
        copies += at_once;
        if round.elapsed() < SHORTEST_ROUND && at_once < MOST_AT_ONCE && Instant::now() < end {
            at_once *= 2;
            (begun, copies) = (Instant::now(), 0);
        }
    }
    let micros = begun.elapsed().as_micros().max(1);
    let mib = u128::from(copies) * (bytes / MIB) as u128;
    Ok(u64::try_from(mib * 1_000_000 / micros).unwrap_or(u64::MAX))
}

/// The program that counts the words of a block that differ from what was written.
enum Comparison<'cuda> {
    /// Compiled by the driver: the whole memory is read in less than a second.
    OnTheGpu { function: Function, wrong: DeviceMemory<'cuda> },
    /// The driver has no compiler: blocks are copied to the host.
    InTheHost,
}

impl<'cuda> Comparison<'cuda> {
    fn load(cuda: &'cuda Cuda<'cuda>) -> Result<Self, GpuError> {
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the program ends with a zero, and the place is of the function's type. The module is unloaded with its context.
        if unsafe { (cuda.load_module)(&raw mut module, COMPARISON.as_ptr().cast()) } != 0 {
            return Ok(Self::InTheHost);
        }
        // SAFETY: the module is loaded, and the name ends with a zero.
        let found = unsafe { (cuda.function)(&raw mut function, module, c"count_wrong".as_ptr()) };
        answered("cuModuleGetFunction", found)?;
        Ok(Self::OnTheGpu { function, wrong: DeviceMemory::allocate(cuda, 8)? })
    }
}

/// Blocks of [`STEP`] bytes on the GPU that are written and read back.
struct PatternTest<'cuda> {
    cuda: &'cuda Cuda<'cuda>,
    blocks: Vec<DeviceMemory<'cuda>>,
    host: HostMemory<'cuda>,
    comparison: Comparison<'cuda>,
}

impl<'cuda> PatternTest<'cuda> {
    fn allocate(cuda: &'cuda Cuda<'cuda>, host: HostMemory<'cuda>, is_deep: bool) -> Result<Self, GpuError> {
        let comparison = Comparison::load(cuda)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the places are of the function's types.
        answered("cuMemGetInfo", unsafe { (cuda.memory_info)(&raw mut free, &raw mut total) })?;
        let wanted = if is_deep { free.saturating_sub(SPARED).max(QUICK) } else { QUICK };
        let mut blocks = Vec::new();
        while blocks.len() * STEP < wanted {
            match DeviceMemory::allocate(cuda, STEP) {
                Ok(block) => blocks.push(block),
                // Less is free than CUDA reported.
                Err(_) if blocks.len() * STEP >= QUICK => break,
                Err(error) => return Err(error),
            }
        }
        Ok(Self { cuda, blocks, host, comparison })
    }

    /// Writes each pattern into all blocks and reads them, again and again for this long. Where that is too short for all blocks, each
    /// pattern is read at least from the memory of a quick test. Returns how many MiB were read, and how many words were wrong.
    fn run(&self, time: Duration) -> Result<(u64, u64), GpuError> {
        let begun = Instant::now();
        let (mut tested_mib, mut wrong_words) = (0, 0);
        while tested_mib == 0 || begun.elapsed() < time {
            for pattern in PATTERNS {
                for block in &self.blocks {
                    block.fill(pattern, STEP / 4)?;
                }
                let mut read = 0;
                for block in &self.blocks {
                    wrong_words += self.wrong_words(block, pattern)?;
                    read += STEP;
                    if read >= QUICK && begun.elapsed() > time {
                        break;
                    }
                }
                tested_mib += (read / MIB) as u64;
            }
        }
        Ok((tested_mib, wrong_words))
    }

    fn wrong_words(&self, block: &DeviceMemory<'_>, pattern: u32) -> Result<u64, GpuError> {
        match &self.comparison {
            Comparison::OnTheGpu { function, wrong } => self.wrong_words_on_the_gpu(*function, wrong, block, pattern),
            Comparison::InTheHost => {
                self.copy_to_host(block, STEP)?;
                // SAFETY: the buffer has STEP bytes, is aligned to pages, and nothing writes to it while the slice is there: the copy has ended.
                let words = unsafe { std::slice::from_raw_parts(self.host.address.cast::<u32>(), STEP / 4) };
                // Whole pages first, which is many times as fast.
                let page = [pattern; PAGE_WORDS];
                let wrong_pages = words.chunks(PAGE_WORDS).filter(|words| **words != page[..]);
                Ok(wrong_pages.flatten().filter(|word| **word != pattern).count() as u64)
            }
        }
    }

    fn wrong_words_on_the_gpu(
        &self,
        function: Function,
        wrong: &DeviceMemory<'_>,
        block: &DeviceMemory<'_>,
        pattern: u32,
    ) -> Result<u64, GpuError> {
        wrong.fill(0, 2)?;
        let (words, count, pattern, result) = (block.address, (STEP / 4) as u64, pattern, wrong.address);
        let mut parameters: [*const c_void; 4] = [
            (&raw const words).cast(),
            (&raw const count).cast(),
            (&raw const pattern).cast(),
            (&raw const result).cast(),
        ];
        // SAFETY: the function is loaded and takes four parameters of these types, which the call copies.
        let launched = unsafe {
            let (grid, threads) = (COMPARISON_BLOCKS, COMPARISON_THREADS);
            let (stream, extra) = (std::ptr::null_mut(), std::ptr::null_mut());
            (self.cuda.launch)(function, grid, 1, 1, threads, 1, 1, 0, stream, parameters.as_mut_ptr(), extra)
        };
        answered("cuLaunchKernel", launched)?;
        // The copy begins when the program has ended.
        self.copy_to_host(wrong, 8)?;
        // SAFETY: the buffer has eight bytes and more, is aligned to pages, and the copy has ended.
        Ok(unsafe { self.host.address.cast::<u64>().read() })
    }

    /// So many bytes of its beginning, no more than [`STEP`].
    fn copy_to_host(&self, memory: &DeviceMemory<'_>, bytes: usize) -> Result<(), GpuError> {
        // SAFETY: the memory and the buffer have so many bytes.
        answered("cuMemcpyDtoH", unsafe { (self.cuda.to_host)(self.host.address, memory.address, bytes) })
    }
}
