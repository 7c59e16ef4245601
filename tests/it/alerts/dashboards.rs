//! The dashboards of `deploy/dashboards`: Prometheus parses every query, every metric in them is registered, and each query returns data after a
//! rental.

use super::monitoring::Monitoring;
use super::rule_files::metrics_in;
use crate::external_tools::{installed, root};
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use tests::cluster::fake_agent::FakeAgent;
use tests::cluster::{GPUS, TestCluster, WAIT_TIMEOUT};

const BOARDS: [&str; 4] = ["api", "cluster", "fleet", "money"];

/// The metrics of the client library that a dashboard may use.
const OF_THE_LIBRARY: [&str; 4] =
    ["up", "process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"];

/// A query of a panel, with Grafana's variables replaced.
struct PanelQuery {
    panel: String,
    expression: String,
}

fn board(name: &str) -> Value {
    let text = fs::read_to_string(root().join(format!("deploy/dashboards/{name}.json"))).expect("the dashboard exists");
    serde_json::from_str(&text).expect("it is JSON")
}

fn queries() -> Vec<PanelQuery> {
    let mut found = Vec::new();
    for name in BOARDS {
        let board = board(name);
        for panel in board["panels"].as_array().expect("it has panels") {
            for target in panel["targets"].as_array().into_iter().flatten() {
                let expression = target["expr"].as_str().expect("a target has a query");
                let expression = expression.replace("$__rate_interval", "1m").replace("$instance", ".*");
                assert!(!expression.contains('$'), "{name}: {expression} has a variable that is not known here");
                found.push(PanelQuery { panel: format!("{name}: {}", panel["title"]), expression });
            }
        }
    }
    assert!(found.len() > 50, "only {} queries were found", found.len());
    found
}

/// The errors of these dashboards against Grafana's types (`tests/grafana-schema/check.mjs`).
fn type_errors(boards: &[PathBuf]) -> String {
    let checked = Command::new("node")
        .arg(root().join("tests/grafana-schema/check.mjs"))
        .arg(installed("grafana-schema"))
        .args(boards)
        .output()
        .expect("node starts");
    let printed = String::from_utf8(checked.stdout).expect("it prints text");
    assert_eq!(checked.status.success(), printed.is_empty(), "{printed}{}", String::from_utf8_lossy(&checked.stderr));
    printed
}

#[test]
fn every_dashboard_is_of_grafanas_types_and_an_altered_one_is_not() {
    let path = |name: &str| root().join(format!("deploy/dashboards/{name}.json"));
    assert_eq!(type_errors(&BOARDS.map(path)), "");
    let mut altered = board("fleet");
    let panels = altered["panels"].as_array_mut().expect("it has panels");
    let panel = panels.iter_mut().find(|panel| panel["type"] == "timeseries").expect("one is a time series");
    panel["options"]["legend"]["displayMode"] = json!("lst");
    panel["gridPos"]["x"] = json!("0");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("fleet.json");
    fs::write(&file, altered.to_string()).expect("it can be written");
    let errors = type_errors(&[file]);
    assert!(errors.contains("displayMode") && errors.contains("\"lst\""), "{errors}");
    assert!(errors.contains("Type 'string' is not assignable to type 'number'"), "{errors}");
}

#[test]
fn every_dashboard_has_panels_that_do_not_overlap_each_with_a_unit_and_an_id() {
    let files: BTreeSet<String> = fs::read_dir(root().join("deploy/dashboards"))
        .expect("the folder exists")
        .map(|entry| entry.expect("it is readable").file_name().to_string_lossy().replace(".json", ""))
        .collect();
    assert_eq!(files, BOARDS.map(str::to_owned).into());
    let mut uids = BTreeSet::new();
    for name in BOARDS {
        let board = board(name);
        assert!(
            uids.insert(board["uid"].to_string()) && board["title"].as_str().is_some_and(|it| !it.is_empty()),
            "{name}"
        );
        let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
        for panel in board["panels"].as_array().unwrap() {
            assert!(ids.insert(panel["id"].as_u64().expect("an id")), "{name}: {panel}");
            let place =
                |key: &str| panel["gridPos"][key].as_u64().unwrap_or_else(|| panic!("{name}: no {key}: {panel}"));
            assert!(place("x") + place("w") <= 24, "{name}: a row has 24 columns: {panel}");
            for cell in (place("x")..place("x") + place("w"))
                .flat_map(|x| (place("y")..place("y") + place("h")).map(move |y| (x, y)))
            {
                assert!(cells.insert(cell), "{name}: two panels overlap: {panel}");
            }
            if panel["type"] != "row" {
                assert!(panel["fieldConfig"]["defaults"]["unit"].is_string(), "{name}: no unit: {panel}");
                assert_eq!(panel["datasource"]["uid"], "${datasource}", "{name}: {panel}");
            }
        }
    }
}

#[test]
fn prometheus_parses_every_query_and_every_metric_in_it_is_registered() {
    let metrics = crate::reference_pages::metric_names();
    let mut rules = "groups:\n  - name: dashboards\n    rules:\n".to_owned();
    for (number, PanelQuery { panel, expression }) in queries().into_iter().enumerate() {
        for metric in metrics_in(&expression) {
            let of_histogram = ["_bucket", "_sum", "_count"].iter().find_map(|end| metric.strip_suffix(end));
            let is_there = metrics.contains(&metric)
                || of_histogram.is_some_and(|family| metrics.contains(family))
                || OF_THE_LIBRARY.contains(&metric.as_str());
            assert!(is_there, "{panel}: there is no metric {metric}");
        }
        // promtool parses the expressions of rules.
        rules
            .push_str(&format!("      - record: query:{number}\n        expr: '{}'\n", expression.replace('\'', "''")));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("queries.yaml");
    fs::write(&path, rules).unwrap();
    let output = Command::new(installed("prometheus/promtool")).args(["check", "rules"]).arg(&path).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}{printed}", String::from_utf8_lossy(&output.stdout));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_query_returns_data_after_a_rental() {
    let mut cluster = TestCluster::builder().replicas(2).policy("billing.window_seconds", 1).start().await;
    let monitoring = Monitoring::start(&cluster).await;
    let node = cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 2).await;
    // The simulated GPUs of the tests' agents measure nothing: a node by hand reports a load.
    let other = cluster.register("h100").await;
    let agent = FakeAgent::onboard(&cluster.bundle(&other).await, GPUS).await;
    let mut heartbeat = agent.heartbeat_body();
    heartbeat["telemetry"]["gpus"] = json!([{
        "uuid": heartbeat["inventory"]["gpus"][0]["uuid"],
        "utilization_percent": 90, "memory_used_mib": 1000, "temperature_celsius": 60, "power_milliwatts": 300_000,
    }]);
    // Rates want two scrapes, money is read once a minute, and the load of a node comes with its heartbeats.
    let until = Instant::now() + Duration::from_secs(240);
    let mut left = queries();
    while !left.is_empty() {
        let mut empty = Vec::new();
        for query in left {
            let result = monitoring.query(&query.expression).await;
            let is_data = |it: &Value| it["value"][1].as_str().is_some_and(|value| value != "NaN");
            if !result.iter().any(is_data) {
                empty.push(query);
            }
        }
        left = empty;
        let names: Vec<_> = left.iter().map(|it| format!("{}: {}", it.panel, it.expression)).collect();
        assert!(left.is_empty() || Instant::now() < until, "queries without data: {names:#?}");
        cluster.user.get("/api/v1/allocations").await.ok();
        heartbeat["sent_at"] = json!(chrono::Utc::now());
        agent.send(Method::POST, "heartbeat", Some(&heartbeat)).await.ok();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    // Where a scrape took too long, there is no value for a moment.
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let sold = monitoring.query("sum(inventory_gpus{use=\"sold\",sku=\"h100\"})").await;
        if sold.first().is_some_and(|it| it["value"][1] == "2") {
            break;
        }
        assert!(Instant::now() < until, "the GPUs of the allocation: {sold:?}");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    // A member on a machine that is overloaded answers another's question about a rate limit too late, which is what that alert is about.
    let mut firing = monitoring.firing().await;
    firing.retain(|name| name != "GPUAASRateLimitFailOpenDetected");
    // A single request that such a machine fails is more than the budget of the few that there are here.
    let failed = monitoring.query("sum(http_requests_total{service=\"api\",status_class=\"5xx\"}) > 0").await;
    firing.retain(|name| failed.is_empty() || !name.starts_with("GPUAASApiBudgetBurns"));
    assert_eq!(firing, ["GPUAASWatchdog"], "nothing fires in a healthy cluster");
    allocation.release_fully().await;
    node.expect_all_free().await;
    cluster.shutdown().await;
}
