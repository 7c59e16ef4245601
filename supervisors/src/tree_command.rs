//! `gpuaas tree`: the supervision tree of the whole cluster, in a terminal.

use crate::operator::OperatorArgs;
use comfy_table::{Table, presets};
use edge::runtime::{EntityNode, MemberNode, QueueNode, ShardState, Tree};
use std::io::Write;

/// Whom to ask, and for what.
#[derive(Debug, clap::Args)]
pub struct TreeArgs {
    #[command(flatten)]
    operator: OperatorArgs,
    /// Entities of this kind: node, allocation, sku and so on.
    #[arg(long)]
    kind: Option<String>,
    /// Entities in this state.
    #[arg(long)]
    state: Option<String>,
    /// Entities past their deadline.
    #[arg(long)]
    overdue: bool,
    /// Entities that failed too often.
    #[arg(long)]
    parked: bool,
    /// With every member's shards one by one.
    #[arg(long)]
    shards: bool,
}

/// Prints the tree.
///
/// # Errors
/// Where nobody answers, or the answer is a refusal: it is quoted.
pub async fn run(args: TreeArgs) -> anyhow::Result<()> {
    let mut query: Vec<(&str, &str)> = Vec::new();
    query.extend(args.kind.as_deref().map(|kind| ("kind", kind)));
    query.extend(args.state.as_deref().map(|state| ("state", state)));
    query.extend(args.overdue.then_some(("overdue", "true")));
    query.extend(args.parked.then_some(("parked", "true")));
    query.extend(args.shards.then_some(("shards", "true")));
    let tree = args.operator.log_in().await?.get("/api/v1/admin/runtime/tree", &query).await?;
    let mut out = std::io::stdout().lock();
    print(&mut out, &tree)?;
    Ok(())
}

fn print(out: &mut impl Write, tree: &Tree) -> std::io::Result<()> {
    for member in &tree.members {
        print_member(out, member)?;
    }
    for silent in &tree.silent {
        writeln!(out, "{silent}  lives, and did not answer")?;
    }
    writeln!(out)?;
    for (kind, states) in &tree.entities_by_kind {
        let counts: Vec<_> = states.iter().map(|(state, count)| format!("{count} {state}")).collect();
        writeln!(out, "{kind}: {}", counts.join(", "))?;
    }
    writeln!(out, "overdue: {}, parked: {}", tree.overdue, tree.parked)?;
    if !tree.entities.is_empty() {
        writeln!(out, "\n{}", entities(&tree.entities))?;
    }
    if tree.truncated {
        writeln!(out, "There are more; narrow the selection with --kind and --state.")?;
    }
    Ok(())
}

fn print_member(out: &mut impl Write, member: &MemberNode) -> std::io::Result<()> {
    let MemberNode { name, id, shards, awake, mailbox_depth, key_sets, .. } = member;
    let keys: Vec<_> = key_sets.iter().map(|(purpose, version)| format!("{purpose} {version}")).collect();
    let keys = keys.join(", ");
    writeln!(
        out,
        "{name}  {id}  {shards} shards, {awake} entities awake, {mailbox_depth} commands waiting, keys: {keys}"
    )?;
    print_below(out, member, "root", 1)
}

fn print_below(out: &mut impl Write, member: &MemberNode, parent: &str, depth: usize) -> std::io::Result<()> {
    for worker in member.workers.iter().filter(|worker| worker.under == parent) {
        let indent = "  ".repeat(depth);
        let trouble =
            worker.last_error.as_deref().map(|error| format!("  {} restarts, last: {error}", worker.restarts));
        let (name, state, what) = (&worker.name, worker.state.name(), &worker.what);
        let waits = worker.queue.map(waits).unwrap_or_default();
        writeln!(out, "{indent}{name:<20} {state:<12} {what}{waits}{}", trouble.unwrap_or_default())?;
        print_below(out, member, name, depth + 1)?;
        if name == "entities" {
            print_shards(out, member, depth + 1)?;
        }
    }
    Ok(())
}

fn waits(QueueNode { waiting, under_way, bound }: QueueNode) -> String {
    let bound = bound.map(|bound| format!(" of {bound}")).unwrap_or_default();
    format!("  {waiting}{bound} wait, {under_way} under way")
}

fn print_shards(out: &mut impl Write, member: &MemberNode, depth: usize) -> std::io::Result<()> {
    for shard in &member.owned_shards {
        let state = match shard.state {
            ShardState::Open => "open",
            ShardState::Closing => "closing",
        };
        let (indent, name) = ("  ".repeat(depth), format!("shard {}", shard.shard));
        let (epoch, awake, waiting) = (shard.epoch, shard.awake, shard.mailbox_depth);
        writeln!(out, "{indent}{name:<20} {state:<12} epoch {epoch}, {awake} awake, {waiting} commands waiting")?;
    }
    Ok(())
}

fn entities(rows: &[EntityNode]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(["kind", "id", "lives at", "status", "state", "waits for", "until"]);
    for row in rows {
        let until = row.deadline_at.map(|at| at.format("%H:%M:%S").to_string()).unwrap_or_default();
        let late = if row.overdue { " overdue" } else { "" };
        table.add_row([
            row.kind.clone(),
            row.id.to_string(),
            format!("{} /{}", row.member_name.as_deref().unwrap_or("nobody"), row.shard),
            row.status.name().to_owned(),
            row.state.clone().unwrap_or_default(),
            row.last_error.clone().or_else(|| row.waits_for.clone()).unwrap_or_default(),
            format!("{until}{late}"),
        ]);
    }
    table
}
