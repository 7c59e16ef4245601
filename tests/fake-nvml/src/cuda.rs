//! The functions of CUDA's driver library that the agent calls, with the names and types of `cuda.h`. The memory of a GPU is memory of the
//! process.
#![allow(unsafe_code, non_snake_case)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::{FILE, FakeCuda, FakeMachine};

const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;
const INVALID_PROGRAM: c_int = 218;
const NO_COMPILER: c_int = 221;
const NOT_FOUND: c_int = 500;
const PAGE: usize = 4096;

/// What was allocated: address and size.
static ALLOCATED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// The machine at this moment, once its CUDA does not hang.
fn machine() -> Result<(FakeMachine, FakeCuda), c_int> {
    let file = std::env::var_os(FILE).ok_or(NO_DEVICE)?;
    loop {
        let machine = FakeMachine::read(Path::new(&file)).map_err(|_| NO_DEVICE)?;
        let cuda = machine.cuda.clone().ok_or(NO_DEVICE)?;
        if let Some(error) = cuda.error {
            return Err(error);
        }
        if !cuda.hangs {
            return Ok((machine, cuda));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn give<T>(out: *mut T, found: Result<T, c_int>) -> c_int {
    match found {
        Ok(_) if out.is_null() => INVALID_VALUE,
        Ok(value) => {
            // SAFETY: the callers of the library give a valid place for the value, by its interface.
            unsafe { out.write(value) };
            SUCCESS
        }
        Err(code) => code,
    }
}

fn layout(size: usize) -> Result<Layout, c_int> {
    Layout::from_size_align(size.max(1), PAGE).map_err(|_| INVALID_VALUE)
}

fn allocate(size: usize) -> Result<usize, c_int> {
    // SAFETY: the size is not zero.
    let address = unsafe { alloc_zeroed(layout(size)?) } as usize;
    if address == 0 {
        return Err(OUT_OF_MEMORY);
    }
    ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner).insert(address, size);
    Ok(address)
}

fn free(address: usize) -> c_int {
    let size = ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner).remove(&address);
    let Some(layout) = size.and_then(|size| layout(size).ok()) else { return INVALID_VALUE };
    // SAFETY: it was allocated with this layout and is freed once, since its entry is gone.
    unsafe { dealloc(address as *mut u8, layout) };
    SUCCESS
}

/// Whether so many bytes were allocated at this address.
fn is_allocated(address: usize, bytes: usize) -> bool {
    let allocated = ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner);
    allocated.range(..=address).next_back().is_some_and(|(begin, size)| address + bytes <= begin + size)
}

fn copy(to: usize, from: usize, bytes: usize) -> c_int {
    if !is_allocated(to, bytes) || !is_allocated(from, bytes) {
        return INVALID_VALUE;
    }
    // SAFETY: both ends were allocated by this library.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> c_int {
    machine().map_or_else(|code| code, |_| SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(out: *mut c_int) -> c_int {
    give(out, machine().and_then(|(machine, _)| c_int::try_from(machine.gpus.len()).map_err(|_| INVALID_VALUE)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(out: *mut c_int, ordinal: c_int) -> c_int {
    give(out, Ok(ordinal))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid(out: *mut [u8; 16], device: c_int) -> c_int {
    let of = |machine: FakeMachine| {
        let gpu = machine.gpus.get(usize::try_from(device).ok()?)?;
        let digits: String = gpu.uuid.strip_prefix("GPU-")?.chars().filter(|c| *c != '-').collect();
        Some(u128::from_str_radix(&digits, 16).ok()?.to_be_bytes())
    };
    give(out, machine().and_then(|(machine, _)| of(machine).ok_or(INVALID_VALUE)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(out: *mut *mut c_void, device: c_int) -> c_int {
    let handle = std::ptr::without_provenance_mut(usize::try_from(device).unwrap_or(0) + 1);
    give(out, machine().map(|_| handle))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> c_int {
    if context.is_null() { INVALID_VALUE } else { SUCCESS }
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> c_int {
    machine().map_or_else(|code| code, |_| SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    let found = machine().map(|(_, cuda)| cuda.memory_mib * 1024 * 1024);
    match give(free, found) {
        SUCCESS => give(total, found),
        code => code,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(out: *mut u64, size: usize) -> c_int {
    give(out, machine().and_then(|_| allocate(size)).map(|address| address as u64))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    usize::try_from(address).map_or(INVALID_VALUE, free)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocHost_v2(out: *mut *mut c_void, size: usize) -> c_int {
    give(out, allocate(size).map(|address| address as *mut c_void))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(address: *mut c_void) -> c_int {
    free(address as usize)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD32_v2(address: u64, value: c_uint, words: usize) -> c_int {
    let Ok(address) = usize::try_from(address) else { return INVALID_VALUE };
    if !is_allocated(address, words * 4) {
        return INVALID_VALUE;
    }
    // A counter of a program is no memory under test.
    let wrong = machine().map_or(0, |(_, cuda)| cuda.wrong_words).min(words.saturating_sub(PAGE));
    // SAFETY: so many words were allocated by this library, aligned to a page.
    let memory = unsafe { std::slice::from_raw_parts_mut(address as *mut u32, words) };
    let page = [value; PAGE / 4];
    for part in memory.chunks_mut(page.len()) {
        part.copy_from_slice(&page[..part.len()]);
    }
    memory.iter_mut().take(wrong).for_each(|word| *word ^= 1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoH_v2(host: *mut c_void, device: u64, bytes: usize) -> c_int {
    usize::try_from(device).map_or(INVALID_VALUE, |device| copy(host as usize, device, bytes))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoD_v2(device: u64, host: *const c_void, bytes: usize) -> c_int {
    usize::try_from(device).map_or(INVALID_VALUE, |device| copy(device, host as usize, bytes))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) -> c_int {
    match (usize::try_from(to), usize::try_from(from)) {
        (Ok(to), Ok(from)) => copy(to, from, bytes),
        _ => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleLoadData(out: *mut *mut c_void, program: *const c_char) -> c_int {
    let load = |(_, cuda): (FakeMachine, FakeCuda)| {
        if cuda.has_no_compiler {
            return Err(NO_COMPILER);
        }
        if program.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: by the library's interface it is a C string.
        let text = unsafe { CStr::from_ptr(program) }.to_string_lossy();
        if text.contains(".entry count_wrong(") {
            Ok(std::ptr::without_provenance_mut(1))
        } else {
            Err(INVALID_PROGRAM)
        }
    };
    give(out, machine().and_then(load))
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleGetFunction(out: *mut *mut c_void, _module: *mut c_void, name: *const c_char) -> c_int {
    if name.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: by the library's interface it is a C string.
    let is_known = unsafe { CStr::from_ptr(name) } == c"count_wrong";
    give(out, if is_known { Ok(std::ptr::without_provenance_mut(2)) } else { Err(NOT_FOUND) })
}

/// Does what the one program that is known does: counts the words that are not the pattern.
#[unsafe(no_mangle)]
extern "C" fn cuLaunchKernel(
    _function: *mut c_void,
    _grid_x: c_uint,
    _grid_y: c_uint,
    _grid_z: c_uint,
    _block_x: c_uint,
    _block_y: c_uint,
    _block_z: c_uint,
    _shared: c_uint,
    _stream: *mut c_void,
    parameters: *mut *const c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    if parameters.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the program has four parameters of these types.
    let (words, count, pattern, wrong) = unsafe {
        let parameter = |index| *parameters.add(index);
        (
            *parameter(0).cast::<u64>(),
            *parameter(1).cast::<u64>(),
            *parameter(2).cast::<u32>(),
            *parameter(3).cast::<u64>(),
        )
    };
    let (Ok(words), Ok(count), Ok(wrong)) = (usize::try_from(words), usize::try_from(count), usize::try_from(wrong))
    else {
        return INVALID_VALUE;
    };
    if !is_allocated(words, count * 4) || !is_allocated(wrong, 8) {
        return INVALID_VALUE;
    }
    // SAFETY: both were allocated by this library, aligned to a page, and are different allocations.
    let (words, wrong) = unsafe { (std::slice::from_raw_parts(words as *const u32, count), &mut *(wrong as *mut u64)) };
    let page = [pattern; PAGE / 4];
    for part in words.chunks(page.len()).filter(|part| *part != &page[..part.len()]) {
        *wrong += part.iter().filter(|word| **word != pattern).count() as u64;
    }
    machine().map_or_else(|code| code, |_| SUCCESS)
}
