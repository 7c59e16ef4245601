//! Logins to the web console: one's own, and those of all users for administrators.

use crate::api::{Api, Query};
use crate::completion;
use crate::failure::Failure;
use crate::output::Column;
use crate::resource_ref::{Ref, ResourceKind};
use clap::ValueEnum;
use serde_json::json;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists where you are logged in to the web console.
    #[command(visible_alias = "ls")]
    List {
        /// Administrators: list the logins of all users.
        #[arg(long)]
        all: bool,
        /// Administrators: list those of this user.
        #[arg(long, value_name = "ID", requires = "all")]
        user: Option<String>,
        /// List those in this state.
        #[arg(long, value_enum)]
        state: Option<State>,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// Ends one of your logins to the console, with its terminals.
    End {
        /// Its id, or the beginning of it.
        #[arg(add = completion::of(&OWN))]
        session: Ref,
    },
    /// Administrators: ends a login of any user, with its terminals.
    Kill {
        /// Its id, or the beginning of it.
        #[arg(add = completion::of(&ANY))]
        session: Ref,
        /// The reason, for the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub(crate) enum State {
    Active,
    Ended,
}

const OWN: ResourceKind = ResourceKind {
    noun: "login",
    listed_by: "gpuctl sessions list",
    path: "/api/v1/me/sessions",
    names: &[],
    shown: &["/state", "/address", "/user_agent"],
};

/// The logins of all users: administrators alone read that list.
const ANY: ResourceKind = ResourceKind {
    noun: "login",
    listed_by: "gpuctl sessions list --all",
    path: "/api/v1/admin/browser-sessions",
    names: &[],
    shown: &["/user_id", "/state", "/address"],
};

const IN_A_LIST: [Column; 7] = [
    ("ID", "/id"),
    ("STATE", "/state"),
    ("SINCE", "/created_at"),
    ("LAST SEEN", "/last_seen_at"),
    ("ENDS BY", "/ends_at"),
    ("ADDRESS", "/address"),
    ("BROWSER", "/user_agent"),
];

const ALL: [Column; 8] = [
    ("ID", "/id"),
    ("USER", "/user_id"),
    ("STATE", "/state"),
    ("SINCE", "/created_at"),
    ("LAST SEEN", "/last_seen_at"),
    ("ENDS BY", "/ends_at"),
    ("ADDRESS", "/address"),
    ("BROWSER", "/user_agent"),
];

const ALONE: [Column; 11] = [
    ("id", "/id"),
    ("user", "/user_id"),
    ("state", "/state"),
    ("since", "/created_at"),
    ("last seen", "/last_seen_at"),
    ("ends unused", "/idle_ends_at"),
    ("ends by", "/ends_at"),
    ("address", "/address"),
    ("browser", "/user_agent"),
    ("ended", "/ended_at"),
    ("why", "/end_reason"),
];

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { all, user, state, limit } => {
            let given = [("user_id", user), ("state", state.map(|state| state.into_str().to_owned()))];
            let query: Query<'_> = given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
            let path = if all { ANY.path } else { OWN.path };
            let page = api.list(path, &query, limit.into()).await?;
            api.out.list(&page, if all { &ALL[..] } else { &IN_A_LIST[..] })
        }
        Command::End { session } => {
            let id = session.id(&OWN, api).await?;
            let ended = api.post_empty(&format!("{}/{id}/end", OWN.path)).await?;
            api.out.show(&ended, &ALONE)
        }
        Command::Kill { session, reason } => {
            let id = session.id(&ANY, api).await?;
            let ended = api.post(&format!("{}/{id}/end", ANY.path), &json!({ "reason": reason })).await?;
            api.out.show(&ended, &ALONE)
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    #[test]
    fn sessions_of_others_need_all_and_a_reason() {
        for bad in ["gpuctl sessions list --user ann", "gpuctl sessions kill 0198", "gpuctl sessions list --state open"]
        {
            assert!(crate::Arguments::try_parse_from(bad.split(' ')).is_err(), "{bad}");
        }
        for good in ["gpuctl sessions list --all --user ann --state ended", "gpuctl sessions kill 0198 --reason theft"]
        {
            assert!(crate::Arguments::try_parse_from(good.split(' ')).is_ok(), "{good}");
        }
    }
}
