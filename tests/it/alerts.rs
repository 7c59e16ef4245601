//! The alerts of `deploy/alerts`, as Prometheus and Alertmanager of Debian evaluate and deliver them, and their runbooks.

mod dashboards;
mod delivery;
pub(crate) mod executed_runbooks;
pub(crate) mod monitoring;
mod rule_files;
mod runbook_of_certificates;
mod runbook_of_retention;
mod runbooks_of_nodes;
mod runbooks_of_traffic;

use crate::external_tools::{installed, root};
use rule_files::{Alert, RuleFile};
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// The folder with Prometheus, Alertmanager and their tools.
fn tools_folder() -> String {
    installed("prometheus").display().to_string()
}

/// Runs a program of Prometheus or Alertmanager in `deploy/alerts`, and returns what it printed; panics with that if it fails.
fn run_tool(name: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(installed("prometheus").join(name));
    let output = command.args(arguments).current_dir(root().join("deploy/alerts")).output().expect("it runs");
    let printed = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name} {arguments:?}: {}\n{printed}", output.status);
    printed
}

fn file_names(files: &[RuleFile]) -> Vec<&str> {
    files.iter().map(|file| file.name.as_str()).collect()
}

#[test]
fn prometheus_accepts_every_rule_and_both_configurations() {
    let files = rule_files::all();
    run_tool("promtool", &[&["check", "rules"], &file_names(&files)[..]].concat());
    let checked = run_tool("promtool", &["check", "config", "prometheus.yml"]);
    assert!(files.iter().all(|file| checked.contains(&file.name)), "the configuration has every file: {checked}");
    let checked = run_tool("amtool", &["check-config", "alertmanager.yml"]);
    assert!(checked.contains("3 receivers"), "{checked}");
}

#[test]
fn every_alert_does_not_fire_fires_and_resolves() {
    let files = rule_files::all();
    let cases: Vec<String> = files.iter().map(|file| format!("tests/{}", file.name)).collect();
    let cases: Vec<&str> = cases.iter().map(String::as_str).collect();
    run_tool("promtool", &[&["test", "rules"], &cases[..]].concat());
    let mut lacking = Vec::new();
    for file in &files {
        let cases = rule_files::cases_of(&file.name);
        for Alert { name, .. } in &file.alerts {
            // The watchdog never resolves.
            let wanted: &[bool] = if name == "GPUAASWatchdog" { &[true] } else { &[false, true, false] };
            if cases.get(name).is_none_or(|cases| cases != wanted) {
                lacking.push(format!("{name}: {:?}", cases.get(name)));
            }
        }
        let of_alerts: BTreeSet<_> = file.alerts.iter().map(|alert| &alert.name).collect();
        assert!(cases.keys().all(|name| of_alerts.contains(name)), "tests/{} has cases of other alerts", file.name);
    }
    assert!(lacking.is_empty(), "not one case in which it does not fire, fires and resolves: {lacking:#?}");
}

#[test]
fn every_alert_has_a_runbook_and_a_known_severity_and_names_registered_metrics() {
    let metrics = crate::reference_pages::metric_names();
    let files = rule_files::all();
    let records: BTreeSet<&str> = files.iter().flat_map(|file| &file.records).map(|it| it.0.as_str()).collect();
    let mut runbooks = BTreeMap::<String, Vec<&str>>::new();
    let mut names = BTreeSet::new();
    for alert in files.iter().flat_map(|file| &file.alerts) {
        assert!(alert.name.starts_with("GPUAAS") && names.insert(&alert.name), "{} is a name of its own", alert.name);
        let is_known = ["critical", "warning"].contains(&alert.severity.as_str());
        assert!(is_known || alert.name == "GPUAASWatchdog", "{} has severity {:?}", alert.name, alert.severity);
        runbooks.entry(alert.runbook.clone()).or_default().push(&alert.name);
    }
    let records_too = files.iter().flat_map(|file| &file.records).map(|(name, expression)| (name, expression));
    let expressions = files.iter().flat_map(|file| &file.alerts).map(|alert| (&alert.name, &alert.expression));
    for (name, expression) in expressions.chain(records_too) {
        for metric in rule_files::metrics_in(expression) {
            let of_histogram = ["_bucket", "_sum", "_count"].iter().find_map(|end| metric.strip_suffix(end));
            let is_there = metrics.contains(&metric)
                || of_histogram.is_some_and(|family| metrics.contains(family))
                || records.contains(metric.as_str())
                || metric == "up";
            assert!(is_there, "{name}: there is no metric {metric}");
        }
    }
    let pages: BTreeSet<String> = rule_files::runbooks().into_keys().collect();
    assert_eq!(runbooks.keys().cloned().collect::<BTreeSet<_>>(), pages, "alerts and runbooks belong to each other");
    for (page, text) in rule_files::runbooks() {
        let lacking: Vec<_> = runbooks[&page].iter().filter(|name| !text.contains(&format!("`{name}`"))).collect();
        assert!(lacking.is_empty(), "{page} says nothing of {lacking:?}");
    }
}

/// What an operator is to look at before something is added (the page *Capacity*).
#[test]
fn capacity_page_names_registered_metrics() {
    let metrics = crate::reference_pages::metric_names();
    let page = std::fs::read_to_string(root().join("deploy/docs/src/operator/capacity.md")).expect("the page");
    let (_, table) = page.split_once("## When to add what").expect("its table");
    let rows = table.lines().take_while(|line| !line.starts_with("## ")).filter(|line| line.starts_with("| `"));
    let cells: Vec<&str> = rows.filter_map(|row| row.split('|').nth(1)).collect();
    assert!(cells.len() >= 10, "{cells:#?}");
    for name in cells.iter().flat_map(|cell| cell.split('`').skip(1).step_by(2)) {
        let name = name.split('{').next().unwrap_or(name);
        assert!(name.starts_with("process_") || metrics.contains(name), "there is no metric {name}");
    }
}

/// The runbook ids of the specification (*Observability surface*).
const SPECIFIED_RUNBOOKS: [(&str, &[&str]); 6] = [
    ("ops.webhook.outage", &["GPUAASWebhookProcessingFailuresSpike"]),
    ("ops.terminal.gateway", &["GPUAASTerminalTokenReplaySpike", "GPUAASNotificationWriteErrorsSpike"]),
    ("ops.api.degradation", &["GPUAASRateLimitFailOpenDetected"]),
    ("ops.provisioning.stuck", &["GPUAASProvisioningTimeouts", "GPUAASProvisioningFailuresSpike"]),
    ("ops.node.onboarding", &["GPUAASEnrollmentRefusedSpike", "GPUAASSshKeysNotWritten", "GPUAASSshKeysAltered"]),
    ("ops.lab.three-host", &["GPUAASLabHostSilent", "GPUAASLabBoundaryBroken"]),
];

#[test]
fn specified_alerts_lead_to_the_specified_runbooks() {
    let files = rule_files::all();
    let alerts: BTreeMap<&str, &str> =
        files.iter().flat_map(|file| &file.alerts).map(|alert| (alert.name.as_str(), alert.runbook.as_str())).collect();
    for (runbook, names) in SPECIFIED_RUNBOOKS {
        assert!(rule_files::runbooks().contains_key(runbook), "there is no page {runbook}");
        for name in names {
            assert_eq!(alerts.get(name), Some(&runbook), "{name}");
        }
    }
}

/// The sources of the tests, but for those that hand alerts to Alertmanager themselves.
fn sources_of_tests() -> String {
    fn gather(folder: &std::path::Path, found: &mut String) {
        for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("it is readable").path()) {
            if entry.is_dir() {
                gather(&entry, found);
            } else if entry.extension().is_some_and(|ending| ending == "rs") && !entry.ends_with("alerts/delivery.rs") {
                found.push_str(&std::fs::read_to_string(&entry).expect("a source"));
            }
        }
    }
    let mut text = String::new();
    gather(&root().join("tests/it"), &mut text);
    text
}

/// Each page is the value of a constant of the test that follows it.
#[test]
fn every_runbook_is_followed_by_a_test() {
    let text = sources_of_tests();
    let followed = |page: &str| text.contains(&format!("runbooks/{page}.md\";"));
    let lacking: Vec<_> = rule_files::runbooks().into_keys().filter(|page| !followed(page)).collect();
    assert!(lacking.is_empty(), "no test follows {lacking:?}");
}

/// Alerts that no test causes. Their rules have cases for promtool, and their page is followed for another alert that leads to it.
const NOT_CAUSED: &[&str] = &[
    "GPUAASActivationBudgetBurnsFast",
    "GPUAASActivationBudgetBurnsSlow",
    "GPUAASApiBudgetBurnsSlow",
    "GPUAASAuditSealLag",
    "GPUAASConsumerLag",
    "GPUAASLogStoreLimits",
    "GPUAASLogStoreMisconfigured",
    "GPUAASMetricsStale",
    "GPUAASNotificationWriteErrorsSpike",
    "GPUAASProvisioningFailuresSpike",
    "GPUAASProvisioningTimeouts",
    "GPUAASRecoveryMarkStale",
    "GPUAASReplicationLag",
    "GPUAASRetentionDoesNotRun",
    "GPUAASWalArchiveBehind",
];

#[test]
fn every_alert_is_caused_by_a_test_but_for_those_that_are_listed() {
    let text = sources_of_tests();
    let is_caused = |name: &str| text.contains(&format!("\"{name}\", true)"));
    let files = rule_files::all();
    let names = files.iter().flat_map(|file| &file.alerts).map(|alert| alert.name.as_str());
    let lacking: BTreeSet<&str> = names.filter(|name| !is_caused(name)).collect();
    assert_eq!(lacking, NOT_CAUSED.iter().copied().collect::<BTreeSet<_>>());
}

#[test]
fn every_runbook_has_its_parts_and_names_commands_that_exist() {
    let commands =
        std::fs::read_to_string(root().join("edge/cli/src/snapshots/gpuctl__tests__commands_are_as_reviewed.snap"))
            .expect("the list of commands");
    let commands: BTreeSet<String> = commands
        .lines()
        .filter_map(|line| line.strip_prefix("gpuctl "))
        .map(|line| line.split(' ').take_while(|word| word.starts_with(|it: char| it.is_ascii_lowercase())).collect())
        .map(|words: Vec<&str>| words.join(" "))
        .collect();
    for (page, text) in rule_files::runbooks() {
        assert!(text.starts_with(&format!("# {page}: ")), "{page} begins with its id");
        let mut parts: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("## ")).collect();
        parts.dedup_by(|next, before| next.starts_with("Fix: ") && before.starts_with("Fix"));
        assert_eq!(parts, ["Meaning", "What users see", "Look here", "Fix", "Afterwards"], "{page}");
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for (at, _) in words.match_indices("gpuctl ").filter(|(at, _)| {
            let before = words[..*at].chars().next_back();
            before != Some('.') && before != Some('/')
        }) {
            let command: Vec<&str> = words[at + "gpuctl ".len()..].split([' ', '`']).take(3).collect();
            let is_there = (1..=command.len()).any(|length| commands.contains(&command[..length].join(" ")));
            assert!(is_there, "{page}: there is no command gpuctl {}", command.join(" "));
        }
    }
}
