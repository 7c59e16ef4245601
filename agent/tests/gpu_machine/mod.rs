//! A machine with NVIDIA's driver: a fake of NVIDIA's management library (`tests/fake-nvml`), and a kernel log that the test writes.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fake_nvml::FakeMachine;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::sys::stat::Mode;
use tempfile::TempDir;
use wire::finding::Finding;
use wire::heartbeat::Heartbeat;

use crate::fake_control_plane::{FakeControlPlane, SpawnedAgent, eventually};

/// A machine with NVIDIA's driver, as the agent sees it.
pub struct GpuMachine {
    pub folder: TempDir,
    pub fake: FakeControlPlane,
    pub machine: FakeMachine,
    /// A named pipe: each write is one read of its reader, as with the kernel's log.
    pub kernel_log: File,
}

impl GpuMachine {
    pub async fn with_gpus(count: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fake_nvml::install(folder.path()).unwrap();
        let path = folder.path().join("kmsg");
        nix::unistd::mkfifo(&path, Mode::from_bits_truncate(0o600)).unwrap();
        let kernel_log = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
        fcntl(&kernel_log, FcntlArg::F_SETFL(OFlag::O_DIRECT | OFlag::O_NONBLOCK)).unwrap();
        let machine = FakeMachine::with_gpus(count);
        let mut this = Self { folder, fake: FakeControlPlane::start().await, machine, kernel_log };
        this.change(|_| {});
        this
    }

    pub fn file(&self) -> PathBuf {
        self.folder.path().join("machine.json")
    }

    pub fn change(&mut self, change: impl FnOnce(&mut FakeMachine)) {
        change(&mut self.machine);
        self.machine.write(&self.file()).unwrap();
    }

    pub fn agent(&self, more: &[&str]) -> SpawnedAgent {
        let bundle = self.fake.bundle(self.folder.path());
        let log = self.folder.path().join("kmsg").to_str().unwrap().to_owned();
        let kernel_log = if more.contains(&"--kernel-log") { vec![] } else { vec!["--kernel-log", log.as_str()] };
        // A driver that works answers in this time on any machine.
        let deadline: &[&str] =
            if more.contains(&"--gpu-deadline-seconds") { &[] } else { &["--gpu-deadline-seconds", "60"] };
        let args = [&kernel_log[..], deadline, more].concat();
        let library = self.folder.path().to_str().unwrap().to_owned();
        let file = self.file().to_str().unwrap().to_owned();
        SpawnedAgent::start_with(
            self.folder.path(),
            &bundle,
            &args,
            &[("LD_LIBRARY_PATH", library), (fake_nvml::FILE, file)],
        )
    }

    /// Writes a record as the kernel's log gives it.
    pub fn log(&mut self, priority: u32, sequence: u64, message: &str) {
        // One write, not one for each part of the text.
        self.kernel_log.write_all(format!("{priority},{sequence},1000000,-;{message}\n").as_bytes()).unwrap();
    }

    pub fn log_xid(&mut self, sequence: u64, gpu: u32, xid: u32) {
        self.log(4, sequence, &format!("NVRM: Xid (PCI:0000:{:02x}:00): {xid}, pid=7, name=python", 0x10 + gpu));
    }

    /// A heartbeat that is sent from here on.
    pub async fn next_heartbeat(&self) -> Heartbeat {
        let sent = self.fake.calls().heartbeats.len();
        eventually(|| self.fake.calls().heartbeats.get(sent).cloned()).await
    }

    pub fn heartbeat(&self) -> Option<Heartbeat> {
        self.fake.calls().heartbeats.last().cloned()
    }

    /// The findings of the latest heartbeat, once they are these: `probe/code`, and the GPU's number.
    pub async fn finds(&self, wanted: &[&str]) -> Vec<Finding> {
        self.finds_such(wanted, |_| true).await
    }

    /// The same, once they have occurred so many times in this boot.
    pub async fn finds_counts(&self, wanted: &[&str], counts: &[u64]) -> Vec<Finding> {
        self.finds_such(wanted, |found| found.iter().map(|finding| finding.count).eq(counts.iter().copied())).await
    }

    pub async fn finds_such(&self, wanted: &[&str], is_such: impl Fn(&[Finding]) -> bool) -> Vec<Finding> {
        let begun = Instant::now();
        loop {
            let heartbeat = self.heartbeat();
            let found = heartbeat.and_then(|heartbeat| heartbeat.findings);
            let mut names: Vec<_> = found.iter().flatten().map(name).collect();
            names.sort();
            if names == wanted
                && let Some(found) = found.clone().filter(|found| is_such(found))
            {
                return found;
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "wanted {wanted:?}, found {names:?}: {found:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

pub fn name(finding: &Finding) -> String {
    let gpu = finding.gpu_uuid.as_ref().map(|uuid| format!(" {}", uuid.chars().last().unwrap())).unwrap_or_default();
    format!("{}/{}{gpu}", finding.probe, finding.code)
}
