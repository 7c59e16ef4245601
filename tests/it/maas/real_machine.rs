//! A machine that really boots, whose disk the provider really throws away.

use super::{IMAGE, LONG, MACHINE, builder, expect_step, reinstall};
use crate::external_tools::{root, tools};
use local_servers::private_files;
use serde_json::json;
use tests::cluster::fake_maas::FakeMaas;
use tests::cluster::{AllocationHandle, GPU_MEMORY_MIB, NodeHandle, REGION, TestCluster, id_of, node_body};
use tests::systemd_container::{Deployment, DiskFile, OTHERS_PORTS, SystemdContainer};

const AGENT: &str = "gpuaas-agent.service";
const SKU: &str = "h100x1";
/// What a tenant leaves where no clean-up looks for it.
const BYTES: &str = "bytes-of-the-first-tenant";

/// The image: the agent's unit with one simulated GPU, and the image's digest.
fn image() -> Vec<DiskFile> {
    let unit = std::fs::read(root().join("deploy/systemd").join(AGENT)).unwrap();
    let start = format!(
        "[Service]\n{OTHERS_PORTS}\nExecStart=\nExecStart=/usr/local/bin/gpuaas-agent --env-file /etc/gpuaas/agent.env --executor system \
         --simulate-gpus 1 --gpu-memory-mib {GPU_MEMORY_MIB}\n"
    );
    vec![
        DiskFile::new(format!("/etc/systemd/system/{AGENT}"), 0o644, unit),
        DiskFile::new(format!("/etc/systemd/system/{AGENT}.d/program.conf"), 0o644, start),
        DiskFile::new("/etc/tmpfiles.d/nvidia.conf", 0o644, "c /dev/nvidia0 0666 - - - 1:3\n"),
        DiskFile::new("/etc/gpuaas/image-digest", 0o644, format!("{IMAGE}\n")),
    ]
}

/// Boots the image, whose cloud-init runs the user data.
fn boot(deployment: &Deployment) -> SystemdContainer {
    let agent = private_files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas-agent").unwrap();
    let machine = SystemdContainer::start_from(&tools(), &[agent], &image(), Some(deployment));
    let machine = machine.expect("the container starts").expect("this machine can boot one");
    assert_user_data_ran(&machine);
    machine
}

/// cloud-init has run the script to its end, as root and without an error of its own.
fn assert_user_data_ran(machine: &SystemdContainer) {
    let status = machine.attempt("cloud-init status --long").unwrap_or_else(|printed| printed);
    let printed = machine.run("cat /var/log/cloud-init-output.log");
    assert!(status.contains("status: done") && printed.contains("is set up;"), "{status} {printed}");
}

/// The last deployment, as the provider's installation gives it to the machine.
fn last_deployment(cluster: &mut TestCluster, maas: &FakeMaas) -> Deployment {
    let deployments = maas.machine(MACHINE).deployments;
    let user_data = deployments.last().cloned().expect("it was deployed");
    let token = user_data.split_once("SVC_ENROLLMENT_TOKEN='\\''").expect("it has a token").1;
    cluster.register_secret("the token in the user data", token.split('\'').next().unwrap().trim_end_matches('\\'));
    Deployment { instance: format!("{MACHINE}-{}", deployments.len()), user_data }
}

fn files_with_the_bytes(machine: &SystemdContainer) -> String {
    let search = format!("grep -rlaF --exclude-dir=proc --exclude-dir=sys --exclude-dir=dev '{BYTES}' / 2>/dev/null");
    machine.attempt(&search).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn reinstalled_machine_has_no_byte_of_its_tenant_and_the_old_disk_is_refused() {
    if !SystemdContainer::is_possible(&tools()) {
        return;
    }
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
    let mut first = boot(&last_deployment(&mut cluster, &maas));
    node.expect_state("active").await;
    expect_step(&cluster, &node, "deployed").await;

    let wanted = json!({ "sku": SKU, "region_code": REGION, "gpu_count": 1 });
    let rented = cluster.user.post("/api/v1/allocations", &wanted).await.created();
    let allocation = AllocationHandle::new(id_of(&rented), cluster.user.clone());
    allocation.expect_state("active").await;
    first.run(&format!("install -d /opt/left; echo {BYTES} > /opt/left/model"));
    allocation.release_fully().await;
    assert_eq!(node.expect_state("quarantined").await["gpus_free"], 0);
    assert_eq!(files_with_the_bytes(&first).trim(), "/opt/left/model", "the clean-up does not find it");

    // The deployment boots the old disk.
    reinstall(&maas, 2).await;
    first.deploy_again(&last_deployment(&mut cluster, &maas));
    first.run("systemctl reboot");
    first.boot_again().await;
    let is_refused = |node: &serde_json::Value| node["state_reason"]["code"] == "system_refused";
    cluster.admin.wait_within(LONG, &node.path(), "the old disk is refused", is_refused).await;
    let machine_id = first.run("cat /etc/machine-id");
    drop(first);

    node.order("reimage").await.ok();
    reinstall(&maas, 3).await;
    maas.change(MACHINE, |machine| machine.status = "Deployed");
    let second = boot(&last_deployment(&mut cluster, &maas));
    assert_ne!(second.run("cat /etc/machine-id"), machine_id);
    let free = |node: &serde_json::Value| node["state"] == "active" && node["gpus_free"] == 1;
    cluster.admin.wait_within(LONG, &node.path(), "the new system is validated", free).await;
    assert_eq!(files_with_the_bytes(&second), "");
    cluster.allow_error("enroll");
    cluster.shutdown().await;
}
