//! The running cluster, for administrators: members, entities and restarts. The tree is in `tree.rs`.

use crate::api::Api;
use crate::confirm::Confirm;
use crate::failure::{ExitStatus, Failure};
use crate::output::Column;
use serde_json::{Value, json};
use std::str::FromStr;
use uuid::Uuid;

const PATH: &str = "/api/v1/admin/runtime";

/// An entity as `gpuctl tree` shows it: `node/0198…`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EntityRef {
    kind: String,
    id: Uuid,
}

impl FromStr for EntityRef {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (kind, id) = text.split_once('/').ok_or("an entity is written as KIND/ID, such as node/0198f000-…")?;
        let good = !kind.is_empty() && kind.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        let id = id.parse().map_err(|_| "what follows the kind is no whole id")?;
        if good {
            Ok(Self { kind: kind.to_owned(), id })
        } else {
            Err("the kind is a word such as node or billing_account")
        }
    }
}

impl EntityRef {
    fn path(&self) -> String {
        format!("{PATH}/entities/{}/{}", self.kind, self.id)
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct EntityArgs {
    /// KIND/ID, as `gpuctl tree` shows it.
    entity: EntityRef,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RestartArgs {
    /// An entity, KIND/ID; or with --member a worker, as `gpuctl tree` shows it.
    #[arg(value_name = "ENTITY|WORKER")]
    what: String,
    /// The member whose worker it is, by name or id.
    #[arg(long, value_name = "NAME|ID")]
    member: Option<String>,
    /// Why; it stands in the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    #[command(flatten)]
    confirm: Confirm,
}

const MEMBERS: [Column; 7] = [
    ("NAME", "/name"),
    ("ID", "/id"),
    ("STARTED", "/started_at"),
    ("SHARDS", "/shard_count"),
    ("SILENT FOR MS", "/silent_for_ms"),
    ("ROLES", "/roles"),
    ("CLOCK MS", "/clock_offset_ms"),
];

const ENTITY: [Column; 13] = [
    ("kind", "/kind"),
    ("id", "/id"),
    ("state", "/state"),
    ("since", "/since"),
    ("status", "/status"),
    ("lives at", "/member_name"),
    ("shard", "/shard"),
    ("version", "/version"),
    ("waits for", "/waits_for"),
    ("state ends by", "/deadline_at"),
    ("overdue", "/overdue"),
    ("restarts", "/restarts"),
    ("last error", "/last_error"),
];

const HISTORY: [Column; 6] = [
    ("VERSION", "/version"),
    ("AT", "/at"),
    ("COMMAND", "/command"),
    ("STATE", "/to_state"),
    ("BY", "/actor"),
    ("WHY", "/why"),
];

pub(crate) async fn cluster(api: &Api) -> Result<(), Failure> {
    let mut found = api.get(&format!("{PATH}/cluster"), &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    for member in found["members"].as_array_mut().into_iter().flatten() {
        member["shard_count"] = json!(member["shards"].as_array().map_or(0, Vec::len));
    }
    api.out.list(&json!({ "items": found["members"], "next_page": null }), &MEMBERS)?;
    let [incarnation, unowned] = ["incarnation", "unowned_shards"].map(|name| crate::text::cell(&found[name]));
    api.out.line(&format!("incarnation {incarnation}, {unowned} shards without an owner"))
}

pub(crate) async fn entity(args: EntityArgs, api: &Api) -> Result<(), Failure> {
    let found = api.get(&args.entity.path(), &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    api.out.show(&found["entity"], &ENTITY)?;
    api.out.rows_below(&found["history"], &HISTORY)
}

pub(crate) async fn restart(args: RestartArgs, api: &Api) -> Result<(), Failure> {
    let RestartArgs { what, member, reason, confirm } = args;
    let path = match &member {
        Some(member) => format!("{PATH}/members/{}/workers/{}", member_id(member, api).await?, worker(&what)?),
        None => {
            let entity: EntityRef = what.parse().map_err(|why: &str| {
                Failure::usage(format!("`{what}`: {why}")).next("For a worker, name its member: --member NAME")
            })?;
            entity.path()
        }
    };
    confirm.ask(&format!("Start {what} anew?"))?;
    let body = reason.map_or_else(|| json!({}), |reason| json!({ "reason": reason }));
    let restarted = api.post(&format!("{path}/restart"), &body).await?;
    let came =
        if restarted["restarted"] == true { "is started anew" } else { "did not run; it starts when it is needed" };
    api.out.done(&restarted, &format!("{what} {came}."))
}

/// A worker's name, as a part of a path.
fn worker(name: &str) -> Result<&str, Failure> {
    let good =
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    good.then_some(name).ok_or_else(|| Failure::usage(format!("`{name}` is no worker; `gpuctl tree` shows them")))
}

async fn member_id(name: &str, api: &Api) -> Result<Uuid, Failure> {
    if let Ok(id) = name.parse() {
        return Ok(id);
    }
    let cluster = api.get(&format!("{PATH}/cluster"), &[]).await?;
    let members = cluster["members"].as_array().into_iter().flatten();
    let found = members.filter(|member| member["name"] == name).find_map(id_of);
    found.ok_or_else(|| {
        Failure::new(ExitStatus::NotFound, format!("no member is called {name}")).next("`gpuctl cluster` shows them.")
    })
}

fn id_of(member: &Value) -> Option<Uuid> {
    member["id"].as_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entity_is_a_kind_and_a_whole_id() {
        let id = "0198f000-0000-7000-8000-000000000000";
        assert!(format!("billing_account/{id}").parse::<EntityRef>().is_ok());
        for bad in [id.to_owned(), format!("../{id}"), format!("node/{id}/x"), "node/0198".to_owned(), format!("/{id}")]
        {
            assert!(bad.parse::<EntityRef>().is_err(), "{bad}");
        }
        assert!(worker("outbox-relay").is_ok() && worker("a/b").is_err() && worker("").is_err());
    }
}
