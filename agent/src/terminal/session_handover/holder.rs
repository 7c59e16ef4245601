//! The process between the agent and a session's program: the program's parent, so that its exit status outlives the agent.
//!
//! It has one end of a socket; the other end is with the agent and in the service manager's store. It receives the command, starts it as
//! the leader of a session on the terminal, and sends how it ended; the agent only peeks at that, so that the next agent finds it, too. When
//! all copies of the other end are closed, nothing can reach the session again, and the holder ends the program.
//!
//! It is the agent's own binary, holds no secret, and is in the agent's group: root's, not the tenant's.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use wire::terminal::ProgramExit;

/// The flag that makes the agent's program hold a session's program.
pub const FLAG: &str = "--hold-terminal";
/// The agent's own program, also while another one takes its place on the disk.
const PROGRAM: &str = "/proc/self/exe";
/// The longest command: with its environment it is what one program may be given.
const MAX_COMMAND: u32 = 1024 * 1024;
/// From the agent: the program is to end.
const END: u8 = b'E';
/// To the agent: how it ended, and a number.
const CODE: u8 = b'c';
const SIGNAL: u8 = b's';
const REPORT: usize = 5;
/// The exit code of shells for a command that cannot be started.
const NOT_STARTED: i32 = 127;
/// The grace period between SIGHUP and SIGKILL.
pub(in crate::terminal) const KILL_GRACE: Duration = Duration::from_secs(2);

/// A command on a terminal.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct HeldCommand {
    pub(super) arguments: Vec<String>,
    pub(super) environment: Vec<(String, String)>,
    pub(super) folder: std::path::PathBuf,
}

/// The agent's end.
#[derive(Debug)]
pub(in crate::terminal) struct HeldProgram {
    socket: tokio::net::UnixStream,
}

impl HeldProgram {
    /// Starts a holder for a terminal. Its program waits for [`HeldProgram::start`].
    ///
    /// # Errors
    /// It cannot be started.
    pub(super) fn prepare(terminal: OwnedFd) -> io::Result<Self> {
        let (here, there) = UnixStream::pair()?;
        let mut command = tokio::process::Command::new(PROGRAM);
        command.arg0("gpuaas-agent").arg(FLAG).env_clear().current_dir("/").process_group(0);
        command.stdin(Stdio::from(OwnedFd::from(there))).stdout(Stdio::from(terminal)).stderr(Stdio::null());
        // The runtime reaps it, as long as this agent is its parent.
        drop(command.spawn()?);
        Self::adopt(here)
    }

    /// # Errors
    /// The socket is none.
    pub(super) fn adopt(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket: tokio::net::UnixStream::from_std(socket)? })
    }

    pub(super) fn socket(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// # Errors
    /// The holder is gone.
    pub(super) async fn start(&mut self, command: &HeldCommand) -> io::Result<()> {
        use tokio::io::AsyncWriteExt as _;
        let text = serde_json::to_vec(command)?;
        let length = u32::try_from(text.len()).ok().filter(|length| *length <= MAX_COMMAND);
        let length = length.ok_or_else(|| io::Error::other("the command is too long"))?;
        self.socket.write_all(&[&length.to_be_bytes(), &text[..]].concat()).await
    }

    /// Waits for the program's end. `None`: the holder was killed, and the status is unknown. Cancel-safe, and may be repeated.
    pub(in crate::terminal) async fn wait(&self) -> Option<ProgramExit> {
        let mut report = [0; REPORT];
        // It is not consumed: an agent that is killed now leaves it to the next one.
        let peek = || Ok(recv(&self.socket, &mut report, RecvFlags::PEEK | RecvFlags::DONTWAIT)?.0);
        let read = self.socket.async_io(Interest::READABLE, peek).await.ok()?;
        let [kind, number @ ..] = report;
        let number = i32::from_be_bytes(number);
        match kind {
            CODE if read == REPORT => Some(ProgramExit::Code(number)),
            SIGNAL if read == REPORT => Some(ProgramExit::Signal(number)),
            _ => None,
        }
    }

    /// Requests that the program and its process group end: SIGHUP, and SIGKILL after [`KILL_GRACE`].
    pub(in crate::terminal) async fn end(&mut self) {
        use tokio::io::AsyncWriteExt as _;
        // A holder that is gone has no program.
        let _ = self.socket.write_all(&[END]).await;
    }
}

/// The holder's own process: its standard input is the socket, its standard output the terminal.
#[must_use]
pub fn hold() -> ExitCode {
    match hold_to_the_end() {
        Ok(()) => ExitCode::SUCCESS,
        // The agent finds the socket closed; there is no log here.
        Err(_) => ExitCode::FAILURE,
    }
}

fn hold_to_the_end() -> io::Result<()> {
    let mut socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let command = receive_command(&mut socket)?;
    let exit = match start(&command) {
        Ok(child) => watch(child, &mut socket)?,
        Err(_) => ProgramExit::Code(NOT_STARTED),
    };
    let (kind, number) = match exit {
        ProgramExit::Code(code) => (CODE, code),
        ProgramExit::Signal(signal) => (SIGNAL, signal),
    };
    socket.write_all(&[&[kind], &number.to_be_bytes()[..]].concat())
}

fn receive_command(socket: &mut UnixStream) -> io::Result<HeldCommand> {
    let mut length = [0; 4];
    socket.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length);
    if length > MAX_COMMAND {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    socket.read_exact(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Starts the command, and gives the terminal up: it must be the program's alone, or its end would not be noticed.
fn start(command: &HeldCommand) -> io::Result<Child> {
    let terminal = || Ok::<_, io::Error>(Stdio::from(io::stdout().as_fd().try_clone_to_owned()?));
    // Its session's leader, with the terminal as controlling terminal.
    let mut leader = Command::new("setsid");
    leader.args(["--ctty", "--"]).args(&command.arguments).env_clear().envs(command.environment.iter().cloned());
    leader.current_dir(&command.folder).stdin(terminal()?).stdout(terminal()?).stderr(terminal()?);
    let child = leader.spawn();
    drop(leader);
    rustix::stdio::dup2_stdout(std::fs::File::open("/dev/null")?)?;
    child
}

/// Waits for the program's end, and ends it where that is requested or the session is given up.
fn watch(mut child: Child, socket: &mut UnixStream) -> io::Result<ProgramExit> {
    let pid = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
    let exits = rustix::process::pidfd_open(
        rustix::process::Pid::from_raw(pid.as_raw()).ok_or(io::ErrorKind::NotFound)?,
        rustix::process::PidfdFlags::empty(),
    )?;
    // `None`: it may run.
    let mut kill_at: Option<Instant> = None;
    let mut is_open = true;
    loop {
        let timeout = kill_at.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
        let mut events = vec![PollFd::new(&exits, PollFlags::IN)];
        if is_open {
            events.push(PollFd::new(&*socket, PollFlags::IN));
        }
        match poll(&mut events, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [has_exited, has_message] = [0, 1].map(|at| events.get(at).is_some_and(|it| !it.revents().is_empty()));
        if has_exited {
            return Ok(exit_of(child.wait()?));
        }
        if has_message {
            let mut byte = [0];
            is_open = !matches!(socket.read(&mut byte), Ok(0) | Err(_));
            if kill_at.is_none() {
                // The child is not reaped: the number is still its own.
                let _ = killpg(pid, Signal::SIGHUP);
                kill_at = Some(Instant::now() + KILL_GRACE);
            }
        }
        if kill_at.is_some_and(|at| at <= Instant::now()) {
            let _ = killpg(pid, Signal::SIGKILL);
            kill_at = Some(Instant::now() + KILL_GRACE);
        }
    }
}

fn exit_of(status: ExitStatus) -> ProgramExit {
    match (status.code(), status.signal()) {
        (Some(code), _) => ProgramExit::Code(code),
        (None, Some(signal)) => ProgramExit::Signal(signal),
        (None, None) => ProgramExit::Code(-1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn exit_status_is_there_for_the_next_agent_too() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let next = here.try_clone().unwrap();
        let program = HeldProgram::adopt(here).unwrap();
        there.write_all(&[&[SIGNAL], &9_i32.to_be_bytes()[..]].concat()).unwrap();
        drop(there);
        assert_eq!(program.wait().await, Some(ProgramExit::Signal(9)));
        drop(program);
        assert_eq!(HeldProgram::adopt(next).unwrap().wait().await, Some(ProgramExit::Signal(9)));
    }

    #[tokio::test]
    async fn status_of_a_program_whose_holder_was_killed_is_unknown() {
        for sent in [&b""[..], b"c", b"?\0\0\0\0"] {
            let (here, mut there) = UnixStream::pair().unwrap();
            there.write_all(sent).unwrap();
            drop(there);
            assert_eq!(HeldProgram::adopt(here).unwrap().wait().await, None, "{sent:?}");
        }
    }

    #[test]
    fn command_over_its_bound_is_refused_before_it_is_read() {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        here.write_all(&u32::MAX.to_be_bytes()).unwrap();
        assert_eq!(receive_command(&mut there).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
