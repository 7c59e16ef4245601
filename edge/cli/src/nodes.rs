//! Nodes, for administrators: the inventory, tasks and state changes. Onboarding is in `onboarding.rs`.

mod onboarding;

use crate::api::{Api, Query};
use crate::completion;
use crate::confirmation::Confirm;
use crate::failure::Failure;
use crate::labels::{MetadataChange, Selector};
use crate::output::Column;
use crate::resource_ref::{self, NODE, Ref, ResourceKind};
use clap::ValueEnum;
use serde_json::{Value, json};
use uuid::Uuid;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists the nodes, without those that were removed.
    #[command(visible_alias = "ls")]
    List {
        /// List those in this state, such as active, offline or quarantined.
        #[arg(long)]
        state: Option<String>,
        /// List those that were removed, too.
        #[arg(long, conflicts_with = "state")]
        all: bool,
        /// Those of this SKU.
        #[arg(long, add = completion::sku_names())]
        sku: Option<String>,
        #[command(flatten)]
        selector: Selector,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// Shows one machine.
    Show {
        #[arg(add = completion::of(&NODE))]
        node: Ref,
    },
    /// Registers a machine; its agent is installed with `script` or `token`.
    Create(onboarding::Create),
    /// Changes a node's name, its labels, its address or the operator's login on it.
    #[command(visible_alias = "set")]
    Update(Update),
    /// Issues an enrollment token in a bootstrap bundle. Earlier tokens of the node end.
    Token(onboarding::Token),
    /// Writes the script that installs the agent; it holds a token.
    Script(onboarding::Script),
    /// Issues a token for a node that has lost its certificate.
    Reissue(onboarding::Reissue),
    /// Lists a node's tasks: open ones, and those that have ended.
    Tasks {
        #[arg(add = completion::of(&NODE))]
        node: Ref,
    },
    /// Orders a task for a node.
    Run {
        #[arg(add = completion::of(&NODE))]
        node: Ref,
        task: TaskType,
        /// The reason, for the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// Resumes a task that waits for an operator.
    Resume {
        #[arg(add = completion::of(&NODE))]
        node: Ref,
        /// The task's id, or its beginning.
        task: Ref,
        /// The reason, for the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// Takes a node out of use.
    Retire {
        #[command(flatten)]
        order: NodeAction,
        /// Let its allocations end first.
        #[arg(long)]
        drain: bool,
    },
    /// Takes a retired node into use again.
    Reactivate(NodeAction),
    /// Removes a retired node for good.
    Remove {
        #[command(flatten)]
        order: NodeAction,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Quarantines a node: it gets no new allocations until an operator has looked.
    Quarantine(NodeAction),
    /// Replaces a node's agent by another version, which is rolled back unless the control plane answers it.
    UpdateAgent {
        #[arg(add = completion::of(&NODE))]
        node: Ref,
        /// The package's digest; without it, the one that the installation publishes.
        #[arg(long, value_name = "SHA256")]
        digest: Option<String>,
        /// Try a version again that was rolled back on this node.
        #[arg(long)]
        force: bool,
        /// The reason, for the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// Tests a machine under load; it must have no allocations.
    Validate {
        #[arg(add = completion::of(&NODE))]
        node: Ref,
        /// How thoroughly: quick takes about ten seconds, deep minutes.
        #[arg(long, value_enum, default_value = "quick")]
        level: ValidationLevel,
        /// The reason, for the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// Resets one GPU that no allocation holds, and validates it. Allocations of the other GPUs stay.
    ResetGpu {
        #[arg(add = completion::of(&NODE))]
        node: Ref,
        /// The GPU's UUID, as `nvidia-smi -L` on the machine prints it.
        gpu: String,
        /// The reason, for the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// Has the bare-metal provider erase the machine and install it again.
    Reimage(NodeAction),
    /// Ends a node's quarantine.
    ReleaseQuarantine(NodeAction),
    /// Clears a health finding until it occurs again.
    ClearFinding {
        #[arg(add = completion::of(&NODE))]
        node: Ref,
        /// The finding's id, or its beginning: `nodes show NODE` lists them.
        finding: Ref,
        /// The reason, for the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct NodeAction {
    #[arg(add = completion::of(&NODE))]
    node: Ref,
    /// The reason, for the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

#[derive(Debug, clap::Args)]
#[group(skip)]
#[command(group(clap::ArgGroup::new("changes").args(MetadataChange::IDS).args(["host", "port", "ssh_user", "probe"]).required(true).multiple(true)))]
pub(crate) struct Update {
    #[arg(add = completion::of(&NODE))]
    node: Ref,
    /// Its new address: a name or an IP address.
    #[arg(long)]
    host: Option<String>,
    /// The port of its SSH server.
    #[arg(long)]
    port: Option<u16>,
    /// The operator's login on it.
    #[arg(long, value_name = "NAME")]
    ssh_user: Option<String>,
    /// Connect to its address and report whether it answers.
    #[arg(long)]
    probe: bool,
    #[command(flatten)]
    change: MetadataChange,
}

/// How thoroughly a machine is tested.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ValidationLevel {
    Quick,
    Deep,
}

impl ValidationLevel {
    const fn name(self) -> &'static str {
        match self {
            Self::Quick => "quick",
            Self::Deep => "deep",
        }
    }
}

/// The tasks that an operator may order.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum TaskType {
    /// Checks that the node is what it says.
    #[value(name = "node.validate")]
    Validate,
    /// Collects what is needed to find a fault.
    #[value(name = "diagnostics.collect")]
    Diagnose,
    /// Reboots the machine.
    #[value(name = "node.reboot")]
    Reboot,
}

impl TaskType {
    const fn name(self) -> &'static str {
        match self {
            Self::Validate => "node.validate",
            Self::Diagnose => "diagnostics.collect",
            Self::Reboot => "node.reboot",
        }
    }
}

/// An open task of one node.
const TASK: ResourceKind = ResourceKind {
    noun: "open task",
    listed_by: "gpuctl nodes tasks",
    path: NODE.path,
    names: &[],
    shown: &["/type", "/state"],
};

/// A health finding of one node.
const FINDING: ResourceKind = ResourceKind {
    noun: "finding",
    listed_by: "gpuctl nodes show",
    path: NODE.path,
    names: &[],
    shown: &["/probe", "/code", "/gpu"],
};

const ORDERED: [Column; 6] = [
    ("task", "/task_id"),
    ("type", "/type"),
    ("state", "/state"),
    ("attempt", "/attempt"),
    ("ordered", "/ordered_at"),
    ("due", "/deadline_at"),
];

const IN_A_LIST: [Column; 9] = [
    ("ID", "/id"),
    ("NAME", "/name"),
    ("HOST", "/host"),
    ("STATE", "/state"),
    ("SKU", "/sku"),
    ("REGION", "/region_code"),
    ("FREE", "/gpus_free"),
    ("GPUS", "/gpus_total"),
    ("UNSCHEDULABLE", "/unschedulable_reason"),
];

const ALONE: [Column; 37] = [
    ("id", "/id"),
    ("name", "/name"),
    ("labels", "/labels"),
    ("host", "/host"),
    ("port", "/port"),
    ("address", "/probe/result"),
    ("probed", "/probe/checked_at"),
    ("probe error", "/probe/error"),
    ("state", "/state"),
    ("why", "/state_reason/message"),
    ("since", "/state_entered_at"),
    ("state ends by", "/state_deadline_at"),
    ("overdue", "/overdue"),
    ("unschedulable", "/unschedulable_reason"),
    ("SKU", "/sku"),
    ("region", "/region_code"),
    ("GPUs", "/gpus_total"),
    ("GPUs free", "/gpus_free"),
    ("tenants' devices", "/inventory/tenant_devices"),
    ("health", "/health/status"),
    ("agent", "/agent/version"),
    ("agent's package", "/agent/package_digest"),
    ("agent update", "/agent_update/state"),
    ("agent updates to", "/agent_update/digest"),
    ("update error", "/agent_update/error/message"),
    ("validated", "/validation/ended_at"),
    ("validation", "/validation/level"),
    ("passed", "/validation/passed"),
    ("must pass", "/failed_validation_level"),
    ("measured", "/validation/measurements"),
    ("last seen", "/agent/last_seen_at"),
    ("certificate ends", "/agent/cert_not_after"),
    ("onboarding", "/onboarding_mode"),
    ("machine", "/machine/system_id"),
    ("machine step", "/machine/step"),
    ("provider says", "/machine/status"),
    ("reimage stage", "/reimage/stage"),
];

const GPU_RESETS: [Column; 4] =
    [("RESET OF GPU", "/gpu_uuid"), ("PHASE", "/phase"), ("BEGUN", "/begun_at"), ("ERROR", "/error")];

const FINDINGS: [Column; 7] = [
    ("FINDING", "/id"),
    ("PROBE", "/probe"),
    ("CODE", "/code"),
    ("GPU", "/gpu_uuid"),
    ("REPAIR", "/repair"),
    ("CLEARED", "/cleared_at"),
    ("MEANING", "/meaning"),
];

const OPEN: [Column; 7] = [
    ("ID", "/task_id"),
    ("TYPE", "/type"),
    ("STATE", "/state"),
    ("ATTEMPT", "/attempt"),
    ("ORDERED", "/ordered_at"),
    ("DUE", "/deadline_at"),
    ("OVERDUE", "/overdue"),
];

const ENDED: [Column; 6] = [
    ("ID", "/task_id"),
    ("TYPE", "/type"),
    ("ATTEMPT", "/attempt"),
    ("ENDED", "/ended_at"),
    ("SUCCEEDED", "/succeeded"),
    ("ERROR", "/error/message"),
];

fn path(node: Uuid) -> String {
    format!("{}/{node}", NODE.path)
}

async fn node_id(node: &Ref, api: &Api) -> Result<Uuid, Failure> {
    node.id(&NODE, api).await
}

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { state, all, sku, selector, limit } => {
            let mut query: Query<'_> = Vec::new();
            let every = all || state.is_some();
            query.extend(state.map(|state| ("state", state)));
            query.extend(sku.map(|sku| ("sku", sku)));
            selector.add_to(&mut query);
            let page = match every {
                true => api.list(NODE.path, &query, limit.into()).await?,
                false => resource_ref::present_nodes(&query, limit.into(), api).await?,
            };
            api.out.list(&page, &IN_A_LIST)
        }
        Command::Show { node } => show(&node, api).await,
        Command::Create(wanted) => onboarding::create(wanted, api).await,
        Command::Update(change) => update(change, api).await,
        Command::Token(wanted) => onboarding::token(wanted, api).await,
        Command::Script(wanted) => onboarding::script(wanted, api).await,
        Command::Reissue(wanted) => onboarding::reissue(wanted, api).await,
        Command::Tasks { node } => tasks(&node, api).await,
        Command::Run { node, task, reason } => {
            let body = json!({ "type": task.name(), "reason": reason });
            let path = format!("{}/tasks", path(node_id(&node, api).await?));
            api.out.show(&api.post(&path, &body).await?, &ORDERED)
        }
        Command::Validate { node, level, reason } => {
            let body = json!({ "level": level.name(), "reason": reason });
            let path = format!("{}/validate", path(node_id(&node, api).await?));
            api.out.show(&api.post(&path, &body).await?, &ORDERED)
        }
        Command::UpdateAgent { node, digest, force, reason } => {
            let body = json!({ "digest": digest, "force": force, "reason": reason });
            let path = format!("{}/update-agent", path(node_id(&node, api).await?));
            api.out.show(&api.post(&path, &body).await?, &ORDERED)
        }
        Command::ResetGpu { node, gpu, reason } => reset_gpu(&node, &gpu, &reason, api).await,
        Command::Resume { node, task, reason } => resume(&node, &task, &reason, api).await,
        Command::Retire { order, drain } => {
            let body = json!({ "reason": order.reason, "drain": drain });
            let path = format!("{}/retire", path(node_id(&order.node, api).await?));
            api.out.show(&api.post(&path, &body).await?, &ALONE)
        }
        Command::Reactivate(order) => send_action(&order, "reactivate", api).await,
        Command::Remove { order, confirm } => {
            let id = node_id(&order.node, api).await?;
            confirm.ask(&format!("Remove node {} ({id}) for good?", order.node))?;
            send_action(&order, "remove", api).await
        }
        Command::Quarantine(order) => send_action(&order, "quarantine", api).await,
        Command::Reimage(order) => send_action(&order, "reimage", api).await,
        Command::ReleaseQuarantine(order) => send_action(&order, "release-quarantine", api).await,
        Command::ClearFinding { node, finding, reason } => clear_finding(&node, &finding, &reason, api).await,
    }
}

async fn show(node: &Ref, api: &Api) -> Result<(), Failure> {
    let found = api.get(&path(node_id(node, api).await?), &[]).await?;
    api.out.show(&found, &ALONE)?;
    if api.out.is_json() {
        return Ok(());
    }
    api.out.rows_below(&found["gpu_resets"], &GPU_RESETS)?;
    api.out.rows_below(&found["health"]["findings"], &FINDINGS)
}

async fn send_action(order: &NodeAction, verb: &str, api: &Api) -> Result<(), Failure> {
    let body = json!({ "reason": order.reason });
    let path = format!("{}/{verb}", path(node_id(&order.node, api).await?));
    api.out.show(&api.post(&path, &body).await?, &ALONE)
}

async fn update(change: Update, api: &Api) -> Result<(), Failure> {
    let given = [
        ("host", change.host.map(Value::from)),
        ("port", change.port.map(Value::from)),
        ("ssh_username", change.ssh_user.map(Value::from)),
        ("probe", change.probe.then_some(true.into())),
    ];
    let mut body = change.change.patch()?;
    body.extend(given.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
    api.out.show(&api.patch(&path(node_id(&change.node, api).await?), &Value::Object(body)).await?, &ALONE)
}

async fn tasks(node: &Ref, api: &Api) -> Result<(), Failure> {
    let found = api.get(&format!("{}/tasks", path(node_id(node, api).await?)), &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    for (title, name, columns) in [("Open:", "open", &OPEN[..]), ("Ended:", "ended", &ENDED[..])] {
        api.out.line(title)?;
        api.out.list(&json!({ "items": found[name], "next_page": null }), columns)?;
    }
    Ok(())
}

async fn clear_finding(node: &Ref, finding: &Ref, reason: &str, api: &Api) -> Result<(), Failure> {
    let node = path(node_id(node, api).await?);
    let id = match finding.to_string().parse() {
        Ok(id) => id,
        Err(_) => {
            let found = api.get(&node, &[]).await?;
            let findings = found["health"]["findings"].as_array().into_iter().flatten();
            let findings: Vec<Value> = findings
                .map(|it| json!({ "id": it["id"], "probe": it["probe"], "code": it["code"], "gpu": it["gpu_uuid"] }))
                .collect();
            finding.resolve_among(&FINDING, &findings)?
        }
    };
    api.out.show(&api.post(&format!("{node}/findings/{id}/clear"), &json!({ "reason": reason })).await?, &ALONE)
}

async fn reset_gpu(node: &Ref, gpu: &str, reason: &str, api: &Api) -> Result<(), Failure> {
    // It is a part of the address.
    if gpu.is_empty() || !gpu.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
        return Err(Failure::usage(format!("{gpu:?} is no UUID of a GPU; `nvidia-smi -L` on the machine prints them")));
    }
    let path = format!("{}/gpus/{gpu}/reset", path(node_id(node, api).await?));
    api.out.show(&api.post(&path, &json!({ "reason": reason })).await?, &ORDERED)
}

async fn resume(node: &Ref, task: &Ref, reason: &str, api: &Api) -> Result<(), Failure> {
    let tasks = format!("{}/tasks", path(node_id(node, api).await?));
    let id = match task.to_string().parse() {
        Ok(id) => id,
        Err(_) => {
            let found = api.get(&tasks, &[]).await?;
            let open = found["open"].as_array().into_iter().flatten();
            let open: Vec<Value> = open
                .map(|task| json!({ "id": task["task_id"], "type": task["type"], "state": task["state"] }))
                .collect();
            task.resolve_among(&TASK, &open)?
        }
    };
    api.out.show(&api.post(&format!("{tasks}/{id}/resume"), &json!({ "reason": reason })).await?, &ORDERED)
}
