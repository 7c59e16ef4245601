//! The image of the control plane, made by `deploy/package images`, pushed to Debian's docker-registry and run by podman.

use crate::containers::{Podman, TestImage, write_settings};
use crate::external_tools::{root, run, tools};
use serde_json::Value;
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use supervisors::dev::replica::ListenAddresses;
use tests::cluster::{TestCluster, WAIT_TIMEOUT, id_of, sku_body};
use tests::package_registry::{PASSWORD, PackageRegistryServer, USER};
use uuid::Uuid;

const NAME: &str = "localhost/gpuaas:test";
const WITHIN: Duration = Duration::from_secs(60);
/// What the image may have beside shared libraries.
const FILES: [&str; 5] =
    ["etc/passwd", "etc/group", "etc/nsswitch.conf", "usr/bin/gpuaas", "usr/share/doc/gpuaas/copyright"];

/// A blob of a layout.
fn blob(layout: &Path, digest: &Value) -> PathBuf {
    layout.join("blobs").join(digest.as_str().unwrap().replace(':', "/"))
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

async fn git(arguments: &[&str]) -> String {
    let mut git = Command::new("git");
    git.args(arguments).current_dir(root());
    run(git).await.trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn image_has_the_same_digest_twice_and_holds_the_program_and_its_libraries_alone() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let Some(podman) = Podman::start() else { return };
    let shared = TestImage::shared().await;
    let folder = tempfile::tempdir().unwrap();
    let registry = PackageRegistryServer::start(&tools()).await;
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("ca.pem"), registry.authority.certificate_pem()).unwrap();
    std::fs::write(at("account"), format!("{USER}:{}\n", PASSWORD.0)).unwrap();
    let repository = format!("localhost:{}/gpuaas/gpuaas", registry.port);
    let push = ["--push", &repository, "--ca", &at("ca.pem"), "--account", &at("account")];
    let again = TestImage::build(&folder.path().join("again"), &push).await;
    assert_eq!(shared.digest(), again.digest());

    // A client that has never seen the layout gets the same from the registry.
    let mut certificates = folder.path().join("certificates");
    std::fs::create_dir(&certificates).unwrap();
    std::fs::copy(at("ca.pem"), certificates.join("ca.crt")).unwrap();
    let by_digest = format!("{repository}@{}", again.digest());
    let (account, authorities) = (format!("{USER}:{}", PASSWORD.0), certificates.display().to_string());
    podman.succeed(&["pull", "--quiet", "--creds", &account, "--cert-dir", &authorities, &by_digest]).await;
    let printed = podman.succeed(&["run", "--rm", "--network", "host", &by_digest, "--version"]).await;
    assert_eq!(printed, format!("gpuaas {}", env!("CARGO_PKG_VERSION")));
    certificates.clear();

    let layout = again.layout();
    let manifest = json_of(&blob(&layout, &Value::from(again.digest())));
    let config = json_of(&blob(&layout, &manifest["config"]["digest"]));
    let labels = &config["config"]["Labels"];
    assert_eq!(config["config"]["User"], "65532:65532");
    assert_eq!(labels["org.opencontainers.image.version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(labels["org.opencontainers.image.licenses"], "Apache-2.0");
    assert_eq!(labels["org.opencontainers.image.revision"], git(&["rev-parse", "HEAD"]).await);

    let committed: u64 = git(&["log", "-1", "--format=%ct"]).await.parse().unwrap();
    let [layer] = manifest["layers"].as_array().unwrap().as_slice() else { panic!("{manifest:#}") };
    let mut archive = tar::Archive::new(std::fs::File::open(blob(&layout, &layer["digest"])).unwrap());
    let mut files = BTreeSet::new();
    for entry in archive.entries().unwrap() {
        let entry = entry.unwrap();
        let (path, header) = (entry.path().unwrap().display().to_string(), entry.header());
        assert_eq!(
            (header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap()),
            (0, 0, committed),
            "{path}"
        );
        let mode = header.mode().unwrap();
        assert!(mode & 0o6022 == 0 || path == "tmp/", "{path}: {mode:o}");
        if !header.entry_type().is_dir() {
            files.insert(path);
        }
    }
    let (libraries, others): (BTreeSet<_>, BTreeSet<_>) = files.into_iter().partition(|path| path.starts_with("lib"));
    assert_eq!(others, FILES.map(str::to_owned).into());
    assert!(libraries.iter().all(|path| path.contains(".so")) && libraries.len() < 10, "{libraries:?}");
}

/// A container with the settings in this folder, and these options, which serves in the place of the cluster's first replica.
async fn serve(podman: &Podman, folder: &Path, name: &str, options: &[&str]) {
    let volume = format!("{}:/etc/gpuaas:ro", folder.display());
    let run = ["run", "--detach", "--name", name, "--network", "host", "--volume", &volume];
    let more = ["--env", "SVC_ENV_FILE=/etc/gpuaas/gpuaas.env", "--env", "SVC_MEMBER_NAME=pod"];
    podman.succeed(&[&run[..], &more, options, &[NAME]].concat()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn image_runs_as_any_uid_read_only_and_without_a_temporary_folder() {
    let Some(podman) = Podman::start() else { return };
    podman.load(&TestImage::shared().await, NAME).await;
    let cluster = TestCluster::start().await;
    let (folder, listens) = (tempfile::tempdir().unwrap(), ListenAddresses::on_free_ports().unwrap());
    write_settings(&cluster, listens, folder.path());
    // The second member of a cluster, as a user that nothing knows, without any file system that can be written but the one of shared memory.
    let options = ["--user", "1000770000:0", "--read-only", "--read-only-tmpfs=false", "--cap-drop", "all"];
    serve(&podman, folder.path(), "any", &[&options[..], &["--security-opt", "no-new-privileges"]].concat()).await;
    podman.expect_ready("any", listens).await;
    let process = PathBuf::from("/proc").join(podman.inspect("any", "{{.State.Pid}}").await);
    let status = std::fs::read_to_string(process.join("status")).unwrap();
    // `gpuaas doctor` knows the service by its name, also where the program has started itself again for SVC_ENV_FILE.
    for line in ["Name:\tgpuaas\n", "Uid:\t1000770000\t", "CapEff:\t0000000000000000", "NoNewPrivs:\t1"] {
        assert!(status.contains(line), "{status}");
    }
    let refused = std::fs::write(process.join("root/tmp/file"), "").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    let is_member = |cluster: &Value| {
        let members = cluster["members"].as_array().unwrap();
        members
            .iter()
            .any(|member| member["name"] == "pod" && member["shards"].as_array().is_some_and(|it| !it.is_empty()))
    };
    cluster.admin.wait_until("/api/v1/admin/runtime/cluster", "the pod has shards", is_member).await;
    expect_a_bundle_through_standard_output(&podman).await;
    // It ends in order.
    podman.succeed(&["stop", "--time", "45", "any"]).await;
    assert_eq!(podman.inspect("any", "{{.State.ExitCode}}").await, "0");
    tokio::time::timeout(WAIT_TIMEOUT, cluster.shutdown()).await.unwrap();
}

/// No file can be written in the container, and there is no journal.
async fn expect_a_bundle_through_standard_output(podman: &Podman) {
    let folder = tempfile::tempdir().unwrap();
    let (log, archive) = (folder.path().join("log"), folder.path().join("bundle.tar.gz"));
    std::fs::write(&log, "{\"message\":\"a line of the pod\"}\n").unwrap();
    let mut exec = podman.command("podman", &["exec", "--interactive", "any", "gpuaas", "support-bundle"]);
    exec.args(["--output", "-", "--log-file", "-"]).stdin(std::fs::File::open(&log).unwrap());
    exec.stdout(std::fs::File::create(&archive).unwrap());
    let output = tokio::task::spawn_blocking(move || exec.output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--gzip", "--to-stdout", "--wildcards", "--file"])
        .arg(&archive)
        .args(["*/log.jsonl", "*/manifest.json"]);
    let content = run(tar).await;
    assert!(content.contains("a line of the pod") && content.contains("database/members.json"), "{content}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_killed_at_the_end_of_its_grace_period_loses_nothing_acknowledged() {
    let Some(podman) = Podman::start() else { return };
    podman.load(&TestImage::shared().await, NAME).await;
    let mut cluster = TestCluster::start().await;
    cluster.replicas[0].stop().await;
    let (folder, listens) = (tempfile::tempdir().unwrap(), cluster.replicas[0].listens());
    write_settings(&cluster, listens, folder.path());
    serve(&podman, folder.path(), "killed", &["--read-only"]).await;
    podman.expect_ready("killed", listens).await;

    let (acknowledged, is_over) = (Mutex::new(Vec::<Uuid>::new()), AtomicBool::new(false));
    let client = |index: usize| {
        let (admin, acknowledged, is_over) = (cluster.admin.clone(), &acknowledged, &is_over);
        async move {
            for number in 0.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                let sku = sku_body(&format!("sku-{index}-{number}"), 1);
                let request = admin.request(reqwest::Method::POST, "/api/v1/admin/skus").json(&sku);
                let request = request.header("idempotency-key", Uuid::new_v4().to_string());
                // After the kill none is answered.
                if let Ok(answer) = admin.try_send(request).await
                    && answer.status == reqwest::StatusCode::CREATED
                {
                    acknowledged.lock().unwrap().push(id_of(&answer.body));
                }
            }
        }
    };
    let kill = async {
        let until = Instant::now() + WITHIN;
        while acknowledged.lock().unwrap().len() < 40 {
            assert!(Instant::now() < until, "nothing is acknowledged");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        // Commits in flight take longer than the grace period.
        cluster.delay_commits_by(Duration::from_secs(8)).await;
        podman.succeed(&["stop", "--time", "2", "killed"]).await;
        is_over.store(true, Ordering::Relaxed);
        podman.inspect("killed", "{{.State.ExitCode}}").await
    };
    let (code, _) = tokio::join!(kill, futures::future::join_all((0..4).map(client)));
    assert_eq!(code, "137", "it was killed");
    sqlx::raw_sql("DROP TRIGGER slow ON history").execute(&cluster.pool).await.unwrap();
    cluster.restart_replica(0).await;
    for sku in acknowledged.into_inner().unwrap() {
        cluster.admin.get(&format!("/api/v1/admin/skus/{sku}")).await.ok();
    }
    tokio::time::timeout(WAIT_TIMEOUT, cluster.shutdown()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_setting_ends_the_container_once_and_names_the_variable() {
    let Some(podman) = Podman::start() else { return };
    podman.load(&TestImage::shared().await, NAME).await;
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let incomplete = "SVC_DATABASE_URL=postgres://gpuaas:hunter2@127.0.0.1/gpuaas\nSVC_PUBLIC_LISTEN=8443\n";
    std::fs::write(folder.path().join("gpuaas.env"), incomplete).unwrap();
    for (file, named) in [
        ("gpuaas.env", "SVC_NATS_URL is not set"),
        ("gpuaas.env", "SVC_PUBLIC_LISTEN is "),
        ("absent.env", "SVC_ENV_FILE: /etc/gpuaas/absent.env"),
    ] {
        let volume = format!("{}:/etc/gpuaas:ro", folder.path().display());
        let variable = format!("SVC_ENV_FILE=/etc/gpuaas/{file}");
        let run = ["run", "--network", "host", "--read-only", "--volume", &volume, "--env", &variable, NAME];
        let output = podman.output(&run).await;
        let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert_eq!(output.status.code(), Some(78), "{printed}");
        assert!(printed.matches(named).count() == 1 && !printed.contains("hunter2"), "{printed}");
        assert_eq!(podman.inspect("--latest", "{{.RestartCount}}").await, "0");
    }
}
