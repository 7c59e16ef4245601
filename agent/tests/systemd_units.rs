//! The units under `deploy/systemd`, as systemd's own tools read them.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

mod skipped_tests;

/// The units in the package.
fn units() -> Vec<PathBuf> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("deploy/systemd");
    fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// The agent unit's values of these settings.
fn agent_unit_settings(names: &[&str]) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("deploy/systemd/gpuaas-agent.service");
    let text = fs::read_to_string(path).unwrap();
    let lines = text.lines().filter_map(|line| line.split_once('='));
    lines.filter(|(name, _)| names.contains(name)).map(|(_, value)| value.to_owned()).collect()
}

/// The agent unit's capability bounding set in the form of `setpriv`.
fn bounding_set() -> String {
    let left = agent_unit_settings(&["CapabilityBoundingSet"]).join(" ").to_lowercase();
    let names = left.split_whitespace().map(|name| name.strip_prefix("cap_").unwrap());
    // A capability that this machine does not have can be neither granted nor dropped.
    let has = Command::new("setpriv").arg("--dump").output().unwrap().stdout;
    let has = String::from_utf8(has).unwrap();
    let here = has.lines().find_map(|line| line.strip_prefix("Capability bounding set: ")).unwrap();
    let names = names.filter(|name| here.split(',').any(|here| here == *name));
    ["-all".to_owned()].into_iter().chain(names.map(|name| format!("+{name}"))).collect::<Vec<_>>().join(",")
}

fn analyze(args: &[&str], unit: &Path) -> (bool, String) {
    let ran = Command::new("systemd-analyze").args(args).arg(unit).output().expect("systemd-analyze is installed");
    let output = [ran.stdout, ran.stderr].map(|output| String::from_utf8_lossy(&output).into_owned()).concat();
    (ran.status.success(), output)
}

#[test]
fn systemd_reads_every_unit_without_a_complaint() {
    let units = units();
    assert_eq!(units.len(), 5);
    for unit in units {
        let (_, output) = analyze(&["verify"], &unit);
        // The programs are not installed here. That they start under the units is tested on a booted machine
        // (tests/it/systemd_installation.rs).
        let complaints: Vec<_> = output.lines().filter(|line| !line.contains("/usr/local/bin/gpuaas")).collect();
        assert!(complaints.is_empty(), "{}: {complaints:#?}", unit.display());
    }
}

#[test]
fn unit_exposure_stays_within_its_bound() {
    for unit in units() {
        // In tenths: a control plane and a telemetry edge need their sockets only, a collector is root without privileges, a
        // finalizer writes units; an agent is root
        // on a machine with tenants, may have no mounts of its own, no filter that tenants would inherit, and makes rules of the network.
        let limit = match unit.file_name().unwrap().to_str().unwrap() {
            "gpuaas.service" | "gpuaas-telemetry-edge.service" => "15",
            "gpuaas-log-collector.service" => "25",
            "gpuaas-finalizer.service" => "25",
            _ => "89",
        };
        let (ok, output) = analyze(&["security", "--offline=yes", &format!("--threshold={limit}")], &unit);
        assert!(ok, "{}", output.lines().last().unwrap_or_default());
    }
}

/// NATS has no unit in its package: the book has one.
#[test]
fn unit_of_nats_in_the_book_is_read_without_a_complaint_and_its_exposure_stays_within_its_bound() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("deploy/docs/src/operator/install.md");
    let page = fs::read_to_string(page).unwrap();
    let (_, rest) = page.split_once("<<'UNIT'\n").unwrap();
    let (unit, _) = rest.split_once("\nUNIT\n").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("nats-server.service");
    // The program is not installed here.
    fs::write(&file, format!("{}\n", unit.replace("ExecStart=nats-server", "ExecStart=/bin/true"))).unwrap();
    let (_, output) = analyze(&["verify"], &file);
    assert_eq!(output, "");
    let (ok, output) = analyze(&["security", "--offline=yes", "--threshold=20"], &file);
    assert!(ok, "{}", output.lines().last().unwrap_or_default());
}

#[test]
fn irrevocable_restrictions_of_the_agent_unit_are_not_set() {
    // Filters of system calls and namespaces are inherited by every descendant, irrevocably.
    let for_good = [
        "LockPersonality",
        "MemoryDenyWriteExecute",
        "PrivateUsers",
        "ProtectClock",
        "ProtectHostname",
        "RestrictAddressFamilies",
        "RestrictNamespaces",
        "RestrictRealtime",
        "RestrictSUIDSGID",
        "SystemCallArchitectures",
        "SystemCallFilter",
    ];
    assert_eq!(agent_unit_settings(&for_good), Vec::<String>::new());
    assert_eq!(agent_unit_settings(&["NoNewPrivileges"]), ["no"]);
    // The soft limits, which a process may raise itself.
    assert_eq!(agent_unit_settings(&["LimitCORE", "LimitNPROC", "LimitNOFILE"]), ["0:infinity"]);
}

#[test]
fn agent_unit_keeps_as_many_descriptors_as_the_agent_stores() {
    let settings = agent_unit_settings(&["Type", "FileDescriptorStoreMax", "KillMode"]);
    let expected = ["notify".to_owned(), "process".to_owned(), agent::service_manager::MAX_DESCRIPTORS.to_string()];
    assert_eq!(settings, expected);
}

/// An sshd that admits root with one key, on a port that only root may listen on.
struct Sshd {
    folder: tempfile::TempDir,
    port: u16,
    running: Child,
}

impl Sshd {
    /// Started with the agent unit's capabilities.
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for key in ["host_key", "key"] {
            let mut made = Command::new("ssh-keygen");
            made.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(folder.path().join(key));
            assert!(made.status().unwrap().success());
        }
        let port = (600..1024).rev().find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).unwrap();
        let at = folder.path().display();
        let config = format!(
            "ListenAddress 127.0.0.1:{port}\nHostKey {at}/host_key\nPidFile none\nAuthorizedKeysFile {at}/key.pub\nStrictModes no\n\
             PermitRootLogin prohibit-password\nUsePAM no\n"
        );
        fs::write(folder.path().join("config"), config).unwrap();
        let mut running = Command::new("setpriv");
        running.args(["--bounding-set", &bounding_set(), "/usr/sbin/sshd", "-D", "-e", "-f"]);
        running.arg(folder.path().join("config")).stderr(Stdio::piped());
        let running = running.spawn().unwrap();
        Self { folder, port, running }
    }

    fn runs(&self, command: &str) -> bool {
        let mut ssh = Command::new("ssh");
        ssh.args([
            "-F",
            "none",
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
        ]);
        ssh.args(["-o", "ConnectionAttempts=60", "-o", "IdentitiesOnly=yes", "-p", &self.port.to_string(), "-i"]);
        ssh.arg(self.folder.path().join("key")).args(["root@127.0.0.1", command]).status().unwrap().success()
    }
}

#[test]
fn agent_unit_capabilities_suffice_for_sshd_logins() {
    if !nix::unistd::Uid::effective().is_root() || !Path::new("/usr/sbin/sshd").exists() {
        return skipped_tests::report_skipped("it needs root and openssh-server");
    }
    let _ = fs::create_dir("/run/sshd");
    let mut sshd = Sshd::start();
    let is_in = sshd.runs("true");
    sshd.running.kill().unwrap();
    let output = sshd.running.wait_with_output().unwrap().stderr;
    assert!(is_in, "{}", String::from_utf8_lossy(&output));
}
