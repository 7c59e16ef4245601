//! The update of an agent that a package installed, on a Debian that systemd has booted.

mod bad_versions;
mod power_failure;

use crate::agent_restart::{WRITER, expect_every_line_once, receive_for};
use crate::external_tools::{root, tools};
use agent_package::update::UpdateFolder;
use local_servers::private_files;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tests::cluster::terminal::Terminal;
use tests::cluster::{GPU_MEMORY_MIB, NodeHandle, TestCluster};
use tests::package_registry::{PASSWORD, PackageLayout, PackageRegistryServer, USER, release_key};
use tests::systemd_container::{OTHERS_PORTS, SystemdContainer};
use wire::PublicKey;
use wire::package::Digest;

const AGENT: &str = "gpuaas-agent.service";
pub(crate) const SKU: &str = "h100x1";
const ENDS_WITHIN: Duration = Duration::from_secs(180);
/// The time in which an updated agent has to prove itself, where it is to succeed.
const PATIENT_COMMIT_SECONDS: u32 = 90;
/// While this is there, the agent's unit does not start its program.
const HOLD: &str = "/run/hold-the-agent";
/// The agent of this version on the machine, with heartbeats of a protocol that no control plane speaks any more.
fn too_old(version: Digest) -> String {
    let program = format!("/opt/gpuaas/versions/{}/bin/gpuaas-agent", version.name());
    format!("#!/bin/sh\nexec {program} \"$@\" --simulate-failure protocol\n")
}

/// A program that was built for this test, without its symbols.
fn built(name: &str, folder: &Path) -> PathBuf {
    let program = private_files::find_sibling(&std::env::current_exe().unwrap(), name).unwrap();
    let to = folder.join(name);
    let done = std::process::Command::new("strip").arg("-o").arg(&to).arg(&program).status().unwrap();
    assert!(done.success());
    to
}

/// A package with this agent or the built one, the built finalizer, and nothing else that works.
pub(crate) fn package(version: &str, agent: Option<&str>) -> PackageLayout {
    let folder = tempfile::tempdir().unwrap();
    let program = |name: &&str| match (*name, agent) {
        ("gpuaas-agent", None) | ("gpuaas-finalizer", _) => built(name, folder.path()),
        ("gpuaas-agent", Some(script)) => written(folder.path(), name, script),
        _ => written(folder.path(), name, "#!/bin/sh\n"),
    };
    let programs = agent_package::contents::PROGRAMS.iter().map(program).collect();
    PackageLayout::of(version, programs, &root().join("deploy/systemd"), Some(&release_key()))
}

fn written(folder: &Path, name: &str, script: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, script).unwrap();
    path
}

pub(crate) async fn cluster(registry: &PackageRegistryServer, digest: &str, folder: &Path) -> TestCluster {
    let account = folder.join("account");
    std::fs::write(&account, format!("{USER}:{}\n", PASSWORD.0)).unwrap();
    let settings = [
        ("SVC_NODE_AGENT_PACKAGE_OCI_REF", registry.reference().to_string()),
        ("SVC_NODE_AGENT_PACKAGE_DIGEST", digest.to_owned()),
        ("SVC_NODE_AGENT_PACKAGE_PULL_DELIVERY_MODE", "node-api".to_owned()),
        ("SVC_NODE_AGENT_PACKAGE_RELEASE_KEYS", PublicKey::from(&release_key()).to_string()),
        ("SVC_NODE_AGENT_PACKAGE_REGISTRY_CA_PATH", registry.authority.certificate_path().display().to_string()),
        ("SVC_NODE_AGENT_PACKAGE_PULL_ACCOUNT_PATH", account.display().to_string()),
    ];
    let builder = TestCluster::builder().policy("node.update_commit_seconds", 15);
    settings.iter().fold(builder, |builder, (name, value)| builder.variable(name, value)).start().await
}

/// A machine on which the published package is installed, with one simulated GPU and further flags of the agent.
pub(crate) async fn machine(cluster: &mut TestCluster, flags: &str) -> Option<(SystemdContainer, NodeHandle)> {
    let installer = private_files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas-installer").unwrap();
    let container = SystemdContainer::start(&tools(), &[installer]).expect("the container starts")?;
    cluster.offer_sku(SKU, 1).await;
    let node = cluster.register(SKU).await;
    let bundle = cluster.bundle(&node).await;
    container
        .run(&format!("install -d -m 0755 /etc/gpuaas /etc/systemd/system/{AGENT}.d; mknod -m 666 /dev/nvidia0 c 1 3"));
    container.write("/etc/gpuaas/agent.env", 0o600, bundle.to_env_file().unwrap().as_bytes());
    let start = format!(
        "[Service]\n{OTHERS_PORTS}\nExecStart=\nExecStart=/opt/gpuaas/current/bin/gpuaas-agent --env-file /etc/gpuaas/agent.env --executor system \
         --simulate-gpus 1 --gpu-memory-mib {GPU_MEMORY_MIB} {flags}\n"
    );
    container.write(&format!("/etc/systemd/system/{AGENT}.d/program.conf"), 0o644, start.as_bytes());
    container.run("gpuaas-installer --first-install");
    container.run(&format!("systemctl daemon-reload; systemctl enable --now {AGENT}"));
    node.expect_state("active").await;
    Some((container, node))
}

async fn order(cluster: &TestCluster, node: &NodeHandle, body: Value) -> Value {
    cluster.at_replica(0, "admin").post(&format!("{}/update-agent", node.path()), &body).await.created()
}

/// Waits for the end of the update to this digest, while the terminal is read.
async fn outcome(container: &SystemdContainer, node: &NodeHandle, digest: &str, terminal: &mut Terminal) -> Value {
    let until = Instant::now() + ENDS_WITHIN;
    loop {
        receive_for(terminal, Duration::from_millis(400)).await;
        let found = node.get().await;
        let update = &found["agent_update"];
        if update["digest"] == digest && !update["ended_at"].is_null() {
            return found;
        }
        assert!(
            Instant::now() < until,
            "{found} {} {}",
            container.journal(AGENT),
            container.journal("gpuaas-finalizer.service")
        );
    }
}

/// The program of the agent's process. The finalizer may restart the agent between the two questions: then they are asked again.
fn program_in_use(container: &SystemdContainer) -> String {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let pid = container.property(AGENT, "MainPID");
        let program = container.run(&format!("readlink /proc/{pid}/exe || true")).trim().to_owned();
        if !program.is_empty() {
            return program;
        }
        assert!(Instant::now() < until, "the agent does not run: {}", container.journal(AGENT));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn update_ends_no_terminal_and_a_bad_package_is_rolled_back_and_not_tried_again() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let registry = PackageRegistryServer::start(&tools()).await;
    let [first, second] = [package("1.0.0", None), package("2.0.0", None)];
    let outdated = package("3.0.0", Some(&too_old(second.digest)));
    let crashes = package("4.0.0", Some(bad_versions::CRASHES));
    let hangs = package("5.0.0", Some(bad_versions::HANGS));
    for package in [&first, &second, &outdated, &crashes, &hangs] {
        registry.push(package.folder.path()).await;
    }
    let [first, second, outdated, crashes, hangs] =
        [first, second, outdated, crashes, hangs].map(|package| package.digest);
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = cluster(&registry, &first.to_string(), folder.path()).await;
    let Some((mut container, node)) = machine(&mut cluster, "").await else { return cluster.shutdown().await };
    assert_eq!(node.get().await["agent"]["package_digest"], first.to_string());
    let allocation = cluster.rent_active(SKU, 1).await;
    let (mut terminal, _) = cluster.terminal(allocation.id).await;
    terminal.enter("PS1=; stty -echo; echo be''gun\n").await;
    terminal.expect_output("begun").await;
    terminal.enter(WRITER).await;
    receive_for(&mut terminal, Duration::from_secs(1)).await;

    // What succeeds waits no longer than it has to, and a busy machine may take longer than usual.
    cluster.set_policy("node.update_commit_seconds", PATIENT_COMMIT_SECONDS).await;
    let wave = json!({ "digest": second, "canary": 1, "max_unavailable": 1, "soak_seconds": 1, "reason": "a release" });
    let rollout = cluster.at_replica(0, "admin").post("/api/v1/admin/rollouts", &wave).await.created();
    let updated = outcome(&container, &node, &second.to_string(), &mut terminal).await;
    let update = &updated["agent_update"];
    assert_eq!(update["state"], "succeeded", "{updated} {}", container.journal(AGENT));
    assert_eq!(updated["agent"]["package_digest"], second.to_string());
    assert!(program_in_use(&container).contains(&second.name()));
    let rollout = format!("/api/v1/admin/rollouts/{}", rollout["id"].as_str().unwrap());
    assert!(rollout.ends_with(update["rollout_id"].as_str().unwrap()), "{updated}");
    let is_completed = |it: &Value| it["state"] == "completed" && it["updated"] == 1;
    cluster.at_replica(0, "admin").wait_until(&rollout, "the rollout is completed", is_completed).await;

    // An agent that is too old: the terminal goes on, and the previous version is back.
    cluster.set_policy("node.update_commit_seconds", bad_versions::COMMIT_SECONDS).await;
    bad_versions::expect_rolled_back(&cluster, &container, &node, (second, outdated), &mut terminal).await;
    let journal = container.journal(AGENT);
    assert!(journal.contains("status=6") && journal.contains("does not support this agent's protocol"), "{journal}");

    let exit = terminal.receive_exit(Duration::from_secs(90), || container.journal(AGENT)).await;
    assert_eq!(exit["code"], 7);
    expect_every_line_once(&String::from_utf8_lossy(&terminal.shown), "shown");

    let machine = (&container, &node);
    bad_versions::expect_no_harm_to_a_tenant(&mut cluster, machine, &allocation, second, [crashes, hangs]).await;
    let update = (second, first);
    power_failure::expect_one_version_and_outcome(&mut cluster, &mut container, &node, &allocation, update).await;

    // Nothing of the updates is left but the two versions, and the memory of the bad ones.
    assert_eq!(container.run("ls -A /opt/gpuaas/update | sort | tr '\\n' ' '").trim(), "failed.json last.json");
    assert_eq!(container.run(&format!("ls /run/systemd/system/{AGENT}.d 2>/dev/null | wc -l")).trim(), "0");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn update_is_rolled_back_where_the_control_plane_is_down_throughout_and_force_tries_it_again() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let registry = PackageRegistryServer::start(&tools()).await;
    let packages = [package("1.0.0", None), package("2.0.0", None)];
    for package in &packages {
        registry.push(package.folder.path()).await;
    }
    let [first, second] = packages.map(|package| package.digest);
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = cluster(&registry, &first.to_string(), folder.path()).await;
    let Some((container, node)) = machine(&mut cluster, "").await else { return cluster.shutdown().await };

    // The new agent waits until the control plane is down, else it may prove itself before.
    let hold = format!("[Service]\nExecStartPre=/bin/sh -c 'while [ -e {HOLD} ]; do sleep 0.1; done'\n");
    container.write(&format!("/etc/systemd/system/{AGENT}.d/hold.conf"), 0o644, hold.as_bytes());
    container.run(&format!("systemctl daemon-reload; touch {HOLD}"));
    order(&cluster, &node, json!({ "digest": second, "reason": "a release" })).await;
    // The package comes through the control plane; the new agent is started after the record is written.
    let updates = UpdateFolder::of(&container.on_disk("/opt/gpuaas"));
    let until = Instant::now() + ENDS_WITHIN;
    while !updates.is_updating() {
        assert!(Instant::now() < until, "the update does not begin: {}", container.journal(AGENT));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    cluster.kill9_replica(0);
    container.run(&format!("rm {HOLD}"));
    let until = Instant::now() + ENDS_WITHIN;
    while !container.journal("gpuaas-finalizer.service").contains("rolled back to") {
        assert!(Instant::now() < until, "{}", container.journal("gpuaas-finalizer.service"));
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert!(program_in_use(&container).contains(&first.name()), "while the control plane is down");
    cluster.restart_replica(0).await;
    let failed = ended(&cluster, &node).await;
    assert_eq!(failed["error"]["code"], "rolled_back", "{failed}");

    order(&cluster, &node, json!({ "digest": second, "reason": "it is back" })).await;
    assert_eq!(ended(&cluster, &node).await["error"]["code"], "failed_before");
    cluster.set_policy("node.update_commit_seconds", PATIENT_COMMIT_SECONDS).await;
    order(&cluster, &node, json!({ "digest": second, "force": true, "reason": "it is back" })).await;
    let updated = ended(&cluster, &node).await;
    assert_eq!(updated["state"], "succeeded", "{updated} {}", container.journal(AGENT));
    assert!(program_in_use(&container).contains(&second.name()));
    cluster.shutdown().await;
}

/// The latest update of the node's agent, once it has ended.
async fn ended(cluster: &TestCluster, node: &NodeHandle) -> Value {
    let is_ended = |node: &Value| !node["agent_update"]["ended_at"].is_null();
    let found = cluster.admin.wait_within(ENDS_WITHIN, &node.path(), "the update has ended", is_ended).await;
    found["agent_update"].clone()
}
