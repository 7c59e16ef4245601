//! `gpuctl terminal`: a shell on an allocation in the user's own terminal, which goes on when connections are lost.

mod again;
mod connection;
mod escape;
pub(crate) mod raw;
pub(crate) mod screen;
mod session;
pub(crate) mod sessions;

use crate::api::Api;
use crate::complete;
use crate::duration;
use crate::failure::{Ended, Failure};
use crate::out::say_always;
use crate::reference::{self, ALLOCATION, Ref};
use session::{Over, Session};
use std::io::{self, IsTerminal as _};
use std::time::Duration;
use uuid::Uuid;

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct TerminalArgs {
    #[command(subcommand)]
    command: Option<Command>,
    #[arg(required = true, add = complete::of(&ALLOCATION))]
    allocation: Option<Ref>,
    /// Go back to a shell that was left; `gpuctl terminal sessions list` shows which there are.
    #[arg(long, value_name = "ID")]
    session: Option<Ref>,
    /// How long to look for a way back when the connection is lost (`90s`, `10m`).
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = duration::parse)]
    reconnect_for: Duration,
    /// Hand every `~` on to the shell.
    #[arg(long)]
    no_escape: bool,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// The terminals there are.
    #[command(subcommand)]
    Sessions(sessions::Command),
}

/// A terminal that is opened here.
struct Terminal {
    allocation: Uuid,
    session: Option<Uuid>,
    reconnect_for: Duration,
    no_escape: bool,
}

impl TerminalArgs {
    /// Whether it takes the user's terminal.
    pub(crate) const fn is_interactive(&self) -> bool {
        self.command.is_none()
    }
}

pub(crate) async fn run(args: TerminalArgs, api: &Api) -> Result<u8, Failure> {
    match (args.command, args.allocation) {
        (Some(Command::Sessions(command)), _) => sessions::run(command, api).await.map(|()| 0),
        (None, Some(allocation)) => {
            let allocation = reference::allocation(&allocation, api).await?;
            let session = match args.session {
                Some(session) => Some(session.id_in(&sessions::OPEN, &sessions::path(allocation), api).await?),
                None => None,
            };
            let terminal =
                Terminal { allocation, session, reconnect_for: args.reconnect_for, no_escape: args.no_escape };
            open(terminal, api).await
        }
        (None, None) => Err(Failure::usage("no allocation was named")),
    }
}

async fn open(args: Terminal, api: &Api) -> Result<u8, Failure> {
    let allocation = args.allocation;
    if !io::stdin().is_terminal() {
        return Err(Failure::usage("standard input is no terminal")
            .next(format!("Run a command without one: gpuctl ssh {allocation} -- COMMAND")));
    }
    let mut session = Session::begin(args, api)?;
    let over = session.live().await;
    let left_behind = session.left_behind().filter(|_| over.as_ref().map_or_else(may_go_on, Over::may_run_on));
    // The user's own terminal is theirs again before anything is said.
    let unclean = !matches!(over, Ok(Over::Exited { .. }));
    session.finish(unclean).await;
    if let Some(id) = left_behind {
        say_always(&format!("The shell runs on. Back to it: gpuctl terminal {allocation} --session {id}"));
    }
    match over.map_err(|failure| explained(failure, allocation))? {
        Over::Exited { code: Some(code), .. } => Ok(u8::try_from(code & 0xff).unwrap_or(u8::MAX)),
        Over::Exited { code: None, signal } => Ok(by_signal(signal.unwrap_or_default())),
        Over::Signalled(signal) => Ok(by_signal(signal)),
        Over::Left => Ok(0),
        Over::Closed(code) => Err(closed(code)),
    }
}

/// Whether a session may still be there after this: nobody has said that it, or what it was on, is not.
const fn may_go_on(failure: &Failure) -> bool {
    !matches!(failure.ended, Ended::NotFound | Ended::Refused)
}

/// With what to do where there are too many.
fn explained(failure: Failure, allocation: Uuid) -> Failure {
    let key = failure.answer.as_ref().map(|answer| &answer.details["policy_key"]);
    match key {
        Some(key) if key == "terminal.sessions_per_allocation" => {
            failure.next(format!("Those that are open: gpuctl terminal sessions list {allocation}"))
        }
        Some(_) | None => failure,
    }
}

/// As a shell tells of it.
fn by_signal(signal: i32) -> u8 {
    u8::try_from(128_i32.saturating_add(signal)).unwrap_or(u8::MAX)
}

/// A session that the service ended, by its close code.
fn closed(code: u16) -> Failure {
    let (ended, why) = match code {
        4403 => (Ended::Refused, "the allocation was released, or an administrator closed the session"),
        4408 => (Ended::Refused, "the session has reached the end of its time; a new one can be opened"),
        4409 => (Ended::Refused, "another connection has taken this session over"),
        4401 => (Ended::Refused, "the service takes none of its own tokens for this session"),
        1011 => (Ended::Server, "the node could not run the session"),
        _ => (Ended::Server, "the service closed the connection"),
    };
    Failure::new(ended, format!("{why} (close code {code})"))
}
