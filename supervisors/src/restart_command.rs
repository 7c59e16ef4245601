//! `gpuaas restart`: starts a part of the running cluster anew, from a terminal.

use crate::operator::{Operator, OperatorArgs};
use anyhow::Context as _;
use edge::runtime::Tree;
use serde::Deserialize;
use serde_json::json;
use std::io::Write;
use uuid::Uuid;

#[derive(Debug, clap::Args)]
pub struct RestartArgs {
    #[command(flatten)]
    operator: OperatorArgs,
    /// An entity as `gpuaas tree` shows it, kind/id; or a worker, with --member.
    what: String,
    /// The member whose worker it is, by name or id.
    #[arg(long)]
    member: Option<String>,
    /// Why; kept in the audit log.
    #[arg(long)]
    reason: Option<String>,
}

/// Has it started anew, and says what came of it.
///
/// # Errors
/// Where it is not there, nobody answers, or the answer is a refusal: it is quoted.
pub async fn run(args: RestartArgs) -> anyhow::Result<()> {
    #[derive(Deserialize)]
    struct Restarted {
        restarted: bool,
    }
    let operator = args.operator.log_in().await?;
    let path = match &args.member {
        Some(member) => format!("members/{}/workers/{}", member_id(&operator, member).await?, args.what),
        None => {
            let (kind, id) = args.what.split_once('/').context("an entity is kind/id; a worker needs --member")?;
            format!("entities/{kind}/{}", id.parse::<Uuid>().context("the entity's id is no UUID")?)
        }
    };
    let body = args.reason.as_ref().map_or_else(|| json!({}), |reason| json!({ "reason": reason }));
    let Restarted { restarted } = operator.post(&format!("/api/v1/admin/runtime/{path}/restart"), &body).await?;
    let came = if restarted { "is started anew" } else { "did not run; it starts when it is needed" };
    writeln!(std::io::stdout(), "{} {came}", args.what)?;
    Ok(())
}

async fn member_id(operator: &Operator, name: &str) -> anyhow::Result<Uuid> {
    let tree: Tree = operator.get("/api/v1/admin/runtime/tree", &[("limit", "1")]).await?;
    let found = tree.members.iter().find(|member| member.name == name || member.id.to_string() == name);
    Ok(found.with_context(|| format!("no member is called {name}; `gpuaas tree` names them"))?.id)
}
