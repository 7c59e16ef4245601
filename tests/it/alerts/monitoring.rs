//! Prometheus and Alertmanager of Debian beside a cluster, with the rules and the configuration of `deploy/alerts`, and a receiver of what they
//! deliver.
//!
//! The rules are the shipped files. In a copy of Alertmanager's configuration the address of the receivers and the pauses of a group are the
//! test's; Prometheus scrapes and evaluates every second.

use crate::external_tools::{installed, root};
use axum::Router;
use axum::extract::State;
use axum::http::Uri;
use axum::routing::post;
use local_servers::ports::free_port;
use local_servers::process::{ChildProcess, Launch};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tests::cluster::{TestCluster, WAIT_TIMEOUT};
use tokio::task::AbortHandle;

/// An alert as a receiver got it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeliveredAlert {
    /// The name of the receiver in `alertmanager.yml`.
    pub(crate) receiver: String,
    pub(crate) name: String,
    pub(crate) is_firing: bool,
    pub(crate) runbook: String,
}

type Received = Arc<Mutex<Vec<DeliveredAlert>>>;

/// A running Alertmanager with its receivers.
pub(crate) struct Alertmanager {
    pub(crate) url: String,
    received: Received,
    _process: ChildProcess,
    serving: AbortHandle,
    folder: tempfile::TempDir,
}

impl Drop for Alertmanager {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Alertmanager {
    pub(crate) async fn start() -> Self {
        let folder = tempfile::Builder::new().prefix("gpuaas-alerts-").tempdir().unwrap();
        let received = Received::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let receivers = listener.local_addr().unwrap();
        let router = Router::new().fallback(post(receive)).with_state(Arc::clone(&received));
        let serving = tokio::spawn(async move { axum::serve(listener, router).await }).abort_handle();
        let shipped = fs::read_to_string(root().join("deploy/alerts/alertmanager.yml")).unwrap();
        let config = shipped
            .replace("127.0.0.1:9099", &receivers.to_string())
            .replace("group_wait: 10s", "group_wait: 1s")
            .replace("group_interval: 1m", "group_interval: 2s");
        let path = folder.path().join("alertmanager.yml");
        fs::write(&path, config).unwrap();
        let address = format!("127.0.0.1:{}", free_port().unwrap());
        let process = Launch::new(
            "Alertmanager",
            installed("prometheus/prometheus-alertmanager"),
            folder.path().join("alertmanager.log"),
        )
        .argument(format!("--config.file={}", path.display()))
        .argument(format!("--storage.path={}", folder.path().join("alertmanager").display()))
        .argument(format!("--web.listen-address={address}"))
        // No other Alertmanager.
        .argument("--cluster.listen-address=")
        .spawn()
        .unwrap();
        let url = format!("http://{address}");
        wait_ready(&url, process.log()).await;
        Self { url, received, _process: process, serving, folder }
    }

    pub(crate) fn received(&self) -> Vec<DeliveredAlert> {
        self.received.lock().unwrap().clone()
    }

    /// Waits until a receiver gets this alert, firing or resolved, and returns it.
    pub(crate) async fn expect(&self, receiver: &str, name: &str, is_firing: bool) -> DeliveredAlert {
        let until = Instant::now() + Duration::from_secs(150);
        loop {
            let all = self.received();
            // The last delivery counts: an alert may have fired before.
            let last = all.iter().rev().find(|it| it.receiver == receiver && it.name == name);
            if let Some(found) = last.filter(|it| it.is_firing == is_firing) {
                return found.clone();
            }
            assert!(Instant::now() < until, "{receiver} did not get {name} (firing: {is_firing}): {all:#?}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

async fn receive(State(received): State<Received>, uri: Uri, body: axum::body::Bytes) {
    let Ok(message) = serde_json::from_slice::<Value>(&body) else { return };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    for alert in message["alerts"].as_array().into_iter().flatten() {
        received.lock().unwrap().push(DeliveredAlert {
            receiver: uri.path().trim_start_matches('/').to_owned(),
            name: text(&alert["labels"]["alertname"]),
            is_firing: alert["status"] == "firing",
            runbook: text(&alert["annotations"]["runbook_id"]),
        });
    }
}

async fn wait_ready(url: &str, log: &Path) {
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let answer = reqwest::get(format!("{url}/-/ready")).await;
        if answer.is_ok_and(|answer| answer.status().is_success()) {
            return;
        }
        assert!(Instant::now() < until, "{url} is not ready: {}", fs::read_to_string(log).unwrap_or_default());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// What differs from the shipped files.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MonitoringOptions<'a> {
    /// Files of rules whose waits (`for`, and the windows of increases) are seconds. The cases for promtool hold the shipped ones.
    pub(crate) hurried: &'a [&'a str],
    /// Replicas that are hosts of a lab, by index.
    pub(crate) lab_hosts: &'a [usize],
}

/// Prometheus over the replicas of a cluster, and its Alertmanager.
pub(crate) struct Monitoring {
    pub(crate) alertmanager: Alertmanager,
    address: String,
    prometheus: Option<ChildProcess>,
}

impl Monitoring {
    /// With the shipped rules.
    pub(crate) async fn start(cluster: &TestCluster) -> Self {
        Self::start_with(cluster, &MonitoringOptions::default()).await
    }

    pub(crate) async fn start_with(cluster: &TestCluster, options: &MonitoringOptions<'_>) -> Self {
        let alertmanager = Alertmanager::start().await;
        let folder = alertmanager.folder.path();
        let targets = |is_of_lab: bool| {
            let replicas = cluster.replicas.iter().enumerate();
            let replicas = replicas.filter(|(index, _)| options.lab_hosts.contains(index) == is_of_lab);
            let urls =
                replicas.map(|(_, replica)| format!("'{}'", replica.operations_url().trim_start_matches("http://")));
            urls.collect::<Vec<_>>().join(", ")
        };
        let config = format!(
            "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\nrule_files: ['{}/*.yaml']\n\
             alerting: {{ alertmanagers: [{{ static_configs: [{{ targets: ['{}'] }}] }}] }}\n\
             scrape_configs: [{{ job_name: gpuaas, static_configs: [{{ targets: [{}] }}] }},\n\
             {{ job_name: lab, static_configs: [{{ targets: [{}], labels: {{ lab_stack: one, host_role: app_control, \
             host_name: lab-1 }} }}] }}]\n",
            rules(folder, options.hurried).display(),
            alertmanager.url.trim_start_matches("http://"),
            targets(false),
            targets(true),
        );
        fs::write(folder.join("prometheus.yml"), config).unwrap();
        let address = format!("127.0.0.1:{}", free_port().unwrap());
        let mut monitoring = Self { alertmanager, address, prometheus: None };
        monitoring.start_prometheus().await;
        // What is delivered from here on is delivered all the way.
        monitoring.alertmanager.expect("watchdog", "GPUAASWatchdog", true).await;
        monitoring
    }

    /// Starts Prometheus on the data that it has.
    pub(crate) async fn start_prometheus(&mut self) {
        let folder = self.alertmanager.folder.path();
        let prometheus = Launch::new("Prometheus", installed("prometheus/prometheus"), folder.join("prometheus.log"))
            .argument(format!("--config.file={}", folder.join("prometheus.yml").display()))
            .argument(format!("--storage.tsdb.path={}", folder.join("prometheus").display()))
            .argument(format!("--web.listen-address={}", self.address))
            .spawn()
            .unwrap();
        wait_ready(&self.url(), prometheus.log()).await;
        self.prometheus = Some(prometheus);
    }

    pub(crate) async fn stop_prometheus(&mut self) {
        self.prometheus.take().expect("Prometheus runs").stop(Duration::from_secs(30)).await;
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The result of an instant query: a vector.
    pub(crate) async fn query(&self, expression: &str) -> Vec<Value> {
        let request =
            reqwest::Client::new().get(format!("{}/api/v1/query", self.url())).query(&[("query", expression)]);
        let answer: Value = request.send().await.unwrap().json().await.unwrap();
        assert_eq!(answer["status"], "success", "{expression}: {answer}");
        answer["data"]["result"].as_array().unwrap_or_else(|| panic!("no vector: {answer}")).clone()
    }

    /// Waits until Prometheus has a sample of each of these counters: one that has no earlier sample has no increase.
    pub(crate) async fn wait_for_samples(&self, counters: &[&str]) {
        for counter in counters {
            let until = Instant::now() + WAIT_TIMEOUT;
            while self.query(&format!("{counter} > 0")).await.is_empty() {
                assert!(Instant::now() < until, "there is no sample of {counter}");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }

    /// The names of the alerts that fire.
    pub(crate) async fn firing(&self) -> Vec<String> {
        let alerts = self.query("ALERTS{alertstate=\"firing\"}").await;
        alerts.iter().map(|it| it["metric"]["alertname"].as_str().unwrap_or_default().to_owned()).collect()
    }
}

/// The folder of the rules: the shipped one, or a copy.
fn rules(folder: &Path, hurried: &[&str]) -> PathBuf {
    let shipped = root().join("deploy/alerts");
    if hurried.is_empty() {
        return shipped;
    }
    let copy = folder.join("rules");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(&shipped).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !name.ends_with(".yaml") {
            continue;
        }
        let mut text = fs::read_to_string(&path).unwrap();
        if hurried.contains(&name) {
            for window in ["[5m]", "[10m]", "[15m]", "[1h]"] {
                text = text.replace(window, "[30s]");
            }
            let lines = text.lines().map(|line| match line.split_once("for: ") {
                Some((indent, _)) if indent.trim().is_empty() => format!("{indent}for: 2s\n"),
                Some(_) | None => format!("{line}\n"),
            });
            text = lines.collect();
        }
        fs::write(copy.join(name), text).unwrap();
    }
    assert!(hurried.iter().all(|name| copy.join(name).is_file()), "there are such files");
    copy
}
