//! The supervision tree of the cluster, for administrators.

use crate::api::{Api, Query};
use crate::cluster::MAX_TREE_LEN;
use crate::failure::Failure;
use crate::output::{Column, table_text};
use crate::printable::{cell, plain};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// The deepest level of workers that is shown; a deeper tree is truncated.
const DEEPEST: usize = 16;

#[derive(Debug, clap::Args)]
pub(crate) struct TreeArgs {
    /// List entities of this kind: node, allocation, sku and so on.
    #[arg(long)]
    kind: Option<String>,
    /// List entities in this state.
    #[arg(long)]
    state: Option<String>,
    /// List entities past their deadline, and nothing else.
    #[arg(long)]
    overdue: bool,
    /// List entities that failed too often, and nothing else.
    #[arg(long)]
    parked: bool,
    /// Show every worker of every member, whatever its state.
    #[arg(long)]
    workers: bool,
    /// Show the entities, one by one.
    #[arg(long)]
    entities: bool,
    /// Show every worker, and every member's shards one by one.
    #[arg(long)]
    shards: bool,
    /// Show all workers, shards and entities.
    #[arg(long)]
    all: bool,
    /// The most entities to print.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    limit: u32,
}

const ENTITIES: [Column; 9] = [
    ("KIND", "/kind"),
    ("ID", "/id"),
    ("LIVES AT", "/member_name"),
    ("STATUS", "/status"),
    ("STATE", "/state"),
    ("WAITS FOR", "/waits_for"),
    ("UNTIL", "/deadline_at"),
    ("OVERDUE", "/overdue"),
    ("LAST ERROR", "/last_error"),
];

impl TreeArgs {
    /// Whether entities are listed: a service of any size has more than a screen shows.
    const fn lists_entities(&self) -> bool {
        self.entities || self.all || self.kind.is_some() || self.state.is_some() || self.overdue || self.parked
    }

    const fn extent(&self) -> Extent {
        Extent { all_workers: self.workers || self.shards || self.all, all_entities: self.lists_entities() }
    }
}

/// What of the tree is printed beside members and counts: by default, what is in trouble.
#[derive(Clone, Copy, Debug)]
struct Extent {
    all_workers: bool,
    all_entities: bool,
}

pub(crate) async fn run(args: TreeArgs, api: &Api) -> Result<(), Failure> {
    let extent = args.extent();
    let mut query: Query<'_> = Vec::new();
    query.extend(args.kind.map(|kind| ("kind", kind)));
    query.extend(args.state.map(|state| ("state", state)));
    for (name, wanted) in [("overdue", args.overdue), ("parked", args.parked), ("shards", args.shards || args.all)] {
        query.extend(wanted.then(|| (name, "true".to_owned())));
    }
    // Without a filter, these are the ones that are overdue, parked or waiting.
    let tree = read(&query, args.limit as usize, api).await?;
    if api.out.is_json() {
        return api.out.json(&tree);
    }
    let text = match (args.overdue, args.parked) {
        (false, false) => drawn(&tree, extent),
        (true, false) => entities_alone(&tree, "overdue"),
        (false, true) => entities_alone(&tree, "parked"),
        (true, true) => entities_alone(&tree, "overdue and parked"),
    };
    api.out.line(text.trim_end())
}

/// The tree with up to `limit` entities, page by page.
async fn read(query: &Query<'_>, limit: usize, api: &Api) -> Result<Value, Failure> {
    let page = async |after: Option<&str>, limit: usize| {
        let mut query = query.clone();
        query.push(("limit", limit.min(MAX_TREE_LEN as usize).to_string()));
        query.extend(after.map(|token| ("page_token", token.to_owned())));
        api.get("/api/v1/admin/runtime/tree", &query).await
    };
    let mut tree = page(None, limit).await?;
    while let Some(next) = tree["next_page"].as_str() {
        let listed = items(&tree, "entities").len();
        if listed >= limit {
            break;
        }
        let mut more = page(Some(next), limit - listed).await?;
        tree["next_page"] = more["next_page"].take();
        tree["truncated"] = more["truncated"].take();
        match (tree["entities"].as_array_mut(), more["entities"].as_array_mut()) {
            (Some(entities), Some(more)) => append_page(entities, std::mem::take(more)),
            _ => return Err(Failure::unusable_answer("the server's answer has no entities")),
        }
    }
    Ok(tree)
}

/// Adds the entities of the next page. Those that the first page has out of order, since they are parked, are not added again.
fn append_page(entities: &mut Vec<Value>, more: Vec<Value>) {
    let known: BTreeSet<String> =
        entities.iter().filter_map(|entity| entity["id"].as_str().map(str::to_owned)).collect();
    entities.extend(more.into_iter().filter(|entity| entity["id"].as_str().is_none_or(|id| !known.contains(id))));
}

/// The selected entities without the tree, or a line where there are none.
fn entities_alone(tree: &Value, which: &str) -> String {
    let mut text = match items(tree, "entities") {
        [] => format!("No entity is {which}.\n"),
        entities => format!("{}\n", table_text(entities, &ENTITIES)),
    };
    for silent in items(tree, "silent") {
        let _ = writeln!(text, "Without member {}, which did not answer.", cell(silent));
    }
    more_notice(&mut text, tree);
    text
}

fn more_notice(text: &mut String, tree: &Value) {
    if tree["truncated"] == true {
        text.push_str("There are more; narrow the selection with --kind and --state, or raise --limit.\n");
    }
}

fn items<'a>(of: &'a Value, name: &str) -> &'a [Value] {
    of[name].as_array().map_or(&[], Vec::as_slice)
}

/// Whether an operator has to look at this entity.
fn is_in_trouble(entity: &Value) -> bool {
    entity["overdue"] == true || entity["status"] == "parked"
}

/// Writing to a string cannot fail.
fn drawn(tree: &Value, extent: Extent) -> String {
    let mut text = String::new();
    for member in items(tree, "members") {
        let [name, id, shards, awake, waiting] =
            ["name", "id", "shards", "awake", "mailbox_depth"].map(|field| cell(&member[field]));
        let keys = member["key_sets"].as_object().into_iter().flatten();
        let keys: Vec<_> = keys.map(|(purpose, version)| format!("{} {}", plain(purpose), cell(version))).collect();
        let clock = member["clock_offset_ms"].as_i64().map(|ms| format!(", clock {ms:+} ms")).unwrap_or_default();
        let _ = writeln!(
            text,
            "{name}  {id}  {shards} shards, {awake} entities awake, {waiting} commands waiting, keys: {}{clock}",
            keys.join(", ")
        );
        if extent.all_workers {
            below(&mut text, member, "root", 1);
        } else {
            workers_in_trouble(&mut text, member);
        }
    }
    for silent in items(tree, "silent") {
        let _ = writeln!(text, "{}  lives, and did not answer", cell(silent));
    }
    text.push('\n');
    for (kind, states) in tree["entities_by_kind"].as_object().into_iter().flatten() {
        let _ = writeln!(text, "{}", crate::overview::counts(kind, states));
    }
    let _ = writeln!(text, "overdue: {}, parked: {}", cell(&tree["overdue"]), cell(&tree["parked"]));
    let entities = items(tree, "entities");
    let shown: Vec<Value> =
        entities.iter().filter(|entity| extent.all_entities || is_in_trouble(entity)).cloned().collect();
    if !shown.is_empty() {
        let _ = writeln!(text, "\n{}", table_text(&shown, &ENTITIES));
    }
    // Those in trouble come first, so that more of them follow only where all that were read are in trouble.
    if extent.all_entities || shown.len() == entities.len() {
        more_notice(&mut text, tree);
    }
    if !extent.all_workers || !extent.all_entities {
        text.push_str(
            "Every worker: --workers. The entities one by one: --entities, --kind KIND, --overdue or --parked.\n",
        );
    }
    text
}

/// How many workers there are in each state, those that were restarted, and a line for each that does not run.
fn workers_in_trouble(text: &mut String, member: &Value) {
    let workers = items(member, "workers");
    let mut states: BTreeMap<String, u64> = BTreeMap::new();
    for worker in workers {
        *states.entry(cell(&worker["state"])).or_default() += 1;
    }
    let states: Vec<_> = states.iter().map(|(state, count)| format!("{count} {state}")).collect();
    let _ = write!(text, "  workers: {}", states.join(", "));
    let restarted = workers.iter().filter(|worker| worker["restarts"].as_u64().is_some_and(|restarts| restarts > 0));
    let restarted: Vec<_> =
        restarted.map(|worker| format!("{} {}", cell(&worker["name"]), cell(&worker["restarts"]))).collect();
    if !restarted.is_empty() {
        let _ = write!(text, "; restarts: {}", restarted.join(", "));
    }
    text.push('\n');
    for worker in workers.iter().filter(|worker| !matches!(worker["state"].as_str(), Some("running" | "idle"))) {
        worker_line(text, worker, 2);
    }
}

fn worker_line(text: &mut String, worker: &Value, depth: usize) {
    let [name, state, what] = ["name", "state", "what"].map(|field| cell(&worker[field]));
    let trouble = match &worker["last_error"] {
        Value::Null => String::new(),
        error => format!("  {} restarts, last: {}", cell(&worker["restarts"]), cell(error)),
    };
    let waits = queue(&worker["queue"]);
    let _ = writeln!(text, "{}{name:<20} {state:<12} {what}{waits}{trouble}", "  ".repeat(depth));
}

fn below(text: &mut String, member: &Value, parent: &str, depth: usize) {
    for worker in items(member, "workers").iter().filter(|worker| worker["under"] == parent && depth < DEEPEST) {
        worker_line(text, worker, depth);
        below(text, member, worker["name"].as_str().unwrap_or_default(), depth + 1);
        if worker["name"] == "entities" {
            for shard in items(member, "owned_shards") {
                let [number, state, epoch, awake, waiting] =
                    ["shard", "state", "epoch", "awake", "mailbox_depth"].map(|field| cell(&shard[field]));
                let indent = "  ".repeat(depth + 1);
                let _ = writeln!(
                    text,
                    "{indent}shard {number:<14} {state:<12} epoch {epoch}, {awake} awake, {waiting} commands waiting"
                );
            }
        }
    }
}

/// The length of a worker's queue, and its bound.
fn queue(queue: &Value) -> String {
    if queue.is_null() {
        return String::new();
    }
    let of = queue["bound"].as_u64().map(|bound| format!(" of {bound}")).unwrap_or_default();
    format!("  {}{of} wait, {} in flight", cell(&queue["waiting"]), cell(&queue["under_way"]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn parked_entity_of_the_first_page_is_listed_once() {
        let page = |ids: &[&str]| ids.iter().map(|id| json!({ "id": id })).collect::<Vec<_>>();
        let mut entities = page(&["a", "b", "parked"]);
        append_page(&mut entities, page(&["c", "parked", "d"]));
        assert_eq!(entities, page(&["a", "b", "parked", "c", "d"]));
    }

    #[test]
    fn a_tree_hangs_everything_where_it_belongs() {
        let worker = |name: &str, under: &str, error: Value| json!({ "name": name, "under": under, "state": "running", "what": "does it", "restarts": 2, "last_error": error, "queue": { "waiting": 1, "under_way": 2, "bound": 64 } });
        let tree = json!({
            "members": [{
                "name": "replica-1", "id": "0197", "shards": 256, "awake": 3, "mailbox_depth": 2, "key_sets": { "node_ca": 4 },
                "workers": [
                    worker("entities", "root", Value::Null),
                    worker("relay", "bus", json!("no\u{1b}[2J route")),
                    worker("bus", "root", Value::Null),
                    worker("its own parent", "its own parent", Value::Null),
                ],
                "owned_shards": [{ "shard": 7, "state": "open", "epoch": 9 }],
            }],
            "silent": ["0198"],
            "entities_by_kind": { "node": { "active": 2, "offline": 1 } },
            "overdue": 1, "parked": 0, "truncated": true,
            "entities": [{ "kind": "node", "id": "0199", "member_name": "replica-1", "status": "awake", "state": "offline" }],
        });
        insta::assert_snapshot!(drawn(&tree, Extent { all_workers: true, all_entities: true }));
    }

    #[test]
    fn tree_without_a_flag_has_counts_and_what_is_in_trouble() {
        let worker = |name: &str, state: &str, restarts: u64| {
            json!({ "name": name, "under": "root", "state": state, "what": "does it", "restarts": restarts,
                    "last_error": (restarts > 0).then_some("no route"), "queue": null })
        };
        let tree = json!({
            "members": [{
                "name": "replica-1", "id": "0197", "shards": 256, "awake": 3, "mailbox_depth": 2, "key_sets": { "node_ca": 4 },
                "workers": [worker("entities", "running", 0), worker("committer-1", "idle", 0),
                            worker("metrics", "running", 1), worker("relay", "parked", 9)],
            }],
            "entities_by_kind": { "node": { "active": 2, "offline": 1 } },
            "overdue": 1, "parked": 1, "truncated": true,
            "entities": [
                { "kind": "node", "id": "0199", "member_name": "replica-1", "status": "parked", "state": "active" },
                { "kind": "node", "id": "0198", "member_name": "replica-1", "status": "awake", "state": "offline", "overdue": true },
                { "kind": "node", "id": "0197", "member_name": "replica-1", "status": "awake", "state": "enrolling", "overdue": false },
            ],
        });
        insta::assert_snapshot!(drawn(&tree, Extent { all_workers: false, all_entities: false }), @r"
        replica-1  0197  256 shards, 3 entities awake, 2 commands waiting, keys: node_ca 4
          workers: 1 idle, 1 parked, 2 running; restarts: metrics 1, relay 9
            relay                parked       does it  9 restarts, last: no route

        node: 2 active, 1 offline
        overdue: 1, parked: 1

        KIND  ID    LIVES AT   STATUS  STATE    WAITS FOR  UNTIL  OVERDUE  LAST ERROR
        node  0199  replica-1  parked  active   -          -      -        -
        node  0198  replica-1  awake   offline  -          -      yes      -
        Every worker: --workers. The entities one by one: --entities, --kind KIND, --overdue or --parked.
        ");
    }

    #[test]
    fn overdue_entities_are_printed_alone() {
        let tree =
            |entities: Value| json!({ "members": [{ "name": "replica-1" }], "overdue": 0, "entities": entities });
        assert_eq!(entities_alone(&tree(json!([])), "overdue"), "No entity is overdue.\n");
        let one = entities_alone(&tree(json!([{ "kind": "node", "id": "0199", "state": "offline" }])), "overdue");
        assert!(one.contains("0199") && one.contains("offline") && !one.contains("replica-1"), "{one}");
    }
}
