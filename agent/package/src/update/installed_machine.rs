//! The machine on which an installed finalizer works.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::io::Read as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use uuid::Uuid;
use wire::package::Digest;

use super::finalizer::{FinalizeError, UpdateMachine};
use super::{AgentUpdateOutcome, FailedVersion, Proof, RollbackReason, UpdateFolder, UpdateRecord, unix_seconds};
use crate::contents::{AGENT, PROGRAM_FOLDER};
use crate::install::{InstallTarget, activate, remove_other_versions, verify_version, version_folder};

const LOCK: &str = ".finalizer.lock";
/// A unit that ends up failed would lose its terminals. Its name is the last one: settings of an administrator do not undo it.
const HOLD: &str =
    "# Written by gpuaas-finalizer for the time of an update.\n[Service]\nRestart=always\nRestartPreventExitStatus=\n";
const HOLD_FILE: &str = "zz-gpuaas-update.conf";
/// How long systemd may take for one order: a finalizer that waits for it would roll nothing back.
const SYSTEMCTL_LIMIT: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(20);
/// The most bytes of an error that are read, and how long they are awaited: what the program has started may hold the pipe open.
const MAX_MESSAGE_BYTES: u64 = 64 * 1024;
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(2);

/// Where systemd reads units.
#[derive(Debug, Clone)]
pub struct SystemFolders {
    pub units: PathBuf,
    /// For settings that end with the boot.
    pub runtime_units: PathBuf,
}

/// An installation and its systemd.
#[derive(Debug)]
pub struct InstalledMachine {
    root: PathBuf,
    folders: SystemFolders,
    update: UpdateFolder,
    /// Held as long as this finalizer lives.
    _lock: File,
}

impl InstalledMachine {
    /// # Errors
    /// [`FinalizeError::Locked`] where another finalizer is at work; where the installation's folder cannot be written.
    pub fn open(root: &Path, folders: SystemFolders) -> Result<Self, FinalizeError> {
        let opened = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(root.join(LOCK));
        let lock = opened.map_err(machine_error("open the finalizer's lock"))?;
        lock.try_lock().map_err(|_| FinalizeError::Locked)?;
        Ok(Self { root: root.to_owned(), folders, update: UpdateFolder::of(root), _lock: lock })
    }

    fn hold_file(&self, unit: &str) -> PathBuf {
        self.folders.runtime_units.join(format!("{unit}.d")).join(HOLD_FILE)
    }

    /// Repeats what a full disk has prevented, with the disk that was reserved for it.
    fn with_reserve<T>(&self, mut effect: impl FnMut() -> Result<T, FinalizeError>) -> Result<T, FinalizeError> {
        match effect() {
            Err(error) if error.is_full() => {
                self.update.release_reserve()?;
                effect()
            }
            done => done,
        }
    }
}

impl UpdateMachine for InstalledMachine {
    fn record(&self) -> Result<Option<UpdateRecord>, FinalizeError> {
        Ok(self.update.record()?)
    }

    fn set_record(&mut self, record: &UpdateRecord) -> Result<(), FinalizeError> {
        self.with_reserve(|| Ok(self.update.set_record(record)?))
    }

    fn has_version(&self, digest: Digest) -> bool {
        verify_version(&version_folder(&self.root, digest), digest).is_ok()
    }

    fn hold_terminals(&mut self, unit: &str) -> Result<(), FinalizeError> {
        let path = self.hold_file(unit);
        let written =
            path.parent().map_or(Ok(()), |folder| DirBuilder::new().recursive(true).mode(0o755).create(folder));
        // In memory: it need not be synced, and is written again after a restart of the machine.
        written.and_then(|()| fs::write(&path, HOLD)).map_err(machine_error("write the unit's settings for the update"))
    }

    fn end_hold(&mut self, unit: &str) -> Result<(), FinalizeError> {
        let path = self.hold_file(unit);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(machine_error("remove the unit's settings for the update")(error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn activate(&mut self, digest: Digest, record: &UpdateRecord) -> Result<(), FinalizeError> {
        let target = InstallTarget {
            install_root: self.root.clone(),
            env_file: record.env_file.clone(),
            unit: record.unit.clone(),
            unit_folder: self.folders.units.clone(),
            release_keys: Vec::new(),
        };
        self.with_reserve(|| Ok(activate(digest, &target)?))
    }

    fn reload(&mut self) -> Result<(), FinalizeError> {
        systemctl(&["daemon-reload"])
    }

    fn restart(&mut self, unit: &str) -> Result<(), FinalizeError> {
        systemctl(&["restart", "--no-block", "--", unit])
    }

    fn proof(&self) -> Option<Proof> {
        self.update.proof()
    }

    fn forget_proof(&mut self) -> Result<(), FinalizeError> {
        Ok(self.update.remove_proof()?)
    }

    fn runs(&self, pid: u32, digest: Digest) -> bool {
        let program = version_folder(&self.root, digest).join(PROGRAM_FOLDER).join(AGENT);
        // By its file: paths differ between the mount namespaces of the two.
        let file_of = |path: PathBuf| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
        let program = file_of(program);
        program.is_some() && file_of(PathBuf::from(format!("/proc/{pid}/exe"))) == program
    }

    fn remember_failed(&mut self, digest: Digest, reason: &RollbackReason) -> Result<(), FinalizeError> {
        let version = FailedVersion { digest, reason: reason.clone(), at: unix_seconds() };
        self.with_reserve(|| Ok(self.update.remember_failed(version.clone())?))
    }

    fn set_last(&mut self, outcome: &AgentUpdateOutcome) -> Result<(), FinalizeError> {
        self.with_reserve(|| Ok(self.update.set_last(outcome)?))
    }

    fn remove_other_versions(&mut self, but: [Digest; 2]) -> Result<(), FinalizeError> {
        Ok(remove_other_versions(&self.root, &but)?)
    }

    fn remove_record(&mut self) -> Result<(), FinalizeError> {
        Ok(self.update.remove_record()?)
    }

    fn uptime(&self) -> Result<(Uuid, u64), FinalizeError> {
        let read = |path: &str| fs::read_to_string(path).map_err(machine_error("read the boot id and the uptime"));
        let boot_id = read("/proc/sys/kernel/random/boot_id")?;
        let uptime = read("/proc/uptime")?;
        let unreadable = || machine_error("read the boot id and the uptime")(io::ErrorKind::InvalidData.into());
        let boot_id = Uuid::try_parse(boot_id.trim()).map_err(|_| unreadable())?;
        let seconds = uptime.split('.').next().and_then(|seconds| seconds.parse().ok()).ok_or_else(unreadable)?;
        Ok((boot_id, seconds))
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

fn machine_error(doing: &'static str) -> impl FnOnce(io::Error) -> FinalizeError {
    move |source| FinalizeError::Machine { doing, source }
}

fn systemctl(arguments: &[&str]) -> Result<(), FinalizeError> {
    let failed = |message: String| FinalizeError::Systemctl { arguments: arguments.join(" "), message };
    let (status, message) = run("systemctl", arguments, SYSTEMCTL_LIMIT).map_err(|error| failed(error.to_string()))?;
    if status.success() { Ok(()) } else { Err(failed(message.trim().chars().take(1000).collect())) }
}

/// Runs a program until it ends, or for `limit`. Returns its status and its error output.
fn run(program: &str, arguments: &[&str], limit: Duration) -> io::Result<(ExitStatus, String)> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let (sender, message) = channel();
    if let Some(stderr) = child.stderr.take() {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let mut bounded = stderr.take(MAX_MESSAGE_BYTES);
            let _ = bounded.read_to_end(&mut bytes);
            let _ = sender.send(bytes);
            let _ = io::copy(&mut bounded.into_inner(), &mut io::sink());
        });
    }
    let deadline = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() >= deadline {
            child.kill()?;
            // One that cannot end is left to itself.
            std::thread::spawn(move || child.wait());
            let message = format!("it did not end within {} s and was killed", limit.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        std::thread::sleep(POLL);
    };
    let message = message.recv_timeout(MESSAGE_TIMEOUT).unwrap_or_default();
    Ok((status, String::from_utf8_lossy(&message).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_that_hangs_is_ended_and_one_that_fails_says_why() {
        let begun = Instant::now();
        let hung = run("sleep", &["1000"], Duration::from_millis(200)).unwrap_err();
        assert_eq!(hung.kind(), io::ErrorKind::TimedOut, "{hung}");
        assert!(begun.elapsed() < Duration::from_secs(90));
        let script = "head -c 300000 /dev/zero >&2; exit 3";
        let (status, message) = run("sh", &["-c", script], Duration::from_secs(90)).unwrap();
        assert_eq!((status.code(), message.len() as u64), (Some(3), MAX_MESSAGE_BYTES));
    }
}
