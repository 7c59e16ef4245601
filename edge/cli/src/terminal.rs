//! `gpuctl terminal`: a shell on an allocation in the user's terminal. The session survives lost connections.

mod connection;
mod escape;
pub(crate) mod io_threads;
pub(crate) mod raw_mode;
mod scrollback;
mod session;
pub(crate) mod sessions;

use crate::api::Api;
use crate::completion;
use crate::duration;
use crate::failure::{ExitStatus, Failure};
use crate::output::Output;
use crate::resource_ref::{self, ALLOCATION, Ref};
use session::{Session, SessionEnd};
use std::io::{self, IsTerminal as _};
use std::time::Duration;
use uuid::Uuid;

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct TerminalArgs {
    #[command(subcommand)]
    command: Option<Command>,
    #[arg(required = true, add = completion::of(&ALLOCATION))]
    allocation: Option<Ref>,
    /// Open a shell again that was left; `gpuctl terminal sessions list` shows which there are.
    #[arg(long, value_name = "ID")]
    session: Option<Ref>,
    /// How long to try to reconnect when the connection is lost (`90s`, `10m`).
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = duration::parse)]
    reconnect_for: Duration,
    /// Send every `~` to the shell.
    #[arg(long)]
    no_escape: bool,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists, shows and ends terminal sessions.
    #[command(subcommand)]
    Sessions(sessions::Command),
}

/// The parameters of a terminal session.
struct Terminal {
    allocation: Uuid,
    session: Option<Uuid>,
    reconnect_for: Duration,
    no_escape: bool,
    /// How notices are printed, in the raw terminal and after it.
    out: Output,
}

impl TerminalArgs {
    /// Whether it opens a session in the user's terminal.
    pub(crate) const fn is_interactive(&self) -> bool {
        self.command.is_none()
    }
}

/// `out` is for notices in the user's terminal, that of the API for those of its client.
pub(crate) async fn run(args: TerminalArgs, api: &Api, out: Output) -> Result<u8, Failure> {
    match (args.command, args.allocation) {
        (Some(Command::Sessions(command)), _) => sessions::run(command, api).await.map(|()| 0),
        (None, Some(allocation)) => {
            let allocation = resource_ref::allocation(&allocation, api).await?;
            let session = match args.session {
                Some(session) => Some(session.id_in(&sessions::OPEN, &sessions::path(allocation), api).await?),
                None => None,
            };
            let terminal =
                Terminal { allocation, session, reconnect_for: args.reconnect_for, no_escape: args.no_escape, out };
            open(terminal, api).await
        }
        (None, None) => Err(Failure::usage("no allocation was named")),
    }
}

async fn open(args: Terminal, api: &Api) -> Result<u8, Failure> {
    let (allocation, out) = (args.allocation, args.out);
    if !io::stdin().is_terminal() {
        return Err(Failure::usage("standard input is no terminal").next(format!(
            "Run a command without one, where the node admits SSH: gpuctl ssh {allocation} -- COMMAND"
        )));
    }
    let mut session = Session::begin(args, api)?;
    let end = session.run().await;
    let still_running =
        session.still_running().filter(|_| end.as_ref().map_or_else(may_still_run, SessionEnd::may_still_run));
    // The terminal is restored before anything is printed.
    let unclean = !matches!(end, Ok(SessionEnd::Exited { .. }));
    session.finish(unclean).await;
    if let Some(id) = still_running {
        out.notice(&format!("The shell runs on. Back to it: gpuctl terminal {allocation} --session {id}"));
    }
    match end.map_err(|failure| with_session_list(failure, allocation))? {
        SessionEnd::Exited { code: Some(code), .. } => Ok(u8::try_from(code & 0xff).unwrap_or(u8::MAX)),
        SessionEnd::Exited { code: None, signal } => Ok(exit_code_of_signal(signal.unwrap_or_default())),
        SessionEnd::Signalled(signal) => Ok(exit_code_of_signal(signal)),
        SessionEnd::Left => Ok(0),
        SessionEnd::Closed(code) => Err(failure_of_close_code(code)),
    }
}

/// Whether the session may still run after this failure: the service has not answered that it, or its allocation, is gone.
const fn may_still_run(failure: &Failure) -> bool {
    !matches!(failure.exit_status, ExitStatus::NotFound | ExitStatus::Refused)
}

/// Adds a hint where the limit of sessions is reached.
fn with_session_list(failure: Failure, allocation: Uuid) -> Failure {
    let key = failure.answer.as_ref().map(|answer| &answer.details["policy_key"]);
    match key {
        Some(key) if key == "terminal.sessions_per_allocation" => {
            failure.next(format!("Those that are open: gpuctl terminal sessions list {allocation}"))
        }
        Some(_) | None => failure,
    }
}

/// The exit code of a signal, as shells report it.
fn exit_code_of_signal(signal: i32) -> u8 {
    u8::try_from(128_i32.saturating_add(signal)).unwrap_or(u8::MAX)
}

/// The failure for a close code of the service.
fn failure_of_close_code(code: u16) -> Failure {
    let (exit_status, why) = match code {
        4403 => (ExitStatus::Refused, "the allocation was released, or an administrator closed the session"),
        4408 => (ExitStatus::Refused, "the session has reached the end of its time; a new one can be opened"),
        4409 => (ExitStatus::Refused, "another connection has taken this session over"),
        4401 => (ExitStatus::Refused, "the service takes none of its own tokens for this session"),
        1011 => (ExitStatus::Server, "the node could not run the session"),
        _ => (ExitStatus::Server, "the service closed the connection"),
    };
    Failure::new(exit_status, format!("{why} (close code {code})"))
}
