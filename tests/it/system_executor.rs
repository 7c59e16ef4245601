//! Linux users on a disposable machine, through the whole service: they exist while an allocation is active, and leave no trace afterwards.

use crate::ssh_access::{SshClient, expect_host_key};
use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::test_machine::TestMachine;
use tests::cluster::{
    AllocationHandle, GPU_MEMORY_MIB, NodeHandle, REGION, TestCluster, WAIT_TIMEOUT, id_of, ssh_public_key,
};
use tests::skipped_tests::report_skipped;

pub(crate) const GPUS: u32 = 4;
/// The agent's own state, the assigned uids, and append-only logs: all that a tenant may leave behind.
const MAY_CHANGE: [&str; 3] = ["/var/lib/gpuaas-agent", "/var/lib/gpuaas-uids.json", "/var/log"];

/// A node whose agent runs as root on a disposable machine, set up by the bootstrap script.
pub(crate) async fn onboarded(cluster: &mut TestCluster) -> Option<(NodeHandle, TestMachine)> {
    cluster.offer_sku("h100x4", GPUS).await;
    let node = cluster.register("h100x4").await;
    let mut machine = cluster.machine(&node.name)?;
    for minor in 0..GPUS {
        machine.run(&format!("mknod -m 666 /dev/nvidia{minor} c 1 3"));
    }
    // Every machine has these files after its first change of a user and its first sudo.
    machine.run("touch /etc/.pwd.lock; mkdir -m 0711 /run/sudo; mkdir -m 0700 /run/sudo/ts; mkdir /srv/precious; echo x > /srv/precious/file");
    let path = format!("{}/bootstrap-script", node.path());
    let written = cluster.admin.post(&path, &json!({ "format": "script" })).await.ok();
    let script = written["script"].as_str().expect("a script").to_owned();
    for _ in 0..2 {
        assert!(machine.run(&script).contains("is set up"), "it can be run twice");
    }
    start(&mut machine, &[]);
    node.expect_state("active").await;
    Some((node, machine))
}

pub(crate) fn start(machine: &mut TestMachine, variables: &[(&str, &str)]) {
    let (gpus, memory) = (GPUS.to_string(), GPU_MEMORY_MIB.to_string());
    let flags = ["--simulate-gpus", &gpus, "--gpu-memory-mib", &memory];
    let sudo = ("SVC_NODE_AGENT_SUDO_COMMANDS", "/bin/sleep");
    machine.start_agent(&flags, &[&[sudo], variables].concat());
}

pub(crate) async fn rent(cluster: &TestCluster, node: &NodeHandle, gpus: u32) -> (AllocationHandle, Value, String) {
    rent_with(cluster, node, gpus, &ssh_public_key("ann")).await
}

pub(crate) async fn rent_with(
    cluster: &TestCluster,
    node: &NodeHandle,
    gpus: u32,
    public_key: &str,
) -> (AllocationHandle, Value, String) {
    let key = json!({ "name": format!("key {}", rand::random::<u32>()), "public_key": public_key });
    let key = cluster.user.post("/api/v1/ssh-keys", &key).await.created();
    let wanted = json!({
        "sku": "h100x4", "region_code": REGION, "gpu_count": gpus, "node_id": node.id, "ssh_key_ids": [key["id"]],
    });
    let created = cluster.user.post("/api/v1/allocations", &wanted).await.created();
    let allocation = AllocationHandle::new(id_of(&created), cluster.user.clone());
    let active = allocation.expect_state("active").await;
    let user = active["ssh"]["username"].as_str().expect("a login").to_owned();
    (allocation, active, user)
}

#[tokio::test(flavor = "multi_thread")]
async fn linux_user_exists_while_its_allocation_is_active_and_leaves_no_trace() {
    let mut cluster = TestCluster::start().await;
    let Some((node, mut machine)) = onboarded(&mut cluster).await else { return cluster.shutdown().await };
    let before = machine.snapshot(&MAY_CHANGE);
    let mut uids = Vec::new();
    for hostile in [behaves, litters, swaps_its_home] {
        let (allocation, active, user) = rent(&cluster, &node, 2).await;
        let uid = machine.run(&format!("id -u {user}")).trim().to_owned();
        assert!(!uids.contains(&uid), "a uid is never used twice");
        uids.push(uid);
        let held: Vec<u64> =
            active["devices"].as_array().unwrap().iter().map(|it| it["index"].as_u64().unwrap()).collect();
        for minor in 0..u64::from(GPUS) {
            assert_eq!(machine.can(&user, &format!("cat /dev/nvidia{minor}")), held.contains(&minor), "GPU {minor}");
        }
        assert!(machine.can(&user, "sudo -n /bin/sleep 0") && !machine.can(&user, "sudo -n id"));
        assert!(machine.view().at(format!("/etc/ssh/gpuaas-keys/{user}")).exists());
        hostile(&machine, &user);
        allocation.release().await;
        let released = allocation.expect_state("released").await;
        assert!(released["failure"].is_null(), "{released}");
        node.expect_all_free().await;
        let differences = machine.view().differences(&before, &machine.snapshot(&MAY_CHANGE));
        assert!(differences.is_empty(), "{differences:#?}");
    }
    assert!(machine.stop_agent().is_some_and(|status| status.success()));
    cluster.shutdown().await;
}

fn behaves(machine: &TestMachine, user: &str) {
    assert!(machine.can(user, "echo work > ~/result && mkdir ~/.cache"));
}

/// Leaves everything behind that a tenant can, also by the commands that it may run as root.
fn litters(machine: &TestMachine, user: &str) {
    for script in [
        "mkdir -p ~/closed/deep && echo x > ~/closed/deep/x && chmod 000 ~/closed",
        "rm -rf ~/.ssh; ln -s /etc ~/.ssh",
        "mkdir ~/fixed && echo x > ~/fixed/x",
        "echo x > /tmp/x; mkdir /tmp/d; echo x > /tmp/d/x; chmod 000 /tmp/d; echo x > /var/tmp/x; echo x > /dev/shm/x",
        "ipcmk -M 64 && ipcmk -S 1 && ipcmk -Q",
    ] {
        assert!(machine.can(user, script), "{script}");
    }
    machine.run(&format!("chattr +i /home/{user}/fixed/x /home/{user}/fixed"));
    machine.run(&format!("mkdir /home/{user}/own /home/{user}/etc"));
    machine.run(&format!("mount -t tmpfs tmpfs /home/{user}/own; mount --bind /etc /home/{user}/etc"));
    for script in [
        "trap '' TERM HUP; while true; do sleep 1; done",
        "exec sudo -n /bin/sleep 1000",
        "ulimit -u 64; while true; do sleep 1000 & sleep 1000 & done",
    ] {
        machine.spawn_as(user, script);
    }
    let started = Instant::now();
    while machine.view().processes().len() < 40 {
        assert!(started.elapsed() < WAIT_TIMEOUT, "it does not fork: {}", machine.view().processes().len());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Replaces the home folder with a link.
fn swaps_its_home(machine: &TestMachine, user: &str) {
    machine.run(&format!("rm -rf /home/{user} && ln -s /srv/precious /home/{user}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn node_without_a_clean_up_proof_takes_no_tenant_and_shows_what_is_left() {
    let mut cluster = TestCluster::builder().policy("allocation.release_backoff_max_seconds", 1).start().await;
    let Some((node, mut machine)) = onboarded(&mut cluster).await else { return cluster.shutdown().await };
    let (allocation, _, user) = rent(&cluster, &node, 1).await;
    machine.run("mkdir /tmp/stuck && mount -t tmpfs -o mode=1777 tmpfs /tmp/stuck");
    assert!(machine.can(&user, "echo x > /tmp/stuck/x"));
    machine.run("mount -o remount,ro /tmp/stuck");
    allocation.release().await;
    let says = |seen: &Value| {
        seen["gpus_free"] == 0 && seen["unschedulable_reason"].as_str().is_some_and(|why| why.contains("in /tmp"))
    };
    cluster.admin.wait_until(&node.path(), "the node says what is left", says).await;
    let other = json!({ "sku": "h100x4", "region_code": REGION, "gpu_count": 1, "node_id": node.id });
    cluster
        .other_user
        .send_once(Method::POST, "/api/v1/allocations", Some(&other))
        .await
        .expect_error(409, "insufficient_capacity");
    assert!(!machine.can(&user, "true"), "the user itself is gone");

    // The agent is killed in between; the next one continues from its journal.
    machine.kill9_agent();
    machine.run("mount -o remount,rw /tmp/stuck");
    start(&mut machine, &[]);
    allocation.expect_state("released").await;
    assert_eq!(node.expect_all_free().await["unschedulable_reason"], Value::Null);
    assert!(!machine.view().at("/tmp/stuck/x").exists());
    assert!(machine.stop_agent().is_some_and(|status| status.success()));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn user_logs_in_by_ssh_until_the_release_and_not_afterwards() {
    let mut cluster = TestCluster::start().await;
    let Some((node, mut machine)) = onboarded(&mut cluster).await else { return cluster.shutdown().await };
    if !supervisors::dev::agents::has_sshd() {
        report_skipped("a login by SSH needs openssh-server");
        return cluster.shutdown().await;
    }
    let before = machine.snapshot(&MAY_CHANGE);
    machine.stop_agent();
    let port = u64::from(local_servers::ports::free_port().unwrap());
    start(&mut machine, &[("SVC_NODE_AGENT_SSH_LISTEN", &format!("127.0.0.1:{port}"))]);
    let reached =
        cluster.admin.request(Method::PATCH, &node.path()).json(&json!({ "host": "127.0.0.1", "port": port }));
    cluster.admin.send(reached).await.ok();
    let runs = |seen: &Value| seen["state"] == "active";
    cluster.admin.wait_until(&node.path(), "the node is active", runs).await;
    expect_host_key(&cluster, &node, &machine).await;

    let (ann, eve) = (SshClient::new(), SshClient::new());
    let (allocation, active, user) = rent_with(&cluster, &node, 1, &ann.public_key()).await;
    let ssh = &active["ssh"];
    assert_eq!((&ssh["host"], &ssh["port"]), (&json!("127.0.0.1"), &json!(port)), "{ssh}");
    let login = format!("{user}@127.0.0.1");
    let began = Instant::now();
    while let Err(why) = ann.run(port, &login, "true") {
        assert!(began.elapsed() < WAIT_TIMEOUT, "{why}");
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(ann.run(port, &login, "id -un; echo $HOME").as_deref(), Ok(format!("{user}\n/home/{user}").as_str()));
    assert_eq!(ssh["host_key_fingerprint"], ann.met(), "{ssh}");
    let held = active["devices"][0]["index"].as_u64().unwrap();
    assert!(ann.run(port, &login, &format!("cat /dev/nvidia{held}")).is_ok());
    assert!(ann.run(port, &login, &format!("cat /dev/nvidia{}", (held + 1) % u64::from(GPUS))).is_err());
    assert!(ann.run(port, &login, "sudo -n /bin/sleep 0").is_ok() && ann.run(port, &login, "sudo -n id").is_err());
    // No other user's key, and no login of a user who is no tenant.
    assert!(eve.run(port, &login, "true").unwrap_err().contains("Permission denied"));
    assert!(ann.run(port, "root@127.0.0.1", "true").unwrap_err().contains("Permission denied"));
    // An open session ends with the allocation.
    let open = std::thread::spawn(move || (ann.run(port, &login, "echo x > /tmp/x; sleep 1000"), ann, login));
    // In the tenant's private /tmp.
    let own = format!("/var/lib/gpuaas-agent/private/tmp/{user}");
    while !machine.view().at(&own).join("x").exists() {
        std::thread::sleep(Duration::from_millis(50));
    }
    allocation.release_fully().await;
    assert!(!machine.view().at(&own).exists() && !machine.view().at("/tmp/x").exists());
    let (ended, ann, login) = open.join().unwrap();
    assert!(ended.is_err(), "{ended:?}");
    assert!(ann.run(port, &login, "true").unwrap_err().contains("Permission denied"));

    assert!(machine.stop_agent().is_some_and(|status| status.success()));
    assert!(ann.run(port, &login, "true").unwrap_err().contains("refused"), "its door is closed");
    // An agent that was killed leaves its sshd running; the next one takes it over.
    let variables = [("SVC_NODE_AGENT_SSH_LISTEN", &*format!("127.0.0.1:{port}"))];
    start(&mut machine, &variables);
    let left = listening_sshd(&machine, "").await;
    machine.kill9_agent();
    start(&mut machine, &variables);
    listening_sshd(&machine, &left).await;
    assert!(machine.stop_agent().is_some_and(|status| status.success()));
    machine.run("rmdir /run/sshd");
    start(&mut machine, &[]);
    let differences = machine.view().differences(&before, &machine.snapshot(&MAY_CHANGE));
    let agents_own = |it: &&String| it.starts_with("process ");
    let traces: Vec<_> = differences.iter().filter(|it| !agents_own(it)).collect();
    assert!(traces.is_empty(), "{traces:#?}");
    machine.stop_agent();
    cluster.shutdown().await;
}

/// The process id of the agent's sshd, once it is another one than this and listens.
async fn listening_sshd(machine: &TestMachine, before: &str) -> String {
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        let file = machine.view().at("/var/lib/gpuaas-agent/ssh/sshd.pid");
        let pid = std::fs::read_to_string(file).unwrap_or_default().trim().to_owned();
        if !pid.is_empty() && pid != before {
            return pid;
        }
        assert!(Instant::now() < until, "no sshd other than {before:?} listens: {pid:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A shutdown program that reports a reboot and does nothing.
const STUBBORN: &str = "rm -f /usr/sbin/shutdown /sbin/shutdown; \
     printf '#!/bin/sh\\necho \"$@\" >>/run/asked\\n' >/usr/sbin/shutdown; chmod 755 /usr/sbin/shutdown";

#[tokio::test(flavor = "multi_thread")]
async fn reboot_task_reboots_the_machine_once_whatever_happens_to_its_agent() {
    let mut cluster = TestCluster::start().await;
    let Some((node, mut machine)) = onboarded(&mut cluster).await else { return cluster.shutdown().await };
    // An agent that is killed during the task reports that after its restart.
    cluster.allow_error("outcome_unknown");
    machine.run(STUBBORN);
    let tasks = format!("{}/tasks", node.path());
    cluster.admin.post(&tasks, &json!({ "type": "node.reboot", "reason": "a new kernel" })).await.created();
    let asked = |machine: &TestMachine| std::fs::read_to_string(machine.view().at("/run/asked")).unwrap_or_default();
    let began = Instant::now();
    while asked(&machine).is_empty() {
        assert!(began.elapsed() < WAIT_TIMEOUT, "the machine never got the reboot task");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    machine.kill9_agent();
    start(&mut machine, &[]);
    let output = |seen: &Value| seen["ended"][0]["error"]["code"] == "outcome_unknown";
    cluster.admin.wait_until(&tasks, "the agent says that it does not know", output).await;
    assert_eq!(asked(&machine), "-r now\n", "and does not do it twice");
    assert_eq!(node.get().await["state"], "active");
    assert!(machine.stop_agent().is_some_and(|status| status.success()));
    cluster.shutdown().await;
}
