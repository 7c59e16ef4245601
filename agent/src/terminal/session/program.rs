//! A session's program: a child of the agent, or of a process that outlives it.

use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::process::Child;
use tokio::time::timeout;
use wire::terminal::ProgramExit;

use crate::terminal::session_handover::{HeldProgram, KILL_GRACE};

/// How long a holder may take beyond the grace period of its program.
const HOLDER_TIMEOUT: Duration = Duration::from_secs(5);
/// The exit status is unknown.
const UNKNOWN: ProgramExit = ProgramExit::Code(-1);

pub(in crate::terminal) enum Program {
    /// It ends with the agent.
    Child(Child),
    Held(HeldProgram),
}

impl Program {
    /// Waits for its end. Cancel-safe.
    pub(super) async fn wait(&mut self) -> ProgramExit {
        match self {
            Self::Child(child) => child.wait().await.map_or(UNKNOWN, exit_of),
            Self::Held(program) => program.wait().await.unwrap_or(UNKNOWN),
        }
    }

    /// Ends the shell and its process group. What a user has put into the background of the machine ends with the allocation.
    pub(super) async fn end(&mut self) -> ProgramExit {
        let child = match self {
            Self::Held(program) => {
                program.end().await;
                return timeout(KILL_GRACE + HOLDER_TIMEOUT, program.wait()).await.ok().flatten().unwrap_or(UNKNOWN);
            }
            Self::Child(child) => child,
        };
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw);
        let signal = |signal| pid.map(|pid| killpg(pid, signal));
        signal(Signal::SIGHUP);
        let status = match timeout(KILL_GRACE, child.wait()).await {
            Ok(status) => status,
            Err(_) => {
                signal(Signal::SIGKILL);
                child.wait().await
            }
        };
        status.map_or(UNKNOWN, exit_of)
    }
}

fn exit_of(status: ExitStatus) -> ProgramExit {
    match (status.code(), status.signal()) {
        (Some(code), _) => ProgramExit::Code(code),
        (None, Some(signal)) => ProgramExit::Signal(signal),
        (None, None) => UNKNOWN,
    }
}
