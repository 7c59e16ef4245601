//! Allocations: creating them, waiting until they are active, and releasing them.

use crate::allocation_events::Transitions;
use crate::api::{Api, Query};
use crate::confirmation::Confirm;
use crate::failure::{ExitStatus, Failure};
use crate::labels::{Metadata, MetadataChange, Selector};
use crate::output::Column;
use crate::progress::Progress;
use crate::resource_ref::{self, ALLOCATION, NODE, Ref, SSH_KEY, ids, items};
use crate::{completion, duration, printable, skus};
use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Rents GPUs, and waits until they can be used.
    Create(Create),
    /// Lists your allocations, newest first; administrators see those of all users.
    #[command(visible_alias = "ls")]
    List(List),
    /// Shows one allocation.
    Show {
        #[arg(add = completion::of(&ALLOCATION))]
        allocation: Ref,
    },
    /// Gives an allocation back, and waits until the node is clean.
    Release {
        #[arg(add = completion::of(&ALLOCATION))]
        allocation: Ref,
        /// What was wrong with the machine, if anything was.
        #[arg(long, value_name = "TEXT")]
        issue: Option<String>,
        #[command(flatten)]
        wait: Wait,
    },
    /// Changes an allocation's name or labels.
    #[command(visible_alias = "update")]
    Set(Set),
    /// Chooses the keys that open an allocation, in place of those that do.
    SshKeys {
        #[arg(add = completion::of(&ALLOCATION))]
        allocation: Ref,
        /// An SSH key that opens it; repeatable.
        #[arg(long = "ssh-key", value_name = "ID|NAME", required_unless_present_any = ["default", "none"], add = completion::of(&SSH_KEY))]
        ssh_keys: Vec<Ref>,
        /// Use your default key, whichever that is.
        #[arg(long, conflicts_with = "ssh_keys")]
        default: bool,
        /// Use no key: it is reached by `gpuctl terminal` alone.
        #[arg(long, conflicts_with_all = ["ssh_keys", "default"])]
        none: bool,
    },
    /// Administrators: repeats a failed release.
    RetryRelease(AllocationAction),
    /// Administrators: gives an allocation up whose node cannot prove that it is clean. The node is fenced.
    ForceRelease {
        #[command(flatten)]
        order: AllocationAction,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Shows how busy an allocation's GPUs are.
    Telemetry {
        #[arg(add = completion::of(&ALLOCATION))]
        allocation: Ref,
    },
    /// Lists the transitions of an allocation.
    Events {
        #[arg(add = completion::of(&ALLOCATION))]
        allocation: Ref,
        /// Print further ones as they come, until it is released.
        #[arg(long, short)]
        follow: bool,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct AllocationAction {
    #[arg(add = completion::of(&ALLOCATION))]
    allocation: Ref,
    /// The reason, for the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("changes").args(MetadataChange::IDS).required(true).multiple(true)))]
pub(crate) struct Set {
    #[arg(add = completion::of(&ALLOCATION))]
    allocation: Ref,
    #[command(flatten)]
    change: MetadataChange,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Create {
    /// The kind of machine: `gpuctl skus list` shows them.
    #[arg(long, add = completion::sku_names())]
    sku: String,
    /// How many GPUs, all on one node.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    gpus: u16,
    /// The region; any of the SKU's by default.
    #[arg(long, value_name = "CODE")]
    region: Option<String>,
    /// The node; the one that fits best by default.
    #[arg(long, value_name = "ID|HOST", add = completion::of(&NODE))]
    node: Option<Ref>,
    /// The project to which it belongs; it must be that of your login.
    #[arg(long, value_name = "ID")]
    project: Option<String>,
    /// An SSH key that opens it; repeatable; your default key by default.
    #[arg(long = "ssh-key", value_name = "ID|NAME", add = completion::of(&SSH_KEY))]
    ssh_keys: Vec<Ref>,
    /// How long to wait for capacity where there is none (`90s`, `10m`).
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    queue: Option<Duration>,
    #[command(flatten)]
    metadata: Metadata,
    #[command(flatten)]
    wait: Wait,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Wait {
    /// Return at once, without waiting for the result.
    #[arg(long)]
    no_wait: bool,
    /// How long to wait (`90s`, `10m`).
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = duration::parse)]
    timeout: Duration,
}

#[derive(Debug, clap::Args)]
pub(crate) struct List {
    /// List those in this state: requested, provisioning, active, releasing, release_failed, released.
    #[arg(long)]
    state: Option<String>,
    /// List those that have ended, too.
    #[arg(long, conflicts_with = "state")]
    all: bool,
    /// List those of this SKU.
    #[arg(long, add = completion::sku_names())]
    sku: Option<String>,
    /// Administrators: list those of this user.
    #[arg(long, value_name = "ID")]
    user: Option<String>,
    /// Administrators: those that are on this node; with --all also those that were.
    #[arg(long, add = completion::of(&NODE))]
    node: Option<Ref>,
    #[command(flatten)]
    selector: Selector,
    /// Show at most this many, the newest.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
    limit: u16,
}

const IN_A_LIST: [Column; 9] = [
    ("ID", "/id"),
    ("NAME", "/name"),
    ("STATE", "/state"),
    ("HEALTH", "/health/status"),
    ("SKU", "/sku"),
    ("GPUS", "/gpu_count"),
    ("REGION", "/region_code"),
    ("REQUESTED", "/requested_at"),
    ("WHY", "/state_reason"),
];

const ALONE: [Column; 28] = [
    ("id", "/id"),
    ("name", "/name"),
    ("labels", "/labels"),
    ("state", "/state"),
    ("why", "/state_reason"),
    ("failed in", "/failure/phase"),
    ("failed with", "/failure/code"),
    ("failure", "/failure/message"),
    ("health", "/health/message"),
    ("SKU", "/sku"),
    ("GPUs", "/gpu_count"),
    ("further devices", "/further_devices"),
    ("region", "/region_code"),
    ("node", "/node_id"),
    ("ssh host", "/ssh/host"),
    ("ssh port", "/ssh/port"),
    ("ssh user", "/ssh/username"),
    ("ssh host key", "/ssh/host_key_fingerprint"),
    ("opened by", "/ssh/key_fingerprints"),
    ("keys written", "/ssh/keys_written"),
    ("requested", "/requested_at"),
    ("active since", "/active_at"),
    ("released", "/released_at"),
    ("a GPU an hour", "/price/amount_per_gpu_hour"),
    ("cost so far", "/cost_to_date"),
    ("billed until", "/billed_until"),
    ("state ends by", "/deadline_at"),
    ("overdue", "/overdue"),
];

/// The most entries that are read to find the newest ones, since the API lists the oldest first.
const READ: usize = 10_000;

const LOAD: [Column; 8] = [
    ("GPU", "/index"),
    ("UUID", "/uuid"),
    ("MODEL", "/model"),
    ("USE %", "/utilization_percent"),
    ("MEMORY MIB", "/memory_used_mib"),
    ("OF", "/memory_total_mib"),
    ("°C", "/temperature_celsius"),
    ("WATTS", "/power_watts"),
];

const HISTORY: [Column; 3] = [("AT", "/at"), ("STATE", "/state"), ("WHY", "/reason")];

pub(crate) fn path(allocation: Uuid) -> String {
    format!("/api/v1/allocations/{allocation}")
}

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::Create(wanted) => create(wanted, api).await,
        Command::List(which) => list(which, api).await,
        Command::Show { allocation } => {
            let id = resource_ref::allocation(&allocation, api).await?;
            api.out.show(&api.get(&path(id), &[]).await?, &ALONE)
        }
        Command::Release { allocation, issue, wait } => {
            release(resource_ref::allocation(&allocation, api).await?, issue, &wait, api).await
        }
        Command::Set(set) => {
            let id = resource_ref::allocation(&set.allocation, api).await?;
            api.out.show(&api.patch(&path(id), &Value::Object(set.change.patch()?)).await?, &ALONE)
        }
        Command::SshKeys { allocation, ssh_keys, default, none: _ } => {
            let id = resource_ref::allocation(&allocation, api).await?;
            let chosen = ids(&ssh_keys, &SSH_KEY, api).await?;
            let body = json!({ "ssh_key_ids": (!default).then_some(chosen) });
            api.out.show(&api.put(&format!("{}/ssh-keys", path(id)), &body).await?, &ALONE)
        }
        Command::RetryRelease(order) => {
            let id = resource_ref::allocation(&order.allocation, api).await?;
            send_action(id, "retry-release", &order.reason, api).await
        }
        Command::ForceRelease { order, confirm } => {
            let id = resource_ref::allocation(&order.allocation, api).await?;
            confirm.ask(&format!("Give allocation {id} up without the proof that its node is clean?"))?;
            send_action(id, "force-release", &order.reason, api).await
        }
        Command::Telemetry { allocation } => {
            let id = resource_ref::allocation(&allocation, api).await?;
            telemetry(id, api).await
        }
        Command::Events { allocation, follow: false } => {
            let found = api.get(&path(resource_ref::allocation(&allocation, api).await?), &[]).await?;
            api.out.list(&json!({ "items": found["status_history"], "next_page": null }), &HISTORY)
        }
        Command::Events { allocation, follow: true } => {
            follow(resource_ref::allocation(&allocation, api).await?, api).await
        }
    }
}

async fn telemetry(id: Uuid, api: &Api) -> Result<(), Failure> {
    let found = api.get(&format!("{}/telemetry", path(id)), &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    api.out.list(&json!({ "items": found["gpus"], "next_page": null }), &LOAD)?;
    if let Some(at) = found["at"].as_str() {
        api.out.notice(&format!("As the node reported at {at}."));
    }
    Ok(())
}

async fn send_action(id: Uuid, verb: &str, reason: &str, api: &Api) -> Result<(), Failure> {
    let path = format!("/api/v1/admin/allocations/{id}/{verb}");
    api.out.show(&api.post(&path, &json!({ "reason": reason })).await?, &ALONE)
}

async fn list(which: List, api: &Api) -> Result<(), Failure> {
    let mut query: Query<'_> = Vec::new();
    let every = which.all || which.state.is_some();
    query.extend(which.state.map(|state| ("state", state)));
    query.extend(which.sku.map(|sku| ("sku", sku)));
    query.extend(which.user.map(|user| ("user_id", user)));
    if let Some(node) = which.node {
        query.push(("node_id", node.id(&NODE, api).await?.to_string()));
    }
    which.selector.add_to(&mut query);
    let page = match every {
        true => api.list(ALLOCATION.path, &query, READ).await?,
        false => resource_ref::live_allocations(&query, READ, api).await?,
    };
    let newest = newest(&page, which.limit.into());
    if !every && items(&newest).is_empty() && !api.out.is_json() {
        api.out.notice("There are none; --all also shows those that have ended.");
        return Ok(());
    }
    if api.out.is_json() {
        return api.out.json(&newest);
    }
    let me = api.get("/api/v1/me", &[]).await?;
    api.out.list(&newest, &columns_for(&me))
}

/// The columns of a list, the same ones for every content: an administrator, who sees the allocations of all users, has their users, too.
fn columns_for(me: &Value) -> Vec<Column> {
    let is_administrator = me["roles"].as_array().is_some_and(|roles| roles.iter().any(|role| role == "admin"));
    let mut columns = IN_A_LIST.to_vec();
    if is_administrator {
        columns.insert(2, ("USER", "/user_id"));
    }
    columns
}

/// The newest entries, newest first. `next_page` is the token of those that were not read.
fn newest(page: &Value, limit: usize) -> Value {
    let mut all: Vec<&Value> = items(page).iter().collect();
    let requested_at = |item: &Value| item["requested_at"].as_str().and_then(|at| at.parse::<DateTime<Utc>>().ok());
    all.sort_by_key(|item| std::cmp::Reverse(requested_at(item)));
    all.truncate(limit);
    json!({ "items": all, "next_page": page["next_page"] })
}

async fn create(wanted: Create, api: &Api) -> Result<(), Failure> {
    let ssh_keys = ids(&wanted.ssh_keys, &SSH_KEY, api).await?;
    let node = match &wanted.node {
        Some(node) => Some(node.id(&NODE, api).await?),
        None => None,
    };
    let mut body = json!({ "sku": &wanted.sku, "gpu_count": wanted.gpus });
    let given = [
        ("region_code", wanted.region.map(Value::from)),
        ("node_id", node.map(|node| node.to_string().into())),
        ("project_id", wanted.project.map(Value::from)),
        ("ssh_key_ids", (!ssh_keys.is_empty()).then(|| json!(ssh_keys))),
        ("queue_seconds", wanted.queue.map(|time| time.as_secs().into())),
    ];
    for (name, value) in given {
        if let Some(value) = value {
            body[name] = value;
        }
    }
    wanted.metadata.add_to(&mut body)?;
    skus::expect_fits_one_node(&wanted.sku, wanted.gpus, api).await?;
    let made = api.post("/api/v1/allocations", &body).await?;
    let id = id_of(&made)?;
    if wanted.wait.no_wait {
        return api.out.show(&made, &ALONE);
    }
    let is_there = |state: &str| matches!(state, "active" | "released");
    let final_state = watch(api, id, Transitions::of(api, id), wanted.wait.timeout, is_there).await?;
    let made = api.get(&path(id), &[]).await?;
    api.out.show(&made, &ALONE)?;
    if final_state == "active" {
        api.out.notice(&format!("Open it with: gpuctl terminal {id}"));
        return Ok(());
    }
    let why = made["failure"]["message"].as_str().unwrap_or("it was released before it was active");
    Err(Failure::new(ExitStatus::Refused, format!("the allocation could not be set up: {why}"))
        .next(format!("See how it ended: gpuctl allocations show {id}")))
}

async fn release(id: Uuid, issue: Option<String>, wait: &Wait, api: &Api) -> Result<(), Failure> {
    let body = issue.map_or_else(|| json!({}), |issue| json!({ "issue": issue }));
    let released = api.post(&format!("{}/release", path(id)), &body).await?;
    if wait.no_wait || released["state"] == "released" {
        return api.out.show(&released, &ALONE);
    }
    // Transitions from the release on.
    let transitions = Transitions::of(api, id).after(released["generation"].as_i64().unwrap_or_default() - 1);
    watch(api, id, transitions, wait.timeout, |state| state == "released").await?;
    api.out.show(&api.get(&path(id), &[]).await?, &ALONE)
}

/// Reports every transition until one leads to an awaited state, and returns that state.
async fn watch(
    api: &Api,
    id: Uuid,
    mut transitions: Transitions<'_>,
    limit: Duration,
    awaited: impl Fn(&str) -> bool,
) -> Result<String, Failure> {
    let what = format!("Allocation {id}");
    let progress = Progress::begin(api.out, &what);
    let mut last = "requested".to_owned();
    let watched = async {
        loop {
            let event = transitions.next().await?;
            let state = event["state"].as_str().unwrap_or_default();
            progress.step(&format!("{what}: {state}, {}", event["reason"].as_str().unwrap_or("no reason given")));
            state.clone_into(&mut last);
            if awaited(state) {
                return Ok::<String, Failure>(state.to_owned());
            }
        }
    };
    let goes_on = format!("It goes on: gpuctl allocations events {id} --follow");
    match progress.wait(watched, limit, &what, &format!("gpuctl allocations show {id}")).await {
        Ok(Ok(state)) => Ok(state),
        // What was ordered goes on although it can no longer be watched.
        Ok(Err(failure)) => Err(failure.next(goes_on)),
        Err(_) => {
            let seconds = limit.as_secs();
            Err(Failure::new(ExitStatus::TooLate, format!("{what} is still {last} after {seconds} s")).next(goes_on))
        }
    }
}

async fn follow(id: Uuid, api: &Api) -> Result<(), Failure> {
    let mut transitions = Transitions::of(api, id);
    loop {
        let event = transitions.next().await?;
        if api.out.is_json() {
            api.out.line(&event.to_string())?;
        } else {
            let [at, state, why] =
                ["/at", "/state", "/reason"].map(|path| event.pointer(path).map_or_else(String::new, printable::cell));
            api.out.line(&format!("{at}  {state:<14}  {why}"))?;
        }
        if event["state"] == "released" {
            return Ok(());
        }
    }
}

fn id_of(made: &Value) -> Result<Uuid, Failure> {
    let id = made["id"].as_str().and_then(|id| id.parse().ok());
    id.ok_or_else(|| Failure::unusable_answer("the server's answer names no allocation"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_of_a_list_depend_on_the_caller_and_not_on_the_entries() {
        let titles = |roles: Value| {
            columns_for(&json!({ "roles": roles })).into_iter().map(|(title, _)| title).take(5).collect::<Vec<_>>()
        };
        assert_eq!(titles(json!(["user"])), ["ID", "NAME", "STATE", "HEALTH", "SKU"]);
        assert_eq!(titles(json!(["user", "admin"])), ["ID", "NAME", "USER", "STATE", "HEALTH"]);
    }

    #[test]
    fn newest_allocations_are_listed_first_and_the_oldest_are_cut() {
        let item = |id: u32, at: &str| json!({ "id": id, "requested_at": at });
        let page = json!({
            "items": [item(1, "2026-11-22T01:00:00Z"), item(3, "2026-11-22T03:00:00Z"), item(2, "2026-11-22T02:00:00Z")],
            "next_page": null,
        });
        let ids = |limit: usize| {
            newest(&page, limit)["items"]
                .as_array()
                .map(|items| items.iter().map(|item| item["id"].clone()).collect::<Vec<_>>())
        };
        assert_eq!(ids(9), Some(vec![json!(3), json!(2), json!(1)]));
        assert_eq!(ids(1), Some(vec![json!(3)]));
    }
}
