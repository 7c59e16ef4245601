//! The fleet hour by hour.

use super::harness::ApiHarness;
use chrono::{DateTime, TimeDelta, Utc};
use domain::SkuId;
use persistence::fleet_history::{HourlyGpus, hour_of};
use serde_json::{Value, json};
use uuid::Uuid;

const PATH: &str = "/api/v1/admin/fleet-history";

fn sample(sku_id: Uuid, sku: &str, region: &str) -> HourlyGpus {
    let (sku_id, sku) = (SkuId(sku_id), sku.to_owned());
    HourlyGpus { sku_id, sku, region_code: region.to_owned(), total: 16, held: 9, free: 4 }
}

fn in_query(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(chrono::SecondsFormat::Secs, true)
}

#[tokio::test]
async fn history_has_every_hour_and_null_for_what_was_not_measured() {
    let api = ApiHarness::new().await;
    let sku: Uuid = api.sku("h100", 8).await.parse().unwrap();
    let history = api.fleet_history();
    let last = hour_of(Utc::now()) - TimeDelta::hours(10);
    let hour = |n: i32| last - TimeDelta::hours(1) * n;
    let gpus = [sample(sku, "h100", "eu-1"), sample(sku, "h100", "us-1")];
    history.store_gpus(hour(2), hour(2), &gpus).await.unwrap();
    history.add_up(hour(2), last).await.unwrap();
    history.store_gpus(hour(0), hour(0), &[]).await.unwrap();

    let (from, until) = (in_query(hour(2) + TimeDelta::minutes(5)), in_query(last + TimeDelta::minutes(5)));
    let read = async |filter: &str| -> Value {
        let path = format!("{PATH}?from={from}&until={until}{filter}");
        api.get(&path).admin().send().await.is(200).clone()
    };
    let found = read("").await;
    assert_eq!((&found["from"], &found["until"]), (&json!(in_query(hour(2))), &json!(in_query(hour(-1)))));
    let rows = |region: &str| json!({"sku_id": sku, "sku": "h100", "region_code": region, "gpus_total": 16, "gpus_held": 9, "gpus_free": 4, "gpus_unavailable": 3});
    let quiet = json!({"begun": 0, "active_after_seconds_p50": null, "active_after_seconds_p95": null});
    let expected = json!([
        {"hour": in_query(hour(2)), "gpus": [rows("eu-1"), rows("us-1")], "rentals": quiet, "revenue": []},
        {"hour": in_query(hour(1)), "gpus": null, "rentals": null, "revenue": null},
        {"hour": in_query(hour(0)), "gpus": [], "rentals": null, "revenue": null},
    ]);
    assert_eq!(found["hours"], expected);
    for (filter, regions) in [
        ("&region=us-1".to_owned(), json!([rows("us-1")])),
        ("&sku=h100&region=eu-1".to_owned(), json!([rows("eu-1")])),
        (format!("&sku={sku}"), json!([rows("eu-1"), rows("us-1")])),
        ("&region=elsewhere".to_owned(), json!([])),
    ] {
        assert_eq!(read(&filter).await["hours"][0]["gpus"], regions, "{filter}");
    }
}

#[tokio::test]
async fn range_is_a_week_where_none_is_named_and_a_month_at_most() {
    let api = ApiHarness::new().await;
    let hours = async |query: &str| {
        let found = api.get(&format!("{PATH}{query}")).admin().send().await.is(200).clone();
        found["hours"].as_array().unwrap().len()
    };
    assert_eq!(hours("").await, 7 * 24 + 1, "the hour that runs, and a week before it");
    assert_eq!(hours("?until=2026-11-22T12:00:00Z").await, 7 * 24);
    assert_eq!(hours("?from=2026-10-22T12:00:00Z&until=2026-11-22T12:00:00Z").await, 31 * 24);
    assert_eq!(hours("?from=2026-11-22T12:59:59Z&until=2026-11-22T13:00:00Z").await, 1);
    for (query, field) in [
        ("?from=2026-10-22T11:59:59Z&until=2026-11-22T12:00:00Z", "from"),
        ("?from=2026-11-22T12:00:00Z&until=2026-11-22T12:00:00Z", "from"),
        ("?from=2999-11-22T12:00:00Z", "from"),
        ("?from=yesterday", "from"),
        ("?sku=none-such", "sku"),
        ("?region=%20", "region"),
        ("?hour=1", "hour"),
    ] {
        let refused = api.get(&format!("{PATH}{query}")).admin().send().await;
        assert_eq!(refused.refused(400, "invalid_request")["field"], field, "{query}");
    }
    let extremes = "?from=-262143-01-01T00:00:00Z&until=%2B262142-12-31T23:59:59Z";
    api.get(&format!("{PATH}{extremes}")).admin().send().await.refused(400, "invalid_request");
}

#[tokio::test]
async fn history_of_more_groups_than_an_answer_holds_is_refused_with_the_way_out() {
    let api = ApiHarness::new().await;
    let sku: Uuid = api.sku("h100", 8).await.parse().unwrap();
    let history = api.fleet_history();
    let last = hour_of(Utc::now()) - TimeDelta::hours(1);
    let gpus: Vec<_> = (0..600).map(|n| sample(sku, "h100", &format!("region-{n}"))).collect();
    for n in 0..17 {
        let hour = last - TimeDelta::hours(1) * n;
        history.store_gpus(hour, hour, &gpus).await.unwrap();
    }
    let refused = api.get(PATH).admin().send().await;
    assert_eq!(refused.refused(400, "invalid_request")["field"], "from");
    assert!(refused.body.to_string().contains("name a `sku` or a `region`"), "{}", refused.body);
    api.get(&format!("{PATH}?region=region-7")).admin().send().await.is(200);
}
