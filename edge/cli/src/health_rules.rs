//! The table of health findings and its overrides, for administrators.

use crate::api::Api;
use crate::failure::Failure;
use crate::output::Column;
use serde_json::json;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists the rules in force.
    #[command(visible_alias = "ls")]
    List {
        /// Lists the overrides alone, with their authors.
        #[arg(long)]
        overrides: bool,
    },
    /// Overrides the rule for the findings of a pattern.
    Set {
        /// A probe and a code, such as xid/79 or xid/14*.
        pattern: String,
        /// What follows: prevent_allocation, evacuate, billing_credit, quarantine, warn. Repeat it for more than one.
        #[arg(long = "class", value_name = "CLASS", required = true)]
        classes: Vec<String>,
        /// What can cause it: tenant, hardware, software.
        #[arg(long)]
        cause: Option<String>,
        /// What repairs it: none, reset, reboot, operator.
        #[arg(long)]
        repair: Option<String>,
        /// What the tenant reads; required with evacuate or billing_credit.
        #[arg(long, value_name = "TEXT")]
        tenant_message: Option<String>,
        /// The reason, for the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// Takes an override back: the built-in rule holds again.
    Unset {
        pattern: String,
        /// The reason, for the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
}

const PATH: &str = "/api/v1/admin/health-rules";

const RULES: [Column; 7] = [
    ("PROBE", "/probe"),
    ("CODE", "/code"),
    ("CLASSES", "/classes"),
    ("CAUSE", "/cause"),
    ("REPAIR", "/repair"),
    ("OVERRIDE", "/overridden_by"),
    ("MEANING", "/meaning"),
];
const OVERRIDES: [Column; 7] = [
    ("PATTERN", "/pattern"),
    ("CLASSES", "/classes"),
    ("CAUSE", "/cause"),
    ("REPAIR", "/repair"),
    ("BY", "/written_by"),
    ("AT", "/written_at"),
    ("WHY", "/reason"),
];

pub(crate) async fn run(command: Command, api: &Api) -> Result<(), Failure> {
    match command {
        Command::List { overrides } => {
            let table = api.get(PATH, &[]).await?;
            if overrides {
                api.out.list(&json!({ "items": table["overrides"] }), &OVERRIDES)
            } else {
                api.out.list(&table, &RULES)
            }
        }
        Command::Set { pattern, classes, cause, repair, tenant_message, reason } => {
            let mut body = json!({ "pattern": pattern, "classes": classes, "reason": reason });
            for (name, value) in [("cause", cause), ("repair", repair), ("tenant_message", tenant_message)] {
                if let Some(value) = value {
                    body[name] = json!(value);
                }
            }
            let written = api.post(PATH, &body).await?;
            api.out.list(&json!({ "items": [written], "next_page": null }), &OVERRIDES)
        }
        Command::Unset { pattern, reason } => {
            let query = [("pattern", pattern.clone()), ("reason", reason)].into_iter().collect::<Vec<_>>();
            let taken = api.delete(PATH, &query).await?;
            api.out.done(&taken, &format!("{pattern} is taken back; `gpuctl health-rules list` shows what holds."))
        }
    }
}
