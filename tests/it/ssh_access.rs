//! SSH access as users see it: real keys, a real ssh, and a real sshd on a disposable machine.

use crate::alerts::monitoring::Monitoring;
use crate::system_executor::{GPUS, onboarded, rent_with, start};
use reqwest::Method;
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant};
use tests::cluster::test_machine::TestMachine;
use tests::cluster::{AllocationHandle, NodeHandle, REGION, TestCluster, WAIT_TIMEOUT, id_of, ssh_public_key};
use tests::skipped_tests::report_skipped;
use uuid::Uuid;

/// More attempts to write SSH keys than the alert allows to fail.
const FAILED_WRITES: usize = 5;

/// An SSH client with a key and known hosts of its own.
pub(crate) struct SshClient {
    folder: tempfile::TempDir,
}

impl SshClient {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut made = Command::new("ssh-keygen");
        made.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(folder.path().join("key"));
        assert!(made.status().unwrap().success());
        Self { folder }
    }

    pub(crate) fn public_key(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("key.pub")).unwrap().trim().to_owned()
    }

    /// Runs a command on the node, if the login succeeds.
    pub(crate) fn run(&self, port: u64, login: &str, command: &str) -> Result<String, String> {
        let known = format!("UserKnownHostsFile={}", self.folder.path().join("known").display());
        let mut ssh = Command::new("ssh");
        ssh.args(["-F", "none", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "-o", &known]);
        ssh.args(["-o", "ConnectTimeout=60", "-o", "IdentitiesOnly=yes", "-p", &port.to_string(), "-i"]);
        let ran = ssh.arg(self.folder.path().join("key")).arg(login).arg(command).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if ran.status.success() { Ok(text(&ran.stdout)) } else { Err(text(&ran.stderr)) }
    }

    /// The fingerprint of the host key that the client has seen.
    pub(crate) fn met(&self) -> String {
        let printed = Command::new("ssh-keygen").arg("-lf").arg(self.folder.path().join("known")).output().unwrap();
        String::from_utf8(printed.stdout).unwrap().split_whitespace().nth(1).unwrap().to_owned()
    }
}

/// A node that users reach by SSH.
pub(crate) struct SshNode {
    pub(crate) node: NodeHandle,
    pub(crate) machine: TestMachine,
    pub(crate) port: u64,
}

impl SshNode {
    /// `None` if this machine cannot run one, which is reported as a test not run.
    pub(crate) async fn open(cluster: &mut TestCluster) -> Option<Self> {
        let (node, mut machine) = onboarded(cluster).await?;
        if !supervisors::dev::agents::has_sshd() {
            report_skipped("a login by SSH needs openssh-server");
            return None;
        }
        machine.stop_agent();
        let port = u64::from(local_servers::ports::free_port().unwrap());
        let mut door = Self { node, machine, port };
        door.start_agent();
        let reached = json!({ "host": "127.0.0.1", "port": port });
        let reached = cluster.admin.request(Method::PATCH, &door.node.path()).json(&reached);
        cluster.admin.send(reached).await.ok();
        door.node.expect_state("active").await;
        expect_host_key(cluster, &door.node, &door.machine).await;
        Some(door)
    }

    fn start_agent(&mut self) {
        start(&mut self.machine, &[("SVC_NODE_AGENT_SSH_LISTEN", &format!("127.0.0.1:{}", self.port))]);
    }

    /// Waits until logins of this user succeed, or fail.
    async fn expect_login(&self, client: &SshClient, user: &str, wanted: bool) {
        let (login, until) = (format!("{user}@127.0.0.1"), Instant::now() + WAIT_TIMEOUT);
        loop {
            let ran = client.run(self.port, &login, "true");
            if ran.is_ok() == wanted {
                return;
            }
            assert!(Instant::now() < until, "{wanted}: {ran:?}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Stops the agent and the cluster in order.
    async fn end(mut self, cluster: TestCluster) {
        assert!(self.machine.stop_agent().is_some_and(|status| status.success()));
        cluster.shutdown().await;
    }
}

/// Waits until the control plane knows the host key of the agent's own sshd: the agent reports it with its first message.
pub(crate) async fn expect_host_key(cluster: &TestCluster, node: &NodeHandle, machine: &TestMachine) {
    let is_known = "SELECT strpos(body::text, $2) > 0 FROM entity WHERE id = $1";
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let printed = machine.try_run("ssh-keygen -lf /var/lib/gpuaas-agent/ssh/host_key.pub");
        let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
        if let Some(fingerprint) = printed.split_whitespace().nth(1) {
            let known = sqlx::query_scalar::<_, bool>(is_known).bind(node.id).bind(fingerprint);
            if known.fetch_one(&cluster.pool).await.unwrap() {
                return;
            }
        }
        assert!(Instant::now() < until, "the agent has not reported its host key: {printed:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Registers the client's key as `user`.
async fn register(cluster: &TestCluster, name: &str, public_key: &str) -> Uuid {
    let key = json!({ "name": name, "public_key": public_key });
    id_of(&cluster.user.post("/api/v1/ssh-keys", &key).await.created())
}

async fn make_default(cluster: &TestCluster, key: Uuid) {
    cluster.user.post(&format!("/api/v1/ssh-keys/{key}/default"), &json!({})).await.ok();
}

async fn select_keys(
    cluster: &TestCluster,
    allocation: &AllocationHandle,
    keys: &Value,
) -> tests::cluster::client::ApiResponse {
    let request = cluster.user.request(Method::PUT, &format!("{}/ssh-keys", allocation.path()));
    cluster.user.send(request.json(&json!({ "ssh_key_ids": keys }))).await
}

async fn wait_for_written_keys(cluster: &TestCluster, allocation: &AllocationHandle) -> Value {
    let is_written = |seen: &Value| seen["ssh"]["keys_written"] == true;
    cluster.user.wait_until(&allocation.path(), "the node has written the keys", is_written).await
}

#[tokio::test(flavor = "multi_thread")]
async fn added_ssh_key_logs_in_and_a_removed_one_does_not() {
    let mut cluster = TestCluster::start().await;
    let Some(mut door) = SshNode::open(&mut cluster).await else { return cluster.shutdown().await };
    let (old, new) = (SshClient::new(), SshClient::new());
    let old_key = register(&cluster, "old", &old.public_key()).await;
    // Without selected keys it follows the default.
    let wanted = json!({ "sku": "h100x4", "region_code": REGION, "gpu_count": 1, "node_id": door.node.id });
    let allocation = AllocationHandle::new(
        id_of(&cluster.user.post("/api/v1/allocations", &wanted).await.created()),
        cluster.user.clone(),
    );
    let user = allocation.expect_state("active").await["ssh"]["username"].as_str().unwrap().to_owned();
    door.expect_login(&old, &user, true).await;
    // The files in the home folder belong to the user alone.
    let login = format!("{user}@127.0.0.1");
    let before = std::fs::read(door.machine.view().at("/etc/ssh/moduli")).ok();
    old.run(door.port, &login, "rm -rf ~/.ssh; ln -s /etc/ssh ~/.ssh").unwrap();

    let new_key = register(&cluster, "new", &new.public_key()).await;
    assert!(new.run(door.port, &login, "true").is_err(), "a further key opens nothing until it is chosen");
    make_default(&cluster, new_key).await;
    door.expect_login(&new, &user, true).await;
    door.expect_login(&old, &user, false).await;
    let seen = wait_for_written_keys(&cluster, &allocation).await;
    assert_eq!(seen["ssh"]["key_fingerprints"].as_array().unwrap().len(), 1, "{seen}");
    assert!(!door.machine.view().at("/etc/ssh/authorized_keys").exists(), "nothing is written through the user's link");
    assert_eq!(std::fs::read(door.machine.view().at("/etc/ssh/moduli")).ok(), before);

    // A deleted key no longer logs in, and the other one becomes the default.
    cluster.user.delete(&format!("/api/v1/ssh-keys/{new_key}")).await;
    door.expect_login(&new, &user, false).await;
    door.expect_login(&old, &user, true).await;
    // The agent is offline during several changes: the last one applies.
    door.machine.kill9_agent();
    select_keys(&cluster, &allocation, &json!([])).await.ok();
    let third = register(&cluster, "third", &new.public_key()).await;
    select_keys(&cluster, &allocation, &json!([third])).await.ok();
    door.start_agent();
    door.expect_login(&new, &user, true).await;
    door.expect_login(&old, &user, false).await;
    wait_for_written_keys(&cluster, &allocation).await;
    // A change of the default does not affect selected keys, until the selection is removed.
    make_default(&cluster, old_key).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(new.run(door.port, &login, "true").is_ok());
    select_keys(&cluster, &allocation, &Value::Null).await.ok();
    door.expect_login(&old, &user, true).await;
    door.expect_login(&new, &user, false).await;

    let actions: Vec<String> =
        cluster.audit_of(allocation.id).await.into_iter().map(|(_, action, ..)| action).collect();
    assert_eq!(actions.iter().filter(|action| *action == "ssh_keys.choose").count(), 3, "{actions:?}");
    let log = cluster.admin.get("/api/v1/admin/audit-log?action=ssh_keys.reconcile").await.ok();
    let rows = log["items"].as_array().unwrap();
    assert!(!rows.is_empty() && rows.iter().all(|row| row["metadata"]["result"] == "ok"), "{log}");
    assert!(
        rows.iter().all(|row| row["actor"] == format!("node:{}", door.node.id) && row["correlation_id"].is_string()),
        "{log}"
    );
    allocation.release_fully().await;
    assert!(old.run(door.port, &login, "true").unwrap_err().contains("Permission denied"));
    door.end(cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn end_of_one_of_two_allocations_on_a_node_keeps_the_ssh_keys_of_the_other() {
    let mut cluster = TestCluster::start().await;
    let Some(door) = SshNode::open(&mut cluster).await else { return cluster.shutdown().await };
    let (ann, bob) = (SshClient::new(), SshClient::new());
    let (first, _, first_user) = rent_with(&cluster, &door.node, 1, &ann.public_key()).await;
    let (second, _, second_user) = rent_with(&cluster, &door.node, GPUS - 1, &bob.public_key()).await;
    door.expect_login(&ann, &first_user, true).await;
    door.expect_login(&bob, &second_user, true).await;
    assert!(ann.run(door.port, &format!("{second_user}@127.0.0.1"), "true").is_err(), "a key opens its own alone");
    first.release_fully().await;
    door.expect_login(&ann, &first_user, false).await;
    door.expect_login(&bob, &second_user, true).await;
    // They can still be changed.
    select_keys(&cluster, &second, &json!([])).await.ok();
    door.expect_login(&bob, &second_user, false).await;
    select_keys(&cluster, &first, &json!([])).await.expect_error(409, "state_conflict");
    second.release_fully().await;
    door.end(cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ssh_key_changes_reach_a_node_that_was_offline_and_the_last_change_wins() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let node = cluster.node("h100").await;
    let keys = [ssh_public_key("a"), ssh_public_key("b"), ssh_public_key("c")];
    let mut ids = Vec::new();
    for (n, key) in keys.iter().enumerate() {
        ids.push(register(&cluster, &format!("key {n}"), key).await);
    }
    let allocation = cluster.rent_active("h100", 1).await;
    let file = cluster.agent_folder(&node).join(format!("state/allocations/{}/authorized_keys", allocation.id));
    let without_comment = |n: usize| keys[n].rsplit_once(' ').unwrap().0.to_owned() + "\n";
    assert_eq!(std::fs::read_to_string(&file).unwrap(), without_comment(0));
    cluster.lose_agent(&node);
    for wish in [json!([ids[1]]), json!([ids[1], ids[2]]), json!([]), json!([ids[2]])] {
        let chosen = select_keys(&cluster, &allocation, &wish).await.ok();
        assert_eq!(chosen["ssh"]["keys_written"], false, "{chosen}");
    }
    cluster.resume_agent(&node);
    wait_for_written_keys(&cluster, &allocation).await;
    assert_eq!(std::fs::read_to_string(&file).unwrap(), without_comment(2));
    // An agent that cannot write the file tries again, and more failures than are allowed cause an alert.
    let monitoring = Monitoring::start(&cluster).await;
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    for failures in 1..=FAILED_WRITES {
        select_keys(&cluster, &allocation, &json!([ids[failures % 2]])).await.ok();
        let have_failed = |log: &Value| {
            let rows = log["items"].as_array().unwrap();
            rows.iter().filter(|row| row["metadata"]["result"] == "failed").count() >= failures
        };
        let log = "/api/v1/admin/audit-log?action=ssh_keys.reconcile";
        cluster.admin.wait_until(log, &format!("{failures} attempts have failed"), have_failed).await;
    }
    let not_written = monitoring.alertmanager.expect("tickets", "GPUAASSshKeysNotWritten", true).await;
    assert_eq!(not_written.runbook, "ops.node.onboarding");
    std::fs::remove_dir(&file).unwrap();
    // An agent that is killed during a change completes it.
    select_keys(&cluster, &allocation, &json!([ids[0], ids[1]])).await.ok();
    cluster.kill9_agent(&node);
    cluster.restart_agent(&node);
    wait_for_written_keys(&cluster, &allocation).await;
    assert_eq!(std::fs::read_to_string(&file).unwrap(), without_comment(0) + &without_comment(1));
    // A deleted key is removed although a replica is killed.
    cluster.kill9_replica(0);
    let elsewhere = cluster.at_replica(1, "user");
    elsewhere.delete(&format!("/api/v1/ssh-keys/{}", ids[0])).await;
    let until = Instant::now() + WAIT_TIMEOUT;
    while std::fs::read_to_string(&file).unwrap() != without_comment(1) {
        assert!(Instant::now() < until, "the deleted key still opens it");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    cluster.restart_replica(0).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gpuctl_ssh_pins_the_host_key_and_returns_the_exit_status() {
    let mut cluster = TestCluster::start().await;
    let Some(SshNode { node, mut machine, .. }) = SshNode::open(&mut cluster).await else {
        return cluster.shutdown().await;
    };
    let ann = SshClient::new();
    let gpuctl = cluster.logged_in("user").await;
    let identity = ann.folder.path().join("key").display().to_string();
    gpuctl.run(&["ssh-keys", "add", &format!("{identity}.pub"), "--default"]).await.ok();
    let wanted = ["-o", "json", "-q", "allocations", "create", "--sku", "h100x4", "--node", &node.id.to_string()];
    let made = gpuctl.run(&wanted).await.json();
    let (id, user) = (made["id"].as_str().unwrap(), made["ssh"]["username"].as_str().unwrap());
    let ssh = ["ssh", id, "-i", &identity, "--ssh-arg=-oBatchMode=yes", "--ssh-arg=-Fnone", "--"];
    let ran = gpuctl.run(&[&ssh[..], &["id", "-un"]].concat()).await;
    assert_eq!(ran.ok().trim(), user);
    assert_eq!(gpuctl.run(&[&ssh[..], &["exit", "7"]].concat()).await.code, 7);
    let config = gpuctl.run(&["ssh", id, "-i", &identity, "--print-config"]).await.ok();
    let ssh_config = gpuctl.home().join("config");
    std::fs::write(&ssh_config, config).unwrap();
    let by_config = Command::new("ssh")
        .args(["-F", ssh_config.to_str().unwrap(), "-o", "BatchMode=yes", &format!("gpu-{id}"), "true"])
        .output()
        .unwrap();
    assert!(by_config.status.success(), "{by_config:?}");

    // The selection of keys changes, and the machine follows.
    let shown = gpuctl.run(&["-o", "json", "allocations", "ssh-keys", id, "--default"]).await.json();
    assert_eq!(shown["ssh"]["key_fingerprints"].as_array().map(Vec::len), Some(1), "{shown}");

    // With another host key than the one that the service names, the login is refused.
    let known = gpuctl.folder().join("known_hosts").join(id);
    assert!(std::fs::read_to_string(&known).unwrap().starts_with(&format!("gpu-{id} ssh-ed25519 ")));
    std::fs::remove_file(&known).unwrap();
    machine.stop_agent();
    machine.run("cd /var/lib/gpuaas-agent/ssh && ssh-keygen -q -t ed25519 -N '' -f other && mv other host_key && rm host_key.pub other.pub");
    let door = machine.run("cat /var/lib/gpuaas-agent/ssh/sshd_config");
    machine.run(&format!("cat > /run/in-between <<'END'\n{door}\nEND\n/usr/sbin/sshd -f /run/in-between -o PidFile=/run/in-between.pid >/dev/null 2>&1"));
    // It writes the file when it listens.
    machine.run("timeout 60 sh -c 'until [ -s /run/in-between.pid ]; do sleep 0.1; done'");
    let refused = gpuctl.run(&[&ssh[..], &["true"]].concat()).await.failed(6);
    assert!(refused.contains("host key"), "{refused}");
    assert!(!known.exists());
    machine.run("kill $(cat /run/in-between.pid)");
    machine.run("rm /var/lib/gpuaas-agent/ssh/host_key*");
    start(&mut machine, &[]);
    gpuctl.run(&["allocations", "release", id]).await.ok();
    gpuctl.run(&[&ssh[..], &["true"]].concat()).await.failed(6);
    assert!(machine.stop_agent().is_some_and(|status| status.success()));
    cluster.shutdown().await;
}
