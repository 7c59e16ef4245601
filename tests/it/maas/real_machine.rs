//! A machine that really boots, whose disk the provider really throws away.

use super::{IMAGE, LONG, MACHINE, builder, expect_step, reinstall};
use crate::external_tools::{root, tools};
use local_servers::files;
use serde_json::json;
use tests::cluster::fake_maas::FakeMaas;
use tests::cluster::{AllocationHandle, GPU_MEMORY_MIB, NodeHandle, REGION, TestCluster, id_of, node_body};
use tests::systemd_container::{OTHERS_PORTS, SystemdContainer};

const AGENT: &str = "gpuaas-agent.service";
const SKU: &str = "h100x1";
/// What a tenant leaves where no clean-up looks for it.
const BYTES: &str = "bytes-of-the-first-tenant";

/// Boots the image: systemd, the agent with one simulated GPU, and the image's digest.
fn boot() -> Option<SystemdContainer> {
    let agent = files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas-agent").unwrap();
    let machine = SystemdContainer::start(&tools(), &[agent]).expect("the container starts")?;
    let unit = std::fs::read(root().join("deploy/systemd").join(AGENT)).unwrap();
    machine.write(&format!("/etc/systemd/system/{AGENT}"), 0o644, &unit);
    machine.run(&format!("install -d /etc/gpuaas /etc/systemd/system/{AGENT}.d; mknod -m 666 /dev/nvidia0 c 1 3"));
    machine.write("/etc/gpuaas/image-digest", 0o644, format!("{IMAGE}\n").as_bytes());
    let start = format!(
        "[Service]\n{OTHERS_PORTS}\nExecStart=\nExecStart=/usr/local/bin/gpuaas-agent --env-file /etc/gpuaas/agent.env --executor system \
         --simulate-gpus 1 --gpu-memory-mib {GPU_MEMORY_MIB}\n"
    );
    machine.write(&format!("/etc/systemd/system/{AGENT}.d/program.conf"), 0o644, start.as_bytes());
    machine.run("systemctl daemon-reload");
    Some(machine)
}

/// Runs the user data of the last deployment, as cloud-init does at the first boot.
fn run_user_data(cluster: &mut TestCluster, maas: &FakeMaas, machine: &SystemdContainer) {
    let user_data = maas.machine(MACHINE).deployments.last().cloned().expect("it was deployed");
    let token = user_data.split_once("SVC_ENROLLMENT_TOKEN='\\''").expect("it has a token").1;
    cluster.register_secret("the token in the user data", token.split('\'').next().unwrap().trim_end_matches('\\'));
    machine.write("/run/user-data", 0o700, user_data.as_bytes());
    machine.run("sh /run/user-data 2>&1");
}

fn files_with_the_bytes(machine: &SystemdContainer) -> String {
    let search = format!("grep -rlI --exclude-dir=proc --exclude-dir=sys --exclude-dir=dev '{BYTES}' / 2>/dev/null");
    machine.attempt(&search).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn reinstalled_machine_has_no_byte_of_its_tenant_and_the_old_disk_is_refused() {
    let Some(first) = boot() else { return };
    let maas = FakeMaas::start().await;
    maas.add(MACHINE, "gpu-1");
    let mut cluster = builder(&maas).policy("allocation.isolation_model", "full-reimage").start().await;
    cluster.register_secret("the provider's API key", "secret-of-a-test");
    cluster.offer_sku(SKU, 1).await;
    let mut body = node_body("gpu-1", SKU, 1);
    (body["host"], body["onboarding_mode"]) = ("gpu-1".into(), "maas".into());
    let node = NodeHandle::of(&cluster.admin.post("/api/v1/admin/nodes", &body).await.created(), cluster.admin.clone());
    maas.wait_for(MACHINE, "its deployment began", |machine| machine.deployments.len() == 1).await;
    maas.change(MACHINE, |machine| machine.status = "Deployed");
    run_user_data(&mut cluster, &maas, &first);
    node.expect_state("active").await;
    expect_step(&cluster, &node, "deployed").await;

    let wanted = json!({ "sku": SKU, "region_code": REGION, "gpu_count": 1 });
    let rented = cluster.user.post("/api/v1/allocations", &wanted).await.created();
    let allocation = AllocationHandle::new(id_of(&rented), cluster.user.clone());
    allocation.expect_state("active").await;
    first.run(&format!("install -d /opt/left; echo {BYTES} > /opt/left/model"));
    allocation.release().await;
    allocation.expect_state("released").await;
    assert_eq!(node.expect_state("quarantined").await["gpus_free"], 0);
    assert_eq!(files_with_the_bytes(&first).trim(), "/opt/left/model", "the clean-up does not find it");

    // The deployment boots the old disk.
    reinstall(&maas, 2).await;
    run_user_data(&mut cluster, &maas, &first);
    let is_refused = |node: &serde_json::Value| node["state_reason"]["code"] == "system_refused";
    cluster.admin.wait_within(LONG, &node.path(), "the old disk is refused", is_refused).await;
    let machine_id = first.run("cat /etc/machine-id");
    drop(first);

    node.order("reimage").await.ok();
    reinstall(&maas, 3).await;
    maas.change(MACHINE, |machine| machine.status = "Deployed");
    let second = boot().expect("a machine that booted once boots again");
    assert_ne!(second.run("cat /etc/machine-id"), machine_id);
    run_user_data(&mut cluster, &maas, &second);
    let free = |node: &serde_json::Value| node["state"] == "active" && node["gpus_free"] == 1;
    cluster.admin.wait_within(LONG, &node.path(), "the new system is validated", free).await;
    assert_eq!(files_with_the_bytes(&second), "");
    cluster.allow_error("enroll");
    cluster.shutdown().await;
}
