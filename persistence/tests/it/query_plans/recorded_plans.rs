//! The plans that a server has logged (`auto_explain`): of each statement that it executed, with the values that were bound.

use super::generated_rows::MARK;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The settings of a server that logs the plan of each statement.
pub(super) fn settings() -> Vec<String> {
    [
        "session_preload_libraries=auto_explain",
        "auto_explain.log_min_duration=0",
        "auto_explain.log_format=json",
        "fsync=off",
        "full_page_writes=off",
        "autovacuum=off",
        "max_wal_size=4GB",
        "shared_buffers=512MB",
        "log_line_prefix=",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// One executed statement.
#[derive(Clone, Debug)]
pub(super) struct ExecutedPlan {
    /// The planner's estimate for all of it.
    pub(super) cost: f64,
    /// The tables that it reads from one end to the other.
    pub(super) scanned: BTreeSet<String>,
    /// One line for each node.
    pub(super) outline: String,
}

/// The statements by their text, in one line; of each the most expensive plan.
pub(super) type RecordedPlans = BTreeMap<String, ExecutedPlan>;

/// The length of the log, from which a later reading may begin.
pub(super) fn position(log: &Path) -> u64 {
    std::fs::metadata(log).unwrap().len()
}

/// The statements that were executed since the log had that length, without those of the test itself.
pub(super) fn read(log: &Path, since: u64) -> RecordedPlans {
    let bytes = std::fs::read(log).unwrap();
    let text = String::from_utf8_lossy(&bytes[usize::try_from(since).unwrap()..]);
    let mut recorded = RecordedPlans::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if !line.trim_end().ends_with("plan:") {
            continue;
        }
        let mut json = String::new();
        while let Some(line) = lines.next_if(|line| line.starts_with('\t')) {
            json.push_str(line.trim_start());
        }
        let logged: Value =
            serde_json::from_str(&json).unwrap_or_else(|error| panic!("a plan is no JSON ({error}): {json}"));
        let statement = one_line(logged["Query Text"].as_str().unwrap());
        if statement.contains(MARK) {
            continue;
        }
        let mut plan = ExecutedPlan {
            cost: logged["Plan"]["Total Cost"].as_f64().unwrap(),
            scanned: BTreeSet::new(),
            outline: String::new(),
        };
        visit(&logged["Plan"], 0, &mut plan);
        let dearest = recorded.entry(statement).or_insert_with(|| plan.clone());
        if plan.cost > dearest.cost {
            *dearest = plan;
        }
    }
    recorded
}

fn visit(node: &Value, depth: usize, plan: &mut ExecutedPlan) {
    let text = |key: &str| node[key].as_str().unwrap_or_default();
    let relation = text("Relation Name");
    if text("Node Type") == "Seq Scan" {
        plan.scanned.insert(relation.to_owned());
    }
    plan.outline.push_str(&format!(
        "{:depth$}{} {relation} {} cost {} rows {}\n",
        "",
        text("Node Type"),
        text("Index Name"),
        node["Total Cost"],
        node["Plan Rows"],
        depth = depth * 2,
    ));
    for child in node["Plans"].as_array().into_iter().flatten() {
        visit(child, depth + 1, plan);
    }
}

/// A statement with single spaces.
pub(super) fn one_line(statement: &str) -> String {
    statement.split_whitespace().collect::<Vec<_>>().join(" ")
}
