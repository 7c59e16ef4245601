//! The fleet hour by hour, for administrators.

use crate::amount::with_amounts;
use crate::api::{Api, Query};
use crate::completion;
use crate::failure::Failure;
use crate::instant;
use crate::output::Column;
use crate::printable::cell;
use chrono::{DateTime, Utc};
use serde_json::{Value, json};

#[derive(Debug, clap::Args)]
pub(crate) struct FleetHistoryArgs {
    /// From the hour of this instant on (2026-11-22T12:00:00Z); without it a week.
    #[arg(long, value_name = "INSTANT", value_parser = instant::parse)]
    from: Option<DateTime<Utc>>,
    /// Up to this instant, at most 31 days later; without it up to now.
    #[arg(long, value_name = "INSTANT", value_parser = instant::parse)]
    until: Option<DateTime<Utc>>,
    /// Of this SKU alone.
    #[arg(long, add = completion::sku_names())]
    sku: Option<String>,
    /// In this region alone.
    #[arg(long)]
    region: Option<String>,
}

const HOURS: [Column; 9] = [
    ("HOUR", "/hour"),
    ("GPUS", "/gpus_total"),
    ("HELD", "/gpus_held"),
    ("FREE", "/gpus_free"),
    ("UNAVAILABLE", "/gpus_unavailable"),
    ("BEGUN", "/rentals/begun"),
    ("P50 S", "/rentals/active_after_seconds_p50"),
    ("P95 S", "/rentals/active_after_seconds_p95"),
    ("REVENUE", "/revenue"),
];

pub(crate) async fn run(args: FleetHistoryArgs, api: &Api) -> Result<(), Failure> {
    let given = [
        ("from", args.from.map(|at| at.to_rfc3339())),
        ("until", args.until.map(|at| at.to_rfc3339())),
        ("sku", args.sku),
        ("region", args.region),
    ];
    let query: Query<'_> = given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    let found = api.get("/api/v1/admin/fleet-history", &query).await?;
    if api.out.is_json() {
        return api.out.json(&found);
    }
    let hours: Vec<_> = found["hours"].as_array().into_iter().flatten().map(row).collect();
    api.out.list(&json!({ "items": hours, "next_page": null }), &HOURS)
}

/// An hour with the sums of its GPUs; what was not measured stays empty.
fn row(hour: &Value) -> Value {
    let mut row = json!({ "hour": hour["hour"], "rentals": hour["rentals"] });
    if let Some(gpus) = hour["gpus"].as_array() {
        for field in ["gpus_total", "gpus_held", "gpus_free", "gpus_unavailable"] {
            row[field] = json!(gpus.iter().filter_map(|group| group[field].as_u64()).sum::<u64>());
        }
    }
    if let Some(gained) = hour["revenue"].as_array() {
        let amounts: Vec<_> = gained.iter().map(|one| cell(&with_amounts(one)["revenue"])).collect();
        row["revenue"] = json!(if amounts.is_empty() { "0".to_owned() } else { amounts.join(", ") });
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::table_text;

    #[test]
    fn hour_that_was_not_measured_is_empty_and_a_quiet_one_has_zeros() {
        let group = |total: u64| json!({"gpus_total": total, "gpus_held": 3, "gpus_free": 2, "gpus_unavailable": 1});
        let hours = [
            json!({
                "hour": "2026-11-22T12:00:00Z", "gpus": [group(6), group(8)],
                "rentals": {"begun": 2, "active_after_seconds_p50": 31.5, "active_after_seconds_p95": 90.0},
                "revenue": [{"currency": "EUR", "revenue_micro": 1_500_000}, {"currency": "JPY", "revenue_micro": 7_000_000}],
            }),
            json!({"hour": "2026-11-22T13:00:00Z", "gpus": null, "rentals": null, "revenue": null}),
            json!({
                "hour": "2026-11-22T14:00:00Z", "gpus": [],
                "rentals": {"begun": 0, "active_after_seconds_p50": null, "active_after_seconds_p95": null}, "revenue": [],
            }),
        ];
        let rows: Vec<_> = hours.iter().map(row).collect();
        insta::assert_snapshot!(table_text(&rows, &HOURS));
    }
}
