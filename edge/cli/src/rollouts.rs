//! Rollouts: updates of the agents of many nodes, for administrators.

use crate::api::{Api, Query};
use crate::completion;
use crate::failure::Failure;
use crate::output::Column;
use crate::resource_ref::{NODE, ROLLOUT, Ref};
use serde_json::{Value, json};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists the rollouts, oldest first.
    #[command(visible_alias = "ls")]
    List {
        /// List those in this state: running, paused, stopped, aborting, aborted, completed.
        #[arg(long)]
        state: Option<String>,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// Shows one rollout, with the first nodes that failed or were skipped.
    Show {
        #[arg(add = completion::of(&ROLLOUT))]
        rollout: Ref,
    },
    /// Lists the nodes whose update a rollout has ordered, with the outcome of each.
    Nodes {
        #[arg(add = completion::of(&ROLLOUT))]
        rollout: Ref,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10000))]
        limit: u16,
    },
    /// Updates the agents of many nodes: canaries first, then the others. Without --sku, --region and --node of all nodes.
    Create(NewRollout),
    /// Pauses a rollout: it begins no further update, and those in flight go on.
    Pause(RolloutAction),
    /// Resumes a rollout that was paused or has stopped.
    Resume(RolloutAction),
    /// Aborts a rollout: it begins no further update, and ends when those in flight have ended.
    Abort(RolloutAction),
}

#[derive(Debug, clap::Args)]
pub(crate) struct NewRollout {
    /// The package's digest; without it, the one that the installation publishes.
    #[arg(long, value_name = "SHA256")]
    digest: Option<String>,
    /// How many nodes have to succeed before the others begin; one where it is left out.
    #[arg(long, value_name = "N")]
    canary: Option<u32>,
    /// How many nodes may be under update at once.
    #[arg(long, value_name = "N")]
    max_unavailable: u32,
    /// How long the nodes of a wave are watched before the next one begins, in seconds; 600 where it is left out; 0: not at all.
    #[arg(long, value_name = "N")]
    soak_seconds: Option<u32>,
    /// Also nodes in quarantine that only findings, drift or a validation hold there.
    #[arg(long)]
    include_held: bool,
    /// Nodes of this SKU.
    #[arg(long)]
    sku: Option<String>,
    /// Nodes in this region.
    #[arg(long)]
    region: Option<String>,
    /// This node. Repeat it for more than one.
    #[arg(long = "node", value_name = "NODE", add = completion::of(&NODE))]
    nodes: Vec<Ref>,
    /// The reason, for the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RolloutAction {
    #[arg(add = completion::of(&ROLLOUT))]
    rollout: Ref,
    /// The reason, for the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

const IN_A_LIST: [Column; 7] = [
    ("ID", "/id"),
    ("STATE", "/state"),
    ("STAGE", "/stage"),
    ("UPDATED", "/updated"),
    ("FAILED", "/failed"),
    ("SKIPPED", "/skipped"),
    ("CREATED", "/created_at"),
];

const ALONE: [Column; 21] = [
    ("id", "/id"),
    ("package", "/digest"),
    ("state", "/state"),
    ("since", "/state_since"),
    ("stopped by node", "/stopped_by/node_id"),
    ("stopped because", "/stopped_by/reason"),
    ("stage", "/stage"),
    ("canaries", "/canary"),
    ("at once", "/max_unavailable"),
    ("soak seconds", "/soak_seconds"),
    ("soaks until", "/soaks_until"),
    ("with held nodes", "/include_held"),
    ("updated", "/updated"),
    ("failed", "/failed"),
    ("skipped", "/skipped"),
    ("in flight", "/in_flight"),
    ("waiting", "/waiting"),
    ("reason", "/reason"),
    ("created by", "/created_by"),
    ("created", "/created_at"),
    ("overdue", "/overdue"),
];

const FAILED: [Column; 2] = [("FAILED NODE", "/node_id"), ("WHY", "/reason")];
const SKIPPED: [Column; 2] = [("SKIPPED NODE", "/node_id"), ("WHY", "/reason")];
const NODES: [Column; 5] =
    [("NODE", "/node_id"), ("NAME", "/name"), ("HOST", "/host"), ("OUTCOME", "/outcome"), ("WHY", "/reason")];

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { state, limit } => {
            let query: Query<'_> = state.into_iter().map(|state| ("state", state)).collect();
            api.out.list(&api.list(ROLLOUT.path, &query, limit.into()).await?, &IN_A_LIST)
        }
        Command::Show { rollout } => {
            let id = rollout.id(&ROLLOUT, api).await?;
            let found = api.get(&format!("{}/{id}", ROLLOUT.path), &[]).await?;
            api.out.show(&found, &ALONE)?;
            if api.out.is_json() {
                return Ok(());
            }
            api.out.rows_below(&found["failures"], &FAILED)?;
            api.out.rows_below(&found["skips"], &SKIPPED)?;
            if let Some(notice) = held_notice(&found) {
                api.out.notice(notice);
            }
            Ok(())
        }
        Command::Nodes { rollout, limit } => {
            let id = rollout.id(&ROLLOUT, api).await?;
            let nodes = api.list(&format!("{}/{id}/nodes", ROLLOUT.path), &Query::default(), limit.into()).await?;
            api.out.list(&nodes, &NODES)
        }
        Command::Create(new) => create(new, api).await,
        Command::Pause(order) => send_action(&order, "pause", api).await,
        Command::Resume(order) => send_action(&order, "resume", api).await,
        Command::Abort(order) => send_action(&order, "abort", api).await,
    }
}

/// What to do about nodes that were skipped because they are in quarantine.
fn held_notice(rollout: &Value) -> Option<&'static str> {
    let mut skips = rollout["skips"].as_array().into_iter().flatten();
    let is_held = skips.any(|skip| skip["reason"] == "quarantined");
    match (is_held, rollout["include_held"] == true) {
        (false, _) => None,
        (true, false) => Some(
            "Nodes in quarantine were skipped. `gpuctl rollouts create --include-held` updates those that only findings, drift or a \
             validation hold; `gpuctl nodes update-agent NODE` updates any.",
        ),
        (true, true) => Some(
            "Nodes in quarantine were skipped that something else than findings, drift and validations holds; `gpuctl nodes show NODE` shows \
             what, and `gpuctl nodes update-agent NODE` updates any.",
        ),
    }
}

async fn create(new: NewRollout, api: &Api) -> Result<(), Failure> {
    let mut selector = serde_json::Map::new();
    for (name, value) in [("sku", new.sku), ("region_code", new.region)] {
        selector.extend(value.map(|value| (name.to_owned(), json!(value))));
    }
    if !new.nodes.is_empty() {
        let mut ids = Vec::new();
        for node in &new.nodes {
            ids.push(node.id(&NODE, api).await?);
        }
        selector.insert("node_ids".to_owned(), json!(ids));
    }
    let mut body = json!({ "max_unavailable": new.max_unavailable, "selector": selector, "reason": new.reason });
    if let Some(digest) = new.digest {
        body["digest"] = json!(digest);
    }
    if let Some(canary) = new.canary {
        body["canary"] = json!(canary);
    }
    if let Some(seconds) = new.soak_seconds {
        body["soak_seconds"] = json!(seconds);
    }
    if new.include_held {
        body["include_held"] = json!(true);
    }
    api.out.show(&api.post(ROLLOUT.path, &body).await?, &ALONE)
}

async fn send_action(order: &RolloutAction, verb: &str, api: &Api) -> Result<(), Failure> {
    let id = order.rollout.id(&ROLLOUT, api).await?;
    let body = json!({ "reason": order.reason });
    api.out.show(&api.post(&format!("{}/{id}/{verb}", ROLLOUT.path), &body).await?, &ALONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_nodes_in_quarantine_are_named_with_a_way_to_update_them() {
        let rollout = |reason: &str, include_held: bool| {
            held_notice(&json!({ "include_held": include_held, "skips": [{ "node_id": "0198", "reason": reason }] }))
        };
        assert_eq!(rollout("offline", false), None);
        assert!(rollout("quarantined", false).unwrap().contains("--include-held"));
        assert!(rollout("quarantined", true).unwrap().contains("nodes update-agent"));
    }
}
