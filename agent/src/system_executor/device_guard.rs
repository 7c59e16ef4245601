//! Prevents tenants from opening GPUs that are not theirs.
//!
//! The kernel enforces who opens a device node: the node of a free device is root's alone, the node of a held one belongs to its tenant's
//! group. With systemd, the tenant's slice allows those devices and no other, so that a node whose mode was changed by another program
//! opens nothing either. The shared nodes (`nvidia-uvm` and the like) are made when the first program needs them, which may be after its
//! tenant was set up: the slice follows ([`DeviceGuard::renew_slice`]). Devices are closed without a question to the driver: the owner of a
//! node says who could open it, whatever became of its GPU. NVIDIA's libraries must be configured to leave the nodes' owners alone (`NVreg_ModifyDeviceFiles=0`); otherwise
//! they would undo the guard, so such a node is not fit for tenants.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tracing::warn;
use wire::inventory::DeviceRef;

use super::accounts::TenantAccount;
use crate::atomic_file;
use crate::bounded_tool::{self, ToolError};
use crate::gpus::Gpus;
use crate::task_outcome::TaskFailure;
use crate::terminal::ShellCommand;

const OF_ROOT: u32 = 0o600;
const OF_A_TENANT: u32 = 0o660;

/// The parameters of the kernel module, as the driver shows them. Its libraries read them here, too.
const DRIVER_PARAMETERS: &str = "/proc/driver/nvidia/params";
/// Whether the libraries, and nvidia-modprobe, which they run, set owner and mode of the device files. A module without it in its configuration has 1.
const MODIFY_DEVICE_FILES: &str = "ModifyDeviceFiles";
/// The longest value of it that is shown.
const SHOWN_VALUE: usize = 16;

/// The device nodes that every GPU program opens beside its GPU.
const SHARED: [&str; 4] = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"];
/// The one of them that no CUDA program starts without, and the driver's tool that makes it.
const UNIFIED_MEMORY: &str = "nvidia-uvm";
const NODE_MAKER: &str = "nvidia-modprobe";
const MAKES_UNIFIED_MEMORY: [&str; 3] = ["-u", "-c", "0"];
/// It loads a module and makes a node; a driver that hangs lets it do neither.
const NODE_MAKER_LIMIT: Duration = Duration::from_secs(10);
/// systemd reads all units of the machine.
const RELOAD_LIMIT: Duration = Duration::from_secs(90);

/// See the module's documentation.
pub struct DeviceGuard {
    /// The folder of the device nodes; `/dev`, except in tests.
    pub devices: PathBuf,
    /// The folder of slice configuration until the next boot; only present if systemd runs.
    pub slices: Option<PathBuf>,
    /// Further device nodes that every tenant may open, as an operator has set them.
    pub further: Vec<PathBuf>,
}

impl DeviceGuard {
    /// The guard of this machine.
    #[must_use]
    pub fn of_this_machine(devices: PathBuf, further: Vec<PathBuf>) -> Self {
        // As sd_booted(3) checks.
        let slices = Path::new("/run/systemd/system").is_dir().then(|| PathBuf::from("/run/systemd/system"));
        Self { devices, slices, further }
    }

    /// The mechanism that enforces it, as named in an output.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        if self.slices.is_some() { "device-ownership+slice" } else { "device-ownership" }
    }

    /// Opens the devices to the tenant only. `has_changed` as for [`Self::renew_slice`].
    ///
    /// # Errors
    /// `device_guard`; `gpu_driver` where the driver does not say which node one of them has.
    pub fn open(
        &self,
        gpus: &Gpus,
        devices: &[DeviceRef],
        account: &TenantAccount,
        has_changed: bool,
    ) -> Result<(), TaskFailure> {
        for device in devices {
            if let Some(node) = self.node(gpus, device)? {
                self.open_node(&node, account)?;
            }
        }
        if matches!(gpus, Gpus::Nvml(_)) {
            self.make_unified_memory_node();
        }
        self.renew_slice(account, has_changed)
    }

    /// Opens one node to the tenant only, without its slice.
    ///
    /// # Errors
    /// `device_guard`.
    pub fn open_node(&self, node: &Path, account: &TenantAccount) -> Result<(), TaskFailure> {
        set_owner(node, account.uid, OF_A_TENANT).map_err(guard_error(node))
    }

    /// How many devices are open to the tenant.
    #[must_use]
    pub fn opened(&self, account: &TenantAccount) -> usize {
        let is_open = |metadata: &fs::Metadata| {
            (metadata.uid(), metadata.gid(), metadata.mode() & 0o7777) == (0, account.uid, OF_A_TENANT)
        };
        self.gpu_nodes().map_or(0, |nodes| nodes.iter().filter(|(_, metadata)| is_open(metadata)).count())
    }

    /// Closes every device that is open to the tenant.
    ///
    /// # Errors
    /// `device_guard`, where one of them stays open; the others are closed.
    pub fn close(&self, account: &TenantAccount) -> Result<(), TaskFailure> {
        close_all(self.nodes_of(account).map_err(guard_error(&self.devices))?)
    }

    /// Closes every device that is open to anyone but these tenants.
    ///
    /// # Errors
    /// `device_guard`, where one of them stays open; the others are closed.
    pub fn close_all_but(&self, tenants: &BTreeSet<u32>) -> Result<(), TaskFailure> {
        let nodes = self.gpu_nodes().map_err(guard_error(&self.devices))?.into_iter();
        let is_open = |metadata: &fs::Metadata| {
            let is_closed = (metadata.uid(), metadata.gid(), metadata.mode() & 0o7777) == (0, 0, OF_ROOT);
            let is_of_tenant = metadata.uid() == 0 && tenants.contains(&metadata.gid());
            !is_closed && !is_of_tenant
        };
        close_all(nodes.filter(|(_, metadata)| is_open(metadata)).map(|(node, _)| node).collect())
    }

    /// Allows the tenant's slice the nodes of its set that have appeared since it was written. systemd reads it where it has changed, or
    /// where another drop-in of the slice `has_changed`.
    ///
    /// # Errors
    /// `device_guard`, `node_storage`.
    pub fn renew_slice(&self, account: &TenantAccount, has_changed: bool) -> Result<(), TaskFailure> {
        self.write_slice(account, &self.nodes_of(account).map_err(guard_error(&self.devices))?, has_changed)
    }

    /// When a device node was last made or removed.
    #[must_use]
    pub fn changed_at(&self) -> Vec<Option<SystemTime>> {
        let further = self.further.iter().filter_map(|node| node.parent());
        let folders = std::iter::once(self.devices.as_path()).chain(further);
        folders.map(|folder| fs::metadata(folder).and_then(|metadata| metadata.modified()).ok()).collect()
    }

    /// The shell inside of the tenant's slice, if there are slices: devices of other tenants are closed to it.
    #[must_use]
    pub fn in_slice(&self, account: &TenantAccount, shell: ShellCommand) -> ShellCommand {
        if self.slices.is_none() {
            return shell;
        }
        ShellCommand { launcher: launcher_in_slice(account.uid).into(), ..shell }
    }

    /// Removes the tenant's slice.
    pub fn forget_slice(&self, account: &TenantAccount) {
        if let Some(folder) = self.slice_of(account) {
            let _ = fs::remove_dir_all(folder);
            let _ = reload();
        }
    }

    /// Whether something on this machine would undo the guard.
    ///
    /// # Errors
    /// `device_guard`, with what to change.
    pub fn check(&self, gpus: &Gpus) -> Result<(), TaskFailure> {
        if !matches!(gpus, Gpus::Nvml(_)) {
            return Ok(());
        }
        check_driver_parameters(Path::new("/")).map_err(|fault| TaskFailure::new("device_guard", fault.with_remedy()))
    }

    /// The node of a device. A simulated one has none, unless a test made it.
    ///
    /// # Errors
    /// `gpu_driver`; `device_guard` where the machine does not have the node.
    pub fn node(&self, gpus: &Gpus, device: &DeviceRef) -> Result<Option<PathBuf>, TaskFailure> {
        let minor = gpus.minor_of(&device.uuid).map_err(|error| TaskFailure::new("gpu_driver", error.to_string()))?;
        let Some(minor) = minor else { return Ok(None) };
        let node = self.devices.join(format!("nvidia{minor}"));
        match fs::symlink_metadata(&node) {
            Ok(metadata) if metadata.file_type().is_char_device() => Ok(Some(node)),
            Ok(_) => Err(TaskFailure::new("device_guard", format!("{} is no character device", node.display()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound && matches!(gpus, Gpus::Simulated(_)) => Ok(None),
            Err(error) => Err(guard_error(&node)(error)),
        }
    }

    /// The nodes of GPUs that this tenant may open.
    fn nodes_of(&self, account: &TenantAccount) -> io::Result<Vec<PathBuf>> {
        let nodes = self.gpu_nodes()?.into_iter();
        Ok(nodes.filter(|(_, metadata)| metadata.gid() == account.uid).map(|(node, _)| node).collect())
    }

    /// The nodes of all GPUs, `nvidiaN`, in order of name.
    fn gpu_nodes(&self) -> io::Result<Vec<(PathBuf, fs::Metadata)>> {
        let mut nodes = Vec::new();
        let entries = match fs::read_dir(&self.devices) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(nodes),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let minor = name.to_str().and_then(|name| name.strip_prefix("nvidia"));
            if minor.is_none_or(|minor| minor.is_empty() || !minor.bytes().all(|byte| byte.is_ascii_digit())) {
                continue;
            }
            match entry.metadata() {
                Ok(metadata) if metadata.file_type().is_char_device() => nodes.push((entry.path(), metadata)),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        nodes.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(nodes)
    }

    /// After a boot nothing has made it yet, and the first program of the first tenant would start without it.
    fn make_unified_memory_node(&self) {
        if self.slices.is_none() || self.devices.join(UNIFIED_MEMORY).exists() {
            return;
        }
        match bounded_tool::run_of_path(NODE_MAKER, &MAKES_UNIFIED_MEMORY, &[], NODE_MAKER_LIMIT) {
            // Where the tool is missing, a program of the tenant makes the node, and the slice follows.
            Ok(_) | Err(ToolError::NotTested(_)) => {}
            Err(error) => warn!(
                error_code = "gpu_driver",
                error = crate::chain(&error),
                "{UNIFIED_MEMORY} is not made; the first program that uses CUDA makes it"
            ),
        }
    }

    fn slice_of(&self, account: &TenantAccount) -> Option<PathBuf> {
        self.slices.as_ref().map(|folder| folder.join(format!("user-{}.slice.d", account.uid)))
    }

    fn write_slice(&self, account: &TenantAccount, nodes: &[PathBuf], has_changed: bool) -> Result<(), TaskFailure> {
        let Some(folder) = self.slice_of(account) else { return Ok(()) };
        let shared = SHARED.iter().map(|name| self.devices.join(name)).chain(self.further.iter().cloned());
        let nodes: Vec<PathBuf> = nodes.iter().cloned().chain(shared.filter(|node| node.exists())).collect();
        let (path, text) = (folder.join("50-gpuaas.conf"), slice(&nodes));
        if !atomic_file::write_if_changed(&path, text.as_bytes(), atomic_file::PUBLIC)? && !has_changed {
            return Ok(());
        }
        reload().map_err(|error| {
            // The next call tries again.
            let _ = atomic_file::remove(&path);
            TaskFailure::new("device_guard", format!("systemd could not reload its units: {error}"))
        })
    }
}

/// A drop-in for the slice of one user's sessions: the usual pseudo-devices (`closed`), and these.
fn slice(nodes: &[PathBuf]) -> String {
    let allowed: String = nodes.iter().map(|node| format!("DeviceAllow={} rw\n", node.display())).collect();
    format!("[Slice]\nDevicePolicy=closed\nDeviceAllow=char-pts rw\n{allowed}")
}

/// What starts a program in the slice of a tenant.
pub(super) fn launcher_in_slice(uid: u32) -> [String; 6] {
    // Not `--uid`, which would leave root's groups to the tenant.
    ["systemd-run", "--quiet", "--scope", "--collect", &format!("--slice=user-{uid}.slice"), "--"].map(str::to_owned)
}

fn reload() -> Result<(), ToolError> {
    bounded_tool::run_of_path("systemctl", &["daemon-reload"], &[], RELOAD_LIMIT).map(|_| ())
}

/// Closes as many as possible, and returns the first failure.
fn close_all(nodes: Vec<PathBuf>) -> Result<(), TaskFailure> {
    let closed = nodes.iter().map(|node| set_owner(node, 0, OF_ROOT).map_err(guard_error(node)));
    closed.fold(Ok(()), Result::and)
}

fn set_owner(node: &Path, gid: u32, mode: u32) -> io::Result<()> {
    // Closed before its owner changes, so that both tenants never have access at once.
    fs::set_permissions(node, fs::Permissions::from_mode(OF_ROOT))?;
    chown(node, Some(0), Some(gid))?;
    fs::set_permissions(node, fs::Permissions::from_mode(mode))
}

fn guard_error(node: &Path) -> impl FnOnce(io::Error) -> TaskFailure {
    let node = node.display().to_string();
    move |error| TaskFailure::new("device_guard", format!("{node} cannot be guarded: {error}"))
}

/// Why the owners of device files isolate no tenants.
#[derive(Debug, thiserror::Error)]
pub enum DeviceFilesFault {
    #[error("NVIDIA's libraries give every user access to the device files ({name} is {value})", name = MODIFY_DEVICE_FILES)]
    Modified { value: String },
    #[error("{path} has no {name}", path = DRIVER_PARAMETERS, name = MODIFY_DEVICE_FILES)]
    Unnamed,
    #[error("{path} cannot be read", path = DRIVER_PARAMETERS)]
    Unreadable(#[source] io::Error),
}

impl DeviceFilesFault {
    /// For an operator.
    #[must_use]
    pub fn with_remedy(&self) -> String {
        let fault = crate::chain(self);
        format!("{fault}; set NVreg_{MODIFY_DEVICE_FILES}=0 for the kernel module nvidia, and reboot")
    }
}

/// Whether NVIDIA's libraries leave the device files as they are, on the machine with this root folder.
///
/// # Errors
/// [`DeviceFilesFault`].
pub fn check_driver_parameters(root: &Path) -> Result<(), DeviceFilesFault> {
    let path = root.join(DRIVER_PARAMETERS.trim_start_matches('/'));
    let params = fs::read_to_string(path).map_err(DeviceFilesFault::Unreadable)?;
    let value = params.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == MODIFY_DEVICE_FILES).then(|| value.trim())
    });
    match value {
        Some("0") => Ok(()),
        Some(value) => Err(DeviceFilesFault::Modified { value: value.chars().take(SHOWN_VALUE).collect() }),
        None => Err(DeviceFilesFault::Unnamed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_whose_libraries_do_not_certainly_leave_device_files_alone_is_detected() {
        let root = tempfile::tempdir().unwrap();
        let check = || check_driver_parameters(root.path());
        assert!(matches!(check(), Err(DeviceFilesFault::Unreadable(_))));
        let params = root.path().join("proc/driver/nvidia/params");
        fs::create_dir_all(params.parent().unwrap()).unwrap();
        // As driver 580 writes them.
        let written =
            "ResmanDebugLevel: 4294967295\nRmLogonRC: 1\nModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileMode: 438\n";
        fs::write(&params, written).unwrap();
        let fault = check().unwrap_err().with_remedy();
        assert!(fault.contains("(ModifyDeviceFiles is 1); set NVreg_ModifyDeviceFiles=0"), "{fault}");
        fs::write(&params, written.replace("ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0")).unwrap();
        assert!(check().is_ok());
        fs::write(&params, "DeviceFileUID: 0\n").unwrap();
        assert!(matches!(check(), Err(DeviceFilesFault::Unnamed)));
    }

    #[test]
    fn shell_starts_in_the_tenant_slice_as_the_tenant() {
        let account = TenantAccount { name: "gpu-1".into(), uid: 70_001 };
        let shell = ShellCommand {
            program: "/bin/bash".into(),
            arguments: vec!["-l".into()],
            launcher: Vec::new(),
            user: Some(70_001),
            folder: "/home/gpu-1".into(),
            environment: Vec::new(),
        };
        let mut guard = DeviceGuard { devices: "/dev".into(), slices: None, further: Vec::new() };
        assert_eq!(guard.in_slice(&account, shell.clone()), shell);
        guard.slices = Some("/run/systemd/system".into());
        let begun = guard.in_slice(&account, shell.clone());
        assert_eq!(begun.launcher.join(" "), "systemd-run --quiet --scope --collect --slice=user-70001.slice --");
        assert_eq!(begun, ShellCommand { launcher: begun.launcher.clone(), ..shell });
    }

    #[test]
    fn slice_allows_only_the_tenant_devices() {
        let text = slice(&[PathBuf::from("/dev/nvidia3"), PathBuf::from("/dev/nvidiactl")]);
        assert_eq!(
            text,
            "[Slice]\nDevicePolicy=closed\nDeviceAllow=char-pts rw\nDeviceAllow=/dev/nvidia3 rw\nDeviceAllow=/dev/nvidiactl rw\n"
        );
    }
}
