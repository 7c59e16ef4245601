//! What Alertmanager does with an alert, by the shipped configuration: who gets it, and what is silent while another one fires.

use super::monitoring::Alertmanager;
use super::{rule_files, run_tool};
use serde_json::{Value, json};
use std::time::Duration;

/// The receiver of an alert, as amtool finds it.
fn receiver_of(name: &str, severity: &str) -> String {
    let (severity, alert) = (format!("severity={severity}"), format!("alertname={name}"));
    let printed =
        run_tool("amtool", &["config", "routes", "test", "--config.file=alertmanager.yml", &severity, &alert]);
    printed.lines().find(|line| !line.starts_with("Warning:")).unwrap_or_default().to_owned()
}

#[test]
fn critical_alerts_page_others_become_tickets_and_the_watchdog_goes_outside() {
    for alert in rule_files::all().iter().flat_map(|file| &file.alerts) {
        let expected = match alert.severity.as_str() {
            "critical" => "pager",
            "warning" => "tickets",
            _ => "watchdog",
        };
        assert_eq!(receiver_of(&alert.name, &alert.severity), expected, "{}", alert.name);
    }
    assert_eq!(receiver_of("AnotherAlert", "info"), "tickets", "an alert of no known severity is not lost");
}

#[tokio::test(flavor = "multi_thread")]
async fn consequences_of_a_member_that_is_cut_off_are_silent_and_a_missing_role_is_not() {
    let alertmanager = Alertmanager::start().await;
    let names = ["GPUAASMemberCutOff", "GPUAASOutboxBacklog", "GPUAASRateLimitFailOpenDetected", "GPUAASRoleMissing"];
    let alert = |name: &str| json!({ "labels": { "alertname": name, "severity": "critical" } });
    // The cause first, and its delivery, as it happens: an alert that fired before its cause is delivered.
    let http = reqwest::Client::new();
    let url = format!("{}/api/v2/alerts", alertmanager.url);
    for part in [&names[..1], &names[1..]] {
        let alerts: Vec<Value> = part.iter().map(|name| alert(name)).collect();
        assert!(http.post(&url).json(&alerts).send().await.unwrap().status().is_success());
        let delivered = if part.len() == 1 { "GPUAASMemberCutOff" } else { "GPUAASRoleMissing" };
        alertmanager.expect("pager", delivered, true).await;
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let silent = ["GPUAASOutboxBacklog", "GPUAASRateLimitFailOpenDetected"];
    let delivered = alertmanager.received();
    assert!(delivered.iter().all(|it| !silent.contains(&it.name.as_str())), "{delivered:#?}");
    // As the API lists them.
    let listed = edge::outbound::alertmanager::Alertmanager::new(
        &alertmanager.url,
        None,
        &edge::outbound::service_access::ServiceAccess::default(),
    )
    .unwrap()
    .alerts()
    .await
    .unwrap();
    assert_eq!(listed.len(), names.len());
    for alert in &listed {
        let name = alert.labels["alertname"].as_str();
        assert_eq!(!alert.status.inhibited_by.is_empty(), silent.contains(&name), "{alert:?}");
        assert!(alert.status.silenced_by.is_empty() && !alert.fingerprint.is_empty(), "{alert:?}");
    }
    let held: Value = http.get(&url).send().await.unwrap().json().await.unwrap();
    for held in held.as_array().unwrap() {
        let name = held["labels"]["alertname"].as_str().unwrap();
        let is_silent = held["status"]["inhibitedBy"].as_array().is_some_and(|by| !by.is_empty());
        assert_eq!(is_silent, silent.contains(&name), "{held}");
    }
}
