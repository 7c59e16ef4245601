//! A fake of NVIDIA's management library (`libnvidia-ml.so.1`) and of CUDA's driver library (`libcuda.so.1`), so that the agent's own path to
//! the driver runs without a GPU. One file has the functions of both.
//!
//! A script stands for `nvidia-smi`, as far as the reset of a GPU needs it, and answers as the real one does.
//!
//! It reports the machine that a JSON file describes ([`FakeMachine`]), which it reads again at each call: a test changes the machine by
//! replacing the file.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

mod cuda;
mod library;

/// The environment variable that names the file.
pub const FILE: &str = "FAKE_NVML_FILE";
/// The name under which programs load the library.
pub const LIBRARY: &str = "libnvidia-ml.so.1";
/// The name under which they load CUDA's.
pub const CUDA_LIBRARY: &str = "libcuda.so.1";

/// A machine with GPUs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FakeMachine {
    /// The kernel has no driver.
    pub not_loaded: bool,
    /// No call returns while this is set.
    pub hangs: bool,
    /// The code (`nvmlReturn_t`) that a function answers in place of its value, by its name, with or without the number of its version:
    /// `nvmlInit`, `nvmlDeviceGetCount`.
    pub errors: BTreeMap<String, u32>,
    /// For how long a function does not answer, in milliseconds, by its name as in `errors`.
    pub late_ms: BTreeMap<String, u64>,
    pub gpus: Vec<FakeGpu>,
    /// Xids by GPU, in the order in which they occurred.
    pub xids: Vec<(String, u64)>,
    /// `None`: the GPUs are not for programs.
    pub cuda: Option<FakeCuda>,
    pub reset: FakeReset,
    pub fabric_version: FakeFabricVersion,
}

/// What the driver knows to report of the fabric.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FakeFabricVersion {
    /// The registration alone.
    First,
    /// The health mask, too.
    Second,
    /// And the summary.
    #[default]
    Third,
}

/// A GPU's registration with an NVSwitch fabric. By default it is completed, and its health is not supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FakeFabric {
    /// `NVML_GPU_FABRIC_STATE_*`.
    pub fabric_state: u8,
    /// `nvmlReturn_t`.
    pub status: u32,
    /// `NVML_GPU_FABRIC_HEALTH_MASK_*`.
    pub health_mask: u32,
    /// `NVML_GPU_FABRIC_HEALTH_SUMMARY_*`.
    pub health_summary: u8,
}

impl Default for FakeFabric {
    fn default() -> Self {
        Self { fabric_state: 3, status: 0, health_mask: 0, health_summary: 0 }
    }
}

/// What `nvidia-smi --gpu-reset` does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FakeReset {
    /// It resets a GPU that no process has open: its rows are remapped, and the driver asks for no action.
    #[default]
    Works,
    /// It resets a GPU, and the fault is still there.
    HasNoEffect,
    /// Another process has the GPU open.
    Busy,
    /// This GPU cannot be reset alone.
    NotSupported,
    /// It is the GPU of the display.
    Primary,
    Fails,
    Hangs,
}

/// How CUDA behaves on all GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FakeCuda {
    pub memory_mib: usize,
    /// So many words of each region that is filled have one wrong bit.
    pub wrong_words: usize,
    /// The driver cannot compile programs.
    pub has_no_compiler: bool,
    /// Every call gives this code (`CUresult`).
    pub error: Option<i32>,
    /// No call returns while this is set.
    pub hangs: bool,
}

/// A GPU. What is `None` is not supported by it. By default it answers as an H100 with driver 580 does that nothing uses.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FakeGpu {
    pub uuid: String,
    pub name: String,
    pub memory_mib: u64,
    /// Of its memory, in use beside what the driver reserves.
    pub used_mib: u64,
    /// The processes that compute on it.
    pub computing: Vec<u32>,
    /// The processes that draw on it; `None` as on a GPU that cannot.
    pub drawing: Option<Vec<u32>>,
    /// Its bus; domain and device are 0.
    pub pci_bus: u32,
    /// The number of its device node; `None`: its index.
    pub minor: Option<u32>,
    /// It has fallen off the bus.
    pub is_lost: bool,
    /// The driver returns this code when the GPU is opened (`nvmlReturn_t`).
    pub error: Option<u32>,
    /// As [`FakeMachine::errors`], for this GPU alone.
    pub errors: BTreeMap<String, u32>,
    pub ecc_uncorrectable: Option<u64>,
    pub remap_pending: Option<bool>,
    pub remap_failed: Option<bool>,
    pub recovery_action: Option<u32>,
    pub slowdown_reasons: Option<u64>,
    /// Whether each of its links is active, and the bus of the GPU or switch at its other end.
    pub nvlinks: Vec<bool>,
    pub nvlink_remote_buses: Vec<u32>,
    pub fabric: Option<FakeFabric>,
    pub pcie_width: Option<(u32, u32)>,
    /// Whether it is divided into instances, and whether it is after its next reset: 0 or 1.
    pub mig: Option<(u32, u32)>,
    /// `nvmlComputeMode_t`.
    pub compute_mode: Option<u32>,
    /// The driver holds it initialised, which is a client of it.
    pub persistence_mode: bool,
}

impl FakeMachine {
    /// A machine with so many GPUs in order.
    #[must_use]
    pub fn with_gpus(count: u32) -> Self {
        let gpu = |index: u32| FakeGpu {
            uuid: format!("GPU-00000000-0000-4000-8000-{index:012}"),
            name: "NVIDIA H100 80GB HBM3".to_owned(),
            memory_mib: 81_559,
            pci_bus: 0x10 + index,
            ecc_uncorrectable: Some(0),
            remap_pending: Some(false),
            remap_failed: Some(false),
            recovery_action: Some(0),
            // Its clocks are low while nothing uses it.
            slowdown_reasons: Some(0x1),
            drawing: Some(Vec::new()),
            nvlinks: vec![true, true],
            fabric: Some(FakeFabric::default()),
            pcie_width: Some((16, 16)),
            mig: Some((0, 0)),
            compute_mode: Some(0),
            ..FakeGpu::default()
        };
        Self { gpus: (0..count).map(gpu).collect(), ..Self::default() }
    }

    /// Replaces the file at once.
    ///
    /// # Errors
    /// That of the file system.
    pub fn write(&self, file: &Path) -> io::Result<()> {
        let new = file.with_extension("new");
        std::fs::write(&new, serde_json::to_vec_pretty(self)?)?;
        std::fs::rename(new, file)
    }

    fn read(file: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&std::fs::read(file)?)?)
    }
}

/// Makes the built library loadable by its usual name from `folder`, for `LD_LIBRARY_PATH`. Tests of this workspace find it beside their
/// own program.
///
/// # Errors
/// The library is not built, or cannot be copied.
pub fn install(folder: &Path) -> io::Result<()> {
    let test = std::env::current_exe()?;
    let deps = test.parent().map_or_else(PathBuf::new, Path::to_path_buf);
    let built = ["libfake_nvml.so", "../libfake_nvml.so"].map(|name| deps.join(name));
    let built = built.iter().find(|path| path.exists()).ok_or_else(|| {
        io::Error::other(format!("libfake_nvml.so is not in {}; build the crate fake-nvml", deps.display()))
    })?;
    std::fs::copy(built, folder.join(LIBRARY)).map(|_| ())
}

/// Replaces the library as a package does: who has loaded the one before goes on with it.
///
/// # Errors
/// As of [`install`].
pub fn replace(folder: &Path) -> io::Result<()> {
    let new = folder.join("new");
    std::fs::create_dir_all(&new)?;
    install(&new)?;
    std::fs::rename(new.join(LIBRARY), folder.join(LIBRARY))
}

/// The same for CUDA's library.
///
/// # Errors
/// As of [`install`].
pub fn install_cuda(folder: &Path) -> io::Result<()> {
    install(folder)?;
    std::fs::copy(folder.join(LIBRARY), folder.join(CUDA_LIBRARY)).map(|_| ())
}

/// Writes `nvidia-smi` into the folder `tools`, for the machine of `file`. Processes that have loaded the library from `library` have its GPUs
/// open. Each call is a line of [`calls_of_smi`].
///
/// # Errors
/// That of the file system.
pub fn install_smi(tools: &Path, library: &Path, file: &Path) -> io::Result<()> {
    let text = |path: &Path| path.display().to_string();
    let script = include_str!("nvidia-smi.sh").replace("@LIBRARY@", &text(library)).replace("@MACHINE@", &text(file));
    std::fs::create_dir_all(tools)?;
    let program = tools.join("nvidia-smi");
    std::fs::write(&program, script)?;
    std::fs::set_permissions(program, std::fs::Permissions::from_mode(0o755))
}

/// Holds `nvidia-smi` on the machine of `file` at a moment, such as `before -pm 0` or `after --gpu-reset`, until it is let go.
///
/// # Errors
/// That of the file system.
pub fn hold_smi(file: &Path, moment: &str) -> io::Result<()> {
    std::fs::write(file.with_extension("hold"), moment)
}

/// Whether a call has come to that moment since this was last asked.
#[must_use]
pub fn is_smi_held(file: &Path) -> bool {
    std::fs::remove_file(file.with_extension("held")).is_ok()
}

/// # Errors
/// That of the file system.
pub fn let_smi_go(file: &Path) -> io::Result<()> {
    std::fs::remove_file(file.with_extension("hold"))
}

/// The arguments of the calls of `nvidia-smi` on the machine of `file` so far.
#[must_use]
pub fn calls_of_smi(file: &Path) -> Vec<String> {
    let calls = std::fs::read_to_string(file.with_extension("calls")).unwrap_or_default();
    calls.lines().map(str::to_owned).collect()
}
