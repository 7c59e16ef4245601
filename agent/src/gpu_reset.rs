//! `node.gpu_reset`: the reset of one GPU by `nvidia-smi --gpu-reset`, since NVIDIA's management library has no public function for it.
//!
//! ```text
//! withheld from tenants -> the agent's own child ends -> persistence mode off -> reset -> persistence mode as before
//! ```
//!
//! The driver refuses a reset while a process has the GPU open. Persistence mode counts as one, so that it is switched off for the reset.
//! Which GPUs had it is stored first: a repeat after a crash switches it on again. A reset may be repeated at any step.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use tracing::warn;

use crate::atomic_file;
use crate::bounded_tool::{self, EndedTool, ToolError};
use crate::executor::Executor;
use crate::gpu_probe::GpuProbe;
use crate::gpus::Gpus;
use crate::task_outcome::{TaskFailure, TaskOutput, output};

/// Where the driver's packages put the tool.
pub const DEFAULT_PROGRAMS: &str = "/usr/bin";
const TOOL: &str = "nvidia-smi";
/// A reset takes some ten seconds.
const RESET_LIMIT: Duration = Duration::from_secs(120);
/// Of a query or a change of a setting.
const SETTING_LIMIT: Duration = Duration::from_secs(30);
/// A monitoring program has the driver open for a moment: the reset is tried again for so long.
const BUSY_RETRIES: Duration = Duration::from_secs(20);
const BUSY_PAUSE: Duration = Duration::from_secs(2);
/// The UUIDs of the GPUs whose persistence mode is off for a reset, a line for each.
const RECORD: &str = "gpu-reset.persistence";
/// The most characters of the tool's output in a message.
const MAX_MESSAGE: usize = 400;

/// The exit codes of the tool that say that this GPU, or this user, cannot be helped: `NVML_ERROR_NOT_SUPPORTED`, `NVML_ERROR_NO_PERMISSION`.
const UNSUPPORTED_CODES: [i32; 2] = [3, 4];
/// What the tool writes where another process has the GPU open, whatever its exit code is (255 lately).
const BUSY_TEXTS: [&str; 3] = ["in use by another client", "in use by another process", "being used by"];
/// What it writes where a reset of this GPU alone is impossible: GPUs that share NVLinks before Ampere, the GPU of the display.
const UNSUPPORTED_TEXTS: [&str; 3] = ["not supported", "nvlink", "primary gpu"];

/// Resets GPUs of this machine.
#[derive(Debug)]
pub struct GpuResetter {
    programs: PathBuf,
    record: PathBuf,
    busy_retries: Duration,
}

impl GpuResetter {
    /// A resetter that runs `nvidia-smi` of this folder.
    #[must_use]
    pub fn new(programs: PathBuf, state_dir: &Path) -> Self {
        Self { programs, record: state_dir.join(RECORD), busy_retries: BUSY_RETRIES }
    }

    /// Resets the GPU, unless a tenant has it. The caller resets one at a time.
    ///
    /// # Errors
    /// `device_in_use`: a tenant has it. `gpu_busy`: a process of the machine has it open. `reset_unsupported`: not this GPU, not alone, or not
    /// by this agent. `reset_hung`, `reset_failed`, `invalid_task`, `node_storage`.
    pub fn reset(&self, gpus: &Gpus, executor: &dyn Executor, uuid: &str) -> Result<TaskOutput, TaskFailure> {
        check(uuid)?;
        let Gpus::Nvml(probe) = gpus else {
            return Err(unsupported("the machine has no GPU of NVIDIA's that could be reset"));
        };
        let _withheld = executor.withhold_gpu(uuid)?;
        self.reset_withheld(probe, uuid)
    }

    fn reset_withheld(&self, probe: &GpuProbe, uuid: &str) -> Result<TaskOutput, TaskFailure> {
        // The agent's own child has every GPU open.
        let done = probe.without_child(|| {
            let is_persistent = self.suspend_persistence(uuid)?;
            let done = self.reset_when_idle(uuid);
            if is_persistent {
                self.resume_persistence(uuid);
            }
            done
        });
        let done = done.map_err(|error| TaskFailure::new("reset_hung", error.to_string()))?;
        Ok(output([("gpu_uuid", json!(uuid)), ("tool", json!(done?))]))
    }

    /// Returns what the tool has written.
    fn reset_when_idle(&self, uuid: &str) -> Result<String, TaskFailure> {
        let deadline = Instant::now() + self.busy_retries;
        loop {
            let ended = self.tool(&["--gpu-reset", "-i", uuid], RESET_LIMIT).map_err(|error| failed_tool(&error))?;
            if ended.status.success() {
                return Ok(written(&ended));
            }
            let failure = refused(&ended);
            if failure.code != "gpu_busy" || Instant::now() + BUSY_PAUSE > deadline {
                return Err(failure);
            }
            std::thread::sleep(BUSY_PAUSE);
        }
    }

    /// Whether it was on, now or before a reset that did not end.
    fn suspend_persistence(&self, uuid: &str) -> Result<bool, TaskFailure> {
        let mut suspended = self.suspended()?;
        if !suspended.contains(uuid) && !self.is_persistent(uuid)? {
            return Ok(false);
        }
        suspended.insert(uuid.to_owned());
        self.store(&suspended)?;
        // Where that fails, the reset is refused, and says why.
        let _ = self.tool(&["-pm", "0", "-i", uuid], SETTING_LIMIT);
        Ok(true)
    }

    /// A GPU that stays without it is slow to start, and nothing worse.
    fn resume_persistence(&self, uuid: &str) {
        let resumed = self.tool(&["-pm", "1", "-i", uuid], SETTING_LIMIT).map_err(|error| error.to_string());
        let resumed = resumed.and_then(|ended| if ended.status.success() { Ok(()) } else { Err(written(&ended)) });
        let resumed = resumed.and_then(|()| {
            let mut suspended = self.suspended().map_err(|failure| failure.to_string())?;
            suspended.remove(uuid);
            self.store(&suspended).map_err(|failure| failure.to_string())
        });
        if let Err(error) = resumed {
            warn!(error_code = "persistence_mode", gpu_uuid = uuid, error, "persistence mode stays off after a reset");
        }
    }

    /// A GPU that waits for its reset may not report its mode: then it is that of any other.
    fn is_persistent(&self, uuid: &str) -> Result<bool, TaskFailure> {
        let args = ["--query-gpu=uuid,persistence_mode", "--format=csv,noheader"];
        let ended = self.tool(&args, SETTING_LIMIT).map_err(|error| failed_tool(&error))?;
        let modes: Vec<_> = ended.stdout.lines().filter_map(|line| line.split_once(',')).collect();
        let mode_of = |wanted: &str| modes.iter().find(|(it, _)| it.trim() == wanted).map(|(_, mode)| mode.trim());
        Ok(match mode_of(uuid) {
            Some("Enabled") => true,
            Some("Disabled") => false,
            Some(_) | None => modes.iter().any(|(_, mode)| mode.trim() == "Enabled"),
        })
    }

    fn suspended(&self) -> Result<BTreeSet<String>, TaskFailure> {
        let text = atomic_file::read_if_there(&self.record)?.unwrap_or_default();
        Ok(text.lines().map(str::to_owned).collect())
    }

    fn store(&self, suspended: &BTreeSet<String>) -> Result<(), TaskFailure> {
        if suspended.is_empty() {
            return Ok(atomic_file::remove(&self.record)?);
        }
        let text: String = suspended.iter().flat_map(|uuid| [uuid.as_str(), "\n"]).collect();
        Ok(atomic_file::write_atomically(&self.record, text.as_bytes(), atomic_file::PRIVATE)?)
    }

    fn tool(&self, args: &[&str], limit: Duration) -> Result<EndedTool, ToolError> {
        let args: Vec<OsString> = args.iter().map(Into::into).collect();
        bounded_tool::run_to_end(&self.programs, TOOL, &args, limit)
    }
}

/// A UUID as the driver writes it: nothing that the tool could take for an option.
fn check(uuid: &str) -> Result<(), TaskFailure> {
    let digits = uuid.strip_prefix("GPU-").filter(|digits| digits.len() == 36);
    if digits.is_some_and(|digits| uuid::Uuid::try_parse(digits).is_ok()) {
        return Ok(());
    }
    Err(TaskFailure::new("invalid_task", "the GPU is not named by its UUID"))
}

fn unsupported(why: impl Into<String>) -> TaskFailure {
    TaskFailure::new("reset_unsupported", why)
}

/// The tool did not end by itself.
fn failed_tool(error: &ToolError) -> TaskFailure {
    match error {
        ToolError::NotTested(why) => unsupported(why),
        ToolError::Hung { .. } => TaskFailure::new("reset_hung", error.to_string()),
        ToolError::Ended { .. }
        | ToolError::TooMuchOutput { .. }
        | ToolError::Garbage { .. }
        | ToolError::NotRun { .. } => TaskFailure::new("reset_failed", error.to_string()),
    }
}

/// The tool ended with a failure.
fn refused(ended: &EndedTool) -> TaskFailure {
    let text = written(ended);
    let lower = text.to_lowercase();
    let has = |texts: &[&str]| texts.iter().any(|it| lower.contains(it));
    let code = match ended.status.code() {
        Some(code) if UNSUPPORTED_CODES.contains(&code) => "reset_unsupported",
        _ if has(&BUSY_TEXTS) => "gpu_busy",
        _ if has(&UNSUPPORTED_TEXTS) => "reset_unsupported",
        Some(_) | None => "reset_failed",
    };
    TaskFailure::new(code, format!("{TOOL} ended with {}: {text}", ended.status))
}

/// On one line, and bounded. The tool writes its errors to either stream.
fn written(ended: &EndedTool) -> String {
    let text = format!("{} {}", ended.stdout, ended.stderr);
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(MAX_MESSAGE).collect()
}

#[cfg(test)]
mod tests;
