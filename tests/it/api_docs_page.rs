//! The page of the API's documentation, in a real browser: it shows every operation, and requests no host but the service.

use crate::external_tools::{browser, description, run};
use serde_json::Value;
use tests::cluster::TestCluster;

#[tokio::test(flavor = "multi_thread")]
async fn api_docs_page_shows_every_operation_and_requests_no_other_host() {
    let cluster = TestCluster::start().await;
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("network.json");
    let base = cluster.anonymous_client().base().to_owned();
    let mut looking = browser();
    looking
        .arg(format!("--user-data-dir={}", folder.path().join("profile").display()))
        .arg(format!("--log-net-log={}", log.display()))
        // The cluster's authority signs no other host; the hosts of the browser's requests are checked below.
        .arg("--ignore-certificate-errors")
        .args(["--enable-logging=stderr", "--virtual-time-budget=30000", "--window-size=1400,3000", "--dump-dom"])
        .arg(format!("{base}/api/v1/docs"));
    let shown = run(looking).await;

    let path = description(&cluster, folder.path()).await;
    let described: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut operations = 0;
    for (path, item) in described["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let summary =
                operation["summary"].as_str().unwrap_or_default().trim_end_matches('.').replace('\'', "&#39;");
            let place = format!("/{}{path}\"", method.to_uppercase());
            assert!(shown.contains(&place), "the page does not show {method} {path} ({summary})");
            operations += 1;
        }
    }
    assert!(operations > 30, "{operations}");
    for button in ["Ask AI", "Generate SDK", "Test Request"] {
        assert!(!shown.contains(button), "the page offers {button}");
    }
    // It does not try to: the browser would report what the content security policy forbids.
    for complaint in ["Content Security Policy", "Refused to", "Uncaught"] {
        let line = shown.lines().find(|line| line.contains("CONSOLE") && line.contains(complaint));
        assert_eq!(line, None);
    }
    expect_asked_only(&base, &std::fs::read_to_string(log).unwrap());
    cluster.shutdown().await;
}

/// Asserts by the browser's log that every request of a page goes to this host. (Requests without a page are the browser's own.)
fn expect_asked_only(base: &str, log: &str) {
    let log: Value = serde_json::from_str(log).expect("the browser's log is whole");
    let events = log["events"].as_array().expect("the log has events");
    let mut asked = 0;
    for parameters in events.iter().map(|event| &event["params"]) {
        let (Some(url), Some(initiator)) = (parameters["url"].as_str(), parameters["initiator"].as_str()) else {
            continue;
        };
        if initiator.starts_with("http") {
            assert!(url.starts_with(base), "the page asks {url}");
            asked += 1;
        }
    }
    assert!(asked >= 2, "the page fetches its script and the description; the log has {asked} requests");
}
