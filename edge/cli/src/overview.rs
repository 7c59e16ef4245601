//! The overview of the service, for administrators.

use crate::api::Api;
use crate::failure::Failure;
use crate::output::Column;
use crate::printable::cell;
use serde_json::Value;

const GPUS: [Column; 6] = [
    ("SKU", "/sku"),
    ("REGION", "/region_code"),
    ("NODES", "/nodes"),
    ("GPUS", "/gpus_total"),
    ("HELD", "/gpus_held"),
    ("FREE", "/gpus_free"),
];

const MONEY: [Column; 4] =
    [("CURRENCY", "/currency"), ("ACCOUNTS", "/accounts"), ("DEPLETED", "/depleted"), ("BALANCE", "/balance")];

pub(crate) async fn run(api: &Api) -> Result<(), Failure> {
    let found = api.get("/api/v1/admin/overview", &[]).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    for (kind, states) in found["entities_by_kind"].as_object().into_iter().flatten() {
        api.out.line(&counts(kind, states))?;
    }
    api.out.line(&format!("overdue: {}, parked: {}", cell(&found["overdue"]), cell(&found["parked"])))?;
    if found["silent_members"].as_array().is_some_and(|members| !members.is_empty()) {
        api.out.line(&format!("members that do not answer: {}", cell(&found["silent_members"])))?;
    }
    api.out.rows_below(&found["gpus"], &GPUS)?;
    api.out.rows_below(&found["money"], &MONEY)
}

/// `node: 2 active, 1 offline`.
pub(crate) fn counts(kind: &str, states: &Value) -> String {
    let states = states.as_object().into_iter().flatten();
    let states: Vec<_> =
        states.map(|(state, count)| format!("{} {}", cell(count), crate::printable::plain(state))).collect();
    format!("{}: {}", crate::printable::plain(kind), states.join(", "))
}
