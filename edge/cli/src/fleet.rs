//! The load of the nodes by SKU and region, for administrators.

use crate::api::Api;
use crate::failure::Failure;
use crate::output::Column;
use crate::printable::cell;
use serde_json::{Value, json};

const GROUPS: [Column; 14] = [
    ("SKU", "/sku"),
    ("REGION", "/region_code"),
    ("NODES", "/nodes"),
    ("REPORTING", "/reporting"),
    ("CPU %", "/cpu/utilization_percent"),
    ("MEMORY MIB", "/memory/used_mib"),
    ("OF", "/memory/total_mib"),
    ("STORAGE GIB", "/storage/used_gib"),
    ("OF", "/storage/total_gib"),
    ("GPUS", "/gpus/count"),
    ("GPU %", "/gpus/utilization_percent"),
    ("GPU MEMORY MIB", "/gpus/memory_used_mib"),
    ("MAX °C", "/gpus/temperature_celsius_max"),
    ("WATTS", "/gpus/power_watts"),
];

const SILENT: [Column; 4] =
    [("SILENT NODE", "/node_id"), ("SKU", "/sku"), ("REGION", "/region_code"), ("LAST HEARTBEAT", "/last_at")];

pub(crate) async fn run(api: &Api) -> Result<(), Failure> {
    let found = api.get("/api/v1/admin/telemetry/fleet", &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    api.out.list(&json!({ "items": found["items"], "next_page": null }), &GROUPS)?;
    for line in remarks(&found) {
        api.out.line(&line)?;
    }
    api.out.rows_below(&found["silent_nodes"]["nodes"], &SILENT)
}

/// How old the data is, and what is missing from it.
fn remarks(found: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    if let (Some(newest), Some(oldest)) =
        (found["data_age"]["newest_seconds"].as_f64(), found["data_age"]["oldest_seconds"].as_f64())
    {
        lines.push(format!("data of {newest:.0} to {oldest:.0} s ago"));
    }
    let (count, named) = (&found["silent_nodes"]["count"], found["silent_nodes"]["nodes"].as_array());
    if count.as_u64().unwrap_or(0) > named.map_or(0, Vec::len) as u64 {
        lines.push(format!("silent nodes: {}, the first of them below", cell(count)));
    }
    if found["silent_members"].as_array().is_some_and(|members| !members.is_empty()) {
        let members = cell(&found["silent_members"]);
        lines.push(format!("members that do not answer, so that their nodes look silent: {members}"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn age_and_what_is_missing_are_shown_where_there_is_any() {
        let all_well = json!({
            "data_age": {"newest_seconds": 0.4, "oldest_seconds": 29.7},
            "silent_nodes": {"count": 1, "nodes": [{}]}, "silent_members": [],
        });
        assert_eq!(remarks(&all_well), ["data of 0 to 30 s ago"]);
        let missing = json!({
            "data_age": null, "silent_nodes": {"count": 7, "nodes": [{}]}, "silent_members": ["m\u{1b}1"],
        });
        assert_eq!(remarks(&missing).len(), 2);
        assert!(!remarks(&missing)[1].contains('\u{1b}'), "nothing of it reaches the terminal as a command");
    }
}
