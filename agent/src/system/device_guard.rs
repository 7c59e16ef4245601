//! Prevents tenants from opening GPUs that are not theirs.
//!
//! The kernel enforces who opens a device node: the node of a free device is root's alone, the node of a held one belongs to its tenant's
//! group. With systemd, the tenant's slice allows those devices and no other, so that a node whose mode was changed by another program
//! opens nothing either. NVIDIA's libraries must be configured to leave the nodes' owners alone (`NVreg_ModifyDeviceFiles=0`); otherwise
//! they would undo the guard, so such a node is not fit for tenants.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use wire::inventory::DeviceRef;

use super::accounts::TenantAccount;
use crate::atomic_file;
use crate::executor::TaskFailure;
use crate::gpus::Gpus;
use crate::terminal::ShellCommand;

const OF_NOBODY: u32 = 0o600;
const OF_A_TENANT: u32 = 0o660;

/// The device nodes that every GPU program opens beside its GPU.
const SHARED: [&str; 4] = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"];

/// See the module's documentation.
pub struct DeviceGuard {
    /// The folder of the device nodes; `/dev`, except in tests.
    pub devices: PathBuf,
    /// The folder of slice configuration until the next boot; only present if systemd runs.
    pub slices: Option<PathBuf>,
}

impl DeviceGuard {
    /// The guard of this machine.
    #[must_use]
    pub fn of_this_machine(devices: PathBuf) -> Self {
        // As sd_booted(3) checks.
        let slices = Path::new("/run/systemd/system").is_dir().then(|| PathBuf::from("/run/systemd/system"));
        Self { devices, slices }
    }

    /// The mechanism that enforces it, as named in an output.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        if self.slices.is_some() { "device-ownership+slice" } else { "device-ownership" }
    }

    /// Opens the devices to the tenant only.
    ///
    /// # Errors
    /// `device_guard`.
    pub fn open(&self, gpus: &Gpus, devices: &[DeviceRef], account: &TenantAccount) -> Result<(), TaskFailure> {
        let nodes = self.nodes(gpus, devices)?;
        for node in &nodes {
            set_owner(node, account.uid, OF_A_TENANT).map_err(guard_error(node))?;
        }
        self.write_slice(account, &nodes)
    }

    /// Closes the devices to all users but root.
    ///
    /// # Errors
    /// `device_guard`.
    pub fn close(&self, gpus: &Gpus, devices: &[DeviceRef]) -> Result<(), TaskFailure> {
        for node in self.nodes(gpus, devices)? {
            set_owner(&node, 0, OF_NOBODY).map_err(guard_error(&node))?;
        }
        Ok(())
    }

    /// The shell inside of the tenant's slice, if there are slices: devices of other tenants are closed to it.
    #[must_use]
    pub fn in_slice(&self, account: &TenantAccount, shell: ShellCommand) -> ShellCommand {
        if self.slices.is_none() {
            return shell;
        }
        let uid = account.uid;
        // Not `--uid`, which would leave root's groups to the tenant.
        let launcher = ["systemd-run", "--quiet", "--scope", "--collect", &format!("--slice=user-{uid}.slice"), "--"];
        ShellCommand { launcher: launcher.map(str::to_owned).into(), ..shell }
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
        let params = fs::read_to_string("/proc/driver/nvidia/params")
            .map_err(guard_error(Path::new("/proc/driver/nvidia/params")))?;
        if modifies_device_files(&params) {
            let message = "NVIDIA's libraries give every user access to the device files; set NVreg_ModifyDeviceFiles=0 for the \
                           kernel module nvidia and load it again";
            return Err(TaskFailure::new("device_guard", message));
        }
        Ok(())
    }

    /// The nodes of these devices that this machine has. Simulated devices have none, unless a test made them.
    fn nodes(&self, gpus: &Gpus, devices: &[DeviceRef]) -> Result<Vec<PathBuf>, TaskFailure> {
        let mut nodes = Vec::new();
        for device in devices {
            let minor =
                gpus.minor_of(&device.uuid).map_err(|error| TaskFailure::new("gpu_driver", error.to_string()))?;
            let Some(minor) = minor else { continue };
            let node = self.devices.join(format!("nvidia{minor}"));
            match fs::symlink_metadata(&node) {
                Ok(metadata) if metadata.file_type().is_char_device() => nodes.push(node),
                Ok(_) => {
                    let message = format!("{} is no character device", node.display());
                    return Err(TaskFailure::new("device_guard", message));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound && matches!(gpus, Gpus::Simulated(_)) => {}
                Err(error) => return Err(guard_error(&node)(error)),
            }
        }
        Ok(nodes)
    }

    fn slice_of(&self, account: &TenantAccount) -> Option<PathBuf> {
        self.slices.as_ref().map(|folder| folder.join(format!("user-{}.slice.d", account.uid)))
    }

    fn write_slice(&self, account: &TenantAccount, nodes: &[PathBuf]) -> Result<(), TaskFailure> {
        let Some(folder) = self.slice_of(account) else { return Ok(()) };
        let shared = SHARED.iter().map(|name| self.devices.join(name)).filter(|node| node.exists());
        let nodes: Vec<PathBuf> = nodes.iter().cloned().chain(shared).collect();
        atomic_file::write_without_sync(&folder.join("50-gpuaas.conf"), slice(&nodes).as_bytes(), atomic_file::PUBLIC)?;
        reload().map_err(|error| TaskFailure::new("device_guard", format!("systemd cannot be told: {error}")))
    }
}

/// A drop-in for the slice of one user's sessions: the usual pseudo-devices (`closed`), and these.
fn slice(nodes: &[PathBuf]) -> String {
    let allowed: String = nodes.iter().map(|node| format!("DeviceAllow={} rw\n", node.display())).collect();
    format!("[Slice]\nDevicePolicy=closed\nDeviceAllow=char-pts rw\n{allowed}")
}

fn reload() -> io::Result<()> {
    let ran = Command::new("systemctl").arg("daemon-reload").output()?;
    if ran.status.success() { Ok(()) } else { Err(io::Error::other(String::from_utf8_lossy(&ran.stderr).into_owned())) }
}

fn set_owner(node: &Path, gid: u32, mode: u32) -> io::Result<()> {
    // Closed before its owner changes, so that both tenants never have access at once.
    fs::set_permissions(node, fs::Permissions::from_mode(OF_NOBODY))?;
    chown(node, Some(0), Some(gid))?;
    fs::set_permissions(node, fs::Permissions::from_mode(mode))
}

fn guard_error(node: &Path) -> impl FnOnce(io::Error) -> TaskFailure {
    let node = node.display().to_string();
    move |error| TaskFailure::new("device_guard", format!("{node} cannot be guarded: {error}"))
}

fn modifies_device_files(params: &str) -> bool {
    params.lines().any(|line| {
        line.split_once(':').is_some_and(|(name, value)| name.trim() == "ModifyDeviceFiles" && value.trim() != "0")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_that_modifies_device_files_is_detected() {
        assert!(modifies_device_files("ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\n"));
        assert!(!modifies_device_files("ModifyDeviceFiles: 0\nDeviceFileUID: 0\n"));
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
        let mut guard = DeviceGuard { devices: "/dev".into(), slices: None };
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
