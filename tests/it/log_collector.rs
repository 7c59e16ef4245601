//! The collector of a node's logs, under its shipped unit on a Debian that systemd has booted, with the machine's own journal, a real agent,
//! and a real gateway in front of a fake log store.

use crate::external_tools::{root, tools};
use local_servers::private_files;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tests::cluster::fake_log_store::FakeLogStore;
use tests::cluster::{NodeHandle, TestCluster};
use tests::systemd_container::{OTHERS_PORTS, SystemdContainer};

const AGENT: &str = "gpuaas-agent.service";
const COLLECTOR: &str = "gpuaas-log-collector.service";
/// A unit whose lines are collected, and that the test can be.
const SOURCE: &str = "gpuaas-finalizer";
const WITHIN: Duration = Duration::from_secs(90);
/// Lines of one batch at most: what one crash may repeat.
const BATCH_LINES: usize = 1000;

struct CollectingMachine {
    machine: SystemdContainer,
    store: FakeLogStore,
    cluster: TestCluster,
    node: NodeHandle,
}

impl CollectingMachine {
    /// A machine whose agent has enrolled, with the collector installed as the book says.
    async fn start() -> Option<Self> {
        let test = std::env::current_exe().unwrap();
        let names = ["gpuaas-agent", "gpuaas-log-collector"];
        let programs: Vec<_> = names.iter().map(|name| private_files::find_sibling(&test, name).unwrap()).collect();
        let machine = SystemdContainer::start(&tools(), &programs).expect("the container starts")?;
        let store = FakeLogStore::start().await;
        let ca = store.authorities_path().display().to_string();
        let builder = TestCluster::builder().variable("SVC_LOG_STORE_URL", &store.url());
        let mut cluster = builder.variable("SVC_LOG_STORE_CA_PATH", &ca).start().await;
        cluster.offer_sku("h100", 1).await;
        let (node, bundle) = cluster.registered("h100").await;
        machine.run("install -d -m 0755 /etc/gpuaas");
        machine.write("/etc/gpuaas/agent.env", 0o600, bundle.to_env_file().unwrap().as_bytes());
        for unit in [AGENT, COLLECTOR] {
            let text = std::fs::read(root().join("deploy/systemd").join(unit)).unwrap();
            machine.write(&format!("/etc/systemd/system/{unit}"), 0o644, &text);
        }
        // The machine has no GPU.
        let simulated = format!(
            "[Service]\n{OTHERS_PORTS}\nExecStart=\nExecStart=/usr/local/bin/gpuaas-agent --env-file /etc/gpuaas/agent.env \
             --executor system --simulate-gpus 1\n"
        );
        machine.run(&format!("install -d /etc/systemd/system/{AGENT}.d"));
        machine.write(&format!("/etc/systemd/system/{AGENT}.d/gpus.conf"), 0o644, simulated.as_bytes());
        // journald takes no part of a burst away.
        let source = "[Service]\nType=oneshot\nExecStart=/bin/sh /run/lines.sh\nLogRateLimitIntervalSec=0\n";
        machine.write(&format!("/etc/systemd/system/{SOURCE}.service"), 0o644, source.as_bytes());
        machine.run("systemctl daemon-reload && systemctl start gpuaas-agent");
        machine.write("/etc/gpuaas/log-collector.env", 0o644, b"SVC_NODE_LOG_COLLECTOR_ENABLED=1\nRUST_LOG=info\n");
        let it = Self { machine, store, cluster, node };
        let enrolled = "the machine's agent has enrolled";
        it.cluster.admin.wait_within(WITHIN, &it.node.path(), enrolled, |node| node["state"] == "active").await;
        Some(it)
    }

    /// Writes lines to the journal as a unit of the service, and waits until they are in it.
    fn write(&self, name: &str, lines: usize) {
        let script = format!("i=0\nwhile [ $i -lt {lines} ]; do echo \"{name} line $i\"; i=$((i+1)); done\n");
        self.machine.write("/run/lines.sh", 0o644, script.as_bytes());
        // It ends with the last line.
        self.machine.run(&format!("systemctl start {SOURCE} && journalctl --sync"));
    }

    /// How often each line with this name was stored.
    fn stored(&self, name: &str) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for batch in self.store.received() {
            let body: Value = serde_json::from_slice(&batch.body).unwrap();
            for stream in body["streams"].as_array().unwrap() {
                for value in stream["values"].as_array().unwrap() {
                    let line = value[1].as_str().unwrap();
                    if line.starts_with(&format!("{name} line ")) {
                        *counts.entry(line.to_owned()).or_default() += 1;
                    }
                }
            }
        }
        counts
    }

    /// Waits until all lines with this name are stored, and returns how many are more than once.
    async fn expect_stored(&self, name: &str, lines: usize) -> usize {
        let until = Instant::now() + WITHIN;
        loop {
            let stored = self.stored(name);
            if stored.len() == lines {
                return stored.values().map(|count| count - 1).sum();
            }
            let log = self.machine.run(&format!("journalctl --no-pager -o cat -n 20 -u {COLLECTOR}"));
            assert!(Instant::now() < until, "{name}: {} of {lines} lines are stored\n{log}", stored.len());
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    fn kill(&self) {
        self.machine.run(&format!("systemctl kill -s KILL {COLLECTOR}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_survive_outages_crashes_and_a_rotated_journal() {
    let Some(it) = CollectingMachine::start().await else { return };
    let machine = &it.machine;
    machine.run("systemctl start gpuaas-log-collector");
    it.write("first", 100);
    assert_eq!(it.expect_stored("first", 100).await, 0);
    expect_labels(&it);

    // An outage of the log store: ten minutes of twenty lines a second, and a crash in the middle of it.
    it.store.answer(503, "down");
    for part in 0..4 {
        it.write(&format!("outage{part}"), 3000);
        if part == 1 {
            it.kill();
        }
    }
    assert!(it.stored("outage0").is_empty());
    it.store.answer(204, "");
    let mut repeated = 0;
    for part in 0..4 {
        repeated += it.expect_stored(&format!("outage{part}"), 3000).await;
    }
    assert!(repeated <= BATCH_LINES, "{repeated} lines are stored twice after one crash");

    // Crashes while lines are read and sent.
    let (mut repeated, crashes) = (0, 3);
    for crash in 0..crashes {
        it.write(&format!("crash{crash}"), 2500);
        it.kill();
        repeated += it.expect_stored(&format!("crash{crash}"), 2500).await;
    }
    assert!(repeated <= crashes * BATCH_LINES, "{repeated} lines are stored twice after {crashes} crashes");

    // The journal has lost the last line that was read.
    machine.run("systemctl stop gpuaas-log-collector");
    it.write("vacuumed", 50);
    machine.run("journalctl --rotate && journalctl --vacuum-size=1 --vacuum-files=1");
    assert!(!machine.run(&format!("journalctl -o cat -u {SOURCE}")).contains("vacuumed"), "the journal was rotated");
    it.write("after", 50);
    machine.run("systemctl start gpuaas-log-collector");
    assert_eq!(it.expect_stored("after", 50).await, 0);
    assert!(machine.journal(COLLECTOR).contains("journal_gap"), "{}", machine.journal(COLLECTOR));

    // No token and no key is in its lines, nor in what it sent.
    let sent: String =
        it.store.received().iter().map(|batch| String::from_utf8_lossy(&batch.body).into_owned()).collect();
    for (what, text) in [("journal", machine.journal(COLLECTOR)), ("store", sent)] {
        for secret in ["eyJ", "PRIVATE KEY", "Bearer"] {
            assert!(!text.contains(secret), "{secret} is in the {what}");
        }
    }

    // A node that is removed ends its collector for good.
    machine.run("systemctl stop gpuaas-agent");
    it.node.order("retire").await.accepted();
    it.node.order("remove").await.accepted();
    it.node.expect_state("removed").await;
    it.write("removed", 10);
    machine.expect_property(COLLECTOR, "ActiveState", "failed").await;
    assert_eq!(machine.property(COLLECTOR, "ExecMainStatus"), "4", "{}", machine.journal(COLLECTOR));
    assert!(it.stored("removed").is_empty());
    let CollectingMachine { mut cluster, .. } = it;
    cluster.allow_error("the log store");
    cluster.shutdown().await;
}

/// Each stream has the labels of the specification, and lines of the agent are the agent's own JSON.
fn expect_labels(it: &CollectingMachine) {
    let host_name = it.machine.run("hostname").trim().to_owned();
    let mut units = Vec::new();
    for batch in it.store.received() {
        let body: Value = serde_json::from_slice(&batch.body).unwrap();
        for stream in body["streams"].as_array().unwrap() {
            let labels = &stream["stream"];
            assert_eq!(labels.as_object().unwrap().len(), 7, "{labels}");
            assert_eq!(
                (&labels["host_role"], &labels["host_name"]),
                (&"worker_compute".into(), &host_name.clone().into())
            );
            assert_eq!(labels["node_id"], it.node.id.to_string());
            units.push(labels["systemd_unit"].as_str().unwrap().to_owned());
            if labels["systemd_unit"] == AGENT {
                assert_eq!((&labels["service"], &labels["source"]), (&"node-agent".into(), &"journald".into()));
                let json = stream["values"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .filter_map(|value| serde_json::from_str::<Value>(value[1].as_str().unwrap()).ok());
                assert!(json.count() > 0, "{stream}");
            } else if labels["systemd_unit"] == format!("{SOURCE}.service") {
                assert_eq!(labels["source"], "self-update-finalizer");
            }
        }
    }
    assert!(units.iter().any(|unit| unit == AGENT) && units.iter().any(|unit| unit == COLLECTOR), "{units:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn batch_with_refused_lines_is_split_and_an_invalid_setting_is_final() {
    let Some(it) = CollectingMachine::start().await else { return };
    let machine = &it.machine;
    // Off, it ends at once and well.
    machine.write("/etc/gpuaas/log-collector.env", 0o644, b"");
    machine.run("systemctl start gpuaas-log-collector");
    machine.expect_property(COLLECTOR, "ActiveState", "inactive").await;
    assert_eq!(machine.property(COLLECTOR, "Result"), "success");
    let doubled = format!(
        "SVC_NODE_LOG_COLLECTOR_ENABLED=1\nSVC_NODE_LOG_COLLECTOR_CA_FILE=/etc/gpuaas/agent.env\n\
         SVC_NODE_LOG_COLLECTOR_ENDPOINT={}/internal/v1/node-logs/loki/api/v1/push\n",
        it.cluster.node_url()
    );
    machine.write("/etc/gpuaas/log-collector.env", 0o644, doubled.as_bytes());
    machine.attempt("systemctl start gpuaas-log-collector").unwrap_or_default();
    machine.expect_property(COLLECTOR, "ActiveState", "failed").await;
    assert_eq!(machine.property(COLLECTOR, "ExecMainStatus"), "2");
    assert!(machine.journal(COLLECTOR).contains("which the collector adds itself"), "{}", machine.journal(COLLECTOR));

    // Every batch with this line is refused by the store.
    let ca_path = machine.run("grep -o 'SVC_CA_BUNDLE_PATH=.*' /etc/gpuaas/agent.env").replace(['\'', '"'], "");
    let ca_path = ca_path.trim().trim_start_matches("SVC_CA_BUNDLE_PATH=");
    let settings = format!("SVC_NODE_LOG_COLLECTOR_ENABLED=1\nSVC_NODE_LOG_COLLECTOR_CA_FILE={ca_path}\n");
    machine.write("/etc/gpuaas/log-collector.env", 0o644, settings.as_bytes());
    it.store.refuse_batches_with("good line 77\"");
    machine.run("systemctl stop gpuaas-log-collector || true");
    it.write("good", 200);
    machine.run("systemctl reset-failed; systemctl start gpuaas-log-collector");
    it.expect_stored("good", 199).await;
    let log = machine.journal(COLLECTOR);
    assert!(log.contains("log_lines_lost") && log.contains("\"lines\":1"), "{log}");
    let CollectingMachine { mut cluster, .. } = it;
    cluster.allow_error("the log store");
    cluster.shutdown().await;
}
