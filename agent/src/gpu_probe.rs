//! NVIDIA's management library in a process of its own.
//!
//! A call into a driver that hangs does not return, and may not even be ended by a signal. So the agent never calls the library: a child
//! process does (`gpuaas-agent --gpu-probe`), one request at a time, each a line of JSON on a socket. A child that does not answer in time
//! is killed; one that cannot be killed is abandoned, and no other is started before it has ended.

use std::collections::BTreeSet;
use std::io::{self, BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wire::heartbeat::GpuTelemetry;
use wire::inventory::GpuInfo;

mod child;
mod cuda;
mod fabric;
mod pci_addresses;
mod topology;

pub use child::serve;

/// The flag that makes a process the child.
pub const CHILD_FLAG: &str = "--gpu-probe";
/// The default time for an answer.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(10);
/// The first answer of a child takes this much longer: the driver initialises each GPU, where no daemon holds them initialised.
const START_FACTOR: u32 = 2;
/// How long a killed child may take to end before it is abandoned.
const END_TIMEOUT: Duration = Duration::from_millis(200);
/// No child is started for this long after one did not answer: callers get the same error at once.
const PAUSE_AFTER_HANG: Duration = Duration::from_secs(5);
/// The most bytes of an answer.
const MAX_ANSWER: usize = 1024 * 1024;

/// Why the driver gave no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "error", rename_all = "snake_case")]
pub enum GpuError {
    /// NVIDIA's management library is not installed.
    #[error("no GPU driver is installed ({why})")]
    NotInstalled { why: String },
    /// The library is installed, and the kernel has no driver.
    #[error("the GPU driver is installed and not loaded; load the kernel module nvidia, or reboot the machine")]
    NotLoaded,
    #[error("the GPU driver did not answer within {seconds} s")]
    Hung { seconds: u64 },
    #[error("the GPU driver answered: {message}")]
    Driver { message: String },
    /// CUDA cannot be used yet: the machine's fabric manager starts after the driver.
    #[error("the GPU driver is not ready: {message}")]
    NotReady { message: String },
    /// The child process could not be started, cannot call the driver, or ended. Programs that use the driver already may work on.
    #[error("the process that calls the GPU driver failed: {message}")]
    Process {
        message: String,
        #[serde(default)]
        fault: ProcessFault,
    },
}

/// What a new process that wants to call the driver meets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessFault {
    #[default]
    Other,
    /// The installed library is of another version than the loaded driver: no process can begin to use the GPUs before a reboot, and those that
    /// use them work on.
    DriverReplaced,
}

/// A request to the child.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
enum Request {
    /// The reading of every GPU.
    Survey { xid_events: bool },
    /// The processes that compute or draw on a GPU.
    Processes { uuid: String },
    /// The memory in use on a GPU, in MiB.
    UsedMemory { uuid: String },
    /// The number of a GPU's device node.
    Minor { uuid: String },
    /// A load on a GPU, for about this long.
    Test { uuid: String, milliseconds: u64, is_deep: bool },
}

/// What a load on a GPU has shown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuTest {
    /// Lanes of its PCIe link.
    pub pcie_lanes: Option<u32>,
    /// Read after a load only: an idle link is slow to save power.
    pub pcie_generation: Option<u32>,
    /// Uncorrectable errors of its memory since the test began.
    pub new_ecc_errors: Option<u64>,
    /// `nvmlDeviceGpuRecoveryAction_t`.
    pub recovery_action: Option<u32>,
    pub cuda: Result<CudaTest, GpuError>,
}

/// The pattern and bandwidth test of a GPU's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaTest {
    /// Copied within its memory.
    pub memory_mib_per_second: u64,
    pub from_host_mib_per_second: u64,
    pub to_host_mib_per_second: u64,
    pub tested_mib: u64,
    pub wrong_words: u64,
}

/// What the driver reports of all GPUs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuSurvey {
    /// Those that could be read, in order of index.
    pub gpus: Vec<SurveyedGpu>,
    #[serde(default)]
    pub driver_version: Option<String>,
    /// How many the driver reports as lost: they have fallen off the bus.
    pub lost: u32,
    /// Those that could be neither read nor are lost, in order of index.
    pub unreadable: Vec<UnreadableGpu>,
    /// The library that the child has loaded was removed or replaced since.
    #[serde(default)]
    pub is_library_replaced: bool,
    /// Why no other process can begin to use the GPUs, although this one reads them.
    #[serde(default)]
    pub restart_needed: Option<String>,
}

/// A GPU of which the driver reports an error, and nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnreadableGpu {
    /// The driver's.
    pub index: u32,
    /// As [`SurveyedGpu::pci_address`], where anything tells it.
    pub pci_address: Option<String>,
    /// Its index, its address and the driver's error, for operators.
    pub why: String,
}

/// What the driver reports of one GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SurveyedGpu {
    pub info: GpuInfo,
    /// Its address as the kernel log writes it, `domain:bus:device` in hexadecimal.
    pub pci_address: Option<String>,
    /// Simulated GPUs have none.
    pub load: Option<GpuTelemetry>,
    pub condition: GpuCondition,
}

/// The state of a GPU. What the driver does not know, or the GPU does not have, is absent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuCondition {
    /// Uncorrectable errors of its memory since the driver was loaded.
    pub ecc_uncorrectable: Option<u64>,
    /// Rows wait for a reset to be remapped.
    pub remap_pending: Option<bool>,
    pub remap_failed: Option<bool>,
    /// `nvmlDeviceGpuRecoveryAction_t`.
    pub recovery_action: Option<u32>,
    /// `nvmlClocksEventReasons`.
    pub slowdown_reasons: Option<u64>,
    /// NVLinks that are active.
    pub nvlinks_active: Option<Vec<u32>>,
    /// NVLinks of which the driver does not say whether they are.
    pub nvlinks_unread: Vec<u32>,
    pub fabric: Option<GpuFabric>,
    /// Lanes of its PCIe link, and how many it could have here.
    pub pcie_width: Option<(u32, u32)>,
    /// Xids that the driver reported since the last survey, and how often. Read only where the kernel log cannot be.
    pub xids: Vec<(u64, u64)>,
    /// Whether the GPU is divided into instances (MIG), and whether it is from its next reset on.
    pub mig: Option<(bool, bool)>,
    /// `nvmlComputeMode_t`.
    pub compute_mode: Option<u32>,
    /// What the driver answered with an error where it owes a value: its name, its memory.
    pub unreported: Vec<String>,
    /// The probes whose values the driver answered with another error than that the GPU does not have them: nothing is known of their findings.
    pub unread: BTreeSet<String>,
}

/// The probes of a GPU that read single values of the driver.
pub mod probe {
    pub const ECC: &str = "ecc";
    pub const GPU_MODE: &str = "gpu_mode";
    pub const ROW_REMAP: &str = "row_remap";
    pub const RECOVERY_ACTION: &str = "recovery_action";
    pub const SLOWDOWN: &str = "slowdown";
    pub const PCIE: &str = "pcie";
    pub const NVLINK: &str = "nvlink";
    /// One GPU's part in the fabric.
    pub const GPU_FABRIC: &str = "gpu_fabric";
}

/// A GPU's registration with an NVSwitch fabric.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuFabric {
    /// `NVML_GPU_FABRIC_STATE_*`.
    pub state: u32,
    /// Why the registration has failed.
    pub error: Option<String>,
    /// `NVML_GPU_FABRIC_HEALTH_MASK_*`: a field that is 0 is not supported.
    pub health_mask: u32,
    /// `NVML_GPU_FABRIC_HEALTH_SUMMARY_*`.
    pub health_summary: u32,
}

/// The client of the child process.
pub struct GpuProbe {
    program: PathBuf,
    deadline: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    running: Option<Running>,
    /// A child that could not be killed.
    abandoned: Option<Child>,
    hung_at: Option<Instant>,
}

struct Running {
    child: Child,
    stream: BufReader<UnixStream>,
    has_answered: bool,
}

impl GpuProbe {
    /// A probe whose child runs this program.
    #[must_use]
    pub fn new(program: PathBuf, deadline: Duration) -> Self {
        Self { program, deadline, state: Mutex::default() }
    }

    /// A probe whose child is this process's own program, also after the program's file was replaced.
    #[must_use]
    pub fn of_this_program(deadline: Duration) -> Self {
        Self::new(PathBuf::from("/proc/self/exe"), deadline)
    }

    /// The state of all GPUs. `xid_events` also reads the driver's events.
    ///
    /// # Errors
    /// [`GpuError`], where the driver reports nothing at all.
    pub fn survey(&self, xid_events: bool) -> Result<GpuSurvey, GpuError> {
        let mut survey: GpuSurvey = self.ask(&Request::Survey { xid_events })?;
        if survey.is_library_replaced {
            match self.another().ask::<GpuSurvey>(&Request::Survey { xid_events: false }) {
                // The next child loads what is installed.
                Ok(_) => self.without_child(|| ())?,
                Err(
                    error @ (GpuError::Process { fault: ProcessFault::DriverReplaced, .. }
                    | GpuError::NotInstalled { .. }),
                ) => survey.restart_needed = Some(error.to_string()),
                // It says nothing about other programs.
                Err(_) => {}
            }
        }
        Ok(survey)
    }

    /// The processes that compute or draw on a GPU.
    ///
    /// # Errors
    /// [`GpuError`].
    pub fn processes(&self, uuid: &str) -> Result<Vec<u32>, GpuError> {
        self.ask(&Request::Processes { uuid: uuid.to_owned() })
    }

    /// The memory in use on a GPU, in MiB; `None` where the GPU does not report it.
    ///
    /// # Errors
    /// [`GpuError`].
    pub fn used_memory_mib(&self, uuid: &str) -> Result<Option<u64>, GpuError> {
        self.ask(&Request::UsedMemory { uuid: uuid.to_owned() })
    }

    /// The number in the name of a GPU's device node.
    ///
    /// # Errors
    /// [`GpuError`].
    pub fn minor(&self, uuid: &str) -> Result<u32, GpuError> {
        self.ask(&Request::Minor { uuid: uuid.to_owned() })
    }

    /// A probe with a child of its own.
    #[must_use]
    pub fn another(&self) -> Self {
        Self::new(self.program.clone(), self.deadline)
    }

    /// Does something while no child has the driver open. Requests wait for it.
    ///
    /// # Errors
    /// [`GpuError`] where a child cannot be ended: its call into the driver does not return.
    pub fn without_child<T>(&self, action: impl FnOnce() -> T) -> Result<T, GpuError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = state.running.take() {
            state.abandoned = end(running.child);
        }
        self.check_abandoned(&mut state)?;
        Ok(action())
    }

    /// Applies a load to a GPU for about this long. The deadline of the answer is as much later.
    ///
    /// # Errors
    /// [`GpuError`].
    pub fn test(&self, uuid: &str, time: Duration, is_deep: bool) -> Result<GpuTest, GpuError> {
        let milliseconds = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.ask_within(&Request::Test { uuid: uuid.to_owned(), milliseconds, is_deep }, self.deadline + time * 2)
    }

    fn ask<T: DeserializeOwned>(&self, request: &Request) -> Result<T, GpuError> {
        self.ask_within(request, self.deadline)
    }

    fn ask_within<T: DeserializeOwned>(&self, request: &Request, deadline: Duration) -> Result<T, GpuError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_abandoned(&mut state)?;
        let mut running = match state.running.take() {
            Some(running) => running,
            None => self.start()?,
        };
        let limit = if running.has_answered { deadline } else { deadline * START_FACTOR };
        match exchange(&mut running.stream, request, Instant::now() + limit) {
            Ok(line) => {
                running.has_answered = true;
                state.running = Some(running);
                state.hung_at = None;
                let answer: Result<T, GpuError> =
                    strict_json::from_str(&line).map_err(|error| process_error(&error))?;
                answer
            }
            Err(error) if is_timeout(&error) => {
                state.hung_at = Some(Instant::now());
                state.abandoned = end(running.child);
                Err(GpuError::Hung { seconds: limit.as_secs() })
            }
            Err(error) => {
                state.abandoned = end(running.child);
                Err(process_error(&error))
            }
        }
    }

    /// Fails at once while an abandoned child is left, or the last hang is recent: another child would hang as well.
    fn check_abandoned(&self, state: &mut State) -> Result<(), GpuError> {
        let hung = Err(GpuError::Hung { seconds: self.deadline.as_secs() });
        if let Some(child) = &mut state.abandoned {
            if matches!(child.try_wait(), Ok(None)) {
                return hung;
            }
            state.abandoned = None;
        }
        if state.hung_at.is_some_and(|at| at.elapsed() < PAUSE_AFTER_HANG) { hung } else { Ok(()) }
    }

    fn start(&self) -> Result<Running, GpuError> {
        let start = || {
            let (ours, theirs) = UnixStream::pair()?;
            let stdin = OwnedFd::from(theirs.try_clone()?);
            let child = Command::new(&self.program)
                .arg0("gpuaas-agent")
                .arg(CHILD_FLAG)
                .stdin(Stdio::from(stdin))
                .stdout(Stdio::from(OwnedFd::from(theirs)))
                .stderr(Stdio::null())
                .spawn()?;
            Ok(Running { child, stream: BufReader::new(ours), has_answered: false })
        };
        start().map_err(|error: io::Error| process_error(&error))
    }
}

#[cfg(test)]
impl GpuProbe {
    /// This child counts as one that cannot be killed.
    pub(crate) fn abandon(&self, child: Child) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).abandoned = Some(child);
    }

    pub(crate) fn end_abandoned(&self) {
        if let Some(child) = &mut self.state.lock().unwrap_or_else(PoisonError::into_inner).abandoned {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl Drop for GpuProbe {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = state.running.take() {
            let _ = end(running.child);
        }
    }
}

/// Sends a request and reads the line that answers it.
fn exchange(stream: &mut BufReader<UnixStream>, request: &Request, deadline: Instant) -> io::Result<String> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.get_ref().set_write_timeout(Some(remaining(deadline)?))?;
    stream.get_mut().write_all(&line)?;
    let mut answer = Vec::new();
    loop {
        stream.get_ref().set_read_timeout(Some(remaining(deadline)?))?;
        let read = stream.fill_buf()?;
        if read.is_empty() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let end = read.iter().position(|byte| *byte == b'\n');
        let length = end.map_or(read.len(), |end| end + 1);
        answer.extend_from_slice(&read[..length]);
        stream.consume(length);
        if answer.len() > MAX_ANSWER {
            return Err(io::Error::other("its answer is too long"));
        }
        if end.is_some() {
            return String::from_utf8(answer).map_err(io::Error::other);
        }
    }
}

/// The time that is left. A socket's time-out of zero would be none at all.
fn remaining(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock)
}

fn process_error(error: &dyn std::error::Error) -> GpuError {
    GpuError::Process { message: error.to_string(), fault: ProcessFault::Other }
}

/// Kills a child, and returns it where it does not end. A process in an uninterruptible call of the driver ends with that call.
fn end(mut child: Child) -> Option<Child> {
    let _ = child.kill();
    let begun = Instant::now();
    while matches!(child.try_wait(), Ok(None)) {
        if begun.elapsed() > END_TIMEOUT {
            return Some(child);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// Longer than anything takes here that does not hang.
    const HANGS_AFTER: Duration = Duration::from_secs(60);

    /// A child that is this shell script.
    fn scripted(script: &str, deadline: Duration) -> (tempfile::TempDir, GpuProbe) {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("child");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        (folder, GpuProbe::new(program, deadline))
    }

    #[test]
    fn answers_of_one_child_are_read_in_turn() {
        let (_folder, probe) = scripted(
            r#"while read line; do case $line in *minor*) echo '{"Ok":3}';; *) echo '{"Err":{"error":"not_loaded"}}';; esac; done"#,
            HANGS_AFTER,
        );
        assert_eq!(probe.minor("GPU-1"), Ok(3));
        assert_eq!(probe.survey(false), Err(GpuError::NotLoaded));
        assert_eq!(probe.minor("GPU-1"), Ok(3));
    }

    #[test]
    fn silent_child_is_killed_at_the_deadline_and_the_next_caller_does_not_wait() {
        let script = r#"echo started >>"$(dirname "$0")/starts"; read line; exec sleep 1000"#;
        let (folder, probe) = scripted(script, Duration::from_millis(50));
        let begun = Instant::now();
        assert_eq!(probe.survey(false), Err(GpuError::Hung { seconds: 0 }));
        assert!(begun.elapsed() < HANGS_AFTER, "{:?}", begun.elapsed());
        assert!(probe.state.lock().unwrap().running.is_none());
        // Where it took longer to end than it is waited for, it has been killed all the same.
        if let Some(mut child) = probe.state.lock().unwrap().abandoned.take() {
            while child.try_wait().unwrap().is_none() {
                assert!(begun.elapsed() < HANGS_AFTER, "the child was not killed");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let starts = || std::fs::read_to_string(folder.path().join("starts")).unwrap_or_default();
        let before = starts();
        // As recent as it was, however long this test was interrupted.
        assert!(probe.state.lock().unwrap().hung_at.replace(Instant::now()).is_some());
        assert!(matches!(probe.survey(false), Err(GpuError::Hung { .. })));
        assert!(probe.state.lock().unwrap().running.is_none());
        assert_eq!(starts(), before, "a second child was started");
    }

    #[test]
    fn no_child_is_started_while_an_abandoned_one_is_left() {
        let (folder, probe) = scripted(r#"echo started >>"$0.log"; read line; echo '{"Ok":3}'"#, HANGS_AFTER);
        // As a child in an uninterruptible call: it is not killed here.
        probe.state.lock().unwrap().abandoned = Some(Command::new("sleep").arg("1000").spawn().unwrap());
        assert!(matches!(probe.minor("GPU-1"), Err(GpuError::Hung { .. })));
        assert!(!folder.path().join("child.log").exists(), "another child was started");
        let mut child = probe.state.lock().unwrap().abandoned.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        probe.state.lock().unwrap().abandoned = Some(child);
        assert_eq!(probe.minor("GPU-1"), Ok(3));
    }

    #[test]
    fn child_that_ends_is_an_error_and_the_next_request_starts_another() {
        let (_folder, probe) =
            scripted(r#"read line; if [ -e "$0.ran" ]; then echo '{"Ok":3}'; fi; touch "$0.ran""#, HANGS_AFTER);
        assert!(matches!(probe.minor("GPU-1"), Err(GpuError::Process { .. })));
        assert_eq!(probe.minor("GPU-1"), Ok(3));
    }

    /// A child that goes on with a library that was replaced, and others that begin with the next one.
    fn with_replaced_library(others: &str) -> Result<GpuSurvey, GpuError> {
        let survey = r#"{"Ok":{"gpus":[],"lost":0,"unreadable":[],"is_library_replaced":true}}"#;
        let script = format!(
            r#"read line; if [ -e "$0.ran" ]; then echo '{others}'; else touch "$0.ran"; echo '{survey}'; fi; read line"#
        );
        let (_folder, probe) = scripted(&script, HANGS_AFTER);
        let found = probe.survey(false);
        assert_eq!(probe.state.lock().unwrap().running.is_some(), !others.contains("Ok"), "{found:?}");
        found
    }

    #[test]
    fn replaced_library_needs_a_restart_where_no_other_process_can_use_the_driver() {
        let replaced = r#"{"Err":{"error":"process","message":"m","fault":"driver_replaced"}}"#;
        let found = with_replaced_library(replaced).unwrap();
        assert!(found.restart_needed.unwrap().ends_with(": m"));
        let removed = with_replaced_library(r#"{"Err":{"error":"not_installed","why":"w"}}"#).unwrap();
        assert!(removed.restart_needed.is_some());
        let unknown = with_replaced_library(r#"{"Err":{"error":"process","message":"m"}}"#).unwrap();
        assert_eq!(unknown.restart_needed, None, "a failure of the process itself");
        // The same version was installed again: the next child has it.
        let same = with_replaced_library(r#"{"Ok":{"gpus":[],"lost":0,"unreadable":[]}}"#).unwrap();
        assert_eq!(same.restart_needed, None);
    }

    #[test]
    fn endless_answer_is_cut_off() {
        let (_folder, probe) =
            scripted("read line; while :; do echo -n xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done", HANGS_AFTER);
        let error = probe.minor("GPU-1").unwrap_err();
        assert!(matches!(&error, GpuError::Process { message, .. } if message.contains("too long")), "{error}");
    }
}
