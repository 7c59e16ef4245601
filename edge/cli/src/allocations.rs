//! What is rented: GPUs asked for, watched until they are there, and given back.

use crate::api::{Api, Query};
use crate::events::Transitions;
use crate::failure::{Ended, Failure};
use crate::out::{Column, say_always};
use crate::progress::Progress;
use crate::{duration, text};
use serde_json::{Value, json};
use std::time::Duration;
use uuid::Uuid;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Rents GPUs, and waits until they can be used.
    Create(Create),
    /// Your allocations; everybody's for administrators.
    #[command(visible_alias = "ls")]
    List(List),
    /// One allocation.
    Show { allocation: Uuid },
    /// Gives an allocation back, and waits until the node is clean.
    Release {
        allocation: Uuid,
        /// What was wrong with it, where something was.
        #[arg(long, value_name = "TEXT")]
        issue: Option<String>,
        #[command(flatten)]
        wait: Wait,
    },
    /// Chooses the keys that open an allocation, in place of those that do.
    SshKeys {
        allocation: Uuid,
        /// A key that opens it, and again for more.
        #[arg(long = "ssh-key", value_name = "ID", required_unless_present = "default")]
        ssh_keys: Vec<Uuid>,
        /// Your default key, whichever that is.
        #[arg(long, conflicts_with = "ssh_keys")]
        default: bool,
    },
    /// The terminals on an allocation that are open, to go back to.
    Terminals { allocation: Uuid },
    /// What has become of an allocation so far.
    Events {
        allocation: Uuid,
        /// Go on until it is released.
        #[arg(long, short)]
        follow: bool,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Create {
    /// What kind of machine: `gpuctl skus list` shows them.
    #[arg(long)]
    sku: String,
    /// How many GPUs, all on one node.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    gpus: u16,
    /// In which region; in any of the SKU's where it is left out.
    #[arg(long, value_name = "CODE")]
    region: Option<String>,
    /// On this node; on the one that fits best where it is left out.
    #[arg(long, value_name = "ID")]
    node: Option<Uuid>,
    /// For the project that your login is for.
    #[arg(long, value_name = "ID")]
    project: Option<String>,
    /// A key that opens it, and again for more; your default key where it is left out.
    #[arg(long = "ssh-key", value_name = "ID")]
    ssh_keys: Vec<Uuid>,
    /// Wait in line for so long where there is no capacity (`90s`, `10m`).
    #[arg(long, value_name = "TIME", value_parser = duration::parse)]
    queue: Option<Duration>,
    #[command(flatten)]
    wait: Wait,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Wait {
    /// Do not wait for what comes of it.
    #[arg(long)]
    no_wait: bool,
    /// How long to wait (`90s`, `10m`).
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = duration::parse)]
    timeout: Duration,
}

#[derive(Debug, clap::Args)]
pub(crate) struct List {
    /// Those in this state: requested, provisioning, active, releasing, release_failed, released.
    #[arg(long)]
    state: Option<String>,
    /// Those of this SKU.
    #[arg(long)]
    sku: Option<String>,
    /// Administrators: those of this user.
    #[arg(long, value_name = "ID")]
    user: Option<String>,
    /// At most so many.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
    limit: u16,
}

const IN_A_LIST: [Column; 7] = [
    ("ID", "/id"),
    ("STATE", "/state"),
    ("SKU", "/sku"),
    ("GPUS", "/gpu_count"),
    ("REGION", "/region_code"),
    ("REQUESTED", "/requested_at"),
    ("WHY", "/state_reason"),
];

const ALONE: [Column; 25] = [
    ("id", "/id"),
    ("state", "/state"),
    ("why", "/state_reason"),
    ("failed in", "/failure/phase"),
    ("failed with", "/failure/code"),
    ("failure", "/failure/message"),
    ("health", "/health/message"),
    ("SKU", "/sku"),
    ("GPUs", "/gpu_count"),
    ("region", "/region_code"),
    ("node", "/node_id"),
    ("ssh host", "/ssh/host"),
    ("ssh port", "/ssh/port"),
    ("ssh user", "/ssh/username"),
    ("ssh host key", "/ssh/host_key_fingerprint"),
    ("opened by", "/ssh/key_fingerprints"),
    ("keys are there", "/ssh/keys_written"),
    ("requested", "/requested_at"),
    ("active since", "/active_at"),
    ("released", "/released_at"),
    ("minor a GPU an hour", "/price/amount_minor_per_gpu_hour"),
    ("cost so far, minor", "/cost_to_date_minor"),
    ("billed until", "/billed_until"),
    ("state ends by", "/deadline_at"),
    ("overdue", "/overdue"),
];

const TERMINALS: [Column; 5] =
    [("ID", "/id"), ("STATE", "/state"), ("OPENED", "/opened_at"), ("ENDS BY", "/ends_at"), ("RECORDED", "/recording")];

const HISTORY: [Column; 3] = [("AT", "/at"), ("STATE", "/state"), ("WHY", "/reason")];

pub(crate) fn path(allocation: Uuid) -> String {
    format!("/api/v1/allocations/{allocation}")
}

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::Create(wanted) => create(wanted, api).await,
        Command::List(which) => list(which, api).await,
        Command::Show { allocation } => api.out.show(&api.get(&path(allocation), &[]).await?, &ALONE),
        Command::Release { allocation, issue, wait } => release(allocation, issue, &wait, api).await,
        Command::SshKeys { allocation, ssh_keys, default } => {
            let body = json!({ "ssh_key_ids": (!default).then_some(ssh_keys) });
            api.out.show(&api.put(&format!("{}/ssh-keys", path(allocation)), &body).await?, &ALONE)
        }
        Command::Terminals { allocation } => {
            // More than any policy admits.
            let page = api.list(&format!("{}/terminal-sessions", path(allocation)), &[], 1000).await?;
            api.out.list(&page, &TERMINALS)
        }
        Command::Events { allocation, follow: false } => {
            let found = api.get(&path(allocation), &[]).await?;
            api.out.list(&json!({ "items": found["status_history"], "next_page": null }), &HISTORY)
        }
        Command::Events { allocation, follow: true } => follow(allocation, api).await,
    }
}

async fn list(which: List, api: &Api) -> Result<(), Failure> {
    let mut query: Query<'_> = Vec::new();
    query.extend(which.state.map(|state| ("state", state)));
    query.extend(which.sku.map(|sku| ("sku", sku)));
    query.extend(which.user.map(|user| ("user_id", user)));
    let page = api.list("/api/v1/allocations", &query, which.limit.into()).await?;
    api.out.list(&page, &IN_A_LIST)
}

async fn create(wanted: Create, api: &Api) -> Result<(), Failure> {
    let mut body = json!({ "sku": wanted.sku, "gpu_count": wanted.gpus });
    let given = [
        ("region_code", wanted.region.map(Value::from)),
        ("node_id", wanted.node.map(|node| node.to_string().into())),
        ("project_id", wanted.project.map(Value::from)),
        ("ssh_key_ids", (!wanted.ssh_keys.is_empty()).then(|| json!(wanted.ssh_keys))),
        ("queue_seconds", wanted.queue.map(|time| time.as_secs().into())),
    ];
    for (name, value) in given {
        if let Some(value) = value {
            body[name] = value;
        }
    }
    let made = api.post("/api/v1/allocations", &body).await?;
    let id = id_of(&made)?;
    if wanted.wait.no_wait {
        return api.out.show(&made, &ALONE);
    }
    let is_there = |state: &str| matches!(state, "active" | "released");
    let ended = watch(api, id, Transitions::of(api, id), wanted.wait.timeout, is_there).await?;
    let made = api.get(&path(id), &[]).await?;
    api.out.show(&made, &ALONE)?;
    if ended == "active" {
        api.out.say(&format!("Open it with: gpuctl terminal {id}"));
        return Ok(());
    }
    let why = made["failure"]["message"].as_str().unwrap_or("it was released before it was active");
    Err(Failure::new(Ended::Refused, format!("the allocation could not be set up: {why}")))
}

async fn release(id: Uuid, issue: Option<String>, wait: &Wait, api: &Api) -> Result<(), Failure> {
    let body = issue.map_or_else(|| json!({}), |issue| json!({ "issue": issue }));
    let released = api.post(&format!("{}/release", path(id)), &body).await?;
    if wait.no_wait || released["state"] == "released" {
        return api.out.show(&released, &ALONE);
    }
    // From the release on.
    let transitions = Transitions::of(api, id).after(released["generation"].as_i64().unwrap_or_default() - 1);
    watch(api, id, transitions, wait.timeout, |state| state == "released").await?;
    api.out.show(&api.get(&path(id), &[]).await?, &ALONE)
}

/// Tells of every transition until there is one into a state that is waited for, and returns that state.
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
    let watched = tokio::select! {
        watched = tokio::time::timeout(limit, watched) => watched,
        _ = tokio::signal::ctrl_c() => {
            drop(progress);
            say_always(&format!("{what} goes on without being watched: gpuctl allocations show {id}"));
            std::process::exit(130);
        }
    };
    watched.unwrap_or_else(|_| {
        let seconds = limit.as_secs();
        Err(Failure::new(Ended::TooLate, format!("{what} is still {last} after {seconds} s"))
            .next(format!("It goes on: gpuctl allocations events {id} --follow")))
    })
}

async fn follow(id: Uuid, api: &Api) -> Result<(), Failure> {
    let mut transitions = Transitions::of(api, id);
    loop {
        let event = transitions.next().await?;
        if api.out.is_json() {
            api.out.line(&event.to_string())?;
        } else {
            let [at, state, why] =
                ["/at", "/state", "/reason"].map(|path| event.pointer(path).map_or_else(String::new, text::cell));
            api.out.line(&format!("{at}  {state:<14}  {why}"))?;
        }
        if event["state"] == "released" {
            return Ok(());
        }
    }
}

fn id_of(made: &Value) -> Result<Uuid, Failure> {
    let id = made["id"].as_str().and_then(|id| id.parse().ok());
    id.ok_or_else(|| Failure::new(Ended::Server, "the server's answer names no allocation"))
}
