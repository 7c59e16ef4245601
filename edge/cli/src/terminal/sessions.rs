//! Terminal sessions: listing, showing and ending them.

use crate::allocations;
use crate::api::{Api, Query};
use crate::completion;
use crate::failure::Failure;
use crate::output::Column;
use crate::resource_ref::{self, ALLOCATION, Ref, ResourceKind, TERMINAL_SESSION};
use serde_json::json;
use uuid::Uuid;

/// A bound above the number of sessions that a policy admits on one allocation.
const MOST: usize = 1000;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists the open sessions of an allocation.
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        listed: TerminalSelector,
        /// Administrators: list those in this state: opened, attached, detached, closed.
        #[arg(long, requires = "all")]
        state: Option<String>,
    },
    /// Administrators: shows one session.
    Show {
        #[arg(add = completion::of(&TERMINAL_SESSION))]
        session: Ref,
    },
    /// Ends one of your sessions, with the program that runs in it.
    End {
        #[arg(add = completion::of(&ALLOCATION))]
        allocation: Ref,
        /// Its id, or the beginning of it.
        session: Ref,
    },
    /// Administrators: ends a session of any user.
    Kill {
        #[arg(add = completion::of(&TERMINAL_SESSION))]
        session: Ref,
        /// The reason, for the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
}

/// What is listed of terminals: what one allocation has, or everybody's.
#[derive(Debug, clap::Args)]
pub(crate) struct TerminalSelector {
    #[arg(required_unless_present = "all", add = completion::of(&ALLOCATION))]
    pub(crate) allocation: Option<Ref>,
    /// Administrators: list those of all users, ended ones too.
    #[arg(long, conflicts_with = "allocation")]
    all: bool,
    /// Administrators: list those of this user.
    #[arg(long, value_name = "ID", requires = "all")]
    pub(crate) user: Option<String>,
    /// Show at most this many.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
    pub(crate) limit: u16,
}

/// An open session of one allocation.
pub(super) const OPEN: ResourceKind = ResourceKind {
    noun: "open terminal",
    listed_by: "gpuctl terminal sessions list",
    path: ALLOCATION.path,
    names: &[],
    shown: &["/state", "/opened_at"],
};

const IN_A_LIST: [Column; 6] = [
    ("ID", "/id"),
    ("STATE", "/state"),
    ("OPENED", "/opened_at"),
    ("DETACHED", "/detached_at"),
    ("ENDS BY", "/ends_at"),
    ("RECORDED", "/recording"),
];

const ALL: [Column; 7] = [
    ("ID", "/id"),
    ("STATE", "/state"),
    ("USER", "/user_id"),
    ("ALLOCATION", "/allocation_id"),
    ("OPENED", "/opened_at"),
    ("ENDS BY", "/ends_at"),
    ("RECORDED", "/recording"),
];

const ALONE: [Column; 14] = [
    ("id", "/id"),
    ("state", "/state"),
    ("user", "/user_id"),
    ("allocation", "/allocation_id"),
    ("node", "/node_id"),
    ("opened", "/opened_at"),
    ("detached", "/detached_at"),
    ("ends by", "/ends_at"),
    ("connections so far", "/attachments"),
    ("recorded", "/recording"),
    ("closed", "/closed_at"),
    ("why", "/close_reason"),
    ("exit code", "/exit/code"),
    ("ended by signal", "/exit/signal"),
];

/// The path of an allocation's open sessions.
pub(super) fn path(allocation: Uuid) -> String {
    format!("{}/terminal-sessions", allocations::path(allocation))
}

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { listed: TerminalSelector { allocation: Some(allocation), limit, .. }, .. } => {
            let id = resource_ref::allocation(&allocation, api).await?;
            api.out.list(&api.list(&path(id), &[], MOST.min(limit.into())).await?, &IN_A_LIST)
        }
        Command::List { listed: TerminalSelector { allocation: None, user, limit, .. }, state } => {
            let given = [("state", state), ("user_id", user)];
            let query: Query<'_> = given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
            api.out.list(&api.list(TERMINAL_SESSION.path, &query, limit.into()).await?, &ALL)
        }
        Command::Show { session } => {
            let id = session.id(&TERMINAL_SESSION, api).await?;
            api.out.show(&api.get(&format!("{}/{id}", TERMINAL_SESSION.path), &[]).await?, &ALONE)
        }
        Command::End { allocation, session } => {
            let allocation = resource_ref::allocation(&allocation, api).await?;
            let id = session.id_in(&OPEN, &path(allocation), api).await?;
            let ended = api.delete(&format!("{}/{id}", path(allocation)), &[]).await?;
            api.out.done(&ended, &format!("Terminal {id} has ended."))
        }
        Command::Kill { session, reason } => {
            let id = session.id(&TERMINAL_SESSION, api).await?;
            let path = format!("{}/{id}/kill", TERMINAL_SESSION.path);
            api.out.show(&api.post(&path, &json!({ "reason": reason })).await?, &ALONE)
        }
    }
}
