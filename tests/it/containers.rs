//! Containers by podman, in a store of their own, from the image that `deploy/package images` makes of the program under test.

use crate::external_tools::{root, run};
use local_servers::private_files;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::Uid;
use reqwest::StatusCode;
use secrecy::ExposeSecret as _;
use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use supervisors::dev::replica::ListenAddresses;
use tests::cluster::TestCluster;
use tests::skipped_tests::report_skipped;

const PROGRAMS: [&str; 4] = ["podman", "runc", "buildah", "skopeo"];
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The open files that podman gives every container.
const OPEN_FILES: u64 = 1_048_576;
const WITHIN: Duration = Duration::from_secs(90);

/// runc, where the limits of this machine are lower and may not be raised: containers have its own.
const WITHOUT_LIMITS: &str = r#"#!/bin/sh
file= previous=
for argument; do
    case $previous in
        --bundle | -b) file=$argument/config.json ;;
        --process) file=$argument ;;
    esac
    previous=$argument
done
[ -z "$file" ] || sed -i 's|"rlimits":\[[^]]*\]|"rlimits":[]|' "$file"
exec runc "$@"
"#;

/// Podman with images, containers and secrets of this test alone, which are gone with it.
pub(crate) struct Podman {
    folder: tempfile::TempDir,
}

impl Podman {
    /// `None` where this machine cannot run containers, which is reported as a test not run.
    pub(crate) fn start() -> Option<Self> {
        if !Uid::effective().is_root() {
            report_skipped("it runs containers, which needs root");
            return None;
        }
        let is_there = |name: &&str| PATH.split(':').any(|folder| Path::new(folder).join(name).is_file());
        if !PROGRAMS.iter().all(is_there) {
            report_skipped("it runs containers by podman, which `deploy/test --tools` installs on Debian");
            return None;
        }
        let folder = tempfile::Builder::new().prefix("gpuaas-podman-").tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        for name in ["tmp", "home", "storage"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        // In memory, since each layer is written through to the disk otherwise.
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "mode=0711", "tmpfs", &at("storage")]).status();
        assert!(mounted.unwrap().success(), "{} cannot be mounted", at("storage"));
        std::fs::write(at("runc"), WITHOUT_LIMITS).unwrap();
        std::fs::set_permissions(at("runc"), std::fs::Permissions::from_mode(0o755)).unwrap();
        let may_raise = getrlimit(Resource::RLIMIT_NOFILE).unwrap().1 >= OPEN_FILES;
        let runtime = if may_raise { "runc" } else { "limits" };
        // Locks in files: those in shared memory are of the whole machine.
        let engine = format!(
            "[engine]\nruntime = \"{runtime}\"\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\nlock_type = \"file\"\n\
             static_dir = \"{}\"\ntmp_dir = \"{}\"\nvolume_path = \"{}\"\n[engine.runtimes]\nlimits = [\"{}\"]\n",
            at("static"),
            at("run"),
            at("volumes"),
            at("runc"),
        );
        std::fs::write(at("containers.conf"), engine).unwrap();
        let storage = format!(
            "[storage]\ndriver = \"overlay\"\nrunroot = \"{}\"\ngraphroot = \"{}\"\n",
            at("storage-run"),
            at("storage")
        );
        std::fs::write(at("storage.conf"), storage).unwrap();
        std::fs::write(at("auth.json"), "{}").unwrap();
        Some(Self { folder })
    }

    /// Variables by which podman, and programs that run it, use this store.
    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        let at = |name: &str| self.folder.path().join(name).display().to_string();
        vec![
            ("PATH", PATH.to_owned()),
            ("CONTAINERS_CONF", at("containers.conf")),
            ("CONTAINERS_STORAGE_CONF", at("storage.conf")),
            ("REGISTRY_AUTH_FILE", at("auth.json")),
            ("TMPDIR", at("tmp")),
            ("HOME", at("home")),
        ]
    }

    pub(crate) fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.env_clear().envs(self.environment()).args(arguments);
        command
    }

    pub(crate) async fn output(&self, arguments: &[&str]) -> Output {
        let mut command = self.command("podman", arguments);
        tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap()
    }

    /// Runs podman to its end, which must be a good one, and returns what it printed.
    pub(crate) async fn succeed(&self, arguments: &[&str]) -> String {
        run(self.command("podman", arguments)).await.trim().to_owned()
    }

    /// The image under test under this name.
    pub(crate) async fn load(&self, image: &TestImage, name: &str) {
        let (from, to) = (format!("oci:{}", image.layout().display()), format!("containers-storage:{name}"));
        run(self.command("skopeo", &["--insecure-policy", "copy", "--quiet", &from, &to])).await;
    }

    /// Waits until the container's process serves at its operators' address.
    pub(crate) async fn expect_ready(&self, container: &str, listens: ListenAddresses) {
        let url = format!("http://{}/api/v1/readyz", listens.operations);
        let until = Instant::now() + WITHIN;
        loop {
            let status = reqwest::get(&url).await.map(|answer| answer.status());
            if matches!(status, Ok(StatusCode::OK)) {
                return;
            }
            if Instant::now() > until || self.inspect(container, "{{.State.Status}}").await == "exited" {
                let logs = self.output(&["logs", "--tail", "50", container]).await;
                panic!(
                    "{container} is not ready: {status:?}\n{}",
                    String::from_utf8_lossy(&[logs.stdout, logs.stderr].concat())
                );
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    pub(crate) async fn inspect(&self, container: &str, format: &str) -> String {
        self.succeed(&["inspect", "--format", format, container]).await
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        for arguments in
            [&["pod", "rm", "--all", "--force", "--time", "0"][..], &["rm", "--all", "--force", "--time", "0"]]
        {
            let _ = self.command("podman", arguments).output();
        }
        // What the driver itself has mounted goes first.
        for mounted in ["storage/overlay", "storage"] {
            let _ = Command::new("umount").arg("--lazy").arg(self.folder.path().join(mounted)).output();
        }
    }
}

/// An image as `deploy/package images` has made it.
pub(crate) struct TestImage {
    pub(crate) folder: PathBuf,
}

impl TestImage {
    pub(crate) fn layout(&self) -> PathBuf {
        self.folder.join("layout")
    }

    pub(crate) fn digest(&self) -> String {
        std::fs::read_to_string(self.folder.join("digest")).unwrap().trim().to_owned()
    }

    /// Makes it from the program under test.
    pub(crate) async fn build(folder: &Path, more: &[&str]) -> Self {
        let mut build = Command::new(root().join("deploy/package"));
        build.args(["images", "--program"]).arg(gpuaas()).arg("--out").arg(folder).args(more);
        run(build).await;
        Self { folder: folder.to_owned() }
    }

    /// The one that the tests of a run share: made by the first one that needs it.
    pub(crate) async fn shared() -> Self {
        tokio::task::spawn_blocking(lock_shared_folder).await.unwrap().made().await
    }
}

fn gpuaas() -> PathBuf {
    private_files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas").unwrap()
}

/// The folder of the shared image, for as long as one test makes it.
struct SharedFolder {
    folder: PathBuf,
    _lock: Flock<std::fs::File>,
}

fn lock_shared_folder() -> SharedFolder {
    let folder = gpuaas().with_file_name("image-of-the-tests");
    std::fs::create_dir_all(&folder).unwrap();
    let file = std::fs::File::create(folder.join("lock")).unwrap();
    let _lock = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, error)| error).unwrap();
    SharedFolder { folder, _lock }
}

impl SharedFolder {
    async fn made(self) -> TestImage {
        let about = |path: &Path| {
            let about = std::fs::metadata(path).unwrap();
            format!("{:?} {}", about.modified().unwrap(), about.len())
        };
        let mut head = Command::new("git");
        head.args(["rev-parse", "HEAD"]).current_dir(root());
        let made_of = [about(&gpuaas()), about(&root().join("deploy/images/build")), run(head).await].join("\n");
        let stamp = self.folder.join("made-of");
        if std::fs::read_to_string(&stamp).unwrap_or_default() != made_of {
            TestImage::build(&self.folder, &[]).await;
            std::fs::write(&stamp, made_of).unwrap();
        }
        TestImage { folder: self.folder.clone() }
    }
}

/// Writes what a pod in the place of the cluster's first replica has in `/etc/gpuaas`: `gpuaas.env` and its files.
/// Every user may read them.
pub(crate) fn write_settings(cluster: &TestCluster, listens: ListenAddresses, folder: &Path) {
    let settings = &cluster.settings;
    let name = cluster.replicas[0].name();
    for (file, from) in [
        ("kek", &settings.key_ring_path),
        ("tls.pem", &settings.certificate.certificate_path),
        ("tls.key", &settings.certificate.key_path),
        ("ca.pem", &settings.ca_path),
        ("database-ca.pem", &settings.database_ca_path),
    ] {
        std::fs::copy(from, folder.join(file)).unwrap();
        std::fs::set_permissions(folder.join(file), std::fs::Permissions::from_mode(0o644)).unwrap();
    }
    let variables = [
        ("SVC_DATABASE_URL", settings.database_url.expose_secret().to_owned()),
        ("SVC_DATABASE_CA_PATH", "/etc/gpuaas/database-ca.pem".to_owned()),
        ("SVC_NATS_URL", cluster.nats.url(name).unwrap().expose_secret().to_owned()),
        ("SVC_NATS_CA_PATH", "/etc/gpuaas/ca.pem".to_owned()),
        ("SVC_KEK_FILE", "/etc/gpuaas/kek".to_owned()),
        ("SVC_TLS_CERT_PATH", "/etc/gpuaas/tls.pem".to_owned()),
        ("SVC_TLS_KEY_PATH", "/etc/gpuaas/tls.key".to_owned()),
        ("SVC_TLS_CA_PATH", "/etc/gpuaas/ca.pem".to_owned()),
        ("SVC_PUBLIC_URL", settings.public_url.clone()),
        ("SVC_NODE_PUBLIC_URL", settings.node_public_url.clone()),
        ("SVC_PUBLIC_LISTEN", listens.public.to_string()),
        ("SVC_NODE_LISTEN", listens.node.to_string()),
        ("SVC_WEBHOOK_LISTEN", listens.webhook.to_string()),
        ("SVC_OPERATIONS_LISTEN", listens.operations.to_string()),
        ("SVC_OIDC_ISSUER", settings.issuer.clone()),
        ("SVC_OIDC_AUDIENCE", settings.audience.clone()),
    ];
    let mut text = String::new();
    for (name, value) in &variables {
        writeln!(text, "{name}={value}").unwrap();
    }
    std::fs::write(folder.join("gpuaas.env"), text).unwrap();
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
}
