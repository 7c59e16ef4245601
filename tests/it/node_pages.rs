//! The operator's pages about nodes, run word by word on a bare machine: installation, reboot, update, a bad update, a GPU with a fault, logs,
//! telemetry.
//!
//! Blocks that are marked `sh` are run in the administrator's shell, those that are marked `sh,node` by root on the machine. `$node`, `$host`
//! and the digests are what an administrator would know. The machine has NVIDIA's driver as `tests/fake-nvml` imitates it, and everything else as
//! it is shipped: package, units, environment file.

use crate::docs_recipes::{Followed, REFRESH, followed, transcript};
use crate::external_tools::{root, tools};
use fake_nvml::FakeMachine;
use local_servers::files;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tests::cluster::fake_log_store::FakeLogStore;
use tests::cluster::{GPU_MEMORY_MIB, GPU_MODEL, NodeHandle, TestCluster};
use tests::package_registry::{PASSWORD, PackageLayout, PackageRegistryServer, USER, release_key};
use tests::skipped::report_skipped;
use tests::systemd_container::{OTHERS_PORTS, SystemdContainer};
use wire::PublicKey;

const AGENT: &str = "gpuaas-agent.service";
const SKU: &str = "h100x1";
const LIBRARIES: &str = "/usr/local/lib/nvidia";
const GPUS: &str = "/srv/gpus.json";
/// Many correctable memory errors: the GPU gets no new tenant until an operator clears it.
const XID: u64 = 92;
const WITHIN: Duration = Duration::from_secs(120);
/// An agent that finds itself too old for its control plane.
const TOO_OLD: &str = "#!/bin/sh\nexit 6\n";

/// Who runs a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shell {
    Administrator,
    Node,
}

/// The blocks below a heading of a page, up to the next one.
fn blocks(page: &str, title: &str) -> Vec<(Shell, String)> {
    let text = std::fs::read_to_string(root().join("deploy/docs/src/operator").join(page)).unwrap();
    let mut lines = text.lines().skip_while(|line| line.strip_prefix("## ") != Some(title));
    assert!(lines.next().is_some(), "{page} has no heading {title:?}");
    let (mut found, mut block): (Vec<_>, Option<(Shell, String)>) = (Vec::new(), None);
    for line in lines.take_while(|line| !line.starts_with("## ")) {
        match (line.trim_start(), &mut block) {
            ("```sh", None) => block = Some((Shell::Administrator, String::new())),
            ("```sh,node", None) => block = Some((Shell::Node, String::new())),
            ("```", Some(_)) => found.extend(block.take()),
            (line, Some((_, code))) => code.extend([line, "\n"]),
            (_, None) => {}
        }
    }
    assert!(!found.is_empty(), "{page} has no commands under {title:?}");
    found
}

/// A cluster, a registry with three packages, and a bare machine.
struct Site {
    cluster: TestCluster,
    node: NodeHandle,
    machine: SystemdContainer,
    checkout: Followed,
    store: FakeLogStore,
    first: String,
    second: String,
    bad: String,
    _registry: PackageRegistryServer,
}

impl Site {
    async fn new() -> Option<Self> {
        let Some(installer) = static_installer() else {
            report_skipped("it needs the static installer: `deploy/package --installer` compiles it");
            return None;
        };
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let machine = SystemdContainer::start(&tools(), &[]).expect("the container starts")?;
        let registry = PackageRegistryServer::start(&tools()).await;
        let packages = [package("1.3.0", None), package("1.4.0", None), package("1.5.0", Some(TOO_OLD))];
        for package in &packages {
            registry.push(package.folder.path()).await;
        }
        let [first, second, bad] = packages.map(|package| package.digest.to_string());
        let store = FakeLogStore::start().await;
        let folder = tempfile::tempdir().unwrap();
        let account = folder.path().join("account");
        std::fs::write(&account, format!("{USER}:{}\n", PASSWORD.0)).unwrap();
        let settings = [
            ("SVC_NODE_AGENT_PACKAGE_OCI_REF", registry.reference().to_string()),
            ("SVC_NODE_AGENT_PACKAGE_DIGEST", first.clone()),
            ("SVC_NODE_AGENT_PACKAGE_PULL_DELIVERY_MODE", "node-api".to_owned()),
            ("SVC_NODE_AGENT_PACKAGE_RELEASE_KEYS", PublicKey::from(&release_key()).to_string()),
            ("SVC_NODE_AGENT_PACKAGE_REGISTRY_CA_PATH", registry.authority.certificate_path().display().to_string()),
            ("SVC_NODE_AGENT_PACKAGE_PULL_ACCOUNT_PATH", account.display().to_string()),
            ("SVC_NODE_AGENT_INSTALLER_PATH", installer.display().to_string()),
            (REFRESH.0, REFRESH.1.to_owned()),
            ("SVC_LOG_STORE_URL", store.url()),
            ("SVC_LOG_STORE_CA_PATH", store.authorities_path().display().to_string()),
        ];
        let builder = TestCluster::builder().policy("node.update_commit_seconds", 15);
        let mut cluster =
            settings.iter().fold(builder, |builder, (name, value)| builder.variable(name, value)).start().await;
        cluster.offer_sku(SKU, 1).await;
        let node = cluster.register(SKU).await;
        let checkout = followed(&cluster);
        let site = Self { cluster, node, machine, checkout, store, first, second, bad, _registry: registry };
        site.install_driver();
        Some(site)
    }

    /// NVIDIA's driver with one GPU, as the fake has it.
    fn install_driver(&self) {
        let built = tempfile::tempdir().unwrap();
        fake_nvml::install(built.path()).unwrap();
        let library = std::fs::read(built.path().join(fake_nvml::LIBRARY)).unwrap();
        self.machine.run(&format!("mkdir -p {LIBRARIES} /etc/systemd/system/{AGENT}.d"));
        self.machine.write(&format!("{LIBRARIES}/{}", fake_nvml::LIBRARY), 0o755, &library);
        // The driver's rules make the device's node at each boot.
        self.machine.write("/etc/tmpfiles.d/nvidia.conf", 0o644, b"c /dev/nvidia0 0666 - - - 1:3\n");
        self.machine.run("systemd-tmpfiles --create nvidia.conf");
        let driver =
            format!("[Service]\nEnvironment=LD_LIBRARY_PATH={LIBRARIES} {}={GPUS}\n{OTHERS_PORTS}\n", fake_nvml::FILE);
        self.machine.write(&format!("/etc/systemd/system/{AGENT}.d/driver.conf"), 0o644, driver.as_bytes());
        self.has_gpu(&[]);
    }

    /// The driver reports the GPU of the SKU, with these Xids.
    fn has_gpu(&self, xids: &[u64]) {
        let mut gpus = FakeMachine::with_gpus(1);
        gpus.gpus[0].name = format!("NVIDIA {GPU_MODEL}");
        gpus.gpus[0].memory_mib = GPU_MEMORY_MIB;
        gpus.xids = xids.iter().map(|xid| (gpus.gpus[0].uuid.clone(), *xid)).collect();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gpus.json");
        gpus.write(&file).unwrap();
        self.machine.write(&format!("{GPUS}.new"), 0o644, &std::fs::read(&file).unwrap());
        self.machine.run(&format!("mv {GPUS}.new {GPUS}"));
    }

    /// Runs the blocks of a page's heading in their order, and returns what they printed.
    async fn follow(&self, page: &str, title: &str) -> String {
        let mut printed = String::new();
        for (shell, code) in blocks(page, title) {
            let (went_well, text) = match shell {
                Shell::Administrator => self.administrator(&code).await,
                Shell::Node => match self.machine.attempt(&format!("cd /srv; set -e; {{ {code} }} 2>&1")) {
                    Ok(text) => (true, text),
                    Err(text) => (false, text),
                },
            };
            assert!(
                went_well,
                "{page}, {title}, by {shell:?}:\n{code}\n{text}\n{}",
                self.machine.run("journalctl --no-pager -o cat -n 60")
            );
            printed.push_str(&text);
        }
        printed
    }

    /// Runs a script in a shell in which the administrator is logged in, and knows these names.
    async fn administrator(&self, code: &str) -> (bool, String) {
        let names = [
            ("node", self.node.id.to_string()),
            ("host", "127.0.0.1".to_owned()),
            ("digest", self.second.clone()),
            ("bad_digest", self.bad.clone()),
        ];
        let names: String = names.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
        let login = "printf '%s\\n' \"$SVC_ADMIN_PASSWORD\" | gpuctl login --username \"$SVC_ADMIN_USERNAME\" --password-stdin\n";
        let script = format!("set -eu\n. .dev/env\nPATH=$PWD/target/debug:$PATH\n{login}{names}{code}");
        transcript(&script, self.checkout.path()).await
    }

    /// Waits until the node is so. A failure has the agent's journal.
    async fn wait_until(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + WITHIN;
        loop {
            let node = self.node.get().await;
            if is_so(&node) {
                return node;
            }
            assert!(Instant::now() < until, "not {what}: {node:#}\n{}", self.machine.journal(AGENT));
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    async fn in_use(&self, digest: &str) {
        let pid = self.machine.property(AGENT, "MainPID");
        let program = self.machine.run(&format!("readlink /proc/{pid}/exe"));
        assert!(program.contains(digest.split_once(':').unwrap().1), "{program}");
    }
}

/// The static installer that `deploy/test` has compiled.
fn static_installer() -> Option<PathBuf> {
    let programs = files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas-agent").unwrap();
    let target = programs.parent()?.parent()?;
    let found = target.join(format!("{}-unknown-linux-musl/installer/gpuaas-installer", std::env::consts::ARCH));
    found.is_file().then_some(found)
}

/// A package of the built programs, or with another agent.
fn package(version: &str, agent: Option<&str>) -> PackageLayout {
    let folder = tempfile::tempdir().unwrap();
    let program = |name: &&str| {
        let to = folder.path().join(name);
        match agent.filter(|_| *name == "gpuaas-agent") {
            Some(script) => std::fs::write(&to, script).unwrap(),
            None => strip(&files::find_sibling(&std::env::current_exe().unwrap(), name).unwrap(), &to),
        }
        to
    };
    let programs = agent_package::contents::PROGRAMS.iter().map(program).collect();
    PackageLayout::of(version, programs, &root().join("deploy/systemd"), Some(&release_key()))
}

fn strip(program: &Path, to: &Path) {
    let done = std::process::Command::new("strip").arg("-o").arg(to).arg(program).status().unwrap();
    assert!(done.success(), "{}", program.display());
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_about_nodes_hold_word_by_word_on_a_bare_machine() {
    let Some(mut site) = Site::new().await else { return };

    // The script goes to the machine as an administrator would copy it.
    let pages = blocks("packages.md", "Bring a bare machine in");
    let [(Shell::Administrator, write), (Shell::Node, run)] = &pages[..] else { panic!("{pages:?}") };
    let (went_well, text) = site.administrator(write).await;
    assert!(went_well, "{text}");
    let script = std::fs::read(site.checkout.path().join("bootstrap.sh")).unwrap();
    let text = String::from_utf8_lossy(&script);
    let token = text.lines().find_map(|line| line.split_once("SVC_ENROLLMENT_TOKEN='\\''")).unwrap().1;
    site.cluster.register_secret("an enrollment token", token.split('\'').next().unwrap().trim_end_matches('\\'));
    site.machine.write("/srv/bootstrap.sh", 0o600, &script);
    site.machine.run(&format!("cd /srv; {run}"));
    site.wait_until("active", |node| node["state"] == "active").await;
    site.in_use(&site.first).await;
    site.follow("packages.md", "On the machine").await;

    let before = site.node.get().await["agent"]["boot_id"].clone();
    site.follow("agents.md", "Reboot a node").await;
    site.machine.boot_again().await;
    site.wait_until("active after the reboot", |node| node["state"] == "active" && node["agent"]["boot_id"] != before)
        .await;

    site.follow("updates.md", "Update a node").await;
    site.in_use(&site.second).await;
    let printed = site.follow("updates.md", "A bad update").await;
    assert!(printed.contains("rolled back"), "{printed}");
    site.in_use(&site.second).await;

    site.has_gpu(&[XID]);
    let code = XID.to_string();
    let found = |node: &Value| node["health"]["findings"][0]["code"] == code.as_str();
    let sick = site.wait_until("found to be sick", found).await;
    assert_eq!(sick["gpus_free"], 0, "{sick}");
    site.follow("troubleshooting.md", "A GPU with a fault").await;
    site.wait_until("free again", |node| node["gpus_free"] == 1).await;

    site.follow("logs.md", "The collector").await;
    let until = Instant::now() + WITHIN;
    while site.store.received().is_empty() {
        assert!(Instant::now() < until, "no lines arrive: {}", site.machine.journal("gpuaas-log-collector"));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let printed = site.follow("telemetry.md", "The telemetry edge of a node").await;
    assert!(printed.contains("ok"), "{printed}");
    site.cluster.shutdown().await;
}
