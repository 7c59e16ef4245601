//! Keeps tenants off GPUs that are not theirs.
//!
//! The kernel enforces who opens a device node: one that nobody holds is root's alone, one that is held belongs to its tenant's
//! group. Where systemd runs, the tenant's slice allows those devices and no other, so that a node whose mode was changed behind the
//! agent's back opens nothing either. NVIDIA's libraries must be told to leave the nodes' owners alone
//! (`NVreg_ModifyDeviceFiles=0`); without that the guard would be undone, so a node is not fit for tenants.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use wire::inventory::Device;

use super::accounts::Account;
use crate::executor::Failure;
use crate::gpus::Gpus;
use crate::store;
use crate::terminal::Shell;

const OF_NOBODY: u32 = 0o600;
const OF_A_TENANT: u32 = 0o660;

/// What every GPU program opens beside its GPU.
const SHARED: [&str; 4] = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"];

/// See the module's documentation.
pub struct Guard {
    /// Where the device nodes lie; `/dev`, but for tests.
    pub devices: PathBuf,
    /// Where slices are configured until the next boot; only there where systemd runs.
    pub slices: Option<PathBuf>,
}

impl Guard {
    /// The guard of this machine.
    #[must_use]
    pub fn of_this_machine(devices: PathBuf) -> Self {
        // As sd_booted(3) tells.
        let slices = Path::new("/run/systemd/system").is_dir().then(|| PathBuf::from("/run/systemd/system"));
        Self { devices, slices }
    }

    /// What enforces it, as an output says it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        if self.slices.is_some() { "device-ownership+slice" } else { "device-ownership" }
    }

    /// Opens the devices to the tenant and to nobody else.
    ///
    /// # Errors
    /// `device_guard`.
    pub fn open(&self, gpus: &Gpus, devices: &[Device], account: &Account) -> Result<(), Failure> {
        let nodes = self.nodes(gpus, devices)?;
        for node in &nodes {
            hand(node, account.uid, OF_A_TENANT).map_err(refused(node))?;
        }
        self.write_slice(account, &nodes)
    }

    /// Closes the devices to everybody but root.
    ///
    /// # Errors
    /// `device_guard`.
    pub fn close(&self, gpus: &Gpus, devices: &[Device]) -> Result<(), Failure> {
        for node in self.nodes(gpus, devices)? {
            hand(&node, 0, OF_NOBODY).map_err(refused(&node))?;
        }
        Ok(())
    }

    /// The shell, begun inside of the tenant's slice where there are slices: the devices that are not the tenant's are closed to it.
    #[must_use]
    pub fn in_slice(&self, account: &Account, shell: Shell) -> Shell {
        if self.slices.is_none() {
            return shell;
        }
        let uid = account.uid;
        // Not `--uid`, which would leave root's groups to the tenant.
        let launcher = ["systemd-run", "--quiet", "--scope", "--collect", &format!("--slice=user-{uid}.slice"), "--"];
        Shell { launcher: launcher.map(str::to_owned).into(), ..shell }
    }

    /// Forgets the tenant's slice.
    pub fn forget_slice(&self, account: &Account) {
        if let Some(folder) = self.slice_of(account) {
            let _ = fs::remove_dir_all(folder);
            let _ = reload();
        }
    }

    /// Whether something on this machine would undo the guard.
    ///
    /// # Errors
    /// `device_guard`, with what to change.
    pub fn check(&self, gpus: &Gpus) -> Result<(), Failure> {
        if !matches!(gpus, Gpus::Nvml(_)) {
            return Ok(());
        }
        let params = fs::read_to_string("/proc/driver/nvidia/params")
            .map_err(refused(Path::new("/proc/driver/nvidia/params")))?;
        if modifies_device_files(&params) {
            let message = "NVIDIA's libraries give every user access to the device files; set NVreg_ModifyDeviceFiles=0 for the \
                           kernel module nvidia and load it again";
            return Err(Failure::new("device_guard", message));
        }
        Ok(())
    }

    /// The nodes of these devices that this machine has. Made-up devices have none, unless a test made them.
    fn nodes(&self, gpus: &Gpus, devices: &[Device]) -> Result<Vec<PathBuf>, Failure> {
        let mut nodes = Vec::new();
        for device in devices {
            let minor = gpus.minor_of(&device.uuid).map_err(|error| Failure::new("gpu_driver", error.to_string()))?;
            let Some(minor) = minor else { continue };
            let node = self.devices.join(format!("nvidia{minor}"));
            match fs::symlink_metadata(&node) {
                Ok(metadata) if metadata.file_type().is_char_device() => nodes.push(node),
                Ok(_) => {
                    let message = format!("{} is no character device", node.display());
                    return Err(Failure::new("device_guard", message));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound && matches!(gpus, Gpus::Simulated(_)) => {}
                Err(error) => return Err(refused(&node)(error)),
            }
        }
        Ok(nodes)
    }

    fn slice_of(&self, account: &Account) -> Option<PathBuf> {
        self.slices.as_ref().map(|folder| folder.join(format!("user-{}.slice.d", account.uid)))
    }

    fn write_slice(&self, account: &Account, nodes: &[PathBuf]) -> Result<(), Failure> {
        let Some(folder) = self.slice_of(account) else { return Ok(()) };
        let shared = SHARED.iter().map(|name| self.devices.join(name)).filter(|node| node.exists());
        let nodes: Vec<PathBuf> = nodes.iter().cloned().chain(shared).collect();
        store::write_without_sync(&folder.join("50-gpuaas.conf"), slice(&nodes).as_bytes(), store::PUBLIC)?;
        reload().map_err(|error| Failure::new("device_guard", format!("systemd cannot be told: {error}")))
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

fn hand(node: &Path, gid: u32, mode: u32) -> io::Result<()> {
    // Closed before it changes hands, so that no moment gives both tenants access.
    fs::set_permissions(node, fs::Permissions::from_mode(OF_NOBODY))?;
    chown(node, Some(0), Some(gid))?;
    fs::set_permissions(node, fs::Permissions::from_mode(mode))
}

fn refused(node: &Path) -> impl FnOnce(io::Error) -> Failure {
    let node = node.display().to_string();
    move |error| Failure::new("device_guard", format!("{node} cannot be guarded: {error}"))
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
    fn a_driver_that_opens_its_files_to_everybody_is_noticed() {
        assert!(modifies_device_files("ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\n"));
        assert!(!modifies_device_files("ModifyDeviceFiles: 0\nDeviceFileUID: 0\n"));
    }

    #[test]
    fn a_shell_is_begun_in_the_tenant_s_slice_and_is_the_tenant_s_all_the_same() {
        let account = Account { name: "gpu-1".into(), uid: 70_001 };
        let shell = Shell {
            program: "/bin/bash".into(),
            arguments: vec!["-l".into()],
            launcher: Vec::new(),
            user: Some(70_001),
            folder: "/home/gpu-1".into(),
            environment: Vec::new(),
        };
        let mut guard = Guard { devices: "/dev".into(), slices: None };
        assert_eq!(guard.in_slice(&account, shell.clone()), shell);
        guard.slices = Some("/run/systemd/system".into());
        let begun = guard.in_slice(&account, shell.clone());
        assert_eq!(begun.launcher.join(" "), "systemd-run --quiet --scope --collect --slice=user-70001.slice --");
        assert_eq!(begun, Shell { launcher: begun.launcher.clone(), ..shell });
    }

    #[test]
    fn a_slice_allows_the_tenant_s_devices_and_no_other() {
        let text = slice(&[PathBuf::from("/dev/nvidia3"), PathBuf::from("/dev/nvidiactl")]);
        assert_eq!(
            text,
            "[Slice]\nDevicePolicy=closed\nDeviceAllow=char-pts rw\nDeviceAllow=/dev/nvidia3 rw\nDeviceAllow=/dev/nvidiactl rw\n"
        );
    }
}
