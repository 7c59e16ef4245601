//! A machine that was altered: the node takes no tenants until it is corrected, or an administrator accepts it as it is.

use crate::alerts::monitoring::Monitoring;
use crate::external_tools::{root, tools};
use local_servers::private_files;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::fake_agent::FakeAgent;
use tests::cluster::{GPU_MEMORY_MIB, GPUS, NodeHandle, TestCluster};
use tests::systemd_container::SystemdContainer;

mod drift;

const AGENT: &str = "gpuaas-agent.service";
const SKU: &str = "h100x1";
/// A search of the file systems every minute, with room for a slow machine.
const LONG: Duration = Duration::from_secs(150);
/// A port below those that the kernel gives to other tests.
const PORT: u16 = 999;

#[tokio::test(flavor = "multi_thread")]
async fn accepted_finding_is_sent_to_the_agent_until_it_is_not_reported_any_more() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let node = cluster.register("h100").await;
    let agent = FakeAgent::onboard(&cluster.bundle(&node).await, GPUS).await;
    let report = async |counts: &[u64]| {
        let mut body = agent.heartbeat_body();
        let at = body["sent_at"].clone();
        let finding = |count: &u64| {
            json!({
                "probe": "privilege", "code": "setuid", "count": count, "first_at": at, "last_at": at,
                "boot_id": agent.boot_id, "detail": "1 (0123): /var/lib/.x",
            })
        };
        body["findings"] = counts.iter().map(finding).collect();
        agent.post_until_final("heartbeat", || body.clone()).await.ok()
    };
    assert_eq!(report(&[1]).await["accepted_findings"], Value::Null);
    let altered = node.expect_state("quarantined").await;
    assert_eq!(altered["state_reason"]["code"], "integrity_finding");
    assert!(altered["state_reason"]["message"].as_str().unwrap().contains("/var/lib/.x"), "{altered}");
    let finding = altered["health"]["findings"][0]["id"].as_str().unwrap();
    node.order(&format!("findings/{finding}/clear")).await.ok();
    node.expect_state("active").await;

    let accepted = json!([{ "probe": "privilege", "code": "setuid", "boot_id": agent.boot_id, "count": 1 }]);
    assert_eq!(report(&[1]).await["accepted_findings"], accepted);
    // The answer may have been lost with the replica that sent it.
    let owner = cluster.owner_of("node", node.id).await;
    cluster.kill9_replica(owner);
    cluster.restart_replica(owner).await;
    node.expect_state("active").await;
    assert_eq!(report(&[1]).await["accepted_findings"], accepted);
    assert_eq!(report(&[]).await["accepted_findings"], Value::Null);
    assert_eq!(report(&[2]).await["accepted_findings"], Value::Null);
    node.expect_state("quarantined").await;
    cluster.shutdown().await;
}

struct Machine {
    container: SystemdContainer,
    node: NodeHandle,
}

impl Machine {
    async fn boot(cluster: &mut TestCluster) -> Option<Self> {
        let agent = private_files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas-agent").unwrap();
        let container = SystemdContainer::start(&tools(), &[agent]).expect("the container starts")?;
        cluster.offer_sku(SKU, 1).await;
        let node = cluster.register(SKU).await;
        let bundle = cluster.bundle(&node).await;
        let unit = std::fs::read(root().join("deploy/systemd").join(AGENT)).unwrap();
        container.write(&format!("/etc/systemd/system/{AGENT}"), 0o644, &unit);
        container.run(&format!(
            "install -d /etc/gpuaas /etc/sudoers.d /etc/systemd/system/{AGENT}.d; mknod -m 666 /dev/nvidia0 c 1 3"
        ));
        container.write("/etc/gpuaas/agent.env", 0o600, bundle.to_env_file().unwrap().as_bytes());
        let (before, after) = (PORT - 1, PORT + 1);
        let start = format!(
            "[Service]\nEnvironment=SVC_NODE_AGENT_IGNORED_PORTS=1-{before},{after}-65535 SVC_NODE_AGENT_LOOPBACK_GUARD=off\nExecStart=\n\
             ExecStart=/usr/local/bin/gpuaas-agent --env-file /etc/gpuaas/agent.env --executor system --simulate-gpus 1 \
             --gpu-memory-mib {GPU_MEMORY_MIB} --integrity-interval-seconds 1\n"
        );
        container.write(&format!("/etc/systemd/system/{AGENT}.d/program.conf"), 0o644, start.as_bytes());
        container.run(&format!("systemctl daemon-reload; systemctl start {AGENT}"));
        let machine = Self { container, node };
        machine.node.expect_state("active").await;
        machine.expect_logged("the privileges of the machine are recorded").await;
        Some(machine)
    }

    async fn expect_logged(&self, text: &str) {
        let until = Instant::now() + LONG;
        while !self.container.journal(AGENT).contains(text) {
            assert!(Instant::now() < until, "{text}: {}", self.container.journal(AGENT));
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Waits until exactly these findings are open.
    async fn expect_findings(&self, cluster: &TestCluster, codes: &[&str]) -> Value {
        let open = |node: &Value| {
            let findings = node["health"]["findings"].as_array().cloned().unwrap_or_default();
            let open = findings.into_iter().filter(|finding| finding["cleared_at"].is_null());
            let mut found: Vec<_> = open.map(|finding| finding["code"].as_str().unwrap().to_owned()).collect();
            found.sort();
            found
        };
        let wanted = format!("open findings: {codes:?}");
        cluster.admin.wait_within(LONG, &self.node.path(), &wanted, |node| open(node) == codes).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn privileges_that_an_intruder_gains_quarantine_the_node_until_they_are_taken_away_or_accepted() {
    let mut cluster = TestCluster::start().await;
    let Some(machine) = Machine::boot(&mut cluster).await else { return cluster.shutdown().await };
    let (container, node) = (&machine.container, &machine.node);
    let monitoring = Monitoring::start(&cluster).await;
    let allocation = cluster.rent_active(SKU, 1).await;
    // The tenant's account, keys and files are no differences.
    tokio::time::sleep(Duration::from_secs(4)).await;
    machine.expect_findings(&cluster, &[]).await;

    container.run("cp /bin/sh /var/lib/.x; chmod 4755 /var/lib/.x");
    container
        .run("echo 'eve ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/zz; echo 'toor:x:0:0::/:/bin/sh' >> /etc/passwd");
    container.run("install -d -m 700 ~root/.ssh; echo 'ssh-ed25519 AAAA eve' >> ~root/.ssh/authorized_keys");
    let altered = machine.expect_findings(&cluster, &["authorized_keys", "sudoers", "uid_zero"]).await;
    assert_eq!(
        (&altered["state"], &altered["state_reason"]["code"]),
        (&json!("quarantined"), &json!("integrity_finding"))
    );
    assert_eq!(allocation.expect_state("active").await["state"], "active", "the tenant runs on");

    // The clean-up searches the file systems, and accepts nothing of what it finds.
    allocation.release_fully().await;
    let altered = machine.expect_findings(&cluster, &["authorized_keys", "setuid", "sudoers", "uid_zero"]).await;
    let named = altered["health"]["findings"].to_string();
    assert!(named.contains("/var/lib/.x") && named.contains("/etc/sudoers.d/zz") && named.contains("toor"), "{named}");
    assert!(named.contains("root/.ssh/authorized_keys"), "{named}");
    // The metric is read soon after a start, and then once in a minute.
    cluster.replicas[0].stop().await;
    cluster.restart_replica(0).await;
    let keys = monitoring.alertmanager.expect("pager", "GPUAASSshKeysAltered", true).await;
    assert_eq!(keys.runbook, "ops.node.onboarding");
    container.run("rm /var/lib/.x /etc/sudoers.d/zz ~root/.ssh/authorized_keys; sed -i /^toor/d /etc/passwd");
    machine.expect_findings(&cluster, &[]).await;
    node.expect_state("active").await;

    // A listener that an operator accepts stays accepted, also by a restarted agent.
    let listen = format!(
        "setsid perl -MIO::Socket::INET -e \
         '$l = IO::Socket::INET->new(LocalAddr => \"127.0.0.1\", LocalPort => {PORT}, Listen => 1) or die; sleep 600' \
         >/run/listener.log 2>&1 & sleep 1; cat /run/listener.log"
    );
    assert_eq!(container.run(&listen), "", "the listener runs");
    let altered = machine.expect_findings(&cluster, &["listening_port"]).await;
    assert!(altered["state_reason"]["message"].as_str().unwrap().contains(&format!("127.0.0.1:{PORT}")), "{altered}");
    let findings = altered["health"]["findings"].as_array().unwrap();
    let finding = findings.iter().find(|finding| finding["code"] == "listening_port").unwrap();
    node.order(&format!("findings/{}/clear", finding["id"].as_str().unwrap())).await.ok();
    node.expect_state("active").await;
    machine.expect_logged("an operator has accepted a difference of privileges").await;
    container.run(&format!("systemctl restart {AGENT}"));
    tokio::time::sleep(Duration::from_secs(4)).await;
    machine.expect_findings(&cluster, &[]).await;
    assert_eq!(node.expect_state("active").await["state"], "active");
    cluster.shutdown().await;
}
