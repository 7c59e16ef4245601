//! The running cluster, for administrators: members, entities and restarts. The tree is in `supervision_tree.rs`.

use crate::api::Api;
use crate::confirmation::Confirm;
use crate::failure::{ExitStatus, Failure};
use crate::output::Column;
use crate::resource_ref::{self, NODE, Ref, ResourceKind, SKU};
use serde_json::{Value, json};
use std::str::FromStr;
use uuid::Uuid;

const PATH: &str = "/api/v1/admin/runtime";

/// An entity on the command line, by its kind and its id or a unique prefix of it: `node/0198`. Nodes, allocations and SKUs also go by
/// name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EntityRef {
    kind: String,
    id: Ref,
}

impl FromStr for EntityRef {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (kind, id) = text.split_once('/').ok_or("an entity is written as KIND/ID, such as node/0198f000")?;
        let good = !kind.is_empty() && kind.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        if id.contains('/') {
            return Err("an id has no `/`");
        }
        let id = id.parse()?;
        if good {
            Ok(Self { kind: kind.to_owned(), id })
        } else {
            Err("the kind is a word such as node or billing_account")
        }
    }
}

impl EntityRef {
    async fn path(&self, api: &Api) -> Result<String, Failure> {
        let id = match self.kind.as_str() {
            "node" => self.id.id(&NODE, api).await?,
            "allocation" => resource_ref::allocation(&self.id, api).await?,
            "sku" => self.id.id(&SKU, api).await?,
            kind => self.id_in_tree(kind, api).await?,
        };
        Ok(format!("{PATH}/entities/{}/{id}", self.kind))
    }

    /// Resolves a kind that has no list of its own.
    async fn id_in_tree(&self, kind: &str, api: &Api) -> Result<Uuid, Failure> {
        if let Some(id) = self.id.whole() {
            return Ok(id);
        }
        let query = [("kind", kind.to_owned()), ("limit", MAX_TREE_LEN.to_string())];
        let tree = api.get(&format!("{PATH}/tree"), &query).await?;
        if tree["truncated"] == true {
            let why =
                format!("there are over {MAX_TREE_LEN} entities of kind {kind}, too many to search for `{}`", self.id);
            return Err(Failure::usage(why).next("Give the whole id."));
        }
        self.id.resolve_among(&ENTITY_KIND, tree["entities"].as_array().map_or(&[], Vec::as_slice))
    }
}

/// The most entities that the API's tree shows.
pub(crate) const MAX_TREE_LEN: u32 = 1000;

/// An entity of any kind.
const ENTITY_KIND: ResourceKind = ResourceKind {
    noun: "entity",
    listed_by: "gpuctl tree --kind KIND",
    path: "/api/v1/admin/runtime/tree",
    names: &[],
    shown: &["/kind", "/state"],
};

#[derive(Debug, clap::Args)]
pub(crate) struct EntityArgs {
    /// KIND/ID, or with a unique prefix of the id: node/0198f000. `gpuctl tree --kind KIND` lists ids.
    entity: EntityRef,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RestartArgs {
    /// An entity, KIND/ID or with a unique prefix of the id; or with --member a worker, as `gpuctl tree` shows it.
    #[arg(value_name = "ENTITY|WORKER")]
    what: String,
    /// The member whose worker it is, by name or id.
    #[arg(long, value_name = "NAME|ID")]
    member: Option<String>,
    /// The reason, for the audit log.
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
    ("member", "/member_name"),
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
    let [incarnation, unowned] = ["incarnation", "unowned_shards"].map(|name| crate::printable::cell(&found[name]));
    api.out.line(&format!("incarnation {incarnation}, {unowned} shards without an owner"))
}

pub(crate) async fn entity(args: EntityArgs, api: &Api) -> Result<(), Failure> {
    let found = api.get(&args.entity.path(api).await?, &[]).await?;
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
            let entity: EntityRef = what.parse().map_err(|why| no_entity(&what, why))?;
            entity.path(api).await?
        }
    };
    confirm.ask(&format!("Restart {what}?"))?;
    let body = reason.map_or_else(|| json!({}), |reason| json!({ "reason": reason }));
    let restarted = api.post(&format!("{path}/restart"), &body).await?;
    let came = if restarted["restarted"] == true { "is restarted" } else { "did not run; it starts when it is needed" };
    api.out.done(&restarted, &format!("{what} {came}."))
}

fn no_entity(what: &str, why: &str) -> Failure {
    let next = match what.split_once('/') {
        Some(_) => "`gpuctl tree --kind KIND` lists the entities of a kind.",
        None => {
            "`gpuctl tree --kind KIND` lists the entities of a kind. A worker is restarted at a member: --member NAME."
        }
    };
    Failure::usage(format!("`{what}` is no entity: {why}")).next(next)
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
    fn entity_is_a_kind_and_an_id_or_its_beginning() {
        let id = "0198f000-0000-7000-8000-000000000000";
        assert!(format!("billing_account/{id}").parse::<EntityRef>().is_ok());
        assert!("node/0198".parse::<EntityRef>().is_ok());
        for bad in [id.to_owned(), format!("../{id}"), format!("node/{id}/x"), "node/".to_owned(), format!("/{id}")] {
            assert!(bad.parse::<EntityRef>().is_err(), "{bad}");
        }
        let hint = |what: &str| no_entity(what, "").next.unwrap_or_default();
        assert!(hint("outbox-relay").contains("--member") && !hint("node/").contains("--member"));
        assert!(worker("outbox-relay").is_ok() && worker("a/b").is_err() && worker("").is_err());
    }
}
