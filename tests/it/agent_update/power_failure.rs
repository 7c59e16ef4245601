//! An update whose agent is killed, and whose machine then loses its power while the new agent has not proved itself.

use super::{AGENT, ENDS_WITHIN, PATIENT_COMMIT_SECONDS, ended, order, program_in_use};
use agent_package::update::{Stage, UpdateFolder};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tests::cluster::{AllocationHandle, NodeHandle, TestCluster};
use tests::systemd_container::SystemdContainer;
use wire::package::Digest;

const INSTALLATION: &str = "/opt/gpuaas";
/// The journal of the agent's tasks.
const JOURNAL: &str = "/var/lib/gpuaas-agent/journal.jsonl";

/// Updates from one version to the other: afterwards the other one is in use, its outcome is recorded once, and the agent's journal and
/// its tenant are as before.
pub(super) async fn expect_one_version_and_outcome(
    cluster: &mut TestCluster,
    container: &mut SystemdContainer,
    node: &NodeHandle,
    allocation: &AllocationHandle,
    (from, to): (Digest, Digest),
) {
    // The killed agent is restarted after 5 s.
    cluster.set_policy("node.update_commit_seconds", PATIENT_COMMIT_SECONDS).await;
    let done_before = tasks_done(container);
    let boot_before = node.get().await["agent"]["boot_id"].clone();
    let agent = container.property(AGENT, "MainPID");
    let updates = UpdateFolder::of(&container.on_disk(INSTALLATION));

    let ordered = order(cluster, node, json!({ "digest": to, "reason": "a release" })).await;
    wait_until("the update has begun", || updates.is_updating()).await;
    // The agent that has the task.
    container.run(&format!("kill -9 {agent}"));
    // A fast update may have ended between two looks.
    let waits = || updates.record().unwrap().is_none_or(|record| matches!(record.stage, Stage::Waiting { .. }));
    wait_until("the finalizer waits for the proof of the new agent", waits).await;
    container.lose_power().await;

    let update = ended(cluster, node).await;
    assert_eq!(update["task_id"], ordered["task_id"], "{update}");
    assert_eq!(update["state"], "succeeded", "{update} {}", container.journal(AGENT));
    let last = updates.last().unwrap().unwrap();
    assert_eq!((last.to, last.rolled_back, updates.record().unwrap()), (to, None, None));
    let is_after_boot = |node: &Value| node["agent"]["boot_id"] != boot_before;
    let seen = cluster.admin.wait_until(&node.path(), "it reports from the next boot", is_after_boot).await;
    assert_eq!(seen["agent"]["package_digest"], to.to_string(), "{seen}");

    assert_eq!(container.run("readlink /opt/gpuaas/current").trim(), format!("versions/{}", to.name()));
    assert!(program_in_use(container).contains(&to.name()));
    let versions = container.run("ls /opt/gpuaas/versions");
    assert_eq!(versions.lines().collect::<BTreeSet<_>>(), BTreeSet::from([&*from.name(), &*to.name()]));

    assert_eq!(outcomes(cluster, node, &ordered["task_id"]).await, 1);
    let journal = container.journal(AGENT);
    assert!(!journal.contains("will not take the result"), "the outcome was reported again: {journal}");
    let done = tasks_done(container);
    assert!(done.is_superset(&done_before), "of {done_before:?} the journal has {done:?}");
    assert!(done.contains(ordered["task_id"].as_str().unwrap()), "{done:?}");

    // The tenant's programs have ended with the boot; what it rents is there, and guarded again.
    assert_eq!(allocation.get().await["state"], "active");
    let slice = container.run("cat /run/systemd/system/user-*.slice.d/50-gpuaas.conf");
    assert!(slice.contains("DevicePolicy=closed"), "{slice}");
    // The driver makes this node when a program first needs it.
    container.run("mknod -m 666 /dev/nvidia-uvm c 1 3");
    let is_allowed = || {
        let slice = container.run("cat /run/systemd/system/user-*.slice.d/50-gpuaas.conf");
        slice.contains("DeviceAllow=/dev/nvidia-uvm rw")
    };
    wait_until("the tenant may open the node that was made later", is_allowed).await;
    let (mut terminal, _) = cluster.terminal(allocation.id).await;
    terminal.enter("cat /dev/nvidia-uvm && echo ope''ned\n").await;
    terminal.expect_output("opened").await;
    terminal.enter("echo up''again\n").await;
    terminal.expect_output("upagain").await;
}

async fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + ENDS_WITHIN;
    while !is_so() {
        assert!(Instant::now() < until, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// How many outcomes of the task the control plane has recorded.
async fn outcomes(cluster: &TestCluster, node: &NodeHandle, task_id: &Value) -> i64 {
    let statement = "SELECT count(*) FROM history WHERE entity = $1 AND starts_with(why, $2)";
    let why = format!("task {}: ", task_id.as_str().unwrap());
    sqlx::query_scalar(statement).bind(node.id).bind(why).fetch_one(&cluster.pool).await.unwrap()
}

/// The tasks with a result in the agent's journal.
fn tasks_done(container: &SystemdContainer) -> BTreeSet<String> {
    let text = std::fs::read(container.on_disk(JOURNAL)).unwrap();
    let text = String::from_utf8_lossy(&text);
    // The last line may be half written.
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let done = lines.filter(|line| line["event"] == "done");
    done.map(|line| line["task_id"].as_str().unwrap().to_owned()).collect()
}
