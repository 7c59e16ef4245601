//! The operator's pages about nodes, run word by word on a bare machine: installation, drift and altered machines, reboot, update, a bad
//! update, a GPU with a fault, validations, logs, telemetry.
//!
//! Blocks that are marked `sh` are run in the administrator's shell, those that are marked `sh,node` by root on the machine. `$node`, `$host`
//! and the digests are what an administrator would know. The machine has NVIDIA's driver as `tests/fake-nvml` imitates it, its agent compares every two seconds, and everything else is as
//! it is shipped: package, units, environment file.

use crate::agent_package::bare_machine::{settings as package_settings_of, static_installer};
use crate::docs_recipes::{Followed, REFRESH, followed, transcript};
use crate::external_tools::{root, tools};
use fake_nvml::{FakeCuda, FakeMachine};
use local_servers::private_files;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};
use tests::cluster::fake_log_store::FakeLogStore;
use tests::cluster::{GPU_MEMORY_MIB, GPU_MODEL, NodeHandle, TestCluster};
use tests::package_registry::{PackageLayout, PackageRegistryServer, release_key};
use tests::systemd_container::{DiskFile, OTHERS_PORTS, SystemdContainer};

const AGENT: &str = "gpuaas-agent.service";
const SKU: &str = "h100x1";
const LIBRARIES: &str = "/usr/local/lib/nvidia";
const GPUS: &str = "/srv/gpus.json";
/// What the kernel's module shows in `/proc`, where no other file system can put it.
const MODULE: &str = "nvidia-module.service";
const MODULE_UNIT: &str = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=mount -t tmpfs -o nosuid,nodev,noexec,mode=0755 nvidia /proc/driver\n\
     ExecStart=mkdir /proc/driver/nvidia\nExecStart=sh -c 'echo \"ModifyDeviceFiles: 0\" >/proc/driver/nvidia/params'\n";
/// Many correctable memory errors: the GPU gets no new tenant until an operator clears it.
const XID: u64 = 92;
const WITHIN: Duration = Duration::from_secs(120);
/// An agent that finds itself too old for its control plane.
const TOO_OLD: &str = "#!/bin/sh\nexit 6\n";

/// Who runs a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shell {
    Administrator,
    Node,
}

/// The blocks below a heading of a page, up to the next one.
pub(crate) fn blocks(page: &str, title: &str) -> Vec<(Shell, String)> {
    let text = std::fs::read_to_string(root().join("deploy/docs/src/operator").join(page)).unwrap();
    let mut lines = text.lines().skip_while(|line| line.strip_prefix("## ") != Some(title));
    assert!(lines.next().is_some(), "{page} has no heading {title:?}");
    let (mut found, mut block): (Vec<_>, Option<(Shell, String)>) = (Vec::new(), None);
    // A block in a list is indented.
    let mut indent = 0;
    for line in lines.take_while(|line| !line.starts_with("## ")) {
        let text = line.trim_start();
        match (text, &mut block) {
            ("```sh" | "```sh,node", None) => {
                let shell = if text == "```sh" { Shell::Administrator } else { Shell::Node };
                indent = line.len() - text.len();
                block = Some((shell, String::new()));
            }
            ("```", Some(_)) => found.extend(block.take()),
            (text, Some((_, code))) => code.extend([line.get(indent..).unwrap_or(text), "\n"]),
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
        let installer = static_installer()?;
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let machine = SystemdContainer::start_from(&tools(), &[], &image(), None).expect("the container starts")?;
        let registry = PackageRegistryServer::start(&tools()).await;
        let packages = [package("1.3.0", None), package("1.4.0", None), package("1.5.0", Some(TOO_OLD))];
        for package in &packages {
            registry.push(package.folder.path()).await;
        }
        let [first, second, bad] = packages.map(|package| package.digest.to_string());
        let store = FakeLogStore::start().await;
        let folder = tempfile::tempdir().unwrap();
        let mut settings = package_settings(&registry, &first, &installer, folder.path());
        settings.extend([
            ("SVC_LOG_STORE_URL", store.url()),
            ("SVC_LOG_STORE_CA_PATH", store.authorities_path().display().to_string()),
        ]);
        let builder =
            settings.iter().fold(TestCluster::builder(), |builder, (name, value)| builder.variable(name, value));
        let mut cluster = builder.start().await;
        cluster.offer_sku(SKU, 1).await;
        let node = cluster.register(SKU).await;
        let checkout = followed(&cluster);
        Some(Self { cluster, node, machine, checkout, store, first, second, bad, _registry: registry })
    }

    /// The driver reports the GPU of the SKU, with these Xids.
    fn has_gpu(&self, xids: &[u64]) {
        self.drives(&gpus_with(xids));
    }

    /// The driver reports this machine.
    fn drives(&self, gpus: &FakeMachine) {
        self.machine.write(&format!("{GPUS}.new"), 0o644, &file_of(gpus));
        self.machine.run(&format!("mv {GPUS}.new {GPUS}"));
    }

    /// The kernel's module shows this parameter.
    fn has_parameter(&self, line: &str) {
        self.machine.run(&format!("echo '{line}' >/proc/driver/nvidia/params"));
    }

    /// The page about validations: a machine in order, and one whose GPU has lost half of its PCIe lanes.
    async fn follow_validation(&self) {
        self.follow("validation.md", "Tools on the nodes").await;
        self.follow("validation.md", "What a SKU wants").await;
        let printed = self.follow("validation.md", "When it runs").await;
        assert!(printed.contains("passed") && printed.contains("gpu_pcie_lanes"), "{printed}");
        let node = self.node.get().await;
        let measured = &node["validation"]["measurements"];
        for name in ["cpu_bogo_ops_per_second", "disk_read_mib_per_second", "gpu_memory_mib_per_second"] {
            assert!(measured[name].as_u64().is_some_and(|value| value > 0), "{name}: {node:#}");
        }
        assert_eq!((&node["validation"]["passed"], &node["state"]), (&json!(true), &json!("active")), "{node:#}");

        let mut half = gpus_with(&[]);
        half.gpus[0].pcie_width = Some((8, 16));
        self.drives(&half);
        self.follow("validation.md", "When it runs").await;
        let is_held = |node: &Value| node["quarantine_holds"][0]["author"] == "validation";
        let held = self.wait_until("held by its validation", is_held).await;
        let why = held["state_reason"]["message"].as_str().unwrap();
        assert!(why.contains("gpu_pcie_lanes is 8, and the SKU wants at least 16"), "{why}");
        self.drives(&gpus_with(&[]));
        let printed = self.follow("validation.md", "A machine that does not pass").await;
        assert!(printed.contains("gpu_pcie_lanes is 8") && printed.contains("must pass"), "{printed}");
        self.wait_until("free again", |node| node["state"] == "active" && node["gpus_free"] == 1).await;
    }

    async fn follow(&self, page: &str, title: &str) -> String {
        follow(page, title, &self.names(), &self.checkout, &|code| self.machine.attempt(code)).await
    }

    /// What an administrator knows.
    fn names(&self) -> [(&'static str, String); 5] {
        [
            ("node", self.node.id.to_string()),
            ("host", "127.0.0.1".to_owned()),
            ("sku", SKU.to_owned()),
            ("digest", self.second.clone()),
            ("bad_digest", self.bad.clone()),
        ]
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

/// Runs the blocks of a page's heading in their order, and returns what they printed.
pub(crate) async fn follow(
    page: &str,
    title: &str,
    names: &[(&str, String)],
    checkout: &Followed,
    machine: &(dyn Fn(&str) -> Result<String, String> + Sync),
) -> String {
    let mut printed = String::new();
    for (shell, code) in blocks(page, title) {
        let (went_well, text) = match shell {
            Shell::Administrator => administrator(&code, names, checkout).await,
            Shell::Node => match machine(&format!("cd /srv; set -e; {{ {code} }} 2>&1")) {
                Ok(text) => (true, text),
                Err(text) => (false, text),
            },
        };
        assert!(
            went_well,
            "{page}, {title}, by {shell:?}:\n{code}\n{text}\n{}",
            machine("journalctl --no-pager -o cat -n 60").unwrap_or_else(|printed| printed)
        );
        printed.push_str(&text);
    }
    printed
}

/// Runs a script in a shell in which the administrator is logged in, and knows these names.
async fn administrator(code: &str, names: &[(&str, String)], checkout: &Followed) -> (bool, String) {
    let names: String = names.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
    let login =
        "printf '%s\\n' \"$SVC_ADMIN_PASSWORD\" | gpuctl login --username \"$SVC_ADMIN_USERNAME\" --password-stdin\n";
    let script = format!("set -eu\n. .dev/env\nPATH=$PWD/target/debug:$PATH\n{login}{names}{code}");
    transcript(&script, checkout.path()).await
}

/// The settings of a control plane whose nodes pull the package with this digest through it.
pub(crate) fn package_settings(
    registry: &PackageRegistryServer,
    digest: &str,
    installer: &Path,
    folder: &Path,
) -> Vec<(&'static str, String)> {
    let mut settings = package_settings_of(registry, digest, "node-api", installer, folder);
    settings.push((REFRESH.0, REFRESH.1.to_owned()));
    settings
}

/// What the machine has before it is a node: the driver, and seconds for the agent's minutes.
fn image() -> Vec<DiskFile> {
    let interval = "[Service]\nExecStart=\nExecStart=/opt/gpuaas/current/bin/gpuaas-agent --env-file /etc/gpuaas/agent.env --executor system \
                    --integrity-interval-seconds 2\n";
    let mut files = driver();
    files.push(DiskFile::new(format!("/etc/systemd/system/{AGENT}.d/interval.conf"), 0o644, interval));
    files
}

/// NVIDIA's driver with one GPU, as the fake has it.
pub(crate) fn driver() -> Vec<DiskFile> {
    let built = tempfile::tempdir().unwrap();
    fake_nvml::install_cuda(built.path()).unwrap();
    let library = |name: &str| {
        DiskFile::new(format!("{LIBRARIES}/{name}"), 0o755, std::fs::read(built.path().join(name)).unwrap())
    };
    let driver = format!(
        "[Unit]\nWants={MODULE}\nAfter={MODULE}\n\n[Service]\nEnvironment=LD_LIBRARY_PATH={LIBRARIES} {}={GPUS}\n{OTHERS_PORTS}\n",
        fake_nvml::FILE
    );
    vec![
        library(fake_nvml::LIBRARY),
        library(fake_nvml::CUDA_LIBRARY),
        DiskFile::new(format!("/etc/systemd/system/{MODULE}"), 0o644, MODULE_UNIT),
        // The driver's rules make the device's node at each boot.
        DiskFile::new("/etc/tmpfiles.d/nvidia.conf", 0o644, "c /dev/nvidia0 0666 - - - 1:3\n"),
        DiskFile::new(format!("/etc/systemd/system/{AGENT}.d/driver.conf"), 0o644, driver),
        DiskFile::new(GPUS, 0o644, file_of(&gpus_with(&[]))),
    ]
}

/// What the fake driver is to report: the GPU of the SKU, with these Xids.
fn gpus_with(xids: &[u64]) -> FakeMachine {
    let mut gpus = FakeMachine::with_gpus(1);
    gpus.gpus[0].name = format!("NVIDIA {GPU_MODEL}");
    gpus.gpus[0].memory_mib = GPU_MEMORY_MIB;
    gpus.xids = xids.iter().map(|xid| (gpus.gpus[0].uuid.clone(), *xid)).collect();
    gpus.cuda = Some(FakeCuda { memory_mib: 4096, ..FakeCuda::default() });
    gpus
}

fn file_of(gpus: &FakeMachine) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gpus.json");
    gpus.write(&file).unwrap();
    std::fs::read(&file).unwrap()
}

/// A package of the built programs, or with another agent.
pub(crate) fn package(version: &str, agent: Option<&str>) -> PackageLayout {
    let folder = tempfile::tempdir().unwrap();
    let program = |name: &&str| {
        let to = folder.path().join(name);
        match agent.filter(|_| *name == "gpuaas-agent") {
            Some(script) => std::fs::write(&to, script).unwrap(),
            None => strip(&private_files::find_sibling(&std::env::current_exe().unwrap(), name).unwrap(), &to),
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
    let (went_well, text) = administrator(write, &site.names(), &site.checkout).await;
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

    let differs = site.follow("integrity.md", "Hardware and driver").await;
    assert!(differs.contains("EPYC 9654") && differs.contains("570.86.15"), "{differs}");
    let altered = site.follow("integrity.md", "Try it").await;
    for named in ["privilege/sudoers", "/etc/sudoers.d/try", "/etc/sudoers.d/ops", "package/altered"] {
        assert!(altered.contains(named), "{named}: {altered}");
    }
    site.follow("integrity.md", "Upgrades of the operating system").await;

    let before = site.node.get().await["agent"]["boot_id"].clone();
    site.follow("agents.md", "Reboot a node").await;
    site.machine.boot_again().await;
    site.wait_until("active after the reboot", |node| node["state"] == "active" && node["agent"]["boot_id"] != before)
        .await;

    site.follow("updates.md", "Update a node").await;
    site.in_use(&site.second).await;
    // The good version had the default's two minutes: a busy machine may take some of them.
    site.cluster.set_policy("node.update_commit_seconds", 15).await;
    let (_, doctor) = blocks("doctor.md", "On a node").remove(0);
    let found = site.machine.attempt(&doctor).unwrap_or_else(|found| found);
    assert!(found.contains("ok       settings"), "{found}");
    let printed = site.follow("updates.md", "A bad update").await;
    assert!(printed.contains("rolled back"), "{printed}");
    site.in_use(&site.second).await;

    site.has_gpu(&[XID]);
    let code = XID.to_string();
    let findings = |node: &Value| node["health"]["findings"].as_array().cloned().unwrap_or_default();
    let found = |node: &Value| findings(node).iter().any(|finding| finding["code"] == code.as_str());
    let sick = site.wait_until("found to be sick", found).await;
    assert_eq!(sick["gpus_free"], 0, "{sick}");
    site.follow("troubleshooting.md", "A GPU with a fault").await;
    site.wait_until("free again", |node| node["gpus_free"] == 1).await;

    site.has_parameter("ModifyDeviceFiles: 1");
    let withheld = site.wait_until("out of rent", |node| !node["unschedulable_reason"].is_null()).await;
    let why = withheld["unschedulable_reason"].as_str().unwrap();
    assert!(why.contains("driver/device_files") && why.contains("NVreg_ModifyDeviceFiles=0"), "{why}");
    site.has_parameter("ModifyDeviceFiles: 0");
    site.wait_until("in rent again", |node| node["unschedulable_reason"].is_null()).await;

    site.follow_validation().await;

    site.follow("logs.md", "The collector").await;
    let until = Instant::now() + WITHIN;
    while site.store.received().is_empty() {
        assert!(Instant::now() < until, "no lines arrive: {}", site.machine.journal("gpuaas-log-collector"));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let printed = site.follow("telemetry.md", "The telemetry edge of a node").await;
    assert!(printed.contains("ok"), "{printed}");
    // The commands by hand are harmless where no update is left.
    site.follow("updates.md", "When the finalizer cannot continue").await;
    site.cluster.shutdown().await;
}
