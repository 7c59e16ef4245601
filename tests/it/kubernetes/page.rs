//! The operator's page about Kubernetes, followed word by word with `podman kube play`, up to a rented node.

use crate::containers::{Podman, TestImage, write_settings};
use crate::external_tools::{installed, root, tools};
use crate::node_pages::{Shell, blocks};
use std::path::Path;
use std::process::Command;
use tests::cluster::{TestCluster, WAIT_TIMEOUT};
use tests::package_registry::{PASSWORD, PackageRegistryServer, USER};

const PAGE: &str = "kubernetes.md";
const CONTAINER: &str = "gpuaas-pod-0-gpuaas";

/// The shell of an operator, in a folder with a checkout's `deploy` and the files that the page names.
struct Operator<'a> {
    podman: &'a Podman,
    folder: &'a Path,
    names: Vec<(&'static str, String)>,
}

impl Operator<'_> {
    async fn follow(&self, title: &str) -> String {
        let blocks = blocks(PAGE, title).into_iter();
        let code: String = blocks.filter_map(|(shell, code)| (shell == Shell::Node).then_some(code)).collect();
        assert!(!code.is_empty(), "{PAGE} has nothing to run under {title:?}");
        let names: String = self.names.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
        let script = format!("set -euo pipefail\n{names}{code}");
        let mut shell: Command = self.podman.command("bash", &["-c", &script]);
        let kubectl = installed("kubernetes/kubectl");
        let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", kubectl.parent().unwrap().display());
        shell.current_dir(self.folder).env("PATH", path);
        let output = tokio::task::spawn_blocking(move || shell.output()).await.unwrap().unwrap();
        let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        let log = self.podman.output(&["logs", "--tail", "40", CONTAINER]).await;
        let log = String::from_utf8_lossy(&[log.stdout, log.stderr].concat()).into_owned();
        assert!(output.status.success(), "{title}:\n{code}\n{printed}\n{log}");
        printed
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn page_about_kubernetes_ends_word_by_word_with_a_rented_node() {
    let Some(podman) = Podman::start() else { return };
    let image = TestImage::shared().await;
    let mut cluster = TestCluster::start().await;
    let registry = PackageRegistryServer::start(&tools()).await;
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root().join("deploy"), folder.path().join("deploy")).unwrap();
    // The pod is in the place of the only replica.
    cluster.replicas[0].stop().await;
    let listens = cluster.replicas[0].listens();
    write_settings(&cluster, listens, folder.path());
    std::fs::remove_file(folder.path().join("kek")).unwrap();
    let repository = format!("localhost:{}/gpuaas/gpuaas", registry.port);
    let operator = Operator {
        podman: &podman,
        folder: folder.path(),
        names: vec![
            ("image", repository.clone()),
            ("digest", image.digest()),
            ("operators", listens.operations.to_string()),
        ],
    };
    push(&podman, &registry, &image, &repository).await;

    operator.follow("Settings").await;
    // The database has the key ring of this cluster.
    std::fs::copy(&cluster.settings.key_ring_path, folder.path().join("site/secrets/kek")).unwrap();
    operator.follow("Resources").await;
    let replicas = std::fs::read_to_string(folder.path().join("replicas.yaml")).unwrap();
    for found in super::resources(&replicas) {
        assert_eq!(super::pod_security::violations(&found), [""; 0], "{found:#}");
    }
    let printed = operator.follow("Try it on one machine").await;
    assert!(printed.contains("migrations"), "{printed}");
    podman.expect_ready(CONTAINER, listens).await;
    let status = std::fs::read_to_string(format!("/proc/{}/status", podman.inspect(CONTAINER, "{{.State.Pid}}").await));
    let status = status.unwrap();
    assert!(status.contains("Uid:\t65532\t") && status.contains("CapEff:\t0000000000000000"), "{status}");
    let variables = podman.inspect(CONTAINER, "{{.Config.Env}}").await;
    assert!(
        !variables.contains("postgres://") && variables.contains("SVC_ENV_FILE"),
        "no secret is in the pod's description"
    );

    // An agent outside enrolls with it, and its node is rented.
    let node = cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    allocation.release_fully().await;
    node.expect_state("active").await;

    let printed = operator.follow("End the trial").await;
    assert_eq!(podman.succeed(&["ps", "--all", "--quiet"]).await, "", "{printed}");
    cluster.restart_replica(0).await;
    tokio::time::timeout(WAIT_TIMEOUT, cluster.shutdown()).await.unwrap();
}

/// Pushes the image, and lets podman trust the registry and log in to it.
async fn push(podman: &Podman, registry: &PackageRegistryServer, image: &TestImage, repository: &str) {
    let home = podman.environment().into_iter().find(|(name, _)| *name == "HOME").unwrap().1;
    let certificates = Path::new(&home).join(".config/containers/certs.d").join(format!("localhost:{}", registry.port));
    std::fs::create_dir_all(&certificates).unwrap();
    std::fs::write(certificates.join("ca.crt"), registry.authority.certificate_pem()).unwrap();
    let server = format!("localhost:{}", registry.port);
    podman.succeed(&["login", "--username", USER, "--password", PASSWORD.0, &server]).await;
    let from = format!("oci:{}", image.layout().display());
    let to = format!("docker://{repository}:test");
    let (account, authorities) = (format!("{USER}:{}", PASSWORD.0), certificates.display().to_string());
    let copy = ["--insecure-policy", "copy", "--quiet", "--preserve-digests", "--dest-creds", &account];
    crate::external_tools::run(
        podman.command("skopeo", &[&copy[..], &["--dest-cert-dir", &authorities, &from, &to]].concat()),
    )
    .await;
}

/// Runs the commands of an upgrade with a `kubectl` that writes down what it is asked, and reports this condition of the job. Whether they
/// succeeded, what they printed, and what was asked.
fn upgrade_with_job(condition: &str) -> (bool, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let kubectl = format!(
        "#!/bin/sh\necho \"$@\" >> asked\ncase $1 in get) [ -e once ] && echo {condition} || touch once ;; logs) echo the log of the job ;; esac\n"
    );
    for (name, text) in [("kubectl", kubectl.as_str()), ("sleep", "#!/bin/sh\n")] {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let code: String = blocks(PAGE, "Install and upgrade").into_iter().map(|(_, code)| code).collect();
    let mut shell = Command::new("timeout");
    shell.args(["20", "bash", "-c", &code]).current_dir(folder.path());
    let output = shell.env("PATH", format!("{}:/usr/bin:/bin", folder.path().display())).output().unwrap();
    let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    (output.status.success(), printed, std::fs::read_to_string(folder.path().join("asked")).unwrap())
}

#[test]
fn upgrade_starts_no_pod_where_the_migration_fails_and_shows_its_log_at_once() {
    let (succeeded, printed, asked) = upgrade_with_job("Failed");
    assert!(!succeeded && printed.contains("the log of the job"), "{printed}");
    assert!(!asked.contains("replicas.yaml"), "{asked}");
    let (succeeded, printed, asked) = upgrade_with_job("Complete");
    assert!(succeeded && printed.contains("the log of the job"), "{printed}");
    assert!(asked.contains("apply --filename replicas.yaml") && asked.contains("rollout status"), "{asked}");
}
