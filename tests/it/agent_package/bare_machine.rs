//! A bare machine becomes a node by the bootstrap script alone; and the node API relays the registry to the node alone.

use super::units;
use crate::external_tools::tools;
use local_servers::private_files;
use reqwest::{Method, StatusCode};
use serde_json::json;
use std::path::{Path, PathBuf};
use tests::cluster::client::send_request;
use tests::cluster::fake_agent::{FakeAgent, anonymous};
use tests::cluster::{NodeHandle, TestCluster};
use tests::package_registry::{PASSWORD, PackageLayout, PackageRegistryServer, USER, release_key};
use tests::skipped_tests::report_skipped;
use tests::systemd_container::SystemdContainer;
use wire::PublicKey;

const AGENT: &str = "gpuaas-agent.service";

/// The settings of a control plane with this package.
pub(crate) fn settings(
    registry: &PackageRegistryServer,
    digest: &str,
    mode: &str,
    installer: &Path,
    folder: &Path,
) -> Vec<(&'static str, String)> {
    let account = folder.join("account");
    std::fs::write(&account, format!("{USER}:{}\n", PASSWORD.0)).unwrap();
    vec![
        ("SVC_NODE_AGENT_PACKAGE_OCI_REF", registry.reference().to_string()),
        ("SVC_NODE_AGENT_PACKAGE_DIGEST", digest.to_owned()),
        ("SVC_NODE_AGENT_PACKAGE_PULL_DELIVERY_MODE", mode.to_owned()),
        ("SVC_NODE_AGENT_PACKAGE_RELEASE_KEYS", PublicKey::from(&release_key()).to_string()),
        ("SVC_NODE_AGENT_PACKAGE_REGISTRY_CA_PATH", registry.authority.certificate_path().display().to_string()),
        ("SVC_NODE_AGENT_PACKAGE_PULL_ACCOUNT_PATH", account.display().to_string()),
        ("SVC_NODE_AGENT_INSTALLER_PATH", installer.display().to_string()),
    ]
}

async fn cluster_with(settings: Vec<(&'static str, String)>) -> TestCluster {
    let builder = TestCluster::builder();
    settings.iter().fold(builder, |builder, (name, value)| builder.variable(name, value)).start().await
}

/// The static installer that `deploy/test` has compiled, or the reason why there is none.
pub(crate) fn static_installer() -> Option<PathBuf> {
    let programs = private_files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas-agent").unwrap();
    let target = programs.parent()?.parent()?;
    let machine = std::env::consts::ARCH;
    let found = target.join(format!("{machine}-unknown-linux-musl/installer/gpuaas-installer"));
    if !found.is_file() {
        report_skipped(
            "it needs the static installer: `deploy/package --installer` compiles it, with musl-tools and Rust's target",
        );
        return None;
    }
    Some(found)
}

/// The package of the programs that were built for this test.
fn package_of_built_programs() -> PackageLayout {
    let test = std::env::current_exe().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let stripped = |name: &&str| {
        let program = private_files::find_sibling(&test, name).unwrap();
        let to = folder.path().join(name);
        let done = std::process::Command::new("strip").arg("-o").arg(&to).arg(&program).status().unwrap();
        assert!(done.success());
        to
    };
    let programs = agent_package::contents::PROGRAMS.iter().map(stripped).collect();
    PackageLayout::of("0.1.0", programs, &units(), Some(&release_key()))
}

async fn script(cluster: &mut TestCluster, node: &NodeHandle) -> String {
    let path = format!("{}/bootstrap-script", node.path());
    let answer = cluster.at_replica(0, "admin").post(&path, &json!({ "format": "package" })).await.ok();
    assert!(answer["command"].as_str().unwrap().ends_with("sudo sh -s <bootstrap.sh"), "{answer}");
    let script = answer["script"].as_str().unwrap().to_owned();
    assert!(script.len() < 6 * 1024 * 1024, "{} bytes", script.len());
    let token = script.lines().find_map(|line| line.split_once("SVC_ENROLLMENT_TOKEN='\\''")).unwrap().1;
    cluster.register_secret("an enrollment token", token.split('\'').next().unwrap().trim_end_matches('\\'));
    script
}

#[tokio::test(flavor = "multi_thread")]
async fn bare_machine_becomes_a_node_by_the_script_alone_in_both_delivery_modes() {
    let Some(installer) = static_installer() else { return };
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let Some(machine) = SystemdContainer::start(&tools(), &[]).expect("the container starts") else { return };
    // The tree has cloud-init and what it needs; this machine has neither.
    machine.run("rm -f /usr/bin/python3* /usr/bin/cloud-init*");
    for missing in ["curl", "wget", "python3", "cloud-init", "gpuaas-agent"] {
        assert!(machine.attempt(&format!("command -v {missing}")).is_err(), "the machine is not bare: {missing}");
    }
    let registry = PackageRegistryServer::start(&tools()).await;
    let package = package_of_built_programs();
    registry.push(package.folder.path()).await;
    let folder = tempfile::tempdir().unwrap();
    for mode in ["bundle", "node-api"] {
        let digest = package.digest.to_string();
        let mut cluster = cluster_with(settings(&registry, &digest, mode, &installer, folder.path())).await;
        let node = cluster.register("h100").await;
        let script = script(&mut cluster, &node).await;
        assert_eq!(
            script.contains(PASSWORD.0),
            mode == "bundle",
            "the registry's account is in bundles of this mode alone"
        );
        machine.write("/srv/bootstrap.sh", 0o600, script.as_bytes());
        let printed = machine.run("sh -s </srv/bootstrap.sh 2>&1");
        assert!(printed.contains(&format!("node {} is set up", node.id)), "{printed}");
        // The machine has no GPU: it reports, and its node waits for those of its SKU.
        let reported = cluster
            .at_replica(0, "admin")
            .wait_until(&node.path(), "the agent has reported", |node| {
                node["state_reason"]["code"] == "inventory_mismatch"
            })
            .await;
        assert_eq!(reported["state"], "enrolling", "{}", machine.journal(AGENT));
        let pid = machine.property(AGENT, "MainPID");
        let program = machine.run(&format!("readlink /proc/{pid}/exe"));
        assert_eq!(program.trim(), format!("/opt/gpuaas/versions/{}/bin/gpuaas-agent", package.digest.name()));
        assert_eq!(machine.property(AGENT, "UnitFileState"), "enabled");
        assert_eq!(machine.run("ls -A /opt/gpuaas | sort | tr '\\n' ' '").trim(), ".lock current versions");
        assert_eq!(machine.run("stat -c %a /etc/gpuaas/agent.env").trim(), "600");
        // The other units are there, for an administrator to enable.
        for other in ["gpuaas-log-collector", "gpuaas-telemetry-edge"] {
            let unit = machine.run(&format!("systemctl cat {other}"));
            assert!(unit.contains(&format!("ExecStart=/opt/gpuaas/current/bin/{other}")), "{unit}");
            machine.run(&format!("/opt/gpuaas/current/bin/{other} --help"));
            assert_eq!(machine.property(&format!("{other}.service"), "ActiveState"), "inactive");
        }

        // A later script sets the machine up again, with the version that is there.
        let later = self::script(&mut cluster, &node).await;
        machine.write("/srv/bootstrap.sh", 0o600, later.as_bytes());
        let printed = machine.run("sh /srv/bootstrap.sh 2>&1");
        assert!(printed.contains("was installed in /opt/gpuaas"), "{printed}");
        machine.run(&format!("systemctl stop {AGENT}; rm -rf /var/lib/gpuaas-agent /opt/gpuaas /etc/gpuaas"));
        cluster.shutdown().await;
    }
    // A script that was cut, or altered, installs nothing.
    machine.run("sed -i 's/^f0VM/f0VN/; s/^H4sI.\\{40\\}/&A/' /srv/bootstrap.sh");
    let refused = machine.attempt("sh -s </srv/bootstrap.sh 2>&1").unwrap_err();
    assert!(refused.contains("first program"), "{refused}");
    assert!(machine.attempt("ls -A /opt/gpuaas | grep .").is_err(), "nothing is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn node_api_relays_the_registry_to_the_node_by_certificate_or_unspent_token_alone() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let registry = PackageRegistryServer::start(&tools()).await;
    let package = PackageLayout::small("1.0.0", &units(), Some(&release_key()));
    registry.push(package.folder.path()).await;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = settings(&registry, &package.digest.to_string(), "node-api", Path::new(""), folder.path());
    settings.pop();
    let mut cluster = cluster_with(settings).await;
    let (node, other) = (cluster.register("h100").await, cluster.register("h100").await);
    let (bundle, others) = (cluster.bundle(&node).await, cluster.bundle(&other).await);
    assert!(bundle.package.pull_account.is_none());
    let client = anonymous(&bundle);
    let url = |part: &str| format!("{}/internal/v1/nodes/{}/package/{part}", cluster.node_url(), node.id);
    let manifest = url(&format!("manifests/{}", package.digest));
    let with = |token: &str, url: &str| send_request(client.get(url).bearer_auth(token));

    // By its token, as often as needed, and by no other.
    let token = bundle.enrollment_token.expose();
    for _ in 0..2 {
        let answer = client.get(&manifest).bearer_auth(token).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.bytes().await.unwrap(), package.blob(package.digest));
    }
    for wrong in [others.enrollment_token.expose(), &token.replace(&token[10..], &"x".repeat(token.len() - 10)), "x"] {
        let answer = with(wrong, &manifest).await.unwrap();
        assert_eq!((answer.status, answer.code()), (StatusCode::UNAUTHORIZED, "enrollment_rejected"), "{answer}");
    }
    let answer = send_request(client.get(&manifest)).await.unwrap();
    assert_eq!((answer.status, answer.code()), (StatusCode::UNAUTHORIZED, "invalid_node_identity"), "{answer}");
    for elsewhere in ["manifests/1.0.0", "manifests/sha256-0.sig", "blobs/uploads", "blobs/..%2fmanifests"] {
        let answer = with(token, &url(elsewhere)).await.unwrap();
        assert_eq!(
            (answer.status, answer.code()),
            (StatusCode::BAD_REQUEST, "invalid_request"),
            "{elsewhere}: {answer}"
        );
    }
    let none = format!("blobs/sha256:{}", "0".repeat(64));
    assert_eq!(with(token, &url(&none)).await.unwrap().code(), "not_found");

    // Spent, it opens nothing; the certificate does, until the node is removed.
    let agent = FakeAgent::onboard(&bundle, 8).await;
    assert_eq!(with(token, &manifest).await.unwrap().code(), "enrollment_rejected");
    let (_, list, _) = agent_package::manifest::ImageManifest::parse_package(&package.blob(package.digest)).unwrap();
    let pulled = agent.send(Method::GET, &format!("package/blobs/{}", list.digest), None).await;
    assert_eq!(pulled.status, StatusCode::OK, "{pulled}");
    drop(registry);
    let answer = agent.send(Method::GET, &format!("package/blobs/{}", list.digest), None).await;
    assert_eq!((answer.status, answer.code()), (StatusCode::SERVICE_UNAVAILABLE, "service_unavailable"), "{answer}");
    node.order("retire").await.accepted();
    node.order("remove").await.accepted();
    node.expect_state("removed").await;
    let answer = agent.send(Method::GET, &format!("package/blobs/{}", list.digest), None).await;
    assert_eq!(answer.code(), "invalid_node_identity", "{answer}");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn script_with_a_package_that_is_not_configured_is_refused_with_the_settings() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.register("h100").await;
    let path = format!("{}/bootstrap-script", node.path());
    let answer = cluster.at_replica(0, "admin").post(&path, &json!({ "format": "package" })).await;
    assert_eq!((answer.status, answer.code()), (StatusCode::BAD_REQUEST, "invalid_request"), "{answer}");
    let settings = answer.body["details"]["settings"].as_array().unwrap();
    assert_eq!(settings.len(), 4, "{answer}");
    for name in settings {
        assert!(answer.body["message"].as_str().unwrap().contains(name.as_str().unwrap()), "{answer}");
    }
    // No token was issued: an older one is as good as before.
    assert_eq!(node.get().await["state"], "registered");
    cluster.shutdown().await;
}
