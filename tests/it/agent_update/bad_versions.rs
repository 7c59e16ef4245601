//! Versions of the agent that never prove themselves: each is rolled back with its reason, is not tried again, and costs a tenant nothing.

use super::{AGENT, order, outcome, program_in_use};
use agent_package::contents::FINALIZER_UNIT;
use serde_json::{Value, json};
use tests::cluster::terminal::Terminal;
use tests::cluster::{AllocationHandle, NodeHandle, TestCluster};
use tests::systemd_container::SystemdContainer;
use wire::package::Digest;

/// The policy's minimum: what never proves itself waits for the whole time.
pub(super) const COMMIT_SECONDS: u32 = 10;
/// It crashes at each start.
pub(super) const CRASHES: &str = "#!/bin/sh\nkill -s SEGV $$\n";
/// It never says that it is ready, sends no heartbeat, and ignores the signal that ends it.
pub(super) const HANGS: &str = "#!/bin/sh\ntrap '' TERM\nexec sleep infinity\n";
/// systemd kills what ignores the signal after this time; the shipped unit has half a minute.
const STOP_SETTINGS: &str = "[Service]\nTimeoutStopSec=2s\n";

/// Orders such a version twice: it is rolled back to the one in use, and then refused without a start.
pub(super) async fn expect_rolled_back(
    cluster: &TestCluster,
    container: &SystemdContainer,
    node: &NodeHandle,
    (in_use, bad): (Digest, Digest),
    terminal: &mut Terminal,
) {
    order(cluster, node, json!({ "digest": bad, "reason": "a bad release" })).await;
    let failed = outcome(container, node, &bad.to_string(), terminal).await;
    let error = &failed["agent_update"]["error"];
    assert_eq!(error["code"], "rolled_back", "{failed}");
    let why = format!("no heartbeat of the new agent was answered by the control plane within {COMMIT_SECONDS} s");
    assert_eq!(error["message"], format!("{why} (no_heartbeat); version {in_use} is in use again"), "{failed}");
    assert_eq!(failed["agent"]["package_digest"], in_use.to_string(), "{failed}");
    assert!(program_in_use(container).contains(&in_use.name()));

    let rolled_back = rollbacks(container);
    order(cluster, node, json!({ "digest": bad, "reason": "once more" })).await;
    let refused = outcome(container, node, &bad.to_string(), terminal).await;
    let error = &refused["agent_update"]["error"];
    assert_eq!(error["code"], "failed_before", "{refused}");
    assert!(error["message"].as_str().is_some_and(|message| message.contains(&why)), "{refused}");
    assert_eq!(rollbacks(container), rolled_back, "the version was tried again");
}

/// The roll backs in the finalizer's journal.
fn rollbacks(container: &SystemdContainer) -> usize {
    container.journal(FINALIZER_UNIT).matches("rolled back to").count()
}

/// Orders a version that crashes and one that hangs, while a tenant has a shell.
pub(super) async fn expect_no_harm_to_a_tenant(
    cluster: &mut TestCluster,
    (container, node): (&SystemdContainer, &NodeHandle),
    allocation: &AllocationHandle,
    in_use: Digest,
    [crashes, hangs]: [Digest; 2],
) {
    let before = rented(allocation).await;
    let (mut terminal, _) = cluster.terminal(allocation.id).await;
    terminal.enter("PS1=; stty -echo; shell=the-same; echo be''gun\n").await;
    terminal.expect_output("begun").await;

    expect_rolled_back(cluster, container, node, (in_use, crashes), &mut terminal).await;
    let journal = container.journal(AGENT);
    assert!(journal.contains("status=11/SEGV"), "{journal}");
    expect_same_shell(&mut terminal, "crash").await;

    let settings = format!("/etc/systemd/system/{AGENT}.d/stop.conf");
    container.write(&settings, 0o644, STOP_SETTINGS.as_bytes());
    container.run("systemctl daemon-reload");
    expect_rolled_back(cluster, container, node, (in_use, hangs), &mut terminal).await;
    let journal = container.journal(AGENT);
    assert!(journal.contains("'stop-sigterm' timed out"), "{journal}");
    container.run(&format!("rm {settings}; systemctl daemon-reload"));
    expect_same_shell(&mut terminal, "hang").await;

    assert_eq!(rented(allocation).await, before);
}

/// The shell answers, and has the variable that was set at its beginning.
async fn expect_same_shell(terminal: &mut Terminal, after: &str) {
    terminal.enter(&format!("echo ${{shell}}-after-a-{after}\n")).await;
    terminal.expect_output(&format!("the-same-after-a-{after}")).await;
}

/// What an update of the agent must not change in an allocation.
async fn rented(allocation: &AllocationHandle) -> [Value; 3] {
    let found = allocation.get().await;
    ["state", "devices", "status_history"].map(|name| found[name].clone())
}
