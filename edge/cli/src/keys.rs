//! The service's own keys and their rotation, for administrators.

use crate::api::Api;
use crate::confirmation::Confirm;
use crate::failure::Failure;
use crate::output::{Column, table_text};
use crate::printable::cell;
use clap::ValueEnum;
use serde_json::{Value, json};
use std::time::Duration;

/// How often the progress of rewrapping is polled.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
const PATH: &str = "/api/v1/admin/keys";

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists every key with its phase, and the versions that each replica uses.
    #[command(visible_alias = "ls")]
    List,
    /// Makes a key that is trusted everywhere and used by nothing yet. Prints its id.
    Stage {
        purpose: Purpose,
        #[command(flatten)]
        step: KeyStep,
    },
    /// Puts a staged key to use; the one before stays trusted, in grace.
    Activate {
        #[command(flatten)]
        change: KeyAction,
        /// Activate it although a replica does not know it.
        #[arg(long)]
        force: bool,
    },
    /// Ends the trust in a key, and destroys its private half.
    Retire {
        #[command(flatten)]
        change: KeyAction,
        /// Retire it before a signing key's grace has ended, and where nodes have certificates by this authority alone.
        #[arg(long)]
        force: bool,
    },
    /// Seals all secrets with the active key of the key ring, and waits until none is sealed with another.
    Rewrap {
        #[command(flatten)]
        step: KeyStep,
    },
}

/// Which key takes a step, and why.
#[derive(Debug, clap::Args)]
pub(crate) struct KeyAction {
    purpose: Purpose,
    key: String,
    #[command(flatten)]
    step: KeyStep,
}

#[derive(Debug, clap::Args)]
pub(crate) struct KeyStep {
    /// The reason, for the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
    #[command(flatten)]
    confirm: Confirm,
}

#[derive(Clone, Copy, Debug, ValueEnum, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub(crate) enum Purpose {
    /// The tasks of agents are signed with them.
    TaskSigning,
    /// Nodes are certified with them.
    NodeCa,
    /// The access tokens of service accounts are signed with them.
    ServiceTokens,
    /// The members' messages to each other are authenticated with them.
    MemberMessages,
}

impl Purpose {
    const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl KeyAction {
    /// The body of the API's request.
    fn body(&self, force: bool) -> Value {
        json!({ "purpose": self.purpose.name(), "key_id": self.key, "reason": self.step.reason, "force": force })
    }
}

const KEYS: [Column; 8] = [
    ("PURPOSE", "/purpose"),
    ("VERSION", "/version"),
    ("KEY", "/key_id"),
    ("PHASE", "/phase"),
    ("SINCE", "/since"),
    ("UNTIL", "/until"),
    ("MADE", "/made_at"),
    ("NEEDED BY", "/needed_by"),
];

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List => {
            let all = api.get(PATH, &[]).await?;
            if api.out.is_json() { api.out.json(&all) } else { api.out.line(shown(&all).trim_end()) }
        }
        Command::Stage { purpose, step } => {
            step.confirm.ask(&format!("Stage a key for {}?", purpose.name()))?;
            take_step("stage", &json!({ "purpose": purpose.name(), "reason": step.reason }), api).await
        }
        Command::Activate { change, force } => {
            let (key, purpose) = (&change.key, change.purpose.name());
            change.step.confirm.ask(&format!("Activate key {key} for {purpose}?"))?;
            take_step("activate", &change.body(force), api).await
        }
        Command::Retire { change, force } => {
            let (key, purpose) = (&change.key, change.purpose.name());
            change.step.confirm.ask(&format!("Retire key {key} of {purpose}, and destroy its private half?"))?;
            take_step("retire", &change.body(force), api).await
        }
        Command::Rewrap { step } => {
            step.confirm.ask("Seal all secrets with the active key of the key ring?")?;
            rewrap(&step.reason, api).await
        }
    }
}

/// Prints the key's id as the result, for scripts.
async fn take_step(step: &str, body: &Value, api: &Api) -> Result<(), Failure> {
    let changed = api.post(&format!("{PATH}/{step}"), body).await?;
    api.out.done(&changed, &cell(&changed["key_id"]))?;
    if changed["waiting_for"].as_array().is_some_and(|members| !members.is_empty()) {
        let members = cell(&changed["waiting_for"]);
        api.out.notice(&format!("Not yet known to: {members}; `gpuctl keys list` shows when it is."));
    }
    for node in changed["cut_off"].as_array().into_iter().flatten() {
        let shown = if node["name"].is_string() { "name" } else { "host" };
        let [id, shown, until] = ["node_id", shown, "certificate_not_after"].map(|name| cell(&node[name]));
        api.out.notice(&format!("Cut off: node {id} ({shown}), whose certificate was good until {until}."));
    }
    Ok(())
}

/// Waits until no value is sealed under the keys in grace.
async fn rewrap(reason: &str, api: &Api) -> Result<(), Failure> {
    let mut at_rest = api.post(&format!("{PATH}/rewrap"), &json!({ "reason": reason })).await?;
    let mut last = None;
    loop {
        let in_grace: Vec<&Value> = keys(&at_rest).iter().filter(|key| key["phase"] == "grace").collect();
        let left: u64 = in_grace.iter().filter_map(|key| key["sealed"].as_u64()).sum();
        if last.replace(left) != Some(left) {
            api.out.notice(&format!("{left} values are left to be sealed with the active key."));
        }
        if in_grace.is_empty() {
            break;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        at_rest = api.get(PATH, &[]).await?["at_rest"].take();
    }
    if api.out.is_json() {
        return api.out.json(&at_rest);
    }
    for key in keys(&at_rest).iter().filter(|key| key["sealed"] == 0) {
        api.out.line(&format!("{} seals nothing: it may leave the key ring.", cell(&key["key_id"])))?;
    }
    Ok(())
}

fn keys(set: &Value) -> &[Value] {
    set["keys"].as_array().map_or(&[], Vec::as_slice)
}

fn shown(all: &Value) -> String {
    let mut rows = Vec::new();
    for set in all["sets"].as_array().into_iter().flatten() {
        let row = |key: &Value| {
            let nodes = key["dependents"].as_u64().map(|count| format!("{count} nodes"));
            with_fields(
                key,
                &[
                    ("purpose", set["purpose"].clone()),
                    ("version", set["version"].clone()),
                    ("needed_by", json!(nodes)),
                ],
            )
        };
        rows.extend(keys(set).iter().map(row));
    }
    let at_rest = &all["at_rest"];
    rows.extend(keys(at_rest).iter().map(|key| {
        let sealed = format!("{} values", cell(&key["sealed"]));
        with_fields(
            key,
            &[("purpose", json!("at_rest")), ("version", at_rest["version"].clone()), ("needed_by", json!(sealed))],
        )
    }));
    let mut text = table_text(&rows, &KEYS);
    for replica in all["replicas"].as_array().into_iter().flatten() {
        let versions = replica["versions"].as_object().into_iter().flatten();
        let versions: Vec<_> = versions.map(|(purpose, version)| format!("{purpose} {}", cell(version))).collect();
        let uses = if replica["answers"] == true { versions.join(", ") } else { "does not answer".to_owned() };
        text.push_str(&format!("\n{}: {}", cell(&replica["name"]), crate::printable::plain(&uses)));
    }
    text
}

fn with_fields(key: &Value, more: &[(&str, Value)]) -> Value {
    let mut row = key.clone();
    for (name, value) in more {
        row[*name] = value.clone();
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_a_row_with_its_purpose_and_each_replica_a_line() {
        let key = |id: &str, phase: &str| json!({ "key_id": id, "phase": phase, "since": "2026-11-22T01:02:03Z", "made_at": "2026-11-21T01:02:03Z", "public": "x" });
        let mut authority = key("0198", "grace");
        authority["dependents"] = json!(3);
        let all = json!({
            "sets": [
                { "purpose": "task_signing", "version": 4, "keys": [key("0197", "active")] },
                { "purpose": "node_ca", "version": 2, "keys": [authority] },
            ],
            "at_rest": { "version": 1, "keys": [{ "key_id": "key-1", "phase": null, "sealed": 12 }] },
            "replicas": [
                { "name": "replica-1", "answers": true, "versions": { "node_ca": 2, "task_signing": 4 } },
                { "name": "replica-2", "answers": false, "versions": {} },
            ],
        });
        insta::assert_snapshot!(shown(&all));
    }
}
