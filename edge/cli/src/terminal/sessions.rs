//! The terminals there are: those to go back to, and those to end.

use super::connection;
use crate::allocations;
use crate::api::{Api, Query};
use crate::complete;
use crate::failure::{Ended, Failure};
use crate::out::Column;
use crate::reference::{self, ALLOCATION, Kind, Ref, TERMINAL_SESSION};
use crate::socket::Socket;
use futures::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use std::time::Duration;
use tokio_tungstenite::tungstenite::Message;
use uuid::Uuid;

/// More than any policy admits on one allocation.
const MOST: usize = 1000;
/// How long a shell may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(15);

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// The open ones of an allocation.
    #[command(visible_alias = "ls")]
    List {
        #[arg(required_unless_present = "all", add = complete::of(&ALLOCATION))]
        allocation: Option<Ref>,
        /// Administrators: everybody's, also those that have ended.
        #[arg(long, conflicts_with = "allocation")]
        all: bool,
        /// Administrators: those in this state: opened, attached, detached, closed.
        #[arg(long, requires = "all")]
        state: Option<String>,
        /// Administrators: those of this user.
        #[arg(long, value_name = "ID", requires = "all")]
        user: Option<String>,
        /// At most so many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// Administrators: one of them.
    Show {
        #[arg(add = complete::of(&TERMINAL_SESSION))]
        session: Ref,
    },
    /// Ends one of yours, with the program that runs in it.
    End {
        #[arg(add = complete::of(&ALLOCATION))]
        allocation: Ref,
        /// Its id, or the beginning of it.
        session: Ref,
    },
    /// Administrators: ends anybody's.
    Kill {
        #[arg(add = complete::of(&TERMINAL_SESSION))]
        session: Ref,
        /// Why; it stands in the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
}

/// An open session of one allocation.
pub(super) const OPEN: Kind = Kind {
    noun: "open terminal",
    listed_by: "gpuctl terminal sessions list",
    path: ALLOCATION.path,
    names: &[],
    shown: &["/state", "/opened_at"],
};

const IN_A_LIST: [Column; 5] =
    [("ID", "/id"), ("STATE", "/state"), ("OPENED", "/opened_at"), ("ENDS BY", "/ends_at"), ("RECORDED", "/recording")];

const ALL: [Column; 7] = [
    ("ID", "/id"),
    ("STATE", "/state"),
    ("USER", "/user_id"),
    ("ALLOCATION", "/allocation_id"),
    ("OPENED", "/opened_at"),
    ("ENDS BY", "/ends_at"),
    ("RECORDED", "/recording"),
];

const ALONE: [Column; 13] = [
    ("id", "/id"),
    ("state", "/state"),
    ("user", "/user_id"),
    ("allocation", "/allocation_id"),
    ("node", "/node_id"),
    ("opened", "/opened_at"),
    ("ends by", "/ends_at"),
    ("connections so far", "/attachments"),
    ("recorded", "/recording"),
    ("closed", "/closed_at"),
    ("why", "/close_reason"),
    ("exit code", "/exit/code"),
    ("ended by signal", "/exit/signal"),
];

/// Where an allocation's open sessions are listed.
pub(super) fn path(allocation: Uuid) -> String {
    format!("{}/terminal-sessions", allocations::path(allocation))
}

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { allocation: Some(allocation), limit, .. } => {
            let id = reference::allocation(&allocation, api).await?;
            api.out.list(&api.list(&path(id), &[], MOST.min(limit.into())).await?, &IN_A_LIST)
        }
        Command::List { allocation: None, state, user, limit, .. } => {
            let given = [("state", state), ("user_id", user)];
            let query: Query<'_> = given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
            api.out.list(&api.list(TERMINAL_SESSION.path, &query, limit.into()).await?, &ALL)
        }
        Command::Show { session } => {
            let id = session.id(&TERMINAL_SESSION, api).await?;
            api.out.show(&api.get(&format!("{}/{id}", TERMINAL_SESSION.path), &[]).await?, &ALONE)
        }
        Command::End { allocation, session } => {
            let allocation = reference::allocation(&allocation, api).await?;
            let id = session.id_in(&OPEN, &path(allocation), api).await?;
            end(allocation, id, api).await?;
            api.out.done(&json!({ "id": id }), &format!("Terminal {id} has ended."))
        }
        Command::Kill { session, reason } => {
            let id = session.id(&TERMINAL_SESSION, api).await?;
            let path = format!("{}/{id}/kill", TERMINAL_SESSION.path);
            api.out.show(&api.post(&path, &json!({ "reason": reason })).await?, &ALONE)
        }
    }
}

/// Attaches to the session and asks it to end: the gateway is where a user's own sessions are ended.
async fn end(allocation: Uuid, session: Uuid, api: &Api) -> Result<(), Failure> {
    let mut socket = connection::attempt(api, allocation, Some(session), None).await.socket?;
    let exit = Message::Text(json!({ "type": "exit" }).to_string().into());
    let cut = |why: String| Failure::new(Ended::Network, format!("the connection to the terminal was cut: {why}"));
    socket.send(exit).await.map_err(|error| cut(error.to_string()))?;
    let ended = tokio::time::timeout(ENDS_WITHIN, exited(&mut socket)).await;
    ended
        .map_err(|_| {
            Failure::new(Ended::TooLate, format!("the terminal still runs after {} s", ENDS_WITHIN.as_secs()))
                .next(format!("Look at it: gpuctl terminal {allocation} --session {session}"))
        })?
        .map_err(cut)
}

/// Until the gateway reports the end of the program, or closes the connection with the session.
async fn exited(socket: &mut Socket) -> Result<(), String> {
    while let Some(message) = socket.next().await {
        match message.map_err(|error| error.to_string())? {
            Message::Text(text) => {
                let message: Value = serde_json::from_str(&text).unwrap_or_default();
                if message["type"] == "exit" {
                    return Ok(());
                }
            }
            Message::Close(frame) => {
                let code = frame.map_or(1005, |frame| u16::from(frame.code));
                return if code == 1000 { Ok(()) } else { Err(format!("close code {code}")) };
            }
            Message::Binary(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
        }
    }
    Err("it ended".to_owned())
}
