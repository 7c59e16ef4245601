//! `gpuaas keys`: where the service's own keys stand, and their next step. What it does it asks of the API, as an administrator.

use crate::operator::{Operator, OperatorArgs};
use clap::ValueEnum;
use comfy_table::{Table, presets};
use edge::api::{AllKeys, AtRestKey, AtRestView, Changed, KeyPhase};
use serde_json::json;
use std::io::Write;
use std::time::Duration;

/// How often it is looked how far it is.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Whom to ask, and for what.
#[derive(Debug, clap::Args)]
pub struct KeysArgs {
    #[command(subcommand)]
    what: What,
    #[command(flatten)]
    operator: OperatorArgs,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Shows every key, the phase that it is in, and which replicas go by it.
    List,
    /// Makes a key and has it trusted everywhere; nothing uses it yet.
    Stage {
        purpose: Purpose,
        #[arg(long)]
        reason: String,
    },
    /// Puts a staged key to use; the one before is trusted on, in grace.
    Activate {
        purpose: Purpose,
        key_id: String,
        #[arg(long)]
        reason: String,
        /// Also while a replica does not know the key.
        #[arg(long)]
        force: bool,
    },
    /// Trusts a key no more, and destroys its private half.
    Retire {
        purpose: Purpose,
        key_id: String,
        #[arg(long)]
        reason: String,
        /// Also before a signing key's grace is over, and where nodes have certificates by this authority alone.
        #[arg(long)]
        force: bool,
    },
    /// Has everything sealed anew under the key that is active in the key ring, and waits until nothing is left under the others.
    Rewrap {
        #[arg(long)]
        reason: String,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Purpose {
    /// What agents execute is signed with them.
    TaskSigning,
    /// Nodes are certified with them.
    NodeCa,
    /// The access tokens of service accounts are signed with them.
    ServiceTokens,
}

impl Purpose {
    const fn name(self) -> &'static str {
        match self {
            Self::TaskSigning => "task_signing",
            Self::NodeCa => "node_ca",
            Self::ServiceTokens => "service_tokens",
        }
    }
}

/// Does it, and shows what came of it.
///
/// # Errors
/// Where nobody answers, or the answer is a refusal: it is quoted.
pub async fn run(args: KeysArgs) -> anyhow::Result<()> {
    let operator = args.operator.log_in().await?;
    match args.what {
        What::List => {
            let all: AllKeys = operator.get("/api/v1/admin/keys", &[]).await?;
            shown(&mut std::io::stdout().lock(), &all)?;
        }
        What::Stage { purpose, reason } => {
            let body = json!({ "purpose": purpose.name(), "reason": reason });
            changed(&operator, "stage", &body).await?;
        }
        What::Activate { purpose, key_id, reason, force } => {
            let body = json!({ "purpose": purpose.name(), "key_id": key_id, "reason": reason, "force": force });
            changed(&operator, "activate", &body).await?;
        }
        What::Retire { purpose, key_id, reason, force } => {
            let body = json!({ "purpose": purpose.name(), "key_id": key_id, "reason": reason, "force": force });
            changed(&operator, "retire", &body).await?;
        }
        What::Rewrap { reason } => rewrapped(&operator, &reason).await?,
    }
    Ok(())
}

async fn changed(operator: &Operator, step: &str, body: &serde_json::Value) -> anyhow::Result<()> {
    let changed: Changed = operator.post(&format!("/api/v1/admin/keys/{step}"), body).await?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", changed.key_id)?;
    let mut notes = std::io::stderr().lock();
    if !changed.waiting_for.is_empty() {
        writeln!(notes, "not yet at: {}; `gpuaas keys list` shows when", changed.waiting_for.join(", "))?;
    }
    for node in &changed.cut_off {
        let (id, host, at) = (node.node_id, &node.host, node.certificate_not_after);
        writeln!(notes, "cut off: node {id} ({host}), whose certificate would have ended at {at}")?;
    }
    Ok(())
}

/// Says what is left whenever that has changed, until nothing is.
async fn rewrapped(operator: &Operator, reason: &str) -> anyhow::Result<()> {
    let mut at_rest: AtRestView = operator.post("/api/v1/admin/keys/rewrap", &json!({ "reason": reason })).await?;
    let mut said = None;
    loop {
        let going = |key: &&AtRestKey| key.phase.is_some_and(|phase| phase.name() == "grace");
        let left: u64 = at_rest.keys.iter().filter(going).map(|key| key.sealed).sum();
        if said.replace(left) != Some(left) {
            writeln!(std::io::stderr().lock(), "{left} values are left to be sealed anew")?;
        }
        if !at_rest.keys.iter().any(|key| going(&key)) {
            break;
        }
        tokio::time::sleep(LOOK_AGAIN).await;
        at_rest = operator.get::<AllKeys>("/api/v1/admin/keys", &[]).await?.at_rest;
    }
    let mut out = std::io::stdout().lock();
    for key in at_rest.keys.iter().filter(|key| key.sealed == 0) {
        writeln!(out, "nothing is sealed under {}: it may leave the key ring", key.key_id)?;
    }
    Ok(())
}

fn shown(out: &mut impl Write, all: &AllKeys) -> std::io::Result<()> {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(["purpose", "version", "key", "phase", "since", "until", "made", "who needs it"]);
    let time = |at: chrono::DateTime<chrono::Utc>| at.format("%Y-%m-%d %H:%M:%S").to_string();
    for set in &all.sets {
        for key in &set.keys {
            table.add_row([
                set.purpose.name().to_owned(),
                set.version.to_string(),
                key.key_id.clone(),
                key.phase.name().to_owned(),
                time(key.since),
                key.until.map(time).unwrap_or_default(),
                time(key.made_at),
                key.dependents.map(|count| format!("{count} nodes")).unwrap_or_default(),
            ]);
        }
    }
    for key in &all.at_rest.keys {
        table.add_row([
            "at_rest".to_owned(),
            all.at_rest.version.to_string(),
            key.key_id.clone(),
            key.phase.map_or("", KeyPhase::name).to_owned(),
            key.since.map(time).unwrap_or_default(),
            String::new(),
            String::new(),
            format!("seals {} values", key.sealed),
        ]);
    }
    writeln!(out, "{table}")?;
    for replica in &all.replicas {
        let versions: Vec<_> =
            replica.versions.iter().map(|(purpose, version)| format!("{purpose} {version}")).collect();
        let goes_by = if replica.answers { versions.join(", ") } else { "does not answer".to_owned() };
        writeln!(out, "{}: {goes_by}", replica.name)?;
    }
    Ok(())
}
