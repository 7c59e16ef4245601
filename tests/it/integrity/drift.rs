//! Drift of a machine that systemd has booted: a file of the agent's package is altered, and a SKU expects hardware that the machine lacks.

use super::LONG;
use crate::agent_update::{SKU, cluster, machine, package};
use crate::external_tools::tools;
use reqwest::Method;
use serde_json::{Value, json};
use tests::cluster::{NodeHandle, TestCluster};
use tests::package_registry::PackageRegistryServer;

/// A file of the package that nothing runs here.
const FILE: &str = "bin/gpuaas-telemetry-edge";
const MIB: u64 = 16 * 1024 * 1024;

async fn expect_hardware(cluster: &TestCluster, sku: &str, expected: &Value) {
    let path = format!("/api/v1/admin/skus/{sku}");
    let body = json!({ "expected_hardware": expected });
    cluster.admin.request_until_final(Method::PATCH, &path, Some(&body)).await.ok();
}

/// The reason of the quarantine, once its code is this one.
async fn quarantine(cluster: &TestCluster, node: &NodeHandle, code: &str) -> String {
    let is_held = |node: &Value| node["state"] == "quarantined" && node["state_reason"]["code"] == code;
    let held = cluster.admin.wait_within(LONG, &node.path(), &format!("quarantined: {code}"), is_held).await;
    held["state_reason"]["message"].as_str().unwrap().to_owned()
}

async fn expect_active(cluster: &TestCluster, node: &NodeHandle) {
    cluster.admin.wait_within(LONG, &node.path(), "active again", |node| node["state"] == "active").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn altered_package_file_and_missing_hardware_quarantine_a_booted_node_until_they_are_as_they_should_be() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let registry = PackageRegistryServer::start(&tools()).await;
    let published = package("1.0.0", None);
    registry.push(published.folder.path()).await;
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = cluster(&registry, &published.digest.to_string(), folder.path()).await;
    let Some((container, node)) = machine(&mut cluster, "--integrity-interval-seconds 1").await else {
        return cluster.shutdown().await;
    };

    let path = format!("/opt/gpuaas/versions/{}/{FILE}", published.digest.name());
    container.run(&format!("cp -p {path} /srv/whole; printf X | dd of={path} bs=1 seek=1 conv=notrunc status=none"));
    let why = quarantine(&cluster, &node, "integrity_finding").await;
    assert!(why.contains(FILE) && why.contains("package/altered"), "{why}");
    container.run(&format!("cp -p /srv/whole {path}"));
    expect_active(&cluster, &node).await;

    let sku = cluster.offer_sku(SKU, 1).await.to_string();
    let memory = container.run("awk '/^MemTotal/ { print int($2 / 1024) }' /proc/meminfo");
    let cpu = container.run("sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1");
    expect_hardware(&cluster, &sku, &json!({ "memory_mib": MIB, "cpu_model": "EPYC 0000" })).await;
    let why = quarantine(&cluster, &node, "inventory_drift").await;
    for part in [memory.trim(), "MiB of memory", &MIB.to_string(), cpu.trim(), "EPYC 0000"] {
        assert!(!part.is_empty() && why.contains(part), "{part}: {why}");
    }
    expect_hardware(&cluster, &sku, &json!({})).await;
    expect_active(&cluster, &node).await;
    cluster.shutdown().await;
}
