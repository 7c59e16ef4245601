//! A disposable Debian in a container that systemd boots: the tree that `deploy/lib.sh` made, under an overlay in memory. Its network is
//! the host's, so that servers on the loopback are reachable in both directions.

mod disk;

pub use disk::{Deployment, DiskFile};

use crate::skipped_tests::report_skipped;
use anyhow::Context as _;
use local_servers::process::{ChildProcess, Launch, tail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Mounts the tree, `$1`, under an overlay at `$2`. The mounts are this process's own and end with it.
const DISK: &str = r#"
set -e
tree=$1 run=$2
mount -t tmpfs -o mode=0755 tmpfs "$run"
mkdir "$run/upper" "$run/work" "$run/root"
mount -t overlay overlay -o "lowerdir=$tree,upperdir=$run/upper,workdir=$run/work" "$run/root"
touch "$run/mounted"
exec sleep infinity
"#;
/// The options of `systemd-nspawn`, besides the directory.
const BOOT: [&str; 9] = [
    "--boot",
    "--register=no",
    "--keep-unit",
    "--console=pipe",
    "--timezone=off",
    "--resolv-conf=off",
    "--hostname=gpuaas-test",
    "--system-call-filter=bpf",
    "--capability=all",
];
/// Runs a program in a control group of its own: beside another machine in the same one, units of the same name would collide.
const IN_CONTROL_GROUP: &str = r#"
set -e
name=$1
shift
for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do
    [ -w "$hierarchy/cgroup.procs" ] || continue
    mkdir -p "$hierarchy/$name"
    echo $$ >"$hierarchy/$name/cgroup.procs"
done
exec "$@"
"#;
/// Where control groups may be mounted.
const HIERARCHIES: [&str; 3] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"];
/// The exit code of `systemd-nspawn` when its machine reboots.
const REBOOTS: i32 = 133;
/// The line of a unit by which its agent ignores listeners, and makes no rules: the network is the host's, where other tests run.
pub const OTHERS_PORTS: &str = "Environment=SVC_NODE_AGENT_IGNORED_PORTS=1-65535 SVC_NODE_AGENT_LOOPBACK_GUARD=off";
const BOOTS_WITHIN: Duration = Duration::from_secs(120);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A running container. Dropping it stops it.
pub struct SystemdContainer {
    process: ChildProcess,
    init: u32,
    /// Holds the mounts, from boot to boot.
    disk: ChildProcess,
    programs: Vec<PathBuf>,
    tools: PathBuf,
    /// Removed when the processes have ended: fields are dropped in their order.
    control_group: ControlGroup,
    folder: tempfile::TempDir,
}

/// The name of a container's control group, which is removed with it.
struct ControlGroup(String);

impl ControlGroup {
    fn remove(&self) {
        for hierarchy in HIERARCHIES {
            remove_groups(&Path::new(hierarchy).join(&self.0));
        }
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Removes a control group and those below it, as far as no process is left in them.
fn remove_groups(group: &Path) {
    let below = std::fs::read_dir(group).into_iter().flatten().flatten();
    for entry in below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove_groups(&entry.path());
    }
    let _ = std::fs::remove_dir(group);
}

impl SystemdContainer {
    /// Whether this machine can boot one. If not, that is reported as a test not run.
    #[must_use]
    pub fn is_possible(tools: &Path) -> bool {
        if !Uid::effective().is_root() {
            report_skipped("it boots systemd in a container, which needs root");
            return false;
        }
        if !tools.join("machine/made-of").is_file() {
            report_skipped("it boots systemd in a container, which `deploy/test --tools` makes on Debian");
            return false;
        }
        true
    }

    /// Boots a container with these programs in `/usr/local/bin`. `None` if this machine cannot, which is reported as a test not run.
    ///
    /// # Errors
    /// If the container cannot be started.
    pub fn start(tools: &Path, programs: &[PathBuf]) -> anyhow::Result<Option<Self>> {
        Self::start_from(tools, programs, &[], None)
    }

    /// Boots a container as [`Self::start`] does, with these files on its disk before. Where it is deployed, cloud-init runs its user data
    /// at this first boot, and this returns when that has ended.
    ///
    /// # Errors
    /// If the container cannot be started.
    pub fn start_from(
        tools: &Path,
        programs: &[PathBuf],
        image: &[DiskFile],
        deployment: Option<&Deployment>,
    ) -> anyhow::Result<Option<Self>> {
        if !Self::is_possible(tools) {
            return Ok(None);
        }
        let made = tools.join("machine");
        let folder = tempfile::tempdir()?;
        let run = folder.path().join("machine");
        std::fs::create_dir(&run)?;
        let disk = Launch::new("the machine's disk", "/usr/bin/unshare", folder.path().join("disk.log"))
            .arguments(["--mount", "--propagation", "private", "sh", "-c", DISK, "sh"])
            .argument(made.join("tree"))
            .argument(&run)
            .spawn()
            .context("the machine's disk cannot be mounted")?;
        let mounted = PathBuf::from(format!("/proc/{}/root", disk.pid())).join(run.strip_prefix("/")?);
        let until = Instant::now() + BOOTS_WITHIN;
        while !mounted.join("mounted").exists() {
            assert!(Instant::now() < until, "the machine's disk is not mounted: {}", disk.log_tail());
            std::thread::sleep(LOOK_EVERY);
        }
        disk::prepare(&mounted.join("root"), image, deployment).context("the machine's disk cannot be written")?;
        let control_group = ControlGroup(format!("gpuaas-test-{}", disk.pid()));
        let process = launch(&disk, &control_group, tools, programs, folder.path())?;
        let (programs, tools) = (programs.to_vec(), tools.to_owned());
        let mut booted = Self { process, init: 0, disk, programs, tools, control_group, folder };
        booted.wait_until_up();
        Ok(Some(booted))
    }

    fn wait_until_up(&mut self) {
        let until = Instant::now() + BOOTS_WITHIN;
        while !self.is_up() {
            let log = self.process.log().to_owned();
            assert!(self.process.is_running(), "systemd-nspawn ended: {}", tail(&log, 20));
            assert!(Instant::now() < until, "the machine does not boot: {}", tail(&log, 20));
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Waits until the machine reboots by itself, and boots it from the same disk.
    ///
    /// # Panics
    /// If it does not reboot, or does not come up.
    pub async fn boot_again(&mut self) {
        let until = Instant::now() + BOOTS_WITHIN;
        let status = loop {
            match self.process.exit_status() {
                Some(status) => break status,
                None => tokio::time::sleep(LOOK_EVERY).await,
            }
            assert!(Instant::now() < until, "the machine does not reboot: {}", self.process.log_tail());
        };
        assert_eq!(status.code(), Some(REBOOTS), "{}", self.process.log_tail());
        self.boot_from_its_disk();
    }

    /// Kills all of its processes at once, as a power failure ends them, and boots it from the same disk. What they have written is there,
    /// synced or not, since the disk is in the memory of this machine.
    ///
    /// # Panics
    /// If its processes do not end, or it does not come up.
    pub async fn lose_power(&mut self) {
        kill(Pid::from_raw(self.init.cast_signed()), Signal::SIGKILL)
            .unwrap_or_else(|error| panic!("the machine's first process cannot be killed: {error}"));
        let until = Instant::now() + BOOTS_WITHIN;
        while self.process.is_running() {
            assert!(Instant::now() < until, "systemd-nspawn does not end: {}", self.process.log_tail());
            tokio::time::sleep(LOOK_EVERY).await;
        }
        // The groups of its services are left, since it was not shut down.
        self.control_group.remove();
        self.boot_from_its_disk();
    }

    fn boot_from_its_disk(&mut self) {
        self.process = launch(&self.disk, &self.control_group, &self.tools, &self.programs, self.folder.path())
            .unwrap_or_else(|error| panic!("the machine does not boot again: {error:#}"));
        self.wait_until_up();
    }

    /// A path on its disk, as this process reaches it, whether the machine is up or not.
    #[must_use]
    pub fn on_disk(&self, path: &str) -> PathBuf {
        let root = self.folder.path().join("machine/root");
        PathBuf::from(format!("/proc/{}/root{}{path}", self.disk.pid(), root.display()))
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

    /// Has this deployment's user data run at the next boot, as where a provider's installation left the old disk.
    pub fn deploy_again(&self, deployment: &Deployment) {
        for file in deployment.seed() {
            self.write(&file.path, file.mode, &file.content);
        }
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
        // What was logged until this call is in it, however busy journald is.
        self.run(&format!("journalctl --sync 2>/dev/null; journalctl --no-pager -o cat -u {unit}"))
    }
}

/// Boots the tree that is mounted by `disk`.
fn launch(
    disk: &ChildProcess,
    control_group: &ControlGroup,
    tools: &Path,
    programs: &[PathBuf],
    folder: &Path,
) -> anyhow::Result<ChildProcess> {
    let made = tools.join("machine");
    let libraries = format!("{}-linux-gnu/systemd", std::env::consts::ARCH);
    let mut launch = Launch::new("systemd-nspawn", "/usr/bin/nsenter", folder.join("console.log"))
        .argument(format!("--mount=/proc/{}/ns/mnt", disk.pid()))
        .arguments(["sh", "-c", IN_CONTROL_GROUP, "sh", &control_group.0])
        .argument(made.join("programs/usr/bin/systemd-nspawn"))
        .argument(format!("--directory={}", folder.join("machine/root").display()))
        .arguments(BOOT)
        .argument(format!("--machine={}", control_group.0))
        // The unified hierarchy is what enforces the units' device rules.
        .variable("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY", "1")
        .variable("LD_LIBRARY_PATH", made.join("programs/usr/lib").join(libraries));
    for program in programs {
        let name = program.file_name().context("a program has a name")?.to_string_lossy();
        launch = launch.argument(format!("--bind-ro={}:/usr/local/bin/{name}", program.display()));
    }
    launch.spawn().context("the container cannot be started")
}
