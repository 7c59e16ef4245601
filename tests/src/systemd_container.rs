//! A disposable Debian in a container that systemd boots: the tree that `deploy/lib.sh` made, under an overlay in memory. Its network is
//! the host's, so that servers on the loopback are reachable in both directions.

use crate::skipped::report_skipped;
use anyhow::Context as _;
use local_servers::process::{ChildProcess, Launch, tail};
use nix::unistd::Uid;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Mounts the tree, `$1`, under an overlay at `$2`, and boots it. The mounts are this process's own and end with it.
const BOOT: &str = r#"
set -e
tree=$1 run=$2 nspawn=$3
shift 3
mount -t tmpfs -o mode=0755 tmpfs "$run"
mkdir "$run/upper" "$run/work" "$run/root"
mount -t overlay overlay -o "lowerdir=$tree,upperdir=$run/upper,workdir=$run/work" "$run/root"
exec "$nspawn" --boot --directory="$run/root" --register=no --keep-unit --console=pipe --timezone=off --resolv-conf=off \
  --machine=gpuaas-test --system-call-filter=bpf --capability=all "$@"
"#;
const BOOTS_WITHIN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A running container. Dropping it stops it.
pub struct SystemdContainer {
    process: ChildProcess,
    init: u32,
    _folder: tempfile::TempDir,
}

impl SystemdContainer {
    /// Boots a container with these programs in `/usr/local/bin`. `None` if this machine cannot, which is reported as a test not run.
    ///
    /// # Errors
    /// If the container cannot be started.
    pub fn start(tools: &Path, programs: &[PathBuf]) -> anyhow::Result<Option<Self>> {
        if !Uid::effective().is_root() {
            report_skipped("it boots systemd in a container, which needs root");
            return Ok(None);
        }
        let made = tools.join("machine");
        if !made.join("made-of").is_file() {
            report_skipped("it boots systemd in a container, which `deploy/test --tools` makes on Debian");
            return Ok(None);
        }
        let folder = tempfile::tempdir()?;
        let run = folder.path().join("machine");
        std::fs::create_dir(&run)?;
        let libraries = format!("{}-linux-gnu/systemd", std::env::consts::ARCH);
        let mut launch = Launch::new("systemd-nspawn", "/usr/bin/unshare", folder.path().join("console.log"))
            .arguments(["--mount", "--propagation", "private", "sh", "-c", BOOT, "sh"])
            .argument(made.join("tree"))
            .argument(&run)
            .argument(made.join("programs/usr/bin/systemd-nspawn"))
            // The unified hierarchy is what enforces the units' device rules.
            .variable("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY", "1")
            .variable("LD_LIBRARY_PATH", made.join("programs/usr/lib").join(libraries));
        for program in programs {
            let name = program.file_name().context("a program has a name")?.to_string_lossy();
            launch = launch.argument(format!("--bind-ro={}:/usr/local/bin/{name}", program.display()));
        }
        let process = launch.spawn().context("the container cannot be started")?;
        let mut booted = Self { process, init: 0, _folder: folder };
        let until = Instant::now() + BOOTS_WITHIN;
        while !booted.is_up() {
            let log = booted.process.log().to_owned();
            assert!(booted.process.is_running(), "systemd-nspawn ended: {}", tail(&log, 20));
            assert!(Instant::now() < until, "the machine does not boot: {}", tail(&log, 20));
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(Some(booted))
    }

    fn is_up(&mut self) -> bool {
        let pid = self.process.pid();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let Some(init) = children.split_whitespace().next().and_then(|child| child.parse().ok()) else { return false };
        self.init = init;
        self.attempt("systemctl is-system-running | grep -qx -e running -e degraded").is_ok()
    }

    /// Runs a shell command as root in it, and returns its output.
    ///
    /// # Panics
    /// If it fails.
    pub fn run(&self, command: &str) -> String {
        self.attempt(command).unwrap_or_else(|printed| panic!("{command}: {printed}"))
    }

    /// # Errors
    /// The command's output, if it fails.
    pub fn attempt(&self, command: &str) -> Result<String, String> {
        self.attempt_with(command, b"")
    }

    fn attempt_with(&self, command: &str, input: &[u8]) -> Result<String, String> {
        let mut nsenter = Command::new("nsenter");
        nsenter.args(["--target", &self.init.to_string(), "--all", "sh", "-c", command]);
        nsenter.env_clear().env("PATH", "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin");
        nsenter.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = nsenter.spawn().map_err(|error| error.to_string())?;
        child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(input)).map_err(|error| error.to_string())?;
        let output = child.wait_with_output().map_err(|error| error.to_string())?;
        let mut printed = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(printed);
        }
        let _ = write!(printed, "{}{}", String::from_utf8_lossy(&output.stderr), output.status);
        Err(printed)
    }

    /// Writes a file that belongs to root.
    pub fn write(&self, path: &str, mode: u32, content: &[u8]) {
        let command = format!("umask 077; cat > {path} && chmod {mode:04o} {path}");
        self.attempt_with(&command, content).unwrap_or_else(|printed| panic!("{path}: {printed}"));
    }

    /// A property of a unit, as `systemctl show` gives it.
    pub fn property(&self, unit: &str, name: &str) -> String {
        self.run(&format!("systemctl show --value -p {name} {unit}")).trim().to_owned()
    }

    /// Waits until a property of a unit has this value.
    pub async fn expect_property(&self, unit: &str, name: &str, value: &str) {
        let until = Instant::now() + BOOTS_WITHIN;
        loop {
            let is = self.property(unit, name);
            if is == value {
                return;
            }
            assert!(Instant::now() < until, "{unit}: {name} is {is}, not {value}\n{}", self.journal(unit));
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// The journal of a unit.
    pub fn journal(&self, unit: &str) -> String {
        self.run(&format!("journalctl --no-pager -o cat -u {unit}"))
    }
}
